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
    /// Memory of all runs: each has addresses of its own.
    held: RefCell<Vec<Block>>,
}

fn on_device(cuda: &Cuda, bytes: &[u8], what: &str) -> Block {
    let block = cuda.memory().allocate(bytes.len(), what).unwrap();
    // SAFETY: the block was made with this size.
    unsafe { cuda.device().upload(bytes, block.ptr()).unwrap() };
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
        let ctx = PassCtx { precision };
        let optimized = passes::run_pipeline(graph.clone(), &ctx, &mut |_, _, _, _| {}).unwrap();
        let groups = passes::form_groups(&optimized, &ctx).unwrap();
        let plan = Arc::new(plan::build(Arc::new(optimized), groups, &cuda.target(), options).unwrap());
        let loaded = cuda.load(plan.clone()).unwrap_or_else(|e| panic!("{e}\n{plan}"));
        let program = Program::new("test".into(), graph.clone(), Vec::new(), plan, loaded, Timings::default(), 4);
        let bound = weights.iter().map(|w| {
            let block = on_device(cuda, w.bytes(), "a weight");
            let tensor = Tensor::dense(block.ptr(), w.dtype(), w.shape());
            Weight { owner: Box::new(block), identity: Identity::Told, tensor }
        });
        let executable = Executable::new(Arc::new(program), bound.collect()).unwrap();
        Self { cuda: cuda.clone(), executable, held: RefCell::default() }
    }

    pub fn run(&self, bindings: &[i64], inputs: &[interp::Tensor]) -> Vec<interp::Tensor> {
        self.try_run(bindings, inputs).unwrap()
    }

    /// The same, or what the device says.
    pub fn try_run(&self, bindings: &[i64], inputs: &[interp::Tensor]) -> oxidiff::Result<Vec<interp::Tensor>> {
        let types = self.executable.output_types(bindings).unwrap();
        let bytes = |dtype: DType, shape: &[i64]| shape.iter().product::<i64>() as usize * dtype.size_bytes();
        // Results begin as garbage, and begin where single elements do: nothing may count on more.
        let results: Vec<Block> =
            types.iter().map(|(d, s)| on_device(&self.cuda, &vec![0xa5; bytes(*d, s)], "a result")).collect();
        let arguments: Vec<Block> = inputs.iter().map(|t| on_device(&self.cuda, t.bytes(), "an argument")).collect();
        let given: Vec<Tensor> =
            inputs.iter().zip(&arguments).map(|(t, b)| Tensor::dense(b.ptr(), t.dtype(), t.shape())).collect();
        let wanted: Vec<Tensor> = types.iter().zip(&results).map(|((d, s), b)| Tensor::dense(b.ptr(), *d, s)).collect();
        // SAFETY: arguments, results and weights live in the blocks above and in `self`.
        unsafe { self.executable.run(&given, &wanted, bindings, None)? };
        self.cuda.device().synchronize(0)?;
        let read = |((dtype, shape), block): ((DType, Vec<i64>), &Block)| {
            let mut bytes = vec![0; block.bytes()];
            // SAFETY: the block has this size.
            unsafe { self.cuda.device().download(block.ptr(), &mut bytes).unwrap() };
            interp::Tensor::new(dtype, shape, bytes).unwrap()
        };
        let read = types.into_iter().zip(&results).map(read).collect();
        self.held.borrow_mut().extend(results.into_iter().chain(arguments));
        Ok(read)
    }
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
