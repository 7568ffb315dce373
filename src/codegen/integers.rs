//! Loop groups over integers to [`IntegerProgram`].

use oxidiff_kernels::cpu::integers::{
    Instr, IntegerBinary, IntegerProgram, IntegerUnary, Op as Integer, Prepared, Value,
};
use oxidiff_kernels::isa::Isa;

use super::tile::kernel_type;
use crate::analysis::{ComputeClass, node_class};
use crate::ir::{BinaryOp, DType, Graph, Op, UnaryOp, ValueId};

/// The program that computes `nodes` from what they read (`reads`) and stores `results`: loads and stores in these orders.
/// `None` if a node is no integer arithmetic.
pub fn lower_integers(
    graph: &Graph,
    nodes: &[ValueId],
    reads: &[ValueId],
    results: &[ValueId],
) -> Option<IntegerProgram> {
    let mut lowering = Lowering { graph, reads, values: Vec::new(), program: IntegerProgram::default() };
    lowering.program.loads = reads.iter().map(|v| kernel_type(graph.ty(*v).dtype)).collect::<Option<_>>()?;
    nodes.iter().try_for_each(|&v| lowering.node(v))?;
    lowering.program.stores = results.iter().map(|v| lowering.known(*v)).collect::<Option<_>>()?;
    // Whether registers suffice does not depend on the processor.
    Prepared::new(&lowering.program, Isa::Portable).map(|_| lowering.program)
}

struct Lowering<'a> {
    graph: &'a Graph,
    reads: &'a [ValueId],
    /// The instruction of each value read or computed so far.
    values: Vec<(ValueId, Value)>,
    program: IntegerProgram,
}

impl Lowering<'_> {
    fn known(&self, value: ValueId) -> Option<Value> {
        self.values.iter().find(|(known, _)| *known == value).map(|(_, at)| *at)
    }

    fn emit(&mut self, op: Integer, dtype: DType) -> Option<Value> {
        self.program.instrs.push(Instr { op, dtype: kernel_type(dtype)? });
        Value::try_from(self.program.instrs.len() - 1).ok()
    }

    fn node(&mut self, value: ValueId) -> Option<()> {
        let node = self.graph.node(value);
        let at = match (&node.op, node.inputs.as_slice()) {
            (Op::Full { .. }, _) => self.operand(value)?,
            _ if !node.op.is_pointwise() || node_class(self.graph, value) != ComputeClass::I64 => return None,
            (Op::Convert, &[x]) if self.graph.ty(x).dtype.is_float() => {
                let load = self.reads.iter().position(|read| *read == x)?;
                self.emit(Integer::Load(u8::try_from(load).ok()?), node.ty.dtype)?
            }
            (Op::Convert, &[x]) => self.unary(IntegerUnary::Convert, x, node.ty.dtype)?,
            (Op::Unary(op), &[x]) => self.unary(unary(*op, node.ty.dtype)?, x, node.ty.dtype)?,
            (Op::Binary(op), &[a, b]) => {
                let (a, b) = (self.operand(a)?, self.operand(b)?);
                self.emit(Integer::Binary(binary(*op)?, a, b), node.ty.dtype)?
            }
            (Op::Where, &[c, a, b]) => {
                let (c, a, b) = (self.operand(c)?, self.operand(a)?, self.operand(b)?);
                self.emit(Integer::Select(c, a, b), node.ty.dtype)?
            }
            _ => return None,
        };
        self.values.push((value, at));
        Some(())
    }

    fn unary(&mut self, op: IntegerUnary, x: ValueId, dtype: DType) -> Option<Value> {
        let x = self.operand(x)?;
        self.emit(Integer::Unary(op, x), dtype)
    }

    /// A value computed here, a constant, or loaded; nothing but a conversion reads floats.
    fn operand(&mut self, value: ValueId) -> Option<Value> {
        if let Some(at) = self.known(value) {
            return Some(at);
        }
        let dtype = self.graph.ty(value).dtype;
        if dtype.is_float() {
            return None;
        }
        let at = match self.graph.as_scalar(value) {
            Some(constant) => self.emit(Integer::Const(constant as i64), dtype)?,
            None => {
                let load = self.reads.iter().position(|read| *read == value)?;
                self.emit(Integer::Load(u8::try_from(load).ok()?), dtype)?
            }
        };
        self.values.push((value, at));
        Some(at)
    }
}

fn unary(op: UnaryOp, dtype: DType) -> Option<IntegerUnary> {
    Some(match op {
        UnaryOp::Neg => IntegerUnary::Neg,
        UnaryOp::Abs => IntegerUnary::Abs,
        UnaryOp::Sign => IntegerUnary::Sign,
        UnaryOp::Relu => IntegerUnary::Relu,
        UnaryOp::LogicalNot => IntegerUnary::LogicalNot,
        UnaryOp::BitwiseNot if dtype == DType::Bool => IntegerUnary::LogicalNot,
        UnaryOp::BitwiseNot => IntegerUnary::BitwiseNot,
        UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round | UnaryOp::Trunc => IntegerUnary::Convert,
        _ => return None,
    })
}

fn binary(op: BinaryOp) -> Option<IntegerBinary> {
    Some(match op {
        BinaryOp::Add => IntegerBinary::Add,
        BinaryOp::Sub => IntegerBinary::Sub,
        BinaryOp::Mul => IntegerBinary::Mul,
        BinaryOp::FloorDivide => IntegerBinary::FloorDivide,
        BinaryOp::Remainder => IntegerBinary::Remainder,
        BinaryOp::Pow => IntegerBinary::Pow,
        BinaryOp::Maximum => IntegerBinary::Max,
        BinaryOp::Minimum => IntegerBinary::Min,
        BinaryOp::BitwiseAnd => IntegerBinary::BitwiseAnd,
        BinaryOp::BitwiseOr => IntegerBinary::BitwiseOr,
        BinaryOp::BitwiseXor => IntegerBinary::BitwiseXor,
        BinaryOp::BitwiseLeftShift => IntegerBinary::ShiftLeft,
        BinaryOp::BitwiseRightShift => IntegerBinary::ShiftRight,
        BinaryOp::Eq => IntegerBinary::Eq,
        BinaryOp::Ne => IntegerBinary::Ne,
        BinaryOp::Lt => IntegerBinary::Lt,
        BinaryOp::Le => IntegerBinary::Le,
        BinaryOp::Gt => IntegerBinary::Gt,
        BinaryOp::Ge => IntegerBinary::Ge,
        BinaryOp::LogicalAnd => IntegerBinary::LogicalAnd,
        BinaryOp::LogicalOr => IntegerBinary::LogicalOr,
        BinaryOp::LogicalXor => IntegerBinary::LogicalXor,
        BinaryOp::Div | BinaryOp::Atan2 => return None,
    })
}
