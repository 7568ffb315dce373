//! Ops that move elements without looking at them.
//!
//! All are one strided copy: an element's place in the source, or in the result, is a base plus index times stride.

use super::tensor::{Tensor, numel, reserve, strides_of};
use crate::ir::infer::Check;

/// A walk over the indices of `shape` in row-major order: `f(base, stride, len)` for each row of the last dimension.
pub(super) fn for_each_row(shape: &[i64], start: i64, strides: &[i64], mut f: impl FnMut(i64, i64, i64)) {
    if numel(shape) == 0 {
        return;
    }
    let Some((&len, outer)) = shape.split_last() else { return f(start, 0, 1) };
    let mut index = vec![0i64; outer.len()];
    let mut base = start;
    loop {
        f(base, strides[outer.len()], len);
        let mut d = outer.len();
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            index[d] += 1;
            base += strides[d];
            if index[d] < outer[d] {
                break;
            }
            base -= index[d] * strides[d];
            index[d] = 0;
        }
    }
}

/// The same code for every size of element.
macro_rules! by_element_size {
    ($tensor:expr, $function:ident($($argument:expr),*)) => {
        match $tensor.dtype().size_bytes() {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            4 => $function::<4>($($argument),*),
            _ => $function::<8>($($argument),*),
        }
    };
}

/// The elements at `start + index * strides`, in order of the index.
fn read<const N: usize>(from: &[u8], shape: &[i64], start: i64, strides: &[i64]) -> Check<Vec<u8>> {
    let (elements, _) = from.as_chunks::<N>();
    let mut out: Vec<u8> = reserve(numel(shape) * N)?;
    for_each_row(shape, start, strides, |base, stride, len| {
        if stride == 1 {
            out.extend_from_slice(elements[base as usize..(base + len) as usize].as_flattened());
        } else {
            (0..len).for_each(|i| out.extend_from_slice(&elements[(base + i * stride) as usize]));
        }
    });
    Ok(out)
}

/// Writes the elements of `from`, of that shape, to `start + index * strides`.
fn write<const N: usize>(to: &mut [u8], from: &[u8], shape: &[i64], start: i64, strides: &[i64]) {
    let (elements, _) = to.as_chunks_mut::<N>();
    let mut rest = from.as_chunks::<N>().0;
    for_each_row(shape, start, strides, |base, stride, len| {
        let (row, after) = rest.split_at(len as usize);
        rest = after;
        row.iter().enumerate().for_each(|(i, e)| elements[(base + i as i64 * stride) as usize] = *e);
    });
}

fn strided_read(x: &Tensor, shape: &[i64], start: i64, strides: &[i64]) -> Check<Tensor> {
    Ok(Tensor::of_bytes(x.dtype(), shape, by_element_size!(x, read(x.bytes(), shape, start, strides))?))
}

pub(super) fn permute(x: &Tensor, dims: &[usize], shape: &[i64]) -> Check<Tensor> {
    let strides = strides_of(x.shape());
    let strides: Vec<i64> = dims.iter().map(|&d| strides[d]).collect();
    strided_read(x, shape, 0, &strides)
}

/// Strides that walk `from` as if it had the shape `to`: 0 where it stretches.
pub(super) fn broadcast_strides(from: &[i64], to: &[i64]) -> Vec<i64> {
    let mut strides = vec![0; to.len() - from.len()];
    strides.extend(strides_of(from).iter().zip(from).map(|(&s, &d)| if d == 1 { 0 } else { s }));
    strides
}

pub(super) fn expand(x: &Tensor, shape: &[i64]) -> Check<Tensor> {
    strided_read(x, shape, 0, &broadcast_strides(x.shape(), shape))
}

pub(super) fn slice(x: &Tensor, dim: usize, start: i64, step: i64, shape: &[i64]) -> Check<Tensor> {
    let mut strides = strides_of(x.shape());
    let first = start * strides[dim];
    strides[dim] *= step;
    strided_read(x, shape, first, &strides)
}

pub(super) fn flip(x: &Tensor, dims: &[usize]) -> Check<Tensor> {
    let mut strides = strides_of(x.shape());
    let mut start = 0;
    for &d in dims {
        start += (x.shape()[d] - 1) * strides[d];
        strides[d] = -strides[d];
    }
    strided_read(x, x.shape(), start, &strides)
}

pub(super) fn cat(operands: &[&Tensor], dim: usize, shape: &[i64]) -> Check<Tensor> {
    let outer = numel(&shape[..dim]);
    let row_bytes = |t: &Tensor| numel(&t.shape()[dim..]) * t.dtype().size_bytes();
    let mut bytes = reserve(operands.iter().map(|t| t.bytes().len()).sum())?;
    for o in 0..outer {
        operands.iter().for_each(|t| bytes.extend_from_slice(&t.bytes()[o * row_bytes(t)..(o + 1) * row_bytes(t)]));
    }
    Ok(Tensor::of_bytes(operands[0].dtype(), shape, bytes))
}

pub(super) fn pad(x: &Tensor, before: &[i64], value: f64, shape: &[i64]) -> Check<Tensor> {
    let mut bytes = Tensor::filled(x.dtype(), shape, value)?.into_bytes();
    let strides = strides_of(shape);
    let start = strides.iter().zip(before).map(|(s, b)| s * b).sum();
    by_element_size!(x, write(&mut bytes, x.bytes(), x.shape(), start, &strides));
    Ok(Tensor::of_bytes(x.dtype(), shape, bytes))
}

pub(super) fn slice_scatter(x: &Tensor, source: &Tensor, dim: usize, start: i64, step: i64) -> Check<Tensor> {
    let mut bytes = x.bytes().to_vec();
    let mut strides = strides_of(x.shape());
    let first = start * strides[dim];
    strides[dim] *= step;
    by_element_size!(x, write(&mut bytes, source.bytes(), source.shape(), first, &strides));
    Ok(Tensor::of_bytes(x.dtype(), x.shape(), bytes))
}
