//! A name for sources by their content; build scripts share it.

use std::path::{Path, PathBuf};
use std::{fs, io};

/// The hash of every file in these files and folders: of what it is called, and of what is in it.
pub fn hash_sources(roots: &[&str]) -> io::Result<String> {
    let mut files = Vec::new();
    for root in roots {
        collect(Path::new(root), &mut files)?;
    }
    files.sort();
    // FNV-1a, 64 bits.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for &byte in bytes {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
        }
    };
    for file in &files {
        add(file.to_string_lossy().replace('\\', "/").as_bytes());
        add(&fs::read(file)?);
    }
    Ok(format!("{hash:016x}"))
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        collect(&entry?.path(), files)?;
    }
    Ok(())
}
