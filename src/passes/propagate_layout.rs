//! Moves convolutions to channels-last and lets no transposition of data survive inside the model.
//!
//! *What:* every 2-D and 3-D convolution becomes channels-last between two permutes, and permutes are pushed down through
//! everything that does not care about the order of dimensions: pointwise ops, norms, `cat`, `slice`, `pad`, `expand`, pooling,
//! upsampling, reductions, `linear`, and reshapes that keep what they merge or split together. Where two meet they cancel:
//! `permute(0, 2, 3, 1) -> reshape(B, HW, C)` between a convolution and attention is no work at all. A pixel shuffle before a
//! convolution moves data once, into channels-last. *Why faster:* channels last is what the convolution and norm kernels
//! read at full width, and a transposition moves every byte twice. *Requires:* canonical form (convolutions of one dimension
//! are gone). *Guarantees:* inputs and outputs keep their order; a permute is left only where an op needs a given order, and
//! it is a view for whoever reads it.
//!
//! ```text
//! %2: f32[2,8,4,4] = convolution(%0, %1)                  %2 = permute(%0) {dims=[0, 2, 3, 1]}
//! %3: f32[2,8,4,4] = silu(%2)                             %3: f32[2,4,4,8] = convolution(%2, %1) {channels_last=true}
//! %4: f32[2,4,4,8] = permute(%3) {dims=[0, 2, 3, 1]}  ->  %4: f32[2,4,4,8] = silu(%3)
//! %5: f32[2,16,8] = reshape(%4)                           %5: f32[2,16,8] = reshape(%4)
//! ```
//!
//! The walk keeps for each old value where it is: in its own order, or held in another with the [`Layout`] to read it by.
//! The permute that the layout stands for is only emitted when somebody asks for the value in its own order.

use super::{Pass, PassCtx};
use crate::analysis::Layout;
use crate::analysis::shape::reshape_blocks;
use crate::error::Result;
use crate::ir::{Changed, Dim, Editor, Graph, Node, Op, ReduceOp, UnaryOp, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "propagate_layout", run };

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let mut walk = Walk {
        graph,
        users: graph.users(),
        edit: Editor::new(graph, PASS.name),
        held: vec![None; graph.nodes.len()],
        is_mapped: vec![false; graph.nodes.len()],
    };
    for v in graph.values() {
        walk.edit.at(v);
        match walk.physical(v) {
            Some(held) => walk.hold(v, held),
            None => walk.copy(v),
        }
    }
    for &o in &graph.outputs {
        walk.logical(o);
    }
    Ok(walk.edit.finish())
}

/// Values among which [`Walk::feeds_convolution`] looks.
const FAR: usize = 16;

/// A new value that holds an old one in another order.
#[derive(Clone)]
struct Held {
    value: ValueId,
    layout: Layout,
}

struct Walk<'g> {
    graph: &'g Graph,
    users: Vec<Vec<ValueId>>,
    edit: Editor<'g>,
    held: Vec<Option<Held>>,
    is_mapped: Vec<bool>,
}

impl Walk<'_> {
    fn hold(&mut self, v: ValueId, held: Held) {
        if held.layout.is_identity() && self.edit.replace(v, held.value, "order restored") {
            self.is_mapped[v.index()] = true;
        }
        self.held[v.index()] = Some(held);
    }

    fn copy(&mut self, v: ValueId) {
        for i in 0..self.graph.node(v).inputs.len() {
            self.logical(self.graph.node(v).inputs[i]);
        }
        self.edit.at(v).copy(v);
        self.is_mapped[v.index()] = true;
    }

    /// The value in its own order.
    fn logical(&mut self, v: ValueId) -> ValueId {
        if !self.is_mapped[v.index()] {
            let held = self.held[v.index()].clone().expect("a value is mapped or held");
            let value = self.permute(held.value, held.layout.dims());
            if self.edit.replace(v, value, "own order needed") {
                self.is_mapped[v.index()] = true;
            } else {
                self.copy(v);
            }
        }
        self.edit.get(v)
    }

    fn layout_of(&self, v: ValueId) -> Option<&Layout> {
        self.held[v.index()].as_ref().map(|h| &h.layout).filter(|l| !l.is_identity())
    }

    fn shape(&self, v: ValueId) -> &[Dim] {
        &self.graph.ty(v).shape
    }

    /// A permute of a new value; only a reshape if it moves nothing but sizes of 1.
    fn permute(&mut self, x: ValueId, dims: &[usize]) -> ValueId {
        let ty = self.edit.graph().ty(x).clone();
        let shape: Vec<Dim> = dims.iter().map(|d| ty.shape[*d].clone()).collect();
        if dims.is_sorted() {
            return x;
        }
        let moved: Vec<usize> = dims.iter().copied().filter(|d| !ty.shape[*d].is(1)).collect();
        let op = if moved.is_sorted() { Op::Reshape } else { Op::Permute { dims: dims.to_vec() } };
        self.edit.emit(op, &[x], ty.dtype, shape)
    }

    /// An operand that broadcasts against a result of `rank` dimensions, in the result's `layout`.
    fn aligned(&mut self, v: ValueId, rank: usize, layout: &Layout) -> ValueId {
        if self.layout_of(v) == Some(layout) {
            return self.held[v.index()].as_ref().map(|h| h.value).expect("it has a layout");
        }
        if let Some(held) = self.held[v.index()].clone().filter(|h| h.layout.dims().len() == rank) {
            let dims = held.layout.then(layout.inverse().dims());
            return self.permute(held.value, dims.dims());
        }
        let x = self.logical(v);
        let ty = self.edit.graph().ty(x).clone();
        if ty.shape.iter().all(|d| d.is(1)) && ty.rank() <= rank {
            return x;
        }
        let missing = rank - ty.rank();
        let mut shape = vec![Dim::constant(1); missing];
        shape.extend(ty.shape);
        let wide = if missing == 0 { x } else { self.edit.emit(Op::Reshape, &[x], ty.dtype, shape) };
        self.permute(wide, layout.inverse().dims())
    }

    /// The node computed in another order, if that is possible and one of its operands is held so.
    fn physical(&mut self, v: ValueId) -> Option<Held> {
        let node = self.graph.node(v);
        match &node.op {
            Op::Convolution { channels_last: false, stride, .. } if stride.len() >= 2 => Some(self.convolution(node)),
            Op::Permute { dims } => self.transposed(node, dims),
            op if op.is_pointwise() => self.over_operands(node, op.clone()),
            Op::Cat { dim } => {
                let layout = self.full_layout(node)?;
                self.over_operands(node, Op::Cat { dim: layout.place(*dim) })
            }
            Op::SliceScatter { dim, start, step } => {
                let dim = self.full_layout(node)?.place(*dim);
                self.over_operands(node, Op::SliceScatter { dim, start: start.clone(), step: *step })
            }
            Op::Reshape => self.reshaped(node).or_else(|| self.gathered(v)),
            Op::Expand if self.shape(node.inputs[0]).len() != node.ty.rank() => None,
            Op::Linear => self.linear(node),
            Op::Reduce { op, dims, keepdim } => self.reduced(node, *op, dims, *keepdim),
            _ => self.over_first(node),
        }
    }

    fn convolution(&mut self, node: &Node) -> Held {
        let Op::Convolution { stride, padding, dilation, groups, .. } = node.op.clone() else {
            unreachable!("called for convolutions")
        };
        let layout = Layout::channels_last(node.ty.rank());
        let mut operands = vec![self.aligned(node.inputs[0], node.ty.rank(), &layout)];
        for &w in &node.inputs[1..] {
            operands.push(self.logical(w));
        }
        let op = Op::Convolution { stride, padding, dilation, groups, channels_last: true };
        let value = self.edit.emit(op, &operands, node.ty.dtype, layout.to_physical(&node.ty.shape));
        Held { value, layout }
    }

    /// A permute moves no data: its result is held in its operand's order.
    fn transposed(&mut self, node: &Node, dims: &[usize]) -> Option<Held> {
        let x = node.inputs[0];
        let held = match self.held[x.index()].clone() {
            Some(held) => Held { value: held.value, layout: held.layout.then(dims) },
            None => Held { value: self.logical(x), layout: Layout::new(dims.to_vec()) },
        };
        Some(held)
    }

    /// The order in which an operand of the result's full shape is held.
    fn full_layout(&self, node: &Node) -> Option<Layout> {
        let rank = node.ty.rank();
        let is_full = |v: &&ValueId| match &node.op {
            Op::Cat { .. } | Op::SliceScatter { .. } => self.shape(**v).len() == rank,
            _ => self.shape(**v) == node.ty.shape,
        };
        node.inputs.iter().filter(is_full).find_map(|v| self.layout_of(*v)).cloned()
    }

    /// Ops whose operands all align with the result.
    fn over_operands(&mut self, node: &Node, op: Op) -> Option<Held> {
        let layout = self.full_layout(node)?;
        let rank = node.ty.rank();
        let operands: Vec<ValueId> = node.inputs.iter().map(|v| self.aligned(*v, rank, &layout)).collect();
        let value = self.edit.emit(op, &operands, node.ty.dtype, layout.to_physical(&node.ty.shape));
        Some(Held { value, layout })
    }

    fn reshaped(&mut self, node: &Node) -> Option<Held> {
        let x = node.inputs[0];
        let layout = self.layout_of(x)?.clone();
        let (shape, layout) = layout.reshape(self.shape(x), &node.ty.shape)?;
        let held = self.held[x.index()].as_ref()?.value;
        let value = self.edit.emit(Op::Reshape, &[held], node.ty.dtype, shape);
        Some(Held { value, layout })
    }

    /// A reshape that merges what does not lie together, as pixel (un)shuffles do: data moves here, into the order of the
    /// convolutions that read it, so that it need not move again.
    fn gathered(&mut self, v: ValueId) -> Option<Held> {
        let node = self.graph.node(v);
        let (x, rank) = (node.inputs[0], node.ty.rank());
        let from = self.layout_of(x)?.clone();
        let blocks = reshape_blocks(self.shape(x), &node.ty.shape)?;
        if rank < 4 || blocks.len() != rank || !self.feeds_convolution(v) {
            return None;
        }
        // As many blocks as dimensions: each is one of them.
        let layout = Layout::channels_last(rank);
        let order = layout.inverse();
        let parts = order.dims().iter().flat_map(|d| blocks[*d].old.clone());
        let dims: Vec<usize> = parts.map(|d| from.place(d)).collect();
        let held = self.held[x.index()].as_ref()?.value;
        let moved = self.permute(held, &dims);
        let value = self.edit.emit(Op::Reshape, &[moved], node.ty.dtype, layout.to_physical(&node.ty.shape));
        Some(Held { value, layout })
    }

    /// Whether a convolution or somebody who asks for channels last reads the value or what is made of it element by element,
    /// or what is in that order already is combined with it.
    fn feeds_convolution(&self, v: ValueId) -> bool {
        let rank = self.shape(v).len();
        let order = Layout::channels_last(rank);
        let asked = order.inverse();
        let (mut reached, mut next) = (vec![v], 0);
        while next < reached.len() && next < FAR {
            let x = reached[next];
            next += 1;
            for &user in &self.users[x.index()] {
                let node = self.graph.node(user);
                match &node.op {
                    Op::Convolution { stride, .. } if stride.len() >= 2 && node.inputs[0] == x => return true,
                    Op::Permute { dims } if dims == asked.dims() => return true,
                    Op::Cat { .. } | Op::Slice { .. } | Op::Pad { .. } => {}
                    Op::UpsampleNearest { .. } | Op::Pool { .. } | Op::GroupNorm { .. } => {}
                    Op::Interpolate { .. } if node.inputs[0] == x => {}
                    op if op.is_pointwise() => {
                        if node.inputs.iter().any(|i| self.layout_of(*i) == Some(&order)) {
                            return true;
                        }
                    }
                    _ => continue,
                }
                if node.ty.rank() == rank && !reached.contains(&user) {
                    reached.push(user);
                }
            }
        }
        false
    }

    /// The order of rows does not matter to a linear layer.
    fn linear(&mut self, node: &Node) -> Option<Held> {
        let x = node.inputs[0];
        let layout = self.layout_of(x)?.clone();
        let last = node.ty.rank() - 1;
        if layout.place(last) != last {
            return None;
        }
        let mut operands = vec![self.held[x.index()].as_ref()?.value];
        for &w in &node.inputs[1..] {
            operands.push(self.logical(w));
        }
        let value = self.edit.emit(Op::Linear, &operands, node.ty.dtype, layout.to_physical(&node.ty.shape));
        Some(Held { value, layout })
    }

    fn reduced(&mut self, node: &Node, op: ReduceOp, dims: &[usize], keepdim: bool) -> Option<Held> {
        let x = node.inputs[0];
        let layout = self.layout_of(x)?.clone();
        let mut places: Vec<usize> = dims.iter().map(|d| layout.place(*d)).collect();
        places.sort_unstable();
        let value = self.held[x.index()].as_ref()?.value;
        let layout = if keepdim { layout } else { layout.without(|d| dims.contains(&d)) };
        let op = Op::Reduce { op, dims: places, keepdim };
        let value = self.edit.emit(op, &[value], node.ty.dtype, layout.to_physical(&node.ty.shape));
        Some(Held { value, layout })
    }

    /// Ops over one value (weights aside) whose attributes name dimensions.
    fn over_first(&mut self, node: &Node) -> Option<Held> {
        let x = *node.inputs.first()?;
        let layout = self.layout_of(x)?.clone();
        let op = renamed(&node.op, &layout)?;
        let mut operands = vec![self.held[x.index()].as_ref()?.value];
        for &w in &node.inputs[1..] {
            operands.push(self.logical(w));
        }
        let value = self.edit.emit(op, &operands, node.ty.dtype, layout.to_physical(&node.ty.shape));
        Some(Held { value, layout })
    }
}

/// The op over physical dimensions, if it can be done there.
fn renamed(op: &Op, layout: &Layout) -> Option<Op> {
    let rank = layout.dims().len();
    Some(match op {
        Op::Slice { dim, start, step } => Op::Slice { dim: layout.place(*dim), start: start.clone(), step: *step },
        Op::Pad { before, value } => Op::Pad { before: layout.to_physical(before), value: *value },
        Op::Flip { dims } => Op::Flip { dims: dims.iter().map(|d| layout.place(*d)).collect() },
        Op::Expand => Op::Expand,
        Op::Unary(UnaryOp::RotatePairs) if layout.place(rank - 1) + 1 == rank => op.clone(),
        Op::Cumsum { dim } => Op::Cumsum { dim: layout.place(*dim) },
        Op::Interpolate { dim } => Op::Interpolate { dim: layout.place(*dim) },
        // Kernels walk rows: what is normalised over is the last dimension.
        Op::Softmax { dim } if layout.place(*dim) + 1 == rank => Op::Softmax { dim: rank - 1 },
        Op::GroupNorm { num_groups, eps, channel_dim }
            if layout.place(0) == 0 && layout.place(*channel_dim) + 1 == rank =>
        {
            Op::GroupNorm { num_groups: *num_groups, eps: *eps, channel_dim: layout.place(*channel_dim) }
        }
        Op::LayerNorm { normalized_ndim: n, .. } | Op::RmsNorm { normalized_ndim: n, .. }
            if (rank - n..rank).all(|d| layout.place(d) == d) =>
        {
            op.clone()
        }
        Op::UpsampleNearest { first_dim, scales, exact }
            if layout.keeps_together(*first_dim..first_dim + scales.len()) =>
        {
            Op::UpsampleNearest { first_dim: layout.place(*first_dim), scales: scales.clone(), exact: *exact }
        }
        Op::Pool { op, first_dim, kernel, stride, padding, count_include_pad }
            if layout.keeps_together(*first_dim..first_dim + kernel.len()) =>
        {
            Op::Pool {
                op: *op,
                first_dim: layout.place(*first_dim),
                kernel: kernel.clone(),
                stride: stride.clone(),
                padding: padding.clone(),
                count_include_pad: *count_include_pad,
            }
        }
        _ => return None,
    })
}
