//! Live ranges to buffer offsets: where each temporary of a run lies in the arena.
//!
//! A plan knows who lives when; sizes are known once its symbols have values. [`solve`] then places the buffers one by
//! one, each into the tightest gap between those placed already that live at the same time. This is
//! arithmetic only (about a millisecond for the 1500 buffers of a large UNet), so every specialization does it anew.
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

impl Request {
    fn meets(&self, other: &Request) -> bool {
        self.first <= other.last && other.first <= self.last
    }
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

/// Places every request, in the better of two orders: largest first, and step by step from the step with most alive.
///
/// # Errors
/// [`Error::OutOfMemory`] if the sum does not fit an address.
pub fn solve(requests: &[Request]) -> Result<Layout> {
    let lower_bound_bytes = lower_bound_bytes(requests)?;
    let by_size = place(requests, &by_size(requests), lower_bound_bytes)?;
    if by_size.bytes == lower_bound_bytes {
        return Ok(by_size);
    }
    let by_breadth = place(requests, &by_breadth(requests), lower_bound_bytes)?;
    Ok(if by_breadth.bytes < by_size.bytes { by_breadth } else { by_size })
}

fn by_size(requests: &[Request]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..requests.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(requests[i].bytes), requests[i].first, i));
    order
}

/// Steps by the bytes alive at them, most first; at each step its buffers by size.
fn by_breadth(requests: &[Request]) -> Vec<usize> {
    let steps = requests.iter().map(|r| r.last + 1).max().unwrap_or(0);
    let mut alive: Vec<Vec<usize>> = vec![Vec::new(); steps];
    for (i, r) in requests.iter().enumerate() {
        alive[r.first..=r.last].iter_mut().for_each(|step| step.push(i));
    }
    let bytes = |step: &Vec<usize>| step.iter().fold(0usize, |sum, &i| sum.saturating_add(requests[i].bytes));
    alive.sort_by_cached_key(|step| std::cmp::Reverse(bytes(step)));
    let (mut order, mut seen) = (Vec::with_capacity(requests.len()), vec![false; requests.len()]);
    for mut step in alive {
        step.sort_by_key(|&i| (std::cmp::Reverse(requests[i].bytes), i));
        order.extend(step.into_iter().filter(|&i| !std::mem::replace(&mut seen[i], true)));
    }
    order
}

fn place(requests: &[Request], order: &[usize], lower_bound_bytes: usize) -> Result<Layout> {
    let mut layout = Layout { offsets: vec![0; requests.len()], bytes: 0, lower_bound_bytes };
    // Sorted by offset; a buffer of no bytes is in nobody's way and is not listed.
    let mut placed: Vec<(usize, usize, usize)> = Vec::with_capacity(requests.len());
    for &i in order {
        let bytes = align(requests[i].bytes)?;
        if bytes == 0 {
            continue;
        }
        let offset = best_gap(&placed, requests, &requests[i], bytes);
        let end = offset.checked_add(bytes).ok_or_else(|| too_large(bytes))?;
        let at = placed.partition_point(|&(o, ..)| o < offset);
        placed.insert(at, (offset, end, i));
        layout.offsets[i] = offset;
        layout.bytes = layout.bytes.max(end);
    }
    Ok(layout)
}

/// The tightest gap of at least `bytes` between the placed buffers that live together with `request`, else the end.
fn best_gap(placed: &[(usize, usize, usize)], requests: &[Request], request: &Request, bytes: usize) -> usize {
    let (mut end, mut best) = (0, None);
    for &(offset, other_end, _) in placed.iter().filter(|&&(.., other)| requests[other].meets(request)) {
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
        let layout = place(&requests, &by_size(&requests), 0).unwrap();
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
