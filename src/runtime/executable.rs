//! A program with a weight set: what a compiled module calls.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use oxidiff_kernels::fork::{Mutex, RwLock};

use super::Program;
use super::arena::arena_pool;
use crate::backend::{self, Known, Run, Specialized, StepTime, Tensor, Weight, WeightSet, output_types};
use crate::error::bytes_text;
use crate::ir::DType;
use crate::trace;
use crate::{Error, Result};

/// What a report shows.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Bytes of the user's weights.
    pub weight_bytes: usize,
    /// Bytes of forms derived from them.
    pub derived_bytes: usize,
    /// The same by where they are kept, which executables may share.
    pub derived: Vec<(usize, usize)>,
    /// Workspace of the largest live size.
    pub arena_bytes: usize,
    /// Workspace that the process holds, for all modules together.
    pub pool_bytes: usize,
    /// The most that is alive at one step of the largest live size.
    pub arena_lower_bound_bytes: usize,
    /// Highest arena + derived + graphs seen after a run.
    pub peak_bytes: usize,
    /// Device memory of the graphs of all live sizes.
    pub graph_bytes: usize,
}

/// A step of a call in a line (`OXIDIFF_DEBUG=2`).
fn line_of(step: &StepTime) -> String {
    let seconds = step.time.as_secs_f64().max(1e-9);
    let (flops, bytes) = (step.cost.flops as f64 / seconds * 1e-9, step.cost.bytes as f64 / seconds * 1e-9);
    let StepTime { step, kernel, dtype, .. } = step;
    format!("{step} ({kernel}, {dtype}): {:.3} ms, {flops:.1} GFLOP/s, {bytes:.1} GB/s", seconds * 1e3)
}

/// Executables of this process. When the last one goes, so does the idle workspace.
static LIVE: AtomicUsize = AtomicUsize::new(0);

/// A program with its weights. Any number of threads may run one.
pub struct Executable {
    program: Arc<Program>,
    weights: RwLock<Arc<WeightSet>>,
    peak_bytes: AtomicUsize,
    /// The specialization that ran last.
    latest: Mutex<Option<Weak<dyn Specialized>>>,
}

impl Executable {
    /// Binds one tensor per weight slot, in slot order.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first slots whose shape or type differ.
    pub fn new(program: Arc<Program>, weights: Vec<Weight>) -> Result<Self> {
        let weights = Arc::new(WeightSet::new(&program.plan, weights, Known::default())?);
        program.users.fetch_add(1, Ordering::Relaxed);
        LIVE.fetch_add(1, Ordering::Relaxed);
        Ok(Self { program, weights: RwLock::new(weights), peak_bytes: AtomicUsize::new(0), latest: Mutex::new(None) })
    }

    /// Its program.
    pub fn program(&self) -> &Arc<Program> {
        &self.program
    }

    /// The weight set in force.
    pub fn weights(&self) -> Arc<WeightSet> {
        self.weights.read().clone()
    }

    fn swap(&self, weights: WeightSet) {
        *self.weights.write() = Arc::new(weights);
    }

    /// Swaps the weights; running calls finish with those they began with, and derived forms of tensors that did not change
    /// stay. `changed`, `suspects` and `since` are as in [`Known`].
    ///
    /// # Errors
    /// As [`Executable::new`]; the old set stays in force.
    pub fn set_weights(&self, weights: Vec<Weight>, changed: &[usize], suspects: &[usize], since: u64) -> Result<()> {
        let before = self.weights();
        let known = Known { previous: Some(&before), changed, suspects, since };
        self.swap(WeightSet::new(&self.program.plan, weights, known)?);
        Ok(())
    }

    /// The contents of these slots changed in place: what was derived from them is made anew.
    ///
    /// # Errors
    /// None that binding the weights did not have.
    pub fn invalidate(&self, slots: &[usize]) -> Result<()> {
        let fresh = self.weights().without(&self.program.plan, slots)?;
        self.swap(fresh);
        Ok(())
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
        // SAFETY: the caller's promise.
        unsafe { self.run_on(0, inputs, outputs, bindings, profile) }
    }

    /// Runs on a stream, where the device has streams; the results are there when the stream has come so far.
    ///
    /// # Safety
    /// As [`Executable::run`], until then.
    ///
    /// # Errors
    /// As [`Executable::run`].
    pub unsafe fn run_on(
        &self,
        stream: usize,
        inputs: &[Tensor],
        outputs: &[Tensor],
        bindings: &[i64],
        profile: Option<&mut Vec<StepTime>>,
    ) -> Result<()> {
        self.check_inputs(inputs, bindings)?;
        let is_recorded = self.program.is_recorded(stream)?;
        let specialized = match is_recorded {
            // Libraries that plan load what a capture does not allow.
            true => self.program.live(bindings).ok_or_else(backend::cuda::cold)?,
            false => self.program.specialize(bindings)?,
        };
        let weights = self.weights();
        weights.recheck();
        self.make_room(&weights, &specialized);
        let bytes = specialized.workspace_bytes(&weights);
        let lent = match is_recorded {
            true => self.program.arena().lend_once(bytes),
            false => self.program.arena().lend(bytes, stream),
        };
        let lent = lent.map_err(|e| explain(e, &*specialized, &weights))?;
        let start = Instant::now();
        let (mut shown, is_shown) = (Vec::new(), profile.is_none() && !is_recorded && trace::shows(2));
        let profile = if is_shown { Some(&mut shown) } else { profile };
        let run = Run { inputs, outputs, weights: &weights, arena: lent.ptr(), stream, is_recorded, profile };
        // SAFETY: the caller vouches for inputs and outputs; the weight set owns its tensors; the arena has the size that
        // the specialization asked for and is lent to this run alone.
        unsafe { specialized.run(run)? };
        shown.iter().for_each(|step| trace::debug(2, || line_of(step)));
        let held = bytes + weights.derived_bytes();
        self.program.book(bindings, start.elapsed(), held);
        let peak = held + specialized.graph_bytes();
        self.peak_bytes.fetch_max(peak, Ordering::Relaxed);
        Ok(())
    }

    /// Evicts forms of weights that earlier sizes kept, so that those of this one stay below its limit.
    fn make_room(&self, weights: &WeightSet, specialized: &Arc<dyn Specialized>) {
        // A weak reference, not an address: what is dropped may leave its address to another.
        let known = {
            let mut latest = self.latest.lock();
            let before = latest.replace(Arc::downgrade(specialized));
            before.is_some_and(|before| std::ptr::addr_eq(before.as_ptr(), Arc::as_ptr(specialized)))
        };
        if known || specialized.derived_limit() == usize::MAX {
            return;
        }
        let missing: usize =
            specialized.kept().iter().filter(|form| !weights.touch(form.pack)).map(|form| form.bytes).sum();
        weights.shrink_to(specialized.derived_limit().saturating_sub(missing));
        if let Some(budget) = self.program.plan.options.memory_budget {
            // The arena is that of the largest live size; one that leaves too little room for these forms goes.
            self.program.forget_above(budget.saturating_sub(weights.derived_bytes().saturating_add(missing)));
        }
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

    /// Bytes of derived weights that are held while sizes run for which nothing may have been made yet.
    ///
    /// # Errors
    /// As [`Program::specialize`].
    pub fn derived_bytes_for(&self, bindings: &[i64]) -> Result<usize> {
        let (specialized, weights) = (self.program.peek(bindings)?, self.weights());
        let held = weights.derived_bytes();
        let prepared = if held == 0 { specialized.prepared_bytes() } else { 0 };
        let missing = specialized.kept().iter().filter(|form| !weights.touch(form.pack));
        let all = held + prepared + missing.map(|form| form.bytes).sum::<usize>();
        Ok(all.min(specialized.derived_limit().max(prepared)))
    }

    /// Numbers for the report.
    pub fn stats(&self) -> Stats {
        let weights = self.weights();
        let sizes = self.program.sizes();
        let graph_bytes = sizes.iter().map(|row| row.graph_bytes).sum();
        let largest = sizes.into_iter().max_by_key(|row| row.arena_bytes);
        Stats {
            weight_bytes: weights.weight_bytes(),
            derived_bytes: weights.derived_bytes(),
            derived: weights.derived(),
            arena_bytes: largest.as_ref().map_or(0, |row| row.arena_bytes),
            arena_lower_bound_bytes: largest.map_or(0, |row| row.lower_bound_bytes),
            pool_bytes: self.program.arena().bytes(),
            peak_bytes: self.peak_bytes.load(Ordering::Relaxed),
            graph_bytes,
        }
    }

    /// Drops specializations, derived weights and idle workspace.
    pub fn unload(&self) {
        self.weights().shrink_to(0);
        *self.latest.lock() = None;
        self.program.forget_sizes();
        self.program.arena().trim();
    }
}

/// Says where the bytes would have gone.
fn explain(error: Error, specialized: &dyn Specialized, weights: &WeightSet) -> Error {
    match error {
        Error::OutOfMemory { asked_bytes, what } => {
            let peak = specialized.workspace().peak_text(5);
            let derived = bytes_text(weights.derived_bytes());
            let what = format!("{what} (most {peak}; derived weights hold {derived})");
            Error::OutOfMemory { asked_bytes, what }
        }
        other => other,
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        if self.program.users.fetch_sub(1, Ordering::Relaxed) == 1 {
            // Whoever still holds the program runs nothing: its sizes want no workspace.
            self.program.forget_sizes();
        }
        if LIVE.fetch_sub(1, Ordering::Relaxed) == 1 {
            arena_pool().trim();
        }
    }
}
