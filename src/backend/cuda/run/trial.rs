//! What a tuner may choose between, and trials of it.
//!
//! A trial runs a step, with the kernels around the library, on memory that its caller lends: every buffer that the step
//! touches has its own bytes there, filled with random numbers. So a step that works in place begins with the same numbers
//! each time, and what it writes can be compared with what the way that is chosen without tuning writes.
//!
//! A run of a model finds its weights in memory, not in the L2, which the steps before have filled with their own: nor does a
//! trial, whose runs take turns with copies of the buffers that together take twice the L2, if there is that much memory.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::super::delegate::{Choice, Planned, Site, WORKSPACE_ALIGN_BYTES};
use super::super::driver::StreamHandle;
use super::SpecializedCuda;
use super::item::{Delegated, Item, Parts, launch_all};
use crate::Result;
use crate::backend::SiteRow;
use crate::ir::DType;

/// Steps that are chosen for together.
#[derive(Debug)]
struct Held {
    site: Site,
    /// The first of them, if it runs on a library: index into the items.
    item: Option<usize>,
    /// For [`Site::whole`].
    whole: Option<Parts>,
    count: usize,
    /// By way: whether it gives what the first one gives.
    is_right: Mutex<HashMap<usize, bool>>,
    /// How many runs were timed: which copy of the buffers is next.
    turns: AtomicUsize,
}

/// The sites of a specialization.
#[derive(Debug, Default)]
pub(super) struct Sites(Vec<Held>);

impl Sites {
    /// Adds a step; `item` is its place among the items, if it runs on a library, and `whole` the parts for [`Site::whole`].
    pub fn add(&mut self, site: Site, item: Option<usize>, whole: Option<Parts>) {
        match self.0.iter_mut().find(|held| held.site == site) {
            Some(held) => held.count += 1,
            None => {
                let (is_right, turns) = (Mutex::default(), AtomicUsize::default());
                self.0.push(Held { site, item, whole, count: 1, is_right, turns });
            }
        }
    }
}

/// Seconds that are timed at least: an event's clock counts half microseconds.
const LEAST_S: f64 = 1e-3;
/// Most runs that are timed together.
const MOST_RUNS: f64 = 32.0;
/// Random numbers that memory is filled with, over and over: no power of two, so that rows differ.
const PATTERN: usize = (1 << 18) + 1;
/// Numbers from where one buffer begins in them to where the next one does.
const STRIDE: usize = 7919;

/// Copies of buffers of so many bytes that runs take turns with, so that none finds its own in the L2: twice of that, since what
/// was used longest ago is not surely what goes first.
fn copies(operand_bytes: usize, l2_bytes: usize) -> usize {
    (2 * l2_bytes).div_ceil(operand_bytes.max(1)).max(1)
}

/// Numbers between -1 and 1 as a type has them; of booleans both, of other types zeros.
fn pattern(dtype: DType) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let mut bytes = Vec::with_capacity(PATTERN * dtype.size_bytes());
    for _ in 0..PATTERN {
        let value = next();
        match dtype {
            DType::F32 => bytes.extend(value.to_le_bytes()),
            DType::F16 => bytes.extend(half::f16::from_f32(value).to_le_bytes()),
            DType::BF16 => bytes.extend(half::bf16::from_f32(value).to_le_bytes()),
            DType::Bool => bytes.push(u8::from(value > 0.0)),
            other => bytes.extend(std::iter::repeat_n(0, other.size_bytes())),
        }
    }
    bytes
}

fn number(dtype: DType, bytes: &[u8]) -> f64 {
    match (dtype, bytes) {
        (DType::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (DType::F16, &[a, b]) => f64::from(half::f16::from_le_bytes([a, b])),
        (DType::BF16, &[a, b]) => f64::from(half::bf16::from_le_bytes([a, b])),
        _ => f64::NAN,
    }
}

/// Largest difference over the largest finite value of `want`; not a number where one of two that differ is not finite.
fn difference(dtype: DType, got: &[u8], want: &[u8]) -> f64 {
    let size = dtype.size_bytes();
    let (mut most, mut scale) = (0f64, f64::MIN_POSITIVE);
    for (got, want) in got.chunks_exact(size).zip(want.chunks_exact(size)) {
        let is_same = got == want;
        let (got, want) = (number(dtype, got), number(dtype, want));
        if want.is_finite() {
            scale = scale.max(want.abs());
        }
        if is_same {
            continue;
        }
        let apart = (got - want).abs();
        if !apart.is_finite() {
            return f64::NAN;
        }
        most = most.max(apart);
    }
    most / scale
}

/// What [`cuda::lower_tap_sums`](crate::codegen::cuda::lower_tap_sums) makes of a weight: filters, 3 x 3 taps, channels.
fn tap_sums(dtype: DType, taps: &[u8], channels: usize) -> Vec<u8> {
    let size = dtype.size_bytes();
    let filter_bytes = 9 * channels * size;
    let rows = |odd: usize, second: usize| if second == 0 { 0..1 + odd } else { 1 + odd..3 };
    let mut sums = Vec::with_capacity(taps.len() / 9 * 16);
    for part in 0..4 {
        for filter in taps.chunks_exact(filter_bytes) {
            for (tap, channel) in (0..4).flat_map(|tap| (0..channels).map(move |channel| (tap, channel))) {
                let mut sum = 0f32;
                for (r, k) in rows(part / 2, tap / 2).flat_map(|r| rows(part % 2, tap % 2).map(move |k| (r, k))) {
                    let first = ((r * 3 + k) * channels + channel) * size;
                    sum += number(dtype, &filter[first..first + size]) as f32;
                }
                match dtype {
                    DType::F16 => sums.extend(half::f16::from_f32(sum).to_le_bytes()),
                    DType::BF16 => sums.extend(half::bf16::from_f32(sum).to_le_bytes()),
                    _ => sums.extend(sum.to_le_bytes()),
                }
            }
        }
    }
    sums
}

/// A buffer that results are in.
type Written = (DType, Vec<u8>);

/// A step in memory of its own.
struct Stage<'a> {
    item: &'a Delegated,
    /// Those of the item, or of another form of the step.
    parts: &'a Parts,
    /// By what; none are the step's own kernels.
    planned: Option<Arc<dyn Planned>>,
    /// Address of each buffer; 0 of those that the step does not touch.
    bases: Vec<u64>,
    workspace: u64,
    stream: StreamHandle,
}

impl Stage<'_> {
    /// # Safety
    /// Every buffer that the step touches must be behind its address.
    unsafe fn run(&self) -> Result<()> {
        let Self { item, parts, planned, bases, workspace, stream } = self;
        // SAFETY: the caller's promise; the workspace was laid out with the bytes that were asked for.
        unsafe {
            match planned {
                None => launch_all(&item.own, bases, *stream),
                Some(planned) => {
                    launch_all(&parts.before, bases, *stream)?;
                    parts.run_planned(&**planned, *workspace, bases, *stream)?;
                    launch_all(&parts.after, bases, *stream)
                }
            }
        }
    }
}

/// Buffers that the ways to compute a step touch.
fn touched(item: &Delegated, parts: &Parts) -> Vec<usize> {
    let all = [&item.parts, parts];
    let of_kernels = all.iter().flat_map(|p| p.before.iter().chain(&p.after)).chain(&item.own).flat_map(|c| &c.places);
    let of_calls = all.iter().flat_map(|p| p.calls.iter().flatten());
    let mut touched: Vec<usize> = of_calls.chain(of_kernels).flatten().map(|(buffer, _)| *buffer).collect();
    touched.sort_unstable();
    touched.dedup();
    touched
}

impl SpecializedCuda {
    fn item_of(&self, site: usize) -> Option<(&Held, &Delegated)> {
        let held = self.sites.0.get(site)?;
        Some((held, self.items.get(held.item?).and_then(Item::delegated)?))
    }

    /// What the tuner is told.
    pub(super) fn site_rows(&self) -> Vec<SiteRow> {
        let delegates = &self.program.delegates;
        let row = |held: &Held| {
            let step = held.item.and_then(|at| self.items[at].delegated()).map(|d| d.step);
            let ways = held.site.ways(delegates);
            let installed = delegates.chosen(&held.site);
            let chosen = ways.iter().position(|way| Some(*way) == installed).unwrap_or(0);
            let arch = self.program.device.arch();
            let on_tensor_cores = step.is_some_and(|step| self.program.lowered.steps[step].on_tensor_cores(arch));
            SiteRow {
                op: held.site.op.clone(),
                count: held.count,
                flops: step.map_or(0, |step| self.costs[step].flops),
                ways: ways.iter().map(Choice::to_string).collect(),
                on_tensor_cores,
                chosen,
                installed: installed.map(|choice| choice.to_string()),
            }
        };
        self.sites.0.iter().map(row).collect()
    }

    pub(super) fn choose_site(&self, site: usize, choice: &str) -> bool {
        let (Some(held), Some(choice)) = (self.sites.0.get(site), Choice::parse(choice)) else { return false };
        self.program.delegates.choose(&held.site, choice);
        true
    }

    /// As [`crate::backend::Specialized::ready`].
    pub(super) fn ready_ways(&self, site: usize, time: Duration) -> Result<(Vec<usize>, bool)> {
        let device = &self.program.device;
        let _context = device.enter()?;
        let Some((held, _)) = self.item_of(site) else { return Ok((Vec::new(), true)) };
        let delegates = &self.program.delegates;
        let ways = held.site.ways(delegates);
        let engines = |way: &Choice| match *way {
            Choice::Kernel => Vec::new(),
            Choice::Library(number) | Choice::Whole(number) => held.site.problem_of(*way).engines(number),
        };
        let engines = ways.iter().flat_map(engines).collect();
        let is_all = delegates.warm(engines, Some(Instant::now() + time), || device.enter());
        let is_ready = |way: &Choice| match *way {
            Choice::Kernel => true,
            Choice::Library(number) | Choice::Whole(number) => {
                delegates.is_ready(held.site.problem_of(*way), number).unwrap_or(false)
            }
        };
        Ok(((0..ways.len()).filter(|&way| is_ready(&ways[way])).collect(), is_all))
    }

    /// A way, and the parts that it runs.
    fn way<'a>(&self, (held, item): (&'a Held, &'a Delegated), way: usize) -> Option<(Choice, &'a Parts)> {
        let choice = held.site.ways(&self.program.delegates).get(way).copied()?;
        let is_other = matches!(choice, Choice::Whole(_)) && !held.site.is_whole;
        Some((choice, if is_other { held.whole.as_ref()? } else { &item.parts }))
    }

    fn operand_bytes(&self, item: &Delegated, parts: &Parts) -> usize {
        let own = |&buffer: &usize| self.buffer_bytes[buffer].next_multiple_of(WORKSPACE_ALIGN_BYTES);
        touched(item, parts).iter().map(own).sum()
    }

    fn l2_bytes(&self) -> usize {
        self.program.device.attributes().l2_bytes as usize
    }

    /// What a trial needs: the operands, and the workspace of the way that runs; and with what none of its runs would find
    /// operands in the L2.
    pub(super) fn bytes_of_trial(&self, site: usize, way: usize) -> (usize, usize) {
        let bytes = |(held, item)| {
            let (_, parts) = self.way((held, item), way)?;
            let operands = self.operand_bytes(item, parts);
            let rest = item.planned.workspace_bytes() + 2 * WORKSPACE_ALIGN_BYTES;
            Some((operands + rest, operands * copies(operands, self.l2_bytes()) + rest))
        };
        self.item_of(site).and_then(bytes).unwrap_or_default()
    }

    /// # Safety
    /// As [`crate::backend::Specialized::measure`].
    pub(super) unsafe fn measure_site(
        &self,
        site: usize,
        way: usize,
        (memory, bytes): (*mut u8, usize),
        stream: StreamHandle,
    ) -> Result<Option<f64>> {
        let device = self.program.device.clone();
        let _context = device.enter()?;
        self.program.users.note(stream, false);
        let Some((held, item)) = self.item_of(site) else { return Ok(None) };
        let Some((choice, parts)) = self.way((held, item), way) else { return Ok(None) };
        let operand_bytes = self.operand_bytes(item, parts);
        let workspace = memory.addr().next_multiple_of(WORKSPACE_ALIGN_BYTES);
        let room = (memory.addr() + bytes).saturating_sub(workspace);
        let delegates = &self.program.delegates;
        let problem = held.site.problem_of(choice);
        let planned = match choice {
            Choice::Kernel => None,
            Choice::Library(number) | Choice::Whole(number) => match delegates.planned(problem, Some(number)) {
                Ok(planned) => Some(planned),
                Err(_) => return Ok(None),
            },
        };
        let of_both = [Some(&item.planned), planned.as_ref()];
        let workspace_bytes = of_both.into_iter().flatten().map(|p| p.workspace_bytes()).max().unwrap_or(0);
        let workspace_bytes = workspace_bytes.next_multiple_of(WORKSPACE_ALIGN_BYTES);
        let operands = workspace + workspace_bytes;
        let fit = room.checked_sub(workspace_bytes).map_or(0, |left| left / operand_bytes.max(1));
        if fit == 0 {
            return Ok(None);
        }
        let copies = copies(operand_bytes, self.l2_bytes()).min(fit);
        let touched = touched(item, parts);
        let staged = |parts, planned, copy: usize| -> Result<Stage<'_>> {
            let bases = self.laid_at(operands + copy * operand_bytes, &touched)?;
            Ok(Stage { item, parts, planned, bases, workspace: workspace as u64, stream })
        };
        let tried = staged(parts, planned.clone(), 0)?;
        let first = staged(&item.parts, Some(item.planned.clone()), 0)?;
        let known = held.is_right.lock().unwrap_or_else(PoisonError::into_inner).get(&way).copied();
        let is_right = match known {
            Some(known) => known,
            None => {
                // SAFETY: the caller's promise: every buffer that is touched lies in the memory that was lent.
                let is_right = unsafe { self.is_right(&held.site, &first, &tried)? };
                // Twice as many copies are filled each time.
                for filled in std::iter::successors(Some(1), |filled| Some(2 * filled)).take_while(|f| *f < copies) {
                    let (to, bytes) = (operands + filled * operand_bytes, filled.min(copies - filled) * operand_bytes);
                    // SAFETY: all copies lie in the memory that was lent, the others behind those that are filled.
                    unsafe { device.copy(operands, to, bytes, stream)? };
                }
                held.is_right.lock().unwrap_or_else(PoisonError::into_inner).insert(way, is_right);
                is_right
            }
        };
        if !is_right {
            return Ok(None);
        }
        // Time depends little on what the numbers are: those of the trial before will do.
        // SAFETY: as above.
        unsafe {
            let time = |runs: usize| -> Result<f64> {
                let first = held.turns.fetch_add(runs, Ordering::Relaxed);
                let turns = (first..first + runs.min(copies)).map(|turn| staged(parts, planned.clone(), turn % copies));
                let turns = turns.collect::<Result<Vec<_>>>()?;
                device.time(stream, || turns.iter().cycle().take(runs).try_for_each(|stage| stage.run()))
            };
            let runs = (LEAST_S / time(1)?.max(1e-9)).clamp(1.0, MOST_RUNS) as usize;
            Ok(Some(time(runs)? / runs as f64))
        }
    }

    /// Addresses of these buffers, one behind the other from `start` on; 0 of all others.
    fn laid_at(&self, start: usize, touched: &[usize]) -> Result<Vec<u64>> {
        let (mut bases, mut at) = (vec![0u64; self.buffer_bytes.len()], start);
        for &buffer in touched {
            bases[buffer] = at as u64;
            at += self.buffer_bytes[buffer].next_multiple_of(WORKSPACE_ALIGN_BYTES);
        }
        for laid in &self.laid_out {
            if bases[laid.buffer] != 0 {
                laid.tell(self.packed_as_planned(laid.pack, &bases)?, &mut bases);
            }
        }
        Ok(bases)
    }

    /// Whether both write the same, but for roundings.
    ///
    /// # Safety
    /// As [`Stage::run`], for both, in the same memory.
    unsafe fn is_right(&self, site: &Site, first: &Stage<'_>, tried: &Stage<'_>) -> Result<bool> {
        let (mut written, mut patterns, mut numbers) = (Vec::new(), HashMap::new(), Vec::new());
        for buffer in touched(first.item, tried.parts) {
            numbers.extend(self.numbers(buffer, &mut patterns)?.map(|numbers| (buffer, numbers)));
        }
        for stage in [first, tried] {
            // SAFETY: the caller's promise.
            unsafe {
                self.fill(stage, &numbers)?;
                // A way that does not run is no way.
                if stage.run().is_err() {
                    return Ok(false);
                }
                written.push(self.written(stage)?);
            }
        }
        let (got, want) = (&written[1], &written[0]);
        let is_close =
            |((dtype, got), (_, want)): (&Written, &Written)| difference(*dtype, got, want) <= site.tolerance(*dtype);
        Ok(got.iter().zip(want).all(is_close))
    }

    /// The numbers that a buffer begins with: other ones than other buffers, but for packed weights, which are those of the
    /// weight; none for scratch memory.
    fn numbers(&self, buffer: usize, patterns: &mut HashMap<DType, Vec<u8>>) -> Result<Option<Vec<u8>>> {
        let plan = &self.program.plan;
        if let Some(buffers) = plan.buffers.get(buffer) {
            let pattern: &[u8] = patterns.entry(buffers.dtype).or_insert_with(|| pattern(buffers.dtype));
            let start = buffer * STRIDE % PATTERN * buffers.dtype.size_bytes();
            let mut bytes = Vec::with_capacity(self.buffer_bytes[buffer]);
            let mut part = &pattern[start..];
            while bytes.len() < self.buffer_bytes[buffer] {
                bytes.extend_from_slice(&part[..part.len().min(self.buffer_bytes[buffer] - bytes.len())]);
                part = pattern;
            }
            return Ok(Some(bytes));
        }
        let (at, packs) = (buffer - plan.buffers.len(), plan.packs.len());
        let Some(pack) = plan.packs.get(if at < packs { at } else { at - packs }) else { return Ok(None) };
        let Some(weight) = self.numbers(pack.source.buffer.index(), patterns)? else { return Ok(None) };
        let (lies, size) = (pack.source.concrete(&[])?, pack.source.dtype.size_bytes());
        // Filters, taps, channels.
        let behind = |values: &[isize]| [&values[..1], &values[2..], &values[1..2]].concat();
        let shape = behind(&lies.shape.iter().map(|&d| d as isize).collect::<Vec<_>>());
        let strides = behind(&lies.strides);
        let mut bytes = Vec::with_capacity(self.buffer_bytes[buffer]);
        let (channels, channel) = (shape[shape.len() - 1], strides[strides.len() - 1]);
        for row in 0..shape[..shape.len() - 1].iter().product() {
            let (mut rest, mut from) = (row, lies.offset);
            for (size, stride) in shape.iter().zip(&strides).rev().skip(1) {
                from += rest % size * stride;
                rest /= size;
            }
            for at in 0..channels {
                let first = (from + at * channel) as usize * size;
                bytes.extend_from_slice(&weight[first..first + size]);
            }
        }
        Ok(Some(if at < packs { bytes } else { tap_sums(pack.source.dtype, &bytes, channels as usize) }))
    }

    /// # Safety
    /// As [`Stage::run`].
    unsafe fn fill(&self, stage: &Stage<'_>, numbers: &[(usize, Vec<u8>)]) -> Result<()> {
        let device = &self.program.device;
        for (buffer, numbers) in numbers {
            let to = std::ptr::with_exposed_provenance_mut(stage.bases[*buffer] as usize);
            // SAFETY: the caller's promise: the buffer has these bytes.
            unsafe { device.upload(numbers, to, stage.stream)? };
        }
        Ok(())
    }

    /// The buffers that the step's results are in.
    ///
    /// # Safety
    /// As [`Stage::run`].
    unsafe fn written(&self, stage: &Stage<'_>) -> Result<Vec<Written>> {
        let device = &self.program.device;
        let stores = &self.program.plan.steps[stage.item.step].stores;
        let read = |store: &crate::plan::Access| {
            let buffer = store.buffer.index();
            let mut bytes = vec![0u8; self.buffer_bytes[buffer]];
            let from = std::ptr::with_exposed_provenance::<u8>(stage.bases[buffer] as usize);
            // SAFETY: the caller's promise: the buffer has these bytes.
            unsafe { device.download(from, &mut bytes, stage.stream)? };
            Ok((store.dtype, bytes))
        };
        stores.iter().map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_close_shows() {
        let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let want = bytes(&[1.0, -4.0, 0.5]);
        assert_eq!(difference(DType::F32, &want, &want), 0.0);
        for far in [[1.0, -3.0, 0.5], [1.0, -4.0, -0.5]] {
            let far = difference(DType::F32, &bytes(&far), &want);
            assert!((far - 0.25).abs() < 1e-9, "{far}");
        }
        assert!(difference(DType::F32, &bytes(&[f32::NAN, -4.0, 0.5]), &want).is_nan());
        let infinite = bytes(&[1.0, f32::INFINITY, 0.5]);
        assert!(difference(DType::F32, &want, &infinite).is_nan());
        assert_eq!(difference(DType::F32, &infinite, &infinite), 0.0);
    }

    #[test]
    fn numbers_are_of_their_type() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let bytes = pattern(dtype);
            let values: Vec<f64> = bytes.chunks_exact(dtype.size_bytes()).map(|b| number(dtype, b)).collect();
            assert_eq!(values.len(), PATTERN);
            assert!(values.iter().all(|v| v.abs() <= 1.0) && values.iter().any(|v| *v < -0.5));
        }
        assert!(pattern(DType::Bool).iter().all(|b| *b <= 1));
        assert!(pattern(DType::I64).iter().all(|b| *b == 0));
    }
}
