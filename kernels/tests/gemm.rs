//! Matrix products through the public entry points: batches, strides, mixed element types, epilogues, bad arguments; what
//! multiplies them, and in which blocks.

use std::sync::Mutex;

use oxidiff_kernels::cpu::KernelError;
use oxidiff_kernels::cpu::gemm::{BatchDim, Operand, batched_gemm, gemm, left_out};
use oxidiff_kernels::cpu::gemm_driver::balanced_rows;
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

#[test]
fn blocks_of_rows_are_handed_out_evenly() {
    // m, blocks of columns, rows of a task, threads: rows afterwards.
    for ((m, cols, rows, threads), want) in [
        ((4096, 1, 252, 2), 256),
        ((1024, 3, 210, 2), 256),
        ((1024, 4, 210, 2), 256),
        ((1100, 2, 224, 2), 220),
        ((4096, 4, 252, 3), 228),
        ((256, 4, 126, 2), 128),
        ((16, 8, 14, 2), 16),
        ((1, 1, 14, 8), 1),
    ] {
        let got = balanced_rows(m, cols, (rows, 252), (14, 1), threads);
        assert_eq!(got, want, "{m} rows, {cols} blocks of columns, {threads} threads");
    }
    for m in [1, 5, 77, 1000, 4097] {
        for (cols, threads) in [(1, 2), (3, 4), (7, 16), (1, 64)] {
            let rows = balanced_rows(m, cols, (126, 252), (14, 1), threads);
            assert!((1..=252 + 252 / 16).contains(&rows), "{m} {cols} {threads}: {rows}");
            let slowest = |rows: usize| (m.div_ceil(rows) * cols).div_ceil(threads) * (rows + 8);
            assert!(slowest(rows) <= slowest(126.min(m)), "{m} {cols} {threads}: {rows}");
        }
    }
}

#[test]
fn blocks_of_tiles_are_of_whole_tiles() {
    // What a task with a part of a tile costs: that of a whole one.
    let cost = |rows: usize| rows.next_multiple_of(16);
    for m in [1, 77, 300, 1000, 1024, 1100, 4096, 4097] {
        for (cols, threads) in [(1, 2), (3, 4), (4, 3), (7, 16), (1, 64)] {
            let rows = balanced_rows(m, cols, (224, 252), (32, 16), threads);
            assert!(rows.is_multiple_of(16) && (16..=272).contains(&rows), "{m} {cols} {threads}: {rows}");
            let slowest = |rows: usize| (m.div_ceil(rows) * cols).div_ceil(threads) * (cost(rows) + 8);
            let vectors = balanced_rows(m, cols, (224, 252), (32, 1), threads);
            assert!(slowest(rows) <= slowest(vectors), "{m} {cols} {threads}: {rows} not {vectors}");
        }
    }
    assert_eq!(balanced_rows(300, 1, (224, 252), (32, 16), 2), 160, "150 rows cost as many");
}

/// The form that a processor multiplies operands in, and those that are taken apart for AMX.
#[cfg(target_arch = "x86_64")]
mod forms {
    use half::{bf16, f16};
    use oxidiff_kernels::cpu::gemm::MAX_SPLIT_TERMS;
    use oxidiff_kernels::cpu::gemm_kernel::{Form, form_of, of_form_with, split_panel};
    use oxidiff_kernels::cpu::gemm_split::{GROUP, split_row_f16, split_row_f32, units};
    use oxidiff_kernels::cpu::{gemm_amx, gemm_avx2, gemm_avx512, gemm_portable};
    use oxidiff_kernels::dtype::DType;
    use oxidiff_kernels::isa::{Amx, Features, Isa, features};

    #[test]
    fn amx_multiplies_where_it_is_available() {
        // A processor with everything.
        let isa = Isa::Avx512;
        let features = Features { isa, avx512_bf16: true, avx512_fp16: true, avx512_vnni: true, ..*features() };
        let [with, without]: [fn() -> Amx; 2] = [|| Amx { bf16: true, f16: true, int8: true }, Amx::default];
        for (form, tiles, vectors) in [
            (Form::F32, &gemm_avx512::F32, &gemm_avx512::F32),
            (Form::Bf16Pairs, &gemm_amx::BF16, &gemm_avx512::BF16),
            (Form::Int8Quads, &gemm_amx::INT8, &gemm_avx512::INT8),
        ] {
            assert!(std::ptr::eq(of_form_with(&features, with, isa, form), tiles), "{form:?}");
            assert!(std::ptr::eq(of_form_with(&features, without, isa, form), vectors), "{form:?}");
            assert!(tiles.is_available_with(&features, with), "{form:?}");
            assert!(vectors.is_available_with(&features, without), "{form:?}");
            // Panels are packed alike for every kernel of a form.
            assert_eq!((tiles.nr, tiles.form), (vectors.nr, vectors.form));
        }
        assert!(!gemm_amx::BF16.is_available_with(&features, without));
        assert!(!gemm_amx::INT8.is_available_with(&features, without));
        assert!(std::ptr::eq(of_form_with(&features, with, isa, Form::F16Pairs), &gemm_amx::F16));
        for (form, kernel) in [(Form::Bf16x3, &gemm_amx::F32), (Form::Bf16x2, &gemm_amx::F16_SPLIT)] {
            assert!(std::ptr::eq(of_form_with(&features, with, isa, form), kernel));
            assert!(kernel.is_available_with(&features, with));
            assert!(!kernel.is_available_with(&features, without));
            assert!(kernel.most_terms(1) <= MAX_SPLIT_TERMS);
        }
        assert!(gemm_amx::F16.is_available_with(&features, with));
        assert!(
            !gemm_amx::F16.is_available_with(&features, || Amx { f16: false, ..Amx { bf16: true, ..Amx::default() } })
        );
    }

    #[test]
    fn operands_are_taken_apart_where_amx_multiplies_bf16_alone() {
        let [f16, bf16, none]: [fn() -> Amx; 3] =
            [|| Amx { bf16: true, f16: true, int8: true }, || Amx { bf16: true, ..Amx::default() }, Amx::default];
        let [long, fewer, short, narrow] = [(128, 32), (127, 320), (31, 320), (320, 31)];
        for (amx, dtype, sizes, form) in [
            (f16, DType::F16, short, Form::F16Pairs),
            (f16, DType::F32, long, Form::Bf16x3),
            (bf16, DType::F16, long, Form::Bf16x2),
            (bf16, DType::F32, long, Form::Bf16x3),
            (bf16, DType::F16, short, Form::F32),
            (bf16, DType::F16, fewer, Form::Bf16x2),
            (bf16, DType::F32, fewer, Form::F32),
            (bf16, DType::F32, narrow, Form::F32),
            (none, DType::F16, long, Form::F32),
            (none, DType::F32, long, Form::F32),
        ] {
            assert_eq!(form_of(amx, Isa::Avx512, dtype, dtype, sizes), form, "{dtype:?} {sizes:?}");
        }
        for (a, b) in [(DType::F16, DType::BF16), (DType::F32, DType::F16)] {
            assert_eq!(form_of(f16, Isa::Avx512, a, b, long), Form::F32, "{a:?} {b:?}");
        }
        assert_eq!(form_of(f16, Isa::Avx2, DType::F32, DType::F32, long), Form::F32);
    }

    /// The system's permission is process-wide and for good.
    #[test]
    fn tiles_are_asked_for_where_they_are_a_candidate_alone() {
        let features = Features { isa: Isa::Avx512, avx512_vnni: true, ..*features() };
        let asked = || panic!("asked for tiles");
        for (isa, form, chosen) in [
            (Isa::Avx512, Form::F32, &gemm_avx512::F32),
            (Isa::Avx2, Form::F32, &gemm_avx2::F32),
            (Isa::Avx2, Form::Int8Quads, &gemm_portable::INT8),
        ] {
            assert!(std::ptr::eq(of_form_with(&features, asked, isa, form), chosen), "{isa:?} {form:?}");
        }
        assert!(gemm_avx512::INT8.is_available_with(&features, asked));
        assert_eq!(form_of(asked, Isa::Avx2, DType::F16, DType::F16, (64, 64)), Form::F32);
        assert_eq!(form_of(asked, Isa::Avx512, DType::F16, DType::F32, (64, 64)), Form::F32);
    }

    /// The parts of each of a group of elements, which lie in `groups` of so many parts.
    fn parts_of(groups: &[u16], parts: usize) -> Vec<Vec<f32>> {
        let part = |term: usize, part: usize| {
            let unit = term % 16;
            let at = (term / GROUP * parts + part) * GROUP + 2 * unit + term / 16 % 2;
            bf16::from_bits(groups[at]).to_f32()
        };
        (0..groups.len() / parts).map(|term| (0..parts).map(|p| part(term, p)).collect()).collect()
    }

    fn split_f32(values: &[f32]) -> Vec<Vec<f32>> {
        let mut groups = vec![u16::MAX; 2 * units(3, values.len())];
        // SAFETY: both have the elements and the groups of them; the tests ask for the instructions before.
        unsafe { split_row_f32(values.as_ptr().cast(), groups.as_mut_ptr().cast(), values.len()) };
        parts_of(&groups, 3)
    }

    fn split_f16(values: &[f16]) -> Vec<Vec<f32>> {
        let mut groups = vec![u16::MAX; 2 * units(2, values.len())];
        // SAFETY: as above.
        unsafe { split_row_f16(values.as_ptr().cast(), groups.as_mut_ptr().cast(), values.len()) };
        parts_of(&groups, 2)
    }

    #[test]
    fn parts_are_all_of_a_number() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let mut state = 1u32;
        let mut values: Vec<f32> = (0..4099)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Every mantissa and sign, exponents between 2^-63 and 2^64.
                f32::from_bits(state & 0x803f_ffff | (0x40 + (state >> 22 & 0x7f)) << 23)
            })
            .collect();
        values.extend([0.0, 1.0, -1.0, f32::MAX, f32::MIN, 1.0 + f32::EPSILON, 65504.0]);
        let split = split_f32(&values);
        assert_eq!(split.len() % GROUP, 0);
        for (x, parts) in values.iter().zip(&split) {
            let sum: f64 = parts.iter().map(|&part| f64::from(part)).sum();
            // The trace that keeps parts from being 0 is far below the last bit.
            assert!((sum - f64::from(*x)).abs() <= f64::from(x.abs()) * 2f64.powi(-38), "{x:e}: {parts:?}");
        }
        assert!(split[values.len()..].iter().flatten().all(|&part| part == 0.0), "the last group's rest");
        let halves: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).filter(|x| x.is_finite()).collect();
        for (x, parts) in halves.iter().zip(split_f16(&halves)) {
            let sum: f64 = parts.iter().map(|&part| f64::from(part)).sum();
            assert!((sum - x.to_f64()).abs() <= x.to_f64().abs() * 2f64.powi(-38), "{x:e}: {parts:?}");
            assert!(parts.iter().all(|part| f64::from(*part) * x.to_f64() >= 0.0), "{x:e}: {parts:?}");
        }
    }

    #[test]
    fn infinities_stay_and_nothing_else_becomes_zero() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let all = |parts: &[f32], is: fn(f32) -> bool| parts.iter().all(|&part| is(part));
        let found = split_f32(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1.0, -0.5, 0.0]);
        assert!(all(&found[0], |x| x == f32::INFINITY) && all(&found[1], |x| x == f32::NEG_INFINITY), "{found:?}");
        assert!(found[2].iter().any(|part| part.is_nan()), "{found:?}");
        assert!(
            all(&found[3], |x| x > 0.0) && all(&found[4], |x| x < 0.0) && all(&found[5], |x| x == 0.0),
            "{found:?}"
        );
        let found = split_f16(&[f16::INFINITY, f16::NEG_INFINITY, f16::NAN, f16::ONE]);
        assert!(all(&found[0], |x| x == f32::INFINITY) && all(&found[1], |x| x == f32::NEG_INFINITY), "{found:?}");
        assert!(found[2].iter().any(|part| part.is_nan()) && all(&found[3], |x| x > 0.0), "{found:?}");
    }

    /// Rows of A and panels of B have the same terms in the same places.
    #[test]
    fn panels_have_the_units_of_rows() {
        if !Isa::Avx512.is_available() {
            return;
        }
        let (k, width) = (45, 32);
        let value = |k0: usize, lane: usize| (k0 * 37 + lane) as f32 / 64.0 - 9.3;
        for form in [Form::Bf16x3, Form::Bf16x2] {
            let parts = form.parts();
            let (rows, whole): (usize, Vec<u32>) = match form {
                Form::Bf16x3 => (k, (0..k * width).map(|at| value(at / width, at % width).to_bits()).collect()),
                _ => {
                    let half = |k0: usize, lane| if k0 < k { f16::from_f32(value(k0, lane)).to_bits() } else { 0 };
                    let pair = |at: usize| {
                        u32::from(half(at / width * 2, at % width))
                            | u32::from(half(at / width * 2 + 1, at % width)) << 16
                    };
                    (k, (0..k.div_ceil(2) * width).map(pair).collect())
                }
            };
            let mut panel = vec![u32::MAX; units(parts, rows) * width];
            // SAFETY: a panel of `k` rows and its groups; the instructions were asked for.
            unsafe { split_panel(form, whole.as_ptr().cast(), rows, width, panel.as_mut_ptr()) };
            for lane in 0..width {
                let row: Vec<f32> = (0..k).map(|k0| value(k0, lane)).collect();
                let mut groups = vec![0u32; units(parts, k)];
                // SAFETY: as above, of rows.
                unsafe {
                    if form == Form::Bf16x3 {
                        split_row_f32(row.as_ptr().cast(), groups.as_mut_ptr().cast(), k);
                    } else {
                        let row: Vec<f16> = row.iter().map(|&x| f16::from_f32(x)).collect();
                        split_row_f16(row.as_ptr().cast(), groups.as_mut_ptr().cast(), k);
                    }
                }
                let column: Vec<u32> = panel.iter().skip(lane).step_by(width).copied().collect();
                assert_eq!(column, groups, "{form:?}, column {lane}");
            }
        }
    }
}
