//! Golden tests of plans and arenas: `tests/golden/plan/<case>.ir` holds a graph, `// ----`, the plan of its optimized form,
//! and the arena at every sample. `OXIDIFF_BLESS=1` writes what came out into the file; review the difference.

mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use oxidiff::ir::{Dim, Graph};
use oxidiff::passes::{PassCtx, Precision, form_groups};
use oxidiff::plan::{BufferKind, MemoryMode, Plan, PlanOptions, Workspace, build};
use oxidiff::select::Kernel;
use oxidiff::target::Target;
use support::{graph_of, plan_of, program_of};

const RULE: &str = "// ----\n";

fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/plan");
    let files = fs::read_dir(root).expect("the golden folder is there");
    let mut cases: Vec<PathBuf> = files.map(|file| file.expect("readable").path()).collect();
    cases.sort();
    cases
}

/// The plan without the line that names the machine, and its arenas.
fn run(input: &str) -> String {
    let graph = graph_of(input);
    let samples = graph.sample_bindings();
    let program = program_of(graph.clone(), plan_of(graph, Precision::Eager, MemoryMode::Fast), "null");
    let plan = program.plan.to_string();
    let mut text = plan.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned());
    for bindings in samples {
        let specialized = program.specialize(&bindings).unwrap();
        text += &format!("arena at {bindings:?}:\n{}", specialized.workspace().text());
    }
    text
}

#[test]
fn plans_are_as_expected() {
    let bless = std::env::var_os("OXIDIFF_BLESS").is_some();
    let mut wrong = Vec::new();
    for path in cases() {
        let text = fs::read_to_string(&path).expect("readable");
        let (input, expected) = text.split_once(RULE).expect("a rule between graph and plan");
        let got = run(input);
        if bless {
            fs::write(&path, format!("{input}{RULE}{got}")).expect("writable");
        } else if got != expected {
            wrong.push(format!("{}:\n{got}", path.display()));
        }
    }
    assert!(wrong.is_empty(), "OXIDIFF_BLESS=1 accepts these:\n{}", wrong.join("\n"));
}

#[test]
fn equal_sizes_are_shared_and_stay_what_they_are() {
    let mut counts = Vec::new();
    for case in cases() {
        let text = fs::read_to_string(&case).unwrap();
        let mut plan = plan_in_order(graph_of(text.split_once(RULE).unwrap().0));
        let before = plan.to_string();
        let distinct = plan.share_sizes();
        assert_eq!(plan.to_string(), before, "{}", case.display());
        assert_eq!(plan.share_sizes(), distinct);
        counts.push(distinct);
    }
    assert!(counts.iter().any(|&distinct| distinct > 1), "{counts:?}");
}

/// Two large values, made one after the other, each of which is used up by one product.
const TWO_BRANCHES: &str = "symbol s0 \"batch\" = [2, 24]
input 0 \"x\": f32[s0,16]
parameter 0 \"up\": f32[512,16]
parameter 1 \"to\": f32[512,16]
parameter 2 \"down\": f32[16,512]
%0: f32[s0,16] = input() {index=0}
%1: f32[512,16] = parameter() {index=0}
%2: f32[512,16] = parameter() {index=1}
%3: f32[16,512] = parameter() {index=2}
%4: f32[s0,512] = linear(%0, %1)
%5: f32[s0,512] = linear(%0, %2)
%6: f32[s0,16] = linear(%4, %3)
%7: f32[s0,16] = linear(%5, %3)
return %6, %7
";

fn plan_in_order(graph: Graph) -> Plan {
    let graph = Arc::new(graph);
    let groups = form_groups(&graph, &PassCtx { precision: Precision::Eager, ..PassCtx::default() }).unwrap();
    build(graph, groups, &Target::host(), PlanOptions::default()).unwrap()
}

fn arena_bytes(plan: Plan) -> usize {
    Workspace::of(&Arc::new(plan), &[24], &[]).unwrap().bytes()
}

#[test]
fn a_large_value_is_used_up_before_the_next_one_is_made() {
    let one = 24 * 512 * 4;
    let mut plan = plan_in_order(graph_of(TWO_BRANCHES));
    assert_eq!(arena_bytes(plan.clone()), 2 * one);
    assert!(plan.reorder().unwrap());
    oxidiff::plan::verify::verify(&plan).unwrap();
    assert_eq!(arena_bytes(plan.clone()), one);
    assert!(!plan.reorder().unwrap(), "nothing is left to gain");
}

/// Three writes into slices of one tensor; what was there before the first one is returned too.
const WRITES: &str = "symbol s0 \"batch\" = [2, 24]
input 0 \"x\": f32[s0,512]
input 1 \"y\": f32[s0,64]
%0: f32[s0,512] = input() {index=0}
%1: f32[s0,64] = input() {index=1}
%2: f32[s0,512] = exp(%0)
%3: f32[s0,64] = neg(%1)
%4: f32[s0,512] = slice_scatter(%2, %1) {dim=1, start=0, step=1}
%5: f32[s0,512] = slice_scatter(%4, %3) {dim=1, start=64, step=1}
%6: f32[s0,512] = slice_scatter(%5, %1) {dim=1, start=128, step=2}
return %6, %2
";

#[test]
fn writes_into_slices_copy_the_whole_once() {
    let copies = |text: &str| {
        let plan = plan_in_order(graph_of(text));
        oxidiff::plan::verify::verify(&plan).unwrap();
        let sizes = plan.steps.iter().filter(|step| step.kernel == Kernel::Copy).map(|step| &step.stores[0].shape[1]);
        (sizes.filter_map(Dim::as_constant).collect::<Vec<_>>(), arena_bytes(plan))
    };
    let small = 24 * 64 * 4;
    assert_eq!(copies(WRITES), (vec![512, 64, 64, 64], small));
    // Nobody asks for what was there before: all is written where the caller wants it.
    assert_eq!(copies(&WRITES.replace("%6, %2", "%6")), (vec![64, 64, 64], small));
    // Something else reads what the next write changes: that needs a place of its own.
    let read = WRITES.replace("%6: f32[s0,512] = slice_scatter(%5, %1)", "%7: f32[s0,512] = slice_scatter(%5, %6)");
    let read =
        read.replace("%7: ", "%6: f32[s0,64] = slice(%4) {dim=1, start=0, step=1}\n%7: ").replace("%6, %2", "%7");
    assert_eq!(copies(&read), (vec![64, 512, 64, 64], small + 24 * 512 * 4));
}

/// Two weights of 8 MiB that `forward` makes of bytes, and a bias that it makes of another vector.
const DEQUANTISED: &str = "symbol s0 \"batch\" = [2, 24]
input 0 \"x\": f32[s0,512]
parameter 0 \"first\": i8[4096,512]
parameter 1 \"first_scale\": f32[4096,1]
parameter 2 \"second\": i8[512,4096]
parameter 3 \"second_scale\": f32[512,1]
parameter 4 \"bias\": f32[512]
%0: f32[s0,512] = input() {index=0}
%1: i8[4096,512] = parameter() {index=0}
%2: f32[4096,1] = parameter() {index=1}
%3: i8[512,4096] = parameter() {index=2}
%4: f32[512,1] = parameter() {index=3}
%5: f32[512] = parameter() {index=4}
%6: f32[4096,512] = convert(%1)
%7: f32[4096,512] = mul(%6, %2)
%8: f32[s0,4096] = linear(%0, %7)
%9: f32[512,4096] = convert(%3)
%10: f32[512,4096] = mul(%9, %4)
%11: f32[512] = exp(%5)
%12: f32[s0,512] = linear(%8, %10, %11)
return %12
";

#[test]
fn what_is_as_large_as_a_weight_is_kept_if_memory_allows() {
    let graph = Arc::new(graph_of(DEQUANTISED));
    let one = 4096 * 512 * 4;
    for (memory, kept) in [
        // Both weights, as numbers and scaled, and the bias.
        (MemoryMode::Fast, 4 * one + 512 * 4),
        (MemoryMode::Balanced, 512 * 4),
        (MemoryMode::Low, 512 * 4),
    ] {
        let ctx = PassCtx { kept_bytes: memory.kept_bytes(), ..PassCtx::default() };
        let groups = form_groups(&graph, &ctx).unwrap();
        let options = PlanOptions { memory, ..PlanOptions::default() };
        let mut plan = build(graph.clone(), groups, &Target::host(), options).unwrap();
        plan.reorder().unwrap();
        oxidiff::plan::verify::verify(&plan).unwrap();
        let bytes = plan.buffers_of(|kind| kind == BufferKind::Derived).map(|(_, buffer)| {
            usize::try_from(buffer.numel.as_constant().unwrap()).unwrap() * buffer.dtype.size_bytes()
        });
        assert_eq!(bytes.sum::<usize>(), kept, "{memory:?}");
        if memory != MemoryMode::Fast {
            // One weight at a time, and no more of it than what the product reads and what that is made of.
            assert!(arena_bytes(plan) <= 2 * one + 24 * 4096 * 4);
        }
    }
}
