//! Ops that choose elements by index.

use super::movement::for_each_row;
use super::tensor::{Tensor, numel, reserve, strides_of};
use crate::ir::infer::Check;

fn in_range(index: i64, size: i64) -> Check<usize> {
    if (0..size).contains(&index) {
        return Ok(index as usize);
    }
    Err(format!("index {index} is out of range for size {size}"))
}

pub(super) fn index_select(x: &Tensor, index: &Tensor, dim: usize, shape: &[i64]) -> Check<Tensor> {
    let size = x.shape()[dim];
    let index: Vec<usize> = index.to_i64().into_iter().map(|i| in_range(i, size)).collect::<Check<_>>()?;
    let row = numel(&x.shape()[dim + 1..]) * x.dtype().size_bytes();
    let mut bytes = reserve(numel(shape) * x.dtype().size_bytes())?;
    for outer in 0..numel(&x.shape()[..dim]) {
        let block = &x.bytes()[outer * size as usize * row..];
        index.iter().for_each(|i| bytes.extend_from_slice(&block[i * row..(i + 1) * row]));
    }
    Ok(Tensor::of_bytes(x.dtype(), shape, bytes))
}

/// Sums in f64, one rounding at the end.
pub(super) fn interpolate(operands: &[&Tensor], dim: usize, shape: &[i64]) -> Check<Tensor> {
    let (x, taps) = (operands[0], operands[1].shape()[1] as usize);
    let (size, row) = (x.shape()[dim], numel(&x.shape()[dim + 1..]));
    let index: Vec<usize> = operands[1].to_i64().into_iter().map(|i| in_range(i, size)).collect::<Check<_>>()?;
    let (weight, values) = (operands[2].to_f64(), x.to_f64());
    let mut out = reserve(numel(shape))?;
    for outer in 0..numel(&x.shape()[..dim]) {
        let block = &values[outer * size as usize * row..];
        for place in 0..shape[dim] as usize {
            let chosen = place * taps..(place + 1) * taps;
            let pairs = || index[chosen.clone()].iter().zip(&weight[chosen.clone()]);
            out.extend((0..row).map(|i| pairs().map(|(at, weight)| block[at * row + i] * weight).sum::<f64>()));
        }
    }
    Ok(Tensor::of_floats(x.dtype(), shape, &out))
}

pub(super) fn gather(x: &Tensor, index: &Tensor, dim: usize, shape: &[i64]) -> Check<Tensor> {
    let strides = strides_of(x.shape());
    let mut without = strides.clone();
    without[dim] = 0;
    let (size, bytes_each) = (x.shape()[dim], x.dtype().size_bytes());
    let mut places = reserve(numel(shape))?;
    for_each_row(shape, 0, &without, |base, stride, len| places.extend((0..len).map(|i| base + i * stride)));
    let mut bytes = reserve(numel(shape) * bytes_each)?;
    for (place, i) in places.into_iter().zip(index.to_i64()) {
        let at = (place as usize + in_range(i, size)? * strides[dim] as usize) * bytes_each;
        bytes.extend_from_slice(&x.bytes()[at..at + bytes_each]);
    }
    Ok(Tensor::of_bytes(x.dtype(), shape, bytes))
}
