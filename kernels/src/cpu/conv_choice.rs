//! Measured choices between the forms of a convolution.
//!
//! [`choose`](super::conv_algorithm::choose) asks [`find`] first, and its model only where nothing was measured. A
//! [`Site`] is what the choice depends on, sizes rounded to a bucket, so that one measurement serves many sizes. The table
//! belongs to the process: whoever measured or read choices [`install`]s them.
//!
//! [`observe`] collects the convolutions that are chosen for while something is prepared; [`measure`] times one form of
//! one of them on random numbers, in memory that the caller lends, and can compare its result with the direct form's.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use half::{bf16, f16};

use super::KernelError;
use super::conv::{
    Conv, Weight, conv_unpacked, pack_conv_weight, pack_conv_weight_for, packs_in_parts, packs_while_used,
};
use super::conv_algorithm::{Algorithm, Keep, work_bytes};
use super::conv_winograd::{Room, Work, conv_winograd};
use super::gemm_store::StoreEpilogue;
use super::pack::SendMut;
use crate::dtype::DType;
use crate::fork::RwLock;
use crate::isa::{Isa, features};
use crate::pool::Pool;

/// Every form, the direct one first.
pub const ALGORITHMS: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Winograd2, Algorithm::Winograd4];

/// What the choice of a form depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Site {
    channels: [usize; 2],
    groups: usize,
    kernel: [usize; 3],
    stride: [usize; 3],
    dilation: [usize; 3],
    upsample: [usize; 3],
    types: [DType; 2],
    /// Twice the logarithm of the number of rows, rounded down.
    half_octave: u32,
    /// The shorter side of the image, up to 16: partial tiles matter below.
    side: usize,
    /// The process's threads: what is best for one need not be for two.
    threads: usize,
}

impl Site {
    /// The site of a convolution of an input and a weight of these types.
    pub fn of(conv: &Conv, dtype: DType, weight: DType) -> Self {
        let rows = conv.rows().max(1) as u64;
        Self {
            channels: [conv.in_channels, conv.out_channels],
            groups: conv.groups,
            kernel: conv.kernel,
            stride: conv.stride,
            dilation: conv.dilation,
            upsample: conv.upsample,
            types: [dtype, weight],
            half_octave: rows.saturating_mul(rows).ilog2(),
            side: conv.output[1].min(conv.output[2]).min(16),
            threads: Pool::global().threads(),
        }
    }

    /// Everything but the sizes and the threads, as text.
    pub fn op(&self) -> String {
        let Self { channels, groups, kernel, stride, dilation, upsample, types, .. } = self;
        format!(
            "convolution {types:?} channels {channels:?} groups {groups} kernel {kernel:?} stride {stride:?} \
             dilation {dilation:?} upsample {upsample:?}"
        )
    }

    /// The sizes, rounded, as text.
    pub fn bucket(&self) -> String {
        format!("rows 2^{:.1} side {}", f64::from(self.half_octave) / 2.0, self.side)
    }
}

/// The fastest forms of one site.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Where the packed weight is kept.
    pub packed: Algorithm,
    /// Where it is packed by every call.
    pub per_call: Algorithm,
}

const fn name(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::Direct => "direct",
        Algorithm::Winograd2 => "winograd2",
        Algorithm::Winograd4 => "winograd4",
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", name(self.packed), name(self.per_call))
    }
}

impl Choice {
    /// The choice of that text.
    pub fn parse(text: &str) -> Option<Self> {
        let of = |word: &str| ALGORITHMS.into_iter().find(|&a| name(a) == word);
        let (packed, per_call) = text.split_once(' ')?;
        Some(Self { packed: of(packed)?, per_call: of(per_call)? })
    }
}

fn table() -> &'static RwLock<HashMap<Site, Choice>> {
    static TABLE: OnceLock<RwLock<HashMap<Site, Choice>>> = OnceLock::new();
    TABLE.get_or_init(RwLock::default)
}

/// Makes `choice` that of `site` from now on.
pub fn install(site: Site, choice: Choice) {
    table().write().insert(site, choice);
}

/// Forgets every choice.
pub fn forget() {
    table().write().clear();
}

/// What was installed for `site`.
pub fn installed(site: &Site) -> Option<Choice> {
    table().read().get(site).copied()
}

/// A convolution that a form was chosen for.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    /// The convolution.
    pub conv: Conv,
    /// Type of its input.
    pub dtype: DType,
    /// Type of its weight.
    pub weight: DType,
}

thread_local! {
    static OBSERVED: RefCell<Option<Vec<Observed>>> = const { RefCell::new(None) };
}

/// The convolutions that forms are chosen for, by this thread, while `f` runs.
pub fn observe<T>(f: impl FnOnce() -> T) -> (T, Vec<Observed>) {
    /// Stops observing also where `f` panics.
    struct Observing;
    impl Drop for Observing {
        fn drop(&mut self) {
            OBSERVED.set(None);
        }
    }
    OBSERVED.set(Some(Vec::new()));
    let _observing = Observing;
    let result = f();
    (result, OBSERVED.take().unwrap_or_default())
}

/// The measured choice for this convolution, which is noted if this thread observes.
pub(super) fn find(conv: &Conv, dtype: DType, weight: DType, keep: Keep) -> Option<Algorithm> {
    OBSERVED.with_borrow_mut(|observed| {
        if let Some(list) = observed {
            list.push(Observed { conv: *conv, dtype, weight });
        }
    });
    let choice = installed(&Site::of(conv, dtype, weight))?;
    let algorithm = if keep == Keep::Packed { choice.packed } else { choice.per_call };
    algorithm.applies(conv).then_some(algorithm)
}

/// One timed run of one form.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Trial {
    /// Time of the convolution.
    pub run: Duration,
    /// Time of packing its weight.
    pub pack: Duration,
    /// Distance of the result from the direct form's, relative to its norm; 0 where they were not compared.
    pub error: f64,
}

/// The largest error that a form may have: that of its arithmetic, with a margin for the direct form's own rounding.
pub fn tolerance(dtype: DType, weight: DType) -> f64 {
    // F(4x4) is off by 3e-6 in f32; for 16-bit operands the direct form may round products to their type.
    match (dtype, weight) {
        (DType::BF16, _) | (_, DType::BF16) => 1e-2,
        (DType::F16, _) | (_, DType::F16) => 1e-3,
        _ => 2e-5,
    }
}

/// Bytes of panels that are packed, and then used, at a time, for each thread: they stay in the caches of the threads that share
/// them, those of threads with 2 MiB of L2 mostly in the next one. There wider chunks count for more: products of AMX in parts,
/// whose panels are half as large again, take 0.81 to 0.96 of the time that they take with 2 MiB (1024 rows, 640 to 2560 terms),
/// bf16 0.9 to 1.0.
const CHUNK_BYTES: usize = 2 << 20;
const LARGE_CHUNK_BYTES: usize = 6 << 20;
const LARGE_L2: usize = 2 << 20;
/// Chunks are multiples of this many columns: whole panels of every kernel. So many are compared at a time.
const CHUNK_STEP: usize = 64;

/// Of `columns` whose panels take `bytes`: as many as take about `most`.
pub fn chunk_columns(columns: usize, bytes: usize, most: usize) -> usize {
    columns.div_ceil(bytes.div_ceil(most).max(1)).next_multiple_of(CHUNK_STEP).min(columns).max(1)
}

/// Columns whose panels the direct form packs at a time, where `most_bytes` are packed at a time.
pub fn columns_at_once(of: &Observed, isa: Isa, most_bytes: usize) -> usize {
    let columns = of.conv.out_channels;
    match of.conv.groups {
        1 => chunk_columns(columns, of.conv.packed_bytes_for(of.dtype, of.weight, isa), most_bytes),
        _ => columns,
    }
}

/// Bytes that runs pack at a time, where memory is not short.
pub fn most_bytes() -> usize {
    for_all_threads(if features().l2_bytes < LARGE_L2 { CHUNK_BYTES } else { LARGE_CHUNK_BYTES })
}

/// As many bytes for each thread; one alone gets those of two.
pub fn for_all_threads(bytes: usize) -> usize {
    bytes * Pool::global().threads().max(2)
}

/// Bytes between the parts of the lent memory.
const ALIGN: usize = 4096;

/// Bytes of memory that [`measure`] needs that packs so much at a time, what it compares with included, and a weight where none is
/// given.
pub fn memory_bytes(of: &Observed, algorithm: Algorithm, isa: Isa, is_given: bool, most_bytes: usize) -> usize {
    parts(of, algorithm, isa, is_given, most_bytes).iter().map(|b| b.next_multiple_of(ALIGN)).sum()
}

/// Input, weight, panels or memory to work in, result, some columns of the direct form's result.
fn parts(of: &Observed, algorithm: Algorithm, isa: Isa, is_given: bool, most_bytes: usize) -> [usize; 5] {
    let conv = dense(&of.conv);
    let chunk = Conv { out_channels: columns_at_once(of, isa, most_bytes), ..conv };
    let pixels = conv.batch * conv.input.iter().product::<usize>();
    let packed = chunk.packed_bytes(of.weight, isa).max(chunk.packed_bytes_for(of.dtype, of.weight, isa));
    let packed = packed.max(work_bytes(&conv, algorithm, isa, Room::Ample));
    let weight = if is_given { 0 } else { conv.out_channels * conv.terms() * of.weight.size_bytes() };
    let result = |columns: usize| conv.rows() * columns * 4;
    [
        pixels * conv.in_channels * of.dtype.size_bytes(),
        weight,
        packed,
        result(conv.out_channels),
        result(CHUNK_STEP.min(conv.out_channels)),
    ]
}

/// The same convolution over an image that lies in one piece.
fn dense(conv: &Conv) -> Conv {
    let [depth, height, width] = conv.input;
    let channels = conv.in_channels as isize;
    let row = width as isize * channels;
    let plane = height as isize * row;
    Conv { strides: [depth as isize * plane, plane, row, channels], ..*conv }
}

/// Times one form, on numbers that are others each time; with `is_compared` its result is compared with the direct one's. The
/// direct form packs a few columns at a time, `most_bytes` of them as runs do that keep no panels, or while it multiplies where they
/// do that. The weight is the `given` one, or as random as the input.
///
/// # Errors
/// [`KernelError`] if a form does not apply, or scratch memory runs out.
///
/// # Safety
/// `memory` must be writable for [`memory_bytes`] with the same `most_bytes`, and nobody else's meanwhile; a given weight must be
/// valid for the sizes and of the type of the convolution that was observed.
#[allow(clippy::too_many_arguments)]
pub unsafe fn measure(
    pool: &Pool,
    isa: Isa,
    of: &Observed,
    algorithm: Algorithm,
    is_compared: bool,
    given: Option<Weight>,
    most_bytes: usize,
    memory: *mut u8,
) -> Result<Trial, KernelError> {
    static TRIALS: AtomicU32 = AtomicU32::new(0);
    let conv = dense(&of.conv);
    let sizes = parts(of, algorithm, isa, given.is_some(), most_bytes);
    let mut at = [memory; 5];
    for i in 1..5 {
        at[i] = at[i - 1].wrapping_add(sizes[i - 1].next_multiple_of(ALIGN));
    }
    let [x, raw, packed, out, expected] = at;
    let seed = 2 * TRIALS.fetch_add(1, Relaxed);
    // SAFETY: the parts lie behind each other in the lent memory.
    unsafe {
        fill(pool, x, sizes[0], of.dtype, seed);
        fill(pool, raw, sizes[1], of.weight, seed + 1);
    }
    let [depth, height, width] = conv.kernel.map(|k| k as isize);
    let taps = depth * height * width;
    let terms = conv.terms() as isize;
    let random = Weight { ptr: raw, dtype: of.weight, strides: [terms, taps, height * width, width, 1] };
    let weight = given.unwrap_or(random);
    // The weight of the columns from `first` on.
    let from = |first: usize| {
        let bytes = first as isize * weight.strides[0] * of.weight.size_bytes() as isize;
        Weight { ptr: weight.ptr.wrapping_offset(bytes), ..weight }
    };
    let columns = conv.out_channels as isize;
    let at_once = columns_at_once(of, isa, most_bytes);
    let once = || -> Result<(Duration, Duration), KernelError> {
        let store = |first: usize| StoreEpilogue::new(out.wrapping_add(first * 4), DType::F32, columns);
        let (mut running, mut packing) = (Duration::ZERO, Duration::ZERO);
        if algorithm != Algorithm::Direct {
            let start = Instant::now();
            let work = Work { ptr: packed, room: Room::Ample };
            // SAFETY: every part has the size that the convolution needs, `out` holds all results in f32.
            unsafe {
                conv_winograd(
                    pool,
                    isa,
                    &conv,
                    (x.cast_const(), of.dtype).into(),
                    &weight,
                    algorithm.tile(),
                    work,
                    &store(0),
                )?
            };
            return Ok((start.elapsed(), packing));
        }
        let chunks = (0..conv.out_channels).step_by(at_once).map(|first| {
            let chunk = Conv { out_channels: at_once.min(conv.out_channels - first), ..conv };
            (first, chunk, from(first))
        });
        for (first, chunk, source) in chunks.clone() {
            let start = Instant::now();
            // SAFETY: as above; the panels of as many columns as a chunk has fit where they are packed.
            unsafe {
                let panels = pack_conv_weight(pool, isa, &chunk, &source, packed);
                packing += start.elapsed();
                let start = Instant::now();
                super::conv::conv(pool, isa, &chunk, x, of.dtype, &panels, &store(first))?;
                running += start.elapsed();
            }
        }
        // A run that keeps no panels may have a way of its own.
        let start = Instant::now();
        if packs_while_used(isa, &conv, of.dtype, of.weight, pool.threads()) {
            // SAFETY: as above.
            unsafe { conv_unpacked(pool, isa, &conv, x, of.dtype, &weight, &store(0))? };
            packing = start.elapsed().saturating_sub(running);
        } else if packs_in_parts(isa, &conv, of.dtype, of.weight) {
            for (first, chunk, source) in chunks {
                // SAFETY: as above.
                unsafe {
                    let panels = pack_conv_weight_for(pool, isa, &chunk, of.dtype, &source, packed)?;
                    super::conv::conv(pool, isa, &chunk, x, of.dtype, &panels, &store(first))?;
                }
            }
            packing = start.elapsed().saturating_sub(running);
        }
        Ok((running, packing))
    };
    let (run, pack) = once()?;
    if !is_compared || algorithm == Algorithm::Direct {
        return Ok(Trial { run, pack, error: 0.0 });
    }
    let (mut distance, mut norm) = (0f64, 0f64);
    for first in (0..conv.out_channels).step_by(CHUNK_STEP) {
        let chunk = Conv { out_channels: CHUNK_STEP.min(conv.out_channels - first), ..conv };
        let store = StoreEpilogue::new(expected, DType::F32, chunk.out_channels as isize);
        // SAFETY: as above; where panels are packed all of them fit, or at least as many columns.
        unsafe {
            let panels = pack_conv_weight(pool, isa, &chunk, &from(first), packed);
            super::conv::conv(pool, isa, &chunk, x, of.dtype, &panels, &store)?;
        }
        for row in 0..conv.rows() {
            let (got, want) = (row * conv.out_channels + first, row * chunk.out_channels);
            for column in 0..chunk.out_channels {
                // SAFETY: both results were written in full, as f32.
                let (a, b) =
                    unsafe { (*out.cast::<f32>().add(got + column), *expected.cast::<f32>().add(want + column)) };
                distance += f64::from(a - b).powi(2);
                norm += f64::from(b).powi(2);
            }
        }
    }
    Ok(Trial { run, pack, error: (distance / norm.max(f64::MIN_POSITIVE)).sqrt() })
}

/// Numbers that a task of [`fill`] writes.
const FILLED: usize = 1 << 16;

/// Numbers between -1 and 1, the same for the same seed.
///
/// # Safety
/// `to` must be writable for `bytes`, and aligned for `dtype`.
unsafe fn fill(pool: &Pool, to: *mut u8, bytes: usize, dtype: DType, seed: u32) {
    let count = bytes / dtype.size_bytes();
    let to = SendMut(to);
    pool.run(count.div_ceil(FILLED), |task, _| {
        let mut state = seed ^ (task as u32).wrapping_mul(0x9e37_79b9);
        let mut next = move || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        for i in task * FILLED..((task + 1) * FILLED).min(count) {
            // SAFETY: `count` elements of the type fit into `bytes`; tasks write disjoint ones.
            unsafe {
                match dtype {
                    DType::F16 => to.get().cast::<f16>().add(i).write(f16::from_f32(next())),
                    DType::BF16 => to.get().cast::<bf16>().add(i).write(bf16::from_f32(next())),
                    _ => to.get().cast::<f32>().add(i).write(next()),
                }
            }
        }
    });
}
