//! Rules of norms and softmax: one form that kernels read.

use super::Rule;
use crate::ir::{Dim, Editor, Node, Op, ValueId};

pub(super) const NORM: &[Rule] = &[("one normalised dimension", one_normalised_dimension)];
pub(super) const SOFTMAX: &[Rule] = &[("softmax over the last dimension", softmax_of_last)];

/// A norm over the last `n` dimensions is one over their product.
fn one_normalised_dimension(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let (op, n) = match &node.op {
        Op::LayerNorm { normalized_ndim, eps } => (Op::LayerNorm { normalized_ndim: 1, eps: *eps }, *normalized_ndim),
        &Op::RmsNorm { normalized_ndim, eps, floor } => {
            (Op::RmsNorm { normalized_ndim: 1, eps, floor }, normalized_ndim)
        }
        _ => return None,
    };
    if n < 2 {
        return None;
    }
    let shape = flat(&node.ty.shape, n);
    let mut operands = Vec::with_capacity(node.inputs.len());
    for &operand in &node.inputs {
        let ty = edit.graph().ty(operand).clone();
        operands.push(edit.emit(Op::Reshape, &[operand], ty.dtype, flat(&ty.shape, n)));
    }
    let normed = edit.emit(op, &operands, node.ty.dtype, shape);
    Some(edit.emit(Op::Reshape, &[normed], node.ty.dtype, node.ty.shape.clone()))
}

/// The shape with its last `n` dimensions as one.
fn flat(shape: &[Dim], n: usize) -> Vec<Dim> {
    let (outer, inner) = shape.split_at(shape.len() - n);
    outer.iter().cloned().chain(std::iter::once(Dim::product(inner))).collect()
}

fn softmax_of_last(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Softmax { dim } = node.op else { return None };
    let last = node.ty.rank() - 1;
    if dim == last {
        return None;
    }
    // A swap is its own inverse.
    let mut dims: Vec<usize> = (0..=last).collect();
    dims.swap(dim, last);
    let mut shape = node.ty.shape.clone();
    shape.swap(dim, last);
    let from = edit.graph().ty(node.inputs[0]).dtype;
    let swapped = edit.emit(Op::Permute { dims: dims.clone() }, &[node.inputs[0]], from, shape.clone());
    let softmax = edit.emit(Op::Softmax { dim: last }, &[swapped], node.ty.dtype, shape);
    Some(edit.emit(Op::Permute { dims }, &[softmax], node.ty.dtype, node.ty.shape.clone()))
}
