//! NaN, infinities, signed zeros, the largest and the smallest numbers: the CPU backend gives them where the interpreter does.

mod support;

use oxidiff::compiler::{Options, compile};
use oxidiff::ir::{BinaryOp, DType, Graph, UnaryOp, interp, parse_graph};
use oxidiff::runtime::Executable;
use support::{Case, borrow, epsilon};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Long enough for vector code and its rest.
fn specials(dtype: DType) -> Vec<f64> {
    let (largest, smallest) = match dtype {
        DType::F16 => (65504.0, f64::exp2(-14.0)),
        DType::BF16 => (3.3895313892515355e38, f64::exp2(-126.0)),
        _ => (f64::from(f32::MAX), f64::from(f32::MIN_POSITIVE)),
    };
    let mut values =
        vec![f64::NAN, f64::INFINITY, 0.0, largest, smallest, 1.0, 0.5, 88.0, 20.5, 100.0, 2.5, 1e-3, 700.0];
    let negative: Vec<f64> = values.iter().map(|v| -v).collect();
    values.extend(negative);
    values.extend([3.0, -7.0, 11.0, 0.25, -0.125, 9.0, 4.0, 5.0, 6.0]);
    values
}

fn tensor(dtype: DType, shape: &[i64], values: &[f64]) -> interp::Tensor {
    interp::Tensor::from_f64(dtype, shape, values).unwrap()
}

fn run_cpu(graph: &Graph, inputs: &[interp::Tensor]) -> interp::Tensor {
    let options = Options { backend: Some("cpu".into()), ..Options::default() };
    let (program, _) = compile(graph.clone(), &options).unwrap();
    let executable = Executable::new(program, Vec::new()).unwrap();
    let case = Case { executable, graph: graph.clone(), weights: vec![], random: support::Random(1), largest: 1 };
    let borrowed: Vec<_> = inputs.iter().map(borrow).collect();
    case.run(&borrowed, &[]).unwrap().remove(0)
}

/// The same NaNs and infinities; finite numbers up to `units` roundings of themselves or of `scale`, or less than the smallest
/// normal number apart.
fn check(text: &str, inputs: &[interp::Tensor], units: f64, scale: f64) -> Vec<String> {
    let graph = parse_graph(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let want = interp::run(&graph, &[], inputs, &[]).unwrap().remove(0);
    let got = run_cpu(&graph, inputs);
    let tiny = if want.dtype() == DType::F16 { f64::exp2(-14.0) } else { f64::exp2(-126.0) };
    let relative = units * (epsilon(want.dtype()) + epsilon(DType::F32));
    let near = relative * scale + tiny;
    let mut failures = Vec::new();
    for (i, (g, w)) in got.to_f64().into_iter().zip(want.to_f64()).enumerate() {
        let same = (g.is_nan() && w.is_nan()) || g == w || (g - w).abs() <= relative * w.abs() + near;
        if !same || (w.is_infinite() && g != w) {
            let at: Vec<String> = inputs.iter().map(|t| t.to_f64().get(i).map_or("-".into(), f64::to_string)).collect();
            failures.push(format!("element {i} ({}): {g} instead of {w}\n{text}", at.join(", ")));
        }
    }
    failures
}

fn report(failures: &[String]) {
    assert!(failures.is_empty(), "{} failures\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn unary_ops() {
    let mut failures = Vec::new();
    for dtype in FLOATS {
        let values = specials(dtype);
        let n = values.len() as i64;
        // One is for integers, the other no matter of one element.
        let others = [UnaryOp::BitwiseNot, UnaryOp::RotatePairs];
        for op in UnaryOp::ALL.iter().filter(|op| !others.contains(op)) {
            let result = if op.is_predicate() { DType::Bool } else { dtype };
            // The tails of gelu are differences of numbers near 1.
            let scale = if matches!(op, UnaryOp::Gelu | UnaryOp::GeluTanh) { 1.0 } else { 0.0 };
            let text = format!(
                "input 0 \"x\": {dtype}[{n}]\n%0: {dtype}[{n}] = input() {{index=0}}\n\
                 %1: {result}[{n}] = {}(%0)\nreturn %1\n",
                op.name()
            );
            failures.extend(check(&text, &[tensor(dtype, &[n], &values)], 8.0, scale));
        }
    }
    report(&failures);
}

/// Every pair of special values.
#[test]
fn binary_ops() {
    let mut failures = Vec::new();
    for dtype in FLOATS {
        let values = specials(dtype);
        let n = values.len();
        let first: Vec<f64> = (0..n * n).map(|i| values[i / n]).collect();
        let second: Vec<f64> = (0..n * n).map(|i| values[i % n]).collect();
        let inputs = [first, second].map(|v| tensor(dtype, &[(n * n) as i64], &v));
        let bitwise = [
            BinaryOp::BitwiseAnd,
            BinaryOp::BitwiseOr,
            BinaryOp::BitwiseXor,
            BinaryOp::BitwiseLeftShift,
            BinaryOp::BitwiseRightShift,
        ];
        for op in BinaryOp::ALL.iter().filter(|o| !bitwise.contains(o)) {
            let result = if op.is_predicate() { DType::Bool } else { dtype };
            let n = n * n;
            let text = format!(
                "input 0 \"x\": {dtype}[{n}]\ninput 1 \"y\": {dtype}[{n}]\n%0: {dtype}[{n}] = input() {{index=0}}\n\
                 %1: {dtype}[{n}] = input() {{index=1}}\n%2: {result}[{n}] = {}(%0, %1)\nreturn %2\n",
                op.name()
            );
            failures.extend(check(&text, &inputs, 8.0, 0.0));
        }
    }
    report(&failures);
}

#[test]
fn conversions() {
    let mut failures = Vec::new();
    for from in FLOATS {
        let values = specials(from);
        let n = values.len() as i64;
        for to in DType::ALL {
            let text = format!(
                "input 0 \"x\": {from}[{n}]\n%0: {from}[{n}] = input() {{index=0}}\n%1: {to}[{n}] = convert(%0)\n\
                 return %1\n"
            );
            failures.extend(check(&text, &[tensor(from, &[n], &values)], 0.0, 0.0));
        }
    }
    report(&failures);
}

/// Rows that hold NaN, infinities, only -inf, huge numbers, or one value.
#[test]
fn rows() {
    const ROWS: i64 = 8;
    const WIDTH: i64 = 24;
    let mut failures = Vec::new();
    for dtype in FLOATS {
        // Its square is a f32 too.
        let largest = if dtype == DType::F16 { 60000.0 } else { 1e16 };
        let mut values: Vec<f64> = (0..ROWS * WIDTH).map(|i| ((i * 7) % 13) as f64 / 4.0 - 1.5).collect();
        let width = WIDTH as usize;
        values[width + 3] = f64::NAN;
        values[2 * width + 5] = f64::INFINITY;
        values[3 * width + 6] = f64::NEG_INFINITY;
        values[4 * width..5 * width].fill(f64::NEG_INFINITY);
        values[5 * width..6 * width].fill(0.75);
        values[6 * width] = largest;
        let x = tensor(dtype, &[ROWS, WIDTH], &values);
        let head = format!("input 0 \"x\": {dtype}[8,24]\n%0: {dtype}[8,24] = input() {{index=0}}\n");
        for node in [
            format!("{dtype}[8,24] = softmax(%0) {{dim=1}}"),
            format!("{dtype}[8] = amax(%0) {{dims=[1], keepdim=false}}"),
            format!("{dtype}[8,1] = amin(%0) {{dims=[1], keepdim=true}}"),
            format!("{dtype}[24] = amax(%0) {{dims=[0], keepdim=false}}"),
            "i64[8] = argmax(%0) {dims=[1], keepdim=false}".to_owned(),
            "i64[8] = argmin(%0) {dims=[1], keepdim=false}".to_owned(),
            "bool[8] = any(%0) {dims=[1], keepdim=false}".to_owned(),
            format!("{dtype}[8] = sum(%0) {{dims=[1], keepdim=false}}"),
            format!("{dtype}[8] = mean(%0) {{dims=[1], keepdim=false}}"),
            format!("{dtype}[8,24] = cumsum(%0) {{dim=1}}"),
            format!("{dtype}[8,24] = layer_norm(%0) {{normalized_ndim=1, eps=1e-5}}"),
        ] {
            failures.extend(check(&format!("{head}%1: {node}\nreturn %1\n"), std::slice::from_ref(&x), 64.0, 1.0));
        }
    }
    report(&failures);
}

/// A row of scores that is masked whole gives 0, NaN in a query its own row, NaN in a key every row that sees it.
#[test]
fn attention() {
    let mut failures = Vec::new();
    for dtype in FLOATS {
        let fill =
            |n: i64, shift: i64| -> Vec<f64> { (0..n).map(|i| ((i * 5 + shift) % 11) as f64 / 8.0 - 0.6).collect() };
        let (mut q, mut k, v) = (fill(2 * 20 * 16, 1), fill(2 * 20 * 16, 4), fill(2 * 20 * 16, 7));
        q[16 * 3] = f64::NAN;
        q[16 * 7] = 300.0;
        k[20 * 16 + 16 * 19] = f64::NAN;
        let mut mask = vec![1.0; 20 * 20];
        mask[20 * 5..20 * 6].fill(0.0);
        (0..20).filter(|i| i % 2 == 0).for_each(|i| mask[20 * i + 19] = 0.0);
        let heads = |values: &[f64]| tensor(dtype, &[2, 20, 16], values);
        let inputs = [heads(&q), heads(&k), heads(&v), tensor(DType::Bool, &[20, 20], &mask)];
        let text = format!(
            "input 0 \"q\": {dtype}[2,20,16]\ninput 1 \"k\": {dtype}[2,20,16]\ninput 2 \"v\": {dtype}[2,20,16]\n\
             input 3 \"m\": bool[20,20]\n%0: {dtype}[2,20,16] = input() {{index=0}}\n\
             %1: {dtype}[2,20,16] = input() {{index=1}}\n%2: {dtype}[2,20,16] = input() {{index=2}}\n\
             %3: bool[20,20] = input() {{index=3}}\n%4: {dtype}[2,20,16] = \
             scaled_dot_product_attention(%0, %1, %2, %3) {{is_causal=false, scale=0.25}}\nreturn %4\n"
        );
        failures.extend(check(&text, &inputs, 128.0, 1.0));
    }
    report(&failures);
}
