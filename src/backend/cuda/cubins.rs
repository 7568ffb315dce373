//! Machine code of kernels: compiled in parallel, several kernels to a unit, and kept by content.
//!
//! A unit's key is the hash of its text, the prelude, the compiler's version and the architecture; [`kept`] says how files
//! are kept.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::NAME;
use super::nvrtc::Nvrtc;
use crate::codegen::cuda::{Kernel, PRELUDE};
use crate::store::kept::{self, Kept};
use crate::{Error, Result};

/// Kernels of one compilation: most of a small kernel's time is the compiler's start.
pub const UNIT: usize = 16;

/// What turns kernel text into what the driver loads.
pub trait Compiler: Send + Sync {
    /// Identity: another compiler or version has another.
    fn identity(&self) -> String;

    /// Machine code of `source`, prelude included, for compute capability `arch`.
    ///
    /// # Errors
    /// With the compiler's messages.
    fn compile(&self, source: &str, arch: u32) -> Result<Vec<u8>>;
}

impl Compiler for Nvrtc {
    fn identity(&self) -> String {
        format!("nvrtc {}.{}", self.version().0, self.version().1)
    }

    fn compile(&self, source: &str, arch: u32) -> Result<Vec<u8>> {
        Nvrtc::compile(*self, source, arch, false).map(|c| c.cubin)
    }
}

/// Machine code of a unit.
pub type Image = Arc<Vec<u8>>;

/// Most that a folder keeps: some hundred models' worth.
const MOST_BYTES: u64 = 256 << 20;

/// Machine code by content: in memory, and in a folder if there is one.
#[derive(Default)]
pub struct Cubins {
    kept: Option<Kept>,
    known: Mutex<HashMap<String, Image>>,
    compiled: AtomicUsize,
}

impl Cubins {
    /// Kept in `folder` beyond the process, if there is one.
    pub fn new(folder: Option<PathBuf>) -> Self {
        Self { kept: folder.map(|f| Kept::new(f, "cubin", MOST_BYTES)), ..Self::default() }
    }

    /// Units that had to be compiled so far.
    pub fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Machine code of every unit of `kernels`, in order: the first has the kernels `0..UNIT`, and so on.
    ///
    /// # Errors
    /// Those of the compiler.
    pub fn get(&self, compiler: &dyn Compiler, arch: u32, kernels: &[Kernel]) -> Result<Vec<Image>> {
        let units: Vec<String> = kernels.chunks(UNIT).map(source).collect();
        let next = AtomicUsize::new(0);
        let results: Vec<Mutex<Option<Result<Image>>>> = units.iter().map(|_| Mutex::new(None)).collect();
        let work = || {
            while let Some(at) = Some(next.fetch_add(1, Ordering::Relaxed)).filter(|&at| at < units.len()) {
                let result = self.unit(compiler, arch, &units[at]);
                *results[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            }
        };
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(units.len());
        std::thread::scope(|scope| {
            // A thread that cannot be had is no loss: this one does its share.
            (1..threads).for_each(|_| drop(std::thread::Builder::new().spawn_scoped(scope, work)));
            work();
        });
        let missing = || Err(Error::Backend { backend: NAME, what: "a compiling thread ended early".to_owned() });
        let take = |cell: Mutex<Option<_>>| cell.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.into_iter().map(|cell| take(cell).unwrap_or_else(missing)).collect()
    }

    fn unit(&self, compiler: &dyn Compiler, arch: u32, source: &str) -> Result<Image> {
        let key = kept::key(&[&compiler.identity(), &format!("sm_{arch}"), source]);
        let known = |key: &str| self.known.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned();
        if let Some(image) = known(&key) {
            return Ok(image);
        }
        let image = match self.kept.as_ref().and_then(|kept| kept.read(&key)) {
            Some(image) => image,
            None => {
                let image = compiler.compile(source, arch)?;
                self.compiled.fetch_add(1, Ordering::Relaxed);
                self.kept.iter().for_each(|kept| kept.write(&key, &image));
                image
            }
        };
        let image = Arc::new(image);
        self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(key, image.clone());
        Ok(image)
    }
}

/// The text of one unit.
pub fn source(kernels: &[Kernel]) -> String {
    let texts: Vec<&str> = kernels.iter().map(|k| k.text.as_str()).collect();
    unit(&texts)
}

/// The unit of these kernels' texts.
pub fn unit(texts: &[&str]) -> String {
    format!("{PRELUDE}\n{}", texts.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codegen::cuda::Grid;

    struct Upper;

    impl Compiler for Upper {
        fn identity(&self) -> String {
            "upper".to_owned()
        }

        fn compile(&self, source: &str, _: u32) -> Result<Vec<u8>> {
            match source.contains("broken") {
                true => Err(Error::invalid("broken")),
                false => Ok(source.to_uppercase().into_bytes()),
            }
        }
    }

    fn kernel(text: &str) -> Kernel {
        let grid = Grid::Packs { rows: 1.into(), cols: 1.into() };
        Kernel { name: text.to_owned(), text: text.to_owned(), args: Vec::new(), grid, least: 1, vector: None }
    }

    #[test]
    fn compiles_once_and_keeps_by_content() {
        let folder = std::env::temp_dir().join(format!("oxidiff-cubins-{}", std::process::id()));
        let kernels: Vec<Kernel> = (0..40).map(|i| kernel(&format!("k{i}"))).collect();
        let first = Cubins::new(Some(folder.clone()));
        let images = first.get(&Upper, 80, &kernels).unwrap();
        assert_eq!((images.len(), first.compiled()), (3, 3));
        assert!(String::from_utf8_lossy(&images[2]).ends_with("K39"));
        let second = Cubins::new(Some(folder.clone()));
        assert_eq!(second.get(&Upper, 80, &kernels).unwrap(), images);
        assert_eq!(second.compiled(), 0);
        second.get(&Upper, 90, &kernels).unwrap();
        assert_eq!(second.compiled(), 3, "another architecture is another content");
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let bytes = std::fs::read(&path).unwrap();
            std::fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
        }
        let third = Cubins::new(Some(folder.clone()));
        assert_eq!(third.get(&Upper, 80, &kernels).unwrap(), images);
        assert_eq!(third.compiled(), 3, "cut files are misses");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn one_broken_kernel_is_an_error() {
        let kernels: Vec<Kernel> = ["a", "broken"].into_iter().map(kernel).collect();
        assert!(Cubins::default().get(&Upper, 80, &kernels).is_err());
    }
}
