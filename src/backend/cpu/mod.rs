//! The CPU backend: every step becomes one kernel call.
//!
//! Loading a plan prepares its tile programs; specializing it evaluates every access and decides how each kernel is
//! called ([`specialize`]); a run resolves addresses and calls. Each kernel family has a file with a `Call` that holds
//! its concrete arguments.
//!
//! Invariant: a call allocates nothing but what the kernels' thread pool keeps as scratch; all other scratch is part of
//! the arena. Packed weights are the exception by design: they are made at first use and stay with the weight set.

use std::sync::Arc;

use oxidiff_kernels::cpu::KernelError;
use oxidiff_kernels::cpu::tile_exec::Prepared;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;

use super::{Backend, Loaded, Specialized};
use crate::plan::{Plan, Step};
use crate::target::Target;
use crate::{Error, Result};

mod attention;
mod convolution;
mod copy;
mod direct;
mod epilogue;
mod integers;
mod interpret;
mod norm;
mod packing;
mod places;
mod product;
mod read_through;
mod run;
mod specialize;
mod tile;

pub use convolution::weight_strides;
use run::SpecializedCpu;

const NAME: &str = "cpu";

/// The backend.
#[derive(Clone, Debug)]
pub struct Cpu {
    target: Target,
}

impl Cpu {
    /// For the processor this runs on.
    pub fn new() -> Self {
        if let Some(threads) = crate::config::config().num_threads {
            Pool::global().set_threads(threads);
        }
        Self { target: Target::host() }
    }
}

impl Default for Cpu {
    fn default() -> Self {
        Self::new()
    }
}

/// Threads of the backend; 0 means one per core. `OXIDIFF_NUM_THREADS` wins over both.
pub fn set_num_threads(threads: usize) {
    let forced = crate::config::config().num_threads;
    let threads = forced.unwrap_or(match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    });
    Pool::global().set_threads(threads);
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        NAME
    }

    fn target(&self) -> Target {
        self.target.clone()
    }

    fn check(&self, plan: &Plan) -> Result<()> {
        crate::plan::verify::verify(plan)
    }

    fn load(&self, plan: Arc<Plan>) -> Result<Box<dyn Loaded>> {
        Ok(Box::new(LoadedCpu(Arc::new(Program::new(plan)?))))
    }
}

/// A plan with its tile programs prepared.
struct Program {
    plan: Arc<Plan>,
    places: places::Places,
    isa: Isa,
    /// One per step.
    bodies: Vec<Option<Arc<Prepared>>>,
    /// One per step of [`Plan::prepare`].
    prepare_bodies: Vec<Option<Arc<Prepared>>>,
}

impl Program {
    fn new(plan: Arc<Plan>) -> Result<Self> {
        let isa = plan.target.isa;
        let bodies = |steps: &[Step]| {
            let body = |step: &Step| match &step.body {
                Some(body) => Prepared::new(&body.program, isa)
                    .map(|p| Some(Arc::new(p)))
                    .map_err(|e| Error::Backend { backend: NAME, what: format!("{}: {e}", plan.step_name(step)) }),
                None => Ok(None),
            };
            steps.iter().map(body).collect::<Result<Vec<_>>>()
        };
        Ok(Self {
            isa,
            places: places::Places::of(&plan)?,
            bodies: bodies(&plan.steps)?,
            prepare_bodies: bodies(&plan.prepare)?,
            plan,
        })
    }
}

struct LoadedCpu(Arc<Program>);

impl Loaded for LoadedCpu {
    fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        Ok(Arc::new(SpecializedCpu::new(self.0.clone(), bindings)?))
    }
}

/// A kernel's refusal as an error of this crate.
pub fn kernel_error(error: KernelError) -> Error {
    match error {
        KernelError::OutOfMemory(e) => {
            Error::OutOfMemory { asked_bytes: e.bytes, what: "scratch memory of a kernel".to_owned() }
        }
        other => Error::Backend { backend: NAME, what: other.to_string() },
    }
}
