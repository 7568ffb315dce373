//! Tile programs bound to operands: the second stage of [`tile_exec`](super::tile_exec).
//!
//! Decided once per set of addresses and strides: how each value varies ([`Kind`]), where it lives ([`Place`]), which function
//! computes it ([`Step`]), and whether the program does without tiles.

use super::tile_affine::{Affine, Column, Columns};
use super::tile_exec_ops::{
    Move, MoveFn, Op1, Op3, OpFn, binary_fn, load_fn, store_fn, ternary_fn, typed_binary_fn, typed_ternary_fn,
    typed_unary_fn, unary_fn,
};
use super::tile_exec_typed::{Lane, Lanes};
use super::tile_layout::{Layout, Operand};
use super::tile_prepare::{Node, Prepared, Value};
use crate::dtype::DType;
use crate::tile::{Binary, Bound, MAX_DIMS, MAX_OPERANDS, MAX_REGS, Space, TILE, Unary};
use std::ptr::null_mut;

/// A program has at most [`MAX_REGS`] live values, and an instruction's result beside its dying operands.
pub(super) const MAX_SLOTS: usize = MAX_REGS + 1;

/// Fewest rows, and fewest columns of a row, that columns are made for ahead.
const WORTH_COLUMNS: usize = 8;

/// How a value varies over a run of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// One value.
    Uniform,
    /// One value per row, dense.
    PerRow,
    /// One value per element.
    Full,
}

/// Where a value lies while a tile is worked on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Place {
    Const(f32),
    Acc,
    RowScalar(u8),
    /// In memory operand (loads first, then stores), of a floating type.
    Memory(u8),
    /// In scratch register.
    Slot(u8),
    /// Stores have none.
    None,
}

/// A call of a function for each tile.
#[derive(Clone, Copy)]
pub(super) enum Step {
    Unary { f: OpFn, lanes: Lanes, dst: Value, a: Value },
    Binary { f: OpFn, lanes: Lanes, dst: Value, a: Value, b: Value },
    Ternary { f: OpFn, lanes: Lanes, dst: Value, a: Value, b: Value, c: Value },
    Load { f: MoveFn, dst: Value, operand: u8 },
    Store { f: MoveFn, src: Value, operand: u8 },
}

/// A program bound to operands over a space.
pub struct BoundProgram<'a> {
    pub(super) program: &'a Prepared,
    /// Row dimensions after merging, outermost first; at least one.
    pub(super) dims: [usize; MAX_DIMS],
    pub(super) rank: usize,
    pub(super) cols: usize,
    pub(super) operands: Vec<Operand>,
    pub(super) kinds: Vec<Kind>,
    pub(super) places: Vec<Place>,
    pub(super) steps: Vec<Step>,
    pub(super) slots: usize,
    /// Most elements of a tile.
    pub(super) tile: usize,
    /// Results go past the caches where a function can do that.
    pub(super) past_caches: bool,
    /// The innermost rows are a short dimension of one place in memory, which tiles hold together.
    pub(super) interleaved: bool,
    /// The columns of a program that needs no tiles, where the operands lie as it asks for.
    pub(super) columns: Option<Columns>,
}

// SAFETY: the raw pointers are only followed by `run_block`, whose caller vouches for the memory and for blocks being
// disjoint; nothing in the value itself is mutated.
unsafe impl Sync for BoundProgram<'_> {}
// SAFETY: as above.
unsafe impl Send for BoundProgram<'_> {}

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

    /// Where the operands begin in a row.
    pub(super) fn operands_at(&self, row: usize) -> [*mut u8; MAX_OPERANDS] {
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

    pub(super) fn dtype(&self, operand: usize) -> DType {
        let loads = self.program.loads.len();
        if operand < loads { self.program.loads[operand] } else { self.program.stores[operand - loads] }
    }

    /// Whether a value of this kind can be the operand's memory itself.
    fn is_direct(&self, operand: usize, kind: Kind) -> bool {
        let (o, dtype) = (&self.operands[operand], self.dtype(operand));
        let size = dtype.size_bytes() as isize;
        let aligned = o.ptr.addr().is_multiple_of(size as usize) && o.rows.iter().all(|s| s % size == 0);
        aligned
            && match kind {
                Kind::Full => Lane::of(dtype).is_some() && o.col == size,
                _ if dtype != DType::F32 => false,
                Kind::PerRow => o.rows[self.rank - 1] == size,
                Kind::Uniform => true,
            }
    }

    /// Whether the operand has 16-bit elements.
    fn is_narrow(&self, operand: usize) -> bool {
        Lane::of(self.dtype(operand)).is_some_and(Lane::is_narrow)
    }

    /// How many nodes read a value.
    fn readers(&self, v: usize) -> usize {
        self.program.nodes.iter().flat_map(|node| node.operands()).filter(|&read| read as usize == v).count()
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
                    // What is moved to a result, or read by itself, is f32 in between.
                    let moved = nodes.iter().any(|n| matches!(n, Node::Store { src, .. } if *src as usize == at));
                    if spoiled || (moved && self.is_narrow(i as usize)) { Place::None } else { Place::Memory(i) }
                }
                _ => Place::None,
            };
        }
        // Values computed straight into the memory they are stored to.
        for node in nodes {
            let Node::Store { src, out } = *node else { continue };
            let (v, operand) = (src as usize, loads + out as usize);
            // What others read, or is rounded to another type first, is not what is stored.
            let fits = !self.is_narrow(operand)
                || (nodes[v].is_computed() && self.program.rounds[v].is_none() && self.readers(v) == 1);
            let writable = self.places[v] == Place::None
                && (nodes[v].is_computed() || matches!(nodes[v], Node::Memory(_)))
                && self.kinds[v] == Kind::Full
                && fits
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

    /// Whether a value is computed straight into a result that nothing reads here, whose rows begin at cache lines, by an
    /// operation that memory bounds.
    fn may_pass_caches(&self, at: usize) -> bool {
        let Place::Memory(i) = self.places[at] else { return false };
        let gains = match self.program.nodes[at] {
            Node::Binary(Binary::Add | Binary::Sub | Binary::Mul, ..) | Node::Ternary(Op3::Fma, ..) => true,
            // Half the bytes, and an exponential all the same.
            Node::Unary(Op1::Plain(Unary::Silu | Unary::GeluTanh), _) => !self.is_narrow(i as usize),
            _ => false,
        };
        // Tiles of interleaved rows are as wide as their number allows: not whole lines.
        if !gains || !self.past_caches || self.interleaved || (i as usize) < self.program.loads.len() {
            return false;
        }
        let o = &self.operands[i as usize];
        self.readers(at) == 1 && begins_line(o.ptr) && o.rows[..self.rank].iter().all(|&stride| keeps_line(stride))
    }

    /// How the value of a node is written and those it is computed of are read; `PLAIN` where the functions of f32 do it.
    fn lanes(&self, at: usize) -> Lanes {
        let (node, level) = (self.program.nodes[at], self.kinds[at]);
        let in_memory = |v: usize| match (self.places[v], self.kinds[v]) {
            (Place::Memory(i), Kind::Full) => Lane::of(self.dtype(i as usize)).unwrap_or(Lane::F32),
            _ => Lane::F32,
        };
        let is_narrow = |v: usize| in_memory(v).is_narrow();
        let typed = self.program.rounds[at].is_some() || node.operands().map(usize::from).chain([at]).any(is_narrow);
        if !typed || !node.is_computed() {
            return Lanes::PLAIN;
        }
        let mut operands = node.operands();
        // As for `scalar` of the f32 functions.
        let mut read = || match operands.next() {
            Some(v) if self.kinds[v as usize] < level => Lane::Scalar,
            Some(v) => in_memory(v as usize),
            None => Lane::F32,
        };
        let dst = match (in_memory(at), self.program.rounds[at]) {
            (Lane::F32, Some(DType::F16)) => Lane::F32OfF16,
            (Lane::F32, Some(_)) => Lane::F32OfBf16,
            (lane, _) => lane,
        };
        Lanes { dst, a: read(), b: read(), c: read(), past: self.may_pass_caches(at) }
    }

    fn choose_steps(&mut self) {
        let (isa, loads) = (self.program.isa, self.program.loads.len());
        for (at, node) in self.program.nodes.iter().enumerate() {
            let (dst, level) = (at as Value, self.kinds[at]);
            let past = self.may_pass_caches(at);
            // At the level of rows, values per row are the full operands of a single row.
            let scalar = |v: Value| self.kinds[v as usize] < level;
            let lanes = self.lanes(at);
            let plain = lanes == Lanes::PLAIN;
            let step = match *node {
                Node::Unary(op, a) => {
                    let f = if plain { unary_fn(isa, op, past) } else { typed_unary_fn(isa, op) };
                    Step::Unary { f, lanes, dst, a }
                }
                Node::Binary(op, a, b) => {
                    let f =
                        if plain { binary_fn(isa, op, scalar(a), scalar(b), past) } else { typed_binary_fn(isa, op) };
                    Step::Binary { f, lanes, dst, a, b }
                }
                Node::Ternary(op, a, b, c) => {
                    let f = if plain {
                        ternary_fn(isa, op, [scalar(a), scalar(b), scalar(c)], past)
                    } else {
                        typed_ternary_fn(isa, op)
                    };
                    Step::Ternary { f, lanes, dst, a, b, c }
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
}

/// Bytes of a cache line.
const LINE: usize = 64;

pub(super) fn begins_line(ptr: *mut u8) -> bool {
    ptr.addr().is_multiple_of(LINE)
}

/// Whether rows this many bytes apart all begin at lines if one does.
pub(super) fn keeps_line(stride: isize) -> bool {
    stride.unsigned_abs().is_multiple_of(LINE)
}
