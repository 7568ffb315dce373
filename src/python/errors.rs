//! One Python exception for all Rust errors; `oxidiff.errors` gives it a class per cause.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;

use oxidiff::error::{Error, Place, Result};

pyo3::create_exception!(_native, NativeError, PyException, "args: (kind, message, module, op)");

/// `(kind, place)` of an error: the kinds are those that `oxidiff.errors` maps to classes.
fn kind(error: &Error) -> (&'static str, Option<&Place>) {
    match error {
        Error::Invalid(_) | Error::Parse { .. } => ("invalid", None),
        Error::Unsupported { place, .. } => ("unsupported", Some(place)),
        Error::Shape { place, .. } => ("shape", Some(place)),
        Error::Verify { .. } | Error::Backend { .. } => ("backend", None),
        Error::Artifact { .. } => ("artifact", None),
        Error::Cache { .. } => ("cache", None),
        Error::OutOfMemory { .. } | Error::OverBudget { .. } => ("out_of_memory", None),
    }
}

/// The Python exception for `error`.
pub fn to_python(error: &Error) -> PyErr {
    let (kind, place) = kind(error);
    let (module, op) = place.map_or((String::new(), String::new()), |p| (p.module.clone(), p.op.clone()));
    NativeError::new_err((kind, error.to_string(), module, op))
}

/// Runs `f`; a panic, which is a bug of oxidiff, becomes an ordinary exception that says so.
pub fn guarded<T>(what: &str, f: impl FnOnce() -> Result<T>) -> PyResult<T> {
    shielded(what, || f().map_err(|error| to_python(&error)))
}

/// The same for what talks to Python. Every entry point goes through one of the two, but those listed in `tests/tidy.rs`.
pub fn shielded<T>(what: &str, f: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|s| (*s).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_default();
        let message = format!("internal error while {what}: {text}; please report it");
        Err(NativeError::new_err(("backend", message, String::new(), String::new())))
    })
}
