//! The one error type of the crate.
//!
//! Variants are by cause; each carries what a user needs to find the place (module path, op, shapes) and its message ends
//! with what can be done. `src/python/errors.rs` maps every variant to a Python class.

use std::fmt;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

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
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument or a text that makes no sense.
    #[error("{0}")]
    Invalid(String),
    /// An op, or a form of it, that this build cannot compile; the module runs it in eager instead.
    #[error("unsupported: {place}: {why}; this part runs in eager (pass strict=True to make it an error)")]
    Unsupported {
        /// Where.
        place: Place,
        /// Which property is not supported.
        why: String,
    },
    /// Operands do not fit together.
    #[error("shape mismatch: {place}: {why}")]
    Shape {
        /// Where.
        place: Place,
        /// Expected and got.
        why: String,
    },
    /// A pass left a graph that breaks an invariant: a bug of oxidiff.
    #[error(
        "internal: after pass `{pass}`: {what}; please report it with OXIDIFF_DUMP output (OXIDIFF_DISABLE_PASS={pass} may help meanwhile)"
    )]
    Verify {
        /// The pass that ran last.
        pass: String,
        /// Node and broken rule.
        what: String,
    },
    /// A text form that does not parse.
    #[error("line {line}: {what}")]
    Parse {
        /// 1-based.
        line: usize,
        /// What was expected.
        what: String,
    },
    /// A backend could not do what its plan asked.
    #[error("backend {backend}: {what}")]
    Backend {
        /// Its name.
        backend: &'static str,
        /// What failed.
        what: String,
    },
    /// Memory ran out.
    #[error("out of memory: asked for {asked_bytes} bytes for {what}; try a smaller size or batch, or memory=\"low\"")]
    OutOfMemory {
        /// Bytes of the request that failed.
        asked_bytes: usize,
        /// What they were for.
        what: String,
    },
}

impl Error {
    /// [`Error::Invalid`] from anything printable.
    pub fn invalid(what: impl Into<String>) -> Self {
        Self::Invalid(what.into())
    }
}
