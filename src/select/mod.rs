//! Which kernel family each group gets, and what that family asks of its operands' layout.
//!
//! The tuner will choose among candidates here; for now there is one family per kind of group, and the interpreter where
//! no kernel has the group's element types.

use oxidiff_kernels::tile::MAX_DIMS;

use crate::codegen::tile::kernel_type;
use crate::codegen::{RootForm, TileBody, lower_integers};
use crate::ir::{DType, Graph, Op, ValueId};
use crate::kernel_ir::{Group, GroupKind};

/// A kernel family: what one step of a plan runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Moves elements from one strided place to another.
    Copy,
    /// A tile program over a space.
    Loop,
    /// Pointwise work on integers.
    Integers,
    /// `x [rows, K]` times a weight `[N, K]`.
    Linear,
    /// Products of pairs of matrices.
    Matmul,
    /// Convolution over channels-last images.
    Convolution,
    /// Scaled dot product attention.
    Attention,
    /// Group normalisation over channels-last images.
    GroupNorm,
    /// Layer normalisation.
    LayerNorm,
    /// RMS normalisation.
    RmsNorm,
    /// Softmax over the last dimension.
    Softmax,
    /// Rows or elements picked by index.
    Gather,
    /// Nearest-neighbour resampling.
    Upsample,
    /// Sums of a few places along a dimension.
    Interpolate,
    /// Reduction over neighbouring dimensions.
    Reduce,
    /// Cumulative sums.
    Scan,
    /// A copy into the middle of a constant.
    Pad,
    /// The interpreter, node by node: correct for everything, fast for nothing.
    Interpret,
}

impl Kernel {
    /// Name in plans and profiles.
    pub const fn name(self) -> &'static str {
        match self {
            Kernel::Copy => "copy",
            Kernel::Loop => "loop",
            Kernel::Integers => "integers",
            Kernel::Linear => "linear",
            Kernel::Matmul => "matmul",
            Kernel::Convolution => "convolution",
            Kernel::Attention => "attention",
            Kernel::GroupNorm => "group_norm",
            Kernel::LayerNorm => "layer_norm",
            Kernel::RmsNorm => "rms_norm",
            Kernel::Softmax => "softmax",
            Kernel::Gather => "gather",
            Kernel::Upsample => "upsample",
            Kernel::Interpolate => "interpolate",
            Kernel::Reduce => "reduce",
            Kernel::Scan => "scan",
            Kernel::Pad => "pad",
            Kernel::Interpret => "interpret",
        }
    }
}

/// What a kernel asks of the place of an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Any strides.
    Any,
    /// Neighbours along the last dimension are neighbours in memory.
    UnitColumns,
    /// Unit columns, and all dimensions between the first and the last walk with one stride.
    Rows,
    /// Unit columns, and all dimensions before the last walk with one stride.
    Matrix,
}

/// The layout a kernel asks of operand `index` of its root.
pub fn operand_layout(kernel: Kernel, index: usize) -> Layout {
    match (kernel, index) {
        (Kernel::Softmax, 0) => Layout::Matrix,
        (Kernel::Linear | Kernel::GroupNorm, 0) => Layout::Rows,
        (Kernel::Matmul | Kernel::Convolution | Kernel::LayerNorm | Kernel::RmsNorm, 0) => Layout::UnitColumns,
        (Kernel::Attention, 0..=2) => Layout::UnitColumns,
        _ => Layout::Any,
    }
}

const fn is_kernel_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// How the body of `group` gets the result of the group's root.
pub fn root_form(graph: &Graph, group: &Group) -> RootForm {
    let Some(root) = group.root else { return RootForm::None };
    let inputs = &graph.node(root).inputs;
    match graph.op(root) {
        Op::Linear | Op::Convolution { .. } => RootForm::Accumulator { bias: inputs.get(2).copied() },
        Op::Matmul => RootForm::Accumulator { bias: None },
        Op::GroupNorm { .. } => RootForm::GroupNorm { x: inputs[0] },
        Op::LayerNorm { normalized_ndim: 1, .. } => RootForm::RowNorm {
            x: inputs[0],
            centred: true,
            weight: inputs.get(1).copied(),
            bias: inputs.get(2).copied(),
        },
        Op::RmsNorm { normalized_ndim: 1, .. } => {
            RootForm::RowNorm { x: inputs[0], centred: false, weight: inputs.get(1).copied(), bias: None }
        }
        _ => RootForm::Memory,
    }
}

/// The family that runs `group`, given its lowered body (`None` where it has no exact tile program).
pub fn select(graph: &Graph, group: &Group, body: Option<&TileBody>) -> Kernel {
    if let (GroupKind::Direct, Some(root)) = (group.kind, group.root) {
        return select_direct(graph, root);
    }
    let rank = group.root.map_or(group.body.space.len(), |root| graph.ty(root).rank());
    if rank > MAX_DIMS {
        return Kernel::Interpret;
    }
    if body.is_none() {
        let is_loop = group.kind == GroupKind::Loop;
        let has_loop =
            is_loop && lower_integers(graph, &group.nodes, &integer_reads(graph, group), &group.results()).is_some();
        return if has_loop { Kernel::Integers } else { Kernel::Interpret };
    }
    match (group.kind, group.root) {
        (GroupKind::Loop, _) => Kernel::Loop,
        (GroupKind::Contraction | GroupKind::Norm, Some(root)) => select_root(graph, root),
        _ => Kernel::Interpret,
    }
}

/// What a loop over integers reads from memory: scalars are constants of its program.
pub fn integer_reads(graph: &Graph, group: &Group) -> Vec<ValueId> {
    let mut reads = group.outside_reads(graph);
    reads.retain(|v| graph.as_scalar(*v).is_none());
    reads
}

fn select_root(graph: &Graph, root: ValueId) -> Kernel {
    let node = graph.node(root);
    let floats = |count: usize| node.inputs.iter().take(count).all(|&v| is_kernel_float(graph.ty(v).dtype));
    if !is_kernel_float(node.ty.dtype) {
        return Kernel::Interpret;
    }
    match &node.op {
        Op::Linear if floats(3) => Kernel::Linear,
        Op::Matmul if floats(2) && node.inputs.iter().all(|&v| graph.ty(v).rank() >= 2) => Kernel::Matmul,
        Op::Convolution { stride, .. } if floats(3) && (1..=3).contains(&stride.len()) => Kernel::Convolution,
        Op::ScaledDotProductAttention { .. } if floats(3) => Kernel::Attention,
        Op::GroupNorm { .. } if floats(3) && node.ty.rank() >= 2 => Kernel::GroupNorm,
        Op::LayerNorm { normalized_ndim: 1, .. } if floats(3) => Kernel::LayerNorm,
        Op::RmsNorm { normalized_ndim: 1, .. } if floats(2) => Kernel::RmsNorm,
        Op::Softmax { dim } if floats(1) && dim + 1 == node.ty.rank() => Kernel::Softmax,
        _ => Kernel::Interpret,
    }
}

/// Direct kernels look at strides when they are specialized, and leave what they cannot do to the interpreter.
fn select_direct(graph: &Graph, root: ValueId) -> Kernel {
    let node = graph.node(root);
    let known = |v: &ValueId| kernel_type(graph.ty(*v).dtype).is_some();
    if !node.inputs.iter().all(known) || !known(&root) {
        return Kernel::Interpret;
    }
    match &node.op {
        Op::IndexSelect { .. } | Op::Gather { .. } => Kernel::Gather,
        Op::UpsampleNearest { scales, .. } if scales.len() <= 3 => Kernel::Upsample,
        Op::Interpolate { .. } if is_kernel_float(node.ty.dtype) => Kernel::Interpolate,
        Op::Reduce { .. } => Kernel::Reduce,
        Op::Cumsum { .. } => Kernel::Scan,
        Op::Pad { .. } => Kernel::Pad,
        _ => Kernel::Interpret,
    }
}
