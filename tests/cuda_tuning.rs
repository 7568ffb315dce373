//! The tuner on a GPU that is not there: where trials put their operands, and what their times are told to depend on.

#[path = "backends/cases.rs"]
mod cases;
#[path = "cuda/emulator.rs"]
mod emulator;
#[path = "cuda/harness.rs"]
mod harness;
#[path = "../kernels/hash_sources.rs"]
mod hash_sources;
mod support;

use std::collections::BTreeSet;
use std::sync::Arc;

use emulator::{FakeLibrary, HostCompiler, alone, backend, fake_driver};
use hash_sources::hash_sources;
use oxidiff::backend::cuda::cubins::Cubins;
use oxidiff::backend::cuda::delegate::{Delegates, GENERATORS};
use oxidiff::backend::cuda::driver::DriverMemory;
use oxidiff::backend::cuda::{self, Cuda};
use oxidiff::backend::{Backend, Specialized};
use oxidiff::compiler::{self, Options};
use oxidiff::ir::parse_graph;
use oxidiff::ir::testing::random_inputs;
use oxidiff::passes::Precision;
use oxidiff::target::Profile;

/// Bytes of the operands of [`product`] for [`ROWS`], each a multiple of 256.
const OPERANDS: usize = ROWS * 32 * 2 + 64 * 32 * 2 + ROWS * 64 * 2;
/// What the stand-in calls itself.
const NAME: &str = "this processor";
/// Fewer are left to a generated kernel.
const ROWS: usize = 64;
/// Of the stand-in's first algorithm.
const WORKSPACE: usize = 4096;

/// A product on a device, specialized for [`ROWS`].
fn product(cuda: &Cuda) -> Arc<dyn Specialized> {
    let case = cases::Case { name: "", terms: 0, lines: &["x: T[s0,32]", "w @ T[64,32]", "y = T[s0,64] linear(x, w)"] };
    let graph = parse_graph(&case.texts()[1]).unwrap();
    let (_, weights) = random_inputs(&graph, &[ROWS as i64, 4], 1).unwrap();
    let ours = harness::OnDevice::new(cuda, &graph, Precision::Fast, &weights);
    ours.executable.program().specialize(&[ROWS as i64, 4]).unwrap()
}

/// Where the results of some trials of the first way go on a device with that much L2, in `bytes` of memory; from there on.
fn places(l2_bytes: usize, bytes: impl Fn(&dyn Specialized) -> usize) -> Option<Vec<usize>> {
    let (library, driver) = (FakeLibrary::cublaslt()?, fake_driver()?);
    driver.describe(NAME, [108, 0, 0, 0, l2_bytes as i32]);
    let cuda = backend(|text| text)?.with_delegates(Delegates::new("a stand-in".to_owned(), None));
    driver.describe(NAME, [108, 0, 0, 0, 0]);
    let specialized = product(&cuda);
    let bytes = bytes(&*specialized);
    let memory = cuda.memory().allocate(bytes, "a trial").unwrap();
    let trial = || {
        // SAFETY: the block has these bytes, and is this test's own.
        unsafe { specialized.measure(0, 0, (memory.ptr(), bytes), 0).unwrap().unwrap() };
    };
    // The first one compares, too.
    trial();
    library.results();
    (0..40).for_each(|_| trial());
    let first = memory.ptr().addr();
    let places: Vec<usize> = library.results().into_iter().map(|at| at - first).collect();
    assert!(places.iter().all(|at| at + ROWS * 64 * 2 <= bytes), "in the memory that was lent: {places:?}");
    // Random numbers are everywhere, and nothing of what fresh memory has.
    let mut held = vec![0; bytes];
    // SAFETY: as above.
    unsafe { cuda.device().download(memory.ptr(), &mut held, 0).unwrap() };
    let copies = places.iter().collect::<BTreeSet<_>>().len();
    let operands = &held[WORKSPACE..WORKSPACE + copies * OPERANDS];
    assert!(operands.chunks_exact(32).all(|numbers| numbers != [0xa5; 32]), "{copies} copies");
    Some(places)
}

/// How many places there are, and the fewest runs from the use of one to the next.
fn turns(places: &[usize]) -> (usize, usize) {
    let again = |(at, place): (usize, &usize)| places[at + 1..].iter().position(|p| p == place).map(|after| after + 1);
    let soonest = places.iter().enumerate().filter_map(again).min();
    (places.iter().collect::<BTreeSet<_>>().len(), soonest.unwrap_or(usize::MAX))
}

#[test]
fn no_run_of_a_trial_finds_its_operands_in_the_l2() {
    let _alone = alone();
    let l2: usize = 64 << 10;
    let wanted = (2 * l2).div_ceil(OPERANDS);
    let Some(far) = places(l2, |s| s.cold_trial_bytes(0, 0)) else { return };
    assert_eq!(turns(&far), (wanted, wanted), "twice the L2 lies between two uses of a copy");
    // Where there is less memory, as many as fit; never more than was lent.
    let few = places(l2, |s| s.trial_bytes(0, 0) + 2 * OPERANDS).unwrap();
    assert_eq!(turns(&few), (3, 3));
    assert_eq!(turns(&places(l2, |s| s.trial_bytes(0, 0)).unwrap()), (1, 1));
    // A device that does not say how large it is.
    let one = places(0, |s| {
        assert_eq!(s.cold_trial_bytes(0, 0), s.trial_bytes(0, 0));
        1 << 20
    });
    assert_eq!(turns(&one.unwrap()), (1, 1));
}

/// What is measured depends on the driver itself, not only on the CUDA that it is made for, and on what makes kernels.
#[test]
fn measurements_name_the_driver_and_the_generators() {
    let _alone = alone();
    if fake_driver().is_none() || FakeLibrary::cublaslt().is_none() {
        return;
    }
    let device = match cuda::device(0) {
        Ok(device) => device,
        Err(e) => return eprintln!("skipped: {e}"),
    };
    let (compiler, memory) = (HostCompiler { edit: |text| text }, DriverMemory(device.clone()));
    let cuda = Cuda::new(device, Arc::new(compiler), Cubins::default(), Arc::new(memory));
    let (device, libraries) = product(&cuda).measured_on();
    assert_eq!(device, "this processor, sm_80, 108 multiprocessors, driver 999.88.77 for CUDA 13.0");
    assert!(libraries.starts_with("cuBLASLt 13.1, ") && libraries.ends_with(&format!(", oxidiff {GENERATORS}")));
}

/// Fusion is chosen for the card that is there, as it would be for the same card elsewhere.
#[test]
fn a_card_is_planned_for_as_what_it_is() {
    let _alone = alone();
    // Which libraries a process has is found out once.
    let (Some(driver), Some(_)) = (fake_driver(), FakeLibrary::cublaslt()) else { return };
    let opened = |name: &str, attributes: [i32; 5]| {
        driver.describe(name, attributes);
        let cuda = backend(|text| text);
        driver.describe(NAME, [108, 0, 0, 0, 0]);
        cuda
    };
    let Some(laptop) = opened("NVIDIA GeForce RTX 4090 Laptop GPU", [76, 2_040_000, 9_001_000, 256, 64 << 20]) else {
        return;
    };
    assert_eq!(Some(&laptop.profile()), Profile::named("RTX4090-Laptop"));
    let unknown = opened("NVIDIA RTX A6000", [84, 1_800_000, 8_001_000, 384, 6 << 20]).unwrap().profile();
    assert_eq!((unknown.name, unknown.bandwidth / 1_000_000_000, unknown.l2_bytes), ("this GPU", 768, 6 << 20));
    let silent = opened(NAME, [108, 0, 0, 0, 0]).unwrap().profile();
    assert_eq!(Some(&silent), Profile::named("A100"), "by its architecture");
    // A gate that is kept, or computed again by a norm of a thousand rows: see `form_groups`.
    let case = cases::Case {
        name: "",
        terms: 0,
        lines: &[
            "x: T[s0,1024,1280]",
            "z: T[s0,1,1280]",
            "n = T[s0,1024,1280] layer_norm(x) {normalized_ndim=1, eps=1e-5}",
            "g = T[s0,1,1280] silu(z)",
            "y = T[s0,1024,1280] mul(n, g)",
        ],
    };
    let graph = parse_graph(&case.texts()[0]).unwrap();
    let steps = |options: &Options| compiler::compile(graph.clone(), options).unwrap().0.plan.steps.len();
    let mut seen = BTreeSet::new();
    for (at, (name, attributes)) in [
        ("NVIDIA H100 80GB HBM3", [132, 1_980_000, 2_619_000, 5120, 50 << 20]),
        ("Tesla T4", [40, 1_590_000, 5_001_000, 256, 4 << 20]),
    ]
    .into_iter()
    .enumerate()
    {
        opened(name, attributes).unwrap().share();
        // Programs of one process are told apart by their backend, which is one device for as long as it lives.
        let here =
            steps(&Options { backend: Some("cuda:0".to_owned()), max_specializations: 1 + at, ..Options::default() });
        let there = steps(&Options { profile: Profile::named(name).copied(), ..Options::default() });
        assert_eq!(here, there, "{name}");
        seen.insert(here);
    }
    assert_eq!(seen.len(), 2, "these two are not the same");
}

#[test]
fn a_generator_that_changed_has_another_name() {
    // Tests run in the folder of the package.
    let hash = hash_sources(&["src/codegen", "src/backend/cuda"]).unwrap();
    assert_eq!(GENERATORS, format!("{}-{hash}", env!("CARGO_PKG_VERSION")));
    let folder = std::env::temp_dir().join(format!("oxidiff-sources-{}", std::process::id()));
    let (root, inner) = (folder.to_str().unwrap(), folder.join("a"));
    std::fs::create_dir_all(&inner).unwrap();
    let mut seen = BTreeSet::new();
    for (file, text) in [("a/one.rs", "x"), ("a/one.rs", "y"), ("a/two.rs", "y"), ("two.rs", "y")] {
        std::fs::write(folder.join(file), text).unwrap();
        assert!(seen.insert(hash_sources(&[root]).unwrap()), "{file}: {text}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
