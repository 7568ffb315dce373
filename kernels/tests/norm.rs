//! Norms, softmax and reductions against f64 loops.

use oxidiff_kernels::cpu::norm::*;
use oxidiff_kernels::cpu::reduce::{Reduce, Reduction, reduce, reduce_reference};
use oxidiff_kernels::cpu::softmax::{Matrix, softmax};
use oxidiff_kernels::cpu::tile_exec::Prepared;
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::tile::*;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// Deterministic values around `mean` with a spread of about 1.
fn values(n: usize, mean: f32) -> Vec<f32> {
    let mut state = 88172645463325252u64;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            mean + ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 3.4
        })
        .collect()
}

fn encode(dtype: DType, x: &[f32]) -> (Vec<u8>, Vec<f64>) {
    match dtype {
        DType::F16 => x.iter().map(|&v| half::f16::from_f32(v)).map(|h| (h.to_le_bytes(), h.to_f64())).fold_out(),
        DType::BF16 => x.iter().map(|&v| half::bf16::from_f32(v)).map(|h| (h.to_le_bytes(), h.to_f64())).fold_out(),
        _ => x.iter().map(|&v| (v.to_le_bytes(), v as f64)).fold_out(),
    }
}

trait FoldOut {
    fn fold_out(self) -> (Vec<u8>, Vec<f64>);
}

impl<const N: usize, I: Iterator<Item = ([u8; N], f64)>> FoldOut for I {
    fn fold_out(self) -> (Vec<u8>, Vec<f64>) {
        let (bytes, values): (Vec<[u8; N]>, Vec<f64>) = self.unzip();
        (bytes.concat(), values)
    }
}

#[test]
fn group_norm_statistics_survive_a_large_mean_and_start() {
    // f32 products and sums of chunks: the relative error of the variance stays near 2^-24 whatever the mean, but the
    // values themselves carry rounding of mean * 2^-24, which shift inherits.
    for (n, hw, c, groups) in
        [(2, 64, 40, 8), (1, 1, 12, 3), (1, 1000, 33, 33), (3, 5, 20, 1), (1, 4097, 64, 32), (1, 70_000, 2, 1)]
    {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            // The last has images that begin far from their mean.
            for (mean, start) in [(0.0, None), (1000.0, None), (0.0, Some(3000.0))] {
                let (gamma, beta) = (values(c, 1.0), values(c, 0.0));
                for (isa, is_planar) in isas().flat_map(|isa| [(isa, false), (isa, true)]) {
                    let wide = c + 3;
                    let [pixel_stride, channel_stride] = if is_planar { [1, hw] } else { [wide, 1] };
                    let mut given = values(n * hw * wide, mean);
                    for at in (0..n * c).filter(|_| hw > 1) {
                        let first = &mut given[at / c * hw * wide + at % c * channel_stride];
                        *first = start.unwrap_or(*first);
                    }
                    let (bytes, exact) = encode(dtype, &given);
                    let x = Channels {
                        ptr: bytes.as_ptr(),
                        dtype,
                        batch: n,
                        pixels: hw,
                        channels: c,
                        image_stride: (hw * wide) as isize,
                        pixel_stride: pixel_stride as isize,
                        channel_stride: channel_stride as isize,
                    };
                    let vector = |v: &Vec<f32>| ChannelVector { ptr: v.as_ptr().cast(), dtype: DType::F32 };
                    let norm = GroupNorm { groups, eps: 1e-5, gamma: vector(&gamma), beta: vector(&beta) };
                    let (mut scale, mut shift) = (vec![0f32; n * c], vec![0f32; n * c]);
                    // SAFETY: the buffers hold the images, vectors and results.
                    unsafe {
                        group_norm_scale_shift(&Pool::new(2), isa, &x, &norm, scale.as_mut_ptr(), shift.as_mut_ptr())
                            .unwrap();
                    }
                    for image in 0..n {
                        for g in 0..groups {
                            let per = c / groups;
                            let all: Vec<f64> = (0..hw)
                                .flat_map(|p| {
                                    (g * per..(g + 1) * per).map(move |ch| p * pixel_stride + ch * channel_stride)
                                })
                                .map(|at| exact[image * hw * wide + at])
                                .collect();
                            let m = all.iter().sum::<f64>() / all.len() as f64;
                            let v = all.iter().map(|x| (x - m) * (x - m)).sum::<f64>() / all.len() as f64;
                            let rstd = 1.0 / (v + 1e-5).sqrt();
                            for ch in g * per..(g + 1) * per {
                                let (s, t) = (scale[image * c + ch] as f64, shift[image * c + ch] as f64);
                                let (es, et) = (gamma[ch] as f64 * rstd, beta[ch] as f64 - m * rstd * gamma[ch] as f64);
                                assert!((s - es).abs() <= 4e-6 * es.abs(), "{dtype:?} {mean}: scale {s}, not {es}");
                                let bound = 4e-6 * (m * es).abs().max(1.0);
                                assert!((t - et).abs() <= bound, "{dtype:?} {mean}: shift {t}, not {et}");
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn group_norm_refuses_what_it_cannot_do() {
    let x = Channels {
        ptr: std::ptr::null(),
        dtype: DType::F32,
        batch: 1,
        pixels: 0,
        channels: 10,
        image_stride: 0,
        pixel_stride: 10,
        channel_stride: 1,
    };
    let norm = GroupNorm { groups: 3, eps: 1e-5, gamma: ChannelVector::NONE, beta: ChannelVector::NONE };
    let (mut a, mut b) = (vec![0f32; 10], vec![0f32; 10]);
    // SAFETY: nothing is read.
    unsafe {
        assert!(
            group_norm_scale_shift(&Pool::new(1), Isa::detect(), &x, &norm, a.as_mut_ptr(), b.as_mut_ptr()).is_err()
        );
        let norm = GroupNorm { groups: 2, ..norm };
        let int = Channels { dtype: DType::I32, ..x };
        let far = Channels { pixels: 2, channel_stride: 20, ..x };
        assert!(
            group_norm_scale_shift(&Pool::new(1), Isa::detect(), &far, &norm, a.as_mut_ptr(), b.as_mut_ptr()).is_err()
        );
        assert!(
            group_norm_scale_shift(&Pool::new(1), Isa::detect(), &int, &norm, a.as_mut_ptr(), b.as_mut_ptr()).is_err()
        );
        group_norm_scale_shift(&Pool::new(1), Isa::detect(), &x, &norm, a.as_mut_ptr(), b.as_mut_ptr()).unwrap();
    }
}

#[test]
fn group_norm_applies_in_place() {
    let (n, h, w, c) = (2usize, 7usize, 9usize, 48usize);
    let space = Space::new(&[n, h, w, c]);
    let program = TileProgram {
        instrs: vec![
            Instr::Load { dst: 0, src: Source::Memory(0) },
            Instr::Load { dst: 1, src: Source::Memory(1) },
            Instr::Load { dst: 2, src: Source::Memory(2) },
            Instr::Fma { dst: 0, a: 0, b: 1, c: 2 },
            Instr::Unary { dst: 0, op: Unary::Silu, a: 0 },
            Instr::Store { src: 0, out: 0 },
        ],
        loads: vec![DType::F32; 3],
        stores: vec![DType::F32],
    };
    for isa in isas() {
        let original = values(n * h * w * c, 3.0);
        let mut x = original.clone();
        let (mut scale, mut shift) = (vec![0f32; n * c], vec![0f32; n * c]);
        let per_channel = [c as isize, 0, 0, 1, 0, 0, 0, 0];
        let loads = [
            Bound::contiguous(x.as_mut_ptr().cast(), &space),
            Bound { ptr: scale.as_mut_ptr().cast(), strides: per_channel },
            Bound { ptr: shift.as_mut_ptr().cast(), strides: per_channel },
        ];
        let images = Channels {
            ptr: x.as_ptr().cast(),
            dtype: DType::F32,
            batch: n,
            pixels: h * w,
            channels: c,
            image_stride: (h * w * c) as isize,
            pixel_stride: c as isize,
            channel_stride: 1,
        };
        let norm = GroupNorm { groups: 4, eps: 1e-6, gamma: ChannelVector::NONE, beta: ChannelVector::NONE };
        let prepared = Prepared::new(&program, isa).unwrap();
        // SAFETY: the buffers hold the space; `x` is stored over itself element for element.
        unsafe {
            let (a, b) = (scale.as_mut_ptr(), shift.as_mut_ptr());
            group_norm_apply(&Pool::new(2), isa, &images, &norm, a, b, &prepared, &space, &loads, &loads[..1]).unwrap();
        }
        for (i, &y) in x.iter().enumerate() {
            let ch = i % c + i / (h * w * c) * c;
            let v = original[i] as f64 * scale[ch] as f64 + shift[ch] as f64;
            let e = v / (1.0 + (-v).exp());
            assert!((y as f64 - e).abs() <= 1e-6, "{y} not {e}");
        }
    }
}

#[test]
fn row_norms_match_f64() {
    let program = TileProgram {
        instrs: vec![
            Instr::Load { dst: 0, src: Source::Memory(0) },
            Instr::Load { dst: 1, src: Source::RowScalar(0) },
            Instr::Load { dst: 2, src: Source::RowScalar(1) },
            Instr::Load { dst: 3, src: Source::Memory(1) },
            Instr::Binary { dst: 0, op: Binary::Sub, a: 0, b: 1 },
            Instr::Binary { dst: 0, op: Binary::Mul, a: 0, b: 2 },
            Instr::Binary { dst: 0, op: Binary::Mul, a: 0, b: 3 },
            Instr::Store { src: 0, out: 0 },
        ],
        loads: vec![DType::F32, DType::F32],
        stores: vec![DType::F32],
    };
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (rows, cols) in [(37, 320), (3, 1), (5, 33), (2, 5000), (0, 8), (70, 64)] {
            // The last has rows that begin far from their mean.
            let cases = [
                (RowNorm::Layer, 0.5, None),
                (RowNorm::Layer, 300.0, None),
                (RowNorm::Rms, 0.5, None),
                (RowNorm::FlooredRms, 0.5, None),
                (RowNorm::FlooredRms, 0.0, None),
                (RowNorm::Layer, 0.5, Some(3000.0)),
            ];
            for (kind, mean, first) in cases {
                let mut given = values(rows * cols + 8, mean);
                if let Some(first) = first {
                    (0..rows).for_each(|r| given[r * cols] = first);
                }
                let (mut bytes, exact) = encode(dtype, &given);
                let mut weight = values(cols, 1.0);
                let mut y = vec![0f32; rows * cols];
                let program = TileProgram { loads: vec![dtype, DType::F32], ..program.clone() };
                let space = Space::new(&[rows, cols]);
                let x = Bound::contiguous(bytes.as_mut_ptr(), &space);
                let w = Bound { ptr: weight.as_mut_ptr().cast(), strides: [0, 1, 0, 0, 0, 0, 0, 0] };
                let out = Bound::contiguous(y.as_mut_ptr().cast(), &space);
                for isa in isas() {
                    let prepared = Prepared::new(&program, isa).unwrap();
                    let input = RowInput { bound: x, dtype };
                    let eps = if (kind, mean) == (RowNorm::FlooredRms, 0.0) { 100.0 } else { 1e-5 };
                    // SAFETY: the buffers hold the space.
                    unsafe { row_norm(&Pool::new(2), isa, kind, eps, &input, &prepared, &space, &[x, w], &[out]) }
                        .unwrap();
                    for r in 0..rows {
                        let row = &exact[r * cols..(r + 1) * cols];
                        let (m, rstd) = row_norm_reference(kind, eps, row);
                        for (i, x) in row.iter().enumerate() {
                            let e = (x - m) * rstd * weight[i] as f64;
                            // The mean is rounded to f32 before it is subtracted.
                            let bound = 1e-6 * (1.0 + e.abs()) + m.abs() * 1.2e-7 * rstd * weight[i].abs() as f64;
                            assert!(
                                (y[r * cols + i] as f64 - e).abs() <= bound,
                                "{dtype:?} {kind:?} {cols}: {} {e}",
                                y[r * cols + i]
                            );
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn softmax_matches_f64() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (rows, cols) in [(5, 77), (3, 1), (2, 4096), (9, 16), (0, 4), (4, 0)] {
            let (mut bytes, exact) =
                encode(dtype, &values(rows * cols, 2.0).iter().map(|v| v * 4.0).collect::<Vec<_>>());
            for isa in isas() {
                let mut y = vec![0f32; rows * cols];
                let a = Matrix { ptr: bytes.as_mut_ptr(), dtype, row_stride: cols as isize };
                let b = Matrix { ptr: y.as_mut_ptr().cast(), dtype: DType::F32, row_stride: cols as isize };
                // SAFETY: the buffers hold the matrices.
                unsafe { softmax(&Pool::new(2), isa, a, b, rows, cols) }.unwrap();
                for r in 0..rows {
                    let row = &exact[r * cols..(r + 1) * cols];
                    let m = row.iter().cloned().fold(f64::MIN, f64::max);
                    let sum: f64 = row.iter().map(|x| (x - m).exp()).sum();
                    for (i, x) in row.iter().enumerate() {
                        let e = (x - m).exp() / sum;
                        // exp's own 2 ulp, its argument's rounding (|x - m| < 32), the sum's.
                        assert!((y[r * cols + i] as f64 - e).abs() <= 3e-6 * e + 1e-30, "{} {e}", y[r * cols + i]);
                    }
                }
            }
        }
    }
}

#[test]
fn softmax_of_infinities_is_pytorchs() {
    let inf = f32::INFINITY;
    let mut x = [-inf, -inf, inf, 1.0, f32::NAN, 1.0, -inf, 1.0];
    for isa in isas() {
        let mut y = [9f32; 8];
        let a = Matrix { ptr: x.as_mut_ptr().cast(), dtype: DType::F32, row_stride: 2 };
        let b = Matrix { ptr: y.as_mut_ptr().cast(), dtype: DType::F32, row_stride: 2 };
        // SAFETY: the buffers hold the matrices.
        unsafe { softmax(&Pool::new(1), isa, a, b, 4, 2) }.unwrap();
        assert!(y[..6].iter().all(|v| v.is_nan()), "{y:?}");
        assert_eq!(y[6..], [0.0, 1.0]);
    }
}

#[test]
fn reductions_match_the_reference() {
    use Reduction::*;
    let ops = [Sum, Mean, Prod, Max, Min, Any, All, ArgMax, ArgMin, SumSquares];
    let floats = [DType::F32, DType::BF16, DType::F16, DType::F64];
    let types = floats.into_iter().chain([DType::I64, DType::I32, DType::U8, DType::I8, DType::Bool]);
    for dtype in types {
        for sizes in [[3, 7, 1], [2, 300, 1], [2, 5, 70], [1, 4000, 3], [2, 0, 3], [0, 3, 3], [4, 1, 1]] {
            for nan in [false, true] {
                let n = sizes.iter().product::<usize>();
                let mut x: Vec<f32> = values(n, 0.2);
                if nan && n > 3 {
                    x[n / 2] = f32::NAN;
                }
                let bytes: Vec<u8> = match dtype {
                    DType::F64 => x.iter().flat_map(|&v| (v as f64).to_le_bytes()).collect(),
                    DType::I64 => x.iter().flat_map(|&v| ((v * 9.0) as i64).to_le_bytes()).collect(),
                    DType::I32 => x.iter().flat_map(|&v| ((v * 9.0) as i32).to_le_bytes()).collect(),
                    DType::U8 => x.iter().map(|&v| (v * 9.0).abs() as u8).collect(),
                    DType::I8 => x.iter().map(|&v| (v * 9.0) as i8 as u8).collect(),
                    DType::Bool => x.iter().map(|&v| (v > 0.0) as u8).collect(),
                    _ => encode(dtype, &x).0,
                };
                for op in ops {
                    let dst_dtype = match (op, dtype) {
                        (ArgMax | ArgMin, _) => DType::I64,
                        (Any | All, _) => DType::Bool,
                        (_, DType::F64) => DType::F64,
                        (_, DType::F32 | DType::BF16 | DType::F16) => DType::F32,
                        (Mean, _) => DType::F32,
                        _ => DType::I64,
                    };
                    let count = sizes[0] * sizes[2];
                    let mut out = [vec![0u8; count * 8], vec![0u8; count * 8]];
                    let mut r = Reduce {
                        src: bytes.as_ptr(),
                        src_dtype: dtype,
                        sizes,
                        src_strides: [(sizes[1] * sizes[2]) as isize, sizes[2] as isize, 1],
                        dst: out[0].as_mut_ptr(),
                        dst_dtype,
                        dst_strides: [sizes[2] as isize, 1],
                    };
                    let refused = sizes[1] == 0 && matches!(op, Max | Min | ArgMax | ArgMin);
                    if !refused {
                        // SAFETY: the buffers hold the description.
                        unsafe { reduce_reference(op, &r) };
                    }
                    for isa in isas() {
                        r.dst = out[1].as_mut_ptr();
                        // SAFETY: the buffers hold the description.
                        let outcome = unsafe { reduce(&Pool::new(2), isa, op, &r) };
                        assert_eq!(outcome.is_err(), refused);
                        let close = |a: f64, b: f64, scale: f64| {
                            a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= 1e-5 * scale
                        };
                        let read = |v: &[u8], i: usize| match dst_dtype {
                            DType::F32 => f32::from_le_bytes(v[i * 4..][..4].try_into().unwrap()) as f64,
                            DType::F64 => f64::from_le_bytes(v[i * 8..][..8].try_into().unwrap()),
                            DType::I64 => i64::from_le_bytes(v[i * 8..][..8].try_into().unwrap()) as f64,
                            _ => v[i] as f64,
                        };
                        for i in 0..count {
                            let (a, b) = (read(&out[1], i), read(&out[0], i));
                            let scale = if matches!(op, Sum | Mean) { sizes[1] as f64 } else { b.abs() };
                            assert!(close(a, b, scale), "{op:?} {dtype:?} {sizes:?} {}: {a}, not {b}", isa.name());
                        }
                    }
                }
            }
        }
    }
}
