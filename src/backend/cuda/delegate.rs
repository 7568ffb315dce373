//! Steps that a library computes.
//!
//! When a plan is lowered, [`Delegate`] says what of a step a library may do: the product or convolution itself, and as
//! much of the pointwise work that follows as the library is known to compute as the plan means it, all of it or nothing;
//! the rest is one generated kernel. When sizes are known, the library is asked; what it refuses runs on the step's own
//! kernels, and the reason is kept ([`StepChoice`]).

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use oxidiff_kernels::tile::{Binary, Instr, Reg, Source, TileProgram, Unary};

use super::cublaslt::{self, Activation, CublasLt, Matrix};
use super::driver::{Device, StreamHandle};
use super::lower::{Launch, Place};
use crate::backend::StepChoice;
use crate::codegen::tile::kernel_type;
use crate::ir::DType;
use crate::plan::{Access, ConcreteAccess, Step};
use crate::select::Kernel;
use crate::{Error, Result};

/// Addresses of operands are taken to be multiples of this many bytes; where one is not, the step's own kernels run.
const ALIGN_BYTES: usize = 16;
/// A product over leading dimensions that do not walk with one stride is made of at most this many calls.
const MOST_CALLS: usize = 16;
/// Most workspace of one call; the larger one is for devices that have use for it (cuBLAS documentation,
/// `CUBLAS_WORKSPACE_CONFIG`).
const WORKSPACE_BYTES: [usize; 2] = [4 << 20, 32 << 20];

/// Why a library is not asked, or does not do it.
pub type Refusal = String;

/// What a library has made ready.
pub trait Planned: Send + Sync + std::fmt::Debug {
    /// Its name.
    fn library(&self) -> &'static str;

    /// Memory that a run needs besides its operands.
    fn workspace_bytes(&self) -> usize;

    /// Runs on `stream`.
    ///
    /// # Safety
    /// `addresses` must be those of the operands, in the order that the implementation states, valid for what was planned;
    /// the workspace must have [`Planned::workspace_bytes`].
    ///
    /// # Errors
    /// What the library says.
    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()>;
}

/// What the user allows libraries to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Numerics {
    /// Products of f32 may round their operands to TF32.
    pub tf32: bool,
}

/// The libraries of one device, opened when they are first asked for.
#[derive(Debug, Default)]
pub struct Delegates {
    numerics: Numerics,
    cublaslt: OnceLock<std::result::Result<Arc<CublasLt>, Refusal>>,
    /// Products that some specialization holds: layers of one shape share one.
    products: Mutex<HashMap<cublaslt::Problem, Weak<cublaslt::Product>>>,
}

impl Delegates {
    /// The libraries that this process has.
    pub fn new(numerics: Numerics) -> Self {
        Self { numerics, ..Self::default() }
    }

    /// None: every step runs on generated kernels.
    pub fn none() -> Self {
        let delegates = Self::default();
        let _ = delegates.cublaslt.set(Err("libraries are switched off".to_owned()));
        delegates
    }

    fn cublaslt(&self) -> std::result::Result<&Arc<CublasLt>, Refusal> {
        let open = || match &super::found().cublaslt {
            Ok(_) => CublasLt::open(),
            Err(reason) => Err(reason.clone()),
        };
        self.cublaslt.get_or_init(open).as_ref().map_err(Clone::clone)
    }

    fn product(
        &self,
        library: &Arc<CublasLt>,
        problem: &cublaslt::Problem,
    ) -> std::result::Result<Arc<cublaslt::Product>, Refusal> {
        let mut products = self.products.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = products.get(problem).and_then(Weak::upgrade) {
            return Ok(known);
        }
        products.retain(|_, product| product.strong_count() > 0);
        let made = Arc::new(library.plan(problem)?);
        products.insert(*problem, Arc::downgrade(&made));
        Ok(made)
    }
}

/// What a library may do of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Delegate {
    work: Work,
    /// Where the library writes.
    out: Out,
    /// In which type.
    dtype: DType,
    /// The step's pointwise work, where the library does not do it: reads and writes `out` and the step's operands.
    pub after: Option<Launch>,
}

#[derive(Clone, Debug, PartialEq)]
enum Work {
    Product(Epilogue),
}

/// The place of a library's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Out {
    /// The step's first store.
    Store,
    /// Scratch memory of the step, dense.
    Scratch,
}

/// `activation(sums + bias + residual)`: indices into the step's loads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Epilogue {
    bias: Option<usize>,
    residual: Option<usize>,
    activation: Activation,
}

/// A step that a library is ready for.
#[derive(Debug)]
pub struct Ready {
    /// What runs.
    pub planned: Arc<dyn Planned>,
    /// On what.
    pub operands: Operands,
}

/// Operands of a library, in the order of [`Planned::run`].
#[derive(Debug)]
pub struct Operands {
    /// Where they lie.
    pub places: Vec<Place>,
    /// Bytes that the address of each must be a multiple of.
    pub align_bytes: Vec<usize>,
    /// Bytes to add to the addresses for each call.
    pub calls: Vec<Vec<isize>>,
    /// Bytes of the step's scratch memory for the result, where it goes there.
    pub out_bytes: usize,
}

impl Delegate {
    /// What a library may do of `step`, whose root has type `root`. `after` makes the kernel for the pointwise work over a result that lies at the
    /// given place.
    ///
    /// # Errors
    /// What `after` says.
    pub fn new(step: &Step, root: DType, after: &mut dyn FnMut(Out, DType) -> Result<Launch>) -> Result<Option<Self>> {
        let Some(body) = &step.body else { return Ok(None) };
        let [x, w] = step.operands.as_slice() else { return Ok(None) };
        let is_product = matches!(step.kernel, Kernel::Linear | Kernel::Matmul);
        let is_known =
            matches!(x.dtype, DType::F32 | DType::F16 | DType::BF16) && (root == x.dtype || root == DType::F32);
        if !is_product || x.dtype != w.dtype || !is_known {
            return Ok(None);
        }
        if let Some(epilogue) = product_epilogue(step, &body.program, x.dtype).filter(|_| root == x.dtype) {
            return Ok(Some(Self { work: Work::Product(epilogue), out: Out::Store, dtype: root, after: None }));
        }
        let out = raw_result(step, root);
        let after = Some(after(out, root)?);
        Ok(Some(Self { work: Work::Product(Epilogue::default()), out, dtype: root, after }))
    }

    /// Asks the library, for these sizes.
    ///
    /// # Errors
    /// The reason why the step's own kernels must run.
    pub fn plan(
        &self,
        step: &Step,
        bindings: &[i64],
        device: &Device,
        delegates: &Delegates,
    ) -> std::result::Result<Ready, Refusal> {
        let Work::Product(epilogue) = &self.work;
        let library = delegates.cublaslt()?;
        let shape = ProductShape::of(step, bindings, (self.out, self.dtype), epilogue).map_err(|e| e.to_string())??;
        let workspace_bytes = WORKSPACE_BYTES[usize::from(device.arch() >= 90)];
        let tf32 = delegates.numerics.tf32;
        let problem = cublaslt::Problem { workspace_bytes, tf32, ..shape.problem };
        Ok(Ready { planned: delegates.product(library, &problem)?, operands: shape.operands })
    }
}

/// The instructions of a body that follow the sums, one operand each: added loads and functions.
enum Link {
    Add(usize),
    Apply(Unary),
}

/// A body that is a chain over the accumulators, stored once as `dtype`; `None` if it is anything else.
fn chain(program: &TileProgram, dtype: DType) -> Option<Vec<Link>> {
    if program.stores.as_slice() != [kernel_type(dtype)?] {
        return None;
    }
    let mut at: Option<Reg> = None;
    let mut is_rounded = false;
    let mut loaded: Vec<(Reg, usize)> = Vec::new();
    let mut links = Vec::new();
    for instr in &program.instrs {
        // Rounding to the result's type is what storing does; nothing may come between.
        if is_rounded && !matches!(instr, Instr::Store { .. }) {
            return None;
        }
        match *instr {
            Instr::Load { dst, src: Source::Acc } if at.is_none() => at = Some(dst),
            Instr::Load { dst, src: Source::Memory(i) } => {
                loaded.retain(|(reg, _)| *reg != dst);
                loaded.push((dst, i as usize));
            }
            Instr::Binary { dst, op: Binary::Add, a, b } => {
                let other = if Some(a) == at { b } else { a };
                if Some(if other == a { b } else { a }) != at {
                    return None;
                }
                links.push(Link::Add(loaded.iter().find(|(reg, _)| *reg == other)?.1));
                loaded.retain(|(reg, _)| *reg != dst && *reg != other);
                at = Some(dst);
            }
            Instr::Unary { dst, op, a } if Some(a) == at => {
                links.push(Link::Apply(op));
                at = Some(dst);
            }
            Instr::Round { dst, a, dtype: to } if Some(a) == at && Some(to) == kernel_type(dtype) => {
                is_rounded = true;
                at = Some(dst);
            }
            Instr::Store { src, .. } if Some(src) == at => {}
            _ => return None,
        }
    }
    Some(links)
}

/// The same for every row: one element per column.
fn is_per_column(load: &Access, step: &Step) -> bool {
    let columns = step.space.last();
    let lead = load.shape.len().saturating_sub(1);
    let is_flat = load.shape.iter().zip(&load.strides).take(lead).all(|(size, stride)| size.is(1) || stride.is(0));
    is_flat && load.shape.last() == columns && load.strides.last().is_some_and(|s| s.is(1))
}

/// Covers the step's space, with neighbouring columns.
fn is_full(access: &Access, step: &Step) -> bool {
    let is_walked = access.strides.iter().zip(&access.shape).all(|(stride, size)| size.is(1) || !stride.is(0));
    access.shape == step.space && is_walked && access.has_unit_columns()
}

/// The epilogue of cuBLASLt that computes all of a body, if there is one.
fn product_epilogue(step: &Step, program: &TileProgram, dtype: DType) -> Option<Epilogue> {
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

/// Where a result that needs more pointwise work goes: to the step's own result, if nothing that this work reads is lost.
fn raw_result(step: &Step, dtype: DType) -> Out {
    let fits = |store: &&Access| {
        store.dtype == dtype && is_full(store, step) && step.loads.iter().all(|l| l.buffer != store.buffer)
    };
    if step.stores.first().filter(fits).is_some() { Out::Store } else { Out::Scratch }
}

/// A product with numbers.
struct ProductShape {
    problem: cublaslt::Problem,
    operands: Operands,
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

/// Largest power of two up to [`ALIGN_BYTES`] that divides every number.
fn alignment(bytes: impl IntoIterator<Item = isize>) -> usize {
    let all = bytes.into_iter().fold(ALIGN_BYTES as isize, |all, b| all | b);
    1 << all.trailing_zeros()
}

/// A row-major matrix, or a turned one: rows and columns, and the stride along each.
fn matrix(rows: (u64, isize), columns: (u64, isize), batch: isize) -> Option<Matrix> {
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
    fn of(
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
            workspace_bytes: 0,
        };
        let load = |at: Option<usize>| at.map_or(Place::Missing, |at| Place::of(&step.loads[at]));
        let [left, right] = [0, 1].map(|at| Place::of(&step.operands[at]));
        let result = if out == Out::Store { Place::of(&step.stores[0]) } else { Place::Scratch(0) };
        let places = vec![left, right, result, load(epilogue.residual), load(epilogue.bias)];
        let out_bytes = if out == Out::Store { 0 } else { space.iter().product::<usize>() * out_size as usize };
        Ok(Ok(Self { problem, operands: Operands { places, align_bytes: aligns, calls: offsets, out_bytes } }))
    }
}

/// Who computes a step.
pub(super) fn choice(step: String, outcome: std::result::Result<&'static str, Refusal>) -> StepChoice {
    match outcome {
        Ok(library) => StepChoice { step, by: library, reason: String::new() },
        Err(reason) => StepChoice { step, by: "kernel", reason },
    }
}
