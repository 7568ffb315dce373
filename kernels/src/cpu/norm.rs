//! Normalisation: statistics here, application as a tile program.
//!
//! *Group norm* of images: per-channel sums of `x - k` and `(x - k)^2` over chunks of pixels, `k` being the image's
//! first pixel, so that a mean far from zero does not eat the variance; chunks and channels are combined in f64. Where that
//! pixel turns out to be far from the mean, a second pass takes the mean in its place. The result is one scale and one shift
//! per image and channel, `y = x * scale + shift`, which a tile program applies together with whatever follows (SiLU, a
//! time-embedding shift, ...).
//!
//! *Layer norm and RMS norm* over the last dimension: the statistics of some rows, which then are in L1, and the program over
//! these rows with `RowScalar(0)` the mean (0 for RMS norm) and `RowScalar(1)` the reciprocal standard deviation. One pass
//! takes the sums of `x - k` and `(x - k)^2`, `k` being the row's first element; where that turns out to be far from the mean,
//! a second one takes them from there.

use std::ops::Range;

use super::KernelError;
use super::copy::Shared;
use super::simd::{Element, Simd};
use super::tile_exec::{Block, BoundProgram, Prepared};
use super::tile_exec_ops::load_scalar;
use crate::dtype::DType;
use crate::isa::{Isa, features};
use crate::pool::{OutOfMemory, Pool};
use crate::tile::{Bound, MAX_DIMS, Space};
use crate::{simd_dispatch, with_element};

/// Images `x[n][pixel][channel]`, of which the channels of a pixel or the pixels of a channel lie side by side.
#[derive(Clone, Copy, Debug)]
pub struct Channels {
    /// First element.
    pub ptr: *const u8,
    /// Element type: F32, F16 or BF16.
    pub dtype: DType,
    /// Images.
    pub batch: usize,
    /// Pixels of an image.
    pub pixels: usize,
    /// Channels of a pixel.
    pub channels: usize,
    /// Elements between images.
    pub image_stride: isize,
    /// Elements between pixels.
    pub pixel_stride: isize,
    /// Elements between channels: 1, or `pixel_stride` is.
    pub channel_stride: isize,
}

impl Channels {
    /// One of the images.
    pub fn image(&self, n: usize) -> Channels {
        let offset = n as isize * self.image_stride * self.dtype.size_bytes() as isize;
        Channels { ptr: self.ptr.wrapping_offset(offset), batch: 1, ..*self }
    }

    /// A channel of an image's first pixel.
    ///
    /// # Safety
    /// There must be one.
    unsafe fn first(&self, n: usize, ch: usize) -> f32 {
        let elements = n as isize * self.image_stride + ch as isize * self.channel_stride;
        // SAFETY: the caller's promise.
        unsafe { load_scalar(self.dtype, self.ptr.offset(elements * self.dtype.size_bytes() as isize)) }
    }
}

/// A vector of one value per channel, or none.
#[derive(Clone, Copy, Debug)]
pub struct ChannelVector {
    /// First element; null if there is no such vector.
    pub ptr: *const u8,
    /// Element type.
    pub dtype: DType,
}

impl ChannelVector {
    /// No vector: a weight of 1, a bias of 0.
    pub const NONE: ChannelVector = ChannelVector { ptr: std::ptr::null(), dtype: DType::F32 };

    unsafe fn get(&self, at: usize, missing: f64) -> f64 {
        if self.ptr.is_null() {
            return missing;
        }
        // SAFETY: the caller vouches for the vector's length.
        unsafe { load_scalar(self.dtype, self.ptr.add(at * self.dtype.size_bytes())) as f64 }
    }
}

/// What group norm needs besides its input.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm {
    /// Groups the channels are split into.
    pub groups: usize,
    /// Added to the variance.
    pub eps: f64,
    /// Weight per channel.
    pub gamma: ChannelVector,
    /// Bias per channel.
    pub beta: ChannelVector,
}

/// Pixels summed in f32 before the sums go to f64.
const CHUNK: usize = 256;

/// Computes `scale` and `shift`, `batch x channels` f32 each: the group norm of `x` is `x * scale + shift`.
///
/// # Errors
/// If the type is not floating, the channels do not divide into the groups, or memory runs out.
///
/// # Safety
/// `x` must describe valid memory, gamma and beta hold `channels` values, `scale` and `shift` be valid for writes.
pub unsafe fn group_norm_scale_shift(
    pool: &Pool,
    isa: Isa,
    x: &Channels,
    norm: &GroupNorm,
    scale: *mut f32,
    shift: *mut f32,
) -> Result<(), KernelError> {
    if x.channels == 0 || x.batch == 0 {
        return Ok(());
    }
    if norm.groups == 0 || !x.channels.is_multiple_of(norm.groups) {
        return Err(KernelError::Shape("channels do not divide into groups"));
    }
    if !matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(KernelError::UnsupportedDType(x.dtype));
    }
    let is_planar = x.channel_stride != 1;
    if is_planar && x.pixel_stride != 1 && x.pixels > 1 {
        return Err(KernelError::Shape("neither channels nor pixels are neighbours"));
    }
    let c = x.channels;
    if x.pixels == 0 {
        // SAFETY: the caller's promise.
        unsafe {
            std::ptr::write_bytes(scale, 0, x.batch * c);
            std::ptr::write_bytes(shift, 0, x.batch * c);
        }
        return Ok(());
    }
    // Per image, so many parts that the threads are busy and each part is worth its sums.
    let parts = (4 * pool.threads()).div_ceil(x.batch).min(x.pixels * c / 16_384).clamp(1, x.pixels.max(1));
    let (mut sums, mut origins) = (Vec::new(), Vec::new());
    reserve(&mut sums, x.batch * parts * 2 * c)?;
    reserve(&mut origins, x.batch * c)?;
    for n in 0..x.batch {
        // SAFETY: the first pixel of an image that is not empty.
        origins.extend((0..c).map(|ch| unsafe { x.first(n, ch) }));
    }
    sums.resize(x.batch * parts * 2 * c, 0.0);
    let add_up = |first: usize, images: usize, origins: &[f32], sums: &mut [f64]| {
        let (ptr, out) = (Shared(x.ptr.cast_mut()), Shared(sums.as_mut_ptr().cast()));
        let (dtype, pixels, image_stride) = (x.dtype, x.pixels, x.image_stride);
        let (pixel_stride, channel_stride) = (x.pixel_stride, x.channel_stride);
        // Four rows at a time are more than the processor finds out by itself.
        let ahead = pixels * c * dtype.size_bytes() > features().l2_bytes;
        pool.run_scratch(images * parts, 2 * c * 4 + 64, |task, worker| {
            let (n, part) = (first + task / parts, task % parts);
            let image = ptr.at(n as isize * image_stride * dtype.size_bytes() as isize);
            let (from, to) = (pixels * part / parts, pixels * (part + 1) / parts);
            let own = out.at((task * 2 * c * 8) as isize).cast::<f64>();
            let k = origins[n * c..(n + 1) * c].as_ptr();
            // SAFETY: pixels of the image; the sums of this task; scratch of the size asked for.
            unsafe {
                if is_planar {
                    sum_planes(isa, dtype, image, channel_stride, from, to, c, k, own);
                } else {
                    sum_pixels(isa, dtype, image, pixel_stride, from, to, c, ahead, k, worker.scratch.cast(), own);
                }
            }
        })
    };
    add_up(0, x.batch, &origins, &mut sums)?;
    for n in 0..x.batch {
        let own = n * parts * 2 * c..(n + 1) * parts * 2 * c;
        let channels = n * c..(n + 1) * c;
        gather(&mut sums[own.clone()], c);
        if move_origins(x, norm, &mut origins[channels.clone()], &sums[own.clone()]) {
            sums[own.clone()].fill(0.0);
            add_up(n, 1, &origins, &mut sums[own.clone()])?;
            gather(&mut sums[own.clone()], c);
        }
        // SAFETY: the caller's promise.
        unsafe { finish(x, norm, &origins[channels], &sums[own], scale.add(n * c), shift.add(n * c)) };
    }
    Ok(())
}

fn reserve<T>(values: &mut Vec<T>, len: usize) -> Result<(), OutOfMemory> {
    values.try_reserve_exact(len).map_err(|_| OutOfMemory { bytes: len * size_of::<T>() })
}

/// Adds the sums of all parts to the first.
fn gather(sums: &mut [f64], c: usize) {
    let (total, parts) = sums.split_at_mut(2 * c);
    for part in parts.chunks_exact(2 * c) {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }
}

/// Mean and variance of a group of channels, from the sums of the distances to their origins and of their squares.
fn moments(x: &Channels, channels: Range<usize>, origins: &[f32], sums: &[f64]) -> (f64, f64) {
    let (first, second) = sums.split_at(x.channels);
    let pixels = x.pixels as f64;
    let count = pixels * channels.len() as f64;
    let mean = channels.clone().map(|ch| first[ch] + pixels * origins[ch] as f64).sum::<f64>() / count;
    let square = |ch: usize| {
        let d = origins[ch] as f64 - mean;
        second[ch] + 2.0 * d * first[ch] + pixels * d * d
    };
    (mean, channels.map(square).sum::<f64>() / count)
}

/// Most that the square of an origin's distance from its channel's mean may be of the group's variance, so that the variance
/// keeps its digits.
const FAR_ORIGIN: f64 = 16.0;

/// Moves origins that are too far from the mean of their channel there. Whether there were any.
fn move_origins(x: &Channels, norm: &GroupNorm, origins: &mut [f32], sums: &[f64]) -> bool {
    let per_group = x.channels / norm.groups;
    let mut is_moved = false;
    for g in 0..norm.groups {
        let channels = g * per_group..(g + 1) * per_group;
        let (_, variance) = moments(x, channels.clone(), origins, sums);
        for ch in channels {
            let rest = sums[ch] / x.pixels as f64;
            // So far that squares are infinite, too; but what is not a number is not far.
            let is_near = rest * rest <= FAR_ORIGIN * variance && variance.is_finite();
            if rest.is_finite() && !is_near && rest != 0.0 {
                origins[ch] = (origins[ch] as f64 + rest) as f32;
                is_moved = true;
            }
        }
    }
    is_moved
}

/// Turns the sums of one image into its scales and shifts.
unsafe fn finish(x: &Channels, norm: &GroupNorm, origins: &[f32], sums: &[f64], scale: *mut f32, shift: *mut f32) {
    let per_group = x.channels / norm.groups;
    for g in 0..norm.groups {
        let channels = g * per_group..(g + 1) * per_group;
        let (mean, variance) = moments(x, channels.clone(), origins, sums);
        // `max` would hide NaN.
        let variance = if variance < 0.0 { 0.0 } else { variance };
        let rstd = 1.0 / (variance + norm.eps).sqrt();
        for ch in channels {
            // SAFETY: the caller's promise.
            unsafe {
                let (gamma, beta) = (norm.gamma.get(ch, 1.0), norm.beta.get(ch, 0.0));
                let factor = (gamma * rstd) as f32;
                *scale.add(ch) = factor;
                // From the rounded factor: its error then scales the distance from the mean, not the mean.
                *shift.add(ch) = (beta - mean * factor as f64) as f32;
            }
        }
    }
}

simd_dispatch! {
    /// Adds the sums of `x - k` and `(x - k)^2` over pixels `from..to` to `out` (two rows of `c`).
    unsafe fn sum_pixels(
        dtype: DType, image: *const u8, stride: isize, from: usize, to: usize, c: usize, ahead: bool, k: *const f32,
        scratch: *mut f32, out: *mut f64,
    ) = sum_pixels_body
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn sum_pixels_body<S: Simd>(
    s: S,
    dtype: DType,
    image: *const u8,
    stride: isize,
    from: usize,
    to: usize,
    c: usize,
    ahead: bool,
    k: *const f32,
    scratch: *mut f32,
    out: *mut f64,
) {
    // SAFETY: the caller's promise.
    unsafe {
        with_element!(dtype, e => {
            if ahead {
                sum_pixels_of::<S, _, true>(s, e, image, stride, from, to, c, k, scratch, out)
            } else {
                sum_pixels_of::<S, _, false>(s, e, image, stride, from, to, c, k, scratch, out)
            }
        }, else ())
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn sum_pixels_of<S: Simd, E: Element, const AHEAD: bool>(
    s: S,
    e: E,
    image: *const u8,
    stride: isize,
    from: usize,
    to: usize,
    c: usize,
    k: *const f32,
    scratch: *mut f32,
    out: *mut f64,
) {
    // SAFETY: pixels `from..to` of `c` elements each, `c` origins, two rows of `c` f32 of scratch, two rows of `c` f64 of sums.
    unsafe {
        let (sum, square) = (scratch, scratch.add(c));
        let pixel = |p: usize| image.offset(p as isize * stride * E::SIZE as isize);
        let mut p = from;
        while p < to {
            let end = to.min(p + CHUNK);
            for i in 0..c {
                (*sum.add(i), *square.add(i)) = (0.0, 0.0);
            }
            while p + 4 <= end {
                let rows = [pixel(p), pixel(p + 1), pixel(p + 2), pixel(p + 3)];
                let mut i = 0;
                while i < c {
                    let n = S::LANES.min(c - i);
                    let kv = s.load_n(k.add(i), n);
                    if AHEAD {
                        let next = 4 * stride * E::SIZE as isize + (i * E::SIZE) as isize;
                        for row in rows {
                            s.prefetch(row.wrapping_offset(next));
                        }
                    }
                    let (mut a, mut b) = (s.load_n(sum.add(i), n), s.load_n(square.add(i), n));
                    let (v, w, x, y) = if n == S::LANES {
                        (e.load(s, rows[0], i), e.load(s, rows[1], i), e.load(s, rows[2], i), e.load(s, rows[3], i))
                    } else {
                        let tail = (e.load_n(s, rows[0], i, n), e.load_n(s, rows[1], i, n));
                        (tail.0, tail.1, e.load_n(s, rows[2], i, n), e.load_n(s, rows[3], i, n))
                    };
                    let (v, w, x, y) = (s.sub(v, kv), s.sub(w, kv), s.sub(x, kv), s.sub(y, kv));
                    a = s.add(a, s.add(s.add(v, w), s.add(x, y)));
                    b = s.mla(v, v, s.mla(w, w, b));
                    b = s.mla(x, x, s.mla(y, y, b));
                    s.store_n(sum.add(i), a, n);
                    s.store_n(square.add(i), b, n);
                    i += S::LANES;
                }
                p += 4;
            }
            while p < end {
                let row = pixel(p);
                let mut i = 0;
                while i < c {
                    let n = S::LANES.min(c - i);
                    let v = s.sub(e.load_n(s, row, i, n), s.load_n(k.add(i), n));
                    s.store_n(sum.add(i), s.add(s.load_n(sum.add(i), n), v), n);
                    s.store_n(square.add(i), s.mla(v, v, s.load_n(square.add(i), n)), n);
                    i += S::LANES;
                }
                p += 1;
            }
            for i in 0..c {
                *out.add(i) += *sum.add(i) as f64;
                *out.add(c + i) += *square.add(i) as f64;
            }
        }
    }
}

simd_dispatch! {
    /// [`sum_pixels`] of pixels that lie side by side, channels `stride` elements apart.
    unsafe fn sum_planes(
        dtype: DType, image: *const u8, stride: isize, from: usize, to: usize, c: usize, k: *const f32, out: *mut f64,
    ) = sum_planes_body
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn sum_planes_body<S: Simd>(
    s: S,
    dtype: DType,
    image: *const u8,
    stride: isize,
    from: usize,
    to: usize,
    c: usize,
    k: *const f32,
    out: *mut f64,
) {
    for ch in 0..c {
        let first = (ch as isize * stride + from as isize) * dtype.size_bytes() as isize;
        // SAFETY: pixels `from..to` of `c` channels, `c` origins, two rows of `c` f64 of sums.
        unsafe {
            let (row, center) = (image.offset(first), *k.add(ch));
            let (sum, squares) =
                with_element!(dtype, e => sum_row::<S, _, true>(s, e, row, to - from, center), else (0.0, 0.0));
            *out.add(ch) += sum;
            *out.add(c + ch) += squares;
        }
    }
}

/// Group norm with its application: the statistics of each image, then the program over that image while the caches
/// still hold it.
///
/// The program's space has the image as its first dimension. It finds `scale` and `shift` among its loads, bound by the
/// caller with a stride of `channels` there, 1 where the channels are, and 0 elsewhere.
///
/// # Errors
/// As for [`group_norm_scale_shift`].
///
/// # Safety
/// As for [`group_norm_scale_shift`] and [`run_loop`](super::tile_exec::run_loop). The program may store over `x`.
#[allow(clippy::too_many_arguments)]
pub unsafe fn group_norm_apply(
    pool: &Pool,
    isa: Isa,
    x: &Channels,
    norm: &GroupNorm,
    scale: *mut f32,
    shift: *mut f32,
    program: &Prepared,
    space: &Space,
    loads: &[Bound],
    stores: &[Bound],
) -> Result<(), KernelError> {
    let images = if space.rank > 1 { space.dims[0] } else { 1 };
    if images != x.batch || space.len() != x.batch * x.pixels * x.channels {
        return Err(KernelError::Shape("the program's space is not that of the images"));
    }
    let mut rest = *space;
    rest.dims[0] = 1;
    let apply = |n: usize| {
        let ins: Vec<Bound> = loads.iter().zip(program.load_types()).map(|(b, t)| b.from(&[n], *t)).collect();
        let outs: Vec<Bound> = stores.iter().zip(program.store_types()).map(|(b, t)| b.from(&[n], *t)).collect();
        // SAFETY: the part of the caller's memory that belongs to this image.
        unsafe { super::tile_exec::run_loop(pool, program, &rest, &ins, &outs) };
    };
    // SAFETY: forwarded.
    unsafe { group_norm_by_image(pool, isa, x, norm, scale, shift, apply) }
}

/// [`group_norm_scale_shift`] of one image after the other, and after each what is to be done with it. Where an image's sums
/// are cut depends on how many there are: so results are the same bits, whatever is done.
///
/// # Errors
/// As for [`group_norm_scale_shift`].
///
/// # Safety
/// As for [`group_norm_scale_shift`].
pub unsafe fn group_norm_by_image(
    pool: &Pool,
    isa: Isa,
    x: &Channels,
    norm: &GroupNorm,
    scale: *mut f32,
    shift: *mut f32,
    mut after: impl FnMut(usize),
) -> Result<(), KernelError> {
    (0..x.batch).try_for_each(|n| {
        let at = n * x.channels;
        // SAFETY: the part of the caller's memory that belongs to this image.
        unsafe { group_norm_scale_shift(pool, isa, &x.image(n), norm, scale.add(at), shift.add(at))? };
        after(n);
        Ok(())
    })
}

/// Which statistics a row-wise norm uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RowNorm {
    /// Mean and variance.
    Layer,
    /// Mean square; `RowScalar(0)` is 0.
    Rms,
    /// Mean square, whose root is `eps` at least, where others add that to the square; `RowScalar(0)` is 0.
    FlooredRms,
}

/// Rows of contiguous elements: the last dimension of a space is the row, its stride 1.
#[derive(Clone, Copy, Debug)]
pub struct RowInput {
    /// Operand over the program's space.
    pub bound: Bound,
    /// Element type: F32, F16 or BF16.
    pub dtype: DType,
}

/// Most rows handed to the program at once.
const ROWS: usize = 16;

/// Layer norm or RMS norm over the last dimension of `space`.
///
/// For every row the statistics of `x` are taken, then the program runs on it with `RowScalar(0)` the mean and `RowScalar(1)`
/// the reciprocal of `sqrt(variance + eps)`, or what its kind says. The program loads `x` (as a memory operand), weight and
/// bias itself.
///
/// # Errors
/// If `x` is not floating or its rows are not contiguous.
///
/// # Safety
/// `x` must be valid for reads over the space, the program's operands as for [`BoundProgram::run_block`].
#[allow(clippy::too_many_arguments)]
pub unsafe fn row_norm(
    pool: &Pool,
    isa: Isa,
    kind: RowNorm,
    eps: f64,
    x: &RowInput,
    program: &Prepared,
    space: &Space,
    loads: &[Bound],
    stores: &[Bound],
) -> Result<(), KernelError> {
    if !matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16) {
        return Err(KernelError::UnsupportedDType(x.dtype));
    }
    let (rows, cols) = (space.rows(), space.cols());
    if cols > 1 && space.rank > 0 && x.bound.strides[space.rank - 1] != 1 {
        return Err(KernelError::Shape("rows of the normalised operand are not contiguous"));
    }
    if rows * cols == 0 {
        return Ok(());
    }
    let bound = BoundProgram::over_all(program, space, loads, stores, features().l3_bytes);
    let size = x.dtype.size_bytes();
    // Rows small enough together to stay in half of L1 between their statistics and the program.
    let batch = (16_384 / (cols * size)).clamp(1, ROWS);
    let units = rows.div_ceil(batch);
    let tasks = ((rows * cols * size) >> 15).clamp(1, pool.threads() * 4).min(units);
    let (ptr, strides, dtype, space) = (Shared(x.bound.ptr), x.bound.strides, x.dtype, *space);
    pool.run(tasks, |task, _| {
        let (mut mean, mut rstd) = ([0f32; ROWS], [0f32; ROWS]);
        let (from, to) = (units * task / tasks, units * (task + 1) / tasks);
        let mut walk = RowWalk::new(&space, &strides, from * batch);
        for unit in from..to {
            let (row0, n) = (unit * batch, batch.min(rows - unit * batch));
            let (mut places, mut found) = ([std::ptr::null(); ROWS], [(0f64, 0f64); ROWS]);
            for place in &mut places[..n] {
                *place = ptr.at(walk.next() * size as isize).cast_const();
            }
            // SAFETY: rows of `x`.
            unsafe { row_statistics(isa, dtype, &places[..n], cols, kind, &mut found) };
            for (r, (m, v)) in found.iter().take(n).enumerate() {
                let root = match kind {
                    // `max` would hide NaN.
                    RowNorm::FlooredRms if v.sqrt() < eps => eps,
                    RowNorm::FlooredRms => v.sqrt(),
                    _ => (v + eps).sqrt(),
                };
                (mean[r], rstd[r]) = (*m as f32, (1.0 / root) as f32);
            }
            let scalars = [mean.as_ptr(), rstd.as_ptr()];
            let block = Block { row_scalars: &scalars, row0, rows: n, cols, ..Block::default() };
            // SAFETY: rows of the space, disjoint between tasks; the scalars hold `n` values.
            unsafe { bound.run_unfinished(&block) };
        }
        bound.finish();
    });
    Ok(())
}

/// Offsets of a space's rows, in elements, one after the other.
struct RowWalk<'a> {
    dims: &'a [usize],
    strides: &'a [isize],
    index: [usize; MAX_DIMS],
    offset: isize,
}

impl<'a> RowWalk<'a> {
    /// From a row on.
    fn new(space: &'a Space, strides: &'a [isize], row: usize) -> RowWalk<'a> {
        let outer = space.rank.saturating_sub(1);
        let (dims, strides) = (&space.dims[..outer], &strides[..outer]);
        let (mut index, mut rest, mut offset) = ([0; MAX_DIMS], row, 0);
        for d in (0..outer).rev() {
            index[d] = rest % dims[d];
            rest /= dims[d];
            offset += index[d] as isize * strides[d];
        }
        RowWalk { dims, strides, index, offset }
    }

    /// The offset of this row; the walk goes on to the next one.
    fn next(&mut self) -> isize {
        let offset = self.offset;
        for d in (0..self.dims.len()).rev() {
            self.index[d] += 1;
            self.offset += self.strides[d];
            if self.index[d] < self.dims[d] {
                break;
            }
            self.offset -= self.dims[d] as isize * self.strides[d];
            self.index[d] = 0;
        }
        offset
    }
}

simd_dispatch! {
    /// Of each row of `n` elements mean and variance, or 0 and the mean square.
    unsafe fn row_statistics(dtype: DType, rows: &[*const u8], n: usize, kind: RowNorm, found: &mut [(f64, f64)]) = row_statistics_body
}

#[inline(always)]
unsafe fn row_statistics_body<S: Simd>(
    s: S,
    dtype: DType,
    rows: &[*const u8],
    n: usize,
    kind: RowNorm,
    found: &mut [(f64, f64)],
) {
    for (row, found) in rows.iter().zip(found) {
        // SAFETY: the caller's promise.
        *found = unsafe { with_element!(dtype, e => statistics_of(s, e, *row, n, kind), else (0.0, 0.0)) };
    }
}

/// Most that the square of a mean distance may be of the variance, so that their difference keeps its digits.
const FAR: f64 = 4.0;

#[inline(always)]
unsafe fn statistics_of<S: Simd, E: Element>(s: S, e: E, x: *const u8, n: usize, kind: RowNorm) -> (f64, f64) {
    // SAFETY: the caller's promise.
    unsafe {
        if kind != RowNorm::Layer {
            return (0.0, sum_row::<S, _, false>(s, e, x, n, 0.0).1 / n as f64);
        }
        // Distances are measured from an element of the row; their own mean corrects it, and the variance.
        let mut center = e.get(x, 0);
        let mut is_mean = false;
        loop {
            let (sum, squares) = sum_row::<S, _, true>(s, e, x, n, center);
            let rest = sum / n as f64;
            let variance = squares / n as f64 - rest * rest;
            // What is not a number is not far.
            if !is_mean && rest * rest > FAR * variance {
                (center, is_mean) = ((center as f64 + rest) as f32, true);
                continue;
            }
            // `max` would hide NaN.
            return (center as f64 + rest, if variance < 0.0 { 0.0 } else { variance });
        }
    }
}

/// Sums of `x - center` and of its square: f32 over short pieces, f64 between them. Where it is not `CENTRED`, `center` is 0
/// and the first sum not taken.
#[inline(always)]
unsafe fn sum_row<S: Simd, E: Element, const CENTRED: bool>(
    s: S,
    e: E,
    x: *const u8,
    n: usize,
    center: f32,
) -> (f64, f64) {
    let (l, c, zero) = (S::LANES, s.splat(center), s.splat(0.0));
    let (mut total, mut squares) = (0f64, 0f64);
    let mut at = 0;
    while at < n {
        let end = n.min(at + 64 * l);
        let (mut sums, mut of_squares) = ([zero; 4], [zero; 4]);
        // SAFETY: positions below `n`, by the caller's promise.
        unsafe {
            while at + 4 * l <= end {
                let mut i = 0;
                while i < 4 {
                    let v = e.load(s, x, at + i * l);
                    let v = if CENTRED { s.sub(v, c) } else { v };
                    if CENTRED {
                        sums[i] = s.add(sums[i], v);
                    }
                    of_squares[i] = s.mla(v, v, of_squares[i]);
                    i += 1;
                }
                at += 4 * l;
            }
            while at + l <= end {
                let v = e.load(s, x, at);
                let v = if CENTRED { s.sub(v, c) } else { v };
                sums[0] = s.add(sums[0], v);
                of_squares[0] = s.mla(v, v, of_squares[0]);
                at += l;
            }
            while at < end {
                let v = e.get(x, at as isize) - center;
                total += v as f64;
                squares += (v * v) as f64;
                at += 1;
            }
        }
        if CENTRED {
            total += s.reduce_add(s.add(s.add(sums[0], sums[1]), s.add(sums[2], sums[3]))) as f64;
        }
        let of_squares = s.add(s.add(of_squares[0], of_squares[1]), s.add(of_squares[2], of_squares[3]));
        squares += s.reduce_add(of_squares) as f64;
    }
    (total, squares)
}

/// The meaning of what [`row_norm`] tells a program of a row: what is subtracted of its elements, and what they are multiplied by.
pub fn row_norm_reference(kind: RowNorm, eps: f64, row: &[f64]) -> (f64, f64) {
    let mean = |of: &dyn Fn(f64) -> f64| row.iter().map(|&x| of(x)).sum::<f64>() / row.len() as f64;
    let center = if kind == RowNorm::Layer { mean(&|x| x) } else { 0.0 };
    let square = mean(&|x| (x - center) * (x - center));
    let root = if kind == RowNorm::FlooredRms { square.sqrt().max(eps) } else { (square + eps).sqrt() };
    (center, 1.0 / root)
}
