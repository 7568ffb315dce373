//! Copies, padding, gathers and resampling against plain loops.

use oxidiff_kernels::cpu::copy::{Side, copy, copy_reference, fill, pad};
use oxidiff_kernels::cpu::gather::{Elements, Indices, Rows, gather, gather_elements};
use oxidiff_kernels::cpu::interpolate::{Interpolation, interpolate};
use oxidiff_kernels::cpu::resample::Axis;
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::tile::{Bound, Space};

const DTYPES: [DType; 9] =
    [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::U8, DType::I8, DType::Bool];

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// Row-major strides of sizes permuted by `order`: `order[0]` is outermost in memory.
fn strides(sizes: &[usize], order: &[usize]) -> Vec<isize> {
    let mut strides = vec![0; sizes.len()];
    let mut step = 1;
    for &d in order.iter().rev() {
        strides[d] = step;
        step *= sizes[d] as isize;
    }
    strides
}

/// Bytes that are small values of the type: 0..64, so that conversions are exact everywhere but bool.
fn values(dtype: DType, n: usize) -> Vec<u8> {
    (0..n)
        .flat_map(|i| {
            let v = (i * 37 + i / 64) % 64;
            match dtype {
                DType::F32 => (v as f32).to_le_bytes().to_vec(),
                DType::F16 => half::f16::from_f32(v as f32).to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(v as f32).to_le_bytes().to_vec(),
                DType::F64 => (v as f64).to_le_bytes().to_vec(),
                DType::I64 => (v as i64).to_le_bytes().to_vec(),
                DType::I32 => (v as i32).to_le_bytes().to_vec(),
                DType::U8 | DType::I8 => vec![v as u8],
                DType::Bool => vec![(v % 2) as u8],
            }
        })
        .collect()
}

fn check_copy(sizes: &[usize], src_order: &[usize], dst_order: &[usize], from: DType, to: DType) {
    let n: usize = sizes.iter().product();
    let (a, b) = (strides(sizes, src_order), strides(sizes, dst_order));
    let mut src = values(from, n);
    let mut expected = vec![0xa5u8; n * to.size_bytes()];
    let side = |data: &mut Vec<u8>, dtype, strides| Side { ptr: data.as_mut_ptr(), dtype, strides };
    // SAFETY: both buffers hold all indices.
    unsafe { copy_reference(sizes, side(&mut src, from, &a), side(&mut expected, to, &b)) };
    for isa in isas() {
        let mut dst = vec![0xa5u8; n * to.size_bytes()];
        // SAFETY: as above.
        unsafe { copy(&Pool::new(2), isa, sizes, side(&mut src, from, &a), side(&mut dst, to, &b)) };
        assert!(dst == expected, "{sizes:?} {src_order:?} -> {dst_order:?}, {from:?} -> {to:?}, {}", isa.name());
    }
}

#[test]
fn layouts_convert_both_ways() {
    for dtype in DTYPES {
        for sizes in [[2, 4, 9, 13], [1, 70, 8, 16], [2, 3, 65, 130], [1, 1, 1, 1], [3, 0, 2, 2], [2, 64, 16, 16]] {
            check_copy(&sizes, &[0, 1, 2, 3], &[0, 2, 3, 1], dtype, dtype);
            check_copy(&sizes, &[0, 2, 3, 1], &[0, 1, 2, 3], dtype, dtype);
            check_copy(&sizes, &[3, 1, 0, 2], &[0, 2, 1, 3], dtype, dtype);
            check_copy(&sizes, &[0, 1, 2, 3], &[0, 1, 2, 3], dtype, dtype);
        }
    }
    check_copy(&[], &[], &[], DType::F32, DType::F32);
    check_copy(&[300_001], &[0], &[0], DType::F16, DType::F16);
}

#[test]
fn every_type_converts_to_every_other() {
    for from in DTYPES {
        for to in DTYPES {
            check_copy(&[2, 3, 40], &[0, 1, 2], &[1, 2, 0], from, to);
            check_copy(&[2, 1, 1, 2, 2, 1, 5, 2], &[0, 1, 2, 3, 4, 5, 6, 7], &[7, 0, 1, 2, 3, 4, 5, 6], from, to);
        }
    }
}

#[test]
fn conversions_follow_pytorch() {
    let one = |from: DType, bytes: &[u8], to: DType| {
        let (mut src, mut dst) = (bytes.to_vec(), vec![0u8; 8]);
        let (s, d) = (
            Side { ptr: src.as_mut_ptr(), dtype: from, strides: &[] },
            Side { ptr: dst.as_mut_ptr(), dtype: to, strides: &[] },
        );
        // SAFETY: one element each.
        unsafe { copy(&Pool::new(1), Isa::detect(), &[], s, d) };
        dst[..to.size_bytes()].to_vec()
    };
    let f = |x: f32, to| one(DType::F32, &x.to_le_bytes(), to);
    assert_eq!(f(f32::NAN, DType::I64), i64::MIN.to_le_bytes());
    assert_eq!(f(3e9, DType::I64), 3_000_000_000i64.to_le_bytes());
    assert_eq!(f(3e9, DType::I32), i32::MIN.to_le_bytes());
    assert_eq!(f(-1.7, DType::I32), (-1i32).to_le_bytes());
    assert_eq!(f(-1.7, DType::U8), [255]);
    assert_eq!(f(300.0, DType::U8), [44]);
    assert_eq!(f(-1.7, DType::I8), [255]);
    assert_eq!(f(300.0, DType::I8), [44]);
    assert_eq!(f(f32::NAN, DType::I8), [0]);
    assert_eq!(one(DType::I8, &[0xfe], DType::F32), (-2f32).to_le_bytes());
    assert_eq!(one(DType::I8, &[0xfe], DType::I64), (-2i64).to_le_bytes());
    assert_eq!(one(DType::I8, &[0xfe], DType::U8), [0xfe]);
    assert_eq!(one(DType::I64, &(-2i64).to_le_bytes(), DType::I8), [0xfe]);
    assert_eq!(f(f32::NAN, DType::Bool), [1]);
    let big = (1i64 << 53) + 1;
    assert_eq!(one(DType::I64, &big.to_le_bytes(), DType::I64), big.to_le_bytes());
    assert_eq!(one(DType::I64, &big.to_le_bytes(), DType::I32), 1i32.to_le_bytes());
    assert_eq!(one(DType::I64, &16_777_217i64.to_le_bytes(), DType::F64), 16_777_217f64.to_le_bytes());
    assert_eq!(one(DType::F64, &f64::NAN.to_le_bytes(), DType::I64), i64::MIN.to_le_bytes());
}

#[test]
fn broadcast_and_negative_strides() {
    let mut src = values(DType::F32, 12);
    let mut dst = vec![0f32; 3 * 5 * 4];
    let last = src.as_mut_ptr().wrapping_add(8 * 4);
    let s = Side { ptr: last, dtype: DType::F32, strides: &[-4, 0, 1] };
    let d = Side { ptr: dst.as_mut_ptr().cast(), dtype: DType::F32, strides: &[20, 4, 1] };
    // SAFETY: rows 2, 1, 0 of four elements, each five times.
    unsafe { copy(&Pool::new(2), Isa::detect(), &[3, 5, 4], s, d) };
    for (i, &x) in dst.iter().enumerate() {
        let (row, col) = (2 - i / 20, i % 4);
        let at = (row * 4 + col) * 4;
        assert_eq!(x, f32::from_le_bytes(src[at..at + 4].try_into().unwrap()));
    }
}

#[test]
fn every_second_element_of_long_rows() {
    // Longer than a task, so that rows are cut; what lies between the elements stays.
    for (n, from, to) in [(30_000, 2, 2), (30_001, 2, 1), (8193, 3, 2), (20_000, 2, -2), (9_000, -1, 2)] {
        for dtype in [DType::F32, DType::BF16, DType::U8, DType::F64] {
            let size = dtype.size_bytes();
            let mut src: Vec<u8> = (0..3 * n * size).map(|i| (i * 7 % 251) as u8).collect();
            let (mut expected, mut dst) = (vec![9u8; 3 * n * size], vec![9u8; 3 * n * size]);
            let first = |stride: isize| if stride < 0 { -stride * (n as isize - 1) } else { 0 } as usize * size;
            let (a, b) = ([from], [to]);
            let side = |data: &mut Vec<u8>, strides| Side {
                ptr: data[first(strides)..].as_mut_ptr(),
                dtype,
                strides: if strides == from { &a } else { &b },
            };
            for i in 0..n {
                let at = |stride: isize| (first(stride) as isize + i as isize * stride * size as isize) as usize;
                let (s, d) = (at(from), at(to));
                expected[d..d + size].copy_from_slice(&src[s..s + size]);
            }
            // SAFETY: the buffers hold the sizes.
            unsafe { copy(&Pool::new(2), Isa::detect(), &[n], side(&mut src, from), side(&mut dst, to)) };
            assert!(dst == expected, "{n} of {dtype:?}, {from} -> {to}");
        }
    }
}

/// Whether `copy` does to `n` elements, of which `sizes` are copied into `out`, what its reference does.
fn copies_as_its_reference(
    dtype: DType,
    sizes: &[usize],
    (n, from): (usize, &[isize]),
    (out, to): (usize, &[isize]),
) -> bool {
    let size = dtype.size_bytes();
    let mut src: Vec<u8> = (0..n * size).map(|i| (i * 7 % 251) as u8).collect();
    let mut results = [vec![9u8; out * size], vec![9u8; out * size]];
    for (at, dst) in results.iter_mut().enumerate() {
        let a = Side { ptr: src.as_mut_ptr(), dtype, strides: from };
        let b = Side { ptr: dst.as_mut_ptr(), dtype, strides: to };
        // SAFETY: the callers' sizes.
        unsafe { if at == 0 { copy_reference(sizes, a, b) } else { copy(&Pool::new(2), Isa::detect(), sizes, a, b) } }
    }
    results[0] == results[1]
}

#[test]
fn many_short_rows() {
    // Elements of a row, and strides of rows and elements on both sides.
    let cases = [(5, [7, 1], [6, 1]), (3, [5, 2], [3, 1]), (2, [1, 0], [2, 1]), (4, [4, 1], [9, 2])];
    for (cols, from, to) in cases {
        for dtype in [DType::F32, DType::U8] {
            let rows = 90_000;
            let is_same = copies_as_its_reference(dtype, &[rows, cols], (8 * rows, &from), (9 * rows, &to));
            assert!(is_same, "{cols} {from:?} -> {to:?} {dtype:?}");
        }
    }
}

/// Rows of all lengths that are moved as one larger element, at distances of which few are a multiple of that.
#[test]
fn short_rows_at_any_distance() {
    let distances = |cols: isize| (0..8).map(move |gap| if gap == 7 { 0 } else { cols + gap });
    for dtype in [DType::U8, DType::BF16, DType::F32, DType::F64] {
        for (cols, gap) in (1..=16).flat_map(|cols| (0..4).map(move |gap| (cols, gap))) {
            for from in distances(cols) {
                let row = cols + gap;
                let sizes = [3, 5, cols as usize];
                let (from, to) = ([7 * from + 1, from, 1], [5 * row + gap, row, 1]);
                let is_same = copies_as_its_reference(dtype, &sizes, (700, &from), (400, &to));
                assert!(is_same, "{cols} {from:?} -> {to:?} {dtype:?}");
            }
        }
    }
}

/// Pixel shuffles and unshuffles, with repeated channels and without, from and to both orders: few elements side by side, planes
/// longer than a task, dimensions that stay within a line of the source.
#[test]
fn what_pixel_shuffles_move() {
    let (c, h, w) = (24usize, 20usize, 130usize);
    for (factor, repeats) in [(2usize, 1usize), (2, 2), (3, 1), (4, 1), (4, 4), (8, 1)] {
        let sizes = [c, h, factor, w, factor];
        let (n, out) = (c * factor * factor / repeats * h * w, c * h * w * factor * factor);
        // Channel (c, i, j) of the shuffled value, of which as many as are repeated are one; memory [h][w][channel] or the
        // other way round.
        let channel = [factor * factor / repeats, factor / factor.min(repeats), usize::from(repeats == 1)];
        let deep = c * channel[0];
        let image = |step: usize, pixel: usize| {
            [channel[0] * step, w * pixel, channel[1] * step, pixel, channel[2] * step].map(|s| s as isize)
        };
        for from in [image(1, deep), image(h * w, 1)] {
            for order in [[0, 1, 2, 3, 4], [1, 2, 3, 4, 0], [1, 3, 0, 2, 4]] {
                for dtype in [DType::F32, DType::BF16, DType::U8, DType::F64] {
                    let to = strides(&sizes, &order);
                    let is_same = copies_as_its_reference(dtype, &sizes, (n, &from), (out, &to));
                    assert!(is_same, "{factor} {repeats} {from:?} -> {to:?} {dtype:?}");
                }
            }
        }
    }
}

#[test]
fn padding_adds_and_crops() {
    for dtype in [DType::F32, DType::BF16, DType::I64, DType::Bool] {
        for (before, after) in
            [([0, 1, 2], [0, 1, 3]), ([0, -1, 2], [1, 0, -3]), ([0, 0, 0], [0, 0, 0]), ([0, -9, 0], [0, 0, 2])]
        {
            let sizes = [2usize, 5, 30];
            let out: Vec<usize> = (0..3).map(|d| (sizes[d] as isize + before[d] + after[d]).max(0) as usize).collect();
            let (a, b) = (strides(&sizes, &[0, 1, 2]), strides(&out, &[0, 1, 2]));
            let mut src = values(dtype, 300);
            let n: usize = out.iter().product();
            let mut dst = vec![0xa5u8; n * dtype.size_bytes()];
            let mut expected = dst.clone();
            let mut one = vec![0u8; 8];
            let s = Side { ptr: src.as_mut_ptr(), dtype, strides: &a };
            let d = Side { ptr: dst.as_mut_ptr(), dtype, strides: &b };
            // SAFETY: the buffers hold the sizes.
            unsafe {
                fill(&Pool::new(1), Isa::detect(), &[], Side { ptr: one.as_mut_ptr(), dtype, strides: &[] }, 1.0);
                pad(&Pool::new(2), Isa::detect(), &sizes, &before, &after, 1.0, s, d);
            }
            let size = dtype.size_bytes();
            for at in 0..n {
                let i = [at / (out[1] * out[2]), at / out[2] % out[1], at % out[2]];
                let from: Vec<isize> = (0..3).map(|d| i[d] as isize - before[d]).collect();
                let inside = (0..3).all(|d| (0..sizes[d] as isize).contains(&from[d]));
                let at_src = if inside { from[0] * a[0] + from[1] * a[1] + from[2] } else { 0 } as usize * size;
                let v = if inside { &src[at_src..at_src + size] } else { &one[..size] };
                expected[at * size..(at + 1) * size].copy_from_slice(v);
            }
            assert!(dst == expected, "{dtype:?} {before:?} {after:?}");
        }
    }
}

#[test]
fn fill_reaches_every_element_and_no_other() {
    let mut data = vec![7i32; 40 * 50];
    let side = Side { ptr: data.as_mut_ptr().wrapping_add(3).cast(), dtype: DType::I32, strides: &[50, 1] };
    // SAFETY: 40 rows of 44 elements from the fourth on.
    unsafe { fill(&Pool::new(2), Isa::detect(), &[40, 44], side, -5.0) };
    for (i, &x) in data.iter().enumerate() {
        assert_eq!(x, if (3..47).contains(&(i % 50)) { -5 } else { 7 });
    }
}

#[test]
fn rows_are_picked_or_refused() {
    let table: Vec<u16> = (0..50 * 24).collect();
    let mut out = vec![0u16; 2 * 4 * 12];
    let indices = [3i64, 0, 24, -1];
    let list = Indices { ptr: indices.as_ptr().cast(), dtype: DType::I64, len: 4, stride: 1 };
    let rows = Rows {
        src: table.as_ptr().cast(),
        rows: 25,
        src_row: 24,
        dst: out.as_mut_ptr().cast(),
        dst_row: 24,
        row_bytes: 24,
        outer: 2,
        src_outer: 25 * 24,
        dst_outer: 4 * 24,
    };
    // SAFETY: two slices of 25 rows of 12 elements; four rows each out.
    let refused = unsafe { gather(&Pool::new(2), list, false, rows) }.unwrap_err();
    assert_eq!((refused.index, refused.at, refused.rows), (-1, 3, 25));
    assert!(out.iter().all(|&x| x == 0));
    // SAFETY: as above.
    unsafe { gather(&Pool::new(2), list, true, rows) }.unwrap();
    for (o, (at, index)) in (0..2).flat_map(|o| [3, 0, 24, 24].into_iter().enumerate().map(move |x| (o, x))) {
        assert_eq!(out[(o * 4 + at) * 12..][..12], table[(o * 25 + index) * 12..][..12]);
    }
    // SAFETY: no index is read.
    unsafe { gather(&Pool::new(2), Indices { len: 0, ..list }, false, rows) }.unwrap();
}

/// What is interpolated where places exist, the registry compares.
#[test]
fn places_that_are_none_are_refused() {
    let (src, mut out, weights) = ([0f32; 6 * 5], [-1f32; 9 * 5], [0.5f32; 2]);
    for isa in isas() {
        for wrong in [6i32, -1] {
            let indices = [0, wrong];
            let of = Interpolation {
                dtype: DType::F32,
                src: src.as_ptr().cast(),
                dst: out.as_mut_ptr().cast(),
                sizes: [1, 9, 5],
                rows: 6,
                src_strides: [30, 5, 1],
                dst_strides: [45, 5, 1],
                indices: (indices.as_ptr().cast(), DType::I32),
                weights: weights.as_ptr().cast(),
                taps: 2,
                index_strides: [0, 1],
                weight_strides: [0, 1],
            };
            // SAFETY: dense buffers of the sizes named; indices out of bounds are refused.
            let refused = unsafe { interpolate(&Pool::new(3), isa, &of) }.unwrap_err();
            assert_eq!((refused.index, refused.at, refused.rows), (i64::from(wrong), 0, 6));
            assert!(out.iter().all(|&x| x == -1.0));
        }
    }
}

/// The lists are what `torch.nn.functional.interpolate` 2.11 gives.
#[test]
fn nearest_indices_are_pytorchs() {
    let axis = |input, output, scale| Axis { input, output, scale, src: 1, dst: 1 };
    assert_eq!(axis(3, 6, None).source(false), [0, 0, 1, 1, 2, 2]);
    assert_eq!(axis(5, 3, None).source(false), [0, 1, 3]);
    assert_eq!(axis(5, 3, None).source(true), [0, 2, 4]);
    assert_eq!(axis(4, 9, Some(2.3)).source(false), [0, 0, 0, 1, 1, 2, 2, 3, 3]);
    assert_eq!(axis(7, 7, Some(1.05)).source(false), [0, 0, 1, 2, 3, 4, 5]);
}

/// What is picked where elements exist, the registry compares.
#[test]
fn elements_that_are_none_are_refused() {
    let (table, space) = ([0u32; 7 * 5], Space::new(&[40, 5]));
    for wrong in [-1i64, 7] {
        let mut indices = [3i64; 40 * 5];
        let mut out = [0u32; 40 * 5];
        indices[6] = wrong;
        let gather = Elements {
            space,
            element_bytes: 4,
            src: Bound { ptr: table.as_ptr().cast_mut().cast(), strides: [0, 1, 0, 0, 0, 0, 0, 0] },
            size: 7,
            step: 5,
            index: Bound::contiguous(indices.as_mut_ptr().cast(), &space),
            index_dtype: DType::I64,
            dst: Bound::contiguous(out.as_mut_ptr().cast(), &space),
        };
        // SAFETY: dense buffers of the sizes named; an index out of bounds is refused.
        let refused = unsafe { gather_elements(&Pool::new(2), &gather) }.unwrap_err();
        assert_eq!((refused.index, refused.rows), (wrong, 7));
    }
}
