//! Convolutions for cuDNN.

use oxidiff_kernels::tile::{TileProgram, Unary};

use super::super::cudnn::{Mode, Operation, Problem, Storage, Tensor};
use super::super::lower::Place;
use super::{A_RESULT, IMAGE, Link, Operands, Out, RESULT, Refusal, alignment, chain, is_full};
use crate::ir::{DType, Op};
use crate::plan::{Access, Step};
use crate::{Error, Result};

/// What follows the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum After {
    /// Adds a load of the step, broadcast.
    Add(usize),
    /// A function.
    Apply(Mode),
}

/// A convolution and what cuDNN does after it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Convolution {
    stride: Vec<i64>,
    padding: Vec<i64>,
    dilation: Vec<i64>,
    /// Form of the weight whose channels are neighbours; where each filter has one tap, it is so as it is.
    taps: Option<usize>,
    /// In order.
    links: Vec<After>,
}

/// cuDNN's name of a function that it computes as it is meant.
fn mode_of(op: Unary) -> Option<Mode> {
    match op {
        Unary::Silu => Some(Mode::CUDNN_POINTWISE_SWISH_FWD),
        Unary::Gelu => Some(Mode::CUDNN_POINTWISE_GELU_FWD),
        Unary::GeluTanh => Some(Mode::CUDNN_POINTWISE_GELU_APPROX_TANH_FWD),
        Unary::Sigmoid => Some(Mode::CUDNN_POINTWISE_SIGMOID_FWD),
        Unary::Tanh => Some(Mode::CUDNN_POINTWISE_TANH_FWD),
        _ => None,
    }
}

/// All of a body, as operations of cuDNN.
pub(super) fn epilogue_of(step: &Step, program: &TileProgram, dtype: DType) -> Option<Vec<After>> {
    let [store] = step.stores.as_slice() else { return None };
    if !is_full(store, step) {
        return None;
    }
    let link = |link: Link| match link {
        Link::Add(load) => {
            let access = &step.loads[load];
            // A shared result is overwritten before it is read, but for its own element.
            let is_safe = access.buffer != store.buffer || access.is_same_place(store);
            let has_channels = access.shape.last() == step.space.last() && access.has_unit_columns();
            (access.dtype == dtype && has_channels && is_safe).then_some(After::Add(load))
        }
        Link::Apply(op) => mode_of(op).map(After::Apply),
    };
    chain(program, dtype)?.into_iter().map(link).collect()
}

/// Sizes and strides of channels-last memory as cuDNN orders them: batch, channels, spatial, at least two of these.
fn tensor(shape: &[usize], strides: &[isize], dtype: DType, storage: Storage) -> Tensor {
    let last = shape.len() - 1;
    let spatial = 1..last;
    let mut order = vec![0, last];
    order.extend(spatial.clone());
    let (mut dims, mut steps): (Vec<i64>, Vec<i64>) =
        order.iter().map(|&d| (shape[d] as i64, strides[d] as i64)).unzip();
    if spatial.len() == 1 {
        dims.insert(2, 1);
        steps.insert(2, 1);
    }
    // What is walked once may have any stride; cuDNN takes those of dense memory for the sign of a layout.
    let mut dense = 1;
    for d in [1].into_iter().chain((2..dims.len()).rev()).chain([0]) {
        if dims[d] == 1 {
            steps[d] = dense;
        }
        dense = dense.max(dims[d] * steps[d]);
    }
    Tensor { dtype, dims, strides: steps, storage }
}

impl Convolution {
    /// The convolution of a step alone; `None` if cuDNN has none like it.
    pub fn of(step: &Step, op: &Op) -> Option<Self> {
        let Op::Convolution { stride, padding, dilation, .. } = op else { return None };
        let [_, w] = step.operands.as_slice() else { return None };
        let has_one_tap = w.shape[2..].iter().all(|d| d.is(1)) && w.is_dense();
        let taps = if has_one_tap { None } else { Some(step.pack?) };
        let wide = |values: &[i64], more: i64| match values {
            [one] => vec![more, *one],
            all => all.to_vec(),
        };
        Some(Self {
            stride: wide(stride, 1),
            padding: wide(padding, 0),
            dilation: wide(dilation, 1),
            taps,
            links: Vec::new(),
        })
    }

    /// The same with work on its result.
    pub fn followed_by(self, links: Vec<After>) -> Self {
        Self { links, ..self }
    }

    /// The graph for these sizes. Operands: image, taps, result, then what is added, in order.
    pub fn problem(
        &self,
        step: &Step,
        bindings: &[i64],
        (out, out_dtype): (Out, DType),
    ) -> Result<std::result::Result<(Problem, Operands), Refusal>> {
        let [x, w] = step.operands.as_slice() else { return Err(Error::invalid("a convolution has two operands")) };
        let space = step.space.iter().map(|d| d.eval(bindings).map(|d| d as usize)).collect::<Result<Vec<usize>>>()?;
        let dense = |shape: &[usize]| -> Vec<isize> {
            (0..shape.len()).map(|i| shape[i + 1..].iter().product::<usize>() as isize).collect()
        };
        let mut places: Vec<Place> = Vec::new();
        let mut aligns: Vec<usize> = Vec::new();
        let mut operand = |place: Place, offset_bytes: isize| {
            let align = alignment([offset_bytes]);
            places.push(place);
            aligns.push(align);
            Storage::Operand(places.len() - 1, align as i64)
        };
        let at = |access: &Access| -> Result<isize> {
            Ok(access.offset.eval(bindings)? as isize * access.dtype.size_bytes() as isize)
        };
        let image = x.concrete(bindings)?;
        let mut scratch_bytes = [0; 2];
        let x_tensor = if step.upsample.is_empty() {
            let storage = operand(Place::of(x), at(x)?);
            tensor(&image.shape, &image.strides, x.dtype, storage)
        } else {
            let mut shape = image.shape.to_vec();
            step.upsample.iter().enumerate().for_each(|(d, factor)| shape[d + 1] *= factor);
            scratch_bytes[1] = shape.iter().product::<usize>() * x.dtype.size_bytes();
            tensor(&shape, &dense(&shape), x.dtype, operand(IMAGE, 0))
        };
        let weight = w.concrete(bindings)?;
        // Filters, taps, channels: dense in this order.
        let mut shape = weight.shape.to_vec();
        let channels = shape.remove(1);
        shape.push(channels);
        let storage = match self.taps {
            Some(pack) => operand(Place::Taps(pack), 0),
            None => operand(Place::of(w), at(w)?),
        };
        let w_tensor = tensor(&shape, &dense(&shape), w.dtype, storage);
        let y_tensor = match (out, step.stores.first()) {
            (Out::Store, Some(store)) => {
                let result = store.concrete(bindings)?;
                tensor(&result.shape, &result.strides, out_dtype, operand(Place::of(store), at(store)?))
            }
            _ => {
                scratch_bytes[0] = space.iter().product::<usize>() * out_dtype.size_bytes();
                tensor(&space, &dense(&space), out_dtype, operand(RESULT, 0))
            }
        };
        if image.numel() == 0 || space.contains(&0) || channels == 0 {
            return Ok(Err("it is empty".to_owned()));
        }
        if [&x_tensor, &y_tensor].iter().any(|t| t.strides[1] != 1 || t.strides.iter().any(|s| *s < 1)) {
            return Ok(Err("its channels are no neighbours".to_owned()));
        }
        let mut links: Vec<(Mode, Option<Tensor>)> = Vec::new();
        for link in &self.links {
            links.push(match *link {
                After::Apply(mode) => (mode, None),
                After::Add(load) => {
                    let access = &step.loads[load];
                    let strides = access.concrete(bindings)?.strides_in(&space);
                    // What is the same all along a dimension has one element there.
                    let sizes: Vec<usize> =
                        space.iter().zip(&strides).map(|(size, stride)| if *stride == 0 { 1 } else { *size }).collect();
                    let storage = operand(Place::of(access), at(access)?);
                    (Mode::CUDNN_POINTWISE_ADD, Some(tensor(&sizes, &strides, access.dtype, storage)))
                }
            });
        }
        let plain = tensor(&space, &dense(&space), DType::F32, Storage::Virtual);
        if links.is_empty() && y_tensor.strides != plain.strides {
            // Written with gaps: only engines that do something more do so without a workspace.
            links.push((Mode::CUDNN_POINTWISE_IDENTITY, None));
        }
        let mut tensors = vec![x_tensor, w_tensor];
        let count = links.len();
        let mut last = push(&mut tensors, if count == 0 { y_tensor.clone() } else { plain.clone() });
        let Self { padding, stride, dilation, .. } = self.clone();
        let mut operations = vec![Operation::Convolution { x: 0, w: 1, y: last, padding, stride, dilation }];
        for (at, (mode, added)) in links.into_iter().enumerate() {
            let b = added.map(|t| push(&mut tensors, t));
            let y = push(&mut tensors, if at + 1 == count { y_tensor.clone() } else { plain.clone() });
            operations.push(Operation::Pointwise { mode, x: last, b, t: None, axis: None, y });
            last = y;
        }
        let calls = vec![vec![0; places.len()]];
        let scratch = [(scratch_bytes[0], A_RESULT), (scratch_bytes[1], "an upsampled image")];
        let problem = Problem { tensors, operations, ..Problem::default() };
        Ok(Ok((problem, Operands { places, align_bytes: aligns, calls, scratch })))
    }
}

fn push(tensors: &mut Vec<Tensor>, tensor: Tensor) -> usize {
    tensors.push(tensor);
    tensors.len() - 1
}
