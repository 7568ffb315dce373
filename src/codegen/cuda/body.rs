//! The pointwise part of a kernel: a tile program as straight-line code over `V` neighbouring columns.
//!
//! Locals are numbered in order of definition and named after what defines them (`t4_silu`); loads are `a0, a1, ...`,
//! results `y0, y1, ...`.

use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::tile::{Binary, Instr, Source, TileProgram, Unary};

use super::writer::Writer;
use super::{Fused, View, c_type};
use crate::ir::{DType, Dim};

/// The iteration space of a kernel and the strides of its operands over it, neighbouring dimensions joined where every
/// operand allows it.
#[derive(Clone)]
pub(super) struct Space {
    pub sizes: Vec<Dim>,
    /// One list per operand.
    pub strides: Vec<Vec<Dim>>,
}

impl Space {
    /// The space over which `views` are read or written; the last `kept` dimensions stay as they are.
    pub fn new<'v>(sizes: &[Dim], views: impl IntoIterator<Item = &'v View>, kept: usize) -> Self {
        let strides = views.into_iter().map(|v| v.strides_in(sizes)).collect();
        Self::join(Self { sizes: sizes.to_vec(), strides }, kept)
    }

    fn join(self, kept: usize) -> Self {
        let split = self.sizes.len().saturating_sub(kept);
        let count = self.strides.len();
        let mut joined = Self { sizes: Vec::new(), strides: vec![Vec::new(); count] };
        for i in 0..self.sizes.len() {
            let own: Vec<&Dim> = self.strides.iter().map(|s| &s[i]).collect();
            if i < split && self.sizes[i].is(1) {
                continue;
            }
            let follows = |k: usize| joined.strides[k].last().is_some_and(|outer| *outer == &self.sizes[i] * own[k]);
            if i < split && !joined.sizes.is_empty() && (0..count).all(follows) {
                if let Some(size) = joined.sizes.last_mut() {
                    *size = &*size * &self.sizes[i];
                }
                for (to, stride) in joined.strides.iter_mut().zip(own) {
                    if let Some(last) = to.last_mut() {
                        *last = stride.clone();
                    }
                }
                continue;
            }
            joined.sizes.push(self.sizes[i].clone());
            joined.strides.iter_mut().zip(own).for_each(|(to, stride)| to.push(stride.clone()));
        }
        joined
    }

    /// Product of all sizes but the last `kept`.
    pub fn rows(&self, kept: usize) -> Dim {
        Dim::product(&self.sizes[..self.sizes.len().saturating_sub(kept)])
    }

    /// Writes the offset of each operand at row `row` (all dimensions but the last `kept`): `o<k>`.
    pub fn emit_offsets(&self, w: &mut Writer, row: &str, kept: usize, prefix: &str) -> Vec<String> {
        let lead = self.sizes.len().saturating_sub(kept);
        let mut index = vec![row.to_owned(); lead];
        if lead > 1 {
            w.line(format!("u32 {prefix}rest = {row};"));
            for d in (1..lead).rev() {
                let size = w.size(&self.sizes[d]);
                w.line(format!("const u32 {prefix}i{d} = {prefix}rest % (u32){size}; {prefix}rest /= (u32){size};"));
                index[d] = format!("{prefix}i{d}");
            }
            w.line(format!("const u32 {prefix}i0 = {prefix}rest;"));
            index[0] = format!("{prefix}i0");
        }
        let mut names = Vec::new();
        for (k, strides) in self.strides.iter().enumerate() {
            let terms = index.iter().zip(strides).filter(|(_, s)| !s.is(0));
            let terms: Vec<String> = terms.map(|(i, s)| format!("(i64){i} * {}", w.size(s))).collect();
            let sum = if terms.is_empty() { "0".to_owned() } else { terms.join(" + ") };
            w.line(format!("const i64 {prefix}o{k} = {sum};"));
            names.push(format!("{prefix}o{k}"));
        }
        names
    }
}

/// Operands of a body inside a kernel: loads, then stores.
pub(super) struct Operands<'a> {
    pub fused: Fused<'a>,
    /// Index of the first load among the kernel's operands; the others and the stores follow.
    pub first: usize,
    /// Offset of each load and store at the current row.
    pub offsets: Vec<String>,
    /// Column stride of each.
    pub columns: Vec<Dim>,
    /// Loads that are at hand already: index, and an expression of the column `COL + j`.
    pub at_hand: Vec<(usize, String)>,
    /// Expression of the first column.
    pub col: &'a str,
    /// Neighbours: `V` or `1`.
    pub width: &'a str,
    /// The accumulators' expression, with index `j`.
    pub acc: Option<&'a str>,
    /// Values of the row.
    pub row_scalars: [&'a str; 2],
}

/// Loads, arithmetic, stores.
pub(super) fn emit(w: &mut Writer, o: &Operands<'_>) {
    let (program, v, col) = (o.fused.program, o.width, o.col);
    let (load, store) = if rotates(program) { ("load_pairs", "store_pairs") } else { ("load", "store") };
    let loads = o.fused.loads.len();
    for (i, view) in o.fused.loads.iter().enumerate() {
        if o.at_hand.iter().any(|(at, _)| *at == i) {
            continue;
        }
        let p = w.pointer(o.first + i, view.dtype, false);
        let (offset, stride) = (&o.offsets[i], &o.columns[i]);
        let at = format!("{p} + {offset}");
        w.line(format!("float a{i}[{v}];"));
        let line = match stride.as_constant() {
            Some(0) => format!("load_one<{v}>(a{i}, {at});"),
            Some(1) => format!("{load}<{v}>(a{i}, {at} + {col});"),
            _ => {
                let stride = w.size(stride);
                format!("load_strided<{v}>(a{i}, {at} + (i64){col} * {stride}, {stride});")
            }
        };
        w.line(line);
    }
    for i in 0..o.fused.stores.len() {
        w.line(format!("float y{i}[{v}];"));
    }
    emit_arithmetic(w, program, o);
    for (i, view) in o.fused.stores.iter().enumerate() {
        let at = loads + i;
        let p = w.pointer(o.first + at, view.dtype, true);
        let (offset, stride) = (&o.offsets[at], &o.columns[at]);
        let line = match stride.as_constant() {
            Some(1) => format!("{store}<{v}>({p} + {offset} + {col}, y{i});"),
            _ => {
                let stride = w.size(stride);
                format!("store_strided<{v}>({p} + {offset} + (i64){col} * {stride}, {stride}, y{i});")
            }
        };
        w.line(line);
    }
}

/// Whether a program rotates pairs of neighbours: a thread needs both.
pub(super) fn rotates(program: &TileProgram) -> bool {
    program.instrs.iter().any(|instr| matches!(instr, Instr::Unary { op: Unary::RotatePairs, .. }))
}

/// Neighbours that a thread has at least.
pub(super) fn least_width(program: &TileProgram) -> usize {
    if rotates(program) { 2 } else { 1 }
}

/// One loop over a thread's neighbours; where they are rotated, one before and one behind that, and all values are kept.
fn emit_arithmetic(w: &mut Writer, program: &TileProgram, o: &Operands<'_>) {
    let (v, keeps) = (o.width, rotates(program));
    let open = |w: &mut Writer| {
        w.line("#pragma unroll");
        w.line(format!("for (int j = 0; j < {v}; ++j) {{"));
    };
    let is_fast = program.stores.iter().all(|t| matches!(t, KernelType::F16 | KernelType::BF16));
    let mut named: Vec<String> = vec![String::new(); oxidiff_kernels::tile::MAX_REGS];
    if keeps {
        // The numbers of instructions whose values are kept.
        for (at, instr) in program.instrs.iter().enumerate() {
            if !matches!(instr, Instr::Store { .. }) {
                w.line(format!("float t{at}[{v}];"));
            }
        }
    }
    open(w);
    for (at, instr) in program.instrs.iter().enumerate() {
        let r = |reg: u8| named[reg as usize].as_str();
        if let Instr::Unary { dst, op: Unary::RotatePairs, a } = *instr {
            let from = r(a).trim_end_matches("[j]").to_owned();
            w.line("}");
            w.line("#pragma unroll");
            w.line(format!("for (int j = 0; j < {v}; j += 2) {{"));
            w.line(format!("t{at}[j] = -{from}[j + 1]; t{at}[j + 1] = {from}[j];"));
            w.line("}");
            open(w);
            named[dst as usize] = format!("t{at}[j]");
            continue;
        }
        let (dst, word, value) = match *instr {
            Instr::Load { dst, src } => match src {
                Source::Acc => (dst, "acc".to_owned(), o.acc.unwrap_or("0.0f").to_owned()),
                Source::RowScalar(i) => (dst, "row".to_owned(), o.row_scalars[i as usize & 1].to_owned()),
                Source::Const(c) => (dst, "const".to_owned(), literal(f64::from(c))),
                Source::Memory(i) => match o.at_hand.iter().find(|(load, _)| *load == i as usize) {
                    Some((_, value)) => (dst, "x".to_owned(), value.clone()),
                    None => (dst, "load".to_owned(), format!("a{i}[j]")),
                },
            },
            Instr::Unary { dst, op, a } => {
                let (word, value) = unary(op, r(a), is_fast);
                (dst, word.to_owned(), value)
            }
            Instr::Binary { dst, op, a, b } => {
                let (word, value) = binary(op, r(a), r(b));
                (dst, word.to_owned(), value)
            }
            Instr::Fma { dst, a, b, c } => (dst, "fma".to_owned(), format!("fmaf({}, {}, {})", r(a), r(b), r(c))),
            Instr::Select { dst, cond, a, b } => {
                (dst, "where".to_owned(), format!("{} != 0.0f ? {} : {}", r(cond), r(a), r(b)))
            }
            Instr::Round { dst, a, dtype } => {
                let to = if dtype == KernelType::F16 { DType::F16 } else { DType::BF16 };
                (dst, "round".to_owned(), format!("to_float(narrow<{}>({}))", c_type(to), r(a)))
            }
            Instr::Store { src, out } => {
                w.line(format!("y{out}[j] = {};", r(src)));
                continue;
            }
        };
        let name = if keeps { format!("t{at}[j]") } else { format!("t{at}_{word}") };
        let kind = if keeps { "" } else { "const float " };
        w.line(format!("{kind}{name} = {value};"));
        named[dst as usize] = name;
    }
    w.line("}");
}

/// A constant of C.
pub(super) fn literal(value: f64) -> String {
    let value = value as f32;
    match value {
        v if v.is_nan() => "__uint_as_float(0x7fc00000u)".to_owned(),
        v if v.is_infinite() && v > 0.0 => "__uint_as_float(0x7f800000u)".to_owned(),
        v if v.is_infinite() => "__uint_as_float(0xff800000u)".to_owned(),
        v => format!("{v:?}f"),
    }
}

fn unary(op: Unary, a: &str, is_fast: bool) -> (&'static str, String) {
    let call = |word: &'static str, name: &str| (word, format!("{name}({a})"));
    match op {
        Unary::Neg => ("neg", format!("-{a}")),
        // Is no matter of one element.
        Unary::RotatePairs => ("rotate", a.to_owned()),
        Unary::Abs => call("abs", "m_abs"),
        Unary::Exp if is_fast => call("exp", "__expf"),
        Unary::Exp => call("exp", "m_exp"),
        Unary::Log => call("log", "m_log"),
        Unary::Log2 => call("log2", "m_log2"),
        Unary::Log10 => call("log10", "m_log10"),
        Unary::Sin => call("sin", "m_sin"),
        Unary::Cos => call("cos", "m_cos"),
        Unary::Tanh if is_fast => call("tanh", "fast_tanh"),
        Unary::Tanh => call("tanh", "m_tanh"),
        Unary::Sqrt => call("sqrt", "m_sqrt"),
        Unary::Rsqrt => call("rsqrt", "m_rsqrt"),
        Unary::Reciprocal => ("reciprocal", format!("1.0f / {a}")),
        Unary::Sigmoid if is_fast => call("sigmoid", "fast_sigmoid"),
        Unary::Sigmoid => call("sigmoid", "m_sigmoid"),
        Unary::Silu if is_fast => call("silu", "fast_silu"),
        Unary::Silu => call("silu", "m_silu"),
        Unary::Gelu if is_fast => call("gelu", "fast_gelu"),
        Unary::Gelu => call("gelu", "m_gelu"),
        Unary::GeluTanh if is_fast => call("gelu_tanh", "fast_gelu_tanh"),
        Unary::GeluTanh => call("gelu_tanh", "m_gelu_tanh"),
        Unary::Relu => call("relu", "m_relu"),
        Unary::Erf => call("erf", "m_erf"),
        Unary::Floor => call("floor", "m_floor"),
        Unary::Ceil => call("ceil", "m_ceil"),
        Unary::Trunc => call("trunc", "m_trunc"),
        Unary::RoundEven => call("round", "m_round"),
        Unary::Not => ("not", format!("{a} == 0.0f ? 1.0f : 0.0f")),
        Unary::IsNan => ("isnan", format!("{a} != {a} ? 1.0f : 0.0f")),
    }
}

fn binary(op: Binary, a: &str, b: &str) -> (&'static str, String) {
    let infix = |word: &'static str, sign: &str| (word, format!("{a} {sign} {b}"));
    let test = |word: &'static str, sign: &str| (word, format!("{a} {sign} {b} ? 1.0f : 0.0f"));
    match op {
        Binary::Add => infix("add", "+"),
        Binary::Sub => infix("sub", "-"),
        Binary::Mul => infix("mul", "*"),
        Binary::Div => infix("div", "/"),
        Binary::FloorDivide => ("floor_divide", format!("m_floor_divide({a}, {b})")),
        Binary::Remainder => ("remainder", format!("m_remainder({a}, {b})")),
        Binary::Pow => ("pow", format!("m_pow({a}, {b})")),
        Binary::Atan2 => ("atan2", format!("m_atan2({a}, {b})")),
        Binary::Max => ("max", format!("m_max({a}, {b})")),
        Binary::Min => ("min", format!("m_min({a}, {b})")),
        Binary::Eq => test("eq", "=="),
        Binary::Ne => test("ne", "!="),
        Binary::Lt => test("lt", "<"),
        Binary::Le => test("le", "<="),
        Binary::Gt => test("gt", ">"),
        Binary::Ge => test("ge", ">="),
        Binary::And => ("and", format!("{a} != 0.0f && {b} != 0.0f ? 1.0f : 0.0f")),
        Binary::Or => ("or", format!("{a} != 0.0f || {b} != 0.0f ? 1.0f : 0.0f")),
    }
}

/// The vector form over `cols` columns: as many neighbours as 16 bytes of the smallest element hold.
pub(super) fn vector(fused: &Fused<'_>, space: &Space, first: usize, cols: &Dim) -> super::Vector {
    let views: Vec<&View> = fused.loads.iter().chain(fused.stores).collect();
    let unit = |k: usize| space.strides[k].last().is_some_and(|s| s.is(1));
    let smallest = (0..views.len()).filter(|&k| unit(k)).map(|k| views[k].dtype.size_bytes()).min();
    let width = smallest.map_or(1, |bytes| (16 / bytes).min(8));
    let operands = (0..views.len()).filter(|&k| unit(k)).map(|k| {
        let outer = space.strides[k][..space.strides[k].len() - 1].iter().filter(|s| !s.is(0)).cloned().collect();
        (first + k, views[k].dtype.size_bytes(), outer)
    });
    super::Vector { width, cols: cols.clone(), operands: operands.collect() }
}

/// Element type that a kernel is named after: of its first result.
pub(super) fn result_type(fused: &Fused<'_>) -> DType {
    fused.stores.first().map_or(DType::F32, |v| v.dtype)
}
