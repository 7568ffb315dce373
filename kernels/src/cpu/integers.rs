//! Loops over integers: index arithmetic, masks, the shifts and look-ups that quantised weights are unpacked with.
//!
//! [`tile_exec`](super::tile_exec) computes in f32, which holds integers up to 2^24. Here registers hold integers, in lanes
//! of 16, 32 or 64 bits: the narrowest that the program's types and constants fit. A value is exact in its lane, and every
//! result is wrapped to its own type before anything reads it, so that the width of the lanes shows in the speed alone.
//!
//! A program is a list of instructions, each of which defines a value. A tile of as many elements as a register has, whole
//! rows where they are short, is loaded, computed and stored before the next; registers are arrays of a fixed length, whose loops
//! the compiler turns into vectors. All loads of a tile stand before its stores, so that a result may take the place of an
//! operand, element for element.
//!
//! Measured, one Zen 4 core: a shift and a mask of bytes, 0.2 ns an element in rows of 128, 0.7 ns in rows of 16 (PyTorch: 0.2
//! and 1.4).

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use super::simd::Simd;
use super::tile_layout::Layout;
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd_dispatch;
use crate::tile::{Bound, MAX_DIMS, Space};

/// Most elements of a tile: those of a register whose lanes have 16 bits.
const TILE: usize = 1024;
/// Registers of a thread.
pub const REGISTERS: usize = 24;

/// One-operand arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum IntegerUnary {
    Neg,
    Abs,
    /// -1, 0 or 1.
    Sign,
    /// All bits inverted.
    BitwiseNot,
    /// 1 where the operand is 0, else 0.
    LogicalNot,
    Relu,
    /// The operand, wrapped to the result's type.
    Convert,
}

/// Two-operand arithmetic. Comparisons and logic give 1 or 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum IntegerBinary {
    Add,
    Sub,
    Mul,
    /// Rounds down; an error where the divisor is 0.
    FloorDivide,
    /// Has the sign of the divisor; an error where that is 0.
    Remainder,
    /// A negative exponent gives 0, but for 1 and -1.
    Pow,
    Max,
    Min,
    BitwiseAnd,
    BitwiseOr,
    BitwiseXor,
    /// 0 where the distance is negative or as large as 64.
    ShiftLeft,
    /// Keeps the sign; a distance that is negative or too large leaves nothing else.
    ShiftRight,
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    LogicalAnd,
    LogicalOr,
    LogicalXor,
}

/// A divisor was 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DivisionByZero;

impl fmt::Display for DivisionByZero {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("integer division by zero")
    }
}

impl std::error::Error for DivisionByZero {}

/// The value that instruction of this number defines.
pub type Value = u8;

/// What an instruction computes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Op {
    /// An element of memory operand `index`. Floats are truncated, as PyTorch does on x86: see [`truncated`].
    Load(u8),
    Const(i64),
    Unary(IntegerUnary, Value),
    Binary(IntegerBinary, Value, Value),
    /// The second where the first is not 0, else the third.
    Select(Value, Value, Value),
}

impl Op {
    fn operands(self) -> impl Iterator<Item = Value> {
        let (list, count) = match self {
            Op::Load(_) | Op::Const(_) => ([0; 3], 0),
            Op::Unary(_, a) => ([a, 0, 0], 1),
            Op::Binary(_, a, b) => ([a, b, 0], 2),
            Op::Select(c, a, b) => ([c, a, b], 3),
        };
        list.into_iter().take(count)
    }
}

/// An instruction: what it computes, and the type that the result is wrapped to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Instr {
    /// What it computes.
    pub op: Op,
    /// An integer type or bool.
    pub dtype: DType,
}

/// A loop over integers, independent of sizes and addresses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct IntegerProgram {
    /// Instruction `i` defines value `i`.
    pub instrs: Vec<Instr>,
    /// Element type of each memory operand read.
    pub loads: Vec<DType>,
    /// Values written, each in the type of its instruction.
    pub stores: Vec<Value>,
}

/// Bits of a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Width {
    W16,
    W32,
    W64,
}

/// A float as an integer of that type, as PyTorch converts on x86: what is out of range, or not a number, is the smallest
/// i64, or i32 for types of up to 32 bits that have a sign, of which narrower types keep the low bits. Bool is "not 0".
pub fn truncated(dtype: DType, v: f64) -> i64 {
    let long = if (-(2f64.powi(63))..2f64.powi(63)).contains(&v) { v as i64 } else { i64::MIN };
    let word = i32::try_from(long).unwrap_or(i32::MIN);
    match dtype {
        DType::Bool => i64::from(v != 0.0),
        DType::U8 => i64::from(long as u8),
        DType::I8 => i64::from(word as i8),
        DType::I32 => i64::from(word),
        DType::I64 | DType::F16 | DType::BF16 | DType::F32 | DType::F64 => long,
    }
}

const fn is_integer(dtype: DType) -> bool {
    matches!(dtype, DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool)
}

/// The narrowest lane that holds every value of the type.
const fn width_of(dtype: DType) -> Width {
    match dtype {
        DType::I8 | DType::U8 | DType::Bool => Width::W16,
        DType::I32 => Width::W32,
        _ => Width::W64,
    }
}

/// What runs for each tile, registers chosen.
#[derive(Clone, Copy, Debug)]
enum Step {
    Load { dst: usize, operand: usize, dtype: DType },
    Const { dst: usize, value: i64 },
    Unary { op: IntegerUnary, dst: usize, a: usize },
    Binary { op: IntegerBinary, dst: usize, a: usize, b: usize },
    Select { dst: usize, c: usize, a: usize, b: usize },
    Wrap { at: usize, dtype: DType },
}

/// A checked program with registers, ready to run.
#[derive(Clone, Debug)]
pub struct Prepared {
    isa: Isa,
    width: Width,
    steps: Vec<Step>,
    loads: Vec<DType>,
    /// Register and type.
    stores: Vec<(usize, DType)>,
}

impl Prepared {
    /// Checks a program and chooses its registers and lanes. `None` if it is malformed or needs too many registers.
    pub fn new(program: &IntegerProgram, isa: Isa) -> Option<Prepared> {
        let instrs = &program.instrs;
        let mut last_use: Vec<usize> = (0..instrs.len()).collect();
        for (at, instr) in instrs.iter().enumerate() {
            if let Op::Load(i) = instr.op {
                let from = *program.loads.get(usize::from(i))?;
                if is_integer(from) && from != instr.dtype {
                    return None;
                }
            }
            if !is_integer(instr.dtype) || instr.op.operands().any(|v| usize::from(v) >= at) {
                return None;
            }
            instr.op.operands().for_each(|v| last_use[usize::from(v)] = at);
        }
        for &value in &program.stores {
            *last_use.get_mut(usize::from(value))? = instrs.len();
        }
        let mut free: Vec<usize> = (0..REGISTERS).rev().collect();
        let mut registers: Vec<usize> = Vec::with_capacity(instrs.len());
        let mut steps = Vec::with_capacity(2 * instrs.len());
        for (at, instr) in instrs.iter().enumerate() {
            // Taken before the operands' are given back: no instruction writes what it reads.
            let dst = free.pop()?;
            let reg = |v: Value| registers[usize::from(v)];
            steps.push(match instr.op {
                Op::Load(i) => Step::Load { dst, operand: usize::from(i), dtype: instr.dtype },
                Op::Const(value) => Step::Const { dst, value },
                Op::Unary(op, a) => Step::Unary { op, dst, a: reg(a) },
                Op::Binary(op, a, b) => Step::Binary { op, dst, a: reg(a), b: reg(b) },
                Op::Select(c, a, b) => Step::Select { dst, c: reg(c), a: reg(a), b: reg(b) },
            });
            if may_leave(program, *instr) {
                steps.push(Step::Wrap { at: dst, dtype: instr.dtype });
            }
            registers.push(dst);
            let mut dying: Vec<usize> = instr.op.operands().map(usize::from).filter(|&v| last_use[v] == at).collect();
            dying.sort_unstable();
            dying.dedup();
            free.extend(dying.into_iter().map(|v| registers[v]));
            if last_use[at] == at {
                free.push(dst);
            }
        }
        let constants = instrs.iter().filter_map(|i| match i.op {
            Op::Const(c) => Some(width_of_constant(c)),
            _ => None,
        });
        // A constant is as wide as it is, whatever its type.
        let types = instrs.iter().filter(|i| !matches!(i.op, Op::Const(_))).map(|i| width_of(i.dtype));
        let loads = program.loads.iter().filter(|t| is_integer(**t)).map(|t| width_of(*t));
        Some(Prepared {
            isa: isa.clamp(),
            width: constants.chain(types).chain(loads).max().unwrap_or(Width::W64),
            steps,
            loads: program.loads.clone(),
            stores: program.stores.iter().map(|&v| (registers[usize::from(v)], instrs[usize::from(v)].dtype)).collect(),
        })
    }
}

fn width_of_constant(c: i64) -> Width {
    if i16::try_from(c).is_ok() {
        Width::W16
    } else if i32::try_from(c).is_ok() {
        Width::W32
    } else {
        Width::W64
    }
}

/// Whether the instruction can give what its type does not hold.
fn may_leave(program: &IntegerProgram, instr: Instr) -> bool {
    use IntegerBinary::{Add, FloorDivide, Mul, Pow, ShiftLeft, Sub};
    let is_same = |v: Value| match program.instrs[usize::from(v)] {
        Instr { op: Op::Const(c), .. } => holds(instr.dtype, c),
        other => other.dtype == instr.dtype,
    };
    match instr.op {
        Op::Load(_) => false,
        Op::Const(c) => !holds(instr.dtype, c),
        Op::Unary(IntegerUnary::LogicalNot, _) => false,
        Op::Unary(IntegerUnary::Relu | IntegerUnary::Sign | IntegerUnary::Convert, a) => !is_same(a),
        Op::Unary(..) => true,
        Op::Binary(Add | Sub | Mul | FloorDivide | Pow | ShiftLeft, ..) => true,
        Op::Binary(op, ..) if is_predicate(op) => false,
        Op::Binary(_, a, b) | Op::Select(_, a, b) => !(is_same(a) && is_same(b)),
    }
}

/// Whether a value of that type can be `c`.
fn holds(dtype: DType, c: i64) -> bool {
    match dtype {
        DType::Bool => c == 0 || c == 1,
        DType::U8 => u8::try_from(c).is_ok(),
        DType::I8 => i8::try_from(c).is_ok(),
        DType::I32 => i32::try_from(c).is_ok(),
        _ => true,
    }
}

pub(super) const fn is_predicate(op: IntegerBinary) -> bool {
    use IntegerBinary::{Eq, Ge, Gt, Le, LogicalAnd, LogicalOr, LogicalXor, Lt, Ne};
    matches!(op, Eq | Ne | Lt | Le | Gt | Ge | LogicalAnd | LogicalOr | LogicalXor)
}

/// A lane of a register.
trait Lane: Copy + Ord + Default {
    const ZERO: Self;
    const ONE: Self;
    fn of(v: i64) -> Self;
    fn i64(self) -> i64;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn and(self, other: Self) -> Self;
    fn or(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    fn not(self) -> Self;
    fn shl(self, by: Self) -> Self;
    fn shr(self, by: Self) -> Self;
    fn u8(self) -> Self;
    fn i8(self) -> Self;
    fn i32(self) -> Self;
}

macro_rules! lane {
    ($ty:ty, $unsigned:ty) => {
        impl Lane for $ty {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            #[inline(always)]
            fn of(v: i64) -> Self {
                v as $ty
            }
            #[inline(always)]
            fn i64(self) -> i64 {
                i64::from(self)
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }
            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }
            #[inline(always)]
            fn not(self) -> Self {
                !self
            }
            #[inline(always)]
            fn shl(self, by: Self) -> Self {
                let shifted = self.wrapping_shl(by as u32);
                if (by as $unsigned) < <$ty>::BITS as $unsigned { shifted } else { 0 }
            }
            #[inline(always)]
            fn shr(self, by: Self) -> Self {
                let most = <$ty>::BITS as $unsigned - 1;
                self.wrapping_shr((by as $unsigned).min(most) as u32)
            }
            #[inline(always)]
            fn u8(self) -> Self {
                self & 0xff
            }
            #[inline(always)]
            fn i8(self) -> Self {
                self as i8 as $ty
            }
            #[inline(always)]
            fn i32(self) -> Self {
                self as i32 as $ty
            }
        }
    };
}

lane!(i16, u16);
lane!(i32, u32);
lane!(i64, u64);

/// The registers of one thread, on its stack.
#[repr(align(64))]
struct Registers<L, const N: usize>([[L; N]; REGISTERS]);

impl<L: Lane, const N: usize> Registers<L, N> {
    #[inline(always)]
    fn unary(&mut self, dst: usize, a: usize, f: impl Fn(L) -> L) {
        if let Ok([dst, a]) = self.0.get_disjoint_mut([dst, a]) {
            for (dst, a) in dst.iter_mut().zip(a) {
                *dst = f(*a);
            }
        }
    }

    #[inline(always)]
    fn binary(&mut self, dst: usize, a: usize, b: usize, f: impl Fn(L, L) -> L) {
        if a == b {
            return self.unary(dst, a, |x| f(x, x));
        }
        if let Ok([dst, a, b]) = self.0.get_disjoint_mut([dst, a, b]) {
            for ((dst, a), b) in dst.iter_mut().zip(a).zip(b) {
                *dst = f(*a, *b);
            }
        }
    }

    #[inline(always)]
    fn select(&mut self, dst: usize, [c, a, b]: [usize; 3]) {
        // Where registers are the same, the general form below has no three of them.
        if a == b {
            return self.unary(dst, a, |x| x);
        }
        if c == a {
            return self.binary(dst, a, b, |x, y| if x != L::ZERO { x } else { y });
        }
        if c == b {
            return self.binary(dst, a, b, |x, y| if y != L::ZERO { x } else { y });
        }
        if let Ok([dst, c, a, b]) = self.0.get_disjoint_mut([dst, c, a, b]) {
            for (((dst, c), a), b) in dst.iter_mut().zip(c).zip(a).zip(b) {
                *dst = if *c != L::ZERO { *a } else { *b };
            }
        }
    }

    #[inline(always)]
    fn in_place(&mut self, at: usize, f: impl Fn(L) -> L) {
        for x in &mut self.0[at] {
            *x = f(*x);
        }
    }
}

/// The remainder with the sign of `b`; 0 where that is 0.
pub fn remainder(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let r = a.wrapping_rem(b);
    if r != 0 && (r < 0) != (b < 0) { r + b } else { r }
}

/// The quotient rounded down; 0 where `b` is 0.
pub fn floor_divide(a: i64, b: i64) -> i64 {
    if b == 0 {
        return 0;
    }
    let r = a.wrapping_rem(b);
    a.wrapping_div(b) - i64::from(r != 0 && (r < 0) != (b < 0))
}

/// `base` to that power; a negative one gives 0, but for 1 and -1.
pub fn pow(base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 => 1 - 2 * (exponent & 1),
            _ => 0,
        };
    }
    let (mut result, mut square, mut rest) = (1i64, base, exponent);
    while rest > 0 {
        if rest & 1 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        rest >>= 1;
    }
    result
}

#[inline(always)]
fn run_unary<L: Lane, const N: usize>(registers: &mut Registers<L, N>, op: IntegerUnary, dst: usize, a: usize) {
    match op {
        IntegerUnary::Neg => registers.unary(dst, a, |x| L::ZERO.sub(x)),
        IntegerUnary::Abs => registers.unary(dst, a, |x| if x < L::ZERO { L::ZERO.sub(x) } else { x }),
        IntegerUnary::Sign => {
            registers.unary(dst, a, |x| L::of(i64::from(x > L::ZERO)).sub(L::of(i64::from(x < L::ZERO))));
        }
        IntegerUnary::BitwiseNot => registers.unary(dst, a, L::not),
        IntegerUnary::LogicalNot => registers.unary(dst, a, |x| truth(x == L::ZERO)),
        IntegerUnary::Relu => registers.unary(dst, a, |x| x.max(L::ZERO)),
        IntegerUnary::Convert => registers.unary(dst, a, |x| x),
    }
}

#[inline(always)]
fn truth<L: Lane>(is_true: bool) -> L {
    if is_true { L::ONE } else { L::ZERO }
}

#[inline(always)]
fn run_binary<L: Lane, const N: usize>(
    registers: &mut Registers<L, N>,
    op: IntegerBinary,
    dst: usize,
    a: usize,
    b: usize,
) {
    let wide = |f: fn(i64, i64) -> i64| move |x: L, y: L| L::of(f(x.i64(), y.i64()));
    let is_true = |x: L| x != L::ZERO;
    match op {
        IntegerBinary::Add => registers.binary(dst, a, b, L::add),
        IntegerBinary::Sub => registers.binary(dst, a, b, L::sub),
        IntegerBinary::Mul => registers.binary(dst, a, b, L::mul),
        IntegerBinary::FloorDivide => registers.binary(dst, a, b, wide(floor_divide)),
        IntegerBinary::Remainder => registers.binary(dst, a, b, wide(remainder)),
        IntegerBinary::Pow => registers.binary(dst, a, b, wide(pow)),
        IntegerBinary::Max => registers.binary(dst, a, b, L::max),
        IntegerBinary::Min => registers.binary(dst, a, b, L::min),
        IntegerBinary::BitwiseAnd => registers.binary(dst, a, b, L::and),
        IntegerBinary::BitwiseOr => registers.binary(dst, a, b, L::or),
        IntegerBinary::BitwiseXor => registers.binary(dst, a, b, L::xor),
        IntegerBinary::ShiftLeft => registers.binary(dst, a, b, L::shl),
        IntegerBinary::ShiftRight => registers.binary(dst, a, b, L::shr),
        IntegerBinary::Eq => registers.binary(dst, a, b, |x, y| truth(x == y)),
        IntegerBinary::Ne => registers.binary(dst, a, b, |x, y| truth(x != y)),
        IntegerBinary::Lt => registers.binary(dst, a, b, |x, y| truth(x < y)),
        IntegerBinary::Le => registers.binary(dst, a, b, |x, y| truth(x <= y)),
        IntegerBinary::Gt => registers.binary(dst, a, b, |x, y| truth(x > y)),
        IntegerBinary::Ge => registers.binary(dst, a, b, |x, y| truth(x >= y)),
        IntegerBinary::LogicalAnd => registers.binary(dst, a, b, |x, y| truth(is_true(x) & is_true(y))),
        IntegerBinary::LogicalOr => registers.binary(dst, a, b, |x, y| truth(is_true(x) | is_true(y))),
        IntegerBinary::LogicalXor => registers.binary(dst, a, b, |x, y| truth(is_true(x) ^ is_true(y))),
    }
}

/// Where an operand begins in each row of a tile.
type Rows = [*mut u8; TILE];

/// A tile: its first row and column, how many there are.
#[derive(Clone, Copy)]
struct Tile {
    row: usize,
    col: usize,
    rows: usize,
    cols: usize,
}

/// A program with its operands, and how the space is cut into tiles.
struct Run<'a> {
    program: &'a Prepared,
    layout: Layout,
    /// Of a full tile.
    rows: usize,
    cols: usize,
    divided_by_zero: AtomicBool,
}

// SAFETY: the addresses in the layout are followed by `run_tiles` alone, whose caller vouches for the memory; tiles write
// disjoint elements.
unsafe impl Sync for Run<'_> {}

impl Run<'_> {
    fn row_count(&self) -> usize {
        self.layout.dims[..self.layout.rank].iter().product()
    }

    fn tiles_across(&self) -> usize {
        self.layout.cols.div_ceil(self.cols)
    }

    fn tiles(&self) -> usize {
        self.row_count().div_ceil(self.rows) * self.tiles_across()
    }

    fn tile(&self, at: usize) -> Tile {
        let (row, col) = (at / self.tiles_across() * self.rows, at % self.tiles_across() * self.cols);
        Tile { row, col, rows: self.rows.min(self.row_count() - row), cols: self.cols.min(self.layout.cols - col) }
    }

    /// Where an operand (loads first, then stores) begins in every row of a tile.
    fn places<'r>(&self, operand: usize, tile: Tile, rows: &'r mut Rows) -> &'r [*mut u8] {
        let (dims, operand) = (&self.layout.dims[..self.layout.rank], &self.layout.operands[operand]);
        let mut index = [0usize; MAX_DIMS];
        let mut rest = tile.row;
        let mut place = operand.ptr.wrapping_offset(tile.col as isize * operand.col);
        for (d, &size) in dims.iter().enumerate().rev() {
            index[d] = rest % size;
            rest /= size;
            place = place.wrapping_offset(index[d] as isize * operand.rows[d]);
        }
        let places = &mut rows[..tile.rows];
        for to in &mut *places {
            *to = place;
            for (d, &size) in dims.iter().enumerate().rev() {
                index[d] += 1;
                if index[d] < size {
                    place = place.wrapping_offset(operand.rows[d]);
                    break;
                }
                index[d] = 0;
                place = place.wrapping_offset((1 - size as isize) * operand.rows[d]);
            }
        }
        places
    }

    /// Reads an operand's part of a tile into a register.
    ///
    /// # Safety
    /// As for [`run_integers`].
    #[inline(always)]
    unsafe fn load<L: Lane>(&self, register: &mut [L], (operand, dtype): (usize, DType), tile: Tile, rows: &mut Rows) {
        let places = self.places(operand, tile, rows);
        let stride = self.layout.operands[operand].col;
        // Closures would be compiled without the instructions of their callers.
        macro_rules! rows {
            ($ty:ty, $x:ident => $value:expr) => {
                for (place, row) in places.iter().zip(register.chunks_exact_mut(tile.cols)) {
                    let from = place.cast::<$ty>();
                    // SAFETY: the elements of a row of the tile are readable, by the caller's promise.
                    unsafe {
                        if stride == size_of::<$ty>() as isize {
                            for (i, to) in row.iter_mut().enumerate() {
                                let $x = from.add(i).read_unaligned();
                                *to = L::of($value);
                            }
                        } else if stride == 0 {
                            let $x = from.read_unaligned();
                            row.fill(L::of($value));
                        } else {
                            for (i, to) in row.iter_mut().enumerate() {
                                let $x = from.byte_offset(i as isize * stride).read_unaligned();
                                *to = L::of($value);
                            }
                        }
                    }
                }
            };
        }
        match self.program.loads[operand] {
            DType::Bool => rows!(u8, x => i64::from(x != 0)),
            DType::U8 => rows!(u8, x => i64::from(x)),
            DType::I8 => rows!(i8, x => i64::from(x)),
            DType::I32 => rows!(i32, x => i64::from(x)),
            DType::I64 => rows!(i64, x => x),
            DType::F16 => rows!(u16, x => truncated(dtype, half::f16::from_bits(x).to_f64())),
            DType::BF16 => rows!(u16, x => truncated(dtype, half::bf16::from_bits(x).to_f64())),
            DType::F32 => rows!(f32, x => truncated(dtype, f64::from(x))),
            DType::F64 => rows!(f64, x => truncated(dtype, x)),
        }
    }

    /// Writes a register to an operand's part of a tile.
    ///
    /// # Safety
    /// As for [`run_integers`].
    #[inline(always)]
    unsafe fn store<L: Lane>(&self, register: &[L], (operand, dtype): (usize, DType), tile: Tile, rows: &mut Rows) {
        let places = self.places(operand, tile, rows);
        let stride = self.layout.operands[operand].col;
        macro_rules! rows {
            ($ty:ty) => {
                for (place, row) in places.iter().zip(register.chunks_exact(tile.cols)) {
                    let to = place.cast::<$ty>();
                    // SAFETY: the elements of a row of the tile are writable, by the caller's promise.
                    unsafe {
                        if stride == size_of::<$ty>() as isize {
                            for (i, x) in row.iter().enumerate() {
                                to.add(i).write_unaligned(x.i64() as $ty);
                            }
                        } else {
                            for (i, x) in row.iter().enumerate() {
                                to.byte_offset(i as isize * stride).write_unaligned(x.i64() as $ty);
                            }
                        }
                    }
                }
            };
        }
        match dtype.size_bytes() {
            1 => rows!(u8),
            4 => rows!(i32),
            _ => rows!(i64),
        }
    }

    #[inline(always)]
    unsafe fn run_tile<L: Lane, const N: usize>(&self, registers: &mut Registers<L, N>, rows: &mut Rows, tile: Tile) {
        for step in &self.program.steps {
            match *step {
                // SAFETY: the caller's promise.
                Step::Load { dst, operand, dtype } => unsafe {
                    self.load(&mut registers.0[dst], (operand, dtype), tile, rows);
                },
                Step::Const { dst, value } => registers.0[dst].fill(L::of(value)),
                Step::Unary { op, dst, a } => run_unary(registers, op, dst, a),
                Step::Binary { op, dst, a, b } => {
                    let divides = matches!(op, IntegerBinary::FloorDivide | IntegerBinary::Remainder);
                    if divides && registers.0[b][..tile.rows * tile.cols].contains(&L::ZERO) {
                        self.divided_by_zero.store(true, Ordering::Relaxed);
                    }
                    run_binary(registers, op, dst, a, b);
                }
                Step::Select { dst, c, a, b } => registers.select(dst, [c, a, b]),
                Step::Wrap { at, dtype } => match dtype {
                    DType::Bool => registers.in_place(at, |x| truth(x != L::ZERO)),
                    DType::U8 => registers.in_place(at, L::u8),
                    DType::I8 => registers.in_place(at, L::i8),
                    DType::I32 => registers.in_place(at, L::i32),
                    _ => {}
                },
            }
        }
        for (store, &(register, dtype)) in self.program.stores.iter().enumerate() {
            let operand = self.program.loads.len() + store;
            // SAFETY: the caller's promise.
            unsafe { self.store(&registers.0[register], (operand, dtype), tile, rows) };
        }
    }
}

simd_dispatch! {
    /// Computes tiles `first..end`.
    ///
    /// # Safety
    /// As for [`run_integers`].
    unsafe fn run_tiles(run: &Run<'_>, first: usize, end: usize) = tiles
}

#[inline(always)]
unsafe fn tiles<S: Simd>(_: S, run: &Run<'_>, first: usize, end: usize) {
    macro_rules! with_lanes {
        ($lane:ty) => {{
            let mut registers = Registers::<$lane, { TILE * 2 / size_of::<$lane>() }>([[0; _]; REGISTERS]);
            let mut rows = [std::ptr::null_mut(); TILE];
            for at in first..end {
                // SAFETY: the caller's promise.
                unsafe { run.run_tile(&mut registers, &mut rows, run.tile(at)) };
            }
        }};
    }
    match run.program.width {
        Width::W16 => with_lanes!(i16),
        Width::W32 => with_lanes!(i32),
        Width::W64 => with_lanes!(i64),
    }
}

/// Tiles of a task at least: below this a region costs more than it saves.
const GRAIN_TILES: usize = 16;

/// Runs a program over a space.
///
/// # Errors
/// [`DivisionByZero`]; results are then of no use.
///
/// # Safety
/// The operands must be valid for the space: loads for reads, stores for writes. A store may overlap a load only element
/// for element, and no other store.
///
/// # Panics
/// If there are fewer operands than the program has.
pub unsafe fn run_integers(
    pool: &Pool,
    program: &Prepared,
    space: &Space,
    loads: &[Bound],
    stores: &[Bound],
) -> Result<(), DivisionByZero> {
    assert!(loads.len() >= program.loads.len() && stores.len() >= program.stores.len(), "too few operands");
    if space.is_empty() {
        return Ok(());
    }
    let loads = loads.iter().copied().zip(program.loads.iter().copied());
    let stores = stores.iter().copied().zip(program.stores.iter().map(|s| s.1));
    let layout = Layout::new(space, &loads.chain(stores).collect::<Vec<_>>(), program.loads.len(), true);
    let elements = match program.width {
        Width::W16 => TILE,
        Width::W32 => TILE / 2,
        Width::W64 => TILE / 4,
    };
    let cols = layout.cols.min(elements);
    let rows = if layout.cols > elements { 1 } else { elements / cols };
    let run = Run { program, layout, rows, cols, divided_by_zero: AtomicBool::new(false) };
    let tiles = run.tiles();
    let tasks = (tiles / GRAIN_TILES).clamp(1, pool.threads() * 4);
    // SAFETY: tasks cover disjoint tiles; the rest is the caller's promise.
    pool.run(tasks, |task, _| unsafe {
        run_tiles(program.isa, &run, tiles * task / tasks, tiles * (task + 1) / tasks);
    });
    if run.divided_by_zero.into_inner() { Err(DivisionByZero) } else { Ok(()) }
}
