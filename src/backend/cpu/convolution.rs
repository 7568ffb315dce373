//! Convolutions over channels-last images.

use oxidiff_kernels::cpu::conv::{Conv, PackedWeight, Weight, conv, pack_conv_weight};
use oxidiff_kernels::dtype::DType as KernelType;

use super::epilogue::EpilogueArgs;
use super::kernel_error;
use super::product::{float_type, keeps_packed};
use super::run::{Call, Ctx, Slot, whole_parameter};
use super::specialize::Maker;
use crate::Result;
use crate::backend::tensor::{Memory, SystemMemory};
use crate::ir::Op;

struct ConvolutionCall {
    conv: Conv,
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
    Pack(usize),
    /// In the arena, packed anew by every run.
    Scratch(Slot),
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

pub(super) fn make(maker: &mut Maker<'_>) -> Result<Box<dyn Call>> {
    let step = maker.step;
    let Some(Op::Convolution { stride, padding, dilation, groups, .. }) =
        step.root.map(|root| maker.plan().graph.op(root))
    else {
        return maker.refuse("a convolution step without a convolution");
    };
    let operands = maker.operands()?;
    let [x, weight] = operands.as_slice() else { return maker.refuse("a convolution step has two operands") };
    let out: Vec<usize> =
        step.space.iter().map(|d| Ok(usize::try_from(d.eval(maker.bindings)?).unwrap_or(0))).collect::<Result<_>>()?;
    let spatial = stride.len();
    let unsigned = |values: &[i64]| values.iter().map(|&v| usize::try_from(v).unwrap_or(0)).collect::<Vec<_>>();
    let (shape, strides) = (&x.access.shape, &x.access.strides);
    let [depth, height, width] = padded(&strides[1..=spatial], 0);
    let conv = Conv {
        batch: shape[0],
        input: padded(&shape[1..=spatial], 1),
        in_channels: shape[spatial + 1],
        out_channels: weight.access.shape[0],
        groups: usize::try_from(*groups).unwrap_or(0),
        kernel: padded(&weight.access.shape[2..], 1),
        stride: padded(&unsigned(stride), 1),
        padding: padded(&padding.iter().map(|&p| p as isize).collect::<Vec<_>>(), 0),
        dilation: padded(&unsigned(dilation), 1),
        output: padded(&out[1..=spatial], 1),
        upsample: padded(&step.upsample, 1),
        strides: [strides[0], depth, height, width],
    };
    let (x_type, weight_type) = (float_type(maker, x)?, float_type(maker, weight)?);
    let bytes = conv.packed_bytes(weight_type, maker.isa());
    let slot = whole_parameter(maker.plan(), &step.operands[1]);
    let kept = match step.pack.filter(|_| keeps_packed(maker.plan().options.memory, conv.rows())) {
        Some(index) => Kept::Pack(index),
        None => Kept::Scratch(maker.scratch(bytes)),
    };
    let weight = (weight.slot, weight_type, weight_strides(&weight.access.strides));
    Ok(Box::new(ConvolutionCall { conv, x: (x.slot, x_type), weight, slot, kept, epilogue: EpilogueArgs::new(maker)? }))
}

impl ConvolutionCall {
    fn packed(&self, ctx: &Ctx<'_>) -> Result<PackedWeight> {
        let (slot, dtype, strides) = self.weight;
        let mut source = Weight { ptr: ctx.at(slot), dtype, strides };
        if let Some(tensor) = self.slot.and_then(|slot| ctx.weights.tensor(slot)) {
            let strides: Vec<isize> = tensor.strides.iter().map(|&s| s as isize).collect();
            source = Weight { ptr: tensor.ptr, dtype, strides: weight_strides(&strides) };
        }
        let index = match self.kept {
            Kept::Pack(index) => index,
            Kept::Scratch(scratch) => {
                // SAFETY: the weight is valid by the caller's promise; the scratch buffer has the packed size.
                return Ok(unsafe { pack_conv_weight(ctx.pool, ctx.isa, &self.conv, &source, ctx.at(scratch)) });
            }
        };
        let ptr = ctx.weights.pack(index, &mut || {
            let block = SystemMemory.allocate(self.conv.packed_bytes(dtype, ctx.isa), "a packed weight")?;
            // SAFETY: as above.
            unsafe { pack_conv_weight(ctx.pool, ctx.isa, &self.conv, &source, block.ptr()) };
            Ok(block)
        })?;
        Ok(PackedWeight::from_raw(ptr, dtype, &self.conv, ctx.isa))
    }
}

impl Call for ConvolutionCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let weight = self.packed(ctx)?;
        let (x, dtype) = (ctx.at(self.x.0), self.x.1);
        self.epilogue.with(ctx, |epilogue| {
            // SAFETY: operands are valid by the caller's promise for the sizes of the step.
            unsafe { conv(ctx.pool, ctx.isa, &self.conv, x, dtype, &weight, epilogue).map_err(kernel_error) }
        })
    }
}
