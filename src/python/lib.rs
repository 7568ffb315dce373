//! The Python extension `oxidiff._native`: the only place that names pyo3.
//!
//! [`builder`] takes a captured graph in, [`executable`] holds a program with its weights and runs it, [`tensor`] moves
//! tensors across by DLPack, [`device`] asks torch about a GPU, [`store`] reads and writes what outlives the process,
//! [`tune`] and [`sites`] time what a program leaves open, [`tree`] reads what a module computes, [`watch`] notices changes
//! of it by the [`versions`] of its dictionaries and the [`layout`] of its tensors, [`surroundings`] what its code finds outside
//! of it, [`kernels`] measures single kernels, [`errors`] turns Rust errors into one Python exception with a kind. Forked
//! children find no lock held ([`oxidiff_kernels::fork`]). The GIL is released while compiling and while kernels
//! run. `python/oxidiff/_native.pyi` documents every name for Python.
//!
//! Invariant: no panic crosses: entry points go through [`errors::guarded`] or [`errors::shielded`], but those that hand out or
//! put down a value, which `tests/tidy.rs` lists.

mod addresses;
mod attributes;
mod builder;
mod call;
mod cuda;
mod device;
mod errors;
mod executable;
mod kernels;
mod layout;
mod lists;
mod memory;
mod scan;
mod sites;
mod store;
mod surroundings;
mod tensor;
mod tokens;
mod tree;
mod tune;
mod versions;
mod watch;

use pyo3::prelude::*;

use oxidiff::{config, passes};

/// The extension module.
#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    // A folder that is relative is so to where the process is now.
    let _ = config::cache_dir();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("NativeError", m.py().get_type::<errors::NativeError>())?;
    m.add_class::<builder::GraphBuilder>()?;
    m.add_class::<executable::Program>()?;
    m.add_class::<executable::Executable>()?;
    m.add_class::<tree::Tree>()?;
    m.add_class::<watch::Watch>()?;
    m.add_class::<surroundings::Surroundings>()?;
    m.add_function(wrap_pyfunction!(call::key_of, m)?)?;
    m.add_function(wrap_pyfunction!(executable::compile, m)?)?;
    m.add_function(wrap_pyfunction!(executable::set_num_threads, m)?)?;
    m.add_function(wrap_pyfunction!(executable::target, m)?)?;
    m.add_function(wrap_pyfunction!(executable::devices, m)?)?;
    m.add_function(wrap_pyfunction!(executable::device_named, m)?)?;
    m.add_function(wrap_pyfunction!(executable::profile_of, m)?)?;
    m.add_function(wrap_pyfunction!(executable::stamp, m)?)?;
    m.add_function(wrap_pyfunction!(executable::derived_bytes, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_archs, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_findings, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_kernels, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_spills, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_graphs, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_plans, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_open, m)?)?;
    m.add_function(wrap_pyfunction!(cuda::cuda_emulate, m)?)?;
    m.add_function(wrap_pyfunction!(is_on, m)?)?;
    m.add_function(wrap_pyfunction!(knobs, m)?)?;
    #[cfg(unix)]
    oxidiff_kernels::fork::register();
    store::register(m)?;
    tune::register(m)?;
    sites::register(m)?;
    m.add_class::<kernels::KernelBench>()?;
    m.add_function(wrap_pyfunction!(kernels::kernels, m)?)?;
    m.add_function(wrap_pyfunction!(kernels::ceilings, m)?)?;
    m.add_function(wrap_pyfunction!(fill_cells, m)?)?;
    Ok(())
}

/// Fills what is looked up in Python once. While a thread does that, Python may let others in; a process that one of them forks
/// would find the cell being filled, by nobody, and wait for ever. Not as this is imported: that needs no PyTorch.
#[pyfunction]
fn fill_cells(py: Python<'_>) -> PyResult<()> {
    errors::shielded("looking up what is looked up once", || {
        // What cannot be looked up now is asked for again, and told, where it is needed.
        let _ = attributes::Classes::get(py);
        let _ = call::tensor_types(py);
        let _ = device::torch_dtypes(py);
        let _ = layout::object_setattr(py);
        let _ = layout::DictLayout::get(py);
        let _ = layout::TensorLayout::get(py);
        let _ = tensor::Exchange::get(py);
        let _ = versions::Watcher::get(py);
        Ok(())
    })
}

/// Whether that flag of the environment is on now.
#[pyfunction]
fn is_on(name: &str) -> bool {
    config::is_on(name)
}

/// Name, default and meaning of every environment variable that is read, and what is wrong with its value.
#[pyfunction]
fn knobs() -> Vec<(&'static str, &'static str, &'static str, Option<String>)> {
    let complaint = |knob: &config::Knob| config::complaint(knob).or_else(|| passes::complaint(knob.name));
    config::KNOBS.iter().map(|k| (k.name, k.default, k.doc, complaint(k))).collect()
}
