//! Names the sources of the kernels by their content, for [`VERSION`](../oxidiff_kernels/constant.VERSION.html).

use std::path::{Path, PathBuf};
use std::{fs, io};

fn main() -> io::Result<()> {
    let mut files = Vec::new();
    collect(Path::new("src"), &mut files)?;
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
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rustc-env=KERNELS_HASH={hash:016x}");
    Ok(())
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, files)?;
        } else {
            files.push(path);
        }
    }
    Ok(())
}
