//! What a fused kernel does, in the form a backend runs: a body becomes a tile program for the CPU.
//!
//! Lowering is exact or it does not happen: where a tile program's f32 arithmetic could give other bits than the meaning
//! of the ops (integers, f64, an op without a vector form), [`lower_body`] says `None` and the plan interprets the group.

pub mod cuda;
mod registers;
pub mod tile;

pub use tile::{RootForm, TileBody, TileLoad, lower_body};
