//! Every backend on every case: one list of ops, one list of backends, and random graphs.
//!
//! A case is a small graph; `T` in its types stands for f32, f16 and bf16 in turn. It is compiled whole (passes, groups, plan),
//! run at every sample binding and compared with the interpreter in f64. What a backend cannot do yet is listed in
//! [`IGNORED`], with the reason.

#[path = "backends/cases.rs"]
mod cases;
mod support;

use std::collections::{BTreeMap, BTreeSet};

use cases::{CASES, Case};
use oxidiff::backend::Weight;
use oxidiff::compiler::{Options, compile};
use oxidiff::ir::testing::{RandomGraph, check_close, random_graph, random_inputs};
use oxidiff::ir::{BinaryOp, DType, Graph, PoolOp, ReduceOp, UnaryOp, interp, parse_graph, print_graph};
use oxidiff::passes::Precision;
use oxidiff::plan::MemoryMode;
use oxidiff::runtime::Executable;
use support::{borrow, epsilon, run_here};

/// What does not run everywhere: backend, case, reason.
const IGNORED: &[(&str, &str, &str)] = &[];

const PRECISIONS: [Precision; 2] = [Precision::Eager, Precision::Fast];

fn options(backend: &str, precision: Precision, memory: MemoryMode) -> Options {
    Options { backend: Some(backend.to_owned()), precision: Some(precision), memory, ..Options::default() }
}

fn executable(graph: &Graph, weights: &[interp::Tensor], options: &Options) -> oxidiff::Result<Executable> {
    let (program, _) = compile(graph.clone(), options)?;
    Executable::new(program, weights.iter().map(|w| Weight::borrowed(borrow(w))).collect())
}

fn run(executable: &Executable, bindings: &[i64], inputs: &[interp::Tensor]) -> oxidiff::Result<Vec<interp::Tensor>> {
    run_here(executable, bindings, &inputs.iter().map(borrow).collect::<Vec<_>>())
}

/// Compares with the exact result: a few roundings of the result's type, and those of a sum of `terms` in f32.
fn difference(got: &interp::Tensor, want: &interp::Tensor, terms: usize) -> Result<(), String> {
    if got.shape() != want.shape() {
        return Err(format!("shape {:?} instead of {:?}", got.shape(), want.shape()));
    }
    let (got_values, want_values) = (got.to_f64(), want.to_f64());
    let scale = want_values.iter().fold(0f64, |m, x| m.max(x.abs()));
    let relative = 8.0 * (epsilon(got.dtype()) + epsilon(DType::F32) * (terms as f64).sqrt());
    let bound = if got.dtype().is_float() { relative * scale } else { 0.0 };
    let wrong =
        got_values.iter().zip(&want_values).position(|(g, w)| (g - w).abs() > bound || g.is_nan() || w.is_nan());
    let describe = |i: usize| format!("element {i}: {} instead of {} (+- {bound:e})", got_values[i], want_values[i]);
    wrong.map_or(Ok(()), |i| Err(describe(i)))
}

fn check_graph(graph: &Graph, terms: usize, options: &Options) -> Result<(), String> {
    let text = |e: oxidiff::Error| e.to_string();
    let (_, weights) = random_inputs(graph, &graph.sample_bindings()[0], 1).map_err(text)?;
    let executable = executable(graph, &weights, options).map_err(text)?;
    for bindings in graph.sample_bindings() {
        let (inputs, _) = random_inputs(graph, &bindings, 2).map_err(text)?;
        let got = run(&executable, &bindings, &inputs).map_err(text)?;
        let want = interp::run_f64(graph, &bindings, &inputs, &weights).map_err(text)?;
        for (got, want) in got.iter().zip(&want) {
            difference(got, want, terms).map_err(|e| format!("at {bindings:?}: {e}\n{}", executable.program().plan))?;
        }
    }
    Ok(())
}

/// Failures of a case, each with the graph.
fn check_case(case: &Case, backend: &str) -> Vec<String> {
    let mut failures = Vec::new();
    for text in case.texts() {
        let graph = parse_graph(&text).unwrap_or_else(|e| panic!("{}: {e}\n{text}", case.name));
        for precision in PRECISIONS {
            let options = options(backend, precision, MemoryMode::default());
            if let Err(e) = check_graph(&graph, case.terms, &options) {
                failures.push(format!("`{}` on {backend}, {precision:?}: {e}\n{text}", case.name));
            }
        }
    }
    failures
}

fn check_all(backend: &str) {
    let mut failures = Vec::new();
    for case in CASES {
        match IGNORED.iter().find(|(b, name, _)| *b == backend && *name == case.name) {
            Some((_, _, reason)) => eprintln!("{backend}: ignored {}: {reason}", case.name),
            None => failures.extend(check_case(case, backend)),
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn cases_on_cpu() {
    check_all("cpu");
}

#[test]
fn cases_on_reference() {
    check_all("reference");
}

/// The null backend plans and specializes everything and runs nothing.
#[test]
fn cases_on_null() {
    for case in CASES {
        for text in case.texts() {
            let graph = parse_graph(&text).unwrap();
            for memory in [MemoryMode::Fast, MemoryMode::Low] {
                let (program, _) = compile(graph.clone(), &options("null", Precision::Fast, memory)).unwrap();
                for bindings in graph.sample_bindings() {
                    let specialized = program.specialize(&bindings).unwrap();
                    let layout = &specialized.workspace().layout;
                    assert!(layout.bytes >= layout.lower_bound_bytes, "{}", case.name);
                }
            }
        }
    }
}

fn check_random(random: &RandomGraph, seed: u64, options: &Options) -> Result<(), String> {
    let (graph, text) = (&random.graph, |e: oxidiff::Error| e.to_string());
    let (_, weights) = random_inputs(graph, &graph.sample_bindings()[0], seed).map_err(text)?;
    let executable = executable(graph, &weights, options).map_err(text)?;
    for bindings in graph.sample_bindings() {
        let (inputs, _) = random_inputs(graph, &bindings, seed + 1).map_err(text)?;
        let got = run(&executable, &bindings, &inputs).map_err(text)?;
        let exact = interp::run_f64(graph, &bindings, &inputs, &weights).map_err(text)?;
        let plan = || format!("at {bindings:?}\n{}", executable.program().plan);
        check_close(&got, &exact, &random.tolerance, 2.0).map_err(|e| format!("{e} {}", plan()))?;
        if run(&executable, &bindings, &inputs).map_err(text)? != got {
            return Err(format!("another result when run again {}", plan()));
        }
    }
    Ok(())
}

/// Shrinks nothing, but tries small graphs first, and shows one failure of each kind.
fn check_random_graphs(backend: &str, seeds: std::ops::Range<u64>) {
    let mut failures: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for size in [12, 24, 60] {
        for seed in seeds.clone() {
            let random = random_graph(seed, size);
            for (precision, memory) in [(Precision::Eager, MemoryMode::Fast), (Precision::Fast, MemoryMode::Low)] {
                let Err(e) = check_random(&random, seed, &options(backend, precision, memory)) else { continue };
                let kind: String = e.chars().take_while(|c| !c.is_ascii_digit() && *c != '\n').collect();
                let first =
                    || (0, format!("seed {seed}, {precision:?}, {memory:?}: {e}\n{}", print_graph(&random.graph)));
                failures.entry(kind).or_insert_with(first).0 += 1;
            }
        }
    }
    let kinds: Vec<String> = failures.iter().map(|(kind, (count, _))| format!("{count} x {kind}")).collect();
    let texts: Vec<String> = failures.into_values().map(|(_, text)| text).collect();
    assert!(texts.is_empty(), "{}\n\n{}", kinds.join("\n"), texts.join("\n"));
}

#[test]
fn random_graphs_on_cpu() {
    check_random_graphs("cpu", 0..400);
}

/// Thousands of graphs (`make fuzz`): minutes, so not part of `make test`.
#[test]
#[ignore = "takes minutes; `make fuzz` runs it"]
fn many_random_graphs_on_cpu() {
    check_random_graphs("cpu", 10000..20000);
}

#[test]
fn random_graphs_on_reference() {
    check_random_graphs("reference", 1000..1040);
}

/// An op cannot be without a case.
#[test]
fn every_op_has_a_case() {
    let texts: Vec<String> = CASES.iter().flat_map(Case::texts).collect();
    let graphs = texts.iter().map(|t| parse_graph(t).unwrap_or_else(|e| panic!("{e}\n{t}")));
    let seen: BTreeSet<&str> = graphs.flat_map(|g| g.nodes.iter().map(|n| n.op.name()).collect::<Vec<_>>()).collect();
    let plain = [
        "input",
        "parameter",
        "constant",
        "full",
        "size_of",
        "arange",
        "where",
        "convert",
        "reshape",
        "permute",
        "expand",
        "slice",
        "cat",
        "pad",
        "slice_scatter",
        "flip",
        "index_select",
        "gather",
        "interpolate",
        "cumsum",
        "softmax",
        "linear",
        "matmul",
        "convolution",
        "scaled_dot_product_attention",
        "group_norm",
        "layer_norm",
        "rms_norm",
        "upsample_nearest",
    ];
    let all = plain.into_iter().chain(UnaryOp::ALL.iter().map(|o| o.name()));
    let all = all.chain(BinaryOp::ALL.iter().map(|o| o.name())).chain(ReduceOp::ALL.iter().map(|o| o.name()));
    let missing: Vec<&str> = all.chain(PoolOp::ALL.iter().map(|o| o.name())).filter(|n| !seen.contains(n)).collect();
    assert!(missing.is_empty(), "no case for {missing:?}");
    for (backend, name, reason) in IGNORED {
        assert!(CASES.iter().any(|c| c.name == *name), "{backend} ignores {name}, which does not exist");
        assert!(reason.len() > 10, "{backend} ignores {name} without a reason");
    }
}
