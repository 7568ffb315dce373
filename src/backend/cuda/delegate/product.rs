//! Products for cuBLASLt.

use super::super::cublaslt::{self, Activation, Matrix};
use super::super::lower::Place;
use super::{A_RESULT, Link, Operands, Out, Refusal, alignment, chain, is_full, is_per_column};
use crate::ir::DType;
use crate::plan::{Access, ConcreteAccess, Step};
use crate::select::Kernel;
use crate::{Error, Result};

use oxidiff_kernels::tile::{TileProgram, Unary};

/// A product over leading dimensions that do not walk with one stride is made of at most this many calls.
pub const MOST_CALLS: usize = 16;

/// `activation(sums + bias + residual)`: indices into the step's loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epilogue {
    bias: Option<usize>,
    residual: Option<usize>,
    activation: Activation,
}

/// The epilogue of cuBLASLt that computes all of a body, if there is one.
pub(super) fn epilogue_of(step: &Step, program: &TileProgram, dtype: DType) -> Option<Epilogue> {
    let ([store], true) = (step.stores.as_slice(), step.stores.iter().all(|s| is_full(s, step))) else { return None };
    if store.dtype != dtype {
        return None;
    }
    let mut epilogue = Epilogue::default();
    for link in chain(program, dtype)? {
        if epilogue.activation != Activation::None {
            return None;
        }
        match link {
            Link::Add(load) => {
                let access = step.loads.get(load).filter(|a| a.dtype == dtype)?;
                if is_per_column(access, step) && epilogue.bias.is_none() {
                    epilogue.bias = Some(load);
                } else if is_full(access, step) && epilogue.residual.is_none() {
                    epilogue.residual = Some(load);
                } else {
                    return None;
                }
            }
            Link::Apply(Unary::GeluTanh) => epilogue.activation = Activation::GeluTanh,
            Link::Apply(_) => return None,
        }
    }
    // Where the residual shares the result's memory, each element must be where the result's is.
    if let Some(load) = epilogue.residual.map(|at| &step.loads[at])
        && load.buffer == store.buffer
        && !load.is_same_place(store)
    {
        return None;
    }
    Some(epilogue)
}

/// A product with numbers.
pub(super) struct ProductShape {
    pub problem: cublaslt::Problem,
    pub operands: Operands,
}

/// A leading dimension of a product: its size, and each operand's stride (x, w, result, residual).
type Lead = (usize, [isize; 4]);

/// Joins the innermost dimensions that all walk with one stride each; gives size and strides, and what is left outside.
fn join(lead: &[Lead], may_join: impl Fn(&Lead) -> bool) -> (Lead, &[Lead]) {
    let mut joined: Option<Lead> = None;
    let mut left = lead;
    while let [outside @ .., next] = left {
        if !may_join(next) {
            break;
        }
        joined = Some(match joined {
            None => *next,
            Some((size, strides)) => {
                let follows = strides.iter().zip(next.1).all(|(inner, outer)| size as isize * inner == outer);
                if !follows {
                    break;
                }
                (size * next.0, strides)
            }
        });
        left = outside;
    }
    (joined.unwrap_or((1, [0; 4])), left)
}

/// A row-major matrix, or a turned one: rows and columns, and the stride along each.
pub fn matrix(rows: (u64, isize), columns: (u64, isize), batch: isize) -> Option<Matrix> {
    let plain = |stride: isize| Matrix { stride: stride as i64, batch: batch as i64, ..Matrix::default() };
    let is_side_by_side = |(size, stride): (u64, isize)| size == 1 || stride == 1;
    let walks = |(size, stride): (u64, isize), across: u64| match size {
        1 => Some(across as isize),
        _ => (stride >= across as isize).then_some(stride),
    };
    if is_side_by_side(columns)
        && let Some(stride) = walks(rows, columns.0)
    {
        return Some(plain(stride));
    }
    let stride = if is_side_by_side(rows) { walks(columns, rows.0) } else { None };
    stride.map(|stride| Matrix { is_turned: true, ..plain(stride) })
}

impl ProductShape {
    pub fn of(
        step: &Step,
        bindings: &[i64],
        (out, out_dtype): (Out, DType),
        epilogue: &Epilogue,
    ) -> Result<std::result::Result<Self, Refusal>> {
        let concrete = |a: &Access| a.concrete(bindings);
        let space = step.space.iter().map(|d| d.eval(bindings).map(|d| d as usize)).collect::<Result<Vec<usize>>>()?;
        let ([x, w], [lead @ .., n]) = (step.operands.as_slice(), space.as_slice()) else {
            return Err(Error::invalid("a product has two operands and columns"));
        };
        let (x, w) = (concrete(x)?, concrete(w)?);
        let is_linear = step.kernel == Kernel::Linear;
        let Some(&k) = x.shape.last() else { return Err(Error::invalid("a product has terms")) };
        let x_strides = x.strides_in(&[lead, &[k]].concat());
        let last = w.strides.len() - 1;
        let (w_k, w_n) =
            if is_linear { (w.strides[last], w.strides[last - 1]) } else { (w.strides[last - 1], w.strides[last]) };
        let w_lead = match is_linear {
            true => vec![0; lead.len()],
            false => {
                let batch = &lead[..lead.len() - 1];
                let mut strides = w.strides_in(&[batch, &[k, *n]].concat());
                strides.truncate(batch.len());
                strides.push(0);
                strides
            }
        };
        let dense: Vec<isize> = (0..space.len()).map(|i| space[i + 1..].iter().product::<usize>() as isize).collect();
        let store = concrete(&step.stores[0])?;
        let out_strides = if out == Out::Store { store.strides_in(&space) } else { dense };
        let residual = epilogue.residual.map(|at| concrete(&step.loads[at])).transpose()?;
        let residual_strides = residual.as_ref().map_or_else(|| out_strides.clone(), |r| r.strides_in(&space));
        let dims: Vec<Lead> = (0..lead.len())
            .map(|i| (lead[i], [x_strides[i], w_lead[i], out_strides[i], residual_strides[i]]))
            .filter(|(size, _)| *size != 1)
            .collect();
        let (rows, outside) = join(&dims, |(_, strides)| strides[1] == 0);
        let (batch, repeated) = join(outside, |_| true);
        let calls = repeated.iter().map(|(size, _)| size).product::<usize>();
        if calls > MOST_CALLS {
            return Ok(Err(format!("its leading dimensions would take {calls} calls")));
        }
        let (m, n, k) = (rows.0 as u64, *n as u64, k as u64);
        if m == 0 || n == 0 || k == 0 || batch.0 == 0 || calls == 0 {
            return Ok(Err("it is empty".to_owned()));
        }
        let column = |strides: &[isize]| strides.last().copied().unwrap_or(1);
        let x_matrix = matrix((m, rows.1[0]), (k, column(&x_strides)), batch.1[0]);
        let w_matrix = matrix((k, w_k), (n, w_n), batch.1[1]);
        let out_matrix = matrix((m, rows.1[2]), (n, column(&out_strides)), batch.1[2]).filter(|m| !m.is_turned);
        let added = matrix((m, rows.1[3]), (n, column(&residual_strides)), batch.1[3]).filter(|m| !m.is_turned);
        let (Some(x_matrix), Some(w_matrix), Some(out_matrix), Some(added)) = (x_matrix, w_matrix, out_matrix, added)
        else {
            return Ok(Err("an operand has neighbours neither along rows nor along columns".to_owned()));
        };
        let out_size = out_dtype.size_bytes() as isize;
        let sizes = [[x.dtype.size_bytes() as isize; 2].as_slice(), &[out_size; 3]].concat();
        let offsets: Vec<Vec<isize>> = (0..calls)
            .map(|call| {
                let mut bytes = vec![0; 5];
                let mut rest = call;
                for (count, strides) in repeated.iter().rev() {
                    let index = (rest % count) as isize;
                    rest /= count;
                    (0..4).for_each(|operand| bytes[operand] += index * strides[operand] * sizes[operand]);
                }
                bytes
            })
            .collect();
        let bias = epilogue.bias.map(|at| concrete(&step.loads[at])).transpose()?;
        let align = |access: Option<&ConcreteAccess>, operand: usize, batch: isize| {
            let own = access.map_or(0, |a| a.offset * sizes[operand]);
            alignment(offsets.iter().map(|o| own + o[operand]).chain([batch * sizes[operand]]))
        };
        let out_access = (out == Out::Store).then_some(&store);
        let aligns = vec![
            align(Some(&x), 0, batch.1[0]),
            align(Some(&w), 1, batch.1[1]),
            align(out_access, 2, batch.1[2]),
            align(residual.as_ref(), 3, batch.1[3]),
            align(bias.as_ref(), 4, 0),
        ];
        let known = |m: Matrix, operand: usize| Matrix { align_bytes: aligns[operand] as u32, ..m };
        let problem = cublaslt::Problem {
            dtype: x.dtype,
            out_dtype,
            tf32: false,
            m,
            n,
            k,
            batch: i32::try_from(batch.0).map_err(|_| Error::invalid("a batch is too large"))?,
            x: known(x_matrix, 0),
            w: known(w_matrix, 1),
            residual: residual.is_some().then_some(known(added, 3)),
            out: known(out_matrix, 2),
            bias: bias.is_some().then_some(aligns[4] as u32),
            activation: epilogue.activation,
            scale_bits: 1f32.to_bits(),
            workspace_bytes: 0,
        };
        let load = |at: Option<usize>| at.map_or(Place::Missing, |at| Place::of(&step.loads[at]));
        let [left, right] = [0, 1].map(|at| Place::of(&step.operands[at]));
        let result = if out == Out::Store { Place::of(&step.stores[0]) } else { Place::Scratch(0) };
        let places = vec![left, right, result, load(epilogue.residual), load(epilogue.bias)];
        let out_bytes = if out == Out::Store { 0 } else { space.iter().product::<usize>() * out_size as usize };
        Ok(Ok(Self {
            problem,
            operands: Operands {
                places,
                align_bytes: aligns,
                calls: offsets,
                scratch: [(out_bytes, A_RESULT), (0, "")],
            },
        }))
    }
}
