//! The intermediate representation: one ATen-level graph with symbolic sizes and no weights.
//!
//! Where to look: [`dim`] symbolic integers, [`dtype`] element types, [`op`] the op set and what it means, [`graph`] nodes and
//! slots, [`edit`] the one door for changes, [`print`] and [`parse`] the text form,
//! [`infer`] types, [`verify`] invariants, [`interp`] the executable meaning,
//! [`hash`] identity, [`widen`] f32 for f16, [`testing`] random graphs.
//!
//! Invariant: nothing here knows passes, plans, backends or Python.

pub mod dim;
pub mod dtype;
pub mod edit;
pub mod graph;
pub mod hash;
pub mod infer;
pub mod interp;
pub mod op;
pub mod parse;
pub mod print;
#[doc(hidden)]
pub mod testing;
pub mod verify;
pub mod widen;

pub use dim::{Dim, Sym};
pub use dtype::DType;
pub use edit::{Changed, Editor};
pub use graph::{Constant, Graph, Input, Node, Parameter, PathId, Symbol, ValueId};
pub use infer::infer_type;
pub use op::{Attr, BinaryOp, Op, PoolOp, ReduceOp, UnaryOp, ValueType};
pub use parse::parse_graph;
pub use print::{print_graph, print_node};
pub use verify::verify_graph;
pub use widen::widened;
