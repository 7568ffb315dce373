//! Ops that are kernels of their own: gather, interpolation, nearest upsampling, reductions, padding.
//!
//! Each looks at the concrete strides and leaves what its kernel cannot walk to the interpreter.

use oxidiff_kernels::cpu::copy::{Side, pad};
use oxidiff_kernels::cpu::gather::{Elements, Indices, Rows, gather, gather_elements};
use oxidiff_kernels::cpu::interpolate::{Interpolation, interpolate};
use oxidiff_kernels::cpu::reduce::{Reduce, Reduction, reduce};
use oxidiff_kernels::cpu::resample::{Axis, Images, nearest};
use oxidiff_kernels::cpu::scan::{Scan, cumulative_sum};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::tile::{Bound, MAX_DIMS, Space};

use super::run::{Call, Ctx, Slot};
use super::specialize::{Maker, Operand};
use super::{interpret, kernel_error};
use crate::codegen::tile::kernel_type;
use crate::ir::{DType, Op, ReduceOp};
use crate::plan::ConcreteAccess;
use crate::{Error, Result};

/// The root's op, its only operand and its result; `None` if the step has another form.
fn unary<'a>(maker: &Maker<'a>) -> Result<Option<(&'a Op, Operand, Operand)>> {
    let step = maker.step;
    let (Some(root), [operand], [store]) = (step.root, step.operands.as_slice(), step.stores.as_slice()) else {
        return Ok(None);
    };
    Ok(Some((maker.plan().graph.op(root), maker.operand(operand)?, maker.operand(store)?)))
}

/// A position in a buffer that a kernel's description names by pointer.
const NOWHERE: *mut u8 = std::ptr::null_mut();

struct GatherCall {
    rows: Rows,
    src: Slot,
    dst: Slot,
    index: Slot,
    dtype: KernelType,
    len: usize,
    stride: isize,
}

// SAFETY: the pointers in `rows` are null until a run fills in its own copy.
unsafe impl Send for GatherCall {}
// SAFETY: as above.
unsafe impl Sync for GatherCall {}

pub(super) fn make_gather(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let root = step.root.map(|root| maker.plan().graph.node(root));
    let (Some(node), [x, index], [store]) = (root, step.operands.as_slice(), step.stores.as_slice()) else {
        return interpret::make(maker);
    };
    let dim = match node.op {
        Op::IndexSelect { dim } => dim,
        Op::Gather { dim } => return make_gather_elements(maker, dim),
        _ => return interpret::make(maker),
    };
    let (x, index, out) = (maker.operand(x)?, maker.operand(index)?, maker.operand(store)?);
    let (rank, index_rank, out_rank) = (x.access.shape.len(), index.access.shape.len(), out.access.shape.len());
    let size = x.access.dtype.size_bytes() as isize;
    let list = index.access.collapse(0, index_rank);
    let outer = (x.access.collapse(0, dim), out.access.collapse(0, dim));
    let row = (x.access.collapse(dim + 1, rank), out.access.collapse(dim + index_rank, out_rank));
    let places = out.access.collapse(dim, dim + index_rank);
    let dtype = kernel_type(index.access.dtype).filter(|t| matches!(t, KernelType::I64 | KernelType::I32));
    let (Some((len, stride)), (Some((count, src_outer)), Some((_, dst_outer))), Some(dtype)) = (list, outer, dtype)
    else {
        return interpret::make(maker);
    };
    let (Some((row_len, 1)), Some((_, 1)), Some((_, dst_row))) = (row.0, row.1, places) else {
        return interpret::make(maker);
    };
    let rows = Rows {
        src: NOWHERE,
        rows: x.access.shape[dim],
        src_row: x.access.strides[dim] * size,
        dst: NOWHERE,
        dst_row: dst_row * size,
        row_bytes: row_len * size as usize,
        outer: count,
        src_outer: src_outer * size,
        dst_outer: dst_outer * size,
    };
    Ok(Box::new(GatherCall { rows, src: x.slot, dst: out.slot, index: index.slot, dtype, len, stride }))
}

impl Call for GatherCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let indices = Indices { ptr: ctx.at(self.index), dtype: self.dtype, len: self.len, stride: self.stride };
        let rows = Rows { src: ctx.at(self.src), dst: ctx.at(self.dst), ..self.rows };
        // SAFETY: operands are valid by the caller's promise.
        unsafe { gather(ctx.pool, indices, false, rows) }.map_err(|e| Error::invalid(e.to_string()))
    }
}

/// Elements picked one by one.
struct GatherElementsCall {
    space: Space,
    element_bytes: usize,
    src: Operand,
    dim: usize,
    index: Operand,
    index_dtype: KernelType,
    dst: Operand,
}

fn make_gather_elements(maker: &Maker<'_>, dim: usize) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let ([x, index], [store]) = (step.operands.as_slice(), step.stores.as_slice()) else {
        return interpret::make(maker);
    };
    let (src, index, dst) = (maker.operand(x)?, maker.operand(index)?, maker.operand(store)?);
    let index_dtype = kernel_type(index.access.dtype).filter(|t| matches!(t, KernelType::I64 | KernelType::I32));
    let (Some(index_dtype), true) = (index_dtype, dim < src.access.shape.len() && dst.access.shape.len() <= MAX_DIMS)
    else {
        return interpret::make(maker);
    };
    let (space, element_bytes) = (Space::new(&dst.access.shape), src.access.dtype.size_bytes());
    Ok(Box::new(GatherElementsCall { space, element_bytes, src, dim, index, index_dtype, dst }))
}

impl Call for GatherElementsCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let bound = |operand: &Operand| {
            let mut strides = [0; MAX_DIMS];
            strides[..self.space.rank].copy_from_slice(&operand.access.strides);
            Bound { ptr: ctx.at(operand.slot), strides }
        };
        let mut src = bound(&self.src);
        src.strides[self.dim] = 0;
        let gather = Elements {
            space: self.space,
            element_bytes: self.element_bytes,
            src,
            size: self.src.access.shape[self.dim],
            step: self.src.access.strides[self.dim],
            index: bound(&self.index),
            index_dtype: self.index_dtype,
            dst: bound(&self.dst),
        };
        // SAFETY: operands are valid by the caller's promise; the source has at least the result's sizes in all other
        // dimensions.
        unsafe { gather_elements(ctx.pool, &gather) }.map_err(|e| Error::invalid(e.to_string()))
    }
}

struct UpsampleCall {
    exact: bool,
    images: Images,
    src: Slot,
    dst: Slot,
}

// SAFETY: the pointers in `images` are null until a run fills in its own copy.
unsafe impl Send for UpsampleCall {}
// SAFETY: as above.
unsafe impl Sync for UpsampleCall {}

pub(super) fn make_upsample(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let Some((Op::UpsampleNearest { first_dim, scales, exact }, x, out)) = unary(maker)? else {
        return interpret::make(maker);
    };
    let (first, last) = (*first_dim, first_dim + scales.len());
    let rank = x.access.shape.len();
    let size = x.access.dtype.size_bytes();
    let bytes = size as isize;
    let missing = Axis { input: 1, output: 1, scale: None, src: 0, dst: 0 };
    let mut axes = [missing; 3];
    for (at, &scale) in scales.iter().enumerate() {
        let dim = first + at;
        axes[3 - scales.len() + at] = Axis {
            input: x.access.shape[dim],
            output: out.access.shape[dim],
            scale: Some(scale).filter(|s| *s > 0.0),
            src: x.access.strides[dim] * bytes,
            dst: out.access.strides[dim] * bytes,
        };
    }
    // Channels are what follows the spatial dimensions, or, if nothing does, the dimension before them.
    let channels = if last < rank { last..rank } else { first.saturating_sub(1)..first };
    let batch = if last < rank { 0..first } else { 0..channels.start };
    let both = |range: &std::ops::Range<usize>| {
        x.access.collapse(range.start, range.end).zip(out.access.collapse(range.start, range.end))
    };
    let (Some(((channel_count, src_channel), (_, dst_channel))), Some(((images, src_batch), (_, dst_batch)))) =
        (both(&channels), both(&batch))
    else {
        return interpret::make(maker);
    };
    let images = Images {
        src: NOWHERE,
        dst: NOWHERE,
        batch: images,
        src_batch: src_batch * bytes,
        dst_batch: dst_batch * bytes,
        channels: channel_count,
        src_channel: src_channel * bytes,
        dst_channel: dst_channel * bytes,
        element_bytes: size,
        axes,
    };
    Ok(Box::new(UpsampleCall { exact: *exact, images, src: x.slot, dst: out.slot }))
}

impl Call for UpsampleCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let images = Images { src: ctx.at(self.src), dst: ctx.at(self.dst), ..self.images };
        // SAFETY: operands are valid by the caller's promise.
        unsafe { nearest(ctx.pool, self.exact, &images) };
        Ok(())
    }
}

struct InterpolateCall {
    of: Interpolation,
    src: Slot,
    dst: Slot,
    index: Slot,
    weight: Slot,
}

// SAFETY: the pointers in `of` are null until a run fills in its own copy.
unsafe impl Send for InterpolateCall {}
// SAFETY: as above.
unsafe impl Sync for InterpolateCall {}

pub(super) fn make_interpolate(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let root = step.root.map(|root| maker.plan().graph.op(root));
    let (Some(Op::Interpolate { dim }), [x, index, weight], [store]) =
        (root, step.operands.as_slice(), step.stores.as_slice())
    else {
        return interpret::make(maker);
    };
    let (x, out) = (maker.operand(x)?, maker.operand(store)?);
    let (index, weight) = (maker.operand(index)?, maker.operand(weight)?);
    let (dim, rank) = (*dim, x.access.shape.len());
    let types = kernel_type(x.access.dtype).zip(kernel_type(index.access.dtype));
    let around = |of: &Operand| of.access.collapse(0, dim).zip(of.access.collapse(dim + 1, rank));
    let (Some((dtype, index_dtype)), Some((outer, inner)), Some((to_outer, to_inner))) =
        (types, around(&x), around(&out))
    else {
        return interpret::make(maker);
    };
    if weight.access.dtype != DType::F32 {
        return interpret::make(maker);
    }
    let of = Interpolation {
        dtype,
        src: NOWHERE,
        dst: NOWHERE,
        sizes: [outer.0, out.access.shape[dim], inner.0],
        rows: x.access.shape[dim],
        src_strides: [outer.1, x.access.strides[dim], inner.1],
        dst_strides: [to_outer.1, out.access.strides[dim], to_inner.1],
        indices: (NOWHERE, index_dtype),
        weights: NOWHERE,
        taps: index.access.shape[1],
        index_strides: [index.access.strides[0], index.access.strides[1]],
        weight_strides: [weight.access.strides[0], weight.access.strides[1]],
    };
    Ok(Box::new(InterpolateCall { of, src: x.slot, dst: out.slot, index: index.slot, weight: weight.slot }))
}

impl Call for InterpolateCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let of = Interpolation {
            src: ctx.at(self.src),
            dst: ctx.at(self.dst),
            indices: (ctx.at(self.index), self.of.indices.1),
            weights: ctx.at(self.weight),
            ..self.of
        };
        // SAFETY: operands are valid by the caller's promise.
        unsafe { interpolate(ctx.pool, ctx.isa, &of) }.map_err(|e| Error::invalid(e.to_string()))
    }
}

struct ReduceCall {
    op: Reduction,
    reduce: Reduce,
    src: Slot,
    dst: Slot,
}

// SAFETY: the pointers in `reduce` are null until a run fills in its own copy.
unsafe impl Send for ReduceCall {}
// SAFETY: as above.
unsafe impl Sync for ReduceCall {}

const fn reduction(op: ReduceOp) -> Reduction {
    match op {
        ReduceOp::Sum => Reduction::Sum,
        ReduceOp::Mean => Reduction::Mean,
        ReduceOp::Amax => Reduction::Max,
        ReduceOp::Amin => Reduction::Min,
        ReduceOp::Prod => Reduction::Prod,
        ReduceOp::Any => Reduction::Any,
        ReduceOp::All => Reduction::All,
        ReduceOp::Argmax => Reduction::ArgMax,
        ReduceOp::Argmin => Reduction::ArgMin,
    }
}

pub(super) fn make_reduce(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let Some((Op::Reduce { op, dims, keepdim }, x, out)) = unary(maker)? else { return interpret::make(maker) };
    let rank = x.access.shape.len();
    // Of one place there is nothing to reduce: such a dimension may lie between others or not.
    let is_one = |d: usize| x.access.shape[d] == 1;
    let wide = || dims.iter().copied().filter(|&d| !is_one(d));
    let first = wide().min().or_else(|| dims.iter().copied().min());
    let Some((first, last)) = first.zip(wide().max().or(first)).map(|(first, last)| (first, last + 1)) else {
        return interpret::make(maker);
    };
    if !(first..last).all(|d| dims.contains(&d) || is_one(d)) {
        return interpret::make(maker);
    }
    let out_rank = out.access.shape.len();
    // How many of the result's dimensions come before a dimension of the operand.
    let before = |end: usize| end - if *keepdim { 0 } else { dims.iter().filter(|&&d| d < end).count() };
    let (out_first, out_last) = (before(first), before(last));
    let source = (x.access.collapse(0, first), x.access.collapse(first, last), x.access.collapse(last, rank));
    let target = (out.access.collapse(0, out_first), out.access.collapse(out_last, out_rank));
    let types = (kernel_type(x.access.dtype), kernel_type(out.access.dtype));
    let (Some(outer), Some(reduced), Some(inner)) = source else { return interpret::make(maker) };
    let ((Some(to_outer), Some(to_inner)), (Some(src_dtype), Some(dst_dtype))) = (target, types) else {
        return interpret::make(maker);
    };
    // An element type of its own for the result of a sum of 16-bit or bool values is a conversion before the sum.
    let is_converting = x.access.dtype != out.access.dtype
        && !matches!(op, ReduceOp::Any | ReduceOp::All | ReduceOp::Argmax | ReduceOp::Argmin);
    if is_converting && !(x.access.dtype.is_half() && out.access.dtype == DType::F32) {
        return interpret::make(maker);
    }
    let reduce = Reduce {
        src: NOWHERE,
        src_dtype,
        sizes: [outer.0, reduced.0, inner.0],
        src_strides: [outer.1, reduced.1, inner.1],
        dst: NOWHERE,
        dst_dtype,
        dst_strides: [to_outer.1, to_inner.1],
    };
    Ok(Box::new(ReduceCall { op: reduction(*op), reduce, src: x.slot, dst: out.slot }))
}

impl Call for ReduceCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let description = Reduce { src: ctx.at(self.src), dst: ctx.at(self.dst), ..self.reduce };
        // SAFETY: operands are valid by the caller's promise.
        unsafe { reduce(ctx.pool, ctx.isa, self.op, &description).map_err(kernel_error) }
    }
}

struct ScanCall {
    scan: Scan,
    src: Slot,
    dst: Slot,
}

// SAFETY: the pointers in `scan` are null until a run fills in its own copy.
unsafe impl Send for ScanCall {}
// SAFETY: as above.
unsafe impl Sync for ScanCall {}

pub(super) fn make_scan(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let Some((Op::Cumsum { dim }, x, out)) = unary(maker)? else { return interpret::make(maker) };
    let (x_type, out_type) = (x.access.dtype, out.access.dtype);
    // Other conversions come before the sum.
    let is_alike = match x_type.is_float() {
        true => x_type == out_type,
        false => matches!(out_type, DType::I64 | DType::I32),
    };
    let (Some(src_dtype), Some(dst_dtype)) = (kernel_type(x_type), kernel_type(out_type)) else {
        return interpret::make(maker);
    };
    let around = |access: &ConcreteAccess| {
        let rank = access.shape.len();
        let (outer, inner) = (access.collapse(0, *dim)?, access.collapse(dim + 1, rank)?);
        Some(([outer.0, access.shape[*dim], inner.0], [outer.1, access.strides[*dim], inner.1]))
    };
    let (Some((sizes, src_strides)), Some((_, dst_strides)), true) = (around(&x.access), around(&out.access), is_alike)
    else {
        return interpret::make(maker);
    };
    let scan = Scan { src: NOWHERE, src_dtype, sizes, src_strides, dst: NOWHERE, dst_dtype, dst_strides };
    Ok(Box::new(ScanCall { scan, src: x.slot, dst: out.slot }))
}

impl Call for ScanCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let scan = Scan { src: ctx.at(self.src), dst: ctx.at(self.dst), ..self.scan };
        // SAFETY: operands are valid by the caller's promise.
        unsafe { cumulative_sum(ctx.pool, &scan).map_err(kernel_error) }
    }
}

struct PadCall {
    before: Vec<isize>,
    after: Vec<isize>,
    value: f64,
    from: Operand,
    to: Operand,
    dtype: KernelType,
}

pub(super) fn make_pad(maker: &Maker<'_>) -> Result<Box<dyn Call>> {
    let Some((Op::Pad { before, value }, from, to)) = unary(maker)? else { return interpret::make(maker) };
    let Some(dtype) = kernel_type(from.access.dtype) else { return interpret::make(maker) };
    let before: Vec<isize> = before.iter().map(|d| Ok(d.eval(maker.bindings)? as isize)).collect::<Result<_>>()?;
    let sizes = from.access.shape.iter().zip(&to.access.shape);
    let after = sizes.zip(&before).map(|((&from, &to), b)| to as isize - from as isize - b).collect();
    Ok(Box::new(PadCall { before, after, value: *value, from, to, dtype }))
}

impl Call for PadCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let side = |o: &'_ Operand| -> (*mut u8, Vec<isize>) { (ctx.at(o.slot), o.access.strides.to_vec()) };
        let ((src, src_strides), (dst, dst_strides)) = (side(&self.from), side(&self.to));
        let src = Side { ptr: src, dtype: self.dtype, strides: &src_strides };
        let dst = Side { ptr: dst, dtype: self.dtype, strides: &dst_strides };
        let sizes = &self.from.access.shape;
        // SAFETY: operands are valid by the caller's promise.
        unsafe { pad(ctx.pool, ctx.isa, sizes, &self.before, &self.after, self.value, src, dst) };
        Ok(())
    }
}
