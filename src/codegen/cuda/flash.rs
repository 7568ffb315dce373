//! Attention in 16 bits on tensor cores: for devices and operands that cuDNN has no engine for, and beside its engines as one
//! more way that the tuner times.
//!
//! A block has 64 queries, 16 to a warp, and goes through the keys 64 at a time (Dao et al., FlashAttention-2). Scores,
//! running maximum and sum, and the sums of values stay in registers, in the layout of `mma.m16n8k16`: of a tile of 16 rows and
//! 8 columns a thread has columns `2 * (lane % 4)` and the next one, in rows `lane / 4` and `lane / 4 + 8`. Two such tiles of
//! shares, rounded to the operands' type, are the left operand of the next product as they are. Keys lie in shared memory row by
//! row and values column by column, so that what a thread needs of either is two neighbours. Rows of both are four words longer
//! than they would have to be: the 32 lanes read from 32 banks.

use super::attention::{Attention, lead, mask_at};
use super::body::Space;
use super::writer::Writer;
use super::{Grid, Kernel, Provenance, Vector, c_type};
use crate::ir::DType;

/// Largest head: of queries, sums and scores a thread has that many registers and some.
const MOST_COLUMNS: i64 = 160;
/// Queries of a block.
const QUERIES: u32 = 64;
/// Threads of a block.
const FLASH_THREADS: u32 = 128;
/// Neighbours that are copied at once.
const WIDTH: usize = 8;

/// Compute capability from which on tensor cores multiply numbers of this type; the kernel runs without them too.
const fn first_arch(dtype: DType) -> Option<u32> {
    match dtype {
        DType::F16 => Some(75),
        DType::BF16 => Some(80),
        _ => None,
    }
}

/// Compute capability from which on [`lower_flash`] serves this attention on tensor cores; `None` where it does not serve it.
pub fn flash_arch(a: &Attention<'_>) -> Option<u32> {
    let columns = |view: &super::View| view.shape.last().and_then(crate::ir::Dim::as_constant);
    let fits = |columns: Option<i64>| columns.is_some_and(|c| (1..=MOST_COLUMNS).contains(&c));
    let is_one_type = [a.k, a.v, a.out].iter().all(|view| view.dtype == a.q.dtype);
    if is_one_type && fits(columns(a.q)) && fits(columns(a.v)) { first_arch(a.q.dtype) } else { None }
}

/// Attention that [`flash_arch`] gives an architecture for. Operands: q, k, v, mask (4 operands even without it), result.
pub fn lower_flash(a: &Attention<'_>, from: &Provenance) -> Kernel {
    let back = |dims: &[crate::ir::Dim], at: usize| dims[dims.len() - at].clone();
    let (rows, keys) = (back(&a.out.shape, 2), back(&a.k.shape, 2));
    let (width, value_width) = (back(&a.q.shape, 1), back(&a.v.shape, 1));
    let mut leads = vec![lead(a.q), lead(a.k), lead(a.v), lead(a.out)];
    leads.extend(a.mask.map(lead));
    let batch = Space::new(&lead(a.out).shape, &leads, 0);
    let batches = batch.rows(0);
    let mut w = Writer::new();
    let pointers = [(0, a.q), (1, a.k), (2, a.v)].map(|(at, view)| w.pointer(at, view.dtype, false));
    let [q, k, v] = &pointers;
    let out = w.pointer(4, a.out.dtype, true);
    let (m, n, z) = (w.size(&rows), w.size(&keys), w.size(&batches));
    let scale = w.float(a.scale as f32);
    w.lines(&format!(
        "typedef {ty} T;
        const int E = {width}, EV = {value_width};
        const int STEPS = (E + 15) / 16, PARTS = (EV + 7) / 8, KEYS = 64;
        const int UNROLL = Mma<T>::UNROLL;
        const int KEY_WORDS = STEPS * 8 + 4, VALUE_WORDS = KEYS / 2 + 4;
        OX_SHARED(u32, key_rows, KEYS * KEY_WORDS);
        OX_SHARED(u32, value_columns, PARTS * 8 * VALUE_WORDS);
        const u32 M = (u32){m}, N = (u32){n};
        const u32 group = (threadIdx.x & 31) >> 2, quad = threadIdx.x & 3;
        const u32 row = blockIdx.x * {QUERIES} + (threadIdx.x >> 5) * 16 + group;
        const float lowest = __uint_as_float(0xff800000u);
        for (u32 z = blockIdx.z; z < (u32){z}; z += gridDim.z) {{",
        ty = c_type(a.q.dtype),
    ));
    let o = batch.emit_offsets(&mut w, "z", 0, "");
    let strides = [a.q, a.k, a.v, a.out].map(|view| [back(&view.strides, 2), back(&view.strides, 1)]);
    let [[q_row, q_col], [k_row, k_col], [v_row, v_col], [out_row, out_col]] =
        strides.clone().map(|pair| pair.map(|s| w.size(&s)));
    let last = if a.causal {
        format!("blockIdx.x * {QUERIES} + {QUERIES} < N ? blockIdx.x * {QUERIES} + {QUERIES} : N")
    } else {
        "N".to_owned()
    };
    w.lines(&format!(
        "u32 queries[STEPS][4];
        #pragma unroll
        for (int s = 0; s < STEPS; ++s) {{
        #pragma unroll
        for (int r = 0; r < 4; ++r) {{
        const u32 at = row + (r & 1) * 8, column = s * 16 + (r >> 1) * 8 + quad * 2;
        queries[s][r] = at < M ? word_at<V, E>({q} + {o0} + (i64)at * {q_row}, {q_col}, column) : 0;
        }}
        }}
        float sums[PARTS][4], most[2] = {{lowest, lowest}}, total[2] = {{0.0f, 0.0f}};
        #pragma unroll
        for (int d = 0; d < PARTS; ++d) sums[d][0] = sums[d][1] = sums[d][2] = sums[d][3] = 0.0f;
        const u32 last = {last};
        for (u32 first = 0; first < last; first += KEYS) {{
        __syncthreads();
        for (u32 i = threadIdx.x; i < KEYS * STEPS * 2; i += {FLASH_THREADS}) {{
        const u32 key = i / (STEPS * 2), column = i % (STEPS * 2) * 8;
        Pack<T, 8> some = {{}};
        if (first + key < N) some = pack_at<V, E>({k} + {o1} + (i64)(first + key) * {k_row}, {k_col}, column);
        Pack<u32, 4> words;
        #pragma unroll
        for (int j = 0; j < 4; ++j) words.of[j] = word_of(some.of[2 * j], some.of[2 * j + 1]);
        *(Pack<u32, 4>*)(key_rows + key * KEY_WORDS + column / 2) = words;
        }}
        for (u32 i = threadIdx.x; i < KEYS / 2 * PARTS; i += {FLASH_THREADS}) {{
        const u32 pair = i % (KEYS / 2), key = first + pair * 2, column = i / (KEYS / 2) * 8;
        Pack<T, 8> even = {{}}, odd = {{}};
        if (key < N) even = pack_at<V, EV>({v} + {o2} + (i64)key * {v_row}, {v_col}, column);
        if (key + 1 < N) odd = pack_at<V, EV>({v} + {o2} + (i64)(key + 1) * {v_row}, {v_col}, column);
        #pragma unroll
        for (int j = 0; j < 8; ++j)
        value_columns[(column + j) * VALUE_WORDS + pair] = word_of(even.of[j], odd.of[j]);
        }}
        __syncthreads();
        float scores[8][4];
        #pragma unroll UNROLL
        for (int t = 0; t < 8; ++t) {{
        scores[t][0] = scores[t][1] = scores[t][2] = scores[t][3] = 0.0f;
        #pragma unroll UNROLL
        for (int s = 0; s < STEPS; ++s) {{
        const u32* at = key_rows + (t * 8 + group) * KEY_WORDS + s * 8 + quad;
        mma<T>(scores[t], queries[s], at[0], at[4]);
        }}
        }}",
        o0 = o[0],
        o1 = o[1],
        o2 = o[2],
    ));
    w.lines(
        "#pragma unroll
        for (int t = 0; t < 8; ++t) {
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
        const u32 key = first + t * 8 + quad * 2 + (c & 1), at = row + (c >> 1) * 8;",
    );
    w.line(format!("float score = scores[t][c] * {scale};"));
    if let Some(mask) = a.mask {
        let at = mask_at(&mut w, mask, [&rows, &keys], &o[4], "at");
        w.line(match mask.dtype {
            // Added, as eager does: what is not a number stays so.
            DType::Bool => format!("if (at < M && key < N && !{at}.bits) score += lowest;"),
            _ => format!("if (at < M && key < N) score += to_float({at});"),
        });
    }
    let hides = if a.causal { "key >= N || key > at" } else { "key >= N" };
    w.lines(&format!(
        "scores[t][c] = {hides} ? lowest : score;
        }}
        }}
        #pragma unroll
        for (int h = 0; h < 2; ++h) {{
        float peak = most[h];
        #pragma unroll
        for (int t = 0; t < 8; ++t) peak = m_max(peak, m_max(scores[t][2 * h], scores[t][2 * h + 1]));
        peak = m_max(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        peak = m_max(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
        const float keep = most[h] == lowest ? 0.0f : __expf(most[h] - peak);
        most[h] = peak;
        float sum = 0.0f;
        #pragma unroll
        for (int t = 0; t < 8; ++t) {{
        #pragma unroll
        for (int c = 2 * h; c < 2 * h + 2; ++c) {{
        scores[t][c] = peak == lowest ? 0.0f : __expf(scores[t][c] - peak);
        sum += scores[t][c];
        }}
        }}
        total[h] = total[h] * keep + sum;
        #pragma unroll
        for (int d = 0; d < PARTS; ++d) {{
        sums[d][2 * h] *= keep;
        sums[d][2 * h + 1] *= keep;
        }}
        }}
        #pragma unroll UNROLL
        for (int s = 0; s < KEYS / 16; ++s) {{
        u32 shares[4];
        #pragma unroll
        for (int r = 0; r < 4; ++r) {{
        const int t = 2 * s + (r >> 1), c = 2 * (r & 1);
        shares[r] = pair_of<T>(scores[t][c], scores[t][c + 1]);
        }}
        #pragma unroll UNROLL
        for (int d = 0; d < PARTS; ++d) {{
        const u32* at = value_columns + (d * 8 + group) * VALUE_WORDS + s * 8 + quad;
        mma<T>(sums[d], shares, at[0], at[4]);
        }}
        }}
        }}
        #pragma unroll
        for (int h = 0; h < 2; ++h) {{
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
        const float inverse = total[h] == 0.0f ? 0.0f : 1.0f / total[h];
        const u32 at = row + h * 8;
        #pragma unroll
        for (int d = 0; d < PARTS; ++d) {{
        const u32 column = d * 8 + quad * 2;
        const float pair[2] = {{sums[d][2 * h] * inverse, sums[d][2 * h + 1] * inverse}};
        if (at < M) put_pair<V, EV>({out} + {o3} + (i64)at * {out_row}, {out_col}, column, pair);
        }}
        }}
        }}",
        o3 = o[3],
    ));
    let grid = Grid::Tiles { rows, cols: 1.into(), batch: batches, tile: QUERIES, threads: FLASH_THREADS };
    let views = [(0, a.q), (1, a.k), (2, a.v), (4, a.out)];
    let has_neighbours = views.iter().all(|(_, view)| back(&view.strides, 1).is(1));
    let is_whole = [&width, &value_width].iter().all(|d| d.as_constant().is_some_and(|c| c % WIDTH as i64 == 0));
    let operands = views.iter().map(|(at, view)| {
        let outer = view.strides[..view.strides.len() - 1].iter().filter(|s| !s.is(0)).cloned().collect();
        (*at, view.dtype.size_bytes(), outer)
    });
    let vector = Vector {
        width: if has_neighbours && is_whole { WIDTH } else { 1 },
        cols: value_width,
        operands: operands.collect(),
    };
    w.finish_vector(from, a.out.dtype, grid, FLASH_THREADS, vector)
}
