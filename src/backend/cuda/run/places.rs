//! Where everything lies in a run: the plan's buffers, forms of weights that libraries or kernels read, scratch memory.
//!
//! Addresses are listed in this order: the plan's buffers, the forms of packed weights, the sums of their taps, what a run is
//! told of weights that it lays out anew ([`TOLD`]), scratch memory.

use std::sync::Arc;

use super::super::driver::{StreamHandle, launch};
use super::super::lower::DENSIFY_DIMS;
use super::super::{NAME, Program, cold, streams};
use super::SpecializedCuda;
use super::call::{Call, words};
use crate::backend::derived::Form;
use crate::backend::tensor::{Block, Tensor};
use crate::backend::{Run, WeightSet};
use crate::plan::workspace::Workspace;
use crate::plan::{BufferKind, MemoryMode, PackForm, Plan};
use crate::{Error, Result};

/// What a run is told of a weight that it lays out anew: where it lies, 0 if it need not be, and its strides.
pub(super) const TOLD: usize = 6;

/// With `memory="low"`, no copy of a weight is kept.
pub(super) fn is_low(plan: &Plan) -> bool {
    plan.options.memory == MemoryMode::Low
}

/// Where what a run is told of a packed weight begins among the addresses: behind the plan's buffers, the forms of packed
/// weights, and the sums of their taps.
pub(super) fn first_told(plan: &Plan, pack: usize) -> usize {
    let is_laid = |pack: &&crate::plan::Pack| is_low(plan) && matches!(pack.form, PackForm::Convolution { .. });
    plan.buffers.len() + 2 * plan.packs.len() + TOLD * plan.packs[..pack].iter().filter(is_laid).count()
}

/// Scratch memory follows that.
pub(super) fn first_scratch(plan: &Plan) -> usize {
    first_told(plan, plan.packs.len())
}

/// What addresses of a run point into.
#[derive(Default)]
pub(super) struct Held {
    pub(super) copies: Vec<Block>,
    pub(super) forms: Vec<Arc<Form>>,
    pub(super) constants: Option<Arc<[Block]>>,
}

/// A packed weight that a step lays out anew in its scratch memory, at each run.
#[derive(Debug)]
pub(super) struct LaidOut {
    pub(super) pack: usize,
    /// Where it is laid out. In a run whose weight lies so already, this is the address of the weight.
    pub(super) buffer: usize,
    /// What a run is told of it begins here.
    pub(super) told: usize,
}

impl LaidOut {
    /// Says where the weight lies, and so whether there is anything to do.
    pub(super) fn tell(&self, weight: Tensor, bases: &mut [u64]) {
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
pub(super) const LAID_OUT: &str = "a weight with its channels as neighbours";

/// The address of a buffer that nothing reads while the libraries do not fail.
pub(super) const LEFT_OUT: u64 = u64::MAX;

/// Bytes from the arena's start, for each buffer and scratch buffer.
pub(super) fn offsets_of(plan: &Plan, workspace: &Workspace) -> Vec<Option<usize>> {
    let first = first_scratch(plan);
    let end = first + workspace.requests.len() - workspace.buffers.len();
    let mut offsets = vec![None; end];
    let own = workspace.buffers.iter().map(|id| id.index());
    own.chain(first..end).zip(&workspace.layout.offsets).for_each(|(at, &offset)| offsets[at] = Some(offset));
    offsets
}

impl SpecializedCuda {
    /// Addresses of all buffers but the derived ones. `held` receives copies of strided arguments, and what else the
    /// addresses point into. A strided weight that only stand-ins for a library would read is left out, unless `all` are
    /// wanted: its address is [`LEFT_OUT`] then.
    pub(super) fn bases(&self, run: &Run<'_>, held: &mut Held, all: bool) -> Result<Vec<u64>> {
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
    pub(super) fn packed_as_planned(&self, pack: usize, bases: &[u64]) -> Result<Tensor> {
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
    pub(super) fn place_taps(&self, bases: &mut [u64], run: &Run<'_>, held: &mut Held) -> Result<()> {
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
    pub(super) fn lays_out(&self, weights: &WeightSet) -> bool {
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
    pub(super) unsafe fn prepare(&self, bases: &mut [u64], run: &Run<'_>, held: &mut Held) -> Result<()> {
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
}

/// A convolution's weight with its channels last.
pub(super) fn turned(weight: Tensor) -> Tensor {
    let behind = |values: &[i64]| [&values[..1], &values[2..], &values[1..2]].concat();
    Tensor { shape: behind(&weight.shape), strides: behind(&weight.strides), ..weight }
}

pub(super) fn is_whole_parameter(plan: &Plan, pack: usize) -> bool {
    let source = &plan.packs[pack].source;
    match plan.buffers[source.buffer.index()].kind {
        BufferKind::Parameter(slot) => source.is_whole(&plan.graph.parameters[slot as usize].ty),
        _ => false,
    }
}

fn missing(what: &str, index: u32) -> Error {
    Error::Backend { backend: NAME, what: format!("{what} {index} is missing") }
}
