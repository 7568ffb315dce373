//! Names what kernels for GPUs are made by, and what libraries there are asked, by its content: see `GENERATORS` of
//! `src/backend/cuda/delegate`.

use std::io;

#[path = "kernels/hash_sources.rs"]
mod hash_sources;

/// What decides the machine code of a step on a GPU and the arguments that it is launched with.
const GENERATORS: [&str; 2] = ["src/codegen", "src/backend/cuda"];

fn main() -> io::Result<()> {
    for folder in GENERATORS {
        println!("cargo:rerun-if-changed={folder}");
    }
    println!("cargo:rustc-env=GENERATORS_HASH={}", hash_sources::hash_sources(&GENERATORS)?);
    Ok(())
}
