//! Depthwise convolution: one input channel per output channel, so nothing is shared and the vector runs over channels.
//!
//! ```text
//! task = (image, depth, block of output rows)
//!   weights -> f32 scratch [tap][channel] (once per task)
//!   for each output pixel, chunk of 64 channels:  sum over taps inside the image of x[pixel][c..] * w[tap][c..]
//!   epilogue(one row of pixels)
//! ```
//!
//! A tap in the padding is skipped. The bound is memory, and L1 for the taps.

use super::KernelError;
use super::conv::{Conv, PackedWeight};
use super::gemm_kernel::{CopyRow, Form, copy_row};
use super::pack::elements_per_unit;
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::{Pool, Worker};

const CHUNK: usize = 64;

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
                self.widen_weights(worker.scratch, taps);
                for line in task * per_task..lines.min((task + 1) * per_task) {
                    let results: *mut f32 = worker.scratch.add(weight_bytes).cast();
                    self.run_line(worker, line, results);
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
    unsafe fn widen_weights(&self, to: *mut u8, taps: usize) {
        let (dtype, channels) = (self.weight.dtype, self.conv.in_channels);
        let copy = copy_row(self.isa, dtype, Form::F32);
        let (per_unit, lanes) = (elements_per_unit(dtype), self.weight.width / 2);
        for channel in 0..channels {
            for tap in 0..taps {
                let offset = tap / per_unit * lanes * 4 + tap % per_unit * dtype.size_bytes();
                // SAFETY: the panel of a group has `lanes` columns, of which the first is used.
                unsafe {
                    let from = self.weight.ptr.add(channel * self.weight.group_bytes + offset);
                    copy(from, to.add((tap * channels + channel) * 4), 1);
                }
            }
        }
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_line(&self, worker: Worker, line: usize, results: *mut f32) {
        let conv = self.conv;
        let [depth, height, width] = conv.output;
        let (image, line_depth, row) = (line / (depth * height), line / height % depth, line % height);
        let copy = copy_row(self.isa, self.dtype, Form::F32);
        for pixel in 0..width {
            let place = [line_depth, row, pixel];
            for channel in (0..conv.in_channels).step_by(CHUNK) {
                let count = CHUNK.min(conv.in_channels - channel);
                let mut sums = [0f32; CHUNK];
                // SAFETY: taps lie inside the image, channels inside the pixel.
                unsafe {
                    let x = self.x.wrapping_byte_offset(
                        (image as isize * conv.strides[0] + channel as isize) * self.dtype.size_bytes() as isize,
                    );
                    let weights = worker.scratch.cast::<f32>().add(channel);
                    self.add_taps(x, weights, place, count, copy, &mut sums);
                    results.add(pixel * conv.out_channels + channel).copy_from_nonoverlapping(sums.as_ptr(), count);
                }
            }
        }
    }

    /// # Safety
    /// `x` must be the chunk's channels of the image, `weights` those of the weights.
    unsafe fn add_taps(
        &self,
        x: *const u8,
        weights: *const f32,
        place: [usize; 3],
        count: usize,
        copy: CopyRow,
        sums: &mut [f32; CHUNK],
    ) {
        let conv = self.conv;
        let [_, kh, kw] = conv.kernel;
        for tap in 0..conv.kernel.iter().product() {
            let Some(offset) = input_offset(conv, place, [tap / (kh * kw), tap / kw % kh, tap % kw]) else { continue };
            let mut values = [0f32; CHUNK];
            // SAFETY: `count` channels exist at the offset and in the weights.
            unsafe {
                copy(x.byte_offset(offset * self.dtype.size_bytes() as isize), values.as_mut_ptr().cast(), count);
                let weights = std::slice::from_raw_parts(weights.add(tap * conv.in_channels), count);
                for (sum, (value, weight)) in sums.iter_mut().zip(values.iter().zip(weights)) {
                    *sum += value * weight;
                }
            }
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
