//! CUDA C: one kernel text per step, for every size.
//!
//! A kernel is header-free CUDA C over [`PRELUDE`]. Sizes and strides are parameters: the text names only what is
//! structure (element types, which dimensions are broadcast, which lie side by side), so one text serves all sizes, and
//! layers that differ in their numbers alone share a kernel. Each family has a file that turns a description in terms of
//! [`View`]s into a [`Kernel`]: text, arguments, and the [`Grid`] from which a launch's geometry follows.
//!
//! Invariants: the same description gives the same bytes of text; a kernel reads and writes only inside the views it was
//! given, whatever the values of the sizes; every barrier is reached by all threads of its block.

mod attention;
mod body;
mod contraction;
mod flash;
mod grid;
mod movement;
mod norm;
mod pointwise;
mod reduce;
mod scalar;
mod writer;

pub use attention::{Attention, lower_added_mask, lower_attention, lower_hidden};
pub use contraction::{Convolution, GEMV_ROWS, Product, lower_convolution, lower_gemv, lower_product};
pub use flash::{flash_arch, lower_flash};
pub use grid::{Geometry, Grid, SHARED_BYTES, chunk_count, chunk_pixels};
pub use movement::{lower_channels_last, lower_copy, lower_tap_sums};
pub use norm::{
    Chunk, GroupNorm, Moments, OwnLoads, RowNorm, Shares, lower_group_norm, lower_row_norm, lower_shares,
    lower_softmax, lower_whole_groups,
};
pub use pointwise::lower_loop;
pub use reduce::{Reduction, lower_reduce};
pub use scalar::lower_scalar;

use oxidiff_kernels::tile::TileProgram;

use crate::ir::{DType, Dim};

/// Declarations that precede the kernels of a compilation unit.
pub const PRELUDE: &str = include_str!("prelude.cuh");

/// Threads of a block where a family has no reason for another number.
pub const THREADS: u32 = 256;

/// How an operand lies: what a place in a plan says, but for buffer and offset.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct View {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<Dim>,
    /// Elements from one index to the next, per dimension; 0 where it is broadcast.
    pub strides: Vec<Dim>,
}

impl View {
    /// Strides over a space of sizes `space`, trailing dimensions aligned; 0 where the view is broadcast.
    pub(crate) fn strides_in(&self, space: &[Dim]) -> Vec<Dim> {
        let lead = space.len().saturating_sub(self.shape.len());
        (0..space.len())
            .map(|i| match i.checked_sub(lead) {
                Some(own) if self.shape[own] == space[i] => self.strides[own].clone(),
                _ => Dim::default(),
            })
            .collect()
    }
}

/// Pointwise work of a kernel, with the places it reads and writes over one space.
#[derive(Clone, Copy, Debug)]
pub struct Fused<'a> {
    /// What is computed.
    pub program: &'a TileProgram,
    /// Iteration space, rows then columns.
    pub space: &'a [Dim],
    /// The program's loads.
    pub loads: &'a [View],
    /// The program's stores.
    pub stores: &'a [View],
}

/// An argument of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Arg {
    /// Address of operand `index` of the description, in the order that its family states.
    Pointer(usize),
    /// A 64-bit integer.
    Size(Dim),
    /// Pixels of a chunk of an image of this many ([`grid::chunk_pixels`]).
    Chunk(Dim),
    /// Chunks of an image of this many pixels ([`grid::chunk_count`]).
    Chunks(Dim),
    /// The bits of an f32.
    Float(u32),
}

/// What 16-byte accesses ask of a launch; where it does not hold, the kernel runs element by element.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Vector {
    /// Neighbours that a thread handles.
    pub width: usize,
    /// Columns: a multiple of `width`.
    pub cols: Dim,
    /// Operands that are accessed `width` elements at a time, their element size, and the strides that must be multiples of
    /// `width`; the address must be a multiple of `min(16, width * size)`.
    pub operands: Vec<(usize, usize, Vec<Dim>)>,
}

/// A kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Kernel {
    /// Entry point; `<name>_v` is the entry point of the vector form.
    pub name: String,
    /// Source, without [`PRELUDE`].
    pub text: String,
    /// Arguments in order.
    pub args: Vec<Arg>,
    /// Number of blocks and threads.
    pub grid: Grid,
    /// Neighbours that a thread of the other form handles.
    pub least: usize,
    /// The vector form, if there is one.
    pub vector: Option<Vector>,
}

/// What a kernel's header says about where it comes from.
#[derive(Clone, Debug, Default)]
pub struct Provenance {
    /// Family and fused ops, for the name: `group_norm_silu`.
    pub ops: Vec<String>,
    /// Lines of the header: model path, ops, operand types, operations.
    pub lines: Vec<String>,
}

/// The name of an element type in CUDA C.
pub const fn c_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool8",
        DType::U8 => "u8",
        DType::I8 => "i8",
        DType::I32 => "i32",
        DType::I64 => "i64",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::F32 => "float",
        DType::F64 => "double",
    }
}
