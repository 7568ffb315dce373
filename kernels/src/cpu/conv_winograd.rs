//! 3x3 convolutions by Winograd's minimal filtering, F(4x4, 3x3) and F(2x2, 3x3), in f32.
//!
//! An output tile of `o x o` pixels (`o` = 4 or 2) is computed from `t x t` input pixels (`t = o + 2`). In the domain of the
//! transforms (see `winograd_transform`) the convolution is `t * t` independent matrix products, one for each *point*, with
//! `t^2 / (9 o^2)` of the multiply-adds of the direct form: 1/4 for `o = 4`, 4/9 for `o = 2`.
//!
//! ```text
//! band of tiles, block of input channels:
//!   V[chunk][point][tile][in channel]     = B' d B     all threads; padding as zeros, 16-bit elements widened
//!   task = (panel of output channels, group of tiles), for each chunk of the block:
//!     U[point][in channel][out channel]   = G w G'     from the weight as it lies, into the cache of the core
//!     M[point][tile][out channel]        += V * U      the micro-kernels of `gemm_kernel`
//!   after the last block: Y = A' M A  -> epilogue, a few tiles of one tile row at a time
//! ```
//!
//! Where AMX multiplies numbers that are taken apart, images of many tiles take another order: see
//! [`conv_winograd_points`](super::conv_winograd_points).
//!
//! A kernel of several planes (3x3x3) is one of 3x3 whose input channels are those of every plane that it reads: a row of V
//! has the channels of the first plane, then those of the next.
//!
//! V must stay in cache, so an image is cut: into bands, each of which transforms the weight anew, or into blocks of input
//! channels, between which M stays in memory. Blocks pay where there are many channels and few tiles.
//!
//! The transformed weight, four times the original for `o = 4`, never leaves the cache: reading the original from memory
//! and transforming it takes less time than reading the transformed one. V lies in memory that the caller lends
//! ([`work_bytes`]); chunks of it are read in the order in which they lie. The next chunk of the weight is fetched from
//! memory while the present one is multiplied.
//!
//! Numerics: error relative to the largest magnitudes involved is about 3e-7 for `o = 2` and 3e-6 for `o = 4` (direct:
//! 2e-7), so a caller that promises eager's own rounding must not use it. What is infinite or not a number makes every
//! result of the tiles that read it not a number, and so does what overflows when a hundred times as large.

use super::KernelError;
use super::conv::{Conv, Weight};
use super::conv_winograd_points as points;
use super::gemm_driver::fetch;
use super::gemm_kernel::{Form, Kernel, Runner, of_form, panel_width};
use super::pack::{SendMut, width_at};
use super::winograd_grid::Grid;
pub use super::winograd_grid::{Image, Made, Part, Ring};
use super::winograd_tiles::{LANES, MAX_CHANNELS, Order, STRIP, Strides, TASK_VECTORS, Tiled, count, odd_lines};
use super::winograd_transform::{Taps, transform_weights};
use crate::epilogue::Epilogue;
use crate::isa::{Isa, features};
use crate::pool::Pool;

/// Bytes of V that a band may take: it is written once and read once for every panel of output channels, from L3, of
/// which a core has but a share (measured with 32 MB for all: 4 MB runs at twice the rate of 12 MB).
const BAND_BYTES: usize = 4 << 20;
/// The same where memory is short.
const SLIM_BAND_BYTES: usize = 1 << 20;
/// Bytes of M that may stay in memory between blocks of input channels: it is read and written once for each.
const RESULT_BYTES: usize = 12 << 20;
/// Tiles of a band at least: fewer do not pay for the transform of the weight, which is done anew for each band.
const MIN_BAND: usize = 16;
/// Tiles of a task at least, where there are more.
const MIN_GROUP: usize = 28;
/// Bytes of U at most.
const MAX_CHUNK_BYTES: usize = 640 << 10;
/// Longest accumulation chain, and channels of a chunk: with chains twice as long errors of F(4x4) pass 1e-5.
const MAX_CHUNK: usize = MAX_CHANNELS;
/// Bytes of a tap's input channels that are brought side by side at a time: a vector of every instruction set.
const GATHERED_BYTES: usize = 64;

/// Planes of a kernel at most: a chunk of sixteen channels of all of them fits into U.
const MAX_PLANES: usize = 3;

/// Whether [`conv_winograd`] computes this convolution: kernel 3x3, stride and dilation 1 along height and width, one group;
/// along depth up to three taps and any stride, dilation and padding. The input may be upsampled as it is read.
pub fn is_winograd(conv: &Conv) -> bool {
    conv.in_channels > 0
        && (1..=MAX_PLANES).contains(&conv.kernel[0])
        && conv.kernel[1..] == [3, 3]
        && conv.stride[1..] == [1, 1]
        && conv.dilation[1..] == [1, 1]
        && conv.groups == 1
}

/// Multiply-adds' worth of time that `o x o` tiles take for each pair of an input and an output channel: the products,
/// the transform of the weight for every band, and the shares of the transforms of tiles. Each plane of the kernel has its
/// own products, weights and transform of the input.
pub(super) fn cost_per_pair(conv: &Conv, o: usize, room: Room) -> f64 {
    let vectors = vector_cost_per_pair(conv, o, room);
    if room == Room::Ample && points::suits(conv, o, Isa::detect()) {
        return vectors.min(points::cost_per_pair(conv, o));
    }
    vectors
}

/// The same with products by vectors.
fn vector_cost_per_pair(conv: &Conv, o: usize, room: Room) -> f64 {
    let tiles = count(conv, o) as f64;
    let (points, tile) = if o == 4 { (36.0, TILE_COST) } else { (16.0, 0.4 * TILE_COST) };
    let channels = [conv.in_channels, conv.out_channels].map(|c| c.max(1).next_multiple_of(LANES) as f64);
    // Below seven rows a micro-kernel waits for its panel.
    let rows = tiles.max(7.0);
    let width = panel_width(Isa::detect());
    let planes = conv.kernel[0] as f64;
    planes * points * rows / PRODUCT_RATE
        + Cut::new(conv, o, width, room).cost(conv, o, width)
        + tile * tiles * (1.0 / channels[0] + planes / channels[1])
}

/// Share of the multiply-add rate that the products of the points reach.
const PRODUCT_RATE: f64 = 0.85;
/// Multiply-adds that take as long as the transform of one pair of channels' weight.
const WEIGHT_COST: f64 = 250.0;
/// Multiply-adds that take as long as reading or writing a byte of M in the last-level cache.
const MOVED_COST: f64 = 2.0;
/// Multiply-adds that take as long as both transforms of one channel of one tile.
const TILE_COST: f64 = 300.0;

/// Bytes of U: a third of L2, which M and what streams past share (measured: 320 KiB of 1 MiB; of 512 KiB 160, with which a
/// convolution takes 5 to 19 % less time than with 320; of 2 MiB 640, 2 to 12 % less).
fn chunk_bytes() -> usize {
    (features().l2_bytes / 16 * 5).min(MAX_CHUNK_BYTES)
}

/// Tiles of a task at most, of the results of `points` points and a panel of `width` channels: U and M take five sixths of L2
/// and leave the rest to what streams past. Fewer tiles would transform the weight more often.
fn most_tiles(points: usize, width: usize) -> usize {
    ((features().l2_bytes / 6 * 5).saturating_sub(chunk_bytes()) / (points * width * 4)).max(MIN_GROUP)
}

/// How much memory a convolution may take for V.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// What is mostly fastest: 4 to 16 MiB, by points up to 40.
    Ample,
    /// Nothing by points.
    Middle,
    /// A quarter of that.
    Slim,
}

/// How a convolution is cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    tiles: usize,
    /// Tiles of a band.
    band: usize,
    /// Input channels of a chunk, of each plane of the kernel; number of chunks, and how many of them a block has.
    chunk: usize,
    chunks: usize,
    block: usize,
    /// f32 from one point of V to the next.
    v_stride: usize,
    /// The same of M where it stays in memory between blocks.
    m_stride: usize,
}

impl Cut {
    fn new(conv: &Conv, o: usize, width: usize, room: Room) -> Cut {
        let (bytes, least) = match room {
            Room::Ample | Room::Middle => (BAND_BYTES, MIN_BAND),
            Room::Slim => (SLIM_BAND_BYTES, MIN_BAND / 2),
        };
        let points = (o + 2) * (o + 2);
        let planes = conv.kernel[0];
        let longest = (chunk_bytes() / (points * planes * width * 4)).clamp(LANES, MAX_CHUNK / planes);
        let channels = conv.in_channels.max(1);
        let chunk = channels.div_ceil(channels.div_ceil(longest)).next_multiple_of(LANES);
        let chunks = channels.div_ceil(chunk);
        let tiles = count(conv, o);
        // Tiles of which `channels` numbers at every point, of each of `planes`, take so many bytes.
        let most = |bytes: usize, channels: usize, planes: usize| {
            bytes / (points * planes * channels.next_multiple_of(LANES) * 4)
        };
        let of_tiles = |most: usize, block: usize| {
            let band = tiles.div_ceil(tiles.div_ceil(most.max(least)).max(1)).max(1);
            let block = chunks.div_ceil(chunks.div_ceil(block.clamp(1, chunks)));
            let (v_stride, m_stride) = (odd_lines(band * planes * chunk), odd_lines(band * width));
            Cut { tiles, band, chunk, chunks, block, v_stride, m_stride }
        };
        let bands = of_tiles(most(bytes, channels, planes), chunks);
        if room == Room::Slim || bands.band == tiles {
            return bands;
        }
        let band = most(RESULT_BYTES, conv.out_channels.max(1), 1).min(most(bytes, chunk, planes));
        let blocks = of_tiles(band, most(bytes, chunk, planes) / band.clamp(least, tiles));
        if blocks.cost(conv, o, width) < bands.cost(conv, o, width) { blocks } else { bands }
    }

    fn blocks(&self) -> usize {
        self.chunks.div_ceil(self.block)
    }

    /// Multiply-adds' worth of time for each pair of channels that transforming the weight and keeping M in memory take.
    fn cost(&self, conv: &Conv, o: usize, width: usize) -> f64 {
        let points = ((o + 2) * (o + 2)) as f64;
        let moved = 2.0 * 4.0 * points * self.tiles as f64 * (self.blocks() - 1) as f64 / conv.in_channels as f64;
        let groups = self.band.div_ceil(most_tiles((o + 2) * (o + 2), width));
        let transforms = (self.tiles.div_ceil(self.band) * groups) as f64;
        WEIGHT_COST * conv.kernel[0] as f64 * transforms + MOVED_COST * moved
    }

    /// f32 of M for all `panels` panels of output channels, where it stays in memory.
    fn results(&self, o: usize, panels: usize) -> usize {
        if self.blocks() == 1 { 0 } else { panels * (o + 2) * (o + 2) * self.m_stride }
    }
}

/// Bytes of memory that [`conv_winograd`] works in.
pub fn work_bytes(conv: &Conv, o: usize, isa: Isa, room: Room) -> usize {
    work_bytes_of(kernel_for(conv, o, isa, room), conv, o, room)
}

/// The same for [`winograd_with`].
pub(super) fn work_bytes_of(kernel: &Kernel, conv: &Conv, o: usize, room: Room) -> usize {
    if kernel.form.parts() > 0 {
        return points::work_bytes(conv, o);
    }
    let cut = Cut::new(conv, o, kernel.nr, room);
    let v = cut.block * (o + 2) * (o + 2) * cut.v_stride;
    (v + cut.results(o, conv.out_channels.div_ceil(kernel.nr))) * 4
}

/// The ring for an image that is [made](Made) while it is read; `None` where bands read what would be gone, or the ring would be
/// more than half of the image.
pub fn ring(conv: &Conv, o: usize, isa: Isa, room: Room) -> Option<Ring> {
    let ring = ring_of(kernel_for(conv, o, isa, room), conv, o, room)?;
    let pixels = conv.batch * conv.input.iter().product::<usize>();
    (2 * ring.elements() <= pixels * conv.in_channels).then_some(ring)
}

/// The same for [`winograd_with`], whatever it saves.
pub(super) fn ring_of(kernel: &Kernel, conv: &Conv, o: usize, room: Room) -> Option<Ring> {
    let is_by_plane = conv.kernel[0] == 1 && conv.stride[0] == 1 && conv.output[0] == conv.input[0];
    if !is_by_plane || conv.padding[0] != 0 || conv.upsample != [1; 3] {
        return None;
    }
    let band = match kernel.form.parts() {
        0 => Cut::new(conv, o, kernel.nr, room).band,
        _ => points::band_read_once(conv, o)?,
    };
    Some(Grid::new(conv, o).ring(conv, band))
}

/// The micro-kernel for a convolution: of AMX, which takes the products in the other order, where that costs less.
fn kernel_for(conv: &Conv, o: usize, isa: Isa, room: Room) -> &'static Kernel {
    let is_split = room == Room::Ample
        && points::suits(conv, o, isa)
        && points::cost_per_pair(conv, o) < vector_cost_per_pair(conv, o, room);
    of_form(isa, if is_split { Form::Bf16x3 } else { Form::F32 })
}

/// Memory to work in.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// [`work_bytes`], aligned to 64 bytes for full speed.
    pub ptr: *mut u8,
    /// What they were asked for with.
    pub room: Room,
}

/// Convolves `x` like [`conv`](super::conv::conv) with tiles of `o x o` results, `o` being 2 or 4, and a weight that is read
/// as it lies.
///
/// # Errors
/// [`KernelError`] for an element type other than f32, f16 and bf16, when [`is_winograd`] is false, or when scratch memory
/// runs out.
///
/// # Safety
/// `x` must be readable at every input position that `conv` describes, or be [made](Made) in a ring as [`ring`] says, which
/// then is nobody else's; `weight` must be readable for the shape that it says, `epilogue` must accept the results, and `work`
/// be writable and nobody else's meanwhile.
pub unsafe fn conv_winograd(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    x: Image,
    weight: &Weight,
    o: usize,
    work: Work,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    let kernel = kernel_for(conv, o, isa, work.room);
    // SAFETY: forwarded.
    unsafe { winograd_with(kernel, pool, conv, x, weight, o, work, epilogue) }
}

/// [`conv_winograd`] with a given micro-kernel, of f32 or of three bf16.
///
/// # Safety
/// As [`conv_winograd`].
pub(crate) unsafe fn winograd_with(
    kernel: &'static Kernel,
    pool: &Pool,
    conv: &Conv,
    x: Image,
    weight: &Weight,
    o: usize,
    work: Work,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    if !is_winograd(conv) {
        return Err(KernelError::Shape("not a 3x3 convolution of stride 1 in one group, of at most three planes"));
    }
    if !matches!(o, 2 | 4) {
        return Err(KernelError::Shape("output tiles are 2 or 4 pixels wide"));
    }
    super::gemm::check_dtypes([x.dtype, weight.dtype])?;
    if conv.rows() == 0 || conv.out_channels == 0 {
        return Ok(());
    }
    if kernel.form.parts() > 0 {
        // SAFETY: forwarded.
        return unsafe { points::multiply(kernel, pool, conv, x, weight, o, work.ptr, epilogue) };
    }
    let job = Job::new(kernel, conv, x, weight, o, work, pool.threads());
    let Cut { tiles, band, chunks, block, .. } = job.cut;
    let panels = conv.out_channels.div_ceil(kernel.nr);
    let mut done = 0;
    for first in (0..tiles).step_by(band) {
        let band = band.min(tiles - first);
        job.tiled.prepare(first, band, &mut done);
        for chunk in (0..chunks).step_by(block) {
            let block = [chunk, chunks.min(chunk + block)];
            let count = block[1] - block[0];
            let items = band * count;
            let each = (TASK_VECTORS * LANES).div_ceil(job.cut.chunk).min(items.div_ceil(pool.threads()));
            pool.run(items.div_ceil(each), |task, _| {
                for item in task * each..((task + 1) * each).min(items) {
                    let (tile, chunk) = (item / count, block[0] + item % count);
                    // SAFETY: items write disjoint parts of V.
                    unsafe { job.fill_v(first, tile, chunk) };
                }
            });
            let groups = band.div_ceil(job.group);
            pool.run_scratch(panels * groups, job.scratch_bytes, |task, worker| {
                let (panel, group) = (task / groups, task % groups);
                let range = [group * band / groups, (group + 1) * band / groups];
                // SAFETY: tasks write disjoint results; scratch has the size asked for.
                unsafe { job.run(worker.scratch, first, range, block, panel * kernel.nr, epilogue) };
            })?;
        }
    }
    Ok(())
}

/// One convolution, and how it is cut.
struct Job<'a> {
    tiled: Tiled<'a>,
    cut: Cut,
    /// Tiles of a task at most.
    group: usize,
    /// Input channels whose taps are brought side by side at a time.
    gathered: usize,
    v: SendMut,
    /// M of all panels, where it stays in memory between blocks.
    m: Option<SendMut>,
    /// f32 from one point of U, of M to the next.
    u_stride: usize,
    m_stride: usize,
    /// Where M, results and taps start in scratch; U is first.
    offsets: [usize; 4],
    scratch_bytes: usize,
}

// SAFETY: reads only, but for V, of which tasks write disjoint parts.
unsafe impl Sync for Job<'_> {}

impl<'a> Job<'a> {
    fn new(
        kernel: &'static Kernel,
        conv: &'a Conv,
        x: Image<'a>,
        weight: &'a Weight,
        o: usize,
        work: Work,
        threads: usize,
    ) -> Job<'a> {
        let t = o + 2;
        let points = t * t;
        let tiled = Tiled::new(kernel, conv, x, weight, o);
        let planes = tiled.planes;
        let cut = Cut::new(conv, o, kernel.nr, work.room);
        let panels = conv.out_channels.div_ceil(kernel.nr);
        let mut groups = cut.band.div_ceil(most_tiles(points, kernel.nr));
        while threads > 1 && panels * groups < 4 * threads && cut.band / (groups + 1) >= MIN_GROUP {
            groups += 1;
        }
        let group = cut.band.div_ceil(groups);
        let width = kernel.nr;
        let m = (cut.blocks() > 1).then(|| SendMut(work.ptr.wrapping_add(4 * cut.block * points * cut.v_stride)));
        let u_stride = odd_lines(planes * cut.chunk * width);
        let m_stride = if m.is_some() { cut.m_stride } else { odd_lines(group * width) };
        let m_bytes = if m.is_some() { 0 } else { points * m_stride * 4 };
        let gathered = GATHERED_BYTES / weight.dtype.size_bytes();
        let taps_bytes = tiled.taps_bytes(gathered);
        let sizes = [points * u_stride * 4, m_bytes, o * STRIP * o * width * 4, taps_bytes, taps_bytes];
        let mut ends = [0; 5];
        let mut at = 0usize;
        for (end, size) in ends.iter_mut().zip(sizes) {
            at += size.next_multiple_of(64);
            *end = at;
        }
        Job {
            tiled,
            cut,
            group,
            gathered,
            v: SendMut(work.ptr),
            m,
            u_stride,
            m_stride,
            offsets: [ends[0], ends[1], ends[2], ends[3]],
            scratch_bytes: ends[4],
        }
    }

    /// Where V starts for a chunk, at its first point, for the band's tile.
    fn v_at(&self, chunk: usize, tile: usize) -> *mut f32 {
        let Tiled { t, planes, .. } = self.tiled;
        let at = chunk % self.cut.block * t * t * self.cut.v_stride + tile * planes * self.cut.chunk;
        self.v.get().cast::<f32>().wrapping_add(at)
    }

    /// Transforms one chunk of channels of one tile of the input, in every plane that the kernel reads.
    ///
    /// # Safety
    /// As [`conv_winograd`]; nobody else may touch that part of V.
    unsafe fn fill_v(&self, first: usize, tile: usize, chunk: usize) {
        let channel = chunk * self.cut.chunk;
        let channels = self.cut.chunk.min(self.tiled.conv.in_channels - channel);
        for tap in 0..self.tiled.planes {
            let to = self.v_at(chunk, tile).wrapping_add(tap * channels);
            // SAFETY: a plane's channels are followed by those of the next, which are written later, or by the end of a row of
            // whole vectors.
            unsafe { self.tiled.transform_input(first + tile, tap, (channel, channels), to, self.cut.v_stride) };
        }
    }

    /// The products of a block of chunks for `range` of the band's tiles, which start at tile `first`, in the panel of output
    /// channels at `n0`; after the last block, their results.
    ///
    /// # Safety
    /// As [`conv_winograd`]; `scratch` must have `scratch_bytes`.
    unsafe fn run(
        &self,
        scratch: *mut u8,
        first: usize,
        range: [usize; 2],
        block: [usize; 2],
        n0: usize,
        epilogue: &dyn Epilogue,
    ) {
        let Tiled { kernel, conv, t, planes, .. } = self.tiled;
        let outs = conv.out_channels;
        let width = width_at(outs, n0, kernel.nr);
        let count = range[1] - range[0];
        // SAFETY: the parts lie behind each other in scratch.
        unsafe {
            let u: *mut f32 = scratch.cast();
            let [m, c, taps, wide] = self.offsets.map(|offset| scratch.add(offset));
            let (m, c): (*mut f32, *mut f32) = (m.cast(), c.cast());
            let m = match self.m {
                Some(all) => {
                    let panel = n0 / kernel.nr * t * t * self.m_stride;
                    all.get().cast::<f32>().add(panel + range[0] * width)
                }
                None => m,
            };
            for chunk in block[0]..block[1] {
                let channel = chunk * self.cut.chunk;
                let channels = self.cut.chunk.min(conv.in_channels - channel);
                for from in (0..channels).step_by(self.gathered) {
                    let gathered = self.gathered.min(channels - from);
                    let taps = self.tiled.gather(n0, width, channel + from, gathered, taps, wide);
                    for plane in 0..planes {
                        let taps = Taps { from: taps.from.add(9 * plane * taps.tap), ..taps };
                        let to = u.add((plane * channels + from) * width);
                        transform_weights(kernel.isa, t, &taps, to, self.u_stride);
                    }
                }
                self.multiply(chunk, channels, range[0], count, (u, n0, width), m);
            }
            if block[1] < self.cut.chunks {
                return;
            }
            let cols = width.min(outs - n0);
            let strides = Strides { point: self.m_stride, tile: width };
            let mut tile = 0;
            while tile < count {
                let at = first + range[0] + tile;
                let strip = self.tiled.strip(at, count - tile);
                let m = m.add(tile * width);
                self.tiled.finish((at, strip), (m, strides), c, width, (n0, cols), epilogue);
                tile += strip;
            }
        }
    }

    /// The matrix products of one chunk of input channels.
    ///
    /// # Safety
    /// V must hold the chunk, U its weights; M must have room for the results.
    unsafe fn multiply(
        &self,
        chunk: usize,
        channels: usize,
        first: usize,
        count: usize,
        (u, n0, width): (*const f32, usize, usize),
        m: *mut f32,
    ) {
        let Tiled { kernel, planes, t, .. } = self.tiled;
        let (row, terms) = (planes * self.cut.chunk, planes * channels);
        let mut runner = Runner::new(kernel);
        let pieces = count.div_ceil(kernel.mr);
        let points = t * t;
        let v = self.v_at(chunk, first);
        for point in 0..points {
            if !(chunk + 1).is_multiple_of(self.cut.block) {
                self.fetch_weight(chunk + 1, n0, width, [point, points]);
            }
            let (v, u) = (v.wrapping_add(point * self.cut.v_stride), u.wrapping_add(point * self.u_stride));
            let m = m.wrapping_add(point * self.m_stride);
            // SAFETY: a panel of U.
            unsafe { runner.take_panel(u.cast(), width, terms) };
            for piece in 0..pieces {
                let (from, to) = (piece * count / pieces, (piece + 1) * count / pieces);
                let (a, ahead) = (v.wrapping_add(from * row), v.wrapping_add(to * row));
                // SAFETY: the tile lies inside V, the panel of U and M.
                unsafe {
                    let c = m.add(from * width);
                    runner.tile(to - from, (a.cast(), row * 4), (c, width), chunk > 0, ahead.cast());
                }
            }
        }
    }

    /// Asks for one of `of` parts of the chunk's weights.
    fn fetch_weight(&self, chunk: usize, n0: usize, width: usize, [part, of]: [usize; 2]) {
        let Tiled { conv, weight, planes, order, .. } = self.tiled;
        if order != Order::Taps || chunk >= self.cut.chunks {
            return;
        }
        let size = weight.dtype.size_bytes();
        let channel = chunk * self.cut.chunk;
        let taps = 9 * planes;
        let lines = (taps * self.cut.chunk.min(conv.in_channels - channel) * size).div_ceil(64);
        let rows = width.min(conv.out_channels - n0);
        for line in part * lines / of..(part + 1) * lines / of {
            for lane in 0..rows {
                let row = (n0 + lane) as isize * weight.strides[0] * size as isize;
                fetch(weight.ptr.wrapping_byte_offset(row).wrapping_add(taps * channel * size + 64 * line));
            }
        }
    }
}
