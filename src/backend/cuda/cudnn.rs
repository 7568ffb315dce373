//! Graphs of operations by cuDNN, through its backend API.
//!
//! A [`Problem`] is a small graph in plain numbers: tensors, and operations on them. Planning turns it into cuDNN's
//! descriptors, asks the heuristic for engines and builds plans until one succeeds: an engine that the heuristic names is
//! not yet one that works. A run sets the stream, binds addresses and executes; it may be captured.
//!
//! Building a plan takes up to seconds, reading it back milliseconds: plans are kept in a folder if there is one, by the
//! problem, the library's version and the device. What the library does not read back is removed and built anew.
//!
//! Planning needs no device where its properties are given as JSON ([`Cudnn::for_description`]): so tests build the plans
//! of GPUs that are not there.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, TryLockError};

use cudarc::cudnn::sys;
use sys::cudnnBackendAttributeName_t as A;
use sys::cudnnBackendAttributeType_t as T;
use sys::cudnnBackendDescriptorType_t as D;
pub use sys::cudnnPointwiseMode_t as Mode;

use super::NAME;
use super::delegate::{Planned, Refusal};
use super::driver::StreamHandle;
use crate::ir::DType;
use crate::store::kept::{self, Kept};
use crate::{Error, Result};

/// Engines of one heuristic that are tried.
const ATTEMPTS: usize = 12;
/// Most plans that are built at the same time: each needs a handle of its own.
pub(super) const MOST_HANDLES: usize = 4;
/// Most that a folder of plans holds.
const MOST_BYTES: u64 = 256 << 20;
/// Plans are run by one thread at a time, and not while others are built; they are built by several. By cuDNN's documentation
/// handles alone tell threads apart. But two of eight runs of a test with five threads ended in a segmentation fault on an H200
/// (cuDNN 9.19), in first calls that planned and ran side by side; several threads that plan have never. What was found since
/// (`CaptureStream`) may explain it: a GPU has to say whether this lock is needed.
static RUNNING: RwLock<()> = RwLock::new(());
/// Engines that are asked for from one heuristic.
const ASKED: i64 = 16;

/// Where a tensor's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Storage {
    /// Operand `index` of a run, at a multiple of that many bytes.
    Operand(usize, i64),
    /// Nowhere: one operation of the graph makes it for another.
    Virtual,
    /// One f32, known when the plan is made: its bits.
    Value(u32),
}

/// A tensor of a graph; sizes and strides in the order batch, channels, spatial (a matrix: batch, heads, rows, columns).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub dims: Vec<i64>,
    /// In elements.
    pub strides: Vec<i64>,
    /// Where it is.
    pub storage: Storage,
}

/// An operation; numbers are indices into [`Problem::tensors`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Cross-correlation.
    Convolution {
        /// Image.
        x: usize,
        /// Taps.
        w: usize,
        /// Result.
        y: usize,
        /// Per spatial dimension: before the image, and after it.
        padding: [Vec<i64>; 2],
        /// Per spatial dimension.
        stride: Vec<i64>,
        /// Per spatial dimension.
        dilation: Vec<i64>,
    },
    /// Element by element, broadcast.
    Pointwise {
        /// What.
        mode: Mode,
        /// First operand.
        x: usize,
        /// Second operand.
        b: Option<usize>,
        /// Condition of a selection.
        t: Option<usize>,
        /// Dimension of an index.
        axis: Option<i64>,
        /// Result.
        y: usize,
    },
    /// Products of pairs of matrices.
    Matmul {
        /// Left.
        a: usize,
        /// Right.
        b: usize,
        /// Result.
        c: usize,
    },
    /// Over the dimensions that are 1 in the result.
    Reduction {
        /// The largest instead of the sum.
        is_max: bool,
        /// Operand.
        x: usize,
        /// Result.
        y: usize,
    },
}

/// A graph of operations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Tensors; their identity in a run is their index.
    pub tensors: Vec<Tensor>,
    /// Operations in order.
    pub operations: Vec<Operation>,
    /// Products of f32 may take TF32 operands.
    pub tf32: bool,
    /// Most bytes of workspace.
    pub workspace_bytes: usize,
}

fn check(status: sys::cudnnStatus_t, what: &str) -> std::result::Result<(), Refusal> {
    if status == sys::cudnnStatus_t::CUDNN_STATUS_SUCCESS {
        return Ok(());
    }
    let mut text = [0 as c_char; 256];
    // SAFETY: the buffer has the size that is said; the library ends the text with a zero byte.
    unsafe { sys::cudnnGetLastErrorString(text.as_mut_ptr(), text.len() - 1) };
    // SAFETY: the last byte is zero whatever was written before it.
    let text = unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned();
    let first = text.lines().next().unwrap_or_default().trim();
    Err(format!("cuDNN refuses {what}: {status:?} {first}").trim_end().to_owned())
}

/// A descriptor of the backend API.
#[derive(Debug)]
struct Descriptor(sys::cudnnBackendDescriptor_t);

// SAFETY: a finalized descriptor is only read.
unsafe impl Send for Descriptor {}
// SAFETY: as above.
unsafe impl Sync for Descriptor {}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once. What holds it holds its own reference.
        unsafe { sys::cudnnBackendDestroyDescriptor(self.0) };
    }
}

type Made<T> = std::result::Result<T, Refusal>;

impl Descriptor {
    fn new(kind: D) -> Made<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { sys::cudnnBackendCreateDescriptor(kind, &raw mut raw) }, &format!("{kind:?}"))?;
        Ok(Self(raw))
    }

    fn set<V>(self, attribute: A, kind: T, values: &[V]) -> Made<Self> {
        let count = values.len() as i64;
        // SAFETY: a live descriptor; the values are copied by the call, and are of the type that `kind` names.
        let code =
            unsafe { sys::cudnnBackendSetAttribute(self.0, attribute, kind, count, values.as_ptr().cast::<c_void>()) };
        check(code, &format!("{attribute:?}"))?;
        Ok(self)
    }

    fn numbers(self, attribute: A, values: &[i64]) -> Made<Self> {
        self.set(attribute, T::CUDNN_TYPE_INT64, values)
    }

    fn parts(self, attribute: A, parts: &[&Descriptor]) -> Made<Self> {
        let raw: Vec<_> = parts.iter().map(|d| d.0).collect();
        self.set(attribute, T::CUDNN_TYPE_BACKEND_DESCRIPTOR, &raw)
    }

    fn dtype(self, attribute: A, dtype: sys::cudnnDataType_t) -> Made<Self> {
        self.set(attribute, T::CUDNN_TYPE_DATA_TYPE, &[dtype])
    }

    fn finish(self, what: &str) -> Made<Self> {
        // SAFETY: a live descriptor.
        check(unsafe { sys::cudnnBackendFinalize(self.0) }, what)?;
        Ok(self)
    }

    fn number(&self, attribute: A) -> Made<i64> {
        let (mut value, mut count) = (0i64, 0i64);
        // SAFETY: a live descriptor, and room for one value of this type.
        let code = unsafe {
            let to = (&raw mut value).cast();
            sys::cudnnBackendGetAttribute(self.0, attribute, T::CUDNN_TYPE_INT64, 1, &raw mut count, to)
        };
        check(code, &format!("{attribute:?}"))?;
        Ok(value)
    }

    fn text(&self, attribute: A) -> Made<Vec<u8>> {
        let get = |bytes: i64, count: &mut i64, to: *mut c_void| {
            // SAFETY: a live descriptor, and room for as many characters as are said.
            let code =
                unsafe { sys::cudnnBackendGetAttribute(self.0, attribute, T::CUDNN_TYPE_CHAR, bytes, count, to) };
            check(code, &format!("{attribute:?}"))
        };
        let (mut count, mut written) = (0i64, 0i64);
        get(0, &mut count, std::ptr::null_mut())?;
        let mut text = vec![0u8; usize::try_from(count).unwrap_or(0)];
        get(count, &mut written, text.as_mut_ptr().cast())?;
        text.truncate(usize::try_from(written).unwrap_or(0));
        Ok(text)
    }

    /// Fills descriptors that were made for it; gives the number of those that were filled.
    fn fill(&self, attribute: A, parts: &[Descriptor]) -> Made<usize> {
        let mut raw: Vec<_> = parts.iter().map(|d| d.0).collect();
        let mut count = 0i64;
        // SAFETY: a live descriptor, and as many descriptors to fill as are said.
        let code = unsafe {
            let (wanted, to) = (raw.len() as i64, raw.as_mut_ptr().cast());
            sys::cudnnBackendGetAttribute(
                self.0,
                attribute,
                T::CUDNN_TYPE_BACKEND_DESCRIPTOR,
                wanted,
                &raw mut count,
                to,
            )
        };
        check(code, &format!("{attribute:?}"))?;
        Ok(usize::try_from(count).unwrap_or(0).min(parts.len()))
    }
}

fn data_type(dtype: DType) -> Made<sys::cudnnDataType_t> {
    match dtype {
        DType::F32 => Ok(sys::cudnnDataType_t::CUDNN_DATA_FLOAT),
        DType::F16 => Ok(sys::cudnnDataType_t::CUDNN_DATA_HALF),
        DType::BF16 => Ok(sys::cudnnDataType_t::CUDNN_DATA_BFLOAT16),
        DType::I32 => Ok(sys::cudnnDataType_t::CUDNN_DATA_INT32),
        DType::Bool => Ok(sys::cudnnDataType_t::CUDNN_DATA_BOOLEAN),
        other => Err(format!("cuDNN has no kernels for {}", other.name())),
    }
}

/// The type in which cuDNN wants an operation computed.
fn computed_as(mode: Mode) -> sys::cudnnDataType_t {
    match mode {
        Mode::CUDNN_POINTWISE_GEN_INDEX => sys::cudnnDataType_t::CUDNN_DATA_INT32,
        Mode::CUDNN_POINTWISE_CMP_GE => sys::cudnnDataType_t::CUDNN_DATA_BOOLEAN,
        _ => FLOAT,
    }
}

const FLOAT: sys::cudnnDataType_t = sys::cudnnDataType_t::CUDNN_DATA_FLOAT;

/// A handle of a device. It knows the stream, and neither it nor a plan that was made with it may be used by two threads at
/// once ("thread safety" and "limitations" in cuDNN's documentation).
#[derive(Debug)]
struct Handle(Mutex<sys::cudnnHandle_t>);

// SAFETY: the handle is behind a lock.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    fn new() -> Made<Arc<Self>> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { sys::cudnnCreate(&raw mut handle) }, "to start")?;
        Ok(Arc::new(Self(Mutex::new(handle))))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `cudnnCreate`, destroyed once, after every plan that holds it.
        unsafe { sys::cudnnDestroy(*self.0.get_mut().unwrap_or_else(PoisonError::into_inner)) };
    }
}

/// Whose plans are made.
#[derive(Debug)]
enum Whose {
    /// A device's: handles to make them with, one for each that is made at the same time.
    Device(Mutex<Vec<Arc<Handle>>>, AtomicUsize),
    /// Those of a device that is described.
    Description(Descriptor),
}

/// What a descriptor is told about whose plans are made.
#[derive(Clone, Copy)]
enum Mark<'a> {
    Handle(sys::cudnnHandle_t),
    Properties(&'a Descriptor),
}

impl Mark<'_> {
    fn set(self, descriptor: Descriptor, handle: Option<A>, properties: Option<A>) -> Made<Descriptor> {
        match (self, handle, properties) {
            (Self::Handle(own), Some(attribute), _) => descriptor.set(attribute, T::CUDNN_TYPE_HANDLE, &[own]),
            (Self::Properties(own), _, Some(attribute)) => descriptor.parts(attribute, &[own]),
            _ => Ok(descriptor),
        }
    }
}

/// A plan that was built or read, before it is bound to a problem.
struct Built {
    plan: Descriptor,
    workspace_bytes: usize,
    /// Its place in the heuristic's order.
    number: usize,
    engine: i64,
}

/// The library, made ready for one device.
#[derive(Debug)]
pub struct Cudnn {
    whose: Whose,
    version: usize,
    /// What it makes plans for.
    device: String,
    kept: Option<Kept>,
    built: AtomicUsize,
}

impl Cudnn {
    fn new(whose: Whose, device: &str, folder: Option<PathBuf>) -> Arc<Self> {
        // SAFETY: takes nothing and returns a number; whoever has made `whose` has called the library.
        let version = unsafe { sys::cudnnGetVersion() };
        let kept = folder.map(|folder| Kept::new(folder, "plan", MOST_BYTES));
        Arc::new(Self { whose, version, device: device.to_owned(), kept, built: AtomicUsize::new(0) })
    }

    /// For the device whose context is current, `device` in words; plans are kept in `folder`, if there is one. The library
    /// must have been found.
    pub(super) fn open(device: &str, folder: Option<PathBuf>) -> Made<Arc<Self>> {
        let handles = Mutex::new(vec![Handle::new()?]);
        Ok(Self::new(Whose::Device(handles, AtomicUsize::new(0)), device, folder))
    }

    /// For a device that need not be there, from its properties in cuDNN's JSON form: plans are built, not run.
    ///
    /// # Errors
    /// What the library says, or why it is not there.
    pub fn for_description(json: &str, folder: Option<PathBuf>) -> Made<Arc<Self>> {
        if let Err(reason) = &super::found().cudnn {
            return Err(reason.clone());
        }
        let properties = Descriptor::new(D::CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR)?
            .set(A::CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, T::CUDNN_TYPE_CHAR, json.as_bytes())?
            .finish("a device's description")?;
        Ok(Self::new(Whose::Description(properties), json, folder))
    }

    /// Name and version: another version makes other plans.
    pub fn version(&self) -> String {
        format!("cuDNN {}", self.version)
    }

    /// Plans that had to be built so far.
    pub fn built(&self) -> usize {
        self.built.load(Ordering::Relaxed)
    }

    /// Does `work` with a handle that nobody else uses meanwhile, and gives that too. No plan is run meanwhile ([`RUNNING`]).
    fn marked<R>(&self, work: impl FnOnce(Mark<'_>) -> Made<R>) -> Made<(R, Option<Arc<Handle>>)> {
        let _planning = RUNNING.read().unwrap_or_else(PoisonError::into_inner);
        let (handles, next) = match &self.whose {
            Whose::Description(properties) => return Ok((work(Mark::Properties(properties))?, None)),
            Whose::Device(handles, next) => (handles, next),
        };
        let all = handles.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for handle in &all {
            let raw = match handle.0.try_lock() {
                Ok(raw) => raw,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => continue,
            };
            return Ok((work(Mark::Handle(*raw))?, Some(handle.clone())));
        }
        let handle = if all.len() < MOST_HANDLES {
            let fresh = Handle::new()?;
            handles.lock().unwrap_or_else(PoisonError::into_inner).push(fresh.clone());
            fresh
        } else {
            all[next.fetch_add(1, Ordering::Relaxed) % all.len()].clone()
        };
        let raw = handle.0.lock().unwrap_or_else(PoisonError::into_inner);
        let done = work(Mark::Handle(*raw))?;
        drop(raw);
        Ok((done, Some(handle)))
    }

    /// A plan for `problem`, or why there is none: that of engine number `choice` in the heuristic's order, else of the
    /// first that works.
    ///
    /// # Errors
    /// What the library says; of several engines that fail, the first.
    pub fn plan(&self, problem: &Problem, choice: Option<usize>) -> Made<Execution> {
        let key =
            kept::key(&["plan 2", &self.version(), &self.device, &format!("{problem:?}"), &format!("{choice:?}")]);
        let (built, handle) = self.marked(|mark| {
            if let Some(built) = self.read(&key, problem, mark) {
                return Ok(built);
            }
            let built = Self::build(problem, choice, mark)?;
            self.built.fetch_add(1, Ordering::Relaxed);
            self.write(&key, &built);
            Ok(built)
        })?;
        let Built { plan, workspace_bytes, number, engine } = built;
        let (operands, values) = (operands(problem), values(problem));
        Ok(Execution { handle, plan, workspace_bytes, number, engine, operands, values })
    }

    /// The plan that is kept under this key: the engine, its place in the heuristic's order, and what the library made of the
    /// plan.
    fn read(&self, key: &str, problem: &Problem, mark: Mark<'_>) -> Option<Built> {
        let kept = self.kept.as_ref()?;
        let bytes = kept.read(key)?;
        let read = || -> Made<Built> {
            let (engine, rest) = bytes.split_first_chunk().ok_or("a plan without an engine")?;
            let (number, json) = rest.split_first_chunk().ok_or("a plan without a number")?;
            let number = usize::try_from(u64::from_le_bytes(*number)).map_err(|_| "a number of no engine")?;
            let plan = Descriptor::new(D::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?;
            let (handle, properties) = (A::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, A::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
            let plan = mark
                .set(plan, Some(handle), Some(properties))?
                .set(A::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION, T::CUDNN_TYPE_CHAR, json)?
                .finish("a plan that was kept")?;
            let workspace_bytes = workspace_of(&plan, problem)?;
            Ok(Built { plan, workspace_bytes, number, engine: i64::from_le_bytes(*engine) })
        };
        read().inspect_err(|_| kept.remove(key)).ok()
    }

    fn write(&self, key: &str, built: &Built) {
        let Some(kept) = &self.kept else { return };
        // An engine whose plans cannot be written is built by every process.
        if let Ok(json) = built.plan.text(A::CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION) {
            let (engine, number) = (built.engine.to_le_bytes(), (built.number as u64).to_le_bytes());
            kept.write(key, &[engine.as_slice(), &number, &json].concat());
        }
    }

    fn build(problem: &Problem, choice: Option<usize>, mark: Mark<'_>) -> Made<Built> {
        let tensors =
            problem.tensors.iter().enumerate().map(|(id, t)| tensor(id, t)).collect::<Made<Vec<Descriptor>>>()?;
        let operations = problem.operations.iter().map(|o| operation(o, &tensors)).collect::<Made<Vec<_>>>()?;
        let graph = Descriptor::new(D::CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR)?;
        let graph = mark
            .set(graph, Some(A::CUDNN_ATTR_OPERATIONGRAPH_HANDLE), None)?
            .parts(A::CUDNN_ATTR_OPERATIONGRAPH_OPS, &operations.iter().collect::<Vec<_>>())?
            .finish("this graph of operations")?;
        use sys::cudnnBackendHeurMode_t::{CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK};
        let (mut reason, mut number) = (None, 0);
        for mode in [CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK] {
            let configs = match configs(&graph, mode, mark) {
                Ok(configs) => configs,
                Err(why) => {
                    reason.get_or_insert(why);
                    continue;
                }
            };
            for config in configs.iter().take(ATTEMPTS) {
                number += 1;
                if choice.is_some_and(|choice| choice + 1 != number) {
                    continue;
                }
                match execution_plan(problem, config, number - 1, mark) {
                    Ok(built) => return Ok(built),
                    Err(why) => {
                        reason.get_or_insert(why);
                    }
                }
            }
        }
        Err(reason.unwrap_or_else(|| "cuDNN has no engine for this graph of operations".to_owned()))
    }
}

fn configs(graph: &Descriptor, mode: sys::cudnnBackendHeurMode_t, mark: Mark<'_>) -> Made<Vec<Descriptor>> {
    let heuristic = Descriptor::new(D::CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR)?
        .parts(A::CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, &[graph])?
        .set(A::CUDNN_ATTR_ENGINEHEUR_MODE, T::CUDNN_TYPE_HEUR_MODE, &[mode])?;
    let heuristic = mark.set(heuristic, None, Some(A::CUDNN_ATTR_ENGINEHEUR_DEVICEPROP))?.finish("a heuristic")?;
    let made = (0..ASKED).map(|_| Descriptor::new(D::CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    let mut configs = made.collect::<Made<Vec<_>>>()?;
    let count = heuristic.fill(A::CUDNN_ATTR_ENGINEHEUR_RESULTS, &configs)?;
    configs.truncate(count);
    Ok(configs)
}

fn execution_plan(problem: &Problem, config: &Descriptor, number: usize, mark: Mark<'_>) -> Made<Built> {
    let engines = [Descriptor::new(D::CUDNN_BACKEND_ENGINE_DESCRIPTOR)?];
    config.fill(A::CUDNN_ATTR_ENGINECFG_ENGINE, &engines)?;
    let engine = engines[0].number(A::CUDNN_ATTR_ENGINE_GLOBAL_INDEX)?;
    if problem.multiplies_f32() && !problem.tf32 && has_tensor_cores(&engines[0])? {
        return Err("cuDNN's engines for f32 use TF32, which is not allowed".to_owned());
    }
    let plan = Descriptor::new(D::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR)?
        .parts(A::CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, &[config])?;
    let (handle, properties) = (A::CUDNN_ATTR_EXECUTION_PLAN_HANDLE, A::CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP);
    let plan = mark.set(plan, Some(handle), Some(properties))?.finish("a plan")?;
    let workspace_bytes = workspace_of(&plan, problem)?;
    Ok(Built { plan, workspace_bytes, number, engine })
}

/// Bytes of workspace, if they are no more than the problem allows.
fn workspace_of(plan: &Descriptor, problem: &Problem) -> Made<usize> {
    let bytes = plan.number(A::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE)?;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    if bytes > problem.workspace_bytes {
        return Err(format!("cuDNN wants {bytes} bytes of workspace"));
    }
    Ok(bytes)
}

impl Problem {
    /// Whether operands of products are f32.
    pub fn multiplies_f32(&self) -> bool {
        self.operations.iter().any(|o| match o {
            Operation::Convolution { x, .. } | Operation::Matmul { a: x, .. } => self.tensors[*x].dtype == DType::F32,
            Operation::Pointwise { .. } | Operation::Reduction { .. } => false,
        })
    }

    /// Terms of the longest sum.
    pub fn terms(&self) -> u64 {
        let terms = |o: &Operation| match o {
            Operation::Convolution { w, .. } => self.tensors[*w].dims[1..].iter().product(),
            Operation::Matmul { a, .. } => self.tensors[*a].dims.last().copied().unwrap_or(1),
            Operation::Pointwise { .. } | Operation::Reduction { .. } => 1,
        };
        self.operations.iter().map(terms).max().unwrap_or(1).unsigned_abs()
    }

    /// The operation that most of the work is, with its sizes.
    pub fn in_words(&self) -> String {
        let dims = |at: usize| self.tensors[at].dims.iter().map(i64::to_string).collect::<Vec<_>>().join(" ");
        let what = |o: &Operation| match o {
            Operation::Convolution { x, w, stride, .. } => {
                let name = self.tensors[*x].dtype.name();
                Some(format!("convolution {name} [{}] by [{}], stride {stride:?}", dims(*x), dims(*w)))
            }
            Operation::Matmul { a, b, .. } => {
                Some(format!("attention {} [{}] x [{}]", self.tensors[*a].dtype.name(), dims(*a), dims(*b)))
            }
            Operation::Pointwise { .. } | Operation::Reduction { .. } => None,
        };
        self.operations.iter().find_map(what).unwrap_or_default()
    }
}

fn has_tensor_cores(engine: &Descriptor) -> Made<bool> {
    let mut notes = [u32::MAX; 16];
    let mut count = 0i64;
    // SAFETY: a live descriptor, and room for sixteen notes, which are enums of 32 bits.
    let code = unsafe {
        let (attribute, to) = (A::CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, notes.as_mut_ptr().cast());
        sys::cudnnBackendGetAttribute(engine.0, attribute, T::CUDNN_TYPE_NUMERICAL_NOTE, 16, &raw mut count, to)
    };
    check(code, "the notes of an engine")?;
    let tensor_core = sys::cudnnBackendNumericalNote_t::CUDNN_NUMERICAL_NOTE_TENSOR_CORE as u32;
    Ok(notes.iter().take(usize::try_from(count).unwrap_or(0)).any(|n| *n == tensor_core))
}

fn tensor(id: usize, t: &Tensor) -> Made<Descriptor> {
    let align = if let Storage::Operand(_, bytes) = t.storage { bytes } else { 16 };
    let d = Descriptor::new(D::CUDNN_BACKEND_TENSOR_DESCRIPTOR)?
        .dtype(A::CUDNN_ATTR_TENSOR_DATA_TYPE, data_type(t.dtype)?)?
        .numbers(A::CUDNN_ATTR_TENSOR_DIMENSIONS, &t.dims)?
        .numbers(A::CUDNN_ATTR_TENSOR_STRIDES, &t.strides)?
        .numbers(A::CUDNN_ATTR_TENSOR_UNIQUE_ID, &[id as i64 + 1])?
        .numbers(A::CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, &[align])?;
    let d = match t.storage {
        Storage::Operand(..) => d,
        Storage::Virtual => d.set(A::CUDNN_ATTR_TENSOR_IS_VIRTUAL, T::CUDNN_TYPE_BOOLEAN, &[true])?,
        Storage::Value(_) => d.set(A::CUDNN_ATTR_TENSOR_IS_BY_VALUE, T::CUDNN_TYPE_BOOLEAN, &[true])?,
    };
    d.finish("a tensor")
}

fn operation(o: &Operation, tensors: &[Descriptor]) -> Made<Descriptor> {
    match o {
        Operation::Convolution { x, w, y, padding, stride, dilation } => {
            let cross = sys::cudnnConvolutionMode_t::CUDNN_CROSS_CORRELATION;
            let how = Descriptor::new(D::CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR)?
                .dtype(A::CUDNN_ATTR_CONVOLUTION_COMP_TYPE, FLOAT)?
                .set(A::CUDNN_ATTR_CONVOLUTION_CONV_MODE, T::CUDNN_TYPE_CONVOLUTION_MODE, &[cross])?
                .numbers(A::CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, &[stride.len() as i64])?
                .numbers(A::CUDNN_ATTR_CONVOLUTION_DILATIONS, dilation)?
                .numbers(A::CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, stride)?
                .numbers(A::CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, &padding[0])?
                .numbers(A::CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, &padding[1])?
                .finish("a convolution")?;
            Descriptor::new(D::CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR)?
                .parts(A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, &[&how])?
                .parts(A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, &[&tensors[*x]])?
                .parts(A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W, &[&tensors[*w]])?
                .parts(A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, &[&tensors[*y]])?
                .set(A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA, T::CUDNN_TYPE_FLOAT, &[1f32])?
                .set(A::CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA, T::CUDNN_TYPE_FLOAT, &[0f32])?
                .finish("a convolution")
        }
        Operation::Pointwise { mode, x, b, t, axis, y } => {
            let mut how = Descriptor::new(D::CUDNN_BACKEND_POINTWISE_DESCRIPTOR)?
                .set(A::CUDNN_ATTR_POINTWISE_MODE, T::CUDNN_TYPE_POINTWISE_MODE, &[*mode])?
                .dtype(A::CUDNN_ATTR_POINTWISE_MATH_PREC, computed_as(*mode))?;
            if let Some(axis) = axis {
                how = how.numbers(A::CUDNN_ATTR_POINTWISE_AXIS, &[*axis])?;
            }
            let how = how.finish("a pointwise operation")?;
            let mut made = Descriptor::new(D::CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR)?
                .parts(A::CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, &[&how])?
                .parts(A::CUDNN_ATTR_OPERATION_POINTWISE_XDESC, &[&tensors[*x]])?;
            if let Some(b) = b {
                made = made.parts(A::CUDNN_ATTR_OPERATION_POINTWISE_BDESC, &[&tensors[*b]])?;
            }
            if let Some(t) = t {
                made = made.parts(A::CUDNN_ATTR_OPERATION_POINTWISE_TDESC, &[&tensors[*t]])?;
            }
            made.parts(A::CUDNN_ATTR_OPERATION_POINTWISE_YDESC, &[&tensors[*y]])?.finish("a pointwise operation")
        }
        Operation::Matmul { a, b, c } => {
            let how = Descriptor::new(D::CUDNN_BACKEND_MATMUL_DESCRIPTOR)?
                .dtype(A::CUDNN_ATTR_MATMUL_COMP_TYPE, FLOAT)?
                .finish("a product")?;
            Descriptor::new(D::CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR)?
                .parts(A::CUDNN_ATTR_OPERATION_MATMUL_DESC, &[&how])?
                .parts(A::CUDNN_ATTR_OPERATION_MATMUL_ADESC, &[&tensors[*a]])?
                .parts(A::CUDNN_ATTR_OPERATION_MATMUL_BDESC, &[&tensors[*b]])?
                .parts(A::CUDNN_ATTR_OPERATION_MATMUL_CDESC, &[&tensors[*c]])?
                .finish("a product")
        }
        Operation::Reduction { is_max, x, y } => {
            use sys::cudnnReduceTensorOp_t::{CUDNN_REDUCE_TENSOR_ADD, CUDNN_REDUCE_TENSOR_MAX};
            let operator = if *is_max { CUDNN_REDUCE_TENSOR_MAX } else { CUDNN_REDUCE_TENSOR_ADD };
            let how = Descriptor::new(D::CUDNN_BACKEND_REDUCTION_DESCRIPTOR)?
                .set(A::CUDNN_ATTR_REDUCTION_OPERATOR, T::CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, &[operator])?
                .dtype(A::CUDNN_ATTR_REDUCTION_COMP_TYPE, FLOAT)?
                .finish("a reduction")?;
            Descriptor::new(D::CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR)?
                .parts(A::CUDNN_ATTR_OPERATION_REDUCTION_DESC, &[&how])?
                .parts(A::CUDNN_ATTR_OPERATION_REDUCTION_XDESC, &[&tensors[*x]])?
                .parts(A::CUDNN_ATTR_OPERATION_REDUCTION_YDESC, &[&tensors[*y]])?
                .finish("a reduction")
        }
    }
}

/// Identity and operand of every tensor in memory.
fn operands(problem: &Problem) -> Vec<(i64, usize)> {
    let of = |(id, t): (usize, &Tensor)| match t.storage {
        Storage::Operand(at, _) => Some((id as i64 + 1, at)),
        _ => None,
    };
    problem.tensors.iter().enumerate().filter_map(of).collect()
}

/// Identity and bits of every value.
fn values(problem: &Problem) -> Vec<(i64, u32)> {
    let of = |(id, t): (usize, &Tensor)| match t.storage {
        Storage::Value(bits) => Some((id as i64 + 1, bits)),
        _ => None,
    };
    problem.tensors.iter().enumerate().filter_map(of).collect()
}

/// A graph that is ready to run.
#[derive(Debug)]
pub struct Execution {
    /// What the plan was made with; none for a device that is only described.
    handle: Option<Arc<Handle>>,
    plan: Descriptor,
    workspace_bytes: usize,
    number: usize,
    engine: i64,
    operands: Vec<(i64, usize)>,
    values: Vec<(i64, u32)>,
}

impl Execution {
    /// The engine that runs, as cuDNN numbers them.
    pub fn engine(&self) -> i64 {
        self.engine
    }

    /// Its place in the order that the heuristic gives.
    pub fn number(&self) -> usize {
        self.number
    }

    fn bind(&self, addresses: &[u64], workspace: u64) -> Made<Descriptor> {
        let mut ids = Vec::with_capacity(self.operands.len() + self.values.len());
        let mut pointers: Vec<*const c_void> = Vec::with_capacity(ids.capacity());
        for &(id, operand) in &self.operands {
            let address = addresses.get(operand).copied().unwrap_or(0);
            if address == 0 {
                return Err(format!("operand {operand} of a graph of cuDNN is missing"));
            }
            ids.push(id);
            pointers.push(std::ptr::with_exposed_provenance(address as usize));
        }
        for (id, bits) in &self.values {
            ids.push(*id);
            // Read by the host when the graph is executed.
            pointers.push(std::ptr::from_ref(bits).cast());
        }
        let workspace: *mut c_void = std::ptr::with_exposed_provenance_mut(workspace as usize);
        Descriptor::new(D::CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)?
            .set(A::CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, T::CUDNN_TYPE_VOID_PTR, &pointers)?
            .numbers(A::CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, &ids)?
            .set(A::CUDNN_ATTR_VARIANT_PACK_WORKSPACE, T::CUDNN_TYPE_VOID_PTR, &[workspace])?
            .finish("the addresses of a run")
    }
}

impl Planned for Execution {
    fn library(&self) -> &'static str {
        "cuDNN"
    }

    fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    fn plans(&self) -> Vec<(usize, usize)> {
        vec![(std::ptr::from_ref(self).addr(), 0)]
    }

    /// Addresses: those of [`Storage::Operand`], by index.
    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()> {
        let refused = |what: String| Error::Backend { backend: NAME, what };
        let Some(handle) = &self.handle else {
            return Err(refused("a plan for a device that is only described".to_owned()));
        };
        let _alone = RUNNING.write().unwrap_or_else(PoisonError::into_inner);
        let bound = self.bind(addresses, workspace).map_err(refused)?;
        let handle = handle.0.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the caller's stream; the handle is ours until the lock is given back.
        let code = unsafe { sys::cudnnSetStream(*handle, std::ptr::with_exposed_provenance_mut(stream)) };
        check(code, "a stream").map_err(refused)?;
        // SAFETY: the plan was made for this handle; addresses and workspace are valid by the caller's promise.
        check(unsafe { sys::cudnnBackendExecute(*handle, self.plan.0, bound.0) }, "to run").map_err(refused)
    }
}
