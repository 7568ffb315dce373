//! Finds normalisations that models write out.
//!
//! *What:* `x * rsqrt(mean(x^2) + eps)` becomes `rms_norm`, `(x - mean(x)) * rsqrt(mean((x - mean(x))^2) + eps)` becomes
//! `layer_norm`, and a product with a weight of the normalised size becomes the norm's weight. The upcasts that text
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
use crate::analysis::pattern::{binary, either_order, mean_of_last, operand_of, unary, unwidened, with_scalar};
use crate::error::Result;
use crate::ir::{BinaryOp, Changed, DType, Editor, Graph, Op, UnaryOp, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "recognise_norms", run };

fn run(graph: &Graph, ctx: &PassCtx) -> Result<(Graph, Changed)> {
    let mut edit = Editor::new(graph, PASS.name);
    // For each old node, the norm that it is, so that a weight behind it can be found.
    let mut norms: Vec<Option<Norm>> = vec![None; graph.nodes.len()];
    for v in graph.values() {
        edit.copy(v);
        let eager_half = |dtype: DType| ctx.precision == Precision::Eager && dtype.is_half();
        let norm = layer_norm(graph, v).or_else(|| rms_norm(graph, v)).filter(|n| !eager_half(n.narrowest));
        let norm = norm.or_else(|| weighted(graph, v, &norms, ctx.precision));
        let Some(norm) = norm else { continue };
        let ty = graph.ty(v).clone();
        let mut operands = vec![edit.get(norm.x)];
        operands.extend(norm.weight.map(|w| edit.get(w)));
        let new = edit.at(v).emit(norm.op(), &operands, ty.dtype, ty.shape);
        if edit.replace(v, new, norm.op().name()) {
            norms[v.index()] = Some(norm);
        }
    }
    Ok(edit.finish())
}

#[derive(Clone)]
struct Norm {
    is_rms: bool,
    x: ValueId,
    weight: Option<ValueId>,
    normalized_ndim: usize,
    eps: f64,
    /// The narrowest type between operand and result.
    narrowest: DType,
}

impl Norm {
    fn op(&self) -> Op {
        match self.is_rms {
            true => Op::RmsNorm { normalized_ndim: self.normalized_ndim, eps: self.eps },
            false => Op::LayerNorm { normalized_ndim: self.normalized_ndim, eps: self.eps },
        }
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

/// The operand of `mean(x * x)` over the last dimensions, and their number.
fn mean_square(g: &Graph, v: ValueId) -> Option<(ValueId, usize)> {
    let (square, n) = mean_of_last(g, v)?;
    let (a, b) = binary(g, square, BinaryOp::Mul)?;
    (a == b).then_some((a, n))
}

fn rms_norm(g: &Graph, v: ValueId) -> Option<Norm> {
    let (x, variance, eps) = normalised(g, v)?;
    let (squared, normalized_ndim) = mean_square(g, variance)?;
    let base = unwidened(g, x);
    if base != unwidened(g, squared) || !fits(g, base, v) {
        return None;
    }
    let narrowest = narrowest(g, &[variance, v]);
    Some(Norm { is_rms: true, x: base, weight: None, normalized_ndim, eps, narrowest })
}

fn layer_norm(g: &Graph, v: ValueId) -> Option<Norm> {
    let (centred, variance, eps) = normalised(g, v)?;
    let (squared, normalized_ndim) = mean_square(g, variance)?;
    let (x, mean) = binary(g, centred, BinaryOp::Sub)?;
    let (averaged, n) = mean_of_last(g, mean)?;
    let base = unwidened(g, x);
    let same = squared == centred && n == normalized_ndim && unwidened(g, averaged) == base;
    if !same || !fits(g, base, v) {
        return None;
    }
    let narrowest = narrowest(g, &[centred, variance, v]);
    Some(Norm { is_rms: false, x: base, weight: None, normalized_ndim, eps, narrowest })
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

/// `norm * weight`, with a conversion between.
fn weighted(g: &Graph, v: ValueId, norms: &[Option<Norm>], precision: Precision) -> Option<Norm> {
    either_order(g, v, BinaryOp::Mul).into_iter().flatten().find_map(|(y, w)| {
        let inner = operand_of(g, y, &Op::Convert).unwrap_or(y);
        let norm = norms[inner.index()].as_ref().filter(|n| n.weight.is_none())?;
        let rounds = g.ty(y).dtype.is_half() && precision == Precision::Eager;
        let (x, weight, shape) = (g.ty(norm.x), g.ty(w), &g.ty(v).shape);
        let same_size = weight.shape == shape[shape.len() - norm.normalized_ndim..];
        let type_fits = weight.dtype == x.dtype || (x.dtype.is_half() && weight.dtype == DType::F32);
        let fits = !rounds && same_size && type_fits && g.ty(v).shape == g.ty(y).shape && fits(g, norm.x, v);
        fits.then(|| Norm { weight: Some(w), ..norm.clone() })
    })
}
