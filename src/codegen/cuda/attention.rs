//! Attention for what no library takes: any head size, mask, type and strides, on any device.
//!
//! A warp has one query. Its lanes score 32 keys at a time, keep a running maximum and sum (so no score matrix is kept),
//! and add up the weighted values, each lane its own columns.

use super::body::Space;
use super::writer::Writer;
use super::{Grid, Kernel, Provenance, THREADS, View};
use crate::ir::{DType, Dim};

/// An attention's operands; leading dimensions broadcast to those of `out`.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// `[..., rows, size]`.
    pub q: &'a View,
    /// `[..., keys, size]`.
    pub k: &'a View,
    /// `[..., keys, value size]`.
    pub v: &'a View,
    /// Broadcast to `[..., rows, keys]`: bool lets attend, a float is added.
    pub mask: Option<&'a View>,
    /// `[..., rows, value size]`.
    pub out: &'a View,
    /// Multiplies the products.
    pub scale: f64,
    /// Row `i` attends to keys 0 to `i`.
    pub causal: bool,
}

/// Leading dimensions of a view.
pub(super) fn lead(view: &View) -> View {
    let rank = view.shape.len().saturating_sub(2);
    View { dtype: view.dtype, shape: view.shape[..rank].to_vec(), strides: view.strides[..rank].to_vec() }
}

/// The element of a mask, operand 3, at query `row` and `key`; `sizes` are the numbers of both.
pub(super) fn mask_at(w: &mut Writer, mask: &View, sizes: [&Dim; 2], offset: &str, row: &str) -> String {
    let last = |dims: &[Dim]| dims[dims.len().saturating_sub(2)..].to_vec();
    let matrix = View { dtype: mask.dtype, shape: last(&mask.shape), strides: last(&mask.strides) };
    let strides = matrix.strides_in(&sizes.map(Dim::clone));
    let (down, along) = (w.size(&strides[0]), w.size(&strides[1]));
    let p = w.pointer(3, mask.dtype, false);
    format!("{p}[{offset} + (i64){row} * {down} + (i64)key * {along}]")
}

/// Attention. Operands: q, k, v, mask (4 operands even without it), result.
pub fn lower_attention(a: &Attention<'_>, from: &Provenance) -> Kernel {
    let size = |v: &View, back: usize| v.shape[v.shape.len() - back].clone();
    let stride = |v: &View, back: usize| v.strides[v.strides.len() - back].clone();
    let (rows, keys, width, value_width) = (size(a.out, 2), size(a.k, 2), size(a.q, 1), size(a.v, 1));
    let mut leads = vec![lead(a.q), lead(a.k), lead(a.v), lead(a.out)];
    leads.extend(a.mask.map(lead));
    let out_lead = lead(a.out);
    let batch = Space::new(&out_lead.shape, &leads, 0);
    let batches = batch.rows(0);
    let mut w = Writer::new();
    let (q, k, v) = (w.pointer(0, a.q.dtype, false), w.pointer(1, a.k.dtype, false), w.pointer(2, a.v.dtype, false));
    let out = w.pointer(4, a.out.dtype, true);
    let (m, n, e, ev) = (w.size(&rows), w.size(&keys), w.size(&width), w.size(&value_width));
    let scale = w.float(a.scale as f32);
    let count = &batches * &rows;
    let items = w.size(&count);
    w.lines(&format!(
        "OX_DYNAMIC_SHARED(float, shared);
        const u32 lane = threadIdx.x & 31, item = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
        if (item >= (u32){items}) return;
        const u32 row = item % (u32){m}, lead = item / (u32){m};
        float* query = shared + (threadIdx.x >> 5) * ({e} + {ev} + 32);
        float* sums = query + {e};
        float* weights = sums + {ev};"
    ));
    let o = batch.emit_offsets(&mut w, "lead", 0, "");
    let [q_row, q_col, k_row, k_col, v_row, v_col, out_row, out_col] = [
        stride(a.q, 2),
        stride(a.q, 1),
        stride(a.k, 2),
        stride(a.k, 1),
        stride(a.v, 2),
        stride(a.v, 1),
        stride(a.out, 2),
        stride(a.out, 1),
    ]
    .map(|s| w.size(&s));
    let bias = match a.mask {
        None => String::new(),
        Some(mask) => {
            let at = mask_at(&mut w, mask, [&rows, &keys], &o[4], "row");
            match mask.dtype {
                // Added, as eager does: what is not a number stays so.
                DType::Bool => format!("if (!{at}.bits) score += __uint_as_float(0xff800000u);"),
                _ => format!("score += to_float({at});"),
            }
        }
    };
    let last = if a.causal { format!("(row + 1 < (u32){n} ? row + 1 : (u32){n})") } else { format!("(u32){n}") };
    w.lines(&format!(
        "for (u32 x = lane; x < (u32){e}; x += 32) query[x] = to_float({q}[{o0} + (i64)row * {q_row} + (i64)x * {q_col}]) * {scale};
        for (u32 x = lane; x < (u32){ev}; x += 32) sums[x] = 0.0f;
        __syncwarp();
        const float lowest = __uint_as_float(0xff800000u);
        float most = lowest, total = 0.0f;
        const u32 last = {last};
        for (u32 first = 0; first < last; first += 32) {{
        const u32 key = first + lane;
        float score = lowest;
        if (key < last) {{
        score = 0.0f;
        for (u32 x = 0; x < (u32){e}; ++x)
        score = fmaf(query[x], to_float({k}[{o1} + (i64)key * {k_row} + (i64)x * {k_col}]), score);
        {bias}
        }}
        const float peak = m_max(most, warp_max(score));
        const float weight = peak == lowest ? 0.0f : m_exp(score - peak);
        const float keep = most == lowest ? 0.0f : m_exp(most - peak);
        total = total * keep + warp_sum(weight);
        most = peak;
        weights[lane] = weight;
        __syncwarp();
        const u32 count = last - first < 32 ? last - first : 32;
        for (u32 x = lane; x < (u32){ev}; x += 32) {{
        float sum = sums[x] * keep;
        for (u32 t = 0; t < count; ++t)
        sum = fmaf(weights[t], to_float({v}[{o2} + (i64)(first + t) * {v_row} + (i64)x * {v_col}]), sum);
        sums[x] = sum;
        }}
        __syncwarp();
        }}
        const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
        for (u32 x = lane; x < (u32){ev}; x += 32)
        {out}[{o3} + (i64)row * {out_row} + (i64)x * {out_col}] = narrow<{ty}>(sums[x] * inverse);",
        o0 = o[0],
        o1 = o[1],
        o2 = o[2],
        o3 = o[3],
        ty = super::c_type(a.out.dtype),
    ));
    let floats = &(&width + &value_width) + &Dim::constant(32);
    w.finish(from, a.out.dtype, Grid::Warps { count, floats }, THREADS)
}

/// What hides a key in a mask of this type that is added: so far below every score that the key's share is zero, and finite.
/// With minus infinity, which is nothing else where a row has another key, kernels that go through the keys in tiles may
/// subtract it from itself; PyTorch keeps it from cuDNN too (`convert_boolean_attn_mask_cudnn`, with the same number for f16).
const fn hidden(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => -65504.0,
        _ => -1e30,
    }
}

/// A mask of bool as one that is added. Operands: mask, what is added (its shape, with all keys), and for each of its rows
/// whether it hides every key. Such a row adds nothing: [`lower_hidden`] does what is meant.
pub fn lower_added_mask(mask: &View, added: &View, hides: &View, from: &Provenance) -> Kernel {
    let space = Space::new(&added.shape, [mask, added], 1);
    let last = space.sizes.len() - 1;
    let (rows, keys) = (space.rows(1), space.sizes[last].clone());
    let mut w = Writer::new();
    let (given, to, flags) =
        (w.pointer(0, mask.dtype, false), w.pointer(1, added.dtype, true), w.pointer(2, hides.dtype, true));
    let (count, n) = (w.size(&rows), w.size(&keys));
    let hidden = w.float(hidden(added.dtype));
    w.lines(&format!(
        "const u32 lane = threadIdx.x & 31, row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
        if (row >= (u32){count}) return;"
    ));
    let offsets = space.emit_offsets(&mut w, "row", 1, "");
    let along = w.size(&space.strides[0][last]);
    w.lines(&format!(
        "const bool8* from = {given} + {};
        {ty}* added = {to} + {};
        float any = 0.0f;
        for (u32 key = lane; key < (u32){n}; key += 32) any = m_max(any, to_float(from[(i64)key * {along}]));
        any = warp_max(any);
        const float below = any == 0.0f ? 0.0f : {hidden};
        for (u32 key = lane; key < (u32){n}; key += 32)
        added[key] = narrow<{ty}>(from[(i64)key * {along}].bits ? 0.0f : below);
        if (lane == 0) {flags}[row] = narrow<bool8>(any == 0.0f ? 1.0f : 0.0f);",
        offsets[0],
        offsets[1],
        ty = super::c_type(added.dtype),
    ));
    w.finish(from, added.dtype, Grid::Warps { count: rows, floats: Dim::default() }, THREADS)
}

/// Zeros in the rows of an attention's result that may attend to nothing. Operands: whether that is so, of each row (a column
/// that broadcasts to the result), and the result.
pub fn lower_hidden(hides: &View, out: &View, from: &Provenance) -> Kernel {
    let space = Space::new(&out.shape, [hides, out], 1);
    let last = space.sizes.len() - 1;
    let (rows, columns) = (space.rows(1), space.sizes[last].clone());
    let mut w = Writer::new();
    let (flags, to) = (w.pointer(0, hides.dtype, false), w.pointer(1, out.dtype, true));
    let (count, n) = (w.size(&rows), w.size(&columns));
    w.lines(&format!(
        "const u32 lane = threadIdx.x & 31, row = (blockIdx.x * blockDim.x + threadIdx.x) >> 5;
        if (row >= (u32){count}) return;"
    ));
    let offsets = space.emit_offsets(&mut w, "row", 1, "");
    let along = w.size(&space.strides[1][last]);
    w.lines(&format!(
        "if (!{flags}[{}].bits) return;
        for (u32 x = lane; x < (u32){n}; x += 32) {to}[{} + (i64)x * {along}] = narrow<{ty}>(0.0f);",
        offsets[0],
        offsets[1],
        ty = super::c_type(out.dtype),
    ));
    w.finish(from, out.dtype, Grid::Warps { count: rows, floats: Dim::default() }, THREADS)
}
