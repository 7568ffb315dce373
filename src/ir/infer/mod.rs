//! Types of results: what an op accepts, and what comes out.
//!
//! Sizes in a graph are fitted to traces, so two expressions can be equal at every size the graph is used for and still
//! not be the same polynomial. Types are therefore checked in two ways: element types and ranks once ([`dtypes`]),
//! sizes as numbers at every sample binding ([`shapes`] and [`ranges`]). [`infer_type`] gives the symbolic type
//! where operands and attributes determine it; the formulas are the same ones.
//!
//! Invariant: what these rules accept, `ir/interp` computes without an error other than one that depends on data (an index
//! out of range, an integer division by zero).

pub mod dtypes;
pub mod ranges;
pub mod shapes;

use super::dim::Dim;
use super::dtype::DType;
use super::graph::{Graph, ValueId};
use super::op::{Op, ReduceOp, ValueType};
use crate::error::{Error, Place, Result};

pub use shapes::{broadcast_shapes, window_output};

/// Why a rule is broken; the caller knows the place.
pub(crate) type Check<T = ()> = std::result::Result<T, String>;

fn shape_error(place: Place, why: String) -> Error {
    Error::Shape { place, why }
}

pub(crate) fn place_of(op: &Op, operands: &[&ValueType]) -> Place {
    let operands: Vec<String> = operands.iter().map(|ty| ty.to_string()).collect();
    Place { module: String::new(), op: op.name().to_owned(), operands: operands.join(", ") }
}

/// The result's type, `None` where it is for the graph's author to choose (`full`, `reshape`, `slice`, ...). The element
/// type of a pointwise op or norm is that of its operands if they all have the same, else `None`.
///
/// # Errors
/// [`Error::Shape`] if the operands do not fit the op. An error means that the type could not be told; sizes that may or
/// may not be equal pass where the result does not depend on them.
pub fn infer_type(op: &Op, operands: &[&ValueType]) -> Result<Option<ValueType>> {
    let wrap = |why| shape_error(place_of(op, operands), why);
    let dtypes: Vec<DType> = operands.iter().map(|ty| ty.dtype).collect();
    let sizes: Vec<&[Dim]> = operands.iter().map(|ty| ty.shape.as_slice()).collect();
    let ranks: Vec<usize> = sizes.iter().map(|s| s.len()).collect();
    ranges::check_attributes(op, &ranks).map_err(wrap)?;
    let shape = shapes::result_shape(op, &sizes).map_err(wrap)?;
    let Some((dtype, shape)) = result_dtype(op, &dtypes).zip(shape) else { return Ok(None) };
    dtypes::check_dtypes(op, &dtypes, dtype).map_err(wrap)?;
    Ok(Some(ValueType::new(dtype, shape)))
}

/// The element type that ATen gives, if the operands tell.
fn result_dtype(op: &Op, operands: &[DType]) -> Option<DType> {
    let first = *operands.first()?;
    let values = match op {
        Op::Unary(u) if u.is_predicate() => return Some(DType::Bool),
        Op::Binary(b) if b.is_predicate() => return Some(DType::Bool),
        Op::Reduce { op: ReduceOp::Any | ReduceOp::All, .. } => return Some(DType::Bool),
        Op::Reduce { op: ReduceOp::Argmax | ReduceOp::Argmin, .. } => return Some(DType::I64),
        Op::Reduce { op: ReduceOp::Sum | ReduceOp::Prod, .. } | Op::Cumsum { .. } if !first.is_float() => {
            return Some(DType::I64);
        }
        Op::IndexSelect { .. } | Op::Gather { .. } | Op::Interpolate { .. } => return Some(first),
        Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } => return Some(first),
        Op::ScaledDotProductAttention { .. } => return Some(first),
        Op::Convert => return None,
        Op::Where => &operands[1..],
        _ => operands,
    };
    values.iter().all(|d| d == &values[0]).then(|| values[0])
}

/// Checks the declared type of a node: element types, ranks, attributes, and sizes at every sample binding.
///
/// # Errors
/// [`Error::Shape`] with the first broken rule.
pub fn check_node(graph: &Graph, value: ValueId) -> Result<()> {
    check_static(graph, value)?;
    let node = graph.node(value);
    for bindings in graph.sample_bindings() {
        let place = |why: String| shape_error(graph.place(value), format!("{why} (at {bindings:?})"));
        let concrete = |v: ValueId| graph.ty(v).concrete(&bindings).map_err(|e| place(e.to_string()));
        let operands: Vec<Vec<i64>> = node.inputs.iter().map(|&i| concrete(i)).collect::<Result<_>>()?;
        let operands: Vec<&[i64]> = operands.iter().map(Vec::as_slice).collect();
        check_sizes(&node.op, &operands, &concrete(value)?, &bindings).map_err(place)?;
    }
    Ok(())
}

/// The part of [`check_node`] that does not depend on sizes.
///
/// # Errors
/// As [`check_node`].
pub fn check_static(graph: &Graph, value: ValueId) -> Result<()> {
    let node = graph.node(value);
    let types: Vec<&ValueType> = node.inputs.iter().map(|&i| graph.ty(i)).collect();
    let dtypes: Vec<DType> = types.iter().map(|ty| ty.dtype).collect();
    let ranks: Vec<usize> = types.iter().map(|ty| ty.rank()).collect();
    ranges::check_attributes(&node.op, &ranks)
        .and_then(|()| dtypes::check_dtypes(&node.op, &dtypes, node.ty.dtype))
        .and_then(|()| ranges::check_stretching(&node.op, &types, &node.ty.shape))
        .map_err(|why| shape_error(graph.place(value), why))
}

/// Checks numbers: the result's shape is what the operands' give, every window, slice and pad lies inside. Attributes
/// are known to fit the ranks ([`check_static`]).
pub(crate) fn check_sizes(op: &Op, operands: &[&[i64]], result: &[i64], bindings: &[i64]) -> Check {
    ranges::check_numel(result)?;
    match shapes::result_shape(op, operands)? {
        Some(expected) if expected != result => {
            return Err(format!("the result has shape {expected:?}, declared as {result:?}"));
        }
        Some(_) | None => {}
    }
    ranges::check_ranges(op, operands, result, bindings)
}
