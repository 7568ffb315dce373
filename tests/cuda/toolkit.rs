//! What the CUDA tests work with: PyTorch's NVRTC, if this machine has it, and kernels of test graphs.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::path::PathBuf;

use oxidiff::backend::cuda::library::Search;
use oxidiff::backend::cuda::lower::Lowered;
use oxidiff::backend::cuda::nvrtc::Nvrtc;
use oxidiff::backend::cuda::{compiler, set_search};
use oxidiff::ir::Graph;
use oxidiff::passes::Precision;
use oxidiff::plan::MemoryMode;

use crate::support::plan_of;

/// `nvidia` packages of the virtual environment that is active, or of the repository's own.
pub fn packages() -> Vec<PathBuf> {
    let active = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from);
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".venv");
    let mut found = Vec::new();
    for venv in active.into_iter().chain([own]) {
        let versions = std::fs::read_dir(venv.join("lib")).into_iter().flatten().flatten();
        found.extend(versions.map(|v| v.path().join("site-packages/nvidia")).filter(|p| p.is_dir()));
    }
    found
}

/// NVRTC, or the reason why there is none: the test then has nothing to check.
pub fn nvrtc() -> Option<Nvrtc> {
    set_search(Search { packages: packages(), driver: None });
    match compiler() {
        Ok(nvrtc) => Some(nvrtc),
        Err(e) => {
            eprintln!("skipped: {e} (needs the CUDA build of PyTorch in $VIRTUAL_ENV)");
            None
        }
    }
}

/// Kernels of a graph, optimized as a model is.
pub fn lowered(graph: Graph, precision: Precision) -> Lowered {
    Lowered::new(&plan_of(graph, precision, MemoryMode::Fast)).expect("every step has kernels")
}
