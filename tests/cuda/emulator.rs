//! The host's C++ compiler in NVRTC's place, and a driver that runs what it makes: see `shim.h` and `fake_driver.cpp`.

use std::cell::Cell;
use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use oxidiff::backend::cuda::cubins::{Compiler, Cubins};
use oxidiff::backend::cuda::delegate::Delegates;
use oxidiff::backend::cuda::driver::DriverMemory;
use oxidiff::backend::cuda::library::Search;
use oxidiff::backend::cuda::{Cuda, device, set_search};
use oxidiff::backend::{Block, Memory};
use oxidiff::codegen::cuda::PRELUDE;
use oxidiff::{Error, Result};

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda")
}

/// Where g++'s results are kept for the next process: a folder for each state of the sources, which `cargo clean` removes.
fn kept() -> &'static Path {
    static KEPT: OnceLock<PathBuf> = OnceLock::new();
    KEPT.get_or_init(|| {
        let mut files: Vec<PathBuf> =
            std::fs::read_dir(sources()).expect("there").map(|f| f.expect("there").path()).collect();
        files.retain(|file| file.is_file());
        files.sort();
        let mut hash = blake3::Hasher::new();
        for file in files {
            hash.update(&std::fs::read(file).expect("readable"));
        }
        hash.update(kernel_options().join(" ").as_bytes());
        let state = hash.finalize().to_hex()[..16].to_owned();
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulator").join(state);
        std::fs::create_dir_all(&folder).expect("writable");
        folder
    })
}

/// A file that no other thread or process writes.
fn fresh(extension: &str) -> PathBuf {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    kept().join(format!("{}-{count}.{extension}", std::process::id()))
}

/// What g++ makes of `source`, unless an earlier process has made it. Several may make it at once: it comes by a rename.
fn build(made: PathBuf, source: &Path, options: &[&str]) -> std::result::Result<PathBuf, String> {
    if made.exists() {
        return Ok(made);
    }
    let making = fresh("part");
    let output = Command::new("g++")
        .args(["-std=c++17", "-fPIC", "-fwrapv", "-w", "-o"])
        .args([&making, source])
        .args(options)
        .output()
        .map_err(|e| format!("{NO_COMPILER}: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).chars().take(6000).collect());
    }
    std::fs::rename(&making, &made).expect("writable");
    Ok(made)
}

/// Nothing, where there is no g++; that it takes the repository's own source for wrong is a failure.
fn without_compiler<T>(reason: &str) -> Option<T> {
    assert!(reason.starts_with(NO_COMPILER), "a stand-in cannot be built: {reason}");
    eprintln!("skipped: {reason}");
    None
}

const NO_COMPILER: &str = "no g++";

/// How kernels are compiled. A call of `fmaf` is one instruction where the processor has it, a third of the time of some; what
/// is a product and a sum stays that.
fn kernel_options() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    if std::is_x86_feature_detected!("fma") {
        return vec!["-O1", "-fno-gnu-unique", "-mfma", "-ffp-contract=off"];
    }
    vec!["-O1", "-fno-gnu-unique"]
}

/// What is compiled once for all kernels, which would take most of the time of each.
struct Shim {
    /// What to include for `shim.h`: beside it lies what g++ made of it before, which it reads instead.
    header: String,
    /// `shim.cpp`, whose own libraries the kernels use too.
    library: String,
}

fn shim() -> std::result::Result<&'static Shim, String> {
    static SHIM: OnceLock<std::result::Result<Shim, String>> = OnceLock::new();
    let make = || {
        let header = build(kept().join("shim.h.gch"), &sources().join("shim.h"), &kernel_options())?.with_extension("");
        let library = build(kept().join("libshim.so"), &sources().join("shim.cpp"), &["-shared", "-O2"])?;
        let text = |path: PathBuf| path.into_os_string().into_string().expect("a path in UTF-8");
        Ok(Shim { header: text(header), library: text(library) })
    };
    SHIM.get_or_init(make).as_ref().map_err(Clone::clone)
}

/// The kernel text as C++: the shim takes the place of the prelude's device part, and each entry point gets a door that
/// takes its arguments as the driver passes them.
fn host_source(source: &str) -> String {
    let device = PRELUDE.split_once("// OX_DEVICE\n").and_then(|(_, rest)| rest.split_once("// OX_END_DEVICE"));
    let device = device.expect("the prelude marks its device part").0;
    let mut text = source.replace(device, "");
    let has_barriers = |name: &str| {
        let from = source.find(&format!(" {name}")).unwrap_or(0);
        let base = name.strip_suffix("_v").unwrap_or(name);
        let body = source.find(&format!("{base}_body(")).unwrap_or(from).min(from);
        let end = source[from..].find("\nextern \"C\"").map_or(source.len(), |at| from + at);
        ["__sync", "__shfl", "block_sum", "block_max", "row_sum", "row_max", "warp_sum", "warp_max"]
            .iter()
            .any(|w| source[body..end].contains(w))
    };
    for line in source.lines().filter(|l| l.starts_with("extern \"C\" __global__")) {
        let (head, params) = line.split_once(") {").map_or(line, |l| l.0).rsplit_once('(').expect("a signature");
        let name = head.rsplit(' ').next().expect("a name");
        let types: Vec<&str> = params.split(", ").map(|p| p.rsplit_once(' ').expect("a parameter").0).collect();
        let sizes: String = types.iter().map(|t| if *t == "float" { '4' } else { '8' }).collect();
        let args: Vec<String> = types.iter().enumerate().map(|(i, t)| format!("*({t}*)args[{i}]")).collect();
        text += &format!(
            "\nstatic void door_{name}(void** args) {{ {name}({}); }}\n\
             extern \"C\" const char parameters_{name}[] = \"{sizes}\";\n\
             extern \"C\" void emulate_{name}(const unsigned* g, const unsigned* b, unsigned s, void** args, unsigned seed) {{\n\
             \x20   dim3 grid, block;\n    grid.x = g[0], grid.y = g[1], grid.z = g[2];\n\
             \x20   block.x = b[0], block.y = b[1], block.z = b[2];\n\
             \x20   device::run(door_{name}, {}, grid, block, s, args, seed);\n}}\n",
            args.join(", "),
            has_barriers(name),
        );
    }
    text
}

/// g++ as the backend's compiler; `edit` may break the text first.
pub struct HostCompiler {
    /// What becomes of the text before it is compiled.
    pub edit: fn(String) -> String,
}

impl Compiler for HostCompiler {
    fn identity(&self) -> String {
        "g++".to_owned()
    }

    fn compile(&self, source: &str, _arch: u32) -> Result<Vec<u8>> {
        let text = host_source(&(self.edit)(source.to_owned()));
        let name = blake3::hash(text.as_bytes()).to_hex()[..32].to_owned();
        let file = fresh("cpp");
        std::fs::write(&file, text).expect("writable");
        let Shim { header, library } = shim().map_err(Error::invalid)?;
        let options = [kernel_options(), vec!["-shared", "-nodefaultlibs", "-include", header, library]].concat();
        let library = build(kept().join(format!("{name}.so")), &file, &options).map_err(Error::invalid)?;
        std::fs::remove_file(&file).expect("it was written");
        Ok(std::fs::read(library).expect("readable"))
    }
}

/// Where arguments, results and weights lie from now on.
#[allow(dead_code, reason = "each test file uses a part of it")]
pub fn place_operands(placement: Placement) {
    OPERANDS.store(placement as i32, Ordering::Relaxed);
}

static OPERANDS: AtomicI32 = AtomicI32::new(Placement::AsTheDriver as i32);

/// Where an allocation lies between the two pages that nobody may touch.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "each test file uses a part of it")]
pub enum Placement {
    /// At a multiple of 256 bytes, as the driver has it, near the page behind it.
    AsTheDriver,
    /// At the page behind it.
    End,
    /// At the page before it.
    Beginning,
}

/// The stand-in driver, as `fake_driver.cpp` counts.
pub struct FakeDriver(libloading::Library);

/// What [`FakeDriver::count`] counts.
#[derive(Clone, Copy)]
#[allow(dead_code, reason = "each test file uses a part of it")]
pub enum Count {
    Launches,
    Graphs,
    GraphLaunches,
    Updates,
    Allocations,
    Frees,
}

#[allow(dead_code, reason = "each test file uses a part of it")]
impl FakeDriver {
    pub fn count(&self, which: Count) -> i64 {
        // SAFETY: the signature is that of `fake_driver.cpp`.
        unsafe { self.0.get::<unsafe extern "C" fn(i32) -> i64>(b"fake_count").expect("there")(which as i32) }
    }

    pub fn seed(&self, seed: u32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(u32)>(b"fake_seed").expect("there")(seed) }
    }

    fn place(&self, placement: i32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(b"fake_placement").expect("there")(placement) }
    }

    /// Milliseconds that a launch of a generated kernel takes from now on.
    pub fn kernel_cost(&self, ms: f64) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(f64)>(b"fake_kernel_cost").expect("there")(ms) }
    }

    /// Bytes of the device that a graph takes from now on.
    pub fn graph_bytes(&self, bytes: usize) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(usize)>(b"fake_graph_bytes").expect("there")(bytes) }
    }

    /// What devices that are opened from now on say of themselves: the name, multiprocessors, clock and memory clock in kHz,
    /// bits of the way to the memory, bytes of L2.
    pub fn describe(&self, name: &str, attributes: [i32; 5]) {
        type Describe = unsafe extern "C" fn(*const std::ffi::c_char, *const i32);
        let name = std::ffi::CString::new(name).expect("no zeros");
        // SAFETY: as above; both are copied by the call.
        unsafe { self.0.get::<Describe>(b"fake_device").expect("there")(name.as_ptr(), attributes.as_ptr()) }
    }

    /// Shared memory that a block of devices that are opened from now on may ask for; 0 for as much as the architecture has.
    pub fn block_bytes(&self, bytes: i32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(b"fake_block_bytes").expect("there")(bytes) }
    }

    /// Makes a device's context current in this thread, as a caller may.
    pub fn enter(&self, device: i32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(b"fake_enter").expect("there")(device) }
    }

    /// The device whose context is current in this thread.
    pub fn current(&self) -> i32 {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> i32>(b"fake_current").expect("there")() }
    }

    /// Launches of kernels and graphs on a device.
    pub fn launched(&self, device: i32) -> i64 {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32) -> i64>(b"fake_launched").expect("there")(device) }
    }

    fn set_late(&self, seed: u32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(u32)>(b"fake_async").expect("there")(seed) }
    }

    /// From now on work is done as late as the driver allows, in an order of this seed, and memory that is given back goes to
    /// whoever asks next on its stream, as PyTorch's allocator has it; until what is returned is dropped.
    pub fn late(&self, seed: u32) -> Late<'_> {
        POOLED.store(true, Ordering::Relaxed);
        self.set_late(seed);
        Late(self)
    }

    /// Work that was given and is not done.
    pub fn pending(&self) -> i64 {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> i64>(b"fake_pending").expect("there")() }
    }

    /// How often something was done that a device does not forgive.
    pub fn faults(&self) -> i64 {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> i64>(b"fake_faults").expect("there")() }
    }

    /// One function of the driver, all of whose parameters are addresses or as wide.
    pub fn call<const N: usize>(&self, name: &str, args: [usize; N]) -> i32 {
        type F0 = unsafe extern "C" fn() -> i32;
        type F1 = unsafe extern "C" fn(usize) -> i32;
        type F2 = unsafe extern "C" fn(usize, usize) -> i32;
        type F3 = unsafe extern "C" fn(usize, usize, usize) -> i32;
        // SAFETY: the callers below name functions with so many parameters, and give what they ask for.
        unsafe {
            match args[..] {
                [] => self.0.get::<F0>(name.as_bytes()).expect("there")(),
                [a] => self.0.get::<F1>(name.as_bytes()).expect("there")(a),
                [a, b] => self.0.get::<F2>(name.as_bytes()).expect("there")(a, b),
                [a, b, c] => self.0.get::<F3>(name.as_bytes()).expect("there")(a, b, c),
                _ => unreachable!("no function has so many"),
            }
        }
    }

    /// Whether stream `after` was made to wait for stream `before`.
    pub fn waited(&self, before: usize, after: usize) -> bool {
        self.call("fake_waited", [before, after]) != 0
    }

    /// Captures what `work` puts on a stream of the first device, as `torch.cuda.graph` does. Nothing of it runs.
    pub fn capture<T>(&self, stream: usize, work: impl FnOnce() -> T) -> (T, Recording<'_>) {
        let mut open = Recording { driver: self, stream, graph: None };
        self.enter(0);
        assert_eq!(self.call("cuStreamBeginCapture_v2", [stream, 0]), 0);
        CAPTURES.set(true);
        let outcome = with_stream(stream, work);
        let code = open.end();
        assert_eq!(code, 0, "something ended the capture");
        (outcome, open)
    }

    /// The same; what was captured runs, and is waited for.
    pub fn capture_and_replay<T>(&self, stream: usize, work: impl FnOnce() -> T) -> T {
        let (outcome, recording) = self.capture(stream, work);
        recording.replay();
        outcome
    }
}

/// What was captured.
#[allow(dead_code, reason = "each test file uses a part of it")]
pub struct Recording<'a> {
    driver: &'a FakeDriver,
    stream: usize,
    graph: Option<usize>,
}

#[allow(dead_code, reason = "each test file uses a part of it")]
impl Recording<'_> {
    fn end(&mut self) -> i32 {
        let mut graph = 0usize;
        CAPTURES.set(false);
        let code = self.driver.call("cuStreamEndCapture", [self.stream, (&raw mut graph).expose_provenance()]);
        self.graph = Some(graph);
        code
    }

    /// Runs it, and waits.
    pub fn replay(&self) {
        let mut exec = 0usize;
        self.driver.enter(0);
        let call = |name: &str, args: [usize; 2]| assert_eq!(self.driver.call(name, args), 0, "{name}");
        let at = (&raw mut exec).expose_provenance();
        assert_eq!(self.driver.call("cuGraphInstantiateWithFlags", [at, self.graph.expect("ended"), 0]), 0);
        call("cuGraphLaunch", [exec, self.stream]);
        assert_eq!(self.driver.call("cuStreamSynchronize", [self.stream]), 0);
        assert_eq!(self.driver.call("cuGraphExecDestroy", [exec]), 0);
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        if self.graph.is_none() {
            self.end();
        }
        if let Some(graph) = self.graph.filter(|graph| *graph != 0) {
            self.driver.call("cuGraphDestroy", [graph]);
        }
        // As torch has it, the memory goes with the graph.
        drop(std::mem::take(&mut *lock(&OF_GRAPHS)));
    }
}

/// That work is done late.
pub struct Late<'a>(&'a FakeDriver);

impl Drop for Late<'_> {
    fn drop(&mut self) {
        self.0.set_late(0);
        POOLED.store(false, Ordering::Relaxed);
        let pool = std::mem::take(&mut *lock(&POOL));
        drop(pool);
    }
}

thread_local! {
    /// torch's current stream of the thread.
    static STREAM: Cell<usize> = const { Cell::new(0) };
    /// Whether the thread captures it.
    static CAPTURES: Cell<bool> = const { Cell::new(false) };
}

/// What `work` allocates is for this stream.
pub fn with_stream<T>(stream: usize, work: impl FnOnce() -> T) -> T {
    struct Back(usize);
    impl Drop for Back {
        fn drop(&mut self) {
            STREAM.set(self.0);
        }
    }
    let _back = Back(STREAM.replace(stream));
    work()
}

static POOLED: AtomicBool = AtomicBool::new(false);
/// Device, stream, bytes.
type Key = (u32, usize, usize);
/// Memory that was given back.
static POOL: Mutex<Vec<(Key, Block)>> = Mutex::new(Vec::new());
/// Memory that was given back in a capture: its graph's.
static OF_GRAPHS: Mutex<Vec<Block>> = Mutex::new(Vec::new());

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stand-ins count for the whole process: one test at a time.
#[allow(dead_code, reason = "each test file uses a part of it")]
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The stand-in driver of this process, or nothing where there is no g++ or another driver is in the way.
pub fn fake_driver() -> Option<&'static FakeDriver> {
    static FAKE: OnceLock<Option<FakeDriver>> = OnceLock::new();
    let made = FAKE.get_or_init(|| {
        let options = ["-shared", "-O1", "-Wl,-soname,libcuda.so.1", "-ldl"];
        let path = match build(kept().join("libcuda.so"), &sources().join("fake_driver.cpp"), &options) {
            Ok(path) => path,
            Err(reason) => return without_compiler(&reason),
        };
        // SAFETY: the library was just built from `fake_driver.cpp`.
        let library = unsafe { libloading::Library::new(&path) }.expect("what was built can be opened");
        // The libraries are stand-ins too: the real ones want the real driver.
        set_search(Search { packages: vec![packages()], driver: Some(path) });
        Some(FakeDriver(library))
    });
    made.as_ref()
}

/// Where a stand-in for a library lies, as in PyTorch's wheels.
fn packages() -> PathBuf {
    kept().join("nvidia")
}

/// A stand-in for a library.
pub struct FakeLibrary(libloading::Library);

#[allow(dead_code, reason = "each test file uses a part of it")]
impl FakeLibrary {
    fn new(source: &str, folder: &str, soname: &str) -> Option<Self> {
        let folder = packages().join(folder);
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let options = ["-shared", "-O2", &format!("-Wl,-soname,{soname}"), "-ldl"];
        let built = build(folder.join(soname), &sources().join(source), &options);
        let path = built.map_or_else(|reason| without_compiler(&reason), Some)?;
        // SAFETY: the library was just built from the repository's own source.
        Some(Self(unsafe { libloading::Library::new(&path) }.expect("what was built can be opened")))
    }

    /// cuBLASLt: `fake_cublaslt.cpp`.
    pub fn cublaslt() -> Option<&'static Self> {
        static FAKE: OnceLock<Option<FakeLibrary>> = OnceLock::new();
        FAKE.get_or_init(|| Self::new("fake_cublaslt.cpp", "cu13/lib", "libcublasLt.so.13")).as_ref()
    }

    /// cuDNN: `fake_cudnn.cpp`.
    pub fn cudnn() -> Option<&'static Self> {
        static FAKE: OnceLock<Option<FakeLibrary>> = OnceLock::new();
        FAKE.get_or_init(|| Self::new("fake_cudnn.cpp", "cudnn/lib", "libcudnn.so.9")).as_ref()
    }

    pub fn count(&self, which: i32) -> i64 {
        // SAFETY: the signature is that of the source.
        unsafe { self.0.get::<unsafe extern "C" fn(i32) -> i64>(b"fake_count").expect("there")(which) }
    }

    /// Where the results of the calls since this was last asked went, in their order. Only of cuBLASLt.
    pub fn results(&self) -> Vec<usize> {
        let mut all = vec![0usize; 4096];
        // SAFETY: the signature is that of the source, and no more is written than there is room for.
        let count = unsafe {
            let ask = self.0.get::<unsafe extern "C" fn(*mut usize, usize) -> usize>(b"fake_results").expect("there");
            ask(all.as_mut_ptr(), all.len())
        };
        all.truncate(count);
        all
    }

    /// Makes the library misread what it is given.
    pub fn misread(&self, what: i32) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(i32)>(b"fake_misread").expect("there")(what) }
    }
}

/// Lends memory in captures too, as PyTorch's allocator does; where work is done late, memory that is given back goes to whoever
/// asks next on the stream that it was for, and the device is not waited for.
struct Lending(DriverMemory);

/// Where memory goes when it is given back.
struct Lent {
    block: Option<Block>,
    key: Key,
    is_captured: bool,
}

impl Drop for Lent {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        if self.is_captured {
            lock(&OF_GRAPHS).push(block);
        } else if POOLED.load(Ordering::Relaxed) {
            lock(&POOL).push((self.key, block));
        }
    }
}

/// As PyTorch does around what it allocates in a capture.
fn relaxed<T>(work: impl FnOnce() -> T) -> T {
    let exchange = |mut mode: i32| {
        let at: *mut c_void = (&raw mut mode).cast();
        assert_eq!(
            fake_driver().expect("it captures").call("cuThreadExchangeStreamCaptureMode", [at.expose_provenance()]),
            0
        );
        mode
    };
    let before = exchange(2);
    let outcome = work();
    exchange(before);
    outcome
}

impl Memory for Lending {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        // What is the backend's own is aligned as by the driver.
        let is_operand = ["a weight", "an argument", "a result"].contains(&what);
        let placement = if is_operand { OPERANDS.load(Ordering::Relaxed) } else { Placement::AsTheDriver as i32 };
        fake_driver().expect("it allocates").place(placement);
        let (is_pooled, is_captured) = (POOLED.load(Ordering::Relaxed), CAPTURES.get());
        if !is_pooled && !is_captured {
            return self.0.allocate(bytes, what);
        }
        let key = (self.0.0.ordinal(), STREAM.get(), bytes.next_multiple_of(512));
        let free =
            |pool: &mut Vec<(Key, Block)>| pool.iter().position(|(k, _)| *k == key).map(|at| pool.swap_remove(at).1);
        let block = match (!is_captured).then(|| free(&mut lock(&POOL))).flatten() {
            Some(block) => block,
            None => relaxed(|| self.0.allocate(key.2, what))?,
        };
        let ptr = block.ptr();
        // SAFETY: the memory of the block, which the owner keeps.
        Ok(unsafe { Block::new(ptr, bytes, Box::new(Lent { block: Some(block), key, is_captured })) })
    }

    fn serves_captures(&self) -> bool {
        true
    }
}

/// A backend on the stand-in driver's first device, without libraries; `None` as for [`fake_driver`].
#[allow(dead_code, reason = "each test file uses a part of it")]
pub fn backend(edit: fn(String) -> String) -> Option<Cuda> {
    backend_on(0, edit)
}

/// The same on any of its devices.
pub fn backend_on(ordinal: u32, edit: fn(String) -> String) -> Option<Cuda> {
    fake_driver()?;
    match device(ordinal) {
        Ok(device) => {
            let memory = Arc::new(Lending(DriverMemory(device.clone())));
            let cuda = Cuda::new(device, Arc::new(HostCompiler { edit }), Cubins::default(), memory);
            Some(cuda.with_delegates(Delegates::none()))
        }
        Err(e) => {
            eprintln!("skipped: {e}");
            None
        }
    }
}
