//! Linear layers and matrix products.

use oxidiff_kernels::cpu::gemm::{BatchDim, Operand as GemmOperand, batched_gemm, gemm, packs_while_used};
use oxidiff_kernels::cpu::gemm_swapped::{gemm_swapped, is_swapped_faster, swapped_bytes};
use oxidiff_kernels::cpu::pack::{Matrix, PackedB, pack_b, pack_b_for, packed_bytes_for};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::epilogue::Epilogue;

use super::epilogue::{EpilogueArgs, Shifted};
use super::kernel_error;
use super::packing::{Candidate, Chunks, linear_candidates, most_work_bytes};
use super::run::{Call, Ctx, Slot, whole_parameter};
use super::specialize::{Maker, Operand};
use crate::backend::KeptForm;
use crate::backend::tensor::{Memory, SystemMemory};
use crate::codegen::tile::kernel_type;
use crate::plan::ConcreteAccess;
use crate::{Error, Result};

/// The element type of an operand that a product reads.
pub(super) fn float_type(maker: &Maker<'_>, operand: &Operand) -> Result<KernelType> {
    match kernel_type(operand.access.dtype) {
        Some(dtype @ (KernelType::F32 | KernelType::F16 | KernelType::BF16)) => Ok(dtype),
        _ => maker.refuse(format!("no kernel multiplies {}", operand.access.dtype)),
    }
}

/// A matrix without its address.
#[derive(Clone, Copy)]
struct Shape {
    slot: Slot,
    dtype: KernelType,
    row_stride: isize,
    col_stride: isize,
}

impl Shape {
    fn at(&self, ctx: &Ctx<'_>, elements: isize) -> Matrix {
        let ptr = ctx.at(self.slot).wrapping_offset(elements * self.dtype.size_bytes() as isize);
        Matrix { ptr, dtype: self.dtype, row_stride: self.row_stride, col_stride: self.col_stride }
    }
}

struct LinearCall {
    /// Products one after the other, and elements of x between them.
    outer: usize,
    outer_stride: isize,
    sizes: (usize, usize, usize),
    x: Shape,
    weight: Shape,
    kept: Kept,
    /// The weight slot, if the weight is the whole of one: its strides are the tensor's own.
    slot: Option<usize>,
    epilogue: EpilogueArgs,
}

/// How the weight reaches the kernel.
enum Kept {
    /// Packed, with the weight set.
    Pack(KeptForm),
    /// In the arena, packed anew by every run, chunk by chunk.
    Scratch(Slot, Chunks),
    /// As it lies, and x packed in the arena instead.
    Swapped(Slot),
    /// As it lies: few rows read it so, some more pack its panels in the kernel.
    No,
}

/// Rows and columns of a linear step.
struct Linear {
    outer: usize,
    outer_stride: isize,
    sizes: (usize, usize, usize),
    row_stride: isize,
}

impl Linear {
    fn of(maker: &Maker<'_>, x: &ConcreteAccess, weight: &ConcreteAccess) -> Result<Self> {
        let (rank, n, k) = (x.shape.len(), weight.shape[0], weight.shape[1]);
        // All rows with one stride, or those of each index of the first dimension.
        let (outer, outer_stride, (m, row_stride)) = match (x.collapse(0, rank - 1), rank) {
            (Some(rows), _) => (1, 0, rows),
            (None, 2..) => match x.collapse(1, rank - 1) {
                Some(rows) => (x.shape[0], x.strides[0], rows),
                None => return maker.refuse("rows that no stride walks"),
            },
            (None, _) => return maker.refuse("rows that no stride walks"),
        };
        Ok(Self { outer, outer_stride, sizes: (m, n, k), row_stride })
    }
}

/// What the step could keep between runs.
pub(super) fn candidates(maker: &Maker<'_>) -> Result<Vec<Candidate>> {
    let operands = maker.operands()?;
    let ([x, weight], Some(pack)) = (operands.as_slice(), maker.step.pack) else { return Ok(Vec::new()) };
    let Linear { outer, sizes: (m, n, k), .. } = Linear::of(maker, &x.access, &weight.access)?;
    let dtype = float_type(maker, weight)?;
    let is_swapped = is_swapped(maker, (m, n, k), float_type(maker, x)?, dtype, &weight.access.strides);
    let candidate = linear_candidates(pack, outer * m, n, k, dtype, maker.isa());
    Ok(match is_swapped {
        false => vec![candidate],
        true if m <= SWAPPED_ROWS => Vec::new(),
        // Only the packing of the rows is saved.
        true => vec![Candidate { gain: candidate.gain * (m as f64 / n as f64).min(1.0), ..candidate }],
    })
}

/// Rows up to which a product whose operands change places takes no longer than one whose weight is kept packed. Measured on
/// Zen 5: with 64 rows 0.94 of the time, with 128 up to 1.1.
const SWAPPED_ROWS: usize = 64;

/// Whether a product's operands change places: the weight is not packed, but x, in [`most_work_bytes`] at most.
fn is_swapped(
    maker: &Maker<'_>,
    (m, n, k): (usize, usize, usize),
    x: KernelType,
    weight: KernelType,
    strides: &[isize],
) -> bool {
    let matrix = Matrix { ptr: std::ptr::null(), dtype: weight, row_stride: strides[0], col_stride: strides[1] };
    swapped_bytes(m, k, x, maker.isa()) <= most_work_bytes(maker)
        && is_swapped_faster(maker.isa(), (m, n, k), x, &matrix)
}

pub(super) fn make_linear(maker: &mut Maker<'_>) -> Result<Box<dyn Call>> {
    let operands = maker.operands()?;
    let [x, weight] = operands.as_slice() else { return maker.refuse("a linear step has two operands") };
    let Linear { outer, outer_stride, sizes: (m, n, k), row_stride } = Linear::of(maker, &x.access, &weight.access)?;
    let rank = x.access.shape.len();
    let (_, columns) = x.access.collapse(rank - 1, rank).unwrap_or((1, 1));
    let x = Shape { slot: x.slot, dtype: float_type(maker, x)?, row_stride, col_stride: columns };
    let strides = &weight.access.strides;
    let weight =
        Shape { slot: weight.slot, dtype: float_type(maker, weight)?, row_stride: strides[0], col_stride: strides[1] };
    let slot = whole_parameter(maker.plan(), &maker.step.operands[1]);
    let work = swapped_bytes(m, k, x.dtype, maker.isa());
    let is_swapped = is_swapped(maker, (m, n, k), x.dtype, weight.dtype, &strides[..]);
    let kept = match (maker.keeps.of(maker.at), maker.step.pack) {
        (Some(kept), _) => Kept::Pack(kept),
        (None, _) if is_swapped && !maker.preparing => Kept::Swapped(maker.scratch(work, "packed rows")),
        (None, Some(_)) if !packs_while_used(maker.isa(), outer * m) && !maker.preparing => {
            let bytes = |columns| packed_bytes_for(maker.isa(), (m, columns, k), x.dtype, weight.dtype);
            let chunks = Chunks::of_panels(maker, n, bytes(n));
            let bytes = bytes(chunks.step);
            Kept::Scratch(maker.scratch(bytes, "packed weight"), chunks)
        }
        _ => Kept::No,
    };
    let epilogue = EpilogueArgs::new(maker)?;
    Ok(Box::new(LinearCall { outer, outer_stride, sizes: (m, n, k), x, weight, kept, slot, epilogue }))
}

impl LinearCall {
    fn source(&self, ctx: &Ctx<'_>) -> Matrix {
        let matrix = self.weight.at(ctx, 0);
        match self.slot.and_then(|slot| ctx.weights.tensor(slot)).map(|t| (t.ptr, t.strides.as_slice())) {
            Some((ptr, &[row, col])) => Matrix { ptr, row_stride: row as isize, col_stride: col as isize, ..matrix },
            _ => matrix,
        }
    }

    /// Columns `first..first + count` of the product.
    ///
    /// # Safety
    /// As [`Call::run`]; `weight` must hold these columns.
    unsafe fn multiply(
        &self,
        ctx: &Ctx<'_>,
        weight: &GemmOperand,
        (first, count): (usize, usize),
        epilogue: &dyn Epilogue,
    ) -> Result<()> {
        let (m, _, k) = self.sizes;
        for z in 0..self.outer {
            let x = self.x.at(ctx, z as isize * self.outer_stride);
            let shifted = Shifted { inner: epilogue, rows: z * m, cols: first };
            let epilogue = if z == 0 && first == 0 { epilogue } else { &shifted };
            // SAFETY: forwarded.
            unsafe { gemm(ctx.pool, ctx.isa, m, count, k, &x, weight, epilogue).map_err(kernel_error)? };
        }
        Ok(())
    }
}

impl LinearCall {
    /// The product with x packed in `work`.
    ///
    /// # Safety
    /// As [`Call::run`].
    unsafe fn multiply_swapped(
        &self,
        ctx: &Ctx<'_>,
        weight: &Matrix,
        work: Slot,
        epilogue: &dyn Epilogue,
    ) -> Result<()> {
        for z in 0..self.outer {
            let x = self.x.at(ctx, z as isize * self.outer_stride);
            let shifted = Shifted { inner: epilogue, rows: z * self.sizes.0, cols: 0 };
            // SAFETY: forwarded; the scratch memory has the size asked for.
            unsafe {
                gemm_swapped(ctx.pool, ctx.isa, self.sizes, &x, weight, ctx.at(work), &shifted)
                    .map_err(kernel_error)?;
            }
        }
        Ok(())
    }
}

impl Call for LinearCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (_, n, k) = self.sizes;
        let source = self.source(ctx);
        self.epilogue.with(ctx, |epilogue| {
            // SAFETY: operands are valid by the caller's promise for the sizes of the step; blocks and scratch memory have
            // the packed sizes.
            unsafe {
                match self.kept {
                    Kept::No => self.multiply(ctx, &GemmOperand::Strided(source), (0, n), epilogue),
                    Kept::Swapped(work) if source.col_stride == 1 => {
                        self.multiply_swapped(ctx, &source, work, epilogue)
                    }
                    // The parameter's tensor lies otherwise than a plan expects.
                    Kept::Swapped(_) => self.multiply(ctx, &GemmOperand::Strided(source), (0, n), epilogue),
                    Kept::Scratch(scratch, chunks) => chunks.iter().try_for_each(|(first, count)| {
                        let from = first as isize * source.row_stride * source.dtype.size_bytes() as isize;
                        let chunk = Matrix { ptr: source.ptr.wrapping_offset(from), ..source };
                        let sizes = (self.sizes.0, count, k);
                        let packed = pack_b_for(ctx.pool, ctx.isa, sizes, self.x.dtype, &chunk, ctx.at(scratch));
                        self.multiply(ctx, &GemmOperand::Packed(packed), (first, count), epilogue)
                    }),
                    Kept::Pack(kept) => {
                        let packed = ctx.weights.pack(kept.pack, &mut || {
                            let block = SystemMemory.allocate(kept.bytes, "a packed weight")?;
                            pack_b(ctx.pool, ctx.isa, n, k, &source, block.ptr());
                            Ok(block)
                        });
                        match packed {
                            Ok(form) => {
                                let packed = PackedB::from_raw(form.ptr(), n, k, source.dtype, ctx.isa);
                                self.multiply(ctx, &GemmOperand::Packed(packed), (0, n), epilogue)
                            }
                            // Slower without, but not impossible.
                            Err(Error::OutOfMemory { .. }) => {
                                self.multiply(ctx, &GemmOperand::Strided(source), (0, n), epilogue)
                            }
                            Err(error) => Err(error),
                        }
                    }
                }
            }
        })
    }
}

struct MatmulCall {
    batch: Vec<BatchDim>,
    sizes: (usize, usize, usize),
    a: Shape,
    b: Shape,
    epilogue: EpilogueArgs,
}

pub(super) fn make_matmul(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let operands = maker.operands()?;
    let [a, b] = operands.as_slice() else { return maker.refuse("a product has two operands") };
    let (ra, rb) = (a.access.shape.len(), b.access.shape.len());
    if ra < 2 || rb < 2 {
        return maker.refuse("a product of vectors");
    }
    let rank = ra.max(rb);
    let batch = (0..rank - 2)
        .map(|d| {
            let at = |o: &Operand, r: usize| match (d + r).checked_sub(rank) {
                Some(own) => (o.access.shape[own], if o.access.shape[own] == 1 { 0 } else { o.access.strides[own] }),
                None => (1, 0),
            };
            let ((size_a, a_stride), (size_b, b_stride)) = (at(a, ra), at(b, rb));
            BatchDim { size: if size_a == 1 { size_b } else { size_a }, a_stride, b_stride }
        })
        .collect();
    let (m, k, n) = (a.access.shape[ra - 2], a.access.shape[ra - 1], b.access.shape[rb - 1]);
    let matrix = |o: &Operand, rows: usize, cols: usize| -> Result<Shape> {
        let strides = &o.access.strides;
        Ok(Shape { slot: o.slot, dtype: float_type(maker, o)?, row_stride: strides[rows], col_stride: strides[cols] })
    };
    Ok(Box::new(MatmulCall {
        batch,
        sizes: (m, n, k),
        a: matrix(a, ra - 2, ra - 1)?,
        // Rows of the kernel's second operand are output columns.
        b: matrix(b, rb - 1, rb - 2)?,
        epilogue: EpilogueArgs::new(maker)?,
    }))
}

impl Call for MatmulCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (m, n, k) = self.sizes;
        let (a, b) = (self.a.at(ctx, 0), self.b.at(ctx, 0));
        self.epilogue.with(ctx, |epilogue| {
            // SAFETY: operands are valid by the caller's promise for the sizes of the step.
            unsafe { batched_gemm(ctx.pool, ctx.isa, &self.batch, m, n, k, &a, &b, epilogue).map_err(kernel_error) }
        })
    }
}
