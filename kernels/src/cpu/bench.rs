//! What kernels are measured on: the sizes they meet in Stable Diffusion 1.5's UNet (latents of 64x64) and VAE decoder, and
//! those of Flux's transformer and of text encoders that these have not. Kernels of few files have theirs beside their comparison.
//!
//! A [`Bench`] owns its operands; a run of it is one call of the kernel with the plain epilogue (bias and store, where the
//! kernel has an epilogue). Bytes are those of operands and results, each once: what a call moves at least.

use super::KernelError;
use super::attention::{Attention, Heads, attention_with, scratch_bytes_of};
use super::conv::{Conv, PackedWeight, Weight, conv_with, pack_conv_weight};
use super::conv_algorithm::{Algorithm, Keep, expected};
use super::conv_forms_verify::has_form;
use super::conv_winograd::{Room, Work, winograd_with, work_bytes_of};
use super::gemm::{Operand, gemm_with};
use super::gemm_kernel::{Form, Kernel, of_form};
use super::gemm_store::StoreEpilogue;
use super::norm::{ChannelVector, Channels, GroupNorm, RowInput, RowNorm, group_norm_apply, row_norm};
use super::pack::{Matrix, PackedB, pack_b, packed_bytes};
use super::softmax::{self, softmax};
use super::tile_exec::{Prepared, run_loop};
use super::verify::{Buffer, Quantized};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::tile::{Binary, Bound, Instr, Source, Space, TileProgram, Unary};

/// One call of a prepared kernel.
pub type Run = Box<dyn FnMut() -> Result<(), KernelError> + Send>;

/// A kernel at the sizes of one layer.
pub struct Bench {
    /// The operation, by a name that the Python side knows PyTorch's counterpart of.
    pub op: &'static str,
    /// Its sizes by name.
    pub sizes: Vec<(&'static str, usize)>,
    /// Floating-point operations, as if every product were computed.
    pub flops: f64,
    /// Bytes of operands and results.
    pub bytes: f64,
    /// Makes the operands.
    pub start: Box<dyn Fn() -> Result<Run, KernelError>>,
}

/// Linear layers as (m, n, k).
const LINEAR: [(usize, usize, usize); 8] = [
    (4096, 1280, 1280),
    (4096, 320, 320),
    (4096, 2560, 320),
    (4096, 320, 1280),
    (1024, 640, 2560),
    (256, 1280, 1280),
    (77, 320, 768),
    (2, 1280, 320),
];

pub(super) fn linear(kernel: &'static Kernel, dtype: DType) -> Vec<Bench> {
    let bench = |(m, n, k)| Bench {
        op: "linear",
        sizes: vec![("m", m), ("n", n), ("k", k)],
        flops: 2.0 * (m * n * k) as f64,
        bytes: ((m * n + m * k + n * k) * dtype.size_bytes()) as f64,
        start: Box::new(move || start_linear(kernel, dtype, (m, n, k))),
    };
    LINEAR.into_iter().map(bench).collect()
}

fn start_linear(kernel: &'static Kernel, dtype: DType, (m, n, k): (usize, usize, usize)) -> Result<Run, KernelError> {
    let pool = Pool::global();
    let [a, w, bias] = [(m * k, 1), (n * k, 2), (n, 3)].map(|(len, seed)| Buffer::random(dtype, len, seed));
    let mut c = Buffer::zeroed(dtype, m * n);
    let mut memory = Buffer::zeroed(DType::U8, packed_bytes(n, k, dtype, kernel.isa));
    // SAFETY: dense buffers of the sizes named.
    unsafe { pack_b(pool, kernel.isa, n, k, &Matrix::row_major(w.ptr(), dtype, k), memory.ptr_mut()) };
    Ok(Box::new(move || {
        let weight = Operand::Packed(PackedB::from_raw(memory.ptr(), n, k, dtype, kernel.isa));
        let store = StoreEpilogue::new(c.ptr_mut(), dtype, n as isize).with_bias(bias.ptr(), dtype);
        // SAFETY: as above; the weight was packed for these sizes.
        unsafe { gemm_with(kernel, pool, &[], (m, n, k), &Matrix::row_major(a.ptr(), dtype, k), &weight, &store) }
    }))
}

pub(super) fn linear_int8(kernel: &'static Kernel) -> Vec<Bench> {
    let bench = |(m, n, k)| Bench {
        op: "linear",
        sizes: vec![("m", m), ("n", n), ("k", k)],
        flops: 2.0 * (m * n * k) as f64,
        bytes: (m * k + n * k + 4 * m * n) as f64,
        start: Box::new(move || start_int8(kernel, (m, n, k))),
    };
    LINEAR.into_iter().map(bench).collect()
}

fn start_int8(kernel: &'static Kernel, (m, n, k): (usize, usize, usize)) -> Result<Run, KernelError> {
    let operands = Quantized::random((m, n, k));
    let (packed, mut c) = (operands.pack(kernel), Buffer::zeroed(DType::F32, m * n));
    Ok(Box::new(move || operands.multiply(kernel, &packed, &mut c)))
}

/// Convolutions, named after what they are in the model.
pub(super) fn convolutions() -> Vec<Conv> {
    let same = |size, ic, oc| Conv::new_2d(1, [size, size], ic, oc, [3, 3]).padding([0, 1, 1]);
    vec![
        same(64, 4, 320),
        same(64, 320, 320),
        same(64, 640, 320),
        same(32, 640, 640),
        same(16, 1280, 1280),
        same(8, 1280, 1280),
        same(64, 320, 320).stride([1, 2, 2]),
        same(16, 1280, 1280).upsample([1, 2, 2]),
        same(64, 320, 4),
        same(64, 512, 512),
        same(256, 256, 256),
        same(512, 128, 3),
        Conv::new_2d(1, [64, 64], 640, 320, [1, 1]),
        same(64, 320, 320).groups(320),
        same(64, 64, 64).groups(16),
    ]
}

pub(super) fn conv_bench(shape: Conv, dtype: DType, start: impl Fn() -> Result<Run, KernelError> + 'static) -> Bench {
    let image = shape.batch * shape.input.iter().product::<usize>() * shape.in_channels;
    let elements = image + shape.rows() * shape.out_channels + shape.out_channels * shape.terms();
    Bench {
        op: "conv",
        sizes: vec![
            ("in", shape.in_channels),
            ("out", shape.out_channels),
            ("size", shape.input[2]),
            ("kernel", shape.kernel[2]),
            ("stride", shape.stride[2]),
            ("groups", shape.groups),
            ("up", shape.upsample[2]),
        ],
        flops: 2.0 * (shape.rows() * shape.out_channels * shape.terms()) as f64,
        bytes: (elements * dtype.size_bytes()) as f64,
        start: Box::new(start),
    }
}

pub(super) fn conv(kernel: &'static Kernel, dtype: DType) -> Vec<Bench> {
    let bench = |shape| conv_bench(shape, dtype, move || start_conv(kernel, dtype, shape));
    // Other forms have rows of their own.
    convolutions().into_iter().filter(|shape| !has_form(kernel, shape, dtype)).map(bench).collect()
}

/// Image, weight, bias and result of a convolution.
pub(super) fn conv_operands(shape: &Conv, dtype: DType) -> [Buffer; 4] {
    let sizes = [shape.batch * shape.strides[0] as usize, shape.out_channels * shape.terms(), shape.out_channels];
    let [x, w, bias] =
        [(sizes[0], 1), (sizes[1], 2), (sizes[2], 3)].map(|(len, seed)| Buffer::random(dtype, len, seed));
    [x, w, bias, Buffer::zeroed(dtype, shape.rows() * shape.out_channels)]
}

fn start_conv(kernel: &'static Kernel, dtype: DType, shape: Conv) -> Result<Run, KernelError> {
    start_packed_conv(kernel, dtype, shape, move |pool, x, weight, store| {
        // SAFETY: operands of the sizes that `shape` says; the weight was packed for it.
        unsafe { conv_with(kernel, pool, &shape, x, dtype, weight, store) }
    })
}

/// A convolution with a packed weight, by a form of its own, which is given image, weight and epilogue.
pub(super) fn start_packed_conv(
    kernel: &'static Kernel,
    dtype: DType,
    shape: Conv,
    run: impl Fn(&Pool, *const u8, &PackedWeight, &StoreEpilogue) -> Result<(), KernelError> + Send + 'static,
) -> Result<Run, KernelError> {
    let pool = Pool::global();
    let [x, w, bias, mut y] = conv_operands(&shape, dtype);
    let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(dtype, kernel.isa));
    // SAFETY: dense buffers of the sizes that `shape` says.
    unsafe {
        let weight = Weight::contiguous(w.ptr(), dtype, &shape);
        pack_conv_weight(pool, kernel.isa, &shape, &weight, memory.ptr_mut())
    };
    Ok(Box::new(move || {
        let weight = PackedWeight::from_raw(memory.ptr(), dtype, &shape, kernel.isa);
        let store = StoreEpilogue::new(y.ptr_mut(), dtype, shape.out_channels as isize).with_bias(bias.ptr(), dtype);
        run(pool, x.ptr(), &weight, &store)
    }))
}

pub(super) fn winograd(kernel: &'static Kernel, dtype: DType) -> Vec<Bench> {
    let form = |shape: &Conv| expected(shape, DType::F32, DType::F32, Keep::Packed);
    let suited = convolutions().into_iter().filter(|shape| form(shape) != Algorithm::Direct);
    let bench = |shape| conv_bench(shape, dtype, move || start_winograd(kernel, dtype, shape, form(&shape).tile()));
    suited.map(bench).collect()
}

fn start_winograd(kernel: &'static Kernel, dtype: DType, shape: Conv, tile: usize) -> Result<Run, KernelError> {
    let pool = Pool::global();
    let [x, w, bias, mut y] = conv_operands(&shape, dtype);
    let room = Room::Ample;
    let mut memory = Buffer::zeroed(DType::U8, work_bytes_of(kernel, &shape, tile, room));
    Ok(Box::new(move || {
        let weight = Weight::contiguous(w.ptr(), dtype, &shape);
        let work = Work { ptr: memory.ptr_mut(), room };
        let store = StoreEpilogue::new(y.ptr_mut(), dtype, shape.out_channels as isize).with_bias(bias.ptr(), dtype);
        // SAFETY: dense buffers of the sizes that `shape` says.
        unsafe { winograd_with(kernel, pool, &shape, (x.ptr(), dtype).into(), &weight, tile, work, &store) }
    }))
}

pub(super) fn attention(isa: Isa, dtype: DType) -> Vec<Bench> {
    attention_of(of_form(isa, Form::F32), isa, dtype)
}

pub(super) fn attention_of(kernel: &'static Kernel, isa: Isa, dtype: DType) -> Vec<Bench> {
    let sizes = [(8, 4096, 4096, 40), (8, 4096, 77, 40), (8, 1024, 1024, 80), (8, 256, 256, 160), (1, 4096, 4096, 512)];
    let bench = |(heads, queries, keys, dim)| Bench {
        op: "attention",
        sizes: vec![("heads", heads), ("queries", queries), ("keys", keys), ("dim", dim)],
        flops: 4.0 * (heads * queries * keys * dim) as f64,
        bytes: (2 * heads * (queries + keys) * dim * dtype.size_bytes()) as f64,
        start: Box::new(move || start_attention(kernel, isa, dtype, (heads, queries, keys, dim))),
    };
    sizes.into_iter().map(bench).collect()
}

fn start_attention(
    kernel: &'static Kernel,
    isa: Isa,
    dtype: DType,
    (heads, seq_q, seq_k, dim): (usize, usize, usize, usize),
) -> Result<Run, KernelError> {
    let pool = Pool::global();
    let mut operands =
        [(seq_q, 1), (seq_k, 2), (seq_k, 3), (seq_q, 4)].map(|(n, seed)| Buffer::random(dtype, heads * n * dim, seed));
    let mut scratch = Buffer::zeroed(DType::U8, 0);
    Ok(Box::new(move || {
        let [q, k, v, out] = [0, 1, 2, 3].map(|at: usize| {
            let rows = if at == 1 || at == 2 { seq_k } else { seq_q };
            let strides = [(rows * heads * dim) as isize, dim as isize, (heads * dim) as isize, 1];
            Heads { ptr: operands[at].ptr_mut(), dtype, strides }
        });
        let scale = 1.0 / (dim as f32).sqrt();
        let (kv_heads, dim_v, causal, mask) = (heads, dim, false, None);
        let a = Attention { batch: 1, heads, kv_heads, seq_q, seq_k, dim, dim_v, scale, causal, q, k, v, mask, out };
        let bytes = scratch_bytes_of(kernel, pool, &a);
        if scratch.len_bytes() < bytes {
            scratch = Buffer::zeroed(DType::U8, bytes);
        }
        // SAFETY: the buffers hold the sizes.
        unsafe { attention_with(kernel, pool, isa, &a, (scratch.ptr_mut(), bytes)) }
    }))
}

fn load(dst: u8, operand: u8) -> Instr {
    Instr::Load { dst, src: Source::Memory(operand) }
}

fn prepare(program: &TileProgram, isa: Isa) -> Result<Prepared, KernelError> {
    Prepared::new(program, isa).map_err(|_| KernelError::Shape("a malformed tile program"))
}

pub(super) fn group_norm(isa: Isa, dtype: DType) -> Vec<Bench> {
    let sizes = [(4096, 320), (4096, 640), (1024, 1280), (64, 1280), (65_536, 256), (262_144, 128)];
    let bench = |(pixels, channels)| Bench {
        op: "group_norm_silu",
        sizes: vec![("pixels", pixels), ("channels", channels), ("groups", 32)],
        flops: 0.0,
        bytes: (2 * pixels * channels * dtype.size_bytes()) as f64,
        start: Box::new(move || start_group_norm(isa, dtype, pixels, channels)),
    };
    sizes.into_iter().map(bench).collect()
}

fn start_group_norm(isa: Isa, dtype: DType, pixels: usize, channels: usize) -> Result<Run, KernelError> {
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
    let prepared = prepare(&program, isa)?;
    let (mut x, mut y) = (Buffer::random(dtype, pixels * channels, 5), Buffer::zeroed(dtype, pixels * channels));
    let [gamma, beta] = [6, 7].map(|seed| Buffer::random(dtype, channels, seed));
    let (mut scale, mut shift) = (Buffer::zeroed(DType::F32, channels), Buffer::zeroed(DType::F32, channels));
    Ok(Box::new(move || {
        let space = Space::new(&[1, pixels, channels]);
        let stride = channels as isize;
        let images = Channels {
            ptr: x.ptr(),
            dtype,
            batch: 1,
            pixels,
            channels,
            image_stride: (pixels * channels) as isize,
            pixel_stride: stride,
            channel_stride: 1,
        };
        let vector = |of: &Buffer| ChannelVector { ptr: of.ptr(), dtype };
        let norm = GroupNorm { groups: 32, eps: 1e-5, gamma: vector(&gamma), beta: vector(&beta) };
        let (a, b) = (scale.ptr_mut(), shift.ptr_mut());
        let strides = [stride, 0, 1, 0, 0, 0, 0, 0];
        let loads = [Bound::contiguous(x.ptr_mut(), &space), Bound { ptr: a, strides }, Bound { ptr: b, strides }];
        let stores = [Bound::contiguous(y.ptr_mut(), &space)];
        let pool = Pool::global();
        // SAFETY: the buffers hold the image.
        unsafe { group_norm_apply(pool, isa, &images, &norm, a.cast(), b.cast(), &prepared, &space, &loads, &stores) }
    }))
}

pub(super) fn layer_norm(isa: Isa, dtype: DType) -> Vec<Bench> {
    let sizes = [(4096, 320), (4096, 640), (256, 1280)];
    row_norms(isa, dtype, ("layer_norm", RowNorm::Layer), &sizes)
}

/// Of the heads of Flux's queries and keys, of 4096 and of all 4608 tokens of 24 heads; of its tokens; of T5's.
pub(super) fn rms_norm(isa: Isa, dtype: DType) -> Vec<Bench> {
    let sizes = [(4096, 128), (110_592, 128), (4096, 3072), (512, 4096)];
    row_norms(isa, dtype, ("rms_norm", RowNorm::Rms), &sizes)
}

fn row_norms(isa: Isa, dtype: DType, (op, kind): (&'static str, RowNorm), sizes: &[(usize, usize)]) -> Vec<Bench> {
    let bench = |&(rows, cols): &(usize, usize)| Bench {
        op,
        sizes: vec![("rows", rows), ("cols", cols)],
        flops: 0.0,
        bytes: (2 * rows * cols * dtype.size_bytes()) as f64,
        start: Box::new(move || start_row_norm(isa, dtype, kind, rows, cols)),
    };
    sizes.iter().map(bench).collect()
}

/// With a weight, and where there is a mean with a bias.
fn start_row_norm(isa: Isa, dtype: DType, kind: RowNorm, rows: usize, cols: usize) -> Result<Run, KernelError> {
    let scalar = |at| Instr::Load { dst: 1, src: Source::RowScalar(at) };
    let by = |op| Instr::Binary { dst: 0, op, a: 0, b: 1 };
    let has_mean = kind == RowNorm::Layer;
    let mut instrs = vec![load(0, 0)];
    if has_mean {
        instrs.extend([scalar(0), by(Binary::Sub)]);
    }
    instrs.extend([scalar(1), by(Binary::Mul), load(1, 1), by(Binary::Mul)]);
    if has_mean {
        instrs.extend([load(1, 2), by(Binary::Add)]);
    }
    instrs.push(Instr::Store { src: 0, out: 0 });
    let operands = if has_mean { 3 } else { 2 };
    let program = TileProgram { instrs, loads: vec![dtype; operands], stores: vec![dtype] };
    let prepared = prepare(&program, isa)?;
    let (mut x, mut y) = (Buffer::random(dtype, rows * cols, 6), Buffer::zeroed(dtype, rows * cols));
    let [mut weight, mut bias] = [7, 8].map(|seed| Buffer::random(dtype, cols, seed));
    Ok(Box::new(move || {
        let space = Space::new(&[rows, cols]);
        let bound = Bound::contiguous(x.ptr_mut(), &space);
        let [w, b] = [&mut weight, &mut bias].map(|v| Bound { ptr: v.ptr_mut(), strides: [0, 1, 0, 0, 0, 0, 0, 0] });
        let (loads, stores) = ([bound, w, b], [Bound::contiguous(y.ptr_mut(), &space)]);
        let (pool, input) = (Pool::global(), RowInput { bound, dtype });
        // SAFETY: the buffers hold the space.
        unsafe { row_norm(pool, isa, kind, 1e-5, &input, &prepared, &space, &loads[..operands], &stores) }
    }))
}

pub(super) fn rows_softmax(isa: Isa, dtype: DType) -> Vec<Bench> {
    let bench = |(rows, cols)| Bench {
        op: "softmax",
        sizes: vec![("rows", rows), ("cols", cols)],
        flops: 0.0,
        bytes: (2 * rows * cols * dtype.size_bytes()) as f64,
        start: Box::new(move || {
            let (mut x, mut y) = (Buffer::random(dtype, rows * cols, 7), Buffer::zeroed(dtype, rows * cols));
            Ok(Box::new(move || {
                let matrix = |b: &mut Buffer| softmax::Matrix { ptr: b.ptr_mut(), dtype, row_stride: cols as isize };
                let (from, to) = (matrix(&mut x), matrix(&mut y));
                // SAFETY: the buffers hold the matrices.
                unsafe { softmax(Pool::global(), isa, from, to, rows, cols) }
            }) as Run)
        }),
    };
    [(32_768, 77), (4096, 4096)].into_iter().map(bench).collect()
}

pub(super) fn tile(isa: Isa, dtype: DType) -> Vec<Bench> {
    let unary = |op| vec![load(0, 0), Instr::Unary { dst: 0, op, a: 0 }, Instr::Store { src: 0, out: 0 }];
    let binary = |first: Option<Unary>| {
        let gate = first.map(|op| Instr::Unary { dst: 1, op, a: 1 });
        let op = if first.is_some() { Binary::Mul } else { Binary::Add };
        let end = [Instr::Binary { dst: 0, op, a: 0, b: 1 }, Instr::Store { src: 0, out: 0 }];
        [load(0, 0), load(1, 1)].into_iter().chain(gate).chain(end).collect::<Vec<_>>()
    };
    let programs = [
        ("add", binary(None), 2),
        ("silu", unary(Unary::Silu), 1),
        ("gelu", unary(Unary::Gelu), 1),
        ("gelu_tanh", unary(Unary::GeluTanh), 1),
        ("geglu", binary(Some(Unary::Gelu)), 2),
    ];
    let of_program = |(op, instrs, inputs): (&'static str, Vec<Instr>, usize)| {
        [(512, 320), (4096, 320), (4096, 2560)].map(move |(rows, cols)| {
            let program = TileProgram { instrs: instrs.clone(), loads: vec![dtype; inputs], stores: vec![dtype] };
            Bench {
                op,
                sizes: vec![("rows", rows), ("cols", cols)],
                flops: 0.0,
                bytes: ((inputs + 1) * rows * cols * dtype.size_bytes()) as f64,
                start: Box::new(move || start_tile(isa, &program, rows, cols)),
            }
        })
    };
    programs.into_iter().flat_map(of_program).collect()
}

fn start_tile(isa: Isa, program: &TileProgram, rows: usize, cols: usize) -> Result<Run, KernelError> {
    let prepared = prepare(program, isa)?;
    let mut inputs: Vec<Buffer> =
        program.loads.iter().zip(1..).map(|(dtype, seed)| Buffer::random(*dtype, rows * cols, seed)).collect();
    let mut y = Buffer::zeroed(program.stores[0], rows * cols);
    Ok(Box::new(move || {
        let space = Space::new(&[rows, cols]);
        let loads: Vec<Bound> = inputs.iter_mut().map(|b| Bound::contiguous(b.ptr_mut(), &space)).collect();
        let stores = [Bound::contiguous(y.ptr_mut(), &space)];
        // SAFETY: the buffers hold the space.
        unsafe { run_loop(Pool::global(), &prepared, &space, &loads, &stores) };
        Ok(())
    }))
}
