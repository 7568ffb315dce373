//! Where a program's tensors lie, and who is asked there for the stream and for results.
//!
//! On the CPU that is nobody. For a GPU it is an `oxidiff.device.Device`: it knows torch's current stream and makes
//! tensors of torch's own, on which `record_stream` works (what torch imports by DLPack it does not let be recorded).

use dlpack_rs::ffi::{DLDevice, K_DL_CPU};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::{intern, types::PyTuple};

use super::tensor::{Exchange, Tensor, torch_name};
use oxidiff::ir::DType;

/// The place of a program's tensors.
pub struct Place {
    /// As DLPack counts devices.
    pub dl: DLDevice,
    /// `oxidiff.device.Device`; none for the CPU.
    torch: Option<Py<PyAny>>,
}

/// This process's own memory.
pub const CPU: DLDevice = DLDevice { device_type: K_DL_CPU, device_id: 0 };

impl Place {
    /// Where a device says its tensors lie; without one, on the CPU.
    pub fn new(device: Option<Bound<'_, PyAny>>) -> PyResult<Self> {
        let Some(device) = device else { return Ok(Self { dl: CPU, torch: None }) };
        let (kind, device_id): (u32, i32) = device.getattr("dlpack")?.extract()?;
        Ok(Self { dl: DLDevice { device_type: kind, device_id }, torch: Some(device.unbind()) })
    }

    /// Whether work is queued on a stream of a device.
    pub const fn is_device(&self) -> bool {
        self.torch.is_some()
    }

    /// The stream that torch puts work on at the moment; 0 on the CPU.
    pub fn stream(&self, py: Python<'_>) -> PyResult<usize> {
        self.torch.as_ref().map_or(Ok(0), |device| device.call_method0(py, intern!(py, "stream"))?.extract(py))
    }

    /// A fresh dense tensor there: the Python object, and its description.
    pub fn allocate<'py>(
        &self,
        py: Python<'py>,
        exchange: &Exchange,
        dtype: DType,
        shape: &[i64],
    ) -> PyResult<(Bound<'py, PyAny>, Tensor)> {
        let Some(device) = &self.torch else { return exchange.allocate(py, dtype, shape) };
        let shape = PyTuple::new(py, shape)?;
        let object = device.bind(py).call_method1(intern!(py, "empty"), (shape, torch_dtype(py, dtype)?))?;
        let tensor = exchange.borrow(&object, self.dl)?;
        Ok((object, tensor))
    }
}

/// torch's names of all types, in our order.
pub(super) fn torch_dtypes(py: Python<'_>) -> PyResult<&'static [Py<PyAny>]> {
    static DTYPES: PyOnceLock<Vec<Py<PyAny>>> = PyOnceLock::new();
    let all = DTYPES.get_or_try_init(py, || {
        let torch = py.import("torch")?;
        DType::ALL.into_iter().map(|d| Ok(torch.getattr(torch_name(d))?.unbind())).collect::<PyResult<_>>()
    })?;
    Ok(all)
}

/// `torch.float16` and its like.
fn torch_dtype<'py>(py: Python<'py>, dtype: DType) -> PyResult<&'py Bound<'py, PyAny>> {
    let all = torch_dtypes(py)?;
    let at = DType::ALL.into_iter().position(|d| d == dtype).expect("the list has every type");
    Ok(all[at].bind(py))
}
