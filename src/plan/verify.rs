//! Checks of a plan, at every sample binding of its graph.
//!
//! - every access stays inside its buffer;
//! - steps write outputs, derived buffers (only while preparing) and the arena, never inputs, parameters or constants;
//! - what a step reads has been written: every arena and output buffer it reads is written by an earlier step;
//! - every output is written.

use super::{Access, BufferKind, Plan, Step};
use crate::{Error, Result};

/// Checks `plan`.
///
/// # Errors
/// [`Error::Verify`] naming step and rule.
pub fn verify(plan: &Plan) -> Result<()> {
    let mut written: Vec<bool> = plan
        .buffers
        .iter()
        .map(|b| matches!(b.kind, BufferKind::Input(_) | BufferKind::Parameter(_) | BufferKind::Constant(_)))
        .collect();
    for (stage, steps) in [("prepare", &plan.prepare), ("step", &plan.steps)] {
        for (at, step) in steps.iter().enumerate() {
            check_step(plan, step, stage == "prepare", &mut written)
                .map_err(|what| broken(format!("{stage} {at} ({}): {what}", step.kernel.name())))?;
        }
    }
    for id in &plan.outputs {
        if !written[id.index()] && plan.buffers[id.index()].numel.as_constant() != Some(0) {
            return Err(broken(format!("output {id} is never written")));
        }
    }
    for bindings in plan.graph.sample_bindings() {
        let steps = plan.prepare.iter().chain(&plan.steps);
        for access in steps.flat_map(Step::accesses) {
            check_bounds(plan, access, &bindings)?;
        }
    }
    Ok(())
}

fn broken(what: String) -> Error {
    Error::Verify { pass: "plan".to_owned(), what }
}

fn check_step(plan: &Plan, step: &Step, preparing: bool, written: &mut [bool]) -> Result<(), String> {
    step.scratch.iter().for_each(|s| written[s.buffer.index()] = true);
    for read in step.reads() {
        if !written[read.buffer.index()] && !is_empty(plan, read) {
            return Err(format!("reads {read}, which nothing has written"));
        }
    }
    for store in &step.stores {
        let allowed = match plan.buffers[store.buffer.index()].kind {
            BufferKind::Output(_) | BufferKind::Arena => !preparing,
            BufferKind::Derived => preparing,
            BufferKind::Input(_) | BufferKind::Parameter(_) | BufferKind::Constant(_) => false,
        };
        if !allowed {
            return Err(format!("writes {store}"));
        }
        written[store.buffer.index()] = true;
    }
    Ok(())
}

/// Whether an access is of no elements, whatever the sizes: nobody writes what has none.
fn is_empty(plan: &Plan, access: &Access) -> bool {
    plan.buffers[access.buffer.index()].numel.as_constant() == Some(0)
}

fn check_bounds(plan: &Plan, access: &Access, bindings: &[i64]) -> Result<()> {
    let buffer = &plan.buffers[access.buffer.index()];
    let concrete = access.concrete(bindings)?;
    if concrete.numel() == 0 {
        return Ok(());
    }
    let (mut low, mut high) = (concrete.offset, concrete.offset);
    for (&size, &stride) in concrete.shape.iter().zip(&concrete.strides) {
        let reach = (size as isize - 1) * stride;
        if reach < 0 { low += reach } else { high += reach }
    }
    let numel = buffer.numel.eval(bindings)? as isize;
    if low < 0 || high >= numel {
        return Err(broken(format!("{access} leaves its buffer of {numel} elements at {bindings:?}")));
    }
    Ok(())
}
