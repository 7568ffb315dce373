//! Steps in execution order, and where every value lies: what a backend runs.
//!
//! [`build`] turns a graph and its groups into a [`Plan`]. Sizes stay symbolic; a backend evaluates them once per
//! specialization. How values get their places ([`place`]): a *source* lies in the caller's memory; a *view* is a strided
//! window onto its operand; everything else is written by exactly one step, into a buffer of its own or straight into
//! where it is wanted: the caller's output tensor, or its slice of a concatenation.
//!
//! Invariants ([`verify`]): every element a step reads was written by an earlier step or by the caller; no step writes
//! memory of the caller other than outputs; accesses stay inside their buffers.

use std::fmt;
use std::sync::Arc;

use crate::codegen::TileBody;
use crate::ir::{DType, Dim, Graph, ValueId};
use crate::select::Kernel;
use crate::target::Target;

pub mod access;
mod build;
pub mod liveness;
mod place;
mod print;
mod reorder;
mod reuse;
mod share;
pub mod verify;
pub mod workspace;

pub use access::{Access, ConcreteAccess};
pub use build::build;
pub use workspace::{Scratch, Workspace};

/// A piece of memory, `#bn` in text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BufferId(pub u32);

impl BufferId {
    /// Position in [`Plan::buffers`].
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#b{}", self.0)
    }
}

/// Whose memory a buffer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferKind {
    /// Argument of the call; dense.
    Input(u32),
    /// Weight slot; any strides at run time, dense in the plan.
    Parameter(u32),
    /// Constant of the graph.
    Constant(u32),
    /// Result `index` of the call; dense.
    Output(u32),
    /// Computed once per weight set.
    Derived,
    /// Workspace of one run.
    Arena,
}

/// A buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Whose it is.
    pub kind: BufferKind,
    /// Element type.
    pub dtype: DType,
    /// Number of elements.
    pub numel: Dim,
    /// A value that lies in it, for messages.
    pub value: ValueId,
}

/// A packed form of a weight, kept with the weight set.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Pack {
    /// The weight.
    pub source: Access,
    /// What is made of it.
    pub form: PackForm,
}

/// Kinds of packed weights.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum PackForm {
    /// Second operand `[n, k]` of a product.
    Matrix,
    /// Weight of a convolution with this many groups.
    Convolution {
        /// Groups of the convolution.
        groups: usize,
    },
}

/// One kernel call.
#[derive(Clone, Debug)]
pub struct Step {
    /// Kernel family.
    pub kernel: Kernel,
    /// The op whose attributes the kernel takes; none for loops and copies.
    pub root: Option<ValueId>,
    /// The root's operands in the op's order (without the bias of a contraction, which the body adds); the source of a
    /// copy; whatever [`Step::values`] names, for the interpreter.
    pub operands: Vec<Access>,
    /// For the interpreter and the kernels that may leave their work to it: the value behind each operand.
    pub values: Vec<ValueId>,
    /// For the interpreter: nodes to evaluate, in order.
    pub nodes: Vec<ValueId>,
    /// Pointwise work on the results.
    pub body: Option<Arc<TileBody>>,
    /// Iteration space of the body, rows then columns.
    pub space: Vec<Dim>,
    /// The body's loads, broadcast to the space.
    pub loads: Vec<Access>,
    /// What is written: the body's stores over the space; a copy's destination; the interpreter's results.
    pub stores: Vec<Access>,
    /// For the interpreter: the value behind each store.
    pub results: Vec<ValueId>,
    /// Memory that the step writes and reads again while it runs.
    pub scratch: Vec<Access>,
    /// The packed form of the weight, index into [`Plan::packs`].
    pub pack: Option<usize>,
    /// Nearest upsampling folded into a convolution, one factor per spatial dimension; empty if there is none.
    pub upsample: Vec<usize>,
    /// Floating point operations.
    pub flops: Dim,
    /// Value the step is named after.
    pub value: ValueId,
}

impl Step {
    /// Everything the step reads.
    pub fn reads(&self) -> impl Iterator<Item = &Access> {
        self.operands.iter().chain(&self.loads)
    }

    /// Everything the step touches.
    pub fn accesses(&self) -> impl Iterator<Item = &Access> {
        self.reads().chain(&self.stores).chain(&self.scratch)
    }

    fn accesses_mut(&mut self) -> impl Iterator<Item = &mut Access> {
        let stores = self.stores.iter_mut().chain(&mut self.scratch);
        self.operands.iter_mut().chain(&mut self.loads).chain(stores)
    }
}

/// What `"balanced"` may keep: all of a small model's. More, and arena and kept forms of a text encoder take more than eager
/// does, whose activations are as small; of a large model, 100 MB of panels save some ten milliseconds of seconds.
const BALANCED_BYTES: usize = 4 << 20;

/// How much derived state may be kept for speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryMode {
    /// Pack every weight.
    Fast,
    /// Keep packed weights while they are few: all of a small model's. Others are packed by the call.
    #[default]
    Balanced,
    /// Keep nothing but the user's tensors.
    Low,
}

impl MemoryMode {
    /// The mode of that name: `fast`, `balanced` or `low`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "fast" => Some(Self::Fast),
            "balanced" => Some(Self::Balanced),
            "low" => Some(Self::Low),
            _ => None,
        }
    }

    /// Most bytes of values that depend on weights alone and are kept.
    pub const fn kept_bytes(self) -> usize {
        match self {
            Self::Fast => usize::MAX,
            Self::Balanced => BALANCED_BYTES,
            // What a graph may hold as constants: tables, no weights.
            Self::Low => crate::passes::fold_constants::MAX_BYTES as usize,
        }
    }
}

/// What the user allows products of f32.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Numerics {
    /// Those of matrices may round their operands to TF32, where the device has it.
    pub tf32_products: bool,
    /// Those of convolutions may.
    pub tf32_convolutions: bool,
}

/// Choices of the user that shape a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PlanOptions {
    /// How much derived state may be kept.
    pub memory: MemoryMode,
    /// Only kernels whose error is that of the plain sum of products: no Winograd convolutions.
    pub exact: bool,
    /// Most bytes of workspace and derived weights.
    pub memory_budget: Option<usize>,
    /// Runs launch kernel by kernel, where the device could replay them as a graph.
    pub plain_launches: bool,
    /// What products of f32 may round.
    pub numerics: Numerics,
}

/// Steps and places: a compiled graph, without weights and without sizes.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The graph it was made from; interpreted steps and attributes refer to it.
    pub graph: Arc<Graph>,
    /// Device.
    pub target: Target,
    /// Choices it was made with.
    pub options: PlanOptions,
    /// All memory.
    pub buffers: Vec<Buffer>,
    /// Steps that depend on weights alone: run once per weight set, writing derived buffers.
    pub prepare: Vec<Step>,
    /// Steps of a run.
    pub steps: Vec<Step>,
    /// Packed weights.
    pub packs: Vec<Pack>,
    /// Buffer of each result.
    pub outputs: Vec<BufferId>,
}

impl Plan {
    /// Every buffer of some kind.
    pub fn buffers_of(&self, wanted: impl Fn(BufferKind) -> bool) -> impl Iterator<Item = (BufferId, &Buffer)> {
        self.buffers.iter().enumerate().filter(move |(_, b)| wanted(b.kind)).map(|(i, b)| (BufferId(i as u32), b))
    }

    /// Module path and op of a step, for messages and profiles.
    pub fn step_name(&self, step: &Step) -> String {
        let path = self.graph.path(step.value);
        let op = self.graph.op(step.root.unwrap_or(step.value)).name();
        if path.is_empty() { op.to_owned() } else { format!("{path}.{op}") }
    }
}
