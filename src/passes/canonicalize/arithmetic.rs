//! Rules of pointwise ops and reductions.

use super::Rule;
use crate::analysis::pattern::holds;
use crate::analysis::shape::broadcast;
use crate::ir::{BinaryOp, DType, Editor, Node, Op, ReduceOp, UnaryOp, ValueId, ValueType};

pub(super) const UNARY: &[Rule] = &[("double negation", double_negation), ("operand without expand", strip_expand)];
pub(super) const BINARY: &[Rule] = &[
    ("scalar to the right", scalar_to_the_right),
    ("neutral element", neutral_element),
    ("power", power),
    ("division by a power of two", division_by_power_of_two),
    ("sum with a negation", sum_with_negation),
    ("operand without expand", strip_expand),
];
pub(super) const WHERE: &[Rule] = &[("equal branches", equal_branches), ("operand without expand", strip_expand)];
pub(super) const CONVERT: &[Rule] = &[
    ("same type", same_type),
    ("exact detour", exact_detour),
    ("constant", constant),
    ("order", convert_before_expand),
];
pub(super) const REDUCE: &[Rule] = &[("nothing to reduce", nothing_to_reduce)];

/// `x` as a value of type `ty`, which it equals up to conversion and broadcasting.
fn pass_through(edit: &mut Editor<'_>, x: ValueId, ty: &ValueType) -> ValueId {
    let mut x = x;
    if edit.graph().ty(x).dtype != ty.dtype {
        let shape = edit.graph().ty(x).shape.clone();
        x = edit.emit(Op::Convert, &[x], ty.dtype, shape);
    }
    if edit.graph().ty(x).shape != ty.shape {
        x = edit.emit(Op::Expand, &[x], ty.dtype, ty.shape.clone());
    }
    x
}

fn double_negation(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let inner = edit.graph().node(node.inputs[0]);
    let is_neg = |op: &Op| *op == Op::Unary(UnaryOp::Neg);
    (is_neg(&node.op) && is_neg(&inner.op) && inner.ty.dtype == node.ty.dtype).then(|| inner.inputs[0])
}

fn is_commutative(op: BinaryOp) -> bool {
    use BinaryOp::{
        Add, BitwiseAnd, BitwiseOr, BitwiseXor, Eq, LogicalAnd, LogicalOr, LogicalXor, Maximum, Minimum, Mul, Ne,
    };
    let ops =
        [Add, Mul, Maximum, Minimum, Eq, Ne, LogicalAnd, LogicalOr, LogicalXor, BitwiseAnd, BitwiseOr, BitwiseXor];
    ops.contains(&op)
}

fn scalar_to_the_right(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Binary(op) = node.op else { return None };
    let (a, b) = (node.inputs[0], node.inputs[1]);
    let g = edit.graph();
    if !is_commutative(op) || g.as_scalar(a).is_none() || g.as_scalar(b).is_some() {
        return None;
    }
    Some(edit.emit(node.op.clone(), &[b, a], node.ty.dtype, node.ty.shape.clone()))
}

fn neutral_element(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Binary(op) = node.op else { return None };
    let (x, c) = (node.inputs[0], edit.graph().as_scalar(node.inputs[1])?);
    let neutral = match op {
        BinaryOp::Add | BinaryOp::Sub => c == 0.0,
        BinaryOp::Mul | BinaryOp::Pow => c == 1.0,
        BinaryOp::Div => c == 1.0 && node.ty.dtype.is_float(),
        _ => false,
    };
    neutral.then(|| pass_through(edit, x, &node.ty))
}

fn power(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let x = node.inputs[0];
    let g = edit.graph();
    let exponent = g.as_scalar(node.inputs[1])?;
    if node.op != Op::Binary(BinaryOp::Pow) || !node.ty.dtype.is_float() || g.ty(x).shape != node.ty.shape {
        return None;
    }
    let op = match exponent {
        2.0 => return Some(edit.emit(Op::Binary(BinaryOp::Mul), &[x, x], node.ty.dtype, node.ty.shape.clone())),
        0.5 => UnaryOp::Sqrt,
        -0.5 => UnaryOp::Rsqrt,
        -1.0 => UnaryOp::Reciprocal,
        _ => return None,
    };
    (g.ty(x).dtype == node.ty.dtype).then(|| edit.emit(Op::Unary(op), &[x], node.ty.dtype, node.ty.shape.clone()))
}

fn division_by_power_of_two(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let divisor = edit.graph().as_scalar(node.inputs[1])?;
    // Up to 2^14 the reciprocal is a normal number in every type.
    let exact = divisor.abs() <= 16384.0 && divisor.abs() >= 1.0 / 16384.0 && divisor.abs().log2().fract() == 0.0;
    if node.op != Op::Binary(BinaryOp::Div) || !node.ty.dtype.is_float() || !exact {
        return None;
    }
    let ty = edit.graph().ty(node.inputs[1]).clone();
    let dtype = if ty.dtype.is_float() { ty.dtype } else { DType::F64 };
    let reciprocal = edit.emit(Op::Full { value: 1.0 / divisor }, &[], dtype, ty.shape);
    Some(edit.emit(Op::Binary(BinaryOp::Mul), &[node.inputs[0], reciprocal], node.ty.dtype, node.ty.shape.clone()))
}

/// `x + (-y)` and `x - (-y)`.
fn sum_with_negation(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let op = match node.op {
        Op::Binary(BinaryOp::Add) => BinaryOp::Sub,
        Op::Binary(BinaryOp::Sub) => BinaryOp::Add,
        _ => return None,
    };
    let g = edit.graph();
    let right = g.node(node.inputs[1]);
    if right.op != Op::Unary(UnaryOp::Neg)
        || right.ty.dtype != g.ty(right.inputs[0]).dtype
        || !right.ty.dtype.is_float()
    {
        return None;
    }
    let operands = [node.inputs[0], right.inputs[0]];
    Some(edit.emit(Op::Binary(op), &operands, node.ty.dtype, node.ty.shape.clone()))
}

fn equal_branches(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let (a, b) = (node.inputs[1], node.inputs[2]);
    (a == b).then(|| pass_through(edit, a, &node.ty))
}

/// Pointwise ops broadcast by themselves.
fn strip_expand(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let mut inputs = node.inputs.clone();
    for i in 0..inputs.len() {
        if g.op(inputs[i]) != &Op::Expand {
            continue;
        }
        let kept = inputs[i];
        inputs[i] = g.node(kept).inputs[0];
        if broadcast(inputs.iter().map(|i| g.ty(*i).shape.as_slice())).as_ref() != Some(&node.ty.shape) {
            inputs[i] = kept;
        }
    }
    (inputs != node.inputs).then(|| edit.emit(node.op.clone(), &inputs, node.ty.dtype, node.ty.shape.clone()))
}

fn same_type(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let x = node.inputs[0];
    (edit.graph().ty(x).dtype == node.ty.dtype).then_some(x)
}

/// `convert(convert(x))` where the type between holds every value of x's.
fn exact_detour(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let inner = g.node(node.inputs[0]);
    if inner.op != Op::Convert || !holds(inner.ty.dtype, g.ty(inner.inputs[0]).dtype) {
        return None;
    }
    let x = inner.inputs[0];
    Some(edit.emit(Op::Convert, &[x], node.ty.dtype, node.ty.shape.clone()))
}

fn constant(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let x = node.inputs[0];
    let Op::Full { value } = *g.op(x) else { return None };
    // The intermediate type's rounding is part of the value.
    if !holds_value(g.ty(x).dtype, value) {
        return None;
    }
    Some(edit.emit(Op::Full { value }, &[], node.ty.dtype, node.ty.shape.clone()))
}

fn holds_value(dtype: DType, value: f64) -> bool {
    match dtype {
        DType::F64 => true,
        DType::F32 => f64::from(value as f32) == value || value.is_nan(),
        DType::F16 => half::f16::from_f64(value).to_f64() == value || value.is_nan(),
        DType::BF16 => half::bf16::from_f64(value).to_f64() == value || value.is_nan(),
        DType::Bool => value == 0.0 || value == 1.0,
        DType::U8 => (0.0..=255.0).contains(&value) && value.fract() == 0.0,
        DType::I8 => (-128.0..=127.0).contains(&value) && value.fract() == 0.0,
        DType::I32 | DType::I64 => value.abs() <= f64::from(i32::MAX) && value.fract() == 0.0,
    }
}

/// Converts few elements rather than many.
fn convert_before_expand(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let g = edit.graph();
    let inner = g.node(node.inputs[0]);
    if inner.op != Op::Expand {
        return None;
    }
    let (x, shape) = (inner.inputs[0], g.ty(inner.inputs[0]).shape.clone());
    let converted = edit.emit(Op::Convert, &[x], node.ty.dtype, shape);
    Some(edit.emit(Op::Expand, &[converted], node.ty.dtype, node.ty.shape.clone()))
}

fn nothing_to_reduce(edit: &mut Editor<'_>, node: &Node) -> Option<ValueId> {
    let Op::Reduce { op, dims, .. } = &node.op else { return None };
    let x = node.inputs[0];
    let ty = edit.graph().ty(x);
    let keeps = matches!(op, ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Amax | ReduceOp::Amin | ReduceOp::Prod);
    if !keeps || ty.dtype != node.ty.dtype || !dims.iter().all(|d| ty.shape[*d].is(1)) {
        return None;
    }
    Some(edit.emit(Op::Reshape, &[x], node.ty.dtype, node.ty.shape.clone()))
}
