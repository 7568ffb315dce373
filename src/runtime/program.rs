//! A compiled graph: immutable, without weights, shared by every module that captures to the same hash.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use oxidiff_kernels::fork::{Mutex, MutexGuard};

use super::arena::{ArenaPool, Wanted, arena_pool_over};
use crate::Result;
use crate::backend::{Block, Loaded, Specialized, StepChoice};
use crate::ir::Graph;
use crate::ir::verify::check_at;
use crate::kernel_ir::Group;
use crate::plan::Plan;
use crate::trace::Timings;

/// What one specialization looks like, for reports.
#[derive(Clone, Debug)]
pub struct SizeRow {
    /// Values of the symbols.
    pub bindings: Vec<i64>,
    /// Workspace.
    pub arena_bytes: usize,
    /// The least any arena could have.
    pub lower_bound_bytes: usize,
    /// Forms of weights that its runs keep.
    pub derived_bytes: usize,
    /// Time of the latest run.
    pub last_run: Duration,
    /// Time it took to make the specialization.
    pub specialize: Duration,
    /// Device memory of its graphs.
    pub graph_bytes: usize,
    /// Why it has none, where making one failed.
    pub no_graphs: Option<String>,
    /// Who computes the steps that libraries might.
    pub delegations: Vec<StepChoice>,
}

/// Most host memory that a program's live specializations may take together.
const MAX_SPECIALIZATION_BYTES: usize = 64 << 20;
/// Most device memory that the graphs of a program's live specializations may take together, but for the latest one's.
const MAX_GRAPH_BYTES: usize = 256 << 20;

struct Cached {
    row: SizeRow,
    host_bytes: usize,
    /// Its workspace is wanted as long as this lives.
    _wanted: Wanted,
    specialized: Arc<dyn Specialized>,
    used: u64,
}

/// A compiled graph.
pub struct Program {
    /// Identity: the captured graph's.
    pub hash: String,
    /// As captured.
    pub captured: Graph,
    /// Groups of the optimized graph, which is the plan's.
    pub groups: Vec<Group>,
    /// Steps and places.
    pub plan: Arc<Plan>,
    /// Time of every stage of the compile.
    pub timings: Timings,
    loaded: Box<dyn Loaded>,
    arena: Arc<ArenaPool>,
    max_specializations: usize,
    cache: Mutex<Vec<Cached>>,
    clock: AtomicUsize,
    /// Executables that use it.
    pub(super) users: AtomicUsize,
}

impl Program {
    /// From its parts; see [`crate::compiler::compile`].
    pub fn new(
        hash: String,
        captured: Graph,
        groups: Vec<Group>,
        plan: Arc<Plan>,
        loaded: Box<dyn Loaded>,
        timings: Timings,
        max_specializations: usize,
    ) -> Self {
        Self {
            hash,
            captured,
            groups,
            plan,
            timings,
            arena: arena_pool_over(loaded.memory()),
            loaded,
            max_specializations: max_specializations.max(1),
            cache: Mutex::default(),
            clock: AtomicUsize::new(0),
            users: AtomicUsize::new(0),
        }
    }

    fn cache(&self) -> MutexGuard<'_, Vec<Cached>> {
        self.cache.lock()
    }

    /// Where the workspace of its runs comes from.
    pub fn arena(&self) -> &Arc<ArenaPool> {
        &self.arena
    }

    /// Whether work on a stream is recorded now, and done later; see [`Loaded::is_recorded`].
    pub(super) fn is_recorded(&self, stream: usize) -> Result<bool> {
        self.loaded.is_recorded(stream)
    }

    /// A number in the memory of its device; see [`Loaded::number`].
    ///
    /// # Errors
    /// As there.
    pub fn number(&self, word: [u8; 8], stream: usize) -> Result<Block> {
        self.loaded.number(word, stream)
    }

    /// Number of executables that use it.
    pub fn shared_with(&self) -> usize {
        self.users.load(Ordering::Relaxed)
    }

    /// The specialization for these values of the symbols, made if it is new; the least recently used one makes room.
    ///
    /// # Errors
    /// If a size is negative, not an integer or too large, or does not fit the others: a slice that ends behind its tensor.
    pub fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed) as u64;
        if let Some(hit) = self.cache().iter_mut().find(|c| c.row.bindings == bindings) {
            hit.used = now;
            return Ok(hit.specialized.clone());
        }
        let start = Instant::now();
        check_at(&self.captured, bindings)?;
        let specialized = self.loaded.specialize(bindings)?;
        let workspace = specialized.workspace();
        let row = SizeRow {
            bindings: bindings.to_vec(),
            arena_bytes: workspace.bytes(),
            lower_bound_bytes: workspace.layout.lower_bound_bytes,
            derived_bytes: specialized.kept().iter().map(|form| form.bytes).sum(),
            last_run: Duration::ZERO,
            specialize: start.elapsed(),
            graph_bytes: 0,
            no_graphs: None,
            delegations: Vec::new(),
        };
        let (host_bytes, wanted) = (specialized.host_bytes(), self.arena.want(workspace.bytes()));
        let mut evicted = Vec::new();
        let mut cache = self.cache();
        if let Some(rival) = cache.iter().find(|c| c.row.bindings == bindings) {
            // Another thread was faster.
            return Ok(rival.specialized.clone());
        }
        let is_full = |cache: &Vec<Cached>| {
            cache.len() >= self.max_specializations
                || cache.iter().map(|c| c.host_bytes).sum::<usize>() + host_bytes > MAX_SPECIALIZATION_BYTES
        };
        while !cache.is_empty() && is_full(&cache) {
            let Some(oldest) = (0..cache.len()).min_by_key(|&i| cache[i].used) else { break };
            evicted.push(cache.swap_remove(oldest));
        }
        cache.push(Cached { row, host_bytes, _wanted: wanted, specialized: specialized.clone(), used: now });
        drop(cache);
        drop(evicted);
        Ok(specialized)
    }

    /// The specialization for these values, live or made for the occasion: nothing is evicted for it.
    ///
    /// # Errors
    /// As [`Program::specialize`].
    pub fn peek(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        let live = self.cache().iter().find(|c| c.row.bindings == bindings).map(|c| c.specialized.clone());
        live.map_or_else(|| self.loaded.specialize(bindings), Ok)
    }

    /// The live specialization for these values, if there is one.
    pub(super) fn live(&self, bindings: &[i64]) -> Option<Arc<dyn Specialized>> {
        self.cache().iter().find(|c| c.row.bindings == bindings).map(|c| c.specialized.clone())
    }

    /// Books the time of a run that held `held_bytes` of workspace and derived weights. Where graphs of all sizes take more
    /// than there is room for, the least recently used specializations go, but for this one.
    pub(super) fn book(&self, bindings: &[i64], time: Duration, held_bytes: usize) {
        let budget = self.plan.options.memory_budget;
        let room = budget.map_or(MAX_GRAPH_BYTES, |b| b.saturating_sub(held_bytes).min(MAX_GRAPH_BYTES));
        let mut evicted = Vec::new();
        let mut cache = self.cache();
        if let Some(hit) = cache.iter_mut().find(|c| c.row.bindings == bindings) {
            hit.row.last_run = time;
        }
        let all = |cache: &Vec<Cached>| cache.iter().map(|c| c.specialized.graph_bytes()).sum::<usize>();
        while all(&cache) > room {
            let others = (0..cache.len()).filter(|&i| cache[i].row.bindings != bindings);
            let others = others.filter(|&i| cache[i].specialized.graph_bytes() > 0);
            let Some(oldest) = others.min_by_key(|&i| cache[i].used) else { break };
            evicted.push(cache.swap_remove(oldest));
        }
        drop(cache);
        drop(evicted);
    }

    /// The live specializations.
    pub fn sizes(&self) -> Vec<SizeRow> {
        let row = |c: &Cached| {
            let specialized = &c.specialized;
            let (graph_bytes, delegations) = (specialized.graph_bytes(), specialized.delegations());
            SizeRow { graph_bytes, no_graphs: specialized.no_graphs(), delegations, ..c.row.clone() }
        };
        self.cache().iter().map(row).collect()
    }

    /// Drops the specializations whose workspace is larger than `bytes`; running calls finish with theirs.
    pub fn forget_above(&self, bytes: usize) {
        let mut cache = self.cache();
        let (keep, gone): (Vec<_>, Vec<_>) =
            std::mem::take(&mut *cache).into_iter().partition(|c| c.row.arena_bytes <= bytes);
        *cache = keep;
        drop(cache);
        drop(gone);
    }

    /// Drops the specialization for these values, if there is one; running calls finish with it.
    pub fn forget_size(&self, bindings: &[i64]) {
        let mut cache = self.cache();
        let gone = cache.iter().position(|c| c.row.bindings == bindings).map(|at| cache.swap_remove(at));
        drop(cache);
        drop(gone);
    }

    /// Drops every specialization; running calls finish with theirs.
    pub fn forget_sizes(&self) {
        let all = std::mem::take(&mut *self.cache());
        drop(all);
    }

    /// A stage as text: `captured`, `optimized`, `groups`, `plan` or `memory` (of the live sizes, else of the first sample).
    ///
    /// # Errors
    /// If there is no such stage.
    pub fn text(&self, stage: &str) -> Result<String> {
        Ok(match stage {
            "captured" => crate::ir::print_graph(&self.captured),
            "optimized" => crate::ir::print_graph(&self.plan.graph),
            "groups" => crate::kernel_ir::print(&self.plan.graph, &self.groups),
            "plan" => self.plan.to_string(),
            "memory" => self.memory_text()?,
            other => {
                let stages = "captured, optimized, groups, plan and memory";
                return Err(crate::Error::invalid(format!("no stage is called `{other}`; there are {stages}")));
            }
        })
    }

    fn memory_text(&self) -> Result<String> {
        let live: Vec<_> = self.cache().iter().map(|c| (c.row.bindings.clone(), c.specialized.clone())).collect();
        if live.is_empty() {
            let bindings = self.plan.graph.sample_bindings().into_iter().next().unwrap_or_default();
            return Ok(self.loaded.specialize(&bindings)?.workspace().text());
        }
        let texts = live.iter().map(|(bindings, s)| format!("sizes {bindings:?}\n{}", s.workspace().text()));
        Ok(texts.collect::<Vec<_>>().join("\n"))
    }
}
