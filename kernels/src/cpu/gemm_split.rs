//! Operands as sums of bf16, for AMX, which multiplies nothing wider: f32 as three of them, f16 as two.
//!
//! ```text
//! x = x0 + x1 + x2       each the eight leading bits of what the ones before it left
//! a * b = a0 b0 + a0 b1 + a1 b0 + a0 b2 + a1 b1 + a2 b0         f32: three parts, six products
//! a * b = a0 b0 + a0 b1 + a1 b0                                 f16: two parts, three products
//! ```
//!
//! Layout: thirty-two terms of a row are a *group*, and the group's parts follow each other, 64 bytes each:
//!
//! ```text
//! row of A:  [group][part][16 units]                a unit is a pair of bf16: terms j and j + 16 of the group
//! panel:     [group][part][16 units][column]        the same pairs
//! ```
//!
//! Terms beyond the last one are 0. Any order of a group's terms gives the same sums, as long as both operands have the same
//! one; this one takes two instructions for each vector of units.
//!
//! Numerics, for numbers and products not below 2^-100, beneath which AMX loses parts of them: three parts are all 24 bits of an f32, what is left out of a product is below 2^-21
//! of it, 6e-8 in the mean; two parts are all 11 bits of an f16, what is left out is below 2^-14, 8e-6 in the mean.
//! Infinities stay what they are: an infinity's parts are all infinite, and parts of a number other than 0 have its sign and
//! are not 0, so that their products are infinite too.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// Terms of a group.
pub const GROUP: usize = 32;

/// Four-byte units of `k` terms in so many parts.
pub const fn units(parts: usize, k: usize) -> usize {
    k.div_ceil(GROUP) * parts * (GROUP / 2)
}

#[cfg(target_arch = "x86_64")]
mod avx512 {
    use super::*;

    /// The upper half of a 32-bit lane.
    const UPPER: i32 = 0xffff_0000u32 as i32;

    /// Numbers whose upper halves are the parts of `x`. They have its sign: with one of the other, an infinity times it would
    /// not be an infinity.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    fn parts<const N: usize>(x: __m512) -> [__m512i; N] {
        let upper = _mm512_set1_epi32(UPPER);
        let is_finite = !_mm512_fpclass_ps_mask::<0x18>(x);
        let (mut rest, mut found) = (x, [_mm512_setzero_si512(); N]);
        for (at, part) in found.iter_mut().enumerate() {
            *part = _mm512_castps_si512(rest);
            if at + 1 < N {
                let taken = _mm512_castsi512_ps(_mm512_and_si512(*part, upper));
                // Far less than the last bit, so that no part is 0.
                let trace = _mm512_set1_ps(if at == 0 { 1.0 / (1u64 << 40) as f32 } else { 1.0 / (1u64 << 60) as f32 });
                rest = _mm512_fmadd_ps(x, trace, _mm512_mask_sub_ps(rest, is_finite, rest, taken));
            }
        }
        found
    }

    /// Units of the upper halves of `low` and `high`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    fn pairs(low: __m512i, high: __m512i) -> __m512i {
        // low >> 16 | high & UPPER
        _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi32::<16>(low), high, _mm512_set1_epi32(UPPER))
    }

    /// Writes the parts of `n` elements, a whole number of groups.
    ///
    /// # Safety
    /// `load(at, lanes)` must give the elements from `at` on, and 0 for lanes that are not set; `dst` must hold the groups.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    unsafe fn split_row<const N: usize>(n: usize, dst: *mut u8, load: impl Fn(usize, u16) -> __m512) {
        let lanes = |from: usize| ((1u32 << n.saturating_sub(from).min(16)) - 1) as u16;
        for (group, at) in (0..n).step_by(GROUP).enumerate() {
            let low = parts::<N>(load(at, lanes(at)));
            let high = parts::<N>(load(at + 16, lanes(at + 16)));
            for part in 0..N {
                // SAFETY: inside the group.
                unsafe {
                    let to = dst.add((group * N + part) * 64);
                    _mm512_storeu_si512(to.cast(), pairs(low[part], high[part]));
                }
            }
        }
    }

    /// Takes a row of f32 apart into three parts.
    ///
    /// # Safety
    /// `src` must hold `n` f32, `dst` their groups of three parts; AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub unsafe fn split_row_f32(src: *const u8, dst: *mut u8, n: usize) {
        // SAFETY: forwarded.
        unsafe { split_row_into(3, src.cast(), dst, n) }
    }

    /// Takes a row of f16 apart into two parts.
    ///
    /// # Safety
    /// `src` must hold `n` f16, `dst` their groups of two parts; AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub unsafe fn split_row_f16(src: *const u8, dst: *mut u8, n: usize) {
        let src: *const i16 = src.cast();
        let load = |at: usize, lanes: u16| {
            // SAFETY: masked lanes are not read.
            _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(lanes, src.wrapping_add(at)) })
        };
        // SAFETY: forwarded.
        unsafe { split_row::<2>(n, dst, load) }
    }

    /// A row of f32 in `count` parts, two or three.
    ///
    /// # Safety
    /// As [`split_row_f32`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(crate) unsafe fn split_row_into(count: usize, src: *const f32, dst: *mut u8, n: usize) {
        // SAFETY: masked lanes are not read.
        let load = |at: usize, lanes: u16| unsafe { _mm512_maskz_loadu_ps(lanes, src.wrapping_add(at)) };
        // SAFETY: forwarded.
        unsafe { if count == 3 { split_row::<3>(n, dst, load) } else { split_row::<2>(n, dst, load) } }
    }

    /// Writes the parts of a panel of `k` rows of `width` columns.
    ///
    /// # Safety
    /// `load(row, lane)` must give sixteen columns of a row; `dst` must hold the groups.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    unsafe fn split_panel<const N: usize>(
        k: usize,
        width: usize,
        dst: *mut u32,
        load: impl Fn(usize, usize) -> __m512,
    ) {
        let row = |k0: usize, lane: usize| if k0 < k { load(k0, lane) } else { _mm512_setzero_ps() };
        for (group, first) in (0..k).step_by(GROUP).enumerate() {
            for unit in 0..GROUP / 2 {
                for lane in (0..width).step_by(16) {
                    let low = parts::<N>(row(first + unit, lane));
                    let high = parts::<N>(row(first + unit + 16, lane));
                    for part in 0..N {
                        // SAFETY: inside the group.
                        unsafe {
                            let to = dst.add(((group * N + part) * (GROUP / 2) + unit) * width + lane);
                            _mm512_storeu_si512(to.cast(), pairs(low[part], high[part]));
                        }
                    }
                }
            }
        }
    }

    /// Splits a panel of f32 into `count` parts, two or three.
    ///
    /// # Safety
    /// `src` must hold `k` rows of `width` columns, a multiple of 16, and `dst` their groups; AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(crate) unsafe fn split_panel_into(count: usize, src: *const f32, k: usize, width: usize, dst: *mut u32) {
        // SAFETY: inside the panel.
        let load = |row: usize, lane: usize| unsafe { _mm512_loadu_ps(src.add(row * width + lane)) };
        // SAFETY: forwarded.
        unsafe {
            if count == 3 { split_panel::<3>(k, width, dst, load) } else { split_panel::<2>(k, width, dst, load) }
        }
    }

    /// Splits a panel of pairs of f16 into two parts.
    ///
    /// # Safety
    /// `src` must hold the pairs of `k` rows of `width` columns, a multiple of 16, and `dst` their groups; AVX-512 must be available.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq")]
    pub(crate) unsafe fn split_panel_f16(src: *const u8, k: usize, width: usize, dst: *mut u32) {
        let src: *const u32 = src.cast();
        let load = |row: usize, lane: usize| {
            // SAFETY: inside the panel; an odd row is the upper half of its pair.
            let pairs = unsafe { _mm512_loadu_si512(src.add(row / 2 * width + lane).cast()) };
            let pairs = if row.is_multiple_of(2) { pairs } else { _mm512_srli_epi32::<16>(pairs) };
            _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs))
        };
        // SAFETY: forwarded.
        unsafe { split_panel::<2>(k, width, dst, load) }
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::{split_panel_f16, split_panel_into, split_row_into};
#[cfg(target_arch = "x86_64")]
pub use avx512::{split_row_f16, split_row_f32};

#[cfg(not(target_arch = "x86_64"))]
pub(crate) use absent::{split_panel_into, split_row_into};

/// Kernels of parts are those of AMX: nothing else calls these.
#[cfg(not(target_arch = "x86_64"))]
mod absent {
    pub(crate) unsafe fn split_row_into(_count: usize, _src: *const f32, _dst: *mut u8, _n: usize) {
        unreachable!("there is no AMX")
    }

    pub(crate) unsafe fn split_panel_into(_count: usize, _src: *const f32, _k: usize, _width: usize, _dst: *mut u32) {
        unreachable!("there is no AMX")
    }
}
