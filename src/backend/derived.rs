//! Forms derived from weights: packed panels, transformed filters, dense copies, values that depend on weights alone.
//!
//! They are a cache, never the truth. A [`Store`] holds the forms of one origin (one tensor with one content, or the
//! weights of one program); whoever has the same origin shares them, whichever program or module it belongs to. A form
//! lives until its store is dropped, it is evicted, or the [limit](set_limit) is passed; whoever runs with it holds an
//! `Arc` of it, so that nothing disappears under a kernel.
//!
//! For a memory budget: [`bytes`] is what all forms of the process hold, [`set_limit`] bounds it, [`shrink_to`] evicts the
//! least recently used ones. A form that finds no room under the limit is made, used by the step that asked and dropped.
//!
//! Invariants: no lock is held while a form is made, other than the one that makes a second asker wait; a child process
//! never waits for a maker that stayed behind in its parent.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{self, Arc, OnceLock, PoisonError, Weak};

use oxidiff_kernels::fork::Mutex;

use super::tensor::Block;
use crate::Result;

static BYTES: AtomicUsize = AtomicUsize::new(0);
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);
static CLOCK: AtomicU64 = AtomicU64::new(1);
static EVENTS: AtomicUsize = AtomicUsize::new(0);

/// A number larger than every one given before: orders events of this process.
pub fn stamp() -> u64 {
    CLOCK.fetch_add(1, Ordering::Relaxed)
}

/// Bytes of all derived forms of this process.
pub fn bytes() -> usize {
    BYTES.load(Ordering::Relaxed)
}

/// Changes whenever a form comes or goes.
pub(super) fn events() -> usize {
    EVENTS.load(Ordering::Relaxed)
}

/// Bounds the bytes that are kept from now on (`usize::MAX`: no bound), and evicts down to it.
pub fn set_limit(bytes: usize) {
    LIMIT.store(bytes, Ordering::Relaxed);
    shrink_to(bytes);
}

/// The bound.
pub fn limit() -> usize {
    LIMIT.load(Ordering::Relaxed)
}

/// Evicts the least recently used forms until at most `bytes` are kept; gives the bytes evicted. Forms in use by a
/// running step are let go by that step.
pub fn shrink_to(bytes: usize) -> usize {
    if self::bytes() <= bytes {
        return 0;
    }
    let stores: Vec<Arc<Store>> = stores().lock().values().filter_map(Weak::upgrade).collect();
    evict(stores.iter().map(|s| &**s), self::bytes() - bytes)
}

/// Evicts at least `bytes` of these stores' forms, or all; least recently used first. Gives the bytes evicted.
pub(super) fn evict<'a>(stores: impl Iterator<Item = &'a Store>, bytes: usize) -> usize {
    let mut forms: Vec<(u64, &Store, usize)> = Vec::new();
    for store in stores {
        for entry in store.entries.lock().iter() {
            if let State::Ready(form) = &entry.state {
                forms.push((form.used.load(Ordering::Relaxed), store, form.block.bytes()));
            }
        }
    }
    forms.sort_unstable_by_key(|(used, ..)| *used);
    let mut evicted = 0;
    for (used, store, size) in forms {
        if evicted >= bytes {
            break;
        }
        let mut entries = store.entries.lock();
        let place = entries
            .iter()
            .position(|e| matches!(&e.state, State::Ready(form) if form.used.load(Ordering::Relaxed) == used));
        // One that was used meanwhile stays.
        let Some(place) = place else { continue };
        let gone = entries.swap_remove(place);
        drop(entries);
        drop(gone);
        evicted += size;
    }
    evicted
}

fn stores() -> &'static Mutex<HashMap<u64, Weak<Store>>> {
    static STORES: OnceLock<Mutex<HashMap<u64, Weak<Store>>>> = OnceLock::new();
    STORES.get_or_init(Mutex::default)
}

/// Which form of its origin: what is packed, how, for which kernels.
pub type FormKey = Arc<[i64]>;

/// One derived form.
#[derive(Debug)]
pub struct Form {
    block: Block,
    used: AtomicU64,
}

impl Form {
    fn new(block: Block) -> Arc<Self> {
        BYTES.fetch_add(block.bytes(), Ordering::Relaxed);
        EVENTS.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { block, used: AtomicU64::new(stamp()) })
    }

    /// Its address; valid while the form is held.
    pub fn ptr(&self) -> *mut u8 {
        self.block.ptr()
    }

    /// Its size.
    pub fn bytes(&self) -> usize {
        self.block.bytes()
    }

    /// Its memory.
    pub(super) fn block(&self) -> &Block {
        &self.block
    }
}

impl Drop for Form {
    fn drop(&mut self) {
        BYTES.fetch_sub(self.block.bytes(), Ordering::Relaxed);
        EVENTS.fetch_add(1, Ordering::Relaxed);
    }
}

enum State {
    Ready(Arc<Form>),
    /// Somebody in this process makes it, and holds the lock meanwhile.
    Making(u32, Arc<sync::Mutex<()>>),
}

struct Entry {
    key: FormKey,
    state: State,
}

/// The forms of one origin.
pub struct Store {
    id: u64,
    entries: Mutex<Vec<Entry>>,
}

impl Store {
    /// An empty store.
    pub fn new() -> Arc<Self> {
        let store = Arc::new(Self { id: stamp(), entries: Mutex::default() });
        stores().lock().insert(store.id, Arc::downgrade(&store));
        store
    }

    /// Bytes of its forms.
    pub fn bytes(&self) -> usize {
        self.entries.lock().iter().map(|e| if let State::Ready(form) = &e.state { form.bytes() } else { 0 }).sum()
    }

    /// Lets go of every form.
    pub fn clear(&self) {
        let gone = std::mem::take(&mut *self.entries.lock());
        drop(gone);
    }

    /// Whether there is a form called `key`; if so, it counts as used now.
    pub fn touch(&self, key: &FormKey) -> bool {
        let entries = self.entries.lock();
        let form = entries.iter().find_map(|e| match &e.state {
            State::Ready(form) if e.key == *key => Some(form),
            _ => None,
        });
        form.is_some_and(|form| {
            form.used.store(stamp(), Ordering::Relaxed);
            true
        })
    }

    /// The form called `key`, made by `make` if there is none.
    ///
    /// # Errors
    /// What `make` says; the next asker tries again.
    pub fn get_or_make(&self, key: &FormKey, make: &mut dyn FnMut() -> Result<Block>) -> Result<Arc<Form>> {
        loop {
            let gate = {
                let mut entries = self.entries.lock();
                match entries.iter().position(|e| e.key == *key) {
                    Some(at) => match &entries[at].state {
                        State::Ready(form) => {
                            form.used.store(stamp(), Ordering::Relaxed);
                            return Ok(form.clone());
                        }
                        State::Making(process, gate) if *process == std::process::id() => gate.clone(),
                        State::Making(..) => {
                            entries.swap_remove(at);
                            continue;
                        }
                    },
                    None => {
                        let gate = Arc::new(sync::Mutex::new(()));
                        let making = gate.lock().unwrap_or_else(PoisonError::into_inner);
                        let state = State::Making(std::process::id(), gate.clone());
                        entries.push(Entry { key: key.clone(), state });
                        drop(entries);
                        let made = self.make(key, make);
                        drop(making);
                        return made;
                    }
                }
            };
            drop(gate.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn make(&self, key: &FormKey, make: &mut dyn FnMut() -> Result<Block>) -> Result<Arc<Form>> {
        let mut marker = Marker { store: self, key, form: None };
        let form = Form::new(make()?);
        marker.form = (bytes() <= limit()).then(|| form.clone());
        Ok(form)
    }
}

/// Replaces the marker of a form that is being made by the form, or removes it where there is none: making it failed or
/// panicked, or there is no room. A marker that was cleared meanwhile does not come back.
struct Marker<'a> {
    store: &'a Store,
    key: &'a FormKey,
    form: Option<Arc<Form>>,
}

impl Drop for Marker<'_> {
    fn drop(&mut self) {
        let mut entries = self.store.entries.lock();
        let Some(at) = entries.iter().position(|e| e.key == *self.key) else { return };
        match self.form.take() {
            Some(form) => entries[at].state = State::Ready(form),
            None => drop(entries.swap_remove(at)),
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        stores().lock().remove(&self.id);
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "forms of {} bytes", self.bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;
    use crate::backend::{Memory, SystemMemory};

    fn key(numbers: &[i64]) -> FormKey {
        numbers.into()
    }

    fn block(bytes: usize) -> Result<Block> {
        SystemMemory.allocate(bytes, "test")
    }

    #[test]
    fn forms_are_made_once_and_shared() {
        let store = Store::new();
        let mut made = 0;
        for _ in 0..3 {
            let mut make = || {
                made += 1;
                block(100)
            };
            assert_eq!(store.get_or_make(&key(&[1]), &mut make).unwrap().bytes(), 100);
        }
        assert_eq!((made, store.bytes()), (1, 100));
        let held = store.get_or_make(&key(&[2]), &mut || block(50)).unwrap();
        assert_eq!(store.bytes(), 150);
        store.clear();
        assert_eq!((store.bytes(), held.bytes()), (0, 50));
    }

    #[test]
    fn a_failure_leaves_no_marker() {
        let store = Store::new();
        let fail = || Err(Error::OutOfMemory { asked_bytes: 1, what: "test".to_owned() });
        assert!(store.get_or_make(&key(&[1]), &mut { fail }).is_err());
        let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = store.get_or_make(&key(&[1]), &mut || panic!("in make"));
        }));
        assert!(panics.is_err());
        assert!(store.get_or_make(&key(&[1]), &mut || block(1)).is_ok());
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let store = Store::new();
        for name in 0..4 {
            store.get_or_make(&key(&[name]), &mut || block(10)).unwrap();
        }
        store.get_or_make(&key(&[0]), &mut || block(10)).unwrap();
        assert_eq!(evict(std::iter::once(&*store), 15), 20);
        let mut names: Vec<i64> = store.entries.lock().iter().map(|e| e.key[0]).collect();
        names.sort_unstable();
        assert_eq!(names, [0, 3]);
    }

    #[test]
    fn many_threads_make_a_form_once() {
        let (store, made) = (Store::new(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut make = || {
                        made.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(std::time::Duration::from_millis(20));
                        block(8)
                    };
                    store.get_or_make(&key(&[7]), &mut make).unwrap();
                });
            }
        });
        assert_eq!(made.load(Ordering::Relaxed), 1);
    }
}
