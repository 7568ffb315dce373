//! Orders of dimensions.
//!
//! A value may be held in another order than its users name: `logical = permute(physical, dims)`, so that logical
//! dimension `i` is physical dimension `dims[i]`.

use crate::analysis::shape::reshape_blocks;
use crate::ir::Dim;

/// A permutation: `dims[i]` is the physical place of logical dimension `i`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    dims: Vec<usize>,
}

impl Layout {
    /// From the attribute of a `permute`.
    pub fn new(dims: Vec<usize>) -> Self {
        Self { dims }
    }

    /// Channels last, as seen by someone who names them second.
    pub fn channels_last(rank: usize) -> Self {
        Self { dims: (0..rank).map(|d| if d == 0 { 0 } else { (d + rank - 3) % (rank - 1) + 1 }).collect() }
    }

    /// The attribute of the `permute` that gives the logical value.
    pub fn dims(&self) -> &[usize] {
        &self.dims
    }

    /// Nothing moves.
    pub fn is_identity(&self) -> bool {
        self.dims.iter().enumerate().all(|(i, d)| i == *d)
    }

    /// Physical place of a logical dimension.
    pub fn place(&self, dim: usize) -> usize {
        self.dims[dim]
    }

    /// The permute that makes the physical value from the logical one.
    pub fn inverse(&self) -> Layout {
        let mut dims = vec![0; self.dims.len()];
        for (logical, physical) in self.dims.iter().enumerate() {
            dims[*physical] = logical;
        }
        Self { dims }
    }

    /// `permute(permute(physical, self), then)` as one.
    pub fn then(&self, then: &[usize]) -> Layout {
        Self { dims: then.iter().map(|d| self.dims[*d]).collect() }
    }

    /// Items of logical dimensions in physical order.
    pub fn to_physical<T: Clone>(&self, logical: &[T]) -> Vec<T> {
        self.inverse().dims.iter().map(|d| logical[*d].clone()).collect()
    }

    /// Whether logical dimensions `range` lie side by side, in order.
    pub fn keeps_together(&self, range: std::ops::Range<usize>) -> bool {
        range.clone().skip(1).all(|d| self.dims[d] == self.dims[d - 1] + 1)
    }

    /// Without the dimensions for which `drop` holds.
    pub fn without(&self, drop: impl Fn(usize) -> bool) -> Layout {
        let kept: Vec<usize> = (0..self.dims.len()).filter(|d| !drop(*d)).collect();
        let rank_of = |place: usize| kept.iter().filter(|d| self.dims[**d] < place).count();
        Self { dims: kept.iter().map(|d| rank_of(self.dims[*d])).collect() }
    }

    /// The physical shape and layout of `reshape(logical)` if it is a reshape of the physical value: every run of
    /// dimensions that is merged or split must lie together, sizes of 1 apart.
    pub fn reshape(&self, old: &[Dim], new: &[Dim]) -> Option<(Vec<Dim>, Layout)> {
        let blocks = reshape_blocks(old, new)?;
        let solid = |d: &usize| !old[*d].is(1);
        let mut places: Vec<usize> = (0..old.len()).filter(solid).map(|d| self.dims[d]).collect();
        places.sort_unstable();
        let mut keyed = Vec::with_capacity(blocks.len());
        let mut key = 0;
        for block in &blocks {
            let mine: Vec<usize> =
                block.old.clone().filter(solid).map(|d| places.partition_point(|p| *p < self.dims[d])).collect();
            if !mine.windows(2).all(|w| w[1] == w[0] + 1) {
                return None;
            }
            // Blocks of size 1 follow the block before them.
            key = mine.first().copied().unwrap_or(key);
            keyed.push((key, block.new.clone()));
        }
        keyed.sort_by_key(|(key, new)| (*key, new.start));
        let order: Vec<usize> = keyed.into_iter().flat_map(|(_, new)| new).collect();
        let shape = order.iter().map(|d| new[*d].clone()).collect();
        Some((shape, Layout { dims: order }.inverse()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(text: &str) -> Vec<Dim> {
        text.split(',').map(|t| t.parse().unwrap()).collect()
    }

    #[test]
    fn channels_last_of_every_rank() {
        assert_eq!(Layout::channels_last(3).dims(), [0, 2, 1]);
        assert_eq!(Layout::channels_last(4).dims(), [0, 3, 1, 2]);
        assert_eq!(Layout::channels_last(5).dims(), [0, 4, 1, 2, 3]);
        assert_eq!(Layout::channels_last(4).inverse().dims(), [0, 2, 3, 1]);
        assert_eq!(Layout::channels_last(4).to_physical(&["n", "c", "h", "w"]), ["n", "h", "w", "c"]);
        assert!(Layout::channels_last(4).then(&[0, 2, 3, 1]).is_identity());
    }

    #[test]
    fn reduced_dimensions_leave_the_others_in_place() {
        let nhwc = Layout::channels_last(4);
        assert!(nhwc.without(|d| d == 1).is_identity());
        assert_eq!(nhwc.without(|d| d == 3).dims(), [0, 2, 1]);
    }

    #[test]
    fn reshapes_of_dimensions_that_lie_together() {
        let nhwc = Layout::channels_last(4);
        let (shape, layout) = nhwc.reshape(&dims("s0,320,s1,s2"), &dims("s0,320,s1*s2")).unwrap();
        assert_eq!((shape, layout.dims()), (dims("s0,s1*s2,320"), &[0, 2, 1][..]));
        let (shape, layout) = nhwc.reshape(&dims("s0,320,s1,s2"), &dims("s0,32,10,s1,s2")).unwrap();
        assert_eq!((shape, layout.dims()), (dims("s0,s1,s2,32,10"), &[0, 3, 4, 1, 2][..]));
        let (shape, layout) = nhwc.reshape(&dims("2,320,1,1"), &dims("2,320")).unwrap();
        assert_eq!((shape, layout.is_identity()), (dims("2,320"), true));
        assert!(nhwc.reshape(&dims("s0,320,s1,s2"), &dims("s0,320*s1,s2")).is_none());
    }
}
