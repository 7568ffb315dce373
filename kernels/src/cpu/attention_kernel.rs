//! The parts of [`attention`](super::attention) that run on vectors: packing, products, online softmax.
//!
//! Queries lie along vectors: a *group* is a panel of the products' micro-kernels ([`Kernel::nr`] queries), and scores,
//! weights and results of a group have a row for each key or column of V.

use super::attention::{Attention, BLOCK_KEYS, Heads, MAX_DIM};
use super::gemm::is_readable;
use super::gemm_driver::{Ahead, run_tiles};
use super::gemm_kernel::{Form, Kernel, Runner, TILE_UNITS, of_form, select};
use super::gemm_split::{GROUP, split_panel_into, split_row_into};
use super::math;
use super::pack::{Matrix, pack_panel, width_at};
use super::simd::{Element, Simd};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::{simd_dispatch, with_element};

/// Columns that are brought into another order at a time, in buffers that L1 holds.
const STRIP: usize = 64;
/// Most queries of a group.
const MAX_GROUP: usize = 32;
/// Bytes of a key below which it is copied rather than read among those of other heads, if it is not of whole lines (a Xeon
/// with AMX, f32: 40 elements 0.95 of the time, 80 as long).
const SHORT_ROW: isize = 256;

/// Layout of the packed keys and values of one head, in units of four bytes: K as `[key][dim]`, unless products read it
/// where it lies, then V as `[block of keys][column][key]`.
#[derive(Clone, Copy)]
pub(super) struct Packing {
    /// The products' micro-kernels. Operands of pairs lie in packed memory as bf16, otherwise as f32.
    kernel: &'static Kernel,
    dim: usize,
    dim_v: usize,
    seq_k: usize,
    /// Keys of a block, the last one excepted.
    block: usize,
    /// Products read keys where they lie.
    in_place: bool,
}

impl Packing {
    /// The layout for a kernel that fits the operands, as [`best_kernel`]'s does.
    pub(super) fn new(kernel: &'static Kernel, a: &Attention) -> Packing {
        // Both operands of a block within a quarter of L2.
        let fit = (256 << 10) / ((a.dim + a.dim_v) * 4).max(1);
        let most = (fit / 32 * 32).clamp(64, BLOCK_KEYS);
        let blocks = a.seq_k.div_ceil(most).max(1);
        let block = a.seq_k.div_ceil(blocks).next_multiple_of(kernel.k_step()).max(1);
        // A block of keys is read again for every group: rows 4 KiB apart would share few sets of L2, too.
        let keys = head_matrix(&a.k, 0, 0);
        let shared = keys.row_stride * keys.dtype.size_bytes() as isize % 4096 == 0;
        // Such rows share their first and last lines with other heads, and registers of AMX want whole rows of units.
        let bytes = (a.dim * keys.dtype.size_bytes()) as isize;
        let is_short = bytes < SHORT_ROW && bytes % 64 != 0;
        let is_spread = is_short && keys.row_stride * keys.dtype.size_bytes() as isize > bytes;
        let is_ragged = kernel.is_amx() && !kernel.form.units(a.dim).is_multiple_of(TILE_UNITS);
        let in_place = !shared && !is_spread && !is_ragged && is_readable(&keys, kernel, a.dim);
        Packing { kernel, dim: a.dim, dim_v: a.dim_v, seq_k: a.seq_k, block, in_place }
    }

    fn pairs(&self) -> bool {
        self.kernel.form == Form::Bf16Pairs
    }

    /// Bf16 that operands of products are the sums of, 0 if they are not.
    fn parts(&self) -> usize {
        self.kernel.form.parts()
    }

    /// Most queries of a group.
    pub(super) fn group(&self) -> usize {
        self.kernel.nr
    }

    /// Keys packed together: a block of them.
    pub(super) fn block(&self) -> usize {
        self.block
    }

    /// Units of a key or query, with those of AMX's registers that are zeros.
    pub(super) fn terms(&self) -> usize {
        let units = self.kernel.form.units(self.dim);
        if self.kernel.is_amx() { units.next_multiple_of(TILE_UNITS) } else { units }
    }

    /// Units of a column of V in a block.
    fn block_terms(&self) -> usize {
        self.kernel.form.units(self.block)
    }

    /// Units before the block of V that starts at a key.
    fn values_at(&self, key: usize) -> usize {
        let keys = if self.in_place { 0 } else { self.seq_k * self.terms() };
        keys.next_multiple_of(16) + key / self.block * self.dim_v * self.block_terms()
    }

    /// Bytes of a head, a multiple of a cache line.
    pub(super) fn bytes(&self) -> usize {
        (self.values_at(self.seq_k.next_multiple_of(self.block)) * 4).next_multiple_of(64)
    }
}

/// Whether products of operands taken apart take less time than those of f32. Heads that leave a part of a group empty gain
/// nothing in f32 (measured on a Xeon with 2 MiB of L2: 40 and 80 elements 1.0 of the time, 64, 96 and 128 0.86 to 0.9, 512 0.7), and
/// in f16 they do (40 elements: 0.7).
fn is_worth_splitting(dtype: DType, dim: usize) -> bool {
    dtype == DType::F16 || dim >= 2 * GROUP && 8 * dim.next_multiple_of(GROUP) <= 9 * dim
}

/// The fastest kernel for these operands: of bf16 pairs where all of them are bf16 and products of those are fast. The
/// scale is then applied to scores, whose maximum must be that of the scaled ones. f32 and f16 are taken apart where AMX
/// multiplies bf16.
pub(super) fn best_kernel(isa: Isa, a: &Attention) -> &'static Kernel {
    let all = |dtype: DType| [&a.q, &a.k, &a.v].iter().all(|heads| heads.dtype == dtype);
    for dtype in [DType::F32, DType::F16].into_iter().filter(|&dtype| all(dtype) && is_worth_splitting(dtype, a.dim)) {
        let kernel = select(isa, dtype, dtype, (a.seq_k.min(a.seq_q), a.dim));
        if kernel.form.parts() > 0 {
            return kernel;
        }
    }
    let same = [&a.q, &a.k, &a.v].iter().all(|heads| heads.dtype == DType::BF16);
    if same && a.scale > 0.0 {
        select(isa, DType::BF16, DType::BF16, (a.seq_k, a.dim))
    } else {
        of_form(isa, Form::F32)
    }
}

/// Elements of a task's own scratch memory, part by part.
struct Scratch {
    scores: usize,
    /// Weights taken apart.
    weights: usize,
    queries: usize,
    results: usize,
    rows: usize,
    strip: usize,
}

impl Scratch {
    fn of(packing: &Packing, rows: usize) -> Scratch {
        let rows = rows.next_multiple_of(packing.group());
        Scratch {
            scores: packing.block * packing.group(),
            weights: if packing.parts() > 0 { packing.block_terms() * packing.group() } else { 0 },
            queries: rows * packing.terms(),
            results: rows * packing.dim_v,
            rows,
            strip: STRIP * packing.group(),
        }
    }
}

/// Bytes of a task's own scratch memory.
pub(super) fn task_bytes(packing: &Packing, rows: usize) -> usize {
    let Scratch { scores, weights, queries, results, rows, strip } = Scratch::of(packing, rows);
    (scores + weights + queries + results + 2 * rows + 2 * strip) * 4 + 64
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

/// The positions of one head as a matrix.
pub(super) fn head_matrix(heads: &Heads, batch: usize, head: usize) -> Matrix {
    let start = batch as isize * heads.strides[0] + head as isize * heads.strides[1];
    Matrix {
        ptr: heads.ptr.wrapping_offset(start * heads.dtype.size_bytes() as isize),
        dtype: heads.dtype,
        row_stride: heads.strides[2],
        col_stride: heads.strides[3],
    }
}

simd_dispatch! {
    /// Packs keys `from..to`, a block, of key-value head `unit` into `packed`.
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
    let (batch, head) = (unit / a.kv_heads, unit % a.kv_heads);
    let (k, v) = (head_matrix(&a.k, batch, head), head_matrix(&a.v, batch, head));
    // SAFETY: the caller's promise; the block's place in the packed memory.
    unsafe {
        let values = packed.add(packing.values_at(from));
        if packing.pairs() {
            if !packing.in_place {
                copy_key_pairs(&k, packing, from, to, packed.cast());
            }
            transpose_value_pairs(&v, packing, from, to, values.cast());
        } else if packing.parts() > 0 {
            with_element!(k.dtype, e => split_keys(s, e, &k, packing, from, to, packed), else ());
            with_element!(v.dtype, e => split_values(s, e, &v, packing, from, to, values), else ());
        } else {
            if !packing.in_place {
                with_element!(k.dtype, e => copy_keys(s, e, &k, packing, from, to, packed), else ());
            }
            let (keys, columns, stride) = ((from, to), 0..packing.dim_v, packing.block_terms());
            let kernel = packing.kernel;
            with_element!(v.dtype, e => transpose_values(s, e, &v, kernel, keys, columns, values, stride), else ());
        }
    }
}

/// Rows of keys as f32.
#[inline(always)]
unsafe fn copy_keys<S: Simd, E: Element>(
    s: S,
    e: E,
    k: &Matrix,
    packing: &Packing,
    from: usize,
    to: usize,
    out: *mut f32,
) {
    // SAFETY: keys of the head; rows of `dim` f32.
    unsafe {
        for key in from..to {
            copy_row(s, e, k, key, 0, packing.dim, out.add(key * packing.dim));
        }
    }
}

/// Rows of keys, taken apart.
#[inline(always)]
unsafe fn split_keys<S: Simd, E: Element>(
    s: S,
    e: E,
    k: &Matrix,
    packing: &Packing,
    from: usize,
    to: usize,
    out: *mut f32,
) {
    let mut row = std::mem::MaybeUninit::<[f32; MAX_DIM]>::uninit();
    let row: *mut f32 = row.as_mut_ptr().cast();
    // SAFETY: keys of the head; rows of `terms` units.
    unsafe {
        for key in from..to {
            copy_row(s, e, k, key, 0, packing.dim, row);
            split_row_into(packing.parts(), row, out.add(key * packing.terms()).cast(), packing.dim);
        }
    }
}

/// Columns of V, keys along rows, taken apart.
#[inline(always)]
unsafe fn split_values<S: Simd, E: Element>(
    s: S,
    e: E,
    v: &Matrix,
    packing: &Packing,
    from: usize,
    to: usize,
    out: *mut f32,
) {
    const COLUMNS: usize = 16;
    let mut rows = std::mem::MaybeUninit::<[f32; COLUMNS * BLOCK_KEYS]>::uninit();
    let rows: *mut f32 = rows.as_mut_ptr().cast();
    // SAFETY: keys of the head, a block of them at most; `dim_v` rows of units.
    unsafe {
        for column in (0..packing.dim_v).step_by(COLUMNS) {
            let columns = column..packing.dim_v.min(column + COLUMNS);
            transpose_values(s, e, v, packing.kernel, (from, to), columns.clone(), rows, BLOCK_KEYS);
            for c in columns {
                let row = rows.add((c - column) * BLOCK_KEYS);
                split_row_into(packing.parts(), row, out.add(c * packing.block_terms()).cast(), to - from);
            }
        }
    }
}

/// Elements `first..first + count` of a row as f32.
#[inline(always)]
unsafe fn copy_row<S: Simd, E: Element>(
    s: S,
    e: E,
    matrix: &Matrix,
    row: usize,
    first: usize,
    count: usize,
    out: *mut f32,
) {
    let source = matrix.at(row, first);
    // SAFETY: the caller vouches for the elements.
    unsafe {
        if matrix.col_stride == 1 {
            let whole = count / S::LANES * S::LANES;
            for c in (0..whole).step_by(S::LANES) {
                s.store(out.add(c), e.load(s, source, c));
            }
            if whole < count {
                s.store_n(out.add(whole), e.load_n(s, source, whole, count - whole), count - whole);
            }
        } else {
            for c in 0..count {
                *out.add(c) = e.get(source, c as isize * matrix.col_stride);
            }
        }
    }
}

/// Rows of keys as bf16; an odd element's partner is 0, and what else fills a row.
unsafe fn copy_key_pairs(k: &Matrix, packing: &Packing, from: usize, to: usize, out: *mut u32) {
    let (dim, terms) = (packing.dim, packing.terms());
    // SAFETY: keys of the head; rows of `terms` units.
    unsafe {
        for key in from..to {
            let (source, row) = (k.at(key, 0).cast::<u16>(), out.add(key * terms).cast::<u16>());
            row.add(dim).write_bytes(0, 2 * terms - dim);
            if k.col_stride == 1 {
                row.copy_from_nonoverlapping(source, dim);
            } else {
                (0..dim).for_each(|d| row.add(d).write(*source.offset(d as isize * k.col_stride)));
            }
        }
    }
}

/// Columns `columns` of rows `first..`, `valid` of them, as rows of a panel: `out[column][row]`. Missing rows are 0.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn transpose_rows<S: Simd, E: Element>(
    s: S,
    e: E,
    kernel: &Kernel,
    matrix: &Matrix,
    (first, valid): (usize, usize),
    columns: std::ops::Range<usize>,
    out: *mut f32,
) {
    // SAFETY: the caller vouches for rows and columns and for a panel of results.
    unsafe {
        if E::SIZE == 4 {
            let rows = Matrix { ptr: matrix.at(first, 0), ..*matrix };
            return pack_panel(kernel.isa, &rows, 0, valid, kernel.nr, columns.start, columns.len(), out.cast());
        }
        let width = width_at(valid, 0, kernel.nr);
        let mut strip = std::mem::MaybeUninit::<[f32; MAX_GROUP * STRIP]>::uninit();
        let strip: *mut f32 = strip.as_mut_ptr().cast();
        for column in columns.clone().step_by(STRIP) {
            let count = STRIP.min(columns.end - column);
            for row in 0..valid {
                copy_row(s, e, matrix, first + row, column, count, strip.add(row * STRIP));
            }
            let rows = Matrix::row_major(strip.cast_const().cast(), DType::F32, STRIP);
            let to = out.add((column - columns.start) * width);
            pack_panel(kernel.isa, &rows, 0, valid, kernel.nr, 0, count, to.cast());
        }
    }
}

/// Columns `columns` of V, keys along rows, as f32, `stride` elements apart.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn transpose_values<S: Simd, E: Element>(
    s: S,
    e: E,
    v: &Matrix,
    kernel: &Kernel,
    (from, to): (usize, usize),
    columns: std::ops::Range<usize>,
    out: *mut f32,
    stride: usize,
) {
    let mut strip = std::mem::MaybeUninit::<[f32; MAX_GROUP * STRIP]>::uninit();
    let strip: *mut f32 = strip.as_mut_ptr().cast();
    // SAFETY: keys of the head; a row of `stride` f32 for each column.
    unsafe {
        for column in columns.clone().step_by(STRIP) {
            let end = columns.end.min(column + STRIP);
            for key in (from..to).step_by(kernel.nr) {
                let valid = kernel.nr.min(to - key);
                let width = width_at(valid, 0, kernel.nr);
                transpose_rows(s, e, kernel, v, (key, valid), column..end, strip);
                for c in column..end {
                    let row = out.add((c - columns.start) * stride + key - from);
                    row.copy_from_nonoverlapping(strip.add((c - column) * width), valid);
                }
            }
        }
    }
}

/// Columns of V, keys along rows, as bf16; a missing key is 0.
unsafe fn transpose_value_pairs(v: &Matrix, packing: &Packing, from: usize, to: usize, out: *mut u32) {
    let (kernel, stride, dim) = (packing.kernel, 2 * packing.block_terms(), packing.dim_v);
    let out = out.cast::<u16>();
    let mut strip = std::mem::MaybeUninit::<[u32; MAX_GROUP * STRIP]>::uninit();
    let strip: *mut u32 = strip.as_mut_ptr().cast();
    // Two columns side by side are a unit of four bytes: those are transposed, and then taken apart.
    let whole = if v.col_stride == 1 && v.row_stride % 2 == 0 { dim / 2 * 2 } else { 0 };
    // SAFETY: keys of the head; `dim` rows of `stride` bf16.
    unsafe {
        for column in (0..whole).step_by(2 * STRIP) {
            let end = whole.min(column + 2 * STRIP);
            for key in (from..to).step_by(kernel.nr) {
                let valid = kernel.nr.min(to - key);
                let width = width_at(valid, 0, kernel.nr);
                let (ptr, row_stride) = (v.at(key, column), v.row_stride / 2);
                let rows = Matrix { ptr, dtype: DType::F32, row_stride, col_stride: 1 };
                pack_panel(kernel.isa, &rows, 0, valid, kernel.nr, 0, (end - column) / 2, strip.cast());
                for c in (column..end).step_by(2) {
                    let pairs = strip.add((c - column) / 2 * width);
                    let (low, high) = (out.add(c * stride + key - from), out.add((c + 1) * stride + key - from));
                    // The key after the last one exists in the panel, where it is 0.
                    for lane in 0..valid.next_multiple_of(2) {
                        let pair = *pairs.add(lane);
                        low.add(lane).write(pair as u16);
                        high.add(lane).write((pair >> 16) as u16);
                    }
                }
            }
        }
        for c in whole..dim {
            let row = out.add(c * stride);
            for key in from..to {
                row.add(key - from).write(*v.at(key, c).cast::<u16>());
            }
            if (to - from) % 2 == 1 {
                row.add(to - from).write(0);
            }
        }
    }
}

simd_dispatch! {
    /// Attention of one block of queries.
    pub(super) unsafe fn run(a: &Attention, packing: &Packing, task: &Task) = run_body
}

/// A group of queries.
#[derive(Clone, Copy)]
struct Group {
    /// The first one of the head, and how many there are.
    first: usize,
    valid: usize,
    /// Columns of its panels: `valid` and padding.
    width: usize,
    /// `[dim][query]`.
    queries: *mut f32,
    /// `[column][query]`.
    results: *mut f32,
    /// The running maximum and sum of each query.
    top: *mut f32,
    sum: *mut f32,
}

#[inline(always)]
unsafe fn run_body<S: Simd>(s: S, a: &Attention, packing: &Packing, task: &Task) {
    let (kernel, parts) = (packing.kernel, Scratch::of(packing, task.rows));
    // SAFETY: `task_bytes` of scratch memory; the caller's promise for the operands.
    unsafe {
        let scores = task.scratch.add(task.scratch.align_offset(64));
        let weights = scores.add(parts.scores);
        let queries = weights.add(parts.weights);
        let results = queries.add(parts.queries);
        let (top, sum) = (results.add(parts.results), results.add(parts.results + parts.rows));
        let strips = sum.add(parts.rows);
        let group = |row: usize| Group {
            first: task.q0 + row,
            valid: kernel.nr.min(task.rows - row),
            width: width_at(task.rows, row, kernel.nr),
            queries: queries.wrapping_add(row * packing.terms()),
            results: results.wrapping_add(row * packing.dim_v),
            top: top.wrapping_add(row),
            sum: sum.wrapping_add(row),
        };
        let q = head_matrix(&a.q, task.batch, task.head);
        let k = head_matrix(&a.k, task.batch, task.head / (a.heads / a.kv_heads));
        for row in (0..task.rows).step_by(kernel.nr) {
            let group = group(row);
            with_element!(a.q.dtype, e => load_queries(s, e, a, packing, &q, &group, scores), else ());
            for r in 0..group.width {
                (*group.top.add(r), *group.sum.add(r)) = (f32::NEG_INFINITY, 0.0);
            }
            if packing.seq_k == 0 {
                group.results.write_bytes(0, group.width * packing.dim_v);
            }
        }
        // What scores still have to be multiplied by, before and after the mask is added.
        let scale = if packing.pairs() { a.scale * std::f32::consts::LOG2_E } else { 1.0 };
        let (before, after) = if a.mask.is_some() { (scale, 1.0) } else { (1.0, scale) };
        let mut runner = Runner::new(kernel);
        for key in (0..packing.seq_k).step_by(packing.block) {
            for row in (0..task.rows).step_by(kernel.nr) {
                let group = group(row);
                let mut keys = packing.block.min(packing.seq_k - key);
                if a.causal {
                    keys = keys.min((group.first + group.valid).saturating_sub(key));
                }
                if keys == 0 {
                    continue;
                }
                let (terms, width) = (packing.terms(), group.width);
                let panel = group.queries.cast_const().cast();
                let (rows, lda) = if packing.in_place {
                    (k.at(key, 0), k.row_stride as usize * k.dtype.size_bytes())
                } else {
                    (task.packed.add(key * terms).cast(), terms * 4)
                };
                let c = (scores, width);
                run_tiles(&mut runner, keys, width, terms, (rows, lda), panel, c, false, Ahead::NONE);
                if let Some(mask) = &a.mask {
                    add_mask(s, kernel, mask, task, &group, key, keys, scores, strips, before);
                }
                if a.causal {
                    hide_later_keys(&group, key, keys, scores);
                }
                match (width > S::LANES, packing.pairs()) {
                    (true, false) => soften::<S, 2, false>(s, scores, keys, after, &group, packing.dim_v, key > 0),
                    (true, true) => soften::<S, 2, true>(s, scores, keys, after, &group, packing.dim_v, key > 0),
                    (false, false) => soften::<S, 1, false>(s, scores, keys, after, &group, packing.dim_v, key > 0),
                    (false, true) => soften::<S, 1, true>(s, scores, keys, after, &group, packing.dim_v, key > 0),
                }
                let values = task.packed.add(packing.values_at(key)).cast();
                let panel = if packing.parts() > 0 {
                    split_panel_into(packing.parts(), scores, keys, width, weights.cast());
                    weights
                } else {
                    scores
                };
                let (lda, panel) = (packing.block_terms() * 4, panel.cast_const().cast());
                let terms = kernel.form.units(keys);
                let (a, c) = ((values, lda), (group.results, width));
                run_tiles(&mut runner, packing.dim_v, width, terms, a, panel, c, key > 0, Ahead::NONE);
            }
        }
        drop(runner);
        for row in (0..task.rows).step_by(kernel.nr) {
            with_element!(a.out.dtype, e => store_results(s, e, a, packing, task, &group(row), strips), else ());
        }
    }
}

/// The queries of a group: as bf16, or as f32, scaled into units of log2, or taken apart. Rows past the valid ones are 0.
/// `scores`, not used yet, is memory to work in.
#[inline(always)]
unsafe fn load_queries<S: Simd, E: Element>(
    s: S,
    e: E,
    a: &Attention,
    packing: &Packing,
    q: &Matrix,
    group: &Group,
    scores: *mut f32,
) {
    let kernel = packing.kernel;
    let scale = s.splat(a.scale * std::f32::consts::LOG2_E);
    // SAFETY: queries of the group; a panel of `terms` rows, and one of as many as a block of keys has to work in.
    unsafe {
        if packing.parts() > 0 {
            for first in (0..packing.dim).step_by(GROUP) {
                let columns = first..packing.dim.min(first + GROUP);
                let (count, to) = (columns.len(), kernel.form.units(first) * group.width);
                transpose_rows(s, e, kernel, q, (group.first, group.valid), columns, scores);
                for at in (0..count * group.width).step_by(S::LANES) {
                    s.store(scores.add(at), s.mul(s.load(scores.add(at)), scale));
                }
                split_panel_into(packing.parts(), scores, count, group.width, group.queries.add(to).cast());
            }
            return;
        }
        if packing.pairs() {
            let rows = Matrix { ptr: q.at(group.first, 0), ..*q };
            let units = kernel.form.units(packing.dim);
            group.queries.add(units * group.width).write_bytes(0, (packing.terms() - units) * group.width);
            return pack_panel(kernel.isa, &rows, 0, group.valid, kernel.nr, 0, packing.dim, group.queries.cast());
        }
        transpose_rows(s, e, kernel, q, (group.first, group.valid), 0..packing.dim, group.queries);
        for at in (0..packing.dim * group.width).step_by(S::LANES) {
            let x = group.queries.add(at);
            s.store(x, s.mul(s.load(x), scale));
        }
    }
}

/// Multiplies scores by `scale` and adds the mask.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn add_mask<S: Simd>(
    s: S,
    kernel: &Kernel,
    mask: &super::attention::Mask,
    task: &Task,
    group: &Group,
    key: usize,
    keys: usize,
    scores: *mut f32,
    strips: *mut f32,
    scale: f32,
) {
    let (st, width) = (mask.strides, group.width);
    let scale = s.splat(scale);
    // Rows of the mask as they lie, and as the scores do.
    let (rows, columns) = (strips, strips.wrapping_add(STRIP * kernel.nr));
    // SAFETY: mask elements of the group's queries and the block's keys; two strips.
    unsafe {
        let start = task.batch as isize * st[0] + task.head as isize * st[1] + group.first as isize * st[2];
        for first in (0..keys).step_by(STRIP) {
            let count = STRIP.min(keys - first);
            let start = start + (key + first) as isize * st[3];
            let same = st[2] == 0;
            for query in 0..if same { 1 } else { group.valid } {
                let at = (start + query as isize * st[2]) * mask.dtype.size_bytes() as isize;
                load_bias(s, mask.dtype, mask.ptr.offset(at), st[3], count, rows.add(query * STRIP));
            }
            if !same {
                let rows = Matrix::row_major(rows.cast_const().cast(), DType::F32, STRIP);
                pack_panel(kernel.isa, &rows, 0, group.valid, kernel.nr, 0, count, columns.cast());
            }
            for row in 0..count {
                let line = scores.add((first + row) * width);
                for c in (0..width).step_by(S::LANES) {
                    let bias = if same { s.splat(*rows.add(row)) } else { s.load(columns.add(row * width + c)) };
                    s.store(line.add(c), s.mla(s.load(line.add(c)), scale, bias));
                }
            }
        }
    }
}

/// Sets the scores of keys that come after a query to -infinity.
unsafe fn hide_later_keys(group: &Group, key: usize, keys: usize, scores: *mut f32) {
    for row in 0..keys {
        for query in 0..(key + row).saturating_sub(group.first).min(group.width) {
            // SAFETY: scores of the group.
            unsafe { *scores.add(row * group.width + query) = f32::NEG_INFINITY };
        }
    }
}

/// An element of a mask in units of log2. What is finite stays so: in a row that is hidden by the lowest number altogether,
/// as masks of padded text are, keys are to be alike, and in one that is hidden by infinities none of them count.
#[inline(always)]
fn bias_of<S: Simd>(s: S, x: S::F) -> S::F {
    let wide = s.mul(x, s.splat(std::f32::consts::LOG2_E));
    let finite = s.min_raw(s.max_raw(wide, s.splat(f32::MIN)), s.splat(f32::MAX));
    s.select(s.lt(s.abs(x), s.splat(f32::INFINITY)), finite, wide)
}

/// A row of the mask as something to add to scores in units of log2.
#[inline(always)]
pub(super) unsafe fn load_bias<S: Simd>(s: S, dtype: DType, p: *const u8, stride: isize, keys: usize, bias: *mut f32) {
    // SAFETY: `keys` elements of the mask and of the bias.
    unsafe {
        with_element!(dtype, e => {
            let whole = if stride == 1 { keys / S::LANES * S::LANES } else { 0 };
            for c in (0..whole).step_by(S::LANES) {
                s.store(bias.add(c), bias_of(s, e.load(s, p, c)));
            }
            for j in whole..keys {
                s.store_n(bias.add(j), bias_of(s, s.splat(e.get(p, j as isize * stride))), 1);
            }
        }, else {
            for j in 0..keys {
                *bias.add(j) = if *p.offset(j as isize * stride) != 0 { 0.0 } else { f32::NEG_INFINITY };
            }
        });
    }
}

/// The weight of a score below the maximum, as exact as what becomes of it.
#[inline(always)]
fn weight<S: Simd, const PAIRS: bool>(s: S, x: S::F) -> S::F {
    if PAIRS { math::exp2_nonpositive_rough(s, x) } else { math::exp2_nonpositive(s, x) }
}

/// One step of the online softmax for `NV` vectors of queries: scores times `scale` become weights relative to the running
/// maxima; sums, and results if there are any (`follow`), go with them. With `PAIRS` weights are stored as pairs of bf16; a
/// NaN survives in the sum.
// Indices, not iterators: the vectors must become registers.
#[inline(always)]
#[allow(clippy::too_many_arguments, clippy::needless_range_loop)]
unsafe fn soften<S: Simd, const NV: usize, const PAIRS: bool>(
    s: S,
    scores: *mut f32,
    keys: usize,
    scale: f32,
    group: &Group,
    columns: usize,
    follow: bool,
) {
    let l = S::LANES;
    let width = NV * l;
    // SAFETY: scores of `keys` rows, and results of `columns`, of the group's width.
    unsafe {
        let lowest = s.splat(f32::NEG_INFINITY);
        let (mut even, mut odd) = ([lowest; NV], [lowest; NV]);
        for row in (0..keys / 2 * 2).step_by(2) {
            let line = scores.add(row * width);
            for v in 0..NV {
                even[v] = s.max_raw(even[v], s.load(line.add(v * l)));
                odd[v] = s.max_raw(odd[v], s.load(line.add(width + v * l)));
            }
        }
        if keys % 2 == 1 {
            for v in 0..NV {
                even[v] = s.max_raw(even[v], s.load(scores.add((keys - 1) * width + v * l)));
            }
        }
        let k = s.splat(scale);
        let (mut below, mut total, mut factor) = ([lowest; NV], [s.splat(0.0); NV], [lowest; NV]);
        let mut rises = false;
        for v in 0..NV {
            let old = s.load(group.top.add(v * l));
            let block = s.mul(s.max_raw(even[v], odd[v]), k);
            let new = s.select(s.lt(old, block), block, old);
            // With nothing to attend to yet every weight is 2^(-inf - 0) = 0.
            let base = s.select(s.eq(new, lowest), s.splat(0.0), new);
            rises |= s.any(s.lt(old, new));
            factor[v] = math::exp2_nonpositive(s, s.sub(old, base));
            below[v] = s.neg(base);
            s.store(group.top.add(v * l), new);
        }
        let mut row = 0;
        while row + 2 <= keys {
            let line = scores.add(row * width);
            for v in 0..NV {
                let (x, y) = (s.load(line.add(v * l)), s.load(line.add(width + v * l)));
                let x = weight::<S, PAIRS>(s, lower::<S, PAIRS>(s, x, k, below[v]));
                let y = weight::<S, PAIRS>(s, lower::<S, PAIRS>(s, y, k, below[v]));
                if PAIRS {
                    // A row of pairs lies over or before the two it is made of. Where products are those of pairs, so is
                    // this conversion.
                    s.store_bf16_zip(scores.add(row / 2 * width + v * l).cast(), x, y);
                } else {
                    s.store(line.add(v * l), x);
                    s.store(line.add(width + v * l), y);
                }
                total[v] = s.add(total[v], s.add(x, y));
            }
            row += 2;
        }
        if row < keys {
            for v in 0..NV {
                let line = scores.add(row * width + v * l);
                let x = weight::<S, PAIRS>(s, lower::<S, PAIRS>(s, s.load(line), k, below[v]));
                if PAIRS {
                    s.store_bf16_zip(scores.add(row / 2 * width + v * l).cast(), x, s.splat(0.0));
                } else {
                    s.store(line, x);
                }
                total[v] = s.add(total[v], x);
            }
        }
        for v in 0..NV {
            let sum = group.sum.add(v * l);
            s.store(sum, s.mla(s.load(sum), factor[v], total[v]));
        }
        if rises && follow {
            for column in 0..columns {
                for v in 0..NV {
                    let result = group.results.add(column * width + v * l);
                    s.store(result, s.mul(s.load(result), factor[v]));
                }
            }
        }
    }
}

/// A score relative to the maximum, in units of log2. The scale of f32 products lies in the queries.
#[inline(always)]
fn lower<S: Simd, const PAIRS: bool>(s: S, x: S::F, scale: S::F, below: S::F) -> S::F {
    if PAIRS { s.mla(x, scale, below) } else { s.add(x, below) }
}

/// Divides by the sums and stores.
#[inline(always)]
unsafe fn store_results<S: Simd, E: Element>(
    s: S,
    e: E,
    a: &Attention,
    packing: &Packing,
    task: &Task,
    group: &Group,
    strip: *mut f32,
) {
    let (l, kernel) = (S::LANES, packing.kernel);
    let out = head_matrix(&a.out, task.batch, task.head);
    // SAFETY: results of the group; a strip holds a panel of as many rows as a group has.
    unsafe {
        let columns = Matrix::row_major(group.results.cast_const().cast(), DType::F32, group.width);
        for column in (0..packing.dim_v).step_by(kernel.nr) {
            let width = width_at(packing.dim_v, column, kernel.nr);
            let count = width.min(packing.dim_v - column);
            pack_panel(kernel.isa, &columns, column, packing.dim_v, kernel.nr, 0, group.valid, strip.cast());
            for query in 0..group.valid {
                let total = *group.sum.add(query);
                let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
                let (from, to) = (strip.add(query * width), out.at(group.first + query, column).cast_mut());
                if out.col_stride == 1 {
                    for c in (0..count).step_by(l) {
                        let x = s.mul(s.load(from.add(c)), s.splat(factor));
                        if count - c >= l {
                            e.store(s, to, c, x);
                        } else {
                            e.store_n(s, to, c, x, count - c);
                        }
                    }
                } else {
                    for c in 0..count {
                        e.put(to, c as isize * out.col_stride, *from.add(c) * factor);
                    }
                }
            }
        }
    }
}
