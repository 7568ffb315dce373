//! Matrix products: `C[m, n] = epilogue(sum over k of A[m, k] * B[n, k])`.
//!
//! A is an activation, B usually a weight in PyTorch's `[out_features, in_features]` layout. How to call:
//!
//! ```
//! use oxidiff_kernels::cpu::gemm::{Operand, gemm};
//! use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
//! use oxidiff_kernels::cpu::pack::{Matrix, PackedB, pack_b, packed_bytes};
//! use oxidiff_kernels::{dtype::DType, isa::Isa, pool::Pool};
//!
//! let (m, n, k) = (5, 7, 3);
//! let (a, w, mut c) = (vec![1f32; m * k], vec![2f32; n * k], vec![0f32; m * n]);
//! let (pool, isa) = (Pool::global(), Isa::detect());
//! let weight = Matrix::row_major(w.as_ptr().cast(), DType::F32, k);
//! let mut memory = vec![0u8; packed_bytes(n, k, DType::F32, isa)];
//! let epilogue = StoreEpilogue::new(c.as_mut_ptr().cast(), DType::F32, n as isize);
//! // SAFETY: every pointer is valid for the sizes named.
//! unsafe {
//!     let packed: PackedB = pack_b(pool, isa, n, k, &weight, memory.as_mut_ptr());
//!     let a = Matrix::row_major(a.as_ptr().cast(), DType::F32, k);
//!     gemm(pool, isa, m, n, k, &a, &Operand::Packed(packed), &epilogue).unwrap();
//! }
//! assert!(c.iter().all(|&x| x == 6.0));
//! ```
//!
//! Without a prepacked weight pass [`Operand::Strided`]: panels are then packed while they are used, at a few per cent
//! of the time for large `m`, and skipped altogether for a handful of rows (`gemv`). [`batched_gemm`] multiplies many pairs of matrices in one region.
//!
//! Element types: A and B each f32, f16 or bf16, in any combination. Products are accumulated in f32, in chains of at
//! most [`K_BLOCK`](super::gemm_driver) terms that are then added up, so the error grows with the square root of the
//! number of blocks rather than with `k`. Two bf16 operands use `TDPBF16PS` (AMX) or `VDPBF16PS` where that is fast (exact
//! products, f32 sums), two f16 ones `TDPFP16PS` (AMX); every other 16-bit operand is widened to f32 on its way into L1 or L2.
//! Where AMX multiplies bf16, f32 and f16 are taken apart into sums of bf16 ([`gemm_split`](super::gemm_split)).
//!
//! `k = 0` gives zeros to the epilogue; `m = 0` or `n = 0` calls nothing.

use super::KernelError;
use super::gemm_driver::{ASource, BSource, Problem, run};
use super::gemm_kernel::{CopyRow, Form, Kernel, copy_row, select};
use super::gemv;
use super::pack::{Matrix, PackedB};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::{Isa, features};
use crate::pool::Pool;

/// The second operand of a product: `[n, k]`.
#[derive(Clone, Copy, Debug)]
pub enum Operand {
    /// Packed beforehand by [`pack_b`](super::pack::pack_b) for the same `n`, `k` and instruction set.
    Packed(PackedB),
    /// Rows are output columns; any strides. A `[k, n]` matrix is this with its strides exchanged.
    Strided(Matrix),
}

impl Operand {
    fn dtype(&self) -> DType {
        match self {
            Operand::Packed(packed) => packed.dtype,
            Operand::Strided(matrix) => matrix.dtype,
        }
    }
}

/// What [`gemm`] of `m` rows of `k` elements leaves out of each product at most, in units of 2^-24 of it: operands may be taken
/// apart ([`gemm_split`](super::gemm_split)).
pub fn left_out(isa: Isa, a: DType, b: DType, m: usize, k: usize) -> usize {
    select(isa, a, b, (m, k)).form.left_out()
}

/// Whether [`gemm`] of `m` rows takes no longer with [`Operand::Strided`] than with a packing of its own before it.
pub fn packs_while_used(isa: Isa, m: usize) -> bool {
    super::gemm_driver::packs_while_used(isa.clamp(), m)
}

/// One batch dimension of [`batched_gemm`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchDim {
    /// Number of matrix pairs along it.
    pub size: usize,
    /// Elements from one A to the next (0 broadcasts).
    pub a_stride: isize,
    /// Elements from one B to the next (0 broadcasts).
    pub b_stride: isize,
}

/// Computes `A * B^T` and hands the `m x n` results to `epilogue`.
///
/// # Errors
/// [`KernelError`] for an element type other than f32, f16 and bf16, for a packed operand of other sizes, or when scratch
/// memory runs out.
///
/// # Safety
/// `a` must be readable for `m x k` and `b` for `n x k` elements, and `epilogue` must accept blocks of `m x n` results.
pub unsafe fn gemm(
    pool: &Pool,
    isa: Isa,
    m: usize,
    n: usize,
    k: usize,
    a: &Matrix,
    b: &Operand,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    #[cfg(target_arch = "x86_64")]
    if let Operand::Strided(matrix) = b
        && gemv::suits(isa.clamp(), m, a, matrix)
        && m * n * k > 0
    {
        check_dtypes([a.dtype, matrix.dtype])?;
        // SAFETY: forwarded.
        return unsafe { gemv::gemv(pool, (m, n, k), a, matrix, epilogue) };
    }
    let kernel = select(isa, a.dtype, b.dtype(), (m, k));
    // SAFETY: forwarded.
    unsafe { gemm_with(kernel, pool, &[], (m, n, k), a, b, epilogue) }
}

/// Computes one product per element of the batch space spanned by `batch` (outermost first).
///
/// The epilogue sees one matrix of `(batch size * m) x n` results: row `r` of pair `z` is row `z * m + r`.
///
/// # Errors
/// As [`gemm`].
///
/// # Safety
/// As [`gemm`], for every pair.
pub unsafe fn batched_gemm(
    pool: &Pool,
    isa: Isa,
    batch: &[BatchDim],
    m: usize,
    n: usize,
    k: usize,
    a: &Matrix,
    b: &Matrix,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    let kernel = select(isa, a.dtype, b.dtype, (m, k));
    // SAFETY: forwarded.
    unsafe { gemm_with(kernel, pool, batch, (m, n, k), a, &Operand::Strided(*b), epilogue) }
}

/// [`gemm`] with a given micro-kernel, which must be available and fit the element types.
///
/// # Errors
/// As [`gemm`].
///
/// # Safety
/// As [`gemm`].
pub unsafe fn gemm_with(
    kernel: &'static Kernel,
    pool: &Pool,
    batch: &[BatchDim],
    (m, n, k): (usize, usize, usize),
    a: &Matrix,
    b: &Operand,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    if kernel.form != Form::Int8Quads {
        check_dtypes([a.dtype, b.dtype()])?;
    }
    let source = Rows::new(kernel, batch, *a, k);
    let b = match b {
        Operand::Packed(packed) => {
            let suits = (packed.n, packed.k, packed.width) == (n, k, kernel.nr);
            if !suits || ![0, kernel.form.parts()].contains(&packed.parts) {
                return Err(KernelError::Shape("the packed operand was made for other sizes or instructions"));
            }
            BSource::Packed { ptr: packed.ptr, dtype: packed.dtype, parts: packed.parts, stride: 0 }
        }
        Operand::Strided(matrix) => BSource::Strided { matrix: *matrix, batch },
    };
    let count = batch.iter().map(|dim| dim.size).product();
    let problem = Problem { kernel, count, m, n, k, row_step: m, col_step: 0, a: &source, b };
    // SAFETY: the caller vouches for the operands and the epilogue.
    unsafe { run(pool, &problem, epilogue) }
}

/// Refuses element types without kernels.
pub(crate) fn check_dtypes(dtypes: [DType; 2]) -> Result<(), KernelError> {
    match dtypes.into_iter().find(|dtype| !matches!(dtype, DType::F32 | DType::F16 | DType::BF16)) {
        Some(dtype) => Err(KernelError::UnsupportedDType(dtype)),
        None => Ok(()),
    }
}

/// Element offset of pair `z` along `batch`.
pub(crate) fn batch_offset(batch: &[BatchDim], mut z: usize, stride: impl Fn(&BatchDim) -> isize) -> isize {
    let mut offset = 0;
    for dim in batch.iter().rev() {
        offset += (z % dim.size) as isize * stride(dim);
        z /= dim.size;
    }
    offset
}

/// A as a plain matrix.
pub(super) struct Rows<'a> {
    a: Matrix,
    k: usize,
    batch: &'a [BatchDim],
    kernel: &'static Kernel,
    copy: CopyRow,
}

// SAFETY: reads only.
unsafe impl Sync for Rows<'_> {}

impl ASource for Rows<'_> {
    unsafe fn block(
        &self,
        z: usize,
        row0: usize,
        rows: usize,
        k0: usize,
        kc: usize,
        dst: *mut u8,
        ld: usize,
    ) -> (*const u8, usize) {
        let offset = batch_offset(self.batch, z, |dim| dim.a_stride);
        // SAFETY: the block lies inside the matrix the caller of `gemm` vouched for; `dst` holds `rows x ld` bytes.
        unsafe {
            let a = self.a.at(row0, k0).byte_offset(offset * self.a.dtype.size_bytes() as isize);
            if self.is_readable_in_place() {
                return (a, self.a.row_stride as usize * self.a.dtype.size_bytes());
            }
            let form = self.kernel.form;
            if form.parts() > 0 {
                self.take_apart(a, rows, kc, dst, ld);
                return (dst, ld);
            }
            let unit = form.elements_per_unit();
            for row in 0..rows {
                let from = a.byte_offset(row as isize * self.a.row_stride * self.a.dtype.size_bytes() as isize);
                let to = dst.add(row * ld);
                if self.a.col_stride == 1 {
                    (self.copy)(from, to, kc);
                } else {
                    let size = self.a.dtype.size_bytes() as isize;
                    for col in 0..kc {
                        let element = to.add(col * form.element_bytes());
                        (self.copy)(from.byte_offset(col as isize * self.a.col_stride * size), element, 1);
                    }
                }
                let padding = kc.next_multiple_of(unit) - kc;
                to.add(kc * form.element_bytes()).write_bytes(0, padding * form.element_bytes());
            }
        }
        (dst, ld)
    }

    fn is_in_place(&self) -> bool {
        self.is_readable_in_place()
    }
}

impl<'a> Rows<'a> {
    /// Matrices of rows of `k` terms, one for each pair, for that kernel.
    pub(super) fn new(kernel: &'static Kernel, batch: &'a [BatchDim], a: Matrix, k: usize) -> Rows<'a> {
        Rows { a, k, batch, kernel, copy: copy_row(kernel.isa, a.dtype, kernel.form) }
    }

    fn is_readable_in_place(&self) -> bool {
        is_readable(&self.a, self.kernel, self.k)
    }

    /// [`ASource::block`] for forms of parts.
    ///
    /// # Safety
    /// As there.
    unsafe fn take_apart(&self, a: *const u8, rows: usize, kc: usize, dst: *mut u8, ld: usize) {
        let size = self.a.dtype.size_bytes();
        let mut side_by_side = [0u32; MAX_SPLIT_TERMS];
        let whole = side_by_side.as_mut_ptr().cast::<u8>();
        debug_assert!(kc <= MAX_SPLIT_TERMS);
        for row in 0..rows {
            // SAFETY: elements of the block; the buffer holds the longest row, `dst` the groups of each.
            unsafe {
                let from = a.byte_offset(row as isize * self.a.row_stride * size as isize);
                let to = dst.add(row * ld);
                if self.a.col_stride == 1 {
                    (self.copy)(from, to, kc);
                    continue;
                }
                for col in 0..kc {
                    let element = from.byte_offset(col as isize * self.a.col_stride * size as isize);
                    std::ptr::copy_nonoverlapping(element, whole.add(col * size), size);
                }
                (self.copy)(whole, to, kc);
            }
        }
    }
}

/// Elements of a row that is taken apart at most: [`Kernel::most_terms`] of every kernel.
pub const MAX_SPLIT_TERMS: usize = 192;

/// Whether the micro-kernel can read a matrix of rows of `k` elements where it lies: same element form, whole units, forward
/// rows, and such that the lines of a tile's rows fit into L1 together. Rows a multiple of 4 KiB apart share a set, which
/// has a line for each 4 KiB of the cache. A few lines too many do no harm (fourteen rows, twelve lines, Zen 5: 0.94 of the
/// time that it takes with a copy; without sharing 0.92).
pub(crate) fn is_readable(a: &Matrix, kernel: &Kernel, k: usize) -> bool {
    let row_bytes = a.row_stride * a.dtype.size_bytes() as isize;
    let lines = features().l1_bytes / 4096;
    kernel.form.takes(a.dtype)
        && a.col_stride == 1
        && row_bytes >= 0
        && (row_bytes % 4096 != 0 || kernel.mr <= lines + lines / 4)
        && k.is_multiple_of(kernel.form.elements_per_unit())
}
