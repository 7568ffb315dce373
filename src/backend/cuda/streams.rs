//! Memory that outlives the run which made it: other runs read it, on other streams too.
//!
//! PyTorch's allocator gives freed memory to whoever asks next on the stream it was allocated on, in that stream's order.
//! So work on other streams is noted, and when the memory goes, its own stream first waits for theirs; the host waits for
//! nobody. Where a stream is being captured meanwhile, the memory stays until [`free_late`] is called outside of captures.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Device, StreamHandle};
use crate::backend::tensor::Block;

/// The owner of such memory.
struct Shared {
    block: Option<Block>,
    device: Arc<Device>,
    home: StreamHandle,
    readers: Mutex<Vec<StreamHandle>>,
}

static LATE: Mutex<Vec<Shared>> = Mutex::new(Vec::new());
static IS_ANY_LATE: AtomicBool = AtomicBool::new(false);

/// `block`, allocated for stream `home`, as memory that may be read on other streams.
pub(super) fn shared(block: Block, device: &Arc<Device>, home: StreamHandle) -> Block {
    let (ptr, bytes) = (block.ptr(), block.bytes());
    let owner = Shared { block: Some(block), device: device.clone(), home, readers: Mutex::default() };
    // SAFETY: the block's own memory, which the owner keeps.
    unsafe { Block::new(ptr, bytes, Box::new(owner)) }
}

/// Notes that work on `stream` reads the memory of this [owner](Block::owner).
pub(super) fn note(owner: &dyn Any, stream: StreamHandle) {
    let Some(shared) = owner.downcast_ref::<Shared>().filter(|s| s.home != stream) else { return };
    let mut readers = shared.readers.lock().unwrap_or_else(PoisonError::into_inner);
    if !readers.contains(&stream) {
        readers.push(stream);
    }
}

/// Frees what could not be freed earlier. Not to be called while the calling thread captures.
pub(super) fn free_late() {
    if IS_ANY_LATE.swap(false, Ordering::Relaxed) {
        let late = std::mem::take(&mut *LATE.lock().unwrap_or_else(PoisonError::into_inner));
        drop(late);
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let mut readers = std::mem::take(&mut *self.readers.lock().unwrap_or_else(PoisonError::into_inner));
        // A driver that refuses the order has lost the device: there is no work to wait for.
        readers.retain(|&reader| matches!(self.device.order(reader, self.home), Ok(false)));
        if readers.is_empty() {
            return;
        }
        let (device, readers) = (self.device.clone(), Mutex::new(readers));
        let late = Self { block: Some(block), device, home: self.home, readers };
        LATE.lock().unwrap_or_else(PoisonError::into_inner).push(late);
        IS_ANY_LATE.store(true, Ordering::Relaxed);
    }
}
