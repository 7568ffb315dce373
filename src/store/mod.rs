//! What outlives the process: artifacts, and the files they and the tuning database are in.
//!
//! [`artifact`] is the container format of a saved program; [`files`] reads with a bound, writes so that a reader sees
//! the old file or the new one, and locks between processes; [`kept`] is a folder of files named after what they were made
//! from; [`tuning`] is the database of measured choices.
//!
//! Invariant: nothing here trusts what it reads. A file that is damaged, of another version or of another program is an
//! [`Error::Artifact`](crate::Error::Artifact) or [`Error::Cache`](crate::Error::Cache) and nothing worse.

pub mod artifact;
pub mod files;
pub mod kept;
pub mod tuning;
