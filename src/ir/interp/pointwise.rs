//! Ops on single elements.

use oxidiff_kernels::cpu::integers;

use super::movement::{broadcast_strides, for_each_row};
use super::tensor::{Tensor, numel, reserve};
use crate::ir::dtype::DType;
use crate::ir::infer::Check;
use crate::ir::op::{BinaryOp, UnaryOp};

/// `values`, of shape `from`, repeated to shape `to`.
fn broadcast<T: Copy>(values: Vec<T>, from: &[i64], to: &[i64]) -> Check<Vec<T>> {
    if from == to {
        return Ok(values);
    }
    let mut out = reserve(numel(to))?;
    if let [value] = values[..] {
        out.resize(numel(to), value);
        return Ok(out);
    }
    for_each_row(to, 0, &broadcast_strides(from, to), |base, stride, len| {
        out.extend((0..len).map(|i| values[(base + i * stride) as usize]));
    });
    Ok(out)
}

fn floats(x: &Tensor, compute: DType, shape: &[i64]) -> Check<Vec<f64>> {
    broadcast(x.to_compute(compute), x.shape(), shape)
}

fn ints(x: &Tensor, shape: &[i64]) -> Check<Vec<i64>> {
    broadcast(x.to_i64(), x.shape(), shape)
}

pub(super) fn unary(op: UnaryOp, x: &Tensor, dtype: DType, shape: &[i64]) -> Check<Tensor> {
    if op.is_predicate() {
        let test: fn(f64) -> bool = match op {
            UnaryOp::Isnan => f64::is_nan,
            UnaryOp::Isinf => f64::is_infinite,
            _ => |v| v == 0.0,
        };
        let values: Vec<i64> = x.to_f64().into_iter().map(|v| i64::from(test(v))).collect();
        return Ok(Tensor::of_ints(dtype, shape, &values));
    }
    if op == UnaryOp::RotatePairs {
        let values = x.to_compute(dtype.compute());
        let rotated: Vec<f64> = values.chunks_exact(2).flat_map(|pair| [-pair[1], pair[0]]).collect();
        return Ok(Tensor::of_floats(dtype, shape, &rotated));
    }
    if dtype.is_float() {
        let f = float_unary(op);
        let values: Vec<f64> = x.to_compute(dtype.compute()).into_iter().map(f).collect();
        return Ok(Tensor::of_floats(dtype, shape, &values));
    }
    let f = int_unary(op, dtype);
    Ok(Tensor::of_ints(dtype, shape, &x.to_i64().into_iter().map(f).collect::<Vec<_>>()))
}

const SQRT_2: f64 = std::f64::consts::SQRT_2;
/// `sqrt(2 / pi)`.
const GELU_SCALE: f64 = SQRT_2 * std::f64::consts::FRAC_2_SQRT_PI * 0.5;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn float_unary(op: UnaryOp) -> fn(f64) -> f64 {
    match op {
        UnaryOp::Neg => |x| -x,
        UnaryOp::Abs => f64::abs,
        UnaryOp::Sign => |x| f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)),
        UnaryOp::Exp => f64::exp,
        UnaryOp::Log => f64::ln,
        UnaryOp::Log2 => f64::log2,
        UnaryOp::Log10 => f64::log10,
        UnaryOp::Sin => f64::sin,
        UnaryOp::Cos => f64::cos,
        UnaryOp::Tanh => f64::tanh,
        UnaryOp::Sqrt => f64::sqrt,
        UnaryOp::Rsqrt => |x| 1.0 / x.sqrt(),
        UnaryOp::Reciprocal => |x| 1.0 / x,
        UnaryOp::Sigmoid => sigmoid,
        UnaryOp::Silu => |x| x / (1.0 + (-x).exp()),
        UnaryOp::Gelu => |x| 0.5 * x * libm::erfc(-x / SQRT_2),
        UnaryOp::GeluTanh => |x| 0.5 * x * (1.0 + (GELU_SCALE * (x + 0.044715 * x * x * x)).tanh()),
        UnaryOp::Relu => |x| if x < 0.0 { 0.0 } else { x },
        UnaryOp::Erf => libm::erf,
        UnaryOp::Softplus => |x| if x > 20.0 { x } else { x.exp().ln_1p() },
        UnaryOp::Floor => f64::floor,
        UnaryOp::Ceil => f64::ceil,
        UnaryOp::Round => f64::round_ties_even,
        UnaryOp::Trunc => f64::trunc,
        UnaryOp::LogicalNot | UnaryOp::BitwiseNot | UnaryOp::Isnan | UnaryOp::Isinf => {
            unreachable!("has no float result: ir/infer")
        }
        UnaryOp::RotatePairs => unreachable!("it is no matter of one element"),
    }
}

fn int_unary(op: UnaryOp, dtype: DType) -> fn(i64) -> i64 {
    match op {
        UnaryOp::Neg => i64::wrapping_neg,
        UnaryOp::Abs => i64::wrapping_abs,
        UnaryOp::Sign => i64::signum,
        UnaryOp::Relu => |x| x.max(0),
        UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round | UnaryOp::Trunc => |x| x,
        UnaryOp::BitwiseNot if dtype == DType::Bool => |x| i64::from(x == 0),
        UnaryOp::BitwiseNot => |x| !x,
        UnaryOp::Exp
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Log10
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Reciprocal
        | UnaryOp::Sigmoid
        | UnaryOp::Silu
        | UnaryOp::Gelu
        | UnaryOp::GeluTanh
        | UnaryOp::Erf
        | UnaryOp::Softplus
        | UnaryOp::LogicalNot
        | UnaryOp::Isnan
        | UnaryOp::Isinf
        | UnaryOp::RotatePairs => unreachable!("has no integer result: ir/infer"),
    }
}

pub(super) fn binary(op: BinaryOp, operands: &[&Tensor], dtype: DType, shape: &[i64]) -> Check<Tensor> {
    let [a, b] = [operands[0], operands[1]];
    if op.is_predicate() {
        return predicate(op, a, b, shape);
    }
    if dtype.is_float() {
        let f = float_binary(op);
        let (a, b) = (floats(a, dtype.compute(), shape)?, floats(b, dtype.compute(), shape)?);
        let values: Vec<f64> = a.into_iter().zip(b).map(|(a, b)| f(a, b)).collect();
        return Ok(Tensor::of_floats(dtype, shape, &values));
    }
    let values = int_binary(op, ints(a, shape)?, &ints(b, shape)?)?;
    Ok(Tensor::of_ints(dtype, shape, &values))
}

/// Comparisons in the widest compute type of the operands.
fn predicate(op: BinaryOp, a: &Tensor, b: &Tensor, shape: &[i64]) -> Check<Tensor> {
    let (x, y) = (a.dtype(), b.dtype());
    let values: Vec<i64> = if x.is_float() || y.is_float() {
        let compute = if x == DType::F64 || y == DType::F64 { DType::F64 } else { DType::F32 };
        let pairs = floats(a, compute, shape)?.into_iter().zip(floats(b, compute, shape)?);
        pairs.map(|(a, b)| i64::from(compare(op, &a, &b, &0.0))).collect()
    } else {
        let pairs = ints(a, shape)?.into_iter().zip(ints(b, shape)?);
        pairs.map(|(a, b)| i64::from(compare(op, &a, &b, &0))).collect()
    };
    Ok(Tensor::of_ints(DType::Bool, shape, &values))
}

fn compare<T: PartialOrd>(op: BinaryOp, a: &T, b: &T, zero: &T) -> bool {
    match op {
        BinaryOp::Eq => a == b,
        BinaryOp::Ne => a != b,
        BinaryOp::Lt => a < b,
        BinaryOp::Le => a <= b,
        BinaryOp::Gt => a > b,
        BinaryOp::Ge => a >= b,
        BinaryOp::LogicalAnd => a != zero && b != zero,
        BinaryOp::LogicalOr => a != zero || b != zero,
        BinaryOp::LogicalXor => (a != zero) != (b != zero),
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Div
        | BinaryOp::FloorDivide
        | BinaryOp::Remainder
        | BinaryOp::Pow
        | BinaryOp::Maximum
        | BinaryOp::Minimum
        | BinaryOp::Atan2
        | BinaryOp::BitwiseAnd
        | BinaryOp::BitwiseOr
        | BinaryOp::BitwiseXor
        | BinaryOp::BitwiseLeftShift
        | BinaryOp::BitwiseRightShift => unreachable!("not a predicate"),
    }
}

/// The remainder with the sign of `b`.
fn float_remainder(a: f64, b: f64) -> f64 {
    let r = a % b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) { r + b } else { r }
}

fn float_floor_divide(a: f64, b: f64) -> f64 {
    if b == 0.0 {
        return a / b;
    }
    let r = a % b;
    let mut quotient = (a - r) / b;
    if r != 0.0 && (r < 0.0) != (b < 0.0) {
        quotient -= 1.0;
    }
    // The quotient is whole but for the rounding of the division; a zero has the division's sign.
    if quotient == 0.0 { 0.0 * (a / b) } else { quotient.round_ties_even() }
}

fn float_binary(op: BinaryOp) -> fn(f64, f64) -> f64 {
    match op {
        BinaryOp::Add => |a, b| a + b,
        BinaryOp::Sub => |a, b| a - b,
        BinaryOp::Mul => |a, b| a * b,
        BinaryOp::Div => |a, b| a / b,
        BinaryOp::FloorDivide => float_floor_divide,
        BinaryOp::Remainder => float_remainder,
        BinaryOp::Pow => f64::powf,
        BinaryOp::Maximum => |a, b| if a.is_nan() || a > b { a } else { b },
        BinaryOp::Minimum => |a, b| if a.is_nan() || a < b { a } else { b },
        BinaryOp::Atan2 => f64::atan2,
        BinaryOp::Eq
        | BinaryOp::Ne
        | BinaryOp::Lt
        | BinaryOp::Le
        | BinaryOp::Gt
        | BinaryOp::Ge
        | BinaryOp::LogicalAnd
        | BinaryOp::LogicalOr
        | BinaryOp::LogicalXor
        | BinaryOp::BitwiseAnd
        | BinaryOp::BitwiseOr
        | BinaryOp::BitwiseXor
        | BinaryOp::BitwiseLeftShift
        | BinaryOp::BitwiseRightShift => unreachable!("has no float result: ir/infer"),
    }
}

/// Each op has a loop of its own, which the compiler makes one over vectors.
fn int_binary(op: BinaryOp, mut a: Vec<i64>, b: &[i64]) -> Check<Vec<i64>> {
    fn each(a: &mut [i64], b: &[i64], f: impl Fn(i64, i64) -> i64) {
        a.iter_mut().zip(b).for_each(|(a, b)| *a = f(*a, *b));
    }
    if matches!(op, BinaryOp::FloorDivide | BinaryOp::Remainder) && b.contains(&0) && !a.is_empty() {
        return Err("integer division by zero".to_owned());
    }
    match op {
        BinaryOp::Add => each(&mut a, b, i64::wrapping_add),
        BinaryOp::Sub => each(&mut a, b, i64::wrapping_sub),
        BinaryOp::Mul => each(&mut a, b, i64::wrapping_mul),
        BinaryOp::FloorDivide => each(&mut a, b, integers::floor_divide),
        BinaryOp::Remainder => each(&mut a, b, integers::remainder),
        BinaryOp::Pow => each(&mut a, b, integers::pow),
        BinaryOp::Maximum => each(&mut a, b, i64::max),
        BinaryOp::Minimum => each(&mut a, b, i64::min),
        BinaryOp::BitwiseAnd => each(&mut a, b, |a, b| a & b),
        BinaryOp::BitwiseOr => each(&mut a, b, |a, b| a | b),
        BinaryOp::BitwiseXor => each(&mut a, b, |a, b| a ^ b),
        BinaryOp::BitwiseLeftShift => each(&mut a, b, |a, b| if (0..64).contains(&b) { a << b } else { 0 }),
        BinaryOp::BitwiseRightShift => each(&mut a, b, |a, b| a >> if (0..64).contains(&b) { b } else { 63 }),
        BinaryOp::Div
        | BinaryOp::Atan2
        | BinaryOp::Eq
        | BinaryOp::Ne
        | BinaryOp::Lt
        | BinaryOp::Le
        | BinaryOp::Gt
        | BinaryOp::Ge
        | BinaryOp::LogicalAnd
        | BinaryOp::LogicalOr
        | BinaryOp::LogicalXor => unreachable!("has no integer result: ir/infer"),
    }
    Ok(a)
}

pub(super) fn select(operands: &[&Tensor], dtype: DType, shape: &[i64]) -> Check<Tensor> {
    let condition = ints(operands[0], shape)?;
    if dtype.is_float() {
        let (x, y) = (floats(operands[1], dtype.compute(), shape)?, floats(operands[2], dtype.compute(), shape)?);
        let pick = condition.into_iter().zip(x).zip(y).map(|((c, x), y)| if c != 0 { x } else { y });
        return Ok(Tensor::of_floats(dtype, shape, &pick.collect::<Vec<_>>()));
    }
    let pick = condition.into_iter().zip(ints(operands[1], shape)?).zip(ints(operands[2], shape)?);
    let values: Vec<i64> = pick.map(|((c, x), y)| if c != 0 { x } else { y }).collect();
    Ok(Tensor::of_ints(dtype, shape, &values))
}
