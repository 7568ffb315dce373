//! [`attention`](super::attention) of a few queries: one at a time, keys and values read once, where they lie.
//!
//! ```text
//! scores = q K^T       a dot product per key
//! weights = softmax
//! result = weights V   a sum of rows, in chains of at most CHAIN keys that are then added up
//! ```

use super::attention::{Attention, Heads};
use super::attention_kernel::{head_matrix, load_bias};
use super::math;
use super::pack::Matrix;
use super::simd::{Element, Simd};
use crate::pool::{OutOfMemory, Pool};
use crate::{isa::Isa, simd_dispatch, with_element};

/// Most queries that are worked on so: for more, packing values for groups of queries pays.
pub(super) const FEW_QUERIES: usize = 2;
/// Vectors of results worked on together.
const GROUP: usize = 4;
/// Keys whose share of a result is summed up at a time.
const CHAIN: usize = 256;
/// Room for a whole vector behind the last element.
const PAD: usize = 16;

/// Attention of [`FEW_QUERIES`] or fewer.
///
/// # Errors
/// If per-thread memory runs out.
///
/// # Safety
/// As for [`super::attention::attention`].
pub(super) unsafe fn few_queries(pool: &Pool, isa: Isa, a: &Attention) -> Result<(), OutOfMemory> {
    let bytes = (2 * (a.seq_k + PAD) + a.dim + PAD) * 4;
    pool.run_scratch(a.batch * a.heads * a.seq_q, bytes, |task, worker| {
        let (rest, query) = (task / a.seq_q, task % a.seq_q);
        // SAFETY: one query of one head; each has its own results.
        unsafe { run(isa, a, rest / a.heads, rest % a.heads, query, worker.scratch.cast()) };
    })
}

simd_dispatch! {
    unsafe fn run(a: &Attention, batch: usize, head: usize, query: usize, scratch: *mut f32) = run_body
}

#[inline(always)]
unsafe fn run_body<S: Simd>(s: S, a: &Attention, batch: usize, head: usize, query: usize, scratch: *mut f32) {
    let (l, kv) = (S::LANES, head / (a.heads / a.kv_heads));
    let of = |heads: &Heads, head: usize| head_matrix(heads, batch, head);
    let (q, k, v, out) = (of(&a.q, head), of(&a.k, kv), of(&a.v, kv), of(&a.out, head));
    let seen = if a.causal { a.seq_k.min(query + 1) } else { a.seq_k };
    let lowest = s.splat(f32::NEG_INFINITY);
    // SAFETY: scratch memory of `few_queries`; the caller's promise for the operands.
    unsafe {
        let scores = scratch;
        let bias = scores.add(a.seq_k + PAD);
        let row = bias.add(a.seq_k + PAD);
        with_element!(q.dtype, e => load_query(s, e, a, &q, query, row), else ());
        with_element!(k.dtype, e => multiply_keys(s, e, &k, row, a.dim, seen, scores), else ());
        s.store(scores.add(seen), lowest);
        if let Some(mask) = &a.mask {
            let st = mask.strides;
            let at = batch as isize * st[0] + head as isize * st[1] + query as isize * st[2];
            let from = mask.ptr.offset(at * mask.dtype.size_bytes() as isize);
            load_bias(s, mask.dtype, from, st[3], seen, bias);
            s.store(bias.add(seen), s.splat(0.0));
            for c in (0..seen).step_by(l) {
                s.store(scores.add(c), s.add(s.load(scores.add(c)), s.load(bias.add(c))));
            }
        }
        let mut top = lowest;
        for c in (0..seen).step_by(l) {
            top = s.max_raw(top, s.load(scores.add(c)));
        }
        let top = s.reduce_max(top);
        // With nothing to attend to every weight is 2^(-inf - 0) = 0.
        let base = s.splat(if top == f32::NEG_INFINITY { 0.0 } else { top });
        let mut total = s.splat(0.0);
        for c in (0..seen).step_by(l) {
            let x = math::exp2_nonpositive(s, s.sub(s.load(scores.add(c)), base));
            s.store(scores.add(c), x);
            total = s.add(total, x);
        }
        let total = s.reduce_add(total);
        let factor = if total == 0.0 { 0.0 } else { 1.0 / total };
        with_element!(v.dtype, e => {
            let mut column = 0;
            while column < a.dim_v {
                let result = multiply_values(s, e, &v, scores, seen, column, a.dim_v);
                let left = a.dim_v - column;
                with_element!(out.dtype, e => store_row(s, e, &out, query, column, left, result, factor), else ());
                column += GROUP * l;
            }
        }, else ());
    }
}

/// The query as f32, scaled into units of log2, with zeros behind it.
#[inline(always)]
unsafe fn load_query<S: Simd, E: Element>(s: S, e: E, a: &Attention, q: &Matrix, query: usize, row: *mut f32) {
    let (source, scale) = (q.at(query, 0), a.scale * std::f32::consts::LOG2_E);
    // SAFETY: a query of the head; `dim + PAD` elements of the row.
    unsafe {
        for d in 0..a.dim {
            *row.add(d) = e.get(source, d as isize * q.col_stride) * scale;
        }
        s.store(row.add(a.dim), s.splat(0.0));
    }
}

/// Elements `column..` of a row, `left` or a vector of them, zeros behind them.
#[inline(always)]
unsafe fn load_part<S: Simd, E: Element>(s: S, e: E, m: &Matrix, row: usize, column: usize, left: usize) -> S::F {
    let source = m.at(row, column);
    // SAFETY: the caller vouches for the elements.
    unsafe {
        if m.col_stride != 1 {
            let mut part = [0f32; PAD];
            for (c, x) in part.iter_mut().enumerate().take(left.min(S::LANES)) {
                *x = e.get(source, c as isize * m.col_stride);
            }
            s.load(part.as_ptr())
        } else if left >= S::LANES {
            e.load(s, source, 0)
        } else {
            e.load_n(s, source, 0, left)
        }
    }
}

/// The query's products with the first `seen` keys.
#[inline(always)]
unsafe fn multiply_keys<S: Simd, E: Element>(
    s: S,
    e: E,
    k: &Matrix,
    row: *const f32,
    dim: usize,
    seen: usize,
    scores: *mut f32,
) {
    // SAFETY: keys of the head; the row ends in zeros.
    unsafe {
        for key in 0..seen {
            let mut sum = s.splat(0.0);
            for d in (0..dim).step_by(S::LANES) {
                sum = s.mla(s.load(row.add(d)), load_part(s, e, k, key, d, dim - d), sum);
            }
            *scores.add(key) = s.reduce_add(sum);
        }
    }
}

/// `GROUP` vectors of the sum of V's rows, each times its weight, from `column` on.
// Indices, not iterators: the sums must become registers.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn multiply_values<S: Simd, E: Element>(
    s: S,
    e: E,
    v: &Matrix,
    weights: *const f32,
    seen: usize,
    column: usize,
    columns: usize,
) -> [S::F; GROUP] {
    let mut total = [s.splat(0.0); GROUP];
    for first in (0..seen).step_by(CHAIN) {
        let mut sum = [s.splat(0.0); GROUP];
        for key in first..seen.min(first + CHAIN) {
            // SAFETY: keys of the head, columns of V.
            unsafe {
                let weight = s.splat(*weights.add(key));
                for i in 0..GROUP {
                    let c = column + i * S::LANES;
                    if c < columns {
                        sum[i] = s.mla(weight, load_part(s, e, v, key, c, columns - c), sum[i]);
                    }
                }
            }
        }
        for i in 0..GROUP {
            total[i] = s.add(total[i], sum[i]);
        }
    }
    total
}

/// Stores `GROUP` vectors, or the `left` results there are, times `factor`.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn store_row<S: Simd, E: Element>(
    s: S,
    e: E,
    out: &Matrix,
    query: usize,
    column: usize,
    left: usize,
    results: [S::F; GROUP],
    factor: f32,
) {
    for (i, result) in results.into_iter().enumerate() {
        let first = i * S::LANES;
        if first >= left {
            break;
        }
        let (to, result) = (out.at(query, column + first).cast_mut(), s.mul(result, s.splat(factor)));
        // SAFETY: results of the query.
        unsafe {
            if out.col_stride == 1 {
                e.store_n(s, to, 0, result, S::LANES.min(left - first));
            } else {
                let mut part = [0f32; PAD];
                s.store(part.as_mut_ptr(), result);
                for (c, x) in part.into_iter().enumerate().take(S::LANES.min(left - first)) {
                    e.put(to, c as isize * out.col_stride, x);
                }
            }
        }
    }
}
