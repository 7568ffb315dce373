//! Copies between strided layouts, with conversion; constant fill and padding.
//!
//! Layout changes are what a model spends on memory without computing anything, so the common ones have code of their
//! own: rows contiguous on both sides are moved as bytes, and planes contiguous along different dimensions (NCHW to
//! NHWC and back) are transposed in 8x8 blocks that live in vector registers. Everything else goes element by element, a few
//! that lie side by side on both sides (pixel shuffles) as one.
//! Concatenation is one copy per piece.
//!
//! Values convert as PyTorch's casts do on x86: to nearest even between floating types, truncation to integers, "not
//! zero" to bool; integers never pass through floating point on their way to integers.

use super::simd::{bf16_bits, bf16_value, f16_bits, f16_value};
use super::tile_exec::{Prepared, run_loop};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::tile::{Bound, Instr, MAX_DIMS, Source, Space, TileProgram};

/// One side of a copy: the address of element 0 and one stride per dimension, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Side<'a> {
    /// Address of the element at index 0 of every dimension.
    pub ptr: *mut u8,
    /// Element type.
    pub dtype: DType,
    /// Strides in elements, outermost first.
    pub strides: &'a [isize],
}

/// A raw pointer that crosses threads; every use states why it may.
#[derive(Clone, Copy)]
pub(crate) struct Shared(pub *mut u8);

// SAFETY: the holder only follows the pointer where its caller vouched for the memory and tasks touch disjoint parts.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

impl Shared {
    /// The address `bytes` further on. (A method, so that closures capture the whole value.)
    #[inline(always)]
    pub(crate) fn at(self, bytes: isize) -> *mut u8 {
        self.0.wrapping_offset(bytes)
    }
}

/// A dimension of a copy, strides in bytes.
#[derive(Clone, Copy, Debug)]
struct Dim {
    n: usize,
    src: isize,
    dst: isize,
}

/// Bytes a task moves at least.
const GRAIN_BYTES: usize = 128 << 10;

/// Copies a box of elements from one layout to another, converting if the types differ.
///
/// # Safety
/// Both sides must be valid for all indices below `sizes`; they must not overlap, and no two indices may name the same
/// element of `dst`.
///
/// # Panics
/// If a side has fewer strides than there are sizes.
pub unsafe fn copy(pool: &Pool, isa: Isa, sizes: &[usize], src: Side<'_>, dst: Side<'_>) {
    if sizes.contains(&0) {
        return;
    }
    // SAFETY: the caller's promise, in each branch.
    unsafe {
        if src.dtype == dst.dtype {
            copy_same(pool, isa, &dims(sizes, &src, &dst), src.ptr, dst.ptr, src.dtype.size_bytes());
        } else if is_float(src.dtype) || is_float(dst.dtype) {
            convert(pool, isa, sizes, src, dst);
        } else {
            convert_exact(pool, &dims(sizes, &src, &dst), src, dst);
        }
    }
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The dimensions in order of the destination's strides, neighbours merged where both sides allow.
fn dims(sizes: &[usize], src: &Side<'_>, dst: &Side<'_>) -> Vec<Dim> {
    let (a, b) = (src.dtype.size_bytes() as isize, dst.dtype.size_bytes() as isize);
    let mut dims: Vec<Dim> = (0..sizes.len())
        .filter(|&d| sizes[d] != 1)
        .map(|d| Dim { n: sizes[d], src: src.strides[d] * a, dst: dst.strides[d] * b })
        .collect();
    dims.sort_by_key(|d| std::cmp::Reverse((d.dst.unsigned_abs(), d.src.unsigned_abs())));
    let mut merged: Vec<Dim> = Vec::with_capacity(dims.len());
    for d in dims {
        match merged.last_mut() {
            Some(m) if m.src == d.src * d.n as isize && m.dst == d.dst * d.n as isize => {
                *m = Dim { n: m.n * d.n, ..d };
            }
            _ => merged.push(d),
        }
    }
    if merged.is_empty() {
        merged.push(Dim { n: 1, src: a, dst: b });
    }
    merged
}

/// Byte offsets of the `at`-th index of a box.
fn offsets(dims: &[Dim], mut at: usize) -> (isize, isize) {
    let (mut src, mut dst) = (0, 0);
    for d in dims.iter().rev() {
        let i = (at % d.n) as isize;
        at /= d.n;
        src += i * d.src;
        dst += i * d.dst;
    }
    (src, dst)
}

fn count(dims: &[Dim]) -> usize {
    dims.iter().map(|d| d.n).product()
}

/// How a box of elements of one type is moved: each is code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Rows that are contiguous on both sides, as bytes.
    Rows,
    /// Planes that are contiguous along different dimensions; of the source along the dimension of that number.
    Transposed(usize),
    /// Element by element.
    Elements,
}

/// What is moved, and how: the dimensions and the bytes of an element, and the form. Few elements side by side are one larger
/// element.
fn form(mut dims: &[Dim], mut size: usize) -> (&[Dim], usize, Form) {
    loop {
        let (outer, inner) = dims.split_at(dims.len() - 1);
        let (inner, step) = (inner[0], size as isize);
        if inner.src != step || inner.dst != step {
            let is_across = |d: &Dim| d.src == step && inner.dst == step && d.n * inner.n >= BLOCK && size <= 8;
            let form = outer.iter().position(is_across).map_or(Form::Elements, Form::Transposed);
            return (dims, size, form);
        }
        let bytes = inner.n * size;
        if !matches!(bytes, 2 | 4 | 8 | 16) || outer.is_empty() {
            return (dims, size, Form::Rows);
        }
        (dims, size) = (outer, bytes);
    }
}

/// The form in which [`copy`] moves elements of one type.
pub(super) fn form_of(sizes: &[usize], src: &Side<'_>, dst: &Side<'_>) -> Form {
    form(&dims(sizes, src, dst), src.dtype.size_bytes()).2
}

unsafe fn copy_same(pool: &Pool, isa: Isa, dims: &[Dim], src: *mut u8, dst: *mut u8, size: usize) {
    let (dims, size, form) = form(dims, size);
    // SAFETY: the caller's promise, in each branch.
    unsafe {
        match (form, size) {
            (Form::Rows, _) => {
                let (outer, inner) = split_last(dims);
                copy_rows(pool, outer, inner.n * size, src, dst)
            }
            (Form::Transposed(k), _) => copy_transposed(pool, isa, dims, k, src, dst, size),
            (Form::Elements, 1) => copy_elements::<u8>(pool, dims, src, dst),
            (Form::Elements, 2) => copy_elements::<u16>(pool, dims, src, dst),
            (Form::Elements, 4) => copy_elements::<u32>(pool, dims, src, dst),
            (Form::Elements, 8) => copy_elements::<u64>(pool, dims, src, dst),
            (Form::Elements, _) => copy_elements::<u128>(pool, dims, src, dst),
        }
    }
}

/// Rows that are contiguous on both sides.
unsafe fn copy_rows(pool: &Pool, outer: &[Dim], bytes: usize, src: *mut u8, dst: *mut u8) {
    let (outer, middle) = split_last(outer);
    let width = even(bytes, GRAIN_BYTES).next_multiple_of(LINE);
    let pieces = [even(middle.n, GRAIN_BYTES / width), width];
    let tasks = tasks_for(pool, count(outer) * middle.n * bytes);
    let plane = [middle, Dim { n: bytes, src: 1, dst: 1 }];
    in_planes(pool, tasks, outer, plane, pieces, src, dst, |middle, row, s, d| {
        for i in 0..middle.n as isize {
            // SAFETY: a part of one row, inside the box by the caller's promise; pieces are disjoint.
            unsafe { std::ptr::copy_nonoverlapping(s.offset(i * middle.src), d.offset(i * middle.dst), row.n) };
        }
    });
}

/// Hands out a box in pieces: of each plane of the two inner dimensions so many indices of the one and of the other at a time.
#[allow(clippy::too_many_arguments)]
fn in_planes(
    pool: &Pool,
    tasks: usize,
    outer: &[Dim],
    [middle, inner]: [Dim; 2],
    [height, width]: [usize; 2],
    src: *mut u8,
    dst: *mut u8,
    move_piece: impl Fn(Dim, Dim, *const u8, *mut u8) + Sync,
) {
    let (src, dst) = (Shared(src), Shared(dst));
    let (down, across) = (middle.n.div_ceil(height), inner.n.div_ceil(width));
    let units = count(outer) * down * across;
    let tasks = tasks.min(units);
    pool.run(tasks, |task, _| {
        for unit in units * task / tasks..units * (task + 1) / tasks {
            let (s, d) = offsets(outer, unit / (down * across));
            let (i, j) = (unit / across % down * height, unit % across * width);
            let s = src.at(s + i as isize * middle.src + j as isize * inner.src);
            let d = dst.at(d + i as isize * middle.dst + j as isize * inner.dst);
            let (rows, cols) = (height.min(middle.n - i), width.min(inner.n - j));
            move_piece(Dim { n: rows, ..middle }, Dim { n: cols, ..inner }, s, d);
        }
    });
}

/// The last dimension apart from the others; one of a single step where there is none.
fn split_last(dims: &[Dim]) -> (&[Dim], Dim) {
    match dims.split_last() {
        Some((last, outer)) => (outer, *last),
        None => (&[], Dim { n: 1, src: 0, dst: 0 }),
    }
}

/// The size of the pieces of at most `most` that `n` is cut into evenly.
fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(1)).max(1)).max(1)
}

fn tasks_for(pool: &Pool, bytes: usize) -> usize {
    (bytes / GRAIN_BYTES).clamp(1, pool.threads() * 4)
}

/// Elements of a row that [`copy_elements`] moves at a time at most.
const GRAIN_ELEMENTS: usize = 8 << 10;
/// Bytes of a cache line.
const LINE: usize = 64;

/// Element by element, the destination in order, except that what shares a line of the source is moved together.
unsafe fn copy_elements<T: Copy>(pool: &Pool, dims: &[Dim], src: *mut u8, dst: *mut u8) {
    let (outer, [middle, inner]) = walk(dims);
    // Planes are cut, too: merged dimensions may be one or two.
    let width = even(inner.n, GRAIN_ELEMENTS);
    let pieces = [even(middle.n, GRAIN_ELEMENTS / width), width];
    let tasks = tasks_for(pool, count(dims) * size_of::<T>() * 4);
    in_planes(pool, tasks, &outer, [middle, inner], pieces, src, dst, |middle, inner, s, d| {
        // SAFETY: indices of the box; pieces are disjoint.
        unsafe { copy_plane::<T>(middle, inner, s, d) };
    });
}

/// The outer dimensions in the order in which they are walked, and the two inner ones. Where the inner ones step from line to
/// line of the source, a dimension that stays within a line goes around them, as many steps of it as a line has.
fn walk(dims: &[Dim]) -> (Vec<Dim>, [Dim; 2]) {
    let (outer, inner) = split_last(dims);
    let (outer, middle) = split_last(outer);
    let mut outer = outer.to_vec();
    let within = |d: &Dim| (1..LINE).contains(&d.src.unsigned_abs());
    if !within(&middle) && !within(&inner) {
        let mut near: Vec<usize> = (0..outer.len()).filter(|&k| within(&outer[k])).collect();
        near.sort_by_key(|&k| std::cmp::Reverse(outer[k].src.unsigned_abs()));
        for k in near {
            let whole = outer[k];
            let line = LINE / whole.src.unsigned_abs();
            let part = (1..=line).rev().find(|part| whole.n.is_multiple_of(*part)).unwrap_or(1);
            let steps = part as isize;
            outer[k] = Dim { n: whole.n / part, src: whole.src * steps, dst: whole.dst * steps };
            outer.push(Dim { n: part, ..whole });
        }
    }
    (outer, [middle, inner])
}

/// Two dimensions of a box.
///
/// # Safety
/// Both sides must be valid at all their indices.
unsafe fn copy_plane<T: Copy>(middle: Dim, inner: Dim, src: *const u8, dst: *mut u8) {
    let step = size_of::<T>() as isize;
    macro_rules! rows {
        ($n:expr, $src:expr, $dst:expr) => {
            for i in 0..middle.n as isize {
                let (s, d) = (src.wrapping_offset(i * middle.src), dst.wrapping_offset(i * middle.dst));
                // SAFETY: the caller's promise.
                unsafe { copy_range::<T>($n, (s, $src), (d, $dst)) };
            }
        };
    }
    // What is moved as one larger element need not lie at a multiple of it.
    let steps = |bytes: isize| (bytes % step == 0).then_some(bytes / step);
    // Few elements, and distances of which the compiler makes vectors: one of each pair, as rotary embeddings take them, and
    // what pixel shuffles bring together.
    match (inner.n, steps(inner.src), steps(inner.dst)) {
        (2, Some(0), Some(1)) => rows!(2, 0, step),
        (2, ..) => rows!(2, inner.src, inner.dst),
        (3, ..) => rows!(3, inner.src, inner.dst),
        (4, ..) => rows!(4, inner.src, inner.dst),
        (n, Some(2), Some(2)) => rows!(n, 2 * step, 2 * step),
        (n, Some(2), Some(1)) => rows!(n, 2 * step, step),
        (n, Some(4), Some(1)) => rows!(n, 4 * step, step),
        (n, Some(0), Some(1)) => rows!(n, 0, step),
        (n, ..) => rows!(n, inner.src, inner.dst),
    }
}

/// # Safety
/// Both sides must be valid at `n` indices.
#[inline(always)]
unsafe fn copy_range<T: Copy>(n: usize, src: (*const u8, isize), dst: (*mut u8, isize)) {
    for i in 0..n as isize {
        // SAFETY: the caller's promise.
        unsafe {
            let x = src.0.offset(i * src.1).cast::<T>().read_unaligned();
            dst.0.offset(i * dst.1).cast::<T>().write_unaligned(x);
        }
    }
}

/// Side of the square blocks a plane is cut into: 64 rows of 64 elements touch few pages and fit L1 twice.
const BLOCK: usize = 64;

/// Planes whose rows are contiguous in the source along dimension `k` and in the destination along the last.
unsafe fn copy_transposed(pool: &Pool, isa: Isa, dims: &[Dim], k: usize, src: *mut u8, dst: *mut u8, size: usize) {
    let last = dims[dims.len() - 1];
    let across = dims[k];
    let others: Vec<Dim> =
        dims[..dims.len() - 1].iter().enumerate().filter(|(d, _)| *d != k).map(|(_, d)| *d).collect();
    // Thin planes (the channels of an image) get longer blocks.
    let long = if last.n <= 8 { BLOCK * BLOCK / 8 } else { BLOCK };
    let (planes, down, right) = (count(&others), across.n.div_ceil(long), last.n.div_ceil(BLOCK));
    let units = planes * down * right;
    let tasks = tasks_for(pool, count(dims) * size).min(units);
    let (src, dst) = (Shared(src), Shared(dst));
    pool.run(tasks, |task, _| {
        for unit in units * task / tasks..units * (task + 1) / tasks {
            let (s, d) = offsets(&others, unit / (down * right));
            // Down the source's contiguous dimension last, so that destination rows are finished one after another.
            let (i0, j0) = (unit / right % down * long, unit % right * BLOCK);
            let (rows, cols) = (long.min(across.n - i0), BLOCK.min(last.n - j0));
            let p = src.at(s + i0 as isize * across.src + j0 as isize * last.src);
            let q = dst.at(d + i0 as isize * across.dst + j0 as isize * last.dst);
            // SAFETY: a block of the plane; blocks are disjoint.
            unsafe { transpose(isa, p, last.src, q, across.dst, rows, cols, size) };
        }
    });
}

/// `q[i][j] = p[j][i]` for `i < rows`, `j < cols`; strides between rows in bytes, elements contiguous.
#[allow(clippy::too_many_arguments)]
unsafe fn transpose(
    isa: Isa,
    p: *const u8,
    p_stride: isize,
    q: *mut u8,
    q_stride: isize,
    rows: usize,
    cols: usize,
    size: usize,
) {
    let (full_rows, full_cols) = match (size, isa.clamp()) {
        #[cfg(target_arch = "x86_64")]
        (4, Isa::Avx512 | Isa::Avx2) | (2, _) => (rows & !7, cols & !7),
        _ => (0, 0),
    };
    // SAFETY: all indices are below `rows` and `cols`; the vector blocks need what `clamp` found, or SSE2 only.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        {
            let block = |i: usize, j: usize| {
                let a = p.offset(j as isize * p_stride).add(i * size);
                let b = q.offset(i as isize * q_stride).add(j * size);
                if size == 4 { x86::block4(a, p_stride, b, q_stride) } else { x86::block2(a, p_stride, b, q_stride) }
            };
            // Along the side with the wider stride first: its lines are then used up before they are evicted.
            if p_stride.unsigned_abs() > q_stride.unsigned_abs() {
                for j in (0..full_cols).step_by(8) {
                    (0..full_rows).step_by(8).for_each(|i| block(i, j));
                }
            } else {
                for i in (0..full_rows).step_by(8) {
                    (0..full_cols).step_by(8).for_each(|j| block(i, j));
                }
            }
        }
        macro_rules! element {
            ($t:ty, $i:expr, $j:expr) => {
                let x = p.offset($j as isize * p_stride).cast::<$t>().add($i).read_unaligned();
                q.offset($i as isize * q_stride).cast::<$t>().add($j).write_unaligned(x);
            };
        }
        macro_rules! edges {
            ($t:ty) => {
                // Few columns (the channels of an image): loops of known length.
                match if full_rows * full_cols == 0 { cols } else { 0 } {
                    1 => (0..rows).for_each(|i| {
                        element!($t, i, 0);
                    }),
                    2 => (0..rows).for_each(|i| {
                        element!($t, i, 0);
                        element!($t, i, 1);
                    }),
                    3 => (0..rows).for_each(|i| {
                        element!($t, i, 0);
                        element!($t, i, 1);
                        element!($t, i, 2);
                    }),
                    4 => (0..rows).for_each(|i| {
                        element!($t, i, 0);
                        element!($t, i, 1);
                        element!($t, i, 2);
                        element!($t, i, 3);
                    }),
                    _ => {
                        for i in 0..rows {
                            for j in (if i < full_rows { full_cols } else { 0 })..cols {
                                element!($t, i, j);
                            }
                        }
                    }
                }
            };
        }
        match size {
            1 => edges!(u8),
            2 => edges!(u16),
            4 => edges!(u32),
            _ => edges!(u64),
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Transposes 8x8 elements of 4 bytes.
    ///
    /// # Safety
    /// AVX; eight rows of eight elements at both addresses.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn block4(p: *const u8, p_stride: isize, q: *mut u8, q_stride: isize) {
        // SAFETY: rows 0..8 of both sides, by the caller's promise.
        unsafe {
            let r = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| p.offset(i * p_stride).cast::<f32>());
            let r = [
                _mm256_loadu_ps(r[0]),
                _mm256_loadu_ps(r[1]),
                _mm256_loadu_ps(r[2]),
                _mm256_loadu_ps(r[3]),
                _mm256_loadu_ps(r[4]),
                _mm256_loadu_ps(r[5]),
                _mm256_loadu_ps(r[6]),
                _mm256_loadu_ps(r[7]),
            ];
            let t = [
                _mm256_unpacklo_ps(r[0], r[1]),
                _mm256_unpackhi_ps(r[0], r[1]),
                _mm256_unpacklo_ps(r[2], r[3]),
                _mm256_unpackhi_ps(r[2], r[3]),
                _mm256_unpacklo_ps(r[4], r[5]),
                _mm256_unpackhi_ps(r[4], r[5]),
                _mm256_unpacklo_ps(r[6], r[7]),
                _mm256_unpackhi_ps(r[6], r[7]),
            ];
            let u = [
                _mm256_shuffle_ps::<0x44>(t[0], t[2]),
                _mm256_shuffle_ps::<0xee>(t[0], t[2]),
                _mm256_shuffle_ps::<0x44>(t[1], t[3]),
                _mm256_shuffle_ps::<0xee>(t[1], t[3]),
                _mm256_shuffle_ps::<0x44>(t[4], t[6]),
                _mm256_shuffle_ps::<0xee>(t[4], t[6]),
                _mm256_shuffle_ps::<0x44>(t[5], t[7]),
                _mm256_shuffle_ps::<0xee>(t[5], t[7]),
            ];
            for i in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(u[i], u[i + 4]);
                let high = _mm256_permute2f128_ps::<0x31>(u[i], u[i + 4]);
                _mm256_storeu_ps(q.offset(i as isize * q_stride).cast(), low);
                _mm256_storeu_ps(q.offset((i as isize + 4) * q_stride).cast(), high);
            }
        }
    }

    /// Transposes 8x8 elements of 2 bytes.
    ///
    /// # Safety
    /// Eight rows of eight elements at both addresses.
    pub(super) unsafe fn block2(p: *const u8, p_stride: isize, q: *mut u8, q_stride: isize) {
        // SAFETY: rows 0..8 of both sides, by the caller's promise; SSE2 is part of x86-64.
        unsafe {
            let r = [0, 1, 2, 3, 4, 5, 6, 7].map(|i| _mm_loadu_si128(p.offset(i * p_stride).cast()));
            let a = [
                _mm_unpacklo_epi16(r[0], r[1]),
                _mm_unpackhi_epi16(r[0], r[1]),
                _mm_unpacklo_epi16(r[2], r[3]),
                _mm_unpackhi_epi16(r[2], r[3]),
                _mm_unpacklo_epi16(r[4], r[5]),
                _mm_unpackhi_epi16(r[4], r[5]),
                _mm_unpacklo_epi16(r[6], r[7]),
                _mm_unpackhi_epi16(r[6], r[7]),
            ];
            let b = [
                _mm_unpacklo_epi32(a[0], a[2]),
                _mm_unpackhi_epi32(a[0], a[2]),
                _mm_unpacklo_epi32(a[1], a[3]),
                _mm_unpackhi_epi32(a[1], a[3]),
                _mm_unpacklo_epi32(a[4], a[6]),
                _mm_unpackhi_epi32(a[4], a[6]),
                _mm_unpacklo_epi32(a[5], a[7]),
                _mm_unpackhi_epi32(a[5], a[7]),
            ];
            for i in 0..4 {
                let low = _mm_unpacklo_epi64(b[i], b[i + 4]);
                let high = _mm_unpackhi_epi64(b[i], b[i + 4]);
                _mm_storeu_si128(q.offset(2 * i as isize * q_stride).cast(), low);
                _mm_storeu_si128(q.offset((2 * i as isize + 1) * q_stride).cast(), high);
            }
        }
    }
}

/// Conversions of which one side is a floating type of at most 32 bits: f32 holds what passes.
unsafe fn convert(pool: &Pool, isa: Isa, sizes: &[usize], src: Side<'_>, dst: Side<'_>) {
    let program = TileProgram {
        instrs: vec![Instr::Load { dst: 0, src: Source::Memory(0) }, Instr::Store { src: 0, out: 0 }],
        loads: vec![src.dtype],
        stores: vec![dst.dtype],
    };
    let Ok(prepared) = Prepared::new(&program, isa) else { return };
    // Dimensions past what a space holds are walked here.
    let extra = sizes.len().saturating_sub(MAX_DIMS);
    let bound = |side: &Side<'_>, offset: isize| {
        let mut strides = [0; MAX_DIMS];
        let rest = &side.strides[extra..sizes.len()];
        strides[..rest.len()].copy_from_slice(rest);
        Bound { ptr: side.ptr.wrapping_offset(offset * side.dtype.size_bytes() as isize), strides }
    };
    for at in 0..sizes[..extra].iter().product() {
        let (mut rest, mut s, mut d) = (at, 0, 0);
        for i in (0..extra).rev() {
            s += (rest % sizes[i]) as isize * src.strides[i];
            d += (rest % sizes[i]) as isize * dst.strides[i];
            rest /= sizes[i];
        }
        let space = Space::new(&sizes[extra..]);
        // SAFETY: a part of the box.
        unsafe { run_loop(pool, &prepared, &space, &[bound(&src, s)], &[bound(&dst, d)]) };
    }
}

/// A number as integer and f64 types hold it.
#[derive(Clone, Copy)]
enum Number {
    Int(i64),
    Real(f64),
}

unsafe fn load_number(dtype: DType, p: *const u8) -> Number {
    // SAFETY: the caller vouches for a value of the type.
    unsafe {
        match dtype {
            DType::F32 => Number::Real(p.cast::<f32>().read_unaligned() as f64),
            DType::F16 => Number::Real(f16_value(p.cast::<u16>().read_unaligned()) as f64),
            DType::BF16 => Number::Real(bf16_value(p.cast::<u16>().read_unaligned()) as f64),
            DType::F64 => Number::Real(p.cast::<f64>().read_unaligned()),
            DType::I64 => Number::Int(p.cast::<i64>().read_unaligned()),
            DType::I32 => Number::Int(p.cast::<i32>().read_unaligned() as i64),
            DType::U8 => Number::Int(*p as i64),
            DType::I8 => Number::Int(*p.cast::<i8>() as i64),
            DType::Bool => Number::Int((*p != 0) as i64),
        }
    }
}

unsafe fn store_number(dtype: DType, p: *mut u8, x: Number) {
    let real = match x {
        Number::Int(i) => i as f64,
        Number::Real(r) => r,
    };
    let int = match x {
        Number::Int(i) => i,
        Number::Real(r) if (-9.223_372_036_854_775e18..9.223_372_036_854_775e18).contains(&r) => r as i64,
        Number::Real(_) => i64::MIN,
    };
    let int32 = match x {
        Number::Real(r) if !(-2_147_483_649.0..2_147_483_648.0).contains(&r) => i32::MIN,
        _ => int as i32,
    };
    // SAFETY: the caller vouches for the place.
    unsafe {
        match dtype {
            DType::F32 => p.cast::<f32>().write_unaligned(real as f32),
            DType::F16 => p.cast::<u16>().write_unaligned(f16_bits(real as f32)),
            DType::BF16 => p.cast::<u16>().write_unaligned(bf16_bits(real as f32)),
            DType::F64 => p.cast::<f64>().write_unaligned(real),
            DType::I64 => p.cast::<i64>().write_unaligned(int),
            DType::I32 => p.cast::<i32>().write_unaligned(int32),
            DType::U8 => *p = int as u8,
            DType::I8 => *p = int32 as u8,
            DType::Bool => *p = (real != 0.0) as u8,
        }
    }
}

/// Conversions between integers, bool and f64.
unsafe fn convert_exact(pool: &Pool, dims: &[Dim], src: Side<'_>, dst: Side<'_>) {
    let (outer, inner) = dims.split_at(dims.len() - 1);
    let (inner, rows, a, b) = (inner[0], count(outer), Shared(src.ptr), Shared(dst.ptr));
    let (from, to) = (src.dtype, dst.dtype);
    let tasks = tasks_for(pool, rows * inner.n * 16).min(rows);
    pool.run(tasks, |task, _| {
        for row in rows * task / tasks..rows * (task + 1) / tasks {
            let (s, d) = offsets(outer, row);
            for i in 0..inner.n as isize {
                // SAFETY: an index of the box; rows are disjoint.
                unsafe { store_number(to, b.at(d + i * inner.dst), load_number(from, a.at(s + i * inner.src))) };
            }
        }
    });
}

/// Copies element by element in index order on the calling thread: the meaning of [`copy`].
///
/// # Safety
/// As for [`copy`].
pub unsafe fn copy_reference(sizes: &[usize], src: Side<'_>, dst: Side<'_>) {
    for at in 0..sizes.iter().product() {
        let (mut rest, mut s, mut d) = (at, 0, 0);
        for i in (0..sizes.len()).rev() {
            s += (rest % sizes[i]) as isize * src.strides[i];
            d += (rest % sizes[i]) as isize * dst.strides[i];
            rest /= sizes[i];
        }
        // SAFETY: an index of the box.
        unsafe {
            let x = load_number(src.dtype, src.ptr.offset(s * src.dtype.size_bytes() as isize));
            store_number(dst.dtype, dst.ptr.offset(d * dst.dtype.size_bytes() as isize), x);
        }
    }
}

/// Sets every element of a box to a value, converted as [`copy`] converts.
///
/// # Safety
/// `dst` must be valid for all indices below `sizes`.
///
/// # Panics
/// If there are fewer strides than sizes.
pub unsafe fn fill(pool: &Pool, isa: Isa, sizes: &[usize], dst: Side<'_>, value: f64) {
    let mut one = [0u8; 8];
    // SAFETY: eight bytes hold any element type; a source of strides 0 is one element.
    unsafe {
        store_number(dst.dtype, one.as_mut_ptr(), Number::Real(value));
        let strides = vec![0; sizes.len()];
        let src = Side { ptr: one.as_mut_ptr(), dtype: dst.dtype, strides: &strides };
        if sizes.contains(&0) {
            return;
        }
        let dims = dims(sizes, &src, &dst);
        let inner = dims[dims.len() - 1];
        let size = dst.dtype.size_bytes();
        if inner.dst == size as isize && inner.n * size >= 64 {
            // A short run of the value, copied along the rows.
            let run = vec![one; 512 / size];
            let mut line: Vec<u8> = run.iter().flat_map(|v| v[..size].iter().copied()).collect();
            fill_rows(pool, &dims, &mut line, dst.ptr, size);
        } else {
            copy_same(pool, isa, &dims, src.ptr, dst.ptr, size);
        }
    }
}

unsafe fn fill_rows(pool: &Pool, dims: &[Dim], line: &mut [u8], dst: *mut u8, size: usize) {
    let (outer, inner) = dims.split_at(dims.len() - 1);
    let (bytes, rows, dst, line) = (inner[0].n * size, count(outer), Shared(dst), &*line);
    let pieces = bytes.div_ceil(GRAIN_BYTES);
    let units = rows * pieces;
    let tasks = tasks_for(pool, rows * bytes).min(units);
    pool.run(tasks, |task, _| {
        for unit in units * task / tasks..units * (task + 1) / tasks {
            let (_, d) = offsets(outer, unit / pieces);
            let (mut at, end) = (unit % pieces * GRAIN_BYTES, bytes.min((unit % pieces + 1) * GRAIN_BYTES));
            while at < end {
                let n = line.len().min(end - at);
                // SAFETY: a part of one row; units are disjoint.
                unsafe { std::ptr::copy_nonoverlapping(line.as_ptr(), dst.at(d + at as isize), n) };
                at += n;
            }
        }
    });
}

/// Copies a box into the middle of a larger one and sets the border to a value. Negative padding crops.
///
/// `before[d]` and `after[d]` elements are added along dimension `d`; `dst` has `sizes[d] + before[d] + after[d]` of
/// them.
///
/// # Safety
/// As for [`copy`], `dst` being valid for the padded sizes.
///
/// # Panics
/// If a list is shorter than `sizes`.
#[allow(clippy::too_many_arguments)]
pub unsafe fn pad(
    pool: &Pool,
    isa: Isa,
    sizes: &[usize],
    before: &[isize],
    after: &[isize],
    value: f64,
    src: Side<'_>,
    dst: Side<'_>,
) {
    let rank = sizes.len();
    let padded: Vec<usize> = (0..rank).map(|d| (sizes[d] as isize + before[d] + after[d]).max(0) as usize).collect();
    if padded.contains(&0) {
        return;
    }
    // What is kept, and where it starts on either side.
    let kept: Vec<usize> =
        (0..rank).map(|d| (sizes[d] as isize + before[d].min(0) + after[d].min(0)).max(0) as usize).collect();
    let start = |d: usize| before[d].max(0) as usize;
    let move_by = |side: &Side<'_>, d: usize, n: isize| {
        side.ptr.wrapping_offset(n * side.strides[d] * side.dtype.size_bytes() as isize)
    };
    let (mut from, mut to) = (src, dst);
    // SAFETY: every part lies inside the padded box; the parts are disjoint: along dimension `d` the border, kept along
    // the dimensions before it.
    unsafe {
        for d in 0..rank {
            let mut part = padded.clone();
            part[..d].copy_from_slice(&kept[..d]);
            part[d] = start(d).min(padded[d]);
            fill(pool, isa, &part, to, value);
            let end = (start(d) + kept[d]).min(padded[d]);
            part[d] = padded[d] - end.max(part[d]);
            fill(pool, isa, &part, Side { ptr: move_by(&to, d, end as isize), ..to }, value);
            to.ptr = move_by(&to, d, start(d) as isize);
            from.ptr = move_by(&from, d, (-before[d]).max(0));
        }
        copy(pool, isa, &kept, from, to);
    }
}
