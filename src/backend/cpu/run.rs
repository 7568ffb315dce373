//! A specialized plan: calls in order, and a run of them over lent memory.

use std::sync::Arc;
use std::time::Instant;

use oxidiff_kernels::cpu::conv_winograd::Room;
use oxidiff_kernels::cpu::tile_exec::Prepared;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;

use super::packing::{self, Keeps};
use super::read_through::{self, Pair, Way};
use super::specialize::{Maker, Role, Through};
use super::{NAME, Program, convolution, copy};
use crate::backend::derived::Form;
use crate::backend::tensor::{Block, Memory, SystemMemory, Tensor};
use crate::backend::weights::WeightSet;
use crate::backend::{Cost, KeptForm, Open, Run, Specialized, StepTime};
use crate::memory::ALIGN_BYTES;
use crate::plan::{Access, BufferKind, Plan, Scratch, Step, Workspace};
use crate::{Error, Result};

/// An address to be: a buffer (or scratch buffer) and bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub buffer: usize,
    pub offset: isize,
}

/// What a call needs besides its arguments.
pub(super) struct Ctx<'a> {
    bases: &'a [*mut u8],
    pub pool: &'a Pool,
    pub isa: Isa,
    pub weights: &'a WeightSet,
    pub plan: &'a Plan,
    pub bindings: &'a [i64],
}

impl Ctx<'_> {
    pub fn at(&self, slot: Slot) -> *mut u8 {
        self.bases[slot.buffer].wrapping_offset(slot.offset)
    }
}

/// One kernel call with concrete arguments.
pub(super) trait Call: Send + Sync {
    /// # Safety
    /// Every buffer that the step reads or writes must be behind its address in `ctx`.
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()>;

    /// The convolution, if that is what it is.
    fn convolution(&self) -> Option<Open> {
        None
    }

    /// The share of its products that it computes.
    fn products(&self) -> f64 {
        1.0
    }
}

/// A step that has nothing to do at these sizes.
struct Nothing;

impl Call for Nothing {
    unsafe fn run(&self, _ctx: &Ctx<'_>) -> Result<()> {
        Ok(())
    }
}

/// The plan for concrete sizes.
pub(super) struct SpecializedCpu {
    program: Arc<Program>,
    bindings: Vec<i64>,
    workspace: Workspace,
    calls: Vec<Box<dyn Call>>,
    prepare: Vec<Box<dyn Call>>,
    kept: Vec<KeptForm>,
    derived_limit: usize,
    /// Norms that convolutions read through.
    read_through: Vec<Pair>,
    /// Bytes from the arena's start, for each buffer and scratch buffer; `None` for what lies elsewhere.
    offsets: Vec<Option<usize>>,
    /// Sizes of the inputs of [`Places`](super::places::Places), then of the outputs.
    shapes: Vec<Vec<i64>>,
}

/// What addresses of a run point into.
#[derive(Default)]
struct Held {
    copies: Vec<Block>,
    forms: Vec<Arc<Form>>,
}

/// How steps are called, and the memory they need.
#[derive(Default)]
struct Calls {
    calls: Vec<Box<dyn Call>>,
    scratch: Vec<Scratch>,
    kept: Vec<KeptForm>,
    pairs: Vec<(Pair, Way)>,
}

/// What the calls of all steps are made with.
#[derive(Clone, Copy)]
struct Making<'a> {
    program: &'a Program,
    bindings: &'a [i64],
    /// Bytes of forms that may be kept between runs.
    limit: usize,
    room: Room,
    preparing: bool,
}

impl<'a> Making<'a> {
    fn steps(&self) -> impl Iterator<Item = (usize, &'a Step, Option<&'a Arc<Prepared>>)> + use<'a> {
        let program = self.program;
        let (steps, bodies) = match self.preparing {
            true => (&program.plan.prepare, &program.prepare_bodies),
            false => (&program.plan.steps, &program.bodies),
        };
        steps.iter().zip(bodies).enumerate().map(|(at, (step, body))| (at, step, body.as_ref()))
    }

    fn is_empty(&self, step: &Step) -> bool {
        let is_empty = |store: &Access| store.shape.iter().any(|d| d.eval(self.bindings).is_ok_and(|d| d == 0));
        !step.stores.is_empty() && step.stores.iter().all(is_empty)
    }

    fn maker<'b>(
        &self,
        (at, step, body): (usize, &'b Step, Option<&'b Arc<Prepared>>),
        keeps: &'b Keeps,
        scratch: &'b mut Vec<Scratch>,
    ) -> Maker<'b>
    where
        'a: 'b,
    {
        let Self { program, bindings, room, preparing, .. } = *self;
        Maker { program, bindings, step, body, at, scratch, keeps, room, preparing, role: Role::Alone }
    }

    fn keeps(&self) -> Result<Keeps> {
        if self.limit == 0 {
            return Ok(Keeps::default());
        }
        let (none, mut unused, mut offers) = (Keeps::default(), Vec::new(), Vec::new());
        for it in self.steps().filter(|it| it.1.pack.is_some() && !self.is_empty(it.1)) {
            let found = self.maker(it, &none, &mut unused).candidates()?;
            offers.extend(found.into_iter().map(|candidate| (it.0, candidate)));
        }
        Ok(Keeps::choose(offers, self.program.plan.steps.len(), self.limit))
    }

    fn calls(&self) -> Result<Calls> {
        let keeps = self.keeps()?;
        let pairs = self.pairs(&keeps)?;
        let mut made = Calls { kept: keeps.forms(), pairs, ..Calls::default() };
        for it in self.steps() {
            made.calls.push(match self.is_empty(it.1) {
                true => Box::new(Nothing),
                false => {
                    let role = self.role(it.0, &made.pairs)?;
                    Maker { role, ..self.maker(it, &keeps, &mut made.scratch) }.make()?
                }
            });
        }
        Ok(made)
    }

    fn role(&self, at: usize, pairs: &[(Pair, Way)]) -> Result<Role<'a>> {
        if pairs.iter().any(|(pair, _)| pair.norm == at) {
            return Ok(Role::ReadThrough);
        }
        let Some(&(pair, way)) = pairs.iter().find(|(pair, _)| pair.convolution == at) else { return Ok(Role::Alone) };
        let (norm, body) = (&self.program.plan.steps[pair.norm], &self.program.bodies[pair.norm]);
        let missing =
            || Error::Backend { backend: NAME, what: "a norm without a body is to be read through".to_owned() };
        Ok(Role::Reads(Through { norm, body: body.as_ref().ok_or_else(missing)?, way }))
    }

    /// The norms that convolutions read through at these sizes, each with how.
    fn pairs(&self, keeps: &Keeps) -> Result<Vec<(Pair, Way)>> {
        let (mut pairs, mut unused) = (Vec::new(), Vec::new());
        for it in self.steps().filter(|it| !self.preparing && !self.is_empty(it.1)) {
            let Some(pair) = self.program.places.pairs.iter().find(|pair| pair.convolution == it.0) else { continue };
            let is_empty = self.is_empty(&self.program.plan.steps[pair.norm]);
            if let Some(way) = convolution::way(&self.maker(it, keeps, &mut unused))?.filter(|_| !is_empty) {
                pairs.push((*pair, way));
            }
        }
        Ok(pairs)
    }
}

/// Lists that a call holds beside itself, on average.
const CALL_HEAP_BYTES: usize = 512;

/// Times that the limit of kept forms is lowered before nothing is kept.
const MAX_ATTEMPTS: usize = 4;

/// Calls, workspace and limit of kept forms that fit the plan's memory budget together with the `always` bytes that are
/// held anyway: convolutions take less memory first, then kept forms go, then chunks get smaller.
fn fitting(mut making: Making<'_>, always: usize) -> Result<(Calls, Workspace, usize)> {
    let plan = &making.program.plan;
    let mut attempts = 0;
    loop {
        let calls = making.calls()?;
        let arena = read_through::arena(plan, &making.program.places.arena, &calls.pairs);
        let workspace = Workspace::of_ranges(plan, &arena, making.bindings, &calls.scratch)?;
        let kept: usize = calls.kept.iter().map(|form| form.bytes).sum();
        let asked_bytes = workspace.bytes().saturating_add(kept).saturating_add(always);
        let Some(allowed_bytes) = plan.options.memory_budget.filter(|&budget| asked_bytes > budget) else {
            let room = plan.options.memory_budget.map_or(usize::MAX, |b| b.saturating_sub(workspace.bytes()));
            return Ok((calls, workspace, making.limit.saturating_add(always).min(room)));
        };
        if making.room == Room::Ample {
            making.room = Room::Middle;
        } else if kept > 0 {
            let less = kept.saturating_sub(asked_bytes - allowed_bytes);
            attempts += 1;
            making.limit = if attempts < MAX_ATTEMPTS { less.min(making.limit) } else { 0 };
        } else if making.room != Room::Slim {
            making.room = Room::Slim;
        } else {
            return Err(Error::OverBudget { asked_bytes, allowed_bytes, what: workspace.peak_text(5) });
        }
    }
}

impl SpecializedCpu {
    pub fn new(program: Arc<Program>, bindings: &[i64]) -> Result<Self> {
        let plan = program.plan.clone();
        let always = program.places.derived_bytes;
        let making = Making {
            program: &program,
            bindings,
            limit: packing::limit(plan.options.memory, always),
            room: Room::Ample,
            preparing: false,
        };
        let prepare = Making { limit: 0, preparing: true, ..making }.calls()?;
        if !prepare.scratch.is_empty() {
            return Err(Error::Backend { backend: NAME, what: "a preparing step asks for scratch memory".to_owned() });
        }
        let (Calls { calls, scratch, kept, pairs }, workspace, limit) = fitting(making, always)?;
        let mut offsets = vec![None; plan.buffers.len() + scratch.len()];
        let own = workspace.buffers.iter().map(|id| id.index());
        let extra = plan.buffers.len()..plan.buffers.len() + scratch.len();
        own.chain(extra).zip(&workspace.layout.offsets).for_each(|(at, &offset)| offsets[at] = Some(offset));
        let ends = program.places.inputs.iter().chain(&program.places.outputs);
        let shapes =
            ends.map(|&(b, _)| plan.graph.ty(plan.buffers[b].value).concrete(bindings)).collect::<Result<_>>()?;
        Ok(Self {
            bindings: bindings.to_vec(),
            program,
            workspace,
            calls,
            kept,
            derived_limit: limit,
            read_through: pairs.into_iter().map(|(pair, _)| pair).collect(),
            prepare: prepare.calls,
            offsets,
            shapes,
        })
    }

    /// Addresses of all buffers. Strided inputs are copied; parameters that a step reads directly must be dense, and are
    /// copied once per content if they are not. `held` receives what the addresses point into.
    fn bases(&self, run: &Run<'_>, held: &mut Held) -> Result<Vec<*mut u8>> {
        let mut bases: Vec<*mut u8> = self
            .offsets
            .iter()
            .map(|o| o.map_or(std::ptr::null_mut(), |offset| run.arena.wrapping_add(offset)))
            .collect();
        for (&(buffer, index), shape) in self.program.places.inputs.iter().zip(&self.shapes) {
            let tensor = run.inputs.get(index).ok_or_else(|| missing("input", index))?;
            self.check_shape(tensor, buffer, shape, "input")?;
            bases[buffer] = if tensor.is_dense() {
                tensor.ptr
            } else {
                let copy = densify(tensor, "a dense copy of an input")?;
                let ptr = copy.ptr();
                held.copies.push(copy);
                ptr
            };
        }
        for (&(buffer, index), shape) in
            self.program.places.outputs.iter().zip(&self.shapes[self.program.places.inputs.len()..])
        {
            let tensor = run.outputs.get(index).ok_or_else(|| missing("output", index))?;
            self.check_shape(tensor, buffer, shape, "output")?;
            if !tensor.is_dense() {
                return Err(Error::Backend { backend: NAME, what: format!("output {index} is not dense") });
            }
            bases[buffer] = tensor.ptr;
        }
        for &(buffer, index) in &self.program.places.parameters {
            let tensor = run.weights.tensor(index).ok_or_else(|| missing("weight", index))?;
            bases[buffer] = match run.weights.is_dense(index) || !self.program.places.read[buffer] {
                true => tensor.ptr,
                false => {
                    let form = run.weights.dense(index, &mut || densify(tensor, "a dense copy of a weight"))?;
                    let ptr = form.ptr();
                    held.forms.push(form);
                    ptr
                }
            };
        }
        for &(buffer, index) in &self.program.places.constants {
            bases[buffer] = self.program.plan.graph.constants[index].bytes.as_ptr().cast_mut();
        }
        Ok(bases)
    }

    fn check_shape(&self, tensor: &Tensor, buffer: usize, shape: &[i64], what: &str) -> Result<()> {
        let dtype = self.program.plan.buffers[buffer].dtype;
        if tensor.dtype != dtype || tensor.shape != shape {
            let got = format!("{}{:?}", tensor.dtype, tensor.shape);
            return Err(Error::invalid(format!("{what}: expected {dtype}{shape:?}, got {got}")));
        }
        Ok(())
    }

    /// Computes what depends on weights alone, once per contents of the weights.
    unsafe fn prepare(&self, bases: &mut [*mut u8], weights: &WeightSet, held: &mut Held) -> Result<()> {
        if self.program.places.derived.is_empty() {
            return Ok(());
        }
        let places = &self.program.places;
        let place = |bases: &mut [*mut u8], buffers: &[(usize, usize)], block: *mut u8| {
            buffers.iter().for_each(|&(buffer, offset)| bases[buffer] = block.wrapping_add(offset));
        };
        let form = weights.prepared(&mut || {
            let block = SystemMemory.allocate(places.derived_bytes, "values derived from weights")?;
            let passing = SystemMemory.allocate(places.passing_bytes, "what leads to values derived from weights")?;
            let mut all = bases.to_vec();
            place(&mut all, &places.derived, block.ptr());
            place(&mut all, &places.passing, passing.ptr());
            let ctx = self.ctx(&all, weights);
            // SAFETY: parameters and constants are valid by the caller's promise, the others were just made, and outlive this.
            self.prepare.iter().try_for_each(|call| unsafe { call.run(&ctx) })?;
            Ok(block)
        })?;
        place(bases, &places.derived, form.ptr());
        held.forms.push(form);
        Ok(())
    }

    fn ctx<'a>(&'a self, bases: &'a [*mut u8], weights: &'a WeightSet) -> Ctx<'a> {
        Ctx {
            bases,
            pool: Pool::global(),
            isa: self.program.isa,
            weights,
            plan: &self.program.plan,
            bindings: &self.bindings,
        }
    }

    /// Says which step a backend's error comes from.
    fn at_step(&self, at: usize, error: Error) -> Error {
        let plan = &self.program.plan;
        let name = plan.step_name(&plan.steps[at]);
        match error {
            Error::Backend { backend, what } => Error::Backend { backend, what: format!("{name}: {what}") },
            Error::OutOfMemory { asked_bytes, what } => {
                Error::OutOfMemory { asked_bytes, what: format!("{what} ({name})") }
            }
            other => other,
        }
    }

    fn cost(&self, at: usize) -> Cost {
        let steps = &self.program.plan.steps;
        let step = &steps[at];
        let is_norm = self.read_through.iter().any(|pair| pair.norm == at);
        let norm = self.read_through.iter().find(|pair| pair.convolution == at).map(|pair| &steps[pair.norm]);
        let cost = match norm {
            _ if is_norm => Cost::of(step, &step.operands, &self.bindings),
            None => Cost::of(step, step.accesses(), &self.bindings),
            // First of what it touches is the norm's result: in the place of that what the norm reads.
            Some(norm) => Cost::of(step, step.accesses().skip(1).chain(&norm.loads), &self.bindings),
        }
        .unwrap_or_default();
        Cost { work: (cost.flops as f64 * self.calls[at].products()) as u64, ..cost }
    }

    fn time(&self, at: usize, start: Instant) -> StepTime {
        let time = start.elapsed();
        let plan = &self.program.plan;
        let step = &plan.steps[at];
        StepTime {
            step: plan.step_name(step),
            kernel: step.kernel.name(),
            module: plan.graph.path(step.value).to_owned(),
            dtype: plan.graph.ty(step.value).dtype,
            time,
            cost: self.cost(at),
        }
    }
}

fn missing(what: &str, index: usize) -> Error {
    Error::Backend { backend: NAME, what: format!("{what} {index} is missing") }
}

/// A dense copy of a strided tensor.
fn densify(tensor: &Tensor, what: &str) -> Result<Block> {
    let block = SystemMemory.allocate(tensor.bytes(), what)?;
    let shape: Vec<usize> = tensor.shape.iter().map(|&d| usize::try_from(d).unwrap_or(0)).collect();
    let strides: Vec<isize> = tensor.strides.iter().map(|&s| s as isize).collect();
    // SAFETY: the source is valid for its shape and strides by the caller's promise, the block holds a dense copy.
    unsafe {
        copy::copy_strided(tensor.dtype.size_bytes(), &shape, tensor.ptr, &strides, block.ptr(), &copy::dense(&shape))
    };
    Ok(block)
}

impl Specialized for SpecializedCpu {
    fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    fn kept(&self) -> &[KeptForm] {
        &self.kept
    }

    fn derived_limit(&self) -> usize {
        self.derived_limit
    }

    fn prepared_bytes(&self) -> usize {
        self.program.places.derived_bytes
    }

    fn costs(&self) -> Vec<Cost> {
        (0..self.program.plan.steps.len()).map(|at| self.cost(at)).collect()
    }

    fn choices(&self) -> Vec<Open> {
        // Where eager's rounding is asked for there is one form only.
        match self.program.plan.options.exact {
            true => Vec::new(),
            false => self.calls.iter().filter_map(|call| call.convolution()).collect(),
        }
    }

    fn host_bytes(&self) -> usize {
        let calls = self.calls.iter().chain(&self.prepare).map(|call| std::mem::size_of_val(&**call) + CALL_HEAP_BYTES);
        let requests = self.workspace.requests.len() * (size_of::<crate::memory::Request>() + 2 * size_of::<usize>());
        calls.sum::<usize>() + requests + self.offsets.len() * size_of::<Option<usize>>()
    }

    unsafe fn run(&self, run: Run<'_>) -> Result<()> {
        if !run.arena.addr().is_multiple_of(ALIGN_BYTES) {
            return Err(Error::Backend { backend: NAME, what: "the arena is not aligned".to_owned() });
        }
        let mut held = Held::default();
        let mut bases = self.bases(&run, &mut held)?;
        // SAFETY: the caller's promise.
        unsafe { self.prepare(&mut bases, run.weights, &mut held)? };
        let ctx = self.ctx(&bases, run.weights);
        let mut profile = run.profile;
        for (at, call) in self.calls.iter().enumerate() {
            let start = profile.is_some().then(Instant::now);
            // SAFETY: every buffer is behind its address.
            unsafe { call.run(&ctx).map_err(|e| self.at_step(at, e))? };
            if let (Some(start), Some(profile)) = (start, profile.as_deref_mut()) {
                profile.push(self.time(at, start));
            }
        }
        Ok(())
    }
}

/// Whether an access names the whole of a weight slot as it is.
pub(super) fn whole_parameter(plan: &Plan, access: &Access) -> Option<usize> {
    let buffer = &plan.buffers[access.buffer.index()];
    match buffer.kind {
        BufferKind::Parameter(slot) if access.is_whole(plan.graph.ty(buffer.value)) => Some(slot as usize),
        _ => None,
    }
}
