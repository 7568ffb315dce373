//! The one door for changing a graph.
//!
//! A pass walks the old graph in order and, for every node, either copies it or emits something else in its place:
//!
//! ```text
//! let mut edit = Editor::new(graph, "fold_constants");
//! for v in graph.values() {
//!     match rule(graph, v) {
//!         Some(build) => { let new = build(&mut edit); edit.replace(v, new, "rule name"); }
//!         None => edit.copy(v),
//!     }
//! }
//! let (graph, changed) = edit.finish();
//! ```
//!
//! Old ids index the old graph, new ids the new one; [`Editor::get`] translates. Nodes that are not copied vanish, so order
//! and dominance hold by construction. Every replacement is logged with pass and rule, and counts against
//! `OXIDIFF_MAX_REWRITES`, which bisects a miscompile.

use super::dim::Dim;
use super::dtype::DType;
use super::graph::{Graph, Node, PathId, ValueId};
use super::op::{Op, ValueType};
use crate::{config, trace};

/// Whether a pass changed its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Changed {
    /// The new graph differs.
    Yes,
    /// It is equal.
    No,
}

/// A new graph under construction from an old one.
pub struct Editor<'a> {
    old: &'a Graph,
    new: Graph,
    map: Vec<Option<ValueId>>,
    pass: &'static str,
    path: PathId,
    rewrites: usize,
}

impl<'a> Editor<'a> {
    /// Starts an edit of `old` on behalf of `pass`.
    pub fn new(old: &'a Graph, pass: &'static str) -> Self {
        let new = Graph {
            symbols: old.symbols.clone(),
            inputs: old.inputs.clone(),
            parameters: old.parameters.clone(),
            constants: old.constants.clone(),
            paths: old.paths.clone(),
            nodes: Vec::with_capacity(old.nodes.len()),
            outputs: Vec::new(),
        };
        Self { old, new, map: vec![None; old.nodes.len()], pass, path: PathId(0), rewrites: 0 }
    }

    /// The new value that stands for an old one.
    ///
    /// # Panics
    /// If `old` has not been copied or replaced yet: a pass asks only for operands, which come first.
    pub fn get(&self, old: ValueId) -> ValueId {
        self.map[old.index()].expect("an operand is copied or replaced before its users")
    }

    /// Keeps `old` as it is, with its operands translated.
    pub fn copy(&mut self, old: ValueId) -> ValueId {
        let node = self.old.node(old);
        let inputs = node.inputs.iter().map(|&i| self.get(i)).collect();
        let new = self.new.push(Node { op: node.op.clone(), inputs, ty: node.ty.clone(), path: node.path });
        self.map[old.index()] = Some(new);
        new
    }

    /// New nodes take the module path of `old` from here on.
    pub fn at(&mut self, old: ValueId) -> &mut Self {
        self.path = self.old.node(old).path;
        self
    }

    /// Appends a node over new operands.
    pub fn emit(&mut self, op: Op, inputs: &[ValueId], dtype: DType, shape: Vec<Dim>) -> ValueId {
        self.new.push(Node { op, inputs: inputs.to_vec(), ty: ValueType::new(dtype, shape), path: self.path })
    }

    /// Appends a constant with data.
    pub fn emit_constant(&mut self, dtype: DType, shape: &[i64], bytes: Vec<u8>) -> ValueId {
        self.new.add_constant(dtype, shape, bytes)
    }

    /// Lets the new value stand for `old`; false, and nothing done, once `OXIDIFF_MAX_REWRITES` is used up, in which case
    /// the caller copies.
    pub fn replace(&mut self, old: ValueId, new: ValueId, rule: &'static str) -> bool {
        if !config::take_rewrite() {
            return false;
        }
        trace::rewrite(self.pass, rule, || {
            format!("%{} {} -> %{} {}", old.0, self.old.op(old).name(), new.0, self.new.op(new).name())
        });
        self.map[old.index()] = Some(new);
        self.rewrites += 1;
        true
    }

    /// The graph being built.
    pub fn graph(&self) -> &Graph {
        &self.new
    }

    /// Ends the edit: outputs translated; `Yes` if anything was replaced or left out.
    pub fn finish(mut self) -> (Graph, Changed) {
        self.new.outputs = self.old.outputs.iter().map(|&o| self.get(o)).collect();
        let changed =
            if self.rewrites > 0 || self.new.nodes.len() != self.old.nodes.len() { Changed::Yes } else { Changed::No };
        (self.new, changed)
    }
}

/// Keeps only the nodes (and parameters, constants, inputs stay declared) that `keep` names; operands of kept nodes must be
/// kept.
pub fn retain(graph: &Graph, pass: &'static str, keep: &[bool]) -> (Graph, Changed) {
    let mut edit = Editor::new(graph, pass);
    for v in graph.values().filter(|v| keep[v.index()]) {
        edit.copy(v);
    }
    edit.finish()
}
