//! What a fused kernel does, in the form a backend runs: a body becomes a tile program for the CPU.
//!
//! Lowering is exact or it does not happen: where a tile program's f32 arithmetic could give other bits than the meaning
//! of the ops (integers, f64, an op without a vector form), [`lower_body`] says `None`. Integers may have a loop of their own
//! ([`lower_integers`]); the rest the plan interprets.

pub mod cuda;
mod integers;
mod registers;
pub mod tile;

pub use integers::lower_integers;
pub use tile::{RootForm, TileBody, TileLoad, lower_body};
