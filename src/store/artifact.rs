//! The container of a saved program: named sections of bytes behind a checksum.
//!
//! ```text
//! 0   8   "oxidiff\n"
//! 8   4   version of the format, little endian like all numbers
//! 12  4   number of sections
//! 16  32  BLAKE3 of everything that follows
//! 48      per section: u16 length of its name, its name, u64 length of its data
//!         the data of all sections, in the same order, nothing behind it
//! ```
//!
//! The checksum is over the table and the data: a flipped bit, a missing tail or two files grown together are noticed
//! before anything is interpreted. It is no signature: what the sections say is checked by whoever reads them. Reading
//! allocates no more than a small multiple of the file's length, whatever its numbers say.
//!
//! Data is not compressed: the largest artifacts are a few megabytes, which costs less to read than to unpack, and
//! nothing can unpack to more than it is.

use crate::error::{Error, Result};

/// Version of the format; readers take no other.
pub const VERSION: u32 = 1;
/// Longest file that is read: ten times what the largest known model needs.
pub const MAX_BYTES: usize = 1 << 28;
/// Most sections that a file may have.
pub const MAX_SECTIONS: usize = 4096;

const MAGIC: &[u8; 8] = b"oxidiff\n";
const HEADER_BYTES: usize = 48;

/// One named piece of an artifact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Section {
    /// Its name, unique in a file.
    pub name: String,
    /// Its content.
    pub data: Vec<u8>,
}

/// The bytes of a file with these sections.
///
/// # Errors
/// [`Error::Artifact`] if a reader would refuse the result: too many or too large sections, names twice or too long.
pub fn encode(sections: &[Section]) -> Result<Vec<u8>> {
    let total: usize = sections.iter().map(|s| 10 + s.name.len() + s.data.len()).sum();
    if sections.len() > MAX_SECTIONS || total + HEADER_BYTES > MAX_BYTES {
        return Err(Error::artifact(format!("{} sections of {total} bytes are too much for a file", sections.len())));
    }
    let mut out = Vec::with_capacity(HEADER_BYTES + total);
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(sections.len() as u32).to_le_bytes());
    out.extend_from_slice(&[0; 32]);
    for (i, section) in sections.iter().enumerate() {
        let length =
            u16::try_from(section.name.len()).map_err(|_| Error::artifact("the name of a section is too long"))?;
        if sections[..i].iter().any(|s| s.name == section.name) {
            return Err(Error::artifact(format!("two sections are called `{}`", section.name)));
        }
        out.extend_from_slice(&length.to_le_bytes());
        out.extend_from_slice(section.name.as_bytes());
        out.extend_from_slice(&(section.data.len() as u64).to_le_bytes());
    }
    for section in sections {
        out.extend_from_slice(&section.data);
    }
    seal(&mut out);
    Ok(out)
}

/// Puts the checksum of what follows into the header of an encoded file.
pub fn seal(file: &mut [u8]) {
    if file.len() >= HEADER_BYTES {
        let (header, rest) = file.split_at_mut(HEADER_BYTES);
        header[16..].copy_from_slice(blake3::hash(rest).as_bytes());
    }
}

/// The sections of a file.
///
/// # Errors
/// [`Error::Artifact`]: it is no artifact, of another version, damaged or malformed; the message says which.
pub fn decode(file: &[u8]) -> Result<Vec<Section>> {
    let damaged = |what: &str| Error::artifact(format!("it is damaged: {what}"));
    if file.len() > MAX_BYTES {
        return Err(Error::artifact(format!("it has {} bytes, more than any artifact", file.len())));
    }
    let header = file.first_chunk::<HEADER_BYTES>().ok_or_else(|| Error::artifact("it is too short to be one"))?;
    if header[..8] != MAGIC[..] {
        return Err(Error::artifact("it is another kind of file"));
    }
    let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    if number(8) != VERSION {
        return Err(Error::artifact(format!(
            "it has version {} of the format, this oxidiff reads {VERSION}",
            number(8)
        )));
    }
    let body = &file[HEADER_BYTES..];
    if blake3::hash(body).as_bytes()[..] != header[16..] {
        return Err(damaged("its checksum does not match"));
    }
    let count = number(12) as usize;
    if count > MAX_SECTIONS {
        return Err(damaged("it has too many sections"));
    }
    let mut rest = body;
    let mut table: Vec<(String, usize)> = Vec::new();
    for _ in 0..count {
        let entry = read_entry(&mut rest).ok_or_else(|| damaged("its table of sections ends early"))?;
        if table.iter().any(|(name, _)| *name == entry.0) {
            return Err(damaged("two sections have one name"));
        }
        table.push(entry);
    }
    let mut sections = Vec::with_capacity(table.len());
    for (name, length) in table {
        let (data, behind) =
            rest.split_at_checked(length).ok_or_else(|| damaged("a section is longer than the file"))?;
        sections.push(Section { name, data: data.to_vec() });
        rest = behind;
    }
    if rest.is_empty() { Ok(sections) } else { Err(damaged("bytes behind its last section")) }
}

fn read_entry(rest: &mut &[u8]) -> Option<(String, usize)> {
    let (length, behind) = rest.split_first_chunk::<2>()?;
    let (name, behind) = behind.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
    let (bytes, behind) = behind.split_first_chunk::<8>()?;
    *rest = behind;
    Some((std::str::from_utf8(name).ok()?.to_owned(), usize::try_from(u64::from_le_bytes(*bytes)).ok()?))
}
