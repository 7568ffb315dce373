//! Loops over integers, bound to places.

use oxidiff_kernels::cpu::integers::{Prepared, run_integers};
use oxidiff_kernels::tile::{Bound, MAX_DIMS, Space};

use super::run::{Call, Ctx};
use super::specialize::{Maker, Operand};
use crate::codegen::lower_integers;
use crate::{Error, Result};

struct IntegersCall {
    program: Prepared,
    space: Space,
    loads: Vec<Operand>,
    stores: Vec<Operand>,
    /// Of a node, for messages.
    name: String,
}

pub(super) fn make(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let program = lower_integers(&maker.plan().graph, &step.nodes, &step.values, &step.results);
    let Some(program) = program.and_then(|program| Prepared::new(&program, maker.isa())) else {
        return maker.refuse("integers without a program");
    };
    let stores = step.stores.iter().map(|a| maker.operand(a)).collect::<Result<Vec<_>>>()?;
    let sizes = stores.first().map_or(&[][..], |store| &store.access.shape);
    Ok(Box::new(IntegersCall {
        program,
        space: Space::new(sizes),
        loads: maker.operands()?,
        name: maker.plan().step_name(step),
        stores,
    }))
}

/// An operand at its address, its last dimension beside the last of the space, broadcast along those that it lacks.
fn bind(ctx: &Ctx<'_>, operand: &Operand, space: &Space) -> Bound {
    let access = &operand.access;
    let missing = space.rank - access.shape.len();
    let mut strides = [0; MAX_DIMS];
    for (d, (&size, &stride)) in access.shape.iter().zip(&access.strides).enumerate() {
        strides[missing + d] = if size == 1 { 0 } else { stride };
    }
    Bound { ptr: ctx.at(operand.slot), strides }
}

impl Call for IntegersCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let bound = |operands: &[Operand]| operands.iter().map(|o| bind(ctx, o, &self.space)).collect::<Vec<_>>();
        // SAFETY: operands are valid by the caller's promise, each broadcasts to the space, and buffers of results are apart
        // from those of operands.
        unsafe { run_integers(ctx.pool, &self.program, &self.space, &bound(&self.loads), &bound(&self.stores)) }
            .map_err(|e| Error::invalid(format!("{}: {e}", self.name)))
    }
}
