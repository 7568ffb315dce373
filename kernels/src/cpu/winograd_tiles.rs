//! Tiles of an image and the weight's taps, as Winograd's convolutions read and write them, in whatever order they multiply.
//!
//! Which number a tile has, [`winograd_grid`](super::winograd_grid) says. A kernel of several planes (3x3x3) is one of 3x3
//! whose input channels are those of every plane that it reads.

use super::conv::{Conv, Weight};
use super::gemm_driver::widened;
use super::gemm_kernel::Kernel;
use super::gemm_store::load;
use super::pack::{Matrix, pack_panel, units};
use super::winograd_grid::{Grid, Image, Place};
use super::winograd_transform::{MAX_POINTS, Results, Taps, transform_input, transform_output};
use crate::epilogue::Epilogue;

/// Channels are transformed by whole vectors of every instruction set.
pub(super) const LANES: usize = 16;
/// Channels of an image that are transformed at a time, at most.
pub(super) const MAX_CHANNELS: usize = 160;
/// Tiles whose results go to the epilogue together.
pub(super) const STRIP: usize = 8;
/// Channel vectors that a task of the input's transform has at least.
pub(super) const TASK_VECTORS: usize = 64;

/// What stands for pixels outside of the image.
static ZEROS: [f32; MAX_CHANNELS] = [0.0; MAX_CHANNELS];

/// A stride of at least `n` f32, whole cache lines and an odd number of them: the points of one element fall into
/// different sets of the cache.
pub(super) fn odd_lines(n: usize) -> usize {
    (n.div_ceil(16) | 1) * 16
}

/// Tiles of all planes of all images.
pub(super) fn count(conv: &Conv, o: usize) -> usize {
    Grid::new(conv, o).tiles()
}

/// Which terms of a weight follow each other in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The taps of a channel, then the next channel: PyTorch's contiguous layout.
    Taps,
    /// The channels of a tap, then the next tap: channels last.
    Channels,
    /// Neither.
    Any,
}

fn order_of(weight: &Weight, channels: usize, planes: usize) -> Order {
    let [_, channel, plane, row, col] = weight.strides;
    let per_tap = channels as isize;
    let is_dense = |tap: isize| (planes == 1 || plane == 9 * tap) && row == 3 * tap && col == tap;
    if is_dense(1) && channel == 9 * planes as isize {
        Order::Taps
    } else if is_dense(per_tap) && channel == 1 {
        Order::Channels
    } else {
        Order::Any
    }
}

/// One convolution, in tiles.
pub(super) struct Tiled<'a> {
    /// The micro-kernel of f32 in whose panels weights and results lie.
    pub kernel: &'static Kernel,
    pub conv: &'a Conv,
    pub x: Image<'a>,
    pub weight: &'a Weight,
    pub order: Order,
    /// Side of an output tile and of an input tile.
    pub o: usize,
    pub t: usize,
    pub grid: Grid,
    /// Planes of the kernel.
    pub planes: usize,
}

// SAFETY: reads only; what is made of the image is made by who drives, while nobody reads.
unsafe impl Sync for Tiled<'_> {}

/// Where the results of tiles lie at every point: f32 from one point to the next, and from one tile.
#[derive(Clone, Copy)]
pub(super) struct Strides {
    pub point: usize,
    pub tile: usize,
}

impl<'a> Tiled<'a> {
    pub fn new(kernel: &'static Kernel, conv: &'a Conv, x: Image<'a>, weight: &'a Weight, o: usize) -> Tiled<'a> {
        let planes = conv.kernel[0];
        let order = order_of(weight, conv.in_channels, planes);
        Tiled { kernel, conv, x, weight, order, o, t: o + 2, grid: Grid::new(conv, o), planes }
    }

    /// Makes what tiles read of an image that is made while it is read.
    pub fn prepare(&self, first: usize, tiles: usize, done: &mut usize) {
        self.x.prepare(self.conv, &self.grid, first, tiles, done);
    }

    /// Tiles whose results go to the epilogue together, of `count` that start at a tile.
    pub fn strip(&self, tile: usize, count: usize) -> usize {
        STRIP.min(count).min(self.grid.place(tile).rest)
    }

    /// Transforms `channels` channels, from `channel` on, of one tile of one plane that the kernel reads: to
    /// `to[point * stride + channel]`.
    ///
    /// # Safety
    /// The image must be readable; every point of `to` writable for the channels, at most [`MAX_CHANNELS`], rounded up to whole vectors.
    pub unsafe fn transform_input(
        &self,
        tile: usize,
        tap: usize,
        (channel, channels): (usize, usize),
        to: *mut f32,
        stride: usize,
    ) {
        debug_assert!(channels <= MAX_CHANNELS);
        let conv = self.conv;
        let place = self.grid.place(tile);
        let depth = place.plane % conv.output[0];
        let z = (depth * conv.stride[0] + tap * conv.dilation[0]) as isize - conv.padding[0];
        let mut pixels = [ZEROS.as_ptr().cast::<u8>(); MAX_POINTS];
        if z >= 0 && z < (conv.input[0] * conv.upsample[0]) as isize {
            self.locate(place, z as usize / conv.upsample[0], channel, &mut pixels);
        }
        // SAFETY: the pixels lie inside the image or are zeros.
        unsafe { transform_input(self.kernel.isa, self.t, self.x.dtype, &pixels, channels, to, stride) };
    }

    /// Where a channel of a tile's pixels lies in plane `z` of its image, if inside.
    fn locate(&self, place: Place, z: usize, channel: usize, pixels: &mut [*const u8; MAX_POINTS]) {
        let Conv { input, output, padding, upsample, .. } = *self.conv;
        let size = self.x.dtype.size_bytes() as isize;
        for row in 0..self.t {
            let y = (place.row * self.o + row) as isize - padding[1];
            if y < 0 || y >= (input[1] * upsample[1]) as isize {
                continue;
            }
            let at = [place.plane / output[0], z, y as usize / upsample[1]];
            let (line, step) = self.x.line(self.conv, &self.grid, place, at);
            let line = line.wrapping_byte_offset(channel as isize * size);
            for col in 0..self.t {
                let x = (place.col * self.o + col) as isize - padding[2];
                if x >= 0 && x < (input[2] * upsample[2]) as isize {
                    let offset = x / upsample[2] as isize * step * size;
                    pixels[row * self.t + col] = line.wrapping_byte_offset(offset);
                }
            }
        }
    }

    /// Bytes of each of the buffers of [`Self::gather`], for so many channels at a time.
    pub fn taps_bytes(&self, channels: usize) -> usize {
        (9 * self.planes * channels + 2) * self.kernel.nr * 4
    }

    /// Brings the taps of `count` input channels to the panel of output channels at `n0` side by side, one vector of output
    /// channels each, as f32. Those of a plane of the kernel are followed by those of the next.
    ///
    /// # Safety
    /// The weight must be readable; `to` and `wide` must each have [`Self::taps_bytes`].
    pub unsafe fn gather(
        &self,
        n0: usize,
        width: usize,
        channel: usize,
        count: usize,
        to: *mut u8,
        wide: *mut u8,
    ) -> Taps {
        let Self { kernel, weight, conv, .. } = *self;
        let (outs, isa, all) = (conv.out_channels, kernel.isa, 9 * self.planes);
        let rows = Matrix { ptr: weight.ptr, dtype: weight.dtype, row_stride: weight.strides[0], col_stride: 1 };
        let taps = |from: *const u8, tap, channel| Taps { from: from.cast(), tap, channel, channels: count, width };
        // SAFETY: every term lies inside the weight, every row inside `to` or `wide`.
        unsafe {
            match self.order {
                Order::Taps => {
                    pack_panel(isa, &rows, n0, outs, kernel.nr, all * channel, all * count, to);
                    taps(widened(kernel, weight.dtype, to, all * count, width, wide), width, all * width)
                }
                Order::Channels => {
                    let step = units(count, weight.dtype) * width * 4;
                    for tap in 0..all {
                        let k0 = tap * conv.in_channels + channel;
                        pack_panel(isa, &rows, n0, outs, kernel.nr, k0, count, to.add(tap * step));
                    }
                    let terms = all * units(count, weight.dtype) * (4 / weight.dtype.size_bytes());
                    let from = widened(kernel, weight.dtype, to, terms, width, wide);
                    taps(from, terms / all * width, width)
                }
                Order::Any => {
                    let to: *mut f32 = wide.cast();
                    to.write_bytes(0, all * count * width);
                    let [out_stride, channel_stride, plane_stride, row_stride, col_stride] = weight.strides;
                    for (tap, index) in (0..all).flat_map(|tap| (0..count).map(move |index| (tap, index))) {
                        let term = (channel + index) as isize * channel_stride
                            + (tap / 9) as isize * plane_stride
                            + (tap / 3 % 3) as isize * row_stride
                            + (tap % 3) as isize * col_stride;
                        for lane in 0..width.min(outs - n0) {
                            let at = (n0 + lane) as isize * out_stride + term;
                            let from = weight.ptr.byte_offset(at * weight.dtype.size_bytes() as isize);
                            let value = load(from, weight.dtype, 0);
                            to.add((index * all + tap) * width + lane).write(value);
                        }
                    }
                    taps(to.cast(), width, all * width)
                }
            }
        }
    }

    /// Transforms a strip of tiles of a panel back and hands its pixel rows over.
    ///
    /// # Safety
    /// `m` must hold the strip's rows at every point, as `strides` says; `c` a [`STRIP`] of pixels; the epilogue must accept them.
    pub unsafe fn finish(
        &self,
        (tile, strip): (usize, usize),
        (m, strides): (*const f32, Strides),
        c: *mut f32,
        width: usize,
        (col0, cols): (usize, usize),
        epilogue: &dyn Epilogue,
    ) {
        let o = self.o;
        let row = STRIP * o * width;
        for index in 0..strip {
            let from = m.wrapping_add(index * strides.tile);
            let to = c.wrapping_add(index * o * width);
            // SAFETY: the tile's rows of M, and its pixels of C.
            unsafe {
                let tile = Results { from, stride: strides.point, width, to, row };
                transform_output(self.kernel.isa, self.t, &tile);
            }
        }
        let [_, height, columns] = self.conv.output;
        let Place { plane, row: tile_row, col: tile_col, .. } = self.grid.place(tile);
        let pixels = (strip * o).min(columns - tile_col * o);
        for line in 0..o.min(height - tile_row * o) {
            let result = (plane * height + tile_row * o + line) * columns + tile_col * o;
            // SAFETY: the row of pixels lies inside C and the output.
            unsafe { epilogue.apply(c.add(line * row), width, result, col0, pixels, cols) };
        }
    }
}
