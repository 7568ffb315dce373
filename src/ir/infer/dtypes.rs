//! Which element types an op accepts and may give: as strict as eager PyTorch where that raises.
//!
//! Pointwise ops take any mix, because arithmetic converts to the compute type first; only a float operand of an integer
//! result needs an explicit `convert`. Contractions and norms may give another float type than they take (a `convert`
//! merged into them), but never mix f64 with others.

use super::Check;
use crate::ir::dtype::DType;
use crate::ir::op::{BinaryOp, Op, PoolOp, ReduceOp, UnaryOp};

/// Checks operand and result types; the number of operands is known to be right.
pub(crate) fn check_dtypes(op: &Op, operands: &[DType], result: DType) -> Check {
    match op {
        Op::Input { .. } | Op::Parameter { .. } | Op::Constant { .. } | Op::Full { .. } | Op::Convert => Ok(()),
        Op::SizeOf { .. } | Op::Arange { .. } => expect(result != DType::Bool, "the result must be a number"),
        Op::Unary(unary) => check_unary(*unary, operands[0], result),
        Op::Binary(binary) => check_binary(*binary, operands, result),
        Op::Where => {
            expect(matches!(operands[0], DType::Bool | DType::U8), "the condition must be bool or u8")?;
            check_no_float_to_int(&operands[1..], result)
        }
        Op::Reshape
        | Op::Permute { .. }
        | Op::Expand
        | Op::Slice { .. }
        | Op::Cat { .. }
        | Op::Pad { .. }
        | Op::SliceScatter { .. }
        | Op::Flip { .. }
        | Op::UpsampleNearest { .. } => expect_all(operands, result),
        Op::IndexSelect { .. } | Op::Gather { .. } => {
            expect(matches!(operands[1], DType::I32 | DType::I64), "the index must be i32 or i64")?;
            expect_all(&operands[..1], result)
        }
        Op::Interpolate { .. } => {
            expect(matches!(operands[1], DType::I32 | DType::I64), "the index must be i32 or i64")?;
            expect(operands[2] == DType::F32 || result == DType::F64, "the weight must be f32, or f64 beside f64")?;
            expect_floats(&[operands[0], operands[2]], result)?;
            expect_all(&operands[..1], result)
        }
        Op::Reduce { op, .. } => check_reduce(*op, operands[0], result),
        Op::Cumsum { .. } => check_reduce(ReduceOp::Sum, operands[0], result),
        Op::Softmax { .. } => expect_floats(operands, result),
        Op::Linear | Op::Matmul | Op::Convolution { .. } => check_contraction(operands, result),
        Op::ScaledDotProductAttention { .. } => check_attention(operands, result),
        Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } => check_norm(operands, result),
        Op::Pool { op: PoolOp::Avg, .. } => {
            expect(result.is_float(), "averages need a float type")?;
            expect_all(operands, result)
        }
        Op::Pool { op: PoolOp::Max, .. } => expect_all(operands, result),
    }
}

fn expect(holds: bool, why: &str) -> Check {
    if holds { Ok(()) } else { Err(why.to_owned()) }
}

fn expect_all(operands: &[DType], result: DType) -> Check {
    match operands.iter().find(|d| **d != result) {
        Some(d) => Err(format!("an operand has type {d}, the result {result}; insert a convert")),
        None => Ok(()),
    }
}

/// All of them floats, f64 only by itself.
fn expect_floats(operands: &[DType], result: DType) -> Check {
    let all = || operands.iter().chain(std::iter::once(&result));
    expect(all().all(|d| d.is_float()), "operands and result must be floats")?;
    let wide = all().filter(|d| **d == DType::F64).count();
    expect(wide == 0 || wide == operands.len() + 1, "f64 does not mix with other types here")
}

fn check_no_float_to_int(operands: &[DType], result: DType) -> Check {
    expect(
        result.is_float() || !operands.iter().any(|d| d.is_float()),
        "a float operand of an integer result needs a convert",
    )
}

fn check_unary(op: UnaryOp, operand: DType, result: DType) -> Check {
    use UnaryOp as U;
    if op.is_predicate() {
        return expect(result == DType::Bool, "the result must be bool");
    }
    match op {
        U::BitwiseNot => {
            expect(!result.is_float(), "bitwise ops need integers or bool")?;
            expect_all(&[operand], result)
        }
        U::Neg | U::Abs | U::Sign | U::Relu | U::Floor | U::Ceil | U::Round | U::Trunc => {
            expect(result != DType::Bool, "the result must be a number")?;
            check_no_float_to_int(&[operand], result)
        }
        U::RotatePairs
        | U::Exp
        | U::Log
        | U::Log2
        | U::Log10
        | U::Sin
        | U::Cos
        | U::Tanh
        | U::Sqrt
        | U::Rsqrt
        | U::Reciprocal
        | U::Sigmoid
        | U::Silu
        | U::Gelu
        | U::GeluTanh
        | U::Erf
        | U::Softplus => expect(result.is_float(), "the result must be a float"),
        U::LogicalNot | U::Isnan | U::Isinf => Ok(()),
    }
}

fn check_binary(op: BinaryOp, operands: &[DType], result: DType) -> Check {
    use BinaryOp as B;
    if op.is_predicate() {
        return expect(result == DType::Bool, "the result must be bool");
    }
    check_no_float_to_int(operands, result)?;
    match op {
        B::Add | B::Mul | B::Maximum | B::Minimum => Ok(()),
        B::Sub | B::FloorDivide | B::Remainder | B::Pow => expect(result != DType::Bool, "the result must be a number"),
        B::Div | B::Atan2 => expect(result.is_float(), "the result must be a float"),
        B::BitwiseAnd | B::BitwiseOr | B::BitwiseXor => expect(!result.is_float(), "bitwise ops need integers or bool"),
        B::BitwiseLeftShift | B::BitwiseRightShift => {
            expect(!result.is_float() && result != DType::Bool, "shifts need integers")
        }
        B::Eq | B::Ne | B::Lt | B::Le | B::Gt | B::Ge | B::LogicalAnd | B::LogicalOr | B::LogicalXor => Ok(()),
    }
}

fn check_reduce(op: ReduceOp, operand: DType, result: DType) -> Check {
    match op {
        ReduceOp::Sum | ReduceOp::Prod => {
            expect(result != DType::Bool, "the result must be a number")?;
            check_no_float_to_int(&[operand], result)
        }
        ReduceOp::Mean => expect(result.is_float(), "a mean needs a float type"),
        ReduceOp::Amax | ReduceOp::Amin => expect_all(&[operand], result),
        ReduceOp::Any | ReduceOp::All => expect(result == DType::Bool, "the result must be bool"),
        ReduceOp::Argmax | ReduceOp::Argmin => {
            expect(operand != DType::Bool, "argmax needs numbers")?;
            expect(result == DType::I64, "the result must be i64")
        }
    }
}

fn check_contraction(operands: &[DType], result: DType) -> Check {
    expect_floats(operands, result)?;
    expect_all(operands, operands[0]).map_err(|_| format!("operands must have one type, not {operands:?}"))
}

fn check_attention(operands: &[DType], result: DType) -> Check {
    check_contraction(&operands[..3], result)?;
    match operands.get(3) {
        None | Some(DType::Bool | DType::F32) => Ok(()),
        Some(mask) if *mask == operands[0] => Ok(()),
        Some(mask) => Err(format!("the mask has type {mask}; it must be bool, f32 or {}", operands[0])),
    }
}

/// As ATen on the CPU: weights have x's type, or are f32 with a 16-bit x.
fn check_norm(operands: &[DType], result: DType) -> Check {
    expect_floats(operands, result)?;
    for &w in &operands[1..] {
        if w != operands[0] && !(operands[0].is_half() && w == DType::F32) {
            return Err(format!("a weight has type {w}, x has {}", operands[0]));
        }
    }
    match operands {
        [_, weight, bias] => expect_all(&[*weight], *bias).map_err(|_| "weight and bias differ in type".to_owned()),
        _ => Ok(()),
    }
}
