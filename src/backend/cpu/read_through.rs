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
/// is alive then in any case, or small: at no step more is alive.
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
    let mut others = plan.steps[..norm_at].iter().chain(between).chain(later);
    let is_arena = |a: &Access| plan.buffers[a.buffer.index()].kind == BufferKind::Arena;
    let touches = |step: &Step, a: &Access| step.accesses().filter(|other| other.buffer == a.buffer).count();
    let writes_operands = |step: &Step| {
        let mut written = step.stores.iter().chain(&step.scratch);
        written.any(|w| norm.reads().any(|a| a.buffer == w.buffer))
    };
    let is_alike_for_pixels = |load: &Access| load.strides[1..load.strides.len() - 1].iter().all(|stride| stride.is(0));
    let stays = |load: &Access| {
        !is_arena(load) || touches(convolution, load) > 0 || later.iter().any(|step| touches(step, load) > 0)
    };
    norm.kernel == Kernel::GroupNorm
        && norm.body.is_some()
        && result.is_same_place(read)
        && (norm.space == read.shape && x.shape == read.shape)
        && is_arena(result)
        && touches(convolution, result) == 1
        // Nor is it in place of something, or a part.
        && others.all(|step| touches(step, result) == 0)
        && norm.loads.iter().all(|load| is_alike_for_pixels(load) || stays(load))
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
            let from: Vec<Bound> =
                loads.iter().zip(program.load_types()).map(|(load, dtype)| load.from(&at, *dtype)).collect();
            let space = Space::new(&dims[..space.rank]);
            let mut to = Bound::contiguous(part.to, &space);
            to.strides[height] = part.row as isize;
            // SAFETY: a part of the operands, which are valid by the promise of the run that calls this; `to` has room for it,
            // as the convolution's ring is this one.
            unsafe { run_loop(ctx.pool, program, &space, &from, &[to]) };
        };
        with(Made { ring: self.ring, make: &make })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes::{self, PassCtx};
    use crate::plan::{self, PlanOptions};
    use crate::target::Target;

    /// How many pairs a graph has that is these lines behind an image, its factor, and parameters.
    fn count(lines: &str) -> usize {
        const TYPE: &str = "f32[s0,s1,s2,32]";
        let convolution = "{stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}";
        let norm = "group_norm(OF, %2, %3) {num_groups=4, eps=1e-5, channel_dim=3}";
        let mut text = r#"symbol s0 "batch" = [1, 2]
symbol s1 "height" = [8, 201]
symbol s2 "width" = [9, 262]
input 0 "x": f32[s0,s1,s2,32]
input 1 "factor": f32[s0,1,1,32]
parameter 0 "norm.w": f32[32]
parameter 1 "norm.b": f32[32]
parameter 2 "w": f32[32,32,3,3]
%0: f32[s0,s1,s2,32] = input() {index=0}
%1: f32[s0,1,1,32] = input() {index=1}
%2: f32[32] = parameter() {index=0}
%3: f32[32] = parameter() {index=1}
%4: f32[32,32,3,3] = parameter() {index=2}
"#
        .to_owned();
        for (at, line) in lines.split("; ").enumerate() {
            let line = match line.split_once(' ') {
                Some(("return", _)) => line.to_owned(),
                Some(("conv", of)) => format!("%{}: {TYPE} = convolution({of}, %4) {convolution}", at + 5),
                Some(("norm", of)) => format!("%{}: {TYPE} = {}", at + 5, norm.replace("OF", of)),
                _ => format!("%{}: {}", at + 5, line.replace("T =", &format!("{TYPE} ="))),
            };
            text += &line;
            text.push('\n');
        }
        let graph = crate::ir::parse_graph(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let ctx = PassCtx::default();
        let graph = passes::run_pipeline(graph, &ctx, &mut |_, _, _, _| {}).unwrap();
        let groups = passes::form_groups(&graph, &ctx).unwrap();
        let mut plan = plan::build(Arc::new(graph), groups, &Target::host(), PlanOptions::default()).unwrap();
        plan.reorder().unwrap();
        plan.share_sizes();
        plan::verify::verify(&plan).unwrap();
        pairs(&plan).len()
    }

    #[test]
    fn norms_that_one_convolution_reads() {
        assert_eq!(count("norm %0; conv %5; return %6"), 1, "of an argument");
        assert_eq!(count("norm %0; T = silu(%5); conv %6; return %7"), 1, "with a body");
        assert_eq!(count("norm %0; T = mul(%5, %1); conv %6; return %7"), 1, "with a factor by image");
        assert_eq!(count("norm %0; T = add(%5, %0); conv %6; return %7"), 1, "with another image that stays");
        assert_eq!(count("conv %0; norm %5; conv %6; conv %7; T = mul(%8, %5); return %9"), 1, "of what is read later");
    }

    #[test]
    fn norms_that_need_memory_of_their_own() {
        assert_eq!(count("norm %0; conv %5; return %6, %5"), 0, "a result");
        assert_eq!(count("norm %0; conv %5; conv %6; T = mul(%7, %5); return %8"), 0, "read later");
        assert_eq!(count("norm %0; conv %5; T = add(%6, %5); return %7"), 0, "a residual");
        assert_eq!(count("conv %0; norm %5; conv %6; return %7"), 0, "in place of its operand");
        assert_eq!(count("conv %0; norm %0; T = add(%6, %5); conv %7; return %8"), 0, "in place of what is added");
        assert_eq!(
            count("conv %0; norm %5; conv %6; T = add(%7, %5); conv %8; return %9"),
            0,
            "its operand is written"
        );
        let part = "T = relu(%0); norm %0; f32[2*s0,s1,s2,32] = cat(%5, %6) {dim=0}; f32[2,s0,s1,s2,32] = reshape(%7); \
                    f32[1,s0,s1,s2,32] = slice(%8) {dim=0, start=1, step=1}; T = reshape(%9); conv %10; return %11";
        assert_eq!(count(part), 0, "a part of something");
        let dies = "conv %0; conv %5; f32[2*s0,s1,s2,32] = cat(%5, %6) {dim=0}; f32[2*s0,s1,s2,32] = relu(%7); norm %5; \
                    conv %9; return %10, %8";
        assert_eq!(count(dies), 0, "of a part that nobody else reads any more");
    }
}
