//! The CUDA backend: every step becomes kernel launches, every size a CUDA graph.
//!
//! [`library`] finds NVIDIA's libraries, [`driver`] and [`nvrtc`] call them, [`lower`] turns a plan's steps into kernels
//! ([`crate::codegen::cuda`]) and launches, [`cubins`] compiles and keeps them, [`delegate`] leaves steps to libraries
//! ([`cublaslt`], [`cudnn`]), [`run`] fixes sizes and runs. Loading a plan
//! compiles its kernels and loads them; specializing is arithmetic; a run resolves addresses and launches, from the second
//! one on as one graph.
//!
//! Invariants: nothing is loaded or waited for by a call that has been made before at its size; a call that the caller
//! captures into a graph of its own is made of plain launches; work goes to the caller's stream and nowhere else; memory
//! comes from an allocator that knows that stream ([`streams`]); the caller's current context is what it was.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::derived::Form;
use super::tensor::{Block, Memory};
use super::{Backend, Loaded, Specialized};
use crate::codegen::cuda::Grid;
use crate::plan::Plan;
use crate::target::{DeviceKind, Profile, Target};
use crate::{Error, Result};

mod alias;
pub mod cubins;
pub mod cublaslt;
pub mod cudnn;
pub mod delegate;
pub mod driver;
pub mod library;
pub mod lower;
pub mod nvrtc;
mod run;
mod streams;

use cubins::{Compiler, Cubins, UNIT};
use delegate::Delegates;
use driver::{Device, DriverMemory, Function, Module, StreamHandle, Users};
use library::{Libraries, Search, libraries};
use lower::Lowered;
use nvrtc::Nvrtc;
use run::SpecializedCuda;

const NAME: &str = "cuda";

/// Oldest compute capability that the kernels are made for.
pub const OLDEST_ARCH: u32 = 75;

/// Where the process's libraries are; decided by the first that asks.
static SEARCH: Mutex<Option<Search>> = Mutex::new(None);

/// Says where PyTorch's packages are, before anything asks for the libraries.
pub fn set_search(search: Search) {
    *SEARCH.lock().unwrap_or_else(PoisonError::into_inner) = Some(search);
}

/// The libraries of this process.
pub fn found() -> &'static Libraries {
    let search = SEARCH.lock().unwrap_or_else(PoisonError::into_inner).clone().unwrap_or_default();
    libraries(&search)
}

fn unusable(what: impl Into<String>) -> Error {
    Error::Backend { backend: NAME, what: what.into() }
}

/// The compiler of kernels, where its library was found; it needs no device.
///
/// # Errors
/// [`Error::Backend`] with the reason.
pub fn compiler() -> Result<Nvrtc> {
    match &found().nvrtc {
        Ok(nvrtc) => Ok(Nvrtc::new(nvrtc.version)),
        Err(reason) => Err(unusable(reason.clone())),
    }
}

/// Device `ordinal`, where there is a driver that serves it.
///
/// # Errors
/// [`Error::Backend`] with the reason.
pub fn device(ordinal: u32) -> Result<Arc<Device>> {
    let driver = found().driver.as_ref().map_err(|reason| unusable(reason.clone()))?;
    if let Ok(nvrtc) = &found().nvrtc
        && driver.version.0 < nvrtc.version.0
    {
        let (driver, toolkit) = (driver.version, nvrtc.version);
        return Err(unusable(format!(
            "the driver is for CUDA {}.{}, PyTorch's libraries for {}.{}: update the driver",
            driver.0, driver.1, toolkit.0, toolkit.1
        )));
    }
    let device = Device::open(ordinal)?;
    if device.arch() < OLDEST_ARCH {
        return Err(unusable(format!(
            "{} has compute capability {}.{}; 7.5 is the oldest that is supported",
            device.name(),
            device.arch() / 10,
            device.arch() % 10
        )));
    }
    if let Ok(nvrtc) = compiler()
        && nvrtc.arch_for(device.arch())?.is_none()
    {
        let (name, arch, (major, minor)) = (device.name(), device.arch(), nvrtc.version());
        return Err(unusable(format!(
            "{name} has compute capability {}.{}, for which NVRTC {major}.{minor} does not compile: it comes with a newer PyTorch",
            arch / 10,
            arch % 10
        )));
    }
    Ok(device)
}

/// What tells a device and its driver from others.
fn device_words(device: &Device) -> String {
    let (major, minor) = found().driver.as_ref().map_or((0, 0), |driver| driver.version);
    let release = found().release.as_ref().map_or_else(String::new, |release| format!("{release} "));
    format!(
        "{}, sm_{}, {} multiprocessors, driver {release}for CUDA {major}.{minor}",
        device.name(),
        device.arch(),
        device.multiprocessors(),
    )
}

/// The backend for one device.
#[derive(Clone)]
pub struct Cuda {
    device: Arc<Device>,
    compiler: Arc<dyn Compiler>,
    cubins: Arc<Cubins>,
    memory: Arc<dyn Memory>,
    delegates: Arc<Delegates>,
}

impl Cuda {
    /// For device `ordinal`, with kernels and plans of libraries kept in `folder` and memory from `memory`, where these are given.
    ///
    /// # Errors
    /// [`Error::Backend`] saying what is missing.
    pub fn open(ordinal: u32, folder: Option<PathBuf>, memory: Option<Arc<dyn Memory>>) -> Result<Self> {
        let (device, compiler) = (device(ordinal)?, compiler()?);
        let memory = memory.unwrap_or_else(|| Arc::new(DriverMemory(device.clone())));
        let delegates = Delegates::new(device_words(&device), folder.clone());
        let cuda = Self::new(device, Arc::new(compiler), Cubins::new(folder), memory);
        Ok(cuda.with_delegates(delegates))
    }

    /// From its parts; tests have a compiler of their own.
    pub fn new(device: Arc<Device>, compiler: Arc<dyn Compiler>, cubins: Cubins, memory: Arc<dyn Memory>) -> Self {
        let delegates = Arc::new(Delegates::new(device_words(&device), None));
        Self { device, compiler, cubins: Arc::new(cubins), memory, delegates }
    }

    /// The same with other libraries.
    #[must_use]
    pub fn with_delegates(self, delegates: Delegates) -> Self {
        Self { delegates: Arc::new(delegates), ..self }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where workspaces and derived weights come from.
    pub fn memory(&self) -> &dyn Memory {
        &*self.memory
    }

    /// Plans of libraries that had to be built so far.
    pub fn plans_built(&self) -> usize {
        self.delegates.built()
    }

    /// The one that every program of this process on device `ordinal` shares.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn shared(ordinal: u32) -> Result<Self> {
        Self::shared_over(ordinal, None)
    }

    /// The same; if it is the first, with memory from `memory` where that is given. Its kernels are kept in the folder of
    /// what is remembered between processes.
    ///
    /// # Errors
    /// As [`Cuda::open`].
    pub fn shared_over(ordinal: u32, memory: Option<Arc<dyn Memory>>) -> Result<Self> {
        let mut shared = all_shared();
        if let Some(cuda) = shared.iter().find(|c| c.device.ordinal() == ordinal) {
            return Ok(cuda.clone());
        }
        let folder = crate::config::cache_dir().map(|f| f.join("cubins"));
        let cuda = Self::open(ordinal, folder, memory)?;
        shared.push(cuda.clone());
        Ok(cuda)
    }

    /// Makes this the one that [`Cuda::shared`] gives: tests have one made of parts of their own.
    pub fn share(self) {
        let mut shared = all_shared();
        shared.retain(|c| c.device.ordinal() != self.device.ordinal());
        shared.push(self);
    }
}

fn all_shared() -> MutexGuard<'static, Vec<Cuda>> {
    static SHARED: Mutex<Vec<Cuda>> = Mutex::new(Vec::new());
    SHARED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        NAME
    }

    fn target(&self) -> Target {
        Target { kind: DeviceKind::Cuda { arch: self.device.arch() }, ..Target::host() }
    }

    fn profile(&self) -> Profile {
        self.device.attributes().profile()
    }

    fn check(&self, plan: &Plan) -> Result<()> {
        crate::plan::verify::verify(plan)
    }

    fn load(&self, plan: Arc<Plan>) -> Result<Box<dyn Loaded>> {
        Ok(Box::new(LoadedCuda(Arc::new(Program::new(self, plan)?))))
    }
}

/// Entry points of a kernel.
#[derive(Clone, Copy, Debug)]
struct Entry {
    scalar: Function,
    vector: Option<Function>,
}

/// A plan whose kernels are on the device.
struct Program {
    plan: Arc<Plan>,
    device: Arc<Device>,
    memory: Arc<dyn Memory>,
    delegates: Arc<Delegates>,
    lowered: Lowered,
    /// One per kernel of `lowered`.
    entries: Vec<Entry>,
    /// One per constant of the graph, once it has run.
    constants: Mutex<Option<Arc<[Block]>>>,
    /// Forms of weights that a caller's graph reads: whatever becomes of the weights, that graph may run.
    recorded: Mutex<Vec<Arc<Form>>>,
    /// Whom the entries are given to.
    users: Arc<Users>,
    /// Keep the entries alive.
    _modules: Vec<Module>,
}

impl Program {
    fn new(cuda: &Cuda, plan: Arc<Plan>) -> Result<Self> {
        let device = cuda.device.clone();
        let _context = device.enter()?;
        let lowered = Lowered::new(&plan)?;
        let images = cuda.cubins.get(&*cuda.compiler, device.arch(), &lowered.kernels)?;
        let users = Arc::<Users>::default();
        let modules = images.iter().map(|i| Module::load(&device, i, &users)).collect::<Result<Vec<_>>>()?;
        let entry = |(at, kernel): (usize, &crate::codegen::cuda::Kernel)| {
            let module = &modules[at / UNIT];
            let function = |name: &str| match kernel.grid {
                Grid::Groups { .. } => module.roomy_function(name),
                _ => module.function(name),
            };
            let vector = kernel.vector.as_ref().map(|_| function(&format!("{}_v", kernel.name)));
            Ok(Entry { scalar: function(&kernel.name)?, vector: vector.transpose()? })
        };
        let entries = lowered.kernels.iter().enumerate().map(entry).collect::<Result<Vec<_>>>()?;
        let (memory, delegates) = (cuda.memory.clone(), cuda.delegates.clone());
        let (constants, recorded) = (Mutex::default(), Mutex::default());
        Ok(Self { plan, device, memory, delegates, lowered, entries, constants, recorded, users, _modules: modules })
    }

    /// The constants of the graph, put on the device by the first run; that must not be one that is recorded.
    fn constants(&self, stream: StreamHandle, is_recorded: bool) -> Result<Arc<[Block]>> {
        let mut made = self.constants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(constants) = &*made {
            constants.iter().for_each(|c| streams::note(c.owner(), stream));
            return Ok(constants.clone());
        }
        let upload = |bytes: &[u8]| {
            if is_recorded {
                return Err(cold());
            }
            let block = self.memory.allocate(bytes.len(), "a constant of the model")?;
            // What had this memory before is before this on the stream; other streams that read it come when it is there.
            // SAFETY: the block was made with this size.
            unsafe { self.device.upload(bytes, block.ptr(), stream)? };
            Ok(streams::shared(block, &self.device, stream))
        };
        let constants: Arc<[Block]> =
            self.plan.graph.constants.iter().map(|c| upload(&c.bytes)).collect::<Result<_>>()?;
        *made = Some(constants.clone());
        Ok(constants)
    }

    /// Keeps what a recorded run reads.
    fn keep(&self, forms: &[Arc<Form>]) {
        let mut recorded = self.recorded.lock().unwrap_or_else(PoisonError::into_inner);
        for form in forms {
            if !recorded.iter().any(|known| Arc::ptr_eq(known, form)) {
                recorded.push(form.clone());
            }
        }
    }
}

/// Work that is only recorded cannot make what later calls rely on, nor load what it needs itself.
pub fn cold() -> Error {
    unusable("a CUDA graph is being captured, and something is not ready yet; call the module once before")
}

struct LoadedCuda(Arc<Program>);

impl Loaded for LoadedCuda {
    fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        Ok(Arc::new(SpecializedCuda::new(self.0.clone(), bindings)?))
    }

    fn memory(&self) -> Option<Arc<dyn Memory>> {
        Some(self.0.memory.clone())
    }

    fn is_recorded(&self, stream: usize) -> Result<bool> {
        let _context = self.0.device.enter()?;
        self.0.device.is_capturing(stream)
    }

    fn number(&self, word: [u8; 8], stream: usize) -> Result<Block> {
        let block = self.0.memory.allocate(word.len(), "a number")?;
        let word = u64::from_le_bytes(word);
        // SAFETY: the block has this size. Its memory is the stream's, and so is what comes after it there.
        unsafe { self.0.device.put(&[word as u32, (word >> 32) as u32], block.ptr(), stream)? };
        Ok(block)
    }
}
