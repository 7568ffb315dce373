//! Steps of tile programs that read 16-bit memory and write it: widened, computed and rounded in one pass.
//!
//! A step of its own for each conversion would write f32 to a register of the tile (a piece of L1) and read it again, twice as
//! many bytes as the memory it comes from: an addition in bf16 took twice PyTorch's time. Here one function per operation and
//! instruction set takes whatever its operands are, which is decided four vectors at a time, by branches that always go one
//! way.

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::simd::{Portable, Simd};
use super::tile_exec_ops::{Args, BinaryOp, OpFn, TernaryOp, UnaryOp, dense, levels};
use crate::dtype::DType;
use crate::isa::Isa;
use std::marker::PhantomData;

/// How the values of an operand lie in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lane {
    /// Full, f32.
    F32,
    F16,
    Bf16,
    /// One f32 for a whole row.
    Scalar,
    /// Results only: f32, rounded to the 16-bit type.
    F32OfF16,
    F32OfBf16,
}

impl Lane {
    /// That of a full operand, if its type has one.
    pub(super) fn of(dtype: DType) -> Option<Lane> {
        match dtype {
            DType::F32 => Some(Lane::F32),
            DType::F16 => Some(Lane::F16),
            DType::BF16 => Some(Lane::Bf16),
            _ => None,
        }
    }

    /// Whether memory of 16-bit elements.
    pub(super) fn is_narrow(self) -> bool {
        matches!(self, Lane::F16 | Lane::Bf16)
    }

    /// Address of the element `at`.
    #[inline(always)]
    fn place(self, p: *const f32, at: isize) -> *const f32 {
        p.wrapping_byte_offset(at * if self.is_narrow() { 2 } else { 4 })
    }
}

/// Those of a step's result and operands; what a step does not have is any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    pub dst: Lane,
    pub a: Lane,
    pub b: Lane,
    pub c: Lane,
    /// Results go past the caches: their rows are aligned to cache lines, and `fence` follows before anything reads them.
    pub past: bool,
}

impl Lanes {
    /// f32 throughout.
    pub(super) const PLAIN: Lanes = Lanes { dst: Lane::F32, a: Lane::F32, b: Lane::F32, c: Lane::F32, past: false };
}

/// An operation of up to three operands.
pub(super) trait Operation {
    const OPERANDS: usize;
    /// Cheap enough to gain from four vectors at a time.
    const LIGHT: bool;
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F;
}

pub(super) struct One<O>(PhantomData<O>);
pub(super) struct Two<O>(PhantomData<O>);
pub(super) struct Three<O>(PhantomData<O>);

impl<O: UnaryOp> Operation for One<O> {
    const OPERANDS: usize = 1;
    const LIGHT: bool = O::LIGHT;
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::F, _: S::F, _: S::F) -> S::F {
        O::apply(s, a)
    }
}

impl<O: BinaryOp> Operation for Two<O> {
    const OPERANDS: usize = 2;
    const LIGHT: bool = O::LIGHT;
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, _: S::F) -> S::F {
        O::apply(s, a, b)
    }
}

impl<O: TernaryOp> Operation for Three<O> {
    const OPERANDS: usize = 3;
    const LIGHT: bool = true;
    #[inline(always)]
    fn apply<S: Simd>(s: S, a: S::F, b: S::F, c: S::F) -> S::F {
        O::apply(s, a, b, c)
    }
}

/// `N` vectors of an operand from column `i` of its row on.
#[inline(always)]
unsafe fn read<S: Simd, const N: usize>(s: S, lane: Lane, row: *const f32, i: usize) -> [S::F; N] {
    let mut v = [s.splat(0.0); N];
    // SAFETY: the caller vouches for `N` vectors there, or for the row's scalar.
    unsafe {
        match lane {
            Lane::F16 => {
                for (k, v) in v.iter_mut().enumerate() {
                    *v = s.load_f16(row.cast::<u16>().add(i + k * S::LANES));
                }
            }
            Lane::Bf16 => {
                for (k, v) in v.iter_mut().enumerate() {
                    *v = s.load_bf16(row.cast::<u16>().add(i + k * S::LANES));
                }
            }
            Lane::Scalar => v = [s.splat(*row); N],
            _ => {
                for (k, v) in v.iter_mut().enumerate() {
                    *v = s.load(row.add(i + k * S::LANES));
                }
            }
        }
    }
    v
}

/// The first `n` elements from column `i` on.
#[inline(always)]
unsafe fn read_n<S: Simd>(s: S, lane: Lane, row: *const f32, i: usize, n: usize) -> S::F {
    // SAFETY: the caller vouches for `n` elements there, or for the row's scalar.
    unsafe {
        match lane {
            Lane::F16 => s.load_f16_n(row.cast::<u16>().add(i), n),
            Lane::Bf16 => s.load_bf16_n(row.cast::<u16>().add(i), n),
            Lane::Scalar => s.splat(*row),
            _ => s.load_n(row.add(i), n),
        }
    }
}

/// `N` vectors of the result, an even number.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn write<S: Simd, const N: usize>(s: S, lanes: &Lanes, row: *mut f32, i: usize, v: [S::F; N]) {
    let l = S::LANES;
    // SAFETY: the caller vouches for `N` vectors there, aligned if they go past the caches.
    unsafe {
        let (row32, row16) = (row.add(i), row.cast::<u16>().add(i));
        match (lanes.dst, lanes.past) {
            (Lane::Bf16, past) => {
                for k in (0..N).step_by(2) {
                    if past {
                        s.stream_bf16_2(row16.add(k * l), v[k], v[k + 1]);
                    } else {
                        s.store_bf16_2(row16.add(k * l), v[k], v[k + 1]);
                    }
                }
            }
            (Lane::F16, false) => {
                for k in 0..N {
                    s.store_f16(row16.add(k * l), v[k]);
                }
            }
            (Lane::F16, true) => {
                for k in 0..N {
                    s.stream_f16(row16.add(k * l), v[k]);
                }
            }
            (Lane::F32OfF16, _) => {
                for k in 0..N {
                    s.store(row32.add(k * l), s.round_f16(v[k]));
                }
            }
            (Lane::F32OfBf16, _) => {
                for k in 0..N {
                    s.store(row32.add(k * l), s.round_bf16(v[k]));
                }
            }
            (_, past) => {
                for k in 0..N {
                    if past { s.stream(row32.add(k * l), v[k]) } else { s.store(row32.add(k * l), v[k]) }
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn write_n<S: Simd>(s: S, lanes: &Lanes, row: *mut f32, i: usize, v: S::F, n: usize) {
    // SAFETY: the caller vouches for `n` elements there.
    unsafe {
        match lanes.dst {
            Lane::F16 => s.store_f16_n(row.cast::<u16>().add(i), v, n),
            Lane::Bf16 => s.store_bf16_n(row.cast::<u16>().add(i), v, n),
            Lane::F32OfF16 => s.store_n(row.add(i), s.round_f16(v), n),
            Lane::F32OfBf16 => s.store_n(row.add(i), s.round_bf16(v), n),
            _ => s.store_n(row.add(i), v, n),
        }
    }
}

/// Where the result and the operands of a row begin.
struct Row {
    dst: *mut f32,
    a: *const f32,
    b: *const f32,
    c: *const f32,
}

#[inline(always)]
unsafe fn vectors<S: Simd, T: Operation, const N: usize>(s: S, lanes: &Lanes, row: &Row, i: usize) {
    // SAFETY: forwarded.
    unsafe {
        let a = read::<S, N>(s, lanes.a, row.a, i);
        let b = if T::OPERANDS > 1 { read::<S, N>(s, lanes.b, row.b, i) } else { a };
        let c = if T::OPERANDS > 2 { read::<S, N>(s, lanes.c, row.c, i) } else { a };
        let mut v = a;
        for k in 0..N {
            v[k] = T::apply(s, a[k], b[k], c[k]);
        }
        write(s, lanes, row.dst, i, v);
    }
}

#[inline(always)]
unsafe fn typed_body<S: Simd, T: Operation>(s: S, g: &Args) {
    let (mut rows, mut cols, l, lanes) = (g.rows, g.cols, S::LANES, &g.lanes);
    let flat = dense(false, g.dld, cols)
        && dense(lanes.a == Lane::Scalar, g.ald, cols)
        && (T::OPERANDS < 2 || dense(lanes.b == Lane::Scalar, g.bld, cols))
        && (T::OPERANDS < 3 || dense(lanes.c == Lane::Scalar, g.cld, cols));
    if rows > 1 && flat {
        (rows, cols) = (1, rows * cols);
    }
    for r in 0..rows as isize {
        let row = Row {
            dst: lanes.dst.place(g.dst, r * g.dld).cast_mut(),
            a: lanes.a.place(g.a, r * g.ald),
            b: lanes.b.place(g.b, r * g.bld),
            c: lanes.c.place(g.c, r * g.cld),
        };
        let mut i = 0;
        // SAFETY: the caller vouches for `rows x cols` elements of every operand at its stride; every access below is at
        // a column under `cols`.
        unsafe {
            if T::LIGHT {
                while i + 4 * l <= cols {
                    vectors::<S, T, 4>(s, lanes, &row, i);
                    i += 4 * l;
                }
            } else {
                while i + 2 * l <= cols {
                    vectors::<S, T, 2>(s, lanes, &row, i);
                    i += 2 * l;
                }
            }
            while i < cols {
                let n = l.min(cols - i);
                let a = read_n(s, lanes.a, row.a, i, n);
                let b = if T::OPERANDS > 1 { read_n(s, lanes.b, row.b, i, n) } else { a };
                let c = if T::OPERANDS > 2 { read_n(s, lanes.c, row.c, i, n) } else { a };
                write_n(s, lanes, row.dst, i, T::apply(s, a, b, c), n);
                i += l;
            }
        }
    }
}

levels!(Args, OpFn, typed_body, pick_typed, typed_512, typed_256, typed_plain, [T: Operation], [T]);
