//! One function per kind of op: picks operands, says what is known about the result, and gives up (`None`) where they do
//! not fit.

use super::{Generator, Known, PARAMETER_BOUND};
use crate::ir::dim::Dim;
use crate::ir::dtype::DType;
use crate::ir::graph::ValueId;
use crate::ir::infer::window_output;
use crate::ir::op::{BinaryOp, Op, PoolOp, ReduceOp, UnaryOp, ValueType};

type Rule = fn(&mut Generator) -> Option<ValueId>;

const RULES: &[Rule] = &[
    smooth_unary,
    smooth_unary,
    stepped_unary,
    away_from_zero,
    float_binary,
    float_binary,
    float_binary,
    with_number,
    integer_binary,
    predicate,
    logical,
    select,
    convert,
    reshape,
    permute,
    permute,
    expand,
    slice,
    slice,
    cat,
    pad,
    slice_scatter,
    flip,
    rotation,
    index_select,
    interpolate,
    gather,
    reduce,
    reduce_exact,
    cumsum,
    softmax,
    linear,
    linear,
    matmul,
    convolution,
    convolution,
    attention,
    group_norm,
    row_norm,
    upsample,
    pool,
    source,
];

/// Tries one rule.
pub(super) fn apply_one(g: &mut Generator) {
    let rule = *g.rng.choose(RULES);
    rule(g);
}

/// Values in the larger of the two float types, as PyTorch promotes.
fn promoted(a: DType, b: DType) -> DType {
    if a == b { a } else { DType::F32 }
}

fn smooth_unary(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick_float()?;
    let (k, ty) = (g.known(x), g.ty(x));
    let (op, slope, bound) = *g.rng.choose(&[
        (UnaryOp::Neg, 1.0, k.bound),
        (UnaryOp::Abs, 1.0, k.bound),
        (UnaryOp::Relu, 1.0, k.bound),
        (UnaryOp::Sin, 1.0, 1.0),
        (UnaryOp::Cos, 1.0, 1.0),
        (UnaryOp::Tanh, 1.0, 1.0),
        (UnaryOp::Sigmoid, 0.25, 1.0),
        (UnaryOp::Silu, 1.1, k.bound),
        (UnaryOp::Gelu, 1.13, k.bound),
        (UnaryOp::GeluTanh, 1.13, k.bound),
        (UnaryOp::Erf, 1.13, 1.0),
        (UnaryOp::Softplus, 1.0, k.bound + 0.7),
        (UnaryOp::Exp, (k.bound + k.error).exp(), k.bound.exp()),
    ]);
    g.emit(Op::Unary(op), &[x], ty.dtype, ty.shape, k.through(slope, bound))
}

fn stepped_unary(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.dtype != DType::F64)?;
    let (k, ty) = (g.known(x), g.ty(x));
    if !g.is_exact(x) {
        return None;
    }
    let op = *g.rng.choose(match ty.dtype {
        DType::Bool => &[UnaryOp::LogicalNot, UnaryOp::BitwiseNot][..],
        d if d.is_float() => &[
            UnaryOp::Sign,
            UnaryOp::Floor,
            UnaryOp::Ceil,
            UnaryOp::Round,
            UnaryOp::Trunc,
            UnaryOp::Isnan,
            UnaryOp::Isinf,
        ][..],
        _ => &[UnaryOp::Neg, UnaryOp::Abs, UnaryOp::BitwiseNot, UnaryOp::LogicalNot][..],
    });
    let dtype = if op.is_predicate() { DType::Bool } else { ty.dtype };
    // Whole numbers stay exact.
    let known = Known::exact(k.bound + 1.0);
    Some(g.push(Op::Unary(op), &[x], dtype, ty.shape, known))
}

/// `f(x * x + 1)` and `y / (x * x + 1)`.
fn away_from_zero(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick_float()?;
    let (k, ty) = (g.known(x), g.ty(x));
    let square = g.emit(Op::Binary(BinaryOp::Mul), &[x, x], ty.dtype, ty.shape.clone(), k.times(k))?;
    let one = g.number(DType::I64, 1.0);
    let k = g.known(square).plus(Known::exact(1.0));
    let shifted = g.emit(Op::Binary(BinaryOp::Add), &[square, one], ty.dtype, ty.shape.clone(), k)?;
    let k = g.known(shifted);
    let (op, slope, bound) = *g.rng.choose(&[
        (UnaryOp::Log, 1.5, k.bound.ln().max(0.0)),
        (UnaryOp::Log2, 2.2, k.bound.log2().max(0.0)),
        (UnaryOp::Log10, 0.7, k.bound.log10().max(0.0)),
        (UnaryOp::Sqrt, 1.0, k.bound.sqrt()),
        (UnaryOp::Rsqrt, 1.0, 1.0),
        (UnaryOp::Reciprocal, 2.0, 1.0),
    ]);
    if g.rng.one_in(2) {
        return g.emit(Op::Unary(op), &[shifted], ty.dtype, ty.shape, k.through(slope, bound + 0.1));
    }
    let y = g.pick_float()?;
    let (other, shape) = (g.ty(y), g.ty(y).shape);
    let shape = g.broadcast(&[&shape, &ty.shape])?;
    let op = *g.rng.choose(&[BinaryOp::Div, BinaryOp::Atan2]);
    let known = g.known(y).times(k.through(2.0, 1.0)).plus(Known::exact(1.0));
    g.emit(Op::Binary(op), &[y, shifted], promoted(ty.dtype, other.dtype), shape, known)
}

fn float_binary(g: &mut Generator) -> Option<ValueId> {
    let (x, y) = (g.pick_float()?, g.pick_float()?);
    let (a, b) = (g.ty(x), g.ty(y));
    let shape = g.broadcast(&[&a.shape, &b.shape])?;
    let (k, l) = (g.known(x), g.known(y));
    let (op, known) = *g.rng.choose(&[
        (BinaryOp::Add, k.plus(l)),
        (BinaryOp::Sub, k.plus(l)),
        (BinaryOp::Mul, k.times(l)),
        (BinaryOp::Maximum, k.max(l)),
        (BinaryOp::Minimum, k.max(l)),
    ]);
    g.emit(Op::Binary(op), &[x, y], promoted(a.dtype, b.dtype), shape, known)
}

/// With a Python number: the result keeps the tensor's type.
fn with_number(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick_float()?;
    let (k, ty) = (g.known(x), g.ty(x));
    let given = g.pick(|ty| ty.shape.is_empty() && matches!(ty.dtype, DType::F64 | DType::I64));
    let number = match given {
        Some(number) if g.rng.one_in(3) && g.is_exact(number) => number,
        _ => {
            let value = g.rng.multiple(0.3, 1.5);
            g.number(DType::F64, value)
        }
    };
    let l = g.known(number);
    let two = Known { bound: k.bound, error: 2.0 * k.error };
    let op = *g.rng.choose(&[BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Pow]);
    match op {
        BinaryOp::Pow => {
            let exponent = g.number(DType::I64, 2.0);
            g.emit(Op::Binary(op), &[x, exponent], ty.dtype, ty.shape, two.times(k))
        }
        BinaryOp::Mul => g.emit(Op::Binary(op), &[x, number], ty.dtype, ty.shape, k.times(l)),
        _ => g.emit(Op::Binary(op), &[number, x], ty.dtype, ty.shape, k.plus(l)),
    }
}

fn is_integer(ty: &ValueType) -> bool {
    !ty.dtype.is_float() && ty.dtype != DType::Bool
}

fn integer_binary(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(is_integer)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let value = (1 + g.rng.below(4)) as f64;
    let y = g.number(DType::I64, value);
    let l = g.known(y);
    let (op, known) = *g.rng.choose(&[
        (BinaryOp::Add, k.plus(l)),
        (BinaryOp::Sub, k.plus(l)),
        (BinaryOp::Mul, k.times(l)),
        (BinaryOp::Maximum, k.max(l)),
        (BinaryOp::FloorDivide, k.plus(Known::exact(1.0))),
        (BinaryOp::Remainder, l),
        (BinaryOp::BitwiseAnd, k.plus(l)),
        (BinaryOp::BitwiseOr, k.plus(l)),
        (BinaryOp::BitwiseXor, k.plus(l)),
        (BinaryOp::BitwiseLeftShift, k.times(Known::exact(16.0))),
        (BinaryOp::BitwiseRightShift, k),
    ]);
    // Bitwise results stay below twice the larger power of two.
    g.emit(Op::Binary(op), &[x, y], ty.dtype, ty.shape, known.plus(known))
}

fn predicate(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.dtype != DType::Bool)?;
    let y = g.pick(|ty| ty.dtype != DType::Bool)?;
    if !g.is_exact(x) || !g.is_exact(y) {
        return None;
    }
    let shape = g.broadcast(&[&g.ty(x).shape, &g.ty(y).shape])?;
    let ops = [BinaryOp::Eq, BinaryOp::Ne, BinaryOp::Lt, BinaryOp::Le, BinaryOp::Gt, BinaryOp::Ge];
    let op = *g.rng.choose(&ops);
    g.emit(Op::Binary(op), &[x, y], DType::Bool, shape, Known::exact(1.0))
}

fn logical(g: &mut Generator) -> Option<ValueId> {
    let (x, y) = (g.pick(|ty| ty.dtype == DType::Bool)?, g.pick(|ty| ty.dtype == DType::Bool)?);
    let shape = g.broadcast(&[&g.ty(x).shape, &g.ty(y).shape])?;
    let op = *g.rng.choose(&[
        BinaryOp::LogicalAnd,
        BinaryOp::LogicalOr,
        BinaryOp::LogicalXor,
        BinaryOp::BitwiseAnd,
        BinaryOp::BitwiseOr,
    ]);
    g.emit(Op::Binary(op), &[x, y], DType::Bool, shape, Known::exact(1.0))
}

fn select(g: &mut Generator) -> Option<ValueId> {
    let c = g.pick(|ty| ty.dtype == DType::Bool)?;
    let (x, y) = (g.pick_float()?, g.pick_float()?);
    let (a, b) = (g.ty(x), g.ty(y));
    let shape = g.broadcast(&[&g.ty(c).shape, &a.shape, &b.shape])?;
    let known = g.known(x).max(g.known(y));
    g.emit(Op::Where, &[c, x, y], promoted(a.dtype, b.dtype), shape, known)
}

fn convert(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|_| true)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let dtype = match ty.dtype {
        d if d.is_float() => *g.rng.choose(&[DType::F32, g.dtype]),
        DType::Bool => *g.rng.choose(&[g.dtype, DType::I64]),
        _ => *g.rng.choose(&[g.dtype, DType::I32, DType::I64, DType::F32]),
    };
    g.emit(Op::Convert, &[x], dtype, ty.shape, k)
}

fn reshape(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0 && ty.rank() < 5)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let d = g.rng.below(ty.rank());
    let mut shape = ty.shape;
    match g.rng.below(3) {
        0 if d > 0 => {
            shape[d - 1] = &shape[d - 1] * &shape[d];
            shape.remove(d);
        }
        1 if shape[d].is(1) => drop(shape.remove(d)),
        1 => shape.insert(d, Dim::constant(1)),
        _ => {
            let even = g.samples.iter().all(|b| shape[d].eval(b).is_ok_and(|v| v % 2 == 0));
            let half = shape[d].exact_div(2).ok().filter(|_| even)?;
            shape[d] = Dim::constant(2);
            shape.insert(d, half);
        }
    }
    Some(g.push(Op::Reshape, &[x], ty.dtype, shape, k))
}

fn permute(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 1)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let mut dims: Vec<usize> = (0..ty.rank()).collect();
    for i in (1..dims.len()).rev() {
        dims.swap(i, g.rng.below(i + 1));
    }
    let shape = dims.iter().map(|&d| ty.shape[d].clone()).collect();
    Some(g.push(Op::Permute { dims }, &[x], ty.dtype, shape, k))
}

fn expand(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() < 4)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let to = g.pick(|_| true)?;
    let mut shape = g.broadcast(&[&ty.shape, &g.ty(to).shape]).unwrap_or(ty.shape.clone());
    if g.rng.one_in(2) {
        shape.insert(0, Dim::constant(2));
    }
    g.emit(Op::Expand, &[x], ty.dtype, shape, k)
}

/// A start, a step and a length that fit a dimension.
fn random_slice(g: &mut Generator, size: &Dim) -> Option<(Dim, i64, Dim)> {
    let c = Dim::constant;
    Some(match g.rng.below(4) {
        0 => (c(0), 2, (size + &c(1)).floor_div(2).ok()?),
        1 if g.smallest(size) >= 2 => (c(1), 1, size - &c(1)),
        2 if g.smallest(size) >= 1 => (size - &c(1), 1, c(1)),
        _ => (c(0), 1, c(g.smallest(size).min(3))),
    })
}

fn slice(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let dim = g.rng.below(ty.rank());
    let (start, step, len) = random_slice(g, &ty.shape[dim])?;
    let mut shape = ty.shape;
    shape[dim] = len;
    Some(g.push(Op::Slice { dim, start, step }, &[x], ty.dtype, shape, k))
}

fn slice_scatter(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let dim = g.rng.below(ty.rank());
    let (start, step, len) = random_slice(g, &ty.shape[dim])?;
    let mut shape = ty.shape.clone();
    shape[dim] = len;
    let source = g.pick(|t| t.dtype == ty.dtype && t.shape == shape)?;
    let known = k.max(g.known(source));
    Some(g.push(Op::SliceScatter { dim, start, step }, &[x, source], ty.dtype, ty.shape, known))
}

fn cat(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0)?;
    let ty = g.ty(x);
    let dim = g.rng.below(ty.rank());
    let fits = |t: &ValueType| {
        let same = |d: usize| d == dim || t.shape[d] == ty.shape[d];
        t.dtype == ty.dtype && t.rank() == ty.rank() && (0..t.rank()).all(same)
    };
    let mut operands = vec![x];
    for _ in 0..1 + g.rng.below(2) {
        operands.push(g.pick(fits)?);
    }
    let mut shape = ty.shape.clone();
    shape[dim] = operands.iter().fold(Dim::constant(0), |sum, &o| &sum + &g.graph.ty(o).shape[dim]);
    let known = operands.iter().map(|&o| g.known(o)).fold(Known::exact(0.0), Known::max);
    g.emit(Op::Cat { dim }, &operands, ty.dtype, shape, known)
}

fn pad(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0 && ty.dtype != DType::Bool)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let before: Vec<Dim> = (0..ty.rank()).map(|_| Dim::constant(g.rng.below(2) as i64)).collect();
    let mut shape = ty.shape.clone();
    for (size, b) in shape.iter_mut().zip(&before) {
        *size = &(&*size + b) + &Dim::constant(g.rng.below(2) as i64);
    }
    let value = if ty.dtype.is_float() { g.rng.multiple(0.5, 1.0) } else { 1.0 };
    g.emit(Op::Pad { before, value }, &[x], ty.dtype, shape, k.max(Known::exact(value.abs())))
}

fn flip(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let dims = vec![g.rng.below(ty.rank())];
    Some(g.push(Op::Flip { dims }, &[x], ty.dtype, ty.shape, k))
}

fn rotation(g: &mut Generator) -> Option<ValueId> {
    let is_even = |size: &Dim| size.as_constant().is_some_and(|n| n > 0 && n % 2 == 0);
    let x = g.pick(|ty| ty.dtype.is_float() && ty.shape.last().is_some_and(is_even))?;
    let (k, ty) = (g.known(x), g.ty(x));
    Some(g.push(Op::Unary(UnaryOp::RotatePairs), &[x], ty.dtype, ty.shape, k))
}

/// An index below `size`: an integer value modulo it.
fn random_index(g: &mut Generator, size: &Dim) -> Option<ValueId> {
    let x = g.pick(|ty| is_integer(ty) && matches!(ty.dtype, DType::I32 | DType::I64))?;
    let ty = g.ty(x);
    let bound = Known::exact(g.largest(size) as f64);
    if g.smallest(size) < 1 {
        return None;
    }
    let modulus = g.push(Op::SizeOf { size: size.clone() }, &[], DType::I64, vec![], bound);
    Some(g.push(Op::Binary(BinaryOp::Remainder), &[x, modulus], ty.dtype, ty.shape, bound))
}

fn index_select(g: &mut Generator) -> Option<ValueId> {
    let x = match g.rng.one_in(3) {
        true => {
            let dtype = g.dtype;
            g.parameter(dtype, &[10, 8])
        }
        false => g.pick(|ty| ty.rank() > 0)?,
    };
    let (k, ty) = (g.known(x), g.ty(x));
    let dim = if g.rng.one_in(2) { 0 } else { g.rng.below(ty.rank()) };
    let index = random_index(g, &ty.shape[dim])?;
    let shape = [&ty.shape[..dim], &g.ty(index).shape, &ty.shape[dim + 1..]].concat();
    if shape.len() > 5 {
        return None;
    }
    g.emit(Op::IndexSelect { dim }, &[x, index], ty.dtype, shape, k)
}

/// Sums of two places of a value each, at places that a remainder picks.
fn interpolate(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0 && ty.dtype.is_float() && ty.dtype != DType::F64)?;
    let (known, ty) = (weighted(g.known(x), 2.0, false), g.ty(x));
    let dim = g.rng.below(ty.rank());
    let size = ty.shape[dim].clone();
    if g.smallest(&size) < 1 {
        return None;
    }
    let (taps, bound) = (*g.rng.choose(&[1, 2, 3, 4]), Known::exact(g.largest(&size) as f64));
    let (flat, pairs) = (vec![Dim::constant(6 * taps)], vec![Dim::constant(6), Dim::constant(taps)]);
    let spread = Op::Arange { start: Dim::constant(3), step: Dim::constant(5) };
    let places = g.push(spread, &[], DType::I64, flat.clone(), Known::exact(128.0));
    let modulus = g.push(Op::SizeOf { size }, &[], DType::I64, vec![], bound);
    let wrapped = g.push(Op::Binary(BinaryOp::Remainder), &[places, modulus], DType::I64, flat, bound);
    let index = g.push(Op::Reshape, &[wrapped], DType::I64, pairs, bound);
    let weight = g.parameter(DType::F32, &[6, taps]);
    let shape = [&ty.shape[..dim], &[Dim::constant(6)], &ty.shape[dim + 1..]].concat();
    g.emit(Op::Interpolate { dim }, &[x, index, weight], ty.dtype, shape, known)
}

fn gather(g: &mut Generator) -> Option<ValueId> {
    let index = g.pick(|ty| ty.rank() > 0 && ty.dtype == DType::I64)?;
    let rank = g.ty(index).rank();
    let x = g.pick(|ty| ty.rank() == rank)?;
    let (k, ty, shape) = (g.known(x), g.ty(x), g.ty(index).shape);
    let dim = g.rng.below(rank);
    let fits = |b: &Vec<i64>| {
        let size = |d: &Dim| d.eval(b).unwrap_or(0);
        (0..rank).all(|d| d == dim || size(&shape[d]) <= size(&ty.shape[d]))
    };
    if !g.samples.iter().all(fits) || g.smallest(&ty.shape[dim]) < 1 {
        return None;
    }
    let bound = Known::exact(g.largest(&ty.shape[dim]) as f64);
    let modulus = g.push(Op::SizeOf { size: ty.shape[dim].clone() }, &[], DType::I64, vec![], bound);
    let index = g.push(Op::Binary(BinaryOp::Remainder), &[index, modulus], DType::I64, shape.clone(), bound);
    g.emit(Op::Gather { dim }, &[x, index], ty.dtype, shape, k)
}

fn reduced_shape(ty: &ValueType, dims: &[usize], keepdim: bool) -> Vec<Dim> {
    let kept = |d: usize| if dims.contains(&d) { keepdim.then(|| Dim::constant(1)) } else { Some(ty.shape[d].clone()) };
    (0..ty.rank()).filter_map(kept).collect()
}

fn random_dims(g: &mut Generator, rank: usize) -> Vec<usize> {
    let first = g.rng.below(rank);
    if first + 1 < rank && g.rng.one_in(2) { vec![first, first + 1] } else { vec![first] }
}

fn reduce(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0 && ty.dtype.is_float() && ty.dtype != DType::F64)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let (dims, keepdim) = (random_dims(g, ty.rank()), g.rng.one_in(2));
    let sizes: Vec<Dim> = dims.iter().map(|&d| ty.shape[d].clone()).collect();
    let (fewest, most) = g.extremes(&Dim::product(&sizes));
    if fewest < 1 {
        return None;
    }
    let n = most as f64;
    let op =
        *g.rng.choose(&[ReduceOp::Sum, ReduceOp::Mean, ReduceOp::Mean, ReduceOp::Amax, ReduceOp::Amin, ReduceOp::Prod]);
    let known = match op {
        ReduceOp::Sum => k.summed(n),
        ReduceOp::Mean => k.summed(n).times(Known::exact(1.0 / n)),
        // Small factors make the product of the fewest the largest, others that of the most.
        ReduceOp::Prod => {
            let next = |product: &Known| Some(product.times(k).rounded(DType::F32));
            let products = std::iter::successors(Some(k), next).take(most as usize).skip(fewest as usize - 1);
            products.reduce(Known::max).unwrap_or(k)
        }
        _ => k,
    };
    let shape = reduced_shape(&ty, &dims, keepdim);
    g.emit(Op::Reduce { op, dims, keepdim }, &[x], ty.dtype, shape, known)
}

/// Reductions with jumps, and sums of integers.
fn reduce_exact(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0)?;
    let ty = g.ty(x);
    if !g.is_exact(x) {
        return None;
    }
    let (dim, keepdim) = (g.rng.below(ty.rank()), g.rng.one_in(2));
    let n = g.largest(&ty.shape[dim]) as f64;
    if g.smallest(&ty.shape[dim]) < 1 {
        return None;
    }
    let shape = reduced_shape(&ty, &[dim], keepdim);
    let (op, dtype, known) = match g.rng.below(3) {
        0 => (*g.rng.choose(&[ReduceOp::Any, ReduceOp::All]), DType::Bool, Known::exact(1.0)),
        1 if ty.dtype != DType::Bool => {
            (*g.rng.choose(&[ReduceOp::Argmax, ReduceOp::Argmin]), DType::I64, Known::exact(n))
        }
        _ if !ty.dtype.is_float() => (ReduceOp::Sum, DType::I64, Known::exact(g.known(x).bound * n)),
        _ => return None,
    };
    g.emit(Op::Reduce { op, dims: vec![dim], keepdim }, &[x], dtype, shape, known)
}

fn cumsum(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0 && ty.dtype != DType::Bool && ty.dtype != DType::F64)?;
    let ty = g.ty(x);
    let dim = g.rng.below(ty.rank());
    let known = g.known(x).summed(g.largest(&ty.shape[dim]) as f64);
    if !ty.dtype.is_float() {
        let known = Known::exact(known.bound);
        return g.emit(Op::Cumsum { dim }, &[x], DType::I64, ty.shape, known);
    }
    g.emit(Op::Cumsum { dim }, &[x], ty.dtype, ty.shape, known)
}

fn softmax(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() > 0 && ty.dtype.is_float() && ty.dtype != DType::F64)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let dim = g.rng.below(ty.rank());
    g.emit(Op::Softmax { dim }, &[x], ty.dtype, ty.shape, k.through(2.0, 1.0))
}

/// Products of x with parameters, summed over `n`, and a bias.
fn weighted(k: Known, n: f64, has_bias: bool) -> Known {
    let sum = k.times(Known::exact(PARAMETER_BOUND)).summed(n);
    if has_bias { sum.plus(Known::exact(PARAMETER_BOUND)) } else { sum }
}

fn linear(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| {
        let constant = |d: &Dim| d.as_constant().is_some_and(|c| (1..=16).contains(&c));
        ty.dtype.is_float() && ty.dtype != DType::F64 && ty.shape.last().is_some_and(constant)
    })?;
    let (k, ty) = (g.known(x), g.ty(x));
    let (n, inner) = (*g.rng.choose(&[1, 4, 8]), ty.shape.last()?.as_constant()?);
    let has_bias = g.rng.one_in(2);
    let known = weighted(k, inner as f64, has_bias).rounded(ty.dtype);
    if known.bound > super::LARGEST || known.error > super::LEAST_SURE {
        return None;
    }
    let mut operands = vec![x, g.parameter(ty.dtype, &[n, inner])];
    if has_bias {
        operands.push(g.parameter(ty.dtype, &[n]));
    }
    let mut shape = ty.shape;
    *shape.last_mut()? = Dim::constant(n);
    Some(g.push(Op::Linear, &operands, ty.dtype, shape, known))
}

fn matmul(g: &mut Generator) -> Option<ValueId> {
    let a = g.pick(|ty| ty.rank() >= 2 && ty.dtype.is_float() && ty.dtype != DType::F64)?;
    let ty = g.ty(a);
    let (batch, matrix) = ty.shape.split_at(ty.rank() - 2);
    let b = g.pick(|t| t.rank() >= 2 && t.dtype == ty.dtype && t.shape[t.rank() - 2] == matrix[1])?;
    let other = g.ty(b);
    let mut shape = g.broadcast(&[batch, &other.shape[..other.rank() - 2]])?;
    shape.extend([matrix[0].clone(), other.shape.last()?.clone()]);
    let known = g.known(a).times(g.known(b)).summed(g.largest(&matrix[1]) as f64);
    g.emit(Op::Matmul, &[a, b], ty.dtype, shape, known)
}

fn convolution(g: &mut Generator) -> Option<ValueId> {
    let channels_last = g.rng.one_in(3);
    let channel_dim = |rank: usize| if channels_last { rank - 1 } else { 1 };
    let x = g.pick(|ty| {
        let channels = |c: Option<i64>| matches!(c, Some(2 | 4 | 8));
        let spatial = (3..=4).contains(&ty.rank());
        spatial
            && ty.dtype.is_float()
            && ty.dtype != DType::F64
            && channels(ty.shape[channel_dim(ty.rank())].as_constant())
    })?;
    let (k, ty) = (g.known(x), g.ty(x));
    let (spatial, channels) = (ty.rank() - 2, ty.shape[channel_dim(ty.rank())].as_constant()?);
    let groups = *g.rng.choose(&[1, 1, 2, channels]);
    let outputs = groups * *g.rng.choose(&[1, 2]);
    let kernel: Vec<i64> = (0..spatial).map(|_| *g.rng.choose(&[1, 2, 3])).collect();
    let stride: Vec<i64> = (0..spatial).map(|_| *g.rng.choose(&[1, 1, 2])).collect();
    let padding: Vec<i64> = kernel.iter().map(|k| k / 2).collect();
    let dilation: Vec<i64> = (0..spatial).map(|_| *g.rng.choose(&[1, 1, 2])).collect();
    let mut shape = ty.shape.clone();
    shape[channel_dim(ty.rank())] = Dim::constant(outputs);
    for i in 0..spatial {
        let size = &mut shape[i + if channels_last { 1 } else { 2 }];
        if g.smallest(size) + 2 * padding[i] <= dilation[i] * (kernel[i] - 1) {
            return None;
        }
        *size = window_output(size, kernel[i], stride[i], padding[i], dilation[i]);
    }
    let taps = kernel.iter().product::<i64>() * channels / groups;
    let has_bias = g.rng.one_in(2);
    let known = weighted(k, taps as f64, has_bias).rounded(ty.dtype);
    if known.bound > super::LARGEST || known.error > super::LEAST_SURE {
        return None;
    }
    let weight = [&[outputs, channels / groups], kernel.as_slice()].concat();
    let mut operands = vec![x, g.parameter(ty.dtype, &weight)];
    if has_bias {
        operands.push(g.parameter(ty.dtype, &[outputs]));
    }
    let op = Op::Convolution { stride, padding, dilation, groups, channels_last };
    Some(g.push(op, &operands, ty.dtype, shape, known))
}

/// Self-attention, or with another value as key and value.
fn attention(g: &mut Generator) -> Option<ValueId> {
    let q = g.pick(|ty| ty.rank() >= 3 && ty.dtype.is_float() && ty.dtype != DType::F64)?;
    let ty = g.ty(q);
    let fits = |t: &ValueType| {
        let rank = ty.rank();
        let same = |d: usize| d == rank - 2 || t.shape[d] == ty.shape[d];
        t.dtype == ty.dtype && t.rank() == rank && (0..rank).all(same)
    };
    let kv = g.pick(fits)?;
    let keys = g.ty(kv).shape[ty.rank() - 2].clone();
    let mask = g.pick(|t| t.dtype == DType::Bool && t.rank() >= 2);
    let scores = [&ty.shape[..ty.rank() - 1], std::slice::from_ref(&keys)].concat();
    let mask = mask.filter(|&m| g.broadcast(&[&g.ty(m).shape, &scores]).is_some_and(|s| s == scores));
    let is_causal = mask.is_none() && g.rng.one_in(3);
    let scale = 0.25;
    let size = g.largest(ty.shape.last()?) as f64;
    let products = g.known(q).times(g.known(kv)).summed(size).times(Known::exact(scale));
    let v = g.known(kv);
    let known = Known { bound: v.bound, error: v.error + 2.0 * v.bound * (products.error + f64::exp2(-22.0)) };
    let operands: Vec<ValueId> = [q, kv, kv].into_iter().chain(mask).collect();
    g.emit(Op::ScaledDotProductAttention { is_causal, scale }, &operands, ty.dtype, ty.shape, known)
}

/// What a norm over `n` elements does, with an `eps` large enough to keep it smooth.
const EPS: f64 = 0.25;

fn normalized(k: Known, n: f64, has_weight: bool, has_bias: bool) -> Known {
    let deviation = EPS.sqrt();
    let bound = n.sqrt().min(2.0 * k.bound / deviation);
    let mut known = k.summed(n).times(Known::exact(1.0 / n)).through((2.0 + bound) / deviation, bound);
    if has_weight {
        known = known.times(Known::exact(PARAMETER_BOUND));
    }
    if has_bias { known.plus(Known::exact(PARAMETER_BOUND)) } else { known }
}

/// The weights' type: that of x, or f32 with a 16-bit x.
fn weight_dtype(g: &mut Generator, x: DType) -> DType {
    if g.rng.one_in(3) { DType::F32 } else { x }
}

fn group_norm(g: &mut Generator) -> Option<ValueId> {
    let channel_dim = *g.rng.choose(&[1, 1, 2, 3]);
    let x = g.pick(|ty| {
        let channels = ty.shape.get(channel_dim).and_then(Dim::as_constant);
        ty.dtype.is_float() && ty.dtype != DType::F64 && matches!(channels, Some(2 | 4 | 8))
    })?;
    let (k, ty) = (g.known(x), g.ty(x));
    let channels = ty.shape[channel_dim].as_constant()?;
    let num_groups = *g.rng.choose(&[1, 2]);
    let n = g.largest_numel(&ty.shape[1..]) / num_groups;
    if g.smallest(&Dim::product(&ty.shape)) < 1 {
        return None;
    }
    let has_weight = g.rng.one_in(2);
    let known = normalized(k, n as f64, has_weight, has_weight).rounded(ty.dtype);
    if known.error > super::LEAST_SURE {
        return None;
    }
    let mut operands = vec![x];
    if has_weight {
        let dtype = weight_dtype(g, ty.dtype);
        operands.extend([g.parameter(dtype, &[channels]), g.parameter(dtype, &[channels])]);
    }
    Some(g.push(Op::GroupNorm { num_groups, eps: EPS, channel_dim }, &operands, ty.dtype, ty.shape, known))
}

fn row_norm(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| {
        let size = ty.shape.last().and_then(Dim::as_constant);
        ty.dtype.is_float() && ty.dtype != DType::F64 && size.is_some_and(|s| s > 0)
    })?;
    let (k, ty) = (g.known(x), g.ty(x));
    let size = ty.shape.last()?.as_constant()?;
    let is_rms = g.rng.one_in(2);
    let affine = g.rng.below(if is_rms { 2 } else { 3 });
    let known = normalized(k, size as f64, affine > 0, affine > 1).rounded(ty.dtype);
    if known.error > super::LEAST_SURE {
        return None;
    }
    let dtype = weight_dtype(g, ty.dtype);
    let mut operands = vec![x];
    (0..affine).for_each(|_| operands.push(g.parameter(dtype, &[size])));
    let (normalized_ndim, eps) = (1, EPS);
    let floor = is_rms && g.rng.one_in(3);
    let op = if is_rms { Op::RmsNorm { normalized_ndim, eps, floor } } else { Op::LayerNorm { normalized_ndim, eps } };
    Some(g.push(op, &operands, ty.dtype, ty.shape, known))
}

fn upsample(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() >= 3 && ty.dtype.is_float())?;
    let (k, ty) = (g.known(x), g.ty(x));
    let first_dim = g.rng.below(ty.rank() - 1);
    let exact = g.rng.one_in(3);
    let scales = vec![*g.rng.choose(&[2.0, 0.0]); 2];
    let mut shape = ty.shape;
    for size in &mut shape[first_dim..first_dim + 2] {
        *size = &*size * &Dim::constant(2);
    }
    g.emit(Op::UpsampleNearest { first_dim, scales, exact }, &[x], ty.dtype, shape, k)
}

fn pool(g: &mut Generator) -> Option<ValueId> {
    let x = g.pick(|ty| ty.rank() >= 3 && ty.dtype.is_float() && ty.dtype != DType::F64)?;
    let (k, ty) = (g.known(x), g.ty(x));
    let first_dim = g.rng.below(ty.rank() - 1);
    let (kernel, stride, padding) = (vec![2, 2], vec![2, 1], vec![*g.rng.choose(&[0, 1]), 0]);
    let mut shape = ty.shape;
    for (i, size) in shape[first_dim..first_dim + 2].iter_mut().enumerate() {
        if g.smallest(size) < 2 {
            return None;
        }
        *size = window_output(size, kernel[i], stride[i], padding[i], 1);
    }
    let op = *g.rng.choose(&[PoolOp::Avg, PoolOp::Max]);
    let known = if op == PoolOp::Avg { k.summed(4.0).times(Known::exact(0.25)) } else { k };
    let count_include_pad = g.rng.one_in(2);
    g.emit(Op::Pool { op, first_dim, kernel, stride, padding, count_include_pad }, &[x], ty.dtype, shape, known)
}

fn source(g: &mut Generator) -> Option<ValueId> {
    let like = g.pick(|ty| ty.rank() > 0)?;
    let size = g.ty(like).shape[0].clone();
    match g.rng.below(4) {
        0 => {
            let step = *g.rng.choose(&[1, 2]);
            let bound = Known::exact((g.largest(&size) * step) as f64);
            let op = Op::Arange { start: Dim::constant(0), step: Dim::constant(step) };
            Some(g.push(op, &[], DType::I64, vec![size], bound))
        }
        1 => {
            let values: Vec<f64> = (0..8).map(|_| g.rng.multiple(0.0625, PARAMETER_BOUND)).collect();
            let dtype = g.dtype;
            Some(g.constant(dtype, &[8], &values))
        }
        2 => {
            let (ty, value) = (g.ty(like), g.rng.multiple(0.5, 1.0));
            let dtype = g.dtype;
            Some(g.push(Op::Full { value }, &[], dtype, ty.shape, Known::exact(value.abs())))
        }
        _ => Some(g.constant(DType::I64, &[3], &[2.0, 0.0, 1.0])),
    }
}
