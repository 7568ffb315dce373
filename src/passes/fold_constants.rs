//! Computes once, at compile time, what depends on constants alone.
//!
//! *What:* nodes over constants, `full` and `arange` with constant shapes are evaluated by the interpreter; a result whose
//! elements are all equal becomes a `full`. *Why faster:* time embeddings, masks and position indices are dozens of tiny
//! kernels each step. *Requires:* nothing. *Guarantees:* no constant of more than [`MAX_BYTES`] is made, so a table that
//! eager would build on the fly does not bloat the program; what depends on sizes or weights stays.
//!
//! ```text
//! %0: i64[4] = arange() {start=0, step=1}
//! %1: f32[4] = convert(%0)
//! %2: f32[4] = exp(%1)            ->        %0: f32[4] = constant() {index=0}
//! ```

use super::{Pass, PassCtx};
use crate::error::Result;
use crate::ir::interp::{self, Tensor};
use crate::ir::{Changed, DType, Dim, Editor, Graph, Op, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "fold_constants", run };

/// Most bytes of a value that is evaluated here.
pub const MAX_BYTES: i64 = 64 * 1024;

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let known = evaluate(graph);
    let needed = read_by_others(graph, &known);
    let mut edit = Editor::new(graph, PASS.name);
    for v in graph.values() {
        edit.copy(v);
        let Some(tensor) = known[v.index()].as_ref().filter(|_| needed[v.index()]) else { continue };
        if graph.node(v).inputs.is_empty() {
            continue;
        }
        let new = match uniform(tensor) {
            Some(value) => {
                let shape = graph.ty(v).shape.clone();
                edit.at(v).emit(Op::Full { value }, &[], tensor.dtype(), shape)
            }
            None => edit.emit_constant(tensor.dtype(), tensor.shape(), tensor.bytes().to_vec()),
        };
        edit.replace(v, new, "constant");
    }
    Ok(edit.finish())
}

/// The value of every node that is known now and small.
fn evaluate(graph: &Graph) -> Vec<Option<Tensor>> {
    let mut known: Vec<Option<Tensor>> = Vec::with_capacity(graph.nodes.len());
    for v in graph.values() {
        let value = is_candidate(graph, v).then(|| value_of(graph, v, &known)).flatten();
        known.push(value);
    }
    known
}

fn is_candidate(graph: &Graph, v: ValueId) -> bool {
    let node = graph.node(v);
    let sizes: Option<Vec<i64>> = node.ty.shape.iter().map(Dim::as_constant).collect();
    let bytes = sizes.map(|s| s.iter().product::<i64>() * node.ty.dtype.size_bytes() as i64);
    !matches!(node.op, Op::Input { .. } | Op::Parameter { .. }) && bytes.is_some_and(|b| b <= MAX_BYTES)
}

fn value_of(graph: &Graph, v: ValueId, known: &[Option<Tensor>]) -> Option<Tensor> {
    let node = graph.node(v);
    if let Op::Constant { index } = node.op {
        let constant = graph.constants.get(index as usize)?;
        let shape: Option<Vec<i64>> = constant.ty.shape.iter().map(Dim::as_constant).collect();
        return Tensor::new(constant.ty.dtype, shape?, constant.bytes.clone()).ok();
    }
    let operands: Vec<&Tensor> = node.inputs.iter().map(|i| known[i.index()].as_ref()).collect::<Option<_>>()?;
    // Without bindings, a node that names a size symbol has no value here.
    interp::eval(&node.op, &node.ty, &[], &operands).ok()
}

/// Known values that an unknown one or the caller reads.
fn read_by_others(graph: &Graph, known: &[Option<Tensor>]) -> Vec<bool> {
    let mut needed = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| needed[o.index()] = true);
    for v in graph.values().filter(|v| known[v.index()].is_none()) {
        graph.node(v).inputs.iter().for_each(|i| needed[i.index()] = true);
    }
    needed
}

/// The element that all others equal bit for bit, if f64 holds it.
fn uniform(tensor: &Tensor) -> Option<f64> {
    let bytes = tensor.bytes();
    let size = tensor.dtype().size_bytes();
    let first = bytes.get(..size)?;
    let value = *tensor.to_f64().first()?;
    let exact = tensor.dtype() != DType::I64 || value.abs() < 9e15;
    (exact && !value.is_nan() && bytes.chunks_exact(size).all(|c| c == first)).then_some(value)
}
