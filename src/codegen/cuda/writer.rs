//! A kernel's text under construction: parameters on demand, indented lines, and the name that follows from the text.

use super::{Arg, Grid, Kernel, Provenance, Vector, c_type};
use crate::ir::{DType, Dim};

/// Ops that a kernel's name lists.
const NAMED_OPS: usize = 5;

/// Stands for the name, which is made of the text's hash.
const NAME: &str = "@NAME@";

/// Collects parameters and lines.
#[derive(Default)]
pub(super) struct Writer {
    args: Vec<Arg>,
    params: Vec<String>,
    names: Vec<String>,
    sizes: Vec<(Dim, String)>,
    lines: Vec<String>,
    depth: usize,
}

impl Writer {
    pub fn new() -> Self {
        Self { depth: 1, ..Self::default() }
    }

    /// The parameter for operand `index`.
    pub fn pointer(&mut self, index: usize, dtype: DType, is_written: bool) -> String {
        let name = format!("p{index}");
        if !self.names.contains(&name) {
            let constant = if is_written { "" } else { "const " };
            self.params.push(format!("{constant}{}* {name}", c_type(dtype)));
            self.names.push(name.clone());
            self.args.push(Arg::Pointer(index));
        }
        name
    }

    /// A size: the literals 0 and 1, which are structure, else a parameter.
    pub fn size(&mut self, dim: &Dim) -> String {
        if let Some(c @ (0 | 1)) = dim.as_constant() {
            return c.to_string();
        }
        if let Some((_, name)) = self.sizes.iter().find(|(d, _)| d == dim) {
            return name.clone();
        }
        let name = format!("d{}", self.sizes.len());
        self.sizes.push((dim.clone(), name.clone()));
        self.params.push(format!("i64 {name}"));
        self.names.push(name.clone());
        self.args.push(Arg::Size(dim.clone()));
        name
    }

    /// An integer parameter of another kind than a size.
    pub fn integer(&mut self, name: &str, arg: Arg) -> String {
        self.params.push(format!("i64 {name}"));
        self.names.push(name.to_owned());
        self.args.push(arg);
        name.to_owned()
    }

    /// An f32 parameter.
    pub fn float(&mut self, value: f32) -> String {
        let name = format!("f{}", self.args.iter().filter(|a| matches!(a, Arg::Float(_))).count());
        self.params.push(format!("float {name}"));
        self.names.push(name.clone());
        self.args.push(Arg::Float(value.to_bits()));
        name
    }

    /// One line; a `{` at its end indents what follows, a `}` at its start ends that.
    pub fn line(&mut self, text: impl AsRef<str>) {
        let text = text.as_ref();
        if text.starts_with('}') {
            self.depth -= 1;
        }
        let indent = if text.starts_with('#') { String::new() } else { "    ".repeat(self.depth) };
        self.lines.push(format!("{indent}{text}"));
        if text.ends_with('{') {
            self.depth += 1;
        }
    }

    /// Several lines.
    pub fn lines(&mut self, text: &str) {
        text.lines().map(str::trim).filter(|l| !l.is_empty()).for_each(|l| self.line(l));
    }

    /// A kernel without a vector form.
    pub fn finish(self, from: &Provenance, dtype: DType, grid: Grid, threads: u32) -> Kernel {
        let params = self.params.join(", ");
        let body = format!(
            "extern \"C\" __global__ void __launch_bounds__({threads}) {NAME}({params}) {{\n{}\n}}\n",
            self.lines.join("\n")
        );
        named(body, from, dtype, self.args, grid, None)
    }

    /// A kernel whose body is a template over `V`, the number of neighbours a thread handles.
    pub fn finish_vector(self, from: &Provenance, dtype: DType, grid: Grid, threads: u32, vector: Vector) -> Kernel {
        self.finish_pairs(from, dtype, grid, threads, (1, vector))
    }

    /// The same where a thread has at least as many neighbours as are said.
    pub fn finish_pairs(
        self,
        from: &Provenance,
        dtype: DType,
        grid: Grid,
        threads: u32,
        (least, vector): (usize, Vector),
    ) -> Kernel {
        let (params, names) = (self.params.join(", "), self.names.join(", "));
        let mut body = format!("template <int V> OX_FN void {NAME}_body({params}) {{\n{}\n}}\n", self.lines.join("\n"));
        for (suffix, width) in [("", least), ("_v", vector.width)] {
            if width <= least && !suffix.is_empty() {
                continue;
            }
            body += &format!(
                "extern \"C\" __global__ void __launch_bounds__({threads}) {NAME}{suffix}({params}) {{\n    \
                 {NAME}_body<{width}>({names});\n}}\n"
            );
        }
        let vector = Some(vector).filter(|v| v.width > least);
        Kernel { least, ..named(body, from, dtype, self.args, grid, vector) }
    }
}

fn named(body: String, from: &Provenance, dtype: DType, args: Vec<Arg>, grid: Grid, vector: Option<Vector>) -> Kernel {
    let hash = blake3::hash(body.as_bytes()).to_hex();
    let mut ops: Vec<&str> = Vec::new();
    for op in &from.ops {
        if !ops.contains(&op.as_str()) {
            ops.push(op);
        }
    }
    ops.truncate(NAMED_OPS);
    let name = format!("{}_{}_{}", ops.join("_"), dtype.name(), &hash[..8]);
    let header: String = from.lines.iter().map(|line| format!("// {line}\n")).collect();
    Kernel { text: format!("{header}{}", body.replace(NAME, &name)), name, args, grid, least: 1, vector }
}
