//! Finds activation functions that models write out.
//!
//! *What:* `x * sigmoid(x)` becomes `silu`, the tanh and the erf formula of GELU become `gelu_tanh` and `gelu`. *Why
//! faster:* one vector function instead of up to eight instructions, and one node to keep in an epilogue. *Requires:*
//! canonical form (constants on the right). *Guarantees:* with `precision=eager`, a 16-bit formula stays, because eager
//! rounds inside of it. `x * sigmoid(1.702 x)` is another function and stays.
//!
//! ```text
//! %1: f32[4] = sigmoid(%0)
//! %2: f32[4] = mul(%0, %1)        ->        %1: f32[4] = silu(%0)
//! ```

use super::{Pass, PassCtx, Precision};
use crate::analysis::pattern::{either_order, is_about, unary, with_scalar};
use crate::error::Result;
use crate::ir::{BinaryOp, Changed, Editor, Graph, Op, UnaryOp, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "recognise_activations", run };

fn run(graph: &Graph, ctx: &PassCtx) -> Result<(Graph, Changed)> {
    let mut edit = Editor::new(graph, PASS.name);
    for v in graph.values() {
        edit.copy(v);
        if ctx.precision == Precision::Eager && graph.ty(v).dtype.is_half() {
            continue;
        }
        let Some((op, x)) = activation(graph, v).filter(|(_, x)| graph.ty(*x) == graph.ty(v)) else { continue };
        let (ty, x) = (graph.ty(v).clone(), edit.get(x));
        let new = edit.at(v).emit(Op::Unary(op), &[x], ty.dtype, ty.shape);
        edit.replace(v, new, op.name());
    }
    Ok(edit.finish())
}

/// The function and its argument.
fn activation(g: &Graph, v: ValueId) -> Option<(UnaryOp, ValueId)> {
    let product = either_order(g, v, BinaryOp::Mul).into_iter().flatten();
    product
        .into_iter()
        .find_map(|(a, b)| {
            let silu = unary(g, b, UnaryOp::Sigmoid).filter(|x| *x == a).map(|x| (UnaryOp::Silu, x));
            silu.or_else(|| gelu(g, a, b))
        })
        .or_else(|| halved(g, v))
}

/// `(0.5 x) (1 + f(x))`, or `x (0.5 (1 + f(x)))`.
fn gelu(g: &Graph, a: ValueId, b: ValueId) -> Option<(UnaryOp, ValueId)> {
    let half = |v| with_scalar(g, v, BinaryOp::Mul).filter(|(_, c)| *c == 0.5).map(|(x, _)| x);
    match (half(a), half(b)) {
        (Some(x), _) => cdf(g, b, x),
        (_, Some(sum)) => cdf(g, sum, a),
        _ => None,
    }
}

/// `0.5 (x (1 + f(x)))`.
fn halved(g: &Graph, v: ValueId) -> Option<(UnaryOp, ValueId)> {
    let (product, _) = with_scalar(g, v, BinaryOp::Mul).filter(|(_, c)| *c == 0.5)?;
    either_order(g, product, BinaryOp::Mul).into_iter().flatten().find_map(|(x, sum)| cdf(g, sum, x))
}

/// `1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))` or `1 + erf(x / sqrt 2)`.
fn cdf(g: &Graph, v: ValueId, x: ValueId) -> Option<(UnaryOp, ValueId)> {
    let (inner, _) = with_scalar(g, v, BinaryOp::Add).filter(|(_, c)| *c == 1.0)?;
    if let Some(argument) = unary(g, inner, UnaryOp::Erf) {
        let scaled = scale_of(g, argument).filter(|(y, c)| *y == x && is_close(*c, std::f64::consts::FRAC_1_SQRT_2));
        return scaled.map(|_| (UnaryOp::Gelu, x));
    }
    let (sum, c) = with_scalar(g, unary(g, inner, UnaryOp::Tanh)?, BinaryOp::Mul)?;
    let polynomial = either_order(g, sum, BinaryOp::Add).into_iter().flatten().any(|(y, term)| {
        let cubed = with_scalar(g, term, BinaryOp::Mul).filter(|(_, c)| is_about(*c, 0.044715));
        y == x && cubed.is_some_and(|(p, _)| is_cube(g, p, x))
    });
    (polynomial && is_close(c, (2.0 / std::f64::consts::PI).sqrt())).then_some((UnaryOp::GeluTanh, x))
}

/// A value as a product with a constant.
fn scale_of(g: &Graph, v: ValueId) -> Option<(ValueId, f64)> {
    with_scalar(g, v, BinaryOp::Mul).or_else(|| with_scalar(g, v, BinaryOp::Div).map(|(x, c)| (x, 1.0 / c)))
}

/// Equal as 32-bit numbers, give or take the last digit.
fn is_close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-6 * b.abs()
}

fn is_cube(g: &Graph, v: ValueId, x: ValueId) -> bool {
    let square = |v| either_order(g, v, BinaryOp::Mul)[0] == Some((x, x));
    with_scalar(g, v, BinaryOp::Pow) == Some((x, 3.0))
        || either_order(g, v, BinaryOp::Mul).into_iter().flatten().any(|(a, b)| a == x && square(b))
}
