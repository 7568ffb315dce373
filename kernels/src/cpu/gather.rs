//! Rows picked by index (embedding look-up and `index_select`), and elements (`gather`).

use super::copy::Shared;
use super::tile_layout::Layout;
use crate::dtype::DType;
use crate::pool::Pool;
use crate::tile::{Bound, Space};
use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

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
        // SAFETY: the caller's promise.
        unsafe { self.read(at as isize * self.stride) }
    }

    /// # Safety
    /// There must be an index so many elements from the first.
    pub(super) unsafe fn read(&self, at: isize) -> i64 {
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

/// `dst[i] = src[i with indices[i] in the place of one dimension]`. All operands have the result's dimensions.
#[derive(Clone, Copy, Debug)]
pub struct Elements {
    /// The result's sizes.
    pub space: Space,
    /// Bytes of an element: 1, 2, 4 or 8.
    pub element_bytes: usize,
    /// The source, with a stride of 0 along the dimension that is indexed.
    pub src: Bound,
    /// Its size along that dimension.
    pub size: usize,
    /// Its stride there, in elements.
    pub step: isize,
    /// The indices.
    pub index: Bound,
    /// I64 or I32.
    pub index_dtype: DType,
    /// The result.
    pub dst: Bound,
}

/// Elements of a task at least.
const GRAIN: usize = 1 << 13;

/// Picks elements.
///
/// # Errors
/// [`IndexError`] for an index out of bounds, with its position in its row of the result; results are then of no use.
///
/// # Safety
/// The operands must be valid for the space, the source for every index below `size`, and the result must not overlap them.
///
/// # Panics
/// If elements have another size.
pub unsafe fn gather_elements(pool: &Pool, gather: &Elements) -> Result<(), IndexError> {
    // The layout counts in bytes; which type of that many does not matter.
    let element = match gather.element_bytes {
        1 => DType::U8,
        2 => DType::F16,
        4 => DType::F32,
        8 => DType::F64,
        other => panic!("no elements of {other} bytes"),
    };
    if gather.space.is_empty() {
        return Ok(());
    }
    let bounds = [(gather.src, element), (gather.index, gather.index_dtype), (gather.dst, element)];
    let layout = Layout::new(&gather.space, &bounds, 2, true);
    let step = gather.step * gather.element_bytes as isize;
    let (rows, cols) = (layout.dims[..layout.rank].iter().product::<usize>(), layout.cols);
    let tasks = (rows * cols / GRAIN).clamp(1, pool.threads() * 4);
    let picked = Picked { layout, size: gather.size, step, dtype: gather.index_dtype };
    let (failed, element_bytes) = (Mutex::new(None), gather.element_bytes);
    let pick = |rows: Range<usize>, cols: Range<usize>| {
        // SAFETY: the caller's promise; tasks write disjoint parts.
        let outcome = unsafe {
            match element_bytes {
                1 => picked.pick::<u8>(rows, cols),
                2 => picked.pick::<u16>(rows, cols),
                4 => picked.pick::<u32>(rows, cols),
                _ => picked.pick::<u64>(rows, cols),
            }
        };
        if let Err(error) = outcome {
            failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    };
    if rows >= tasks {
        pool.run(tasks, |task, _| pick(rows * task / tasks..rows * (task + 1) / tasks, 0..cols));
    } else {
        pool.run(tasks, |task, _| pick(0..rows, cols * task / tasks..cols * (task + 1) / tasks));
    }
    failed.into_inner().unwrap_or_else(PoisonError::into_inner).map_or(Ok(()), Err)
}

/// Where elements come from and go to: source, indices, result.
struct Picked {
    layout: Layout,
    size: usize,
    /// Bytes.
    step: isize,
    dtype: DType,
}

// SAFETY: the addresses in the layout are followed by `pick` alone, whose caller vouches for them.
unsafe impl Sync for Picked {}

impl Picked {
    /// # Safety
    /// As for [`gather_elements`].
    unsafe fn pick<T: Copy>(&self, rows: Range<usize>, cols: Range<usize>) -> Result<(), IndexError> {
        for row in rows {
            let [src, index, dst] = [0, 1, 2].map(|operand| self.layout.row(operand, row));
            let [src_col, index_col, dst_col] = [0, 1, 2].map(|operand| self.layout.operands[operand].col);
            for col in cols.clone() {
                let at = col as isize;
                // SAFETY: elements of the operands, and an index that is below the size of its dimension.
                unsafe {
                    let place = index.wrapping_offset(at * index_col);
                    let index = match self.dtype {
                        DType::I32 => i64::from(place.cast::<i32>().read_unaligned()),
                        _ => place.cast::<i64>().read_unaligned(),
                    };
                    if usize::try_from(index).is_ok_and(|i| i < self.size) {
                        let from = src.wrapping_offset(at * src_col + index as isize * self.step);
                        dst.wrapping_offset(at * dst_col)
                            .cast::<T>()
                            .write_unaligned(from.cast::<T>().read_unaligned());
                    } else {
                        return Err(IndexError { index, at: col, rows: self.size });
                    }
                }
            }
        }
        Ok(())
    }
}
