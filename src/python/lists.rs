//! `Lists`: what holds something without a version: lists, deques, sets, arrays of numbers, objects with slots, variables of
//! threads and contexts. Whether it holds something else than when it was noted is seen by comparing every item: by identity,
//! or as equal numbers and texts of one type, since 1, 1.0 and True are equal and tensors do not say whether they are.

use pyo3::exceptions::{PyAttributeError, PyLookupError, PyValueError};
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PySet, PySlice, PyString, PyTuple};
use pyo3::{ffi, intern};

use super::addresses::ByAddress;
use super::attributes::Kind;

/// Bytes of an array that are compared; of a longer one every n-th number is, [`SAMPLES`] in all.
const MAX_BYTES: usize = 1 << 20;
const SAMPLES: usize = 4096;

/// Something with what it held.
struct Held {
    holder: Py<PyAny>,
    how: How,
    before: Vec<Py<PyAny>>,
}

/// What of something is read.
enum How {
    Items(Kind),
    Slots(Vec<Py<PyString>>),
    /// The keys of a dictionary, whose order may change without a write to it.
    Keys,
}

/// Lists and the like with what they held.
#[derive(Default)]
pub(super) struct Lists {
    held: Vec<Held>,
    sets: Vec<(Py<PySet>, ByAddress<Py<PyAny>>)>,
}

impl Lists {
    /// Adds a list, deque, array or variable as it is now, and gives what is in it.
    pub fn note_items<'py>(&mut self, holder: &Bound<'py, PyAny>, kind: Kind) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.note(holder, How::Items(kind))
    }

    /// Adds an object as it is now, and gives what is in these slots of it.
    pub fn note_slots<'py>(
        &mut self,
        object: &Bound<'py, PyAny>,
        names: Vec<Py<PyString>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.note(object, How::Slots(names))
    }

    /// Adds the order of a dictionary, and gives its keys in it.
    pub fn note_order<'py>(&mut self, dict: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.note(dict, How::Keys)
    }

    /// Adds a set as it is now, and gives its items.
    pub fn note_set<'py>(&mut self, set: &Bound<'py, PySet>) -> Vec<Bound<'py, PyAny>> {
        let items: Vec<_> = set.iter().collect();
        let held = items.iter().map(|item| (item.as_ptr().addr(), item.clone().unbind())).collect();
        self.sets.push((set.clone().unbind(), held));
        items
    }

    fn note<'py>(&mut self, holder: &Bound<'py, PyAny>, how: How) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let items = how.read(holder)?;
        let before = items.iter().map(|item| item.clone().unbind()).collect();
        self.held.push(Held { holder: holder.clone().unbind(), how, before });
        Ok(items)
    }

    /// Whether any was written.
    pub fn is_changed(&self, py: Python<'_>) -> bool {
        let is_set_changed = |(set, before): &(Py<PySet>, ByAddress<Py<PyAny>>)| {
            let set = set.bind(py);
            set.len() != before.len() || !set.iter().all(|now| before.contains_key(&now.as_ptr().addr()))
        };
        self.held.iter().any(|held| held.is_changed(py)) || self.sets.iter().any(is_set_changed)
    }

    /// Shows the garbage collector what is held.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        for held in &self.held {
            visit.call(&held.holder)?;
            held.before.iter().try_for_each(|item| visit.call(item))?;
        }
        for (set, before) in &self.sets {
            visit.call(set)?;
            before.values().try_for_each(|item| visit.call(item))?;
        }
        Ok(())
    }
}

impl Held {
    fn is_changed(&self, py: Python<'_>) -> bool {
        let holder = self.holder.bind(py);
        if let Ok(list) = holder.cast::<PyList>() {
            let is_same = |(now, before): (Bound<'_, PyAny>, &Py<PyAny>)| now.is(before);
            return list.len() != self.before.len() || !list.iter().zip(&self.before).all(is_same);
        }
        let is_same = |now: &Bound<'_, PyAny>, before: &Py<PyAny>| is_equal(now, before.bind(py)).unwrap_or(false);
        // Where another thread writes meanwhile, an iterator says so.
        self.how.read(holder).map_or(true, |items| {
            items.len() != self.before.len()
                || !items.iter().zip(&self.before).all(|(now, before)| is_same(now, before))
        })
    }
}

impl How {
    fn read<'py>(&self, holder: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        match self {
            Self::Items(kind) => items_of(holder, *kind),
            Self::Keys => holder.try_iter()?.collect(),
            Self::Slots(names) => {
                let py = holder.py();
                names
                    .iter()
                    .map(|name| Ok(plain_attribute(holder, name.bind(py))?.unwrap_or_else(|| absent(py))))
                    .collect()
            }
        }
    }
}

/// What is in a list, deque, array or variable now.
pub(super) fn items_of<'py>(holder: &Bound<'py, PyAny>, kind: Kind) -> PyResult<Vec<Bound<'py, PyAny>>> {
    match kind {
        Kind::Array => contents(holder),
        Kind::Variable => match holder.call_method0(intern!(holder.py(), "get")) {
            Err(error) if error.is_instance_of::<PyLookupError>(holder.py()) => Ok(vec![absent(holder.py())]),
            found => Ok(vec![found?]),
        },
        Kind::Local => {
            let own = holder.getattr(intern!(holder.py(), "__dict__"))?.cast_into::<PyDict>()?;
            Ok(own.iter().flat_map(|(name, value)| [name, value]).collect())
        }
        _ => match holder.cast::<PyList>() {
            Ok(list) => Ok(list.iter().collect()),
            Err(_) => holder.try_iter()?.collect(),
        },
    }
}

/// Stands for what is not there.
fn absent(py: Python<'_>) -> Bound<'_, PyAny> {
    py.get_type::<PyAny>().into_any()
}

/// An attribute as objects have it: without the class's own ways to look for what is not there. Nothing, where there is none.
pub(super) fn plain_attribute<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = object.py();
    // SAFETY: a live object and a text, under the GIL; the result is a new reference, or null with an exception set.
    let found =
        unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyObject_GenericGetAttr(object.as_ptr(), name.as_ptr())) };
    match found {
        Err(error) if error.is_instance_of::<PyAttributeError>(py) || error.is_instance_of::<PyValueError>(py) => {
            Ok(None)
        }
        found => found.map(Some),
    }
}

/// The numbers of an array of numpy's or Python's, of bytes, or of a view of such; of numpy's its type and shape, too.
fn contents<'py>(array: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let py = array.py();
    if let Ok(bytes) = array.cast::<PyByteArray>()
        && bytes.len() <= MAX_BYTES
    {
        return Ok(vec![PyBytes::new(py, &bytes.to_vec()).into_any()]);
    }
    let dtype = array.getattr_opt(intern!(py, "dtype"))?;
    let (numbers, size) = match array.getattr_opt(intern!(py, "flat"))? {
        Some(flat) => (flat, array.getattr(intern!(py, "size"))?.extract::<usize>()?),
        None => (array.clone(), array.len()?),
    };
    let item_size = array.getattr_opt(intern!(py, "itemsize"))?.map_or(Ok(1), |size| size.extract::<usize>())?;
    let mut found = array.clone();
    if size * item_size > MAX_BYTES {
        let step = size.div_ceil(SAMPLES).cast_signed();
        found = numbers.get_item(PySlice::new(py, 0, size.cast_signed(), step))?;
    }
    let bytes = match found.cast::<PyByteArray>() {
        Ok(bytes) => PyBytes::new(py, &bytes.to_vec()),
        Err(_) => found.call_method0(intern!(py, "tobytes"))?.cast_into::<PyBytes>()?,
    };
    let Some(dtype) = dtype else { return Ok(vec![bytes.into_any()]) };
    let shape = array.getattr(intern!(py, "shape"))?;
    let head = format!("{} {shape}", dtype.getattr(intern!(py, "str"))?);
    Ok(vec![PyString::new(py, &head).into_any(), bytes.into_any()])
}

/// The same object, or an equal number or text.
pub(super) fn is_equal(a: &Bound<'_, PyAny>, b: &Bound<'_, PyAny>) -> PyResult<bool> {
    if a.is(b) {
        return Ok(true);
    }
    if let (Ok(a), Ok(b)) = (a.cast_exact::<PyFloat>(), b.cast_exact::<PyFloat>()) {
        return Ok(a.value().to_bits() == b.value().to_bits());
    }
    Ok(is_value(a) && a.get_type().is(b.get_type()) && a.eq(b)?)
}

/// Whether it is a number or text, which says all of what it is.
pub(super) fn is_value(a: &Bound<'_, PyAny>) -> bool {
    a.is_none()
        || a.is_exact_instance_of::<PyInt>()
        || a.is_exact_instance_of::<PyFloat>()
        || a.is_exact_instance_of::<PyString>()
        || a.is_exact_instance_of::<PyBytes>()
        || a.is_exact_instance_of::<PyBool>()
}

/// What is in a list, deque, array or variable, as a tuple.
pub(super) fn tuple_of<'py>(holder: &Bound<'py, PyAny>, kind: Kind) -> PyResult<Bound<'py, PyTuple>> {
    match holder.cast::<PyList>() {
        Ok(list) => Ok(list.to_tuple()),
        Err(_) => PyTuple::new(holder.py(), items_of(holder, kind)?),
    }
}
