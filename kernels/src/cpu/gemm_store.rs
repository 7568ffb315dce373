//! The plain epilogue: bias, residual, store.
//!
//! `out = convert(acc + bias + residual)`, all in f32, rounded once to the nearest even value of the output type. What
//! needs more than that runs as a tile program.

use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use half::{bf16, f16};

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
        let bias = self.bias.map(|(ptr, dtype)| (ptr.wrapping_add(col0 * dtype.size_bytes()), dtype));
        for row in 0..rows {
            let at = |row_stride: isize, dtype: DType| {
                ((row0 + row) as isize * row_stride + col0 as isize) * dtype.size_bytes() as isize
            };
            let residual =
                self.residual.map(|(ptr, dtype, stride)| (ptr.wrapping_byte_offset(at(stride, dtype)), dtype));
            let out = self.out.wrapping_byte_offset(at(self.row_stride, self.dtype));
            // SAFETY: the row lies inside the block, the output and the residual.
            unsafe {
                let acc = acc.add(row * ld);
                match self.isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => avx512::store_row(acc, cols, bias, residual, out, self.dtype),
                    _ => store_row(acc, cols, bias, residual, out, self.dtype),
                }
            }
        }
    }
}

/// # Safety
/// Every operand must hold `cols` elements.
unsafe fn store_row(
    acc: *const f32,
    cols: usize,
    bias: Option<(*const u8, DType)>,
    residual: Option<(*const u8, DType)>,
    out: *mut u8,
    dtype: DType,
) {
    for col in 0..cols {
        // SAFETY: `col < cols`.
        unsafe {
            let mut sum = *acc.add(col);
            for (ptr, dtype) in [bias, residual].into_iter().flatten() {
                sum += load(ptr, dtype, col);
            }
            match dtype {
                DType::F16 => out.cast::<u16>().add(col).write(f16::from_f32(sum).to_bits()),
                DType::BF16 => out.cast::<u16>().add(col).write(bf16::from_f32(sum).to_bits()),
                _ => out.cast::<f32>().add(col).write(sum),
            }
        }
    }
}

/// # Safety
/// `ptr` must hold more than `index` elements.
pub(super) unsafe fn load(ptr: *const u8, dtype: DType, index: usize) -> f32 {
    // SAFETY: forwarded.
    unsafe {
        match dtype {
            DType::F16 => f16::from_bits(*ptr.cast::<u16>().add(index)).to_f32(),
            DType::BF16 => bf16::from_bits(*ptr.cast::<u16>().add(index)).to_f32(),
            _ => *ptr.cast::<f32>().add(index),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use crate::dtype::DType;
    use std::arch::x86_64::*;

    /// # Safety
    /// Every operand must hold `cols` elements; AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    pub(super) unsafe fn store_row(
        acc: *const f32,
        cols: usize,
        bias: Option<(*const u8, DType)>,
        residual: Option<(*const u8, DType)>,
        out: *mut u8,
        dtype: DType,
    ) {
        let (bias, residual) = (Addend::new(bias), Addend::new(residual));
        let whole = cols / 16 * 16;
        // SAFETY: whole vectors lie inside the `cols` elements; of the last one only the lanes that exist are touched.
        unsafe {
            for col in (0..whole).step_by(16) {
                let mut sum = _mm512_loadu_ps(acc.add(col));
                if let Some(bias) = &bias {
                    sum = _mm512_add_ps(sum, bias.load(col));
                }
                if let Some(residual) = &residual {
                    sum = _mm512_add_ps(sum, residual.load(col));
                }
                match dtype {
                    DType::F16 => _mm256_storeu_si256(out.cast::<u16>().add(col).cast(), round_f16(sum)),
                    DType::BF16 => _mm256_storeu_si256(out.cast::<u16>().add(col).cast(), round_bf16(sum)),
                    _ => _mm512_storeu_ps(out.cast::<f32>().add(col), sum),
                }
            }
            if whole < cols {
                let lanes = ((1u32 << (cols - whole)) - 1) as u16;
                let mut sum = _mm512_maskz_loadu_ps(lanes, acc.add(whole));
                for addend in [&bias, &residual].into_iter().flatten() {
                    sum = _mm512_add_ps(sum, addend.load_lanes(whole, lanes));
                }
                let out16 = out.cast::<i16>().add(whole);
                match dtype {
                    DType::F16 => _mm256_mask_storeu_epi16(out16, lanes, round_f16(sum)),
                    DType::BF16 => _mm256_mask_storeu_epi16(out16, lanes, round_bf16(sum)),
                    _ => _mm512_mask_storeu_ps(out.cast::<f32>().add(whole), lanes, sum),
                }
            }
        }
    }

    /// A row that is added.
    struct Addend {
        ptr: *const u8,
        dtype: DType,
    }

    impl Addend {
        fn new(row: Option<(*const u8, DType)>) -> Option<Addend> {
            row.map(|(ptr, dtype)| Addend { ptr, dtype })
        }

        /// # Safety
        /// The row must hold sixteen elements at `col`; AVX-512 must be available.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn load(&self, col: usize) -> __m512 {
            let halves = self.ptr.cast::<u16>().wrapping_add(col).cast::<__m256i>();
            // SAFETY: forwarded.
            unsafe {
                match self.dtype {
                    DType::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(halves)),
                    DType::BF16 => widen_bf16(_mm256_loadu_si256(halves)),
                    _ => _mm512_loadu_ps(self.ptr.cast::<f32>().add(col)),
                }
            }
        }

        /// # Safety
        /// The row must hold the elements at `col` that `lanes` names; AVX-512 must be available.
        #[inline]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
        unsafe fn load_lanes(&self, col: usize, lanes: u16) -> __m512 {
            let halves = self.ptr.cast::<i16>().wrapping_add(col);
            // SAFETY: masked lanes are not read.
            unsafe {
                match self.dtype {
                    DType::F16 => _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, halves)),
                    DType::BF16 => widen_bf16(_mm256_maskz_loadu_epi16(lanes, halves)),
                    _ => _mm512_maskz_loadu_ps(lanes, self.ptr.cast::<f32>().add(col)),
                }
            }
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn widen_bf16(halves: __m256i) -> __m512 {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn round_f16(x: __m512) -> __m256i {
        _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)
    }

    /// Rounds to nearest even; a NaN keeps its sign and upper bits and becomes quiet.
    #[inline]
    #[target_feature(enable = "avx512f")]
    fn round_bf16(x: __m512) -> __m256i {
        let bits = _mm512_castps_si512(x);
        let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x0040_0000));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_mask_blend_epi32(nan, rounded, quiet)))
    }
}
