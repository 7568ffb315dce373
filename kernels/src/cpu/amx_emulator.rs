//! AMX for processors without it: a handler of the signal that its instructions raise there carries them out.
//!
//! The tests below so run the machine code of [`gemm_amx`](super::gemm_amx), by way of the engine, convolutions and attention,
//! and compare it with the references of the registry. Where the processor has AMX no signal is raised, and they test that.
//! They run in a process of their own, which alone has the handler: any other test that picks AMX where there is none ends its
//! process, as it would a user's.
//!
//! Encodings and meanings are those of Intel's "Architecture Instruction Set Extensions Programming Reference", chapter 3. What
//! it forbids ends the process, as it would there: an unknown palette, a register without rows, shapes that do not go together.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::Once;

use half::{bf16, f16};

/// The state of a thread.
struct Tiles {
    /// What was set up last; zeros initially.
    config: [u8; 64],
    /// Rows, and bytes of a row.
    shapes: [(usize, usize); 8],
    data: [[[u8; 64]; 16]; 8],
}

const INITIAL: Tiles = Tiles { config: [0; 64], shapes: [(0, 0); 8], data: [[[0; 64]; 16]; 8] };

thread_local! {
    // Without a destructor and made at compile time, so that a signal handler may use it.
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(INITIAL) };
    /// How often it was set up.
    static SET_UPS: Cell<usize> = const { Cell::new(0) };
}

/// Lets this process run AMX.
fn install() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: a handler for a signal that nothing else in this process handles.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_illegal as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            assert_eq!(libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()), 0);
        }
    });
}

/// Carries out the instruction that raised the signal, if it is one of AMX; else the signal has its usual effect.
unsafe extern "C" fn on_illegal(_signal: c_int, _info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the system's description of the interrupted thread, which is this one; code is readable where it was run. Nothing
    // else uses the thread's tiles meanwhile.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let code = registers[libc::REG_RIP as usize] as *const u8;
        let done = TILES.with(|tiles| Instruction::decode(code).and_then(|it| it.run(&mut *tiles.get(), registers)));
        match done {
            Some(length) => registers[libc::REG_RIP as usize] += length as i64,
            None => _ = libc::signal(libc::SIGILL, libc::SIG_DFL),
        }
    }
}

/// `VEX.128.<prefix>.0F38.W0 <opcode> /r`: three bytes of VEX, the opcode, ModRM.
struct Instruction {
    code: *const u8,
    /// 0: none, 1: 66, 2: F3, 3: F2.
    prefix: u8,
    opcode: u8,
    mode: u8,
    /// Register numbers of ModRM and VEX; the upper bit comes from VEX.
    reg: usize,
    rm: usize,
    vvvv: usize,
    /// The upper bit of an index register.
    x: usize,
}

impl Instruction {
    unsafe fn decode(code: *const u8) -> Option<Instruction> {
        // SAFETY: an instruction that begins with C4 has these bytes.
        let byte = |at: usize| unsafe { code.add(at).read() };
        // Map 0F38 is 2; W and L are 0.
        if byte(0) != 0xc4 || byte(1) & 31 != 2 || byte(2) & 0x84 != 0 {
            return None;
        }
        let upper = |bit: u8| usize::from(!byte(1) >> bit & 1) << 3;
        let modrm = byte(4);
        Some(Instruction {
            code,
            prefix: byte(2) & 3,
            opcode: byte(3),
            mode: modrm >> 6,
            reg: usize::from(modrm >> 3 & 7) | upper(7),
            rm: usize::from(modrm & 7) | upper(5),
            vvvv: usize::from(!byte(2) >> 3 & 15),
            x: upper(6),
        })
    }

    /// Carries it out; returns its length, or nothing if there is no such instruction.
    unsafe fn run(&self, tiles: &mut Tiles, registers: &[i64; 23]) -> Option<usize> {
        if !matches!(self.opcode, 0x5c | 0x5e) && self.vvvv != 0 {
            return None; // all ones, stored inverted, where there is no third operand
        }
        // SAFETY: memory that the program accesses.
        unsafe {
            match (self.opcode, self.prefix, self.mode) {
                (0x49, 0, 3) if (self.reg, self.rm) == (0, 0) => *tiles = INITIAL,
                (0x49, 3, 3) if self.rm == 0 => {
                    tiles.rows(self.reg)?;
                    tiles.data[self.reg] = [[0; 64]; 16];
                }
                (0x49, 0, 0..=2) if self.reg == 0 => {
                    let (address, length) = self.address(registers)?;
                    tiles.set_up(&*(address.base as *const [u8; 64]))?;
                    SET_UPS.set(SET_UPS.get() + 1);
                    return Some(length);
                }
                (0x49, 1, 0..=2) if self.reg == 0 => {
                    let (address, length) = self.address(registers)?;
                    *(address.base as *mut [u8; 64]) = tiles.config;
                    return Some(length);
                }
                (0x4b, 2 | 3, 0..=2) => {
                    let (address, length) = self.address(registers)?;
                    let (rows, bytes) = tiles.rows(self.reg)?;
                    if self.prefix == 3 {
                        tiles.data[self.reg] = [[0; 64]; 16];
                    }
                    for row in 0..rows {
                        let at = address.base.wrapping_add(row as i64 * address.index?) as *mut u8;
                        let data = tiles.data[self.reg][row].as_mut_ptr();
                        if self.prefix == 3 {
                            data.copy_from_nonoverlapping(at, bytes);
                        } else {
                            at.copy_from_nonoverlapping(data, bytes);
                        }
                    }
                    return Some(length);
                }
                (0x5c, 2, 3) => tiles.dot(self.reg, self.rm, self.vvvv, bf16_terms)?,
                (0x5c, 3, 3) => tiles.dot(self.reg, self.rm, self.vvvv, f16_terms)?,
                (0x5e, 1, 3) => tiles.dot(self.reg, self.rm, self.vvvv, byte_terms)?,
                _ => return None,
            }
        }
        Some(5)
    }

    /// What its operand in memory lies at, and its length.
    unsafe fn address(&self, registers: &[i64; 23]) -> Option<(Address, usize)> {
        use libc::{REG_R8, REG_RAX, REG_RBP, REG_RBX, REG_RCX, REG_RDI, REG_RDX, REG_RSI, REG_RSP};
        const ORDER: [c_int; 8] = [REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI];
        let value = |number: usize| match number {
            0..8 => registers[ORDER[number] as usize],
            _ => registers[REG_R8 as usize + number - 8],
        };
        let (mut at, mut base, mut index) = (5, self.rm, None);
        if self.rm & 7 == 4 {
            // SAFETY: a SIB byte follows.
            let sib = unsafe { self.code.add(at).read() };
            at += 1;
            base = usize::from(sib & 7) | self.rm & 8;
            let number = usize::from(sib >> 3 & 7) | self.x;
            index = (number != 4).then(|| value(number) << (sib >> 6));
        }
        if self.mode == 0 && base & 7 == 5 {
            return None; // relative to the instruction, or without a base: not what the micro-kernels use
        }
        // SAFETY: as many bytes of displacement follow as the mode says.
        let (displacement, size) = unsafe {
            match self.mode {
                1 => (i64::from(self.code.add(at).cast::<i8>().read()), 1),
                2 => (i64::from(self.code.add(at).cast::<i32>().read_unaligned()), 4),
                _ => (0, 0),
            }
        };
        Some((Address { base: value(base).wrapping_add(displacement), index }, at + size))
    }
}

/// Rows lie at `base + row * index`.
struct Address {
    base: i64,
    index: Option<i64>,
}

impl Tiles {
    /// Takes over what `LDTILECFG` read.
    fn set_up(&mut self, config: &[u8; 64]) -> Option<()> {
        *self = INITIAL;
        if config[0] == 0 {
            return Some(());
        }
        let reserved = config[2..16].iter().chain(&config[32..48]).chain(&config[56..]);
        if config[0] != 1 || config[1] != 0 || reserved.into_iter().any(|&byte| byte != 0) {
            return None;
        }
        for register in 0..8 {
            let bytes = u16::from_le_bytes([config[16 + 2 * register], config[17 + 2 * register]]);
            let shape = (usize::from(config[48 + register]), usize::from(bytes));
            if shape.0 > 16 || shape.1 > 64 || (shape.0 == 0) != (shape.1 == 0) {
                return None;
            }
            self.shapes[register] = shape;
        }
        self.config = *config;
        Some(())
    }

    /// The shape of a register that an instruction may use.
    fn rows(&self, register: usize) -> Option<(usize, usize)> {
        let shape = *self.shapes.get(register)?;
        (shape.0 > 0).then_some(shape)
    }

    /// `c[m][n] += a[m][k] . b[k][n]`, units of four bytes.
    fn dot(&mut self, c: usize, a: usize, b: usize, terms: Terms) -> Option<()> {
        let shapes = [self.rows(c)?, self.rows(a)?, self.rows(b)?];
        if shapes.iter().any(|(_, bytes)| bytes % 4 != 0) {
            return None;
        }
        let [(m, n), (rows, depth), (k, cols)] = shapes.map(|(rows, bytes)| (rows, bytes / 4));
        if c == a || a == b || b == c || (m, n, k) != (rows, cols, depth) {
            return None;
        }
        let unit = |of: &[[u8; 64]; 16], row: usize, at: usize| [0, 1, 2, 3].map(|byte| of[row][4 * at + byte]);
        for row in 0..m {
            for col in 0..n {
                let pairs = (0..k).map(|t| (unit(&self.data[a], row, t), unit(&self.data[b], t, col)));
                let sum = terms(unit(&self.data[c], row, col), &mut { pairs });
                self.data[c][row][4 * col..][..4].copy_from_slice(&sum);
            }
        }
        Some(())
    }
}

/// Adds products of units to what is there.
type Terms = fn([u8; 4], &mut dyn Iterator<Item = ([u8; 4], [u8; 4])>) -> [u8; 4];

/// `TDPBF16PS`: even and odd terms are summed up apart. Numbers below the normal ones count as 0, before and after.
fn bf16_terms(from: [u8; 4], units: &mut dyn Iterator<Item = ([u8; 4], [u8; 4])>) -> [u8; 4] {
    pair_terms(from, units, |bytes| flush(bf16::from_le_bytes(bytes).to_f32()))
}

/// `TDPFP16PS`: the same, but that operands below f16's normal numbers count as what they are.
fn f16_terms(from: [u8; 4], units: &mut dyn Iterator<Item = ([u8; 4], [u8; 4])>) -> [u8; 4] {
    pair_terms(from, units, |bytes| f16::from_le_bytes(bytes).to_f32())
}

fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

fn pair_terms(
    from: [u8; 4],
    units: &mut dyn Iterator<Item = ([u8; 4], [u8; 4])>,
    widen: fn([u8; 2]) -> f32,
) -> [u8; 4] {
    let half = |unit: [u8; 4], at: usize| widen([unit[2 * at], unit[2 * at + 1]]);
    let mut sums = [0.0f32; 2];
    for (a, b) in units {
        for (at, sum) in sums.iter_mut().enumerate() {
            *sum = flush(half(a, at).mul_add(half(b, at), *sum));
        }
    }
    flush(flush(f32::from_le_bytes(from)) + flush(sums[0] + sums[1])).to_le_bytes()
}

/// `TDPBUSD`: unsigned times signed bytes, sums that wrap around.
fn byte_terms(from: [u8; 4], units: &mut dyn Iterator<Item = ([u8; 4], [u8; 4])>) -> [u8; 4] {
    let mut sum = i32::from_le_bytes(from);
    for (a, b) in units {
        for at in 0..4 {
            sum = sum.wrapping_add(i32::from(a[at]) * i32::from(b[at] as i8));
        }
    }
    sum.to_le_bytes()
}

#[cfg(test)]
mod tests {
    use std::arch::x86_64::__cpuid_count;
    use std::process::Command;

    use super::super::conv::{Call, Conv, PackedWeight, Weight, conv_with, pack_conv_weight};
    use super::super::conv_taps;
    use super::super::conv_winograd_points::{Cut, multiply_cut};
    use super::super::gemm::{Operand, gemm_with};
    use super::super::gemm_amx::{BF16, F16, F16_SPLIT, F32, INT8, multiply_registers};
    use super::super::gemm_kernel::{Form, Runner};
    use super::super::gemm_store::StoreEpilogue;
    use super::super::pack::Matrix;
    use super::super::tile_exec_verify::verify_attention_of;
    use super::super::verify::{
        Buffer, compare_winograd, verify_conv, verify_convs, verify_gemm, verify_int8, verify_winograd,
    };
    use super::{INITIAL, Instruction, SET_UPS, Tiles, install};
    use crate::dtype::DType;
    use crate::isa::{Amx, Isa, amx, features};
    use crate::pool::Pool;

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
            let mut tiles = Tiles { ..INITIAL };
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

    /// Runs the ignored tests of this module, with no handler in this process.
    #[test]
    fn tests_that_run_amx_pass() {
        let (_, here) = module_path!().split_once("::").unwrap();
        let done = Command::new(std::env::current_exe().unwrap()).args([here, "--ignored"]).output().unwrap();
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
        for (channels, width, padding, times) in [
            (72, 34, 0, 1),
            (72, 42, 0, 1 + 18),
            (72, 32, 1, 1 + 6),
            (64, 34, 0, 1),
            (64, 42, 0, 1 + 2),
            (64, 32, 1, 1),
        ] {
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
        if is_ready() {
            verify_gemm(&BF16, DType::BF16).unwrap();
            verify_gemm(&F32, DType::F32).unwrap();
            verify_gemm(&F16_SPLIT, DType::F16).unwrap();
            verify_int8(&INT8).unwrap();
        }
        if is_ready_for_f16() {
            verify_gemm(&F16, DType::F16).unwrap();
        }
    }

    #[test]
    #[ignore = "`tests_that_run_amx_pass` runs it"]
    fn small_numbers_count_in_f16_alone() {
        if !is_ready_for_f16() {
            return;
        }
        // The smallest number above 0, and 1024 in f16, 256 in bf16.
        for (kernel, large, sum) in [(&F16, 0x6400_6400u32, 2f32.powi(-24) * 1024.0 * 32.0), (&BF16, 0x4380_4380, 0.0)]
        {
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
        if is_ready() {
            verify_conv(&BF16, DType::BF16).unwrap();
            verify_conv(&F32, DType::F32).unwrap();
            verify_conv(&F16_SPLIT, DType::F16).unwrap();
        }
        if is_ready_for_f16() {
            verify_conv(&F16, DType::F16).unwrap();
        }
    }

    /// Convolutions whose tiles add up all taps: blocks of lines and of pixels, tiles of a few pixels, sets of columns, half a panel,
    /// chunks of channels, planes of taps, groups, padding, dilation, images that are enlarged.
    #[test]
    #[ignore = "`tests_that_run_amx_pass` runs it"]
    fn taps_at_once_match_the_reference() {
        let shapes = [
            Conv::new_2d(2, [9, 37], 96, 40, [3, 3]).padding([0, 1, 1]),
            Conv::new_2d(1, [40, 20], 64, 32, [3, 3]).padding([0, 1, 1]),
            Conv::new_2d(1, [3, 100], 32, 230, [3, 3]).padding([0, 1, 1]),
            Conv::new_2d(1, [7, 30], 192, 70, [2, 5]).groups(2).padding([0, 2, 4]).dilation([1, 2, 2]),
            Conv::new_2d(1, [1, 50], 160, 33, [1, 3]),
            Conv::new_2d(1, [6, 9], 32, 48, [3, 3]).upsample([1, 2, 2]).padding([0, 1, 1]),
            Conv::new_3d(1, [3, 6, 20], 32, 33, [3, 3, 3]).padding([1, 1, 1]),
        ];
        for (is_ready, kernel, dtype) in [(is_ready(), &BF16, DType::BF16), (is_ready_for_f16(), &F16, DType::F16)] {
            for shape in shapes.iter().filter(|_| is_ready) {
                let weight = PackedWeight::from_raw(std::ptr::null(), dtype, shape, Isa::Avx512);
                let call = Call { kernel, conv: shape, x: std::ptr::null(), dtype, weight: &weight };
                assert!(conv_taps::suits(&call), "{shape:?}");
            }
            if is_ready {
                verify_convs(kernel, dtype, &shapes).unwrap();
            }
        }
    }

    #[test]
    #[ignore = "`tests_that_run_amx_pass` runs it"]
    fn winograd_with_amx_matches_the_reference() {
        if is_ready() {
            verify_winograd(&F32, DType::F32).unwrap();
        }
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
            for (o, blocks) in [2, 4]
                .into_iter()
                .flat_map(|o| [[64, 64], [64, outs], [ins, 64], [ins, outs]].map(|blocks| (o, blocks)))
            {
                let cut = Cut::of(&shape, o, blocks, 0);
                let mut memory = Buffer::zeroed(DType::F32, cut.bytes() / 4);
                (0..cut.bytes() / 4).for_each(|at| memory.set(at, f32::NAN));
                let mut y = Buffer::random(DType::F32, shape.rows() * outs, 3);
                let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, outs as isize);
                // SAFETY: dense buffers of the sizes that `shape` and the cut say.
                unsafe {
                    let (image, work) = ((x.ptr(), DType::F32), memory.ptr_mut());
                    multiply_cut(&F32, pool, &shape, image, &weight, (o, cut), work, &store).unwrap();
                }
                compare_winograd(&format!("{cut:?} of {shape:?}"), (&shape, o), [&x, &w, &y]).unwrap();
            }
        }
    }

    #[test]
    #[ignore = "`tests_that_run_amx_pass` runs it"]
    fn attention_with_amx_matches_the_reference() {
        if is_ready() {
            verify_attention_of(&BF16, Isa::Avx512, DType::BF16).unwrap();
            verify_attention_of(&F32, Isa::Avx512, DType::F32).unwrap();
            verify_attention_of(&F16_SPLIT, Isa::Avx512, DType::F16).unwrap();
        }
    }
}
