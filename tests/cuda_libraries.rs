//! Steps that libraries compute, without a GPU: `tests/cuda/fake_cublaslt.cpp` and `fake_cudnn.cpp` stand in for the libraries
//! with the real ones' functions, compute what descriptors and pointers say, and refuse what does not fit. Results are
//! compared with the interpreter's in f64, launched and replayed. Generated kernels run as in `cuda_emulated.rs`.

#[path = "backends/cases.rs"]
mod cases;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/harness.rs"]
mod harness;
mod support;

use std::sync::Arc;

use cases::CASES;
use emulator::{Count, FakeLibrary, alone, backend, fake_driver};
use oxidiff::backend::cuda::Cuda;
use oxidiff::backend::cuda::delegate::Delegates;
use oxidiff::backend::weights::{Identity, Weight};
use oxidiff::backend::{StepChoice, Tensor};
use oxidiff::ir::{DType, Graph, interp, parse_graph};
use oxidiff::passes::Precision;
use oxidiff::plan::{MemoryMode, Numerics, PlanOptions};
use oxidiff::runtime::Executable;

/// A backend with stand-ins for its libraries, and the one for cuBLASLt.
fn with_libraries() -> Option<(Cuda, &'static FakeLibrary)> {
    let (library, _) = (FakeLibrary::cublaslt()?, FakeLibrary::cudnn()?);
    Some((backend(|text| text)?.with_delegates(Delegates::new("a stand-in".to_owned(), None)), library))
}

/// A stream beside the default one, which cannot be captured.
const SIDE: usize = 0x50;

/// What `fake_cublaslt.cpp` counts calls with.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "plans make the left operand's terms neighbours")]
enum With {
    Anything,
    Bias,
    Gelu,
    Addend,
    Batch,
    TurnedWeight,
    TurnedInput,
    Tf32,
    Workspace,
    SecondAlgorithm,
    RoundedParts,
}

/// What it can be made to misread.
#[derive(Clone, Copy, Debug)]
enum Misread {
    Nothing,
    Stride,
    Turned,
    Addend,
    BiasAddress,
    Batch,
    Workspace,
    Epilogue,
    LeftRight,
    Failure,
    SecondAlgorithm,
    NoEpilogue,
    FailureOf40,
    FailureInACapture,
}

/// What `fake_cudnn.cpp` counts runs with.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "numbers of the source")]
enum RunWith {
    Anything,
    Convolution,
    Attention,
    Addend,
    Activation,
    Gaps,
    Groups,
    Attempts,
    TensorCoresOnF32,
}

/// What it can be made to misread.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "numbers of the source")]
enum MisreadGraph {
    Nothing,
    Padding,
    Stride,
    AddendAddress,
    OutStrides,
    Taps,
    Workspace,
    Activation,
    SwappedImage,
    Scale,
    Mask,
    UnevenPadding,
}

fn check(cuda: &Cuda, graph: &Graph, precision: Precision, terms: usize) -> Result<(), String> {
    harness::check(cuda, graph, precision, terms, &mut |round| round < 2)
}

fn choices(cuda: &Cuda, graph: &Graph, bindings: &[i64]) -> Vec<StepChoice> {
    let (_, weights) = oxidiff::ir::testing::random_inputs(graph, bindings, 1).unwrap();
    let ours = harness::OnDevice::new(cuda, graph, Precision::Fast, &weights);
    ours.executable.program().peek(bindings).unwrap().delegations()
}

/// Products in the forms that models have, of more rows than the generated kernel for few rows takes.
const PRODUCTS: &[(&str, &str, &[With])] = &[
    (
        "bias",
        "x: T[s0,24,40]; w @ T[48,40]; b @ T[48]; y = T[s0,24,48] linear(x, w, b)",
        &[With::Bias, With::TurnedWeight],
    ),
    ("plain", "x: T[s0,24,40]; w @ T[48,40]; y = T[s0,24,48] linear(x, w)", &[With::TurnedWeight]),
    (
        "bias and residual",
        "x: T[s0,24,40]; r: T[s0,24,48]; w @ T[48,40]; b @ T[48]; l = T[s0,24,48] linear(x, w, b); y = T[s0,24,48] add(l, r)",
        &[With::Bias, With::Addend],
    ),
    (
        "tanh GELU",
        "x: T[s0,24,40]; w @ T[48,40]; b @ T[48]; l = T[s0,24,48] linear(x, w, b); y = T[s0,24,48] gelu_tanh(l)",
        &[With::Bias, With::Gelu],
    ),
    (
        "erf GELU, by a kernel in place",
        "x: T[s0,24,40]; w @ T[48,40]; b @ T[48]; l = T[s0,24,48] linear(x, w, b); y = T[s0,24,48] gelu(l)",
        &[],
    ),
    (
        "a gate after the product",
        "x: T[s0,24,40]; g: T[s0,1,48]; r: T[s0,24,48]; w @ T[48,40]; l = T[s0,24,48] linear(x, w); \
         m = T[s0,24,48] mul(l, g); y = T[s0,24,48] add(m, r)",
        &[],
    ),
    ("batched", "a: T[s0,3,24,16]; b: T[s0,3,16,40]; y = T[s0,3,24,40] matmul(a, b)", &[With::Batch]),
    (
        "scores: a turned right operand",
        "a: T[s0,3,24,16]; b: T[s0,3,40,16]; t = T[s0,3,16,40] permute(b) {dims=[0, 1, 3, 2]}; y = T[s0,3,24,40] matmul(a, t)",
        &[With::Batch, With::TurnedWeight],
    ),
    (
        "heads inside rows: no one stride over batch and heads",
        "a: T[s0,24,3,16]; b: T[s0,40,3,16]; p = T[s0,3,24,16] permute(a) {dims=[0, 2, 1, 3]}; \
         t = T[s0,3,16,40] permute(b) {dims=[0, 2, 3, 1]}; y = T[s0,3,24,40] matmul(p, t)",
        &[With::Batch, With::TurnedWeight],
    ),
    (
        "a slice of columns",
        "x: T[s0,24,80]; w @ T[48,40]; s = T[s0,24,40] slice(x) {dim=2, start=40, step=1}; y = T[s0,24,48] linear(s, w)",
        &[With::TurnedWeight],
    ),
    ("a matrix for every batch", "a: T[s0,24,16]; w @ T[16,40]; y = T[s0,24,40] matmul(a, w)", &[]),
];

/// The graph of a case as the rows of `backends/cases.rs` write it.
fn graph_of(lines: &'static str, dtype: &str) -> Graph {
    let lines: Vec<&str> = lines.split("; ").map(str::trim).collect();
    let case = cases::Case { name: "", terms: 0, lines: lines.leak() };
    let at = ["f32", "f16", "bf16"].iter().position(|d| *d == dtype).unwrap();
    parse_graph(&case.texts()[at]).unwrap()
}

/// What calls must be counted with, and what they must not be.
struct Counted<'a, W> {
    count: &'a dyn Fn(W) -> i64,
    always: &'a [W],
    never: &'a [W],
}

/// Runs a list of graphs in several types: each is right, and the library took it with what its row names.
fn are_handed_over<W: Copy + std::fmt::Debug>(
    cuda: &Cuda,
    list: &[(&str, &'static str, &[W])],
    types: &[&str],
    terms: usize,
    Counted { count, always, never }: &Counted<'_, W>,
) {
    for (name, lines, with) in list {
        for dtype in types {
            let graph = graph_of(lines, dtype);
            let counts = |which: &[W]| which.iter().map(|w| count(*w)).collect::<Vec<i64>>();
            let wanted = [*with, *always].concat();
            let (before, unwanted) = (counts(&wanted), counts(never));
            check(cuda, &graph, Precision::Fast, terms).unwrap_or_else(|e| panic!("{name}, {dtype}: {e}"));
            for (w, before) in wanted.iter().zip(before) {
                let told = || choices(cuda, &graph, &[2, 4]);
                assert!(count(*w) > before, "{name}, {dtype}: no call with {w:?}: {:?}", told());
            }
            assert_eq!(counts(never), unwanted, "{name}, {dtype}: {never:?}");
        }
    }
}

#[test]
fn products_are_handed_over_as_they_are_meant() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let (always, never) = (&[With::Anything, With::Workspace], &[With::Tf32, With::RoundedParts]);
    let counted = Counted { count: &|w: With| library.count(w as i32), always, never };
    are_handed_over(&cuda, PRODUCTS, &["f32", "f16", "bf16"], 40, &counted);
}

#[test]
fn what_is_misread_shows() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let shows = |what: Misread, name: &str| {
        let (_, lines, _) = PRODUCTS.iter().find(|(n, ..)| *n == name).unwrap();
        let graph = graph_of(lines, "f32");
        library.misread(what as i32);
        let outcome =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| check(&cuda, &graph, Precision::Fast, 40)));
        library.misread(Misread::Nothing as i32);
        assert!(!matches!(outcome, Ok(Ok(()))), "{what:?} in `{name}` went unnoticed");
    };
    shows(Misread::Stride, "plain");
    shows(Misread::Addend, "bias and residual");
    shows(Misread::BiasAddress, "bias");
    shows(Misread::Batch, "batched");
    shows(Misread::Workspace, "plain");
    shows(Misread::Epilogue, "tanh GELU");
    shows(Misread::LeftRight, "plain");
    let square = graph_of("x: T[s0,24,40]; w @ T[40,40]; y = T[s0,24,40] linear(x, w)", "f32");
    check(&cuda, &square, Precision::Fast, 40).unwrap();
    library.misread(Misread::Turned as i32);
    let turned = check(&cuda, &square, Precision::Fast, 40);
    library.misread(Misread::Nothing as i32);
    assert!(turned.is_err(), "a turned weight went unnoticed");
}

/// What is allowed for products does not hold for convolutions, nor the other way round.
#[test]
fn tf32_is_for_those_who_ask() {
    let _alone = alone();
    let Some((cuda, cublaslt)) = with_libraries() else { return };
    let cudnn = FakeLibrary::cudnn().unwrap();
    let rounded = || (cublaslt.count(With::Tf32 as i32), cudnn.count(RunWith::TensorCoresOnF32 as i32));
    for (tf32_products, tf32_convolutions) in [(true, false), (false, true)] {
        let numerics = Numerics { tf32_products, tf32_convolutions };
        let options = PlanOptions { memory: MemoryMode::Fast, numerics, ..PlanOptions::default() };
        for (lines, bindings) in [(PRODUCTS[1].1, [2, 4]), (CONVOLUTIONS[2].1, [2, 4])] {
            let graph = graph_of(lines, "f32");
            let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 1).unwrap();
            let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, options);
            let before = rounded();
            let got = ours.run(&bindings, &inputs);
            let (is_product, after) = (lines.contains("linear"), rounded());
            assert_eq!(after.0 > before.0, is_product && tf32_products, "{lines}");
            assert_eq!(after.1 > before.1, !is_product && tf32_convolutions, "{lines}");
            let want = interp::run_f64(&graph, &bindings, &inputs, &weights).unwrap();
            // Operands of ten bits.
            assert!(support::relative(&got[0], &want[0]) < 4e-3);
        }
    }
}

/// What the library refuses, and what is too small for it, runs on generated kernels, and it is said why.
#[test]
fn refusals_fall_back_and_are_told() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let refused = graph_of("x: T[s0,24,40]; w @ T[13,40]; y = T[s0,24,13] linear(x, w)", "f16");
    let calls = library.count(With::Anything as i32);
    check(&cuda, &refused, Precision::Fast, 40).unwrap();
    assert_eq!(library.count(With::Anything as i32), calls);
    let told = choices(&cuda, &refused, &[2, 4]);
    assert_eq!((told.len(), told[0].by), (1, "kernel"));
    assert!(told[0].reason.contains("NOT_SUPPORTED"), "{told:?}");
    let few = graph_of("x: T[s0,40]; w @ T[48,40]; y = T[s0,48] linear(x, w)", "f16");
    assert_eq!(choices(&cuda, &few, &[2, 4])[0].reason, "it has few rows");
    let taken = choices(&cuda, &few, &[64, 4]);
    assert_eq!((taken[0].by, taken[0].reason.as_str()), ("cuBLASLt", ""));
}

/// Where the library has no algorithm with what follows a product, it does the product, and a kernel does the rest.
#[test]
fn a_product_without_its_epilogue_is_handed_over() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let count = |with: With| library.count(with as i32);
    for (name, lines, with) in PRODUCTS.iter().filter(|(_, _, with)| with.iter().any(|w| matches!(w, With::Bias))) {
        let graph = graph_of(lines, "f16");
        let before = [With::Anything, With::Bias, With::Gelu].map(count);
        library.misread(Misread::NoEpilogue as i32);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            check(&cuda, &graph, Precision::Fast, 40).map(|()| choices(&cuda, &graph, &[2, 4]))
        }));
        library.misread(Misread::Nothing as i32);
        let told = outcome.unwrap().unwrap_or_else(|e| panic!("{name}, {with:?}: {e}"));
        assert_eq!((told[0].by, told[0].reason.as_str()), ("cuBLASLt", ""), "{name}");
        let after = [With::Anything, With::Bias, With::Gelu].map(count);
        assert!(after[0] > before[0] && after[1..] == before[1..], "{name}: {before:?} {after:?}");
    }
}

/// A library that fails when it is run is told apart, and the run succeeds without it: launched and as a graph.
#[test]
fn failures_fall_back_and_are_told() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let graph = graph_of(PRODUCTS[2].1, "f32");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    for runs_before in [0, 1, 2] {
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        (0..runs_before).for_each(|_| drop(ours.run(&[2, 4], &inputs)));
        let by = || ours.executable.program().peek(&[2, 4]).unwrap().delegations()[0].by;
        assert_eq!(by(), "cuBLASLt");
        library.misread(Misread::Failure as i32);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            (0..3).for_each(|_| {
                let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
                harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 40).unwrap();
            });
        }));
        library.misread(Misread::Nothing as i32);
        outcome.unwrap();
        let told = ours.executable.program().peek(&[2, 4]).unwrap().delegations();
        assert_eq!(told[0].by, "kernel");
        assert!(told[0].reason.contains("EXECUTION_FAILED"), "{told:?}");
    }
}

/// Products of 48, 40, 40, 32, 24 and 16 columns, the second and third of one shape, and a convolution.
const SEVERAL: &str = "x: T[s0,24,40]; z: T[s0,6,6,40]; w @ T[48,40]; v @ T[40,48]; u @ T[40,48]; p @ T[32,40]; o @ T[24,32]; \
     n @ T[16,24]; k @ T[16,40,1,1]; l = T[s0,24,48] linear(x, w); i = T[s0,24,40] linear(l, v); j = T[s0,24,40] linear(l, u); \
     m = T[s0,24,40] mul(i, j); h = T[s0,24,32] linear(m, p); g = T[s0,24,24] linear(h, o); y = T[s0,24,16] linear(g, n); \
     c = T[s0,6,6,16] convolution(z, k) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=true}; \
     a = T[s0,384] reshape(y); b = T[s0,576] reshape(c); q = T[s0,960] cat(a, b) {dim=1}";

/// What fails is taken off the steps that run the same; a library that fails in three ways, off all its steps; no other library's.
#[test]
fn a_library_that_fails_is_taken_off_as_far_as_it_fails() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let graph = graph_of(SEVERAL, "f32");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
    let told_after = |what: Misread| {
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        library.misread(what as i32);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| ours.run(&[2, 4], &inputs)));
        library.misread(Misread::Nothing as i32);
        harness::difference(&outcome.unwrap()[0], &want[0], 200).unwrap();
        // And from then on, launched and replayed.
        (0..3).for_each(|_| harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 200).unwrap());
        ours.executable.program().peek(&[2, 4]).unwrap().delegations()
    };
    let count = |told: &[StepChoice], by: &str, reason: &str| {
        told.iter().filter(|c| c.by == by && c.reason.contains(reason)).count()
    };
    let told = told_after(Misread::FailureOf40);
    let of = [
        ("cuBLASLt", ""),
        ("cuDNN", ""),
        ("kernel", "EXECUTION_FAILED"),
        ("kernel", "the same failed in another step"),
    ];
    assert_eq!(of.map(|(by, reason)| count(&told, by, reason)), [4, 1, 1, 1], "{told:?}");
    let told = told_after(Misread::Failure);
    let of = [
        ("cuBLASLt", ""),
        ("cuDNN", ""),
        ("kernel", "EXECUTION_FAILED"),
        ("kernel", "cuBLASLt failed in 3 other steps"),
    ];
    assert_eq!(of.map(|(by, reason)| count(&told, by, reason)), [0, 1, 3, 2], "{told:?}");
}

/// Where no graph can be made or launched, a size runs launch by launch from then on, on its libraries, and says why; others are
/// replayed.
#[test]
fn a_size_without_a_graph_is_launched() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let graph = graph_of(SEVERAL, "f32");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let examples = [[2, 4], [3, 4]].map(|bindings| {
        let (inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 2).unwrap();
        let want = interp::run_f64(&graph, &bindings, &inputs, &weights).unwrap();
        (bindings, inputs, want)
    });
    // Which step to a graph fails, or a library that cannot be captured.
    for refused in 1..=6 {
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        let run = |(bindings, inputs, want): &([i64; 2], Vec<interp::Tensor>, Vec<interp::Tensor>)| {
            harness::difference(&ours.run(bindings, inputs)[0], &want[0], 200).unwrap();
        };
        let refuse = |is_on: bool| match refused {
            6 => library.misread(if is_on { Misread::FailureInACapture } else { Misread::Nothing } as i32),
            step => drop(driver.call("fake_refuse", [if is_on { step } else { 0 }])),
        };
        refuse(true);
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (0..3).for_each(|_| run(&examples[0]))));
        refuse(false);
        outcome.unwrap_or_else(|_| panic!("step {refused}"));
        let rows = || ours.executable.program().sizes();
        assert!(rows()[0].no_graphs.is_some() && rows()[0].graph_bytes == 0, "step {refused}: {:?}", rows()[0]);
        assert!(rows()[0].delegations.iter().all(|c| c.by != "kernel"), "step {refused}: {:?}", rows()[0]);
        let replayed = driver.count(Count::GraphLaunches);
        run(&examples[0]);
        assert_eq!(driver.count(Count::GraphLaunches), replayed, "step {refused}: it is not tried again");
        (0..3).for_each(|_| run(&examples[1]));
        assert_eq!(driver.count(Count::GraphLaunches), replayed + 2, "step {refused}: another size");
        assert_eq!(rows().iter().filter(|row| row.no_graphs.is_some()).count(), 1);
    }
}

/// Kernels of libraries are nodes of a graph like others, launched as the library asked for; whatever else libraries leave in a
/// capture is a graph in the graph. New addresses reach either.
#[test]
fn a_library_s_kernels_are_nodes_of_the_graph() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let graph = graph_of(SEVERAL, "f32");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let (others, _) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 2).unwrap();
    let examples = [inputs, others].map(|inputs| {
        let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
        (inputs, want)
    });
    let children = || driver.call("fake_children", []);
    let shapes = [
        ("a kernel", false),
        ("no kernel", true),
        ("a kernel that cannot be copied", true),
        ("two kernels", false),
        ("a kernel that begins early", true),
        ("kernels beside each other", true),
    ];
    for (at, (shape, are_children)) in shapes.into_iter().enumerate() {
        driver.call("fake_library_shape", [at]);
        let (before, faults) = (children(), driver.faults());
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        for i in 0..6 {
            let (inputs, want) = &examples[i % 2];
            harness::difference(&ours.run(&[2, 4], inputs)[0], &want[0], 200).unwrap();
        }
        let rows = ours.executable.program().sizes();
        driver.call("fake_library_shape", [0]);
        assert!(rows[0].no_graphs.is_none(), "{shape}: {rows:?}");
        assert_eq!(driver.faults(), faults, "{shape}");
        assert_eq!(children() > before, are_children, "{shape}");
    }
}

/// A run that fails launch by launch too has not failed for its graph.
#[test]
fn a_failure_is_not_the_graph_s_if_launches_fail_too() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let graph = graph_of(PRODUCTS[2].1, "f32");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    ours.run(&[2, 4], &inputs);
    library.misread(Misread::Failure as i32);
    let outcome = ours.try_run(&[2, 4], &inputs);
    library.misread(Misread::Nothing as i32);
    outcome.unwrap();
    let replayed = fake_driver().unwrap().count(Count::GraphLaunches);
    ours.run(&[2, 4], &inputs);
    assert!(fake_driver().unwrap().count(Count::GraphLaunches) > replayed);
    assert_eq!(ours.executable.program().sizes()[0].no_graphs, None);
}

/// The ways to compute the only kind of step of a graph: seconds of each, none for those that do not work.
fn seconds_of_ways(ours: &harness::OnDevice, cuda: &Cuda, bindings: &[i64]) -> Vec<Option<f64>> {
    let sites = ours.executable.program().specialize(bindings).unwrap().sites();
    assert_eq!(sites.len(), 1, "{sites:?}");
    seconds_of_ways_at(ours, cuda, bindings, 0)
}

/// The same of one site of several.
fn seconds_of_ways_at(ours: &harness::OnDevice, cuda: &Cuda, bindings: &[i64], site: usize) -> Vec<Option<f64>> {
    let specialized = ours.executable.program().specialize(bindings).unwrap();
    let measure = |way| {
        let bytes = specialized.trial_bytes(site, way);
        let memory = cuda.memory().allocate(bytes, "a trial").unwrap();
        // SAFETY: the block has these bytes, and is this test's own.
        unsafe { specialized.measure(site, way, (memory.ptr(), bytes), 0).unwrap() }
    };
    (0..specialized.sites()[site].ways.len()).map(measure).collect()
}

/// Every way is timed by the device's clock, which is made up here, and what is chosen runs from the next specialization on.
#[test]
fn the_fastest_way_that_is_right_can_be_chosen() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let graph = graph_of(PRODUCTS[2].1, "f16");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
    driver.kernel_cost(2.0);
    let close = |seconds: &[Option<f64>], want: &[Option<f64>]| {
        let is_close = |(a, b): (&Option<f64>, &Option<f64>)| match (a, b) {
            (Some(a), Some(b)) => (a - b).abs() < 1e-6,
            (a, b) => a == b,
        };
        assert!(seconds.len() == want.len() && seconds.iter().zip(want).all(is_close), "{seconds:?}");
    };
    close(&seconds_of_ways(&ours, &cuda, &[2, 4]), &[Some(3e-3), Some(1e-3), Some(2e-3)]);
    let second = || library.count(With::SecondAlgorithm as i32);
    let program = ours.executable.program();
    for (choice, is_second, by) in [("library 1", true, "cuBLASLt"), ("kernel", false, "kernel")] {
        assert!(program.specialize(&[2, 4]).unwrap().choose(0, choice));
        program.forget_sizes();
        let before = second();
        (0..3).for_each(|_| harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 40).unwrap());
        assert_eq!(second() > before, is_second, "{choice}");
        let specialized = program.specialize(&[2, 4]).unwrap();
        assert_eq!((specialized.delegations()[0].by, specialized.sites()[0].installed.as_deref()), (by, Some(choice)));
    }
    assert!(!program.specialize(&[2, 4]).unwrap().choose(0, "nothing of the kind"));
    // One that is fast and wrong is no way.
    let Some((cuda, library)) = with_libraries() else { return };
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    library.misread(Misread::SecondAlgorithm as i32);
    let seconds = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| seconds_of_ways(&ours, &cuda, &[2, 4])));
    library.misread(Misread::Nothing as i32);
    close(&seconds.unwrap(), &[Some(3e-3), None, Some(2e-3)]);
}

/// The generated kernel for attention uses tensor cores, so it is tried whatever the size, and what cuDNN refuses stays with
/// it; in f32 it does not.
#[test]
fn attention_on_tensor_cores_is_a_way() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let graph = graph_of(
        "q: T[s0,2,70,40]; k: T[s0,2,66,40]; y = T[s0,2,70,40] scaled_dot_product_attention(q, k, k) {is_causal=false, scale=0.2}",
        "f16",
    );
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    let program = ours.executable.program();
    let row = program.specialize(&[2, 4]).unwrap().sites().remove(0);
    assert!(row.on_tensor_cores && row.chosen + 1 < row.ways.len(), "{row:?}");
    assert!(seconds_of_ways(&ours, &cuda, &[2, 4]).last().unwrap().is_some(), "its results are those of cuDNN");
    assert!(program.specialize(&[2, 4]).unwrap().choose(0, "kernel"));
    program.forget_sizes();
    harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 66).unwrap();
    assert_eq!(program.specialize(&[2, 4]).unwrap().delegations()[0].by, "kernel");

    let (product, lines) = (
        graph_of(PRODUCTS[2].1, "f16"),
        "q: T[s0,2,2,70,8]; \
        y = T[s0,2,2,70,8] scaled_dot_product_attention(q, q, q) {is_causal=false, scale=0.3}",
    );
    let (_, weights) = oxidiff::ir::testing::random_inputs(&product, &[2, 4], 1).unwrap();
    let other = harness::OnDevice::new(&cuda, &product, Precision::Fast, &weights);
    assert!(!other.executable.program().specialize(&[2, 4]).unwrap().sites()[0].on_tensor_cores);
    for (dtype, by) in [("f16", "kernel"), ("f32", "cuBLASLt")] {
        let told = choices(&cuda, &graph_of(lines, dtype), &[2, 4]);
        assert_eq!(told[0].by, by, "{told:?}");
    }
}

/// Engines of cuDNN by their number: the stand-in's first does not work, two do, and there are no more. The first way is the
/// first that works.
#[test]
fn engines_can_be_chosen() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let graph = graph_of(CONVOLUTIONS[0].1, "f16");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    fake_driver().unwrap().kernel_cost(2.0);
    let seconds = seconds_of_ways(&ours, &cuda, &[2, 4]);
    let works: Vec<bool> = seconds.iter().map(Option::is_some).collect();
    assert_eq!(works, [true, true, true, false, false, false, true], "{seconds:?}");
    assert!(seconds[2] < seconds[6] && seconds[6] < seconds[0] && seconds[0] == seconds[1], "{seconds:?}");
    let program = ours.executable.program();
    assert!(program.specialize(&[2, 4]).unwrap().choose(0, "library 2"));
    program.forget_sizes();
    let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
    harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 72).unwrap();
    // What is chosen for one size holds for no other, and an engine that is not there any more is none.
    assert_eq!(program.specialize(&[2, 6]).unwrap().sites()[0].installed, None);
    assert!(program.specialize(&[2, 4]).unwrap().choose(0, "library 5"));
    program.forget_sizes();
    harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 72).unwrap();
}

/// The ways that a trial may be made of are built before it, as far as there is time, and none that is there twice.
#[test]
fn ways_are_made_ready_in_time() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let graph = graph_of(CONVOLUTIONS[0].1, "f16");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    let specialized = ours.executable.program().specialize(&[2, 4]).unwrap();
    let row = specialized.sites().remove(0);
    assert_eq!((row.ways.len(), row.chosen, cuda.plans_built()), (7, 0, 1));
    let ready = |seconds| specialized.ready(0, std::time::Duration::from_secs(seconds)).unwrap();
    // The way that runs and generated kernels.
    assert_eq!((ready(0), cuda.plans_built()), ((vec![0, 6], false), 1));
    assert_eq!((ready(60), cuda.plans_built()), ((vec![0, 2, 6], true), 2));
    assert_eq!((ready(0), cuda.plans_built()), ((vec![0, 2, 6], true), 2), "nothing is left to build");
}

/// Plans are built once, by all processes that have one folder: what cannot be read back is built anew.
#[test]
fn plans_are_kept() {
    let _alone = alone();
    let (Some(_), Some(_)) = (FakeLibrary::cublaslt(), FakeLibrary::cudnn()) else { return };
    let folder = std::env::temp_dir().join(format!("oxidiff-plans-{}", std::process::id()));
    let graph = graph_of(CONVOLUTIONS[0].1, "f16");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
    // A backend as another process would have it; gives how many plans it had to build.
    let built = |device: &str| {
        let delegates = Delegates::new(device.to_owned(), Some(folder.clone()));
        let cuda = backend(|text| text)?.with_delegates(delegates);
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 72).unwrap();
        Some(cuda.plans_built())
    };
    let Some(first) = built("a") else { return };
    assert_eq!((first, built("a"), built("b"), built("b")), (1, Some(0), Some(1), Some(0)));
    let files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(files.len(), 2);
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        std::fs::write(file, &bytes[..bytes.len() - 1]).unwrap();
    }
    assert_eq!((built("a"), built("a")), (Some(1), Some(0)), "a cut file is a miss");
    // Whole, but nothing that the library reads.
    let kept = oxidiff::store::kept::Kept::new(folder.clone(), "plan", 1 << 20);
    for file in &files {
        kept.write(file.file_stem().unwrap().to_str().unwrap(), b"12345678 no plan");
    }
    assert_eq!((built("a"), built("a")), (Some(1), Some(0)), "what the library refuses is a miss");
    std::fs::remove_dir_all(folder).unwrap();
}

/// A size that is seen first, or whose libraries have not run, while the caller captures is for after the capture.
#[test]
fn nothing_is_planned_in_a_capture() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let graph = graph_of(PRODUCTS[1].1, "f32");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    let (inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 2).unwrap();
    let run = |is_captured: bool| {
        let call = ours.call_on(SIDE, &[2, 4], &inputs);
        let outcome = match is_captured {
            true => driver.capture(SIDE, || ours.launch(&call)).0,
            false => ours.launch(&call),
        };
        outcome.map_err(|e| e.to_string())
    };
    let calls = library.count(With::Anything as i32);
    let is_cold = |outcome: Result<(), String>| outcome.is_err_and(|e| e.contains("call the module once before"));
    assert!(is_cold(run(true)), "a size that is new");
    assert!(ours.executable.program().sizes().is_empty(), "nothing was planned");
    ours.executable.program().specialize(&[2, 4]).unwrap();
    assert!(is_cold(run(true)), "a size whose libraries have not run");
    assert_eq!(library.count(With::Anything as i32), calls);
    run(false).unwrap();
    run(true).unwrap();
    assert_eq!(library.count(With::Anything as i32), calls + 2);
}

/// Graphs are counted by the memory of the device that they take; where all sizes' take too much, the oldest sizes go.
#[test]
fn graphs_have_a_budget() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let graph = graph_of(PRODUCTS[1].1, "f32");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    for (memory_budget, kept) in [(None, 2), (Some(150 << 20), 1), (Some(50 << 20), 1)] {
        let options = PlanOptions { memory: MemoryMode::Fast, memory_budget, ..PlanOptions::default() };
        let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, options);
        driver.graph_bytes(100 << 20);
        for rows in [2, 3, 4, 2] {
            let (inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &[rows, 4], 1).unwrap();
            (0..2).for_each(|_| drop(ours.run(&[rows, 4], &inputs)));
            let sizes = ours.executable.program().sizes();
            assert_eq!(sizes.iter().filter(|s| s.bindings[0] == rows).map(|s| s.graph_bytes).sum::<usize>(), 100 << 20);
        }
        driver.graph_bytes(0);
        let sizes = ours.executable.program().sizes();
        assert_eq!(sizes.iter().filter(|s| s.graph_bytes > 0).count(), kept, "{memory_budget:?}: {sizes:?}");
    }
    let options = PlanOptions { memory_budget: Some(100), ..PlanOptions::default() };
    let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, options);
    let refused = ours.executable.program().specialize(&[2, 4]).map(|_| ()).unwrap_err().to_string();
    assert!(refused.contains("memory_budget"), "{refused}");
}

/// The cases of the ops that libraries compute.
#[test]
fn cases_with_libraries() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let mut failures = Vec::new();
    let words = ["linear(", "matmul(", "convolution(", "scaled_dot_product_attention("];
    for case in CASES.iter().filter(|c| c.lines.iter().any(|l| words.iter().any(|w| l.contains(w)))) {
        let texts = case.texts();
        let text = texts.get(1).unwrap_or(&texts[0]);
        if let Err(e) = check(&cuda, &parse_graph(text).unwrap(), Precision::Fast, case.terms) {
            failures.push(format!("`{}`: {e}\n{text}", case.name));
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// Runs at other addresses renew the graph's links; addresses that the library was not asked for are the kernels' work.
#[test]
fn graphs_follow_addresses() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let text = "symbol s0 \"rows\" = [12]\ninput 0 \"x\": f32[s0,4]\nparameter 0 \"w\": f32[5,4]\n\
                %0: f32[s0,4] = input() {index=0}\n%1: f32[5,4] = parameter() {index=0}\n\
                %2: f32[s0,5] = linear(%0, %1)\nreturn %2\n";
    let graph = parse_graph(text).unwrap();
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[12], 1).unwrap();
    let w = weights[0].to_f64();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Eager, &weights);
    let calls = || library.count(With::Anything as i32);
    // Elements from the start of memory that is a multiple of 16 bytes; each run has memory of its own.
    let mut held: Vec<[Vec<u128>; 2]> = Vec::new();
    let mut run = |shift: usize, seed: usize| {
        held.push([vec![0u128; 16], vec![0u128; 16]]);
        let [x, out] = held.last_mut().unwrap().each_mut().map(|m| m.as_mut_ptr().cast::<f32>());
        // SAFETY: 64 floats each, of which at most 60 are used from at most the fourth on.
        unsafe {
            (0..48).for_each(|i| x.add(shift + i).write(((i * i + seed) % 11) as f32 - 5.0));
            let given = Tensor::dense(x.add(shift).cast(), DType::F32, &[12, 4]);
            let result = Tensor::dense(out.cast(), DType::F32, &[12, 5]);
            ours.executable.run(&[given], &[result], &[12], None).unwrap();
            for (row, column) in (0..12).flat_map(|r| (0..5).map(move |c| (r, c))) {
                let want: f64 = (0..4).map(|k| f64::from(*x.add(shift + row * 4 + k)) * w[column * 4 + k]).sum();
                let got = f64::from(*out.add(row * 5 + column));
                assert!((got - want).abs() < 1e-4, "{got} instead of {want} at {row}, {column}");
            }
        }
    };
    let before = calls();
    (0..3).for_each(|seed| run(0, seed));
    // Launched, captured, and captured again at other addresses.
    assert_eq!(calls() - before, 3);
    let graphs = driver.count(Count::Graphs);
    (3..5).for_each(|seed| run(1, seed));
    assert_eq!(calls() - before, 3, "what is not aligned is not handed over");
    assert_eq!(driver.count(Count::Graphs) - graphs, 1);
    run(0, 5);
    assert_eq!(calls() - before, 4);
}

/// Convolutions in the forms that models have.
const CONVOLUTIONS: &[(&str, &str, &[RunWith])] = &[
    (
        "bias, activation and residual",
        "x: T[s0,s1,6,8]; r: T[s0,s1,6,16]; w @ T[16,8,3,3]; b @ T[16]; \
         c = T[s0,s1,6,16] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         a = T[s0,s1,6,16] silu(c); y = T[s0,s1,6,16] add(a, r)",
        &[RunWith::Addend, RunWith::Activation],
    ),
    (
        "a bias per image",
        "x: T[s0,s1,6,8]; t: T[s0,16]; w @ T[16,8,3,3]; b @ T[16]; \
         c = T[s0,s1,6,16] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         u = T[s0,1,1,16] reshape(t); y = T[s0,s1,6,16] add(c, u)",
        &[RunWith::Addend],
    ),
    (
        "stride",
        "x: T[s0,s1,6,8]; w @ T[16,8,3,3]; b @ T[16]; \
         y = T[s0,s1/2,3,16] convolution(x, w, b) {stride=[2, 2], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
        &[],
    ),
    (
        "dilation",
        "x: T[s0,s1,6,8]; w @ T[16,8,3,3]; \
         y = T[s0,s1,6,16] convolution(x, w) {stride=[1, 1], padding=[2, 2], dilation=[2, 2], groups=1, channels_last=true}",
        &[],
    ),
    (
        "groups",
        "x: T[s0,s1,6,8]; w @ T[16,4,3,3]; b @ T[16]; \
         y = T[s0,s1,6,16] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=2, channels_last=true}",
        &[RunWith::Groups],
    ),
    (
        "one tap",
        "x: T[s0,s1,6,8]; w @ T[16,8,1,1]; b @ T[16]; \
         y = T[s0,s1,6,16] convolution(x, w, b) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=true}",
        &[],
    ),
    (
        "taps of two lengths",
        "x: T[s0,s1,6,8]; w @ T[16,8,1,3]; \
         y = T[s0,s1,6,16] convolution(x, w) {stride=[1, 1], padding=[0, 1], dilation=[1, 1], groups=1, channels_last=true}",
        &[],
    ),
    (
        "one dimension",
        "x: T[s0,8,s1]; w @ T[16,8,3]; \
         y = T[s0,16,s1] convolution(x, w) {stride=[1], padding=[1], dilation=[1], groups=1, channels_last=false}",
        &[],
    ),
    (
        "three dimensions",
        "x: T[s0,3,s1,6,8]; w @ T[16,8,3,3,3]; b @ T[16]; \
         y = T[s0,3,s1,6,16] convolution(x, w, b) {stride=[1, 1, 1], padding=[1, 1, 1], dilation=[1, 1, 1], groups=1, channels_last=true}",
        &[],
    ),
    (
        "into a slice of a concatenation",
        "x: T[s0,s1,6,8]; z: T[s0,s1,6,8]; w @ T[16,8,3,3]; \
         c = T[s0,s1,6,16] convolution(x, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         y = T[s0,s1,6,24] cat(c, z) {dim=3}",
        &[RunWith::Gaps],
    ),
    (
        "of an upsampled image",
        "x: T[s0,s1,3,8]; w @ T[16,8,3,3]; b @ T[16]; \
         u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         y = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
        &[],
    ),
    (
        "work that the graph cannot do",
        "x: T[s0,s1,6,8]; r: T[s0,s1,6,16]; w @ T[16,8,3,3]; b @ T[16]; \
         c = T[s0,s1,6,16] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         a = T[s0,s1,6,16] sin(c); y = T[s0,s1,6,16] mul(a, r)",
        &[],
    ),
    (
        "work that the library refuses",
        "x: T[s0,s1,6,8]; w @ T[16,8,3,3]; b @ T[16]; \
         c = T[s0,s1,6,16] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         y = T[s0,s1,6,16] tanh(c)",
        &[],
    ),
];

#[test]
fn convolutions_are_handed_over_as_they_are_meant() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let library = FakeLibrary::cudnn().unwrap();
    let (always, never) = (&[RunWith::Convolution], &[RunWith::TensorCoresOnF32]);
    let counted = Counted { count: &|w: RunWith| library.count(w as i32), always, never };
    are_handed_over(&cuda, CONVOLUTIONS, &["f32", "f16", "bf16"], 72, &counted);
    // As under autocast: what is laid out anew is computed of a weight, and no argument or weight has its type.
    let computed = (
        "a weight of another type",
        "x: f32[s0,s1,6,8]; w @ f32[16,8,3,3]; h = T[s0,s1,6,8] convert(x); q = T[16,8,3,3] convert(w); \
         y = T[s0,s1,6,16] convolution(h, q) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
        &[] as &[RunWith],
    );
    are_handed_over(&cuda, &[computed], &["f16", "bf16"], 72, &counted);
}

/// What graphs were recorded on stays when they go, since handles of the library name it: of a program that is no more, and of
/// streams beyond those that a size keeps graphs for.
#[test]
fn streams_that_handles_name_stay() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    for (_, lines, _) in &CONVOLUTIONS[..2] {
        let graph = graph_of(lines, "f16");
        let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
        let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        for stream in [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0] {
            let call = ours.call_on(SIDE + 16 * stream, &[2, 4], &inputs);
            ours.launch(&call).unwrap();
            harness::difference(&ours.read(&call).unwrap()[0], &want[0], 72)
                .unwrap_or_else(|e| panic!("stream {stream}: {e}"));
        }
        let told = ours.executable.program().peek(&[2, 4]).unwrap().delegations();
        assert!(told.iter().all(|choice| choice.by == "cuDNN"), "{told:?}");
    }
}

#[test]
fn what_is_misread_of_a_convolution_shows() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let library = FakeLibrary::cudnn().unwrap();
    let shows = |what: MisreadGraph, name: &str| {
        let (_, lines, _) = CONVOLUTIONS.iter().find(|(n, ..)| *n == name).unwrap();
        library.misread(what as i32);
        let outcome = check(&cuda, &graph_of(lines, "f32"), Precision::Fast, 72);
        library.misread(MisreadGraph::Nothing as i32);
        assert!(outcome.is_err(), "{what:?} in `{name}` went unnoticed");
    };
    shows(MisreadGraph::Padding, "bias, activation and residual");
    shows(MisreadGraph::Stride, "stride");
    shows(MisreadGraph::AddendAddress, "a bias per image");
    shows(MisreadGraph::OutStrides, "stride");
    shows(MisreadGraph::Taps, "dilation");
    shows(MisreadGraph::Workspace, "stride");
    shows(MisreadGraph::Activation, "bias, activation and residual");
    shows(MisreadGraph::SwappedImage, "groups");
}

/// Convolutions of images that are upsampled by two first.
const UPSAMPLED: &[(&str, &str)] = &[
    (
        "bias",
        "x: T[s0,s1,3,8]; w @ T[16,8,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         y = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
    ),
    (
        "no bias",
        "x: T[s0,s1,3,8]; w @ T[16,8,3,3]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         y = T[s0,2*s1,6,16] convolution(u, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
    ),
    (
        "bias, activation and residual",
        "x: T[s0,s1,3,8]; r: T[s0,2*s1,6,16]; w @ T[16,8,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         c = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         a = T[s0,2*s1,6,16] silu(c); y = T[s0,2*s1,6,16] add(a, r)",
    ),
    (
        "a bias per image",
        "x: T[s0,s1,3,8]; t: T[s0,16]; w @ T[16,8,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         c = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         v = T[s0,1,1,16] reshape(t); y = T[s0,2*s1,6,16] add(c, v)",
    ),
    (
        "into a slice of a concatenation",
        "x: T[s0,s1,3,8]; z: T[s0,2*s1,6,8]; w @ T[16,8,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         c = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         y = T[s0,2*s1,6,24] cat(c, z) {dim=3}",
    ),
    (
        "groups",
        "x: T[s0,s1,3,8]; w @ T[16,4,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         y = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=2, channels_last=true}",
    ),
    (
        "a weight that lies channels-last",
        "x: T[s0,s1,3,8]; q @ T[16,3,3,8]; b @ T[16]; w = T[16,8,3,3] permute(q) {dims=[0, 3, 1, 2]}; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         y = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
    ),
    (
        "work that the graph cannot do",
        "x: T[s0,s1,3,8]; r: T[s0,2*s1,6,16]; w @ T[16,8,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         c = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         a = T[s0,2*s1,6,16] sin(c); y = T[s0,2*s1,6,16] mul(a, r)",
    ),
    (
        "work that the library refuses",
        "x: T[s0,s1,3,8]; w @ T[16,8,3,3]; b @ T[16]; u = T[s0,2*s1,6,8] upsample_nearest(x) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
         c = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
         y = T[s0,2*s1,6,16] tanh(c)",
    ),
];

/// Three runs at sizes that are odd and even: launched, captured and replayed. Gives how many convolutions were handed over in
/// the two that are, and the bytes of an upsampled image.
fn convolutions_of(
    ours: &harness::OnDevice,
    graph: &Graph,
    weights: &[interp::Tensor],
) -> Result<Vec<(i64, usize)>, String> {
    let library = FakeLibrary::cudnn().unwrap();
    let mut counted = Vec::new();
    for bindings in [[2, 4], [1, 5], [3, 1]] {
        let (inputs, _) = oxidiff::ir::testing::random_inputs(graph, &bindings, 2).unwrap();
        let want = interp::run_f64(graph, &bindings, &inputs, weights).unwrap();
        let before = library.count(RunWith::Convolution as i32);
        for round in 0..2 {
            harness::difference(&ours.run(&bindings, &inputs)[0], &want[0], 72)
                .map_err(|e| format!("at {bindings:?}, round {round}: {e}"))?;
        }
        let workspace = ours.executable.program().peek(&bindings).unwrap().workspace().clone();
        let images = (0..workspace.requests.len()).filter(|&r| workspace.name(r).1.contains("an upsampled image"));
        let bytes = images.map(|r| workspace.requests[r].bytes).sum();
        counted.push((library.count(RunWith::Convolution as i32) - before, bytes));
    }
    Ok(counted)
}

/// A backend that folds however small the convolution is.
fn with_folding() -> Option<Cuda> {
    with_libraries()?;
    let delegates = Delegates::new("a stand-in".to_owned(), None).with_fold_flops(0);
    Some(backend(|text| text)?.with_delegates(delegates))
}

#[test]
fn upsampling_is_folded_into_four_convolutions() {
    let _alone = alone();
    let Some(cuda) = with_folding() else { return };
    let library = FakeLibrary::cudnn().unwrap();
    for (name, lines) in UPSAMPLED {
        let graph = graph_of(lines, "f32");
        let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        let counted = convolutions_of(&ours, &graph, &weights).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(counted, [(8, 0); 3], "{name}: four, launched and captured, and no image");
        // Four weights of 2 x 2 taps instead of one of 3 x 3, and nothing else.
        let bytes = weights[0].bytes().len() / 9 * 16;
        assert_eq!(ours.executable.stats().derived_bytes, bytes, "{name}");
    }
    let shows = |what: MisreadGraph, at: usize| {
        let graph = graph_of(UPSAMPLED[at].1, "f32");
        let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        library.misread(what as i32);
        let outcome = convolutions_of(&ours, &graph, &weights);
        library.misread(MisreadGraph::Nothing as i32);
        assert!(outcome.is_err(), "{what:?} in `{}` went unnoticed", UPSAMPLED[at].0);
    };
    shows(MisreadGraph::Padding, 0);
    shows(MisreadGraph::OutStrides, 0);
    shows(MisreadGraph::Taps, 0);
    shows(MisreadGraph::SwappedImage, 0);
}

/// Two linear layers and an upsampling convolution, and another linear layer: a fourth of the work that rounds.
const UPSAMPLED_AMONG_OTHERS: &str = "x: T[s0,s1,3,8]; w @ T[16,8,3,3]; b @ T[16]; k @ T[8,8]; l @ T[8,8]; m @ T[16,16]; \
     p = T[s0,s1,3,8] linear(x, k); q = T[s0,s1,3,8] silu(p); v = T[s0,s1,3,8] linear(q, l); \
     u = T[s0,2*s1,6,8] upsample_nearest(v) {first_dim=1, scales=[2.0, 2.0], exact=false}; \
     c = T[s0,2*s1,6,16] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}; \
     y = T[s0,2*s1,6,16] linear(c, m)";

/// Sums of 16-bit taps are rounded where enough else is: four convolutions, all ways compared, and the sums kept in 16 bits.
#[test]
fn upsampling_in_16_bits_is_folded_among_other_work() {
    let _alone = alone();
    let Some(cuda) = with_folding() else { return };
    for dtype in ["f16", "bf16"] {
        let graph = graph_of(UPSAMPLED_AMONG_OTHERS, dtype);
        let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
        let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
        let counted = convolutions_of(&ours, &graph, &weights).unwrap_or_else(|e| panic!("{dtype}: {e}"));
        assert_eq!(counted, [(8, 0); 3], "{dtype}");
        let taps = weights.iter().find(|w| w.shape().len() == 4).unwrap().bytes().len();
        assert_eq!(ours.executable.stats().derived_bytes, taps / 9 * 16, "{dtype}");
        let sites = ours.executable.program().specialize(&[2, 4]).unwrap().sites();
        let at = sites.iter().position(|site| site.ways.iter().any(|way| way == "whole 0")).unwrap();
        let seconds = seconds_of_ways_at(&ours, &cuda, &[2, 4], at);
        let (four, whole) = (seconds[..6].iter().flatten().count(), seconds[6..12].iter().flatten().count());
        assert!(four > 0 && four == whole, "{dtype}: what is rounded twice is still right: {seconds:?}");
    }
}

/// Every way to compute the four is compared with the step's own kernels, which read the weight itself, and with every way to
/// compute the one over the image that is written out.
#[test]
fn ways_to_fold_are_compared() {
    let _alone = alone();
    let Some(cuda) = with_folding() else { return };
    let driver = fake_driver().unwrap();
    let graph = graph_of(UPSAMPLED[2].1, "f32");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    driver.kernel_cost(2.0);
    let seconds = seconds_of_ways(&ours, &cuda, &[2, 4]);
    let works: Vec<bool> = seconds.iter().map(Option::is_some).collect();
    // The stand-in's engine with tensor cores is none for f32: the first that works is the third.
    let engines = [true, false, true, false, false, false];
    assert_eq!(works, [engines.as_slice(), &engines, &[true]].concat(), "{seconds:?}");
    // Four runs of the library and the kernel that joins them, against one and the kernel that writes the image.
    let [four, one] = [seconds[2].unwrap(), seconds[8].unwrap()];
    assert!((four - 6e-3).abs() < 1e-6 && (one - 3e-3).abs() < 1e-6, "{four} {one}");
    let program = ours.executable.program();
    let site = || program.specialize(&[2, 4]).unwrap().sites().remove(0);
    let before = site();
    assert_eq!((before.ways[8].as_str(), before.chosen, before.installed), ("whole 2", 0, None));
    // What only a trial needs is not in the arena.
    let arena = |p: &oxidiff::runtime::Program| p.specialize(&[2, 4]).unwrap().workspace().bytes();
    let folded_bytes = arena(program);
    for (choice, runs, ways) in [("whole 2", 1, 7), ("library 2", 4, 13), ("whole 5", 4, 13)] {
        assert!(program.specialize(&[2, 4]).unwrap().choose(0, choice));
        program.forget_sizes();
        let row = site();
        assert_eq!((row.installed.as_deref(), row.ways.len()), (Some(choice), ways), "{choice}");
        assert_eq!((row.op == before.op, row.ways[row.chosen].as_str()), (true, choice));
        let library = FakeLibrary::cudnn().unwrap();
        let (inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 2).unwrap();
        let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
        for round in 0..3 {
            let counted = library.count(RunWith::Convolution as i32);
            harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 72)
                .unwrap_or_else(|e| panic!("{choice}, round {round}: {e}"));
            assert_eq!(library.count(RunWith::Convolution as i32) - counted, runs, "{choice}, round {round}");
        }
        // The image that is written out has half as many channels as the result in four parts.
        assert_eq!(arena(program) < folded_bytes, runs == 1, "{choice}");
    }
    // Where memory has a bound, what needs less of it is done, and nothing else is chosen.
    let options = PlanOptions { memory: MemoryMode::Fast, memory_budget: Some(1 << 30), ..PlanOptions::default() };
    let bounded = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, options);
    let row = bounded.executable.program().specialize(&[2, 4]).unwrap().sites().remove(0);
    assert_eq!(row.ways.len(), 7, "{:?}", row.ways);
    assert!(arena(bounded.executable.program()) < folded_bytes);
}

/// A trial of the one over a whole image fails where the image is not what it should be.
#[test]
fn a_whole_image_that_is_wrong_is_no_way() {
    let _alone = alone();
    if with_libraries().is_none() {
        return;
    }
    // Copies are what writes the image, and nothing else here.
    let broken: fn(String) -> String =
        |text| text.replace("const u32 row = thread / packs, col = thread % packs * V;", "const u32 row = 0, col = 0;");
    let delegates = Delegates::new("a stand-in".to_owned(), None).with_fold_flops(0);
    let cuda = backend(broken).unwrap().with_delegates(delegates);
    let graph = graph_of(UPSAMPLED[2].1, "f32");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    let seconds = seconds_of_ways(&ours, &cuda, &[2, 4]);
    assert!(seconds[2].is_some() && seconds[6..12].iter().all(Option::is_none), "{seconds:?}");
}

/// The upsampled image is written out where folding is refused, does not pay, or would keep or round what must not be.
#[test]
fn upsampling_is_not_folded_everywhere() {
    let _alone = alone();
    let (Some(folding), Some((plain, _))) = (with_folding(), with_libraries()) else { return };
    let library = FakeLibrary::cudnn().unwrap();
    let fast = PlanOptions { memory: MemoryMode::Fast, ..PlanOptions::default() };
    let cases = [
        ("it is small", &plain, "f32", fast, MisreadGraph::Nothing),
        ("16 bits", &folding, "f16", fast, MisreadGraph::Nothing),
        ("16 bits", &folding, "bf16", fast, MisreadGraph::Nothing),
        ("low", &folding, "f32", PlanOptions { memory: MemoryMode::Low, ..fast }, MisreadGraph::Nothing),
        ("exact", &folding, "f32", PlanOptions { exact: true, ..fast }, MisreadGraph::Nothing),
        ("refused", &folding, "f32", fast, MisreadGraph::UnevenPadding),
    ];
    for (why, cuda, dtype, options, misread) in cases {
        let graph = graph_of(UPSAMPLED[2].1, dtype);
        let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
        let ours = harness::OnDevice::with_options(cuda, &graph, Precision::Fast, &weights, options);
        library.misread(misread as i32);
        let counted = convolutions_of(&ours, &graph, &weights);
        library.misread(MisreadGraph::Nothing as i32);
        let counted = counted.unwrap_or_else(|e| panic!("{why}, {dtype}: {e}"));
        assert!(counted.iter().all(|(count, bytes)| *count == 2 && *bytes > 0), "{why}, {dtype}: {counted:?}");
        // The weight with channels last.
        let bytes = if options.memory == MemoryMode::Low { 0 } else { weights[0].bytes().len() };
        assert_eq!(ours.executable.stats().derived_bytes, bytes, "{why}, {dtype}");
    }
}

const LOW: PlanOptions = PlanOptions {
    memory: MemoryMode::Low,
    exact: false,
    memory_budget: None,
    plain_launches: false,
    numerics: Numerics { tf32_products: false, tf32_convolutions: false },
};

/// Bytes of the arena in which a size lays weights out anew.
fn laid_out_bytes(ours: &harness::OnDevice, bindings: &[i64]) -> usize {
    let workspace = ours.executable.program().peek(bindings).unwrap().workspace().clone();
    let named = |r: &usize| workspace.name(*r).1.contains("a weight with its channels as neighbours");
    (0..workspace.requests.len()).filter(named).map(|r| workspace.requests[r].bytes).sum()
}

/// With `memory="low"` nothing is kept of a weight: launched, captured and replayed, and while the caller captures.
#[test]
fn low_memory_lays_weights_out_anew() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let (library, driver) = (FakeLibrary::cudnn().unwrap(), fake_driver().unwrap());
    for (name, lines, _) in CONVOLUTIONS {
        for dtype in ["f32", "f16", "bf16"] {
            let graph = graph_of(lines, dtype);
            let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
            let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, LOW);
            for bindings in [[2, 4], [1, 6]] {
                let (inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 2).unwrap();
                let want = interp::run_f64(&graph, &bindings, &inputs, &weights).unwrap();
                let before = library.count(RunWith::Convolution as i32);
                for round in 0..4 {
                    let call = ours.call_on(SIDE, &bindings, &inputs);
                    match round {
                        3 => driver.capture_and_replay(SIDE, || ours.launch(&call)),
                        _ => ours.launch(&call),
                    }
                    .unwrap();
                    harness::difference(&ours.read(&call).unwrap()[0], &want[0], 72)
                        .unwrap_or_else(|e| panic!("{name}, {dtype}, round {round}: {e}"));
                }
                assert!(library.count(RunWith::Convolution as i32) > before, "{name}, {dtype}");
                let bytes = if *name == "one tap" { 0 } else { weights[0].bytes().len() };
                assert_eq!(laid_out_bytes(&ours, &bindings), bytes, "{name}, {dtype}");
                assert_eq!(ours.executable.stats().derived_bytes, 0, "{name}, {dtype}");
            }
        }
    }
}

/// A weight on the stand-in device that lies in the order of `dims`, outermost first.
fn lying(weight: &interp::Tensor, dims: &[usize]) -> Weight {
    let (shape, mut strides, mut next) = (weight.shape(), vec![0i64; dims.len()], 1);
    for &d in dims.iter().rev() {
        strides[d] = next;
        next *= shape[d];
    }
    let (size, mut bytes) = (weight.dtype().size_bytes(), vec![0u8; weight.bytes().len()]);
    for (at, element) in weight.bytes().chunks(size).enumerate() {
        let (mut rest, mut to) = (at as i64, 0);
        for d in (0..shape.len()).rev() {
            to += rest % shape[d] * strides[d];
            rest /= shape[d];
        }
        bytes[to as usize * size..][..size].copy_from_slice(element);
    }
    let memory: Vec<u128> = bytes.chunks(16).map(|b| b.iter().rev().fold(0, |n, b| n << 8 | u128::from(*b))).collect();
    let tensor = Tensor { ptr: memory.as_ptr().cast_mut().cast(), strides, ..support::borrow(weight) };
    Weight { owner: Box::new(memory), identity: Identity::Told, tensor }
}

/// What is replayed reads the weight as it is now: written in place, another one, one that lies otherwise, one that lies right
/// and is read as it lies.
#[test]
fn weights_that_are_laid_out_anew_are_never_stale() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let (library, driver) = (FakeLibrary::cudnn().unwrap(), fake_driver().unwrap());
    let graph = graph_of(CONVOLUTIONS[3].1, "f32");
    let bindings = [2, 4];
    let (inputs, first) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 1).unwrap();
    let (_, other) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 7).unwrap();
    let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &first, LOW);
    let (launches, graphs) = (|| driver.count(Count::Launches), || driver.count(Count::Graphs));
    let want = |weights: &[interp::Tensor]| interp::run_f64(&graph, &bindings, &inputs, weights).unwrap().remove(0);
    // Arguments and results stay where they are: nothing but the weight is news.
    let x = support::borrow(&inputs[0]);
    let shape = want(&first).shape().to_vec();
    let mut out = vec![0f32; shape.iter().product::<i64>() as usize];
    let mut check = |weights: &[interp::Tensor], what: &str| {
        let before = library.count(RunWith::Convolution as i32);
        let result = Tensor::dense(out.as_mut_ptr().cast(), DType::F32, &shape);
        // SAFETY: both have the memory of their shapes.
        unsafe { ours.executable.run(std::slice::from_ref(&x), &[result], &bindings, None).unwrap() };
        let bytes = out.iter().flat_map(|x| x.to_le_bytes()).collect();
        let got = interp::Tensor::new(DType::F32, shape.clone(), bytes).unwrap();
        harness::difference(&got, &want(weights), 72).unwrap_or_else(|e| panic!("{what}: {e}"));
        assert_eq!(ours.executable.stats().derived_bytes, 0, "{what}");
        library.count(RunWith::Convolution as i32) - before
    };
    for _ in 0..3 {
        check(&first, "as bound");
    }
    let made = graphs();
    let at = ours.executable.weights().tensor(0).unwrap().ptr;
    // SAFETY: the weight's memory has as many bytes.
    unsafe { cuda.device().upload(other[0].bytes(), at, 0).unwrap() };
    check(&other, "written in place");
    let bind = |weight: Weight| ours.executable.set_weights(vec![weight], &[0], &[], 0).unwrap();
    bind(lying(&first[0], &[0, 1, 2, 3]));
    check(&first, "another one");
    bind(lying(&other[0], &[1, 3, 0, 2]));
    check(&other, "lying otherwise");
    // The same memory, as if its rows were columns.
    let held = ours.executable.weights();
    let tensor = held.tensor(0).unwrap().clone();
    let strides = [0, 1, 3, 2].map(|d: usize| tensor.strides[d]).to_vec();
    bind(Weight { owner: Box::new(held), identity: Identity::Told, tensor: Tensor { strides, ..tensor } });
    let swapped: Vec<u8> = {
        let word = |f: usize, y: usize, x: usize| &other[0].bytes()[((f * 3 + x) * 3 + y) * 4..][..4];
        (0..128).flat_map(|f| (0..9).flat_map(move |t| word(f, t / 3, t % 3).to_vec())).collect()
    };
    let swapped = interp::Tensor::new(DType::F32, other[0].shape().to_vec(), swapped).unwrap();
    check(std::slice::from_ref(&swapped), "the same memory, otherwise");
    assert_eq!(graphs(), made, "one graph is told all of it");
    // Laid out by no kernel and in no memory where it lies right.
    let specialized = ours.executable.program().specialize(&bindings).unwrap();
    let whole = specialized.workspace_bytes(&ours.executable.weights());
    assert_eq!(whole, specialized.workspace().bytes());
    bind(lying(&first[0], &[0, 2, 3, 1]));
    assert!(whole - specialized.workspace_bytes(&ours.executable.weights()) >= first[0].bytes().len());
    for _ in 0..2 {
        check(&first, "channels last");
    }
    let (before, calls) = (launches(), library.count(RunWith::Convolution as i32));
    let call = ours.call_on(SIDE, &bindings, &inputs);
    driver.capture_and_replay(SIDE, || ours.launch(&call)).unwrap();
    let got = ours.read(&call).unwrap();
    harness::difference(&got[0], &want(&first), 72).unwrap_or_else(|e| panic!("channels last, captured: {e}"));
    assert_eq!((library.count(RunWith::Convolution as i32) - calls, launches()), (1, before));
}

/// A weight that generated kernels read is copied for a run where it does not lie dense, and the copy is not kept.
#[test]
fn low_memory_keeps_no_dense_copy() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let cuda = cuda.with_delegates(Delegates::none());
    let driver = fake_driver().unwrap();
    let graph = graph_of(CONVOLUTIONS[3].1, "f32");
    let (inputs, first) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let (_, other) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 7).unwrap();
    let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &first, LOW);
    ours.executable.set_weights(vec![lying(&first[0], &[0, 2, 3, 1])], &[0], &[], 0).unwrap();
    for round in 0..4 {
        if round == 2 {
            ours.executable.set_weights(vec![lying(&other[0], &[0, 2, 3, 1])], &[0], &[], 0).unwrap();
        }
        let weights = if round < 2 { &first } else { &other };
        let want = interp::run_f64(&graph, &[2, 4], &inputs, weights).unwrap();
        let held = driver.count(Count::Allocations) - driver.count(Count::Frees);
        let call = ours.call_on(SIDE, &[2, 4], &inputs);
        match round {
            3 => driver.capture_and_replay(SIDE, || ours.launch(&call)),
            _ => ours.launch(&call),
        }
        .unwrap();
        harness::difference(&ours.read(&call).unwrap()[0], &want[0], 72)
            .unwrap_or_else(|e| panic!("round {round}: {e}"));
        assert_eq!(ours.executable.stats().derived_bytes, 0);
        let more = driver.count(Count::Allocations) - driver.count(Count::Frees) - held;
        // The argument, the result, and the arena of the first run.
        assert!(more <= 2 + i64::from(round == 0), "round {round}: {more} more blocks");
    }
}

/// A trial lays the weight out too.
#[test]
fn ways_to_read_what_is_laid_out_are_compared() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let graph = graph_of(CONVOLUTIONS[0].1, "f16");
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, LOW);
    fake_driver().unwrap().kernel_cost(2.0);
    let seconds = seconds_of_ways(&ours, &cuda, &[2, 4]);
    let works: Vec<bool> = seconds.iter().map(Option::is_some).collect();
    assert_eq!(works, [true, true, true, false, false, false, true], "{seconds:?}");
    // Two kernels beside the library's: the layout is part of what is timed.
    assert!(seconds[2].is_some_and(|s| s > 2e-3), "{seconds:?}");
}

/// The layout's own mistakes show.
#[test]
fn what_is_laid_out_wrong_shows() {
    let _alone = alone();
    if with_libraries().is_none() {
        return;
    }
    let graph = graph_of(CONVOLUTIONS[3].1, "f32");
    let (inputs, weights) = oxidiff::ir::testing::random_inputs(&graph, &[2, 4], 1).unwrap();
    let want = interp::run_f64(&graph, &[2, 4], &inputs, &weights).unwrap();
    let is_right = |edit: fn(String) -> String| {
        let cuda = backend(edit).unwrap().with_delegates(Delegates::new("a stand-in".to_owned(), None));
        let ours = harness::OnDevice::with_options(&cuda, &graph, Precision::Fast, &weights, LOW);
        harness::difference(&ours.run(&[2, 4], &inputs)[0], &want[0], 72).is_ok()
    };
    assert!(is_right(|text| text));
    assert!(!is_right(|text| text.replace("+ channel;", ";")), "an offset");
    assert!(!is_right(|text| text.replace("+ (i64)y * ", "+ (i64)x * ")), "a stride");
    assert!(!is_right(|text| text.replace("for (u32 y = 0;", "for (u32 y = 1;")), "a row of taps");
}

#[test]
fn refused_convolutions_fall_back_and_are_told() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let library = FakeLibrary::cudnn().unwrap();
    let refused = graph_of(
        "x: T[s0,s1,6,8]; w @ T[13,8,3,3]; \
         y = T[s0,s1,6,13] convolution(x, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}",
        "f16",
    );
    let runs = library.count(RunWith::Anything as i32);
    check(&cuda, &refused, Precision::Fast, 72).unwrap();
    assert_eq!(library.count(RunWith::Anything as i32), runs);
    let told = choices(&cuda, &refused, &[2, 4]);
    assert_eq!((told.len(), told[0].by), (1, "kernel"));
    assert!(told[0].reason.contains("CUDNN_STATUS_NOT_SUPPORTED no engine"), "{told:?}");
}

/// Attentions in the forms that models have: heads inside rows, other lengths, masks, causal.
const ATTENTIONS: &[(&str, &str, &[RunWith])] = &[
    (
        "heads inside rows",
        "x: T[s0,s1,16]; c: T[s0,7,16]; h = T[s0,s1,2,8] reshape(x); q = T[s0,2,s1,8] permute(h) {dims=[0, 2, 1, 3]}; \
         g = T[s0,7,2,8] reshape(c); k = T[s0,2,7,8] permute(g) {dims=[0, 2, 1, 3]}; \
         a = T[s0,2,s1,8] scaled_dot_product_attention(q, k, k) {is_causal=false, scale=0.35}; \
         t = T[s0,s1,2,8] permute(a) {dims=[0, 2, 1, 3]}; y = T[s0,s1,16] reshape(t)",
        &[],
    ),
    (
        "causal",
        "q: T[s0,2,s1,8]; k: T[s0,2,s1,8]; v: T[s0,2,s1,8]; \
         y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v) {is_causal=true, scale=0.25}",
        &[],
    ),
    (
        "a mask for every head",
        "q: T[s0,2,s1,8]; k: T[s0,2,7,8]; v: T[s0,2,7,8]; m: T[s0,1,s1,7]; \
         y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}",
        &[RunWith::Addend],
    ),
    (
        "one leading dimension, a mask of f32, another value size",
        "q: T[s0,s1,8]; k: T[s0,9,8]; v: T[s0,9,16]; m: f32[s1,9]; \
         y = T[s0,s1,16] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}",
        &[RunWith::Addend],
    ),
    (
        "shared keys",
        "q: T[s0,3,s1,8]; k: T[s0,1,9,8]; v: T[s0,1,9,8]; \
         y = T[s0,3,s1,8] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.25}",
        &[],
    ),
    (
        "a mask of bool for every head",
        "q: T[s0,2,s1,8]; k: T[s0,2,7,8]; v: T[s0,2,7,8]; m: bool[s0,1,s1,7]; \
         y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}",
        &[RunWith::Addend],
    ),
    (
        "a mask of bool for every query",
        "q: T[s0,2,s1,8]; k: T[s0,2,70,8]; v: T[s0,2,70,8]; m: bool[s0,1,1,70]; \
         y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}",
        &[RunWith::Addend],
    ),
    (
        "a mask of bool for every image, heads inside rows, one for all keys",
        "x: T[s0,s1,16]; c: T[s0,7,16]; h = T[s0,s1,2,8] reshape(x); q = T[s0,2,s1,8] permute(h) {dims=[0, 2, 1, 3]}; \
         g = T[s0,7,2,8] reshape(c); k = T[s0,2,7,8] permute(g) {dims=[0, 2, 1, 3]}; m: bool[2,s1,1]; \
         e = bool[2,s1,7] expand(m); \
         a = T[s0,2,s1,8] scaled_dot_product_attention(q, k, k, e) {is_causal=false, scale=0.35}; \
         t = T[s0,s1,2,8] permute(a) {dims=[0, 2, 1, 3]}; y = T[s0,s1,16] reshape(t)",
        &[RunWith::Addend],
    ),
];

#[test]
fn attentions_are_handed_over_as_they_are_meant() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let library = FakeLibrary::cudnn().unwrap();
    let counted = Counted { count: &|w: RunWith| library.count(w as i32), always: &[RunWith::Attention], never: &[] };
    are_handed_over(&cuda, ATTENTIONS, &["f16", "bf16"], 36, &counted);
    let shows = |what: MisreadGraph, at: usize| {
        library.misread(what as i32);
        let outcome = check(&cuda, &graph_of(ATTENTIONS[at].1, "f16"), Precision::Fast, 36);
        library.misread(MisreadGraph::Nothing as i32);
        assert!(outcome.is_err(), "{what:?} in `{}` went unnoticed", ATTENTIONS[at].0);
    };
    shows(MisreadGraph::Scale, 0);
    shows(MisreadGraph::Mask, 1);
    shows(MisreadGraph::AddendAddress, 2);
    shows(MisreadGraph::OutStrides, 0);
    shows(MisreadGraph::AddendAddress, 5);
    shows(MisreadGraph::AddendAddress, 6);
}

/// Rows of a mask of bool that hide every key give zeros, others what their own keys give; what the mask is broadcast over
/// takes no memory.
#[test]
fn rows_that_a_mask_hides_all_from_are_zeros() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let library = FakeLibrary::cudnn().unwrap();
    let bindings = [2, 4];
    // Rows by what they hide: nothing, all, all but the last key, ...
    let rows: [fn(usize) -> bool; 4] = [|_| true, |_| false, |key| key == 6, |key| key % 2 == 0];
    // The mask, its shape at these sizes, and what is added.
    let shapes: [(&str, &[i64], usize); 4] = [
        ("s0,1,s1,7", &[2, 1, 4, 7], 2 * 4 * 7),
        ("s0,1,1,7", &[2, 1, 1, 7], 2 * 7),
        ("s1,7", &[4, 7], 4 * 7),
        ("s0,2,s1,1", &[2, 2, 4, 1], 2 * 2 * 4 * 7),
    ];
    for dtype in ["f16", "bf16"] {
        for (sizes, shape, numbers) in shapes {
            let lines = format!(
                "q: T[s0,2,s1,8]; k: T[s0,2,7,8]; v: T[s0,2,7,8]; m: bool[{sizes}]; \
                 y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {{is_causal=false, scale=0.25}}"
            );
            let graph = graph_of(lines.leak(), dtype);
            let (mut inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 3).unwrap();
            let keys = *shape.last().unwrap() as usize;
            let count = shape.iter().product::<i64>() as usize;
            let mask = (0..count).map(|at| u8::from(rows[at / keys % 4](at % keys))).collect();
            inputs[3] = interp::Tensor::new(DType::Bool, shape.to_vec(), mask).unwrap();
            let ours = harness::OnDevice::new(&cuda, &graph, Precision::Fast, &[]);
            let want = interp::run_f64(&graph, &bindings, &inputs, &[]).unwrap();
            assert!(want[0].to_f64().chunks(8).any(|row| row.iter().all(|x| *x == 0.0)), "a row has nothing to see");
            let before = library.count(RunWith::Attention as i32);
            for round in 0..3 {
                let got = ours.run(&bindings, &inputs);
                harness::difference(&got[0], &want[0], 36)
                    .unwrap_or_else(|e| panic!("{dtype}, {shape:?}, round {round}: {e}"));
            }
            assert!(library.count(RunWith::Attention as i32) > before, "{shape:?}");
            let specialized = ours.executable.program().peek(&bindings).unwrap();
            let workspace = specialized.workspace();
            let added = (0..workspace.requests.len()).find(|&r| workspace.name(r).1.contains("a mask that is added"));
            assert_eq!(added.map(|r| workspace.requests[r].bytes), Some(2 * numbers), "{shape:?}");
        }
    }
}

#[test]
fn attentions_that_no_engine_has_are_told() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let f32s = choices(&cuda, &graph_of(ATTENTIONS[1].1, "f32"), &[2, 4]);
    assert_eq!((f32s[0].by, f32s[0].reason.as_str()), ("kernel", "cuDNN has no attention of f32"));
}

/// Attention that cuDNN has no engine for, but of enough rows: products of chunks of queries, and a softmax between.
#[test]
fn attention_without_an_engine_is_products() {
    let _alone = alone();
    let (Some(library), Some(_)) = (FakeLibrary::cublaslt(), FakeLibrary::cudnn()) else { return };
    let cases: [(&str, &str, i64); 4] = [
        // Two images; of the chunks of 24 queries the last has 22.
        (
            "x: T[s0,70,16]; c: T[s0,64,16]; h = T[s0,70,2,8] reshape(x); q = T[s0,2,70,8] permute(h) {dims=[0, 2, 1, 3]}; \
             g = T[s0,64,2,8] reshape(c); k = T[s0,2,64,8] permute(g) {dims=[0, 2, 1, 3]}; \
             a = T[s0,2,70,8] scaled_dot_product_attention(q, k, k) {is_causal=false, scale=0.7}; \
             t = T[s0,70,2,8] permute(a) {dims=[0, 2, 1, 3]}; y = T[s0,70,16] reshape(t)",
            "f32",
            3,
        ),
        (
            "q: T[s0,66,8]; k: T[s0,72,8]; v: T[s0,72,12]; \
             y = T[s0,66,12] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.25}",
            "f32",
            3,
        ),
        (
            "q: T[s0,66,8]; k: T[s0,72,8]; v: T[s0,72,12]; m: T[66,72]; \
             y = T[s0,66,12] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}",
            "f32",
            3,
        ),
        (
            "q: T[s0,40,8]; k: T[s0,72,8]; v: T[s0,72,12]; \
             y = T[s0,40,12] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.25}",
            "f32",
            0,
        ),
    ];
    for (lines, dtype, chunks) in cases {
        let delegates = Delegates::new("a stand-in".to_owned(), None).with_scores_bytes(24 * 2 * 64 * 4);
        let Some(cuda) = backend(|text| text) else { return };
        let cuda = cuda.with_delegates(delegates);
        let graph = graph_of(lines, dtype);
        let told = choices(&cuda, &graph, &[2, 4]);
        let attention = told.iter().find(|c| c.step.ends_with("scaled_dot_product_attention")).unwrap();
        assert_eq!(attention.by, if chunks > 0 { "cuBLASLt" } else { "kernel" }, "{told:?}");
        let calls = library.count(With::Anything as i32);
        check(&cuda, &graph, Precision::Fast, 72).unwrap();
        assert_eq!(library.count(With::Anything as i32) > calls, chunks > 0);
        library.misread(Misread::Batch as i32);
        let outcome = check(&cuda, &graph, Precision::Fast, 72);
        library.misread(Misread::Nothing as i32);
        assert_eq!(outcome.is_err(), chunks > 0, "it went unnoticed that there is one matrix for all");
    }
}

/// An attention by chunks of 24 queries of 70, masked.
struct Masked {
    /// The mask's type and sizes, and its shape; none is no mask.
    mask: Option<(&'static str, &'static str, &'static [i64])>,
    is_causal: bool,
    dtype: &'static str,
    /// Leading dimensions: of three, cuDNN has no attention.
    lead: &'static str,
}

/// What hides of a mask's row: nothing, everything, all but the last key, odd keys.
fn is_seen(row: usize, key: usize, keys: usize) -> bool {
    [true, false, key + 1 == keys, key.is_multiple_of(2)][row % 4]
}

impl Masked {
    fn graph(&self) -> Graph {
        let Self { mask, is_causal, lead, .. } = self;
        let (operand, argument) = match mask {
            Some((dtype, sizes, _)) => (format!("m: {dtype}[{sizes}]; "), ", m"),
            None => (String::new(), ""),
        };
        // In 16 bits, heads that are too large for the generated kernel on tensor cores.
        let size = if self.dtype == "f32" { 8 } else { 168 };
        let lines = format!(
            "q: T[{lead},70,{size}]; k: T[{lead},72,{size}]; v: T[{lead},72,12]; {operand}\
             y = T[{lead},70,12] scaled_dot_product_attention(q, k, v{argument}) {{is_causal={is_causal}, scale=0.25}}"
        );
        graph_of(lines.leak(), self.dtype)
    }

    /// Launched, captured and replayed against the interpreter.
    fn check(&self, cuda: &Cuda) -> Result<(), String> {
        let (graph, bindings) = (self.graph(), [2, 4]);
        let (mut inputs, _) = oxidiff::ir::testing::random_inputs(&graph, &bindings, 3).unwrap();
        if let Some((_, _, shape)) = self.mask {
            let count = shape.iter().product::<i64>() as usize;
            let keys = *shape.last().unwrap() as usize;
            let random = inputs[3].to_f64();
            let dtype = inputs[3].dtype();
            let bytes = |at: usize| match (is_seen(at / keys, at % keys, keys), dtype) {
                (is, DType::Bool) => vec![u8::from(is)],
                (true, _) => (random[at] as f32).to_le_bytes().to_vec(),
                (false, _) => f32::NEG_INFINITY.to_le_bytes().to_vec(),
            };
            inputs[3] = interp::Tensor::new(dtype, shape.to_vec(), (0..count).flat_map(bytes).collect()).unwrap();
        }
        let want = interp::run_f64(&graph, &bindings, &inputs, &[]).unwrap();
        let ours = harness::OnDevice::new(cuda, &graph, Precision::Fast, &[]);
        for round in 0..3 {
            harness::difference(&ours.run(&bindings, &inputs)[0], &want[0], 72)
                .map_err(|e| format!("round {round}: {e}"))?;
        }
        let told = ours.executable.program().peek(&bindings).unwrap().delegations();
        if told[0].by == "cuBLASLt" { Ok(()) } else { Err(format!("{told:?}")) }
    }
}

const MASKED: &[Masked] = &[
    Masked { mask: None, is_causal: true, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("f32", "s0,1,70,72", &[2, 1, 70, 72])), is_causal: false, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("f32", "s0,2,1,72", &[2, 2, 1, 72])), is_causal: false, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("bool", "s0,2,70,72", &[2, 2, 70, 72])), is_causal: false, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("bool", "s0,1,1,72", &[2, 1, 1, 72])), is_causal: false, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("bool", "2,70,1", &[2, 70, 1])), is_causal: false, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("bool", "70,72", &[70, 72])), is_causal: false, dtype: "f32", lead: "s0,2" },
    Masked { mask: Some(("bool", "s0,1,2,70,72", &[2, 1, 2, 70, 72])), is_causal: false, dtype: "f16", lead: "s0,3,2" },
    Masked { mask: Some(("f32", "70,72", &[70, 72])), is_causal: false, dtype: "bf16", lead: "s0,3,2" },
    Masked { mask: None, is_causal: true, dtype: "f16", lead: "s0,3,2" },
];

fn in_chunks(edit: fn(String) -> String) -> Option<Cuda> {
    with_libraries()?;
    let delegates = Delegates::new("a stand-in".to_owned(), None).with_scores_bytes(24 * 2 * 72 * 4);
    Some(backend(edit)?.with_delegates(delegates))
}

/// Masks of every broadcast and causal ones: a chunk reads its own rows, and rows that see nothing are zeros.
#[test]
fn attention_by_chunks_is_masked() {
    let _alone = alone();
    let Some(cuda) = in_chunks(|text| text) else { return };
    for (at, masked) in MASKED.iter().enumerate() {
        masked.check(&cuda).unwrap_or_else(|e| panic!("{at}: {e}"));
    }
}

#[test]
fn what_is_wrong_with_a_mask_shows() {
    let _alone = alone();
    if with_libraries().is_none() {
        return;
    }
    let shows = |at: usize, edit: fn(String) -> String| {
        let cuda = in_chunks(edit).unwrap();
        assert!(MASKED[at].check(&cuda).is_err(), "a mistake in {at} went unnoticed");
    };
    shows(0, |text| text.replace("> query + (u32)", "> query + 0 * (u32)"));
    shows(1, |text| text.replace("(i64)query * ", "(i64)0 * "));
    shows(1, |text| text.replace("if (most == lowest) most = 0.0f;", ""));
    shows(2, |text| text.replace("(i64)head * ", "(i64)0 * "));
    shows(3, |text| text.replace("if (!seen", "if (seen"));
    shows(5, |text| text.replace("seen[(i64)(col + j) * ", "seen[(i64)(col + j) + 0 * "));
    shows(3, |text| text.replace("sum == 0.0f ? 0.0f : 1.0f / sum", "1.0f / sum"));
}

/// SD1.5's UNet with small widths: every convolution and product of more than a few rows is a library's, launched, captured
/// and replayed at two sizes, and the result is the CPU backend's.
#[test]
fn a_unet_with_libraries_runs_as_on_the_cpu() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries() else { return };
    let graph = parse_graph(include_str!("cuda/data/sd15_unet_tiny.ir")).unwrap();
    let weights = support::weights_of(&graph);
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Eager, &weights).executable;
    let plan = support::plan_of(graph.clone(), Precision::Eager, MemoryMode::Fast);
    let cpu = support::program_of(graph.clone(), plan, "cpu");
    let bound = weights.iter().map(|w| Weight::borrowed(support::borrow(w))).collect();
    let cpu = Executable::new(Arc::new(cpu), bound).unwrap();
    let driver = fake_driver().unwrap();
    let mut random = support::Random(5);
    for bindings in [[1, 8, 8, 7], [2, 16, 8, 5]] {
        let graphs = driver.count(Count::Graphs);
        for round in 0..3 {
            let types = graph.inputs.iter().map(|i| (i.ty.dtype, i.ty.concrete(&bindings).unwrap()));
            let inputs: Vec<interp::Tensor> =
                types.map(|(dtype, shape)| support::random(&mut random, dtype, &shape, 900)).collect();
            let (got, want) =
                (harness::run_here(&ours, &bindings, &inputs), harness::run_here(&cpu, &bindings, &inputs));
            let error = support::relative(&got[0], &want[0]);
            assert!(error < 2e-5, "at {bindings:?}, round {round}: {error:e}");
        }
        assert_eq!(driver.count(Count::Graphs) - graphs, 1);
        let specialized = ours.program().peek(&bindings).unwrap();
        let told = specialized.delegations();
        for op in ["convolution", "linear"] {
            let of_op: Vec<&StepChoice> = told.iter().filter(|c| c.step.ends_with(op)).collect();
            let own: Vec<_> = of_op.iter().filter(|c| c.by == "kernel" && c.reason != "it has few rows").collect();
            assert!(!of_op.is_empty() && own.is_empty(), "{own:?}");
        }
    }
}
