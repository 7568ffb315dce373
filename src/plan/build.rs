//! From groups to steps.
//!
//! Groups are visited in order. Each gets the places of its operands (copying one first where its kernel cannot read it
//! as it lies) and of its results ([`place`](super::place) may have found a better one than a buffer of its own).

use std::collections::HashMap;
use std::sync::Arc;

use super::place::{self, Context, Planned, Targets, allocate, satisfies, slices};
use super::{Access, Buffer, BufferId, BufferKind, Pack, PackForm, Plan, PlanOptions, Step, reuse};
use crate::codegen::{TileBody, TileLoad};
use crate::ir::{DType, Dim, Graph, Op, ValueId, ValueType};
use crate::kernel_ir::{Group, GroupKind};
use crate::select::{Kernel, Layout, integer_reads, operand_layout};
use crate::target::{DeviceKind, Target};
use crate::{Error, Result};

/// Plans `groups`, which together compute the outputs of `graph`.
///
/// # Errors
/// If the groups are not in execution order.
pub fn build(graph: Arc<Graph>, groups: Vec<Group>, target: &Target, options: PlanOptions) -> Result<Plan> {
    let mut builder = Builder::new(&graph, groups, target)?;
    for at in 0..builder.ctx.groups.len() {
        builder.emit(at)?;
    }
    let outputs = builder.finish_outputs()?;
    let Builder { buffers, prepare, mut steps, packs, .. } = builder;
    reuse::reuse(&mut steps, &buffers);
    Ok(Plan { graph, target: target.clone(), options, buffers, prepare, steps, packs, outputs })
}

struct Builder<'a> {
    ctx: Arc<Context<'a>>,
    targets: Targets,
    buffers: Vec<Buffer>,
    placed: Vec<Option<Access>>,
    /// Dense copies made for kernels that could not read a value as it lies.
    copies: HashMap<Access, Access>,
    prepare: Vec<Step>,
    steps: Vec<Step>,
    packs: Vec<Pack>,
    pack_index: HashMap<Pack, usize>,
    /// Group norms can read images whose pixels lie side by side.
    reads_planes: bool,
}

impl<'a> Builder<'a> {
    fn new(graph: &'a Graph, groups: Vec<Group>, target: &Target) -> Result<Self> {
        let ctx = Context::new(graph, groups)?;
        let mut buffers = Vec::new();
        let targets = place::decide(&ctx, &mut buffers)?;
        Ok(Self {
            placed: vec![None; graph.nodes.len()],
            ctx: Arc::new(ctx),
            targets,
            buffers,
            copies: HashMap::new(),
            prepare: Vec::new(),
            steps: Vec::new(),
            packs: Vec::new(),
            pack_index: HashMap::new(),
            reads_planes: target.kind == DeviceKind::Cpu,
        })
    }

    fn graph(&self) -> &'a Graph {
        self.ctx.graph
    }

    fn emit(&mut self, at: usize) -> Result<()> {
        let ctx = self.ctx.clone();
        let planned = &ctx.groups[at];
        match (planned.group.kind, planned.group.root) {
            (GroupKind::Source, _) => Ok(()),
            (_, Some(v)) if self.is_made_on_demand(planned, v) => Ok(()),
            (GroupKind::View, Some(v)) => self.emit_view(planned, v),
            (GroupKind::Direct, Some(v)) if matches!(self.graph().op(v), Op::Cat { .. }) => self.emit_cat(planned, v),
            (GroupKind::Direct, Some(v)) if matches!(self.graph().op(v), Op::SliceScatter { .. }) => {
                self.emit_slice_scatter(planned, v)
            }
            (GroupKind::Direct, Some(v)) if matches!(self.graph().op(v), Op::Flip { .. }) => self.emit_flip(planned, v),
            _ => match planned.kernel {
                Kernel::Interpret
                | Kernel::Integers
                | Kernel::Gather
                | Kernel::Upsample
                | Kernel::Interpolate
                | Kernel::Reduce
                | Kernel::Scan
                | Kernel::Pad
                | Kernel::Copy => self.emit_interpreted(planned),
                Kernel::Loop => self.emit_loop(planned),
                Kernel::Linear => self.emit_linear(planned),
                Kernel::Matmul => self.emit_matmul(planned),
                Kernel::Convolution => self.emit_convolution(planned),
                Kernel::GroupNorm => self.emit_group_norm(planned),
                Kernel::LayerNorm | Kernel::RmsNorm => self.emit_row_norm(planned),
                Kernel::Attention | Kernel::Softmax => self.emit_rooted(planned),
            },
        }
    }

    /// Constants and sizes are computed when something other than a tile program reads them; an upsampling that every
    /// reader folds into its convolution never is.
    fn is_made_on_demand(&self, planned: &Planned, v: ValueId) -> bool {
        if planned.group.nodes.len() != 1 {
            return false;
        }
        match self.graph().op(v) {
            Op::Full { .. } | Op::Expand | Op::Reshape if self.graph().as_scalar(v).is_some() => {
                !self.graph().is_output(v)
            }
            Op::UpsampleNearest { .. } => !self.graph().is_output(v) && self.is_folded(v),
            _ => false,
        }
    }

    // -- places --------------------------------------------------------------------------------------------------------

    /// Where `value` lies.
    fn access(&mut self, value: ValueId) -> Result<Access> {
        if let Some(access) = &self.placed[value.index()] {
            return Ok(access.clone());
        }
        let graph = self.graph();
        let kind = match graph.op(value) {
            Op::Input { index } => BufferKind::Input(*index),
            Op::Parameter { index } => BufferKind::Parameter(*index),
            Op::Constant { index } => BufferKind::Constant(*index),
            Op::Full { .. } | Op::UpsampleNearest { .. } | Op::Expand | Op::Reshape => {
                let ctx = self.ctx.clone();
                let planned = ctx.maker(value).filter(|p| self.is_made_on_demand(p, value));
                let planned = planned.ok_or_else(|| self.unplaced(value))?;
                if planned.group.kind == GroupKind::View {
                    self.emit_view(planned, value)?;
                } else {
                    self.emit_interpreted(planned)?;
                }
                return self.placed[value.index()].clone().ok_or_else(|| self.unplaced(value));
            }
            _ => return Err(self.unplaced(value)),
        };
        let access = allocate(graph, &mut self.buffers, value, kind);
        self.placed[value.index()] = Some(access.clone());
        Ok(access)
    }

    fn unplaced(&self, value: ValueId) -> Error {
        Error::Verify {
            pass: "plan".to_owned(),
            what: format!("%{} ({}) is read before it is computed", value.0, self.graph().op(value).name()),
        }
    }

    /// A dense buffer of its own for `value`.
    fn fresh(&mut self, planned: &Planned, value: ValueId) -> Access {
        let kind = if planned.is_static { BufferKind::Derived } else { BufferKind::Arena };
        allocate(self.ctx.graph, &mut self.buffers, value, kind)
    }

    /// The place that `value`, about to be written, gets.
    fn place(&mut self, planned: &Planned, value: ValueId) -> Access {
        let access = match self.targets.wanted[value.index()].clone() {
            Some(access) if !planned.is_static => access,
            _ => self.fresh(planned, value),
        };
        self.placed[value.index()] = Some(access.clone());
        access
    }

    fn push(&mut self, planned: &Planned, step: Step) {
        if planned.is_static { self.prepare.push(step) } else { self.steps.push(step) }
    }

    fn push_copy(&mut self, planned: &Planned, value: ValueId, from: Access, to: Access) {
        if !from.is_same_place(&to) {
            let step = Step { operands: vec![from], stores: vec![to], ..blank(Kernel::Copy, value) };
            self.push(planned, step);
        }
    }

    /// `access` itself if it has `layout`, else a dense copy.
    fn require(&mut self, planned: &Planned, value: ValueId, access: Access, layout: Layout) -> Access {
        if satisfies(&access, layout) {
            return access;
        }
        if let Some(copy) = self.copies.get(&access) {
            return copy.clone();
        }
        let kind = if planned.is_static { BufferKind::Derived } else { BufferKind::Arena };
        let numel = Dim::product(&access.shape);
        self.buffers.push(Buffer { kind, dtype: access.dtype, numel, value });
        let copy = Access {
            buffer: BufferId(self.buffers.len() as u32 - 1),
            strides: super::access::dense_strides(&access.shape),
            offset: Dim::default(),
            ..access.clone()
        };
        self.push_copy(planned, value, access.clone(), copy.clone());
        self.copies.insert(access, copy.clone());
        copy
    }

    /// A mask that is added, with keys that are neighbours; what is broadcast stays so. Our kernels read it faster (T5's bias over
    /// 512 tokens, Zen 4: attention takes 0.6 of the time), and cuDNN 9.26 has no engine for another one.
    fn with_neighbouring_keys(&mut self, planned: &Planned, value: ValueId, mask: Access) -> Access {
        let mut own = mask.clone();
        for (size, stride) in own.shape.iter_mut().zip(&own.strides) {
            if stride.is(0) {
                *size = Dim::constant(1);
            }
        }
        let copy = self.require(planned, value, own, Layout::UnitColumns);
        let strides = mask.strides.iter().zip(&copy.strides);
        let strides = strides.map(|(before, now)| if before.is(0) { before } else { now }.clone()).collect();
        Access { shape: mask.shape, strides, ..copy }
    }

    /// Whether nothing but weights is behind a place.
    fn is_static(&self, access: &Access) -> bool {
        matches!(
            self.buffers[access.buffer.index()].kind,
            BufferKind::Parameter(_) | BufferKind::Constant(_) | BufferKind::Derived
        )
    }

    fn pack(&mut self, source: Access, form: PackForm) -> usize {
        let pack = Pack { source, form };
        if let Some(&at) = self.pack_index.get(&pack) {
            return at;
        }
        self.packs.push(pack.clone());
        self.pack_index.insert(pack, self.packs.len() - 1);
        self.packs.len() - 1
    }

    // -- steps ---------------------------------------------------------------------------------------------------------

    fn emit_view(&mut self, planned: &Planned, v: ValueId) -> Result<()> {
        let graph = self.graph();
        let operand = graph.node(v).inputs[0];
        let (op, shape) = (graph.op(v), &graph.ty(v).shape);
        let base = self.access(operand)?;
        let view = base.view(op, shape)?;
        let target = self.targets.wanted[v.index()].clone().filter(|_| !planned.is_static);
        let place = match (view, target) {
            (Some(view), None) => view,
            (_, Some(target)) if target.invert(op, &base.shape).is_some_and(|b| b.is_same_place(&base)) => target,
            (Some(view), Some(target)) => {
                self.push_copy(planned, v, view, target.clone());
                target
            }
            (None, target) => {
                let target = target.unwrap_or_else(|| self.fresh(planned, v));
                self.copy_reshaped(planned, v, base, &target);
                target
            }
        };
        self.placed[v.index()] = Some(place);
        Ok(())
    }

    /// Copies `base` to where `target`, a reshape of it, lies; through a dense buffer if it must be.
    fn copy_reshaped(&mut self, planned: &Planned, v: ValueId, base: Access, target: &Access) {
        if let Some(to) = target.reshape(&base.shape) {
            self.push_copy(planned, v, base, to);
            return;
        }
        let middle = self.fresh(planned, v);
        if let Some(to) = middle.reshape(&base.shape) {
            self.push_copy(planned, v, base, to);
        }
        self.push_copy(planned, v, middle, target.clone());
    }

    fn emit_cat(&mut self, planned: &Planned, v: ValueId) -> Result<()> {
        let Op::Cat { dim } = self.graph().op(v) else { return Err(self.unplaced(v)) };
        let whole = self.place(planned, v);
        for (operand, slice) in slices(self.graph(), v, *dim, &whole) {
            let from = self.access(operand)?;
            self.push_copy(planned, v, from, slice);
        }
        Ok(())
    }

    fn emit_slice_scatter(&mut self, planned: &Planned, v: ValueId) -> Result<()> {
        let node = self.graph().node(v);
        let Op::SliceScatter { dim, start, step } = &node.op else { return Err(self.unplaced(v)) };
        let (base, source) = (self.access(node.inputs[0])?, self.access(node.inputs[1])?);
        let whole = self.place(planned, v);
        let slice = whole.slice(*dim, start, *step, &source.shape[*dim]);
        self.push_copy(planned, v, base, whole);
        self.push_copy(planned, v, source, slice);
        Ok(())
    }

    fn emit_flip(&mut self, planned: &Planned, v: ValueId) -> Result<()> {
        let node = self.graph().node(v);
        let Op::Flip { dims } = &node.op else { return Err(self.unplaced(v)) };
        let mut from = self.access(node.inputs[0])?;
        for &dim in dims {
            let last = &from.shape[dim] - &Dim::constant(1);
            from.offset = &from.offset + &(&last * &from.strides[dim]);
            from.strides[dim] = &Dim::default() - &from.strides[dim];
        }
        let to = self.place(planned, v);
        self.push_copy(planned, v, from, to);
        Ok(())
    }

    fn emit_interpreted(&mut self, planned: &Planned) -> Result<()> {
        let values = match planned.kernel {
            Kernel::Integers => integer_reads(self.graph(), &planned.group),
            _ => planned.group.outside_reads(self.graph()),
        };
        let operands = values.iter().map(|&v| self.access(v)).collect::<Result<Vec<_>>>()?;
        let results = planned.group.results();
        let stores = results.iter().map(|&v| self.place(planned, v)).collect();
        let value = planned.group.root.unwrap_or(results[0]);
        let step = Step {
            root: planned.group.root,
            operands,
            values,
            nodes: planned.group.nodes.clone(),
            stores,
            results,
            ..blank(planned.kernel, value)
        };
        self.push(planned, step);
        Ok(())
    }

    /// The body of a group; every kernel but the interpreter has one.
    fn body(planned: &Planned) -> Result<Arc<TileBody>> {
        planned.body.clone().ok_or_else(|| Error::Verify {
            pass: "plan".to_owned(),
            what: "a group without a tile program got a kernel that needs one".to_owned(),
        })
    }

    /// A step with the group's body over `space`, which is the graph's shape with its dimensions in the given order.
    /// `special` are the places of what only a kernel provides.
    fn with_body(&mut self, planned: &Planned, shape: &[Dim], order: &[usize], special: &Special) -> Result<Step> {
        let body = Self::body(planned)?;
        let space: Vec<Dim> = order.iter().map(|&d| shape[d].clone()).collect();
        let mut loads = Vec::with_capacity(body.loads.len());
        for load in &body.loads {
            loads.push(match load {
                TileLoad::Value(v) => self.load(planned, *v, shape, order)?,
                TileLoad::Column(v) => self.access(*v)?.expand(&space),
                TileLoad::Root | TileLoad::Scale | TileLoad::Shift => special.get(*load)?,
            });
        }
        let stores = body.stores.iter().map(|&v| self.place(planned, v).permute(order)).collect();
        let value = planned.group.root.unwrap_or(body.stores[0]);
        let flops = &Dim::product(&space) * &Dim::constant(body.program.instrs.len() as i64);
        Ok(Step {
            root: planned.group.root,
            space,
            loads,
            stores,
            flops,
            body: Some(body),
            ..blank(planned.kernel, value)
        })
    }

    /// The place of a value that a body loads; of a copy of it where its columns lie far apart.
    fn load(&mut self, planned: &Planned, v: ValueId, shape: &[Dim], order: &[usize]) -> Result<Access> {
        let own = self.access(v)?;
        let wide = own.expand(shape).permute(order);
        if place::has_cheap_columns(&wide) || own.shape.len() != shape.len() {
            return Ok(wide);
        }
        let space: Vec<Dim> = order.iter().map(|&d| shape[d].clone()).collect();
        Ok(self.require(planned, v, own.permute(order), Layout::UnitColumns).expand(&space))
    }

    /// [`Builder::with_body`] in the graph's own order of dimensions.
    fn with_plain_body(&mut self, planned: &Planned, shape: &[Dim]) -> Result<Step> {
        let order: Vec<usize> = (0..shape.len()).collect();
        self.with_body(planned, shape, &order, &Special::default())
    }

    fn emit_loop(&mut self, planned: &Planned) -> Result<()> {
        let step = self.with_plain_body(planned, &planned.group.body.space)?;
        self.push(planned, step);
        Ok(())
    }

    fn root<'b>(&self, planned: &'b Planned) -> Result<(ValueId, &'a crate::ir::Node)> {
        let root = planned.group.root.ok_or_else(|| Error::Verify {
            pass: "plan".to_owned(),
            what: "a contraction or norm group has no root".to_owned(),
        })?;
        Ok((root, self.graph().node(root)))
    }

    /// Softmax and attention: a kernel that writes its root, and a loop over that if there is more to the body.
    fn emit_rooted(&mut self, planned: &Planned) -> Result<()> {
        let (root, node) = self.root(planned)?;
        let mut operands = Vec::with_capacity(node.inputs.len());
        for (at, &v) in node.inputs.iter().enumerate() {
            let access = self.access(v)?;
            let is_added = planned.kernel == Kernel::Attention && at == 3 && access.dtype != DType::Bool;
            operands.push(match is_added {
                true => self.with_neighbouring_keys(planned, v, access),
                false => self.require(planned, v, access, operand_layout(planned.kernel, at)),
            });
        }
        let flops = match operands.as_slice() {
            [q, k, v, ..] => {
                let products = &Dim::product(&q.shape) * &k.shape[k.shape.len() - 2];
                let weighted = &node.ty.numel() * &v.shape[v.shape.len() - 2];
                &(&products + &weighted) * &Dim::constant(2)
            }
            _ => &node.ty.numel() * &Dim::constant(4),
        };
        let body = Self::body(planned)?;
        if body.stores == [root] && body.program.instrs.len() == 2 {
            let stores = vec![self.place(planned, root)];
            self.push_rooted(planned, root, operands, stores, flops);
            return Ok(());
        }
        let result = self.workspace(root, DType::F32, &node.ty.shape);
        self.push_rooted(planned, root, operands, vec![result.clone()], flops);
        let order: Vec<usize> = (0..node.ty.rank()).collect();
        let special = Special { root: Some(result), ..Special::default() };
        let step = self.with_body(planned, &node.ty.shape, &order, &special)?;
        self.push(planned, Step { kernel: Kernel::Loop, ..step });
        Ok(())
    }

    fn push_rooted(
        &mut self,
        planned: &Planned,
        root: ValueId,
        operands: Vec<Access>,
        stores: Vec<Access>,
        flops: Dim,
    ) {
        let step = Step {
            root: Some(root),
            operands,
            values: self.graph().node(root).inputs.clone(),
            nodes: vec![root],
            stores,
            results: vec![root],
            flops,
            ..blank(planned.kernel, root)
        };
        self.push(planned, step);
    }

    /// A dense arena buffer that holds no value of the graph.
    fn workspace(&mut self, value: ValueId, dtype: DType, shape: &[Dim]) -> Access {
        let ty = ValueType::new(dtype, shape.to_vec());
        self.buffers.push(Buffer { kind: BufferKind::Arena, dtype, numel: ty.numel(), value });
        Access::dense(BufferId(self.buffers.len() as u32 - 1), &ty)
    }

    /// Statistics become one scale and one shift per image and channel, which the body applies.
    fn emit_group_norm(&mut self, planned: &Planned) -> Result<()> {
        let (root, node) = self.root(planned)?;
        let Op::GroupNorm { channel_dim, .. } = node.op else { return Err(self.unplaced(root)) };
        let rank = node.ty.rank();
        let mut last: Vec<usize> = (0..rank).filter(|&d| d != channel_dim).collect();
        last.push(channel_dim);
        let x = self.access(node.inputs[0])?;
        // Where pixels lie side by side, and those of results do, the body walks along them, and nothing moves.
        let is_planar = self.reads_planes
            && channel_dim == 1
            && x.collapse(2, rank).is_some_and(|(pixels, stride)| pixels.is(1) || stride.is(1))
            && self.keeps_columns(planned);
        let order = if is_planar { (0..rank).collect() } else { last.clone() };
        let (x, load) = if is_planar {
            (x.permute(&last), x)
        } else {
            let x = self.require(planned, node.inputs[0], x.permute(&last), Layout::Rows);
            (x.clone(), x)
        };
        let per_image = [node.ty.shape[0].clone(), node.ty.shape[channel_dim].clone()];
        let (scale, shift) =
            (self.workspace(root, DType::F32, &per_image), self.workspace(root, DType::F32, &per_image));
        let over = |access: &Access| Access {
            shape: order.iter().map(|&d| node.ty.shape[d].clone()).collect(),
            strides: order
                .iter()
                .map(|&d| match d {
                    0 => access.strides[0].clone(),
                    _ if d == channel_dim => access.strides[1].clone(),
                    _ => Dim::default(),
                })
                .collect(),
            ..access.clone()
        };
        let special = Special { scale: Some(over(&scale)), shift: Some(over(&shift)), root: None };
        let mut step = self.with_body(planned, &node.ty.shape, &order, &special)?;
        // The program reads x where the statistics do.
        if let Some(at) =
            planned.body.as_ref().and_then(|b| b.loads.iter().position(|l| *l == TileLoad::Value(node.inputs[0])))
        {
            step.loads[at] = load;
        }
        step.operands = vec![x];
        for &v in &node.inputs[1..] {
            let vector = self.access(v)?;
            step.operands.push(self.require(planned, v, vector, Layout::UnitColumns));
        }
        step.scratch = vec![scale, shift];
        self.push(planned, step);
        Ok(())
    }

    /// Whether neighbours along the last dimension of all results are neighbours in memory.
    fn keeps_columns(&self, planned: &Planned) -> bool {
        let wanted = |v: &ValueId| self.targets.wanted[v.index()].as_ref();
        let stores = planned.body.iter().flat_map(|body| &body.stores);
        stores.filter_map(wanted).all(Access::has_unit_columns)
    }

    fn emit_row_norm(&mut self, planned: &Planned) -> Result<()> {
        let (_, node) = self.root(planned)?;
        let x = self.access(node.inputs[0])?;
        let x = self.require(planned, node.inputs[0], x, Layout::UnitColumns);
        let mut step = self.with_plain_body(planned, &node.ty.shape)?;
        if let Some(at) =
            planned.body.as_ref().and_then(|b| b.loads.iter().position(|l| *l == TileLoad::Value(node.inputs[0])))
        {
            step.loads[at] = x.clone();
        }
        step.operands = vec![x];
        self.push(planned, step);
        Ok(())
    }

    fn emit_linear(&mut self, planned: &Planned) -> Result<()> {
        let (_, node) = self.root(planned)?;
        let x = self.access(node.inputs[0])?;
        let x = self.require(planned, node.inputs[0], x, Layout::Rows);
        let weight = self.access(node.inputs[1])?;
        self.push_linear(planned, node.ty.shape.clone(), x, weight)
    }

    fn push_linear(&mut self, planned: &Planned, space: Vec<Dim>, x: Access, weight: Access) -> Result<()> {
        let mut step = self.with_plain_body(planned, &space)?;
        step.kernel = Kernel::Linear;
        step.flops = &(&Dim::product(&space) * &weight.shape[1]) * &Dim::constant(2);
        if self.is_static(&weight) {
            step.pack = Some(self.pack(weight.clone(), PackForm::Matrix));
        }
        step.operands = vec![x, weight];
        self.push(planned, step);
        Ok(())
    }

    fn emit_matmul(&mut self, planned: &Planned) -> Result<()> {
        let (_, node) = self.root(planned)?;
        let (a, b) = (self.access(node.inputs[0])?, self.access(node.inputs[1])?);
        if b.shape.len() == 2 && a.shape.len() >= 2 && self.is_static(&b) {
            let x = self.require(planned, node.inputs[0], a, Layout::Rows);
            return self.push_linear(planned, node.ty.shape.clone(), x, b.permute(&[1, 0]));
        }
        let a = self.require(planned, node.inputs[0], a, Layout::UnitColumns);
        let mut step = self.with_plain_body(planned, &node.ty.shape)?;
        step.flops = &(&Dim::product(&node.ty.shape) * &a.shape[a.shape.len() - 1]) * &Dim::constant(2);
        step.operands = vec![a, b];
        self.push(planned, step);
        Ok(())
    }

    fn emit_convolution(&mut self, planned: &Planned) -> Result<()> {
        let (_, node) = self.root(planned)?;
        let Op::Convolution { stride, groups, channels_last, .. } = &node.op else {
            return Err(self.unplaced(node.inputs[0]));
        };
        let (mut input, mut upsample) = (node.inputs[0], Vec::new());
        if let Some((from, factors)) = self.foldable(input).filter(|_| self.is_folded(input)) {
            (input, upsample) = (from, factors);
        }
        let spatial = stride.len();
        // Channels last: batch, spatial dimensions, channels.
        let order: Vec<usize> = match channels_last {
            true => (0..spatial + 2).collect(),
            false => [0].into_iter().chain(2..spatial + 2).chain([1]).collect(),
        };
        let x = self.access(input)?.permute(&order);
        let x = self.require(planned, input, x, Layout::UnitColumns);
        let weight = self.access(node.inputs[1])?;
        let mut step = self.with_body(planned, &node.ty.shape, &order, &Special::default())?;
        let terms = Dim::product(&weight.shape[1..]);
        step.flops = &(&node.ty.numel() * &terms) * &Dim::constant(2);
        if self.is_static(&weight) {
            let groups =
                usize::try_from(*groups).map_err(|_| Error::invalid("groups of a convolution are negative"))?;
            step.pack = Some(self.pack(weight.clone(), PackForm::Convolution { groups }));
        }
        step.operands = vec![x, weight];
        step.upsample = upsample;
        self.push(planned, step);
        Ok(())
    }

    /// Operand and whole factors of an upsampling that a convolution can read through.
    fn foldable(&self, v: ValueId) -> Option<(ValueId, Vec<usize>)> {
        let graph = self.graph();
        let node = graph.node(v);
        let Op::UpsampleNearest { first_dim, scales, .. } = &node.op else { return None };
        let operand = node.inputs[0];
        let mut factors = Vec::with_capacity(scales.len());
        for (at, &scale) in scales.iter().enumerate() {
            let dim = first_dim + at;
            // Powers of two: the source index is exact in f32.
            let fits = |f: &i64| node.ty.shape[dim] == &graph.ty(operand).shape[dim] * &Dim::constant(*f);
            let factor = [1i64, 2, 4, 8].into_iter().find(fits)?;
            if scale > 0.0 && scale != factor as f64 {
                return None;
            }
            factors.push(factor as usize);
        }
        Some((operand, factors))
    }

    /// Every reader of the upsampling `v` is a convolution over exactly its dimensions.
    fn is_folded(&self, v: ValueId) -> bool {
        let graph = self.graph();
        let Op::UpsampleNearest { first_dim, scales, .. } = graph.op(v) else { return false };
        let users = &self.ctx.users[v.index()];
        let reads_it = |g: &usize| {
            let user = &self.ctx.groups[*g];
            let Some(root) = user.group.root.filter(|_| user.kernel == Kernel::Convolution) else { return false };
            let Op::Convolution { stride, channels_last, .. } = graph.op(root) else { return false };
            let first_spatial = if *channels_last { 1 } else { 2 };
            let only_input = user.group.outside_reads(graph).iter().filter(|&&r| r == v).count() == 1
                && graph.node(root).inputs[0] == v
                && user.body.as_ref().is_some_and(|b| !b.loads.contains(&TileLoad::Value(v)));
            stride.len() == scales.len() && first_spatial == *first_dim && only_input
        };
        !users.is_empty() && self.foldable(v).is_some() && users.iter().all(reads_it)
    }

    /// Copies results that did not land in the caller's memory.
    fn finish_outputs(&mut self) -> Result<Vec<BufferId>> {
        let graph = self.graph();
        let mut ids = vec![BufferId(0); graph.outputs.len()];
        for (at, buffer) in self.buffers.iter().enumerate() {
            if let BufferKind::Output(index) = buffer.kind {
                ids[index as usize] = BufferId(at as u32);
            }
        }
        for (&v, &id) in graph.outputs.iter().zip(&ids) {
            let (from, to) = (self.access(v)?, Access::dense(id, graph.ty(v)));
            if !from.is_same_place(&to) {
                self.steps.push(Step { operands: vec![from], stores: vec![to], ..blank(Kernel::Copy, v) });
            }
        }
        Ok(ids)
    }
}

/// Places of what a kernel makes for its own body.
#[derive(Default)]
struct Special {
    root: Option<Access>,
    scale: Option<Access>,
    shift: Option<Access>,
}

impl Special {
    fn get(&self, load: TileLoad) -> Result<Access> {
        let place = match load {
            TileLoad::Root => &self.root,
            TileLoad::Scale => &self.scale,
            TileLoad::Shift => &self.shift,
            TileLoad::Value(_) | TileLoad::Column(_) => &None,
        };
        place.clone().ok_or_else(|| Error::Verify {
            pass: "plan".to_owned(),
            what: format!("a body loads {load:?}, which its kernel does not provide"),
        })
    }
}

fn blank(kernel: Kernel, value: ValueId) -> Step {
    Step {
        kernel,
        root: None,
        operands: Vec::new(),
        values: Vec::new(),
        nodes: Vec::new(),
        body: None,
        space: Vec::new(),
        loads: Vec::new(),
        stores: Vec::new(),
        results: Vec::new(),
        scratch: Vec::new(),
        pack: None,
        upsample: Vec::new(),
        flops: Dim::default(),
        value,
    }
}
