//! Direct convolution: micro-kernel tiles that read the image itself, tap by tap.
//!
//! ```text
//! task = (group, block of nc channels, image, block of output rows x columns)
//!   C scratch = 0
//!   for each chunk of kc input channels:
//!     for each tap:                       pixels of an output row that the tap reads inside the image lie at one
//!       for each panel of nr channels:    distance: they are the rows of A, in place
//!         for each tile of mr pixels of one output row:   C scratch += pixels * panel
//!   epilogue(C scratch)
//! ```
//!
//! A tap that falls into the padding is not multiplied at all, so padding costs nothing. Where the image cannot be read
//! in place (its elements have to be widened, it is upsampled on the way, or its pixels are a multiple of 4 KiB apart and
//! would evict each other from L1), the chunk of the block's input window is first copied into L2 scratch, padding
//! included: one copy serves all taps, where the general path of [`conv`](super::conv) copies once per tap.
//!
//! Measured on one core of a Zen 5 server: 90 to 97 % of the multiply-add peak from 320 channels at 64x64 to 1280 at 8x8,
//! against 67 to 77 % for the general path, which spends the difference on copying windows.
//!
//! Weights are the panels of `pack`, terms in the order (depth, height, width, channel), as in the general path. Or they are read as
//! they lie: a task then has all pixels of its columns, and packs the panels of a chunk of channels, all taps of it, into its own L2 before
//! it multiplies them. Where there are few pixels, this saves writing all panels to memory and reading them again.

use super::KernelError;
use super::conv::{Call, Conv, Region, Task, Weight, pack_weight_panel};
use super::gemm_driver::widened;
use super::gemm_kernel::{CopyRow, Runner, copy_row};
use super::pack::{elements_per_unit, units, units_in, width_at};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::features;
use crate::pool::{Pool, Worker};

/// Output pixels and channels of a task at most, and terms of one accumulation chain: A (256 x 320 f32) and C
/// (256 x 384 f32) share a 1 MiB L2 with the panels that stream through, and a panel (320 x 32 f32) stays in L1. Of a
/// smaller L2 half as many pixels (measured with 512 KiB: up to 4 % less time).
const MAX_PIXELS: usize = 256;
const MAX_WIDTH: usize = 64;
const MAX_COLS: usize = 384;
const CHUNK_UNITS: usize = 320;
/// The L2 that these are for.
const LARGE_L2: usize = 1 << 20;
/// Shorter chains and narrower images than these are left to the general path, whose tiles span rows and taps: it copies each
/// tap of each window, which takes as long as 16 columns take to be multiplied. Of so few channels, many columns are worth it.
const MIN_CHANNELS: usize = 16;
const SHORT_CHAIN: usize = 32;
const MAX_COLS_OF_SHORT: usize = 128;
const MIN_WIDTH: usize = 8;

/// Whether this path is the better one for a convolution. Taps must start at whole units of the packed weight.
pub(crate) fn suits(conv: &Conv, weight: DType) -> bool {
    let channels = conv.in_channels / conv.groups;
    channels >= MIN_CHANNELS
        && (channels >= SHORT_CHAIN || conv.out_channels / conv.groups <= MAX_COLS_OF_SHORT)
        && channels.is_multiple_of(elements_per_unit(weight))
        && conv.output[2] >= MIN_WIDTH
}

/// Bytes of the panels that a task packs for itself at a time: a third of L2, and of L2 that is large not more than of 2 MiB.
fn own_panel_bytes() -> usize {
    (features().l2_bytes / 3).min(MAX_PANEL_BYTES)
}

const MAX_PANEL_BYTES: usize = 640 << 10;

/// Output pixels of a task at most.
fn most_pixels() -> usize {
    if features().l2_bytes < LARGE_L2 { MAX_PIXELS / 2 } else { MAX_PIXELS }
}

/// Rows and columns of a block of output pixels that is as large as one may be.
fn largest_block(conv: &Conv) -> [usize; 2] {
    let [_, height, width] = conv.output;
    let columns = width.div_ceil(width.div_ceil(MAX_WIDTH));
    [(most_pixels() / columns).clamp(1, height), columns]
}

/// Blocks that output pixels are cut into at least.
pub(crate) fn blocks_of_pixels(conv: &Conv) -> usize {
    Region::count(conv, largest_block(conv))
}

/// Tiles of one tap: `rows` pixels at `a`, results at `c`.
#[derive(Clone, Copy)]
struct TileJob {
    a: *const u8,
    c: *mut f32,
    rows: usize,
}

const MAX_TILES: usize = 256;

/// One convolution, and how it is cut.
pub(crate) struct Direct<'a> {
    call: Call<'a>,
    /// The weight where it is not packed.
    unpacked: Option<&'a Weight>,
    copy: CopyRow,
    in_place: bool,
    /// Channels of a chunk.
    kc: usize,
    nc: usize,
    /// Output rows and columns of a block.
    block: [usize; 2],
    /// Blocks along channels.
    col_blocks: usize,
    /// Staged pixels along height and width, and bytes between them.
    window: [usize; 2],
    stage_ld: usize,
    c_ld: usize,
    c_offset: usize,
    c_bytes: usize,
    panel_offset: usize,
    /// Blocks of pixels that are multiplied with the same panels, one after the other.
    regions: usize,
    /// Where a task packs panels for itself, and the bytes of one with all taps of a chunk.
    own_offset: usize,
    own_bytes: usize,
    scratch_bytes: usize,
}

/// Where a tap's pixels are read: address of the pixel (0, 0) of the window, bytes between rows and pixels.
#[derive(Clone, Copy)]
struct View {
    origin: *const u8,
    row_bytes: isize,
    pixel_bytes: isize,
}

impl<'a> Direct<'a> {
    pub(crate) fn new(call: Call<'a>, threads: usize) -> Direct<'a> {
        Direct::of(call, None, threads)
    }

    /// With a weight that is not packed, of one group; that of `call` says what panels look like.
    pub(crate) fn unpacked(call: Call<'a>, weight: &'a Weight, threads: usize) -> Direct<'a> {
        Direct::of(call, Some(weight), threads)
    }

    fn of(call: Call<'a>, unpacked: Option<&'a Weight>, threads: usize) -> Direct<'a> {
        let Call { kernel, conv, dtype, weight, .. } = call;
        let channels = conv.in_channels / conv.groups;
        let outs = conv.out_channels / conv.groups;
        let step = conv.strides[3] * conv.stride[2] as isize * dtype.size_bytes() as isize;
        let in_place = kernel.form.takes(dtype) && conv.upsample == [1; 3] && step > 0 && step % 4096 != 0;
        let unit = kernel.k_step().max(elements_per_unit(weight.dtype));
        let most = kernel.most_terms(if in_place { CHUNK_UNITS } else { CHUNK_UNITS / 2 });
        // Of a panel that a task packs for itself, with all taps: a channel's bytes, and so many channels that two panels fit.
        let own = conv.kernel.iter().product::<usize>() * kernel.nr * weight.dtype.size_bytes();
        let most = match unpacked {
            Some(_) => most.min(own_panel_bytes() / (2 * own)).max(1).next_multiple_of(unit),
            None => most,
        };
        let kc = channels.div_ceil(channels.div_ceil(most)).next_multiple_of(unit);
        let own_bytes = if unpacked.is_some() { own * kc } else { 0 };
        let most_cols = match own_bytes {
            0 => MAX_COLS,
            bytes => (own_panel_bytes() / bytes * kernel.nr).clamp(kernel.nr, MAX_COLS),
        };
        let mut direct = Direct {
            call,
            unpacked,
            copy: copy_row(kernel.isa, dtype, kernel.form),
            in_place,
            kc,
            nc: outs.div_ceil(outs.div_ceil(most_cols)).next_multiple_of(kernel.nr),
            block: [1, 1],
            col_blocks: 1,
            window: [0, 0],
            stage_ld: kernel.form.units(kc) * 4 + 64,
            c_ld: 0,
            c_offset: 0,
            c_bytes: 0,
            panel_offset: 0,
            regions: 1,
            own_offset: 0,
            own_bytes,
            scratch_bytes: 0,
        };
        direct.choose_blocks(threads);
        direct.lay_out_scratch();
        direct
    }

    fn choose_blocks(&mut self, threads: usize) {
        let Call { kernel, conv, .. } = self.call;
        let [depth, height, width] = conv.output;
        let outs = conv.out_channels / conv.groups;
        let [mut rows, columns] = largest_block(conv);
        let images = conv.batch * conv.groups * depth * width.div_ceil(columns);
        let tasks = |rows: usize, nc: usize| images * height.div_ceil(rows) * outs.div_ceil(nc);
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        while tasks(rows, self.nc) < wanted {
            let halved = self.nc.div_ceil(2).next_multiple_of(kernel.nr);
            if rows * columns > 128 && rows > 1 && self.unpacked.is_none() {
                rows = rows.div_ceil(2);
            } else if halved < self.nc && self.nc > 64 {
                self.nc = halved;
            } else {
                break;
            }
        }
        rows = height.div_ceil(height.div_ceil(rows));
        self.block = [rows, columns];
        self.col_blocks = outs.div_ceil(self.nc);
        if self.unpacked.is_some() {
            self.regions = Region::count(conv, self.block);
        }
    }

    fn lay_out_scratch(&mut self) {
        let Call { kernel, conv, .. } = self.call;
        self.window = [conv.reach(1, self.block[0]), conv.reach(2, self.block[1])];
        let staged = if self.in_place { 0 } else { conv.kernel[0] * self.window[0] * self.window[1] * self.stage_ld };
        self.c_ld = self.nc + 16;
        self.c_offset = staged.next_multiple_of(4096);
        self.c_bytes = (self.block[0] * self.block[1] * self.c_ld * 4).next_multiple_of(4096);
        self.panel_offset = self.c_offset + self.regions * self.c_bytes;
        let panel_rows = (self.kc + 2).max(kernel.form.units(self.kc));
        self.own_offset = self.panel_offset + (panel_rows * kernel.nr * 4).next_multiple_of(4096);
        self.scratch_bytes = self.own_offset + self.nc / kernel.nr * self.own_bytes;
    }

    /// Runs the convolution.
    ///
    /// # Safety
    /// As [`conv`](super::conv::conv).
    pub(crate) unsafe fn run(&self, pool: &Pool, epilogue: &dyn Epilogue) -> Result<(), KernelError> {
        let conv = self.call.conv;
        let (places, outs) = (Region::count(conv, self.block), conv.out_channels / conv.groups);
        let tasks = places.div_ceil(self.regions);
        pool.run_scratch(conv.groups * self.col_blocks * tasks, self.scratch_bytes, |index, worker| {
            let columns = index / tasks;
            let (group, col0) = (columns / self.col_blocks, columns % self.col_blocks * self.nc);
            let cols = self.nc.min(outs - col0);
            let first = index % tasks * self.regions;
            let regions = first..places.min(first + self.regions);
            let tasks = regions.map(|place| Task { group, col0, cols, region: Region::at(conv, self.block, place) });
            // SAFETY: tasks are disjoint blocks of the output; scratch has the size laid out above.
            unsafe { self.run_task(tasks, worker, epilogue) }
        })?;
        Ok(())
    }

    /// Runs tasks of the same columns.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_task(&self, tasks: impl Iterator<Item = Task> + Clone, worker: Worker, epilogue: &dyn Epilogue) {
        let Call { kernel, conv, .. } = self.call;
        let channels = conv.in_channels / conv.groups;
        // SAFETY: offsets lie inside the scratch memory; channels inside the group.
        unsafe {
            let results = |index: usize| worker.scratch.add(self.c_offset + index * self.c_bytes).cast::<f32>();
            for (index, task) in tasks.clone().enumerate() {
                results(index).write_bytes(0, task.region.rows * task.region.pixels * self.c_ld);
            }
            let mut runner = Runner::new(kernel);
            for c0 in (0..channels).step_by(self.kc) {
                let kc = self.kc.min(channels - c0);
                for (index, task) in tasks.clone().enumerate() {
                    if index == 0 {
                        self.pack_own(&task, worker, c0, kc);
                    }
                    for kd in 0..conv.kernel[0] {
                        let Some(view) = self.view(&task, worker, kd, c0, kc) else { continue };
                        for kh in 0..conv.kernel[1] {
                            for kw in 0..conv.kernel[2] {
                                let c = results(index);
                                self.run_tap(&mut runner, &task, worker, &view, [kd, kh, kw], (c0, kc), c);
                            }
                        }
                    }
                }
            }
            // Not held while the epilogue runs, as in the blocked engine.
            drop(runner);
            for (index, task) in tasks.enumerate() {
                task.hand_over(conv, results(index), self.c_ld, epilogue);
            }
        }
    }

    /// Packs the task's panels of one chunk of channels, all taps of it, if nobody has.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn pack_own(&self, task: &Task, worker: Worker, c0: usize, kc: usize) {
        let Call { kernel, conv, .. } = self.call;
        let Some(weight) = self.unpacked else { return };
        let chunk = Conv { in_channels: kc, ..*conv };
        let skipped = c0 as isize * weight.strides[1] * weight.dtype.size_bytes() as isize;
        let weight = Weight { ptr: weight.ptr.wrapping_offset(skipped), ..*weight };
        for (panel, n0) in (task.col0..task.col0 + task.cols).step_by(kernel.nr).enumerate() {
            // SAFETY: channels of the weight; scratch holds the panels of as many columns as a task has.
            unsafe {
                let to = worker.scratch.add(self.own_offset + panel * self.own_bytes);
                pack_weight_panel(kernel.isa, &chunk, &weight, 0, n0, kernel.nr, to);
            }
        }
    }

    /// The input window of a task for one plane of taps and one chunk of channels; `None` if the plane is padding.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn view(&self, task: &Task, worker: Worker, kd: usize, c0: usize, kc: usize) -> Option<View> {
        let Call { conv, x, dtype, .. } = self.call;
        let size = dtype.size_bytes() as isize;
        let plane = conv.plane(task.region.depth, kd)?;
        let channel = task.group * (conv.in_channels / conv.groups) + c0;
        let offset = task.region.image as isize * conv.strides[0]
            + (plane / conv.upsample[0]) as isize * conv.strides[1]
            + channel as isize;
        let plane = x.wrapping_byte_offset(offset * size);
        let row = (task.region.row0 * conv.stride[1]) as isize - conv.padding[1];
        let pixel = (task.region.pixel0 * conv.stride[2]) as isize - conv.padding[2];
        if self.in_place {
            let origin = plane.wrapping_byte_offset((row * conv.strides[2] + pixel * conv.strides[3]) * size);
            return Some(View { origin, row_bytes: conv.strides[2] * size, pixel_bytes: conv.strides[3] * size });
        }
        let row_bytes = self.window[1] * self.stage_ld;
        let stage = worker.scratch.wrapping_add(kd * self.window[0] * row_bytes);
        // SAFETY: the stage holds a window per plane of taps.
        unsafe { self.fill_stage(task, plane, [row, pixel], kc, stage) };
        Some(View { origin: stage, row_bytes: row_bytes as isize, pixel_bytes: self.stage_ld as isize })
    }

    /// Copies the window that starts at `[row, pixel]` (upsampled coordinates), padding as zeros.
    ///
    /// # Safety
    /// `plane` must be an image plane at the chunk's first channel; `stage` must hold the window.
    unsafe fn fill_stage(&self, task: &Task, plane: *const u8, [row, pixel]: [isize; 2], kc: usize, stage: *mut u8) {
        let Call { kernel, conv, dtype, .. } = self.call;
        let size = dtype.size_bytes() as isize;
        let limits = [1, 2].map(|axis| (conv.input[axis] * conv.upsample[axis]) as isize);
        let padded = kernel.form.units(kc) * 4;
        // A copy in parts fills its last group.
        let filled = if kernel.form.parts() > 0 { padded } else { kc * kernel.form.element_bytes() };
        for line in 0..conv.reach(1, task.region.rows) {
            let at = row + line as isize;
            for column in 0..conv.reach(2, task.region.pixels) {
                let place = pixel + column as isize;
                // SAFETY: inside the window and, where read, inside the image.
                unsafe {
                    let to = stage.add((line * self.window[1] + column) * self.stage_ld);
                    if at < 0 || at >= limits[0] || place < 0 || place >= limits[1] {
                        to.write_bytes(0, padded);
                        continue;
                    }
                    let from = at / conv.upsample[1] as isize * conv.strides[2]
                        + place / conv.upsample[2] as isize * conv.strides[3];
                    (self.copy)(plane.byte_offset(from * size), to, kc);
                    to.add(filled).write_bytes(0, padded - filled);
                }
            }
        }
    }

    /// Adds one tap's products over one chunk of channels.
    ///
    /// # Safety
    /// As [`Self::run`].
    unsafe fn run_tap(
        &self,
        runner: &mut Runner<'_>,
        task: &Task,
        worker: Worker,
        view: &View,
        tap: [usize; 3],
        (c0, kc): (usize, usize),
        c: *mut f32,
    ) {
        let mut jobs = [TileJob { a: std::ptr::null(), c, rows: 0 }; MAX_TILES];
        let count = self.tiles(task, view, tap, c, &mut jobs);
        if count == 0 {
            return;
        }
        let Call { kernel, conv, weight, .. } = self.call;
        let dtype = weight.dtype;
        let tap = (tap[0] * conv.kernel[1] + tap[1]) * conv.kernel[2] + tap[2];
        let k0 = tap * (conv.in_channels / conv.groups) + c0;
        let outs = conv.out_channels / conv.groups;
        let lda = view.pixel_bytes as usize * conv.stride[2];
        let terms = kernel.form.units(kc);
        let panel_units = units_in(weight.parts, kc, dtype);
        let panel_at = |n0: usize| {
            if self.unpacked.is_some() {
                let panel = (n0 - task.col0) / kernel.nr * self.own_bytes;
                let row = units(tap * kc, dtype) * width_at(outs, n0, kernel.nr) * 4;
                return worker.scratch.wrapping_add(self.own_offset + panel + row).cast_const();
            }
            weight.panel_at(task.group, n0, k0)
        };
        let mut n0 = task.col0;
        while n0 < task.col0 + task.cols {
            let width = width_at(outs, n0, kernel.nr);
            // SAFETY: panels have the layout of `pack`; jobs lie inside the view and C scratch.
            unsafe {
                let packed = panel_at(n0);
                let panel = match weight.parts {
                    0 => widened(kernel, dtype, packed, kc, width, worker.scratch.add(self.panel_offset)),
                    _ => packed,
                };
                let next = if n0 + width < task.col0 + task.cols { panel_at(n0 + width) } else { packed };
                let lines = terms / 4 * 64;
                runner.take_panel(panel, width, terms);
                if kernel.is_amx() && !runner.is_set_up(jobs[0].rows) {
                    // They are sorted: registers are set up for the last height.
                    jobs[..count].reverse();
                }
                for (index, job) in jobs[..count].iter().enumerate() {
                    let ahead =
                        if index * lines < panel_units * width * 4 { next.wrapping_add(index * lines) } else { panel };
                    let c = (job.c.add(n0 - task.col0), self.c_ld);
                    runner.tile(job.rows, (job.a, lda), c, true, ahead);
                }
            }
            n0 += width;
        }
    }

    /// Cuts the pixels of a task that a tap reads inside the window into tiles; returns their number.
    fn tiles(&self, task: &Task, view: &View, tap: [usize; 3], c: *mut f32, jobs: &mut [TileJob; MAX_TILES]) -> usize {
        let Call { kernel, conv, .. } = self.call;
        let mut count = 0;
        let (from, to) = self.inside(2, task.region.pixel0, task.region.pixels, tap[2]);
        if from >= to {
            return 0;
        }
        let (pieces, shift) = ((to - from).div_ceil(kernel.mr), tap[2] * conv.dilation[2]);
        let (lines_from, lines_to) = self.inside(1, task.region.row0, task.region.rows, tap[1]);
        for line in lines_from..lines_to {
            let row = (line * conv.stride[1] + tap[1] * conv.dilation[1]) as isize * view.row_bytes;
            let mut first = from;
            for piece in 0..pieces {
                let rows = kernel.next_height(to - first, pieces - piece);
                let pixel = (first * conv.stride[2] + shift) as isize * view.pixel_bytes;
                jobs[count] = TileJob {
                    a: view.origin.wrapping_byte_offset(row + pixel),
                    c: c.wrapping_add((line * task.region.pixels + first) * self.c_ld),
                    rows,
                };
                count += 1;
                first += rows;
            }
        }
        if kernel.is_amx() {
            // Tile registers are set up once for each height.
            jobs[..count].sort_unstable_by_key(|job| job.rows);
        }
        count
    }

    /// The range of `0..count` outputs from `first` whose tap reads inside the image (or anywhere in a staged window).
    fn inside(&self, axis: usize, first: usize, count: usize, tap: usize) -> (usize, usize) {
        if !self.in_place {
            return (0, count);
        }
        let conv = self.call.conv;
        let stride = conv.stride[axis] as isize;
        let start = (first * conv.stride[axis] + tap * conv.dilation[axis]) as isize - conv.padding[axis];
        let low = (-start).max(0).div_euclid(stride) + isize::from((-start).max(0) % stride != 0);
        let room = conv.input[axis] as isize - 1 - start;
        let high = if room < 0 { 0 } else { room / stride + 1 };
        let (low, high) = (low.min(count as isize) as usize, high.min(count as isize) as usize);
        (low, high.max(low))
    }
}
