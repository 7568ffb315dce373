//! Properties that hold for every graph, on random ones.

use std::collections::BTreeSet;

use oxidiff::ir::interp::{run, run_f64};
use oxidiff::ir::testing::{check_close, random_graph, random_inputs};
use oxidiff::ir::{BinaryOp, UnaryOp, infer_type, parse_graph, print_graph, verify_graph};

const SEEDS: std::ops::Range<u64> = 0..300;
const NODES: usize = 60;

#[test]
fn verify_and_round_trip() {
    for seed in SEEDS {
        let graph = random_graph(seed, NODES).graph;
        let text = print_graph(&graph);
        verify_graph(&graph, "random_graph").unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
        let back = parse_graph(&text).unwrap_or_else(|e| panic!("seed {seed}: {e}\n{text}"));
        assert_eq!(back, graph, "seed {seed}");
        assert_eq!(back.hash(), graph.hash(), "seed {seed}");
    }
}

/// Where the symbolic type can be told, it has the declared sizes at every sample.
#[test]
fn inferred_types_agree_with_declared_ones() {
    for seed in SEEDS {
        let graph = random_graph(seed, NODES).graph;
        for v in graph.values() {
            let operands: Vec<_> = graph.node(v).inputs.iter().map(|&i| graph.ty(i)).collect();
            let Ok(Some(ty)) = infer_type(graph.op(v), &operands) else { continue };
            for bindings in graph.sample_bindings() {
                let (got, declared) = (ty.concrete(&bindings).unwrap(), graph.ty(v).concrete(&bindings).unwrap());
                assert_eq!(got, declared, "seed {seed}: {}", oxidiff::ir::print_node(&graph, v));
            }
        }
    }
}

/// The interpreter gives the same twice, and stays within the propagated error of exact arithmetic.
#[test]
fn interpreter_is_deterministic_and_near_f64() {
    for seed in SEEDS {
        let random = random_graph(seed, NODES);
        for bindings in random.graph.sample_bindings() {
            let (inputs, parameters) = random_inputs(&random.graph, &bindings, seed).unwrap();
            let place = || format!("seed {seed} at {bindings:?}:\n{}", print_graph(&random.graph));
            let got = run(&random.graph, &bindings, &inputs, &parameters);
            let got = got.unwrap_or_else(|e| panic!("{e}: {}", place()));
            let again = run(&random.graph, &bindings, &inputs, &parameters).unwrap();
            assert_eq!(got, again, "seed {seed}");
            let exact = run_f64(&random.graph, &bindings, &inputs, &parameters).unwrap();
            check_close(&got, &exact, &random.tolerance, 1.0).unwrap_or_else(|e| panic!("{e}: {}", place()));
        }
    }
}

/// Another input is reported: the comparison can fail.
#[test]
fn comparison_sees_other_results() {
    let random = random_graph(1, NODES);
    let bindings = &random.graph.sample_bindings()[1];
    let (inputs, parameters) = random_inputs(&random.graph, bindings, 1).unwrap();
    let exact = run_f64(&random.graph, bindings, &inputs, &parameters).unwrap();
    let (other_inputs, _) = random_inputs(&random.graph, bindings, 2).unwrap();
    let got = run(&random.graph, bindings, &other_inputs, &parameters).unwrap();
    assert!(check_close(&got, &exact, &random.tolerance, 4.0).is_err());
    assert!(check_close(&got[1..], &exact, &random.tolerance, 4.0).is_err());
}

/// The generator reaches every op, so that the properties above say something about each.
#[test]
fn every_op_occurs() {
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    for seed in SEEDS {
        seen.extend(random_graph(seed, NODES).graph.nodes.iter().map(|n| n.op.name()));
    }
    let structural = [
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
        "sum",
        "mean",
        "amax",
        "amin",
        "prod",
        "any",
        "all",
        "argmax",
        "argmin",
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
        "avg_pool",
        "max_pool",
    ];
    let all = structural.into_iter();
    let all = all.chain(UnaryOp::ALL.iter().map(|u| u.name())).chain(BinaryOp::ALL.iter().map(|b| b.name()));
    let missing: Vec<&str> = all.filter(|name| !seen.contains(name)).collect();
    assert!(missing.is_empty(), "never generated: {missing:?}");
}
