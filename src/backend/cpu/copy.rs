//! Strided copies: elements from one place to another, as they are.

use oxidiff_kernels::pool::Pool;

use super::run::{Call, Ctx};
use super::specialize::{Maker, Operand};
use crate::Result;

/// Bytes that a task should move at least.
const TASK_BYTES: usize = 64 << 10;

struct CopyCall {
    from: Operand,
    to: Operand,
}

pub(super) fn make(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let from = maker.operand(&maker.step.operands[0])?;
    let to = maker.operand(&maker.step.stores[0])?;
    if from.access.shape != to.access.shape || from.access.dtype != to.access.dtype {
        return maker.refuse("a copy between different shapes or types");
    }
    Ok(Box::new(CopyCall { from, to }))
}

impl Call for CopyCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (from, to) = (&self.from.access, &self.to.access);
        let size = from.dtype.size_bytes();
        // SAFETY: both places are valid by the caller's promise, and a plan never copies between overlapping ones.
        unsafe {
            let plan = Copy::new(size, &from.shape, &from.strides, &to.strides);
            plan.run(ctx.pool, ctx.at(self.from.slot), ctx.at(self.to.slot));
        }
        Ok(())
    }
}

/// Row-major strides.
pub(super) fn dense(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for i in (0..shape.len().saturating_sub(1)).rev() {
        strides[i] = strides[i + 1] * shape[i + 1] as isize;
    }
    strides
}

/// Copies on the calling thread's pool.
///
/// # Safety
/// `from` must be readable and `to` writable for the shape and their strides (in elements of `size` bytes); they must not
/// overlap.
pub(super) unsafe fn copy_strided(
    size: usize,
    shape: &[usize],
    from: *const u8,
    from_strides: &[isize],
    to: *mut u8,
    to_strides: &[isize],
) {
    // SAFETY: forwarded.
    unsafe { Copy::new(size, shape, from_strides, to_strides).run(Pool::global(), from, to) };
}

/// A copy with neighbouring dimensions merged; strides in bytes, innermost dimension last.
struct Copy {
    size: usize,
    dims: Vec<(usize, isize, isize)>,
}

#[derive(Clone, Copy)]
struct Ends(*const u8, *mut u8);

// SAFETY: tasks read shared memory and write disjoint elements.
unsafe impl Send for Ends {}
// SAFETY: as above.
unsafe impl Sync for Ends {}

impl Ends {
    fn get(self) -> (*const u8, *mut u8) {
        (self.0, self.1)
    }
}

impl Copy {
    fn new(size: usize, shape: &[usize], from: &[isize], to: &[isize]) -> Self {
        let bytes = size as isize;
        let mut dims: Vec<(usize, isize, isize)> = Vec::with_capacity(shape.len());
        for ((&len, &f), &t) in shape.iter().zip(from).zip(to).filter(|((len, _), _)| **len != 1) {
            let (f, t) = (f * bytes, t * bytes);
            match dims.last_mut() {
                Some(last) if last.1 == f * len as isize && last.2 == t * len as isize => {
                    *last = (last.0 * len, f, t);
                }
                _ => dims.push((len, f, t)),
            }
        }
        // Walk the destination in memory order, so that writes are sequential.
        dims.sort_by_key(|d| std::cmp::Reverse(d.2.unsigned_abs()));
        Self { size, dims }
    }

    /// # Safety
    /// As [`copy_strided`].
    unsafe fn run(&self, pool: &Pool, from: *const u8, to: *mut u8) {
        let Some((&inner, outer)) = self.dims.split_last() else {
            // SAFETY: one element.
            unsafe { std::ptr::copy_nonoverlapping(from, to, self.size) };
            return;
        };
        let rows: usize = outer.iter().map(|d| d.0).product();
        if rows == 0 || inner.0 == 0 {
            return;
        }
        let row_bytes = inner.0 * self.size;
        let per_task = (TASK_BYTES / row_bytes.max(1)).clamp(1, rows);
        let ends = Ends(from, to);
        pool.run(rows.div_ceil(per_task), |task, _| {
            let (from, to) = ends.get();
            for row in task * per_task..((task + 1) * per_task).min(rows) {
                let (mut rest, mut f, mut t) = (row, 0, 0);
                for &(len, from_stride, to_stride) in outer.iter().rev() {
                    f += (rest % len) as isize * from_stride;
                    t += (rest % len) as isize * to_stride;
                    rest /= len;
                }
                // SAFETY: the row lies inside both places.
                unsafe { self.row(inner, from.offset(f), to.offset(t)) };
            }
        });
    }

    /// # Safety
    /// `from` and `to` must hold the row.
    unsafe fn row(&self, (len, from_stride, to_stride): (usize, isize, isize), from: *const u8, to: *mut u8) {
        let bytes = self.size as isize;
        // SAFETY: forwarded; elements are read and written unaligned.
        unsafe {
            if from_stride == bytes && to_stride == bytes {
                std::ptr::copy_nonoverlapping(from, to, len * self.size);
                return;
            }
            match self.size {
                1 => move_row::<u8>(len, from, from_stride, to, to_stride),
                2 => move_row::<u16>(len, from, from_stride, to, to_stride),
                4 => move_row::<u32>(len, from, from_stride, to, to_stride),
                _ => move_row::<u64>(len, from, from_stride, to, to_stride),
            }
        }
    }
}

/// # Safety
/// `from` and `to` must hold `len` elements of `T` at their strides in bytes.
unsafe fn move_row<T: std::marker::Copy>(
    len: usize,
    from: *const u8,
    from_stride: isize,
    to: *mut u8,
    to_stride: isize,
) {
    for i in 0..len as isize {
        // SAFETY: forwarded.
        unsafe {
            let element = from.offset(i * from_stride).cast::<T>().read_unaligned();
            to.offset(i * to_stride).cast::<T>().write_unaligned(element);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_any_strides() {
        let from: Vec<u16> = (0..24).collect();
        let mut to = vec![0u16; 24];
        // [2, 3, 4] read as it lies, written with the last two dimensions exchanged.
        // SAFETY: both hold 24 elements.
        unsafe {
            copy_strided(2, &[2, 3, 4], from.as_ptr().cast(), &[12, 4, 1], to.as_mut_ptr().cast(), &[12, 1, 3]);
        }
        for (n, &x) in from.iter().enumerate() {
            let (a, b, c) = (n / 12, n / 4 % 3, n % 4);
            assert_eq!(to[a * 12 + c * 3 + b], x);
        }
        let mut wide = vec![0u16; 6];
        // SAFETY: a row of three broadcast to two rows.
        unsafe { copy_strided(2, &[2, 3], from.as_ptr().cast(), &[0, 1], wide.as_mut_ptr().cast(), &[3, 1]) };
        assert_eq!(wide, [0, 1, 2, 0, 1, 2]);
    }
}
