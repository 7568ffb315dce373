//! Strided copies: elements from one place to another, as they are.

use oxidiff_kernels::cpu::copy::{Side, copy};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;

use super::run::{Call, Ctx};
use super::specialize::{Maker, Operand};
use crate::Result;

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
        let (ptr, target) = (ctx.at(self.from.slot), ctx.at(self.to.slot));
        // SAFETY: both places are valid by the caller's promise, and a plan never copies between overlapping ones.
        unsafe {
            move_elements(
                ctx.pool,
                ctx.isa,
                from.dtype.size_bytes(),
                &from.shape,
                (ptr, &from.strides),
                (target, &to.strides),
            )
        };
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

/// Copies elements of `size` bytes from one place to another; strides in elements.
///
/// # Safety
/// Both places must be valid for the shape, and must not overlap.
pub(super) unsafe fn move_elements(
    pool: &Pool,
    isa: Isa,
    size: usize,
    shape: &[usize],
    from: (*mut u8, &[isize]),
    to: (*mut u8, &[isize]),
) {
    // Elements are moved, not looked at: any type of that size will do.
    let dtype = match size {
        1 => KernelType::U8,
        2 => KernelType::F16,
        4 => KernelType::I32,
        _ => KernelType::I64,
    };
    let side = |(ptr, strides)| Side { ptr, dtype, strides };
    // SAFETY: forwarded.
    unsafe { copy(pool, isa, shape, side(from), side(to)) };
}

/// [`move_elements`] with the best instructions.
///
/// # Safety
/// As [`move_elements`].
pub(super) unsafe fn copy_strided(
    size: usize,
    shape: &[usize],
    from: *const u8,
    from_strides: &[isize],
    to: *mut u8,
    to_strides: &[isize],
) {
    let from = (from.cast_mut(), from_strides);
    // SAFETY: forwarded.
    unsafe { move_elements(Pool::global(), Isa::detect(), size, shape, from, (to, to_strides)) };
}
