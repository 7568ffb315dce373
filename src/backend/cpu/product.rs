//! Linear layers and matrix products.

use oxidiff_kernels::cpu::gemm::{BatchDim, Operand as GemmOperand, batched_gemm, gemm};
use oxidiff_kernels::cpu::pack::{Matrix, PackedB, pack_b, packed_bytes};
use oxidiff_kernels::dtype::DType as KernelType;

use super::epilogue::{EpilogueArgs, Shifted};
use super::kernel_error;
use super::run::{Call, Ctx, Slot, whole_parameter};
use super::specialize::{Maker, Operand};
use crate::backend::tensor::{Memory, SystemMemory};
use crate::codegen::tile::kernel_type;
use crate::plan::MemoryMode;
use crate::{Error, Result};

/// Rows from which on packing a weight anew for every run costs under two per cent of the product.
const PACK_ON_THE_FLY_ROWS: usize = 2048;

/// Whether a weight is worth keeping in packed form.
pub(super) fn keeps_packed(mode: MemoryMode, rows: usize) -> bool {
    match mode {
        MemoryMode::Fast => true,
        MemoryMode::Balanced => rows < PACK_ON_THE_FLY_ROWS,
        MemoryMode::Low => false,
    }
}

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
    /// Index of the packed weight, if it is kept.
    pack: Option<usize>,
    /// The weight slot, if the weight is the whole of one: its strides are the tensor's own.
    slot: Option<usize>,
    epilogue: EpilogueArgs,
}

pub(super) fn make_linear(maker: &mut Maker<'_>) -> Result<Box<dyn Call>> {
    let operands = maker.operands()?;
    let [x, weight] = operands.as_slice() else { return maker.refuse("a linear step has two operands") };
    let (rank, k) = (x.access.shape.len(), weight.access.shape[1]);
    let n = weight.access.shape[0];
    // All rows with one stride, or those of each index of the first dimension.
    let (outer, outer_stride, (m, row_stride)) = match (x.access.collapse(0, rank - 1), rank) {
        (Some(rows), _) => (1, 0, rows),
        (None, 2..) => match x.access.collapse(1, rank - 1) {
            Some(rows) => (x.access.shape[0], x.access.strides[0], rows),
            None => return maker.refuse("rows that no stride walks"),
        },
        (None, _) => return maker.refuse("rows that no stride walks"),
    };
    let (_, columns) = x.access.collapse(rank - 1, rank).unwrap_or((1, 1));
    let x = Shape { slot: x.slot, dtype: float_type(maker, x)?, row_stride, col_stride: columns };
    let strides = &weight.access.strides;
    let weight =
        Shape { slot: weight.slot, dtype: float_type(maker, weight)?, row_stride: strides[0], col_stride: strides[1] };
    let keep = keeps_packed(maker.plan().options.memory, outer * m);
    let slot = whole_parameter(maker.plan(), &maker.step.operands[1]);
    let pack = maker.step.pack.filter(|_| keep);
    let epilogue = EpilogueArgs::new(maker)?;
    Ok(Box::new(LinearCall { outer, outer_stride, sizes: (m, n, k), x, weight, pack, slot, epilogue }))
}

impl LinearCall {
    fn source(&self, ctx: &Ctx<'_>) -> Matrix {
        let matrix = self.weight.at(ctx, 0);
        match self.slot.and_then(|slot| ctx.weights.tensor(slot)).map(|t| (t.ptr, t.strides.as_slice())) {
            Some((ptr, &[row, col])) => Matrix { ptr, row_stride: row as isize, col_stride: col as isize, ..matrix },
            _ => matrix,
        }
    }

    fn weight(&self, ctx: &Ctx<'_>) -> Result<GemmOperand> {
        let (_, n, k) = self.sizes;
        let source = self.source(ctx);
        let Some(pack) = self.pack else { return Ok(GemmOperand::Strided(source)) };
        let packed = ctx.weights.pack(pack, 0, &mut || {
            let block = SystemMemory.allocate(packed_bytes(n, k, source.dtype, ctx.isa), "a packed weight")?;
            // SAFETY: the weight is valid by the caller's promise, the block has the packed size.
            unsafe { pack_b(ctx.pool, ctx.isa, n, k, &source, block.ptr()) };
            Ok(block)
        });
        match packed {
            Ok(ptr) => Ok(GemmOperand::Packed(PackedB::from_raw(ptr, n, k, source.dtype, ctx.isa))),
            // Slower without, but not impossible.
            Err(Error::OutOfMemory { .. }) => Ok(GemmOperand::Strided(source)),
            Err(error) => Err(error),
        }
    }
}

impl Call for LinearCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (m, n, k) = self.sizes;
        let weight = self.weight(ctx)?;
        self.epilogue.with(ctx, |epilogue| {
            for z in 0..self.outer {
                let x = self.x.at(ctx, z as isize * self.outer_stride);
                let shifted = Shifted { inner: epilogue, rows: z * m };
                let epilogue = if self.outer == 1 { epilogue } else { &shifted };
                // SAFETY: operands are valid by the caller's promise for the sizes of the step.
                unsafe { gemm(ctx.pool, ctx.isa, m, n, k, &x, &weight, epilogue).map_err(kernel_error)? };
            }
            Ok(())
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
