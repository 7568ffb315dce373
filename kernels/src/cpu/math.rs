//! Elementary functions on vectors of f32.
//!
//! Errors are against exact arithmetic over the whole finite range unless said otherwise (see the tests): `exp`, `log`,
//! `log2`, `log10`, `sin`, `cos`, `tanh`, `atan2`, `erf`, `sigmoid`, `pow` within 2 units in the last place or 3e-7 relative;
//! `gelu` within 6e-7 relative, including the negative tail where the textbook formula cancels. NaN and infinities come out
//! where PyTorch has them.
//!
//! Polynomials: `exp`, `log`, `sin`, `cos` and `tanh` use the coefficients of Moshier's Cephes; `erf`, `gelu`, `log2`
//! and `atan2` use minimax fits made for this file (relative error of the first two: 1.3e-9 and 3.2e-8).

use super::simd::Simd;
use std::f32::consts;

#[inline(always)]
fn poly<S: Simd, const N: usize>(s: S, x: S::F, c: [f32; N]) -> S::F {
    let mut p = s.splat(c[0]);
    let mut i = 1;
    while i < N {
        p = s.mla(p, x, s.splat(c[i]));
        i += 1;
    }
    p
}

/// `e^x`; 0 below -104, infinity above 88.8.
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // The operand order makes NaN survive the clamp.
    let (n, r) = exp_reduce(s, s.min_raw(s.splat(89.0), x));
    exp_reduced(s, n, r)
}

/// `e^(x + low)` for `x` below 89 and `low` below half a unit in its last place.
#[inline(always)]
fn exp_split<S: Simd>(s: S, x: S::F, low: S::F) -> S::F {
    let (n, r) = exp_reduce(s, x);
    exp_reduced(s, n, s.add(r, low))
}

/// The integer and the rest that `x` is `n log 2 + r` of, or -104 where it is below that.
#[inline(always)]
fn exp_reduce<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let x = s.max_raw(s.splat(-104.0), x);
    let n = s.round_even(s.mul(x, s.splat(consts::LOG2_E)));
    let r = s.mla(n, s.splat(-0.693_359_4), x);
    (n, s.mla(n, s.splat(2.121_944_4e-4), r))
}

/// `2^n e^r`.
#[inline(always)]
fn exp_reduced<S: Simd>(s: S, n: S::F, r: S::F) -> S::F {
    let p = poly(s, r, [1.987_569_1e-4, 1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5]);
    let p = s.add(s.mla(p, s.mul(r, r), r), s.splat(1.0));
    s.scale2(p, n)
}

/// `2^x` for `x <= 0`, NaN included; results below 2^-126 may be 0. The cheap exponential of online softmax: the fit over
/// [0, 1) is within 9e-8 and exact at 0.
#[inline(always)]
pub fn exp2_nonpositive<S: Simd>(s: S, x: S::F) -> S::F {
    let (r, n) = s.split_exponent(x);
    let p = poly(s, r, [1.867_130_4e-3, 9.017_03e-3, 5.579_991_4e-2, 2.401_644_4e-1, 6.931_513e-1, 1.0]);
    s.scale2_down(p, n)
}

/// As [`exp2_nonpositive`] within 8e-5 relative: for results that are rounded to bf16.
#[inline(always)]
pub fn exp2_nonpositive_rough<S: Simd>(s: S, x: S::F) -> S::F {
    let (r, n) = s.split_exponent(x);
    let p = poly(s, r, [7.802_452e-2, 2.260_671_7e-1, 6.958_335e-1, 9.999_252e-1]);
    s.scale2_down(p, n)
}

/// Natural logarithm; NaN below 0, -infinity at 0.
#[inline(always)]
pub fn log<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    // Denormals are brought into range first.
    let tiny = s.lt(x, s.splat(f32::MIN_POSITIVE));
    let y = s.select(tiny, s.mul(x, s.splat(8_388_608.0)), x);
    let bits = s.bits(y);
    let e = s.to_float(s.sub_i(s.shr_i::<23>(bits), s.splat_i(126)));
    let e = s.select(tiny, s.sub(e, s.splat(23.0)), e);
    let m = s.of_bits(s.or_i(s.and_i(bits, s.splat_i(0x007f_ffff)), s.splat_i(0x3f00_0000)));
    // m in [0.5, 1): below sqrt(1/2) double it, so that m - 1 is in [-0.3, 0.42].
    let low = s.lt(m, s.splat(consts::FRAC_1_SQRT_2));
    let e = s.select(low, s.sub(e, one), e);
    let f = s.sub(s.select(low, s.add(m, m), m), one);
    let z = s.mul(f, f);
    let p = poly(
        s,
        f,
        [
            7.037_684e-2,
            -1.151_461e-1,
            1.167_699_9e-1,
            -1.242_014_1e-1,
            1.424_932_3e-1,
            -1.666_805_7e-1,
            2.000_071_5e-1,
            -2.499_999_4e-1,
            3.333_333e-1,
        ],
    );
    let r = s.mul(s.mul(p, f), z);
    let r = s.mla(e, s.splat(-2.121_944_4e-4), r);
    let r = s.mla(z, s.splat(-0.5), r);
    let r = s.mla(e, s.splat(0.693_359_4), s.add(f, r));
    log_of(s, x, r)
}

/// Largest magnitude the vector reduction of `sin` and `cos` is used for; beyond it lanes go through f64.
const TRIG_LIMIT: f32 = 30_000.0;

/// Sine (`SHIFT` 0) or cosine (`SHIFT` 1).
#[inline(always)]
fn trig<S: Simd, const SHIFT: i32>(s: S, x: S::F) -> S::F {
    let n = s.round_even(s.mul(x, s.splat(consts::FRAC_2_PI)));
    // Three-term Cody-Waite reduction; with fused multiply-add each term leaves a relative error of 2^-24 only.
    let r = s.fma(n, s.splat(-1.570_796_4), x);
    let r = s.fma(n, s.splat(4.371_139e-8), r);
    let r = s.fma(n, s.splat(1.715_124_5e-15), r);
    let q = s.add_i(s.to_int(n), s.splat_i(SHIFT));
    let z = s.mul(r, r);
    let sin = s.mla(s.mul(poly(s, z, [-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1]), z), r, r);
    let cos = poly(s, z, [2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2]);
    let cos = s.mla(s.mul(cos, z), z, s.mla(z, s.splat(-0.5), s.splat(1.0)));
    let odd = s.eq_i(s.and_i(q, s.splat_i(1)), s.splat_i(1));
    let y = s.select(odd, cos, sin);
    let flip = s.shl_i::<30>(s.and_i(q, s.splat_i(2)));
    let y = s.of_bits(s.xor_i(s.bits(y), flip));
    let large = s.lt(s.splat(TRIG_LIMIT), s.abs(x));
    let infinite = s.eq(s.abs(x), s.splat(f32::INFINITY));
    let y = s.select(infinite, s.splat(f32::NAN), y);
    if s.any(large) { trig_large::<S, SHIFT>(s, x, y) } else { y }
}

/// Replaces the lanes of `y` whose argument is beyond [`TRIG_LIMIT`] by results of f64 arithmetic.
#[inline(never)]
fn trig_large<S: Simd, const SHIFT: i32>(s: S, x: S::F, y: S::F) -> S::F {
    let (mut a, mut b) = ([0f32; 16], [0f32; 16]);
    // SAFETY: LANES <= 16.
    unsafe {
        s.store(a.as_mut_ptr(), x);
        s.store(b.as_mut_ptr(), y);
    }
    for (x, y) in a.iter().zip(&mut b).take(S::LANES) {
        if x.is_finite() && x.abs() > TRIG_LIMIT {
            *y = if SHIFT == 0 { (*x as f64).sin() } else { (*x as f64).cos() } as f32;
        }
    }
    // SAFETY: LANES <= 16.
    unsafe { s.load(b.as_ptr()) }
}

/// Sine of an angle in radians.
#[inline(always)]
pub fn sin<S: Simd>(s: S, x: S::F) -> S::F {
    // The reduction loses the sign of zero.
    s.select(s.eq(x, s.splat(0.0)), x, trig::<S, 0>(s, x))
}

/// Cosine of an angle in radians.
#[inline(always)]
pub fn cos<S: Simd>(s: S, x: S::F) -> S::F {
    trig::<S, 1>(s, x)
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let a = s.abs(x);
    let z = s.mul(x, x);
    let p = poly(s, z, [-5.704_988_7e-3, 2.063_908_8e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1]);
    let small = s.mla(s.mul(p, z), a, a);
    let one = s.splat(1.0);
    // 1 - 2 / (e^(2a) + 1); past 9.1 this is 1.
    let e = exp(s, s.add(a, a));
    let large = s.sub(one, s.div(s.splat(2.0), s.add(e, one)));
    let y = s.select(s.lt(a, s.splat(0.625)), small, large);
    s.select(s.ne(x, x), x, s.with_sign(y, x))
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.neg(x))))
}

/// `x * sigmoid(x)`; NaN at -infinity, as in PyTorch.
#[inline(always)]
pub fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp(s, s.neg(x))))
}

/// The probability that a standard normal variable exceeds `a`, for `a >= 0`: 0 from 15 on, NaN for NaN.
#[inline(always)]
fn normal_tail<S: Simd>(s: S, a: S::F) -> S::F {
    // exp(-a^2 / 2) t Q(2t - 1) with t = 1 / (1 + 0.35 a). The rounding error of a^2 is put back.
    let a = s.min_raw(s.splat(20.0), a);
    let t = s.reciprocal(s.mla(a, s.splat(0.35), s.splat(1.0)));
    let q = poly(
        s,
        s.sub(s.add(t, t), s.splat(1.0)),
        [
            -1.138_97e-4,
            2.140_569e-4,
            6.900_616_6e-4,
            -1.754_380_3e-3,
            -5.108_740_6e-3,
            1.023_385_8e-2,
            7.109_894_6e-2,
            1.714_958_1e-1,
            2.532_442_8e-1,
        ],
    );
    let p = s.mul(q, t);
    let h = s.mul(a, a);
    let low = s.mul(s.fma(a, a, s.neg(h)), s.splat(-0.5));
    s.mul(exp_split(s, s.mul(h, s.splat(-0.5)), low), p)
}

/// Exact GELU, `x * Phi(x)`: infinity at infinity and NaN at -infinity, as the formula has it. PyTorch's kernels agree for
/// f16 and on GPUs; its vector code for f32 and bf16 gives NaN at both.
#[inline(always)]
pub fn gelu<S: Simd>(s: S, x: S::F) -> S::F {
    if S::LANES == 16 {
        let y = gelu_by_pieces(s, x);
        let beyond = s.lt(x, s.splat(-PIECES_END));
        return if s.any(beyond) { s.select(beyond, s.mul(x, normal_tail(s, s.abs(x))), y) } else { y };
    }
    let tail = normal_tail(s, s.abs(x));
    s.mul(x, s.select(s.lt(x, s.splat(0.0)), tail, s.sub(s.splat(1.0), tail)))
}

/// Width of the pieces of [`TAIL_PIECES`]: a multiple of it, and what is left of a number near one, are exact.
const PIECE: f32 = 23.0 / 64.0;
/// What the pieces reach to.
const PIECES_END: f32 = 15.499 * PIECE;

/// The probability that a standard normal variable exceeds `i * PIECE + u`, for `u` within half a piece: column `i` has the
/// coefficients of a polynomial in `u`, of the highest power first. Minimax fits of relative error, at most 1.5e-7.
static TAIL_PIECES: [[f32; 16]; 8] = [
    [
        0.001_150_384_9,
        6.906_219e-4,
        -2.7027e-4,
        -8.183_013e-4,
        -6.333_949e-4,
        -1.151_775e-4,
        2.281_076_9e-4,
        2.564_874_3e-4,
        1.286_854_2e-4,
        1.646_627_4e-5,
        -2.70661e-5,
        -2.659_656e-5,
        -1.471_806_9e-5,
        -5.957_377_7e-6,
        -1.902_382_8e-6,
        -4.959_182_4e-7,
    ],
    [
        1.474_297_1e-5,
        0.002_542_482,
        0.003_087_130_8,
        0.001_575_588_8,
        -3.850_901_6e-4,
        -0.001_348_783_7,
        -0.001_150_267_2,
        -4.868_294e-4,
        1.388_548_9e-5,
        1.883_569_6e-4,
        1.641_056_7e-4,
        9.135_348e-5,
        3.849_827e-5,
        1.301_352_2e-5,
        3.628_088e-6,
        8.476_719e-7,
    ],
    [
        -0.009_976_150_5,
        -0.006_986_362,
        -4.292_464_6e-4,
        0.004_876_686,
        0.006_066_964,
        0.003_934_840_7,
        0.001_066_341_3,
        -7.131_295e-4,
        -0.001_158_289_7,
        -8.834_175_5e-4,
        -4.813_885_3e-4,
        -2.062_123_8e-4,
        -7.222_098e-5,
        -2.110_925_4e-5,
        -5.213_390_5e-6,
        -1.096_846_3e-6,
    ],
    [
        2.401_395_4e-7,
        -0.016_076_881,
        -0.022_915_902,
        -0.018_417_312,
        -0.007_938_915,
        0.001_359_596_3,
        0.005_782_481_3,
        0.005_880_185,
        0.004_035_854_2,
        0.002_146_282_7,
        9.291_358_3e-4,
        3.353_808e-4,
        1.023_381_8e-4,
        2.662_994_5e-5,
        5.944_553_3e-6,
        1.143_237e-6,
    ],
    [
        0.066_490_37,
        0.054_282_18,
        0.024_824_778,
        -0.006_036_964_2,
        -0.025_232_89,
        -0.029_492_103,
        -0.023_734_195,
        -0.014_968_052,
        -0.007_747_726,
        -0.003_365_794_7,
        -0.001_242_765_7,
        -3.931_125_4e-4,
        -1.070_983_85e-4,
        -2.522_464_1e-5,
        -5.150_503e-6,
        -9.136_372e-7,
    ],
    [
        2.811_011_7e-10,
        0.067_202_166,
        0.110_733_576,
        0.120_267_235,
        0.102_040_72,
        0.071_331_55,
        0.042_069_927,
        0.021_200_107,
        0.009_197_297_5,
        0.003_451_864,
        0.001_124_508_7,
        3.187_263e-4,
        7.873_713e-5,
        1.697_562e-5,
        3.19746e-6,
        5.265_917_5e-7,
    ],
    [
        -0.398_942_3,
        -0.373_994_68,
        -0.308_128_2,
        -0.223_104_43,
        -0.141_969_7,
        -0.079_395_115,
        -0.039_021_38,
        -0.016_854_744,
        -0.006_398_120_4,
        -0.002_134_486,
        -6.258_135_5e-4,
        -1.612_528_1e-4,
        -3.651_575_8e-5,
        -7.267_149e-6,
        -1.271_038_1e-6,
        -1.953_726_4e-7,
    ],
    [
        0.5,
        0.359_657_3,
        0.236_147_48,
        0.140_488_98,
        0.075_287_98,
        0.036_177_732,
        0.015_532_074_5,
        0.005_941_076_7,
        0.002_020_137_4,
        6.095_464e-4,
        1.629_763e-4,
        3.856_855_6e-5,
        8.070_944e-6,
        1.492_312_9e-6,
        2.436_461e-7,
        3.510_652_7e-8,
    ],
];

/// GELU above `-PIECES_END` within 4e-7 relative, in half the time that the exponential takes.
#[inline(always)]
fn gelu_by_pieces<S: Simd>(s: S, x: S::F) -> S::F {
    // |x|, but at most 20 above 0: the tail times infinity would be no number there. The order makes NaN survive.
    let m = s.max_raw(s.min_raw(s.splat(20.0), x), s.neg(x));
    let a = s.min_raw(s.splat(PIECES_END), m);
    // Adding 1.5 * 2^23 rounds to an integer, which the low bits hold.
    let magic = s.splat(12_582_912.0);
    let z = s.fma(a, s.splat(1.0 / PIECE), magic);
    let (i, piece) = (s.sub(z, magic), s.bits(z));
    let u = s.fma(i, s.splat(-PIECE), a);
    let mut tail = s.splat(0.0);
    let mut k = 0;
    while k < TAIL_PIECES.len() {
        // SAFETY: a row of the table has as many elements as a vector has lanes.
        let row = unsafe { s.load(TAIL_PIECES[k].as_ptr()) };
        let coefficient = s.spread(row, piece);
        tail = if k == 0 { coefficient } else { s.fma(tail, u, coefficient) };
        k += 1;
    }
    s.fma(s.neg(m), tail, s.max_raw(s.splat(0.0), x))
}

/// The tanh approximation of GELU: `x / (1 + exp(-2 u))`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`; NaN at -infinity.
#[inline(always)]
pub fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let z = s.mul(x, x);
    let u = s.mla(s.mul(z, x), s.splat(0.044_715), x);
    s.div(x, s.add(s.splat(1.0), exp(s, s.mul(u, s.splat(-1.595_769)))))
}

/// Error function.
#[inline(always)]
pub fn erf<S: Simd>(s: S, x: S::F) -> S::F {
    let a = s.abs(x);
    let z = s.mul(x, x);
    let p = poly(
        s,
        z,
        [
            7.853_861e-5,
            -8.010_193e-4,
            5.188_327_7e-3,
            -2.685_381_1e-2,
            1.128_358_54e-1,
            -3.761_262_6e-1,
            consts::FRAC_2_SQRT_PI,
        ],
    );
    let small = s.mul(p, x);
    let tail = normal_tail(s, s.mul(a, s.splat(consts::SQRT_2)));
    let large = s.with_sign(s.mla(tail, s.splat(-2.0), s.splat(1.0)), x);
    let y = s.select(s.lt(a, s.splat(1.0)), small, large);
    s.select(s.ne(x, x), x, y)
}

/// The larger operand, NaN if either is NaN.
#[inline(always)]
pub fn max<S: Simd>(s: S, a: S::F, b: S::F) -> S::F {
    s.select(s.ne(a, a), a, s.max_raw(a, b))
}

/// The smaller operand, NaN if either is NaN.
#[inline(always)]
pub fn min<S: Simd>(s: S, a: S::F, b: S::F) -> S::F {
    s.select(s.ne(a, a), a, s.min_raw(a, b))
}

/// Where the mantissas of [`log2_split`] are cut: `1 / (1 + i / n)` rounded, and the logarithms of what these are the
/// reciprocals of, a multiple of 2^-16 and the rest. One of as many as a vector has lanes.
struct Cuts<const N: usize> {
    factor: [f32; N],
    log: [f32; N],
    low: [f32; N],
}

static CUTS_16: Cuts<16> = Cuts {
    factor: [
        1.0,
        0.941_176_5,
        0.888_888_9,
        0.842_105_27,
        0.8,
        0.761_904_8,
        0.727_272_75,
        0.695_652_2,
        0.666_666_7,
        0.64,
        0.615_384_64,
        0.592_592_6,
        0.571_428_6,
        0.551_724_14,
        0.533_333_36,
        0.516_129,
    ],
    log: [
        0.0,
        0.087_463_38,
        0.169_921_88,
        0.247_924_8,
        0.321_929_93,
        0.392_318_73,
        0.459_426_88,
        0.523_559_6,
        0.584_960_94,
        0.643_859_86,
        0.700_439_45,
        0.754_882_8,
        0.807_357_8,
        0.857_986_45,
        0.906_890_87,
        0.954_193_1,
    ],
    low: [
        0.0,
        -5.430_303_5e-7,
        3.115_693_3e-6,
        2.698_007_2e-6,
        -1.858_251e-6,
        -1.329_679_4e-6,
        4.695_759e-6,
        2.358_872_3e-6,
        1.520_225_5e-6,
        -3.641_259_8e-6,
        2.112_715_1e-7,
        4.678_914_6e-6,
        -2.930_521_8e-6,
        -5.449_693e-6,
        -3.487_745e-7,
        3.238_148e-6,
    ],
};

static CUTS_8: Cuts<8> = Cuts {
    factor: [1.0, 0.888_888_9, 0.8, 0.727_272_75, 0.666_666_7, 0.615_384_64, 0.571_428_6, 0.533_333_36],
    log: [0.0, 0.169_921_88, 0.321_929_93, 0.459_426_88, 0.584_960_94, 0.700_439_45, 0.807_357_8, 0.906_890_87],
    low: [
        0.0,
        3.115_693_3e-6,
        -1.858_251e-6,
        4.695_759e-6,
        1.520_225_5e-6,
        2.112_715_1e-7,
        -2.930_521_8e-6,
        -3.487_745e-7,
    ],
};

/// `log2(x)` of a positive number as a sum of two, within 2^-29 relative, and exact for powers of two. Of zero, infinity and
/// NaN it is some number.
#[inline(always)]
fn log2_split<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    // Denormals are brought into range first.
    let tiny = s.lt(x, s.splat(f32::MIN_POSITIVE));
    let bits = s.bits(s.select(tiny, s.mul(x, s.splat(8_388_608.0)), x));
    // 2^e (1 + i / n) is the nearest one to x: where that is 2^(e + 1), i is 0.
    let wide = S::LANES == 16;
    let nearest = s.add_i(bits, s.splat_i(if wide { 1 << 18 } else { 1 << 19 }));
    let e = s.to_float(s.sub_i(s.shr_i::<23>(nearest), s.splat_i(127)));
    let e = s.select(tiny, s.sub(e, s.splat(23.0)), e);
    let m = s.sub_i(bits, s.and_i(nearest, s.splat_i(0x7f80_0000)));
    let m = s.of_bits(s.add_i(m, s.splat_i(0x3f80_0000)));
    // SAFETY: a vector has as many lanes as the tables have numbers.
    let [factor, log, log_low] = unsafe {
        if wide {
            let i = s.shr_i::<19>(nearest);
            let tables = [s.load(CUTS_16.factor.as_ptr()), s.load(CUTS_16.log.as_ptr()), s.load(CUTS_16.low.as_ptr())];
            [s.spread(tables[0], i), s.spread(tables[1], i), s.spread(tables[2], i)]
        } else {
            let i = s.shr_i::<20>(nearest);
            let tables = [s.load(CUTS_8.factor.as_ptr()), s.load(CUTS_8.log.as_ptr()), s.load(CUTS_8.low.as_ptr())];
            [s.spread(tables[0], i), s.spread(tables[1], i), s.spread(tables[2], i)]
        }
    };
    // m * factor is 1 + r + low, of which only low is rounded away. |r| <= 1 / n.
    let product = s.mul(m, factor);
    let (r, low) = (s.sub(product, s.splat(1.0)), s.fma(m, factor, s.neg(product)));
    let log2_e = s.splat(consts::LOG2_E);
    let first = s.mul(r, log2_e);
    let first_low = s.mla(r, s.splat(1.925_963e-8), s.fma(r, log2_e, s.neg(first)));
    // log2(1 + r + low) is low log2(e) (1 - r) more than log2(1 + r).
    let first_low = s.mla(low, s.mla(r, s.neg(log2_e), log2_e), first_low);
    // log2(1 + r) = r log2(e) + r^2 (c + r q(r)); relative error of the fit 4.9e-10. With eight cuts r^2 is so large that its
    // product with c is a sum of two, too.
    let q = poly(s, r, [-0.241_755_24, 0.289_818_95, -0.360_671_23, 0.480_896_6]);
    let (c, square) = (s.splat(-0.721_347_5), s.mul(r, r));
    let low = s.add(first_low, log_low);
    let (second, low) = if wide {
        (s.mul(square, s.mla(q, r, c)), low)
    } else {
        let second = s.mul(square, c);
        let square_low = s.fma(r, r, s.neg(square));
        let second_low = s.mla(square_low, c, s.fma(square, c, s.neg(second)));
        (second, s.mla(square, s.mla(q, r, s.splat(-1.058_533e-8)), s.add(second_low, low)))
    };
    // Each sum of two starts with the larger: the first a multiple of 2^-16 of at most 24 bits, or nothing.
    let whole = s.add(e, log);
    let sum = s.add(whole, first);
    let rest = s.sub(first, s.sub(sum, whole));
    let high = s.add(sum, second);
    let rest = s.add(s.add(rest, s.sub(second, s.sub(high, sum))), low);
    let sum = s.add(high, rest);
    (sum, s.sub(rest, s.sub(sum, high)))
}

/// What logarithms are of zero, infinity, negative numbers and NaN; `y` of all others.
#[inline(always)]
fn log_of<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
    let y = s.select(s.eq(x, s.splat(0.0)), s.splat(f32::NEG_INFINITY), y);
    let y = s.select(s.eq(x, s.splat(f32::INFINITY)), x, y);
    s.select(s.le(s.splat(0.0), x), y, s.splat(f32::NAN))
}

/// Logarithm to base 2, exact for powers of two; NaN below 0, -infinity at 0.
#[inline(always)]
pub fn log2<S: Simd>(s: S, x: S::F) -> S::F {
    log_of(s, x, log2_split(s, x).0)
}

/// Logarithm to base 10, exact for powers of ten that are f32; NaN below 0, -infinity at 0.
#[inline(always)]
pub fn log10<S: Simd>(s: S, x: S::F) -> S::F {
    let (high, low) = log2_split(s, x);
    let log = s.splat(consts::LOG10_2);
    let y = s.mul(high, log);
    let rest = s.mla(low, log, s.mla(high, s.splat(-1.432_098_9e-8), s.fma(high, log, s.neg(y))));
    log_of(s, x, s.add(y, rest))
}

/// `x^y` within 3e-7 relative, but for denormal results; what is not finite, and zeros, as IEEE 754 has it.
#[inline(always)]
pub fn pow<S: Simd>(s: S, x: S::F, y: S::F) -> S::F {
    let (zero, one, infinity) = (s.splat(0.0), s.splat(1.0), s.splat(f32::INFINITY));
    let a = s.abs(x);
    let (log, log_low) = log2_split(s, a);
    let z = s.mul(y, log);
    let z_low = s.mla(y, log_low, s.fma(y, log, s.neg(z)));
    // Beyond 2^200 there is infinity or nothing. The operand order makes NaN survive the clamp.
    let z_low = s.select(s.lt(s.abs(z), s.splat(200.0)), z_low, zero);
    let z = s.min_raw(s.splat(200.0), s.max_raw(s.splat(-200.0), z));
    let n = s.round_even(z);
    let p = exp_reduced(s, n, s.mul(s.add(s.sub(z, n), z_low), s.splat(consts::LN_2)));
    let (falls, rises) = (s.lt(y, zero), s.lt(zero, y));
    let p = s.select(s.eq(a, zero), s.select(falls, infinity, zero), p);
    let p = s.select(s.eq(a, infinity), s.select(rises, infinity, zero), p);
    // Of an infinite power.
    let p = s.select(s.eq(a, one), one, p);
    // Negative numbers: of whole powers that are odd, all below 2^24, the sign stays; others but of infinity are none.
    let whole = s.eq(s.trunc(y), y);
    let odd = s.shl_i::<31>(s.to_int(s.select(s.lt(s.abs(y), s.splat(16_777_216.0)), y, zero)));
    let signed = s.of_bits(s.xor_i(s.bits(p), s.and_i(odd, s.bits(x))));
    let p = s.select(whole, signed, p);
    let none = s.lt(s.select(whole, zero, x), zero);
    let p = s.select(none, s.select(s.eq(a, infinity), p, s.splat(f32::NAN)), p);
    let p = s.select(s.ne(x, x), x, s.select(s.ne(y, y), y, p));
    s.select(s.eq(x, one), one, s.select(s.eq(y, zero), one, p))
}

/// Magnitudes of the quotient `a / b` toward zero and of what is left, both exact, and whether that holds in all lanes: it
/// does where the quotient is below 2^22 and `b` finite.
#[inline(always)]
fn divide<S: Simd>(s: S, a: S::F, b: S::F) -> (S::F, S::F, bool) {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let (a, b) = (s.abs(a), s.abs(b));
    // Rounded, the quotient may be a whole number that the exact one is just below; never the other way round.
    let q = s.trunc(s.div(a, b));
    let r = s.fma(s.neg(q), b, a);
    let over = s.lt(r, zero);
    let ordinary = s.select(s.lt(q, s.splat(4_194_304.0)), s.select(s.lt(b, s.splat(f32::INFINITY)), one, zero), zero);
    let (q, r) = (s.select(over, s.sub(q, one), q), s.select(over, s.add(r, b), r));
    (q, r, !s.any(s.eq(ordinary, zero)))
}

/// The sign bits where those of two numbers differ.
#[inline(always)]
fn signs_differ<S: Simd>(s: S, a: S::F, b: S::F) -> S::I {
    s.and_i(s.xor_i(s.bits(a), s.bits(b)), s.splat_i(i32::MIN))
}

/// The remainder with the sign of `b`, as in Python; a zero has that of `a`. Exact but for the addition of `b`.
#[inline(always)]
pub fn remainder<S: Simd>(s: S, a: S::F, b: S::F) -> S::F {
    let (_, r, is_exact) = divide(s, a, b);
    if !is_exact {
        return lane_by_lane(s, a, b, remainder_f64);
    }
    let r = s.with_sign(r, a);
    let same = s.eq_i(signs_differ(s, a, b), s.splat_i(0));
    s.select(same, r, s.select(s.eq(r, s.splat(0.0)), r, s.add(r, b)))
}

/// The quotient rounded down; a zero has the sign that it has.
#[inline(always)]
pub fn floor_divide<S: Simd>(s: S, a: S::F, b: S::F) -> S::F {
    let (q, r, is_exact) = divide(s, a, b);
    if !is_exact {
        return lane_by_lane(s, a, b, floor_divide_f64);
    }
    let sign = signs_differ(s, a, b);
    let down = s.select(s.eq(r, s.splat(0.0)), q, s.add(q, s.splat(1.0)));
    let q = s.select(s.eq_i(sign, s.splat_i(0)), q, down);
    s.of_bits(s.or_i(s.bits(q), sign))
}

fn remainder_f64(a: f64, b: f64) -> f64 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

fn floor_divide_f64(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let r = a % b;
    let down = if r != 0.0 && (r < 0.0) != (b < 0.0) { 1.0 } else { 0.0 };
    // Whole but for the rounding of the division; a zero has the division's sign.
    let q = ((a - r) / b - down).round_ties_even();
    if q == 0.0 { 0.0_f64.copysign(a / b) } else { q }
}

/// Each lane by itself.
#[inline(never)]
fn lane_by_lane<S: Simd>(s: S, a: S::F, b: S::F, f: fn(f64, f64) -> f64) -> S::F {
    let (mut x, mut y) = ([0f32; 16], [0f32; 16]);
    // SAFETY: LANES <= 16.
    unsafe {
        s.store(x.as_mut_ptr(), a);
        s.store(y.as_mut_ptr(), b);
    }
    for (x, y) in x.iter_mut().zip(&y).take(S::LANES) {
        *x = f(*x as f64, *y as f64) as f32;
    }
    // SAFETY: LANES <= 16.
    unsafe { s.load(x.as_ptr()) }
}

/// The angle of the point `(x, y)` in radians, in -pi..=pi, with the sign of `y`.
#[inline(always)]
pub fn atan2<S: Simd>(s: S, y: S::F, x: S::F) -> S::F {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let (ax, ay) = (s.abs(x), s.abs(y));
    let (low, high) = (s.min_raw(ax, ay), s.max_raw(ax, ay));
    let t = s.select(s.eq(low, s.splat(f32::INFINITY)), one, s.div(low, high));
    let t = s.select(s.eq(high, zero), zero, t);
    // atan(t) = t + t z p(z), z = t^2; relative error of the fit 2.6e-9.
    let z = s.mul(t, t);
    let p = poly(
        s,
        z,
        [
            -0.001_798_881_8,
            0.010_939_08,
            -0.031_225_55,
            0.058_008_073,
            -0.084_065_9,
            0.109_533_45,
            -0.142_644_85,
            0.199_985_74,
            -0.333_333,
        ],
    );
    let angle = s.mla(s.mul(t, z), p, t);
    // What rounding the quarter and the half turn leaves of them is taken off first.
    let quarter = s.sub(s.splat(consts::FRAC_PI_2), s.add(angle, s.splat(4.371_139e-8)));
    let angle = s.select(s.lt(ax, ay), quarter, angle);
    let half = s.sub(s.splat(consts::PI), s.add(angle, s.splat(8.742_278e-8)));
    let angle = s.select(s.eq_i(s.shr_i::<31>(s.bits(x)), s.splat_i(1)), half, angle);
    let angle = s.with_sign(angle, y);
    s.select(s.ne(x, x), x, s.select(s.ne(y, y), y, angle))
}
