//! Computes equal nodes once.
//!
//! *What:* two nodes with the same op, attributes, operands and type have the same value, since every op is pure; the
//! later one is replaced by the earlier. *Why faster:* attention blocks repeat their mask, modulation and embedding
//! arithmetic in every layer. *Requires:* nothing; canonical operand order finds more. *Guarantees:* no two nodes are equal.
//!
//! ```text
//! %1: f32[4] = relu(%0)
//! %2: f32[4] = relu(%0)              %1: f32[4] = relu(%0)
//! %3: f32[4] = add(%1, %2)      ->   %2: f32[4] = add(%1, %1)
//! ```

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::{Pass, PassCtx};
use crate::error::Result;
use crate::ir::{Attr, Changed, Editor, Graph, Node, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "eliminate_common_subexpressions", run };

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let mut edit = Editor::new(graph, PASS.name);
    let mut seen: HashMap<u64, Vec<ValueId>> = HashMap::with_capacity(graph.nodes.len());
    for v in graph.values() {
        let new = edit.copy(v);
        let node = edit.graph().node(new);
        let bucket = seen.entry(fingerprint(node)).or_default();
        match bucket.iter().copied().find(|&first| is_same(edit.graph().node(first), node)) {
            Some(first) => {
                edit.replace(v, first, "equal node");
            }
            None => bucket.push(new),
        }
    }
    Ok(edit.finish())
}

fn is_same(a: &Node, b: &Node) -> bool {
    a.inputs == b.inputs && a.ty == b.ty && a.op == b.op
}

fn fingerprint(node: &Node) -> u64 {
    let mut h = DefaultHasher::new();
    node.op.name().hash(&mut h);
    node.inputs.hash(&mut h);
    node.ty.hash(&mut h);
    for (_, attribute) in node.op.attributes() {
        match attribute {
            Attr::Bool(v) => v.hash(&mut h),
            Attr::Float(v) => v.to_bits().hash(&mut h),
            Attr::Floats(v) => v.iter().for_each(|v| v.to_bits().hash(&mut h)),
            Attr::Dim(v) => v.hash(&mut h),
            Attr::Dims(v) => v.hash(&mut h),
        }
    }
    h.finish()
}
