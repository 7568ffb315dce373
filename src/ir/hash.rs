//! The identity of a graph: two graphs with the same hash compute the same function of inputs and weights.
//!
//! What counts: slots (inputs, parameters by name and type, constants by content), nodes in order with their ops,
//! attributes, operands and types, and the outputs; symbols by index. What does not: module paths, the names of symbols, and
//! the samples at which the graph was verified. The hash is the key of shared programs and of caches on disk, so
//! [`VERSION`] changes whenever the meaning of an op does.

use super::graph::Graph;
use super::op::{Attr, ValueType};

/// Version of the op set's meaning and of the encoding below.
const VERSION: u64 = 1;

impl Graph {
    /// Blake3 of the canonical encoding, in hex.
    pub fn hash(&self) -> String {
        let mut h = Encoder(blake3::Hasher::new());
        h.number(VERSION);
        h.number(self.symbols.len() as u64);
        h.list(&self.inputs, |h, input| {
            h.text(&input.name);
            h.ty(&input.ty);
        });
        h.list(&self.parameters, |h, parameter| {
            h.text(&parameter.name);
            h.ty(&parameter.ty);
        });
        h.list(&self.constants, |h, constant| {
            h.ty(&constant.ty);
            h.bytes(&constant.bytes);
        });
        h.list(&self.nodes, |h, node| {
            h.text(node.op.name());
            h.list(&node.op.attributes(), |h, (key, attr)| {
                h.text(key);
                h.attribute(attr);
            });
            h.list(&node.inputs, |h, v| h.number(u64::from(v.0)));
            h.ty(&node.ty);
        });
        h.list(&self.outputs, |h, v| h.number(u64::from(v.0)));
        h.0.finalize().to_hex().to_string()
    }
}

/// Writes values so that different ones never read the same: every list and text carries its length, every attribute its
/// kind.
struct Encoder(blake3::Hasher);

impl Encoder {
    fn number(&mut self, value: u64) {
        self.0.update(&value.to_le_bytes());
    }

    fn bytes(&mut self, value: &[u8]) {
        self.number(value.len() as u64);
        self.0.update(value);
    }

    fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) {
        self.number(items.len() as u64);
        items.iter().for_each(|item| each(self, item));
    }

    fn ty(&mut self, ty: &ValueType) {
        self.text(ty.dtype.name());
        self.list(&ty.shape, |h, d| h.text(&d.to_string()));
    }

    fn attribute(&mut self, attr: &Attr) {
        match attr {
            Attr::Bool(v) => {
                self.number(0);
                self.number(u64::from(*v));
            }
            Attr::Float(v) => {
                self.number(1);
                self.number(v.to_bits());
            }
            Attr::Floats(v) => {
                self.number(2);
                self.list(v, |h, v| h.number(v.to_bits()));
            }
            Attr::Dim(d) => {
                self.number(3);
                self.text(&d.to_string());
            }
            Attr::Dims(v) => {
                self.number(4);
                self.list(v, |h, d| h.text(&d.to_string()));
            }
        }
    }
}
