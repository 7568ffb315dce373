//! Cumulative sums of types that do not go together; the registry compares the others with adding up one after the other.

use oxidiff_kernels::cpu::KernelError;
use oxidiff_kernels::cpu::scan::{Scan, cumulative_sum};
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::pool::Pool;

#[test]
fn results_of_another_kind_are_refused() {
    for (from, to) in [(DType::F32, DType::I64), (DType::I64, DType::F32), (DType::I32, DType::U8)] {
        let (x, mut y) = ([0u8; 48], [0u8; 48]);
        let (src, dst, strides) = (x.as_ptr(), y.as_mut_ptr(), [6, 2, 1]);
        let sizes = [1, 3, 2];
        let scan = Scan { src, src_dtype: from, sizes, src_strides: strides, dst, dst_dtype: to, dst_strides: strides };
        // SAFETY: the buffers hold the description.
        let refused = unsafe { cumulative_sum(&Pool::new(1), &scan) };
        assert!(matches!(refused, Err(KernelError::UnsupportedDType(_))));
    }
}
