//! Files that several processes share, any of which may be killed at any moment.
//!
//! A file is written under a name of its own and renamed, so that a reader sees the old content or the new one and
//! nothing between. What a killed writer leaves behind is a temporary file, which [`sweep`] removes. A lock is held by
//! the operating system on behalf of the process: it ends with it.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use crate::error::{Error, Result};

/// What names of temporary files end with.
const TEMPORARY: &str = ".oxidiff-tmp";
/// Age at which a temporary file has surely lost its writer.
const ABANDONED: Duration = Duration::from_secs(3600);

fn cannot(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::Cache { what: format!("cannot {what} {}: {error}", path.display()) }
}

/// As many links are followed, as by Linux.
const MAX_LINKS: usize = 40;

/// The file that a path leads to, which need not exist.
///
/// # Errors
/// [`Error::Cache`] if it is a folder, a pipe or a device: to be replaced is nothing for them, and a pipe may never end.
fn target(path: &Path) -> Result<PathBuf> {
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        let Ok(link) = fs::read_link(&target) else { break };
        target = target.parent().unwrap_or_else(|| Path::new(".")).join(link);
    }
    match fs::metadata(&target) {
        Ok(found) if !found.is_file() => Err(Error::Cache { what: format!("{} is no file", path.display()) }),
        _ => Ok(target),
    }
}

/// The content of a file of at most `max_bytes`; `None` if there is none.
///
/// # Errors
/// [`Error::Cache`] if it is longer, cannot be read or is no file.
pub fn read(path: &Path, max_bytes: usize) -> Result<Option<Vec<u8>>> {
    let file = match File::open(target(path)?) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(cannot("read", path, &error)),
    };
    let mut data = Vec::new();
    file.take(max_bytes as u64 + 1).read_to_end(&mut data).map_err(|e| cannot("read", path, &e))?;
    if data.len() > max_bytes {
        return Err(Error::Cache { what: format!("{} has more than {max_bytes} bytes", path.display()) });
    }
    Ok(Some(data))
}

/// Writes a file so that every reader, at any time, finds what was there before or all of `data`. Of a link, the file that it
/// leads to.
///
/// # Errors
/// [`Error::Cache`] if the folder cannot be made or written, the disk is full or there is something that is no file; all is
/// then as it was.
pub fn write(path: &Path, data: &[u8]) -> Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let path = &target(path)?;
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder).map_err(|e| cannot("make", folder, &e))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unique = format!(".{name}.{}.{}{TEMPORARY}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let temporary = folder.join(unique);
    let written = write_new(&temporary, data).and_then(|()| fs::rename(&temporary, path));
    written.map_err(|error| {
        // It may not have come into being at all.
        let _ = fs::remove_file(&temporary);
        cannot("write", path, &error)
    })
}

fn write_new(path: &Path, data: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(data)?;
    // A power cut after the rename must not leave an empty file under the final name.
    file.sync_data()
}

/// Removes what writers that were killed long ago left in `folder`.
pub fn sweep(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let age =
            entry.metadata().and_then(|m| m.modified()).ok().and_then(|t| SystemTime::now().duration_since(t).ok());
        if entry.file_name().to_string_lossy().ends_with(TEMPORARY) && age.is_some_and(|age| age > ABANDONED) {
            // Another process may have been faster.
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A lock between processes, held until it is dropped.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock that is the file `path`, waiting at most `patience`.
    ///
    /// # Errors
    /// [`Error::Cache`] if the file cannot be opened, is no file or somebody else keeps the lock.
    pub fn take(path: &Path, patience: Duration) -> Result<Self> {
        let path = &target(path)?;
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| cannot("make", folder, &e))?;
        }
        let open = OpenOptions::new().create(true).truncate(false).write(true).open(path);
        let file = open.map_err(|e| cannot("open", path, &e))?;
        let start = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::WouldBlock) if start.elapsed() < patience => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(Error::Cache { what: format!("another process keeps {} locked", path.display()) });
                }
                // A file system without locks: the rename alone keeps every file whole.
                Err(TryLockError::Error(error)) if error.kind() == std::io::ErrorKind::Unsupported => {
                    return Ok(Self { _file: file });
                }
                Err(TryLockError::Error(error)) => return Err(cannot("lock", path, &error)),
            }
        }
    }
}
