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

/// Most elements of one register.
pub const TILE: usize = 1024;
/// Most dimensions of an iteration space.
pub const MAX_DIMS: usize = 8;
/// Most registers of a program.
pub const MAX_REGS: usize = 24;
/// Most instructions of a program.
pub const MAX_INSTRS: usize = 192;
/// Most memory operands of a program, loads and stores together.
pub const MAX_OPERANDS: usize = 32;

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
    /// Exact for powers of two.
    Log2,
    /// Exact for powers of ten.
    Log10,
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
    /// Of neighbouring columns, an even one and the one behind it: the second negated, then the first. Kernels of this crate
    /// have none: [`TileError::OutOfRange`].
    RotatePairs,
}

/// Two-operand arithmetic. Comparisons give 1.0 or 0.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    /// Rounded down.
    FloorDivide,
    /// With the divisor's sign.
    Remainder,
    Pow,
    /// `Atan2(y, x)`: the angle of the point `(x, y)` in radians.
    Atan2,
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

impl Bound {
    /// A row-major contiguous operand over `space`.
    pub fn contiguous(ptr: *mut u8, space: &Space) -> Bound {
        let mut strides = [0; MAX_DIMS];
        let mut step = 1;
        for d in (0..space.rank).rev() {
            strides[d] = step;
            step *= space.dims[d] as isize;
        }
        Bound { ptr, strides }
    }

    /// The part of an operand of elements of `dtype` that starts at index `at`, outermost dimension first.
    pub fn from(&self, at: &[usize], dtype: DType) -> Bound {
        let elements: isize = at.iter().zip(&self.strides).map(|(&at, stride)| at as isize * stride).sum();
        Bound { ptr: self.ptr.wrapping_offset(elements * dtype.size_bytes() as isize), ..*self }
    }
}

/// An iteration space: the last dimension is columns, the others flattened row-major are rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// Sizes, outermost first; entries past `rank` are ignored.
    pub dims: [usize; MAX_DIMS],
    /// Number of dimensions, at most [`MAX_DIMS`]; 0 is a single element.
    pub rank: usize,
}

impl Space {
    /// A space of these sizes.
    ///
    /// # Panics
    /// If there are more than [`MAX_DIMS`].
    pub fn new(sizes: &[usize]) -> Space {
        let mut dims = [1; MAX_DIMS];
        dims[..sizes.len()].copy_from_slice(sizes);
        Space { dims, rank: sizes.len() }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.dims[..self.rank].iter().product()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Size of the last dimension.
    pub fn cols(&self) -> usize {
        if self.rank == 0 { 1 } else { self.dims[self.rank - 1] }
    }

    /// Product of the other dimensions.
    pub fn rows(&self) -> usize {
        self.dims[..self.rank.saturating_sub(1)].iter().product()
    }
}

/// Why a program cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TileError {
    /// An instruction reads a register nothing was written to.
    UnwrittenRegister {
        /// Position of the instruction.
        at: usize,
        /// The register.
        reg: Reg,
    },
    /// An instruction names a register, operand or type outside the allowed range.
    OutOfRange {
        /// Position of the instruction.
        at: usize,
    },
    /// More memory operands than [`MAX_OPERANDS`].
    TooManyOperands {
        /// Number of operands.
        operands: usize,
    },
    /// More instructions than [`MAX_INSTRS`].
    TooLong {
        /// Number of instructions.
        instrs: usize,
    },
}

impl std::fmt::Display for TileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            TileError::UnwrittenRegister { at, reg } => write!(f, "instruction {at} reads r{reg} before it is written"),
            TileError::OutOfRange { at } => {
                write!(f, "instruction {at} names a register, operand or type out of range")
            }
            TileError::TooManyOperands { operands } => {
                write!(f, "{operands} memory operands, more than {MAX_OPERANDS}")
            }
            TileError::TooLong { instrs } => write!(f, "{instrs} instructions, more than {MAX_INSTRS}"),
        }
    }
}

impl std::error::Error for TileError {}
