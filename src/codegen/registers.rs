//! Registers of a tile program under construction: given out on definition, taken back after the last use.

use oxidiff_kernels::tile::{Instr, MAX_INSTRS, MAX_REGS, Reg};

/// A tile program being written over single-assignment names `0..`, each with a known number of uses.
pub(super) struct Emitter {
    pub(super) instrs: Vec<Instr>,
    free: Vec<Reg>,
}

impl Emitter {
    pub(super) fn new() -> Self {
        Self { instrs: Vec::new(), free: (0..MAX_REGS as Reg).rev().collect() }
    }

    /// A free register, if there is one and the program may grow.
    pub(super) fn take(&mut self) -> Option<Reg> {
        if self.instrs.len() >= MAX_INSTRS { None } else { self.free.pop() }
    }

    /// Gives a register back: its value is not read by any later instruction.
    pub(super) fn give(&mut self, reg: Reg) {
        debug_assert!(!self.free.contains(&reg), "a register is given back once");
        self.free.push(reg);
    }
}
