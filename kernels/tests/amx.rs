//! The micro-kernels of `gemm_amx`, by way of the engine, convolutions and attention, compared with the references of the
//! registry. Where the processor has no AMX, `emulator` carries the same machine code out in a signal handler; where it has,
//! no signal is raised, and the tests test that.
//!
//! What runs AMX is ignored, and run by [`tests_that_run_amx_pass`] in a process of its own, which alone has the handler: any
//! other test that picks AMX where there is none ends its process, as it would a user's.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

#[path = "amx/emulator.rs"]
mod emulator;

use std::arch::x86_64::__cpuid_count;
use std::process::Command;

use emulator::{INITIAL, Instruction, SET_UPS, install};
use oxidiff_kernels::cpu::conv::{Conv, Weight, conv_with, pack_conv_weight};
use oxidiff_kernels::cpu::conv_winograd_points::{Cut, multiply_cut};
use oxidiff_kernels::cpu::gemm::{Operand, gemm_with};
use oxidiff_kernels::cpu::gemm_amx::{BF16, F16, F32, multiply_registers};
use oxidiff_kernels::cpu::gemm_kernel::{Form, Runner};
use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
use oxidiff_kernels::cpu::pack::Matrix;
use oxidiff_kernels::cpu::verify::{Buffer, compare_winograd};
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::{Amx, Isa, amx, features};
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::registry;

/// How AMX is run.
#[derive(Debug, PartialEq, Eq)]
enum How {
    Processor,
    Emulator,
}

/// How AMX runs here, if what surrounds the micro-kernels does: attention converts with AVX512-BF16. Where a processor has
/// tiles that this process may not use, or not for all products, some of the instructions would raise no signal, and the
/// emulator not learn of them.
fn how_on(avx512_bf16: bool, has_tiles: bool, amx: Amx) -> Option<How> {
    match (avx512_bf16, has_tiles) {
        (true, true) if amx.bf16 && amx.int8 => Some(How::Processor),
        (true, false) => Some(How::Emulator),
        _ => None,
    }
}

/// Whether AMX can be run from here on: in the process that [`tests_that_run_amx_pass`] starts.
fn is_ready() -> bool {
    if !std::env::args().any(|argument| argument == "--ignored") {
        return false;
    }
    // SAFETY: every x86-64 processor has the instruction; newer compilers know that. Leaf 7, EDX, bit 24: AMX-TILE.
    #[allow(unused_unsafe)]
    let has_tiles = unsafe { __cpuid_count(7, 0) }.edx >> 24 & 1 == 1;
    let how = how_on(features().avx512_bf16, has_tiles, amx());
    if how == Some(How::Emulator) {
        install();
    }
    how.is_some()
}

/// Whether products of f16 can: some processors have all of AMX but those.
fn is_ready_for_f16() -> bool {
    is_ready() && (amx() == Amx::default() || amx().f16)
}

#[test]
fn amx_is_run_only_where_all_of_it_is_seen() {
    let (none, both) = (Amx::default(), Amx { bf16: true, f16: false, int8: true });
    for (avx512_bf16, has_tiles, amx, how) in [
        (true, false, none, Some(How::Emulator)),
        (true, true, both, Some(How::Processor)),
        (false, false, none, None),
        (true, true, none, None), // refused by the system
        (true, true, Amx { bf16: false, ..both }, None),
        (true, true, Amx { int8: false, ..both }, None),
    ] {
        assert_eq!(how_on(avx512_bf16, has_tiles, amx), how, "{avx512_bf16} {has_tiles} {amx:?}");
    }
}

#[test]
fn what_the_processor_refuses_is_refused() {
    let is_carried_out = |code: [u8; 5], bytes: u16| {
        let mut config = [0; 64];
        config[0] = 1;
        for register in 0..8 {
            config[16 + 2 * register..][..2].copy_from_slice(&bytes.to_le_bytes());
            config[48 + register] = (bytes / 4) as u8;
        }
        let mut tiles = INITIAL;
        tiles.set_up(&config).unwrap();
        // SAFETY: five bytes of an instruction that accesses no memory.
        unsafe { Instruction::decode(code.as_ptr()).and_then(|it| it.run(&mut tiles, &[0; 23])).is_some() }
    };
    for (code, bytes, is_one) in [
        ([0xc4, 0xe2, 0x7b, 0x49, 0xc8], 64, true),  // tilezero tmm1
        ([0xc4, 0xe2, 0x7b, 0x49, 0xc9], 64, false), // the same, with a second operand
        ([0xc4, 0xe2, 0x73, 0x49, 0xc8], 64, false), // with a third
        ([0xc4, 0xe2, 0x78, 0x49, 0xc0], 64, true),  // tilerelease
        ([0xc4, 0xe2, 0x70, 0x49, 0xc0], 64, false),
        ([0xc4, 0xe2, 0x52, 0x5c, 0xdc], 64, true), // tdpbf16ps tmm3, tmm4, tmm5
        ([0xc4, 0xe2, 0x52, 0x5c, 0xdc], 12, true),
        ([0xc4, 0xe2, 0x52, 0x5c, 0xdc], 14, false), // half a unit
        ([0xc4, 0xe2, 0x5a, 0x5c, 0xdc], 64, false), // the same operand twice
    ] {
        assert_eq!(is_carried_out(code, bytes), is_one, "{code:x?} with rows of {bytes} bytes");
    }
}

/// Runs the ignored tests of this file, with no handler in this process.
#[test]
fn tests_that_run_amx_pass() {
    let done = Command::new(std::env::current_exe().unwrap()).arg("--ignored").output().unwrap();
    let told = String::from_utf8_lossy(&done.stdout);
    let is_fine = done.status.success() && !told.contains(" 0 passed");
    assert!(is_fine, "{}: {told}{}", done.status, String::from_utf8_lossy(&done.stderr));
    // SAFETY: asks for the handler in force.
    let handler = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        assert_eq!(libc::sigaction(libc::SIGILL, std::ptr::null(), &raw mut action), 0);
        action.sa_sigaction
    };
    assert_eq!(handler, libc::SIG_DFL, "an instruction that this processor lacks must end the process");
}

/// Compares these kernels with their references if what they take is ready.
fn verify(is_ready: bool, names: &[&str]) {
    let rows = registry::rows();
    for name in names {
        let row = rows.iter().find(|row| row.name == format!("{name}__avx512")).expect(name);
        if is_ready {
            (row.verify)().unwrap();
        }
    }
}

/// The palette in force in this thread, 0 if there is none.
fn palette() -> u8 {
    let mut config = [u8::MAX; 64];
    // SAFETY: AMX is available, or carried out; writes 64 bytes.
    unsafe { std::arch::asm!("sttilecfg [{}]", in(reg) &mut config, options(nostack)) };
    config[0]
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn nothing_is_left_in_the_thread() {
    if !is_ready() {
        return;
    }
    let (a, panel, mut c) = ([[0x3f80_3f80u32; 16]; 20], [[0x4000_4000u32; 32]; 16], [[1.0f32; 32]; 20]);
    let mut runner = Runner::new(&BF16);
    for rows in [20, 3] {
        // SAFETY: sixteen units of that many rows, a panel of as many units, results of as many rows.
        unsafe {
            let (a, c, panel) = ((a.as_ptr().cast(), 64), (c.as_mut_ptr().cast(), 32), panel.as_ptr().cast());
            runner.take_panel(panel, 32, 16);
            runner.tile(rows, a, c, true, panel);
        }
        assert_eq!(palette(), 1);
    }
    drop(runner);
    assert_eq!(palette(), 0);
    // Thirty-two products of 1 and 2 a tile.
    assert_eq!((c[2], c[3]), ([1.0 + 64.0 + 64.0; 32], [1.0 + 64.0; 32]));
    for form in [Form::Bf16Pairs, Form::F16Pairs, Form::Int8Quads] {
        if form == Form::F16Pairs && !is_ready_for_f16() {
            continue;
        }
        // SAFETY: AMX is available, or carried out.
        unsafe { multiply_registers(form, 3) };
        assert_eq!(palette(), 0);
    }
}

/// How often registers are set up while that runs in this thread; `None` where nobody counts.
fn set_ups(run: impl FnOnce()) -> Option<usize> {
    let before = SET_UPS.get();
    run();
    assert_eq!(palette(), 0);
    (SET_UPS.get() > 0).then(|| SET_UPS.get() - before)
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn registers_are_set_up_for_blocks_not_for_panels() {
    if !is_ready() {
        return;
    }
    let pool = Pool::new(1);
    // Four panels of one block, two blocks of terms.
    let (n, k, dtype) = (128, 640, DType::BF16);
    for (m, times) in [(64, 1), (80, 1), (16, 1), (20, 1), (72, 1 + 8)] {
        let (a, b, mut c) =
            (Buffer::zeroed(dtype, m * k), Buffer::zeroed(dtype, n * k), Buffer::zeroed(DType::F32, m * n));
        let (left, right) = (Matrix::row_major(a.ptr(), dtype, k), Matrix::row_major(b.ptr(), dtype, k));
        let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
        // SAFETY: dense buffers of the sizes named.
        let run = || unsafe {
            gemm_with(&BF16, &pool, &[], (m, n, k), &left, &Operand::Strided(right), &store).unwrap();
        };
        assert!(set_ups(run).is_none_or(|count| count == times), "{m} rows");
    }
    // Nine taps of two panels: rows of 32 pixels, of 32 and 8, of 31, 32 and 31 where the outer ones lie in the padding. Of 72
    // channels each tap is multiplied by itself, of 64 all at once.
    for (channels, width, padding, times) in
        [(72, 34, 0, 1), (72, 42, 0, 1 + 18), (72, 32, 1, 1 + 6), (64, 34, 0, 1), (64, 42, 0, 1 + 2), (64, 32, 1, 1)]
    {
        let shape = Conv::new_2d(1, [6, width], channels, 64, [3, 3]).padding([0, 0, padding]);
        let (x, w) = (Buffer::zeroed(dtype, 6 * width * channels), Buffer::zeroed(dtype, 64 * channels * 9));
        let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(dtype, Isa::Avx512));
        let mut y = Buffer::zeroed(DType::F32, shape.rows() * 64);
        let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, 64);
        // SAFETY: dense buffers of the sizes that `shape` says.
        let run = || unsafe {
            let weight = Weight::contiguous(w.ptr(), dtype, &shape);
            let packed = pack_conv_weight(&pool, Isa::Avx512, &shape, &weight, memory.ptr_mut());
            conv_with(&BF16, &pool, &shape, x.ptr(), dtype, &packed, &store).unwrap();
        };
        let what = format!("{channels} channels, images {width} wide, {padding} padded");
        assert!(set_ups(run).is_none_or(|count| count == times), "{what}");
    }
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn products_with_amx_match_the_reference() {
    let names = ["gemm_bf16_amx_32x32", "gemm_f32_amx_x3_32x32", "gemm_f16_amx_x2_32x32", "gemm_int8_amx_32x32"];
    verify(is_ready(), &names);
    verify(is_ready_for_f16(), &["gemm_f16_amx_32x32"]);
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn operands_change_places_with_amx() {
    let names = ["gemm_swapped_bf16_amx_32x32", "gemm_swapped_f32_amx_x3_32x32", "gemm_swapped_f16_amx_x2_32x32"];
    verify(is_ready(), &names);
    verify(is_ready_for_f16(), &["gemm_swapped_f16_amx_32x32"]);
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn small_numbers_count_in_f16_alone() {
    if !is_ready_for_f16() {
        return;
    }
    // The smallest number above 0, and 1024 in f16, 256 in bf16.
    for (kernel, large, sum) in [(&F16, 0x6400_6400u32, 2f32.powi(-24) * 1024.0 * 32.0), (&BF16, 0x4380_4380, 0.0)] {
        let (a, panel, mut c) = ([[0x0001_0001u32; 16]; 3], [[large; 32]; 16], [[1.0f32; 32]; 3]);
        let mut runner = Runner::new(kernel);
        // SAFETY: sixteen units of three rows, a panel of as many units, results of as many rows.
        unsafe {
            runner.take_panel(panel.as_ptr().cast(), 32, 16);
            runner.tile(3, (a.as_ptr().cast(), 64), (c.as_mut_ptr().cast(), 32), false, panel.as_ptr().cast());
        }
        assert_eq!(c, [[sum; 32]; 3], "{:?}", kernel.form);
    }
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn convolutions_with_amx_match_the_reference() {
    verify(is_ready(), &["conv_bf16_amx_32x32", "conv_f32_amx_x3_32x32", "conv_f16_amx_x2_32x32"]);
    verify(is_ready_for_f16(), &["conv_f16_amx_32x32"]);
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn taps_at_once_match_the_reference() {
    verify(is_ready(), &["conv_taps_bf16_amx_32x32"]);
    verify(is_ready_for_f16(), &["conv_taps_f16_amx_32x32"]);
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn winograd_with_amx_matches_the_reference() {
    verify(is_ready(), &["conv_winograd_f32_amx_x3_32x32"]);
}

/// Blocks and bands as large images have them.
#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn every_cut_of_winograd_matches_the_reference() {
    if !is_ready() {
        return;
    }
    let pool = Pool::global();
    for shape in [
        Conv::new_2d(2, [21, 20], 150, 70, [3, 3]).padding([0, 1, 1]),
        Conv::new_3d(1, [3, 17, 18], 70, 100, [3, 3, 3]).padding([1, 1, 1]),
    ] {
        let (ins, outs) = (shape.in_channels, shape.out_channels);
        let x = Buffer::random(DType::F32, shape.batch * shape.strides[0] as usize, 1);
        let w = Buffer::random(DType::F32, outs * shape.terms(), 2);
        let weight = Weight::contiguous(w.ptr(), DType::F32, &shape);
        for (o, blocks) in
            [2, 4].into_iter().flat_map(|o| [[64, 64], [64, outs], [ins, 64], [ins, outs]].map(|blocks| (o, blocks)))
        {
            let cut = Cut::of(&shape, o, blocks, 0);
            let mut memory = Buffer::zeroed(DType::F32, cut.bytes() / 4);
            (0..cut.bytes() / 4).for_each(|at| memory.set(at, f32::NAN));
            let mut y = Buffer::random(DType::F32, shape.rows() * outs, 3);
            let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, outs as isize);
            // SAFETY: dense buffers of the sizes that `shape` and the cut say.
            unsafe {
                let (image, work) = ((x.ptr(), DType::F32).into(), memory.ptr_mut());
                multiply_cut(&F32, pool, &shape, image, &weight, (o, cut), work, &store).unwrap();
            }
            compare_winograd(&format!("{cut:?} of {shape:?}"), (&shape, o), [&x, &w, &y]).unwrap();
        }
    }
}

#[test]
#[ignore = "`tests_that_run_amx_pass` runs it"]
fn attention_with_amx_matches_the_reference() {
    verify(is_ready(), &["attention_bf16_amx_k192", "attention_f32_amx_x3_k192", "attention_f16_amx_x2_k192"]);
}
