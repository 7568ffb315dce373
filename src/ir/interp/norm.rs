//! Norms: statistics and application in f64, one rounding at the end.

use super::tensor::{Tensor, numel};
use crate::ir::dtype::DType;
use crate::ir::infer::Check;

/// Mean and `1 / sqrt(variance + eps)`, the variance with divisor n.
fn statistics(values: impl Iterator<Item = f64> + Clone, eps: f64) -> (f64, f64) {
    let (count, sum) = values.clone().fold((0.0, 0.0), |(n, s), v| (n + 1.0, s + v));
    let mean = sum / count;
    let variance = values.map(|v| (v - mean) * (v - mean)).sum::<f64>() / count;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// Weight and bias, 1 and 0 where there is none.
fn affine(operands: &[&Tensor], len: usize) -> (Vec<f64>, Vec<f64>) {
    let weight = operands.get(1).map_or_else(|| vec![1.0; len], |w| w.to_f64());
    let bias = operands.get(2).map_or_else(|| vec![0.0; len], |b| b.to_f64());
    (weight, bias)
}

/// Channel `c` of batch `b` lies at `[b, before, c, after]`, whichever dimension the channels are.
pub(super) fn group_norm(
    operands: &[&Tensor],
    groups: i64,
    eps: f64,
    channel_dim: usize,
    dtype: DType,
) -> Check<Tensor> {
    let x = operands[0];
    let channels = x.shape()[channel_dim] as usize;
    let (before, after) = (numel(&x.shape()[1..channel_dim]), numel(&x.shape()[channel_dim + 1..]));
    let (weight, bias) = affine(operands, channels);
    let (values, per_group) = (x.to_f64(), channels / groups as usize);
    let mut out = values.clone();
    for (batch, group) in (0..x.shape()[0] as usize).flat_map(|b| (0..groups as usize).map(move |g| (b, g))) {
        let members = (0..before).flat_map(move |o| {
            let channels_of_group = group * per_group..(group + 1) * per_group;
            channels_of_group.flat_map(move |c| (0..after).map(move |i| (c, i))).map(move |(c, i)| {
                let at = ((batch * before + o) * channels + c) * after + i;
                (at, c)
            })
        });
        let (mean, scale) = statistics(members.clone().map(|(at, _)| values[at]), eps);
        members.for_each(|(at, c)| out[at] = (values[at] - mean) * scale * weight[c] + bias[c]);
    }
    Ok(Tensor::of_floats(dtype, x.shape(), &out))
}

pub(super) fn layer_norm(operands: &[&Tensor], normalized_ndim: usize, eps: f64, dtype: DType) -> Check<Tensor> {
    let x = operands[0];
    let len = numel(&x.shape()[x.shape().len() - normalized_ndim..]);
    let (weight, bias) = affine(operands, len);
    let mut values = x.to_f64();
    for row in values.chunks_mut(len.max(1)) {
        let (mean, scale) = statistics(row.iter().copied(), eps);
        for (i, v) in row.iter_mut().enumerate() {
            *v = (*v - mean) * scale * weight[i] + bias[i];
        }
    }
    Ok(Tensor::of_floats(dtype, x.shape(), &values))
}

pub(super) fn rms_norm(
    operands: &[&Tensor],
    normalized_ndim: usize,
    eps: f64,
    floor: bool,
    dtype: DType,
) -> Check<Tensor> {
    let x = operands[0];
    let len = numel(&x.shape()[x.shape().len() - normalized_ndim..]);
    let (weight, _) = affine(operands, len);
    let mut values = x.to_f64();
    for row in values.chunks_mut(len.max(1)) {
        let mean_square = row.iter().map(|v| v * v).sum::<f64>() / len as f64;
        let root = match floor {
            true if mean_square.sqrt() < eps => eps,
            true => mean_square.sqrt(),
            false => (mean_square + eps).sqrt(),
        };
        row.iter_mut().enumerate().for_each(|(i, v)| *v = *v / root * weight[i]);
    }
    Ok(Tensor::of_floats(dtype, x.shape(), &values))
}
