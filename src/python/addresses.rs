//! Maps by address.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Hashes an address: its bits are as good as random above the alignment.
#[derive(Default)]
pub(super) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_usize(usize::from(byte)));
    }

    fn write_usize(&mut self, address: usize) {
        let mixed = (self.0 ^ (address as u64 >> 3)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// A map whose keys are addresses.
pub(super) type ByAddress<T> = HashMap<usize, T, BuildHasherDefault<AddressHasher>>;
