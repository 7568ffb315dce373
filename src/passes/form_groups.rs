//! Decides which nodes become one kernel.
//!
//! *What:* every node ends in exactly one [`Group`]. Sources, views and what is kept with the weights are set aside; each
//! contraction and norm takes the pointwise work behind it as its epilogue; what is left of the pointwise work becomes
//! loops, as large as they get. *Why faster:* a value that stays in registers is neither written nor read; at 16 bits a
//! pointwise op costs as much as a tenth of the contraction before it. *Requires:* canonical form; layout and views
//! settled, since only values of exactly the root's shape are fused. *Guarantees:* the list is in an executable order;
//! what [`kernel_ir::verify`](crate::kernel_ir::verify) checks.
//!
//! ```text
//! %3: f16[2,64,320] = linear(%0, %1, %2)          @g0 contraction %3 {
//! %4: f16[2,64,320] = silu(%3)               ->     r0 = root; r1 = silu r0; r2 = load %5; r3 = add r1 r2
//! %6: f16[2,64,320] = add(%4, %5)                   store %6 = r3 }
//! ```
//!
//! **Order.** Each group has a *position*, the index of one of its nodes, and runs after every group with a smaller one.
//! A node joins a group in place if its other operands are computed at smaller positions; else the group moves to the
//! node's own position, which is allowed while nothing outside uses its values yet. Both keep every edge pointing from a
//! smaller to a larger position, so there is never a cycle to look for, and the pass is linear.
//!
//! **Computed again or kept.** What is broadcast to a group (a projected embedding, say) can be computed there, for every
//! element that it reaches, or by a loop of its own that writes it once. Few simple ops hide behind the group's memory
//! traffic on every device. For others the device's [`Profile`] decides: a card with arithmetic to spare saves the launch,
//! one that is short of bandwidth the bytes, a processor keeps the loop.
//!
//! A scalar [`full`](Op::Full) becomes a constant of every body that reads it; its own group then has nothing to do.

use crate::analysis::{ComputeClass, kept_values, node_class};
use crate::error::Result;
use crate::ir::{BinaryOp, DType, Dim, Graph, Op, UnaryOp, ValueId};
use crate::kernel_ir::{Body, Group, GroupKind, Instr, Reg};
use crate::target::Profile;

use super::{PassCtx, Precision};

/// Most nodes of a body: keeps the registers that are alive at once far below a tile program's limit.
const MAX_BODY_NODES: usize = 32;
/// Most values that a body reads.
const MAX_LOADS: usize = 12;
/// Most values that a body writes.
const MAX_STORES: usize = 4;

/// The groups of `graph` in an executable order.
///
/// # Errors
/// None today; passes share one signature.
pub fn form_groups(graph: &Graph, ctx: &PassCtx) -> Result<Vec<Group>> {
    form_groups_for(graph, ctx, &Profile::CPU)
}

/// The same with the choices that suit a device.
///
/// # Errors
/// As [`form_groups`].
pub fn form_groups_for(graph: &Graph, ctx: &PassCtx, device: &Profile) -> Result<Vec<Group>> {
    let mut former = Former::new(graph, device, ctx);
    for v in graph.values() {
        former.place(v);
    }
    Ok(former.finish(ctx.precision))
}

/// A group while it grows.
struct Draft {
    kind: GroupKind,
    root: Option<ValueId>,
    nodes: Vec<ValueId>,
    /// `None` for groups that take no pointwise work.
    class: Option<ComputeClass>,
    /// Everything that must run before has a smaller position; -1 runs before everything.
    position: i64,
}

struct Former<'g> {
    graph: &'g Graph,
    device: &'g Profile,
    /// Sizes that were traced, to compare costs at.
    sizes: Vec<i64>,
    users: Vec<Vec<ValueId>>,
    rotates_pairs: bool,
    is_output: Vec<bool>,
    is_weight: Vec<bool>,
    group_of: Vec<Option<usize>>,
    drafts: Vec<Draft>,
}

fn is_body_kind(kind: GroupKind) -> bool {
    matches!(kind, GroupKind::Contraction | GroupKind::Norm | GroupKind::Loop)
}

impl<'g> Former<'g> {
    fn new(graph: &'g Graph, device: &'g Profile, ctx: &PassCtx) -> Self {
        let mut is_output = vec![false; graph.nodes.len()];
        graph.outputs.iter().for_each(|o| is_output[o.index()] = true);
        Self {
            graph,
            device,
            sizes: graph.sample_bindings().into_iter().next().unwrap_or_default(),
            users: graph.users(),
            rotates_pairs: ctx.rotates_pairs,
            is_output,
            is_weight: kept_values(graph, ctx.kept_bytes),
            group_of: vec![None; graph.nodes.len()],
            drafts: Vec::new(),
        }
    }

    fn start(&mut self, kind: GroupKind, root: Option<ValueId>, node: ValueId, class: Option<ComputeClass>) -> usize {
        let early = self.graph.node(node).inputs.is_empty() || kind == GroupKind::Weight;
        let position = if early { -1 } else { i64::from(node.0) };
        self.drafts.push(Draft { kind, root, nodes: vec![node], class, position });
        self.group_of[node.index()] = Some(self.drafts.len() - 1);
        self.drafts.len() - 1
    }

    fn place(&mut self, v: ValueId) {
        let op = self.graph.op(v);
        let dtype = self.graph.ty(v).dtype;
        let epilogue = (ComputeClass::of(dtype) == ComputeClass::F32).then_some(ComputeClass::F32);
        match op {
            Op::Input { .. } | Op::Parameter { .. } | Op::Constant { .. } => {
                self.start(GroupKind::Source, Some(v), v, None);
            }
            Op::Full { .. } => self.place_full(v),
            _ if op.is_view() => {
                self.start(GroupKind::View, Some(v), v, None);
            }
            _ if self.is_weight[v.index()] => {
                self.start(GroupKind::Weight, Some(v), v, None);
            }
            _ if op.is_pointwise() => self.place_pointwise(v),
            Op::Unary(UnaryOp::RotatePairs) if self.rotates_pairs => self.place_pointwise(v),
            Op::ScaledDotProductAttention { .. } => {
                self.start(GroupKind::Contraction, Some(v), v, None);
            }
            Op::Linear | Op::Matmul | Op::Convolution { .. } => {
                self.start(GroupKind::Contraction, Some(v), v, epilogue);
            }
            Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax { .. } => {
                self.start(GroupKind::Norm, Some(v), v, epilogue);
            }
            _ => {
                self.start(GroupKind::Direct, Some(v), v, None);
            }
        }
    }

    /// A constant of bodies needs no memory; one that something else reads does.
    fn place_full(&mut self, v: ValueId) {
        let folds = |u: &ValueId| self.graph.op(*u).is_pointwise() && !self.is_weight[u.index()];
        if !self.is_output[v.index()] && self.users[v.index()].iter().all(folds) {
            self.start(GroupKind::Source, Some(v), v, None);
        } else if self.is_weight[v.index()] {
            self.start(GroupKind::Weight, Some(v), v, None);
        } else {
            let class = ComputeClass::of(self.graph.ty(v).dtype);
            self.start(GroupKind::Loop, None, v, Some(class));
        }
    }

    fn place_pointwise(&mut self, v: ValueId) {
        let class = node_class(self.graph, v);
        let joined = self.best_host(v, class).filter(|&g| self.join(g, v));
        let group = joined.unwrap_or_else(|| self.start(GroupKind::Loop, None, v, Some(class)));
        for i in 0..self.graph.node(v).inputs.len() {
            if let Some(other) = self.group_of[self.graph.node(v).inputs[i].index()].filter(|&o| o != group) {
                self.absorb(group, other);
            }
        }
    }

    /// The group that `v` would rather be part of: a contraction or norm before a loop, the latest before the others, so
    /// that what the others compute is there already.
    fn best_host(&self, v: ValueId, class: ComputeClass) -> Option<usize> {
        let hosts = self.graph.node(v).inputs.iter().filter_map(|i| self.group_of[i.index()]);
        let fits = |&g: &usize| {
            let d = &self.drafts[g];
            d.class == Some(class)
                && is_body_kind(d.kind)
                && (self.graph.op(v).is_pointwise() || self.has_rows(g))
                && self.space(g) == self.graph.ty(v).shape
                && self.has_room(g, 1)
        };
        hosts.filter(fits).max_by_key(|&g| (self.drafts[g].root.is_some(), self.drafts[g].position))
    }

    /// Whether kernels of a draft have all neighbours of a row at hand, so that they can rotate pairs of them.
    fn has_rows(&self, g: usize) -> bool {
        let d = &self.drafts[g];
        let is_row_norm =
            |op: &Op| matches!(op, Op::LayerNorm { normalized_ndim: 1, .. } | Op::RmsNorm { normalized_ndim: 1, .. });
        d.kind == GroupKind::Loop || d.root.is_some_and(|root| is_row_norm(self.graph.op(root)))
    }

    fn rotates(&self, g: usize) -> bool {
        self.drafts[g].nodes.iter().any(|n| *self.graph.op(*n) == Op::Unary(UnaryOp::RotatePairs))
    }

    /// The iteration space of a draft: its last node is never one that was absorbed at a smaller shape.
    fn space(&self, g: usize) -> &'g [Dim] {
        let d = &self.drafts[g];
        let node = d.root.or(d.nodes.last().copied());
        node.map_or(&[], |n| self.graph.ty(n).shape.as_slice())
    }

    fn has_room(&self, g: usize, more: usize) -> bool {
        let nodes = &self.drafts[g].nodes;
        nodes.len() + more <= MAX_BODY_NODES
            && self.count_loads(g) + more <= MAX_LOADS
            && self.count_stores(g) < MAX_STORES
    }

    fn count_loads(&self, g: usize) -> usize {
        let d = &self.drafts[g];
        let body = d.nodes.iter().filter(|n| Some(**n) != d.root);
        let operands = body.flat_map(|n| &self.graph.node(*n).inputs);
        let mut loads: Vec<ValueId> = operands
            .filter(|o| self.group_of[o.index()] != Some(g) && self.graph.as_scalar(**o).is_none())
            .copied()
            .collect();
        loads.sort();
        loads.dedup();
        loads.len()
    }

    fn count_stores(&self, g: usize) -> usize {
        self.drafts[g].nodes.iter().filter(|n| self.is_needed_outside(**n, g)).count().saturating_sub(1)
    }

    /// Whether `g` has to store `v`; a dead value counts, so that every group has a result.
    fn is_needed_outside(&self, v: ValueId, g: usize) -> bool {
        let users = &self.users[v.index()];
        self.is_output[v.index()] || users.is_empty() || users.iter().any(|u| self.group_of[u.index()] != Some(g))
    }

    /// Whether a placed node outside `g` and `also` reads a value of `g`, directly or through views.
    fn has_placed_user(&self, g: usize, also: Option<usize>) -> bool {
        let mut todo: Vec<ValueId> = self.drafts[g].nodes.clone();
        while let Some(v) = todo.pop() {
            for &u in &self.users[v.index()] {
                match self.group_of[u.index()] {
                    None => {}
                    Some(owner) if owner == g || Some(owner) == also => {}
                    Some(owner) if self.drafts[owner].kind == GroupKind::View => todo.push(u),
                    Some(_) => return true,
                }
            }
        }
        false
    }

    /// The position at which `v` can be read: a view's is its operand's.
    fn position(&self, v: ValueId) -> i64 {
        let mut v = v;
        loop {
            match self.group_of[v.index()].map(|g| &self.drafts[g]) {
                Some(d) if d.kind == GroupKind::View => v = self.graph.node(v).inputs[0],
                Some(d) => return d.position,
                None => return i64::from(v.0),
            }
        }
    }

    fn join(&mut self, g: usize, v: ValueId) -> bool {
        let here = self.drafts[g].position;
        let operands = &self.graph.node(v).inputs;
        let in_place = operands.iter().all(|o| self.group_of[o.index()] == Some(g) || self.position(*o) < here);
        // A view of the group's own value would be read while it is being made.
        let reads_own_view = operands
            .iter()
            .any(|o| self.group_of[o.index()] != Some(g) && self.graph.op(*o).is_view() && self.position(*o) == here);
        if reads_own_view || (!in_place && self.has_placed_user(g, None)) {
            return false;
        }
        if !in_place {
            self.drafts[g].position = i64::from(v.0);
        }
        self.drafts[g].nodes.push(v);
        self.group_of[v.index()] = Some(g);
        true
    }

    /// Merges loop `other`, whose value `host` reads, into `host` where that saves memory traffic.
    fn absorb(&mut self, host: usize, other: usize) {
        let (h, o) = (&self.drafts[host], &self.drafts[other]);
        let legal = o.kind == GroupKind::Loop
            && o.class == h.class
            && o.position < h.position
            && o.position >= 0
            && h.nodes.len() + o.nodes.len() <= MAX_BODY_NODES
            && self.count_loads(host) + self.count_loads(other) <= MAX_LOADS;
        if !legal || self.has_placed_user(other, Some(host)) || self.reads_from_memory(host, other) {
            return;
        }
        let same_space = self.space(host) == self.space(other);
        if self.rotates(other) && !(same_space && self.has_rows(host)) {
            return;
        }
        // A dead value is stored by its group, and so has to fit into that.
        let leaves = |n: &ValueId| {
            self.is_output[n.index()]
                || self.users[n.index()].is_empty()
                || self.users[n.index()]
                    .iter()
                    .any(|u| self.group_of[u.index()] != Some(host) && self.group_of[u.index()] != Some(other))
        };
        let escapes = o.nodes.iter().any(leaves);
        let worth = if same_space {
            h.kind == GroupKind::Loop || !escapes
        } else {
            !escapes && (self.is_cheap(other) || self.is_better_again(host, other))
        };
        if !worth {
            return;
        }
        let nodes = std::mem::take(&mut self.drafts[other].nodes);
        nodes.iter().for_each(|n| self.group_of[n.index()] = Some(host));
        // Absorbed nodes come first, so that the last node keeps the space.
        self.drafts[host].nodes.splice(0..0, nodes);
    }

    /// Whether `host` reads a value of `other` in a way that needs it in memory: as operand of its root, or through a
    /// view.
    fn reads_from_memory(&self, host: usize, other: usize) -> bool {
        let d = &self.drafts[host];
        d.nodes.iter().any(|&n| {
            self.graph.node(n).inputs.iter().any(|&i| {
                let base = self.base(i);
                (base != i || d.root == Some(n)) && self.group_of[base.index()] == Some(other)
            })
        })
    }

    /// The value under views.
    fn base(&self, v: ValueId) -> ValueId {
        let mut v = v;
        while self.graph.op(v).is_view() {
            v = self.graph.node(v).inputs[0];
        }
        v
    }

    /// Cheap enough to be computed again for every element that it is broadcast to.
    fn is_cheap(&self, g: usize) -> bool {
        use BinaryOp::{Add, Maximum, Minimum, Mul, Sub};
        self.drafts[g].nodes.len() <= 3
            && self.drafts[g].nodes.iter().all(|n| {
                matches!(
                    self.graph.op(*n),
                    Op::Convert | Op::Unary(UnaryOp::Neg) | Op::Binary(Add | Sub | Mul | Maximum | Minimum)
                )
            })
    }

    /// Whether computing the values of `other` again for every element of `host` takes this device less than keeping them.
    fn is_better_again(&self, host: usize, other: usize) -> bool {
        let elements = |space: &[Dim]| -> Option<f64> {
            space.iter().map(|d| d.eval(&self.sizes).ok()).try_fold(1.0, |product, d| Some(product * d? as f64))
        };
        let (Some(there), Some(here)) = (elements(self.space(host)), elements(self.space(other))) else { return false };
        let nodes = &self.drafts[other].nodes;
        let operations: f64 = nodes.iter().map(|n| operations_of(self.graph.op(*n))).sum();
        let kept = nodes.iter().filter(|n| self.is_needed_outside(**n, other));
        let bytes: f64 = kept.map(|n| here * self.graph.ty(*n).dtype.size_bytes() as f64).sum();
        let again_s = operations * (there - here) / self.device.f32_flops as f64;
        // Written once and read once.
        let kept_s = self.device.launch_ns as f64 * 1e-9 + 2.0 * bytes / self.device.bandwidth as f64;
        again_s < kept_s
    }

    fn finish(mut self, precision: Precision) -> Vec<Group> {
        self.merge_weights();
        let mut order: Vec<(i64, bool, u32, usize)> = Vec::with_capacity(self.drafts.len());
        for (g, d) in self.drafts.iter().enumerate() {
            let Some(&first) = d.nodes.first() else { continue };
            let is_view = d.kind == GroupKind::View;
            let position = if is_view { self.position(first) } else { d.position };
            // A loop that runs before everything reads nothing but itself; views of its values come after it.
            let is_first = d.kind == GroupKind::Loop && position < 0;
            let last = if is_first { first } else { d.nodes.iter().max().copied().unwrap_or(first) };
            order.push((position, is_view && position >= 0, last.0, g));
        }
        order.sort_unstable();
        order.iter().map(|&(.., g)| self.group(g, precision)).collect()
    }

    /// Lets a weight computation that one other consumes alone be part of that one.
    fn merge_weights(&mut self) {
        for v in self.graph.values().rev() {
            let mine = self.group_of[v.index()];
            let users = &self.users[v.index()];
            let first = users.first().and_then(|u| self.group_of[u.index()]);
            let (Some(mine), Some(target)) = (mine, first) else { continue };
            let movable = matches!(self.drafts[mine].kind, GroupKind::Weight | GroupKind::View)
                && self.drafts[target].kind == GroupKind::Weight
                && self.is_weight[v.index()]
                && !self.is_output[v.index()]
                && users.iter().all(|u| self.group_of[u.index()] == Some(target));
            if movable && mine != target {
                let nodes = std::mem::take(&mut self.drafts[mine].nodes);
                nodes.iter().for_each(|n| self.group_of[n.index()] = Some(target));
                self.drafts[target].nodes.extend(nodes);
            }
        }
    }

    fn group(&self, g: usize, precision: Precision) -> Group {
        let d = &self.drafts[g];
        let mut nodes = d.nodes.clone();
        nodes.sort_unstable();
        let has_body = is_body_kind(d.kind) && (d.root.is_none() || nodes.len() > 1);
        let body = if has_body { self.body(g, &nodes, precision) } else { Body::default() };
        Group { kind: d.kind, root: d.root, nodes, body }
    }

    fn body(&self, g: usize, nodes: &[ValueId], precision: Precision) -> Body {
        let mut writer = BodyWriter {
            graph: self.graph,
            precision,
            class: self.drafts[g].class.unwrap_or(ComputeClass::F32),
            root: self.drafts[g].root,
            members: nodes,
            regs: Vec::new(),
            body: Body { space: self.space(g).to_vec(), ..Body::default() },
        };
        for &n in nodes {
            writer.node(n);
        }
        for &n in nodes.iter().filter(|n| self.is_needed_outside(**n, g)) {
            let reg = writer.operand(n);
            writer.body.stores.push((reg, n));
        }
        writer.body
    }
}

/// Writes the instructions of one group.
struct BodyWriter<'a> {
    graph: &'a Graph,
    precision: Precision,
    class: ComputeClass,
    root: Option<ValueId>,
    /// Sorted.
    members: &'a [ValueId],
    /// Register of each value read or made so far.
    regs: Vec<(ValueId, Reg)>,
    body: Body,
}

impl BodyWriter<'_> {
    fn emit(&mut self, instr: Instr) -> Reg {
        self.body.instrs.push(instr);
        Reg(self.body.instrs.len() as u32 - 1)
    }

    fn node(&mut self, v: ValueId) {
        let node = self.graph.node(v);
        let reg = match &node.op {
            _ if self.root == Some(v) => self.emit(Instr::Root),
            Op::Full { value } => self.emit(Instr::Const(round_constant(*value, node.ty.dtype))),
            Op::Convert => self.convert(v),
            _ => self.arithmetic(v),
        };
        let reg = self.round(reg, v);
        self.regs.push((v, reg));
    }

    fn arithmetic(&mut self, v: ValueId) -> Reg {
        let node = self.graph.node(v);
        let regs: Vec<Reg> = node.inputs.iter().map(|i| self.operand(*i)).collect();
        let is_bool = node.ty.dtype == DType::Bool;
        match (&node.op, regs.as_slice()) {
            (Op::Unary(UnaryOp::BitwiseNot), &[a]) if is_bool => self.emit(Instr::Unary(UnaryOp::LogicalNot, a)),
            (Op::Unary(op), &[a]) => self.emit(Instr::Unary(*op, a)),
            (Op::Binary(op), &[a, b]) => {
                let op = if is_bool { logical(*op) } else { *op };
                self.emit(Instr::Binary(op, a, b))
            }
            (Op::Where, &[c, a, b]) => self.emit(Instr::Where(c, a, b)),
            _ => unreachable!("only pointwise nodes are placed in bodies, and the verifier checked their operands"),
        }
    }

    /// The register of a value: made here, a constant, or loaded.
    fn operand(&mut self, v: ValueId) -> Reg {
        if let Some((_, reg)) = self.regs.iter().find(|(known, _)| *known == v) {
            return *reg;
        }
        let reg = match self.graph.as_scalar(v) {
            Some(value) => self.emit(Instr::Const(round_constant(value, self.graph.ty(v).dtype))),
            None => self.emit(Instr::Load(v)),
        };
        self.regs.push((v, reg));
        reg
    }

    fn convert(&mut self, v: ValueId) -> Reg {
        let node = self.graph.node(v);
        let (from, to) = (self.graph.ty(node.inputs[0]).dtype, node.ty.dtype);
        let a = self.operand(node.inputs[0]);
        if to == DType::Bool && from != DType::Bool {
            let zero = self.emit(Instr::Const(0.0));
            return self.emit(Instr::Binary(BinaryOp::Ne, a, zero));
        }
        match self.class {
            ComputeClass::I64 if from.is_float() || to.size_bytes() < from.size_bytes() => {
                self.emit(Instr::Round(to, a))
            }
            ComputeClass::F64 if to != DType::F64 && self.members.binary_search(&node.inputs[0]).is_ok() => {
                self.emit(Instr::Round(to, a))
            }
            ComputeClass::F32 if to.is_half() && from != to && self.is_compared(v) => self.emit(Instr::Round(to, a)),
            _ => a,
        }
    }

    /// Whether a comparison of this body reads `v`. What one is converted to decides a truth value, which no later rounding
    /// makes up for.
    fn is_compared(&self, v: ValueId) -> bool {
        let compares = |op: &Op| matches!(op, Op::Binary(op) if op.is_predicate());
        self.members.iter().any(|m| compares(self.graph.op(*m)) && self.graph.node(*m).inputs.contains(&v))
    }

    /// Where eager would have rounded to 16 bits; a conversion already did in the other classes.
    fn round(&mut self, reg: Reg, v: ValueId) -> Reg {
        let dtype = self.graph.ty(v).dtype;
        let is_last = !self.members.iter().any(|m| self.graph.node(*m).inputs.contains(&v));
        let is_exact = matches!(self.graph.op(v), Op::Full { .. });
        if self.precision == Precision::Fast || !dtype.is_half() || is_last || is_exact {
            return reg;
        }
        self.emit(Instr::Round(dtype, reg))
    }
}

/// Arithmetic operations of a pointwise op, for each element; functions are polynomials.
fn operations_of(op: &Op) -> f64 {
    use UnaryOp::{Abs, Neg, RotatePairs};
    match op {
        Op::Unary(Abs | Neg | RotatePairs) | Op::Binary(_) | Op::Where | Op::Convert | Op::Full { .. } => 1.0,
        _ => POLYNOMIAL,
    }
}

/// Operations of `exp`, `tanh` and the like: a dozen terms and the reduction of the argument.
const POLYNOMIAL: f64 = 20.0;

/// On truth values the bitwise ops are the logical ones.
fn logical(op: BinaryOp) -> BinaryOp {
    match op {
        BinaryOp::BitwiseAnd | BinaryOp::Mul | BinaryOp::Minimum => BinaryOp::LogicalAnd,
        BinaryOp::BitwiseOr | BinaryOp::Add | BinaryOp::Maximum => BinaryOp::LogicalOr,
        BinaryOp::BitwiseXor => BinaryOp::LogicalXor,
        other => other,
    }
}

/// The value that a `full` of that type holds.
fn round_constant(value: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => value,
        DType::F32 => f64::from(value as f32),
        DType::F16 => half::f16::from_f64(value).to_f64(),
        DType::BF16 => half::bf16::from_f64(value).to_f64(),
        DType::Bool => f64::from(u8::from(value != 0.0)),
        DType::U8 | DType::I8 | DType::I32 | DType::I64 => value.trunc(),
    }
}
