//! What of CUDA Python asks for: where the libraries are, and what was found.

use std::path::PathBuf;
use std::sync::Arc;

use dlpack_rs::ffi::{DLDevice, K_DL_CUDA};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::device::CPU;
use super::errors::guarded;
use super::executable::Program;
use super::memory::TorchMemory;
use super::tensor::Exchange;
use oxidiff::Error;
use oxidiff::backend::cuda::cubins::{self, Compiler, Cubins};
use oxidiff::backend::cuda::cudnn::{Cudnn, Storage};
use oxidiff::backend::cuda::delegate::{Asked, Delegate, Delegates};
use oxidiff::backend::cuda::driver::DriverMemory;
use oxidiff::backend::cuda::library::Search;
use oxidiff::backend::cuda::lower::Lowered;
use oxidiff::backend::cuda::{Cuda, compiler, device, found, set_search};
use oxidiff::backend::{Backend, Memory};

/// Makes device `index` ready, with memory from torch's allocator, and says what it is; raises with the reason where it
/// cannot be used. `torch` is as for [`cuda_findings`].
#[pyfunction]
pub(super) fn cuda_open(py: Python<'_>, index: u32, torch: PathBuf) -> PyResult<String> {
    let memory = memory_of(py, DLDevice { device_type: K_DL_CUDA, device_id: index.cast_signed() })?;
    py.detach(|| {
        guarded("making a GPU ready", || {
            set_search(Search::beside_torch(&torch));
            let cuda = Cuda::shared_over(index, memory)?;
            Ok(format!("{} ({})", cuda.device().name(), cuda.target()))
        })
    })
}

/// torch's allocator for a device; none where torch is too old to lend it.
fn memory_of(py: Python<'_>, device: DLDevice) -> PyResult<Option<Arc<dyn Memory>>> {
    Ok(match Exchange::get(py)? {
        Exchange::C(table) => Some(Arc::new(TorchMemory { table, device })),
        Exchange::Attributes => None,
    })
}

/// A compiler written in Python: takes text and compute capability, gives what the driver loads.
struct PythonCompiler(Py<PyAny>);

impl Compiler for PythonCompiler {
    fn identity(&self) -> String {
        "python".to_owned()
    }

    fn compile(&self, source: &str, arch: u32) -> oxidiff::Result<Vec<u8>> {
        Python::attach(|py| {
            let image = self.0.call1(py, (source, arch))?;
            Ok(image.bind(py).cast::<PyBytes>()?.as_bytes().to_vec())
        })
        .map_err(|e: PyErr| Error::invalid(format!("the compiler: {e}")))
    }
}

/// For tests without a GPU: device `index` is what the stand-in `driver` says, `compile` makes its kernels, memory is the CPU's.
#[pyfunction]
pub(super) fn cuda_emulate(py: Python<'_>, driver: PathBuf, compile: Py<PyAny>, index: u32) -> PyResult<()> {
    let memory = memory_of(py, CPU)?;
    guarded("making a stand-in ready", || {
        set_search(Search { packages: Vec::new(), driver: Some(driver) });
        let device = device(index)?;
        let memory = memory.unwrap_or_else(|| Arc::new(DriverMemory(device.clone())));
        Cuda::new(device, Arc::new(PythonCompiler(compile)), Cubins::default(), memory).share();
        Ok(())
    })
}

/// What was found of each NVIDIA library beside the `torch` package in folder `torch`, and of the device: subject, whether
/// it is there, and what or why not. The first call of a process decides where libraries are looked for.
#[pyfunction]
pub(super) fn cuda_findings(torch: PathBuf) -> PyResult<Vec<(&'static str, bool, String)>> {
    guarded("looking for NVIDIA's libraries", || {
        set_search(Search::beside_torch(&torch));
        let libraries = found();
        let mut lines: Vec<(&'static str, bool, String)> = Vec::new();
        for (name, finding) in libraries.findings() {
            match finding {
                Ok(found) => lines.push((name, true, found.to_string())),
                Err(reason) => lines.push((name, false, reason.clone())),
            }
        }
        if libraries.driver.is_ok() {
            let release = libraries.release.clone().unwrap_or_else(|| "it does not say its version".to_owned());
            lines.push(("cuda driver release", true, release));
            lines.push(match device(0) {
                Ok(device) => ("cuda device", true, format!("{} (sm_{})", device.name(), device.arch())),
                Err(e) => ("cuda device", false, e.to_string()),
            });
        }
        Ok(lines)
    })
}

/// Names and texts of the kernels that a GPU would run a program's plan with; none has to be there.
#[pyfunction]
pub(super) fn cuda_kernels(py: Python<'_>, program: &Program) -> PyResult<Vec<(String, String)>> {
    let plan = &program.inner().plan;
    let lowered = py.detach(|| guarded("making kernels", || Lowered::new(plan)))?;
    Ok(lowered.kernels.into_iter().map(|kernel| (kernel.name, kernel.text)).collect())
}

/// Compute capabilities that NVRTC compiles for; raises with the reason where it is not found. `torch` is as for
/// [`cuda_findings`].
#[pyfunction]
pub(super) fn cuda_archs(torch: PathBuf) -> PyResult<Vec<u32>> {
    guarded("asking NVRTC", || {
        set_search(Search::beside_torch(&torch));
        compiler()?.archs()
    })
}

/// Compiles kernels' texts as one unit, and gives its entry points with the bytes of registers that each spills.
#[pyfunction]
pub(super) fn cuda_spills(
    py: Python<'_>,
    texts: Vec<String>,
    arch: u32,
    torch: PathBuf,
) -> PyResult<Vec<(String, usize)>> {
    py.detach(|| {
        guarded("compiling kernels", || {
            set_search(Search::beside_torch(&torch));
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let compiled = compiler()?.compile(&cubins::unit(&texts), arch, true)?;
            Ok(compiled.spills().into_iter().map(|(name, bytes)| (name.to_owned(), bytes)).collect())
        })
    })
}

/// Does `work` with each step of a program that a library may compute, at `sizes`, on a device of compute capability `arch`.
fn with_delegates<R>(
    program: &Program,
    sizes: &[i64],
    arch: u32,
    delegates: &Delegates,
    mut work: impl FnMut(usize, &Delegate, &Asked<'_>) -> Option<R>,
) -> oxidiff::Result<Vec<R>> {
    let plan = &program.inner().plan;
    let lowered = Lowered::new(plan)?;
    let asked = |at: usize| {
        let (step, numerics, fold_flops) = (&plan.steps[at], plan.options.numerics, delegates.fold_flops());
        Asked { step, bindings: sizes, arch, numerics, fold_flops, is_bounded: false }
    };
    let steps = lowered.steps.iter().enumerate();
    Ok(steps.filter_map(|(at, step)| work(at, step.delegate.as_ref()?, &asked(at))).collect())
}

/// A tensor of a graph of cuDNN: element type, sizes, strides, and whether it lies in memory.
type GraphTensor = (&'static str, Vec<i64>, Vec<i64>, bool);
/// A graph of cuDNN: number of its step, tensors, operations.
type StepGraph = (usize, Vec<GraphTensor>, Vec<String>);

/// The graphs that cuDNN is asked for first for steps of a program; see the stub file.
#[pyfunction]
pub(super) fn cuda_graphs(program: &Program, sizes: Vec<i64>, arch: u32) -> PyResult<Vec<StepGraph>> {
    let graphs = |at: usize, delegate: &Delegate, asked: &Asked<'_>| {
        let graphs = delegate.graphs(asked).into_iter().map(|graph| {
            let in_memory = |storage| matches!(storage, Storage::Operand(..));
            let tensors = graph.tensors.into_iter().map(|t| (t.dtype.name(), t.dims, t.strides, in_memory(t.storage)));
            (at, tensors.collect(), graph.operations.iter().map(|o| format!("{o:?}")).collect())
        });
        Some(graphs.collect::<Vec<_>>())
    };
    let all = guarded("making graphs", || with_delegates(program, &sizes, arch, &Delegates::none(), graphs))?;
    Ok(all.into_iter().flatten().collect())
}

/// What cuDNN makes of steps of a program on a device that is described; see the stub file.
#[pyfunction]
#[allow(clippy::too_many_arguments, reason = "what a step is asked with, and where the libraries are")]
pub(super) fn cuda_plans(
    py: Python<'_>,
    program: &Program,
    sizes: Vec<i64>,
    arch: u32,
    steps: Vec<usize>,
    device: &str,
    driver: PathBuf,
    torch: PathBuf,
) -> PyResult<Vec<(usize, Option<usize>, String)>> {
    py.detach(|| {
        guarded("planning on a device that is described", || {
            set_search(Search { driver: Some(driver), ..Search::beside_torch(&torch) });
            let cudnn = Cudnn::for_description(device, None).map_err(Error::invalid)?;
            let delegates = Delegates::described(cudnn);
            with_delegates(program, &sizes, arch, &delegates, |at, delegate, asked| {
                let outcome = steps.contains(&at).then(|| delegate.plan(asked, &delegates, &|_| Vec::new()))?;
                Some(match outcome {
                    Ok(ready) => (at, Some(ready.form), ready.planned.library().to_owned()),
                    Err((reason, _)) => (at, None, reason),
                })
            })
        })
    })
}
