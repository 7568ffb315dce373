//! Vectors of AVX-512.

use super::simd::{Simd, has, mem};
use std::arch::x86_64::*;

/// x86-64 with AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub struct Avx512(());

impl Avx512 {
    /// The token.
    ///
    /// # Safety
    /// The processor must have AVX-512 F, BW, DQ and VL.
    #[inline(always)]
    pub unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#[inline(always)]
fn mask16(n: usize) -> __mmask16 {
    ((1u32 << n.min(16)) - 1) as __mmask16
}

/// In assembly: a function with the feature of the instruction could not become part of one without.
///
/// # Safety
/// The processor must have AVX512-BF16.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn bf16_of_two_512(a: __m512, b: __m512) -> __m512i {
    let both: __m512i;
    // SAFETY: reads two registers and writes one; the caller vouches for the instruction.
    unsafe {
        std::arch::asm!(
            "vcvtne2ps2bf16 {both}, {b}, {a}",
            both = lateout(zmm_reg) both,
            a = in(zmm_reg) a,
            b = in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    both
}

impl Simd for Avx512 {
    const LANES: usize = 16;
    type F = __m512;
    type I = __m512i;
    type M = __mmask16;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        has!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        mem!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> __m512 {
        mem!(_mm512_maskz_loadu_ps(mask16(n), p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        mem!(_mm512_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, v: __m512, n: usize) {
        mem!(_mm512_mask_storeu_ps(p, mask16(n), v))
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: __m512) {
        mem!(_mm512_stream_ps(p, v))
    }
    #[inline(always)]
    unsafe fn stream_bf16_2(self, p: *mut u16, a: __m512, b: __m512) {
        mem!(_mm512_stream_si512(p.cast(), narrow_two_512(a, b)))
    }
    #[inline(always)]
    unsafe fn stream_f16(self, p: *mut u16, v: __m512) {
        mem!(_mm256_stream_si256(p.cast(), _mm512_cvtps_ph::<NEAREST>(v)))
    }
    #[inline(always)]
    fn fence(self) {
        has!(_mm_sfence())
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        has!(_mm_prefetch::<_MM_HINT_T0>(p.cast()))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: __m512) -> __m512 {
        has!(_mm512_sqrt_ps(a))
    }
    #[inline(always)]
    fn reciprocal(self, a: __m512) -> __m512 {
        // 14 bits, doubled by one Newton step.
        has!({
            let x = _mm512_rcp14_ps(a);
            _mm512_fmadd_ps(x, _mm512_fnmadd_ps(a, x, _mm512_set1_ps(1.0)), x)
        })
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        has!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn mla(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        has!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn min_raw(self, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn max_raw(self, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn round_even(self, a: __m512) -> __m512 {
        has!(_mm512_roundscale_ps::<0x08>(a))
    }
    #[inline(always)]
    fn floor(self, a: __m512) -> __m512 {
        has!(_mm512_roundscale_ps::<0x09>(a))
    }
    #[inline(always)]
    fn ceil(self, a: __m512) -> __m512 {
        has!(_mm512_roundscale_ps::<0x0a>(a))
    }
    #[inline(always)]
    fn trunc(self, a: __m512) -> __m512 {
        has!(_mm512_roundscale_ps::<0x0b>(a))
    }
    #[inline(always)]
    fn scale2(self, p: __m512, n: __m512) -> __m512 {
        has!(_mm512_scalef_ps(p, n))
    }
    #[inline(always)]
    fn split_exponent(self, x: __m512) -> (__m512, __m512) {
        // Scaling rounds its exponent down by itself.
        has!((_mm512_reduce_ps::<0x09>(x), x))
    }
    #[inline(always)]
    fn scale2_down(self, p: __m512, n: __m512) -> __m512 {
        self.scale2(p, n)
    }
    #[inline(always)]
    fn lt(self, a: __m512, b: __m512) -> __mmask16 {
        has!(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn le(self, a: __m512, b: __m512) -> __mmask16 {
        has!(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn eq(self, a: __m512, b: __m512) -> __mmask16 {
        has!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(a, b))
    }
    #[inline(always)]
    fn ne(self, a: __m512, b: __m512) -> __mmask16 {
        has!(_mm512_cmp_ps_mask::<_CMP_NEQ_UQ>(a, b))
    }
    #[inline(always)]
    fn select(self, m: __mmask16, a: __m512, b: __m512) -> __m512 {
        has!(_mm512_mask_blend_ps(m, b, a))
    }
    #[inline(always)]
    fn any(self, m: __mmask16) -> bool {
        m != 0
    }
    #[inline(always)]
    fn spread(self, a: __m512, lanes: __m512i) -> __m512 {
        has!(_mm512_permutexvar_ps(lanes, a))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        has!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn bits(self, a: __m512) -> __m512i {
        has!(_mm512_castps_si512(a))
    }
    #[inline(always)]
    fn of_bits(self, a: __m512i) -> __m512 {
        has!(_mm512_castsi512_ps(a))
    }
    #[inline(always)]
    fn to_int(self, a: __m512) -> __m512i {
        has!(_mm512_cvt_roundps_epi32::<NEAREST>(a))
    }
    #[inline(always)]
    fn to_float(self, a: __m512i) -> __m512 {
        has!(_mm512_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn add_i(self, a: __m512i, b: __m512i) -> __m512i {
        has!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i(self, a: __m512i, b: __m512i) -> __m512i {
        has!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn and_i(self, a: __m512i, b: __m512i) -> __m512i {
        has!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn or_i(self, a: __m512i, b: __m512i) -> __m512i {
        has!(_mm512_or_si512(a, b))
    }
    #[inline(always)]
    fn xor_i(self, a: __m512i, b: __m512i) -> __m512i {
        has!(_mm512_xor_si512(a, b))
    }
    #[inline(always)]
    fn shl_i<const N: u32>(self, a: __m512i) -> __m512i {
        has!(_mm512_slli_epi32::<N>(a))
    }
    #[inline(always)]
    fn shr_i<const N: u32>(self, a: __m512i) -> __m512i {
        has!(_mm512_srli_epi32::<N>(a))
    }
    #[inline(always)]
    fn eq_i(self, a: __m512i, b: __m512i) -> __mmask16 {
        has!(_mm512_cmpeq_epi32_mask(a, b))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m512 {
        mem!(widen_bf16_512(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16_n(self, p: *const u16, n: usize) -> __m512 {
        mem!(widen_bf16_512(_mm256_maskz_loadu_epi16(mask16(n), p.cast())))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m512) {
        mem!(_mm256_storeu_si256(p.cast(), narrow_bf16_512(v)))
    }
    #[inline(always)]
    unsafe fn store_bf16_2(self, p: *mut u16, a: __m512, b: __m512) {
        mem!(_mm512_storeu_si512(p.cast(), narrow_two_512(a, b)))
    }
    #[inline(always)]
    unsafe fn store_bf16_zip(self, p: *mut u32, a: __m512, b: __m512) {
        // SAFETY: the caller vouches for sixteen pairs and for the instruction of the conversion; the token for the others.
        unsafe {
            let order = _mm512_set_epi32(
                0x1f_000f, 0x1e_000e, 0x1d_000d, 0x1c_000c, 0x1b_000b, 0x1a_000a, 0x19_0009, 0x18_0008, 0x17_0007,
                0x16_0006, 0x15_0005, 0x14_0004, 0x13_0003, 0x12_0002, 0x11_0001, 0x10_0000,
            );
            _mm512_storeu_si512(p.cast(), _mm512_permutexvar_epi16(order, bf16_of_two_512(a, b)));
        }
    }
    #[inline(always)]
    unsafe fn store_bf16_n(self, p: *mut u16, v: __m512, n: usize) {
        mem!(_mm256_mask_storeu_epi16(p.cast(), mask16(n), narrow_bf16_512(v)))
    }
    #[inline(always)]
    fn round_bf16(self, v: __m512) -> __m512 {
        has!(_mm512_castsi512_ps(_mm512_and_si512(rounded_bf16_512(v), _mm512_set1_epi32(-65536))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m512 {
        mem!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_f16_n(self, p: *const u16, n: usize) -> __m512 {
        mem!(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask16(n), p.cast())))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m512) {
        mem!(_mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<NEAREST>(v)))
    }
    #[inline(always)]
    unsafe fn store_f16_n(self, p: *mut u16, v: __m512, n: usize) {
        mem!(_mm256_mask_storeu_epi16(p.cast(), mask16(n), _mm512_cvtps_ph::<NEAREST>(v)))
    }
    #[inline(always)]
    fn round_f16(self, v: __m512) -> __m512 {
        has!(_mm512_cvtph_ps(_mm512_cvtps_ph::<NEAREST>(v)))
    }
    #[inline(always)]
    fn reduce_add(self, v: __m512) -> f32 {
        has!(_mm512_reduce_add_ps(v))
    }
    #[inline(always)]
    fn reduce_max(self, v: __m512) -> f32 {
        has!(_mm512_reduce_max_ps(v))
    }
    #[inline(always)]
    fn reduce_min(self, v: __m512) -> f32 {
        has!(_mm512_reduce_min_ps(v))
    }
}

/// # Safety
/// AVX-512 F.
#[inline(always)]
unsafe fn widen_bf16_512(u: __m256i) -> __m512 {
    has!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(u))))
}

/// The vector with its upper halves rounded to bf16, to nearest even; the lower halves are anything. VCVTNEPS2BF16 would
/// flush denormals, so integers do the rounding: half a unit less one bit, and that bit where the last one kept is odd.
#[inline(always)]
fn rounded_bf16_512(v: __m512) -> __m512i {
    has!({
        let u = _mm512_castps_si512(v);
        let odd = _mm512_test_epi32_mask(u, _mm512_set1_epi32(0x1_0000));
        let r = _mm512_add_epi32(u, _mm512_set1_epi32(0x7fff));
        let r = _mm512_mask_add_epi32(r, odd, r, _mm512_set1_epi32(1));
        // What may have carried over: a NaN becomes itself, quiet (response 2 to its two classes), all others stay (0).
        let r = _mm512_fixupimm_ps::<0>(_mm512_castsi512_ps(r), v, _mm512_set1_epi32(0x22));
        _mm512_castps_si512(r)
    })
}

/// The upper halves of all elements of both, rounded.
#[inline(always)]
fn narrow_two_512(a: __m512, b: __m512) -> __m512i {
    has!({
        let upper = _mm512_set_epi16(
            63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11,
            9, 7, 5, 3, 1,
        );
        _mm512_permutex2var_epi16(rounded_bf16_512(a), upper, rounded_bf16_512(b))
    })
}

#[inline(always)]
fn narrow_bf16_512(v: __m512) -> __m256i {
    has!(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(rounded_bf16_512(v))))
}
