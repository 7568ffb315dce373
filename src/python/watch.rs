//! `WeightWatch`: have the tensors behind a module's weight slots changed since the last look?
//!
//! A slot is a dictionary (`module._parameters`, `module._buffers` or `module.__dict__`) and a name in it. Three things can
//! change: the dictionary holds another object (`module.weight = Parameter(...)`), the object points to other memory
//! (`p.data = ...`, which is what `module.to(...)` does), or its contents were written in place (`load_state_dict`,
//! `copy_`: torch's version counter). All three are read natively, about 0.1 us a slot.

use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};

use super::tensor::Exchange;

struct Slot {
    holder: Py<PyDict>,
    name: Py<PyString>,
    /// The tensor last seen; compared by identity, held so that its address is not reused.
    tensor: Py<PyAny>,
    data: usize,
    /// `None` for tensors without a counter (made in inference mode): compared by address alone.
    version: Option<u64>,
}

/// The weight slots of one module.
#[pyclass(module = "oxidiff._native")]
pub struct WeightWatch {
    slots: Vec<Slot>,
}

fn version_of(tensor: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match tensor.getattr(pyo3::intern!(tensor.py(), "_version")) {
        Ok(version) => Ok(Some(version.extract()?)),
        Err(e) if e.is_instance_of::<pyo3::exceptions::PyRuntimeError>(tensor.py()) => Ok(None),
        Err(e) => Err(e),
    }
}

fn current<'py>(holder: &Bound<'py, PyDict>, name: &Bound<'py, PyString>) -> PyResult<Bound<'py, PyAny>> {
    holder.get_item(name)?.ok_or_else(|| PyKeyError::new_err(format!("the module no longer has `{name}`")))
}

#[pymethods]
impl WeightWatch {
    #[new]
    fn new(py: Python<'_>, holders: Vec<Bound<'_, PyDict>>, names: Vec<Bound<'_, PyString>>) -> PyResult<Self> {
        let exchange = Exchange::get(py)?;
        let slots = holders.iter().zip(&names).map(|(holder, name)| {
            let tensor = current(holder, name)?;
            Ok(Slot {
                data: exchange.address(&tensor)?,
                version: version_of(&tensor)?,
                holder: holder.clone().unbind(),
                name: name.clone().unbind(),
                tensor: tensor.unbind(),
            })
        });
        Ok(Self { slots: slots.collect::<PyResult<_>>()? })
    }

    /// `(rebound, written)`: slots whose tensor or memory is another one, and slots written in place, since the last call;
    /// both are remembered as seen. `None` if nothing changed.
    #[allow(clippy::type_complexity, reason = "it is the Python signature")]
    fn changes(&mut self, py: Python<'_>) -> PyResult<Option<(Vec<usize>, Vec<usize>)>> {
        let exchange = Exchange::get(py)?;
        let (mut rebound, mut written) = (Vec::new(), Vec::new());
        for (i, slot) in self.slots.iter_mut().enumerate() {
            let tensor = current(slot.holder.bind(py), slot.name.bind(py))?;
            let data = exchange.address(&tensor)?;
            let version = version_of(&tensor)?;
            if data != slot.data || !tensor.is(&slot.tensor) {
                rebound.push(i);
            } else if version != slot.version {
                written.push(i);
            } else {
                continue;
            }
            (slot.data, slot.version, slot.tensor) = (data, version, tensor.unbind());
        }
        Ok((!rebound.is_empty() || !written.is_empty()).then_some((rebound, written)))
    }

    /// The tensors last seen, in slot order.
    fn tensors<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.slots.iter().map(|s| s.tensor.bind(py)))
    }
}
