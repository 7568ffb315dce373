//! Environment variables: the only file that reads them, and the table that documents them (`oxidiff doctor` prints it).
//!
//! Behaviour options are per module ([`crate::compiler::Options`]); the environment only locates, limits and debugs.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// One variable: name, default, meaning.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// With prefix.
    pub name: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    /// One line.
    pub doc: &'static str,
}

/// Every variable that is read.
pub const KNOBS: &[Knob] = &[
    Knob { name: "OXIDIFF_CACHE_DIR", default: "platform cache folder", doc: "where compiled programs are remembered" },
    Knob {
        name: "OXIDIFF_DEBUG",
        default: "0",
        doc: "1 summary and fallbacks, 2 per-step times, 3 graph after each changing pass, 4 kernels, 5 memory, 6 every rewrite",
    },
    Knob { name: "OXIDIFF_DUMP", default: "", doc: "folder that receives every stage of every compile as text" },
    Knob { name: "OXIDIFF_NUM_THREADS", default: "torch.get_num_threads()", doc: "threads of the CPU backend" },
    Knob { name: "OXIDIFF_DISABLE", default: "0", doc: "1: every compiled module runs eager" },
    Knob { name: "OXIDIFF_ISA", default: "best", doc: "avx512, avx2 or portable: forces a CPU instruction set" },
    Knob { name: "OXIDIFF_VERIFY", default: "0", doc: "1: verify the graph after every pass" },
    Knob { name: "OXIDIFF_DISABLE_PASS", default: "", doc: "passes to skip, separated by commas" },
    Knob { name: "OXIDIFF_STOP_AFTER", default: "", doc: "pass after which no further pass runs" },
    Knob {
        name: "OXIDIFF_MAX_REWRITES",
        default: "unlimited",
        doc: "number of rewrites after which no further one is made",
    },
    Knob { name: "OXIDIFF_BACKEND", default: "auto", doc: "reference, null or cpu: forces a backend" },
];

/// The values, read once.
#[derive(Debug)]
pub struct Config {
    /// `OXIDIFF_DEBUG`.
    pub debug: u8,
    /// `OXIDIFF_DUMP`.
    pub dump: Option<PathBuf>,
    /// `OXIDIFF_NUM_THREADS`.
    pub num_threads: Option<usize>,
    /// `OXIDIFF_ISA`.
    pub isa: Option<String>,
    /// `OXIDIFF_VERIFY`.
    pub verify: bool,
    /// `OXIDIFF_DISABLE_PASS`.
    pub disable_pass: Vec<String>,
    /// `OXIDIFF_STOP_AFTER`.
    pub stop_after: Option<String>,
    /// `OXIDIFF_BACKEND`.
    pub backend: Option<String>,
    max_rewrites: AtomicUsize,
}

fn text(name: &str) -> Option<String> {
    debug_assert!(KNOBS.iter().any(|k| k.name == name), "{name} is missing from the table");
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// The configuration of this process.
pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config {
        debug: text("OXIDIFF_DEBUG").and_then(|v| v.parse().ok()).unwrap_or(0),
        dump: text("OXIDIFF_DUMP").map(PathBuf::from),
        num_threads: text("OXIDIFF_NUM_THREADS").and_then(|v| v.parse().ok()).filter(|&n| n > 0),
        isa: text("OXIDIFF_ISA"),
        verify: cfg!(test) || text("OXIDIFF_VERIFY").is_some_and(|v| v != "0"),
        disable_pass: text("OXIDIFF_DISABLE_PASS")
            .map(|v| v.split(',').map(|p| p.trim().to_owned()).collect())
            .unwrap_or_default(),
        stop_after: text("OXIDIFF_STOP_AFTER"),
        backend: text("OXIDIFF_BACKEND"),
        max_rewrites: AtomicUsize::new(text("OXIDIFF_MAX_REWRITES").and_then(|v| v.parse().ok()).unwrap_or(usize::MAX)),
    })
}

/// The folder of everything that is remembered between processes: `OXIDIFF_CACHE_DIR`, else the platform's; `None` where
/// there is neither. Read anew every time: only the folder's users know when it must not change any more.
pub fn cache_dir() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || set("HOME");
    set("OXIDIFF_CACHE_DIR").or_else(|| {
        let platform = if cfg!(windows) {
            set("LOCALAPPDATA")
        } else if cfg!(target_os = "macos") {
            home().map(|h| h.join("Library/Caches"))
        } else {
            set("XDG_CACHE_HOME").filter(|p| p.is_absolute()).or_else(|| home().map(|h| h.join(".cache")))
        };
        platform.map(|p| p.join("oxidiff"))
    })
}

/// Uses up one rewrite; false once `OXIDIFF_MAX_REWRITES` have been made.
pub fn take_rewrite() -> bool {
    let left = &config().max_rewrites;
    left.load(Ordering::Relaxed) == usize::MAX
        || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
}
