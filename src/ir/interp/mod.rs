//! The executable meaning of every op: slow, obvious, scalar.
//!
//! Every pass, kernel and backend is judged against this, and this against eager PyTorch. Arithmetic follows the rules at
//! the head of [`super::op`]: operands are converted to the compute type, the op is done (in f64, which for f32 operands
//! gives the correctly rounded f32 result or better), and the result is rounded to the compute type and then to the
//! result's dtype. Sums are kept in f64 until that rounding.
//!
//! [`run`] gives what a backend should give; [`run_f64`] does the same without any rounding to smaller float types: the
//! ground truth by which errors are measured.
//!
//! One file per op family; a file knows bytes and numbers, not graphs. An `Err` of a family is the reason only; the node
//! it happened in is added here.

mod contraction;
mod gather;
mod movement;
mod norm;
mod pointwise;
mod reduce;
mod tensor;
mod window;

pub use tensor::Tensor;

use super::dim::Dim;
use super::dtype::DType;
use super::graph::{Graph, ValueId};
use super::infer::{self, Check};
use super::op::{Op, ValueType};
use crate::error::{Error, Result};

/// How float values are kept between ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// In the declared element type.
    Declared,
    /// In f64, whatever float type is declared.
    Wide,
}

impl Precision {
    fn dtype(self, declared: DType) -> DType {
        if self == Precision::Wide && declared.is_float() { DType::F64 } else { declared }
    }
}

/// Runs the graph.
///
/// # Errors
/// [`Error::Shape`] if inputs, parameters or sizes do not fit the graph, [`Error::Invalid`] for an index out of range or an
/// integer division by zero.
pub fn run(graph: &Graph, bindings: &[i64], inputs: &[Tensor], parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    run_at(graph, bindings, inputs, parameters, Precision::Declared)
}

/// Runs the graph with every float in f64.
///
/// # Errors
/// As [`run`].
pub fn run_f64(graph: &Graph, bindings: &[i64], inputs: &[Tensor], parameters: &[Tensor]) -> Result<Vec<Tensor>> {
    run_at(graph, bindings, inputs, parameters, Precision::Wide)
}

fn run_at(
    graph: &Graph,
    bindings: &[i64],
    inputs: &[Tensor],
    parameters: &[Tensor],
    precision: Precision,
) -> Result<Vec<Tensor>> {
    let mut last_use = vec![0; graph.nodes.len()];
    for v in graph.values() {
        graph.node(v).inputs.iter().for_each(|i| last_use[i.index()] = v.index());
    }
    graph.outputs.iter().for_each(|o| last_use[o.index()] = usize::MAX);
    let mut values: Vec<Option<Tensor>> = Vec::with_capacity(graph.nodes.len());
    for v in graph.values() {
        let node = graph.node(v);
        let result = match node.op {
            Op::Input { index } => bind(graph, v, inputs.get(index as usize), bindings, precision)?,
            Op::Parameter { index } => bind(graph, v, parameters.get(index as usize), bindings, precision)?,
            _ => {
                let operands = node.inputs.iter().map(|i| values[i.index()].as_ref());
                let operands: Vec<&Tensor> = operands.map(|t| t.expect("kept until its last use")).collect();
                eval_at(graph, v, bindings, &operands, precision)?
            }
        };
        values.push(Some(result));
        for i in &node.inputs {
            if last_use[i.index()] == v.index() {
                values[i.index()] = None;
            }
        }
    }
    graph.outputs.iter().map(|o| Ok(values[o.index()].clone().expect("outputs are kept"))).collect()
}

/// The given tensor, if it has the declared type.
fn bind(
    graph: &Graph,
    value: ValueId,
    given: Option<&Tensor>,
    bindings: &[i64],
    precision: Precision,
) -> Result<Tensor> {
    let ty = graph.ty(value);
    let fail = |why: String| Error::Shape { place: graph.place(value), why };
    let given = given.ok_or_else(|| fail("nothing given for it".to_owned()))?;
    if given.dtype() != ty.dtype || given.shape() != ty.concrete(bindings)? {
        return Err(fail(format!("expected {ty} at {bindings:?}, got {}{:?}", given.dtype(), given.shape())));
    }
    Ok(given.convert(precision.dtype(ty.dtype)))
}

/// Computes one node from its operands: for constant folding, derived weights, and ops that a backend leaves to the host.
/// Not for `input` and `parameter` nodes.
///
/// # Errors
/// As [`run`].
pub fn eval_node(graph: &Graph, value: ValueId, bindings: &[i64], operands: &[&Tensor]) -> Result<Tensor> {
    eval_at(graph, value, bindings, operands, Precision::Declared)
}

fn eval_at(
    graph: &Graph,
    value: ValueId,
    bindings: &[i64],
    operands: &[&Tensor],
    precision: Precision,
) -> Result<Tensor> {
    let node = graph.node(value);
    if let Op::Constant { index } = node.op {
        let constant = &graph.constants[index as usize];
        let tensor = Tensor::new(constant.ty.dtype, constant.ty.concrete(bindings)?, constant.bytes.clone())?;
        return Ok(tensor.convert(precision.dtype(constant.ty.dtype)));
    }
    let ty = ValueType::new(precision.dtype(node.ty.dtype), node.ty.shape.clone());
    eval_part(graph, value, &ty, bindings, operands)
}

/// Computes a part of one node, which has type `ty`, from parts of its operands.
///
/// # Errors
/// As [`eval`], with the node's place.
pub fn eval_part(
    graph: &Graph,
    value: ValueId,
    ty: &ValueType,
    bindings: &[i64],
    operands: &[&Tensor],
) -> Result<Tensor> {
    eval(graph.op(value), ty, bindings, operands).map_err(|e| match e {
        Error::Shape { why, .. } => Error::Shape { place: graph.place(value), why },
        Error::Invalid(why) => Error::Invalid(format!("{}: {why}", graph.place(value))),
        other => other,
    })
}

/// Computes `op` with a result of type `ty`; no graph needed.
///
/// # Errors
/// As [`run`]; and for `input`, `parameter` and `constant`, which need a graph.
pub fn eval(op: &Op, ty: &ValueType, bindings: &[i64], operands: &[&Tensor]) -> Result<Tensor> {
    let shape = ty.concrete(bindings)?;
    let sizes: Vec<&[i64]> = operands.iter().map(|t| t.shape()).collect();
    let ranks: Vec<usize> = sizes.iter().map(|s| s.len()).collect();
    let dtypes: Vec<DType> = operands.iter().map(|t| t.dtype()).collect();
    infer::ranges::check_attributes(op, &ranks)
        .and_then(|()| infer::dtypes::check_dtypes(op, &dtypes, ty.dtype))
        .and_then(|()| infer::check_sizes(op, &sizes, &shape, bindings))
        .map_err(|why| Error::Shape { place: infer::place_of(op, &[]), why })?;
    eval_checked(op, ty.dtype, &shape, bindings, operands).map_err(Error::Invalid)
}

fn eval_checked(op: &Op, dtype: DType, shape: &[i64], bindings: &[i64], operands: &[&Tensor]) -> Check<Tensor> {
    let size = |d: &Dim| d.eval(bindings).map_err(|e| e.to_string());
    match op {
        Op::Input { .. } | Op::Parameter { .. } | Op::Constant { .. } => Err("has no value without a graph".to_owned()),
        Op::Full { value } => Tensor::filled(dtype, shape, *value),
        Op::SizeOf { size: dim } => Tensor::filled_int(dtype, shape, size(dim)?),
        Op::Arange { start, step } => Tensor::arange(dtype, shape, size(start)?, size(step)?),
        Op::Unary(unary) => pointwise::unary(*unary, operands[0], dtype, shape),
        Op::Binary(binary) => pointwise::binary(*binary, operands, dtype, shape),
        Op::Where => pointwise::select(operands, dtype, shape),
        Op::Convert => Ok(operands[0].convert(dtype)),
        Op::Reshape => Ok(operands[0].reshaped(shape)),
        Op::Permute { dims } => movement::permute(operands[0], dims, shape),
        Op::Expand => movement::expand(operands[0], shape),
        Op::Slice { dim, start, step } => movement::slice(operands[0], *dim, size(start)?, *step, shape),
        Op::Cat { dim } => movement::cat(operands, *dim, shape),
        Op::Pad { before, value } => {
            let before: Vec<i64> = before.iter().map(size).collect::<Check<_>>()?;
            movement::pad(operands[0], &before, *value, shape)
        }
        Op::SliceScatter { dim, start, step } => {
            movement::slice_scatter(operands[0], operands[1], *dim, size(start)?, *step)
        }
        Op::Flip { dims } => movement::flip(operands[0], dims),
        Op::IndexSelect { dim } => gather::index_select(operands[0], operands[1], *dim, shape),
        Op::Gather { dim } => gather::gather(operands[0], operands[1], *dim, shape),
        Op::Interpolate { dim } => gather::interpolate(operands, *dim, shape),
        Op::Reduce { op, dims, .. } => reduce::reduce(*op, operands[0], dims, dtype, shape),
        Op::Cumsum { dim } => reduce::cumsum(operands[0], *dim, dtype),
        Op::Softmax { dim } => reduce::softmax(operands[0], *dim, dtype),
        Op::Linear => contraction::linear(operands, dtype, shape),
        Op::Matmul => contraction::matmul(operands[0], operands[1], dtype, shape),
        Op::Convolution { stride, padding, dilation, groups, channels_last } => {
            let windows = contraction::Windows { stride, padding, dilation, groups: *groups };
            contraction::convolution(operands, &windows, *channels_last, dtype, shape)
        }
        Op::ScaledDotProductAttention { is_causal, scale } => {
            contraction::attention(operands, *is_causal, *scale, dtype, shape)
        }
        Op::GroupNorm { num_groups, eps, channel_dim } => {
            norm::group_norm(operands, *num_groups, *eps, *channel_dim, dtype)
        }
        Op::LayerNorm { normalized_ndim, eps } => norm::layer_norm(operands, *normalized_ndim, *eps, dtype),
        Op::RmsNorm { normalized_ndim, eps, floor } => norm::rms_norm(operands, *normalized_ndim, *eps, *floor, dtype),
        Op::UpsampleNearest { first_dim, scales, exact } => {
            window::upsample_nearest(operands[0], *first_dim, scales, *exact, shape)
        }
        Op::Pool { op, first_dim, kernel, stride, padding, count_include_pad } => {
            let windows = window::Pool { first_dim: *first_dim, kernel, stride, padding };
            window::pool(*op, operands[0], &windows, *count_include_pad, shape)
        }
    }
}
