//! Workspace from torch's own allocator, so that its statistics and its out-of-memory handling see it.
//!
//! On a GPU the allocator gives memory for the calling thread's current stream: what that stream does later may use it, and
//! when it is given back, whatever comes next on that stream may. While torch captures the stream, it is the graph's own.

use dlpack_rs::ffi::{DLDataType, DLDevice, DLManagedTensorVersioned, DLPackExchangeAPI, DLTensor, K_DL_CPU};
use std::ptr::NonNull;

use super::tensor::ignore_error;
use oxidiff::backend::{Block, Memory, SystemMemory};
use oxidiff::{Error, Result};

/// torch's allocator behind the DLPack C exchange API. Needs no GIL: neither allocating nor freeing touches Python.
pub struct TorchMemory {
    /// The API.
    pub table: &'static DLPackExchangeAPI,
    /// Where the memory is to be.
    pub device: DLDevice,
}

// SAFETY: the table is static and immutable, and its allocator may be called from any thread.
unsafe impl Send for TorchMemory {}
// SAFETY: as above.
unsafe impl Sync for TorchMemory {}

/// A byte tensor that torch allocated.
struct Owned(NonNull<DLManagedTensorVersioned>);

// SAFETY: plain memory owned by the value; torch counts references to it atomically.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the handle came from torch's allocator, is owned by this value alone and is released once.
        unsafe {
            if let Some(deleter) = self.0.as_ref().deleter {
                deleter(self.0.as_ptr());
            }
        }
    }
}

impl Memory for TorchMemory {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        let refused = || Error::OutOfMemory { asked_bytes: bytes, what: what.to_owned() };
        let mut size = i64::try_from(bytes.max(1)).map_err(|_| refused())?;
        let mut prototype = DLTensor {
            data: std::ptr::null_mut(),
            device: self.device,
            ndim: 1,
            dtype: DLDataType { code: 1, bits: 8, lanes: 1 },
            shape: &mut size,
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let allocate = self.table.managed_tensor_allocator.ok_or_else(refused)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the prototype and its shape live through the call; `handle` receives the result.
        let status = unsafe { allocate(&mut prototype, &mut handle, std::ptr::null_mut(), Some(ignore_error)) };
        let owner = Owned(NonNull::new(handle).filter(|_| status == 0).ok_or_else(refused)?);
        // SAFETY: a handle that was returned with status 0 is initialised.
        let tensor = unsafe { owner.0.as_ref().dl_tensor };
        let ptr = tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize);
        if !ptr.addr().is_multiple_of(oxidiff::memory::ALIGN_BYTES) {
            return if self.device.device_type == K_DL_CPU {
                SystemMemory.allocate(bytes, what)
            } else {
                Err(refused())
            };
        }
        // SAFETY: aligned, fresh memory of this size, freed by `owner`.
        Ok(unsafe { Block::new(ptr, bytes, Box::new(owner)) })
    }

    fn serves_captures(&self) -> bool {
        true
    }
}
