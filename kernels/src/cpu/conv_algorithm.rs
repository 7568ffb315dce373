//! The choice between the forms of a convolution.
//!
//! [`choose`] names the form for the sizes of a call. The direct form, [`conv`], reads a weight in panels:
//! [`pack_conv_weight`] makes them, once or for every call; or tasks pack what they use, [`conv_unpacked`]. Winograd's forms,
//! [`conv_winograd`], read the weight as it lies and want memory to work in, [`work_bytes`].
//!
//! [`conv`]: super::conv::conv
//! [`conv_unpacked`]: super::conv::conv_unpacked
//! [`pack_conv_weight`]: super::conv::pack_conv_weight
//! [`conv_winograd`]: super::conv_winograd::conv_winograd

use super::conv::Conv;
use super::conv_winograd::{self, Room, is_winograd};
use super::gemm_kernel::select;
use crate::dtype::DType;
use crate::isa::Isa;

/// A form of convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// Every product once.
    Direct,
    /// Winograd's F(2x2, 3x3): 4/9 of the products, in f32; error about 4e-7.
    Winograd2,
    /// Winograd's F(4x4, 3x3): 1/4 of the products, in f32; error about 3e-6.
    Winograd4,
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
/// Winograd's forms are for callers that accept f32 errors of 3e-6 (`precision = "eager"` does not).
pub fn choose(conv: &Conv, dtype: DType, weight: DType, keep: Keep) -> Algorithm {
    super::conv_choice::find(conv, dtype, weight, keep).unwrap_or_else(|| expected(conv, dtype, weight, keep))
}

/// The form that should be fastest by [`cost_per_pair`].
pub(super) fn expected(conv: &Conv, dtype: DType, weight: DType, keep: Keep) -> Algorithm {
    let forms = [Algorithm::Direct, Algorithm::Winograd4, Algorithm::Winograd2];
    let suited = |algorithm: &Algorithm| {
        let wide = conv.in_channels.min(conv.out_channels) >= MIN_CHANNELS;
        algorithm.applies(conv) && (wide || *algorithm == Algorithm::Direct)
    };
    let cost = |algorithm: Algorithm| cost_per_pair(conv, dtype, weight, algorithm, keep);
    forms.into_iter().filter(suited).min_by(|&a, &b| cost(a).total_cmp(&cost(b))).unwrap_or(Algorithm::Direct)
}

/// The time of a form, as that of so many f32 multiply-adds for each pair of an input and an output channel. What an
/// instruction does more than one for f32 is taken from its description, not measured.
pub fn cost_per_pair(conv: &Conv, dtype: DType, weight: DType, algorithm: Algorithm, keep: Keep) -> f64 {
    if algorithm != Algorithm::Direct {
        return conv_winograd::cost_per_pair(conv, algorithm.tile(), Room::Ample);
    }
    let rate = select(Isa::detect(), dtype, weight, (conv.rows(), conv.terms())).rate();
    let taps = conv.kernel.iter().product::<usize>() as f64;
    let packing = if keep == Keep::PerCall { PACKING_COST * weight.size_bytes() as f64 } else { 0.0 };
    taps * (conv.rows() as f64 / (DIRECT_RATE * rate) + packing)
}

/// Fewer channels fill no panel.
const MIN_CHANNELS: usize = 16;
/// Share of the multiply-add rate that the direct form reaches.
const DIRECT_RATE: f64 = 0.88;
/// Multiply-adds that take as long as packing one byte of a weight.
const PACKING_COST: f64 = 15.0;

impl Algorithm {
    /// Results a side of a tile, of Winograd's forms.
    pub fn tile(self) -> usize {
        if self == Algorithm::Winograd4 { 4 } else { 2 }
    }

    /// The share of a convolution's products that it computes, for images of whole tiles.
    pub fn products(self) -> f64 {
        match self {
            Algorithm::Direct => 1.0,
            Algorithm::Winograd2 | Algorithm::Winograd4 => {
                let (tile, side) = (self.tile() as f64, (self.tile() + 2) as f64);
                (side / (3.0 * tile)).powi(2)
            }
        }
    }

    /// Whether it computes this convolution at all.
    pub fn applies(self, conv: &Conv) -> bool {
        self == Algorithm::Direct || is_winograd(conv)
    }
}

/// Bytes that a form works in: none for the direct one, whose panels take [`Conv::packed_bytes`].
pub fn work_bytes(conv: &Conv, algorithm: Algorithm, isa: Isa, room: Room) -> usize {
    match algorithm {
        Algorithm::Direct => 0,
        _ => conv_winograd::work_bytes(conv, algorithm.tile(), isa, room),
    }
}
