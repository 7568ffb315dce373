//! What of CUDA Python asks for: where the libraries are, and what was found.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::errors::guarded;
use crate::backend::cuda::library::Search;
use crate::backend::cuda::{device, found, set_search};

/// What was found of each NVIDIA library beside the `torch` package in folder `torch`, and of the device: subject, whether
/// it is there, and what or why not. The first call of a process decides where libraries are looked for.
#[pyfunction]
pub(super) fn cuda_findings(torch: PathBuf) -> PyResult<Vec<(&'static str, bool, String)>> {
    guarded("looking for NVIDIA's libraries", || {
        set_search(Search::beside_torch(&torch));
        let libraries = found();
        let mut lines: Vec<(&'static str, bool, String)> = Vec::new();
        for (name, finding) in libraries.findings() {
            match finding {
                Ok(found) => lines.push((name, true, found.to_string())),
                Err(reason) => lines.push((name, false, reason.clone())),
            }
        }
        if libraries.driver.is_ok() {
            lines.push(match device(0) {
                Ok(device) => ("cuda device", true, format!("{} (sm_{})", device.name(), device.arch())),
                Err(e) => ("cuda device", false, e.to_string()),
            });
        }
        Ok(lines)
    })
}
