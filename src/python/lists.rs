//! `Lists`: lists, deques and sets, and whether any holds something else than when it was noted. None has a version, so that
//! every item is compared: by identity, since 1, 1.0 and True are equal and tensors do not say whether they are.

use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyList, PySet};

use super::tree::ByAddress;

/// Lists, deques and sets with what they held.
#[derive(Default)]
pub(super) struct Lists {
    lists: Vec<(Py<PyList>, Vec<Py<PyAny>>)>,
    deques: Vec<(Py<PyAny>, Vec<Py<PyAny>>)>,
    sets: Vec<(Py<PySet>, ByAddress<Py<PyAny>>)>,
}

impl Lists {
    /// Adds a list as it is now, and gives its items.
    pub fn note_list<'py>(&mut self, list: &Bound<'py, PyList>) -> Vec<Bound<'py, PyAny>> {
        let items: Vec<_> = list.iter().collect();
        self.lists.push((list.clone().unbind(), items.iter().map(|item| item.clone().unbind()).collect()));
        items
    }

    /// Adds a deque as it is now, and gives its items.
    pub fn note_deque<'py>(&mut self, deque: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let items = deque.try_iter()?.collect::<PyResult<Vec<_>>>()?;
        self.deques.push((deque.clone().unbind(), items.iter().map(|item| item.clone().unbind()).collect()));
        Ok(items)
    }

    /// Adds a set as it is now, and gives its items.
    pub fn note_set<'py>(&mut self, set: &Bound<'py, PySet>) -> Vec<Bound<'py, PyAny>> {
        let items: Vec<_> = set.iter().collect();
        let held = items.iter().map(|item| (item.as_ptr().addr(), item.clone().unbind())).collect();
        self.sets.push((set.clone().unbind(), held));
        items
    }

    /// Whether any was written.
    pub fn is_changed(&self, py: Python<'_>) -> bool {
        let is_list_changed = |(list, before): &(Py<PyList>, Vec<Py<PyAny>>)| {
            let list = list.bind(py);
            list.len() != before.len() || !list.iter().zip(before).all(|(now, before)| now.is(before))
        };
        // Where another thread writes meanwhile, an iterator says so.
        let is_same = |deque: &Bound<'_, PyAny>, before: &[Py<PyAny>]| {
            let items = deque.try_iter()?.collect::<PyResult<Vec<_>>>()?;
            PyResult::Ok(items.len() == before.len() && items.iter().zip(before).all(|(now, before)| now.is(before)))
        };
        let is_deque_changed =
            |(deque, before): &(Py<PyAny>, Vec<Py<PyAny>>)| !is_same(deque.bind(py), before).unwrap_or(false);
        let is_set_changed = |(set, before): &(Py<PySet>, ByAddress<Py<PyAny>>)| {
            let set = set.bind(py);
            set.len() != before.len() || !set.iter().all(|now| before.contains_key(&now.as_ptr().addr()))
        };
        self.lists.iter().any(is_list_changed)
            || self.deques.iter().any(is_deque_changed)
            || self.sets.iter().any(is_set_changed)
    }

    /// Shows the garbage collector what is held.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for (list, items) in &self.lists {
            visit.call(list)?;
            items.iter().try_for_each(|item| visit.call(item))?;
        }
        for (deque, items) in &self.deques {
            visit.call(deque)?;
            items.iter().try_for_each(|item| visit.call(item))?;
        }
        for (set, before) in &self.sets {
            visit.call(set)?;
            before.values().try_for_each(|item| visit.call(item))?;
        }
        Ok(())
    }
}
