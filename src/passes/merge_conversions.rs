//! Drops conversions that the op behind or before them does by itself.
//!
//! *What:* arithmetic, norms, softmax and reductions compute in f32 whatever float they read, so a widening conversion of
//! an operand goes; and they round once to whatever float they give, so a conversion of a result that nothing else
//! reads is the result's type. *Why faster:* the upcasts around norms and softmax in 16-bit models are full copies at twice
//! the size. *Requires:* recognition is done, which looks at these conversions. *Guarantees:* bit for bit the same.
//!
//! ```text
//! %1: f32[2,8] = convert(%0)                    (x: f16)
//! %2: f32[2,8] = layer_norm(%1)
//! %3: f16[2,8] = convert(%2)               ->   %1: f16[2,8] = layer_norm(%0)
//! ```

use super::{Pass, PassCtx};
use crate::analysis::pattern::{operand_of, unwidened};
use crate::error::Result;
use crate::ir::{BinaryOp, Changed, DType, Editor, Graph, Op, ReduceOp, UnaryOp, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "merge_conversions", run };

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let users = graph.users();
    let mut is_output = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| is_output[o.index()] = true);
    let mut edit = Editor::new(graph, PASS.name);
    for v in graph.values() {
        edit.copy(v);
        let (node, mut op, mut rule) = (graph.node(v), v, "operands");
        if let Some(x) = operand_of(graph, v, &Op::Convert) {
            let private = users[x.index()].len() == 1 && !is_output[x.index()];
            if private && rounds_once(graph, x, node.ty.dtype) {
                (op, rule) = (x, "result");
            }
        }
        let operands = wide_operands(graph, op);
        if op == v && operands == graph.node(v).inputs {
            continue;
        }
        let operands: Vec<ValueId> = operands.into_iter().map(|o| edit.get(o)).collect();
        let ty = node.ty.clone();
        let new = edit.at(v).emit(graph.op(op).clone(), &operands, ty.dtype, ty.shape);
        edit.replace(v, new, rule);
    }
    Ok(edit.finish())
}

/// Whether `x` is computed in f32 and may as well be rounded to `dtype`.
fn rounds_once(g: &Graph, x: ValueId, dtype: DType) -> bool {
    let computes_in_f32 = match g.op(x) {
        Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax { .. } => true,
        Op::Linear | Op::Matmul | Op::Convolution { .. } => true,
        Op::Reduce { op, .. } => matches!(op, ReduceOp::Mean | ReduceOp::Sum),
        _ => false,
    };
    computes_in_f32 && g.ty(x).dtype == DType::F32 && dtype.is_half()
}

/// The operands of `v` under the conversions that it does by itself.
fn wide_operands(g: &Graph, v: ValueId) -> Vec<ValueId> {
    let node = g.node(v);
    let inputs = &node.inputs;
    match &node.op {
        Op::Unary(UnaryOp::Isnan | UnaryOp::Isinf | UnaryOp::LogicalNot) => {
            inputs.iter().map(|i| unwidened(g, *i)).collect()
        }
        // Bitwise ops are not for floats; the others compute in the type of the result.
        Op::Binary(op) if op.is_predicate() => compared(g, *op, inputs),
        Op::Unary(_) | Op::Binary(_) if node.ty.dtype.is_float() => inputs.iter().map(|i| unwidened(g, *i)).collect(),
        Op::Where => {
            let branches = inputs[1..].iter().map(|i| unwidened(g, *i));
            inputs[..1].iter().copied().chain(branches).collect()
        }
        Op::Softmax { .. } if g.ty(inputs[0]).dtype == DType::F32 => vec![unwidened(g, inputs[0])],
        Op::Reduce { op: ReduceOp::Mean | ReduceOp::Sum, .. } if node.ty.dtype == DType::F32 => {
            vec![unwidened(g, inputs[0])]
        }
        Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } if node.ty.dtype != DType::F64 => {
            normed(g, inputs)
        }
        _ => inputs.clone(),
    }
}

/// A comparison computes in f32 if any operand is a float, so floats stay comparable; f64 must stay f64.
fn compared(g: &Graph, op: BinaryOp, inputs: &[ValueId]) -> Vec<ValueId> {
    let is_f64 = inputs.iter().any(|i| g.ty(*i).dtype == DType::F64);
    let is_logical = matches!(op, BinaryOp::LogicalAnd | BinaryOp::LogicalOr | BinaryOp::LogicalXor);
    match is_f64 && !is_logical {
        true => inputs.to_vec(),
        false => inputs.iter().map(|i| unwidened(g, *i)).collect(),
    }
}

/// A norm's weights have its operand's type or are f32 beside 16 bits.
fn normed(g: &Graph, inputs: &[ValueId]) -> Vec<ValueId> {
    let x = unwidened(g, inputs[0]);
    let narrow = g.ty(x).dtype;
    let weights: Vec<ValueId> = inputs[1..].iter().map(|w| unwidened(g, *w)).collect();
    let all_narrow = weights.iter().all(|w| g.ty(*w).dtype == narrow);
    let all_f32 = inputs[1..].iter().all(|w| g.ty(*w).dtype == DType::F32);
    match (all_narrow, all_f32 && narrow.is_half()) {
        (true, _) => std::iter::once(x).chain(weights).collect(),
        (false, true) => std::iter::once(x).chain(inputs[1..].iter().copied()).collect(),
        (false, false) => inputs.to_vec(),
    }
}
