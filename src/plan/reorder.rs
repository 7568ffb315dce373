//! Another order of the steps, where it needs less memory at once.
//!
//! The captured order is the order in which the module was written: often the best, but not where several large values
//! are made before the first of them is used up. Steps that make more than they free move to just before their first
//! reader ([`Order::sink`]); steps that free more than they make move to just behind what they wait for
//! ([`Order::hoist`]).
//!
//! Guarantees: every step sees the memory it saw before, since steps that touch a buffer keep their order if one of
//! them writes it; at no sample size is more alive at once, and at one at least it is less, or the order stays.

use super::{BufferKind, Plan, Step};
use crate::Result;
use crate::plan::workspace::buffer_bytes;

/// Factors of larger sizes than the samples that are looked at too.
const LARGER: [i64; 2] = [4, 16];

impl Plan {
    /// Reorders the steps if that lowers what is alive at once; gives whether it did.
    ///
    /// # Errors
    /// If a size is negative, not an integer or too large at a sample.
    pub fn reorder(&mut self) -> Result<bool> {
        let samples = self.graph.sample_bindings();
        let mut sizes = samples.iter().map(|bindings| self.arena_bytes(bindings)).collect::<Result<Vec<_>>>()?;
        // Samples are small, and what is large there may be small where memory matters.
        for scale in LARGER {
            let larger = samples.iter().map(|b| b.iter().map(|n| n.saturating_mul(scale)).collect::<Vec<_>>());
            sizes.extend(larger.filter_map(|bindings| self.arena_bytes(&bindings).ok()));
        }
        let Some(typical) = sizes.last() else { return Ok(false) };
        let before = Order::new(&self.steps, typical.clone());
        let peaks = |order: &Order| sizes.iter().map(|bytes| order.peak(bytes)).collect::<Vec<_>>();
        let now = peaks(&before);
        let mut best: Option<(Vec<usize>, Order)> = None;
        for moves in [&[Order::sink as fn(&mut Order)][..], &[Order::hoist], &[Order::sink, Order::hoist]] {
            let mut order = before.clone();
            moves.iter().for_each(|go| go(&mut order));
            let peaks = peaks(&order);
            let is_lower = |than: &[usize]| peaks.as_slice() != than && peaks.iter().zip(than).all(|(a, b)| a <= b);
            if is_lower(best.as_ref().map_or(&now, |(known, _)| known)) {
                best = Some((peaks, order));
            }
        }
        let Some((_, order)) = best else { return Ok(false) };
        let mut steps: Vec<Option<Step>> = std::mem::take(&mut self.steps).into_iter().map(Some).collect();
        self.steps = order.steps.iter().filter_map(|&at| steps[at].take()).collect();
        Ok(true)
    }

    /// Bytes of every buffer of the workspace, 0 for the others.
    fn arena_bytes(&self, bindings: &[i64]) -> Result<Vec<usize>> {
        let mut bytes = vec![0; self.buffers.len()];
        for (id, _) in self.buffers_of(|kind| kind == BufferKind::Arena) {
            bytes[id.index()] = buffer_bytes(self, id, bindings)?;
        }
        Ok(bytes)
    }
}

/// Steps in some order that their dependencies allow.
#[derive(Clone)]
struct Order {
    /// Indices into the plan's steps.
    steps: Vec<usize>,
    /// Where each step stands.
    position: Vec<usize>,
    /// By step, the steps that must come before it, and behind it.
    before: Vec<Vec<usize>>,
    behind: Vec<Vec<usize>>,
    /// By step, the buffers that it touches, each once.
    touched: Vec<Vec<usize>>,
    /// By buffer, the steps that touch it.
    touching: Vec<Vec<usize>>,
    bytes: Vec<usize>,
}

impl Order {
    fn new(steps: &[Step], bytes: Vec<usize>) -> Self {
        let (count, buffers) = (steps.len(), bytes.len());
        let (mut before, mut touched, mut touching) =
            (vec![Vec::new(); count], vec![Vec::new(); count], vec![Vec::new(); buffers]);
        // By buffer, the step that wrote it last, and those that have read it since.
        let mut state: Vec<(Option<usize>, Vec<usize>)> = vec![(None, Vec::new()); buffers];
        for (at, step) in steps.iter().enumerate() {
            let waits: &mut Vec<usize> = &mut before[at];
            for read in step.reads() {
                let (writer, readers) = &mut state[read.buffer.index()];
                waits.extend(*writer);
                readers.push(at);
            }
            for write in step.stores.iter().chain(&step.scratch) {
                let (writer, readers) = &mut state[write.buffer.index()];
                waits.extend(writer.replace(at));
                waits.append(readers);
            }
            waits.sort_unstable();
            waits.dedup();
            waits.retain(|&other| other != at);
            let mut all: Vec<usize> = step.accesses().map(|access| access.buffer.index()).collect();
            all.sort_unstable();
            all.dedup();
            all.iter().for_each(|&buffer| touching[buffer].push(at));
            touched[at] = all;
        }
        let mut behind = vec![Vec::new(); count];
        for (at, waits) in before.iter().enumerate() {
            waits.iter().for_each(|&other| behind[other].push(at));
        }
        let steps: Vec<usize> = (0..count).collect();
        Self { position: steps.clone(), steps, before, behind, touched, touching, bytes }
    }

    /// First and last position at which a buffer is touched.
    fn range(&self, buffer: usize) -> Option<(usize, usize)> {
        let positions = self.touching[buffer].iter().map(|&step| self.position[step]);
        Some((positions.clone().min()?, positions.max()?))
    }

    /// The most that is alive at once, with these sizes of the buffers.
    fn peak(&self, bytes: &[usize]) -> usize {
        let mut change = vec![(0usize, 0usize); self.steps.len() + 1];
        for (buffer, &size) in bytes.iter().enumerate().filter(|(_, size)| **size > 0) {
            let Some((first, last)) = self.range(buffer) else { continue };
            change[first].0 += size;
            change[last + 1].1 += size;
        }
        let mut alive = 0usize;
        change.into_iter().fold(0, |most, (more, less)| {
            alive = alive + more - less;
            most.max(alive)
        })
    }

    /// Bytes that begin to live with a step, and bytes that end to.
    fn makes_and_frees(&self, step: usize) -> (usize, usize) {
        let (at, mut sums) = (self.position[step], (0, 0));
        for &buffer in self.touched[step].iter().filter(|&&buffer| self.bytes[buffer] > 0) {
            let Some((first, last)) = self.range(buffer).filter(|(first, last)| first != last) else { continue };
            sums.0 += if first == at { self.bytes[buffer] } else { 0 };
            sums.1 += if last == at { self.bytes[buffer] } else { 0 };
        }
        sums
    }

    fn shift(&mut self, from: usize, to: usize) {
        let step = self.steps.remove(from);
        self.steps.insert(to, step);
        for at in from.min(to)..=from.max(to) {
            self.position[self.steps[at]] = at;
        }
    }

    /// Steps that make more than they free, the last ones first, to just before the first that needs them.
    fn sink(&mut self) {
        for step in self.steps.clone().into_iter().rev() {
            let Some(first) = self.behind[step].iter().map(|&other| self.position[other]).min() else { continue };
            let (makes, frees) = self.makes_and_frees(step);
            if makes > frees {
                self.shift(self.position[step], first - 1);
            }
        }
    }

    /// Steps that free more than they make, the first ones first, to just behind the last that they need.
    fn hoist(&mut self) {
        for step in self.steps.clone() {
            let last = self.before[step].iter().map(|&other| self.position[other] + 1).max().unwrap_or(0);
            let (makes, frees) = self.makes_and_frees(step);
            if frees > makes {
                self.shift(self.position[step], last);
            }
        }
    }
}
