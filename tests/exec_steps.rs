//! The CPU backend against the interpreter: each kind of step, views, concatenations, outputs.

mod support;

use support::check;

const HEAD: &str = "symbol s0 \"batch\" = [1, 2, 3]\nsymbol s1 \"seq\" = [5, 8, 33]\n";

#[test]
fn pointwise_loops() {
    check(
        &format!(
            "{HEAD}input 0 \"x\": f32[s0,s1,8]\ninput 1 \"y\": f32[8]\n\
             %0: f32[s0,s1,8] = input() {{index=0}}\n%1: f32[8] = input() {{index=1}}\n\
             %2: f32[s0,s1,8] = mul(%0, %1)\n%3: f32[s0,s1,8] = silu(%2)\n%4: f32[s0,s1,8] = add(%3, %0)\n\
             %5: bool[s0,s1,8] = gt(%4, %0)\nreturn %4, %5, %4\n"
        ),
        1,
    );
}

#[test]
fn linear_with_epilogue() {
    for dtype in ["f32", "f16", "bf16"] {
        check(
            &format!(
                "{HEAD}input 0 \"x\": {dtype}[s0,s1,16]\ninput 1 \"r\": {dtype}[s0,s1,24]\n\
                 parameter 0 \"w\": {dtype}[24,16]\nparameter 1 \"b\": {dtype}[24]\n\
                 %0: {dtype}[s0,s1,16] = input() {{index=0}}\n%1: {dtype}[s0,s1,24] = input() {{index=1}}\n\
                 %2: {dtype}[24,16] = parameter() {{index=0}}\n%3: {dtype}[24] = parameter() {{index=1}}\n\
                 %4: {dtype}[s0,s1,24] = linear(%0, %2, %3)\n%5: {dtype}[s0,s1,24] = add(%4, %1)\n\
                 %6: {dtype}[s0,s1,24] = gelu(%5)\n%7: {dtype}[s0,s1,24] = linear(%0, %2)\nreturn %5, %6, %7\n"
            ),
            16,
        );
    }
}
