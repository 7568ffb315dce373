//! A device as the backend uses it: the driver API, each call's result checked.
//!
//! The context is the device's primary one, which PyTorch uses too; it is made current where it is not, for the time of a
//! call, and never created nor reset. Handles are freed when dropped; what is in flight on the device then is kept alive by the driver.

use std::ffi::CString;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{result, sys};

use super::{NAME, library};
use crate::backend::tensor::{Block, Memory};
use crate::codegen::cuda::{Geometry, SHARED_BYTES};
use crate::target::Attributes;
use crate::{Error, Result};

/// A stream of the caller's; 0 is the legacy default stream.
pub type StreamHandle = usize;

fn check(code: sys::CUresult, what: &str) -> Result<()> {
    if code == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let name = result::DriverError(code);
    let text = name.error_string().map_or_else(|_| String::new(), |t| t.to_string_lossy().into_owned());
    Err(Error::Backend { backend: NAME, what: format!("{what}: {code:?}: {text}") })
}

fn checked<T>(result: std::result::Result<T, result::DriverError>, what: &str) -> Result<T> {
    result.map_err(|e| match check(e.0, what) {
        Err(e) => e,
        Ok(()) => Error::Backend { backend: NAME, what: what.to_owned() },
    })
}

/// A device and its primary context.
#[derive(Debug)]
pub struct Device {
    ordinal: u32,
    attributes: Attributes,
    shared_bytes: u32,
    context: sys::CUcontext,
}

// SAFETY: a context may be used from any thread once it is current there.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<u32> {
    // SAFETY: a device that `cuDeviceGet` gave.
    let value = unsafe { result::device::get_attribute(device, which) };
    checked(value, "an attribute of the device").map(i32::unsigned_abs)
}

impl Device {
    /// Device `ordinal`. The driver's library must have been found.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Self>> {
        checked(result::init(), "the NVIDIA driver")?;
        let count = checked(result::device::get_count(), "the number of devices")?;
        if ordinal >= count.unsigned_abs() {
            return Err(Error::Backend { backend: NAME, what: format!("no device {ordinal}: there are {count}") });
        }
        let device = checked(result::device::get(ordinal as i32), "a device")?;
        let major = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        // SAFETY: a device that `cuDeviceGet` gave.
        let context = checked(unsafe { result::primary_ctx::retain(device) }, "the device's primary context")?;
        let told = |which| attribute(device, which).unwrap_or(0);
        let attributes = Attributes {
            name: checked(result::device::get_name(device), "the device's name")?,
            arch: major * 10 + minor,
            multiprocessors: attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            clock_khz: told(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
            memory_clock_khz: told(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
            bus_bits: told(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
            l2_bytes: u64::from(told(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)),
            // SAFETY: as above.
            memory_bytes: checked(unsafe { result::device::total_mem(device) }, "the device's memory")? as u64,
        };
        let shared_bytes = match told(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) {
            0 => SHARED_BYTES,
            bytes => bytes,
        };
        Ok(Arc::new(Self { ordinal, attributes, shared_bytes, context }))
    }

    /// Number of the device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.attributes.name
    }

    /// Compute capability: 90 for 9.0.
    pub fn arch(&self) -> u32 {
        self.attributes.arch
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.attributes.multiprocessors
    }

    /// Shared memory that a block may ask for.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// What the driver says of it.
    pub fn attributes(&self) -> &Attributes {
        &self.attributes
    }

    /// Bytes of memory.
    pub fn total_bytes(&self) -> usize {
        self.attributes.memory_bytes as usize
    }

    /// Makes the context current in this thread for as long as the result lives: the caller's current device is its own.
    pub(super) fn enter(&self) -> Result<Entered> {
        let current = checked(result::ctx::get_current(), "the current context")?;
        if current == Some(self.context) {
            return Ok(Entered { before: None });
        }
        // SAFETY: the primary context, retained for the life of the process.
        checked(unsafe { result::ctx::set_current(self.context) }, "making the context current")?;
        Ok(Entered { before: Some(current.unwrap_or(std::ptr::null_mut())) })
    }

    /// Bytes that are free.
    pub(super) fn free_bytes(&self) -> Result<usize> {
        checked(result::mem_get_info(), "the device's free memory").map(|(free, _)| free)
    }

    /// Waits for a stream.
    ///
    /// # Errors
    /// [`Error::Backend`]: also that of a kernel that ran before.
    pub fn synchronize(&self, stream: StreamHandle) -> Result<()> {
        let _context = self.enter()?;
        // SAFETY: the caller's stream.
        checked(unsafe { result::stream::synchronize(raw(stream)) }, "waiting for the device")
    }

    /// Whether the caller captures the stream into a graph of its own; also where that capture has failed, until it ends, and
    /// of the default stream where one is captured that it would wait for.
    pub(super) fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's stream, and a place for the answer.
        let code = unsafe { sys::cuStreamIsCapturing(raw(stream), &raw mut status) };
        // The default stream waits for those that block, so what it is given would be captured with them: it takes nothing.
        if code == sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT {
            return Ok(true);
        }
        check(code, "the state of a stream")?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }

    /// Writes words of four bytes at `to`, in the stream's order. They are part of the command: no host memory is read later,
    /// also where the stream is captured.
    ///
    /// # Safety
    /// `to` must be device memory for that many words, aligned to four bytes, until the stream has come so far.
    pub(super) unsafe fn put(&self, words: &[u32], to: *mut u8, stream: StreamHandle) -> Result<()> {
        let _context = self.enter()?;
        for (at, word) in words.iter().enumerate() {
            let to = (to.addr() + 4 * at) as u64;
            // SAFETY: the caller's promise.
            check(unsafe { sys::cuMemsetD32Async(to, *word, 1, raw(stream)) }, "writing a number")?;
        }
        Ok(())
    }

    /// Lets what is put on stream `after` from now on wait for what stream `before` has to do; false, and nothing is done,
    /// where one of them is being captured.
    pub(super) fn order(&self, before: StreamHandle, after: StreamHandle) -> Result<bool> {
        let _context = self.enter()?;
        if self.is_capturing(before)? || self.is_capturing(after)? {
            return Ok(false);
        }
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: a place for the handle; the event is destroyed once, which the driver does when it is done with it.
        unsafe {
            check(sys::cuEventCreate(&raw mut event, flags), "an event")?;
            let recorded = check(sys::cuEventRecord(event, raw(before)), "an event of a stream");
            let ordered =
                recorded.and_then(|()| check(sys::cuStreamWaitEvent(raw(after), event, 0), "a stream's wait"));
            let destroyed = check(sys::cuEventDestroy_v2(event), "an event's end");
            ordered.and(destroyed)?;
        }
        Ok(true)
    }

    /// Seconds that the device takes for what `work` puts on a stream.
    pub(super) fn time(&self, stream: StreamHandle, work: impl FnOnce() -> Result<()>) -> Result<f64> {
        let _relaxed = Relaxed::new()?;
        let [start, end] = [Event::new()?, Event::new()?];
        start.record(stream)?;
        work()?;
        end.record(stream)?;
        end.seconds_since(&start)
    }

    /// Copies bytes of the host to the device, after what the stream has to do, and waits for it: a synchronous copy would return
    /// before they are there, and be in the order of the default stream, for which others do not wait.
    ///
    /// # Safety
    /// `to` must be device memory of at least `bytes.len()` bytes.
    ///
    /// # Errors
    /// [`Error::Backend`] where the driver refuses.
    pub unsafe fn upload(&self, bytes: &[u8], to: *mut u8, stream: StreamHandle) -> Result<()> {
        let _context = self.enter()?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise; the bytes are borrowed until the stream has come so far.
        let copied = unsafe { result::memcpy_htod_async(to.addr() as u64, bytes, raw(stream)) };
        checked(copied, "copying to the device").and_then(|()| self.synchronize(stream))
    }

    /// Copies what is in the device's memory to another place there, in the stream's order.
    ///
    /// # Safety
    /// Both must be device memory of that many bytes, and not overlap.
    pub(super) unsafe fn copy(&self, from: usize, to: usize, bytes: usize, stream: StreamHandle) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let code = unsafe { sys::cuMemcpyDtoDAsync_v2(to as u64, from as u64, bytes, raw(stream)) };
        check(code, "copying on the device")
    }

    /// Copies bytes of the device to the host, after what the stream has to do, and waits for it.
    ///
    /// # Safety
    /// `from` must be device memory of at least `to.len()` bytes.
    ///
    /// # Errors
    /// As [`Device::upload`].
    pub unsafe fn download(&self, from: *const u8, to: &mut [u8], stream: StreamHandle) -> Result<()> {
        let _context = self.enter()?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise; the bytes are borrowed until the stream has come so far.
        let copied = unsafe { result::memcpy_dtoh_async(to, from.addr() as u64, raw(stream)) };
        checked(copied, "copying from the device").and_then(|()| self.synchronize(stream))
    }
}

/// A moment of a stream.
struct Event(sys::CUevent);

impl Event {
    fn new() -> Result<Self> {
        let mut event = std::ptr::null_mut();
        // SAFETY: a place for the handle; the context is current.
        check(unsafe { sys::cuEventCreate(&raw mut event, sys::CUevent_flags::CU_EVENT_DEFAULT as u32) }, "an event")?;
        Ok(Self(event))
    }

    fn record(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: a live event, and the caller's stream.
        check(unsafe { sys::cuEventRecord(self.0, raw(stream)) }, "an event of a stream")
    }

    /// Waits for it.
    fn seconds_since(&self, start: &Self) -> Result<f64> {
        // cudarc knows the function by the name that CUDA 12.8 gave it; older drivers have this one, newer ones too.
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;
        // SAFETY: the driver is there, and its function has this signature; it was looked up when the driver was found.
        let elapsed = unsafe { sys::culib().get::<Elapsed>(b"cuEventElapsedTime") };
        let elapsed = elapsed.map_err(|e| Error::Backend { backend: NAME, what: format!("the driver: {e}") })?;
        let mut milliseconds = 0f32;
        // SAFETY: both are live and were recorded; the place is that of an f32.
        unsafe {
            check(sys::cuEventSynchronize(self.0), "waiting for an event")?;
            check(elapsed(&raw mut milliseconds, start.0, self.0), "the time between events")?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created once, destroyed once.
        unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

/// That a device's context is current; what was before is again when this is dropped.
#[must_use]
#[derive(Debug)]
pub(super) struct Entered {
    before: Option<sys::CUcontext>,
}

impl Drop for Entered {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: it was current in this thread a moment ago, or is null for none.
            let _ = unsafe { sys::cuCtxSetCurrent(before) };
        }
    }
}

/// That this thread may call what a capture forbids otherwise, its own or another thread's, and does not end it: what the
/// driver cannot put off has nothing to do with what is captured.
#[must_use]
pub(super) struct Relaxed(sys::CUstreamCaptureMode);

impl Relaxed {
    pub(super) fn new() -> Result<Self> {
        let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a place for the mode that it was.
        check(unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) }, "the mode of captures")?;
        Ok(Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: the mode that it was in this thread.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

fn raw(stream: StreamHandle) -> sys::CUstream {
    std::ptr::with_exposed_provenance_mut(stream)
}

/// The driver's own allocator: for what outlives a call where no tensor library lends memory.
#[derive(Clone, Debug)]
pub struct DriverMemory(pub Arc<Device>);

struct Owned(u64, Arc<Device>);

impl Drop for Owned {
    fn drop(&mut self) {
        if let (Ok(_context), Ok(_relaxed)) = (self.1.enter(), Relaxed::new()) {
            // SAFETY: allocated by `cuMemAlloc` and freed once; freeing waits for the device.
            let _ = unsafe { result::free_sync(self.0) };
        }
    }
}

impl Memory for DriverMemory {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        let (_context, _relaxed) = (self.0.enter()?, Relaxed::new()?);
        // SAFETY: the context is current.
        let ptr = unsafe { result::malloc_sync(bytes.max(1)) };
        let ptr = ptr.map_err(|_| Error::OutOfMemory { asked_bytes: bytes, what: what.to_owned() })?;
        let owner = Box::new(Owned(ptr, self.0.clone()));
        // SAFETY: freshly allocated, aligned to 256, freed by `owner`.
        Ok(unsafe { Block::new(std::ptr::with_exposed_provenance_mut(ptr as usize), bytes, owner) })
    }
}

/// What has to be done before the kernels of a program may be unloaded.
#[derive(Debug, Default)]
pub struct Users {
    streams: Mutex<Vec<StreamHandle>>,
    /// A graph of the caller's has them, for as long as it lives.
    is_recorded: AtomicBool,
}

impl Users {
    /// Notes that a stream is given kernels, to run or to record.
    pub(super) fn note(&self, stream: StreamHandle, is_recorded: bool) {
        if is_recorded {
            self.is_recorded.store(true, Ordering::Relaxed);
            return;
        }
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Waits for the streams; false, and nothing is waited for, where one of them is being captured.
    fn are_done(&self, device: &Device) -> bool {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.iter().any(|&stream| matches!(device.is_capturing(stream), Ok(true))) {
            return false;
        }
        // A stream that is no more has nothing to do.
        streams.iter().for_each(|&stream| drop(device.synchronize(stream)));
        true
    }
}

/// Loaded machine code.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    device: Arc<Device>,
    users: Arc<Users>,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(device: &Arc<Device>, image: &[u8], users: &Arc<Users>) -> Result<Self> {
        unload_retired();
        let _relaxed = Relaxed::new()?;
        // SAFETY: an ELF image as NVRTC made it; its size is in its header.
        let raw = unsafe { result::module::load_data(image.as_ptr().cast()) };
        Ok(Self { raw: checked(raw, "loading a kernel")?, device: device.clone(), users: users.clone() })
    }

    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let c_name = CString::new(name).map_err(|_| Error::invalid("a kernel's name has a zero byte"))?;
        // SAFETY: the module is live.
        let raw = unsafe { result::module::get_function(self.raw, c_name) };
        Ok(Function(checked(raw, name)?))
    }

    /// The same of a kernel that may be launched with all the shared memory that a block of the device has.
    pub(super) fn roomy_function(&self, name: &str) -> Result<Function> {
        let function = self.function(name)?;
        let bytes = self.device.shared_bytes();
        if bytes > SHARED_BYTES {
            let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of a live module.
            check(unsafe { sys::cuFuncSetAttribute(function.0, which, bytes.cast_signed()) }, name)?;
        }
        Ok(function)
    }
}

/// A module that nobody uses any more.
struct Retired {
    module: usize,
    device: Arc<Device>,
    users: Arc<Users>,
}

/// Their kernels may still be on the way, and a drop may come at any time, in a capture too: what has to be waited for is waited
/// for when the next module is loaded, which nobody does in a capture.
static RETIRED: Mutex<Vec<Retired>> = Mutex::new(Vec::new());

fn unload_retired() {
    let retired = std::mem::take(&mut *RETIRED.lock().unwrap_or_else(PoisonError::into_inner));
    for own in retired {
        let (Ok(_context), Ok(_relaxed)) = (own.device.enter(), Relaxed::new()) else { continue };
        if own.users.are_done(&own.device) {
            // SAFETY: loaded once, and put on the list once, when it was dropped.
            let _ = unsafe { result::module::unload(std::ptr::with_exposed_provenance_mut(own.module)) };
        } else {
            RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(own);
        }
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // What a caller's graph has stays loaded: nobody says when that graph goes.
        if self.users.is_recorded.load(Ordering::Relaxed) {
            return;
        }
        let (module, device, users) = (self.raw.expose_provenance(), self.device.clone(), self.users.clone());
        RETIRED.lock().unwrap_or_else(PoisonError::into_inner).push(Retired { module, device, users });
    }
}

/// An entry point of a module that is kept loaded beside it.
#[derive(Clone, Copy, Debug)]
pub struct Function(sys::CUfunction);

// SAFETY: functions may be launched from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Pointers to arguments, as the driver takes them.
fn pointers(args: &mut [u64]) -> Vec<*mut std::ffi::c_void> {
    args.iter_mut().map(|a| std::ptr::from_mut(a).cast()).collect()
}

/// Launches a kernel.
///
/// # Safety
/// `args` must be the function's parameters, one word each, and its pointers valid for what it does with them.
pub unsafe fn launch(function: Function, g: &Geometry, args: &mut [u64], stream: StreamHandle) -> Result<()> {
    let mut pointers = pointers(args);
    let ([gx, gy, gz], [bx, by, bz]) = (g.grid, g.block);
    // SAFETY: the caller's promise.
    let launched = unsafe {
        result::launch_kernel(function.0, (gx, gy, gz), (bx, by, bz), g.shared_bytes, raw(stream), &mut pointers)
    };
    checked(launched, "a launch")
}

/// One kernel of a graph.
pub struct GraphLaunch {
    /// Entry point.
    pub function: Function,
    /// Geometry.
    pub geometry: Geometry,
    /// Parameters, one word each.
    pub args: Vec<u64>,
}

/// A link of a graph's chain.
pub enum Node {
    /// A kernel.
    Kernel(GraphLaunch),
    /// What a stream was given while it was captured.
    Captured(Captured),
}

/// Work that a stream was given while it was captured: not run, but kept.
#[derive(Debug)]
pub struct Captured(sys::CUgraph);

impl Captured {
    /// Its kernels, each of which follows the one before. `None` where it is anything else: copies, branches, edges that let a kernel
    /// begin before the one before has ended.
    fn kernels(&self) -> Option<Vec<CapturedKernel>> {
        let graph = self.0;
        let mut count = 0;
        // SAFETY: a live graph; without a place for the nodes only their number is written.
        let code = unsafe { sys::cuGraphGetNodes(graph, std::ptr::null_mut(), &raw mut count) };
        check(code, "the nodes of a capture").ok()?;
        let mut nodes: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
        // SAFETY: as above; room for as many.
        let code = unsafe { sys::cuGraphGetNodes(graph, nodes.as_mut_ptr(), &raw mut count) };
        check(code, "the nodes of a capture").ok()?;
        if nodes.len() > 1 {
            nodes = in_order(&nodes, &edges_of(graph, nodes.len())?)?;
        }
        nodes.into_iter().map(CapturedKernel::of).collect()
    }
}

/// The edges of a graph of so many nodes, from one to the other; `None` where one says more than that, or there are too many for a
/// chain.
fn edges_of(graph: sys::CUgraph, nodes: usize) -> Option<Vec<(sys::CUgraphNode, sys::CUgraphNode)>> {
    if !library::tells_edges() {
        return None;
    }
    let mut count = 0;
    let (none, untold) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: a live graph; without places for the edges only their number is written.
    let code = unsafe { sys::cuGraphGetEdges_v2(graph, none, none, untold, &raw mut count) };
    check(code, "the edges of a capture").ok()?;
    if count + 1 != nodes {
        return None;
    }
    let mut from: Vec<sys::CUgraphNode> = vec![std::ptr::null_mut(); count];
    let mut to = from.clone();
    let mut told = vec![sys::CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] }; count];
    // SAFETY: as above; room for as many.
    let code = unsafe {
        sys::cuGraphGetEdges_v2(graph, from.as_mut_ptr(), to.as_mut_ptr(), told.as_mut_ptr(), &raw mut count)
    };
    check(code, "the edges of a capture").ok()?;
    // A kernel that may begin before the one before has ended has a port or a type.
    let is_plain = told.iter().all(|edge| (edge.from_port, edge.to_port, edge.type_) == (0, 0, 0));
    is_plain.then(|| from.into_iter().zip(to).collect())
}

/// The nodes of a chain, from the first to the last; `None` where the edges make no single chain of them.
fn in_order<T: Copy + PartialEq>(nodes: &[T], edges: &[(T, T)]) -> Option<Vec<T>> {
    let mut chain = vec![*nodes.iter().find(|node| edges.iter().all(|(_, to)| to != *node))?];
    while chain.len() < nodes.len() {
        let last = *chain.last()?;
        let next = edges.iter().find(|(from, _)| *from == last)?.1;
        if chain.contains(&next) {
            return None;
        }
        chain.push(next);
    }
    Some(chain)
}

/// A kernel that a library launched on a stream that was captured.
struct CapturedKernel {
    node: sys::CUgraphNode,
    /// What the node has of it: pointers lead into the node.
    params: sys::CUDA_KERNEL_NODE_PARAMS,
}

impl CapturedKernel {
    fn of(node: sys::CUgraphNode) -> Option<Self> {
        let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of a live graph, and a place for what it is.
        check(unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) }, "the kind of a node").ok()?;
        if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
            return None;
        }
        let mut params = MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
        // SAFETY: as above.
        let code = unsafe { sys::cuGraphKernelNodeGetParams_v2(node, params.as_mut_ptr()) };
        check(code, "a kernel of a capture").ok()?;
        // SAFETY: zeros are null pointers and empty grids, and the call has filled it.
        let params = unsafe { params.assume_init() };
        // Parameters in one block, as few hand them over, are left to the driver.
        (!params.kernelParams.is_null() && params.extra.is_null()).then_some(Self { node, params })
    }

    /// Adds it to the end of another graph.
    ///
    /// # Safety
    /// As [`launch`], for every run of the graph.
    unsafe fn add_to(&self, graph: sys::CUgraph, last: Option<&sys::CUgraphNode>) -> Option<Link> {
        let (after, count) = last.map_or((std::ptr::null(), 0), |n| (std::ptr::from_ref(n), 1));
        let mut node = std::ptr::null_mut();
        // SAFETY: the caller's promise; the captured graph lives, and the parameters in it are copied by the call.
        let code = unsafe { sys::cuGraphAddKernelNode_v2(&raw mut node, graph, after, count, &raw const self.params) };
        check(code, "a captured kernel in a graph").ok()?;
        // Clusters, cooperation, priorities.
        // SAFETY: two kernel nodes of live graphs.
        let code = unsafe { sys::cuGraphKernelNodeCopyAttributes(node, self.node) };
        if check(code, "what is said of a captured kernel").is_err() {
            // SAFETY: a node of a live graph, which nothing follows yet.
            unsafe { sys::cuGraphDestroyNode(node) };
            return None;
        }
        Some(Link { node, function: Some(self.function()) })
    }

    /// What is launched, and how: a function, or a kernel of a library that was loaded without a context.
    fn function(&self) -> Launched {
        let p = &self.params;
        let threads = [p.gridDimX, p.gridDimY, p.gridDimZ, p.blockDimX, p.blockDimY, p.blockDimZ, p.sharedMemBytes];
        (p.func, p.kern, threads)
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: ended by `cuStreamEndCapture`, destroyed once; graphs that it was added to have copies.
        unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// A stream of our own, to capture on: the caller's may be the default one, which cannot be captured. Given back when it is dropped,
/// and never destroyed: a library's handle names the stream that it was last told, and may look at it when it is told another.
#[derive(Debug)]
pub struct CaptureStream(sys::CUstream, Arc<Device>);

// SAFETY: used behind a lock.
unsafe impl Send for CaptureStream {}

/// Streams that nobody captures on, as many as there ever were at once.
static IDLE: Mutex<Vec<CaptureStream>> = Mutex::new(Vec::new());

impl CaptureStream {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().position(|stream| Arc::ptr_eq(&stream.1, device)) {
            return Ok(idle.swap_remove(at));
        }
        drop(idle);
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a place for the handle; the context is current.
        check(unsafe { sys::cuStreamCreate(&raw mut stream, flags) }, "a stream to capture on")?;
        Ok(Self(stream, device.clone()))
    }

    /// What `work` gives the stream.
    pub(super) fn capture(&self, work: impl FnOnce(StreamHandle) -> Result<()>) -> Result<Captured> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream that nothing else uses.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.0, mode) }, "the start of a capture")?;
        let given = work(self.0.expose_provenance());
        let mut graph = std::ptr::null_mut();
        // SAFETY: the capture that was begun above ends, whatever came of it.
        let code = unsafe { sys::cuStreamEndCapture(self.0, &raw mut graph) };
        let captured = (!graph.is_null()).then(|| Captured(graph));
        given?;
        check(code, "the end of a capture")?;
        captured.ok_or_else(|| Error::Backend { backend: NAME, what: "a capture without a graph".to_owned() })
    }
}

impl Drop for CaptureStream {
    fn drop(&mut self) {
        // Whoever drops it is done with it: what it was given is recorded, and nothing ran there.
        IDLE.lock().unwrap_or_else(PoisonError::into_inner).push(Self(self.0, self.1.clone()));
    }
}

/// A function or a kernel, and the numbers of its blocks, threads and bytes.
type Launched = (sys::CUfunction, sys::CUkernel, [u32; 7]);

/// A node of a graph.
#[derive(Debug)]
struct Link {
    node: sys::CUgraphNode,
    /// Of a library's kernel, which one it is.
    function: Option<Launched>,
}

/// An instantiated chain of kernels.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    /// The nodes of each link: kernels of a library are nodes like others, since the driver takes microseconds of each graph in a
    /// graph at every launch.
    links: Vec<Vec<Link>>,
    bytes: usize,
    device: Arc<Device>,
}

// SAFETY: used behind a lock.
unsafe impl Send for Graph {}

fn with_params<R>(
    launch: &mut GraphLaunch,
    context: sys::CUcontext,
    f: impl FnOnce(*const sys::CUDA_KERNEL_NODE_PARAMS) -> R,
) -> R {
    let mut pointers = pointers(&mut launch.args);
    let ([gx, gy, gz], [bx, by, bz]) = (launch.geometry.grid, launch.geometry.block);
    let params = sys::CUDA_KERNEL_NODE_PARAMS {
        func: launch.function.0,
        gridDimX: gx,
        gridDimY: gy,
        gridDimZ: gz,
        blockDimX: bx,
        blockDimY: by,
        blockDimZ: bz,
        sharedMemBytes: launch.geometry.shared_bytes,
        kernelParams: pointers.as_mut_ptr(),
        extra: std::ptr::null_mut(),
        kern: std::ptr::null_mut(),
        ctx: context,
    };
    f(&raw const params)
}

impl Graph {
    /// A graph that runs `chain` one after the other; what the device keeps of it is put there in the order of `stream`.
    ///
    /// # Safety
    /// As [`launch`], for every run of the graph.
    pub(super) unsafe fn new(device: &Arc<Device>, chain: Vec<Node>, stream: StreamHandle) -> Result<Self> {
        let before = device.free_bytes()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { sys::cuGraphCreate(&raw mut graph, 0) }, "a graph")?;
        let mut own = Self {
            graph,
            exec: std::ptr::null_mut(),
            links: Vec::with_capacity(chain.len()),
            bytes: 0,
            device: device.clone(),
        };
        for mut link in chain {
            let last = own.links.iter().rev().find_map(|nodes| nodes.last()).map(|link| &link.node);
            if let Node::Captured(captured) = &link {
                // SAFETY: the caller's promise.
                if let Some(kernels) = unsafe { added(graph, captured, last) } {
                    own.links.push(kernels);
                    continue;
                }
            }
            let (after, count) = last.map_or((std::ptr::null(), 0), |n| (std::ptr::from_ref(n), 1));
            let mut node = std::ptr::null_mut();
            let code = match &mut link {
                Node::Kernel(launch) => with_params(launch, device.context, |params| {
                    // SAFETY: the caller's promise; the parameters are copied by the call.
                    unsafe { sys::cuGraphAddKernelNode_v2(&raw mut node, graph, after, count, params) }
                }),
                // SAFETY: as above; the captured graph is copied by the call.
                Node::Captured(c) => unsafe { sys::cuGraphAddChildGraphNode(&raw mut node, graph, after, count, c.0) },
            };
            check(code, "a node of a graph")?;
            own.links.push(vec![Link { node, function: None }]);
        }
        // SAFETY: a live graph.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut own.exec, graph, 0) }, "a graph made ready")?;
        // The first launch would do it otherwise, and what it takes would not be seen.
        // SAFETY: a live graph, and the caller's stream.
        check(unsafe { sys::cuGraphUpload(own.exec, raw(stream)) }, "a graph's way to the device")?;
        own.bytes = before.saturating_sub(device.free_bytes()?);
        Ok(own)
    }

    /// Another link at `at` from the next run on: of the same kind, and if captured, of the same shape.
    ///
    /// # Safety
    /// As [`Graph::new`].
    pub(super) unsafe fn update(&mut self, at: usize, mut link: Node) -> Result<()> {
        let (exec, links, context) = (self.exec, &self.links[at], self.device.context);
        if let (Node::Captured(captured), false) = (&link, links.iter().any(|link| link.function.is_none())) {
            // SAFETY: the caller's promise.
            return unsafe { renewed(exec, captured, links) };
        }
        let node = links[0].node;
        let code = match &mut link {
            Node::Kernel(launch) => with_params(launch, context, |params| {
                // SAFETY: a node of this graph; the parameters are copied by the call.
                unsafe { sys::cuGraphExecKernelNodeSetParams_v2(exec, node, params) }
            }),
            // SAFETY: as above; the captured graph is copied by the call.
            Node::Captured(c) => unsafe { sys::cuGraphExecChildGraphNodeSetParams(exec, node, c.0) },
        };
        check(code, "new arguments of a graph")
    }

    /// Runs it.
    ///
    /// # Safety
    /// As [`launch`], for every kernel.
    pub(super) unsafe fn launch(&self, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        check(unsafe { sys::cuGraphLaunch(self.exec, raw(stream)) }, "a graph's launch")
    }

    /// By how much the device's free memory fell while it was made ready and put on the device: whole pages of the driver,
    /// and what others took meanwhile.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// The nodes of what was captured, added to the end of a graph one by one; `None`, and the graph as it was, where that cannot be.
///
/// # Safety
/// As [`launch`], for every run of the graph.
unsafe fn added(graph: sys::CUgraph, captured: &Captured, last: Option<&sys::CUgraphNode>) -> Option<Vec<Link>> {
    let mut links: Vec<Link> = Vec::new();
    for kernel in captured.kernels()? {
        // SAFETY: the caller's promise.
        match unsafe { kernel.add_to(graph, links.last().map(|link| &link.node).or(last)) } {
            Some(link) => links.push(link),
            None => {
                for link in links.iter().rev() {
                    // SAFETY: a node of a live graph, which nothing follows any more.
                    unsafe { sys::cuGraphDestroyNode(link.node) };
                }
                return None;
            }
        }
    }
    Some(links)
}

/// Gives nodes what kernels that were captured now are given. An error where these are other kernels, or in other numbers: clusters
/// and what else was said of them stay as they are.
///
/// # Safety
/// As [`launch`], for every run of the graph.
unsafe fn renewed(exec: sys::CUgraphExec, captured: &Captured, links: &[Link]) -> Result<()> {
    let other = || Error::Backend { backend: NAME, what: "a library runs other kernels at other addresses".to_owned() };
    let kernels = captured.kernels().ok_or_else(other)?;
    if !kernels.iter().map(|kernel| Some(kernel.function())).eq(links.iter().map(|link| link.function)) {
        return Err(other());
    }
    for (kernel, link) in kernels.iter().zip(links) {
        // SAFETY: the caller's promise; a node of this graph, and parameters that are copied by the call.
        let code = unsafe { sys::cuGraphExecKernelNodeSetParams_v2(exec, link.node, &raw const kernel.params) };
        check(code, "new arguments of a captured kernel")?;
    }
    Ok(())
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_context) = self.device.enter() {
            // SAFETY: destroyed once; a run in flight is completed by the driver first.
            unsafe {
                if !self.exec.is_null() {
                    sys::cuGraphExecDestroy(self.exec);
                }
                sys::cuGraphDestroy(self.graph);
            }
        }
    }
}
