//! Reads the text form of `ir/print` back.
//!
//! Every line is checked by itself: numbers of slots and nodes are consecutive, operands and outputs come before their
//! use, attributes are those of the op. What a graph means as a whole is checked by `ir/verify`. Any text gives a graph
//! or an [`Error::Parse`] with its line; memory is bounded by the length of the text.

use std::collections::HashMap;

use super::dim::Dim;
use super::dtype::DType;
use super::graph::{Constant, Graph, Input, Node, Parameter, PathId, Symbol, ValueId};
use super::op::{Attr, Op, ValueType};
use crate::error::{Error, Result};

/// Dimensions a value may have.
const MAX_RANK: usize = 16;
/// Bytes of one size expression: adding up terms takes time quadratic in this.
const MAX_DIM_BYTES: usize = 4096;

/// The graph of that text.
///
/// # Errors
/// [`Error::Parse`] with the first line that is malformed.
pub fn parse_graph(text: &str) -> Result<Graph> {
    let mut parser = Parser { graph: Graph::new(), paths: HashMap::from([(String::new(), PathId(0))]), done: false };
    let mut last = 0;
    for (i, line) in text.lines().enumerate() {
        last = i + 1;
        let line = line.trim();
        if line.is_empty() || line.starts_with("//") {
            continue;
        }
        parser.line(line).map_err(|e| Error::Parse { line: last, what: e.to_string() })?;
    }
    if !parser.done {
        return Err(Error::Parse { line: last, what: "the text ends without `return`".to_owned() });
    }
    Ok(parser.graph)
}

impl std::str::FromStr for Graph {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        parse_graph(text)
    }
}

struct Parser {
    graph: Graph,
    paths: HashMap<String, PathId>,
    done: bool,
}

impl Parser {
    fn line(&mut self, line: &str) -> Result<()> {
        if self.done {
            return Err(Error::invalid("text after `return`"));
        }
        let mut c = Cursor { rest: line };
        if line.starts_with('%') {
            return self.node(&mut c);
        }
        let word = c.word();
        if word != "return" && !self.graph.nodes.is_empty() {
            return Err(Error::invalid(format!("expected a node or `return`, found `{word}`")));
        }
        match word {
            "symbol" => self.symbol(&mut c)?,
            "input" => {
                let (name, ty) = slot(&mut c, self.graph.inputs.len())?;
                self.graph.inputs.push(Input { name, ty });
            }
            "parameter" => {
                let (name, ty) = slot(&mut c, self.graph.parameters.len())?;
                self.graph.parameters.push(Parameter { name, ty });
            }
            "constant" => self.constant(&mut c)?,
            "path" => {
                let path = c.string()?;
                self.path(path);
            }
            "return" => self.outputs(&mut c)?,
            other => return Err(Error::invalid(format!("unknown line `{other}`"))),
        }
        c.end()
    }

    fn symbol(&mut self, c: &mut Cursor) -> Result<()> {
        let index = self.graph.symbols.len();
        c.expect(&format!("s{index}"))?;
        let name = c.string()?;
        c.expect("=")?;
        c.expect("[")?;
        let samples = c.list(']', |item| {
            item.parse().map_err(|_| Error::invalid(format!("expected a sample value, found `{item}`")))
        })?;
        self.graph.symbols.push(Symbol { name, samples });
        Ok(())
    }

    fn constant(&mut self, c: &mut Cursor) -> Result<()> {
        c.index(self.graph.constants.len())?;
        c.expect(":")?;
        let ty = c.value_type()?;
        c.expect("=")?;
        c.expect("0x")?;
        let bytes = unhex(c.word())?;
        let elements: i64 = ty.numel().as_constant().filter(|&n| n >= 0).unwrap_or(-1);
        if usize::try_from(elements).ok().and_then(|n| n.checked_mul(ty.dtype.size_bytes())) != Some(bytes.len()) {
            return Err(Error::invalid(format!("{} bytes of data for a constant of type {ty}", bytes.len())));
        }
        self.graph.constants.push(Constant { ty, bytes });
        Ok(())
    }

    fn path(&mut self, path: String) -> PathId {
        if let Some(&id) = self.paths.get(&path) {
            return id;
        }
        let id = PathId(self.graph.paths.len() as u32);
        self.graph.paths.push(path.clone());
        self.paths.insert(path, id);
        id
    }

    fn node(&mut self, c: &mut Cursor) -> Result<()> {
        c.expect("%")?;
        c.index(self.graph.nodes.len())?;
        c.expect(":")?;
        let ty = c.value_type()?;
        c.expect("=")?;
        let name = c.word();
        c.expect("(")?;
        let inputs = c.list(')', |item| self.value(item))?;
        let attributes = if c.take("{") { c.attributes()? } else { Vec::new() };
        let op = Op::from_parts(name, attributes)?;
        let path = if c.take("//") { self.path(c.path()?) } else { PathId(0) };
        c.end()?;
        self.graph.push(Node { op, inputs, ty, path });
        Ok(())
    }

    fn outputs(&mut self, c: &mut Cursor) -> Result<()> {
        let rest = std::mem::take(&mut c.rest).trim();
        if !rest.is_empty() {
            self.graph.outputs = rest.split(',').map(|item| self.value(item.trim())).collect::<Result<_>>()?;
        }
        self.done = true;
        Ok(())
    }

    fn value(&self, text: &str) -> Result<ValueId> {
        let id = text.strip_prefix('%').and_then(parse_u32);
        let id = id.ok_or_else(|| Error::invalid(format!("expected a value such as `%3`, found `{text}`")))?;
        if id as usize >= self.graph.nodes.len() {
            return Err(Error::invalid(format!("%{id} is used before it is defined")));
        }
        Ok(ValueId(id))
    }
}

/// `0 "name": f32[4]`.
fn slot(c: &mut Cursor, expected: usize) -> Result<(String, ValueType)> {
    c.index(expected)?;
    let name = c.string()?;
    c.expect(":")?;
    Ok((name, c.value_type()?))
}

/// Decimal digits only, as printed.
fn parse_u32(text: &str) -> Option<u32> {
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn unhex(text: &str) -> Result<Vec<u8>> {
    let digit = |b: u8| (b as char).to_digit(16).map(|d| d as u8);
    text.as_bytes()
        .chunks(2)
        .map(|pair| match pair {
            [a, b] => Some(digit(*a)? << 4 | digit(*b)?),
            _ => None,
        })
        .collect::<Option<_>>()
        .ok_or_else(|| Error::invalid("expected an even number of hex digits"))
}

fn parse_dim(text: &str) -> Result<Dim> {
    if text.len() > MAX_DIM_BYTES {
        return Err(Error::invalid("a size expression is too long"));
    }
    text.parse()
}

fn parse_number(text: &str) -> Result<Attr> {
    match text {
        "true" => Ok(Attr::Bool(true)),
        "false" => Ok(Attr::Bool(false)),
        _ => match (parse_dim(text), text.parse::<f64>()) {
            (Ok(dim), _) => Ok(Attr::Dim(dim)),
            (_, Ok(float)) => Ok(Attr::Float(float)),
            (Err(e), _) => Err(e),
        },
    }
}

/// A list is one of sizes if every item is, else one of floats.
fn parse_numbers(items: Vec<Attr>) -> Result<Attr> {
    let dims: Option<Vec<Dim>> =
        items.iter().map(|a| if let Attr::Dim(d) = a { Some(d.clone()) } else { None }).collect();
    if let Some(dims) = dims {
        return Ok(Attr::Dims(dims));
    }
    let float = |a: &Attr| match a {
        Attr::Float(f) => Some(*f),
        Attr::Dim(d) => d.as_constant().map(|c| c as f64),
        Attr::Bool(_) | Attr::Floats(_) | Attr::Dims(_) => None,
    };
    let floats: Option<Vec<f64>> = items.iter().map(float).collect();
    floats.map(Attr::Floats).ok_or_else(|| Error::invalid("a list must hold size expressions or numbers"))
}

/// What is left of a line.
struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, token: &str) -> bool {
        match self.rest.trim_start().strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str) -> Result<()> {
        if self.take(token) { Ok(()) } else { Err(self.unexpected(&format!("`{token}`"))) }
    }

    fn unexpected(&self, want: &str) -> Error {
        let rest: String = self.rest.trim_start().chars().take(24).collect();
        Error::invalid(format!("expected {want}, found `{rest}`"))
    }

    fn end(&self) -> Result<()> {
        let rest = self.rest.trim_start();
        if rest.is_empty() || rest.starts_with("//") { Ok(()) } else { Err(self.unexpected("the end of the line")) }
    }

    /// Letters, digits and underscores; may be empty.
    fn word(&mut self) -> &'a str {
        let rest = self.rest.trim_start();
        let (word, rest) =
            rest.split_at(rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len()));
        self.rest = rest;
        word
    }

    /// The number that a slot or node must have.
    fn index(&mut self, expected: usize) -> Result<()> {
        let word = self.word();
        if parse_u32(word).is_some_and(|i| i as usize == expected) {
            return Ok(());
        }
        Err(Error::invalid(format!("expected number {expected}, found `{word}`")))
    }

    /// What comes before `close`, split at commas outside of parentheses; `close` is consumed.
    fn list<T>(&mut self, close: char, mut item: impl FnMut(&str) -> Result<T>) -> Result<Vec<T>> {
        let (mut items, mut depth, mut start) = (Vec::new(), 0usize, 0);
        for (at, c) in self.rest.char_indices() {
            match c {
                c if c == close && depth == 0 => {
                    let last = self.rest[start..at].trim();
                    if !(last.is_empty() && items.is_empty()) {
                        items.push(item(last)?);
                    }
                    self.rest = &self.rest[at + close.len_utf8()..];
                    return Ok(items);
                }
                '(' => depth += 1,
                ')' => depth = depth.checked_sub(1).ok_or_else(|| self.unexpected(&format!("`{close}`")))?,
                ',' if depth == 0 => {
                    items.push(item(self.rest[start..at].trim())?);
                    start = at + 1;
                }
                _ => {}
            }
        }
        Err(self.unexpected(&format!("a list that ends with `{close}`")))
    }

    fn value_type(&mut self) -> Result<ValueType> {
        let name = self.word();
        let dtype = DType::from_name(name).ok_or_else(|| Error::invalid(format!("unknown element type `{name}`")))?;
        self.expect("[")?;
        let shape = self.list(']', parse_dim)?;
        if shape.len() > MAX_RANK {
            return Err(Error::invalid(format!("{} dimensions, at most {MAX_RANK} are possible", shape.len())));
        }
        Ok(ValueType::new(dtype, shape))
    }

    /// `key=value, ...}`.
    fn attributes(&mut self) -> Result<Vec<(String, Attr)>> {
        let mut out = Vec::new();
        if self.take("}") {
            return Ok(out);
        }
        loop {
            let key = self.word().to_owned();
            self.expect("=")?;
            out.push((key, self.attribute()?));
            if self.take("}") {
                return Ok(out);
            }
            self.expect(",")?;
        }
    }

    fn attribute(&mut self) -> Result<Attr> {
        if self.take("[") {
            let items = self.list(']', parse_number)?;
            return parse_numbers(items);
        }
        let mut depth = 0usize;
        let end = self.rest.find(|c| {
            match c {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            depth == 0 && matches!(c, ',' | '}')
        });
        let (text, rest) = self.rest.split_at(end.ok_or_else(|| self.unexpected("`}`"))?);
        self.rest = rest;
        parse_number(text.trim())
    }

    /// A module path: quoted, or the rest of the line.
    fn path(&mut self) -> Result<String> {
        if self.rest.trim_start().starts_with('"') {
            return self.string();
        }
        Ok(std::mem::take(&mut self.rest).trim().to_owned())
    }

    fn string(&mut self) -> Result<String> {
        self.expect("\"")?;
        let mut out = String::new();
        let mut chars = self.rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Ok(out);
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some(c @ ('"' | '\\')) => out.push(c),
                    Some('u') => out.push(unescape(&mut chars).ok_or_else(|| Error::invalid("malformed escape"))?),
                    _ => return Err(Error::invalid("malformed escape")),
                },
                c => out.push(c),
            }
        }
        Err(Error::invalid("a string does not end"))
    }
}

/// `{hex}` after `\u`.
fn unescape(chars: &mut std::str::CharIndices) -> Option<char> {
    if chars.next()?.1 != '{' {
        return None;
    }
    let mut code = 0u32;
    loop {
        match chars.next()?.1 {
            '}' => return char::from_u32(code),
            c => code = code.checked_mul(16)?.checked_add(c.to_digit(16)?)?,
        }
    }
}
