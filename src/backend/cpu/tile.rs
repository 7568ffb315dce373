//! Tile programs bound to places: loops, and the bodies of everything else.

use std::sync::Arc;

use oxidiff_kernels::cpu::tile_exec::{Prepared, run_loop};
use oxidiff_kernels::tile::{Bound, MAX_DIMS, Space};

use super::run::{Call, Ctx, Slot};
use super::specialize::Maker;
use crate::Result;
use crate::plan::{Access, Step};

/// A tile program with its operands.
pub(super) struct TileArgs {
    pub program: Arc<Prepared>,
    pub space: Space,
    loads: Vec<TileOperand>,
    stores: Vec<TileOperand>,
}

struct TileOperand {
    slot: Slot,
    strides: [isize; MAX_DIMS],
}

impl TileArgs {
    /// The body of the maker's step over the step's space.
    pub fn new(maker: &Maker<'_>) -> Result<Self> {
        let Some(program) = maker.body else { return maker.refuse("a step without a body") };
        Self::of(maker, maker.step, program)
    }

    /// The body of another step over that one's space.
    pub fn of(maker: &Maker<'_>, step: &Step, program: &Arc<Prepared>) -> Result<Self> {
        let sizes = step.space.iter().map(|d| d.eval(maker.bindings)).collect::<Result<Vec<_>>>()?;
        let sizes: Vec<usize> = sizes.into_iter().map(|d| usize::try_from(d).unwrap_or(0)).collect();
        if sizes.len() > MAX_DIMS {
            return maker.refuse("a space of too many dimensions");
        }
        let bind = |access: &Access| -> Result<TileOperand> {
            let mut strides = [0; MAX_DIMS];
            for (to, from) in strides.iter_mut().zip(&access.strides) {
                *to = from.eval(maker.bindings)? as isize;
            }
            Ok(TileOperand { slot: maker.slot(access)?, strides })
        };
        Ok(Self {
            program: program.clone(),
            space: Space::new(&sizes),
            loads: step.loads.iter().map(bind).collect::<Result<_>>()?,
            stores: step.stores.iter().map(bind).collect::<Result<_>>()?,
        })
    }

    /// The operands at their addresses: loads and stores.
    pub fn bind(&self, ctx: &Ctx<'_>) -> (Vec<Bound>, Vec<Bound>) {
        let bind = |operand: &TileOperand| Bound { ptr: ctx.at(operand.slot), strides: operand.strides };
        (self.loads.iter().map(bind).collect(), self.stores.iter().map(bind).collect())
    }
}

struct LoopCall(TileArgs);

pub(super) fn make(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    Ok(Box::new(LoopCall(TileArgs::new(maker)?)))
}

impl Call for LoopCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (loads, stores) = self.0.bind(ctx);
        // SAFETY: operands are valid by the caller's promise; a plan lets a store share memory with a load only element
        // for element. Loops load neither accumulators nor row scalars.
        unsafe { run_loop(ctx.pool, &self.0.program, &self.0.space, &loads, &stores) };
        Ok(())
    }
}
