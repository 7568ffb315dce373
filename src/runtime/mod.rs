//! What lives between calls: programs, their specializations, weight sets and the arena.
//!
//! [`program`] a compiled graph with its cache of specializations; [`registry`] finds the live program of a graph;
//! [`executable`] a program with a weight set; [`arena`] the workspace that all runs share.
//!
//! Ownership across threads: programs are immutable but for caches behind locks that are never held while kernels run; a
//! run owns the arena it was lent, and holds the weight set and the specialization it began with.

pub mod arena;
pub mod executable;
pub mod program;
pub mod registry;

pub use arena::{ArenaPool, set_memory};
pub use executable::{Executable, Stats};
pub use program::{Program, SizeRow};
