//! In which arithmetic a pointwise node is computed, and therefore which nodes can share a loop.
//!
//! All instructions of one [`Body`](crate::kernel_ir::Body) run in one register type. 16-bit and 32-bit floats live in f32
//! registers, and so do truth values (0 and 1): a mask is compared, combined and selected by in the loop that uses it.
//! f64 needs f64 registers. Index arithmetic needs integers: f32 registers hold them only up to 2^24.

use crate::ir::{BinaryOp, DType, Graph, Op, UnaryOp, ValueId};
use crate::kernel_ir::Group;

/// Register type of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ComputeClass {
    /// f32 registers: f16, bf16, f32 and bool; integer operands are converted when loaded.
    F32,
    /// f64 registers.
    F64,
    /// i64 registers.
    I64,
}

impl ComputeClass {
    /// The class in which values of `dtype` are computed.
    pub const fn of(dtype: DType) -> Self {
        match dtype {
            DType::F16 | DType::BF16 | DType::F32 | DType::Bool => ComputeClass::F32,
            DType::F64 => ComputeClass::F64,
            DType::U8 | DType::I8 | DType::I32 | DType::I64 => ComputeClass::I64,
        }
    }
}

/// The class of a pointwise node.
pub fn node_class(graph: &Graph, value: ValueId) -> ComputeClass {
    let node = graph.node(value);
    match &node.op {
        Op::Convert => conversion_class(graph.ty(node.inputs[0]).dtype, node.ty.dtype),
        Op::Binary(op) if op.is_predicate() => operand_class(graph, &node.inputs),
        Op::Unary(UnaryOp::Isnan | UnaryOp::Isinf | UnaryOp::LogicalNot) => operand_class(graph, &node.inputs),
        Op::Binary(BinaryOp::BitwiseAnd | BinaryOp::BitwiseOr | BinaryOp::BitwiseXor) => {
            operand_class(graph, &node.inputs)
        }
        _ if node.ty.dtype == DType::Bool => operand_class(graph, &node.inputs),
        _ => ComputeClass::of(node.ty.dtype),
    }
}

/// A conversion belongs to the class that can hold both sides; loads convert from any type, stores to any type.
fn conversion_class(from: DType, to: DType) -> ComputeClass {
    match (ComputeClass::of(from), ComputeClass::of(to)) {
        // Truncation to an integer is exact only with the integer in hand.
        (_, ComputeClass::I64) => ComputeClass::I64,
        (ComputeClass::I64, _) if to == DType::Bool => ComputeClass::I64,
        (ComputeClass::I64, class) => class,
        // One rounding: to f32 when loaded; to 16 bits it would be two.
        (ComputeClass::F64, ComputeClass::F32) if to == DType::F32 => ComputeClass::F32,
        (ComputeClass::F64, _) | (_, ComputeClass::F64) => ComputeClass::F64,
        (ComputeClass::F32, ComputeClass::F32) => ComputeClass::F32,
    }
}

/// Comparisons and logic: f64 if any operand needs it, f32 if any operand is a float, else integers; all bool is f32.
fn operand_class(graph: &Graph, operands: &[ValueId]) -> ComputeClass {
    let mut class = None;
    for &o in operands {
        let dtype = graph.ty(o).dtype;
        let this = match (dtype, graph.as_scalar(o)) {
            (DType::F64, Some(v)) if f64::from(v as f32) == v || v.is_nan() => continue,
            _ => ComputeClass::of(dtype),
        };
        class = match (class, this) {
            (None, c) => Some(c),
            (Some(ComputeClass::F64), _) | (_, ComputeClass::F64) => Some(ComputeClass::F64),
            (Some(a), b) if a == b => Some(a),
            // A float against an integer: the integer is converted to f32, as PyTorch does. A bool against an integer
            // is an integer.
            (Some(_), _) if operands.iter().any(|&o| graph.ty(o).dtype.is_float()) => Some(ComputeClass::F32),
            _ => Some(ComputeClass::I64),
        };
    }
    class.unwrap_or(ComputeClass::F32)
}

/// The class of a loop or epilogue group; contractions and norms without a body have their root's class.
pub fn group_class(graph: &Graph, group: &Group) -> ComputeClass {
    let pointwise = group.nodes.iter().find(|&&n| graph.op(n).is_pointwise());
    match (group.root, pointwise) {
        (Some(root), _) => ComputeClass::of(graph.ty(root).dtype),
        (None, Some(&n)) => node_class(graph, n),
        (None, None) => group.nodes.first().map_or(ComputeClass::F32, |&n| ComputeClass::of(graph.ty(n).dtype)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::{Node, PathId, ValueType};

    fn class(op: Op, operands: &[DType], result: DType) -> ComputeClass {
        let mut g = Graph::new();
        let inputs =
            operands.iter().map(|&d| g.add_input("x", ValueType::new(d, vec![4.into()]))).collect::<Vec<ValueId>>();
        let ty = ValueType::new(result, vec![4.into()]);
        let v = g.push(Node { op, inputs, ty, path: PathId(0) });
        node_class(&g, v)
    }

    #[test]
    fn follows_the_operands_of_comparisons() {
        use DType::*;
        let lt = || Op::Binary(BinaryOp::Lt);
        assert_eq!(class(lt(), &[F16, F32], Bool), ComputeClass::F32);
        assert_eq!(class(lt(), &[I64, I64], Bool), ComputeClass::I64);
        assert_eq!(class(lt(), &[I64, F32], Bool), ComputeClass::F32);
        assert_eq!(class(lt(), &[F64, F32], Bool), ComputeClass::F64);
        assert_eq!(class(Op::Binary(BinaryOp::BitwiseAnd), &[Bool, Bool], Bool), ComputeClass::F32);
        assert_eq!(class(Op::Binary(BinaryOp::Eq), &[Bool, I64], Bool), ComputeClass::I64);
    }

    #[test]
    fn converts_where_both_sides_fit() {
        use DType::*;
        assert_eq!(class(Op::Convert, &[I64], F32), ComputeClass::F32);
        assert_eq!(class(Op::Convert, &[F32], I64), ComputeClass::I64);
        assert_eq!(class(Op::Convert, &[F64], F32), ComputeClass::F32);
        assert_eq!(class(Op::Convert, &[F64], F16), ComputeClass::F64);
        assert_eq!(class(Op::Convert, &[Bool], F16), ComputeClass::F32);
        assert_eq!(class(Op::Convert, &[I64], Bool), ComputeClass::I64);
        assert_eq!(class(Op::Binary(BinaryOp::Add), &[I64, F16], F16), ComputeClass::F32);
    }
}
