//! What a fork does to the locks of the core; see [`oxidiff_kernels::fork`].
//!
//! The handlers are registered as the extension is imported, before those of the package: Python calls what runs before a fork
//! in the opposite order, so that the end of a trace, which compiles, is waited for while the gate is still open. The GIL stays
//! held meanwhile: who came in with it would wait at the gate and never give it back. Nobody inside asks for it.

use oxidiff_kernels::fork;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::errors::shielded;

/// Has Python call the handlers below around every fork, where it can fork.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    let handlers = PyDict::new(m.py());
    handlers.set_item("before", wrap_pyfunction!(before_fork, m)?)?;
    handlers.set_item("after_in_parent", wrap_pyfunction!(after_fork_in_parent, m)?)?;
    handlers.set_item("after_in_child", wrap_pyfunction!(after_fork_in_child, m)?)?;
    let os = m.py().import("os")?;
    if os.hasattr("register_at_fork")? {
        os.call_method("register_at_fork", (), Some(&handlers))?;
    }
    Ok(())
}

#[pyfunction]
fn before_fork() -> PyResult<()> {
    shielded("waiting for locks before a fork", || {
        fork::before();
        Ok(())
    })
}

#[pyfunction]
fn after_fork_in_parent() -> PyResult<()> {
    shielded("going on after a fork", || {
        fork::after_in_parent();
        Ok(())
    })
}

#[pyfunction]
fn after_fork_in_child() -> PyResult<()> {
    shielded("starting as a fork", || {
        fork::after_in_child();
        Ok(())
    })
}
