//! Products of few rows with a weight that is read where it lies: `C' = B A'`.
//!
//! [`gemm`](super::gemm) packs the weight, `n x k` numbers, for every product; that takes as long as twenty to fifty rows
//! of A. Here the operands change places: rows of the weight are what the micro-kernel reads row by row, and A, `m x k`
//! numbers, is packed. Results come out as columns and are turned in blocks on their way to the epilogue.
//!
//! ```text
//!   weight rows (in place)      A packed             block [n][m]      strip [m][n]
//!   [n][k]                 x   [panel][k][m]    ->    L2          ->    L1           -> epilogue
//! ```

use super::KernelError;
use super::gemm::{Operand, gemm_with, is_readable};
use super::gemm_driver::{packs_while_used, row_blocks};
use super::gemm_kernel::{Kernel, panel_width, select, transpose_units};
use super::pack::{Matrix, pack_b, packed_bytes};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;

/// Bytes of memory that [`gemm_swapped`] works in, for `m` rows of `k` elements.
pub fn swapped_bytes(m: usize, k: usize, dtype: DType, isa: Isa) -> usize {
    packed_bytes(m, k, dtype, isa)
}

/// Whether [`gemm_swapped`] should take less time than [`gemm`](super::gemm::gemm), the weight being packed for this product
/// alone. It does not where rows fill too little of a panel, or are so many that packing the weight is a small part of all, nor
/// where a weight has to be widened, which its packed form makes quick (f16: 0.4 to 0.9 of the speed).
pub fn is_swapped_faster(isa: Isa, (m, n, k): (usize, usize, usize), a: DType, weight: &Matrix) -> bool {
    let isa = isa.clamp();
    let kernel = select(isa, weight.dtype, a, (m.min(n), k));
    let widened = [weight.dtype, a].into_iter().any(|dtype| !kernel.form.takes(dtype));
    if widened || 8 * m < 3 * panel_width(isa) || n == 0 || k == 0 || weight.col_stride != 1 {
        return false;
    }
    let share = |rows: f64| rows / m as f64;
    // Rows of bf16 are copied and packed in half the time of f32 ones, and multiplied in less than that by AMX.
    let moved = kernel.rate() / kernel.form.elements_per_unit() as f64;
    let before = if packs_while_used(isa, m) { WHILE_USED * row_blocks(isa, m) as f64 } else { BEFORE };
    let packed = share(moved * before);
    // The last panel is half as wide, and takes more than half the time, or is filled up.
    let width = panel_width(isa);
    let last = match m % width {
        0 => 0.0,
        rest if rest <= width / 2 => HALF_PANEL * width as f64 - rest as f64,
        rest => (width - rest) as f64,
    };
    let copied = if is_readable(weight, kernel, k) { 0.0 } else { share(moved * COPIED) };
    // Results are turned as f32, however fast the products are.
    let turning = (FIXED + PER_COLUMN / n as f64) * kernel.rate();
    share(last) + turning + moved * PER_TERM / k as f64 + copied < packed
}

/// Rows whose products take as long as packing a weight while a block of rows uses it, and before.
const WHILE_USED: f64 = 20.0;
const BEFORE: f64 = 50.0;
/// The same of copying its rows.
const COPIED: f64 = 10.0;
/// Time of a panel of half the width over that of a whole one.
const HALF_PANEL: f64 = 0.8;
/// What turning results and packing A take, as shares of the products: of all, for a column, for a term.
const FIXED: f64 = 0.015;
const PER_COLUMN: f64 = 45.0;
const PER_TERM: f64 = 20.0;

/// [`gemm`](super::gemm::gemm) with a weight as it lies, in `work` of [`swapped_bytes`].
///
/// # Errors
/// As there.
///
/// # Safety
/// As there; `work` must be writable and nobody else's meanwhile.
pub unsafe fn gemm_swapped(
    pool: &Pool,
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    a: &Matrix,
    weight: &Matrix,
    work: *mut u8,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    let kernel = select(isa.clamp(), weight.dtype, a.dtype, (m.min(n), k));
    // SAFETY: forwarded.
    unsafe { gemm_swapped_with(kernel, pool, (m, n, k), a, weight, work, epilogue) }
}

/// [`gemm_swapped`] with a given micro-kernel, which must be available and fit the element types.
///
/// # Errors
/// As there.
///
/// # Safety
/// As there.
pub(super) unsafe fn gemm_swapped_with(
    kernel: &'static Kernel,
    pool: &Pool,
    (m, n, k): (usize, usize, usize),
    a: &Matrix,
    weight: &Matrix,
    work: *mut u8,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    super::gemm::check_dtypes([a.dtype, weight.dtype])?;
    let turned = Turned { inner: epilogue, isa: kernel.isa };
    // SAFETY: the caller vouches for operands and memory; `turned` hands on what it gets.
    unsafe {
        let packed = pack_b(pool, kernel.isa, m, k, a, work);
        gemm_with(kernel, pool, &[], (n, m, k), weight, &Operand::Packed(packed), &turned)
    }
}

/// Columns of a block that are turned at a time: rows of the strip.
const STRIP_ROWS: usize = 32;
/// Elements between rows of the strip, an odd number of cache lines: all rows of a block of the engine.
const STRIP_STRIDE: usize = 272;

/// Hands blocks on with rows and columns exchanged.
struct Turned<'a> {
    inner: &'a dyn Epilogue,
    isa: Isa,
}

impl Epilogue for Turned<'_> {
    unsafe fn apply(&self, acc: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        #[repr(align(64))]
        struct Strip(std::mem::MaybeUninit<[f32; STRIP_ROWS * STRIP_STRIDE]>);
        let mut strip = Strip(std::mem::MaybeUninit::uninit());
        let strip: *mut f32 = strip.0.as_mut_ptr().cast();
        for first in (0..rows).step_by(STRIP_STRIDE) {
            let rows = STRIP_STRIDE.min(rows - first);
            for col in (0..cols).step_by(STRIP_ROWS) {
                let count = STRIP_ROWS.min(cols - col);
                // SAFETY: a part of the block; the strip has room for `count` rows of `rows` elements.
                unsafe {
                    let from = acc.add(first * ld + col);
                    turn(self.isa, from, ld, (rows, count), strip);
                    self.inner.apply(strip, STRIP_STRIDE, col0 + col, row0 + first, count, rows);
                }
            }
        }
    }
}

/// `strip[col][row] = from[row][col]`.
///
/// # Safety
/// `from` must hold the rows, `ld` elements apart; `strip` `cols` rows of [`STRIP_STRIDE`].
unsafe fn turn(isa: Isa, from: *const f32, ld: usize, (rows, cols): (usize, usize), strip: *mut f32) {
    let lanes = panel_width(isa) / 2;
    for row in (0..rows).step_by(lanes) {
        let valid = lanes.min(rows - row);
        // SAFETY: `valid` rows of `cols` elements; a stride is a multiple of the lanes.
        unsafe {
            let from = from.add(row * ld);
            let matrix = Matrix::row_major(from.cast(), DType::F32, ld);
            let done = transpose_units(isa, &matrix, valid, cols, lanes, strip.add(row).cast(), STRIP_STRIDE);
            for col in done..cols {
                for lane in 0..valid {
                    *strip.add(col * STRIP_STRIDE + row + lane) = *from.add(lane * ld + col);
                }
            }
        }
    }
}
