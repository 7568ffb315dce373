//! What happens to a contraction's results: the plain epilogue where that is all, else a tile program.

use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
use oxidiff_kernels::cpu::tile_exec::TileEpilogue;
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::epilogue::Epilogue;

use super::run::{Ctx, Slot};
use super::specialize::Maker;
use super::tile::TileArgs;
use crate::Result;
use crate::codegen::tile::kernel_type;
use crate::plan::ConcreteAccess;

/// An epilogue with its operands.
pub(super) enum EpilogueArgs {
    Plain(PlainArgs),
    Tile(TileArgs),
}

/// `out = acc + bias + residual`.
pub(super) struct PlainArgs {
    out: Slot,
    dtype: KernelType,
    row_stride: isize,
    bias: Option<(Slot, KernelType)>,
    residual: Option<(Slot, KernelType, isize)>,
}

const fn is_float(dtype: KernelType) -> bool {
    matches!(dtype, KernelType::F32 | KernelType::F16 | KernelType::BF16)
}

/// Row stride of a matrix with unit columns.
fn matrix_rows(access: &ConcreteAccess) -> Option<isize> {
    let rank = access.shape.len();
    let (_, columns) = access.collapse(rank - 1, rank)?;
    let (rows, stride) = access.collapse(0, rank - 1)?;
    (columns == 1).then_some(if rows == 1 { 0 } else { stride })
}

/// One element per column, the same for every row.
fn is_bias(access: &ConcreteAccess) -> bool {
    let Some((last, rows)) = access.strides.split_last() else { return false };
    let columns = access.shape[rows.len()];
    (*last == 1 || columns == 1) && rows.iter().zip(&access.shape).all(|(&stride, &size)| stride == 0 || size == 1)
}

impl EpilogueArgs {
    /// The epilogue of the maker's step.
    pub fn new(maker: &Maker<'_>) -> Result<Self> {
        Ok(match plain(maker)? {
            Some(plain) => Self::Plain(plain),
            None => Self::Tile(TileArgs::new(maker)?),
        })
    }

    /// Calls `f` with the epilogue at its addresses.
    pub fn with<R>(&self, ctx: &Ctx<'_>, f: impl FnOnce(&dyn Epilogue) -> R) -> R {
        match self {
            Self::Plain(p) => {
                let mut epilogue = StoreEpilogue::new(ctx.at(p.out), p.dtype, p.row_stride);
                if let Some((bias, dtype)) = p.bias {
                    epilogue = epilogue.with_bias(ctx.at(bias), dtype);
                }
                if let Some((residual, dtype, stride)) = p.residual {
                    epilogue = epilogue.with_residual(ctx.at(residual), dtype, stride);
                }
                f(&epilogue)
            }
            Self::Tile(t) => {
                let (loads, stores) = t.bind(ctx);
                f(&TileEpilogue::new(&t.program, &t.space, &loads, &stores))
            }
        }
    }
}

fn plain(maker: &Maker<'_>) -> Result<Option<PlainArgs>> {
    let step = maker.step;
    let Some(plain) = step.body.as_ref().and_then(|b| b.plain) else { return Ok(None) };
    let out = maker.operand(&step.stores[0])?;
    if out.access.shape.is_empty() {
        return Ok(None);
    }
    let (Some(row_stride), Some(dtype)) = (matrix_rows(&out.access), kernel_type(out.access.dtype)) else {
        return Ok(None);
    };
    let mut args = PlainArgs { out: out.slot, dtype, row_stride, bias: None, residual: None };
    if !is_float(dtype) {
        return Ok(None);
    }
    for load in [plain.bias, plain.residual].into_iter().flatten() {
        let operand = maker.operand(&step.loads[load])?;
        let Some(dtype) = kernel_type(operand.access.dtype).filter(|&d| is_float(d)) else { return Ok(None) };
        if is_bias(&operand.access) && args.bias.is_none() && args.residual.is_none() {
            args.bias = Some((operand.slot, dtype));
        } else if let (Some(stride), None) = (matrix_rows(&operand.access), &args.residual) {
            args.residual = Some((operand.slot, dtype, stride));
        } else {
            return Ok(None);
        }
    }
    Ok(Some(args))
}

/// An epilogue for one of several products whose results lie below or beside each other.
pub(super) struct Shifted<'a> {
    pub inner: &'a dyn Epilogue,
    /// Rows before the product's first.
    pub rows: usize,
    /// Columns before it.
    pub cols: usize,
}

impl Epilogue for Shifted<'_> {
    unsafe fn apply(&self, acc: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        // SAFETY: the block moved to its place among all rows.
        unsafe { self.inner.apply(acc, ld, row0 + self.rows, col0 + self.cols, rows, cols) };
    }
}
