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
    /// As [`stream`](Self::stream), rounded to a 16-bit type: `p` is aligned to as many bytes as it takes.
    unsafe fn stream_f16(self, p: *mut u16, v: Self::F);
    /// The same for two vectors, one behind the other.
    unsafe fn stream_bf16_2(self, p: *mut u16, a: Self::F, b: Self::F);
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
    /// Two vectors, one behind the other.
    #[inline(always)]
    unsafe fn store_bf16_2(self, p: *mut u16, a: Self::F, b: Self::F) {
        // SAFETY: the caller vouches for both.
        unsafe {
            self.store_bf16(p, a);
            self.store_bf16(p.add(Self::LANES), b);
        }
    }
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

/// Arithmetic of the files of one instruction set: the expression as it is.
#[cfg(target_arch = "x86_64")]
macro_rules! has {
    ($e:expr) => {
        // SAFETY: the token vouches for the instructions.
        unsafe { $e }
    };
}
/// Memory access of those.
#[cfg(target_arch = "x86_64")]
macro_rules! mem {
    ($e:expr) => {
        // SAFETY: the token vouches for the instructions, the caller for the memory.
        unsafe { $e }
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) use {has, mem};

pub use super::simd_portable::Portable;
#[cfg(target_arch = "x86_64")]
pub use super::{simd_avx2::Avx2, simd_avx512::Avx512};

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
