//! A specialized plan: launches with numbers for sizes, and a run of them over lent memory.
//!
//! The first run launches kernel by kernel. The second makes a CUDA graph of the same launches; from then on a run is one
//! graph launch, after new arguments for those kernels whose addresses have changed (the caller's tensors, another arena,
//! other weights). Runs that the caller captures stay launches, and so do all where the driver makes no graph. Scalars and sizes
//! never change: they are the specialization.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::delegate::{self, Asked, Operands, Planned, WORKSPACE_ALIGN_BYTES, sums_bytes};
use super::driver::{CaptureStream, Function, Graph, GraphLaunch, Node, Relaxed, StreamHandle, launch};
use super::lower::{self, DENSIFY_DIMS, Launch, Launches, Place};
use super::{Entry, NAME, Program, cold, streams};
use crate::backend::derived::Form;
use crate::backend::tensor::{Block, Tensor};
use crate::backend::{Run, SiteRow, Specialized, StepChoice, StepTime, WeightSet};
use crate::codegen::cuda::{Arg, GEMV_ROWS, Geometry, chunk_count, chunk_pixels};
use crate::ir::DType;
use crate::memory::ALIGN_BYTES;
use crate::plan::workspace::{Scratch, Workspace};
use crate::plan::{BufferKind, MemoryMode, PackForm, Plan, Step};
use crate::select::Kernel as Select;
use crate::{Error, Result};

mod chunks;
mod item;
mod trial;

use item::{Delegated, Item, Parts, address};
use trial::Sites;

/// A parameter word.
#[derive(Clone, Copy, Debug)]
enum Word {
    /// Address of an operand: index into [`Call::places`].
    Pointer(usize),
    /// A number; an f32 by its bits.
    Number(u64),
    /// What a run is told ([`TOLD`]), as it stands among the addresses.
    Told(usize),
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
    /// Is launched only where this is not 0 among the addresses.
    only_if: Option<usize>,
}

/// A call with addresses.
struct Bound {
    function: Function,
    geometry: Geometry,
    words: Vec<u64>,
}

impl Call {
    fn bind(&self, bases: &[u64]) -> Bound {
        let at = |place: &Option<(usize, isize)>| address(*place, bases);
        let words = self.words.iter().map(|w| match *w {
            Word::Pointer(operand) => at(&self.places[operand]),
            Word::Number(n) => n,
            Word::Told(at) => bases[at],
        });
        let is_aligned = |(operand, bytes): &(usize, usize)| at(&self.places[*operand]).is_multiple_of(*bytes as u64);
        let wide = self.vector.as_ref().filter(|(_, aligned)| aligned.iter().all(is_aligned));
        let (function, geometry) = match (wide, self.entry.vector) {
            (Some((geometry, _)), Some(function)) => (function, *geometry),
            _ => (self.entry.scalar, self.plain),
        };
        Bound { function, geometry, words: words.collect() }
    }

    fn reads_left_out(&self, bases: &[u64]) -> bool {
        self.places.iter().flatten().any(|(buffer, _)| bases[*buffer] == LEFT_OUT)
    }

    /// Host memory.
    fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.words) + size_of_val(&*self.places)
    }

    fn is_on(&self, bases: &[u64]) -> bool {
        self.only_if.is_none_or(|at| bases[at] != 0)
    }

    fn reads(&self, changed: &[bool]) -> bool {
        let is_told = |word: &Word| matches!(word, Word::Told(at) if changed[*at]);
        self.places.iter().flatten().any(|(buffer, _)| changed[*buffer]) || self.words.iter().any(is_told)
    }
}

/// What a run is told of a weight that it lays out anew: where it lies, 0 if it need not be, and its strides.
const TOLD: usize = 6;

/// With `memory="low"`, no copy of a weight is kept.
fn is_low(plan: &Plan) -> bool {
    plan.options.memory == MemoryMode::Low
}

/// Where what a run is told of a packed weight begins among the addresses: behind the plan's buffers, the forms of packed
/// weights, and the sums of their taps.
fn first_told(plan: &Plan, pack: usize) -> usize {
    let is_laid = |pack: &&crate::plan::Pack| is_low(plan) && matches!(pack.form, PackForm::Convolution { .. });
    plan.buffers.len() + 2 * plan.packs.len() + TOLD * plan.packs[..pack].iter().filter(is_laid).count()
}

/// Scratch memory follows that.
fn first_scratch(plan: &Plan) -> usize {
    first_told(plan, plan.packs.len())
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
    // What it has no room for, the other form may have.
    Ok(launch.grid.geometry(bindings, vector.width).ok().flatten().map(|geometry| (geometry, aligned)))
}

/// What addresses of a run point into.
#[derive(Default)]
struct Held {
    copies: Vec<Block>,
    forms: Vec<Arc<Form>>,
    constants: Option<Arc<[Block]>>,
}

/// A packed weight that a step lays out anew in its scratch memory, at each run.
#[derive(Debug)]
struct LaidOut {
    pack: usize,
    /// Where it is laid out. In a run whose weight lies so already, this is the address of the weight.
    buffer: usize,
    /// What a run is told of it begins here.
    told: usize,
}

impl LaidOut {
    /// Says where the weight lies, and so whether there is anything to do.
    fn tell(&self, weight: Tensor, bases: &mut [u64]) {
        let at = weight.ptr.addr() as u64;
        let strides = weight.strides.clone();
        if turned(weight).is_dense() {
            bases[self.buffer] = at;
            return;
        }
        let told = &mut bases[self.told..self.told + TOLD];
        told[0] = at;
        strides.iter().zip(&mut told[1..3]).for_each(|(n, to)| *to = n.cast_unsigned());
        strides[2..].iter().rev().zip(told[3..].iter_mut().rev()).for_each(|(n, to)| *to = n.cast_unsigned());
    }
}

/// What scratch memory is for.
const LAID_OUT: &str = "a weight with its channels as neighbours";

/// The address of a buffer that nothing reads while the libraries do not fail.
const LEFT_OUT: u64 = u64::MAX;

/// The graph of a specialization for one stream, and what it was last told.
struct Replay {
    stream: StreamHandle,
    /// What libraries do is captured here, where there are any.
    own: Option<CaptureStream>,
    graph: Graph,
    bases: Vec<u64>,
    /// Of each delegated item: whether the library runs.
    delegated: Vec<bool>,
}

/// Most streams for which a specialization keeps a graph: each has a workspace of its own, and telling a graph of another
/// one is dearer than a second graph.
const REPLAYS: usize = 4;

/// Plans of a library that fail before the library is taken off all steps: each costs a run that is done again.
const MOST_FAILURES: usize = 3;

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
    costs: Vec<(u64, u64)>,
    replays: Mutex<Replays>,
    graph_bytes: AtomicUsize,
    /// Why runs are not replayed, where making or launching a graph has failed and the same as plain launches has not.
    no_graphs: OnceLock<String>,
    /// Whether a run has been launched.
    has_run: AtomicBool,
}

/// Makes the calls of steps.
struct Maker<'a> {
    program: &'a Program,
    bindings: &'a [i64],
    scratch: Vec<Scratch>,
    choices: Vec<StepChoice>,
    sites: Sites,
    laid_out: Vec<LaidOut>,
    /// Which of the scratch memory only trials use.
    tried: Vec<usize>,
}

impl<'a> Maker<'a> {
    fn asked<'b>(program: &'b Program, step: &'b Step, bindings: &'b [i64]) -> Asked<'b> {
        let (arch, numerics) = (program.device.arch(), program.plan.options.numerics);
        let is_bounded = program.plan.options.memory_budget.is_some();
        Asked { step, bindings, arch, numerics, fold_flops: program.delegates.fold_flops(), is_bounded }
    }

    /// Whether the kernel for few rows takes the step.
    fn is_few(launches: &Launches, bindings: &[i64]) -> Result<bool> {
        let few = |l: &Launch| match &l.few_rows {
            Some(rows) => Ok(rows.eval(bindings)? <= GEMV_ROWS as i64),
            None => Ok(false),
        };
        Ok(launches.launches.iter().map(few).collect::<Result<Vec<bool>>>()?.contains(&true))
    }

    /// Lets cuDNN build the plans of all steps that it may be asked for, several at the same time.
    fn warm(program: &Program, bindings: &[i64]) {
        let mut engines = Vec::new();
        for (step, launches) in program.plan.steps.iter().zip(&program.lowered.steps) {
            let asked = Self::asked(program, step, bindings);
            for graph in launches.delegate.iter().flat_map(|d| d.graphs(&asked)) {
                let engine = (graph, None);
                if !engines.contains(&engine) {
                    engines.push(engine);
                }
            }
        }
        // One alone is built where it is needed, if it is.
        if engines.len() > 1 {
            program.delegates.warm(engines, None, || program.device.enter());
        }
    }
}

impl Maker<'_> {
    fn scratch_bytes(&self, scratch: &lower::Scratch) -> Result<usize> {
        let lower::Scratch::Moments { sets, pixels } = scratch;
        let chunks = chunk_count(unsigned(pixels.eval(self.bindings)?)?);
        let floats = unsigned(sets.eval(self.bindings)?)?.saturating_mul(chunks).saturating_mul(3);
        usize::try_from(floats.saturating_mul(4)).map_err(|_| Error::invalid("scratch memory overflows"))
    }

    /// The buffer that the next scratch memory is: it follows the plan's buffers and the forms of its packed weights.
    fn next_scratch(&self) -> usize {
        first_scratch(&self.program.plan) + self.scratch.len()
    }

    fn is_empty(&self, step: &Step) -> bool {
        step.stores.iter().map(|s| s.concrete(self.bindings)).all(|s| s.is_ok_and(|s| s.numel() == 0))
    }

    /// The step on a library, if there is one for it.
    fn step(&mut self, at: usize, step: &Step, launches: &Launches, items: &mut Vec<Item>) -> Result<()> {
        if self.is_empty(step) {
            return Ok(());
        }
        if let Some(delegate) = &launches.delegate {
            let Program { plan, delegates, lowered, device, .. } = self.program;
            let arch = device.arch();
            let name = |l: &Launch| lowered.kernels[l.kernel].name.clone();
            let kernels = |form: &delegate::Form| {
                launches.launches.iter().chain(&form.before).chain(&form.after).map(name).collect()
            };
            let ready = match Self::is_few(launches, self.bindings)? {
                true => Err(("it has few rows".to_owned(), None)),
                false => delegate.plan(&Self::asked(self.program, step, self.bindings), delegates, &kernels),
            };
            let outcome = ready.as_ref().map(|r| r.planned.library()).map_err(|(why, _)| why.clone());
            self.choices.push(delegate::choice(plan.step_name(step), outcome));
            match ready {
                Ok(ready) => {
                    let delegate::Ready { planned, operands, form, site, whole } = ready;
                    let whole = whole.map(|(form, operands)| self.tried(at, delegate.0.get(form), operands));
                    self.sites.add(site, Some(items.len()), whole.transpose()?);
                    let form = delegate.0.get(form);
                    items.push(Item::Delegated(self.delegated(at, step, launches, form, planned, operands)?));
                    return Ok(());
                }
                Err((_, Some(site))) => self.sites.add(*site, None, None),
                Err((_, None)) if step.kernel == Select::Attention && !launches.on_tensor_cores(arch) => {
                    if let Ok((planned, operands)) = self.chunks(step, delegates)? {
                        if let Some(last) = self.choices.last_mut() {
                            *last = delegate::choice(plan.step_name(step), Ok(planned.library()));
                        }
                        items.push(Item::Delegated(self.delegated(at, step, launches, None, planned, operands)?));
                        return Ok(());
                    }
                }
                Err((_, None)) => {}
            }
        }
        let mut calls = Vec::new();
        self.kernels(at, step, launches, &mut calls)?;
        items.extend(calls.into_iter().map(Item::Kernel));
        Ok(())
    }

    fn delegated(
        &mut self,
        at: usize,
        step: &Step,
        launches: &Launches,
        form: Option<&delegate::Form>,
        planned: Arc<dyn Planned>,
        mut operands: Operands,
    ) -> Result<Delegated> {
        let mut own = Vec::new();
        self.kernels(at, step, launches, &mut own)?;
        let align_bytes = std::mem::take(&mut operands.align_bytes);
        let parts = self.parts(at, form, operands)?;
        let mut workspace = None;
        if planned.workspace_bytes() > 0 {
            workspace = Some(self.next_scratch());
            let bytes = planned.workspace_bytes() + (WORKSPACE_ALIGN_BYTES - ALIGN_BYTES);
            self.scratch.push(Scratch { step: at, bytes, what: "workspace of a library" });
        }
        let (choice, failure) = (self.choices.len() - 1, OnceLock::new());
        Ok(Delegated { step: at, planned, parts, align_bytes, workspace, own, choice, failure })
    }

    /// A library's operands and the kernels around it, with places.
    fn parts(&mut self, at: usize, form: Option<&delegate::Form>, operands: Operands) -> Result<Parts> {
        let first = self.next_scratch();
        for (bytes, what) in operands.scratch {
            self.scratch.push(Scratch { step: at, bytes, what });
        }
        let mut places = operands.places.iter().map(|p| self.place(p, first)).collect::<Result<Vec<_>>>()?;
        let mut before = Vec::new();
        for (place, to) in operands.places.iter().zip(&mut places) {
            if let (Place::Taps(pack), true) = (place, is_low(&self.program.plan)) {
                let call = self.lay_out(at, *pack)?;
                *to = call.places[0];
                before.push(call);
            }
        }
        let moved = |offsets: &Vec<isize>| {
            let moves = places.iter().zip(offsets);
            moves.map(|(place, more)| place.map(|(buffer, offset)| (buffer, offset + more))).collect()
        };
        let calls = operands.calls.iter().map(moved).collect();
        let around = |launch: Option<&Launch>| -> Result<Vec<Call>> {
            Ok(launch.map(|l| self.call(at, l, first)).transpose()?.flatten().into_iter().collect())
        };
        before.extend(around(form.and_then(|f| f.before.as_ref()))?);
        let after = around(form.and_then(|f| f.after.as_ref()))?;
        Ok(Parts { calls, before, after })
    }

    /// The parts of a form that is only tried: its scratch memory is a trial's.
    fn tried(&mut self, at: usize, form: Option<&delegate::Form>, operands: Operands) -> Result<Parts> {
        let first = self.scratch.len();
        let parts = self.parts(at, form, operands)?;
        self.tried.extend(first..self.scratch.len());
        Ok(parts)
    }

    /// Where an operand lies; scratch memory of its step begins at buffer `first`.
    fn place(&self, place: &Place, first: usize) -> Result<Option<(usize, isize)>> {
        Ok(match place {
            Place::Buffer(buffer, offset, size) => {
                Some((buffer.index(), offset.eval(self.bindings)? as isize * *size as isize))
            }
            Place::Scratch(index) => Some((first + index, 0)),
            Place::Taps(pack) => Some((self.program.plan.buffers.len() + pack, 0)),
            Place::Sums(pack) => {
                let plan = &self.program.plan;
                Some((plan.buffers.len() + plan.packs.len() + pack, 0))
            }
            Place::Missing => None,
        })
    }

    /// A launch with numbers; `None` where there is nothing to do.
    fn call(&self, at: usize, launch: &Launch, first: usize) -> Result<Option<Call>> {
        let Some(plain) = launch.grid.geometry(self.bindings, launch.least)? else { return Ok(None) };
        Ok(Some(Call {
            step: at,
            entry: self.program.entries[launch.kernel],
            words: words(&launch.args, self.bindings)?,
            places: launch.places.iter().map(|p| self.place(p, first)).collect::<Result<_>>()?,
            plain,
            vector: vector_form(launch, self.bindings)?,
            only_if: None,
        }))
    }

    /// What lays out a packed weight with its channels as neighbours, in scratch memory of a step: its only place.
    fn lay_out(&mut self, at: usize, pack: usize) -> Result<Call> {
        let Program { plan, lowered, entries, .. } = self.program;
        let weight = plan.packs[pack].source.concrete(self.bindings)?;
        let size = weight.dtype.size_bytes();
        let known = lowered.layouts.iter().find(|(bytes, _)| *bytes == size).map(|(_, launch)| launch);
        let (Some(launch), [filters, channels, taps @ ..]) = (known, &*weight.shape) else {
            return Err(Error::Backend { backend: NAME, what: "a weight that has no layout".to_owned() });
        };
        let (told, buffer) = (first_told(plan, pack), self.next_scratch());
        let mut sizes = [1i64; 2 * (TOLD - 1)];
        [filters, channels].iter().zip(&mut sizes).for_each(|(n, to)| *to = **n as i64);
        taps.iter().rev().zip(sizes[..TOLD - 1].iter_mut().rev()).for_each(|(n, to)| *to = *n as i64);
        let word = |arg: &Arg| match arg {
            Arg::Pointer(0) => Ok(Word::Told(told)),
            Arg::Pointer(_) => Ok(Word::Pointer(0)),
            Arg::Size(dim) => match (TOLD - 1..sizes.len()).find(|&s| *dim == lower::symbol(s)) {
                Some(stride) => Ok(Word::Told(told + stride + 2 - TOLD)),
                None => dim.eval(&sizes).map(|n| Word::Number(n.cast_unsigned())),
            },
            _ => Err(Error::invalid("a layout of other arguments")),
        };
        let words = launch.args.iter().map(word).collect::<Result<_>>()?;
        let plain = launch.grid.geometry(&sizes, 1)?;
        let plain = plain.ok_or_else(|| Error::invalid("an empty weight"))?;
        self.scratch.push(Scratch { step: at, bytes: weight.numel() * size, what: LAID_OUT });
        self.laid_out.push(LaidOut { pack, buffer, told });
        let (entry, places) = (entries[launch.kernel], vec![Some((buffer, 0))]);
        Ok(Call { step: at, entry, words, places, plain, vector: None, only_if: Some(told) })
    }

    /// The step on its own kernels.
    fn kernels(&mut self, at: usize, step: &Step, launches: &Launches, calls: &mut Vec<Call>) -> Result<()> {
        if self.is_empty(step) {
            return Ok(());
        }
        let first = self.next_scratch();
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
            calls.extend(self.call(at, launch, first)?);
        }
        Ok(())
    }
}

/// Bytes from the arena's start, for each buffer and scratch buffer.
fn offsets_of(plan: &Plan, workspace: &Workspace) -> Vec<Option<usize>> {
    let first = first_scratch(plan);
    let end = first + workspace.requests.len() - workspace.buffers.len();
    let mut offsets = vec![None; end];
    let own = workspace.buffers.iter().map(|id| id.index());
    own.chain(first..end).zip(&workspace.layout.offsets).for_each(|(at, &offset)| offsets[at] = Some(offset));
    offsets
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
        let cost = |s: &Step| -> Result<(u64, u64)> {
            let bytes = s.accesses().map(|a| a.concrete(bindings).map(|c| c.bytes() as u64));
            Ok((unsigned(s.flops.eval(bindings)?)?, bytes.sum::<Result<u64>>()?))
        };
        let costs = plan.steps.iter().map(cost).collect::<Result<_>>()?;
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

    /// Addresses of all buffers but the derived ones. `held` receives copies of strided arguments, and what else the
    /// addresses point into. A strided weight that only stand-ins for a library would read is left out, unless `all` are
    /// wanted: its address is [`LEFT_OUT`] then.
    fn bases(&self, run: &Run<'_>, held: &mut Held, all: bool) -> Result<Vec<u64>> {
        let plan = &self.program.plan;
        let arena = run.arena.addr();
        let offsets = match &self.lean {
            Some((_, lean)) if !self.lays_out(run.weights) => lean,
            _ => &self.offsets,
        };
        let mut bases: Vec<u64> = offsets.iter().map(|o| o.map_or(0, |offset| (arena + offset) as u64)).collect();
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
                    } else if !all && !self.needed[at] {
                        LEFT_OUT
                    } else if is_low(plan) {
                        let copy = self.densify(tensor, run.stream)?;
                        let at = copy.ptr().addr() as u64;
                        held.copies.push(copy);
                        at
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
                only_if: None,
            };
            let mut bound = call.bind(&[tensor.ptr.addr() as u64, block.ptr().addr() as u64]);
            // SAFETY: the tensor is valid for its shape and strides by the caller's promise, the block holds a dense copy.
            unsafe { launch(bound.function, &bound.geometry, &mut bound.words, stream)? };
        }
        Ok(block)
    }

    /// The weight that is packed, where it lies.
    fn packed(&self, pack: usize, bases: &[u64], run: &Run<'_>) -> Result<Tensor> {
        let plan = &self.program.plan;
        let source = &plan.packs[pack].source;
        match plan.buffers[source.buffer.index()].kind {
            BufferKind::Parameter(slot) if is_whole_parameter(plan, pack) => {
                run.weights.tensor(slot as usize).cloned().ok_or_else(|| missing("weight", slot))
            }
            _ => self.packed_as_planned(pack, bases),
        }
    }

    /// The weight that is packed, where the plan has it.
    fn packed_as_planned(&self, pack: usize, bases: &[u64]) -> Result<Tensor> {
        let source = &self.program.plan.packs[pack].source;
        let lies = source.concrete(&[])?;
        let at = bases[source.buffer.index()] as usize;
        let at = at.wrapping_add_signed(lies.offset * source.dtype.size_bytes() as isize);
        let numbers = |n: &[isize]| n.iter().map(|&s| s as i64).collect::<Vec<i64>>();
        Ok(Tensor {
            ptr: std::ptr::with_exposed_provenance_mut(at),
            dtype: source.dtype,
            shape: lies.shape.iter().map(|&d| d as i64).collect(),
            strides: numbers(&lies.strides),
        })
    }

    /// Sums of the taps of a weight, filters, channels, 3 x 3, in the stream's order.
    fn sum_taps(&self, weight: &Tensor, stream: StreamHandle) -> Result<Block> {
        let Program { lowered, entries, memory, .. } = &*self.program;
        let kernel = lowered.tap_sums.iter().find(|(dtype, _)| *dtype == weight.dtype);
        let (Some((_, kernel)), [filters, channels, 3, 3]) = (kernel, weight.shape.as_slice()) else {
            return Err(Error::Backend { backend: NAME, what: "a weight without sums of taps".to_owned() });
        };
        let block = memory.allocate(weight.bytes() / 9 * 16, "sums of a weight's taps")?;
        let numbers = [&[*filters, *channels], weight.strides.as_slice()].concat();
        if let Some(plain) = kernel.grid.geometry(&numbers, 1)? {
            let words = words(&kernel.args, &numbers)?;
            let places = vec![Some((0, 0)), Some((1, 0))];
            let call =
                Call { step: 0, entry: entries[kernel.kernel], words, places, plain, vector: None, only_if: None };
            let mut bound = call.bind(&[weight.ptr.addr() as u64, block.ptr().addr() as u64]);
            // SAFETY: the tensor is valid for its shape and strides by the caller's promise; the block holds four weights of
            // 2 x 2 taps.
            unsafe { launch(bound.function, &bound.geometry, &mut bound.words, stream)? };
        }
        Ok(block)
    }

    /// Addresses of the forms of packed weights that libraries read: the tensor's own where it lies so, else those of a copy,
    /// or of sums of its taps.
    fn place_taps(&self, bases: &mut [u64], run: &Run<'_>, held: &mut Held) -> Result<()> {
        let plan = &self.program.plan;
        for &pack in &self.sums {
            let weight = self.packed(pack, bases, run)?;
            let make = || self.sum_taps(&weight, run.stream);
            let form = run.weights.sums(pack, &mut || self.derive(run, make))?;
            bases[plan.buffers.len() + plan.packs.len() + pack] = form.ptr().addr() as u64;
            held.forms.push(form);
        }
        for &pack in &self.taps {
            let turned = turned(self.packed(pack, bases, run)?);
            bases[plan.buffers.len() + pack] = if turned.is_dense() {
                turned.ptr.addr() as u64
            } else {
                let make = || self.densify(&turned, run.stream);
                let form = run.weights.pack(pack, &mut || self.derive(run, make))?;
                let at = form.ptr().addr() as u64;
                held.forms.push(form);
                at
            };
        }
        for laid in &self.laid_out {
            laid.tell(self.packed(laid.pack, bases, run)?, bases);
        }
        Ok(())
    }

    /// Whether a weight of this set does not lie with its channels as neighbours already.
    fn lays_out(&self, weights: &WeightSet) -> bool {
        let plan = &self.program.plan;
        let lies_so = |pack: usize| match plan.buffers[plan.packs[pack].source.buffer.index()].kind {
            BufferKind::Parameter(slot) if is_whole_parameter(plan, pack) => {
                weights.tensor(slot as usize).is_some_and(|weight| turned(weight.clone()).is_dense())
            }
            _ => false,
        };
        self.laid_out.iter().any(|laid| !lies_so(laid.pack))
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
                flops: self.costs[at].0,
                bytes: self.costs[at].1,
            });
        }
        Ok(())
    }

    /// As one graph, made at the second run; where there is none to be had, launch by launch from then on.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn run_replayed(&self, bases: &[u64], stream: StreamHandle) -> Result<()> {
        let lock = || self.replays.lock().unwrap_or_else(PoisonError::into_inner);
        let mut replays = lock();
        replays.runs += 1;
        let mut refused = None;
        if replays.runs > 1 && self.no_graphs.get().is_none() {
            // SAFETY: the caller's promise.
            match unsafe { self.replay(&mut replays, bases, stream) } {
                Ok(()) => return Ok(()),
                Err(e) => refused = Some(e),
            }
        }
        drop(replays);
        // All of it is done again, should a graph have begun: a run reads arguments and writes results.
        // SAFETY: the caller's promise.
        unsafe { self.run_plain(bases, stream)? };
        // Had this failed too, it would not have been for the graph.
        if let Some(why) = refused {
            let _ = self.no_graphs.set(why.to_string());
            lock().of.clear();
            self.graph_bytes.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Launches the graph of a stream, made or renewed for these addresses.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`].
    unsafe fn replay(&self, replays: &mut Replays, bases: &[u64], stream: StreamHandle) -> Result<()> {
        let delegated: Vec<bool> = self.items.iter().filter_map(Item::delegated).map(|d| d.is_on(bases)).collect();
        let (own, known) = match replays.of.iter().position(|r| r.stream == stream) {
            Some(at) => {
                let Replay { own, graph, bases, delegated: was, .. } = replays.of.remove(at);
                // Another choice between a library and kernels is another graph.
                (own, (was == delegated).then_some((graph, bases)))
            }
            None => {
                if replays.of.len() == REPLAYS {
                    drop(replays.of.remove(0));
                }
                let own = (!delegated.is_empty()).then(|| CaptureStream::new(&self.program.device));
                (own.transpose()?, None)
            }
        };
        let renewed = known.and_then(|(mut graph, told)| {
            // What a library does at other addresses may have another shape: then the graph is made anew.
            // SAFETY: the caller's promise; addresses are renewed before every run.
            unsafe { self.renew(&mut graph, &told, bases, own.as_ref()) }.ok().map(|()| graph)
        });
        let graph = match renewed {
            Some(graph) => graph,
            // SAFETY: as above.
            None => unsafe { self.graph(bases, own.as_ref(), stream)? },
        };
        // SAFETY: the caller's promise.
        unsafe { graph.launch(stream)? };
        replays.of.push(Replay { stream, own, graph, bases: bases.to_vec(), delegated });
        self.graph_bytes.store(replays.of.iter().map(|r| r.graph.bytes()).sum(), Ordering::Relaxed);
        Ok(())
    }
}

impl SpecializedCuda {
    /// The link of a graph that runs an item on these addresses.
    ///
    /// # Safety
    /// As [`SpecializedCuda::run_plain`], for every run of the graph.
    unsafe fn link(&self, item: &Item, bases: &[u64], stream: Option<&CaptureStream>) -> Result<Node> {
        match (item, stream) {
            (Item::Kernel(call), _) => {
                let Bound { function, geometry, words } = call.bind(bases);
                Ok(Node::Kernel(GraphLaunch { function, geometry, args: words }))
            }
            // SAFETY: the caller's promise.
            (Item::Delegated(d), Some(stream)) => stream
                .capture(|stream| unsafe { d.record(bases, stream) })
                .map(Node::Captured)
                .map_err(|e| self.at_step(d.step, e)),
            (Item::Delegated(_), None) => Err(Error::Backend { backend: NAME, what: "no stream to capture on".into() }),
        }
    }

    /// A graph of everything.
    ///
    /// # Safety
    /// As [`SpecializedCuda::link`].
    unsafe fn graph(&self, bases: &[u64], stream: Option<&CaptureStream>, on: StreamHandle) -> Result<Graph> {
        // SAFETY: the caller's promise.
        let chain = self.items.iter().map(|item| unsafe { self.link(item, bases, stream) });
        let chain = chain.collect::<Result<Vec<_>>>()?;
        // SAFETY: the caller's promise.
        unsafe { Graph::new(&self.program.device, chain, on) }
    }

    /// New addresses for the links that read others than a graph was `told`.
    ///
    /// # Safety
    /// As [`SpecializedCuda::link`].
    unsafe fn renew(
        &self,
        graph: &mut Graph,
        told: &[u64],
        bases: &[u64],
        stream: Option<&CaptureStream>,
    ) -> Result<()> {
        let changed: Vec<bool> = told.iter().zip(bases).map(|(a, b)| a != b).collect();
        if !changed.contains(&true) {
            return Ok(());
        }
        for (at, item) in self.items.iter().enumerate() {
            if item.reads(&changed) {
                // SAFETY: the caller's promise.
                unsafe { graph.update(at, self.link(item, bases, stream)?)? };
            }
        }
        Ok(())
    }
}

impl SpecializedCuda {
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

/// A convolution's weight with its channels last.
fn turned(weight: Tensor) -> Tensor {
    let behind = |values: &[i64]| [&values[..1], &values[2..], &values[1..2]].concat();
    Tensor { shape: behind(&weight.shape), strides: behind(&weight.strides), ..weight }
}

fn is_whole_parameter(plan: &Plan, pack: usize) -> bool {
    let source = &plan.packs[pack].source;
    match plan.buffers[source.buffer.index()].kind {
        BufferKind::Parameter(slot) => source.is_whole(&plan.graph.parameters[slot as usize].ty),
        _ => false,
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

fn missing(what: &str, index: u32) -> Error {
    Error::Backend { backend: NAME, what: format!("{what} {index} is missing") }
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

    fn costs(&self) -> Vec<(u64, u64)> {
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
