//! The list of kernels.
//!
//! One row per kernel. A row names the kernel (`<family>_<dtype>_<tile>__<isa>`), says when the machine can run it, and
//! carries the function that compares it with its plain reference over a range of shapes. `tests/registry.rs` walks the
//! list, so a kernel without a reference or without a test cannot be listed, and one that is not listed is not chosen.

use crate::dtype::DType;
use crate::isa::Isa;

/// What a kernel computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    /// Matrix product.
    Gemm,
    /// Convolution.
    Conv,
    /// Scaled dot product attention.
    Attention,
    /// Group, layer and RMS normalisation, softmax.
    Norm,
    /// Tile programs.
    Tile,
}

/// One kernel.
#[derive(Clone, Copy)]
pub struct Row {
    /// `<family>_<dtype>_<tile>__<isa>`.
    pub name: &'static str,
    /// What it computes.
    pub family: Family,
    /// The level of instructions it needs.
    pub isa: Isa,
    /// Element type of its main operand.
    pub dtype: DType,
    /// Whether this processor runs it.
    pub is_available: fn() -> bool,
    /// Runs it beside its reference on a list of shapes; the error says where they differ and by how much.
    pub verify: fn() -> Result<(), String>,
}

/// Every kernel of the crate.
pub fn rows() -> Vec<Row> {
    Vec::new()
}
