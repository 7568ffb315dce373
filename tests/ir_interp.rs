//! The interpreter on values worked out by hand, and what it refuses.

use oxidiff::ir::interp::{Tensor, eval};
use oxidiff::ir::{DType, Op, ValueType, parse_graph};
use oxidiff::{Error, Result};

/// Evaluates the node text `f32[2] = op() {...}` on these tensors, with s0 = 3.
fn run(node: &str, operands: &[&Tensor]) -> Result<Tensor> {
    let (op, ty) = node_of(node, operands);
    eval(&op, &ty, &[3], operands)
}

fn node_of(node: &str, operands: &[&Tensor]) -> (Op, ValueType) {
    let mut text = String::from("symbol s0 \"s\" = [3]\n");
    let ids: Vec<String> = (0..operands.len()).map(|i| format!("%{i}")).collect();
    for id in &ids {
        text += &format!("{id}: f32[] = full() {{value=0}}\n");
    }
    text += &format!("%{}: {}\nreturn", ids.len(), node.replace("()", &format!("({})", ids.join(", "))));
    let graph = parse_graph(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
    let node = graph.nodes.last().unwrap();
    (node.op.clone(), node.ty.clone())
}

fn tensor(dtype: DType, shape: &[i64], values: &[f64]) -> Tensor {
    Tensor::from_f64(dtype, shape, values).unwrap()
}

fn f32s(shape: &[i64], values: &[f64]) -> Tensor {
    tensor(DType::F32, shape, values)
}

fn i64s(shape: &[i64], values: &[i64]) -> Tensor {
    Tensor::from_i64(DType::I64, shape, values).unwrap()
}

/// 0, 1, 2, ... of that shape.
fn iota(shape: &[i64]) -> Tensor {
    let values: Vec<f64> = (0..shape.iter().product::<i64>()).map(|i| i as f64).collect();
    f32s(shape, &values)
}

/// The result is exactly this, NaN being equal to NaN.
fn check(node: &str, operands: &[&Tensor], expect: &[f64]) {
    let result = run(node, operands).unwrap_or_else(|e| panic!("{node}: {e}"));
    let got = result.to_f64();
    let same = got.len() == expect.len() && got.iter().zip(expect).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
    assert!(same, "{node}: {got:?}, expected {expect:?}");
}

/// The result is this to within 1e-6 of its largest element.
fn near(node: &str, operands: &[&Tensor], expect: &[f64]) {
    let got = run(node, operands).unwrap_or_else(|e| panic!("{node}: {e}")).to_f64();
    let scale = expect.iter().fold(1.0f64, |m, v| m.max(v.abs()));
    let close = got.len() == expect.len() && got.iter().zip(expect).all(|(a, b)| (a - b).abs() <= 1e-6 * scale);
    assert!(close, "{node}: {got:?}, expected {expect:?}");
}

fn fails(node: &str, operands: &[&Tensor], why: &str) {
    let error = run(node, operands).expect_err(node).to_string();
    assert!(error.contains(why), "{node}: {error}");
}

const NAN: f64 = f64::NAN;
const INF: f64 = f64::INFINITY;

#[test]
fn rounds_once_in_the_compute_type() {
    // 1 + 2^-11 is not a f16; the sum with 2^-11 is, if computed in f32.
    let x = tensor(DType::F16, &[1], &[1.0]);
    check("f16[1] = add()", &[&x, &tensor(DType::F32, &[], &[f64::exp2(-11.0)])], &[1.0]);
    check("f16[1] = add()", &[&x, &tensor(DType::F32, &[], &[f64::exp2(-10.0)])], &[1.0 + f64::exp2(-10.0)]);
    // A number keeps its precision until the op converts it to f32, not to f16.
    let third = tensor(DType::F64, &[], &[1.0 / 3.0]);
    let product = f64::from(half::f16::from_f32(3.0 * (1.0f32 / 3.0)));
    check("f16[1] = mul()", &[&tensor(DType::F16, &[1], &[3.0]), &third], &[product]);
    check("f16[1] = mul()", &[&tensor(DType::F16, &[1], &[60000.0]), &tensor(DType::F16, &[], &[2.0])], &[INF]);
    check("f32[1] = mul()", &[&tensor(DType::F16, &[1], &[60000.0]), &tensor(DType::F16, &[], &[2.0])], &[120000.0]);
    check("bool[1] = lt()", &[&f32s(&[1], &[0.1]), &tensor(DType::F64, &[], &[0.1])], &[0.0]);
}

#[test]
fn pointwise_special_values() {
    let x = f32s(&[6], &[-INF, -1.5, -0.0, 0.5, INF, NAN]);
    check("f32[6] = relu()", &[&x], &[0.0, 0.0, 0.0, 0.5, INF, NAN]);
    check("f32[6] = sign()", &[&x], &[-1.0, -1.0, 0.0, 1.0, 1.0, 0.0]);
    check("f32[6] = round()", &[&x], &[-INF, -2.0, 0.0, 0.0, INF, NAN]);
    check("f32[6] = exp()", &[&x], &[0.0, f64::from((-1.5f32).exp()), 1.0, f64::from(0.5f32.exp()), INF, NAN]);
    check("bool[6] = isnan()", &[&x], &[0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    check("bool[6] = isinf()", &[&x], &[1.0, 0.0, 0.0, 0.0, 1.0, 0.0]);
    check("bool[6] = logical_not()", &[&x], &[0.0, 0.0, 1.0, 0.0, 0.0, 0.0]);
    check("f32[6] = maximum()", &[&x, &f32s(&[], &[0.0])], &[0.0, 0.0, 0.0, 0.5, INF, NAN]);
    check("f32[6] = maximum()", &[&x, &f32s(&[], &[NAN])], &[NAN; 6]);
    check("i64[6] = convert()", &[&x], &[i64::MIN as f64, -1.0, 0.0, 0.0, i64::MIN as f64, i64::MIN as f64]);
    check("u8[6] = convert()", &[&x], &[0.0, 255.0, 0.0, 0.0, 0.0, 0.0]);
    check("bool[6] = convert()", &[&x], &[1.0, 1.0, 0.0, 1.0, 1.0, 1.0]);
    near("f32[2] = gelu()", &[&f32s(&[2], &[1.0, -2.0])], &[0.841_344_746, -0.045_500_264]);
    near("f32[2] = gelu_tanh()", &[&f32s(&[2], &[1.0, -2.0])], &[0.841_191_99, -0.045_402_306]);
    near("f32[2] = silu()", &[&f32s(&[2], &[1.0, -2.0])], &[0.731_058_58, -0.238_405_84]);
    near("f32[2] = softplus()", &[&f32s(&[2], &[1.0, 30.0])], &[1.313_261_7, 30.0]);
    near("f32[1] = erf()", &[&f32s(&[1], &[0.5])], &[0.520_499_88]);
}

#[test]
fn divisions_follow_python() {
    let (a, b) = (i64s(&[4], &[7, -7, 7, -7]), i64s(&[4], &[3, 3, -3, -3]));
    check("i64[4] = floor_divide()", &[&a, &b], &[2.0, -3.0, -3.0, 2.0]);
    check("i64[4] = remainder()", &[&a, &b], &[1.0, 2.0, -2.0, -1.0]);
    let (x, y) = (f32s(&[4], &[7.0, -7.0, 7.5, -7.5]), f32s(&[4], &[3.0, 3.0, -3.0, 0.0]));
    check("f32[4] = floor_divide()", &[&x, &y], &[2.0, -3.0, -3.0, -INF]);
    check("f32[4] = remainder()", &[&x, &y], &[1.0, 2.0, -1.5, NAN]);
    check("f32[4] = div()", &[&a, &b], &[7.0f32 / 3.0, -7.0 / 3.0, -7.0 / 3.0, 7.0 / 3.0].map(f64::from));
    check("i64[4] = pow()", &[&b, &i64s(&[], &[3])], &[27.0, 27.0, -27.0, -27.0]);
    check("i64[3] = pow()", &[&i64s(&[3], &[1, -1, 2]), &i64s(&[], &[-3])], &[1.0, -1.0, 0.0]);
    fails("i64[4] = floor_divide()", &[&a, &i64s(&[], &[0])], "division by zero");
    let lowest = i64s(&[1], &[i64::MIN]);
    check("i64[1] = floor_divide()", &[&lowest, &i64s(&[], &[-1])], &[i64::MIN as f64]);
    check("i64[1] = abs()", &[&lowest], &[i64::MIN as f64]);
    check("u8[1] = add()", &[&tensor(DType::U8, &[1], &[250.0]), &i64s(&[], &[10])], &[4.0]);
    check(
        "bool[2] = add()",
        &[&tensor(DType::Bool, &[2], &[0.0, 1.0]), &tensor(DType::Bool, &[], &[1.0])],
        &[1.0, 1.0],
    );
    check("bool[2] = bitwise_not()", &[&tensor(DType::Bool, &[2], &[0.0, 1.0])], &[1.0, 0.0]);
    check("i32[2] = bitwise_not()", &[&tensor(DType::I32, &[2], &[0.0, 1.0])], &[-1.0, -2.0]);
}

#[test]
fn movement() {
    let x = iota(&[2, 3]);
    check("f32[3,2] = permute() {dims=[1, 0]}", &[&x], &[0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    check("f32[2,2,3] = expand()", &[&x], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    check("f32[2,3] = expand()", &[&iota(&[2, 1])], &[0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    check("f32[2,2] = slice() {dim=1, start=0, step=2}", &[&x], &[0.0, 2.0, 3.0, 5.0]);
    check("f32[2,1] = slice() {dim=1, start=s0-1, step=1}", &[&x], &[2.0, 5.0]);
    check("f32[2,4] = cat() {dim=1}", &[&x, &f32s(&[2, 1], &[8.0, 9.0])], &[0.0, 1.0, 2.0, 8.0, 3.0, 4.0, 5.0, 9.0]);
    check(
        "f32[3,3] = cat() {dim=0}",
        &[&f32s(&[0, 3], &[]), &x, &iota(&[1, 3])],
        &[0., 1., 2., 3., 4., 5., 0., 1., 2.],
    );
    check("f32[3,4] = pad() {before=[1, 0], value=9}", &[&x], &[9., 9., 9., 9., 0., 1., 2., 9., 3., 4., 5., 9.]);
    let source = f32s(&[2, 2], &[10.0, 11.0, 12.0, 13.0]);
    check("f32[2,3] = slice_scatter() {dim=1, start=0, step=2}", &[&x, &source], &[10., 1., 11., 12., 4., 13.]);
    check("f32[2,3] = flip() {dims=[0, 1]}", &[&x], &[5.0, 4.0, 3.0, 2.0, 1.0, 0.0]);
    check("f32[0] = flip() {dims=[0]}", &[&iota(&[0])], &[]);
    check("i64[3] = arange() {start=s0, step=-2}", &[], &[3.0, 1.0, -1.0]);
    check("f16[2] = size_of() {size=s0*s0}", &[], &[9.0, 9.0]);
    check("u8[2] = full() {value=-inf}", &[], &[0.0, 0.0]);
    for (dtype, width) in [("bool", 1), ("f16", 2), ("f64", 8)] {
        let x = Tensor::new(DType::from_name(dtype).unwrap(), vec![2, 2], vec![1; 4 * width]).unwrap();
        assert_eq!(
            run(&format!("{dtype}[2,2] = permute() {{dims=[1, 0]}}"), &[&x]).unwrap().bytes(),
            vec![1; 4 * width]
        );
    }
}

#[test]
fn gathers() {
    let x = iota(&[2, 3]);
    let index = i64s(&[2, 2], &[1, 0, 0, 1]);
    check("f32[2,2,3] = index_select() {dim=0}", &[&x, &index], &[3., 4., 5., 0., 1., 2., 0., 1., 2., 3., 4., 5.]);
    check("f32[2,1] = index_select() {dim=1}", &[&x, &i64s(&[1], &[2])], &[2.0, 5.0]);
    check("f32[2,2] = gather() {dim=1}", &[&x, &i64s(&[2, 2], &[2, 0, 1, 1])], &[2.0, 0.0, 4.0, 4.0]);
    check("f32[1,2] = gather() {dim=0}", &[&x, &i64s(&[1, 2], &[1, 0])], &[3.0, 1.0]);
    let (places, weights) = (i64s(&[3, 2], &[0, 1, 2, 2, 1, 0]), f32s(&[3, 2], &[0.5, 0.5, 1.0, 1.0, 2.0, -1.0]));
    check("f32[2,3] = interpolate() {dim=1}", &[&x, &places, &weights], &[0.5, 4.0, 2.0, 3.5, 10.0, 5.0]);
    let (places, weights) = (i64s(&[1, 2], &[0, 1]), f32s(&[1, 2], &[0.25, 0.75]));
    check("f32[1,3] = interpolate() {dim=0}", &[&x, &places, &weights], &[2.25, 3.25, 4.25]);
    fails("f32[2,1] = interpolate() {dim=1}", &[&x, &i64s(&[1, 2], &[0, 3]), &weights], "index 3 is out of range");
    fails("f32[1,3] = index_select() {dim=0}", &[&x, &i64s(&[1], &[2])], "index 2 is out of range for size 2");
    fails("f32[1,3] = index_select() {dim=0}", &[&x, &i64s(&[1], &[-1])], "out of range");
    fails("f32[1,1] = gather() {dim=1}", &[&x, &i64s(&[1, 1], &[3])], "out of range");
}

#[test]
fn reductions() {
    let x = iota(&[2, 3]);
    check("f32[3] = sum() {dims=[0], keepdim=false}", &[&x], &[3.0, 5.0, 7.0]);
    check("f32[1,1] = mean() {dims=[1, 0], keepdim=true}", &[&x], &[2.5]);
    check("f32[2] = prod() {dims=[1], keepdim=false}", &[&x], &[0.0, 60.0]);
    check("f32[2,1] = amax() {dims=[1], keepdim=true}", &[&f32s(&[2, 2], &[1.0, NAN, 2.0, -INF])], &[NAN, 2.0]);
    check("bool[2] = any() {dims=[1], keepdim=false}", &[&x], &[1.0, 1.0]);
    check("bool[2] = all() {dims=[1], keepdim=false}", &[&x], &[0.0, 1.0]);
    check("i64[2] = argmax() {dims=[1], keepdim=false}", &[&f32s(&[2, 3], &[1., 3., 3., NAN, 9., NAN])], &[1.0, 0.0]);
    check("i64[1] = argmin() {dims=[0], keepdim=true}", &[&i64s(&[3], &[i64::MAX, i64::MIN, i64::MIN])], &[1.0]);
    check("f32[2] = sum() {dims=[1], keepdim=false}", &[&iota(&[2, 0])], &[0.0, 0.0]);
    check("f32[2] = mean() {dims=[1], keepdim=false}", &[&iota(&[2, 0])], &[NAN, NAN]);
    check("i64[] = sum() {dims=[0], keepdim=false}", &[&tensor(DType::Bool, &[3], &[1.0, 1.0, 0.0])], &[2.0]);
    check("f32[2,3] = cumsum() {dim=1}", &[&x], &[0.0, 1.0, 3.0, 3.0, 7.0, 12.0]);
    check("f32[2,3] = cumsum() {dim=0}", &[&x], &[0.0, 1.0, 2.0, 3.0, 5.0, 7.0]);
    check("f32[2,2] = softmax() {dim=0}", &[&f32s(&[2, 2], &[5.0, -INF, 5.0, -INF])], &[0.5, NAN, 0.5, NAN]);
}

#[test]
fn contractions() {
    let x = iota(&[2, 3]);
    check("f32[2,2] = linear()", &[&x, &iota(&[2, 3])], &[5.0, 14.0, 14.0, 50.0]);
    check("f32[2,1] = linear()", &[&x, &iota(&[1, 3]), &f32s(&[1], &[0.5])], &[5.5, 14.5]);
    check("f32[2,2] = matmul()", &[&x, &iota(&[3, 2])], &[10.0, 13.0, 28.0, 40.0]);
    let batched = run("f32[5,4,2,2] = matmul()", &[&iota(&[5, 1, 2, 3]), &iota(&[4, 3, 2])]).unwrap().to_f64();
    assert_eq!(batched[..4], [10.0, 13.0, 28.0, 40.0]);
    // Batch 1 of a, batch 1 of b: row 6, 7, 8 by column 6, 8, 10.
    assert_eq!(batched[(4 + 1) * 4], 6.0 * 6.0 + 7.0 * 8.0 + 8.0 * 10.0);
    check("f32[2,2] = matmul()", &[&iota(&[2, 0]), &iota(&[0, 2])], &[0.0; 4]);
}

#[test]
fn convolutions() {
    let attributes = |stride: i64, padding: i64, dilation: i64, groups: i64, last: bool| {
        format!(
            "{{stride=[{stride}], padding=[{padding}], dilation=[{dilation}], groups={groups}, channels_last={last}}}"
        )
    };
    let conv = |ty: &str, a: String| format!("{ty} = convolution() {a}");
    let (x, w) = (f32s(&[1, 1, 4], &[1.0, 2.0, 3.0, 4.0]), f32s(&[1, 1, 3], &[1.0, 10.0, 100.0]));
    check(&conv("f32[1,1,2]", attributes(1, 0, 1, 1, false)), &[&x, &w], &[321.0, 432.0]);
    check(&conv("f32[1,1,4]", attributes(1, 1, 1, 1, false)), &[&x, &w], &[210.0, 321.0, 432.0, 43.0]);
    check(&conv("f32[1,1,2]", attributes(2, 1, 1, 1, false)), &[&x, &w], &[210.0, 432.0]);
    check(&conv("f32[1,1,2]", attributes(1, 1, 2, 1, false)), &[&x, &w], &[420.0, 31.0]);
    let two = f32s(&[1, 2, 2], &[1.0, 2.0, 3.0, 4.0]);
    let depthwise = f32s(&[2, 1, 1], &[10.0, 100.0]);
    let bias = f32s(&[2], &[0.5, 0.25]);
    check(
        &conv("f32[1,2,2]", attributes(1, 0, 1, 2, false)),
        &[&two, &depthwise, &bias],
        &[10.5, 20.5, 300.25, 400.25],
    );
    let two_last = f32s(&[1, 2, 2], &[1.0, 3.0, 2.0, 4.0]);
    check(
        &conv("f32[1,2,2]", attributes(1, 0, 1, 2, true)),
        &[&two_last, &depthwise, &bias],
        &[10.5, 300.25, 20.5, 400.25],
    );
    // Two dimensions, more positions than a block: an average over 3x3 of a plane x + y is x + y.
    let plane: Vec<f64> = (0..144).map(|i| (i % 12 + i / 12) as f64).collect();
    let result = run(
        "f32[1,1,10,10] = convolution() {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}",
        &[&f32s(&[1, 1, 12, 12], &plane), &f32s(&[1, 1, 3, 3], &[1.0; 9])],
    );
    let expect: Vec<f64> = (0..100).map(|i| 9.0 * (i % 10 + i / 10 + 2) as f64).collect();
    assert_eq!(result.unwrap().to_f64(), expect);
}

#[test]
fn attention() {
    let sdpa =
        |ty: &str, causal: bool| format!("{ty} = scaled_dot_product_attention() {{is_causal={causal}, scale=2}}");
    let (q, k) = (f32s(&[2, 1], &[0.0, 1.0]), f32s(&[2, 1], &[0.0, 1.0]));
    let v = f32s(&[2, 1], &[10.0, 20.0]);
    let second = 10.0 + 10.0 / (1.0 + (-2.0f64).exp());
    near(&sdpa("f32[2,1]", false), &[&q, &k, &v], &[15.0, second]);
    near(&sdpa("f32[2,1]", true), &[&q, &k, &v], &[10.0, second]);
    let mask = tensor(DType::Bool, &[2, 2], &[0.0, 0.0, 0.0, 1.0]);
    near(&sdpa("f32[2,1]", false), &[&q, &k, &v, &mask], &[0.0, 20.0]);
    near(&sdpa("f32[2,1]", false), &[&q, &k, &v, &f32s(&[1, 2], &[-INF, 0.0])], &[20.0, 20.0]);
    near(
        &sdpa("f32[2,1]", false),
        &[&q, &k, &v, &f32s(&[1, 2], &[0.0, -2.0])],
        &[10.0 + 10.0 / (1.0 + 2f64.exp()), 15.0],
    );
    near(&sdpa("f32[3,2,1]", false), &[&q, &k, &f32s(&[3, 2, 1], &[1.0; 6])], &[1.0; 6]);
}

#[test]
fn norms_and_windows() {
    let x = f32s(&[1, 2, 2], &[1.0, 3.0, 10.0, 30.0]);
    near("f32[1,2,2] = group_norm() {num_groups=2, eps=0, channel_dim=1}", &[&x], &[-1.0, 1.0, -1.0, 1.0]);
    near(
        "f32[1,2,2] = group_norm() {num_groups=2, eps=0, channel_dim=2}",
        &[&x],
        &[-0.8, -0.75, 0.8, 0.75].map(|v: f64| v.signum()),
    );
    let (w, b) = (f32s(&[2], &[2.0, 3.0]), f32s(&[2], &[0.5, -0.5]));
    near(
        "f32[1,2,2] = group_norm() {num_groups=2, eps=3, channel_dim=1}",
        &[&x, &w, &b],
        &[0.5 - 1.0, 0.5 + 1.0, -0.5 - 30.0 / 103f64.sqrt(), -0.5 + 30.0 / 103f64.sqrt()],
    );
    near("f32[1,2,2] = layer_norm() {normalized_ndim=1, eps=0}", &[&x, &w, &b], &[-1.5, 2.5, -1.5, 2.5]);
    near("f32[1,2] = rms_norm() {normalized_ndim=1, eps=0}", &[&f32s(&[1, 2], &[1.0, 7.0]), &w], &[0.4, 4.2]);
    let upsample = |ty: &str, scale: &str, exact: bool| {
        format!("{ty} = upsample_nearest() {{first_dim=1, scales=[{scale}], exact={exact}}}")
    };
    let line = iota(&[1, 3]);
    check(&upsample("f32[1,6]", "2", false), &[&line], &[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]);
    check(&upsample("f32[1,2]", "0", false), &[&line], &[0.0, 1.0]);
    check(&upsample("f32[1,2]", "0", true), &[&line], &[0.0, 2.0]);
    let pool = |ty: &str, op: &str, padding: i64, include: bool| {
        format!(
            "{ty} = {op}() {{first_dim=1, kernel=[2], stride=[2], padding=[{padding}], count_include_pad={include}}}"
        )
    };
    check(&pool("f32[1,1]", "avg_pool", 0, true), &[&line], &[0.5]);
    check(&pool("f32[1,2]", "avg_pool", 1, true), &[&line], &[0.0, 1.5]);
    check(&pool("f32[1,2]", "avg_pool", 1, false), &[&f32s(&[1, 3], &[4.0, 1.0, 2.0])], &[4.0, 1.5]);
    check(&pool("f32[1,2]", "max_pool", 1, true), &[&f32s(&[1, 3], &[-4.0, NAN, 2.0])], &[-4.0, NAN]);
    check(&pool("i64[1,2]", "max_pool", 1, true), &[&i64s(&[1, 3], &[-4, -5, -6])], &[-4.0, -5.0]);
}

#[test]
fn shapes_are_checked_at_run_time() {
    fails("f32[2] = add()", &[&iota(&[2]), &iota(&[3])], "do not broadcast");
    fails("f32[4] = reshape()", &[&iota(&[3])], "elements");
    fails("f32[s0] = slice() {dim=0, start=1, step=1}", &[&iota(&[3])], "slice of 3 from 1");
    fails("f32[s0/2] = full() {value=1}", &[], "not an integer");
    fails("f32[9000000000000000000] = full() {value=1}", &[], "impossible shape");
    fails("f32[1000000000000000] = full() {value=1}", &[], "out of memory");
    let graph = parse_graph("input 0 \"x\": f32[2]\n%0: f32[2] = input() {index=0}\nreturn %0, %0").unwrap();
    let x = iota(&[2]);
    let outputs = oxidiff::ir::interp::run(&graph, &[], std::slice::from_ref(&x), &[]).unwrap();
    assert_eq!(outputs, [x.clone(), x]);
    for wrong in [vec![], vec![iota(&[3])], vec![i64s(&[2], &[0, 1])]] {
        assert!(matches!(oxidiff::ir::interp::run(&graph, &[], &wrong, &[]), Err(Error::Shape { .. })));
    }
    assert!(
        Tensor::new(DType::F32, vec![2], vec![0; 7]).is_err() && Tensor::new(DType::F32, vec![-1], vec![]).is_err()
    );
}
