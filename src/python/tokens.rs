//! What fingerprints and keys of calls are made of.

use pyo3::prelude::*;

use super::tensor::{Exchange, View};

/// Tokens of a fingerprint, or of the key of a call.
#[derive(Default)]
pub(super) struct Tokens(pub(super) Vec<u8>);

impl Tokens {
    pub(super) fn tag(&mut self, tag: u8) {
        self.0.push(tag);
    }

    pub(super) fn word(&mut self, word: u64) {
        self.0.extend_from_slice(&word.to_le_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    /// Dtype, device and sizes of a tensor.
    pub(super) fn view(&mut self, view: &View<'_>) {
        let (dtype, device) = (view.dtype, view.device);
        self.word(u64::from(dtype.code) | u64::from(dtype.bits) << 8 | u64::from(dtype.lanes) << 16);
        self.word(u64::from(device.device_type) << 32 | u64::from(device.device_id.cast_unsigned()));
        self.word(view.shape.len() as u64);
        view.shape.iter().for_each(|size| self.word(size.cast_unsigned()));
    }
}

// What follows a class in a fingerprint.
pub(super) const VALUE: u8 = 0;
pub(super) const TEXT: u8 = 1;
pub(super) const INTS: u8 = 2;
pub(super) const TENSOR: u8 = 3;
pub(super) const NODE: u8 = 4;
pub(super) const IDENTITY: u8 = 5;
pub(super) const SEEN: u8 = 6;
pub(super) const ITEMS: u8 = 7;
pub(super) const PARTS: u8 = 8;
pub(super) const ABSENT: u8 = 9;
pub(super) const LONG: u8 = 10;
pub(super) const NEGATIVE: u8 = 11;
pub(super) const CONJUGATE: u8 = 12;

/// DLPack's `kDLComplex`.
const DL_COMPLEX: u8 = 5;

/// Dtype, shape and device of a tensor, and whether its memory holds the negative or the conjugate of what it says.
pub(super) fn type_of(tokens: &mut Tokens, exchange: Exchange, tensor: &Bound<'_, PyAny>) {
    let mut is_complex = true;
    if let Some(view) = exchange.view_of_weight(tensor) {
        tokens.tag(VALUE);
        tokens.view(&view);
        is_complex = view.dtype.code == DL_COMPLEX;
    } else {
        // What DLPack does not describe: other devices, sparse and quantized tensors.
        tokens.tag(TEXT);
        for name in ["dtype", "device", "shape", "layout"] {
            let text = tensor.getattr(name).and_then(|value| Ok(value.repr()?.to_string_lossy().into_owned()));
            tokens.bytes(text.unwrap_or_default().as_bytes());
        }
    }
    let says = |name: &str| tensor.call_method0(name).and_then(|is| is.is_truthy()).unwrap_or(false);
    for (tag, name) in [(NEGATIVE, "is_neg"), (CONJUGATE, "is_conj")] {
        if (tag == NEGATIVE || is_complex) && says(name) {
            tokens.tag(tag);
        }
    }
}
