//! 3x3 convolutions by Winograd's minimal filtering, F(4x4, 3x3) and F(2x2, 3x3), in f32.
//!
//! An output tile of `o x o` pixels (`o` = 4 or 2) is computed from `t x t` input pixels (`t = o + 2`) as
//! `Y = A' [ (G w G') * (B' d B) ] A`, where `*` is elementwise. The elementwise products of all channels are `t * t`
//! independent matrix products, `t^2 / (9 o^2)` of the multiply-adds of the direct form: 1/4 for `o = 4`, 4/9 for `o = 2`.
//!
//! ```text
//! task = (block of up to 56 tiles, block of nc output channels)
//!   V[t*t][tile][in channel]   = B' d B       vector over channels, padding as zeros, 16-bit elements widened
//!   M[t*t][tile][out channel]  = V * U        the micro-kernels of `gemm_kernel`, U packed by `pack_winograd_weight`
//!   Y = A' M A  -> epilogue, a few tiles of one tile row at a time
//! ```
//!
//! Measured on one core of a Zen 5 server, time over the direct form's: `o = 4` 0.40 to 0.55, `o = 2` 0.57 to 0.74, from 128
//! channels at 256x256 to 1280 at 16x16 with the weight kept; at 8x8 1.5 and 0.93. Transforming the weight anew costs
//! 29 ns a weight pair (320 x 320: 3 ms against 29 ms direct at 64x64).
//!
//! Numerics: points 0, 1, -1 (2, -2) and infinity. Error relative to the largest magnitudes involved is about 3e-7 for
//! `o = 2` and 3e-6 for `o = 4` (direct: 2e-7), so a caller that promises eager's own rounding must not use it. Transformed
//! weights are f32 and `t^2 / 9` times the count of the original: at small images reading them costs more than the
//! products they save.

// The transforms walk the lanes and points of several arrays at once.
#![allow(clippy::needless_range_loop)]

use super::KernelError;
use super::conv::{Conv, Weight, pack_conv_weight};
use super::gemm_driver::widened;
use super::gemm_kernel::{CopyRow, Form, Kernel, copy_row, select};
use super::pack::{SendMut, units, width_at};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::{Pool, Worker};

/// Channels transformed at a time.
const LANES: usize = 64;
/// Tiles of a block at most: four tiles of fourteen rows, so that each panel of U is read four times from L1.
const MAX_TILES: usize = 56;
/// Bytes of V and of M at most; they live in L3 and are touched twice.
const MAX_BYTES: usize = 5 << 20;
/// Longest accumulation chain.
const CHUNK: usize = 320;
/// Tiles whose results go to the epilogue together.
const STRIP: usize = 4;

/// One channel chunk of one pixel.
type Lanes = [f32; LANES];

/// A packed, transformed weight; borrows its memory from the caller.
#[derive(Clone, Copy, Debug)]
pub struct WinogradWeight {
    ptr: *const u8,
    tile: usize,
    in_channels: usize,
    out_channels: usize,
    width: usize,
}

// SAFETY: read-only memory that the caller keeps alive.
unsafe impl Send for WinogradWeight {}
// SAFETY: as above.
unsafe impl Sync for WinogradWeight {}

impl WinogradWeight {
    /// Describes memory that [`pack_winograd_weight`] filled earlier for the same channels, tile and instructions.
    pub fn from_raw(ptr: *const u8, conv: &Conv, tile: usize, isa: Isa) -> WinogradWeight {
        let width = select(isa, DType::F32, DType::F32).nr;
        WinogradWeight { ptr, tile, in_channels: conv.in_channels, out_channels: conv.out_channels, width }
    }

    /// Bytes from one of the `t * t` matrices to the next.
    fn stride(&self) -> usize {
        self.out_channels.next_multiple_of(self.width / 2) * self.in_channels * 4
    }
}

/// Whether [`conv_winograd`] computes this convolution: two spatial dimensions, kernel 3x3, stride and dilation 1, one
/// group, nothing upsampled.
pub fn is_winograd(conv: &Conv) -> bool {
    conv.kernel == [1, 3, 3]
        && conv.stride == [1; 3]
        && conv.dilation == [1; 3]
        && conv.upsample == [1; 3]
        && conv.groups == 1
        && conv.padding[0] == 0
        && conv.output[0] == conv.input[0]
}

/// The output tile (4 or 2) with which a convolution is expected to be faster than in its direct form, by counting
/// multiply-adds wasted on partial tiles and bytes of transformed weights; `None` if direct wins.
pub fn best_tile(conv: &Conv) -> Option<usize> {
    if !is_winograd(conv) || conv.in_channels < 64 || conv.out_channels < 64 {
        return None;
    }
    let [planes, height, width] = conv.output;
    let count = |tile: usize| conv.batch * planes * height.div_ceil(tile) * width.div_ceil(tile);
    let enough = |tile: usize, least: usize| {
        let used = (conv.rows() * 10) / (count(tile) * tile * tile).max(1);
        count(tile) >= least && used >= 7
    };
    // Below these counts the products of one matrix no longer hide the time to read it from memory.
    if enough(4, 16) {
        Some(4)
    } else if enough(2, 32) {
        Some(2)
    } else {
        None
    }
}

/// Bytes that [`pack_winograd_weight`] writes.
pub fn winograd_bytes(conv: &Conv, tile: usize, isa: Isa) -> usize {
    let points = (tile + 2) * (tile + 2);
    points * WinogradWeight::from_raw(std::ptr::null(), conv, tile, isa).stride()
}

/// Transforms and packs a weight: panels as in `pack`, one matrix after the other.
///
/// # Errors
/// [`KernelError`] when [`is_winograd`] is false, `tile` is neither 2 nor 4, or scratch memory runs out.
///
/// # Safety
/// `weight` must be readable for the shape that `conv` says, `dst` writable for [`winograd_bytes`] bytes.
pub unsafe fn pack_winograd_weight(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    tile: usize,
    weight: &Weight,
    dst: *mut u8,
) -> Result<WinogradWeight, KernelError> {
    check(conv, tile)?;
    let kernel = select(isa, DType::F32, DType::F32);
    let packed = WinogradWeight::from_raw(dst, conv, tile, isa);
    let (channels, outs) = (conv.in_channels, conv.out_channels);
    let panel_units = units(9 * channels, weight.dtype) * kernel.nr;
    let raw_bytes = (panel_units * 4).next_multiple_of(4096);
    let wide_bytes = ((9 * channels + 2) * kernel.nr * 4).next_multiple_of(4096);
    let target = SendMut(dst);
    pool.run_scratch(outs.div_ceil(kernel.nr), raw_bytes + wide_bytes, |panel, worker| {
        let n0 = panel * kernel.nr;
        let one = Conv { out_channels: kernel.nr.min(outs - n0), ..*conv };
        let size = weight.dtype.size_bytes() as isize;
        let source = Weight { ptr: weight.ptr.wrapping_byte_offset(n0 as isize * weight.strides[0] * size), ..*weight };
        let width = width_at(outs, n0, kernel.nr);
        // SAFETY: scratch holds the panel as stored and widened; the task writes its panel of every matrix.
        unsafe {
            pack_conv_weight(pool, isa, &one, &source, worker.scratch);
            let wide = worker.scratch.add(raw_bytes);
            let panel = widened(kernel, weight.dtype, worker.scratch, 9 * channels, width, wide).cast::<f32>();
            let to = target.get().cast::<f32>().add(n0 * channels);
            weight_transform(
                kernel.isa,
                tile + 2,
                Panel { from: panel, to, channels, width, stride: packed.stride() / 4 },
            );
        }
    })?;
    Ok(packed)
}

/// One panel of weights: nine taps of `channels x width`, and where the points' panels go, `stride` apart.
#[derive(Clone, Copy)]
struct Panel {
    from: *const f32,
    to: *mut f32,
    channels: usize,
    width: usize,
    stride: usize,
}

/// Output channels transformed at a time.
const OUTS: usize = 8;

/// `G` along one axis.
#[inline(always)]
fn transform_taps<const T: usize>(taps: [[f32; OUTS]; 3]) -> [[f32; OUTS]; T] {
    let mut points = [[0f32; OUTS]; T];
    for lane in 0..OUTS {
        let [a, b, c] = taps.map(|tap| tap[lane]);
        if T == 4 {
            points[0][lane] = a;
            points[1][lane] = 0.5 * (a + c) + 0.5 * b;
            points[2][lane] = 0.5 * (a + c) - 0.5 * b;
            points[3][lane] = c;
        } else {
            let (even, odd) = ((a + c) * (-1.0 / 6.0), b * (-1.0 / 6.0));
            let (far_even, far_odd) = (a * (1.0 / 24.0) + c * (1.0 / 6.0), b * (1.0 / 12.0));
            points[0][lane] = 0.25 * a;
            points[1][lane] = even + odd;
            points[2][lane] = even - odd;
            points[3][lane] = far_even + far_odd;
            points[4][lane] = far_even - far_odd;
            points[5][lane] = c;
        }
    }
    points
}

/// `G w G'` of a panel.
///
/// # Safety
/// The panel must hold what it says.
#[inline(always)]
unsafe fn transform_weights<const T: usize>(panel: Panel) {
    let Panel { from, to, channels, width, stride } = panel;
    for index in (0..channels * width).step_by(OUTS) {
        // SAFETY: eight output channels of one input channel, at every tap and point.
        unsafe {
            let tap = |tap: usize| from.add(tap * channels * width + index).cast::<[f32; OUTS]>().read_unaligned();
            let columns: [[[f32; OUTS]; T]; 3] =
                std::array::from_fn(|w| transform_taps([tap(w), tap(3 + w), tap(6 + w)]));
            for row in 0..T {
                let points: [[f32; OUTS]; T] = transform_taps([columns[0][row], columns[1][row], columns[2][row]]);
                for (col, point) in points.iter().enumerate() {
                    to.add((row * T + col) * stride + index).cast::<[f32; OUTS]>().write_unaligned(*point);
                }
            }
        }
    }
}

/// `B'` along one axis: `data[i * step]` for `i` in `0..t`, in place.
#[inline(always)]
fn transform_input<const T: usize>(data: &mut [Lanes], first: usize, step: usize) {
    for lane in 0..LANES {
        let d: [f32; T] = std::array::from_fn(|i| data[first + i * step][lane]);
        let mut set = |i: usize, value: f32| data[first + i * step][lane] = value;
        if T == 4 {
            set(0, d[0] - d[2]);
            set(1, d[1] + d[2]);
            set(2, d[2] - d[1]);
            set(3, d[1] - d[3]);
        } else {
            let (even, odd) = (d[4] - 4.0 * d[2], d[3] - 4.0 * d[1]);
            let (wide, steep) = (d[4] - d[2], 2.0 * (d[3] - d[1]));
            set(0, 4.0 * d[0] - 5.0 * d[2] + d[4]);
            set(1, even + odd);
            set(2, even - odd);
            set(3, wide + steep);
            set(4, wide - steep);
            set(5, 4.0 * d[1] - 5.0 * d[3] + d[5]);
        }
    }
}

/// `A'` along one axis: reads `t` values, leaves `o` in their first places.
#[inline(always)]
fn transform_output<const T: usize>(data: &mut [Lanes], first: usize, step: usize) {
    for lane in 0..LANES {
        let m: [f32; T] = std::array::from_fn(|i| data[first + i * step][lane]);
        let mut set = |i: usize, value: f32| data[first + i * step][lane] = value;
        if T == 4 {
            set(0, m[0] + m[1] + m[2]);
            set(1, m[1] - m[2] - m[3]);
        } else {
            let (sum, difference) = (m[1] + m[2], m[1] - m[2]);
            let (far_sum, far_difference) = (m[3] + m[4], m[3] - m[4]);
            set(0, m[0] + sum + far_sum);
            set(1, difference + 2.0 * far_difference);
            set(2, sum + 4.0 * far_sum);
            set(3, difference + 8.0 * far_difference + m[5]);
        }
    }
}

/// # Safety
/// None; unsafe to share the wrapper with the weight's transform.
#[inline(always)]
unsafe fn both_axes_input<const T: usize>(data: &mut [Lanes]) {
    (0..T).for_each(|row| transform_input::<T>(data, row * T, 1));
    (0..T).for_each(|col| transform_input::<T>(data, col, T));
}

/// # Safety
/// None; unsafe to share the wrapper with the weight's transform.
#[inline(always)]
unsafe fn both_axes_output<const T: usize>(data: &mut [Lanes]) {
    (0..T).for_each(|row| transform_output::<T>(data, row * T, 1));
    (0..T - 2).for_each(|col| transform_output::<T>(data, col, T));
}

/// A transform compiled for each instruction set.
macro_rules! compiled_for {
    ($name:ident, $function:ident, $operand:ty) => {
        /// # Safety
        /// The operand must hold what it says, and the level must be available.
        unsafe fn $name(isa: Isa, t: usize, operand: $operand) {
            #[inline(always)]
            unsafe fn run(t: usize, operand: $operand) {
                // SAFETY: forwarded.
                unsafe { if t == 4 { $function::<4>(operand) } else { $function::<6>(operand) } }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512vl,avx512dq")]
            unsafe fn avx512(t: usize, operand: $operand) {
                // SAFETY: forwarded.
                unsafe { run(t, operand) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2(t: usize, operand: $operand) {
                // SAFETY: forwarded.
                unsafe { run(t, operand) }
            }
            // SAFETY: forwarded.
            unsafe {
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => avx512(t, operand),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => avx2(t, operand),
                    _ => run(t, operand),
                }
            }
        }
    };
}
compiled_for!(weight_transform, transform_weights, Panel);
compiled_for!(input_transform, both_axes_input, &mut [Lanes]);
compiled_for!(output_transform, both_axes_output, &mut [Lanes]);

fn check(conv: &Conv, tile: usize) -> Result<(), KernelError> {
    if !is_winograd(conv) {
        return Err(KernelError::Shape("not a 3x3 convolution of stride 1 in one group"));
    }
    if !matches!(tile, 2 | 4) {
        return Err(KernelError::Shape("output tiles are 2 or 4 pixels wide"));
    }
    Ok(())
}

/// Convolves `x` like [`conv`](super::conv::conv), with a weight transformed by [`pack_winograd_weight`].
///
/// # Errors
/// [`KernelError`] for an element type other than f32, f16 and bf16, when [`is_winograd`] is false, or when scratch memory
/// runs out.
///
/// # Safety
/// As [`conv`](super::conv::conv).
pub unsafe fn conv_winograd(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &WinogradWeight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    // SAFETY: forwarded.
    unsafe { winograd_with(select(isa, DType::F32, DType::F32), pool, conv, x, dtype, weight, epilogue) }
}

/// [`conv_winograd`] with a given micro-kernel of f32.
///
/// # Safety
/// As [`conv_winograd`].
pub(crate) unsafe fn winograd_with(
    kernel: &'static Kernel,
    pool: &Pool,
    conv: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &WinogradWeight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    check(conv, weight.tile)?;
    super::gemm::check_dtypes([dtype, dtype])?;
    if (weight.in_channels, weight.out_channels, weight.width) != (conv.in_channels, conv.out_channels, kernel.nr) {
        return Err(KernelError::Shape("the weight was packed for another convolution or other instructions"));
    }
    if conv.rows() == 0 || conv.out_channels == 0 {
        return Ok(());
    }
    let job = Job::new(kernel, conv, x, dtype, weight, pool.threads());
    let blocks = job.tiles.div_ceil(job.block);
    let col_blocks = conv.out_channels.div_ceil(job.nc);
    pool.run_scratch(blocks * col_blocks, job.scratch_bytes, |task, worker| {
        let (first, col0) = (task % blocks * job.block, task / blocks * job.nc);
        // SAFETY: tasks are disjoint; scratch has the size asked for.
        unsafe { job.run(worker, first, col0, epilogue) }
    })?;
    Ok(())
}

/// One convolution, and how it is cut.
struct Job<'a> {
    kernel: &'static Kernel,
    conv: &'a Conv,
    x: *const u8,
    dtype: DType,
    copy: CopyRow,
    weight: &'a WinogradWeight,
    /// Side of an input tile.
    t: usize,
    /// Tiles along height and width, and of all images.
    grid: [usize; 2],
    tiles: usize,
    block: usize,
    nc: usize,
    /// f32 between rows of V, M and C.
    v_ld: usize,
    m_ld: usize,
    m_offset: usize,
    c_offset: usize,
    scratch_bytes: usize,
}

// SAFETY: reads only.
unsafe impl Sync for Job<'_> {}

impl<'a> Job<'a> {
    fn new(
        kernel: &'static Kernel,
        conv: &'a Conv,
        x: *const u8,
        dtype: DType,
        weight: &'a WinogradWeight,
        threads: usize,
    ) -> Job<'a> {
        let (o, t) = (weight.tile, weight.tile + 2);
        let [planes, height, width] = conv.output;
        let grid = [height.div_ceil(o), width.div_ceil(o)];
        let tiles = conv.batch * planes * grid[0] * grid[1];
        let v_ld = conv.in_channels.next_multiple_of(LANES) + 16;
        let fits = |ld: usize| (MAX_BYTES / (t * t * ld * 4)).max(kernel.mr);
        let mut block = MAX_TILES.min(fits(v_ld)).min(tiles);
        block = tiles.div_ceil(tiles.div_ceil(block));
        let mut nc = conv.out_channels.next_multiple_of(kernel.nr);
        while nc > kernel.nr && t * t * block * (nc + LANES) * 4 > MAX_BYTES {
            nc = nc.div_ceil(2).next_multiple_of(kernel.nr);
        }
        while threads > 1 && tiles.div_ceil(block) * conv.out_channels.div_ceil(nc) < 4 * threads {
            if block > 2 * kernel.mr {
                block = block.div_ceil(2);
            } else if nc > 128 {
                nc = nc.div_ceil(2).next_multiple_of(kernel.nr);
            } else {
                break;
            }
        }
        let m_ld = nc.next_multiple_of(LANES) + 16;
        let v_bytes = t * t * block * v_ld * 4;
        let m_bytes = t * t * block * m_ld * 4;
        let c_bytes = o * o * STRIP * m_ld * 4;
        Job {
            kernel,
            conv,
            x,
            dtype,
            copy: copy_row(kernel.isa, dtype, Form::F32),
            weight,
            t,
            grid,
            tiles,
            block,
            nc,
            v_ld,
            m_ld,
            m_offset: v_bytes.next_multiple_of(4096),
            c_offset: v_bytes.next_multiple_of(4096) + m_bytes.next_multiple_of(4096),
            scratch_bytes: v_bytes.next_multiple_of(4096) + m_bytes.next_multiple_of(4096) + c_bytes,
        }
    }

    /// Image plane, tile row and tile column of a tile.
    fn place(&self, tile: usize) -> [usize; 3] {
        let [rows, cols] = self.grid;
        [tile / (rows * cols), tile / cols % rows, tile % cols]
    }

    /// # Safety
    /// As [`conv_winograd`].
    unsafe fn run(&self, worker: Worker, first: usize, col0: usize, epilogue: &dyn Epilogue) {
        let count = self.block.min(self.tiles - first);
        let cols = self.nc.min(self.conv.out_channels - col0);
        // SAFETY: the three regions lie behind each other in scratch.
        unsafe {
            let v: *mut f32 = worker.scratch.cast();
            let m: *mut f32 = worker.scratch.add(self.m_offset).cast();
            let c: *mut f32 = worker.scratch.add(self.c_offset).cast();
            for tile in 0..count {
                self.fill_v(first + tile, v.add(tile * self.v_ld), count * self.v_ld);
            }
            for point in 0..self.t * self.t {
                let v = v.add(point * count * self.v_ld);
                self.multiply(point, count, v, col0, cols, m.add(point * count * self.m_ld));
            }
            let mut tile = 0;
            while tile < count {
                let [_, _, tile_col] = self.place(first + tile);
                let strip = STRIP.min(count - tile).min(self.grid[1] - tile_col);
                let m = m.add(tile * self.m_ld);
                self.finish(first + tile, strip, m, count * self.m_ld, c, (col0, cols), epilogue);
                tile += strip;
            }
        }
    }

    /// Transforms one tile of the input; points lie `stride` apart.
    ///
    /// # Safety
    /// `v` must hold every point's channels, rounded up to whole chunks.
    unsafe fn fill_v(&self, tile: usize, v: *mut f32, stride: usize) {
        let conv = self.conv;
        let (t, size) = (self.t, self.dtype.size_bytes() as isize);
        let [plane, tile_row, tile_col] = self.place(tile);
        let planes = conv.output[0];
        let image = (plane / planes) as isize * conv.strides[0] + (plane % planes) as isize * conv.strides[1];
        let row0 = (tile_row * self.weight.tile) as isize - conv.padding[1];
        let col0 = (tile_col * self.weight.tile) as isize - conv.padding[2];
        let mut data = [[0f32; LANES]; 36];
        for channel in (0..conv.in_channels).step_by(LANES) {
            let lanes = LANES.min(conv.in_channels - channel);
            for (index, pixel) in data.iter_mut().enumerate().take(t * t) {
                let (row, col) = (row0 + (index / t) as isize, col0 + (index % t) as isize);
                if row < 0 || row >= conv.input[1] as isize || col < 0 || col >= conv.input[2] as isize {
                    pixel.fill(0.0);
                    continue;
                }
                let offset = image + row * conv.strides[2] + col * conv.strides[3] + channel as isize;
                // SAFETY: the pixel lies inside the image.
                unsafe { (self.copy)(self.x.byte_offset(offset * size), pixel.as_mut_ptr().cast(), lanes) };
            }
            // SAFETY: the kernel is available.
            unsafe { input_transform(self.kernel.isa, t, &mut data[..t * t]) };
            for (index, pixel) in data.iter().enumerate().take(t * t) {
                // SAFETY: chunks are whole in V.
                unsafe { v.add(index * stride + channel).copy_from_nonoverlapping(pixel.as_ptr(), LANES) };
            }
        }
    }

    /// One matrix product: `count` tiles by `cols` output channels.
    ///
    /// # Safety
    /// `v` and `m` must hold the point's rows.
    unsafe fn multiply(&self, point: usize, count: usize, v: *const f32, col0: usize, cols: usize, m: *mut f32) {
        let (kernel, channels, outs) = (self.kernel, self.conv.in_channels, self.conv.out_channels);
        let matrix = self.weight.ptr.wrapping_add(point * self.weight.stride());
        let chunks = channels.div_ceil(CHUNK);
        let kc = channels.div_ceil(chunks);
        let pieces = count.div_ceil(kernel.mr);
        for k0 in (0..channels).step_by(kc) {
            let terms = kc.min(channels - k0);
            let lines = terms / 4 * 64;
            let mut n0 = col0;
            while n0 < col0 + cols {
                let width = width_at(outs, n0, kernel.nr);
                let family = kernel.tiles[usize::from(width == kernel.nr)];
                let panel = matrix.wrapping_add((n0 * channels + k0 * width) * 4);
                let next = panel.wrapping_add(width * channels * 4);
                for piece in 0..pieces {
                    let (from, to) = (piece * count / pieces, (piece + 1) * count / pieces);
                    let ahead =
                        if piece * lines < terms * width * 4 { next.wrapping_add(piece * lines) } else { panel };
                    // SAFETY: the tile lies inside V, the panel and M.
                    unsafe {
                        let a = v.add(from * self.v_ld + k0).cast();
                        let c = m.add(from * self.m_ld + n0 - col0);
                        family[to - from - 1](terms, a, self.v_ld * 4, panel, c, self.m_ld, k0 > 0, ahead);
                    }
                }
                n0 += width;
            }
        }
    }

    /// Transforms a strip of tiles back and hands its pixel rows over.
    ///
    /// # Safety
    /// `m` must hold the strip's rows at every point, `stride` apart; `c` a strip of pixels.
    unsafe fn finish(
        &self,
        tile: usize,
        strip: usize,
        m: *const f32,
        stride: usize,
        c: *mut f32,
        (col0, cols): (usize, usize),
        epilogue: &dyn Epilogue,
    ) {
        let (o, t) = (self.weight.tile, self.t);
        let mut data = [[0f32; LANES]; 36];
        for index in 0..strip {
            for col in (0..cols).step_by(LANES) {
                let lanes = LANES.min(cols - col);
                // SAFETY: rows of M and C are whole chunks long.
                unsafe {
                    for (point, lanes) in data.iter_mut().enumerate().take(t * t) {
                        let from = m.add(point * stride + index * self.m_ld + col);
                        from.copy_to_nonoverlapping(lanes.as_mut_ptr(), LANES);
                    }
                    output_transform(self.kernel.isa, t, &mut data[..t * t]);
                    for (row, pixel) in (0..o * o).map(|pixel| (pixel / o, pixel % o)) {
                        let to = c.add((row * STRIP * o + index * o + pixel) * self.m_ld + col);
                        to.copy_from_nonoverlapping(data[row * t + pixel].as_ptr(), lanes);
                    }
                }
            }
        }
        let [_, height, width] = self.conv.output;
        let [plane, tile_row, tile_col] = self.place(tile);
        let pixels = (strip * o).min(width - tile_col * o);
        for row in 0..o.min(height - tile_row * o) {
            let result = (plane * height + tile_row * o + row) * width + tile_col * o;
            // SAFETY: the row of pixels lies inside C and the output.
            unsafe { epilogue.apply(c.add(row * STRIP * o * self.m_ld), self.m_ld, result, col0, pixels, cols) };
        }
    }
}
