//! The one error type of the crate.
//!
//! Variants are by cause; each carries what a user needs to find the place (module path, op, shapes) and its message ends
//! with what can be done. `src/python/errors.rs` maps every variant to a Python class.

use std::fmt;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A size as people write it: `1.5 GiB`.
pub fn bytes_text(bytes: usize) -> String {
    match [("GiB", 1usize << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)].iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} bytes"),
    }
}

/// Where in the user's model something happened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Dotted module path, empty for the root.
    pub module: String,
    /// Op, in text form (`linear`, `convolution`, ...).
    pub op: String,
    /// Operand types, in text form.
    pub operands: String,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} in `{}`", self.op, if self.module.is_empty() { "<root>" } else { &self.module })?;
        if self.operands.is_empty() { Ok(()) } else { write!(f, " with ({})", self.operands) }
    }
}

/// Everything that can go wrong.
#[derive(Debug)]
pub enum Error {
    /// An argument or a text that makes no sense.
    Invalid(String),
    /// An op, or a form of it, that this build cannot compile; the module runs it in eager instead.
    Unsupported {
        /// Where.
        place: Place,
        /// Which property is not supported.
        why: String,
    },
    /// Operands do not fit together.
    Shape {
        /// Where.
        place: Place,
        /// Expected and got.
        why: String,
    },
    /// A pass left a graph that breaks an invariant: a bug of oxidiff.
    Verify {
        /// The pass that ran last.
        pass: String,
        /// Node and broken rule.
        what: String,
    },
    /// A text form that does not parse.
    Parse {
        /// 1-based.
        line: usize,
        /// What was expected.
        what: String,
    },
    /// A backend could not do what its plan asked.
    Backend {
        /// Its name.
        backend: &'static str,
        /// What failed.
        what: String,
    },
    /// A saved program that cannot be used.
    Artifact {
        /// What is wrong with it.
        what: String,
    },
    /// A file of the cache that cannot be used.
    Cache {
        /// Which, and why.
        what: String,
    },
    /// A run would not fit into the module's memory budget, not even in its slowest form.
    OverBudget {
        /// Bytes of the run.
        asked_bytes: usize,
        /// The budget.
        allowed_bytes: usize,
        /// Where the bytes are.
        what: String,
    },
    /// Memory ran out.
    OutOfMemory {
        /// Bytes of the request that failed.
        asked_bytes: usize,
        /// What they were for.
        what: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid(what) => f.write_str(what),
            Error::Unsupported { place, why } => {
                write!(f, "unsupported: {place}: {why}; this part runs in eager (pass strict=True to make it an error)")
            }
            Error::Shape { place, why } => write!(f, "shape mismatch: {place}: {why}"),
            Error::Verify { pass, what } => write!(
                f,
                "internal: after pass `{pass}`: {what}; please report it with OXIDIFF_DUMP output (OXIDIFF_DISABLE_PASS={pass} may help meanwhile)"
            ),
            Error::Parse { line, what } => write!(f, "line {line}: {what}"),
            Error::Backend { backend, what } => write!(f, "backend {backend}: {what}"),
            Error::Artifact { what } => write!(f, "not a usable artifact: {what}"),
            Error::Cache { what } => f.write_str(what),
            Error::OverBudget { asked_bytes, allowed_bytes, what } => write!(
                f,
                "out of memory: asked for {asked_bytes} bytes, allowed are {allowed_bytes} (memory_budget); the workspace is largest {what}; raise the budget, or try a smaller size or batch"
            ),
            Error::OutOfMemory { asked_bytes, what } => write!(
                f,
                "out of memory: asked for {asked_bytes} bytes for {what}; try a smaller size or batch, or memory=\"low\""
            ),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// [`Error::Invalid`] from anything printable.
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }

    /// [`Error::Artifact`] from anything printable.
    pub fn artifact(what: impl Into<String>) -> Self {
        Self::Artifact { what: what.into() }
    }
}
