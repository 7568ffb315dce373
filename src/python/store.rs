//! Artifacts, files and the tuning database for `oxidiff.store`; see the stub file.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::errors::{guarded, shielded};
use oxidiff::store::artifact::{self, Section};
use oxidiff::store::tuning::{Database, Entry, Key};
use oxidiff::store::{files, kept};

/// Adds the names of this file to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<FileLock>()?;
    m.add_class::<TuningDatabase>()?;
    m.add_function(wrap_pyfunction!(encode_artifact, m)?)?;
    m.add_function(wrap_pyfunction!(decode_artifact, m)?)?;
    m.add_function(wrap_pyfunction!(read_file, m)?)?;
    m.add_function(wrap_pyfunction!(write_file, m)?)?;
    m.add_function(wrap_pyfunction!(sweep_folder, m)?)?;
    m.add_function(wrap_pyfunction!(is_whole, m)?)?;
    m.add_function(wrap_pyfunction!(cache_dir, m)?)?;
    Ok(())
}

#[pyfunction]
fn encode_artifact<'py>(py: Python<'py>, sections: Vec<(String, Vec<u8>)>) -> PyResult<Bound<'py, PyBytes>> {
    let sections: Vec<Section> = sections.into_iter().map(|(name, data)| Section { name, data }).collect();
    let file = py.detach(|| guarded("writing an artifact", || artifact::encode(&sections)))?;
    Ok(PyBytes::new(py, &file))
}

#[pyfunction]
fn decode_artifact<'py>(py: Python<'py>, data: &[u8]) -> PyResult<Bound<'py, PyDict>> {
    let sections = py.detach(|| guarded("reading an artifact", || artifact::decode(data)))?;
    let out = PyDict::new(py);
    for section in sections {
        out.set_item(section.name, PyBytes::new(py, &section.data))?;
    }
    Ok(out)
}

#[pyfunction]
fn read_file(py: Python<'_>, path: PathBuf) -> PyResult<Option<Bound<'_, PyBytes>>> {
    let data = py.detach(|| guarded("reading a file", || files::read(&path, artifact::MAX_BYTES)))?;
    Ok(data.map(|d| PyBytes::new(py, &d)))
}

#[pyfunction]
fn write_file(py: Python<'_>, path: PathBuf, data: &[u8]) -> PyResult<()> {
    py.detach(|| guarded("writing a file", || files::write(&path, data)))
}

#[pyfunction]
fn sweep_folder(py: Python<'_>, folder: PathBuf) -> PyResult<()> {
    shielded("sweeping a folder", || {
        py.detach(|| files::sweep(&folder));
        Ok(())
    })
}

#[pyfunction]
fn is_whole(data: &[u8]) -> PyResult<bool> {
    shielded("checking what was kept", || Ok(kept::is_whole(data)))
}

#[pyfunction]
fn cache_dir() -> Option<PathBuf> {
    oxidiff::config::cache_dir()
}

/// A lock between processes.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct FileLock {
    lock: Mutex<Option<files::Lock>>,
}

#[pymethods]
impl FileLock {
    #[new]
    #[pyo3(signature = (path, patience_s=2.0))]
    fn new(py: Python<'_>, path: PathBuf, patience_s: f64) -> PyResult<Self> {
        let patience = Duration::try_from_secs_f64(patience_s).unwrap_or_default();
        let lock = py.detach(|| guarded("locking a file", || files::Lock::take(&path, patience)))?;
        Ok(Self { lock: Mutex::new(Some(lock)) })
    }

    fn release(&self) {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    const fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.release();
    }
}

/// The database of measured choices.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct TuningDatabase {
    database: Database,
}

type Columns = (String, String, String, String, String, f64, f64, i64, i64);

fn columns(entry: Entry) -> Columns {
    let Key { op, bucket, device, library } = entry.key;
    let (seconds, default_seconds) = (entry.seconds, entry.default_seconds);
    (op, bucket, device, library, entry.choice, seconds, default_seconds, entry.workspace_bytes, entry.measured_at)
}

#[pymethods]
impl TuningDatabase {
    #[new]
    #[pyo3(signature = (path, *, read_only=false))]
    fn new(py: Python<'_>, path: PathBuf, read_only: bool) -> PyResult<Self> {
        let open = |path: &Path| if read_only { Database::open_read_only(path) } else { Database::open(path) };
        Ok(Self { database: py.detach(|| guarded("opening the tuning database", || open(&path)))? })
    }

    #[getter]
    fn complaint(&self) -> Option<String> {
        self.database.complaint.clone()
    }

    fn entries(&self, py: Python<'_>) -> PyResult<Vec<Columns>> {
        let entries = py.detach(|| guarded("reading the tuning database", || self.database.entries()))?;
        Ok(entries.into_iter().map(columns).collect())
    }

    fn add(&self, py: Python<'_>, entries: Vec<Columns>) -> PyResult<()> {
        let entries: Vec<Entry> = entries
            .into_iter()
            .map(|(op, bucket, device, library, choice, seconds, default_seconds, workspace_bytes, measured_at)| {
                Entry {
                    key: Key { op, bucket, device, library },
                    choice,
                    seconds,
                    default_seconds,
                    workspace_bytes,
                    measured_at,
                }
            })
            .collect();
        py.detach(|| guarded("writing the tuning database", || self.database.add(&entries)))
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| guarded("clearing the tuning database", || self.database.clear()))
    }
}
