//! Micro-kernels for AVX2 and FMA: 6 rows x 2 vectors of 8, i.e. 12 of 16 registers accumulate.

use std::arch::x86_64::*;

use super::gemm_kernel::{Form, Kernel, Tile, Tiles};
use super::pack::Matrix;
use crate::isa::Isa;

/// 6 x 16 f32.
pub static F32: Kernel = Kernel {
    isa: Isa::Avx2,
    form: Form::F32,
    mr: 6,
    nr: 16,
    tiles: Tiles::Vectors([
        &[tile::<1, 1, 8> as Tile, tile::<2, 1, 4>, tile::<3, 1, 4>, tile::<4, 1, 2>, tile::<5, 1, 2>, tile::<6, 1, 2>],
        &[tile::<1, 2, 4> as Tile, tile::<2, 2, 2>, tile::<3, 2, 2>, tile::<4, 2, 1>, tile::<5, 2, 1>, tile::<6, 2, 1>],
    ]),
};

/// Terms that are multiplied between two looks at how many are left.
const UNROLLED: usize = 4;

/// `MR` rows and `NV` vectors of columns, in `CHAINS` sums that take the terms in turn: few rows leave registers, a chain of
/// every multiply-add would wait for itself, and short chains round less.
///
/// # Safety
/// `a` must hold `MR` rows of `terms` f32 `lda` bytes apart, `panel` `terms * NV * 8` f32, `c` `MR` rows of `NV * 8`.
#[target_feature(enable = "avx2,fma")]
unsafe fn tile<const MR: usize, const NV: usize, const CHAINS: usize>(
    terms: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    prefetch: *const u8,
) {
    if prefetch != panel {
        for line in 0..terms / 16 {
            _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(64 * line).cast());
        }
    }
    // SAFETY: see above.
    unsafe {
        let mut sums = [[[_mm256_setzero_ps(); NV]; MR]; CHAINS];
        let (mut a, mut b) = (a.cast::<f32>(), panel.cast::<f32>());
        let lda = lda / 4;
        let add = |sums: &mut [[__m256; NV]; MR], a: *const f32, b: *const f32| {
            let mut columns = [_mm256_setzero_ps(); NV];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = _mm256_loadu_ps(b.add(v * 8));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm256_set1_ps(a.add(row * lda).read_unaligned());
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm256_fmadd_ps(x, column, *sum);
                }
            }
        };
        // Several terms in a round: what counts rounds takes its turns at the ports, too (3 to 5 % less time with two threads).
        let round = const { if CHAINS < UNROLLED { UNROLLED } else { CHAINS } };
        for _ in 0..terms / round {
            for term in 0..round {
                add(&mut sums[term % CHAINS], a, b);
                (a, b) = (a.add(1), b.add(NV * 8));
            }
        }
        for term in 0..terms % round {
            add(&mut sums[term % CHAINS], a, b);
            (a, b) = (a.add(1), b.add(NV * 8));
        }
        let mut half = CHAINS / 2;
        while half > 0 {
            let (low, high) = sums.split_at_mut(half);
            for (low, high) in low.iter_mut().flatten().zip(high.iter().flatten()) {
                for (sum, &more) in low.iter_mut().zip(high) {
                    *sum = _mm256_add_ps(*sum, more);
                }
            }
            half /= 2;
        }
        for (row, sums) in sums[0].iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let target = c.add(row * ldc + v * 8);
                let sum = if accumulate { _mm256_add_ps(sum, _mm256_loadu_ps(target)) } else { sum };
                _mm256_storeu_ps(target, sum);
            }
        }
    }
}

/// # Safety
/// `src` must hold `n` f16 and `dst` `n` f32; AVX2 and F16C must be available.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn widen_f16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const u16, *mut f32) = (src.cast(), dst.cast());
    let whole = n / 8 * 8;
    // SAFETY: whole vectors lie inside the `n` elements; the rest goes through a buffer.
    unsafe {
        for i in (0..whole).step_by(8) {
            _mm256_storeu_ps(dst.add(i), _mm256_cvtph_ps(_mm_loadu_si128(src.add(i).cast())));
        }
        let mut tail = [0u16; 8];
        std::ptr::copy_nonoverlapping(src.add(whole), tail.as_mut_ptr(), n - whole);
        let mut wide = [0f32; 8];
        _mm256_storeu_ps(wide.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(tail.as_ptr().cast())));
        std::ptr::copy_nonoverlapping(wide.as_ptr(), dst.add(whole), n - whole);
    }
}

/// # Safety
/// `src` must hold `n` bf16 and `dst` `n` f32; AVX2 must be available.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn widen_bf16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const u16, *mut u32) = (src.cast(), dst.cast());
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { dst.add(i).write(u32::from(src.add(i).read_unaligned()) << 16) }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`]; `width` a multiple of 8; AVX2 must be available.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn expand_bf16(src: *const u32, units: usize, width: usize, dst: *mut f32) {
    let high = _mm256_set1_epi32(0xffff_0000_u32 as i32);
    for unit in 0..units {
        for lane in (0..width).step_by(8) {
            // SAFETY: inside the panel.
            unsafe {
                let pairs = _mm256_loadu_si256(src.add(unit * width + lane).cast());
                let row = dst.add(2 * unit * width + lane);
                _mm256_storeu_ps(row, _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)));
                _mm256_storeu_ps(row.add(width), _mm256_castsi256_ps(_mm256_and_si256(pairs, high)));
            }
        }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`]; `width` a multiple of 8; AVX2 and F16C must be available.
#[target_feature(enable = "avx2,f16c")]
pub(crate) unsafe fn expand_f16(src: *const u32, units: usize, width: usize, dst: *mut f32) {
    let low = _mm256_set1_epi32(0xffff);
    for unit in 0..units {
        for lane in (0..width).step_by(8) {
            // SAFETY: inside the panel.
            unsafe {
                let pairs = _mm256_loadu_si256(src.add(unit * width + lane).cast());
                let halves = _mm256_packus_epi32(_mm256_and_si256(pairs, low), _mm256_srli_epi32::<16>(pairs));
                let halves = _mm256_permute4x64_epi64::<0b11_01_10_00>(halves);
                let row = dst.add(2 * unit * width + lane);
                _mm256_storeu_ps(row, _mm256_cvtph_ps(_mm256_castsi256_si128(halves)));
                _mm256_storeu_ps(row.add(width), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)));
            }
        }
    }
}

/// Columns of eight rows of eight units.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_8x8(rows: [__m256i; 8]) -> [__m256i; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    let pairs = [
        [_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)],
        [_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d)],
        [_mm256_unpacklo_epi32(e, f), _mm256_unpackhi_epi32(e, f)],
        [_mm256_unpacklo_epi32(g, h), _mm256_unpackhi_epi32(g, h)],
    ];
    // Column `i` of four rows, and column `i + 4` in the upper half.
    let fours = |upper: usize| {
        let (x, y) = (pairs[2 * upper], pairs[2 * upper + 1]);
        [
            _mm256_unpacklo_epi64(x[0], y[0]),
            _mm256_unpackhi_epi64(x[0], y[0]),
            _mm256_unpacklo_epi64(x[1], y[1]),
            _mm256_unpackhi_epi64(x[1], y[1]),
        ]
    };
    let (x, y) = (fours(0), fours(1));
    [
        _mm256_permute2x128_si256::<0x20>(x[0], y[0]),
        _mm256_permute2x128_si256::<0x20>(x[1], y[1]),
        _mm256_permute2x128_si256::<0x20>(x[2], y[2]),
        _mm256_permute2x128_si256::<0x20>(x[3], y[3]),
        _mm256_permute2x128_si256::<0x31>(x[0], y[0]),
        _mm256_permute2x128_si256::<0x31>(x[1], y[1]),
        _mm256_permute2x128_si256::<0x31>(x[2], y[2]),
        _mm256_permute2x128_si256::<0x31>(x[3], y[3]),
    ]
}

/// Transposes 8 x 8 blocks of four-byte units, the last one over a part of the one before it where rows end within a block;
/// returns how many units of each row it has done.
///
/// # Safety
/// As [`super::gemm_kernel::transpose_units`]; AVX2 must be available.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn transpose_units(
    b: &Matrix,
    valid: usize,
    units: usize,
    width: usize,
    dst: *mut u32,
    stride: usize,
) -> usize {
    if units < 8 {
        return 0;
    }
    let row_bytes = b.row_stride * b.dtype.size_bytes() as isize;
    for lane0 in (0..width).step_by(8) {
        for unit in (0..units).step_by(8) {
            let unit = unit.min(units - 8);
            let mut rows = [_mm256_setzero_si256(); 8];
            for (lane, row) in rows.iter_mut().enumerate().take(valid.saturating_sub(lane0)) {
                // SAFETY: row `lane0 + lane < valid` has at least `unit + 8` units.
                unsafe {
                    let from = b.ptr.byte_offset((lane0 + lane) as isize * row_bytes).add(unit * 4);
                    *row = _mm256_loadu_si256(from.cast());
                }
            }
            for (k, row) in transpose_8x8(rows).into_iter().enumerate() {
                // SAFETY: inside the panel.
                unsafe { _mm256_storeu_si256(dst.add((unit + k) * stride + lane0).cast(), row) };
            }
        }
    }
    units
}

/// Spreads `valid <= 8` contiguous rows of `channels x taps` f32 over the columns of a panel: element (channel, tap) of row
/// `lane` becomes term `tap * channels + channel` of column `lane`.
///
/// # Safety
/// `src` must hold the rows, `row_bytes` apart; `dst` the panel; AVX2 must be available.
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn spread_32(
    src: *const u8,
    row_bytes: isize,
    valid: usize,
    [channels, taps]: [usize; 2],
    dst: *mut u32,
    width: usize,
) {
    let len = channels * taps;
    let (mut tap, mut channel) = (0, 0);
    let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for start in (0..len).step_by(8) {
        let count = (len - start).min(8);
        let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), lanes);
        let mut rows = [_mm256_setzero_si256(); 8];
        for (lane, row) in rows.iter_mut().enumerate().take(valid) {
            // SAFETY: masked lanes are not read.
            unsafe {
                let from = src.byte_offset(lane as isize * row_bytes).add(start * 4);
                *row = _mm256_maskload_epi32(from.cast(), mask);
            }
        }
        for column in transpose_8x8(rows).into_iter().take(count) {
            // SAFETY: the term lies inside the panel.
            unsafe { _mm256_storeu_si256(dst.add((tap * channels + channel) * width).cast(), column) };
            tap += 1;
            if tap == taps {
                (tap, channel) = (0, channel + 1);
            }
        }
    }
}
