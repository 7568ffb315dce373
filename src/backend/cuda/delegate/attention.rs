//! Attention for cuDNN: products, scale, mask and softmax as one graph, which its fused engines recognise. Scores are f32
//! and never reach memory.
//!
//! cuDNN adds masks. A kernel of ours makes one of bool into such a one, and leaves what is broadcast in it so. That a row sees
//! no key cannot be said by adding (its shares would stay as they are, or be no numbers): a second kernel writes the zeros
//! that it has.

use super::super::cudnn::{Mode, Operation, Problem, Storage, Tensor};
use super::super::lower::Place;
use super::{Asked, MASK, Operands, Refusal, alignment};
use crate::codegen::cuda::View;
use crate::ir::{DType, Dim, Op};
use crate::plan::access::dense_strides;
use crate::plan::{Access, ConcreteAccess, Step};
use crate::{Error, Result};

/// Oldest compute capability that has fused attention.
const OLDEST_ARCH: u32 = 80;

/// Most elements of a head that cuDNN's fast engines take. What it has beyond is slower than products with a softmax between
/// them: 6.5 ms on an H100 for the attention of a VAE at 1024 x 1024, which is 0.55 TFLOP.
const WIDEST_HEAD: i64 = 256;

/// An attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Attention {
    scale: f64,
    is_causal: bool,
}

/// A graph under construction.
#[derive(Default)]
struct Builder(Problem);

impl Builder {
    fn tensor(&mut self, dtype: DType, dims: &[i64], strides: &[i64], storage: Storage) -> usize {
        self.0.tensors.push(Tensor { dtype, dims: dims.to_vec(), strides: strides.to_vec(), storage });
        self.0.tensors.len() - 1
    }

    /// What one operation makes for another.
    fn between(&mut self, dtype: DType, dims: [i64; 4]) -> usize {
        let strides = [dims[1] * dims[2] * dims[3], dims[2] * dims[3], dims[3], 1];
        self.tensor(dtype, &dims, &strides, Storage::Virtual)
    }

    fn value(&mut self, value: f32) -> usize {
        self.tensor(DType::F32, &[1; 4], &[1; 4], Storage::Value(value.to_bits()))
    }

    fn pointwise(&mut self, mode: Mode, [x, b]: [usize; 2], y: usize) -> usize {
        self.0.operations.push(Operation::Pointwise { mode, x, b: Some(b), t: None, axis: None, y });
        y
    }

    fn index(&mut self, x: usize, axis: i64, dims: [i64; 4]) -> usize {
        let (mode, y) = (Mode::CUDNN_POINTWISE_GEN_INDEX, self.between(DType::I32, dims));
        self.0.operations.push(Operation::Pointwise { mode, x, b: None, t: None, axis: Some(axis), y });
        y
    }
}

/// What is added instead of a mask of bool, and of which of its rows it hides every key (a column): sizes and strides, dense,
/// with one element along leading dimensions and rows that the mask is broadcast over.
pub(in super::super) fn added_mask(step: &Step) -> Result<[View; 2]> {
    let [q, k, _, mask] = step.operands.as_slice() else { return Err(Error::invalid("an attention without a mask")) };
    let (Some(last), [.., keys, _]) = (mask.shape.len().checked_sub(1), k.shape.as_slice()) else {
        return Err(Error::invalid("a mask of no keys"));
    };
    let one = Dim::constant(1);
    let sizes = mask.shape.iter().zip(&mask.strides).take(last);
    let mut shape: Vec<Dim> =
        sizes.map(|(size, stride)| if stride.is(0) { one.clone() } else { size.clone() }).collect();
    let view = |dtype: DType, shape: &[Dim]| View { dtype, strides: dense_strides(shape), shape: shape.to_vec() };
    shape.push(keys.clone());
    let added = view(q.dtype, &shape);
    shape[last] = one;
    Ok([added, view(DType::Bool, &shape)])
}

impl Attention {
    /// That of a step.
    pub fn of(op: &Op) -> Option<Self> {
        let Op::ScaledDotProductAttention { is_causal, scale } = op else { return None };
        Some(Self { scale: *scale, is_causal: *is_causal })
    }

    /// Why cuDNN has no engine for operands of these types.
    fn refusal(step: &Step, arch: u32, is_bounded: bool) -> Option<Refusal> {
        let ([q, k, v, ..], [out]) = (step.operands.as_slice(), step.stores.as_slice()) else { return None };
        if arch < OLDEST_ARCH {
            let (major, minor) = (arch / 10, arch % 10);
            return Some(format!("cuDNN has attention from compute capability 8.0 on, this is {major}.{minor}"));
        }
        let is_other = !matches!(q.dtype, DType::F16 | DType::BF16) || [k, v, out].iter().any(|a| a.dtype != q.dtype);
        if is_other {
            return Some(format!("cuDNN has no attention of {}", q.dtype.name()));
        }
        // Products keep scores.
        let width = q.shape.last().and_then(Dim::as_constant).filter(|width| *width > WIDEST_HEAD && !is_bounded)?;
        Some(format!("heads of {width} elements are faster as products"))
    }

    /// The graph for these sizes. Operands: queries, keys, values, result, mask.
    pub fn problem(&self, asked: &Asked<'_>) -> Result<std::result::Result<(Problem, Operands), Refusal>> {
        let Asked { step, bindings, arch, is_bounded, .. } = *asked;
        if let Some(reason) = Self::refusal(step, arch, is_bounded) {
            return Ok(Err(reason));
        }
        let ([q, k, v, mask @ ..], [out]) = (step.operands.as_slice(), step.stores.as_slice()) else {
            return Err(Error::invalid("an attention has three operands and one result"));
        };
        let result = out.concrete(bindings)?;
        let lead: Vec<usize> = result.shape[..result.shape.len().saturating_sub(2)].to_vec();
        if lead.len() > 2 || result.shape.len() < 2 {
            return Ok(Err(format!("cuDNN's attention has two leading dimensions, this has {}", lead.len())));
        }
        // Batch, heads, and the last two: sizes and strides, where what is broadcast has one element.
        let spread = |own: &ConcreteAccess, rows: Option<[usize; 2]>| -> ([i64; 4], [i64; 4]) {
            let last: Vec<usize> = match rows {
                Some(sizes) => sizes.to_vec(),
                None => own.shape[own.shape.len() - 2..].to_vec(),
            };
            let space = [lead.as_slice(), &last].concat();
            let strides = own.strides_in(&space);
            let (mut dims, mut steps) = ([1i64; 4], [0i64; 4]);
            for (at, (size, stride)) in space.iter().zip(strides).enumerate() {
                let to = if lead.len() == 1 && at > 0 { at + 1 } else { at + 2 - lead.len() };
                let to = if lead.len() == 1 && at == 0 { 0 } else { to };
                dims[to] = if stride == 0 { 1 } else { *size as i64 };
                steps[to] = stride as i64;
            }
            // What is walked once: the stride of dense memory.
            for at in (0..4).rev().filter(|&at| dims[at] == 1) {
                steps[at] = if at == 3 { 1 } else { dims[at + 1] * steps[at + 1] };
            }
            (dims, steps)
        };
        let lies = |access: &Access| access.concrete(bindings);
        let [(q_dims, q_steps), (k_dims, k_steps), (v_dims, v_steps)] =
            [spread(&lies(q)?, None), spread(&lies(k)?, None), spread(&lies(v)?, None)];
        let (o_dims, o_steps) = spread(&result, None);
        if [o_dims, k_dims].iter().flatten().any(|d| *d == 0) {
            return Ok(Err("it is empty".to_owned()));
        }
        let [batch, heads, rows, _] = o_dims;
        let keys = k_dims[2];
        let mut graph = Builder::default();
        let (mut places, mut aligns) = (Vec::new(), Vec::new());
        let mut placed = |place: Place, offset: isize| {
            places.push(place);
            aligns.push(alignment([offset]));
            Storage::Operand(places.len() - 1, alignment([offset]) as i64)
        };
        let mut operand = |access: &Access| -> Result<Storage> {
            let offset = access.offset.eval(bindings)? as isize * access.dtype.size_bytes() as isize;
            Ok(placed(Place::of(access), offset))
        };
        let queries = graph.tensor(q.dtype, &q_dims, &q_steps, operand(q)?);
        let turned = |n: [i64; 4]| [n[0], n[1], n[3], n[2]];
        let keys_turned = graph.tensor(k.dtype, &turned(k_dims), &turned(k_steps), operand(k)?);
        let values = graph.tensor(v.dtype, &v_dims, &v_steps, operand(v)?);
        let result = graph.tensor(out.dtype, &o_dims, &o_steps, operand(out)?);
        let (scores, row) = ([batch, heads, rows, keys], [batch, heads, rows, 1]);
        let products = graph.between(DType::F32, scores);
        graph.0.operations.push(Operation::Matmul { a: queries, b: keys_turned, c: products });
        let scale = graph.value(self.scale as f32);
        let to = graph.between(DType::F32, scores);
        let mut last = graph.pointwise(Mode::CUDNN_POINTWISE_MUL, [products, scale], to);
        let mut scratch = [(0, ""); 2];
        if let Some(mask) = mask.first() {
            let square = Some([rows as usize, keys as usize]);
            let added = if mask.dtype == DType::Bool {
                let [added, hides] = added_mask(step)?.map(|view| {
                    let View { dtype, shape, strides } = view;
                    Access { buffer: mask.buffer, dtype, shape, strides, offset: Dim::default() }.concrete(bindings)
                });
                let (added, hides) = (added?, hides?);
                scratch = [(added.bytes(), "a mask that is added"), (hides.bytes(), "rows that a mask hides all from")];
                let (dims, steps) = spread(&added, square);
                graph.tensor(added.dtype, &dims, &steps, placed(MASK, 0))
            } else {
                let (dims, steps) = spread(&lies(mask)?, square);
                graph.tensor(mask.dtype, &dims, &steps, operand(mask)?)
            };
            let to = graph.between(DType::F32, scores);
            last = graph.pointwise(Mode::CUDNN_POINTWISE_ADD, [last, added], to);
        }
        if self.is_causal {
            let (at_row, at_key) = (graph.index(last, 2, scores), graph.index(last, 3, scores));
            let to = graph.between(DType::Bool, scores);
            let is_seen = graph.pointwise(Mode::CUDNN_POINTWISE_CMP_GE, [at_row, at_key], to);
            let nothing = graph.value(f32::NEG_INFINITY);
            let y = graph.between(DType::F32, scores);
            let mode = Mode::CUDNN_POINTWISE_BINARY_SELECT;
            let (x, b, t) = (last, Some(nothing), Some(is_seen));
            graph.0.operations.push(Operation::Pointwise { mode, x, b, t, axis: None, y });
            last = y;
        }
        let largest = graph.between(DType::F32, row);
        graph.0.operations.push(Operation::Reduction { is_max: true, x: last, y: largest });
        let to = graph.between(DType::F32, scores);
        let below = graph.pointwise(Mode::CUDNN_POINTWISE_SUB, [last, largest], to);
        let weights = graph.between(DType::F32, scores);
        let mode = Mode::CUDNN_POINTWISE_EXP;
        graph.0.operations.push(Operation::Pointwise { mode, x: below, b: None, t: None, axis: None, y: weights });
        let sums = graph.between(DType::F32, row);
        graph.0.operations.push(Operation::Reduction { is_max: false, x: weights, y: sums });
        // Nobody reads the logarithms of the sums, but cuDNN knows attention by them.
        let logs = graph.between(DType::F32, row);
        let mode = Mode::CUDNN_POINTWISE_LOG;
        graph.0.operations.push(Operation::Pointwise { mode, x: sums, b: None, t: None, axis: None, y: logs });
        let to = graph.between(DType::F32, row);
        graph.pointwise(Mode::CUDNN_POINTWISE_ADD, [largest, logs], to);
        let to = graph.between(q.dtype, scores);
        let shares = graph.pointwise(Mode::CUDNN_POINTWISE_DIV, [weights, sums], to);
        graph.0.operations.push(Operation::Matmul { a: shares, b: values, c: result });
        let calls = vec![vec![0; places.len()]];
        Ok(Ok((graph.0, Operands { places, align_bytes: aligns, calls, scratch })))
    }
}
