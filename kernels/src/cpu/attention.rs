//! Scaled dot-product attention: `softmax(scale * Q K^T + mask) V`, with no score matrix in memory.
//!
//! Queries lie along vectors: a group of them (a panel of the matrix products' micro-kernels) against every key is
//! exactly such a product, keys as rows that are read where they lie, and so is the sum of values, columns of V as rows. So
//! no head size leaves lanes empty, a query's maximum and sum are a lane of a vector, and nothing is added across lanes.
//! Values of a few heads at a time are transposed into shared scratch memory, beside keys that cannot be read in place (of
//! another type, with gaps, or with rows that share sets of the caches). Then every
//! task takes a block of queries, group by group, and walks the keys in blocks; the online softmax turns scores into weights
//! and keeps a running maximum and sum per query.
//!
//! ```text
//!   K block           Q group                         V block             weights
//!   [key][dim]   x   [dim][query]  = scores  ->   [column][key]   x   [key][query]   += results [column][query]
//!   L2, in place      L1              L1 (24 KB)     L2                   L1               L2
//! ```
//!
//! One or two queries are not worth a group: [`attention_few`](super::attention_few) reads keys and values once for each, in
//! f32.
//!
//! Where bf16 pairs multiply fast (`TDPBF16PS`, `VDPBF16PS`) and all operands are bf16, K, V and the weights stay bf16:
//! products are exact, sums f32, weights relative to the running maximum are rounded to bf16 as in PyTorch's kernel, and the
//! scale multiplies the scores.
//!
//! Numerics otherwise: everything in f32; the scale and log2(e) are folded into Q, exponentials are powers of two accurate to
//! 2e-7. A query with nothing to attend to gives zeros, as PyTorch 2.5 and later do. NaN in a query or key makes NaN.
//!
//! Measured, one Zen 5 core in turns with PyTorch 2.11, useful GFLOP/s of AVX-512 in f32, in bf16 (multiply-adds reach 264 and
//! 528), and processor time over PyTorch's: 8 heads 4096x4096 d40 217, 391 (0.36, 0.19); 4096x77 d40 125, 217 (0.38, 0.21);
//! 1024x1024 d80 219, 400 (0.42, 0.22); 4096x4096 d512 221, 420 (0.46, 0.25). f16 takes as long as f32.

use super::KernelError;
use super::attention_few::{FEW_QUERIES, few_queries};
use super::attention_kernel::{self as kernel, Packing};
use super::copy::Shared;
use super::gemm_kernel::Kernel;
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::{OutOfMemory, Pool};

/// Most keys of a block; their scores for a group of queries take 24 KB at most.
pub(super) const BLOCK_KEYS: usize = 192;

/// A four-dimensional operand `[batch, head, position, dim]`; strides in elements, any of them 0 or negative.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// First element.
    pub ptr: *mut u8,
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Strides of batch, head, position and dim.
    pub strides: [isize; 4],
}

/// What is added to the scores, `[batch, head, query, key]`; strides in elements, 0 broadcasts.
#[derive(Clone, Copy, Debug)]
pub struct Mask {
    /// First element.
    pub ptr: *const u8,
    /// Bool (true attends) or F32, F16, BF16 (added).
    pub dtype: DType,
    /// Strides of batch, head, query and key.
    pub strides: [isize; 4],
}

/// Sizes and operands of an attention.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Batch size.
    pub batch: usize,
    /// Heads of queries and results.
    pub heads: usize,
    /// Heads of keys and values: a divisor of `heads`; query head `h` attends to head `h / (heads / kv_heads)`.
    pub kv_heads: usize,
    /// Queries.
    pub seq_q: usize,
    /// Keys.
    pub seq_k: usize,
    /// Size of queries and keys.
    pub dim: usize,
    /// Size of values and results.
    pub dim_v: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Whether query `i` sees keys `0..=i` only.
    pub causal: bool,
    /// Queries.
    pub q: Heads,
    /// Keys.
    pub k: Heads,
    /// Values.
    pub v: Heads,
    /// Mask, if there is one.
    pub mask: Option<Mask>,
    /// Results.
    pub out: Heads,
}

/// Most elements of a query.
pub const MAX_DIM: usize = 512;

// SAFETY: the pointers are only followed by `attention`, whose caller vouches for the memory.
unsafe impl Sync for Attention {}

impl Attention {
    fn check(&self) -> Result<(), KernelError> {
        for heads in [&self.q, &self.k, &self.v, &self.out] {
            if !matches!(heads.dtype, DType::F32 | DType::F16 | DType::BF16) {
                return Err(KernelError::UnsupportedDType(heads.dtype));
            }
        }
        if let Some(mask) = self.mask
            && !matches!(mask.dtype, DType::F32 | DType::F16 | DType::BF16 | DType::Bool)
        {
            return Err(KernelError::UnsupportedDType(mask.dtype));
        }
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(KernelError::Shape("query heads are not a multiple of key heads"));
        }
        if self.dim > MAX_DIM || self.dim_v > MAX_DIM {
            return Err(KernelError::Shape("head size above 512"));
        }
        Ok(())
    }

    fn is_empty(&self) -> bool {
        self.batch * self.heads * self.seq_q * self.dim_v == 0
    }
}

/// Bytes of packed keys and values held at a time per thread, as far as whole heads allow: half of an L2.
const PACKED_BYTES: usize = 2 << 20;

/// Where packed heads begin.
const SCRATCH_ALIGN: usize = 64;

/// Key-value heads packed together.
fn heads_together(pool: &Pool, a: &Attention, packing: &Packing) -> usize {
    let cap = PACKED_BYTES * pool.threads();
    (cap / packing.bytes().max(1)).clamp(1, (a.batch * a.kv_heads).max(1))
}

/// Bytes of scratch memory [`attention_in`] needs.
pub fn scratch_bytes(pool: &Pool, isa: Isa, a: &Attention) -> usize {
    scratch_bytes_of(kernel::best_kernel(isa, a), pool, a)
}

/// [`scratch_bytes`] for a given kernel of products.
pub(crate) fn scratch_bytes_of(products: &'static Kernel, pool: &Pool, a: &Attention) -> usize {
    if a.is_empty() || a.seq_q <= FEW_QUERIES {
        return 0;
    }
    let packing = Packing::new(products, a);
    heads_together(pool, a, &packing) * packing.bytes() + SCRATCH_ALIGN
}

/// Computes attention, allocating its scratch memory.
///
/// # Errors
/// For element types, head counts or head sizes that are not supported, and if memory runs out.
///
/// # Safety
/// The operands must be valid for the sizes; results must not overlap anything else.
pub unsafe fn attention(pool: &Pool, isa: Isa, a: &Attention) -> Result<(), KernelError> {
    let bytes = scratch_bytes(pool, isa, a);
    let mut scratch: Vec<u8> = Vec::new();
    scratch.try_reserve_exact(bytes).map_err(|_| OutOfMemory { bytes })?;
    // SAFETY: the caller's promise; the capacity is what was asked for.
    unsafe { attention_in(pool, isa, a, (scratch.as_mut_ptr(), bytes)) }
}

/// Computes attention in scratch memory of so many bytes. As many as [`scratch_bytes`] said at some time do, whatever number of
/// threads the pool has by now.
///
/// # Errors
/// For element types, head counts or head sizes that are not supported, if there is room for no head, and if per-thread memory
/// runs out.
///
/// # Safety
/// As for [`attention`]; `scratch` must be valid for writes.
pub unsafe fn attention_in(pool: &Pool, isa: Isa, a: &Attention, scratch: (*mut u8, usize)) -> Result<(), KernelError> {
    // SAFETY: forwarded.
    unsafe { attention_with(kernel::best_kernel(isa, a), pool, isa, a, scratch) }
}

/// [`attention_in`] with a given kernel of products, which must be available and fit the operands.
///
/// # Safety
/// As for [`attention_in`].
pub(crate) unsafe fn attention_with(
    products: &'static Kernel,
    pool: &Pool,
    isa: Isa,
    a: &Attention,
    (scratch, bytes): (*mut u8, usize),
) -> Result<(), KernelError> {
    a.check()?;
    if a.is_empty() {
        return Ok(());
    }
    let isa = isa.clamp();
    if a.seq_q <= FEW_QUERIES {
        // SAFETY: forwarded.
        return Ok(unsafe { few_queries(pool, isa, a) }?);
    }
    let packing = Packing::new(products, a);
    // Of the memory, not of the pool, which may have other threads than when that was measured out.
    let room = bytes.saturating_sub(SCRATCH_ALIGN).checked_div(packing.bytes()).unwrap_or(usize::MAX);
    let together = heads_together(pool, a, &packing).min(room);
    if together == 0 {
        return Err(OutOfMemory { bytes: packing.bytes() + SCRATCH_ALIGN }.into());
    }
    let packed = Shared(scratch.wrapping_add(scratch.align_offset(SCRATCH_ALIGN)));
    let (units, per_kv) = (a.batch * a.kv_heads, a.heads / a.kv_heads);
    let rows = block_rows(pool, a, &packing, together.min(units) * per_kv);
    let blocks = a.seq_q.div_ceil(rows);
    for first in (0..units).step_by(together) {
        let here = together.min(units - first);
        // Blocks of keys are packed in parallel.
        let piece = packing.block();
        let pieces = a.seq_k.div_ceil(piece);
        pool.run(here * pieces, |task, _| {
            let (unit, from) = (task / pieces, task % pieces * piece);
            let at = packed.at((unit * packing.bytes()) as isize).cast();
            // SAFETY: keys of one head; pieces pack into disjoint parts of its memory.
            unsafe { kernel::pack(isa, a, &packing, first + unit, from, a.seq_k.min(from + piece), at) };
        });
        pool.run_scratch(here * per_kv * blocks, kernel::task_bytes(&packing, rows), |task, worker| {
            let (block, rest) = (task % blocks, task / blocks);
            let (unit, h) = (rest / per_kv, rest % per_kv);
            let at = packed.at((unit * packing.bytes()) as isize).cast();
            let q0 = block * rows;
            let task = kernel::Task {
                batch: (first + unit) / a.kv_heads,
                head: (first + unit) % a.kv_heads * per_kv + h,
                q0,
                rows: rows.min(a.seq_q - q0),
                packed: at,
                scratch: worker.scratch.cast(),
            };
            // SAFETY: queries of one head; blocks are disjoint; the head was packed above.
            unsafe { kernel::run(isa, a, &packing, &task) };
        })?;
    }
    Ok(())
}

/// Queries of a task: as many as keep Q and the results in L2, fewer if the threads would run out of tasks.
fn block_rows(pool: &Pool, a: &Attention, packing: &Packing, heads: usize) -> usize {
    let most = (400 << 10) / (packing.terms() + a.dim_v).max(1) / 4;
    let fair = (a.seq_q * heads).div_ceil(pool.threads() * 4);
    most.min(192).min(fair).next_multiple_of(packing.group())
}

/// The meaning of [`attention`]: f64 loops over one query at a time.
///
/// # Safety
/// As for [`attention`].
pub unsafe fn attention_reference(a: &Attention) {
    use super::tile_exec_ops::{load_scalar, store_scalar};
    let get = |h: &Heads, i: [usize; 4]| {
        let at: isize = (0..4).map(|d| i[d] as isize * h.strides[d]).sum();
        // SAFETY: the caller's promise.
        unsafe { load_scalar(h.dtype, h.ptr.wrapping_offset(at * h.dtype.size_bytes() as isize)) as f64 }
    };
    for (b, h, i) in
        (0..a.batch * a.heads * a.seq_q).map(|n| (n / a.seq_q / a.heads, n / a.seq_q % a.heads, n % a.seq_q))
    {
        let kv = h / (a.heads / a.kv_heads);
        let scores: Vec<f64> = (0..a.seq_k)
            .map(|j| {
                let dot: f64 = (0..a.dim).map(|d| get(&a.q, [b, h, i, d]) * get(&a.k, [b, kv, j, d])).sum();
                let bias = match a.mask {
                    None => 0.0,
                    Some(m) => {
                        let at: isize = [b, h, i, j].iter().zip(m.strides).map(|(&x, s)| x as isize * s).sum();
                        // SAFETY: the caller's promise.
                        let x =
                            unsafe { load_scalar(m.dtype, m.ptr.wrapping_offset(at * m.dtype.size_bytes() as isize)) };
                        if m.dtype != DType::Bool {
                            x as f64
                        } else if x != 0.0 {
                            0.0
                        } else {
                            f64::NEG_INFINITY
                        }
                    }
                };
                if a.causal && j > i { f64::NEG_INFINITY } else { dot * a.scale as f64 + bias }
            })
            .collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let top = if top == f64::NEG_INFINITY { 0.0 } else { top };
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for d in 0..a.dim_v {
            let x: f64 = weights.iter().enumerate().map(|(j, w)| w * get(&a.v, [b, kv, j, d])).sum();
            let at: isize = [b, h, i, d].iter().zip(a.out.strides).map(|(&x, s)| x as isize * s).sum();
            let p = a.out.ptr.wrapping_offset(at * a.out.dtype.size_bytes() as isize);
            // SAFETY: the caller's promise.
            unsafe { store_scalar(a.out.dtype, p, if sum == 0.0 { 0.0 } else { (x / sum) as f32 }) };
        }
    }
}
