//! Convolutions over channels-last images.

use oxidiff_kernels::cpu::conv::{Conv, Weight};
use oxidiff_kernels::cpu::conv_algorithm::{Algorithm, ConvWeight, pack_weight, run, weight_bytes};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::epilogue::Epilogue;

use super::epilogue::{EpilogueArgs, Shifted};
use super::kernel_error;
use super::packing::{Candidate, Chunks, convolution_candidates, form_on_the_fly};
use super::product::float_type;
use super::run::{Call, Ctx, Slot, whole_parameter};
use super::specialize::Maker;
use crate::Result;
use crate::backend::KeptForm;
use crate::backend::tensor::{Memory, SystemMemory};
use crate::ir::Op;
use crate::plan::ConcreteAccess;

struct ConvolutionCall {
    conv: Conv,
    algorithm: Algorithm,
    x: (Slot, KernelType),
    weight: (Slot, KernelType, [isize; 5]),
    /// The weight slot, if the weight is the whole of one: its strides are the tensor's own.
    slot: Option<usize>,
    kept: Kept,
    epilogue: EpilogueArgs,
}

/// Where the packed weight lies.
enum Kept {
    /// With the weight set.
    Pack(KeptForm),
    /// In the arena, packed anew by every run, chunk by chunk.
    Scratch(Slot, Chunks),
}

/// Spatial values as (depth, height, width).
fn padded<T: Copy>(values: &[T], missing: T) -> [T; 3] {
    let mut all = [missing; 3];
    all[3 - values.len()..].copy_from_slice(values);
    all
}

fn weight_strides(strides: &[isize]) -> [isize; 5] {
    let [d, h, w] = padded(&strides[2..], 0);
    [strides[0], strides[1], d, h, w]
}

/// The sizes of a convolution step, and its element types.
fn shape(maker: &Maker<'_>, x: &ConcreteAccess, weight: &ConcreteAccess) -> Result<Conv> {
    let step = maker.step;
    let Some(Op::Convolution { stride, padding, dilation, groups, .. }) =
        step.root.map(|root| maker.plan().graph.op(root))
    else {
        return maker.refuse("a convolution step without a convolution");
    };
    let out: Vec<usize> =
        step.space.iter().map(|d| Ok(usize::try_from(d.eval(maker.bindings)?).unwrap_or(0))).collect::<Result<_>>()?;
    let spatial = stride.len();
    let unsigned = |values: &[i64]| values.iter().map(|&v| usize::try_from(v).unwrap_or(0)).collect::<Vec<_>>();
    let (shape, strides) = (&x.shape, &x.strides);
    let [depth, height, width] = padded(&strides[1..=spatial], 0);
    Ok(Conv {
        batch: shape[0],
        input: padded(&shape[1..=spatial], 1),
        in_channels: shape[spatial + 1],
        out_channels: weight.shape[0],
        groups: usize::try_from(*groups).unwrap_or(0),
        kernel: padded(&weight.shape[2..], 1),
        stride: padded(&unsigned(stride), 1),
        padding: padded(&padding.iter().map(|&p| p as isize).collect::<Vec<_>>(), 0),
        dilation: padded(&unsigned(dilation), 1),
        output: padded(&out[1..=spatial], 1),
        upsample: padded(&step.upsample, 1),
        strides: [strides[0], depth, height, width],
    })
}

/// What the step could keep between runs.
pub(super) fn candidates(maker: &Maker<'_>) -> Result<Vec<Candidate>> {
    let operands = maker.operands()?;
    let ([x, weight], Some(pack)) = (operands.as_slice(), maker.step.pack) else { return Ok(Vec::new()) };
    let conv = shape(maker, &x.access, &weight.access)?;
    let (x_type, weight_type) = (float_type(maker, x)?, float_type(maker, weight)?);
    Ok(convolution_candidates(maker.plan().options, pack, &conv, x_type, weight_type, maker.isa()))
}

pub(super) fn make(maker: &mut Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let operands = maker.operands()?;
    let [x, weight] = operands.as_slice() else { return maker.refuse("a convolution step has two operands") };
    let conv = shape(maker, &x.access, &weight.access)?;
    let (x_type, weight_type) = (float_type(maker, x)?, float_type(maker, weight)?);
    let (algorithm, kept) = match maker.keeps.of(maker.at) {
        Some(kept) => (ALGORITHMS[kept.form], Kept::Pack(kept)),
        None => {
            let algorithm = match step.pack {
                Some(_) => form_on_the_fly(maker.plan().options, &conv, x_type, weight_type),
                None => Algorithm::Direct,
            };
            let bytes = |conv: &Conv| weight_bytes(conv, algorithm, weight_type, maker.isa());
            let chunks = Chunks::of_convolution(maker, &conv, algorithm, bytes(&conv));
            let bytes = bytes(&Conv { out_channels: chunks.step, ..conv });
            (algorithm, Kept::Scratch(maker.scratch(bytes, "packed weight"), chunks))
        }
    };
    let slot = whole_parameter(maker.plan(), &step.operands[1]);
    let weight = (weight.slot, weight_type, weight_strides(&weight.access.strides));
    Ok(Box::new(ConvolutionCall {
        conv,
        algorithm,
        x: (x.slot, x_type),
        weight,
        slot,
        kept,
        epilogue: EpilogueArgs::new(maker)?,
    }))
}

/// By [`form`](super::packing::form).
const ALGORITHMS: [Algorithm; 3] = [Algorithm::Direct, Algorithm::Winograd2, Algorithm::Winograd4];

impl ConvolutionCall {
    /// The weight as it lies in memory.
    fn source(&self, ctx: &Ctx<'_>) -> Weight {
        let (slot, dtype, strides) = self.weight;
        match self.slot.and_then(|slot| ctx.weights.tensor(slot)) {
            Some(tensor) => {
                let strides: Vec<isize> = tensor.strides.iter().map(|&s| s as isize).collect();
                Weight { ptr: tensor.ptr, dtype, strides: weight_strides(&strides) }
            }
            None => Weight { ptr: ctx.at(slot), dtype, strides },
        }
    }

    /// # Safety
    /// Operands must be valid for the sizes of the step, `to` writable for the packed size.
    unsafe fn pack(&self, ctx: &Ctx<'_>, conv: &Conv, source: &Weight, to: *mut u8) -> Result<ConvWeight> {
        // SAFETY: forwarded.
        unsafe { pack_weight(ctx.pool, ctx.isa, conv, self.algorithm, source, to) }.map_err(kernel_error)
    }

    /// # Safety
    /// As [`Call::run`]; `weight` must hold the weight of `conv`.
    unsafe fn convolve(&self, ctx: &Ctx<'_>, conv: &Conv, weight: &ConvWeight, epilogue: &dyn Epilogue) -> Result<()> {
        let (x, dtype) = (ctx.at(self.x.0), self.x.1);
        // SAFETY: forwarded.
        unsafe { run(ctx.pool, ctx.isa, conv, x, dtype, weight, epilogue).map_err(kernel_error) }
    }
}

impl Call for ConvolutionCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (source, dtype) = (self.source(ctx), self.weight.1);
        let (scratch, chunks) = match self.kept {
            Kept::Scratch(scratch, chunks) => (ctx.at(scratch), chunks),
            Kept::Pack(kept) => {
                let form = ctx.weights.pack(kept.pack, kept.form, &mut || {
                    let block = SystemMemory.allocate(kept.bytes, "a packed weight")?;
                    // SAFETY: the weight is valid by the caller's promise, the block has the packed size.
                    unsafe { self.pack(ctx, &self.conv, &source, block.ptr())? };
                    Ok(block)
                })?;
                let weight = ConvWeight::from_raw(form.ptr(), &self.conv, self.algorithm, dtype, ctx.isa);
                // SAFETY: operands are valid by the caller's promise, `form` holds the packed weight.
                return self
                    .epilogue
                    .with(ctx, |epilogue| unsafe { self.convolve(ctx, &self.conv, &weight, epilogue) });
            }
        };
        self.epilogue.with(ctx, |epilogue| {
            for (first, count) in chunks.iter() {
                let conv = Conv { out_channels: count, ..self.conv };
                let from = first as isize * source.strides[0] * dtype.size_bytes() as isize;
                let source = Weight { ptr: source.ptr.wrapping_offset(from), ..source };
                let epilogue = Shifted { inner: epilogue, rows: 0, cols: first };
                // SAFETY: operands are valid by the caller's promise; the scratch memory holds the packed chunk.
                unsafe {
                    let weight = self.pack(ctx, &conv, &source, scratch)?;
                    self.convolve(ctx, &conv, &weight, &epilogue)?;
                }
            }
            Ok(())
        })
    }
}
