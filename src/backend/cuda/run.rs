//! A specialized plan: launches with numbers for sizes, and a run of them over lent memory.
//!
//! The first run launches kernel by kernel. The second makes a CUDA graph of the same launches; from then on a run is one
//! graph launch, after new arguments for those kernels whose addresses have changed (the caller's tensors, another arena,
//! other weights). Runs that the caller captures stay launches, and so do all where the driver makes no graph. Scalars and sizes
//! never change: they are the specialization.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use super::delegate::{self, sums_bytes};
use super::driver::{Relaxed, StreamHandle};
use super::{NAME, Program, cold, streams};
use crate::backend::{Cost, Run, SiteRow, Specialized, StepChoice, StepTime, WeightSet};
use crate::ir::DType;
use crate::memory::ALIGN_BYTES;
use crate::plan::workspace::{Scratch, Workspace};
use crate::plan::{BufferKind, Plan, Step};
use crate::{Error, Result};

mod call;
mod chunks;
mod item;
mod maker;
mod places;
mod replays;
mod trial;

use call::Call;
use item::Item;
use maker::Maker;
use places::{Held, LAID_OUT, LEFT_OUT, LaidOut, first_scratch, is_whole_parameter, offsets_of};
use replays::Replays;
use trial::Sites;

/// Plans of a library that fail before the library is taken off all steps: each costs a run that is done again.
const MOST_FAILURES: usize = 3;

/// The plan for concrete sizes.
pub(super) struct SpecializedCuda {
    program: Arc<Program>,
    workspace: Workspace,
    items: Vec<Item>,
    choices: Vec<StepChoice>,
    /// What of them a tuner may choose.
    sites: Sites,
    /// Bytes of each buffer: the plan's, the forms of packed weights, scratch memory.
    buffer_bytes: Vec<usize>,
    /// Of each of the plan's buffers: whether anything reads it but kernels that stand in for a library.
    needed: Vec<bool>,
    /// Packed weights that libraries read with their channels as neighbours.
    taps: Vec<usize>,
    /// Packed weights of which they read sums of taps.
    sums: Vec<usize>,
    /// Packed weights that they read in scratch memory.
    laid_out: Vec<LaidOut>,
    prepare: Vec<Call>,
    /// Bytes from the arena's start, for each buffer and scratch buffer; `None` for what lies elsewhere.
    offsets: Vec<Option<usize>>,
    /// Bytes of the arena, and offsets, where no weight need be laid out.
    lean: Option<(usize, Vec<Option<usize>>)>,
    /// Derived buffers, and where each starts in the block that holds them all.
    derived: Vec<(usize, usize)>,
    derived_bytes: usize,
    /// Sizes of inputs and outputs, by buffer.
    shapes: Vec<Option<Vec<i64>>>,
    costs: Vec<Cost>,
    replays: Mutex<Replays>,
    graph_bytes: AtomicUsize,
    /// Why runs are not replayed, where making or launching a graph has failed and the same as plain launches has not.
    no_graphs: OnceLock<String>,
    /// Whether a run has been launched.
    has_run: AtomicBool,
}

impl SpecializedCuda {
    pub fn new(program: Arc<Program>, bindings: &[i64]) -> Result<Self> {
        let plan = program.plan.clone();
        // Libraries are asked for the device whose context is current.
        let device = program.device.clone();
        let _context = device.enter()?;
        let named = |step: &Step, e: Error| match e {
            Error::Backend { backend, what } => {
                Error::Backend { backend, what: format!("{}: {what}", plan.step_name(step)) }
            }
            other => other,
        };
        Maker::warm(&program, bindings);
        let (scratch, choices, sites, laid_out) = (Vec::new(), Vec::new(), Sites::default(), Vec::new());
        let mut maker = Maker { program: &program, bindings, scratch, choices, sites, laid_out, tried: Vec::new() };
        let (mut items, mut prepare) = (Vec::new(), Vec::new());
        for (at, (step, launches)) in plan.steps.iter().zip(&program.lowered.steps).enumerate() {
            maker.step(at, step, launches, &mut items).map_err(|e| named(step, e))?;
        }
        let mut scratch = std::mem::take(&mut maker.scratch);
        for (at, (step, launches)) in plan.prepare.iter().zip(&program.lowered.prepare).enumerate() {
            maker.kernels(at, step, launches, &mut prepare).map_err(|e| named(step, e))?;
        }
        if !maker.scratch.is_empty() {
            return Err(Error::Backend { backend: NAME, what: "a preparing step asks for scratch memory".to_owned() });
        }
        let (choices, sites, laid_out) = (maker.choices, maker.sites, maker.laid_out);
        let scratch_bytes: Vec<usize> = scratch.iter().map(|s| s.bytes).collect();
        maker.tried.iter().for_each(|&at| scratch[at].bytes = 0);
        let workspace = Workspace::of(&plan, bindings, &scratch)?;
        let offsets = offsets_of(&plan, &workspace);
        let lean = match laid_out.is_empty() {
            true => None,
            false => {
                let bytes = |s: &Scratch| if s.what == LAID_OUT { 0 } else { s.bytes };
                let scratch: Vec<Scratch> = scratch.iter().map(|s| Scratch { bytes: bytes(s), ..*s }).collect();
                let lean = Workspace::of(&plan, bindings, &scratch)?;
                Some((lean.bytes(), offsets_of(&plan, &lean)))
            }
        };
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
        if let Some(allowed_bytes) = plan.options.memory_budget
            && workspace.bytes().saturating_add(derived_bytes) > allowed_bytes
        {
            let asked_bytes = workspace.bytes().saturating_add(derived_bytes);
            return Err(Error::OverBudget { asked_bytes, allowed_bytes, what: workspace.peak_text(5) });
        }
        let bytes_of = |numel: i64, dtype: DType| usize::try_from(numel).unwrap_or(0) * dtype.size_bytes();
        let mut buffer_bytes = Vec::with_capacity(offsets.len());
        for buffer in &plan.buffers {
            buffer_bytes.push(bytes_of(buffer.numel.eval(bindings)?, buffer.dtype));
        }
        for pack in &plan.packs {
            buffer_bytes.push(pack.source.concrete(bindings)?.numel() * pack.source.dtype.size_bytes());
        }
        for pack in &plan.packs {
            buffer_bytes.push(sums_bytes(&pack.source.concrete(bindings)?));
        }
        buffer_bytes.resize(first_scratch(&plan), 0);
        buffer_bytes.extend(scratch_bytes);
        let costs = plan.steps.iter().map(|s| Cost::of(s, s.accesses(), bindings)).collect::<Result<_>>()?;
        let replays = Mutex::default();
        let ReadBuffers { needed, taps, sums } = read_buffers(&plan, &items, &prepare, &laid_out);
        Ok(Self {
            program,
            workspace,
            items,
            choices,
            sites,
            buffer_bytes,
            needed,
            taps,
            sums,
            laid_out,
            prepare,
            offsets,
            lean,
            derived,
            derived_bytes,
            shapes,
            costs,
            replays,
            graph_bytes: AtomicUsize::new(0),
            no_graphs: OnceLock::new(),
            has_run: AtomicBool::new(false),
        })
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

    /// One after the other.
    ///
    /// # Safety
    /// Every buffer must be behind its address.
    unsafe fn run_plain(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        for item in &self.items {
            // SAFETY: the caller's promise.
            unsafe { item.run(bases, stream).map_err(|e| self.at_step(item.step(), e))? };
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
            for item in self.items.iter().filter(|i| i.step() == at) {
                // SAFETY: the caller's promise.
                unsafe { item.run(bases, stream).map_err(|e| self.at_step(at, e))? };
            }
            self.program.device.synchronize(stream).map_err(|e| self.at_step(at, e))?;
            profile.push(StepTime {
                step: plan.step_name(step),
                kernel: step.kernel.name(),
                module: plan.graph.path(step.value).to_owned(),
                dtype: plan.graph.ty(step.value).dtype,
                time: start.elapsed(),
                cost: self.costs[at],
            });
        }
        Ok(())
    }

    /// Steps whose library has failed.
    fn failures(&self) -> usize {
        self.items.iter().filter_map(Item::delegated).filter(|d| d.failure.get().is_some()).count()
    }

    /// Whether a library has not run here yet: it may load what a capture does not allow.
    fn is_cold(&self) -> bool {
        let has_run = self.has_run.load(Ordering::Acquire);
        !has_run && self.items.iter().filter_map(Item::delegated).any(|d| d.failure.get().is_none())
    }

    /// Takes what has failed off all steps that run the same; a library that has failed in several ways, off all its steps.
    fn give_up(&self) {
        let delegated = || self.items.iter().filter_map(Item::delegated);
        let mut failed: Vec<(&str, Vec<(usize, usize)>)> = Vec::new();
        for d in delegated().filter(|d| d.failure.get().is_some()) {
            let of = (d.planned.library(), d.planned.plans());
            if !failed.contains(&of) {
                failed.push(of);
            }
        }
        for other in delegated().filter(|d| d.failure.get().is_none()) {
            let of = (other.planned.library(), other.planned.plans());
            let reason = if failed.contains(&of) {
                "the same failed in another step".to_owned()
            } else if failed.iter().filter(|(library, _)| *library == of.0).count() >= MOST_FAILURES {
                format!("{} failed in {MOST_FAILURES} other steps", of.0)
            } else {
                continue;
            };
            let _ = other.failure.set(reason);
        }
    }

    /// # Safety
    /// As [`Specialized::run`].
    unsafe fn run_once(&self, run: &mut Run<'_>, held: &mut Held) -> Result<()> {
        let stream = run.stream;
        let mut bases = self.bases(run, held, false)?;
        // SAFETY: the caller's promise.
        unsafe { self.prepare(&mut bases, run, held)? };
        self.place_taps(&mut bases, run, held)?;
        let plain_launches = run.is_recorded || self.program.plan.options.plain_launches;
        if self.items.iter().filter_map(Item::delegated).any(|d| !d.is_on(&bases)) {
            let all = self.bases(run, held, true)?;
            bases.iter_mut().zip(all).filter(|(base, _)| **base == LEFT_OUT).for_each(|(base, all)| *base = all);
        }
        held.forms.iter().for_each(|form| streams::note(form.block().owner(), stream));
        if run.is_recorded {
            self.program.keep(&held.forms);
        }
        // SAFETY: every buffer is behind its address.
        unsafe {
            match run.profile.as_deref_mut() {
                Some(profile) => self.run_profiled(&bases, stream, profile),
                None if plain_launches => self.run_plain(&bases, stream),
                None => self.run_replayed(&bases, stream),
            }
        }
    }
}

/// Which of the plan's buffers are read but by stand-ins, and of which packed weights libraries read taps, or sums of them.
struct ReadBuffers {
    needed: Vec<bool>,
    taps: Vec<usize>,
    sums: Vec<usize>,
}

fn read_buffers(plan: &Plan, items: &[Item], prepare: &[Call], laid_out: &[LaidOut]) -> ReadBuffers {
    let count = plan.buffers.len();
    let mut is_read = vec![false; first_scratch(plan)];
    let mut mark = |places: &[Option<(usize, isize)>]| {
        places.iter().flatten().for_each(|(buffer, _)| {
            is_read.get_mut(*buffer).into_iter().for_each(|read| *read = true);
        });
    };
    prepare.iter().for_each(|c| mark(&c.places));
    for item in items {
        match item {
            Item::Kernel(call) => mark(&call.places),
            Item::Delegated(d) => {
                d.parts.calls.iter().for_each(|places| mark(places));
                d.parts.before.iter().chain(&d.parts.after).for_each(|c| mark(&c.places));
            }
        }
    }
    let packs = plan.packs.len();
    let taps: Vec<usize> = (0..packs).filter(|pack| is_read[count + pack]).collect();
    let sums: Vec<usize> = (0..packs).filter(|pack| is_read[count + packs + pack]).collect();
    let laid_out = laid_out.iter().map(|laid| &laid.pack);
    for &pack in taps.iter().chain(&sums).chain(laid_out).filter(|pack| !is_whole_parameter(plan, **pack)) {
        is_read[plan.packs[pack].source.buffer.index()] = true;
    }
    is_read.truncate(count);
    ReadBuffers { needed: is_read, taps, sums }
}

impl Specialized for SpecializedCuda {
    fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    fn workspace_bytes(&self, weights: &WeightSet) -> usize {
        match &self.lean {
            Some((bytes, _)) if !self.lays_out(weights) => *bytes,
            _ => self.workspace.bytes(),
        }
    }

    fn delegations(&self) -> Vec<StepChoice> {
        let mut choices = self.choices.clone();
        for d in self.items.iter().filter_map(Item::delegated) {
            if let Some(reason) = d.failure.get() {
                let choice = &mut choices[d.choice];
                *choice = delegate::choice(choice.step.clone(), Err(reason.clone()));
            }
        }
        choices
    }

    unsafe fn run(&self, mut run: Run<'_>) -> Result<()> {
        if !run.arena.addr().is_multiple_of(ALIGN_BYTES) {
            return Err(Error::Backend { backend: NAME, what: "the arena is not aligned".to_owned() });
        }
        let (device, is_recorded) = (&self.program.device, run.is_recorded);
        if is_recorded && self.is_cold() {
            return Err(cold());
        }
        if is_recorded && !self.program.memory.serves_captures() {
            return Err(Error::Backend {
                backend: NAME,
                what: "this PyTorch lends no memory to captures, from 2.10 on it does".to_owned(),
            });
        }
        let _context = device.enter()?;
        // Libraries load what they need when they run, and graphs take memory.
        let _relaxed = if is_recorded { None } else { Some(Relaxed::new()?) };
        if !is_recorded {
            streams::free_late();
        }
        self.program.users.note(run.stream, is_recorded);
        let mut held = Held::default();
        loop {
            let known = self.failures();
            // SAFETY: the caller's promise.
            let outcome = unsafe { self.run_once(&mut run, &mut held) };
            if outcome.is_ok() || self.failures() == known {
                outcome?;
                break;
            }
            // A run reads arguments and writes results: all of it is done again, without what failed.
            self.give_up();
            run.profile.iter_mut().for_each(|p| p.clear());
        }
        self.has_run.store(true, Ordering::Release);
        // Copies of arguments go now: memory comes back in the stream's order, after the work on them.
        Ok(())
    }

    fn sites(&self) -> Vec<SiteRow> {
        self.site_rows()
    }

    fn trial_bytes(&self, site: usize, way: usize) -> usize {
        self.bytes_of_trial(site, way).0
    }

    fn cold_trial_bytes(&self, site: usize, way: usize) -> usize {
        self.bytes_of_trial(site, way).1
    }

    fn ready(&self, site: usize, time: Duration) -> Result<(Vec<usize>, bool)> {
        self.ready_ways(site, time)
    }

    unsafe fn measure(&self, site: usize, way: usize, memory: (*mut u8, usize), stream: usize) -> Result<Option<f64>> {
        // SAFETY: the caller's promise.
        unsafe { self.measure_site(site, way, memory, stream) }
    }

    fn choose(&self, site: usize, choice: &str) -> bool {
        self.choose_site(site, choice)
    }

    fn measured_on(&self) -> (String, String) {
        self.program.delegates.identity()
    }

    fn costs(&self) -> Vec<Cost> {
        self.costs.clone()
    }

    fn prepared_bytes(&self) -> usize {
        self.derived_bytes
    }

    fn graph_bytes(&self) -> usize {
        self.graph_bytes.load(Ordering::Relaxed)
    }

    fn no_graphs(&self) -> Option<String> {
        self.no_graphs.get().cloned()
    }

    fn host_bytes(&self) -> usize {
        self.items.iter().map(Item::host_bytes).sum()
    }
}
