//! Sums, means, products, largest and least elements over dimensions, of floats up to f32.
//!
//! Which of two forms a reduction gets follows from where its neighbours in memory are:
//!
//! - *Rows*: a reduced dimension has the neighbours, or none does. A power of two of threads folds one result, lanes along
//!   the neighbours: a part of a warp where there are few terms, several warps, joined in shared memory, where there are
//!   many terms and few results.
//! - *Columns*: a kept dimension has the neighbours. A warp's lanes have a column each, the warps of a block share the
//!   terms, and their parts are joined in shared memory.
//!
//! Everything is f32 until the result is rounded once. The order of additions follows from the sizes alone.

use super::body::Space;
use super::grid::{FOLD_THREADS, WARP};
use super::writer::Writer;
use super::{Grid, Kernel, Provenance, Vector, View};
use crate::ir::{DType, Dim, ReduceOp};

/// A reduction's operands.
#[derive(Clone, Copy, Debug)]
pub struct Reduction<'a> {
    /// What is done to the elements.
    pub op: ReduceOp,
    /// The operand.
    pub x: &'a View,
    /// The reduced dimensions of the operand.
    pub dims: &'a [usize],
    /// The result, with a stride for each of the operand's other dimensions.
    pub out: &'a View,
}

/// Start and step of a fold in C: `a` is what was seen so far, `b` comes to it.
fn fold_of(op: ReduceOp) -> Option<(&'static str, &'static str)> {
    match op {
        ReduceOp::Sum | ReduceOp::Mean => Some(("0.0f", "a + b")),
        ReduceOp::Prod => Some(("1.0f", "a * b")),
        ReduceOp::Amax => Some(("__uint_as_float(0xff800000u)", "m_max(a, b)")),
        ReduceOp::Amin => Some(("__uint_as_float(0x7f800000u)", "m_min(a, b)")),
        ReduceOp::Any | ReduceOp::All | ReduceOp::Argmax | ReduceOp::Argmin => None,
    }
}

const fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// A reduction. Operands: x, result. `None` for what one thread per result computes: integers, f64, tests, positions.
pub fn lower_reduce(reduction: &Reduction<'_>, from: &Provenance) -> Option<Kernel> {
    let (x, out) = (reduction.x, reduction.out);
    let (start, step) = fold_of(reduction.op).filter(|_| is_float(x.dtype) && is_float(out.dtype))?;
    let is_reduced = |d: &usize| reduction.dims.contains(d);
    let unit = (0..x.shape.len()).rev().find(|&d| x.strides[d].is(1) && !x.shape[d].is(1));
    // Dimensions of one kind, the one with the neighbours last.
    let side = |reduced: bool| -> Vec<usize> {
        let own = |d: &usize| is_reduced(d) == reduced;
        let others = (0..x.shape.len()).filter(|d| own(d) && Some(*d) != unit);
        others.chain(unit.filter(own)).collect()
    };
    let (kept, reduced) = (side(false), side(true));
    let part = |dims: &[usize]| View {
        dtype: x.dtype,
        shape: dims.iter().map(|&d| x.shape[d].clone()).collect(),
        strides: dims.iter().map(|&d| x.strides[d].clone()).collect(),
    };
    // The result's strides are in the order of the operand's kept dimensions.
    let before = |d: usize| (0..d).filter(|d| !is_reduced(d)).count();
    let (walked, rest) = (part(&kept), part(&reduced));
    let strides = kept.iter().map(|&d| out.strides[before(d)].clone()).collect();
    let result = View { dtype: out.dtype, shape: walked.shape.clone(), strides };
    let is_column = unit.is_some_and(|d| !is_reduced(&d));
    let fold = Fold {
        results: Space::new(&walked.shape, [&walked, &result], usize::from(is_column)),
        terms: Space::new(&rest.shape, [&rest], 0),
        types: [x.dtype, out.dtype],
        start,
        step,
        is_mean: reduction.op == ReduceOp::Mean,
    };
    Some(if is_column { fold.columns(from) } else { fold.rows(unit.is_some(), from) })
}

/// A reduction whose dimensions are in order.
struct Fold {
    /// Over the operand and the result.
    results: Space,
    /// Over the operand.
    terms: Space,
    types: [DType; 2],
    start: &'static str,
    step: &'static str,
    is_mean: bool,
}

impl Fold {
    /// Declares the fold, and gives what a result is made of.
    fn open(&self, w: &mut Writer, terms: &str) -> &'static str {
        w.line(format!("const auto fold = [](float a, float b) -> float {{ return {}; }};", self.step));
        if !self.is_mean {
            return "all";
        }
        w.line(format!("const float count = (float){terms};"));
        "all / count"
    }

    fn rows(&self, is_unit: bool, from: &Provenance) -> Kernel {
        let [dtype, out_type] = self.types;
        let (results, terms) = (self.results.rows(0), self.terms.rows(0));
        let mut w = Writer::new();
        let (p, to) = (w.pointer(0, dtype, false), w.pointer(1, out_type, true));
        let (count, n) = (w.size(&results), w.size(&terms));
        let result = self.open(&mut w, &n);
        w.line(format!("OX_SHARED(float, partial, {});", FOLD_THREADS / WARP));
        w.line("const u32 item = blockIdx.x * blockDim.y + threadIdx.y, lane = threadIdx.x;");
        // All lanes of a warp take part in its shuffles.
        w.line(format!("const bool is_there = item < (u32){count};"));
        w.line("const u32 at_item = is_there ? item : 0;");
        let at = self.results.emit_offsets(&mut w, "at_item", 0, "");
        w.line(format!("float all = {};", self.start));
        w.line(format!("if (is_there) for (u32 at = lane * V; at < (u32){n}; at += blockDim.x * V) {{"));
        let term = self.terms.emit_offsets(&mut w, "at", 0, "t");
        w.lines(&format!(
            "float x[V];
            load<V>(x, {p} + {} + {});
            #pragma unroll
            for (int j = 0; j < V; ++j) all = fold(all, x[j]);
            }}
            for (u32 step = (blockDim.x < {WARP} ? blockDim.x : {WARP}) >> 1; step; step >>= 1)
            all = fold(all, __shfl_xor_sync(0xffffffffu, all, step));
            if (blockDim.x > {WARP}) {{
            float* own = partial + threadIdx.y * (blockDim.x / {WARP});
            if (lane % {WARP} == 0) own[lane / {WARP}] = all;
            __syncthreads();
            if (lane == 0)
            for (u32 warp = 1; warp < blockDim.x / {WARP}; ++warp) all = fold(all, own[warp]);
            }}",
            at[0], term[0]
        ));
        w.line(format!("if (is_there && lane == 0) {to}[{}] = narrow<{}>({result});", at[1], super::c_type(out_type)));
        let cols = self.terms.sizes.last().cloned().unwrap_or_else(|| Dim::constant(1));
        let width = if is_unit { 16 / dtype.size_bytes() } else { 1 };
        let vector = Vector { width, cols, operands: self.operands(&self.results.strides[0]) };
        w.finish_vector(from, out_type, Grid::Folds { results, terms }, FOLD_THREADS, vector)
    }

    fn columns(&self, from: &Provenance) -> Kernel {
        let [dtype, out_type] = self.types;
        let last = self.results.sizes.len() - 1;
        let (rows, cols, terms) = (self.results.rows(1), self.results.sizes[last].clone(), self.terms.rows(0));
        let mut w = Writer::new();
        let (p, to) = (w.pointer(0, dtype, false), w.pointer(1, out_type, true));
        let (m, n) = (w.size(&cols), w.size(&terms));
        let across = w.size(&self.results.strides[1][last]);
        let result = self.open(&mut w, &n);
        // A lane reads as much as its share of what a warp is served at once.
        let width = 4 / dtype.size_bytes();
        w.line(format!("OX_SHARED(float, partial, {FOLD_THREADS} * V);"));
        w.line(format!(
            "const u32 wide = ((u32){m} + {WARP} * V - 1) / ({WARP} * V), x = threadIdx.x, y = threadIdx.y;"
        ));
        w.line(format!("const u32 row = blockIdx.x / wide, col = (blockIdx.x % wide * {WARP} + x) * V;"));
        let at = self.results.emit_offsets(&mut w, "row", 1, "");
        w.lines(&format!(
            "float own[V];
            #pragma unroll
            for (int j = 0; j < V; ++j) own[j] = {};
            if (col < (u32){m}) for (u32 at = y; at < (u32){n}; at += blockDim.y) {{",
            self.start
        ));
        let term = self.terms.emit_offsets(&mut w, "at", 0, "t");
        w.lines(&format!(
            "float a[V];
            load<V>(a, {p} + {} + {} + col);
            #pragma unroll
            for (int j = 0; j < V; ++j) own[j] = fold(own[j], a[j]);
            }}
            #pragma unroll
            for (int j = 0; j < V; ++j) partial[(y * V + j) * {WARP} + x] = own[j];
            __syncthreads();
            if (y != 0 || col >= (u32){m}) return;
            #pragma unroll
            for (int j = 0; j < V; ++j) {{
            float all = own[j];
            for (u32 part = 1; part < blockDim.y; ++part) all = fold(all, partial[(part * V + j) * {WARP} + x]);
            {to}[{} + (i64)(col + j) * {across}] = narrow<{}>({result});
            }}",
            at[0],
            term[0],
            at[1],
            super::c_type(out_type)
        ));
        let vector = Vector { width, cols: cols.clone(), operands: self.operands(&self.results.strides[0][..last]) };
        w.finish_vector(from, out_type, Grid::Columns { rows, cols, terms }, FOLD_THREADS, vector)
    }

    /// What the vector form asks of the operand, whose other dimensions have these strides.
    fn operands(&self, others: &[Dim]) -> Vec<(usize, usize, Vec<Dim>)> {
        let own = self.terms.strides[0].iter().filter(|s| !s.is(1));
        let strides = others.iter().chain(own).filter(|s| !s.is(0)).cloned().collect();
        vec![(0, self.types[0].size_bytes(), strides)]
    }
}
