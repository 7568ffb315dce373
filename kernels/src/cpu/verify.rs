//! References for the contractions, and the comparison of every kernel with them.
//!
//! The references are three nested loops in f64 over the operands as stored. A kernel may differ from them by the rounding
//! of its sums: with chains of at most `c` f32 additions the error of a sum is bounded by `c * 2^-24 * sum |a b|`
//! (and the widening of 16-bit operands is exact), so that bound is the tolerance. A form of parts leaves out of each product
//! what it says.

use super::KernelError;
use super::bench;
use super::conv::{
    Conv, PackedWeight, Weight, conv_unpacked_with, conv_with, is_direct, pack_conv_weight, pack_conv_weight_for,
};
use super::conv_winograd::{Image, Made, Part, Room, Work, ring_of, winograd_with, work_bytes_of};
use super::gemm::{BatchDim, Operand, gemm_with};
use super::gemm_int8::{Scales, gemm_int8_with};
use super::gemm_kernel::{Form, Kernel, kernels, select};
use super::gemm_split::GROUP;
use super::gemm_store::StoreEpilogue;
use super::pack::{Matrix, PackedB, pack_b, pack_in, packed_bytes};
use crate::dtype::DType;
use crate::pool::Pool;
use crate::registry::{Family, Row};
use half::{bf16, f16};

/// A deterministic stream of numbers in `-1.0..1.0`.
pub struct Numbers(u64);

impl Numbers {
    /// The stream of that seed.
    pub fn new(seed: u64) -> Numbers {
        Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number.
    pub fn draw(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32) / (1u64 << 23) as f32 - 1.0
    }
}

/// A cache line.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u64; 8]);

/// Elements as stored, aligned to a cache line as tensors and the arena are.
pub struct Buffer {
    /// Element type.
    pub dtype: DType,
    memory: Vec<Line>,
}

impl Buffer {
    /// `len` elements of a stream, integers a hundred times as large, truths about half of them.
    pub fn random(dtype: DType, len: usize, seed: u64) -> Buffer {
        let mut numbers = Numbers::new(seed);
        let mut buffer = Buffer::zeroed(dtype, len);
        for index in 0..len {
            let drawn = numbers.draw();
            let value = match dtype {
                DType::Bool => drawn.max(0.0),
                _ if is_floating(dtype) => drawn,
                _ => 100.0 * drawn,
            };
            buffer.set(index, value);
        }
        buffer
    }

    /// `len` zeros.
    pub fn zeroed(dtype: DType, len: usize) -> Buffer {
        Buffer { dtype, memory: vec![Line([0; 8]); (len * dtype.size_bytes()).div_ceil(64)] }
    }

    /// Address of the first element.
    pub fn ptr(&self) -> *const u8 {
        self.memory.as_ptr().cast()
    }

    /// Address of the first element.
    pub fn ptr_mut(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().cast()
    }

    /// Size of the memory.
    pub fn len_bytes(&self) -> usize {
        self.memory.len() * 64
    }

    /// Stores a rounded value, of integers without what follows the point.
    pub fn set(&mut self, index: usize, value: f32) {
        assert!((index + 1) * self.dtype.size_bytes() <= self.memory.len() * 64);
        let first = self.ptr_mut();
        // SAFETY: inside the memory, which is aligned for every type.
        unsafe {
            match self.dtype {
                DType::F16 => first.cast::<u16>().add(index).write(f16::from_f32(value).to_bits()),
                DType::BF16 => first.cast::<u16>().add(index).write(bf16::from_f32(value).to_bits()),
                DType::F32 => first.cast::<f32>().add(index).write(value),
                DType::F64 => first.cast::<f64>().add(index).write(f64::from(value)),
                DType::I64 => first.cast::<i64>().add(index).write(value as i64),
                DType::I32 => first.cast::<i32>().add(index).write(value as i32),
                DType::I8 => first.cast::<i8>().add(index).write(value as i8),
                DType::U8 => first.add(index).write(value as u8),
                DType::Bool => first.add(index).write(u8::from(value != 0.0)),
            }
        }
    }

    /// An element.
    pub fn get(&self, index: usize) -> f64 {
        assert!((index + 1) * self.dtype.size_bytes() <= self.memory.len() * 64);
        let first = self.ptr();
        // SAFETY: inside the memory, which is aligned for every type and was zeros before anything was written.
        unsafe {
            match self.dtype {
                DType::F16 => f16::from_bits(*first.cast::<u16>().add(index)).to_f64(),
                DType::BF16 => bf16::from_bits(*first.cast::<u16>().add(index)).to_f64(),
                DType::F32 => f64::from(*first.cast::<f32>().add(index)),
                _ => self.get_other(index),
            }
        }
    }

    /// An element of a type that products do not have, apart from theirs: references spend their time on those.
    ///
    /// # Safety
    /// There must be one.
    #[cold]
    unsafe fn get_other(&self, index: usize) -> f64 {
        let first = self.ptr();
        // SAFETY: forwarded; as in [`Self::get`].
        unsafe {
            match self.dtype {
                DType::F64 => *first.cast::<f64>().add(index),
                DType::I64 => *first.cast::<i64>().add(index) as f64,
                DType::I32 => f64::from(*first.cast::<i32>().add(index)),
                DType::I8 => f64::from(*first.cast::<i8>().add(index)),
                DType::U8 | DType::Bool => f64::from(*first.add(index)),
                DType::F32 | DType::F16 | DType::BF16 => unreachable!("`get` reads these"),
            }
        }
    }
}

/// The floating types that vectors load.
pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// A type as the names of rows have it.
pub(super) fn suffix(dtype: DType) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// Whether elements have a fraction.
pub(super) const fn is_floating(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
}

/// What rounding a number to a type changes of it at most.
pub(super) fn half_unit(dtype: DType, x: f64) -> f64 {
    // As a share of the number, and of those so small that their units are all the same.
    let (share, least) = match dtype {
        DType::F16 => (2f64.powi(-11), 2f64.powi(-25)),
        DType::BF16 => (2f64.powi(-8), 2f64.powi(-134)),
        DType::F32 => (2f64.powi(-24), 2f64.powi(-150)),
        DType::F64 => (2f64.powi(-53), 0.0),
        _ => (0.0, 0.0),
    };
    share * x.abs() + least
}

/// A sum and the sum of its terms' magnitudes.
#[derive(Clone, Copy, Default)]
pub struct Reference {
    /// The exact result (to f64).
    pub sum: f64,
    /// Scale of the rounding error.
    pub magnitude: f64,
}

impl Reference {
    /// A result with no error but that of what it is stored in.
    pub(super) fn exact(sum: f64) -> Reference {
        Reference { sum, magnitude: 0.0 }
    }

    pub(super) fn add(&mut self, a: f64, b: f64) {
        self.sum += a * b;
        self.magnitude += (a * b).abs();
    }
}

/// Compares f32 results with references, allowing chains of `chain` additions.
pub fn compare(what: &str, results: &Buffer, references: &[Reference], chain: usize) -> Result<(), String> {
    for (index, reference) in references.iter().enumerate() {
        let (got, tolerance) = (results.get(index), (chain + 2) as f64 * reference.magnitude * 2f64.powi(-24));
        let error = (got - reference.sum).abs();
        if error.is_nan() || error > tolerance {
            return Err(format!("{what}: result {index} is {got}, expected {} within {tolerance:e}", reference.sum));
        }
    }
    Ok(())
}

/// Compares results with references, whose terms went through so many roundings to f32 (`roundings`, a fraction of one for each
/// to f64) before the result was rounded to its type. Of what is not a number the result must be none, either.
pub(super) fn compare_rounded(results: &Buffer, references: &[Reference], roundings: f64) -> Result<(), String> {
    for (index, reference) in references.iter().enumerate() {
        let got = results.get(index);
        let before = roundings * reference.magnitude * 2f64.powi(-24);
        let tolerance = before + half_unit(results.dtype, reference.sum.abs() + before);
        let error = (got - reference.sum).abs();
        if got.is_nan() != reference.sum.is_nan() || error > tolerance {
            return Err(format!("result {index} is {got}, expected {} within {tolerance:e}", reference.sum));
        }
    }
    Ok(())
}

/// Longest chain of additions of a sum of `k` terms: one block's terms, and the blocks.
pub(super) fn chain(k: usize) -> usize {
    k.min(640) + k.div_ceil(48)
}

/// `A * B^T` per pair of the batch, in f64; `(m, n, k)` with dense operands.
pub fn reference_gemm(a: &Buffer, b: &Buffer, batch: &[BatchDim], (m, n, k): (usize, usize, usize)) -> Vec<Reference> {
    let count: usize = batch.iter().map(|dim| dim.size).product();
    let mut results = Vec::with_capacity(count * m * n);
    for z in 0..count {
        let a0 = super::gemm::batch_offset(batch, z, |dim| dim.a_stride) as usize;
        let b0 = super::gemm::batch_offset(batch, z, |dim| dim.b_stride) as usize;
        for row in 0..m {
            for col in 0..n {
                let mut result = Reference::default();
                (0..k).for_each(|t| result.add(a.get(a0 + row * k + t), b.get(b0 + col * k + t)));
                results.push(result);
            }
        }
    }
    results
}

/// The convolution in f64; dense operands.
pub fn reference_conv(conv: &Conv, x: &Buffer, w: &Buffer) -> Vec<Reference> {
    let (channels, outs) = (conv.in_channels / conv.groups, conv.out_channels / conv.groups);
    let [od, oh, ow] = conv.output;
    let mut results = Vec::with_capacity(conv.rows() * conv.out_channels);
    for row in 0..conv.rows() {
        let place = [row / (ow * oh) % od, row / ow % oh, row % ow];
        let image = row / (ow * oh * od) * conv.strides[0] as usize;
        for oc in 0..conv.out_channels {
            let mut result = Reference::default();
            for tap in 0..conv.kernel.iter().product() {
                let [_, kh, kw] = conv.kernel;
                let taps = [tap / (kh * kw), tap / kw % kh, tap % kw];
                let Some(pixel) = input_offset(conv, place, taps) else { continue };
                for channel in 0..channels {
                    let from = image + pixel + oc / outs * channels + channel;
                    let weight = (oc * channels + channel) * conv.kernel.iter().product::<usize>() + tap;
                    result.add(x.get(from), w.get(weight));
                }
            }
            results.push(result);
        }
    }
    results
}

/// Offset of the pixel that a tap reads, unless it is padding.
fn input_offset(conv: &Conv, place: [usize; 3], taps: [usize; 3]) -> Option<usize> {
    let mut offset = 0;
    for axis in 0..3 {
        let at = (place[axis] * conv.stride[axis] + taps[axis] * conv.dilation[axis]) as isize - conv.padding[axis];
        let at = usize::try_from(at).ok().filter(|&at| at < conv.input[axis] * conv.upsample[axis])?;
        offset += at / conv.upsample[axis] * conv.strides[axis + 1] as usize;
    }
    Some(offset)
}

/// Sizes that meet every edge: one row, one column, part of a tile, of a panel and of a block, and several of each.
const GEMM_SIZES: [(usize, usize, usize); 16] = [
    (1, 1, 1),
    (1, 32, 7),
    (3, 5, 0),
    (2, 17, 33),
    (14, 32, 64),
    (15, 33, 65),
    (13, 16, 255),
    (28, 48, 256),
    (29, 49, 257),
    (7, 4, 515),
    (64, 3, 96),
    (77, 80, 300),
    (260, 40, 48),
    (5, 450, 70),
    (270, 400, 30),
    (33, 66, 1040),
];

/// What is not a number, or infinite, makes the results that arithmetic says, and no others.
fn verify_specials(kernel: &'static Kernel, dtype: DType) -> Result<(), String> {
    let (m, n, k) = (40, 48, 70);
    let (mut a, mut b) = (Buffer::random(dtype, m * k, 1), Buffer::random(dtype, n * k, 2));
    for (at, x) in [(3 * k + 5, f32::INFINITY), (7 * k + 1, f32::NAN), (11 * k + 69, f32::NEG_INFINITY)] {
        a.set(at, x);
    }
    // Columns of numbers that fewer bits hold, and of zeros; an infinity of the other operand.
    for (column, x) in [(0, 1.0), (1, -0.5), (2, 0.0)] {
        (0..k).for_each(|t| b.set(column * k + t, x));
    }
    b.set(20 * k + 33, f32::INFINITY);
    let mut c = Buffer::random(DType::F32, m * n, 3);
    let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
    let (left, right) = (Matrix::row_major(a.ptr(), dtype, k), Matrix::row_major(b.ptr(), dtype, k));
    // SAFETY: dense buffers of the sizes named.
    let outcome = unsafe { gemm_with(kernel, Pool::global(), &[], (m, n, k), &left, &Operand::Strided(right), &store) };
    outcome.map_err(|error| error.to_string())?;
    for (index, reference) in reference_gemm(&a, &b, &[], (m, n, k)).iter().enumerate() {
        let (got, want) = (c.get(index), reference.sum);
        if got.is_nan() != want.is_nan() || got.is_infinite() && got != want || want.is_infinite() && got != want {
            let name = kernel.row_name(Family::Gemm, dtype);
            return Err(format!("{name}: result {} of row {} is {got}, not {want}", index % n, index / n));
        }
    }
    Ok(())
}

pub(super) fn verify_gemm(kernel: &'static Kernel, dtype: DType) -> Result<(), String> {
    let pool = Pool::global();
    verify_specials(kernel, dtype)?;
    for (m, n, k) in GEMM_SIZES {
        let (a, b) = (Buffer::random(dtype, m * k, 1), Buffer::random(dtype, n * k, 2));
        let references = reference_gemm(&a, &b, &[], (m, n, k));
        let left = Matrix::row_major(a.ptr(), dtype, k);
        let right = Matrix::row_major(b.ptr(), dtype, k);
        // Parts take twice as much at most, and whole groups.
        let mut memory = Buffer::zeroed(DType::U8, 2 * packed_bytes(n, k.next_multiple_of(GROUP), dtype, kernel.isa));
        for panels in ["packed", "packed in parts", "packed while used"] {
            let mut c = Buffer::random(DType::F32, m * n, 3);
            let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
            // SAFETY: dense buffers of the sizes named.
            let outcome = unsafe {
                let form = (panels == "packed in parts").then_some(kernel.form);
                let packed = Operand::Packed(pack_in(pool, kernel.isa, form, (n, k), &right, memory.ptr_mut()));
                let operand = if panels == "packed while used" { Operand::Strided(right) } else { packed };
                gemm_with(kernel, pool, &[], (m, n, k), &left, &operand, &store)
            };
            outcome.map_err(|error| error.to_string())?;
            let what = format!("{} {m}x{n}x{k} {panels}", kernel.row_name(Family::Gemm, dtype));
            compare(&what, &c, &references, chain(k) + kernel.form.left_out())?;
        }
    }
    Ok(())
}

/// A quantized operand pair and its scales, drawn from the whole range of bytes.
pub(super) struct Quantized {
    sizes: (usize, usize, usize),
    a: Buffer,
    b: Buffer,
    a_scale: Vec<f32>,
    a_zero: Vec<i32>,
    b_scale: Vec<f32>,
    b_total: Vec<i32>,
}

impl Quantized {
    pub(super) fn random((m, n, k): (usize, usize, usize)) -> Quantized {
        let mut numbers = Numbers::new(9);
        let mut bytes = |len: usize| {
            let mut buffer = Buffer::zeroed(DType::U8, len);
            // SAFETY: inside the buffer.
            (0..len).for_each(|at| unsafe { buffer.ptr_mut().add(at).write((numbers.draw() * 128.0 + 128.0) as u8) });
            buffer
        };
        let (a, b) = (bytes(m * k), bytes(n * k));
        let total = |row: usize| (0..k).map(|t| i32::from(Quantized::byte(&b, row * k + t) as i8)).sum();
        Quantized {
            sizes: (m, n, k),
            a_scale: (0..m).map(|_| numbers.draw()).collect(),
            a_zero: (0..m).map(|row| (row * 37 % 256) as i32).collect(),
            b_scale: (0..n).map(|_| numbers.draw()).collect(),
            b_total: (0..n).map(total).collect(),
            a,
            b,
        }
    }

    fn byte(of: &Buffer, at: usize) -> u8 {
        assert!(at < of.len_bytes());
        // SAFETY: inside the buffer.
        unsafe { of.ptr().add(at).read() }
    }

    /// The second operand in the panels of a kernel.
    pub(super) fn pack(&self, kernel: &Kernel) -> Buffer {
        let (_, n, k) = self.sizes;
        let mut memory = Buffer::zeroed(DType::U8, packed_bytes(n, k, DType::U8, kernel.isa));
        let right = Matrix::row_major(self.b.ptr(), DType::U8, k);
        // SAFETY: dense buffers of the sizes named.
        unsafe { pack_b(Pool::global(), kernel.isa, n, k, &right, memory.ptr_mut()) };
        memory
    }

    /// The product, by a kernel that the second operand was packed for.
    pub(super) fn multiply(&self, kernel: &'static Kernel, packed: &Buffer, c: &mut Buffer) -> Result<(), KernelError> {
        let Quantized { sizes: (m, n, k), a_scale, a_zero, b_scale, b_total, .. } = self;
        let (sizes, a, isa) = ((*m, *n, *k), (self.a.ptr(), *k), kernel.isa);
        let scales =
            Scales { a: a_scale.as_ptr(), a_zero: a_zero.as_ptr(), b: b_scale.as_ptr(), b_total: b_total.as_ptr() };
        let weight = PackedB::from_raw(packed.ptr(), *n, *k, DType::U8, isa);
        let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, *n as isize);
        // SAFETY: dense buffers of the sizes named.
        unsafe { gemm_int8_with(kernel, Pool::global(), isa, sizes, a, weight, scales, &store) }
    }

    /// The definition: bytes as real numbers, multiplied in f64.
    fn reference(&self, (row, col): (usize, usize), k: usize) -> f64 {
        let term = |t: usize| {
            let x = f64::from(Self::byte(&self.a, row * k + t)) - f64::from(self.a_zero[row]);
            x * f64::from(Self::byte(&self.b, col * k + t) as i8)
        };
        (0..k).map(term).sum::<f64>() * f64::from(self.a_scale[row]) * f64::from(self.b_scale[col])
    }
}

pub(super) fn verify_int8(kernel: &'static Kernel) -> Result<(), String> {
    for (m, n, k) in GEMM_SIZES {
        let operands = Quantized::random((m, n, k));
        let mut c = Buffer::random(DType::F32, m * n, 3);
        operands.multiply(kernel, &operands.pack(kernel), &mut c).map_err(|error| error.to_string())?;
        for index in 0..m * n {
            let (got, expected) = (c.get(index), operands.reference((index / n, index % n), k));
            // The sum is exact; its conversion and two factors are rounded.
            if (got - expected).abs() > 4.0 * 2f64.powi(-24) * expected.abs() {
                return Err(format!(
                    "{} {m}x{n}x{k}: result {index} is {got}, not {expected}",
                    kernel.row_name(Family::Gemm, DType::U8)
                ));
            }
        }
    }
    Ok(())
}

/// Convolutions that meet every edge.
pub fn conv_cases() -> Vec<Conv> {
    let square = |size: usize, ic: usize, oc: usize| Conv::new_2d(2, [size, size], ic, oc, [3, 3]);
    vec![
        square(9, 16, 32).padding([0, 1, 1]),
        square(8, 3, 20).padding([0, 1, 1]),
        square(8, 4, 4).padding([0, 1, 1]).stride([1, 2, 2]),
        square(11, 70, 3).padding([0, 1, 1]),
        square(7, 40, 33).padding([0, 2, 2]).dilation([1, 2, 2]),
        square(5, 8, 6).padding([0, 1, 1]).upsample([1, 2, 2]),
        Conv { output: [1, 4, 4], ..square(9, 6, 10).stride([1, 2, 2]) },
        square(10, 5, 5).padding([0, -1, -2]),
        square(6, 12, 18).padding([0, 1, 1]).groups(3),
        square(6, 24, 24).padding([0, 1, 1]).groups(24),
        square(7, 100, 100).padding([0, 1, 1]).stride([1, 2, 2]).groups(100),
        Conv::new_3d(2, [3, 4, 5], 20, 20, [3, 3, 3]).padding([1, 1, 1]).groups(20),
        Conv::new_2d(2, [5, 37], 300, 300, [3, 3]).padding([0, 1, 1]).groups(300),
        Conv::new_2d(1, [9, 20], 24, 24, [5, 5]).padding([0, 2, 2]).groups(24),
        Conv::new_2d(1, [8, 20], 24, 24, [2, 5]).padding([0, 1, 2]).groups(24),
        Conv::new_2d(1, [9, 20], 40, 40, [7, 7]).padding([0, 3, 3]).groups(40),
        Conv::new_2d(1, [6, 25], 18, 18, [3, 3]).padding([0, 2, 2]).dilation([1, 2, 2]).groups(18),
        Conv::new_2d(1, [6, 11], 18, 18, [3, 3]).padding([0, 1, 1]).upsample([1, 2, 2]).groups(18),
        Conv::new_2d(1, [6, 25], 20, 20, [3, 3]).padding([0, -1, -2]).groups(20),
        Conv { output: [1, 9, 25], ..Conv::new_2d(1, [9, 25], 16, 16, [3, 3]).groups(16) },
        Conv::new_2d(3, [1, 31], 8, 8, [1, 4]).padding([0, 0, 3]).groups(8),
        Conv::new_2d(3, [7, 3], 70, 70, [3, 3]).padding([0, 1, 1]).groups(70),
        // In small groups.
        Conv::new_2d(2, [6, 21], 300, 300, [3, 3]).padding([0, 1, 1]).groups(75),
        Conv::new_2d(1, [7, 20], 40, 40, [5, 5]).padding([0, 2, 2]).groups(5),
        Conv::new_2d(1, [7, 20], 36, 72, [3, 3]).padding([0, 1, 1]).groups(18),
        Conv::new_2d(1, [9, 19], 20, 40, [7, 7]).padding([0, 3, 3]).groups(20),
        Conv::new_2d(1, [9, 23], 48, 48, [3, 3]).padding([0, 1, 1]).groups(3),
        Conv::new_2d(1, [5, 18], 15, 40, [3, 3]).padding([0, 1, 1]).groups(5),
        Conv::new_2d(2, [7, 11], 28, 28, [3, 3]).padding([0, 1, 1]).stride([1, 2, 2]).groups(14),
        Conv::new_2d(2, [6, 25], 64, 64, [1, 1]).groups(8),
        Conv::new_2d(1, [6, 25], 24, 24, [3, 3]).padding([0, 2, 2]).dilation([1, 2, 2]).groups(6),
        Conv::new_2d(1, [6, 11], 18, 18, [3, 3]).padding([0, 1, 1]).upsample([1, 2, 2]).groups(9),
        Conv::new_3d(2, [3, 4, 5], 20, 20, [3, 3, 3]).padding([1, 1, 1]).groups(5),
        Conv::new_2d(2, [9, 22], 3, 16, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [9, 22], 8, 8, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [13, 9], 24, 40, [1, 1]),
        Conv::new_2d(3, [7, 5], 9, 8, [1, 1]).stride([1, 2, 2]),
        Conv::new_2d(1, [20, 20], 3, 16, [7, 7]).padding([0, 3, 3]).stride([1, 2, 2]),
        Conv::new_2d(2, [1, 31], 5, 7, [1, 4]).padding([0, 0, 1]).stride([1, 1, 3]),
        Conv::new_3d(2, [4, 5, 6], 7, 9, [3, 3, 3]).padding([1, 1, 1]),
        Conv::new_3d(1, [5, 6, 4], 4, 6, [3, 1, 2]).padding([2, 0, 0]).stride([2, 1, 1]).dilation([2, 1, 1]),
        Conv::new_2d(1, [2, 2], 8, 8, [3, 3]),
        Conv::new_2d(2, [9, 21], 64, 48, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [11, 70], 66, 40, [3, 3]).padding([0, 1, 1]).stride([1, 2, 2]),
        Conv::new_2d(1, [9, 9], 49, 33, [3, 3]).padding([0, 2, 2]).dilation([1, 2, 2]),
        Conv::new_2d(1, [9, 9], 50, 4, [5, 5]).padding([0, 2, 2]),
        Conv::new_2d(2, [5, 6], 400, 20, [3, 3]).padding([0, 1, 1]).upsample([1, 2, 2]),
        Conv { output: [1, 8, 8], ..Conv::new_2d(1, [16, 16], 64, 33, [3, 3]).stride([1, 2, 2]) },
        Conv::new_2d(1, [12, 14], 60, 5, [3, 3]).padding([0, -1, -2]),
        Conv::new_2d(1, [9, 9], 128, 96, [3, 3]).padding([0, 1, 1]).groups(2),
        Conv::new_3d(1, [3, 4, 9], 64, 17, [3, 3, 3]).padding([1, 1, 1]),
        Conv::new_2d(1, [2, 20], 1024, 8, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [1, 30], 64, 8, [1, 9]).padding([0, 0, 12]),
        Conv::new_2d(2, [40, 150], 24, 3, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [7, 20], 332, 4, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [19, 30], 16, 2, [4, 2]).padding([0, 2, -1]).dilation([1, 2, 5]),
        Conv::new_3d(2, [4, 9, 11], 32, 3, [3, 3, 3]).padding([1, 1, 1]),
        Conv::new_3d(1, [7, 5, 9], 20, 8, [2, 3, 3]).padding([2, 0, 1]).stride([2, 1, 1]).dilation([2, 1, 1]),
        Conv::new_2d(1, [1, 300], 48, 1, [1, 7]).padding([0, 0, 9]).dilation([1, 1, 3]),
        Conv::new_2d(0, [4, 4], 8, 8, [3, 3]).padding([0, 1, 1]),
    ]
}

pub(super) fn verify_conv(kernel: &'static Kernel, dtype: DType) -> Result<(), String> {
    let pool = Pool::global();
    for shape in conv_cases() {
        let x = Buffer::random(dtype, shape.batch * shape.strides[0] as usize, 1);
        let w = Buffer::random(dtype, shape.out_channels * shape.terms(), 2);
        let mut y = Buffer::random(DType::F32, shape.rows() * shape.out_channels, 3);
        let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(dtype, kernel.isa));
        let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, shape.out_channels as isize);
        // SAFETY: dense buffers of the sizes that `shape` says.
        let outcome = unsafe {
            let weight = Weight::contiguous(w.ptr(), dtype, &shape);
            let packed: PackedWeight = pack_conv_weight(pool, kernel.isa, &shape, &weight, memory.ptr_mut());
            conv_with(kernel, pool, &shape, x.ptr(), dtype, &packed, &store)
        };
        outcome.map_err(|error| error.to_string())?;
        let references = reference_conv(&shape, &x, &w);
        let longest = chain(shape.terms()) + kernel.form.left_out();
        let what = format!("{} {shape:?}", kernel.row_name(Family::Conv, dtype));
        compare(&what, &y, &references, longest)?;
        if kernel.form.parts() > 0
            && select(kernel.isa, dtype, dtype, (shape.rows(), shape.terms())).form == kernel.form
        {
            let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes_for(dtype, dtype, kernel.isa));
            let mut y = Buffer::random(DType::F32, shape.rows() * shape.out_channels, 3);
            let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, shape.out_channels as isize);
            // SAFETY: as above.
            let outcome = unsafe {
                let weight = Weight::contiguous(w.ptr(), dtype, &shape);
                let to = memory.ptr_mut();
                pack_conv_weight_for(pool, kernel.isa, &shape, dtype, &weight, to)
                    .and_then(|packed| conv_with(kernel, pool, &shape, x.ptr(), dtype, &packed, &store))
            };
            outcome.map_err(|error| error.to_string())?;
            compare(&format!("{what}, packed in parts"), &y, &references, longest)?;
        }
        if shape.groups > 1 || !is_direct(kernel, &shape, dtype) {
            continue;
        }
        for strides in weight_layouts(&shape) {
            let laid_out = lay_out(&shape, &w, strides);
            let weight = Weight { ptr: laid_out.ptr(), dtype, strides };
            let mut y = Buffer::random(DType::F32, shape.rows() * shape.out_channels, 3);
            let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, shape.out_channels as isize);
            // SAFETY: as above.
            let outcome = unsafe { conv_unpacked_with(kernel, pool, &shape, x.ptr(), dtype, &weight, &store) };
            outcome.map_err(|error| error.to_string())?;
            compare(&format!("{what}, weight as it lies {strides:?}"), &y, &references, longest)?;
        }
    }
    Ok(())
}

/// Largest error of a Winograd convolution, as a share of its largest result. Worst-case bounds of the transforms say
/// nothing useful; the bar is that of a single f32 operation for tiles of 4, whose transforms multiply by up to 19 x 10
/// per axis, and a fifth of it for tiles of 2, which multiply by up to 3 x 2.
fn winograd_bar(tile: usize) -> f64 {
    if tile == 4 { 1e-5 } else { 2e-6 }
}

/// Every layout of a weight that is read differently: contiguous, channels last, neither.
fn weight_layouts(conv: &Conv) -> [[isize; 5]; 3] {
    let (ins, outs) = ((conv.in_channels / conv.groups) as isize, conv.out_channels as isize);
    let [depth, height, width] = conv.kernel.map(|size| size as isize);
    let (plane, taps) = (height * width, depth * height * width);
    [
        [taps * ins, taps, plane, width, 1],
        [taps * ins, 1, plane * ins, width * ins, ins],
        [1, taps * outs, plane * outs, width * outs, outs],
    ]
}

/// The contiguous weight `w` with other strides.
fn lay_out(conv: &Conv, w: &Buffer, strides: [isize; 5]) -> Buffer {
    let (terms, taps) = (conv.terms(), conv.kernel.iter().product::<usize>());
    let [_, height, width] = conv.kernel;
    let mut laid_out = Buffer::zeroed(w.dtype, conv.out_channels * terms);
    for index in 0..conv.out_channels * terms {
        let tap = index % taps;
        let place = [index / terms, index % terms / taps, tap / (height * width), tap / width % height, tap % width];
        let at: isize = place.iter().zip(strides).map(|(&at, stride)| at as isize * stride).sum();
        laid_out.set(at as usize, w.get(index) as f32);
    }
    laid_out
}

pub(super) fn verify_winograd(kernel: &'static Kernel, dtype: DType) -> Result<(), String> {
    let pool = Pool::global();
    let shapes = [
        Conv::new_2d(2, [9, 13], 16, 32, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [12, 12], 70, 70, [3, 3]),
        Conv::new_2d(1, [4, 3], 130, 5, [3, 3]).padding([0, 2, 0]),
        Conv::new_2d(3, [1, 30], 5, 100, [3, 3]).padding([0, 1, 1]),
        Conv::new_3d(2, [3, 6, 7], 12, 40, [1, 3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [8, 8], 700, 33, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [8, 8], 2560, 5, [3, 3]).padding([0, 1, 1]), // as many terms as a UNet has
        Conv::new_2d(1, [5, 7], 33, 17, [3, 3]).upsample([1, 2, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [41, 60], 40, 35, [3, 3]).padding([0, 1, 1]),
        Conv::new_2d(1, [28, 28], 160, 17, [3, 3]).padding([0, 1, 1]), // several chunks; several bands where memory is short
        Conv::new_2d(1, [9, 9], 20, 20, [3, 3]).padding([0, -1, 0]),
        Conv::new_2d(3, [61, 44], 40, 17, [3, 3]).padding([0, 1, 1]), // bands of two images
        Conv::new_2d(2, [70, 150], 24, 17, [3, 3]).padding([0, 2, 2]), // stripes, the last of them narrow
        Conv::new_3d(2, [2, 13, 140], 16, 17, [1, 3, 3]).padding([0, -1, -2]), // stripes of several planes, cut on all sides
        Conv::new_3d(2, [3, 6, 7], 20, 33, [3, 3, 3]).padding([1, 1, 1]),
        Conv::new_3d(1, [4, 5, 9], 35, 40, [3, 3, 3]).padding([0, 1, 1]),
        Conv::new_3d(1, [7, 6, 5], 17, 20, [2, 3, 3]).padding([1, 1, 1]).stride([2, 1, 1]).dilation([3, 1, 1]),
        Conv::new_3d(1, [2, 5, 6], 24, 16, [3, 3, 3]).padding([1, 1, 1]).upsample([2, 2, 2]),
        Conv::new_3d(1, [3, 40, 40], 84, 20, [3, 3, 3]).padding([1, 1, 1]), // several chunks and bands
    ];
    let cases = shapes.iter().flat_map(|shape| {
        [2, 4].into_iter().flat_map(move |tile| {
            weight_layouts(shape)
                .into_iter()
                .zip([Room::Ample, Room::Slim, Room::Ample])
                .map(move |how| (shape, tile, how))
        })
    });
    for (shape, tile, (strides, room)) in cases {
        let x = Buffer::random(dtype, shape.batch * shape.strides[0] as usize, 1);
        let w = Buffer::random(dtype, shape.out_channels * shape.terms(), 2);
        let laid_out = lay_out(shape, &w, strides);
        let mut y = Buffer::random(DType::F32, shape.rows() * shape.out_channels, 3);
        let mut memory = Buffer::zeroed(DType::U8, work_bytes_of(kernel, shape, tile, room));
        let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, shape.out_channels as isize);
        let weight = Weight { ptr: laid_out.ptr(), dtype, strides };
        let work = Work { ptr: memory.ptr_mut(), room };
        // SAFETY: buffers of the sizes that `shape` says.
        let outcome =
            unsafe { winograd_with(kernel, pool, shape, (x.ptr(), dtype).into(), &weight, tile, work, &store) };
        outcome.map_err(|error| error.to_string())?;
        let what = format!("{} tile {tile} {shape:?} {strides:?}", kernel.row_name(Family::Conv, dtype));
        compare_winograd(&what, (shape, tile), [&x, &w, &y])?;
        let Some(ring) = ring_of(kernel, shape, tile, room) else { continue };
        let mut held = Buffer::random(dtype, ring.elements(), 4);
        // What is read too early is not a number.
        (0..ring.elements()).for_each(|at| held.set(at, f32::NAN));
        let (pixel, width) = (shape.in_channels * dtype.size_bytes(), shape.input[2]);
        let make = |part: Part| {
            let bytes = (part.columns[1] - part.columns[0]) * pixel;
            for row in part.rows[0]..part.rows[1] {
                let from = ((part.plane * shape.input[1] + row) * width + part.columns[0]) * pixel;
                let to = (row - part.rows[0]) * part.row * dtype.size_bytes();
                // SAFETY: a row of the image, and of the ring.
                unsafe { part.to.add(to).copy_from_nonoverlapping(x.ptr().add(from), bytes) };
            }
        };
        let image = Image { ptr: held.ptr_mut(), dtype, made: Some(Made { ring, make: &make }) };
        let mut y = Buffer::random(DType::F32, shape.rows() * shape.out_channels, 3);
        let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, shape.out_channels as isize);
        // SAFETY: as above; the ring has as many rows as it asks for.
        let outcome = unsafe { winograd_with(kernel, pool, shape, image, &weight, tile, work, &store) };
        outcome.map_err(|error| error.to_string())?;
        compare_winograd(&format!("{what} in a ring"), (shape, tile), [&x, &w, &y])?;
    }
    Ok(())
}

/// Compares the results of a convolution with tiles of `tile`.
pub fn compare_winograd(what: &str, (shape, tile): (&Conv, usize), [x, w, y]: [&Buffer; 3]) -> Result<(), String> {
    let references = reference_conv(shape, x, w);
    let largest = references.iter().map(|reference| reference.sum.abs()).fold(0.0, f64::max);
    for (index, reference) in references.iter().enumerate() {
        let error = (y.get(index) - reference.sum).abs();
        if error.is_nan() || error > winograd_bar(tile) * largest {
            return Err(format!("{what}: result {index} is off by {error:e}, largest result {largest}"));
        }
    }
    Ok(())
}

/// A comparison and the measurements of a micro-kernel on operands of a type.
type KernelCheck = fn(&'static Kernel, DType) -> Result<(), String>;
type KernelBenches = fn(&'static Kernel, DType) -> Vec<bench::Bench>;

/// Rows of the registry for the contractions of this module.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for kernel in kernels().into_iter().filter(|kernel| matches!(kernel.form, Form::F32 | Form::Bf16x3)) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let name = kernel.row_name(Family::Conv, dtype).replacen("conv_", "conv_winograd_", 1);
            let is_available = Box::new(|| kernel.is_available());
            let verify = Box::new(move || verify_winograd(kernel, dtype));
            let benches = bench::winograd(kernel, dtype);
            rows.push(Row { name, family: Family::Conv, isa: kernel.isa, dtype, is_available, verify, benches });
        }
    }
    for kernel in kernels().into_iter().filter(|kernel| kernel.form == Form::Int8Quads) {
        rows.push(Row {
            name: kernel.row_name(Family::Gemm, DType::U8),
            family: Family::Gemm,
            isa: kernel.isa,
            dtype: DType::U8,
            is_available: Box::new(|| kernel.is_available()),
            verify: Box::new(|| verify_int8(kernel)),
            benches: bench::linear_int8(kernel),
        });
    }
    for kernel in kernels() {
        let families: [(Family, KernelCheck, KernelBenches); 2] =
            [(Family::Gemm, verify_gemm, bench::linear), (Family::Conv, verify_conv, bench::conv)];
        for (family, verify, benches) in families {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                if kernel.reads(dtype) {
                    let name = kernel.row_name(family, dtype);
                    let is_available = Box::new(|| kernel.is_available());
                    let verify = Box::new(move || verify(kernel, dtype));
                    let benches = benches(kernel, dtype);
                    rows.push(Row { name, family, isa: kernel.isa, dtype, is_available, verify, benches });
                }
            }
        }
    }
    rows
}
