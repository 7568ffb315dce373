//! Launch geometry: how many blocks and threads a kernel gets for given sizes.

use super::THREADS;
use crate::ir::Dim;
use crate::{Error, Result};

/// Threads of a warp.
pub const WARP: u32 = 32;
/// Shared memory that every device gives a block without being asked.
pub const SHARED_BYTES: u32 = 48 << 10;
/// Blocks along the third axis of a grid.
const MAX_Z: u64 = 65_535;

/// Work of a launch, from which its geometry follows.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grid {
    /// A thread per pack of neighbouring columns of each row.
    Packs {
        /// Number of rows.
        rows: Dim,
        /// Elements of a row.
        cols: Dim,
    },
    /// A block per row; the row is kept in shared memory as f32 if it fits. Short rows have a power of two of lanes of a warp
    /// each, along the block's first axis.
    Rows {
        /// Number of rows.
        rows: Dim,
        /// Elements of a row.
        cols: Dim,
        /// Packs that a lane of a short row has, where there are enough.
        packs: u64,
    },
    /// A block per tile of `tile` rows and columns, and a layer of blocks per batch entry.
    Tiles {
        /// Rows of a result.
        rows: Dim,
        /// Columns of a result.
        cols: Dim,
        /// Results.
        batch: Dim,
        /// Edge of a tile.
        tile: u32,
        /// Threads of a block.
        threads: u32,
    },
    /// A warp per item, several to a block, each with `floats` f32 of shared memory.
    Warps {
        /// Items.
        count: Dim,
        /// Shared memory of a warp.
        floats: Dim,
    },
    /// A block per chunk of an image's pixels and slice of its channels, with two f32 of shared memory per channel of a slice,
    /// and for each thread two per neighbour and one more.
    Chunks {
        /// Images.
        batch: Dim,
        /// Pixels of an image.
        pixels: Dim,
        /// Channels of the largest slice.
        channels: Dim,
        /// Slices of the channels.
        slices: i64,
    },
    /// A block per group of an image's channels, which it keeps in shared memory behind a float per warp.
    Groups {
        /// Images times groups.
        count: Dim,
        /// Pixels of an image.
        pixels: Dim,
        /// Channels of a group, at most [`GROUP_THREADS`].
        wide: i64,
        /// Bytes of an element.
        size: usize,
    },
    /// Results that are folded from many terms each: a power of two of threads per result, along the block's first axis.
    Folds {
        /// Number of results.
        results: Dim,
        /// Terms of a result.
        terms: Dim,
    },
    /// The same where the results are neighbours: a warp's lanes have a column each, the warps of a block share the terms.
    Columns {
        /// Rows of results.
        rows: Dim,
        /// Results of a row, each with a lane.
        cols: Dim,
        /// Terms of a result.
        terms: Dim,
    },
}

/// Most threads that fold one result, or one warp's columns.
pub(super) const FOLD_THREADS: u32 = 1024;
/// Terms, or packs of them, that a thread has at least before another one helps: what pays for joining their parts.
const FOLD_TERMS: u64 = 4;
/// Warps, or blocks, from which on a device is busy without more threads to a result: about what the largest runs at once.
const BUSY: u64 = 4096;

/// Most threads that share a group of an image: registers for whatever follows a norm.
pub(super) const GROUP_THREADS: u32 = 512;
/// What a block that keeps a group has in shared memory before it.
const PARTIAL_BYTES: u64 = 4 * WARP as u64;

/// Most packs that a lane of a short row has.
pub(super) const SHORT_PACKS: u64 = 5;

/// Least pixels of a chunk: what makes a block's work worth its reduction.
const CHUNK_PIXELS: u64 = 64;
/// Most chunks of an image: what one warp joins quickly, and more blocks than any device runs at once with a few images.
const MAX_CHUNKS: u64 = 512;

/// Pixels of one chunk of an image of `pixels`.
pub fn chunk_pixels(pixels: u64) -> u64 {
    pixels.div_ceil(MAX_CHUNKS).max(CHUNK_PIXELS)
}

/// Chunks of an image of `pixels`.
pub fn chunk_count(pixels: u64) -> u64 {
    pixels.div_ceil(chunk_pixels(pixels))
}

/// What a launch is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Geometry {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
}

fn too_large(count: u64) -> Error {
    Error::invalid(format!("a kernel would need {count} blocks, more than a grid has"))
}

fn blocks_x(count: u64) -> Result<u32> {
    u32::try_from(count).ok().filter(|&c| c <= i32::MAX as u32).ok_or_else(|| too_large(count))
}

fn count(dim: &Dim, bindings: &[i64]) -> Result<u64> {
    u64::try_from(dim.eval(bindings)?).map_err(|_| Error::invalid("a size is negative"))
}

impl Grid {
    /// Geometry for these sizes, a thread handling `width` neighbours; `None` if there is nothing to do.
    ///
    /// # Errors
    /// If a size is negative or the grid would be too large.
    pub fn geometry(&self, bindings: &[i64], width: usize) -> Result<Option<Geometry>> {
        let at = |dim: &Dim| count(dim, bindings);
        let plain = |blocks: u64, threads: u32, shared_bytes: u32| -> Result<Option<Geometry>> {
            let grid = [blocks_x(blocks)?, 1, 1];
            Ok((blocks > 0).then_some(Geometry { grid, block: [threads, 1, 1], shared_bytes }))
        };
        match self {
            Grid::Packs { rows, cols } => {
                // Thread numbers are 32-bit.
                let packs = at(rows)?.saturating_mul(at(cols)?.div_ceil(width as u64));
                let blocks = packs.div_ceil(u64::from(THREADS));
                let fits = packs < u64::from(u32::MAX) - u64::from(THREADS);
                if fits { plain(blocks, THREADS, 0) } else { Err(too_large(blocks)) }
            }
            Grid::Rows { rows, cols, packs } => {
                let (rows, cols) = (at(rows)?, at(cols)?);
                let own = cols.div_ceil(width as u64);
                if own <= SHORT_PACKS * u64::from(WARP) {
                    let lanes = own.div_ceil(*packs).next_power_of_two();
                    let lanes = lanes.clamp(1, u64::from(WARP)) as u32;
                    let items = THREADS / lanes;
                    // Row numbers are 32-bit.
                    let fits = rows < u64::from(u32::MAX) - u64::from(THREADS);
                    let blocks = if fits { blocks_x(rows.div_ceil(u64::from(items))) } else { Err(too_large(rows)) };
                    let grid = [blocks?, 1, 1];
                    return Ok((rows > 0).then_some(Geometry { grid, block: [lanes, items, 1], shared_bytes: 0 }));
                }
                let threads = own.next_multiple_of(u64::from(WARP));
                let threads = threads.clamp(u64::from(WARP), u64::from(THREADS)) as u32;
                plain(rows, threads, row_bytes(cols))
            }
            Grid::Tiles { rows, cols, batch, tile, threads } => {
                let edge = u64::from(*tile);
                let tiles = at(rows)?.div_ceil(edge) * at(cols)?.div_ceil(edge);
                let batch = at(batch)?;
                let grid = [blocks_x(tiles)?, 1, batch.min(MAX_Z) as u32];
                let is_empty = tiles == 0 || batch == 0;
                Ok((!is_empty).then_some(Geometry { grid, block: [*threads, 1, 1], shared_bytes: 0 }))
            }
            Grid::Warps { count, floats } => {
                let bytes = at(floats)? * 4;
                let fitting = u64::from(SHARED_BYTES).checked_div(bytes).unwrap_or(8);
                if fitting == 0 {
                    return Err(Error::invalid(format!("a warp would need {bytes} bytes of shared memory")));
                }
                let warps = fitting.min(8);
                plain(at(count)?.div_ceil(warps), warps as u32 * WARP, (bytes * warps) as u32)
            }
            Grid::Chunks { batch, pixels, channels, slices } => {
                let (images, channels) = (at(batch)?, at(channels)?);
                let bytes = chunk_bytes(channels, *slices, width);
                if bytes > u64::from(SHARED_BYTES) {
                    return Err(Error::invalid(format!("a group norm over {channels} channels has no kernel")));
                }
                let slices = slices.unsigned_abs();
                plain(images.saturating_mul(chunk_count(at(pixels)?)).saturating_mul(slices), THREADS, bytes as u32)
            }
            Grid::Groups { count, pixels, wide, size } => {
                let (pixels, wide) = (at(pixels)?, wide.unsigned_abs());
                let packs = wide / (width as u64);
                let threads = pixels.saturating_mul(packs).div_ceil(2).clamp(packs, u64::from(GROUP_THREADS));
                let threads = threads.next_multiple_of(u64::from(WARP)) as u32;
                let bytes = pixels.saturating_mul(wide * *size as u64).saturating_add(PARTIAL_BYTES);
                let count = at(count)?;
                // Row numbers are 32-bit.
                if count.saturating_mul(pixels) >= u64::from(u32::MAX) {
                    return Err(too_large(count));
                }
                // What is more than any block has is not launched.
                plain(count, threads, u32::try_from(bytes).unwrap_or(u32::MAX))
            }
            Grid::Folds { results, terms } => {
                let (results, terms) = (at(results)?, at(terms)?);
                let most = if results < BUSY { FOLD_THREADS } else { WARP };
                let lanes = fold_threads(terms.div_ceil(width as u64), most);
                let items = (THREADS / lanes).max(1);
                let blocks = results.div_ceil(u64::from(items));
                fold_fits(results.max(terms))?;
                let grid = [blocks_x(blocks)?, 1, 1];
                Ok((blocks > 0).then_some(Geometry { grid, block: [lanes, items, 1], shared_bytes: 0 }))
            }
            Grid::Columns { rows, cols, terms } => {
                let (rows, cols, terms) = (at(rows)?, at(cols)?, at(terms)?);
                let blocks = rows.saturating_mul(cols.div_ceil(u64::from(WARP) * width as u64));
                let most = if blocks < BUSY / 8 { FOLD_THREADS } else { THREADS };
                let warps = fold_threads(terms, most / WARP);
                fold_fits(cols.max(terms))?;
                let grid = [blocks_x(blocks)?, 1, 1];
                Ok((blocks > 0).then_some(Geometry { grid, block: [WARP, warps, 1], shared_bytes: 0 }))
            }
        }
    }
}

/// A power of two of threads, at most `most`, for this many packs of terms.
fn fold_threads(packs: u64, most: u32) -> u32 {
    packs.div_ceil(FOLD_TERMS).next_power_of_two().clamp(1, u64::from(most)) as u32
}

/// Kernels that fold count results and terms in 32 bits, past the end by a step of all threads.
fn fold_fits(count: u64) -> Result<()> {
    if count < 1 << 31 {
        return Ok(());
    }
    Err(Error::invalid(format!("a reduction over {count} elements at once has no kernel on a GPU")))
}

/// Shared memory of a block that has a chunk of pixels and this many channels, `width` neighbours to a thread: what the kernel lays
/// out, which has no need of the first part where each thread has packs of its own.
pub(super) fn chunk_bytes(channels: u64, slices: i64, width: usize) -> u64 {
    let is_shared = slices > 1 || channels / (width as u64) < u64::from(THREADS);
    let joined = if is_shared { u64::from(THREADS) * (2 * width as u64 + 1) * 4 } else { 0 };
    channels.saturating_mul(8).saturating_add(joined)
}

/// Shared memory in which a row of `cols` f32 is kept; 0 where it does not fit, which is what the kernel asks.
fn row_bytes(cols: u64) -> u32 {
    match cols.checked_mul(4) {
        // 64 floats are the kernel's own.
        Some(bytes) if bytes <= u64::from(SHARED_BYTES) - 256 => bytes as u32,
        _ => 0,
    }
}

/// Most columns of a row that is kept in shared memory: what [`Grid::Rows`] gives room for.
pub(super) const CACHED_COLS: u32 = (SHARED_BYTES - 256) / 4;

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(grid: &Grid, width: usize) -> Option<Geometry> {
        grid.geometry(&[], width).unwrap()
    }

    #[test]
    fn covers_every_element_and_no_more_blocks() {
        let packs = |rows: i64, cols: i64| Grid::Packs { rows: rows.into(), cols: cols.into() };
        assert_eq!(geometry(&packs(3, 1000), 8).unwrap().grid, [2, 1, 1]);
        assert_eq!(geometry(&packs(1, 256), 1).unwrap().grid, [1, 1, 1]);
        assert_eq!(geometry(&packs(0, 256), 1), None);
        assert!(packs(1 << 20, 1 << 20).geometry(&[], 1).is_err());
    }

    #[test]
    fn folds_get_threads_by_their_terms_and_results() {
        let fold = |results: i64, terms: i64| Grid::Folds { results: results.into(), terms: terms.into() };
        let seen = |grid: &Grid, width: usize| geometry(grid, width).map(|g| (g.grid[0], g.block));
        // A thread for three terms, a part of a warp, a warp, all there are.
        assert_eq!(seen(&fold(1000, 3), 1), Some((4, [1, 256, 1])));
        assert_eq!(seen(&fold(10, 40), 1), Some((1, [16, 16, 1])));
        assert_eq!(seen(&fold(100_000, 1 << 20), 8), Some((12_500, [32, 8, 1])));
        assert_eq!(seen(&fold(2, 1 << 20), 8), Some((2, [1024, 1, 1])));
        assert_eq!(seen(&fold(0, 5), 1), None);
        // No terms still have a result.
        assert_eq!(seen(&fold(1, 0), 1), Some((1, [1, 256, 1])));
        assert!(fold(1, 1 << 32).geometry(&[], 1).is_err());
        let columns = |rows: i64, cols: i64, terms: i64| Grid::Columns {
            rows: rows.into(),
            cols: cols.into(),
            terms: terms.into(),
        };
        assert_eq!(seen(&columns(2, 320, 4096), 1), Some((20, [32, 32, 1])));
        assert_eq!(seen(&columns(2, 320, 4096), 2), Some((10, [32, 32, 1])));
        assert_eq!(seen(&columns(64, 320, 4096), 1), Some((640, [32, 8, 1])));
        assert_eq!(seen(&columns(3, 33, 2), 1), Some((6, [32, 1, 1])));
    }

    #[test]
    fn short_rows_share_a_block() {
        let seen = |rows: i64, cols: i64, width: usize| {
            let grid = Grid::Rows { rows: rows.into(), cols: cols.into(), packs: SHORT_PACKS };
            geometry(&grid, width).map(|g| (g.grid[0], g.block, g.shared_bytes))
        };
        assert_eq!(seen(100, 128, 8), Some((2, [4, 64, 1], 0)));
        assert_eq!(seen(100, 640, 8), Some((7, [16, 16, 1], 0)));
        assert_eq!(seen(100, 1, 8), Some((1, [1, 256, 1], 0)));
        assert_eq!(seen(9, 1280, 8), Some((2, [32, 8, 1], 0)));
        assert_eq!(seen(9, 1288, 8).map(|(blocks, block, _)| (blocks, block)), Some((9, [192, 1, 1])));
        assert_eq!(seen(0, 128, 8), None);
        assert!(Grid::Rows { rows: (1i64 << 32).into(), cols: 1.into(), packs: 1 }.geometry(&[], 1).is_err());
    }

    #[test]
    fn group_norms_of_many_channels_have_room() {
        let bytes = |channels: i64, slices: i64, width: usize| {
            let grid = Grid::Chunks { batch: 1.into(), pixels: 64.into(), channels: channels.into(), slices };
            grid.geometry(&[], width).map(|g| g.unwrap().shared_bytes).ok()
        };
        assert_eq!(bytes(240, 2, 8), Some(240 * 8 + 256 * 17 * 4));
        // A thread for each channel, or more of them.
        assert_eq!(bytes(6144, 1, 1), Some(6144 * 8));
        assert_eq!(bytes(4096, 1, 8), Some(4096 * 8));
        assert_eq!(bytes(6145, 1, 1), None);
    }

    #[test]
    fn groups_that_are_kept_have_room_and_a_thread_for_each_pack_of_a_pixel() {
        let seen = |pixels: i64, wide: i64, width: usize| {
            let grid = Grid::Groups { count: 64.into(), pixels: pixels.into(), wide, size: 2 };
            geometry(&grid, width).map(|g| (g.grid[0], g.block[0], g.shared_bytes))
        };
        assert_eq!(seen(4096, 10, 2), Some((64, 512, 4096 * 20 + 128)));
        assert_eq!(seen(64, 40, 8), Some((64, 160, 64 * 80 + 128)));
        // A pixel is never more than a block.
        assert_eq!(seen(1, 500, 1), Some((64, 512, 1128)));
        assert_eq!(seen(1 << 25, 500, 1).map(|seen| seen.2), Some(u32::MAX));
        let rows = Grid::Groups { count: 64.into(), pixels: (1i64 << 26).into(), wide: 1, size: 2 };
        assert!(rows.geometry(&[], 1).is_err(), "row numbers are 32-bit");
    }

    #[test]
    fn rows_are_cached_where_they_fit() {
        let rows = |cols: i64| Grid::Rows { rows: 5.into(), cols: cols.into(), packs: 1 };
        let small = geometry(&rows(3072), 8).unwrap();
        assert_eq!((small.grid[0], small.block, small.shared_bytes), (5, [256, 1, 1], 3072 * 4));
        assert_eq!(geometry(&rows(i64::from(CACHED_COLS)), 1).unwrap().shared_bytes, CACHED_COLS * 4);
        assert_eq!(geometry(&rows(i64::from(CACHED_COLS) + 1), 1).unwrap().shared_bytes, 0);
    }
}
