//! Work that is done late, in other orders than it was given in: streams, threads, captures, memory that changes hands, behind a
//! stand-in driver that does what it is given as late as a device may (`fake_async` in `fake_driver.cpp`). And what the
//! stand-in refuses, as the driver does.

#[path = "backends/cases.rs"]
mod cases;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/harness.rs"]
mod harness;
mod support;

use std::sync::Arc;

use cudarc::driver::sys;
use emulator::{Count, FakeDriver, FakeLibrary, HostCompiler, alone, backend, fake_driver, with_stream};
use harness::{OnDevice, difference};
use oxidiff::backend::Memory;
use oxidiff::backend::cuda::cubins::Compiler;
use oxidiff::backend::cuda::delegate::Delegates;
use oxidiff::backend::cuda::driver::DriverMemory;
use oxidiff::backend::cuda::{Cuda, device};
use oxidiff::backend::weights::{Identity, Weight};
use oxidiff::ir::testing::random_inputs;
use oxidiff::ir::{Graph, interp, parse_graph};
use oxidiff::passes::Precision;
use oxidiff::plan::{MemoryMode, PlanOptions};
use oxidiff::runtime::Executable;
use support::{Random, borrow, plan_of, program_of, relative, weights_of};

/// The first is as late as can be; in the others something runs now and then that nobody waits for.
const SEEDS: [u32; 4] = [1, 2, 3, 6];
/// Streams beside the default one.
const SIDES: [usize; 3] = [0x10, 0x20, 0x30];

/// A constant, values that depend on weights alone, a norm, products.
const GRAPH: &str = r#"symbol s0 "batch" = [2, 3]
symbol s1 "rows" = [24, 40]
input 0 "x": f32[s0,s1,64]
parameter 0 "w": f32[48,64]
parameter 1 "b": f32[48]
parameter 2 "v": f32[4,48]
constant 0: f32[4] = 0x0000803f000000400000404000008040
%0: f32[s0,s1,64] = input() {index=0}
%1: f32[48,64] = parameter() {index=0}
%2: f32[48] = parameter() {index=1}
%3: f32[4,48] = parameter() {index=2}
%4: f32[4] = constant() {index=0}
%5: f32[s0,s1,64] = softmax(%0) {dim=2}
%6: f32[48] = softmax(%2) {dim=0}
%7: f32[s0,s1,48] = linear(%5, %1, %6)
%8: f32[s0,s1,48] = silu(%7)
%9: f32[s0,s1,4] = linear(%8, %3, %4)
return %9
"#;

const TERMS: usize = 64 + 64 + 48 + 48;

/// The stand-in driver. A process looks for libraries once: they have to be there first.
fn stand_in() -> Option<&'static FakeDriver> {
    FakeLibrary::cublaslt().and(FakeLibrary::cudnn())?;
    fake_driver()
}

fn with_libraries() -> Option<Cuda> {
    stand_in()?;
    Some(backend(|text| text)?.with_delegates(Delegates::new("a stand-in".to_owned(), None)))
}

/// Generated kernels alone, and with libraries.
fn both() -> Option<[Cuda; 2]> {
    let cuda = with_libraries()?;
    // Kernels are compiled once for both.
    Some([cuda.clone().with_delegates(Delegates::none()), cuda])
}

/// The graph on a device, and what it gives.
struct Model {
    graph: Graph,
    weights: Vec<interp::Tensor>,
    ours: OnDevice,
}

impl Model {
    fn new(cuda: &Cuda, memory: MemoryMode) -> Self {
        let graph = parse_graph(GRAPH).unwrap();
        let (_, weights) = random_inputs(&graph, &[2, 24], 1).unwrap();
        let options = PlanOptions { memory, ..PlanOptions::default() };
        let ours = OnDevice::with_options(cuda, &graph, Precision::Fast, &weights, options);
        Self { graph, weights, ours }
    }

    fn example(&self, bindings: &[i64], seed: u64) -> (Vec<interp::Tensor>, interp::Tensor) {
        let (inputs, _) = random_inputs(&self.graph, bindings, seed).unwrap();
        let want = interp::run_f64(&self.graph, bindings, &inputs, &self.weights).unwrap().remove(0);
        (inputs, want)
    }

    fn check_on(&self, stream: usize, bindings: &[i64], seed: u64) -> Result<(), String> {
        let (inputs, want) = self.example(bindings, seed);
        let got = with_stream(stream, || self.ours.try_run_on(stream, bindings, &inputs)).map_err(|e| e.to_string())?;
        difference(&got[0], &want, TERMS).map_err(|e| format!("on {stream:#x} at {bindings:?}, seed {seed}: {e}"))
    }
}

/// Runs `test` with work done at once and late, and sees that nothing was done that a device does not forgive.
fn at_once_and_late(driver: &FakeDriver, mut test: impl FnMut()) {
    for seed in [0].into_iter().chain(SEEDS) {
        let faults = driver.faults();
        let late = (seed != 0).then(|| driver.late(seed));
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(&mut test));
        drop(late);
        if let Err(panic) = outcome {
            eprintln!("work in the order of seed {seed}");
            std::panic::resume_unwind(panic);
        }
        assert_eq!(driver.faults(), faults, "work in the order of seed {seed}");
    }
}

/// The first call on a stream that does not wait for the default one: constants and derived weights are there when it reads them.
#[test]
fn constants_are_there_when_the_first_call_reads_them() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    at_once_and_late(fake_driver().unwrap(), || {
        for cuda in &cudas {
            let model = Model::new(cuda, MemoryMode::Fast);
            model.check_on(SIDES[0], &[2, 24], 1).unwrap();
        }
    });
}

/// What one stream makes others read, at once.
#[test]
fn what_a_stream_makes_others_read() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    at_once_and_late(fake_driver().unwrap(), || {
        for cuda in &cudas {
            let model = Model::new(cuda, MemoryMode::Fast);
            let calls: Vec<_> = (0..3)
                .flat_map(|round| SIDES.map(|stream| (round, stream)))
                .map(|(round, stream)| {
                    let (inputs, want) = model.example(&[2, 24], round);
                    let call = with_stream(stream, || {
                        let call = model.ours.call_on(stream, &[2, 24], &inputs);
                        model.ours.launch(&call).unwrap();
                        call
                    });
                    (call, want)
                })
                .collect();
            for (call, want) in calls.iter().rev() {
                difference(&model.ours.read(call).unwrap()[0], want, TERMS).unwrap();
            }
        }
    });
}

/// Two sizes, launched and replayed, by threads with streams of their own and threads that share one.
#[test]
fn threads_share_a_program_and_its_weights() {
    let _alone = alone();
    let Some([_, cuda]) = both() else { return };
    at_once_and_late(fake_driver().unwrap(), || {
        let model = Model::new(&cuda, MemoryMode::Fast);
        let program = model.ours.executable.program();
        let examples: Vec<_> = (0..4).map(|seed| model.example(&[[2, 24], [3, 40]][seed % 2], seed as u64)).collect();
        let weights = &model.weights;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (cuda, examples) = (&cuda, &examples);
                scope.spawn(move || {
                    let stream = SIDES[thread % 3];
                    with_stream(stream, || {
                        let ours = OnDevice::of(cuda, program.clone(), weights);
                        for round in 0..6 {
                            let bindings = [[2, 24], [3, 40]][round % 2];
                            let (inputs, want) = &examples[round % 4];
                            let got = ours.try_run_on(stream, &bindings, inputs).unwrap();
                            difference(&got[0], want, TERMS).unwrap_or_else(|e| panic!("thread {thread}: {e}"));
                        }
                    });
                });
            }
        });
    });
}

/// SD1.5's UNet with small widths, on two streams in turns: launched, made a graph, replayed.
#[test]
fn a_unet_runs_late_as_on_the_cpu() {
    let _alone = alone();
    let Some(cuda) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let graph = parse_graph(include_str!("cuda/data/sd15_unet_tiny.ir")).unwrap();
    let (weights, bindings) = (weights_of(&graph), [1, 8, 8, 7]);
    let cpu = program_of(graph.clone(), plan_of(graph.clone(), Precision::Eager, MemoryMode::Fast), "cpu");
    let bound = weights.iter().map(|w| Weight::borrowed(borrow(w))).collect();
    let cpu = Executable::new(Arc::new(cpu), bound).unwrap();
    let mut random = Random(7);
    let examples: Vec<_> = (0..2)
        .map(|_| {
            let types = graph.inputs.iter().map(|i| (i.ty.dtype, i.ty.concrete(&bindings).unwrap()));
            let inputs: Vec<_> = types.map(|(dtype, shape)| support::random(&mut random, dtype, &shape, 900)).collect();
            let want = harness::run_here(&cpu, &bindings, &inputs).remove(0);
            (inputs, want)
        })
        .collect();
    for seed in [1, 3] {
        let _late = driver.late(seed);
        let ours = OnDevice::new(&cuda, &graph, Precision::Eager, &weights);
        let graphs = driver.count(Count::GraphLaunches);
        for round in 0..2 {
            let calls = [(SIDES[0], &examples[0]), (SIDES[1], &examples[1])].map(|(stream, (inputs, want))| {
                let call = with_stream(stream, || {
                    let call = ours.call_on(stream, &bindings, inputs);
                    ours.launch(&call).unwrap();
                    call
                });
                (call, want)
            });
            assert!(seed != 1 || driver.pending() > 0, "nobody has waited");
            for (call, want) in calls.iter().rev() {
                let error = relative(&ours.read(call).unwrap()[0], want);
                assert!(error < 2e-5, "seed {seed}, round {round}: {error:e}");
            }
        }
        assert_eq!(driver.count(Count::GraphLaunches) - graphs, 3, "all but the first");
    }
}

/// A trial on a stream beside the default one: what it compares is what was computed from what was filled in.
#[test]
fn trials_wait_for_what_they_compare() {
    let _alone = alone();
    let Some(cuda) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let model = Model::new(&cuda, MemoryMode::Fast);
    let specialized = model.ours.executable.program().specialize(&[2, 24]).unwrap();
    let ways = |stream: usize| -> Vec<Option<f64>> {
        // Another specialization: what was compared once is not compared again.
        let model = Model::new(&cuda, MemoryMode::Fast);
        let specialized = model.ours.executable.program().specialize(&[2, 24]).unwrap();
        let measure = |way| {
            let bytes = specialized.trial_bytes(0, way);
            let memory = with_stream(stream, || cuda.memory().allocate(bytes, "a trial").unwrap());
            // SAFETY: the block has these bytes, and is this test's own.
            unsafe { specialized.measure(0, way, (memory.ptr(), bytes), stream).unwrap() }
        };
        (0..specialized.sites()[0].ways.len()).map(measure).collect()
    };
    let want = ways(0);
    assert!(specialized.sites()[0].ways.len() > 1 && want.iter().all(Option::is_some), "{want:?}");
    for seed in SEEDS {
        let _late = driver.late(seed);
        for stream in [0, SIDES[0]] {
            assert_eq!(ways(stream), want, "seed {seed}, stream {stream:#x}");
        }
    }
}

/// What a caller captures on its stream runs when its graph does, on the memory that was lent to it, beside other calls.
#[test]
fn a_captured_call_runs_when_its_graph_does() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    let driver = fake_driver().unwrap();
    at_once_and_late(driver, || {
        for (cuda, memory) in cudas.iter().flat_map(|cuda| [(cuda, MemoryMode::Fast), (cuda, MemoryMode::Low)]) {
            let model = Model::new(cuda, memory);
            let (inputs, want) = model.example(&[2, 24], 1);
            model.check_on(SIDES[0], &[2, 24], 2).unwrap();
            let call = with_stream(SIDES[1], || model.ours.call_on(SIDES[1], &[2, 24], &inputs));
            let (outcome, recording) = driver.capture(SIDES[1], || model.ours.launch(&call));
            outcome.unwrap();
            let seen = &model.ours.read(&call).unwrap()[0];
            assert!(difference(seen, &want, TERMS).is_err(), "nothing has run yet");
            model.check_on(SIDES[1], &[2, 24], 3).unwrap();
            model.check_on(SIDES[0], &[2, 24], 4).unwrap();
            recording.replay();
            difference(&model.ours.read(&call).unwrap()[0], &want, TERMS).unwrap();
        }
    });
}

/// Programs and their weights go while their last calls are on the way; the next program takes what they leave.
#[test]
fn programs_go_while_their_calls_are_on_the_way() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    at_once_and_late(fake_driver().unwrap(), || {
        for cuda in &cudas {
            let (mut calls, mut weights) = (Vec::new(), Vec::new());
            for (round, memory) in [MemoryMode::Fast, MemoryMode::Low, MemoryMode::Fast].into_iter().enumerate() {
                let model = Model::new(cuda, memory);
                for stream in SIDES {
                    let (inputs, want) = model.example(&[2, 24], round as u64);
                    let call = with_stream(stream, || {
                        let call = model.ours.call_on(stream, &[2, 24], &inputs);
                        model.ours.launch(&call).unwrap();
                        call
                    });
                    calls.push((call, want));
                }
                // The weights are the caller's, who keeps them until they have been read.
                weights.extend(model.ours.weights());
            }
            let reader = Model::new(cuda, MemoryMode::Fast);
            for (call, want) in &calls {
                difference(&reader.ours.read(call).unwrap()[0], want, TERMS).unwrap();
            }
        }
    });
}

/// Forms of weights that a captured call reads stay where they are when nothing else has them any more.
#[test]
fn a_graph_of_the_callers_keeps_the_forms_it_reads() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    let driver = fake_driver().unwrap();
    for cuda in &cudas {
        let _late = driver.late(1);
        let model = Model::new(cuda, MemoryMode::Fast);
        let (inputs, want) = model.example(&[2, 24], 1);
        model.check_on(SIDES[0], &[2, 24], 2).unwrap();
        let call = with_stream(SIDES[0], || model.ours.call_on(SIDES[0], &[2, 24], &inputs));
        let (outcome, recording) = driver.capture(SIDES[0], || model.ours.launch(&call));
        outcome.unwrap();
        // Other weights: what was derived of the first ones is for nobody, and what is derived of these takes its memory.
        let (_, others) = random_inputs(&model.graph, &[2, 24], 9).unwrap();
        let bound: Vec<Weight> =
            others.iter().map(|w| Weight { identity: Identity::Told, ..Weight::borrowed(borrow(w)) }).collect();
        model.ours.executable.set_weights(bound, &[0, 1, 2], &[], 0).unwrap();
        with_stream(SIDES[0], || model.ours.try_run_on(SIDES[0], &[2, 24], &inputs)).unwrap();
        recording.replay();
        difference(&model.ours.read(&call).unwrap()[0], &want, TERMS).unwrap();
    }
}

const SOFTMAX: &str = r#"symbol s0 "rows" = [2, 3]
input 0 "x": f32[s0,64]
%0: f32[s0,64] = input() {index=0}
%1: f32[s0,64] = softmax(%0) {dim=1}
return %1
"#;

/// Kernels that a graph of the caller's has are not unloaded with their program.
#[test]
fn a_graph_of_the_callers_keeps_its_kernels() {
    let _alone = alone();
    let Some([cuda, _]) = both() else { return };
    let driver = fake_driver().unwrap();
    let (graph, faults) = (parse_graph(SOFTMAX).unwrap(), driver.faults());
    let (inputs, _) = random_inputs(&graph, &[2], 1).unwrap();
    let want = interp::run_f64(&graph, &[2], &inputs, &[]).unwrap();
    let ours = OnDevice::new(&cuda, &graph, Precision::Fast, &[]);
    ours.try_run_on(SIDES[0], &[2], &inputs).unwrap();
    let call = ours.call_on(SIDES[0], &[2], &inputs);
    let (outcome, recording) = driver.capture(SIDES[0], || ours.launch(&call));
    outcome.unwrap();
    drop(ours);
    let other = OnDevice::new(&cuda, &graph, Precision::Fast, &[]);
    recording.replay();
    difference(&other.read(&call).unwrap()[0], &want[0], 64).unwrap();
    assert_eq!(driver.faults(), faults);
}

/// Memory of the driver's own may come and go while its thread captures, or another one.
#[test]
fn memory_comes_and_goes_beside_a_capture() {
    let _alone = alone();
    let Some(driver) = stand_in() else { return };
    let memory = DriverMemory(device(0).unwrap());
    let block = memory.allocate(100, "what goes in the capture").unwrap();
    let freed = driver.count(Count::Frees);
    driver.capture(SIDES[0], || {
        drop(block);
        std::thread::scope(|scope| {
            scope.spawn(|| drop(memory.allocate(100, "what another thread has").unwrap()));
        });
    });
    assert_eq!(driver.count(Count::Frees), freed + 2);
}

/// A program may be made, and another unloaded, while another thread captures.
#[test]
fn programs_come_and_go_beside_a_capture() {
    let _alone = alone();
    let Some([cuda, _]) = both() else { return };
    let driver = fake_driver().unwrap();
    let graph = parse_graph(SOFTMAX).unwrap();
    let (inputs, _) = random_inputs(&graph, &[2], 1).unwrap();
    let old = OnDevice::new(&cuda, &graph, Precision::Fast, &[]);
    old.try_run_on(SIDES[1], &[2], &inputs).unwrap();
    drop(old);
    let unloads = driver.call("fake_count", [8]);
    driver.capture(SIDES[0], || {
        std::thread::scope(|scope| {
            scope.spawn(|| drop(OnDevice::new(&cuda, &graph, Precision::Fast, &[])));
        });
    });
    assert!(driver.call("fake_count", [8]) > unloads, "what had run was unloaded");
}

/// A thread may try ways of a step while another one captures.
#[test]
fn trials_run_beside_a_capture() {
    let _alone = alone();
    let Some(cuda) = with_libraries() else { return };
    let driver = fake_driver().unwrap();
    let model = Model::new(&cuda, MemoryMode::Fast);
    let specialized = model.ours.executable.program().specialize(&[2, 24]).unwrap();
    let bytes = specialized.trial_bytes(0, 0);
    let memory = cuda.memory().allocate(bytes, "a trial").unwrap();
    let (seconds, _) = driver.capture(SIDES[0], || {
        // SAFETY: the block has these bytes, and is this test's own.
        let trial = || unsafe { specialized.measure(0, 0, (memory.ptr(), bytes), SIDES[1]).unwrap() };
        std::thread::scope(|scope| scope.spawn(trial).join().unwrap())
    });
    assert!(seconds.is_some());
}

/// A thread may make a library ready, and ask it for plans, while another one captures; and run, and make a graph.
#[test]
fn libraries_are_made_ready_beside_a_capture() {
    let _alone = alone();
    let Some(driver) = stand_in() else { return };
    let convolution = |out: &str, x: &str, w: usize| {
        format!(
            "{out}: f16[s0,s1,6,16] = convolution({x}, %{w}) {{stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}}\n"
        )
    };
    let text = format!(
        "symbol s0 \"batch\" = [2, 3]\nsymbol s1 \"rows\" = [5, 7]\ninput 0 \"x\": f16[s0,s1,6,8]\nparameter 0 \"w\": f16[16,8,3,3]\n\
         parameter 1 \"v\": f16[16,16,3,3]\nparameter 2 \"u\": f16[24,16]\n\
         %0: f16[s0,s1,6,8] = input() {{index=0}}\n%1: f16[16,8,3,3] = parameter() {{index=0}}\n\
         %2: f16[16,16,3,3] = parameter() {{index=1}}\n%3: f16[24,16] = parameter() {{index=2}}\n\
         {}{}%6: f16[s0,s1,6,24] = linear(%5, %3)\nreturn %6\n",
        convolution("%4", "%0", 1),
        convolution("%5", "%4", 2),
    );
    let graph = parse_graph(&text).unwrap();
    let bindings = [2, 5];
    let (inputs, weights) = random_inputs(&graph, &bindings, 1).unwrap();
    // Nobody has opened a library for this one.
    let cuda = with_libraries().unwrap();
    let ours = OnDevice::new(&cuda, &graph, Precision::Fast, &weights);
    let call = ours.call_on(SIDES[1], &bindings, &inputs);
    let program = ours.executable.program();
    let (told, _) = driver.capture(SIDES[0], || {
        let work = || {
            // Another thread's memory comes from the driver, not from the capture.
            let specialized = program.specialize(&bindings).unwrap();
            specialized.measured_on();
            specialized.ready(0, std::time::Duration::from_secs(60)).unwrap();
            specialized.delegations()
        };
        std::thread::scope(|scope| scope.spawn(work).join().unwrap())
    });
    let mut by: Vec<&str> = told.iter().map(|choice| choice.by).collect();
    by.sort_unstable();
    assert_eq!(by, ["cuBLASLt", "cuDNN", "cuDNN"], "{told:?}");
    ours.launch(&call).unwrap();
    let want = interp::run_f64(&graph, &bindings, &inputs, &weights).unwrap();
    difference(&ours.read(&call).unwrap()[0], &want[0], 400).unwrap();
}

/// The default stream takes nothing while a stream is captured that it would wait for: a call there is for after the capture.
#[test]
fn the_default_stream_is_captured_with_one_that_blocks() {
    let _alone = alone();
    let Some([cuda, _]) = both() else { return };
    let driver = fake_driver().unwrap();
    let model = Model::new(&cuda, MemoryMode::Fast);
    let (inputs, _) = model.example(&[2, 24], 1);
    let call = model.ours.call_on(0, &[2, 24], &inputs);
    let mut blocking = 0usize;
    driver.enter(0);
    assert_eq!(driver.call("cuStreamCreate", [(&raw mut blocking).expose_provenance(), 0]), 0);
    let (outcome, recording) = driver.capture(blocking, || model.ours.launch(&call));
    let reason = outcome.unwrap_err().to_string();
    assert!(reason.contains("call the module once before"), "{reason}");
    drop(recording);
    assert_eq!(driver.call("cuStreamDestroy_v2", [blocking]), 0);
    model.check_on(0, &[2, 24], 1).unwrap();
}

/// A capture that has failed, and has not ended yet, is one still: an event of its stream would order nothing.
#[test]
fn memory_outlives_a_capture_that_has_failed() {
    let _alone = alone();
    let Some([cuda, _]) = both() else { return };
    let driver = fake_driver().unwrap();
    let (home, reader) = (0x70, 0x80);
    let model = Model::new(&cuda, MemoryMode::Fast);
    model.check_on(home, &[2, 24], 1).unwrap();
    model.check_on(reader, &[2, 24], 1).unwrap();
    driver.enter(0);
    assert_eq!(driver.call("cuStreamBeginCapture_v2", [reader, 0]), 0);
    assert_eq!(driver.call("cuStreamSynchronize", [reader]), 900);
    let freed = driver.count(Count::Frees);
    let Model { ours, .. } = model;
    let weights = ours.weights();
    drop(ours);
    assert!(!driver.waited(reader, home));
    let freed_early = driver.count(Count::Frees) - freed;
    let mut graph = 0usize;
    assert_eq!(driver.call("cuStreamEndCapture", [reader, (&raw mut graph).expose_provenance()]), 901);
    Model::new(&cuda, MemoryMode::Fast).check_on(0x90, &[2, 24], 1).unwrap();
    assert!(driver.waited(reader, home), "it was freed before, with {freed_early} others");
    drop(weights);
}

/// A device's context and a stream of it, as the driver names them, and a kernel that does nothing.
fn kernel(driver: &FakeDriver, device: i32) -> sys::CUfunction {
    let compiler = HostCompiler { edit: |text| text };
    let image = compiler.compile("extern \"C\" __global__ void nothing(const float* x) {\n}\n", 80).unwrap();
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    driver.enter(device);
    // SAFETY: places for the handles, and an image as the stand-in takes it.
    unsafe {
        sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()).result().unwrap();
        sys::cuModuleGetFunction(&raw mut function, module, c"nothing".as_ptr()).result().unwrap();
    }
    driver.enter(0);
    function
}

/// The stand-in refuses launches that no device can do, in streams and in graphs.
#[test]
fn launches_that_no_device_can_do_are_refused() {
    let _alone = alone();
    let Some(driver) = stand_in() else { return };
    drop(device(0).unwrap());
    let [function, other] = [0, 1].map(|device| kernel(driver, device));
    let mut word = 0u64;
    let mut pointers: [*mut std::ffi::c_void; 1] = [(&raw mut word).cast()];
    let mut params =
        |func, [gx, gy, gz]: [u32; 3], [bx, by, bz]: [u32; 3], shared_bytes| sys::CUDA_KERNEL_NODE_PARAMS {
            func,
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: shared_bytes,
            kernelParams: pointers.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        };
    let (mut graph, mut node, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    let fine = params(function, [1, 65_535, 65_535], [16, 1, 64], 48 << 10);
    let add = |node: &mut sys::CUgraphNode, params: &sys::CUDA_KERNEL_NODE_PARAMS| {
        let mut graph = std::ptr::null_mut();
        // SAFETY: places for the handles; the parameters are copied by the call.
        unsafe {
            sys::cuGraphCreate(&raw mut graph, 0).result().unwrap();
            let code = sys::cuGraphAddKernelNode_v2(node, graph, std::ptr::null(), 0, params);
            sys::cuGraphDestroy(graph).result().unwrap();
            code
        }
    };
    // SAFETY: as above.
    unsafe {
        sys::cuGraphCreate(&raw mut graph, 0).result().unwrap();
        sys::cuGraphAddKernelNode_v2(&raw mut node, graph, std::ptr::null(), 0, &raw const fine).result().unwrap();
        sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0).result().unwrap();
    }
    let invalid = sys::CUresult::CUDA_ERROR_INVALID_VALUE;
    let launch = |p: &sys::CUDA_KERNEL_NODE_PARAMS| {
        let [gx, gy, gz] = [p.gridDimX, p.gridDimY, p.gridDimZ];
        let none = std::ptr::null_mut();
        // SAFETY: the kernel has one parameter, which it does not read.
        unsafe {
            let (bx, by, bz) = (p.blockDimX, p.blockDimY, p.blockDimZ);
            sys::cuLaunchKernel(p.func, gx, gy, gz, bx, by, bz, p.sharedMemBytes, none, p.kernelParams, p.extra)
        }
    };
    for (grid, block, shared_bytes) in [
        ([0, 1, 1], [1, 1, 1], 0),
        ([1, 0, 1], [1, 1, 1], 0),
        ([1, 1, 0], [1, 1, 1], 0),
        ([1 << 31, 1, 1], [1, 1, 1], 0),
        ([1, 65_536, 1], [1, 1, 1], 0),
        ([1, 1, 65_536], [1, 1, 1], 0),
        ([1, 1, 1], [0, 1, 1], 0),
        ([1, 1, 1], [1, 0, 1], 0),
        ([1, 1, 1], [1, 1, 0], 0),
        ([1, 1, 1], [32, 33, 1], 0),
        ([1, 1, 1], [1, 1, 65], 0),
        ([1, 1, 1], [1, 1, 1], (48 << 10) + 1),
    ] {
        let p = params(function, grid, block, shared_bytes);
        // SAFETY: as above.
        let renewed = unsafe { sys::cuGraphExecKernelNodeSetParams_v2(exec, node, &raw const p) };
        let mut other_node = std::ptr::null_mut();
        assert_eq!([launch(&p), add(&mut other_node, &p), renewed], [invalid; 3], "{grid:?} {block:?} {shared_bytes}");
    }
    let small = params(function, [2, 1, 1], [32, 1, 1], 0);
    assert_eq!(launch(&small), sys::CUresult::CUDA_SUCCESS);
    let elsewhere = params(other, [2, 1, 1], [32, 1, 1], 0);
    // SAFETY: as above.
    unsafe {
        let renewed = [&small, &elsewhere].map(|p| sys::cuGraphExecKernelNodeSetParams_v2(exec, node, p));
        assert_eq!(renewed, [sys::CUresult::CUDA_SUCCESS, invalid], "of the other device");
        sys::cuGraphExecDestroy(exec).result().unwrap();
        sys::cuGraphDestroy(graph).result().unwrap();
    }
}

/// What a capture does not allow is refused, and ends it.
#[test]
fn what_a_capture_does_not_allow_ends_it() {
    let _alone = alone();
    let Some(driver) = stand_in() else { return };
    let memory = DriverMemory(device(0).unwrap());
    let (block, mut host) = (memory.allocate(64, "some memory").unwrap(), [0u8; 64]);
    let (at, to) = (block.ptr().expose_provenance(), host.as_mut_ptr().expose_provenance());
    let (mut pointer, mut event, mut graph) = (0usize, 0usize, 0usize);
    let place = (&raw mut pointer).expose_provenance();
    driver.enter(0);
    assert_eq!(driver.call("cuEventCreate", [(&raw mut event).expose_provenance(), 0]), 0);
    assert_eq!(driver.call("cuEventRecord", [event, SIDES[1]]), 0);
    let side = SIDES[0];
    type Forbidden<'a> = (&'a str, &'a dyn Fn() -> i32, i32);
    let forbidden: [Forbidden<'_>; 9] = [
        ("cuMemAlloc", &|| driver.call("cuMemAlloc_v2", [place, 64]), 900),
        ("cuMemFree", &|| driver.call("cuMemFree_v2", [at]), 900),
        ("cuMemcpyHtoD", &|| driver.call("cuMemcpyHtoD_v2", [at, to, 64]), 900),
        ("cuMemcpyDtoH", &|| driver.call("cuMemcpyDtoH_v2", [to, at, 64]), 900),
        ("cuCtxSynchronize", &|| driver.call("cuCtxSynchronize", []), 900),
        ("cuStreamSynchronize", &|| driver.call("cuStreamSynchronize", [side]), 900),
        ("cuEventQuery", &|| driver.call("cuEventQuery", [event]), 900),
        ("cuEventSynchronize", &|| driver.call("cuEventSynchronize", [event]), 900),
        ("cuStreamWaitEvent", &|| driver.call("cuStreamWaitEvent", [side, event, 0]), 905),
    ];
    for (name, call, code) in forbidden {
        // Thread-local, as ours are.
        assert_eq!(driver.call("cuStreamBeginCapture_v2", [side, 1]), 0);
        assert_eq!(call(), code, "{name}");
        let end = driver.call("cuStreamEndCapture", [side, (&raw mut graph).expose_provenance()]);
        assert_eq!((end, graph), (901, 0), "{name}");
    }
    // Another thread may.
    assert_eq!(driver.call("cuStreamBeginCapture_v2", [side, 1]), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(memory.allocate(64, "in another thread").unwrap()));
    });
    assert_eq!(driver.call("cuStreamEndCapture", [side, (&raw mut graph).expose_provenance()]), 0);
    assert_eq!(driver.call("cuGraphDestroy", [graph]), 0);
    assert_eq!(driver.call("cuEventDestroy_v2", [event]), 0);
}

/// The stand-in itself: work is as late as it may be, and no later.
#[test]
fn work_is_done_when_it_is_waited_for() {
    let _alone = alone();
    let Some(driver) = stand_in() else { return };
    let opened = device(0).unwrap();
    let memory = DriverMemory(opened.clone());
    let _late = driver.late(1);
    driver.enter(0);
    let block = memory.allocate(8, "two words").unwrap();
    let at = block.ptr().expose_provenance();
    let seen = || {
        // SAFETY: the stand-in's memory is the process's own, and nothing runs beside this.
        unsafe { block.ptr().cast::<[u32; 2]>().read() }
    };
    let write = |to: usize, word: usize, stream: usize| {
        // SAFETY: the block has both words.
        unsafe {
            let stream = std::ptr::with_exposed_provenance_mut(stream);
            sys::cuMemsetD32Async(to as u64, word as u32, 1, stream).result().unwrap();
        }
    };
    let fresh = 0xa5a5_a5a5;
    // Nothing runs before it is waited for; other streams are not waited for.
    write(at, 1, SIDES[0]);
    write(at + 4, 2, SIDES[1]);
    assert_eq!(seen(), [fresh, fresh]);
    opened.synchronize(SIDES[1]).unwrap();
    assert_eq!(seen(), [fresh, 2]);
    // What arrives by a synchronous copy does so in the order of the default stream.
    let bytes = [7u8; 4];
    let from = bytes.as_ptr().expose_provenance();
    assert_eq!(driver.call("cuMemcpyHtoD_v2", [at + 4, from, 4]), 0);
    opened.synchronize(SIDES[1]).unwrap();
    assert_eq!(seen(), [fresh, 2]);
    opened.synchronize(0).unwrap();
    assert_eq!(seen(), [fresh, 0x0707_0707]);
    // A stream that waits for an event waits for what was recorded when it was told to.
    let mut event = 0usize;
    assert_eq!(driver.call("cuEventCreate", [(&raw mut event).expose_provenance(), 0]), 0);
    assert_eq!(driver.call("cuEventRecord", [event, SIDES[0]]), 0);
    assert_eq!(driver.call("cuStreamWaitEvent", [SIDES[1], event, 0]), 0);
    write(at, 3, SIDES[0]);
    assert_eq!(driver.call("cuEventRecord", [event, SIDES[0]]), 0);
    let mut ms = 0f32;
    assert_eq!(driver.call("cuEventElapsedTime", [(&raw mut ms).expose_provenance(), event, event]), 600);
    opened.synchronize(SIDES[1]).unwrap();
    assert_eq!(seen(), [1, 0x0707_0707]);
    assert_eq!(driver.call("cuEventQuery", [event]), 600);
    assert_eq!(driver.call("cuEventSynchronize", [event]), 0);
    assert_eq!((driver.call("cuEventQuery", [event]), seen()), (0, [3, 0x0707_0707]));
    // Streams made with flag 0 and the default one wait for each other.
    let mut blocking = 0usize;
    assert_eq!(driver.call("cuStreamCreate", [(&raw mut blocking).expose_provenance(), 0]), 0);
    write(at, 4, blocking);
    write(at, 5, 0);
    write(at + 4, 6, blocking);
    assert_eq!(driver.call("cuStreamDestroy_v2", [blocking]), 0);
    assert_eq!(driver.call("cuStreamSynchronize", [blocking]), 400);
    assert_eq!(seen(), [3, 0x0707_0707]);
    opened.synchronize(0).unwrap();
    assert_eq!(seen(), [5, 6]);
    // Memory is freed when the device has done all it has to do.
    let other = memory.allocate(8, "what goes").unwrap();
    write(at, 8, SIDES[2]);
    drop(other);
    assert_eq!((seen()[0], driver.pending()), (8, 0));
}
