//! `Surroundings`: what code finds outside of a module and its arguments, and whether it is still the same.
//!
//! A program is right for the code that was traced: the functions and constants that `forward` and what it calls find under
//! names in files (tables of globals) and classes. Anybody may put others there, a cell of a notebook that is run again or a
//! library that replaces attention. Tables are written rarely, and [`Dicts`] shows when; only then the names are looked at,
//! since most writes are to others. What is found may be a dictionary, list, set or object itself: its contents are followed
//! in the same way, lists and sets by comparing them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyDict, PyFrozenSet, PyList, PySet, PyString, PyTuple};

use super::attributes::{Classes, Kind};
use super::errors::shielded;
use super::lists::{is_equal, is_value, plain_attribute, tuple_of};
use super::versions::Dicts;

/// One table: a `__dict__` of a file or a class, or what is found there.
struct Table {
    dict: Py<PyDict>,
    names: Vec<Name>,
    functions: Vec<Function>,
    /// Whether it is found somewhere: what forward puts there is no change of the code.
    is_inside: bool,
    /// Where all of it is read: what it held.
    whole: Option<Whole>,
}

/// All that a dictionary held. Of what is added, numbers and texts count alone: others are mostly kept results.
struct Whole {
    copy: Py<PyDict>,
    is_forgotten: AtomicBool,
}

/// A list, deque, set, array or variable.
struct Items {
    list: Py<PyAny>,
    kind: Kind,
    copy: Py<PyAny>,
    is_forgotten: AtomicBool,
}

/// An object that keeps its attributes in slots, with those that are read; or a variable around a function.
struct Slots {
    object: Py<PyAny>,
    names: Vec<Name>,
}

/// A name that is read of a table or an object.
struct Name {
    name: Py<PyAny>,
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
    fn new(name: Bound<'_, PyAny>, value: Option<Bound<'_, PyAny>>) -> Self {
        Self { name: name.unbind(), value: value.map(Bound::unbind), is_forgotten: AtomicBool::new(false) }
    }

    /// Whether this is still its value.
    fn is_same(&self, now: Option<Bound<'_, PyAny>>) -> PyResult<bool> {
        match (now, &self.value) {
            (Some(now), Some(before)) => is_equal(&now, before.bind(now.py())),
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
    fn new(dict: Bound<'_, PyDict>, names: Vec<Bound<'_, PyAny>>, functions: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let found = names.into_iter().map(|name| {
            let value = dict.get_item(&name)?;
            Ok(Name::new(name, value))
        });
        let names = found.collect::<PyResult<_>>()?;
        let functions = functions.into_iter().map(Function::new).collect::<PyResult<_>>()?;
        Ok(Self { names, functions, dict: dict.unbind(), is_inside: false, whole: None })
    }

    /// Of a dictionary that is found somewhere, with the names that are read of it: all where there are none given.
    fn inside(dict: &Bound<'_, PyDict>, names: Option<Vec<Bound<'_, PyAny>>>) -> PyResult<Self> {
        let copy = dict.copy()?;
        let is_whole = names.is_none();
        let names = names.unwrap_or_else(|| copy.iter().map(|(name, _)| name).collect());
        let mut table = Self::new(dict.clone(), names, Vec::new())?;
        table.is_inside = true;
        table.whole = is_whole.then(|| Whole { copy: copy.unbind(), is_forgotten: AtomicBool::new(false) });
        Ok(table)
    }

    /// Calls `visit` with each name and function that is another now, until it is false.
    fn each_changed(&self, py: Python<'_>, visit: &mut Visit<'_>) -> PyResult<bool> {
        let dict = self.dict.bind(py);
        for name in &self.names {
            if name.is_forgotten.load(Ordering::Relaxed) || name.is_same(dict.get_item(&name.name)?)? {
                continue;
            }
            let is_code = !self.is_inside && name.value.as_ref().is_some_and(|value| value.bind(py).is_callable());
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
        let Some(whole) = self.whole.as_ref().filter(|whole| !whole.is_forgotten.load(Ordering::Relaxed)) else {
            return Ok(true);
        };
        // Of a copy: comparing names may run code that writes to it.
        for (name, value) in dict.copy()?.iter() {
            if is_value(&value) && !whole.copy.bind(py).contains(&name)? {
                return Ok(visit(name.to_string(), false, &whole.is_forgotten));
            }
        }
        Ok(true)
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.dict)?;
        visit.call(self.whole.as_ref().map(|whole| &whole.copy))?;
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

impl Items {
    fn new(list: Bound<'_, PyAny>) -> PyResult<Self> {
        let py = list.py();
        let kind = Classes::get(py)?.kind_of(&list.get_type());
        let copy = match list.cast::<PySet>() {
            Ok(set) => PyFrozenSet::new(py, set.iter())?.into_any(),
            Err(_) => tuple_of(&list, kind)?.into_any(),
        };
        Ok(Self { list: list.unbind(), kind, copy: copy.unbind(), is_forgotten: AtomicBool::new(false) })
    }

    fn is_same(&self, py: Python<'_>) -> PyResult<bool> {
        let (list, copy) = (self.list.bind(py), self.copy.bind(py));
        let Ok(copy) = copy.cast::<PyTuple>() else {
            return list.eq(copy);
        };
        match list.cast::<PyList>() {
            Ok(list) => all_equal(list.iter(), copy),
            // Where another thread writes meanwhile, an iterator of a deque says so.
            Err(_) => tuple_of(list, self.kind).map_or(Ok(false), |now| {
                // What collects for each call anew, and found nothing to collect.
                let is_empty = |held: &Bound<'_, PyTuple>| {
                    held.len() == 1
                        && held
                            .get_item(0)
                            .is_ok_and(|value| value.cast_exact::<PyDict>().is_ok_and(|dict| dict.is_empty()))
                };
                let is_renewed = self.kind == Kind::Variable && is_empty(&now) && is_empty(copy);
                Ok(is_renewed || all_equal(now.iter(), copy)?)
            }),
        }
    }
}

fn all_equal<'py>(
    now: impl ExactSizeIterator<Item = Bound<'py, PyAny>>,
    before: &Bound<'py, PyTuple>,
) -> PyResult<bool> {
    if now.len() != before.len() {
        return Ok(false);
    }
    now.zip(before.iter()).try_fold(true, |same, (a, b)| Ok(same && is_equal(&a, &b)?))
}

impl Slots {
    fn new(object: Bound<'_, PyAny>, names: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let found = names.into_iter().map(|name| {
            let value = plain_attribute(&object, name.cast::<PyString>()?)?;
            Ok(Name::new(name, value))
        });
        Ok(Self { names: found.collect::<PyResult<_>>()?, object: object.unbind() })
    }

    /// Calls `visit` with each slot that holds something else now, until it is false; gives whether it was.
    fn each_changed(&self, py: Python<'_>, visit: &mut Visit<'_>) -> PyResult<bool> {
        for name in &self.names {
            if name.is_forgotten.load(Ordering::Relaxed)
                || name.is_same(plain_attribute(self.object.bind(py), name.name.bind(py).cast::<PyString>()?)?)?
            {
                continue;
            }
            if !visit(name.name.bind(py).to_string(), false, &name.is_forgotten) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Takes a name, whether it is of a function or class, and whether it is forgotten; gives whether to go on.
type Visit<'a> = dyn FnMut(String, bool, &AtomicBool) -> bool + 'a;

/// Tables with what is read of them, as it was when this object was made.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Surroundings {
    tables: Vec<Table>,
    lists: Vec<Items>,
    slots: Vec<Slots>,
    /// Writes since everything was as noted.
    dicts: Mutex<Arc<Dicts>>,
}

type Contents<'py> = (Option<Bound<'py, PyAny>>, Bound<'py, PyAny>, Option<Vec<Bound<'py, PyAny>>>);
type Given<'py> = (Bound<'py, PyDict>, Vec<Bound<'py, PyAny>>, Vec<Bound<'py, PyAny>>);

#[pymethods]
impl Surroundings {
    /// Tables, each with the names that are read of it and functions of the file; then dictionaries, lists and sets that are
    /// found there, each after the object of whose attributes it is the dictionary, and with the names that are read of it if
    /// these are not all. An object that has slots stands for its own dictionary.
    #[new]
    fn new<'py>(py: Python<'py>, tables: Vec<Given<'py>>, contents: Vec<Contents<'py>>) -> PyResult<Self> {
        shielded("noting what code finds", || {
            let (mut dicts, mut found, mut lists, mut slots) = (Dicts::new(py), Vec::new(), Vec::new(), Vec::new());
            for (dict, names, functions) in tables {
                dicts.note(&dict)?;
                found.push(Table::new(dict, names, functions)?);
            }
            for (owner, list, names) in contents {
                match (list.cast::<PyDict>(), owner) {
                    (Ok(dict), Some(owner)) => dicts.note_attributes(&owner, dict)?,
                    (Ok(dict), None) => dicts.note(dict)?,
                    (Err(_), Some(owner)) => {
                        slots.push(Slots::new(owner, names.unwrap_or_default())?);
                        continue;
                    }
                    (Err(_), None) => {
                        lists.push(Items::new(list)?);
                        continue;
                    }
                }
                found.push(Table::inside(list.cast::<PyDict>()?, names)?);
            }
            dicts.close();
            Ok(Self { tables: found, lists, slots, dicts: Mutex::new(Arc::new(dicts)) })
        })
    }

    /// Whether something else is found now.
    pub fn is_changed(&self, py: Python<'_>) -> PyResult<bool> {
        shielded("looking at what code finds", || {
            if self.each_changed_item(py, &mut |_, _, _| false)? {
                return Ok(true);
            }
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
                let fresh = Arc::new(fresh);
                let before = {
                    let mut dicts = self.dicts.lock().unwrap_or_else(PoisonError::into_inner);
                    std::mem::replace(&mut *dicts, fresh)
                };
                // Without the lock: a dictionary that goes may run code, which lets other threads through.
                drop(before);
            }
            Ok(is_changed)
        })
    }

    /// The names under which something else is found now, other than functions and classes unless `with_code`.
    fn changed(&self, py: Python<'_>, with_code: bool) -> PyResult<Vec<String>> {
        shielded("looking at what code finds", || self.names_changed(py, with_code, None, &|_| ()))
    }

    /// As `changed`, and of the names in files and classes `only` these. They are not looked at any more, by nobody who has this
    /// object: modules of one structure share it.
    #[pyo3(signature = (with_code, only=None))]
    fn forget_changed(&self, py: Python<'_>, with_code: bool, only: Option<Vec<String>>) -> PyResult<Vec<String>> {
        shielded("looking at what code finds", || {
            let forget = |is_forgotten: &AtomicBool| is_forgotten.store(true, Ordering::Relaxed);
            self.names_changed(py, with_code, only.as_deref(), &forget)
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tables.iter().try_for_each(|table| table.traverse(&visit))?;
        for items in &self.lists {
            visit.call(&items.list)?;
            visit.call(&items.copy)?;
        }
        for slots in &self.slots {
            visit.call(&slots.object)?;
            slots.names.iter().try_for_each(|name| visit.call(&name.value))?;
        }
        // Held only while a pointer is copied.
        self.dicts.try_lock().map_or(Ok(()), |dicts| dicts.traverse(&visit))
    }
}

/// What a list or set is, and what is first in a list; what is in it may be tensors, and long.
fn kind(items: &Bound<'_, PyAny>) -> PyResult<String> {
    let name = items.get_type().name()?;
    match items.cast::<PyList>().ok().and_then(|list| list.get_item(0).ok()) {
        Some(first) => Ok(format!("a {name} of {}", first.get_type().name()?)),
        None => Ok(format!("a {name}")),
    }
}

impl Surroundings {
    fn dicts(&self) -> Arc<Dicts> {
        self.dicts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Calls `visit` with each list, set and slot that is another now, until it is false; gives whether it was.
    fn each_changed_item(&self, py: Python<'_>, visit: &mut Visit<'_>) -> PyResult<bool> {
        for items in &self.lists {
            if items.is_forgotten.load(Ordering::Relaxed) || items.is_same(py)? {
                continue;
            }
            if !visit(kind(items.list.bind(py))?, false, &items.is_forgotten) {
                return Ok(true);
            }
        }
        for slots in &self.slots {
            if slots.each_changed(py, visit)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The names of `forget_changed`; calls `note` with the flag of each that says whether it is forgotten.
    fn names_changed(
        &self,
        py: Python<'_>,
        with_code: bool,
        only: Option<&[String]>,
        note: &dyn Fn(&AtomicBool),
    ) -> PyResult<Vec<String>> {
        let mut found = Vec::new();
        let mut add = |name: String, is_code: bool, is_forgotten: &AtomicBool| {
            if with_code || !is_code {
                note(is_forgotten);
                found.push(name);
            }
            true
        };
        self.each_changed_item(py, &mut add)?;
        for table in &self.tables {
            table.each_changed(py, &mut |name, is_code, is_forgotten| {
                let is_other = !table.is_inside && only.is_some_and(|only| !only.contains(&name));
                is_other || add(name, is_code, is_forgotten)
            })?;
        }
        Ok(found)
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
