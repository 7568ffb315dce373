//! Generated kernels run on this processor (`tests/cuda/shim.h`) behind a stand-in driver (`tests/cuda/fake_driver.cpp`),
//! through the backend as it is: lowering, specialization, arena, arguments, launches, graphs. Results are compared with the
//! interpreter's in f64.

#[path = "backends/cases.rs"]
mod cases;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/harness.rs"]
mod harness;
mod support;
#[path = "cuda/toolkit.rs"]
mod toolkit;

use std::sync::{Arc, Mutex};

use cases::CASES;
use emulator::{Count, Placement, alone, backend, fake_driver, place_operands};
use harness::{OnDevice, run_here};
use oxidiff::backend::Tensor;
use oxidiff::backend::cuda::Cuda;
use oxidiff::backend::weights::Weight;
use oxidiff::ir::{DType, Graph, interp, parse_graph};
use oxidiff::passes::Precision;
use oxidiff::plan::MemoryMode;
use oxidiff::runtime::Executable;
use support::{Random, borrow, plan_of, program_of, relative, weights_of};

/// Orders in which warps take turns that a kernel is run in, each at every size; `OXIDIFF_CUDA_SCHEDULES=n` for more of them.
const SCHEDULES: usize = 4;

/// A stream beside the default one, which cannot be captured.
const SIDE: usize = 0x50;

fn schedules() -> usize {
    let asked = std::env::var("OXIDIFF_CUDA_SCHEDULES").ok();
    asked.map_or(SCHEDULES, |n| n.parse().unwrap_or_else(|e| panic!("OXIDIFF_CUDA_SCHEDULES={n}: {e}")))
}

/// A backend on a device whose blocks may ask for so many bytes of shared memory; 0 for as many as its architecture has.
fn backend_with(block_bytes: i32, edit: fn(String) -> String) -> Option<Cuda> {
    fake_driver()?.block_bytes(block_bytes);
    let cuda = backend(edit);
    fake_driver()?.block_bytes(0);
    cuda
}

/// Launched, then replayed, warps in another order each time. What is read or written beside an allocation shows, behind it
/// and before it in turn.
fn check(cuda: &Cuda, graph: &Graph, precision: Precision, terms: usize) -> Result<(), String> {
    let (driver, count) = (fake_driver().unwrap(), schedules());
    let mut seed = 0;
    place_operands(Placement::End);
    let outcome = harness::check(cuda, graph, precision, terms, &mut |round| {
        seed = 6 * round as u32 + 1;
        driver.seed(seed);
        place_operands(if round % 2 == 0 { Placement::End } else { Placement::Beginning });
        round < count
    });
    place_operands(Placement::AsTheDriver);
    outcome.map_err(|e| format!("warps in the order of seed {seed}: {e}"))
}

/// The cases in one element type: bf16 differs from f16 by two conversions, which the kernels of the UNet have too.
#[test]
fn cases_on_cuda() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    let mut failures = Vec::new();
    for case in CASES {
        let texts = case.texts();
        let text = texts.get(1).unwrap_or(&texts[0]);
        if let Err(e) = check(&cuda, &parse_graph(text).unwrap(), Precision::Fast, case.terms) {
            failures.push(format!("`{}`: {e}\n{text}", case.name));
        }
    }
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

/// Group norms of images that a block has no room for.
#[test]
fn large_group_norms() {
    let _alone = alone();
    let Some(cuda) = backend_with(1, |text| text) else { return };
    let mut count = 0;
    for case in CASES.iter().filter(|case| case.lines.iter().any(|line| line.contains("group_norm("))) {
        let texts = case.texts();
        check(&cuda, &parse_graph(texts.get(1).unwrap_or(&texts[0])).unwrap(), Precision::Fast, case.terms)
            .unwrap_or_else(|e| panic!("`{}`: {e}", case.name));
        count += 1;
    }
    assert!(count > 10, "{count} cases");
}

/// Attention in bf16 is another instruction of the tensor cores.
#[test]
fn attention_in_bf16() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    let mut count = 0;
    for case in CASES.iter().filter(|case| case.name.contains("attention")) {
        let graph = parse_graph(&case.texts()[2]).unwrap();
        check(&cuda, &graph, Precision::Fast, case.terms).unwrap_or_else(|e| panic!("`{}`: {e}", case.name));
        count += 1;
    }
    assert!(count > 10, "{count} cases");
}

/// A key that is not a number shows in every row, also in those that a mask of bool hides it from, as in eager; rows that see
/// nothing are zeros.
#[test]
fn hidden_scores_may_be_no_numbers() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    for dtype in [DType::F32, DType::F16] {
        let values = |n: i64| (0..n).map(|i| ((i * 5) % 11) as f64 / 8.0 - 0.6).collect::<Vec<f64>>();
        let (q, mut k) = (values(2 * 20 * 16), values(2 * 20 * 16));
        k[20 * 16 + 16 * 19] = f64::NAN;
        let mask: Vec<f64> =
            (0..20 * 20).map(|i| f64::from(i / 20 != 5 && (i / 20 % 2 == 1 || i % 20 != 19))).collect();
        let tensor = |dtype, shape: &[i64], values: &[f64]| interp::Tensor::from_f64(dtype, shape, values).unwrap();
        let inputs =
            [tensor(dtype, &[2, 20, 16], &q), tensor(dtype, &[2, 20, 16], &k), tensor(DType::Bool, &[20, 20], &mask)];
        let text = format!(
            "input 0 \"q\": {dtype}[2,20,16]\ninput 1 \"k\": {dtype}[2,20,16]\ninput 2 \"m\": bool[20,20]\n\
             %0: {dtype}[2,20,16] = input() {{index=0}}\n%1: {dtype}[2,20,16] = input() {{index=1}}\n\
             %2: bool[20,20] = input() {{index=2}}\n%3: {dtype}[2,20,16] = \
             scaled_dot_product_attention(%0, %1, %1, %2) {{is_causal=false, scale=0.25}}\nreturn %3\n"
        );
        let graph = parse_graph(&text).unwrap();
        let want = interp::run_f64(&graph, &[], &inputs, &[]).unwrap().remove(0).to_f64();
        let ours = OnDevice::new(&cuda, &graph, Precision::Fast, &[]);
        let got = ours.run(&[], &inputs).remove(0).to_f64();
        assert!(want.iter().any(|x| x.is_nan()) && want.contains(&0.0));
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() < 1e-2 || (got.is_nan() && want.is_nan()), "{dtype}: {at}: {got}, not {want}");
        }
    }
}

/// Reductions that threads share, in the other two element types.
#[test]
fn reductions_in_other_types() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    let mut count = 0;
    let reduces = |line: &&str| [" sum(", " mean(", " amax("].iter().any(|op| line.contains(op));
    for case in CASES.iter().filter(|case| case.lines.iter().any(reduces)) {
        let texts = case.texts();
        for text in texts.iter().step_by(2) {
            check(&cuda, &parse_graph(text).unwrap(), Precision::Fast, case.terms)
                .unwrap_or_else(|e| panic!("`{}`: {e}", case.name));
            count += 1;
        }
    }
    assert!(count > 20, "{count} cases");
}

/// What is not a number, and what is infinite, comes out of a reduction as out of the interpreter.
#[test]
fn reductions_of_no_numbers() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    let mut values: Vec<f64> = (0..4 * 300).map(|i| f64::from(i * 7 % 23) / 4.0 - 9.0).collect();
    values[5] = f64::NAN;
    values[300 + 299] = f64::INFINITY;
    values[600] = f64::NEG_INFINITY;
    let x = [interp::Tensor::from_f64(DType::F16, &[4, 300], &values).unwrap()];
    let mut text = "input 0 \"x\": f16[4,300]\n%0: f16[4,300] = input() {index=0}\n".to_owned();
    for (at, op) in ["sum", "mean", "amax", "amin"].iter().enumerate() {
        text += &format!("%{}: f16[4] = {op}(%0) {{dims=[1], keepdim=false}}\n", 2 * at + 1);
        text += &format!("%{}: f16[300] = {op}(%0) {{dims=[0], keepdim=false}}\n", 2 * at + 2);
    }
    let graph = parse_graph(&format!("{text}return %1, %2, %3, %4, %5, %6, %7, %8\n")).unwrap();
    let wanted = interp::run_f64(&graph, &[], &x, &[]).unwrap();
    let got = OnDevice::new(&cuda, &graph, Precision::Fast, &[]).run(&[], &x);
    assert_eq!(wanted.len(), 8);
    for (result, (got, want)) in got.iter().zip(&wanted).enumerate() {
        assert!(want.to_f64().iter().any(|x| !x.is_finite()), "result {result}");
        for (at, (got, want)) in got.to_f64().into_iter().zip(want.to_f64()).enumerate() {
            let same = got == want || (got.is_nan() && want.is_nan()) || (got - want).abs() <= want.abs() * 2e-3;
            assert!(same, "result {result}, element {at}: {got}, not {want}");
        }
    }
}

/// Rows that several warps share, of which a block has several; a mean of columns; sums of a part of a warp.
const REDUCTIONS: &str = r#"symbol s0 "batch" = [3]
symbol s1 "rows" = [10]
input 0 "x": f32[s0,s1,1000]
%0: f32[s0,s1,1000] = input() {index=0}
%1: f32[s0,s1] = sum(%0) {dims=[2], keepdim=false}
%2: f32[s0,1000] = mean(%0) {dims=[1], keepdim=false}
%3: f32[s0] = sum(%1) {dims=[1], keepdim=false}
return %1, %2, %3
"#;

#[test]
fn a_wrong_reduction_is_noticed() {
    let edits: [(&str, Edit); 6] = [
        ("the barrier before the parts of warps are joined", |text| {
            without_statement(&text, "float* own = partial", "__syncthreads()")
        }),
        ("the barrier before the parts of columns are joined", |text| {
            without_statement(&text, "float own[V]", "__syncthreads()")
        }),
        ("parts of another result", |text| replaced(&text, "partial + threadIdx.y * (blockDim.x / 32)", "partial")),
        ("a shuffle's distance", |text| {
            replaced(&text, "(blockDim.x < 32 ? blockDim.x : 32) >> 1", "(blockDim.x < 32 ? blockDim.x : 32) >> 2")
        }),
        ("a shuffle's mask", |text| {
            replaced(&text, "__shfl_xor_sync(0xffffffffu, all, step)", "__shfl_xor_sync(0xffffu, all, step)")
        }),
        ("results that are not there", |text| replaced(&text, "if (is_there && lane", "if (lane")),
    ];
    each_is_noticed(REDUCTIONS, 1000, |text| text, &edits);
}

/// SD1.5's UNet with small widths, as captured: planned, placed, launched, made a graph, replayed with other tensors, at two
/// sizes. The result is the CPU backend's, within what two orders of f32 sums may differ by over its depth.
#[test]
fn a_unet_runs_as_on_the_cpu() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    let driver = fake_driver().unwrap();
    let graph = parse_graph(include_str!("cuda/data/sd15_unet_tiny.ir")).unwrap();
    let weights = weights_of(&graph);
    let ours = OnDevice::new(&cuda, &graph, Precision::Eager, &weights);
    let cpu = program_of(graph.clone(), plan_of(graph.clone(), Precision::Eager, MemoryMode::Fast), "cpu");
    let bound = weights.iter().map(|w| Weight::borrowed(borrow(w))).collect();
    let cpu = Executable::new(Arc::new(cpu), bound).unwrap();
    let mut random = Random(5);
    let started = [Count::Launches, Count::GraphLaunches, Count::Graphs, Count::Allocations].map(|c| driver.count(c));
    for (turn, bindings) in [[1, 8, 8, 7], [2, 16, 8, 5]].iter().enumerate() {
        let allocated = driver.count(Count::Allocations);
        for round in 0..3 {
            let types = graph.inputs.iter().map(|i| (i.ty.dtype, i.ty.concrete(bindings).unwrap()));
            let inputs: Vec<interp::Tensor> =
                types.map(|(dtype, shape)| support::random(&mut random, dtype, &shape, 900)).collect();
            let (got, want) = (run_here(&ours.executable, bindings, &inputs), run_here(&cpu, bindings, &inputs));
            let error = relative(&got[0], &want[0]);
            assert!(error < 2e-5, "at {bindings:?}, round {round}: {error:e}");
        }
        assert_eq!(driver.count(Count::Graphs) - started[2], turn as i64 + 1, "one graph per size");
        assert_eq!(driver.count(Count::GraphLaunches) - started[1], 2 * (turn as i64 + 1), "all runs but the first");
        if turn > 0 {
            // The workspace of the larger size takes the place of the smaller one's.
            assert!(
                driver.count(Count::Allocations) - allocated <= 1,
                "a new size allocates its workspace and no more"
            );
        }
    }
    assert!(driver.count(Count::Updates) > 0, "other tensors reach the graph");
    // What the caller captures is made of launches.
    let (launches, graphs) = (driver.count(Count::Launches), driver.count(Count::GraphLaunches));
    let inputs: Vec<interp::Tensor> = graph
        .inputs
        .iter()
        .map(|i| support::random(&mut random, i.ty.dtype, &i.ty.concrete(&[1, 8, 8, 7]).unwrap(), 900))
        .collect();
    let memory = || [Count::Allocations, Count::Frees].map(|c| driver.count(c));
    let call = ours.call_on(SIDE, &[1, 8, 8, 7], &inputs);
    let [allocated, freed] = memory();
    let (outcome, recording) = driver.capture(SIDE, || ours.launch(&call));
    outcome.unwrap();
    assert!(driver.count(Count::Launches) > launches && driver.count(Count::GraphLaunches) == graphs);
    recording.replay();
    drop(recording);
    assert_eq!(
        memory(),
        [allocated + 1, freed + 1],
        "its workspace is its own: the graph runs later, beside other calls"
    );
    let got = ours.read(&call).unwrap();
    assert!(relative(&got[0], &run_here(&cpu, &[1, 8, 8, 7], &inputs)[0]) < 2e-5);
}

/// An argument and a weight that do not lie dense are copied by a kernel that takes any strides.
#[test]
fn strided_arguments_and_weights_are_read() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    let text = "symbol s0 \"rows\" = [3]\ninput 0 \"x\": f32[s0,4]\nparameter 0 \"w\": f32[5,4]\n\
                %0: f32[s0,4] = input() {index=0}\n%1: f32[5,4] = parameter() {index=0}\n\
                %2: f32[s0,5] = linear(%0, %1)\nreturn %2\n";
    let graph = parse_graph(text).unwrap();
    let numbers = |count: usize| (0..count).map(|i| (i * i % 11) as f32 - 5.0).collect::<Vec<f32>>();
    let (x, w) = (numbers(12), numbers(20));
    let turned = |values: &[f32], rows: i64, cols: i64| Tensor {
        ptr: values.as_ptr().cast::<u8>().cast_mut(),
        dtype: oxidiff::ir::DType::F32,
        shape: vec![rows, cols],
        strides: vec![1, rows],
    };
    let ours = OnDevice::new(&cuda, &graph, Precision::Eager, &weights_of(&graph)).executable;
    ours.set_weights(vec![Weight::borrowed(turned(&w, 5, 4))], &[0], &[], 0).unwrap();
    let mut out = vec![0f32; 15];
    let result = Tensor::dense(out.as_mut_ptr().cast(), oxidiff::ir::DType::F32, &[3, 5]);
    // SAFETY: argument, weight and result live in the vectors above.
    unsafe { ours.run(&[turned(&x, 3, 4)], &[result], &[3], None).unwrap() };
    for (at, got) in out.iter().enumerate() {
        let (row, col) = (at / 5, at % 5);
        let want: f32 = (0..4).map(|k| x[k * 3 + row] * w[k * 5 + col]).sum();
        assert_eq!(*got, want, "at {row}, {col}");
    }
}

/// Graphs whose kernels have barriers, shuffles and offsets to break.
const BREAKABLE: &str = r#"symbol s0 "batch" = [2]
symbol s1 "rows" = [70]
input 0 "x": f32[s0,s1,72]
parameter 0 "w": f32[80,72]
parameter 1 "b": f32[80]
%0: f32[s0,s1,72] = input() {index=0}
%1: f32[80,72] = parameter() {index=0}
%2: f32[80] = parameter() {index=1}
%3: f32[s0,s1,72] = softmax(%0) {dim=2}
%4: f32[s0,s1,80] = linear(%0, %1, %2)
%5: f32[s0,s1,80] = silu(%4)
%6: f32[s0,72,s1] = permute(%0) {dims=[0, 2, 1]}
%7: f32[s0,72,s1] = neg(%6)
return %3, %5, %7
"#;

/// Attention on tensor cores: two blocks of queries, three of keys.
const ATTENTION: &str = r#"symbol s0 "batch" = [2]
symbol s1 "rows" = [70]
input 0 "q": f16[s0,s1,40]
input 1 "k": f16[s0,150,40]
input 2 "v": f16[s0,150,40]
%0: f16[s0,s1,40] = input() {index=0}
%1: f16[s0,150,40] = input() {index=1}
%2: f16[s0,150,40] = input() {index=2}
%3: f16[s0,s1,40] = scaled_dot_product_attention(%0, %1, %2) {is_causal=false, scale=0.158}
return %3
"#;

/// Removes occurrence `at` of `what`, which must be there.
fn without(text: &str, what: &str, at: usize) -> String {
    let place = text.match_indices(what).nth(at).unwrap_or_else(|| panic!("no {what} to remove")).0;
    format!("{}{}", &text[..place], &text[place + what.len()..])
}

#[test]
fn an_intact_kernel_passes() {
    let _alone = alone();
    let Some(cuda) = backend(|text| text) else { return };
    check(&cuda, &parse_graph(BREAKABLE).unwrap(), Precision::Fast, 100).unwrap();
}

#[test]
fn a_missing_barrier_is_noticed() {
    // Those of the product's loop, between filling a slice and reading it.
    let edits: [(&str, Edit); 2] = [
        ("the barrier after a slice is filled", |text| without_statement(&text, "sb[k * 68", "__syncthreads()")),
        ("the barrier before a slice is filled again", |text| {
            without_statement(&text, "acc[i][n] = fmaf", "__syncthreads()")
        }),
    ];
    each_is_noticed(BREAKABLE, 100, |text| text, &edits);
}

#[test]
fn a_wrong_offset_or_argument_is_noticed() {
    let edits: [(&str, Edit); 3] = [
        ("an offset", |text| text.replacen("a_row[i] = bo0 + ao0;", "a_row[i] = bo0 + ao0 + 1;", 1)),
        ("swapped operands", |text| text.replace("fmaf(x[i], y[n], acc[i][n])", "fmaf(x[n], y[i], acc[i][n])")),
        ("a shuffle's distance within a short row", |text| {
            replaced(
                &text,
                "step = blockDim.x >> 1; step; step >>= 1) x = m_max",
                "step = blockDim.x >> 2; step; step >>= 1) x = m_max",
            )
        }),
    ];
    each_is_noticed(BREAKABLE, 100, |text| text, &edits);
}

/// One occurrence, which must be there, replaced.
fn replaced(text: &str, what: &str, by: &str) -> String {
    assert!(text.contains(what), "no {what} to replace");
    text.replacen(what, by, 1)
}

#[test]
fn a_wrong_attention_is_noticed() {
    // Of the two barriers of a turn, in the kernel's own text: before keys and values are overwritten, and before they are read.
    const TURN: &str = "first += KEYS";
    let edits: [(&str, Edit); 7] = [
        ("the barrier before a tile is overwritten", |text| {
            behind(&text, TURN, |rest| without(rest, "__syncthreads();", 0))
        }),
        ("the barrier before a tile is read", |text| behind(&text, TURN, |rest| without(rest, "__syncthreads();", 1))),
        ("rows of a product", |text| replaced(&text, "row + (r & 1) * 8", "row + (r >> 1) * 8")),
        ("swapped values", |text| replaced(&text, "word_of(even.of[j], odd.of[j])", "word_of(odd.of[j], even.of[j])")),
        ("keys behind the last", |text| replaced(&text, "key >= N ?", "false ?")),
        ("sums that are not scaled down", |text| replaced(&text, "sums[d][2 * h] *= keep;", "")),
        ("a total of a part of the lanes", |text| {
            replaced(&text, "total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);", "")
        }),
    ];
    each_is_noticed(ATTENTION, 150, |text| text, &edits);
}

/// A way to break a kernel's text.
type Edit = fn(String) -> String;

/// The intact kernels of a graph pass, also after `same`, which must not change what they mean; each edit after it is noticed.
fn each_is_noticed(graph: &str, terms: usize, same: Edit, broken: &[(&str, Edit)]) {
    each_is_noticed_with(0, graph, terms, same, broken);
}

/// The same where blocks may ask for so many bytes of shared memory.
fn each_is_noticed_with(block_bytes: i32, graph: &str, terms: usize, same: Edit, broken: &[(&str, Edit)]) {
    static BEFORE: Mutex<(Edit, Edit)> = Mutex::new((|text| text, |text| text));
    let _alone = alone();
    let graph = parse_graph(graph).unwrap();
    for (name, edit) in [("nothing", (|text| text) as Edit)].iter().chain(broken) {
        *BEFORE.lock().unwrap() = (same, *edit);
        let edits = |text| {
            let (same, edit) = *BEFORE.lock().unwrap();
            edit(same(text))
        };
        let Some(cuda) = backend_with(block_bytes, edits) else { return };
        let outcome = check(&cuda, &graph, Precision::Fast, terms);
        match *name {
            "nothing" => outcome.unwrap(),
            _ => assert!(outcome.is_err(), "{name} went unnoticed"),
        }
    }
}

/// The text, edited from where `from` first stands, which must be there.
fn behind(text: &str, from: &str, edit: impl FnOnce(&str) -> String) -> String {
    let at = text.find(from).unwrap_or_else(|| panic!("no {from}"));
    format!("{}{}", &text[..at], edit(&text[at..]))
}

/// The first statement that begins so, behind `from`, removed.
fn without_statement(text: &str, from: &str, start: &str) -> String {
    behind(text, from, |rest| {
        let at = rest.find(start).unwrap_or_else(|| panic!("no {start} to remove"));
        let end = at + rest[at..].find(';').expect("the end of a statement") + 1;
        format!("{}{}", &rest[..at], &rest[end..])
    })
}

/// A block for each of eight groups of two images, in packs of four, whose threads have pixels of their own, some more than others.
const WHOLE_GROUPS: &str = r#"symbol s0 "height" = [20]
input 0 "x": f16[2,s0,11,96]
input 1 "r": f16[2,1,1,96]
parameter 0 "w": f16[96]
parameter 1 "b": f16[96]
%0: f16[2,s0,11,96] = input() {index=0}
%1: f16[2,1,1,96] = input() {index=1}
%2: f16[96] = parameter() {index=0}
%3: f16[96] = parameter() {index=1}
%4: f16[2,s0,11,96] = group_norm(%0, %2, %3) {num_groups=8, eps=1e-5, channel_dim=3}
%5: f16[2,s0,11,96] = add(%4, %1)
return %5
"#;

#[test]
fn a_wrong_norm_of_whole_groups_is_noticed() {
    // In the prelude: those of `block_sum`.
    let edits: [(&str, Edit); 8] = [
        ("the barrier before partial sums are overwritten", |text| without(&text, "__syncthreads();", 0)),
        ("the barrier before partial sums are read", |text| without(&text, "__syncthreads();", 1)),
        ("the group of another block", |text| {
            replaced(&text, "const u32 col = blockIdx.x %", "const u32 col = 0 * blockIdx.x %")
        }),
        ("the image of another block", |text| {
            replaced(&text, "image = blockIdx.x / (u32)", "image = 0 * blockIdx.x / (u32)")
        }),
        ("a pixel too many", |text| replaced(&text, "end = y < down ? (u32)", "end = y < down ? 1 + (u32)")),
        ("a place that another thread keeps something in", |text| {
            replaced(&text, "(kept + (pixel * packs + at) * V) = pack", "(kept + (pixel * packs + at / 2) * V) = pack")
        }),
        ("the mean of a warp", |text| {
            replaced(&text, "const float mean = block_sum(sum, partial)", "const float mean = warp_sum(sum)")
        }),
        ("swapped arguments", |text| text.replace("_body<4>(p0, ", "_body<4>(p1, ")),
    ];
    each_is_noticed(WHOLE_GROUPS, 1024, |text| text, &edits);
}

/// Where a block has room for a group, beyond what it need not ask for, a norm is one launch; else it is three.
#[test]
fn the_device_says_which_groups_are_kept() {
    let _alone = alone();
    let text = "symbol s0 \"height\" = [10, 20]\ninput 0 \"x\": f16[1,s0,32,96]\n%0: f16[1,s0,32,96] = input() {index=0}\n\
                %1: f16[1,s0,32,96] = group_norm(%0) {num_groups=2, eps=1e-5, channel_dim=3}\nreturn %1\n";
    let graph = parse_graph(text).unwrap();
    let mut random = Random(3);
    for (block_bytes, launches) in [(0, [1, 1]), (60 << 10, [1, 3]), (1, [3, 3])] {
        let Some(cuda) = backend_with(block_bytes, |text| text) else { return };
        let ours = OnDevice::new(&cuda, &graph, Precision::Fast, &[]);
        for (height, wanted) in [10, 20].into_iter().zip(launches) {
            let x = [support::random(&mut random, DType::F16, &[1, height, 32, 96], 900)];
            let before = fake_driver().unwrap().count(Count::Launches);
            let got = ours.run(&[height], &x).remove(0);
            assert_eq!(fake_driver().unwrap().count(Count::Launches) - before, wanted, "{block_bytes}, {height}");
            let want = interp::run_f64(&graph, &[height], &x, &[]).unwrap().remove(0);
            assert!(relative(&got, &want) < 1e-3);
        }
    }
}

/// Four chunks of pixels, of which the last is short, and two slices of the channels.
const GROUP_NORM: &str = r#"symbol s0 "height" = [20]
input 0 "x": f32[2,s0,11,480]
parameter 0 "w": f32[480]
parameter 1 "b": f32[480]
%0: f32[2,s0,11,480] = input() {index=0}
%1: f32[480] = parameter() {index=0}
%2: f32[480] = parameter() {index=1}
%3: f32[2,s0,11,480] = group_norm(%0, %1, %2) {num_groups=8, eps=1e-5, channel_dim=3}
return %3
"#;

#[test]
fn a_wrong_group_norm_is_noticed() {
    let edits: [(&str, Edit); 8] = [
        ("the barrier before threads are joined", |text| {
            without_statement(&text, "mine[2 * V] = seen;", "__syncthreads()")
        }),
        ("the barrier before channels are joined", |text| {
            without_statement(&text, "squares[pack * V + j] = m2[j];", "__syncthreads()")
        }),
        ("threads that are not joined", |text| {
            replaced(&text, "if (y < step && y + step < down)", "if (y < 1 && step < 2)")
        }),
        ("the first group of a slice", |text| replaced(&text, "first_group * wide + pack * V", "pack * V")),
        ("chunks that are not joined", |text| replaced(&text, "__shfl_down_sync(0xffffffffu, mean, step)", "mean")),
        ("a mean that one lane has", |text| without_statement(&text, "group_norm_finish", "mean = __shfl_sync(")),
        ("an offset", |text| replaced(&text, "first = at * (u32)chunk;", "first = at * (u32)chunk + 1;")),
        ("swapped arguments", |text| text.replace("p0, p1, p2, p3);", "p0, p2, p1, p3);")),
    ];
    each_is_noticed_with(1, GROUP_NORM, 512, |text| text, &edits);
}

/// Rows of more than two warps.
const ROWS: &str = r#"symbol s0 "rows" = [3]
input 0 "x": f32[s0,1100]
%0: f32[s0,1100] = input() {index=0}
%1: f32[s0,1100] = layer_norm(%0) {normalized_ndim=1, eps=1e-5}
%2: f32[s0,1100] = softmax(%0) {dim=1}
return %1, %2
"#;

#[test]
fn a_wrong_sum_within_a_row_is_noticed() {
    // In the prelude: the two of `block_sum`, then those of `block_max`, before which no kernel has used the same memory.
    let edits: [(&str, Edit); 5] = [
        ("a shuffle's distance", |text| {
            text.replace("int step = 16; step; step >>= 1", "int step = 8; step; step >>= 1")
        }),
        ("the barrier before partial sums are overwritten", |text| without(&text, "__syncthreads();", 0)),
        ("the barrier before partial sums are read", |text| without(&text, "__syncthreads();", 1)),
        ("the barrier before partial maxima are read", |text| without(&text, "__syncthreads();", 3)),
        ("a pack too many", |text| text.replace("; col += blockDim.x * V)", " + V; col += blockDim.x * V)")),
    ];
    each_is_noticed(ROWS, 1100, |text| text, &edits);
}

/// Tiles, of which the last are not full, for three images.
const TURNED: &str = r#"symbol s0 "rows" = [70]
input 0 "x": f16[3,s0,40]
%0: f16[3,s0,40] = input() {index=0}
%1: f16[3,40,s0] = permute(%0) {dims=[0, 2, 1]}
return %1
"#;

#[test]
fn a_wrong_transposition_is_noticed() {
    const FILL: &str = "tile[k * 33 + x] = ";
    // A block has several images only where there are more than a grid is deep: here the first one takes all.
    let same: Edit = |text| {
        let text = replaced(&text, "u32 z = blockIdx.z; z <", "u32 z = blockIdx.z ? ~0u : 0; z <");
        replaced(&text, "z += gridDim.z", "++z")
    };
    let edits: [(&str, Edit); 4] = [
        ("the barrier before a tile is read", |text| without_statement(&text, FILL, "__syncthreads()")),
        ("the barrier before a tile is overwritten", |text| {
            without_statement(&text, "= tile[x * 33 + k]", "__syncthreads()")
        }),
        ("an offset", |text| replaced(&text, "+ row0 + x + ", "+ row0 + x + 1 + ")),
        ("rows behind the last", |text| replaced(&text, "if (row0 + x < ", "if (row0 + x <= ")),
    ];
    each_is_noticed(TURNED, 1, same, &edits);
}

/// Few rows: a warp for a column, and warps without one.
const FEW_ROWS: &str = r#"symbol s0 "rows" = [3]
input 0 "x": f16[s0,72]
parameter 0 "w": f16[30,72]
%0: f16[s0,72] = input() {index=0}
%1: f16[30,72] = parameter() {index=0}
%2: f16[s0,30] = linear(%0, %1)
return %2
"#;

/// It has no barriers: lanes meet in the shuffles of `warp_sum`.
#[test]
fn a_wrong_product_of_few_rows_is_noticed() {
    const GEMV: &str = "OX_FN void gemv_";
    let edits: [(&str, Edit); 6] = [
        ("a column behind the last", |text| without_statement(&text, GEMV, "if (col >= ")),
        ("a row behind the last that is read", |text| without_statement(&text, GEMV, "if (row >= (int)")),
        ("a row behind the last that is written", |text| without_statement(&text, GEMV, "if (row >= (u32)")),
        ("terms behind the last", |text| replaced(&text, "; k += 32 * V)", " + V; k += 32 * V)")),
        ("a sum of one row for another", |text| replaced(&text, "if (lane == row) sum", "if (lane == row + 1) sum")),
        ("swapped arguments", |text| text.replace("(p0, p1, d0, d1, d2, p2);", "(p1, p0, d0, d1, d2, p2);")),
    ];
    each_is_noticed(FEW_ROWS, 72, |text| text, &edits);
}

/// Two blocks of queries, two of keys.
const CAUSAL: &str = r#"symbol s0 "rows" = [100]
input 0 "q": f16[2,s0,24]
input 1 "k": f16[2,s0,24]
input 2 "v": f16[2,s0,24]
%0: f16[2,s0,24] = input() {index=0}
%1: f16[2,s0,24] = input() {index=1}
%2: f16[2,s0,24] = input() {index=2}
%3: f16[2,s0,24] = scaled_dot_product_attention(%0, %1, %2) {is_causal=true, scale=0.2}
return %3
"#;

#[test]
fn a_wrong_edge_of_causal_attention_is_noticed() {
    let edits: [(&str, Edit); 6] = [
        ("a key too many", |text| replaced(&text, "key > at ?", "key > at + 1 ?")),
        ("a key too few", |text| replaced(&text, "key > at ?", "key >= at ?")),
        ("a tile too few", |text| replaced(&text, "blockIdx.x * 64 + 64 : N", "blockIdx.x * 64 : N")),
        // Both are hidden, or multiplied by zero, where they are numbers: only where they are read it shows.
        ("keys that are not there", |text| replaced(&text, "if (first + key < N) some", "some")),
        ("values that are not there", |text| replaced(&text, "if (key + 1 < N) odd", "odd")),
        ("swapped arguments", |text| text.replace("_body<8>(p0, p1, p2,", "_body<8>(p1, p0, p2,")),
    ];
    each_is_noticed(CAUSAL, 100, |text| text, &edits);
}

/// A warp for a query, which tensor cores do not compute.
const BY_WARPS: &str = r#"symbol s0 "rows" = [5]
input 0 "q": f32[2,s0,20]
input 1 "k": f32[2,70,20]
%0: f32[2,s0,20] = input() {index=0}
%1: f32[2,70,20] = input() {index=1}
%2: f32[2,s0,20] = scaled_dot_product_attention(%0, %1, %1) {is_causal=false, scale=0.2}
return %2
"#;

#[test]
fn a_wrong_attention_by_warps_is_noticed() {
    // The third barrier, before weights are overwritten, is one of memory alone: lanes have met in the shuffles before.
    let edits: [(&str, Edit); 4] = [
        ("the barrier before a query is read", |text| without_statement(&text, "sums[x] = 0.0f", "__syncwarp()")),
        ("the barrier before weights are read", |text| {
            without_statement(&text, "weights[lane] = weight", "__syncwarp()")
        }),
        ("a key behind the last", |text| replaced(&text, "if (key < last)", "if (key <= last)")),
        ("a maximum of one lane", |text| replaced(&text, "warp_max(score)", "score")),
    ];
    each_is_noticed(BY_WARPS, 70, |text| text, &edits);
}

/// Reads that no result depends on: behind the last element and before the first, of operands of two bytes.
#[test]
fn an_access_out_of_bounds_is_noticed() {
    const SUB: &str = r#"symbol s0 "rows" = [3]
input 0 "x": f16[s0,5]
input 1 "y": f16[s0,5]
%0: f16[s0,5] = input() {index=0}
%1: f16[s0,5] = input() {index=1}
%2: f16[s0,5] = sub(%0, %1)
return %2
"#;
    const READ: &str = "load<V>(a0, p0 + o0 + col);";
    let edits: [(&str, Edit); 3] = [
        ("an element behind the last", |text| {
            replaced(&text, READ, "(void)*(const volatile u16*)(p0 + o0 + col + V); load<V>(a0, p0 + o0 + col);")
        }),
        ("an element before the first", |text| {
            replaced(&text, READ, "(void)*(const volatile u16*)(p0 + o0 + col - V); load<V>(a0, p0 + o0 + col);")
        }),
        ("a result behind the last", |text| {
            replaced(
                &text,
                "store<V>(p2 + o2 + col, y0);",
                "store<V>(p2 + o2 + col + V, y0); store<V>(p2 + o2 + col, y0);",
            )
        }),
    ];
    each_is_noticed(SUB, 1, |text| text, &edits);
}
