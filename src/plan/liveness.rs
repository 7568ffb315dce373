//! Which steps each buffer lives through.

use super::{BufferKind, Plan, Step};

/// First step that writes a buffer and last step that touches it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveRange {
    /// Index into [`Plan::steps`].
    pub first: usize,
    /// Index into [`Plan::steps`], inclusive.
    pub last: usize,
}

/// The live range of every buffer that `steps` touch.
pub fn live_ranges(steps: &[Step], buffers: usize) -> Vec<Option<LiveRange>> {
    let mut ranges: Vec<Option<LiveRange>> = vec![None; buffers];
    for (at, step) in steps.iter().enumerate() {
        for access in step.accesses() {
            let range = ranges[access.buffer.index()].get_or_insert(LiveRange { first: at, last: at });
            range.last = at;
        }
    }
    ranges
}

/// The arena's buffers with their live ranges, in order.
pub fn arena(plan: &Plan) -> Vec<(super::BufferId, LiveRange)> {
    let ranges = live_ranges(&plan.steps, plan.buffers.len());
    plan.buffers_of(|kind| kind == BufferKind::Arena)
        .filter_map(|(id, _)| ranges[id.index()].map(|range| (id, range)))
        .collect()
}
