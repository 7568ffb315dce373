//! In-place steps: a pointwise result takes over the buffer of an operand that dies.
//!
//! Every element of the result is stored by the thread that has loaded the same element of the operand, so sharing is
//! safe where both lie dense in buffers of one size, and where the operand is read through the body alone. A copy that
//! takes over its operand's buffer has nothing to do: a chain of writes into slices of one tensor copies it once at most.

use std::collections::HashMap;

use super::liveness::{LiveRange, live_ranges};
use super::{Access, Buffer, BufferId, BufferKind, Step};
use crate::ir::Dim;
use crate::select::Kernel;

/// Merges buffers of results into those of operands that die, and what ends as a copy in the caller's memory into that;
/// unused buffers stay listed and cost nothing.
pub(super) fn reuse(steps: &mut Vec<Step>, buffers: &[Buffer]) {
    let mut ranges = live_ranges(steps, buffers.len());
    let mut merged: HashMap<BufferId, BufferId> = HashMap::new();
    let mut delivered: HashMap<BufferId, BufferId> = HashMap::new();
    for (at, step) in steps.iter_mut().enumerate() {
        for access in step.accesses_mut() {
            while let Some(&into) = merged.get(&access.buffer) {
                access.buffer = into;
            }
        }
        if let Some((from, to)) = moved(step, at, buffers, &ranges)
            && buffers[to.index()].kind != BufferKind::Arena
        {
            delivered.insert(from, to);
            continue;
        }
        for store in 0..step.stores.len() {
            let Some((from, into)) = candidate(step, store, at, buffers, &ranges) else { continue };
            merged.insert(from, into);
            let end = ranges[from.index()].map_or(at, |r| r.last);
            if let Some(range) = &mut ranges[into.index()] {
                range.last = end;
            }
            step.stores[store].buffer = into;
        }
    }
    for access in steps.iter_mut().flat_map(Step::accesses_mut) {
        access.buffer = *delivered.get(&access.buffer).unwrap_or(&access.buffer);
    }
    steps.retain(|step| step.kernel != Kernel::Copy || !step.operands[0].is_same_place(&step.stores[0]));
}

/// The buffers of a step that copies all of one that dies to all of one that begins.
fn moved(step: &Step, at: usize, buffers: &[Buffer], ranges: &[Option<LiveRange>]) -> Option<(BufferId, BufferId)> {
    let (Kernel::Copy, [from], [to]) = (step.kernel, step.operands.as_slice(), step.stores.as_slice()) else {
        return None;
    };
    let dies = ranges[from.buffer.index()].is_some_and(|r| r.last == at);
    let begins = ranges[to.buffer.index()].is_some_and(|r| r.first == at);
    let alike = (from.dtype, &from.shape, &from.strides) == (to.dtype, &to.shape, &to.strides);
    let is_ours = buffers[from.buffer.index()].kind == BufferKind::Arena;
    let is_whole = covers(from, buffers) && covers(to, buffers);
    (dies && begins && alike && is_ours && is_whole).then_some((from.buffer, to.buffer))
}

/// The buffer that store `store` of the step writes, and the one it can take over.
fn candidate(
    step: &Step,
    store: usize,
    at: usize,
    buffers: &[Buffer],
    ranges: &[Option<LiveRange>],
) -> Option<(BufferId, BufferId)> {
    if let Some((from, to)) = moved(step, at, buffers, ranges) {
        return Some((to, from));
    }
    // Norms read their operand for statistics, and are done with an image or row when its first result is stored.
    let operands = match step.kernel {
        Kernel::Loop | Kernel::Linear | Kernel::Matmul | Kernel::Convolution => step.operands.as_slice(),
        Kernel::GroupNorm | Kernel::LayerNorm | Kernel::RmsNorm => &step.operands[1..],
        _ => return None,
    };
    let out = &step.stores[store];
    let starts_here = ranges[out.buffer.index()].is_some_and(|r| r.first == at);
    let written_once = step.stores.iter().filter(|s| s.buffer == out.buffer).count() == 1;
    if !starts_here || !written_once || !fills(out, buffers) {
        return None;
    }
    let dies = |a: &Access| ranges[a.buffer.index()].is_some_and(|r| r.last == at);
    let only_load = |a: &Access| {
        operands.iter().all(|o| o.buffer != a.buffer)
            && step.stores.iter().all(|s| s.buffer != a.buffer)
            && step.loads.iter().filter(|l| l.buffer == a.buffer).count() == 1
    };
    let fits = |a: &Access| {
        a.shape == out.shape
            && a.strides == out.strides
            && a.dtype.size_bytes() == out.dtype.size_bytes()
            && fills(a, buffers)
    };
    let load = step.loads.iter().find(|a| fits(a) && dies(a) && only_load(a))?;
    Some((out.buffer, load.buffer))
}

/// The access covers an arena buffer, whole and once.
fn fills(access: &Access, buffers: &[Buffer]) -> bool {
    buffers[access.buffer.index()].kind == BufferKind::Arena && covers(access, buffers)
}

/// The access covers its buffer, whole and once.
fn covers(access: &Access, buffers: &[Buffer]) -> bool {
    access.offset.is(0)
        && Dim::product(&access.shape) == buffers[access.buffer.index()].numel
        && access.strides.iter().zip(&access.shape).all(|(stride, size)| size.is(1) || !stride.is(0))
}
