//! Equal sizes of a plan become one and the same.
//!
//! A large plan has tens of thousands of symbolic sizes, of which a few hundred differ. A specialization evaluates all of
//! them; those that share their memory are found in the cache.

use std::collections::HashSet;

use super::Plan;
use crate::ir::Dim;

impl Plan {
    /// Lets equal sizes share their memory; nothing else changes. Gives how many differ, constants apart.
    pub fn share_sizes(&mut self) -> usize {
        let mut known: HashSet<Dim> = HashSet::new();
        let mut share = |dim: &mut Dim| {
            if dim.as_constant().is_some() {
                return;
            }
            match known.get(dim) {
                Some(same) => *dim = same.clone(),
                None => {
                    known.insert(dim.clone());
                }
            }
        };
        for step in self.prepare.iter_mut().chain(&mut self.steps) {
            for access in step.accesses_mut() {
                access.shape.iter_mut().chain(&mut access.strides).for_each(&mut share);
                share(&mut access.offset);
            }
            step.space.iter_mut().for_each(&mut share);
            share(&mut step.flops);
        }
        self.buffers.iter_mut().for_each(|buffer| share(&mut buffer.numel));
        known.len()
    }
}
