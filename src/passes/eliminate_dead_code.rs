//! Drops nodes that no output needs.
//!
//! *What:* one backward walk marks what the outputs reach. *Why faster:* less to plan and run; other passes may leave the
//! nodes they replaced behind, and count users without caring for dead ones. *Requires:* nothing. *Guarantees:* every node
//! is reachable from an output. Inputs, parameters and constants stay declared, their nodes go.
//!
//! ```text
//! %1: f32[4] = relu(%0)
//! %2: f32[4] = exp(%0)          ->   %1: f32[4] = relu(%0)
//! return %1                          return %1
//! ```

use super::{Pass, PassCtx};
use crate::error::Result;
use crate::ir::{Changed, Graph, edit};

/// This pass.
pub const PASS: Pass = Pass { name: "eliminate_dead_code", run };

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    Ok(edit::retain(graph, PASS.name, &live(graph)))
}

/// For each node, whether an output needs it.
pub(super) fn live(graph: &Graph) -> Vec<bool> {
    let mut live = vec![false; graph.nodes.len()];
    for &o in &graph.outputs {
        live[o.index()] = true;
    }
    for v in graph.values().rev().filter(|v| !graph.node(*v).inputs.is_empty()) {
        if live[v.index()] {
            for i in &graph.node(v).inputs {
                live[i.index()] = true;
            }
        }
    }
    live
}
