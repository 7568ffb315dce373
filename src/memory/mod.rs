//! Live ranges to buffer offsets: where each temporary of a run lies in the arena.
//!
//! A plan knows who lives when; sizes are known once its symbols have values. [`solve`] then places the buffers one by
//! one, each into the tightest gap between those placed already that live at the same time. This is
//! arithmetic only (a millisecond or two for the 1500 buffers of a large UNet), so every specialization does it anew.
//!
//! Invariant ([`verify`]): two buffers whose live ranges meet never share a byte.

use std::fmt::Write as _;

use crate::{Error, Result};

pub mod verify;

/// Every offset is a multiple of this: a cache line and the widest vector.
pub const ALIGN_BYTES: usize = 64;

/// A buffer to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Size.
    pub bytes: usize,
    /// Step that writes it first.
    pub first: usize,
    /// Last step that touches it.
    pub last: usize,
}

/// Where everything lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// One per request, in bytes from the arena's base.
    pub offsets: Vec<usize>,
    /// Size of the arena.
    pub bytes: usize,
    /// The most that is alive at one step: no placement needs less.
    pub lower_bound_bytes: usize,
}

/// Rounds up to [`ALIGN_BYTES`].
///
/// # Errors
/// If the result does not fit an address.
pub fn align(bytes: usize) -> Result<usize> {
    bytes.checked_next_multiple_of(ALIGN_BYTES).ok_or_else(|| too_large(bytes))
}

fn too_large(bytes: usize) -> Error {
    Error::OutOfMemory { asked_bytes: bytes, what: "the workspace of one run".to_owned() }
}

/// Attempts to improve on the first placements; each costs a fraction of a millisecond for a large model.
const MAX_ROUNDS: usize = 24;

/// Improving ends where the arena is larger than the lower bound by no more than this part of it: the last hundredths take
/// most of the rounds, and a first call waits for them.
const NEAR: usize = 50;

/// Places every request: largest first, else step by step from the step with most alive, else by size times life; where none
/// comes near the lower bound, what stands highest is placed earlier, round by round, until it does.
///
/// # Errors
/// [`Error::OutOfMemory`] if the sum does not fit an address.
pub fn solve(requests: &[Request]) -> Result<Layout> {
    let lower_bound_bytes = lower_bound_bytes(requests)?;
    let mut solver = Solver::new(requests)?;
    let mut order = by_size(requests);
    let mut best = solver.place(&order)?;
    let is_near = |bytes: usize| bytes - lower_bound_bytes <= lower_bound_bytes / NEAR;
    for other in [by_breadth, by_area] {
        if is_near(best.bytes) {
            break;
        }
        let other = other(requests);
        let layout = solver.place(&other)?;
        if layout.bytes < best.bytes {
            (best, order) = (layout, other);
        }
    }
    let mut current = best.clone();
    for _ in 0..MAX_ROUNDS {
        if is_near(best.bytes) {
            break;
        }
        // Whatever reaches above the bound lacked a gap: it chooses before those it meets.
        let too_high = |&i: &usize| current.offsets[i] + requests[i].bytes > lower_bound_bytes;
        let (mut first, rest): (Vec<usize>, Vec<usize>) = order.iter().partition(|i| too_high(i));
        first.extend(rest);
        if first == order {
            break;
        }
        order = first;
        current = solver.place(&order)?;
        if current.bytes < best.bytes {
            best = current.clone();
        }
    }
    Ok(Layout { lower_bound_bytes, ..best })
}

fn by_size(requests: &[Request]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(requests[i].bytes), requests[i].first, i));
    order
}

/// What lives long goes first among what is large: it would have to find one gap below everything that it meets.
fn by_area(requests: &[Request]) -> Vec<usize> {
    let area = |r: &Request| r.bytes as u128 * (r.last - r.first + 1) as u128;
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_cached_key(|&i| (std::cmp::Reverse(area(&requests[i])), i));
    order
}

/// Requests that live at each step.
fn alive(requests: &[Request]) -> Vec<Vec<u32>> {
    let steps = requests.iter().map(|r| r.last + 1).max().unwrap_or(0);
    let mut alive: Vec<Vec<u32>> = vec![Vec::new(); steps];
    for (i, r) in requests.iter().enumerate() {
        alive[r.first..=r.last].iter_mut().for_each(|step| step.push(i as u32));
    }
    alive
}

/// Steps by the bytes alive at them, most first; at each step its buffers by size.
fn by_breadth(requests: &[Request]) -> Vec<usize> {
    let bytes = |step: &Vec<u32>| step.iter().fold(0usize, |sum, &i| sum.saturating_add(requests[i as usize].bytes));
    let mut alive = alive(requests);
    alive.sort_by_cached_key(|step| std::cmp::Reverse(bytes(step)));
    let (mut order, mut seen) = (Vec::with_capacity(requests.len()), vec![false; requests.len()]);
    for mut step in alive {
        step.retain(|&i| !std::mem::replace(&mut seen[i as usize], true));
        step.sort_by_key(|&i| (std::cmp::Reverse(requests[i as usize].bytes), i));
        order.extend(step.into_iter().map(|i| i as usize));
    }
    order
}

/// Requests with those that each of them meets.
struct Solver {
    /// Rounded up.
    bytes: Vec<usize>,
    /// Those that request `i` meets: `meets[starts[i]..starts[i + 1]]`.
    starts: Vec<u32>,
    meets: Vec<u32>,
    /// Offsets and ends of what is in the way of one request.
    taken: Vec<(usize, usize)>,
}

impl Solver {
    fn new(requests: &[Request]) -> Result<Self> {
        let mut order: Vec<u32> = (0..requests.len() as u32).collect();
        order.sort_unstable_by_key(|&i| (requests[i as usize].first, i));
        let (mut open, mut pairs): (Vec<u32>, Vec<(u32, u32)>) = (Vec::new(), Vec::with_capacity(16 * requests.len()));
        let mut starts = vec![0u32; requests.len() + 1];
        for i in order {
            let first = requests[i as usize].first;
            open.retain(|&other| requests[other as usize].last >= first);
            starts[i as usize + 1] += open.len() as u32;
            for &other in &open {
                starts[other as usize + 1] += 1;
                pairs.push((i, other));
            }
            open.push(i);
        }
        (0..requests.len()).for_each(|i| starts[i + 1] += starts[i]);
        let (mut next, mut meets) = (starts.clone(), vec![0u32; 2 * pairs.len()]);
        for (a, b) in pairs {
            for (at, other) in [(a, b), (b, a)] {
                meets[next[at as usize] as usize] = other;
                next[at as usize] += 1;
            }
        }
        let bytes = requests.iter().map(|r| align(r.bytes)).collect::<Result<_>>()?;
        Ok(Self { bytes, starts, meets, taken: Vec::new() })
    }

    fn place(&mut self, order: &[usize]) -> Result<Layout> {
        const NOWHERE: usize = usize::MAX;
        let mut layout = Layout { offsets: vec![NOWHERE; self.bytes.len()], ..Layout::default() };
        for &i in order {
            // A buffer of no bytes is in nobody's way.
            let bytes = self.bytes[i];
            if bytes == 0 {
                continue;
            }
            self.taken.clear();
            for &other in &self.meets[self.starts[i] as usize..self.starts[i + 1] as usize] {
                let (at, size) = (layout.offsets[other as usize], self.bytes[other as usize]);
                if at != NOWHERE {
                    self.taken.push((at, at + size));
                }
            }
            self.taken.sort_unstable();
            let offset = best_gap(&self.taken, bytes);
            let end = offset.checked_add(bytes).ok_or_else(|| too_large(bytes))?;
            layout.offsets[i] = offset;
            layout.bytes = layout.bytes.max(end);
        }
        layout.offsets.iter_mut().filter(|o| **o == NOWHERE).for_each(|o| *o = 0);
        Ok(layout)
    }
}

/// The tightest gap of at least `bytes` between what is taken (sorted), else the end.
fn best_gap(taken: &[(usize, usize)], bytes: usize) -> usize {
    let (mut end, mut best) = (0, None);
    for &(offset, other_end) in taken {
        if offset > end {
            let gap = offset - end;
            if gap >= bytes && best.is_none_or(|(size, _)| gap < size) {
                best = Some((gap, end));
            }
        }
        end = end.max(other_end);
    }
    best.map_or(end, |(_, at)| at)
}

/// The most bytes alive at one step.
fn lower_bound_bytes(requests: &[Request]) -> Result<usize> {
    let steps = requests.iter().map(|r| r.last + 1).max().unwrap_or(0);
    let mut change = vec![0isize; steps + 1];
    for r in requests {
        let bytes = isize::try_from(align(r.bytes)?).map_err(|_| too_large(r.bytes))?;
        change[r.first] = change[r.first].checked_add(bytes).ok_or_else(|| too_large(r.bytes))?;
        change[r.last + 1] -= bytes;
    }
    let (mut alive, mut most) = (0isize, 0);
    for c in change {
        alive = alive.checked_add(c).ok_or_else(|| too_large(usize::MAX))?;
        most = most.max(alive);
    }
    Ok(most.unsigned_abs())
}

/// One line per buffer (offset, size, live range, name), then the totals: the `memory` stage.
pub fn print(requests: &[Request], layout: &Layout, name: &dyn Fn(usize) -> String) -> String {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&i| (requests[i].first, layout.offsets[i]));
    let mut text = String::new();
    for i in order {
        let r = &requests[i];
        let _ = writeln!(
            text,
            "{:>12} +{:<12} steps {:>4}..={:<4} {}",
            layout.offsets[i],
            r.bytes,
            r.first,
            r.last,
            name(i)
        );
    }
    let _ = writeln!(text, "peak {} bytes, lower bound {} bytes", layout.bytes, layout.lower_bound_bytes);
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(bytes: usize, first: usize, last: usize) -> Request {
        Request { bytes, first, last }
    }

    #[test]
    fn reuses_what_is_dead() {
        let requests = [request(100, 0, 1), request(100, 1, 2), request(100, 2, 3)];
        let layout = solve(&requests).unwrap();
        assert_eq!((layout.bytes, layout.lower_bound_bytes), (256, 256));
        assert_eq!(layout.offsets[0], layout.offsets[2]);
    }

    #[test]
    fn takes_the_tightest_gap() {
        let requests = [
            request(640, 0, 9),
            request(576, 0, 4),
            request(512, 0, 9),
            request(192, 0, 4),
            request(160, 0, 9),
            request(128, 5, 9),
        ];
        let layout = Solver::new(&requests).unwrap().place(&by_size(&requests)).unwrap();
        verify::verify(&requests, &layout).unwrap();
        assert_eq!(layout.offsets[5], 640 + 576 + 512, "the hole of 192 bytes, not that of 576");
    }

    #[test]
    fn absurd_sizes_are_errors() {
        assert!(matches!(solve(&[request(usize::MAX, 0, 0)]), Err(Error::OutOfMemory { .. })));
        let half = isize::MAX as usize - 63;
        assert!(solve(&[request(half, 0, 0), request(half, 0, 0), request(half, 0, 0)]).is_err());
    }

    #[test]
    fn nothing_needs_nothing() {
        assert_eq!(solve(&[]).unwrap(), Layout::default());
        assert_eq!(solve(&[request(0, 0, 5)]).unwrap().bytes, 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        #[test]
        fn never_overlaps(raw in prop::collection::vec((0usize..100_000, 0usize..60, 0usize..20), 0..120)) {
            let requests: Vec<Request> = raw.iter().map(|&(b, f, n)| request(b, f, f + n)).collect();
            let layout = solve(&requests).unwrap();
            verify::verify(&requests, &layout).unwrap();
            prop_assert!(layout.bytes >= layout.lower_bound_bytes);
            prop_assert_eq!(&solve(&requests).unwrap(), &layout);
        }
    }

    #[test]
    fn what_lives_long_need_not_stand_on_top() {
        // A transformer's residual (0..=59) beside a large and a small buffer of each block.
        let mut requests = vec![request(640, 0, 59)];
        for block in 0..20 {
            let at = 3 * block;
            requests.extend([request(640, at, at + 1), request(640, at + 1, at + 2), request(2560, at + 2, at + 2)]);
            requests.extend([request(640, at, at), request(640, at, at + 1), request(192, at + 2, at + 2)]);
        }
        let layout = solve(&requests).unwrap();
        verify::verify(&requests, &layout).unwrap();
        let (near, bound) = (layout.bytes - layout.lower_bound_bytes, layout.lower_bound_bytes);
        assert!(near <= bound / NEAR, "{} over {bound}", layout.bytes);
    }

    #[test]
    fn stays_close_to_the_bound_on_chains() {
        let mut requests = Vec::new();
        for step in 0..1500 {
            let bytes = 1000 + (step * 7919) % 50_000;
            requests.push(request(bytes, step, step + 1 + (step % 3)));
        }
        let start = std::time::Instant::now();
        let layout = solve(&requests).unwrap();
        assert!(start.elapsed().as_millis() < 500, "{:?}", start.elapsed());
        verify::verify(&requests, &layout).unwrap();
        assert!(layout.bytes * 4 <= layout.lower_bound_bytes * 5, "{layout:?}");
    }
}
