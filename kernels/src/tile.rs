//! Tile programs: fused pointwise work as a short list of vector instructions.
//!
//! A program runs over an iteration space of up to [`MAX_DIMS`] dimensions. The last dimension is *columns*; the others,
//! flattened row-major, are *rows*. Every memory operand has one element stride per dimension (0 broadcasts), so bias
//! `[C]`, residual `[N, H, W, C]` and a per-sample shift `[N, 1, 1, C]` are the same thing with other strides.
//!
//! All registers are f32 vectors of at most [`TILE`] elements that live in L1; loads widen, stores round to nearest
//! even. `Round` rounds a register through a 16-bit type and back, which is how `precision = "eager"` gets the bits that
//! separate kernels would have given.

use crate::dtype::DType;

/// Elements of one register.
pub const TILE: usize = 512;
/// Most dimensions of an iteration space.
pub const MAX_DIMS: usize = 6;
/// Most registers of a program.
pub const MAX_REGS: usize = 24;

/// A register of a tile program.
pub type Reg = u8;

/// Where a register is loaded from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// The f32 results of the contraction the program is an epilogue of.
    Acc,
    /// Memory operand `index` of [`TileProgram::loads`].
    Memory(u8),
    /// A value computed once per row by the caller (mean, reciprocal standard deviation, row maximum, ...).
    RowScalar(u8),
    /// A constant.
    Const(f32),
}

/// One-operand arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Unary {
    Neg,
    Abs,
    Exp,
    Log,
    Sin,
    Cos,
    Tanh,
    Sqrt,
    Rsqrt,
    Reciprocal,
    Sigmoid,
    Silu,
    /// Exact GELU: `0.5 x (1 + erf(x / sqrt 2))`.
    Gelu,
    /// Tanh approximation of GELU.
    GeluTanh,
    Relu,
    Erf,
    Floor,
    Ceil,
    Trunc,
    RoundEven,
    /// 1.0 where the operand is zero, else 0.0.
    Not,
    /// 1.0 where NaN.
    IsNan,
}

/// Two-operand arithmetic. Comparisons give 1.0 or 0.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    Pow,
    /// NaN if either operand is NaN, as in PyTorch.
    Max,
    /// NaN if either operand is NaN, as in PyTorch.
    Min,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    And,
    Or,
}

/// One instruction. Destination and sources may coincide.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Instr {
    Load {
        dst: Reg,
        src: Source,
    },
    Unary {
        dst: Reg,
        op: Unary,
        a: Reg,
    },
    Binary {
        dst: Reg,
        op: Binary,
        a: Reg,
        b: Reg,
    },
    /// `dst = a * b + c`, rounded once.
    Fma {
        dst: Reg,
        a: Reg,
        b: Reg,
        c: Reg,
    },
    /// `dst = cond != 0 ? a : b`.
    Select {
        dst: Reg,
        cond: Reg,
        a: Reg,
        b: Reg,
    },
    /// Rounds through `dtype` (F16 or BF16) and back.
    Round {
        dst: Reg,
        a: Reg,
        dtype: DType,
    },
    /// Stores to memory operand `out` of [`TileProgram::stores`].
    Store {
        src: Reg,
        out: u8,
    },
}

/// A fused pointwise computation, independent of sizes and addresses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TileProgram {
    /// Executed in order for every tile.
    pub instrs: Vec<Instr>,
    /// Element type of each memory operand read.
    pub loads: Vec<DType>,
    /// Element type of each memory operand written.
    pub stores: Vec<DType>,
}

/// A memory operand bound to an address: base pointer and one element stride per dimension of the iteration space.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Address of the element at index 0 of every dimension.
    pub ptr: *mut u8,
    /// Element strides, outermost first; entries past the space's rank are ignored.
    pub strides: [isize; MAX_DIMS],
}
