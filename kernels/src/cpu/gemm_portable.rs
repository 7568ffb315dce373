//! Micro-kernels in plain Rust: correct everywhere, as fast as the compiler's vectoriser makes them.

use super::gemm_kernel::{Form, Kernel, Tile, Tiles};
use crate::isa::Isa;
use half::f16;

/// 4 x 16 f32.
pub(crate) static F32: Kernel = Kernel {
    isa: Isa::Portable,
    form: Form::F32,
    mr: 4,
    nr: 16,
    tiles: Tiles::Vectors([
        &[tile::<1, 8> as Tile, tile::<2, 8>, tile::<3, 8>, tile::<4, 8>],
        &[tile::<1, 16> as Tile, tile::<2, 16>, tile::<3, 16>, tile::<4, 16>],
    ]),
};

/// # Safety
/// `a` must hold `MR` rows of `terms` f32 `lda` bytes apart, `panel` `terms * WIDTH` f32, `c` `MR` rows of `WIDTH`.
unsafe fn tile<const MR: usize, const WIDTH: usize>(
    terms: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    _prefetch: *const u8,
) {
    let mut sums = [[0f32; WIDTH]; MR];
    // SAFETY: see above.
    unsafe {
        for term in 0..terms {
            let b: [f32; WIDTH] = panel.cast::<[f32; WIDTH]>().add(term).read_unaligned();
            for (row, sums) in sums.iter_mut().enumerate() {
                let x = a.add(row * lda).cast::<f32>().add(term).read_unaligned();
                for lane in 0..WIDTH {
                    sums[lane] += x * b[lane];
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (lane, sum) in sums.iter().enumerate() {
                let target = c.add(row * ldc + lane);
                target.write(if accumulate { *target + sum } else { *sum });
            }
        }
    }
}

/// 4 x 16 of bytes, four terms a unit.
pub static INT8: Kernel = Kernel {
    isa: Isa::Portable,
    form: Form::Int8Quads,
    mr: 4,
    nr: 16,
    tiles: Tiles::Vectors([
        &[quads::<1, 8> as Tile, quads::<2, 8>, quads::<3, 8>, quads::<4, 8>],
        &[quads::<1, 16> as Tile, quads::<2, 16>, quads::<3, 16>, quads::<4, 16>],
    ]),
};

/// # Safety
/// As [`super::gemm_kernel::Tile`] says; `c` holds integers.
unsafe fn quads<const MR: usize, const WIDTH: usize>(
    units: usize,
    a: *const u8,
    lda: usize,
    panel: *const u8,
    c: *mut f32,
    ldc: usize,
    accumulate: bool,
    _prefetch: *const u8,
) {
    let mut sums = [[0i32; WIDTH]; MR];
    // SAFETY: see above.
    unsafe {
        for unit in 0..units {
            let b: [[i8; 4]; WIDTH] = panel.cast::<[[i8; 4]; WIDTH]>().add(unit).read_unaligned();
            for (row, sums) in sums.iter_mut().enumerate() {
                let x: [u8; 4] = a.add(row * lda).cast::<[u8; 4]>().add(unit).read_unaligned();
                for (sum, b) in sums.iter_mut().zip(&b) {
                    *sum += x.iter().zip(b).map(|(&x, &b)| i32::from(x) * i32::from(b)).sum::<i32>();
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (lane, sum) in sums.iter().enumerate() {
                let target = c.cast::<i32>().add(row * ldc + lane);
                target.write(if accumulate { *target + sum } else { *sum });
            }
        }
    }
}

/// # Safety
/// `src` and `dst` must hold `n` bytes.
pub(crate) unsafe fn copy_8(src: *const u8, dst: *mut u8, n: usize) {
    // SAFETY: forwarded.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, n) }
}

/// # Safety
/// `src` and `dst` must hold `n` f32.
pub(crate) unsafe fn copy_32(src: *const u8, dst: *mut u8, n: usize) {
    // SAFETY: forwarded.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, 4 * n) }
}

/// # Safety
/// `src` and `dst` must hold `n` 16-bit elements.
pub(crate) unsafe fn copy_16(src: *const u8, dst: *mut u8, n: usize) {
    // SAFETY: forwarded.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, 2 * n) }
}

/// # Safety
/// `src` must hold `n` f16 and `dst` `n` f32.
pub(crate) unsafe fn widen_f16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const u16, *mut f32) = (src.cast(), dst.cast());
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { dst.add(i).write(f16::from_bits(src.add(i).read()).to_f32()) }
    }
}

/// # Safety
/// `src` must hold `n` bf16 and `dst` `n` f32.
pub(crate) unsafe fn widen_bf16(src: *const u8, dst: *mut u8, n: usize) {
    let (src, dst): (*const u16, *mut u32) = (src.cast(), dst.cast());
    for i in 0..n {
        // SAFETY: `i < n`.
        unsafe { dst.add(i).write(u32::from(src.add(i).read()) << 16) }
    }
}

/// # Safety
/// As [`super::gemm_kernel::expand_panel`].
pub(crate) unsafe fn expand(src: *const u32, units: usize, width: usize, dst: *mut f32, widen: impl Fn(u16) -> f32) {
    for unit in 0..units {
        for lane in 0..width {
            // SAFETY: inside the panel.
            unsafe {
                let pair = src.add(unit * width + lane).read();
                dst.add(2 * unit * width + lane).write(widen(pair as u16));
                dst.add((2 * unit + 1) * width + lane).write(widen((pair >> 16) as u16));
            }
        }
    }
}
