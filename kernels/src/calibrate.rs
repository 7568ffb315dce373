//! What this machine does at most, measured: rates of arithmetic from registers, rates of memory.
//!
//! [`bf16_pairs_win`] decides between two micro-kernels; it takes well under a millisecond on one core, once per process.
//! [`ceilings`] is what a profile or a benchmark divides by; it takes about 50 ms, once per instruction set and number of
//! threads, when it is first asked for. Both take the best of several short runs, so that other work on the machine
//! makes them longer, not wrong.

use std::hint::black_box;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

#[cfg(target_arch = "x86_64")]
use crate::cpu::{gemm_amx, gemm_kernel};
use crate::fork;
use crate::isa::{Isa, amx, features};
use crate::pool::Pool;

/// Rates of all threads together; 0 where the processor has no such instruction.
#[derive(Clone, Copy, Debug)]
pub struct Ceilings {
    /// The instruction set they hold for.
    pub isa: Isa,
    /// Threads that worked together.
    pub threads: usize,
    /// f32 multiply-adds, two operations each, per second.
    pub f32_flops: f64,
    /// The same of `VDPBF16PS`, four operations a lane.
    pub bf16_dot_flops: f64,
    /// The same of f16 arithmetic (AVX512-FP16).
    pub f16_flops: f64,
    /// The same of `VPDPBUSD` over bytes, eight operations a lane.
    pub int8_ops: f64,
    /// The same of `TDPBF16PS` (AMX), 16 x 16 lanes of 64 operations.
    pub bf16_amx_flops: f64,
    /// The same of `TDPFP16PS` (AMX).
    pub f16_amx_flops: f64,
    /// The same of `TDPBUSD` (AMX), 16 x 16 lanes of 128 operations.
    pub int8_amx_ops: f64,
    /// A working set that no cache holds, and one that only the last level does.
    pub memory: [Bandwidth; 2],
}

/// Bytes per second, read and written bytes together.
#[derive(Clone, Copy, Debug)]
pub struct Bandwidth {
    /// Size of the working set.
    pub working_set: usize,
    /// Reading.
    pub read: f64,
    /// Copying.
    pub copy: f64,
    /// Copying with stores that pass the caches by.
    pub stream_copy: f64,
}

impl Ceilings {
    /// The better copy rate of the smallest measured working set that holds as many bytes.
    pub fn bytes_per_second(&self, bytes: usize) -> f64 {
        let [memory, cache] = self.memory;
        let at = if bytes <= cache.working_set { cache } else { memory };
        at.copy.max(at.stream_copy)
    }
}

const MEMORY_BYTES: usize = 64 << 20;
const CACHE_BYTES: usize = 16 << 20;

/// The ceilings for an instruction set and the pool's present number of threads.
pub fn ceilings(pool: &Pool, isa: Isa) -> Ceilings {
    static KNOWN: fork::Mutex<Vec<Ceilings>> = fork::Mutex::new(Vec::new());
    let (isa, threads) = (isa.clamp(), pool.threads());
    let mut known = KNOWN.lock();
    if let Some(found) = known.iter().find(|c| (c.isa, c.threads) == (isa, threads)) {
        return *found;
    }
    let rate = |form: Form| if form.is_available(isa) { together(pool, isa, form) } else { 0.0 };
    let mut buffer: Vec<u8> = Vec::new();
    let size = if buffer.try_reserve_exact(MEMORY_BYTES).is_ok() { MEMORY_BYTES } else { 0 };
    let start = buffer.as_mut_ptr();
    let found = Ceilings {
        isa,
        threads,
        f32_flops: rate(Form::F32),
        bf16_dot_flops: rate(Form::Bf16Dot),
        f16_flops: rate(Form::F16),
        int8_ops: rate(Form::Int8Dot),
        bf16_amx_flops: rate(Form::Bf16Amx),
        f16_amx_flops: rate(Form::F16Amx),
        int8_amx_ops: rate(Form::Int8Amx),
        // SAFETY: the buffer has that capacity.
        memory: [size, CACHE_BYTES.min(size)].map(|bytes| unsafe { bandwidth(pool, isa, start, bytes) }),
    };
    known.push(found);
    found
}

/// Whether products of bf16 pairs are faster than f32 ones. With AMX they are; `VDPBF16PS` issues at the rate of an f32
/// multiply-add on some processors and at half or a quarter of it on others.
pub fn bf16_pairs_win() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    // Asked for by tasks of the pool too, which must not wait at the gate: whoever started them has asked before.
    if let Some(&answer) = ANSWER.get() {
        return answer;
    }
    let measure = || {
        if Form::Bf16Amx.is_available(Isa::Avx512) || !Form::Bf16Dot.is_available(Isa::Avx512) {
            return Form::Bf16Amx.is_available(Isa::Avx512);
        }
        let rates = [Form::F32, Form::Bf16Dot].map(|form| {
            let seconds = best(Duration::ZERO, || {
                arithmetic(Isa::Avx512, form, 2_000);
            });
            form.operations(Isa::Avx512, 2_000) / seconds
        });
        rates[1] > 1.2 * rates[0]
    };
    fork::shielded(|| *ANSWER.get_or_init(measure))
}

/// Seconds of the shortest run of those that fit into a span of time, three at least. A run should be much shorter than
/// the scheduler's slice, so that some meet no other work.
fn best(span: Duration, mut run: impl FnMut()) -> f64 {
    let (begin, mut shortest, mut runs) = (Instant::now(), f64::INFINITY, 0);
    while runs < 3 || begin.elapsed() < span {
        let start = Instant::now();
        run();
        shortest = start.elapsed().as_secs_f64().min(shortest);
        runs += 1;
    }
    shortest
}

/// An instruction whose rate is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A multiply-add of f32.
    F32,
    /// `VDPBF16PS`.
    Bf16Dot,
    /// A multiply-add of f16 (AVX512-FP16).
    F16,
    /// `VPDPBUSD`.
    Int8Dot,
    /// `TDPBF16PS` (AMX).
    Bf16Amx,
    /// `TDPFP16PS` (AMX).
    F16Amx,
    /// `TDPBUSD` (AMX).
    Int8Amx,
}

/// Independent sums of a round: enough to hide the latency of every form.
const SUMS: usize = 16;

impl Form {
    fn is_available(self, isa: Isa) -> bool {
        isa.is_available()
            && match self {
                Form::F32 => true,
                Form::Bf16Dot => isa == Isa::Avx512 && features().avx512_bf16,
                Form::F16 => isa == Isa::Avx512 && features().avx512_fp16,
                Form::Int8Dot => isa == Isa::Avx512 && features().avx512_vnni,
                Form::Bf16Amx => isa == Isa::Avx512 && amx().bf16,
                Form::F16Amx => isa == Isa::Avx512 && amx().f16,
                Form::Int8Amx => isa == Isa::Avx512 && amx().int8,
            }
    }

    /// Operations of so many rounds.
    pub fn operations(self, isa: Isa, rounds: usize) -> f64 {
        let lanes = if isa == Isa::Avx512 { 16 } else { 8 };
        let per_lane = match self {
            Form::F32 => 2,
            Form::Bf16Dot | Form::F16 => 4,
            Form::Int8Dot => 8,
            // A round of AMX is four instructions of 16 x 16 lanes, sixteen units each.
            Form::Bf16Amx | Form::F16Amx => 4 * 16 * 16 * 4 / SUMS,
            Form::Int8Amx => 4 * 16 * 16 * 8 / SUMS,
        };
        (rounds * SUMS * lanes * per_lane) as f64
    }

    /// Rounds that take about a tenth of a millisecond: of vectors, two instructions a cycle; a round of AMX takes 64 cycles.
    pub fn rounds(self) -> usize {
        match self {
            Form::Bf16Amx | Form::F16Amx | Form::Int8Amx => 5_000,
            _ => 40_000,
        }
    }
}

/// Operations per second of all threads: the sum of what each reaches by itself in its best tenth of a millisecond, which
/// other work does not meet.
fn together(pool: &Pool, isa: Isa, form: Form) -> f64 {
    let rounds = form.rounds();
    let total = Mutex::new(0.0);
    pool.run(pool.threads(), |_, _| {
        let seconds = best(Duration::from_millis(3), || arithmetic(isa, form, rounds));
        *total.lock().unwrap_or_else(PoisonError::into_inner) += form.operations(isa, rounds) / seconds;
    });
    total.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Runs so many rounds of an available form.
fn arithmetic(isa: Isa, form: Form, rounds: usize) {
    if isa < Isa::Avx2 {
        plain_f32(rounds);
        return;
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller asked `Form::is_available`.
    unsafe {
        match (form, isa) {
            (Form::F32, Isa::Avx512) => x86::f32_512(rounds),
            (Form::F32, _) => x86::f32_256(rounds),
            (Form::Bf16Dot, _) => x86::bf16_dot(rounds),
            (Form::F16, _) => x86::f16(rounds),
            (Form::Int8Dot, _) => x86::int8_dot(rounds),
            (Form::Bf16Amx, _) => gemm_amx::multiply_registers(gemm_kernel::Form::Bf16Pairs, rounds),
            (Form::F16Amx, _) => gemm_amx::multiply_registers(gemm_kernel::Form::F16Pairs, rounds),
            (Form::Int8Amx, _) => gemm_amx::multiply_registers(gemm_kernel::Form::Int8Quads, rounds),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    black_box(form);
}

/// Rounds of f32 as the compiler vectorises plain Rust: a multiplication and an addition.
fn plain_f32(rounds: usize) {
    // Twelve of the sixteen registers that processors have at least.
    let (mut sums, x) = ([[0.5f32; 8]; 6], black_box(0.999f32));
    for _ in 0..rounds * SUMS / 6 {
        for lane in sums.as_flattened_mut() {
            *lane = *lane * x + x;
        }
    }
    black_box(sums);
}

/// Bytes that are timed together.
const PIECE: usize = 1 << 20;

/// The sum of what the threads reach in the median piece of memory, each streaming through a part of its own, so that a
/// thread that is held up for a while does not count.
///
/// # Safety
/// `start` must be valid for writes of `bytes`.
unsafe fn bandwidth(pool: &Pool, isa: Isa, start: *mut u8, bytes: usize) -> Bandwidth {
    let threads = pool.threads();
    let pieces = bytes / 2 / threads / PIECE;
    let (base, half) = (start as usize, pieces * PIECE);
    let part_of = |part: usize| (base + 2 * part * half) as *mut u8;
    pool.run(threads, |part, _| {
        // SAFETY: parts are disjoint and inside the buffer; their pages exist from here on.
        unsafe { part_of(part).write_bytes(1, 2 * half) };
    });
    let measure = |how: Pass| {
        let total = Mutex::new(0.0);
        pool.run(threads, |part, _| {
            let (begin, mut seconds) = (Instant::now(), Vec::new());
            while pieces > 0 && (seconds.len() < pieces || begin.elapsed() < Duration::from_millis(4)) {
                let from = part_of(part).wrapping_add(seconds.len() % pieces * PIECE);
                let start = Instant::now();
                // SAFETY: pieces of both halves of the part.
                unsafe { pass(isa, how, from, from.wrapping_add(half), PIECE) };
                seconds.push(start.elapsed().as_secs_f64());
            }
            seconds.sort_by(f64::total_cmp);
            let median = seconds.get(seconds.len() / 2).map_or(0.0, |&seconds| (2 * PIECE) as f64 / seconds);
            *total.lock().unwrap_or_else(PoisonError::into_inner) += median;
        });
        total.into_inner().unwrap_or_else(PoisonError::into_inner)
    };
    Bandwidth {
        working_set: 2 * half * threads,
        read: measure(Pass::Read),
        copy: measure(Pass::Copy),
        stream_copy: measure(Pass::StreamCopy),
    }
}

/// What is done with two halves of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pass {
    Read,
    Copy,
    StreamCopy,
}

/// # Safety
/// Both halves must be valid for `half` bytes, page-aligned apart; the level must be available.
unsafe fn pass(isa: Isa, how: Pass, from: *mut u8, to: *mut u8, half: usize) {
    // SAFETY: forwarded.
    unsafe {
        match (isa, how) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx2, Pass::Read) => {
                x86::read(from, half);
                x86::read(to, half);
            }
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx2, Pass::StreamCopy) => x86::stream_copy(from, to, half),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512 | Isa::Avx2, Pass::Copy) => x86::copy(from, to, half),
            (_, Pass::Read) => {
                for half in [std::slice::from_raw_parts(from, half), std::slice::from_raw_parts(to, half)] {
                    black_box(half.iter().fold(0u8, |all, byte| all | byte));
                }
            }
            _ => std::ptr::copy_nonoverlapping(from, to, half),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::SUMS;
    use std::arch::asm;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    #[target_feature(enable = "avx512f")]
    pub fn f32_512(rounds: usize) {
        let (mut sums, x) = ([_mm512_set1_ps(0.5); SUMS], _mm512_set1_ps(black_box(0.999)));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn f32_256(rounds: usize) {
        // Sixteen registers: twelve sums a step, and as many steps as make the same number.
        let (mut sums, x) = ([_mm256_set1_ps(0.5); 12], _mm256_set1_ps(black_box(0.999)));
        for _ in 0..rounds * SUMS / 12 {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    pub fn bf16_dot(rounds: usize) {
        let mut sums = [_mm512_set1_ps(0.0); SUMS];
        let bits = _mm512_set1_epi32(black_box(0x3f80_3f80));
        // SAFETY: both types are 512 plain bits.
        let x = unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) };
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// AVX512-FP16 must be available.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn f16(rounds: usize) {
        let mut sums = [_mm512_set1_ps(0.0); SUMS];
        let x = _mm512_set1_epi32(black_box(0));
        for _ in 0..rounds {
            for sum in &mut sums {
                // SAFETY: arithmetic on registers.
                unsafe {
                    asm!("vfmadd231ph {0}, {1}, {1}", inout(zmm_reg) *sum, in(zmm_reg) x, options(pure, nomem, nostack));
                }
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn int8_dot(rounds: usize) {
        let (mut sums, x) = ([_mm512_setzero_si512(); SUMS], _mm512_set1_epi8(black_box(3)));
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, x, x);
            }
        }
        black_box(sums);
    }

    /// Four vectors at a time; what is left of the last 128 bytes is left out.
    macro_rules! lines {
        ($bytes:ident, $from:ident, |$at:ident| $body:expr) => {
            for $at in (0..$bytes / 128 * 128).step_by(32) {
                $body
            }
        };
    }

    /// # Safety
    /// `from` must hold `bytes`, 32-byte aligned.
    #[target_feature(enable = "avx2")]
    pub unsafe fn read(from: *const u8, bytes: usize) {
        let mut all = [_mm256_setzero_si256(); 4];
        for at in (0..bytes / 128 * 128).step_by(128) {
            for (part, all) in all.iter_mut().enumerate() {
                // SAFETY: inside the bytes.
                *all = unsafe { _mm256_or_si256(*all, _mm256_loadu_si256(from.add(at + 32 * part).cast())) };
            }
        }
        black_box(all);
    }

    /// # Safety
    /// Both must hold `bytes`, 32-byte aligned.
    #[target_feature(enable = "avx2")]
    pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
        // SAFETY: inside the bytes.
        lines!(bytes, from, |at| unsafe {
            _mm256_storeu_si256(to.add(at).cast(), _mm256_loadu_si256(from.add(at).cast()));
        });
    }

    /// # Safety
    /// Both must hold `bytes`, 32-byte aligned.
    #[target_feature(enable = "avx2")]
    pub unsafe fn stream_copy(from: *const u8, to: *mut u8, bytes: usize) {
        let skip = to.align_offset(32);
        let (from, to, bytes) = (from.wrapping_add(skip), to.wrapping_add(skip), bytes.saturating_sub(skip));
        // SAFETY: inside the bytes, and aligned from here on.
        lines!(bytes, from, |at| unsafe {
            _mm256_stream_si256(to.add(at).cast(), _mm256_loadu_si256(from.add(at).cast()));
        });
        _mm_sfence();
    }
}
