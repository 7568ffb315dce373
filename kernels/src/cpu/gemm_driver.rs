//! The blocked engine under matrix products and convolutions.
//!
//! ```text
//! task = (z, block of nc columns, block of mc rows)          one thread, dynamic hand-out
//!   for each block of kc terms:
//!     A block  mc x kc  -> L2 scratch, in the form the micro-kernel reads (or in place)
//!     for each panel of nr columns:                          kc x nr stays in L1
//!       widen or pack the panel into L1 if it is not ready to be read
//!       for each tile of mr rows:  C scratch (+)= A tile * panel        registers
//!   epilogue(C scratch)                                      mc x nc, still in L2
//! ```
//!
//! Numerics: a register accumulates at most `kc` terms; blocks are added in f32. Invariant: a block is handed to the
//! epilogue once, after its last term.

use super::KernelError;
use super::gemm::{BatchDim, batch_offset};
use super::gemm_kernel::{Form, Kernel, Runner, expand_panel, split_panel};
use super::pack::{Matrix, elements_per_unit, pack_panel, units, units_in, width_at};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::{Pool, Worker};

/// What a task is at most.
struct Most {
    rows: usize,
    cols: usize,
    /// Four-byte units of one accumulation chain.
    units: usize,
}

/// A block (252 x 256 f32) and C block (252 x 384 f32) share a 1 MiB L2 with the panels that stream through. A panel of 32 f32
/// columns and 192 terms is 24 KiB: with the rows of A that stream past, it fits a 48 KiB L1.
const LARGE: Most = Most { rows: 252, cols: 384, units: 256 };
/// Processors without AVX-512 tend to have half the L2, and panels of half the columns: A (84 x 320) and C (84 x 384) take
/// 240 KiB, which leaves as much to a neighbour on the same core (measured on Zen 3, two threads, against 126 x 256 and 192
/// columns: 3 to 6 % less time for a chain of 1280 terms, 6 to 13 % for one of 320).
const SMALL: Most = Most { rows: 84, cols: 384, units: 320 };
/// Of AMX whole tiles: its processors have an L2 of 2 MiB.
const OF_AMX: Most = Most { rows: 256, cols: 640, units: 256 };

impl Most {
    const fn of(isa: Isa) -> Most {
        if matches!(isa, Isa::Avx512) { LARGE } else { SMALL }
    }

    fn with(kernel: &Kernel) -> Most {
        if kernel.is_amx() { OF_AMX } else { Most::of(kernel.isa) }
    }
}

/// Rows of a task with which the last thread ends first: `m` rows of `cols` blocks of columns, in tasks of `rows` rows or
/// less, or somewhat more than that if those are no more than `most`. Tiles of vectors need not be full: their heights differ by
/// one. Of AMX a part of `step` rows costs as much as all of them.
pub fn balanced_rows(
    m: usize,
    cols: usize,
    (rows, most): (usize, usize),
    (mr, step): (usize, usize),
    threads: usize,
) -> usize {
    let given = m.div_ceil(rows).max(1);
    let fewest = m.div_ceil(most + most / 16).clamp(1, given).max(given.saturating_sub(1));
    let height = |blocks: usize| m.div_ceil(blocks).next_multiple_of(step);
    let time = |blocks: usize| (blocks * cols).div_ceil(threads) * (height(blocks) + TASK_ROWS);
    let is_tall = |blocks: usize| blocks <= given || height(blocks) >= 4 * mr;
    let best = (fewest..=given + threads).filter(|&blocks| is_tall(blocks)).min_by_key(|&blocks| time(blocks));
    height(best.unwrap_or(given)).max(1)
}

/// Rows whose products take as long as a task's own share: loading its panels, handing it out.
const TASK_ROWS: usize = 8;

/// Whether a product of `m` rows takes no longer with a strided operand than with one that is packed for it alone: panels
/// are packed once for every block of rows, in L1, instead of once by way of memory. Measured on Zen 4 with AVX-512, packing
/// included: up to two blocks 0.85 to 1.0 of the time, four 0.99 to 1.03. AVX2 packs at half the speed.
pub(crate) fn packs_while_used(isa: Isa, m: usize) -> bool {
    row_blocks(isa, m) <= if isa == Isa::Avx512 { 2 } else { 1 }
}

/// Blocks that `m` rows are cut into at least.
pub(crate) fn row_blocks(isa: Isa, m: usize) -> usize {
    m.div_ceil(Most::of(isa).rows)
}

/// Where rows of A come from.
pub(crate) trait ASource: Sync {
    /// Makes rows `row0..row0 + rows`, terms `k0..k0 + kc` of pair `z` readable for the micro-kernel and returns the
    /// address of the first row and the bytes between rows. `dst` may be used to hold them, `ld` bytes apart.
    ///
    /// # Safety
    /// The block must lie inside the operand; `dst` must hold `rows * ld` bytes, `ld` at least one padded row.
    unsafe fn block(
        &self,
        z: usize,
        row0: usize,
        rows: usize,
        k0: usize,
        kc: usize,
        dst: *mut u8,
        ld: usize,
    ) -> (*const u8, usize);

    /// Whether `block` never uses `dst`.
    fn is_in_place(&self) -> bool {
        false
    }
}

/// Where panels of B come from.
pub(crate) enum BSource<'a> {
    /// Packed panels, in parts if there are more than none; `stride` bytes from one pair's to the next.
    Packed { ptr: *const u8, dtype: DType, parts: usize, stride: usize },
    /// A matrix per pair, packed panel by panel while it is used.
    Strided { matrix: Matrix, batch: &'a [BatchDim] },
}

// SAFETY: reads only.
unsafe impl Sync for BSource<'_> {}

impl BSource<'_> {
    fn dtype(&self) -> DType {
        match self {
            BSource::Packed { dtype, .. } => *dtype,
            BSource::Strided { matrix, .. } => matrix.dtype,
        }
    }
}

/// `count` products of the same sizes. Results of pair `z` start at row `z * row_step`, column `z * col_step` of the
/// epilogue's matrix.
pub(crate) struct Problem<'a, A: ASource> {
    pub kernel: &'static Kernel,
    pub count: usize,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub row_step: usize,
    pub col_step: usize,
    pub a: &'a A,
    pub b: BSource<'a>,
}

/// Block sizes of one problem, and the scratch memory they need.
#[derive(Clone, Copy, Debug)]
struct Blocking {
    mc: usize,
    nc: usize,
    kc: usize,
    row_blocks: usize,
    col_blocks: usize,
    /// Bytes between rows of the A block.
    a_ld: usize,
    /// Elements between rows of the C block.
    c_ld: usize,
    c_offset: usize,
    panel_offset: usize,
    pack_offset: usize,
    scratch_bytes: usize,
}

impl Blocking {
    fn choose<A: ASource>(problem: &Problem<'_, A>, threads: usize) -> Blocking {
        let kernel = problem.kernel;
        let (mr, nr) = (kernel.mr, kernel.nr);
        let unit = kernel.k_step().max(elements_per_unit(problem.b.dtype()));
        let most = Most::with(kernel);
        let max_kc = kernel.most_terms(most.units);
        let k_blocks = problem.k.div_ceil(max_kc).max(1);
        let kc = problem.k.div_ceil(k_blocks).next_multiple_of(unit).max(unit);
        let split = |size: usize, most: usize, step: usize| {
            let blocks = size.div_ceil(most);
            size.div_ceil(blocks).next_multiple_of(step)
        };
        let mut mc = split(problem.m, most.rows / mr * mr, mr);
        let mut nc = split(problem.n, most.cols, nr);
        let tasks = |mc: usize, nc: usize| problem.count * problem.m.div_ceil(mc) * problem.n.div_ceil(nc);
        let wanted = if threads == 1 { 1 } else { 4 * threads };
        while tasks(mc, nc) < wanted {
            let (halved_m, halved_n) = ((mc.div_ceil(2)).next_multiple_of(mr), (nc.div_ceil(2)).next_multiple_of(nr));
            if halved_m < mc && (mc >= nc / 2 || halved_n == nc || nc <= 2 * nr) {
                mc = halved_m;
            } else if halved_n < nc {
                nc = halved_n;
            } else {
                break;
            }
        }
        if threads > 1 {
            let cols = problem.count * problem.n.div_ceil(nc);
            mc = balanced_rows(problem.m, cols, (mc, most.rows), (mr, kernel.row_step()), threads);
        }
        let a_ld = kernel.form.units(kc) * 4 + 64;
        let c_ld = nc + 16;
        let a_bytes = if problem.a.is_in_place() { 0 } else { (mc * a_ld).next_multiple_of(4096) };
        let c_bytes = (mc * c_ld * 4).next_multiple_of(4096);
        let panel_bytes = ((kc + 2).max(kernel.form.units(kc)) * nr * 4).next_multiple_of(4096);
        Blocking {
            mc,
            nc,
            kc,
            row_blocks: problem.m.div_ceil(mc),
            col_blocks: problem.n.div_ceil(nc),
            a_ld,
            c_ld,
            c_offset: a_bytes,
            panel_offset: a_bytes + c_bytes,
            pack_offset: a_bytes + c_bytes + panel_bytes,
            scratch_bytes: a_bytes + c_bytes + 2 * panel_bytes,
        }
    }
}

/// Runs a problem on the pool.
///
/// # Safety
/// The operands must be readable for the problem's sizes and the epilogue must accept its results.
pub(crate) unsafe fn run<A: ASource>(
    pool: &Pool,
    problem: &Problem<'_, A>,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    if problem.m == 0 || problem.n == 0 || problem.count == 0 {
        return Ok(());
    }
    let blocking = Blocking::choose(problem, pool.threads());
    let per_pair = blocking.row_blocks * blocking.col_blocks;
    let (tasks, threads) = (problem.count * per_pair, pool.threads());
    let place = |task: usize| {
        let (z, block) = (task / per_pair, task % per_pair);
        Place { z, row0: block % blocking.row_blocks * blocking.mc, col0: block / blocking.row_blocks * blocking.nc }
    };
    pool.run_scratch(tasks, blocking.scratch_bytes, |task, worker| {
        let next = (task + threads < tasks).then(|| place(task + threads));
        // SAFETY: blocks lie inside the problem and are disjoint; scratch has the size `Blocking` asked for.
        unsafe { run_block(problem, &blocking, worker, place(task), next, epilogue) }
    })?;
    Ok(())
}

/// A task's pair, and its first row and column.
#[derive(Clone, Copy)]
struct Place {
    z: usize,
    row0: usize,
    col0: usize,
}

/// `next` is where this thread goes on, as far as one can know.
///
/// # Safety
/// As [`run`]; the block must start inside the problem.
unsafe fn run_block<A: ASource>(
    problem: &Problem<'_, A>,
    blocking: &Blocking,
    worker: Worker,
    at: Place,
    next: Option<Place>,
    epilogue: &dyn Epilogue,
) {
    let Place { z, row0, col0 } = at;
    let rows = blocking.mc.min(problem.m - row0);
    let cols = blocking.nc.min(problem.n - col0);
    // SAFETY: offsets lie inside the scratch memory; see `Blocking::choose`.
    unsafe {
        let c: *mut f32 = worker.scratch.add(blocking.c_offset).cast();
        if problem.k == 0 {
            (0..rows).for_each(|row| c.add(row * blocking.c_ld).write_bytes(0, cols));
        }
        let mut runner = Runner::new(problem.kernel);
        for k0 in (0..problem.k).step_by(blocking.kc) {
            let kc = blocking.kc.min(problem.k - k0);
            let (a, lda) = problem.a.block(z, row0, rows, k0, kc, worker.scratch, blocking.a_ld);
            let mut next_rows = next_rows(problem, blocking, worker, at, next, k0 + kc);
            let mut n0 = col0;
            while n0 < col0 + cols {
                let width = width_at(problem.n, n0, problem.kernel.nr);
                let panel = ready_panel(problem, blocking, worker, z, n0, k0, kc);
                let terms = problem.kernel.form.units(kc);
                let c = c.add(n0 - col0);
                let ahead = match &mut next_rows {
                    Some(next_rows) => next_rows.take(rows.div_ceil(problem.kernel.mr)),
                    None => next_panel(problem, z, n0, k0, kc),
                };
                let c = (c, blocking.c_ld);
                run_tiles(&mut runner, rows, width, terms, (a, lda), panel, c, k0 > 0, ahead);
                n0 += width;
            }
        }
        // Epilogues may multiply, too, and nobody knows how long they take: tile registers are not held meanwhile.
        drop(runner);
        epilogue.apply(c, blocking.c_ld, z * problem.row_step + row0, z * problem.col_step + col0, rows, cols);
    }
}

/// The panel at column `n0`, terms `k0..k0 + kc`, in the form the micro-kernel reads.
///
/// # Safety
/// As [`run_block`].
unsafe fn ready_panel<A: ASource>(
    problem: &Problem<'_, A>,
    blocking: &Blocking,
    worker: Worker,
    z: usize,
    n0: usize,
    k0: usize,
    kc: usize,
) -> *const u8 {
    let kernel = problem.kernel;
    let dtype = problem.b.dtype();
    let width = width_at(problem.n, n0, kernel.nr);
    // SAFETY: packed panels have the layout of `pack`; the two scratch panels hold `kc` terms each.
    unsafe {
        let wide = worker.scratch.add(blocking.panel_offset);
        let (panel, is_apart) = match &problem.b {
            &BSource::Packed { ptr, stride, parts, .. } => {
                let row = units_in(parts, k0, dtype) * width;
                (ptr.add(z * stride + (n0 * units_in(parts, problem.k, dtype) + row) * 4), parts > 0)
            }
            BSource::Strided { matrix, batch } => {
                let offset = batch_offset(batch, z, |dim| dim.b_stride) * dtype.size_bytes() as isize;
                let matrix = Matrix { ptr: matrix.ptr.byte_offset(offset), ..*matrix };
                let target = worker.scratch.add(blocking.pack_offset);
                pack_panel(kernel.isa, &matrix, n0, problem.n, kernel.nr, k0, kc, target);
                (target.cast_const(), false)
            }
        };
        if is_apart { panel } else { widened(kernel, dtype, panel, kc, width, wide) }
    }
}

/// The panel in the form the micro-kernel reads: itself, or a copy of it in `wide`, as f32 or taken apart.
///
/// # Safety
/// `panel` must hold `kc` terms of `width` columns, `wide` room for `kc + 1` rows of f32 and for [`Form::units`] of the form.
pub(crate) unsafe fn widened(
    kernel: &Kernel,
    dtype: DType,
    panel: *const u8,
    kc: usize,
    width: usize,
    wide: *mut u8,
) -> *const u8 {
    if kernel.form.parts() > 0 {
        // SAFETY: forwarded; operands have the form's type.
        unsafe { split_panel(kernel.form, panel, kc, width, wide.cast()) };
        return wide;
    }
    if kernel.form != Form::F32 || dtype == DType::F32 {
        return panel;
    }
    // SAFETY: forwarded.
    unsafe { expand_panel(kernel.isa, dtype, panel.cast(), units(kc, dtype), width, wide.cast()) };
    wide
}

/// What is needed soon, in pieces: each tile may fetch one into L2.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    first: *const u8,
    /// Bytes from one piece to the next.
    step: usize,
    count: usize,
}

impl Ahead {
    /// Nothing.
    pub(crate) const NONE: Ahead = Ahead { first: std::ptr::null(), step: 0, count: 0 };

    /// The piece of a tile.
    fn piece(&self, tile: usize) -> Option<*const u8> {
        (tile < self.count).then(|| self.first.wrapping_add(tile * self.step))
    }

    /// The first pieces, which it has no longer.
    fn take(&mut self, count: usize) -> Ahead {
        let taken = Ahead { count: count.min(self.count), ..*self };
        *self =
            Ahead { first: self.first.wrapping_add(taken.count * self.step), count: self.count - taken.count, ..*self };
        taken
    }
}

/// Asks for a cache line, valid or not, in the second-level cache.
#[inline(always)]
pub(crate) fn fetch(line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault, and every x86-64 processor has it.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(line.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = line;
}

/// For kernels that fetch rows ahead: those that are multiplied after the ones at hand, of the next terms, from `k0` on, or of
/// the next task. Panels follow one another in memory, which processors notice by themselves; rows do not.
///
/// # Safety
/// As [`run_block`].
unsafe fn next_rows<A: ASource>(
    problem: &Problem<'_, A>,
    blocking: &Blocking,
    worker: Worker,
    at: Place,
    next: Option<Place>,
    k0: usize,
) -> Option<Ahead> {
    if !problem.kernel.fetches_rows() {
        return None;
    }
    let (place, k0) = if k0 < problem.k { (Some(at), k0) } else { (next, 0) };
    let Some(Place { z, row0, .. }) = place.filter(|_| problem.a.is_in_place()) else { return Some(Ahead::NONE) };
    let rows = blocking.mc.min(problem.m - row0);
    let kc = blocking.kc.min(problem.k - k0);
    // SAFETY: rows in place, of which this is the address; they lie inside the problem.
    let (first, step) = unsafe { problem.a.block(z, row0, rows, k0, kc, worker.scratch, blocking.a_ld) };
    Some(Ahead { first, step, count: rows })
}

/// The panel after the one at `n0`; nothing where it needs preparation first.
fn next_panel<A: ASource>(problem: &Problem<'_, A>, z: usize, n0: usize, k0: usize, kc: usize) -> Ahead {
    match &problem.b {
        &BSource::Packed { ptr, dtype, stride, parts } if dtype == problem.kernel.form.dtype() => {
            let width = problem.kernel.nr;
            let units = |k| units_in(parts, k, dtype);
            let (n0, k0) = if n0 + width < problem.n { (n0 + width, k0) } else { (0, k0 + kc) };
            let first = ptr.wrapping_add(z * stride + (n0 * units(problem.k) + units(k0) * width) * 4);
            let step = problem.kernel.form.units(kc) / 4 * 64;
            Ahead { first, step, count: (units(kc) * width * 4).div_ceil(step.max(1)) }
        }
        _ => Ahead::NONE,
    }
}

/// Multiplies one A block with one panel, tile by tile.
///
/// # Safety
/// As [`run_block`].
pub(crate) unsafe fn run_tiles(
    runner: &mut Runner<'_>,
    rows: usize,
    width: usize,
    terms: usize,
    (a, lda): (*const u8, usize),
    panel: *const u8,
    (c, ldc): (*mut f32, usize),
    accumulate: bool,
    ahead: Ahead,
) {
    let tiles = rows.div_ceil(runner.kernel().mr);
    // SAFETY: the caller vouches for the panel.
    unsafe { runner.take_panel(panel, width, terms) };
    let mut row = 0;
    for tile in 0..tiles {
        let height = runner.next_height(rows - row, tiles - tile);
        // SAFETY: the tile lies inside the A block, the panel and the C block.
        unsafe {
            let ahead = ahead.piece(tile).unwrap_or(panel);
            let (a, c) = ((a.add(row * lda), lda), (c.add(row * ldc), ldc));
            runner.tile(height, a, c, accumulate, ahead);
        }
        row += height;
    }
}
