//! The portable path: nodes evaluated by the interpreter on dense copies of their operands.

use std::collections::HashMap;

use super::copy;
use super::run::{Call, Ctx};
use super::specialize::{Maker, Operand};
use crate::ir::interp::{self, Tensor};
use crate::ir::{DType, ValueId};
use crate::{Error, Result};

struct InterpretCall {
    operands: Vec<(ValueId, Operand)>,
    nodes: Vec<ValueId>,
    results: Vec<(ValueId, Operand)>,
}

pub(super) fn make(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let results = step.stores.iter().map(|a| maker.operand(a)).collect::<Result<Vec<_>>>()?;
    Ok(Box::new(InterpretCall {
        operands: step.values.iter().copied().zip(maker.operands()?).collect(),
        nodes: step.nodes.clone(),
        results: step.results.iter().copied().zip(results).collect(),
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

impl Call for InterpretCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let graph = &ctx.plan.graph;
        let mut values: HashMap<ValueId, Tensor> = HashMap::with_capacity(self.operands.len() + self.nodes.len());
        for (value, operand) in &self.operands {
            // SAFETY: the caller's promise.
            values.insert(*value, unsafe { read(ctx, operand)? });
        }
        for &node in &self.nodes {
            let operands = graph.node(node).inputs.iter().map(|i| {
                values.get(i).ok_or_else(|| Error::Backend {
                    backend: super::NAME,
                    what: format!("%{} is not among the operands of its step", i.0),
                })
            });
            let operands = operands.collect::<Result<Vec<_>>>()?;
            let result = interp::eval_node(graph, node, ctx.bindings, &operands)?;
            values.insert(node, result);
        }
        for (value, operand) in &self.results {
            if let Some(tensor) = values.get(value) {
                // SAFETY: the caller's promise.
                unsafe { write(ctx, operand, tensor)? };
            }
        }
        Ok(())
    }
}
