//! `Surroundings`: what code finds outside of a module and its arguments, and whether it is still the same.
//!
//! A program is right for the code that was traced: the functions and constants that `forward` and what it calls find under
//! names in files (tables of globals) and classes. Anybody may put others there, a cell of a notebook that is run again or a
//! library that replaces attention. Tables are written rarely, and [`Dicts`] shows when; only then the names are looked at,
//! since most writes are to others.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyString};

use super::errors::shielded;
use super::versions::Dicts;

/// One table: a `__dict__` of a file or a class.
struct Table {
    dict: Py<PyDict>,
    names: Vec<Name>,
    functions: Vec<Function>,
}

/// A name that is read of a table.
struct Name {
    name: Py<PyString>,
    /// `None` where nothing has that name.
    value: Option<Py<PyAny>>,
    is_forgotten: AtomicBool,
}

/// A function of a file, which may be changed in place when the file is loaded again.
struct Function {
    function: Py<PyAny>,
    code: Py<PyAny>,
    defaults: Py<PyAny>,
    is_forgotten: AtomicBool,
}

impl Name {
    fn is_same(&self, dict: &Bound<'_, PyDict>) -> PyResult<bool> {
        match (dict.get_item(&self.name)?, &self.value) {
            (Some(now), Some(before)) => is_equal(&now, before.bind(dict.py())),
            (now, before) => Ok(now.is_none() && before.is_none()),
        }
    }
}

impl Function {
    fn new(function: Bound<'_, PyAny>) -> PyResult<Self> {
        let (code, defaults) = state(&function)?;
        let (code, defaults) = (code.unbind(), defaults.unbind());
        Ok(Self { function: function.unbind(), code, defaults, is_forgotten: AtomicBool::new(false) })
    }

    fn is_same(&self, py: Python<'_>) -> PyResult<bool> {
        let (code, defaults) = state(self.function.bind(py))?;
        Ok(code.is(&self.code) && defaults.is(&self.defaults))
    }
}

impl Table {
    fn new(
        dict: Bound<'_, PyDict>,
        names: Vec<Bound<'_, PyString>>,
        functions: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let found = names.into_iter().map(|name| {
            let value = dict.get_item(&name)?.map(Bound::unbind);
            Ok(Name { name: name.unbind(), value, is_forgotten: AtomicBool::new(false) })
        });
        let names = found.collect::<PyResult<_>>()?;
        let functions = functions.into_iter().map(Function::new).collect::<PyResult<_>>()?;
        Ok(Self { names, functions, dict: dict.unbind() })
    }

    /// Calls `visit` with each name and function that is another now, until it is false.
    fn each_changed(&self, py: Python<'_>, visit: &mut Visit<'_>) -> PyResult<bool> {
        let dict = self.dict.bind(py);
        for name in &self.names {
            if name.is_forgotten.load(Ordering::Relaxed) || name.is_same(dict)? {
                continue;
            }
            let is_code = name.value.as_ref().is_some_and(|value| value.bind(py).is_callable());
            if !visit(name.name.bind(py).to_string(), is_code, &name.is_forgotten) {
                return Ok(false);
            }
        }
        for function in &self.functions {
            if function.is_forgotten.load(Ordering::Relaxed) || function.is_same(py)? {
                continue;
            }
            if !visit(function.function.bind(py).to_string(), true, &function.is_forgotten) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.dict)?;
        self.names.iter().try_for_each(|name| visit.call(&name.value))?;
        self.functions.iter().try_for_each(|function| {
            visit.call(&function.function)?;
            visit.call(&function.code)?;
            visit.call(&function.defaults)
        })
    }
}

fn state<'py>(function: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = function.py();
    Ok((function.getattr(intern!(py, "__code__"))?, function.getattr(intern!(py, "__defaults__"))?))
}

/// The same object, or an equal number or text.
fn is_equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> PyResult<bool> {
    if a.is(b) {
        return Ok(true);
    }
    let is_value = a.is_exact_instance_of::<PyInt>()
        || a.is_exact_instance_of::<PyFloat>()
        || a.is_exact_instance_of::<PyString>()
        || a.is_exact_instance_of::<PyBool>();
    Ok(is_value && a.get_type().is(b.get_type()) && a.eq(b)?)
}

/// Takes a name, whether it is of a function or class, and whether it is forgotten; gives whether to go on.
type Visit<'a> = dyn FnMut(String, bool, &AtomicBool) -> bool + 'a;

/// Tables with what is read of them, as it was when this object was made.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Surroundings {
    tables: Vec<Table>,
    /// Writes since everything was as noted.
    dicts: Mutex<Arc<Dicts>>,
}

type Given<'py> = (Bound<'py, PyDict>, Vec<Bound<'py, PyString>>, Vec<Bound<'py, PyAny>>);

#[pymethods]
impl Surroundings {
    /// Tables, each with the names that are read of it and functions of the file.
    #[new]
    fn new(py: Python<'_>, tables: Vec<Given<'_>>) -> PyResult<Self> {
        shielded("noting what code finds", || {
            let dicts = noted(py, tables.iter().map(|(dict, ..)| dict))?;
            let tables = tables.into_iter().map(|(dict, names, functions)| Table::new(dict, names, functions));
            Ok(Self { tables: tables.collect::<PyResult<_>>()?, dicts: Mutex::new(Arc::new(dicts)) })
        })
    }

    /// Whether something else is found now.
    pub fn is_changed(&self, py: Python<'_>) -> PyResult<bool> {
        shielded("looking at what code finds", || {
            let dicts = self.dicts();
            if !Dicts::is_available(py) {
                return self.is_any_changed(py, 0..self.tables.len());
            }
            if !dicts.is_changed(py) {
                return Ok(false);
            }
            // Noted first and compared then: a write in between shows.
            let fresh = noted(py, self.tables.iter().map(|table| table.dict.bind(py)))?;
            let is_changed = self.is_any_changed(py, dicts.changed(py).into_iter())?;
            if !is_changed {
                *self.dicts.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(fresh);
            }
            Ok(is_changed)
        })
    }

    /// The names under which something else is found now, other than functions and classes unless `with_code`. They are not
    /// looked at any more.
    fn forget_changed(&self, py: Python<'_>, with_code: bool) -> PyResult<Vec<String>> {
        shielded("looking at what code finds", || {
            let mut found = Vec::new();
            for table in &self.tables {
                table.each_changed(py, &mut |name, is_code, is_forgotten| {
                    if with_code || !is_code {
                        is_forgotten.store(true, Ordering::Relaxed);
                        found.push(name);
                    }
                    true
                })?;
            }
            Ok(found)
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tables.iter().try_for_each(|table| table.traverse(&visit))?;
        // Held only while a pointer is copied.
        self.dicts.try_lock().map_or(Ok(()), |dicts| dicts.traverse(&visit))
    }
}

impl Surroundings {
    fn dicts(&self) -> Arc<Dicts> {
        self.dicts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn is_any_changed(&self, py: Python<'_>, mut at: impl Iterator<Item = usize>) -> PyResult<bool> {
        at.try_fold(false, |found, i| Ok(found || !self.tables[i].each_changed(py, &mut |_, _, _| false)?))
    }
}

fn noted<'a, 'py: 'a>(py: Python<'py>, tables: impl Iterator<Item = &'a Bound<'py, PyDict>>) -> PyResult<Dicts> {
    let mut dicts = Dicts::new(py);
    for table in tables {
        dicts.note(table)?;
    }
    dicts.close();
    Ok(dicts)
}
