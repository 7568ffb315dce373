//! Speed of attention, tile programs, norms and layout changes on this machine: `cargo run --release --example
//! bench_tiles -p oxidiff-kernels [threads]`. Best of several runs each.

use oxidiff_kernels::cpu::attention::{Attention, Heads, attention_in, scratch_bytes};
use oxidiff_kernels::cpu::copy::{Side, copy};
use oxidiff_kernels::cpu::norm::{RowInput, RowNorm, row_norm};
use oxidiff_kernels::cpu::tile_exec::{Prepared, run_loop};
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::tile::{Binary, Bound, Instr, Source, Space, TileProgram, Unary};
use std::time::Instant;

fn best(mut run: impl FnMut()) -> f64 {
    run();
    let start = Instant::now();
    let mut best = f64::INFINITY;
    while start.elapsed().as_secs_f64() < 0.5 {
        let one = Instant::now();
        run();
        best = best.min(one.elapsed().as_secs_f64());
    }
    best
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i * 7919 % 1000) as f32 / 500.0 - 1.0).collect()
}

fn bench_attention(pool: &Pool, isa: Isa, heads: usize, seq_q: usize, seq_k: usize, dim: usize) {
    let [mut q, mut k, mut v, mut out] = [seq_q, seq_k, seq_k, seq_q].map(|n| values(heads * n * dim));
    let of = |x: &mut Vec<f32>, n: usize| Heads {
        ptr: x.as_mut_ptr().cast(),
        dtype: DType::F32,
        strides: [(n * heads * dim) as isize, dim as isize, (heads * dim) as isize, 1],
    };
    let a = Attention {
        batch: 1,
        heads,
        kv_heads: heads,
        seq_q,
        seq_k,
        dim,
        dim_v: dim,
        scale: 1.0 / (dim as f32).sqrt(),
        causal: false,
        q: of(&mut q, seq_q),
        k: of(&mut k, seq_k),
        v: of(&mut v, seq_k),
        mask: None,
        out: of(&mut out, seq_q),
    };
    let mut scratch = vec![0u8; scratch_bytes(pool, isa, &a)];
    // SAFETY: the buffers hold the sizes.
    let t = best(|| unsafe { attention_in(pool, isa, &a, scratch.as_mut_ptr()).expect("a supported attention") });
    let flops = 4.0 * (heads * seq_q * seq_k * dim) as f64;
    println!(
        "attention {heads} heads {seq_q}x{seq_k} d{dim} {}: {:.2} ms, {:.0} GFLOP/s",
        isa.name(),
        t * 1e3,
        flops / t / 1e9
    );
}

fn bench_loop(pool: &Pool, isa: Isa, name: &str, middle: Instr, rows: usize, cols: usize) {
    let [mut x, mut y, mut z] = [(); 3].map(|_| values(rows * cols));
    let load = |dst| Instr::Load { dst, src: Source::Memory(dst) };
    let program = TileProgram {
        instrs: vec![load(0), load(1), middle, Instr::Store { src: 0, out: 0 }],
        loads: vec![DType::F32; 2],
        stores: vec![DType::F32],
    };
    let prepared = Prepared::new(&program, isa).expect("a well-formed program");
    let space = Space::new(&[rows, cols]);
    let [a, b, c] = [&mut x, &mut y, &mut z].map(|v| Bound::contiguous(v.as_mut_ptr().cast(), &space));
    // SAFETY: the buffers hold the space.
    let t = best(|| unsafe { run_loop(pool, &prepared, &space, &[a, b], &[c]) });
    let operands = if matches!(middle, Instr::Binary { .. }) { 3 } else { 2 };
    println!(
        "{name} {rows}x{cols} {}: {:.1} us, {:.1} GB/s",
        isa.name(),
        t * 1e6,
        (operands * rows * cols * 4) as f64 / t / 1e9
    );
}

fn bench_layer_norm(pool: &Pool, isa: Isa, rows: usize, cols: usize) {
    let (mut x, mut y) = (values(rows * cols), values(rows * cols));
    let program = TileProgram {
        instrs: vec![
            Instr::Load { dst: 0, src: Source::Memory(0) },
            Instr::Load { dst: 1, src: Source::RowScalar(1) },
            Instr::Load { dst: 2, src: Source::RowScalar(2) },
            Instr::Fma { dst: 0, a: 0, b: 1, c: 2 },
            Instr::Store { src: 0, out: 0 },
        ],
        loads: vec![DType::F32],
        stores: vec![DType::F32],
    };
    let prepared = Prepared::new(&program, isa).expect("a well-formed program");
    let space = Space::new(&[rows, cols]);
    let [a, b] = [&mut x, &mut y].map(|v| Bound::contiguous(v.as_mut_ptr().cast(), &space));
    let input = RowInput { bound: a, dtype: DType::F32 };
    // SAFETY: the buffers hold the space.
    let t = best(|| unsafe {
        row_norm(pool, isa, RowNorm::Layer, 1e-5, &input, &prepared, &space, &[a], &[b]).expect("contiguous rows");
    });
    println!(
        "layer_norm {rows}x{cols} {}: {:.1} us, {:.1} GB/s",
        isa.name(),
        t * 1e6,
        (2 * rows * cols * 4) as f64 / t / 1e9
    );
}

fn bench_layout(pool: &Pool, isa: Isa, channels: usize, pixels: usize) {
    let (mut x, mut y) = (values(channels * pixels), values(channels * pixels));
    let (planes, last) = ([pixels as isize, 1], [1, channels as isize]);
    let mut side = |strides| Side { ptr: x.as_mut_ptr().cast(), dtype: DType::F32, strides };
    let (from, back) = (side(&planes), side(&last));
    let mut side = |strides| Side { ptr: y.as_mut_ptr().cast(), dtype: DType::F32, strides };
    let (to, out) = (side(&last), side(&planes));
    for (name, src, dst) in [("NCHW to NHWC", from, to), ("NHWC to NCHW", back, out)] {
        // SAFETY: the buffers hold the planes.
        let t = best(|| unsafe { copy(pool, isa, &[channels, pixels], src, dst) });
        let bytes = (2 * channels * pixels * 4) as f64;
        println!("{name} {channels}x{pixels} {}: {:.1} us, {:.1} GB/s", isa.name(), t * 1e6, bytes / t / 1e9);
    }
}

fn main() {
    let threads = std::env::args().nth(1).and_then(|n| n.parse().ok());
    let pool = Pool::new(threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, |n| n.get())));
    println!("{} threads", pool.threads());
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for (heads, q, k, d) in [(8, 4096, 77, 40), (8, 1024, 1024, 80), (10, 1024, 1024, 64), (8, 1100, 1100, 128)] {
            bench_attention(&pool, isa, heads, q, k, d);
        }
        for (rows, cols) in [(1024, 320), (4096, 2560)] {
            bench_loop(&pool, isa, "add", Instr::Binary { dst: 0, op: Binary::Add, a: 0, b: 1 }, rows, cols);
            for op in [Unary::Exp, Unary::Silu, Unary::Gelu, Unary::GeluTanh, Unary::Tanh] {
                bench_loop(&pool, isa, &format!("{op:?}"), Instr::Unary { dst: 0, op, a: 0 }, rows, cols);
            }
        }
        bench_layer_norm(&pool, isa, 4096, 320);
        bench_layer_norm(&pool, isa, 1024, 1280);
        bench_layout(&pool, isa, 320, 4096);
        bench_layout(&pool, isa, 3, 512 * 512);
    }
}
