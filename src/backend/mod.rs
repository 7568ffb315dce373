//! What runs a plan: one small trait per backend, no methods per op.
//!
//! A [`Backend`] loads a [`Plan`]; the [`Loaded`] plan is specialized for concrete sizes (arithmetic only: offsets, strides,
//! launch parameters); a [`Specialized`] plan runs on memory that its caller lends. Four of them exist: [`reference`]
//! interprets the graph, [`null`] plans everything and runs nothing, [`cpu`] runs kernels here, [`cuda`] on an NVIDIA GPU.
//!
//! Invariant: backends hold no tensors between calls. Inputs, outputs, weights and workspace are all lent by the caller.

use std::sync::Arc;
use std::time::Duration;

use oxidiff_kernels::cpu::conv_choice::Observed;

use crate::ir::DType;
use crate::plan::{Access, Plan, Step, Workspace};
use crate::select::Kernel;
use crate::target::{Profile, Target};
use crate::{Error, Result};

pub mod cpu;
pub mod cuda;
pub mod derived;
pub mod null;
pub mod reference;
pub mod tensor;
pub mod weights;

pub use tensor::{Block, Memory, SystemMemory, Tensor};
pub use weights::{Identity, Known, Weight, WeightSet};

/// A way to run plans.
pub trait Backend: Send + Sync {
    /// `reference`, `null`, `cpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// The device to plan for.
    fn target(&self) -> Target;

    /// What the device does at most, for choices that must be the same in every process.
    fn profile(&self) -> Profile {
        *self.target().profile()
    }

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

    /// Where the workspace of its runs comes from; none is this process's own memory.
    fn memory(&self) -> Option<Arc<dyn Memory>> {
        None
    }

    /// Whether work on a stream is recorded now, into a graph of the caller's, and done later.
    ///
    /// # Errors
    /// [`Error::Backend`] where the device does not say.
    fn is_recorded(&self, _stream: usize) -> Result<bool> {
        Ok(false)
    }

    /// A number in the device's memory, from where the stream has come so far.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Backend`] where the device refuses.
    fn number(&self, word: [u8; 8], _stream: usize) -> Result<Block> {
        let block = SystemMemory.allocate(word.len(), "a number")?;
        // SAFETY: a fresh block of this size, aligned to 64.
        unsafe { block.ptr().cast::<[u8; 8]>().write(word) };
        Ok(block)
    }
}

/// A plan for concrete sizes. Any number of threads may run one, each with an arena of its own.
pub trait Specialized: Send + Sync {
    /// Workspace that a run needs, aligned to [`crate::memory::ALIGN_BYTES`], buffer by buffer.
    fn workspace(&self) -> &Workspace;

    /// Bytes of it that a run with these weights needs: fewer where they lie as its kernels read them.
    fn workspace_bytes(&self, _weights: &WeightSet) -> usize {
        self.workspace().bytes()
    }

    /// Forms of weights that a run keeps for the next one.
    fn kept(&self) -> &[KeptForm] {
        &[]
    }

    /// Most bytes that weights may hold in other forms while this runs, for all sizes together.
    fn derived_limit(&self) -> usize {
        usize::MAX
    }

    /// Bytes of what is computed from weights alone, once.
    fn prepared_bytes(&self) -> usize {
        0
    }

    /// What each step costs.
    fn costs(&self) -> Vec<Cost> {
        Vec::new()
    }

    /// The convolutions whose forms are chosen by measurements where there are any, one for each step.
    fn choices(&self) -> Vec<Open> {
        Vec::new()
    }

    /// What a tuner may choose between, on devices where libraries compute steps.
    fn sites(&self) -> Vec<SiteRow> {
        Vec::new()
    }

    /// Bytes that a trial of a way to compute a site needs.
    fn trial_bytes(&self, _site: usize, _way: usize) -> usize {
        0
    }

    /// Bytes with which no run of such a trial finds its operands in a cache, where that is more.
    fn cold_trial_bytes(&self, site: usize, way: usize) -> usize {
        self.trial_bytes(site, way)
    }

    /// The ways to compute a site that can be tried, and whether those are all that work. What a library has to build for them is
    /// built first, at the same time and outside of trials; nothing is begun that is not expected to be done within `time`.
    ///
    /// # Errors
    /// [`Error::Backend`] where the device refuses.
    fn ready(&self, _site: usize, _time: Duration) -> Result<(Vec<usize>, bool)> {
        Ok((Vec::new(), true))
    }

    /// Seconds of one way to compute a site on random operands, in the order of `stream`; `None` if the way does not work,
    /// or if its result is not that of the first one.
    ///
    /// # Safety
    /// `memory` must be that many bytes of the device, aligned to [`crate::memory::ALIGN_BYTES`], and nobody else's meanwhile.
    ///
    /// # Errors
    /// [`Error::Backend`] where the device refuses.
    unsafe fn measure(
        &self,
        _site: usize,
        _way: usize,
        _memory: (*mut u8, usize),
        _stream: usize,
    ) -> Result<Option<f64>> {
        Ok(None)
    }

    /// Makes a choice hold for specializations to come; false where there is no such choice.
    fn choose(&self, _site: usize, _choice: &str) -> bool {
        false
    }

    /// Device and libraries that measurements depend on.
    fn measured_on(&self) -> (String, String) {
        (String::new(), String::new())
    }

    /// Device memory of what its runs are replayed from.
    fn graph_bytes(&self) -> usize {
        0
    }

    /// Why its runs are not replayed, where that was tried and failed.
    fn no_graphs(&self) -> Option<String> {
        None
    }

    /// Host memory of the specialization itself.
    fn host_bytes(&self) -> usize {
        0
    }

    /// Who computes each step that a library might, and why where none does.
    fn delegations(&self) -> Vec<StepChoice> {
        Vec::new()
    }

    /// Runs on the caller's memory.
    ///
    /// # Safety
    /// Every pointer in `run` must be valid for its type and shape while the call lasts, outputs for writes; no output
    /// may overlap another operand; the arena must have the bytes of [`Specialized::workspace_bytes`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where scratch memory or derived weights cannot be allocated, [`Error::Backend`] where a kernel
    /// refuses its arguments.
    unsafe fn run(&self, run: Run<'_>) -> Result<()>;
}

/// What a tuner may choose between on a device: ways to compute one kind of step.
#[derive(Clone, Debug, PartialEq)]
pub struct SiteRow {
    /// What is computed, and a hash of everything that the time depends on.
    pub op: String,
    /// Steps of a run that it is.
    pub count: usize,
    /// Floating point operations of one.
    pub flops: u64,
    /// The ways, by name; the last are the step's own kernels. None can be tried where those were chosen before.
    pub ways: Vec<String>,
    /// Whether those kernels use the device's tensor cores.
    pub on_tensor_cores: bool,
    /// Index of the one that runs.
    pub chosen: usize,
    /// The choice that was made by measuring, if there is one.
    pub installed: Option<String>,
}

/// Who computes a step that a library might compute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepChoice {
    /// Module path and op.
    pub step: String,
    /// The library, or `kernel` for the backend's own.
    pub by: &'static str,
    /// Why no library does it; empty where one does.
    pub reason: String,
}

/// A form of a weight that is kept between runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeptForm {
    /// Index into [`Plan::packs`].
    pub pack: usize,
    /// Size.
    pub bytes: usize,
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
    /// Handle of the stream that the work goes to, on devices that have streams; 0 is the default one.
    pub stream: usize,
    /// Whether the work is recorded there, and done later, any number of times.
    pub is_recorded: bool,
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
    /// Element type of the result.
    pub dtype: DType,
    /// Wall-clock time.
    pub time: Duration,
    /// What it costs.
    pub cost: Cost,
}

/// A convolution whose form is chosen by measurements.
#[derive(Clone, Copy, Debug)]
pub struct Open {
    /// The convolution.
    pub observed: Observed,
    /// Whether runs read panels that are kept, rather than to pack or transform the weight each time.
    pub is_kept: bool,
    /// The slot of its weight, if that is one as it is bound.
    pub slot: Option<usize>,
}

/// What a step costs at certain sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating point operations, of convolutions as if each product were computed.
    pub flops: u64,
    /// The operations that are left by the form that computes it: Winograd's save products.
    pub work: u64,
    /// Bytes of all operands that are read or written, once each.
    pub bytes: u64,
}

impl Cost {
    /// Of a step that touches `accesses` and computes all it says.
    ///
    /// # Errors
    /// If a size has no value.
    pub fn of<'a>(step: &Step, accesses: impl IntoIterator<Item = &'a Access>, bindings: &[i64]) -> Result<Self> {
        let flops = u64::try_from(step.flops.eval(bindings)?).unwrap_or(0);
        // What is looked up in a table is as much as the result, however large the table.
        let most = match step.kernel {
            Kernel::Gather => {
                step.stores.iter().try_fold(0, |most, store| touched(store, bindings).map(|n| n.max(most)))?
            }
            _ => u64::MAX,
        };
        let bytes = accesses.into_iter().try_fold(0, |sum, access| Ok(sum + touched(access, bindings)?.min(most)))?;
        Ok(Self { flops, work: flops, bytes })
    }
}

/// Bytes of an operand; of what is repeated, one.
fn touched(access: &Access, bindings: &[i64]) -> Result<u64> {
    let concrete = access.concrete(bindings)?;
    let each = |(size, stride): (&usize, &isize)| if *stride == 0 { 1 } else { *size };
    let numel = concrete.shape.iter().zip(&concrete.strides).map(each).product::<usize>();
    Ok((numel * concrete.dtype.size_bytes()) as u64)
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
        "cuda" => Ok(Arc::new(cuda::Cuda::shared(0)?)),
        _ => match name.strip_prefix("cuda:").map(str::parse) {
            Some(Ok(ordinal)) => Ok(Arc::new(cuda::Cuda::shared(ordinal)?)),
            _ => Err(Error::invalid(format!("no backend is called `{name}`; there are cpu, cuda, reference and null"))),
        },
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
