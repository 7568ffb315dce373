//! Rules of contractions.

use super::Rule;
use crate::ir::{Dim, Editor, Node, Op, ValueId};

pub(super) const MATMUL: &[Rule] = &[("transposed matrix", matmul_as_linear)];
pub(super) const CONVOLUTION: &[Rule] = &[("one dimension", one_dimension)];
pub(super) const ATTENTION: &[Rule] = &[("mask without expand", mask_without_expand)];

/// `matmul(x, permute(w))` with a matrix `w` is what `linear` means, and its kernels read rows of `w`.
fn matmul_as_linear(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let (x, right) = (node.inputs[0], g.node(node.inputs[1]));
    let Op::Permute { dims } = &right.op else { return None };
    if dims != &[1, 0] || g.ty(x).rank() < 2 || g.ty(x).dtype != right.ty.dtype {
        return None;
    }
    let w = right.inputs[0];
    Some(edit.emit(Op::Linear, &[x, w], node.ty.dtype, node.ty.shape.clone()))
}

/// A convolution over one dimension as one over two, the first of size 1, so that backends know two and three.
fn one_dimension(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Convolution { stride, padding, dilation, groups, channels_last } = &node.op else { return None };
    if stride.len() != 1 || *channels_last {
        return None;
    }
    let op = Op::Convolution {
        stride: vec![1, stride[0]],
        padding: vec![0, padding[0]],
        dilation: vec![1, dilation[0]],
        groups: *groups,
        channels_last: false,
    };
    let dtype = node.ty.dtype;
    let mut operands = node.inputs.clone();
    for operand in operands.iter_mut().take(2) {
        let ty = edit.graph().ty(*operand).clone();
        *operand = edit.emit(Op::Reshape, &[*operand], ty.dtype, with_unit_at_2(&ty.shape));
    }
    let wide = edit.emit(op, &operands, dtype, with_unit_at_2(&node.ty.shape));
    Some(edit.emit(Op::Reshape, &[wide], dtype, node.ty.shape.clone()))
}

fn with_unit_at_2(shape: &[Dim]) -> Vec<Dim> {
    let mut shape = shape.to_vec();
    shape.insert(2, Dim::constant(1));
    shape
}

/// Attention broadcasts its mask by itself.
fn mask_without_expand(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let mask = g.node(*node.inputs.get(3)?);
    if mask.op != Op::Expand || g.ty(mask.inputs[0]).rank() < 2 {
        return None;
    }
    let mut operands = node.inputs.clone();
    operands[3] = mask.inputs[0];
    Some(edit.emit(node.op.clone(), &operands, node.ty.dtype, node.ty.shape.clone()))
}
