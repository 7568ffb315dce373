//! The cases of `tests/backends.rs`.
//!
//! A line is `name: type` (an input), `name @ type` (a weight), `name # type hex` (a constant) or `name = type op(names) {...}`;
//! the last line's value is the result. `N` in a line's `name: type` stands as it is; `T` becomes the float type. Symbols:
//! `s0` = 1, 2, 3 and `s1` = 4, 10, 36.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::HashMap;

/// One graph, in each float type if `T` occurs.
pub struct Case {
    pub name: &'static str,
    /// Length of the longest sum.
    pub terms: usize,
    pub lines: &'static [&'static str],
}

impl Case {
    /// Its text form, once per float type.
    pub fn texts(&self) -> Vec<String> {
        let is_generic = self.lines.iter().any(|l| l.contains("T["));
        let types: &[&str] = if is_generic { &["f32", "f16", "bf16"] } else { &["f32"] };
        types.iter().map(|dtype| self.text(dtype)).collect()
    }

    fn text(&self, dtype: &str) -> String {
        let mut slots = String::from("symbol s0 \"a\" = [1, 2, 3]\nsymbol s1 \"b\" = [4, 10, 36]\n");
        let mut nodes = String::new();
        let mut ids: HashMap<&str, usize> = HashMap::new();
        let mut counts = [0; 3];
        let kinds = [(": ", "input"), (" @ ", "parameter"), (" # ", "constant")];
        let lines: Vec<String> = self.lines.iter().map(|l| l.replace("T[", &format!("{dtype}["))).collect();
        for (id, (line, original)) in lines.iter().zip(self.lines).enumerate() {
            let name = original.split([':', '@', '#', '=']).next().unwrap_or_default().trim();
            if let Some((_, rest)) = line.split_once(" = ") {
                let (ty, call) = rest.split_once(' ').expect("type op(operands)");
                let (op, rest) = call.split_once('(').expect("op(operands)");
                let (operands, attributes) = rest.split_once(')').expect("op(operands)");
                let operands = operands.split(',').map(str::trim).filter(|o| !o.is_empty());
                let operands: Vec<String> = operands.map(|o| format!("%{}", ids[o])).collect();
                nodes += &format!("%{id}: {ty} = {op}({}){attributes}\n", operands.join(", "));
            } else {
                let at = kinds.iter().position(|(mark, _)| line.contains(mark)).expect("a kind of line");
                let (mark, kind) = kinds[at];
                let (_, ty) = line.split_once(mark).expect("contains the mark");
                let (ty, data) = ty.split_once(' ').unwrap_or((ty, ""));
                let index = counts[at];
                counts[at] += 1;
                slots += &match kind {
                    "constant" => format!("constant {index}: {ty} = 0x{data}\n"),
                    _ => format!("{kind} {index} \"{name}\": {ty}\n"),
                };
                nodes += &format!("%{id}: {ty} = {kind}() {{index={index}}}\n");
            }
            ids.insert(name, id);
        }
        // Slots of one kind come together, whatever the order of the lines.
        let mut slots: Vec<&str> = slots.lines().collect();
        slots.sort_by_key(|l| kinds.iter().position(|(_, kind)| l.starts_with(kind)).map_or(0, |at| at + 1));
        format!("{}\n{nodes}return %{}\n", slots.join("\n"), lines.len() - 1)
    }
}

macro_rules! cases {
    ($($name:literal $terms:literal [$($line:literal),+ $(,)?])+) => {
        &[$(Case { name: $name, terms: $terms, lines: &[$($line),+] }),+]
    };
}

/// Every case.
pub const CASES: &[Case] = cases! {
    // -- pointwise: one case per op; those with a pole get an argument of at least 1 ----------------------------------------
    "neg" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] neg(x)"]
    "abs" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] abs(x)"]
    "sign" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] sign(x)"]
    "exp" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] exp(x)"]
    "log" 4 ["x: T[s0,s1]", "m = f32[s0,s1] mul(x, x)", "c = f64[] full() {value=1}", "p = f32[s0,s1] add(m, c)", "y = T[s0,s1] log(p)"]
    "log2" 4 ["x: T[s0,s1]", "m = f32[s0,s1] mul(x, x)", "c = f64[] full() {value=1}", "p = f32[s0,s1] add(m, c)", "y = T[s0,s1] log2(p)"]
    "log10" 4 ["x: T[s0,s1]", "m = f32[s0,s1] mul(x, x)", "c = f64[] full() {value=1}", "p = f32[s0,s1] add(m, c)", "y = T[s0,s1] log10(p)"]
    "sin" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] sin(x)"]
    "cos" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] cos(x)"]
    "sin of large numbers" 4 ["x: i64[s1]", "c = i64[] full() {value=251}", "p = f32[s1] mul(x, c)", "y = f32[s1] sin(p)"]
    "tanh" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] tanh(x)"]
    "sqrt" 4 ["x: T[s0,s1]", "m = T[s0,s1] abs(x)", "y = T[s0,s1] sqrt(m)"]
    "rsqrt" 4 ["x: T[s0,s1]", "m = f32[s0,s1] mul(x, x)", "c = f64[] full() {value=1}", "p = f32[s0,s1] add(m, c)", "y = T[s0,s1] rsqrt(p)"]
    "reciprocal" 4 ["x: T[s0,s1]", "m = f32[s0,s1] mul(x, x)", "c = f64[] full() {value=1}", "p = f32[s0,s1] add(m, c)", "y = T[s0,s1] reciprocal(p)"]
    "sigmoid" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] sigmoid(x)"]
    "silu" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] silu(x)"]
    "gelu" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] gelu(x)"]
    "gelu_tanh" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] gelu_tanh(x)"]
    "relu" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] relu(x)"]
    "erf" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] erf(x)"]
    "softplus" 4 ["x: T[s0,s1,5]", "y = T[s0,s1,5] softplus(x)"]
    "floor" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] floor(x)"]
    "ceil" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] ceil(x)"]
    "round" 1 ["x: T[s0,s1,5]", "c = f64[] full() {value=4}", "m = T[s0,s1,5] mul(x, c)", "y = T[s0,s1,5] round(m)"]
    "trunc" 1 ["x: T[s0,s1,5]", "y = T[s0,s1,5] trunc(x)"]
    "logical_not" 1 ["x: T[s0,s1,5]", "y = bool[s0,s1,5] logical_not(x)"]
    "bitwise_not of bool" 1 ["x: bool[s0,s1]", "y = bool[s0,s1] bitwise_not(x)"]
    "bitwise_not of integers" 1 ["x: i64[s0,s1]", "y = i64[s0,s1] bitwise_not(x)"]
    "isnan" 1 ["x: T[s0,s1]", "z = T[s0,s1] sub(x, x)", "q = f32[s0,s1] div(z, x)", "y = bool[s0,s1] isnan(q)"]
    "isinf" 1 ["x: T[s0,s1]", "z = T[s0,s1] sub(x, x)", "c = f64[] full() {value=1}", "q = f32[s0,s1] div(c, z)", "y = bool[s0,s1] isinf(q)"]
    "unary of integers" 1 ["x: i64[s1]", "c = i64[] full() {value=2}", "a = i64[s1] sub(x, c)", "b = i64[s1] neg(a)", "d = i64[s1] abs(b)", "e = i64[s1] sign(b)", "y = i64[s1] add(d, e)"]
    "float of integers" 4 ["x: i64[s1]", "y = f32[s1] cos(x)"]

    "add" 1 ["a: T[s0,s1,5]", "b: T[s0,s1,5]", "y = T[s0,s1,5] add(a, b)"]
    "sub" 1 ["a: T[s0,s1,5]", "b: T[s1,1]", "y = T[s0,s1,5] sub(a, b)"]
    "mul" 1 ["a: T[s0,1,5]", "b: T[s1,1]", "y = T[s0,s1,5] mul(a, b)"]
    "div" 2 ["a: T[s0,s1]", "b: T[s1]", "m = f32[s1] exp(b)", "y = T[s0,s1] div(a, m)"]
    "floor_divide" 1 ["a: T[s0,s1]", "c = f64[] full() {value=0.75}", "y = T[s0,s1] floor_divide(a, c)"]
    "remainder" 2 ["a: T[s0,s1]", "c = f64[] full() {value=-0.75}", "y = T[s0,s1] remainder(a, c)"]
    "pow" 8 ["a: T[s0,s1]", "b: T[s1]", "m = f32[s0,s1] exp(a)", "y = T[s0,s1] pow(m, b)"]
    "maximum" 1 ["a: T[s0,s1,5]", "b: T[5]", "y = T[s0,s1,5] maximum(a, b)"]
    "minimum" 1 ["a: T[s0,s1,5]", "b: T[5]", "y = T[s0,s1,5] minimum(a, b)"]
    "atan2" 4 ["a: T[s0,s1]", "b: T[s0,s1]", "m = f32[s0,s1] exp(b)", "y = T[s0,s1] atan2(a, m)"]
    "eq" 1 ["a: T[s0,s1]", "b: T[s1]", "y = bool[s0,s1] eq(a, b)"]
    "ne" 1 ["a: T[s0,s1]", "b: T[s1]", "y = bool[s0,s1] ne(a, b)"]
    "lt" 1 ["a: T[s0,s1]", "b: T[s1]", "y = bool[s0,s1] lt(a, b)"]
    "le" 1 ["a: T[s0,s1]", "b: T[s1]", "y = bool[s0,s1] le(a, b)"]
    "gt" 1 ["a: T[s0,s1]", "b: T[s1]", "y = bool[s0,s1] gt(a, b)"]
    "ge" 1 ["a: T[s0,s1]", "b: T[s1]", "y = bool[s0,s1] ge(a, b)"]
    "comparison of integers" 1 ["a: i64[s0,s1]", "b: i64[s1]", "y = bool[s0,s1] le(a, b)"]
    "logical_and" 1 ["a: bool[s0,s1]", "b: bool[s1]", "y = bool[s0,s1] logical_and(a, b)"]
    "logical_or" 1 ["a: bool[s0,s1]", "b: T[s1]", "y = bool[s0,s1] logical_or(a, b)"]
    "logical_xor" 1 ["a: bool[s0,s1]", "b: i64[s1]", "y = bool[s0,s1] logical_xor(a, b)"]
    "numbers times bytes with a sign" 1 ["x: T[s0,s1]", "i: i64[s0,s1]", "c = i64[] full() {value=-77}", "m = i64[s0,s1] mul(i, c)", "b = i8[s0,s1] convert(m)", "y = T[s0,s1] mul(x, b)"]
    "bytes with a sign of numbers" 1 ["i: i64[s0,s1]", "c = f64[] full() {value=-1.25}", "m = f32[s0,s1] mul(i, c)", "y = i8[s0,s1] convert(m)"]
    "the largest of bytes with a sign" 1 ["i: i64[s0,s1]", "c = i64[] full() {value=-3}", "m = i64[s0,s1] mul(i, c)", "b = i8[s0,s1] convert(m)", "y = i8[s0] amax(b) {dims=[1], keepdim=false}"]
    "bits of bytes" 1 ["i: i64[s0,s1]", "c = i64[] full() {value=3}", "b = u8[s0,s1] convert(i)", "d = u8[s0,s1] bitwise_left_shift(b, c)", "n = u8[s0,s1] bitwise_not(b)", "r = u8[s0,s1] bitwise_right_shift(n, c)", "y = u8[s0,s1] bitwise_or(d, r)"]
    "nibbles of bytes times a scale" 16 ["x: T[s0,16]", "q @ u8[12,1,8]", "s @ T[12,1]", "n # u8[2,1] 0004", "h = u8[12,2,8] bitwise_right_shift(q, n)", "m = i64[] full() {value=15}", "b = u8[12,2,8] bitwise_and(h, m)", "c = i64[] full() {value=8}", "i = i8[12,2,8] convert(b)", "d = i8[12,2,8] sub(i, c)", "r = i8[12,16] reshape(d)", "w = T[12,16] mul(s, r)", "y = T[s0,12] linear(x, w)"]
    "bitwise_and" 1 ["a: i64[s0,s1]", "b: i64[s1]", "y = i64[s0,s1] bitwise_and(a, b)"]
    "bitwise_or" 1 ["a: bool[s0,s1]", "b: bool[s1]", "y = bool[s0,s1] bitwise_or(a, b)"]
    "bitwise_xor" 1 ["a: i32[s0,s1]", "b: i32[s1]", "y = i32[s0,s1] bitwise_xor(a, b)"]
    "shifts" 1 ["a: i64[s0,s1]", "b: i64[s1]", "c = i64[s0,s1] bitwise_left_shift(a, b)", "d = i64[] full() {value=1}", "y = i64[s0,s1] bitwise_right_shift(c, d)"]
    "integer arithmetic" 1 ["a: i64[s0,s1]", "b: i64[s1]", "c = i64[] full() {value=3}", "d = i64[s0,s1] sub(a, c)", "e = i64[s0,s1] mul(d, b)", "f = i64[s0,s1] floor_divide(e, c)", "g = i64[s0,s1] remainder(e, c)", "y = i64[s0,s1] maximum(f, g)"]
    "a number given in the call" 1 ["x: T[s0,s1]", "t: f64[]", "y = T[s0,s1] mul(x, t)"]
    "an integer given in the call" 1 ["x: T[s0,s1]", "t: i64[]", "y = T[s0,s1] mul(x, t)"]
    "mixed float types" 1 ["x: T[s0,s1]", "b: f32[s1]", "y = f32[s0,s1] add(x, b)"]
    "where" 1 ["c: bool[s0,s1]", "a: T[s1]", "b: T[s0,1]", "y = T[s0,s1] where(c, a, b)"]
    "where of integers" 1 ["c: bool[s0,1]", "a: i64[s1]", "z = i64[] full() {value=-1}", "y = i64[s0,s1] where(c, a, z)"]
    "masked by infinity" 1 ["x: T[s0,s1]", "c: bool[s0,s1]", "n = T[] full() {value=-inf}", "m = T[s0,s1] where(c, x, n)", "d = f64[] full() {value=-8}", "y = T[s0,s1] maximum(m, d)"]
    "convert float to float" 1 ["x: T[s0,s1]", "a = bf16[s0,s1] convert(x)", "b = f16[s0,s1] convert(a)", "y = T[s0,s1] convert(b)"]
    "convert float to integer" 1 ["x: T[s0,s1]", "a = i32[s0,s1] convert(x)", "y = T[s0,s1] convert(a)"]
    "convert bool to float" 1 ["x: bool[s0,s1]", "y = T[s0,s1] convert(x)"]
    "convert integer to float" 1 ["x: i64[s0,s1]", "y = T[s0,s1] convert(x)"]
    "a chain" 16 ["x: T[s0,s1,8]", "w @ T[8]", "a = T[s0,s1,8] mul(x, w)", "b = T[s0,s1,8] silu(a)", "c = T[s0,s1,8] add(b, x)", "d = T[s0,s1,8] gelu(c)", "y = T[s0,s1,8] sub(d, a)"]
    "one element" 4 ["x: T[]", "y = T[] exp(x)"]
    "no elements" 1 ["x: T[s0,0,5]", "b: T[5]", "y = T[s0,0,5] add(x, b)"]

    // -- sources ---------------------------------------------------------------------------------------------------------------
    "constant" 1 ["x: f32[s1,2]", "c # f32[2] 0000803f00000040", "y = f32[s1,2] mul(x, c)"]
    "size_of" 1 ["x: T[s0,s1]", "n = i64[] size_of() {size=s0*s1/2}", "y = T[s0,s1] mul(x, n)"]
    "arange" 1 ["x: T[s0,s1]", "r = i64[s1] arange() {start=-s0, step=2}", "y = T[s0,s1] mul(x, r)"]
    "an output that is a source" 1 ["y = i64[s1] arange() {start=1, step=1}"]
    "an output that is an input" 1 ["x: T[s0,s1]"]
    "an output that is a view" 1 ["x: T[s0,s1,3]", "y = T[3,s1,s0] permute(x) {dims=[2, 1, 0]}"]

    // -- movement --------------------------------------------------------------------------------------------------------------
    "reshape" 1 ["x: T[s0,s1,6]", "a = T[s0,s1,6] neg(x)", "r = T[s0*s1,2,3] reshape(a)", "y = T[s0*s1,2,3] abs(r)"]
    "reshape of permuted" 1 ["x: T[s0,s1,6]", "p = T[s0,6,s1] permute(x) {dims=[0, 2, 1]}", "y = T[s0,6*s1] reshape(p)"]
    "permute" 1 ["x: T[s0,s1,3,5]", "p = T[s0,5,s1,3] permute(x) {dims=[0, 3, 1, 2]}", "y = T[s0,5,s1,3] neg(p)"]
    "expand" 1 ["x: T[s0,1,5]", "e = T[2,s0,s1,5] expand(x)", "y = T[2,s0,s1,5] neg(e)"]
    "expand as output" 1 ["x: T[s0,1]", "y = T[s0,s1] expand(x)"]
    "slice" 1 ["x: T[s0,s1,5]", "a = T[s0,s1-2,5] slice(x) {dim=1, start=1, step=1}", "y = T[s0,s1-2,5] neg(a)"]
    "slice with step" 1 ["x: T[s0,s1,7]", "a = T[s0,s1/2,7] slice(x) {dim=1, start=1, step=2}", "y = T[s0,s1/2,3] slice(a) {dim=2, start=1, step=2}"]
    "cat" 1 ["a: T[s0,s1,3]", "b: T[s0,2,3]", "n = T[s0,s1,3] neg(a)", "y = T[s0,2+2*s1,3] cat(n, b, a) {dim=1}"]
    "cat of channels" 1 ["a: T[s0,3,s1]", "b: T[s0,2,s1]", "c = T[s0,5,s1] cat(a, b) {dim=1}", "y = T[s0,5,s1] silu(c)"]
    "cat of one value twice" 1 ["a: T[s1,2]", "n = T[s1,2] exp(a)", "y = T[s1,4] cat(n, n) {dim=1}"]
    "pad" 1 ["x: T[s0,s1,3]", "a = T[s0,s1,3] neg(x)", "y = T[s0,3+s1,4] pad(a) {before=[0, 2, 1], value=0.5}"]
    "slice_scatter" 1 ["x: T[s0,s1,3]", "b: T[s0,s1/2,3]", "y = T[s0,s1,3] slice_scatter(x, b) {dim=1, start=1, step=2}"]
    "flip" 1 ["x: T[s0,s1,3]", "y = T[s0,s1,3] flip(x) {dims=[1, 2]}"]
    "index_select" 1 ["w @ T[5,7]", "i: i64[s0,s1]", "y = T[s0,s1,7] index_select(w, i) {dim=0}"]
    "index_select inside" 1 ["x: T[s0,5,s1]", "i: i64[2]", "y = T[s0,2,s1] index_select(x, i) {dim=1}"]
    "interpolate" 2 ["x: T[s0,5,s1]", "i: i64[7,2]", "w @ f32[7,2]", "y = T[s0,7,s1] interpolate(x, i, w) {dim=1}"]
    "interpolate along rows" 4 ["x: T[s0,s1,6]", "i: i64[9,4]", "w @ f32[9,4]", "y = T[s0,s1,9] interpolate(x, i, w) {dim=2}"]
    "interpolate channels" 3 ["x: T[6,s0,17]", "i: i64[s1,3]", "w: f32[s1,3]", "n = T[6,s0,17] neg(x)", "y = T[s1,s0,17] interpolate(n, i, w) {dim=0}"]
    "interpolate turned" 2 [
        "x: T[s0,9,5,s1]", "p = T[s0,5,s1,9] permute(x) {dims=[0, 2, 3, 1]}", "i: i64[8,2]", "w @ f32[8,2]",
        "y = T[s0,8,s1,9] interpolate(p, i, w) {dim=1}",
    ]
    "gather" 1 ["x: T[s0,5,3]", "i: i64[s0,2,3]", "y = T[s0,2,3] gather(x, i) {dim=1}"]
    "gather of broadcast numbers by bytes" 1 ["t @ T[1,6]", "i: i64[s0,s1]", "b = u8[s0,s1] convert(i)", "c = i64[] full() {value=3}", "m = u8[s0,s1] bitwise_and(b, c)", "j = i64[s0,s1] convert(m)", "e = T[s0,6] expand(t)", "y = T[s0,s1] gather(e, j) {dim=1}"]

    // -- reductions --------------------------------------------------------------------------------------------------------------
    "sum" 180 ["x: T[s0,s1,5]", "y = T[s0] sum(x) {dims=[1, 2], keepdim=false}"]
    "sum of the middle" 36 ["x: T[s0,s1,5]", "y = T[s0,1,5] sum(x) {dims=[1], keepdim=true}"]
    "sum in a wider type" 36 ["x: T[s0,s1]", "y = f32[s0] sum(x) {dims=[1], keepdim=false}"]
    "sum of integers" 1 ["x: i64[s0,s1]", "y = i64[s0] sum(x) {dims=[1], keepdim=false}"]
    "mean" 36 ["x: T[s0,s1]", "y = T[s0,1] mean(x) {dims=[1], keepdim=true}"]
    "mean of squares" 36 ["x: T[s0,s1]", "m = f32[s0,s1] mul(x, x)", "y = f32[s0,1] mean(m) {dims=[1], keepdim=true}"]
    "sum of long rows" 6400 ["x: T[s0,6400]", "y = T[s0,1] sum(x) {dims=[1], keepdim=true}"]
    "sum of rows with gaps" 360 ["x: T[s0,4,s1,10]", "y = T[s0,4] sum(x) {dims=[2, 3], keepdim=false}"]
    "sum of rows that lie apart" 72 ["x: T[s0,5,s1,8]", "y = T[5,s1] sum(x) {dims=[0, 3], keepdim=false}"]
    "sum of everything" 1188 ["x: T[s0,s1,11]", "y = T[] sum(x) {dims=[0, 1, 2], keepdim=false}"]
    "sum of turned rows" 36 [
        "x: T[s0,s1,7]", "p = T[7,s0,s1] permute(x) {dims=[2, 0, 1]}", "y = T[7,s0] sum(p) {dims=[2], keepdim=false}",
    ]
    "sum of every other" 36 [
        "x: T[s0,2*s1]", "e = T[s0,s1] slice(x) {dim=1, start=1, step=2}", "y = T[s0] sum(e) {dims=[1], keepdim=false}",
    ]
    "mean of pixels" 1296 ["x: T[s0,s1,s1,70]", "y = T[s0,1,1,70] mean(x) {dims=[1, 2], keepdim=true}"]
    "mean of pixels of few channels" 1296 ["x: T[s0,s1,s1,33]", "y = T[s0,33] mean(x) {dims=[1, 2], keepdim=false}"]
    "amax of columns that lie apart" 1 ["x: T[s0,6,s1,5]", "y = T[6,5] amax(x) {dims=[0, 2], keepdim=false}"]
    "amax" 1 ["x: T[s0,s1,5]", "y = T[s1] amax(x) {dims=[0, 2], keepdim=false}"]
    "amin" 1 ["x: T[s0,s1,5]", "y = T[s0,s1] amin(x) {dims=[2], keepdim=false}"]
    "prod" 8 ["x: T[s1,5]", "y = T[s1] prod(x) {dims=[1], keepdim=false}"]
    "any" 1 ["x: bool[s0,s1]", "y = bool[s0] any(x) {dims=[1], keepdim=false}"]
    "all" 1 ["x: bool[s0,s1]", "y = bool[s1] all(x) {dims=[0], keepdim=false}"]
    "argmax" 1 ["x: i64[s0,s1]", "y = i64[s0] argmax(x) {dims=[1], keepdim=false}"]
    "argmax of floats" 1 ["x: T[s0,s1]", "y = i64[s0,1] argmax(x) {dims=[1], keepdim=true}"]
    "argmin" 1 ["x: T[s0,s1]", "y = i64[s1] argmin(x) {dims=[0], keepdim=false}"]
    "cumsum" 36 ["x: T[s0,s1]", "y = T[s0,s1] cumsum(x) {dim=1}"]
    "cumsum of integers" 1 ["x: i64[s0,s1]", "y = i64[s0,s1] cumsum(x) {dim=1}"]
    "cumsum of rows" 36 ["x: T[s0,s1,5]", "p = T[s1,5,s0] permute(x) {dims=[1, 2, 0]}", "y = T[s1,5,s0] cumsum(p) {dim=0}"]
    "cumsum of truth values" 1 ["x: bool[s0,s1]", "y = i64[s0,s1] cumsum(x) {dim=0}"]
    "cumsum of bytes" 1 ["x: u8[s0,s1]", "y = u8[s0,s1] cumsum(x) {dim=1}"]
    "softmax" 36 ["x: T[s0,5,s1]", "y = T[s0,5,s1] softmax(x) {dim=2}"]
    "softmax of expanded rows" 36 [
        "x: T[5,s1]", "e = T[s0,5,s1] expand(x)", "m = T[s0,5,s1] softmax(e) {dim=2}", "y = T[s0,5,s1] sub(m, e)",
    ]
    "softmax of the middle" 36 ["x: T[s0,s1,5]", "y = T[s0,s1,5] softmax(x) {dim=1}"]

    // -- contractions --------------------------------------------------------------------------------------------------------------
    "linear" 33 ["x: T[s0,s1,33]", "w @ T[17,33]", "y = T[s0,s1,17] linear(x, w)"]
    "linear with bias" 32 ["x: T[s0,s1,32]", "w @ T[48,32]", "b @ T[48]", "y = T[s0,s1,48] linear(x, w, b)"]
    "linear of one row" 64 ["x: T[64]", "w @ T[32,64]", "b @ T[32]", "y = T[32] linear(x, w, b)"]
    "linear with epilogue" 32 ["x: T[s0,s1,32]", "r: T[s0,s1,48]", "w @ T[48,32]", "b @ T[48]", "l = T[s0,s1,48] linear(x, w, b)", "g = T[s0,s1,48] gelu(l)", "y = T[s0,s1,48] add(g, r)"]
    "linear with a remainder" 32 ["x: T[s0,s1,32]", "w @ T[48,32]", "b @ T[48]", "l = f32[s0,s1,48] linear(x, w, b)", "a = f32[s0,s1,48] tanh(l)", "c = f64[] full() {value=4}", "p = f32[s0,s1,48] add(a, c)", "d = f64[] full() {value=8}", "y = T[s0,s1,48] remainder(p, d)"]
    "linear of permuted" 6 ["x: T[s0,6,s1]", "w @ T[4,6]", "p = T[s0,s1,6] permute(x) {dims=[0, 2, 1]}", "y = T[s0,s1,4] linear(p, w)"]
    "linear to f32" 32 ["x: T[s1,32]", "w @ T[16,32]", "y = f32[s1,16] linear(x, w)"]
    "linear with computed weight" 8 ["x: T[s1,8]", "w @ T[4,8]", "v @ T[4,8]", "a = T[4,8] add(w, v)", "y = T[s1,4] linear(x, a)"]
    "gate" 16 ["x: T[s1,16]", "w @ T[32,16]", "l = T[s1,32] linear(x, w)", "a = T[s1,16] slice(l) {dim=1, start=0, step=1}", "b = T[s1,16] slice(l) {dim=1, start=16, step=1}", "g = T[s1,16] gelu(b)", "y = T[s1,16] mul(a, g)"]
    "matmul" 9 ["a: T[s0,s1,9]", "b: T[s0,9,5]", "y = T[s0,s1,5] matmul(a, b)"]
    "matmul with transpose" 9 ["a: T[s0,2,s1,9]", "b: T[s0,2,7,9]", "t = T[s0,2,9,7] permute(b) {dims=[0, 1, 3, 2]}", "y = T[s0,2,s1,7] matmul(a, t)"]
    "matmul broadcasts" 9 ["a: T[s0,1,s1,9]", "b: T[3,9,5]", "y = T[s0,3,s1,5] matmul(a, b)"]
    "matmul of sizes" 36 ["a: T[s0,5,s1]", "b: T[s0,s1,5]", "y = T[s0,5,5] matmul(a, b)"]

    "convolution" 36 ["x: T[s0,4,s1,6]", "w @ T[8,4,3,3]", "b @ T[8]", "y = T[s0,8,s1,6] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "convolution channels last" 36 ["x: T[s0,s1,6,4]", "w @ T[8,4,3,3]", "b @ T[8]", "y = T[s0,s1,6,8] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}"]
    "convolution 1x1" 16 ["x: T[s0,16,s1,6]", "w @ T[8,16,1,1]", "y = T[s0,8,s1,6] convolution(x, w) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}"]
    "convolution with stride" 36 ["x: T[s0,4,s1,6]", "w @ T[8,4,3,3]", "y = T[s0,8,s1/2,3] convolution(x, w) {stride=[2, 2], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "convolution with dilation" 36 ["x: T[s0,4,s1,6]", "w @ T[8,4,3,3]", "y = T[s0,8,s1,6] convolution(x, w) {stride=[1, 1], padding=[2, 2], dilation=[2, 2], groups=1, channels_last=false}"]
    "convolution with groups" 18 ["x: T[s0,4,s1,6]", "w @ T[8,2,3,3]", "b @ T[8]", "y = T[s0,8,s1,6] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=2, channels_last=false}"]
    "depthwise convolution" 9 ["x: T[s0,6,s1,6]", "w @ T[6,1,3,3]", "b @ T[6]", "y = T[s0,6,s1,6] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=6, channels_last=false}"]
    "patches" 16 ["x: T[s0,4,s1,6]", "w @ T[8,4,2,2]", "b @ T[8]", "y = T[s0,8,s1/2,3] convolution(x, w, b) {stride=[2, 2], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}"]
    "convolution of one dimension" 12 ["x: T[s0,4,s1]", "w @ T[8,4,3]", "y = T[s0,8,s1] convolution(x, w) {stride=[1], padding=[1], dilation=[1], groups=1, channels_last=false}"]
    "convolution of three dimensions" 108 ["x: T[s0,4,3,s1,6]", "w @ T[8,4,3,3,3]", "b @ T[8]", "y = T[s0,8,3,s1,6] convolution(x, w, b) {stride=[1, 1, 1], padding=[1, 1, 1], dilation=[1, 1, 1], groups=1, channels_last=false}"]
    "causal convolution of three dimensions" 12 ["x: T[s0,4,3,s1,6]", "w @ T[8,4,3,1,1]", "p = T[s0,4,5,s1,6] pad(x) {before=[0, 0, 2, 0, 0], value=0}", "y = T[s0,8,3,s1,6] convolution(p, w) {stride=[1, 1, 1], padding=[0, 0, 0], dilation=[1, 1, 1], groups=1, channels_last=false}"]
    "convolution with epilogue" 36 ["x: T[s0,4,s1,6]", "r: T[s0,8,s1,6]", "t: T[s0,8]", "w @ T[8,4,3,3]", "b @ T[8]", "c = T[s0,8,s1,6] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}", "u = T[s0,8,1,1] reshape(t)", "a = T[s0,8,s1,6] add(c, u)", "y = T[s0,8,s1,6] add(a, r)"]
    "resnet block" 72 ["x: T[s0,8,s1,6]", "g @ T[8]", "h @ T[8]", "w @ T[8,8,3,3]", "n = T[s0,8,s1,6] group_norm(x, g, h) {num_groups=4, eps=1e-5, channel_dim=1}", "a = T[s0,8,s1,6] silu(n)", "c = T[s0,8,s1,6] convolution(a, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}", "y = T[s0,8,s1,6] add(c, x)"]
    "upsample then convolution" 36 ["x: T[s0,4,s1,6]", "w @ T[8,4,3,3]", "u = T[s0,4,2*s1,12] upsample_nearest(x) {first_dim=2, scales=[2.0, 2.0], exact=false}", "y = T[s0,8,2*s1,12] convolution(u, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]

    "attention" 36 ["q: T[s0,2,s1,8]", "k: T[s0,2,7,8]", "v: T[s0,2,7,8]", "y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.25}"]
    "self attention from tokens" 36 ["x: T[s0,s1,16]", "h = T[s0,s1,2,8] reshape(x)", "q = T[s0,2,s1,8] permute(h) {dims=[0, 2, 1, 3]}", "a = T[s0,2,s1,8] scaled_dot_product_attention(q, q, q) {is_causal=false, scale=0.35}", "t = T[s0,s1,2,8] permute(a) {dims=[0, 2, 1, 3]}", "y = T[s0,s1,16] reshape(t)"]
    "causal attention" 36 ["q: T[s0,2,s1,8]", "k: T[s0,2,s1,8]", "v: T[s0,2,s1,8]", "y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v) {is_causal=true, scale=0.25}"]
    "attention with bool mask" 36 ["q: T[s0,2,s1,8]", "k: T[s0,2,7,8]", "v: T[s0,2,7,8]", "m: bool[s0,1,s1,7]", "y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}"]
    "attention with float mask" 36 ["q: T[s0,2,s1,8]", "k: T[s0,2,7,8]", "v: T[s0,2,7,8]", "m: T[7]", "y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}"]
    "attention with a mask whose keys lie apart" 36 ["q: T[s0,2,s1,8]", "k: T[s0,2,7,8]", "v: T[s0,2,7,8]", "m: T[s1,7,2]", "p = T[2,s1,7] permute(m) {dims=[2, 0, 1]}", "a = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, p) {is_causal=false, scale=0.25}", "y = T[s0,2,s1,8] scaled_dot_product_attention(a, k, v, p) {is_causal=false, scale=0.25}"]
    "attention with f32 mask" 36 ["q: T[s0,2,s1,8]", "k: T[s0,2,7,8]", "v: T[s0,2,7,8]", "m: f32[s1,7]", "y = T[s0,2,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}"]
    "attention to nothing" 36 ["q: T[s0,s1,8]", "k: T[s0,7,8]", "v: T[s0,7,8]", "m = bool[1,7] full() {value=0}", "y = T[s0,s1,8] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.25}"]
    "attention of other value size" 36 ["q: T[s0,s1,8]", "k: T[s0,9,8]", "v: T[s0,9,5]", "y = T[s0,s1,5] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.25}"]
    "attention with shared keys" 36 ["q: T[s0,3,s1,8]", "k: T[s0,1,9,8]", "v: T[s0,1,9,8]", "y = T[s0,3,s1,8] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.25}"]
    "attention of size 40" 40 ["q: T[s0,2,s1,40]", "k: T[s0,2,77,40]", "v: T[s0,2,77,40]", "y = T[s0,2,s1,40] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.158}"]
    "attention of size 160" 160 ["q: T[s0,s1,160]", "k: T[s0,70,160]", "v: T[s0,70,160]", "y = T[s0,s1,160] scaled_dot_product_attention(q, k, v) {is_causal=false, scale=0.079}"]
    "attention over many keys with float mask" 150 ["q: T[s0,2,2*s1,24]", "k: T[s0,2,150,24]", "v: T[s0,2,150,40]", "m: T[2*s1,150]", "y = T[s0,2,2*s1,40] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.2}"]
    "attention over many keys with bool mask" 150 ["q: T[s0,2,2*s1,24]", "k: T[s0,2,150,24]", "v: T[s0,2,150,24]", "m: bool[s0,1,1,150]", "y = T[s0,2,2*s1,24] scaled_dot_product_attention(q, k, v, m) {is_causal=false, scale=0.2}"]
    "causal attention over many keys" 100 ["q: T[s0,2,2*s1,20]", "k: T[s0,2,100,20]", "v: T[s0,2,100,20]", "y = T[s0,2,2*s1,20] scaled_dot_product_attention(q, k, v) {is_causal=true, scale=0.22}"]

    // -- norms ---------------------------------------------------------------------------------------------------------------------
    "group_norm" 512 ["x: T[s0,8,s1,6]", "w @ T[8]", "b @ T[8]", "y = T[s0,8,s1,6] group_norm(x, w, b) {num_groups=2, eps=1e-5, channel_dim=1}"]
    "group_norm channels last" 512 ["x: T[s0,s1,6,8]", "w @ T[8]", "b @ T[8]", "y = T[s0,s1,6,8] group_norm(x, w, b) {num_groups=4, eps=1e-5, channel_dim=3}"]
    "group_norm without weight" 512 ["x: T[s0,8,s1]", "y = T[s0,8,s1] group_norm(x) {num_groups=2, eps=1e-5, channel_dim=1}"]
    "group_norm of a crop" 1024 ["x: T[s0,8,s1,6]", "k @ T[8,8,3,3]", "c = T[s0,8,s1,6] convolution(x, k) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}", "d = T[s0,8,s1,4] slice(c) {dim=3, start=1, step=1}", "n = T[s0,8,s1,4] group_norm(d) {num_groups=2, eps=1e-5, channel_dim=1}", "y = T[s0,8,s1,4] convolution(n, k) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "group_norm of rows" 512 ["x: T[s0,s1,6,8]", "w @ T[8]", "b @ T[8]", "d = T[s0,2,6,8] slice(x) {dim=1, start=1, step=1}", "y = T[s0,2,6,8] group_norm(d, w, b) {num_groups=4, eps=1e-5, channel_dim=3}"]
    "group_norm of a column" 512 ["x: T[s0,8,s1,6]", "d = T[s0,8,s1,1] slice(x) {dim=3, start=2, step=1}", "y = T[s0,8,s1,1] group_norm(d) {num_groups=2, eps=1e-5, channel_dim=1}"]
    "group_norm of an image, cropped" 512 ["x: T[s0,8,s1,6]", "d = T[s0,8,s1,5] slice(x) {dim=3, start=1, step=1}", "y = T[s0,8,s1,5] group_norm(d) {num_groups=2, eps=1e-5, channel_dim=1}"]
    "group_norm of some channels" 512 ["x: T[s0,8,s1,6]", "d = T[s0,4,s1,6] slice(x) {dim=1, start=2, step=1}", "y = T[s0,4,s1,6] group_norm(d) {num_groups=2, eps=1e-5, channel_dim=1}"]
    "group_norm with f32 weight" 512 ["x: T[s0,8,s1]", "w @ f32[8]", "b @ f32[8]", "y = T[s0,8,s1] group_norm(x, w, b) {num_groups=2, eps=1e-5, channel_dim=1}"]
    "layer_norm" 64 ["x: T[s0,s1,24]", "w @ T[24]", "b @ T[24]", "y = T[s0,s1,24] layer_norm(x, w, b) {normalized_ndim=1, eps=1e-5}"]
    "layer_norm without weight" 64 ["x: T[s0,s1,24]", "y = T[s0,s1,24] layer_norm(x) {normalized_ndim=1, eps=1e-6}"]
    "layer_norm without bias" 64 ["x: T[s0,s1,24]", "w @ T[24]", "y = T[s0,s1,24] layer_norm(x, w) {normalized_ndim=1, eps=1e-6}"]
    "layer_norm of two dimensions" 64 ["x: T[s0,s1,4,6]", "w @ T[4,6]", "b @ T[4,6]", "y = T[s0,s1,4,6] layer_norm(x, w, b) {normalized_ndim=2, eps=1e-5}"]
    "layer_norm with modulation" 64 ["x: T[s0,s1,24]", "m: T[s0,1,24]", "h: T[s0,1,24]", "n = T[s0,s1,24] layer_norm(x) {normalized_ndim=1, eps=1e-6}", "c = f64[] full() {value=1}", "o = T[s0,1,24] add(m, c)", "p = T[s0,s1,24] mul(n, o)", "y = T[s0,s1,24] add(p, h)"]
    "rms_norm" 64 ["x: T[s0,s1,24]", "w @ T[24]", "y = T[s0,s1,24] rms_norm(x, w) {normalized_ndim=1, eps=1e-6}"]
    "rms_norm without weight" 64 ["x: T[s0,s1,24]", "y = T[s0,s1,24] rms_norm(x) {normalized_ndim=1, eps=1e-6}"]
    "rms_norm with a floor" 64 ["x: T[s0,s1,24]", "w @ T[24]", "y = T[s0,s1,24] rms_norm(x, w) {normalized_ndim=1, eps=1e-6, floor=true}"]
    "rms_norm below its floor" 64 ["x: T[s0,s1,24]", "y = T[s0,s1,24] rms_norm(x) {normalized_ndim=1, eps=50, floor=true}"]
    "normalize channels" 128 ["x: T[s0,8,s1,6]", "w @ T[8,8,3,3]", "g @ T[8,1,1]", "c = T[s0,8,s1,6] convolution(x, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}", "q = f32[s0,8,s1,6] mul(c, c)", "t = f32[s0,1,s1,6] sum(q) {dims=[1], keepdim=true}", "l = f32[s0,1,s1,6] sqrt(t)", "e = f64[] full() {value=1e-12}", "m = f32[s0,1,s1,6] maximum(l, e)", "n = T[s0,8,s1,6] div(c, m)", "z = f64[] full() {value=2.8284271247461903}", "o = T[s0,8,s1,6] mul(n, z)", "y = T[s0,8,s1,6] mul(o, g)"]

    // -- rotations of pairs --------------------------------------------------------------------------------------------------------
    "rotate_pairs" 1 ["x: T[s0,s1,6]", "y = T[s0,s1,6] rotate_pairs(x)"]
    "rotate_pairs in a loop" 4 ["x: T[s0,s1,16]", "c: f32[s1,16]", "s: f32[s1,16]", "r = T[s0,s1,16] rotate_pairs(x)", "p = f32[s0,s1,16] mul(x, c)", "q = f32[s0,s1,16] mul(r, s)", "a = f32[s0,s1,16] add(p, q)", "y = T[s0,s1,16] convert(a)"]
    "rotate_pairs behind a norm" 64 ["x: T[s0,s1,4,16]", "w @ T[16]", "c: f32[s1,1,16]", "s: f32[s1,1,16]", "n = T[s0,s1,4,16] rms_norm(x, w) {normalized_ndim=1, eps=1e-6}", "r = T[s0,s1,4,16] rotate_pairs(n)", "p = f32[s0,s1,4,16] mul(n, c)", "q = f32[s0,s1,4,16] mul(r, s)", "a = f32[s0,s1,4,16] add(p, q)", "y = T[s0,s1,4,16] convert(a)"]
    "rotate_pairs behind a norm of few columns" 64 ["x: T[s0,s1,10]", "n = T[s0,s1,10] layer_norm(x) {normalized_ndim=1, eps=1e-6}", "r = T[s0,s1,10] rotate_pairs(n)", "y = T[s0,s1,10] add(r, x)"]
    "rotate_pairs of what begins anywhere" 1 ["x: T[s0,s1,7]", "z = T[s0,s1,6] slice(x) {dim=2, start=1, step=1}", "r = T[s0,s1,6] rotate_pairs(z)", "y = T[s0,s1,6] add(r, z)"]
    "rotate_pairs twice" 1 ["x: T[s0,s1,8]", "r = T[s0,s1,8] rotate_pairs(x)", "a = T[s0,s1,8] abs(r)", "y = T[s0,s1,8] rotate_pairs(a)"]
    "rotate_pairs of a product" 64 ["x: T[s0,s1,24]", "w @ T[8,24]", "p = T[s0,s1,8] linear(x, w)", "r = T[s0,s1,8] rotate_pairs(p)", "y = T[s0,s1,8] add(r, p)"]
    "rotate_pairs of rows that are expanded" 1 ["x: T[s1,8]", "e = T[s0,s1,8] expand(x)", "y = T[s0,s1,8] rotate_pairs(e)"]
    "rotate_pairs of a weight" 1 ["x: T[s0,s1,8]", "w @ T[8]", "r = T[8] rotate_pairs(w)", "y = T[s0,s1,8] mul(x, r)"]
    "rotate_pairs in another order" 1 ["x: T[s0,4,s1,8]", "t = T[s0,s1,4,8] permute(x) {dims=[0, 2, 1, 3]}", "r = T[s0,s1,4,8] rotate_pairs(t)", "y = T[s0,s1,4,8] add(r, t)"]
    "pairs that are joined" 1 ["x: T[s0,s1,8]", "p = T[s0,s1,4,2] reshape(x)", "a = T[s0,s1,4,1] slice(p) {dim=3, start=0, step=1}", "b = T[s0,s1,4,1] slice(p) {dim=3, start=1, step=1}", "n = T[s0,s1,4,1] neg(b)", "c = T[s0,s1,4,2] cat(n, a) {dim=3}", "r = T[s0,s1,8] reshape(c)", "y = T[s0,s1,8] sub(x, r)"]

    // -- windows -------------------------------------------------------------------------------------------------------------------
    "upsample_nearest" 1 ["x: T[s0,3,s1,5]", "y = T[s0,3,2*s1,10] upsample_nearest(x) {first_dim=2, scales=[2.0, 2.0], exact=false}"]
    "upsample_nearest to a size" 1 ["x: T[s0,3,s1,5]", "y = T[s0,3,7,3] upsample_nearest(x) {first_dim=2, scales=[0.0, 0.0], exact=false}"]
    "upsample_nearest exact" 1 ["x: T[s0,s1,5,3]", "y = T[s0,7,8,3] upsample_nearest(x) {first_dim=1, scales=[0.0, 0.0], exact=true}"]
    "avg_pool" 9 ["x: T[s0,3,s1,6]", "y = T[s0,3,s1/2,3] avg_pool(x) {first_dim=2, kernel=[2, 2], stride=[2, 2], padding=[0, 0], count_include_pad=true}"]
    "avg_pool without padding counted" 9 ["x: T[s0,3,s1,6]", "y = T[s0,3,s1,6] avg_pool(x) {first_dim=2, kernel=[3, 3], stride=[1, 1], padding=[1, 1], count_include_pad=false}"]
    "max_pool" 1 ["x: T[s0,3,s1,6]", "y = T[s0,3,s1/2,3] max_pool(x) {first_dim=2, kernel=[3, 3], stride=[2, 2], padding=[1, 1], count_include_pad=true}"]

    // -- larger: past the tiles of the kernels, and blocks of models ---------------------------------------------------------------
    "large linear" 320 ["x: T[s0,s1,320]", "w @ T[384,320]", "b @ T[384]", "y = T[s0,s1,384] linear(x, w, b)"]
    "large linear of odd sizes" 203 ["x: T[s0,s1,203]", "w @ T[77,203]", "l = T[s0,s1,77] linear(x, w)", "y = T[s0,s1,77] silu(l)"]
    "large convolution" 288 ["x: T[s0,32,s1,20]", "w @ T[48,32,3,3]", "b @ T[48]", "y = T[s0,48,s1,20] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "large convolution channels last" 576 ["x: T[s0,s1,11,64]", "w @ T[64,64,3,3]", "y = T[s0,s1,11,64] convolution(x, w) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=true}"]
    "large convolution with stride" 288 ["x: T[s0,32,s1,22]", "w @ T[48,32,3,3]", "b @ T[48]", "y = T[s0,48,s1/2,11] convolution(x, w, b) {stride=[2, 2], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "large convolution to few channels" 576 ["x: T[s0,64,s1,12]", "w @ T[4,64,3,3]", "b @ T[4]", "y = T[s0,4,s1,12] convolution(x, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "large upsample then convolution" 288 ["x: T[s0,32,s1,6]", "w @ T[32,32,3,3]", "b @ T[32]", "u = T[s0,32,2*s1,12] upsample_nearest(x) {first_dim=2, scales=[2.0, 2.0], exact=false}", "y = T[s0,32,2*s1,12] convolution(u, w, b) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}"]
    "large attention" 288 ["x: T[s0,2,8*s1,64]", "y = T[s0,2,8*s1,64] scaled_dot_product_attention(x, x, x) {is_causal=false, scale=0.125}"]
    "large causal attention" 288 ["q: T[s0,2,8*s1,32]", "v: T[s0,2,8*s1,32]", "y = T[s0,2,8*s1,32] scaled_dot_product_attention(q, q, v) {is_causal=true, scale=0.18}"]
    "large group_norm" 4096 ["x: T[s0,64,s1,20]", "w @ T[64]", "b @ T[64]", "n = T[s0,64,s1,20] group_norm(x, w, b) {num_groups=32, eps=1e-5, channel_dim=1}", "y = T[s0,64,s1,20] silu(n)"]
    "large softmax" 1152 ["x: T[s0,3,32*s1]", "y = T[s0,3,32*s1] softmax(x) {dim=2}"]
    "transformer block" 1024 [
        "x: T[s0,s1,32]", "c: T[s0,7,24]", "g @ T[32]", "h @ T[32]",
        "wq @ T[32,32]", "wk @ T[32,32]", "wv @ T[32,32]", "wo @ T[32,32]", "bo @ T[32]",
        "ck @ T[32,24]", "cv @ T[32,24]", "w1 @ T[128,32]", "b1 @ T[128]", "w2 @ T[32,64]", "b2 @ T[32]",
        "n1 = T[s0,s1,32] layer_norm(x, g, h) {normalized_ndim=1, eps=1e-5}",
        "q1 = T[s0,s1,32] linear(n1, wq)", "k1 = T[s0,s1,32] linear(n1, wk)", "v1 = T[s0,s1,32] linear(n1, wv)",
        "q2 = T[s0,s1,4,8] reshape(q1)", "k2 = T[s0,s1,4,8] reshape(k1)", "v2 = T[s0,s1,4,8] reshape(v1)",
        "q3 = T[s0,4,s1,8] permute(q2) {dims=[0, 2, 1, 3]}", "k3 = T[s0,4,s1,8] permute(k2) {dims=[0, 2, 1, 3]}",
        "v3 = T[s0,4,s1,8] permute(v2) {dims=[0, 2, 1, 3]}",
        "a1 = T[s0,4,s1,8] scaled_dot_product_attention(q3, k3, v3) {is_causal=false, scale=0.35}",
        "a2 = T[s0,s1,4,8] permute(a1) {dims=[0, 2, 1, 3]}", "a3 = T[s0,s1,32] reshape(a2)",
        "o1 = T[s0,s1,32] linear(a3, wo, bo)", "r1 = T[s0,s1,32] add(o1, x)",
        "n2 = T[s0,s1,32] layer_norm(r1, g, h) {normalized_ndim=1, eps=1e-5}",
        "q4 = T[s0,s1,32] linear(n2, wq)", "k4 = T[s0,7,32] linear(c, ck)", "v4 = T[s0,7,32] linear(c, cv)",
        "q5 = T[s0,s1,4,8] reshape(q4)", "k5 = T[s0,7,4,8] reshape(k4)", "v5 = T[s0,7,4,8] reshape(v4)",
        "q6 = T[s0,4,s1,8] permute(q5) {dims=[0, 2, 1, 3]}", "k6 = T[s0,4,7,8] permute(k5) {dims=[0, 2, 1, 3]}",
        "v6 = T[s0,4,7,8] permute(v5) {dims=[0, 2, 1, 3]}",
        "a4 = T[s0,4,s1,8] scaled_dot_product_attention(q6, k6, v6) {is_causal=false, scale=0.35}",
        "a5 = T[s0,s1,4,8] permute(a4) {dims=[0, 2, 1, 3]}", "a6 = T[s0,s1,32] reshape(a5)",
        "o2 = T[s0,s1,32] linear(a6, wo, bo)", "r2 = T[s0,s1,32] add(o2, r1)",
        "n3 = T[s0,s1,32] layer_norm(r2, g, h) {normalized_ndim=1, eps=1e-5}",
        "f1 = T[s0,s1,128] linear(n3, w1, b1)",
        "f2 = T[s0,s1,64] slice(f1) {dim=2, start=0, step=1}", "f3 = T[s0,s1,64] slice(f1) {dim=2, start=64, step=1}",
        "f4 = T[s0,s1,64] gelu(f3)", "f5 = T[s0,s1,64] mul(f2, f4)", "o3 = T[s0,s1,32] linear(f5, w2, b2)",
        "y = T[s0,s1,32] add(o3, r2)",
    ]
    "up block" 4096 [
        "x: T[s0,16,s1,6]", "skip: T[s0,8,s1,6]", "t: T[s0,32]", "wt @ T[16,32]", "bt @ T[16]",
        "g1 @ T[24]", "h1 @ T[24]", "w1 @ T[16,24,3,3]", "b1 @ T[16]", "g2 @ T[16]", "h2 @ T[16]", "w2 @ T[16,16,3,3]", "b2 @ T[16]",
        "ws @ T[16,24,1,1]", "bs @ T[16]",
        "c = T[s0,24,s1,6] cat(x, skip) {dim=1}",
        "n1 = T[s0,24,s1,6] group_norm(c, g1, h1) {num_groups=4, eps=1e-5, channel_dim=1}", "a1 = T[s0,24,s1,6] silu(n1)",
        "c1 = T[s0,16,s1,6] convolution(a1, w1, b1) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}",
        "ta = T[s0,32] silu(t)", "tl = T[s0,16] linear(ta, wt, bt)", "tr = T[s0,16,1,1] reshape(tl)",
        "c2 = T[s0,16,s1,6] add(c1, tr)",
        "n2 = T[s0,16,s1,6] group_norm(c2, g2, h2) {num_groups=4, eps=1e-5, channel_dim=1}", "a2 = T[s0,16,s1,6] silu(n2)",
        "c3 = T[s0,16,s1,6] convolution(a2, w2, b2) {stride=[1, 1], padding=[1, 1], dilation=[1, 1], groups=1, channels_last=false}",
        "s = T[s0,16,s1,6] convolution(c, ws, bs) {stride=[1, 1], padding=[0, 0], dilation=[1, 1], groups=1, channels_last=false}",
        "y = T[s0,16,s1,6] add(s, c3)",
    ]
};
