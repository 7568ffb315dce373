//! The dimensions of a loop with those merged that all operands step through as through one.

use crate::dtype::DType;
use crate::tile::{Bound, MAX_DIMS, Space};

/// A memory operand over the merged dimensions, strides in bytes.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) ptr: *mut u8,
    pub(super) rows: [isize; MAX_DIMS],
    pub(super) col: isize,
}

/// Merged dimensions.
pub(super) struct Layout {
    /// Row dimensions, outermost first; at least one.
    pub(super) dims: [usize; MAX_DIMS],
    pub(super) rank: usize,
    pub(super) cols: usize,
    /// Loads first, then stores.
    pub(super) operands: Vec<Operand>,
    /// The innermost rows are a short dimension of one place in memory, which tiles hold together.
    pub(super) interleaved: bool,
}

/// A dimension that is too short for columns: each step would be a call for a few elements.
const SHORT: usize = 4;

impl Layout {
    /// Of operands of which the first `loads` are read. Where the caller is `free` to, dimensions change their order.
    pub(super) fn new(space: &Space, bounds: &[(Bound, DType)], loads: usize, free: bool) -> Layout {
        // (size, byte stride per operand), outermost first.
        let mut dims: Vec<(usize, Vec<isize>)> = (0..space.rank)
            .map(|d| (space.dims[d], bounds.iter().map(|(b, t)| b.strides[d] * t.size_bytes() as isize).collect()))
            .collect();
        let mut interleaved = false;
        let cols = if free {
            // Any order gives the same result: follow the first result's memory.
            dims.retain(|(n, _)| *n != 1);
            let lead = if bounds.len() > loads { loads } else { 0 };
            if lead < bounds.len() {
                dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[lead].unsigned_abs()));
            }
            merge(&mut dims);
            if let [.., outer, inner] = &mut dims[..]
                && inner.0 <= SHORT
                && outer.0 >= 16 * SHORT
            {
                // Pairs of a rotation, the colours of a pixel: vectors run over the places, with a stride.
                std::mem::swap(outer, inner);
                interleaved = true;
            }
            dims.pop()
        } else {
            let cols = dims.pop();
            dims.retain(|(n, _)| *n != 1);
            merge(&mut dims);
            cols
        };
        let none = vec![0; bounds.len()];
        let (cols, col_strides) = cols.unwrap_or((1, none.clone()));
        if dims.is_empty() {
            dims.push((1, none));
        }
        let mut sizes = [1; MAX_DIMS];
        let mut operands: Vec<Operand> = bounds
            .iter()
            .zip(&col_strides)
            .map(|((b, _), &col)| Operand { ptr: b.ptr, rows: [0; MAX_DIMS], col })
            .collect();
        for (d, (n, strides)) in dims.iter().enumerate() {
            sizes[d] = *n;
            operands.iter_mut().zip(strides).for_each(|(o, &s)| o.rows[d] = s);
        }
        Layout { dims: sizes, rank: dims.len(), cols, operands, interleaved }
    }

    /// Where an operand begins in a row.
    pub(super) fn row(&self, operand: usize, row: usize) -> *mut u8 {
        let operand = &self.operands[operand];
        let (mut rest, mut place) = (row, operand.ptr);
        for (&size, stride) in self.dims[..self.rank].iter().zip(&operand.rows).rev() {
            place = place.wrapping_offset((rest % size) as isize * stride);
            rest /= size;
        }
        place
    }
}

/// Merges neighbours that every operand steps through as through one dimension.
fn merge(dims: &mut Vec<(usize, Vec<isize>)>) {
    let mut merged: Vec<(usize, Vec<isize>)> = Vec::with_capacity(dims.len());
    for (n, strides) in dims.drain(..) {
        match merged.last_mut() {
            Some((outer, steps)) if steps.iter().zip(&strides).all(|(&o, &s)| o == s * n as isize) => {
                *outer *= n;
                *steps = strides;
            }
            _ => merged.push((n, strides)),
        }
    }
    *dims = merged;
}
