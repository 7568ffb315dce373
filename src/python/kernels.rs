//! Kernels by themselves, for measurements: what the registry lists, one of them prepared, what the machine does at most.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use oxidiff_kernels::calibrate;
use oxidiff_kernels::cpu::bench::{Bench, Run};
use oxidiff_kernels::isa::features;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::registry;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::errors::{guarded, shielded};
use oxidiff::backend::cpu::kernel_error;
use oxidiff::config::config;
use oxidiff::error::Error;

fn measured_on<'py>(py: Python<'py>, bench: &Bench) -> PyResult<Bound<'py, PyDict>> {
    let (out, sizes) = (PyDict::new(py), PyDict::new(py));
    bench.sizes.iter().try_for_each(|(name, size)| sizes.set_item(name, size))?;
    out.set_item("op", bench.op)?;
    out.set_item("sizes", sizes)?;
    out.set_item("flops", bench.flops)?;
    out.set_item("bytes", bench.bytes)?;
    Ok(out)
}

/// The registry, once the environment has had its say about what is available.
fn rows() -> Vec<registry::Row> {
    config();
    registry::rows()
}

/// Every kernel of the registry.
#[pyfunction]
pub fn kernels(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    shielded("listing kernels", || {
        let describe = |row: &registry::Row| {
            let out = PyDict::new(py);
            let benches = row.benches.iter().map(|bench| measured_on(py, bench)).collect::<PyResult<Vec<_>>>()?;
            out.set_item("name", &row.name)?;
            out.set_item("family", format!("{:?}", row.family).to_lowercase())?;
            out.set_item("isa", row.isa.name())?;
            out.set_item("dtype", format!("{:?}", row.dtype).to_lowercase())?;
            out.set_item("is_available", (row.is_available)())?;
            out.set_item("benches", benches)?;
            Ok(out)
        };
        rows().iter().map(describe).collect()
    })
}

/// A kernel with the operands of one of its benches.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct KernelBench {
    run: Mutex<Run>,
}

#[pymethods]
impl KernelBench {
    #[new]
    fn new(py: Python<'_>, kernel: &str, bench: usize) -> PyResult<Self> {
        let start = || {
            let row = rows().into_iter().find(|row| row.name == kernel && (row.is_available)());
            let row = row.ok_or_else(|| Error::invalid(format!("no kernel `{kernel}` runs on this machine")))?;
            let bench =
                row.benches.get(bench).ok_or_else(|| Error::invalid(format!("`{kernel}` has no bench {bench}")))?;
            (bench.start)().map_err(kernel_error)
        };
        Ok(Self { run: Mutex::new(py.detach(|| guarded("preparing a kernel", start))?) })
    }

    /// Seconds of one call.
    fn run(&self, py: Python<'_>) -> PyResult<f64> {
        py.detach(|| {
            let mut run = self.run.lock().unwrap_or_else(PoisonError::into_inner);
            let start = Instant::now();
            guarded("running a kernel", || run().map_err(kernel_error))?;
            Ok(start.elapsed().as_secs_f64())
        })
    }
}

/// What this machine does at most, at the instruction set in force and the present number of threads.
#[pyfunction]
pub fn ceilings(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    shielded("measuring the machine", || {
        let isa = oxidiff::target::Target::host().isa;
        let found = py.detach(|| calibrate::ceilings(Pool::global(), isa));
        let out = PyDict::new(py);
        out.set_item("isa", found.isa.name())?;
        out.set_item("threads", found.threads)?;
        out.set_item("f32_flops", found.f32_flops)?;
        out.set_item("bf16_dot_flops", found.bf16_dot_flops)?;
        out.set_item("f16_flops", found.f16_flops)?;
        out.set_item("int8_ops", found.int8_ops)?;
        out.set_item("bf16_amx_flops", found.bf16_amx_flops)?;
        out.set_item("f16_amx_flops", found.f16_amx_flops)?;
        out.set_item("int8_amx_ops", found.int8_amx_ops)?;
        out.set_item("l2_bytes", features().l2_bytes)?;
        out.set_item("l3_bytes", features().l3_bytes)?;
        for (name, at) in ["memory", "cache"].into_iter().zip(found.memory) {
            let rates = PyDict::new(py);
            rates.set_item("working_set", at.working_set)?;
            rates.set_item("read", at.read)?;
            rates.set_item("copy", at.copy)?;
            rates.set_item("stream_copy", at.stream_copy)?;
            out.set_item(name, rates)?;
        }
        Ok(out)
    })
}
