//! Shapes of results, one formula for numbers and for symbolic sizes.
//!
//! Attributes are known to fit the ranks ([`super::ranges::check_attributes`]): indexing by them is safe.

use std::fmt;

use super::Check;
use crate::ir::dim::Dim;
use crate::ir::op::Op;

/// A size: a number or an expression.
pub trait Size: Clone + PartialEq + fmt::Display {
    /// The constant `value`.
    fn number(value: i64) -> Self;
    /// The value if it is known.
    fn known(&self) -> Option<i64>;
    /// `self + other`.
    fn plus(&self, other: &Self) -> Self;
    /// `floor(self / divisor)`, divisor positive.
    fn floored(&self, divisor: i64) -> Self;
    /// False if both are known and differ.
    fn may_equal(&self, other: &Self) -> bool {
        self.known().zip(other.known()).is_none_or(|(a, b)| a == b)
    }
}

impl Size for i64 {
    fn number(value: i64) -> Self {
        value
    }
    fn known(&self) -> Option<i64> {
        Some(*self)
    }
    fn plus(&self, other: &Self) -> Self {
        self.saturating_add(*other)
    }
    fn floored(&self, divisor: i64) -> Self {
        self.div_euclid(divisor)
    }
}

impl Size for Dim {
    fn number(value: i64) -> Self {
        Dim::constant(value)
    }
    fn known(&self) -> Option<i64> {
        self.as_constant()
    }
    fn plus(&self, other: &Self) -> Self {
        self + other
    }
    fn floored(&self, divisor: i64) -> Self {
        self.floor_div(divisor).expect("attributes are checked: windows have positive strides")
    }
}

fn show<S: Size>(shape: &[S]) -> String {
    format!("[{}]", shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
}

/// NumPy broadcasting: trailing dimensions aligned, 1 stretches.
///
/// # Errors
/// If sizes differ, or it cannot be told whether they do (two different expressions).
pub fn broadcast_shapes<S: Size>(shapes: &[&[S]]) -> Result<Vec<S>, String> {
    let rank = shapes.iter().map(|s| s.len()).max().unwrap_or(0);
    let mut out = vec![S::number(1); rank];
    for shape in shapes {
        for (slot, size) in out[rank - shape.len()..].iter_mut().zip(*shape) {
            match (slot.known(), size.known()) {
                _ if slot == size => {}
                (_, Some(1)) => {}
                (Some(1), _) => *slot = size.clone(),
                // A known size other than 1 wins over an expression, which must be equal to it or 1.
                (Some(_), None) => {}
                (None, Some(_)) => *slot = size.clone(),
                _ => {
                    let all: Vec<String> = shapes.iter().map(|s| show(s)).collect();
                    return Err(format!("shapes {} do not broadcast", all.join(" and ")));
                }
            }
        }
    }
    Ok(out)
}

/// Positions of a window: `floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1`; stride positive.
pub fn window_output<S: Size>(size: &S, kernel: i64, stride: i64, padding: i64, dilation: i64) -> S {
    let extra = padding.saturating_mul(2).saturating_sub(dilation.saturating_mul(kernel - 1)).saturating_sub(1);
    size.plus(&S::number(extra)).floored(stride).plus(&S::number(1))
}

/// The result's shape, `None` where it is the author's to choose.
pub(crate) fn result_shape<S: Size>(op: &Op, operands: &[&[S]]) -> Check<Option<Vec<S>>> {
    match op {
        Op::Input { .. }
        | Op::Parameter { .. }
        | Op::Constant { .. }
        | Op::Full { .. }
        | Op::SizeOf { .. }
        | Op::Arange { .. }
        | Op::Reshape
        | Op::Expand
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::UpsampleNearest { .. } => Ok(None),
        Op::Unary(_) | Op::Convert | Op::Flip { .. } | Op::Cumsum { .. } | Op::Softmax { .. } => {
            Ok(Some(operands[0].to_vec()))
        }
        Op::SliceScatter { dim, .. } => {
            same_except(operands[0], operands[1], *dim)?;
            Ok(Some(operands[0].to_vec()))
        }
        Op::Binary(_) | Op::Where => broadcast_shapes(operands).map(Some),
        Op::Permute { dims } => Ok(Some(dims.iter().map(|&d| operands[0][d].clone()).collect())),
        Op::Cat { dim } => cat(operands, *dim).map(Some),
        Op::IndexSelect { dim } => {
            let (x, index) = (operands[0], operands[1]);
            Ok(Some([&x[..*dim], index, &x[dim + 1..]].concat()))
        }
        Op::Gather { .. } => Ok(Some(operands[1].to_vec())),
        Op::Interpolate { dim } => {
            same("index and weight", operands[1], operands[2])?;
            let (x, places) = (operands[0], &operands[1][..1]);
            Ok(Some([&x[..*dim], places, &x[dim + 1..]].concat()))
        }
        Op::Reduce { dims, keepdim, .. } => Ok(Some(reduce(operands[0], dims, *keepdim))),
        Op::Linear => linear(operands).map(Some),
        Op::Matmul => matmul(operands[0], operands[1]).map(Some),
        Op::Convolution { stride, padding, dilation, groups, channels_last } => {
            convolution(operands, &Windows { stride, padding, dilation }, *groups, *channels_last).map(Some)
        }
        Op::ScaledDotProductAttention { .. } => attention(operands).map(Some),
        Op::GroupNorm { channel_dim, .. } => norm(operands, &operands[0][*channel_dim..=*channel_dim]).map(Some),
        Op::LayerNorm { normalized_ndim, .. } | Op::RmsNorm { normalized_ndim, .. } => {
            norm(operands, &operands[0][operands[0].len() - normalized_ndim..]).map(Some)
        }
        Op::Pool { first_dim, kernel, stride, padding, .. } => {
            let mut out = operands[0].to_vec();
            for (i, size) in out[*first_dim..first_dim + kernel.len()].iter_mut().enumerate() {
                *size = window_output(size, kernel[i], stride[i], padding[i], 1);
            }
            Ok(Some(out))
        }
    }
}

fn same<S: Size>(what: &str, a: &[S], b: &[S]) -> Check {
    if a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.may_equal(b)) {
        return Ok(());
    }
    Err(format!("{what}: {} is not {}", show(a), show(b)))
}

fn same_except<S: Size>(a: &[S], b: &[S], dim: usize) -> Check {
    if a.len() != b.len() {
        return Err(format!("{} and {} differ in rank", show(a), show(b)));
    }
    same("sizes before the dimension", &b[..dim], &a[..dim])?;
    same("sizes after the dimension", &b[dim + 1..], &a[dim + 1..])
}

fn cat<S: Size>(operands: &[&[S]], dim: usize) -> Check<Vec<S>> {
    let mut out = operands[0].to_vec();
    for x in &operands[1..] {
        same_except(operands[0], x, dim)?;
        out[dim] = out[dim].plus(&x[dim]);
    }
    Ok(out)
}

fn reduce<S: Size>(x: &[S], dims: &[usize], keepdim: bool) -> Vec<S> {
    let kept = |(d, size): (usize, &S)| match (dims.contains(&d), keepdim) {
        (false, _) => Some(size.clone()),
        (true, true) => Some(S::number(1)),
        (true, false) => None,
    };
    x.iter().enumerate().filter_map(kept).collect()
}

fn linear<S: Size>(operands: &[&[S]]) -> Check<Vec<S>> {
    let (x, weight) = (operands[0], operands[1]);
    same("the last dimension of x and the weight's", &x[x.len() - 1..], &weight[1..])?;
    if let Some(bias) = operands.get(2) {
        same("bias", bias, &weight[..1])?;
    }
    Ok([&x[..x.len() - 1], &weight[..1]].concat())
}

fn matmul<S: Size>(a: &[S], b: &[S]) -> Check<Vec<S>> {
    let (batch_a, batch_b) = (a.len() - 2, b.len() - 2);
    same("inner dimensions", &a[batch_a + 1..], &b[batch_b..=batch_b])?;
    let mut out = broadcast_shapes(&[&a[..batch_a], &b[..batch_b]])?;
    out.extend([a[batch_a].clone(), b[batch_b + 1].clone()]);
    Ok(out)
}

struct Windows<'a> {
    stride: &'a [i64],
    padding: &'a [i64],
    dilation: &'a [i64],
}

fn convolution<S: Size>(operands: &[&[S]], w: &Windows, groups: i64, channels_last: bool) -> Check<Vec<S>> {
    let (x, weight) = (operands[0], operands[1]);
    let (channels, first) = if channels_last { (x.len() - 1, 1) } else { (1, 2) };
    let expected = weight[1].known().and_then(|i| i.checked_mul(groups));
    if expected.zip(x[channels].known()).is_some_and(|(want, got)| want != got) {
        return Err(format!("x has {} channels, the weight {} takes {groups} groups", x[channels], show(weight)));
    }
    if let Some(bias) = operands.get(2) {
        same("bias", bias, &weight[..1])?;
    }
    let mut out = x.to_vec();
    out[channels] = weight[0].clone();
    for (i, size) in out[first..first + w.stride.len()].iter_mut().enumerate() {
        let kernel = weight[2 + i].known().ok_or("the kernel's size is not constant")?;
        *size = window_output(size, kernel, w.stride[i], w.padding[i], w.dilation[i]);
    }
    Ok(out)
}

fn attention<S: Size>(operands: &[&[S]]) -> Check<Vec<S>> {
    let batch = |x: usize| &operands[x][..operands[x].len() - 2];
    let last = |x: usize, from_end: usize| &operands[x][operands[x].len() - from_end..=operands[x].len() - from_end];
    same("head sizes of query and key", last(0, 1), last(1, 1))?;
    same("lengths of key and value", last(1, 2), last(2, 2))?;
    let mut out = broadcast_shapes(&[batch(0), batch(1), batch(2)])?;
    out.extend([last(0, 2)[0].clone(), last(2, 1)[0].clone()]);
    Ok(out)
}

fn norm<S: Size>(operands: &[&[S]], weight: &[S]) -> Check<Vec<S>> {
    for w in &operands[1..] {
        same("weight", w, weight)?;
    }
    Ok(operands[0].to_vec())
}
