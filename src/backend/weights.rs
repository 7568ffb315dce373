//! The tensors bound to a program's weight slots, and what is derived from them.
//!
//! The user's tensors are the truth; derived forms (packed weights, values computed from weights alone, dense copies of
//! strided parameters) are a cache, made at first use. A run keeps the `Arc` of the set it started with, so swapping the
//! set never disturbs it.
//!
//! Invariant: a derived form, once made, stays where it is until its set is dropped.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::tensor::{Block, Tensor};
use crate::ir::Graph;
use crate::plan::{BufferKind, Plan};
use crate::{Error, Result};

/// A cell that is filled once.
#[derive(Debug, Default)]
struct Cell(Mutex<Option<Arc<Block>>>);

impl Cell {
    fn copy(&self) -> Self {
        Self(Mutex::new(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()))
    }
}

/// Bound weights; see the module documentation.
pub struct WeightSet {
    tensors: Vec<Tensor>,
    /// By slot.
    is_dense: Vec<bool>,
    owner: Arc<dyn Any + Send + Sync>,
    /// Packed weights, [`PACK_FORMS`] cells for each of the plan's packs.
    packs: Vec<Cell>,
    /// Dense copies of strided parameters, by slot.
    dense: Vec<Cell>,
    /// Derived buffers, by buffer id; all made together.
    prepared: Mutex<Option<Arc<Vec<Option<Block>>>>>,
    derived_bytes: AtomicUsize,
}

impl std::fmt::Debug for WeightSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} weights, {} derived bytes", self.tensors.len(), self.derived_bytes())
    }
}

/// Forms in which one weight may be packed: which one is best depends on the sizes of a run.
pub const PACK_FORMS: usize = 3;

/// Most mismatches a message lists.
const LISTED: usize = 5;

impl WeightSet {
    /// Binds one tensor per weight slot of the plan's graph, in slot order; `owner` keeps them alive.
    ///
    /// # Errors
    /// [`Error::Invalid`] naming the first slots whose shape or type differ.
    pub fn new(plan: &Plan, tensors: Vec<Tensor>, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        check(&plan.graph, &tensors)?;
        let cells = |count: usize| std::iter::repeat_with(Cell::default).take(count).collect();
        Ok(Self {
            packs: cells(plan.packs.len() * PACK_FORMS),
            dense: cells(tensors.len()),
            is_dense: tensors.iter().map(Tensor::is_dense).collect(),
            tensors,
            owner,
            prepared: Mutex::new(None),
            derived_bytes: AtomicUsize::new(0),
        })
    }

    /// The same tensors, without the forms derived from `slots`, whose contents changed.
    pub fn without(&self, plan: &Plan, slots: &[usize]) -> Self {
        let changed = |slot: usize| slots.contains(&slot);
        let kept = |pack: &crate::plan::Pack| match plan.buffers[pack.source.buffer.index()].kind {
            BufferKind::Parameter(slot) => !changed(slot as usize),
            _ => slots.is_empty(),
        };
        let pick = |keep: bool, cell: &Cell| if keep { cell.copy() } else { Cell::default() };
        let fresh = Self {
            tensors: self.tensors.clone(),
            is_dense: self.is_dense.clone(),
            owner: self.owner.clone(),
            packs: self.packs.iter().enumerate().map(|(at, c)| pick(kept(&plan.packs[at / PACK_FORMS]), c)).collect(),
            dense: self.dense.iter().enumerate().map(|(slot, c)| pick(!changed(slot), c)).collect(),
            prepared: Mutex::new(None),
            derived_bytes: AtomicUsize::new(0),
        };
        let bytes = fresh
            .packs
            .iter()
            .chain(&fresh.dense)
            .filter_map(|c| c.0.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|b| b.bytes()));
        let bytes = bytes.sum();
        fresh.derived_bytes.store(bytes, Ordering::Relaxed);
        fresh
    }

    /// The same tensors and nothing derived.
    pub fn bare(&self, plan: &Plan) -> Self {
        let all: Vec<usize> = (0..self.tensors.len()).collect();
        self.without(plan, &all)
    }

    /// The tensor of a slot.
    pub fn tensor(&self, slot: usize) -> Option<&Tensor> {
        self.tensors.get(slot)
    }

    /// Whether the tensor of a slot is row-major without gaps.
    pub fn is_dense(&self, slot: usize) -> bool {
        self.is_dense.get(slot).is_some_and(|dense| *dense)
    }

    /// Bytes of the user's tensors.
    pub fn weight_bytes(&self) -> usize {
        self.tensors.iter().map(Tensor::bytes).sum()
    }

    /// Bytes of everything derived so far.
    pub fn derived_bytes(&self) -> usize {
        self.derived_bytes.load(Ordering::Relaxed)
    }

    fn fill(&self, cell: &Cell, make: &mut dyn FnMut() -> Result<Block>) -> Result<*mut u8> {
        let mut cell = cell.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(block) = cell.as_ref() {
            return Ok(block.ptr());
        }
        let block = make()?;
        self.derived_bytes.fetch_add(block.bytes(), Ordering::Relaxed);
        let ptr = block.ptr();
        *cell = Some(Arc::new(block));
        Ok(ptr)
    }

    /// Address of packed weight `index` in form `form` (below [`PACK_FORMS`]), made by `make` if this is its first use.
    ///
    /// # Errors
    /// What `make` says.
    pub fn pack(&self, index: usize, form: usize, make: &mut dyn FnMut() -> Result<Block>) -> Result<*mut u8> {
        match self.packs.get(index * PACK_FORMS + form) {
            Some(cell) => self.fill(cell, make),
            None => Err(Error::Backend { backend: "weights", what: format!("no packed weight {index}") }),
        }
    }

    /// Address of a dense copy of slot `slot`, made by `make` if this is its first use.
    ///
    /// # Errors
    /// What `make` says.
    pub fn dense(&self, slot: usize, make: &mut dyn FnMut() -> Result<Block>) -> Result<*mut u8> {
        match self.dense.get(slot) {
            Some(cell) => self.fill(cell, make),
            None => Err(Error::Backend { backend: "weights", what: format!("no weight slot {slot}") }),
        }
    }

    /// The derived buffers, made by `make` if this is their first use.
    ///
    /// # Errors
    /// What `make` says.
    pub fn prepared(&self, make: &mut dyn FnMut() -> Result<Vec<Option<Block>>>) -> Result<Arc<Vec<Option<Block>>>> {
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(blocks) = prepared.as_ref() {
            return Ok(blocks.clone());
        }
        let blocks = Arc::new(make()?);
        let bytes: usize = blocks.iter().flatten().map(Block::bytes).sum();
        self.derived_bytes.fetch_add(bytes, Ordering::Relaxed);
        *prepared = Some(blocks.clone());
        Ok(blocks)
    }
}

fn check(graph: &Graph, tensors: &[Tensor]) -> Result<()> {
    if tensors.len() != graph.parameters.len() {
        return Err(Error::invalid(format!("{} weights for {} slots", tensors.len(), graph.parameters.len())));
    }
    let mut wrong = Vec::new();
    for (slot, tensor) in graph.parameters.iter().zip(tensors) {
        let shape = slot.ty.concrete(&[])?;
        if tensor.dtype != slot.ty.dtype || tensor.shape != shape {
            wrong.push(format!("{}: expected {}, got {}{:?}", slot.name, slot.ty, tensor.dtype, tensor.shape));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let more = wrong.len().saturating_sub(LISTED);
    wrong.truncate(LISTED);
    let tail = if more > 0 { format!("; and {more} more") } else { String::new() };
    Err(Error::invalid(format!("weights do not fit the program: {}{tail}", wrong.join("; "))))
}
