//! Vectors in plain Rust.

use super::simd::{Simd, bf16_bits, bf16_value, f16_bits, f16_value};

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
    unsafe fn stream_bf16_2(self, p: *mut u16, a: [f32; 8], b: [f32; 8]) {
        // SAFETY: forwarded.
        unsafe { self.store_bf16_2(p, a, b) }
    }
    #[inline(always)]
    unsafe fn stream_f16(self, p: *mut u16, v: [f32; 8]) {
        // SAFETY: forwarded.
        unsafe { self.store_f16(p, v) }
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
