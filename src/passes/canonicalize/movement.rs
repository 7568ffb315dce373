//! Rules of views, concatenation and padding.

use super::Rule;
use crate::ir::{Dim, Editor, Node, Op, ValueId};

pub(super) const RESHAPE: &[Rule] =
    &[("same shape", same_shape), ("reshape of reshape", reshape_of_reshape), ("uniform value", uniform)];
pub(super) const PERMUTE: &[Rule] = &[
    ("identity", identity_permute),
    ("permute of permute", permute_of_permute),
    ("moves only size 1", permute_as_reshape),
    ("uniform value", uniform),
];
pub(super) const EXPAND: &[Rule] =
    &[("same shape", same_shape), ("expand of expand", expand_of_expand), ("uniform value", uniform)];
pub(super) const SLICE: &[Rule] = &[
    ("whole", same_shape),
    ("slice of slice", slice_of_slice),
    ("slice of cat", slice_of_cat),
    ("slice of expand", slice_of_expand),
    ("uniform value", uniform),
];
pub(super) const CAT: &[Rule] = &[
    ("empty operands", cat_without_empty),
    ("one operand", cat_of_one),
    ("cat of cat", cat_of_cat),
    ("neighbouring slices", cat_of_neighbours),
];
pub(super) const PAD: &[Rule] = &[("nothing to do", pad_nothing)];

/// Views that change nothing: a slice as long as its operand starts at 0 and has step 1.
fn same_shape(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let x = node.inputs[0];
    (edit.graph().ty(x).shape == node.ty.shape).then_some(x)
}

fn reshape_of_reshape(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let inner = edit.graph().node(node.inputs[0]);
    let x = inner.inputs.first().copied()?;
    let adds_units = inner.op == Op::Expand && inner.ty.numel() == edit.graph().ty(x).numel();
    if inner.op != Op::Reshape && !adds_units {
        return None;
    }
    Some(edit.emit(Op::Reshape, &[x], node.ty.dtype, node.ty.shape.clone()))
}

/// A view of a `full` is a `full`.
fn uniform(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Full { value } = *edit.graph().op(node.inputs[0]) else { return None };
    Some(edit.emit(Op::Full { value }, &[], node.ty.dtype, node.ty.shape.clone()))
}

fn identity_permute(_: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Permute { dims } = &node.op else { return None };
    dims.is_sorted().then(|| node.inputs[0])
}

fn permute_of_permute(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Permute { dims } = &node.op else { return None };
    let inner = edit.graph().node(node.inputs[0]);
    let Op::Permute { dims: first } = &inner.op else { return None };
    let (x, dims) = (inner.inputs[0], dims.iter().map(|d| first[*d]).collect());
    Some(edit.emit(Op::Permute { dims }, &[x], node.ty.dtype, node.ty.shape.clone()))
}

fn permute_as_reshape(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Permute { dims } = &node.op else { return None };
    let shape = &edit.graph().ty(node.inputs[0]).shape;
    let moved: Vec<usize> = dims.iter().copied().filter(|d| !shape[*d].is(1)).collect();
    moved.is_sorted().then(|| edit.emit(Op::Reshape, &node.inputs, node.ty.dtype, node.ty.shape.clone()))
}

fn expand_of_expand(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let inner = edit.graph().node(node.inputs[0]);
    if inner.op != Op::Expand {
        return None;
    }
    let x = inner.inputs[0];
    Some(edit.emit(Op::Expand, &[x], node.ty.dtype, node.ty.shape.clone()))
}

fn slice_of_slice(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Slice { dim, start, step } = &node.op else { return None };
    let inner = edit.graph().node(node.inputs[0]);
    let Op::Slice { dim: inner_dim, start: inner_start, step: inner_step } = &inner.op else { return None };
    if inner_dim != dim {
        return None;
    }
    let start = inner_start + &(start * &Dim::constant(*inner_step));
    let op = Op::Slice { dim: *dim, start, step: step * inner_step };
    let x = inner.inputs[0];
    Some(edit.emit(op, &[x], node.ty.dtype, node.ty.shape.clone()))
}

/// A slice that lies within one operand of a `cat`.
fn slice_of_cat(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Slice { dim, start, step: 1 } = &node.op else { return None };
    let g = edit.graph();
    let inner = g.node(node.inputs[0]);
    if inner.op != (Op::Cat { dim: *dim }) {
        return None;
    }
    let mut offset = Dim::constant(0);
    for &x in &inner.inputs {
        let size = &g.ty(x).shape[*dim];
        let start_in_x = start - &offset;
        let left = &(size - &start_in_x) - &node.ty.shape[*dim];
        let not_negative = |d: &Dim| d.as_constant().is_some_and(|c| c >= 0);
        if not_negative(&start_in_x) && not_negative(&left) {
            let op = Op::Slice { dim: *dim, start: start_in_x, step: 1 };
            return Some(edit.emit(op, &[x], node.ty.dtype, node.ty.shape.clone()));
        }
        offset = &offset + size;
    }
    None
}

/// A slice along a dimension that `expand` made.
fn slice_of_expand(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Slice { dim, .. } = &node.op else { return None };
    let g = edit.graph();
    let inner = g.node(node.inputs[0]);
    if inner.op != Op::Expand {
        return None;
    }
    let x = inner.inputs[0];
    let missing = inner.ty.rank() - g.ty(x).rank();
    let made = *dim < missing || g.ty(x).shape[dim - missing].is(1);
    made.then(|| edit.emit(Op::Expand, &[x], node.ty.dtype, node.ty.shape.clone()))
}

fn cat_without_empty(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Cat { dim } = &node.op else { return None };
    let is_empty = |v: &ValueId| edit.graph().ty(*v).shape.get(*dim).is_some_and(|d| d.is(0));
    let rest: Vec<ValueId> = node.inputs.iter().copied().filter(|v| !is_empty(v)).collect();
    if rest.is_empty() || rest.len() == node.inputs.len() {
        return None;
    }
    Some(edit.emit(node.op.clone(), &rest, node.ty.dtype, node.ty.shape.clone()))
}

fn cat_of_one(_: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    (node.inputs.len() == 1).then(|| node.inputs[0])
}

fn cat_of_cat(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let mut flat = Vec::new();
    for &x in &node.inputs {
        match g.op(x) == &node.op && g.ty(x).dtype == node.ty.dtype {
            true => flat.extend(&g.node(x).inputs),
            false => flat.push(x),
        }
    }
    let same_types = flat.iter().all(|x| g.ty(*x).dtype == node.ty.dtype);
    (flat.len() > node.inputs.len() && same_types)
        .then(|| edit.emit(node.op.clone(), &flat, node.ty.dtype, node.ty.shape.clone()))
}

/// Slices that lie side by side in one value, as blocks leave them that split what the next one joins again, are one slice.
fn cat_of_neighbours(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Cat { dim } = &node.op else { return None };
    let g = edit.graph();
    let slice = |v: ValueId| {
        let inner = g.node(v);
        match &inner.op {
            Op::Slice { dim: own, start, step: 1 } if own == dim => Some((inner.inputs[0], start.clone())),
            _ => None,
        }
    };
    // The first two that do, if there are any: the rule is tried again on what it makes.
    let follows = |pair: &[ValueId]| {
        let ((x, start), (y, next)) = (slice(pair[0])?, slice(pair[1])?);
        let size = &g.ty(pair[0]).shape[*dim];
        (x == y && next == &start + size).then(|| (x, start, size + &g.ty(pair[1]).shape[*dim]))
    };
    let (at, (x, start, size)) =
        node.inputs.windows(2).enumerate().find_map(|(at, pair)| Some((at, follows(pair)?)))?;
    let mut shape = g.ty(node.inputs[at]).shape.clone();
    shape[*dim] = size;
    let joined = edit.emit(Op::Slice { dim: *dim, start, step: 1 }, &[x], node.ty.dtype, shape);
    let joined = same_shape(edit, &edit.graph().node(joined).clone()).unwrap_or(joined);
    let inputs: Vec<ValueId> =
        node.inputs[..at].iter().copied().chain([joined]).chain(node.inputs[at + 2..].iter().copied()).collect();
    Some(edit.emit(node.op.clone(), &inputs, node.ty.dtype, node.ty.shape.clone()))
}

fn pad_nothing(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let x = node.inputs[0];
    match &node.op {
        Op::Pad { .. } => (edit.graph().ty(x).shape == node.ty.shape).then_some(x),
        Op::Flip { dims } => dims.iter().all(|d| node.ty.shape[*d].is(1)).then_some(x),
        _ => None,
    }
}
