//! Products of quantized matrices: bytes times bytes, exact 32-bit sums, results handed on as f32.
//!
//! `C[m][n] = (sum over k of A[m][k] * B[n][k] - zero[m] * total[n]) * a_scale[m] * b_scale[n]`, A unsigned with a zero
//! point per row, B signed and symmetric, `total[n]` the sum of row `n` of B. That is what a linear layer needs whose
//! weight is quantized per output channel and whose activations are per row.
//!
//! B is packed like any other operand ([`pack`](super::pack)), four bytes of k to a unit, and the blocked engine runs as
//! for floats, with integers in the place of f32: `VPDPBUSD` multiplies four pairs a lane. It does not saturate. Sums fit
//! 32 bits for `k` up to 65,000.
//!
//! The bound is arithmetic at four times the f32 rate.

use super::KernelError;
use super::gemm::{Operand, gemm_with};
use super::gemm_kernel::{Form, Kernel, of_form};
use super::pack::{Matrix, PackedB};
use super::simd::Simd;
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::simd_dispatch;

/// Longest reduction whose sums fit 32 bits: `255 * 128 * k < 2^31`.
pub const MAX_TERMS: usize = 65_000;

/// What turns integer sums into real numbers; each array has one value per row or column of the product.
#[derive(Clone, Copy, Debug)]
pub struct Scales {
    /// Factor of every row of A.
    pub a: *const f32,
    /// The byte that means 0 in every row of A.
    pub a_zero: *const i32,
    /// Factor of every row of B.
    pub b: *const f32,
    /// Sum of every row of B.
    pub b_total: *const i32,
}

// SAFETY: a description of memory; whoever reads through it vouches for the access.
unsafe impl Sync for Scales {}

/// Computes the product of `a` (`[m, k]`, rows `a_stride` bytes apart) and a packed `[n, k]` operand.
///
/// # Errors
/// [`KernelError`] if `k` exceeds [`MAX_TERMS`], if `b` was packed for other sizes, or when scratch memory runs out.
///
/// # Safety
/// `a` must be readable for `m x k` bytes, `scales` for `m` and `n` values, and `epilogue` must accept `m x n` results.
pub unsafe fn gemm_int8(
    pool: &Pool,
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    (a, a_stride): (*const u8, usize),
    b: PackedB,
    scales: Scales,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    // SAFETY: forwarded.
    unsafe { gemm_int8_with(of_form(isa, Form::Int8Quads), pool, isa, (m, n, k), (a, a_stride), b, scales, epilogue) }
}

/// [`gemm_int8`] with a given micro-kernel, which must be available.
///
/// # Safety
/// As [`gemm_int8`].
pub(crate) unsafe fn gemm_int8_with(
    kernel: &'static Kernel,
    pool: &Pool,
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    (a, a_stride): (*const u8, usize),
    b: PackedB,
    scales: Scales,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    if k > MAX_TERMS {
        return Err(KernelError::Shape("more terms than a 32-bit sum of byte products holds"));
    }
    let a = Matrix { ptr: a, dtype: DType::U8, row_stride: a_stride as isize, col_stride: 1 };
    let scaled = Scaled { isa, scales, inner: epilogue };
    // SAFETY: forwarded; blocks hold integers, which `Scaled` replaces before anybody else sees them.
    unsafe { gemm_with(kernel, pool, &[], (m, n, k), &a, &Operand::Packed(b), &scaled) }
}

/// The instruction set whose panel width [`pack_b`](super::pack::pack_b) must be given for an operand of [`gemm_int8`].
pub fn packing_isa(isa: Isa) -> Isa {
    of_form(isa, Form::Int8Quads).isa
}

/// Replaces integer sums by real numbers and hands them on.
struct Scaled<'a> {
    isa: Isa,
    scales: Scales,
    inner: &'a dyn Epilogue,
}

impl Epilogue for Scaled<'_> {
    unsafe fn apply(&self, acc: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        let Scales { a, a_zero, b, b_total } = self.scales;
        // SAFETY: a block inside the product, and the values of its rows and columns.
        unsafe {
            for row in 0..rows {
                let (scale, zero) = (*a.add(row0 + row), *a_zero.add(row0 + row));
                scale_row(self.isa, acc.add(row * ld), cols, scale, zero, b.add(col0), b_total.add(col0));
            }
            self.inner.apply(acc, ld, row0, col0, rows, cols);
        }
    }
}

simd_dispatch! {
    /// Turns `cols` integer sums into real numbers, in place.
    unsafe fn scale_row(
        sums: *mut f32, cols: usize, scale: f32, zero: i32, factors: *const f32, totals: *const i32,
    ) = scale_row_body
}

#[inline(always)]
unsafe fn scale_row_body<S: Simd>(
    _s: S,
    sums: *mut f32,
    cols: usize,
    scale: f32,
    zero: i32,
    factors: *const f32,
    totals: *const i32,
) {
    for col in 0..cols {
        // SAFETY: `col < cols`, and every array has that many values.
        unsafe {
            let exact = sums.cast::<i32>().add(col).read().wrapping_sub(zero.wrapping_mul(*totals.add(col)));
            sums.add(col).write(exact as f32 * (scale * *factors.add(col)));
        }
    }
}
