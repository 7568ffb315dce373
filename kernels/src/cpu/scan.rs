//! Cumulative sums along the middle dimension of `[outer, scan, inner]`.
//!
//! Floating types add up in f64 and round each sum, integers add up in i64 (wrapping): what PyTorch does. Each sum waits for
//! the one before it, so that some lines are walked side by side.

use super::KernelError;
use super::copy::Shared;
use super::reduce::{load_f64, load_i64, store_result};
use super::simd::Element;
use crate::dtype::DType;
use crate::pool::Pool;
use crate::with_element;

/// The operand and the result. Strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Scan {
    /// First element of the operand.
    pub src: *const u8,
    /// Its type.
    pub src_dtype: DType,
    /// `[outer, scan, inner]`.
    pub sizes: [usize; 3],
    /// The operand's strides along them.
    pub src_strides: [isize; 3],
    /// First element of the result.
    pub dst: *mut u8,
    /// Its type: floating if and only if the operand's is, or I64 or I32.
    pub dst_dtype: DType,
    /// The result's strides along the three sizes.
    pub dst_strides: [isize; 3],
}

/// Lines walked side by side.
const LINES: usize = 8;

const fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
}

/// Computes cumulative sums.
///
/// # Errors
/// [`KernelError::UnsupportedDType`] for a result that is floating where the operand is not, or the other way round, and for
/// one of fewer than 32 bits that is an integer.
///
/// # Safety
/// The description must match valid memory; the result may be the operand itself, element for element, and overlap it in no
/// other way.
pub unsafe fn cumulative_sum(pool: &Pool, scan: &Scan) -> Result<(), KernelError> {
    let Scan { src_dtype: from, dst_dtype: to, sizes: [outer, n, inner], .. } = *scan;
    let is_known = if is_float(from) { is_float(to) } else { matches!(to, DType::I64 | DType::I32) };
    if !is_known {
        return Err(KernelError::UnsupportedDType(to));
    }
    let lines = outer * inner;
    let tasks = ((lines * n) >> 14).clamp(1, pool.threads() * 4).min(lines.div_ceil(LINES));
    let (src, dst) = (Shared(scan.src.cast_mut()), Shared(scan.dst));
    let (ss, ds) = (scan.src_strides, scan.dst_strides);
    let sizes = [from, to].map(|dtype| dtype.size_bytes() as isize);
    pool.run(tasks, |task, _| {
        let (mut first, end) = (lines * task / tasks, lines * (task + 1) / tasks);
        while first < end {
            let mut walk = Walk {
                lines: [(std::ptr::null(), std::ptr::null_mut()); LINES],
                count: LINES.min(end - first),
                n,
                steps: [ss[1] * sizes[0], ds[1] * sizes[1]],
            };
            for (j, line) in walk.lines[..walk.count].iter_mut().enumerate() {
                let (o, i) = (((first + j) / inner) as isize, ((first + j) % inner) as isize);
                let (p, q) = ((o * ss[0] + i * ss[2]) * sizes[0], (o * ds[0] + i * ds[2]) * sizes[1]);
                *line = (src.at(p).cast_const(), dst.at(q));
            }
            first += walk.count;
            // SAFETY: lines of the operand and the result, by the caller's promise; those of tasks are disjoint.
            unsafe { walk.add_up(from, to) };
        }
    });
    Ok(())
}

/// Lines of the operand and of the result.
struct Walk {
    lines: [(*const u8, *mut u8); LINES],
    count: usize,
    n: usize,
    /// Bytes between elements of a line.
    steps: [isize; 2],
}

impl Walk {
    unsafe fn add_up(&self, from: DType, to: DType) {
        // SAFETY: forwarded; each pair of functions reads and writes the types that it is chosen for.
        unsafe {
            if !is_float(from) {
                self.each(
                    0i64,
                    |sum, p| sum.wrapping_add(load_i64(from, p)),
                    |q, sum| match to {
                        DType::I64 => q.cast::<i64>().write_unaligned(sum),
                        _ => q.cast::<i32>().write_unaligned(sum as i32),
                    },
                );
            } else if from == to && from != DType::F64 {
                with_element!(from, e => self.each(
                    0f64,
                    |sum, p| sum + e.get(p, 0) as f64,
                    |q, sum| e.put(q, 0, sum as f32),
                ), else ());
            } else {
                self.each(0f64, |sum, p| sum + load_f64(from, p), |q, sum| store_result(to, q, sum));
            }
        }
    }

    #[inline(always)]
    unsafe fn each<T: Copy>(&self, zero: T, add: impl Fn(T, *const u8) -> T, store: impl Fn(*mut u8, T)) {
        let mut sums = [zero; LINES];
        for i in 0..self.n as isize {
            for (sum, &(p, q)) in sums.iter_mut().zip(&self.lines[..self.count]) {
                *sum = add(*sum, p.wrapping_offset(i * self.steps[0]));
                store(q.wrapping_offset(i * self.steps[1]), *sum);
            }
        }
    }
}
