//! Group norms whose result a convolution reads while it is made: `conv(silu(group_norm(x)))` with a few rows of the norm's
//! result in memory at a time.
//!
//! Winograd's forms walk over a large image in bands. A norm's step is left with the statistics then, and its body, whatever
//! it does to `x`, runs on the rows that a band reads before that band does, into a ring. Whether a convolution walks in such
//! a way follows from its sizes, so a plan knows nothing of this: it lists both steps and a buffer between them. [`pairs`]
//! finds the steps once for each program; a specialization takes those whose [ring](super::convolution::way) is small,
//! and leaves that buffer out of its workspace.

use std::sync::Arc;

use oxidiff_kernels::cpu::conv_algorithm::Algorithm;
use oxidiff_kernels::cpu::conv_winograd::{Made, Part, Ring};
use oxidiff_kernels::cpu::tile_exec::{Prepared, run_loop};
use oxidiff_kernels::tile::{Bound, Space};

use super::run::Ctx;
use super::specialize::Maker;
use super::tile::TileArgs;
use crate::Result;
use crate::plan::liveness::LiveRange;
use crate::plan::{Access, BufferId, BufferKind, Plan, Step};
use crate::select::Kernel;

/// Steps of a norm and of the one convolution that reads its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pair {
    pub norm: usize,
    pub convolution: usize,
}

/// How a convolution reads at some sizes. Decided once: tuning may choose another form meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub algorithm: Algorithm,
    pub ring: Ring,
}

/// Every pair of a plan that could be one, at some sizes.
///
/// Nothing else may touch the norm's result, and nobody write over what it reads before the convolution is done. What it reads
/// is alive then in any case, or small: no arena gets larger.
pub(super) fn pairs(plan: &Plan) -> Vec<Pair> {
    let mut last_store = vec![None; plan.buffers.len()];
    let mut found = Vec::new();
    for (at, step) in plan.steps.iter().enumerate() {
        if let (Kernel::Convolution, Some(x)) = (step.kernel, step.operands.first())
            && let Some(norm) = last_store[x.buffer.index()]
            && is_pair(plan, norm, at)
        {
            found.push(Pair { norm, convolution: at });
        }
        step.stores.iter().chain(&step.scratch).for_each(|a| last_store[a.buffer.index()] = Some(at));
    }
    found
}

fn is_pair(plan: &Plan, norm_at: usize, at: usize) -> bool {
    let (norm, convolution) = (&plan.steps[norm_at], &plan.steps[at]);
    let ([x, ..], [result]) = (norm.operands.as_slice(), norm.stores.as_slice()) else { return false };
    let read = &convolution.operands[0];
    let (between, later) = (&plan.steps[norm_at + 1..at], &plan.steps[at + 1..]);
    let is_arena = |a: &Access| plan.buffers[a.buffer.index()].kind == BufferKind::Arena;
    let touches = |step: &Step, a: &Access| step.accesses().filter(|other| other.buffer == a.buffer).count();
    let writes_operands = |step: &Step| {
        let mut written = step.stores.iter().chain(&step.scratch);
        written.any(|w| norm.reads().any(|a| a.buffer == w.buffer))
    };
    let is_small = |load: &Access| load.strides[1..load.strides.len() - 1].iter().all(|stride| stride.is(0));
    norm.kernel == Kernel::GroupNorm
        && norm.body.is_some()
        && result.is_same_place(read)
        && (norm.space == read.shape && x.shape == read.shape)
        // Not in place: the result has memory of its own.
        && is_arena(result)
        && norm.reads().all(|a| a.buffer != result.buffer)
        && touches(convolution, result) == 1
        && between.iter().chain(later).all(|step| touches(step, result) == 0)
        && norm.loads.iter().all(|load| load.is_same_place(x) || is_small(load))
        && (!is_arena(x) || touches(convolution, x) > 0 || later.iter().any(|step| touches(step, x) > 0))
        && !between.iter().chain([convolution]).any(writes_operands)
}

/// The arena's buffers, with their live ranges, where `pairs` are read through.
pub(super) fn arena(plan: &Plan, arena: &[(BufferId, LiveRange)], pairs: &[(Pair, Way)]) -> Vec<(BufferId, LiveRange)> {
    let mut arena = arena.to_vec();
    for (pair, _) in pairs {
        let norm = &plan.steps[pair.norm];
        arena.retain(|(buffer, _)| *buffer != norm.stores[0].buffer);
        for (buffer, range) in &mut arena {
            if norm.reads().chain(&norm.scratch).any(|a| a.buffer == *buffer) {
                range.last = range.last.max(pair.convolution);
            }
        }
    }
    arena
}

/// What makes the rows of a norm's result.
pub(super) struct NormRows {
    args: TileArgs,
    ring: Ring,
}

impl NormRows {
    /// Of a norm's step and its body.
    pub fn new(maker: &Maker<'_>, norm: &Step, body: &Arc<Prepared>, ring: Ring) -> Result<Self> {
        Ok(Self { args: TileArgs::of(maker, norm, body)?, ring })
    }

    /// Calls `with` with what makes them.
    pub fn with<R>(&self, ctx: &Ctx<'_>, with: impl FnOnce(Made<'_>) -> R) -> R {
        let TileArgs { program, space, .. } = &self.args;
        let (loads, _) = self.args.bind(ctx);
        // Images, planes of one if there are several, rows, pixels, channels.
        let height = space.rank - 3;
        let depth = if height > 1 { space.dims[1] } else { 1 };
        let make = |part: Part| {
            let [[top, bottom], [left, right]] = [part.rows, part.columns];
            let (mut dims, mut at) = ([1; 5], [0; 5]);
            at[..height].copy_from_slice(&[part.plane / depth, part.plane % depth][..height]);
            at[height..height + 2].copy_from_slice(&[top, left]);
            dims[height..height + 3].copy_from_slice(&[bottom - top, right - left, space.cols()]);
            let shifted = loads.iter().zip(program.load_types()).map(|(load, dtype)| {
                let elements: isize = at.iter().zip(&load.strides).map(|(&at, stride)| at as isize * stride).sum();
                Bound { ptr: load.ptr.wrapping_offset(elements * dtype.size_bytes() as isize), ..*load }
            });
            let shifted: Vec<Bound> = shifted.collect();
            let space = Space::new(&dims[..space.rank]);
            let mut to = Bound::contiguous(part.to, &space);
            to.strides[height] = part.row as isize;
            // SAFETY: a part of the operands, which are valid by the promise of the run that calls this; `to` has room for it,
            // as the convolution's ring is this one.
            unsafe { run_loop(ctx.pool, program, &space, &shifted, &[to]) };
        };
        with(Made { ring: self.ring, make: &make })
    }
}
