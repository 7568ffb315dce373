//! oxidiff: a compiler for PyTorch diffusion models.
//!
//! Modules in the order in which data passes through them; each uses its own layer or a lower one (`tests/tidy.rs` checks).
//! `ARCHITECTURE.md` follows one op from the Python call to the kernel.

pub mod analysis;
pub mod backend;
pub mod codegen;
pub mod compiler;
pub mod config;
pub mod error;
pub mod ir;
pub mod kernel_ir;
pub mod memory;
pub mod passes;
pub mod plan;
pub mod runtime;
pub mod select;
pub mod store;
pub mod target;
pub mod trace;

pub use error::{Error, Result};
