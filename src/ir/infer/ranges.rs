//! Bounds: attributes against ranks, and slices, pads, windows and indices against sizes.

use std::ops::RangeInclusive;

use super::Check;
use crate::ir::dim::Dim;
use crate::ir::op::{Op, ReduceOp, UnaryOp, ValueType};

/// How many operands an op has.
pub fn arity(op: &Op) -> RangeInclusive<usize> {
    match op {
        Op::Input { .. }
        | Op::Parameter { .. }
        | Op::Constant { .. }
        | Op::Full { .. }
        | Op::SizeOf { .. }
        | Op::Arange { .. } => 0..=0,
        Op::Unary(_)
        | Op::Convert
        | Op::Reshape
        | Op::Permute { .. }
        | Op::Expand
        | Op::Slice { .. }
        | Op::Pad { .. }
        | Op::Flip { .. }
        | Op::Reduce { .. }
        | Op::Cumsum { .. }
        | Op::Softmax { .. }
        | Op::UpsampleNearest { .. }
        | Op::Pool { .. } => 1..=1,
        Op::Binary(_) | Op::SliceScatter { .. } | Op::IndexSelect { .. } | Op::Gather { .. } | Op::Matmul => 2..=2,
        Op::Where | Op::Interpolate { .. } => 3..=3,
        Op::Cat { .. } => 1..=usize::MAX,
        Op::Linear | Op::Convolution { .. } => 2..=3,
        Op::ScaledDotProductAttention { .. } => 3..=4,
        Op::GroupNorm { .. } | Op::LayerNorm { .. } => 1..=3,
        Op::RmsNorm { .. } => 1..=2,
    }
}

fn expect(holds: bool, why: impl FnOnce() -> String) -> Check {
    if holds { Ok(()) } else { Err(why()) }
}

fn expect_dim(dim: usize, rank: usize) -> Check {
    expect(dim < rank, || format!("dimension {dim} of a value with {rank}"))
}

fn expect_distinct(dims: &[usize], rank: usize) -> Check {
    for (i, &d) in dims.iter().enumerate() {
        expect_dim(d, rank)?;
        expect(!dims[..i].contains(&d), || format!("dimension {d} is named twice"))?;
    }
    Ok(())
}

fn expect_rank(what: &str, rank: usize, wanted: RangeInclusive<usize>) -> Check {
    expect(wanted.contains(&rank), || format!("{what} has {rank} dimensions"))
}

fn expect_positive(what: &str, values: &[i64]) -> Check {
    expect(values.iter().all(|&v| v > 0), || format!("{what} must be positive: {values:?}"))
}

/// Checks the number of operands, and attributes as far as ranks decide.
pub(crate) fn check_attributes(op: &Op, ranks: &[usize]) -> Check {
    let arity = arity(op);
    expect(arity.contains(&ranks.len()), || format!("{} operands instead of {arity:?}", ranks.len()))?;
    let rank = ranks.first().copied().unwrap_or(0);
    match op {
        Op::Input { .. }
        | Op::Parameter { .. }
        | Op::Constant { .. }
        | Op::Full { .. }
        | Op::SizeOf { .. }
        | Op::Binary(_)
        | Op::Where
        | Op::Convert
        | Op::Reshape
        | Op::Expand => Ok(()),
        Op::Unary(op) => expect(*op != UnaryOp::RotatePairs || rank > 0, || "a number has no pairs".to_owned()),
        Op::Arange { step, .. } => expect(!step.is(0), || "step 0".to_owned()),
        Op::Permute { dims } => {
            expect(dims.len() == rank, || format!("{} dimensions named of {rank}", dims.len()))?;
            expect_distinct(dims, rank)
        }
        Op::Slice { dim, step, .. } | Op::SliceScatter { dim, step, .. } => {
            expect_positive("step", &[*step])?;
            expect_dim(*dim, rank)
        }
        Op::Pad { before, .. } => expect(before.len() == rank, || format!("{} pads for rank {rank}", before.len())),
        Op::Flip { dims } => expect_distinct(dims, rank),
        Op::Cat { dim } | Op::IndexSelect { dim } | Op::Cumsum { dim } | Op::Softmax { dim } => expect_dim(*dim, rank),
        Op::Interpolate { dim } => {
            ranks[1..].iter().try_for_each(|&r| expect_rank("an index or weight", r, 2..=2))?;
            expect_dim(*dim, rank)
        }
        Op::Gather { dim } => {
            expect(ranks[1] == rank, || format!("index has {} dimensions, x {rank}", ranks[1]))?;
            expect_dim(*dim, rank)
        }
        Op::Reduce { op, dims, .. } => {
            let one = matches!(op, ReduceOp::Argmax | ReduceOp::Argmin);
            expect(!one || dims.len() == 1, || "argmax reduces one dimension".to_owned())?;
            expect_distinct(dims, rank)
        }
        Op::Linear => {
            expect_rank("x", rank, 1..=usize::MAX)?;
            expect_rank("weight", ranks[1], 2..=2)
        }
        Op::Matmul => ranks.iter().try_for_each(|&r| expect_rank("an operand", r, 2..=usize::MAX)),
        Op::Convolution { stride, padding, dilation, groups, .. } => {
            check_convolution(ranks, [stride, padding, dilation], *groups)
        }
        Op::ScaledDotProductAttention { is_causal, .. } => {
            expect(!is_causal || ranks.len() == 3, || "is_causal together with a mask".to_owned())?;
            ranks[..3].iter().try_for_each(|&r| expect_rank("an operand", r, 2..=usize::MAX))
        }
        Op::GroupNorm { num_groups, channel_dim, .. } => {
            expect(ranks.len() != 2, || "a weight needs a bias".to_owned())?;
            expect_positive("num_groups", &[*num_groups])?;
            expect(*channel_dim > 0, || "dimension 0 is the batch, not channels".to_owned())?;
            expect_dim(*channel_dim, rank)
        }
        Op::LayerNorm { normalized_ndim, .. } | Op::RmsNorm { normalized_ndim, .. } => {
            expect((1..=rank).contains(normalized_ndim), || format!("norm over {normalized_ndim} of {rank} dimensions"))
        }
        Op::UpsampleNearest { first_dim, scales, .. } => {
            expect(!scales.is_empty(), || "no scales".to_owned())?;
            expect_dim(first_dim.saturating_add(scales.len() - 1), rank)
        }
        Op::Pool { first_dim, kernel, stride, padding, .. } => check_pool(rank, *first_dim, [kernel, stride, padding]),
    }
}

fn check_convolution(ranks: &[usize], windows: [&[i64]; 3], groups: i64) -> Check {
    let [stride, padding, dilation] = windows;
    expect_rank("x", ranks[0], 3..=5)?;
    expect_rank("weight", ranks[1], ranks[0]..=ranks[0])?;
    let spatial = ranks[0] - 2;
    for list in windows {
        expect(list.len() == spatial, || format!("{} numbers for {spatial} spatial dimensions", list.len()))?;
    }
    expect_positive("stride", stride)?;
    expect_positive("dilation", dilation)?;
    expect_positive("groups", &[groups])?;
    expect(padding.iter().all(|&p| p >= 0), || format!("negative padding: {padding:?}"))
}

fn check_pool(rank: usize, first_dim: usize, windows: [&[i64]; 3]) -> Check {
    let [kernel, stride, padding] = windows;
    expect(!kernel.is_empty(), || "no kernel".to_owned())?;
    expect(stride.len() == kernel.len() && padding.len() == kernel.len(), || "lists differ in length".to_owned())?;
    expect_dim(first_dim.saturating_add(kernel.len() - 1), rank)?;
    expect_positive("kernel", kernel)?;
    expect_positive("stride", stride)?;
    let half = padding.iter().zip(kernel).all(|(&p, &k)| p >= 0 && p <= k / 2);
    expect(half, || format!("padding {padding:?} must be at most half of the kernel {kernel:?}"))
}

/// Sizes are not negative and their product fits memory.
pub(crate) fn check_numel(shape: &[i64]) -> Check {
    let numel = shape.iter().try_fold(1i64, |n, &d| if d < 0 { None } else { n.checked_mul(d.max(1)) });
    expect(numel.is_some_and(|n| n <= i64::MAX / 16), || format!("impossible shape {shape:?}"))
}

/// Bounds that depend on sizes. Shapes that the operands determine have been compared already.
pub(crate) fn check_ranges(op: &Op, operands: &[&[i64]], result: &[i64], bindings: &[i64]) -> Check {
    let eval = |d: &Dim| d.eval(bindings).map_err(|e| e.to_string());
    match op {
        Op::Input { .. }
        | Op::Parameter { .. }
        | Op::Constant { .. }
        | Op::Full { .. }
        | Op::Binary(_)
        | Op::Where
        | Op::Convert
        | Op::Permute { .. }
        | Op::Cat { .. }
        | Op::Flip { .. }
        | Op::IndexSelect { .. }
        | Op::Interpolate { .. }
        | Op::Cumsum { .. }
        | Op::Softmax { .. }
        | Op::Linear
        | Op::Matmul
        | Op::LayerNorm { .. }
        | Op::RmsNorm { .. } => Ok(()),
        Op::Unary(op) => {
            let is_even = result.last().is_some_and(|n| n % 2 == 0);
            expect(*op != UnaryOp::RotatePairs || is_even, || format!("no pairs in the last dimension of {result:?}"))
        }
        Op::SizeOf { size } => eval(size).map(drop),
        Op::Arange { start, step } => {
            expect(result.len() == 1, || "arange has one dimension".to_owned())?;
            expect(eval(step)? != 0, || "step 0".to_owned())?;
            eval(start).map(drop)
        }
        Op::Reshape => expect(operands[0].iter().product::<i64>() == result.iter().product::<i64>(), || {
            format!("{:?} has not as many elements as {result:?}", operands[0])
        }),
        Op::Expand => check_expand(operands[0], result),
        Op::Slice { dim, start, step } => {
            let same_rank = operands[0].len() == result.len();
            expect(same_rank, || format!("{:?} and {result:?} differ in rank", operands[0]))?;
            check_same_except(operands[0], result, *dim..dim + 1)?;
            check_slice(operands[0][*dim], eval(start)?, *step, result[*dim])
        }
        Op::SliceScatter { dim, start, step } => check_slice(operands[0][*dim], eval(start)?, *step, operands[1][*dim]),
        Op::Pad { before, .. } => {
            expect(result.len() == before.len(), || format!("{before:?} pads to {result:?}"))?;
            for (i, b) in before.iter().enumerate() {
                let b = eval(b)?;
                let fits = b >= 0 && b.checked_add(operands[0][i]).is_some_and(|end| end <= result[i]);
                expect(fits, || format!("{b} before {} do not fit in {}", operands[0][i], result[i]))?;
            }
            Ok(())
        }
        Op::Gather { dim } => {
            let fits = (0..result.len()).all(|d| d == *dim || result[d] <= operands[0][d]);
            expect(fits, || format!("index {result:?} is larger than x {:?}", operands[0]))
        }
        Op::Reduce { op, dims, .. } => {
            let empty = dims.iter().any(|&d| operands[0][d] == 0) && result.iter().product::<i64>() > 0;
            let needs_one = matches!(op, ReduceOp::Amax | ReduceOp::Amin | ReduceOp::Argmax | ReduceOp::Argmin);
            expect(!(empty && needs_one), || format!("{} of no elements", op.name()))
        }
        Op::Convolution { stride, padding, dilation, groups, channels_last } => {
            let (x, weight) = (operands[0], operands[1]);
            expect(weight[0] % groups == 0, || format!("{} channels do not divide into {groups} groups", weight[0]))?;
            let first = if *channels_last { 1 } else { 2 };
            for i in 0..stride.len() {
                check_window(x[first + i], weight[2 + i], padding[i], dilation[i])?;
            }
            Ok(())
        }
        Op::ScaledDotProductAttention { .. } => match operands.get(3) {
            Some(mask) => {
                let scores = [&result[..result.len() - 1], &operands[1][operands[1].len() - 2..][..1]].concat();
                check_expand(mask, &scores).map_err(|why| format!("mask: {why}"))
            }
            None => Ok(()),
        },
        Op::GroupNorm { num_groups, channel_dim, .. } => {
            let channels = operands[0][*channel_dim];
            expect(channels % num_groups == 0, || format!("{channels} channels do not divide into {num_groups} groups"))
        }
        Op::UpsampleNearest { first_dim, scales, .. } => {
            let scaled = *first_dim..first_dim + scales.len();
            check_same_except(operands[0], result, scaled.clone())?;
            let empty = scaled.into_iter().any(|d| operands[0][d] == 0 && result[d] > 0);
            expect(!empty, || "upsampling of no elements".to_owned())
        }
        Op::Pool { first_dim, kernel, padding, .. } => {
            (0..kernel.len()).try_for_each(|i| check_window(operands[0][first_dim + i], kernel[i], padding[i], 1))
        }
    }
}

/// Operands of a result of these sizes have its sizes, as expressions, or the constant 1, which stretches. A size that is 1, or
/// the result's, at some bindings and not at others would make the program depend on them: what walks an operand takes a stride
/// of 0 where its size is another expression.
pub(crate) fn check_stretching(op: &Op, types: &[&ValueType], result: &[Dim]) -> Check {
    let aligned = |x: usize, from_end: usize, to: &[Dim]| {
        let shape = &types[x].shape;
        check_broadcast(&shape[..shape.len().saturating_sub(from_end)], to)
    };
    let last = |n: usize| result.len().saturating_sub(n);
    match op {
        Op::Binary(_) | Op::Where | Op::Expand => (0..types.len()).try_for_each(|x| aligned(x, 0, result)),
        Op::Matmul => (0..2).try_for_each(|x| aligned(x, 2, &result[..last(2)])),
        Op::ScaledDotProductAttention { .. } => {
            (0..3).try_for_each(|x| aligned(x, 2, &result[..last(2)]))?;
            let Some(keys) = types[1].shape.iter().rev().nth(1).filter(|_| types.len() == 4) else { return Ok(()) };
            let scores = [&result[..last(1)], std::slice::from_ref(keys)].concat();
            aligned(3, 0, &scores).map_err(|why| format!("mask: {why}"))
        }
        _ => Ok(()),
    }
}

/// `shape` stretches to `to`, trailing dimensions aligned, whatever the sizes are.
pub(crate) fn check_broadcast(shape: &[Dim], to: &[Dim]) -> Check {
    expect(shape.len() <= to.len(), || format!("{} dimensions stretch to {}", shape.len(), to.len()))?;
    match shape.iter().rev().zip(to.iter().rev()).find(|(dim, to)| dim != to && !dim.is(1)) {
        Some((dim, to)) => Err(format!("size {dim} stretches to {to}; only the constant 1 does")),
        None => Ok(()),
    }
}

fn check_expand(from: &[i64], to: &[i64]) -> Check {
    let fits =
        from.len() <= to.len() && from.iter().rev().zip(to.iter().rev()).all(|(&from, &to)| from == to || from == 1);
    expect(fits, || format!("{from:?} does not expand to {to:?}"))
}

fn check_same_except(a: &[i64], b: &[i64], except: std::ops::Range<usize>) -> Check {
    let same = a.len() == b.len() && (0..a.len()).all(|d| except.contains(&d) || a[d] == b[d]);
    expect(same, || format!("{a:?} and {b:?} differ outside of dimensions {except:?}"))
}

/// `len` elements from `start`, `step` apart.
fn check_slice(size: i64, start: i64, step: i64, len: i64) -> Check {
    let last = (len - 1).checked_mul(step).and_then(|d| d.checked_add(start));
    let inside = if len == 0 { (0..=size).contains(&start) } else { start >= 0 && last.is_some_and(|l| l < size) };
    expect(inside, || format!("slice of {len} from {start} with step {step} of {size}"))
}

fn check_window(size: i64, kernel: i64, padding: i64, dilation: i64) -> Check {
    let window = (kernel - 1).checked_mul(dilation).and_then(|w| w.checked_add(1));
    let padded = padding.checked_mul(2).and_then(|p| p.checked_add(size));
    let fits = kernel > 0 && window.zip(padded).is_some_and(|(w, p)| w <= p);
    expect(fits, || format!("kernel {kernel} (dilation {dilation}) does not fit {size} with padding {padding}"))
}
