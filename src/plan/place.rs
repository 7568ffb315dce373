//! Where values want to lie, decided from the end of the program to its beginning.
//!
//! A *target* is a place that the producer of a value should write straight into: the caller's output tensor, a slice of
//! a concatenation, or an order of dimensions in which a later reshape or matrix product needs no copy. Targets travel
//! backwards through views: if `permute(x)` wants to be dense, `x` wants to lie permuted.
//!
//! A value takes the first target that reaches it (outputs, then later uses before earlier ones). Where a target cannot
//! be met (the producer cannot write strided, another reader would suffer) the forward pass copies instead.

use std::sync::Arc;

use super::{Access, Buffer, BufferId, BufferKind};
use crate::analysis::fixed_values;
use crate::codegen::{TileBody, lower_body};
use crate::ir::{Dim, Graph, Op, ValueId};
use crate::kernel_ir::{Body, Group, GroupKind, Instr, Reg};
use crate::select::{Kernel, Layout, operand_layout, root_form, select};
use crate::{Error, Result};

/// A group with what the plan knows about it.
pub(super) struct Planned {
    pub group: Group,
    /// Depends on weights alone: a step of [`super::Plan::prepare`].
    pub is_static: bool,
    pub kernel: Kernel,
    pub body: Option<Arc<TileBody>>,
}

/// The groups and who makes and reads each value.
pub(super) struct Context<'a> {
    pub graph: &'a Graph,
    pub groups: Vec<Planned>,
    /// Index of the group that computes a value.
    pub maker: Vec<Option<usize>>,
    /// Groups that read a value made elsewhere; once per group.
    pub users: Vec<Vec<usize>>,
}

impl<'a> Context<'a> {
    pub fn new(graph: &'a Graph, groups: Vec<Group>) -> Result<Self> {
        let is_static = static_values(graph, &groups);
        let mut covered = vec![false; graph.nodes.len()];
        groups.iter().flat_map(|g| &g.nodes).for_each(|v| covered[v.index()] = true);
        let mut flat: Vec<Group> = Vec::with_capacity(groups.len());
        flat.extend(graph.values().filter(|v| !covered[v.index()]).map(|v| single(graph, v)));
        for group in groups {
            match group.kind {
                GroupKind::Weight => flat.extend(group.nodes.iter().map(|&v| single(graph, v))),
                _ => flat.push(group),
            }
        }
        let planned: Vec<Planned> = flat
            .into_iter()
            .map(|group| {
                let is_static = group.nodes.iter().all(|v| is_static[v.index()]);
                let body = lower_body(graph, &group, root_form(graph, &group)).map(Arc::new);
                let kernel = match select(graph, &group, body.as_deref()) {
                    // What needs workspace is no work for once per weight set.
                    Kernel::Convolution | Kernel::GroupNorm | Kernel::Softmax | Kernel::Attention if is_static => {
                        Kernel::Interpret
                    }
                    kernel => kernel,
                };
                Planned { is_static, kernel, body: body.filter(|_| kernel != Kernel::Interpret), group }
            })
            .collect();
        let (maker, users) = links(graph, &planned)?;
        Ok(Self { graph, groups: planned, maker, users })
    }

    pub fn maker(&self, value: ValueId) -> Option<&Planned> {
        self.maker[value.index()].map(|g| &self.groups[g])
    }

    /// The operand of a view group.
    pub fn viewed(&self, value: ValueId) -> Option<ValueId> {
        match self.maker(value) {
            Some(p) if p.group.kind == GroupKind::View => self.graph.node(value).inputs.first().copied(),
            _ => None,
        }
    }
}

/// Values that depend on parameters and constants alone, and that no group computes in each run.
fn static_values(graph: &Graph, groups: &[Group]) -> Vec<bool> {
    let mut is_static = fixed_values(graph);
    let runs = |g: &&Group| !matches!(g.kind, GroupKind::Weight | GroupKind::View | GroupKind::Source);
    groups.iter().filter(runs).flat_map(|g| &g.nodes).for_each(|v| is_static[v.index()] = false);
    for v in graph.values() {
        is_static[v.index()] &= graph.node(v).inputs.iter().all(|i| is_static[i.index()]);
    }
    is_static
}

/// A group of one node.
fn single(graph: &Graph, value: ValueId) -> Group {
    let node = graph.node(value);
    let kind = match &node.op {
        Op::Input { .. } | Op::Parameter { .. } | Op::Constant { .. } => GroupKind::Source,
        op if op.is_view() => GroupKind::View,
        op if op.is_pointwise() => GroupKind::Loop,
        op if op.is_contraction() => GroupKind::Contraction,
        Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax { .. } => GroupKind::Norm,
        _ => GroupKind::Direct,
    };
    let body = if kind == GroupKind::Loop { pointwise_body(graph, value) } else { Body::default() };
    Group { kind, root: (kind != GroupKind::Loop).then_some(value), nodes: vec![value], body }
}

fn pointwise_body(graph: &Graph, value: ValueId) -> Body {
    let node = graph.node(value);
    let mut instrs: Vec<Instr> = node.inputs.iter().map(|&i| Instr::Load(i)).collect();
    match node.op {
        Op::Unary(op) => instrs.push(Instr::Unary(op, Reg(0))),
        Op::Binary(op) => instrs.push(Instr::Binary(op, Reg(0), Reg(1))),
        Op::Where => instrs.push(Instr::Where(Reg(0), Reg(1), Reg(2))),
        _ => instrs.push(Instr::Round(node.ty.dtype, Reg(0))),
    }
    let last = Reg(instrs.len() as u32 - 1);
    Body { space: node.ty.shape.clone(), instrs, stores: vec![(last, value)] }
}

type Links = (Vec<Option<usize>>, Vec<Vec<usize>>);

fn links(graph: &Graph, groups: &[Planned]) -> Result<Links> {
    let mut maker = vec![None; graph.nodes.len()];
    let mut users = vec![Vec::new(); graph.nodes.len()];
    for (at, planned) in groups.iter().enumerate() {
        for read in planned.group.outside_reads(graph) {
            users[read.index()].push(at);
            if maker[read.index()].is_none() {
                return Err(Error::Verify {
                    pass: "form_groups".to_owned(),
                    what: format!("group {at} reads %{}, which no earlier group computes", read.0),
                });
            }
        }
        planned.group.nodes.iter().for_each(|v| maker[v.index()] = Some(at));
    }
    Ok((maker, users))
}

/// The targets of all values.
pub(super) struct Targets {
    pub wanted: Vec<Option<Access>>,
    /// Where each value would lie without targets: shape and strides matter, the buffer does not.
    plain: Vec<Option<Access>>,
}

/// Decides targets; allocates output buffers (one per output, in order) and the buffers of concatenations.
pub(super) fn decide(ctx: &Context<'_>, buffers: &mut Vec<Buffer>) -> Result<Targets> {
    let mut targets = Targets { wanted: vec![None; ctx.graph.nodes.len()], plain: plain_places(ctx)? };
    for (index, &v) in ctx.graph.outputs.iter().enumerate() {
        let access = allocate(ctx.graph, buffers, v, BufferKind::Output(index as u32));
        if targets.wanted[v.index()].is_none() && accepts(ctx, v) {
            targets.wanted[v.index()] = Some(access);
        }
    }
    for planned in ctx.groups.iter().rev().filter(|p| !p.is_static) {
        match (planned.group.kind, planned.group.root) {
            (GroupKind::View, Some(v)) => targets.pull(ctx, v, buffers),
            (GroupKind::Direct, Some(v)) => {
                if let Op::Cat { dim } = ctx.graph.op(v) {
                    targets.split(ctx, v, *dim, buffers);
                }
            }
            _ => {}
        }
    }
    Ok(targets)
}

/// A new buffer for `value`, dense.
pub(super) fn allocate(graph: &Graph, buffers: &mut Vec<Buffer>, value: ValueId, kind: BufferKind) -> Access {
    let ty = graph.ty(value);
    buffers.push(Buffer { kind, dtype: ty.dtype, numel: ty.numel(), value });
    Access::dense(BufferId(buffers.len() as u32 - 1), ty)
}

fn plain_places(ctx: &Context<'_>) -> Result<Vec<Option<Access>>> {
    let mut plain: Vec<Option<Access>> = vec![None; ctx.graph.nodes.len()];
    for v in ctx.graph.values() {
        let dense = || Access::dense(BufferId(u32::MAX), ctx.graph.ty(v));
        let place = match ctx.viewed(v).and_then(|operand| plain[operand.index()].as_ref()) {
            Some(base) => base.view(ctx.graph.op(v), &ctx.graph.ty(v).shape)?.unwrap_or_else(dense),
            None => dense(),
        };
        plain[v.index()] = Some(place);
    }
    Ok(plain)
}

/// Some step could write `value` into a place it is given.
fn accepts(ctx: &Context<'_>, value: ValueId) -> bool {
    ctx.maker(value).is_some_and(|p| {
        !p.is_static
            && p.group.kind != GroupKind::Source
            && (p.group.kind == GroupKind::View || p.group.results().contains(&value))
    })
}

/// Most columns that a kernel writes or reads one by one, far apart in memory; more of them are copied, since the copy
/// kernel transposes in blocks.
const MAX_STRIDED_COLUMNS: i64 = 32;

/// Neighbouring columns are neighbours in memory, or few, or all the same element.
pub(super) fn has_cheap_columns(access: &Access) -> bool {
    let few = |size: &Dim| size.as_constant().is_some_and(|n| n <= MAX_STRIDED_COLUMNS);
    access.has_unit_columns()
        || access.shape.last().is_some_and(few)
        || access.strides.last().is_some_and(|stride| stride.is(0))
}

/// The producer of `value` can write it at `access`.
fn can_write(producer: &Planned, access: &Access) -> bool {
    if !has_cheap_columns(access) {
        return false;
    }
    match producer.kernel {
        Kernel::Softmax => satisfies(access, Layout::Matrix),
        Kernel::Attention => access.has_unit_columns(),
        Kernel::Copy
        | Kernel::Loop
        | Kernel::Integers
        | Kernel::Linear
        | Kernel::Matmul
        | Kernel::Convolution
        | Kernel::GroupNorm
        | Kernel::LayerNorm
        | Kernel::RmsNorm
        | Kernel::Gather
        | Kernel::Upsample
        | Kernel::Interpolate
        | Kernel::Reduce
        | Kernel::Scan
        | Kernel::Pad
        | Kernel::Interpret => true,
    }
}

impl Targets {
    fn get(&self, value: ValueId) -> Option<&Access> {
        self.wanted[value.index()].as_ref()
    }

    /// Hands the target of a view on to its operand; gives a view that would cost a copy a target of its own if its
    /// producer can write in the order the view wants.
    fn pull(&mut self, ctx: &Context<'_>, v: ValueId, buffers: &mut Vec<Buffer>) {
        let Some(operand) = ctx.viewed(v) else { return };
        if self.get(v).is_none() {
            let dense = Access::dense(BufferId(u32::MAX), ctx.graph.ty(v));
            if !self.costs_copy(ctx, v) || !self.can_pull(ctx, v, &dense) {
                return;
            }
            self.wanted[v.index()] = Some(allocate(ctx.graph, buffers, v, BufferKind::Arena));
        }
        let Some(target) = self.get(v) else { return };
        let inverse = target.invert(ctx.graph.op(v), &ctx.graph.ty(operand).shape);
        if let Some(inverse) = inverse
            && self.can_place(ctx, operand, &inverse, v)
        {
            self.wanted[operand.index()] = Some(inverse);
        }
    }

    /// Without a target, `v` or a reader of it would be copied.
    fn costs_copy(&self, ctx: &Context<'_>, v: ValueId) -> bool {
        let (Some(plain), Some(operand)) = (&self.plain[v.index()], ctx.viewed(v)) else { return false };
        let moves = self.plain[operand.index()]
            .as_ref()
            .is_some_and(|base| matches!(base.view(ctx.graph.op(v), &ctx.graph.ty(v).shape), Ok(None)));
        moves
            || ctx.users[v.index()].iter().map(|&g| &ctx.groups[g]).any(|user| {
                let Some(root) = user.group.root else { return false };
                let inputs = ctx.graph.node(root).inputs.iter().enumerate();
                inputs.filter(|(_, i)| **i == v).any(|(at, _)| !satisfies(plain, operand_layout(user.kernel, at)))
            })
    }

    /// Whether the chain of views behind `v` ends at a producer that can write so that `v` lies at `access`.
    fn can_pull(&self, ctx: &Context<'_>, v: ValueId, access: &Access) -> bool {
        let Some(operand) = ctx.viewed(v) else { return false };
        let Some(inverse) = access.invert(ctx.graph.op(v), &ctx.graph.ty(operand).shape) else { return false };
        self.can_place(ctx, operand, &inverse, v)
    }

    /// Whether `value` may be given the target `access` on behalf of its reader `via`.
    fn can_place(&self, ctx: &Context<'_>, value: ValueId, access: &Access, via: ValueId) -> bool {
        if self.get(value).is_some() || ctx.graph.is_output(value) || !accepts(ctx, value) {
            return false;
        }
        let via_group = ctx.maker[via.index()];
        let alone = ctx.users[value.index()].iter().all(|&g| Some(g) == via_group);
        if !alone && !access.has_unit_columns() {
            return false;
        }
        match ctx.maker(value) {
            Some(p) if p.group.kind == GroupKind::View => self.can_pull(ctx, value, access),
            Some(p) if matches!(p.group.root.map(|r| ctx.graph.op(r)), Some(Op::Cat { .. })) => {
                access.has_unit_columns()
            }
            Some(p) => can_write(p, access),
            None => false,
        }
    }

    /// Gives the operands of a concatenation their slices.
    fn split(&mut self, ctx: &Context<'_>, v: ValueId, dim: usize, buffers: &mut Vec<Buffer>) {
        let whole = match self.get(v) {
            Some(access) => access.clone(),
            None => allocate(ctx.graph, buffers, v, BufferKind::Arena),
        };
        for (operand, slice) in slices(ctx.graph, v, dim, &whole) {
            let once = ctx.graph.node(v).inputs.iter().filter(|&&i| i == operand).count() == 1;
            if once && self.can_place(ctx, operand, &slice, v) {
                self.wanted[operand.index()] = Some(slice);
            }
        }
        self.wanted[v.index()] = Some(whole);
    }
}

/// Operands of a concatenation and their slices of `whole`.
pub(super) fn slices(graph: &Graph, v: ValueId, dim: usize, whole: &Access) -> Vec<(ValueId, Access)> {
    let mut start = Dim::default();
    let inputs = graph.node(v).inputs.iter();
    inputs
        .map(|&operand| {
            let len = &graph.ty(operand).shape[dim];
            let slice = whole.slice(dim, &start, 1, len);
            start = &start + len;
            (operand, slice)
        })
        .collect()
}

/// Whether a place has a layout.
pub(super) fn satisfies(access: &Access, layout: Layout) -> bool {
    match layout {
        Layout::Any => true,
        Layout::UnitColumns => access.has_unit_columns(),
        Layout::Rows => {
            let rank = access.shape.len();
            access.has_unit_columns() && (rank < 3 || access.is_collapsible(1, rank - 1))
        }
        Layout::Matrix => {
            let rank = access.shape.len();
            access.has_unit_columns() && (rank < 3 || access.is_collapsible(0, rank - 1))
        }
    }
}
