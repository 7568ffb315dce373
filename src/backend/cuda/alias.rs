//! A name for a library under which the dynamic linker does not know it.
//!
//! The linker finds what is loaded by the names that it was asked for, and by the one that stands in the library: the copy
//! that PyTorch has loaded as `libnvrtc.so.13` is not what somebody gets who asks for `libnvrtc.so`, where the system has such
//! a file. An alias is an empty library that is called so and needs the right one: whoever asks for the name gets the alias,
//! and whoever looks for a function in that finds the right one's.
//!
//! Invariant: nothing of an alias is executable, and its file is gone when [`open`] returns.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use libloading::Library;

/// `e_machine` of this process, if it is one whose libraries look as [`image`] writes them.
const MACHINE: Option<u16> = match () {
    () if cfg!(all(target_os = "linux", target_arch = "x86_64")) => Some(62),
    () if cfg!(all(target_os = "linux", target_arch = "aarch64", target_endian = "little")) => Some(183),
    () => None,
};

/// Bytes of the file's header.
const HEADER: usize = 64;
/// Bytes of the header of a segment.
const SEGMENT: usize = 56;
/// Bytes of a symbol.
const SYMBOL: usize = 24;
/// Bytes of an entry for the linker.
const ENTRY: usize = 16;
/// What is loaded, what the linker reads, and that the stack need not be executable.
const SEGMENTS: usize = 3;

/// A library in ELF that is called `name` and needs `path`; it has no functions.
fn image(machine: u16, name: &str, path: &str) -> Vec<u8> {
    let names = [b"\0", name.as_bytes(), b"\0", path.as_bytes(), b"\0"].concat();
    let symbols = HEADER + SEGMENTS * SEGMENT;
    // One bucket and one symbol, which is none.
    let hash = symbols + SYMBOL;
    let entries = hash + 16;
    // DT_NEEDED, DT_SONAME, DT_HASH, DT_SYMTAB, DT_SYMENT, DT_STRTAB, DT_STRSZ, DT_NULL (`elf.h`).
    let text = entries + 8 * ENTRY;
    let own: [(u64, usize); 8] =
        [(1, name.len() + 2), (14, 1), (4, hash), (6, symbols), (11, SYMBOL), (5, text), (10, names.len()), (0, 0)];
    let mut out = Vec::with_capacity(text + names.len());
    out.extend(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0");
    for half in [3, machine] {
        out.extend(half.to_le_bytes());
    }
    out.extend(1u32.to_le_bytes());
    // No entry point, segments behind this header, no sections.
    for word in [0, HEADER as u64, 0] {
        out.extend(word.to_le_bytes());
    }
    out.extend(0u32.to_le_bytes());
    for half in [HEADER as u16, SEGMENT as u16, SEGMENTS as u16, 0, 0, 0] {
        out.extend(half.to_le_bytes());
    }
    // The linker writes addresses into its entries: what is loaded is writable.
    let (all, linked) = ((0, text + names.len(), 0x1000), (entries, 8 * ENTRY, 8));
    for (kind, (at, bytes, align)) in [(1u32, all), (2, linked), (0x6474_e551, (0, 0, 16))] {
        out.extend(kind.to_le_bytes());
        out.extend(6u32.to_le_bytes());
        for word in [at, at, at, bytes, bytes, align] {
            out.extend((word as u64).to_le_bytes());
        }
    }
    out.extend([0; SYMBOL]);
    for word in [1u32, 1, 0, 0] {
        out.extend(word.to_le_bytes());
    }
    for (tag, value) in own {
        out.extend(tag.to_le_bytes());
        out.extend((value as u64).to_le_bytes());
    }
    out.extend(names);
    out
}

/// A file in the system's folder for them that goes with this.
struct Passing(PathBuf);

impl Drop for Passing {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Makes the linker give whoever asks for `name` what is at `path`, unless it knows the name already.
///
/// # Errors
/// Why it does not.
pub fn open(name: &str, path: &Path) -> Result<Library, String> {
    let machine = MACHINE.ok_or("libraries of this system are not understood")?;
    let path =
        path.to_str().filter(|path| !path.contains(['\0', '$'])).ok_or("a path that the linker does not take")?;
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let file = std::env::temp_dir().join(format!("oxidiff-{}-{number}-{name}", std::process::id()));
    // Nobody else's: it is made here, or not at all.
    let mut made = OpenOptions::new().write(true).create_new(true).open(&file).map_err(|e| e.to_string())?;
    let file = Passing(file);
    made.write_all(&image(machine, name, path)).map_err(|e| e.to_string())?;
    drop(made);
    // SAFETY: the file was written above, and runs nothing when it is loaded; what it needs is NVIDIA's, and loaded already.
    unsafe { Library::new(&file.0) }.map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_another_name() {
        let (Some(_), Ok(real)) = (MACHINE, open_by_name("libm.so.6")) else { return };
        let address = |library: &Library| {
            // SAFETY: the symbol is only looked at.
            unsafe { library.get::<*const ()>(b"cos") }.map(|symbol| (*symbol).addr()).ok()
        };
        let name = "liboxidiff-has-no-such-name.so";
        assert!(open_by_name(name).is_err());
        let alias = open(name, Path::new("libm.so.6")).unwrap();
        let found = open_by_name(name).unwrap();
        assert!(address(&real).is_some());
        assert_eq!((address(&found), address(&alias)), (address(&real), address(&real)));
    }

    fn open_by_name(name: &str) -> Result<Library, libloading::Error> {
        // SAFETY: the system's library of mathematics, or nothing.
        unsafe { Library::new(name) }
    }

    #[test]
    fn what_the_linker_would_read_otherwise_is_refused() {
        assert!(open("libx.so", Path::new("/a/$ORIGIN/libx.so.1")).is_err());
        assert!(open("libx.so", Path::new("/nowhere/libx.so.1")).is_err());
    }
}
