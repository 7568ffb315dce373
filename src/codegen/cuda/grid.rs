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
    /// A block per row; the row is kept in shared memory as f32 if it fits.
    Rows {
        /// Number of rows.
        rows: Dim,
        /// Elements of a row.
        cols: Dim,
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
    /// A block per chunk of an image's pixels, with two f32 of shared memory per channel.
    Chunks {
        /// Images.
        batch: Dim,
        /// Pixels of an image.
        pixels: Dim,
        /// Channels.
        channels: Dim,
    },
}

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
            Grid::Rows { rows, cols } => {
                let cols = at(cols)?;
                let threads = cols.div_ceil(width as u64).next_multiple_of(u64::from(WARP));
                let threads = threads.clamp(u64::from(WARP), u64::from(THREADS)) as u32;
                plain(at(rows)?, threads, row_bytes(cols))
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
            Grid::Chunks { batch, pixels, channels } => {
                let (images, channels) = (at(batch)?, at(channels)?);
                let bytes = channels.saturating_mul(8);
                if bytes > u64::from(SHARED_BYTES) {
                    return Err(Error::invalid(format!("a group norm over {channels} channels has no kernel")));
                }
                plain(images * chunk_count(at(pixels)?), THREADS, bytes as u32)
            }
        }
    }
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
    fn rows_are_cached_where_they_fit() {
        let rows = |cols: i64| Grid::Rows { rows: 5.into(), cols: cols.into() };
        let small = geometry(&rows(320), 8).unwrap();
        assert_eq!((small.block[0], small.shared_bytes), (64, 1280));
        assert_eq!(geometry(&rows(i64::from(CACHED_COLS)), 1).unwrap().shared_bytes, CACHED_COLS * 4);
        assert_eq!(geometry(&rows(i64::from(CACHED_COLS) + 1), 1).unwrap().shared_bytes, 0);
    }
}
