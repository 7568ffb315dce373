//! The plain epilogue: bias, residual, store.
//!
//! `out = convert(acc + bias + residual)`, all in f32, rounded once to the nearest even value of the output type. What
//! needs more than that runs as a tile program.

use super::simd::{Element, Simd};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::{simd_dispatch, with_element};

/// Stores results as a row-major matrix; see the module documentation.
#[derive(Clone, Copy, Debug)]
pub struct StoreEpilogue {
    out: *mut u8,
    dtype: DType,
    row_stride: isize,
    bias: Option<(*const u8, DType)>,
    residual: Option<(*const u8, DType, isize)>,
    isa: Isa,
}

// SAFETY: blocks are disjoint, so threads write disjoint elements; bias and residual are only read.
unsafe impl Sync for StoreEpilogue {}

impl StoreEpilogue {
    /// Stores f32, f16 or bf16 at `out`; rows are `row_stride` elements apart, columns contiguous.
    pub fn new(out: *mut u8, dtype: DType, row_stride: isize) -> StoreEpilogue {
        StoreEpilogue { out, dtype, row_stride, bias: None, residual: None, isa: Isa::detect() }
    }

    /// Adds element `c` of a contiguous vector to column `c`.
    pub fn with_bias(self, bias: *const u8, dtype: DType) -> StoreEpilogue {
        StoreEpilogue { bias: Some((bias, dtype)), ..self }
    }

    /// Adds a matrix of the result's shape; it may be the output itself.
    pub fn with_residual(self, residual: *const u8, dtype: DType, row_stride: isize) -> StoreEpilogue {
        StoreEpilogue { residual: Some((residual, dtype, row_stride)), ..self }
    }
}

impl Epilogue for StoreEpilogue {
    unsafe fn apply(&self, acc: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        // SAFETY: the caller vouches for the block, whoever made the epilogue for its operands.
        unsafe { store_rows(self.isa, self, acc, ld, (row0, col0), (rows, cols)) }
    }
}

simd_dispatch! {
    /// Stores `rows x cols` results, `ld` apart, at a row and column of the output.
    ///
    /// # Safety
    /// The block must lie inside `acc`, the output and the operands.
    unsafe fn store_rows(
        to: &StoreEpilogue,
        acc: *const f32,
        ld: usize,
        at: (usize, usize),
        size: (usize, usize),
    ) = store_rows_body
}

#[inline(always)]
unsafe fn store_rows_body<S: Simd>(
    s: S,
    to: &StoreEpilogue,
    acc: *const f32,
    ld: usize,
    (row0, col0): (usize, usize),
    (rows, cols): (usize, usize),
) {
    let bias = to.bias.map(|(ptr, dtype)| Addend { ptr: ptr.wrapping_add(col0 * dtype.size_bytes()), dtype });
    for row in 0..rows {
        let offset = |row_stride: isize, dtype: DType| {
            ((row0 + row) as isize * row_stride + col0 as isize) * dtype.size_bytes() as isize
        };
        let residual = to
            .residual
            .map(|(ptr, dtype, stride)| Addend { ptr: ptr.wrapping_byte_offset(offset(stride, dtype)), dtype });
        let out = to.out.wrapping_byte_offset(offset(to.row_stride, to.dtype));
        // SAFETY: the row lies inside the block, the output and the operands.
        unsafe {
            let acc = acc.add(row * ld);
            with_element!(to.dtype, e => store_row(s, e, acc, cols, [bias, residual], out), else ())
        }
    }
}

/// # Safety
/// Every operand must hold `cols` elements.
#[inline(always)]
unsafe fn store_row<S: Simd, E: Element>(
    s: S,
    e: E,
    acc: *const f32,
    cols: usize,
    addends: [Option<Addend>; 2],
    out: *mut u8,
) {
    let whole = cols / S::LANES * S::LANES;
    // SAFETY: whole vectors lie inside the `cols` elements; of the last one only the lanes that exist are touched.
    unsafe {
        let mut col = 0;
        while col < whole {
            let mut sum = s.load(acc.add(col));
            for addend in addends.iter().flatten() {
                sum = s.add(sum, addend.load(s, col));
            }
            e.store(s, out, col, sum);
            col += S::LANES;
        }
        if whole < cols {
            let lanes = cols - whole;
            let mut sum = s.load_n(acc.add(whole), lanes);
            for addend in addends.iter().flatten() {
                sum = s.add(sum, addend.load_n(s, whole, lanes));
            }
            e.store_n(s, out, whole, sum, lanes);
        }
    }
}

/// A row that is added.
#[derive(Clone, Copy)]
struct Addend {
    ptr: *const u8,
    dtype: DType,
}

impl Addend {
    /// # Safety
    /// The row must hold a vector of elements at `col`.
    #[inline(always)]
    unsafe fn load<S: Simd>(&self, s: S, col: usize) -> S::F {
        // SAFETY: forwarded.
        unsafe { with_element!(self.dtype, e => e.load(s, self.ptr, col), else s.splat(0.0)) }
    }

    /// # Safety
    /// The row must hold `lanes` elements at `col`.
    #[inline(always)]
    unsafe fn load_n<S: Simd>(&self, s: S, col: usize, lanes: usize) -> S::F {
        // SAFETY: forwarded.
        unsafe { with_element!(self.dtype, e => e.load_n(s, self.ptr, col, lanes), else s.splat(0.0)) }
    }
}

/// # Safety
/// `ptr` must hold more than `index` elements.
pub(super) unsafe fn load(ptr: *const u8, dtype: DType, index: usize) -> f32 {
    // SAFETY: forwarded.
    unsafe { with_element!(dtype, e => e.get(ptr, index as isize), else 0.0) }
}
