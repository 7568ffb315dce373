//! Names the sources of the kernels by their content, for [`VERSION`](../oxidiff_kernels/constant.VERSION.html).

use std::io;

mod hash_sources;

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rustc-env=KERNELS_HASH={}", hash_sources::hash_sources(&["src"])?);
    Ok(())
}
