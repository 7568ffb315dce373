//! Upsampling and pooling.

use super::gather;
use super::movement::{for_each_row, pad};
use super::tensor::{Tensor, numel, reserve, strides_of};
use crate::ir::dtype::DType;
use crate::ir::infer::Check;
use crate::ir::op::PoolOp;

/// Source index of output index `i`, in f32 as in ATen.
fn nearest(i: i64, input: i64, output: i64, scale: f64, exact: bool) -> i64 {
    let ratio = if scale > 0.0 { (1.0 / scale) as f32 } else { input as f32 / output as f32 };
    let at = if exact { (i as f32 + 0.5) * ratio } else { i as f32 * ratio };
    (at.floor() as i64).clamp(0, input - 1)
}

/// One dimension at a time.
pub(super) fn upsample_nearest(
    x: &Tensor,
    first_dim: usize,
    scales: &[f64],
    exact: bool,
    shape: &[i64],
) -> Check<Tensor> {
    let mut out = x.clone();
    for (d, &scale) in (first_dim..).zip(scales) {
        let (input, output) = (x.shape()[d], shape[d]);
        let index: Vec<i64> = (0..output).map(|i| nearest(i, input, output, scale, exact)).collect();
        let mut next = out.shape().to_vec();
        next[d] = output;
        out = gather::index_select(&out, &Tensor::of_ints(DType::I64, &[output], &index), d, &next)?;
    }
    Ok(out)
}

/// Attributes of a window reduction.
pub(super) struct Pool<'a> {
    pub first_dim: usize,
    pub kernel: &'a [i64],
    pub stride: &'a [i64],
    pub padding: &'a [i64],
}

/// Padded first: with 0 for an average, with the lowest value for a maximum.
pub(super) fn pool(op: PoolOp, x: &Tensor, p: &Pool, count_include_pad: bool, shape: &[i64]) -> Check<Tensor> {
    let mut before = vec![0; shape.len()];
    let mut padded = x.shape().to_vec();
    for (i, &padding) in p.padding.iter().enumerate() {
        before[p.first_dim + i] = padding;
        padded[p.first_dim + i] += 2 * padding;
    }
    match op {
        PoolOp::Avg => {
            let sums = window_sums(&pad(x, &before, 0.0, &padded)?, p, shape)?;
            let counts = if count_include_pad {
                vec![p.kernel.iter().product::<i64>() as f64; sums.len()]
            } else {
                let ones = Tensor::filled(DType::F64, x.shape(), 1.0)?;
                window_sums(&pad(&ones, &before, 0.0, &padded)?, p, shape)?
            };
            let means: Vec<f64> = sums.iter().zip(&counts).map(|(s, c)| s / c).collect();
            Ok(Tensor::of_floats(x.dtype(), shape, &means))
        }
        PoolOp::Max if x.dtype().is_float() => {
            let values = pad(x, &before, f64::NEG_INFINITY, &padded)?.to_f64();
            let max = |a: f64, b: f64| if b.is_nan() || b > a { b } else { a };
            Ok(Tensor::of_floats(x.dtype(), shape, &fold(&values, &padded, p, shape, f64::NEG_INFINITY, max)?))
        }
        PoolOp::Max => {
            // The fill saturates at the type's lowest value.
            let values = pad(x, &before, f64::NEG_INFINITY, &padded)?.to_i64();
            let lowest = if x.dtype() == DType::Bool { 0 } else { i64::MIN };
            let values: Vec<i64> = fold(&values, &padded, p, shape, lowest, i64::max)?;
            Ok(Tensor::of_ints(x.dtype(), shape, &values))
        }
    }
}

fn window_sums(padded: &Tensor, p: &Pool, shape: &[i64]) -> Check<Vec<f64>> {
    fold(&padded.to_f64(), padded.shape(), p, shape, 0.0, |a, b| a + b)
}

/// Folds each window of `values`.
fn fold<T: Copy>(values: &[T], from: &[i64], p: &Pool, shape: &[i64], init: T, f: fn(T, T) -> T) -> Check<Vec<T>> {
    let strides = strides_of(from);
    let window = &strides[p.first_dim..p.first_dim + p.kernel.len()];
    let mut steps = strides.clone();
    for (i, s) in p.stride.iter().enumerate() {
        steps[p.first_dim + i] *= s;
    }
    let mut out = reserve(numel(shape))?;
    for_each_row(shape, 0, &steps, |base, stride, len| {
        for i in 0..len {
            let mut result = init;
            for_each_row(p.kernel, base + i * stride, window, |base, stride, len| {
                result = (0..len).fold(result, |r, k| f(r, values[(base + k * stride) as usize]));
            });
            out.push(result);
        }
    });
    Ok(out)
}
