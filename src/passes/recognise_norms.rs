//! Finds normalisations that models write out.
//!
//! *What:* `x * rsqrt(mean(x^2) + eps)` becomes `rms_norm`, `(x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps)` becomes
//! `layer_norm`, `x / max(sqrt(sum(x^2)), eps)`, PyTorch's `normalize`, an `rms_norm` with a floor, and a product with a
//! weight of the normalised size becomes the norm's weight. Factors behind a norm are gathered before that: a length of
//! 1 times the root of the size, which makes it an RMS norm, is none. The upcasts that text
//! encoders and transformers put around them are part of the norm: it computes in f32 whatever it reads. *Why faster:* one
//! pass over the data instead of five or more. *Requires:* canonical form (squares as products, roots as `sqrt`, constants
//! on the right). *Guarantees:* the type of the result; with `precision=eager`, formulas with 16-bit intermediates
//! stay, and so does a weight behind a rounding to 16 bits.
//!
//! ```text
//! %1: f32[2,8] = convert(%0)                (x: f16)
//! %2: f32[2,8] = mul(%1, %1)
//! %3: f32[2,1] = mean(%2) {dims=[1], keepdim=true}
//! %4: f32[2,1] = add(%3, 1e-6)
//! %5: f32[2,1] = rsqrt(%4)
//! %6: f32[2,8] = mul(%1, %5)                %1: f32[2,8] = rms_norm(%0) {normalized_ndim=1, eps=1e-6}
//! %7: f16[2,8] = convert(%6)          ->    %2: f16[2,8] = convert(%1)
//! ```

use super::{Pass, PassCtx, Precision};
use crate::analysis::pattern::{binary, either_order, operand_of, reduced_last, unary, unwidened, with_scalar};
use crate::error::Result;
use crate::ir::{BinaryOp, Changed, DType, Dim, Editor, Graph, Op, ReduceOp, UnaryOp, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "recognise_norms", run };

fn run(graph: &Graph, ctx: &PassCtx) -> Result<(Graph, Changed)> {
    let mut edit = Editor::new(graph, PASS.name);
    // For each old node, the norm that it is, so that a weight behind it can be found.
    let mut norms: Vec<Option<Norm>> = vec![None; graph.nodes.len()];
    for v in graph.values() {
        edit.copy(v);
        let eager_half = |dtype: DType| ctx.precision == Precision::Eager && dtype.is_half();
        let norm = layer_norm(graph, v).or_else(|| rms_norm(graph, v)).or_else(|| normalize(graph, v));
        let norm = norm.filter(|n| !eager_half(n.narrowest));
        let norm = norm.or_else(|| scaled(graph, v, &norms, ctx.precision));
        let norm = norm.or_else(|| weighted(graph, v, &norms, ctx.precision));
        let Some(norm) = norm else { continue };
        let new = norm.emit(edit.at(v), graph, v);
        if edit.replace(v, new, norm.op().name()) {
            norms[v.index()] = Some(norm);
        }
    }
    Ok(edit.finish())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Layer,
    Rms,
    FlooredRms,
}

#[derive(Clone)]
struct Norm {
    kind: Kind,
    x: ValueId,
    weight: Option<ValueId>,
    /// What is multiplied by besides.
    scale: f64,
    normalized_ndim: usize,
    eps: f64,
    /// The narrowest type between operand and result.
    narrowest: DType,
}

/// How far a factor may be from 1 to be none: roundings of two constants.
const fn no_factor(dtype: DType) -> f64 {
    if matches!(dtype, DType::F64) { 4e-16 } else { 1.5e-7 }
}

/// The least that a root mean square may count as, so that its reciprocal is a number in f32.
const LEAST_FLOOR: f64 = 1e-37;

impl Norm {
    fn op(&self) -> Op {
        let (normalized_ndim, eps) = (self.normalized_ndim, self.eps);
        match self.kind {
            Kind::Layer => Op::LayerNorm { normalized_ndim, eps },
            Kind::Rms => Op::RmsNorm { normalized_ndim, eps, floor: false },
            Kind::FlooredRms => Op::RmsNorm { normalized_ndim, eps, floor: true },
        }
    }

    /// Emits what the old value `v` is.
    fn emit(&self, edit: &mut Editor<'_>, graph: &Graph, v: ValueId) -> ValueId {
        let ty = graph.ty(v).clone();
        let mut operands = vec![edit.get(self.x)];
        if let Some(weight) = self.weight {
            let own = graph.ty(weight).clone();
            let shape = ty.shape[ty.rank() - self.normalized_ndim..].to_vec();
            let weight = edit.get(weight);
            let flat = if own.shape == shape { weight } else { edit.emit(Op::Reshape, &[weight], own.dtype, shape) };
            operands.push(flat);
        }
        let normed = edit.emit(self.op(), &operands, ty.dtype, ty.shape.clone());
        if (self.scale - 1.0).abs() <= no_factor(ty.dtype) {
            return normed;
        }
        let factor = edit.emit(Op::Full { value: self.scale }, &[], DType::F64, Vec::new());
        edit.emit(Op::Binary(BinaryOp::Mul), &[normed, factor], ty.dtype, ty.shape)
    }
}

/// `centred * rsqrt(variance + eps)`, `centred / sqrt(variance + eps)`: the parts and eps.
fn normalised(g: &Graph, v: ValueId) -> Option<(ValueId, ValueId, f64)> {
    let deviation = |root, s| Some(with_scalar(g, unary(g, s, root)?, BinaryOp::Add)?).filter(|(_, eps)| *eps >= 0.0);
    let quotient = binary(g, v, BinaryOp::Div)
        .and_then(|(x, s)| deviation(UnaryOp::Sqrt, s).map(|(variance, eps)| (x, variance, eps)));
    let mut products = either_order(g, v, BinaryOp::Mul).into_iter().flatten();
    quotient
        .or_else(|| products.find_map(|(x, s)| deviation(UnaryOp::Rsqrt, s).map(|(variance, eps)| (x, variance, eps))))
}

/// The operand of a mean or a sum of `x * x` over the last dimensions, these squares, and the number of dimensions.
fn squares(g: &Graph, v: ValueId, op: ReduceOp) -> Option<(ValueId, ValueId, usize)> {
    let (square, n) = reduced_last(g, v, op)?;
    let (a, b) = binary(g, square, BinaryOp::Mul)?;
    (a == b).then_some((a, square, n))
}

fn rms_norm(g: &Graph, v: ValueId) -> Option<Norm> {
    let (x, variance, eps) = normalised(g, v)?;
    let (squared, square, normalized_ndim) = squares(g, variance, ReduceOp::Mean)?;
    let base = unwidened(g, x);
    if base != unwidened(g, squared) || !fits(g, base, v) {
        return None;
    }
    let narrowest = narrowest(g, &[square, variance, v]);
    Some(Norm { kind: Kind::Rms, x: base, weight: None, scale: 1.0, normalized_ndim, eps, narrowest })
}

/// `x / max(sqrt(sum(x^2)), eps)`. The root of a sum of `n` squares is that of `n` times that of their mean.
fn normalize(g: &Graph, v: ValueId) -> Option<Norm> {
    let (x, length) = binary(g, v, BinaryOp::Div)?;
    let (root, eps) = with_scalar(g, length, BinaryOp::Maximum)?;
    let sum = unary(g, root, UnaryOp::Sqrt)?;
    let (squared, square, normalized_ndim) = squares(g, sum, ReduceOp::Sum)?;
    let base = unwidened(g, x);
    if base != unwidened(g, squared) || !fits(g, base, v) {
        return None;
    }
    let shape = &g.ty(v).shape;
    let count = Dim::product(&shape[shape.len() - normalized_ndim..]).as_constant().filter(|n| *n > 0)?;
    let scale = (count as f64).sqrt().recip();
    if eps * scale < LEAST_FLOOR {
        return None;
    }
    let narrowest = narrowest(g, &[square, sum, root, length, v]);
    Some(Norm { kind: Kind::FlooredRms, x: base, weight: None, scale, normalized_ndim, eps: eps * scale, narrowest })
}

fn layer_norm(g: &Graph, v: ValueId) -> Option<Norm> {
    let (centred, variance, eps) = normalised(g, v)?;
    let (squared, square, normalized_ndim) = squares(g, variance, ReduceOp::Mean)?;
    let (x, mean) = binary(g, centred, BinaryOp::Sub)?;
    let (averaged, n) = reduced_last(g, mean, ReduceOp::Mean)?;
    let base = unwidened(g, x);
    let same = squared == centred && n == normalized_ndim && unwidened(g, averaged) == base;
    if !same || !fits(g, base, v) {
        return None;
    }
    let narrowest = narrowest(g, &[centred, square, variance, v]);
    Some(Norm { kind: Kind::Layer, x: base, weight: None, scale: 1.0, normalized_ndim, eps, narrowest })
}

/// Shape and types that a norm can have.
fn fits(g: &Graph, x: ValueId, v: ValueId) -> bool {
    let (from, to) = (g.ty(x), g.ty(v));
    from.shape == to.shape && from.dtype.is_float() && (from.dtype == DType::F64) == (to.dtype == DType::F64)
}

fn narrowest(g: &Graph, values: &[ValueId]) -> DType {
    let dtypes = values.iter().map(|v| g.ty(*v).dtype);
    dtypes.min_by_key(|d| d.size_bytes()).unwrap_or(DType::F32)
}

/// The norm without a weight that `y` is, with a conversion behind it or not.
fn bare(g: &Graph, y: ValueId, norms: &[Option<Norm>], precision: Precision) -> Option<Norm> {
    let inner = operand_of(g, y, &Op::Convert).unwrap_or(y);
    let norm = norms[inner.index()].as_ref().filter(|n| n.weight.is_none())?;
    let rounds = g.ty(y).dtype.is_half() && precision == Precision::Eager;
    (!rounds).then(|| norm.clone())
}

/// `norm * constant`, of a norm with a factor of its own.
fn scaled(g: &Graph, v: ValueId, norms: &[Option<Norm>], precision: Precision) -> Option<Norm> {
    let (y, factor) = with_scalar(g, v, BinaryOp::Mul)?;
    let norm = bare(g, y, norms, precision).filter(|norm| norm.kind == Kind::FlooredRms && fits(g, norm.x, v))?;
    Some(Norm { scale: norm.scale * factor, ..norm })
}

/// `norm * weight`, with a conversion between.
fn weighted(g: &Graph, v: ValueId, norms: &[Option<Norm>], precision: Precision) -> Option<Norm> {
    either_order(g, v, BinaryOp::Mul).into_iter().flatten().find_map(|(y, w)| {
        let norm = bare(g, y, norms, precision)?;
        let (x, weight, shape) = (g.ty(norm.x), g.ty(w), &g.ty(v).shape);
        let (leading, own) = weight.shape.split_at(weight.rank().saturating_sub(norm.normalized_ndim));
        let same_size = *own == shape[shape.len() - norm.normalized_ndim..] && leading.iter().all(|d| d.is(1));
        let type_fits = weight.dtype == x.dtype || (x.dtype.is_half() && weight.dtype == DType::F32);
        let fits = same_size && type_fits && g.ty(v).shape == g.ty(y).shape && fits(g, norm.x, v);
        fits.then_some(Norm { weight: Some(w), ..norm })
    })
}
