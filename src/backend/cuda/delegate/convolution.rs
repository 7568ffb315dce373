//! Convolutions for cuDNN.
//!
//! One of 3 x 3 taps over an image that is upsampled by two is four of 2 x 2 taps over the image as it is, one for the results
//! at even and odd rows and columns each: of the nine taps those that fall on one pixel are added. That is four ninths of the
//! operations, and no upsampled image. Sums of 16-bit taps have to be rounded to 16 bits, which takes the convolution to 1.4
//! times eager's error (`sums_of_16_bit_taps_cost_what_is_said`): it is done where much else has an error too.

use oxidiff_kernels::tile::{TileProgram, Unary};

use super::super::cudnn::{Mode, Operation, Problem, Storage, Tensor};
use super::super::lower::Place;
use super::{A_RESULT, Asked, IMAGE, Link, Operands, Out, Piece, RESULT, Refusal, alignment, chain, is_full};
use crate::ir::{DType, Dim, Op};
use crate::plan::{Access, ConcreteAccess, Step};
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
    /// The upsampling by two before it is part of its weights.
    is_folded: bool,
    /// In order.
    links: Vec<After>,
}

/// A graph, its operands, and how many bytes from there each operand of a part of the result begins.
type Made = (Problem, Operands, Vec<i64>);

/// Compute capability from which on only what cuDNN has kernels of its own for is handed over whole: what it generates for
/// other graphs are kernels for sm_80, or copy a result that has gaps (`docs/cuda.md`).
const NATIVE_ONLY: u32 = 90;

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
            is_folded: false,
            links: Vec::new(),
        })
    }

    /// The same with the upsampling before it folded into its weights; `None` where it cannot be.
    pub fn folded(&self, step: &Step) -> Option<Self> {
        let [_, w] = step.operands.as_slice() else { return None };
        let is_three = |sizes: &[Dim]| sizes.len() == 4 && sizes[2..].iter().all(|d| d.is(3));
        let is_even = [&self.stride, &self.padding, &self.dilation].iter().all(|n| n.as_slice() == [1, 1]);
        let fits = step.upsample == [2, 2] && is_three(&w.shape) && is_even && self.taps.is_some();
        fits.then(|| Self { is_folded: true, ..self.clone() })
    }

    /// Whether it reads sums of taps.
    pub fn is_folded(&self) -> bool {
        self.is_folded
    }

    /// Whether it reads a form of the weight whose channels are neighbours.
    pub fn reads_taps(&self) -> bool {
        self.taps.is_some() && !self.is_folded
    }

    /// The same with work on its result.
    pub fn followed_by(self, links: Vec<After>) -> Self {
        Self { links, ..self }
    }

    /// The graph for these sizes. Operands: image, taps, result, then what is added, in order.
    pub fn problem(
        &self,
        asked: &Asked<'_>,
        out: (Out, DType),
    ) -> Result<std::result::Result<(Problem, Operands), Refusal>> {
        Ok(self.graph(asked, out, None)?.map(|(problem, operands, _)| (problem, operands)))
    }

    /// The graphs of the four parts of the result, which lie dense one after the other, and how many bytes behind the operands'
    /// addresses theirs are. Operands as of [`Convolution::problem`], with sums of taps.
    pub fn parts(
        &self,
        asked: &Asked<'_>,
        dtype: DType,
    ) -> Result<std::result::Result<(Vec<Piece>, Operands), Refusal>> {
        let (mut parts, mut all) = (Vec::with_capacity(4), None);
        for part in [[0, 0], [0, 1], [1, 0], [1, 1]] {
            match self.graph(asked, (Out::Parts, dtype), Some(part))? {
                Ok((problem, operands, moves)) => {
                    parts.push((problem, moves));
                    all = Some(operands);
                }
                Err(why) => return Ok(Err(why)),
            }
        }
        Ok(all.map(|operands| (parts, operands)).ok_or_else(|| "it has no parts".to_owned()))
    }

    /// The graph of the whole result, or of those at rows `2 i + part[0]` and columns `2 j + part[1]`.
    fn graph(
        &self,
        asked: &Asked<'_>,
        (out, out_dtype): (Out, DType),
        part: Option<[usize; 2]>,
    ) -> Result<std::result::Result<Made, Refusal>> {
        let Asked { step, bindings, arch, .. } = *asked;
        let [x, w] = step.operands.as_slice() else { return Err(Error::invalid("a convolution has two operands")) };
        let space = step.space.iter().map(|d| d.eval(bindings).map(|d| d as usize)).collect::<Result<Vec<usize>>>()?;
        let dense = |shape: &[usize]| -> Vec<isize> {
            (0..shape.len()).map(|i| shape[i + 1..].iter().product::<usize>() as isize).collect()
        };
        let (mut places, mut aligns, mut moves): (Vec<Place>, Vec<usize>, Vec<i64>) = Default::default();
        let mut moved = |place: Place, offset_bytes: isize, [down, along]: [isize; 2]| {
            let align = alignment([offset_bytes, down, along]);
            let [a, b] = part.unwrap_or_default();
            places.push(place);
            aligns.push(align);
            moves.push((a as isize * down + b as isize * along) as i64);
            Storage::Operand(places.len() - 1, align as i64)
        };
        // Sizes of a part of what covers the result.
        let sizes: Vec<usize> = match part {
            Some(_) => space.iter().enumerate().map(|(d, n)| if d == 1 || d == 2 { n / 2 } else { *n }).collect(),
            None => space.clone(),
        };
        let at = |access: &Access| -> Result<isize> {
            Ok(access.offset.eval(bindings)? as isize * access.dtype.size_bytes() as isize)
        };
        let image = x.concrete(bindings)?;
        let mut scratch_bytes = [0; 2];
        let x_tensor = if step.upsample.is_empty() || part.is_some() {
            let storage = moved(Place::of(x), at(x)?, [0; 2]);
            tensor(&image.shape, &image.strides, x.dtype, storage)
        } else {
            let mut shape = image.shape.to_vec();
            step.upsample.iter().enumerate().for_each(|(d, factor)| shape[d + 1] *= factor);
            scratch_bytes[1] = shape.iter().product::<usize>() * x.dtype.size_bytes();
            tensor(&shape, &dense(&shape), x.dtype, moved(IMAGE, 0, [0; 2]))
        };
        let weight = w.concrete(bindings)?;
        // Filters, taps, channels: dense in this order.
        let mut shape = weight.shape.to_vec();
        let channels = shape.remove(1);
        shape.push(channels);
        let storage = match (self.taps, part) {
            (Some(pack), Some(_)) => {
                shape[1..3].fill(2);
                let bytes = (shape.iter().product::<usize>() * w.dtype.size_bytes()) as isize;
                moved(Place::Sums(pack), 0, [2 * bytes, bytes])
            }
            (Some(pack), None) => moved(Place::Taps(pack), 0, [0; 2]),
            (None, _) => moved(Place::of(w), at(w)?, [0; 2]),
        };
        let w_tensor = tensor(&shape, &dense(&shape), w.dtype, storage);
        let y_tensor = match (out, step.stores.first()) {
            (Out::Store, Some(store)) => {
                let strides = store.concrete(bindings)?.strides;
                tensor(&sizes, &strides, out_dtype, moved(Place::of(store), at(store)?, [0; 2]))
            }
            _ => {
                let bytes = sizes.iter().product::<usize>() * out_dtype.size_bytes();
                scratch_bytes[0] = space.iter().product::<usize>() * out_dtype.size_bytes();
                tensor(&sizes, &dense(&sizes), out_dtype, moved(RESULT, 0, [2 * bytes as isize, bytes as isize]))
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
                        sizes.iter().zip(&strides).map(|(size, stride)| if *stride == 0 { 1 } else { *size }).collect();
                    let storage = moved(Place::of(access), at(access)?, [0; 2]);
                    (Mode::CUDNN_POINTWISE_ADD, Some(tensor(&sizes, &strides, access.dtype, storage)))
                }
            });
        }
        let plain = tensor(&sizes, &dense(&sizes), DType::F32, Storage::Virtual);
        let is_whole = |t: &Tensor| t.dims == plain.dims;
        let is_per_channel = |t: &Tensor| t.dims.iter().enumerate().all(|(d, n)| d == 1 || *n == 1);
        let added = || links.iter().filter_map(|(_, added)| added.as_ref());
        if added().any(|t| !is_whole(t) && !is_per_channel(t)) {
            // Engines that take a bias for each image have ended in misaligned addresses on an H100 (cuDNN 9.19).
            return Ok(Err("cuDNN is not asked to add what is repeated along some dimensions alone".to_owned()));
        }
        // The pattern that cuDNN has kernels of its own for: first what is as large as the result, then a bias.
        let is_dense = |t: &Tensor| t.strides == plain.strides;
        let is_sum = links.iter().all(|(_, added)| added.is_some());
        let biases = added().filter(|t| is_per_channel(t)).count();
        let is_native = is_sum
            && (links.is_empty() || (biases == 1 && links.len() <= 2))
            && is_dense(&y_tensor)
            && added().filter(|t| !is_per_channel(t)).all(is_dense);
        if is_sum {
            links.sort_by_key(|(_, added)| added.as_ref().is_some_and(is_per_channel));
        }
        if arch >= NATIVE_ONLY && !is_native {
            return Ok(Err("cuDNN has no kernel of its own for what follows, or for gaps".to_owned()));
        }
        if links.is_empty() && y_tensor.strides != plain.strides {
            // Written with gaps: only engines that do something more do so without a workspace.
            links.push((Mode::CUDNN_POINTWISE_IDENTITY, None));
        }
        let mut tensors = vec![x_tensor, w_tensor];
        let count = links.len();
        let mut last = push(&mut tensors, if count == 0 { y_tensor.clone() } else { plain.clone() });
        let Self { padding, stride, dilation, .. } = self.clone();
        let padding = match part {
            // Even results begin in the pixel before theirs, odd ones end in the pixel behind it.
            Some(part) => [part.map(|odd| 1 - odd as i64).to_vec(), part.map(|odd| odd as i64).to_vec()],
            None => [padding.clone(), padding],
        };
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
        Ok(Ok((problem, Operands { places, align_bytes: aligns, calls, scratch }, moves)))
    }
}

/// Bytes of the sums of a weight's taps, if it is one that has such.
pub(in super::super) fn sums_bytes(weight: &ConcreteAccess) -> usize {
    match *weight.shape {
        [filters, channels, 3, 3] => 16 * filters * channels * weight.dtype.size_bytes(),
        _ => 0,
    }
}

/// Whether the sums of a weight's taps, which are kept, take more memory than the result that they are for.
pub(super) fn keeps_more_than_it_writes(step: &Step, bindings: &[i64]) -> Result<bool> {
    let ([_, w], [store, ..]) = (step.operands.as_slice(), step.stores.as_slice()) else { return Ok(false) };
    Ok(sums_bytes(&w.concrete(bindings)?) > store.concrete(bindings)?.numel() * store.dtype.size_bytes())
}

fn push(tensors: &mut Vec<Tensor>, tensor: Tensor) -> usize {
    tensors.push(tensor);
    tensors.len() - 1
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    /// The error of folded sums over that of the sum of all nine taps, both against f64: operands of a type that `round` rounds
    /// to, sums that are exact until they are stored.
    fn error_of_folding(round: fn(f64) -> f64) -> f64 {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            round((state >> 40) as f64 / f64::from(1u32 << 23) - 1.0)
        };
        let (mut own, mut folded) = (0f64, 0f64);
        for _ in 0..4000 {
            let (mut exact, mut sum) = (0f64, 0f64);
            for _ in 0..64 {
                let taps: [[f64; 3]; 3] = std::array::from_fn(|_| std::array::from_fn(|_| next()));
                let pixels: [[f64; 2]; 2] = std::array::from_fn(|_| std::array::from_fn(|_| next()));
                for (y, rows) in [0..1, 1..3].into_iter().enumerate() {
                    for (x, columns) in [0..1, 1..3].into_iter().enumerate() {
                        let tap: f64 = taps[rows.clone()].iter().flat_map(|row| &row[columns.clone()]).sum();
                        exact += tap * pixels[y][x];
                        sum += round(tap) * pixels[y][x];
                    }
                }
            }
            own += (round(exact) - exact).powi(2);
            folded += (round(sum) - exact).powi(2);
        }
        (folded / own).sqrt()
    }

    #[test]
    fn sums_of_16_bit_taps_cost_what_is_said() {
        let ratios =
            [error_of_folding(|x| f64::from(f16::from_f64(x))), error_of_folding(|x| f64::from(bf16::from_f64(x)))];
        assert!(ratios.iter().all(|ratio| (1.3..1.5).contains(ratio)), "{ratios:?}");
    }
}
