//! Reductions of the middle dimension of `[outer, reduce, inner]`.
//!
//! Sums of floating types run in f32 over short pieces and in f64 between them; sums of integers in i64, of f64 in f64.
//! Maximum and minimum are NaN if any element is, as in PyTorch. Empty reductions give the identity (0 for a sum, 1 for
//! a product, NaN for a mean); maximum, minimum and their positions have none and are refused.

use super::KernelError;
use super::copy::Shared;
use super::simd::{Element, Simd};
use super::tile_exec_ops::{load_scalar, store_scalar};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::{simd_dispatch, with_element};

/// What is computed of the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reduction {
    /// Sum.
    Sum,
    /// Arithmetic mean.
    Mean,
    /// Product.
    Prod,
    /// Largest.
    Max,
    /// Smallest.
    Min,
    /// 1 if any element is not zero.
    Any,
    /// 1 if every element is not zero.
    All,
    /// Position of the first largest element (of the first NaN, if there is one).
    ArgMax,
    /// Position of the first smallest element (of the first NaN, if there is one).
    ArgMin,
    /// Sum of squares.
    SumSquares,
}

/// The operand and the result. Strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Reduce {
    /// First element of the operand.
    pub src: *const u8,
    /// Its type.
    pub src_dtype: DType,
    /// `[outer, reduce, inner]`.
    pub sizes: [usize; 3],
    /// The operand's strides along them.
    pub src_strides: [isize; 3],
    /// First element of the result.
    pub dst: *mut u8,
    /// Its type; positions are stored exactly in integer types.
    pub dst_dtype: DType,
    /// The result's strides along outer and inner.
    pub dst_strides: [isize; 2],
}

/// Runs a reduction.
///
/// # Errors
/// For an empty maximum, minimum or position.
///
/// # Safety
/// The description must match valid memory.
pub unsafe fn reduce(pool: &Pool, isa: Isa, op: Reduction, r: &Reduce) -> Result<(), KernelError> {
    use Reduction::{ArgMax, ArgMin, Max, Min};
    let [outer, n, inner] = r.sizes;
    if n == 0 && matches!(op, Max | Min | ArgMax | ArgMin) && outer * inner > 0 {
        return Err(KernelError::Shape("maximum or minimum of nothing"));
    }
    let units = outer * inner;
    if units == 0 {
        return Ok(());
    }
    let form = form(op, r);
    let size = r.src_dtype.size_bytes() as isize;
    let tasks = ((units * n.max(1)) >> 14).clamp(1, pool.threads() * 4);
    let (src, dst) = (Shared(r.src.cast_mut()), Shared(r.dst));
    let (from, to, ss, ds) = (r.src_dtype, r.dst_dtype, r.src_strides, r.dst_strides);
    let (per_outer, width) = if form == Form::Strips { (inner.div_ceil(STRIP), STRIP) } else { (inner, 1) };
    let units = outer * per_outer;
    let tasks = tasks.min(units);
    pool.run(tasks, |task, _| {
        let mut unit = units * task / tasks;
        let end = units * (task + 1) / tasks;
        while unit < end {
            let (o, i) = ((unit / per_outer) as isize, unit % per_outer * width);
            let p = src.at((o * ss[0] + i as isize * ss[2]) * size);
            let q = |i: usize| dst.at((o * ds[0] + i as isize * ds[1]) * to.size_bytes() as isize);
            // SAFETY: elements of the operand and the result; units are disjoint.
            unsafe {
                match form {
                    Form::Strips => {
                        let width = STRIP.min(inner - i);
                        let mut out = [0f64; STRIP];
                        strip(isa, op, from, p, n, ss[1], width, &mut out);
                        out[..width].iter().enumerate().for_each(|(j, x)| store_result(to, q(i + j), *x));
                    }
                    Form::Lines => {
                        let count = LINES.min(end - unit);
                        let at = |unit: usize| ((unit / per_outer) as isize, (unit % per_outer) as isize);
                        let (mut starts, mut out) = ([p.cast_const(); LINES], [0f64; LINES]);
                        for (j, start) in starts[..count].iter_mut().enumerate() {
                            let (o, i) = at(unit + j);
                            *start = src.at((o * ss[0] + i * ss[2]) * size).cast_const();
                        }
                        lines(isa, op, from, &starts[..count], n, &mut out);
                        for (j, x) in out[..count].iter().enumerate() {
                            let (o, i) = at(unit + j);
                            store_result(to, dst.at((o * ds[0] + i * ds[1]) * to.size_bytes() as isize), *x);
                        }
                        unit += count - 1;
                    }
                    Form::Places => {
                        let mut at = 0;
                        place(isa, op == ArgMax, from, p, n, &mut at);
                        store_position(to, q(i), at);
                    }
                    Form::Elements if matches!(op, ArgMax | ArgMin) => {
                        store_position(to, q(i), position(op == ArgMax, from, p, n, ss[1] * size));
                    }
                    Form::Elements if matches!(from, DType::F32 | DType::F16 | DType::BF16 | DType::F64) => {
                        store_result(to, q(i), scalar_real(op, from, p, n, ss[1] * size));
                    }
                    Form::Elements => store_integer(op, to, q(i), from, p, n, ss[1] * size),
                }
            }
            unit += 1;
        }
    });
    Ok(())
}

/// How a reduction walks through its operand: each is code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Columns side by side are reduced together, a strip at a time.
    Strips,
    /// Lines of elements side by side.
    Lines,
    /// The position of an extreme in such lines.
    Places,
    /// Element by element.
    Elements,
}

/// The form of a reduction.
pub(super) fn form(op: Reduction, r: &Reduce) -> Form {
    let is_position = matches!(op, Reduction::ArgMax | Reduction::ArgMin);
    let [_, along, across] = r.src_strides;
    match (is_position, along, across) {
        _ if !matches!(r.src_dtype, DType::F32 | DType::F16 | DType::BF16) => Form::Elements,
        (false, _, 1) if r.sizes[2] > 1 => Form::Strips,
        (false, 1, _) => Form::Lines,
        (true, 1, _) => Form::Places,
        _ => Form::Elements,
    }
}

/// Lines reduced by one call.
const LINES: usize = 32;
/// Columns reduced together.
const STRIP: usize = 64;

pub(super) unsafe fn store_result(dtype: DType, p: *mut u8, x: f64) {
    // SAFETY: the caller vouches for the place.
    unsafe {
        match dtype {
            DType::F64 => p.cast::<f64>().write_unaligned(x),
            _ => store_scalar(dtype, p, x as f32),
        }
    }
}

unsafe fn store_position(dtype: DType, p: *mut u8, at: usize) {
    // SAFETY: the caller vouches for the place.
    unsafe {
        match dtype {
            DType::I64 => p.cast::<i64>().write_unaligned(at as i64),
            DType::I32 => p.cast::<i32>().write_unaligned(at as i32),
            _ => store_result(dtype, p, at as f64),
        }
    }
}

/// The identity of a reduction and its step, in f64.
fn identity(op: Reduction) -> f64 {
    match op {
        Reduction::Prod | Reduction::All => 1.0,
        Reduction::Max => f64::NEG_INFINITY,
        Reduction::Min => f64::INFINITY,
        _ => 0.0,
    }
}

fn step(op: Reduction, acc: f64, x: f64) -> f64 {
    match op {
        Reduction::Sum | Reduction::Mean => acc + x,
        Reduction::SumSquares => acc + x * x,
        Reduction::Prod => acc * x,
        Reduction::Max => {
            if x > acc || x.is_nan() {
                x
            } else {
                acc
            }
        }
        Reduction::Min => {
            if x < acc || x.is_nan() {
                x
            } else {
                acc
            }
        }
        Reduction::Any => (acc != 0.0 || x != 0.0) as u8 as f64,
        Reduction::All => (acc != 0.0 && x != 0.0) as u8 as f64,
        Reduction::ArgMax | Reduction::ArgMin => acc,
    }
}

fn finish(op: Reduction, acc: f64, n: usize) -> f64 {
    if op == Reduction::Mean { acc / n as f64 } else { acc }
}

pub(super) unsafe fn load_f64(dtype: DType, p: *const u8) -> f64 {
    // SAFETY: the caller vouches for the element.
    unsafe { if dtype == DType::F64 { p.cast::<f64>().read_unaligned() } else { load_scalar(dtype, p) as f64 } }
}

unsafe fn scalar_real(op: Reduction, dtype: DType, p: *const u8, n: usize, stride: isize) -> f64 {
    let mut acc = identity(op);
    for i in 0..n as isize {
        // SAFETY: elements of the line, by the caller's promise.
        let x = unsafe { load_f64(dtype, p.offset(i * stride)) };
        // A NaN stays once it is there.
        acc = if acc.is_nan() { acc } else { step(op, acc, x) };
    }
    finish(op, acc, n)
}

pub(super) unsafe fn load_i64(dtype: DType, p: *const u8) -> i64 {
    // SAFETY: the caller vouches for the element.
    unsafe {
        match dtype {
            DType::I64 => p.cast::<i64>().read_unaligned(),
            DType::I32 => p.cast::<i32>().read_unaligned() as i64,
            DType::Bool => (*p != 0) as i64,
            DType::I8 => *p.cast::<i8>() as i64,
            _ => *p as i64,
        }
    }
}

/// Reduces integers in i64 (wrapping, as PyTorch does) and stores the result.
unsafe fn store_integer(op: Reduction, to: DType, q: *mut u8, from: DType, p: *const u8, n: usize, stride: isize) {
    let mut acc = match op {
        Reduction::Prod | Reduction::All => 1i64,
        Reduction::Max => i64::MIN,
        Reduction::Min => i64::MAX,
        _ => 0,
    };
    for i in 0..n as isize {
        // SAFETY: elements of the line, by the caller's promise.
        let x = unsafe { load_i64(from, p.offset(i * stride)) };
        acc = match op {
            Reduction::Sum | Reduction::Mean => acc.wrapping_add(x),
            Reduction::SumSquares => acc.wrapping_add(x.wrapping_mul(x)),
            Reduction::Prod => acc.wrapping_mul(x),
            Reduction::Max => acc.max(x),
            Reduction::Min => acc.min(x),
            Reduction::Any => (acc != 0 || x != 0) as i64,
            Reduction::All => (acc != 0 && x != 0) as i64,
            Reduction::ArgMax | Reduction::ArgMin => acc,
        };
    }
    // SAFETY: the caller vouches for the place.
    unsafe {
        match to {
            DType::I64 => q.cast::<i64>().write_unaligned(acc),
            DType::I32 => q.cast::<i32>().write_unaligned(acc as i32),
            DType::U8 | DType::I8 => *q = acc as u8,
            DType::Bool => *q = (acc != 0) as u8,
            _ => store_result(to, q, finish(op, acc as f64, n)),
        }
    }
}

unsafe fn position(max: bool, dtype: DType, p: *const u8, n: usize, stride: isize) -> usize {
    let mut best = 0;
    // SAFETY: elements of the line, by the caller's promise; the line is not empty.
    unsafe {
        if matches!(dtype, DType::I64 | DType::I32 | DType::U8 | DType::I8 | DType::Bool) {
            let mut top = load_i64(dtype, p);
            for i in 1..n {
                let x = load_i64(dtype, p.offset(i as isize * stride));
                if if max { x > top } else { x < top } {
                    (best, top) = (i, x);
                }
            }
            return best;
        }
        let mut top = load_f64(dtype, p);
        for i in 1..n {
            if top.is_nan() {
                break;
            }
            let x = load_f64(dtype, p.offset(i as isize * stride));
            if x.is_nan() || if max { x > top } else { x < top } {
                (best, top) = (i, x);
            }
        }
    }
    best
}

simd_dispatch! {
    /// Contiguous lines of a floating type.
    unsafe fn lines(op: Reduction, dtype: DType, starts: &[*const u8], n: usize, out: &mut [f64; LINES]) = lines_body
}

#[inline(always)]
unsafe fn lines_body<S: Simd>(
    s: S,
    op: Reduction,
    dtype: DType,
    starts: &[*const u8],
    n: usize,
    out: &mut [f64; LINES],
) {
    for (&start, out) in starts.iter().zip(out) {
        // SAFETY: the caller's promise.
        *out = unsafe { with_element!(dtype, e => line_of(s, e, op, start, n), else f64::NAN) };
    }
}

/// One step of a reduction on vectors; the accumulator of `Any` and `All` holds 0 or 1.
#[inline(always)]
fn vector_step<S: Simd>(s: S, op: Reduction, acc: S::F, x: S::F) -> S::F {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    match op {
        Reduction::SumSquares => s.mla(x, x, acc),
        Reduction::Prod => s.mul(acc, x),
        Reduction::Max => super::math::max(s, acc, x),
        Reduction::Min => super::math::min(s, acc, x),
        Reduction::Any => s.select(s.ne(x, zero), one, acc),
        Reduction::All => s.select(s.ne(x, zero), acc, zero),
        _ => s.add(acc, x),
    }
}

/// What two results of [`vector_step`] are together.
#[inline(always)]
fn vector_join<S: Simd>(s: S, op: Reduction, a: S::F, b: S::F) -> S::F {
    match op {
        Reduction::SumSquares => s.add(a, b),
        op => vector_step(s, op, a, b),
    }
}

/// The same of two lanes, but for sums.
#[inline(always)]
fn lane_join(op: Reduction, a: f32, b: f32) -> f32 {
    match op {
        Reduction::Max => {
            if a > b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Reduction::Min => {
            if a < b || a.is_nan() {
                a
            } else {
                b
            }
        }
        Reduction::Any => (a != 0.0 || b != 0.0) as u8 as f32,
        Reduction::All => (a != 0.0 && b != 0.0) as u8 as f32,
        _ => a * b,
    }
}

#[inline(always)]
unsafe fn line_of<S: Simd, E: Element>(s: S, e: E, op: Reduction, x: *const u8, n: usize) -> f64 {
    let (l, mut total, mut at) = (S::LANES, identity(op), 0);
    let start = s.splat(identity(op) as f32);
    let is_sum = matches!(op, Reduction::Sum | Reduction::Mean | Reduction::SumSquares);
    let keep = |total: f64, x: f32| {
        let x = x as f64;
        // Partial results of squares are sums.
        let op = if op == Reduction::SumSquares { Reduction::Sum } else { op };
        if total.is_nan() { total } else { step(op, total, x) }
    };
    while at + l <= n {
        let end = n.min(at + 64 * l);
        let mut acc = [start; 4];
        // SAFETY: positions below `n`, by the caller's promise; LANES <= 16.
        unsafe {
            while at + 4 * l <= end {
                acc[0] = vector_step(s, op, acc[0], e.load(s, x, at));
                acc[1] = vector_step(s, op, acc[1], e.load(s, x, at + l));
                acc[2] = vector_step(s, op, acc[2], e.load(s, x, at + 2 * l));
                acc[3] = vector_step(s, op, acc[3], e.load(s, x, at + 3 * l));
                at += 4 * l;
            }
            while at + l <= end {
                acc[0] = vector_step(s, op, acc[0], e.load(s, x, at));
                at += l;
            }
            let pairs = [vector_join(s, op, acc[0], acc[1]), vector_join(s, op, acc[2], acc[3])];
            let all = vector_join(s, op, pairs[0], pairs[1]);
            if is_sum {
                total += s.reduce_add(all) as f64;
            } else {
                let mut lanes = [0f32; 16];
                s.store(lanes.as_mut_ptr(), all);
                let mut half = l / 2;
                while half > 0 {
                    for j in 0..half {
                        lanes[j] = lane_join(op, lanes[j], lanes[j + half]);
                    }
                    half /= 2;
                }
                total = keep(total, lanes[0]);
            }
        }
    }
    while at < n {
        // SAFETY: a position below `n`.
        let v = unsafe { e.get(x, at as isize) };
        total = keep(total, if op == Reduction::SumSquares { v * v } else { v });
        at += 1;
    }
    finish(op, total, n)
}

simd_dispatch! {
    /// [`position`] in a contiguous line of a floating type.
    unsafe fn place(max: bool, dtype: DType, x: *const u8, n: usize, at: &mut usize) = place_body
}

#[inline(always)]
unsafe fn place_body<S: Simd>(s: S, max: bool, dtype: DType, x: *const u8, n: usize, at: &mut usize) {
    // SAFETY: the caller's promise.
    *at = unsafe { with_element!(dtype, e => place_of(s, e, max, x, n), else 0) };
}

/// The value first, then the first place that has it.
#[inline(always)]
unsafe fn place_of<S: Simd, E: Element>(s: S, e: E, max: bool, x: *const u8, n: usize) -> usize {
    // SAFETY: a line of `n` elements, of which there is one at least, by the caller's promise.
    unsafe {
        let top = line_of(s, e, if max { Reduction::Max } else { Reduction::Min }, x, n) as f32;
        let (tops, mut at) = (s.splat(top), 0);
        while at + S::LANES <= n {
            let v = e.load(s, x, at);
            if s.any(s.eq(v, tops)) || top.is_nan() && s.any(s.ne(v, v)) {
                break;
            }
            at += S::LANES;
        }
        let is_it = |v: f32| v == top || v.is_nan();
        while at + 1 < n && !is_it(e.get(x, at as isize)) {
            at += 1;
        }
        at
    }
}

simd_dispatch! {
    /// `width` columns side by side, rows `stride` elements apart.
    unsafe fn strip(
        op: Reduction, dtype: DType, x: *const u8, n: usize, stride: isize, width: usize, out: &mut [f64; STRIP],
    ) = strip_body
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn strip_body<S: Simd>(
    s: S,
    op: Reduction,
    dtype: DType,
    x: *const u8,
    n: usize,
    stride: isize,
    width: usize,
    out: &mut [f64; STRIP],
) {
    // SAFETY: the caller's promise.
    unsafe { with_element!(dtype, e => strip_of(s, e, op, x, n, stride, width, out), else ()) }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn strip_of<S: Simd, E: Element>(
    s: S,
    e: E,
    op: Reduction,
    x: *const u8,
    n: usize,
    stride: isize,
    width: usize,
    out: &mut [f64; STRIP],
) {
    let l = S::LANES;
    out.fill(identity(op));
    let combine = if op == Reduction::SumSquares { Reduction::Sum } else { op };
    let start = s.splat(identity(op) as f32);
    let mut row = 0;
    while row < n {
        let end = n.min(row + 64);
        let mut i = 0;
        while i < width {
            let k = (4 * l).min(width - i);
            let mut acc = [start; 4];
            let mut lanes = [0f32; 64];
            // SAFETY: rows below `n`, columns below `width`, by the caller's promise; LANES <= 16.
            unsafe {
                for r in row..end {
                    let p = x.offset(r as isize * stride * E::SIZE as isize);
                    if k == 4 * l {
                        acc[0] = vector_step(s, op, acc[0], e.load(s, p, i));
                        acc[1] = vector_step(s, op, acc[1], e.load(s, p, i + l));
                        acc[2] = vector_step(s, op, acc[2], e.load(s, p, i + 2 * l));
                        acc[3] = vector_step(s, op, acc[3], e.load(s, p, i + 3 * l));
                        continue;
                    }
                    let mut j = 0;
                    while j * l < k {
                        let (at, left) = (i + j * l, k - j * l);
                        let v = if left >= l { e.load(s, p, at) } else { e.load_n(s, p, at, left) };
                        acc[j] = vector_step(s, op, acc[j], v);
                        j += 1;
                    }
                }
                let mut j = 0;
                while j < 4 {
                    s.store(lanes.as_mut_ptr().add(j * l), acc[j]);
                    j += 1;
                }
            }
            for j in 0..k {
                let total = out[i + j];
                out[i + j] = if total.is_nan() { total } else { step(combine, total, lanes[j] as f64) };
            }
            i += 4 * l;
        }
        row = end;
    }
    for total in &mut out[..width] {
        *total = finish(op, *total, n);
    }
}

/// The meaning of [`reduce`]: one element at a time in f64 (integers in i64).
///
/// # Safety
/// As for [`reduce`].
pub unsafe fn reduce_reference(op: Reduction, r: &Reduce) {
    let [outer, n, inner] = r.sizes;
    let size = r.src_dtype.size_bytes() as isize;
    for o in 0..outer as isize {
        for i in 0..inner as isize {
            let p = r.src.wrapping_offset((o * r.src_strides[0] + i * r.src_strides[2]) * size);
            let at = (o * r.dst_strides[0] + i * r.dst_strides[1]) * r.dst_dtype.size_bytes() as isize;
            let (q, stride) = (r.dst.wrapping_offset(at), r.src_strides[1] * size);
            // SAFETY: elements of the operand and the result.
            unsafe {
                match (op, r.src_dtype) {
                    (Reduction::ArgMax | Reduction::ArgMin, _) => {
                        store_position(r.dst_dtype, q, position(op == Reduction::ArgMax, r.src_dtype, p, n, stride));
                    }
                    (_, DType::F32 | DType::F16 | DType::BF16 | DType::F64) => {
                        store_result(r.dst_dtype, q, scalar_real(op, r.src_dtype, p, n, stride));
                    }
                    _ => store_integer(op, r.dst_dtype, q, r.src_dtype, p, n, stride),
                }
            }
        }
    }
}
