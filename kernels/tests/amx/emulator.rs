//! AMX for processors without it: a handler of the signal that its instructions raise there carries them out.
//!
//! Encodings and meanings are those of Intel's "Architecture Instruction Set Extensions Programming Reference", chapter 3. What
//! it forbids ends the process, as it would there: an unknown palette, a register without rows, shapes that do not go together.

use std::cell::{Cell, UnsafeCell};
use std::ffi::{c_int, c_void};
use std::sync::Once;

use half::{bf16, f16};

/// The state of a thread.
pub struct Tiles {
    /// What was set up last; zeros initially.
    config: [u8; 64],
    /// Rows, and bytes of a row.
    shapes: [(usize, usize); 8],
    data: [[[u8; 64]; 16]; 8],
}

/// What it is after `TILERELEASE`.
pub const INITIAL: Tiles = Tiles { config: [0; 64], shapes: [(0, 0); 8], data: [[[0; 64]; 16]; 8] };

thread_local! {
    // Without a destructor and made at compile time, so that a signal handler may use it.
    static TILES: UnsafeCell<Tiles> = const { UnsafeCell::new(INITIAL) };
    /// How often it was set up.
    pub static SET_UPS: Cell<usize> = const { Cell::new(0) };
}

/// Lets this process run AMX.
pub fn install() {
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
pub struct Instruction {
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
    /// The instruction that begins there, if it may be one of AMX.
    pub unsafe fn decode(code: *const u8) -> Option<Instruction> {
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
    pub unsafe fn run(&self, tiles: &mut Tiles, registers: &[i64; 23]) -> Option<usize> {
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
    pub fn set_up(&mut self, config: &[u8; 64]) -> Option<()> {
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
