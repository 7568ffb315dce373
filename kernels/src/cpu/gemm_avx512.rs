//! Micro-kernels for AVX-512: 14 rows x 2 vectors of 16.

use std::arch::x86_64::*;

use super::gemm_kernel::{Form, Kernel, Tile};
use super::pack::Matrix;
use crate::isa::Isa;

macro_rules! heights {
    ($tile:ident, $vectors:literal) => {
        &[
            $tile::<1, $vectors> as Tile,
            $tile::<2, $vectors>,
            $tile::<3, $vectors>,
            $tile::<4, $vectors>,
            $tile::<5, $vectors>,
            $tile::<6, $vectors>,
            $tile::<7, $vectors>,
            $tile::<8, $vectors>,
            $tile::<9, $vectors>,
            $tile::<10, $vectors>,
            $tile::<11, $vectors>,
            $tile::<12, $vectors>,
            $tile::<13, $vectors>,
            $tile::<14, $vectors>,
        ]
    };
}

/// 14 x 32 f32.
pub(crate) static F32: Kernel =
    Kernel { isa: Isa::Avx512, form: Form::F32, mr: 14, nr: 32, tiles: [heights!(tile_f32, 1), heights!(tile_f32, 2)] };

/// 14 x 32 with `VDPBF16PS`: two terms an instruction.
pub(crate) static BF16: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Bf16Pairs,
    mr: 14,
    nr: 32,
    tiles: [heights!(tile_bf16, 1), heights!(tile_bf16, 2)],
};

/// # Safety
/// `a` must hold `MR` rows of `terms` f32 `lda` bytes apart, `panel` `terms * NV * 16` f32, `c` `MR` rows of `NV * 16`;
/// AVX-512 must be available.
#[target_feature(enable = "avx512f")]
unsafe fn tile_f32<const MR: usize, const NV: usize>(
    terms: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
) {
    // SAFETY: see above.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); NV]; MR];
        let (mut a, mut b) = (a, panel.cast::<f32>());
        for _ in 0..terms {
            let mut columns = [_mm512_setzero_ps(); NV];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = _mm512_loadu_ps(b.add(v * 16));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(a.add(row * lda).cast::<f32>().read_unaligned());
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_fmadd_ps(x, column, *sum);
                }
            }
            a = a.add(4);
            b = b.add(NV * 16);
        }
        store(&sums, c, ldc, accumulate);
    }
}

/// # Safety
/// As [`tile_f32`] with pairs of bf16 instead of f32; `VDPBF16PS` must be available.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn tile_bf16<const MR: usize, const NV: usize>(
    pairs: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
) {
    // SAFETY: see above; the two vector types are both 512 plain bits.
    unsafe {
        let mut sums = [[_mm512_setzero_ps(); NV]; MR];
        let (mut a, mut b) = (a, panel.cast::<u32>());
        for _ in 0..pairs {
            let mut columns = [_mm512_setzero_si512(); NV];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = _mm512_loadu_si512(b.add(v * 16).cast());
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_epi32(a.add(row * lda).cast::<i32>().read_unaligned());
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_dpbf16_ps(*sum, std::mem::transmute(x), std::mem::transmute(column));
                }
            }
            a = a.add(4);
            b = b.add(NV * 16);
        }
        store(&sums, c, ldc, accumulate);
    }
}

/// # Safety
/// `c` must hold `MR` rows of `NV * 16` f32, `ldc` apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store<const MR: usize, const NV: usize>(
    sums: &[[__m512; NV]; MR],
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
) {
    for (row, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: see above.
            unsafe {
                let target = c.add(row * ldc + v * 16);
                let sum = if accumulate { _mm512_add_ps(sum, _mm512_loadu_ps(target)) } else { sum };
                _mm512_storeu_ps(target, sum);
            }
        }
    }
}

/// Mask of the first `n` lanes, `n <= 16`.
fn first_lanes(n: usize) -> u16 {
    ((1u32 << n) - 1) as u16
}

/// # Safety
/// `src` must hold `n` f16 and `dst` `n` f32; AVX-512 must be available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) unsafe fn widen_f16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const i16, *mut f32) = (src.cast(), dst.cast());
    for i in (0..n).step_by(16) {
        let lanes = first_lanes((n - i).min(16));
        // SAFETY: masked lanes are neither read nor written.
        unsafe {
            let wide = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, src.add(i)));
            _mm512_mask_storeu_ps(dst.add(i), lanes, wide);
        }
    }
}

/// # Safety
/// `src` must hold `n` bf16 and `dst` `n` f32; AVX-512 must be available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) unsafe fn widen_bf16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const i16, *mut i32) = (src.cast(), dst.cast());
    for i in (0..n).step_by(16) {
        let lanes = first_lanes((n - i).min(16));
        // SAFETY: masked lanes are neither read nor written.
        unsafe {
            let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, src.add(i))));
            _mm512_mask_storeu_epi32(dst.add(i), lanes, wide);
        }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`]; `width` a multiple of 16; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn expand_bf16(src: *const u32, units: usize, width: usize, dst: *mut f32) {
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for unit in 0..units {
        for lane in (0..width).step_by(16) {
            // SAFETY: inside the panel.
            unsafe {
                let pairs = _mm512_loadu_si512(src.add(unit * width + lane).cast());
                let row = dst.add(2 * unit * width + lane);
                _mm512_storeu_ps(row, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)));
                _mm512_storeu_ps(row.add(width), _mm512_castsi512_ps(_mm512_and_si512(pairs, high)));
            }
        }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`]; `width` a multiple of 16; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn expand_f16(src: *const u32, units: usize, width: usize, dst: *mut f32) {
    for unit in 0..units {
        for lane in (0..width).step_by(16) {
            // SAFETY: inside the panel.
            unsafe {
                let pairs = _mm512_loadu_si512(src.add(unit * width + lane).cast());
                let row = dst.add(2 * unit * width + lane);
                _mm512_storeu_ps(row, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
                let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs));
                _mm512_storeu_ps(row.add(width), _mm512_cvtph_ps(upper));
            }
        }
    }
}

/// Transposes 16 x 16 blocks of four-byte units; returns how many units of each row it has done.
///
/// # Safety
/// As [`super::gemm_kernel::transpose_units`]; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn transpose_units(b: &Matrix, valid: usize, units: usize, width: usize, dst: *mut u32) -> usize {
    let whole = units / 16 * 16;
    let row_bytes = b.row_stride * b.dtype.size_bytes() as isize;
    for lane0 in (0..width).step_by(16) {
        for unit in (0..whole).step_by(16) {
            let mut rows = [_mm512_setzero_si512(); 16];
            for (lane, row) in rows.iter_mut().enumerate().take(valid.saturating_sub(lane0)) {
                // SAFETY: row `lane0 + lane < valid` has at least `unit + 16` units.
                unsafe {
                    let from = b.ptr.byte_offset((lane0 + lane) as isize * row_bytes).add(unit * 4);
                    *row = _mm512_loadu_si512(from.cast());
                }
            }
            let rows = transpose_16x16(rows);
            for (k, row) in rows.into_iter().enumerate() {
                // SAFETY: inside the panel.
                unsafe { _mm512_storeu_si512(dst.add((unit + k) * width + lane0).cast(), row) };
            }
        }
    }
    whole
}

/// Result row `i` holds element `i` of every input row.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_16x16(rows: [__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let (mut t, mut u) = ([zero; 16], [zero; 16]);
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<0x88>(u[i], u[i + 4]);
        t[i + 4] = _mm512_shuffle_i32x4::<0xdd>(u[i], u[i + 4]);
        t[i + 8] = _mm512_shuffle_i32x4::<0x88>(u[i + 8], u[i + 12]);
        t[i + 12] = _mm512_shuffle_i32x4::<0xdd>(u[i + 8], u[i + 12]);
    }
    for i in 0..4 {
        u[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[i + 8]);
        u[i + 4] = _mm512_shuffle_i32x4::<0x88>(t[i + 4], t[i + 12]);
        u[i + 8] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[i + 8]);
        u[i + 12] = _mm512_shuffle_i32x4::<0xdd>(t[i + 4], t[i + 12]);
    }
    u
}
