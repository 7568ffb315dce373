//! The arena: one block of workspace, lent to a run.
//!
//! All sizes, modules and pipelines of a process share one pool. A run takes a block that is large enough (or has the
//! largest one replaced), two runs at once have two blocks. Blocks given back beyond what one run at a time needs are kept
//! for the next concurrent run until [`ArenaPool::trim`].

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::backend::{Block, Memory};

/// Blocks not in use.
#[derive(Debug, Default)]
struct Idle {
    blocks: Vec<Block>,
    lent_bytes: usize,
}

/// A pool of workspace blocks.
pub struct ArenaPool {
    memory: Box<dyn Memory>,
    idle: Mutex<Idle>,
}

/// A block lent to one run; goes back when dropped.
pub struct Lent {
    pool: Arc<ArenaPool>,
    block: Option<Block>,
}

impl ArenaPool {
    /// An empty pool over `memory`.
    pub fn new(memory: Box<dyn Memory>) -> Arc<Self> {
        Arc::new(Self { memory, idle: Mutex::default() })
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Idle> {
        // A thread that panicked while holding the lock left a list of whole blocks: nothing to repair.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of at least `bytes`. The smallest idle block that suffices; else the largest idle one is given up for a new
    /// one, so that sizes in any order end with one block of the largest.
    ///
    /// # Errors
    /// [`crate::Error::OutOfMemory`] if the block cannot be allocated; idle blocks have been given back by then.
    pub fn lend(self: &Arc<Self>, bytes: usize) -> Result<Lent> {
        let mut idle = self.idle();
        let fits =
            (0..idle.blocks.len()).filter(|&i| idle.blocks[i].bytes() >= bytes).min_by_key(|&i| idle.blocks[i].bytes());
        let block = match fits {
            Some(i) => idle.blocks.swap_remove(i),
            None => {
                if let Some(i) = (0..idle.blocks.len()).max_by_key(|&i| idle.blocks[i].bytes()) {
                    drop(idle.blocks.swap_remove(i));
                }
                match self.memory.allocate(bytes, "the workspace of one run") {
                    Ok(block) => block,
                    Err(_) => {
                        idle.blocks.clear();
                        self.memory.allocate(bytes, "the workspace of one run")?
                    }
                }
            }
        };
        idle.lent_bytes += block.bytes();
        drop(idle);
        Ok(Lent { pool: self.clone(), block: Some(block) })
    }

    /// Gives back every idle block.
    pub fn trim(&self) {
        self.idle().blocks.clear();
    }

    /// Bytes held, idle and lent.
    pub fn bytes(&self) -> usize {
        let idle = self.idle();
        idle.lent_bytes + idle.blocks.iter().map(Block::bytes).sum::<usize>()
    }
}

impl Lent {
    /// Its address.
    pub fn ptr(&self) -> *mut u8 {
        self.block.as_ref().map_or(std::ptr::null_mut(), Block::ptr)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            let mut idle = self.pool.idle();
            idle.lent_bytes -= block.bytes();
            idle.blocks.push(block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::SystemMemory;

    #[test]
    fn sizes_in_any_order_cost_the_largest() {
        for order in [[100, 5000, 300], [5000, 300, 100], [300, 100, 5000]] {
            let pool = ArenaPool::new(Box::new(SystemMemory));
            for bytes in order {
                drop(pool.lend(bytes).unwrap());
            }
            assert_eq!(pool.bytes(), 5000, "{order:?}");
        }
    }

    #[test]
    fn concurrent_runs_have_blocks_of_their_own() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        let (a, b) = (pool.lend(64).unwrap(), pool.lend(64).unwrap());
        assert_ne!(a.ptr(), b.ptr());
        assert_eq!(pool.bytes(), 128);
        drop((a, b));
        pool.trim();
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn absurd_requests_leave_the_pool_usable() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        assert!(pool.lend(usize::MAX / 2).is_err());
        assert!(pool.lend(64).is_ok());
    }
}
