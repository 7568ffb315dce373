//! Micro-kernels for AMX: 32 rows x 32 columns in four of the eight tile registers.
//!
//! ```text
//!              tmm6   tmm7      sixteen units of the panel, 16 columns each
//! tmm4      *  tmm0   tmm1      rows 0 to 15 of A, sixteen units of each
//! tmm5      *  tmm2   tmm3      rows 16 to 31
//! ```
//!
//! A tile register holds up to sixteen rows of 64 bytes. What the other micro-kernels call a unit, two bf16 or f16 or four
//! bytes that follow each other, is what `TDPBF16PS`, `TDPFP16PS` and `TDPBUSD` multiply and add up, so operands lie as those
//! kernels read them: rows of A as they are, panels as [`pack`](super::pack) makes them. Units beyond the last sixteen are copied beside zeros, those
//! of a panel once for all its tiles.
//!
//! Numerics: products are exact, sums f32, in which numbers below the normal ones count as 0. So they do in operands of bf16; in
//! those of f16 they count as what they are (Intel's manual, "Input FP16 denormals are always handled").
//!
//! The registers' shapes are state of the thread: [`set_up`] says how many rows a tile has, [`release`] leaves nothing
//! behind. Setting up is slow beside a product, so [`Runner`](super::gemm_kernel::Runner), which calls both, does it only where
//! heights ask for it. Whether a process may use AMX is the system's decision ([`amx`](crate::isa::amx)).
//!
//! Tests run this machine code on processors without AMX, too: `tests/amx/emulator.rs` carries its instructions out.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::offset_of;

use super::gemm_kernel::{Form, Kernel, TILE_UNITS as SIDE, Tiles};
use crate::isa::Isa;

/// Columns of a panel.
const WIDTH: usize = 2 * SIDE;
/// Bytes of a row of a tile register.
const ROW: usize = 4 * SIDE;

/// As [`gemm_kernel::Tile`](super::gemm_kernel::Tile), then where units beyond the last sixteen are: of the panel already, of A
/// once it has run.
pub(crate) type Tile = unsafe fn(usize, *const u8, usize, *const u8, *mut f32, usize, bool, *const u8, *mut Rest);

/// A tile that adds up products of several pieces of A and of the panel, whole registers of each: `(job, c, ldc in elements)`.
pub(crate) type TapsTile = unsafe fn(&TapsJob, *mut f32, usize);

/// Where a piece begins, in bytes from the job's first one.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Tap {
    pub a: isize,
    pub panel: usize,
}

/// What a [`TapsTile`] multiplies.
#[repr(C)]
pub(crate) struct TapsJob {
    /// Whether sums go on from what is in C.
    pub accumulate: bool,
    /// One tap or more, and where they end.
    pub taps: *const Tap,
    pub taps_end: *const Tap,
    /// Sixteen units of the tile's first row, behind which those of the next rows lie, and bytes to the first row's next ones.
    pub a: *const u8,
    pub a_step: usize,
    pub panel: *const u8,
    /// Sixteens of units of a tap, one or more.
    pub rounds: usize,
    /// Any address: a line is fetched into L2 from there, and from every tap beyond it, for each round, so many bytes apart.
    pub next: *const u8,
    pub next_step: usize,
}

macro_rules! by_size {
    ($tile:ident) => {
        [[$tile::<false, false> as TapsTile, $tile::<true, false>], [$tile::<false, true>, $tile::<true, true>]]
    };
}

macro_rules! heights {
    ($tile:ident, $wide:literal) => {
        &[
            $tile::<1, $wide> as Tile,
            $tile::<2, $wide>,
            $tile::<3, $wide>,
            $tile::<4, $wide>,
            $tile::<5, $wide>,
            $tile::<6, $wide>,
            $tile::<7, $wide>,
            $tile::<8, $wide>,
            $tile::<9, $wide>,
            $tile::<10, $wide>,
            $tile::<11, $wide>,
            $tile::<12, $wide>,
            $tile::<13, $wide>,
            $tile::<14, $wide>,
            $tile::<15, $wide>,
            $tile::<16, $wide>,
            $tile::<17, $wide>,
            $tile::<18, $wide>,
            $tile::<19, $wide>,
            $tile::<20, $wide>,
            $tile::<21, $wide>,
            $tile::<22, $wide>,
            $tile::<23, $wide>,
            $tile::<24, $wide>,
            $tile::<25, $wide>,
            $tile::<26, $wide>,
            $tile::<27, $wide>,
            $tile::<28, $wide>,
            $tile::<29, $wide>,
            $tile::<30, $wide>,
            $tile::<31, $wide>,
            $tile::<32, $wide>,
        ]
    };
}

/// 32 x 32 with `TDPBF16PS`: thirty-two terms of sixteen rows and columns an instruction.
pub static BF16: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Bf16Pairs,
    mr: 2 * SIDE,
    nr: WIDTH,
    tiles: Tiles::Registers([heights!(bf16_tile, false), heights!(bf16_tile, true)], Some(by_size!(bf16_taps))),
};

/// f32 as three bf16 ([`gemm_split`](super::gemm_split)): six instructions for what takes bf16 one.
pub static F32: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Bf16x3,
    mr: 2 * SIDE,
    nr: WIDTH,
    tiles: Tiles::Registers(
        [
            &by_height(x3_tile::<false, false>, x3_tile::<true, false>),
            &by_height(x3_tile::<false, true>, x3_tile::<true, true>),
        ],
        None,
    ),
};

/// f16 as two bf16: three instructions.
pub static F16_SPLIT: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Bf16x2,
    mr: 2 * SIDE,
    nr: WIDTH,
    tiles: Tiles::Registers(
        [
            &by_height(x2_tile::<false, false>, x2_tile::<true, false>),
            &by_height(x2_tile::<false, true>, x2_tile::<true, true>),
        ],
        None,
    ),
};

/// The tiles of one to thirty-two rows, of which more than sixteen are `high`.
const fn by_height(low: Tile, high: Tile) -> [Tile; 2 * SIDE] {
    let mut tiles = [high; 2 * SIDE];
    let mut rows = 1;
    while rows <= SIDE {
        tiles[rows - 1] = low;
        rows += 1;
    }
    tiles
}

/// The same with `TDPFP16PS`.
pub static F16: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::F16Pairs,
    mr: 2 * SIDE,
    nr: WIDTH,
    tiles: Tiles::Registers([heights!(f16_tile, false), heights!(f16_tile, true)], Some(by_size!(f16_taps))),
};

/// 32 x 32 with `TDPBUSD`: sixty-four terms, 32-bit sums.
pub static INT8: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Int8Quads,
    mr: 2 * SIDE,
    nr: WIDTH,
    tiles: Tiles::Registers([heights!(int8_tile, false), heights!(int8_tile, true)], None),
};

/// What `LDTILECFG` reads: palette 1, and for each tile register the bytes of a row and the number of rows.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Shapes {
    /// For a tile of `rows` rows; registers that it does not use have none.
    fn of(rows: usize) -> Shapes {
        let low = rows.min(SIDE);
        let heights = [low, low, rows - low, rows - low, low, rows - low, SIDE, SIDE];
        let mut shapes = Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (register, &height) in heights.iter().enumerate().filter(|(_, height)| **height > 0) {
            shapes.row_bytes[register] = ROW as u16;
            shapes.rows[register] = height as u8;
        }
        shapes
    }
}

/// Gives this thread's tile registers the shapes for tiles of `rows` rows, 1 to 32.
///
/// # Safety
/// AMX must be available.
pub(crate) unsafe fn set_up(rows: usize) {
    let shapes = Shapes::of(rows);
    // SAFETY: reads the 64 bytes of `shapes`, which describe registers of palette 1: 64 bytes by 16 rows at most.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &shapes, options(nostack, readonly)) };
}

/// Puts this thread's tile registers back into their initial state.
///
/// # Safety
/// AMX must be available.
pub(crate) unsafe fn release() {
    // SAFETY: no memory is touched; no code but this module's expects anything of tile registers.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// The last units of A and of the panel, fewer than sixteen, beside zeros.
#[repr(C, align(64))]
pub(crate) struct Rest {
    a: [[u8; ROW]; 2 * SIDE],
    panel: [[u8; 4 * WIDTH]; SIDE],
}

/// Copies the last units of A, as far as there are units beyond the last sixteen.
///
/// # Safety
/// `a` must hold `rows` rows of `units` units, `lda` bytes apart; `to` must be writable.
#[target_feature(enable = "avx512f")]
unsafe fn copy_rows(a: *const u8, lda: usize, rows: usize, units: usize, to: *mut Rest) {
    let mask = (1u16 << (units % SIDE)) - 1;
    // SAFETY: reads are masked; writes lie inside `to`.
    unsafe {
        let (a, to) = (a.add(units / SIDE * ROW), (&raw mut (*to).a).cast::<u8>());
        for row in 0..rows {
            let x = _mm512_maskz_loadu_epi32(mask, a.add(row * lda).cast());
            _mm512_store_si512(to.add(row * ROW).cast(), x);
        }
    }
}

/// The same of a panel of `width` columns.
///
/// # Safety
/// `panel` must hold `units` rows of as many units as it has columns; `to` must be writable. AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn copy_panel(panel: *const u8, width: usize, units: usize, to: *mut Rest) {
    let row = 4 * width;
    // SAFETY: reads are masked or inside the panel; writes lie inside `to`.
    unsafe {
        let (panel, to) = (panel.add(units / SIDE * SIDE * row), (&raw mut (*to).panel).cast::<u8>());
        for at in (0..SIDE * row).step_by(ROW) {
            let inside = if at < units % SIDE * row { u16::MAX } else { 0 };
            let x = _mm512_maskz_loadu_epi32(inside, panel.wrapping_add(at).cast());
            _mm512_store_si512(to.add(at).cast(), x);
        }
    }
}

/// The four registers of sums as zeros or, to go on from there, as C.
macro_rules! begin {
    () => {
        concat!(
            "test {accumulate:e}, {accumulate:e}\n jne 2f\n",
            "tilezero tmm0\n",
            ".if {wide}\n tilezero tmm1\n .endif\n",
            ".if {high}\n tilezero tmm2\n .endif\n",
            ".if {wide} && {high}\n tilezero tmm3\n .endif\n",
            "jmp 3f\n",
            "2: tileloadd tmm0, [{c} + {ldc}*1]\n",
            ".if {wide}\n tileloadd tmm1, [{c} + {ldc}*1 + 64]\n .endif\n",
            ".if {high}\n tileloadd tmm2, [{c_high} + {ldc}*1]\n .endif\n",
            ".if {wide} && {high}\n tileloadd tmm3, [{c_high} + {ldc}*1 + 64]\n .endif\n",
            "3:",
        )
    };
}

/// Stores them.
macro_rules! end {
    () => {
        concat!(
            "tilestored [{c} + {ldc}*1], tmm0\n",
            ".if {wide}\n tilestored [{c} + {ldc}*1 + 64], tmm1\n .endif\n",
            ".if {high}\n tilestored [{c_high} + {ldc}*1], tmm2\n .endif\n",
            ".if {wide} && {high}\n tilestored [{c_high} + {ldc}*1 + 64], tmm3\n .endif",
        )
    };
}

/// Loads sixteen units of A and of the panel, and multiplies them.
macro_rules! round {
    ($dot:literal) => {
        concat!(
            "tileloadd tmm6, [{panel} + {row}*1]\n",
            "tileloadd tmm4, [{a} + {lda}*1]\n",
            $dot,
            " tmm0, tmm4, tmm6\n",
            ".if {wide}\n tileloadd tmm7, [{panel} + {row}*1 + 64]\n",
            $dot,
            " tmm1, tmm4, tmm7\n .endif\n",
            ".if {high}\n tileloadd tmm5, [{a_high} + {lda}*1]\n",
            $dot,
            " tmm2, tmm5, tmm6\n .endif\n",
            ".if {wide} && {high}\n ",
            $dot,
            " tmm3, tmm5, tmm7\n .endif",
        )
    };
}

macro_rules! tile {
    ($name:ident, $dot:literal) => {
        /// # Safety
        /// As [`Tile`] says, for `ROWS` rows of a panel, or of half of one; AMX must be available, and its registers be set
        /// up for as many rows, or for more where these are sixteen; `rest` must hold what [`copy_panel`] makes of the panel.
        #[target_feature(enable = "avx512f")]
        unsafe fn $name<const ROWS: usize, const WIDE: bool>(
            units: usize,
            a: *const u8,
            lda: usize,
            panel: *const u8,
            c: *mut f32,
            ldc: usize,
            accumulate: bool,
            prefetch: *const u8,
            rest: *mut Rest,
        ) {
            let row = if WIDE { 2 * ROW } else { ROW };
            let mut left: *const Rest = std::ptr::null();
            if units % SIDE > 0 {
                left = rest;
                // SAFETY: the rows of A that the caller vouches for.
                unsafe { copy_rows(a, lda, ROWS, units, rest) };
            }
            // SAFETY: rows of A, panel and C are what the caller vouches for, and registers have as many rows as are there;
            // units that are left are read from the copy, whole registers of them. Prefetches do not fault.
            unsafe {
                asm!(
                    // Tile registers take a base and the distance of rows.
                    begin!(),
                    "test {rounds}, {rounds}",
                    "je 5f",
                    // Sixteen units a round, and the four lines of the next panel that `Tile` allows for them.
                    "4:",
                    round!($dot),
                    "prefetcht1 [{next}]",
                    "prefetcht1 [{next} + 64]",
                    "prefetcht1 [{next} + 128]",
                    "prefetcht1 [{next} + 192]",
                    "add {next}, 256",
                    "add {a}, {side_bytes}",
                    "add {a_high}, {side_bytes}",
                    "add {panel}, {panel_bytes}",
                    "dec {rounds}",
                    "jne 4b",
                    // One more round over what is left.
                    "5:",
                    "test {left}, {left}",
                    "je 6f",
                    "mov {a}, {left}",
                    "lea {a_high}, [{left} + {left_high}]",
                    "lea {panel}, [{left} + {left_panel}]",
                    "mov {lda:e}, {side_bytes}",
                    "mov {rounds:e}, 1",
                    "xor {left:e}, {left:e}",
                    "jmp 4b",
                    "6:",
                    end!(),
                    wide = const WIDE as usize,
                    high = const (ROWS > SIDE) as usize,
                    side_bytes = const ROW,
                    panel_bytes = const if WIDE { 2 * SIDE * ROW } else { SIDE * ROW },
                    left_high = const SIDE * ROW,
                    left_panel = const 2 * SIDE * ROW,
                    accumulate = in(reg) u32::from(accumulate),
                    c = in(reg) c,
                    c_high = in(reg) c.wrapping_add(SIDE * ldc),
                    ldc = in(reg) 4 * ldc,
                    a = inout(reg) a => _,
                    a_high = inout(reg) a.wrapping_add(SIDE * lda) => _,
                    lda = inout(reg) lda => _,
                    panel = inout(reg) panel => _,
                    row = in(reg) row,
                    rounds = inout(reg) units / SIDE => _,
                    left = inout(reg) left => _,
                    next = inout(reg) prefetch => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

macro_rules! taps_tile {
    ($name:ident, $dot:literal) => {
        /// # Safety
        /// The rows and panels of `job` must be readable, `c` hold the tile's rows of the panel's width, for at most sixteen rows
        /// or more than those, and half a panel or a whole one; AMX must be available, and its registers be set up for as many
        /// rows, or for more where these are sixteen.
        #[target_feature(enable = "avx512f")]
        unsafe fn $name<const HIGH: bool, const WIDE: bool>(job: &TapsJob, c: *mut f32, ldc: usize) {
            // SAFETY: pieces of A and of the panel, and C, are what the caller vouches for. Prefetches do not fault.
            unsafe {
                asm!(
                    begin!(),
                    "4:",
                    "mov {a}, [{job} + {a_at}]",
                    "add {a}, [{tap}]",
                    "lea {a_high}, [{a} + {high_bytes}]",
                    "mov {panel}, [{tap} + {panel_of_tap}]",
                    "mov {next}, [{job} + {next_at}]",
                    "add {next}, {panel}",
                    "add {panel}, [{job} + {panel_at}]",
                    "mov {r}, [{job} + {rounds_at}]",
                    "5:",
                    round!($dot),
                    "prefetcht1 [{next}]",
                    "add {next}, [{job} + {next_step_at}]",
                    "add {a}, [{job} + {a_step_at}]",
                    "add {a_high}, [{job} + {a_step_at}]",
                    "add {panel}, {panel_bytes}",
                    "dec {r}",
                    "jne 5b",
                    "add {tap}, {tap_bytes}",
                    "cmp {tap}, [{job} + {taps_end_at}]",
                    "jne 4b",
                    end!(),
                    wide = const WIDE as usize,
                    high = const HIGH as usize,
                    panel_bytes = const if WIDE { 2 * SIDE * ROW } else { SIDE * ROW },
                    a_at = const offset_of!(TapsJob, a),
                    high_bytes = const SIDE * ROW,
                    a_step_at = const offset_of!(TapsJob, a_step),
                    panel_at = const offset_of!(TapsJob, panel),
                    rounds_at = const offset_of!(TapsJob, rounds),
                    next_at = const offset_of!(TapsJob, next),
                    next_step_at = const offset_of!(TapsJob, next_step),
                    taps_end_at = const offset_of!(TapsJob, taps_end),
                    panel_of_tap = const offset_of!(Tap, panel),
                    tap_bytes = const size_of::<Tap>(),
                    job = in(reg) job,
                    tap = inout(reg) job.taps => _,
                    accumulate = in(reg) u32::from(job.accumulate),
                    c = in(reg) c,
                    c_high = in(reg) c.wrapping_add(SIDE * ldc),
                    ldc = in(reg) 4 * ldc,
                    a = out(reg) _,
                    a_high = out(reg) _,
                    lda = in(reg) ROW,
                    panel = out(reg) _,
                    row = in(reg) if WIDE { 2 * ROW } else { ROW },
                    r = out(reg) _,
                    next = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Copies `count` sixteens of units that follow each other, to places `step` bytes apart.
///
/// # Safety
/// `from` must be readable for `count` x 64 bytes, `to` writable at each place; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn spread_units(from: *const u8, count: usize, to: *mut u8, step: usize) {
    for at in 0..count {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.add(at * step).cast(), _mm512_loadu_si512(from.add(at * ROW).cast())) };
    }
}

/// Loads part `$part` of A's tiles.
macro_rules! load_a {
    ($part:literal) => {
        concat!(
            "tileloadd tmm4, [{a} + {lda}*1 + 64*",
            $part,
            "]\n",
            ".if {high}\n tileloadd tmm5, [{a_high} + {lda}*1 + 64*",
            $part,
            "]\n .endif",
        )
    };
}

/// Loads part `$part` of the panel's tiles.
macro_rules! load_panel {
    ($part:literal) => {
        concat!(
            "tileloadd tmm6, [{panel} + {row}*1 + {part_bytes}*",
            $part,
            "]\n",
            ".if {wide}\n tileloadd tmm7, [{panel} + {row}*1 + {part_bytes}*",
            $part,
            " + 64]\n .endif",
        )
    };
}

/// Multiplies the parts that are loaded, and asks for two more lines of the next panel.
macro_rules! multiply {
    ($line:literal) => {
        concat!(
            "tdpbf16ps tmm0, tmm4, tmm6\n",
            "prefetcht1 [{next} + 128*",
            $line,
            "]\n",
            ".if {wide}\n tdpbf16ps tmm1, tmm4, tmm7\n .endif\n",
            ".if {high}\n tdpbf16ps tmm2, tmm5, tmm6\n .endif\n",
            "prefetcht1 [{next} + 128*",
            $line,
            " + 64]\n",
            ".if {wide} && {high}\n tdpbf16ps tmm3, tmm5, tmm7\n .endif",
        )
    };
}

macro_rules! split_tile {
    ($name:ident, $parts:literal, $lines:literal, [$($step:expr),* $(,)?]) => {
        /// # Safety
        /// As [`Tile`] says, for at most sixteen rows or more than those, and operands in parts; AMX must be available, and its
        /// registers be set up for as many rows, or for more where these are sixteen.
        #[target_feature(enable = "avx512f")]
        unsafe fn $name<const HIGH: bool, const WIDE: bool>(
            units: usize,
            a: *const u8,
            lda: usize,
            panel: *const u8,
            c: *mut f32,
            ldc: usize,
            accumulate: bool,
            prefetch: *const u8,
            _rest: *mut Rest,
        ) {
            let row = if WIDE { 2 * ROW } else { ROW };
            // SAFETY: rows of A, panel and C are what the caller vouches for, whole groups of terms, and registers have as many
            // rows as are there. Prefetches do not fault.
            unsafe {
                asm!(
                    begin!(),
                    "test {groups}, {groups}",
                    "je 5f",
                    // A group of terms a round. Each step changes the parts of one operand.
                    "4:",
                    $($step,)*
                    "add {next}, {lines_bytes}",
                    "add {a}, {group_bytes}",
                    "add {a_high}, {group_bytes}",
                    "add {panel}, {panel_bytes}",
                    "dec {groups}",
                    "jne 4b",
                    "5:",
                    end!(),
                    wide = const WIDE as usize,
                    high = const HIGH as usize,
                    group_bytes = const $parts * ROW,
                    part_bytes = const if WIDE { 2 * SIDE * ROW } else { SIDE * ROW },
                    panel_bytes = const if WIDE { $parts * 2 * SIDE * ROW } else { $parts * SIDE * ROW },
                    lines_bytes = const 64 * $lines,
                    accumulate = in(reg) u32::from(accumulate),
                    c = in(reg) c,
                    c_high = in(reg) c.wrapping_add(SIDE * ldc),
                    ldc = in(reg) 4 * ldc,
                    a = inout(reg) a => _,
                    a_high = inout(reg) a.wrapping_add(SIDE * lda) => _,
                    lda = in(reg) lda,
                    panel = inout(reg) panel => _,
                    row = in(reg) row,
                    groups = inout(reg) units / ($parts * SIDE) => _,
                    next = inout(reg) prefetch => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

// A quarter of the units of a group, in lines of the next panel: two for each of the products.
split_tile!(
    x3_tile,
    3,
    12,
    [
        load_a!(2),
        load_panel!(0),
        multiply!(0),
        load_a!(1),
        multiply!(1),
        load_panel!(1),
        multiply!(2),
        load_a!(0),
        multiply!(3),
        load_panel!(0),
        multiply!(4),
        load_panel!(2),
        multiply!(5),
    ]
);
split_tile!(
    x2_tile,
    2,
    8,
    [load_a!(1), load_panel!(0), multiply!(0), load_a!(0), multiply!(1), load_panel!(1), multiply!(2),]
);

tile!(bf16_tile, "tdpbf16ps");
tile!(f16_tile, "tdpfp16ps");
tile!(int8_tile, "tdpbusd");
taps_tile!(bf16_taps, "tdpbf16ps");
taps_tile!(f16_taps, "tdpfp16ps");

/// Products of registers alone, for [`calibrate`](crate::calibrate): `rounds` times four instructions of 16 x 16 x 16 units.
///
/// # Safety
/// AMX must be available, and multiply operands of that form.
pub unsafe fn multiply_registers(form: Form, rounds: usize) {
    // SAFETY: forwarded; only registers are touched.
    unsafe {
        set_up(2 * SIDE);
        let run = match form {
            Form::Int8Quads => int8_registers,
            Form::F16Pairs => f16_registers,
            _ => bf16_registers,
        };
        run(rounds);
        release();
    }
}

macro_rules! registers {
    ($name:ident, $dot:literal) => {
        /// # Safety
        /// The tile registers must be set up for 32 rows.
        unsafe fn $name(rounds: usize) {
            // SAFETY: only registers are touched; they are 0 from [`set_up`] on.
            unsafe {
                asm!(
                    "test {rounds}, {rounds}",
                    "je 3f",
                    "2:",
                    concat!($dot, " tmm0, tmm4, tmm6"),
                    concat!($dot, " tmm1, tmm4, tmm7"),
                    concat!($dot, " tmm2, tmm5, tmm6"),
                    concat!($dot, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jne 2b",
                    "3:",
                    rounds = inout(reg) rounds => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, nomem),
                );
            }
        }
    };
}

registers!(bf16_registers, "tdpbf16ps");
registers!(f16_registers, "tdpfp16ps");
registers!(int8_registers, "tdpbusd");
