//! Two devices behind the stand-in driver: memory, kernels and graphs of one are of no use on the other.

#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/harness.rs"]
mod harness;
mod support;

use std::sync::atomic::{AtomicI64, Ordering};

use emulator::{alone, backend_on, fake_driver};
use harness::{OnDevice, difference};
use oxidiff::backend::Tensor;
use oxidiff::backend::cuda::{Cuda, device};
use oxidiff::ir::testing::random_inputs;
use oxidiff::ir::{Graph, interp, parse_graph};
use oxidiff::passes::Precision;

/// A norm, a product, and a part that depends on weights alone.
const GRAPH: &str = r#"symbol s0 "batch" = [2, 3]
symbol s1 "rows" = [7, 40]
input 0 "x": f32[s0,s1,72]
parameter 0 "w": f32[80,72]
parameter 1 "b": f32[80]
%0: f32[s0,s1,72] = input() {index=0}
%1: f32[80,72] = parameter() {index=0}
%2: f32[80] = parameter() {index=1}
%3: f32[s0,s1,72] = softmax(%0) {dim=2}
%4: f32[80] = softmax(%2) {dim=0}
%5: f32[s0,s1,80] = linear(%3, %1, %4)
%6: f32[s0,s1,80] = silu(%5)
%7: f32[s0,s1,1] = mean(%6) {dims=[2], keepdim=true}
return %6, %7
"#;

/// The graph on a device, with weights of a seed.
struct Model {
    graph: Graph,
    weights: Vec<interp::Tensor>,
    ours: OnDevice,
}

impl Model {
    fn new(cuda: &Cuda, seed: u64) -> Self {
        let graph = parse_graph(GRAPH).unwrap();
        let (_, weights) = random_inputs(&graph, &[2, 7], seed).unwrap();
        let ours = OnDevice::new(cuda, &graph, Precision::Fast, &weights);
        Self { graph, weights, ours }
    }

    /// Launched and replayed, at two sizes.
    fn check(&self, seed: u64) -> Result<(), String> {
        for bindings in [[2, 7], [3, 40]] {
            let (inputs, _) = random_inputs(&self.graph, &bindings, seed).unwrap();
            let want = interp::run_f64(&self.graph, &bindings, &inputs, &self.weights).unwrap();
            for round in 0..3 {
                for (got, want) in self.ours.run(&bindings, &inputs).iter().zip(&want) {
                    difference(got, want, 100).map_err(|e| format!("at {bindings:?}, round {round}: {e}"))?;
                }
            }
        }
        Ok(())
    }
}

fn both() -> Option<[Cuda; 2]> {
    Some([backend_on(0, |text| text)?, backend_on(1, |text| text)?])
}

#[test]
fn one_graph_runs_on_both_devices_in_turns() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    let driver = fake_driver().unwrap();
    let models = [Model::new(&cudas[0], 1), Model::new(&cudas[1], 2)];
    for turn in 0..2 {
        // Whatever device is current for the caller.
        driver.enter(turn as i32);
        for (at, model) in models.iter().enumerate() {
            let before = [0, 1].map(|d| driver.launched(d));
            model.check(turn).unwrap_or_else(|e| panic!("on device {at}: {e}"));
            let launched = [0, 1].map(|d| driver.launched(d) - before[d as usize]);
            assert!(launched[at] > 0 && launched[1 - at] == 0, "on device {at}: {launched:?}");
            assert_eq!(driver.current(), turn as i32);
        }
    }
}

#[test]
fn threads_have_a_device_each() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    let models = [0, 1, 0, 1].map(|at| Model::new(&cudas[at], 3));
    let checked = AtomicI64::new(0);
    std::thread::scope(|scope| {
        for (at, model) in models.into_iter().enumerate() {
            let checked = &checked;
            scope.spawn(move || {
                model.check(at as u64).unwrap_or_else(|e| panic!("thread {at}: {e}"));
                checked.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(checked.into_inner(), 4);
}

/// What the driver says of an address of the other device reaches the caller, launched and replayed.
#[test]
fn an_argument_of_the_other_device_is_an_error() {
    let _alone = alone();
    let Some(cudas) = both() else { return };
    let model = Model::new(&cudas[1], 4);
    let (inputs, _) = random_inputs(&model.graph, &[2, 7], 5).unwrap();
    let bytes = inputs[0].bytes();
    let types = model.ours.executable.output_types(&[2, 7]).unwrap();
    let lies = |cuda: &Cuda| {
        let block = cuda.memory().allocate(bytes.len(), "an argument").unwrap();
        // SAFETY: the block was made with this size.
        unsafe { cuda.device().upload(bytes, block.ptr(), 0).unwrap() };
        block
    };
    let [there, here] = [lies(&cudas[0]), lies(&cudas[1])];
    let results: Vec<_> = types
        .iter()
        .map(|(dtype, shape)| {
            let count = shape.iter().product::<i64>() as usize;
            cudas[1].memory().allocate(count * dtype.size_bytes(), "a result").unwrap()
        })
        .collect();
    for (round, (block, is_right)) in
        [(&there, false), (&here, true), (&here, true), (&there, false)].iter().enumerate()
    {
        let x = Tensor::dense(block.ptr(), inputs[0].dtype(), inputs[0].shape());
        let wanted: Vec<Tensor> =
            types.iter().zip(&results).map(|((dtype, shape), b)| Tensor::dense(b.ptr(), *dtype, shape)).collect();
        // SAFETY: all of it lives in the blocks above, though not where the program runs.
        let outcome = unsafe { model.ours.executable.run(&[x], &wanted, &[2, 7], None) };
        assert_eq!(outcome.is_ok(), *is_right, "round {round}: {outcome:?}");
        if let Err(error) = outcome {
            assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "round {round}: {error}");
        }
    }
}

#[test]
fn a_device_that_is_not_there_is_a_reason() {
    let _alone = alone();
    if both().is_none() {
        return;
    }
    let error = device(2).unwrap_err().to_string();
    assert!(error.contains("no device 2: there are 2"), "{error}");
}
