//! Checks a list of groups against its graph.
//!
//! - every node is in exactly one group, and `nodes` is sorted;
//! - a value is read only after the group that makes it, and not through memory inside its own group;
//! - kinds and roots agree: contraction, norm, direct and view groups have a root of that sort, loops have none;
//! - the space is the root's shape; loads broadcast to it; stores have exactly that shape;
//! - registers are defined before they are used, `root` occurs only where there is one;
//! - every value that leaves the group is among its results, and every store is a member.

use super::{Body, Group, GroupKind, Instr, Reg};
use crate::error::{Error, Result};
use crate::ir::infer::ranges::check_broadcast;
use crate::ir::{Dim, Graph, Op, ValueId};

/// Checks the list above.
///
/// # Errors
/// [`Error::Verify`] with the group and the broken rule.
pub fn verify(graph: &Graph, groups: &[Group]) -> Result<()> {
    let owner = owners(graph, groups)?;
    let users = graph.users();
    for (i, group) in groups.iter().enumerate() {
        let check = Check { graph, owner: &owner, index: i, group };
        check.kind()?;
        check.order()?;
        check.body(&group.body)?;
        check.results(&users)?;
    }
    Ok(())
}

fn broken(index: usize, what: impl std::fmt::Display) -> Error {
    Error::Verify { pass: "form_groups".to_owned(), what: format!("@g{index}: {what}") }
}

fn owners(graph: &Graph, groups: &[Group]) -> Result<Vec<usize>> {
    let mut owner = vec![usize::MAX; graph.nodes.len()];
    for (i, group) in groups.iter().enumerate() {
        if !group.nodes.is_sorted_by(|a, b| a < b) {
            return Err(broken(i, "nodes are not in execution order"));
        }
        for n in &group.nodes {
            if std::mem::replace(&mut owner[n.index()], i) != usize::MAX {
                return Err(broken(i, format!("%{} is in two groups", n.0)));
            }
        }
    }
    match owner.iter().position(|o| *o == usize::MAX) {
        Some(n) => Err(broken(groups.len(), format!("%{n} is in no group"))),
        None => Ok(owner),
    }
}

struct Check<'a> {
    graph: &'a Graph,
    owner: &'a [usize],
    index: usize,
    group: &'a Group,
}

impl Check<'_> {
    fn fail(&self, what: impl std::fmt::Display) -> Result<()> {
        Err(broken(self.index, what))
    }

    fn kind(&self) -> Result<()> {
        let op = self.group.root.map(|r| self.graph.op(r));
        let is_norm = |op: &Op| {
            matches!(op, Op::GroupNorm { .. } | Op::LayerNorm { .. } | Op::RmsNorm { .. } | Op::Softmax { .. })
        };
        let fits = match (self.group.kind, op) {
            (GroupKind::Loop, root) => root.is_none(),
            (_, None) => false,
            (GroupKind::Contraction, Some(op)) => op.is_contraction(),
            (GroupKind::Norm, Some(op)) => is_norm(op),
            (GroupKind::View, Some(op)) => op.is_view(),
            (GroupKind::Direct, Some(op)) => !op.is_contraction() && !op.is_pointwise() && !op.is_view(),
            (GroupKind::Source, Some(op)) => op.is_source(),
            (GroupKind::Weight, Some(_)) => true,
        };
        match fits {
            true if self.group.root.is_none_or(|r| self.group.nodes.contains(&r)) => Ok(()),
            true => self.fail("the root is not a member"),
            false => self.fail("the root does not suit the kind"),
        }
    }

    /// What runs before: operands of other groups.
    fn order(&self) -> Result<()> {
        for n in &self.group.nodes {
            for i in &self.graph.node(*n).inputs {
                let from = self.owner[i.index()];
                if from > self.index {
                    return self.fail(format!("%{} reads %{}, which @g{from} makes later", n.0, i.0));
                }
            }
        }
        Ok(())
    }

    fn body(&self, body: &Body) -> Result<()> {
        let is_loop = self.group.kind == GroupKind::Loop;
        if body.instrs.is_empty() {
            return if is_loop || !body.stores.is_empty() { self.fail("the body is empty") } else { Ok(()) };
        }
        if let Some(root) = self.group.root.filter(|r| self.graph.ty(*r).shape != body.space) {
            return self.fail(format!("the space is not the shape of %{}", root.0));
        }
        for (i, instr) in body.instrs.iter().enumerate() {
            self.instr(i as u32, instr, &body.space)?;
        }
        for (reg, v) in &body.stores {
            let is_member = self.owner[v.index()] == self.index;
            if !is_member || self.graph.ty(*v).shape != body.space || reg.0 as usize >= body.instrs.len() {
                return self.fail(format!("store of %{} does not fit", v.0));
            }
        }
        if body.stores.is_empty() { self.fail("nothing is stored") } else { Ok(()) }
    }

    fn instr(&self, at: u32, instr: &Instr, space: &[Dim]) -> Result<()> {
        let defined = |regs: &[Reg]| regs.iter().all(|r| r.0 < at);
        let fits = match instr {
            Instr::Root => self.group.root.is_some(),
            Instr::Const(_) => true,
            Instr::Load(v) => {
                self.owner[v.index()] != self.index && check_broadcast(&self.graph.ty(*v).shape, space).is_ok()
            }
            Instr::Unary(_, a) | Instr::Round(_, a) => defined(&[*a]),
            Instr::Binary(_, a, b) => defined(&[*a, *b]),
            Instr::Where(c, a, b) => defined(&[*c, *a, *b]),
        };
        if fits { Ok(()) } else { self.fail(format!("instruction r{at} is not valid")) }
    }

    fn results(&self, users: &[Vec<ValueId>]) -> Result<()> {
        let results = self.group.results();
        for n in &self.group.nodes {
            let leaves = users[n.index()].iter().any(|u| self.owner[u.index()] != self.index);
            let folded = matches!(self.graph.op(*n), Op::Full { .. });
            if leaves && !folded && !results.contains(n) {
                return self.fail(format!("%{} is read outside but not stored", n.0));
            }
        }
        match self.graph.outputs.iter().find(|o| self.owner[o.index()] == self.index && !results.contains(o)) {
            Some(o) => self.fail(format!("output %{} is not stored", o.0)),
            None => Ok(()),
        }
    }
}
