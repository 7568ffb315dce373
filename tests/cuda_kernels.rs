//! Every kernel that the test graphs need compiles for every architecture, and spills only where it is known to.

#[path = "backends/cases.rs"]
mod cases;
mod support;
#[path = "cuda/toolkit.rs"]
mod toolkit;

use std::collections::BTreeMap;

use cases::CASES;
use oxidiff::backend::cuda::cubins::{UNIT, source};
use oxidiff::codegen::cuda::Kernel;
use oxidiff::ir::parse_graph;
use oxidiff::passes::Precision;
use toolkit::{lowered, nvrtc};

/// Architectures of the devices that people have.
const ARCHS: &[u32] = &[75, 80, 86, 89, 90, 100, 120];

/// Lines of bytes, start of a name, reason: kernels that may spill so much of their registers on some architecture.
const SPILLS: &str = include_str!("cuda/data/spills.txt");

/// Compiles everything for every architecture, which takes minutes: `OXIDIFF_CUDA_ARCHS=all`.
const ALL: &str = "OXIDIFF_CUDA_ARCHS";

/// Kernels of these graphs, once.
fn kernels(texts: impl IntoIterator<Item = String>) -> Vec<Kernel> {
    let mut all: BTreeMap<String, Kernel> = BTreeMap::new();
    for text in texts {
        let graph = parse_graph(&text).unwrap();
        for kernel in lowered(graph, Precision::Fast).kernels {
            all.insert(kernel.name.clone(), kernel);
        }
    }
    all.into_values().collect()
}

fn kernels_of_cases() -> Vec<Kernel> {
    kernels(CASES.iter().flat_map(cases::Case::texts))
}

/// SD1.5's UNet with small widths, in f16.
fn kernels_of_unet() -> Vec<Kernel> {
    kernels([include_str!("cuda/data/sd15_unet_tiny.ir").replace("f32[", "f16[")])
}

/// Bytes that a kernel may spill: the first line that its name begins as counts.
fn allowed(name: &str) -> usize {
    let lines = SPILLS.lines().map(|line| line.splitn(3, ' '));
    let mut rows = lines.filter_map(|mut words| Some((words.next()?.parse().ok()?, words.next()?, words.next()?)));
    rows.find(|(_, start, _)| name.starts_with(start)).map_or(0, |(bytes, ..)| bytes)
}

#[test]
fn kernels_may_spill_what_is_listed() {
    assert_eq!(allowed("attention_bf16_00000000"), 64);
    assert_eq!(allowed("attention_f16_00000000"), 32);
    assert_eq!(allowed("softmax_f16_00000000_v"), 0);
}

/// Compiles the units of `kernels` for the architectures that `chosen` picks by the unit's number.
fn check(kernels: &[Kernel], chosen: impl Fn(usize) -> Vec<u32>) {
    let Some(nvrtc) = nvrtc() else { return };
    let known = nvrtc.archs().unwrap();
    let mut failures = Vec::new();
    for (at, unit) in kernels.chunks(UNIT).map(source).enumerate() {
        for arch in chosen(at).into_iter().filter(|a| known.contains(a)) {
            match nvrtc.compile(&unit, arch, true) {
                Ok(compiled) => {
                    let spills = compiled.spills().into_iter().filter(|&(name, bytes)| bytes > allowed(name));
                    failures.extend(spills.map(|(name, bytes)| format!("{name} for sm_{arch}: {bytes} bytes")));
                }
                Err(e) => failures.push(e.to_string()),
            }
        }
    }
    assert!(failures.is_empty(), "{} of {} kernels:\n{}", failures.len(), kernels.len(), failures.join("\n"));
}

fn wants_all() -> bool {
    std::env::var(ALL).is_ok_and(|v| v == "all")
}

/// Architectures of a unit, `count` of which units take in turns.
fn in_turns(count: usize) -> impl Fn(usize) -> Vec<u32> {
    let count = if wants_all() { ARCHS.len() } else { count };
    move |at| ARCHS.iter().cycle().skip(at * count % ARCHS.len()).take(count).copied().collect()
}

#[test]
fn all_architectures_have_their_turns() {
    let turns = in_turns(2);
    let mut seen: Vec<u32> = (0..ARCHS.len()).flat_map(turns).collect();
    seen.sort_unstable();
    assert_eq!(seen.len() % ARCHS.len(), 0);
    assert!(seen.chunks(seen.len() / ARCHS.len()).map(|same| same[0]).eq(ARCHS.iter().copied()), "{seen:?}");
}

#[test]
fn every_kernel_of_a_unet_compiles() {
    check(&kernels_of_unet(), in_turns(2));
}

#[test]
fn every_kernel_of_every_op_compiles() {
    check(&kernels_of_cases(), in_turns(1));
}

/// Attention on tensor cores with the head sizes that models have, the last ones with the most registers.
#[test]
fn attention_of_every_head_size_compiles() {
    let graph = |dtype: &str, size: usize, mask: &str| {
        format!(
            "symbol s0 \"batch\" = [2]\nsymbol s1 \"rows\" = [70]\n\
             input 0 \"x\": {dtype}[s0,s1,{size}]\ninput 1 \"m\": {mask}[s1,s1]\n\
             %0: {dtype}[s0,s1,{size}] = input() {{index=0}}\n%1: {mask}[s1,s1] = input() {{index=1}}\n\
             %2: {dtype}[s0,s1,{size}] = scaled_dot_product_attention(%0, %0, %0, %1) {{is_causal=false, scale=0.1}}\n\
             return %2\n"
        )
    };
    let cases = [("bf16", 40, "f32"), ("f16", 64, "bool"), ("bf16", 128, "bool"), ("f16", 160, "f16")];
    let kernels = kernels(cases.map(|(dtype, size, mask)| graph(dtype, size, mask)));
    assert!(kernels.iter().any(|kernel| kernel.text.contains("mma<T>")));
    check(&kernels, in_turns(3));
}

/// Reductions that threads share, in every element type.
#[test]
fn every_reduction_compiles_for_every_architecture() {
    let names = ["sum of rows that lie apart", "mean of pixels", "amax of columns that lie apart", "prod"];
    let cases = CASES.iter().filter(|case| names.contains(&case.name));
    let kernels = kernels(cases.flat_map(cases::Case::texts));
    assert_eq!(kernels.iter().filter(|kernel| kernel.text.contains("fold(")).count(), 3 * names.len());
    check(&kernels, |_| ARCHS.to_vec());
}

#[test]
fn the_compilers_messages_reach_the_error() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = nvrtc.compile("extern \"C\" __global__ void k() { undeclared(); }", 80, false).unwrap_err();
    assert!(error.to_string().contains("undeclared"), "{error}");
}

#[test]
fn the_same_graph_gives_the_same_text() {
    let texts = || kernels_of_unet().into_iter().map(|k| k.text).collect::<Vec<_>>();
    assert_eq!(texts(), texts());
}
