//! A program with a weight set: what a compiled module calls.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use super::{ArenaPool, Program};
use crate::backend::{Run, StepTime, SystemMemory, Tensor, WeightSet, output_types};
use crate::ir::DType;
use crate::{Error, Result};

/// The pool that every executable of this process shares.
pub fn arena_pool() -> &'static Arc<ArenaPool> {
    static POOL: OnceLock<Arc<ArenaPool>> = OnceLock::new();
    POOL.get_or_init(|| ArenaPool::new(Box::new(SystemMemory)))
}

/// What a report shows.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Bytes of the user's weights.
    pub weight_bytes: usize,
    /// Bytes of forms derived from them.
    pub derived_bytes: usize,
    /// Bytes of the shared arena.
    pub arena_bytes: usize,
    /// The most that is alive at one step of the largest live size.
    pub arena_lower_bound_bytes: usize,
    /// Highest arena + derived seen after a run.
    pub peak_bytes: usize,
}

/// A program with its weights. Any number of threads may run one.
pub struct Executable {
    program: Arc<Program>,
    weights: RwLock<Arc<WeightSet>>,
    peak_bytes: AtomicUsize,
}

impl Executable {
    /// Binds one tensor per weight slot, in slot order; `owner` keeps their memory alive.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first slots whose shape or type differ.
    pub fn new(program: Arc<Program>, weights: Vec<Tensor>, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        let weights = Arc::new(WeightSet::new(&program.plan, weights, owner)?);
        program.users.fetch_add(1, Ordering::Relaxed);
        Ok(Self { program, weights: RwLock::new(weights), peak_bytes: AtomicUsize::new(0) })
    }

    /// Its program.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// The weight set in force.
    pub fn weights(&self) -> Arc<WeightSet> {
        self.weights.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn swap(&self, weights: WeightSet) {
        *self.weights.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(weights);
    }

    /// Swaps the weights; running calls finish with those they began with.
    ///
    /// # Errors
    /// As [`Executable::new`]; the old set stays in force.
    pub fn set_weights(&self, weights: Vec<Tensor>, owner: Arc<dyn Any + Send + Sync>) -> Result<()> {
        self.swap(WeightSet::new(&self.program.plan, weights, owner)?);
        Ok(())
    }

    /// The contents of these slots changed in place: what was derived from them is made anew.
    pub fn invalidate(&self, slots: &[usize]) {
        let fresh = self.weights().without(&self.program.plan, slots);
        self.swap(fresh);
    }

    /// Types and sizes of the results for these values of the symbols.
    ///
    /// # Errors
    /// If a size is not an integer or overflows.
    pub fn output_types(&self, bindings: &[i64]) -> Result<Vec<(DType, Vec<i64>)>> {
        output_types(&self.program.plan, bindings)
    }

    /// Runs.
    ///
    /// # Safety
    /// Every tensor's memory must be valid for its type, shape and strides while the call lasts; outputs must be dense,
    /// writable, not overlapping each other or anything else.
    ///
    /// # Errors
    /// [`Error::Invalid`] if arguments do not have the shapes that the graph expects at these sizes;
    /// [`Error::OutOfMemory`]; [`Error::Backend`].
    pub unsafe fn run(
        &self,
        inputs: &[Tensor],
        outputs: &[Tensor],
        bindings: &[i64],
        profile: Option<&mut Vec<StepTime>>,
    ) -> Result<()> {
        self.check_inputs(inputs, bindings)?;
        let specialized = self.program.specialize(bindings)?;
        let weights = self.weights();
        let arena = arena_pool().lend(specialized.arena_bytes())?;
        let start = Instant::now();
        // SAFETY: the caller vouches for inputs and outputs; the weight set owns its tensors; the arena has the size that
        // the specialization asked for and is lent to this run alone.
        unsafe { specialized.run(Run { inputs, outputs, weights: &weights, arena: arena.ptr(), profile })? };
        self.program.book(bindings, start.elapsed());
        self.peak_bytes.fetch_max(arena_pool().bytes() + weights.derived_bytes(), Ordering::Relaxed);
        Ok(())
    }

    fn check_inputs(&self, inputs: &[Tensor], bindings: &[i64]) -> Result<()> {
        let graph = &self.program.plan.graph;
        if inputs.len() != graph.inputs.len() || bindings.len() != graph.symbols.len() {
            return Err(Error::invalid(format!(
                "the program takes {} arguments and {} sizes, and got {} and {}",
                graph.inputs.len(),
                graph.symbols.len(),
                inputs.len(),
                bindings.len()
            )));
        }
        for (declared, given) in graph.inputs.iter().zip(inputs) {
            let fits = given.dtype == declared.ty.dtype
                && given.shape.len() == declared.ty.rank()
                && declared.ty.shape.iter().zip(&given.shape).all(|(d, g)| d.eval(bindings).is_ok_and(|d| d == *g));
            if !fits {
                let (name, want) = (&declared.name, &declared.ty);
                return Err(Error::invalid(format!(
                    "argument `{name}` is {}{:?}, not {want}",
                    given.dtype, given.shape
                )));
            }
        }
        Ok(())
    }

    /// Numbers for the report.
    pub fn stats(&self) -> Stats {
        let weights = self.weights();
        let largest = self.program.sizes().into_iter().max_by_key(|row| row.arena_bytes);
        Stats {
            weight_bytes: weights.weight_bytes(),
            derived_bytes: weights.derived_bytes(),
            arena_bytes: arena_pool().bytes(),
            arena_lower_bound_bytes: largest.map_or(0, |row| row.lower_bound_bytes),
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed),
        }
    }

    /// Drops specializations, derived weights and idle workspace.
    pub fn unload(&self) {
        let bare = self.weights().bare(&self.program.plan);
        self.swap(bare);
        self.program.forget_sizes();
        arena_pool().trim();
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        self.program.users.fetch_sub(1, Ordering::Relaxed);
    }
}
