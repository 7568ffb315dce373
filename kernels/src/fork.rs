//! Locks that a forked child never finds held.
//!
//! A child of `fork` has no thread but the one that forked, and a copy of every lock. What another thread held at that moment
//! stays locked there for ever. So whoever holds one of these locks is counted, and a fork waits until nobody does:
//! [`before`] closes the gate and waits for those inside, [`after_in_parent`] and [`after_in_child`] open it. Locks are held
//! for microseconds, while a program is compiled for as long as that takes.
//!
//! For state that outlives a call. Locks of a single region of the pool need no gate, and must have none: a worker that
//! waited at it would be waited for by a thread inside.
//!
//! What these locks guard is whole between any two statements of a holder: a panic leaves nothing to repair.

use std::cell::Cell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{self, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long a fork waits for those inside, and others for the fork: longer than anything takes that is not stuck.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at the gate.
const PAUSE: Duration = Duration::from_micros(20);

/// Threads inside.
static INSIDE: AtomicUsize = AtomicUsize::new(0);
/// Forks that wait or happen: the gate is closed.
static FORKS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Passes that this thread holds.
    static PASSES: Cell<usize> = const { Cell::new(0) };
}

/// One lock that a thread holds. Not `Send`: it counts for its thread.
struct Pass(std::marker::PhantomData<*const ()>);

impl Pass {
    fn enter() -> Pass {
        let held = PASSES.get();
        // Who is inside already must not wait for a fork that waits for it.
        if held == 0 {
            let mut since = None;
            loop {
                INSIDE.fetch_add(1, SeqCst);
                // A fork that takes longer waits for something that this thread holds: another handler's lock, say.
                if FORKS.load(SeqCst) == 0 || since.is_some_and(|start: Instant| start.elapsed() > PATIENCE) {
                    break;
                }
                INSIDE.fetch_sub(1, SeqCst);
                since.get_or_insert_with(Instant::now);
                std::thread::sleep(PAUSE);
            }
        }
        PASSES.set(held + 1);
        Pass(std::marker::PhantomData)
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        let left = PASSES.get() - 1;
        PASSES.set(left);
        if left == 0 {
            INSIDE.fetch_sub(1, SeqCst);
        }
    }
}

/// Closes the gate and waits until no other thread is inside, five seconds at most.
pub fn before() {
    FORKS.fetch_add(1, SeqCst);
    let own = usize::from(PASSES.get() > 0);
    let start = Instant::now();
    while INSIDE.load(SeqCst) > own && start.elapsed() < PATIENCE {
        std::thread::sleep(PAUSE);
    }
}

/// Opens the gate in the process that forked.
pub fn after_in_parent() {
    FORKS.fetch_sub(1, SeqCst);
}

/// Opens the gate in the child, where no other thread is.
pub fn after_in_child() {
    INSIDE.store(usize::from(PASSES.get() > 0), SeqCst);
    FORKS.store(0, SeqCst);
}

/// Has the C library do all this around every fork, and nothing between it and the fork. Python's own handlers would not do:
/// others run between these and the fork, which let go of the GIL, and whoever gets it then waits for it at the gate.
///
/// Whoever forks may hold the GIL: nobody inside asks for it.
#[cfg(unix)]
pub fn register() {
    extern "C" fn prepare() {
        before();
    }
    extern "C" fn parent() {
        after_in_parent();
    }
    extern "C" fn child() {
        after_in_child();
    }
    unsafe extern "C" {
        fn pthread_atfork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn())
        -> std::ffi::c_int;
    }
    static ONCE: sync::Once = sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the functions are there as long as the process, whose extension modules are never unloaded, and do not
        // panic. It fails only where there is no memory left.
        let _: std::ffi::c_int = unsafe { pthread_atfork(prepare, parent, child) };
    });
}

/// `f`, which no fork interrupts: for what is made once, while others wait for it.
pub fn shielded<T>(f: impl FnOnce() -> T) -> T {
    let _pass = Pass::enter();
    f()
}

/// A [`std::sync::Mutex`] whose holders a fork waits for, and which a panic does not poison.
#[derive(Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// A held [`Mutex`].
pub struct MutexGuard<'a, T> {
    // Dropped in this order.
    guard: sync::MutexGuard<'a, T>,
    _pass: Pass,
}

impl<T> Mutex<T> {
    /// An open lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let pass = Pass::enter();
        MutexGuard { guard: self.0.lock().unwrap_or_else(PoisonError::into_inner), _pass: pass }
    }

    /// The lock, if nobody holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        let pass = Pass::enter();
        match self.0.try_lock() {
            Ok(guard) => Some(MutexGuard { guard, _pass: pass }),
            Err(TryLockError::Poisoned(held)) => Some(MutexGuard { guard: held.into_inner(), _pass: pass }),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T: fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A [`std::sync::RwLock`] whose holders a fork waits for, and which a panic does not poison.
#[derive(Debug, Default)]
pub struct RwLock<T>(sync::RwLock<T>);

/// A [`RwLock`] held for reading.
pub struct ReadGuard<'a, T> {
    // Dropped in this order.
    guard: sync::RwLockReadGuard<'a, T>,
    _pass: Pass,
}

/// A [`RwLock`] held for writing.
pub struct WriteGuard<'a, T> {
    // Dropped in this order.
    guard: sync::RwLockWriteGuard<'a, T>,
    _pass: Pass,
}

impl<T> RwLock<T> {
    /// An open lock around `value`.
    pub const fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// Waits until nobody writes.
    pub fn read(&self) -> ReadGuard<'_, T> {
        let pass = Pass::enter();
        ReadGuard { guard: self.0.read().unwrap_or_else(PoisonError::into_inner), _pass: pass }
    }

    /// Waits until nobody reads or writes.
    pub fn write(&self) -> WriteGuard<'_, T> {
        let pass = Pass::enter();
        WriteGuard { guard: self.0.write().unwrap_or_else(PoisonError::into_inner), _pass: pass }
    }
}

impl<T> Deref for ReadGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> Deref for WriteGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for WriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}
