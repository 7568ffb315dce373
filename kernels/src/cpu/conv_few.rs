//! Convolution to few channels: one matrix product for all taps, then a sum over the window.
//!
//! ```text
//! columns [channel][(kh, kw, oc)], one matrix a plane of taps: three channels out and 3x3 taps fill 27 of 32 lanes
//! task = (image, output plane, band of output rows, block of columns)
//!   gather the columns out of the packed weight
//!   for each output row:
//!     for each plane of taps, each input row that its windows reach and no row before had:
//!       Y[row] = pixels * columns                              a ring of as many rows as a window is high
//!     sums[pixel, oc] = sum over taps (kd, kh, kw) of Y[kd, row + kh][pixel + kw, (kh, kw, oc)]
//!     epilogue(sums)
//! ```
//!
//! A tap alone has as many columns as there are output channels, and a panel of few is mostly padding: three channels take
//! 9 x 8 lanes with AVX2 and 9 x 16 with AVX-512. Side by side the taps fill their panels. What that costs is the rows that
//! bands share, two per cent of a large image and more of a small one, and the sum, a vector of four floats per tap and pixel.
//!
//! The weight is packed as for the other forms: gathering takes as long as a few dozen pixels.

use super::KernelError;
use super::conv::{Call, Conv, Region};
use super::gemm_driver::widened;
use super::gemm_kernel::{CopyRow, Form, Kernel, Runner, copy_row, of_form};
use super::pack::{elements_per_unit, units, width_at};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::features;
use crate::pool::{Pool, Worker};

/// Bytes of the ring that decide how wide a block is, its columns at least, and its rows at most.
const RING: usize = 64 << 10;
const MIN_COLUMNS: usize = 128;
const MAX_ROWS: usize = 64;
/// Rows of a task at least, in rows that windows of neighbouring bands share.
const MIN_BANDS: usize = 4;
/// Rows and columns that windows of neighbouring blocks share at most: they are multiplied for each of them.
const MAX_SHARED: [usize; 2] = [8, 32];
/// Channels of one accumulation chain.
const CHUNK: usize = 320;
/// Bytes of an image from which on its pixels are copied to be multiplied: a copy reads memory in order, a tile does not
/// (measured with an L3 of 32 MiB: 134 MB in 0.68 to 0.83 of the time, 5 MB in 1.06).
const FAR: usize = 16 << 20;
/// Output channels are summed so many at a time.
const SUMS: usize = 4;
/// Shorter chains take no longer than their results do to store.
const MIN_CHANNELS: usize = 16;
const MIN_WIDTH: usize = 8;

/// The kernel to multiply with in this form, if that is the better one for a convolution: where it needs at most three
/// quarters of the lanes.
///
/// Pairs of bf16 save half of the instructions, the form more, so that bf16 is widened. AMX saves more than the form.
pub(crate) fn suited(kernel: &'static Kernel, conv: &Conv, weight: DType) -> Option<&'static Kernel> {
    let kernel = match kernel.form {
        Form::F32 => kernel,
        Form::Bf16x3 | Form::Bf16x2 => of_form(kernel.isa, Form::F32),
        Form::Bf16Pairs if !kernel.is_amx() => of_form(kernel.isa, Form::F32),
        _ => return None,
    };
    let [planes, kh, kw] = conv.kernel;
    let per_plane = kh * kw * conv.out_channels;
    let is_compact =
        (0..2).all(|axis| (conv.kernel[axis + 1].max(1) - 1) * conv.dilation[axis + 1] <= MAX_SHARED[axis]);
    let held = planes * conv.in_channels * lanes(per_plane, kernel.nr) * 4;
    let is_better = conv.groups == 1
        && conv.stride[1..] == [1, 1]
        && conv.upsample == [1; 3]
        && conv.in_channels >= MIN_CHANNELS
        && conv.in_channels.is_multiple_of(elements_per_unit(weight))
        && conv.output[2] >= MIN_WIDTH
        && is_compact
        && conv.out_channels <= kernel.nr / 2
        && 4 * lanes(per_plane, kernel.nr) <= 3 * kh * kw * lanes(conv.out_channels, kernel.nr)
        && held <= features().l2_bytes / 2;
    is_better.then_some(kernel)
}

/// Lanes of the panels of `n` columns.
fn lanes(n: usize, nr: usize) -> usize {
    let last = n.saturating_sub(1) / nr * nr;
    last + width_at(n, last, nr)
}

/// One convolution, and how it is cut.
pub(crate) struct Few<'a> {
    call: Call<'a>,
    copy: CopyRow,
    /// Pixels are multiplied where they lie.
    in_place: bool,
    /// Columns of a plane of taps, with the padding of their panels.
    lanes: usize,
    /// Output rows and columns of a block.
    block: [usize; 2],
    /// Input rows and columns that a block's windows reach: of a row of outputs, and of a block's columns.
    window: [usize; 2],
    /// Channels of a chunk.
    chunk: usize,
    scratch: Scratch,
}

/// Where a task's scratch memory holds what, in bytes.
#[derive(Clone, Copy)]
struct Scratch {
    ring: usize,
    sums: usize,
    /// Pixels of a tile, copied; the widened weight of a tap before.
    stage: usize,
    bytes: usize,
}

impl<'a> Few<'a> {
    pub(crate) fn new(call: Call<'a>, threads: usize) -> Few<'a> {
        let Call { kernel, conv, dtype, weight, .. } = call;
        let [planes, kh, kw] = conv.kernel;
        let [depth, height, width] = conv.output;
        let lanes = lanes(kh * kw * conv.out_channels, kernel.nr);
        let least = (MIN_BANDS * (conv.reach(1, 1) - 1)).clamp(1, MAX_ROWS);
        let wanted = if threads == 1 { 1 } else { (4 * threads).div_ceil(conv.batch * depth) };
        // Bands first: products and sums run along rows.
        let widest = RING / (planes * conv.reach(1, 1) * lanes * 4);
        let pieces = wanted.div_ceil(height.div_ceil(least)).min(width.div_ceil(MIN_COLUMNS));
        let columns = width.div_ceil(pieces.max(width.div_ceil(widest.max(MIN_COLUMNS))));
        let bands = wanted.div_ceil(width.div_ceil(columns));
        let rows = height.div_ceil(bands).clamp(least, MAX_ROWS).min(height);
        let rows = height.div_ceil(height.div_ceil(rows));
        let window = [conv.reach(1, 1), conv.reach(2, columns)];
        let chunk = conv.in_channels.div_ceil(conv.in_channels.div_ceil(CHUNK));
        let extent = conv.input.iter().product::<usize>() * conv.strides[3].unsigned_abs() * 4;
        let page = |bytes: usize| bytes.next_multiple_of(4096);
        let ring = page(planes * conv.in_channels * lanes * 4);
        // The sum reads whole vectors.
        let sums = ring + page((planes * window[0] * window[1] * lanes + SUMS) * 4);
        let stage = sums + page(columns * conv.out_channels.next_multiple_of(SUMS) * 4);
        let staged = kernel.mr * (chunk * 4 + 64);
        let bytes = stage + page(staged.max((conv.in_channels + 2) * weight.width * 4));
        Few {
            call,
            copy: copy_row(kernel.isa, dtype, kernel.form),
            in_place: dtype == DType::F32 && conv.strides[3] > 0 && extent <= FAR,
            lanes,
            block: [rows, columns],
            window,
            chunk,
            scratch: Scratch { ring, sums, stage, bytes },
        }
    }

    /// Runs the convolution.
    ///
    /// # Safety
    /// As [`conv`](super::conv::conv).
    pub(crate) unsafe fn run(&self, pool: &Pool, epilogue: &dyn Epilogue) -> Result<(), KernelError> {
        let conv = self.call.conv;
        pool.run_scratch(Region::count(conv, self.block), self.scratch.bytes, |index, worker| {
            let region = Region::at(conv, self.block, index);
            // SAFETY: tasks are disjoint blocks of the output; scratch has the size laid out above.
            unsafe { self.run_block(&region, worker, epilogue) }
        })?;
        Ok(())
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_block(&self, region: &Region, worker: Worker, epilogue: &dyn Epilogue) {
        let conv = self.call.conv;
        let sums: *mut f32 = worker.scratch.wrapping_add(self.scratch.sums).cast();
        let ld = conv.out_channels.next_multiple_of(SUMS);
        // SAFETY: offsets lie inside the scratch memory.
        unsafe {
            // Zeros stay where a window's columns lie in the padding.
            worker.scratch.write_bytes(0, self.scratch.sums);
            self.gather_columns(worker);
            // The first input row that no output row had so far.
            let mut next = isize::MIN;
            for line in 0..region.rows {
                let first = (region.row0 + line) as isize - conv.padding[1];
                for row in next.max(first)..first + self.window[0] as isize {
                    self.multiply_row(region, worker, row);
                }
                next = first + self.window[0] as isize;
                self.sum_row(region, worker, first, sums);
                epilogue.apply(sums, ld, region.row(conv, line), 0, region.pixels, conv.out_channels);
            }
        }
    }

    /// Lays the columns of all taps of a plane side by side, in panels of the kernel's width.
    ///
    /// # Safety
    /// As [`Self::run`]; the room for the columns must be zero.
    unsafe fn gather_columns(&self, worker: Worker) {
        let Call { conv, kernel, weight, .. } = self.call;
        let (channels, outs) = (conv.in_channels, conv.out_channels);
        let per_plane = conv.kernel[1] * conv.kernel[2];
        let columns = per_plane * outs;
        // There is one panel, as there are few channels.
        let width = width_at(outs, 0, weight.width);
        for tap in 0..conv.kernel[0] * per_plane {
            let (plane, tap_in_plane) = (tap / per_plane, tap % per_plane);
            // SAFETY: a tap starts at a whole unit of the packed weight; the columns lie inside their plane's panels.
            unsafe {
                let packed = weight.ptr.add(units(tap * channels, weight.dtype) * width * 4);
                let wide = worker.scratch.add(self.scratch.stage);
                let from: *const f32 = widened(kernel, weight.dtype, packed, channels, width, wide).cast();
                let to: *mut f32 = worker.scratch.cast::<f32>().add(plane * channels * self.lanes);
                for oc in 0..outs {
                    let column = tap_in_plane * outs + oc;
                    let n0 = column / kernel.nr * kernel.nr;
                    let panel_width = width_at(columns, n0, kernel.nr);
                    let to = to.add(n0 * channels + column - n0);
                    for channel in 0..channels {
                        to.add(channel * panel_width).write(from.add(channel * width + oc).read());
                    }
                }
            }
        }
    }

    /// Y of one input row, for each plane of taps whose plane lies in the image; nothing if the row lies in the padding.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn multiply_row(&self, region: &Region, worker: Worker, row: isize) {
        let Call { conv, x, dtype, .. } = self.call;
        if row < 0 || row >= conv.input[1] as isize {
            return;
        }
        // The columns of the window inside the image.
        let left = region.pixel0 as isize - conv.padding[2];
        let reach = (region.pixels + self.window[1] - self.block[1]) as isize;
        let (from, to) = (left.max(0), (left + reach).min(conv.input[2] as isize));
        if from >= to {
            return;
        }
        for kd in 0..conv.kernel[0] {
            let Some(plane) = conv.plane(region.depth, kd) else { continue };
            let offset = region.image as isize * conv.strides[0]
                + plane as isize * conv.strides[1]
                + row * conv.strides[2]
                + from * conv.strides[3];
            let x = x.wrapping_byte_offset(offset * dtype.size_bytes() as isize);
            // SAFETY: these pixels lie in the image, and their places in the ring.
            unsafe {
                let y = self.slot(worker, kd, row).add((from - left) as usize * self.lanes);
                self.multiply(worker, kd, x, (to - from) as usize, y);
            }
        }
    }

    /// Where Y of an input row lies.
    fn slot(&self, worker: Worker, kd: usize, row: isize) -> *mut f32 {
        let [slots, columns] = self.window;
        let slot = kd * slots + row.rem_euclid(slots as isize) as usize;
        worker.scratch.wrapping_add(self.scratch.ring).cast::<f32>().wrapping_add(slot * columns * self.lanes)
    }

    /// `y` = pixels from `x` on, times the columns of a plane of taps.
    ///
    /// # Safety
    /// There must be `pixels` at `x`, and room for their results at `y`.
    unsafe fn multiply(&self, worker: Worker, kd: usize, x: *const u8, pixels: usize, y: *mut f32) {
        let (Call { conv, kernel, dtype, .. }, chunk) = (self.call, self.chunk);
        let columns = conv.kernel[1] * conv.kernel[2] * conv.out_channels;
        let size = dtype.size_bytes() as isize;
        let panels = worker.scratch.wrapping_add(kd * conv.in_channels * self.lanes * 4);
        let stage = worker.scratch.wrapping_add(self.scratch.stage);
        let stage_ld = chunk * 4 + 64;
        let mut runner = Runner::new(kernel);
        for c0 in (0..conv.in_channels).step_by(chunk) {
            let terms = chunk.min(conv.in_channels - c0);
            let tiles = pixels.div_ceil(kernel.mr);
            let mut first = 0;
            for tile in 0..tiles {
                let rows = kernel.next_height(pixels - first, tiles - tile);
                let pixel =
                    |index: usize| x.wrapping_byte_offset((index as isize * conv.strides[3] + c0 as isize) * size);
                // SAFETY: the pixels lie in the image, the stage holds those of a tile, and `y` their results.
                unsafe {
                    let a = if self.in_place {
                        (pixel(first), (conv.strides[3] * size) as usize)
                    } else {
                        for row in 0..rows {
                            (self.copy)(pixel(first + row), stage.add(row * stage_ld), terms);
                        }
                        (stage.cast_const(), stage_ld)
                    };
                    // Tiles fetch what the next one reads, a line for every four terms.
                    let (mut n0, mut ahead) = (0, pixel(first + rows));
                    while n0 < columns {
                        let width = width_at(columns, n0, kernel.nr);
                        let panel = panels.add((n0 * conv.in_channels + c0 * width) * 4);
                        runner.take_panel(panel, width, terms);
                        runner.tile(rows, a, (y.add(first * self.lanes + n0), self.lanes), c0 > 0, ahead);
                        ahead = ahead.wrapping_add(terms / 4 * 64);
                        n0 += width;
                    }
                }
                first += rows;
            }
        }
    }

    /// Sums over the windows of a row of outputs, the first of which are at input row `first`.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn sum_row(&self, region: &Region, worker: Worker, first: isize, sums: *mut f32) {
        let conv = self.call.conv;
        let [planes, kh, kw] = conv.kernel;
        let outs = conv.out_channels;
        let ld = outs.next_multiple_of(SUMS);
        let is_inside = |tap: usize| {
            let row = first + (tap * conv.dilation[1]) as isize;
            (0..conv.input[1] as isize).contains(&row).then_some(row)
        };
        let mut is_first = true;
        for kd in (0..planes).filter(|&kd| conv.plane(region.depth, kd).is_some()) {
            for (tap, row) in (0..kh).filter_map(|tap| is_inside(tap).map(|row| (tap, row))) {
                let y = self.slot(worker, kd, row).wrapping_add(tap * kw * outs);
                for oc in (0..outs).step_by(SUMS) {
                    // SAFETY: a window's columns lie in the ring, which has room for a vector more.
                    unsafe {
                        for pixel in 0..region.pixels {
                            let to: *mut [f32; SUMS] = sums.add(pixel * ld + oc).cast();
                            let mut sum = if is_first { [0.0; SUMS] } else { to.read() };
                            for tap in 0..kw {
                                let at = (pixel + tap * conv.dilation[2]) * self.lanes + tap * outs + oc;
                                let part = y.add(at).cast::<[f32; SUMS]>().read();
                                sum = std::array::from_fn(|i| sum[i] + part[i]);
                            }
                            to.write(sum);
                        }
                    }
                }
                is_first = false;
            }
        }
        if is_first {
            // SAFETY: as above.
            unsafe { sums.write_bytes(0, region.pixels * ld) };
        }
    }
}
