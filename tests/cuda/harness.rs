//! Runs graphs on a CUDA backend, whatever its driver: everything goes through device memory, and results are compared with
//! the interpreter's in f64.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::RefCell;
use std::sync::Arc;

use oxidiff::backend::cuda::Cuda;
use oxidiff::backend::weights::{Identity, Weight};
use oxidiff::backend::{Backend, Block, Tensor};
use oxidiff::ir::testing::random_inputs;
use oxidiff::ir::{DType, Graph, interp};
use oxidiff::passes::{self, PassCtx, Precision};
use oxidiff::plan::{self, MemoryMode, PlanOptions};
use oxidiff::runtime::{Executable, Program};
use oxidiff::trace::Timings;

use crate::support::{self, borrow, epsilon};

/// A graph on a device, with its weights there.
pub struct OnDevice {
    cuda: Cuda,
    pub executable: Executable,
    weights: Vec<Arc<Block>>,
    /// Memory of all runs: each has addresses of its own.
    held: RefCell<Vec<Block>>,
}

fn on_device(cuda: &Cuda, bytes: &[u8], what: &str, stream: usize) -> Block {
    let block = cuda.memory().allocate(bytes.len(), what).unwrap();
    // SAFETY: the block was made with this size.
    unsafe { cuda.device().upload(bytes, block.ptr(), stream).unwrap() };
    block
}

impl OnDevice {
    pub fn new(cuda: &Cuda, graph: &Graph, precision: Precision, weights: &[interp::Tensor]) -> Self {
        let options =
            PlanOptions { memory: MemoryMode::Fast, exact: precision == Precision::Eager, ..PlanOptions::default() };
        Self::with_options(cuda, graph, precision, weights, options)
    }

    pub fn with_options(
        cuda: &Cuda,
        graph: &Graph,
        precision: Precision,
        weights: &[interp::Tensor],
        options: PlanOptions,
    ) -> Self {
        let ctx = PassCtx { precision, rotates_pairs: true, ..PassCtx::default() };
        let optimized = passes::run_pipeline(graph.clone(), &ctx, &mut |_, _, _, _| {}).unwrap();
        let groups = passes::form_groups(&optimized, &ctx).unwrap();
        let plan = Arc::new(plan::build(Arc::new(optimized), groups, &cuda.target(), options).unwrap());
        let loaded = cuda.load(plan.clone()).unwrap_or_else(|e| panic!("{e}\n{plan}"));
        let program = Program::new("test".into(), graph.clone(), Vec::new(), plan, loaded, Timings::default(), 4);
        Self::of(cuda, Arc::new(program), weights)
    }

    /// With weights of its own for a program.
    pub fn of(cuda: &Cuda, program: Arc<Program>, weights: &[interp::Tensor]) -> Self {
        let mut kept = Vec::new();
        let bound = weights.iter().map(|w| {
            let block = on_device(cuda, w.bytes(), "a weight", 0);
            let tensor = Tensor::dense(block.ptr(), w.dtype(), w.shape());
            let block = Arc::new(block);
            kept.push(block.clone());
            Weight { owner: Box::new(block), identity: Identity::Told, tensor }
        });
        let executable = Executable::new(program, bound.collect()).unwrap();
        // Any stream may read them.
        cuda.device().synchronize(0).unwrap();
        Self { cuda: cuda.clone(), executable, weights: kept, held: RefCell::default() }
    }

    pub fn run(&self, bindings: &[i64], inputs: &[interp::Tensor]) -> Vec<interp::Tensor> {
        self.try_run(bindings, inputs).unwrap()
    }

    /// The same, or what the device says.
    pub fn try_run(&self, bindings: &[i64], inputs: &[interp::Tensor]) -> oxidiff::Result<Vec<interp::Tensor>> {
        self.try_run_on(0, bindings, inputs)
    }

    /// The same on a stream, which is the only one that is waited for.
    pub fn try_run_on(
        &self,
        stream: usize,
        bindings: &[i64],
        inputs: &[interp::Tensor],
    ) -> oxidiff::Result<Vec<interp::Tensor>> {
        let call = self.call_on(stream, bindings, inputs);
        self.launch(&call)?;
        let read = self.read(&call);
        self.held.borrow_mut().extend(call.arguments.into_iter().chain(call.results));
        read
    }

    /// Arguments and room for results on the device.
    pub fn call_on(&self, stream: usize, bindings: &[i64], inputs: &[interp::Tensor]) -> Call {
        let types = self.executable.output_types(bindings).unwrap();
        let bytes = |dtype: DType, shape: &[i64]| shape.iter().product::<i64>() as usize * dtype.size_bytes();
        let lies = |bytes: &[u8], what: &str| on_device(&self.cuda, bytes, what, stream);
        // Results begin as garbage, and begin where single elements do: nothing may count on more.
        let results = types.iter().map(|(d, s)| lies(&vec![0xa5; bytes(*d, s)], "a result")).collect();
        let arguments: Vec<Block> = inputs.iter().map(|t| lies(t.bytes(), "an argument")).collect();
        let given = inputs.iter().zip(&arguments).map(|(t, b)| Tensor::dense(b.ptr(), t.dtype(), t.shape())).collect();
        Call { stream, bindings: bindings.to_vec(), types, results, arguments, given }
    }

    /// The memory of the weights: a call needs it until it is done.
    pub fn weights(&self) -> Vec<Arc<Block>> {
        self.weights.clone()
    }

    /// Puts a call on its stream.
    pub fn launch(&self, call: &Call) -> oxidiff::Result<()> {
        let wanted: Vec<Tensor> =
            call.types.iter().zip(&call.results).map(|((d, s), b)| Tensor::dense(b.ptr(), *d, s)).collect();
        // SAFETY: arguments, results and weights live in the call's blocks and in `self`.
        unsafe { self.executable.run_on(call.stream, &call.given, &wanted, &call.bindings, None) }
    }

    /// The results of a call that was launched.
    pub fn read(&self, call: &Call) -> oxidiff::Result<Vec<interp::Tensor>> {
        self.cuda.device().synchronize(call.stream)?;
        let read = |((dtype, shape), block): (&(DType, Vec<i64>), &Block)| {
            let mut bytes = vec![0; block.bytes()];
            // SAFETY: the block has this size.
            unsafe { self.cuda.device().download(block.ptr(), &mut bytes, call.stream)? };
            Ok(interp::Tensor::new(*dtype, shape.clone(), bytes).unwrap())
        };
        call.types.iter().zip(&call.results).map(read).collect()
    }
}

/// A call's memory on the device.
pub struct Call {
    stream: usize,
    bindings: Vec<i64>,
    types: Vec<(DType, Vec<i64>)>,
    results: Vec<Block>,
    arguments: Vec<Block>,
    given: Vec<Tensor>,
}

/// Compares with the exact result: a few roundings of the result's type, and those of a sum of `terms` in f32.
pub fn difference(got: &interp::Tensor, want: &interp::Tensor, terms: usize) -> Result<(), String> {
    let (got_values, want_values) = (got.to_f64(), want.to_f64());
    let scale = want_values.iter().fold(0f64, |m, x| m.max(x.abs()));
    let relative = 8.0 * (epsilon(got.dtype()) + epsilon(DType::F32) * (terms as f64).sqrt());
    let bound = if got.dtype().is_float() { relative * scale } else { 0.0 };
    let wrong = |(g, w): (&f64, &f64)| (g - w).abs() > bound || g.is_nan() || w.is_nan();
    let at = got_values.iter().zip(&want_values).position(wrong);
    at.map_or(Ok(()), |i| Err(format!("element {i}: {} instead of {} (+- {bound:e})", got_values[i], want_values[i])))
}

/// What differs from the interpreter, at every sample size, in every round: the first is launched, later ones are replayed.
pub fn check(
    cuda: &Cuda,
    graph: &Graph,
    precision: Precision,
    terms: usize,
    rounds: &mut dyn FnMut(usize) -> bool,
) -> Result<(), String> {
    let (_, weights) = random_inputs(graph, &graph.sample_bindings()[0], 1).unwrap();
    let ours = OnDevice::new(cuda, graph, precision, &weights);
    for bindings in graph.sample_bindings() {
        let (inputs, _) = random_inputs(graph, &bindings, 2).unwrap();
        let want = interp::run_f64(graph, &bindings, &inputs, &weights).unwrap();
        let mut round = 0;
        while rounds(round) {
            let tell = |e: &dyn std::fmt::Display| {
                format!("at {bindings:?}, round {round}: {e}\n{}", ours.executable.program().plan)
            };
            for (got, want) in ours.try_run(&bindings, &inputs).map_err(|e| tell(&e))?.iter().zip(&want) {
                difference(got, want, terms).map_err(|e| tell(&e))?;
            }
            round += 1;
        }
    }
    Ok(())
}

/// One run on memory of this process.
pub fn run_here(executable: &Executable, bindings: &[i64], inputs: &[interp::Tensor]) -> Vec<interp::Tensor> {
    support::run_here(executable, bindings, &inputs.iter().map(borrow).collect::<Vec<_>>()).unwrap()
}
