//! A folder of files named after what they were made from: machine code, plans of libraries.
//!
//! A file is headed by the hash of what follows and read only if that agrees: a cut or foreign file is a miss. Where the
//! folder cannot be written the next process pays for it with time, and nothing else happens. The oldest files go where
//! there is more than the folder may hold.

use std::path::{Path, PathBuf};

use super::files;

/// Bytes of a hash.
const HASH: usize = 32;
/// Longest file that is read.
const MAX_BYTES: usize = (64 << 20) + HASH;

/// Such a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    folder: PathBuf,
    /// What names of its files end with, after a dot.
    extension: &'static str,
    /// Most that it holds.
    most_bytes: u64,
}

/// The name of what is made from `parts`.
pub fn key(parts: &[&str]) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.finalize().to_hex().to_string()
}

/// Whether these bytes are a whole file of such a folder.
pub fn is_whole(file: &[u8]) -> bool {
    file.len() <= MAX_BYTES
        && file.split_at_checked(HASH).is_some_and(|(head, data)| head == blake3::hash(data).as_bytes())
}

impl Kept {
    /// Files of one kind in `folder`, of at most `most_bytes` together.
    pub fn new(folder: PathBuf, extension: &'static str, most_bytes: u64) -> Self {
        Self { folder, extension, most_bytes }
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.{}", self.extension))
    }

    /// What was kept under this key.
    pub fn read(&self, key: &str) -> Option<Vec<u8>> {
        let mut bytes = files::read(&self.path(key), MAX_BYTES).ok()??;
        let data = bytes.split_off(HASH.min(bytes.len()));
        (bytes == blake3::hash(&data).as_bytes()).then_some(data)
    }

    /// Keeps `data`, where the folder can be written.
    pub fn write(&self, key: &str, data: &[u8]) {
        let bytes = [blake3::hash(data).as_bytes().as_slice(), data].concat();
        // The next process makes it again.
        let _ = files::write(&self.path(key), &bytes);
        self.keep_below();
    }

    /// Takes away what turned out to be of no use.
    pub fn remove(&self, key: &str) {
        // One that another process removed is gone too.
        let _ = std::fs::remove_file(self.path(key));
    }

    fn keep_below(&self) {
        let is_one = |path: &Path| path.extension().is_some_and(|x| x == self.extension);
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten().filter(|e| is_one(&e.path()));
        let states = entries.filter_map(|e| e.metadata().ok().map(|m| (m.modified().ok(), m.len(), e.path())));
        let mut held: Vec<_> = states.collect();
        held.sort();
        let mut left: u64 = held.iter().map(|(_, len, _)| len).sum();
        for (_, len, path) in held {
            if left <= self.most_bytes {
                break;
            }
            // One that another process removed is gone too.
            let _ = std::fs::remove_file(path);
            left -= len;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_kept_is_read_if_it_is_whole() {
        let folder = std::env::temp_dir().join(format!("oxidiff-kept-{}", std::process::id()));
        let kept = Kept::new(folder.clone(), "part", 1 << 20);
        let name = key(&["a", "b"]);
        assert_ne!(name, key(&["ab", ""]));
        assert_eq!(kept.read(&name), None);
        kept.write(&name, b"what was made");
        assert_eq!(kept.read(&name).as_deref(), Some(b"what was made".as_slice()));
        let path = folder.join(format!("{name}.part"));
        let bytes = std::fs::read(&path).unwrap();
        assert!(is_whole(&bytes));
        for damaged in [&bytes[..bytes.len() - 1], &bytes[..10], b"", &[bytes.as_slice(), b"x"].concat()] {
            std::fs::write(&path, damaged).unwrap();
            assert_eq!((kept.read(&name), is_whole(damaged)), (None, false));
        }
        kept.remove(&name);
        assert!(!path.exists());
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_oldest_go_first() {
        let folder = std::env::temp_dir().join(format!("oxidiff-kept-old-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for (age, name) in ["new.part", "old.part", "older.part", "other.txt"].into_iter().enumerate() {
            let file = std::fs::File::create(folder.join(name)).unwrap();
            file.set_len(100).unwrap();
            let then = std::time::SystemTime::now() - std::time::Duration::from_secs(60 * age as u64);
            file.set_modified(then).unwrap();
        }
        Kept::new(folder.clone(), "part", 150).keep_below();
        let mut left: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["new.part", "other.txt"]);
        std::fs::remove_dir_all(folder).unwrap();
    }
}
