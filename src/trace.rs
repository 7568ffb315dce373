//! What a developer sees: messages by `OXIDIFF_DEBUG` level and the files of `OXIDIFF_DUMP`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::config::config;

/// Whether messages of a level are printed.
pub fn shows(level: u8) -> bool {
    config().debug >= level
}

/// Prints a line to standard error if the debug level is at least `level`.
pub fn debug(level: u8, message: impl FnOnce() -> String) {
    if shows(level) {
        eprintln!("oxidiff: {}", message());
    }
}

/// Logs one rewrite (level 6).
pub fn rewrite(pass: &str, rule: &str, what: impl FnOnce() -> String) {
    debug(6, || format!("{pass}/{rule}: {}", what()));
}

/// Writes the stages of one compile into `OXIDIFF_DUMP/<graph>-<n>/`; does nothing where the variable is not set.
#[derive(Debug)]
pub struct Dump {
    folder: Option<std::path::PathBuf>,
}

impl Dump {
    /// A folder of its own for the compile called `name`. A folder that cannot be made costs a message, not the compile.
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let folder =
            config().dump.as_ref().map(|root| root.join(format!("{}-{name}", COUNT.fetch_add(1, Ordering::Relaxed))));
        match folder.as_ref().map(std::fs::create_dir_all) {
            Some(Err(e)) => {
                debug(0, || format!("cannot write to OXIDIFF_DUMP: {e}"));
                Self { folder: None }
            }
            _ => Self { folder },
        }
    }

    /// Whether anything is written.
    pub fn is_on(&self) -> bool {
        self.folder.is_some()
    }

    /// Writes one stage, `00-captured.ir` and so on.
    pub fn write(&self, file: &str, text: impl FnOnce() -> String) {
        if let Some(folder) = &self.folder
            && let Err(e) = std::fs::write(folder.join(file), text())
        {
            debug(0, || format!("cannot write {file} to OXIDIFF_DUMP: {e}"));
        }
    }
}

/// Times named stages of a compile.
#[derive(Debug, Default, Clone)]
pub struct Timings {
    /// Stage and time, in the order in which they ran.
    pub stages: Vec<(String, Duration)>,
}

impl Timings {
    /// Runs `f`, and books its time under `stage`.
    pub fn time<T>(&mut self, stage: &str, f: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = f();
        self.stages.push((stage.to_owned(), start.elapsed()));
        out
    }

    /// Sum of all stages.
    pub fn total(&self) -> Duration {
        self.stages.iter().map(|(_, d)| *d).sum()
    }
}
