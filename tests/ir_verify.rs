//! Every rule of the verifier, accepted and broken.

use oxidiff::Error;
use oxidiff::ir::{DType, Dim, Graph, Op, ValueType, infer_type, parse_graph, verify_graph};

/// Verifies a graph of these inputs (symbols s0 = 2, 3 and s1 = 4, 8) and one node over all of them.
fn check(inputs: &[&str], node: &str) -> Result<(), Error> {
    let mut text = String::from("symbol s0 \"a\" = [2, 3]\nsymbol s1 \"b\" = [4, 8]\n");
    for (i, ty) in inputs.iter().enumerate() {
        text += &format!("input {i} \"x{i}\": {ty}\n");
    }
    for (i, ty) in inputs.iter().enumerate() {
        text += &format!("%{i}: {ty} = input() {{index={i}}}\n");
    }
    let operands: Vec<String> = (0..inputs.len()).map(|i| format!("%{i}")).collect();
    text +=
        &format!("%{0}: {1}\nreturn %{0}\n", inputs.len(), node.replace("()", &format!("({})", operands.join(", "))));
    verify_graph(&parse_graph(&text).unwrap_or_else(|e| panic!("{text}{e}")), "test")
}

fn accepts(inputs: &[&str], node: &str) {
    check(inputs, node).unwrap_or_else(|e| panic!("{inputs:?} {node}: {e}"));
}

/// Refused, with a reason that contains `why`.
fn refuses(inputs: &[&str], node: &str, why: &str) {
    match check(inputs, node) {
        Err(Error::Verify { what, .. }) => assert!(what.contains(why), "{inputs:?} {node}: {what}"),
        other => panic!("{inputs:?} {node}: {other:?}"),
    }
}

#[test]
fn pointwise() {
    accepts(&["f16[s0,4]", "f64[]"], "f16[s0,4] = add()");
    accepts(&["f16[s0,1]", "f16[s1]"], "f32[s0,s1] = mul()");
    accepts(&["f16[s0,4]", "i64[]"], "bool[s0,4] = lt()");
    accepts(&["i64[s0]"], "f32[s0] = sin()");
    accepts(&["f32[s0]"], "bool[s0] = isnan()");
    accepts(&["bool[s0]", "f32[]", "f64[]"], "f32[s0] = where()");
    refuses(&["f32[s0]", "f32[s1]"], "f32[s0] = add()", "size s1 stretches to s0");
    refuses(&["f32[s0]", "f32[]"], "f32[s1] = add()", "size s0 stretches to s1");
    refuses(&["f32[1]", "f32[]"], "f32[s1] = add()", "declared as");
    // Equal at all samples.
    refuses(&["f32[s0]", "f32[s1/4+1]"], "f32[s0] = add()", "size 1+s1/4 stretches to s0");
    refuses(&["bool[]", "f32[s0]", "f32[s1/4+1]"], "f32[s0] = where()", "stretches to s0");
    refuses(&["f32[s1/4]", "f32[2]"], "f32[2] = add()", "only the constant 1");
    refuses(&["f32[s1/4]"], "f32[2] = expand()", "only the constant 1");
    refuses(&["f32[s1/4,3,5]", "f32[2,5,4]"], "f32[2,3,4] = matmul()", "only the constant 1");
    refuses(&["f32[s0]", "f32[]"], "i64[s0] = add()", "needs a convert");
    refuses(&["i64[s0]", "i64[]"], "i64[s0] = div()", "must be a float");
    refuses(&["f32[s0]", "f32[]"], "f32[s0] = eq()", "must be bool");
    refuses(&["f32[s0]", "f32[]"], "f32[s0] = bitwise_and()", "integers or bool");
    refuses(&["i64[s0]"], "i64[s0] = exp()", "must be a float");
    refuses(&["f32[s0]", "f32[]", "f32[]"], "f32[s0] = where()", "condition");
    refuses(&["f32[s0]"], "f32[s0] = add()", "operands instead of");
}

#[test]
fn movement() {
    accepts(&["f32[s0,4,s1]"], "f32[4*s0,s1] = reshape()");
    accepts(&["f32[s0,4,s1]"], "f32[s1,s0,4] = permute() {dims=[2, 0, 1]}");
    accepts(&["f32[s0,1]"], "f32[5,s0,s1] = expand()");
    accepts(&["f32[s1]"], "f32[s1/2] = slice() {dim=0, start=1, step=2}");
    accepts(&["f32[s1]"], "f32[0] = slice() {dim=0, start=s1, step=1}");
    accepts(&["f32[s0,2]", "f32[s1,2]"], "f32[s0+s1,2] = cat() {dim=0}");
    accepts(&["f32[s0]"], "f32[s0+3] = pad() {before=[1], value=0}");
    accepts(&["f32[s1]", "f32[2]"], "f32[s1] = slice_scatter() {dim=0, start=s1-3, step=2}");
    accepts(&["f32[s0,4]"], "f32[s0,4] = flip() {dims=[1]}");
    refuses(&["f32[s0,4]"], "f32[s1] = reshape()", "has not as many elements");
    refuses(&["f32[s0,4]"], "f32[4,s0] = permute() {dims=[1, 1]}", "named twice");
    refuses(&["f32[s0,4]"], "f32[4] = permute() {dims=[1]}", "1 dimensions named of 2");
    refuses(&["f32[s0]"], "f32[s1] = expand()", "size s0 stretches to s1");
    refuses(&["f32[s0,1]"], "f32[s1] = expand()", "2 dimensions stretch to 1");
    refuses(&["f32[s0]"], "f32[s1/4+1] = expand()", "only the constant 1");
    refuses(&["f32[s1]"], "f32[s1] = slice() {dim=0, start=1, step=1}", "slice of 4 from 1");
    refuses(&["f32[s1]"], "f32[1] = slice() {dim=0, start=s0-3, step=1}", "from -1");
    refuses(&["f32[s1]"], "f32[1] = slice() {dim=0, start=0, step=0}", "step");
    refuses(&["f32[s1]"], "f32[1] = slice() {dim=1, start=0, step=1}", "dimension 1");
    refuses(&["f32[s1,2]"], "f32[1,1] = slice() {dim=0, start=0, step=1}", "outside of dimensions");
    refuses(&["f32[s0,2]", "f32[s1,3]"], "f32[s0+s1,2] = cat() {dim=0}", "after the dimension");
    refuses(&["f32[s0]", "f16[s0]"], "f32[2*s0] = cat() {dim=0}", "insert a convert");
    refuses(&["f32[s0]"], "f32[s0] = pad() {before=[1], value=0}", "do not fit");
    refuses(&["f32[s0]"], "f32[s0] = pad() {before=[-1], value=0}", "do not fit");
    refuses(&["f32[s1]"], "f32[s1/3] = slice() {dim=0, start=0, step=1}", "not an integer");
    refuses(&["f32[s1]"], "f32[s0-3] = slice() {dim=0, start=0, step=1}", "impossible shape");
}

#[test]
fn gathers_and_reductions() {
    accepts(&["f16[10,4]", "i64[s0,s1]"], "f16[s0,s1,4] = index_select() {dim=0}");
    accepts(&["f32[s0,9]", "i32[1,3]"], "f32[1,3] = gather() {dim=1}");
    accepts(&["f16[s0,4,s1]", "i64[9,2]", "f32[9,2]"], "f16[s0,9,s1] = interpolate() {dim=1}");
    refuses(&["f32[s0,4]", "i64[9,2]", "f32[9,3]"], "f32[s0,9] = interpolate() {dim=1}", "index and weight");
    refuses(&["f32[s0,4]", "i64[9]", "f32[9]"], "f32[s0,9] = interpolate() {dim=1}", "an index or weight has");
    refuses(&["f32[s0,4]", "f32[9,2]", "f32[9,2]"], "f32[s0,9] = interpolate() {dim=1}", "the index");
    refuses(&["i64[s0,4]", "i64[9,2]", "f32[9,2]"], "i64[s0,9] = interpolate() {dim=1}", "floats");
    refuses(&["f32[s0,4]", "i64[9,2]", "f16[9,2]"], "f32[s0,9] = interpolate() {dim=1}", "the weight");
    accepts(&["f16[s0,4,s1]"], "f32[s0,1,1] = sum() {dims=[1, 2], keepdim=true}");
    accepts(&["f32[s0,4]"], "i64[s0] = argmax() {dims=[1], keepdim=false}");
    accepts(&["i64[s0]"], "i64[s0] = cumsum() {dim=0}");
    accepts(&["f16[s0,4]"], "f32[s0,4] = softmax() {dim=1}");
    refuses(&["f16[10,4]", "f32[s0]"], "f16[s0,4] = index_select() {dim=0}", "the index");
    refuses(&["f32[s0,9]", "i64[s1,3]"], "f32[s1,3] = gather() {dim=1}", "larger");
    refuses(&["f32[s0,9]", "i64[3]"], "f32[3] = gather() {dim=1}", "index has");
    refuses(&["f32[s0,9]"], "i64[] = argmax() {dims=[0, 1], keepdim=false}", "one dimension");
    refuses(&["f32[0]"], "f32[] = amax() {dims=[0], keepdim=false}", "of no elements");
    refuses(&["i64[s0]"], "i64[] = mean() {dims=[0], keepdim=false}", "float");
    refuses(&["i64[s0]"], "f32[s0] = softmax() {dim=0}", "floats");
}

#[test]
fn contractions() {
    accepts(&["f16[s0,s1,8]", "f16[6,8]", "f16[6]"], "f16[s0,s1,6] = linear()");
    accepts(&["f16[s0,1,2,8]", "f16[s1,8,3]"], "f32[s0,s1,2,3] = matmul()");
    accepts(
        &["f32[s0,4,s1,s1]", "f32[6,2,3,3]", "f32[6]"],
        "f32[s0,6,s1/2,s1/2] = convolution() {stride=[2, 2], padding=[1, 1], dilation=[1, 1], groups=2, channels_last=false}",
    );
    accepts(
        &["f32[s0,s1,4]", "f32[6,4,3]"],
        "f32[s0,s1-2,6] = convolution() {stride=[1], padding=[1], dilation=[2], groups=1, channels_last=true}",
    );
    let sdpa = "scaled_dot_product_attention() {is_causal=false, scale=0.5}";
    accepts(&["f32[s0,2,s1,8]", "f32[s0,2,7,8]", "f32[s0,2,7,5]"], &format!("f32[s0,2,s1,5] = {sdpa}"));
    accepts(&["f16[s0,2,s1,8]", "f16[1,2,7,8]", "f16[7,5]", "bool[7]"], &format!("f16[s0,2,s1,5] = {sdpa}"));
    refuses(&["f16[s0,8]", "f32[6,8]"], "f16[s0,6] = linear()", "one type");
    refuses(&["i64[s0,8]", "i64[6,8]"], "i64[s0,6] = linear()", "floats");
    refuses(&["f32[s0,8]", "f32[6,8]"], "f64[s0,6] = linear()", "f64 does not mix");
    refuses(&["f32[s0,7]", "f32[6,8]"], "f32[s0,6] = linear()", "last dimension");
    refuses(&["f32[s0,8]", "f32[6,8]", "f32[1]"], "f32[s0,6] = linear()", "bias");
    refuses(&["f32[8]", "f32[8,2]"], "f32[2] = matmul()", "has 1 dimensions");
    refuses(&["f32[s0,2,8]", "f32[s1,8,2]"], "f32[s0,2,2] = matmul()", "size s1 stretches to s0");
    refuses(&["f32[s0,2,8]", "f32[s1/4+1,8,2]"], "f32[s0,2,2] = matmul()", "only the constant 1");
    let conv = "convolution() {stride=[1], padding=[0], dilation=[1], groups=2, channels_last=false}";
    refuses(&["f32[1,4,s1]", "f32[3,2,3]"], &format!("f32[1,3,s1-2] = {conv}"), "divide into 2 groups");
    refuses(&["f32[1,6,s1]", "f32[4,2,3]"], &format!("f32[1,4,s1-2] = {conv}"), "6 channels");
    refuses(&["f32[1,4,s1]", "f32[4,2,5]"], &format!("f32[1,4,s1-4] = {conv}"), "does not fit");
    refuses(&["f32[1,4,s1,1]", "f32[4,2,1,1]"], &format!("f32[1,4,s1,1] = {conv}"), "spatial dimensions");
    refuses(
        &["f32[s0,2,s1,8]", "f32[s0,2,7,8]", "f32[s0,2,6,5]"],
        &format!("f32[s0,2,s1,5] = {sdpa}"),
        "lengths of key and value",
    );
    refuses(&["f32[s1,8]", "f32[7,8]", "f32[7,8]", "f32[6]"], &format!("f32[s1,8] = {sdpa}"), "mask: size 6");
    let alike = ["f32[4,8]", "f32[s0,8]", "f32[s0,8]", "f32[s1/4+1]"];
    refuses(&alike, &format!("f32[4,8] = {sdpa}"), "only the constant 1");
    refuses(&["f32[s1,8]", "f32[7,8]", "f32[7,8]", "i64[7]"], &format!("f32[s1,8] = {sdpa}"), "mask has type");
}

#[test]
fn norms_and_windows() {
    accepts(
        &["bf16[s0,4,s1]", "f32[4]", "f32[4]"],
        "bf16[s0,4,s1] = group_norm() {num_groups=2, eps=1e-5, channel_dim=1}",
    );
    accepts(&["f32[s0,s1,8]"], "f32[s0,s1,8] = layer_norm() {normalized_ndim=1, eps=1e-5}");
    accepts(&["f32[s0,s1,8]", "f32[8]"], "f32[s0,s1,8] = rms_norm() {normalized_ndim=1, eps=1e-5}");
    accepts(&["f32[s0,s1]"], "f32[s0,2*s1] = upsample_nearest() {first_dim=1, scales=[2], exact=false}");
    let pool = "avg_pool() {first_dim=1, kernel=[2], stride=[2], padding=[0], count_include_pad=true}";
    accepts(&["f32[s0,s1]"], &format!("f32[s0,s1/2] = {pool}"));
    refuses(&["f32[2,3,4]"], "f32[2,3,4] = group_norm() {num_groups=2, eps=1, channel_dim=1}", "3 channels");
    refuses(&["f32[2,4,4]"], "f32[2,4,4] = group_norm() {num_groups=2, eps=1, channel_dim=0}", "batch");
    refuses(&["f32[2,4]", "f32[4]"], "f32[2,4] = group_norm() {num_groups=2, eps=1, channel_dim=1}", "needs a bias");
    refuses(&["f32[2,4]", "bf16[4]"], "f32[2,4] = layer_norm() {normalized_ndim=1, eps=1}", "a weight has type");
    refuses(&["f32[2,4]", "f32[2]"], "f32[2,4] = rms_norm() {normalized_ndim=1, eps=1}", "weight");
    refuses(&["f32[2,4]"], "f32[2,4] = layer_norm() {normalized_ndim=3, eps=1}", "norm over 3");
    refuses(&["f32[2,0]"], "f32[2,1] = upsample_nearest() {first_dim=1, scales=[2], exact=false}", "no elements");
    refuses(&["i64[s0,s1]"], &format!("i64[s0,s1/2] = {pool}"), "float");
    refuses(&["f32[s0,1]"], &format!("f32[s0,0] = {pool}"), "does not fit");
}

#[test]
fn tables_and_order() {
    let graph = || {
        let mut g = Graph::new();
        let x = g.add_input("x", ValueType::new(DType::F32, vec![]));
        g.add_parameter("w", DType::F32, &[2]);
        g.add_constant(DType::F32, &[1], vec![0; 4]);
        g.outputs = vec![x];
        g
    };
    verify_graph(&graph(), "test").unwrap();
    type Damage = fn(&mut Graph);
    let breaks: [(&str, Damage); 9] = [
        ("output %9", |g| g.outputs[0].0 = 9),
        ("does not come before", |g| {
            g.nodes[0].op = Op::Convert;
            g.nodes[0].inputs = vec![oxidiff::ir::ValueId(0)];
        }),
        ("the slot does not exist", |g| g.inputs.clear()),
        ("the slot has type", |g| g.inputs[0].ty.dtype = DType::F16),
        ("path 3 does not exist", |g| g.nodes[0].path.0 = 3),
        ("path 0 is not the root", |g| g.paths.clear()),
        ("has 4 bytes", |g| g.constants[0].ty.dtype = DType::F16),
        ("symbol s0 does not exist", |g| g.inputs[0].ty.shape = vec!["s0".parse().unwrap()]),
        ("differ in their number of samples", |g| {
            g.add_symbol("a", vec![1]);
            g.add_symbol("b", vec![1, 2]);
        }),
    ];
    for (why, damage) in breaks {
        let mut g = graph();
        damage(&mut g);
        let error = verify_graph(&g, "some_pass").unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("some_pass"), "{why}: {error}");
    }
}

/// The symbolic type, and `None` where the caller chooses.
#[test]
fn infers_symbolic_types() {
    let ty = |dtype, shape: &[&str]| ValueType::new(dtype, shape.iter().map(|d| d.parse::<Dim>().unwrap()).collect());
    let x = ty(DType::F16, &["s0", "4", "s1"]);
    let w = ty(DType::F16, &["8", "4", "3"]);
    let windows = |stride| Op::Convolution {
        stride: vec![stride],
        padding: vec![1],
        dilation: vec![1],
        groups: 1,
        channels_last: false,
    };
    let infer = |op: &Op, operands: &[&ValueType]| infer_type(op, operands).unwrap().map(|t| t.to_string());
    assert_eq!(infer(&windows(1), &[&x, &w]).as_deref(), Some("f16[s0,8,s1]"));
    assert_eq!(infer(&windows(2), &[&x, &w]).as_deref(), Some("f16[s0,8,1+floor(-1+s1,2)]"));
    assert_eq!(infer(&Op::Binary(oxidiff::ir::BinaryOp::Lt), &[&x, &x]).as_deref(), Some("bool[s0,4,s1]"));
    assert_eq!(infer(&Op::Cat { dim: 2 }, &[&x, &x]).as_deref(), Some("f16[s0,4,2*s1]"));
    assert_eq!(infer(&Op::Reshape, &[&x]), None);
    let other = ty(DType::F16, &["s2"]);
    let error = infer_type(&Op::Binary(oxidiff::ir::BinaryOp::Add), &[&x, &other]).unwrap_err().to_string();
    assert!(error.contains("shape mismatch: add") && error.contains("do not broadcast"), "{error}");
}
