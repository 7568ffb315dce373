//! NVIDIA's libraries: those that this process's PyTorch uses, found by path, checked, and held open.
//!
//! cudarc asks the dynamic linker for `libnvrtc.so`, ..., `libnvrtc.so.13` by name and panics where a library or a symbol is
//! missing. So everything is looked at here before cudarc is asked: the copy that PyTorch has mapped, else the one beside
//! it in its wheels, is opened by absolute path, every symbol this crate calls is looked up, and the name that cudarc asks
//! for first is made one of that copy ([`alias`]): the system may have another, in `LD_LIBRARY_PATH` or as a CUDA toolkit.
//! What cudarc would use is compared with what was found. Where that still is another copy, since somebody has loaded it under
//! the name before, it does for NVRTC and cuBLASLt if its major version is PyTorch's; cuDNN is in several files, and those of
//! two copies would be mixed: that is a reason. The driver is `libcuda.so.1` by that name alone: `libcuda.so` may be a linker's
//! stub.
//!
//! Invariant: no function of cudarc is called unless [`Libraries`] says that its library is there.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use libloading::Library;

use super::alias;

/// Where to look.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Folders that hold PyTorch's `nvidia` packages: `site-packages/nvidia`.
    pub packages: Vec<PathBuf>,
    /// A driver to use instead of `libcuda.so.1`: tests have a stand-in.
    pub driver: Option<PathBuf>,
}

impl Search {
    /// The packages beside the folder of the `torch` package.
    pub fn beside_torch(torch: &Path) -> Self {
        Self { packages: torch.parent().map(|site| site.join("nvidia")).into_iter().collect(), driver: None }
    }
}

/// A library that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Where from.
    pub path: PathBuf,
    /// `major.minor`, or as the library counts.
    pub version: (u32, u32),
    /// PyTorch's copy, where another one is used.
    pub instead_of: Option<PathBuf>,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} at {}", self.version.0, self.version.1, self.path.display())?;
        self.instead_of.iter().try_for_each(|other| write!(f, ", loaded before {}", other.display()))
    }
}

/// What was found of each library, or why it cannot be used.
#[derive(Clone, Debug)]
pub struct Libraries {
    /// `libcuda`: the CUDA version it is made for.
    pub driver: Result<Found, String>,
    /// `libnvrtc`.
    pub nvrtc: Result<Found, String>,
    /// `libcublasLt`.
    pub cublaslt: Result<Found, String>,
    /// `libcudnn`.
    pub cudnn: Result<Found, String>,
    /// What the driver itself is called, such as `580.65.06`, where it says so.
    pub release: Option<String>,
}

impl Libraries {
    /// Name and finding of each, for `oxidiff doctor`.
    pub fn findings(&self) -> [(&'static str, &Result<Found, String>); 4] {
        [("cuda driver", &self.driver), ("nvrtc", &self.nvrtc), ("cublasLt", &self.cublaslt), ("cudnn", &self.cudnn)]
    }
}

/// The libraries of this process. The first search decides: a library once opened stays.
pub fn libraries(search: &Search) -> &'static Libraries {
    static LIBRARIES: OnceLock<Libraries> = OnceLock::new();
    LIBRARIES.get_or_init(|| Libraries {
        driver: find_driver(search),
        nvrtc: find_nvrtc(search),
        cublaslt: find_cublaslt(search),
        cudnn: find_cudnn(search),
        release: find_release(search),
    })
}

/// One library: its file names and the folders of PyTorch's wheels that may hold it, CUDA 13's first.
struct Wanted {
    stem: &'static str,
    folders: &'static [&'static str],
    sonames: &'static [&'static str],
    symbols: &'static [&'static str],
}

/// Whether the driver that was found has `cuGraphGetEdges_v2`, as those since CUDA 12.3 have.
static TELLS_EDGES: AtomicBool = AtomicBool::new(false);

/// Whether the driver says all of what is between the nodes of a graph.
pub(super) fn tells_edges() -> bool {
    TELLS_EDGES.load(Ordering::Relaxed)
}

const DRIVER_SYMBOLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuStreamCreate",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuThreadExchangeStreamCaptureMode",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemGetInfo_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD32Async",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventDestroy_v2",
    "cuEventSynchronize",
    "cuEventElapsedTime",
    "cuStreamWaitEvent",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuGraphCreate",
    "cuGraphDestroy",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddChildGraphNode",
    "cuGraphGetNodes",
    "cuGraphNodeGetType",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphKernelNodeCopyAttributes",
    "cuGraphDestroyNode",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecChildGraphNodeSetParams",
    "cuGraphExecDestroy",
    "cuGraphUpload",
    "cuGraphLaunch",
];

const NVRTC: Wanted = Wanted {
    stem: "libnvrtc.so",
    folders: &["cu13/lib", "cuda_nvrtc/lib"],
    sonames: &["libnvrtc.so.13", "libnvrtc.so.12"],
    symbols: &[
        "nvrtcVersion",
        "nvrtcCreateProgram",
        "nvrtcCompileProgram",
        "nvrtcDestroyProgram",
        "nvrtcGetCUBINSize",
        "nvrtcGetCUBIN",
        "nvrtcGetProgramLogSize",
        "nvrtcGetProgramLog",
        "nvrtcGetNumSupportedArchs",
        "nvrtcGetSupportedArchs",
    ],
};

const CUBLASLT: Wanted = Wanted {
    stem: "libcublasLt.so",
    folders: &["cu13/lib", "cublas/lib"],
    sonames: &["libcublasLt.so.13", "libcublasLt.so.12"],
    symbols: &[
        "cublasLtGetVersion",
        "cublasLtCreate",
        "cublasLtDestroy",
        "cublasLtMatmulDescCreate",
        "cublasLtMatmulDescSetAttribute",
        "cublasLtMatmulDescDestroy",
        "cublasLtMatrixLayoutCreate",
        "cublasLtMatrixLayoutSetAttribute",
        "cublasLtMatrixLayoutDestroy",
        "cublasLtMatmulPreferenceCreate",
        "cublasLtMatmulPreferenceSetAttribute",
        "cublasLtMatmulPreferenceDestroy",
        "cublasLtMatmulAlgoGetHeuristic",
        "cublasLtMatmul",
    ],
};

const CUDNN: Wanted = Wanted {
    stem: "libcudnn.so",
    folders: &["cudnn/lib"],
    sonames: &["libcudnn.so.9"],
    symbols: &[
        "cudnnGetVersion",
        "cudnnCreate",
        "cudnnDestroy",
        "cudnnSetStream",
        "cudnnGetLastErrorString",
        "cudnnBackendCreateDescriptor",
        "cudnnBackendSetAttribute",
        "cudnnBackendGetAttribute",
        "cudnnBackendFinalize",
        "cudnnBackendExecute",
        "cudnnBackendDestroyDescriptor",
    ],
};

/// Oldest versions that have what is called.
const OLDEST_CUDA: u32 = 12;
const OLDEST_CUDNN: (u32, u32) = (9, 1);

/// Files in `folder` called `<stem>.<version>`.
fn versioned(folder: &Path, stem: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let is_one = |name: &str| {
        name.strip_prefix(stem)
            .and_then(|rest| rest.strip_prefix('.'))
            .is_some_and(|v| v.starts_with(|c: char| c.is_ascii_digit()))
    };
    let mut found: Vec<PathBuf> =
        entries.filter(|e| e.file_name().to_str().is_some_and(is_one)).map(|e| e.path()).collect();
    found.sort();
    found
}

/// Paths of files called `<stem>.<version>` that this process has mapped.
fn mapped(stem: &str) -> Vec<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| Path::new(&line[at..])));
    let prefix = format!("{stem}.");
    let is_one = |p: &&Path| p.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with(&prefix));
    let mut found: Vec<PathBuf> = paths.filter(is_one).map(Path::to_owned).collect();
    found.dedup();
    found
}

/// Path of the file that is mapped there.
fn mapped_at(address: usize) -> Option<PathBuf> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let holds = |line: &&str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let number = |text| usize::from_str_radix(text, 16).ok();
        Some((number(start)?..number(end)?).contains(&address))
    };
    let line = maps.lines().find(|line| holds(line) == Some(true))?;
    line.find('/').map(|at| PathBuf::from(&line[at..]))
}

/// Opens `path` and keeps it open for the life of the process.
fn open(path: &Path) -> Result<&'static Library, String> {
    // SAFETY: NVIDIA's libraries may be loaded at any time; their initialisers need nothing from this process.
    let library = unsafe { Library::new(path) }.map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(Box::leak(Box::new(library)))
}

fn address(library: &Library, symbol: &str) -> Option<usize> {
    // SAFETY: the symbol is only looked at, never called through this type.
    unsafe { library.get::<*const ()>(symbol.as_bytes()) }.ok().map(|s| (*s).addr())
}

/// Opens what is wanted, and makes sure that cudarc, which asks by name, will use the same copy.
fn acquire(wanted: &Wanted, search: &Search) -> Result<(PathBuf, &'static Library), String> {
    let mut candidates = mapped(wanted.stem);
    for package in &search.packages {
        candidates.extend(wanted.folders.iter().flat_map(|f| versioned(&package.join(f), wanted.stem)));
    }
    candidates.extend(wanted.sonames.iter().map(PathBuf::from));
    let mut reasons = Vec::new();
    for path in &candidates {
        match open(path) {
            Ok(library) => {
                let missing = wanted.symbols.iter().find(|s| address(library, s).is_none());
                return match missing {
                    None => {
                        // Without it the copy is compared, too.
                        if let Ok(alias) = alias::open(wanted.stem, path) {
                            Box::leak(Box::new(alias));
                        }
                        Ok((path.clone(), library))
                    }
                    Some(symbol) => Err(format!("{} has no `{symbol}`: a newer one is needed", path.display())),
                };
            }
            Err(reason) => reasons.push(reason),
        }
    }
    let looked: Vec<String> = search
        .packages
        .iter()
        .flat_map(|p| wanted.folders.iter().map(move |f| p.join(f).display().to_string()))
        .collect();
    Err(format!("{} is not in {} nor known to the system: {}", wanted.stem, looked.join(", "), reasons.join("; ")))
}

/// What cudarc resolves `symbol` to must be what was found.
fn same_copy(path: &Path, library: &Library, by_name: &Library, symbol: &str) -> Result<(), String> {
    if address(library, symbol) == address(by_name, symbol) {
        return Ok(());
    }
    let other = address(by_name, symbol).and_then(mapped_at);
    let other = other.map_or_else(|| "another copy".to_owned(), |other| other.display().to_string());
    Err(format!(
        "{other} comes before {} in the linker's search path (LD_LIBRARY_PATH?), or was loaded first; take it out of there",
        path.display()
    ))
}

/// What cudarc uses: what was found, or another copy that has all symbols and the same major version.
fn usable_copy(
    wanted: &Wanted,
    (path, library): (PathBuf, &Library),
    by_name: &Library,
    version: fn(&Library) -> Option<(u32, u32)>,
) -> Result<Found, String> {
    let symbol = wanted.symbols[0];
    let of = |library| version(library).ok_or_else(|| format!("{} does not say its version", wanted.stem));
    let known = of(library)?;
    let Err(reason) = same_copy(&path, library, by_name, symbol) else {
        return Ok(Found { path, version: known, instead_of: None });
    };
    let other = of(by_name)?;
    let has_all = wanted.symbols.iter().all(|s| address(by_name, s).is_some());
    match address(by_name, symbol).and_then(mapped_at) {
        Some(at) if has_all && other.0 == known.0 => Ok(Found { path: at, version: other, instead_of: Some(path) }),
        _ => Err(reason),
    }
}

fn find_driver(search: &Search) -> Result<Found, String> {
    let path = search.driver.clone().unwrap_or_else(|| PathBuf::from("libcuda.so.1"));
    let library = open(&path).map_err(|e| format!("no NVIDIA driver: {e}"))?;
    if let Some(symbol) = DRIVER_SYMBOLS.iter().find(|s| address(library, s).is_none()) {
        return Err(format!("the NVIDIA driver has no `{symbol}`: a newer driver is needed"));
    }
    TELLS_EDGES.store(address(library, "cuGraphGetEdges_v2").is_some(), Ordering::Relaxed);
    // A folder of stubs for linkers has one by the name without a version.
    if let Ok(alias) = alias::open("libcuda.so", &path) {
        Box::leak(Box::new(alias));
    }
    // SAFETY: libraries may be looked for at any time; `culib` is called only if one is there.
    let by_name = unsafe {
        if !cudarc::driver::sys::is_culib_present() {
            return Err("the NVIDIA driver cannot be found by name".to_owned());
        }
        cudarc::driver::sys::culib()
    };
    same_copy(&path, library, by_name, "cuInit")?;
    let mut version = 0;
    // SAFETY: the symbol is there, and takes a pointer to an int.
    let code = unsafe { cudarc::driver::sys::cuDriverGetVersion(&raw mut version) };
    if code != cudarc::driver::sys::CUresult::CUDA_SUCCESS {
        return Err(format!("the NVIDIA driver does not say its version: {code:?}"));
    }
    let version = (version.unsigned_abs() / 1000, version.unsigned_abs() % 1000 / 10);
    if version.0 < OLDEST_CUDA {
        let (major, minor) = version;
        return Err(format!(
            "the NVIDIA driver is for CUDA {major}.{minor}; {OLDEST_CUDA}.0 is needed: update the driver"
        ));
    }
    Ok(Found { path, version, instead_of: None })
}

/// The driver's own version: that of the kernel module, else what NVML says (there is no such file on WSL). Of a stand-in what
/// it says itself.
fn find_release(search: &Search) -> Option<String> {
    let told = std::fs::read_to_string("/proc/driver/nvidia/version").ok().filter(|_| search.driver.is_none());
    told.as_deref().and_then(release_in).or_else(|| {
        let path = search.driver.clone().unwrap_or_else(|| PathBuf::from("libnvidia-ml.so.1"));
        release_by_nvml(open(&path).ok()?)
    })
}

/// The version in the text of `/proc/driver/nvidia/version`: the first word of its first line that is digits between dots.
fn release_in(text: &str) -> Option<String> {
    let line = text.lines().next().filter(|line| line.starts_with("NVRM version:"))?;
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let is_version = |word: &&str| word.contains('.') && word.split('.').all(is_number);
    line.split_whitespace().find(is_version).map(str::to_owned)
}

fn release_by_nvml(library: &Library) -> Option<String> {
    type Plain = unsafe extern "C" fn() -> i32;
    type Version = unsafe extern "C" fn(*mut u8, u32) -> i32;
    // NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE
    let mut text = [0u8; 80];
    // SAFETY: NVML's functions with their signatures (`nvml.h`); what is written is cut to the length that is given.
    let code = unsafe {
        let start = library.get::<Plain>(b"nvmlInit_v2").ok()?;
        let version = library.get::<Version>(b"nvmlSystemGetDriverVersion").ok()?;
        let end = library.get::<Plain>(b"nvmlShutdown").ok()?;
        if start() != 0 {
            return None;
        }
        let code = version(text.as_mut_ptr(), text.len() as u32);
        end();
        code
    };
    let text = std::ffi::CStr::from_bytes_until_nul(&text).ok()?.to_str().ok()?;
    (code == 0 && !text.is_empty()).then(|| text.to_owned())
}

fn find_nvrtc(search: &Search) -> Result<Found, String> {
    // NVRTC asks for its builtins by name at the first compile, and no search path leads there.
    let mut builtins = mapped("libnvrtc-builtins.so");
    for package in &search.packages {
        builtins.extend(NVRTC.folders.iter().flat_map(|f| versioned(&package.join(f), "libnvrtc-builtins.so")));
    }
    let (path, library) = acquire(&NVRTC, search)?;
    let beside = builtins.iter().find(|b| b.parent() == path.parent());
    if let Some(builtins) = beside.or_else(|| builtins.first()) {
        open(builtins)?;
    }
    // SAFETY: as for the driver.
    let by_name = unsafe {
        if !cudarc::nvrtc::sys::is_culib_present() {
            return Err(format!("{} was opened, but is not found by name", path.display()));
        }
        cudarc::nvrtc::sys::culib()
    };
    let found = usable_copy(&NVRTC, (path, library), by_name, |library| {
        type Version = unsafe extern "C" fn(*mut i32, *mut i32) -> i32;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function has this signature (`nvrtc.h`), and writes two ints.
        unsafe { library.get::<Version>(b"nvrtcVersion").ok()?(&raw mut major, &raw mut minor) };
        Some((major.unsigned_abs(), minor.unsigned_abs()))
    })?;
    let (major, minor) = found.version;
    if major < OLDEST_CUDA {
        return Err(format!("NVRTC is {major}.{minor} at {}; {OLDEST_CUDA}.0 is needed", found.path.display()));
    }
    Ok(found)
}

fn find_cublaslt(search: &Search) -> Result<Found, String> {
    let (path, library) = acquire(&CUBLASLT, search)?;
    // SAFETY: as for the driver.
    let by_name = unsafe {
        if !cudarc::cublaslt::sys::is_culib_present() {
            return Err(format!("{} was opened, but is not found by name", path.display()));
        }
        cudarc::cublaslt::sys::culib()
    };
    usable_copy(&CUBLASLT, (path, library), by_name, |library| {
        // SAFETY: the function has this signature (`cublasLt.h`).
        let version = unsafe { library.get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion").ok()?() } as u32;
        // 11.11 and older count 10000 a major version, all that are new enough count so too.
        Some((version / 10000, version % 10000 / 100))
    })
}

fn find_cudnn(search: &Search) -> Result<Found, String> {
    let (path, library) = acquire(&CUDNN, search)?;
    // SAFETY: as for the driver.
    let by_name = unsafe {
        if !cudarc::cudnn::sys::is_culib_present() {
            return Err(format!("{} was opened, but is not found by name", path.display()));
        }
        cudarc::cudnn::sys::culib()
    };
    same_copy(&path, library, by_name, "cudnnGetVersion")?;
    // SAFETY: the symbol is there, takes nothing and returns a number.
    let version = unsafe { cudarc::cudnn::sys::cudnnGetVersion() } as u32;
    let version = (version / 10000, version % 10000 / 100);
    if version < OLDEST_CUDNN {
        let (major, minor) = OLDEST_CUDNN;
        return Err(format!("cuDNN is {}.{} at {}; {major}.{minor} is needed", version.0, version.1, path.display()));
    }
    Ok(Found { path, version, instead_of: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str, files: &[&str]) -> PathBuf {
        let root = std::env::temp_dir().join(format!("oxidiff-libraries-{}-{name}", std::process::id()));
        for file in files {
            let path = root.join(file);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, b"not a library").unwrap();
        }
        root
    }

    #[test]
    fn knows_the_layouts_of_both_generations_of_wheels() {
        let thirteen = folder("13", &["cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc-builtins.so.13.0"]);
        let twelve = folder("12", &["cuda_nvrtc/lib/libnvrtc.so.12", "cuda_nvrtc/lib/libnvrtc.alt.so.12"]);
        let find = |root: &Path| -> Vec<PathBuf> {
            NVRTC.folders.iter().flat_map(|f| versioned(&root.join(f), NVRTC.stem)).collect()
        };
        assert_eq!(find(&thirteen), [thirteen.join("cu13/lib/libnvrtc.so.13")]);
        assert_eq!(find(&twelve), [twelve.join("cuda_nvrtc/lib/libnvrtc.so.12")]);
        for root in [thirteen, twelve] {
            std::fs::remove_dir_all(root).unwrap();
        }
    }

    #[test]
    fn says_where_it_looked() {
        let wanted =
            Wanted { stem: "libabsent.so", folders: &["a/lib", "b/lib"], sonames: &["libabsent.so.9"], symbols: &[] };
        let search = Search { packages: vec![PathBuf::from("/nowhere/nvidia")], driver: None };
        let reason = acquire(&wanted, &search).unwrap_err();
        assert!(reason.contains("/nowhere/nvidia/a/lib, /nowhere/nvidia/b/lib"), "{reason}");
    }

    #[test]
    fn the_driver_s_own_version_is_read() {
        let closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  gcc version 12.3.0\n";
        let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder@U22)  Sun Jul 27\n";
        assert_eq!(release_in(closed).as_deref(), Some("535.104.05"));
        assert_eq!(release_in(open).as_deref(), Some("580.65.06"));
        for other in ["", "GCC version: gcc version 12.3.0", "NVRM version: unknown ... 1.2."] {
            assert_eq!(release_in(other), None, "{other}");
        }
    }

    #[test]
    fn a_broken_file_is_a_reason() {
        let root = folder("broken", &["a/lib/libbroken.so.1"]);
        let wanted = Wanted { stem: "libbroken.so", folders: &["a/lib"], sonames: &[], symbols: &[] };
        let search = Search { packages: vec![root.clone()], driver: None };
        assert!(acquire(&wanted, &search).unwrap_err().contains("libbroken.so.1"));
        std::fs::remove_dir_all(root).unwrap();
    }
}
