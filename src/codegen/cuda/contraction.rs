//! Products and convolutions for what no library takes, and products of few rows.
//!
//! *Tiles*: a block computes 64 x 64 results, 4 x 4 a thread, from slices of 16 terms in shared memory, accumulated in f32.
//! Any strides and types; a convolution differs from a product in where its left operand's elements come from (implicit
//! GEMM: rows are pixels of the result, terms are taps times channels). *Few rows*: a warp per column walks the weight
//! once, 16 bytes a lane, for up to [`GEMV_ROWS`] rows at a time: bound by the weight's bytes.

use super::body::{Operands, Space, emit, result_type};
use super::writer::Writer;
use super::{Fused, Grid, Kernel, Provenance, THREADS, Vector, View};
use crate::ir::Dim;
use crate::{Error, Result};

/// Edge of a block's tile.
const TILE: u32 = 64;
/// Most rows of a product that [`lower_gemv`] computes.
pub const GEMV_ROWS: usize = 8;

/// A matrix product `a [..., M, K] x b [..., K, N]`.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// `[batch..., rows..., K]`.
    pub a: &'a View,
    /// `[batch..., K, N]`.
    pub b: &'a View,
    /// Leading dimensions of the body's space that are batch, not rows.
    pub batch: usize,
}

/// A convolution over channels-last images.
#[derive(Clone, Copy, Debug)]
pub struct Convolution<'a> {
    /// `[batch, spatial..., channels]`.
    pub x: &'a View,
    /// `[out channels, channels / groups, kernel...]`.
    pub weight: &'a View,
    /// Per spatial dimension.
    pub stride: &'a [i64],
    /// Per spatial dimension.
    pub padding: &'a [i64],
    /// Per spatial dimension.
    pub dilation: &'a [i64],
    /// Nearest upsampling of the image that is read, per spatial dimension; empty for none.
    pub upsample: &'a [usize],
    /// Groups.
    pub groups: i64,
}

fn part(view: &View, dims: std::ops::Range<usize>) -> View {
    View { dtype: view.dtype, shape: view.shape[dims.clone()].to_vec(), strides: view.strides[dims].to_vec() }
}

/// Parts of the body's operands over some leading dimensions of its space.
fn parts(fused: &Fused<'_>, dims: &std::ops::Range<usize>) -> Vec<View> {
    let rank = fused.space.len();
    let over = |v: &View| {
        let strides = v.strides_in(fused.space);
        part(&View { dtype: v.dtype, shape: fused.space.to_vec(), strides }, dims.clone())
    };
    debug_assert!(dims.end < rank.max(1), "columns are no rows");
    fused.loads.iter().chain(fused.stores).map(over).collect()
}

fn last_strides(fused: &Fused<'_>) -> Vec<Dim> {
    let views = fused.loads.iter().chain(fused.stores);
    views.map(|v| v.strides_in(fused.space).last().cloned().unwrap_or_default()).collect()
}

/// The loop over slices of terms; expects `row0`, `col0`, `M`, `N`, `K` and the lambdas `a_at(slot, k)` and `b_at(k, n)`,
/// leaves `acc[4][4]`.
const MULTIPLY: &str = "
    OX_SHARED(float, sa, 16 * 68);
    OX_SHARED(float, sb, 16 * 68);
    float acc[4][4];
    #pragma unroll
    for (int i = 0; i < 4; ++i)
    #pragma unroll
    for (int n = 0; n < 4; ++n) acc[i][n] = 0.0f;
    for (u32 k0 = 0; k0 < K; k0 += 16) {
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
    const u32 k = k0 + threadIdx.x % 16, m = threadIdx.x / 16 + 16 * i;
    sa[threadIdx.x % 16 * 68 + m] = row0 + m < M && k < K ? a_at(i, k) : 0.0f;
    }
    #pragma unroll
    for (int i = 0; i < 4; ++i) {
    const u32 k = B_TERM, n = B_COLUMN;
    sb[k * 68 + n] = col0 + n < N && k0 + k < K ? b_at(k0 + k, col0 + n) : 0.0f;
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < 16; ++k) {
    float x[4], y[4];
    load<4>(x, sa + k * 68 + threadIdx.x / 16 * 4);
    load<4>(y, sb + k * 68 + threadIdx.x % 16 * 4);
    #pragma unroll
    for (int i = 0; i < 4; ++i)
    #pragma unroll
    for (int n = 0; n < 4; ++n) acc[i][n] = fmaf(x[i], y[n], acc[i][n]);
    }
    __syncthreads();
    }";

/// `MULTIPLY` with the right operand's elements dealt to threads so that neighbours read neighbours.
fn multiply(terms_are_neighbours: bool) -> String {
    let (term, column) = match terms_are_neighbours {
        true => ("threadIdx.x % 16", "threadIdx.x / 16 + 16 * i"),
        false => ("threadIdx.x / 64 + 4 * i", "threadIdx.x % 64"),
    };
    MULTIPLY.replace("B_TERM", term).replace("B_COLUMN", column)
}

/// Stores of a thread's 4 x 4 results. `column` is the expression of a result's column among all columns; `base` holds each
/// operand's offset within the batch.
fn epilogue(w: &mut Writer, fused: Fused<'_>, rows: &Space, base: &[String], column: &str) {
    w.line("#pragma unroll");
    w.line("for (int i = 0; i < 4; ++i) {");
    w.line("const u32 row = row0 + threadIdx.x / 16 * 4 + i;");
    w.line("if (row >= M) break;");
    let offsets = rows.emit_offsets(w, "row", 0, "e");
    w.line("#pragma unroll");
    w.line("for (int n = 0; n < 4; ++n) {");
    w.line("if (col0 + threadIdx.x % 16 * 4 + n >= N) break;");
    w.line(format!("const u32 col = {column};"));
    let offsets = offsets.iter().zip(base).map(|(row, batch)| format!("({batch} + {row})")).collect();
    let operands = Operands {
        fused,
        first: 2,
        offsets,
        columns: last_strides(&fused),
        at_hand: Vec::new(),
        col: "col",
        width: "1",
        acc: Some("acc[i][n]"),
        row_scalars: ["0.0f", "0.0f"],
    };
    emit(w, &operands);
    w.line("}");
    w.line("}");
}

fn tile_origin(w: &mut Writer) {
    w.line(format!("const u32 wide = (N + {TILE} - 1) / {TILE};"));
    w.line(format!("const u32 row0 = blockIdx.x / wide * {TILE}, col0 = blockIdx.x % wide * {TILE};"));
}

/// A product by tiles. Operands: a, b, loads, stores.
pub fn lower_product(p: &Product<'_>, fused: Fused<'_>, from: &Provenance) -> Kernel {
    let (rank, b_rank) = (fused.space.len(), p.b.shape.len());
    let a_rank = p.a.shape.len();
    let row_dims = rank - 1 - p.batch;
    let (terms, cols) = (p.a.shape[a_rank - 1].clone(), fused.space[rank - 1].clone());
    let batch_sizes = &fused.space[..p.batch];
    let mut batch_views = vec![part(p.a, 0..a_rank - 1 - row_dims), part(p.b, 0..b_rank - 2)];
    batch_views.extend(parts(&fused, &(0..p.batch)));
    let batch = Space::new(batch_sizes, &batch_views, 0);
    let row_sizes = &fused.space[p.batch..rank - 1];
    let a_rows = Space::new(row_sizes, [&part(p.a, a_rank - 1 - row_dims..a_rank - 1)], 0);
    let out_rows = Space::new(row_sizes, &parts(&fused, &(p.batch..rank - 1)), 0);
    let (rows, batches) = (Dim::product(row_sizes), batch.rows(0));
    let mut w = Writer::new();
    let (a, b) = (w.pointer(0, p.a.dtype, false), w.pointer(1, p.b.dtype, false));
    let (m, n, k, z) = (w.size(&rows), w.size(&cols), w.size(&terms), w.size(&batches));
    let a_col = w.size(&p.a.strides[a_rank - 1]);
    let (b_row, b_col) = (w.size(&p.b.strides[b_rank - 2]), w.size(&p.b.strides[b_rank - 1]));
    w.line(format!("const u32 M = (u32){m}, N = (u32){n}, K = (u32){k};"));
    tile_origin(&mut w);
    w.line(format!("for (u32 z = blockIdx.z; z < (u32){z}; z += gridDim.z) {{"));
    let base = batch.emit_offsets(&mut w, "z", 0, "b");
    w.line("i64 a_row[4];");
    w.line("#pragma unroll");
    w.line("for (int i = 0; i < 4; ++i) {");
    w.line("const u32 row = row0 + threadIdx.x / 16 + 16 * i;");
    let own = a_rows.emit_offsets(&mut w, "row", 0, "a");
    w.line(format!("a_row[i] = {} + {};", base[0], own[0]));
    w.line("}");
    w.line(format!("const auto a_at = [&](int i, u32 k) {{ return to_float({a}[a_row[i] + (i64)k * {a_col}]); }};"));
    w.line(format!(
        "const auto b_at = [&](u32 k, u32 n) {{ return to_float({b}[{} + (i64)k * {b_row} + (i64)n * {b_col}]); }};",
        base[1]
    ));
    w.lines(&multiply(p.b.strides[b_rank - 2].is(1)));
    epilogue(&mut w, fused, &out_rows, &base[2..], "col0 + threadIdx.x % 16 * 4 + n");
    w.line("}");
    let grid = Grid::Tiles { rows, cols, batch: batches, tile: TILE, threads: THREADS };
    w.finish(from, result_type(&fused), grid, THREADS)
}

/// A product of at most [`GEMV_ROWS`] rows with a weight whose terms are neighbours. Operands: a, b, loads, stores.
/// `None` where the operands do not lie so.
pub fn lower_gemv(p: &Product<'_>, fused: Fused<'_>, from: &Provenance) -> Option<Kernel> {
    let (rank, a_rank, b_rank) = (fused.space.len(), p.a.shape.len(), p.b.shape.len());
    let fits = p.batch == 0 && b_rank == 2 && p.a.strides[a_rank - 1].is(1) && p.b.strides[0].is(1);
    if !fits {
        return None;
    }
    let row_sizes = &fused.space[..rank - 1];
    let a_rows = Space::new(row_sizes, [&part(p.a, 0..a_rank - 1)], 0);
    let out_rows = Space::new(row_sizes, &parts(&fused, &(0..rank - 1)), 0);
    let (rows, cols, terms) = (Dim::product(row_sizes), fused.space[rank - 1].clone(), p.a.shape[a_rank - 1].clone());
    let mut w = Writer::new();
    let (a, b) = (w.pointer(0, p.a.dtype, false), w.pointer(1, p.b.dtype, false));
    let (m, n, k, b_col) = (w.size(&rows), w.size(&cols), w.size(&terms), w.size(&p.b.strides[1]));
    w.lines(&format!(
        "const u32 lane = threadIdx.x & 31, col = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
        if (col >= (u32){n}) return;
        float acc[{GEMV_ROWS}];
        i64 a_row[{GEMV_ROWS}];
        #pragma unroll
        for (u32 row = 0; row < {GEMV_ROWS}; ++row) {{
        acc[row] = 0.0f;"
    ));
    let own = a_rows.emit_offsets(&mut w, "row", 0, "a");
    w.lines(&format!(
        "a_row[row] = {};
        }}
        for (u32 k = lane * V; k < (u32){k}; k += 32 * V) {{
        float y[V];
        load<V>(y, {b} + (i64)col * {b_col} + k);
        #pragma unroll
        for (int row = 0; row < {GEMV_ROWS}; ++row) {{
        if (row >= (int){m}) break;
        float x[V];
        load<V>(x, {a} + a_row[row] + k);
        #pragma unroll
        for (int j = 0; j < V; ++j) acc[row] = fmaf(x[j], y[j], acc[row]);
        }}
        }}
        float sum = 0.0f;
        #pragma unroll
        for (u32 row = 0; row < {GEMV_ROWS}; ++row) {{
        const float all = warp_sum(acc[row]);
        if (lane == row) sum = all;
        }}
        const u32 row = lane;
        if (row >= (u32){m}) return;",
        own[0]
    ));
    let offsets = out_rows.emit_offsets(&mut w, "row", 0, "e");
    let operands = Operands {
        fused,
        first: 2,
        offsets,
        columns: last_strides(&fused),
        at_hand: Vec::new(),
        col: "col",
        width: "1",
        acc: Some("sum"),
        row_scalars: ["0.0f", "0.0f"],
    };
    emit(&mut w, &operands);
    let size = |v: &View| v.dtype.size_bytes();
    let width = (16 / size(p.a).min(size(p.b))).min(8);
    let outer = a_rows.strides[0].clone();
    let vector = Vector {
        width,
        cols: terms,
        operands: vec![(0, size(p.a), outer), (1, size(p.b), vec![p.b.strides[1].clone()])],
    };
    let grid = Grid::Warps { count: cols, floats: Dim::default() };
    let from = Provenance { ops: [vec!["gemv".to_owned()], from.ops.clone()].concat(), ..from.clone() };
    Some(w.finish_vector(&from, result_type(&fused), grid, THREADS, vector))
}

/// A convolution by tiles. Operands: x, weight, loads, stores.
///
/// # Errors
/// If the groups do not divide the channels.
pub fn lower_convolution(c: &Convolution<'_>, fused: Fused<'_>, from: &Provenance) -> Result<Kernel> {
    let (rank, spatial) = (fused.space.len(), c.stride.len());
    let groups = c.groups;
    if groups < 1 || c.x.shape.len() != spatial + 2 || c.weight.shape.len() != spatial + 2 || rank != spatial + 2 {
        return Err(Error::invalid("a convolution's operands do not fit together"));
    }
    let channels = c.weight.shape[1].clone();
    let cols = fused.space[rank - 1].exact_div(groups)?;
    let rows = Dim::product(&fused.space[..rank - 1]);
    let taps = Dim::product(&c.weight.shape[2..]);
    let terms = &taps * &channels;
    let out_rows = Space::new(&fused.space[..rank - 1], &parts(&fused, &(0..rank - 1)), 0);
    let mut w = Writer::new();
    let (x, weight) = (w.pointer(0, c.x.dtype, false), w.pointer(1, c.weight.dtype, false));
    let (m, n, k, ci) = (w.size(&rows), w.size(&cols), w.size(&terms), w.size(&channels));
    let z = w.size(&groups.into());
    w.line(format!("const u32 M = (u32){m}, N = (u32){n}, K = (u32){k};"));
    tile_origin(&mut w);
    w.line(format!("for (u32 z = blockIdx.z; z < (u32){z}; z += gridDim.z) {{"));
    w.line("i64 image[4];");
    w.line(format!("i32 origin[4][{spatial}];"));
    w.line("#pragma unroll");
    w.line("for (int i = 0; i < 4; ++i) {");
    w.line("u32 pixel = row0 + threadIdx.x / 16 + 16 * i;");
    for d in (0..spatial).rev() {
        let out = w.size(&fused.space[d + 1]);
        let (stride, padding) = (w.size(&c.stride[d].into()), w.size(&c.padding[d].into()));
        w.line(format!(
            "origin[i][{d}] = (i32)(pixel % (u32){out}) * (i32){stride} - (i32){padding}; pixel /= (u32){out};"
        ));
    }
    let (batch_stride, channel_stride) = (w.size(&c.x.strides[0]), w.size(&c.x.strides[spatial + 1]));
    w.line(format!("image[i] = (i64)pixel * {batch_stride} + (i64)z * {ci} * {channel_stride};"));
    w.line("}");
    w.line("const auto a_at = [&](int i, u32 k) -> float {");
    w.line(format!("const u32 channel = k % (u32){ci};"));
    w.line(format!("u32 tap = k / (u32){ci};"));
    w.line(format!("i64 at = image[i] + (i64)channel * {channel_stride};"));
    for d in (0..spatial).rev() {
        let (taps, dilation) = (w.size(&c.weight.shape[d + 2]), w.size(&c.dilation[d].into()));
        let (size, stride) = (w.size(&c.x.shape[d + 1]), w.size(&c.x.strides[d + 1]));
        let factor = w.size(&(c.upsample.get(d).copied().unwrap_or(1) as i64).into());
        w.line(format!("const i32 s{d} = origin[i][{d}] + (i32)(tap % (u32){taps}) * (i32){dilation};"));
        w.line(format!("tap /= (u32){taps};"));
        w.line(format!("if (s{d} < 0 || s{d} >= (i32)({size} * {factor})) return 0.0f;"));
        let at = if factor == "1" { format!("s{d}") } else { format!("s{d} / (i32){factor}") };
        w.line(format!("at += (i64)({at}) * {stride};"));
    }
    w.line(format!("return to_float({x}[at]);"));
    w.line("};");
    w.line("const auto b_at = [&](u32 k, u32 n) -> float {");
    w.line(format!("const u32 channel = k % (u32){ci};"));
    w.line(format!("u32 tap = k / (u32){ci};"));
    let (o_stride, i_stride) = (w.size(&c.weight.strides[0]), w.size(&c.weight.strides[1]));
    w.line(format!("i64 at = ((i64)z * N + n) * {o_stride} + (i64)channel * {i_stride};"));
    for d in (0..spatial).rev() {
        let (taps, stride) = (w.size(&c.weight.shape[d + 2]), w.size(&c.weight.strides[d + 2]));
        w.line(format!("at += (i64)(tap % (u32){taps}) * {stride}; tap /= (u32){taps};"));
    }
    w.line(format!("return to_float({weight}[at]);"));
    w.line("};");
    w.lines(&multiply(true));
    let base = vec!["0".to_owned(); fused.loads.len() + fused.stores.len()];
    epilogue(&mut w, fused, &out_rows, &base, "z * N + col0 + threadIdx.x % 16 * 4 + n");
    w.line("}");
    let grid = Grid::Tiles { rows, cols, batch: groups.into(), tile: TILE, threads: THREADS };
    Ok(w.finish(from, result_type(&fused), grid, THREADS))
}
