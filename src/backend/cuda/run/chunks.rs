//! Attention as products, for what cuDNN's fused engines do not take: f32, devices before sm_80, wide heads.
//!
//! The scores of a chunk of queries, all heads of an image at once, go to the step's workspace in f32; a generated kernel
//! makes shares of them, in the type of the values, of the keys that masks and causality leave; a second product adds up the
//! values. A chunk is as large as [`Delegates::scores_bytes`] allows, so memory does not grow with the square of the image.

use std::sync::Arc;

use super::super::cublaslt::{Activation, Matrix, Problem, Product};
use super::super::delegate::product::matrix;
use super::super::delegate::{self, Delegates, Operands, Planned, WORKSPACE_ALIGN_BYTES, alignment};
use super::super::driver::{StreamHandle, launch};
use super::super::lower::{Place, shares_of, symbol};
use super::call::{Call, Word, vector_form, words};
use super::maker::Maker;
use crate::Result;
use crate::codegen::cuda::Arg;
use crate::ir::{DType, Op};
use crate::plan::{Access, Step};

/// Fewer queries or keys than this are not worth three launches.
const LEAST_ROWS: usize = 64;

/// Chunks of one size.
#[derive(Debug)]
struct Piece {
    /// Queries.
    rows: usize,
    scores: Arc<dyn Planned>,
    softmax: Call,
    shares: Arc<dyn Planned>,
}

/// A planned attention. Operands: queries, keys, values, result, and the mask if there is one.
#[derive(Debug)]
pub(super) struct Chunks {
    /// One after the other.
    pieces: Vec<(Arc<Piece>, usize)>,
    /// Bytes from one query to the next, from one result to the next, and from one row of the mask to the next.
    steps: [i64; 3],
    /// Of a chunk's scores, its shares, and the products' workspace.
    bytes: [usize; 3],
}

impl Planned for Chunks {
    fn library(&self) -> &'static str {
        "cuBLASLt"
    }

    fn workspace_bytes(&self) -> usize {
        self.bytes.iter().sum()
    }

    fn plans(&self) -> Vec<(usize, usize)> {
        let products = self.pieces.iter().flat_map(|(piece, _)| [&piece.scores, &piece.shares]);
        products.flat_map(|product| product.plans()).collect()
    }

    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()> {
        let &[q, k, v, out, ref mask @ ..] = addresses else {
            return Err(crate::Error::invalid("an attention has four operands"));
        };
        let mask = mask.first().copied().unwrap_or_default();
        let [scores, shares] = [workspace, workspace + self.bytes[0] as u64];
        let rest = shares + self.bytes[1] as u64;
        for (piece, first) in &self.pieces {
            let at = |base: u64, step: i64| base.wrapping_add_signed(*first as i64 * step);
            let mut softmax = piece.softmax.bind(&[scores, shares, at(mask, self.steps[2]), *first as u64]);
            // SAFETY: the caller's promise for the operands; scores, shares and what the products need lie side by side in
            // the workspace.
            unsafe {
                piece.scores.run(&[at(q, self.steps[0]), k, scores, 0, 0], rest, stream)?;
                launch(softmax.function, &softmax.geometry, &mut softmax.words, stream)?;
                piece.shares.run(&[shares, v, at(out, self.steps[1]), 0, 0], rest, stream)?;
            }
        }
        Ok(())
    }
}

/// What runs on what, or why it cannot.
type Ready = std::result::Result<(Arc<dyn Planned>, Operands), String>;

/// Sizes and strides of an operand: leading dimensions, rows, columns.
struct Operand {
    lead: Vec<isize>,
    rows: (u64, isize),
    columns: (u64, isize),
    offset: isize,
    size: isize,
}

impl Maker<'_> {
    fn operand(&self, access: &Access, lead: &[usize]) -> Result<Operand> {
        let own = access.concrete(self.bindings)?;
        let [.., rows, columns] = own.shape[..] else { return Err(crate::Error::invalid("an attention of vectors")) };
        let mut strides = own.strides_in(&[lead, &[rows, columns]].concat());
        let (column, row) = (strides.pop().unwrap_or(1), strides.pop().unwrap_or(1));
        Ok(Operand {
            lead: strides,
            rows: (rows as u64, row),
            columns: (columns as u64, column),
            offset: own.offset,
            size: access.dtype.size_bytes() as isize,
        })
    }

    /// A mask, broadcast.
    fn spread(&self, mask: &Access, lead: &[usize], [rows, keys]: [usize; 2]) -> Result<Operand> {
        let own = mask.concrete(self.bindings)?;
        let mut lead = own.strides_in(&[lead, &[rows, keys]].concat());
        let (by_key, by_row) = (lead.pop().unwrap_or(0), lead.pop().unwrap_or(0));
        let (rows, columns) = ((rows as u64, by_row), (keys as u64, by_key));
        Ok(Operand { lead, rows, columns, offset: own.offset, size: mask.dtype.size_bytes() as isize })
    }

    /// An attention by products; the reason where it cannot be.
    pub(super) fn chunks(&self, step: &Step, delegates: &Delegates) -> Result<Ready> {
        let refused = |why: &str| Ok(Err(why.to_owned()));
        let plan = &self.program.plan;
        let Some(Op::ScaledDotProductAttention { scale, .. }) = step.root.map(|r| plan.graph.op(r)) else {
            return refused("it is no attention");
        };
        let ([q, k, v, mask @ ..], [out]) = (step.operands.as_slice(), step.stores.as_slice()) else {
            return refused("it has other operands");
        };
        let dtype = q.dtype;
        let kind = shares_of(plan, step);
        let softmax = self.program.lowered.shares.iter().find(|(of, _)| Some(*of) == kind).map(|(_, launch)| launch);
        let (Some(softmax), true) = (softmax, [k, v, out].iter().all(|a| a.dtype == dtype)) else {
            return refused("its operands differ in type");
        };
        let shape = out.concrete(self.bindings)?.shape.to_vec();
        let lead = &shape[..shape.len() - 2];
        let mut places = vec![Place::of(q), Place::of(k), Place::of(v), Place::of(out)];
        places.extend(mask.iter().map(Place::of));
        let [q, k, v, out] =
            [self.operand(q, lead)?, self.operand(k, lead)?, self.operand(v, lead)?, self.operand(out, lead)?];
        let (rows, keys) = (q.rows.0 as usize, k.rows.0 as usize);
        let mask = mask.first().map(|mask| self.spread(mask, lead, [rows, keys])).transpose()?;
        if rows < LEAST_ROWS || keys < LEAST_ROWS {
            return refused("it has few rows");
        }
        let (heads, outside) = lead.split_last().map_or((1, lead), |(heads, outside)| (*heads, outside));
        let calls = outside.iter().product::<usize>();
        if calls > delegate::product::MOST_CALLS {
            return refused("its leading dimensions would take many calls");
        }
        let all: Vec<&Operand> = [&q, &k, &v, &out].into_iter().chain(&mask).collect();
        let per_head: Vec<isize> = all.iter().map(|o| o.lead.last().copied().unwrap_or(0)).collect();
        // Without leading dimensions there is one call, at no offset.
        let offsets: Vec<Vec<isize>> = (0..calls)
            .map(|call| {
                let mut rest = call;
                let mut bytes = vec![0isize; all.len()];
                for (d, count) in outside.iter().enumerate().rev() {
                    let index = (rest % count) as isize;
                    rest /= count;
                    all.iter().zip(&mut bytes).for_each(|(o, bytes)| *bytes += index * o.lead[d] * o.size);
                }
                bytes
            })
            .collect();
        let row_bytes = heads * keys * 4;
        let most = (delegates.scores_bytes() / row_bytes).clamp(1, rows);
        let chunk = rows.div_ceil(rows.div_ceil(most));
        let steps = [q.rows.1 * q.size, out.rows.1 * out.size, mask.as_ref().map_or(0, |m| m.rows.1 * m.size)];
        let mut aligns: Vec<usize> = (0..4)
            .map(|at| {
                let (o, step) = (all[at], [steps[0], 0, 0, steps[1]][at]);
                let own = offsets.iter().map(|offset| o.offset * o.size + offset[at]);
                alignment(own.chain([per_head[at] * o.size, chunk as isize * step]))
            })
            .collect();
        // The kernel reads a mask element by element.
        aligns.extend(mask.iter().map(|_| 1));
        let (own, wide) = (dtype.size_bytes(), WORKSPACE_ALIGN_BYTES as u32);
        let known = |m: Option<Matrix>, align_bytes: u32| m.map(|m| Matrix { align_bytes, ..m });
        let batch = i32::try_from(heads).map_err(|_| crate::Error::invalid("an attention of too many heads"))?;
        let tf32 = plan.options.numerics.tf32_products;
        let workspace_bytes = delegate::workspace_bytes(self.program.device.arch());
        let piece = |rows: usize| -> Result<std::result::Result<Piece, String>> {
            let m = rows as u64;
            let n = keys as u64;
            let between = (rows * keys) as isize;
            let matrices = [
                known(matrix((m, q.rows.1), q.columns, per_head[0]), aligns[0] as u32),
                known(matrix((k.columns.0, k.columns.1), (n, k.rows.1), per_head[1]), aligns[1] as u32),
                known(matrix((m, keys as isize), (n, 1), between), wide.min(16)),
                known(matrix((n, v.rows.1), v.columns, per_head[2]), aligns[2] as u32),
                known(matrix((m, out.rows.1), out.columns, per_head[3]).filter(|m| !m.is_turned), aligns[3] as u32),
            ];
            let [Some(q_matrix), Some(k_matrix), Some(between), Some(v_matrix), Some(out_matrix)] = matrices else {
                return Ok(Err("an operand has neighbours neither along rows nor along columns".to_owned()));
            };
            let scores = Problem {
                dtype,
                out_dtype: DType::F32,
                tf32,
                m,
                n,
                k: q.columns.0,
                batch,
                x: q_matrix,
                w: k_matrix,
                residual: None,
                out: between,
                bias: None,
                activation: Activation::None,
                scale_bits: (*scale as f32).to_bits(),
                workspace_bytes,
            };
            let shares = Problem {
                out_dtype: dtype,
                n: v.columns.0,
                k: n,
                x: between,
                w: v_matrix,
                out: out_matrix,
                scale_bits: 1f32.to_bits(),
                ..scores
            };
            let made: std::result::Result<[Arc<Product>; 2], String> =
                delegates.product(&scores).and_then(|a| Ok([a, delegates.product(&shares)?]));
            let [scores, shares] = match made {
                Ok(made) => made,
                Err(why) => return Ok(Err(why)),
            };
            let [by_head, by_row, by_key] = mask.as_ref().map_or([0; 3], |m| [per_head[4], m.rows.1, m.columns.1]);
            // The first query is the chunk's.
            let sizes = [heads as i64, rows as i64, keys as i64, 0, by_head as i64, by_row as i64, by_key as i64];
            let word = |(arg, word): (&Arg, Word)| match arg {
                Arg::Size(dim) if *dim == symbol(3) => Word::Told(3),
                _ => word,
            };
            let words = softmax.args.iter().zip(words(&softmax.args, &sizes)?).map(word).collect();
            let Some(plain) = softmax.grid.geometry(&sizes, 1)? else { return Ok(Err("it is empty".to_owned())) };
            let softmax = Call {
                step: 0,
                entry: self.program.entries[softmax.kernel],
                words,
                places: vec![Some((0, 0)), Some((1, 0)), Some((2, 0))],
                plain,
                vector: vector_form(softmax, &sizes)?,
                only_if: None,
            };
            Ok(Ok(Piece { rows, scores, softmax, shares }))
        };
        let mut pieces: Vec<(Arc<Piece>, usize)> = Vec::new();
        let mut first = 0;
        while first < rows {
            let wanted = chunk.min(rows - first);
            let known = pieces.iter().find(|(piece, _)| piece.rows == wanted).map(|(piece, _)| piece.clone());
            let next = match known {
                Some(piece) => piece,
                None => match piece(wanted)? {
                    Ok(piece) => Arc::new(piece),
                    Err(why) => return Ok(Err(why)),
                },
            };
            pieces.push((next, first));
            first += wanted;
        }
        let round = |bytes: usize| bytes.next_multiple_of(WORKSPACE_ALIGN_BYTES);
        let rest = pieces.iter().map(|(p, _)| p.scores.workspace_bytes().max(p.shares.workspace_bytes())).max();
        let numbers = heads * chunk * keys;
        let bytes = [round(numbers * 4), round(numbers * own), rest.unwrap_or(0)];
        let chunks = Chunks { pieces, steps: steps.map(|s| s as i64), bytes };
        let operands = Operands { places, align_bytes: aligns, calls: offsets, scratch: [(0, ""); 2] };
        Ok(Ok((Arc::new(chunks), operands)))
    }
}
