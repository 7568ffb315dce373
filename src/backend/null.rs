//! Plans and specializes everything and runs nothing: tests of all that needs no kernels.

use std::sync::Arc;

use super::{Backend, Loaded, Run, Specialized};
use crate::Result;
use crate::plan::{Plan, liveness};
use crate::target::Target;
use crate::{memory, plan};

/// The backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Null;

impl Backend for Null {
    fn name(&self) -> &'static str {
        "null"
    }

    fn target(&self) -> Target {
        Target::host()
    }

    fn check(&self, plan: &Plan) -> Result<()> {
        plan::verify::verify(plan)
    }

    fn load(&self, plan: Arc<Plan>) -> Result<Box<dyn Loaded>> {
        Ok(Box::new(LoadedNull(plan)))
    }
}

struct LoadedNull(Arc<Plan>);

impl Loaded for LoadedNull {
    fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        Ok(Arc::new(SpecializedNull(Arena::of(&self.0, bindings, &[])?)))
    }
}

struct SpecializedNull(Arena);

impl Specialized for SpecializedNull {
    fn arena_bytes(&self) -> usize {
        self.0.layout.bytes
    }

    fn lower_bound_bytes(&self) -> usize {
        self.0.layout.lower_bound_bytes
    }

    fn memory_text(&self) -> String {
        self.0.text()
    }

    unsafe fn run(&self, _run: Run<'_>) -> Result<()> {
        Ok(())
    }
}

/// The arena of a plan for concrete sizes.
pub(super) struct Arena {
    pub requests: Vec<memory::Request>,
    pub names: Vec<String>,
    pub layout: memory::Layout,
    /// The plan's buffers behind the first requests, in order.
    pub buffers: Vec<plan::BufferId>,
}

impl Arena {
    /// Places the plan's temporaries and, after them, `scratch`: bytes that one step needs while it runs.
    pub(super) fn of(plan: &Plan, bindings: &[i64], scratch: &[memory::Request]) -> Result<Self> {
        let (mut requests, mut names, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for (id, range) in liveness::arena(plan) {
            let buffer = &plan.buffers[id.index()];
            let elements = buffer.numel.eval(bindings)?;
            let elements = usize::try_from(elements)
                .map_err(|_| crate::Error::invalid(format!("a buffer has {elements} elements at {bindings:?}")))?;
            let bytes = elements
                .checked_mul(buffer.dtype.size_bytes())
                .ok_or_else(|| crate::Error::OutOfMemory { asked_bytes: usize::MAX, what: "one buffer".to_owned() })?;
            requests.push(memory::Request { bytes, first: range.first, last: range.last });
            names.push(format!("{id} %{} {}", buffer.value.0, plan.graph.path(buffer.value)));
            buffers.push(id);
        }
        for request in scratch {
            requests.push(*request);
            names.push(format!("scratch of step {}", request.first));
        }
        let layout = memory::solve(&requests)?;
        if crate::config::config().verify {
            memory::verify::verify(&requests, &layout)?;
        }
        Ok(Self { requests, names, layout, buffers })
    }

    pub(super) fn text(&self) -> String {
        memory::print(&self.requests, &self.layout, &|i| self.names[i].clone())
    }
}
