//! A specialized plan: calls in order, and a run of them over lent memory.

use std::sync::Arc;
use std::time::Instant;

use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;

use super::specialize::Maker;
use super::{NAME, Program, copy};
use crate::backend::null::Arena;
use crate::backend::tensor::{Block, Memory, SystemMemory, Tensor};
use crate::backend::weights::WeightSet;
use crate::backend::{Run, Specialized, StepTime};
use crate::memory::ALIGN_BYTES;
use crate::plan::{Access, BufferKind, ConcreteAccess, Plan, Step};
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
    arena: Arena,
    calls: Vec<Box<dyn Call>>,
    prepare: Vec<Box<dyn Call>>,
    /// Operations and bytes of each step.
    costs: Vec<(u64, u64)>,
    /// Bytes from the arena's start, for each buffer and scratch buffer; `None` for what lies elsewhere.
    offsets: Vec<Option<usize>>,
    /// Buffer and slot of each input, parameter and constant; buffer of each output.
    inputs: Vec<(usize, usize)>,
    parameters: Vec<(usize, usize)>,
    constants: Vec<(usize, usize)>,
    outputs: Vec<(usize, usize)>,
    derived: Vec<(usize, usize)>,
    /// Sizes of inputs and outputs, in the order of `inputs`, then `outputs`.
    shapes: Vec<Vec<i64>>,
    /// By buffer: whether a step reads the buffer itself, not only a packed form of it.
    read: Vec<bool>,
}

/// Buffers that are read where they lie. A packed weight made of a whole parameter is packed from any strides.
fn read_buffers(plan: &Plan) -> Vec<bool> {
    let mut read = vec![false; plan.buffers.len()];
    for step in plan.prepare.iter().chain(&plan.steps) {
        let packed = step.pack.filter(|_| whole_parameter(plan, &step.operands[1]).is_some()).map(|_| 1);
        let operands = step.operands.iter().enumerate().filter(|(at, _)| Some(*at) != packed).map(|(_, a)| a);
        operands.chain(&step.loads).for_each(|a| read[a.buffer.index()] = true);
    }
    read
}

fn calls_of(
    program: &Program,
    bindings: &[i64],
    preparing: bool,
    scratch: &mut Vec<crate::memory::Request>,
) -> Result<Vec<Box<dyn Call>>> {
    let (steps, bodies) = match preparing {
        true => (&program.plan.prepare, &program.prepare_bodies),
        false => (&program.plan.steps, &program.bodies),
    };
    let mut calls: Vec<Box<dyn Call>> = Vec::with_capacity(steps.len());
    for (at, (step, body)) in steps.iter().zip(bodies).enumerate() {
        let empty = step.stores.iter().map(|s| s.concrete(bindings)).all(|s| s.is_ok_and(|s| s.numel() == 0));
        calls.push(match empty {
            true => Box::new(Nothing),
            false => Maker { program, bindings, step, body: body.as_ref(), at, scratch }.make()?,
        });
    }
    Ok(calls)
}

fn cost(step: &Step, bindings: &[i64]) -> Result<(u64, u64)> {
    let flops = step.flops.eval(bindings)?;
    let mut bytes = 0;
    for access in step.accesses() {
        let concrete: ConcreteAccess = access.concrete(bindings)?;
        let touched = |(size, stride): (&usize, &isize)| if *stride == 0 { 1 } else { *size };
        bytes +=
            concrete.shape.iter().zip(&concrete.strides).map(touched).product::<usize>() * concrete.dtype.size_bytes();
    }
    Ok((u64::try_from(flops).unwrap_or(0), bytes as u64))
}

impl SpecializedCpu {
    pub fn new(program: Arc<Program>, bindings: &[i64]) -> Result<Self> {
        let plan = program.plan.clone();
        let mut scratch = Vec::new();
        let prepare = calls_of(&program, bindings, true, &mut scratch)?;
        if !scratch.is_empty() {
            return Err(Error::Backend { backend: NAME, what: "a preparing step asks for scratch memory".to_owned() });
        }
        let calls = calls_of(&program, bindings, false, &mut scratch)?;
        let arena = Arena::of(&plan, bindings, &scratch)?;
        let mut offsets = vec![None; plan.buffers.len() + scratch.len()];
        let own = arena.buffers.iter().map(|id| id.index());
        let extra = plan.buffers.len()..plan.buffers.len() + scratch.len();
        own.chain(extra).zip(&arena.layout.offsets).for_each(|(at, &offset)| offsets[at] = Some(offset));
        let of = |pick: fn(BufferKind) -> Option<u32>| -> Vec<(usize, usize)> {
            let buffers = plan.buffers.iter().enumerate();
            buffers.filter_map(|(at, b)| pick(b.kind).map(|index| (at, index as usize))).collect()
        };
        let index = |kind: fn(BufferKind) -> Option<u32>| of(kind);
        let mut own = Self {
            inputs: index(|k| if let BufferKind::Input(i) = k { Some(i) } else { None }),
            parameters: index(|k| if let BufferKind::Parameter(i) = k { Some(i) } else { None }),
            constants: index(|k| if let BufferKind::Constant(i) = k { Some(i) } else { None }),
            outputs: index(|k| if let BufferKind::Output(i) = k { Some(i) } else { None }),
            derived: index(|k| if k == BufferKind::Derived { Some(0) } else { None }),
            read: read_buffers(&plan),
            costs: plan.steps.iter().map(|s| cost(s, bindings)).collect::<Result<_>>()?,
            bindings: bindings.to_vec(),
            program,
            arena,
            calls,
            prepare,
            offsets,
            shapes: Vec::new(),
        };
        let ends = own.inputs.iter().chain(&own.outputs);
        own.shapes =
            ends.map(|&(b, _)| plan.graph.ty(plan.buffers[b].value).concrete(bindings)).collect::<Result<_>>()?;
        Ok(own)
    }

    /// Addresses of all buffers. Strided inputs are copied into `copies`; parameters that a step reads directly must be
    /// dense, and are copied once per weight set if they are not.
    fn bases(&self, run: &Run<'_>, copies: &mut Vec<Block>) -> Result<Vec<*mut u8>> {
        let mut bases: Vec<*mut u8> = self
            .offsets
            .iter()
            .map(|o| o.map_or(std::ptr::null_mut(), |offset| run.arena.wrapping_add(offset)))
            .collect();
        for (&(buffer, index), shape) in self.inputs.iter().zip(&self.shapes) {
            let tensor = run.inputs.get(index).ok_or_else(|| missing("input", index))?;
            self.check_shape(tensor, buffer, shape, "input")?;
            bases[buffer] = if tensor.is_dense() {
                tensor.ptr
            } else {
                copies.push(densify(tensor, "a dense copy of an input")?);
                copies[copies.len() - 1].ptr()
            };
        }
        for (&(buffer, index), shape) in self.outputs.iter().zip(&self.shapes[self.inputs.len()..]) {
            let tensor = run.outputs.get(index).ok_or_else(|| missing("output", index))?;
            self.check_shape(tensor, buffer, shape, "output")?;
            if !tensor.is_dense() {
                return Err(Error::Backend { backend: NAME, what: format!("output {index} is not dense") });
            }
            bases[buffer] = tensor.ptr;
        }
        for &(buffer, index) in &self.parameters {
            let tensor = run.weights.tensor(index).ok_or_else(|| missing("weight", index))?;
            bases[buffer] = match run.weights.is_dense(index) || !self.read[buffer] {
                true => tensor.ptr,
                false => run.weights.dense(index, &mut || densify(tensor, "a dense copy of a weight"))?,
            };
        }
        for &(buffer, index) in &self.constants {
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

    /// Computes what depends on weights alone, once per weight set.
    unsafe fn prepare(&self, bases: &mut [*mut u8], weights: &WeightSet) -> Result<()> {
        if self.derived.is_empty() {
            return Ok(());
        }
        let plan = &self.program.plan;
        let blocks = weights.prepared(&mut || {
            let mut blocks: Vec<Option<Block>> = plan.buffers.iter().map(|_| None).collect();
            let mut all = bases.to_vec();
            for &(buffer, _) in &self.derived {
                let b = &plan.buffers[buffer];
                let bytes = b.numel.eval(&[])? as usize * b.dtype.size_bytes();
                let block = SystemMemory.allocate(bytes, "a value derived from weights")?;
                all[buffer] = block.ptr();
                blocks[buffer] = Some(block);
            }
            let ctx = self.ctx(&all, weights);
            // SAFETY: parameters and constants are valid by the caller's promise, derived buffers were just made.
            self.prepare.iter().try_for_each(|call| unsafe { call.run(&ctx) })?;
            Ok(blocks)
        })?;
        for (base, block) in bases.iter_mut().zip(blocks.iter()) {
            if let Some(block) = block {
                *base = block.ptr();
            }
        }
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

    fn time(&self, at: usize, start: Instant) -> StepTime {
        let plan = &self.program.plan;
        let step = &plan.steps[at];
        StepTime {
            step: plan.step_name(step),
            kernel: step.kernel.name(),
            module: plan.graph.path(step.value).to_owned(),
            time: start.elapsed(),
            flops: self.costs[at].0,
            bytes: self.costs[at].1,
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
    fn arena_bytes(&self) -> usize {
        self.arena.layout.bytes
    }

    fn lower_bound_bytes(&self) -> usize {
        self.arena.layout.lower_bound_bytes
    }

    fn memory_text(&self) -> String {
        self.arena.text()
    }

    unsafe fn run(&self, run: Run<'_>) -> Result<()> {
        if !run.arena.addr().is_multiple_of(ALIGN_BYTES) {
            return Err(Error::Backend { backend: NAME, what: "the arena is not aligned".to_owned() });
        }
        let mut copies = Vec::new();
        let mut bases = self.bases(&run, &mut copies)?;
        // SAFETY: the caller's promise.
        unsafe { self.prepare(&mut bases, run.weights)? };
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
        BufferKind::Parameter(slot) if *access == Access::dense(access.buffer, plan.graph.ty(buffer.value)) => {
            Some(slot as usize)
        }
        _ => None,
    }
}
