//! Plans and specializes everything and runs nothing: tests of all that needs no kernels.

use std::sync::Arc;

use super::{Backend, Loaded, Run, Specialized};
use crate::Result;
use crate::plan::{self, Plan, Workspace};
use crate::target::Target;

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
        Ok(Arc::new(SpecializedNull(Workspace::of(&self.0, bindings, &[])?)))
    }
}

struct SpecializedNull(Workspace);

impl Specialized for SpecializedNull {
    fn workspace(&self) -> &Workspace {
        &self.0
    }

    unsafe fn run(&self, _run: Run<'_>) -> Result<()> {
        Ok(())
    }
}
