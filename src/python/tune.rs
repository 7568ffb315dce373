//! What can be tuned in a program, for `oxidiff.tune`; see the stub file.
//!
//! Trials run in the arena that runs of the program use, or before its first run in a block that takes no more than the
//! forms of weights that runs will keep: a form that needs more memory than a run is no candidate. Only where that is next
//! to nothing, because the program is small and has no budget, may a trial take [`SMALL_BYTES`] for its own time. Where a
//! weight of its own does not fit, a trial reads the module's.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use oxidiff_kernels::cpu::conv::Weight;
use oxidiff_kernels::cpu::conv_algorithm::{Algorithm, Keep, choose, cost_per_pair};
use oxidiff_kernels::cpu::conv_choice::{self, ALGORITHMS, Choice, Observed, Site};
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use pyo3::prelude::*;

use super::errors::{guarded, shielded};
use super::executable::Program;
use super::tensor::Exchange;
use dlpack_rs::ffi::DLDevice;
use oxidiff::Error;
use oxidiff::backend::cpu::weight_strides;
use oxidiff::backend::{Block, Memory, Open, SystemMemory, Tensor, derived};
use oxidiff::codegen::tile::kernel_type;
use oxidiff::runtime::arena::arena_pool;

/// Seconds of the run and of packing, and bytes used.
pub type Trial = (f64, f64, usize);

/// Adds the names of this file to the module.
pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<TuningSite>()?;
    m.add_function(wrap_pyfunction!(tuning_sites, m)?)?;
    m.add_function(wrap_pyfunction!(forget_choices, m)?)?;
    m.add("kernel_version", oxidiff_kernels::VERSION)?;
    Ok(())
}

/// One choice that a program leaves open.
#[pyclass(module = "oxidiff._native", frozen)]
pub struct TuningSite {
    observed: Observed,
    site: Site,
    count: usize,
    /// How many of these read panels that are kept.
    kept: usize,
    /// What a run uses.
    arena_bytes: usize,
    /// What a trial may use.
    limit_bytes: usize,
    isa: Isa,
    /// Memory of trials that the arena does not hold; that of all sites of a program, as long as these live.
    block: Arc<Mutex<Option<Block>>>,
    /// The slot of the weight of one of its steps, and that weight.
    slot: Option<usize>,
    weight: Option<Lent>,
    /// By form: how far its result was from the direct form's; it is compared once.
    errors: [OnceLock<f64>; ALGORITHMS.len()],
}

/// What a trial may take of a program whose arena is smaller.
const SMALL_BYTES: usize = 16 << 20;
/// Fewer channels than this leave a transformed product nothing to gain.
const LEAST_CHANNELS: usize = 64;

/// A weight of the module's, and what keeps its memory alive.
struct Lent {
    weight: Weight,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: a description of memory that is only read, as runs of the program read it, and that the owner keeps.
unsafe impl Send for Lent {}

impl TuningSite {
    /// Bytes that a trial of a form needs that packs so much at a time, and the weight that it reads unless that is one of its own.
    fn needs(&self, algorithm: Algorithm, most_bytes: usize) -> (usize, Option<Weight>) {
        let bytes = |is_given| conv_choice::memory_bytes(&self.observed, algorithm, self.isa, is_given, most_bytes);
        match &self.weight {
            Some(lent) if bytes(false) > self.limit_bytes => (bytes(true), Some(lent.weight)),
            _ => (bytes(false), None),
        }
    }

    /// Whether there is anything to choose.
    fn is_open(&self) -> bool {
        let conv = &self.observed.conv;
        let wide = conv.in_channels.min(conv.out_channels) >= LEAST_CHANNELS;
        wide && ALGORITHMS.iter().filter(|a| a.applies(conv)).count() > 1
    }
}

#[pymethods]
impl TuningSite {
    #[getter]
    fn op(&self) -> String {
        self.site.op()
    }

    #[getter]
    fn bucket(&self) -> String {
        self.site.bucket()
    }

    #[getter]
    const fn count(&self) -> usize {
        self.count
    }

    #[getter]
    fn flops(&self) -> f64 {
        let conv = &self.observed.conv;
        2.0 * conv.rows() as f64 * conv.out_channels as f64 * conv.terms() as f64
    }

    #[getter]
    const fn kept(&self) -> usize {
        self.kept
    }

    /// By form, the time that the model expects where the weight is kept packed and where every call packs it, in
    /// multiply-adds; infinite where a form does not apply.
    #[getter]
    fn expected(&self) -> PyResult<(Vec<f64>, Vec<f64>)> {
        shielded("costing candidates", || {
            let Observed { conv, dtype, weight } = self.observed;
            let pairs = (conv.out_channels * conv.in_channels / conv.groups.max(1)) as f64;
            let of = |algorithm: Algorithm, keep| match algorithm.applies(&conv) {
                true => pairs * cost_per_pair(&conv, dtype, weight, algorithm, keep),
                false => f64::INFINITY,
            };
            let all = |keep| ALGORITHMS.iter().map(|&algorithm| of(algorithm, keep)).collect();
            Ok((all(Keep::Packed), all(Keep::PerCall)))
        })
    }

    /// Index of the form that is chosen now, where the weight is kept and where it is packed by every call.
    #[getter]
    fn chosen(&self) -> PyResult<(usize, usize)> {
        shielded("choosing", || {
            let Observed { conv, dtype, weight } = self.observed;
            let of = |keep| {
                let chosen = choose(&conv, dtype, weight, keep);
                ALGORITHMS.iter().position(|&a| a == chosen).unwrap_or(0)
            };
            Ok((of(Keep::Packed), of(Keep::PerCall)))
        })
    }

    #[getter]
    fn installed(&self) -> PyResult<Option<String>> {
        shielded("choosing", || Ok(conv_choice::installed(&self.site).map(|choice| choice.to_string())))
    }

    /// Indices of the forms that can be tried.
    fn candidates(&self) -> PyResult<Vec<usize>> {
        shielded("listing candidates", || {
            let most_bytes = conv_choice::most_bytes();
            let fits = |&i: &usize| {
                let algorithm = ALGORITHMS[i];
                algorithm.applies(&self.observed.conv) && self.needs(algorithm, most_bytes).0 <= self.limit_bytes
            };
            Ok((0..ALGORITHMS.len()).filter(fits).collect())
        })
    }

    fn measure(&self, py: Python<'_>, candidate: usize) -> PyResult<Option<Trial>> {
        let is_one = self.candidates()?.contains(&candidate);
        let Some(&algorithm) = ALGORITHMS.get(candidate).filter(|_| is_one) else {
            return Ok(None);
        };
        // Asked once: the pool may get other threads meanwhile.
        let most_bytes = conv_choice::most_bytes();
        let (bytes, weight) = self.needs(algorithm, most_bytes);
        let is_compared = self.errors[candidate].get().is_none();
        let trial = py.detach(|| {
            guarded("tuning", || {
                let measure = |memory: *mut u8| {
                    let (pool, of) = (Pool::global(), &self.observed);
                    // SAFETY: the arena and the block below have `bytes`, and are this call's alone; the weight is the one of
                    // a step that was observed, and lent as long as the site lives.
                    unsafe {
                        conv_choice::measure(pool, self.isa, of, algorithm, is_compared, weight, most_bytes, memory)
                    }
                    .map_err(|e| Error::Backend { backend: "cpu", what: e.to_string() })
                };
                if bytes <= self.arena_bytes {
                    return measure(arena_pool().lend(self.arena_bytes, 0)?.ptr());
                }
                let mut block = self.block.lock().unwrap_or_else(PoisonError::into_inner);
                if block.as_ref().is_none_or(|held| held.bytes() < bytes) {
                    // Not both at once.
                    *block = None;
                    let fresh = SystemMemory.allocate(bytes, "a trial of the tuner")?;
                    // SAFETY: the block's own bytes. Their first touch must not count as part of a trial.
                    unsafe { fresh.ptr().write_bytes(0, bytes) };
                    *block = Some(fresh);
                }
                // Held until the trial ends.
                measure(block.as_ref().map_or(std::ptr::null_mut(), Block::ptr))
            })
        })?;
        let error = *self.errors[candidate].get_or_init(|| trial.error);
        let is_right = error <= conv_choice::tolerance(self.observed.dtype, self.observed.weight);
        Ok(is_right.then_some((trial.run.as_secs_f64(), trial.pack.as_secs_f64(), bytes)))
    }

    #[staticmethod]
    fn name(packed: usize, per_call: usize) -> Option<String> {
        let (&packed, &per_call) = (ALGORITHMS.get(packed)?, ALGORITHMS.get(per_call)?);
        Some(Choice { packed, per_call }.to_string())
    }

    fn install(&self, choice: &str) -> PyResult<bool> {
        shielded("choosing", || {
            let choice = Choice::parse(choice);
            if let Some(choice) = choice {
                conv_choice::install(self.site, choice);
            }
            Ok(choice.is_some())
        })
    }
}

#[pyfunction]
#[pyo3(signature = (program, sizes, weights=None))]
fn tuning_sites(
    py: Python<'_>,
    program: &Program,
    sizes: Vec<i64>,
    weights: Option<Vec<Bound<'_, PyAny>>>,
) -> PyResult<Vec<TuningSite>> {
    let (program, dl) = (program.inner(), program.place().dl);
    let mut found = py.detach(|| {
        guarded("looking for choices", || {
            let specialized = program.specialize(&sizes)?;
            let arena_bytes = specialized.workspace().bytes();
            let has_budget = program.plan.options.memory_budget.is_some();
            let small_bytes = if has_budget { 0 } else { SMALL_BYTES };
            let kept_bytes: usize = specialized.kept().iter().map(|form| form.bytes).sum();
            let free_bytes = kept_bytes.min(derived::limit()).saturating_sub(derived::bytes());
            let limit_bytes = arena_bytes.max(small_bytes).max(free_bytes);
            let block = Arc::default();
            let mut found: Vec<TuningSite> = Vec::new();
            let isa = program.plan.target.isa;
            let mut index: HashMap<Site, usize> = HashMap::new();
            for Open { observed, is_kept, slot } in specialized.choices() {
                let site = Site::of(&observed.conv, observed.dtype, observed.weight);
                let at = *index.entry(site).or_insert_with(|| {
                    let errors = Default::default();
                    let block = Arc::clone(&block);
                    let (count, kept) = (0, 0);
                    found.push(TuningSite {
                        observed,
                        site,
                        count,
                        kept,
                        arena_bytes,
                        limit_bytes,
                        isa,
                        block,
                        slot: None,
                        weight: None,
                        errors,
                    });
                    found.len() - 1
                });
                found[at].count += 1;
                found[at].kept += usize::from(is_kept);
                found[at].slot = found[at].slot.or(slot);
            }
            found.retain(TuningSite::is_open);
            Ok(found)
        })
    })?;
    let weights = weights.unwrap_or_default();
    for site in &mut found {
        if let Some(tensor) = site.slot.and_then(|slot| weights.get(slot)) {
            // One that cannot be borrowed is none to lend: a run says why.
            site.weight = lent(tensor, dl, &site.observed).unwrap_or(None);
        }
    }
    Ok(found)
}

/// A tensor as the weight of a convolution, if it is one.
fn lent(tensor: &Bound<'_, PyAny>, dl: DLDevice, of: &Observed) -> PyResult<Option<Lent>> {
    let borrowed = Exchange::get(tensor.py())?.borrow(tensor, dl)?;
    let Tensor { ptr, dtype, shape, strides } = borrowed.describe();
    let numel = of.conv.out_channels * of.conv.terms();
    let is_it = kernel_type(dtype) == Some(of.weight)
        && (3..=5).contains(&shape.len())
        && shape.iter().product::<i64>() == numel as i64;
    Ok(is_it.then(|| {
        let strides: Vec<isize> = strides.iter().map(|&s| s as isize).collect();
        let weight = Weight { ptr, dtype: of.weight, strides: weight_strides(&strides) };
        Lent { weight, _owner: Box::new(borrowed) }
    }))
}

#[pyfunction]
fn forget_choices() {
    conv_choice::forget();
}
