//! The op set: a small closed set of plainly named enums.
//!
//! **Meaning of arithmetic.** Every value has one dtype. Pointwise arithmetic converts its operands to the *compute type* of
//! the result ([`DType::compute`]: f32 for 16-bit floats and f32, f64 for f64, i64 for integers and bool), computes there
//! and rounds once to the result's dtype. Operands may have different dtypes and broadcast like NumPy (trailing
//! dimensions aligned, 1 stretches). Comparisons have a bool result and compute in f64 if any operand is f64, in f32 if any
//! is another float, else in i64. A Python number is a 0-d `full` of dtype f64 or i64: it keeps its precision until the
//! op converts it, as in PyTorch. Integer overflow wraps; float to integer conversion truncates and saturates; integer
//! division by zero is an error at run time, float division follows IEEE.
//!
//! **Meaning of contractions and norms.** Products and sums in f32 (f64 for f64), rounded once to the result's dtype. The
//! order of a sum is not specified.
//!
//! Every op is pure and has one result. What `ir/interp` computes is the definition; names are ATen's, StableHLO's where
//! ATen has none.

use super::dim::Dim;
use super::dtype::DType;
use crate::error::{Error, Result};

macro_rules! named_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident = $text:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)]
        pub enum $name { $($(#[$vdoc])* $variant),* }

        impl $name {
            /// Every variant.
            pub const ALL: &'static [$name] = &[$($name::$variant),*];
            /// Text form.
            pub const fn name(self) -> &'static str { match self { $($name::$variant => $text),* } }
            /// The variant of that text form.
            pub fn from_name(name: &str) -> Option<Self> { match name { $($text => Some($name::$variant),)* _ => None } }
        }
    };
}

named_enum! {
    /// Pointwise ops of one operand.
    UnaryOp {
        Neg = "neg", Abs = "abs", Sign = "sign", Exp = "exp", Log = "log",
        /// Exact for powers of two.
        Log2 = "log2",
        /// Exact for powers of ten.
        Log10 = "log10",
        Sin = "sin", Cos = "cos", Tanh = "tanh",
        Sqrt = "sqrt", Rsqrt = "rsqrt", Reciprocal = "reciprocal", Sigmoid = "sigmoid", Silu = "silu",
        /// Exact: `0.5 x (1 + erf(x / sqrt 2))`.
        Gelu = "gelu",
        /// The tanh approximation.
        GeluTanh = "gelu_tanh",
        Relu = "relu", Erf = "erf",
        /// `log(1 + exp x)`, x itself above 20.
        Softplus = "softplus", Floor = "floor", Ceil = "ceil",
        /// Half to even.
        Round = "round", Trunc = "trunc",
        /// Bool result.
        LogicalNot = "logical_not",
        /// Integers; on bool the same as `logical_not`.
        BitwiseNot = "bitwise_not",
        /// Bool result.
        Isnan = "isnan",
        /// Bool result.
        Isinf = "isinf",
        /// Of the pairs in the last dimension, the second one negated, then the first. No element by itself.
        RotatePairs = "rotate_pairs",
    }
}

named_enum! {
    /// Pointwise ops of two operands. Comparisons and logical ops have a bool result.
    BinaryOp {
        Add = "add", Sub = "sub", Mul = "mul",
        /// True division.
        Div = "div",
        FloorDivide = "floor_divide",
        /// Python's sign rule: the result has the divisor's sign.
        Remainder = "remainder",
        Pow = "pow",
        /// NaN if either operand is.
        Maximum = "maximum",
        /// NaN if either operand is.
        Minimum = "minimum",
        Atan2 = "atan2",
        Eq = "eq", Ne = "ne", Lt = "lt", Le = "le", Gt = "gt", Ge = "ge",
        LogicalAnd = "logical_and", LogicalOr = "logical_or", LogicalXor = "logical_xor",
        BitwiseAnd = "bitwise_and", BitwiseOr = "bitwise_or", BitwiseXor = "bitwise_xor",
        /// 0 where the type has not so many bits, or the number of bits is negative.
        BitwiseLeftShift = "bitwise_left_shift",
        /// The sign where the type has not so many bits, or the number of bits is negative.
        BitwiseRightShift = "bitwise_right_shift",
    }
}

impl BinaryOp {
    /// Compares or combines truth values: the result is bool.
    pub const fn is_predicate(self) -> bool {
        matches!(
            self,
            BinaryOp::Eq
                | BinaryOp::Ne
                | BinaryOp::Lt
                | BinaryOp::Le
                | BinaryOp::Gt
                | BinaryOp::Ge
                | BinaryOp::LogicalAnd
                | BinaryOp::LogicalOr
                | BinaryOp::LogicalXor
        )
    }
}

impl UnaryOp {
    /// The result is bool.
    pub const fn is_predicate(self) -> bool {
        matches!(self, UnaryOp::LogicalNot | UnaryOp::Isnan | UnaryOp::Isinf)
    }
}

named_enum! {
    /// Reductions over dimensions. `argmax` and `argmin` reduce exactly one dimension, give i64 and the first of equals. NaN
    /// is the largest and the smallest.
    ReduceOp {
        Sum = "sum", Mean = "mean", Amax = "amax", Amin = "amin", Prod = "prod", Any = "any", All = "all",
        Argmax = "argmax", Argmin = "argmin",
    }
}

named_enum! {
    /// Window reductions.
    PoolOp { Avg = "avg_pool", Max = "max_pool" }
}

/// What a node computes. Attribute names are PyTorch's; `dim`s are non-negative.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs, reason = "attributes have PyTorch's names and meaning where the variant says nothing else")]
pub enum Op {
    // -- sources: no operands ------------------------------------------------------------------------------------------
    /// Argument `index` of the call ([`super::Graph::inputs`]).
    Input { index: u32 },
    /// Weight slot `index` ([`super::Graph::parameters`]).
    Parameter { index: u32 },
    /// Constant `index` ([`super::Graph::constants`]).
    Constant { index: u32 },
    /// Every element is `value`, converted to the result's dtype.
    Full { value: f64 },
    /// A size as a 0-d or broadcast i64 (or, converted, float) value.
    SizeOf { size: Dim },
    /// 1-D `start + i * step`.
    Arange { start: Dim, step: Dim },

    // -- pointwise -----------------------------------------------------------------------------------------------------
    /// One operand.
    Unary(UnaryOp),
    /// Two operands.
    Binary(BinaryOp),
    /// `(condition, x, y)`: x where condition is not 0, else y.
    Where,
    /// To the result's dtype.
    Convert,

    // -- movement ------------------------------------------------------------------------------------------------------
    /// Same elements in row-major order, other shape.
    Reshape,
    /// `result.shape[i] = x.shape[dims[i]]`.
    Permute { dims: Vec<usize> },
    /// Broadcast to the result's shape: trailing dimensions aligned, 1 stretches, new leading ones.
    Expand,
    /// `x[start : start + len * step : step]` along `dim`, `len` being the result's size.
    Slice { dim: usize, start: Dim, step: i64 },
    /// Concatenation of all operands along `dim`.
    Cat { dim: usize },
    /// Constant padding; `before[i]`, and after it what the result's shape says. Not negative.
    Pad { before: Vec<Dim>, value: f64 },
    /// `(x, source)`: x with `x[start : start + len * step : step]` along `dim` replaced by source.
    SliceScatter { dim: usize, start: Dim, step: i64 },
    /// Reverses the order along `dims`.
    Flip { dims: Vec<usize> },

    // -- gather --------------------------------------------------------------------------------------------------------
    /// `(x, index)`: rows of x along `dim` chosen by an integer tensor of any rank, which takes the place of `dim`. An index
    /// below 0 or past the end is an error at run time.
    IndexSelect { dim: usize },
    /// `(x, index)`: aten.gather, index of the result's shape; out of range is an error as in `index_select`.
    Gather { dim: usize },
    /// `(x, index [J, K], weight [J, K])`: place j along `dim` is the sum over k of `weight[j, k]` times place `index[j, k]` of
    /// x, added up in the compute type; out of range is an error as in `index_select`.
    Interpolate { dim: usize },

    // -- reductions ----------------------------------------------------------------------------------------------------
    /// Over `dims`, which stay as size 1 if `keepdim`.
    Reduce { op: ReduceOp, dims: Vec<usize>, keepdim: bool },
    /// Inclusive running sum.
    Cumsum { dim: usize },
    /// `exp(x - max) / sum` along `dim`.
    Softmax { dim: usize },

    // -- contractions --------------------------------------------------------------------------------------------------
    /// `(x [..., K], weight [N, K], bias [N]?)`.
    Linear,
    /// `(a [..., M, K], b [..., K, N])`, batch dimensions broadcast.
    Matmul,
    /// `(x, weight [O, I/groups, *kernel], bias [O]?)`. x is `[N, I, *spatial]`, or `[N, *spatial, I]` if `channels_last`,
    /// and so is the result; `padding` is on both sides.
    Convolution { stride: Vec<i64>, padding: Vec<i64>, dilation: Vec<i64>, groups: i64, channels_last: bool },
    /// `(query [..., L, E], key [..., S, E], value [..., S, Ev], mask?)`, batch dimensions broadcast; a bool mask lets
    /// attend where true, a float mask is added. `scale` multiplies the products; `is_causal` lets row i attend to columns
    /// 0 to i. A row that may attend to nothing gives 0.
    ScaledDotProductAttention { is_causal: bool, scale: f64 },

    // -- norms ---------------------------------------------------------------------------------------------------------
    /// `(x, weight [C]?, bias [C]?)` (both or none); C is dimension `channel_dim`, dimension 0 is the batch.
    GroupNorm { num_groups: i64, eps: f64, channel_dim: usize },
    /// `(x, weight?, bias?)` over the last `normalized_ndim` dimensions. One operand more than x is the weight.
    LayerNorm { normalized_ndim: usize, eps: f64 },
    /// `(x, weight?)` over the last `normalized_ndim` dimensions: `x * rsqrt(mean(x^2) + eps) * weight`, or with `floor`
    /// `x / max(sqrt(mean(x^2)), eps) * weight`. The text form names `floor` where it is true.
    RmsNorm { normalized_ndim: usize, eps: f64, floor: bool },

    // -- windows -------------------------------------------------------------------------------------------------------
    /// Nearest neighbour over the `scales.len()` dimensions from `first_dim`. Source index of output `i`:
    /// `min(floor(i * ratio), size - 1)`, `ratio = 1 / scale` if the scale is positive, else input size / output size
    /// (f32 arithmetic, as ATen). `exact` adds the half pixel of `nearest-exact`.
    UpsampleNearest { first_dim: usize, scales: Vec<f64>, exact: bool },
    /// Windows over the `kernel.len()` dimensions from `first_dim`; average counts padding if `count_include_pad`.
    Pool {
        op: PoolOp,
        first_dim: usize,
        kernel: Vec<i64>,
        stride: Vec<i64>,
        padding: Vec<i64>,
        count_include_pad: bool,
    },
}

/// An attribute value, the common currency of printer, parser and builder.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Attr {
    Bool(bool),
    Float(f64),
    Floats(Vec<f64>),
    Dim(Dim),
    Dims(Vec<Dim>),
}

impl Attr {
    fn int(v: usize) -> Self {
        Attr::Dim(Dim::constant(v as i64))
    }
    fn ints<T: Copy + Into<i64>>(v: &[T]) -> Self {
        Attr::Dims(v.iter().map(|&i| Dim::constant(i.into())).collect())
    }
    fn indices(v: &[usize]) -> Self {
        Attr::Dims(v.iter().map(|&i| Dim::constant(i as i64)).collect())
    }
}

impl Op {
    /// Text form, without attributes.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Input { .. } => "input",
            Op::Parameter { .. } => "parameter",
            Op::Constant { .. } => "constant",
            Op::Full { .. } => "full",
            Op::SizeOf { .. } => "size_of",
            Op::Arange { .. } => "arange",
            Op::Unary(op) => op.name(),
            Op::Binary(op) => op.name(),
            Op::Where => "where",
            Op::Convert => "convert",
            Op::Reshape => "reshape",
            Op::Permute { .. } => "permute",
            Op::Expand => "expand",
            Op::Slice { .. } => "slice",
            Op::Cat { .. } => "cat",
            Op::Pad { .. } => "pad",
            Op::SliceScatter { .. } => "slice_scatter",
            Op::Flip { .. } => "flip",
            Op::IndexSelect { .. } => "index_select",
            Op::Gather { .. } => "gather",
            Op::Interpolate { .. } => "interpolate",
            Op::Reduce { op, .. } => op.name(),
            Op::Cumsum { .. } => "cumsum",
            Op::Softmax { .. } => "softmax",
            Op::Linear => "linear",
            Op::Matmul => "matmul",
            Op::Convolution { .. } => "convolution",
            Op::ScaledDotProductAttention { .. } => "scaled_dot_product_attention",
            Op::GroupNorm { .. } => "group_norm",
            Op::LayerNorm { .. } => "layer_norm",
            Op::RmsNorm { .. } => "rms_norm",
            Op::UpsampleNearest { .. } => "upsample_nearest",
            Op::Pool { op, .. } => op.name(),
        }
    }

    /// Attributes in printing order.
    pub fn attributes(&self) -> Vec<(&'static str, Attr)> {
        match self {
            Op::Input { index } | Op::Parameter { index } | Op::Constant { index } => {
                vec![("index", Attr::int(*index as usize))]
            }
            Op::Full { value } => vec![("value", Attr::Float(*value))],
            Op::SizeOf { size } => vec![("size", Attr::Dim(size.clone()))],
            Op::Arange { start, step } => vec![("start", Attr::Dim(start.clone())), ("step", Attr::Dim(step.clone()))],
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Where
            | Op::Convert
            | Op::Reshape
            | Op::Expand
            | Op::Linear
            | Op::Matmul => Vec::new(),
            Op::Permute { dims } | Op::Flip { dims } => vec![("dims", Attr::indices(dims))],
            Op::Slice { dim, start, step } | Op::SliceScatter { dim, start, step } => vec![
                ("dim", Attr::int(*dim)),
                ("start", Attr::Dim(start.clone())),
                ("step", Attr::Dim(Dim::constant(*step))),
            ],
            Op::Cat { dim }
            | Op::IndexSelect { dim }
            | Op::Gather { dim }
            | Op::Interpolate { dim }
            | Op::Cumsum { dim }
            | Op::Softmax { dim } => vec![("dim", Attr::int(*dim))],
            Op::Pad { before, value } => vec![("before", Attr::Dims(before.clone())), ("value", Attr::Float(*value))],
            Op::Reduce { dims, keepdim, .. } => {
                vec![("dims", Attr::indices(dims)), ("keepdim", Attr::Bool(*keepdim))]
            }
            Op::Convolution { stride, padding, dilation, groups, channels_last } => vec![
                ("stride", Attr::ints(stride)),
                ("padding", Attr::ints(padding)),
                ("dilation", Attr::ints(dilation)),
                ("groups", Attr::Dim(Dim::constant(*groups))),
                ("channels_last", Attr::Bool(*channels_last)),
            ],
            Op::ScaledDotProductAttention { is_causal, scale } => {
                vec![("is_causal", Attr::Bool(*is_causal)), ("scale", Attr::Float(*scale))]
            }
            Op::GroupNorm { num_groups, eps, channel_dim } => vec![
                ("num_groups", Attr::Dim(Dim::constant(*num_groups))),
                ("eps", Attr::Float(*eps)),
                ("channel_dim", Attr::int(*channel_dim)),
            ],
            Op::LayerNorm { normalized_ndim, eps } | Op::RmsNorm { normalized_ndim, eps, floor: false } => {
                vec![("normalized_ndim", Attr::int(*normalized_ndim)), ("eps", Attr::Float(*eps))]
            }
            Op::RmsNorm { normalized_ndim, eps, floor: true } => vec![
                ("normalized_ndim", Attr::int(*normalized_ndim)),
                ("eps", Attr::Float(*eps)),
                ("floor", Attr::Bool(true)),
            ],
            Op::UpsampleNearest { first_dim, scales, exact } => vec![
                ("first_dim", Attr::int(*first_dim)),
                ("scales", Attr::Floats(scales.clone())),
                ("exact", Attr::Bool(*exact)),
            ],
            Op::Pool { first_dim, kernel, stride, padding, count_include_pad, .. } => vec![
                ("first_dim", Attr::int(*first_dim)),
                ("kernel", Attr::ints(kernel)),
                ("stride", Attr::ints(stride)),
                ("padding", Attr::ints(padding)),
                ("count_include_pad", Attr::Bool(*count_include_pad)),
            ],
        }
    }

    /// The op of that text form and those attributes: the inverse of [`Op::name`] and [`Op::attributes`].
    ///
    /// # Errors
    /// If the name is unknown, or an attribute is missing, of the wrong kind or unknown.
    pub fn from_parts(name: &str, attributes: Vec<(String, Attr)>) -> Result<Op> {
        let mut a = Attributes { op: name.to_owned(), rest: attributes };
        let op = match name {
            "input" => Op::Input { index: a.index("index")? as u32 },
            "parameter" => Op::Parameter { index: a.index("index")? as u32 },
            "constant" => Op::Constant { index: a.index("index")? as u32 },
            "full" => Op::Full { value: a.float("value")? },
            "size_of" => Op::SizeOf { size: a.dim("size")? },
            "arange" => Op::Arange { start: a.dim("start")?, step: a.dim("step")? },
            "where" => Op::Where,
            "convert" => Op::Convert,
            "reshape" => Op::Reshape,
            "permute" => Op::Permute { dims: a.indices("dims")? },
            "expand" => Op::Expand,
            "slice" => Op::Slice { dim: a.index("dim")?, start: a.dim("start")?, step: a.int("step")? },
            "cat" => Op::Cat { dim: a.index("dim")? },
            "pad" => Op::Pad { before: a.dims("before")?, value: a.float("value")? },
            "slice_scatter" => Op::SliceScatter { dim: a.index("dim")?, start: a.dim("start")?, step: a.int("step")? },
            "flip" => Op::Flip { dims: a.indices("dims")? },
            "index_select" => Op::IndexSelect { dim: a.index("dim")? },
            "gather" => Op::Gather { dim: a.index("dim")? },
            "interpolate" => Op::Interpolate { dim: a.index("dim")? },
            "cumsum" => Op::Cumsum { dim: a.index("dim")? },
            "softmax" => Op::Softmax { dim: a.index("dim")? },
            "linear" => Op::Linear,
            "matmul" => Op::Matmul,
            "convolution" => Op::Convolution {
                stride: a.ints("stride")?,
                padding: a.ints("padding")?,
                dilation: a.ints("dilation")?,
                groups: a.int("groups")?,
                channels_last: a.bool("channels_last")?,
            },
            "scaled_dot_product_attention" => {
                Op::ScaledDotProductAttention { is_causal: a.bool("is_causal")?, scale: a.float("scale")? }
            }
            "group_norm" => Op::GroupNorm {
                num_groups: a.int("num_groups")?,
                eps: a.float("eps")?,
                channel_dim: a.index("channel_dim")?,
            },
            "layer_norm" => Op::LayerNorm { normalized_ndim: a.index("normalized_ndim")?, eps: a.float("eps")? },
            "rms_norm" => Op::RmsNorm {
                normalized_ndim: a.index("normalized_ndim")?,
                eps: a.float("eps")?,
                floor: a.flag("floor")?,
            },
            "upsample_nearest" => Op::UpsampleNearest {
                first_dim: a.index("first_dim")?,
                scales: a.floats("scales")?,
                exact: a.bool("exact")?,
            },
            other => match (
                UnaryOp::from_name(other),
                BinaryOp::from_name(other),
                ReduceOp::from_name(other),
                PoolOp::from_name(other),
            ) {
                (Some(op), ..) => Op::Unary(op),
                (_, Some(op), ..) => Op::Binary(op),
                (_, _, Some(op), _) => Op::Reduce { op, dims: a.indices("dims")?, keepdim: a.bool("keepdim")? },
                (.., Some(op)) => Op::Pool {
                    op,
                    first_dim: a.index("first_dim")?,
                    kernel: a.ints("kernel")?,
                    stride: a.ints("stride")?,
                    padding: a.ints("padding")?,
                    count_include_pad: a.bool("count_include_pad")?,
                },
                _ => return Err(Error::invalid(format!("unknown op `{other}`"))),
            },
        };
        match a.rest.first() {
            Some((key, _)) => Err(Error::invalid(format!("`{name}` has no attribute `{key}`"))),
            None => Ok(op),
        }
    }

    /// No operands: inputs, parameters, constants and values made from sizes alone.
    pub fn is_source(&self) -> bool {
        matches!(
            self,
            Op::Input { .. }
                | Op::Parameter { .. }
                | Op::Constant { .. }
                | Op::Full { .. }
                | Op::SizeOf { .. }
                | Op::Arange { .. }
        )
    }

    /// One element of the result depends on one element of each operand (after broadcasting).
    pub fn is_pointwise(&self) -> bool {
        match self {
            Op::Unary(op) => *op != UnaryOp::RotatePairs,
            Op::Binary(_) | Op::Where | Op::Convert => true,
            _ => false,
        }
    }

    /// The result can be a strided view of its operand (`reshape` only where strides allow).
    pub fn is_view(&self) -> bool {
        matches!(self, Op::Reshape | Op::Permute { .. } | Op::Expand | Op::Slice { .. })
    }

    /// Reduces products: the ops that take most of the time.
    pub fn is_contraction(&self) -> bool {
        matches!(self, Op::Linear | Op::Matmul | Op::Convolution { .. } | Op::ScaledDotProductAttention { .. })
    }
}

/// Attributes being taken apart by [`Op::from_parts`].
struct Attributes {
    op: String,
    rest: Vec<(String, Attr)>,
}

impl Attributes {
    fn take(&mut self, key: &str) -> Result<Attr> {
        match self.rest.iter().position(|(k, _)| k == key) {
            Some(at) => Ok(self.rest.remove(at).1),
            None => Err(Error::invalid(format!("`{}` needs the attribute `{key}`", self.op))),
        }
    }

    fn wrong(&self, key: &str, want: &str) -> Error {
        Error::invalid(format!("attribute `{key}` of `{}` must be {want}", self.op))
    }

    fn bool(&mut self, key: &str) -> Result<bool> {
        match self.take(key)? {
            Attr::Bool(v) => Ok(v),
            _ => Err(self.wrong(key, "a bool")),
        }
    }

    /// False where it is not named.
    fn flag(&mut self, key: &str) -> Result<bool> {
        if self.rest.iter().any(|(name, _)| *name == key) { self.bool(key) } else { Ok(false) }
    }

    fn float(&mut self, key: &str) -> Result<f64> {
        match self.take(key)? {
            Attr::Float(v) => Ok(v),
            Attr::Dim(d) if d.as_constant().is_some() => Ok(d.as_constant().map_or(0.0, |c| c as f64)),
            _ => Err(self.wrong(key, "a number")),
        }
    }

    fn floats(&mut self, key: &str) -> Result<Vec<f64>> {
        match self.take(key)? {
            Attr::Floats(v) => Ok(v),
            Attr::Dims(v) => {
                let ints: Option<Vec<i64>> = v.iter().map(Dim::as_constant).collect();
                Ok(ints.ok_or_else(|| self.wrong(key, "a list of numbers"))?.into_iter().map(|i| i as f64).collect())
            }
            _ => Err(self.wrong(key, "a list of numbers")),
        }
    }

    fn dim(&mut self, key: &str) -> Result<Dim> {
        match self.take(key)? {
            Attr::Dim(d) => Ok(d),
            _ => Err(self.wrong(key, "a size expression")),
        }
    }

    fn dims(&mut self, key: &str) -> Result<Vec<Dim>> {
        match self.take(key)? {
            Attr::Dims(d) => Ok(d),
            Attr::Floats(v) if v.is_empty() => Ok(Vec::new()),
            _ => Err(self.wrong(key, "a list of size expressions")),
        }
    }

    fn int(&mut self, key: &str) -> Result<i64> {
        let dim = self.dim(key)?;
        dim.as_constant().ok_or_else(|| self.wrong(key, "an integer"))
    }

    fn ints(&mut self, key: &str) -> Result<Vec<i64>> {
        let dims = self.dims(key)?;
        let ints: Option<Vec<i64>> = dims.iter().map(Dim::as_constant).collect();
        ints.ok_or_else(|| self.wrong(key, "a list of integers"))
    }

    fn index(&mut self, key: &str) -> Result<usize> {
        usize::try_from(self.int(key)?).map_err(|_| self.wrong(key, "a non-negative integer"))
    }

    fn indices(&mut self, key: &str) -> Result<Vec<usize>> {
        let ints = self.ints(key)?;
        ints.into_iter()
            .map(|i| usize::try_from(i).map_err(|_| self.wrong(key, "a list of non-negative integers")))
            .collect()
    }
}

/// Dtype and shape of a value. Values are dense and row-major; strided views are a matter of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ValueType {
    /// Element type.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub shape: Vec<Dim>,
}

impl ValueType {
    /// From its parts.
    pub fn new(dtype: DType, shape: Vec<Dim>) -> Self {
        Self { dtype, shape }
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Number of elements.
    pub fn numel(&self) -> Dim {
        Dim::product(&self.shape)
    }

    /// The sizes under `bindings`.
    ///
    /// # Errors
    /// As [`Dim::eval`].
    pub fn concrete(&self, bindings: &[i64]) -> Result<Vec<i64>> {
        self.shape.iter().map(|d| d.eval(bindings)).collect()
    }
}

impl std::fmt::Display for ValueType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shape: Vec<String> = self.shape.iter().map(Dim::to_string).collect();
        write!(f, "{}[{}]", self.dtype, shape.join(","))
    }
}
