//! Group norm statistics, layer and RMS norm, softmax.
//!
//! *Group norm* (channels last) is three launches: chunks of pixels to moments per group; the moments of an image to one
//! scale and shift per channel; a pointwise loop that applies them and whatever follows. Where a group of an image fits into
//! a block's shared memory it is one, which reads the image once. *Row norms* are one: a block holds
//! its row in shared memory as f32 where it fits, else reads it again; short rows have a warp or a part of one each, whose
//! lanes keep their packs (a softmax's read them again). Moments are joined by Chan's formula, never as
//! `E[x^2] - E[x]^2` over more values than one thread has seen, and those are shifted by the first of them.

use super::body::{Operands, Space, emit, least_width, result_type, rotates, vector};
use super::grid::{CACHED_COLS, GROUP_THREADS, SHARED_BYTES, SHORT_PACKS, chunk_bytes};
use super::writer::Writer;
use super::{Arg, Fused, Grid, Kernel, Provenance, THREADS, Vector, View, c_type};
use crate::ir::{DType, Dim};

/// A group norm's operands.
#[derive(Clone, Copy, Debug)]
pub struct GroupNorm<'a> {
    /// `[batch, pixels..., channels]`; pixels walk with one stride.
    pub x: &'a View,
    /// Factor per channel.
    pub gamma: Option<&'a View>,
    /// Summand per channel.
    pub beta: Option<&'a View>,
    /// Groups.
    pub groups: i64,
    /// Added to the variance.
    pub eps: f64,
}

/// Statistics kernels of a group norm: moments (operands: x, moments) and finish (operands: moments, scale, shift, gamma,
/// beta). Moments are three f32 per image, chunk and group; scale and shift one f32 per image and channel.
pub fn lower_group_norm(norm: &GroupNorm<'_>, from: &Provenance) -> [Kernel; 2] {
    [lower_moments(norm, from), lower_finish(norm, from)]
}

fn pixels_of(x: &View) -> Dim {
    Dim::product(&x.shape[1..x.shape.len() - 1])
}

/// Elements from one pixel to the next.
fn pixel_stride_of(x: &View) -> Dim {
    let spatial = 1..x.shape.len() - 1;
    let pixels =
        View { shape: x.shape[spatial.clone()].to_vec(), strides: x.strides[spatial].to_vec(), dtype: x.dtype };
    Space::new(&pixels.shape, [&pixels], 0).strides[0].last().cloned().unwrap_or_default()
}

/// An element of operand `index`, one per channel, at that channel; what is there where the norm has none.
fn per_channel(w: &mut Writer, index: usize, view: Option<&View>, channel: &str, missing: &str) -> String {
    let Some(view) = view else { return missing.to_owned() };
    let (p, stride) = (w.pointer(index, view.dtype, false), w.size(&view.strides[0]));
    format!("to_float({p}[(i64){channel} * {stride}])")
}

fn part(from: &Provenance, name: &str) -> Provenance {
    Provenance { ops: vec![name.to_owned()], lines: from.lines.clone() }
}

/// Channels that a block of a group norm's moments is given, more or less.
const SLICE_CHANNELS: i64 = 256;
/// Neighbours that a thread of such a block handles at most.
const MOST_WIDTH: i64 = 8;

/// Groups of a slice: as many as have about [`SLICE_CHANNELS`], beginning where packs of neighbours do; all where the channels
/// are not known.
fn slice_groups(channels: Option<i64>, groups: i64) -> i64 {
    let Some(wide) = channels.filter(|c| c % groups == 0).map(|c| (c / groups).max(1)) else { return groups };
    // Groups until one begins at a multiple of `MOST_WIDTH` channels, a power of two.
    let unit = MOST_WIDTH >> wide.trailing_zeros().min(MOST_WIDTH.trailing_zeros());
    if groups % unit != 0 {
        return groups;
    }
    let most = (SLICE_CHANNELS / (wide * unit)).max(1) * unit;
    let slices = (groups + most - 1) / most;
    // The same number of slices, of about one size.
    ((groups + slices * unit - 1) / (slices * unit) * unit).min(groups)
}

fn lower_moments(norm: &GroupNorm<'_>, from: &Provenance) -> Kernel {
    let (x, rank) = (norm.x, norm.x.shape.len());
    let (channels, pixels, pixel_stride) = (&x.shape[rank - 1], pixels_of(x), pixel_stride_of(x));
    let slice = slice_groups(channels.as_constant(), norm.groups);
    let slices = (norm.groups + slice - 1) / slice.max(1);
    let mut w = Writer::new();
    let (p, to) = (w.pointer(0, x.dtype, false), w.pointer(1, DType::F32, true));
    let (c, n, stride, image) = (w.size(channels), w.size(&pixels), w.size(&pixel_stride), w.size(&x.strides[0]));
    let (groups, slice_words, slices_word) = (
        w.size(&norm.groups.into()),
        w.integer("slice", Arg::Size(slice.into())),
        w.integer("slices", Arg::Size(slices.into())),
    );
    let chunk = w.integer("chunk", Arg::Chunk(pixels.clone()));
    let chunks = w.integer("chunks", Arg::Chunks(pixels.clone()));
    w.lines(&format!(
        "OX_DYNAMIC_SHARED(float, joined);
        const u32 wide = (u32){c} / (u32){groups}, room = (u32){slice_words} * wide;
        // Mean and sum of squared deviations of every thread's pack, and its count, where threads share packs; then of channels.
        const bool is_shared = (u32){slices_word} > 1 || room / V < blockDim.x;
        float* means = joined + (is_shared ? blockDim.x * (2 * V + 1) : 0);
        float* squares = means + room;
        const u32 first_group = blockIdx.x % (u32){slices_word} * (u32){slice_words}, of_image = blockIdx.x / (u32){slices_word};
        const u32 batch = of_image / (u32){chunks}, at = of_image % (u32){chunks};
        const u32 own_groups = (u32){groups} - first_group < (u32){slice_words} ? (u32){groups} - first_group : (u32){slice_words};
        const u32 first = at * (u32){chunk};
        const u32 count = (u32){n} - first < (u32){chunk} ? (u32){n} - first : (u32){chunk};
        const u32 packs = own_groups * wide / V, across = packs < blockDim.x ? packs : blockDim.x, down = blockDim.x / across;
        const u32 x = threadIdx.x % across, y = threadIdx.x / across;
        u32 half = 1;
        while (half < down) half *= 2;
        for (u32 base = 0; base < packs; base += across) {{
        const u32 pack = base + x;
        // Values that this thread sees, shifted by the first of them.
        const u32 own = y < down && pack < packs && y < count ? (count - y - 1) / down + 1 : 0;
        float seen = (float)own;
        float mean[V], m2[V];
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        mean[j] = 0.0f; m2[j] = 0.0f;
        }}
        if (own) {{
        float shift[V];
        const auto* from = {p} + (i64)batch * {image} + (i64)(first + y) * {stride} + first_group * wide + pack * V;
        load<V>(shift, from);
        #pragma unroll 4
        for (u32 at = 1; at < own; ++at) {{
        float a[V];
        load<V>(a, from + (i64)(at * down) * {stride});
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        const float d = a[j] - shift[j];
        mean[j] += d; m2[j] += d * d;
        }}
        }}
        const float inverse = 1.0f / seen;
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        const float sum = mean[j];
        mean[j] = shift[j] + sum * inverse; m2[j] = m_max(m2[j] - sum * sum * inverse, 0.0f);
        }}
        }}
        // The threads below join those above them.
        for (u32 step = half / 2; step; step >>= 1) {{
        float* mine = joined + threadIdx.x * (2 * V + 1);
        if (y >= step && y < 2 * step && y < down) {{
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        mine[j] = mean[j]; mine[V + j] = m2[j];
        }}
        mine[2 * V] = seen;
        }}
        __syncthreads();
        if (y < step && y + step < down) {{
        const float* other = mine + step * across * (2 * V + 1);
        const float total = seen + other[2 * V], share = total == 0.0f ? 0.0f : other[2 * V] / total;
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        const float delta = other[j] - mean[j];
        mean[j] += delta * share; m2[j] += other[V + j] + delta * delta * seen * share;
        }}
        seen = total;
        }}
        }}
        if (y == 0 && pack < packs) {{
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        means[pack * V + j] = mean[j]; squares[pack * V + j] = m2[j];
        }}
        }}
        __syncthreads();
        }}
        // A warp for each group, whose channels have all seen as many values.
        const u32 lane = threadIdx.x & 31;
        for (u32 group = threadIdx.x >> 5; group < own_groups; group += blockDim.x >> 5) {{
        float sum = 0.0f;
        for (u32 channel = lane; channel < wide; channel += 32) sum += means[group * wide + channel];
        const float mean = warp_sum(sum) / (float)wide;
        float m2 = 0.0f;
        for (u32 channel = lane; channel < wide; channel += 32) {{
        const float delta = means[group * wide + channel] - mean;
        m2 += squares[group * wide + channel] + (float)count * delta * delta;
        }}
        m2 = warp_sum(m2);
        if (lane == 0) {{
        float* out = {to} + (((i64)batch * {chunks} + at) * {groups} + first_group + group) * 3;
        out[0] = (float)count * (float)wide; out[1] = mean; out[2] = m2;
        }}
        }}"
    ));
    let room = match channels.as_constant() {
        Some(c) if slice < norm.groups => Dim::constant(c / norm.groups * slice),
        _ => channels.clone(),
    };
    let grid = Grid::Chunks { batch: x.shape[0].clone(), pixels, channels: room.clone(), slices };
    let width = (16 / x.dtype.size_bytes()).min(MOST_WIDTH as usize);
    // One at a time needs the least shared memory.
    let fits = room
        .as_constant()
        .is_none_or(|room| chunk_bytes(room.unsigned_abs(), slices, width) <= u64::from(SHARED_BYTES));
    let width = if fits { width } else { 1 };
    let vector = Vector {
        width,
        cols: channels.clone(),
        operands: vec![(0, x.dtype.size_bytes(), vec![pixel_stride, x.strides[0].clone()])],
    };
    w.finish_vector(&part(from, "group_norm_moments"), x.dtype, grid, THREADS, vector)
}

fn lower_finish(norm: &GroupNorm<'_>, from: &Provenance) -> Kernel {
    let (x, rank) = (norm.x, norm.x.shape.len());
    let mut w = Writer::new();
    let moments = w.pointer(0, DType::F32, false);
    let (scale, shift) = (w.pointer(1, DType::F32, true), w.pointer(2, DType::F32, true));
    let (c, groups, batch) = (w.size(&x.shape[rank - 1]), w.size(&norm.groups.into()), w.size(&x.shape[0]));
    let chunks = w.integer("chunks", Arg::Chunks(pixels_of(x)));
    let eps = w.float(norm.eps as f32);
    let gamma = per_channel(&mut w, 3, norm.gamma, "channel", "1.0f");
    let beta = per_channel(&mut w, 4, norm.beta, "channel", "0.0f");
    w.lines(&format!(
        "const u32 lane = threadIdx.x & 31, item = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
        if (item >= (u32){batch} * (u32){groups}) return;
        const u32 image = item / (u32){groups}, group = item % (u32){groups};
        float count = 0.0f, mean = 0.0f, m2 = 0.0f;
        for (u32 at = lane; at < (u32){chunks}; at += 32) {{
        const float* part = {moments} + (((i64)image * {chunks} + at) * {groups} + group) * 3;
        join_moments(count, mean, m2, part[0], part[1], part[2]);
        }}
        for (int step = 16; step; step >>= 1) {{
        const float count_b = __shfl_down_sync(0xffffffffu, count, step);
        const float mean_b = __shfl_down_sync(0xffffffffu, mean, step), m2_b = __shfl_down_sync(0xffffffffu, m2, step);
        if (lane < (u32)step) join_moments(count, mean, m2, count_b, mean_b, m2_b);
        }}
        count = __shfl_sync(0xffffffffu, count, 0);
        mean = __shfl_sync(0xffffffffu, mean, 0);
        m2 = __shfl_sync(0xffffffffu, m2, 0);
        const float inverse = m_rsqrt(m2 / count + {eps});
        const u32 wide = (u32){c} / (u32){groups};
        for (u32 channel = group * wide + lane; channel < (group + 1) * wide; channel += 32) {{
        const float factor = inverse * {gamma};
        {scale}[(i64)image * {c} + channel] = factor;
        {shift}[(i64)image * {c} + channel] = {beta} - mean * factor;
        }}"
    ));
    let count = &x.shape[0] * &norm.groups.into();
    let grid = Grid::Warps { count, floats: Dim::default() };
    w.finish(&part(from, "group_norm_finish"), DType::F32, grid, THREADS)
}

/// The loads of a group norm's body that its kernel has at hand: the normalised operand, scale and shift.
pub type OwnLoads = [Option<usize>; 3];

/// A group norm with its body, a block to each group of an image; `None` where channels have no number, a group has more of them
/// than a block has threads, or the body has another shape. Operands: x, gamma, beta, loads, stores.
pub fn lower_whole_groups(norm: &GroupNorm<'_>, fused: Fused<'_>, own: OwnLoads, from: &Provenance) -> Option<Kernel> {
    let (x, rank) = (norm.x, norm.x.shape.len());
    let channels = x.shape[rank - 1].as_constant().filter(|c| c % norm.groups == 0)?;
    let wide = channels / norm.groups;
    if fused.space != x.shape || rotates(fused.program) || !(1..=i64::from(GROUP_THREADS)).contains(&wide) {
        return None;
    }
    let (pixels, pixel_stride) = (pixels_of(x), pixel_stride_of(x));
    // What is not at hand is read and written where the row is.
    let views: Vec<&View> = fused.loads.iter().chain(fused.stores).collect();
    let elsewhere: Vec<usize> = (0..views.len()).filter(|&k| !own.contains(&Some(k))).collect();
    let space = Space::new(fused.space, elsewhere.iter().map(|&k| views[k]), 1);
    let mut w = Writer::new();
    let (p, c_type) = (w.pointer(0, x.dtype, false), c_type(x.dtype));
    let (n, groups, wide_word) = (w.size(&pixels), w.size(&norm.groups.into()), w.size(&wide.into()));
    let (stride, image) = (w.size(&pixel_stride), w.size(&x.strides[0]));
    let eps = w.float(norm.eps as f32);
    let gamma = per_channel(&mut w, 1, norm.gamma, "(col + j)", "1.0f");
    let beta = per_channel(&mut w, 2, norm.beta, "(col + j)", "0.0f");
    w.lines(&format!(
        "OX_DYNAMIC_SHARED(float, partial);
        {c_type}* kept = ({c_type}*)(partial + 32);
        const u32 image = blockIdx.x / (u32){groups}, packs = (u32){wide_word} / V, down = blockDim.x / packs;
        const u32 at = threadIdx.x % packs, y = threadIdx.x / packs;
        const u32 col = blockIdx.x % (u32){groups} * (u32){wide_word} + at * V;
        // A thread has the same channels of every so many pixels, and keeps them itself; what is left of the block has none.
        const u32 end = y < down ? (u32){n} : 0;
        const auto* from = {p} + (i64)image * {image} + col;
        float sum = 0.0f;
        #pragma unroll 8
        for (u32 pixel = y; pixel < end; pixel += down) {{
        const auto pack = *(const Pack<{c_type}, V>*)(from + (i64)pixel * {stride});
        *(Pack<{c_type}, V>*)(kept + (pixel * packs + at) * V) = pack;
        #pragma unroll
        for (int j = 0; j < V; ++j) sum += to_float(pack.of[j]);
        }}
        const float count = (float)((u32){n} * (u32){wide_word});
        const float mean = block_sum(sum, partial) / count;
        sum = 0.0f;
        #pragma unroll 4
        for (u32 pixel = y; pixel < end; pixel += down) {{
        float x[V];
        load<V>(x, kept + (pixel * packs + at) * V);
        #pragma unroll
        for (int j = 0; j < V; ++j) sum += (x[j] - mean) * (x[j] - mean);
        }}
        const float inverse = m_rsqrt(block_sum(sum, partial) / count + {eps});
        float scale[V], shift[V];
        #pragma unroll
        for (int j = 0; j < V; ++j) {{
        scale[j] = inverse * {gamma}; shift[j] = {beta} - mean * scale[j];
        }}
        for (u32 pixel = y; pixel < end; pixel += down) {{
        const u32 row = image * (u32){n} + pixel;
        float x[V];
        load<V>(x, kept + (pixel * packs + at) * V);"
    ));
    let mut offsets = vec![String::new(); views.len()];
    let mut columns = vec![Dim::default(); views.len()];
    for ((&k, offset), strides) in elsewhere.iter().zip(space.emit_offsets(&mut w, "row", 1, "")).zip(&space.strides) {
        (offsets[k], columns[k]) = (offset, strides[strides.len() - 1].clone());
    }
    let values = ["x[j]", "scale[j]", "shift[j]"];
    let at_hand = own.iter().zip(values).filter_map(|(load, value)| Some(((*load)?, value.to_owned()))).collect();
    let row_scalars = ["0.0f", "0.0f"];
    emit(
        &mut w,
        &Operands { fused, first: 3, offsets, columns, at_hand, col: "col", width: "V", acc: None, row_scalars },
    );
    w.line("}");
    // Packs of neighbours begin with the groups.
    let most = (16 / x.dtype.size_bytes()).min(MOST_WIDTH as usize);
    let width = 1 << wide.trailing_zeros().min(most.trailing_zeros());
    let mut vector = Vector { width, cols: wide.into(), operands: Vec::new() };
    vector.operands.push((0, x.dtype.size_bytes(), vec![pixel_stride, x.strides[0].clone()]));
    for (&k, strides) in elsewhere.iter().zip(&space.strides) {
        with_operand(&mut vector, 3 + k, views[k], strides);
    }
    let count = &x.shape[0] * &norm.groups.into();
    let grid = Grid::Groups { count, pixels, wide, size: x.dtype.size_bytes() };
    let ops = std::iter::once("group_norm_whole".to_owned()).chain(from.ops.iter().skip(1).cloned()).collect();
    let from = Provenance { ops, lines: from.lines.clone() };
    Some(w.finish_pairs(&from, result_type(&fused), grid, GROUP_THREADS, (1, vector)))
}

/// What a norm divides by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moments {
    /// The deviation from the mean, which is subtracted: layer norm.
    Centred,
    /// The root mean square: RMS norm.
    Square,
    /// The same, but at least `eps`, where others add that to the square.
    Floored,
}

/// A norm over the last dimension.
#[derive(Clone, Copy, Debug)]
pub struct RowNorm<'a> {
    /// The normalised operand, over the space of the body.
    pub x: &'a View,
    /// Of what.
    pub moments: Moments,
    /// Added to the variance, or what its root counts as at least.
    pub eps: f64,
    /// The body's load that is the normalised operand itself.
    pub x_load: Option<usize>,
}

/// Offsets and columns of a space whose last dimension is a row's columns.
fn row_space<'v>(fused_space: &[Dim], views: impl IntoIterator<Item = &'v View>) -> (Space, Dim, Dim, Vec<Dim>) {
    let space = Space::new(fused_space, views, 1);
    let (rows, cols) = (space.rows(1), space.sizes[space.sizes.len() - 1].clone());
    let columns = space.strides.iter().map(|s| s[s.len() - 1].clone()).collect();
    (space, rows, cols, columns)
}

fn load_row(w: &mut Writer, load: &str, pointer: &str, offset: &str, stride: &Dim) -> String {
    match stride.as_constant() {
        Some(1) => format!("{load}<V>(x, {pointer} + {offset} + col);"),
        _ => {
            let stride = w.size(stride);
            format!("load_strided<V>(x, {pointer} + {offset} + (i64)col * {stride}, {stride});")
        }
    }
}

/// A loop over the row's columns that has the row's values in `x`; the first pass fills the cache.
fn pass(w: &mut Writer, load: &str, is_first: bool, body: &str) {
    w.line("for (u32 col = threadIdx.x * V; col < own; col += blockDim.x * V) {");
    w.line("float x[V];");
    if is_first {
        w.line(load);
    } else {
        w.line("if (cached) {");
        w.line("for (int j = 0; j < V; ++j) x[j] = cache[col + j];");
        w.line("} else {");
        w.line(load);
        w.line("}");
    }
    if is_first {
        w.line("if (cached) for (int j = 0; j < V; ++j) cache[col + j] = x[j];");
    }
    w.lines(body);
}

fn open_rows(w: &mut Writer, rows: &str, cols: &str) {
    w.line("OX_DYNAMIC_SHARED(float, cache);");
    w.line("OX_SHARED(float, partial, 32);");
    w.line(format!("const bool cached = blockDim.y == 1 && {cols} <= {CACHED_COLS};"));
    w.line("const u32 row = blockIdx.x * blockDim.y + threadIdx.y;");
    // All lanes of a warp take part in its shuffles: those of a row that is not there have no columns.
    w.line(format!("const u32 own = row < (u32){rows} ? (u32){cols} : 0;"));
}

/// A layer or RMS norm with its body. Operands: x, loads, stores.
pub fn lower_row_norm(norm: &RowNorm<'_>, fused: Fused<'_>, from: &Provenance) -> Kernel {
    let views = std::iter::once(norm.x).chain(fused.loads).chain(fused.stores);
    let (space, rows, cols, columns) = row_space(fused.space, views);
    let mut w = Writer::new();
    let (p, n, count) = (w.pointer(0, norm.x.dtype, false), w.size(&cols), w.size(&rows));
    let mean_square = format!("row_sum(sum, partial) / (float){n}");
    let rstd = match norm.moments {
        Moments::Floored => {
            let eps = w.float(norm.eps as f32);
            format!("const float rstd = 1.0f / m_max(m_sqrt({mean_square}), {eps});")
        }
        _ => {
            let eps = w.float(norm.eps as f32);
            format!("const float rstd = m_rsqrt({mean_square} + {eps});")
        }
    };
    open_rows(&mut w, &count, &n);
    let offsets = space.emit_offsets(&mut w, "row", 1, "");
    let load = if rotates(fused.program) { "load_pairs" } else { "load" };
    let load = load_row(&mut w, load, &p, &offsets[0], &columns[0]);
    let operands = |x: &str| Operands {
        fused,
        first: 1,
        offsets: offsets[1..].to_vec(),
        columns: columns[1..].to_vec(),
        at_hand: norm.x_load.iter().map(|&at| (at, x.to_owned())).collect(),
        col: "col",
        width: "V",
        acc: None,
        row_scalars: ["mean", "rstd"],
    };
    let short = |w: &mut Writer, body: &str| {
        w.line("#pragma unroll");
        w.line(format!("for (int k = 0; k < {SHORT_PACKS}; ++k) {{"));
        w.line("const u32 col = (threadIdx.x + k * blockDim.x) * V;");
        w.line("if (col < own) {");
        w.lines(body);
    };
    w.line("if (blockDim.y > 1) {");
    w.line(format!("float kept[{SHORT_PACKS}][V];"));
    w.line("float sum = 0.0f;");
    short(&mut w, &format!("auto& x = kept[k];\n{load}\n}}\n}}"));
    if norm.moments == Moments::Centred {
        short(&mut w, "for (int j = 0; j < V; ++j) sum += kept[k][j];\n}\n}");
        w.line(format!("const float mean = row_sum(sum, partial) / (float){n};"));
        w.line("sum = 0.0f;");
    } else {
        w.line("const float mean = 0.0f;");
    }
    short(&mut w, "for (int j = 0; j < V; ++j) sum += (kept[k][j] - mean) * (kept[k][j] - mean);\n}\n}");
    w.line(&rstd);
    short(&mut w, "");
    emit(&mut w, &operands("kept[k][j]"));
    w.lines("}\n}\nreturn;\n}");
    w.line("float sum = 0.0f;");
    if norm.moments == Moments::Centred {
        pass(&mut w, &load, true, "for (int j = 0; j < V; ++j) sum += x[j];");
        w.line("}");
        w.line(format!("const float mean = row_sum(sum, partial) / (float){n};"));
        w.line("sum = 0.0f;");
    } else {
        w.line("const float mean = 0.0f;");
    }
    pass(
        &mut w,
        &load,
        norm.moments != Moments::Centred,
        "for (int j = 0; j < V; ++j) sum += (x[j] - mean) * (x[j] - mean);",
    );
    w.line("}");
    w.line(&rstd);
    pass(&mut w, &load, false, "");
    emit(&mut w, &operands("x[j]"));
    w.line("}");
    let own = Space { sizes: space.sizes.clone(), strides: space.strides[1..].to_vec() };
    let mut vector = vector(&fused, &own, 1, &cols);
    with_operand(&mut vector, 0, norm.x, &space.strides[0]);
    let widths = (least_width(fused.program), vector);
    w.finish_pairs(from, result_type(&fused), Grid::Rows { rows, cols, packs: SHORT_PACKS }, THREADS, widths)
}

/// Adds an operand of unit columns to what a vector form asks.
fn with_operand(vector: &mut Vector, index: usize, view: &View, strides: &[Dim]) {
    if strides.last().is_some_and(|s| s.is(1)) {
        let outer = strides[..strides.len() - 1].iter().filter(|s| !s.is(0)).cloned().collect();
        vector.operands.push((index, view.dtype.size_bytes(), outer));
    }
}

/// Softmax over the last dimension. Operands: x, result.
pub fn lower_softmax(x: &View, out: &View, from: &Provenance) -> Kernel {
    let (space, rows, cols, columns) = row_space(&out.shape, [x, out]);
    let mut w = Writer::new();
    let (p, to, n) = (w.pointer(0, x.dtype, false), w.pointer(1, out.dtype, true), w.size(&cols));
    let count = w.size(&rows);
    open_rows(&mut w, &count, &n);
    let offsets = space.emit_offsets(&mut w, "row", 1, "");
    let load = load_row(&mut w, "load", &p, &offsets[0], &columns[0]);
    w.line("float most = __uint_as_float(0xff800000u);");
    pass(&mut w, &load, true, "for (int j = 0; j < V; ++j) most = m_max(most, x[j]);");
    w.line("}");
    w.line("most = row_max(most, partial);");
    w.line("float sum = 0.0f;");
    pass(&mut w, &load, false, "for (int j = 0; j < V; ++j) sum += m_exp(x[j] - most);");
    w.line("}");
    w.line("const float inverse = 1.0f / row_sum(sum, partial);");
    pass(&mut w, &load, false, "for (int j = 0; j < V; ++j) x[j] = m_exp(x[j] - most) * inverse;");
    let line = match columns[1].as_constant() {
        Some(1) => format!("store<V>({to} + {} + col, x);", offsets[1]),
        _ => {
            let stride = w.size(&columns[1]);
            format!("store_strided<V>({to} + {} + (i64)col * {stride}, {stride}, x);", offsets[1])
        }
    };
    w.line(line);
    w.line("}");
    let is_unit = columns.iter().all(|c| c.is(1));
    let width = if is_unit { (16 / x.dtype.size_bytes().min(out.dtype.size_bytes())).min(8) } else { 1 };
    let mut vector = Vector { width, cols: cols.clone(), operands: Vec::new() };
    with_operand(&mut vector, 0, x, &space.strides[0]);
    with_operand(&mut vector, 1, out, &space.strides[1]);
    w.finish_vector(from, out.dtype, Grid::Rows { rows, cols, packs: 1 }, THREADS, vector)
}

/// What makes shares of an attention's scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Shares {
    /// Type of the shares.
    pub dtype: DType,
    /// Type of the mask, if there is one: bool lets attend, a float is added.
    pub mask: Option<DType>,
    /// Query `i` attends to keys 0 to `i`.
    pub is_causal: bool,
}

/// Sizes of a chunk of an attention's scores.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// Heads.
    pub heads: Dim,
    /// Queries.
    pub rows: Dim,
    /// Keys.
    pub keys: Dim,
    /// The first query, of all.
    pub first: Dim,
    /// Elements of the mask from one head, query and key to the next.
    pub strides: [Dim; 3],
}

/// Softmax of a chunk of an attention's scores, `[heads, rows, keys]` of f32, into shares; both are dense. A query that sees no
/// key has shares of zero. Operands: scores, shares, mask (from the chunk's first query on).
pub fn lower_shares(shares: Shares, chunk: Chunk, from: &Provenance) -> Kernel {
    let Chunk { heads, rows, keys, first, strides } = chunk;
    let mut w = Writer::new();
    let (p, to, n) = (w.pointer(0, DType::F32, false), w.pointer(1, shares.dtype, true), w.size(&keys));
    let count = w.size(&(&heads * &rows));
    open_rows(&mut w, &count, &n);
    let mut hides = String::new();
    if shares.mask.is_some() || shares.is_causal {
        let m = w.size(&rows);
        w.line(format!("const u32 head = row / (u32){m}, query = row % (u32){m};"));
    }
    if let Some(dtype) = shares.mask {
        let mask = w.pointer(2, dtype, false);
        let [by_head, by_row, by_key] = strides.map(|s| w.size(&s));
        let ty = super::c_type(dtype);
        w.line(format!("const {ty}* seen = {mask} + (i64)head * {by_head} + (i64)query * {by_row};"));
        let at = format!("seen[(i64)(col + j) * {by_key}]");
        hides += &match dtype {
            // Added, as eager does: what is not a number stays so.
            DType::Bool => format!(" if (!{at}.bits) x[j] += lowest;"),
            _ => format!(" x[j] += to_float({at});"),
        };
    }
    if shares.is_causal {
        hides += &format!(" if (col + j > query + (u32){}) x[j] = lowest;", w.size(&first));
    }
    let mut load = format!("load<V>(x, {p} + (i64)row * {n} + col);");
    if !hides.is_empty() {
        load += &format!(" for (int j = 0; j < V; ++j) {{{hides} }}");
    }
    w.line("const float lowest = __uint_as_float(0xff800000u);");
    w.line("float most = lowest;");
    pass(&mut w, &load, true, "for (int j = 0; j < V; ++j) most = m_max(most, x[j]);");
    w.line("}");
    w.line("most = row_max(most, partial);");
    w.line("if (most == lowest) most = 0.0f;");
    w.line("float sum = 0.0f;");
    pass(&mut w, &load, false, "for (int j = 0; j < V; ++j) sum += m_exp(x[j] - most);");
    w.line("}");
    w.line("sum = row_sum(sum, partial);");
    w.line("const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;");
    pass(&mut w, &load, false, "for (int j = 0; j < V; ++j) x[j] = m_exp(x[j] - most) * inverse;");
    w.line(format!("store<V>({to} + (i64)row * {n} + col, x);"));
    w.line("}");
    let size = shares.dtype.size_bytes();
    let operands = vec![(0, DType::F32.size_bytes(), vec![keys.clone()]), (1, size, vec![keys.clone()])];
    let vector = Vector { width: (16 / size.min(4)).min(8), cols: keys.clone(), operands };
    w.finish_vector(from, shares.dtype, Grid::Rows { rows: &heads * &rows, cols: keys, packs: 1 }, THREADS, vector)
}
