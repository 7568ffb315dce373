//! Environment variables: the only file that reads them, and the table that documents them (`oxidiff doctor` prints it).
//!
//! Behaviour options are per module ([`crate::compiler::Options`]); the environment only locates, limits and debugs.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use oxidiff_kernels::isa::{Isa, forbid_amx};

/// One variable: name, default, meaning.
#[derive(Clone, Copy, Debug)]
pub struct Knob {
    /// With prefix.
    pub name: &'static str,
    /// What holds when it is not set.
    pub default: &'static str,
    /// One line.
    pub doc: &'static str,
    /// What a value should be.
    pub expects: Expects,
}

/// The values that are understood.
#[derive(Clone, Copy, Debug)]
pub struct Expects {
    /// In words, after "is not".
    pub what: &'static str,
    /// Whether one is.
    pub accepts: fn(&str) -> bool,
    /// What becomes of any other.
    pub otherwise: &'static str,
}

/// Whatever it is: a folder, or a name whose reader says what it does not know.
const ANYTHING: Expects = Expects { what: "", accepts: |_| true, otherwise: "" };
/// Read by [`is_on`].
const FLAG: Expects = Expects { what: "0 or 1", accepts: |v| flag(v).is_some(), otherwise: "it is taken for 1" };

fn flag(value: &str) -> Option<bool> {
    match value.to_lowercase().as_str() {
        "0" | "false" | "no" | "off" => Some(false),
        "1" | "true" | "yes" | "on" => Some(true),
        _ => None,
    }
}

/// AVX-512 without AMX, a way out where tiles misbehave. `avx512` keeps its meaning, all of what comes with that level.
const WITHOUT_AMX: &str = "avx512-no-amx";

/// The level that a value of `OXIDIFF_ISA` names, and whether AMX may go with it.
fn level(value: &str) -> Option<(Isa, bool)> {
    let level = if value == WITHOUT_AMX { Isa::Avx512 } else { Isa::parse(value)? };
    Some((level, level == Isa::Avx512 && value != WITHOUT_AMX))
}

/// What a flag says as it is now.
pub fn is_on(name: &str) -> bool {
    let value = std::env::var_os(name).filter(|v| !v.is_empty());
    value.is_some_and(|v| flag(&v.to_string_lossy()).unwrap_or(true))
}

/// Every variable that is read.
pub const KNOBS: &[Knob] = &[
    Knob {
        name: "OXIDIFF_CACHE_DIR",
        default: "platform cache folder",
        doc: "where compiled programs are remembered",
        expects: ANYTHING,
    },
    Knob {
        name: "OXIDIFF_DEBUG",
        default: "0",
        doc: "1 summary and fallbacks, 2 times of each step of each call, 3 graph after each changing pass, 4 kernels, 5 memory, 6 every rewrite",
        expects: Expects { what: "a number from 0 to 6", accepts: |v| v.parse::<u8>().is_ok(), otherwise: "0 holds" },
    },
    Knob {
        name: "OXIDIFF_DUMP",
        default: "",
        doc: "folder that receives every stage of every compile as text",
        expects: ANYTHING,
    },
    Knob {
        name: "OXIDIFF_NUM_THREADS",
        default: "torch.get_num_threads()",
        doc: "threads of the CPU backend",
        expects: Expects {
            what: "a number of threads, 1 or more",
            accepts: |v| v.parse().is_ok_and(|n: usize| n > 0),
            otherwise: "PyTorch's number holds",
        },
    },
    Knob { name: "OXIDIFF_DISABLE", default: "0", doc: "1: every compiled module runs eager", expects: FLAG },
    Knob {
        name: "OXIDIFF_ISA",
        default: "best",
        doc: "avx512 (with AMX where there is), avx512-no-amx, avx2 or portable: forces a CPU instruction set",
        expects: Expects {
            what: "avx512, avx512-no-amx, avx2 or portable, or not what this processor has",
            accepts: |v| level(v).is_some_and(|(isa, _)| isa.is_available()),
            otherwise: "the best that it has is used",
        },
    },
    Knob { name: "OXIDIFF_VERIFY", default: "0", doc: "1: verify the graph after every pass", expects: FLAG },
    Knob { name: "OXIDIFF_DISABLE_PASS", default: "", doc: "passes to skip, separated by commas", expects: ANYTHING },
    Knob { name: "OXIDIFF_STOP_AFTER", default: "", doc: "pass after which no further pass runs", expects: ANYTHING },
    Knob {
        name: "OXIDIFF_MAX_REWRITES",
        default: "unlimited",
        doc: "number of rewrites after which no further one is made",
        expects: Expects {
            what: "a number",
            accepts: |v| v.parse::<usize>().is_ok(),
            otherwise: "rewrites are not limited",
        },
    },
    Knob {
        name: "OXIDIFF_BACKEND",
        default: "auto",
        doc: "reference, null, cpu or cuda: forces a backend",
        expects: Expects {
            what: "auto, reference, null, cpu or cuda",
            accepts: |v| matches!(v, "auto" | "reference" | "null" | "cpu" | "cuda"),
            otherwise: "modules run eager",
        },
    },
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
    pub isa: Option<Isa>,
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

/// The value of a variable as it is now.
pub(crate) fn text(name: &str) -> Option<String> {
    debug_assert!(KNOBS.iter().any(|k| k.name == name), "{name} is missing from the table");
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// The names of a list.
pub(crate) fn listed(list: &str) -> impl Iterator<Item = &str> {
    list.split(',').map(str::trim)
}

/// What is wrong with the value of that variable, in a sentence.
pub fn complaint(knob: &Knob) -> Option<String> {
    let value = std::env::var_os(knob.name).filter(|v| !v.is_empty())?;
    let Expects { what, accepts, otherwise } = knob.expects;
    let is_fine = what.is_empty() || value.to_str().is_some_and(accepts);
    (!is_fine).then(|| format!("{}={} is not {what}: {otherwise}", knob.name, value.to_string_lossy()))
}

/// The configuration of this process.
pub fn config() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config {
        debug: text("OXIDIFF_DEBUG").and_then(|v| v.parse().ok()).unwrap_or(0),
        dump: text("OXIDIFF_DUMP").map(PathBuf::from),
        num_threads: text("OXIDIFF_NUM_THREADS").and_then(|v| v.parse().ok()).filter(|&n| n > 0),
        isa: text("OXIDIFF_ISA").and_then(|v| level(&v)).map(|(isa, has_amx)| {
            // Nothing has asked for tiles yet: products run for a target, which this decides.
            if !has_amx {
                forbid_amx();
            }
            isa
        }),
        verify: cfg!(test) || is_on("OXIDIFF_VERIFY"),
        disable_pass: text("OXIDIFF_DISABLE_PASS").map(|v| listed(&v).map(str::to_owned).collect()).unwrap_or_default(),
        stop_after: text("OXIDIFF_STOP_AFTER"),
        backend: text("OXIDIFF_BACKEND").filter(|name| name != "auto"),
        max_rewrites: AtomicUsize::new(text("OXIDIFF_MAX_REWRITES").and_then(|v| v.parse().ok()).unwrap_or(usize::MAX)),
    })
}

/// The folder of everything that is remembered between processes: `OXIDIFF_CACHE_DIR`, else the platform's; `None` where
/// there is neither. Read anew every time: only the folder's users know when it must not change any more.
pub fn cache_dir() -> Option<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || set("HOME");
    set("OXIDIFF_CACHE_DIR").map(|folder| settled(&folder, home().as_deref())).or_else(|| {
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

/// A folder as a user names it: `~` at its start is their home, and one that is named from where the process was does not move
/// with it. (Shells leave `~` alone within quotes, and container files have no shell.)
fn settled(folder: &Path, home: Option<&Path>) -> PathBuf {
    static START: OnceLock<PathBuf> = OnceLock::new();
    if let (Ok(below), Some(home)) = (folder.strip_prefix("~"), home) {
        return home.join(below);
    }
    START.get_or_init(|| std::env::current_dir().unwrap_or_default()).join(folder)
}

/// Uses up one rewrite; false once `OXIDIFF_MAX_REWRITES` have been made.
pub fn take_rewrite() -> bool {
    let left = &config().max_rewrites;
    left.load(Ordering::Relaxed) == usize::MAX
        || left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_settled() {
        let here = std::env::current_dir().unwrap();
        let home = Path::new("/home/me");
        for (folder, home, want) in [
            ("~/cache", Some(home), home.join("cache")),
            ("~", Some(home), home.to_owned()),
            ("~you/cache", Some(home), here.join("~you/cache")),
            ("~/cache", None, here.join("~/cache")),
            ("cache", Some(home), here.join("cache")),
            ("/var/cache", Some(home), PathBuf::from("/var/cache")),
        ] {
            assert_eq!(settled(Path::new(folder), home), want, "{folder}");
        }
    }

    #[test]
    fn values_are_understood_or_complained_about() {
        let accepts = |name: &str, value: &str| {
            let knob = KNOBS.iter().find(|knob| knob.name == name).unwrap();
            (knob.expects.accepts)(value)
        };
        for (name, good, bad) in [
            ("OXIDIFF_DEBUG", "3", "verbose"),
            ("OXIDIFF_NUM_THREADS", "2", "two"),
            ("OXIDIFF_NUM_THREADS", "1", "0"),
            ("OXIDIFF_DISABLE", "Off", "maybe"),
            ("OXIDIFF_ISA", "portable", "sse2"),
            ("OXIDIFF_ISA", "portable", "portable-no-amx"),
            ("OXIDIFF_MAX_REWRITES", "12", "-1"),
        ] {
            assert!(accepts(name, good), "{name}={good}");
            assert!(!accepts(name, bad), "{name}={bad}");
        }
        let levels = ["avx512", "avx512-no-amx", "avx2", "portable", "amx"].map(level);
        let [all, vectors] = [true, false].map(|has_amx| Some((Isa::Avx512, has_amx)));
        assert_eq!(levels, [all, vectors, Some((Isa::Avx2, false)), Some((Isa::Portable, false)), None]);
        assert_eq!(["1", "TRUE", "maybe", "no"].map(flag), [Some(true), Some(true), None, Some(false)]);
    }
}
