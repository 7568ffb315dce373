//! The CPU backend against the interpreter: each kind of step, views, concatenations, outputs, weights.

mod support;

use std::sync::Arc;

use oxidiff::backend::{Tensor, Weight};
use oxidiff::ir::interp;
use oxidiff::passes::{self, PassCtx, Precision};
use oxidiff::plan::{self, BufferKind, MemoryMode, PlanOptions};
use oxidiff::select::Kernel;
use oxidiff::target::{DeviceKind, Target};
use support::{Case, borrow, check, graph_of, plan_of, relative};

const DTYPES: [&str; 3] = ["f32", "f16", "bf16"];

/// Fills in the element type of a graph's text.
fn typed(text: &str, dtype: &str) -> String {
    text.replace("T[", &format!("{dtype}["))
}

fn check_all(text: &str, terms: usize) {
    DTYPES.iter().for_each(|dtype| check(&typed(text, dtype), terms));
}

fn kernels(text: &str) -> Vec<Kernel> {
    plan_of(graph_of(text), Precision::Eager, MemoryMode::Fast).steps.iter().map(|s| s.kernel).collect()
}

const LOOPS: &str = r#"symbol s0 "batch" = [1, 2, 3]
symbol s1 "seq" = [5, 8, 33]
input 0 "x": T[s0,s1,8]
input 1 "y": T[8]
%0: T[s0,s1,8] = input() {index=0}
%1: T[8] = input() {index=1}
%2: T[s0,s1,8] = mul(%0, %1)
%3: T[s0,s1,8] = silu(%2)
%4: T[s0,s1,8] = add(%3, %0)
return %4, %3, %4
"#;

#[test]
fn pointwise_loops() {
    check_all(LOOPS, 1);
}

const LINEAR: &str = r#"symbol s0 "batch" = [1, 2, 3]
symbol s1 "seq" = [5, 8, 33]
input 0 "x": T[s0,s1,16]
input 1 "r": T[s0,s1,24]
parameter 0 "w": T[24,16]
parameter 1 "b": T[24]
%0: T[s0,s1,16] = input() {index=0}
%1: T[s0,s1,24] = input() {index=1}
%2: T[24,16] = parameter() {index=0}
%3: T[24] = parameter() {index=1}
%4: T[s0,s1,24] = linear(%0, %2, %3)
%5: T[s0,s1,24] = add(%4, %1)
%6: T[s0,s1,24] = gelu(%5)
%7: T[s0,s1,24] = linear(%0, %2)
%8: T[s0,2,16] = slice(%0) {dim=1, start=3, step=1}
%9: T[s0,2,24] = linear(%8, %2, %3)
return %5, %6, %7, %9
"#;

#[test]
fn linear_layers() {
    check_all(LINEAR, 16);
}

const MATMUL: &str = r#"symbol s0 "batch" = [1, 3]
symbol s1 "seq" = [5, 33]
input 0 "a": T[s0,4,s1,8]
input 1 "b": T[4,8,s1]
%0: T[s0,4,s1,8] = input() {index=0}
%1: T[4,8,s1] = input() {index=1}
%2: T[s0,4,s1,s1] = matmul(%0, %1)
%3: T[s0,4,s1,s1] = softmax(%2) {dim=3}
%4: T[s0,4,s1,8] = matmul(%3, %0)
%5: T[s0,s1,4,8] = permute(%4) {dims=[0, 2, 1, 3]}
%6: T[s0,s1,32] = reshape(%5)
return %6, %3
"#;

#[test]
fn matrix_products() {
    check_all(MATMUL, 64);
}

const ATTENTION: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "seq" = [6, 40]
input 0 "x": T[s0,s1,32]
input 1 "mask": T[s0,1,s1,s1]
parameter 0 "qkv": T[96,32]
parameter 1 "out": T[32,32]
%0: T[s0,s1,32] = input() {index=0}
%1: T[s0,1,s1,s1] = input() {index=1}
%2: T[96,32] = parameter() {index=0}
%3: T[32,32] = parameter() {index=1}
%4: T[s0,s1,96] = linear(%0, %2)
%5: T[s0,s1,3,4,8] = reshape(%4)
%6: T[3,s0,4,s1,8] = permute(%5) {dims=[2, 0, 3, 1, 4]}
%7: T[1,s0,4,s1,8] = slice(%6) {dim=0, start=0, step=1}
%8: T[1,s0,4,s1,8] = slice(%6) {dim=0, start=1, step=1}
%9: T[1,s0,4,s1,8] = slice(%6) {dim=0, start=2, step=1}
%10: T[s0,4,s1,8] = reshape(%7)
%11: T[s0,4,s1,8] = reshape(%8)
%12: T[s0,4,s1,8] = reshape(%9)
%13: T[s0,4,s1,8] = scaled_dot_product_attention(%10, %11, %12, %1) {is_causal=false, scale=0.25}
%14: T[s0,s1,4,8] = permute(%13) {dims=[0, 2, 1, 3]}
%15: T[s0,s1,32] = reshape(%14)
%16: T[s0,s1,32] = linear(%15, %3)
%17: T[s0,s1,32] = add(%16, %0)
%18: T[s0,4,s1,8] = scaled_dot_product_attention(%10, %11, %12) {is_causal=true, scale=0.5}
%19: T[s0,s1,2,4,4] = reshape(%0)
%20: T[s0,2,4,s1,4] = permute(%19) {dims=[0, 2, 3, 1, 4]}
%21: T[s0,1,1,s1,s1] = reshape(%1)
%22: T[s0,2,4,s1,4] = scaled_dot_product_attention(%20, %20, %20, %21) {is_causal=false, scale=0.5}
%23: T[2,s0,4,s1,4] = permute(%19) {dims=[2, 0, 3, 1, 4]}
%24: T[1,s0,1,s1,s1] = reshape(%1)
%25: T[2,s0,4,s1,4] = scaled_dot_product_attention(%23, %23, %23, %24) {is_causal=false, scale=0.5}
%26: T[s0,2,1,s1,4] = slice(%20) {dim=2, start=1, step=1}
%27: T[s0,2,4,s1,4] = scaled_dot_product_attention(%20, %26, %26) {is_causal=false, scale=0.5}
return %17, %18, %22, %25, %27
"#;

#[test]
fn attention() {
    check_all(ATTENTION, 128);
    let steps = kernels(&typed(ATTENTION, "f32"));
    assert!(!steps.contains(&Kernel::Copy), "heads are views: {steps:?}");
}

const NORMS: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "seq" = [5, 40]
input 0 "x": T[s0,s1,32]
parameter 0 "w": T[32]
parameter 1 "b": T[32]
%0: T[s0,s1,32] = input() {index=0}
%1: T[32] = parameter() {index=0}
%2: T[32] = parameter() {index=1}
%3: T[s0,s1,32] = layer_norm(%0, %1, %2) {normalized_ndim=1, eps=1e-5}
%4: T[s0,s1,32] = add(%3, %0)
%5: T[s0,s1,32] = rms_norm(%4, %1) {normalized_ndim=1, eps=1e-6}
%6: T[s0,s1,32] = group_norm(%4, %1, %2) {num_groups=4, eps=1e-5, channel_dim=2}
%7: T[s0,s1,32] = silu(%6)
%8: T[s0,32,s1] = permute(%7) {dims=[0, 2, 1]}
%9: T[s0,32,s1] = group_norm(%8, %1, %2) {num_groups=8, eps=1e-5, channel_dim=1}
%10: T[s0,32,s1] = softmax(%9) {dim=2}
%11: T[s0,s1,32] = layer_norm(%0) {normalized_ndim=1, eps=1e-5}
return %5, %7, %9, %10, %11
"#;

#[test]
fn norms() {
    check_all(NORMS, 256);
}

/// Norms over channels, which a convolution leaves last: that of Wan's and Qwen-Image's decoders, ConvNeXt's, and one over channels and width.
const CHANNEL_NORMS: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "height" = [5, 8]
input 0 "x": T[s0,16,s1,6]
parameter 0 "w": T[16,16,1,1]
parameter 1 "g": T[16,1,1]
%0: T[s0,16,s1,6] = input() {index=0}
%1: T[16,16,1,1] = parameter() {index=0}
%2: T[16,1,1] = parameter() {index=1}
%3: f64[] = full() {value=1e-5}
%4: T[s0,16,s1,6] = convolution(%0, %1) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}
%5: f32[s0,16,s1,6] = mul(%4, %4)
%6: f32[s0,1,s1,6] = sum(%5) {dims=[1], keepdim=true}
%7: f32[s0,1,s1,6] = sqrt(%6)
%8: f32[s0,1,s1,6] = maximum(%7, %3)
%9: T[s0,16,s1,6] = div(%4, %8)
%10: f64[] = full() {value=4}
%11: T[s0,16,s1,6] = mul(%9, %10)
%12: T[s0,16,s1,6] = mul(%11, %2)
%13: T[s0,16,s1,6] = convolution(%12, %1) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}
%14: f32[s0,1,s1,6] = mean(%13) {dims=[1], keepdim=true}
%15: f32[s0,16,s1,6] = sub(%13, %14)
%16: f32[s0,16,s1,6] = mul(%15, %15)
%17: f32[s0,1,s1,6] = mean(%16) {dims=[1], keepdim=true}
%18: f32[s0,1,s1,6] = add(%17, %3)
%19: f32[s0,1,s1,6] = sqrt(%18)
%20: T[s0,16,s1,6] = div(%15, %19)
%21: T[s0,16,s1,6] = mul(%20, %2)
%22: T[s0,16,s1,6] = add(%21, %2)
%23: T[s0,16,s1,6] = convolution(%22, %1) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}
%24: f32[s0,16,s1,6] = mul(%23, %23)
%25: f32[s0,1,s1,1] = mean(%24) {dims=[1, 3], keepdim=true}
%26: f32[s0,1,s1,1] = add(%25, %3)
%27: f32[s0,1,s1,1] = rsqrt(%26)
%28: T[s0,16,s1,6] = mul(%23, %27)
%29: T[s0,16,s1,6] = convolution(%28, %1) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}
return %29
"#;

#[test]
fn norms_of_channels_in_front() {
    check_all(CHANNEL_NORMS, 512);
    let graph = graph_of(&typed(CHANNEL_NORMS, "f32"));
    let plan = plan_of(graph, Precision::Fast, MemoryMode::Fast);
    let steps: Vec<Kernel> = plan.steps.iter().map(|s| s.kernel).filter(|kernel| *kernel != Kernel::Copy).collect();
    let norms = [Kernel::RmsNorm, Kernel::LayerNorm, Kernel::RmsNorm].map(|norm| [Kernel::Convolution, norm]);
    assert_eq!(steps, [norms.concat(), vec![Kernel::Convolution]].concat(), "{plan}");
}

/// Images that come with channels in front: alone, behind a residual, in place of it, as a part of a concatenation, and in that
/// order after a transposition that a result asks for.
const PLANES: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "height" = [5, 16]
symbol s2 "width" = [7, 1]
input 0 "x": T[s0,32,s1,s2]
parameter 0 "w": T[32]
parameter 1 "b": T[32]
%0: T[s0,32,s1,s2] = input() {index=0}
%1: T[32] = parameter() {index=0}
%2: T[32] = parameter() {index=1}
%3: T[s0,32,s1,s2] = group_norm(%0, %1, %2) {num_groups=4, eps=1e-5, channel_dim=1}
%4: T[s0,32,s1,s2] = silu(%3)
%5: T[s0,32,s1,s2] = add(%4, %0)
%6: T[s0,32,s1,s2] = group_norm(%5) {num_groups=32, eps=1e-5, channel_dim=1}
%7: T[s0,32,s1,s2] = group_norm(%6, %1, %2) {num_groups=1, eps=1e-5, channel_dim=1}
%8: T[s0,64,s1,s2] = cat(%7, %0) {dim=1}
return %8
"#;

#[test]
fn norms_of_images_as_they_lie() {
    check_all(PLANES, 256);
    let steps = kernels(&typed(PLANES, "f32"));
    assert_eq!(
        steps,
        [Kernel::GroupNorm, Kernel::GroupNorm, Kernel::GroupNorm, Kernel::Copy],
        "a part and three norms"
    );
    let transposed = PLANES.replace("return %8", "%9: T[s0,s1,s2,64] = permute(%8) {dims=[0, 2, 3, 1]}\nreturn %9");
    check_all(&transposed, 256);
}

/// What other devices read, channels side by side.
#[test]
fn norms_of_images_on_other_devices() {
    let graph = Arc::new(graph_of(&typed(PLANES, "f32")));
    let groups = passes::form_groups(&graph, &PassCtx::default()).unwrap();
    let target = Target { kind: DeviceKind::Cuda { arch: 90 }, ..Target::host() };
    let plan = plan::build(graph, groups, &target, PlanOptions::default()).unwrap();
    for norm in plan.steps.iter().filter(|step| step.kernel == Kernel::GroupNorm) {
        assert!(norm.operands[0].has_unit_columns(), "{plan}");
        assert_eq!(norm.space.last(), Some(&oxidiff::ir::Dim::constant(32)), "{plan}");
    }
}

const CONVOLUTIONS: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "height" = [5, 8]
symbol s2 "width" = [7, 6]
input 0 "x": T[s0,8,s1,s2]
parameter 0 "w": T[16,8,3,3]
parameter 1 "b": T[16]
parameter 2 "v": T[16,4,3,3]
parameter 3 "p": T[4,16,1,1]
%0: T[s0,8,s1,s2] = input() {index=0}
%1: T[16,8,3,3] = parameter() {index=0}
%2: T[16] = parameter() {index=1}
%3: T[16,4,3,3] = parameter() {index=2}
%4: T[4,16,1,1] = parameter() {index=3}
%5: T[s0,16,s1,s2] = convolution(%0, %1, %2) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}
%6: T[s0,16,s1,s2] = silu(%5)
%7: T[s0,s1,s2,8] = permute(%0) {dims=[0, 2, 3, 1]}
%8: T[s0,s1,s2,16] = convolution(%7, %1, %2) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%9: T[s0,2*s1,2*s2,16] = upsample_nearest(%8) {first_dim=1, scales=[2.0, 2.0], exact=false}
%10: T[s0,2*s1,2*s2,4] = convolution(%9, %4) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=true}
%11: T[s0,4,2*s1,2*s2] = permute(%10) {dims=[0, 3, 1, 2]}
%12: T[s0,floor(s1-1,2)+1,floor(s2-1,2)+1,16] = convolution(%7, %3, %2) {stride=[2, 2], padding=[1, 1], dilation=[1, 1], groups=2, channels_last=true}
%13: T[s0,16,2*s1,2*s2] = upsample_nearest(%6) {first_dim=2, scales=[2.0, 2.0], exact=false}
return %6, %11, %12, %13
"#;

#[test]
fn convolutions() {
    check_all(CONVOLUTIONS, 72);
}

/// Channels and sizes for which Winograd's forms are chosen, with an upsampling that they do as they read.
const WIDE: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "height" = [9, 16]
symbol s2 "width" = [12, 16]
input 0 "x": T[s0,s1,s2,64]
parameter 0 "w": T[64,64,3,3]
parameter 1 "b": T[64]
%0: T[s0,s1,s2,64] = input() {index=0}
%1: T[64,64,3,3] = parameter() {index=0}
%2: T[64] = parameter() {index=1}
%3: T[s0,s1,s2,64] = convolution(%0, %1, %2) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%4: T[s0,s1,s2,64] = add(%3, %0)
%5: T[s0,2*s1,2*s2,64] = upsample_nearest(%4) {first_dim=1, scales=[2.0, 2.0], exact=false}
%6: T[s0,2*s1,2*s2,64] = convolution(%5, %1) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%7: T[s0,64,2*s1,2*s2] = permute(%6) {dims=[0, 3, 1, 2]}
%8: T[s0,64,s1,s2] = permute(%0) {dims=[0, 3, 1, 2]}
%9: T[s0,64,s1,s2] = silu(%8)
return %7, %4, %9
"#;

#[test]
fn wide_convolutions() {
    check_all(WIDE, 1200);
}

/// Convolutions of norms, each read while it is made where the image is large: of an argument; of a part of a concatenation, with
/// a scale and a shift by image; over whatever frames there are; and norms that have memory of their own all the same: in place of
/// their operand, in place of what is added to them.
const OF_NORMS: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "height" = [8, 201]
symbol s2 "width" = [9, 262]
input 0 "x": T[s0,s1,s2,32]
input 1 "factor": T[s0,1,1,32]
parameter 0 "norm.w": T[32]
parameter 1 "norm.b": T[32]
parameter 2 "w": T[32,32,3,3]
parameter 3 "w1": T[32,32,1,3,3]
parameter 4 "w2": T[32,64,1,1]
%0: T[s0,s1,s2,32] = input() {index=0}
%1: T[s0,1,1,32] = input() {index=1}
%2: T[32] = parameter() {index=0}
%3: T[32] = parameter() {index=1}
%4: T[32,32,3,3] = parameter() {index=2}
%5: T[32,32,1,3,3] = parameter() {index=3}
%6: T[32,64,1,1] = parameter() {index=4}
%7: T[s0,s1,s2,32] = group_norm(%0, %2, %3) {num_groups=4, eps=1e-5, channel_dim=3}
%8: T[s0,s1,s2,32] = silu(%7)
%9: T[s0,s1,s2,32] = convolution(%8, %4) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%10: T[s0,s1,s2,32] = group_norm(%9, %2, %3) {num_groups=8, eps=1e-5, channel_dim=3}
%11: T[s0,s1,s2,32] = mul(%10, %1)
%12: T[s0,s1,s2,32] = add(%11, %1)
%13: T[s0,s1,s2,32] = silu(%12)
%14: T[s0,s1,s2,32] = convolution(%13, %4) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%15: T[s0,s1,s2,64] = cat(%9, %0) {dim=3}
%16: T[s0,s1,s2,32] = convolution(%15, %6) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=true}
%17: T[s0,s1,s2,32] = add(%16, %14)
%18: T[1,s0,s1,s2,32] = reshape(%17)
%19: T[1,s0,s1,s2,32] = group_norm(%18, %2, %3) {num_groups=2, eps=1e-5, channel_dim=4}
%20: T[1,s0,s1,s2,32] = convolution(%19, %5) {stride=[1, 1, 1], padding=[0, 1, 1], dilation=[1, 1, 1], groups=1, channels_last=true}
%21: T[1,s0,s1,s2,32] = add(%20, %18)
%22: T[s0,s1,s2,32] = reshape(%21)
%23: T[s0,s1,s2,32] = group_norm(%17, %2, %3) {num_groups=2, eps=1e-5, channel_dim=3}
%24: T[s0,s1,s2,32] = convolution(%23, %4) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%25: T[s0,s1,s2,32] = group_norm(%0, %2, %3) {num_groups=1, eps=1e-5, channel_dim=3}
%26: T[s0,s1,s2,32] = add(%25, %24)
%27: T[s0,s1,s2,32] = silu(%26)
%28: T[s0,s1-2,s2,32] = convolution(%27, %4) {stride=[1, 1], padding=[0, 1], dilation=[1, 1], groups=1, channels_last=true}
return RESULTS
"#;

#[test]
fn norms_are_read_while_they_are_made() {
    for dtype in DTYPES {
        let text = typed(OF_NORMS, dtype);
        // What is a result is made by a step of its own.
        let case = |results| Case::new(&text.replace("RESULTS", results), Precision::Fast, MemoryMode::Balanced);
        let (mut read, apart) = (case("%22, %28"), case("%22, %28, %8, %13, %19, %23, %27"));
        for bindings in [[1, 8, 9], [1, 201, 262], [3, 40, 530], [2, 201, 262]] {
            let inputs = read.inputs(&bindings);
            let borrowed: Vec<Tensor> = inputs.iter().map(borrow).collect();
            let got = read.run(&borrowed, &bindings).unwrap();
            let want = apart.run(&borrowed, &bindings).unwrap();
            for (got, want) in got.iter().zip(&want[..2]) {
                assert!(want.to_f64().iter().all(|v| v.is_finite()) && want.to_f64().iter().any(|v| v.abs() > 0.1));
                assert!(got == want, "{dtype} {bindings:?}: {:e}", relative(got, want));
            }
        }
        let mut first = case("%9");
        first.check_at(&[1, 9, 40], 300);
        let inputs = first.inputs(&[2, 201, 262]);
        first.run(&inputs.iter().map(borrow).collect::<Vec<_>>(), &[2, 201, 262]).unwrap();
        let (arena, image) = (first.executable.stats().arena_bytes, inputs[0].bytes().len());
        assert!(arena < image, "the arena of {arena} bytes has the norm's result of {image}");
    }
}

/// The same over three dimensions, with the first frame repeated before it, as causal convolutions do.
const WIDE_VIDEO: &str = r#"symbol s0 "batch" = [1, 2]
symbol s1 "frames" = [1, 3]
symbol s2 "height" = [9, 16]
input 0 "x": T[s0,s1,s2,8,32]
parameter 0 "w": T[32,32,3,3,3]
parameter 1 "b": T[32]
%0: T[s0,s1,s2,8,32] = input() {index=0}
%1: T[32,32,3,3,3] = parameter() {index=0}
%2: T[32] = parameter() {index=1}
%3: T[s0,1,s2,8,32] = slice(%0) {dim=1, start=0, step=1}
%4: T[s0,2+s1,s2,8,32] = cat(%3, %3, %0) {dim=1}
%5: T[s0,s1,s2,8,32] = convolution(%4, %1, %2) {stride=[1, 1, 1], padding=[0, 1, 1], dilation=[1, 1, 1], groups=1, channels_last=true}
%6: T[s0,s1,s2,8,32] = add(%5, %0)
%7: T[s0,s1,s2,8,32] = convolution(%6, %1) {stride=[1, 1, 1], padding=[1, 1, 1], dilation=[1, 1, 1], groups=1, channels_last=true}
return %7, %5
"#;

#[test]
fn wide_convolutions_of_three_dimensions() {
    check_all(WIDE_VIDEO, 1800);
}

/// A residual block with a skip concatenation and both ways through it, as in the up path of a UNet.
const UNET_BLOCK: &str = r#"symbol s0 "batch" = [1, 2, 3]
symbol s1 "height" = [4, 7, 16]
symbol s2 "width" = [6, 5, 16]
input 0 "x": T[s0,s1,s2,16]
input 1 "temb": T[s0,24]
parameter 0 "norm.w": T[16]
parameter 1 "norm.b": T[16]
parameter 2 "conv1.w": T[24,16,3,3]
parameter 3 "conv1.b": T[24]
parameter 4 "temb.w": T[24,24]
parameter 5 "temb.b": T[24]
parameter 6 "conv2.w": T[24,40,3,3]
parameter 7 "conv2.b": T[24]
parameter 8 "short.w": T[24,40,1,1]
parameter 9 "ff.w": T[48,24]
parameter 10 "ff.b": T[48]
%0: T[s0,s1,s2,16] = input() {index=0}
%1: T[s0,24] = input() {index=1}
%2: T[16] = parameter() {index=0}
%3: T[16] = parameter() {index=1}
%4: T[24,16,3,3] = parameter() {index=2}
%5: T[24] = parameter() {index=3}
%6: T[24,24] = parameter() {index=4}
%7: T[24] = parameter() {index=5}
%8: T[24,40,3,3] = parameter() {index=6}
%9: T[24] = parameter() {index=7}
%10: T[24,40,1,1] = parameter() {index=8}
%11: T[48,24] = parameter() {index=9}
%12: T[48] = parameter() {index=10}
%13: T[s0,s1,s2,16] = group_norm(%0, %2, %3) {num_groups=4, eps=1e-5, channel_dim=3}
%14: T[s0,s1,s2,16] = silu(%13)
%15: T[s0,s1,s2,24] = convolution(%14, %4, %5) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%16: T[s0,24] = silu(%1)
%17: T[s0,24] = linear(%16, %6, %7)
%18: T[s0,1,1,24] = reshape(%17)
%19: T[s0,s1,s2,24] = add(%15, %18)
%20: T[s0,s1,s2,40] = cat(%19, %14) {dim=3}
%21: T[s0,s1,s2,40] = silu(%20)
%22: T[s0,s1,s2,24] = convolution(%20, %8, %9) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}
%23: T[s0,s1,s2,24] = convolution(%21, %10) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=true}
%24: T[s0,s1,s2,24] = add(%23, %22)
%25: T[s0,s1*s2,24] = reshape(%24)
%26: T[s0,s1*s2,48] = linear(%25, %11, %12)
%27: T[s0,s1*s2,24] = slice(%26) {dim=2, start=0, step=1}
%28: T[s0,s1*s2,24] = slice(%26) {dim=2, start=24, step=1}
%29: T[s0,s1*s2,24] = gelu(%28)
%30: T[s0,s1*s2,24] = mul(%27, %29)
%31: T[s0,s1,s2,24] = reshape(%30)
%32: T[s0,24,s1,s2] = permute(%31) {dims=[0, 3, 1, 2]}
return %32
"#;

#[test]
fn unet_block() {
    check_all(UNET_BLOCK, 400);
    let plan = plan_of(graph_of(&typed(UNET_BLOCK, "f32")), Precision::Eager, MemoryMode::Fast);
    let copies = plan.steps.iter().filter(|s| s.kernel == Kernel::Copy).count();
    assert_eq!(copies, 0, "slices of the concatenation and the permuted output are written in place\n{plan}");
}

/// Integers, as in T5's buckets of positions: evaluated by the interpreter, a block of rows at a time where there are many.
const INTEGERS: &str = r#"symbol s0 "rows" = [1, 70, 333]
symbol s1 "columns" = [1, 65, 128]
input 0 "x": i64[2,s0,s1]
input 1 "row": i64[s1]
input 2 "y": f32[s0,s1]
%0: i64[2,s0,s1] = input() {index=0}
%1: i64[s1] = input() {index=1}
%2: f32[s0,s1] = input() {index=2}
%3: i64[s0] = arange() {start=3, step=2}
%4: i64[s0,1] = reshape(%3)
%5: i64[s0,s1] = sub(%1, %4)
%6: i64[] = full() {value=7.0}
%7: bool[s0,s1] = gt(%5, %6)
%8: i64[s0,s1] = convert(%2)
%9: i64[s0,s1] = where(%7, %5, %8)
%10: i64[2,s0,s1] = mul(%0, %9)
%11: i64[s0,1] = add(%4, %6)
%12: i64[1,s0,s1] = slice(%0) {dim=0, start=1, step=1}
%13: i64[s0,s1] = reshape(%12)
%14: i64[s0,s1] = minimum(%13, %11)
%15: i64[s1,s0] = permute(%14) {dims=[1, 0]}
%16: i64[s1,s0] = abs(%15)
return %7, %9, %10, %11, %16
"#;

#[test]
fn integers_in_blocks() {
    assert!(kernels(INTEGERS).contains(&Kernel::Interpret));
    check(INTEGERS, 1);
}

const MOVEMENT: &str = r#"symbol s0 "batch" = [1, 3]
symbol s1 "seq" = [4, 9]
input 0 "x": T[s0,s1,6]
input 1 "i": i64[s0,2]
parameter 0 "table": T[5,6]
%0: T[s0,s1,6] = input() {index=0}
%1: i64[s0,2] = input() {index=1}
%2: T[5,6] = parameter() {index=0}
%3: T[s0,2,6] = index_select(%2, %1) {dim=0}
%4: T[s0,s1+2,6] = cat(%0, %3) {dim=1}
%5: T[s0,s1+2,6] = flip(%4) {dims=[1, 2]}
%6: T[s0,s1+5,8] = pad(%5) {before=[0, 1, 2], value=0.5}
%7: T[s0,s1,6] = slice_scatter(%0, %3) {dim=1, start=1, step=2}
%8: T[s0,6] = mean(%4) {dims=[1], keepdim=false}
%9: T[s0,1,1] = amax(%4) {dims=[1, 2], keepdim=true}
%10: T[6,s0,s1] = permute(%7) {dims=[2, 0, 1]}
%11: T[3,2,s0*s1] = reshape(%10)
%12: T[s0,s1,6] = relu(%0)
%13: T[s0,2*s1,6] = cat(%12, %12) {dim=1}
%14: T[s0,s1,6] = exp(%0)
%15: T[s0,s1,6] = slice_scatter(%14, %3) {dim=1, start=0, step=1}
%16: T[s0,s1-1,6] = slice(%15) {dim=1, start=0, step=1}
%17: T[s0,s1,6] = slice_scatter(%15, %16) {dim=1, start=1, step=1}
%18: T[s0,s1,6] = slice_scatter(%17, %3) {dim=1, start=2, step=1}
%19: T[s0,s1,6] = slice_scatter(%17, %3) {dim=1, start=1, step=1}
%20: T[s0,s1,6] = neg(%15)
return %5, %6, %7, %8, %9, %11, %0, %13, %2, %18, %19, %19, %20
"#;

#[test]
fn movement_and_reductions() {
    check_all(
        &MOVEMENT.replace(
            "slice_scatter(%0, %3) {dim=1, start=1, step=2}",
            "slice_scatter(%0, %3) {dim=1, start=1, step=1}",
        ),
        64,
    );
}

const WEIGHTS: &str = r#"input 0 "x": f32[3,8]
parameter 0 "q": f32[8,8]
parameter 1 "k": f32[8,8]
parameter 2 "s": f32[]
%0: f32[3,8] = input() {index=0}
%1: f32[8,8] = parameter() {index=0}
%2: f32[8,8] = parameter() {index=1}
%3: f32[] = parameter() {index=2}
%4: f32[8,8] = mul(%1, %3)
%5: f32[16,8] = cat(%4, %2) {dim=0}
%6: f32[3,16] = linear(%0, %5)
%7: f32[8,8] = permute(%2) {dims=[1, 0]}
%8: f32[3,8] = matmul(%0, %7)
return %6, %8
"#;

#[test]
fn weights_are_prepared_once_and_noticed_when_they_change() {
    check(WEIGHTS, 8);
    let mut case = Case::new(WEIGHTS, Precision::Eager, MemoryMode::Fast);
    let plan = case.executable.program().plan.clone();
    assert!(plan.buffers.iter().any(|b| b.kind == BufferKind::Derived));
    case.check_at(&[], 8);
    let derived = case.executable.stats().derived_bytes;
    case.check_at(&[], 8);
    assert_eq!(case.executable.stats().derived_bytes, derived);
    // In place: the same memory, other numbers.
    let fresh = support::random(&mut case.random, oxidiff::ir::DType::F32, &[8, 8], 1);
    let target = borrow(&case.weights[0]).ptr;
    // SAFETY: both hold 64 f32; nothing runs meanwhile.
    unsafe { std::ptr::copy_nonoverlapping(fresh.bytes().as_ptr(), target, 256) };
    case.executable.invalidate(&[0]).unwrap();
    case.check_at(&[], 8);
    case.executable.unload();
    assert_eq!(case.executable.stats().derived_bytes, 0);
    case.check_at(&[], 8);
}

#[test]
fn strided_weights() {
    let graph = graph_of(WEIGHTS);
    let plan = plan_of(graph.clone(), Precision::Eager, MemoryMode::Fast);
    let mut case = Case::with_plan(graph, plan);
    let transposed = |t: &interp::Tensor| Tensor { strides: vec![1, 8], ..borrow(t) };
    let tensors = vec![borrow(&case.weights[0]), transposed(&case.weights[1]), borrow(&case.weights[2])];
    case.executable.set_weights(tensors.into_iter().map(Weight::borrowed).collect(), &[], &[], 0).unwrap();
    let inputs = case.inputs(&[]);
    let got = case.run(&[borrow(&inputs[0])], &[]).unwrap();
    let permuted = interp::eval(
        &oxidiff::ir::Op::Permute { dims: vec![1, 0] },
        &case.graph.parameters[1].ty,
        &[],
        &[&case.weights[1]],
    )
    .unwrap();
    let weights = [case.weights[0].clone(), permuted, case.weights[2].clone()];
    let want = interp::run_f64(&case.graph, &[], &inputs, &weights).unwrap();
    got.iter().zip(&want).enumerate().for_each(|(at, (g, w))| support::compare(at, g, w, 8, String::new));
}

#[test]
fn wrong_arguments_are_errors() {
    let mut case = Case::new(&typed(LOOPS, "f32"), Precision::Eager, MemoryMode::Fast);
    let inputs = case.inputs(&[2, 5]);
    let borrowed: Vec<Tensor> = inputs.iter().map(borrow).collect();
    assert!(case.run(&borrowed, &[2, 5]).is_ok());
    assert!(case.run(&borrowed, &[2, 6]).is_err());
    assert!(case.run(&borrowed[..1], &[2, 5]).is_err());
    assert!(case.run(&borrowed, &[2]).is_err());
    assert!(case.run(&borrowed, &[-2, 5]).is_err());
    assert!(case.executable.program().specialize(&[i64::MAX, 5]).is_err());
}

#[test]
fn empty_and_single_sizes() {
    let mut case = Case::new(&typed(UNET_BLOCK, "f32"), Precision::Eager, MemoryMode::Fast);
    case.check_at(&[1, 1, 1], 400);
    case.check_at(&[0, 4, 4], 400);
    let mut case = Case::new(&typed(ATTENTION, "f32"), Precision::Eager, MemoryMode::Fast);
    case.check_at(&[1, 1], 128);
    case.check_at(&[0, 3], 128);
}

#[test]
fn many_threads_share_a_program() {
    let mut case = Case::new(&typed(UNET_BLOCK, "f32"), Precision::Eager, MemoryMode::Balanced);
    let sizes = [[1, 4, 6], [2, 7, 5], [3, 16, 16], [1, 9, 9], [2, 3, 3], [1, 2, 8]];
    let runs: Vec<_> = sizes
        .iter()
        .map(|s| {
            let inputs = case.inputs(s);
            let borrowed: Vec<Tensor> = inputs.iter().map(borrow).collect();
            let alone = case.run(&borrowed, s).unwrap();
            (s, inputs, alone)
        })
        .collect();
    std::thread::scope(|scope| {
        for (s, inputs, alone) in &runs {
            let case = &case;
            scope.spawn(move || {
                for _ in 0..20 {
                    let borrowed: Vec<Tensor> = inputs.iter().map(borrow).collect();
                    assert_eq!(&case.run(&borrowed, *s).unwrap(), alone);
                }
            });
        }
    });
    assert!(case.executable.program().sizes().len() <= 4);
}
