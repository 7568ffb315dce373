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

/// Splits a row-major reshape into the smallest independent blocks, from the left: a boundary is where as many elements
/// lie on the left of it before and after. Dimensions of size 1 go with the block behind them, the last ones with the
/// block before. `None` if the two shapes cannot be seen to have the same number of elements.
pub fn reshape_blocks(old: &[Dim], new: &[Dim]) -> Option<Vec<Block>> {
    let (old_products, new_products) = (prefix_products(old), prefix_products(new));
    if old_products.last() != new_products.last() {
        return None;
    }
    let mut blocks: Vec<Block> = Vec::new();
    let (mut i0, mut j0) = (0, 0);
    for (i, product) in old_products.iter().enumerate().skip(1) {
        let Some(j) = (j0 + 1..=new.len()).find(|j| new_products[*j] == *product) else { continue };
        blocks.push(Block { old: i0..i, new: j0..j });
        (i0, j0) = (i, j);
    }
    match blocks.last_mut() {
        Some(last) => (last.old.end, last.new.end) = (old.len(), new.len()),
        None => blocks.push(Block { old: 0..old.len(), new: 0..new.len() }),
    }
    Some(blocks)
}

fn prefix_products(shape: &[Dim]) -> Vec<Dim> {
    let mut products = vec![Dim::constant(1)];
    for d in shape {
        products.push(&products[products.len() - 1] * d);
    }
    products
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
