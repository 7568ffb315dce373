//! `Watch`: may a module have changed since it was compiled?
//!
//! A program is right for one structure of the module (its dictionaries: attributes, parameters, buffers, submodules, hooks)
//! and one set of weights. Both can be changed by anybody between two calls; a call has microseconds to notice. So
//! [`Watch::poll`] compares words: what [`Dicts`](super::versions::Dicts) knows of the dictionaries, and of every tensor its
//! storage, memory, version counter, and three words of its contents. The last catches what torch does not count: writes
//! through `p.data` or numpy. It samples, so a write through these that leaves the first, middle and last eight bytes as they
//! were goes unseen.

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::PyBool;

use super::addresses::ByAddress;
use super::device::CPU;
use super::errors::shielded;
use super::layout::{TensorLayout, TensorState, prefetch};
use super::surroundings::Surroundings;
use super::tensor::Exchange;
use super::tree::Tree;
use super::versions::Dicts;

/// Bit of [`Watch::poll`]: a dictionary, list or set was written.
const STRUCTURE: u32 = 1;
/// Bit of [`Watch::poll`]: a tensor was written or has other memory.
const WEIGHTS: u32 = 2;
/// Bit of [`Watch::poll`]: code finds something else outside of the module.
const SURROUNDINGS: u32 = 4;

/// How many tensors ahead of the one that is read memory is asked for; each is seven places in memory.
const TENSORS_AHEAD: usize = 8;

struct WatchedTensor {
    tensor: Py<PyAny>,
    state: TensorState,
    /// Address of its `TensorImpl` when it was read.
    tensor_impl: usize,
    /// Addresses inside the memory, and the words that were there.
    samples: [(usize, u64); 3],
}

/// Everything a compiled module depends on, as it was when this object was made; the dictionaries, when they were read.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Watch {
    tree: Py<Tree>,
    surroundings: Option<Py<Surroundings>>,
    tensors: Vec<WatchedTensor>,
    places: ByAddress<()>,
    tensor_layout: TensorLayout,
}

#[pymethods]
impl Watch {
    /// Fails with `TypeError` where interpreter or torch cannot be watched this way; see `is_available`.
    #[new]
    #[pyo3(signature = (tree, tensors, surroundings=None))]
    fn new(
        py: Python<'_>,
        tree: Py<Tree>,
        tensors: Vec<Bound<'_, PyAny>>,
        surroundings: Option<Py<Surroundings>>,
    ) -> PyResult<Self> {
        shielded("watching a module", || {
            let Some(tensor_layout) = TensorLayout::get(py).filter(|_| Dicts::is_available(py)) else {
                return Err(PyTypeError::new_err(
                    "dictionaries or tensors cannot be watched in this build of Python or torch",
                ));
            };
            let (exchange, tensor_type) = (Exchange::get(py)?, py.import("torch")?.getattr("Tensor")?);
            let count = tree.get().tensors.len() + tensors.len();
            let (mut places, mut watched) = (ByAddress::default(), Vec::with_capacity(count));
            places.reserve(count);
            let of_tree = tree.get().tensors.iter().map(|tensor| tensor.bind(py).clone());
            for tensor in of_tree.chain(tensors) {
                if places.insert(tensor.as_ptr().addr(), ()).is_none() {
                    watched.push(WatchedTensor::new(tensor, &tensor_type, exchange, tensor_layout)?);
                }
            }
            Ok(Self { tree, surroundings, tensors: watched, places, tensor_layout })
        })
    }

    /// Whether `Watch` can be used in this process.
    #[staticmethod]
    fn is_available(py: Python<'_>) -> PyResult<bool> {
        shielded("looking for ways to watch", || Ok(Dicts::is_available(py) && TensorLayout::get(py).is_some()))
    }

    /// Bits of what may have changed: 1 a dictionary, list, set or the class of a module, 2 a tensor, 4 what code finds outside of
    /// the module. A few nanoseconds for each.
    fn poll(&self, py: Python<'_>) -> PyResult<u32> {
        shielded("watching a module", || {
            let tree = self.tree.get();
            let is_structure = tree.dicts.is_changed(py) || tree.lists.is_changed(py) || tree.has_other_classes(py);
            let is_elsewhere = self.surroundings.as_ref().map_or(Ok(false), |found| found.get().is_changed(py))?;
            Ok(u32::from(is_structure) * STRUCTURE
                + u32::from(self.is_tensor_changed(py)) * WEIGHTS
                + u32::from(is_elsewhere) * SURROUNDINGS)
        })
    }

    /// Whether all of these are watched.
    fn covers(&self, tensors: Vec<Bound<'_, PyAny>>) -> bool {
        tensors.iter().all(|tensor| self.places.contains_key(&tensor.as_ptr().addr()))
    }

    /// Indices of the dictionaries that were written.
    fn changed_dicts(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        shielded("watching a module", || Ok(self.tree.get().dicts.changed(py)))
    }

    /// Ids of the tensors that may have changed.
    fn changed_tensors(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        shielded("watching a module", || {
            Ok(self.tensors.iter().filter(|t| self.is_changed(t, py)).map(|t| t.tensor.as_ptr().addr()).collect())
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)?;
        visit.call(&self.surroundings)?;
        self.tensors.iter().try_for_each(|watched| visit.call(&watched.tensor))
    }
}

impl Watch {
    fn is_tensor_changed(&self, py: Python<'_>) -> bool {
        self.tensors.iter().enumerate().any(|(i, tensor)| {
            if let Some(ahead) = self.tensors.get(i + TENSORS_AHEAD) {
                ahead.prefetch(self.tensor_layout);
            }
            self.is_changed(tensor, py)
        })
    }

    fn is_changed(&self, tensor: &WatchedTensor, _py: Python<'_>) -> bool {
        // SAFETY: the tensor is kept alive by `self` and was checked to be one; `_py` proves that the GIL is held.
        let state = unsafe { self.tensor_layout.read(tensor.tensor.as_ptr().cast()) };
        // SAFETY: reached only if the tensor still has the storage and memory inside which the samples lie.
        state != tensor.state || tensor.samples.iter().any(|&(at, word)| at != 0 && unsafe { sample(at) } != word)
    }
}

impl WatchedTensor {
    fn new(
        tensor: Bound<'_, PyAny>,
        tensor_type: &Bound<'_, PyAny>,
        exchange: Exchange,
        layout: TensorLayout,
    ) -> PyResult<Self> {
        if !tensor.is_instance(tensor_type)? {
            return Err(PyTypeError::new_err("not a tensor"));
        }
        // SAFETY: a live tensor, under the GIL.
        let (state, tensor_impl) =
            unsafe { (layout.read(tensor.as_ptr().cast()), layout.implementation(tensor.as_ptr().cast())) };
        let (is_cpu, start, bytes) = match exchange.view_of_weight(&tensor) {
            Some(view) => (view.device.device_type == CPU.device_type, view.data, view.span_bytes()),
            None => span(&tensor)?,
        };
        let mut samples = [(0, 0); 3];
        if is_cpu && start != 0 && bytes >= size_of::<u64>() {
            let last = bytes - size_of::<u64>();
            for (slot, offset) in samples.iter_mut().zip([0, last / 2, last]) {
                let at = start + offset;
                // SAFETY: eight bytes at `offset` lie inside the `bytes` of memory that the tensor spans and keeps.
                *slot = (at, unsafe { sample(at) });
            }
        }
        Ok(Self { tensor: tensor.unbind(), state, tensor_impl, samples })
    }

    /// Asks for the places that [`Watch::is_changed`] reads if nothing has changed: one hangs on the other there.
    fn prefetch(&self, layout: TensorLayout) {
        let TensorState { storage, counter, .. } = self.state;
        for at in layout.places(self.tensor.as_ptr() as usize, self.tensor_impl, storage, counter) {
            prefetch(at);
        }
        for (at, _) in self.samples {
            prefetch(at);
        }
    }
}

/// Whether a tensor is on the CPU, the address of its first element, and the bytes from there to the end of its last.
fn span(tensor: &Bound<'_, PyAny>) -> PyResult<(bool, usize, usize)> {
    let is_cpu = tensor.getattr("is_cpu")?.cast::<PyBool>()?.is_true();
    let start: usize = match tensor.call_method0("data_ptr") {
        Ok(start) => start.extract()?,
        // A sparse one, or of a library's own layout: without a storage. No program reads it.
        Err(error) if error.is_instance_of::<PyRuntimeError>(tensor.py()) => return Ok((is_cpu, 0, 0)),
        Err(error) => return Err(error),
    };
    let shape: Vec<usize> = tensor.getattr("shape")?.extract()?;
    let strides: Vec<usize> = tensor.call_method0("stride")?.extract()?;
    if shape.contains(&0) {
        return Ok((is_cpu, start, 0));
    }
    let item: usize = tensor.call_method0("element_size")?.extract()?;
    let last = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>();
    Ok((is_cpu, start, (1 + last) * item))
}

/// Eight bytes of a tensor's memory.
///
/// # Safety
/// `at` must lie eight bytes or more inside live memory. Another thread may write it meanwhile; the value is only
/// compared, never used.
unsafe fn sample(at: usize) -> u64 {
    // SAFETY: see above.
    unsafe { std::ptr::with_exposed_provenance::<u64>(at).read_unaligned() }
}
