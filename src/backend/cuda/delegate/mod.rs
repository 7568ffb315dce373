//! Steps that a library computes.
//!
//! When a plan is lowered, [`Delegate`] says what of a step a library may do: the product or convolution itself, and as
//! much of the pointwise work that follows as the library is known to compute as the plan means it, all of it or nothing;
//! the rest is one generated kernel. When sizes are known, the library is asked; what it refuses runs on the step's own
//! kernels, and the reason is kept ([`StepChoice`]).

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use oxidiff_kernels::tile::{Binary, Instr, Reg, Source, TileProgram, Unary};

mod attention;
mod convolution;
pub(super) mod product;

use attention::Attention;
pub(super) use attention::added_mask;
use convolution::Convolution;
pub(super) use convolution::sums_bytes;
use product::{Epilogue, ProductShape};

use super::cublaslt::{self, CublasLt};
use super::cudnn::{self, Cudnn};
use super::driver::{Relaxed, StreamHandle};
use super::lower::{Launch, Place};
use crate::Result;
use crate::backend::StepChoice;
use crate::codegen::tile::kernel_type;
use crate::ir::{DType, Op};
use crate::plan::{Access, Numerics, Step};
use crate::select::Kernel;

/// Addresses of operands are taken to be multiples of this many bytes; where one is not, the step's own kernels run.
const ALIGN_BYTES: usize = 16;
/// Most workspace of one call; the larger one is for devices that have use for it (cuBLAS documentation,
/// `CUBLAS_WORKSPACE_CONFIG`).
const WORKSPACE_BYTES: [usize; 2] = [4 << 20, 32 << 20];

/// Most workspace of a convolution: engines for channels-last images need none, those that need more repack.
const CONVOLUTION_WORKSPACE_BYTES: usize = 64 << 20;
/// Graphs of cuDNN that are kept beyond their last user.
const MOST_EXECUTIONS: usize = 512;

/// cuDNN whose attention is not used: its frontend refuses that of 9.10.0 and 9.10.1, and what is found of a library is its
/// minor version.
const REFUSED_ATTENTION: (u32, u32) = (9, 10);

/// Why a library is not asked, or does not do it.
pub type Refusal = String;

/// Most bytes of the scores that an attention by products keeps at once.
const SCORES_BYTES: usize = 64 << 20;

/// Fewer operations than this are not worth four convolutions instead of a copy and one: the five ninths that are saved take a
/// fast device as long as the launches.
const FOLD_FLOPS: u64 = 1 << 34;

/// Version of what makes kernels for GPUs and asks the libraries: that of the crate, and a hash of the sources that do. What was
/// measured with other ones is not found.
pub const GENERATORS: &str = concat!(env!("CARGO_PKG_VERSION"), "-", env!("GENERATORS_HASH"));

/// Workspaces begin at multiples of this many bytes (cuBLAS documentation, `cublasLtMatmul`).
pub const WORKSPACE_ALIGN_BYTES: usize = 256;

/// What a library has made ready.
pub trait Planned: Send + Sync + std::fmt::Debug {
    /// Its name.
    fn library(&self) -> &'static str;

    /// Memory that a run needs besides its operands.
    fn workspace_bytes(&self) -> usize;

    /// What of the library it runs, by addresses and numbers: two are equal where one fails if the other does.
    fn plans(&self) -> Vec<(usize, usize)>;

    /// Runs on `stream`.
    ///
    /// # Safety
    /// `addresses` must be those of the operands, in the order that the implementation states, valid for what was planned;
    /// the workspace must have [`Planned::workspace_bytes`].
    ///
    /// # Errors
    /// What the library says.
    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()>;
}

/// The libraries of one device, opened when they are first asked for.
#[derive(Debug, Default)]
pub struct Delegates {
    /// The device in words, for what is kept.
    device: String,
    /// Where plans of cuDNN are kept beyond the process.
    folder: Option<PathBuf>,
    /// Most bytes of an attention's scores, if not [`SCORES_BYTES`].
    scores_bytes: Option<usize>,
    /// Operations from which on an upsampling is folded, if not [`FOLD_FLOPS`].
    fold_flops: Option<u64>,
    cublaslt: OnceLock<std::result::Result<Arc<CublasLt>, Refusal>>,
    cudnn: OnceLock<std::result::Result<Arc<Cudnn>, Refusal>>,
    /// Products that some specialization holds: layers of one shape share one.
    products: Mutex<HashMap<cublaslt::Problem, Weak<cublaslt::Product>>>,
    /// Graphs of cuDNN and refusals, by problem and number of the engine: what it took long to find out is kept.
    executions: Mutex<HashMap<Engine, std::result::Result<Arc<cudnn::Execution>, Refusal>>>,
    /// Microseconds that the slowest of them took.
    longest_plan_us: AtomicU64,
    /// Choices that were measured, by [`Site::op`].
    choices: Mutex<HashMap<String, Choice>>,
}

/// A graph of cuDNN, and the number of the engine where it is not the first that works.
pub type Engine = (cudnn::Problem, Option<usize>);

/// Opening a library and planning allocate, and may wait for the device: that must not end the capture of another thread. Where
/// devices are only described there may be no driver, and nothing that it forbids.
fn relaxed() -> Option<Relaxed> {
    super::found().driver.as_ref().ok().and_then(|_| Relaxed::new().ok())
}

impl Delegates {
    /// The libraries that this process has, for a device that `device` tells from others; what they make is kept in `folder`,
    /// if there is one.
    pub fn new(device: String, folder: Option<PathBuf>) -> Self {
        Self { device, folder, ..Self::default() }
    }

    /// The same with at most so many bytes for the scores that an attention by products keeps at once.
    #[must_use]
    pub fn with_scores_bytes(self, bytes: usize) -> Self {
        Self { scores_bytes: Some(bytes), ..self }
    }

    /// The same with upsampling folded into convolutions of that many operations.
    #[must_use]
    pub fn with_fold_flops(self, flops: u64) -> Self {
        Self { fold_flops: Some(flops), ..self }
    }

    pub(super) fn scores_bytes(&self) -> usize {
        self.scores_bytes.unwrap_or(SCORES_BYTES)
    }

    /// None: every step runs on generated kernels.
    pub fn none() -> Self {
        let delegates = Self::default();
        let reason = || "libraries are switched off".to_owned();
        let _ = (delegates.cublaslt.set(Err(reason())), delegates.cudnn.set(Err(reason())));
        delegates
    }

    /// For a device that is described only: what cuDNN would do on it.
    #[must_use]
    pub fn described(cudnn: Arc<Cudnn>) -> Self {
        let delegates = Self::default();
        let _ = delegates.cublaslt.set(Err("cuBLASLt needs a device".to_owned()));
        let _ = delegates.cudnn.set(Ok(cudnn));
        delegates
    }

    fn cublaslt(&self) -> std::result::Result<&Arc<CublasLt>, Refusal> {
        let open = || match &super::found().cublaslt {
            Ok(_) => {
                let _relaxed = relaxed();
                CublasLt::open()
            }
            Err(reason) => Err(reason.clone()),
        };
        self.cublaslt.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    fn cudnn(&self) -> std::result::Result<&Arc<Cudnn>, Refusal> {
        let open = || match &super::found().cudnn {
            Ok(_) => {
                let _relaxed = relaxed();
                Cudnn::open(&self.device, self.folder.clone())
            }
            Err(reason) => Err(reason.clone()),
        };
        self.cudnn.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    /// Operations from which on an upsampling is folded.
    pub fn fold_flops(&self) -> u64 {
        self.fold_flops.unwrap_or(FOLD_FLOPS)
    }

    fn execution(
        &self,
        problem: &cudnn::Problem,
        choice: Option<usize>,
    ) -> std::result::Result<Arc<cudnn::Execution>, Refusal> {
        let library = self.cudnn()?;
        // The first way is the one that the library recommends.
        let choice = choice.filter(|number| *number > 0);
        let engine = (problem.clone(), choice);
        let lock = || self.executions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = self.known(problem, choice) {
            return known;
        }
        // Not under the lock: this takes up to seconds.
        let begun = Instant::now();
        let made = {
            let _relaxed = relaxed();
            library.plan(problem, choice).map(Arc::new)
        };
        let took = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.longest_plan_us.fetch_max(took, Ordering::Relaxed);
        let mut known = lock();
        if known.len() >= MOST_EXECUTIONS {
            known.retain(|_, e| e.as_ref().is_ok_and(|e| Arc::strong_count(e) > 1));
        }
        known.entry(engine).or_insert(made).clone()
    }

    /// What is known already. An engine in front of the first that works does not, and that one is not built twice.
    fn known(
        &self,
        problem: &cudnn::Problem,
        choice: Option<usize>,
    ) -> Option<std::result::Result<Arc<cudnn::Execution>, Refusal>> {
        let choice = choice.filter(|number| *number > 0);
        let executions = self.executions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = executions.get(&(problem.clone(), choice)) {
            return Some(known.clone());
        }
        let (first, number) = (executions.get(&(problem.clone(), None))?, choice?);
        match first {
            Ok(first) if number < first.number() => Some(Err("cuDNN's plan of this engine cannot be built".to_owned())),
            Ok(first) if number == first.number() => Some(Ok(first.clone())),
            Ok(_) => None,
            Err(why) => Some(Err(why.clone())),
        }
    }

    pub(super) fn product(&self, problem: &cublaslt::Problem) -> std::result::Result<Arc<cublaslt::Product>, Refusal> {
        let library = self.cublaslt()?;
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = products.get(problem).and_then(Weak::upgrade) {
            return Ok(known);
        }
        products.retain(|_, product| product.strong_count() > 0);
        let _relaxed = relaxed();
        let made = Arc::new(library.plan(problem)?);
        products.insert(*problem, Arc::downgrade(&made));
        Ok(made)
    }

    /// Plans of cuDNN that had to be built so far.
    pub fn built(&self) -> usize {
        self.cudnn.get().and_then(|cudnn| cudnn.as_ref().ok()).map_or(0, |cudnn| cudnn.built())
    }

    /// What a library makes of a problem, by the way of this number, else by the one that it recommends.
    ///
    /// # Errors
    /// Why it does not.
    pub fn planned(&self, problem: &Problem, choice: Option<usize>) -> std::result::Result<Arc<dyn Planned>, Refusal> {
        match problem {
            Problem::Product(problem) => {
                let product = self.product(problem)?;
                match choice {
                    None | Some(0) => Ok(product),
                    Some(number) => Ok(Arc::new(cublaslt::Chosen::new(product, number)?)),
                }
            }
            Problem::Graph(problem) => Ok(self.execution(problem, choice)?),
            Problem::Parts(parts) => {
                let part = |(problem, moves): &Piece| -> std::result::Result<Part, Refusal> {
                    Ok((self.execution(problem, choice)?, moves.clone()))
                };
                Ok(Arc::new(Parts(parts.iter().map(part).collect::<std::result::Result<_, _>>()?)))
            }
        }
    }

    /// Asks cuDNN for several graphs at the same time: each takes up to seconds. `enter` is called by each thread first, and
    /// what it gives is kept while the thread works. None is begun that is not expected to be done by `deadline`; false if that
    /// left some out.
    pub(super) fn warm<C>(
        &self,
        mut engines: Vec<Engine>,
        deadline: Option<Instant>,
        enter: impl Fn() -> C + Sync,
    ) -> bool {
        engines.retain(|(problem, choice)| self.known(problem, *choice).is_none());
        let (next, is_cut) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            let _context = enter();
            while let Some((problem, choice)) = engines.get(next.fetch_add(1, Ordering::Relaxed)) {
                let longest = Duration::from_micros(self.longest_plan_us.load(Ordering::Relaxed));
                if deadline.is_some_and(|deadline| Instant::now() + longest > deadline) {
                    is_cut.store(true, Ordering::Relaxed);
                    return;
                }
                // Whoever needs it asks again, and is told.
                let _ = self.execution(problem, *choice);
            }
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = cores.min(cudnn::MOST_HANDLES).min(engines.len());
        std::thread::scope(|scope| {
            // A thread that cannot be had is no loss: this one does its share.
            (1..threads).for_each(|_| drop(std::thread::Builder::new().spawn_scoped(scope, work)));
            work();
        });
        !is_cut.into_inner()
    }

    /// Whether a way to solve a problem is ready to be tried: none while its plans are not built, false if they cannot be, or
    /// are those of the first way.
    pub fn is_ready(&self, problem: &Problem, number: usize) -> Option<bool> {
        let graphs = problem.graphs();
        let known = |number: usize| -> Option<Vec<_>> {
            graphs.iter().map(|graph| self.known(graph, Some(number)).map(Result::ok)).collect()
        };
        let ways = known(number)?;
        let plans = |ways: &[Option<Arc<cudnn::Execution>>]| {
            ways.iter().map(|way| way.as_ref().map(|way| way.plans())).collect::<Vec<_>>()
        };
        let is_first_again =
            number > 0 && !graphs.is_empty() && known(0).is_some_and(|first| plans(&first) == plans(&ways));
        Some(ways.iter().all(Option::is_some) && !is_first_again)
    }

    fn choice(&self, op: impl FnOnce() -> String) -> Option<Choice> {
        let choices = self.choices.lock().unwrap_or_else(PoisonError::into_inner);
        if choices.is_empty() { None } else { choices.get(&op()).copied() }
    }

    /// The choice for a site, if there is one that was measured.
    pub fn chosen(&self, site: &Site) -> Option<Choice> {
        self.choice(|| site.op.clone())
    }

    /// Makes a choice hold for specializations to come.
    pub fn choose(&self, site: &Site, choice: Choice) {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).insert(site.op.clone(), choice);
    }

    /// Forgets what was chosen.
    pub fn forget_choices(&self) {
        self.choices.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// What measurements of its steps depend on besides the kernels: the device with its driver, and the libraries.
    pub fn identity(&self) -> (String, String) {
        let cublaslt = match &super::found().cublaslt {
            Ok(found) => format!("cuBLASLt {}.{}", found.version.0, found.version.1),
            Err(_) => "no cuBLASLt".to_owned(),
        };
        let cudnn = self.cudnn().map_or_else(|_| "no cuDNN".to_owned(), |cudnn| cudnn.version());
        (self.device.clone(), format!("{cublaslt}, {cudnn}, oxidiff {GENERATORS}"))
    }
}

/// What a library is asked.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Problem {
    /// cuBLASLt.
    Product(cublaslt::Problem),
    /// cuDNN.
    Graph(cudnn::Problem),
    /// cuDNN, several times.
    Parts(Vec<Piece>),
}

/// A graph of cuDNN, and bytes to add to the address of each of its operands.
pub type Piece = (cudnn::Problem, Vec<i64>);

/// A graph that is ready, and bytes to add to the address of each of its operands.
type Part = (Arc<cudnn::Execution>, Vec<i64>);

/// Graphs of cuDNN that make parts of one result, one after the other.
#[derive(Debug)]
struct Parts(Vec<Part>);

impl Planned for Parts {
    fn library(&self) -> &'static str {
        "cuDNN"
    }

    fn workspace_bytes(&self) -> usize {
        self.0.iter().map(|(graph, _)| graph.workspace_bytes()).max().unwrap_or(0)
    }

    fn plans(&self) -> Vec<(usize, usize)> {
        self.0.iter().flat_map(|(graph, _)| graph.plans()).collect()
    }

    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()> {
        for (graph, moves) in &self.0 {
            let moved: Vec<u64> = addresses.iter().zip(moves).map(|(at, by)| at.wrapping_add_signed(*by)).collect();
            // SAFETY: the caller's promise; the parts lie inside of the operands.
            unsafe { graph.run(&moved, workspace, stream)? };
        }
        Ok(())
    }
}

/// Ways of one library to solve a problem that are tried.
const MOST_WAYS: usize = 6;

impl Problem {
    /// Numbers of ways to solve it that the library may have. Some may turn out not to work.
    pub fn ways(&self, delegates: &Delegates) -> usize {
        match self {
            Self::Product(problem) => delegates.product(problem).map_or(0, |p| p.candidates().len().min(MOST_WAYS)),
            Self::Graph(_) | Self::Parts(_) => MOST_WAYS,
        }
    }

    /// The plans of cuDNN that one of the ways needs.
    pub fn engines(&self, number: usize) -> Vec<Engine> {
        self.graphs().into_iter().map(|graph| (graph.clone(), Some(number))).collect()
    }

    /// Graphs of cuDNN.
    fn graphs(&self) -> Vec<&cudnn::Problem> {
        match self {
            Self::Product(_) => Vec::new(),
            Self::Graph(problem) => vec![problem],
            Self::Parts(parts) => parts.iter().map(|(problem, _)| problem).collect(),
        }
    }

    /// Terms of a sum.
    fn terms(&self) -> u64 {
        match self {
            Self::Product(problem) => problem.k,
            _ => self.graphs().into_iter().map(cudnn::Problem::terms).max().unwrap_or(1),
        }
    }

    fn rounds_to_tf32(&self) -> bool {
        match self {
            Self::Product(problem) => problem.tf32 && problem.dtype == DType::F32,
            _ => self.graphs().into_iter().any(|problem| problem.tf32 && problem.multiplies_f32()),
        }
    }

    fn in_words(&self) -> String {
        match self {
            Self::Product(p) => {
                let batch = if p.batch == 1 { String::new() } else { format!("{} x ", p.batch) };
                format!("product {} {batch}[{}, {}] x [{}, {}]", p.dtype.name(), p.m, p.k, p.k, p.n)
            }
            Self::Graph(problem) => problem.in_words(),
            Self::Parts(parts) => {
                let first = parts.first().map(|(problem, _)| problem.in_words()).unwrap_or_default();
                format!("{} of {first}", parts.len())
            }
        }
    }
}

/// What is chosen between: all steps that ask the same of a library, and would run on the same kernels without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// The problem and its sizes in words, and a hash of everything.
    pub op: String,
    /// What a library is asked.
    pub problem: Problem,
    /// Whether that is for an upsampled image that is written out, where it might be folded.
    pub is_whole: bool,
    /// What it is asked for such an image, where the upsampling is folded and need not be.
    pub whole: Option<Problem>,
}

impl Site {
    /// A step's: `kernels` are the names of those around the library and of those instead of it.
    pub fn new(problem: Problem, kernels: &[&str]) -> Self {
        let all = blake3::hash(format!("{problem:?} {kernels:?}").as_bytes()).to_hex();
        Self { op: format!("{} {}", problem.in_words(), &all[..16]), problem, is_whole: false, whole: None }
    }

    /// All that may be chosen. Some may turn out not to work; the step's own kernels are last.
    pub fn ways(&self, delegates: &Delegates) -> Vec<Choice> {
        let own = (0..self.problem.ways(delegates)).map(if self.is_whole { Choice::Whole } else { Choice::Library });
        let whole = self.whole.as_ref().map_or(0, |whole| whole.ways(delegates));
        own.chain((0..whole).map(Choice::Whole)).chain([Choice::Kernel]).collect()
    }

    /// What a library is asked for one of the ways.
    pub fn problem_of(&self, way: Choice) -> &Problem {
        match (way, &self.whole) {
            (Choice::Whole(_), Some(whole)) => whole,
            _ => &self.problem,
        }
    }

    /// Largest difference between two ways over the largest value: both are rounded, after sums in their own order.
    pub fn tolerance(&self, out: DType) -> f64 {
        let unit = |dtype: DType| match dtype {
            DType::F16 => 2f64.powi(-11),
            DType::BF16 => 2f64.powi(-8),
            _ => 2f64.powi(-24),
        };
        let products = if self.problem.rounds_to_tf32() { unit(DType::F16) } else { unit(DType::F32) };
        8.0 * (unit(out) + products * (self.problem.terms() as f64).sqrt())
    }
}

/// Who computes the steps of a site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The library, by its way of this number.
    Library(usize),
    /// The same, over an upsampled image that is written out, where it might be folded.
    Whole(usize),
    /// The step's own kernels.
    Kernel,
}

impl std::fmt::Display for Choice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Library(number) => write!(f, "library {number}"),
            Self::Whole(number) => write!(f, "whole {number}"),
            Self::Kernel => f.write_str("kernel"),
        }
    }
}

impl Choice {
    /// That of its text.
    pub fn parse(text: &str) -> Option<Self> {
        match text {
            "kernel" => Some(Self::Kernel),
            _ => {
                let whole = text.strip_prefix("whole ").and_then(|number| number.parse().ok()).map(Self::Whole);
                whole.or_else(|| text.strip_prefix("library ")?.parse().ok().map(Self::Library))
            }
        }
    }
}

/// What a library may do of a step: the first of these that it takes.
#[derive(Clone, Debug, PartialEq)]
pub struct Delegate(pub Vec<Form>);

/// A way to leave a step to a library.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    work: Work,
    /// Where the library writes.
    out: Out,
    /// In which type.
    dtype: DType,
    /// What must be done first: writes [`IMAGE`], or [`MASK`] and [`HIDES`].
    pub before: Option<Launch>,
    /// What the library does not do of the step: reads and writes `out` and the step's operands.
    pub after: Option<Launch>,
}

#[derive(Clone, Debug, PartialEq)]
enum Work {
    Product(Epilogue),
    Convolution(Convolution),
    Attention(Attention),
}

/// Scratch memory for a library's result.
pub const RESULT: Place = Place::Scratch(0);
/// Scratch memory for the upsampled image that a convolution reads.
pub const IMAGE: Place = Place::Scratch(1);
/// Scratch memory for a mask of bool as one that is added.
pub const MASK: Place = Place::Scratch(0);
/// Scratch memory for which rows of a mask hide every key.
pub const HIDES: Place = Place::Scratch(1);

/// Makes the kernels around a library's work.
pub trait Around {
    /// The step's pointwise work over a result of this type at `out`.
    ///
    /// # Errors
    /// If the step has none.
    fn after(&mut self, out: Out, dtype: DType) -> Result<Launch>;

    /// The upsampled image.
    ///
    /// # Errors
    /// If the step has no image.
    fn upsampled(&mut self) -> Result<Launch>;

    /// What makes an attention's mask of bool one that is added, at [`MASK`], and what writes the rows of the result that it
    /// hides every key from.
    ///
    /// # Errors
    /// If the step has no mask.
    fn added_mask(&mut self) -> Result<[Launch; 2]>;
}

/// The place of a library's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// The step's first store.
    Store,
    /// Scratch memory of the step, dense.
    Scratch,
    /// The same, in four dense parts: results at even rows and columns, at even rows and odd columns, at odd rows and even
    /// columns, at odd ones.
    Parts,
}

/// Why no library is: and where that was chosen by measuring, for what.
pub type Refused = (Refusal, Option<Box<Site>>);

/// A step that a library is ready for.
#[derive(Debug)]
pub struct Ready {
    /// What runs.
    pub planned: Arc<dyn Planned>,
    /// On what.
    pub operands: Operands,
    /// Which form of [`Delegate`].
    pub form: usize,
    /// What the tuner may choose between.
    pub site: Site,
    /// The form of [`Site::whole`], and its operands.
    pub whole: Option<(usize, Operands)>,
}

/// Operands of a library, in the order of [`Planned::run`].
#[derive(Debug)]
pub struct Operands {
    /// Where they lie.
    pub places: Vec<Place>,
    /// Bytes that the address of each must be a multiple of.
    pub align_bytes: Vec<usize>,
    /// Bytes to add to the addresses for each call.
    pub calls: Vec<Vec<isize>>,
    /// Bytes of the step's scratch memory, as far as it is needed, and what it is for.
    pub scratch: [(usize, &'static str); 2],
}

/// What scratch memory of a step is for.
const A_RESULT: &str = "a library's result";

impl Delegate {
    /// What a library may do of `step`, whose root is `op` with a result of type `root`; `may_fold` allows an upsampling to be
    /// folded into the weights of what follows it.
    ///
    /// # Errors
    /// What `around` says.
    pub fn new(step: &Step, op: &Op, root: DType, may_fold: bool, around: &mut dyn Around) -> Result<Option<Self>> {
        if step.kernel == Kernel::Attention {
            let Some(attention) = Attention::of(op) else { return Ok(None) };
            let [before, after] = match step.operands.get(3) {
                Some(mask) if mask.dtype == DType::Bool => around.added_mask()?.map(Some),
                _ => [None, None],
            };
            let work = Work::Attention(attention);
            return Ok(Some(Self(vec![Form { work, out: Out::Store, dtype: root, before, after }])));
        }
        let is_float = |dtype: DType| matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
        let (Some(body), [x, w]) = (&step.body, step.operands.as_slice()) else { return Ok(None) };
        if x.dtype != w.dtype || !is_float(x.dtype) || (root != x.dtype && root != DType::F32) {
            return Ok(None);
        }
        let mut forms = Vec::new();
        let is_plain = root == x.dtype;
        let whole = |work| Form { work, out: Out::Store, dtype: root, before: None, after: None };
        let bare = |work, around: &mut dyn Around| -> Result<Form> {
            let out = raw_result(step, root);
            Ok(Form { work, out, dtype: root, before: None, after: Some(around.after(out, root)?) })
        };
        match (step.kernel, op) {
            (Kernel::Linear | Kernel::Matmul, _) => {
                let epilogue = product::epilogue_of(step, &body.program, x.dtype).filter(|_| is_plain);
                forms.extend(epilogue.map(|epilogue| whole(Work::Product(epilogue))));
                // Where there is no algorithm with the epilogue, there may be one without.
                if epilogue != Some(Epilogue::default()) {
                    forms.push(bare(Work::Product(Epilogue::default()), around)?);
                }
            }
            (Kernel::Convolution, Op::Convolution { .. }) => {
                let Some(convolution) = Convolution::of(step, op) else { return Ok(None) };
                let before = if step.upsample.is_empty() { None } else { Some(around.upsampled()?) };
                if let Some(folded) = convolution.folded(step).filter(|_| may_fold) {
                    let (work, out) = (Work::Convolution(folded), Out::Parts);
                    let after = Some(around.after(out, root)?);
                    forms.push(Form { work, out, dtype: root, before: None, after });
                }
                if let Some(links) = convolution::epilogue_of(step, &body.program, x.dtype).filter(|_| is_plain) {
                    let work = Work::Convolution(convolution.clone().followed_by(links));
                    forms.push(Form { before: before.clone(), ..whole(work) });
                }
                let mut out = raw_result(step, root);
                let mut push = |out: Out, forms: &mut Vec<Form>| -> Result<()> {
                    let (work, after) = (Work::Convolution(convolution.clone()), Some(around.after(out, root)?));
                    forms.push(Form { work, out, dtype: root, before: before.clone(), after });
                    Ok(())
                };
                if out == Out::Store {
                    push(out, &mut forms)?;
                    out = Out::Scratch;
                }
                // Where the result has gaps that cuDNN does not write.
                if forms.iter().all(|form| form.out != out) {
                    push(out, &mut forms)?;
                }
            }
            _ => return Ok(None),
        }
        Ok(Some(Self(forms)))
    }

    /// Asks the library, for these sizes. `kernels` gives the names of the kernels that a form and the step itself have.
    ///
    /// # Errors
    /// The reason why the step's own kernels must run: that of the first form.
    pub fn plan(
        &self,
        asked: &Asked<'_>,
        delegates: &Delegates,
        kernels: &dyn Fn(&Form) -> Vec<String>,
    ) -> std::result::Result<Ready, Refused> {
        let mut reason = None;
        // One that folds comes first; those behind it do the same over a whole image.
        for (at, form) in self.0.iter().enumerate() {
            let whole = || -> Option<(usize, Problem, Operands)> {
                if !form.is_folded() || asked.is_bounded {
                    return None;
                }
                let mut others = self.0.iter().enumerate().filter(|(_, form)| !form.is_folded());
                others
                    .find_map(|(at, form)| form.problem(asked).ok().map(|(problem, operands)| (at, problem, operands)))
            };
            let ready = || -> std::result::Result<Ready, Refused> {
                let (problem, operands) = form.problem(asked).map_err(|why| (why, None))?;
                if form.is_folded() && asked.is_bounded && self.has_less_scratch(asked, &operands) {
                    return Err(("the whole image needs less memory than four parts of the result".to_owned(), None));
                }
                let site = || {
                    let names = kernels(form);
                    Site::new(problem.clone(), &names.iter().map(String::as_str).collect::<Vec<_>>())
                };
                let choice = match delegates.choice(|| site().op) {
                    None => None,
                    Some(Choice::Whole(number)) => {
                        let whole = whole().and_then(|(form, problem, operands)| {
                            let planned = delegates.planned(&problem, Some(number)).ok()?;
                            let site = Site { problem, is_whole: true, ..site() };
                            Some(Ready { planned, operands, form, site, whole: None })
                        });
                        match whole {
                            Some(ready) => return Ok(ready),
                            None => None,
                        }
                    }
                    Some(Choice::Library(number)) => Some(number),
                    Some(Choice::Kernel) => {
                        return Err(("its own kernels were faster".to_owned(), Some(Box::new(site()))));
                    }
                };
                // A way that does not work any more is none.
                let planned = delegates.planned(&problem, choice).or_else(|_| delegates.planned(&problem, None));
                let planned = planned.map_err(|why| (why, None))?;
                let mut site = site();
                let whole = whole().map(|(form, problem, operands)| {
                    site.whole = Some(problem);
                    (form, operands)
                });
                Ok(Ready { planned, operands, form: at, site, whole })
            };
            match ready() {
                Err((why, None)) => {
                    reason.get_or_insert(why);
                }
                done => return done,
            }
        }
        Err((reason.unwrap_or_else(|| "no library has this op".to_owned()), None))
    }

    /// Whether the first form over a whole image needs less memory than operands of one that folds.
    fn has_less_scratch(&self, asked: &Asked<'_>, folded: &Operands) -> bool {
        let bytes = |operands: &Operands| operands.scratch.iter().map(|(bytes, _)| *bytes).sum::<usize>();
        let mut others = self.0.iter().filter(|form| !form.is_folded());
        others.find_map(|form| form.problem(asked).ok()).is_some_and(|(_, other)| bytes(&other) < bytes(folded))
    }

    /// Whether a form reads sums of taps.
    pub fn folds(&self) -> bool {
        self.0.iter().any(Form::is_folded)
    }

    /// Whether a form reads a weight with its channels as neighbours.
    pub fn reads_taps(&self) -> bool {
        self.0.iter().any(|form| matches!(&form.work, Work::Convolution(convolution) if convolution.reads_taps()))
    }

    /// The graphs that cuDNN is asked first, if it is.
    pub fn graphs(&self, asked: &Asked<'_>) -> Vec<cudnn::Problem> {
        let first = self.0.iter().find_map(|form| form.problem(asked).ok());
        first.map_or_else(Vec::new, |(problem, _)| problem.graphs().into_iter().cloned().collect())
    }
}

/// A step with numbers, for a device.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The step.
    pub step: &'a Step,
    /// Values of the symbols.
    pub bindings: &'a [i64],
    /// Compute capability.
    pub arch: u32,
    /// What the user allows.
    pub numerics: Numerics,
    /// Operations from which on an upsampling is folded; 0: also where its sums of taps take more memory than its result.
    pub fold_flops: u64,
    /// Whether memory has a bound, so that what is faster and needs more is no choice.
    pub is_bounded: bool,
}

/// Most workspace of a product or an attention.
pub(super) fn workspace_bytes(arch: u32) -> usize {
    WORKSPACE_BYTES[usize::from(arch >= 90)]
}

impl Form {
    fn is_folded(&self) -> bool {
        matches!(&self.work, Work::Convolution(convolution) if convolution.is_folded())
    }

    fn problem(&self, asked: &Asked<'_>) -> std::result::Result<(Problem, Operands), Refusal> {
        let Asked { step, bindings, arch, numerics, fold_flops, .. } = *asked;
        let workspace_bytes = workspace_bytes(arch);
        let out = (self.out, self.dtype);
        match &self.work {
            Work::Product(epilogue) => {
                let shape = ProductShape::of(step, bindings, out, epilogue).map_err(|e| e.to_string())??;
                let tf32 = numerics.tf32_products;
                Ok((Problem::Product(cublaslt::Problem { workspace_bytes, tf32, ..shape.problem }), shape.operands))
            }
            Work::Convolution(convolution) if convolution.is_folded() => {
                let flops = step.flops.eval(bindings).map_err(|e| e.to_string())?;
                if u64::try_from(flops).unwrap_or(0) < fold_flops {
                    return Err("it is too small to be worth four convolutions".to_owned());
                }
                if fold_flops > 0
                    && convolution::keeps_more_than_it_writes(step, bindings).map_err(|e| e.to_string())?
                {
                    return Err("its sums of taps would take more memory than its result".to_owned());
                }
                let (parts, operands) = convolution.parts(asked, self.dtype).map_err(|e| e.to_string())??;
                let (workspace_bytes, tf32) = (CONVOLUTION_WORKSPACE_BYTES, numerics.tf32_convolutions);
                let limited = |(graph, moves)| (cudnn::Problem { workspace_bytes, tf32, ..graph }, moves);
                Ok((Problem::Parts(parts.into_iter().map(limited).collect()), operands))
            }
            Work::Convolution(convolution) => {
                let (graph, operands) = convolution.problem(asked, out).map_err(|e| e.to_string())??;
                let (workspace_bytes, tf32) = (CONVOLUTION_WORKSPACE_BYTES, numerics.tf32_convolutions);
                Ok((Problem::Graph(cudnn::Problem { workspace_bytes, tf32, ..graph }), operands))
            }
            Work::Attention(attention) => {
                if super::found().cudnn.as_ref().is_ok_and(|found| found.version == REFUSED_ATTENTION) {
                    return Err("cuDNN's own frontend refuses the attention of 9.10".to_owned());
                }
                let (graph, operands) = attention.problem(asked).map_err(|e| e.to_string())??;
                let tf32 = numerics.tf32_products;
                Ok((Problem::Graph(cudnn::Problem { workspace_bytes, tf32, ..graph }), operands))
            }
        }
    }
}

/// The instructions of a body that follow the sums, one operand each: added loads and functions.
enum Link {
    Add(usize),
    Apply(Unary),
}

/// A body that is a chain over the accumulators, stored once as `dtype`; `None` if it is anything else.
fn chain(program: &TileProgram, dtype: DType) -> Option<Vec<Link>> {
    if program.stores.as_slice() != [kernel_type(dtype)?] {
        return None;
    }
    let mut at: Option<Reg> = None;
    let mut is_rounded = false;
    let mut loaded: Vec<(Reg, usize)> = Vec::new();
    let mut links = Vec::new();
    for instr in &program.instrs {
        // Rounding to the result's type is what storing does; nothing may come between.
        if is_rounded && !matches!(instr, Instr::Store { .. }) {
            return None;
        }
        match *instr {
            Instr::Load { dst, src: Source::Acc } if at.is_none() => at = Some(dst),
            Instr::Load { dst, src: Source::Memory(i) } => {
                loaded.retain(|(reg, _)| *reg != dst);
                loaded.push((dst, i as usize));
            }
            Instr::Binary { dst, op: Binary::Add, a, b } => {
                let other = if Some(a) == at { b } else { a };
                if Some(if other == a { b } else { a }) != at {
                    return None;
                }
                links.push(Link::Add(loaded.iter().find(|(reg, _)| *reg == other)?.1));
                loaded.retain(|(reg, _)| *reg != dst && *reg != other);
                at = Some(dst);
            }
            Instr::Unary { dst, op, a } if Some(a) == at => {
                links.push(Link::Apply(op));
                at = Some(dst);
            }
            Instr::Round { dst, a, dtype: to } if Some(a) == at && Some(to) == kernel_type(dtype) => {
                is_rounded = true;
                at = Some(dst);
            }
            Instr::Store { src, .. } if Some(src) == at => {}
            _ => return None,
        }
    }
    Some(links)
}

/// The same for every row: one element per column.
fn is_per_column(load: &Access, step: &Step) -> bool {
    let columns = step.space.last();
    let lead = load.shape.len().saturating_sub(1);
    let is_flat = load.shape.iter().zip(&load.strides).take(lead).all(|(size, stride)| size.is(1) || stride.is(0));
    is_flat && load.shape.last() == columns && load.strides.last().is_some_and(|s| s.is(1))
}

/// Covers the step's space, with neighbouring columns.
fn is_full(access: &Access, step: &Step) -> bool {
    let is_walked = access.strides.iter().zip(&access.shape).all(|(stride, size)| size.is(1) || !stride.is(0));
    access.shape == step.space && is_walked && access.has_unit_columns()
}

/// Where a result that needs more pointwise work goes: to the step's own result, if nothing that this work reads is lost.
fn raw_result(step: &Step, dtype: DType) -> Out {
    let fits = |store: &&Access| {
        store.dtype == dtype && is_full(store, step) && step.loads.iter().all(|l| l.buffer != store.buffer)
    };
    if step.stores.first().filter(fits).is_some() { Out::Store } else { Out::Scratch }
}

/// Largest power of two up to [`ALIGN_BYTES`] that divides every number.
pub(super) fn alignment(bytes: impl IntoIterator<Item = isize>) -> usize {
    let all = bytes.into_iter().fold(ALIGN_BYTES as isize, |all, b| all | b);
    1 << all.trailing_zeros()
}

/// Who computes a step.
pub(super) fn choice(step: String, outcome: std::result::Result<&'static str, Refusal>) -> StepChoice {
    match outcome {
        Ok(library) => StepChoice { step, by: library, reason: String::new() },
        Err(reason) => StepChoice { step, by: "kernel", reason },
    }
}
