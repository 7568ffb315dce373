//! The parts of [`attention`](super::attention) that run on vectors: packing, micro-kernels, online softmax.

use super::attention::{Attention, BLOCK_KEYS, Heads, PANEL, TILE_ROWS};
#[cfg(target_arch = "x86_64")]
use super::gemm_avx512::add_pairs_40;
use super::gemm_kernel::{Form, of_form, select};
use super::math;
use super::pack::{Matrix, pack_panel, units, width_at};
use super::simd::{Element, Simd};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::{simd_dispatch, with_element};

/// Elements between rows of scores: an odd number of cache lines, so that rows fall into different sets of L1.
const SCORE_STRIDE: usize = BLOCK_KEYS + 16;

/// Layout of the packed keys and values of one head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packing {
    /// Whether products are those of bf16 pairs; operands lie in packed memory as such, otherwise as f32.
    form: Form,
    isa: Isa,
    lanes: usize,
    dim: usize,
    dim_v: usize,
    seq_k: usize,
}

impl Packing {
    /// The layout for one of the [`forms`].
    pub(super) fn new(isa: Isa, a: &Attention, form: Form) -> Packing {
        let lanes = if isa.clamp() == Isa::Avx512 { 16 } else { 8 };
        Packing { form, isa: isa.clamp(), lanes, dim: a.dim, dim_v: a.dim_v, seq_k: a.seq_k }
    }

    /// Keys of a panel.
    pub(super) fn panel_keys(&self) -> usize {
        PANEL * self.lanes
    }

    /// Columns of V with padding.
    pub(super) fn value_columns(&self) -> usize {
        self.dim_v.next_multiple_of(self.lanes)
    }

    /// f32 of packed K.
    fn key_len(&self) -> usize {
        self.seq_k.next_multiple_of(self.panel_keys()) * units(self.dim, self.form.dtype())
    }

    /// f32 of packed V before a column.
    fn value_len(&self, columns: usize) -> usize {
        units(self.seq_k, self.form.dtype()) * columns
    }

    /// Bytes of a head, a multiple of a cache line.
    pub(super) fn bytes(&self) -> usize {
        ((self.key_len() + self.value_len(self.value_columns())) * 4).next_multiple_of(64)
    }

    /// Elements between queries: an odd number of cache lines, from a short list the kernels are compiled for.
    pub(super) fn query_stride(&self) -> usize {
        match self.dim {
            0..=80 => 80,
            81..=176 => 176,
            _ => 528,
        }
    }

    /// Keys of a block: both operands within a quarter of L2.
    fn block_keys(&self) -> usize {
        let fit = (256 << 10) / ((self.dim + self.value_columns()) * 4).max(1);
        (fit / 32 * 32).clamp(64, BLOCK_KEYS)
    }
}

/// The fastest form for these operands: bf16 pairs where all of them are bf16 and their product instruction is fast. The
/// scale is then applied to scores, whose maximum must be that of the scaled ones.
pub(super) fn best_form(isa: Isa, a: &Attention) -> Form {
    let same = [&a.q, &a.k, &a.v].iter().all(|heads| heads.dtype == DType::BF16);
    if same && a.scale > 0.0 { select(isa, DType::BF16, DType::BF16).form } else { Form::F32 }
}

/// Bytes of a task's own scratch memory.
pub(super) fn task_bytes(packing: &Packing, rows: usize) -> usize {
    let per_row = packing.query_stride() + packing.value_columns() + 2;
    (rows * per_row + TILE_ROWS * SCORE_STRIDE + BLOCK_KEYS) * 4 + 64
}

/// A block of queries of one head.
#[derive(Clone, Copy)]
pub(super) struct Task {
    pub batch: usize,
    pub head: usize,
    pub q0: usize,
    pub rows: usize,
    /// Packed keys and values.
    pub packed: *const f32,
    pub scratch: *mut f32,
}

/// Vectors of columns worked on together when weights multiply V, widest first: as many as registers allow.
#[inline(always)]
fn group_width(lanes: usize, left: usize) -> usize {
    match (lanes, left) {
        (16, 5) => 3,
        (16, _) => left.min(4),
        _ => left.min(2),
    }
}

simd_dispatch! {
    /// Packs keys `from..to` (`from` at a panel's start) of key-value head `unit` into `packed`.
    pub(super) unsafe fn pack(
        a: &Attention, packing: &Packing, unit: usize, from: usize, to: usize, packed: *mut f32,
    ) = pack_body
}

#[inline(always)]
unsafe fn pack_body<S: Simd>(
    s: S,
    a: &Attention,
    packing: &Packing,
    unit: usize,
    from: usize,
    to: usize,
    packed: *mut f32,
) {
    let (batch, head) = ((unit / a.kv_heads) as isize, (unit % a.kv_heads) as isize);
    let start =
        |h: &Heads| h.ptr.wrapping_offset((batch * h.strides[0] + head * h.strides[1]) * h.dtype.size_bytes() as isize);
    let values = packed.wrapping_add(packing.key_len());
    if packing.form == Form::Bf16Pairs {
        let matrix = |heads: &Heads, row, col| Matrix {
            ptr: start(heads),
            dtype: DType::BF16,
            row_stride: heads.strides[row],
            col_stride: heads.strides[col],
        };
        // SAFETY: the caller's promise; pieces start at whole panels.
        unsafe {
            for key in (from..to).step_by(packing.panel_keys()) {
                let panel = packed.add(key * units(packing.dim, DType::BF16)).cast();
                let (keys, width) = (matrix(&a.k, 2, 3), packing.panel_keys());
                pack_panel(Isa::Avx512, &keys, key, packing.seq_k, width, 0, packing.dim, panel);
            }
            pack_value_pairs(&matrix(&a.v, 2, 3), packing, from, to, values.cast());
        }
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        with_element!(a.k.dtype, e => pack_keys(s, e, start(&a.k), a.k.strides, packing, from, to, packed), else ());
        with_element!(a.v.dtype, e => pack_values(s, e, start(&a.v), a.v.strides, packing, from, to, values), else ());
    }
}

/// `[panel][dim][key]`, missing keys 0.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn pack_keys<S: Simd, E: Element>(
    s: S,
    e: E,
    k: *const u8,
    strides: [isize; 4],
    packing: &Packing,
    from: usize,
    to: usize,
    out: *mut f32,
) {
    let (width, dim, l) = (PANEL * S::LANES, packing.dim, S::LANES);
    let mut row = [0f32; 16];
    let mut key = from;
    // SAFETY: keys below `to` of the head; panels that hold them.
    unsafe {
        while key < to {
            let panel = out.add(key * dim);
            // A panel more than half full, as products pack theirs: by transposes of whole vectors.
            if E::SIZE == 4 && key + width / 2 < packing.seq_k {
                let (row_stride, col_stride) = (strides[2], strides[3]);
                let keys = Matrix { ptr: k, dtype: DType::F32, row_stride, col_stride };
                pack_panel(packing.isa, &keys, key, packing.seq_k, width, 0, dim, panel.cast());
                key += width;
                continue;
            }
            for j in 0..width {
                let source = k.offset((key + j) as isize * strides[2] * E::SIZE as isize);
                if key + j >= to {
                    for d in 0..dim {
                        *panel.add(d * width + j) = 0.0;
                    }
                } else if strides[3] == 1 {
                    let mut d = 0;
                    while d < dim {
                        let n = l.min(dim - d);
                        s.store(row.as_mut_ptr(), e.load_n(s, source, d, n));
                        for (i, x) in row[..n].iter().enumerate() {
                            *panel.add((d + i) * width + j) = *x;
                        }
                        d += n;
                    }
                } else {
                    for d in 0..dim {
                        *panel.add(d * width + j) = e.get(source, d as isize * strides[3]);
                    }
                }
            }
            key += width;
        }
    }
}

/// `[group of columns][key][column]`, missing columns 0.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn pack_values<S: Simd, E: Element>(
    s: S,
    e: E,
    v: *const u8,
    strides: [isize; 4],
    packing: &Packing,
    from: usize,
    to: usize,
    out: *mut f32,
) {
    let (l, vectors) = (S::LANES, packing.value_columns() / S::LANES);
    let mut first = 0;
    // SAFETY: keys below `to` of the head; groups that hold them.
    unsafe {
        while first < vectors {
            let width = group_width(l, vectors - first);
            let group = out.add(packing.seq_k * first * l);
            for key in from..to {
                let source = v.offset(key as isize * strides[2] * E::SIZE as isize);
                for i in 0..width {
                    let (c, to) = ((first + i) * l, group.add((key * width + i) * l));
                    let n = l.min(packing.dim_v - c.min(packing.dim_v));
                    if strides[3] == 1 {
                        s.store(to, e.load_n(s, source.add(c * E::SIZE), 0, n));
                    } else {
                        s.store(to, s.splat(0.0));
                        for j in 0..n {
                            *to.add(j) = e.get(source, (c + j) as isize * strides[3]);
                        }
                    }
                }
            }
            first += width;
        }
    }
}

/// Panels of V as `pack` lays them out, columns of V being the columns: pairs of keys `from..to`, a missing key 0.
unsafe fn pack_value_pairs(v: &Matrix, packing: &Packing, from: usize, to: usize, out: *mut u32) {
    let mut column = 0;
    // SAFETY: keys below `to` and columns below `dim_v` of the head; panels that hold them.
    unsafe {
        while column < packing.dim_v {
            let width = width_at(packing.dim_v, column, packing.panel_keys());
            let valid = width.min(packing.dim_v - column);
            for key in (from..to).step_by(2) {
                let row = out.add(packing.value_len(column) + key / 2 * width);
                let (low, high) = (v.at(key, column).cast::<u16>(), v.at(key + 1, column).cast::<u16>());
                for lane in 0..valid {
                    let at = lane as isize * v.col_stride;
                    let upper = if key + 1 < to { u32::from(*high.wrapping_offset(at)) } else { 0 };
                    row.add(lane).write(u32::from(*low.offset(at)) | upper << 16);
                }
                row.add(valid).write_bytes(0, width - valid);
            }
            column += width;
        }
    }
}

simd_dispatch! {
    /// Attention of one block of queries.
    pub(super) unsafe fn run(a: &Attention, packing: &Packing, task: &Task) = run_body
}

#[inline(always)]
unsafe fn run_body<S: Simd>(s: S, a: &Attention, packing: &Packing, task: &Task) {
    // SAFETY: the caller's promise.
    unsafe {
        match packing.query_stride() {
            80 => run_block::<S, 80>(s, a, packing, task),
            176 => run_block::<S, 176>(s, a, packing, task),
            _ => run_block::<S, 528>(s, a, packing, task),
        }
    }
}

#[inline(always)]
unsafe fn run_block<S: Simd, const LDQ: usize>(s: S, a: &Attention, packing: &Packing, task: &Task) {
    let (l, columns) = (S::LANES, packing.value_columns());
    let rows = task.rows.next_multiple_of(TILE_ROWS);
    // SAFETY: `task_bytes` of scratch memory; the caller's promise for the operands.
    unsafe {
        let scores = task.scratch.add(task.scratch.align_offset(64));
        let queries = scores.add(TILE_ROWS * SCORE_STRIDE);
        let results = queries.add(rows * LDQ);
        let bias = results.add(rows * columns);
        let (top, sum) = (bias.add(BLOCK_KEYS), bias.add(BLOCK_KEYS + rows));
        let pairs = packing.form == Form::Bf16Pairs;
        if pairs {
            copy_queries::<LDQ>(a, task, rows, queries);
        } else {
            with_element!(a.q.dtype, e => load_queries::<S, _, LDQ>(s, e, a, task, rows, queries), else ());
        }
        // What scores still have to be multiplied by, before and after the mask is added.
        let scale = if pairs { a.scale * std::f32::consts::LOG2_E } else { 1.0 };
        let (before, after) = if a.mask.is_some() { (scale, 1.0) } else { (1.0, scale) };
        for r in 0..rows {
            (*top.add(r), *sum.add(r)) = (f32::NEG_INFINITY, 0.0);
        }
        std::ptr::write_bytes(results, 0, rows * columns);
        let last_query = task.q0 + task.rows - 1;
        let seen = if a.causal { packing.seq_k.min(last_query + 1) } else { packing.seq_k };
        let step = packing.block_keys();
        let mut key = 0;
        while key < seen {
            let keys = step.min(packing.seq_k - key);
            for t in (0..task.rows).step_by(TILE_ROWS) {
                let valid = TILE_ROWS.min(task.rows - t);
                if a.causal && key > task.q0 + t + valid - 1 {
                    continue;
                }
                if pairs {
                    multiply_key_pairs::<LDQ>(packing, task.packed, queries.add(t * LDQ), valid, key, keys, scores);
                } else {
                    multiply_keys::<S, LDQ>(s, packing, task.packed, queries.add(t * LDQ), valid, key, keys, scores);
                }
                let width = keys.next_multiple_of(l);
                mask_scores(s, a, task, t, valid, key, keys, width, scores, bias, before);
                for r in 0..valid {
                    let row = scores.add(r * SCORE_STRIDE);
                    let out = results.add((t + r) * columns);
                    let (top, sum) = (top.add(t + r), sum.add(t + r));
                    if pairs {
                        soften::<S, true>(s, row, width, after, top, sum, out, columns);
                    } else {
                        soften::<S, false>(s, row, width, after, top, sum, out, columns);
                    }
                }
                let values = task.packed.add(packing.key_len());
                if pairs {
                    multiply_value_pairs(packing, values, scores, valid, key, keys, results.add(t * columns));
                } else {
                    multiply_values(s, packing, values, scores, valid, key, keys, results.add(t * columns));
                }
            }
            key += keys;
        }
        with_element!(a.out.dtype, e => store_results(s, e, a, task, results, columns, sum), else ());
    }
}

/// Queries as bf16, `LDQ` f32 apart; rows past the valid ones and an odd element's partner are 0.
#[inline(always)]
unsafe fn copy_queries<const LDQ: usize>(a: &Attention, task: &Task, rows: usize, out: *mut f32) {
    let st = a.q.strides;
    let start = task.batch as isize * st[0] + task.head as isize * st[1] + task.q0 as isize * st[2];
    // SAFETY: queries of the block; `rows` rows of LDQ f32, more than `dim + 1` bf16.
    unsafe {
        for r in 0..rows {
            let to = out.add(r * LDQ).cast::<u16>();
            if r >= task.rows {
                to.write_bytes(0, a.dim + 1);
                continue;
            }
            let from = a.q.ptr.cast::<u16>().offset(start + r as isize * st[2]);
            if st[3] == 1 {
                to.copy_from_nonoverlapping(from, a.dim);
            } else {
                (0..a.dim).for_each(|d| to.add(d).write(*from.offset(d as isize * st[3])));
            }
            to.add(a.dim).write(0);
        }
    }
}

/// Queries as f32, scaled into units of log2; rows past the valid ones are 0.
#[inline(always)]
unsafe fn load_queries<S: Simd, E: Element, const LDQ: usize>(
    s: S,
    e: E,
    a: &Attention,
    task: &Task,
    rows: usize,
    out: *mut f32,
) {
    let (l, scale, st) = (S::LANES, a.scale * std::f32::consts::LOG2_E, a.q.strides);
    let start = task.batch as isize * st[0] + task.head as isize * st[1] + task.q0 as isize * st[2];
    // SAFETY: queries of the block; `rows` rows of LDQ >= dim elements.
    unsafe {
        for r in 0..rows {
            let to = out.add(r * LDQ);
            if r >= task.rows {
                std::ptr::write_bytes(to, 0, a.dim);
                continue;
            }
            let from = a.q.ptr.offset((start + r as isize * st[2]) * E::SIZE as isize);
            let mut d = 0;
            while d < a.dim {
                let n = l.min(a.dim - d);
                if st[3] == 1 {
                    s.store_n(to.add(d), s.mul(e.load_n(s, from, d, n), s.splat(scale)), n);
                } else {
                    for i in d..d + n {
                        *to.add(i) = e.get(from, i as isize * st[3]) * scale;
                    }
                }
                d += n;
            }
        }
    }
}

/// `c[MR][NV * LANES + NE * 8] (+)= a[MR][k] * b[k][..]`: every accumulator in a register. The `NE` vectors of eight lanes
/// come last: they take half the time of wide ones where the processor splits those.
// Indices, not iterators: the accumulators must become registers.
#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn product<S: Simd, const MR: usize, const NV: usize, const NE: usize, const LDA: usize, const ADD: bool>(
    s: S,
    k: usize,
    a: *const f32,
    b: *const f32,
    ldb: usize,
    c: *mut f32,
    ldc: usize,
) {
    let (l, e) = (S::LANES, s.eight());
    let mut acc = [[s.splat(0.0); NV]; MR];
    let mut narrow = [[e.splat(0.0); NE]; MR];
    // SAFETY: the caller vouches for the three blocks.
    unsafe {
        if ADD {
            for i in 0..MR {
                for j in 0..NV {
                    acc[i][j] = s.load(c.add(i * ldc + j * l));
                }
                for j in 0..NE {
                    narrow[i][j] = e.load(c.add(i * ldc + NV * l + j * 8));
                }
            }
        }
        let mut b = b;
        for p in 0..k {
            let mut row = [s.splat(0.0); NV];
            for j in 0..NV {
                row[j] = s.load(b.add(j * l));
            }
            let mut end = [e.splat(0.0); NE];
            for j in 0..NE {
                end[j] = e.load(b.add(NV * l + j * 8));
            }
            for i in 0..MR {
                let x = *a.add(i * LDA + p);
                for j in 0..NV {
                    acc[i][j] = s.mla(s.splat(x), row[j], acc[i][j]);
                }
                for j in 0..NE {
                    narrow[i][j] = e.mla(e.splat(x), end[j], narrow[i][j]);
                }
            }
            b = b.add(ldb);
        }
        for i in 0..MR {
            for j in 0..NV {
                s.store(c.add(i * ldc + j * l), acc[i][j]);
            }
            for j in 0..NE {
                e.store(c.add(i * ldc + NV * l + j * 8), narrow[i][j]);
            }
        }
    }
}

/// Scores of a tile of queries and a block of keys.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn multiply_keys<S: Simd, const LDQ: usize>(
    s: S,
    packing: &Packing,
    packed: *const f32,
    queries: *const f32,
    valid: usize,
    key: usize,
    keys: usize,
    scores: *mut f32,
) {
    let (l, width, dim) = (S::LANES, PANEL * S::LANES, packing.dim);
    let mut at = 0;
    // SAFETY: panels of the head; TILE_ROWS queries and rows of scores.
    unsafe {
        while at < keys {
            let panel = packed.add((key + at) * dim);
            let narrow = keys - at <= l;
            macro_rules! rows {
                ($mr:literal, $nv:literal) => {
                    for g in (0..valid).step_by($mr) {
                        let (q, c) = (queries.add(g * LDQ), scores.add(g * SCORE_STRIDE + at));
                        product::<S, $mr, $nv, 0, LDQ, false>(s, dim, q, panel, width, c, SCORE_STRIDE);
                    }
                };
            }
            match (l == 16, narrow) {
                (true, false) => rows!(12, 2),
                (true, true) => rows!(12, 1),
                (false, false) => rows!(6, 2),
                (false, true) => rows!(6, 1),
            }
            at += width;
        }
    }
}

/// Adds weights times values to the results of a tile.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn multiply_values<S: Simd>(
    s: S,
    packing: &Packing,
    values: *const f32,
    weights: *const f32,
    valid: usize,
    key: usize,
    keys: usize,
    results: *mut f32,
) {
    let (l, columns) = (S::LANES, packing.value_columns());
    let vectors = columns / l;
    let mut first = 0;
    // SAFETY: groups of the head; TILE_ROWS rows of weights and results.
    unsafe {
        while first < vectors {
            let width = group_width(l, vectors - first);
            let b = values.add((packing.seq_k * first + key * width) * l);
            macro_rules! rows {
                ($mr:literal, $nv:literal, $ne:literal) => {
                    for g in (0..valid).step_by($mr) {
                        let (w, c) = (weights.add(g * SCORE_STRIDE), results.add(g * columns + first * l));
                        product::<S, $mr, $nv, $ne, SCORE_STRIDE, true>(s, keys, w, b, width * l, c, columns);
                    }
                };
            }
            // Eight columns or fewer in the last vector.
            let half = packing.dim_v <= (first + width) * l - 8;
            match (l == 16, width, half) {
                (true, 4, false) => rows!(6, 4, 0),
                (true, 4, true) => rows!(6, 3, 1),
                (true, 3, false) => rows!(8, 3, 0),
                (true, 3, true) => rows!(8, 2, 1),
                (true, 2, false) => rows!(12, 2, 0),
                (true, 2, true) => rows!(12, 1, 1),
                (true, _, _) => rows!(12, 1, 0),
                (false, 2, _) => rows!(6, 2, 0),
                (false, _, _) => rows!(6, 1, 0),
            }
            first += width;
        }
    }
}

/// Rows of the micro-kernel's tile: two tiles make TILE_ROWS.
const PAIR_ROWS: usize = 12;
/// Rows of a tile that is 40 columns wide: three make TILE_ROWS.
#[cfg(target_arch = "x86_64")]
const EIGHT_ROWS: usize = 8;

/// As [`multiply_keys`], for pairs.
unsafe fn multiply_key_pairs<const LDQ: usize>(
    packing: &Packing,
    packed: *const f32,
    queries: *const f32,
    valid: usize,
    key: usize,
    keys: usize,
    scores: *mut f32,
) {
    let (kernel, terms) = (of_form(Isa::Avx512, packing.form), units(packing.dim, DType::BF16));
    let mut at = 0;
    while at < keys {
        let width = width_at(packing.seq_k, key + at, packing.panel_keys());
        let run = kernel.tiles[usize::from(width == kernel.nr)][PAIR_ROWS - 1];
        // SAFETY: panels of the head; TILE_ROWS queries and rows of scores.
        unsafe {
            let panel = packed.add((key + at) * terms).cast::<u8>();
            for g in (0..valid).step_by(PAIR_ROWS) {
                let (q, c) = (queries.add(g * LDQ).cast(), scores.add(g * SCORE_STRIDE + at));
                run(terms, q, LDQ * 4, panel, c, SCORE_STRIDE, false, panel.wrapping_add(terms * width * 4));
            }
        }
        at += width;
    }
}

/// As [`multiply_values`], for pairs: weights are bf16 at the start of their rows of scores.
unsafe fn multiply_value_pairs(
    packing: &Packing,
    values: *const f32,
    weights: *const f32,
    valid: usize,
    key: usize,
    keys: usize,
    results: *mut f32,
) {
    let (kernel, terms, columns) =
        (of_form(Isa::Avx512, packing.form), units(keys, DType::BF16), packing.value_columns());
    let panel =
        |column: usize, width: usize| values.wrapping_add(packing.value_len(column) + key / 2 * width).cast::<u8>();
    let mut column = 0;
    while column < packing.dim_v {
        let width = width_at(packing.dim_v, column, packing.panel_keys());
        #[cfg(target_arch = "x86_64")]
        if (kernel.nr + 1..=kernel.nr + 8).contains(&(packing.dim_v - column)) {
            let panels = [panel(column, kernel.nr), panel(column + kernel.nr, kernel.nr / 2)];
            for g in (0..valid).step_by(EIGHT_ROWS) {
                // SAFETY: both panels of the head; TILE_ROWS rows of weights and results, which end in a whole vector. Rows
                // past the valid ones may hold anything: nobody reads their results.
                unsafe {
                    let (w, c) = (weights.add(g * SCORE_STRIDE).cast(), results.add(g * columns + column));
                    add_pairs_40::<EIGHT_ROWS>(terms, w, SCORE_STRIDE * 4, panels, c, columns);
                }
            }
            return;
        }
        let run = kernel.tiles[usize::from(width == kernel.nr)][PAIR_ROWS - 1];
        // SAFETY: panels of the head; TILE_ROWS rows of weights and results.
        unsafe {
            let panel = panel(column, width);
            for g in (0..valid).step_by(PAIR_ROWS) {
                let (w, c) = (weights.add(g * SCORE_STRIDE).cast(), results.add(g * columns + column));
                run(terms, w, SCORE_STRIDE * 4, panel, c, columns, true, panel);
            }
        }
        column += width;
    }
}

/// Multiplies scores by `scale`, adds the mask, applies causality, and sets scores past the last key to -infinity.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn mask_scores<S: Simd>(
    s: S,
    a: &Attention,
    task: &Task,
    t: usize,
    valid: usize,
    key: usize,
    keys: usize,
    width: usize,
    scores: *mut f32,
    bias: *mut f32,
    scale: f32,
) {
    // SAFETY: rows of the tile; mask elements of its queries and keys.
    unsafe {
        if let Some(mask) = &a.mask {
            let st = mask.strides;
            let start = task.batch as isize * st[0] + task.head as isize * st[1] + key as isize * st[3];
            for r in 0..valid {
                if r == 0 || st[2] != 0 {
                    let at = start + (task.q0 + t + r) as isize * st[2];
                    let p = mask.ptr.offset(at * mask.dtype.size_bytes() as isize);
                    load_bias(s, mask.dtype, p, st[3], keys, width, bias);
                }
                let row = scores.add(r * SCORE_STRIDE);
                for c in (0..width).step_by(S::LANES) {
                    s.store(row.add(c), s.mla(s.load(row.add(c)), s.splat(scale), s.load(bias.add(c))));
                }
            }
        }
        for r in 0..valid {
            let seen = if a.causal { (task.q0 + t + r + 1).saturating_sub(key).min(keys) } else { keys };
            for c in seen..width {
                *scores.add(r * SCORE_STRIDE + c) = f32::NEG_INFINITY;
            }
        }
    }
}

/// A row of the mask as something to add to scores in units of log2.
#[inline(always)]
unsafe fn load_bias<S: Simd>(
    s: S,
    dtype: DType,
    p: *const u8,
    stride: isize,
    keys: usize,
    width: usize,
    bias: *mut f32,
) {
    // SAFETY: `keys` elements of the mask; `width` of the bias.
    unsafe {
        with_element!(dtype, e => {
            for c in (0..width).step_by(S::LANES) {
                let n = S::LANES.min(keys - c.min(keys));
                if stride == 1 {
                    let x = s.mul(e.load_n(s, p, c, n), s.splat(std::f32::consts::LOG2_E));
                    s.store(bias.add(c), x);
                } else {
                    for j in c..c + n {
                        *bias.add(j) = e.get(p, j as isize * stride) * std::f32::consts::LOG2_E;
                    }
                }
            }
        }, else {
            for j in 0..keys {
                *bias.add(j) = if *p.offset(j as isize * stride) != 0 { 0.0 } else { f32::NEG_INFINITY };
            }
        });
        for j in keys..width {
            *bias.add(j) = 0.0;
        }
    }
}

/// The weight of a score below the maximum, as exact as what becomes of it.
#[inline(always)]
fn weight<S: Simd, const PAIRS: bool>(s: S, x: S::F) -> S::F {
    if PAIRS { math::exp2_nonpositive_rough(s, x) } else { math::exp2_nonpositive(s, x) }
}

/// One step of the online softmax: scores times `scale` become weights relative to the running maximum; sum and results
/// follow it. With `PAIRS` weights are stored as bf16, from the start of the row; a NaN survives in the sum.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn soften<S: Simd, const PAIRS: bool>(
    s: S,
    row: *mut f32,
    width: usize,
    scale: f32,
    top: *mut f32,
    sum: *mut f32,
    out: *mut f32,
    columns: usize,
) {
    let l = S::LANES;
    // SAFETY: `width` scores, `columns` results, both multiples of LANES.
    unsafe {
        let old = *top;
        let mut m = s.load(row);
        let mut m1 = m;
        let mut c = l;
        while c + l < width {
            m = s.max_raw(m, s.load(row.add(c)));
            m1 = s.max_raw(m1, s.load(row.add(c + l)));
            c += 2 * l;
        }
        if c < width {
            m = s.max_raw(m, s.load(row.add(c)));
        }
        let block = s.reduce_max(s.max_raw(m, m1)) * scale;
        let new = if block > old { block } else { old };
        // With nothing to attend to yet every weight is 2^(-inf - 0) = 0.
        let base = if new == f32::NEG_INFINITY { 0.0 } else { new };
        let (mv, k) = (s.splat(-base), s.splat(scale));
        // The scale of f32 products lies in the queries.
        let below = |x: S::F| if PAIRS { s.mla(x, k, mv) } else { s.add(x, mv) };
        let halves = row.cast::<u16>();
        let (mut a, mut b) = (s.splat(0.0), s.splat(0.0));
        c = 0;
        while c + 2 * l <= width {
            let x = weight::<S, PAIRS>(s, below(s.load(row.add(c))));
            let y = weight::<S, PAIRS>(s, below(s.load(row.add(c + l))));
            if PAIRS {
                // Behind what is read. Where products are those of pairs, so is this conversion.
                s.store_bf16_pair(halves.add(c), x, y);
            } else {
                s.store(row.add(c), x);
                s.store(row.add(c + l), y);
            }
            a = s.add(a, x);
            b = s.add(b, y);
            c += 2 * l;
        }
        if c < width {
            let x = weight::<S, PAIRS>(s, below(s.load(row.add(c))));
            if PAIRS {
                s.store_bf16_of_number(halves.add(c), x);
            } else {
                s.store(row.add(c), x);
            }
            a = s.add(a, x);
        }
        let total = s.reduce_add(s.add(a, b));
        if new > old {
            let factor = (old - base).exp2();
            *sum = *sum * factor + total;
            *top = new;
            let f = s.splat(factor);
            let mut d = 0;
            while d < columns {
                s.store(out.add(d), s.mul(s.load(out.add(d)), f));
                d += l;
            }
        } else {
            *sum += total;
        }
    }
}

/// Divides by the sums and stores.
#[inline(always)]
unsafe fn store_results<S: Simd, E: Element>(
    s: S,
    e: E,
    a: &Attention,
    task: &Task,
    results: *const f32,
    columns: usize,
    sum: *const f32,
) {
    let (l, st) = (S::LANES, a.out.strides);
    let start = task.batch as isize * st[0] + task.head as isize * st[1] + task.q0 as isize * st[2];
    // SAFETY: results of the block.
    unsafe {
        for r in 0..task.rows {
            let total = *sum.add(r);
            let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
            let from = results.add(r * columns);
            let to = a.out.ptr.offset((start + r as isize * st[2]) * E::SIZE as isize);
            if st[3] == 1 {
                let mut d = 0;
                while d < a.dim_v {
                    let n = l.min(a.dim_v - d);
                    let x = s.mul(s.load(from.add(d)), s.splat(factor));
                    if n == l {
                        e.store(s, to, d, x)
                    } else {
                        e.store_n(s, to, d, x, n)
                    }
                    d += l;
                }
            } else {
                for d in 0..a.dim_v {
                    e.put(to, d as isize * st[3], *from.add(d) * factor);
                }
            }
        }
    }
}
