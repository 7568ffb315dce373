//! Which weights stay packed between runs, and how the others are packed anew by every run.
//!
//! Kernels read weights in panels; only Winograd's convolutions and products of some hundred rows read them as they lie. Panels that are *kept* cost memory
//! for as long as their weights live; those made *on the fly* cost time in every run and a little of the arena, since they
//! are made in chunks of output columns that are used while they are in cache. A linear layer of some hundred rows needs
//! neither: its rows are packed instead of its weight (`gemm_swapped`), or its kernel packs a panel in L1 and uses it
//! (`packs_while_used`). Keeping saves the more per byte the less often
//! panels are used for each byte of them: [`Keeps::choose`] takes the most profitable ones until the limit is reached.
//!
//! The limit: everything under `memory="fast"`; nothing under `"low"`; under `"balanced"` what
//! [`kept_bytes`](MemoryMode::kept_bytes) leaves. A memory budget lowers it further.

use std::collections::BTreeSet;

use oxidiff_kernels::cpu::conv::Conv;
use oxidiff_kernels::cpu::conv_algorithm::{Algorithm, Keep, choose, cost_per_pair};
use oxidiff_kernels::cpu::conv_choice::{chunk_columns, for_all_threads, most_bytes};
use oxidiff_kernels::cpu::pack::packed_bytes;
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::isa::Isa;

use super::specialize::Maker;
use crate::backend::KeptForm;
use crate::plan::{MemoryMode, PlanOptions};

/// Multiply-adds that take as long as packing a byte, measured (30 GFLOP/s for every GB/s of packing).
const FLOPS_PER_PACKED_BYTE: f64 = 30.0;
/// A product of a few rows reads its weight as it lies; packed, it is read a little faster.
const FEW_ROWS_GAIN: f64 = 0.15;
/// Rows of such a product at most.
pub(super) const FEW_ROWS: usize = 4;
/// Bytes that are packed at a time where memory is short; see [`most_bytes`].
const SLIM_CHUNK_BYTES: usize = 256 << 10;
/// The same of rows, where it is not, for each thread.
const WORK_BYTES: usize = 4 << 20;

/// Bytes that the rows of a linear layer may take which are packed instead of its weight.
pub(super) fn most_work_bytes(maker: &Maker<'_>) -> usize {
    if maker.is_slim() { SLIM_CHUNK_BYTES } else { for_all_threads(WORK_BYTES) }
}

/// Bytes of panels that an option allows beside `prepared` bytes of values that are kept, too.
pub(super) const fn limit(memory: MemoryMode, prepared: usize) -> usize {
    match memory {
        MemoryMode::Low => 0,
        MemoryMode::Fast | MemoryMode::Balanced => memory.kept_bytes().saturating_sub(prepared),
    }
}

/// The form of a convolution whose panels, if it has any, are kept or not.
pub(super) fn form(options: PlanOptions, conv: &Conv, x: KernelType, weight: KernelType, keep: Keep) -> Algorithm {
    if options.exact { Algorithm::Direct } else { choose(conv, x, weight, keep) }
}

/// One form that one step could keep.
pub(super) struct Candidate {
    pub kept: KeptForm,
    /// Multiply-adds' worth of time that a run saves.
    pub gain: f64,
}

/// What a linear layer could keep.
pub(super) fn linear_candidates(
    pack: usize,
    rows: usize,
    n: usize,
    k: usize,
    dtype: KernelType,
    isa: Isa,
) -> Candidate {
    let bytes = packed_bytes(n, k, dtype, isa);
    let share = if rows <= FEW_ROWS { FEW_ROWS_GAIN } else { 1.0 };
    let gain = FLOPS_PER_PACKED_BYTE * bytes as f64 * share * 4.0 / dtype.size_bytes() as f64;
    Candidate { kept: KeptForm { pack, bytes }, gain }
}

/// What a convolution could keep: its panels, if it is fastest with them.
pub(super) fn convolution_candidates(
    options: PlanOptions,
    pack: usize,
    conv: &Conv,
    x: KernelType,
    weight: KernelType,
    isa: Isa,
) -> Option<Candidate> {
    if form(options, conv, x, weight, Keep::Packed) != Algorithm::Direct {
        return None;
    }
    let fly = form(options, conv, x, weight, Keep::PerCall);
    let cost = |algorithm, keep| cost_per_pair(conv, x, weight, algorithm, keep);
    let pairs = (conv.out_channels * conv.in_channels / conv.groups.max(1)) as f64;
    let gain = 2.0 * pairs * (cost(fly, Keep::PerCall) - cost(Algorithm::Direct, Keep::Packed));
    Some(Candidate { kept: KeptForm { pack, bytes: conv.packed_bytes(weight, isa) }, gain })
}

/// Which step keeps what.
#[derive(Default)]
pub(super) struct Keeps {
    /// By step.
    by_step: Vec<Option<KeptForm>>,
}

impl Keeps {
    /// Of what `candidates` (by step, the best of each first) offer, the most profitable by byte in at most `limit` bytes;
    /// with no limit the best of each step.
    pub fn choose(candidates: Vec<(usize, Candidate)>, steps: usize, limit: usize) -> Self {
        let mut by_step: Vec<Option<KeptForm>> = vec![None; steps];
        let mut order = candidates;
        if limit != usize::MAX {
            // Steps that share a weight gain together.
            let by_byte = |c: &Candidate| c.gain / c.kept.bytes.max(1) as f64;
            order.sort_by(|(a_step, a), (b_step, b)| by_byte(b).total_cmp(&by_byte(a)).then(a_step.cmp(b_step)));
        }
        let (mut held, mut bytes) = (BTreeSet::new(), 0usize);
        for (step, candidate) in order {
            let more = if held.contains(&candidate.kept) { 0 } else { candidate.kept.bytes };
            if by_step[step].is_some() || candidate.gain <= 0.0 || bytes.saturating_add(more) > limit {
                continue;
            }
            bytes += more;
            held.insert(candidate.kept);
            by_step[step] = Some(candidate.kept);
        }
        Self { by_step }
    }

    /// What step `step` keeps.
    pub fn of(&self, step: usize) -> Option<KeptForm> {
        self.by_step.get(step).copied().flatten()
    }

    /// Everything that is kept, once.
    pub fn forms(&self) -> Vec<KeptForm> {
        self.by_step.iter().flatten().copied().collect::<BTreeSet<_>>().into_iter().collect()
    }
}

/// Output columns made ready at a time, and bytes of their form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunks {
    /// Of the whole weight.
    pub columns: usize,
    /// Of each chunk but the last.
    pub step: usize,
}

impl Chunks {
    /// Cuts `columns` so that a chunk takes about `most` bytes of the `bytes` of all.
    fn new(columns: usize, bytes: usize, most: usize) -> Self {
        Self { columns, step: chunk_columns(columns, bytes, most) }
    }

    /// For panels of all together `bytes`; smaller ones where memory is short.
    pub fn of_panels(maker: &Maker<'_>, columns: usize, bytes: usize) -> Self {
        let most = if maker.is_slim() { SLIM_CHUNK_BYTES } else { most_bytes() };
        Self::new(columns, bytes, most)
    }

    /// For the panels of a convolution.
    pub fn of_convolution(maker: &Maker<'_>, conv: &Conv, bytes: usize) -> Self {
        match conv.groups {
            1 => Self::of_panels(maker, conv.out_channels, bytes),
            _ => Self { columns: conv.out_channels, step: conv.out_channels.max(1) },
        }
    }

    /// First column and number of columns of each.
    pub fn iter(self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.columns).step_by(self.step).map(move |first| (first, self.step.min(self.columns - first)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(pack: usize, bytes: usize, gain: f64) -> Candidate {
        Candidate { kept: KeptForm { pack, bytes }, gain }
    }

    #[test]
    fn the_most_profitable_by_byte_are_kept() {
        let offers = || {
            vec![
                (0, candidate(0, 400, 900.0)),
                (0, candidate(0, 100, 300.0)),
                (1, candidate(1, 100, 100.0)),
                (2, candidate(0, 100, 300.0)),
            ]
        };
        let forms = |limit| Keeps::choose(offers(), 3, limit).forms();
        let kept = |pack, bytes| KeptForm { pack, bytes };
        assert_eq!(forms(0), []);
        assert_eq!(forms(100), [kept(0, 100)], "one form for two steps");
        assert_eq!(forms(200), [kept(0, 100), kept(1, 100)]);
        assert_eq!(Keeps::choose(offers(), 3, usize::MAX).of(0), Some(kept(0, 400)), "no limit: the fastest");
        assert_eq!(Keeps::choose(vec![(0, candidate(0, 1, 0.0))], 1, usize::MAX).of(0), None, "no gain, no bytes");
    }

    #[test]
    fn chunks_cover_all_columns_once() {
        for (columns, bytes) in [(1280, 59 << 20), (100, 10), (320, 5 << 20), (65, 9 << 20), (1, 1 << 30), (0, 0)] {
            let chunks = Chunks::new(columns, bytes, 4 << 20);
            let mut next = 0;
            for (first, count) in chunks.iter() {
                assert_eq!(first, next);
                assert!(count > 0);
                next += count;
            }
            assert_eq!(next, columns);
        }
    }
}
