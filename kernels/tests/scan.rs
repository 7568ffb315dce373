//! Cumulative sums against adding up one after the other.

use half::{bf16, f16};
use oxidiff_kernels::cpu::KernelError;
use oxidiff_kernels::cpu::scan::{Scan, cumulative_sum};
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::pool::Pool;

fn encode(dtype: DType, x: f64) -> Vec<u8> {
    match dtype {
        DType::F32 => (x as f32).to_le_bytes().to_vec(),
        DType::F16 => f16::from_f64(x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f64(x).to_le_bytes().to_vec(),
        DType::F64 => x.to_le_bytes().to_vec(),
        DType::I64 => (x as i64).to_le_bytes().to_vec(),
        DType::I32 => (x as i32).to_le_bytes().to_vec(),
        DType::I8 => (x as i8).to_le_bytes().to_vec(),
        DType::U8 => vec![x as u8],
        DType::Bool => vec![u8::from(x > 0.0)],
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> f64 {
    match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()).into(),
        DType::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).into(),
        DType::BF16 => bf16::from_le_bytes(bytes.try_into().unwrap()).into(),
        DType::F64 => f64::from_le_bytes(bytes.try_into().unwrap()),
        DType::I64 => i64::from_le_bytes(bytes.try_into().unwrap()) as f64,
        DType::I32 => i32::from_le_bytes(bytes.try_into().unwrap()).into(),
        DType::I8 => i8::from_le_bytes(bytes.try_into().unwrap()).into(),
        DType::U8 | DType::Bool => bytes[0].into(),
    }
}

/// Rows of `[outer, scan, inner]` with a gap behind each, of the operand as of the result.
fn scan((x, from): (&[u8], DType), (y, to): (&mut [u8], DType), sizes: [usize; 3], gap: usize) -> Scan {
    let [_, n, inner] = sizes;
    let strides = [(n * (inner + gap)) as isize, (inner + gap) as isize, 1];
    let (src, dst) = (x.as_ptr(), y.as_mut_ptr());
    Scan { src, src_dtype: from, sizes, src_strides: strides, dst, dst_dtype: to, dst_strides: strides }
}

#[test]
fn sums_are_those_of_all_before() {
    use DType::*;
    let floats = [(F32, F32, 1e-7), (F16, F16, 5e-4), (BF16, BF16, 4e-3), (F64, F64, 0.0), (F16, F32, 1e-7)];
    let integers = [(I32, I64), (Bool, I64), (U8, I64), (I8, I64), (I64, I64), (I32, I32)];
    for (from, to, unit) in floats.into_iter().chain(integers.map(|(from, to)| (from, to, 0.0))) {
        for sizes in [[3, 7, 1], [2, 300, 1], [2, 5, 70], [1, 400, 3], [40, 500, 1], [0, 3, 2], [2, 0, 3], [4, 1, 1]] {
            for gap in [0, 2] {
                let ([outer, n, inner], wide) = (sizes, sizes[2] + gap);
                let x: Vec<u8> = (0..outer * n * wide)
                    .flat_map(|i| encode(from, ((i * 37 + 11) % 101) as f64 * 0.75 - 25.0))
                    .collect();
                let mut y = encode(to, 7.0).repeat(outer * n * wide);
                // SAFETY: the buffers hold the description.
                unsafe { cumulative_sum(&Pool::new(2), &scan((&x, from), (&mut y, to), sizes, gap)).unwrap() };
                let element = |bytes: &[u8], dtype: DType, at: usize| {
                    decode(dtype, &bytes[at * dtype.size_bytes()..][..dtype.size_bytes()])
                };
                for line in 0..outer * wide {
                    let mut sum = 0.0;
                    for row in 0..n {
                        let at = (line / wide * n + row) * wide + line % wide;
                        sum += element(&x, from, at);
                        let (found, what) = (element(&y, to, at), format!("{from:?} {to:?} {sizes:?} {gap} {row}"));
                        match line % wide < inner {
                            true => assert!((found - sum).abs() <= unit * sum.abs(), "{what}: {found}, {sum}"),
                            false => assert_eq!(found, 7.0, "{what}: between rows"),
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn results_of_another_kind_are_refused() {
    for (from, to) in [(DType::F32, DType::I64), (DType::I64, DType::F32), (DType::I32, DType::U8)] {
        let (x, mut y) = ([0u8; 48], [0u8; 48]);
        // SAFETY: the buffers hold the description.
        let refused = unsafe { cumulative_sum(&Pool::new(1), &scan((&x, from), (&mut y, to), [1, 3, 2], 0)) };
        assert!(matches!(refused, Err(KernelError::UnsupportedDType(_))));
    }
}
