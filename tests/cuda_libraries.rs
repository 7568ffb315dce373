//! Steps that libraries compute, without a GPU: `tests/cuda/fake_cublaslt.cpp` stands in for the library with the real
//! one's functions, computes what the descriptors and pointers say that it is given, and refuses what does not fit. Results
//! are compared with the interpreter's in f64, launched and replayed. Generated kernels run as in `cuda_emulated.rs`.

#[path = "backends/cases.rs"]
mod cases;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/harness.rs"]
mod harness;
mod support;

use std::sync::{Mutex, MutexGuard, PoisonError};

use cases::CASES;
use emulator::{Count, FakeLibrary, backend, fake_driver};
use oxidiff::backend::cuda::Cuda;
use oxidiff::backend::cuda::delegate::{Delegates, Numerics};
use oxidiff::backend::{StepChoice, Tensor};
use oxidiff::ir::{DType, Graph, parse_graph};
use oxidiff::passes::Precision;

/// Stand-ins count for the whole process: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A backend with stand-ins for its libraries, and the one for cuBLASLt.
fn with_libraries(numerics: Numerics) -> Option<(Cuda, &'static FakeLibrary)> {
    let library = FakeLibrary::cublaslt()?;
    Some((backend(|text| text)?.with_delegates(Delegates::new(numerics)), library))
}

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
}

fn check(cuda: &Cuda, graph: &Graph, precision: Precision, terms: usize) -> Result<(), String> {
    harness::check(cuda, graph, precision, terms, &mut |round| round < 2)
}

fn choices(cuda: &Cuda, graph: &Graph, bindings: &[i64]) -> Vec<StepChoice> {
    let (_, weights) = oxidiff::ir::testing::random_inputs(graph, bindings, 1).unwrap();
    let ours = harness::OnDevice::new(cuda, graph, Precision::Fast, &weights);
    ours.executable.program().peek(bindings).unwrap().choices().to_vec()
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

#[test]
fn products_are_handed_over_as_they_are_meant() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries(Numerics::default()) else { return };
    for (name, lines, with) in PRODUCTS {
        for dtype in ["f32", "f16", "bf16"] {
            let graph = graph_of(lines, dtype);
            let count = |w: With| library.count(w as i32);
            let before: Vec<i64> = with.iter().map(|w| count(*w)).collect();
            let (any, tf32, workspace) = (count(With::Anything), count(With::Tf32), count(With::Workspace));
            check(&cuda, &graph, Precision::Fast, 40).unwrap_or_else(|e| panic!("{name}, {dtype}: {e}"));
            assert!(count(With::Anything) > any, "{name}, {dtype}: the library was not asked");
            assert!(count(With::Workspace) > workspace, "{name}, {dtype}: no workspace");
            assert_eq!(count(With::Tf32), tf32, "{name}: f32 is f32");
            for (w, before) in with.iter().zip(before) {
                assert!(count(*w) > before, "{name}, {dtype}: no call with {w:?}");
            }
        }
    }
}

#[test]
fn what_is_misread_shows() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries(Numerics::default()) else { return };
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

#[test]
fn tf32_is_for_those_who_ask() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries(Numerics { tf32: true }) else { return };
    let graph = graph_of(PRODUCTS[1].1, "f32");
    let (all, before) = (library.count(With::Anything as i32), library.count(With::Tf32 as i32));
    check(&cuda, &graph, Precision::Fast, 40).unwrap();
    assert_eq!(library.count(With::Tf32 as i32) - before, library.count(With::Anything as i32) - all);
    assert!(library.count(With::Tf32 as i32) > before);
}

/// What the library refuses, and what is too small for it, runs on generated kernels, and it is said why.
#[test]
fn refusals_fall_back_and_are_told() {
    let _alone = alone();
    let Some((cuda, library)) = with_libraries(Numerics::default()) else { return };
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

/// The cases of the ops that libraries compute.
#[test]
fn cases_with_libraries() {
    let _alone = alone();
    let Some((cuda, _)) = with_libraries(Numerics::default()) else { return };
    let mut failures = Vec::new();
    let words = ["linear(", "matmul("];
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
    let Some((cuda, library)) = with_libraries(Numerics::default()) else { return };
    let driver = fake_driver().unwrap();
    let text = "symbol s0 \"rows\" = [12]\ninput 0 \"x\": f32[s0,4]\nparameter 0 \"w\": f32[5,4]\n\
                %0: f32[s0,4] = input() {index=0}\n%1: f32[5,4] = parameter() {index=0}\n\
                %2: f32[s0,5] = linear(%0, %1)\nreturn %2\n";
    let graph = parse_graph(text).unwrap();
    let (_, weights) = oxidiff::ir::testing::random_inputs(&graph, &[12], 1).unwrap();
    let w = weights[0].to_f64();
    let ours = harness::OnDevice::new(&cuda, &graph, Precision::Eager, &weights);
    let calls = || library.count(With::Anything as i32);
    // Elements from the start of memory that is a multiple of 16 bytes.
    let run = |shift: usize, seed: usize| {
        let mut memory = [vec![0u128; 16], vec![0u128; 16]];
        let [x, out] = memory.each_mut().map(|m| m.as_mut_ptr().cast::<f32>());
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
