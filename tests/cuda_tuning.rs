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
use oxidiff::backend::Specialized;
use oxidiff::backend::cuda::cubins::Cubins;
use oxidiff::backend::cuda::delegate::{Delegates, GENERATORS};
use oxidiff::backend::cuda::driver::DriverMemory;
use oxidiff::backend::cuda::{self, Cuda};
use oxidiff::ir::parse_graph;
use oxidiff::ir::testing::random_inputs;
use oxidiff::passes::Precision;

/// Bytes of the operands of [`product`] for [`ROWS`], each a multiple of 256.
const OPERANDS: usize = ROWS * 32 * 2 + 64 * 32 * 2 + ROWS * 64 * 2;
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
    driver.l2_bytes(l2_bytes as i32);
    let cuda = backend(|text| text)?.with_delegates(Delegates::new("a stand-in".to_owned(), None));
    driver.l2_bytes(0);
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
    unsafe { cuda.device().download(memory.ptr(), &mut held).unwrap() };
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
