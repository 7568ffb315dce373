//! Copies between strided places.
//!
//! Where both sides have the same neighbours, 16 bytes at a time; where they differ (a transposition), through a tile in
//! shared memory so that both sides are accessed in order; else element by element.

use super::body::Space;
use super::writer::Writer;
use super::{Grid, Kernel, Provenance, THREADS, Vector, View, c_type};
use crate::ir::{DType, Dim};

/// Edge of a transposed tile.
const TILE: u32 = 32;

/// A copy. Operands: source, destination (of one shape and type).
pub fn lower_copy(source: &View, to: &View, from: &Provenance) -> Kernel {
    let order = write_order(to);
    let permute = |v: &View| View {
        dtype: v.dtype,
        shape: order.iter().map(|&d| v.shape[d].clone()).collect(),
        strides: order.iter().map(|&d| v.strides[d].clone()).collect(),
    };
    let (source, to) = (permute(source), permute(to));
    let mut space = Space::new(&to.shape, [&source, &to], 0);
    if space.sizes.is_empty() {
        space.sizes.push(Dim::constant(1));
        space.strides.iter_mut().for_each(|s| s.push(Dim::constant(1)));
    }
    let last = space.sizes.len() - 1;
    let source_unit = space.strides[0].iter().position(|s| s.is(1));
    match source_unit {
        Some(unit) if unit != last && space.strides[1][last].is(1) => transpose(space, unit, &to, from),
        _ => copy(space, &to, from),
    }
}

/// Dimensions in the order of the destination's memory, as far as that is known: unit strides last.
fn write_order(to: &View) -> Vec<usize> {
    let rank = to.shape.len();
    let unit = (0..rank).rev().find(|&d| to.strides[d].is(1) && !to.shape[d].is(1));
    let others = (0..rank).filter(|&d| Some(d) != unit);
    others.chain(unit).collect()
}

fn copy(space: Space, to: &View, from: &Provenance) -> Kernel {
    let last = space.sizes.len() - 1;
    let (rows, cols) = (space.rows(1), space.sizes[last].clone());
    let mut w = Writer::new();
    let (source, target) = (w.pointer(0, to.dtype, false), w.pointer(1, to.dtype, true));
    let (row_count, col_count) = (w.size(&rows), w.size(&cols));
    w.line(format!("const u32 packs = ((u32){col_count} + V - 1) / V;"));
    w.line("const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;");
    w.line(format!("if (thread >= (u32){row_count} * packs) return;"));
    w.line("const u32 row = thread / packs, col = thread % packs * V;");
    let offsets = space.emit_offsets(&mut w, "row", 1, "");
    let is_unit = space.strides.iter().all(|s| s[last].is(1));
    if is_unit {
        let pack = format!("Pack<{}, V>", c_type(to.dtype));
        w.line(format!(
            "*({pack}*)({target} + {} + col) = *(const {pack}*)({source} + {} + col);",
            offsets[1], offsets[0]
        ));
    } else {
        let (a, b) = (w.size(&space.strides[0][last]), w.size(&space.strides[1][last]));
        w.line(format!("{target}[{} + (i64)col * {b}] = {source}[{} + (i64)col * {a}];", offsets[1], offsets[0]));
    }
    let size = to.dtype.size_bytes();
    let outer = |k: usize| space.strides[k][..last].iter().filter(|s| !s.is(0)).cloned().collect();
    let operands = if is_unit { vec![(0, size, outer(0)), (1, size, outer(1))] } else { Vec::new() };
    let vector = Vector { width: if is_unit { 16 / size } else { 1 }, cols: cols.clone(), operands };
    w.finish_vector(from, to.dtype, Grid::Packs { rows, cols }, THREADS, vector)
}

/// The source's neighbours are along `unit`, the destination's along the last dimension: tiles over the two.
fn transpose(space: Space, unit: usize, to: &View, from: &Provenance) -> Kernel {
    let last = space.sizes.len() - 1;
    let (rows, cols) = (space.sizes[unit].clone(), space.sizes[last].clone());
    let others: Vec<usize> = (0..last).filter(|&d| d != unit).collect();
    let batch = Space {
        sizes: others.iter().map(|&d| space.sizes[d].clone()).collect(),
        strides: space.strides.iter().map(|s| others.iter().map(|&d| s[d].clone()).collect()).collect(),
    };
    let mut w = Writer::new();
    let (source, target) = (w.pointer(0, to.dtype, false), w.pointer(1, to.dtype, true));
    let batches = batch.rows(0);
    let (m, n, z) = (w.size(&rows), w.size(&cols), w.size(&batches));
    let (along, across) = (w.size(&space.strides[0][last]), w.size(&space.strides[1][unit]));
    w.line(format!("OX_SHARED({}, tile, {TILE} * {});", c_type(to.dtype), TILE + 1));
    w.line(format!("const u32 wide = ((u32){n} + {TILE} - 1) / {TILE};"));
    w.line(format!("const u32 row0 = blockIdx.x / wide * {TILE}, col0 = blockIdx.x % wide * {TILE};"));
    w.line(format!("const u32 x = threadIdx.x % {TILE}, y = threadIdx.x / {TILE};"));
    w.line(format!("for (u32 z = blockIdx.z; z < (u32){z}; z += gridDim.z) {{"));
    let offsets = batch.emit_offsets(&mut w, "z", 0, "");
    w.line(format!("for (u32 k = y; k < {TILE}; k += blockDim.x / {TILE})"));
    w.line(format!(
        "    if (row0 + x < (u32){m} && col0 + k < (u32){n}) tile[k * {} + x] = {source}[{} + row0 + x + (i64)(col0 + k) * {along}];",
        TILE + 1,
        offsets[0]
    ));
    w.line("__syncthreads();");
    w.line(format!("for (u32 k = y; k < {TILE}; k += blockDim.x / {TILE})"));
    w.line(format!(
        "    if (row0 + k < (u32){m} && col0 + x < (u32){n}) {target}[{} + (i64)(row0 + k) * {across} + col0 + x] = tile[x * {} + k];",
        offsets[1],
        TILE + 1
    ));
    w.line("__syncthreads();");
    w.line("}");
    let grid = Grid::Tiles { rows, cols, batch: batches, tile: TILE, threads: THREADS };
    w.finish(from, to.dtype, grid, THREADS)
}

/// The weights of four convolutions that are one of 3 x 3 taps over an image upsampled by two: of the results at rows
/// `2 i + a` and columns `2 j + b`, with `q = 2 a + b`. Where taps fall on one pixel of the image they are added:
///
/// ```text
/// to[q][filter][y][x][channel] = sum of from[filter][channel][r][c],  r of rows(a, y), c of rows(b, x)
/// rows(0, 0) = 0    rows(0, 1) = 1, 2    rows(1, 0) = 0, 1    rows(1, 1) = 2
/// ```
///
/// Sums are f32, and rounded once.
///
/// Sizes: filters, channels. Strides of the source: filters, channels, rows, columns. Operands: source, result (dense).
pub fn lower_tap_sums(dtype: DType, [filters, channels]: [Dim; 2], strides: [Dim; 4], from: &Provenance) -> Kernel {
    let mut w = Writer::new();
    let (source, target) = (w.pointer(0, dtype, false), w.pointer(1, dtype, true));
    let (f, c) = (w.size(&filters), w.size(&channels));
    let [by_filter, by_channel, by_row, by_column] = strides.map(|s| w.size(&s));
    w.lines(&format!(
        "const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
        const u32 channel = thread % (u32){c}, tap = thread / (u32){c} % 4;
        const u32 filter = thread / (u32){c} / 4 % (u32){f}, q = thread / (u32){c} / 4 / (u32){f};
        if (q >= 4) return;
        const u32 a = q >> 1, b = q & 1, y = tap >> 1, x = tap & 1;
        const {ty}* taps = {source} + (i64)filter * {by_filter} + (i64)channel * {by_channel};
        float sum = 0.0f;
        for (u32 r = y ? 1 + a : 0; r < (y ? 3 : 1 + a); ++r)
        for (u32 k = x ? 1 + b : 0; k < (x ? 3 : 1 + b); ++k) sum += to_float(taps[(i64)r * {by_row} + (i64)k * {by_column}]);
        {target}[thread] = narrow<{ty}>(sum);",
        ty = c_type(dtype),
    ));
    let grid = Grid::Packs { rows: &filters * &Dim::constant(16), cols: channels };
    w.finish(from, dtype, grid, THREADS)
}

/// A convolution's weight with its channels as neighbours: `to[filter][tap][channel]`, dense, from a weight that lies anyhow. A
/// thread has all taps of a channel: neighbours write side by side, and what they read a line of the cache is read by them alone.
///
/// Sizes: filters, channels, and three of taps. Strides of the source, in the same order. Operands: source, result.
pub fn lower_channels_last(dtype: DType, sizes: [Dim; 5], strides: [Dim; 5], from: &Provenance) -> Kernel {
    let mut w = Writer::new();
    let (source, target) = (w.pointer(0, dtype, false), w.pointer(1, dtype, true));
    let [filters, channels, ..] = sizes.clone();
    let [f, c, depth, height, width] = sizes.map(|n| w.size(&n));
    let [by_filter, by_channel, by_depth, by_row, by_column] = strides.map(|s| w.size(&s));
    w.lines(&format!(
        "const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;
        const u32 channel = thread % (u32){c}, filter = thread / (u32){c};
        if (filter >= (u32){f}) return;
        const {ty}* from = {source} + (i64)filter * {by_filter} + (i64)channel * {by_channel};
        {ty}* to = {target} + (i64)filter * {depth} * {height} * {width} * {c} + channel;
        for (u32 z = 0; z < (u32){depth}; ++z)
        for (u32 y = 0; y < (u32){height}; ++y)
        for (u32 x = 0; x < (u32){width}; ++x, to += {c})
        *to = from[(i64)z * {by_depth} + (i64)y * {by_row} + (i64)x * {by_column}];",
        ty = c_type(dtype),
    ));
    w.finish(from, dtype, Grid::Packs { rows: filters, cols: channels }, THREADS)
}
