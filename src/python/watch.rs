//! `Watch`: may a module have changed since it was compiled?
//!
//! A program is right for one structure of the module (its dictionaries: attributes, parameters, buffers, submodules, hooks)
//! and one set of weights. Both can be changed by anybody between two calls; a call has microseconds to notice. So
//! [`Watch::poll`] compares words: the version tag of every dictionary, and of every tensor its storage, memory, version
//! counter, and three words of its contents. The last catches what torch does not count: writes through `p.data` or numpy.
//! It samples, so a write through these that leaves the first, middle and last eight bytes as they were goes unseen.

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict};

use super::layout::{DictLayout, TensorLayout, TensorState};

/// Bit of [`Watch::poll`]: a dictionary was written.
const STRUCTURE: u32 = 1;
/// Bit of [`Watch::poll`]: a tensor was written or has other memory.
const WEIGHTS: u32 = 2;

struct WatchedDict {
    dict: Py<PyDict>,
    version: u64,
}

/// How many dictionaries ahead of the one that is read memory is asked for.
const DICTS_AHEAD: usize = 32;
/// The same for tensors, each of which is seven places in memory.
const TENSORS_AHEAD: usize = 8;

struct WatchedTensor {
    tensor: Py<PyAny>,
    state: TensorState,
    /// Address of its `TensorImpl` when it was read.
    tensor_impl: usize,
    /// Addresses inside the memory, and the words that were there.
    samples: [(usize, u64); 3],
}

/// Everything a compiled module depends on, as it was when this object was made.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Watch {
    dicts: Vec<WatchedDict>,
    /// The same dictionaries in the order of their addresses.
    dict_pointers: Vec<usize>,
    /// The sum of their versions. A write gives a dictionary a version that is higher than any before it, so that the sum
    /// is the same only if nothing was written.
    version_sum: u64,
    tensors: Vec<WatchedTensor>,
    dict_layout: DictLayout,
    tensor_layout: TensorLayout,
}

#[pymethods]
impl Watch {
    /// Fails with `TypeError` where interpreter or torch cannot be watched this way; see `is_available`.
    #[new]
    fn new(
        py: Python<'_>,
        dicts: Vec<Bound<'_, PyDict>>,
        versions: Vec<u64>,
        tensors: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let (Some(dict_layout), Some(tensor_layout)) = (DictLayout::get(py), TensorLayout::get(py)) else {
            return Err(PyTypeError::new_err(
                "dictionaries or tensors cannot be watched in this build of Python or torch",
            ));
        };
        let tensor_type = py.import("torch")?.getattr("Tensor")?;
        if dicts.len() != versions.len() {
            return Err(PyTypeError::new_err("one version per dictionary"));
        }
        let dicts = dicts.into_iter().zip(versions);
        let dicts: Vec<_> = dicts.map(|(dict, version)| WatchedDict { dict: dict.unbind(), version }).collect();
        let version_sum = dicts.iter().fold(0, |sum: u64, d| sum.wrapping_add(d.version));
        let mut dict_pointers: Vec<usize> = dicts.iter().map(|d| d.dict.as_ptr().expose_provenance()).collect();
        dict_pointers.sort_unstable();
        let tensors = tensors.into_iter().map(|t| WatchedTensor::new(t, &tensor_type, tensor_layout));
        let tensors = tensors.collect::<PyResult<_>>()?;
        Ok(Self { dicts, dict_pointers, version_sum, tensors, dict_layout, tensor_layout })
    }

    /// Whether `Watch` can be used in this process.
    #[staticmethod]
    fn is_available(py: Python<'_>) -> bool {
        DictLayout::get(py).is_some() && TensorLayout::get(py).is_some()
    }

    /// The version of a dictionary: another one after every write.
    #[staticmethod]
    fn dict_version(dict: &Bound<'_, PyDict>) -> PyResult<u64> {
        let layout = DictLayout::get(dict.py());
        let layout = layout.ok_or_else(|| PyTypeError::new_err("this build of Python counts no versions"))?;
        // SAFETY: a live dictionary, under the GIL.
        Ok(unsafe { layout.version(dict.as_ptr().cast()) })
    }

    /// Bits of what may have changed: 1 a dictionary, 2 a tensor. A few nanoseconds for each.
    fn poll(&self, py: Python<'_>) -> u32 {
        u32::from(self.is_dict_changed(py)) * STRUCTURE + u32::from(self.is_tensor_changed(py)) * WEIGHTS
    }

    /// Indices of the dictionaries that were written.
    fn changed_dicts(&self, _py: Python<'_>) -> Vec<usize> {
        // SAFETY: each dictionary is kept alive by `self`; `_py` proves that the GIL is held.
        let version = |d: &WatchedDict| unsafe { self.dict_layout.version(d.dict.as_ptr().cast()) };
        self.dicts.iter().enumerate().filter(|(_, d)| version(d) != d.version).map(|(i, _)| i).collect()
    }

    /// Indices of the tensors that may have changed.
    fn changed_tensors(&self, py: Python<'_>) -> Vec<usize> {
        self.tensors.iter().enumerate().filter(|(_, t)| self.is_changed(t, py)).map(|(i, _)| i).collect()
    }
}

impl Watch {
    fn is_dict_changed(&self, _py: Python<'_>) -> bool {
        let mut sum = 0u64;
        for (i, &dict) in self.dict_pointers.iter().enumerate() {
            if let Some(&ahead) = self.dict_pointers.get(i + DICTS_AHEAD) {
                prefetch(self.dict_layout.address(ahead));
            }
            // SAFETY: each dictionary is kept alive by `self.dicts`; `_py` proves that the GIL is held.
            sum = sum.wrapping_add(unsafe { self.dict_layout.version(std::ptr::with_exposed_provenance(dict)) });
        }
        sum != self.version_sum
    }

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
    fn new(tensor: Bound<'_, PyAny>, tensor_type: &Bound<'_, PyAny>, layout: TensorLayout) -> PyResult<Self> {
        if !tensor.is_instance(tensor_type)? {
            return Err(PyTypeError::new_err("not a tensor"));
        }
        // SAFETY: a live tensor, under the GIL.
        let (state, tensor_impl) =
            unsafe { (layout.read(tensor.as_ptr().cast()), layout.implementation(tensor.as_ptr().cast())) };
        let is_cpu = tensor.getattr("is_cpu")?.cast::<PyBool>()?.is_true();
        let start: usize = tensor.call_method0("data_ptr")?.extract()?;
        let bytes = span_bytes(&tensor)?;
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

/// Asks for the memory at an address, which need not be one, past the caches that the call itself needs.
fn prefetch(at: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
        // SAFETY: a prefetch reads nothing that the program sees and faults on no address.
        unsafe { _mm_prefetch::<_MM_HINT_NTA>(std::ptr::without_provenance(at)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// Bytes from a tensor's first to the end of its last element in memory.
fn span_bytes(tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
    let shape: Vec<usize> = tensor.getattr("shape")?.extract()?;
    let strides: Vec<usize> = tensor.call_method0("stride")?.extract()?;
    if shape.contains(&0) {
        return Ok(0);
    }
    let item: usize = tensor.call_method0("element_size")?.extract()?;
    Ok((1 + shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum::<usize>()) * item)
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
