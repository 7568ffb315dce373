//! What is computed once per weight set and kept: small values that depend on parameters, constants and fixed sizes alone.
//!
//! Eager computes such values in each call and lets go of them. Most are tables or vectors that cost nothing to keep. A
//! weight that `forward` makes of another one (a dequantised, normalised or converted one) is as large as a weight, and a
//! model of such weights would be held several times: those are computed by each run, one after the other.

use std::collections::HashSet;

use crate::ir::{Attr, Dim, Graph, Op, ValueId};

/// For each node, whether it depends on parameters, constants and fixed sizes alone.
pub fn fixed_values(graph: &Graph) -> Vec<bool> {
    let is_known = |dim: &Dim| dim.as_constant().is_some();
    let mut fixed = vec![false; graph.nodes.len()];
    for v in graph.values() {
        let node = graph.node(v);
        let attributes = node.op.attributes();
        let has_known_attributes = attributes.iter().all(|(_, attr)| match attr {
            Attr::Dim(d) => is_known(d),
            Attr::Dims(d) => d.iter().all(is_known),
            _ => true,
        });
        fixed[v.index()] = !matches!(node.op, Op::Input { .. })
            && has_known_attributes
            && node.ty.shape.iter().all(is_known)
            && node.inputs.iter().all(|i| fixed[i.index()]);
    }
    fixed
}

/// Those of [`fixed_values`] that are kept: of what the rest of the graph reads, the smallest first, as long as they and
/// all that leads to them take at most `limit` bytes.
pub fn kept_values(graph: &Graph, limit: usize) -> Vec<bool> {
    let fixed = fixed_values(graph);
    let bytes = |v: ValueId| match graph.op(v) {
        Op::Parameter { .. } | Op::Constant { .. } => 0,
        op if op.is_view() => 0,
        _ => {
            let ty = graph.ty(v);
            let numel = ty.numel().as_constant().and_then(|n| usize::try_from(n).ok());
            numel.unwrap_or(usize::MAX).saturating_mul(ty.dtype.size_bytes())
        }
    };
    let all = graph.values().filter(|v| fixed[v.index()]).fold(0usize, |sum, v| sum.saturating_add(bytes(v)));
    if all <= limit {
        return fixed;
    }
    let mut is_read = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| is_read[o.index()] = true);
    for v in graph.values().filter(|v| !fixed[v.index()]) {
        graph.node(v).inputs.iter().for_each(|i| is_read[i.index()] = true);
    }
    let mut kept = vec![false; graph.nodes.len()];
    let mut roots: Vec<(usize, ValueId)> = graph
        .values()
        .filter(|v| fixed[v.index()] && is_read[v.index()])
        .map(|v| (new_values(graph, &kept, v).into_iter().fold(0, |sum, n| bytes(n).saturating_add(sum)), v))
        .collect();
    roots.sort_unstable();
    let mut room = limit;
    for (_, root) in roots {
        let new = new_values(graph, &kept, root);
        let asked = new.iter().fold(0usize, |sum, &n| sum.saturating_add(bytes(n)));
        if asked <= room {
            room -= asked;
            new.iter().for_each(|n| kept[n.index()] = true);
        }
    }
    kept
}

/// The value and all that leads to it, but what is kept already.
fn new_values(graph: &Graph, kept: &[bool], root: ValueId) -> Vec<ValueId> {
    let mut found = Vec::new();
    let mut seen = HashSet::new();
    let mut open = vec![root];
    while let Some(v) = open.pop() {
        if !kept[v.index()] && seen.insert(v) {
            found.push(v);
            open.extend(&graph.node(v).inputs);
        }
    }
    found
}
