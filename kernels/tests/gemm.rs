//! Matrix products through the public entry points: batches, strides, mixed element types, epilogues, bad arguments.

use std::sync::Mutex;

use oxidiff_kernels::cpu::KernelError;
use oxidiff_kernels::cpu::gemm::{BatchDim, Operand, batched_gemm, gemm, left_out};
use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
use oxidiff_kernels::cpu::gemm_swapped::{gemm_swapped, is_swapped_faster, swapped_bytes};
use oxidiff_kernels::cpu::pack::{Matrix, pack_b, pack_b_for, packed_bytes, packed_bytes_for};
use oxidiff_kernels::cpu::verify::{Buffer, compare, reference_gemm};
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::epilogue::Epilogue;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;

/// Counts how often each result is handed over.
struct Coverage {
    cols: usize,
    seen: Mutex<Vec<u32>>,
}

impl Epilogue for Coverage {
    unsafe fn apply(&self, _: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        assert!(ld >= cols);
        let mut seen = self.seen.lock().unwrap();
        for row in row0..row0 + rows {
            seen[row * self.cols + col0..][..cols].iter_mut().for_each(|count| *count += 1);
        }
    }
}

fn available() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

#[test]
fn every_result_is_handed_over_once() {
    for threads in [1, 2, 5] {
        let pool = Pool::new(threads);
        for (m, n, k) in [(1, 1, 3), (300, 70, 5), (5, 2000, 300), (513, 777, 1), (3, 3, 0), (0, 4, 4), (4, 0, 4)] {
            let (a, b) = (Buffer::random(DType::F32, m * k, 1), Buffer::random(DType::F32, n * k, 2));
            let coverage = Coverage { cols: n, seen: Mutex::new(vec![0; m * n]) };
            let left = Matrix::row_major(a.ptr(), DType::F32, k);
            let right = Operand::Strided(Matrix::row_major(b.ptr(), DType::F32, k));
            // SAFETY: dense buffers of the sizes named.
            unsafe { gemm(&pool, Isa::detect(), m, n, k, &left, &right, &coverage).unwrap() };
            assert!(coverage.seen.into_inner().unwrap().iter().all(|&count| count == 1), "{m}x{n}x{k}");
        }
    }
}

#[test]
fn batches_broadcast_and_transpose() {
    let (m, n, k) = (17, 21, 40);
    // Two by three pairs; A is shared along the second dimension, B along the first.
    let batch = [
        BatchDim { size: 2, a_stride: (m * k) as isize, b_stride: 0 },
        BatchDim { size: 3, a_stride: 0, b_stride: (n * k) as isize },
    ];
    for isa in available() {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let (a, b) = (Buffer::random(dtype, 2 * m * k, 1), Buffer::random(dtype, 3 * n * k, 2));
            let mut transposed = Buffer::zeroed(dtype, 3 * n * k);
            for (z, row, col) in (0..3 * n * k).map(|i| (i / (n * k), i / k % n, i % k)) {
                transposed.set((z * k + col) * n + row, b.get((z * n + row) * k + col) as f32);
            }
            let references = reference_gemm(&a, &b, &batch, (m, n, k));
            let left = Matrix::row_major(a.ptr(), dtype, k);
            let by_rows = Matrix::row_major(b.ptr(), dtype, k);
            let by_columns = Matrix::row_major(transposed.ptr(), dtype, n).transposed();
            for right in [by_rows, by_columns] {
                let mut c = Buffer::zeroed(DType::F32, 6 * m * n);
                let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
                // SAFETY: dense buffers of the sizes named.
                unsafe { batched_gemm(Pool::global(), isa, &batch, m, n, k, &left, &right, &store).unwrap() };
                compare(&format!("{isa:?} {dtype:?}"), &c, &references, k).unwrap();
            }
        }
    }
}

#[test]
fn strided_and_mixed_operands() {
    let (m, n, k, gap) = (19, 35, 50, 3);
    for isa in available() {
        for left in [DType::F32, DType::BF16, DType::F16] {
            for right in [DType::F32, DType::BF16, DType::F16] {
                let (a, b) = (Buffer::random(left, m * k, 1), Buffer::random(right, n * k, 2));
                // A with gaps between its elements, B with rows in reverse order.
                let mut spread = Buffer::zeroed(left, m * k * gap);
                (0..m * k).for_each(|index| spread.set(index * gap, a.get(index) as f32));
                let mut reversed = Buffer::zeroed(right, n * k);
                for (row, col) in (0..n * k).map(|index| (index / k, index % k)) {
                    reversed.set((n - 1 - row) * k + col, b.get(row * k + col) as f32);
                }
                let last = reversed.ptr().wrapping_add((n - 1) * k * right.size_bytes());
                let row_stride = (k * gap) as isize;
                let strided = Matrix { ptr: spread.ptr(), dtype: left, row_stride, col_stride: gap as isize };
                let backwards = Matrix { ptr: last, dtype: right, row_stride: -(k as isize), col_stride: 1 };
                let mut c = Buffer::zeroed(DType::F32, m * n);
                let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
                // SAFETY: the strides stay inside the buffers.
                unsafe {
                    gemm(Pool::global(), isa, m, n, k, &strided, &Operand::Strided(backwards), &store).unwrap();
                }
                let references = reference_gemm(&a, &b, &[], (m, n, k));
                compare(&format!("{isa:?} {left:?} {right:?}"), &c, &references, k).unwrap();
            }
        }
    }
}

#[test]
fn a_few_rows_times_an_unpacked_weight() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (m, n, k) in [(1, 1, 1), (1, 130, 64), (2, 67, 33), (3, 5, 300), (4, 64, 17), (5, 64, 17)] {
            let (a, b) = (Buffer::random(DType::F32, m * k, 1), Buffer::random(dtype, n * k, 2));
            let left = Matrix::row_major(a.ptr(), DType::F32, k);
            let right = Operand::Strided(Matrix::row_major(b.ptr(), dtype, k));
            for isa in available() {
                let mut c = Buffer::zeroed(DType::F32, m * n);
                let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
                // SAFETY: dense buffers of the sizes named.
                unsafe { gemm(Pool::global(), isa, m, n, k, &left, &right, &store).unwrap() };
                let references = reference_gemm(&a, &b, &[], (m, n, k));
                compare(&format!("{isa:?} {dtype:?} {m}x{n}x{k}"), &c, &references, k).unwrap();
            }
        }
    }
}

/// Rows of a weight in place of columns: whole and half panels, several blocks of both, rows that have to be copied.
#[test]
fn operands_that_change_places() {
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    for (m, n, k) in
        [(1, 1, 1), (5, 40, 17), (16, 300, 64), (33, 35, 40), (77, 530, 100), (400, 19, 30), (64, 64, 1024)]
    {
        for (left, right) in dtypes.into_iter().flat_map(|left| dtypes.map(|right| (left, right))) {
            let (a, b) = (Buffer::random(left, m * k, 1), Buffer::random(right, n * k, 2));
            let (bias, residual) = (Buffer::random(DType::F32, n, 3), Buffer::random(DType::F32, m * n, 4));
            let [x, weight] =
                [(&a, left), (&b, right)].map(|(buffer, dtype)| Matrix::row_major(buffer.ptr(), dtype, k));
            let mut want = reference_gemm(&a, &b, &[], (m, n, k));
            for (i, result) in want.iter_mut().enumerate() {
                let added = bias.get(i % n) + residual.get(i);
                result.sum += added;
                result.magnitude += added.abs();
            }
            for (isa, threads) in available().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let mut c = Buffer::zeroed(DType::F32, m * n);
                let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize)
                    .with_bias(bias.ptr(), DType::F32)
                    .with_residual(residual.ptr(), DType::F32, n as isize);
                let mut work = vec![0u8; swapped_bytes(m, k, left, isa)];
                // SAFETY: dense buffers of the sizes named.
                unsafe {
                    gemm_swapped(&Pool::new(threads), isa, (m, n, k), &x, &weight, work.as_mut_ptr(), &store).unwrap();
                }
                let chain = k + left_out(isa, right, left, m.min(n), k);
                compare(&format!("{isa:?} {left:?} {right:?} {m}x{n}x{k}"), &c, &want, chain).unwrap();
            }
        }
    }
}

#[test]
fn operands_change_places_where_packing_a_weight_weighs_most() {
    let weight = |dtype, k| Matrix::row_major(std::ptr::null(), dtype, k);
    let is_faster = |m, n, k, dtype| is_swapped_faster(Isa::detect(), (m, n, k), dtype, &weight(dtype, k));
    assert!(is_faster(64, 1280, 1280, DType::F32), "few rows");
    assert!(!is_faster(4096, 320, 1280, DType::F32), "many rows");
    assert!(!is_faster(1, 1280, 1280, DType::F32), "a row");
    assert!(!is_faster(64, 1280, 1280, DType::F16), "a weight that is widened");
    let by_columns = weight(DType::F32, 1280).transposed();
    assert!(!is_swapped_faster(Isa::detect(), (64, 1280, 1280), DType::F32, &by_columns), "rows that do not lie so");
}

#[test]
fn the_plain_epilogue_adds_bias_and_residual_and_rounds_once() {
    let (m, n, k) = (23, 37, 16);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (a, b) = (Buffer::random(dtype, m * k, 1), Buffer::random(dtype, n * k, 2));
        let (bias, residual) = (Buffer::random(dtype, n, 3), Buffer::random(dtype, m * n, 4));
        let mut c = Buffer::zeroed(dtype, m * n);
        let store = StoreEpilogue::new(c.ptr_mut(), dtype, n as isize).with_bias(bias.ptr(), dtype).with_residual(
            residual.ptr(),
            dtype,
            n as isize,
        );
        let left = Matrix::row_major(a.ptr(), dtype, k);
        let right = Operand::Strided(Matrix::row_major(b.ptr(), dtype, k));
        // SAFETY: dense buffers of the sizes named.
        unsafe { gemm(Pool::global(), Isa::detect(), m, n, k, &left, &right, &store).unwrap() };
        let half_ulp = match dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 2f64.powi(-24),
        };
        for (index, reference) in reference_gemm(&a, &b, &[], (m, n, k)).iter().enumerate() {
            let expected = reference.sum + bias.get(index % n) + residual.get(index);
            let accumulated = (k + 4) as f64 * 2f64.powi(-24) * (reference.magnitude + 2.0);
            let error = (c.get(index) - expected).abs();
            assert!(error <= half_ulp * expected.abs() * 1.01 + accumulated, "{dtype:?} {index}: {error:e}");
        }
    }
}

/// Panels for one product are those of any, however its kernel takes numbers apart.
#[test]
fn panels_for_one_product_give_the_same_results() {
    let (pool, isa) = (Pool::global(), Isa::detect());
    for (m, n, k) in [(160, 80, 300), (33, 16, 64), (5, 40, 7)] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (a, b) = (Buffer::random(dtype, m * k, 1), Buffer::random(dtype, n * k, 2));
            let (left, right) = (Matrix::row_major(a.ptr(), dtype, k), Matrix::row_major(b.ptr(), dtype, k));
            let bytes = packed_bytes_for(isa, (m, n, k), dtype, dtype);
            assert!(bytes >= packed_bytes(n, k, dtype, isa));
            // What packing must not touch follows its memory.
            let mut memory = vec![0xa5u8; bytes + 64];
            let mut whole = Buffer::zeroed(DType::U8, packed_bytes(n, k, dtype, isa));
            let (mut got, mut want) = (Buffer::zeroed(DType::F32, m * n), Buffer::zeroed(DType::F32, m * n));
            // SAFETY: dense buffers of the sizes named.
            unsafe {
                let for_one = pack_b_for(pool, isa, (m, n, k), dtype, &right, memory.as_mut_ptr());
                let for_all = pack_b(pool, isa, n, k, &right, whole.ptr_mut());
                for (packed, c) in [(for_one, &mut got), (for_all, &mut want)] {
                    let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
                    gemm(pool, isa, m, n, k, &left, &Operand::Packed(packed), &store).unwrap();
                }
            }
            assert!((0..m * n).all(|at| got.get(at) == want.get(at)), "{dtype:?} {m}x{n}x{k}");
            assert!(memory[bytes..].iter().all(|&byte| byte == 0xa5), "{dtype:?} {m}x{n}x{k}");
        }
    }
}

#[test]
fn bad_arguments_are_errors() {
    let a = Buffer::random(DType::F32, 64, 1);
    let mut memory = Buffer::zeroed(DType::U8, packed_bytes(8, 8, DType::F32, Isa::detect()));
    let mut c = Buffer::zeroed(DType::F32, 64);
    let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, 8);
    let matrix = Matrix::row_major(a.ptr(), DType::F32, 8);
    let integers = Matrix::row_major(a.ptr(), DType::I32, 8);
    let (pool, isa) = (Pool::global(), Isa::detect());
    // SAFETY: nothing is read or written through arguments that are refused.
    unsafe {
        let packed = Operand::Packed(pack_b(pool, isa, 8, 8, &matrix, memory.ptr_mut()));
        let outcome = gemm(pool, isa, 8, 8, 4, &matrix, &packed, &store);
        assert!(matches!(outcome, Err(KernelError::Shape(_))), "{outcome:?}");
        let outcome = gemm(pool, isa, 8, 8, 8, &integers, &packed, &store);
        assert_eq!(outcome, Err(KernelError::UnsupportedDType(DType::I32)));
    }
}
