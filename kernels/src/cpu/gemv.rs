//! Products with a few rows and a weight that is not packed: one pass over the weight as it lies in memory.
//!
//! ```text
//! task = block of columns
//!   A rows -> f32 scratch (once per task)
//!   for each 4 weight rows:  rows x 4 accumulators of 16 lanes; every 16 weight elements are loaded and widened once
//!   epilogue(rows x block)
//! ```
//!
//! The bound is memory: each weight element is read once and used `rows` times. Chains are `k / 16` terms long, and the
//! sixteen lanes are added pairwise.

use super::KernelError;
use super::gemm_kernel::{CopyRow, Form, copy_row};
use super::pack::Matrix;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;

/// More rows than this are faster through packed panels.
const MAX_ROWS: usize = 4;
/// Columns of a task.
const BLOCK: usize = 64;

/// Whether this path computes the product, and faster than the blocked engine.
pub(crate) fn suits(isa: Isa, m: usize, a: &Matrix, b: &Matrix) -> bool {
    cfg!(target_arch = "x86_64") && isa == Isa::Avx512 && m <= MAX_ROWS && a.col_stride == 1 && b.col_stride == 1
}

/// Computes `A * B^T` for [`suits`].
///
/// # Safety
/// As [`gemm`](super::gemm::gemm).
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn gemv(
    pool: &Pool,
    (m, n, k): (usize, usize, usize),
    a: &Matrix,
    b: &Matrix,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    let copy: CopyRow = copy_row(Isa::Avx512, a.dtype, Form::F32);
    let ld = k.next_multiple_of(16);
    let c_offset = m * ld * 4;
    pool.run_scratch(n.div_ceil(BLOCK), c_offset + MAX_ROWS * BLOCK * 4, |task, worker| {
        let (col0, rows) = (task * BLOCK, worker.scratch.cast::<f32>());
        let cols = BLOCK.min(n - col0);
        // SAFETY: scratch holds the rows and the block; columns lie inside B.
        unsafe {
            for row in 0..m {
                copy(a.at(row, 0), rows.add(row * ld).cast(), k);
            }
            let c: *mut f32 = worker.scratch.add(c_offset).cast();
            for col in (0..cols).step_by(4) {
                let group: [*const u8; 4] = std::array::from_fn(|i| b.at(col0 + (col + i).min(cols - 1), 0));
                let sums = match m {
                    1 => avx512::dot::<1>(b.dtype, rows, ld, group, k),
                    2 => avx512::dot::<2>(b.dtype, rows, ld, group, k),
                    3 => avx512::dot::<3>(b.dtype, rows, ld, group, k),
                    _ => avx512::dot::<4>(b.dtype, rows, ld, group, k),
                };
                for (row, sums) in sums.iter().enumerate().take(m) {
                    c.add(row * BLOCK + col).copy_from_nonoverlapping(sums.as_ptr(), 4.min(cols - col));
                }
            }
            epilogue.apply(c, BLOCK, 0, col0, m, cols);
        }
    })?;
    Ok(())
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::MAX_ROWS;
    use crate::dtype::DType;
    use std::arch::x86_64::*;

    /// `[row][column]` sums of `M` rows, `ld` apart, with four columns of `k` elements.
    ///
    /// # Safety
    /// Rows and columns must hold `k` elements; AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn dot<const M: usize>(
        dtype: DType,
        rows: *const f32,
        ld: usize,
        columns: [*const u8; 4],
        k: usize,
    ) -> [[f32; 4]; MAX_ROWS] {
        // SAFETY: forwarded.
        unsafe {
            match dtype {
                DType::F16 => dot_of::<M>(rows, ld, columns, k, |ptr, at, lanes| {
                    _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, ptr.cast::<i16>().add(at)))
                }),
                DType::BF16 => dot_of::<M>(rows, ld, columns, k, |ptr, at, lanes| {
                    let halves = _mm256_maskz_loadu_epi16(lanes, ptr.cast::<i16>().add(at));
                    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
                }),
                _ => dot_of::<M>(rows, ld, columns, k, |ptr, at, lanes| {
                    _mm512_maskz_loadu_ps(lanes, ptr.cast::<f32>().add(at))
                }),
            }
        }
    }

    /// # Safety
    /// As [`dot`]; `load(column, at, lanes)` loads elements `at..` of a column where `lanes` says.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    unsafe fn dot_of<const M: usize>(
        rows: *const f32,
        ld: usize,
        columns: [*const u8; 4],
        k: usize,
        load: impl Fn(*const u8, usize, u16) -> __m512,
    ) -> [[f32; 4]; MAX_ROWS] {
        let mut sums = [[_mm512_setzero_ps(); 4]; M];
        for at in (0..k).step_by(16) {
            let lanes = ((1u32 << (k - at).min(16)) - 1) as u16;
            let weights: [__m512; 4] = std::array::from_fn(|column| load(columns[column], at, lanes));
            for (row, sums) in sums.iter_mut().enumerate() {
                // SAFETY: masked lanes are not read.
                let x = unsafe { _mm512_maskz_loadu_ps(lanes, rows.add(row * ld + at)) };
                for (sum, weight) in sums.iter_mut().zip(weights) {
                    *sum = _mm512_fmadd_ps(x, weight, *sum);
                }
            }
        }
        let mut results = [[0.0; 4]; MAX_ROWS];
        for (result, sums) in results.iter_mut().zip(sums) {
            *result = sums.map(|sum| _mm512_reduce_add_ps(sum));
        }
        results
    }
}
