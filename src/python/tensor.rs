//! Tensors across the border.
//!
//! With torch >= 2.10 through the DLPack C exchange API (`Tensor.__dlpack_c_exchange_api__`, ~0.1 us a view, 0.4 us for a
//! handle that keeps the storage alive); with older torch through attributes of the Python object. A [`Tensor`] holds a
//! reference to the *storage*: a caller that swaps `p.data` during a run frees nothing that the run still reads.

use std::ffi::c_void;
use std::ptr::NonNull;

use dlpack_rs::ffi::{DLDataType, DLDevice, DLManagedTensorVersioned, DLPackExchangeAPI, DLTensor, K_DL_CPU};
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyFloat, PyInt};

use super::device::CPU;
use super::errors::to_python;
use super::memory::TorchMemory;
use oxidiff::Result;
use oxidiff::backend::Block;
use oxidiff::ir::{DType, interp};

/// dtype codes of DLPack: (code, bits).
const DTYPES: [(DType, u8, u8); 9] = [
    (DType::Bool, 6, 8),
    (DType::U8, 1, 8),
    (DType::I8, 0, 8),
    (DType::I32, 0, 32),
    (DType::I64, 0, 64),
    (DType::F16, 2, 16),
    (DType::BF16, 4, 16),
    (DType::F32, 2, 32),
    (DType::F64, 2, 64),
];

/// The element type of these codes of DLPack.
pub(super) fn dtype_of(code: u8, bits: u8, lanes: u16) -> Option<DType> {
    DTYPES.iter().find(|(_, c, b)| (*c, *b, 1) == (code, bits, lanes)).map(|(d, ..)| *d)
}

/// What keeps a tensor's memory alive.
enum Owner {
    /// A DLPack handle; its deleter drops the reference to the storage.
    Managed(NonNull<DLManagedTensorVersioned>),
    /// The Python object (older torch).
    Object(#[allow(dead_code, reason = "held for its reference")] Py<PyAny>),
    /// A Python number on a device.
    Block(#[allow(dead_code, reason = "held for its memory")] Block),
    /// A Python number, kept in place.
    Number(#[allow(dead_code, reason = "`data` points into the box")] Box<[u8; 8]>),
}

/// A tensor whose memory stays alive as long as this value.
pub struct Tensor {
    /// First element.
    pub data: *mut u8,
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<i64>,
    /// Element strides.
    pub strides: Vec<i64>,
    #[allow(dead_code, reason = "held for its Drop")]
    owner: Owner,
}

// SAFETY: the memory is plain data kept alive by `owner`; references to it are counted atomically by torch (DLPack
// handles) or released through pyo3 (objects). Whoever reads or writes through `data` synchronises as it would in Rust.
unsafe impl Send for Tensor {}
// SAFETY: as above; a shared `Tensor` only hands out its address and sizes.
unsafe impl Sync for Tensor {}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Owner::Managed(handle) = self {
            // SAFETY: the handle came from `managed_tensor_from_py_object_no_sync` or the allocator, is owned by this
            // value alone and is released once.
            unsafe {
                if let Some(deleter) = handle.as_ref().deleter {
                    deleter(handle.as_ptr());
                }
            }
        }
    }
}

impl Tensor {
    /// Address, type, shape and strides for the runtime; valid as long as this value.
    pub fn describe(&self) -> oxidiff::backend::Tensor {
        oxidiff::backend::Tensor {
            ptr: self.data,
            dtype: self.dtype,
            shape: self.shape.clone(),
            strides: self.strides.clone(),
        }
    }
}

/// What a tensor is. Valid until anything is done with the tensor.
pub struct View<'a> {
    /// Address of the first element.
    pub data: usize,
    /// Element type.
    pub dtype: DLDataType,
    /// Where it lies.
    pub device: DLDevice,
    /// Sizes.
    pub shape: &'a [i64],
    /// Element strides.
    pub strides: &'a [i64],
}

impl View<'_> {
    /// Row-major without gaps.
    pub fn is_dense(&self) -> bool {
        let mut expect = 1;
        for (&size, &stride) in self.shape.iter().zip(self.strides).rev() {
            if size != 1 && stride != expect {
                return self.shape.contains(&0);
            }
            expect *= size;
        }
        true
    }

    /// Bytes from the first to the end of the last element in memory.
    pub fn span_bytes(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let last: i64 = self.shape.iter().zip(self.strides).map(|(size, stride)| (size - 1) * stride).sum();
        let bits = usize::from(self.dtype.bits) * usize::from(self.dtype.lanes);
        usize::try_from(last + 1).unwrap_or(0) * (bits / 8)
    }
}

/// How tensors are read and made.
#[derive(Clone, Copy)]
pub enum Exchange {
    /// torch >= 2.10.
    C(&'static DLPackExchangeAPI),
    /// Older torch, by attributes.
    Attributes,
}

// SAFETY: the table is static, immutable and its functions may be called from any thread that holds the GIL.
unsafe impl Send for Exchange {}
// SAFETY: as above.
unsafe impl Sync for Exchange {}

/// Receives an allocation failure from torch; the message reaches the caller as MemoryError.
pub(super) unsafe extern "C" fn ignore_error(_: *mut c_void, _: *const std::ffi::c_char, _: *const std::ffi::c_char) {}

impl Exchange {
    /// The way this torch offers, looked up once.
    pub fn get(py: Python<'_>) -> PyResult<Self> {
        static EXCHANGE: PyOnceLock<Exchange> = PyOnceLock::new();
        let find = || {
            let found = Self::find(py)?;
            if let Self::C(table) = found {
                oxidiff::runtime::set_memory(Box::new(TorchMemory { table, device: CPU }));
            }
            Ok(found)
        };
        EXCHANGE.get_or_try_init(py, find).copied()
    }

    fn find(py: Python<'_>) -> PyResult<Self> {
        let tensor_type = py.import("torch")?.getattr("Tensor")?;
        let Ok(capsule) = tensor_type.getattr("__dlpack_c_exchange_api__") else { return Ok(Self::Attributes) };
        // SAFETY: `capsule` is a live object; the call checks that it is a capsule of this name.
        let table = unsafe { pyo3::ffi::PyCapsule_GetPointer(capsule.as_ptr(), c"dlpack_exchange_api".as_ptr()) };
        if table.is_null() {
            PyErr::take(py);
            return Ok(Self::Attributes);
        }
        // SAFETY: a capsule of this name points to a table that lives as long as the process (DLPack 1.3).
        let table = unsafe { &*table.cast::<DLPackExchangeAPI>() };
        let complete = table.header.version.major == 1
            && table.managed_tensor_allocator.is_some()
            && table.managed_tensor_from_py_object_no_sync.is_some()
            && table.managed_tensor_to_py_object_no_sync.is_some();
        Ok(if complete { Self::C(table) } else { Self::Attributes })
    }

    /// A tensor argument, or a Python number as a 0-d tensor of the type `number` that its slot declares.
    /// `put` moves a number to where the tensors are; by default it stays here.
    pub fn argument(
        &self,
        value: &Bound<'_, PyAny>,
        number: DType,
        at: DLDevice,
        put: &mut dyn FnMut([u8; 8]) -> PyResult<Option<Block>>,
    ) -> PyResult<Tensor> {
        let is_number =
            value.is_instance_of::<PyFloat>() || value.is_instance_of::<PyInt>() || value.is_instance_of::<PyBool>();
        if !is_number {
            return self.borrow(value, at);
        }
        let word = match number {
            DType::F64 => value.extract::<f64>()?.to_le_bytes(),
            DType::I64 => value.extract::<i64>()?.to_le_bytes(),
            other => return Err(PyTypeError::new_err(format!("a Python number where a {other} tensor is expected"))),
        };
        let (data, owner) = match put(word)? {
            Some(block) => (block.ptr(), Owner::Block(block)),
            None => {
                let mut bytes = Box::new(word);
                (bytes.as_mut_ptr(), Owner::Number(bytes))
            }
        };
        Ok(Tensor { data, dtype: number, shape: Vec::new(), strides: Vec::new(), owner })
    }

    /// What a tensor is at the moment, without holding anything; `None` for what DLPack does not describe (or older torch).
    pub fn view<'a>(&self, value: &'a Bound<'_, PyAny>) -> Option<View<'a>> {
        let Self::C(table) = self else { return None };
        let export = table.dltensor_from_py_object_no_sync?;
        let mut tensor = DLTensor {
            data: std::ptr::null_mut(),
            device: CPU,
            ndim: 0,
            dtype: DLDataType { code: 0, bits: 0, lanes: 0 },
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        // SAFETY: `value` is a live Python object; the function checks its type, and reports by return value.
        if unsafe { export(value.as_ptr().cast(), &mut tensor) } != 0 {
            PyErr::take(value.py());
            return None;
        }
        let rank = usize::try_from(tensor.ndim).ok()?;
        if rank > 0 && (tensor.shape.is_null() || tensor.strides.is_null()) {
            return None;
        }
        // SAFETY: both hold `ndim` entries each inside the tensor, which `value` keeps; it is read before anything else is
        // done with it.
        let list = |at: *const i64| unsafe { if rank == 0 { &[][..] } else { std::slice::from_raw_parts(at, rank) } };
        Some(View {
            data: tensor.data.addr().wrapping_add(tensor.byte_offset as usize),
            dtype: tensor.dtype,
            device: tensor.device,
            shape: list(tensor.shape),
            strides: list(tensor.strides),
        })
    }

    /// As [`view`](Self::view), of a weight: it may be offloaded to the device `meta`, of which DLPack says by an exception in
    /// C++ that it does not describe it. Torch writes down for each where it came from, which takes a millisecond.
    pub fn view_of_weight<'a>(&self, value: &'a Bound<'_, PyAny>) -> Option<View<'a>> {
        let is_meta = value.getattr(pyo3::intern!(value.py(), "is_meta")).and_then(|is| is.is_truthy());
        if is_meta.unwrap_or(false) { None } else { self.view(value) }
    }

    /// The tensor behind a `torch.Tensor`, which must lie on the device `at`.
    pub fn borrow(&self, value: &Bound<'_, PyAny>, at: DLDevice) -> PyResult<Tensor> {
        match self {
            Self::C(table) => Self::borrow_managed(table, value, at),
            Self::Attributes => Self::borrow_attributes(value, at),
        }
    }

    fn borrow_managed(table: &DLPackExchangeAPI, value: &Bound<'_, PyAny>, at: DLDevice) -> PyResult<Tensor> {
        let export = table.managed_tensor_from_py_object_no_sync.expect("checked in `find`");
        let mut handle = std::ptr::null_mut();
        // SAFETY: `value` is a live Python object; the function checks its type, and reports by return value.
        let status = unsafe { export(value.as_ptr().cast(), &mut handle) };
        if status != 0 {
            return Err(PyErr::fetch(value.py()));
        }
        let handle = NonNull::new(handle).ok_or_else(|| PyTypeError::new_err("torch gave no DLPack handle"))?;
        let owner = Owner::Managed(handle);
        // SAFETY: a handle that was returned with status 0 is initialised and lives until its deleter runs.
        let tensor = unsafe { handle.as_ref().dl_tensor };
        // SAFETY: the description came from that handle, which `owner` keeps.
        unsafe { Self::describe(&tensor, owner, at) }
    }

    /// # Safety
    /// `tensor` must be a valid description whose arrays and data `owner` keeps alive.
    unsafe fn describe(tensor: &DLTensor, owner: Owner, at: DLDevice) -> PyResult<Tensor> {
        let lies = tensor.device;
        if (lies.device_type, lies.device_id) != (at.device_type, at.device_id) {
            return Err(PyTypeError::new_err(match at.device_type {
                K_DL_CPU => "the tensor is not on the CPU".to_owned(),
                _ => format!("the tensor is not on cuda:{}", at.device_id),
            }));
        }
        let (code, bits, lanes) = (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes);
        let dtype = dtype_of(code, bits, lanes).ok_or_else(|| {
            PyTypeError::new_err(format!("tensors of DLPack type ({code}, {bits}) are not supported"))
        })?;
        let rank = usize::try_from(tensor.ndim).unwrap_or(0);
        // SAFETY: shape and strides hold `ndim` entries each (DLPack 1.2 and later).
        let list = |p: *mut i64| unsafe {
            if rank == 0 || p.is_null() { Vec::new() } else { std::slice::from_raw_parts(p, rank).to_vec() }
        };
        let (shape, strides) = (list(tensor.shape), list(tensor.strides));
        if tensor.data.is_null() && !shape.contains(&0) {
            return Err(PyTypeError::new_err("the tensor has no memory (a fake or meta tensor?)"));
        }
        let data = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        Ok(Tensor { data, dtype, shape, strides, owner })
    }

    fn borrow_attributes(value: &Bound<'_, PyAny>, at: DLDevice) -> PyResult<Tensor> {
        let device = value.getattr("device")?;
        let (kind, index): (String, Option<i32>) =
            (device.getattr("type")?.extract()?, device.getattr("index")?.extract()?);
        let wanted = if at.device_type == K_DL_CPU { ("cpu", 0) } else { ("cuda", at.device_id) };
        if (kind.as_str(), index.unwrap_or(0)) != wanted {
            return Err(PyTypeError::new_err(format!(
                "the tensor is on {}, not on {}:{}",
                device.str()?,
                wanted.0,
                wanted.1
            )));
        }
        let torch_name = value.getattr("dtype")?.str()?.to_string();
        let dtype = dtype_from_torch(&torch_name)
            .ok_or_else(|| PyTypeError::new_err(format!("tensors of {torch_name} are not supported")))?;
        let data = value.call_method0("data_ptr")?.extract::<usize>()? as *mut u8;
        let shape: Vec<i64> = value.getattr("shape")?.extract()?;
        let strides: Vec<i64> = value.call_method0("stride")?.extract()?;
        // The detached alias holds the storage even if the caller swaps `value.data`.
        let alias = value.call_method0("detach")?.unbind();
        Ok(Tensor { data, dtype, shape, strides, owner: Owner::Object(alias) })
    }

    /// A fresh contiguous CPU tensor from torch's allocator: the Python object, and its description.
    pub fn allocate<'py>(&self, py: Python<'py>, dtype: DType, shape: &[i64]) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
        let object = match self {
            Self::C(table) => Self::allocate_managed(table, py, dtype, shape)?,
            Self::Attributes => {
                let torch = py.import("torch")?;
                let kwargs = pyo3::types::PyDict::new(py);
                kwargs.set_item("dtype", torch.getattr(torch_name(dtype))?)?;
                torch.call_method("empty", (shape.to_vec(),), Some(&kwargs))?
            }
        };
        let tensor = self.borrow(&object, CPU)?;
        Ok((object, tensor))
    }

    fn allocate_managed<'py>(
        table: &DLPackExchangeAPI,
        py: Python<'py>,
        dtype: DType,
        shape: &[i64],
    ) -> PyResult<Bound<'py, PyAny>> {
        let (_, code, bits) = DTYPES.into_iter().find(|(d, ..)| *d == dtype).expect("the table has every dtype");
        let mut sizes = shape.to_vec();
        let mut prototype = DLTensor {
            data: std::ptr::null_mut(),
            device: CPU,
            ndim: sizes.len() as i32,
            dtype: DLDataType { code, bits, lanes: 1 },
            shape: sizes.as_mut_ptr(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let allocate = table.managed_tensor_allocator.expect("checked in `find`");
        let mut handle = std::ptr::null_mut();
        // SAFETY: the prototype and its shape live through the call; `handle` receives the result.
        let status = unsafe { allocate(&mut prototype, &mut handle, std::ptr::null_mut(), Some(ignore_error)) };
        if status != 0 || handle.is_null() {
            PyErr::take(py);
            let bytes = shape.iter().product::<i64>() * dtype.size_bytes() as i64;
            return Err(PyMemoryError::new_err(format!(
                "cannot allocate {bytes} bytes for a result of shape {shape:?}"
            )));
        }
        let import = table.managed_tensor_to_py_object_no_sync.expect("checked in `find`");
        let mut object = std::ptr::null_mut();
        // SAFETY: `handle` is owned here and its ownership passes to the call, which returns a new reference.
        let status = unsafe { import(handle, &mut object) };
        if status != 0 {
            return Err(PyErr::fetch(py));
        }
        // SAFETY: on success `object` is a new reference.
        unsafe { Bound::from_owned_ptr_or_err(py, object.cast()) }
    }

    /// Copies of tensors (or numbers) for the interpreter.
    pub fn copy_to_host(self, values: &[Bound<'_, PyAny>], types: &[DType]) -> PyResult<Vec<interp::Tensor>> {
        let numbers = types.iter().copied().chain(std::iter::repeat(DType::F64));
        values
            .iter()
            .zip(numbers)
            .map(|(v, ty)| host_copy(&self.argument(v, ty, CPU, &mut |_| Ok(None))?).map_err(|e| to_python(&e)))
            .collect()
    }

    /// A torch tensor with the contents of `tensor`.
    pub fn tensor_from<'py>(self, py: Python<'py>, tensor: &interp::Tensor) -> PyResult<Bound<'py, PyAny>> {
        let (object, target) = self.allocate(py, tensor.dtype(), tensor.shape())?;
        let bytes = tensor.bytes();
        // SAFETY: `target` is fresh, contiguous and of the same dtype and shape, so it holds exactly these bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.data, bytes.len()) };
        Ok(object)
    }
}

fn host_copy(tensor: &Tensor) -> Result<interp::Tensor> {
    let size = tensor.dtype.size_bytes();
    let count: i64 = tensor.shape.iter().product();
    let mut bytes = Vec::with_capacity(count as usize * size);
    let mut index = vec![0i64; tensor.shape.len()];
    for _ in 0..count {
        let offset: i64 = index.iter().zip(&tensor.strides).map(|(i, s)| i * s).sum();
        // SAFETY: `index` stays inside `shape`, so the element lies inside the tensor's memory, which its owner keeps.
        let element = unsafe { std::slice::from_raw_parts(tensor.data.offset(offset as isize * size as isize), size) };
        bytes.extend_from_slice(element);
        for d in (0..index.len()).rev() {
            index[d] += 1;
            if index[d] < tensor.shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    interp::Tensor::new(tensor.dtype, tensor.shape.clone(), bytes)
}

pub(super) const fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        DType::U8 => "uint8",
        DType::I8 => "int8",
        DType::I32 => "int32",
        DType::I64 => "int64",
        DType::F16 => "float16",
        DType::BF16 => "bfloat16",
        DType::F32 => "float32",
        DType::F64 => "float64",
    }
}

fn dtype_from_torch(name: &str) -> Option<DType> {
    let name = name.strip_prefix("torch.")?;
    DType::ALL.into_iter().find(|&d| torch_name(d) == name)
}
