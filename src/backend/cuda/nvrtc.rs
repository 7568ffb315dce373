//! Kernel text to machine code by NVRTC.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::sys;

use super::NAME;
use crate::{Error, Result};

/// What a compile gave.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// An ELF image for one architecture.
    pub cubin: Vec<u8>,
    /// What the compiler said: if it was asked to be verbose, registers and spills of each entry point.
    pub log: String,
}

impl Compiled {
    /// Entry points of a verbose log, and bytes of registers that each stores to memory for want of more.
    pub fn spills(&self) -> Vec<(&str, usize)> {
        spills(&self.log)
    }
}

fn spills(log: &str) -> Vec<(&str, usize)> {
    let mut name = "";
    let mut found = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Function properties for ") {
            name = rest.trim();
        } else if let Some((before, _)) = line.split_once(" bytes spill stores") {
            found.push((name, before.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(usize::MAX)));
        }
    }
    found
}

/// The compiler. Only [`super::Toolkit`] makes one, after the library was found.
#[derive(Clone, Copy, Debug)]
pub struct Nvrtc {
    version: (u32, u32),
}

fn failed(what: String) -> Error {
    Error::Backend { backend: NAME, what }
}

struct Program(sys::nvrtcProgram);

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created by `nvrtcCreateProgram` and destroyed once.
        unsafe { sys::nvrtcDestroyProgram(&raw mut self.0) };
    }
}

fn check(code: sys::nvrtcResult, what: &str) -> Result<()> {
    match code {
        sys::nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => Err(failed(format!("{what}: {other:?}"))),
    }
}

impl Nvrtc {
    pub(super) fn new(version: (u32, u32)) -> Self {
        Self { version }
    }

    /// `major, minor`.
    pub fn version(self) -> (u32, u32) {
        self.version
    }

    /// Compute capabilities (`80`, `90`, ...) that it compiles for, in order.
    ///
    /// # Errors
    /// If NVRTC refuses.
    pub fn archs(self) -> Result<Vec<u32>> {
        let mut count = 0;
        // SAFETY: takes a pointer to an int.
        check(unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }, "architectures of NVRTC")?;
        let mut archs = vec![0i32; usize::try_from(count).unwrap_or(0)];
        // SAFETY: the list has as many entries as the call before said.
        check(unsafe { sys::nvrtcGetSupportedArchs(archs.as_mut_ptr()) }, "architectures of NVRTC")?;
        Ok(archs.into_iter().map(i32::unsigned_abs).collect())
    }

    /// The capability to compile for if a device has `arch`: that, or the next older one that it runs code of, as devices do
    /// within a generation. None where this NVRTC is older than the generation; one that knows of none is taken at its word.
    ///
    /// # Errors
    /// If NVRTC refuses.
    pub fn arch_for(self, arch: u32) -> Result<Option<u32>> {
        let known = self.archs()?;
        let is_one = |known: &u32| known / 10 == arch / 10 && *known <= arch;
        Ok(if known.is_empty() { Some(arch) } else { known.into_iter().filter(is_one).max() })
    }

    /// Compiles `source` for devices of compute capability `arch`; `verbose` asks for registers and spills in the log.
    ///
    /// # Errors
    /// [`Error::Backend`] with the compiler's messages.
    pub fn compile(self, source: &str, arch: u32, verbose: bool) -> Result<Compiled> {
        let text = CString::new(source).map_err(|_| failed("a kernel's text has a zero byte".to_owned()))?;
        let arch = self.arch_for(arch)?.unwrap_or(arch);
        let mut options = vec![format!("--gpu-architecture=sm_{arch}"), "--std=c++17".to_owned()];
        if verbose {
            options.push("--ptxas-options=-v".to_owned());
        }
        let options: Vec<CString> = options.into_iter().filter_map(|o| CString::new(o).ok()).collect();
        let pointers: Vec<*const std::ffi::c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let mut program = Program(std::ptr::null_mut());
        // SAFETY: text and name are C strings; there are no headers.
        let code = unsafe {
            sys::nvrtcCreateProgram(
                &raw mut program.0,
                text.as_ptr(),
                c"kernels.cu".as_ptr(),
                0,
                std::ptr::null(),
                std::ptr::null(),
            )
        };
        check(code, "a program of NVRTC")?;
        // SAFETY: the program is live, the options are C strings that live until the call returns.
        let code = unsafe { sys::nvrtcCompileProgram(program.0, pointers.len() as i32, pointers.as_ptr()) };
        let log = self.log(&program)?;
        if code != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(failed(format!("NVRTC does not compile a kernel for sm_{arch}: {code:?}\n{log}")));
        }
        let mut size = 0;
        // SAFETY: takes a pointer to a size.
        check(unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut size) }, "size of a cubin")?;
        let mut cubin = vec![0u8; size];
        // SAFETY: the buffer has the size that was asked for.
        check(unsafe { sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()) }, "a cubin")?;
        Ok(Compiled { cubin, log })
    }

    fn log(self, program: &Program) -> Result<String> {
        let mut size = 0;
        // SAFETY: takes a pointer to a size.
        check(unsafe { sys::nvrtcGetProgramLogSize(program.0, &raw mut size) }, "size of a log")?;
        let mut log = vec![0u8; size + 1];
        // SAFETY: the buffer has the size that was asked for, and one byte more.
        check(unsafe { sys::nvrtcGetProgramLog(program.0, log.as_mut_ptr().cast()) }, "a log")?;
        Ok(CStr::from_bytes_until_nul(&log).map_or_else(|_| String::new(), |l| l.to_string_lossy().into_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spills_are_those_of_the_entry_point_above() {
        let log = "ptxas info : Function properties for a\n  0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n\
                   ptxas info : Used 40 registers\n\
                   ptxas info : Function properties for b_v\n  8 bytes stack frame, 12 bytes spill stores, 4 bytes spill loads\n";
        assert_eq!(spills(log), [("a", 0), ("b_v", 12)]);
        assert_eq!(spills("x bytes spill stores"), [("", usize::MAX)], "what is not understood is not fine");
    }
}
