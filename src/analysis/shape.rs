//! Shapes as symbolic sizes: broadcasting, and how a reshape maps dimensions.

use crate::ir::Dim;

/// The shape that `shapes` broadcast to, `None` if they provably do not or equality cannot be seen.
pub fn broadcast<'a>(shapes: impl IntoIterator<Item = &'a [Dim]>) -> Option<Vec<Dim>> {
    let mut out: Vec<Dim> = Vec::new();
    for shape in shapes {
        if shape.len() > out.len() {
            let more = shape.len() - out.len();
            out.splice(0..0, std::iter::repeat_n(Dim::constant(1), more));
        }
        for (o, d) in out.iter_mut().rev().zip(shape.iter().rev()) {
            if o.is(1) {
                *o = d.clone();
            } else if !d.is(1) && o != d {
                return None;
            }
        }
    }
    Some(out)
}

/// A run of old dimensions and the run of new dimensions that has the same elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Range of dimensions before.
    pub old: std::ops::Range<usize>,
    /// Range of dimensions after.
    pub new: std::ops::Range<usize>,
}

/// Splits a row-major reshape into the smallest independent blocks, from the left; dimensions of size 1 go with the
/// block before them. `None` if the two shapes cannot be seen to have the same number of elements.
pub fn reshape_blocks(old: &[Dim], new: &[Dim]) -> Option<Vec<Block>> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut i, mut j) = (0, 0);
    while i < old.len() || j < new.len() {
        let (start_i, start_j) = (i, j);
        let (mut a, mut b) = (Dim::constant(1), Dim::constant(1));
        loop {
            if (i > start_i || j > start_j) && a == b {
                break;
            }
            // The side that is provably behind takes the next dimension; where that cannot be seen, the other one.
            if i < old.len() && (behind(&a, &b) || j == new.len()) {
                a = &a * &old[i];
                i += 1;
            } else if j < new.len() {
                b = &b * &new[j];
                j += 1;
            } else {
                return None;
            }
        }
        blocks.push(Block { old: start_i..i, new: start_j..j });
    }
    Some(merge_units(blocks, old, new))
}

/// Whether `a` must grow to become `b`: it divides `b`, or `b` does not divide it.
fn behind(a: &Dim, b: &Dim) -> bool {
    match (a.as_constant(), b.as_constant()) {
        (Some(x), Some(y)) => x <= y,
        (Some(1), None) => true,
        _ => b.checked_div(a).is_some_and(|q| is_whole(&q)) || a.checked_div(b).is_none_or(|q| !is_whole(&q)),
    }
}

/// Whether a quotient is visibly a product of whole numbers.
fn is_whole(q: &Dim) -> bool {
    q.as_constant().is_some() || !q.to_string().contains('/')
}

/// Blocks with nothing on one side (a size-1 dimension that appears or vanishes) join a neighbour.
fn merge_units(blocks: Vec<Block>, old: &[Dim], new: &[Dim]) -> Vec<Block> {
    let mut out: Vec<Block> = Vec::new();
    for b in blocks {
        match out.last_mut() {
            Some(last) if b.old.is_empty() || b.new.is_empty() || last.old.is_empty() || last.new.is_empty() => {
                last.old.end = b.old.end;
                last.new.end = b.new.end;
            }
            _ => out.push(b),
        }
    }
    debug_assert_eq!(out.last().map_or(0, |b| b.old.end), old.len());
    debug_assert_eq!(out.last().map_or(0, |b| b.new.end), new.len());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(text: &str) -> Vec<Dim> {
        text.split(',').filter(|t| !t.is_empty()).map(|t| t.parse().unwrap()).collect()
    }

    fn check(old: &str, new: &str, expect: &[(std::ops::Range<usize>, std::ops::Range<usize>)]) {
        let blocks = reshape_blocks(&dims(old), &dims(new)).unwrap();
        let got: Vec<_> = blocks.into_iter().map(|b| (b.old, b.new)).collect();
        assert_eq!(got, expect, "{old} -> {new}");
    }

    #[test]
    fn splits_reshapes_into_blocks() {
        check("s0,s1,s2,320", "s0,s1*s2,320", &[(0..1, 0..1), (1..3, 1..2), (3..4, 2..3)]);
        check("s0,s1*s2/64,320", "s0,s1/8,s2/8,320", &[(0..1, 0..1), (1..2, 1..3), (2..3, 3..4)]);
        check("s0,77,768", "s0,77,12,64", &[(0..1, 0..1), (1..2, 1..2), (2..3, 2..4)]);
        check("s0,8,77,40", "8*s0,77,40", &[(0..2, 0..1), (2..3, 1..2), (3..4, 2..3)]);
        check("2,3,4", "6,4", &[(0..2, 0..1), (2..3, 1..2)]);
        check("4,6", "8,3", &[(0..2, 0..2)]);
    }

    #[test]
    fn size_one_dimensions_join_a_neighbour() {
        check("s0,320", "s0,320,1,1", &[(0..1, 0..1), (1..2, 1..4)]);
        check("320", "1,320", &[(0..1, 0..2)]);
    }

    #[test]
    fn broadcasts_only_what_is_equal() {
        assert_eq!(broadcast([&dims("s0,1,4")[..], &dims("3,1")[..]]), Some(dims("s0,3,4")));
        assert_eq!(broadcast([&dims("s0")[..], &dims("s1")[..]]), None);
    }
}
