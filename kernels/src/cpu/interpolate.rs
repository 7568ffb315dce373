//! Interpolation along one dimension: each result is a weighted sum of a few places, two of them for linear, four for cubic
//! interpolation. Which places and weights is data, so that any ratio of sizes is one kernel.

use super::copy::Shared;
use super::gather::{IndexError, Indices};
use super::simd::{Element, Simd};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::{simd_dispatch, with_element};

/// `dst[o][j][i] = sum over k of weights[j][k] * src[o][indices[j][k]][i]`. Strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Interpolation {
    /// F32, F16 or BF16, of the source and the result; sums are f32.
    pub dtype: DType,
    /// First element of the source.
    pub src: *const u8,
    /// First element of the result.
    pub dst: *mut u8,
    /// `[outer, places, inner]` of the result.
    pub sizes: [usize; 3],
    /// Places of the source.
    pub rows: usize,
    /// The source's strides along outer, places and inner.
    pub src_strides: [isize; 3],
    /// The result's.
    pub dst_strides: [isize; 3],
    /// First index and its type, I64 or I32.
    pub indices: (*const u8, DType),
    /// First weight, an f32.
    pub weights: *const u8,
    /// Indices and weights of a place.
    pub taps: usize,
    /// The strides of indices along places and taps.
    pub index_strides: [isize; 2],
    /// The same of weights.
    pub weight_strides: [isize; 2],
}

/// From so many elements side by side on vectors go along them, else along places.
const VECTOR: usize = 8;
/// Elements of a task at least.
const GRAIN: usize = 1 << 13;

/// Interpolates.
///
/// # Errors
/// [`IndexError`] for the first index that is out of bounds; nothing has been written then.
///
/// # Safety
/// The description must match valid memory, and results must not overlap each other or the operands.
pub unsafe fn interpolate(pool: &Pool, isa: Isa, of: &Interpolation) -> Result<(), IndexError> {
    let [outer, places, inner] = of.sizes;
    let mut offsets = Vec::with_capacity(places * of.taps);
    let mut weights = Vec::with_capacity(places * of.taps);
    for place in 0..places {
        for tap in 0..of.taps {
            let [at, weight] = [of.index_strides, of.weight_strides]
                .map(|[along, across]| place as isize * along + tap as isize * across);
            let indices = Indices { ptr: of.indices.0, dtype: of.indices.1, len: places * of.taps, stride: 1 };
            // SAFETY: an index and a weight of the lists, by the caller's promise.
            let (index, weight) =
                unsafe { (indices.read(at), of.weights.cast::<f32>().offset(weight).read_unaligned()) };
            if !usize::try_from(index).is_ok_and(|i| i < of.rows) {
                return Err(IndexError { index, at: place, rows: of.rows });
            }
            offsets.push(index as isize * of.src_strides[1]);
            weights.push(weight);
        }
    }
    let size = of.dtype.size_bytes() as isize;
    let is_wide = is_wide(of);
    // Lines along the elements of one place, or along the places of one element.
    let per_outer = if is_wide { places } else { inner };
    let (units, length) = (outer * per_outer, if is_wide { inner } else { places });
    if units * length == 0 {
        return Ok(());
    }
    // Where there are few lines, a task has a part of each.
    let wanted = (units * length / GRAIN).clamp(1, pool.threads() * 4);
    let parts = wanted.div_ceil(units).min(length);
    let tasks = wanted.min(units * parts);
    let (src, dst) = (Shared(of.src.cast_mut()), Shared(of.dst));
    let (dtype, taps, ss, ds) = (of.dtype, of.taps, of.src_strides, of.dst_strides);
    let (offsets, weights) = (&offsets, &weights);
    pool.run(tasks, |task, _| {
        for unit in units * parts * task / tasks..units * parts * (task + 1) / tasks {
            let (unit, part) = (unit / parts, unit % parts);
            let (o, at) = ((unit / per_outer) as isize, unit % per_outer);
            let range = length * part / parts..length * (part + 1) / parts;
            // SAFETY: lines of the operands, by the caller's promise; those of the result are disjoint.
            unsafe {
                if is_wide {
                    let chosen = at * taps..(at + 1) * taps;
                    let first = range.start as isize;
                    let line = Line { offsets: &offsets[chosen.clone()], weights: &weights[chosen], len: range.len() };
                    let to = dst.at((o * ds[0] + at as isize * ds[1] + first) * size);
                    along(isa, dtype, src.at((o * ss[0] + first) * size), to, line);
                } else {
                    let chosen = range.start * taps..range.end * taps;
                    let line = Line { offsets: &offsets[chosen.clone()], weights: &weights[chosen], len: range.len() };
                    let from = src.at((o * ss[0] + at as isize * ss[2]) * size);
                    let to = dst.at((o * ds[0] + range.start as isize * ds[1] + at as isize * ds[2]) * size);
                    across(isa, dtype, from, to, ds[1], taps, line);
                }
            }
        }
    });
    Ok(())
}

/// Whether vectors go along elements side by side.
pub(super) fn is_wide(of: &Interpolation) -> bool {
    of.sizes[2] >= VECTOR && of.src_strides[2] == 1 && of.dst_strides[2] == 1
}

/// What a line is made of: offsets in elements, and weights.
#[derive(Clone, Copy)]
struct Line<'a> {
    offsets: &'a [isize],
    weights: &'a [f32],
    len: usize,
}

simd_dispatch! {
    /// Elements side by side: the same places and weights for all.
    unsafe fn along(dtype: DType, src: *const u8, dst: *mut u8, line: Line<'_>) = along_body
}

#[inline(always)]
unsafe fn along_body<S: Simd>(s: S, dtype: DType, src: *const u8, dst: *mut u8, line: Line<'_>) {
    // SAFETY: the caller's promise.
    unsafe { with_element!(dtype, e => along_of(s, e, src, dst, line), else ()) }
}

#[inline(always)]
unsafe fn along_of<S: Simd, E: Element>(s: S, e: E, src: *const u8, dst: *mut u8, line: Line<'_>) {
    let mut at = 0;
    while at < line.len {
        let n = S::LANES.min(line.len - at);
        let mut sum = s.splat(0.0);
        for (&offset, &weight) in line.offsets.iter().zip(line.weights) {
            // SAFETY: elements of the source's row at that offset, by the caller's promise.
            unsafe {
                let row = src.offset(offset * E::SIZE as isize);
                let x = if n == S::LANES { e.load(s, row, at) } else { e.load_n(s, row, at, n) };
                sum = s.mla(x, s.splat(weight), sum);
            }
        }
        // SAFETY: as above, of the result.
        unsafe { if n == S::LANES { e.store(s, dst, at, sum) } else { e.store_n(s, dst, at, sum, n) } }
        at += n;
    }
}

simd_dispatch! {
    /// Places of one element: each has its own places and weights.
    unsafe fn across(dtype: DType, src: *const u8, dst: *mut u8, step: isize, taps: usize, line: Line<'_>) = across_body
}

#[inline(always)]
unsafe fn across_body<S: Simd>(
    _s: S,
    dtype: DType,
    src: *const u8,
    dst: *mut u8,
    step: isize,
    taps: usize,
    line: Line<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        with_element!(dtype, e => match taps {
            2 => across_of::<_, 2>(e, src, dst, step, line),
            4 => across_of::<_, 4>(e, src, dst, step, line),
            _ => across_any(e, src, dst, step, taps, line),
        }, else ())
    }
}

#[inline(always)]
unsafe fn across_of<E: Element, const TAPS: usize>(e: E, src: *const u8, dst: *mut u8, step: isize, line: Line<'_>) {
    let (offsets, weights) = (line.offsets.as_chunks::<TAPS>().0, line.weights.as_chunks::<TAPS>().0);
    for (at, (offsets, weights)) in offsets.iter().zip(weights).enumerate() {
        let mut sum = 0.0;
        for tap in 0..TAPS {
            // SAFETY: an element of the source, by the caller's promise.
            sum += unsafe { e.get(src, offsets[tap]) } * weights[tap];
        }
        // SAFETY: an element of the result.
        unsafe { e.put(dst, at as isize * step, sum) };
    }
}

#[inline(always)]
unsafe fn across_any<E: Element>(e: E, src: *const u8, dst: *mut u8, step: isize, taps: usize, line: Line<'_>) {
    for at in 0..line.len {
        let chosen = at * taps..(at + 1) * taps;
        let mut sum = 0.0;
        for (&offset, &weight) in line.offsets[chosen.clone()].iter().zip(&line.weights[chosen]) {
            // SAFETY: an element of the source, by the caller's promise.
            sum += unsafe { e.get(src, offset) } * weight;
        }
        // SAFETY: an element of the result.
        unsafe { e.put(dst, at as isize * step, sum) };
    }
}
