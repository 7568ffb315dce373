//! Plans of PyTorch's own cuDNN for GPUs that are not there: from a description of the device, and with a `libcuda.so.1` that
//! has none (`tests/cuda/no_device.cpp`). Nothing runs: numbers are `cuda_libraries.rs`'s. What the models of the zoo hand
//! over is planned by `tests/python/test_cuda_plans.py`.

mod support;
#[path = "cuda/toolkit.rs"]
mod toolkit;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use oxidiff::backend::cuda::cudnn::{Cudnn, Operation, Problem, Storage, Tensor};
use oxidiff::backend::cuda::delegate::Planned;
use oxidiff::backend::cuda::delegate::{Asked, Delegates};
use oxidiff::backend::cuda::library::Search;
use oxidiff::backend::cuda::lower::Lowered;
use oxidiff::backend::cuda::{found, set_search};
use oxidiff::ir::{DType, parse_graph};
use oxidiff::passes::Precision;
use oxidiff::plan::{MemoryMode, Numerics};
use oxidiff::select::Kernel;
use oxidiff::store::kept::Kept;

/// A device as cuDNN wants it described: figures of NVIDIA's data sheets and of the CUDA programming guide's table of compute
/// capabilities.
struct Device {
    name: &'static str,
    arch: u32,
    description: &'static str,
}

const DEVICES: &[Device] = &[
    Device { name: "T4", arch: 75, description: include_str!("cuda/data/devices/t4.json") },
    Device { name: "A100", arch: 80, description: include_str!("cuda/data/devices/a100.json") },
    Device { name: "L4", arch: 89, description: include_str!("cuda/data/devices/l4.json") },
    Device { name: "H100", arch: 90, description: include_str!("cuda/data/devices/h100.json") },
];

/// Names in a library that look like the driver's functions.
fn driver_names(library: &Path) -> BTreeSet<String> {
    let bytes = std::fs::read(library).unwrap();
    let is_name = |b: &u8| b.is_ascii_alphanumeric() || *b == b'_';
    let names = bytes.split(|b| !is_name(b)).filter(|name| name.len() > 3 && name.starts_with(b"cu"));
    let names = names.filter(|name| name[2].is_ascii_uppercase()).map(|n| String::from_utf8_lossy(n).into_owned());
    names.filter(|n| n != "cuDNN").collect()
}

/// A driver without a device.
fn stand_in(packages: &[PathBuf]) -> Option<PathBuf> {
    let graph = packages.iter().map(|p| p.join("cudnn/lib/libcudnn_graph.so.9")).find(|p| p.is_file())?;
    let own = include_str!("cuda/no_device.cpp");
    let has = |name: &String| own.contains(&format!("int {name}("));
    let others: String = driver_names(&graph)
        .into_iter()
        .filter(|n| !has(n))
        .map(|n| format!("extern \"C\" int {n}() {{ return 100; }}\n"))
        .collect();
    let folder = std::env::temp_dir().join(format!("oxidiff-no-device-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("no_device.cpp"), folder.join("libcuda.so.1"));
    std::fs::write(&source, format!("{own}{others}")).unwrap();
    let options = ["-std=c++17", "-shared", "-fPIC", "-fno-builtin", "-w", "-Wl,-soname,libcuda.so.1", "-o"];
    let built = Command::new("g++").args(options).arg(&library).arg(&source).arg("-ldl").output();
    built.is_ok_and(|b| b.status.success()).then_some(library)
}

/// Whether the library is there; says why not.
fn is_ready() -> bool {
    let packages = toolkit::packages();
    let Some(driver) = stand_in(&packages) else {
        eprintln!("skipped: no cuDNN in $VIRTUAL_ENV, or no g++");
        return false;
    };
    set_search(Search { packages, driver: Some(driver) });
    match &found().cudnn {
        Ok(_) => true,
        Err(reason) => {
            eprintln!("skipped: {reason}");
            false
        }
    }
}

/// Every device in every test, not one in turn: `OXIDIFF_CUDNN_DEVICES=all`.
const ALL: &str = "OXIDIFF_CUDNN_DEVICES";

/// A convolution over an image that is upsampled by two is four of 2 x 2 taps, with what follows it.
#[test]
fn upsampling_is_folded_on_every_device() {
    if !is_ready() {
        return;
    }
    // Other work, of which there is enough for sums of 16 bits to be rounded.
    let text = "symbol s0 \"height\" = [64]\ninput 0 \"x\": T[1,s0,64,256]\nparameter 0 \"w\": T[256,256,3,3]\n\
                parameter 1 \"b\": T[256]\nparameter 2 \"l\": T[256,256]\n%0: T[1,s0,64,256] = input() {index=0}\n\
                %1: T[256,256,3,3] = parameter() {index=0}\n%2: T[256] = parameter() {index=1}\n\
                %3: T[256,256] = parameter() {index=2}\n%4: T[1,s0,64,256] = linear(%0, %3)\n\
                %5: T[1,s0,64,256] = linear(%4, %3)\n%6: T[1,s0,64,256] = linear(%5, %3)\n\
                %7: T[1,2*s0,128,256] = upsample_nearest(%6) {first_dim=1, scales=[2.0, 2.0], exact=false}\n\
                %8: T[1,2*s0,128,256] = convolution(%7, %1, %2) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], \
                groups=1, channels_last=true}\nreturn %8\n";
    let numerics = Numerics { tf32_convolutions: true, ..Numerics::default() };
    for (dtype, device) in ["f32", "f16"].iter().flat_map(|dtype| DEVICES.iter().map(move |device| (dtype, device))) {
        let graph = parse_graph(&text.replace("T[", &format!("{dtype}["))).unwrap();
        let plan = support::plan_of(graph, Precision::Fast, MemoryMode::Fast);
        let lowered = Lowered::new(&plan).unwrap();
        let at = plan.steps.iter().position(|s| s.kernel == Kernel::Convolution).unwrap();
        let delegates = Delegates::described(Cudnn::for_description(device.description, None).unwrap());
        // One size in 16 bits, whose engines do not depend on it.
        let sizes: &[_] = match *dtype {
            // The sums of taps are as large as a result of 2 * 16 rows.
            "f32" => &[([64], 0, true), ([63], 0, true), ([64], u64::MAX, false), ([16], 1, true), ([15], 1, false)],
            _ => &[([63], 0, true)],
        };
        for (bindings, fold_flops, is_folded) in sizes.iter().copied() {
            let (step, bindings) = (&plan.steps[at], &bindings);
            let asked = Asked { step, bindings, arch: device.arch, numerics, fold_flops, is_bounded: false };
            let outcome = lowered.steps[at].delegate.as_ref().unwrap().plan(&asked, &delegates, &|_| Vec::new());
            let ready = outcome.unwrap_or_else(|(why, _)| panic!("{}, {dtype}: {why}", device.name));
            assert_eq!(ready.operands.scratch[1].0 == 0, is_folded, "{}, {dtype}: an upsampled image", device.name);
            assert!(!is_folded || ready.form == 0, "{}, {dtype}: not fused", device.name);
        }
    }
}

/// From sm_90 on a convolution is handed over whole where cuDNN has kernels of its own for that: a dense result, to which
/// something as large is added, then a bias. Before, gaps and functions too; nowhere what differs from image to image.
#[test]
fn what_follows_a_convolution_is_handed_over_where_there_are_kernels_for_it() {
    if !is_ready() {
        return;
    }
    let head = "symbol s0 \"batch\" = [2]\ninput 0 \"x\": f16[s0,16,16,64]\ninput 1 \"r\": f16[s0,16,16,64]\n\
                input 2 \"t\": f16[s0,1,1,64]\nparameter 0 \"w\": f16[64,64,3,3]\nparameter 1 \"b\": f16[64]\n\
                %0: f16[s0,16,16,64] = input() {index=0}\n%1: f16[s0,16,16,64] = input() {index=1}\n\
                %2: f16[s0,1,1,64] = input() {index=2}\n%3: f16[64,64,3,3] = parameter() {index=0}\n\
                %4: f16[64] = parameter() {index=1}\n%5: f16[s0,16,16,64] = convolution(%0, %3, %4) {stride=[1, 1], \
                padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}\n";
    // Whether all of it is cuDNN's before sm_90 and from it on, and whether its result needs memory of its own there.
    let cases = [
        ("return %5\n", [true, true], false),
        ("%6: f16[s0,16,16,64] = add(%5, %1)\nreturn %6\n", [true, true], false),
        ("%6: f16[s0,16,16,64] = add(%5, %2)\nreturn %6\n", [false, false], false),
        ("%6: f16[s0,16,16,64] = silu(%5)\nreturn %6\n", [true, false], false),
        ("%6: f16[s0,16,16,128] = cat(%5, %1) {dim=3}\nreturn %6\n", [true, false], true),
    ];
    for (tail, is_whole, needs_memory) in cases {
        let plan = support::plan_of(parse_graph(&format!("{head}{tail}")).unwrap(), Precision::Fast, MemoryMode::Fast);
        let lowered = Lowered::new(&plan).unwrap();
        let at = plan.steps.iter().position(|s| s.kernel == Kernel::Convolution).unwrap();
        let delegate = lowered.steps[at].delegate.as_ref().unwrap();
        for device in DEVICES.iter().filter(|device| device.arch >= 80) {
            let delegates = Delegates::described(Cudnn::for_description(device.description, None).unwrap());
            let (step, numerics) = (&plan.steps[at], Numerics::default());
            let asked = Asked { step, bindings: &[2], arch: device.arch, numerics, fold_flops: 0, is_bounded: false };
            let outcome = delegate.plan(&asked, &delegates, &|_| Vec::new());
            let ready = outcome.unwrap_or_else(|(why, _)| panic!("{}, {tail}: {why}", device.name));
            let is_last = usize::from(device.arch >= 90);
            let name = format!("{}, {tail}", device.name);
            assert_eq!(delegate.0[ready.form].after.is_none(), is_whole[is_last], "{name}");
            assert_eq!(ready.operands.scratch[0].0 > 0, needs_memory && device.arch >= 90, "{name}");
        }
    }
}

/// cuDNN documents engines for heads of up to 256 elements. What it has for those as wide as a VAE's one is not asked for.
#[test]
fn wide_heads_have_plans_from_sm_80_on() {
    if !is_ready() {
        return;
    }
    for (width, is_asked) in [(256, true), (512, false)] {
        let text = "symbol s0 \"rows\" = [4096]\ninput 0 \"q\": f16[1,1,s0,512]\n%0: f16[1,1,s0,512] = input() {index=0}\n\
                %1: f16[1,1,s0,512] = scaled_dot_product_attention(%0, %0, %0) {is_causal=false, scale=0.044}\nreturn %1\n";
        let text = text.replace("512", &width.to_string());
        let plan = support::plan_of(parse_graph(&text).unwrap(), Precision::Fast, MemoryMode::Fast);
        let lowered = Lowered::new(&plan).unwrap();
        let at = plan.steps.iter().position(|s| s.kernel == Kernel::Attention).unwrap();
        for device in DEVICES {
            let delegates = Delegates::described(Cudnn::for_description(device.description, None).unwrap());
            let numerics = Numerics::default();
            let asked = Asked {
                step: &plan.steps[at],
                bindings: &[4096],
                arch: device.arch,
                numerics,
                fold_flops: 0,
                is_bounded: false,
            };
            let outcome = lowered.steps[at].delegate.as_ref().unwrap().plan(&asked, &delegates, &|_| Vec::new());
            assert_eq!(outcome.is_ok(), is_asked && device.arch >= 80, "{}: {width}", device.name);
        }
    }
}

/// A mask of bool is handed over as one that is added, as wide as it was: for every row, or one for all rows of an image.
#[test]
fn masks_of_bool_have_plans_from_sm_80_on() {
    if !is_ready() {
        return;
    }
    let all = std::env::var_os(ALL).is_some();
    let masks = [("f16", "2,1,1,s0"), ("f16", "2,8,4096,s0"), ("bf16", "2,1,4096,s0")];
    for (number, (dtype, mask)) in masks.into_iter().enumerate() {
        let (q, k) = (format!("{dtype}[2,8,4096,64]"), format!("{dtype}[2,8,s0,64]"));
        let text = format!(
            "symbol s0 \"keys\" = [77]\ninput 0 \"q\": {q}\ninput 1 \"k\": {k}\ninput 2 \"m\": bool[{mask}]\n\
             %0: {q} = input() {{index=0}}\n%1: {k} = input() {{index=1}}\n%2: bool[{mask}] = input() {{index=2}}\n\
             %3: {q} = scaled_dot_product_attention(%0, %1, %1, %2) {{is_causal=false, scale=0.125}}\nreturn %3\n"
        );
        let plan = support::plan_of(parse_graph(&text).unwrap(), Precision::Fast, MemoryMode::Fast);
        let lowered = Lowered::new(&plan).unwrap();
        let at = plan.steps.iter().position(|s| s.kernel == Kernel::Attention).unwrap();
        for (_, device) in DEVICES.iter().enumerate().filter(|(turn, _)| all || turn % masks.len() == number) {
            let delegates = Delegates::described(Cudnn::for_description(device.description, None).unwrap());
            let asked = Asked {
                step: &plan.steps[at],
                bindings: &[77],
                arch: device.arch,
                numerics: Numerics::default(),
                fold_flops: 0,
                is_bounded: false,
            };
            let outcome = lowered.steps[at].delegate.as_ref().unwrap().plan(&asked, &delegates, &|_| Vec::new());
            assert_eq!(outcome.is_ok(), device.arch >= 80, "{}, {mask}", device.name);
            let added = asked.step.operands[3].concrete(&[77]).unwrap().numel() * 2;
            let bytes = outcome.map_or(added, |ready| ready.operands.scratch[0].0);
            assert_eq!(bytes, added, "{}, {mask}: as many numbers as the mask has", device.name);
        }
    }
}

/// A convolution of f16 with `rows` rows of results, of 8 x 8 images.
fn convolution(rows: i64) -> Problem {
    let tensor = |dims: [i64; 4], at| {
        let [_, c, h, w] = dims;
        let strides = vec![c * h * w, 1, c * w, c];
        Tensor { dtype: DType::F16, dims: dims.to_vec(), strides, storage: Storage::Operand(at, 16) }
    };
    let tensors = vec![tensor([2, 64, 8, 8], 0), tensor([64, 64, 3, 3], 1), tensor([2, 64, rows, 8], 2)];
    let (stride, padding, dilation) = (vec![1, 1], [vec![1, 1], vec![1, 1]], vec![1, 1]);
    let operations = vec![Operation::Convolution { x: 0, w: 1, y: 2, padding, stride, dilation }];
    Problem { tensors, operations, tf32: false, workspace_bytes: 64 << 20 }
}

/// What does not fit, and what a device has no engine for, is refused with a reason, not later.
#[test]
fn what_cannot_be_is_refused() {
    if !is_ready() {
        return;
    }
    let [t4, .., h100] = DEVICES else { panic!("devices") };
    let library = Cudnn::for_description(h100.description, None).unwrap();
    library.plan(&convolution(8), None).unwrap();
    let reason = library.plan(&convolution(7), None).unwrap_err();
    assert!(reason.contains("CUDNN_STATUS_BAD_PARAM"), "{reason}");
    let mut brain = convolution(8);
    brain.tensors.iter_mut().for_each(|t| t.dtype = DType::BF16);
    library.plan(&brain, None).unwrap();
    let reason = Cudnn::for_description(t4.description, None).unwrap().plan(&brain, None).unwrap_err();
    assert!(reason.contains("cuDNN"), "{reason}");
    let reason = Cudnn::for_description("{\"deviceName\": \"nothing else\"}", None).unwrap_err();
    assert!(reason.contains("cuDNN refuses a device's description"), "{reason}");
}

/// A plan that was built is read back in a fraction of the time, for the same device alone; what is no plan is built anew.
#[test]
fn plans_are_kept_on_disk() {
    if !is_ready() {
        return;
    }
    let folder = std::env::temp_dir().join(format!("oxidiff-kept-plans-{}", std::process::id()));
    let [.., l4, h100] = DEVICES else { panic!("devices") };
    let fresh = |device: &Device| Cudnn::for_description(device.description, Some(folder.clone())).unwrap();
    let timed = |device: &Device| {
        let (library, start) = (fresh(device), Instant::now());
        let plan = library.plan(&convolution(8), None).unwrap();
        (library.built(), plan.engine(), plan.workspace_bytes(), start.elapsed())
    };
    let (built, engine, workspace, slow) = timed(h100);
    let (read, same_engine, same_workspace, fast) = timed(h100);
    println!("built in {slow:?}, read in {fast:?}");
    assert_eq!((built, read), (1, 0));
    assert_eq!((engine, workspace), (same_engine, same_workspace));
    assert!(fast < slow / 4, "built in {slow:?}, read in {fast:?}");
    assert_eq!(timed(l4).0, 1, "another device has plans of its own");
    // A whole file of something else.
    let kept = Kept::new(folder.clone(), "plan", 1 << 20);
    for entry in std::fs::read_dir(&folder).unwrap() {
        kept.write(entry.unwrap().path().file_stem().unwrap().to_str().unwrap(), b"12345678{\"version\": 0}");
    }
    assert_eq!((timed(h100).0, timed(h100).0), (1, 0));
    std::fs::remove_dir_all(folder).unwrap();
}
