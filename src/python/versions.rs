//! `Dicts`: dictionaries, and whether any of them was written since they were noted.
//!
//! CPython 3.10 and 3.11 give every dictionary a version tag ([`DictLayout`]). From 3.12 on an interpreter tells watchers of
//! every write to a dictionary that is watched, just before it: one watcher of the process serves all modules, and notes in
//! a cell per dictionary when it was written. Asking then costs one word while nobody writes to anything that is watched.
//! The functions are no part of the stable ABI, so they are looked up by name, and used only if they behave as expected.
//! Where there is neither (another build, free threads) there are copies, for the caller to compare.
//!
//! Invariants: cells are read and written under the GIL alone; a dictionary is held as long as it has a cell. Between the
//! notice of a write and the write itself no Python code runs, so nobody sees the one without the other.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;

use super::addresses::ByAddress;
use super::layout::{DictLayout, detach, dict_changes, is_free_threaded, prefetch};

/// How many dictionaries ahead of the one that is read memory is asked for.
const AHEAD: usize = 32;

/// `PyDict_EVENT_DEALLOCATED`.
const DEALLOCATED: c_int = 5;

type Callback = unsafe extern "C" fn(c_int, *mut ffi::PyObject, *mut ffi::PyObject, *mut ffi::PyObject) -> c_int;
type OfDict = unsafe extern "C" fn(c_int, *mut ffi::PyObject) -> c_int;

/// The watcher of this process.
#[derive(Clone, Copy)]
pub(super) struct Watcher {
    id: c_int,
    watch: OfDict,
    unwatch: OfDict,
    /// Whether it sees writes to attributes of objects only if their dictionaries were detached.
    needs_detached: bool,
}

/// Writes to watched dictionaries so far.
static WRITES: AtomicU64 = AtomicU64::new(0);

/// When each watched dictionary was written last.
#[derive(Default)]
struct Cells {
    written: Vec<u64>,
    users: Vec<usize>,
    free: Vec<usize>,
    by_address: ByAddress<usize>,
}

/// The cells. The lock is taken under the GIL alone, so it is free whenever a process forks.
fn cells() -> MutexGuard<'static, Cells> {
    static CELLS: LazyLock<Mutex<Cells>> = LazyLock::new(Mutex::default);
    CELLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Told by the interpreter before a watched dictionary is written. Calls nothing of Python's.
unsafe extern "C" fn on_write(
    event: c_int,
    dict: *mut ffi::PyObject,
    _key: *mut ffi::PyObject,
    _value: *mut ffi::PyObject,
) -> c_int {
    let now = WRITES.fetch_add(1, Ordering::Relaxed) + 1;
    let mut cells = cells();
    if let Some(&cell) = cells.by_address.get(&dict.addr()) {
        if let Some(written) = cells.written.get_mut(cell) {
            *written = now;
        }
        if event == DEALLOCATED {
            cells.by_address.remove(&dict.addr());
        }
    }
    0
}

impl Watcher {
    /// The watcher, made once; `None` where interpreters have none or it does not see every write.
    pub(super) fn get(py: Python<'_>) -> Option<Self> {
        static WATCHER: PyOnceLock<Option<Watcher>> = PyOnceLock::new();
        *WATCHER.get_or_init(py, || {
            let watcher = Self::make(py)?;
            let found = [watcher, Self { needs_detached: true, ..watcher }];
            found.into_iter().find(|watcher| watcher.is_right(py).unwrap_or(false))
        })
    }

    #[cfg(unix)]
    fn make(py: Python<'_>) -> Option<Self> {
        let version = py.version_info();
        if (version.major, version.minor) < (3, 12) || is_free_threaded(py).unwrap_or(true) {
            return None;
        }
        let process = libloading::os::unix::Library::this();
        // SAFETY: public functions of CPython 3.12 and later, with these signatures in every version that has them; the
        // process keeps the interpreter loaded as long as this code runs.
        let (add, watch, unwatch) = unsafe {
            let add = *process.get::<unsafe extern "C" fn(Callback) -> c_int>(b"PyDict_AddWatcher\0").ok()?;
            let watch = *process.get::<OfDict>(b"PyDict_Watch\0").ok()?;
            (add, watch, *process.get::<OfDict>(b"PyDict_Unwatch\0").ok()?)
        };
        // SAFETY: the GIL is held, and the callback lives as long as the process.
        let id = unsafe { add(on_write) };
        if id < 0 {
            // All watchers of the interpreter are taken.
            PyErr::take(py);
            return None;
        }
        Some(Self { id, watch, unwatch, needs_detached: false })
    }

    #[cfg(not(unix))]
    fn make(_py: Python<'_>) -> Option<Self> {
        None
    }

    fn is_right(self, py: Python<'_>) -> PyResult<bool> {
        dict_changes(py, self.needs_detached, &|dicts| {
            let mut noted = Dicts { dicts: Vec::new(), how: How::Cells(Noted::new(self)) };
            dicts.iter().try_for_each(|dict| noted.note(dict))?;
            Ok(Box::new(move |py: Python<'_>| {
                let changed = noted.changed(py);
                noted.renew();
                changed
            }))
        })
    }

    /// The cell of a dictionary, which is watched from now on.
    fn cell(self, dict: &Bound<'_, PyDict>) -> PyResult<usize> {
        let mut cells = cells();
        let address = dict.as_ptr().addr();
        if let Some(&cell) = cells.by_address.get(&address) {
            cells.users[cell] += 1;
            return Ok(cell);
        }
        // SAFETY: a live dictionary, under the GIL, and an id that the interpreter gave.
        if unsafe { (self.watch)(self.id, dict.as_ptr()) } != 0 {
            return Err(PyErr::fetch(dict.py()));
        }
        let cell = cells.free.pop().unwrap_or(cells.written.len());
        if cell == cells.written.len() {
            cells.written.push(0);
            cells.users.push(0);
        }
        cells.users[cell] = 1;
        cells.by_address.insert(address, cell);
        Ok(cell)
    }

    /// Lets go of a cell; nobody is told any more of writes to a dictionary without users.
    fn release(self, py: Python<'_>, cell: usize, dict: &Py<PyDict>) {
        let mut cells = cells();
        cells.users[cell] -= 1;
        if cells.users[cell] > 0 {
            return;
        }
        cells.free.push(cell);
        if cells.by_address.remove(&dict.as_ptr().addr()).is_some() {
            // SAFETY: the dictionary is held by the caller, and watched under this id since it had a cell.
            let status = unsafe { (self.unwatch)(self.id, dict.as_ptr()) };
            if status != 0 {
                PyErr::take(py);
            }
        }
    }
}

/// Cells of dictionaries, and what they were.
struct Noted {
    watcher: Watcher,
    cells: Vec<usize>,
    written: Vec<u64>,
    /// `WRITES` when nothing of this was known to be written.
    seen: AtomicU64,
}

impl Noted {
    fn new(watcher: Watcher) -> Self {
        Self { watcher, cells: Vec::new(), written: Vec::new(), seen: AtomicU64::new(0) }
    }

    fn is_changed(&self) -> bool {
        let now = WRITES.load(Ordering::Relaxed);
        if self.seen.load(Ordering::Relaxed) == now {
            return false;
        }
        let cells = cells();
        if self.cells.iter().zip(&self.written).any(|(&cell, &before)| cells.written[cell] != before) {
            return true;
        }
        self.seen.store(now, Ordering::Relaxed);
        false
    }
}

/// Tags of dictionaries.
struct Tagged {
    layout: DictLayout,
    versions: Vec<u64>,
    /// The dictionaries in the order of their addresses, once all are noted.
    pointers: Vec<usize>,
    /// The sum of their versions. A write gives a dictionary a version that is higher than any before it, so that the sum
    /// is the same only if nothing was written.
    sum: u64,
}

enum How {
    Tags(Tagged),
    Cells(Noted),
    Copies(Vec<Py<PyDict>>),
}

/// Dictionaries, held, with what shows that they were written.
pub(super) struct Dicts {
    dicts: Vec<Py<PyDict>>,
    how: How,
}

impl Dicts {
    /// None yet, to be watched in the best way there is.
    pub fn new(py: Python<'_>) -> Self {
        let how = if let Some(watcher) = Watcher::get(py) {
            How::Cells(Noted::new(watcher))
        } else if let Some(layout) = DictLayout::get(py) {
            How::Tags(Tagged { layout, versions: Vec::new(), pointers: Vec::new(), sum: 0 })
        } else {
            How::Copies(Vec::new())
        };
        Self { dicts: Vec::new(), how }
    }

    /// Whether writes show without comparing copies.
    pub fn is_available(py: Python<'_>) -> bool {
        Watcher::get(py).is_some() || DictLayout::get(py).is_some()
    }

    /// Adds the attributes of an object as they are now; to be called before they are read.
    pub fn note_attributes(&mut self, object: &Bound<'_, PyAny>, dict: &Bound<'_, PyDict>) -> PyResult<()> {
        if let How::Cells(Noted { watcher: Watcher { needs_detached: true, .. }, .. }) = &self.how {
            // Where this fails, the attributes lie in the dictionary: only plain objects can have theirs beside it.
            let _ = detach(object, dict);
        }
        self.note(dict)
    }

    /// Adds a dictionary as it is now; to be called before it is read.
    pub fn note(&mut self, dict: &Bound<'_, PyDict>) -> PyResult<()> {
        match &mut self.how {
            How::Cells(noted) => {
                let cell = noted.watcher.cell(dict)?;
                noted.cells.push(cell);
                noted.written.push(cells().written[cell]);
            }
            How::Tags(tagged) => {
                // SAFETY: a live dictionary, under the GIL.
                let version = unsafe { tagged.layout.version(dict.as_ptr().cast()) };
                tagged.versions.push(version);
                tagged.sum = tagged.sum.wrapping_add(version);
                tagged.pointers.push(dict.as_ptr().expose_provenance());
            }
            How::Copies(copies) => copies.push(dict.copy()?.unbind()),
        }
        self.dicts.push(dict.clone().unbind());
        Ok(())
    }

    /// No more will be noted.
    pub fn close(&mut self) {
        if let How::Tags(tagged) = &mut self.how {
            tagged.pointers.sort_unstable();
        }
    }

    /// What was written until now counts as seen.
    fn renew(&mut self) {
        if let How::Cells(noted) = &mut self.how {
            let cells = cells();
            noted.written = noted.cells.iter().map(|&cell| cells.written[cell]).collect();
        }
    }

    /// Whether any was written. Copies do not show it.
    pub fn is_changed(&self, _py: Python<'_>) -> bool {
        match &self.how {
            How::Cells(noted) => noted.is_changed(),
            How::Tags(tagged) => {
                let mut sum = 0u64;
                for (i, &dict) in tagged.pointers.iter().enumerate() {
                    if let Some(&ahead) = tagged.pointers.get(i + AHEAD) {
                        prefetch(tagged.layout.address(ahead));
                    }
                    // SAFETY: each dictionary is kept alive by `self.dicts`; `_py` proves that the GIL is held.
                    sum = sum.wrapping_add(unsafe { tagged.layout.version(std::ptr::with_exposed_provenance(dict)) });
                }
                sum != tagged.sum
            }
            How::Copies(_) => false,
        }
    }

    /// Indices of those that were written. Copies do not show it.
    pub fn changed(&self, _py: Python<'_>) -> Vec<usize> {
        let is_changed = |i: usize, dict: &Py<PyDict>| match &self.how {
            How::Cells(noted) => cells().written[noted.cells[i]] != noted.written[i],
            // SAFETY: each dictionary is kept alive by `self.dicts`; `_py` proves that the GIL is held.
            How::Tags(tagged) => (unsafe { tagged.layout.version(dict.as_ptr().cast()) }) != tagged.versions[i],
            How::Copies(_) => false,
        };
        self.dicts.iter().enumerate().filter(|(i, dict)| is_changed(*i, dict)).map(|(i, _)| i).collect()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.dicts.len()
    }

    /// All, in the order in which they were noted.
    pub fn all(&self) -> &[Py<PyDict>] {
        &self.dicts
    }

    /// What they held, where nothing else shows writes; else nothing.
    pub fn copies(&self) -> &[Py<PyDict>] {
        if let How::Copies(copies) = &self.how { copies } else { &[] }
    }

    /// Shows the garbage collector what is held.
    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.dicts.iter().chain(self.copies()).try_for_each(|dict| visit.call(dict))
    }
}

impl Drop for Dicts {
    fn drop(&mut self) {
        if let How::Cells(noted) = &self.how {
            // Where the interpreter is gone, so are its watchers.
            Python::try_attach(|py| {
                for (&cell, dict) in noted.cells.iter().zip(&self.dicts) {
                    noted.watcher.release(py, cell, dict);
                }
            });
        }
    }
}
