//! What the machine offers: its instruction sets and caches, the pool of its threads, what it does at most.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use oxidiff_kernels::calibrate::*;
use oxidiff_kernels::isa::*;
use oxidiff_kernels::pool::*;

#[test]
fn names_round_trip() {
    for isa in Isa::ALL {
        assert_eq!(Isa::parse(isa.name()), Some(isa));
    }
    assert_eq!(Isa::parse("avx1024"), None);
}

#[test]
fn clamp_never_exceeds_the_machine() {
    for isa in Isa::ALL {
        assert!(isa.clamp() <= isa && isa.clamp().is_available());
    }
    assert!(Isa::Portable.is_available());
}

#[cfg(target_arch = "x86_64")]
#[test]
fn amx_needs_palettes_and_saved_tiles() {
    use std::arch::x86_64::CpuidResult;
    let none = CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };
    // A server's answers, registers and rows of its palette given.
    let answer = move |last: u32, palettes: u32, ebx: u32, rows: u32, edx: u32| {
        move |leaf: u32, part: u32| match (leaf, part) {
            (0, _) => CpuidResult { eax: last, ..none },
            (7, 0) => CpuidResult { edx, ..none },
            (0x1d, 0) => CpuidResult { eax: palettes, ..none },
            (0x1d, 1) => CpuidResult { eax: 0x0400_2000, ebx, ecx: rows, ..none },
            _ => none,
        }
    };
    let (whole, features, saved) = (8 << 16 | 64, 1 << 22 | 1 << 24 | 1 << 25, 0x600e7);
    let both = Amx { bf16: true, f16: false, int8: true };
    assert_eq!(amx_of(answer(0x20, 1, whole, 16, features), saved), both);
    let newer = |parts: u32| {
        let older = answer(0x20, 1, whole, 16, features);
        move |leaf: u32, part: u32| match (leaf, part) {
            (7, 0) => CpuidResult { eax: parts, ..older(7, 0) },
            (7, 1) => CpuidResult { eax: 1 << 21, ..none },
            _ => older(leaf, part),
        }
    };
    assert_eq!(amx_of(newer(1), saved), Amx { f16: true, ..both });
    assert_eq!(amx_of(newer(0), saved), both, "leaf 7 has no second part");
    assert_eq!(amx_of(answer(0x20, 1, whole, 16, 1 << 24 | 1 << 25), saved), Amx { bf16: false, ..both });
    for (why, answers, saved) in [
        ("tiles are not saved", answer(0x20, 1, whole, 16, features), 0xe7),
        ("no leaf of palettes", answer(0x1c, 1, whole, 16, features), saved),
        ("no palette", answer(0x20, 0, whole, 16, features), saved),
        ("four registers", answer(0x20, 1, 4 << 16 | 64, 16, features), saved),
        ("rows of 32 bytes", answer(0x20, 1, 8 << 16 | 32, 16, features), saved),
        ("eight rows", answer(0x20, 1, whole, 8, features), saved),
        ("no tiles", answer(0x20, 1, whole, 16, 1 << 22 | 1 << 25), saved),
    ] {
        assert_eq!(amx_of(answers, saved), Amx::default(), "{why}");
    }
}

#[test]
fn first_level_cache_is_plausible() {
    let bytes = features().l1_bytes;
    assert!((16 << 10..=256 << 10).contains(&bytes) && bytes.is_multiple_of(1024), "{bytes} bytes");
}

#[test]
fn second_level_cache_is_plausible() {
    let bytes = features().l2_bytes;
    assert!((SMALL_L2..=64 << 20).contains(&bytes) && bytes.is_multiple_of(1024), "{bytes} bytes");
}

#[test]
fn third_level_cache_is_plausible() {
    let bytes = features().l3_bytes;
    // From small laptops to processors with stacked caches.
    assert!((1 << 20..=2 << 30).contains(&bytes) && bytes.is_multiple_of(1024), "{bytes} bytes");
}

fn counts(pool: &Pool, tasks: usize) -> Vec<usize> {
    let hits: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
    pool.run(tasks, |task, worker| {
        assert!(worker < pool.threads());
        hits[task].fetch_add(1, Relaxed);
    });
    hits.into_iter().map(AtomicUsize::into_inner).collect()
}

#[test]
fn every_task_runs_once() {
    let pool = Pool::new(3);
    for tasks in [0, 1, 2, 3, 100, 1000] {
        for _ in 0..50 {
            assert_eq!(counts(&pool, tasks), vec![1; tasks]);
        }
    }
}

#[test]
fn resizing_keeps_working() {
    let pool = Pool::new(1);
    for threads in [1, 4, 2, 5, 1] {
        pool.set_threads(threads);
        assert_eq!(counts(&pool, 64), vec![1; 64]);
    }
    pool.set_threads(0);
    assert_eq!(pool.threads(), 1);
}

#[test]
fn regions_of_two_threads_do_not_mix() {
    let pool = Pool::new(2);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| (0..300).for_each(|_| assert_eq!(counts(&pool, 7), vec![1; 7])));
        }
    });
}

#[test]
fn a_nested_region_runs_inline() {
    let pool = Pool::new(2);
    let sum = AtomicUsize::new(0);
    pool.run(4, |_, _| {
        pool.run_scratch(3, 100, |task, worker| {
            // SAFETY: 100 bytes of scratch memory were asked for.
            unsafe { worker.scratch.add(99).write(1) };
            sum.fetch_add(task, Relaxed);
        })
        .unwrap();
    });
    assert_eq!(sum.into_inner(), 12);
}

#[test]
fn scratch_is_aligned_and_private() {
    let pool = Pool::new(2);
    for bytes in [1, 5000, 100] {
        pool.run_scratch(64, bytes, |task, worker| {
            assert_eq!(worker.scratch as usize % SCRATCH_ALIGN, 0);
            // SAFETY: `bytes` bytes belong to this thread while the task runs.
            unsafe {
                std::ptr::write_bytes(worker.scratch, task as u8, bytes);
                assert!((0..bytes).all(|i| *worker.scratch.add(i) == task as u8));
            }
        })
        .unwrap();
    }
    assert!(pool.scratch_bytes() >= 5000);
    pool.release_scratch();
    assert_eq!(pool.scratch_bytes(), 0);
}

#[test]
fn no_memory_is_an_error() {
    let pool = Pool::new(2);
    let ran = AtomicUsize::new(0);
    let outcome = pool.run_scratch(4, usize::MAX / 4, |_, _| {
        ran.fetch_add(1, Relaxed);
    });
    assert_eq!(outcome, Err(OutOfMemory { bytes: usize::MAX / 4 }));
    assert_eq!(ran.into_inner(), 0);
    assert_eq!(counts(&pool, 8), vec![1; 8]);
}

#[test]
fn a_panic_reaches_the_caller_and_the_pool_survives() {
    let pool = Pool::new(3);
    for bad in [0, 7, 63] {
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(64, |task, _| assert_ne!(task, bad))));
        assert!(caught.is_err());
        assert_eq!(counts(&pool, 64), vec![1; 64]);
    }
}

#[test]
fn a_region_costs_microseconds() {
    let pool = Pool::new(2);
    counts(&pool, 2);
    // Of twenty times a hundred, the one that other work disturbs least.
    let hundred = |_| {
        let start = Instant::now();
        (0..100).for_each(|_| pool.run(2, |_, _| {}));
        start.elapsed()
    };
    let best = (0..20).map(hundred).min().unwrap_or_default();
    println!("{:?} a region", best / 100);
    assert!(best < Duration::from_millis(10), "{best:?} for 100 empty regions");
}

#[cfg(target_arch = "x86_64")]
#[test]
fn runs_of_every_form_take_about_as_long() {
    use oxidiff_kernels::cpu::{gemm_amx, gemm_avx512};
    for (form, kernel) in [
        (Form::F32, &gemm_avx512::F32),
        (Form::Bf16Dot, &gemm_avx512::BF16),
        (Form::Int8Dot, &gemm_avx512::INT8),
        (Form::Bf16Amx, &gemm_amx::BF16),
        (Form::F16Amx, &gemm_amx::F16),
        (Form::Int8Amx, &gemm_amx::INT8),
    ] {
        let time = |form: Form| form.operations(Isa::Avx512, form.rounds());
        assert_eq!(time(form) / kernel.rate(), time(Form::F32), "{form:?}");
    }
}

#[test]
fn ceilings_are_measured_once_and_make_sense() {
    let pool = Pool::new(2);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let found = ceilings(&pool, isa);
        let start = Instant::now();
        let again = ceilings(&pool, isa);
        assert!(start.elapsed().as_millis() < 5, "the second call measures again");
        assert_eq!(found.f32_flops, again.f32_flops);
        assert!(found.f32_flops > 1e8, "{isa:?}");
        assert_eq!(found.bf16_dot_flops > 0.0, isa == Isa::Avx512 && features().avx512_bf16);
        for memory in found.memory {
            assert!(memory.working_set > 0 && memory.read > 1e8 && memory.copy > 1e8 && memory.stream_copy > 1e8);
        }
        assert!(found.bytes_per_second(1 << 10) > 1e8);
    }
    assert!(!bf16_pairs_win() || features().avx512_bf16);
}
