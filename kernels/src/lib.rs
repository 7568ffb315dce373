//! CPU kernels of oxidiff: raw pointers and sizes in, numbers out.
//!
//! A leaf crate: it knows no graph, no plan and no Python. Its callers hand it pointers, element strides and a
//! [`pool::Pool`]; it picks an instruction set at run time ([`isa`]) and every entry point has a plain reference
//! implementation that the registry's tests compare it with.
//!
//! Two words recur. A *contraction* (GEMM, convolution, attention) produces f32 results block by block and hands each
//! finished block to an [`epilogue::Epilogue`] while it is hot in cache. A [`tile::TileProgram`] is a short list of
//! vector instructions over L1-sized registers: the epilogue of a contraction, the application of a norm, or a whole
//! pointwise group.

/// Identity of these sources: what was measured of one version says nothing about another.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "-", env!("KERNELS_HASH"));

pub mod calibrate;
pub mod cpu;
pub mod dtype;
pub mod epilogue;
pub mod fork;
pub mod isa;
pub mod pool;
pub mod registry;
pub mod tile;
