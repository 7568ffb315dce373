//! The `plan` stage as text: one line per step.

use std::fmt;

use super::{Access, BufferKind, Plan, Step};

fn list(accesses: &[Access]) -> String {
    accesses.iter().map(Access::to_string).collect::<Vec<_>>().join(", ")
}

fn write_step(f: &mut fmt::Formatter<'_>, plan: &Plan, at: usize, step: &Step) -> fmt::Result {
    write!(f, "{at:>5} {:<12} {} = ({})", step.kernel.name(), list(&step.stores), list(&step.operands))?;
    if let Some(body) = &step.body {
        write!(f, " body[{}]({})", body.program.instrs.len(), list(&step.loads))?;
    }
    if let Some(pack) = step.pack {
        write!(f, " pack={pack}")?;
    }
    if !step.upsample.is_empty() {
        write!(f, " upsample={:?}", step.upsample)?;
    }
    if !step.flops.is(0) {
        write!(f, " flops={}", step.flops)?;
    }
    writeln!(f, "  // {}", plan.step_name(step))
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "plan for {}: {} steps, {} packed weights", self.target, self.steps.len(), self.packs.len())?;
        for (id, b) in self.buffers_of(|kind| kind != BufferKind::Arena) {
            writeln!(f, "{id} {:?} {} x {}", b.kind, b.dtype, b.numel)?;
        }
        if !self.prepare.is_empty() {
            writeln!(f, "once per weight set:")?;
            self.prepare.iter().enumerate().try_for_each(|(at, step)| write_step(f, self, at, step))?;
        }
        writeln!(f, "per run:")?;
        self.steps.iter().enumerate().try_for_each(|(at, step)| write_step(f, self, at, step))
    }
}
