//! Random graphs on the CPU backend, within the error bounds that come with them: raw and optimized, dense and strided
//! inputs, every memory mode.

mod support;

use oxidiff::backend::Tensor;
use oxidiff::ir::interp;
use oxidiff::ir::print_graph;
use oxidiff::ir::testing::{check_close, random_graph, random_inputs};
use oxidiff::memory;
use oxidiff::passes::{PassCtx, Precision, form_groups_for};
use oxidiff::plan::{self, MemoryMode, Plan, PlanOptions};
use oxidiff::target::Profile;
use std::sync::Arc;
use support::{Case, borrow, plan_of};

const SEEDS: std::ops::Range<u64> = 0..120;
const NODES: usize = 40;

fn raw_plan(graph: &oxidiff::ir::Graph, precision: Precision, device: &Profile) -> Plan {
    let groups = form_groups_for(graph, &PassCtx { precision, ..PassCtx::default() }, device).unwrap();
    let target = oxidiff::backend::by_name("cpu").unwrap().target();
    let plan = plan::build(Arc::new(graph.clone()), groups, &target, PlanOptions::default()).unwrap();
    plan::verify::verify(&plan).unwrap_or_else(|e| panic!("{e}\n{plan}"));
    plan
}

/// The same values with the dimensions stored in reverse order and a gap between elements.
fn strided(tensor: &interp::Tensor, memory: &mut Vec<u8>) -> Tensor {
    let size = tensor.dtype().size_bytes();
    let shape = tensor.shape().to_vec();
    let mut strides = vec![2i64; shape.len()];
    for i in 1..shape.len() {
        strides[i] = strides[i - 1] * shape[i - 1].max(1);
    }
    memory.clear();
    memory.resize(tensor.numel() * 2 * size, 0);
    let mut index = vec![0i64; shape.len()];
    for element in tensor.bytes().chunks(size) {
        let at: i64 = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
        memory[at as usize * size..][..size].copy_from_slice(element);
        for d in (0..shape.len()).rev() {
            index[d] += 1;
            if index[d] < shape[d] {
                break;
            }
            index[d] = 0;
        }
    }
    Tensor { ptr: memory.as_mut_ptr(), dtype: tensor.dtype(), shape, strides }
}

fn check(seed: u64, plan: Plan, what: &str) {
    let random = random_graph(seed, NODES);
    let graph = &random.graph;
    let text = format!("seed {seed}, {what}\n{}\n{plan}", print_graph(graph));
    let weights = random_inputs(graph, &graph.sample_bindings()[0], seed).unwrap().1;
    let case = Case::with_weights(graph.clone(), plan, weights);
    for bindings in graph.sample_bindings() {
        let workspace = case.executable.program().peek(&bindings).unwrap();
        let workspace = workspace.workspace();
        memory::verify::verify(&workspace.requests, &workspace.layout).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert!(workspace.layout.bytes >= workspace.layout.lower_bound_bytes, "{text}");
        let inputs = random_inputs(graph, &bindings, seed).unwrap().0;
        let exact = interp::run_f64(graph, &bindings, &inputs, &case.weights).unwrap();
        let dense: Vec<Tensor> = inputs.iter().map(borrow).collect();
        let mut memory = vec![Vec::new(); inputs.len()];
        let loose: Vec<Tensor> = inputs.iter().zip(&mut memory).map(|(t, m)| strided(t, m)).collect();
        for arguments in [dense, loose] {
            let got = case.run(&arguments, &bindings).unwrap_or_else(|e| panic!("{e} at {bindings:?}\n{text}"));
            check_close(&got, &exact, &random.tolerance, 1.0).unwrap_or_else(|e| panic!("{e} at {bindings:?}\n{text}"));
        }
    }
}

#[test]
fn raw_graphs() {
    for seed in SEEDS {
        // Every other graph is grouped as for a card on which launches are what costs.
        let device = if seed % 2 == 0 { &Profile::CPU } else { Profile::named("H100").unwrap() };
        check(seed, raw_plan(&random_graph(seed, NODES).graph, Precision::Eager, device), "raw");
    }
}

#[test]
fn optimized_graphs() {
    let modes = [(Precision::Eager, MemoryMode::Low), (Precision::Fast, MemoryMode::Fast)];
    for seed in SEEDS {
        for (precision, memory) in modes {
            let plan = plan_of(random_graph(seed, NODES).graph, precision, memory);
            check(seed, plan, &format!("{precision:?} {memory:?}"));
        }
    }
}
