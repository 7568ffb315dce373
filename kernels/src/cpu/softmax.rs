//! Softmax over rows of contiguous elements.
//!
//! Three passes over a row: maximum, exponentials into f32 scratch with their sum, scaling into the result. A row in L1
//! or L2 costs one read and one write of memory. A row of all -infinity, or with NaN or +infinity, gives NaN as in
//! PyTorch.

use super::KernelError;
use super::copy::Shared;
use super::math;
use super::simd::{Element, Simd};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::{simd_dispatch, with_element};

/// A matrix of contiguous rows.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// First element.
    pub ptr: *mut u8,
    /// Element type: F32, F16 or BF16.
    pub dtype: DType,
    /// Elements between rows.
    pub row_stride: isize,
}

/// `dst[r] = softmax(src[r])` for every row.
///
/// # Errors
/// If a type is not floating or scratch memory runs out.
///
/// # Safety
/// Both matrices must be valid for `rows x cols`; they may be the same.
pub unsafe fn softmax(
    pool: &Pool,
    isa: Isa,
    src: Matrix,
    dst: Matrix,
    rows: usize,
    cols: usize,
) -> Result<(), KernelError> {
    for m in [&src, &dst] {
        if !matches!(m.dtype, DType::F32 | DType::F16 | DType::BF16) {
            return Err(KernelError::UnsupportedDType(m.dtype));
        }
    }
    if rows * cols == 0 {
        return Ok(());
    }
    let tasks = ((rows * cols) >> 13).clamp(1, pool.threads() * 4).min(rows);
    let (a, b) = (Shared(src.ptr), Shared(dst.ptr));
    let (from, to) = (src.dtype, dst.dtype);
    let (sa, sb) = (src.row_stride * from.size_bytes() as isize, dst.row_stride * to.size_bytes() as isize);
    pool.run_scratch(tasks, cols * 4, |task, worker| {
        for r in rows * task / tasks..rows * (task + 1) / tasks {
            let r = r as isize;
            // SAFETY: row `r` of both matrices; scratch of `cols` f32.
            unsafe { softmax_row(isa, from, a.at(r * sa), to, b.at(r * sb), cols, worker.scratch.cast()) };
        }
    })?;
    Ok(())
}

simd_dispatch! {
    unsafe fn softmax_row(
        from: DType, x: *const u8, to: DType, y: *mut u8, n: usize, scratch: *mut f32,
    ) = softmax_row_body
}

#[inline(always)]
unsafe fn softmax_row_body<S: Simd>(
    s: S,
    from: DType,
    x: *const u8,
    to: DType,
    y: *mut u8,
    n: usize,
    scratch: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let sum = with_element!(from, e => exponentials(s, e, x, n, scratch), else f32::NAN);
        with_element!(to, e => scale_row(s, e, scratch, n, sum, y), else ());
    }
}

/// Writes `exp(x - max)` and returns the sum.
#[inline(always)]
unsafe fn exponentials<S: Simd, E: Element>(s: S, e: E, x: *const u8, n: usize, out: *mut f32) -> f32 {
    let l = S::LANES;
    // SAFETY: positions below `n`, by the caller's promise.
    unsafe {
        let mut max = s.splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i + l <= n {
            max = s.max_raw(e.load(s, x, i), max);
            i += l;
        }
        let mut top = s.reduce_max(max);
        while i < n {
            top = top.max(e.get(x, i as isize));
            i += 1;
        }
        let m = s.splat(top);
        let (mut a, mut b) = (s.splat(0.0), s.splat(0.0));
        i = 0;
        while i + 2 * l <= n {
            let p = math::exp(s, s.sub(e.load(s, x, i), m));
            let q = math::exp(s, s.sub(e.load(s, x, i + l), m));
            s.store(out.add(i), p);
            s.store(out.add(i + l), q);
            (a, b) = (s.add(a, p), s.add(b, q));
            i += 2 * l;
        }
        let mut tail = 0.0;
        while i < n {
            let k = l.min(n - i);
            s.store_n(out.add(i), math::exp(s, s.sub(e.load_n(s, x, i, k), m)), k);
            for j in 0..k {
                tail += *out.add(i + j);
            }
            i += k;
        }
        s.reduce_add(s.add(a, b)) + tail
    }
}

#[inline(always)]
unsafe fn scale_row<S: Simd, E: Element>(s: S, e: E, x: *const f32, n: usize, sum: f32, y: *mut u8) {
    let l = S::LANES;
    let d = s.splat(1.0 / sum);
    let mut i = 0;
    // SAFETY: positions below `n`, by the caller's promise.
    unsafe {
        while i + l <= n {
            e.store(s, y, i, s.mul(s.load(x.add(i)), d));
            i += l;
        }
        if i < n {
            e.store_n(s, y, i, s.mul(s.load_n(x.add(i), n - i), d), n - i);
        }
    }
}
