//! A specialized plan: launches with numbers for sizes, and a run of them over lent memory.
//!
//! The first run launches kernel by kernel. The second makes a CUDA graph of the same launches; from then on a run is one
//! graph launch, after new arguments for those kernels whose addresses have changed (the caller's tensors, another arena,
//! other weights). Runs that the caller captures stay launches. Scalars and sizes never change: they are the specialization.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::driver::{Function, Graph, GraphLaunch, StreamHandle, launch};
use super::lower::{self, DENSIFY_DIMS, Launch, Launches, Place};
use super::{Entry, NAME, Program, cold, streams};
use crate::backend::derived::Form;
use crate::backend::tensor::{Block, Tensor};
use crate::backend::{Run, Specialized, StepTime};
use crate::codegen::cuda::{Arg, GEMV_ROWS, Geometry, chunk_count, chunk_pixels};
use crate::memory::ALIGN_BYTES;
use crate::plan::workspace::{Scratch, Workspace};
use crate::plan::{BufferKind, Step};
use crate::{Error, Result};

/// A parameter word.
#[derive(Clone, Copy, Debug)]
enum Word {
    /// Address of an operand: index into [`Call::places`].
    Pointer(usize),
    /// A number; an f32 by its bits.
    Number(u64),
}

/// Geometry of a vector form, and the operands whose addresses must be multiples of that many bytes.
type Wide = (Geometry, Vec<(usize, usize)>);

/// A launch with numbers in it.
#[derive(Debug)]
struct Call {
    /// The step it is a part of.
    step: usize,
    entry: Entry,
    words: Vec<Word>,
    /// Buffer (scratch follows the plan's) and bytes from its start; `None` for an operand that is not there.
    places: Vec<Option<(usize, isize)>>,
    plain: Geometry,
    /// The vector form, where sizes and strides allow it.
    vector: Option<Wide>,
}

/// A call with addresses.
struct Bound {
    function: Function,
    geometry: Geometry,
    words: Vec<u64>,
}

impl Bound {
    fn in_graph(&mut self) -> GraphLaunch<'_> {
        GraphLaunch { function: self.function, geometry: self.geometry, args: &mut self.words }
    }
}

impl Call {
    fn bind(&self, bases: &[u64]) -> Bound {
        let at = |place: &Option<(usize, isize)>| {
            place.map_or(0, |(buffer, offset)| bases[buffer].wrapping_add_signed(offset as i64))
        };
        let words = self.words.iter().map(|w| match *w {
            Word::Pointer(operand) => at(&self.places[operand]),
            Word::Number(n) => n,
        });
        let is_aligned = |(operand, bytes): &(usize, usize)| at(&self.places[*operand]).is_multiple_of(*bytes as u64);
        let wide = self.vector.as_ref().filter(|(_, aligned)| aligned.iter().all(is_aligned));
        let (function, geometry) = match (wide, self.entry.vector) {
            (Some((geometry, _)), Some(function)) => (function, *geometry),
            _ => (self.entry.scalar, self.plain),
        };
        Bound { function, geometry, words: words.collect() }
    }
}

fn unsigned(value: i64) -> Result<u64> {
    u64::try_from(value).map_err(|_| Error::invalid("a size is negative"))
}

/// Parameters but for addresses.
fn words(args: &[Arg], bindings: &[i64]) -> Result<Vec<Word>> {
    let word = |arg: &Arg| {
        Ok(match arg {
            Arg::Pointer(operand) => Word::Pointer(*operand),
            Arg::Size(dim) => Word::Number(dim.eval(bindings)?.cast_unsigned()),
            Arg::Chunk(pixels) => Word::Number(chunk_pixels(unsigned(pixels.eval(bindings)?)?)),
            Arg::Chunks(pixels) => Word::Number(chunk_count(unsigned(pixels.eval(bindings)?)?)),
            Arg::Float(bits) => Word::Number(u64::from(*bits)),
        })
    };
    args.iter().map(word).collect()
}

/// Geometry of the vector form and what it asks of addresses; `None` where sizes or strides do not allow it.
fn vector_form(launch: &Launch, bindings: &[i64]) -> Result<Option<Wide>> {
    let Some(vector) = &launch.vector else { return Ok(None) };
    let width = vector.width as i64;
    if vector.cols.eval(bindings)? % width != 0 {
        return Ok(None);
    }
    let mut aligned = Vec::with_capacity(vector.operands.len());
    for (operand, size, strides) in &vector.operands {
        for stride in strides {
            if stride.eval(bindings)? % width != 0 {
                return Ok(None);
            }
        }
        aligned.push((*operand, (size * vector.width).min(16)));
    }
    Ok(launch.grid.geometry(bindings, vector.width)?.map(|geometry| (geometry, aligned)))
}

/// What addresses of a run point into.
#[derive(Default)]
struct Held {
    copies: Vec<Block>,
    forms: Vec<Arc<Form>>,
    constants: Option<Arc<[Block]>>,
}

/// The graph of a specialization for one stream, and what it was last told.
struct Replay {
    stream: StreamHandle,
    graph: Graph,
    bases: Vec<u64>,
}

/// Most streams for which a specialization keeps a graph: each has a workspace of its own, and telling a graph of another
/// one is dearer than a second graph.
const REPLAYS: usize = 4;

/// The graphs of a specialization, the one used last at the end.
#[derive(Default)]
struct Replays {
    runs: usize,
    of: Vec<Replay>,
}

/// The plan for concrete sizes.
pub(super) struct SpecializedCuda {
    program: Arc<Program>,
    workspace: Workspace,
    calls: Vec<Call>,
    prepare: Vec<Call>,
    /// Bytes from the arena's start, for each buffer and scratch buffer; `None` for what lies elsewhere.
    offsets: Vec<Option<usize>>,
    /// Derived buffers, and where each starts in the block that holds them all.
    derived: Vec<(usize, usize)>,
    derived_bytes: usize,
    /// Sizes of inputs and outputs, by buffer.
    shapes: Vec<Option<Vec<i64>>>,
    costs: Vec<(u64, u64)>,
    replays: Mutex<Replays>,
}

/// Makes the calls of steps.
struct Maker<'a> {
    program: &'a Program,
    bindings: &'a [i64],
    scratch: Vec<Scratch>,
}

impl Maker<'_> {
    fn scratch_bytes(&self, scratch: &lower::Scratch) -> Result<usize> {
        let lower::Scratch::Moments { sets, pixels } = scratch;
        let chunks = chunk_count(unsigned(pixels.eval(self.bindings)?)?);
        let floats = unsigned(sets.eval(self.bindings)?)?.saturating_mul(chunks).saturating_mul(3);
        usize::try_from(floats.saturating_mul(4)).map_err(|_| Error::invalid("scratch memory overflows"))
    }

    fn step(&mut self, at: usize, step: &Step, launches: &Launches, calls: &mut Vec<Call>) -> Result<()> {
        let empty = step.stores.iter().map(|s| s.concrete(self.bindings)).all(|s| s.is_ok_and(|s| s.numel() == 0));
        if empty {
            return Ok(());
        }
        let first = self.program.plan.buffers.len() + self.scratch.len();
        for scratch in &launches.scratch {
            let bytes = self.scratch_bytes(scratch)?;
            self.scratch.push(Scratch { step: at, bytes, what: "moments" });
        }
        let mut skip = false;
        for launch in &launches.launches {
            if std::mem::take(&mut skip) {
                continue;
            }
            if let Some(rows) = &launch.few_rows {
                if rows.eval(self.bindings)? > GEMV_ROWS as i64 {
                    continue;
                }
                skip = true;
            }
            let Some(plain) = launch.grid.geometry(self.bindings, 1)? else { continue };
            let place = |place: &Place| {
                Ok(match place {
                    Place::Buffer(buffer, offset, size) => {
                        Some((buffer.index(), offset.eval(self.bindings)? as isize * *size as isize))
                    }
                    Place::Scratch(index) => Some((first + index, 0)),
                    Place::Missing => None,
                })
            };
            calls.push(Call {
                step: at,
                entry: self.program.entries[launch.kernel],
                words: words(&launch.args, self.bindings)?,
                places: launch.places.iter().map(place).collect::<Result<_>>()?,
                plain,
                vector: vector_form(launch, self.bindings)?,
            });
        }
        Ok(())
    }
}

impl SpecializedCuda {
    pub fn new(program: Arc<Program>, bindings: &[i64]) -> Result<Self> {
        let plan = program.plan.clone();
        let named = |step: &Step, e: Error| match e {
            Error::Backend { backend, what } => {
                Error::Backend { backend, what: format!("{}: {what}", plan.step_name(step)) }
            }
            other => other,
        };
        let mut maker = Maker { program: &program, bindings, scratch: Vec::new() };
        let (mut calls, mut prepare) = (Vec::new(), Vec::new());
        for (at, (step, launches)) in plan.steps.iter().zip(&program.lowered.steps).enumerate() {
            maker.step(at, step, launches, &mut calls).map_err(|e| named(step, e))?;
        }
        let scratch = std::mem::take(&mut maker.scratch);
        for (at, (step, launches)) in plan.prepare.iter().zip(&program.lowered.prepare).enumerate() {
            maker.step(at, step, launches, &mut prepare).map_err(|e| named(step, e))?;
        }
        if !maker.scratch.is_empty() {
            return Err(Error::Backend { backend: NAME, what: "a preparing step asks for scratch memory".to_owned() });
        }
        let workspace = Workspace::of(&plan, bindings, &scratch)?;
        let mut offsets = vec![None; plan.buffers.len() + scratch.len()];
        let own = workspace.buffers.iter().map(|id| id.index());
        let extra = plan.buffers.len()..plan.buffers.len() + scratch.len();
        own.chain(extra).zip(&workspace.layout.offsets).for_each(|(at, &offset)| offsets[at] = Some(offset));
        let shape = |b: &crate::plan::Buffer| match b.kind {
            BufferKind::Input(_) | BufferKind::Output(_) => plan.graph.ty(b.value).concrete(bindings).map(Some),
            _ => Ok(None),
        };
        let shapes = plan.buffers.iter().map(shape).collect::<Result<_>>()?;
        let (mut derived, mut derived_bytes) = (Vec::new(), 0usize);
        for (at, buffer) in plan.buffers.iter().enumerate().filter(|(_, b)| b.kind == BufferKind::Derived) {
            derived.push((at, derived_bytes));
            let bytes = usize::try_from(buffer.numel.eval(&[])?).unwrap_or(0) * buffer.dtype.size_bytes();
            derived_bytes += bytes.next_multiple_of(ALIGN_BYTES);
        }
        let cost = |s: &Step| -> Result<(u64, u64)> {
            let bytes = s.accesses().map(|a| a.concrete(bindings).map(|c| c.bytes() as u64));
            Ok((unsigned(s.flops.eval(bindings)?)?, bytes.sum::<Result<u64>>()?))
        };
        let costs = plan.steps.iter().map(cost).collect::<Result<_>>()?;
        let replays = Mutex::default();
        Ok(Self { program, workspace, calls, prepare, offsets, derived, derived_bytes, shapes, costs, replays })
    }

    /// Addresses of all buffers but the derived ones. `held` receives copies of strided arguments, and what else the
    /// addresses point into.
    fn bases(&self, run: &Run<'_>, held: &mut Held) -> Result<Vec<u64>> {
        let plan = &self.program.plan;
        let arena = run.arena.addr();
        let mut bases: Vec<u64> = self.offsets.iter().map(|o| o.map_or(0, |offset| (arena + offset) as u64)).collect();
        for (at, buffer) in plan.buffers.iter().enumerate() {
            bases[at] = match buffer.kind {
                BufferKind::Input(index) => {
                    let tensor = run.inputs.get(index as usize).ok_or_else(|| missing("input", index))?;
                    self.check_shape(at, tensor, "input")?;
                    if tensor.is_dense() {
                        tensor.ptr.addr() as u64
                    } else {
                        let copy = self.densify(tensor, run.stream)?;
                        let at = copy.ptr().addr() as u64;
                        held.copies.push(copy);
                        at
                    }
                }
                BufferKind::Output(index) => {
                    let tensor = run.outputs.get(index as usize).ok_or_else(|| missing("output", index))?;
                    self.check_shape(at, tensor, "output")?;
                    if !tensor.is_dense() {
                        return Err(Error::Backend { backend: NAME, what: format!("output {index} is not dense") });
                    }
                    tensor.ptr.addr() as u64
                }
                BufferKind::Parameter(slot) => {
                    let slot = slot as usize;
                    let tensor = run.weights.tensor(slot).ok_or_else(|| missing("weight", slot as u32))?;
                    if run.weights.is_dense(slot) {
                        tensor.ptr.addr() as u64
                    } else {
                        let form =
                            run.weights.dense(slot, &mut || self.derive(run, || self.densify(tensor, run.stream)))?;
                        let at = form.ptr().addr() as u64;
                        held.forms.push(form);
                        at
                    }
                }
                BufferKind::Constant(index) => {
                    if held.constants.is_none() {
                        held.constants = Some(self.program.constants(run.stream, run.is_recorded)?);
                    }
                    held.constants.as_ref().map_or(0, |made| made[index as usize].ptr().addr() as u64)
                }
                BufferKind::Derived | BufferKind::Arena => bases[at],
            };
        }
        Ok(bases)
    }

    /// What is derived from weights, by `make` on the run's stream; it may be read on others.
    fn derive(&self, run: &Run<'_>, make: impl FnOnce() -> Result<Block>) -> Result<Block> {
        if run.is_recorded {
            return Err(cold());
        }
        let block = make()?;
        // Another stream may be the next to read it.
        self.program.device.synchronize(run.stream)?;
        Ok(streams::shared(block, &self.program.device, run.stream))
    }

    fn check_shape(&self, buffer: usize, tensor: &Tensor, what: &str) -> Result<()> {
        let dtype = self.program.plan.buffers[buffer].dtype;
        if self.shapes[buffer].as_ref() == Some(&tensor.shape) && tensor.dtype == dtype {
            return Ok(());
        }
        let got = format!("{}{:?}", tensor.dtype, tensor.shape);
        Err(Error::invalid(format!("{what}: expected {dtype}{:?}, got {got}", self.shapes[buffer])))
    }

    /// A dense copy of a strided tensor, in the stream's order.
    fn densify(&self, tensor: &Tensor, stream: StreamHandle) -> Result<Block> {
        let bytes = tensor.dtype.size_bytes();
        let kernels = &self.program.lowered.densify;
        let known = kernels.iter().find(|(size, _)| *size == bytes).map(|(_, copy)| copy);
        let rank = tensor.shape.len();
        let (Some(copy), true) = (known, rank <= DENSIFY_DIMS) else {
            return Err(Error::Backend { backend: NAME, what: format!("a strided argument of {rank} dimensions") });
        };
        let block = self.program.memory.allocate(tensor.bytes(), "a dense copy of an argument")?;
        let mut numbers = vec![1i64; 2 * DENSIFY_DIMS];
        numbers[DENSIFY_DIMS..].fill(0);
        numbers[DENSIFY_DIMS - rank..DENSIFY_DIMS].copy_from_slice(&tensor.shape);
        numbers[2 * DENSIFY_DIMS - rank..].copy_from_slice(&tensor.strides);
        if let Some(plain) = copy.grid.geometry(&numbers, 1)? {
            let call = Call {
                step: 0,
                entry: self.program.entries[copy.kernel],
                words: words(&copy.args, &numbers)?,
                places: vec![Some((0, 0)), Some((1, 0))],
                plain,
                vector: None,
            };
            let mut bound = call.bind(&[tensor.ptr.addr() as u64, block.ptr().addr() as u64]);
            // SAFETY: the tensor is valid for its shape and strides by the caller's promise, the block holds a dense copy.
            unsafe { launch(bound.function, &bound.geometry, &mut bound.words, stream)? };
        }
        Ok(block)
    }

    /// Computes what depends on weights alone, once per weight set.
    ///
    /// # Safety
    /// Parameters and constants must be behind their addresses.
    unsafe fn prepare(&self, bases: &mut [u64], run: &Run<'_>, held: &mut Held) -> Result<()> {
        if self.derived.is_empty() {
            return Ok(());
        }
        let place = |bases: &mut [u64], block: *mut u8| {
            self.derived.iter().for_each(|&(buffer, offset)| bases[buffer] = (block.addr() + offset) as u64);
        };
        let make = || {
            let block = self.program.memory.allocate(self.derived_bytes, "values derived from weights")?;
            let mut all = bases.to_vec();
            place(&mut all, block.ptr());
            for call in &self.prepare {
                let mut bound = call.bind(&all);
                // SAFETY: the caller's promise; derived buffers were just made.
                unsafe { launch(bound.function, &bound.geometry, &mut bound.words, run.stream)? };
            }
            Ok(block)
        };
        let form = run.weights.prepared(&mut || self.derive(run, make))?;
        place(bases, form.ptr());
        held.forms.push(form);
        Ok(())
    }

    /// Says which step a launch's error comes from.
    fn at_step(&self, at: usize, error: Error) -> Error {
        let plan = &self.program.plan;
        match error {
            Error::Backend { backend, what } => {
                Error::Backend { backend, what: format!("{}: {what}", plan.step_name(&plan.steps[at])) }
            }
            other => other,
        }
    }

    /// Kernel by kernel.
    ///
    /// # Safety
    /// Every buffer must be behind its address.
    unsafe fn run_plain(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        for call in &self.calls {
            let mut bound = call.bind(bases);
            // SAFETY: the caller's promise.
            unsafe {
                launch(bound.function, &bound.geometry, &mut bound.words, stream)
                    .map_err(|e| self.at_step(call.step, e))?;
            }
        }
        Ok(())
    }

    /// Step by step, waiting for each.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn run_profiled(&self, bases: &[u64], stream: StreamHandle, profile: &mut Vec<StepTime>) -> Result<()> {
        let plan = &self.program.plan;
        self.program.device.synchronize(stream)?;
        for (at, step) in plan.steps.iter().enumerate() {
            let start = Instant::now();
            for call in self.calls.iter().filter(|c| c.step == at) {
                let mut bound = call.bind(bases);
                // SAFETY: the caller's promise.
                unsafe { launch(bound.function, &bound.geometry, &mut bound.words, stream)? };
            }
            self.program.device.synchronize(stream).map_err(|e| self.at_step(at, e))?;
            profile.push(StepTime {
                step: plan.step_name(step),
                kernel: step.kernel.name(),
                module: plan.graph.path(step.value).to_owned(),
                dtype: plan.graph.ty(step.value).dtype,
                time: start.elapsed(),
                flops: self.costs[at].0,
                bytes: self.costs[at].1,
            });
        }
        Ok(())
    }

    /// As one graph, made at the second run.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn run_replayed(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        let mut replays = self.replays.lock().unwrap_or_else(PoisonError::into_inner);
        replays.runs += 1;
        if replays.runs == 1 {
            drop(replays);
            // SAFETY: the caller's promise.
            return unsafe { self.run_plain(bases, stream) };
        }
        let mut replay = match replays.of.iter().position(|r| r.stream == stream) {
            Some(at) => replays.of.remove(at),
            None => {
                if replays.of.len() == REPLAYS {
                    drop(replays.of.remove(0));
                }
                // SAFETY: the caller's promise; addresses are renewed before every run.
                Replay { stream, graph: unsafe { self.graph(bases)? }, bases: bases.to_vec() }
            }
        };
        // SAFETY: the caller's promise.
        unsafe {
            self.tell(&mut replay, bases)?;
            replay.graph.launch(stream)?;
        }
        replays.of.push(replay);
        Ok(())
    }

    /// A graph of all launches.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn graph(&self, bases: &[u64]) -> Result<Graph> {
        let mut bound: Vec<Bound> = self.calls.iter().map(|c| c.bind(bases)).collect();
        let mut launches: Vec<GraphLaunch<'_>> = bound.iter_mut().map(Bound::in_graph).collect();
        // SAFETY: the caller's promise.
        unsafe { Graph::new(&self.program.device, &mut launches) }
    }

    /// Tells a graph the addresses that have changed.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn tell(&self, replay: &mut Replay, bases: &[u64]) -> Result<()> {
        let changed: Vec<bool> = replay.bases.iter().zip(bases).map(|(a, b)| a != b).collect();
        if !changed.contains(&true) {
            return Ok(());
        }
        for (at, call) in self.calls.iter().enumerate() {
            if call.places.iter().flatten().any(|(buffer, _)| changed[*buffer]) {
                // SAFETY: the caller's promise.
                unsafe { replay.graph.update(at, &mut call.bind(bases).in_graph())? };
            }
        }
        replay.bases.copy_from_slice(bases);
        Ok(())
    }
}

fn missing(what: &str, index: u32) -> Error {
    Error::Backend { backend: NAME, what: format!("{what} {index} is missing") }
}

impl Specialized for SpecializedCuda {
    fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    unsafe fn run(&self, run: Run<'_>) -> Result<()> {
        if !run.arena.addr().is_multiple_of(ALIGN_BYTES) {
            return Err(Error::Backend { backend: NAME, what: "the arena is not aligned".to_owned() });
        }
        let (device, stream, is_recorded) = (&self.program.device, run.stream, run.is_recorded);
        if is_recorded && !self.program.memory.serves_captures() {
            return Err(Error::Backend { backend: NAME, what: "this PyTorch lends no memory to captures".to_owned() });
        }
        let _context = device.enter()?;
        if !is_recorded {
            streams::free_late();
        }
        let mut held = Held::default();
        let mut bases = self.bases(&run, &mut held)?;
        // SAFETY: the caller's promise.
        unsafe { self.prepare(&mut bases, &run, &mut held)? };
        held.forms.iter().for_each(|form| streams::note(form.block().owner(), stream));
        // SAFETY: every buffer is behind its address.
        unsafe {
            match run.profile {
                Some(profile) => self.run_profiled(&bases, stream, profile)?,
                None if is_recorded || self.program.plan.options.plain_launches => self.run_plain(&bases, stream)?,
                None => self.run_replayed(&bases, stream)?,
            }
        }
        // Copies of arguments go now: memory comes back in the stream's order, after the work on them.
        Ok(())
    }

    fn costs(&self) -> Vec<(u64, u64)> {
        self.costs.clone()
    }

    fn prepared_bytes(&self) -> usize {
        self.derived_bytes
    }

    fn graph_bytes(&self) -> usize {
        let replays = self.replays.lock().unwrap_or_else(PoisonError::into_inner);
        replays.of.iter().map(|r| r.graph.bytes()).sum()
    }

    fn host_bytes(&self) -> usize {
        let words = |c: &Call| size_of_val(&*c.words) + size_of_val(&*c.places);
        self.calls.iter().map(|c| size_of::<Call>() + words(c)).sum()
    }
}
