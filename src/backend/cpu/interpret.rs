//! The portable path: nodes evaluated by the interpreter on dense copies of their operands.
//!
//! Nodes that work element by element (integers, mostly: T5's buckets of positions) are evaluated a block of rows at a time, by
//! all threads: what lies between them is then small, and not a multiple of the results in memory that nobody planned.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::copy;
use super::run::{Call, Ctx};
use super::specialize::{Maker, Operand};
use crate::ir::interp::{self, Tensor};
use crate::ir::{DType, Dim, Graph, Op, ValueId, ValueType};
use crate::{Error, Result};

/// Elements of a block, about.
const BLOCK: usize = 4096;

struct InterpretCall {
    operands: Vec<(ValueId, Operand)>,
    nodes: Vec<ValueId>,
    results: Vec<(ValueId, Operand)>,
    blocks: Option<Blocks>,
}

/// A cut of all values along one dimension, counted from the last.
struct Blocks {
    from_last: usize,
    /// Sizes there, of each block but the last and of all.
    step: usize,
    size: usize,
}

impl Blocks {
    /// How to cut the step, if every node works element by element and every result has the cut dimension.
    fn of(graph: &Graph, bindings: &[i64], nodes: &[ValueId], results: &[(ValueId, Operand)]) -> Option<Self> {
        let shape = &results.first()?.1.access.shape;
        let axis = (0..shape.len()).rev().max_by_key(|&axis| shape[axis])?;
        let (size, from_last) = (shape[axis], shape.len() - axis);
        let others = shape.iter().product::<usize>() / size.max(1);
        let cut = Self { from_last, step: (BLOCK / others.max(1)).max(1), size };
        let is_cut = |&v: &ValueId| {
            let op = graph.op(v);
            let is_pointwise = op.is_pointwise() || matches!(op, Op::Full { .. } | Op::SizeOf { .. } | Op::Expand);
            // A node that lacks the dimension is broadcast; one that has more of it would be cut wrongly.
            let fits = |shape: Vec<i64>| {
                let at = shape.len().checked_sub(from_last);
                at.is_none_or(|at| shape[at] == 1 || shape[at] == size as i64)
            };
            is_pointwise && graph.ty(v).concrete(bindings).is_ok_and(fits)
        };
        let has_axis = |(_, operand): &(ValueId, Operand)| cut.axis(&operand.access.shape).is_some();
        (cut.step < size && nodes.iter().all(is_cut) && results.iter().all(has_axis)).then_some(cut)
    }

    fn count(&self) -> usize {
        self.size.div_ceil(self.step)
    }

    /// The part of block `at` of a dimension of this size.
    fn range(&self, at: usize) -> Range<usize> {
        at * self.step..((at + 1) * self.step).min(self.size)
    }

    /// The dimension of a shape that is cut, if it has it.
    fn axis<T: Copy + TryInto<usize>>(&self, shape: &[T]) -> Option<usize> {
        let at = shape.len().checked_sub(self.from_last)?;
        (shape[at].try_into().ok() == Some(self.size)).then_some(at)
    }

    /// The part of an operand that block `at` reads or writes.
    fn operand(&self, operand: &Operand, at: usize) -> Operand {
        let mut part = operand.clone();
        if let Some(axis) = self.axis(&part.access.shape) {
            let range = self.range(at);
            let bytes = part.access.strides[axis] * (range.start * part.access.dtype.size_bytes()) as isize;
            part.slot.offset += bytes;
            part.access.shape[axis] = range.len();
        }
        part
    }

    /// The type of a node in block `at`.
    fn ty(&self, graph: &Graph, node: ValueId, bindings: &[i64], at: usize) -> Result<ValueType> {
        let mut shape = graph.ty(node).concrete(bindings)?;
        if let Some(axis) = self.axis(&shape) {
            shape[axis] = self.range(at).len() as i64;
        }
        Ok(ValueType::new(graph.ty(node).dtype, shape.into_iter().map(Dim::constant).collect()))
    }
}

pub(super) fn make(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let results = step.stores.iter().map(|a| maker.operand(a)).collect::<Result<Vec<_>>>()?;
    let results: Vec<(ValueId, Operand)> = step.results.iter().copied().zip(results).collect();
    Ok(Box::new(InterpretCall {
        blocks: Blocks::of(&maker.plan().graph, maker.bindings, &step.nodes, &results),
        operands: step.values.iter().copied().zip(maker.operands()?).collect(),
        nodes: step.nodes.clone(),
        results,
    }))
}

/// # Safety
/// The operand must be readable at its address.
unsafe fn read(ctx: &Ctx<'_>, operand: &Operand) -> Result<Tensor> {
    let access = &operand.access;
    let mut bytes = Vec::new();
    bytes
        .try_reserve_exact(access.bytes())
        .map_err(|_| Error::OutOfMemory { asked_bytes: access.bytes(), what: "an interpreted op".to_owned() })?;
    bytes.resize(access.bytes(), 0u8);
    let size = access.dtype.size_bytes();
    // SAFETY: forwarded; `bytes` holds a dense copy.
    unsafe {
        let (from, to) = (ctx.at(operand.slot), bytes.as_mut_ptr());
        copy::copy_strided(size, &access.shape, from, &access.strides, to, &copy::dense(&access.shape));
    }
    if access.dtype == DType::Bool {
        bytes.iter_mut().for_each(|b| *b = u8::from(*b != 0));
    }
    Tensor::new(access.dtype, access.shape.iter().map(|&d| d as i64).collect(), bytes)
}

/// # Safety
/// The operand must be writable at its address.
unsafe fn write(ctx: &Ctx<'_>, operand: &Operand, tensor: &Tensor) -> Result<()> {
    let access = &operand.access;
    // A workspace between two kernels of one group is f32, whatever the type of the value in the graph.
    let converted;
    let tensor = if tensor.dtype().is_float() && access.dtype.is_float() && tensor.dtype() != access.dtype {
        converted = Tensor::from_f64(access.dtype, tensor.shape(), &tensor.to_f64())?;
        &converted
    } else {
        tensor
    };
    if tensor.bytes().len() != access.bytes() || tensor.dtype() != access.dtype {
        return Err(Error::Backend { backend: super::NAME, what: "an interpreted op gave another type".to_owned() });
    }
    // SAFETY: forwarded; the tensor is dense.
    unsafe {
        let (from, to) = (tensor.bytes().as_ptr(), ctx.at(operand.slot));
        let dense = copy::dense(&access.shape);
        copy::copy_strided(access.dtype.size_bytes(), &access.shape, from, &dense, to, &access.strides);
    }
    Ok(())
}

impl InterpretCall {
    /// Computes everything, or one block of it.
    ///
    /// # Safety
    /// As [`Call::run`]; other threads may compute other blocks.
    unsafe fn compute(&self, ctx: &Ctx<'_>, block: Option<(&Blocks, usize)>) -> Result<()> {
        let graph = &ctx.plan.graph;
        let part = |operand: &Operand| block.map_or_else(|| operand.clone(), |(cut, at)| cut.operand(operand, at));
        let mut values: HashMap<ValueId, Tensor> = HashMap::with_capacity(self.operands.len() + self.nodes.len());
        for (value, operand) in &self.operands {
            // SAFETY: the caller's promise.
            values.insert(*value, unsafe { read(ctx, &part(operand))? });
        }
        for &node in &self.nodes {
            let operands = graph.node(node).inputs.iter().map(|i| {
                values.get(i).ok_or_else(|| Error::Backend {
                    backend: super::NAME,
                    what: format!("%{} is not among the operands of its step", i.0),
                })
            });
            let operands = operands.collect::<Result<Vec<_>>>()?;
            let result = match block {
                None => interp::eval_node(graph, node, ctx.bindings, &operands)?,
                Some((cut, at)) => {
                    let ty = cut.ty(graph, node, ctx.bindings, at)?;
                    interp::eval_part(graph, node, &ty, ctx.bindings, &operands)?
                }
            };
            values.insert(node, result);
        }
        for (value, operand) in &self.results {
            if let Some(tensor) = values.get(value) {
                // SAFETY: the caller's promise; every result has the dimension that is cut, so blocks write apart.
                unsafe { write(ctx, &part(operand), tensor)? };
            }
        }
        Ok(())
    }
}

/// What the blocks of one run share.
struct Shared<'a>(&'a Ctx<'a>);

// SAFETY: the context holds addresses and shared references; nobody changes it. What is done with the memory behind the
// addresses is the business of `InterpretCall::compute`.
unsafe impl Sync for Shared<'_> {}

impl<'a> Shared<'a> {
    fn ctx(&self) -> &'a Ctx<'a> {
        self.0
    }
}

impl Call for InterpretCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let Some(cut) = &self.blocks else {
            // SAFETY: the caller's promise.
            return unsafe { self.compute(ctx, None) };
        };
        let (failed, shared) = (Mutex::new(None), Shared(ctx));
        ctx.pool.run(cut.count(), |at, _| {
            // SAFETY: the caller's promise.
            if let Err(error) = unsafe { self.compute(shared.ctx(), Some((cut, at))) } {
                *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        });
        failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
    }
}
