//! The graph: nodes in execution order, each with one result.
//!
//! Invariants (checked by `ir/verify`): operands come before their users; declared types are what `ir/infer` derives, at
//! every sample binding; indices of inputs, parameters, constants and symbols are in range. A graph holds no weights and
//! no addresses. It is immutable once built: passes make a new one through [`super::edit`].

use super::dim::{Dim, Sym};
use super::dtype::DType;
use super::op::{Op, ValueType};
use crate::error::Place;

/// A node and its result, `%n` in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

impl ValueId {
    /// Position in [`Graph::nodes`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// A module path, an index into [`Graph::paths`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PathId(pub u32);

/// A run-time size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Symbol {
    /// For people: `batch`, `height`, ...
    pub name: String,
    /// Values at the points where the graph was traced and verified; the same number for every symbol.
    pub samples: Vec<i64>,
}

/// An argument of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// Key path in the call, `encoder_hidden_states` or `added_cond_kwargs.time_ids`.
    pub name: String,
    /// Type; a Python number is a 0-d f64 or i64.
    pub ty: ValueType,
}

/// A weight slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Fully qualified name.
    pub name: String,
    /// Constant shape.
    pub ty: ValueType,
}

/// Data made in `forward` that does not depend on sizes or weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Constant shape.
    pub ty: ValueType,
    /// Row-major, little endian.
    pub bytes: Vec<u8>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// What it computes.
    pub op: Op,
    /// Operands, all earlier nodes.
    pub inputs: Vec<ValueId>,
    /// Type of the result.
    pub ty: ValueType,
    /// Module that asked for it.
    pub path: PathId,
}

/// An ATen-level program with symbolic sizes and no weights.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Graph {
    /// Run-time sizes.
    pub symbols: Vec<Symbol>,
    /// Arguments.
    pub inputs: Vec<Input>,
    /// Weight slots.
    pub parameters: Vec<Parameter>,
    /// Constants.
    pub constants: Vec<Constant>,
    /// Module paths; entry 0 is the root.
    pub paths: Vec<String>,
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Results, in the order in which the caller unflattens them.
    pub outputs: Vec<ValueId>,
}

impl Graph {
    /// An empty graph.
    pub fn new() -> Self {
        Self { paths: vec![String::new()], ..Self::default() }
    }

    /// The node that makes `value`.
    pub fn node(&self, value: ValueId) -> &Node {
        &self.nodes[value.index()]
    }

    /// Its op.
    pub fn op(&self, value: ValueId) -> &Op {
        &self.node(value).op
    }

    /// Its type.
    pub fn ty(&self, value: ValueId) -> &ValueType {
        &self.node(value).ty
    }

    /// Its module path.
    pub fn path(&self, value: ValueId) -> &str {
        self.paths.get(self.node(value).path.0 as usize).map_or("", String::as_str)
    }

    /// All values in execution order.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = ValueId> + ExactSizeIterator + use<> {
        (0..self.nodes.len() as u32).map(ValueId)
    }

    /// Appends a node; the caller vouches for the type (`ir/verify` checks it).
    pub fn push(&mut self, node: Node) -> ValueId {
        self.nodes.push(node);
        ValueId(self.nodes.len() as u32 - 1)
    }

    /// The id of a module path, added if new.
    pub fn intern_path(&mut self, path: &str) -> PathId {
        if let Some(last) = self.paths.iter().rposition(|p| p == path) {
            return PathId(last as u32);
        }
        self.paths.push(path.to_owned());
        PathId(self.paths.len() as u32 - 1)
    }

    /// For each value, the nodes that use it, in execution order; a node that uses it twice is listed twice. Graph outputs
    /// are not among them: see [`Graph::is_output`].
    pub fn users(&self) -> Vec<Vec<ValueId>> {
        let mut users = vec![Vec::new(); self.nodes.len()];
        for v in self.values() {
            for &i in &self.node(v).inputs {
                users[i.index()].push(v);
            }
        }
        users
    }

    /// Whether `value` is returned to the caller.
    pub fn is_output(&self, value: ValueId) -> bool {
        self.outputs.contains(&value)
    }

    /// The sample bindings: one vector of symbol values for each point where the graph was verified.
    pub fn sample_bindings(&self) -> Vec<Vec<i64>> {
        let points = self.symbols.iter().map(|s| s.samples.len()).min().unwrap_or(0);
        if self.symbols.is_empty() {
            return vec![Vec::new()];
        }
        (0..points).map(|p| self.symbols.iter().map(|s| s.samples[p]).collect()).collect()
    }

    /// The constant a value is: `full` of one value, through `expand`, `reshape` and `convert` between floats.
    pub fn as_scalar(&self, value: ValueId) -> Option<f64> {
        match self.op(value) {
            Op::Full { value } => Some(*value),
            Op::Expand | Op::Reshape => self.as_scalar(self.node(value).inputs[0]),
            _ => None,
        }
    }

    /// Module, op and operand types of a node, for messages.
    pub fn place(&self, value: ValueId) -> Place {
        let operands: Vec<String> = self.node(value).inputs.iter().map(|&i| self.ty(i).to_string()).collect();
        Place {
            module: self.path(value).to_owned(),
            op: self.op(value).name().to_owned(),
            operands: operands.join(", "),
        }
    }
}

/// Declares a symbol and gives its dimension.
impl Graph {
    /// Adds a run-time size.
    pub fn add_symbol(&mut self, name: &str, samples: Vec<i64>) -> Dim {
        self.symbols.push(Symbol { name: name.to_owned(), samples });
        Dim::symbol(Sym(self.symbols.len() as u32 - 1))
    }

    /// Adds an argument and its `input` node.
    pub fn add_input(&mut self, name: &str, ty: ValueType) -> ValueId {
        let index = self.inputs.len() as u32;
        self.inputs.push(Input { name: name.to_owned(), ty: ty.clone() });
        self.push(Node { op: Op::Input { index }, inputs: Vec::new(), ty, path: PathId(0) })
    }

    /// Adds a weight slot and its `parameter` node.
    pub fn add_parameter(&mut self, name: &str, dtype: DType, shape: &[i64]) -> ValueId {
        let ty = ValueType::new(dtype, shape.iter().map(|&d| Dim::constant(d)).collect());
        let index = self.parameters.len() as u32;
        self.parameters.push(Parameter { name: name.to_owned(), ty: ty.clone() });
        self.push(Node { op: Op::Parameter { index }, inputs: Vec::new(), ty, path: PathId(0) })
    }

    /// Adds a constant and its `constant` node.
    pub fn add_constant(&mut self, dtype: DType, shape: &[i64], bytes: Vec<u8>) -> ValueId {
        let ty = ValueType::new(dtype, shape.iter().map(|&d| Dim::constant(d)).collect());
        let index = self.constants.len() as u32;
        self.constants.push(Constant { ty: ty.clone(), bytes });
        self.push(Node { op: Op::Constant { index }, inputs: Vec::new(), ty, path: PathId(0) })
    }
}
