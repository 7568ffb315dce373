//! A dense host tensor: what the interpreter computes on.

use half::{bf16, f16};
use oxidiff_kernels::cpu::integers;
use oxidiff_kernels::dtype::DType as KernelType;

use crate::error::{Error, Place, Result};
use crate::ir::dtype::DType;
use crate::ir::infer::Check;

/// Row-major elements in their element type, little endian, as in a graph's constants.
///
/// Invariant: `bytes.len()` is the number of elements times the element's size; bools are 0 or 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<i64>,
    bytes: Vec<u8>,
}

/// Maps the elements: `$float` with `$x` being an f64 for float types, `$int` with `$y` being an i64 for others.
macro_rules! decode {
    ($self:expr, $x:ident => $float:expr, $y:ident => $int:expr) => {{
        macro_rules! each {
            ($size:literal, $from:expr, $v:ident => $e:expr) => {{
                let (elements, _) = $self.bytes.as_chunks::<$size>();
                elements
                    .iter()
                    .map(|b| {
                        let $v = $from(*b);
                        $e
                    })
                    .collect()
            }};
        }
        match $self.dtype {
            DType::Bool | DType::U8 => each!(1, |b: [u8; 1]| i64::from(b[0]), $y => $int),
            DType::I8 => each!(1, |b: [u8; 1]| i64::from(b[0] as i8), $y => $int),
            DType::I32 => each!(4, |b| i64::from(i32::from_le_bytes(b)), $y => $int),
            DType::I64 => each!(8, |b| i64::from_le_bytes(b), $y => $int),
            DType::F16 => each!(2, |b| f64::from(f16::from_le_bytes(b)), $x => $float),
            DType::BF16 => each!(2, |b| f64::from(bf16::from_le_bytes(b)), $x => $float),
            DType::F32 => each!(4, |b| f64::from(f32::from_le_bytes(b)), $x => $float),
            DType::F64 => each!(8, |b| f64::from_le_bytes(b), $x => $float),
        }
    }};
}

pub(super) fn numel(shape: &[i64]) -> usize {
    shape.iter().product::<i64>() as usize
}

/// Distance in elements between neighbours along each dimension.
pub(super) fn strides_of(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for d in (1..shape.len()).rev() {
        strides[d - 1] = strides[d] * shape[d];
    }
    strides
}

/// A vector with room for `len` elements, an error where memory is short.
pub(super) fn reserve<T>(len: usize) -> Check<Vec<T>> {
    let mut out = Vec::new();
    out.try_reserve_exact(len).map_err(|_| format!("out of memory for {len} elements"))?;
    Ok(out)
}

impl Tensor {
    /// From raw data.
    ///
    /// # Errors
    /// If the shape is impossible or the number of bytes is not that of the shape.
    pub fn new(dtype: DType, shape: Vec<i64>, mut bytes: Vec<u8>) -> Result<Self> {
        let len = shape.iter().try_fold(dtype.size_bytes(), |n, &d| n.checked_mul(usize::try_from(d).ok()?));
        if len != Some(bytes.len()) {
            let why = format!("{} bytes for {dtype}{shape:?}", bytes.len());
            return Err(Error::Shape { place: Place { op: "tensor".to_owned(), ..Place::default() }, why });
        }
        if dtype == DType::Bool {
            bytes.iter_mut().for_each(|b| *b = u8::from(*b != 0));
        }
        Ok(Self { dtype, shape, bytes })
    }

    /// From numbers, each rounded (floats to nearest even, integers as in a conversion from f64).
    ///
    /// # Errors
    /// As [`Tensor::new`].
    pub fn from_f64(dtype: DType, shape: &[i64], values: &[f64]) -> Result<Self> {
        let bytes = if dtype.is_float() {
            encode_floats(dtype, values.iter().copied())
        } else {
            encode_ints(dtype, values.iter().map(|&v| truncated(dtype, v)))
        };
        Self::new(dtype, shape.to_vec(), bytes)
    }

    /// From integers, which wrap if too large.
    ///
    /// # Errors
    /// As [`Tensor::new`].
    pub fn from_i64(dtype: DType, shape: &[i64], values: &[i64]) -> Result<Self> {
        Self::new(dtype, shape.to_vec(), encode_from_ints(dtype, values.iter().copied()))
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Raw data.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Takes the raw data out.
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// The elements as f64 (integers rounded).
    pub fn to_f64(&self) -> Vec<f64> {
        decode!(self, x => x, y => y as f64)
    }

    /// The elements as i64 (floats truncated, saturated).
    pub fn to_i64(&self) -> Vec<i64> {
        decode!(self, x => x as i64, y => y)
    }

    /// The elements converted to a float compute type, f32 or f64.
    pub(super) fn to_compute(&self, compute: DType) -> Vec<f64> {
        if compute == DType::F64 {
            return self.to_f64();
        }
        decode!(self, x => f64::from(x as f32), y => f64::from(y as f32))
    }

    /// Converted to `dtype`: floats by way of f32 as in PyTorch, float to integer by `truncated`, integers
    /// wrapped, bool from what is not 0.
    pub fn convert(&self, dtype: DType) -> Tensor {
        if dtype == self.dtype {
            return self.clone();
        }
        let bytes = match (self.dtype.is_float(), dtype.is_float()) {
            // Bytes, with a sign or without.
            (false, false) if self.dtype.size_bytes() == 1 && matches!(dtype, DType::U8 | DType::I8) => {
                self.bytes.clone()
            }
            (true, true) => encode_floats(dtype, self.to_f64().into_iter()),
            (true, false) => encode_ints(dtype, self.to_f64().into_iter().map(|v| truncated(dtype, v))),
            (false, _) => encode_from_ints(dtype, self.to_i64().into_iter()),
        };
        Tensor { dtype, shape: self.shape.clone(), bytes }
    }

    pub(super) fn reshaped(&self, shape: &[i64]) -> Tensor {
        Tensor { dtype: self.dtype, shape: shape.to_vec(), bytes: self.bytes.clone() }
    }

    /// From results of arithmetic, rounded to the compute type of `dtype`, a float type, and then to `dtype`.
    pub(super) fn of_floats(dtype: DType, shape: &[i64], values: &[f64]) -> Tensor {
        Tensor { dtype, shape: shape.to_vec(), bytes: encode_floats(dtype, values.iter().copied()) }
    }

    /// From results in i64; `dtype` is an integer type or bool.
    pub(super) fn of_ints(dtype: DType, shape: &[i64], values: &[i64]) -> Tensor {
        Tensor { dtype, shape: shape.to_vec(), bytes: encode_ints(dtype, values.iter().copied()) }
    }

    /// From bytes that fit the shape by construction.
    pub(super) fn of_bytes(dtype: DType, shape: &[i64], bytes: Vec<u8>) -> Tensor {
        debug_assert_eq!(bytes.len(), numel(shape) * dtype.size_bytes());
        Tensor { dtype, shape: shape.to_vec(), bytes }
    }

    pub(super) fn filled(dtype: DType, shape: &[i64], value: f64) -> Check<Tensor> {
        let one = if dtype.is_float() {
            encode_floats(dtype, std::iter::once(value))
        } else {
            encode_ints(dtype, std::iter::once(truncated(dtype, value)))
        };
        Self::repeated(dtype, shape, &one)
    }

    pub(super) fn filled_int(dtype: DType, shape: &[i64], value: i64) -> Check<Tensor> {
        Self::repeated(dtype, shape, &encode_from_ints(dtype, std::iter::once(value)))
    }

    fn repeated(dtype: DType, shape: &[i64], one: &[u8]) -> Check<Tensor> {
        let mut bytes = reserve(numel(shape) * one.len())?;
        (0..numel(shape)).for_each(|_| bytes.extend_from_slice(one));
        Ok(Tensor { dtype, shape: shape.to_vec(), bytes })
    }

    pub(super) fn arange(dtype: DType, shape: &[i64], start: i64, step: i64) -> Check<Tensor> {
        let values = (0..shape[0]).map(|i| start.wrapping_add(i.wrapping_mul(step)));
        Ok(Tensor { dtype, shape: shape.to_vec(), bytes: encode_from_ints(dtype, values) })
    }
}

/// A float as an integer of that type, still in i64.
fn truncated(dtype: DType, v: f64) -> i64 {
    match dtype {
        DType::Bool => integers::truncated(KernelType::Bool, v),
        DType::U8 => integers::truncated(KernelType::U8, v),
        DType::I8 => integers::truncated(KernelType::I8, v),
        DType::I32 => integers::truncated(KernelType::I32, v),
        DType::I64 => integers::truncated(KernelType::I64, v),
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => unreachable!("only for integer types"),
    }
}

/// The bytes of elements, one after another; a collection of arrays is written by vectors, one of bytes is not.
fn bytes_of<const N: usize>(elements: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    elements.collect::<Vec<_>>().into_flattened()
}

/// 16-bit floats by way of f32, their compute type.
fn encode_floats(dtype: DType, values: impl Iterator<Item = f64>) -> Vec<u8> {
    match dtype {
        DType::F16 => bytes_of(values.map(|v| f16::from_f32(v as f32).to_le_bytes())),
        DType::BF16 => bytes_of(values.map(|v| bf16::from_f32(v as f32).to_le_bytes())),
        DType::F32 => bytes_of(values.map(|v| (v as f32).to_le_bytes())),
        DType::F64 => bytes_of(values.map(f64::to_le_bytes)),
        DType::Bool | DType::U8 | DType::I8 | DType::I32 | DType::I64 => unreachable!("only for float types"),
    }
}

fn encode_ints(dtype: DType, values: impl Iterator<Item = i64>) -> Vec<u8> {
    match dtype {
        DType::Bool => values.map(|v| u8::from(v != 0)).collect(),
        DType::U8 | DType::I8 => values.map(|v| v as u8).collect(),
        DType::I32 => bytes_of(values.map(|v| (v as i32).to_le_bytes())),
        DType::I64 => bytes_of(values.map(i64::to_le_bytes)),
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => unreachable!("only for integer types"),
    }
}

/// Integers to any type; to floats in one rounding to the compute type.
fn encode_from_ints(dtype: DType, values: impl Iterator<Item = i64>) -> Vec<u8> {
    match dtype {
        DType::F64 => encode_floats(dtype, values.map(|v| v as f64)),
        DType::F32 => bytes_of(values.map(|v| (v as f32).to_le_bytes())),
        DType::F16 | DType::BF16 => encode_floats(dtype, values.map(|v| f64::from(v as f32))),
        DType::Bool | DType::U8 | DType::I8 | DType::I32 | DType::I64 => encode_ints(dtype, values),
    }
}
