//! Finds attention that models write out.
//!
//! *What:* `matmul(softmax(matmul(q, k^T) * scale + mask), v)`, with or without scale, mask and conversions around the
//! softmax, becomes `scaled_dot_product_attention`. *Why faster:* the scores never reach memory; at 4096 tokens they
//! are fifty times larger than everything else in the block. *Requires:* canonical form. *Guarantees:* the scores
//! and probabilities had no other reader; with `precision=eager`, 16-bit formulas stay, because eager rounds inside.
//!
//! ```text
//! %3: f32[2,4,7,7] = matmul(%0, permute(%1))
//! %4: f32[2,4,7,7] = add(%3, %bias)
//! %5: f32[2,4,7,7] = softmax(%4) {dim=3}
//! %6: f32[2,4,7,16] = matmul(%5, %2)     ->   scaled_dot_product_attention(%0, %1, %2, %bias) {scale=1.0}
//! ```

use super::{Pass, PassCtx, Precision};
use crate::analysis::pattern::{either_order, operand_of, with_scalar};
use crate::error::Result;
use crate::ir::{BinaryOp, Changed, DType, Dim, Editor, Graph, Op, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "recognise_attention", run };

fn run(graph: &Graph, ctx: &PassCtx) -> Result<(Graph, Changed)> {
    let mut edit = Editor::new(graph, PASS.name);
    let users = graph.users();
    let mut is_output = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| is_output[o.index()] = true);
    let is_private = |v: ValueId| users[v.index()].len() == 1 && !is_output[v.index()];
    for v in graph.values() {
        edit.copy(v);
        if ctx.precision == Precision::Eager && graph.ty(v).dtype.is_half() {
            continue;
        }
        let Some(found) = attention(graph, v, &is_private) else { continue };
        let new = emit(&mut edit, graph, v, &found);
        edit.replace(v, new, "attention");
    }
    Ok(edit.finish())
}

struct Attention {
    query: ValueId,
    /// `[..., E, S]`, as the second operand of the first product.
    key_transposed: ValueId,
    value: ValueId,
    mask: Option<ValueId>,
    scale: f64,
}

fn attention(g: &Graph, v: ValueId, is_private: &dyn Fn(ValueId) -> bool) -> Option<Attention> {
    let (mut inner, value) = operands(g, v, &Op::Matmul)?;
    inner = through_convert(g, inner, is_private)?;
    let rank = g.ty(inner).rank();
    let scores = operand_of(g, inner, &Op::Softmax { dim: rank.checked_sub(1)? })?;
    let scores = through_convert(g, scores, is_private)?;
    if !is_private(inner) {
        return None;
    }
    let masked = either_order(g, scores, BinaryOp::Add).into_iter().flatten();
    let candidates = masked.map(|(s, mask)| (s, Some(mask))).chain(std::iter::once((scores, None)));
    candidates.into_iter().find_map(|(scores, mask)| {
        let scores = through_convert(g, scores, is_private)?;
        let (product, scale) = scaled(g, scores);
        let (query, key_transposed) = operands(g, product, &Op::Matmul)?;
        let found = Attention { query, key_transposed, value, mask, scale };
        (is_private(product) && is_private(scores) && fits(g, v, product, &found)).then_some(found)
    })
}

fn operands(g: &Graph, v: ValueId, op: &Op) -> Option<(ValueId, ValueId)> {
    let node = g.node(v);
    (node.op == *op).then(|| (node.inputs[0], node.inputs[1]))
}

/// The value under a conversion between floats; both must have no other reader.
fn through_convert(g: &Graph, v: ValueId, is_private: &dyn Fn(ValueId) -> bool) -> Option<ValueId> {
    match operand_of(g, v, &Op::Convert) {
        Some(x) if g.ty(x).dtype.is_float() => is_private(v).then_some(x),
        Some(_) => None,
        None => Some(v),
    }
}

/// A product with a constant, as `(x, constant)`.
fn scaled(g: &Graph, v: ValueId) -> (ValueId, f64) {
    let product = with_scalar(g, v, BinaryOp::Mul);
    let quotient = || with_scalar(g, v, BinaryOp::Div).map(|(x, c)| (x, 1.0 / c));
    product.or_else(quotient).filter(|(_, c)| c.is_finite()).unwrap_or((v, 1.0))
}

/// Types, ranks and broadcasting that the op takes.
fn fits(g: &Graph, v: ValueId, product: ValueId, a: &Attention) -> bool {
    let dtype = g.ty(a.query).dtype;
    let same = [a.key_transposed, a.value, v].iter().all(|o| g.ty(*o).dtype == dtype);
    let rank = g.ty(v).rank();
    let ranks = [a.query, a.key_transposed, a.value, product].iter().all(|o| g.ty(*o).rank() == rank);
    let batch = |o: ValueId| &g.ty(o).shape[..rank - 2];
    let batches = ranks && [a.query, a.key_transposed, a.value].iter().all(|o| batch(*o) == batch(v));
    let mask = a.mask.is_none_or(|m| {
        let ty = g.ty(m);
        let stretches = |m: &Dim, s: &Dim| m == s || m.is(1);
        (2..=rank).contains(&ty.rank())
            && (ty.dtype == DType::F32 || ty.dtype == dtype)
            && ty.shape.iter().rev().zip(g.ty(product).shape.iter().rev()).all(|(m, s)| stretches(m, s))
    });
    same && rank >= 3 && batches && mask && dtype != DType::F64
}

fn emit(edit: &mut Editor<'_>, g: &Graph, v: ValueId, a: &Attention) -> ValueId {
    let ty = g.ty(a.key_transposed).clone();
    let rank = ty.rank();
    let (mut dims, mut shape): (Vec<usize>, _) = ((0..rank).collect(), ty.shape);
    dims.swap(rank - 2, rank - 1);
    shape.swap(rank - 2, rank - 1);
    let key = edit.get(a.key_transposed);
    let key = edit.at(v).emit(Op::Permute { dims }, &[key], ty.dtype, shape);
    let mut operands = vec![edit.get(a.query), key, edit.get(a.value)];
    operands.extend(a.mask.map(|m| edit.get(m)));
    let op = Op::ScaledDotProductAttention { is_causal: false, scale: a.scale };
    let ty = g.ty(v).clone();
    edit.emit(op, &operands, ty.dtype, ty.shape)
}
