//! Properties that hold for every graph, on random ones.

use std::collections::BTreeSet;

use oxidiff::ir::interp::{run, run_f64};
use oxidiff::ir::testing::{check_close, random_graph, random_inputs};
use oxidiff::ir::{BinaryOp, DType, Op, UnaryOp, infer_type, parse_graph, print_graph, verify_graph, widened};

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

/// With f32 for f16 a graph is still one, takes and gives what it did, has no f16 inside, and is as near to exact arithmetic.
#[test]
fn widened_graphs_mean_the_same() {
    let mut changed = 0;
    for seed in SEEDS {
        let random = random_graph(seed, NODES);
        let wide = widened(&random.graph);
        let place = || format!("seed {seed}:\n{}", print_graph(&wide));
        verify_graph(&wide, "widened").unwrap_or_else(|e| panic!("{e}: {}", place()));
        for (old, new) in random.graph.outputs.iter().zip(&wide.outputs) {
            assert_eq!(random.graph.ty(*old), wide.ty(*new), "{}", place());
        }
        for v in wide.values().filter(|v| wide.ty(*v).dtype == DType::F16) {
            let is_given = wide.node(v).inputs.is_empty() && !matches!(wide.op(v), Op::Full { .. });
            assert!(is_given || (wide.is_output(v) && *wide.op(v) == Op::Convert), "{}", place());
        }
        changed += usize::from(wide != random.graph);
        for bindings in random.graph.sample_bindings() {
            let (inputs, parameters) = random_inputs(&random.graph, &bindings, seed).unwrap();
            let got = run(&wide, &bindings, &inputs, &parameters).unwrap_or_else(|e| panic!("{e}: {}", place()));
            let exact = run_f64(&random.graph, &bindings, &inputs, &parameters).unwrap();
            check_close(&got, &exact, &random.tolerance, 1.0).unwrap_or_else(|e| panic!("{e}: {}", place()));
        }
    }
    assert!(changed > SEEDS.end as usize / 4, "only {changed} graphs had f16 in them");
}

#[test]
fn widened_graphs_convert_what_they_take_and_give() {
    let graph = parse_graph(
        "input 0 \"x\": f16[2,8]
parameter 0 \"w\": f16[8,8]
%0: f16[2,8] = input() {index=0}
%1: f16[8,8] = parameter() {index=0}
%2: f16[2,8] = linear(%0, %1)
%3: f16[2,8] = full() {value=2.0}
%4: f16[2,8] = mul(%2, %3)
%5: bool[2,8] = gt(%4, %0)
return %4, %5, %0
",
    )
    .unwrap();
    let expected = "input 0 \"x\": f16[2,8]
parameter 0 \"w\": f16[8,8]
%0: f16[2,8] = input() {index=0}
%1: f32[2,8] = convert(%0)
%2: f16[8,8] = parameter() {index=0}
%3: f32[8,8] = convert(%2)
%4: f32[2,8] = linear(%1, %3)
%5: f32[2,8] = full() {value=2.0}
%6: f32[2,8] = mul(%4, %5)
%7: bool[2,8] = gt(%6, %1)
%8: f16[2,8] = convert(%6)
%9: f16[2,8] = convert(%1)
return %8, %7, %9
";
    assert_eq!(print_graph(&widened(&graph)), expected);
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
        "interpolate",
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
