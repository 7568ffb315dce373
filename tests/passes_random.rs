//! Every pass, the whole pipeline, and the groups formed behind it keep the meaning of random graphs.

use std::collections::{BTreeMap, BTreeSet};

use oxidiff::analysis::{ComputeClass, group_class};
use oxidiff::ir::interp::{self, Tensor};
use oxidiff::ir::testing::{RandomGraph, check_close, random_graph, random_inputs};
use oxidiff::ir::{BinaryOp, DType, Graph, Op, ValueId, ValueType, print_graph, verify_graph};
use oxidiff::kernel_ir::{self, Body, Group, Instr, Reg};
use oxidiff::passes::{PIPELINE, Pass, PassCtx, Precision, form_groups, form_groups_for};
use oxidiff::target::Profile;

const SEEDS: std::ops::Range<u64> = 0..150;
const NODES: usize = 50;
const PRECISIONS: [Precision; 2] = [Precision::Eager, Precision::Fast];

fn passes() -> Vec<Pass> {
    let mut seen = BTreeSet::new();
    PIPELINE.iter().map(|(pass, _)| *pass).filter(|p| seen.insert(p.name)).collect()
}

fn apply(pass: &Pass, graph: &Graph, ctx: &PassCtx, seed: u64) -> Graph {
    let place = || format!("seed {seed}, {}:\n{}", pass.name, print_graph(graph));
    let (new, _) = (pass.run)(graph, ctx).unwrap_or_else(|e| panic!("{e}: {}", place()));
    verify_graph(&new, pass.name).unwrap_or_else(|e| panic!("{e}: {}", place()));
    new
}

/// Runs `execute` on random inputs at every sample and compares with the exact result of the original graph.
fn check(random: &RandomGraph, seed: u64, what: &str, execute: impl Fn(&[i64], &[Tensor], &[Tensor]) -> Vec<Tensor>) {
    let graph = &random.graph;
    for bindings in graph.sample_bindings() {
        let (inputs, parameters) = random_inputs(graph, &bindings, seed).unwrap();
        let exact = interp::run_f64(graph, &bindings, &inputs, &parameters).unwrap();
        let got = execute(&bindings, &inputs, &parameters);
        check_close(&got, &exact, &random.tolerance, 1.0)
            .unwrap_or_else(|e| panic!("{e}\nseed {seed} at {bindings:?}: {what}\n{}", print_graph(graph)));
    }
}

#[test]
fn each_pass_keeps_the_meaning() {
    for seed in SEEDS {
        let random = random_graph(seed, NODES);
        for (pass, precision) in passes().iter().flat_map(|p| PRECISIONS.map(|r| (*p, r))) {
            let new = apply(&pass, &random.graph, &PassCtx { precision, ..PassCtx::default() }, seed);
            check(&random, seed, pass.name, |bindings, inputs, parameters| {
                interp::run(&new, bindings, inputs, parameters)
                    .unwrap_or_else(|e| panic!("{e}: seed {seed}, {}:\n{}", pass.name, print_graph(&new)))
            });
        }
    }
}

#[test]
fn pipeline_and_groups_keep_the_meaning() {
    for seed in SEEDS {
        let random = random_graph(seed, NODES);
        for precision in PRECISIONS {
            let ctx = PassCtx { precision, ..PassCtx::default() };
            let raw = random.graph.clone();
            let whole = PIPELINE.iter().fold(random.graph.clone(), |g, (pass, _)| apply(pass, &g, &ctx, seed));
            for graph in [raw, whole] {
                let device = if seed % 2 == 0 { &Profile::CPU } else { Profile::named("H100").unwrap() };
                let groups = form_groups_for(&graph, &ctx, device).unwrap();
                let text = || format!("{}\n{}", print_graph(&graph), kernel_ir::print(&graph, &groups));
                kernel_ir::verify(&graph, &groups).unwrap_or_else(|e| panic!("{e}: seed {seed}\n{}", text()));
                check(&random, seed, &text(), |bindings, inputs, parameters| {
                    Machine { graph: &graph, bindings, inputs, parameters, values: BTreeMap::new() }.run(&groups)
                });
            }
        }
    }
}

/// Running the pipeline again and again does not make a graph larger: rules do not feed each other. A view or two may
/// change places from run to run.
#[test]
fn pipeline_settles() {
    let ctx = PassCtx { precision: Precision::Fast, ..PassCtx::default() };
    for seed in SEEDS {
        let run = |graph: Graph| PIPELINE.iter().fold(graph, |g, (pass, _)| apply(pass, &g, &ctx, seed));
        let once = run(random_graph(seed, NODES).graph);
        let often = (0..3).fold(once.clone(), |g, _| run(g));
        let (first, last) = (once.nodes.len(), often.nodes.len());
        assert!(last <= first + 2, "seed {seed}: {first} nodes became {last}");
    }
}

/// Runs groups one after the other: roots by the interpreter, bodies instruction by instruction.
struct Machine<'a> {
    graph: &'a Graph,
    bindings: &'a [i64],
    inputs: &'a [Tensor],
    parameters: &'a [Tensor],
    values: BTreeMap<ValueId, Tensor>,
}

impl Machine<'_> {
    fn run(mut self, groups: &[Group]) -> Vec<Tensor> {
        for group in groups {
            if group.body.instrs.is_empty() {
                group.nodes.iter().for_each(|n| self.node(*n));
                continue;
            }
            if let Some(root) = group.root {
                self.node(root);
            }
            self.body(&group.body, group_class(self.graph, group), group.root);
        }
        self.graph.outputs.iter().map(|o| self.values[o].clone()).collect()
    }

    fn node(&mut self, v: ValueId) {
        let node = self.graph.node(v);
        let value = match node.op {
            Op::Input { index } => self.inputs[index as usize].clone(),
            Op::Parameter { index } => self.parameters[index as usize].clone(),
            _ => {
                let operands: Vec<&Tensor> = node.inputs.iter().map(|i| &self.values[i]).collect();
                interp::eval_node(self.graph, v, self.bindings, &operands).unwrap()
            }
        };
        self.values.insert(v, value);
    }

    fn body(&mut self, body: &Body, class: ComputeClass, root: Option<ValueId>) {
        let dtype = match class {
            ComputeClass::F32 => DType::F32,
            ComputeClass::F64 => DType::F64,
            ComputeClass::I64 => DType::I64,
        };
        let ty = ValueType::new(dtype, body.space.clone());
        let eval =
            |op: &Op, ty: &ValueType, operands: &[&Tensor]| interp::eval(op, ty, self.bindings, operands).unwrap();
        let broadcast = |t: &Tensor, dtype| {
            let wide = eval(&Op::Expand, &ValueType::new(t.dtype(), body.space.clone()), &[t]);
            wide.convert(dtype)
        };
        let truth = |t: &Tensor| t.convert(DType::Bool);
        let mut regs: Vec<Tensor> = Vec::new();
        for instr in &body.instrs {
            let reg = |r: &Reg| &regs[r.0 as usize];
            let value = match instr {
                Instr::Root => broadcast(&self.values[&root.expect("a root")], dtype),
                // A float that an integer loop converts is loaded as it is.
                Instr::Load(v) if class == ComputeClass::I64 && self.graph.ty(*v).dtype.is_float() => {
                    broadcast(&self.values[v], DType::F64)
                }
                Instr::Load(v) => broadcast(&self.values[v], dtype),
                Instr::Const(value) => eval(&Op::Full { value: *value }, &ty, &[]),
                Instr::Unary(op, a) if op.is_predicate() => {
                    let bools = ValueType::new(DType::Bool, body.space.clone());
                    eval(&Op::Unary(*op), &bools, &[reg(a)]).convert(dtype)
                }
                Instr::Unary(op, a) => eval(&Op::Unary(*op), &ty, &[reg(a)]),
                Instr::Binary(op, a, b) if op.is_predicate() => {
                    let bools = ValueType::new(DType::Bool, body.space.clone());
                    eval(&Op::Binary(*op), &bools, &[reg(a), reg(b)]).convert(dtype)
                }
                Instr::Binary(op, a, b) => eval(&Op::Binary(*op), &ty, &[reg(a), reg(b)]),
                Instr::Where(c, a, b) => eval(&Op::Where, &ty, &[&truth(reg(c)), reg(a), reg(b)]),
                Instr::Round(to, a) => reg(a).convert(*to).convert(dtype),
            };
            regs.push(value);
        }
        for (reg, v) in &body.stores {
            let value = regs[reg.0 as usize].convert(self.graph.ty(*v).dtype);
            self.values.insert(*v, value);
        }
    }
}

/// The machine above is no rubber stamp: a wrong instruction shows.
#[test]
fn machine_sees_a_wrong_body() {
    let mut graph = Graph::new();
    let x = graph.add_input("x", ValueType::new(DType::F32, vec![4.into()]));
    let ty = graph.ty(x).clone();
    let node = |op, inputs| oxidiff::ir::Node { op, inputs, ty: ty.clone(), path: Default::default() };
    let y = graph.push(node(Op::Binary(BinaryOp::Sub), vec![x, x]));
    graph.outputs.push(y);
    let mut groups = form_groups(&graph, &PassCtx::default()).unwrap();
    let input = Tensor::from_f64(DType::F32, &[4], &[1.0, 2.0, 3.0, 4.0]).unwrap();
    let run = |groups: &[Group]| {
        let machine = Machine {
            graph: &graph,
            bindings: &[],
            inputs: std::slice::from_ref(&input),
            parameters: &[],
            values: BTreeMap::new(),
        };
        machine.run(groups)[0].to_f64()
    };
    assert_eq!(run(&groups), [0.0; 4]);
    let body = &mut groups.last_mut().unwrap().body;
    body.instrs[1] = Instr::Binary(BinaryOp::Add, Reg(0), Reg(0));
    assert_eq!(run(&groups), [2.0, 4.0, 6.0, 8.0]);
}
