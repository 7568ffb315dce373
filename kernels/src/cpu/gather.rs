//! Rows picked by index: embedding look-up and `index_select`.

use super::copy::Shared;
use crate::dtype::DType;
use crate::pool::Pool;
use std::fmt;

/// An index is out of bounds. Nothing has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexError {
    /// The index.
    pub index: i64,
    /// Its position in the list.
    pub at: usize,
    /// Number of rows it must be below.
    pub rows: usize,
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "index {} (number {}) is out of bounds for {} rows", self.index, self.at, self.rows)
    }
}

impl std::error::Error for IndexError {}

/// A list of indices in memory, I64 or I32.
#[derive(Clone, Copy, Debug)]
pub struct Indices {
    /// First index.
    pub ptr: *const u8,
    /// I64 or I32.
    pub dtype: DType,
    /// Number of indices.
    pub len: usize,
    /// Elements from one to the next.
    pub stride: isize,
}

impl Indices {
    /// # Safety
    /// The list must be valid for reads and `at` below its length.
    unsafe fn get(&self, at: usize) -> i64 {
        let at = at as isize * self.stride;
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                DType::I32 => self.ptr.cast::<i32>().offset(at).read_unaligned() as i64,
                _ => self.ptr.cast::<i64>().offset(at).read_unaligned(),
            }
        }
    }
}

/// Where rows come from and go to; all distances in bytes. `dst[o][i] = src[o][indices[i]]`, `row_bytes` each.
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Source row 0.
    pub src: *const u8,
    /// Rows of the source.
    pub rows: usize,
    /// Between source rows.
    pub src_row: isize,
    /// Destination row 0.
    pub dst: *mut u8,
    /// Between destination rows.
    pub dst_row: isize,
    /// Length of a row.
    pub row_bytes: usize,
    /// Number of independent slices, 1 for an embedding.
    pub outer: usize,
    /// Between source slices.
    pub src_outer: isize,
    /// Between destination slices.
    pub dst_outer: isize,
}

/// Copies the rows the indices name.
///
/// With `wrap`, indices from `-rows` on count from the end, as in tensor indexing; without, they are errors, as in an
/// embedding.
///
/// # Errors
/// [`IndexError`] for the first index out of bounds; nothing has been written then.
///
/// # Safety
/// The indices must be valid for reads, `rows` must describe valid memory, and destination rows must not overlap.
pub unsafe fn gather(pool: &Pool, indices: Indices, wrap: bool, rows: Rows) -> Result<(), IndexError> {
    for at in 0..indices.len {
        // SAFETY: the caller's promise.
        let index = unsafe { indices.get(at) };
        let low = if wrap { -(rows.rows as i64) } else { 0 };
        if index < low || index >= rows.rows as i64 {
            return Err(IndexError { index, at, rows: rows.rows });
        }
    }
    let units = rows.outer * indices.len;
    let tasks = ((units * rows.row_bytes) >> 16).clamp(1, pool.threads() * 4).min(units.max(1));
    let (src, dst, list) = (Shared(rows.src.cast_mut()), Shared(rows.dst), Shared(indices.ptr.cast_mut()));
    let (dtype, stride, len) = (indices.dtype, indices.stride, indices.len);
    let r = (rows.rows, rows.src_row, rows.dst_row, rows.row_bytes, rows.src_outer, rows.dst_outer);
    pool.run(tasks, |task, _| {
        let indices = Indices { ptr: list.at(0), dtype, len, stride };
        let (rows, src_row, dst_row, bytes, src_outer, dst_outer) = r;
        for unit in units * task / tasks..units * (task + 1) / tasks {
            let (o, at) = ((unit / len) as isize, unit % len);
            // SAFETY: `at` is below the list's length.
            let index = unsafe { indices.get(at) };
            let index = (if index < 0 { index + rows as i64 } else { index }) as isize;
            let (s, d) = (src.at(o * src_outer + index * src_row), dst.at(o * dst_outer + at as isize * dst_row));
            // SAFETY: the index is in bounds, as checked above; units write disjoint rows.
            unsafe { std::ptr::copy_nonoverlapping(s, d, bytes) };
        }
    });
    Ok(())
}
