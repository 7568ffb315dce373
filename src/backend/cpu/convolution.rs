//! Convolutions over channels-last images.

use oxidiff_kernels::cpu::conv::{Conv, Weight};
use oxidiff_kernels::cpu::conv_algorithm::{Algorithm, ConvWeight, Keep, choose, pack_weight, run, weight_bytes};
use oxidiff_kernels::dtype::DType as KernelType;

use super::epilogue::EpilogueArgs;
use super::kernel_error;
use super::product::{float_type, keeps_packed};
use super::run::{Call, Ctx, Slot, whole_parameter};
use super::specialize::Maker;
use crate::Result;
use crate::backend::tensor::{Memory, SystemMemory};
use crate::ir::Op;
use crate::plan::MemoryMode;

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
    let (algorithm, keep) = decide(maker, &conv, x_type, weight_type);
    let slot = whole_parameter(maker.plan(), &step.operands[1]);
    let kept = match step.pack.filter(|_| keep == Keep::Packed) {
        Some(index) => Kept::Pack(index),
        None => Kept::Scratch(maker.scratch(weight_bytes(&conv, algorithm, weight_type, maker.isa()))),
    };
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

/// Largest transformed weight that is worth keeping where transforming it for every run would cost more than it gains.
const KEPT_WINOGRAD_BYTES: usize = 64 << 20;
/// Rows from which on transforming a weight for every run costs at most a quarter of what it gains.
const TRANSFORM_ON_THE_FLY_ROWS: usize = 4096;

/// The form of a convolution, and whether its weight stays packed.
fn decide(maker: &Maker<'_>, conv: &Conv, x: KernelType, weight: KernelType) -> (Algorithm, Keep) {
    let options = maker.plan().options;
    let plain = match keeps_packed(options.memory, conv.rows()) {
        true => (Algorithm::Direct, Keep::Packed),
        false => (Algorithm::Direct, Keep::PerCall),
    };
    if options.exact || maker.step.pack.is_none() {
        return plain;
    }
    let kept = choose(conv, x, weight, Keep::Packed);
    let small = weight_bytes(conv, kept, weight, maker.isa()) <= KEPT_WINOGRAD_BYTES;
    let keeps = match options.memory {
        MemoryMode::Fast => true,
        MemoryMode::Balanced => small && conv.rows() < TRANSFORM_ON_THE_FLY_ROWS,
        MemoryMode::Low => false,
    };
    if kept != Algorithm::Direct && keeps {
        return (kept, Keep::Packed);
    }
    match choose(conv, x, weight, Keep::PerCall) {
        Algorithm::Direct => plain,
        winograd => (winograd, Keep::PerCall),
    }
}

/// The cell of a weight set that keeps a form.
const fn form(algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::Direct => 0,
        Algorithm::Winograd2 => 1,
        Algorithm::Winograd4 => 2,
    }
}

impl ConvolutionCall {
    fn packed(&self, ctx: &Ctx<'_>) -> Result<ConvWeight> {
        let (slot, dtype, strides) = self.weight;
        let mut source = Weight { ptr: ctx.at(slot), dtype, strides };
        if let Some(tensor) = self.slot.and_then(|slot| ctx.weights.tensor(slot)) {
            let strides: Vec<isize> = tensor.strides.iter().map(|&s| s as isize).collect();
            source = Weight { ptr: tensor.ptr, dtype, strides: weight_strides(&strides) };
        }
        let pack = |to: *mut u8| {
            // SAFETY: the weight is valid by the caller's promise; `to` has the packed size in both cases below.
            unsafe { pack_weight(ctx.pool, ctx.isa, &self.conv, self.algorithm, &source, to) }.map_err(kernel_error)
        };
        let index = match self.kept {
            Kept::Pack(index) => index,
            Kept::Scratch(scratch) => return pack(ctx.at(scratch)),
        };
        let ptr = ctx.weights.pack(index, form(self.algorithm), &mut || {
            let bytes = weight_bytes(&self.conv, self.algorithm, dtype, ctx.isa);
            let block = SystemMemory.allocate(bytes, "a packed weight")?;
            pack(block.ptr())?;
            Ok(block)
        })?;
        Ok(ConvWeight::from_raw(ptr, &self.conv, self.algorithm, dtype, ctx.isa))
    }
}

impl Call for ConvolutionCall {
    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let weight = self.packed(ctx)?;
        let (x, dtype) = (ctx.at(self.x.0), self.x.1);
        self.epilogue.with(ctx, |epilogue| {
            // SAFETY: operands are valid by the caller's promise for the sizes of the step.
            unsafe { run(ctx.pool, ctx.isa, &self.conv, x, dtype, &weight, epilogue).map_err(kernel_error) }
        })
    }
}
