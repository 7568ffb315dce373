//! What can be tuned in a program on a GPU, for `oxidiff.tune`: which of a library's ways, or which kernels, compute a step.
//! See the stub file.
//!
//! Trials run in the arena that runs of the program use. One that needs more than that, because weights and arguments lie
//! elsewhere in a run, gets [`SMALL_BYTES`] of its own at most; a program with a memory budget gets nothing. What operands
//! leave of it has copies of them, so that no run finds its own in the L2.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;

use super::device::Place;
use super::errors::{guarded, shielded};
use super::executable::Program;
use super::tune::Trial;
use oxidiff::backend::{SiteRow, Specialized};
use oxidiff::runtime;

/// Adds the names of this file to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<DeviceSite>()?;
    m.add_function(wrap_pyfunction!(device_sites, m)?)?;
    Ok(())
}

/// One choice that a program leaves open.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct DeviceSite {
    program: Arc<runtime::Program>,
    specialized: Arc<dyn Specialized>,
    place: Arc<Place>,
    index: usize,
    row: SiteRow,
    /// What was installed since.
    installed: Mutex<Option<String>>,
}

impl DeviceSite {
    fn latest(&self) -> Option<String> {
        let latest = self.installed.lock().unwrap_or_else(PoisonError::into_inner);
        latest.clone().or_else(|| self.row.installed.clone())
    }
}

/// What a trial may take of a program whose arena is smaller.
const SMALL_BYTES: usize = 64 << 20;
/// Steps of more operations are not tried on generated kernels that use no tensor cores.
const KERNEL_FLOPS: u64 = 1 << 30;

#[pymethods]
impl DeviceSite {
    #[getter]
    fn op(&self) -> &str {
        &self.row.op
    }

    #[getter]
    const fn bucket(&self) -> &'static str {
        "these sizes"
    }

    #[getter]
    fn key(&self) -> PyResult<(String, String)> {
        shielded("describing the device", || Ok(self.specialized.measured_on()))
    }

    #[getter]
    const fn count(&self) -> usize {
        self.row.count
    }

    /// Weights are packed by nobody here.
    #[getter]
    const fn kept(&self) -> usize {
        self.row.count
    }

    #[getter]
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let each = vec![self.row.flops.max(1) as f64; self.row.ways.len()];
        (each.clone(), each)
    }

    #[getter]
    fn chosen(&self) -> (usize, usize) {
        let latest = self.latest().and_then(|latest| self.row.ways.iter().position(|way| *way == latest));
        let chosen = latest.unwrap_or(self.row.chosen);
        (chosen, chosen)
    }

    #[getter]
    fn installed(&self) -> Option<String> {
        self.latest()
    }

    fn candidates(&self) -> Vec<usize> {
        let tries_own = self.row.on_tensor_cores || self.row.flops <= KERNEL_FLOPS;
        let is_tried = |way: &usize| *way + 1 < self.row.ways.len() || tries_own;
        (0..self.row.ways.len()).filter(is_tried).collect()
    }

    fn ready(&self, py: Python<'_>, seconds: f64) -> PyResult<(Vec<usize>, bool)> {
        let time = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        py.detach(|| guarded("tuning", || self.specialized.ready(self.index, time)))
    }

    fn measure(&self, py: Python<'_>, candidate: usize) -> PyResult<Option<Trial>> {
        let stream = self.place.stream(py)?;
        py.detach(|| {
            guarded("tuning", || {
                let (specialized, arena) = (&self.specialized, self.program.arena());
                let (bytes, arena_bytes) =
                    (specialized.trial_bytes(self.index, candidate), specialized.workspace().bytes());
                let (lent, lent_bytes) = if bytes <= arena_bytes {
                    (arena.lend(arena_bytes, stream)?, arena_bytes)
                } else if bytes <= SMALL_BYTES && self.program.plan.options.memory_budget.is_none() {
                    let bytes = specialized.cold_trial_bytes(self.index, candidate).clamp(bytes, SMALL_BYTES);
                    (arena.lend_once(bytes)?, bytes)
                } else {
                    return Ok(None);
                };
                // SAFETY: the memory has these bytes and is lent to this trial alone.
                let seconds = unsafe { specialized.measure(self.index, candidate, (lent.ptr(), lent_bytes), stream)? };
                Ok(seconds.map(|seconds| (seconds, 0.0, bytes)))
            })
        })
    }

    fn name(&self, packed: usize, per_call: usize) -> Option<&str> {
        // Weights are packed by nobody here.
        let _ = per_call;
        self.row.ways.get(packed).map(String::as_str)
    }

    fn install(&self, choice: &str) -> PyResult<bool> {
        shielded("choosing", || {
            let is_one = self.specialized.choose(self.index, choice);
            if is_one {
                *self.installed.lock().unwrap_or_else(PoisonError::into_inner) = Some(choice.to_owned());
            }
            Ok(is_one)
        })
    }
}

#[pyfunction]
fn device_sites(py: Python<'_>, program: &Program, sizes: Vec<i64>) -> PyResult<Vec<DeviceSite>> {
    let (inner, place) = (program.inner(), program.place());
    py.detach(|| {
        guarded("looking for choices", || {
            let specialized = inner.specialize(&sizes)?;
            let site = |(index, row)| {
                let (program, specialized, place) = (inner.clone(), specialized.clone(), place.clone());
                DeviceSite { program, specialized, place, index, row, installed: Mutex::default() }
            };
            Ok(specialized.sites().into_iter().enumerate().map(site).collect())
        })
    })
}
