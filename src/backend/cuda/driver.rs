//! A device as the backend uses it: the driver API, each call's result checked.
//!
//! The context is the device's primary one, which PyTorch uses too; it is made current where it is not, and never created
//! nor reset. Handles are freed when dropped; what is in flight on the device then is kept alive by the driver.

use std::ffi::CString;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::NAME;
use crate::backend::tensor::{Block, Memory};
use crate::codegen::cuda::Geometry;
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
    name: String,
    arch: u32,
    multiprocessors: u32,
    total_bytes: usize,
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
        Ok(Arc::new(Self {
            ordinal,
            name: checked(result::device::get_name(device), "the device's name")?,
            arch: major * 10 + minor,
            multiprocessors: attribute(device, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            // SAFETY: as above.
            total_bytes: checked(unsafe { result::device::total_mem(device) }, "the device's memory")?,
            context,
        }))
    }

    /// Number of the device.
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// What the driver calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Compute capability: 90 for 9.0.
    pub fn arch(&self) -> u32 {
        self.arch
    }

    /// Number of multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Bytes of memory.
    pub fn total_bytes(&self) -> usize {
        self.total_bytes
    }

    /// Makes the context current in this thread.
    pub(super) fn enter(&self) -> Result<()> {
        let current = checked(result::ctx::get_current(), "the current context")?;
        if current == Some(self.context) {
            return Ok(());
        }
        // SAFETY: the primary context, retained for the life of the process.
        checked(unsafe { result::ctx::set_current(self.context) }, "making the context current")
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
        // SAFETY: the caller's stream.
        checked(unsafe { result::stream::synchronize(raw(stream)) }, "waiting for the device")
    }

    /// Whether the caller captures the stream into a graph of its own.
    pub(super) fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller's stream, and a place for the answer.
        check(unsafe { sys::cuStreamIsCapturing(raw(stream), &raw mut status) }, "the state of a stream")?;
        Ok(status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE)
    }

    /// Copies bytes of the host to the device, and waits.
    ///
    /// # Safety
    /// `to` must be device memory of at least `bytes.len()` bytes.
    ///
    /// # Errors
    /// [`Error::Backend`] where the driver refuses.
    pub unsafe fn upload(&self, bytes: &[u8], to: *mut u8) -> Result<()> {
        self.enter()?;
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        checked(unsafe { result::memcpy_htod_sync(to.addr() as u64, bytes) }, "copying to the device")
    }

    /// Copies bytes of the device to the host, after what the default stream has to do.
    ///
    /// # Safety
    /// `from` must be device memory of at least `to.len()` bytes.
    ///
    /// # Errors
    /// As [`Device::upload`].
    pub unsafe fn download(&self, from: *const u8, to: &mut [u8]) -> Result<()> {
        self.enter()?;
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        checked(unsafe { result::memcpy_dtoh_sync(to, from.addr() as u64) }, "copying from the device")
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
        if self.1.enter().is_ok() {
            // SAFETY: allocated by `cuMemAlloc` and freed once; freeing waits for the device.
            let _ = unsafe { result::free_sync(self.0) };
        }
    }
}

impl Memory for DriverMemory {
    fn allocate(&self, bytes: usize, what: &str) -> Result<Block> {
        self.0.enter()?;
        // SAFETY: the context is current.
        let ptr = unsafe { result::malloc_sync(bytes.max(1)) };
        let ptr = ptr.map_err(|_| Error::OutOfMemory { asked_bytes: bytes, what: what.to_owned() })?;
        let owner = Box::new(Owned(ptr, self.0.clone()));
        // SAFETY: freshly allocated, aligned to 256, freed by `owner`.
        Ok(unsafe { Block::new(std::ptr::with_exposed_provenance_mut(ptr as usize), bytes, owner) })
    }
}

/// Loaded machine code.
#[derive(Debug)]
pub struct Module {
    raw: sys::CUmodule,
    device: Arc<Device>,
}

// SAFETY: modules may be used from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Module {
    pub(super) fn load(device: &Arc<Device>, image: &[u8]) -> Result<Self> {
        // SAFETY: an ELF image as NVRTC made it; its size is in its header.
        let raw = unsafe { result::module::load_data(image.as_ptr().cast()) };
        Ok(Self { raw: checked(raw, "loading a kernel")?, device: device.clone() })
    }

    pub(super) fn function(&self, name: &str) -> Result<Function> {
        let c_name = CString::new(name).map_err(|_| Error::invalid("a kernel's name has a zero byte"))?;
        // SAFETY: the module is live.
        let raw = unsafe { result::module::get_function(self.raw, c_name) };
        Ok(Function(checked(raw, name)?))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: loaded once, unloaded once.
            let _ = unsafe { result::module::unload(self.raw) };
        }
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

impl Drop for Captured {
    fn drop(&mut self) {
        // SAFETY: ended by `cuStreamEndCapture`, destroyed once; graphs that it was added to have copies.
        unsafe { sys::cuGraphDestroy(self.0) };
    }
}

/// A stream of our own, to capture on: the caller's may be the default one, which cannot be captured.
#[derive(Debug)]
pub struct CaptureStream(sys::CUstream, Arc<Device>);

// SAFETY: used behind a lock.
unsafe impl Send for CaptureStream {}

impl CaptureStream {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
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
        if self.1.enter().is_ok() {
            // SAFETY: created once, destroyed once.
            unsafe { sys::cuStreamDestroy_v2(self.0) };
        }
    }
}

/// An instantiated chain of kernels.
#[derive(Debug)]
pub struct Graph {
    graph: sys::CUgraph,
    exec: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
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
    /// A graph that runs `chain` one after the other.
    ///
    /// # Safety
    /// As [`launch`], for every run of the graph.
    pub(super) unsafe fn new(device: &Arc<Device>, chain: Vec<Node>) -> Result<Self> {
        let before = device.free_bytes()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: a place for the handle.
        check(unsafe { sys::cuGraphCreate(&raw mut graph, 0) }, "a graph")?;
        let mut own = Self {
            graph,
            exec: std::ptr::null_mut(),
            nodes: Vec::with_capacity(chain.len()),
            bytes: 0,
            device: device.clone(),
        };
        for mut link in chain {
            let (after, count) = own.nodes.last().map_or((std::ptr::null(), 0), |n| (std::ptr::from_ref(n), 1));
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
            own.nodes.push(node);
        }
        // SAFETY: a live graph.
        check(unsafe { sys::cuGraphInstantiateWithFlags(&raw mut own.exec, graph, 0) }, "a graph made ready")?;
        own.bytes = before.saturating_sub(device.free_bytes()?);
        Ok(own)
    }

    /// Another link at `at` from the next run on: of the same kind, and if captured, of the same shape.
    ///
    /// # Safety
    /// As [`Graph::new`].
    pub(super) unsafe fn update(&mut self, at: usize, mut link: Node) -> Result<()> {
        let (exec, node, context) = (self.exec, self.nodes[at], self.device.context);
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

    /// Device memory that making it ready took.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
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
