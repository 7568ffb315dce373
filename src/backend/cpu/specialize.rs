//! From a plan's step and concrete sizes to a call.

use std::sync::Arc;

use oxidiff_kernels::cpu::conv_winograd::Room;
use oxidiff_kernels::cpu::tile_exec::Prepared;
use oxidiff_kernels::isa::Isa;

use super::packing::{Candidate, Keeps};
use super::read_through::Way;
use super::run::{Call, Slot};
use super::{NAME, Program, attention, convolution, copy, direct, integers, interpret, norm, product, tile};
use crate::plan::{Access, ConcreteAccess, Plan, Scratch, Step};
use crate::select::Kernel;
use crate::{Error, Result};

/// Makes the call of one step.
pub(super) struct Maker<'a> {
    pub program: &'a Program,
    pub bindings: &'a [i64],
    pub step: &'a Step,
    pub body: Option<&'a Arc<Prepared>>,
    /// Index of the step.
    pub at: usize,
    /// Scratch buffers of all steps so far; they follow the plan's buffers in the table of addresses.
    pub scratch: &'a mut Vec<Scratch>,
    /// What stays packed.
    pub keeps: &'a Keeps,
    /// How much memory there is to work in.
    pub room: Room,
    /// The step runs once per weight set, where no scratch memory is.
    pub preparing: bool,
    pub role: Role<'a>,
}

/// What a step has to do with another one.
#[derive(Clone, Copy)]
pub(super) enum Role<'a> {
    /// Nothing.
    Alone,
    /// A norm, whose result a convolution makes.
    ReadThrough,
    /// A convolution that makes the rows of a norm's result while it runs.
    Reads(Through<'a>),
}

/// A norm that a convolution [reads through](super::read_through).
#[derive(Clone, Copy)]
pub(super) struct Through<'a> {
    pub norm: &'a Step,
    pub body: &'a Arc<Prepared>,
    pub way: Way,
}

/// An operand: where it starts and how it lies.
#[derive(Clone, Debug)]
pub(super) struct Operand {
    pub slot: Slot,
    pub access: ConcreteAccess,
}

impl<'a> Maker<'a> {
    /// Memory is short: smaller chunks.
    pub fn is_slim(&self) -> bool {
        self.room == Room::Slim
    }

    pub fn plan(&self) -> &'a Plan {
        &self.program.plan
    }

    pub fn isa(&self) -> Isa {
        self.program.isa
    }

    pub fn operand(&self, access: &Access) -> Result<Operand> {
        Ok(Operand { slot: self.slot(access)?, access: access.concrete(self.bindings)? })
    }

    /// Where an operand starts.
    pub fn slot(&self, access: &Access) -> Result<Slot> {
        let elements = access.offset.eval(self.bindings)? as isize;
        let offset = elements.wrapping_mul(access.dtype.size_bytes() as isize);
        Ok(Slot { buffer: access.buffer.index(), offset })
    }

    pub fn operands(&self) -> Result<Vec<Operand>> {
        self.step.operands.iter().map(|a| self.operand(a)).collect()
    }

    /// Scratch memory for the duration of this step.
    pub fn scratch(&mut self, bytes: usize, what: &'static str) -> Slot {
        self.scratch.push(Scratch { step: self.at, bytes, what });
        Slot { buffer: self.plan().buffers.len() + self.scratch.len() - 1, offset: 0 }
    }

    pub fn refuse<T>(&self, why: impl std::fmt::Display) -> Result<T> {
        Err(Error::Backend { backend: NAME, what: format!("{}: {why}", self.plan().step_name(self.step)) })
    }

    /// What the step could keep between runs.
    pub fn candidates(&self) -> Result<Vec<Candidate>> {
        match self.step.kernel {
            _ if self.step.pack.is_none() => Ok(Vec::new()),
            Kernel::Linear => product::candidates(self),
            Kernel::Convolution => convolution::candidates(self),
            _ => Ok(Vec::new()),
        }
    }

    pub fn make(mut self) -> Result<Box<dyn Call>> {
        Ok(match self.step.kernel {
            Kernel::Copy => copy::make(&self)?,
            Kernel::Loop => tile::make(&self)?,
            Kernel::Integers => integers::make(&self)?,
            Kernel::Linear => product::make_linear(&mut self)?,
            Kernel::Matmul => product::make_matmul(&self)?,
            Kernel::Convolution => convolution::make(&mut self)?,
            Kernel::Attention => attention::make(&mut self)?,
            Kernel::GroupNorm => norm::make_group(&self)?,
            Kernel::LayerNorm | Kernel::RmsNorm => norm::make_row(&self)?,
            Kernel::Softmax => norm::make_softmax(&self)?,
            Kernel::Gather => direct::make_gather(&self)?,
            Kernel::Upsample => direct::make_upsample(&self)?,
            Kernel::Interpolate => direct::make_interpolate(&self)?,
            Kernel::Reduce => direct::make_reduce(&self)?,
            Kernel::Scan => direct::make_scan(&self)?,
            Kernel::Pad => direct::make_pad(&self)?,
            Kernel::Interpret => interpret::make(&self)?,
        })
    }
}
