//! Vectors of AVX2.

use super::simd::{Simd, has, mem};
use std::arch::x86_64::*;

/// x86-64 with AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub struct Avx2(());

impl Avx2 {
    /// The token.
    ///
    /// # Safety
    /// The processor must have AVX2, FMA and F16C.
    #[inline(always)]
    pub unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

/// `MASK[8 - n..]` has `n` set lanes followed by clear ones.
static MASK: [i32; 16] = [-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0];

#[inline(always)]
fn mask8(n: usize) -> __m256i {
    // SAFETY: the offset is in 0..=8, so 8 elements follow it; callers hold a token.
    unsafe { _mm256_loadu_si256(MASK.as_ptr().add(8 - n.min(8)).cast()) }
}

#[inline(always)]
unsafe fn load16_n(p: *const u16, n: usize) -> __m128i {
    if n >= 8 {
        // SAFETY: the caller vouches for them.
        return unsafe { _mm_loadu_si128(p.cast()) };
    }
    let mut u = [0u16; 8];
    // SAFETY: the caller vouches for `n <= 8` elements.
    unsafe {
        std::ptr::copy_nonoverlapping(p, u.as_mut_ptr(), n);
        _mm_loadu_si128(u.as_ptr().cast())
    }
}

#[inline(always)]
unsafe fn store16_n(p: *mut u16, v: __m128i, n: usize) {
    if n >= 8 {
        // SAFETY: the caller vouches for them.
        return unsafe { _mm_storeu_si128(p.cast(), v) };
    }
    let mut u = [0u16; 8];
    // SAFETY: the caller vouches for `n <= 8` elements.
    unsafe {
        _mm_storeu_si128(u.as_mut_ptr().cast(), v);
        std::ptr::copy_nonoverlapping(u.as_ptr(), p, n);
    }
}

impl Simd for Avx2 {
    const LANES: usize = 8;
    type F = __m256;
    type I = __m256i;
    type M = __m256;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        has!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        mem!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> __m256 {
        mem!(_mm256_maskload_ps(p, mask8(n)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        mem!(_mm256_storeu_ps(p, v))
    }
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, v: __m256, n: usize) {
        // AMD's masked stores take 19 cycles (Zen 3), these one to three.
        mem!({
            if n >= 8 {
                return _mm256_storeu_ps(p, v);
            }
            let (mut p, mut rest) = (p, _mm256_castps256_ps128(v));
            if n & 4 != 0 {
                _mm_storeu_ps(p, rest);
                (p, rest) = (p.add(4), _mm256_extractf128_ps::<1>(v));
            }
            if n & 2 != 0 {
                _mm_storel_pd(p.cast(), _mm_castps_pd(rest));
                (p, rest) = (p.add(2), _mm_movehl_ps(rest, rest));
            }
            if n & 1 != 0 {
                _mm_store_ss(p, rest);
            }
        })
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: __m256) {
        mem!(_mm256_stream_ps(p, v))
    }
    #[inline(always)]
    unsafe fn stream_bf16_2(self, p: *mut u16, a: __m256, b: __m256) {
        mem!({
            _mm_stream_si128(p.cast(), narrow_bf16_256(self, a));
            _mm_stream_si128(p.add(8).cast(), narrow_bf16_256(self, b));
        })
    }
    #[inline(always)]
    unsafe fn stream_f16(self, p: *mut u16, v: __m256) {
        mem!(_mm_stream_si128(p.cast(), _mm256_cvtps_ph::<0>(v)))
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
    fn add(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn sqrt(self, a: __m256) -> __m256 {
        has!(_mm256_sqrt_ps(a))
    }
    #[inline(always)]
    fn reciprocal(self, a: __m256) -> __m256 {
        has!(_mm256_div_ps(_mm256_set1_ps(1.0), a))
    }
    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        has!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn mla(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        has!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn min_raw(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn max_raw(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn round_even(self, a: __m256) -> __m256 {
        has!(_mm256_round_ps::<NEAREST>(a))
    }
    #[inline(always)]
    fn floor(self, a: __m256) -> __m256 {
        has!(_mm256_floor_ps(a))
    }
    #[inline(always)]
    fn ceil(self, a: __m256) -> __m256 {
        has!(_mm256_ceil_ps(a))
    }
    #[inline(always)]
    fn trunc(self, a: __m256) -> __m256 {
        has!(_mm256_round_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(a))
    }
    #[inline(always)]
    fn scale2(self, p: __m256, n: __m256) -> __m256 {
        // In two factors, so that neither leaves the range of normal exponents.
        has!({
            let (n, bias) = (_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            let half = _mm256_srai_epi32::<1>(n);
            let low = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias)));
            let rest = _mm256_sub_epi32(n, half);
            let high = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias)));
            _mm256_mul_ps(_mm256_mul_ps(p, low), high)
        })
    }
    #[inline(always)]
    fn lt(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
    }
    #[inline(always)]
    fn le(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b))
    }
    #[inline(always)]
    fn eq(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))
    }
    #[inline(always)]
    fn ne(self, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_cmp_ps::<_CMP_NEQ_UQ>(a, b))
    }
    #[inline(always)]
    fn select(self, m: __m256, a: __m256, b: __m256) -> __m256 {
        has!(_mm256_blendv_ps(b, a, m))
    }
    #[inline(always)]
    fn any(self, m: __m256) -> bool {
        has!(_mm256_movemask_ps(m) != 0)
    }
    #[inline(always)]
    fn spread(self, a: __m256, lanes: __m256i) -> __m256 {
        has!(_mm256_permutevar8x32_ps(a, lanes))
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> __m256i {
        has!(_mm256_set1_epi32(x))
    }
    #[inline(always)]
    fn bits(self, a: __m256) -> __m256i {
        has!(_mm256_castps_si256(a))
    }
    #[inline(always)]
    fn of_bits(self, a: __m256i) -> __m256 {
        has!(_mm256_castsi256_ps(a))
    }
    #[inline(always)]
    fn to_int(self, a: __m256) -> __m256i {
        has!(_mm256_cvtps_epi32(_mm256_round_ps::<NEAREST>(a)))
    }
    #[inline(always)]
    fn to_float(self, a: __m256i) -> __m256 {
        has!(_mm256_cvtepi32_ps(a))
    }
    #[inline(always)]
    fn add_i(self, a: __m256i, b: __m256i) -> __m256i {
        has!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_i(self, a: __m256i, b: __m256i) -> __m256i {
        has!(_mm256_sub_epi32(a, b))
    }
    #[inline(always)]
    fn and_i(self, a: __m256i, b: __m256i) -> __m256i {
        has!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn or_i(self, a: __m256i, b: __m256i) -> __m256i {
        has!(_mm256_or_si256(a, b))
    }
    #[inline(always)]
    fn xor_i(self, a: __m256i, b: __m256i) -> __m256i {
        has!(_mm256_xor_si256(a, b))
    }
    #[inline(always)]
    fn shl_i<const N: u32>(self, a: __m256i) -> __m256i {
        has!(_mm256_sll_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }
    #[inline(always)]
    fn shr_i<const N: u32>(self, a: __m256i) -> __m256i {
        has!(_mm256_srl_epi32(a, _mm_cvtsi32_si128(N as i32)))
    }
    #[inline(always)]
    fn eq_i(self, a: __m256i, b: __m256i) -> __m256 {
        has!(_mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> __m256 {
        mem!(widen_bf16_256(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_bf16_n(self, p: *const u16, n: usize) -> __m256 {
        mem!(widen_bf16_256(load16_n(p, n)))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: __m256) {
        mem!(_mm_storeu_si128(p.cast(), narrow_bf16_256(self, v)))
    }
    #[inline(always)]
    unsafe fn store_bf16_n(self, p: *mut u16, v: __m256, n: usize) {
        mem!(store16_n(p, narrow_bf16_256(self, v), n))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> __m256 {
        mem!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn load_f16_n(self, p: *const u16, n: usize) -> __m256 {
        mem!(_mm256_cvtph_ps(load16_n(p, n)))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: __m256) {
        mem!(_mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<0>(v)))
    }
    #[inline(always)]
    unsafe fn store_f16_n(self, p: *mut u16, v: __m256, n: usize) {
        mem!(store16_n(p, _mm256_cvtps_ph::<0>(v), n))
    }
    #[inline(always)]
    fn round_f16(self, v: __m256) -> __m256 {
        has!(_mm256_cvtph_ps(_mm256_cvtps_ph::<0>(v)))
    }
    #[inline(always)]
    fn reduce_add(self, v: __m256) -> f32 {
        has!({
            let q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_add_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)))
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: __m256) -> f32 {
        has!({
            let q = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_max_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)))
        })
    }
    #[inline(always)]
    fn reduce_min(self, v: __m256) -> f32 {
        has!({
            let q = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_min_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_min_ss(d, _mm_movehdup_ps(d)))
        })
    }
}

/// # Safety
/// AVX2.
#[inline(always)]
unsafe fn widen_bf16_256(u: __m128i) -> __m256 {
    has!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(u))))
}

#[inline(always)]
fn narrow_bf16_256(s: Avx2, v: __m256) -> __m128i {
    has!({
        let u = _mm256_srli_epi32::<16>(_mm256_castps_si256(s.round_bf16(v)));
        let packed = _mm256_packus_epi32(u, u);
        _mm256_castsi256_si128(_mm256_permute4x64_epi64::<0b1000>(packed))
    })
}
