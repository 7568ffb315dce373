//! Splits a linear layer whose result is only read in pieces by pointwise work.
//!
//! *What:* a `linear` with weight `[2N, K]` behind which two slices are gated against each other becomes two, over slices of
//! the weight, which are free views. *Why faster:* `a * gelu(b)` becomes the epilogue of the second, and the
//! `[tokens, 2N]` intermediate, the largest of a transformer block, is written once at half the size instead of written,
//! sliced and read. *Requires:* chunks are slices. *Guarantees:* the same sums in the same order. A projection
//! whose pieces go to attention stays whole: there the pieces are strided views of one result. So does one of a single row
//! per sample (modulation).
//!
//! ```text
//! %3: f16[2,64,2560] = linear(%0, %1, %2)              %3 = linear(%0, slice(%1, 0), slice(%2, 0))
//! %4: f16[2,64,1280] = slice(%3) {dim=2, start=0}      %4 = linear(%0, slice(%1, 1280), slice(%2, 1280))
//! %5: f16[2,64,1280] = slice(%3) {dim=2, start=1280}   %5 = gelu(%4)
//! %6: f16[2,64,1280] = mul(%4, gelu(%5))          ->   %6 = mul(%3, %5)
//! ```

use super::{Pass, PassCtx};
use crate::error::Result;
use crate::ir::{Changed, Dim, Editor, Graph, Op, ValueId};

/// This pass.
pub const PASS: Pass = Pass { name: "split_projections", run };

/// Most pieces: each reads the whole operand again.
const MAX_PIECES: usize = 4;
/// Fewest columns of a piece: below, a product is too narrow to run well.
const MIN_COLUMNS: i64 = 64;

fn run(graph: &Graph, _: &PassCtx) -> Result<(Graph, Changed)> {
    let users = graph.users();
    let mut is_output = vec![false; graph.nodes.len()];
    graph.outputs.iter().for_each(|o| is_output[o.index()] = true);
    let mut edit = Editor::new(graph, PASS.name);
    for v in graph.values() {
        edit.copy(v);
        let Some((linear, start)) = piece(graph, v) else { continue };
        if is_output[linear.index()] || !is_worth_it(graph, linear, &users) {
            continue;
        }
        let new = emit(&mut edit, graph, v, linear, start);
        edit.replace(v, new, "piece of a linear");
    }
    Ok(edit.finish())
}

/// The linear that `v` is a run of columns of, and the first column.
fn piece(g: &Graph, v: ValueId) -> Option<(ValueId, i64)> {
    let node = g.node(v);
    let Op::Slice { dim, start, step: 1 } = &node.op else { return None };
    let linear = node.inputs[0];
    let fits = g.op(linear) == &Op::Linear && *dim + 1 == node.ty.rank();
    Some((linear, start.as_constant()?)).filter(|_| fits)
}

fn is_worth_it(g: &Graph, linear: ValueId, users: &[Vec<ValueId>]) -> bool {
    let pieces = &users[linear.index()];
    let ty = g.ty(linear);
    let many_rows = ty.rank() >= 3 && !ty.shape[ty.rank() - 2].is(1);
    let is_piece = |v: &ValueId| {
        let columns = g.ty(*v).shape[ty.rank() - 1].as_constant();
        piece(g, *v).is_some() && columns.is_some_and(|c| c >= MIN_COLUMNS)
    };
    let feeds_pointwise = |v: &ValueId| users[v.index()].iter().any(|u| g.op(*u).is_pointwise());
    many_rows
        && (2..=MAX_PIECES).contains(&pieces.len())
        && pieces.iter().all(is_piece)
        && pieces.iter().all(feeds_pointwise)
        && columns_covered(g, pieces, ty.rank() - 1) == ty.shape[ty.rank() - 1].as_constant()
}

/// Columns of all pieces together: equal to the whole, no column is computed twice or for nothing.
fn columns_covered(g: &Graph, pieces: &[ValueId], last: usize) -> Option<i64> {
    pieces.iter().map(|p| g.ty(*p).shape[last].as_constant()).sum()
}

fn emit(edit: &mut Editor<'_>, g: &Graph, v: ValueId, linear: ValueId, start: i64) -> ValueId {
    let ty = g.ty(v).clone();
    let columns = ty.shape[ty.rank() - 1].clone();
    edit.at(linear);
    let mut operands = vec![edit.get(g.node(linear).inputs[0])];
    for &w in &g.node(linear).inputs[1..] {
        let mut shape = g.ty(w).shape.clone();
        shape[0] = columns.clone();
        let whole = edit.get(w);
        let rows = Op::Slice { dim: 0, start: Dim::constant(start), step: 1 };
        operands.push(edit.emit(rows, &[whole], g.ty(w).dtype, shape));
    }
    edit.emit(Op::Linear, &operands, ty.dtype, ty.shape)
}
