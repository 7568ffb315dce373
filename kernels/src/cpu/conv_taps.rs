//! Direct convolution with AMX whose tiles add up all taps before they store their sums.
//!
//! ```text
//! task = (group, columns, image, block of output rows x pixels)
//!   window[line][32 channels][pixel] = the input that the block's taps read, padding as zeros       in L2
//!   for each set of columns:
//!     for each chunk of kc channels:
//!       for each panel of nr channels:                              all taps of it stay in L1
//!         for each tile of mr pixels, down the rows:                two of three lines of its window are still in L1
//!           C scratch += sum over taps of pixels * panel            in registers; the first chunk begins at 0
//!     epilogue(C scratch)
//! ```
//!
//! Tap by tap, as [`conv_direct`](super::conv_direct) multiplies, each tile loads its pixels and its sums from L2 for every tap, and
//! with two bytes a term that takes as long as multiplying them: 28 to 31 ticks an instruction (2 MB of L2, 640 channels), 21 to 25 in
//! this order, 17 to 19 with everything in L1. What is left is mostly the weight, which comes from the last-level cache once
//! for each block of pixels: that is why blocks are large, and all channels of a window copied at once, however many columns follow.

use super::KernelError;
use super::conv::{Call, Conv, Region, Task};
use super::gemm_amx::{Tap, TapsJob, spread_units};
use super::gemm_kernel::{Kernel, Runner, TILE_UNITS};
use super::pack::{elements_per_unit, units, width_at};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::features;
use crate::pool::{Pool, Worker};

/// Bytes of a row of a tile register: what lies together in a window of one pixel.
const GROUP_BYTES: usize = 4 * TILE_UNITS;
/// Taps of a plane at most: a panel of one group of channels and as many taps is half of an L1 of 48 KiB.
const MAX_TAPS: usize = 12;
/// Bytes of all taps of a panel at most; a tile's pixels and sums share L1 with them.
const PANEL_BYTES: usize = 36 << 10;
/// Output pixels of a task, and along the width, at most.
const MAX_PIXELS: usize = 512;
const MAX_WIDTH: usize = 64;
/// Columns whose sums are held at a time, at most: 416 KiB of 512 pixels.
const MAX_SET: usize = 192;
/// Bytes between lines that are asked for: the processor fetches the other one of two by itself.
const PAIR_BYTES: usize = 128;

/// Whether this path is the one for a convolution: operands as they are, whole groups of channels, several taps, and outputs that
/// share most of what they read.
pub fn suits(kernel: &Kernel, conv: &Conv, dtype: DType, weight: DType) -> bool {
    let group = TILE_UNITS * elements_per_unit(weight);
    kernel.adds_taps()
        && kernel.form.takes(dtype)
        && (2..=MAX_TAPS).contains(&(conv.kernel[1] * conv.kernel[2]))
        && conv.stride[1..] == [1; 2]
        && (conv.in_channels / conv.groups).is_multiple_of(group)
        && conv.output[2] >= TILE_UNITS
        && window_bytes(conv, dtype, [1, conv.output[2].min(MAX_WIDTH)]) <= most_window_bytes()
}

/// What a window may take of L2, beside sums and the weight that streams through.
fn most_window_bytes() -> usize {
    features().l2_bytes / 2
}

/// Bytes of the window of a block of so many rows and pixels.
fn window_bytes(conv: &Conv, dtype: DType, [rows, pixels]: [usize; 2]) -> usize {
    conv.reach(1, rows) * conv.reach(2, pixels) * (conv.in_channels / conv.groups) * dtype.size_bytes()
}

/// One convolution, and how it is cut.
pub(crate) struct Together<'a> {
    call: Call<'a>,
    /// Channels of a chunk, a multiple of a group.
    kc: usize,
    /// Columns of a task, and how many blocks of them there are.
    nc: usize,
    col_blocks: usize,
    /// Columns of a set.
    set: usize,
    /// Output rows and pixels of a block.
    block: [usize; 2],
    /// Bytes of a window between lines, and between groups of channels.
    line_bytes: usize,
    group_step: usize,
    c_ld: usize,
    c_offset: usize,
    scratch_bytes: usize,
}

impl<'a> Together<'a> {
    /// Of a convolution that this path [`suits`].
    pub(crate) fn new(call: Call<'a>, threads: usize) -> Together<'a> {
        let Call { kernel, conv, dtype, weight, .. } = call;
        let (channels, outs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
        let group = TILE_UNITS * elements_per_unit(weight.dtype);
        let tap_bytes = conv.kernel[1] * conv.kernel[2] * kernel.nr * weight.dtype.size_bytes();
        let most = (PANEL_BYTES / (tap_bytes * group)).max(1) * group;
        let kc = channels.div_ceil(channels.div_ceil(most)).next_multiple_of(group);

        let [depth, height, width] = conv.output;
        let pixels = width.min(MAX_WIDTH);
        let mut rows = (MAX_PIXELS / pixels).clamp(1, height);
        while window_bytes(conv, dtype, [rows, pixels]) > most_window_bytes() {
            rows = rows.div_ceil(2);
        }
        let mut nc = outs.next_multiple_of(kernel.nr);
        let images = conv.batch * conv.groups * depth * width.div_ceil(pixels);
        let tasks = |rows: usize, nc: usize| images * height.div_ceil(rows) * outs.div_ceil(nc);
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        while tasks(rows, nc) < wanted {
            if 2 * rows * pixels > MAX_PIXELS && rows > 1 {
                rows = rows.div_ceil(2);
            } else if nc > 2 * kernel.nr {
                nc = nc.div_ceil(2).next_multiple_of(kernel.nr);
            } else {
                break;
            }
        }
        rows = height.div_ceil(height.div_ceil(rows));
        let set = nc.div_ceil(nc.div_ceil(MAX_SET)).next_multiple_of(kernel.nr);

        let group_step = conv.reach(2, pixels) * GROUP_BYTES;
        let line_bytes = channels / group * group_step;
        let c_ld = set + 16;
        let c_offset = (conv.reach(1, rows) * line_bytes).next_multiple_of(4096);
        let scratch_bytes = c_offset + rows * pixels * c_ld * 4;
        let block = [rows, pixels];
        let col_blocks = outs.div_ceil(nc);
        Together { call, kc, nc, col_blocks, set, block, line_bytes, group_step, c_ld, c_offset, scratch_bytes }
    }

    /// Runs the convolution.
    ///
    /// # Safety
    /// As [`conv`](super::conv::conv).
    pub(crate) unsafe fn run(&self, pool: &Pool, epilogue: &dyn Epilogue) -> Result<(), KernelError> {
        let conv = self.call.conv;
        let (places, outs) = (Region::count(conv, self.block), conv.out_channels / conv.groups);
        pool.run_scratch(conv.groups * self.col_blocks * places, self.scratch_bytes, |index, worker| {
            let columns = index / places;
            let (group, col0) = (columns / self.col_blocks, columns % self.col_blocks * self.nc);
            let region = Region::at(conv, self.block, index % places);
            let task = Task { group, col0, cols: self.nc.min(outs - col0), region };
            // SAFETY: tasks are disjoint blocks of the output; scratch has the size laid out above.
            unsafe { self.run_task(&task, worker, epilogue) }
        })?;
        Ok(())
    }

    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_task(&self, task: &Task, worker: Worker, epilogue: &dyn Epilogue) {
        let conv = self.call.conv;
        let planes = conv.kernel[0];
        // SAFETY: offsets lie inside the scratch memory; columns inside the task.
        unsafe {
            let c = worker.scratch.add(self.c_offset).cast::<f32>();
            let mut filled = None;
            for col0 in (task.col0..task.col0 + task.cols).step_by(self.set) {
                let set = Task { col0, cols: self.set.min(task.col0 + task.cols - col0), ..*task };
                let mut is_begun = false;
                for kd in 0..planes {
                    let Some(plane) = conv.plane(task.region.depth, kd) else { continue };
                    if filled != Some(kd) {
                        self.fill(task, plane, worker.scratch);
                        filled = Some(kd);
                    }
                    self.multiply(&set, kd, worker.scratch, c, is_begun);
                    is_begun = true;
                }
                if !is_begun {
                    c.write_bytes(0, task.region.rows * task.region.pixels * self.c_ld);
                }
                set.hand_over(conv, c, self.c_ld, epilogue);
            }
        }
    }

    /// Copies what the task's taps of one plane read, in upsampled coordinates, padding as zeros.
    ///
    /// # Safety
    /// As [`Self::run`]; `plane` must lie inside the input.
    unsafe fn fill(&self, task: &Task, plane: usize, window: *mut u8) {
        let Call { conv, x, dtype, .. } = self.call;
        let size = dtype.size_bytes() as isize;
        let channels = conv.in_channels / conv.groups;
        let groups = self.line_bytes / self.group_step;
        let first = task.region.image as isize * conv.strides[0]
            + (plane / conv.upsample[0]) as isize * conv.strides[1]
            + (task.group * channels) as isize;
        let origin = [1, 2].map(|axis| {
            let at = if axis == 1 { task.region.row0 } else { task.region.pixel0 };
            at as isize - conv.padding[axis]
        });
        let inside = |axis: usize, at: isize| {
            let limit = conv.input[axis] * conv.upsample[axis];
            usize::try_from(at).ok().filter(|&at| at < limit).map(|at| (at / conv.upsample[axis]) as isize)
        };
        for line in 0..conv.reach(1, task.region.rows) {
            let row = inside(1, origin[0] + line as isize);
            for pixel in 0..conv.reach(2, task.region.pixels) {
                let place = inside(2, origin[1] + pixel as isize);
                // SAFETY: inside the window and, where read, inside the image.
                unsafe {
                    let to = window.add(line * self.line_bytes + pixel * GROUP_BYTES);
                    match (row, place) {
                        (Some(row), Some(place)) => {
                            let at = first + row * conv.strides[2] + place * conv.strides[3];
                            spread_units(x.offset(at * size), groups, to, self.group_step);
                        }
                        _ => (0..groups).for_each(|group| to.add(group * self.group_step).write_bytes(0, GROUP_BYTES)),
                    }
                }
            }
        }
    }

    /// Sums up the products of one plane of taps for a set of columns, or adds them to what sums there are.
    ///
    /// # Safety
    /// As [`Self::run`]; `window` must hold that plane's, `c` the sums if there are any.
    unsafe fn multiply(&self, set: &Task, kd: usize, window: *const u8, c: *mut f32, is_begun: bool) {
        let Call { kernel, conv, weight, .. } = self.call;
        let (channels, outs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
        let group = TILE_UNITS * elements_per_unit(weight.dtype);
        let [_, high, wide] = conv.kernel;
        let Region { rows, pixels, .. } = set.region;
        let pieces = pixels.div_ceil(kernel.mr);
        let mut runner = Runner::new(kernel);
        for c0 in (0..channels).step_by(self.kc) {
            let rounds = self.kc.min(channels - c0) / group;
            let panel_at = |n0: usize| weight.panel_at(set.group, n0, kd * high * wide * channels + c0);
            let mut n0 = set.col0;
            while n0 < set.col0 + set.cols {
                let width = width_at(outs, n0, kernel.nr);
                let mut taps = [Tap::default(); MAX_TAPS];
                for (index, tap) in taps[..high * wide].iter_mut().enumerate() {
                    let (line, pixel) = (index / wide * conv.dilation[1], index % wide * conv.dilation[2]);
                    tap.a = (line * self.line_bytes + pixel * GROUP_BYTES) as isize;
                    tap.panel = units(index * channels, weight.dtype) * width * 4;
                }
                let panel = panel_at(n0);
                let next = if n0 + width < set.col0 + set.cols { panel_at(n0 + width) } else { panel };
                // Every tile asks for its part of the next panel.
                let tap_bytes = rounds * TILE_UNITS * width * 4;
                let step = (tap_bytes / (pieces * rows * rounds)).next_multiple_of(PAIR_BYTES).max(PAIR_BYTES);
                let mut asked = 0;
                let last = pixels - (pieces - 1) * kernel.mr;
                for piece in 0..pieces {
                    // Forwards and backwards in turn: registers stay set up for the height at the end.
                    let piece = if n0 / kernel.nr % 2 == 1 { pieces - 1 - piece } else { piece };
                    let height = if piece == pieces - 1 { last } else { kernel.mr };
                    for row in 0..rows {
                        let first = row * self.line_bytes + piece * kernel.mr * GROUP_BYTES;
                        let is_there = asked < tap_bytes;
                        let job = TapsJob {
                            accumulate: is_begun || c0 > 0,
                            taps: taps.as_ptr(),
                            taps_end: taps[high * wide..].as_ptr(),
                            a: window.wrapping_add(c0 / group * self.group_step + first),
                            a_step: self.group_step,
                            panel,
                            rounds,
                            next: if is_there { next.wrapping_add(asked) } else { panel },
                            next_step: if is_there { step } else { 0 },
                        };
                        asked += rounds * step;
                        let at = (row * pixels + piece * kernel.mr) * self.c_ld + n0 - set.col0;
                        // SAFETY: pixels of the window that the taps of these outputs read, panels with the layout of `pack`, whole
                        // groups of both; sums of as many rows and columns.
                        unsafe { runner.taps(height, width, &job, (c.add(at), self.c_ld)) };
                    }
                }
                n0 += width;
            }
        }
    }
}
