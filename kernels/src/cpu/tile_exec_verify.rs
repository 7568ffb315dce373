//! Rows of the registry for attention, norms, softmax and tile programs: each level of each, compared with f64 loops.

use super::attention::{Attention, Heads, attention_reference, attention_with, scratch_bytes_of};
use super::bench;
use super::gemm_kernel::{Form, Kernel, kernels, of_form};
use super::norm::{
    ChannelVector, Channels, GroupNorm, RowInput, RowNorm, group_norm_apply, row_norm, row_norm_reference,
};
use super::softmax::{Matrix, softmax};
use super::tile_exec::{Prepared, run_loop};
use super::tile_exec_ref;
use super::verify::{Buffer, Reference, compare_rounded, half_unit};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::registry::{Family, Row};
use crate::tile::{Binary, Bound, Instr, Source, Space, TileProgram, Unary};

/// A comparison at a level and type.
type Check = fn(Isa, DType) -> Result<(), String>;
/// What is measured at a level and type.
type Benches = fn(Isa, DType) -> Vec<bench::Bench>;

/// Every kernel of this file at every level, for every floating type.
pub fn rows() -> Vec<Row> {
    let families: [(&str, &str, Family, Check, Benches); 6] = [
        ("attention", "k192", Family::Attention, verify_attention, bench::attention),
        ("group_norm_silu", "r4", Family::Norm, verify_group_norm, bench::group_norm),
        ("layer_norm", "r16", Family::Norm, verify_layer_norm, bench::layer_norm),
        ("rms_norm", "r16", Family::Norm, verify_rms_norm, bench::rms_norm),
        ("softmax", "r1", Family::Norm, verify_softmax, bench::rows_softmax),
        ("tile", "1024", Family::Tile, verify_tile, bench::tile),
    ];
    let mut rows = Vec::new();
    for (name, shape, family, check, benches) in families {
        for (dtype, suffix) in [(DType::F32, "f32"), (DType::F16, "f16"), (DType::BF16, "bf16")] {
            for isa in Isa::ALL {
                rows.push(Row {
                    name: format!("{name}_{suffix}_{shape}__{}", isa.name()),
                    family,
                    isa,
                    dtype,
                    is_available: Box::new(move || isa.is_available()),
                    verify: Box::new(move || check(isa, dtype)),
                    benches: benches(isa, dtype),
                });
            }
        }
    }
    for kernel in kernels().into_iter().filter(|kernel| {
        let form = kernel.form;
        form == Form::Bf16Pairs || form.parts() > 0
    }) {
        let dtype = kernel.form.dtype();
        let operands = format!("{dtype:?}{}", kernel.instruction()).to_lowercase();
        rows.push(Row {
            name: format!("attention_{operands}_k192__{}", kernel.isa.name()),
            family: Family::Attention,
            isa: kernel.isa,
            dtype,
            is_available: Box::new(|| kernel.is_available()),
            verify: Box::new(move || verify_attention_of(kernel, kernel.isa, dtype)),
            benches: bench::attention_of(kernel, kernel.isa, dtype),
        });
    }
    rows
}

/// Compares stored results with f64 ones: `tolerance` plus the rounding of the stored type, both relative to the larger
/// of 1 and the result.
fn compare(got: &Buffer, expected: &[f64], tolerance: f64) -> Result<(), String> {
    for (i, e) in expected.iter().enumerate() {
        let (error, scale) = ((got.get(i) - e).abs(), e.abs().max(1.0));
        if error.is_nan() || error > tolerance * scale + half_unit(got.dtype, scale) {
            return Err(format!("result {i} is {}, expected {e}", got.get(i)));
        }
    }
    Ok(())
}

fn load(dst: u8, operand: u8) -> Instr {
    Instr::Load { dst, src: Source::Memory(operand) }
}

fn verify_attention(isa: Isa, dtype: DType) -> Result<(), String> {
    verify_attention_of(of_form(isa, Form::F32), isa, dtype)
}

pub(super) fn verify_attention_of(kernel: &'static Kernel, isa: Isa, dtype: DType) -> Result<(), String> {
    for (seq_q, seq_k, dim, causal) in [
        (50, 77, 40, false),
        (100, 300, 64, true),
        (5, 33, 96, false),
        (30, 70, 8, true),
        (26, 529, 37, false),
        (2, 90, 40, false),
    ] {
        let (batch, heads) = (1, 2);
        let [mut q, mut k, mut v] =
            [(seq_q, 1), (seq_k, 2), (seq_k, 3)].map(|(n, seed)| Buffer::random(dtype, batch * heads * n * dim, seed));
        let mut out = Buffer::zeroed(dtype, batch * heads * seq_q * dim);
        let mut exact = Buffer::zeroed(DType::F32, batch * heads * seq_q * dim);
        let of = |b: &mut Buffer, n: usize| Heads {
            ptr: b.ptr_mut(),
            dtype: b.dtype,
            strides: [(n * heads * dim) as isize, dim as isize, (heads * dim) as isize, 1],
        };
        let (scale, out_heads) = (1.0 / (dim as f32).sqrt(), of(&mut out, seq_q));
        let (q, k, v) = (of(&mut q, seq_q), of(&mut k, seq_k), of(&mut v, seq_k));
        let dim_v = dim;
        let a = Attention {
            batch,
            heads,
            kv_heads: heads,
            seq_q,
            seq_k,
            dim,
            dim_v,
            scale,
            causal,
            q,
            k,
            v,
            mask: None,
            out: out_heads,
        };
        // SAFETY: the buffers hold the sizes.
        unsafe {
            let pool = Pool::new(2);
            let bytes = scratch_bytes_of(kernel, &pool, &a);
            let mut scratch = Buffer::zeroed(DType::U8, bytes);
            attention_with(kernel, &pool, isa, &a, (scratch.ptr_mut(), bytes)).map_err(|e| e.to_string())?;
            attention_reference(&Attention { out: of(&mut exact, seq_q), ..a });
        }
        let expected: Vec<f64> = (0..batch * heads * seq_q * dim).map(|i| exact.get(i)).collect();
        // Scores of `dim` products below 1, of which a form may leave out a part, times scale; weights inherit their absolute
        // error, and may be rounded.
        let weights = if kernel.form == Form::Bf16Pairs { 2f64.powi(-9) } else { 0.0 };
        let tolerance =
            4.0 * (dim as f64).sqrt() * (1 + kernel.form.left_out()) as f64 * 2f64.powi(-24) + 1e-6 + weights;
        compare(&out, &expected, tolerance).map_err(|e| format!("{seq_q}x{seq_k} d{dim}: {e}"))?;
    }
    Ok(())
}

fn verify_group_norm(isa: Isa, dtype: DType) -> Result<(), String> {
    for (n, pixels, c, groups) in [(2, 37, 48, 8), (1, 1000, 33, 3), (3, 2, 16, 2)] {
        let mut x = Buffer::random(dtype, n * pixels * c, 5);
        let mut y = Buffer::zeroed(dtype, n * pixels * c);
        let (mut scale, mut shift) = (Buffer::zeroed(DType::F32, n * c), Buffer::zeroed(DType::F32, n * c));
        let program = TileProgram {
            instrs: vec![
                load(0, 0),
                load(1, 1),
                load(2, 2),
                Instr::Fma { dst: 0, a: 0, b: 1, c: 2 },
                Instr::Unary { dst: 0, op: Unary::Silu, a: 0 },
                Instr::Store { src: 0, out: 0 },
            ],
            loads: vec![dtype, DType::F32, DType::F32],
            stores: vec![dtype],
        };
        let prepared = Prepared::new(&program, isa).map_err(|e| e.to_string())?;
        let space = Space::new(&[n, pixels, c]);
        let images = Channels {
            ptr: x.ptr(),
            dtype,
            batch: n,
            pixels,
            channels: c,
            image_stride: (pixels * c) as isize,
            pixel_stride: c as isize,
            channel_stride: 1,
        };
        let norm = GroupNorm { groups, eps: 1e-5, gamma: ChannelVector::NONE, beta: ChannelVector::NONE };
        let (a, b) = (scale.ptr_mut(), shift.ptr_mut());
        let strides = [c as isize, 0, 1, 0, 0, 0, 0, 0];
        let loads = [Bound::contiguous(x.ptr_mut(), &space), Bound { ptr: a, strides }, Bound { ptr: b, strides }];
        let stores = [Bound::contiguous(y.ptr_mut(), &space)];
        // SAFETY: the buffers hold the images.
        unsafe {
            let pool = Pool::new(2);
            group_norm_apply(&pool, isa, &images, &norm, a.cast(), b.cast(), &prepared, &space, &loads, &stores)
                .map_err(|e| e.to_string())?;
        }
        let per = c / groups;
        let mut expected = vec![0.0; n * pixels * c];
        for (image, g) in (0..n * groups).map(|i| (i / groups, i % groups)) {
            let at = |i: usize| (image * pixels + i / per) * c + g * per + i % per;
            let count = (pixels * per) as f64;
            let mean = (0..pixels * per).map(|i| x.get(at(i))).sum::<f64>() / count;
            let variance = (0..pixels * per).map(|i| (x.get(at(i)) - mean).powi(2)).sum::<f64>() / count;
            for i in 0..pixels * per {
                let v = (x.get(at(i)) - mean) / (variance + 1e-5).sqrt();
                expected[at(i)] = v / (1.0 + (-v).exp());
            }
        }
        compare(&y, &expected, 4e-6).map_err(|e| format!("{n}x{pixels}x{c}: {e}"))?;
    }
    Ok(())
}

/// Normalises rows, without weight and bias.
fn normalised(
    isa: Isa,
    (kind, eps): (RowNorm, f64),
    x: &mut Buffer,
    (rows, cols): (usize, usize),
) -> Result<Buffer, String> {
    let dtype = x.dtype;
    let mut y = Buffer::random(dtype, rows * cols, 9);
    let program = TileProgram {
        instrs: vec![
            load(0, 0),
            Instr::Load { dst: 1, src: Source::RowScalar(0) },
            Instr::Load { dst: 2, src: Source::RowScalar(1) },
            Instr::Binary { dst: 0, op: Binary::Sub, a: 0, b: 1 },
            Instr::Binary { dst: 0, op: Binary::Mul, a: 0, b: 2 },
            Instr::Store { src: 0, out: 0 },
        ],
        loads: vec![dtype],
        stores: vec![dtype],
    };
    let prepared = Prepared::new(&program, isa).map_err(|e| e.to_string())?;
    let space = Space::new(&[rows, cols]);
    let input = RowInput { bound: Bound::contiguous(x.ptr_mut(), &space), dtype };
    let stores = [Bound::contiguous(y.ptr_mut(), &space)];
    // SAFETY: the buffers hold the space.
    unsafe {
        row_norm(&Pool::new(2), isa, kind, eps, &input, &prepared, &space, &[input.bound], &stores)
            .map_err(|e| e.to_string())?;
    }
    Ok(y)
}

/// The same in f64.
fn normalised_reference((kind, eps): (RowNorm, f64), x: &Buffer, (rows, cols): (usize, usize)) -> Vec<f64> {
    let row = |r: usize| {
        let row: Vec<f64> = (r * cols..(r + 1) * cols).map(|at| x.get(at)).collect();
        let (mean, factor) = row_norm_reference(kind, eps, &row);
        row.into_iter().map(move |v| (v - mean) * factor)
    };
    (0..rows).flat_map(row).collect()
}

fn verify_layer_norm(isa: Isa, dtype: DType) -> Result<(), String> {
    for sizes in [(37, 320), (4, 33), (3, 5000)] {
        let mut x = Buffer::random(dtype, sizes.0 * sizes.1, 6);
        let y = normalised(isa, (RowNorm::Layer, 1e-5), &mut x, sizes)?;
        let expected = normalised_reference((RowNorm::Layer, 1e-5), &x, sizes);
        compare(&y, &expected, 1e-6).map_err(|e| format!("{sizes:?}: {e}"))?;
    }
    Ok(())
}

/// Roundings that a result went through, of which none is taken back by others, as squares have one sign: the mean square is that
/// of 1 product, 18 additions to a lane, 2 between accumulators and 4 between sixteen lanes, half of which its root has; the root's
/// own and that of the product with it follow.
const RMS_ROUNDINGS: f64 = 0.5 * (1.0 + 18.0 + 2.0 + 4.0) + 1.0 + 1.0;

fn verify_rms_norm(isa: Isa, dtype: DType) -> Result<(), String> {
    let kinds = [(RowNorm::Rms, 1e-5), (RowNorm::FlooredRms, 1e-5), (RowNorm::FlooredRms, 100.0)];
    for (sizes, kind) in
        [(37, 320), (70, 64), (5, 33), (3, 1), (2, 5000)].into_iter().flat_map(|s| kinds.map(|k| (s, k)))
    {
        let mut x = Buffer::random(dtype, sizes.0 * sizes.1, 6);
        let y = normalised(isa, kind, &mut x, sizes)?;
        let expected = normalised_reference(kind, &x, sizes);
        let references: Vec<Reference> =
            expected.into_iter().map(|sum| Reference { sum, magnitude: sum.abs() }).collect();
        // One more for what products of these roundings add up to.
        compare_rounded(&y, &references, RMS_ROUNDINGS + 1.0)
            .map_err(|e| format!("rms_norm {dtype:?} {} {kind:?} of {sizes:?}: {e}", isa.name()))?;
    }
    Ok(())
}

fn verify_softmax(isa: Isa, dtype: DType) -> Result<(), String> {
    for (rows, cols) in [(5, 77), (3, 1), (2, 4096)] {
        let mut x = Buffer::random(dtype, rows * cols, 7);
        let mut y = Buffer::zeroed(dtype, rows * cols);
        let matrix = |b: &mut Buffer| Matrix { ptr: b.ptr_mut(), dtype, row_stride: cols as isize };
        let (a, b) = (matrix(&mut x), matrix(&mut y));
        // SAFETY: the buffers hold the matrices.
        unsafe { softmax(&Pool::new(2), isa, a, b, rows, cols) }.map_err(|e| e.to_string())?;
        let expected: Vec<f64> = (0..rows * cols)
            .map(|i| x.get(i).exp() / (i / cols * cols..(i / cols + 1) * cols).map(|j| x.get(j).exp()).sum::<f64>())
            .collect();
        compare(&y, &expected, 1e-6).map_err(|e| format!("{rows}x{cols}: {e}"))?;
    }
    Ok(())
}

/// A program of every kind of instruction, over operands of every kind of stride.
fn verify_tile(isa: Isa, dtype: DType) -> Result<(), String> {
    let program = TileProgram {
        instrs: vec![
            load(0, 0),
            load(1, 1),
            load(2, 2),
            Instr::Load { dst: 3, src: Source::Const(0.5) },
            Instr::Fma { dst: 0, a: 0, b: 1, c: 2 },
            Instr::Unary { dst: 1, op: Unary::Gelu, a: 0 },
            Instr::Binary { dst: 2, op: Binary::Gt, a: 0, b: 3 },
            Instr::Select { dst: 0, cond: 2, a: 1, b: 0 },
            Instr::Round { dst: 0, a: 0, dtype: DType::BF16 },
            Instr::Binary { dst: 0, op: Binary::Mul, a: 0, b: 3 },
            Instr::Store { src: 0, out: 0 },
        ],
        loads: vec![dtype; 3],
        stores: vec![dtype],
    };
    let prepared = Prepared::new(&program, isa).map_err(|e| e.to_string())?;
    for (n, h, c) in [(2, 9, 70), (1, 1, 5000), (3, 40, 4)] {
        let space = Space::new(&[n, h, c]);
        let [mut x, mut row, mut each] =
            [(n * h * c, 1), (c, 2), (n, 3)].map(|(len, seed)| Buffer::random(dtype, len, seed));
        let (mut y, mut exact) = (Buffer::zeroed(dtype, n * h * c), Buffer::zeroed(dtype, n * h * c));
        let loads = [
            Bound::contiguous(x.ptr_mut(), &space),
            Bound { ptr: row.ptr_mut(), strides: [0, 0, 1, 0, 0, 0, 0, 0] },
            Bound { ptr: each.ptr_mut(), strides: [1, 0, 0, 0, 0, 0, 0, 0] },
        ];
        // SAFETY: the buffers hold the space at these strides.
        unsafe {
            run_loop(&Pool::new(2), &prepared, &space, &loads, &[Bound::contiguous(y.ptr_mut(), &space)]);
            let out = [Bound::contiguous(exact.ptr_mut(), &space)];
            tile_exec_ref::run(&program, &space, &loads, &out, &[], &[]);
        }
        let expected: Vec<f64> = (0..n * h * c).map(|i| exact.get(i)).collect();
        // GELU's error may tip the rounding to bfloat16 the other way.
        compare(&y, &expected, 2f64.powi(-8)).map_err(|e| format!("{n}x{h}x{c}: {e}"))?;
    }
    Ok(())
}
