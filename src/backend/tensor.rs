//! Memory as backends see it: borrowed tensors and owned blocks.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;

use crate::ir::DType;
use crate::{Error, Result};

/// A strided tensor in somebody else's memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// First element.
    pub ptr: *mut u8,
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<i64>,
    /// In elements.
    pub strides: Vec<i64>,
}

// SAFETY: a description of memory; whoever reads or writes through it vouches for the access.
unsafe impl Send for Tensor {}
// SAFETY: as above.
unsafe impl Sync for Tensor {}

impl Tensor {
    /// A dense tensor at `ptr`.
    pub fn dense(ptr: *mut u8, dtype: DType, shape: &[i64]) -> Self {
        let mut strides = vec![1; shape.len()];
        for i in (0..shape.len().saturating_sub(1)).rev() {
            strides[i] = strides[i + 1] * shape[i + 1].max(1);
        }
        Self { ptr, dtype, shape: shape.to_vec(), strides }
    }

    /// Row-major without gaps.
    pub fn is_dense(&self) -> bool {
        let mut expect = 1;
        for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expect {
                return self.shape.contains(&0);
            }
            expect *= size;
        }
        true
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().map(|&d| usize::try_from(d).unwrap_or(0)).product()
    }

    /// Bytes of a dense tensor of this type.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size_bytes()
    }
}

/// Where memory comes from: the system, or the tensor library whose process this is.
pub trait Memory: Send + Sync {
    /// At least `bytes` bytes, aligned to 64, uninitialised.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] naming `what` they were for.
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block>;

    /// Whether it may be asked while the calling thread's stream is being captured; what it gives then is the graph's own.
    fn serves_captures(&self) -> bool {
        false
    }
}

impl<M: Memory + ?Sized> Memory for std::sync::Arc<M> {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        (**self).allocate(bytes, what)
    }

    fn serves_captures(&self) -> bool {
        (**self).serves_captures()
    }
}

/// Owned memory; dropped with whatever keeps it alive.
pub struct Block {
    ptr: *mut u8,
    bytes: usize,
    owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: plain memory owned by the value; who writes it vouches for being alone.
unsafe impl Send for Block {}
// SAFETY: as above.
unsafe impl Sync for Block {}

impl Block {
    /// Memory that lives as long as `owner`.
    ///
    /// # Safety
    /// `ptr` must be aligned to 64 and valid for reads and writes of `bytes` bytes until `owner` is dropped, and nobody
    /// else may use it.
    pub unsafe fn new(ptr: *mut u8, bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { ptr, bytes, owner }
    }

    /// Its address.
    pub fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// What keeps it alive.
    pub fn owner(&self) -> &dyn Any {
        &*self.owner
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes at {:p}", self.bytes, self.ptr)
    }
}

/// The system's allocator.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemMemory;

/// A page: also what keeps buffers of unrelated runs off each other's cache lines.
const PAGE: usize = 4096;
/// Blocks from this size on are pages of their own. An allocator would keep what is freed between blocks that live, and
/// weights that are packed, dropped and packed again would take more memory each time.
const LARGE_BYTES: usize = 1 << 20;

struct Owned(*mut u8, Layout);

// SAFETY: plain memory owned by the value.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated by `SystemMemory::allocate` with this layout.
        unsafe { dealloc(self.0, self.1) };
    }
}

impl Memory for SystemMemory {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        let out_of_memory = || Error::OutOfMemory { asked_bytes: bytes, what: what.to_owned() };
        if bytes >= LARGE_BYTES {
            let mut pages = memmap2::MmapMut::map_anon(bytes).map_err(|_| out_of_memory())?;
            // Where the system has larger pages on request: fewer faults at the first touch, fewer misses later.
            #[cfg(target_os = "linux")]
            let _ = pages.advise(memmap2::Advice::HugePage);
            let ptr = pages.as_mut_ptr();
            // SAFETY: freshly mapped, unmapped by the owner.
            return Ok(unsafe { Block::new(ptr, bytes, Box::new(pages)) });
        }
        let layout = Layout::from_size_align(bytes.max(1), PAGE).map_err(|_| out_of_memory())?;
        // SAFETY: the layout has at least one byte.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            return Err(out_of_memory());
        }
        let owner = Box::new(Owned(ptr, layout));
        // SAFETY: freshly allocated, freed by `owner`.
        Ok(unsafe { Block::new(ptr, bytes, owner) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn knows_dense_from_strided() {
        let mut t = Tensor::dense(std::ptr::null_mut(), DType::F16, &[2, 3, 4]);
        assert_eq!((t.strides.as_slice(), t.bytes()), ([12, 4, 1].as_slice(), 48));
        assert!(t.is_dense());
        t.strides = vec![1, 2, 6];
        assert!(!t.is_dense());
        t.shape[2] = 0;
        assert!(t.is_dense(), "no elements, no gaps");
    }

    #[test]
    fn absurd_requests_are_errors() {
        assert!(matches!(SystemMemory.allocate(usize::MAX, "test"), Err(Error::OutOfMemory { .. })));
        let block = SystemMemory.allocate(100, "test").unwrap();
        assert_eq!(block.ptr() as usize % 64, 0);
        let far_too_large = 1 << 50;
        assert!(matches!(SystemMemory.allocate(far_too_large, "test"), Err(Error::OutOfMemory { .. })));
    }

    #[test]
    fn large_blocks_are_pages_of_their_own() {
        let block = SystemMemory.allocate(LARGE_BYTES, "test").unwrap();
        assert_eq!(block.ptr() as usize % PAGE, 0);
        // SAFETY: the block's own bytes.
        unsafe {
            block.ptr().write_bytes(7, LARGE_BYTES);
            assert_eq!(block.ptr().add(LARGE_BYTES - 1).read(), 7);
        }
    }
}
