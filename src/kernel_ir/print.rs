//! Text form of groups: what `OXIDIFF_DUMP` and golden tests show.
//!
//! One block per group; a body is one line per instruction, results are `name: type`.
//!
//! ```text
//! @g3 contraction linear(%0, %1, %2) {
//!   space [2,64,320]
//!   r0 = root
//!   r1 = silu r0
//!   store r1 -> %4: f16[2,64,320]
//! }  // unet.time_embedding
//! ```

use std::fmt::Write;

use super::{Body, Group, GroupKind, Instr};
use crate::ir::{Dim, Graph, ValueId};

impl GroupKind {
    /// Text form.
    pub const fn name(self) -> &'static str {
        match self {
            GroupKind::Contraction => "contraction",
            GroupKind::Norm => "norm",
            GroupKind::Loop => "loop",
            GroupKind::Direct => "direct",
            GroupKind::View => "view",
            GroupKind::Weight => "weight",
            GroupKind::Source => "source",
        }
    }
}

/// All groups, one after the other.
pub fn print(graph: &Graph, groups: &[Group]) -> String {
    let mut out = String::new();
    for (i, group) in groups.iter().enumerate() {
        // Writing to a string cannot fail.
        let _ = print_group(&mut out, graph, i, group);
    }
    out
}

fn print_group(out: &mut String, graph: &Graph, index: usize, group: &Group) -> std::fmt::Result {
    write!(out, "@g{index} {}", group.kind.name())?;
    if let Some(root) = group.root {
        write!(out, " {}", call(graph, root))?;
    }
    if group.body.instrs.is_empty() {
        for r in group.results() {
            write!(out, " -> %{}: {}", r.0, graph.ty(r))?;
        }
        let inner: Vec<String> =
            group.nodes.iter().filter(|n| Some(**n) != group.root).map(|n| format!("%{}", n.0)).collect();
        if !inner.is_empty() {
            write!(out, " with {}", inner.join(" "))?;
        }
    } else {
        out.push_str(" {\n");
        print_body(out, graph, &group.body)?;
        out.push('}');
    }
    match group.nodes.last().map(|n| graph.path(*n)) {
        Some(path) if !path.is_empty() => writeln!(out, "  // {path}"),
        _ => writeln!(out),
    }
}

fn call(graph: &Graph, v: ValueId) -> String {
    let inputs: Vec<String> = graph.node(v).inputs.iter().map(|i| format!("%{}", i.0)).collect();
    format!("{}({})", graph.op(v).name(), inputs.join(", "))
}

fn print_body(out: &mut String, graph: &Graph, body: &Body) -> std::fmt::Result {
    let space: Vec<String> = body.space.iter().map(Dim::to_string).collect();
    writeln!(out, "  space [{}]", space.join(","))?;
    for (i, instr) in body.instrs.iter().enumerate() {
        let text = match instr {
            Instr::Root => "root".to_owned(),
            Instr::Load(v) => format!("load %{}: {}", v.0, graph.ty(*v)),
            Instr::Const(c) => format!("const {c:?}"),
            Instr::Unary(op, a) => format!("{} r{}", op.name(), a.0),
            Instr::Binary(op, a, b) => format!("{} r{} r{}", op.name(), a.0, b.0),
            Instr::Where(c, a, b) => format!("where r{} r{} r{}", c.0, a.0, b.0),
            Instr::Round(dtype, a) => format!("round.{dtype} r{}", a.0),
        };
        writeln!(out, "  r{i} = {text}")?;
    }
    for (reg, v) in &body.stores {
        writeln!(out, "  store r{} -> %{}: {}", reg.0, v.0, graph.ty(*v))?;
    }
    Ok(())
}
