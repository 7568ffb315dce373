//! Which of a run's items have to follow which: those that touch the same bytes, unless both only read them.
//!
//! A graph made so runs beside each other what the plan puts one after the other: projections of one value, the two streams of a
//! transformer. Where the planner has put a buffer into memory that another one had before, its writer follows the readers of
//! that one.

use std::ops::Range;

use super::item::Item;
use super::{Call, LEFT_OUT};
use crate::plan::{Plan, Step};

/// Buffers that an item reads and those that it writes, which it may read too.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Touched {
    reads: Vec<usize>,
    writes: Vec<usize>,
}

impl Touched {
    /// Of each item. What its step stores and all scratch memory is written by every item of the step; scratch memory begins at
    /// buffer `first_scratch`.
    pub fn of(plan: &Plan, items: &[Item], first_scratch: usize) -> Vec<Self> {
        items.iter().map(|item| Self::of_item(&plan.steps[item.step()], item, first_scratch)).collect()
    }

    fn of_item(step: &Step, item: &Item, first_scratch: usize) -> Self {
        let mut all: Vec<usize> = Vec::new();
        let mut call = |call: &Call| all.extend(call.places.iter().flatten().map(|(buffer, _)| *buffer));
        match item {
            Item::Kernel(kernel) => call(kernel),
            Item::Delegated(d) => {
                d.parts.before.iter().chain(&d.parts.after).chain(&d.own).for_each(&mut call);
                all.extend(d.parts.calls.iter().flatten().flatten().map(|(buffer, _)| *buffer));
                all.extend(d.workspace);
            }
        }
        let stored = step.stores.iter().chain(&step.scratch).map(|access| access.buffer.index());
        let mut touched = Self { reads: Vec::new(), writes: stored.collect() };
        all.sort_unstable();
        all.dedup();
        for buffer in all {
            let is_written = buffer >= first_scratch || touched.writes.contains(&buffer);
            let list = if is_written { &mut touched.writes } else { &mut touched.reads };
            list.push(buffer);
        }
        touched.writes.sort_unstable();
        touched.writes.dedup();
        touched
    }
}

/// For each item those before it that it has to follow, as few as say so.
pub(super) fn order(touched: &[Touched], bases: &[u64], buffer_bytes: &[usize]) -> Vec<Vec<usize>> {
    let range = |buffer: &usize| -> Option<Range<u64>> {
        let (at, bytes) = (bases[*buffer], buffer_bytes[*buffer] as u64);
        (at != LEFT_OUT && bytes > 0).then(|| at..at.saturating_add(bytes))
    };
    let ranges = |buffers: &[usize]| buffers.iter().filter_map(range).collect::<Vec<_>>();
    let spans: Vec<_> = touched.iter().map(|t| (ranges(&t.reads), ranges(&t.writes))).collect();
    let meet =
        |a: &[Range<u64>], b: &[Range<u64>]| a.iter().any(|a| b.iter().any(|b| a.start < b.end && b.start < a.end));
    let words = touched.len().div_ceil(64);
    // Of each item, a bit for each that comes before it.
    let mut before: Vec<Vec<u64>> = Vec::with_capacity(touched.len());
    let mut order = Vec::with_capacity(touched.len());
    for (at, (reads, writes)) in spans.iter().enumerate() {
        let (mut known, mut follows) = (vec![0u64; words], Vec::new());
        for other in (0..at).rev() {
            if known[other / 64] >> (other % 64) & 1 == 1 {
                continue;
            }
            let (other_reads, other_writes) = &spans[other];
            if meet(other_writes, reads) || meet(other_writes, writes) || meet(other_reads, writes) {
                follows.push(other);
                known.iter_mut().zip(&before[other]).for_each(|(known, more)| *known |= more);
                known[other / 64] |= 1 << (other % 64);
            }
        }
        before.push(known);
        order.push(follows);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touched(reads: &[usize], writes: &[usize]) -> Touched {
        Touched { reads: reads.to_vec(), writes: writes.to_vec() }
    }

    #[test]
    fn what_reads_the_same_may_run_beside_each_other() {
        // One value is projected three times, and two of the results are joined.
        let items =
            [touched(&[], &[0]), touched(&[0], &[1]), touched(&[0], &[2]), touched(&[0], &[3]), touched(&[1, 2], &[4])];
        let bases = [0, 100, 200, 300, 400];
        assert_eq!(order(&items, &bases, &[100; 5]), [vec![], vec![0], vec![0], vec![0], vec![2, 1]]);
    }

    #[test]
    fn memory_that_is_used_again_is_waited_for() {
        // Buffer 2 lies where the end of buffer 0 has been: its writer follows the reader of that.
        let items = [touched(&[], &[0]), touched(&[0], &[1]), touched(&[], &[2]), touched(&[1, 2], &[3])];
        assert_eq!(order(&items, &[0, 100, 99, 300], &[100, 100, 1, 10])[2], [1]);
        assert_eq!(order(&items, &[0, 101, 100, 300], &[100, 100, 1, 10])[2], Vec::<usize>::new());
        // Nothing lies there, or nothing is to be read.
        assert_eq!(order(&items, &[0, 100, 99, 300], &[100, 100, 0, 10])[2], Vec::<usize>::new());
        assert_eq!(order(&items, &[LEFT_OUT, 100, 99, 300], &[100, 99, 1, 10])[2], Vec::<usize>::new());
    }

    #[test]
    fn who_is_followed_already_is_not_named() {
        let items = [touched(&[], &[0]), touched(&[], &[0]), touched(&[0], &[1])];
        assert_eq!(order(&items, &[0, 100], &[100, 100]), [vec![], vec![0], vec![1]]);
    }
}
