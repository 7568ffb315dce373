//! The vector instructions of tile programs: one function per operation, operand kinds and instruction set.
//!
//! A function works on a block of rows and columns. An operand is either *full* (a value per element, rows `ld` apart)
//! or a *scalar per row* (one value for the whole row, successive rows `ld` apart, `ld` 0 for one value throughout).
//! Where all full operands are dense and all scalars uniform the block is treated as one long row.

use super::math;
#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd, bf16_bits, bf16_value, f16_bits, f16_value};
use super::tile_exec_typed::{Lanes, One, Three, Two, pick_typed};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::tile::{Binary, Unary};

/// Operands of one instruction over one block. Strides between rows in elements of what `lanes` says, f32 elsewhere.
#[derive(Clone, Copy)]
pub(super) struct Args {
    pub dst: *mut f32,
    pub dld: isize,
    pub a: *const f32,
    pub ald: isize,
    pub b: *const f32,
    pub bld: isize,
    pub c: *const f32,
    pub cld: isize,
    pub rows: usize,
    pub cols: usize,
    /// Read by the functions of [`tile_exec_typed`](super::tile_exec_typed) only.
    pub lanes: Lanes,
}

/// Executes one instruction over one block.
pub(super) type OpFn = unsafe fn(&Args);

/// Operands of a transfer between a dense or row-strided f32 block and memory of any type. Strides of memory in bytes.
#[derive(Clone, Copy)]
pub(super) struct Move {
    pub reg: *mut f32,
    pub ld: isize,
    pub mem: *mut u8,
    pub row_stride: isize,
    pub col_stride: isize,
    pub rows: usize,
    pub cols: usize,
}

/// Executes one load or store over one block.
pub(super) type MoveFn = unsafe fn(&Move);

/// One-operand operations, those of [`Unary`] and the ones preparation introduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op1 {
    Plain(Unary),
    RoundF16,
    RoundBf16,
    Square,
    Cube,
    InverseSquare,
}

pub(super) trait UnaryOp {
    /// Cheap enough to gain from unrolling.
    const LIGHT: bool = true;
    fn apply<S: Simd>(s: S, a: S::F) -> S::F;
}

pub(super) trait BinaryOp {
    /// Cheap enough to gain from unrolling.
    const LIGHT: bool = true;
    fn apply<S: Simd>(s: S, a: S::F, b: S::F) -> S::F;
}

pub(super) trait TernaryOp {
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F;
}

macro_rules! unary_ops {
    ($($name:ident $light:literal |$s:ident, $a:ident| $e:expr;)*) => {$(
        pub(super) struct $name;
        impl UnaryOp for $name {
            const LIGHT: bool = $light;
            #[inline(always)]
            fn apply<S: Simd>($s: S, $a: S::F) -> S::F { $e }
        }
    )*};
}

macro_rules! binary_ops {
    ($($name:ident $light:literal |$s:ident, $a:ident, $b:ident| $e:expr;)*) => {$(
        pub(super) struct $name;
        impl BinaryOp for $name {
            const LIGHT: bool = $light;
            #[inline(always)]
            fn apply<S: Simd>($s: S, $a: S::F, $b: S::F) -> S::F { $e }
        }
    )*};
}

#[inline(always)]
fn truth<S: Simd>(s: S, m: S::M) -> S::F {
    s.select(m, s.splat(1.0), s.splat(0.0))
}

unary_ops! {
    Neg true |s, a| s.neg(a);
    Abs true |s, a| s.abs(a);
    Exp false |s, a| math::exp(s, a);
    Log false |s, a| math::log(s, a);
    Log2 false |s, a| math::log2(s, a);
    Log10 false |s, a| math::log10(s, a);
    Sin false |s, a| math::sin(s, a);
    Cos false |s, a| math::cos(s, a);
    Tanh false |s, a| math::tanh(s, a);
    Sqrt true |s, a| s.sqrt(a);
    Rsqrt true |s, a| s.div(s.splat(1.0), s.sqrt(a));
    Reciprocal true |s, a| s.div(s.splat(1.0), a);
    Sigmoid false |s, a| math::sigmoid(s, a);
    Silu false |s, a| math::silu(s, a);
    Gelu false |s, a| math::gelu(s, a);
    GeluTanh false |s, a| math::gelu_tanh(s, a);
    Relu true |s, a| s.max_raw(s.splat(0.0), a);
    Erf false |s, a| math::erf(s, a);
    Floor true |s, a| s.floor(a);
    Ceil true |s, a| s.ceil(a);
    Trunc true |s, a| s.trunc(a);
    RoundEven true |s, a| s.round_even(a);
    Not true |s, a| truth(s, s.eq(a, s.splat(0.0)));
    IsNan true |s, a| truth(s, s.ne(a, a));
    RoundF16 true |s, a| s.round_f16(a);
    RoundBf16 true |s, a| s.round_bf16(a);
    Square true |s, a| s.mul(a, a);
    Cube true |s, a| s.mul(s.mul(a, a), a);
    InverseSquare true |s, a| s.div(s.splat(1.0), s.mul(a, a));
}

binary_ops! {
    Add true |s, a, b| s.add(a, b);
    Sub true |s, a, b| s.sub(a, b);
    Mul true |s, a, b| s.mul(a, b);
    Div true |s, a, b| s.div(a, b);
    FloorDivide false |s, a, b| math::floor_divide(s, a, b);
    Remainder false |s, a, b| math::remainder(s, a, b);
    Pow false |s, a, b| math::pow(s, a, b);
    Atan2 false |s, a, b| math::atan2(s, a, b);
    Max true |s, a, b| math::max(s, a, b);
    Min true |s, a, b| math::min(s, a, b);
    Eq true |s, a, b| truth(s, s.eq(a, b));
    Ne true |s, a, b| truth(s, s.ne(a, b));
    Lt true |s, a, b| truth(s, s.lt(a, b));
    Le true |s, a, b| truth(s, s.le(a, b));
    Gt true |s, a, b| truth(s, s.lt(b, a));
    Ge true |s, a, b| truth(s, s.le(b, a));
    And true |s, a, b| s.select(s.ne(a, s.splat(0.0)), truth(s, s.ne(b, s.splat(0.0))), s.splat(0.0));
    Or true |s, a, b| s.select(s.ne(a, s.splat(0.0)), s.splat(1.0), truth(s, s.ne(b, s.splat(0.0))));
}

pub(super) struct Fma;
impl TernaryOp for Fma {
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F {
        s.fma(a, b, c)
    }
}

pub(super) struct Select;
impl TernaryOp for Select {
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F {
        s.select(s.ne(a, s.splat(0.0)), b, c)
    }
}

/// An operand of a row: a vector of it, or the row's scalar.
#[inline(always)]
unsafe fn get<S: Simd, const SCALAR: bool>(s: S, p: *const f32, scalar: S::F, i: usize) -> S::F {
    // SAFETY: a full operand has a whole vector at column `i`, as the caller vouches.
    if SCALAR { scalar } else { unsafe { s.load(p.add(i)) } }
}

#[inline(always)]
unsafe fn get_n<S: Simd, const SCALAR: bool>(s: S, p: *const f32, scalar: S::F, i: usize, n: usize) -> S::F {
    // SAFETY: a full operand has `n` elements from column `i`, as the caller vouches.
    if SCALAR { scalar } else { unsafe { s.load_n(p.add(i), n) } }
}

#[inline(always)]
unsafe fn first<S: Simd, const SCALAR: bool>(s: S, p: *const f32) -> S::F {
    // SAFETY: a scalar operand has one value per row.
    if SCALAR { s.splat(unsafe { *p }) } else { s.splat(0.0) }
}

/// Stores a vector, past the caches if `PAST`.
#[inline(always)]
unsafe fn put<S: Simd, const PAST: bool>(s: S, p: *mut f32, v: S::F) {
    // SAFETY: the caller vouches for a vector at `p`, aligned if `PAST`.
    unsafe { if PAST { s.stream(p, v) } else { s.store(p, v) } };
}

#[inline(always)]
pub(super) fn dense(scalar: bool, ld: isize, cols: usize) -> bool {
    ld == if scalar { 0 } else { cols as isize }
}

#[inline(always)]
unsafe fn unary_body<S: Simd, O: UnaryOp, const PAST: bool>(s: S, g: &Args) {
    let (mut rows, mut cols, l) = (g.rows, g.cols, S::LANES);
    if rows > 1 && dense(false, g.dld, cols) && dense(false, g.ald, cols) {
        (rows, cols) = (1, rows * cols);
    }
    for r in 0..rows as isize {
        // SAFETY: the caller vouches for `rows x cols` elements of every operand at its stride; every access below is at
        // a column under `cols`.
        unsafe {
            let (a, d) = (g.a.offset(r * g.ald), g.dst.offset(r * g.dld));
            let mut i = 0;
            if O::LIGHT {
                while i + 4 * l <= cols {
                    let x = O::apply(s, s.load(a.add(i)));
                    let y = O::apply(s, s.load(a.add(i + l)));
                    let z = O::apply(s, s.load(a.add(i + 2 * l)));
                    let w = O::apply(s, s.load(a.add(i + 3 * l)));
                    put::<S, PAST>(s, d.add(i), x);
                    put::<S, PAST>(s, d.add(i + l), y);
                    put::<S, PAST>(s, d.add(i + 2 * l), z);
                    put::<S, PAST>(s, d.add(i + 3 * l), w);
                    i += 4 * l;
                }
            } else {
                while i + 2 * l <= cols {
                    let (x, y) = (s.load(a.add(i)), s.load(a.add(i + l)));
                    let (x, y) = (O::apply(s, x), O::apply(s, y));
                    put::<S, PAST>(s, d.add(i), x);
                    put::<S, PAST>(s, d.add(i + l), y);
                    i += 2 * l;
                }
            }
            while i + l <= cols {
                put::<S, PAST>(s, d.add(i), O::apply(s, s.load(a.add(i))));
                i += l;
            }
            if i < cols {
                let n = cols - i;
                s.store_n(d.add(i), O::apply(s, s.load_n(a.add(i), n)), n);
            }
        }
    }
}

#[inline(always)]
unsafe fn binary_body<S: Simd, O: BinaryOp, const SA: bool, const SB: bool, const PAST: bool>(s: S, g: &Args) {
    let (mut rows, mut cols, l) = (g.rows, g.cols, S::LANES);
    if rows > 1 && dense(false, g.dld, cols) && dense(SA, g.ald, cols) && dense(SB, g.bld, cols) {
        (rows, cols) = (1, rows * cols);
    }
    for r in 0..rows as isize {
        // SAFETY: the caller vouches for `rows x cols` elements of every operand at its stride; every access below is at
        // a column under `cols`.
        unsafe {
            let (a, b, d) = (g.a.offset(r * g.ald), g.b.offset(r * g.bld), g.dst.offset(r * g.dld));
            let (sa, sb) = (first::<S, SA>(s, a), first::<S, SB>(s, b));
            let mut i = 0;
            while i + 4 * l <= cols {
                let (j, k, m) = (i + l, i + 2 * l, i + 3 * l);
                let x = O::apply(s, get::<S, SA>(s, a, sa, i), get::<S, SB>(s, b, sb, i));
                let y = O::apply(s, get::<S, SA>(s, a, sa, j), get::<S, SB>(s, b, sb, j));
                let z = O::apply(s, get::<S, SA>(s, a, sa, k), get::<S, SB>(s, b, sb, k));
                let w = O::apply(s, get::<S, SA>(s, a, sa, m), get::<S, SB>(s, b, sb, m));
                put::<S, PAST>(s, d.add(i), x);
                put::<S, PAST>(s, d.add(j), y);
                put::<S, PAST>(s, d.add(k), z);
                put::<S, PAST>(s, d.add(m), w);
                i += 4 * l;
            }
            while i + l <= cols {
                put::<S, PAST>(s, d.add(i), O::apply(s, get::<S, SA>(s, a, sa, i), get::<S, SB>(s, b, sb, i)));
                i += l;
            }
            if i < cols {
                let n = cols - i;
                let x = O::apply(s, get_n::<S, SA>(s, a, sa, i, n), get_n::<S, SB>(s, b, sb, i, n));
                s.store_n(d.add(i), x, n);
            }
        }
    }
}

#[inline(always)]
unsafe fn ternary_body<S: Simd, O: TernaryOp, const SA: bool, const SB: bool, const SC: bool, const PAST: bool>(
    s: S,
    g: &Args,
) {
    let (mut rows, mut cols, l) = (g.rows, g.cols, S::LANES);
    let flat = dense(false, g.dld, cols) && dense(SA, g.ald, cols) && dense(SB, g.bld, cols) && dense(SC, g.cld, cols);
    if rows > 1 && flat {
        (rows, cols) = (1, rows * cols);
    }
    for r in 0..rows as isize {
        // SAFETY: the caller vouches for `rows x cols` elements of every operand at its stride; every access below is at
        // a column under `cols`.
        unsafe {
            let (a, b) = (g.a.offset(r * g.ald), g.b.offset(r * g.bld));
            let (c, d) = (g.c.offset(r * g.cld), g.dst.offset(r * g.dld));
            let (sa, sb, sc) = (first::<S, SA>(s, a), first::<S, SB>(s, b), first::<S, SC>(s, c));
            let mut i = 0;
            while i + 2 * l <= cols {
                let j = i + l;
                let (xa, ya) = (get::<S, SA>(s, a, sa, i), get::<S, SA>(s, a, sa, j));
                let (xb, yb) = (get::<S, SB>(s, b, sb, i), get::<S, SB>(s, b, sb, j));
                let (xc, yc) = (get::<S, SC>(s, c, sc, i), get::<S, SC>(s, c, sc, j));
                put::<S, PAST>(s, d.add(i), O::apply(s, xa, xb, xc));
                put::<S, PAST>(s, d.add(j), O::apply(s, ya, yb, yc));
                i += 2 * l;
            }
            while i < cols {
                let n = l.min(cols - i);
                let (xa, xb) = (get_n::<S, SA>(s, a, sa, i, n), get_n::<S, SB>(s, b, sb, i, n));
                let xc = get_n::<S, SC>(s, c, sc, i, n);
                s.store_n(d.add(i), O::apply(s, xa, xb, xc), n);
                i += l;
            }
        }
    }
}

/// One value of memory, widened or narrowed to f32.
///
/// # Safety
/// `p` must point to a value of the type (alignment is not required).
#[inline(always)]
pub(crate) unsafe fn load_scalar(dtype: DType, p: *const u8) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => p.cast::<f32>().read_unaligned(),
            DType::F16 => f16_value(p.cast::<u16>().read_unaligned()),
            DType::BF16 => bf16_value(p.cast::<u16>().read_unaligned()),
            DType::F64 => p.cast::<f64>().read_unaligned() as f32,
            DType::I64 => p.cast::<i64>().read_unaligned() as f32,
            DType::I32 => p.cast::<i32>().read_unaligned() as f32,
            DType::U8 => *p as f32,
            DType::I8 => *p.cast::<i8>() as f32,
            DType::Bool => (*p != 0) as u8 as f32,
        }
    }
}

/// Conversion to an integer as x86 truncates: out of range and NaN give the smallest value.
#[inline(always)]
pub(crate) fn to_i64(x: f32) -> i64 {
    if (-9.223_372e18..9.223_372e18).contains(&x) { x as i64 } else { i64::MIN }
}

/// As [`to_i64`], for 32 bits.
#[inline(always)]
pub(crate) fn to_i32(x: f32) -> i32 {
    if (-2_147_483_648.0..2_147_483_648.0).contains(&x) { x as i32 } else { i32::MIN }
}

/// Stores one value, rounded to nearest even for floating types, truncated for integers (PyTorch's casts on x86).
///
/// # Safety
/// `p` must be valid for writing a value of the type (alignment is not required).
#[inline(always)]
pub(crate) unsafe fn store_scalar(dtype: DType, p: *mut u8, x: f32) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::F32 => p.cast::<f32>().write_unaligned(x),
            DType::F16 => p.cast::<u16>().write_unaligned(f16_bits(x)),
            DType::BF16 => p.cast::<u16>().write_unaligned(bf16_bits(x)),
            DType::F64 => p.cast::<f64>().write_unaligned(x as f64),
            DType::I64 => p.cast::<i64>().write_unaligned(to_i64(x)),
            DType::I32 => p.cast::<i32>().write_unaligned(to_i32(x)),
            DType::U8 => *p = to_i64(x) as u8,
            DType::I8 => *p = to_i32(x) as u8,
            DType::Bool => *p = (x != 0.0) as u8,
        }
    }
}

const fn dtype_of(code: u8) -> DType {
    match code {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::BF16,
        3 => DType::F64,
        4 => DType::I64,
        5 => DType::I32,
        6 => DType::U8,
        7 => DType::I8,
        _ => DType::Bool,
    }
}

/// Loads a block of memory of type `dtype_of(T)` into a register.
#[inline(always)]
unsafe fn load_body<S: Simd, const T: u8>(s: S, g: &Move) {
    let dtype = dtype_of(T);
    let (mut rows, mut cols, l) = (g.rows, g.cols, S::LANES);
    let size = dtype.size_bytes() as isize;
    // SAFETY: the caller vouches for `rows x cols` elements of both sides at their strides.
    unsafe {
        if g.col_stride != size {
            strided_load::<T>(g);
            return;
        }
        if rows > 1 && dense(false, g.ld, cols) && g.row_stride == cols as isize * size {
            (rows, cols) = (1, rows * cols);
        }
        for r in 0..rows as isize {
            let (m, d) = (g.mem.offset(r * g.row_stride), g.reg.offset(r * g.ld));
            let mut i = 0;
            match dtype {
                DType::F32 => std::ptr::copy_nonoverlapping(m.cast::<f32>(), d, cols),
                DType::BF16 => {
                    while i + l <= cols {
                        s.store(d.add(i), s.load_bf16(m.cast::<u16>().add(i)));
                        i += l;
                    }
                    if i < cols {
                        s.store_n(d.add(i), s.load_bf16_n(m.cast::<u16>().add(i), cols - i), cols - i);
                    }
                }
                DType::F16 => {
                    while i + l <= cols {
                        s.store(d.add(i), s.load_f16(m.cast::<u16>().add(i)));
                        i += l;
                    }
                    if i < cols {
                        s.store_n(d.add(i), s.load_f16_n(m.cast::<u16>().add(i), cols - i), cols - i);
                    }
                }
                _ => {
                    while i < cols {
                        *d.add(i) = load_scalar(dtype, m.offset(i as isize * size));
                        i += 1;
                    }
                }
            }
        }
    }
}

/// Stores a register (a full one, or one scalar per row if `SCALAR`) to memory of type `dtype_of(T)`.
#[inline(always)]
unsafe fn store_body<S: Simd, const T: u8, const SCALAR: bool>(s: S, g: &Move) {
    let dtype = dtype_of(T);
    let (mut rows, mut cols, l) = (g.rows, g.cols, S::LANES);
    let size = dtype.size_bytes() as isize;
    // SAFETY: the caller vouches for `rows x cols` elements of both sides at their strides.
    unsafe {
        if g.col_stride != size {
            strided_store::<T, SCALAR>(g);
            return;
        }
        if rows > 1 && dense(SCALAR, g.ld, cols) && g.row_stride == cols as isize * size {
            (rows, cols) = (1, rows * cols);
        }
        for r in 0..rows as isize {
            let (m, p) = (g.mem.offset(r * g.row_stride), g.reg.cast_const().offset(r * g.ld));
            let v = first::<S, SCALAR>(s, p);
            let mut i = 0;
            match dtype {
                DType::F32 => {
                    let m = m.cast::<f32>();
                    while i + 2 * l <= cols {
                        let (x, y) = (get::<S, SCALAR>(s, p, v, i), get::<S, SCALAR>(s, p, v, i + l));
                        s.store(m.add(i), x);
                        s.store(m.add(i + l), y);
                        i += 2 * l;
                    }
                    while i < cols {
                        let n = l.min(cols - i);
                        s.store_n(m.add(i), get_n::<S, SCALAR>(s, p, v, i, n), n);
                        i += l;
                    }
                }
                DType::BF16 => {
                    while i + l <= cols {
                        s.store_bf16(m.cast::<u16>().add(i), get::<S, SCALAR>(s, p, v, i));
                        i += l;
                    }
                    if i < cols {
                        let n = cols - i;
                        s.store_bf16_n(m.cast::<u16>().add(i), get_n::<S, SCALAR>(s, p, v, i, n), n);
                    }
                }
                DType::F16 => {
                    while i + l <= cols {
                        s.store_f16(m.cast::<u16>().add(i), get::<S, SCALAR>(s, p, v, i));
                        i += l;
                    }
                    if i < cols {
                        let n = cols - i;
                        s.store_f16_n(m.cast::<u16>().add(i), get_n::<S, SCALAR>(s, p, v, i, n), n);
                    }
                }
                _ => {
                    while i < cols {
                        store_scalar(dtype, m.offset(i as isize * size), *p.add(if SCALAR { 0 } else { i }));
                        i += 1;
                    }
                }
            }
        }
    }
}

/// Whether columns are the outer loop of a strided transfer: the dimension with the smaller stride in memory is inside, as the
/// register is in L1 and memory is not. But a loop over a few rows costs more than reading the lines of L1 again.
#[inline(always)]
fn by_columns(g: &Move) -> bool {
    let [row, col] = [g.row_stride, g.col_stride].map(isize::unsigned_abs);
    row < col && (g.rows > 4 || col > 32)
}

/// Element by element.
#[inline(always)]
unsafe fn strided_load<const T: u8>(g: &Move) {
    let (dtype, rows, cols) = (dtype_of(T), g.rows as isize, g.cols as isize);
    // SAFETY: the caller vouches for `rows x cols` elements of both sides at their strides.
    unsafe {
        if by_columns(g) {
            for c in 0..cols {
                let (m, d) = (g.mem.offset(c * g.col_stride), g.reg.offset(c));
                for r in 0..rows {
                    *d.offset(r * g.ld) = load_scalar(dtype, m.offset(r * g.row_stride));
                }
            }
        } else {
            for r in 0..rows {
                let (m, d) = (g.mem.offset(r * g.row_stride), g.reg.offset(r * g.ld));
                for c in 0..cols {
                    *d.offset(c) = load_scalar(dtype, m.offset(c * g.col_stride));
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn strided_store<const T: u8, const SCALAR: bool>(g: &Move) {
    let (dtype, rows, cols) = (dtype_of(T), g.rows as isize, g.cols as isize);
    let step = if SCALAR { 0 } else { 1 };
    // SAFETY: the caller vouches for `rows x cols` elements of both sides at their strides.
    unsafe {
        if by_columns(g) {
            for c in 0..cols {
                let (m, p) = (g.mem.offset(c * g.col_stride), g.reg.offset(c * step));
                for r in 0..rows {
                    store_scalar(dtype, m.offset(r * g.row_stride), *p.offset(r * g.ld));
                }
            }
        } else {
            for r in 0..rows {
                let (m, p) = (g.mem.offset(r * g.row_stride), g.reg.offset(r * g.ld));
                for c in 0..cols {
                    store_scalar(dtype, m.offset(c * g.col_stride), *p.offset(c * step));
                }
            }
        }
    }
}

/// Functions of one signature per level from a generic body; `$pick` finds the one of a level.
macro_rules! levels {
    ($args:ty, $fn:ty, $body:ident, $pick:ident, $a512:ident, $a256:ident, $plain:ident,
     [$($gen:tt)*], [$($use:tt)*]) => {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
        unsafe fn $a512<$($gen)*>(g: &$args) {
            // SAFETY: the function's features make the token valid; the rest is the caller's promise.
            unsafe { $body::<Avx512, $($use)*>(Avx512::new(), g) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn $a256<$($gen)*>(g: &$args) {
            // SAFETY: the function's features make the token valid; the rest is the caller's promise.
            unsafe { $body::<Avx2, $($use)*>(Avx2::new(), g) }
        }
        unsafe fn $plain<$($gen)*>(g: &$args) {
            // SAFETY: the caller's promise.
            unsafe { $body::<Portable, $($use)*>(Portable, g) }
        }
        pub(super) fn $pick<$($gen)*>(isa: Isa) -> $fn {
            match isa {
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 => $a512::<$($use)*>,
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => $a256::<$($use)*>,
                _ => $plain::<$($use)*>,
            }
        }
    };
}

pub(super) use levels;

levels!(Args, OpFn, unary_body, pick_unary, unary_512, unary_256, unary_plain, 
    [O: UnaryOp, const PAST: bool], [O, PAST]);
levels!(Args, OpFn, binary_body, pick_binary, binary_512, binary_256, binary_plain,
    [O: BinaryOp, const SA: bool, const SB: bool, const PAST: bool], [O, SA, SB, PAST]);
levels!(Args, OpFn, ternary_body, pick_ternary, ternary_512, ternary_256, ternary_plain,
    [O: TernaryOp, const SA: bool, const SB: bool, const SC: bool, const PAST: bool], [O, SA, SB, SC, PAST]);
levels!(Move, MoveFn, load_body, pick_load, load_512, load_256, load_plain, [const T: u8], [T]);
levels!(Move, MoveFn, store_body, pick_store, store_512, store_256, store_plain,
    [const T: u8, const SCALAR: bool], [T, SCALAR]);

/// The expression with `$op` standing for the type of an operation of one operand.
macro_rules! with_unary {
    ($of:expr, $op:ident => $e:expr, [$($name:ident)*]) => {
        match $of {
            $(Op1::Plain(Unary::$name) => { type $op = $name; $e })*
            Op1::Plain(Unary::RotatePairs) => unreachable!("programs with it are not prepared"),
            Op1::RoundF16 => { type $op = RoundF16; $e }
            Op1::RoundBf16 => { type $op = RoundBf16; $e }
            Op1::Square => { type $op = Square; $e }
            Op1::Cube => { type $op = Cube; $e }
            Op1::InverseSquare => { type $op = InverseSquare; $e }
        }
    };
    ($of:expr, $op:ident => $e:expr) => {
        with_unary!($of, $op => $e, [
            Neg Abs Exp Log Log2 Log10 Sin Cos Tanh Sqrt Rsqrt Reciprocal Sigmoid Silu Gelu GeluTanh Relu Erf Floor Ceil
            Trunc RoundEven Not IsNan
        ])
    };
}

/// The same for one of two operands.
macro_rules! with_binary {
    ($of:expr, $op:ident => $e:expr, [$($name:ident)*]) => {
        match $of { $(Binary::$name => { type $op = $name; $e })* }
    };
    ($of:expr, $op:ident => $e:expr) => {
        with_binary!($of, $op => $e, [
            Add Sub Mul Div FloorDivide Remainder Pow Atan2 Max Min Eq Ne Lt Le Gt Ge And Or
        ])
    };
}

/// The function of a one-operand operation. `isa` must be available here and below.
///
/// With `past`, here and below, those of light operations write their results past the caches: these are aligned to a cache
/// line, and [`fence`] follows before anything reads them. Other operations gain nothing from it.
pub(super) fn unary_fn(isa: Isa, op: Op1, past: bool) -> OpFn {
    match op {
        Op1::Plain(Unary::Silu) if past => pick_unary::<Silu, true>(isa),
        Op1::Plain(Unary::GeluTanh) if past => pick_unary::<GeluTanh, true>(isa),
        op => with_unary!(op, O => pick_unary::<O, false>(isa)),
    }
}

fn binary_kinds<O: BinaryOp, const PAST: bool>(isa: Isa, sa: bool, sb: bool) -> OpFn {
    match (sa, sb) {
        (false, false) => pick_binary::<O, false, false, PAST>(isa),
        (true, false) => pick_binary::<O, true, false, PAST>(isa),
        (false, true) => pick_binary::<O, false, true, PAST>(isa),
        (true, true) => pick_binary::<O, true, true, PAST>(isa),
    }
}

/// The function of a two-operand operation; `sa`, `sb` say which operands are scalars per row.
pub(super) fn binary_fn(isa: Isa, op: Binary, sa: bool, sb: bool, past: bool) -> OpFn {
    match op {
        Binary::Add if past => binary_kinds::<Add, true>(isa, sa, sb),
        Binary::Sub if past => binary_kinds::<Sub, true>(isa, sa, sb),
        Binary::Mul if past => binary_kinds::<Mul, true>(isa, sa, sb),
        op => with_binary!(op, O => binary_kinds::<O, false>(isa, sa, sb)),
    }
}

/// Three-operand operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Op3 {
    Fma,
    Select,
}

fn ternary_kinds<O: TernaryOp, const PAST: bool>(isa: Isa, s: [bool; 3]) -> OpFn {
    match s {
        [false, false, false] => pick_ternary::<O, false, false, false, PAST>(isa),
        [true, false, false] => pick_ternary::<O, true, false, false, PAST>(isa),
        [false, true, false] => pick_ternary::<O, false, true, false, PAST>(isa),
        [false, false, true] => pick_ternary::<O, false, false, true, PAST>(isa),
        [true, true, false] => pick_ternary::<O, true, true, false, PAST>(isa),
        [true, false, true] => pick_ternary::<O, true, false, true, PAST>(isa),
        [false, true, true] => pick_ternary::<O, false, true, true, PAST>(isa),
        [true, true, true] => pick_ternary::<O, true, true, true, PAST>(isa),
    }
}

/// The function of a three-operand operation; `scalar` says which operands are scalars per row.
pub(super) fn ternary_fn(isa: Isa, op: Op3, scalar: [bool; 3], past: bool) -> OpFn {
    match op {
        Op3::Fma if past => ternary_kinds::<Fma, true>(isa, scalar),
        Op3::Fma => ternary_kinds::<Fma, false>(isa, scalar),
        Op3::Select => ternary_kinds::<Select, false>(isa, scalar),
    }
}

/// As [`unary_fn`], [`binary_fn`] and [`ternary_fn`], for operands and results of which some have 16 bits in memory:
/// where they lie is said at each call ([`Args::lanes`]).
pub(super) fn typed_unary_fn(isa: Isa, op: Op1) -> OpFn {
    with_unary!(op, O => pick_typed::<One<O>>(isa))
}

pub(super) fn typed_binary_fn(isa: Isa, op: Binary) -> OpFn {
    with_binary!(op, O => pick_typed::<Two<O>>(isa))
}

pub(super) fn typed_ternary_fn(isa: Isa, op: Op3) -> OpFn {
    match op {
        Op3::Fma => pick_typed::<Three<Fma>>(isa),
        Op3::Select => pick_typed::<Three<Select>>(isa),
    }
}

/// Makes what went past the caches visible in order with later stores of this thread.
pub(super) fn fence(isa: Isa) {
    match isa {
        // SAFETY: `isa` is available.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe { Avx512::new() }.fence(),
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe { Avx2::new() }.fence(),
        _ => Portable.fence(),
    }
}

/// The function that loads a block of a type.
pub(super) fn load_fn(isa: Isa, dtype: DType) -> MoveFn {
    match dtype {
        DType::F32 => pick_load::<0>(isa),
        DType::F16 => pick_load::<1>(isa),
        DType::BF16 => pick_load::<2>(isa),
        DType::F64 => pick_load::<3>(isa),
        DType::I64 => pick_load::<4>(isa),
        DType::I32 => pick_load::<5>(isa),
        DType::U8 => pick_load::<6>(isa),
        DType::I8 => pick_load::<7>(isa),
        DType::Bool => pick_load::<8>(isa),
    }
}

/// The function that stores a block of a type; `scalar` if the register holds one value per row.
pub(super) fn store_fn(isa: Isa, dtype: DType, scalar: bool) -> MoveFn {
    macro_rules! pick {
        ($t:literal) => {
            if scalar { pick_store::<$t, true>(isa) } else { pick_store::<$t, false>(isa) }
        };
    }
    match dtype {
        DType::F32 => pick!(0),
        DType::F16 => pick!(1),
        DType::BF16 => pick!(2),
        DType::F64 => pick!(3),
        DType::I64 => pick!(4),
        DType::I32 => pick!(5),
        DType::U8 => pick!(6),
        DType::I8 => pick!(7),
        DType::Bool => pick!(8),
    }
}
