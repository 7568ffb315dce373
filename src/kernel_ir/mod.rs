//! Groups: which nodes become one kernel, and what that kernel computes.
//!
//! A [`Group`] is one step of the plan. A *contraction* or *norm* group computes its `root` node and runs its `body` on the
//! results before they reach memory; a *loop* group is its body alone; a *direct* group is one op that is a kernel of its
//! own (gather, reduction, padding, ...); a *view* group costs nothing (its value is a strided view); a *weight* group
//! depends on parameters, constants and fixed sizes alone, is evaluated once per weight set and kept as a derived weight
//! (see [`kept_values`](crate::analysis::kept_values)).
//!
//! A [`Body`] is a straight-line program of pointwise ops over one iteration space, in the compute type; stores round. Both
//! backends lower it: the CPU to a tile program, CUDA to source text.

pub mod print;
pub mod verify;

pub use print::print;
pub use verify::verify;

use crate::ir::{BinaryOp, DType, Dim, Graph, UnaryOp, ValueId};

/// A group, `@gn` in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub u32);

/// What kind of step a group becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GroupKind {
    /// `root` is a linear, matmul, convolution or attention; the body is its epilogue.
    Contraction,
    /// `root` is a group, layer or RMS norm or a softmax; the body is its epilogue.
    Norm,
    /// Pointwise ops alone.
    Loop,
    /// One op with a kernel of its own and no body.
    Direct,
    /// A strided view of its operand.
    View,
    /// Computed once per weight set.
    Weight,
    /// Input, parameter or constant: nothing to do.
    Source,
}

/// A register of a body, in order of definition.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Reg(pub u32);

/// One instruction of a body; instruction `i` defines register `i`.
#[derive(Clone, Debug, PartialEq)]
pub enum Instr {
    /// The root's result at this point of the space.
    Root,
    /// The element of an operand, broadcast to the space (trailing dimensions aligned).
    Load(ValueId),
    /// A constant.
    Const(f64),
    /// Pointwise op of one register.
    Unary(UnaryOp, Reg),
    /// Pointwise op of two registers.
    Binary(BinaryOp, Reg, Reg),
    /// Condition, if true, if not.
    Where(Reg, Reg, Reg),
    /// Rounds to `dtype` and back to the compute type: a conversion inside the group, or what `precision="eager"` puts
    /// between fused ops.
    Round(DType, Reg),
}

/// A pointwise program over one iteration space.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Body {
    /// The iteration space, row-major; the root's result has exactly this shape.
    pub space: Vec<Dim>,
    /// Instruction `i` defines register `i`.
    pub instrs: Vec<Instr>,
    /// Values written: register and graph value (whose shape is the space and whose dtype the store rounds to).
    pub stores: Vec<(Reg, ValueId)>,
}

/// Nodes that become one step.
#[derive(Clone, Debug, PartialEq)]
pub struct Group {
    /// What kind.
    pub kind: GroupKind,
    /// The op that gives the group its name: contraction, norm, direct op or view; none for loops.
    pub root: Option<ValueId>,
    /// All member nodes, in execution order.
    pub nodes: Vec<ValueId>,
    /// Fused pointwise work; empty space and no instructions where there is none.
    pub body: Body,
}

impl Group {
    /// Values of `graph` that the group reads from outside, each once.
    pub fn outside_reads(&self, graph: &Graph) -> Vec<ValueId> {
        let mut reads = Vec::new();
        for &v in &self.nodes {
            for &i in &graph.node(v).inputs {
                if !self.nodes.contains(&i) && !reads.contains(&i) {
                    reads.push(i);
                }
            }
        }
        reads
    }

    /// The values that later groups or the caller see: the body's stores, else the root.
    pub fn results(&self) -> Vec<ValueId> {
        if self.body.stores.is_empty() {
            self.root.into_iter().collect()
        } else {
            self.body.stores.iter().map(|s| s.1).collect()
        }
    }
}
