//! Finds rotations of pairs that models write out: rotary embeddings.
//!
//! *What:* of the pairs in the last dimension, `cat([-second, first])` becomes `rotate_pairs`. *Why faster:* what is sliced and
//! joined goes through memory; the rotation stays in registers, in the norm or the loop around it. *Requires:* canonical form,
//! and a backend whose loops rotate ([`PassCtx::rotates_pairs`]). *Guarantees:* the same bits.
//!
//! ```text
//! %1: f32[4,8,2] = reshape(%0)
//! %2: f32[4,8,1] = slice(%1) {dim=2, start=0, step=1}
//! %3: f32[4,8,1] = slice(%1) {dim=2, start=1, step=1}
//! %4: f32[4,8,1] = neg(%3)                                 %1: f32[4,16] = rotate_pairs(%0)
//! %5: f32[4,8,2] = cat(%4, %2) {dim=2}              ->     %2: f32[4,8,2] = reshape(%1)
//! ```

use super::{Pass, PassCtx};
use crate::analysis::pattern::unary;
use crate::error::Result;
use crate::ir::{Changed, DType, Dim, Editor, Graph, Op, UnaryOp, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "recognise_rotations", run };

fn run(graph: &Graph, ctx: &PassCtx) -> Result<(Graph, Changed)> {
    if !ctx.rotates_pairs {
        return Ok((graph.clone(), Changed::No));
    }
    let mut edit = Editor::new(graph, PASS.name);
    for v in graph.values() {
        edit.copy(v);
        let Some(pairs) = rotated(graph, v) else { continue };
        let ty = graph.ty(v).clone();
        let lead = &ty.shape[..ty.rank() - 2];
        let flat: Vec<Dim> = lead.iter().cloned().chain([&ty.shape[ty.rank() - 2] * &Dim::constant(2)]).collect();
        let source = graph
            .node(pairs)
            .inputs
            .first()
            .copied()
            .filter(|x| *graph.op(pairs) == Op::Reshape && graph.ty(*x).shape == flat);
        let x = match source {
            Some(x) => edit.get(x),
            None => {
                let pairs = edit.get(pairs);
                edit.at(v).emit(Op::Reshape, &[pairs], ty.dtype, flat.clone())
            }
        };
        let rotated = edit.at(v).emit(Op::Unary(UnaryOp::RotatePairs), &[x], ty.dtype, flat);
        let new = edit.at(v).emit(Op::Reshape, &[rotated], ty.dtype, ty.shape);
        edit.replace(v, new, "pairs");
    }
    Ok(edit.finish())
}

/// The pairs `[..., 2]` that a value is the rotation of.
fn rotated(g: &Graph, v: ValueId) -> Option<ValueId> {
    let (node, ty) = (g.node(v), g.ty(v));
    let last = ty.rank().checked_sub(1).filter(|last| *last > 0)?;
    let is_float = matches!(ty.dtype, DType::F16 | DType::BF16 | DType::F32);
    if node.op != (Op::Cat { dim: last }) || !ty.shape[last].is(2) || !is_float {
        return None;
    }
    let [second, first] = node.inputs.as_slice() else { return None };
    let second = unary(g, under_reshapes(g, *second), UnaryOp::Neg)?;
    let (a, b) = (half(g, *first, 0)?, half(g, second, 1)?);
    (a == b && g.ty(a).shape == ty.shape && g.ty(a).dtype == ty.dtype).then_some(a)
}

fn under_reshapes(g: &Graph, v: ValueId) -> ValueId {
    let mut v = v;
    while *g.op(v) == Op::Reshape {
        v = g.node(v).inputs[0];
    }
    v
}

/// What `v` is element `at` of each pair of, in order.
fn half(g: &Graph, v: ValueId, at: i64) -> Option<ValueId> {
    let v = under_reshapes(g, v);
    let node = g.node(v);
    let Op::Slice { dim, start, .. } = &node.op else { return None };
    let pairs = node.inputs[0];
    let is_last = dim + 1 == g.ty(pairs).rank();
    (is_last && start.is(at) && node.ty.shape[*dim].is(1)).then_some(pairs)
}
