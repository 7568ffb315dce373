//! Checks of an arena layout: every buffer aligned and inside, no byte shared by two that live at the same time.

use super::{ALIGN_BYTES, Layout, Request};
use crate::{Error, Result};

/// Checks `layout` against its requests.
///
/// # Errors
/// [`Error::Verify`] naming the buffers that break a rule.
pub fn verify(requests: &[Request], layout: &Layout) -> Result<()> {
    let broken = |what: String| Err(Error::Verify { pass: "memory".to_owned(), what });
    if layout.offsets.len() != requests.len() {
        return broken(format!("{} offsets for {} buffers", layout.offsets.len(), requests.len()));
    }
    for (i, (a, &at)) in requests.iter().zip(&layout.offsets).enumerate() {
        if at % ALIGN_BYTES != 0 || at + a.bytes > layout.bytes {
            return broken(format!("buffer {i} at {at}+{} is misaligned or outside the arena", a.bytes));
        }
        for (j, (b, &other)) in requests.iter().zip(&layout.offsets).enumerate().skip(i + 1) {
            let together = a.first <= b.last && b.first <= a.last;
            if together && at < other + b.bytes && other < at + a.bytes {
                return broken(format!("buffers {i} at {at}+{} and {j} at {other}+{} overlap", a.bytes, b.bytes));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_is_wrong() {
        let requests = [Request { bytes: 64, first: 0, last: 1 }, Request { bytes: 64, first: 1, last: 2 }];
        let layout = |a, b, bytes| Layout { offsets: vec![a, b], bytes, lower_bound_bytes: 128 };
        assert!(verify(&requests, &layout(0, 64, 128)).is_ok());
        assert!(verify(&requests, &layout(0, 0, 128)).is_err());
        assert!(verify(&requests, &layout(0, 32, 128)).is_err());
        assert!(verify(&requests, &layout(0, 64, 100)).is_err());
        assert!(verify(&requests[..1], &layout(0, 64, 128)).is_err());
    }
}
