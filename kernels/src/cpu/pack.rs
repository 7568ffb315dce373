//! Packing the second operand of a contraction into panels.
//!
//! B is `[n, k]`. A *panel* holds `width` consecutive n (the columns of one register tile) for all k, k-major, so that
//! the micro-kernel reads it front to back. The unit is four bytes: one f32, or two 16-bit elements that follow each
//! other in k:
//!
//! ```text
//! f32:     unit[k][lane]             = B[n0 + lane][k]
//! 16-bit:  unit[k / 2][lane]         = (B[n0 + lane][k], B[n0 + lane][k + 1])      low half first
//! bytes:   unit[k / 4][lane]         = (B[n0 + lane][k], ..., B[n0 + lane][k + 3])
//! ```
//!
//! Pairs are what `VDPBF16PS` and AMX multiply, and they widen to two rows of f32 with a shift and a mask. 16-bit weights stay
//! 16-bit, so a product that waits for memory waits half as long. Padding lanes and a padding k are zero. If at most
//! `width / 2` columns remain, the last panel is half as wide.
//!
//! For one product, whose rows are known, panels may be packed [in parts](pack_b_for): as its kernel multiplies them where that
//! takes numbers apart ([`gemm_split`](super::gemm_split)), once and not for each block of rows. They take half as much memory
//! again (f32), or twice as much (f16).

use super::gemm_kernel::{Form, panel_width, select, split_panel, transpose_units};
use super::gemm_split;
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;

/// A matrix in memory, with strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Matrix {
    /// Element (0, 0).
    pub ptr: *const u8,
    /// Element type.
    pub dtype: DType,
    /// Elements from one row to the next.
    pub row_stride: isize,
    /// Elements from one column to the next.
    pub col_stride: isize,
}

// SAFETY: a description of memory; whoever reads through it vouches for the access.
unsafe impl Send for Matrix {}
// SAFETY: as above.
unsafe impl Sync for Matrix {}

impl Matrix {
    /// A matrix with contiguous rows of `cols` elements.
    pub fn row_major(ptr: *const u8, dtype: DType, cols: usize) -> Matrix {
        Matrix { ptr, dtype, row_stride: cols as isize, col_stride: 1 }
    }

    /// The matrix with rows and columns exchanged.
    pub fn transposed(self) -> Matrix {
        Matrix { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    /// Address of an element.
    pub(crate) fn at(&self, row: usize, col: usize) -> *const u8 {
        let index = row as isize * self.row_stride + col as isize * self.col_stride;
        self.ptr.wrapping_byte_offset(index * self.dtype.size_bytes() as isize)
    }
}

/// A packed `[n, k]` operand; see the module documentation. Borrows its memory from the caller.
#[derive(Clone, Copy, Debug)]
pub struct PackedB {
    /// First panel, 64-byte aligned for full speed.
    pub ptr: *const u8,
    /// Output columns.
    pub n: usize,
    /// Reduction length.
    pub k: usize,
    /// Element type.
    pub dtype: DType,
    /// Columns of a panel.
    pub width: usize,
    /// Parts that elements are in, 0 for whole ones.
    pub(crate) parts: usize,
}

// SAFETY: read-only memory that the caller keeps alive.
unsafe impl Send for PackedB {}
// SAFETY: as above.
unsafe impl Sync for PackedB {}

impl PackedB {
    /// Describes memory that [`pack_b`] filled earlier with the same arguments.
    pub fn from_raw(ptr: *const u8, n: usize, k: usize, dtype: DType, isa: Isa) -> PackedB {
        PackedB { ptr, n, k, dtype, width: panel_width(isa), parts: 0 }
    }
}

/// Bytes that [`pack_b`] writes.
pub fn packed_bytes(n: usize, k: usize, dtype: DType, isa: Isa) -> usize {
    bytes_in(0, n, k, dtype, isa)
}

/// Bytes of all panels, in so many parts, 0 for whole ones.
pub(crate) fn bytes_in(parts: usize, n: usize, k: usize, dtype: DType, isa: Isa) -> usize {
    n.next_multiple_of(panel_width(isa) / 2) * units_in(parts, k, dtype) * 4
}

/// Four-byte units along `k`.
pub(crate) fn units(k: usize, dtype: DType) -> usize {
    k.div_ceil(elements_per_unit(dtype))
}

/// Elements of k in one unit.
pub(crate) fn elements_per_unit(dtype: DType) -> usize {
    4 / dtype.size_bytes().clamp(1, 4)
}

/// Width of the panel that starts at column `n0`.
pub(crate) fn width_at(n: usize, n0: usize, width: usize) -> usize {
    if n - n0 <= width / 2 { width / 2 } else { width }
}

/// Units of `k` elements in so many parts, 0 for whole ones.
pub(crate) fn units_in(parts: usize, k: usize, dtype: DType) -> usize {
    if parts > 0 { gemm_split::units(parts, k) } else { units(k, dtype) }
}

/// Packs `b` (`[n, k]`, f32, f16 or bf16) into `dst` and describes the result.
///
/// # Safety
/// `b` must be readable for `n x k` elements and `dst` writable for [`packed_bytes`] bytes.
pub unsafe fn pack_b(pool: &Pool, isa: Isa, n: usize, k: usize, b: &Matrix, dst: *mut u8) -> PackedB {
    // SAFETY: forwarded.
    unsafe { pack_in(pool, isa.clamp(), None, (n, k), b, dst) }
}

/// Bytes that [`pack_b_for`] writes.
pub fn packed_bytes_for(isa: Isa, (m, n, k): (usize, usize, usize), a: DType, b: DType) -> usize {
    bytes_in(select(isa, a, b, (m, k)).form.parts(), n, k, b, isa)
}

/// Packs `b` for products with `m` rows of `a`'s type alone.
///
/// # Safety
/// As [`pack_b`]; `dst` must be writable for [`packed_bytes_for`].
pub unsafe fn pack_b_for(
    pool: &Pool,
    isa: Isa,
    (m, n, k): (usize, usize, usize),
    a: DType,
    b: &Matrix,
    dst: *mut u8,
) -> PackedB {
    let form = select(isa, a, b.dtype, (m, k)).form;
    // SAFETY: forwarded.
    unsafe { pack_in(pool, isa.clamp(), Some(form), (n, k), b, dst) }
}

/// Packs `b` as that form takes numbers apart, or whole.
///
/// # Safety
/// As [`pack_b_for`], for kernels of the form.
pub(super) unsafe fn pack_in(
    pool: &Pool,
    isa: Isa,
    form: Option<Form>,
    (n, k): (usize, usize),
    b: &Matrix,
    dst: *mut u8,
) -> PackedB {
    let form = form.filter(|form| form.parts() > 0);
    let (width, parts) = (panel_width(isa), form.map_or(0, Form::parts));
    let panel_bytes = units_in(parts, k, b.dtype) * width * 4;
    let target = SendMut(dst);
    pool.run(n.div_ceil(width), |panel, _| {
        // SAFETY: panels are disjoint and lie inside `dst`.
        unsafe {
            let (n0, dst) = (panel * width, target.get().add(panel * panel_bytes));
            match form {
                Some(form) => pack_panel_in(isa, form, b, n0, n, width, k, dst),
                None => pack_panel(isa, b, n0, n, width, 0, k, dst),
            }
        }
    });
    PackedB { ptr: dst, n, k, dtype: b.dtype, width, parts }
}

/// Terms that are brought together before they are taken apart: 16 KiB of f32.
const TERMS_AT_ONCE: usize = 128;

/// Packs the panel that starts at column `n0` of `n` in parts.
///
/// # Safety
/// As [`pack_b_for`]; `dst` must hold the panel.
unsafe fn pack_panel_in(isa: Isa, form: Form, b: &Matrix, n0: usize, n: usize, width: usize, k: usize, dst: *mut u8) {
    #[repr(align(64))]
    struct Whole(std::mem::MaybeUninit<[f32; TERMS_AT_ONCE * 32]>);
    let mut whole = Whole(std::mem::MaybeUninit::uninit());
    let whole: *mut u8 = whole.0.as_mut_ptr().cast();
    debug_assert!(width <= 32);
    for k0 in (0..k).step_by(TERMS_AT_ONCE) {
        let kc = TERMS_AT_ONCE.min(k - k0);
        // SAFETY: the buffer holds as many rows of a panel, `dst` the groups of all; they start at whole ones.
        unsafe {
            pack_panel(isa, b, n0, n, width, k0, kc, whole);
            let width = width_at(n, n0, width);
            split_panel(form, whole, kc, width, dst.cast::<u32>().add(units_in(form.parts(), k0, b.dtype) * width));
        }
    }
}

/// Packs `k0..k0 + kc` of the panel that starts at column `n0` of `n`.
///
/// # Safety
/// As [`pack_b`]; `dst` must hold the panel's `units(kc) * width` units.
pub(crate) unsafe fn pack_panel(
    isa: Isa,
    b: &Matrix,
    n0: usize,
    n: usize,
    width: usize,
    k0: usize,
    kc: usize,
    dst: *mut u8,
) {
    let width = width_at(n, n0, width);
    let valid = width.min(n - n0);
    let source = Matrix { ptr: b.at(n0, k0), ..*b };
    let per_unit = elements_per_unit(b.dtype);
    let whole = kc / per_unit;
    // SAFETY: reads stay within `valid x kc` elements, writes within `units(kc) x width` units.
    unsafe {
        let fast =
            if b.col_stride == 1 { transpose_units(isa, &source, valid, whole, width, dst.cast(), width) } else { 0 };
        let done = fast * per_unit;
        match b.dtype.size_bytes() {
            4 => pack_singles(&source, valid, width, done..kc, dst.cast()),
            1 => pack_quads(&source, valid, width, done..kc, dst.cast()),
            _ => pack_pairs(&source, valid, width, done..kc, dst.cast()),
        }
    }
}

/// # Safety
/// As [`pack_panel`].
unsafe fn pack_singles(b: &Matrix, valid: usize, width: usize, range: std::ops::Range<usize>, dst: *mut u32) {
    let ptr: *const u32 = b.ptr.cast();
    for k in range {
        // SAFETY: see `pack_panel`.
        unsafe {
            let row = dst.add(k * width);
            let from = ptr.offset(k as isize * b.col_stride);
            if b.row_stride == 1 {
                // Bytes: pairs of a 16-bit type, which this packs too, may lie at any even address.
                std::ptr::copy_nonoverlapping(from.cast::<u8>(), row.cast::<u8>(), 4 * valid);
            } else {
                for lane in 0..valid {
                    row.add(lane).write(from.offset(lane as isize * b.row_stride).read_unaligned());
                }
            }
            row.add(valid).write_bytes(0, width - valid);
        }
    }
}

/// # Safety
/// As [`pack_panel`].
unsafe fn pack_pairs(b: &Matrix, valid: usize, width: usize, range: std::ops::Range<usize>, dst: *mut u32) {
    let ptr: *const u16 = b.ptr.cast();
    let end = range.end;
    for k in range.step_by(2) {
        // SAFETY: see `pack_panel`; the second element of a pair is read only where it exists.
        unsafe {
            let row = dst.add(k / 2 * width);
            let from = ptr.offset(k as isize * b.col_stride);
            for lane in 0..valid {
                let low = from.offset(lane as isize * b.row_stride);
                let high = if k + 1 < end { low.offset(b.col_stride).read() } else { 0 };
                row.add(lane).write(u32::from(low.read()) | u32::from(high) << 16);
            }
            row.add(valid).write_bytes(0, width - valid);
        }
    }
}

/// # Safety
/// As [`pack_panel`].
unsafe fn pack_quads(b: &Matrix, valid: usize, width: usize, range: std::ops::Range<usize>, dst: *mut u32) {
    let end = range.end;
    for k in range.step_by(4) {
        for lane in 0..width {
            let byte = |i: usize| {
                let at = (k + i) as isize * b.col_stride + lane as isize * b.row_stride;
                // SAFETY: read only where the matrix has an element.
                if lane < valid && k + i < end { unsafe { *b.ptr.offset(at) } } else { 0 }
            };
            // SAFETY: see `pack_panel`.
            unsafe { dst.add(k / 4 * width + lane).write(u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)])) };
        }
    }
}

/// A pointer that tasks of one region write disjoint parts of.
#[derive(Clone, Copy)]
pub(crate) struct SendMut(pub(crate) *mut u8);

// SAFETY: the tasks write disjoint parts.
unsafe impl Sync for SendMut {}

impl SendMut {
    pub(crate) fn get(&self) -> *mut u8 {
        self.0
    }
}
