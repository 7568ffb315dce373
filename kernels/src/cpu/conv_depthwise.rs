//! Depthwise convolution, and in small groups: the vector runs over channels, as few of them share their inputs.
//!
//! ```text
//! weights [tap][channel of the group's inputs][channel], packed
//! task = (lines of output, 256 channels)
//!   weights of the 256 channels -> f32 scratch
//!   for each segment of a line, at most 16 pixels (short lines share one):
//!     pixels at the ends of the line, whose windows reach into the padding: one at a time, over the taps inside the image
//!     the others, eight at a time, a vector of channels after the other:
//!       windows that slide (stride and dilation 1, 3, 5 or 7 wide): for each row of taps, its weights in registers,
//!         for each pixel that the eight windows have in it:  sums[all windows with it] += x[pixel] * w[its tap there]
//!       other windows: for each tap:  sums[0..8] += x[pixel + tap] * w[tap]
//!   epilogue(16 pixels x 256 channels)
//! ```
//!
//! A tap in the padding is skipped. Where windows slide, a pixel is loaded (and widened) once for a row of taps, so that
//! multiply-adds are the bound in cache; what comes from farther away is bound by memory.
//!
//! Where groups have several inputs, that is done for each of them: the channels of a vector are loaded, and each lane gets its
//! group's first, second, ... input. A panel of a product would have one group's few outputs in it, and padding.

use super::KernelError;
use super::conv::{Conv, PackedWeight, Weight};
use super::pack::SendMut;
use super::simd::{Element, Simd};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::{simd_dispatch, with_element};

/// Channels of a task. Many, as neighbouring pixels of an image of many channels are pages apart.
const CHANNELS: usize = 256;
/// Pixels of a segment: its results stay in L1, and the lines that its windows share in L2.
const SEGMENT: usize = 16;
/// Pixels whose sums are in registers at once.
const PIXELS: usize = 8;
/// Multiply-adds that are worth a task.
const TASK_WORK: usize = 1 << 21;

/// Channels of a group: so many inputs, and as many outputs or more.
#[derive(Clone, Copy)]
struct Group {
    inputs: usize,
    outputs: usize,
}

impl Group {
    fn of(conv: &Conv) -> Self {
        Self { inputs: conv.in_channels / conv.groups.max(1), outputs: conv.out_channels / conv.groups.max(1) }
    }

    /// Whether each output channel has an input of its own.
    fn is_one(self) -> bool {
        self.inputs == 1 && self.outputs == 1
    }
}

/// Whether a convolution is depthwise, or in groups of which a vector has several, or one half.
pub(crate) fn suits(conv: &Conv) -> bool {
    let Group { inputs, outputs } = Group::of(conv);
    let is_small = matches!(outputs, 1 | 2 | 4 | 8 | 16) && (1..=outputs).contains(&inputs);
    is_small && conv.groups > 1
}

/// Rows of the packed weight: an input of each group at a tap.
fn rows(conv: &Conv) -> usize {
    conv.kernel.iter().product::<usize>() * Group::of(conv).inputs
}

/// Bytes of a packed weight.
pub(crate) fn packed_bytes(conv: &Conv, dtype: DType) -> usize {
    rows(conv) * conv.out_channels * dtype.size_bytes()
}

/// Packs a weight as `[tap][input of the group][channel]` in its own type.
///
/// # Safety
/// `weight` must be readable for the shape that `conv` says, `dst` writable for [`packed_bytes`].
pub(crate) unsafe fn pack(pool: &Pool, conv: &Conv, weight: &Weight, dst: *mut u8) {
    let (channels, rows, size) = (conv.out_channels, rows(conv), weight.dtype.size_bytes());
    let ([_, kh, kw], inputs) = (conv.kernel, Group::of(conv).inputs);
    let [channel_stride, input_stride, depth_stride, height_stride, width_stride] = weight.strides;
    let target = SendMut(dst);
    pool.run(channels.div_ceil(CHANNELS), |task, _| {
        let block = task * CHANNELS..channels.min((task + 1) * CHANNELS);
        for row in 0..rows {
            let tap = row / inputs;
            let offset = (tap / (kh * kw)) as isize * depth_stride
                + (tap / kw % kh) as isize * height_stride
                + (tap % kw) as isize * width_stride
                + (row % inputs) as isize * input_stride;
            for channel in block.clone() {
                let from = offset + channel as isize * channel_stride;
                // SAFETY: inside the weight and inside `dst`; tasks write different channels.
                unsafe {
                    let from = weight.ptr.offset(from * size as isize);
                    let to = target.get().add((row * channels + channel) * size);
                    match weight.dtype {
                        DType::F32 => to.cast::<u32>().write_unaligned(from.cast::<u32>().read_unaligned()),
                        _ => to.cast::<u16>().write_unaligned(from.cast::<u16>().read_unaligned()),
                    }
                }
            }
        }
    });
}

/// A depthwise convolution of one call.
pub(crate) struct Depthwise<'a> {
    pub isa: Isa,
    pub conv: &'a Conv,
    pub x: *const u8,
    pub dtype: DType,
    pub weight: &'a PackedWeight,
}

// SAFETY: reads only.
unsafe impl Sync for Depthwise<'_> {}

/// Which channels, and their weights `[tap][input of the group][CHANNELS]`.
#[derive(Clone, Copy)]
struct Block {
    first: usize,
    count: usize,
    weights: *const f32,
}

/// Channels that a tap reads for the first pixel of a run, and their weights, `CHANNELS` for each input of the groups.
type Tap = (*const u8, *const f32);

/// What a line's windows read: for each row of taps inside the image the row of the image, and the weights of its first
/// tap. And the taps of a run of its pixels, made of these.
#[derive(Default)]
struct Reads {
    rows: Vec<Tap>,
    taps: Vec<Tap>,
}

impl Depthwise<'_> {
    /// Runs the convolution.
    ///
    /// # Safety
    /// As [`conv`](super::conv::conv).
    pub(crate) unsafe fn run(&self, pool: &Pool, epilogue: &dyn Epilogue) -> Result<(), KernelError> {
        let conv = self.conv;
        let [depth, height, width] = conv.output;
        let (rows, blocks, lines) = (rows(conv), conv.out_channels.div_ceil(CHANNELS), conv.batch * depth * height);
        // Short lines share a segment, and so one call of the epilogue.
        let together = (SEGMENT / width).max(1);
        let worth = (TASK_WORK / (width * CHANNELS * rows).max(1)).min(lines * blocks / (4 * pool.threads()));
        let per_task = worth.max(1).next_multiple_of(together);
        let weight_bytes = rows * CHANNELS * 4;
        let bytes = weight_bytes + together * width.min(SEGMENT) * CHANNELS * 4;
        pool.run_scratch(lines.div_ceil(per_task) * blocks, bytes, |task, worker| {
            let (first, task) = (task % blocks * CHANNELS, task / blocks);
            let weights: *mut f32 = worker.scratch.cast();
            let block = Block { first, count: CHANNELS.min(conv.out_channels - first), weights };
            let mut reads = Reads::default();
            let end = lines.min((task + 1) * per_task);
            // SAFETY: scratch holds the weights of a block and the results of a segment; tasks are of different lines or
            // channels.
            unsafe {
                let results: *mut f32 = worker.scratch.add(weight_bytes).cast();
                self.widen_weights(block, weights);
                for line0 in (task * per_task..end).step_by(together) {
                    for pixel0 in (0..width).step_by(SEGMENT) {
                        let count = SEGMENT.min(width - pixel0);
                        let together = together.min(end - line0);
                        for at in 0..together {
                            let results = results.add(at * count * CHANNELS);
                            self.run_segment(line0 + at, pixel0, count, block, results, &mut reads);
                        }
                        let row0 = line0 * width + pixel0;
                        epilogue.apply(results, CHANNELS, row0, first, together * count, block.count);
                    }
                }
            }
        })?;
        Ok(())
    }

    /// # Safety
    /// `to` must hold a row of `CHANNELS` f32 for each input of the groups at each tap.
    unsafe fn widen_weights(&self, block: Block, to: *mut f32) {
        let PackedWeight { ptr, dtype, .. } = *self.weight;
        for row in 0..rows(self.conv) {
            let from = ptr.wrapping_add((row * self.conv.out_channels + block.first) * dtype.size_bytes());
            // SAFETY: the packed weight has these channels, and `to` this row.
            unsafe { widen(self.isa, dtype, from, block.count, to.add(row * CHANNELS)) };
        }
    }

    /// # Safety
    /// As [`Self::run`]; `results` must hold `count x CHANNELS` f32.
    unsafe fn run_segment(
        &self,
        line: usize,
        pixel0: usize,
        count: usize,
        block: Block,
        results: *mut f32,
        reads: &mut Reads,
    ) {
        self.find_rows(line, block, reads);
        let inside = self.inside(pixel0, count);
        let step = (self.conv.stride[2] as isize * self.conv.strides[3]) * self.dtype.size_bytes() as isize;
        let group = Group::of(self.conv);
        // SAFETY: taps inside the image; pixels of the segment.
        unsafe {
            for pixel in (pixel0..inside.start).chain(inside.end..pixel0 + count) {
                self.find_taps(pixel, reads);
                let results = results.add((pixel - pixel0) * CHANNELS);
                add_taps(self.isa, self.dtype, group, &reads.taps, step, 1, block.count, results);
            }
            if inside.len() >= PIXELS && self.slides() {
                self.move_rows(inside.start, reads);
                let results = results.add((inside.start - pixel0) * CHANNELS);
                let taps = self.conv.kernel[2];
                add_rows(self.isa, self.dtype, group, taps, &reads.rows, step, inside.len(), block.count, results);
            } else if !inside.is_empty() {
                self.find_taps(inside.start, reads);
                let results = results.add((inside.start - pixel0) * CHANNELS);
                add_taps(self.isa, self.dtype, group, &reads.taps, step, inside.len(), block.count, results);
            }
        }
    }

    /// Whether neighbours' windows are one pixel apart, and of a width that [`add_rows`] has.
    fn slides(&self) -> bool {
        let conv = self.conv;
        conv.stride[2] == 1 && conv.dilation[2] == 1 && matches!(conv.kernel[2], 3 | 5 | 7)
    }

    /// Rows that begin where the window of a pixel inside does.
    fn move_rows(&self, pixel: usize, Reads { rows, .. }: &mut Reads) {
        let at = (pixel as isize - self.conv.padding[2]) * self.conv.strides[3] * self.dtype.size_bytes() as isize;
        rows.iter_mut().for_each(|(x, _)| *x = x.wrapping_offset(at));
    }

    /// Of `count` pixels from `pixel0` on those whose window lies inside the line; none of an upsampled one, whose pixels
    /// are not at one distance.
    fn inside(&self, pixel0: usize, count: usize) -> std::ops::Range<usize> {
        let conv = self.conv;
        let (stride, end) = (conv.stride[2] as isize, pixel0 + count);
        let window = (conv.dilation[2] * conv.kernel[2].saturating_sub(1)) as isize;
        let first = (conv.padding[2].max(0) as usize).div_ceil(conv.stride[2]).max(pixel0);
        let last = (conv.input[2] as isize - 1 - window + conv.padding[2]).div_euclid(stride);
        match conv.upsample[2] == 1 && last >= first as isize && first < end {
            true => first..end.min(last as usize + 1),
            false => end..end,
        }
    }

    /// The rows of the image that a line's windows read.
    fn find_rows(&self, line: usize, block: Block, reads: &mut Reads) {
        let conv = self.conv;
        let ([depth, height, _], [kd, kh, kw]) = (conv.output, conv.kernel);
        let Group { inputs, outputs } = Group::of(conv);
        let image = (line / (depth * height)) as isize * conv.strides[0] + (block.first / outputs * inputs) as isize;
        reads.rows.clear();
        for plane in 0..kd {
            let Some(plane_offset) = input_offset(conv, 0, line / height % depth, plane) else { continue };
            for row in 0..kh {
                let Some(row_offset) = input_offset(conv, 1, line % height, row) else { continue };
                let offset = (image + plane_offset + row_offset) * self.dtype.size_bytes() as isize;
                let weights = block.weights.wrapping_add((plane * kh + row) * kw * inputs * CHANNELS);
                reads.rows.push((self.x.wrapping_offset(offset), weights));
            }
        }
    }

    /// The taps of a pixel that lie inside the image.
    fn find_taps(&self, pixel: usize, Reads { rows, taps }: &mut Reads) {
        let inputs = Group::of(self.conv).inputs;
        taps.clear();
        for tap in 0..self.conv.kernel[2] {
            let Some(offset) = input_offset(self.conv, 2, pixel, tap) else { continue };
            let offset = offset * self.dtype.size_bytes() as isize;
            taps.extend(rows.iter().map(|(x, w)| (x.wrapping_offset(offset), w.wrapping_add(tap * inputs * CHANNELS))));
        }
    }
}

simd_dispatch! {
    /// `count` elements as f32.
    unsafe fn widen(dtype: DType, from: *const u8, count: usize, to: *mut f32) = widen_body
}

#[inline(always)]
unsafe fn widen_body<S: Simd>(s: S, dtype: DType, from: *const u8, count: usize, to: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { with_element!(dtype, e => widen_of(s, e, from, count, to), else ()) }
}

#[inline(always)]
unsafe fn widen_of<S: Simd, E: Element>(s: S, e: E, from: *const u8, count: usize, to: *mut f32) {
    let mut c = 0;
    while c < count {
        let n = S::LANES.min(count - c);
        // SAFETY: `count` elements at both addresses.
        unsafe { s.store_n(to.add(c), e.load_n(s, from, c, n), n) };
        c += n;
    }
}

simd_dispatch! {
    /// For each of `pixels`, `step` bytes apart: the sum over `taps` of its channels times weights. Results of pixels are
    /// `CHANNELS` apart.
    unsafe fn add_taps(
        dtype: DType,
        group: Group,
        taps: &[Tap],
        step: isize,
        pixels: usize,
        channels: usize,
        out: *mut f32,
    ) = add_taps_body
}

#[inline(always)]
unsafe fn add_taps_body<S: Simd>(
    s: S,
    dtype: DType,
    group: Group,
    taps: &[Tap],
    step: isize,
    pixels: usize,
    channels: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        with_element!(dtype, e => match group.is_one() {
            true => add_taps_of::<S, _, _>(s, e, Own, taps, step, pixels, channels, out),
            false => add_taps_of::<S, _, _>(s, e, Shared::new(s, group), taps, step, pixels, channels, out),
        }, else ())
    }
}

#[inline(always)]
unsafe fn add_taps_of<S: Simd, E: Element, L: Lanes<S>>(
    s: S,
    e: E,
    lanes: L,
    taps: &[Tap],
    step: isize,
    pixels: usize,
    channels: usize,
    out: *mut f32,
) {
    let mut pixel = 0;
    // SAFETY: forwarded. A last block begins early enough to be whole; what it gives twice is the same.
    unsafe {
        while pixel < pixels && pixels >= PIXELS {
            let first = pixel.min(pixels - PIXELS);
            add_pixels::<S, E, L, PIXELS>(s, e, lanes, taps, step, first, channels, out);
            pixel = first + PIXELS;
        }
        while pixel < pixels && pixels >= PIXELS / 2 {
            let first = pixel.min(pixels - PIXELS / 2);
            add_pixels::<S, E, L, { PIXELS / 2 }>(s, e, lanes, taps, step, first, channels, out);
            pixel = first + PIXELS / 2;
        }
        while pixel < pixels {
            add_pixel(s, e, lanes, taps, step * pixel as isize, channels, out.add(pixel * CHANNELS));
            pixel += 1;
        }
    }
}

/// Which inputs the lanes of a vector of channels take.
trait Lanes<S: Simd>: Copy {
    /// Inputs of each group.
    fn inputs(self) -> usize;

    /// For `n` channels from `c` on their groups' input number `input`.
    ///
    /// # Safety
    /// `x` must point to the first channel's group's inputs, and those of the others must follow.
    unsafe fn load<E: Element>(self, s: S, e: E, x: *const u8, c: usize, n: usize, input: usize) -> S::F;
}

/// Each its own.
#[derive(Clone, Copy)]
struct Own;

impl<S: Simd> Lanes<S> for Own {
    #[inline(always)]
    fn inputs(self) -> usize {
        1
    }

    #[inline(always)]
    unsafe fn load<E: Element>(self, s: S, e: E, x: *const u8, c: usize, n: usize, _input: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { load_lanes(s, e, x, c, n) }
    }
}

/// Those of a group the same.
#[derive(Clone, Copy)]
struct Shared<S: Simd> {
    group: Group,
    /// For each lane the first input of its group, among those of the vector.
    first: S::I,
}

impl<S: Simd> Shared<S> {
    #[inline(always)]
    fn new(s: S, group: Group) -> Self {
        let mut first = [0i32; 16];
        for (lane, first) in first.iter_mut().enumerate().take(S::LANES) {
            // All lanes have one group where that has more outputs than a vector has lanes.
            *first = if group.outputs > S::LANES { 0 } else { (lane / group.outputs * group.inputs) as i32 };
        }
        // SAFETY: there are as many numbers as a vector has lanes, or more.
        Self { group, first: s.bits(unsafe { s.load(first.as_ptr().cast()) }) }
    }
}

impl<S: Simd> Lanes<S> for Shared<S> {
    #[inline(always)]
    fn inputs(self) -> usize {
        self.group.inputs
    }

    #[inline(always)]
    unsafe fn load<E: Element>(self, s: S, e: E, x: *const u8, c: usize, n: usize, input: usize) -> S::F {
        let Group { inputs, outputs } = self.group;
        let at = c / outputs * inputs;
        // SAFETY: blocks of channels have whole groups, and no group has more inputs than outputs.
        unsafe {
            if outputs > S::LANES {
                return s.spread(e.load_n(s, x, at + input, 1), self.first);
            }
            let inside = load_lanes(s, e, x, at, n / outputs * inputs);
            s.spread(inside, s.add_i(self.first, s.splat_i(input as i32)))
        }
    }
}

/// `n` channels of a vector from `c` on; whole ones are loaded without a mask.
#[inline(always)]
unsafe fn load_lanes<S: Simd, E: Element>(s: S, e: E, x: *const u8, c: usize, n: usize) -> S::F {
    // SAFETY: the caller vouches for these channels.
    unsafe { if n == S::LANES { e.load(s, x, c) } else { e.load_n(s, x, c, n) } }
}

/// `P` pixels from `first` on, a vector of channels at a time.
#[inline(always)]
unsafe fn add_pixels<S: Simd, E: Element, L: Lanes<S>, const P: usize>(
    s: S,
    e: E,
    lanes: L,
    taps: &[Tap],
    step: isize,
    first: usize,
    channels: usize,
    out: *mut f32,
) {
    let mut c = 0;
    // SAFETY: the caller vouches for the channels of these pixels.
    unsafe {
        let out = out.add(first * CHANNELS);
        while c < channels {
            let n = S::LANES.min(channels - c);
            let mut sums = [s.splat(0.0); P];
            for &(x, w) in taps {
                for input in 0..lanes.inputs() {
                    let w = s.load_n(w.add(input * CHANNELS + c), n);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        *sum = s.mla(lanes.load(s, e, x.offset(step * (first + i) as isize), c, n, input), w, *sum);
                    }
                }
            }
            for (i, sum) in sums.into_iter().enumerate() {
                s.store_n(out.add(i * CHANNELS + c), sum, n);
            }
            c += n;
        }
    }
}

simd_dispatch! {
    /// [`add_taps`] where windows are `window` pixels wide and each begins a pixel after the one before: over `rows` that
    /// begin where the first window does. There are [`PIXELS`] pixels or more.
    unsafe fn add_rows(
        dtype: DType,
        group: Group,
        window: usize,
        rows: &[Tap],
        step: isize,
        pixels: usize,
        channels: usize,
        out: *mut f32,
    ) = add_rows_body
}

#[inline(always)]
unsafe fn add_rows_body<S: Simd>(
    s: S,
    dtype: DType,
    group: Group,
    window: usize,
    rows: &[Tap],
    step: isize,
    pixels: usize,
    channels: usize,
    out: *mut f32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        with_element!(dtype, e => match group.is_one() {
            true => add_windows(s, e, Own, window, rows, step, pixels, channels, out),
            false => add_windows(s, e, Shared::new(s, group), window, rows, step, pixels, channels, out),
        }, else ())
    }
}

#[inline(always)]
unsafe fn add_windows<S: Simd, E: Element, L: Lanes<S>>(
    s: S,
    e: E,
    lanes: L,
    window: usize,
    rows: &[Tap],
    step: isize,
    pixels: usize,
    channels: usize,
    out: *mut f32,
) {
    // SAFETY: forwarded.
    unsafe {
        match window {
            3 => add_rows_of::<S, E, L, 3>(s, e, lanes, rows, step, pixels, channels, out),
            5 => add_rows_of::<S, E, L, 5>(s, e, lanes, rows, step, pixels, channels, out),
            _ => add_rows_of::<S, E, L, 7>(s, e, lanes, rows, step, pixels, channels, out),
        }
    }
}

#[inline(always)]
unsafe fn add_rows_of<S: Simd, E: Element, L: Lanes<S>, const WINDOW: usize>(
    s: S,
    e: E,
    lanes: L,
    rows: &[Tap],
    step: isize,
    pixels: usize,
    channels: usize,
    out: *mut f32,
) {
    let inputs = lanes.inputs();
    let mut pixel = 0;
    while pixel < pixels {
        // The last block begins early enough to be whole; what it gives twice is the same.
        let first = pixel.min(pixels - PIXELS);
        pixel = first + PIXELS;
        let mut c = 0;
        while c < channels {
            let n = S::LANES.min(channels - c);
            let mut sums = [s.splat(0.0); PIXELS];
            // SAFETY: the caller vouches for the channels of these pixels and of their windows.
            unsafe {
                for &(x, w) in rows {
                    for input in 0..inputs {
                        let mut weights = [s.splat(0.0); WINDOW];
                        for (tap, weight) in weights.iter_mut().enumerate() {
                            *weight = s.load_n(w.add((tap * inputs + input) * CHANNELS + c), n);
                        }
                        let mut x = x.offset(step * first as isize);
                        for at in 0..PIXELS + WINDOW - 1 {
                            let value = lanes.load(s, e, x, c, n, input);
                            x = x.wrapping_offset(step);
                            for tap in 0..WINDOW {
                                // The pixel whose window has this one at `tap`.
                                if at >= tap && at - tap < PIXELS {
                                    sums[at - tap] = s.mla(value, weights[tap], sums[at - tap]);
                                }
                            }
                        }
                    }
                }
                for (i, sum) in sums.into_iter().enumerate() {
                    s.store_n(out.add((first + i) * CHANNELS + c), sum, n);
                }
            }
            c += n;
        }
    }
}

/// One pixel, four vectors of channels at a time.
#[inline(always)]
unsafe fn add_pixel<S: Simd, E: Element, L: Lanes<S>>(
    s: S,
    e: E,
    lanes: L,
    taps: &[Tap],
    offset: isize,
    channels: usize,
    out: *mut f32,
) {
    let (l, inputs) = (S::LANES, lanes.inputs());
    let mut c = 0;
    // SAFETY: the caller vouches for the channels of this pixel.
    unsafe {
        while c + 4 * l <= channels {
            let mut sums = [s.splat(0.0); 4];
            for &(x, w) in taps {
                let x = x.offset(offset);
                for input in 0..inputs {
                    let w = w.add(input * CHANNELS);
                    for (i, sum) in sums.iter_mut().enumerate() {
                        let at = c + i * l;
                        *sum = s.mla(lanes.load(s, e, x, at, l, input), s.load(w.add(at)), *sum);
                    }
                }
            }
            for (i, sum) in sums.into_iter().enumerate() {
                s.store(out.add(c + i * l), sum);
            }
            c += 4 * l;
        }
        while c < channels {
            let n = l.min(channels - c);
            let mut sum = s.splat(0.0);
            for &(x, w) in taps {
                for input in 0..inputs {
                    let w = s.load_n(w.add(input * CHANNELS + c), n);
                    sum = s.mla(lanes.load(s, e, x.offset(offset), c, n, input), w, sum);
                }
            }
            s.store_n(out.add(c), sum, n);
            c += n;
        }
    }
}

/// Element offset along an axis of what a tap reads, unless it is padding.
#[inline]
fn input_offset(conv: &Conv, axis: usize, place: usize, tap: usize) -> Option<isize> {
    let at = (place * conv.stride[axis] + tap * conv.dilation[axis]) as isize - conv.padding[axis];
    let at = usize::try_from(at).ok().filter(|at| *at < conv.input[axis] * conv.upsample[axis])?;
    let at = if conv.upsample[axis] == 1 { at } else { at / conv.upsample[axis] };
    Some(at as isize * conv.strides[axis + 1])
}
