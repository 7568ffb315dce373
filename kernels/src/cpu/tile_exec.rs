//! Runs tile programs.
//!
//! Three stages, each done as rarely as it can be:
//!
//! 1. [`Prepared::new`], once per program: checks it, turns registers into single-assignment values, drops dead code,
//!    recognises constant powers.
//! 2. [`BoundProgram::new`], once per set of addresses and strides: merges dimensions, decides per value whether it is
//!    *uniform*, *per row* or *full*, where it lives, and which function computes it.
//! 3. Per block: for each tile of at most [`TILE`] elements, pointers are set and the functions called in order.
//!
//! What makes it fast: an f32 operand that is contiguous along the columns is never loaded, its value *is* the memory; a
//! value whose f32 destination is contiguous is computed straight into it; broadcast operands stay scalars, and values
//! of scalars are computed once per row or once per block. A tile takes several rows where rows are short.
//!
//! Measured, one Zen 5 core, AVX-512, f32: the fixed cost of a block is about 70 ns, a tile's about 10 ns a step; adding a
//! bias takes 0.07 ns an element, bias and SiLU 0.2, in L2. From memory, add, mul, copy and SiLU run at the speed of the
//! stream (PyTorch's own loops, 1.0 +- 0.06). Where a loop moves more than the last-level cache holds, the results of light
//! operations are written past the caches (one Zen 4 core, three tensors of 40 MiB: 0.6 of the time); in smaller loops the
//! next step finds them in a cache.
//!
//! What norms apply (`x * scale + shift` with one of each per column, `(x - mean) * rstd * weight + bias`) needs no tiles,
//! see `tile_affine`.
//!
//! Invariant on aliasing: a store may overlap a load only if both name the same address for the same element; then every
//! instruction sees the operand as it was before the store, provided its `Load` stands before the `Store`. Stores never
//! overlap each other.

use super::tile_affine::{Affine, Column, Columns, Rows, by_columns, by_rows};
use super::tile_exec_ops::{
    Args, Move, MoveFn, Op1, Op3, OpFn, binary_fn, fence, load_fn, store_fn, ternary_fn, unary_fn,
};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::{Isa, features};
use crate::pool::Pool;
use crate::tile::{
    Binary, Bound, Instr, MAX_DIMS, MAX_INSTRS, MAX_OPERANDS, MAX_REGS, Reg, Source, Space, TILE, TileError,
    TileProgram, Unary,
};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

/// Fewest rows, and fewest columns of a row, that columns are made for ahead.
const WORTH_COLUMNS: usize = 8;

/// Bytes of a cache line.
const LINE: usize = 64;

fn begins_line(ptr: *mut u8) -> bool {
    ptr.addr().is_multiple_of(LINE)
}

/// Whether rows this many bytes apart all begin at lines if one does.
fn keeps_line(stride: isize) -> bool {
    stride.unsigned_abs().is_multiple_of(LINE)
}

/// Most row scalars of a program.
pub const MAX_ROW_SCALARS: usize = 8;

/// A value of a prepared program: index into its nodes.
pub(super) type Value = u16;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Node {
    Const(f32),
    Acc,
    Memory(u8),
    RowScalar(u8),
    Unary(Op1, Value),
    Binary(Binary, Value, Value),
    Ternary(Op3, Value, Value, Value),
    Store { src: Value, out: u8 },
}

impl Node {
    fn operands(self) -> impl Iterator<Item = Value> {
        let (list, n) = match self {
            Node::Const(_) | Node::Acc | Node::Memory(_) | Node::RowScalar(_) => ([0, 0, 0], 0),
            Node::Unary(_, a) | Node::Store { src: a, .. } => ([a, 0, 0], 1),
            Node::Binary(_, a, b) => ([a, b, 0], 2),
            Node::Ternary(_, a, b, c) => ([a, b, c], 3),
        };
        list.into_iter().take(n)
    }

    fn is_computed(self) -> bool {
        matches!(self, Node::Unary(..) | Node::Binary(..) | Node::Ternary(..))
    }
}

/// A checked program in single-assignment form, ready to be bound to operands.
#[derive(Clone, Debug)]
pub struct Prepared {
    isa: Isa,
    nodes: Vec<Node>,
    loads: Vec<DType>,
    stores: Vec<DType>,
    row_scalars: usize,
    /// What the program is, where it needs no tiles.
    affine: Option<Affine>,
}

impl Prepared {
    /// Checks and prepares a program for a level of instructions (lowered to what the processor has).
    ///
    /// # Errors
    /// [`TileError`] if the program is malformed.
    pub fn new(program: &TileProgram, isa: Isa) -> Result<Prepared, TileError> {
        if program.instrs.len() > MAX_INSTRS {
            return Err(TileError::TooLong { instrs: program.instrs.len() });
        }
        if program.loads.len() + program.stores.len() > MAX_OPERANDS {
            return Err(TileError::TooManyOperands { operands: program.loads.len() + program.stores.len() });
        }
        let nodes = remove_dead(&single_assignment(program)?);
        let row_scalars = nodes.iter().fold(0, |n, node| match node {
            Node::RowScalar(i) => n.max(*i as usize + 1),
            _ => n,
        });
        Ok(Prepared {
            isa: isa.clamp(),
            affine: Affine::of(&nodes),
            nodes,
            loads: program.loads.clone(),
            stores: program.stores.clone(),
            row_scalars,
        })
    }

    /// Element types of the memory operands read.
    pub fn load_types(&self) -> &[DType] {
        &self.loads
    }

    /// Element types of the memory operands written.
    pub fn store_types(&self) -> &[DType] {
        &self.stores
    }

    /// The level of instructions it was prepared for.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

fn single_assignment(program: &TileProgram) -> Result<Vec<Node>, TileError> {
    let mut nodes: Vec<Node> = Vec::with_capacity(program.instrs.len());
    let mut current: [Option<Value>; MAX_REGS] = [None; MAX_REGS];
    for (at, instr) in program.instrs.iter().enumerate() {
        let read = |reg: Reg| match current.get(reg as usize) {
            None => Err(TileError::OutOfRange { at }),
            Some(None) => Err(TileError::UnwrittenRegister { at, reg }),
            Some(Some(value)) => Ok(*value),
        };
        let within =
            |index: u8, len: usize| if (index as usize) < len { Ok(()) } else { Err(TileError::OutOfRange { at }) };
        let (dst, node) = match *instr {
            Instr::Load { dst, src } => {
                match src {
                    Source::Memory(i) => within(i, program.loads.len())?,
                    Source::RowScalar(i) => within(i, MAX_ROW_SCALARS)?,
                    Source::Acc | Source::Const(_) => {}
                }
                let node = match src {
                    Source::Acc => Node::Acc,
                    Source::Memory(i) => Node::Memory(i),
                    Source::RowScalar(i) => Node::RowScalar(i),
                    Source::Const(x) => Node::Const(x),
                };
                (Some(dst), node)
            }
            Instr::Unary { op: Unary::RotatePairs, .. } => return Err(TileError::OutOfRange { at }),
            Instr::Unary { dst, op, a } => (Some(dst), Node::Unary(Op1::Plain(op), read(a)?)),
            Instr::Binary { dst, op, a, b } => {
                let (a, b) = (read(a)?, read(b)?);
                (Some(dst), simplify_binary(&nodes, op, a, b))
            }
            Instr::Fma { dst, a, b, c } => (Some(dst), Node::Ternary(Op3::Fma, read(a)?, read(b)?, read(c)?)),
            Instr::Select { dst, cond, a, b } => {
                (Some(dst), Node::Ternary(Op3::Select, read(cond)?, read(a)?, read(b)?))
            }
            Instr::Round { dst, a, dtype } => {
                let op = match dtype {
                    DType::F16 => Op1::RoundF16,
                    DType::BF16 => Op1::RoundBf16,
                    _ => return Err(TileError::OutOfRange { at }),
                };
                (Some(dst), Node::Unary(op, read(a)?))
            }
            Instr::Store { src, out } => {
                within(out, program.stores.len())?;
                (None, Node::Store { src: read(src)?, out })
            }
        };
        // Repeated constants, accumulators and row scalars are one value; repeated loads may differ by a store between.
        let is_fixed = matches!(node, Node::Const(_) | Node::Acc | Node::RowScalar(_));
        let is_same = |n: &Node| match (n, &node) {
            // 0.0 equals -0.0.
            (Node::Const(a), Node::Const(b)) => a.to_bits() == b.to_bits(),
            (a, b) => a == b,
        };
        let value = match nodes.iter().position(is_same) {
            Some(i) if is_fixed => i as Value,
            _ => {
                nodes.push(node);
                (nodes.len() - 1) as Value
            }
        };
        if let Some(dst) = dst {
            *current.get_mut(dst as usize).ok_or(TileError::OutOfRange { at })? = Some(value);
        }
    }
    Ok(nodes)
}

/// Powers with the exponents PyTorch computes without `pow`.
fn simplify_binary(nodes: &[Node], op: Binary, a: Value, b: Value) -> Node {
    let (Binary::Pow, Node::Const(e)) = (op, nodes[b as usize]) else {
        return Node::Binary(op, a, b);
    };
    let unary = match e {
        0.5 => Op1::Plain(Unary::Sqrt),
        -0.5 => Op1::Plain(Unary::Rsqrt),
        -1.0 => Op1::Plain(Unary::Reciprocal),
        2.0 => Op1::Square,
        3.0 => Op1::Cube,
        -2.0 => Op1::InverseSquare,
        _ => return Node::Binary(op, a, b),
    };
    Node::Unary(unary, a)
}

fn remove_dead(nodes: &[Node]) -> Vec<Node> {
    let mut live = vec![false; nodes.len()];
    for (i, node) in nodes.iter().enumerate().rev() {
        if matches!(node, Node::Store { .. }) || live[i] {
            live[i] = true;
            node.operands().for_each(|v| live[v as usize] = true);
        }
    }
    let mut renamed = vec![0 as Value; nodes.len()];
    let mut kept = Vec::with_capacity(nodes.len());
    for (i, node) in nodes.iter().enumerate() {
        if live[i] {
            renamed[i] = kept.len() as Value;
            let at = |v: Value| renamed[v as usize];
            kept.push(match *node {
                Node::Unary(op, a) => Node::Unary(op, at(a)),
                Node::Binary(op, a, b) => Node::Binary(op, at(a), at(b)),
                Node::Ternary(op, a, b, c) => Node::Ternary(op, at(a), at(b), at(c)),
                Node::Store { src, out } => Node::Store { src: at(src), out },
                leaf => leaf,
            });
        }
    }
    kept
}

/// How a value varies over a run of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// One value.
    Uniform,
    /// One value per row, dense.
    PerRow,
    /// One value per element.
    Full,
}

/// Where a value lies while a tile is worked on.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    Const(f32),
    Acc,
    RowScalar(u8),
    /// In memory operand (loads first, then stores).
    Memory(u8),
    /// In scratch register.
    Slot(u8),
    /// Stores have none.
    None,
}

#[derive(Clone, Copy)]
enum Step {
    Unary { f: OpFn, dst: Value, a: Value },
    Binary { f: OpFn, dst: Value, a: Value, b: Value },
    Ternary { f: OpFn, dst: Value, a: Value, b: Value, c: Value },
    Load { f: MoveFn, dst: Value, operand: u8 },
    Store { f: MoveFn, src: Value, operand: u8 },
}

/// A memory operand over the merged dimensions, strides in bytes.
#[derive(Clone, Copy)]
pub(super) struct Operand {
    pub(super) ptr: *mut u8,
    pub(super) rows: [isize; MAX_DIMS],
    pub(super) col: isize,
}

/// Pointer and row stride (in elements) of a value in the current tile.
#[derive(Clone, Copy)]
struct Spot {
    ptr: *mut f32,
    ld: isize,
}

/// A program bound to operands over a space.
pub struct BoundProgram<'a> {
    program: &'a Prepared,
    /// Row dimensions after merging, outermost first; at least one.
    dims: [usize; MAX_DIMS],
    rank: usize,
    cols: usize,
    operands: Vec<Operand>,
    kinds: Vec<Kind>,
    places: Vec<Place>,
    steps: Vec<Step>,
    slots: usize,
    /// Most elements of a tile.
    tile: usize,
    /// Results go past the caches where a function can do that.
    past_caches: bool,
    /// The innermost rows are a short dimension of one place in memory, which tiles hold together.
    interleaved: bool,
    /// The columns of a program that needs no tiles, where the operands lie as it asks for.
    columns: Option<Columns>,
}

// SAFETY: the raw pointers are only followed by `run_block`, whose caller vouches for the memory and for blocks being
// disjoint; nothing in the value itself is mutated.
unsafe impl Sync for BoundProgram<'_> {}
// SAFETY: as above.
unsafe impl Send for BoundProgram<'_> {}

/// One block of the matrix of rows and columns, and the values that come with it.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    /// The f32 results the program works on: `Source::Acc`. Null if the program has none.
    pub acc: *mut f32,
    /// Elements between rows of `acc`.
    pub acc_ld: usize,
    /// For each `Source::RowScalar` a pointer to one value per row of the block.
    pub row_scalars: &'a [*const f32],
    /// First row.
    pub row0: usize,
    /// First column.
    pub col0: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl Default for Block<'_> {
    fn default() -> Self {
        Block { acc: null_mut(), acc_ld: 0, row_scalars: &[], row0: 0, col0: 0, rows: 0, cols: 0 }
    }
}

impl<'a> BoundProgram<'a> {
    /// Binds operands over a space whose last dimension are the columns, in the order given.
    ///
    /// # Panics
    /// If there are fewer operands than the program has.
    pub fn new(program: &'a Prepared, space: &Space, loads: &[Bound], stores: &[Bound]) -> BoundProgram<'a> {
        Self::bind(program, space, loads, stores, None)
    }

    /// As [`BoundProgram::new`], for a program that is run over the whole space: where it moves more bytes than `cache` holds,
    /// nobody finds its results there, and those that can go past it.
    pub fn over_all(
        program: &'a Prepared,
        space: &Space,
        loads: &[Bound],
        stores: &[Bound],
        cache: usize,
    ) -> BoundProgram<'a> {
        let mut bound = Self::bind(program, space, loads, stores, None);
        bound.past_caches = bound.columns.is_some() && bound.bytes() > cache;
        bound
    }

    /// As [`BoundProgram::new`]. Programs that are run over the whole space only (`loop_beyond`) may have their dimensions
    /// reordered, and columns merged with rows; where they move more bytes than it says, nobody finds their results in a
    /// cache, and those that can go past it.
    ///
    /// # Panics
    /// As [`BoundProgram::new`].
    pub fn bind(
        p: &'a Prepared,
        space: &Space,
        loads: &[Bound],
        stores: &[Bound],
        loop_beyond: Option<usize>,
    ) -> BoundProgram<'a> {
        assert!(loads.len() >= p.loads.len() && stores.len() >= p.stores.len(), "too few operands");
        let bounds: Vec<(Bound, DType)> = loads
            .iter()
            .copied()
            .zip(p.loads.iter().copied())
            .chain(stores.iter().copied().zip(p.stores.iter().copied()))
            .collect();
        let layout = Layout::new(space, &bounds, p.loads.len(), loop_beyond.is_some());
        let mut bound = BoundProgram {
            program: p,
            dims: layout.dims,
            rank: layout.rank,
            cols: layout.cols,
            operands: layout.operands,
            kinds: Vec::with_capacity(p.nodes.len()),
            places: vec![Place::None; p.nodes.len()],
            steps: Vec::with_capacity(p.nodes.len()),
            slots: 0,
            tile: TILE,
            past_caches: false,
            interleaved: layout.interleaved,
            columns: None,
        };
        bound.past_caches = loop_beyond.is_some_and(|cache| bound.bytes() > cache);
        bound.infer_kinds();
        bound.place_values();
        assert!(bound.slots <= MAX_SLOTS, "a program has at most MAX_REGS live values");
        bound.choose_steps();
        if bound.slots == 0 && bound.steps.len() == 1 {
            // Nothing is kept between steps: a tile may be any size.
            bound.tile = 1 << 20;
        }
        bound.columns = p.affine.as_ref().and_then(|affine| bound.columns_of(affine));
        bound
    }

    /// The columns of the program for each run of rows, if it can do without tiles: rows of one floating type, in runs that
    /// share their columns and are worth making these for.
    fn columns_of(&self, affine: &Affine) -> Option<Columns> {
        let (last, out) = (self.rank - 1, self.program.loads.len() + affine.out as usize);
        let is_vector = |operand: usize| self.operands[operand].col == self.dtype(operand).size_bytes() as isize;
        let is_float = |operand: usize| matches!(self.dtype(operand), DType::F32 | DType::F16 | DType::BF16);
        let x = affine.x as usize;
        let rows = is_float(x) && self.dtype(x) == self.dtype(out) && is_vector(x) && is_vector(out);
        let is_column = |column: &Option<Column>| {
            column.is_none_or(|c| {
                let operand = c.operand as usize;
                is_float(operand) && is_vector(operand) && self.operands[operand].rows[last] == 0
            })
        };
        let worth = self.dims[last].min(self.cols) >= WORTH_COLUMNS;
        if !rows || !worth || ![&affine.weight, &affine.bias].into_iter().all(is_column) {
            return None;
        }
        let runs = self.rows() / self.dims[last];
        let mut columns = Columns::new(runs, self.cols)?;
        for run in 0..runs {
            let origin = self.operands_at(run * self.dims[last]);
            let (weight, bias) = columns.of_mut(run);
            for (column, values) in [(affine.weight, weight), (affine.bias, bias)] {
                let Some(Column { operand, plus }) = column else { continue };
                let dtype = self.dtype(operand as usize);
                let size = dtype.size_bytes() as isize;
                let reg = values.as_mut_ptr();
                let mem = origin[operand as usize];
                let one = Move { reg, ld: 0, mem, row_stride: 0, col_stride: size, rows: 1, cols: self.cols };
                // SAFETY: an operand of the caller's, a value for each column; as many values.
                unsafe { load_fn(self.program.isa, dtype)(&one) };
                if let Some(plus) = plus {
                    values.iter_mut().for_each(|v| *v += plus);
                }
            }
        }
        Some(columns)
    }

    /// Whether it needs no tiles: columns are made for it ahead.
    pub fn is_affine(&self) -> bool {
        self.columns.is_some()
    }

    /// The same, run tile by tile even if it needs no tiles.
    pub fn by_steps(self) -> BoundProgram<'a> {
        BoundProgram { columns: None, ..self }
    }

    /// Whether results go past the caches where a function can do that.
    pub fn passes_caches(&self) -> bool {
        self.past_caches
    }

    /// How many values are computed past the caches, tile by tile.
    pub fn values_past_caches(&self) -> usize {
        (0..self.program.nodes.len()).filter(|&at| self.may_pass_caches(at)).count()
    }

    /// Bytes of all operands over the space; those broadcast along the columns count nothing.
    fn bytes(&self) -> usize {
        let operands = self.operands.iter().enumerate().filter(|(_, o)| o.col != 0);
        self.rows() * self.cols * operands.map(|(i, _)| self.dtype(i).size_bytes()).sum::<usize>()
    }

    /// Rows of the space after merging.
    pub fn rows(&self) -> usize {
        self.dims[..self.rank].iter().product()
    }

    fn memory_kind(&self, operand: usize) -> Kind {
        let o = &self.operands[operand];
        match (o.col, o.rows[self.rank - 1]) {
            (0, 0) => Kind::Uniform,
            (0, _) => Kind::PerRow,
            _ => Kind::Full,
        }
    }

    fn infer_kinds(&mut self) {
        for node in &self.program.nodes {
            let kind = match *node {
                Node::Const(_) => Kind::Uniform,
                Node::Acc => Kind::Full,
                Node::Memory(i) => self.memory_kind(i as usize),
                Node::RowScalar(_) => Kind::PerRow,
                _ => node.operands().map(|v| self.kinds[v as usize]).max().unwrap_or(Kind::Uniform),
            };
            self.kinds.push(kind);
        }
    }

    fn dtype(&self, operand: usize) -> DType {
        let loads = self.program.loads.len();
        if operand < loads { self.program.loads[operand] } else { self.program.stores[operand - loads] }
    }

    /// Whether a value of this kind can be the operand's memory itself.
    fn is_direct(&self, operand: usize, kind: Kind) -> bool {
        let o = &self.operands[operand];
        let aligned = (o.ptr as usize).is_multiple_of(4) && o.rows.iter().all(|s| s % 4 == 0);
        self.dtype(operand) == DType::F32
            && aligned
            && match kind {
                Kind::Uniform => true,
                Kind::PerRow => o.rows[self.rank - 1] == 4,
                Kind::Full => o.col == 4,
            }
    }

    /// Addresses an operand spans, as a half-open range.
    fn extent(&self, operand: usize) -> (isize, isize) {
        let o = &self.operands[operand];
        let (mut low, mut high) = (o.ptr as isize, o.ptr as isize + self.dtype(operand).size_bytes() as isize);
        let dims = self.dims[..self.rank].iter().zip(&o.rows).map(|(&n, &s)| (n, s)).chain([(self.cols, o.col)]);
        for (n, stride) in dims {
            let reach = stride * (n as isize - 1).max(0);
            if reach < 0 { low += reach } else { high += reach }
        }
        (low, high)
    }

    fn overlap(&self, a: usize, b: usize) -> bool {
        let ((a0, a1), (b0, b1)) = (self.extent(a), self.extent(b));
        a0 < b1 && b0 < a1
    }

    /// Decides where every value lives.
    fn place_values(&mut self) {
        let nodes = &self.program.nodes;
        let loads = self.program.loads.len();
        let mut last_use = vec![0usize; nodes.len()];
        for (at, node) in nodes.iter().enumerate() {
            node.operands().for_each(|v| last_use[v as usize] = at);
        }
        let store_at = |out: u8| nodes.iter().position(|n| matches!(n, Node::Store { out: o, .. } if *o == out));
        // Loads that stay in memory, unless an overlapping store would change them before their last use.
        for (at, node) in nodes.iter().enumerate() {
            self.places[at] = match *node {
                Node::Const(x) => Place::Const(x),
                Node::Acc => Place::Acc,
                Node::RowScalar(i) => Place::RowScalar(i),
                Node::Memory(i) if self.is_direct(i as usize, self.kinds[at]) => {
                    let spoiled = (0..self.program.stores.len()).any(|out| {
                        store_at(out as u8).is_some_and(|s| s < last_use[at]) && self.overlap(i as usize, loads + out)
                    });
                    if spoiled { Place::None } else { Place::Memory(i) }
                }
                _ => Place::None,
            };
        }
        // Values computed straight into the memory they are stored to.
        for node in nodes {
            let Node::Store { src, out } = *node else { continue };
            let (v, operand) = (src as usize, loads + out as usize);
            let writable = self.places[v] == Place::None
                && (nodes[v].is_computed() || matches!(nodes[v], Node::Memory(_)))
                && self.kinds[v] == Kind::Full
                && self.is_direct(operand, Kind::Full);
            // Reads after `v` of memory that overlaps the destination.
            let spoils = nodes.iter().enumerate().any(|(at, n)| {
                let Node::Memory(i) = *n else { return false };
                let read_last = if matches!(self.places[at], Place::Memory(_)) { last_use[at] } else { at };
                read_last > v && self.overlap(i as usize, operand)
            });
            if writable && !spoils {
                self.places[v] = Place::Memory(operand as u8);
            }
        }
        // The rest gets scratch registers, reused once their value is dead.
        let mut free: Vec<u8> = Vec::new();
        for (at, node) in nodes.iter().enumerate() {
            // An operand that dies here may give its register to the result: every function reads an element before it
            // writes it. A scalar operand is read for the whole row, so it may not.
            let level = self.kinds[at];
            let mut released: Vec<u8> = Vec::new();
            for v in node.operands() {
                let Place::Slot(slot) = self.places[v as usize] else { continue };
                if last_use[v as usize] == at && !released.contains(&slot) {
                    released.push(slot);
                    if self.kinds[v as usize] == level {
                        free.push(slot);
                    }
                }
            }
            if self.places[at] == Place::None && !matches!(node, Node::Store { .. }) {
                let slot = free.pop().unwrap_or_else(|| {
                    self.slots += 1;
                    (self.slots - 1) as u8
                });
                self.places[at] = Place::Slot(slot);
                released.retain(|&s| s != slot);
            }
            for slot in released {
                if !free.contains(&slot) {
                    free.push(slot);
                }
            }
        }
    }

    /// Whether a value is computed straight into a result that nothing reads here, whose rows begin at cache lines.
    fn may_pass_caches(&self, at: usize) -> bool {
        let Place::Memory(i) = self.places[at] else { return false };
        if !self.past_caches || (i as usize) < self.program.loads.len() {
            return false;
        }
        let o = &self.operands[i as usize];
        let readers = self.program.nodes.iter().filter(|n| n.operands().any(|v| v as usize == at)).count();
        readers == 1 && begins_line(o.ptr) && o.rows[..self.rank].iter().all(|&stride| keeps_line(stride))
    }

    fn choose_steps(&mut self) {
        let (isa, loads) = (self.program.isa, self.program.loads.len());
        for (at, node) in self.program.nodes.iter().enumerate() {
            let (dst, level) = (at as Value, self.kinds[at]);
            let past = self.may_pass_caches(at);
            // At the level of rows, values per row are the full operands of a single row.
            let scalar = |v: Value| self.kinds[v as usize] < level;
            let step = match *node {
                Node::Unary(op, a) => Step::Unary { f: unary_fn(isa, op, past), dst, a },
                Node::Binary(op, a, b) => Step::Binary { f: binary_fn(isa, op, scalar(a), scalar(b), past), dst, a, b },
                Node::Ternary(op, a, b, c) => {
                    Step::Ternary { f: ternary_fn(isa, op, [scalar(a), scalar(b), scalar(c)], past), dst, a, b, c }
                }
                Node::Memory(i) if self.places[at] != Place::Memory(i) => {
                    Step::Load { f: load_fn(isa, self.program.loads[i as usize]), dst, operand: i }
                }
                Node::Store { src, out } => {
                    let operand = (loads + out as usize) as u8;
                    if self.places[src as usize] == Place::Memory(operand) {
                        continue;
                    }
                    let scalar = self.kinds[src as usize] != Kind::Full;
                    Step::Store { f: store_fn(isa, self.program.stores[out as usize], scalar), src, operand }
                }
                _ => continue,
            };
            self.steps.push(step);
        }
    }

    /// Runs the program over a block.
    ///
    /// # Safety
    /// The operands must be valid for the rows and columns named, `block.acc` for reads and writes if the program loads
    /// `Source::Acc`, and `block.row_scalars` must hold `block.rows` values for every row scalar the program loads. No
    /// other thread may work on the same elements.
    pub unsafe fn run_block(&self, block: &Block<'_>) {
        // SAFETY: forwarded.
        unsafe { self.run_unfinished(block) };
        self.finish();
    }

    /// As [`run_block`](Self::run_block), of several blocks with one [`finish`](Self::finish) behind them.
    ///
    /// # Safety
    /// As for [`run_block`](Self::run_block); no other thread may read the results before `finish`.
    pub(super) unsafe fn run_unfinished(&self, block: &Block<'_>) {
        debug_assert!(block.row_scalars.len() >= self.program.row_scalars);
        // Few registers, little stack: touching its pages is most of the cost of a small block.
        // SAFETY: the caller's promise; the number of slots is at most that of the registers.
        unsafe {
            match self.slots {
                0..=2 => self.run_block_with::<2>(block),
                3..=4 => self.run_block_with::<4>(block),
                5..=8 => self.run_block_with::<8>(block),
                _ => self.run_block_with::<MAX_SLOTS>(block),
            }
        }
    }

    /// Makes what blocks wrote past the caches visible in order with what this thread writes next.
    pub(super) fn finish(&self) {
        if self.past_caches {
            fence(self.program.isa);
        }
    }

    unsafe fn run_block_with<const SLOTS: usize>(&self, block: &Block<'_>) {
        let mut scratch: MaybeUninit<Registers<SLOTS>> = MaybeUninit::uninit();
        let registers = scratch.as_mut_ptr().cast::<f32>();
        let mut spots: [MaybeUninit<Spot>; MAX_INSTRS] = [MaybeUninit::uninit(); MAX_INSTRS];
        let spots = &mut spots[..self.places.len()];
        for (spot, place) in spots.iter_mut().zip(&self.places) {
            let ptr = match place {
                Place::Const(x) => (&raw const *x).cast_mut(),
                Place::Slot(slot) => registers.wrapping_add(*slot as usize * TILE),
                _ => null_mut(),
            };
            spot.write(Spot { ptr, ld: 0 });
        }
        // SAFETY: every element was written just now.
        let spots = unsafe { &mut *(&raw mut *spots as *mut [Spot]) };
        let inner = self.dims[self.rank - 1];
        let mut done = 0;
        while done < block.rows {
            let row = block.row0 + done;
            let run = if self.rank == 1 { block.rows } else { (inner - row % inner).min(block.rows - done) };
            // SAFETY: a sub-block of the block.
            unsafe { self.run_rows_of_run(block, done, run, spots) };
            done += run;
        }
    }

    /// Works on `run` rows of the block from its row `done` on; they lie in one run of the innermost row dimension.
    unsafe fn run_rows_of_run(&self, block: &Block<'_>, done: usize, run: usize, spots: &mut [Spot]) {
        let (tile_rows, tile_cols) = tile_shape(run, block.cols, self.tile, self.interleaved);
        let mut origin = self.operands_at(block.row0 + done);
        for (o, origin) in self.operands.iter().zip(&mut origin) {
            *origin = origin.wrapping_offset(block.col0 as isize * o.col);
        }
        if let (Some(affine), Some(columns)) = (&self.program.affine, &self.columns) {
            // SAFETY: forwarded.
            unsafe { self.run_affine(affine, columns, block, &origin, done, run) };
            return;
        }
        let mut r = 0;
        while r < run {
            let rows = tile_rows.min(run - r);
            let mut c = 0;
            while c < block.cols {
                let cols = tile_cols.min(block.cols - c);
                // SAFETY: a part of the block.
                unsafe { self.run_tile(block, &origin, [done + r, r, c, rows, cols], spots) };
                c += cols;
            }
            r += rows;
        }
    }

    /// Where the operands begin in a row.
    fn operands_at(&self, row: usize) -> [*mut u8; MAX_OPERANDS] {
        let (mut index, mut rest) = ([0isize; MAX_DIMS], row);
        for d in (1..self.rank).rev() {
            index[d] = (rest % self.dims[d]) as isize;
            rest /= self.dims[d];
        }
        index[0] = rest as isize;
        let mut origin = [null_mut(); MAX_OPERANDS];
        for (o, origin) in self.operands.iter().zip(&mut origin) {
            let rows: isize = index[..self.rank].iter().zip(&o.rows).map(|(i, s)| i * s).sum();
            *origin = o.ptr.wrapping_offset(rows);
        }
        origin
    }

    /// Rows of the block from its row `done` on, which share their columns, and whose operands begin at `origin`.
    unsafe fn run_affine(
        &self,
        affine: &Affine,
        columns: &Columns,
        block: &Block<'_>,
        origin: &[*mut u8],
        done: usize,
        rows: usize,
    ) {
        let last = self.rank - 1;
        let (x, out) = (affine.x as usize, self.program.loads.len() + affine.out as usize);
        let (weight, bias) = columns.of((block.row0 + done) / self.dims[last]);
        let scalar = |i: u8| block.row_scalars[i as usize].wrapping_add(done);
        let (from, to) = (&self.operands[x], &self.operands[out]);
        let run = Rows {
            x: origin[x],
            y: origin[out],
            x_stride: from.rows[last],
            y_stride: to.rows[last],
            mean: affine.row.and_then(|row| row.mean).map_or(std::ptr::null(), scalar),
            rstd: affine.row.map_or(std::ptr::null(), |row| scalar(row.rstd)),
            weight: weight.wrapping_add(block.col0),
            bias: bias.wrapping_add(block.col0),
            rows,
            cols: block.cols,
            past: self.past_caches
                && self.dtype(out) == DType::F32
                && begins_line(origin[out])
                && keeps_line(to.rows[last]),
        };
        let (isa, dtype) = (self.program.isa, self.dtype(x));
        // SAFETY: the caller's promise; columns and scalars hold a value for each column and row.
        unsafe {
            match affine.row {
                Some(_) => by_rows(isa, dtype, &run),
                None => by_columns(isa, dtype, affine.silu, &run),
            }
        }
    }

    /// One tile; `at` holds its row in the block, its row in the run, its column in the block, its rows and columns.
    #[inline]
    unsafe fn run_tile(
        &self,
        block: &Block<'_>,
        origin: &[*mut u8],
        [block_row, r, c, rows, cols]: [usize; 5],
        spots: &mut [Spot],
    ) {
        let last = self.rank - 1;
        let address = |operand: usize| {
            let o = &self.operands[operand];
            origin[operand].wrapping_offset(r as isize * o.rows[last] + c as isize * o.col)
        };
        for (v, (place, kind)) in self.places.iter().zip(&self.kinds).enumerate() {
            match *place {
                Place::Memory(i) => {
                    let ld = match kind {
                        Kind::Uniform => 0,
                        Kind::PerRow => 1,
                        Kind::Full => self.operands[i as usize].rows[last] / 4,
                    };
                    spots[v] = Spot { ptr: address(i as usize).cast(), ld };
                }
                Place::Acc => {
                    let at = (block_row * block.acc_ld + c) as isize;
                    spots[v] = Spot { ptr: block.acc.wrapping_offset(at), ld: block.acc_ld as isize };
                }
                Place::RowScalar(i) => {
                    let ptr = block.row_scalars[i as usize].wrapping_add(block_row);
                    spots[v] = Spot { ptr: ptr.cast_mut(), ld: 1 };
                }
                Place::Slot(_) => {
                    spots[v].ld = match kind {
                        Kind::Uniform => 0,
                        Kind::PerRow => 1,
                        Kind::Full => cols as isize,
                    };
                }
                Place::Const(_) | Place::None => {}
            }
        }
        let shape = |v: Value| match self.kinds[v as usize] {
            Kind::Uniform => (1, 1),
            Kind::PerRow => (1, rows),
            Kind::Full => (rows, cols),
        };
        // SAFETY: every spot is valid for the tile: registers hold TILE elements, and a tile has at most as many; memory
        // and scalars are the caller's promise.
        unsafe {
            for step in &self.steps {
                match *step {
                    Step::Unary { f, dst, a } => f(&args(shape(dst), spots, dst, a, a, a)),
                    Step::Binary { f, dst, a, b } => f(&args(shape(dst), spots, dst, a, b, b)),
                    Step::Ternary { f, dst, a, b, c } => f(&args(shape(dst), spots, dst, a, b, c)),
                    Step::Load { f, dst, operand } => {
                        let (o, spot, (rows, cols)) =
                            (&self.operands[operand as usize], spots[dst as usize], shape(dst));
                        let (row_stride, col_stride) = match self.kinds[dst as usize] {
                            Kind::Full => (o.rows[last], o.col),
                            _ => (0, o.rows[last]),
                        };
                        let (reg, ld, mem) = (spot.ptr, spot.ld, address(operand as usize));
                        f(&Move { reg, ld, mem, row_stride, col_stride, rows, cols });
                    }
                    Step::Store { f, src, operand } => {
                        let (o, spot) = (&self.operands[operand as usize], spots[src as usize]);
                        let (reg, ld, mem) = (spot.ptr, spot.ld, address(operand as usize));
                        f(&Move { reg, ld, mem, row_stride: o.rows[last], col_stride: o.col, rows, cols });
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn args((rows, cols): (usize, usize), spots: &[Spot], dst: Value, a: Value, b: Value, c: Value) -> Args {
    let [dst, a, b, c] = [dst, a, b, c].map(|v| spots[v as usize]);
    Args { dst: dst.ptr, dld: dst.ld, a: a.ptr, ald: a.ld, b: b.ptr, bld: b.ld, c: c.ptr, cld: c.ld, rows, cols }
}

/// Scratch registers of one thread, on its stack.
#[repr(align(64))]
struct Registers<const SLOTS: usize>([[f32; TILE]; SLOTS]);

/// A program has at most [`MAX_REGS`] live values, and an instruction's result beside its dying operands.
const MAX_SLOTS: usize = MAX_REGS + 1;

/// Rows and columns of a tile of at most `tile` elements: whole rows if they fit, several of them if they are short, or a
/// part of each of them if all lie `together`.
fn tile_shape(rows: usize, cols: usize, tile: usize, together: bool) -> (usize, usize) {
    if together {
        return (rows, cols.min(tile / rows.max(1)));
    }
    if cols <= tile {
        return ((tile / cols.max(1)).min(rows), cols);
    }
    let pieces = cols.div_ceil(tile);
    (1, cols.div_ceil(pieces).next_multiple_of(64).min(tile))
}

/// Merged dimensions.
pub(super) struct Layout {
    /// Row dimensions, outermost first; at least one.
    pub(super) dims: [usize; MAX_DIMS],
    pub(super) rank: usize,
    pub(super) cols: usize,
    /// Loads first, then stores.
    pub(super) operands: Vec<Operand>,
    interleaved: bool,
}

/// A dimension that is too short for columns: each step would be a call for a few elements.
const SHORT: usize = 4;

impl Layout {
    /// Of operands of which the first `loads` are read. Where the caller is `free` to, dimensions change their order.
    pub(super) fn new(space: &Space, bounds: &[(Bound, DType)], loads: usize, free: bool) -> Layout {
        // (size, byte stride per operand), outermost first.
        let mut dims: Vec<(usize, Vec<isize>)> = (0..space.rank)
            .map(|d| (space.dims[d], bounds.iter().map(|(b, t)| b.strides[d] * t.size_bytes() as isize).collect()))
            .collect();
        let mut interleaved = false;
        let cols = if free {
            // Any order gives the same result: follow the first result's memory.
            dims.retain(|(n, _)| *n != 1);
            let lead = if bounds.len() > loads { loads } else { 0 };
            if lead < bounds.len() {
                dims.sort_by_key(|(_, s)| std::cmp::Reverse(s[lead].unsigned_abs()));
            }
            merge(&mut dims);
            if let [.., outer, inner] = &mut dims[..]
                && inner.0 <= SHORT
                && outer.0 >= 16 * SHORT
            {
                // Pairs of a rotation, the colours of a pixel: vectors run over the places, with a stride.
                std::mem::swap(outer, inner);
                interleaved = true;
            }
            dims.pop()
        } else {
            let cols = dims.pop();
            dims.retain(|(n, _)| *n != 1);
            merge(&mut dims);
            cols
        };
        let none = vec![0; bounds.len()];
        let (cols, col_strides) = cols.unwrap_or((1, none.clone()));
        if dims.is_empty() {
            dims.push((1, none));
        }
        let mut sizes = [1; MAX_DIMS];
        let mut operands: Vec<Operand> = bounds
            .iter()
            .zip(&col_strides)
            .map(|((b, _), &col)| Operand { ptr: b.ptr, rows: [0; MAX_DIMS], col })
            .collect();
        for (d, (n, strides)) in dims.iter().enumerate() {
            sizes[d] = *n;
            operands.iter_mut().zip(strides).for_each(|(o, &s)| o.rows[d] = s);
        }
        Layout { dims: sizes, rank: dims.len(), cols, operands, interleaved }
    }

    /// Where an operand begins in a row.
    pub(super) fn row(&self, operand: usize, row: usize) -> *mut u8 {
        let operand = &self.operands[operand];
        let (mut rest, mut place) = (row, operand.ptr);
        for (&size, stride) in self.dims[..self.rank].iter().zip(&operand.rows).rev() {
            place = place.wrapping_offset((rest % size) as isize * stride);
            rest /= size;
        }
        place
    }
}

/// Merges neighbours that every operand steps through as through one dimension.
fn merge(dims: &mut Vec<(usize, Vec<isize>)>) {
    let mut merged: Vec<(usize, Vec<isize>)> = Vec::with_capacity(dims.len());
    for (n, strides) in dims.drain(..) {
        match merged.last_mut() {
            Some((outer, steps)) if steps.iter().zip(&strides).all(|(&o, &s)| o == s * n as isize) => {
                *outer *= n;
                *steps = strides;
            }
            _ => merged.push((n, strides)),
        }
    }
    *dims = merged;
}

/// Bytes of operands a task should move at least: below this a region costs more than it saves.
const GRAIN_BYTES: usize = 64 << 10;

/// Runs a whole pointwise program.
///
/// # Safety
/// The operands must be valid for the space: loads for reads, stores for writes, and no store may overlap another
/// operand except element for element (see the module documentation). The program must not load `Source::Acc` or row
/// scalars.
///
/// # Panics
/// If the program loads `Source::Acc` or row scalars, or has more operands than given.
pub unsafe fn run_loop(pool: &Pool, program: &Prepared, space: &Space, loads: &[Bound], stores: &[Bound]) {
    if space.is_empty() {
        return;
    }
    let self_contained = program.row_scalars == 0 && !program.nodes.contains(&Node::Acc);
    assert!(self_contained, "a loop has no accumulators and no row scalars");
    let bound = BoundProgram::bind(program, space, loads, stores, Some(features().l3_bytes));
    // SAFETY: the caller's promise.
    unsafe { bound.run_all(pool) };
}

impl BoundProgram<'_> {
    /// Runs the program over the whole space, split over the threads; rows that lie together stay so.
    ///
    /// # Safety
    /// As for [`run_loop`].
    pub unsafe fn run_all(&self, pool: &Pool) {
        let together = if self.interleaved { self.dims[self.rank - 1] } else { 1 };
        let (rows, cols) = (self.rows() / together, self.cols);
        let types = self.program.loads.iter().chain(&self.program.stores);
        let bytes = types.map(|t| t.size_bytes()).sum::<usize>().max(1);
        let tasks = (rows * together * cols * bytes / GRAIN_BYTES).clamp(1, pool.threads() * 4);
        let block = |row0, col0, rows, cols| Block {
            row0: row0 * together,
            col0,
            rows: rows * together,
            cols,
            ..Block::default()
        };
        if rows >= 4 * tasks || cols <= TILE {
            let tasks = tasks.min(rows);
            pool.run(tasks, |task, _| {
                let (row0, end) = (rows * task / tasks, rows * (task + 1) / tasks);
                // SAFETY: tasks cover disjoint rows; the rest is the caller's promise.
                unsafe { self.run_block(&block(row0, 0, end - row0, cols)) };
            });
            return;
        }
        // Few long rows: split the columns too, at multiples of a cache line of every type.
        let parts = tasks.div_ceil(rows).min(cols.div_ceil(TILE)).max(1);
        let width = cols.div_ceil(parts).next_multiple_of(64);
        let parts = cols.div_ceil(width);
        pool.run(rows * parts, |task, _| {
            let (row0, col0) = (task / parts, task % parts * width);
            // SAFETY: tasks cover disjoint blocks; the rest is the caller's promise.
            unsafe { self.run_block(&block(row0, col0, 1, width.min(cols - col0))) };
        });
    }
}

/// Runs a program over one block of rows and columns on the calling thread, for contractions and row-wise norms.
///
/// # Safety
/// As for [`BoundProgram::run_block`].
pub unsafe fn run_rows(bound: &BoundProgram<'_>, block: &Block<'_>) {
    // SAFETY: the caller's promise.
    unsafe { bound.run_block(block) }
}

/// A program as the epilogue of a contraction: `Source::Acc` are its results.
pub struct TileEpilogue<'a> {
    bound: BoundProgram<'a>,
}

impl<'a> TileEpilogue<'a> {
    /// Binds the operands. The space's last dimension are the contraction's columns, the others, flattened row-major,
    /// its rows.
    ///
    /// # Panics
    /// If there are fewer operands than the program has, or the program loads row scalars.
    pub fn new(program: &'a Prepared, space: &Space, loads: &[Bound], stores: &[Bound]) -> TileEpilogue<'a> {
        assert!(program.row_scalars == 0, "an epilogue has no row scalars");
        TileEpilogue { bound: BoundProgram::new(program, space, loads, stores) }
    }
}

impl Epilogue for TileEpilogue<'_> {
    unsafe fn apply(&self, acc: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        let block = Block { acc, acc_ld: ld, row_scalars: &[], row0, col0, rows, cols };
        // SAFETY: the caller's promise.
        unsafe { self.bound.run_block(&block) };
    }
}
