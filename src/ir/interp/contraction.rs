//! Sums of products: one dot-product loop serves them all.

use super::movement::{broadcast_strides, for_each_row};
use super::tensor::{Tensor, numel, reserve, strides_of};
use crate::ir::dtype::DType;
use crate::ir::infer::Check;

/// Sum of products in eight partial sums, which lets the compiler use vectors.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let (a8, a_rest) = a.as_chunks::<8>();
    let (b8, b_rest) = b.as_chunks::<8>();
    let mut sums = [0.0; 8];
    for (a, b) in a8.iter().zip(b8) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}

/// `out[m, n] = bias[n] + sum over k of a[m, k] * b[n, k]`, in blocks of rows of `a` that stay in the cache.
fn multiply(a: &[f64], b: &[f64], bias: Option<&[f64]>, k: usize, n: usize, out: &mut [f64]) {
    const ROWS: usize = 16;
    for (block, rows) in out.chunks_mut(ROWS * n.max(1)).enumerate() {
        let first = block * ROWS;
        for j in 0..n {
            let (weight, bias) = (&b[j * k..(j + 1) * k], bias.map_or(0.0, |bias| bias[j]));
            for i in 0..rows.len() / n {
                rows[i * n + j] = bias + dot(&a[(first + i) * k..(first + i + 1) * k], weight);
            }
        }
    }
}

fn zeros(len: usize) -> Check<Vec<f64>> {
    let mut out = reserve(len)?;
    out.resize(len, 0.0);
    Ok(out)
}

/// `[rows, cols]` to `[cols, rows]`.
fn transpose(x: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| x[r * cols + c])).collect()
}

pub(super) fn linear(operands: &[&Tensor], dtype: DType, shape: &[i64]) -> Check<Tensor> {
    let (n, k) = (operands[1].shape()[0] as usize, operands[1].shape()[1] as usize);
    let bias = operands.get(2).map(|b| b.to_f64());
    let mut out = zeros(numel(shape))?;
    multiply(&operands[0].to_f64(), &operands[1].to_f64(), bias.as_deref(), k, n, &mut out);
    Ok(Tensor::of_floats(dtype, shape, &out))
}

/// Offsets of the matrices that a batch of shape `batch` takes from `x`.
fn batches(x: &[i64], batch: &[i64]) -> Vec<usize> {
    let (outer, matrix) = x.split_at(x.len() - 2);
    let mut out = Vec::new();
    for_each_row(batch, 0, &broadcast_strides(outer, batch), |base, stride, len| {
        out.extend((0..len).map(|i| (base + i * stride) as usize * numel(matrix)));
    });
    out
}

pub(super) fn matmul(a: &Tensor, b: &Tensor, dtype: DType, shape: &[i64]) -> Check<Tensor> {
    let (batch, matrix) = shape.split_at(shape.len() - 2);
    let (m, n) = (matrix[0] as usize, matrix[1] as usize);
    let k = a.shape()[a.shape().len() - 1] as usize;
    let (x, y) = (a.to_f64(), b.to_f64());
    let mut out = zeros(numel(shape))?;
    let places = batches(a.shape(), batch).into_iter().zip(batches(b.shape(), batch));
    for ((at_a, at_b), out) in places.zip(out.chunks_mut((m * n).max(1))) {
        let columns = transpose(&y[at_b..at_b + k * n], k, n);
        multiply(&x[at_a..at_a + m * k], &columns, None, k, n, out);
    }
    Ok(Tensor::of_floats(dtype, shape, &out))
}

/// Attributes of a convolution.
pub(super) struct Windows<'a> {
    pub stride: &'a [i64],
    pub padding: &'a [i64],
    pub dilation: &'a [i64],
    pub groups: i64,
}

/// Gathers the windows of one group into rows, then multiplies, a block of output positions at a time.
pub(super) fn convolution(
    operands: &[&Tensor],
    w: &Windows,
    channels_last: bool,
    dtype: DType,
    shape: &[i64],
) -> Check<Tensor> {
    const POSITIONS: usize = 64;
    let (x, weight) = (operands[0], operands[1]);
    let spatial = w.stride.len();
    let (channel_dim, first) = if channels_last { (spatial + 1, 1) } else { (1, 2) };
    let (from, to) = (strides_of(x.shape()), strides_of(shape));
    let (inputs, outputs) = (weight.shape()[1], weight.shape()[0] / w.groups);
    let k = numel(&weight.shape()[1..]);
    let bias = operands.get(2).map(|b| b.to_f64());
    let (values, weights) = (x.to_f64(), weight.to_f64());
    let sizes = &x.shape()[first..first + spatial];
    let positions = indices(&shape[first..first + spatial]);
    let taps = indices(&weight.shape()[2..]);
    let mut out = zeros(numel(shape))?;
    let mut rows = vec![0.0; POSITIONS * k];
    let mut block_out = vec![0.0; POSITIONS * outputs as usize];
    for (batch, group) in (0..shape[0]).flat_map(|b| (0..w.groups).map(move |g| (b, g))) {
        let in_base = batch * from[0] + group * inputs * from[channel_dim];
        let out_base = batch * to[0] + group * outputs * to[channel_dim];
        let channels = group as usize * outputs as usize..(group + 1) as usize * outputs as usize;
        let weights = &weights[channels.start * k..channels.end * k];
        let bias = bias.as_ref().map(|b| &b[channels]);
        for block in positions.chunks(POSITIONS) {
            for (row, position) in rows.chunks_mut(k.max(1)).zip(block) {
                for (t, tap) in taps.iter().enumerate() {
                    let source = |i: usize| position[i] * w.stride[i] + tap[i] * w.dilation[i] - w.padding[i];
                    let inside = (0..spatial).all(|i| (0..sizes[i]).contains(&source(i)));
                    let at = in_base + (0..spatial).map(|i| source(i) * from[first + i]).sum::<i64>();
                    for c in 0..inputs {
                        let value = if inside { values[(at + c * from[channel_dim]) as usize] } else { 0.0 };
                        row[c as usize * taps.len() + t] = value;
                    }
                }
            }
            let block_out = &mut block_out[..block.len() * outputs as usize];
            multiply(&rows, weights, bias, k, outputs as usize, block_out);
            for (results, position) in block_out.chunks(outputs.max(1) as usize).zip(block) {
                let at = out_base + (0..spatial).map(|i| position[i] * to[first + i]).sum::<i64>();
                for (c, v) in results.iter().enumerate() {
                    out[(at + c as i64 * to[channel_dim]) as usize] = *v;
                }
            }
        }
    }
    Ok(Tensor::of_floats(dtype, shape, &out))
}

/// Every index of a space of up to three dimensions, in row-major order.
fn indices(shape: &[i64]) -> Vec<[i64; 3]> {
    let mut out = vec![[0; 3]];
    for (d, &size) in shape.iter().enumerate() {
        let with = |index: [i64; 3], i| {
            let mut index = index;
            index[d] = i;
            index
        };
        out = out.into_iter().flat_map(|index| (0..size).map(move |i| with(index, i))).collect();
    }
    out
}

/// A query that may attend to nothing gives 0, as in ATen.
pub(super) fn attention(
    operands: &[&Tensor],
    is_causal: bool,
    scale: f64,
    dtype: DType,
    shape: &[i64],
) -> Check<Tensor> {
    let (batch, matrix) = shape.split_at(shape.len() - 2);
    let (l, ev) = (matrix[0] as usize, matrix[1] as usize);
    let [query, key, value] = [operands[0], operands[1], operands[2]];
    let (s, e) = (key.shape()[key.shape().len() - 2] as usize, query.shape()[query.shape().len() - 1] as usize);
    let (q, k, v) = (query.to_f64(), key.to_f64(), value.to_f64());
    let score_shape = [batch, &[l as i64, s as i64]].concat();
    let bias = operands.get(3).map(|mask| additive(mask, &score_shape)).transpose()?;
    let mut out = zeros(numel(shape))?;
    let mut scores = zeros(l * s)?;
    let places: Vec<[usize; 3]> = batches(query.shape(), batch)
        .into_iter()
        .zip(batches(key.shape(), batch))
        .zip(batches(value.shape(), batch))
        .map(|((q, k), v)| [q, k, v])
        .collect();
    for (b, ([at_q, at_k, at_v], out)) in places.into_iter().zip(out.chunks_mut((l * ev).max(1))).enumerate() {
        multiply(&q[at_q..at_q + l * e], &k[at_k..at_k + s * e], None, e, s, &mut scores);
        for (i, row) in scores.chunks_mut(s.max(1)).enumerate() {
            for (j, score) in row.iter_mut().enumerate() {
                *score *= scale;
                if let Some(bias) = &bias {
                    *score += bias[(b * l + i) * s + j];
                }
                if is_causal && j > i {
                    *score = f64::NEG_INFINITY;
                }
            }
            softmax_or_zero(row);
        }
        multiply(&scores, &transpose(&v[at_v..at_v + s * ev], s, ev), None, s, ev, out);
    }
    Ok(Tensor::of_floats(dtype, shape, &out))
}

/// What a mask adds to the scores.
fn additive(mask: &Tensor, shape: &[i64]) -> Check<Vec<f64>> {
    let values = super::movement::expand(mask, shape)?.to_f64();
    if mask.dtype() != DType::Bool {
        return Ok(values);
    }
    Ok(values.into_iter().map(|v| if v == 0.0 { f64::NEG_INFINITY } else { 0.0 }).collect())
}

fn softmax_or_zero(row: &mut [f64]) {
    let max = row.iter().fold(f64::NEG_INFINITY, |a, &b| if b.is_nan() || b > a { b } else { a });
    if max == f64::NEG_INFINITY {
        return row.fill(0.0);
    }
    row.iter_mut().for_each(|v| *v = (*v - max).exp());
    let sum: f64 = row.iter().sum();
    row.iter_mut().for_each(|v| *v /= sum);
}
