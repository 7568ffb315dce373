//! Small questions that recognisers ask about a value and the nodes behind it.

use crate::ir::{BinaryOp, DType, Graph, Op, ReduceOp, UnaryOp, ValueId};

/// Whether every value of `narrow` is a value of `wide`.
pub fn holds(wide: DType, narrow: DType) -> bool {
    use DType::{BF16, Bool, F16, F32, F64, I8, I32, I64, U8};
    match narrow {
        Bool => true,
        U8 => !matches!(wide, Bool | I8),
        I8 => !matches!(wide, Bool | U8),
        I32 => matches!(wide, I32 | I64 | F64),
        I64 => wide == I64,
        F16 => matches!(wide, F16 | F32 | F64),
        BF16 => matches!(wide, BF16 | F32 | F64),
        F32 => matches!(wide, F32 | F64),
        F64 => wide == F64,
    }
}

/// The value under conversions between floats that lose nothing.
pub fn unwidened(graph: &Graph, v: ValueId) -> ValueId {
    let mut v = v;
    while let Some(x) = operand_of(graph, v, &Op::Convert) {
        let (from, to) = (graph.ty(x).dtype, graph.ty(v).dtype);
        if !from.is_float() || !to.is_float() || !holds(to, from) {
            break;
        }
        v = x;
    }
    v
}

/// The first operand if the node is this op.
pub fn operand_of(graph: &Graph, v: ValueId, op: &Op) -> Option<ValueId> {
    let node = graph.node(v);
    (node.op == *op).then(|| node.inputs[0])
}

/// The operand if the node is this function.
pub fn unary(graph: &Graph, v: ValueId, op: UnaryOp) -> Option<ValueId> {
    operand_of(graph, v, &Op::Unary(op))
}

/// The operands if the node is this op.
pub fn binary(graph: &Graph, v: ValueId, op: BinaryOp) -> Option<(ValueId, ValueId)> {
    let node = graph.node(v);
    (node.op == Op::Binary(op)).then(|| (node.inputs[0], node.inputs[1]))
}

/// The operands of a commutative op in both orders.
pub fn either_order(graph: &Graph, v: ValueId, op: BinaryOp) -> [Option<(ValueId, ValueId)>; 2] {
    let operands = binary(graph, v, op);
    [operands, operands.map(|(a, b)| (b, a))]
}

/// The left operand and the constant on the right.
pub fn with_scalar(graph: &Graph, v: ValueId, op: BinaryOp) -> Option<(ValueId, f64)> {
    let (x, c) = binary(graph, v, op)?;
    Some((x, graph.as_scalar(c)?))
}

/// The operand of a reduction over the last `n` dimensions, which stay as size 1, and `n`.
pub fn reduced_last(graph: &Graph, v: ValueId, op: ReduceOp) -> Option<(ValueId, usize)> {
    let node = graph.node(v);
    let Op::Reduce { op: found, dims, keepdim: true } = &node.op else { return None };
    if *found != op {
        return None;
    }
    let rank = graph.ty(node.inputs[0]).rank();
    let mut dims = dims.clone();
    dims.sort_unstable();
    let n = dims.len();
    (n > 0 && dims.iter().copied().eq(rank - n..rank)).then(|| (node.inputs[0], n))
}

/// `a` and `b` agree to the digits that a constant is written with.
pub fn is_about(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-3 * b.abs()
}
