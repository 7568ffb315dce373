//! Norms and softmax.

use oxidiff_kernels::cpu::norm::{
    ChannelVector, Channels, GroupNorm, RowInput, RowNorm, group_norm_apply, group_norm_by_image, row_norm,
};
use oxidiff_kernels::cpu::softmax::{Matrix, softmax};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::tile::{Bound, MAX_DIMS};

use super::kernel_error;
use super::product::float_type;
use super::run::{Call, Ctx, Slot};
use super::specialize::{Maker, Operand, Role};
use super::tile::TileArgs;
use crate::Result;
use crate::ir::Op;

struct GroupNormCall {
    x: Slot,
    channels: Channels,
    groups: usize,
    eps: f64,
    gamma: Option<(Slot, KernelType)>,
    beta: Option<(Slot, KernelType)>,
    scale: Slot,
    shift: Slot,
    /// `None` where a convolution [reads through](super::read_through) it.
    args: Option<TileArgs>,
}

pub(super) fn make_group(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let Some(Op::GroupNorm { num_groups, eps, .. }) = step.root.map(|root| maker.plan().graph.op(root)) else {
        return maker.refuse("a group norm step without a group norm");
    };
    let operands = maker.operands()?;
    let Some((x, vectors)) = operands.split_first() else { return maker.refuse("a norm of nothing") };
    let (shape, rank) = (&x.access.shape, x.access.shape.len());
    let Some((pixels, pixel_stride)) = x.access.collapse(1, rank - 1) else {
        return maker.refuse("pixels that no stride walks");
    };
    let vector = |at: usize| match vectors.get(at) {
        Some(v) if v.access.is_dense() => Ok(Some((v.slot, float_type(maker, v)?))),
        Some(_) => maker.refuse("a strided weight"),
        None => Ok(None),
    };
    let channels = Channels {
        ptr: std::ptr::null(),
        dtype: float_type(maker, x)?,
        batch: shape[0],
        pixels,
        channels: shape[rank - 1],
        image_stride: x.access.strides[0],
        pixel_stride,
        channel_stride: if shape[rank - 1] == 1 { 1 } else { x.access.strides[rank - 1] },
    };
    let [scale, shift] = step.scratch.as_slice() else { return maker.refuse("a group norm without its scratch") };
    Ok(Box::new(GroupNormCall {
        x: x.slot,
        channels,
        groups: usize::try_from(*num_groups).unwrap_or(0),
        eps: *eps,
        gamma: vector(0)?,
        beta: vector(1)?,
        scale: maker.operand(scale)?.slot,
        shift: maker.operand(shift)?.slot,
        args: if let Role::ReadThrough = maker.role { None } else { Some(TileArgs::new(maker)?) },
    }))
}

// SAFETY: the pointer in `channels` is null until a run fills in its own copy.
unsafe impl Send for GroupNormCall {}
// SAFETY: as above.
unsafe impl Sync for GroupNormCall {}

impl Call for GroupNormCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let vector = |v: Option<(Slot, KernelType)>| match v {
            Some((slot, dtype)) => ChannelVector { ptr: ctx.at(slot), dtype },
            None => ChannelVector::NONE,
        };
        let x = Channels { ptr: ctx.at(self.x), ..self.channels };
        let norm = GroupNorm { groups: self.groups, eps: self.eps, gamma: vector(self.gamma), beta: vector(self.beta) };
        let (scale, shift) = (ctx.at(self.scale).cast::<f32>(), ctx.at(self.shift).cast::<f32>());
        // SAFETY: operands are valid by the caller's promise, scale and shift hold one f32 per image and channel.
        let done = unsafe {
            match &self.args {
                None => group_norm_by_image(ctx.pool, ctx.isa, &x, &norm, scale, shift, |_| ()),
                Some(args) => {
                    let (loads, stores) = args.bind(ctx);
                    let (program, space) = (&args.program, &args.space);
                    group_norm_apply(ctx.pool, ctx.isa, &x, &norm, scale, shift, program, space, &loads, &stores)
                }
            }
        };
        done.map_err(kernel_error)
    }
}

struct RowNormCall {
    kind: RowNorm,
    eps: f64,
    x: Slot,
    strides: [isize; MAX_DIMS],
    dtype: KernelType,
    args: TileArgs,
}

pub(super) fn make_row(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let (kind, eps) = match step.root.map(|root| maker.plan().graph.op(root)) {
        Some(Op::LayerNorm { eps, .. }) => (RowNorm::Layer, *eps),
        Some(Op::RmsNorm { eps, floor: true, .. }) => (RowNorm::FlooredRms, *eps),
        Some(Op::RmsNorm { eps, .. }) => (RowNorm::Rms, *eps),
        _ => return maker.refuse("a norm step without a norm"),
    };
    let operands = maker.operands()?;
    let Some(x) = operands.first() else { return maker.refuse("a norm of nothing") };
    let mut strides = [0; MAX_DIMS];
    for (to, from) in strides.iter_mut().zip(&x.access.strides) {
        *to = *from;
    }
    let dtype = float_type(maker, x)?;
    Ok(Box::new(RowNormCall { kind, eps, x: x.slot, strides, dtype, args: TileArgs::new(maker)? }))
}

impl Call for RowNormCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let x = RowInput { bound: Bound { ptr: ctx.at(self.x), strides: self.strides }, dtype: self.dtype };
        let (loads, stores) = self.args.bind(ctx);
        let (program, space) = (&self.args.program, &self.args.space);
        // SAFETY: operands are valid by the caller's promise.
        unsafe {
            row_norm(ctx.pool, ctx.isa, self.kind, self.eps, &x, program, space, &loads, &stores).map_err(kernel_error)
        }
    }
}

struct SoftmaxCall {
    rows: usize,
    cols: usize,
    from: (Slot, KernelType, isize),
    to: (Slot, KernelType, isize),
}

pub(super) fn make_softmax(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let (from, to) = (maker.operand(&maker.step.operands[0])?, maker.operand(&maker.step.stores[0])?);
    let rank = from.access.shape.len();
    let side = |o: &Operand| -> Result<Option<(Slot, KernelType, isize)>> {
        let rows = o.access.collapse(0, rank - 1);
        Ok(match rows {
            Some((_, stride)) => Some((o.slot, float_type(maker, o)?, stride)),
            None => None,
        })
    };
    let (Some(from_side), Some(to_side)) = (side(&from)?, side(&to)?) else {
        return super::interpret::make(maker);
    };
    let cols = from.access.shape[rank - 1];
    Ok(Box::new(SoftmaxCall { rows: from.access.numel() / cols.max(1), cols, from: from_side, to: to_side }))
}

impl Call for SoftmaxCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let matrix = |(slot, dtype, row_stride)| Matrix { ptr: ctx.at(slot), dtype, row_stride };
        // SAFETY: operands are valid by the caller's promise.
        unsafe {
            softmax(ctx.pool, ctx.isa, matrix(self.from), matrix(self.to), self.rows, self.cols).map_err(kernel_error)
        }
    }
}
