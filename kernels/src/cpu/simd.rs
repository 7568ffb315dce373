//! Vectors of f32, one interface over three instruction sets.
//!
//! A kernel body is written once, generic over [`Simd`] and marked `#[inline(always)]`; a thin wrapper per level carries
//! `#[target_feature]` and passes the level's token ([`Avx512`], [`Avx2`], [`Portable`]). Everything inlines into the
//! wrapper, so the body is compiled with the wrapper's instructions.
//!
//! Invariant: a token exists only where the processor has the instructions (its constructor is `unsafe` and says so).
//! That is why arithmetic on vectors is safe and only memory access is not.
//!
//! No closures inside bodies: a closure is a function of its own and would be compiled without the wrapper's features.

#![allow(missing_docs)]

/// Operations on vectors of [`Simd::LANES`] f32, and on i32 vectors and masks of as many lanes.
///
/// # Safety of the memory operations
/// `load`/`store` touch `LANES` elements from `p`, the `_n` forms the first `n <= LANES` only (missing lanes read as 0).
/// No alignment is required.
#[allow(clippy::missing_safety_doc)]
pub trait Simd: Copy {
    /// Lanes of a vector.
    const LANES: usize;
    /// f32 vector.
    type F: Copy;
    /// i32 vector.
    type I: Copy;
    /// Lane mask.
    type M: Copy;

    fn splat(self, x: f32) -> Self::F;
    unsafe fn load(self, p: *const f32) -> Self::F;
    unsafe fn load_n(self, p: *const f32, n: usize) -> Self::F;
    unsafe fn store(self, p: *mut f32, v: Self::F);
    unsafe fn store_n(self, p: *mut f32, v: Self::F, n: usize);
    /// Past the caches where the processor can: `p` is aligned to a vector, and [`Simd::fence`] comes before other threads
    /// may read.
    unsafe fn stream(self, p: *mut f32, v: Self::F);
    /// Makes what was streamed visible in order with later stores.
    fn fence(self);

    /// Asks for the cache line at an address, valid or not.
    fn prefetch(self, p: *const u8);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    fn sqrt(self, a: Self::F) -> Self::F;
    /// `1 / a` within 1 unit in the last place, for `a` in 1..=2^100.
    fn reciprocal(self, a: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, rounded once or twice, whichever is fast.
    fn mla(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a < b ? a : b`, hence `b` if either is NaN.
    fn min_raw(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a > b ? a : b`, hence `b` if either is NaN.
    fn max_raw(self, a: Self::F, b: Self::F) -> Self::F;
    fn round_even(self, a: Self::F) -> Self::F;
    fn floor(self, a: Self::F) -> Self::F;
    fn ceil(self, a: Self::F) -> Self::F;
    fn trunc(self, a: Self::F) -> Self::F;
    /// `p * 2^n` for integral `n` in -300..=300, rounded once except where the result is denormal.
    fn scale2(self, p: Self::F, n: Self::F) -> Self::F;
    /// `x - floor(x)`, and what [`scale2_down`](Self::scale2_down) takes for `floor(x)`: for `x <= 0`, of which all below
    /// -127 may count as -127. NaN stays NaN in the first.
    #[inline(always)]
    fn split_exponent(self, x: Self::F) -> (Self::F, Self::F) {
        let x = self.max_raw(self.splat(-127.0), x);
        let n = self.floor(x);
        (self.sub(x, n), n)
    }
    /// `p * 2^n` for `p` in 1..=2 and the other half of what [`split_exponent`](Self::split_exponent) gave, rounded once;
    /// denormal results may be 0. NaN in `p` stays.
    #[inline(always)]
    fn scale2_down(self, p: Self::F, n: Self::F) -> Self::F {
        // Exponent bits of -127 are those of 0.
        let exponent = self.add_i(self.to_int(n), self.splat_i(127));
        self.mul(p, self.of_bits(self.shl_i::<23>(exponent)))
    }

    fn lt(self, a: Self::F, b: Self::F) -> Self::M;
    fn le(self, a: Self::F, b: Self::F) -> Self::M;
    fn eq(self, a: Self::F, b: Self::F) -> Self::M;
    /// True where different or unordered.
    fn ne(self, a: Self::F, b: Self::F) -> Self::M;
    fn select(self, m: Self::M, a: Self::F, b: Self::F) -> Self::F;
    fn any(self, m: Self::M) -> bool;

    /// For each lane that of `a` whose number stands there.
    fn spread(self, a: Self::F, lanes: Self::I) -> Self::F;

    fn splat_i(self, x: i32) -> Self::I;
    fn bits(self, a: Self::F) -> Self::I;
    fn of_bits(self, a: Self::I) -> Self::F;
    /// Nearest integer (ties to even); lanes out of range give `i32::MIN`, or saturate on the portable level.
    fn to_int(self, a: Self::F) -> Self::I;
    fn to_float(self, a: Self::I) -> Self::F;
    fn add_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn and_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn or_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn xor_i(self, a: Self::I, b: Self::I) -> Self::I;
    fn shl_i<const N: u32>(self, a: Self::I) -> Self::I;
    /// Logical shift right.
    fn shr_i<const N: u32>(self, a: Self::I) -> Self::I;
    fn eq_i(self, a: Self::I, b: Self::I) -> Self::M;

    unsafe fn load_bf16(self, p: *const u16) -> Self::F;
    unsafe fn load_bf16_n(self, p: *const u16, n: usize) -> Self::F;
    unsafe fn store_bf16(self, p: *mut u16, v: Self::F);
    unsafe fn store_bf16_n(self, p: *mut u16, v: Self::F, n: usize);
    /// Lane by lane an element of each, `a` first, rounded to nearest even; denormals may become 0.
    ///
    /// # Safety
    /// The processor must have the bf16 instructions of the token's level, if there are any (`VCVTNE2PS2BF16`).
    #[inline(always)]
    unsafe fn store_bf16_zip(self, p: *mut u32, a: Self::F, b: Self::F) {
        let mut both = [0u16; 32];
        // SAFETY: the caller vouches for LANES pairs; a vector has sixteen lanes at most.
        unsafe {
            self.store_bf16(both.as_mut_ptr(), a);
            self.store_bf16(both.as_mut_ptr().add(16), b);
            for lane in 0..Self::LANES {
                p.add(lane).write(u32::from(both[lane]) | u32::from(both[16 + lane]) << 16);
            }
        }
    }
    unsafe fn load_f16(self, p: *const u16) -> Self::F;
    unsafe fn load_f16_n(self, p: *const u16, n: usize) -> Self::F;
    unsafe fn store_f16(self, p: *mut u16, v: Self::F);
    unsafe fn store_f16_n(self, p: *mut u16, v: Self::F, n: usize);
    /// Rounds through binary16 and back.
    fn round_f16(self, v: Self::F) -> Self::F;

    fn reduce_add(self, v: Self::F) -> f32;
    /// Largest lane; a NaN lane may or may not win.
    fn reduce_max(self, v: Self::F) -> f32;
    /// Smallest lane; a NaN lane may or may not win.
    fn reduce_min(self, v: Self::F) -> f32;

    /// Absolute value.
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        self.of_bits(self.and_i(self.bits(a), self.splat_i(0x7fff_ffff)))
    }

    /// Sign flipped, of NaN too.
    #[inline(always)]
    fn neg(self, a: Self::F) -> Self::F {
        self.of_bits(self.xor_i(self.bits(a), self.splat_i(i32::MIN)))
    }

    /// Magnitude of `a` (whose sign must be clear) with the sign of `s`.
    #[inline(always)]
    fn with_sign(self, a: Self::F, s: Self::F) -> Self::F {
        self.of_bits(self.or_i(self.bits(a), self.and_i(self.bits(s), self.splat_i(i32::MIN))))
    }

    /// Rounds to bfloat16 (nearest even; NaN stays NaN) and back.
    #[inline(always)]
    fn round_bf16(self, a: Self::F) -> Self::F {
        let u = self.bits(a);
        let odd = self.and_i(self.shr_i::<16>(u), self.splat_i(1));
        let r = self.and_i(self.add_i(self.add_i(u, self.splat_i(0x7fff)), odd), self.splat_i(-65536));
        self.select(self.ne(a, a), self.splat(f32::NAN), self.of_bits(r))
    }
}

/// Plain Rust, eight lanes. The compiler vectorises it as the target's baseline allows.
#[derive(Clone, Copy)]
pub struct Portable;

macro_rules! lanewise {
    ($a:expr, $f:expr) => {{
        let (a, mut r) = ($a, [Default::default(); 8]);
        let mut i = 0;
        while i < 8 {
            r[i] = $f(a[i]);
            i += 1;
        }
        r
    }};
    ($a:expr, $b:expr, $f:expr) => {{
        let (a, b, mut r) = ($a, $b, [Default::default(); 8]);
        let mut i = 0;
        while i < 8 {
            r[i] = $f(a[i], b[i]);
            i += 1;
        }
        r
    }};
}

/// Rounds to bfloat16, nearest even; NaN stays NaN.
#[inline(always)]
pub fn bf16_bits(x: f32) -> u16 {
    let u = x.to_bits();
    if x.is_nan() { 0x7fc0 | (u >> 16) as u16 } else { ((u + 0x7fff + ((u >> 16) & 1)) >> 16) as u16 }
}

/// Widens a bfloat16.
#[inline(always)]
pub fn bf16_value(u: u16) -> f32 {
    f32::from_bits((u as u32) << 16)
}

/// Rounds to binary16, nearest even.
#[inline(always)]
pub fn f16_bits(x: f32) -> u16 {
    half::f16::from_f32_const(x).to_bits()
}

/// Widens a binary16.
#[inline(always)]
pub fn f16_value(u: u16) -> f32 {
    half::f16::from_bits(u).to_f32_const()
}

impl Simd for Portable {
    const LANES: usize = 8;
    type F = [f32; 8];
    type I = [i32; 8];
    type M = [bool; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> [f32; 8] {
        // SAFETY: the caller vouches for 8 elements.
        unsafe { p.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_n(self, p: *const f32, n: usize) -> [f32; 8] {
        let mut r = [0.0; 8];
        // SAFETY: the caller vouches for `n <= 8` elements.
        unsafe { std::ptr::copy_nonoverlapping(p, r.as_mut_ptr(), n.min(8)) };
        r
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: [f32; 8]) {
        // SAFETY: the caller vouches for 8 elements.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn store_n(self, p: *mut f32, v: [f32; 8], n: usize) {
        // SAFETY: the caller vouches for `n <= 8` elements.
        unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), p, n.min(8)) }
    }
    #[inline(always)]
    unsafe fn stream(self, p: *mut f32, v: [f32; 8]) {
        // SAFETY: forwarded.
        unsafe { self.store(p, v) }
    }
    #[inline(always)]
    fn fence(self) {}
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
    #[inline(always)]
    fn add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        lanewise!(a, b, |x: f32, y: f32| x + y)
    }
    #[inline(always)]
    fn sub(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        lanewise!(a, b, |x: f32, y: f32| x - y)
    }
    #[inline(always)]
    fn mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        lanewise!(a, b, |x: f32, y: f32| x * y)
    }
    #[inline(always)]
    fn div(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        lanewise!(a, b, |x: f32, y: f32| x / y)
    }
    #[inline(always)]
    fn sqrt(self, a: [f32; 8]) -> [f32; 8] {
        lanewise!(a, f32::sqrt)
    }
    #[inline(always)]
    fn reciprocal(self, a: [f32; 8]) -> [f32; 8] {
        lanewise!(a, f32::recip)
    }
    #[inline(always)]
    fn fma(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        let mut r = [0.0; 8];
        let mut i = 0;
        while i < 8 {
            r[i] = a[i].mul_add(b[i], c[i]);
            i += 1;
        }
        r
    }
    #[inline(always)]
    fn mla(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn min_raw(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        lanewise!(a, b, |x: f32, y: f32| if x < y { x } else { y })
    }
    #[inline(always)]
    fn max_raw(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        lanewise!(a, b, |x: f32, y: f32| if x > y { x } else { y })
    }
    #[inline(always)]
    fn round_even(self, a: [f32; 8]) -> [f32; 8] {
        lanewise!(a, f32::round_ties_even)
    }
    #[inline(always)]
    fn floor(self, a: [f32; 8]) -> [f32; 8] {
        lanewise!(a, f32::floor)
    }
    #[inline(always)]
    fn ceil(self, a: [f32; 8]) -> [f32; 8] {
        lanewise!(a, f32::ceil)
    }
    #[inline(always)]
    fn trunc(self, a: [f32; 8]) -> [f32; 8] {
        lanewise!(a, f32::trunc)
    }
    #[inline(always)]
    fn scale2(self, p: [f32; 8], n: [f32; 8]) -> [f32; 8] {
        let mut r = [0.0; 8];
        let mut i = 0;
        while i < 8 {
            let (n, half) = (n[i] as i32, n[i] as i32 >> 1);
            let two = |e: i32| f32::from_bits(((e.clamp(-127, 128) + 127) as u32) << 23);
            r[i] = p[i] * two(half) * two(n - half);
            i += 1;
        }
        r
    }
    #[inline(always)]
    fn lt(self, a: [f32; 8], b: [f32; 8]) -> [bool; 8] {
        lanewise!(a, b, |x: f32, y: f32| x < y)
    }
    #[inline(always)]
    fn le(self, a: [f32; 8], b: [f32; 8]) -> [bool; 8] {
        lanewise!(a, b, |x: f32, y: f32| x <= y)
    }
    #[inline(always)]
    fn eq(self, a: [f32; 8], b: [f32; 8]) -> [bool; 8] {
        lanewise!(a, b, |x: f32, y: f32| x == y)
    }
    #[inline(always)]
    fn ne(self, a: [f32; 8], b: [f32; 8]) -> [bool; 8] {
        lanewise!(a, b, |x: f32, y: f32| x != y)
    }
    #[inline(always)]
    fn select(self, m: [bool; 8], a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        let mut r = [0.0; 8];
        let mut i = 0;
        while i < 8 {
            r[i] = if m[i] { a[i] } else { b[i] };
            i += 1;
        }
        r
    }
    #[inline(always)]
    fn any(self, m: [bool; 8]) -> bool {
        m != [false; 8]
    }
    #[inline(always)]
    fn spread(self, a: [f32; 8], lanes: [i32; 8]) -> [f32; 8] {
        lanes.map(|lane| a[lane as usize & 7])
    }
    #[inline(always)]
    fn splat_i(self, x: i32) -> [i32; 8] {
        [x; 8]
    }
    #[inline(always)]
    fn bits(self, a: [f32; 8]) -> [i32; 8] {
        lanewise!(a, |x: f32| x.to_bits() as i32)
    }
    #[inline(always)]
    fn of_bits(self, a: [i32; 8]) -> [f32; 8] {
        lanewise!(a, |x: i32| f32::from_bits(x as u32))
    }
    #[inline(always)]
    fn to_int(self, a: [f32; 8]) -> [i32; 8] {
        lanewise!(a, |x: f32| x.round_ties_even() as i32)
    }
    #[inline(always)]
    fn to_float(self, a: [i32; 8]) -> [f32; 8] {
        lanewise!(a, |x: i32| x as f32)
    }
    #[inline(always)]
    fn add_i(self, a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        lanewise!(a, b, i32::wrapping_add)
    }
    #[inline(always)]
    fn sub_i(self, a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        lanewise!(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    fn and_i(self, a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        lanewise!(a, b, |x: i32, y: i32| x & y)
    }
    #[inline(always)]
    fn or_i(self, a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        lanewise!(a, b, |x: i32, y: i32| x | y)
    }
    #[inline(always)]
    fn xor_i(self, a: [i32; 8], b: [i32; 8]) -> [i32; 8] {
        lanewise!(a, b, |x: i32, y: i32| x ^ y)
    }
    #[inline(always)]
    fn shl_i<const N: u32>(self, a: [i32; 8]) -> [i32; 8] {
        lanewise!(a, |x: i32| x << N)
    }
    #[inline(always)]
    fn shr_i<const N: u32>(self, a: [i32; 8]) -> [i32; 8] {
        lanewise!(a, |x: i32| ((x as u32) >> N) as i32)
    }
    #[inline(always)]
    fn eq_i(self, a: [i32; 8], b: [i32; 8]) -> [bool; 8] {
        lanewise!(a, b, |x: i32, y: i32| x == y)
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u16) -> [f32; 8] {
        // SAFETY: the caller vouches for 8 elements.
        let u = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        lanewise!(u, bf16_value)
    }
    #[inline(always)]
    unsafe fn load_bf16_n(self, p: *const u16, n: usize) -> [f32; 8] {
        let mut u = [0; 8];
        // SAFETY: the caller vouches for `n <= 8` elements.
        unsafe { std::ptr::copy_nonoverlapping(p, u.as_mut_ptr(), n.min(8)) };
        lanewise!(u, bf16_value)
    }
    #[inline(always)]
    unsafe fn store_bf16(self, p: *mut u16, v: [f32; 8]) {
        // SAFETY: the caller vouches for 8 elements.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(lanewise!(v, bf16_bits)) }
    }
    #[inline(always)]
    unsafe fn store_bf16_n(self, p: *mut u16, v: [f32; 8], n: usize) {
        let u: [u16; 8] = lanewise!(v, bf16_bits);
        // SAFETY: the caller vouches for `n <= 8` elements.
        unsafe { std::ptr::copy_nonoverlapping(u.as_ptr(), p, n.min(8)) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u16) -> [f32; 8] {
        // SAFETY: the caller vouches for 8 elements.
        let u = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        lanewise!(u, f16_value)
    }
    #[inline(always)]
    unsafe fn load_f16_n(self, p: *const u16, n: usize) -> [f32; 8] {
        let mut u = [0; 8];
        // SAFETY: the caller vouches for `n <= 8` elements.
        unsafe { std::ptr::copy_nonoverlapping(p, u.as_mut_ptr(), n.min(8)) };
        lanewise!(u, f16_value)
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u16, v: [f32; 8]) {
        // SAFETY: the caller vouches for 8 elements.
        unsafe { p.cast::<[u16; 8]>().write_unaligned(lanewise!(v, f16_bits)) }
    }
    #[inline(always)]
    unsafe fn store_f16_n(self, p: *mut u16, v: [f32; 8], n: usize) {
        let u: [u16; 8] = lanewise!(v, f16_bits);
        // SAFETY: the caller vouches for `n <= 8` elements.
        unsafe { std::ptr::copy_nonoverlapping(u.as_ptr(), p, n.min(8)) }
    }
    #[inline(always)]
    fn round_f16(self, v: [f32; 8]) -> [f32; 8] {
        lanewise!(v, |x: f32| f16_value(f16_bits(x)))
    }
    #[inline(always)]
    fn reduce_add(self, v: [f32; 8]) -> f32 {
        ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]))
    }
    #[inline(always)]
    fn reduce_max(self, v: [f32; 8]) -> f32 {
        v.iter().fold(f32::NEG_INFINITY, |m, &x| if x > m { x } else { m })
    }
    #[inline(always)]
    fn reduce_min(self, v: [f32; 8]) -> f32 {
        v.iter().fold(f32::INFINITY, |m, &x| if x < m { x } else { m })
    }
}

#[cfg(target_arch = "x86_64")]
pub use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Simd;
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

    // Arithmetic: the expression is evaluated as is.
    macro_rules! has {
        ($e:expr) => {
            // SAFETY: the token vouches for the instructions.
            unsafe { $e }
        };
    }
    // Memory access.
    macro_rules! mem {
        ($e:expr) => {
            // SAFETY: the token vouches for the instructions, the caller for the memory.
            unsafe { $e }
        };
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
            mem!(_mm256_storeu_si256(p.cast(), narrow_bf16_512(self, v)))
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
            mem!(_mm256_mask_storeu_epi16(p.cast(), mask16(n), narrow_bf16_512(self, v)))
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

    // VCVTNEPS2BF16 would flush denormals, so integers do the rounding.
    #[inline(always)]
    fn narrow_bf16_512(s: Avx512, v: __m512) -> __m256i {
        has!(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(s.round_bf16(v)))))
    }

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
}

/// A floating element type vectors are loaded from and stored to.
///
/// # Safety of the memory operations
/// Offsets are in elements; as for [`Simd`]'s own.
#[allow(clippy::missing_safety_doc)]
pub trait Element: Copy {
    /// Bytes.
    const SIZE: usize;

    unsafe fn load<S: Simd>(self, s: S, p: *const u8, at: usize) -> S::F;
    unsafe fn load_n<S: Simd>(self, s: S, p: *const u8, at: usize, n: usize) -> S::F;
    unsafe fn store<S: Simd>(self, s: S, p: *mut u8, at: usize, v: S::F);
    unsafe fn store_n<S: Simd>(self, s: S, p: *mut u8, at: usize, v: S::F, n: usize);
    unsafe fn get(self, p: *const u8, at: isize) -> f32;
    unsafe fn put(self, p: *mut u8, at: isize, x: f32);
}

macro_rules! element {
    ($(#[$meta:meta])* $name:ident, $t:ty, $load:ident, $load_n:ident, $store:ident, $store_n:ident, $get:expr, $put:expr) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        pub struct $name;

        impl Element for $name {
            const SIZE: usize = size_of::<$t>();

            #[inline(always)]
            unsafe fn load<S: Simd>(self, s: S, p: *const u8, at: usize) -> S::F {
                // SAFETY: the caller vouches for the memory.
                unsafe { s.$load(p.cast::<$t>().add(at)) }
            }
            #[inline(always)]
            unsafe fn load_n<S: Simd>(self, s: S, p: *const u8, at: usize, n: usize) -> S::F {
                // SAFETY: the caller vouches for the memory.
                unsafe { s.$load_n(p.cast::<$t>().add(at), n) }
            }
            #[inline(always)]
            unsafe fn store<S: Simd>(self, s: S, p: *mut u8, at: usize, v: S::F) {
                // SAFETY: the caller vouches for the memory.
                unsafe { s.$store(p.cast::<$t>().add(at), v) }
            }
            #[inline(always)]
            unsafe fn store_n<S: Simd>(self, s: S, p: *mut u8, at: usize, v: S::F, n: usize) {
                // SAFETY: the caller vouches for the memory.
                unsafe { s.$store_n(p.cast::<$t>().add(at), v, n) }
            }
            #[inline(always)]
            unsafe fn get(self, p: *const u8, at: isize) -> f32 {
                // SAFETY: the caller vouches for the memory.
                $get(unsafe { p.cast::<$t>().offset(at).read_unaligned() })
            }
            #[inline(always)]
            unsafe fn put(self, p: *mut u8, at: isize, x: f32) {
                // SAFETY: the caller vouches for the memory.
                unsafe { p.cast::<$t>().offset(at).write_unaligned($put(x)) }
            }
        }
    };
}

element!(
    /// IEEE binary32 in memory.
    ElementF32, f32, load, load_n, store, store_n, std::convert::identity, std::convert::identity
);
element!(
    /// IEEE binary16 in memory.
    ElementF16, u16, load_f16, load_f16_n, store_f16, store_f16_n, f16_value, f16_bits
);
element!(
    /// bfloat16 in memory.
    ElementBf16, u16, load_bf16, load_bf16_n, store_bf16, store_bf16_n, bf16_value, bf16_bits
);

/// Evaluates an expression with the element token of a floating type, or another for the types vectors do not load.
#[macro_export]
#[doc(hidden)]
macro_rules! with_element {
    ($dtype:expr, $e:ident => $body:expr, else $other:expr) => {
        match $dtype {
            $crate::dtype::DType::F32 => {
                let $e = $crate::cpu::simd::ElementF32;
                $body
            }
            $crate::dtype::DType::F16 => {
                let $e = $crate::cpu::simd::ElementF16;
                $body
            }
            $crate::dtype::DType::BF16 => {
                let $e = $crate::cpu::simd::ElementBf16;
                $body
            }
            _ => $other,
        }
    };
}

/// Instantiates a generic body for every level: defines `fn $name(isa, args...)` that dispatches to it.
///
/// The body is called as `$body::<S>(s, args...)` and must be `#[inline(always)]`.
#[macro_export]
#[doc(hidden)]
macro_rules! simd_dispatch {
    ($(#[$meta:meta])* $vis:vis unsafe fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx512($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the function's features make the token valid; the rest is the caller's promise.
                unsafe { $body($crate::cpu::simd::Avx512::new(), $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            #[allow(clippy::too_many_arguments)]
            unsafe fn avx2($($arg: $ty),*) $(-> $ret)? {
                // SAFETY: the function's features make the token valid; the rest is the caller's promise.
                unsafe { $body($crate::cpu::simd::Avx2::new(), $($arg),*) }
            }
            match isa.clamp() {
                // SAFETY: `clamp` returned a level this processor runs.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Isa::Avx2 => unsafe { avx2($($arg),*) },
                // SAFETY: the caller's promise.
                _ => unsafe { $body($crate::cpu::simd::Portable, $($arg),*) },
            }
        }
    };
}
