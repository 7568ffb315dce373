//! The graph verifier: runs on captured graphs, on parsed ones, and in tests after every pass.
//!
//! What it checks:
//! - the table of paths starts with the root; every symbol has the same number of samples; size expressions name only
//!   symbols of the graph;
//! - operands and outputs are earlier nodes, paths exist;
//! - `input`, `parameter` and `constant` nodes name a slot and have its type; parameters and constants have constant
//!   shapes, constants as much data as their type says;
//! - every op has the number of operands, the element types, ranks and attributes that `ir/infer` asks for;
//! - operands that are broadcast have the result's sizes, as expressions, but for those that are the constant 1;
//! - at every sample binding, every size is a whole number and not negative, shapes are what the operands give, and slices,
//!   pads and windows lie inside.

use super::dim::Dim;
use super::graph::{Graph, ValueId};
use super::infer;
use super::op::{Attr, Op, ValueType};
use super::print::print_node;
use crate::error::{Error, Result};

/// Checks all invariants after `pass` (or `capture`, `parse`).
///
/// # Errors
/// [`Error::Verify`] with the line of the first node that breaks a rule, and the rule.
pub fn verify_graph(graph: &Graph, pass: &str) -> Result<()> {
    let fail = |what: String| Error::Verify { pass: pass.to_owned(), what };
    check_tables(graph).map_err(fail)?;
    for v in graph.values() {
        check_node(graph, v).map_err(|why| fail(format!("{why}: {}", describe(graph, v))))?;
    }
    for &output in &graph.outputs {
        if output.index() >= graph.nodes.len() {
            return Err(fail(format!("output %{} does not exist", output.0)));
        }
    }
    for bindings in graph.sample_bindings() {
        check_binding(graph, &bindings).map_err(|(value, why)| fail(format!("{why}: {}", describe(graph, value))))?;
    }
    Ok(())
}

/// The node's line with its operands' types, as far as they exist.
fn describe(graph: &Graph, value: ValueId) -> String {
    let node = graph.node(value);
    let known = |i: &ValueId| graph.nodes.get(i.index()).map_or("?".to_owned(), |n| n.ty.to_string());
    let operands: Vec<String> = node.inputs.iter().map(known).collect();
    format!("`{}` with operands ({})", print_node(graph, value), operands.join(", "))
}

fn expect(holds: bool, why: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(why()) }
}

fn check_tables(graph: &Graph) -> Result<(), String> {
    expect(graph.paths.first().is_some_and(String::is_empty), || "path 0 is not the root".to_owned())?;
    let points = graph.symbols.first().map_or(0, |s| s.samples.len());
    let uneven = graph.symbols.iter().find(|s| s.samples.len() != points);
    expect(uneven.is_none(), || "symbols differ in their number of samples".to_owned())?;
    for input in &graph.inputs {
        check_symbols(graph, &input.ty.shape).map_err(|why| format!("input `{}`: {why}", input.name))?;
    }
    for p in &graph.parameters {
        constant_shape(&p.ty).ok_or_else(|| format!("parameter `{}` has a shape that varies: {}", p.name, p.ty))?;
    }
    for (i, c) in graph.constants.iter().enumerate() {
        let shape = constant_shape(&c.ty).ok_or_else(|| format!("constant {i} has a shape that varies: {}", c.ty))?;
        infer::ranges::check_numel(&shape).map_err(|why| format!("constant {i}: {why}"))?;
        let bytes = shape.iter().product::<i64>() as usize * c.ty.dtype.size_bytes();
        expect(bytes == c.bytes.len(), || format!("constant {i} of type {} has {} bytes", c.ty, c.bytes.len()))?;
    }
    Ok(())
}

fn constant_shape(ty: &ValueType) -> Option<Vec<i64>> {
    ty.shape.iter().map(Dim::as_constant).collect()
}

fn check_symbols(graph: &Graph, dims: &[Dim]) -> Result<(), String> {
    let mut bad = None;
    for dim in dims {
        dim.visit_symbols(&mut |s| {
            if s.0 as usize >= graph.symbols.len() {
                bad = Some(s);
            }
        });
    }
    expect(bad.is_none(), || format!("symbol s{} does not exist", bad.map_or(0, |s| s.0)))
}

/// The rules that do not depend on sizes.
fn check_node(graph: &Graph, value: ValueId) -> Result<(), String> {
    let node = graph.node(value);
    expect((node.path.0 as usize) < graph.paths.len(), || format!("path {} does not exist", node.path.0))?;
    if let Some(late) = node.inputs.iter().find(|i| **i >= value) {
        return Err(format!("operand %{} does not come before", late.0));
    }
    check_symbols(graph, &node.ty.shape)?;
    for (_, attr) in node.op.attributes() {
        match attr {
            Attr::Dim(dim) => check_symbols(graph, &[dim])?,
            Attr::Dims(dims) => check_symbols(graph, &dims)?,
            Attr::Bool(_) | Attr::Float(_) | Attr::Floats(_) => {}
        }
    }
    check_slot(graph, value)?;
    infer::check_static(graph, value).map_err(|e| e.to_string())
}

fn check_slot(graph: &Graph, value: ValueId) -> Result<(), String> {
    let node = graph.node(value);
    let slot = match node.op {
        Op::Input { index } => graph.inputs.get(index as usize).map(|s| &s.ty),
        Op::Parameter { index } => graph.parameters.get(index as usize).map(|s| &s.ty),
        Op::Constant { index } => graph.constants.get(index as usize).map(|s| &s.ty),
        _ => return Ok(()),
    };
    let ty = slot.ok_or_else(|| "the slot does not exist".to_owned())?;
    expect(*ty == node.ty, || format!("the slot has type {ty}"))
}

/// Checks what expressions do not show, at sizes at which the graph was never looked at: that they are whole, shapes what
/// the operands give, and that slices, pads and windows lie inside.
///
/// # Errors
/// [`Error::Shape`] at the first node that does not fit.
pub fn check_at(graph: &Graph, bindings: &[i64]) -> Result<()> {
    check_binding(graph, bindings).map_err(|(value, why)| Error::Shape { place: graph.place(value), why })
}

/// All sizes at one binding; the first node that does not fit, and why.
fn check_binding(graph: &Graph, bindings: &[i64]) -> Result<(), (ValueId, String)> {
    let mut shapes: Vec<Vec<i64>> = Vec::with_capacity(graph.nodes.len());
    for v in graph.values() {
        let node = graph.node(v);
        let check = || -> Result<Vec<i64>, String> {
            let shape = node.ty.concrete(bindings).map_err(|e| e.to_string())?;
            let operands: Vec<&[i64]> = node.inputs.iter().map(|i| shapes[i.index()].as_slice()).collect();
            infer::check_sizes(&node.op, &operands, &shape, bindings)?;
            Ok(shape)
        };
        shapes.push(check().map_err(|why| (v, format!("{why} (at {bindings:?})")))?);
    }
    Ok(())
}
