//! Runs the graph in the interpreter: what every other backend is judged against.

use std::sync::Arc;

use super::tensor::Tensor;
use super::{Backend, Loaded, Run, Specialized};
use crate::ir::interp;
use crate::plan::{Plan, Workspace};
use crate::target::Target;
use crate::{Error, Result};

/// The backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl Backend for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn target(&self) -> Target {
        Target::host()
    }

    fn check(&self, _plan: &Plan) -> Result<()> {
        Ok(())
    }

    fn load(&self, plan: Arc<Plan>) -> Result<Box<dyn Loaded>> {
        Ok(Box::new(LoadedReference(plan)))
    }
}

struct LoadedReference(Arc<Plan>);

impl Loaded for LoadedReference {
    fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        Ok(Arc::new(SpecializedReference {
            workspace: Workspace::none(),
            plan: self.0.clone(),
            bindings: bindings.to_vec(),
        }))
    }
}

/// The interpreter allocates as it goes.
struct SpecializedReference {
    workspace: Workspace,
    plan: Arc<Plan>,
    bindings: Vec<i64>,
}

/// A dense copy of a tensor.
///
/// # Safety
/// The tensor must be readable for its shape and strides.
unsafe fn read(tensor: &Tensor) -> Result<interp::Tensor> {
    let size = tensor.dtype.size_bytes();
    let mut bytes = Vec::with_capacity(tensor.bytes());
    let mut index = vec![0i64; tensor.shape.len()];
    for _ in 0..tensor.numel() {
        let offset: i64 = index.iter().zip(&tensor.strides).map(|(i, s)| i * s).sum();
        // SAFETY: the index is inside the shape.
        bytes.extend_from_slice(unsafe {
            std::slice::from_raw_parts(tensor.ptr.offset(offset as isize * size as isize), size)
        });
        for (i, len) in index.iter_mut().zip(&tensor.shape).rev() {
            *i += 1;
            if *i < *len {
                break;
            }
            *i = 0;
        }
    }
    interp::Tensor::new(tensor.dtype, tensor.shape.clone(), bytes)
}

impl Specialized for SpecializedReference {
    fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    unsafe fn run(&self, run: Run<'_>) -> Result<()> {
        // SAFETY: the caller's promise.
        let inputs = run.inputs.iter().map(|t| unsafe { read(t) }).collect::<Result<Vec<_>>>()?;
        let weights = (0..self.plan.graph.parameters.len())
            .map(|slot| {
                let missing = || Error::Backend { backend: "reference", what: format!("weight {slot} is missing") };
                // SAFETY: the caller's promise.
                unsafe { read(run.weights.tensor(slot).ok_or_else(missing)?) }
            })
            .collect::<Result<Vec<_>>>()?;
        let results = interp::run(&self.plan.graph, &self.bindings, &inputs, &weights)?;
        for (result, out) in results.iter().zip(run.outputs) {
            if result.bytes().len() != out.bytes() || !out.is_dense() {
                return Err(Error::Backend { backend: "reference", what: "an output of another size".to_owned() });
            }
            // SAFETY: the output has this size by the caller's promise.
            unsafe { std::ptr::copy_nonoverlapping(result.bytes().as_ptr(), out.ptr, result.bytes().len()) };
        }
        Ok(())
    }
}
