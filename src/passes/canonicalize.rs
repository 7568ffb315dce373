//! Brings a graph into one form.
//!
//! *What:* removes what does nothing (`x + 0`, `reshape` to the same shape, a slice of the whole), joins neighbours that are
//! one op (`permute` of `permute`), and writes what has several spellings in one (`pow(x, 2)` as `x * x`, a product with a
//! transposed matrix as `linear`). *Why faster:* each of these is a kernel in eager; and later passes match one spelling.
//! *Requires:* nothing. *Guarantees:* values are unchanged bit for bit, except that `x + 0` keeps a negative zero.
//! Replaced nodes stay behind without users.
//!
//! ```text
//! %1: f32[2,8] = convert(%0)             (of f32 to f32)
//! %2: f32[16] = reshape(%1)
//! %3: f32[4,4] = reshape(%2)        ->   %1: f32[4,4] = reshape(%0)
//! ```
//!
//! A rule looks at one node of the new graph and gives the value that stands for it. Rules run until none applies; each
//! leaves less work or a form that no rule of the same family undoes, so this ends; [`MAX_STEPS`] bounds it anyway.

mod arithmetic;
mod contraction;
mod movement;
mod normalization;

use super::{Pass, PassCtx};
use crate::error::Result;
use crate::ir::{Changed, Editor, Graph, Node, Op, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "canonicalize", run };

/// Rewrites of one node.
const MAX_STEPS: usize = 16;

/// Name and rule. A rule sees the node, its operands in the editor's graph, and emits what replaces it.
type Rule = (&'static str, fn(&mut Editor<'_>, &Node) -> Option<ValueId>);

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let mut edit = Editor::new(graph, PASS.name);
    for v in graph.values() {
        let kept = edit.copy(v);
        let (value, rule) = simplify(edit.at(v), kept);
        if value != kept {
            edit.replace(v, value, rule);
        }
    }
    Ok(edit.finish())
}

fn simplify(edit: &mut Editor<'_>, value: ValueId) -> (ValueId, &'static str) {
    let (mut value, mut last) = (value, "");
    for _ in 0..MAX_STEPS {
        let node = edit.graph().node(value);
        if node.inputs.is_empty() {
            break;
        }
        let node = node.clone();
        let hit = rules_for(&node.op).iter().find_map(|(name, rule)| Some((rule(edit, &node)?, *name)));
        let Some((next, name)) = hit else { break };
        (value, last) = (next, name);
    }
    (value, last)
}

fn rules_for(op: &Op) -> &'static [Rule] {
    match op {
        Op::Unary(_) => arithmetic::UNARY,
        Op::Binary(_) => arithmetic::BINARY,
        Op::Where => arithmetic::WHERE,
        Op::Convert => arithmetic::CONVERT,
        Op::Reduce { .. } => arithmetic::REDUCE,
        Op::Reshape => movement::RESHAPE,
        Op::Permute { .. } => movement::PERMUTE,
        Op::Expand => movement::EXPAND,
        Op::Slice { .. } => movement::SLICE,
        Op::Cat { .. } => movement::CAT,
        Op::Pad { .. } | Op::Flip { .. } => movement::PAD,
        Op::Matmul => contraction::MATMUL,
        Op::Convolution { .. } => contraction::CONVOLUTION,
        Op::ScaledDotProductAttention { .. } => contraction::ATTENTION,
        Op::LayerNorm { .. } | Op::RmsNorm { .. } => normalization::NORM,
        Op::Softmax { .. } => normalization::SOFTMAX,
        _ => &[],
    }
}
