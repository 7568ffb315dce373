//! The live programs of this process, by identity.
//!
//! References are weak: a program lives as long as a module uses it. Two threads that ask for the same program at once
//! compile it once: the second waits for the first.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

use oxidiff_kernels::fork::Mutex;

use super::Program;
use crate::Result;

type Slot = Arc<Mutex<Weak<Program>>>;

fn slot(key: &str) -> Slot {
    static PROGRAMS: OnceLock<Mutex<HashMap<String, Slot>>> = OnceLock::new();
    let programs = PROGRAMS.get_or_init(Mutex::default);
    let mut programs = programs.lock();
    // A slot that nobody waits for and whose program is gone is of no use.
    programs.retain(|_, s| Arc::strong_count(s) > 1 || s.try_lock().is_some_and(|weak| weak.strong_count() > 0));
    programs.entry(key.to_owned()).or_default().clone()
}

/// The live program called `key`, else the one that `make` compiles; and whether it is new.
///
/// # Errors
/// Those of `make`; the next caller tries again.
pub fn get_or_make(key: &str, make: impl FnOnce() -> Result<Program>) -> Result<(Arc<Program>, bool)> {
    let slot = slot(key);
    let mut live = slot.lock();
    if let Some(program) = live.upgrade() {
        return Ok((program, false));
    }
    let program = Arc::new(make()?);
    *live = Arc::downgrade(&program);
    Ok((program, true))
}
