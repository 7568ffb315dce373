//! Compiles a graph given as text for a backend, runs it at every sample binding and compares it with the interpreter.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::Arc;

use oxidiff::backend::{self, Tensor, Weight};
use oxidiff::ir::{self, DType, Graph, interp};
use oxidiff::passes::{self, PassCtx, Precision};
use oxidiff::plan::{self, MemoryMode, Plan, PlanOptions};
use oxidiff::runtime::{Executable, Program};
use oxidiff::trace::Timings;

/// A small generator: the same numbers on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mut x = self.0;
        x ^= x >> 33;
        x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^ (x >> 33)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In -1..1.
    pub fn real(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Rounding error of one operation.
pub fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 2f64.powi(-11),
        DType::BF16 => 2f64.powi(-8),
        DType::F32 => 2f64.powi(-24),
        _ => 0.0,
    }
}

pub fn graph_of(text: &str) -> Graph {
    let graph = ir::parse_graph(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    ir::verify_graph(&graph, "test").unwrap();
    graph
}

pub fn plan_of(graph: Graph, precision: Precision, memory: MemoryMode) -> Plan {
    let ctx = PassCtx { precision, ..PassCtx::default() };
    let graph = passes::run_pipeline(graph, &ctx, &mut |_, _, _, _| {}).unwrap();
    let groups = passes::form_groups(&graph, &ctx).unwrap();
    let target = backend::by_name("cpu").unwrap().target();
    let mut plan = plan::build(
        Arc::new(graph),
        groups,
        &target,
        PlanOptions { memory, exact: memory == MemoryMode::Low, ..PlanOptions::default() },
    )
    .unwrap();
    plan.reorder().unwrap();
    plan.share_sizes();
    plan::verify::verify(&plan).unwrap_or_else(|e| panic!("{e}\n{plan}"));
    plan
}

pub fn program_of(graph: Graph, plan: Plan, backend: &str) -> Program {
    let plan = Arc::new(plan);
    let loaded = backend::by_name(backend).unwrap().load(plan.clone()).unwrap();
    Program::new("test".into(), graph, Vec::new(), plan, loaded, Timings::default(), 4)
}

/// Random values of a type; integers are small and not negative, so that they can be indices.
pub fn random(random: &mut Random, dtype: DType, shape: &[i64], largest: i64) -> interp::Tensor {
    let count: i64 = shape.iter().product();
    if dtype.is_float() {
        let values: Vec<f64> = (0..count).map(|_| random.real()).collect();
        interp::Tensor::from_f64(dtype, shape, &values).unwrap()
    } else {
        let values: Vec<i64> = (0..count).map(|_| random.below(largest as usize) as i64).collect();
        interp::Tensor::from_i64(dtype, shape, &values).unwrap()
    }
}

/// One run on memory of this process, into results that hold garbage before.
pub fn run_here(executable: &Executable, bindings: &[i64], inputs: &[Tensor]) -> oxidiff::Result<Vec<interp::Tensor>> {
    let types = executable.output_types(bindings)?;
    let bytes =
        |shape: &[i64], size: usize| vec![0xa5u8; shape.iter().map(|d| d.max(&0)).product::<i64>() as usize * size];
    let mut buffers: Vec<Vec<u8>> = types.iter().map(|(dtype, shape)| bytes(shape, dtype.size_bytes())).collect();
    let places = types.iter().zip(&mut buffers);
    let outputs: Vec<Tensor> =
        places.map(|((dtype, shape), bytes)| Tensor::dense(bytes.as_mut_ptr(), *dtype, shape)).collect();
    // SAFETY: inputs and weights are borrowed from live tensors, outputs from the buffers above.
    unsafe { executable.run(inputs, &outputs, bindings, None)? };
    let results = types.into_iter().zip(buffers);
    results.map(|((dtype, shape), bytes)| interp::Tensor::new(dtype, shape, bytes)).collect()
}

/// The tensor's own memory; valid while it lives.
pub fn borrow(tensor: &interp::Tensor) -> Tensor {
    Tensor::dense(tensor.bytes().as_ptr().cast_mut(), tensor.dtype(), tensor.shape())
}

pub struct Case {
    pub executable: Executable,
    pub graph: Graph,
    pub weights: Vec<interp::Tensor>,
    pub random: Random,
    /// Exclusive bound of integer inputs.
    pub largest: i64,
}

impl Case {
    pub fn new(text: &str, precision: Precision, memory: MemoryMode) -> Self {
        let graph = graph_of(text);
        let plan = plan_of(graph.clone(), precision, memory);
        Self::with_plan(graph, plan)
    }

    pub fn with_plan(graph: Graph, plan: Plan) -> Self {
        let mut r = Random(7);
        let parameters = graph.parameters.iter();
        let weights = parameters.map(|p| random(&mut r, p.ty.dtype, &p.ty.concrete(&[]).unwrap(), 2)).collect();
        Self::with_weights(graph, plan, weights)
    }

    pub fn with_weights(graph: Graph, plan: Plan, weights: Vec<interp::Tensor>) -> Self {
        let r = Random(11);
        let program = Arc::new(program_of(graph.clone(), plan, "cpu"));
        let tensors = weights.iter().map(|w| Weight::borrowed(borrow(w))).collect();
        let executable = Executable::new(program, tensors).unwrap();
        Self { executable, graph, weights, random: r, largest: 4 }
    }

    pub fn inputs(&mut self, bindings: &[i64]) -> Vec<interp::Tensor> {
        let types: Vec<_> = self.graph.inputs.iter().map(|i| i.ty.clone()).collect();
        let largest = self.largest;
        types.iter().map(|ty| random(&mut self.random, ty.dtype, &ty.concrete(bindings).unwrap(), largest)).collect()
    }

    pub fn run(&self, inputs: &[Tensor], bindings: &[i64]) -> oxidiff::Result<Vec<interp::Tensor>> {
        run_here(&self.executable, bindings, inputs)
    }

    pub fn check_at(&mut self, bindings: &[i64], terms: usize) {
        let inputs = self.inputs(bindings);
        let borrowed: Vec<Tensor> = inputs.iter().map(borrow).collect();
        let got = self.run(&borrowed, bindings).unwrap_or_else(|e| panic!("{e}\n{}", self.executable.program().plan));
        let again = self.run(&borrowed, bindings).unwrap();
        let want = interp::run_f64(&self.graph, bindings, &inputs, &self.weights).unwrap();
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got.shape(), want.shape());
            compare(at, got, want, terms, || self.executable.program().plan.to_string());
        }
        assert_eq!(got, again, "two runs on the same input differ");
    }

    pub fn check(&mut self, terms: usize) {
        for bindings in self.graph.sample_bindings() {
            self.check_at(&bindings, terms);
        }
    }
}

/// Largest difference over the largest value, against the rounding error of `terms` random roundings and a few more.
pub fn compare(at: usize, got: &interp::Tensor, want: &interp::Tensor, terms: usize, context: impl Fn() -> String) {
    let (got_values, want_values) = (got.to_f64(), want.to_f64());
    let scale = want_values.iter().fold(0f64, |m, x| m.max(x.abs())).max(1e-30);
    let worst =
        got_values.iter().zip(&want_values).fold(0f64, |m, (a, b)| if (a - b).abs() <= m { m } else { (a - b).abs() });
    let bound = epsilon(got.dtype()) * 8.0 + epsilon(DType::F32) * 8.0 * (terms as f64).sqrt();
    let bound = if got.dtype().is_float() { bound } else { 0.0 };
    assert!(
        worst <= bound * scale,
        "output {at}: error {:e} of {scale}, allowed {:e}\n{}",
        worst / scale,
        bound,
        context()
    );
}

/// Compiles and checks in every mode.
pub fn check(text: &str, terms: usize) {
    for precision in [Precision::Eager, Precision::Fast] {
        for memory in [MemoryMode::Fast, MemoryMode::Low] {
            Case::new(text, precision, memory).check(terms);
        }
    }
}

/// Weights like a trained network's: they keep the size of what passes through a layer, and norms are near 1.
pub fn weights_of(graph: &Graph) -> Vec<interp::Tensor> {
    let mut random = Random(3);
    let one = |slot: &oxidiff::ir::Parameter| {
        let shape = slot.ty.concrete(&[]).unwrap();
        let terms = shape.iter().skip(1).product::<i64>().max(1) as f64;
        let numel = shape.iter().product::<i64>();
        let is_factor = shape.len() == 1 && slot.name.contains("norm") && slot.name.ends_with("weight");
        let values = (0..numel).map(|_| match (shape.len(), is_factor) {
            (1, true) => 1.0 + 0.1 * random.real(),
            (1, false) => 0.1 * random.real(),
            _ => 1.7 * random.real() / terms.sqrt(),
        });
        interp::Tensor::from_f64(slot.ty.dtype, &shape, &values.collect::<Vec<_>>()).unwrap()
    };
    graph.parameters.iter().map(one).collect()
}

/// Largest difference over the largest value.
pub fn relative(got: &interp::Tensor, want: &interp::Tensor) -> f64 {
    let (got, want) = (got.to_f64(), want.to_f64());
    let scale = want.iter().fold(0f64, |m, x| m.max(x.abs()));
    got.iter().zip(&want).fold(0f64, |m, (a, b)| if (a - b).abs() <= m { m } else { (a - b).abs() }) / scale
}
