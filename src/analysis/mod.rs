//! Questions about graphs that several passes and the plan ask.
//!
//! Invariant: nothing here changes a graph.

pub mod compute_class;
pub mod kept;
pub mod layout;
pub mod pattern;
pub mod shape;

pub use compute_class::{ComputeClass, group_class, node_class};
pub use kept::{fixed_values, kept_values};
pub use layout::Layout;
