//! One thread pool for the process.
//!
//! A *region* is a number of tasks handed out one by one from a counter; the calling thread takes tasks like any worker,
//! so a region of one task costs nothing but a few instructions. Workers spin for some tens of microseconds after a
//! region (the next one usually follows at once), then park.
//!
//! Invariants:
//! - Regions of several threads are serialised: a second caller waits for the first one's region and then has all
//!   workers. A region started from inside a task runs on that task's thread alone.
//! - [`Pool::run`] returns only after every task has ended. A worker that did not wake up in time is withdrawn, not
//!   waited for.
//! - A panic in a task stops the hand-out and continues on the caller once every task in flight has ended.
//! - After `fork` the child starts with fresh workers; nothing of the parent's pool is touched but its memory.
//! - Scratch memory is allocated by the caller before a region starts, so that running out of memory is an error value
//!   and never an abort.

use std::alloc::{Layout, alloc, dealloc};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr::null_mut;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks. Regions of one model call follow each other within a few
/// microseconds; waking a parked thread costs 5 to 50.
const SPIN: Duration = Duration::from_micros(40);
/// Alignment of scratch memory: a page, hence also a cache line and a vector.
pub const SCRATCH_ALIGN: usize = 4096;
/// Most threads of a pool.
pub const MAX_THREADS: usize = 256;

/// Scratch memory could not be allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Bytes asked for, per thread.
    pub bytes: usize,
}

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "out of memory: {} bytes of scratch memory per thread", self.bytes)
    }
}

impl std::error::Error for OutOfMemory {}

/// The thread a task runs on.
#[derive(Clone, Copy, Debug)]
pub struct Worker {
    /// 0 is the caller of the region; below the pool's thread count.
    pub index: usize,
    /// Scratch memory of this thread for the duration of the task: page-aligned, uninitialised, at least the bytes the
    /// region was started with (null if that was 0).
    pub scratch: *mut u8,
}

/// A pool of worker threads; see the module documentation.
pub struct Pool {
    /// Replaced (and the old one leaked) in a forked child.
    inner: AtomicPtr<Inner>,
    threads: AtomicUsize,
}

struct Inner {
    pid: u32,
    region: Mutex<Region>,
}

/// State of the thread that holds the region lock.
struct Region {
    slots: Vec<Arc<Slot>>,
    handles: Vec<Thread>,
    scratch: Vec<Scratch>,
}

/// One worker's mailbox, on its own cache lines.
#[repr(align(128))]
struct Slot {
    state: AtomicU32,
    parked: AtomicBool,
    job: UnsafeCell<*const Job<'static>>,
}

// SAFETY: `job` is written by the holder of the region lock while `state` is IDLE and read by the worker after it saw
// POSTED (release/acquire on `state`), so accesses never overlap.
unsafe impl Sync for Slot {}
// SAFETY: as above; the pointer is only followed between POSTED and the worker's IDLE, while the job is alive.
unsafe impl Send for Slot {}

const IDLE: u32 = 0;
const POSTED: u32 = 1;
const RUNNING: u32 = 2;
const EXIT: u32 = 3;

struct Job<'a> {
    next: AtomicUsize,
    tasks: usize,
    body: &'a (dyn Fn(usize, Worker) + Sync),
    workers: &'a [Worker],
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `workers` holds pointers that are handed, one each, to one thread at a time.
unsafe impl Sync for Job<'_> {}

/// A growable, page-aligned allocation.
struct Scratch {
    ptr: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory owned by the value.
unsafe impl Send for Scratch {}

thread_local! {
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// The pool of the process. It starts with as many threads as the processor offers; see [`Pool::set_threads`].
    pub fn global() -> &'static Pool {
        static GLOBAL: OnceLock<Pool> = OnceLock::new();
        GLOBAL.get_or_init(|| Pool::new(std::thread::available_parallelism().map_or(1, |n| n.get())))
    }

    /// A pool of its own, for tests and measurements. Its workers end when it is dropped.
    pub fn new(threads: usize) -> Pool {
        let threads = threads.clamp(1, MAX_THREADS);
        Pool { inner: AtomicPtr::new(Inner::boxed()), threads: AtomicUsize::new(threads) }
    }

    /// Threads that work on a region, the caller included.
    pub fn threads(&self) -> usize {
        self.threads.load(Relaxed)
    }

    /// Sets the number of threads (clamped to 1..=[`MAX_THREADS`]) for the regions that start from now on.
    pub fn set_threads(&self, threads: usize) {
        self.threads.store(threads.clamp(1, MAX_THREADS), Relaxed);
    }

    /// Runs `body(task, worker_index)` for every task in `0..tasks` and returns when all have ended.
    ///
    /// # Panics
    /// Continues the panic of a task.
    pub fn run<F: Fn(usize, usize) + Sync>(&self, tasks: usize, body: F) {
        let outcome = self.run_scratch(tasks, 0, |task, worker| body(task, worker.index));
        debug_assert!(outcome.is_ok(), "a region without scratch memory allocates none");
    }

    /// Like [`Pool::run`], with at least `bytes` of scratch memory for every thread.
    ///
    /// # Errors
    /// [`OutOfMemory`] if the scratch memory cannot be allocated; no task has run then.
    ///
    /// # Panics
    /// Continues the panic of a task.
    pub fn run_scratch<F: Fn(usize, Worker) + Sync>(
        &self,
        tasks: usize,
        bytes: usize,
        body: F,
    ) -> Result<(), OutOfMemory> {
        if tasks == 0 {
            return Ok(());
        }
        if IN_REGION.get() {
            return run_inline(tasks, bytes, &body);
        }
        let threads = self.threads().min(tasks);
        if threads == 1 && bytes == 0 {
            let worker = Worker { index: 0, scratch: null_mut() };
            (0..tasks).for_each(|task| body(task, worker));
            return Ok(());
        }
        let mut region = self.region();
        let threads = region.prepare(threads, bytes)?;
        let workers: Vec<Worker> =
            (0..threads).map(|index| Worker { index, scratch: region.scratch_of(index, bytes) }).collect();
        let job = Job { next: AtomicUsize::new(0), tasks, body: &body, workers: &workers, panic: Mutex::new(None) };
        region.execute(&job);
        drop(region);
        match job.panic.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(payload) => resume_unwind(payload),
            None => Ok(()),
        }
    }

    /// Bytes of scratch memory held.
    pub fn scratch_bytes(&self) -> usize {
        self.region().scratch.iter().map(|scratch| scratch.bytes).sum()
    }

    /// Gives all scratch memory back.
    pub fn release_scratch(&self) {
        self.region().scratch.clear();
    }

    fn region(&self) -> MutexGuard<'_, Region> {
        let pid = std::process::id();
        let mut inner = self.inner.load(Acquire);
        // SAFETY: `inner` always points to a live `Inner`: replaced ones are leaked.
        if unsafe { (*inner).pid } != pid {
            let fresh = Inner::boxed();
            match self.inner.compare_exchange(inner, fresh, AcqRel, Acquire) {
                Ok(_) => inner = fresh,
                Err(current) => {
                    // SAFETY: `fresh` came from a box and was not published.
                    drop(unsafe { Box::from_raw(fresh) });
                    inner = current;
                }
            }
        }
        // SAFETY: as above. Poisoning carries no information: a region's state is valid between any two statements.
        unsafe { (*inner).region.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let inner = *self.inner.get_mut();
        // SAFETY: the pointer came from a box and `self` is its only owner.
        let inner = unsafe { Box::from_raw(inner) };
        if inner.pid != std::process::id() {
            std::mem::forget(inner);
            return;
        }
        let region = inner.region.lock().unwrap_or_else(PoisonError::into_inner);
        for (slot, handle) in region.slots.iter().zip(&region.handles) {
            slot.state.store(EXIT, SeqCst);
            handle.unpark();
        }
    }
}

impl Inner {
    fn boxed() -> *mut Inner {
        let region = Region { slots: Vec::new(), handles: Vec::new(), scratch: Vec::new() };
        Box::into_raw(Box::new(Inner { pid: std::process::id(), region: Mutex::new(region) }))
    }
}

impl Region {
    /// Makes workers and scratch memory for `threads` threads; returns how many there are (fewer if the system refuses
    /// to start threads).
    fn prepare(&mut self, threads: usize, bytes: usize) -> Result<usize, OutOfMemory> {
        while self.slots.len() + 1 < threads {
            let slot = Arc::new(Slot {
                state: AtomicU32::new(IDLE),
                parked: AtomicBool::new(false),
                job: UnsafeCell::new(std::ptr::null()),
            });
            let (own, index) = (slot.clone(), self.slots.len() + 1);
            let name = format!("oxidiff-{index}");
            let Ok(handle) = std::thread::Builder::new().name(name).spawn(move || own.work(index)) else { break };
            self.slots.push(slot);
            self.handles.push(handle.thread().clone());
        }
        let threads = threads.min(self.slots.len() + 1);
        if bytes > 0 {
            self.scratch.resize_with(self.scratch.len().max(threads), || Scratch { ptr: null_mut(), bytes: 0 });
            self.scratch[..threads].iter_mut().try_for_each(|scratch| scratch.reserve(bytes))?;
        }
        Ok(threads)
    }

    fn scratch_of(&self, index: usize, bytes: usize) -> *mut u8 {
        if bytes == 0 { null_mut() } else { self.scratch[index].ptr }
    }

    fn execute(&self, job: &Job<'_>) {
        let helpers = job.workers.len() - 1;
        for (slot, handle) in self.slots[..helpers].iter().zip(&self.handles) {
            // SAFETY: the slot is IDLE (the previous region waited for it), so the worker does not read `job`. The
            // lifetime is erased; `retire` below outlives every use.
            unsafe { *slot.job.get() = (job as *const Job<'_>).cast() };
            slot.state.store(POSTED, SeqCst);
            if slot.parked.load(SeqCst) {
                handle.unpark();
            }
        }
        job.take_tasks(0);
        self.slots[..helpers].iter().for_each(|slot| slot.retire());
    }
}

impl Slot {
    /// Returns once the worker does not and will not touch the posted job.
    fn retire(&self) {
        if self.state.compare_exchange(POSTED, IDLE, AcqRel, Acquire).is_ok() {
            return;
        }
        let mut spins = 0u32;
        while self.state.load(Acquire) == RUNNING {
            spins += 1;
            if spins < 10_000 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    fn work(&self, index: usize) {
        while self.await_post() {
            if self.state.compare_exchange(POSTED, RUNNING, AcqRel, Acquire).is_err() {
                continue;
            }
            // SAFETY: RUNNING keeps the poster inside `retire`, hence the job alive.
            unsafe { (**self.job.get()).take_tasks(index) };
            self.state.store(IDLE, Release);
        }
    }

    /// Waits for a job; false when the worker shall end.
    fn await_post(&self) -> bool {
        let idle_since = Instant::now();
        loop {
            for _ in 0..32 {
                match self.state.load(Acquire) {
                    IDLE => std::hint::spin_loop(),
                    state => return state != EXIT,
                }
            }
            if idle_since.elapsed() > SPIN {
                break;
            }
        }
        self.parked.store(true, SeqCst);
        while self.state.load(SeqCst) == IDLE {
            std::thread::park();
        }
        self.parked.store(false, SeqCst);
        self.state.load(Acquire) != EXIT
    }
}

impl Job<'_> {
    fn take_tasks(&self, index: usize) {
        let worker = self.workers[index];
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _flag = RegionFlag::set();
            loop {
                let task = self.next.fetch_add(1, Relaxed);
                if task >= self.tasks {
                    break;
                }
                (self.body)(task, worker);
            }
        }));
        if let Err(payload) = outcome {
            self.next.store(self.tasks, Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        }
    }
}

/// Marks the thread as inside a region until dropped.
struct RegionFlag;

impl RegionFlag {
    fn set() -> RegionFlag {
        IN_REGION.set(true);
        RegionFlag
    }
}

impl Drop for RegionFlag {
    fn drop(&mut self) {
        IN_REGION.set(false);
    }
}

fn run_inline(tasks: usize, bytes: usize, body: &dyn Fn(usize, Worker)) -> Result<(), OutOfMemory> {
    let mut scratch = Scratch { ptr: null_mut(), bytes: 0 };
    if bytes > 0 {
        scratch.reserve(bytes)?;
    }
    let worker = Worker { index: 0, scratch: scratch.ptr };
    (0..tasks).for_each(|task| body(task, worker));
    Ok(())
}

impl Scratch {
    fn reserve(&mut self, bytes: usize) -> Result<(), OutOfMemory> {
        if self.bytes >= bytes {
            return Ok(());
        }
        self.free();
        let layout = Layout::from_size_align(bytes, SCRATCH_ALIGN).map_err(|_| OutOfMemory { bytes })?;
        // SAFETY: `bytes` is not 0: it exceeds `self.bytes`.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            return Err(OutOfMemory { bytes });
        }
        *self = Scratch { ptr, bytes };
        Ok(())
    }

    fn free(&mut self) {
        if !self.ptr.is_null() {
            // SAFETY: allocated by `reserve` with this size and alignment.
            unsafe { dealloc(self.ptr, Layout::from_size_align_unchecked(self.bytes, SCRATCH_ALIGN)) };
        }
        self.ptr = null_mut();
        self.bytes = 0;
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.free();
    }
}
