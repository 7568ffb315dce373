//! Runs tile programs.
//!
//! Three stages, each done as rarely as it can be:
//!
//! 1. [`Prepared::new`] (`tile_prepare`), once per program: checks it, turns registers into single-assignment values, drops
//!    dead code, recognises constant powers.
//! 2. [`BoundProgram::new`] (`tile_bind`), once per set of addresses and strides: merges dimensions (`tile_layout`), decides
//!    per value whether it is *uniform*, *per row* or *full*, where it lives, and which function of `tile_exec_ops` computes
//!    it.
//! 3. Per block: for each tile of at most [`TILE`] elements, pointers are set and the functions called in order.
//!
//! What makes it fast: a floating operand that is contiguous along the columns is never loaded, its value *is* the memory; a
//! value whose destination is that is computed straight into it (those of 16 bits by `tile_exec_typed`); broadcast operands
//! stay scalars, and values of scalars are computed once per row or once per block. A tile takes several rows where rows are
//! short.
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

use super::tile_affine::{Affine, Columns, Rows, by_columns, by_rows};
use super::tile_bind::{Kind, MAX_SLOTS, Place, Step, begins_line, keeps_line};
use super::tile_exec_ops::{Args, Move, fence};
use super::tile_exec_typed::Lanes;
use super::tile_prepare::{Node, Value};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::features;
use crate::pool::Pool;
use crate::tile::{Bound, MAX_INSTRS, Space, TILE};
use std::mem::MaybeUninit;
use std::ptr::null_mut;

pub use super::tile_bind::BoundProgram;
pub use super::tile_prepare::Prepared;

/// Pointer and row stride (in elements) of a value in the current tile.
#[derive(Clone, Copy)]
struct Spot {
    ptr: *mut f32,
    ld: isize,
}

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

impl BoundProgram<'_> {
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
                        Kind::Full => {
                            self.operands[i as usize].rows[last] / self.dtype(i as usize).size_bytes() as isize
                        }
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
                    Step::Unary { f, lanes, dst, a } => f(&args(shape(dst), lanes, spots, [dst, a, a, a])),
                    Step::Binary { f, lanes, dst, a, b } => f(&args(shape(dst), lanes, spots, [dst, a, b, b])),
                    Step::Ternary { f, lanes, dst, a, b, c } => f(&args(shape(dst), lanes, spots, [dst, a, b, c])),
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
fn args((rows, cols): (usize, usize), lanes: Lanes, spots: &[Spot], values: [Value; 4]) -> Args {
    let [dst, a, b, c] = values.map(|v| spots[v as usize]);
    Args { dst: dst.ptr, dld: dst.ld, a: a.ptr, ald: a.ld, b: b.ptr, bld: b.ld, c: c.ptr, cld: c.ld, rows, cols, lanes }
}

/// Scratch registers of one thread, on its stack.
#[repr(align(64))]
struct Registers<const SLOTS: usize>([[f32; TILE]; SLOTS]);

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
