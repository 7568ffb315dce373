//! Does pointwise work in the shape in which a contraction or norm leaves its result.
//!
//! *What:* between `linear -> reshape -> add(residual)` the reshape moves below the `add`, and the residual is read through
//! the inverse reshape. *Why faster:* only values of exactly the root's shape can be part of its epilogue; here
//! the sum becomes one, and a full pass over memory goes. *Requires:* permutes have settled. *Guarantees:* every moved
//! reshape is of a whole value and thus a view of contiguous data; an operand that would have to be copied for it, because
//! it is broadcast along part of a merged run of dimensions, keeps the reshape where it is.
//!
//! ```text
//! %2: f16[2,64,8] = linear(%0, %1)                 %2: f16[2,64,8] = linear(%0, %1)
//! %3: f16[2,8,8,8] = reshape(%2)                   %3: f16[2,64,8] = reshape(%r)
//! %4: f16[2,8,8,8] = add(%3, %r)             ->    %4: f16[2,64,8] = add(%2, %3)
//!                                                  %5: f16[2,8,8,8] = reshape(%4)
//! ```

use super::{Pass, PassCtx};
use crate::analysis::shape::reshape_blocks;
use crate::error::Result;
use crate::ir::{Changed, Dim, Editor, Graph, Op, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "sink_views", run };

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let mut is_output = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| is_output[o.index()] = true);
    let mut walk = Walk {
        graph,
        users: graph.users(),
        is_output,
        edit: Editor::new(graph, PASS.name),
        held: vec![None; graph.nodes.len()],
        is_mapped: vec![false; graph.nodes.len()],
    };
    for v in graph.values() {
        walk.edit.at(v);
        match walk.flat(v) {
            Some(held) => walk.held[v.index()] = Some(held),
            None => walk.copy(v),
        }
    }
    for &o in &graph.outputs {
        walk.shaped(o);
    }
    Ok(walk.edit.finish())
}

struct Walk<'g> {
    graph: &'g Graph,
    users: Vec<Vec<ValueId>>,
    is_output: Vec<bool>,
    edit: Editor<'g>,
    /// The new value that an old one is a reshape of.
    held: Vec<Option<ValueId>>,
    is_mapped: Vec<bool>,
}

impl Walk<'_> {
    fn copy(&mut self, v: ValueId) {
        for i in 0..self.graph.node(v).inputs.len() {
            self.shaped(self.graph.node(v).inputs[i]);
        }
        self.edit.at(v).copy(v);
        self.is_mapped[v.index()] = true;
    }

    /// The value in its own shape.
    fn shaped(&mut self, v: ValueId) -> ValueId {
        if !self.is_mapped[v.index()] {
            let held = self.held[v.index()].expect("a value is mapped or held");
            let ty = self.graph.ty(v).clone();
            let value = self.edit.emit(Op::Reshape, &[held], ty.dtype, ty.shape);
            if self.edit.replace(v, value, "reshape moved down") {
                self.is_mapped[v.index()] = true;
            } else {
                self.copy(v);
            }
        }
        self.edit.get(v)
    }

    /// The value in another shape, if it is a reshape that can wait or pointwise work that can be done before one.
    fn flat(&mut self, v: ValueId) -> Option<ValueId> {
        let node = self.graph.node(v);
        match &node.op {
            Op::Reshape if self.can_wait(v) => Some(match self.held[node.inputs[0].index()] {
                Some(held) => held,
                None => self.shaped(node.inputs[0]),
            }),
            op if op.is_pointwise() => self.pointwise(v),
            _ => None,
        }
    }

    /// A reshape of the private result of a contraction or norm, or of pointwise work on one, that pointwise work reads.
    fn can_wait(&self, v: ValueId) -> bool {
        let x = self.graph.node(v).inputs[0];
        let users = &self.users[v.index()];
        let pointwise = users.iter().any(|u| self.graph.op(*u).is_pointwise() && self.shape(*u) == self.shape(v));
        pointwise && !self.is_output[v.index()] && self.ends_epilogue(x)
    }

    fn ends_epilogue(&self, v: ValueId) -> bool {
        let mut v = v;
        for _ in 0..8 {
            if self.users[v.index()].len() != 1 || self.is_output[v.index()] {
                return false;
            }
            match self.graph.op(v) {
                Op::Linear | Op::Matmul | Op::Convolution { .. } => return true,
                Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::GroupNorm { .. } => return true,
                op if op.is_pointwise() => {
                    let full = self.graph.node(v).inputs.iter().find(|i| self.shape(**i) == self.shape(v));
                    let Some(next) = full else { return false };
                    v = *next;
                }
                _ => return false,
            }
        }
        false
    }

    fn shape(&self, v: ValueId) -> &[Dim] {
        &self.graph.ty(v).shape
    }

    fn pointwise(&mut self, v: ValueId) -> Option<ValueId> {
        let node = self.graph.node(v);
        let host = node.inputs.iter().rev().find(|i| {
            self.held[i.index()].is_some() && !self.is_mapped[i.index()] && self.shape(**i) == node.ty.shape
        })?;
        // The epilogue of another contraction, whose result has this shape, is the better place.
        let others = node.inputs.iter().filter(|i| self.held[i.index()].is_none() && self.shape(**i) == node.ty.shape);
        if others.into_iter().any(|i| self.ends_epilogue(*i)) {
            return None;
        }
        let held = self.held[host.index()]?;
        let flat = self.edit.graph().ty(held).shape.clone();
        let shapes: Vec<Option<Vec<Dim>>> =
            node.inputs.iter().map(|i| self.operand_shape(*i, &node.ty.shape, &flat)).collect();
        let shapes: Vec<Vec<Dim>> = shapes.into_iter().collect::<Option<_>>()?;
        let operands: Vec<ValueId> = node.inputs.iter().zip(shapes).map(|(i, shape)| self.operand(*i, shape)).collect();
        Some(self.edit.emit(node.op.clone(), &operands, node.ty.dtype, flat))
    }

    /// The shape in which an operand broadcasts against `flat` as it did against `shape`; `None` if there is none.
    fn operand_shape(&self, v: ValueId, shape: &[Dim], flat: &[Dim]) -> Option<Vec<Dim>> {
        let own = self.shape(v);
        if own.iter().all(|d| d.is(1)) {
            return Some(Vec::new());
        }
        let mut wide = vec![Dim::constant(1); shape.len() - own.len()];
        wide.extend(own.iter().cloned());
        let mut out = Vec::with_capacity(flat.len());
        for block in reshape_blocks(shape, flat)? {
            let (mine, all) = (&wide[block.old.clone()], &shape[block.old]);
            if mine == all {
                out.extend_from_slice(&flat[block.new]);
            } else if mine.iter().all(|d| d.is(1)) {
                out.extend(block.new.map(|_| Dim::constant(1)));
            } else {
                return None;
            }
        }
        Some(out)
    }

    fn operand(&mut self, v: ValueId, shape: Vec<Dim>) -> ValueId {
        if let Some(held) = self.held[v.index()].filter(|h| self.edit.graph().ty(*h).shape == shape) {
            return held;
        }
        let x = self.shaped(v);
        let dtype = self.graph.ty(v).dtype;
        if shape.is_empty() || self.edit.graph().ty(x).shape == shape {
            return x;
        }
        self.edit.emit(Op::Reshape, &[x], dtype, shape)
    }
}
