//! Speed of the contraction kernels on the shapes of diffusion models, beside this machine's measured ceiling.
//!
//! `cargo run --release -p oxidiff-kernels --example bench_kernels -- [filter] [--isa avx2] [--threads 2]`
//!
//! One line per shape and element type: median and best time of several runs, the best in GFLOP/s, and its share of the
//! rate at which all threads together execute f32 multiply-adds from registers. On a machine that does other work at the
//! same time compare best runs with `--threads 1`, which counts processor time.

use std::time::{Duration, Instant};

use oxidiff_kernels::cpu::conv::{Conv, Weight, conv, pack_conv_weight};
use oxidiff_kernels::cpu::gemm::{Operand, gemm};
use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
use oxidiff_kernels::cpu::pack::{Matrix, pack_b, packed_bytes};
use oxidiff_kernels::cpu::verify::Buffer;
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;

/// m, n, k: linear layers of SD1.5, SDXL and Flux-like models.
const LINEAR: [(usize, usize, usize); 16] = [
    (4096, 320, 320),
    (4096, 2560, 320),
    (4096, 320, 1280),
    (1024, 640, 640),
    (1024, 5120, 640),
    (1024, 640, 2560),
    (256, 1280, 1280),
    (256, 10240, 1280),
    (256, 1280, 5120),
    (64, 1280, 1280),
    (77, 768, 768),
    (77, 320, 768),
    (77, 1280, 768),
    (2, 1280, 320),
    (2, 1280, 1280),
    (1, 3072, 3072),
];

fn convolutions() -> Vec<Conv> {
    let same = |size, ic, oc| Conv::new_2d(1, [size, size], ic, oc, [3, 3]).padding([0, 1, 1]);
    vec![
        same(64, 4, 320),
        same(64, 320, 320),
        same(64, 640, 320),
        same(64, 320, 320).stride([1, 2, 2]),
        same(32, 640, 640),
        same(32, 1280, 640),
        same(16, 1280, 1280),
        same(16, 2560, 1280),
        same(8, 1280, 1280),
        same(64, 320, 4),
        same(64, 512, 512),
        same(128, 512, 512),
        same(256, 512, 256),
        same(256, 256, 256),
        same(512, 128, 128),
        same(512, 128, 3),
        same(32, 512, 512).upsample([1, 2, 2]),
        Conv::new_2d(1, [64, 64], 320, 320, [1, 1]),
        Conv::new_2d(1, [64, 64], 960, 320, [1, 1]),
        same(64, 320, 320).groups(320),
    ]
}

struct Options {
    filter: String,
    isa: Isa,
    threads: usize,
}

fn main() {
    let options = options();
    let pool = Pool::global();
    pool.set_threads(options.threads);
    let peak = peak_gflops(pool, options.isa);
    println!("{} thread(s), {}, f32 multiply-add peak {peak:.0} GFLOP/s", pool.threads(), options.isa.name());
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (m, n, k) in LINEAR {
            let flops = 2.0 * (m * n * k) as f64;
            for prepacked in [true, false] {
                let how = if prepacked { "packed" } else { "strided" };
                let name = format!("linear {dtype:?} {m}x{n}x{k} {how}");
                if name.contains(&options.filter) {
                    report(&name, flops, peak, bench_linear(pool, options.isa, dtype, (m, n, k), prepacked));
                }
            }
        }
        for shape in convolutions() {
            let [_, height, width] = shape.input;
            let (ic, oc, [_, kh, kw]) = (shape.in_channels, shape.out_channels, shape.kernel);
            let stride = shape.stride[2];
            let name = format!(
                "conv {dtype:?} {ic}->{oc} {kh}x{kw} @{height}x{width} stride {stride} groups {} up {}",
                shape.groups, shape.upsample[2]
            );
            if name.contains(&options.filter) {
                let flops = 2.0 * (shape.rows() * oc * shape.terms()) as f64;
                report(&name, flops, peak, bench_conv(pool, options.isa, dtype, &shape));
            }
        }
    }
}

fn options() -> Options {
    let mut options = Options { filter: String::new(), isa: Isa::detect(), threads: Pool::global().threads() };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--isa" => options.isa = arguments.next().and_then(|name| Isa::parse(&name)).expect("portable|avx2|avx512"),
            "--threads" => options.threads = arguments.next().and_then(|n| n.parse().ok()).expect("a number"),
            _ => options.filter = argument,
        }
    }
    options
}

fn report(name: &str, flops: f64, peak: f64, times: [Duration; 2]) {
    let [median, best] = times.map(|time| time.as_secs_f64() * 1e3);
    let rate = flops / best / 1e6;
    let share = if peak > 0.0 { 100.0 * rate / peak } else { 0.0 };
    println!("{name:58} {median:>9.3} ms {best:>9.3} ms {rate:>6.0} GFLOP/s {share:>4.0} %");
}

/// Processor time of this thread, so that a run on one thread is measured as if the machine were idle.
#[cfg(target_os = "linux")]
fn thread_time() -> Duration {
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanoseconds: i64,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut Timespec) -> i32;
    }
    const THREAD_CPUTIME: i32 = 3;
    let mut time = Timespec { seconds: 0, nanoseconds: 0 };
    // SAFETY: the structure has the layout of a 64-bit `timespec`.
    unsafe { clock_gettime(THREAD_CPUTIME, &mut time) };
    Duration::new(time.seconds as u64, time.nanoseconds as u32)
}

fn now(origin: Instant) -> Duration {
    #[cfg(target_os = "linux")]
    if Pool::global().threads() == 1 {
        return thread_time();
    }
    origin.elapsed()
}

/// Median and best of at least five runs and a quarter of a second.
fn measure(mut run: impl FnMut()) -> [Duration; 2] {
    run();
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || (start.elapsed() < Duration::from_millis(250) && times.len() < 200) {
        let begin = now(start);
        run();
        times.push(now(start) - begin);
    }
    times.sort();
    [times[times.len() / 2], times[0]]
}

fn bench_linear(
    pool: &Pool,
    isa: Isa,
    dtype: DType,
    (m, n, k): (usize, usize, usize),
    prepacked: bool,
) -> [Duration; 2] {
    let (a, w) = (Buffer::random(dtype, m * k, 1), Buffer::random(dtype, n * k, 2));
    let mut c = Buffer::zeroed(dtype, m * n);
    let mut memory = Buffer::zeroed(DType::U8, packed_bytes(n, k, dtype, isa));
    let (left, right) = (Matrix::row_major(a.ptr(), dtype, k), Matrix::row_major(w.ptr(), dtype, k));
    let bias = Buffer::random(dtype, n, 3);
    let store = StoreEpilogue::new(c.ptr_mut(), dtype, n as isize).with_bias(bias.ptr(), dtype);
    // SAFETY: dense buffers of the sizes named.
    unsafe {
        let packed = Operand::Packed(pack_b(pool, isa, n, k, &right, memory.ptr_mut()));
        let operand = if prepacked { packed } else { Operand::Strided(right) };
        measure(|| gemm(pool, isa, m, n, k, &left, &operand, &store).expect("scratch memory"))
    }
}

fn bench_conv(pool: &Pool, isa: Isa, dtype: DType, shape: &Conv) -> [Duration; 2] {
    let x = Buffer::random(dtype, shape.batch * shape.strides[0] as usize, 1);
    let w = Buffer::random(dtype, shape.out_channels * shape.terms(), 2);
    let mut y = Buffer::zeroed(dtype, shape.rows() * shape.out_channels);
    let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(dtype, isa));
    let bias = Buffer::random(dtype, shape.out_channels, 3);
    let store = StoreEpilogue::new(y.ptr_mut(), dtype, shape.out_channels as isize).with_bias(bias.ptr(), dtype);
    // SAFETY: dense buffers of the sizes that `shape` says.
    unsafe {
        let weight = Weight::contiguous(w.ptr(), dtype, shape);
        let packed = pack_conv_weight(pool, isa, shape, &weight, memory.ptr_mut());
        measure(|| conv(pool, isa, shape, x.ptr(), dtype, &packed, &store).expect("scratch memory"))
    }
}

/// Rate of f32 multiply-adds that never leave the registers, all threads together; 0 where only the compiler knows.
fn peak_gflops(pool: &Pool, isa: Isa) -> f64 {
    const ROUNDS: usize = 400_000;
    let threads = pool.threads();
    let lanes = match isa.clamp() {
        Isa::Avx512 => 16,
        Isa::Avx2 => 8,
        Isa::Portable => 0,
    };
    let [_, time] = measure(|| {
        pool.run(threads, |_, _| {
            let sum = match isa.clamp() {
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `clamp` gives an available level.
                Isa::Avx512 => unsafe { peak::avx512(ROUNDS) },
                #[cfg(target_arch = "x86_64")]
                // SAFETY: as above.
                Isa::Avx2 => unsafe { peak::avx2(ROUNDS) },
                _ => 0.0,
            };
            std::hint::black_box(sum);
        })
    });
    (threads * ROUNDS * 12 * lanes * 2) as f64 / time.as_secs_f64() / 1e9
}

#[cfg(target_arch = "x86_64")]
mod peak {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub fn avx512(rounds: usize) -> f32 {
        let mut sums = [_mm512_set1_ps(0.5); 12];
        let x = _mm512_set1_ps(std::hint::black_box(0.999));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, x, x);
            }
        }
        sums.iter().map(|&sum| _mm512_reduce_add_ps(sum)).sum()
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn avx2(rounds: usize) -> f32 {
        let mut sums = [_mm256_set1_ps(0.5); 12];
        let x = _mm256_set1_ps(std::hint::black_box(0.999));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, x, x);
            }
        }
        sums.iter().map(|&sum| _mm256_cvtss_f32(sum)).sum()
    }
}
