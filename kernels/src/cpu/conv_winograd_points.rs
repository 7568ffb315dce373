//! Winograd's convolutions by points, for AMX: products of f32 that are taken apart into bf16 (see [`gemm_split`](super::gemm_split)).
//!
//! [`conv_winograd`](super::conv_winograd) keeps the transformed weight in a core's cache and has the image stream past, once for
//! every 32 output channels. AMX multiplies faster than an image streams, so here every point is a matrix product by itself,
//! whose operands are read once:
//!
//! ```text
//! block of output channels, block of input channels:
//!   U[point][panel][in channel]     = G w G'      in parts, panels as `pack` makes them; all threads
//!   band of tiles:
//!     V[point][tile][in channel]    = B' d B      f32; all threads
//!     M[point][tile][out channel] (+)= V * U      `gemm_driver`, a batch of as many pairs as there are points
//!     after the last block of input channels:  Y = A' M A  -> epilogue
//! ```
//!
//! V, U and M lie in memory that the caller lends, [`work_bytes`], at most [`WORK_BYTES`]; blocks and bands are as large as that
//! allows. Where input channels are cut, M has all tiles; where output channels are, the image is transformed for each block.

use super::KernelError;
use super::conv::{Conv, Weight};
use super::gemm::{BatchDim, Rows};
use super::gemm_driver::{BSource, Problem, run};
use super::gemm_kernel::{Form, Kernel, of_form};
use super::gemm_split::GROUP;
use super::gemm_store::StoreEpilogue;
use super::pack::{Matrix, SendMut, width_at};
use super::winograd_grid::Image;
use super::winograd_tiles::{LANES, MAX_CHANNELS, STRIP, Strides, TASK_VECTORS, Tiled, count, odd_lines};
use super::winograd_transform::{PARTS, Taps, transform_weights_in_parts};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::{Isa, amx};
use crate::pool::Pool;

/// Bytes of V, U and M together, where the smallest blocks do not take more.
pub const WORK_BYTES: usize = 40 << 20;
/// Tiles of a band at most, and at least where there are more: products of fewer rows are slower.
const MAX_BAND: usize = 512;
const MIN_BAND: usize = 128;
/// Channels, either way, are cut into so many blocks at most.
const MAX_BLOCKS: usize = 16;
/// Channels of a block are a multiple of this many: whole groups, whole panels.
pub const BLOCK_STEP: usize = 64;
/// Longest accumulation chain: errors of F(4x4) pass 1e-5 with one of 700.
pub const MAX_CHAIN: usize = 512;
/// Input channels of a task that transforms the weight.
const WEIGHT_CHANNELS: usize = 64;
/// Tiles of a task that transforms results.
const RESULT_TILES: usize = 2 * STRIP;

/// Multiply-adds of f32 in whose time the products of the points do one, but for what they wait for U, which is part of its cost.
const PRODUCT_RATE: f64 = 2.6;
/// Multiply-adds that take as long as the transform of one pair of channels' weight, most of which is writing and reading U.
const WEIGHT_COST: f64 = 2300.0;
/// What it costs more for each MiB of U that is written before it is read.
const SPREAD_COST: f64 = 80.0;
/// Multiply-adds that take as long as the transform of one channel of one tile, of the image and of the results.
const IMAGE_COST: f64 = 1500.0;
const RESULT_COST: f64 = 1200.0;
/// Multiply-adds that take as long as reading or writing a byte of M once more.
const MOVED_COST: f64 = 2.0;

/// Whether this order of the products is worth a thought on that processor: few tiles, or channels, leave registers empty.
pub(super) fn suits(conv: &Conv, o: usize, isa: Isa) -> bool {
    isa.clamp() == Isa::Avx512
        && conv.in_channels.min(conv.out_channels) >= GROUP
        && count(conv, o) >= MIN_BAND / 2
        && amx().bf16
}

/// Multiply-adds' worth of time for each pair of an input and an output channel; see
/// [`conv_winograd`](super::conv_winograd::cost_per_pair).
pub fn cost_per_pair(conv: &Conv, o: usize) -> f64 {
    let cut = Cut::new(conv, o);
    if cut.bytes() > WORK_BYTES {
        return f64::INFINITY;
    }
    let points = ((o + 2) * (o + 2)) as f64;
    let tiles = count(conv, o) as f64;
    let planes = conv.kernel[0] as f64;
    planes * points * tiles / PRODUCT_RATE + cut.cost(conv)
}

/// Bytes of memory that [`multiply`] works in.
pub(super) fn work_bytes(conv: &Conv, o: usize) -> usize {
    Cut::new(conv, o).bytes()
}

/// Tiles of a band, if an image is transformed once, band by band.
pub(super) fn band_read_once(conv: &Conv, o: usize) -> Option<usize> {
    let cut = Cut::new(conv, o);
    cut.is_read_once(conv).then_some(cut.band)
}

/// How a convolution is cut. Strides are those of f32.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    points: usize,
    tiles: usize,
    /// Tiles of a band.
    band: usize,
    /// Input and output channels of a block.
    ins: usize,
    outs: usize,
    /// Terms of a row of V from one plane of the kernel to the next: whole groups where there is more than one.
    plane: usize,
    /// From one row of V to the next, and from one point.
    v_row: usize,
    v_stride: usize,
    u_stride: usize,
    /// From one row of M to the next, and how many rows a point has.
    m_row: usize,
    m_rows: usize,
}

impl Cut {
    /// The one that takes the least time of those that fit into [`WORK_BYTES`], if any do.
    pub fn new(conv: &Conv, o: usize) -> Cut {
        let blocks = |channels: usize| {
            let counts = (1..=MAX_BLOCKS).map(move |count| block_of(channels, count));
            counts.chain([BLOCK_STEP.min(channels)])
        };
        let ins = blocks(conv.in_channels).filter(|ins| ins * conv.kernel[0] <= MAX_CHAIN);
        let cuts =
            ins.flat_map(|ins| blocks(conv.out_channels).map(move |outs| Cut::of(conv, o, [ins, outs], WORK_BYTES)));
        // Too much memory is worse than any time.
        let rank = |cut: &Cut| (cut.bytes().saturating_sub(WORK_BYTES), cut.cost(conv));
        let least = cuts.map(|cut| (rank(&cut), cut)).min_by(|(a, _), (b, _)| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        least.expect("the smallest blocks are no longer than a chain").1
    }

    /// With blocks of `ins` and `outs` channels, and bands that take no more than `bytes` unless they are the smallest.
    pub fn of(conv: &Conv, o: usize, [ins, outs]: [usize; 2], bytes: usize) -> Cut {
        let points = (o + 2) * (o + 2);
        let planes = conv.kernel[0];
        let tiles = count(conv, o);
        let plane = if planes > 1 { ins.next_multiple_of(GROUP) } else { ins };
        let v_row = (planes * plane).next_multiple_of(LANES);
        let u_stride = odd_lines(outs.next_multiple_of(LANES) * Form::Bf16x3.units(planes * plane));
        let m_row = odd_lines(outs);
        let is_whole = ins >= conv.in_channels;
        // What is left for the rows of V, and those of M where they are as many.
        let taken = points * (u_stride + if is_whole { 0 } else { tiles * m_row });
        let each = points * (v_row + if is_whole { m_row } else { 0 });
        let most = (bytes / 4).saturating_sub(taken) / each;
        let band = tiles.div_ceil(tiles.div_ceil(most.clamp(MIN_BAND, MAX_BAND))).max(1);
        let m_rows = if is_whole { band } else { tiles } | 1;
        Cut { points, tiles, band, ins, outs, plane, v_row, v_stride: odd_lines(band * v_row), u_stride, m_row, m_rows }
    }

    /// Whether the image is transformed once.
    fn is_read_once(&self, conv: &Conv) -> bool {
        self.ins >= conv.in_channels && self.outs >= conv.out_channels
    }

    fn m_stride(&self) -> usize {
        self.m_rows * self.m_row
    }

    /// Input and output channels of a block.
    pub fn blocks(&self) -> [usize; 2] {
        [self.ins, self.outs]
    }

    /// Bytes of V, U and M.
    pub fn bytes(&self) -> usize {
        self.points * (self.v_stride + self.u_stride + self.m_stride()) * 4
    }

    /// Multiply-adds' worth of time for each pair of channels that transforms and keeping M in memory take.
    fn cost(&self, conv: &Conv) -> f64 {
        let (ins, outs) = (conv.in_channels.max(1) as f64, conv.out_channels.max(1) as f64);
        let (points, tiles) = (self.points as f64, self.tiles as f64);
        let (in_blocks, out_blocks) = ((ins / self.ins as f64).ceil(), (outs / self.outs as f64).ceil());
        let images = IMAGE_COST * conv.kernel[0] as f64 * out_blocks / outs;
        let moved = 2.0 * 4.0 * points * tiles * (in_blocks - 1.0) / ins;
        let u_bytes = 4.0 * points * self.u_stride as f64;
        let weight = WEIGHT_COST + SPREAD_COST * u_bytes / f64::from(1 << 20);
        let tiles = (images + RESULT_COST / ins) * tiles;
        (weight * conv.kernel[0] as f64 + tiles) * points / 36.0 + MOVED_COST * moved
    }
}

/// Channels of a block, of `count` of them.
fn block_of(channels: usize, count: usize) -> usize {
    channels.div_ceil(count).next_multiple_of(BLOCK_STEP).min(channels)
}

/// Convolves like [`conv_winograd`](super::conv_winograd::conv_winograd) with a micro-kernel of three bf16.
///
/// # Safety
/// As there; `work` must have [`work_bytes`].
pub(super) unsafe fn multiply(
    kernel: &'static Kernel,
    pool: &Pool,
    conv: &Conv,
    x: Image,
    weight: &Weight,
    o: usize,
    work: *mut u8,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    // SAFETY: forwarded.
    unsafe { multiply_cut(kernel, pool, conv, x, weight, (o, Cut::new(conv, o)), work, epilogue) }
}

/// Convolves like [`conv_winograd`](super::conv_winograd::conv_winograd), cut in a given way.
///
/// # Errors
/// As there.
///
/// # Safety
/// As there; the cut must be one of this convolution and `o`, and `work` have its [bytes](Cut::bytes).
pub unsafe fn multiply_cut(
    kernel: &'static Kernel,
    pool: &Pool,
    conv: &Conv,
    x: Image,
    weight: &Weight,
    (o, cut): (usize, Cut),
    work: *mut u8,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    debug_assert_eq!(kernel.form.parts(), PARTS);
    if x.made.is_some() && !cut.is_read_once(conv) {
        return Err(KernelError::Shape("an image that is made while it is read is read in one block"));
    }
    let points = cut.points;
    let [v, u, m] = [0, cut.v_stride, cut.v_stride + cut.u_stride].map(|at| work.wrapping_add(points * at * 4));
    let tiled = Tiled::new(of_form(kernel.isa, Form::F32), conv, x, weight, o);
    let job = Job { kernel, tiled, cut, v: SendMut(v), u: SendMut(u), m: SendMut(m) };
    let mut done = 0;
    for col in (0..conv.out_channels).step_by(cut.outs) {
        let cols = cut.outs.min(conv.out_channels - col);
        for channel in (0..conv.in_channels).step_by(cut.ins) {
            let block = Block { col, cols, channel, channels: cut.ins.min(conv.in_channels - channel) };
            // SAFETY: forwarded; phases follow each other.
            unsafe {
                job.transform_weight(pool, block)?;
                for first in (0..cut.tiles).step_by(cut.band) {
                    let band = cut.band.min(cut.tiles - first);
                    job.tiled.prepare(first, band, &mut done);
                    job.transform_image(pool, block, (first, band));
                    job.products(pool, block, (first, band))?;
                    if channel + block.channels == conv.in_channels {
                        job.finish(pool, block, (first, band), epilogue)?;
                    }
                }
            }
        }
    }
    Ok(())
}

/// A block of output channels, `cols` from `col` on, and of input channels.
#[derive(Clone, Copy)]
struct Block {
    col: usize,
    cols: usize,
    channel: usize,
    channels: usize,
}

/// One convolution.
struct Job<'a> {
    kernel: &'static Kernel,
    tiled: Tiled<'a>,
    cut: Cut,
    v: SendMut,
    u: SendMut,
    m: SendMut,
}

impl Job<'_> {
    /// Terms of a row of V from one plane to the next in that block.
    fn plane(&self, block: Block) -> usize {
        if self.tiled.planes > 1 { self.cut.plane } else { block.channels }
    }

    /// Terms of a row of V.
    fn terms(&self, block: Block) -> usize {
        self.tiled.planes * self.plane(block)
    }

    /// Where results of a band lie: M has all tiles where input channels are cut.
    fn results(&self, first: usize) -> *mut f32 {
        let skipped = if self.cut.ins < self.tiled.conv.in_channels { first } else { 0 };
        self.m.get().cast::<f32>().wrapping_add(skipped * self.cut.m_row)
    }

    /// U of a block.
    ///
    /// # Safety
    /// As [`multiply`]; nobody else may use U.
    unsafe fn transform_weight(&self, pool: &Pool, block: Block) -> Result<(), KernelError> {
        let Self { tiled, kernel, .. } = self;
        let (width, form) = (kernel.nr, kernel.form);
        let end = block.col + block.cols;
        let plane = self.plane(block);
        let parts = block.channels.div_ceil(WEIGHT_CHANNELS);
        let taps_bytes = tiled.taps_bytes(GROUP).next_multiple_of(64);
        pool.run_scratch(block.cols.div_ceil(width) * parts, 2 * taps_bytes, |task, worker| {
            let n0 = block.col + task / parts * width;
            let panel = (n0 - block.col) * form.units(self.terms(block));
            let width = width_at(end, n0, width);
            let from = task % parts * WEIGHT_CHANNELS;
            for from in (from..block.channels.min(from + WEIGHT_CHANNELS)).step_by(GROUP) {
                let count = GROUP.min(block.channels - from);
                // SAFETY: tasks write disjoint groups of panels; taps have the buffers that they ask for.
                unsafe {
                    let buffers = (worker.scratch, worker.scratch.add(taps_bytes));
                    let taps = tiled.gather(n0, width, block.channel + from, count, buffers.0, buffers.1);
                    for tap in 0..tiled.planes {
                        let taps = Taps { from: taps.from.add(9 * tap * taps.tap), ..taps };
                        let at = panel + form.units(tap * plane + from) * width;
                        let to = self.u.get().cast::<f32>().add(at);
                        transform_weights_in_parts(kernel.isa, tiled.t, &taps, to, self.cut.u_stride);
                    }
                }
            }
        })?;
        Ok(())
    }

    /// V of a block, for a band.
    ///
    /// # Safety
    /// As [`multiply`]; nobody else may use V.
    unsafe fn transform_image(&self, pool: &Pool, block: Block, (first, band): (usize, usize)) {
        let Self { tiled, cut, .. } = self;
        let each = (TASK_VECTORS * LANES).div_ceil(cut.v_row).min(band.div_ceil(pool.threads())).max(1);
        let plane = self.plane(block);
        pool.run(band.div_ceil(each), |task, _| {
            for tile in task * each..((task + 1) * each).min(band) {
                let row = self.v.get().cast::<f32>().wrapping_add(tile * cut.v_row);
                for tap in 0..tiled.planes {
                    let row = row.wrapping_add(tap * plane);
                    for from in (0..block.channels).step_by(MAX_CHANNELS) {
                        let count = MAX_CHANNELS.min(block.channels - from);
                        let to = row.wrapping_add(from);
                        // SAFETY: items write disjoint rows of V, which hold whole vectors; what follows them is written later.
                        unsafe {
                            let channels = (block.channel + from, count);
                            tiled.transform_input(first + tile, tap, channels, to, cut.v_stride);
                        }
                    }
                    for from in block.channels.next_multiple_of(LANES)..plane {
                        for point in 0..cut.points {
                            // SAFETY: a term of the row that no channel has.
                            unsafe { row.add(point * cut.v_stride + from).write(0.0) };
                        }
                    }
                }
            }
        });
    }

    /// M of a block, for a band.
    ///
    /// # Safety
    /// V and U must have been filled; nobody else may use M.
    unsafe fn products(&self, pool: &Pool, block: Block, (first, band): (usize, usize)) -> Result<(), KernelError> {
        let Self { cut, kernel, .. } = *self;
        let terms = self.terms(block);
        let v = Matrix { ptr: self.v.get(), dtype: DType::F32, row_stride: cut.v_row as isize, col_stride: 1 };
        let batch = [BatchDim { size: cut.points, a_stride: cut.v_stride as isize, b_stride: 0 }];
        let rows = Rows::new(kernel, &batch, v, terms);
        let b = BSource::Packed { ptr: self.u.get(), dtype: DType::F32, parts: PARTS, stride: 4 * cut.u_stride };
        let (m, n, row_step) = (band, block.cols, cut.m_rows);
        let problem = Problem { kernel, count: cut.points, m, n, k: terms, row_step, col_step: 0, a: &rows, b };
        let (to, stride) = (self.results(first).cast::<u8>(), cut.m_row as isize);
        let mut store = StoreEpilogue::new(to, DType::F32, stride);
        if block.channel > 0 {
            store = store.with_residual(to, DType::F32, stride);
        }
        // SAFETY: V has the rows, U the panels, and M room for the results.
        unsafe { run(pool, &problem, &store) }
    }

    /// Hands the results of a band over.
    ///
    /// # Safety
    /// M must have been filled; the epilogue must accept the results.
    unsafe fn finish(
        &self,
        pool: &Pool,
        block: Block,
        (first, band): (usize, usize),
        epilogue: &dyn Epilogue,
    ) -> Result<(), KernelError> {
        let Self { tiled, cut, kernel, .. } = self;
        let m = SendMut(self.results(first).cast());
        let strides = Strides { point: cut.m_stride(), tile: cut.m_row };
        let each = RESULT_TILES.min(band.div_ceil(4 * pool.threads())).max(1);
        let strip_bytes = tiled.o * STRIP * tiled.o * kernel.nr * 4;
        pool.run_scratch(band.div_ceil(each), strip_bytes, |task, worker| {
            let (mut tile, end) = (task * each, band.min((task + 1) * each));
            while tile < end {
                let strip = tiled.strip(first + tile, end - tile);
                for n0 in (0..block.cols).step_by(kernel.nr) {
                    let width = width_at(block.cols, n0, kernel.nr);
                    let columns = (block.col + n0, width.min(block.cols - n0));
                    // SAFETY: tasks hand over disjoint tiles; scratch has the size asked for.
                    unsafe {
                        let m = m.get().cast::<f32>().add(tile * cut.m_row + n0);
                        tiled.finish(
                            (first + tile, strip),
                            (m, strides),
                            worker.scratch.cast(),
                            width,
                            columns,
                            epilogue,
                        );
                    }
                }
                tile += strip;
            }
        })?;
        Ok(())
    }
}
