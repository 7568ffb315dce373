//! The text form, complete enough to be read back: `parse(print(g)) == g`.
//!
//! ```text
//! symbol s0 "batch" = [1, 2, 3]
//! input 0 "sample": f32[s0,4]
//! parameter 0 "proj.weight": f32[8,4]
//! constant 0: f32[2] = 0x0000803f00000040
//! %0: f32[s0,4] = input() {index=0}
//! %1: f32[8,4] = parameter() {index=0}
//! %2: f32[s0,8] = linear(%0, %1)  // proj
//! return %2
//! ```
//!
//! One line per node. What follows `//` on a node's line is its module path; a line that starts with `//` is a comment.
//! The text is for tests and dumps, not a file format.

use std::fmt::{self, Write};

use super::graph::{Graph, ValueId};
use super::op::Attr;

/// The text form of the whole graph.
pub fn print_graph(graph: &Graph) -> String {
    graph.to_string()
}

/// The line of one node, without its end of line.
pub fn print_node(graph: &Graph, value: ValueId) -> String {
    let node = graph.node(value);
    let operands: Vec<String> = node.inputs.iter().map(|i| format!("%{}", i.0)).collect();
    let mut line = format!("%{}: {} = {}({})", value.0, node.ty, node.op.name(), operands.join(", "));
    let attributes: Vec<String> =
        node.op.attributes().iter().map(|(key, attr)| format!("{key}={}", print_attribute(attr))).collect();
    if !attributes.is_empty() {
        line += &format!(" {{{}}}", attributes.join(", "));
    }
    let path = graph.path(value);
    if !path.is_empty() {
        line += "  // ";
        line += &if is_plain(path) { path.to_owned() } else { quote(path) };
    }
    line
}

fn print_attribute(attr: &Attr) -> String {
    match attr {
        Attr::Bool(v) => v.to_string(),
        Attr::Float(v) => print_float(*v),
        Attr::Floats(v) => print_list(v, |f| print_float(*f)),
        Attr::Dim(d) => d.to_string(),
        Attr::Dims(v) => print_list(v, ToString::to_string),
    }
}

fn print_list<T>(items: &[T], print: impl Fn(&T) -> String) -> String {
    format!("[{}]", items.iter().map(print).collect::<Vec<_>>().join(", "))
}

/// The shortest text that reads back as the same number; never that of an integer (`1.0`, not `1`).
fn print_float(value: f64) -> String {
    if value.is_nan() { "nan".to_owned() } else { format!("{value:?}") }
}

/// May stand after `//` as it is.
fn is_plain(path: &str) -> bool {
    path.trim() == path && !path.starts_with('"') && !path.chars().any(char::is_control)
}

/// Double quotes, with `\"`, `\\` and `\u{hex}` for control characters.
fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out += &format!("\\u{{{:x}}}", u32::from(c)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

fn hex(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(2 + 2 * bytes.len());
    out += "0x";
    for b in bytes {
        // Writing to a `String` cannot fail.
        let _ = write!(out, "{b:02x}");
    }
    out
}

/// Whether the nodes' paths, in order of first use, rebuild the table of paths.
fn has_implied_paths(graph: &Graph) -> bool {
    let mut seen = 1;
    for node in &graph.nodes {
        match (node.path.0 as usize).cmp(&seen) {
            std::cmp::Ordering::Less => {}
            std::cmp::Ordering::Equal => seen += 1,
            std::cmp::Ordering::Greater => return false,
        }
    }
    seen == graph.paths.len()
}

impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, s) in self.symbols.iter().enumerate() {
            writeln!(f, "symbol s{i} {} = {}", quote(&s.name), print_list(&s.samples, ToString::to_string))?;
        }
        for (i, input) in self.inputs.iter().enumerate() {
            writeln!(f, "input {i} {}: {}", quote(&input.name), input.ty)?;
        }
        for (i, parameter) in self.parameters.iter().enumerate() {
            writeln!(f, "parameter {i} {}: {}", quote(&parameter.name), parameter.ty)?;
        }
        for (i, constant) in self.constants.iter().enumerate() {
            writeln!(f, "constant {i}: {} = {}", constant.ty, hex(&constant.bytes))?;
        }
        if !has_implied_paths(self) {
            for path in self.paths.iter().skip(1) {
                writeln!(f, "path {}", quote(path))?;
            }
        }
        for v in self.values() {
            writeln!(f, "{}", print_node(self, v))?;
        }
        let outputs: Vec<String> = self.outputs.iter().map(|o| format!("%{}", o.0)).collect();
        writeln!(f, "{}", format!("return {}", outputs.join(", ")).trim_end())
    }
}
