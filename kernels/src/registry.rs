//! The list of kernels.
//!
//! One row per kernel. A row names the kernel (`<family>_<dtype>_<tile>__<isa>`), says when the machine can run it, and
//! carries the function that compares it with its plain reference over a range of shapes, and what it is measured on.
//! `tests/registry.rs` walks the list, so a kernel without a reference cannot be listed, and a listed one is tested;
//! `make bench-kernels` walks it too.

use crate::cpu;
use crate::cpu::bench::Bench;
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
    /// Tile programs, of floats and of integers.
    Tile,
    /// Reductions and cumulative sums.
    Reduce,
    /// What moves elements: copies between layouts, look-ups, resampling, interpolation.
    Move,
}

/// The comparison of a kernel with its reference; the error says where they differ and by how much.
pub type Verify = Box<dyn Fn() -> Result<(), String>>;

/// One kernel.
pub struct Row {
    /// `<family>_<dtype>_<tile>__<isa>`.
    pub name: String,
    /// What it computes.
    pub family: Family,
    /// The level of instructions it needs.
    pub isa: Isa,
    /// Element type of its operands.
    pub dtype: DType,
    /// Whether this processor runs it.
    pub is_available: Box<dyn Fn() -> bool>,
    /// Runs it beside its reference on a list of shapes.
    pub verify: Verify,
    /// What it is measured on.
    pub benches: Vec<Bench>,
}

/// Every kernel of the crate.
pub fn rows() -> Vec<Row> {
    let mut rows = cpu::verify::rows();
    rows.extend(cpu::tile_exec_verify::rows());
    rows.extend(cpu::integers_verify::rows());
    rows.extend(cpu::few_rows_verify::rows());
    rows.extend(cpu::conv_forms_verify::rows());
    rows.extend(cpu::reduce_verify::rows());
    rows.extend(cpu::move_verify::rows());
    rows.extend(cpu::interpolate_verify::rows());
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    rows
}
