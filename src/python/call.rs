//! The key of a call: what of its arguments decides which program runs, and at which sizes. See `oxidiff/call.py`, which does
//! the same for arguments of more kinds than these and takes longer; a call pays for this every time.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};

use super::errors::shielded;
use super::tensor::{Exchange, dtype_of};
use super::tokens::Tokens;

/// Tags of what follows. Every encoding says where it ends, so that no two calls have the same key.
const TENSOR: u8 = 1;
const INT: u8 = 2;
const FLOAT: u8 = 3;
const TRUE: u8 = 4;
const FALSE: u8 = 5;
const NONE: u8 = 6;
const TEXT: u8 = 7;
const TUPLE: u8 = 8;
const LIST: u8 = 9;
const DICT: u8 = 10;
/// A tensor that was met before: what is `a is b` to the module is part of which program runs.
const SAME: u8 = 11;

/// Levels of containers that are followed.
const DEPTH: u32 = 8;

struct Writer<'a, 'py> {
    key: Tokens,
    leaves: &'a Bound<'py, PyList>,
    /// Addresses of the tensors among them.
    met: Vec<usize>,
    exchange: Exchange,
    tensor_types: &'a [Py<PyType>; 2],
}

/// What makes a value one that only `oxidiff/call.py` knows.
struct Other;

type Known = Result<(), Other>;

impl From<PyErr> for Other {
    fn from(_: PyErr) -> Self {
        Self
    }
}

impl<'py> Writer<'_, 'py> {
    fn text(&mut self, text: &Bound<'py, PyString>) -> Known {
        self.key.bytes(text.to_str()?.as_bytes());
        Ok(())
    }

    fn tensor(&mut self, value: &Bound<'py, PyAny>) -> Known {
        let address = value.as_ptr().addr();
        // Without an early end, several are compared at once.
        if self.met.chunks(16).any(|some| some.iter().fold(false, |is_met, &met| is_met | (met == address))) {
            let first = self.met.iter().position(|&met| met == address);
            self.key.tag(SAME);
            self.key.word(first.expect("it is among them") as u64);
            return Ok(self.leaves.append(value)?);
        }
        self.met.push(address);
        // The one bit that a view does not show: it has no complex numbers.
        if value.call_method0(intern!(value.py(), "is_neg"))?.is_truthy()? {
            return Err(Other);
        }
        // Nearly no tensor has attributes of its own: Python reads them.
        let attributes = value.getattr(intern!(value.py(), "__dict__"))?;
        if !attributes.cast_exact::<PyDict>().is_ok_and(|attributes| attributes.is_empty()) {
            return Err(Other);
        }
        let view = self.exchange.view(value).ok_or(Other)?;
        dtype_of(view.dtype.code, view.dtype.bits, view.dtype.lanes).ok_or(Other)?;
        self.key.tag(TENSOR);
        self.key.view(&view);
        view.strides.iter().for_each(|stride| self.key.word(stride.cast_unsigned()));
        Ok(self.leaves.append(value)?)
    }

    fn number(&mut self, tag: u8, value: &Bound<'py, PyAny>) -> Known {
        self.key.tag(tag);
        Ok(self.leaves.append(value)?)
    }

    fn value(&mut self, value: &Bound<'py, PyAny>, depth: u32) -> Known {
        let kind = value.get_type();
        if self.tensor_types.iter().any(|known| kind.is(known)) {
            self.tensor(value)
        } else if value.is_none() {
            self.key.tag(NONE);
            Ok(())
        } else if let Ok(flag) = value.cast_exact::<PyBool>() {
            self.key.tag(if flag.is_true() { TRUE } else { FALSE });
            Ok(())
        } else if value.is_exact_instance_of::<PyInt>() {
            self.number(INT, value)
        } else if value.is_exact_instance_of::<PyFloat>() {
            self.number(FLOAT, value)
        } else if let Ok(text) = value.cast_exact::<PyString>() {
            self.key.tag(TEXT);
            self.text(text)
        } else if depth == 0 {
            Err(Other)
        } else if let Ok(items) = value.cast_exact::<PyTuple>() {
            self.key.tag(TUPLE);
            self.key.word(items.len() as u64);
            items.iter_borrowed().try_for_each(|item| self.value(&item, depth - 1))
        } else if let Ok(items) = value.cast_exact::<PyList>() {
            // A copy: `is_neg` may let other threads in, and theirs may be the list.
            let items: Vec<_> = items.iter().collect();
            self.key.tag(LIST);
            self.key.word(items.len() as u64);
            items.iter().try_for_each(|item| self.value(item, depth - 1))
        } else if let Ok(items) = value.cast_exact::<PyDict>() {
            self.key.tag(DICT);
            self.items(items, depth - 1)
        } else {
            Err(Other)
        }
    }

    fn items(&mut self, items: &Bound<'py, PyDict>, depth: u32) -> Known {
        let items: Vec<_> = items.iter().collect();
        self.key.word(items.len() as u64);
        items.iter().try_for_each(|(name, value)| {
            self.text(name.cast_exact::<PyString>().map_err(|_| Other)?)?;
            self.value(value, depth)
        })
    }
}

/// The classes of plain tensors.
pub(super) fn tensor_types(py: Python<'_>) -> PyResult<&'static [Py<PyType>; 2]> {
    static TENSORS: PyOnceLock<[Py<PyType>; 2]> = PyOnceLock::new();
    TENSORS.get_or_try_init(py, || {
        let class = |module: &str, name: &str| -> PyResult<_> {
            Ok(py.import(module)?.getattr(name)?.cast_into::<PyType>()?.unbind())
        };
        Ok([class("torch", "Tensor")?, class("torch.nn", "Parameter")?])
    })
}

/// See the stub file.
#[pyfunction]
pub fn key_of<'py>(
    args: &Bound<'py, PyTuple>,
    kwargs: &Bound<'py, PyDict>,
    leaves: &Bound<'py, PyList>,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    shielded("reading a call", || {
        let py = args.py();
        let tensor_types = tensor_types(py)?;
        let key = Tokens(Vec::with_capacity(512));
        let mut writer =
            Writer { key, leaves, met: Vec::with_capacity(32), exchange: Exchange::get(py)?, tensor_types };
        writer.key.word(args.len() as u64);
        let known = args.iter_borrowed().try_for_each(|value| writer.value(&value, DEPTH));
        let known = known.and_then(|()| writer.items(kwargs, DEPTH));
        Ok(known.is_ok().then(|| PyBytes::new(py, &writer.key.0)))
    })
}
