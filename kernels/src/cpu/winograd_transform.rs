//! The transforms of Winograd's minimal filtering for 3x3 kernels, with tiles of 2x2 or 4x4 results.
//!
//! One output tile is `Y = A' [ (G w G') * (B' d B) ] A`, where `*` is elementwise. The points are 0, 1, -1, infinity, and
//! for 4x4 tiles also 2 and -2. Every lane is a channel. Both axes are transformed in registers: what is stored goes to
//! its place in the matrix of its point, `stride` after that of the point before.
//!
//! `T` is the side of an input tile, hence also the points of an axis: 4 or 6.

// The transforms walk rows and columns of several arrays at once; closures would be compiled without the wrapper's features.
#![allow(clippy::needless_range_loop)]

use super::gemm_split::GROUP;
use super::simd::{Element, ElementF32, Simd};
use crate::dtype::DType;
use crate::{simd_dispatch, with_element};

/// Points of both axes at most.
pub(super) const MAX_POINTS: usize = 36;
/// Columns of a panel at most.
const MAX_WIDTH: usize = 32;

/// `G` along one axis.
#[inline(always)]
fn weight_axis<S: Simd, const T: usize>(s: S, [a, b, c]: [S::F; 3]) -> [S::F; T] {
    let mut points = [a; T];
    if T == 4 {
        let (even, odd) = (s.mul(s.add(a, c), s.splat(0.5)), s.mul(b, s.splat(0.5)));
        points[1] = s.add(even, odd);
        points[2] = s.sub(even, odd);
        points[3] = c;
    } else {
        let (even, odd) = (s.mul(s.add(a, c), s.splat(-1.0 / 6.0)), s.mul(b, s.splat(-1.0 / 6.0)));
        let far_even = s.mla(a, s.splat(1.0 / 24.0), s.mul(c, s.splat(1.0 / 6.0)));
        let far_odd = s.mul(b, s.splat(1.0 / 12.0));
        points[0] = s.mul(a, s.splat(0.25));
        points[1] = s.add(even, odd);
        points[2] = s.sub(even, odd);
        points[3] = s.add(far_even, far_odd);
        points[4] = s.sub(far_even, far_odd);
        points[5] = c;
    }
    points
}

/// `B'` along one axis.
#[inline(always)]
fn input_axis<S: Simd, const T: usize>(s: S, d: [S::F; T]) -> [S::F; T] {
    let mut points = d;
    if T == 4 {
        points[0] = s.sub(d[0], d[2]);
        points[1] = s.add(d[1], d[2]);
        points[2] = s.sub(d[2], d[1]);
        points[3] = s.sub(d[1], d[3]);
    } else {
        let minus_4 = s.splat(-4.0);
        let (even, odd) = (s.mla(d[2], minus_4, d[4]), s.mla(d[1], minus_4, d[3]));
        let (wide, steep) = (s.sub(d[4], d[2]), s.mul(s.sub(d[3], d[1]), s.splat(2.0)));
        // 4 d0 - 5 d2 + d4 and 4 d1 - 5 d3 + d5.
        points[0] = s.mla(s.sub(d[0], d[2]), s.splat(4.0), wide);
        points[1] = s.add(even, odd);
        points[2] = s.sub(even, odd);
        points[3] = s.add(wide, steep);
        points[4] = s.sub(wide, steep);
        points[5] = s.mla(s.sub(d[1], d[3]), s.splat(4.0), s.sub(d[5], d[3]));
    }
    points
}

/// `A'` along one axis: the first `T - 2` values of the result.
#[inline(always)]
fn output_axis<S: Simd, const T: usize>(s: S, m: [S::F; T]) -> [S::F; 4] {
    let (sum, difference) = (s.add(m[1], m[2]), s.sub(m[1], m[2]));
    let first = s.add(m[0], sum);
    if T == 4 {
        return [first, s.sub(difference, m[3]), first, first];
    }
    let (far_sum, far_difference) = (s.add(m[3], m[4]), s.sub(m[3], m[4]));
    [
        s.add(first, far_sum),
        s.mla(far_difference, s.splat(2.0), difference),
        s.mla(far_sum, s.splat(4.0), sum),
        s.mla(far_difference, s.splat(8.0), s.add(difference, m[T - 1])),
    ]
}

/// Weights of some input channels to one panel of output channels, as nine taps.
#[derive(Clone, Copy)]
pub(super) struct Taps {
    /// Tap 0 of input channel 0; `width` output channels beside each other.
    pub from: *const f32,
    /// f32 from tap to tap, and from input channel to input channel.
    pub tap: usize,
    pub channel: usize,
    /// Input channels.
    pub channels: usize,
    /// A multiple of the lanes of every instruction set.
    pub width: usize,
}

/// `G w G'` of `taps`: `to[point * stride + channel * width + out]`.
///
/// # Safety
/// `taps` must be readable as it says, every point of `to` writable for `channels * width`.
#[inline(always)]
unsafe fn weights_of<S: Simd, const T: usize>(s: S, taps: &Taps, to: *mut f32, stride: usize) {
    for channel in 0..taps.channels {
        let mut lane = 0;
        while lane < taps.width {
            // SAFETY: a vector of the taps and of every point.
            unsafe {
                let from = taps.from.add(channel * taps.channel + lane);
                let mut columns = [[s.splat(0.0); T]; 3];
                for col in 0..3 {
                    let tap = [col, 3 + col, 6 + col].map(|tap| from.add(tap * taps.tap));
                    columns[col] = weight_axis::<S, T>(s, [s.load(tap[0]), s.load(tap[1]), s.load(tap[2])]);
                }
                let to = to.add(channel * taps.width + lane);
                for row in 0..T {
                    let points = weight_axis::<S, T>(s, [columns[0][row], columns[1][row], columns[2][row]]);
                    for col in 0..T {
                        s.store(to.add((row * T + col) * stride), points[col]);
                    }
                }
            }
            lane += S::LANES;
        }
    }
}

#[inline(always)]
unsafe fn transform_weights_of<S: Simd>(s: S, t: usize, taps: &Taps, to: *mut f32, stride: usize) {
    // SAFETY: forwarded.
    unsafe { if t == 4 { weights_of::<S, 4>(s, taps, to, stride) } else { weights_of::<S, 6>(s, taps, to, stride) } }
}

simd_dispatch! {
    /// `G w G'` of `taps`: `to[point * stride + channel * width + out]`.
    ///
    /// # Safety
    /// `taps` must be readable as it says, every point of `to` writable for `channels * width`.
    pub(super) unsafe fn transform_weights(t: usize, taps: &Taps, to: *mut f32, stride: usize) = transform_weights_of
}

/// Bf16 that a number in parts is the sum of.
pub(super) const PARTS: usize = 3;

/// The parts of two vectors, paired: see [`gemm_split`](super::gemm_split). Unlike there, parts may be 0 and those of an infinity
/// are not all infinite: what is not finite makes its tiles not a number anyway.
#[inline(always)]
fn paired_parts<S: Simd>(s: S, low: S::F, high: S::F) -> [S::I; PARTS] {
    let upper = s.splat_i(0xffff_0000u32 as i32);
    let (mut low, mut high) = (low, high);
    let mut parts = [upper; PARTS];
    for part in 0..PARTS {
        let (low_bits, high_bits) = (s.bits(low), s.and_i(s.bits(high), upper));
        parts[part] = s.or_i(s.shr_i::<16>(low_bits), high_bits);
        low = s.sub(low, s.of_bits(s.and_i(low_bits, upper)));
        high = s.sub(high, s.of_bits(high_bits));
    }
    parts
}

/// # Safety
/// As [`transform_weights_in_parts`].
#[inline(always)]
unsafe fn weights_in_parts_of<S: Simd>(s: S, t: usize, taps: &Taps, to: *mut f32, stride: usize) {
    let (width, half) = (taps.width, GROUP / 2);
    // Terms j and j + 16 of a group, at every point.
    let mut whole = [0f32; 2 * MAX_WIDTH * MAX_POINTS];
    for group in 0..taps.channels.div_ceil(GROUP) {
        for unit in 0..half {
            let first = group * GROUP + unit;
            let channels = taps.channels.saturating_sub(first).div_ceil(half).min(2);
            if channels < 2 {
                whole.fill(0.0);
            }
            // SAFETY: the channels are some of those of `taps`, and `whole` holds two of them; every point of `to` holds the group.
            unsafe {
                let from = taps.from.wrapping_add(first * taps.channel);
                let pair = Taps { from, channel: half * taps.channel, channels, ..*taps };
                transform_weights_of(s, t, &pair, whole.as_mut_ptr(), 2 * width);
                for point in 0..t * t {
                    let mut lane = 0;
                    while lane < width {
                        let from = whole.as_ptr().add(point * 2 * width + lane);
                        let parts = paired_parts(s, s.load(from), s.load(from.add(width)));
                        for part in 0..PARTS {
                            let row = (group * PARTS + part) * half + unit;
                            s.store(to.add(point * stride + row * width + lane), s.of_bits(parts[part]));
                        }
                        lane += S::LANES;
                    }
                }
            }
        }
    }
}

simd_dispatch! {
    /// [`transform_weights`] with results in three parts: `to[point * stride + unit * width + out]`.
    ///
    /// # Safety
    /// As there, for the units of whole groups of channels.
    pub(super) unsafe fn transform_weights_in_parts(t: usize, taps: &Taps, to: *mut f32, stride: usize)
        = weights_in_parts_of
}

/// `B' d B` of one tile: `to[point * stride + channel]`.
///
/// # Safety
/// Every pixel must be readable for `channels`; every point of `to` writable for them, rounded up to whole vectors.
#[inline(always)]
unsafe fn input_of<S: Simd, E: Element, const T: usize>(
    s: S,
    e: E,
    pixels: &[*const u8; MAX_POINTS],
    channels: usize,
    to: *mut f32,
    stride: usize,
) {
    let mut channel = 0;
    while channel < channels {
        let lanes = channels - channel;
        let mut half = [[s.splat(0.0); T]; T];
        for row in 0..T {
            let mut d = [s.splat(0.0); T];
            for col in 0..T {
                let pixel = pixels[row * T + col];
                // SAFETY: channels of the pixel.
                d[col] = unsafe {
                    if lanes >= S::LANES { e.load(s, pixel, channel) } else { e.load_n(s, pixel, channel, lanes) }
                };
            }
            half[row] = input_axis::<S, T>(s, d);
        }
        for col in 0..T {
            let mut d = [s.splat(0.0); T];
            for row in 0..T {
                d[row] = half[row][col];
            }
            let points = input_axis::<S, T>(s, d);
            for row in 0..T {
                // SAFETY: a vector of the point.
                unsafe { s.store(to.add((row * T + col) * stride + channel), points[row]) };
            }
        }
        channel += S::LANES;
    }
}

#[inline(always)]
unsafe fn transform_input_of<S: Simd>(
    s: S,
    t: usize,
    dtype: DType,
    pixels: &[*const u8; MAX_POINTS],
    channels: usize,
    to: *mut f32,
    stride: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        with_element!(dtype, e => {
            if t == 4 {
                input_of::<S, _, 4>(s, e, pixels, channels, to, stride)
            } else {
                input_of::<S, _, 6>(s, e, pixels, channels, to, stride)
            }
        }, else input_of::<S, _, 6>(s, ElementF32, pixels, channels, to, stride))
    }
}

simd_dispatch! {
    /// `B' d B` of one tile whose `t * t` pixels are given: `to[point * stride + channel]`.
    ///
    /// # Safety
    /// Every pixel must be readable for `channels` elements of an f32, f16 or bf16 type; every point of `to` writable for
    /// them, rounded up to a multiple of sixteen.
    pub(super) unsafe fn transform_input(
        t: usize,
        dtype: DType,
        pixels: &[*const u8; MAX_POINTS],
        channels: usize,
        to: *mut f32,
        stride: usize,
    ) = transform_input_of
}

/// One tile of results to be.
#[derive(Clone, Copy)]
pub(super) struct Results {
    /// Point 0, output channel 0; points are `stride` f32 apart.
    pub from: *const f32,
    pub stride: usize,
    /// A multiple of the lanes of every instruction set.
    pub width: usize,
    /// The first pixel; pixels of a row are `width` f32 apart, rows `row`.
    pub to: *mut f32,
    pub row: usize,
}

/// `A' m A` of one tile.
///
/// # Safety
/// `tile` must be readable and writable as it says.
#[inline(always)]
unsafe fn output_of<S: Simd, const T: usize>(s: S, tile: &Results) {
    let mut lane = 0;
    while lane < tile.width {
        let mut half = [[s.splat(0.0); 4]; T];
        for row in 0..T {
            let mut m = [s.splat(0.0); T];
            for col in 0..T {
                // SAFETY: a vector of the point.
                m[col] = unsafe { s.load(tile.from.add((row * T + col) * tile.stride + lane)) };
            }
            half[row] = output_axis::<S, T>(s, m);
        }
        for col in 0..T - 2 {
            let mut m = [s.splat(0.0); T];
            for row in 0..T {
                m[row] = half[row][col];
            }
            let pixels = output_axis::<S, T>(s, m);
            for row in 0..T - 2 {
                // SAFETY: a vector of the pixel.
                unsafe { s.store(tile.to.add(row * tile.row + col * tile.width + lane), pixels[row]) };
            }
        }
        lane += S::LANES;
    }
}

#[inline(always)]
unsafe fn transform_output_of<S: Simd>(s: S, t: usize, tile: &Results) {
    // SAFETY: forwarded.
    unsafe { if t == 4 { output_of::<S, 4>(s, tile) } else { output_of::<S, 6>(s, tile) } }
}

simd_dispatch! {
    /// `A' m A` of one tile.
    ///
    /// # Safety
    /// `tile` must be readable and writable as it says.
    pub(super) unsafe fn transform_output(t: usize, tile: &Results) = transform_output_of
}
