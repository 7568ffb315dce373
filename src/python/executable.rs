//! `compile`, `Program` and `Executable`.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::builder::GraphBuilder;
use super::errors::{guarded, to_python};
use super::tensor::{Exchange, Tensor};
use crate::backend::StepTime;
use crate::compiler::{self, Options};
use crate::kernel_ir::GroupKind;
use crate::plan::MemoryMode;
use crate::runtime;
use crate::{Error, backend};

/// A compiled graph.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Program {
    program: Arc<runtime::Program>,
}

#[pymethods]
impl Program {
    #[getter]
    fn hash(&self) -> &str {
        &self.program.hash
    }

    #[getter]
    fn compile_s(&self) -> f64 {
        self.program.timings.total().as_secs_f64()
    }

    #[getter]
    fn shared_with(&self) -> usize {
        self.program.shared_with()
    }

    fn text(&self, stage: &str) -> PyResult<String> {
        guarded("printing a stage", || self.program.text(stage))
    }

    fn explain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let graph = &self.program.plan.graph;
        let (groups, ops, steps, passes) = (PyDict::new(py), PyDict::new(py), PyDict::new(py), PyDict::new(py));
        for group in &self.program.groups {
            count(&groups, group_name(group.kind))?;
        }
        for v in graph.values() {
            count(&ops, graph.op(v).name())?;
        }
        for step in &self.program.plan.steps {
            count(&steps, step.kernel.name())?;
        }
        for (stage, time) in &self.program.timings.stages {
            let before: f64 = passes.get_item(stage)?.map_or(Ok(0.0), |t| t.extract())?;
            passes.set_item(stage, before + time.as_secs_f64())?;
        }
        let out = PyDict::new(py);
        out.set_item("groups", groups)?;
        out.set_item("ops", ops)?;
        out.set_item("steps", steps)?;
        out.set_item("timings", passes)?;
        Ok(out)
    }
}

fn count(dict: &Bound<'_, PyDict>, key: &str) -> PyResult<()> {
    let before: usize = dict.get_item(key)?.map_or(Ok(0), |n| n.extract())?;
    dict.set_item(key, before + 1)
}

const fn group_name(kind: GroupKind) -> &'static str {
    match kind {
        GroupKind::Contraction => "contraction",
        GroupKind::Norm => "norm",
        GroupKind::Loop => "loop",
        GroupKind::Direct => "direct",
        GroupKind::View => "view",
        GroupKind::Weight => "weight",
        GroupKind::Source => "source",
    }
}

/// Compiles the builder's graph, or finds the live program; see the stub file.
#[pyfunction]
#[pyo3(signature = (builder, *, precision="auto", memory="balanced", max_specializations=16, backend=None))]
pub fn compile(
    py: Python<'_>,
    builder: &Bound<'_, GraphBuilder>,
    precision: &str,
    memory: &str,
    max_specializations: usize,
    backend: Option<String>,
) -> PyResult<(Program, bool)> {
    let graph = builder.borrow().graph().clone();
    let memory = MemoryMode::from_name(memory)
        .ok_or_else(|| to_python(&Error::invalid(format!("memory `{memory}`: expected fast, balanced or low"))))?;
    let precision = compiler::precision_from_name(precision).map_err(|e| to_python(&e))?;
    let options = Options { precision, memory, max_specializations, backend };
    let (program, is_new) = py.detach(|| guarded("compiling", || compiler::compile(graph, &options)))?;
    Ok((Program { program }, is_new))
}

/// A program with a weight set.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Executable {
    executable: Arc<runtime::Executable>,
}

/// Descriptions for the runtime, and what keeps the memory behind them alive.
fn split(tensors: Vec<Tensor>) -> (Vec<backend::Tensor>, Arc<Vec<Tensor>>) {
    let described = tensors.iter().map(Tensor::describe).collect();
    (described, Arc::new(tensors))
}

fn borrow_all(py: Python<'_>, tensors: &[Bound<'_, PyAny>]) -> PyResult<Vec<Tensor>> {
    let exchange = Exchange::get(py)?;
    tensors.iter().map(|t| exchange.borrow(t)).collect()
}

impl Executable {
    fn run_profiled<'py>(
        &self,
        py: Python<'py>,
        inputs: &[Bound<'py, PyAny>],
        sizes: &[i64],
        profile: Option<&mut Vec<StepTime>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let exchange = Exchange::get(py)?;
        let declared = &self.executable.program().plan.graph.inputs;
        if inputs.len() != declared.len() {
            let what = format!("the program takes {} arguments and got {}", declared.len(), inputs.len());
            return Err(to_python(&Error::invalid(what)));
        }
        let inputs: Vec<Tensor> =
            inputs.iter().zip(declared).map(|(i, d)| exchange.argument(i, d.ty.dtype)).collect::<PyResult<_>>()?;
        let types = self.executable.output_types(sizes).map_err(|e| to_python(&e))?;
        let outputs: Vec<(Bound<'py, PyAny>, Tensor)> =
            types.iter().map(|(dtype, shape)| exchange.allocate(py, *dtype, shape)).collect::<PyResult<_>>()?;
        let input_views: Vec<backend::Tensor> = inputs.iter().map(Tensor::describe).collect();
        let output_views: Vec<backend::Tensor> = outputs.iter().map(|(_, t)| t.describe()).collect();
        let executable = &self.executable;
        py.detach(|| {
            guarded("running", || {
                // SAFETY: `inputs` and `outputs` hold handles on their memory until this function returns; outputs are
                // fresh, dense and known to nobody else.
                unsafe { executable.run(&input_views, &output_views, sizes, profile) }
            })
        })?;
        Ok(outputs.into_iter().map(|(object, _)| object).collect())
    }
}

#[pymethods]
impl Executable {
    #[new]
    fn new(py: Python<'_>, program: &Program, weights: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let (views, owner) = split(borrow_all(py, &weights)?);
        let program = program.program.clone();
        let executable = guarded("binding weights", || runtime::Executable::new(program, views, owner))?;
        Ok(Self { executable: Arc::new(executable) })
    }

    fn set_weights(&self, py: Python<'_>, weights: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
        let (views, owner) = split(borrow_all(py, &weights)?);
        guarded("binding weights", || self.executable.set_weights(views, owner))
    }

    fn invalidate(&self, slots: Vec<usize>) {
        self.executable.invalidate(&slots);
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        sizes: Vec<i64>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.run_profiled(py, &inputs, &sizes, None)
    }

    fn profile<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        sizes: Vec<i64>,
    ) -> PyResult<Bound<'py, PyList>> {
        let mut steps = Vec::new();
        self.run_profiled(py, &inputs, &sizes, Some(&mut steps))?;
        let rows = PyList::empty(py);
        for step in steps {
            let row = PyDict::new(py);
            row.set_item("step", step.step)?;
            row.set_item("kernel", step.kernel)?;
            row.set_item("module", step.module)?;
            row.set_item("seconds", step.time.as_secs_f64())?;
            row.set_item("flops", step.flops)?;
            row.set_item("bytes", step.bytes)?;
            rows.append(row)?;
        }
        Ok(rows)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.executable.stats();
        let sizes = PyList::empty(py);
        for row in self.executable.program().sizes() {
            let entry = PyDict::new(py);
            entry.set_item("dims", row.bindings)?;
            entry.set_item("arena_bytes", row.arena_bytes)?;
            entry.set_item("lower_bound_bytes", row.lower_bound_bytes)?;
            entry.set_item("ms", row.last_run.as_secs_f64() * 1e3)?;
            entry.set_item("specialize_ms", row.specialize.as_secs_f64() * 1e3)?;
            sizes.append(entry)?;
        }
        let out = PyDict::new(py);
        out.set_item("specializations", sizes.len())?;
        out.set_item("weight_bytes", stats.weight_bytes)?;
        out.set_item("derived_bytes", stats.derived_bytes)?;
        out.set_item("arena_bytes", stats.arena_bytes)?;
        out.set_item("arena_lower_bound_bytes", stats.arena_lower_bound_bytes)?;
        out.set_item("peak_bytes", stats.peak_bytes)?;
        out.set_item("sizes", sizes)?;
        Ok(out)
    }

    fn unload(&self) {
        self.executable.unload();
    }
}

/// Threads of the CPU backend; 0 means one per core.
#[pyfunction]
pub fn set_num_threads(threads: usize) {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let threads = crate::config::config().num_threads.unwrap_or(if threads == 0 { cores } else { threads });
    oxidiff_kernels::pool::Pool::global().set_threads(threads);
}

/// Instruction set and number of threads of this CPU.
#[pyfunction]
pub fn target(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let target = crate::target::Target::host();
    let out = PyDict::new(py);
    out.set_item("target", target.to_string())?;
    out.set_item("isa", target.isa.name())?;
    out.set_item("threads", oxidiff_kernels::pool::Pool::global().threads())?;
    Ok(out)
}
