//! Any group of nodes, one thread per element of a result: correct for everything, fast for little.
//!
//! Each node becomes a function of an index: `n3(i0, i1)` is the element of the third node there, in its compute type. What
//! an op means for one element is written as the interpreter defines it; sums of floats are kept in f64. Indices of a gather
//! are clamped to the range that the interpreter would insist on.

use std::collections::HashMap;

use super::body::literal;
use super::writer::Writer;
use super::{Grid, Kernel, Moments, Provenance, THREADS, View, c_type};
use crate::ir::{BinaryOp, DType, Dim, Graph, Op, PoolOp, ReduceOp, UnaryOp, ValueId};
use crate::{Error, Result};

/// The element `result` of the nodes `nodes`, which read `values`. Operands: `values` as they lie, then the result.
///
/// # Errors
/// If a node reads a value that is neither among `values` nor among `nodes`.
pub fn lower_scalar(
    graph: &Graph,
    nodes: &[ValueId],
    values: &[(ValueId, View)],
    result: (ValueId, &View),
    from: &Provenance,
) -> Result<Kernel> {
    let mut s = Scalar { graph, w: Writer::new(), names: HashMap::new() };
    for (at, (value, view)) in values.iter().enumerate() {
        s.operand(at, *value, view);
    }
    for &node in needed(graph, nodes, result.0).iter() {
        for &input in &graph.node(node).inputs {
            s.constant(input);
        }
        s.node(node)?;
    }
    let (value, view) = result;
    let name = s.name(value)?;
    let (rank, count) = (view.shape.len(), Dim::product(&view.shape));
    let total = s.w.size(&count);
    s.w.line("const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;");
    s.w.line(format!("if (thread >= (u32){total}) return;"));
    s.unravel("thread", &view.shape, "i");
    let terms = (0..rank).filter(|&d| !view.strides[d].is(0)).map(|d| format!("i{d} * {}", s.w.size(&view.strides[d])));
    let terms: Vec<String> = terms.collect();
    let at = if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") };
    let out = s.w.pointer(values.len(), view.dtype, true);
    s.w.line(format!("{out}[{at}] = narrow<{}>({name}({}));", c_type(view.dtype), index("i", rank)));
    let grid = Grid::Packs { rows: Dim::constant(1), cols: count };
    Ok(s.w.finish(from, view.dtype, grid, THREADS))
}

/// The nodes that `result` depends on, in order.
fn needed(graph: &Graph, nodes: &[ValueId], result: ValueId) -> Vec<ValueId> {
    let mut keep = vec![result];
    let mut at = 0;
    while at < keep.len() {
        for input in &graph.node(keep[at]).inputs {
            if nodes.contains(input) && !keep.contains(input) {
                keep.push(*input);
            }
        }
        at += 1;
    }
    keep.sort_unstable();
    keep
}

/// `i0, i1, ...`.
fn index(prefix: &str, rank: usize) -> String {
    (0..rank).map(|d| format!("{prefix}{d}")).collect::<Vec<_>>().join(", ")
}

/// The type a value is computed in.
fn compute(dtype: DType) -> &'static str {
    match dtype.compute() {
        DType::F32 => "float",
        DType::F64 => "double",
        _ => "i64",
    }
}

/// The function that converts to a compute type.
fn convert(to: &str) -> &'static str {
    match to {
        "float" => "to_float",
        "double" => "to_double",
        _ => "to_int",
    }
}

struct Scalar<'a> {
    graph: &'a Graph,
    w: Writer,
    names: HashMap<ValueId, String>,
}

impl Scalar<'_> {
    fn name(&self, value: ValueId) -> Result<String> {
        self.names.get(&value).cloned().ok_or_else(|| Error::Backend {
            backend: "cuda",
            what: format!("%{} is not among the operands of its step", value.0),
        })
    }

    fn rank(&self, value: ValueId) -> usize {
        self.graph.ty(value).rank()
    }

    fn shape(&self, value: ValueId) -> &[Dim] {
        &self.graph.ty(value).shape
    }

    fn open(&mut self, value: ValueId) -> String {
        let name = format!("n{}", self.names.len());
        let params: Vec<String> = (0..self.rank(value)).map(|d| format!("i64 i{d}")).collect();
        let ty = compute(self.graph.ty(value).dtype);
        self.w.line(format!("const auto {name} = [&]({}) -> {ty} {{", params.join(", ")));
        self.names.insert(value, name.clone());
        name
    }

    fn operand(&mut self, at: usize, value: ValueId, view: &View) {
        self.open(value);
        let p = self.w.pointer(at, view.dtype, false);
        let strides: Vec<String> = view.strides.iter().map(|s| self.w.size(s)).collect();
        let terms: Vec<String> =
            strides.iter().enumerate().filter(|(_, s)| *s != "0").map(|(d, s)| format!("i{d} * {s}")).collect();
        let place = if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") };
        self.w.line(format!("return {}({p}[{place}]);", convert(compute(view.dtype))));
        self.w.line("};");
    }

    /// A scalar that is read from nowhere.
    fn constant(&mut self, value: ValueId) {
        if self.names.contains_key(&value) {
            return;
        }
        if let Some(number) = self.graph.as_scalar(value) {
            self.open(value);
            self.give(value, &constant(number, self.graph.ty(value).dtype));
        }
    }

    /// `from`, a position in row-major order, as indices `<prefix>0, ...`.
    fn unravel(&mut self, from: &str, shape: &[Dim], prefix: &str) {
        self.w.line(format!("i64 {prefix}rest = {from};"));
        for d in (0..shape.len()).rev() {
            if shape[d].is(1) {
                self.w.line(format!("const i64 {prefix}{d} = 0;"));
                continue;
            }
            let size = self.w.size(&shape[d]);
            self.w.line(format!("const i64 {prefix}{d} = {prefix}rest % {size}; {prefix}rest /= {size};"));
        }
    }

    /// An element of `value` at these indices, in its own compute type.
    fn at(&self, value: ValueId, indices: &[String]) -> Result<String> {
        Ok(format!("{}({})", self.name(value)?, indices.join(", ")))
    }

    /// An element of `value` broadcast to a result of rank `rank`, converted to compute type `ty`.
    fn broadcast(&self, value: ValueId, rank: usize, ty: &str) -> Result<String> {
        let own = self.rank(value);
        let indices: Vec<String> = (0..own)
            .map(|d| if self.shape(value)[d].is(1) { "0".to_owned() } else { format!("i{}", d + rank - own) })
            .collect();
        let element = self.at(value, &indices)?;
        let from = compute(self.graph.ty(value).dtype);
        Ok(if from == ty { element } else { format!("{}({element})", convert(ty)) })
    }

    /// Ends a function: the value rounded to its element type.
    fn give(&mut self, value: ValueId, expression: &str) {
        let dtype = self.graph.ty(value).dtype;
        let ty = compute(dtype);
        self.w.line(match dtype {
            DType::F32 | DType::F64 | DType::I64 => format!("return ({ty})({expression});"),
            _ => format!("return {}(narrow<{}>(({ty})({expression})));", convert(ty), c_type(dtype)),
        });
        self.w.line("};");
    }

    fn node(&mut self, value: ValueId) -> Result<()> {
        let node = self.graph.node(value);
        let inputs = node.inputs.clone();
        let rank = node.ty.rank();
        let ty = compute(node.ty.dtype);
        let own = |d: usize| format!("i{d}");
        let all: Vec<String> = (0..rank).map(own).collect();
        let op = node.op.clone();
        self.open(value);
        match &op {
            Op::Input { .. } | Op::Parameter { .. } | Op::Constant { .. } => {
                return Err(Error::Backend { backend: "cuda", what: format!("%{} is a source", value.0) });
            }
            Op::Full { value: number } => {
                let number = constant(*number, node.ty.dtype);
                self.give(value, &number);
            }
            Op::SizeOf { size } => {
                let size = self.w.size(size);
                self.give(value, &size);
            }
            Op::Arange { start, step } => {
                let (start, step) = (self.w.size(start), self.w.size(step));
                self.give(value, &format!("{start} + i0 * {step}"));
            }
            Op::Unary(UnaryOp::RotatePairs) => {
                let last = rank - 1;
                let mut indices = all;
                indices[last] = format!("(i{last} ^ 1)");
                let element = self.at(inputs[0], &indices)?;
                self.give(value, &format!("i{last} & 1 ? {element} : -{element}"));
            }
            Op::Unary(op) => self.unary(value, *op, inputs[0], rank)?,
            Op::Binary(op) => self.binary(value, *op, &inputs, rank)?,
            Op::Where => {
                let condition = self.broadcast(inputs[0], rank, "i64")?;
                let (a, b) = (self.broadcast(inputs[1], rank, ty)?, self.broadcast(inputs[2], rank, ty)?);
                self.give(value, &format!("{condition} != 0 ? {a} : {b}"));
            }
            Op::Convert => self.convert(value, inputs[0], rank)?,
            Op::Reshape => {
                self.ravel(value);
                let shape = self.shape(inputs[0]).to_vec();
                self.unravel("at", &shape, "j");
                let element = self.at(inputs[0], &(0..shape.len()).map(|d| format!("j{d}")).collect::<Vec<_>>())?;
                self.give(value, &element);
            }
            Op::Permute { dims } => {
                let mut indices = vec![String::new(); dims.len()];
                dims.iter().enumerate().for_each(|(i, &d)| indices[d] = own(i));
                let element = self.at(inputs[0], &indices)?;
                self.give(value, &element);
            }
            Op::Expand => {
                let element = self.broadcast(inputs[0], rank, ty)?;
                self.give(value, &element);
            }
            Op::Slice { dim, start, step } => {
                let (start, step) = (self.w.size(start), self.w.size(&(*step).into()));
                let mut indices = all;
                indices[*dim] = format!("{start} + i{dim} * {step}");
                let element = self.at(inputs[0], &indices)?;
                self.give(value, &element);
            }
            Op::Flip { dims } => {
                let mut indices = all;
                for &d in dims {
                    let size = self.w.size(&node.ty.shape[d]);
                    indices[d] = format!("{size} - 1 - i{d}");
                }
                let element = self.at(inputs[0], &indices)?;
                self.give(value, &element);
            }
            Op::Cat { dim } => self.cat(value, &inputs, *dim, &all)?,
            Op::Pad { before, value: fill } => self.pad(value, inputs[0], before, *fill, &all)?,
            Op::SliceScatter { dim, start, step } => {
                let len = self.w.size(&self.graph.ty(inputs[1]).shape[*dim]);
                let (start, step) = (self.w.size(start), self.w.size(&(*step).into()));
                self.w.line(format!("const i64 at = i{dim} - {start};"));
                let mut indices = all.clone();
                indices[*dim] = format!("at / {step}");
                let (inside, outside) = (self.at(inputs[1], &indices)?, self.at(inputs[0], &all)?);
                let test = format!("at >= 0 && at % {step} == 0 && at / {step} < {len}");
                self.give(value, &format!("{test} ? {inside} : {outside}"));
            }
            Op::IndexSelect { dim } => {
                let index_rank = self.rank(inputs[1]);
                let row = self.at(inputs[1], &(0..index_rank).map(|d| own(dim + d)).collect::<Vec<_>>())?;
                let size = self.w.size(&self.graph.ty(inputs[0]).shape[*dim]);
                self.w.line(format!("const i64 row = i_clamp(to_int({row}), 0, {size} - 1);"));
                let mut indices = all[..*dim].to_vec();
                indices.push("row".to_owned());
                indices.extend_from_slice(&all[dim + index_rank..]);
                let element = self.at(inputs[0], &indices)?;
                self.give(value, &element);
            }
            Op::Gather { dim } => {
                let (row, size) = (self.at(inputs[1], &all)?, self.w.size(&self.graph.ty(inputs[0]).shape[*dim]));
                self.w.line(format!("const i64 row = i_clamp(to_int({row}), 0, {size} - 1);"));
                let mut indices = all;
                indices[*dim] = "row".to_owned();
                let element = self.at(inputs[0], &indices)?;
                self.give(value, &element);
            }
            Op::Interpolate { dim } => {
                let pair = [own(*dim), "k".to_owned()];
                let (index, weight) = (self.at(inputs[1], &pair)?, self.at(inputs[2], &pair)?);
                let taps = self.w.size(&self.graph.ty(inputs[1]).shape[1]);
                let size = self.w.size(&self.graph.ty(inputs[0]).shape[*dim]);
                let mut indices = all;
                indices[*dim] = "row".to_owned();
                let element = self.at(inputs[0], &indices)?;
                self.w.line("double sum = 0.0;");
                self.w.line(format!("for (i64 k = 0; k < {taps}; ++k) {{"));
                self.w.line(format!("const i64 row = i_clamp(to_int({index}), 0, {size} - 1);"));
                self.w.line(format!("sum += to_double({element}) * to_double({weight});"));
                self.w.line("}");
                self.give(value, "sum");
            }
            Op::Reduce { op, dims, keepdim } => self.reduce(value, *op, inputs[0], dims, *keepdim)?,
            Op::Cumsum { dim } => {
                let mut indices = all;
                indices[*dim] = "k".to_owned();
                let element = self.at(inputs[0], &indices)?;
                let (sum, add) = match ty {
                    "i64" => ("i64", format!("sum = i_add(sum, to_int({element}));")),
                    _ => ("double", format!("sum += to_double({element});")),
                };
                self.w.line(format!("{sum} sum = 0;"));
                self.w.line(format!("for (i64 k = 0; k <= i{dim}; ++k) {add}"));
                self.give(value, "sum");
            }
            Op::Softmax { dim } => {
                let mut indices = all;
                let size = self.w.size(&node.ty.shape[*dim]);
                let here = self.at(inputs[0], &indices)?;
                indices[*dim] = "k".to_owned();
                let element = self.at(inputs[0], &indices)?;
                self.w.line("double most = -1.0 / 0.0, sum = 0.0;");
                self.w.line(format!("for (i64 k = 0; k < {size}; ++k) most = m_max(most, to_double({element}));"));
                self.w.line(format!("for (i64 k = 0; k < {size}; ++k) sum += m_exp(to_double({element}) - most);"));
                self.give(value, &format!("m_exp(to_double({here}) - most) / sum"));
            }
            Op::Linear => {
                let terms = self.w.size(&self.graph.ty(inputs[1]).shape[1]);
                let mut indices = all.clone();
                indices[rank - 1] = "k".to_owned();
                let x = self.at(inputs[0], &indices)?;
                let weight = self.at(inputs[1], &[own(rank - 1), "k".to_owned()])?;
                self.dot(&terms, &x, &weight);
                if let Some(&bias) = inputs.get(2) {
                    let bias = self.at(bias, &[own(rank - 1)])?;
                    self.w.line(format!("sum += to_double({bias});"));
                }
                self.give(value, "sum");
            }
            Op::Matmul => self.matmul(value, &inputs)?,
            Op::Convolution { stride, padding, dilation, groups, channels_last } => {
                let attributes = Window { stride, padding, dilation };
                self.convolution(value, &inputs, &attributes, *groups, *channels_last)?;
            }
            Op::ScaledDotProductAttention { is_causal, scale } => self.attention(value, &inputs, *is_causal, *scale)?,
            Op::GroupNorm { num_groups, eps, channel_dim } => {
                self.group_norm(value, &inputs, *num_groups, *eps, *channel_dim)?;
            }
            Op::LayerNorm { normalized_ndim, eps } => {
                self.row_norm(value, &inputs, *normalized_ndim, *eps, Moments::Centred)?;
            }
            Op::RmsNorm { normalized_ndim, eps, floor } => {
                let moments = if *floor { Moments::Floored } else { Moments::Square };
                self.row_norm(value, &inputs, *normalized_ndim, *eps, moments)?;
            }
            Op::UpsampleNearest { first_dim, scales, exact } => {
                self.upsample(value, inputs[0], *first_dim, scales, *exact)?;
            }
            Op::Pool { op, first_dim, kernel, stride, padding, count_include_pad } => {
                let window = Window { stride, padding, dilation: &[] };
                self.pool(value, inputs[0], *op, *first_dim, kernel, &window, *count_include_pad)?;
            }
        }
        Ok(())
    }

    /// `at`: the position of the index in row-major order.
    fn ravel(&mut self, value: ValueId) {
        let shape = self.shape(value).to_vec();
        let mut expression = "0".to_owned();
        for (d, size) in shape.iter().enumerate() {
            let size = self.w.size(size);
            expression = if d == 0 { "i0".to_owned() } else { format!("({expression}) * {size} + i{d}") };
        }
        self.w.line(format!("const i64 at = {expression};"));
    }

    fn unary(&mut self, value: ValueId, op: UnaryOp, x: ValueId, rank: usize) -> Result<()> {
        let from = self.graph.ty(x).dtype;
        let to = self.graph.ty(value).dtype;
        if op.is_predicate() {
            let x = self.broadcast(x, rank, compute(from))?;
            let is_float = from.is_float();
            self.give(
                value,
                &match op {
                    UnaryOp::Isnan => {
                        if is_float {
                            format!("m_isnan({x})")
                        } else {
                            "0".to_owned()
                        }
                    }
                    UnaryOp::Isinf => {
                        if is_float {
                            format!("m_isinf({x})")
                        } else {
                            "0".to_owned()
                        }
                    }
                    _ => format!("{x} == 0"),
                },
            );
            return Ok(());
        }
        let x = self.broadcast(x, rank, compute(to))?;
        let expression = if to.is_float() { float_unary(op, &x) } else { int_unary(op, &x, to) };
        self.give(value, &expression);
        Ok(())
    }

    fn binary(&mut self, value: ValueId, op: BinaryOp, inputs: &[ValueId], rank: usize) -> Result<()> {
        let to = self.graph.ty(value).dtype;
        let types = [self.graph.ty(inputs[0]).dtype, self.graph.ty(inputs[1]).dtype];
        let ty = match op.is_predicate() {
            true if types.contains(&DType::F64) => "double",
            true if types.iter().any(|t| t.is_float()) => "float",
            true => "i64",
            false => compute(to),
        };
        let (a, b) = (self.broadcast(inputs[0], rank, ty)?, self.broadcast(inputs[1], rank, ty)?);
        let expression = if ty == "i64" { int_binary(op, &a, &b) } else { float_binary(op, &a, &b) };
        self.give(value, &expression);
        Ok(())
    }

    /// Between element types, as one conversion.
    fn convert(&mut self, value: ValueId, x: ValueId, rank: usize) -> Result<()> {
        let (from, to) = (self.graph.ty(x).dtype, self.graph.ty(value).dtype);
        let element = self.broadcast(x, rank, compute(from))?;
        let ty = compute(to);
        self.w.line(format!("return {}(narrow<{}>({element}));", convert(ty), c_type(to)));
        self.w.line("};");
        Ok(())
    }

    fn cat(&mut self, value: ValueId, inputs: &[ValueId], dim: usize, all: &[String]) -> Result<()> {
        let mut start = Dim::default();
        for (at, &input) in inputs.iter().enumerate() {
            let mut indices = all.to_vec();
            let begin = self.w.size(&start);
            indices[dim] = format!("i{dim} - {begin}");
            let element = self.at(input, &indices)?;
            if at + 1 == inputs.len() {
                self.give(value, &element);
                break;
            }
            start = &start + &self.graph.ty(input).shape[dim];
            let end = self.w.size(&start);
            self.w.line(format!("if (i{dim} < {end}) return {element};"));
        }
        Ok(())
    }

    fn pad(&mut self, value: ValueId, x: ValueId, before: &[Dim], fill: f64, all: &[String]) -> Result<()> {
        let (mut indices, mut tests) = (all.to_vec(), Vec::new());
        for (d, index) in indices.iter_mut().enumerate() {
            let (lead, size) = (self.w.size(&before[d]), self.w.size(&self.graph.ty(x).shape[d]));
            *index = format!("i{d} - {lead}");
            tests.push(format!("{index} >= 0 && {index} < {size}"));
        }
        let element = self.at(x, &indices)?;
        let fill = constant(fill, self.graph.ty(value).dtype);
        let test = if tests.is_empty() { "true".to_owned() } else { tests.join(" && ") };
        self.give(value, &format!("{test} ? {element} : {fill}"));
        Ok(())
    }

    /// `double sum`: of `terms` products.
    fn dot(&mut self, terms: &str, a: &str, b: &str) {
        self.w.line("double sum = 0.0;");
        self.w.line(format!("for (i64 k = 0; k < {terms}; ++k) sum += to_double({a}) * to_double({b});"));
    }

    fn matmul(&mut self, value: ValueId, inputs: &[ValueId]) -> Result<()> {
        let rank = self.rank(value);
        let terms = self.graph.ty(inputs[0]).shape.last().cloned().unwrap_or_default();
        let terms = self.w.size(&terms);
        let a = self.lead_at(inputs[0], rank, &format!("i{}", rank - 2), "k")?;
        let b = self.lead_at(inputs[1], rank, "k", &format!("i{}", rank - 1))?;
        self.dot(&terms, &a, &b);
        self.give(value, "sum");
        Ok(())
    }

    /// An element of a batch of matrices that broadcasts to a result of rank `rank`.
    fn lead_at(&self, value: ValueId, rank: usize, row: &str, col: &str) -> Result<String> {
        let own = self.rank(value);
        let mut indices: Vec<String> = (0..own - 2)
            .map(|d| if self.shape(value)[d].is(1) { "0".to_owned() } else { format!("i{}", d + rank - own) })
            .collect();
        indices.extend([row.to_owned(), col.to_owned()]);
        self.at(value, &indices)
    }

    fn convolution(
        &mut self,
        value: ValueId,
        inputs: &[ValueId],
        window: &Window<'_>,
        groups: i64,
        channels_last: bool,
    ) -> Result<()> {
        let spatial = window.stride.len();
        let (channel_dim, first) = if channels_last { (spatial + 1, 1) } else { (1, 2) };
        let weight_shape = self.shape(inputs[1]).to_vec();
        let x_shape = self.shape(inputs[0]).to_vec();
        let per_group = self.w.size(&weight_shape[0].exact_div(groups)?);
        let channels = self.w.size(&weight_shape[1]);
        self.w.line(format!("const i64 group = i{channel_dim} / {per_group};"));
        self.w.line("double sum = 0.0;");
        for d in 0..spatial {
            let (taps, size) = (self.w.size(&weight_shape[d + 2]), self.w.size(&x_shape[first + d]));
            let (stride, padding) = (self.w.size(&window.stride[d].into()), self.w.size(&window.padding[d].into()));
            let dilation = self.w.size(&window.dilation[d].into());
            self.w.line(format!("for (i64 t{d} = 0; t{d} < {taps}; ++t{d}) {{"));
            self.w.line(format!("const i64 s{d} = i{} * {stride} - {padding} + t{d} * {dilation};", first + d));
            self.w.line(format!("if (s{d} < 0 || s{d} >= {size}) continue;"));
        }
        let mut at = vec!["i0".to_owned()];
        let places: Vec<String> = (0..spatial).map(|d| format!("s{d}")).collect();
        let channel = format!("group * {channels} + c");
        match channels_last {
            true => at.extend(places.into_iter().chain([channel])),
            false => at.extend([channel].into_iter().chain(places)),
        }
        let mut weight_at = vec![format!("i{channel_dim}"), "c".to_owned()];
        weight_at.extend((0..spatial).map(|d| format!("t{d}")));
        let (x, weight) = (self.at(inputs[0], &at)?, self.at(inputs[1], &weight_at)?);
        self.w.line(format!("for (i64 c = 0; c < {channels}; ++c) sum += to_double({x}) * to_double({weight});"));
        (0..spatial).for_each(|_| self.w.line("}"));
        if let Some(&bias) = inputs.get(2) {
            let bias = self.at(bias, &[format!("i{channel_dim}")])?;
            self.w.line(format!("sum += to_double({bias});"));
        }
        self.give(value, "sum");
        Ok(())
    }

    fn attention(&mut self, value: ValueId, inputs: &[ValueId], is_causal: bool, scale: f64) -> Result<()> {
        let rank = self.rank(value);
        let (row, col) = (format!("i{}", rank - 2), format!("i{}", rank - 1));
        let key_shape = self.shape(inputs[1]);
        let (keys, width) = (key_shape[key_shape.len() - 2].clone(), key_shape[key_shape.len() - 1].clone());
        let (keys, width) = (self.w.size(&keys), self.w.size(&width));
        let scale = self.w.float(scale as f32);
        let q = self.lead_at(inputs[0], rank, &row, "e")?;
        let k = self.lead_at(inputs[1], rank, "k", "e")?;
        let v = self.lead_at(inputs[2], rank, "k", &col)?;
        self.w.line("const auto score = [&](i64 k) -> double {");
        if is_causal {
            self.w.line(format!("if (k > {row}) return -1.0 / 0.0;"));
        }
        self.w.line("double dot = 0.0;");
        self.w.line(format!("for (i64 e = 0; e < {width}; ++e) dot += to_double({q}) * to_double({k});"));
        self.w.line(format!("dot *= {scale};"));
        if let Some(&mask) = inputs.get(3) {
            let own = self.rank(mask);
            let indices: Vec<String> = (0..own)
                .map(|d| match (self.shape(mask)[d].is(1), d + 1 == own) {
                    (true, _) => "0".to_owned(),
                    (false, true) => "k".to_owned(),
                    (false, false) => format!("i{}", d + rank - own),
                })
                .collect();
            let element = self.at(mask, &indices)?;
            self.w.line(match self.graph.ty(mask).dtype {
                DType::Bool => format!("if ({element} == 0) return -1.0 / 0.0;"),
                _ => format!("dot += to_double({element});"),
            });
        }
        self.w.line("return dot;");
        self.w.line("};");
        self.w.line("double most = -1.0 / 0.0, total = 0.0, sum = 0.0;");
        self.w.line(format!("for (i64 k = 0; k < {keys}; ++k) most = m_max(most, score(k));"));
        self.w.line("if (most == -1.0 / 0.0) return 0.0f;");
        self.w.line(format!("for (i64 k = 0; k < {keys}; ++k) {{"));
        self.w.line("const double weight = m_exp(score(k) - most);");
        self.w.line(format!("total += weight; sum += weight * to_double({v});"));
        self.w.line("}");
        self.give(value, "sum / total");
        Ok(())
    }

    /// `mean` and `inverse` of what `element` gives inside the loops that `open` writes.
    fn moments(&mut self, open: &[String], element: &str, eps: f64, moments: Moments) {
        let eps = self.w.float(eps as f32);
        self.w.line("double mean = 0.0, square = 0.0, count = 0.0;");
        if moments == Moments::Centred {
            open.iter().for_each(|line| self.w.line(line));
            self.w.line(format!("mean += to_double({element}); count += 1.0;"));
            open.iter().for_each(|_| self.w.line("}"));
            self.w.line("mean /= count; count = 0.0;");
        }
        open.iter().for_each(|line| self.w.line(line));
        self.w.line(format!("const double d = to_double({element}) - mean;"));
        self.w.line("square += d * d; count += 1.0;");
        open.iter().for_each(|_| self.w.line("}"));
        self.w.line(match moments {
            Moments::Floored => format!("const double inverse = 1.0 / m_max(m_sqrt(square / count), (double){eps});"),
            _ => format!("const double inverse = m_rsqrt(square / count + {eps});"),
        });
    }

    fn group_norm(
        &mut self,
        value: ValueId,
        inputs: &[ValueId],
        groups: i64,
        eps: f64,
        channel_dim: usize,
    ) -> Result<()> {
        let shape = self.shape(value).to_vec();
        let wide = self.w.size(&shape[channel_dim].exact_div(groups)?);
        let (mut open, mut indices) = (Vec::new(), vec!["i0".to_owned()]);
        for (d, size) in shape.iter().enumerate().skip(1) {
            indices.push(format!("k{d}"));
            open.push(if d == channel_dim {
                format!("for (i64 k{d} = i{d} / {wide} * {wide}; k{d} < (i{d} / {wide} + 1) * {wide}; ++k{d}) {{")
            } else {
                let size = self.w.size(size);
                format!("for (i64 k{d} = 0; k{d} < {size}; ++k{d}) {{")
            });
        }
        let element = self.at(inputs[0], &indices)?;
        self.moments(&open, &element, eps, Moments::Centred);
        self.affine(value, inputs, &[format!("i{channel_dim}")])
    }

    fn row_norm(
        &mut self,
        value: ValueId,
        inputs: &[ValueId],
        normalized: usize,
        eps: f64,
        moments: Moments,
    ) -> Result<()> {
        let shape = self.shape(value).to_vec();
        let first = shape.len() - normalized;
        let mut indices: Vec<String> = (0..shape.len()).map(|d| format!("i{d}")).collect();
        let mut open = Vec::new();
        for d in first..shape.len() {
            let size = self.w.size(&shape[d]);
            indices[d] = format!("k{d}");
            open.push(format!("for (i64 k{d} = 0; k{d} < {size}; ++k{d}) {{"));
        }
        let element = self.at(inputs[0], &indices)?;
        self.moments(&open, &element, eps, moments);
        self.affine(value, inputs, &(first..shape.len()).map(|d| format!("i{d}")).collect::<Vec<_>>())
    }

    fn affine(&mut self, value: ValueId, inputs: &[ValueId], at: &[String]) -> Result<()> {
        let rank = self.rank(value);
        let here: Vec<String> = (0..rank).map(|d| format!("i{d}")).collect();
        let mut expression = format!("(to_double({}) - mean) * inverse", self.at(inputs[0], &here)?);
        // A weight of one dimension is over all normalised ones, taken as one.
        for (sign, &operand) in ["*", "+"].iter().zip(&inputs[1..]) {
            let own = self.rank(operand);
            let indices = if own == at.len() { at.to_vec() } else { at[at.len() - own.min(at.len())..].to_vec() };
            expression = format!("{expression} {sign} to_double({})", self.at(operand, &indices)?);
        }
        self.give(value, &expression);
        Ok(())
    }

    fn upsample(&mut self, value: ValueId, x: ValueId, first: usize, scales: &[f64], exact: bool) -> Result<()> {
        let mut indices: Vec<String> = (0..self.rank(value)).map(|d| format!("i{d}")).collect();
        for (at, &scale) in scales.iter().enumerate() {
            let d = first + at;
            let (input, output) = (self.shape(x)[d].clone(), self.shape(value)[d].clone());
            let (input, output) = (self.w.size(&input), self.w.size(&output));
            let ratio = match scale > 0.0 {
                true => literal(1.0 / scale),
                false => format!("((float){input} / (float){output})"),
            };
            let half = if exact { " + 0.5f" } else { "" };
            self.w.line(format!(
                "const i64 s{d} = i_clamp((i64)m_floor(((float)i{d}{half}) * {ratio}), 0, {input} - 1);"
            ));
            indices[d] = format!("s{d}");
        }
        let element = self.at(x, &indices)?;
        self.give(value, &element);
        Ok(())
    }

    #[allow(clippy::too_many_arguments, reason = "the attributes of one op")]
    fn pool(
        &mut self,
        value: ValueId,
        x: ValueId,
        op: PoolOp,
        first: usize,
        kernel: &[i64],
        window: &Window<'_>,
        count_include_pad: bool,
    ) -> Result<()> {
        let dtype = self.graph.ty(value).dtype;
        let is_int = !dtype.is_float();
        let mut indices: Vec<String> = (0..self.rank(value)).map(|d| format!("i{d}")).collect();
        self.w.line(if is_int { "i64 most = -0x7fffffffffffffffll - 1;" } else { "double most = -1.0 / 0.0;" });
        self.w.line("double sum = 0.0, count = 0.0;");
        let taps = kernel.iter().product::<i64>();
        for (at, &taps) in kernel.iter().enumerate() {
            let d = first + at;
            let size = self.shape(x)[d].clone();
            let (size, taps) = (self.w.size(&size), self.w.size(&taps.into()));
            let (stride, padding) = (self.w.size(&window.stride[at].into()), self.w.size(&window.padding[at].into()));
            self.w.line(format!("for (i64 t{d} = 0; t{d} < {taps}; ++t{d}) {{"));
            self.w.line(format!("const i64 s{d} = i{d} * {stride} - {padding} + t{d};"));
            self.w.line(format!("if (s{d} < 0 || s{d} >= {size}) continue;"));
            indices[d] = format!("s{d}");
        }
        let element = self.at(x, &indices)?;
        let convert = if is_int { "to_int" } else { "to_double" };
        self.w.line(format!("most = m_max(most, {convert}({element}));"));
        self.w.line(format!("sum += to_double({element}); count += 1.0;"));
        kernel.iter().for_each(|_| self.w.line("}"));
        match op {
            PoolOp::Max => self.give(value, "most"),
            PoolOp::Avg if count_include_pad => self.give(value, &format!("sum / {taps}.0")),
            PoolOp::Avg => self.give(value, "sum / count"),
        }
        Ok(())
    }

    fn reduce(&mut self, value: ValueId, op: ReduceOp, x: ValueId, dims: &[usize], keepdim: bool) -> Result<()> {
        let (from, to) = (self.graph.ty(x).dtype, self.graph.ty(value).dtype);
        let shape = self.shape(x).to_vec();
        let mut sorted = dims.to_vec();
        sorted.sort_unstable();
        let mut kept = 0;
        let mut indices = Vec::new();
        for d in 0..shape.len() {
            if sorted.contains(&d) {
                indices.push(format!("k{d}"));
                kept += usize::from(keepdim);
            } else {
                indices.push(format!("i{kept}"));
                kept += 1;
            }
        }
        let element = self.at(x, &indices)?;
        let is_arg = matches!(op, ReduceOp::Argmax | ReduceOp::Argmin);
        let is_test = matches!(op, ReduceOp::Any | ReduceOp::All);
        let is_float = if is_arg || is_test { from.is_float() } else { to.is_float() };
        let (ty, own) = if is_float { ("double", "to_double") } else { ("i64", "to_int") };
        // In f32 or 16 bits the operand is first converted to what the op computes in.
        let rounded = match (is_arg || is_test, to.compute()) {
            (false, DType::F32) => format!("to_double(to_float({element}))"),
            _ => format!("{own}({element})"),
        };
        let (least, most) = match is_float {
            true => ("-1.0 / 0.0", "1.0 / 0.0"),
            false => ("-0x7fffffffffffffffll - 1", "0x7fffffffffffffffll"),
        };
        let (start, update) = match op {
            ReduceOp::Sum | ReduceOp::Mean if is_float => ("0", "all += x;"),
            ReduceOp::Sum | ReduceOp::Mean => ("0", "all = i_add(all, x);"),
            ReduceOp::Prod if is_float => ("1", "all *= x;"),
            ReduceOp::Prod => ("1", "all = i_mul(all, x);"),
            ReduceOp::Amax => (least, "all = m_max(all, x);"),
            ReduceOp::Amin => (most, "all = m_min(all, x);"),
            ReduceOp::Any => ("0", "if (x != 0) all = 1;"),
            ReduceOp::All => ("1", "if (x == 0) all = 0;"),
            // NaN is better than any number.
            ReduceOp::Argmax => ("0", "if (!count || (all == all && (x != x || x > all))) { all = x; place = count; }"),
            ReduceOp::Argmin => ("0", "if (!count || (all == all && (x != x || x < all))) { all = x; place = count; }"),
        };
        self.w.line(format!("{ty} all = {start};"));
        self.w.line("i64 count = 0, place = 0;");
        for &d in &sorted {
            let size = self.w.size(&shape[d]);
            self.w.line(format!("for (i64 k{d} = 0; k{d} < {size}; ++k{d}) {{"));
        }
        self.w.line(format!("const {ty} x = {rounded};"));
        self.w.line(update);
        self.w.line("++count;");
        sorted.iter().for_each(|_| self.w.line("}"));
        self.give(
            value,
            match op {
                ReduceOp::Mean => "all / (double)count",
                ReduceOp::Argmax | ReduceOp::Argmin => "place",
                _ => "all",
            },
        );
        Ok(())
    }
}

/// Attributes of a window.
struct Window<'a> {
    stride: &'a [i64],
    padding: &'a [i64],
    dilation: &'a [i64],
}

/// A constant in the compute type of `dtype`.
fn constant(value: f64, dtype: DType) -> String {
    match dtype.compute() {
        DType::F32 => literal(value),
        DType::F64 if value.is_finite() => format!("{value:?}"),
        DType::F64 if value.is_nan() => "(0.0 / 0.0)".to_owned(),
        DType::F64 => if value > 0.0 { "(1.0 / 0.0)" } else { "(-1.0 / 0.0)" }.to_owned(),
        _ if value >= i64::MAX as f64 => "0x7fffffffffffffffll".to_owned(),
        _ if value <= i64::MIN as f64 => "(-0x7fffffffffffffffll - 1)".to_owned(),
        _ if dtype == DType::Bool => i64::from(value != 0.0).to_string(),
        // A value past the type's bounds saturates, as a conversion does.
        _ if dtype == DType::I64 => format!("{}ll", value as i64),
        _ => format!("to_int(narrow<{}>({}))", c_type(dtype), literal(value)),
    }
}

fn float_unary(op: UnaryOp, x: &str) -> String {
    match op {
        UnaryOp::Neg => format!("-{x}"),
        UnaryOp::Reciprocal => format!("1 / {x}"),
        UnaryOp::Abs => format!("m_abs({x})"),
        UnaryOp::Sign => format!("m_sign({x})"),
        UnaryOp::Exp => format!("m_exp({x})"),
        UnaryOp::Log => format!("m_log({x})"),
        UnaryOp::Log2 => format!("m_log2({x})"),
        UnaryOp::Log10 => format!("m_log10({x})"),
        UnaryOp::Sin => format!("m_sin({x})"),
        UnaryOp::Cos => format!("m_cos({x})"),
        UnaryOp::Tanh => format!("m_tanh({x})"),
        UnaryOp::Sqrt => format!("m_sqrt({x})"),
        UnaryOp::Rsqrt => format!("m_rsqrt({x})"),
        UnaryOp::Sigmoid => format!("m_sigmoid({x})"),
        UnaryOp::Silu => format!("m_silu({x})"),
        UnaryOp::Gelu => format!("m_gelu({x})"),
        UnaryOp::GeluTanh => format!("m_gelu_tanh({x})"),
        UnaryOp::Relu => format!("m_relu({x})"),
        UnaryOp::Erf => format!("m_erf({x})"),
        UnaryOp::Softplus => format!("m_softplus({x})"),
        UnaryOp::Floor => format!("m_floor({x})"),
        UnaryOp::Ceil => format!("m_ceil({x})"),
        UnaryOp::Round => format!("m_round({x})"),
        UnaryOp::Trunc => format!("m_trunc({x})"),
        UnaryOp::LogicalNot => format!("{x} == 0"),
        UnaryOp::BitwiseNot => format!("!({x} != 0)"),
        UnaryOp::Isnan => format!("m_isnan({x})"),
        UnaryOp::Isinf => format!("m_isinf({x})"),
        UnaryOp::RotatePairs => unreachable!("it is no matter of one element"),
    }
}

fn int_unary(op: UnaryOp, x: &str, dtype: DType) -> String {
    match op {
        UnaryOp::Neg => format!("i_neg({x})"),
        UnaryOp::Abs => format!("{x} < 0 ? i_neg({x}) : {x}"),
        UnaryOp::Sign => format!("m_sign({x})"),
        UnaryOp::Relu => format!("m_relu({x})"),
        UnaryOp::BitwiseNot if dtype == DType::Bool => format!("{x} == 0"),
        UnaryOp::BitwiseNot => format!("~{x}"),
        UnaryOp::LogicalNot => format!("{x} == 0"),
        UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Round | UnaryOp::Trunc => x.to_owned(),
        // `ir/infer` gives none of these an integer result.
        UnaryOp::Exp
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Log10
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Reciprocal
        | UnaryOp::Sigmoid
        | UnaryOp::Silu
        | UnaryOp::Gelu
        | UnaryOp::GeluTanh
        | UnaryOp::Erf
        | UnaryOp::Softplus
        | UnaryOp::Isnan
        | UnaryOp::Isinf
        | UnaryOp::RotatePairs => "0".to_owned(),
    }
}

/// Comparisons and logic read the same in every type.
fn predicate(op: BinaryOp, a: &str, b: &str) -> Option<String> {
    Some(match op {
        BinaryOp::Eq => format!("{a} == {b}"),
        BinaryOp::Ne => format!("{a} != {b}"),
        BinaryOp::Lt => format!("{a} < {b}"),
        BinaryOp::Le => format!("{a} <= {b}"),
        BinaryOp::Gt => format!("{a} > {b}"),
        BinaryOp::Ge => format!("{a} >= {b}"),
        BinaryOp::LogicalAnd => format!("{a} != 0 && {b} != 0"),
        BinaryOp::LogicalOr => format!("{a} != 0 || {b} != 0"),
        BinaryOp::LogicalXor => format!("({a} != 0) != ({b} != 0)"),
        BinaryOp::Add
        | BinaryOp::Sub
        | BinaryOp::Mul
        | BinaryOp::Div
        | BinaryOp::FloorDivide
        | BinaryOp::Remainder
        | BinaryOp::Pow
        | BinaryOp::Maximum
        | BinaryOp::Minimum
        | BinaryOp::Atan2
        | BinaryOp::BitwiseAnd
        | BinaryOp::BitwiseOr
        | BinaryOp::BitwiseXor
        | BinaryOp::BitwiseLeftShift
        | BinaryOp::BitwiseRightShift => return None,
    })
}

fn float_binary(op: BinaryOp, a: &str, b: &str) -> String {
    predicate(op, a, b).unwrap_or_else(|| match op {
        BinaryOp::Add => format!("{a} + {b}"),
        BinaryOp::Sub => format!("{a} - {b}"),
        BinaryOp::Mul => format!("{a} * {b}"),
        BinaryOp::FloorDivide => format!("m_floor_divide({a}, {b})"),
        BinaryOp::Remainder => format!("m_remainder({a}, {b})"),
        BinaryOp::Pow => format!("m_pow({a}, {b})"),
        BinaryOp::Maximum => format!("m_max({a}, {b})"),
        BinaryOp::Minimum => format!("m_min({a}, {b})"),
        BinaryOp::Atan2 => format!("m_atan2({a}, {b})"),
        _ => format!("{a} / {b}"),
    })
}

fn int_binary(op: BinaryOp, a: &str, b: &str) -> String {
    predicate(op, a, b).unwrap_or_else(|| match op {
        BinaryOp::Add => format!("i_add({a}, {b})"),
        BinaryOp::Sub => format!("i_sub({a}, {b})"),
        BinaryOp::Mul => format!("i_mul({a}, {b})"),
        BinaryOp::Remainder => format!("i_remainder({a}, {b})"),
        BinaryOp::Pow => format!("i_pow({a}, {b})"),
        BinaryOp::Maximum => format!("m_max({a}, {b})"),
        BinaryOp::Minimum => format!("m_min({a}, {b})"),
        BinaryOp::BitwiseAnd => format!("{a} & {b}"),
        BinaryOp::BitwiseOr => format!("{a} | {b}"),
        BinaryOp::BitwiseXor => format!("{a} ^ {b}"),
        BinaryOp::BitwiseLeftShift => format!("i_shift_left({a}, {b})"),
        BinaryOp::BitwiseRightShift => format!("i_shift_right({a}, {b})"),
        _ => format!("i_floor_divide({a}, {b})"),
    })
}
