//! Micro-kernels for AVX-512: 14 rows x 2 vectors of 16.
//!
//! ```text
//!            zmm0  zmm1      one panel row
//! row 0   *  zmm4  zmm5      28 accumulators; each row's element is broadcast into zmm2 and used twice
//! ...
//! row 13  *  zmm30 zmm31
//! ```
//!
//! Measured on one core of a Zen 5 server, share of the register-resident multiply-add rate: 97 % from L1, 96 to 98 % with
//! A (252 x 256) and ten panels in L2; whole products 90 to 97 %. `VDPBF16PS` reaches 1.8 to 1.9 times the f32 rate there.

use std::arch::x86_64::*;

use super::gemm_kernel::{Form, Kernel, Tile, Tiles};
use super::pack::Matrix;
use crate::isa::Isa;

macro_rules! heights {
    ($tile:ident) => {
        &[
            $tile::<1> as Tile,
            $tile::<2>,
            $tile::<3>,
            $tile::<4>,
            $tile::<5>,
            $tile::<6>,
            $tile::<7>,
            $tile::<8>,
            $tile::<9>,
            $tile::<10>,
            $tile::<11>,
            $tile::<12>,
            $tile::<13>,
            $tile::<14>,
        ]
    };
}

/// 14 x 32 f32.
pub static F32: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::F32,
    mr: 14,
    nr: 32,
    tiles: Tiles::Vectors([
        &[
            few_f32::<1, 1, 8> as Tile,
            few_f32::<2, 1, 8>,
            few_f32::<3, 1, 4>,
            few_f32::<4, 1, 4>,
            narrow_f32::<5>,
            narrow_f32::<6>,
            narrow_f32::<7>,
            narrow_f32::<8>,
            narrow_f32::<9>,
            narrow_f32::<10>,
            narrow_f32::<11>,
            narrow_f32::<12>,
            narrow_f32::<13>,
            narrow_f32::<14>,
        ],
        &f32_tiles::TILES,
    ]),
};

/// 14 x 32 with `VDPBF16PS`: two terms an instruction.
pub static BF16: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Bf16Pairs,
    mr: 14,
    nr: 32,
    tiles: Tiles::Vectors([heights!(narrow_bf16), &bf16_tiles::TILES]),
};

/// 14 x 32 with `VPDPBUSD`: four terms an instruction, 32-bit sums.
pub static INT8: Kernel = Kernel {
    isa: Isa::Avx512,
    form: Form::Int8Quads,
    mr: 14,
    nr: 32,
    tiles: Tiles::Vectors([heights!(narrow_int8), &int8_tiles::TILES]),
};

/// Address of row `$row` of A: three base registers five rows apart, and the row distance once, twice, three, four times.
macro_rules! row_address {
    (0) => {
        "{p0}"
    };
    (1) => {
        "{p0} + {lda}"
    };
    (2) => {
        "{p0} + {lda}*2"
    };
    (3) => {
        "{p0} + {lda3}"
    };
    (4) => {
        "{p0} + {lda}*4"
    };
    (5) => {
        "{p5}"
    };
    (6) => {
        "{p5} + {lda}"
    };
    (7) => {
        "{p5} + {lda}*2"
    };
    (8) => {
        "{p5} + {lda3}"
    };
    (9) => {
        "{p5} + {lda}*4"
    };
    (10) => {
        "{p10}"
    };
    (11) => {
        "{p10} + {lda}"
    };
    (12) => {
        "{p10} + {lda}*2"
    };
    (13) => {
        "{p10} + {lda3}"
    };
}

/// The two accumulators of row `$row`.
macro_rules! accumulators {
    ($with:ident, 0 $($rest:tt)*) => { $with!("zmm4", "zmm5" $($rest)*) };
    ($with:ident, 1 $($rest:tt)*) => { $with!("zmm6", "zmm7" $($rest)*) };
    ($with:ident, 2 $($rest:tt)*) => { $with!("zmm8", "zmm9" $($rest)*) };
    ($with:ident, 3 $($rest:tt)*) => { $with!("zmm10", "zmm11" $($rest)*) };
    ($with:ident, 4 $($rest:tt)*) => { $with!("zmm12", "zmm13" $($rest)*) };
    ($with:ident, 5 $($rest:tt)*) => { $with!("zmm14", "zmm15" $($rest)*) };
    ($with:ident, 6 $($rest:tt)*) => { $with!("zmm16", "zmm17" $($rest)*) };
    ($with:ident, 7 $($rest:tt)*) => { $with!("zmm18", "zmm19" $($rest)*) };
    ($with:ident, 8 $($rest:tt)*) => { $with!("zmm20", "zmm21" $($rest)*) };
    ($with:ident, 9 $($rest:tt)*) => { $with!("zmm22", "zmm23" $($rest)*) };
    ($with:ident, 10 $($rest:tt)*) => { $with!("zmm24", "zmm25" $($rest)*) };
    ($with:ident, 11 $($rest:tt)*) => { $with!("zmm26", "zmm27" $($rest)*) };
    ($with:ident, 12 $($rest:tt)*) => { $with!("zmm28", "zmm29" $($rest)*) };
    ($with:ident, 13 $($rest:tt)*) => { $with!("zmm30", "zmm31" $($rest)*) };
}

macro_rules! clear {
    ($x:literal, $y:literal) => {
        concat!("vpxord ", $x, ", ", $x, ", ", $x, "\nvpxord ", $y, ", ", $y, ", ", $y, "\n")
    };
}

/// One term (or pair) of one row: broadcast, two multiply-adds.
macro_rules! multiply {
    ($x:literal, $y:literal, $broadcast:literal, $fma:literal, $row:tt, $offset:literal) => {
        concat!(
            $broadcast,
            " zmm2, dword ptr [",
            row_address!($row),
            " + ",
            $offset,
            "]\n",
            $fma,
            " ",
            $x,
            ", zmm2, zmm0\n",
            $fma,
            " ",
            $y,
            ", zmm2, zmm1\n"
        )
    };
}

macro_rules! prefetch_result {
    ($x:literal, $y:literal) => {
        "prefetcht0 [{at}]\nprefetcht0 [{at} + 64]\nadd {at}, {ldc}\n"
    };
}

macro_rules! add_result {
    ($x:literal, $y:literal, $add:literal) => {
        concat!($add, " ", $x, ", ", $x, ", [{at}]\n", $add, " ", $y, ", ", $y, ", [{at} + 64]\nadd {at}, {ldc}\n")
    };
}

macro_rules! store_result {
    ($x:literal, $y:literal) => {
        concat!("vmovups [{c}], ", $x, "\nvmovups [{c} + 64], ", $y, "\nadd {c}, {ldc}\n")
    };
}

/// One unit of all rows: two loads of the panel, and every row's share.
macro_rules! unit {
    ($broadcast:literal, $fma:literal, $offset:literal, $panel:literal, $($row:tt)*) => {
        concat!(
            "vmovups zmm0, [{b} + ", $panel, "]\nvmovups zmm1, [{b} + ", $panel, " + 64]\n",
            $(accumulators!(multiply, $row, $broadcast, $fma, $row, $offset)),*
        )
    };
}

/// A micro-kernel in assembly, because the compiler neither addresses fourteen rows with six registers nor keeps the
/// accumulators in registers across the loop's end. Four units a round; one line of the next panel is fetched into L2
/// per round, so that the first tile of the next panel does not wait for memory.
macro_rules! tile {
    ($name:ident, $features:literal, $broadcast:literal, $fma:literal, $add:literal, $($row:tt)*) => {
        /// # Safety
        /// As [`super::super::gemm_kernel::Tile`] says; the instructions must be available.
        #[target_feature(enable = $features)]
        unsafe fn $name(
            terms: usize,
            a: *const u8,
            lda: usize,
            panel: *const u8,
            c: *mut f32,
            ldc: usize,
            accumulate: bool,
            prefetch: *const u8,
        ) {
            // SAFETY: reads A rows, panel and (to accumulate) C, writes C, all inside what the caller vouches for;
            // prefetches do not fault. All vector registers written are declared.
            unsafe {
                std::arch::asm!(
                    "/* low tiles use neither {lda} nor {lda3} */",
                    $(accumulators!(clear, $row),)*
                    "test {flag:l}, {flag:l}",
                    "je 6f",
                    "mov {at}, {c}",
                    $(accumulators!(prefetch_result, $row),)*
                    "6:",
                    "mov {at}, {n}",
                    "shr {at}, 2",
                    "je 3f",
                    ".p2align 5",
                    "2:",
                    unit!($broadcast, $fma, "0", "0", $($row)*),
                    "prefetcht1 [{next}]",
                    "add {next}, 64",
                    unit!($broadcast, $fma, "4", "128", $($row)*),
                    unit!($broadcast, $fma, "8", "256", $($row)*),
                    unit!($broadcast, $fma, "12", "384", $($row)*),
                    "add {p0}, 16",
                    "add {p5}, 16",
                    "add {p10}, 16",
                    "add {b}, 512",
                    "dec {at}",
                    "jne 2b",
                    "3:",
                    "and {n}, 3",
                    "je 5f",
                    "4:",
                    unit!($broadcast, $fma, "0", "0", $($row)*),
                    "add {p0}, 4",
                    "add {p5}, 4",
                    "add {p10}, 4",
                    "add {b}, 128",
                    "dec {n}",
                    "jne 4b",
                    "5:",
                    "test {flag:l}, {flag:l}",
                    "je 7f",
                    "mov {at}, {c}",
                    $(accumulators!(add_result, $row, $add),)*
                    "7:",
                    $(accumulators!(store_result, $row),)*
                    p0 = inout(reg) a => _,
                    p5 = inout(reg) a.wrapping_add(5 * lda) => _,
                    p10 = inout(reg) a.wrapping_add(10 * lda) => _,
                    lda = in(reg) lda,
                    lda3 = in(reg) 3 * lda,
                    b = inout(reg) panel => _,
                    n = inout(reg) terms => _,
                    at = out(reg) _,
                    c = inout(reg) c => _,
                    ldc = in(reg) 4 * ldc,
                    next = inout(reg) prefetch => _,
                    flag = in(reg) usize::from(accumulate),
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _,
                    out("zmm30") _, out("zmm31") _,
                    options(nostack),
                );
            }
        }
    };
}

/// The fourteen heights of one family; the first four are given.
macro_rules! tiles {
    ([$($few:expr),*], $features:literal, $broadcast:literal, $fma:literal, $add:literal) => {
        use super::super::gemm_kernel::Tile;

        pub(super) static TILES: [Tile; 14] = [
            $($few,)* rows_5, rows_6, rows_7, rows_8, rows_9, rows_10, rows_11, rows_12, rows_13, rows_14,
        ];
        tile!(rows_5, $features, $broadcast, $fma, $add, 0 1 2 3 4);
        tile!(rows_6, $features, $broadcast, $fma, $add, 0 1 2 3 4 5);
        tile!(rows_7, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6);
        tile!(rows_8, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7);
        tile!(rows_9, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7 8);
        tile!(rows_10, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7 8 9);
        tile!(rows_11, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7 8 9 10);
        tile!(rows_12, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7 8 9 10 11);
        tile!(rows_13, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7 8 9 10 11 12);
        tile!(rows_14, $features, $broadcast, $fma, $add, 0 1 2 3 4 5 6 7 8 9 10 11 12 13);
    };
}

mod f32_tiles {
    use super::few_f32;
    tiles!(
        [few_f32::<1, 2, 8> as Tile, few_f32::<2, 2, 4>, few_f32::<3, 2, 4>, few_f32::<4, 2, 2>],
        "avx512f",
        "vbroadcastss",
        "vfmadd231ps",
        "vaddps"
    );
}

/// One to four rows.
macro_rules! few_rows {
    ($features:literal, $broadcast:literal, $fma:literal, $add:literal) => {
        tile!(rows_1, $features, $broadcast, $fma, $add, 0);
        tile!(rows_2, $features, $broadcast, $fma, $add, 0 1);
        tile!(rows_3, $features, $broadcast, $fma, $add, 0 1 2);
        tile!(rows_4, $features, $broadcast, $fma, $add, 0 1 2 3);
    };
}

mod bf16_tiles {
    tiles!([rows_1, rows_2, rows_3, rows_4], "avx512f,avx512bf16", "vpbroadcastd", "vdpbf16ps", "vaddps");
    few_rows!("avx512f,avx512bf16", "vpbroadcastd", "vdpbf16ps", "vaddps");
}

mod int8_tiles {
    tiles!([rows_1, rows_2, rows_3, rows_4], "avx512f,avx512vnni", "vpbroadcastd", "vpdpbusd", "vpaddd");
    few_rows!("avx512f,avx512vnni", "vpbroadcastd", "vpdpbusd", "vpaddd");
}

/// One to four rows of f32 and `NV` vectors of columns, in `CHAINS` sums that take the terms in turn: few rows leave
/// registers, a chain of every multiply-add would wait for itself, and short chains round less (a time embedding's single
/// row is multiplied by PyTorch in as many).
///
/// # Safety
/// As [`super::gemm_kernel::Tile`] says, for a panel of `NV * 16` columns; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
unsafe fn few_f32<const MR: usize, const NV: usize, const CHAINS: usize>(
    terms: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    prefetch: *const u8,
) {
    let mut sums = [[[_mm512_setzero_ps(); NV]; MR]; CHAINS];
    // SAFETY: see above; prefetches do not fault.
    unsafe {
        let add = |sums: &mut [[__m512; NV]; MR], term: usize| {
            let row = panel.cast::<f32>().add(term * NV * 16);
            let columns: [__m512; NV] = std::array::from_fn(|v| _mm512_loadu_ps(row.wrapping_add(16 * v)));
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_ps(a.add(row * lda).cast::<f32>().add(term).read_unaligned());
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_fmadd_ps(x, column, *sum);
                }
            }
        };
        let whole = terms / CHAINS * CHAINS;
        for first in (0..whole).step_by(CHAINS) {
            // A line for every four terms.
            for line in (first..first + CHAINS).filter(|term| term.is_multiple_of(4)) {
                _mm_prefetch::<_MM_HINT_T1>(prefetch.wrapping_add(16 * line).cast());
            }
            for (chain, sums) in sums.iter_mut().enumerate() {
                add(sums, first + chain);
            }
        }
        for (chain, sums) in sums.iter_mut().enumerate() {
            if whole + chain < terms {
                add(sums, whole + chain);
            }
        }
        let mut half = CHAINS / 2;
        while half > 0 {
            let (low, high) = sums.split_at_mut(half);
            for (low, high) in low.iter_mut().flatten().zip(high.iter().flatten()) {
                for (sum, &more) in low.iter_mut().zip(high) {
                    *sum = _mm512_add_ps(*sum, more);
                }
            }
            half /= 2;
        }
        for (row, sums) in sums[0].iter().enumerate() {
            for (v, &sum) in sums.iter().enumerate() {
                let target = c.add(row * ldc + v * 16);
                let sum = if accumulate { _mm512_add_ps(sum, _mm512_loadu_ps(target)) } else { sum };
                _mm512_storeu_ps(target, sum);
            }
        }
    }
}

/// The half-width panel of f32.
///
/// # Safety
/// As [`super::gemm_kernel::Tile`] says; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
unsafe fn narrow_f32<const MR: usize>(
    terms: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    _prefetch: *const u8,
) {
    // SAFETY: see above.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); MR];
        for term in 0..terms {
            let column = _mm512_loadu_ps(panel.cast::<f32>().add(term * 16));
            for (row, sum) in sums.iter_mut().enumerate() {
                let x = a.add(row * lda).cast::<f32>().add(term).read_unaligned();
                *sum = _mm512_fmadd_ps(_mm512_set1_ps(x), column, *sum);
            }
        }
        store_narrow(&sums, c, ldc, accumulate);
    }
}

/// The half-width panel of bf16 pairs.
///
/// # Safety
/// As [`super::gemm_kernel::Tile`] says; `VDPBF16PS` must be available.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn narrow_bf16<const MR: usize>(
    pairs: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    _prefetch: *const u8,
) {
    // SAFETY: see above.
    unsafe {
        let mut sums = [_mm512_setzero_ps(); MR];
        for pair in 0..pairs {
            let column = _mm512_loadu_si512(panel.cast::<u32>().add(pair * 16).cast());
            for (row, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_epi32(a.add(row * lda).cast::<i32>().add(pair).read_unaligned());
                *sum = _mm512_dpbf16_ps(*sum, as_bf16(x), as_bf16(column));
            }
        }
        store_narrow(&sums, c, ldc, accumulate);
    }
}

/// The half-width panel of bytes.
///
/// # Safety
/// As [`super::gemm_kernel::Tile`] says, `c` holding integers; `VPDPBUSD` must be available.
#[target_feature(enable = "avx512f,avx512vnni")]
unsafe fn narrow_int8<const MR: usize>(
    quads: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    _prefetch: *const u8,
) {
    // SAFETY: see above.
    unsafe {
        let mut sums = [_mm512_setzero_si512(); MR];
        for quad in 0..quads {
            let column = _mm512_loadu_si512(panel.cast::<u32>().add(quad * 16).cast());
            for (row, sum) in sums.iter_mut().enumerate() {
                let x = _mm512_set1_epi32(a.add(row * lda).cast::<i32>().add(quad).read_unaligned());
                *sum = _mm512_dpbusd_epi32(*sum, x, column);
            }
        }
        for (row, &sum) in sums.iter().enumerate() {
            let target: *mut __m512i = c.add(row * ldc).cast();
            let sum = if accumulate { _mm512_add_epi32(sum, _mm512_loadu_si512(target)) } else { sum };
            _mm512_storeu_si512(target, sum);
        }
    }
}

fn as_bf16(bits: __m512i) -> __m512bh {
    // SAFETY: both types are 512 plain bits.
    unsafe { std::mem::transmute::<__m512i, __m512bh>(bits) }
}

/// # Safety
/// `c` must hold `MR` rows of 16 f32, `ldc` apart.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_narrow<const MR: usize>(sums: &[__m512; MR], c: *mut f32, ldc: usize, accumulate: bool) {
    for (row, &sum) in sums.iter().enumerate() {
        // SAFETY: see above.
        unsafe {
            let target = c.add(row * ldc);
            let sum = if accumulate { _mm512_add_ps(sum, _mm512_loadu_ps(target)) } else { sum };
            _mm512_storeu_ps(target, sum);
        }
    }
}

/// Mask of the first `n` lanes, `n <= 16`.
fn first_lanes(n: usize) -> u16 {
    ((1u32 << n) - 1) as u16
}

/// # Safety
/// `src` must hold `n` f16 and `dst` `n` f32; AVX-512 must be available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) unsafe fn widen_f16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const i16, *mut f32) = (src.cast(), dst.cast());
    for i in (0..n).step_by(16) {
        let lanes = first_lanes((n - i).min(16));
        // SAFETY: masked lanes are neither read nor written.
        unsafe {
            let wide = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes, src.add(i)));
            _mm512_mask_storeu_ps(dst.add(i), lanes, wide);
        }
    }
}

/// # Safety
/// `src` must hold `n` bf16 and `dst` `n` f32; AVX-512 must be available.
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) unsafe fn widen_bf16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const i16, *mut i32) = (src.cast(), dst.cast());
    for i in (0..n).step_by(16) {
        let lanes = first_lanes((n - i).min(16));
        // SAFETY: masked lanes are neither read nor written.
        unsafe {
            let wide = _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, src.add(i))));
            _mm512_mask_storeu_epi32(dst.add(i), lanes, wide);
        }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`]; `width` a multiple of 16; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn expand_bf16(src: *const u32, units: usize, width: usize, dst: *mut f32) {
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    for unit in 0..units {
        for lane in (0..width).step_by(16) {
            // SAFETY: inside the panel.
            unsafe {
                let pairs = _mm512_loadu_si512(src.add(unit * width + lane).cast());
                let row = dst.add(2 * unit * width + lane);
                _mm512_storeu_ps(row, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)));
                _mm512_storeu_ps(row.add(width), _mm512_castsi512_ps(_mm512_and_si512(pairs, high)));
            }
        }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`]; `width` a multiple of 16; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn expand_f16(src: *const u32, units: usize, width: usize, dst: *mut f32) {
    for unit in 0..units {
        for lane in (0..width).step_by(16) {
            // SAFETY: inside the panel.
            unsafe {
                let pairs = _mm512_loadu_si512(src.add(unit * width + lane).cast());
                let row = dst.add(2 * unit * width + lane);
                _mm512_storeu_ps(row, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
                let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(pairs));
                _mm512_storeu_ps(row.add(width), _mm512_cvtph_ps(upper));
            }
        }
    }
}

/// Transposes 16 x 16 blocks of four-byte units, the last one over a part of the one before it where rows end within a
/// block; returns how many units of each row it has done.
///
/// # Safety
/// As [`super::gemm_kernel::transpose_units`]; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn transpose_units(
    b: &Matrix,
    valid: usize,
    units: usize,
    width: usize,
    dst: *mut u32,
    stride: usize,
) -> usize {
    if units < 16 {
        return 0;
    }
    let row_bytes = b.row_stride * b.dtype.size_bytes() as isize;
    for lane0 in (0..width).step_by(16) {
        for unit in (0..units).step_by(16) {
            let unit = unit.min(units - 16);
            // SAFETY: rows `lane0..lane0 + lanes` have at least `unit + 16` units.
            let rows = unsafe {
                let from = b.ptr.byte_offset(lane0 as isize * row_bytes).add(unit * 4);
                let lanes = valid.saturating_sub(lane0);
                // A count that the compiler knows keeps the rows in registers.
                if lanes >= 16 { load_rows(from, row_bytes, 16) } else { load_rows(from, row_bytes, lanes) }
            };
            let rows = transpose_16x16(rows);
            for (k, row) in rows.into_iter().enumerate() {
                // SAFETY: inside the panel.
                unsafe { _mm512_storeu_si512(dst.add((unit + k) * stride + lane0).cast(), row) };
            }
        }
    }
    units
}

/// The first sixteen units of `lanes` rows, zeros for the others.
///
/// # Safety
/// The rows must be readable; AVX-512 must be available.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_rows(from: *const u8, row_bytes: isize, lanes: usize) -> [__m512i; 16] {
    let mut rows = [_mm512_setzero_si512(); 16];
    for (lane, row) in rows.iter_mut().enumerate().take(lanes) {
        // SAFETY: see above.
        *row = unsafe { _mm512_loadu_si512(from.byte_offset(lane as isize * row_bytes).cast()) };
    }
    rows
}

/// Spreads `valid <= 16` contiguous rows of `channels x taps` f32 over sixteen columns of a panel: element (channel, tap) of
/// row `lane` becomes term `tap * channels + channel` of column `lane`, other columns zero.
///
/// # Safety
/// `src` must hold the rows, `row_bytes` apart; `dst` the panel; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
pub(crate) unsafe fn spread_32(
    src: *const u8,
    row_bytes: isize,
    valid: usize,
    [channels, taps]: [usize; 2],
    dst: *mut u32,
    width: usize,
) {
    let len = channels * taps;
    let (mut tap, mut channel) = (0, 0);
    for start in (0..len).step_by(16) {
        let count = (len - start).min(16);
        // SAFETY: the rows have that many elements from `start` on.
        let rows = unsafe {
            let from = src.wrapping_add(start * 4);
            match (valid, count) {
                // Counts that the compiler knows keep the rows in registers.
                (16, 16) => load_rows(from, row_bytes, 16),
                _ => load_parts(from, row_bytes, valid, first_lanes(count)),
            }
        };
        for column in transpose_16x16(rows).into_iter().take(count) {
            // SAFETY: the term lies inside the panel.
            unsafe { _mm512_storeu_si512(dst.add((tap * channels + channel) * width).cast(), column) };
            tap += 1;
            if tap == taps {
                (tap, channel) = (0, channel + 1);
            }
        }
    }
}

/// The four-byte units of `mask` of `lanes` rows, zeros for the others.
///
/// # Safety
/// These units must be readable; AVX-512 must be available.
#[target_feature(enable = "avx512f")]
unsafe fn load_parts(from: *const u8, row_bytes: isize, lanes: usize, mask: u16) -> [__m512i; 16] {
    let mut rows = [_mm512_setzero_si512(); 16];
    for (lane, row) in rows.iter_mut().enumerate().take(lanes) {
        // SAFETY: masked lanes are not read.
        *row = unsafe { _mm512_maskz_loadu_epi32(mask, from.byte_offset(lane as isize * row_bytes).cast()) };
    }
    rows
}

/// As [`spread_32`] for 16-bit elements, two terms to a unit.
///
/// # Safety
/// As [`spread_32`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
pub(crate) unsafe fn spread_16(
    src: *const u8,
    row_bytes: isize,
    valid: usize,
    [channels, taps]: [usize; 2],
    dst: *mut u32,
    width: usize,
) {
    // SAFETY: forwarded.
    unsafe {
        match PairOrder::new(channels, taps) {
            Some(order) if valid == 16 => spread_pairs(src, row_bytes, 16, &order, dst, width),
            Some(order) => spread_pairs(src, row_bytes, valid, &order, dst, width),
            None => spread_halves(src, row_bytes, valid, [channels, taps], dst, width),
        }
    }
}

/// Elements that two vectors of 16-bit elements hold.
const WINDOW: usize = 64;

/// Where the elements of units lie in a row of `2 * half x taps` 16-bit elements: a unit is one tap of two neighbouring
/// channels. Units are counted with the taps innermost.
struct PairOrder {
    half: usize,
    taps: usize,
    /// By tap of the first unit: for sixteen units, their elements' distances from the first one's.
    tables: [[u16; 32]; PairOrder::MAX_TAPS],
}

impl PairOrder {
    const MAX_TAPS: usize = 16;

    /// `None` where a unit has elements of two taps, or sixteen units lie further apart than two vectors reach.
    fn new(channels: usize, taps: usize) -> Option<Self> {
        if !channels.is_multiple_of(2) || taps > Self::MAX_TAPS {
            return None;
        }
        let mut tables = [[0; 32]; Self::MAX_TAPS];
        for (first, table) in tables.iter_mut().enumerate().take(taps) {
            for (unit, pair) in table.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let at = (first + unit) / taps * 2 * taps + (first + unit) % taps - first;
                if at + taps >= WINDOW {
                    return None;
                }
                *pair = [at as u16, (at + taps) as u16];
            }
        }
        Some(Self { half: channels / 2, taps, tables })
    }
}

/// [`spread_16`] where units are pairs of channels: whole units are brought together by a permutation of each row.
///
/// # Safety
/// As [`spread_16`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn spread_pairs(src: *const u8, row_bytes: isize, valid: usize, order: &PairOrder, dst: *mut u32, width: usize) {
    let (half, taps) = (order.half, order.taps);
    let (units, len) = (half * taps, 2 * half * taps);
    let (mut tap, mut pair) = (0, 0);
    for start in (0..units).step_by(16) {
        let from = 2 * pair * taps + tap;
        // Behind the last unit the table leads beyond the row, where zeros are.
        let [low, high] = [0, WINDOW / 2].map(|at| first_of_32(len.saturating_sub(from + at)));
        // SAFETY: masked elements are not read; a table is 64 bytes.
        let rows = unsafe {
            let table = _mm512_loadu_si512(order.tables[tap].as_ptr().cast());
            let mut rows = [_mm512_setzero_si512(); 16];
            for (lane, row) in rows.iter_mut().enumerate().take(valid) {
                let at: *const i16 = src.byte_offset(lane as isize * row_bytes).cast();
                let at = at.wrapping_add(from);
                let halves =
                    [_mm512_maskz_loadu_epi16(low, at), _mm512_maskz_loadu_epi16(high, at.wrapping_add(WINDOW / 2))];
                *row = _mm512_permutex2var_epi16(halves[0], table, halves[1]);
            }
            rows
        };
        for column in transpose_16x16(rows).into_iter().take(units - start) {
            // SAFETY: the unit lies inside the panel.
            unsafe { _mm512_storeu_si512(dst.add((tap * half + pair) * width).cast(), column) };
            tap += 1;
            if tap == taps {
                (tap, pair) = (0, pair + 1);
            }
        }
    }
}

/// A mask of the first `n` of 32 lanes, of all if there are no more.
fn first_of_32(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// [`spread_16`] for any sizes, half a unit at a time.
///
/// # Safety
/// As [`spread_16`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
unsafe fn spread_halves(
    src: *const u8,
    row_bytes: isize,
    valid: usize,
    [channels, taps]: [usize; 2],
    dst: *mut u32,
    width: usize,
) {
    let len = channels * taps;
    for unit in 0..len.div_ceil(2) {
        // SAFETY: the unit lies inside the panel.
        unsafe { _mm512_storeu_si512(dst.add(unit * width).cast(), _mm512_setzero_si512()) };
    }
    let (mut tap, mut channel) = (0, 0);
    for start in (0..len).step_by(16) {
        let count = (len - start).min(16);
        let mut rows = [_mm512_setzero_si512(); 16];
        for (lane, row) in rows.iter_mut().enumerate().take(valid) {
            // SAFETY: masked lanes are not read.
            unsafe {
                let from = src.byte_offset(lane as isize * row_bytes).add(start * 2);
                *row = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(count), from.cast()));
            }
        }
        for column in transpose_16x16(rows).into_iter().take(count) {
            let term = tap * channels + channel;
            let column = if term % 2 == 1 { _mm512_slli_epi32::<16>(column) } else { column };
            // SAFETY: the term lies inside the panel.
            unsafe {
                let unit = dst.add(term / 2 * width);
                _mm512_storeu_si512(unit.cast(), _mm512_or_si512(column, _mm512_loadu_si512(unit.cast())));
            }
            tap += 1;
            if tap == taps {
                (tap, channel) = (0, channel + 1);
            }
        }
    }
}

/// Result row `i` holds element `i` of every input row.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_16x16(rows: [__m512i; 16]) -> [__m512i; 16] {
    let zero = _mm512_setzero_si512();
    let (mut t, mut u) = ([zero; 16], [zero; 16]);
    for i in 0..8 {
        t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
    for i in 0..4 {
        u[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        u[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        u[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for i in 0..4 {
        t[i] = _mm512_shuffle_i32x4::<0x88>(u[i], u[i + 4]);
        t[i + 4] = _mm512_shuffle_i32x4::<0xdd>(u[i], u[i + 4]);
        t[i + 8] = _mm512_shuffle_i32x4::<0x88>(u[i + 8], u[i + 12]);
        t[i + 12] = _mm512_shuffle_i32x4::<0xdd>(u[i + 8], u[i + 12]);
    }
    for i in 0..4 {
        u[i] = _mm512_shuffle_i32x4::<0x88>(t[i], t[i + 8]);
        u[i + 4] = _mm512_shuffle_i32x4::<0x88>(t[i + 4], t[i + 12]);
        u[i + 8] = _mm512_shuffle_i32x4::<0xdd>(t[i], t[i + 8]);
        u[i + 12] = _mm512_shuffle_i32x4::<0xdd>(t[i + 4], t[i + 12]);
    }
    u
}
