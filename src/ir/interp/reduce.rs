//! Ops along dimensions.

use super::tensor::{Tensor, numel, reserve};
use crate::ir::dtype::DType;
use crate::ir::infer::Check;
use crate::ir::interp::movement;
use crate::ir::op::ReduceOp;

/// `x` with `dims` moved to the end, and the number of elements over them.
fn reduced_last(x: &Tensor, dims: &[usize]) -> Check<(Tensor, usize)> {
    let kept = (0..x.shape().len()).filter(|d| !dims.contains(d));
    let order: Vec<usize> = kept.chain(dims.iter().copied()).collect();
    let shape: Vec<i64> = order.iter().map(|&d| x.shape()[d]).collect();
    let len = numel(&shape[shape.len() - dims.len()..]);
    Ok((movement::permute(x, &order, &shape)?, len))
}

/// `values` in runs of `len`, `count` of them; runs may be empty.
fn runs<T>(values: &[T], len: usize, count: usize) -> impl Iterator<Item = &[T]> {
    (0..count).map(move |i| &values[i * len..(i + 1) * len])
}

pub(super) fn reduce(op: ReduceOp, x: &Tensor, dims: &[usize], dtype: DType, shape: &[i64]) -> Check<Tensor> {
    // Dimensions in their own order, so that the first of equals is the first in memory.
    let mut dims = dims.to_vec();
    dims.sort_unstable();
    let (x, len) = reduced_last(x, &dims)?;
    let count = numel(shape);
    match op {
        ReduceOp::Any => return predicate(&x, len, shape, |run| run.iter().any(|&v| v != 0.0)),
        ReduceOp::All => return predicate(&x, len, shape, |run| run.iter().all(|&v| v != 0.0)),
        ReduceOp::Argmax => return arg(&x, len, shape, |a, b| a > b),
        ReduceOp::Argmin => return arg(&x, len, shape, |a, b| a < b),
        ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Amax | ReduceOp::Amin | ReduceOp::Prod => {}
    }
    if dtype.is_float() {
        let values = x.to_compute(dtype.compute());
        let f = float_reduce(op);
        return Ok(Tensor::of_floats(dtype, shape, &runs(&values, len, count).map(f).collect::<Vec<_>>()));
    }
    let values = x.to_i64();
    let f = int_reduce(op);
    Ok(Tensor::of_ints(dtype, shape, &runs(&values, len, count).map(f).collect::<Vec<_>>()))
}

fn predicate(x: &Tensor, len: usize, shape: &[i64], test: impl Fn(&[f64]) -> bool) -> Check<Tensor> {
    let values = x.to_f64();
    let out: Vec<i64> = runs(&values, len, numel(shape)).map(|run| i64::from(test(run))).collect();
    Ok(Tensor::of_ints(DType::Bool, shape, &out))
}

/// Position of the first best; NaN is better than any number.
fn arg(x: &Tensor, len: usize, shape: &[i64], better: impl Fn(f64, f64) -> bool) -> Check<Tensor> {
    if !x.dtype().is_float() {
        let values = x.to_i64();
        let sign = if better(1.0, 0.0) { 1i128 } else { -1 };
        let first_best = |run: &[i64]| (0..run.len()).rev().max_by_key(|&i| sign * i128::from(run[i]));
        let out: Vec<i64> =
            runs(&values, len, numel(shape)).map(|run| first_best(run).map_or(0, |i| i as i64)).collect();
        return Ok(Tensor::of_ints(DType::I64, shape, &out));
    }
    let values = x.to_f64();
    let first_best = |run: &[f64]| {
        (1..run.len()).fold(0, |best, i| {
            let replaces = !run[best].is_nan() && (run[i].is_nan() || better(run[i], run[best]));
            if replaces { i } else { best }
        })
    };
    let out: Vec<i64> = runs(&values, len, numel(shape)).map(|run| first_best(run) as i64).collect();
    Ok(Tensor::of_ints(DType::I64, shape, &out))
}

fn float_reduce(op: ReduceOp) -> fn(&[f64]) -> f64 {
    match op {
        ReduceOp::Sum => |run| run.iter().sum(),
        ReduceOp::Mean => |run| run.iter().sum::<f64>() / run.len() as f64,
        ReduceOp::Prod => |run| run.iter().product(),
        ReduceOp::Amax => |run| run.iter().fold(f64::NEG_INFINITY, |a, &b| if b.is_nan() || b > a { b } else { a }),
        ReduceOp::Amin => |run| run.iter().fold(f64::INFINITY, |a, &b| if b.is_nan() || b < a { b } else { a }),
        ReduceOp::Any | ReduceOp::All | ReduceOp::Argmax | ReduceOp::Argmin => unreachable!("done before"),
    }
}

fn int_reduce(op: ReduceOp) -> fn(&[i64]) -> i64 {
    match op {
        ReduceOp::Sum => |run| run.iter().fold(0, |a, &b| a.wrapping_add(b)),
        ReduceOp::Prod => |run| run.iter().fold(1, |a, &b| a.wrapping_mul(b)),
        ReduceOp::Amax => |run| run.iter().copied().max().unwrap_or(i64::MIN),
        ReduceOp::Amin => |run| run.iter().copied().min().unwrap_or(i64::MAX),
        ReduceOp::Mean => unreachable!("has no integer result: ir/infer"),
        ReduceOp::Any | ReduceOp::All | ReduceOp::Argmax | ReduceOp::Argmin => unreachable!("done before"),
    }
}

/// Applies `f` to each line along `dim`, in place, `[outer, len, inner]` being how the dimensions lie around it.
fn along<T: Copy>(values: &mut [T], shape: &[i64], dim: usize, mut f: impl FnMut(&mut [T])) -> Check {
    let (len, inner) = (shape[dim] as usize, numel(&shape[dim + 1..]));
    let mut line: Vec<T> = reserve(len)?;
    for outer in 0..numel(&shape[..dim]) {
        for i in 0..inner {
            let at = |k: usize| (outer * len + k) * inner + i;
            line.clear();
            line.extend((0..len).map(|k| values[at(k)]));
            f(&mut line);
            line.iter().enumerate().for_each(|(k, v)| values[at(k)] = *v);
        }
    }
    Ok(())
}

pub(super) fn cumsum(x: &Tensor, dim: usize, dtype: DType) -> Check<Tensor> {
    if dtype.is_float() {
        let mut values = x.to_compute(dtype.compute());
        along(&mut values, x.shape(), dim, |line| {
            let mut sum = 0.0;
            for v in line {
                sum += *v;
                *v = sum;
            }
        })?;
        return Ok(Tensor::of_floats(dtype, x.shape(), &values));
    }
    let mut values = x.to_i64();
    along(&mut values, x.shape(), dim, |line| {
        let mut sum = 0i64;
        for v in line {
            sum = sum.wrapping_add(*v);
            *v = sum;
        }
    })?;
    Ok(Tensor::of_ints(dtype, x.shape(), &values))
}

pub(super) fn softmax(x: &Tensor, dim: usize, dtype: DType) -> Check<Tensor> {
    let mut values = x.to_compute(dtype.compute());
    along(&mut values, x.shape(), dim, |line| {
        let max = float_reduce(ReduceOp::Amax)(line);
        line.iter_mut().for_each(|v| *v = (*v - max).exp());
        let sum: f64 = line.iter().sum();
        line.iter_mut().for_each(|v| *v /= sum);
    })?;
    Ok(Tensor::of_floats(dtype, x.shape(), &values))
}
