//! Launches of kernels with numbers for sizes, and how they get their addresses.

use super::super::Entry;
use super::super::driver::Function;
use super::super::lower::Launch;
use super::item::address;
use super::places::LEFT_OUT;
use crate::codegen::cuda::{Arg, Geometry, chunk_count, chunk_pixels};
use crate::{Error, Result};

/// A parameter word.
#[derive(Clone, Copy, Debug)]
pub(super) enum Word {
    /// Address of an operand: index into [`Call::places`].
    Pointer(usize),
    /// A number; an f32 by its bits.
    Number(u64),
    /// What a run is told ([`TOLD`]), as it stands among the addresses.
    Told(usize),
}

/// Geometry of a vector form, and the operands whose addresses must be multiples of that many bytes.
pub(super) type Wide = (Geometry, Vec<(usize, usize)>);

/// A launch with numbers in it.
#[derive(Debug)]
pub(super) struct Call {
    /// The step it is a part of.
    pub(super) step: usize,
    pub(super) entry: Entry,
    pub(super) words: Vec<Word>,
    /// Buffer (scratch follows the plan's) and bytes from its start; `None` for an operand that is not there.
    pub(super) places: Vec<Option<(usize, isize)>>,
    pub(super) plain: Geometry,
    /// The vector form, where sizes and strides allow it.
    pub(super) vector: Option<Wide>,
    /// Is launched only where this is not 0 among the addresses.
    pub(super) only_if: Option<usize>,
}

/// A call with addresses.
pub(super) struct Bound {
    pub(super) function: Function,
    pub(super) geometry: Geometry,
    pub(super) words: Vec<u64>,
}

impl Call {
    pub(super) fn bind(&self, bases: &[u64]) -> Bound {
        let at = |place: &Option<(usize, isize)>| address(*place, bases);
        let words = self.words.iter().map(|w| match *w {
            Word::Pointer(operand) => at(&self.places[operand]),
            Word::Number(n) => n,
            Word::Told(at) => bases[at],
        });
        let is_aligned = |(operand, bytes): &(usize, usize)| at(&self.places[*operand]).is_multiple_of(*bytes as u64);
        let wide = self.vector.as_ref().filter(|(_, aligned)| aligned.iter().all(is_aligned));
        let (function, geometry) = match (wide, self.entry.vector) {
            (Some((geometry, _)), Some(function)) => (function, *geometry),
            _ => (self.entry.scalar, self.plain),
        };
        Bound { function, geometry, words: words.collect() }
    }

    pub(super) fn reads_left_out(&self, bases: &[u64]) -> bool {
        self.places.iter().flatten().any(|(buffer, _)| bases[*buffer] == LEFT_OUT)
    }

    /// Host memory.
    pub(super) fn bytes(&self) -> usize {
        size_of::<Self>() + size_of_val(&*self.words) + size_of_val(&*self.places)
    }

    pub(super) fn is_on(&self, bases: &[u64]) -> bool {
        self.only_if.is_none_or(|at| bases[at] != 0)
    }

    pub(super) fn reads(&self, changed: &[bool]) -> bool {
        let is_told = |word: &Word| matches!(word, Word::Told(at) if changed[*at]);
        self.places.iter().flatten().any(|(buffer, _)| changed[*buffer]) || self.words.iter().any(is_told)
    }
}

pub(super) fn unsigned(value: i64) -> Result<u64> {
    u64::try_from(value).map_err(|_| Error::invalid("a size is negative"))
}

/// Parameters but for addresses.
pub(super) fn words(args: &[Arg], bindings: &[i64]) -> Result<Vec<Word>> {
    let word = |arg: &Arg| {
        Ok(match arg {
            Arg::Pointer(operand) => Word::Pointer(*operand),
            Arg::Size(dim) => Word::Number(dim.eval(bindings)?.cast_unsigned()),
            Arg::Chunk(pixels) => Word::Number(chunk_pixels(unsigned(pixels.eval(bindings)?)?)),
            Arg::Chunks(pixels) => Word::Number(chunk_count(unsigned(pixels.eval(bindings)?)?)),
            Arg::Float(bits) => Word::Number(u64::from(*bits)),
        })
    };
    args.iter().map(word).collect()
}

/// Geometry of the vector form and what it asks of addresses; `None` where sizes or strides do not allow it.
pub(super) fn vector_form(launch: &Launch, bindings: &[i64]) -> Result<Option<Wide>> {
    let Some(vector) = &launch.vector else { return Ok(None) };
    let width = vector.width as i64;
    if vector.cols.eval(bindings)? % width != 0 {
        return Ok(None);
    }
    let mut aligned = Vec::with_capacity(vector.operands.len());
    for (operand, size, strides) in &vector.operands {
        for stride in strides {
            if stride.eval(bindings)? % width != 0 {
                return Ok(None);
            }
        }
        aligned.push((*operand, (size * vector.width).min(16)));
    }
    // What it has no room for, the other form may have.
    Ok(launch.grid.geometry(bindings, vector.width).ok().flatten().map(|geometry| (geometry, aligned)))
}
