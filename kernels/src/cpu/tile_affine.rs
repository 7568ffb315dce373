//! Tile programs that scale and shift: what norms apply.
//!
//! `silu(x * scale + shift)` with a scale and a shift per column, and `(x - mean) * rstd * weight + bias` with a mean and a
//! reciprocal deviation per row, go from memory to memory in one pass. Run step by step over tiles, the first step of such a
//! program waits for memory and the others leave memory idle; here the processor loads what comes next while it computes.
//! [`Affine::of`] recognises such a program, once; the binding makes its columns f32, for all rows. Results are those of the
//! steps, bit for bit: the same operations in the same order.

use super::math;
use super::simd::{Element, Simd};
use super::tile_exec_ops::{Op1, Op3};
use super::tile_prepare::{Node, Value};
use crate::dtype::DType;
use crate::tile::{Binary, Unary};
use crate::{simd_dispatch, with_element};

/// A vector of one value per column: a memory operand, and a constant that is added to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Column {
    pub(super) operand: u8,
    pub(super) plus: Option<f32>,
}

/// Row scalars of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RowTerms {
    /// Subtracted first, if there is one.
    pub(super) mean: Option<u8>,
    /// Multiplied by then.
    pub(super) rstd: u8,
}

/// A program that is `silu(x * weight + bias)`, rounded once before it, or `(x - mean) * rstd * weight + bias`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Affine {
    /// The memory operand that is scaled.
    pub(super) x: u8,
    /// Those of the second form.
    pub(super) row: Option<RowTerms>,
    pub(super) weight: Option<Column>,
    pub(super) bias: Option<Column>,
    /// Whether the first form has SiLU behind it.
    pub(super) silu: bool,
    /// The memory operand that is stored to.
    pub(super) out: u8,
}

impl Affine {
    /// What the program is, if it is one of these.
    pub(super) fn of(nodes: &[Node]) -> Option<Affine> {
        let (Node::Store { src, out }, before) = nodes.split_last().map(|(last, rest)| (*last, rest))? else {
            return None;
        };
        if before.iter().any(|node| matches!(node, Node::Store { .. })) {
            return None;
        }
        let at = |v: Value| nodes[v as usize];
        let memory = |v: Value| if let Node::Memory(i) = at(v) { Some(i) } else { None };
        let column = |v: Value| match at(v) {
            Node::Memory(operand) => Some(Column { operand, plus: None }),
            Node::Binary(Binary::Add, a, b) => match (at(a), at(b)) {
                (Node::Memory(operand), Node::Const(c)) | (Node::Const(c), Node::Memory(operand)) => {
                    Some(Column { operand, plus: Some(c) })
                }
                _ => None,
            },
            _ => None,
        };
        let (silu, v) = match at(src) {
            Node::Unary(Op1::Plain(Unary::Silu), a) => (true, a),
            _ => (false, src),
        };
        if let Node::Ternary(Op3::Fma, x, w, b) = at(v) {
            let (weight, bias) = (Some(column(w)?), Some(column(b)?));
            return Some(Affine { x: memory(x)?, row: None, weight, bias, silu, out });
        }
        if silu {
            return None;
        }
        // From the outside in: of a sum or a product one operand is the column, the other the rest.
        let split = |op: Binary, v: Value| match at(v) {
            Node::Binary(o, a, b) if o == op => {
                column(b).map(|c| (c, a)).or_else(|| column(a).map(|c| (c, b))).map(|(c, rest)| (Some(c), rest))
            }
            _ => None,
        };
        let (bias, v) = split(Binary::Add, v).unwrap_or((None, v));
        let (weight, v) = split(Binary::Mul, v).unwrap_or((None, v));
        let Node::Binary(Binary::Mul, v, scalar) = at(v) else { return None };
        let Node::RowScalar(rstd) = at(scalar) else { return None };
        let (mean, x) = match at(v) {
            Node::Binary(Binary::Sub, x, scalar) => {
                let Node::RowScalar(mean) = at(scalar) else { return None };
                (Some(mean), x)
            }
            _ => (None, v),
        };
        Some(Affine { x: memory(x)?, row: Some(RowTerms { mean, rstd }), weight, bias, silu, out })
    }
}

/// The columns of a program over all rows that share them, f32.
pub(super) struct Columns {
    /// For each set of rows the weights, then the biases.
    values: Vec<f32>,
    cols: usize,
}

impl Columns {
    /// Of `sets` sets, or nothing where there is no memory for them. A weight that is missing is 1, a bias -0, which changes
    /// no sum.
    pub(super) fn new(sets: usize, cols: usize) -> Option<Columns> {
        let mut values = Vec::new();
        let len = sets.checked_mul(cols)?.checked_mul(2)?;
        values.try_reserve_exact(len).ok()?;
        for _ in 0..sets {
            values.resize(values.len() + cols, 1.0);
            values.resize(values.len() + cols, -0.0);
        }
        Some(Columns { values, cols })
    }

    /// The weights of a set and its biases.
    pub(super) fn of_mut(&mut self, set: usize) -> (&mut [f32], &mut [f32]) {
        self.values[2 * set * self.cols..][..2 * self.cols].split_at_mut(self.cols)
    }

    /// Where the weights and the biases of a set begin.
    pub(super) fn of(&self, set: usize) -> (*const f32, *const f32) {
        let at = &self.values[2 * set * self.cols..][..2 * self.cols];
        (at.as_ptr(), at[self.cols..].as_ptr())
    }
}

/// Bytes between what is computed and what is asked for: processors that find the rows out by themselves do not run far
/// enough ahead of work that takes 50 cycles a line.
const AHEAD: usize = 4096;

/// Rows that share their columns.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) x: *const u8,
    pub(super) y: *mut u8,
    /// Bytes between rows.
    pub(super) x_stride: isize,
    pub(super) y_stride: isize,
    /// One per row, or null: 0.
    pub(super) mean: *const f32,
    /// One per row.
    pub(super) rstd: *const f32,
    /// One per column.
    pub(super) weight: *const f32,
    pub(super) bias: *const f32,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// The result is f32, its rows begin at cache lines, and it goes past the caches.
    pub(super) past: bool,
}

simd_dispatch! {
    /// `silu(x * weight + bias)`, or without SiLU. Elements of both sides are of type `dtype`: F32, F16 or BF16.
    ///
    /// # Safety
    /// `x` is valid for reads over the rows, `y` for writes, which may lie where `x` does, element for element, and not where
    /// it does otherwise; the columns hold a value for each.
    pub(super) unsafe fn by_columns(dtype: DType, silu: bool, g: &Rows) = by_columns_body
}

simd_dispatch! {
    /// `(x - mean) * rstd * weight + bias`, each operation rounded.
    ///
    /// # Safety
    /// As for [`by_columns`]; the scalars hold a value for each row.
    pub(super) unsafe fn by_rows(dtype: DType, g: &Rows) = by_rows_body
}

#[inline(always)]
unsafe fn by_columns_body<S: Simd>(s: S, dtype: DType, silu: bool, g: &Rows) {
    // SAFETY: forwarded.
    unsafe {
        with_element!(dtype, e => if silu { by_columns_of::<S, _, true>(s, e, g) } else { by_columns_of::<S, _, false>(s, e, g) },
            else ())
    }
}

#[inline(always)]
unsafe fn by_rows_body<S: Simd>(s: S, dtype: DType, g: &Rows) {
    // SAFETY: forwarded.
    unsafe { with_element!(dtype, e => by_rows_of(s, e, g), else ()) }
}

/// Stores a vector, past the caches if asked to.
#[inline(always)]
unsafe fn put<S: Simd, E: Element>(s: S, e: E, past: bool, y: *mut u8, at: usize, v: S::F) {
    // SAFETY: forwarded; what goes past the caches is f32 and aligned.
    unsafe { if past { s.stream(y.cast::<f32>().add(at), v) } else { e.store(s, y, at, v) } }
}

#[inline(always)]
unsafe fn by_columns_of<S: Simd, E: Element, const SILU: bool>(s: S, e: E, g: &Rows) {
    let (w, b, l) = (g.weight, g.bias, S::LANES);
    // Rows whose elements come so far behind those at hand.
    let ahead = (AHEAD / (g.cols * E::SIZE).max(1)).max(1) as isize * g.x_stride;
    for r in 0..g.rows as isize {
        let (x, y) = (g.x.wrapping_offset(r * g.x_stride), g.y.wrapping_offset(r * g.y_stride));
        let mut i = 0;
        // SAFETY: columns below `cols` of the row, by the caller's promise.
        unsafe {
            while i + 2 * l <= g.cols {
                let j = i + l;
                for line in (i * E::SIZE..(j + l) * E::SIZE).step_by(64) {
                    s.prefetch(x.wrapping_offset(ahead).wrapping_add(line));
                }
                let (u, v) = (e.load(s, x, i), e.load(s, x, j));
                let u = s.fma(u, s.load(w.add(i)), s.load(b.add(i)));
                let v = s.fma(v, s.load(w.add(j)), s.load(b.add(j)));
                let (u, v) = if SILU { (math::silu(s, u), math::silu(s, v)) } else { (u, v) };
                put(s, e, g.past, y, i, u);
                put(s, e, g.past, y, j, v);
                i += 2 * l;
            }
            while i < g.cols {
                let n = l.min(g.cols - i);
                let u = s.fma(e.load_n(s, x, i, n), s.load_n(w.add(i), n), s.load_n(b.add(i), n));
                e.store_n(s, y, i, if SILU { math::silu(s, u) } else { u }, n);
                i += l;
            }
        }
    }
}

#[inline(always)]
unsafe fn by_rows_of<S: Simd, E: Element>(s: S, e: E, g: &Rows) {
    let mut r = 0;
    // SAFETY: rows below `rows`, by the caller's promise.
    unsafe {
        while r + 2 <= g.rows {
            two_rows(s, e, g, r, r + 1);
            r += 2;
        }
        if r < g.rows {
            two_rows(s, e, g, r, r);
        }
    }
}

/// Rows `p` and `q` together, which read the columns once; the same row twice is written twice.
#[inline(always)]
unsafe fn two_rows<S: Simd, E: Element>(s: S, e: E, g: &Rows, p: usize, q: usize) {
    let (w, b, l) = (g.weight, g.bias, S::LANES);
    let x = |r: usize| g.x.wrapping_offset(r as isize * g.x_stride);
    let y = |r: usize| g.y.wrapping_offset(r as isize * g.y_stride);
    let (xp, xq, yp, yq) = (x(p), x(q), y(p), y(q));
    // SAFETY: columns below `cols` of both rows, by the caller's promise.
    unsafe {
        let mean = |r: usize| if g.mean.is_null() { 0.0 } else { *g.mean.add(r) };
        let (mp, mq, sp, sq) = (s.splat(mean(p)), s.splat(mean(q)), s.splat(*g.rstd.add(p)), s.splat(*g.rstd.add(q)));
        let mut i = 0;
        while i + l <= g.cols {
            let (u, v) = (e.load(s, xp, i), e.load(s, xq, i));
            let (w, b) = (s.load(w.add(i)), s.load(b.add(i)));
            let u = s.add(s.mul(s.mul(s.sub(u, mp), sp), w), b);
            let v = s.add(s.mul(s.mul(s.sub(v, mq), sq), w), b);
            put(s, e, g.past, yp, i, u);
            put(s, e, g.past, yq, i, v);
            i += l;
        }
        if i < g.cols {
            let n = g.cols - i;
            let (u, v) = (e.load_n(s, xp, i, n), e.load_n(s, xq, i, n));
            let (w, b) = (s.load_n(w.add(i), n), s.load_n(b.add(i), n));
            e.store_n(s, yp, i, s.add(s.mul(s.mul(s.sub(u, mp), sp), w), b), n);
            e.store_n(s, yq, i, s.add(s.mul(s.mul(s.sub(v, mq), sq), w), b), n);
        }
    }
}
