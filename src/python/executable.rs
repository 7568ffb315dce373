//! `compile`, `Program` and `Executable`.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyList};

use super::builder::GraphBuilder;
use super::device::Place;
use super::errors::{guarded, shielded, to_python};
use super::layout::{TensorLayout, TensorState};
use super::tensor::{Exchange, Tensor};
use oxidiff::backend::{Identity, StepTime, Weight};
use oxidiff::compiler::{self, Options};
use oxidiff::ir::{DType, Input};
use oxidiff::kernel_ir::GroupKind;
use oxidiff::plan::{BufferKind, MemoryMode, Numerics, PackForm, Plan};
use oxidiff::runtime;
use oxidiff::target::{DEVICES, Profile};
use oxidiff::{Error, backend};

/// A compiled graph.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Program {
    program: Arc<runtime::Program>,
    place: Arc<Place>,
}

impl Program {
    /// The program itself.
    pub const fn inner(&self) -> &Arc<runtime::Program> {
        &self.program
    }

    /// Where its tensors are.
    pub const fn place(&self) -> &Arc<Place> {
        &self.place
    }
}

#[pymethods]
impl Program {
    fn forget_sizes(&self) -> PyResult<()> {
        shielded("dropping sizes", || {
            self.program.forget_sizes();
            Ok(())
        })
    }

    fn forget_size(&self, sizes: Vec<i64>) -> PyResult<()> {
        shielded("dropping a size", || {
            self.program.forget_size(&sizes);
            Ok(())
        })
    }

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

    fn memory<'py>(&self, py: Python<'py>, sizes: Vec<i64>) -> PyResult<Bound<'py, PyDict>> {
        let plan = &self.program.plan;
        if sizes.len() != plan.graph.symbols.len() {
            let (wanted, got) = (plan.graph.symbols.len(), sizes.len());
            return Err(to_python(&Error::invalid(format!("the program has {wanted} sizes, not {got}"))));
        }
        let specialized = py.detach(|| guarded("planning memory", || self.program.peek(&sizes)))?;
        let workspace = specialized.workspace();
        let derived = specialized.kept().iter().map(|k| k.bytes).sum::<usize>() + specialized.prepared_bytes();
        let (buffers, steps) = (PyList::empty(py), PyList::empty(py));
        for (at, (request, offset)) in workspace.requests.iter().zip(&workspace.layout.offsets).enumerate() {
            let (module, what) = workspace.name(at);
            buffers.append((module, what, request.bytes, request.first, request.last, *offset))?;
        }
        let costs = specialized.costs();
        for (at, step) in plan.steps.iter().enumerate() {
            let cost = costs.get(at).copied().unwrap_or_default();
            let (name, path) = (plan.step_name(step), plan.graph.path(step.value));
            steps.append((name, step.kernel.name(), path, cost.work, cost.bytes))?;
        }
        let types = backend::output_types(plan, &sizes).map_err(|e| to_python(&e))?;
        let bytes = |(dtype, shape): &(DType, Vec<i64>)| shape.iter().product::<i64>() * dtype.size_bytes() as i64;
        let out = PyDict::new(py);
        out.set_item("dims", sizes)?;
        out.set_item("arena_bytes", workspace.bytes())?;
        out.set_item("lower_bound_bytes", workspace.layout.lower_bound_bytes)?;
        out.set_item("derived_bytes", derived)?;
        out.set_item("output_bytes", types.iter().map(bytes).sum::<i64>())?;
        out.set_item("steps", steps)?;
        out.set_item("buffers", buffers)?;
        out.set_item("laid_out", laid_out(plan).map_err(|e| to_python(&e))?)?;
        Ok(out)
    }

    fn explain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        shielded("explaining a program", || {
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
            if self.place.is_device() {
                let refused = PyList::empty(py);
                let mut seen = std::collections::HashSet::new();
                for choice in self.program.sizes().into_iter().flat_map(|row| row.delegations) {
                    if !choice.reason.is_empty() && seen.insert((choice.step.clone(), choice.reason.clone())) {
                        refused.append((choice.step, choice.reason))?;
                    }
                }
                out.set_item("not_by_libraries", refused)?;
                let launched = PyList::empty(py);
                for row in self.program.sizes() {
                    if let Some(reason) = row.no_graphs {
                        launched.append((row.bindings, reason))?;
                    }
                }
                out.set_item("no_graphs", launched)?;
            }
            out.set_item("groups", groups)?;
            out.set_item("ops", ops)?;
            out.set_item("steps", steps)?;
            out.set_item("timings", passes)?;
            Ok(out)
        })
    }
}

fn count(dict: &Bound<'_, PyDict>, key: &str) -> PyResult<()> {
    let before: usize = dict.get_item(key)?.map_or(Ok(0), |n| n.extract())?;
    dict.set_item(key, before + 1)
}

/// Slot, if it is the whole of one, and bytes of each weight that libraries of GPUs want with its channels as neighbours, and that
/// does not lie so in a dense tensor.
fn laid_out(plan: &Plan) -> Result<Vec<(Option<u32>, usize)>, Error> {
    let mut found = Vec::new();
    for pack in plan.packs.iter().filter(|pack| matches!(pack.form, PackForm::Convolution { .. })) {
        let weight = pack.source.concrete(&[])?;
        let [filters, channels, taps @ ..] = &weight.shape[..] else { continue };
        let taps: usize = taps.iter().product();
        if taps > 1 && *channels > 1 {
            let slot = match plan.buffers[pack.source.buffer.index()].kind {
                BufferKind::Parameter(slot) => Some(slot),
                _ => None,
            };
            found.push((slot, filters * channels * taps * pack.source.dtype.size_bytes()));
        }
    }
    Ok(found)
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

/// A device's figures, as [`devices`] gives them.
type Figures = (&'static str, f64, f64, f64, u64, f64, f64);

fn figures(d: &Profile) -> Figures {
    let rate = |value: u64| value as f64;
    let launch_s = rate(d.launch_ns) * 1e-9;
    (d.name, rate(d.f32_flops), rate(d.half_flops), rate(d.bandwidth), d.memory_bytes, launch_s, rate(d.tf32_flops))
}

/// Published figures of GPUs; see the stub file.
#[pyfunction]
pub fn devices() -> Vec<Figures> {
    DEVICES.iter().map(|gpu| figures(&gpu.profile)).collect()
}

/// What programs of a backend are chosen for; see the stub file.
#[pyfunction]
pub fn profile_of(backend: &str) -> PyResult<Figures> {
    guarded("asking for a device's figures", || Ok(figures(&backend::by_name(backend)?.profile())))
}

/// The name in [`devices`] of a GPU, however it is written; see the stub file.
#[pyfunction]
pub fn device_named(name: &str) -> PyResult<Option<&'static str>> {
    shielded("looking for a device", || Ok(Profile::named(name).map(|profile| profile.name)))
}

/// Compiles the builder's graph, or finds the live program; see the stub file.
#[pyfunction]
#[pyo3(signature = (
    builder, *, precision="auto", widen=false, memory="balanced", memory_budget=None, max_specializations=16,
    cuda_graphs=true, backend=None, device=None, profile=None, tf32_products=false, tf32_convolutions=false
))]
#[allow(clippy::too_many_arguments, reason = "keywords of Python")]
pub fn compile(
    py: Python<'_>,
    builder: &Bound<'_, GraphBuilder>,
    precision: &str,
    widen: bool,
    memory: &str,
    memory_budget: Option<usize>,
    max_specializations: usize,
    cuda_graphs: bool,
    backend: Option<String>,
    device: Option<Bound<'_, PyAny>>,
    profile: Option<&str>,
    tf32_products: bool,
    tf32_convolutions: bool,
) -> PyResult<(Program, bool)> {
    let graph = builder.borrow().graph().clone();
    let memory = MemoryMode::from_name(memory)
        .ok_or_else(|| to_python(&Error::invalid(format!("memory `{memory}`: expected fast, balanced or low"))))?;
    let precision = compiler::precision_from_name(precision).map_err(|e| to_python(&e))?;
    // One of the table, or that of a backend that is here.
    let named = |name: &str| match Profile::named(name) {
        Some(profile) => Ok(*profile),
        None => backend::by_name(name).map(|backend| backend.profile()),
    };
    let profile = profile.map(named).transpose().map_err(|e| to_python(&e))?;
    let backend = match &device {
        Some(device) => Some(device.getattr("backend")?.extract()?),
        None => backend,
    };
    let place = Arc::new(Place::new(device)?);
    let numerics = Numerics { tf32_products, tf32_convolutions };
    let options = Options {
        precision,
        widen,
        memory,
        memory_budget,
        max_specializations,
        cuda_graphs,
        numerics,
        profile,
        backend,
    };
    let (program, is_new) = py.detach(|| guarded("compiling", || compiler::compile(graph, &options)))?;
    Ok((Program { program, place }, is_new))
}

/// A program with a weight set.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct Executable {
    executable: Arc<runtime::Executable>,
    place: Arc<Place>,
    /// What the bound tensors were.
    states: Mutex<Vec<State>>,
}

/// What changes when a tensor, its memory or (as far as torch counts) its content does.
#[derive(Clone, PartialEq, Eq)]
struct State {
    object: usize,
    data: usize,
    strides: Vec<i64>,
    /// -1 where nobody counts.
    version: i64,
}

/// The tensors as weights, with what shows their changes. What is bound is an alias of each: the same memory without the same
/// object, which would keep `torch.utils.swap_tensors` from working.
fn weights_of(tensors: &[Bound<'_, PyAny>], place: &Place) -> PyResult<(Vec<Weight>, Vec<State>)> {
    let Some(first) = tensors.first() else { return Ok(Default::default()) };
    let py = first.py();
    let (exchange, layout) = (Exchange::get(py)?, TensorLayout::get(py));
    let (detach, is_inference, version) = (intern!(py, "detach"), intern!(py, "is_inference"), intern!(py, "_version"));
    let weight = |object: &Bound<'_, PyAny>| {
        let alias = object.call_method0(detach)?;
        let tensor = exchange.borrow(&alias, place.dl)?;
        let identity = match layout {
            // SAFETY: `borrow` proved that this is a tensor with a storage; it is live and the GIL is held.
            Some(layout) => match unsafe { layout.read(alias.as_ptr().cast()) } {
                TensorState { version: Some(version), counter, .. } => Identity::Counted { counter, version },
                _ => Identity::Unknown,
            },
            None if object.call_method0(is_inference)?.is_truthy()? => Identity::Unknown,
            None => Identity::Told,
        };
        let version = match &identity {
            Identity::Counted { version, .. } => i64::from(*version),
            Identity::Told => object.getattr(version)?.extract()?,
            Identity::Unknown => -1,
        };
        let (data, strides) = (tensor.data.addr(), tensor.strides.clone());
        let state = State { object: object.as_ptr().addr(), data, strides, version };
        // A DLPack handle need not hold the tensor itself, and with it the counter whose address is its name.
        let alias = matches!(identity, Identity::Counted { .. }).then(|| alias.unbind());
        Ok((Weight { tensor: tensor.describe(), identity, owner: Box::new((tensor, alias)) }, state))
    };
    tensors.iter().map(weight).collect()
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
        let place = &*self.place;
        let stream = place.stream(py)?;
        let mut put = |word| match place.is_device() {
            true => self.executable.program().number(word, stream).map(Some).map_err(|e| to_python(&e)),
            false => Ok(None),
        };
        let tensor =
            |(value, slot): (&Bound<'py, PyAny>, &Input)| exchange.argument(value, slot.ty.dtype, place.dl, &mut put);
        let inputs: Vec<Tensor> = inputs.iter().zip(declared).map(tensor).collect::<PyResult<_>>()?;
        let types = self.executable.output_types(sizes).map_err(|e| to_python(&e))?;
        let outputs: Vec<(Bound<'py, PyAny>, Tensor)> =
            types.iter().map(|(dtype, shape)| place.allocate(py, &exchange, *dtype, shape)).collect::<PyResult<_>>()?;
        let input_views: Vec<backend::Tensor> = inputs.iter().map(Tensor::describe).collect();
        let output_views: Vec<backend::Tensor> = outputs.iter().map(|(_, t)| t.describe()).collect();
        let executable = &self.executable;
        py.detach(|| {
            guarded("running", || {
                // SAFETY: `inputs` and `outputs` hold handles on their memory until this function returns, and torch gives it to
                // nobody before `stream`, its current one in this thread, has done what was put there; outputs are fresh,
                // dense and known to nobody else.
                unsafe { executable.run_on(stream, &input_views, &output_views, sizes, profile) }
            })
        })?;
        Ok(outputs.into_iter().map(|(object, _)| object).collect())
    }
}

#[pymethods]
impl Executable {
    #[new]
    fn new(program: &Program, weights: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let (inner, place) = (program.program.clone(), program.place.clone());
        let (weights, states) = weights_of(&weights, &place)?;
        let executable = guarded("binding weights", || runtime::Executable::new(inner, weights))?;
        Ok(Self { executable: Arc::new(executable), place, states: Mutex::new(states) })
    }

    fn set_weights(&self, weights: Vec<Bound<'_, PyAny>>, suspects: HashSet<usize>, since: u64) -> PyResult<bool> {
        let (weights, states) = weights_of(&weights, &self.place)?;
        let known = self.states.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let differs = |slot: &usize| known.get(*slot) != states.get(*slot);
        let written: Vec<usize> =
            (0..states.len()).filter(|slot| !differs(slot) && suspects.contains(&states[*slot].object)).collect();
        let mut changed: Vec<usize> = (0..states.len()).filter(differs).collect();
        changed.extend(&written);
        if changed.is_empty() && states.len() == known.len() {
            return Ok(false);
        }
        guarded("binding weights", || self.executable.set_weights(weights, &changed, &written, since))?;
        *self.states.lock().unwrap_or_else(PoisonError::into_inner) = states;
        Ok(true)
    }

    fn run<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        sizes: Vec<i64>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        shielded("running", || self.run_profiled(py, &inputs, &sizes, None))
    }

    fn profile<'py>(
        &self,
        py: Python<'py>,
        inputs: Vec<Bound<'py, PyAny>>,
        sizes: Vec<i64>,
    ) -> PyResult<Bound<'py, PyList>> {
        shielded("profiling", || {
            let mut steps = Vec::new();
            self.run_profiled(py, &inputs, &sizes, Some(&mut steps))?;
            let rows = PyList::empty(py);
            for step in steps {
                let row = PyDict::new(py);
                row.set_item("step", step.step)?;
                row.set_item("kernel", step.kernel)?;
                row.set_item("module", step.module)?;
                row.set_item("dtype", step.dtype.to_string())?;
                row.set_item("seconds", step.time.as_secs_f64())?;
                row.set_item("flops", step.cost.flops)?;
                row.set_item("work", step.cost.work)?;
                row.set_item("bytes", step.cost.bytes)?;
                rows.append(row)?;
            }
            Ok(rows)
        })
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        shielded("counting memory", || {
            let stats = self.executable.stats();
            let sizes = PyList::empty(py);
            for row in self.executable.program().sizes() {
                let entry = PyDict::new(py);
                entry.set_item("dims", row.bindings)?;
                entry.set_item("arena_bytes", row.arena_bytes)?;
                entry.set_item("lower_bound_bytes", row.lower_bound_bytes)?;
                entry.set_item("derived_bytes", row.derived_bytes)?;
                entry.set_item("ms", row.last_run.as_secs_f64() * 1e3)?;
                entry.set_item("specialize_ms", row.specialize.as_secs_f64() * 1e3)?;
                entry.set_item("graph_bytes", row.graph_bytes)?;
                if self.place.is_device() {
                    let by = PyDict::new(py);
                    row.delegations.iter().try_for_each(|choice| count(&by, choice.by))?;
                    entry.set_item("computed_by", by)?;
                    if let Some(reason) = row.no_graphs {
                        entry.set_item("no_graphs", reason)?;
                    }
                }
                sizes.append(entry)?;
            }
            let out = PyDict::new(py);
            out.set_item("specializations", sizes.len())?;
            out.set_item("weight_bytes", stats.weight_bytes)?;
            out.set_item("derived_bytes", stats.derived_bytes)?;
            out.set_item("derived", stats.derived.into_py_dict(py)?)?;
            out.set_item("arena_bytes", stats.arena_bytes)?;
            out.set_item("arena_lower_bound_bytes", stats.arena_lower_bound_bytes)?;
            out.set_item("pool_bytes", stats.pool_bytes)?;
            out.set_item("peak_bytes", stats.peak_bytes)?;
            out.set_item("graph_bytes", stats.graph_bytes)?;
            out.set_item("sizes", sizes)?;
            Ok(out)
        })
    }

    fn prepare(&self, py: Python<'_>, sizes: Vec<i64>) -> PyResult<()> {
        py.detach(|| guarded("planning a size", || self.executable.program().specialize(&sizes).map(|_| ())))
    }

    fn derived_bytes_for(&self, py: Python<'_>, sizes: Vec<i64>) -> PyResult<usize> {
        py.detach(|| guarded("planning a size", || self.executable.derived_bytes_for(&sizes)))
    }

    fn unload(&self) -> PyResult<()> {
        shielded("unloading", || {
            self.executable.unload();
            Ok(())
        })
    }
}

/// Threads of the CPU backend; 0 means one per core.
#[pyfunction]
pub fn set_num_threads(threads: usize) -> PyResult<()> {
    shielded("starting threads", || {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = oxidiff::config::config().num_threads.unwrap_or(if threads == 0 { cores } else { threads });
        oxidiff_kernels::pool::Pool::global().set_threads(threads);
        Ok(())
    })
}

/// Instruction set and number of threads of this CPU.
#[pyfunction]
pub fn target(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    shielded("looking at the processor", || {
        let target = oxidiff::target::Target::host();
        let out = PyDict::new(py);
        out.set_item("target", target.to_string())?;
        out.set_item("isa", target.isa.name())?;
        out.set_item("threads", oxidiff_kernels::pool::Pool::global().threads())?;
        Ok(out)
    })
}

/// Orders events of this process; see the stub file.
#[pyfunction]
pub fn stamp() -> u64 {
    backend::derived::stamp()
}

/// Bytes of all derived weights of this process.
#[pyfunction]
pub fn derived_bytes() -> usize {
    backend::derived::bytes()
}
