//! Convolutions over channels-last images.

use oxidiff_kernels::cpu::conv::{
    Conv, PackedWeight, Weight, conv, conv_unpacked, pack_conv_weight, pack_conv_weight_for, packs_while_used,
};
use oxidiff_kernels::cpu::conv_algorithm::{Algorithm, Keep, work_bytes};
use oxidiff_kernels::cpu::conv_choice::Observed;
use oxidiff_kernels::cpu::conv_winograd::{self, Image, Room, Work, conv_winograd};
use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::pool::Pool;

use super::epilogue::{EpilogueArgs, Shifted};
use super::kernel_error;
use super::packing::{Candidate, Chunks, convolution_candidates, form};
use super::product::float_type;
use super::read_through::{NormRows, Way};
use super::run::{Call, Ctx, Slot, whole_parameter};
use super::specialize::{Maker, Operand, Role, Through};
use crate::Result;
use crate::backend::tensor::{Memory, SystemMemory};
use crate::backend::{KeptForm, Open};
use crate::ir::Op;
use crate::plan::ConcreteAccess;

struct ConvolutionCall {
    conv: Conv,
    /// The image, or the ring for its rows.
    x: (Slot, KernelType),
    weight: (Slot, KernelType, [isize; 5]),
    /// The weight slot, if the weight is the whole of one: its strides are the tensor's own.
    slot: Option<usize>,
    form: Form,
    /// What makes the rows of `x` while it is read, in a ring.
    rows: Option<NormRows>,
    epilogue: EpilogueArgs,
}

/// How the weight is read.
enum Form {
    /// In panels that lie with the weight set.
    Kept(KeptForm),
    /// In panels in the arena, made anew by every run, chunk by chunk.
    Packed(Slot, Chunks),
    /// As it lies: tasks pack what they use.
    Unpacked,
    /// As it lies; the arena lends memory to work in.
    Winograd(Algorithm, Slot, Room),
}

/// Spatial values as (depth, height, width).
fn padded<T: Copy>(values: &[T], missing: T) -> [T; 3] {
    let mut all = [missing; 3];
    all[3 - values.len()..].copy_from_slice(values);
    all
}

/// Strides of a weight of one to three spatial dimensions as those of three.
pub fn weight_strides(strides: &[isize]) -> [isize; 5] {
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

/// A step's operands, sizes and element types, of the image and of the weight.
struct Layer {
    x: Operand,
    weight: Operand,
    conv: Conv,
    types: [KernelType; 2],
}

impl Layer {
    fn of(maker: &Maker<'_>) -> Result<Self> {
        let Ok([x, weight]) = <[Operand; 2]>::try_from(maker.operands()?) else {
            return maker.refuse("a convolution step has two operands");
        };
        let conv = shape(maker, &x.access, &weight.access)?;
        let types = [float_type(maker, &x)?, float_type(maker, &weight)?];
        Ok(Self { x, weight, conv, types })
    }
}

/// What the step could keep between runs.
pub(super) fn candidates(maker: &Maker<'_>) -> Result<Vec<Candidate>> {
    let Some(pack) = maker.step.pack else { return Ok(Vec::new()) };
    let Layer { conv, types: [x_type, weight_type], .. } = Layer::of(maker)?;
    Ok(convolution_candidates(maker.plan().options, pack, &conv, x_type, weight_type, maker.isa())
        .into_iter()
        .collect())
}

/// How the weight is going to be read, and bytes of scratch memory for that.
enum Choice {
    Kept(KeptForm),
    Packed(usize, Chunks),
    Unpacked,
    Winograd(Algorithm, usize),
}

fn choice(maker: &Maker<'_>, conv: &Conv, x_type: KernelType, weight_type: KernelType) -> Choice {
    if let Some(kept) = maker.keeps.of(maker.at) {
        return Choice::Kept(kept);
    }
    let algorithm = form(maker.plan().options, conv, x_type, weight_type, Keep::PerCall);
    let is_unpacked = packs_while_used(maker.isa(), conv, x_type, weight_type, Pool::global().threads());
    let image_bytes = work_bytes(conv, algorithm, maker.isa(), maker.room);
    let packed_bytes = |conv: Conv| conv.packed_bytes_for(x_type, weight_type, maker.isa());
    let chunks = Chunks::of_convolution(maker, conv, packed_bytes(*conv));
    let panel_bytes = packed_bytes(Conv { out_channels: chunks.step, ..*conv });
    // Where memory is short the form that needs less of it.
    if is_unpacked && (algorithm == Algorithm::Direct || maker.is_slim()) {
        Choice::Unpacked
    } else if algorithm == Algorithm::Direct || (maker.is_slim() && panel_bytes < image_bytes) {
        Choice::Packed(panel_bytes, chunks)
    } else {
        Choice::Winograd(algorithm, image_bytes)
    }
}

/// How the convolution takes an image that is made while it runs, if it does.
pub(super) fn way(maker: &Maker<'_>) -> Result<Option<Way>> {
    let Layer { conv, types: [x_type, weight_type], .. } = Layer::of(maker)?;
    let algorithm = form(maker.plan().options, &conv, x_type, weight_type, Keep::PerCall);
    if maker.keeps.of(maker.at).is_some() || algorithm == Algorithm::Direct {
        return Ok(None);
    }
    // Also where memory is short: a ring saves more than panels.
    let ring = conv_winograd::ring(&conv, algorithm.tile(), maker.isa(), maker.room);
    Ok(ring.map(|ring| Way { algorithm, ring }))
}

pub(super) fn make(maker: &mut Maker<'_>) -> Result<Box<dyn Call>> {
    let Layer { x, weight, conv, types: [x_type, weight_type] } = Layer::of(maker)?;
    let role = maker.role;
    let choice = match role {
        Role::Reads(Through { way: Way { algorithm, .. }, .. }) => {
            Choice::Winograd(algorithm, work_bytes(&conv, algorithm, maker.isa(), maker.room))
        }
        _ => choice(maker, &conv, x_type, weight_type),
    };
    let form = match choice {
        Choice::Kept(kept) => Form::Kept(kept),
        Choice::Packed(bytes, chunks) => Form::Packed(maker.scratch(bytes, "packed weight"), chunks),
        Choice::Unpacked => Form::Unpacked,
        Choice::Winograd(algorithm, bytes) => {
            Form::Winograd(algorithm, maker.scratch(bytes, "transformed image"), maker.room)
        }
    };
    let (x, rows) = match role {
        Role::Reads(Through { norm, body, way }) => {
            let bytes = way.ring.elements() * x_type.size_bytes();
            (maker.scratch(bytes, "rows of a norm"), Some(NormRows::new(maker, norm, body, way.ring)?))
        }
        _ => (x.slot, None),
    };
    let slot = whole_parameter(maker.plan(), &maker.step.operands[1]);
    let weight = (weight.slot, weight_type, weight_strides(&weight.access.strides));
    let epilogue = EpilogueArgs::new(maker)?;
    Ok(Box::new(ConvolutionCall { conv, x: (x, x_type), weight, slot, form, rows, epilogue }))
}

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
}

impl Call for ConvolutionCall {
    fn convolution(&self) -> Option<Open> {
        let observed = Observed { conv: self.conv, dtype: self.x.1, weight: self.weight.1 };
        Some(Open { observed, is_kept: matches!(self.form, Form::Kept(_)), slot: self.slot })
    }

    fn products(&self) -> f64 {
        match self.form {
            Form::Winograd(algorithm, ..) => algorithm.products(),
            _ => 1.0,
        }
    }

    unsafe fn run(&self, ctx: &Ctx<'_>) -> Result<()> {
        let (source, dtype) = (self.source(ctx), self.weight.1);
        let (x, x_type) = (ctx.at(self.x.0), self.x.1);
        self.epilogue.with(ctx, |epilogue| match self.form {
            Form::Kept(kept) => {
                let form = ctx.weights.pack(kept.pack, &mut || {
                    let block = SystemMemory.allocate(kept.bytes, "a packed weight")?;
                    // SAFETY: the weight is valid by the caller's promise, the block as large as its panels.
                    unsafe { pack_conv_weight(ctx.pool, ctx.isa, &self.conv, &source, block.ptr()) };
                    Ok(block)
                })?;
                let weight = PackedWeight::from_raw(form.ptr(), dtype, &self.conv, ctx.isa);
                // SAFETY: operands are valid by the caller's promise, `form` holds the panels.
                unsafe { conv(ctx.pool, ctx.isa, &self.conv, x, x_type, &weight, epilogue).map_err(kernel_error) }
            }
            Form::Unpacked => {
                // SAFETY: operands are valid by the caller's promise.
                unsafe {
                    conv_unpacked(ctx.pool, ctx.isa, &self.conv, x, x_type, &source, epilogue).map_err(kernel_error)
                }
            }
            Form::Winograd(algorithm, work, room) => {
                let work = Work { ptr: ctx.at(work), room };
                let x = Image::from((x.cast_const(), x_type));
                let convolve = |x: Image| {
                    let tile = algorithm.tile();
                    // SAFETY: operands are valid by the caller's promise, those of a norm as well; the scratch memory is this
                    // step's.
                    unsafe { conv_winograd(ctx.pool, ctx.isa, &self.conv, x, &source, tile, work, epilogue) }
                };
                match &self.rows {
                    None => convolve(x),
                    Some(rows) => rows.with(ctx, |made| convolve(Image { made: Some(made), ..x })),
                }
                .map_err(kernel_error)
            }
            Form::Packed(scratch, chunks) => chunks.iter().try_for_each(|(first, count)| {
                let chunk = Conv { out_channels: count, ..self.conv };
                let from = first as isize * source.strides[0] * dtype.size_bytes() as isize;
                let source = Weight { ptr: source.ptr.wrapping_offset(from), ..source };
                let epilogue = Shifted { inner: epilogue, rows: 0, cols: first };
                // SAFETY: operands are valid by the caller's promise; the scratch memory holds the chunk's panels.
                unsafe {
                    let to = ctx.at(scratch);
                    let panels = pack_conv_weight_for(ctx.pool, ctx.isa, &chunk, x_type, &source, to);
                    let panels = panels.map_err(kernel_error)?;
                    conv(ctx.pool, ctx.isa, &chunk, x, x_type, &panels, &epilogue).map_err(kernel_error)
                }
            }),
        })
    }
}
