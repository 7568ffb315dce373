//! Depthwise convolution: one input channel per output channel, so nothing is shared and the vector runs over channels.
//!
//! ```text
//! task = (image, depth, block of output rows)
//!   weights -> f32 scratch [tap][channel] (once per task)
//!   for each output pixel, four vectors of channels:  sum over taps inside the image of x[pixel][c..] * w[tap][c..]
//!   epilogue(one row of pixels)
//! ```
//!
//! A tap in the padding is skipped. The bound is memory, and L1 for the taps.

use super::KernelError;
use super::conv::{Conv, PackedWeight};
use super::pack::elements_per_unit;
use super::simd::{Element, Simd};
use super::tile_exec_ops::load_scalar;
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::{simd_dispatch, with_element};

/// Whether a convolution is depthwise.
pub(crate) fn suits(conv: &Conv) -> bool {
    conv.groups > 1 && conv.groups == conv.in_channels && conv.groups == conv.out_channels
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

impl Depthwise<'_> {
    /// Runs the convolution.
    ///
    /// # Safety
    /// As [`conv`](super::conv::conv).
    pub(crate) unsafe fn run(&self, pool: &Pool, epilogue: &dyn Epilogue) -> Result<(), KernelError> {
        let conv = self.conv;
        let [depth, height, width] = conv.output;
        let lines = conv.batch * depth * height;
        let per_task = lines.div_ceil(4 * pool.threads()).clamp(1, 8);
        let taps: usize = conv.kernel.iter().product();
        let weight_bytes = (taps * conv.in_channels * 4).next_multiple_of(64);
        let bytes = weight_bytes + width * conv.out_channels * 4;
        pool.run_scratch(lines.div_ceil(per_task), bytes, |task, worker| {
            // SAFETY: scratch holds the weights and one line of results; lines are disjoint.
            unsafe {
                let weights: *mut f32 = worker.scratch.cast();
                self.widen_weights(weights, taps);
                let mut used = Vec::with_capacity(taps);
                for line in task * per_task..lines.min((task + 1) * per_task) {
                    let results: *mut f32 = worker.scratch.add(weight_bytes).cast();
                    self.run_line(weights, line, results, &mut used);
                    epilogue.apply(results, conv.out_channels, line * width, 0, width, conv.out_channels);
                }
            }
        })?;
        Ok(())
    }

    /// Gathers the one used lane of each group's panel.
    ///
    /// # Safety
    /// `to` must hold `taps x channels` f32.
    unsafe fn widen_weights(&self, to: *mut f32, taps: usize) {
        let (dtype, channels) = (self.weight.dtype, self.conv.in_channels);
        let (per_unit, lanes) = (elements_per_unit(dtype), self.weight.width / 2);
        for channel in 0..channels {
            let group = self.weight.ptr.wrapping_add(channel * self.weight.group_bytes);
            for tap in 0..taps {
                let offset = tap / per_unit * lanes * 4 + tap % per_unit * dtype.size_bytes();
                // SAFETY: the panel of a group has `lanes` columns, of which the first is used.
                unsafe { to.add(tap * channels + channel).write(load_scalar(dtype, group.add(offset))) };
            }
        }
    }

    /// # Safety
    /// As [`Self::run`]; `weights` as [`Self::widen_weights`] left them.
    unsafe fn run_line(&self, weights: *const f32, line: usize, results: *mut f32, used: &mut Vec<Tap>) {
        let conv = self.conv;
        let [depth, height, width] = conv.output;
        let (image, line_depth, row) = (line / (depth * height), line / height % depth, line % height);
        let [_, kh, kw] = conv.kernel;
        let size = self.dtype.size_bytes() as isize;
        let image = self.x.wrapping_byte_offset(image as isize * conv.strides[0] * size);
        for pixel in 0..width {
            used.clear();
            for tap in 0..conv.kernel.iter().product() {
                let taps = [tap / (kh * kw), tap / kw % kh, tap % kw];
                if let Some(offset) = input_offset(conv, [line_depth, row, pixel], taps) {
                    used.push((
                        image.wrapping_byte_offset(offset * size),
                        weights.wrapping_add(tap * conv.in_channels),
                    ));
                }
            }
            // SAFETY: taps inside the image, and the line of results.
            unsafe { add_taps(self.isa, self.dtype, used, conv.in_channels, results.add(pixel * conv.in_channels)) };
        }
    }
}

/// Channels of the pixel that a tap reads, and their weights.
type Tap = (*const u8, *const f32);

simd_dispatch! {
    /// The sum over `taps` of pixel times weights, `channels` of each.
    unsafe fn add_taps(dtype: DType, taps: &[Tap], channels: usize, out: *mut f32) = add_taps_body
}

#[inline(always)]
unsafe fn add_taps_body<S: Simd>(s: S, dtype: DType, taps: &[Tap], channels: usize, out: *mut f32) {
    // SAFETY: the caller's promise.
    unsafe { with_element!(dtype, e => add_taps_of(s, e, taps, channels, out), else ()) }
}

#[inline(always)]
unsafe fn add_taps_of<S: Simd, E: Element>(s: S, e: E, taps: &[Tap], channels: usize, out: *mut f32) {
    let l = S::LANES;
    let mut c = 0;
    // SAFETY: `channels` elements at every address.
    unsafe {
        while c + 4 * l <= channels {
            let mut sums = [s.splat(0.0); 4];
            for &(x, w) in taps {
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = s.mla(e.load(s, x, c + i * l), s.load(w.add(c + i * l)), *sum);
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
                sum = s.mla(e.load_n(s, x, c, n), s.load_n(w.add(c), n), sum);
            }
            s.store_n(out.add(c), sum, n);
            c += n;
        }
    }
}

/// Element offset of the pixel that a tap reads, unless it is padding.
fn input_offset(conv: &Conv, place: [usize; 3], taps: [usize; 3]) -> Option<isize> {
    let mut offset = 0;
    for axis in 0..3 {
        let at = (place[axis] * conv.stride[axis] + taps[axis] * conv.dilation[axis]) as isize - conv.padding[axis];
        if at < 0 || at >= (conv.input[axis] * conv.upsample[axis]) as isize {
            return None;
        }
        offset += at / conv.upsample[axis] as isize * conv.strides[axis + 1];
    }
    Some(offset)
}
