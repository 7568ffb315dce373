//! Nearest-neighbour resampling in one, two or three dimensions.
//!
//! Source indices are PyTorch's: `floor(dst * scale)` in f32 for the legacy mode, `floor((dst + 0.5) * scale)` for
//! `nearest-exact`, with `scale` the reciprocal of the scale factor where one is given, else input over output size.
//! (PyTorch's own channels-last kernel deviates from this where the output is exactly once or twice the input although
//! the factor is not 1 or 2; we follow its contiguous kernel.)

use super::copy::Shared;
use crate::pool::Pool;

/// One spatial dimension.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    /// Input size.
    pub input: usize,
    /// Output size.
    pub output: usize,
    /// The scale factor the caller of PyTorch's function gave, if it did.
    pub scale: Option<f64>,
    /// Bytes between input positions.
    pub src: isize,
    /// Bytes between output positions.
    pub dst: isize,
}

impl Axis {
    /// The input position each output position is taken from.
    pub fn source(&self, exact: bool) -> Vec<usize> {
        let scale = match self.scale {
            Some(s) if s > 0.0 => (1.0 / s) as f32,
            _ => self.input as f32 / self.output as f32,
        };
        (0..self.output)
            .map(|i| {
                let at = match exact {
                    true => ((i as f32 + 0.5) * scale).floor() as usize,
                    false => (i as f32 * scale).floor() as usize,
                };
                at.min(self.input.saturating_sub(1))
            })
            .collect()
    }
}

/// A batch of images: `batch x channels` over up to three spatial dimensions. Distances in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Images {
    /// Input.
    pub src: *const u8,
    /// Output.
    pub dst: *mut u8,
    /// Number of images.
    pub batch: usize,
    /// Between input images.
    pub src_batch: isize,
    /// Between output images.
    pub dst_batch: isize,
    /// Number of channels.
    pub channels: usize,
    /// Between input channels.
    pub src_channel: isize,
    /// Between output channels.
    pub dst_channel: isize,
    /// Bytes per element: 1, 2, 4 or 8.
    pub element_bytes: usize,
    /// Depth, height, width; use size 1 for missing ones.
    pub axes: [Axis; 3],
}

/// Resamples by nearest neighbour.
///
/// # Safety
/// The description must match valid memory, and outputs must not overlap inputs or each other.
pub unsafe fn nearest(pool: &Pool, exact: bool, images: &Images) {
    let [depth, height, width] = images.axes;
    if images.axes.iter().any(|a| a.input == 0 || a.output == 0) || images.channels == 0 {
        return;
    }
    let (zs, ys, xs) = (depth.source(exact), height.source(exact), width.source(exact));
    let size = images.element_bytes as isize;
    let pixels = images.src_channel == size && images.dst_channel == size;
    let rows = images.batch * depth.output * height.output;
    let row_bytes = width.output * images.channels * images.element_bytes;
    let tasks = ((rows * row_bytes) >> 16).clamp(1, pool.threads() * 4).min(rows.max(1));
    let (src, dst) = (Shared(images.src.cast_mut()), Shared(images.dst));
    let channels = images.channels;
    let (src_step, dst_step) = (images.src_channel, images.dst_channel);
    let (src_batch, dst_batch) = (images.src_batch, images.dst_batch);
    let element = images.element_bytes;
    pool.run(tasks, |task, _| {
        for row in rows * task / tasks..rows * (task + 1) / tasks {
            let (y, rest) = (row % height.output, row / height.output);
            let (z, n) = (rest % depth.output, (rest / depth.output) as isize);
            let s = src.at(n * src_batch + zs[z] as isize * depth.src + ys[y] as isize * height.src);
            let d = dst.at(n * dst_batch + z as isize * depth.dst + y as isize * height.dst);
            // SAFETY: one output row and the input row it is taken from; rows are disjoint.
            unsafe {
                if pixels {
                    copy_pixels(&xs, s, width.src, d, width.dst, channels * element);
                    continue;
                }
                for c in 0..channels as isize {
                    let (s, d) = (s.offset(c * src_step), d.offset(c * dst_step));
                    match element {
                        1 => copy_line::<u8>(&xs, s, width.src, d, width.dst),
                        2 => copy_line::<u16>(&xs, s, width.src, d, width.dst),
                        4 => copy_line::<u32>(&xs, s, width.src, d, width.dst),
                        _ => copy_line::<u64>(&xs, s, width.src, d, width.dst),
                    }
                }
            }
        }
    });
}

/// A row of pixels whose channels are contiguous.
unsafe fn copy_pixels(xs: &[usize], s: *const u8, src: isize, d: *mut u8, dst: isize, bytes: usize) {
    for (i, &x) in xs.iter().enumerate() {
        // SAFETY: positions of the row, by the caller's promise.
        unsafe { std::ptr::copy_nonoverlapping(s.offset(x as isize * src), d.offset(i as isize * dst), bytes) };
    }
}

/// A row of one channel.
unsafe fn copy_line<T: Copy>(xs: &[usize], s: *const u8, src: isize, d: *mut u8, dst: isize) {
    for (i, &x) in xs.iter().enumerate() {
        // SAFETY: positions of the row, by the caller's promise.
        unsafe {
            let v = s.offset(x as isize * src).cast::<T>().read_unaligned();
            d.offset(i as isize * dst).cast::<T>().write_unaligned(v);
        }
    }
}
