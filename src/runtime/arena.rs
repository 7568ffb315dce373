//! The arena: one block of workspace, lent to a run.
//!
//! All sizes, modules and pipelines of a process share one pool per device. A run takes a block that is large enough (or has
//! the largest one replaced), two runs at once have two blocks. On a device a block belongs to a stream: the work of a run
//! that has given its block back may still be in flight there, and what comes next on the same stream waits for it. Every live specialization says what it [wants](ArenaPool::want);
//! a block larger than the largest want goes as soon as it is idle, so that the pool holds what the largest live size
//! needs, whatever order sizes come in, and shrinks when modules are unloaded. Blocks beyond what one run at a time needs
//! are kept for the next concurrent run until [`ArenaPool::trim`].

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock, Weak};

use oxidiff_kernels::fork::{Mutex, MutexGuard};

use crate::backend::{Block, Memory, SystemMemory, derived};
use crate::error::bytes_text;
use crate::{Error, Result};

/// The memory of the process's pool, if it is not the system's.
static MEMORY: OnceLock<Box<dyn Memory>> = OnceLock::new();

/// The chosen memory, else the system's.
struct ChosenMemory;

impl Memory for ChosenMemory {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        check_available(bytes, what)?;
        match MEMORY.get() {
            Some(memory) => memory.allocate(bytes, what),
            None => SystemMemory.allocate(bytes, what),
        }
    }
}

/// Takes the workspace of this process from `memory` from now on; the first caller decides.
pub fn set_memory(memory: Box<dyn Memory>) {
    // A second choice changes nothing.
    let _ = MEMORY.set(memory);
}

/// The pool that every executable of this process shares.
pub fn arena_pool() -> &'static Arc<ArenaPool> {
    static POOL: OnceLock<Arc<ArenaPool>> = OnceLock::new();
    POOL.get_or_init(|| ArenaPool::new(Box::new(ChosenMemory)))
}

/// The pool over `memory`, which every program that works there shares; without one, [`arena_pool`].
pub(super) fn arena_pool_over(memory: Option<Arc<dyn Memory>>) -> Arc<ArenaPool> {
    type Pools = Vec<(Arc<dyn Memory>, Weak<ArenaPool>)>;
    static POOLS: Mutex<Pools> = Mutex::new(Vec::new());
    let Some(memory) = memory else { return arena_pool().clone() };
    let mut pools = POOLS.lock();
    pools.retain(|(_, pool)| pool.strong_count() > 0);
    let known = pools.iter().find(|(m, _)| std::ptr::addr_eq(Arc::as_ptr(m), Arc::as_ptr(&memory)));
    if let Some(pool) = known.and_then(|(_, pool)| pool.upgrade()) {
        return pool;
    }
    let pool = ArenaPool::new(Box::new(memory.clone()));
    pools.push((memory, Arc::downgrade(&pool)));
    pool
}

/// Blocks from this size on are checked against what the machine has: a system that promises more than it has ends the
/// process instead of refusing.
const CHECKED_BYTES: usize = 64 << 20;

fn check_available(bytes: usize, what: &str) -> Result<()> {
    if bytes < CHECKED_BYTES {
        return Ok(());
    }
    match available_bytes() {
        Some(available) if bytes > available => Err(Error::OutOfMemory {
            asked_bytes: bytes,
            what: format!("{what}, {} are available", bytes_text(available)),
        }),
        _ => Ok(()),
    }
}

/// Memory that the system could give to this process; `None` where it does not say.
fn available_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Blocks, and what is wanted.
#[derive(Debug, Default)]
struct State {
    /// Each with its stream.
    idle: Vec<(usize, Block)>,
    lent_bytes: usize,
    /// How many live specializations want so many bytes.
    wants: BTreeMap<usize, usize>,
}

impl State {
    /// Takes out the idle blocks that are larger than anything wanted.
    fn excess(&mut self) -> Vec<(usize, Block)> {
        let largest = self.wants.last_key_value().map_or(0, |(bytes, _)| *bytes);
        let (keep, excess) = std::mem::take(&mut self.idle).into_iter().partition(|(_, b)| b.bytes() <= largest);
        self.idle = keep;
        excess
    }
}

/// A pool of workspace blocks.
pub struct ArenaPool {
    memory: Box<dyn Memory>,
    state: Mutex<State>,
}

/// A block lent to one run; goes back when dropped.
pub struct Lent {
    pool: Arc<ArenaPool>,
    stream: usize,
    /// Whether the block is kept for the next run.
    is_kept: bool,
    block: Option<Block>,
}

/// That a live specialization wants a block of some size.
pub struct Wanted {
    pool: Arc<ArenaPool>,
    bytes: usize,
}

impl Drop for Wanted {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        if let Some(count) = state.wants.get_mut(&self.bytes) {
            *count -= 1;
            if *count == 0 {
                state.wants.remove(&self.bytes);
            }
        }
        let excess = state.excess();
        drop(state);
        drop(excess);
    }
}

impl ArenaPool {
    /// An empty pool over `memory`.
    pub fn new(memory: Box<dyn Memory>) -> Arc<Self> {
        Arc::new(Self { memory, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Notes that a specialization with a workspace of `bytes` lives.
    pub fn want(self: &Arc<Self>, bytes: usize) -> Wanted {
        *self.state().wants.entry(bytes).or_default() += 1;
        Wanted { pool: self.clone(), bytes }
    }

    /// A block of at least `bytes`, for work on `stream`. The smallest idle block of the stream that suffices; else its
    /// largest idle one is given up for a new one, so that sizes in any order end with one block of the largest. If memory is
    /// short, every idle block and then every derived form of a weight goes first.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] if the block cannot be allocated even so.
    pub fn lend(self: &Arc<Self>, bytes: usize, stream: usize) -> Result<Lent> {
        let mut state = self.state();
        let own =
            |state: &State| -> Vec<usize> { (0..state.idle.len()).filter(|&i| state.idle[i].0 == stream).collect() };
        let size = |state: &State, i: usize| state.idle[i].1.bytes();
        let fits = own(&state).into_iter().filter(|&i| size(&state, i) >= bytes).min_by_key(|&i| size(&state, i));
        let block = match fits {
            Some(i) => state.idle.swap_remove(i).1,
            None => {
                if let Some(i) = own(&state).into_iter().max_by_key(|&i| size(&state, i)) {
                    drop(state.idle.swap_remove(i));
                }
                self.allocate(bytes, &mut state)?
            }
        };
        state.lent_bytes += block.bytes();
        drop(state);
        Ok(Lent { pool: self.clone(), stream, is_kept: true, block: Some(block) })
    }

    /// A fresh block for one run, which no other run gets: the work is recorded, and done who knows when.
    ///
    /// # Errors
    /// As [`ArenaPool::lend`].
    pub fn lend_once(self: &Arc<Self>, bytes: usize) -> Result<Lent> {
        let mut state = self.state();
        let block = self.allocate(bytes, &mut state)?;
        state.lent_bytes += block.bytes();
        drop(state);
        Ok(Lent { pool: self.clone(), stream: 0, is_kept: false, block: Some(block) })
    }

    fn allocate(&self, bytes: usize, state: &mut State) -> Result<Block> {
        let allocate = || self.memory.allocate(bytes, "the workspace of one run");
        let give_up: [&mut dyn FnMut() -> bool; 2] =
            [&mut || !std::mem::take(&mut state.idle).is_empty(), &mut || derived::shrink_to(0) > 0];
        let mut block = allocate();
        for way in give_up {
            if block.is_ok() {
                break;
            }
            if way() {
                block = allocate();
            }
        }
        block
    }

    /// Gives back every idle block.
    pub fn trim(&self) {
        let idle = std::mem::take(&mut self.state().idle);
        drop(idle);
    }

    /// Bytes held, idle and lent.
    pub fn bytes(&self) -> usize {
        let state = self.state();
        state.lent_bytes + state.idle.iter().map(|(_, b)| b.bytes()).sum::<usize>()
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
            let mut state = self.pool.state();
            state.lent_bytes -= block.bytes();
            if !self.is_kept {
                drop(state);
                drop(block);
                return;
            }
            state.idle.push((self.stream, block));
            let excess = state.excess();
            drop(state);
            drop(excess);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_in_any_order_cost_the_largest() {
        for order in [[100, 5000, 300], [5000, 300, 100], [300, 100, 5000]] {
            let pool = ArenaPool::new(Box::new(SystemMemory));
            let _wants: Vec<Wanted> = order.map(|bytes| pool.want(bytes)).into();
            for bytes in order {
                drop(pool.lend(bytes, 0).unwrap());
            }
            assert_eq!(pool.bytes(), 5000, "{order:?}");
        }
    }

    #[test]
    fn shrinks_to_the_largest_that_is_wanted() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        let (small, large) = (pool.want(100), pool.want(5000));
        drop(pool.lend(5000, 0).unwrap());
        drop(large);
        assert_eq!(pool.bytes(), 0, "the block is larger than anything wanted");
        drop(pool.lend(100, 0).unwrap());
        assert_eq!(pool.bytes(), 100);
        let (running, large) = (pool.lend(5000, 0).unwrap(), pool.want(5000));
        drop(large);
        assert_eq!(pool.bytes(), 5000, "a running call keeps its block");
        drop((running, small));
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn concurrent_runs_have_blocks_of_their_own() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        let _wanted = pool.want(64);
        let (a, b) = (pool.lend(64, 0).unwrap(), pool.lend(64, 0).unwrap());
        assert_ne!(a.ptr(), b.ptr());
        assert_eq!(pool.bytes(), 128);
        drop((a, b));
        assert_eq!(pool.bytes(), 128);
        pool.trim();
        assert_eq!(pool.bytes(), 0);
    }

    #[test]
    fn streams_have_blocks_of_their_own() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        let _wanted = pool.want(64);
        let at = |stream| pool.lend(64, stream).unwrap().ptr();
        let (first, second) = (at(1), at(2));
        assert_ne!(first, second, "work on the first may still be in flight");
        assert_eq!((at(1), at(2), pool.bytes()), (first, second, 128));
    }

    #[test]
    fn a_recorded_run_has_a_block_that_is_given_back() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        let _wanted = pool.want(64);
        drop(pool.lend(64, 0).unwrap());
        let once = pool.lend_once(64).unwrap();
        assert_ne!(once.ptr(), pool.lend(64, 0).unwrap().ptr());
        drop(once);
        assert_eq!(pool.bytes(), 64);
    }

    #[test]
    fn absurd_requests_leave_the_pool_usable() {
        let pool = ArenaPool::new(Box::new(SystemMemory));
        assert!(pool.lend(usize::MAX / 2, 0).is_err());
        assert!(pool.lend(64, 0).is_ok());
        let Err(Error::OutOfMemory { asked_bytes, what }) = ChosenMemory.allocate(1 << 50, "a test") else {
            panic!("no machine has a petabyte")
        };
        assert_eq!(asked_bytes, 1 << 50);
        assert!(what.contains("a test") && what.contains("available"), "{what}");
    }
}
