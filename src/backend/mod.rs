//! What runs a plan: one small trait per backend, no methods per op.
//!
//! A [`Backend`] loads a [`Plan`]; the [`Loaded`] plan is specialized for concrete sizes (arithmetic only: offsets, strides,
//! launch parameters); a [`Specialized`] plan runs on memory that its caller lends. Three of them exist: [`reference`]
//! interprets the graph, [`null`] plans everything and runs nothing, [`cpu`] runs the kernels.
//!
//! Invariant: backends hold no tensors between calls. Inputs, outputs, weights and workspace are all lent by the caller.

use std::sync::Arc;
use std::time::Duration;

use crate::ir::DType;
use crate::plan::Plan;
use crate::target::Target;
use crate::{Error, Result};

pub mod cpu;
pub mod null;
pub mod reference;
pub mod tensor;
pub mod weights;

pub use tensor::{Block, Memory, SystemMemory, Tensor};
pub use weights::WeightSet;

/// A way to run plans.
pub trait Backend: Send + Sync {
    /// `reference`, `null` or `cpu`.
    fn name(&self) -> &'static str;

    /// The device to plan for.
    fn target(&self) -> Target;

    /// Whether every step of the plan can run here.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the first step that cannot.
    fn check(&self, plan: &Plan) -> Result<()>;

    /// Does everything that depends on neither sizes nor weights.
    ///
    /// # Errors
    /// As [`Backend::check`].
    fn load(&self, plan: Arc<Plan>) -> Result<Box<dyn Loaded>>;
}

/// A plan made ready to be specialized.
pub trait Loaded: Send + Sync {
    /// Sizes, offsets and kernel arguments for these values of the symbols.
    ///
    /// # Errors
    /// If a size is negative, not an integer or too large.
    fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>>;
}

/// A plan for concrete sizes. Any number of threads may run one, each with an arena of its own.
pub trait Specialized: Send + Sync {
    /// Workspace that a run needs, aligned to [`crate::memory::ALIGN_BYTES`].
    fn arena_bytes(&self) -> usize;

    /// The most that is alive at one step: no arena can be smaller.
    fn lower_bound_bytes(&self) -> usize;

    /// The arena, buffer by buffer, as text.
    fn memory_text(&self) -> String;

    /// Runs on the caller's memory.
    ///
    /// # Safety
    /// Every pointer in `run` must be valid for its type and shape while the call lasts, outputs for writes; no output
    /// may overlap another operand; the arena must have [`Specialized::arena_bytes`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where scratch memory or derived weights cannot be allocated, [`Error::Backend`] where a kernel
    /// refuses its arguments.
    unsafe fn run(&self, run: Run<'_>) -> Result<()>;
}

/// The memory of one run.
pub struct Run<'a> {
    /// Arguments, in the graph's order, of the specialized shapes.
    pub inputs: &'a [Tensor],
    /// Results: dense, of the specialized shapes.
    pub outputs: &'a [Tensor],
    /// Weights.
    pub weights: &'a WeightSet,
    /// Workspace.
    pub arena: *mut u8,
    /// Receives one entry per step, if wanted.
    pub profile: Option<&'a mut Vec<StepTime>>,
}

/// One step of a profile.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTime {
    /// Module path and op.
    pub step: String,
    /// Kernel family.
    pub kernel: &'static str,
    /// Module path.
    pub module: String,
    /// Wall-clock time.
    pub time: Duration,
    /// Floating point operations.
    pub flops: u64,
    /// Bytes of all operands, read or written.
    pub bytes: u64,
}

/// The backend of that name.
///
/// # Errors
/// If there is none.
pub fn by_name(name: &str) -> Result<Arc<dyn Backend>> {
    match name {
        "cpu" => Ok(Arc::new(cpu::Cpu::new())),
        "reference" => Ok(Arc::new(reference::Reference)),
        "null" => Ok(Arc::new(null::Null)),
        _ => Err(Error::invalid(format!("no backend is called `{name}`; there are cpu, reference and null"))),
    }
}

/// Types and sizes of the results of a plan.
///
/// # Errors
/// As [`crate::ir::Dim::eval`].
pub fn output_types(plan: &Plan, bindings: &[i64]) -> Result<Vec<(DType, Vec<i64>)>> {
    let types = plan.graph.outputs.iter().map(|&v| plan.graph.ty(v));
    types.map(|ty| Ok((ty.dtype, ty.concrete(bindings)?))).collect()
}
