//! What needs an NVIDIA GPU: every op in every float type on the device, launched and replayed, against the interpreter in
//! f64. Without a driver there is nothing to run: the tests say so and pass. `make gpu-test-kernels`.

#[path = "backends/cases.rs"]
mod cases;
#[path = "cuda/harness.rs"]
mod harness;
mod support;
#[path = "cuda/toolkit.rs"]
mod toolkit;

use cases::CASES;
use oxidiff::backend::cuda::Cuda;
use oxidiff::backend::cuda::library::Search;
use oxidiff::backend::cuda::set_search;
use oxidiff::ir::parse_graph;
use oxidiff::passes::Precision;

/// The first device, or nothing where there is none.
fn device() -> Option<Cuda> {
    set_search(Search { packages: toolkit::packages(), driver: None });
    match Cuda::shared(0) {
        Ok(cuda) => Some(cuda),
        Err(e) => {
            eprintln!("skipped: {e}");
            None
        }
    }
}

#[test]
fn cases_on_a_device() {
    let Some(cuda) = device() else { return };
    let mut failures = Vec::new();
    for case in CASES {
        for text in case.texts() {
            let graph = parse_graph(&text).unwrap();
            if let Err(e) = harness::check(&cuda, &graph, Precision::Fast, case.terms, &mut |round| round < 3) {
                failures.push(format!("`{}`: {e}\n{text}", case.name));
            }
        }
    }
    println!("{}: {} cases, {} failures", cuda.device().name(), CASES.len(), failures.len());
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
