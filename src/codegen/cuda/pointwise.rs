//! Pointwise loops: a thread per pack of neighbouring columns.

use super::body::{Operands, Space, emit, least_width, result_type, vector};
use super::writer::Writer;
use super::{Fused, Grid, Kernel, Provenance, THREADS};
use crate::ir::Dim;

/// A loop over a space. Operands: loads, then stores.
pub fn lower_loop(fused: Fused<'_>, from: &Provenance) -> Kernel {
    let views = || fused.loads.iter().chain(fused.stores);
    let mut space = Space::new(fused.space, views(), 0);
    if space.sizes.is_empty() {
        space.sizes.push(Dim::constant(1));
        space.strides.iter_mut().for_each(|s| s.push(Dim::constant(1)));
    }
    let (cols, rows) = (space.sizes[space.sizes.len() - 1].clone(), space.rows(1));
    let columns: Vec<Dim> = space.strides.iter().map(|s| s[s.len() - 1].clone()).collect();
    let mut w = Writer::new();
    let (row_count, col_count) = (w.size(&rows), w.size(&cols));
    w.line(format!("const u32 packs = ((u32){col_count} + V - 1) / V;"));
    w.line("const u32 thread = blockIdx.x * blockDim.x + threadIdx.x;");
    w.line(format!("if (thread >= (u32){row_count} * packs) return;"));
    w.line("const u32 row = thread / packs, col = thread % packs * V;");
    let offsets = space.emit_offsets(&mut w, "row", 1, "");
    let operands = Operands {
        fused,
        first: 0,
        offsets,
        columns,
        at_hand: Vec::new(),
        col: "col",
        width: "V",
        acc: None,
        row_scalars: ["0.0f", "0.0f"],
    };
    emit(&mut w, &operands);
    let vector = vector(&fused, &space, 0, &cols);
    let widths = (least_width(fused.program), vector);
    w.finish_pairs(from, result_type(&fused), Grid::Packs { rows, cols }, THREADS, widths)
}
