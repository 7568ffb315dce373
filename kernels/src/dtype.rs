//! Element types as they lie in memory.

/// Element type of a buffer. Arithmetic is in f32 unless a kernel says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// IEEE binary64.
    F64,
    /// Two's complement, 64 bits.
    I64,
    /// Two's complement, 32 bits.
    I32,
    /// Unsigned byte.
    U8,
    /// Two's complement, 8 bits.
    I8,
    /// One byte, 0 or 1.
    Bool,
}

impl DType {
    /// Bytes per element.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 | DType::I8 | DType::Bool => 1,
        }
    }
}
