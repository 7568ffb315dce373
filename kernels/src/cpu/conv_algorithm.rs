//! The choice between the forms of a convolution, behind one interface.
//!
//! [`choose`] names the form for the sizes of a call; [`weight_bytes`], [`pack_weight`] and [`run`] follow it. A packed
//! weight belongs to one form: keep one per [`Algorithm`] in use, since the sizes of a call decide and the same layer may
//! meet several.

use super::KernelError;
use super::conv::{Conv, PackedWeight, Weight, conv, pack_conv_weight};
use super::conv_winograd::{
    WinogradWeight, best_tile, conv_winograd, is_winograd, pack_winograd_weight, winograd_bytes,
};
use crate::calibrate::bf16_dot_wins;
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;

/// A form of convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Every product once.
    Direct,
    /// Winograd's F(2x2, 3x3): 4/9 of the products, weights 16/9 as many and f32; error about 4e-7.
    Winograd2,
    /// Winograd's F(4x4, 3x3): 1/4 of the products, weights four times as many and f32; error about 3e-6.
    Winograd4,
}

/// A packed weight in one of the forms; borrows its memory from the caller.
#[derive(Clone, Copy, Debug)]
pub enum ConvWeight {
    /// For [`Algorithm::Direct`].
    Direct(PackedWeight),
    /// For the two Winograd forms.
    Winograd(WinogradWeight),
}

/// How the weight of a call is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Packed once and used by many calls.
    Packed,
    /// Packed anew for this call.
    PerCall,
}

/// The form that was measured to be fastest for these sizes (see [`conv_choice`](super::conv_choice)), else the one
/// expected to be.
///
/// Winograd's forms are for callers that accept f32 errors of 3e-6 (`precision = "eager"` does not) and, when the weight
/// is kept, its size. For two bf16 operands the direct form runs at twice the rate where `VDPBF16PS` is fast, and stays.
pub fn choose(conv: &Conv, dtype: DType, weight: DType, keep: Keep) -> Algorithm {
    if let Some(measured) = super::conv_choice::find(conv, dtype, weight, keep) {
        return measured;
    }
    let is_bf16 = (dtype, weight) == (DType::BF16, DType::BF16) && bf16_dot_wins();
    match best_tile(conv) {
        _ if is_bf16 => Algorithm::Direct,
        // The transform of a weight costs what some fifty tiles save.
        Some(tile) if keep == Keep::PerCall && conv.rows() < 96 * tile * tile => Algorithm::Direct,
        Some(4) => Algorithm::Winograd4,
        Some(_) => Algorithm::Winograd2,
        None => Algorithm::Direct,
    }
}

impl Algorithm {
    fn tile(self) -> usize {
        if self == Algorithm::Winograd4 { 4 } else { 2 }
    }

    /// Whether it computes this convolution at all.
    pub fn applies(self, conv: &Conv) -> bool {
        self == Algorithm::Direct || is_winograd(conv)
    }
}

/// Bytes that [`pack_weight`] writes.
pub fn weight_bytes(conv: &Conv, algorithm: Algorithm, dtype: DType, isa: Isa) -> usize {
    match algorithm {
        Algorithm::Direct => conv.packed_bytes(dtype, isa),
        _ => winograd_bytes(conv, algorithm.tile(), isa),
    }
}

/// Packs a weight for one form.
///
/// # Errors
/// [`KernelError`] if the form does not apply or scratch memory runs out.
///
/// # Safety
/// `weight` must be readable for the shape that `conv` says, `dst` writable for [`weight_bytes`] bytes.
pub unsafe fn pack_weight(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    algorithm: Algorithm,
    weight: &Weight,
    dst: *mut u8,
) -> Result<ConvWeight, KernelError> {
    // SAFETY: forwarded.
    unsafe {
        match algorithm {
            Algorithm::Direct => Ok(ConvWeight::Direct(pack_conv_weight(pool, isa, conv, weight, dst))),
            _ => pack_winograd_weight(pool, isa, conv, algorithm.tile(), weight, dst).map(ConvWeight::Winograd),
        }
    }
}

impl ConvWeight {
    /// Describes memory that [`pack_weight`] filled earlier with the same arguments.
    pub fn from_raw(ptr: *const u8, conv: &Conv, algorithm: Algorithm, dtype: DType, isa: Isa) -> ConvWeight {
        match algorithm {
            Algorithm::Direct => ConvWeight::Direct(PackedWeight::from_raw(ptr, dtype, conv, isa)),
            _ => ConvWeight::Winograd(WinogradWeight::from_raw(ptr, conv, algorithm.tile(), isa)),
        }
    }
}

/// Convolves `x` in the form the weight was packed for.
///
/// # Errors
/// As [`conv`].
///
/// # Safety
/// As [`conv`].
pub unsafe fn run(
    pool: &Pool,
    isa: Isa,
    shape: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &ConvWeight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    // SAFETY: forwarded.
    unsafe {
        match weight {
            ConvWeight::Direct(weight) => conv(pool, isa, shape, x, dtype, weight, epilogue),
            ConvWeight::Winograd(weight) => conv_winograd(pool, isa, shape, x, dtype, weight, epilogue),
        }
    }
}
