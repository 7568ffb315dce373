//! A compiled graph: immutable, without weights, shared by every module that captures to the same hash.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Result;
use crate::backend::{Loaded, Specialized};
use crate::ir::Graph;
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
    /// Time of the latest run.
    pub last_run: Duration,
    /// Time it took to make the specialization.
    pub specialize: Duration,
}

struct Cached {
    row: SizeRow,
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
            loaded,
            max_specializations: max_specializations.max(1),
            cache: Mutex::default(),
            clock: AtomicUsize::new(0),
            users: AtomicUsize::new(0),
        }
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Vec<Cached>> {
        // Entries are pushed and removed whole, so a panicked holder left nothing half done.
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of executables that use it.
    pub fn shared_with(&self) -> usize {
        self.users.load(Ordering::Relaxed)
    }

    /// The specialization for these values of the symbols, made if it is new; the least recently used one makes room.
    ///
    /// # Errors
    /// If a size is negative, not an integer or too large.
    pub fn specialize(&self, bindings: &[i64]) -> Result<Arc<dyn Specialized>> {
        let now = self.clock.fetch_add(1, Ordering::Relaxed) as u64;
        if let Some(hit) = self.cache().iter_mut().find(|c| c.row.bindings == bindings) {
            hit.used = now;
            return Ok(hit.specialized.clone());
        }
        let start = Instant::now();
        let specialized = self.loaded.specialize(bindings)?;
        let row = SizeRow {
            bindings: bindings.to_vec(),
            arena_bytes: specialized.arena_bytes(),
            lower_bound_bytes: specialized.lower_bound_bytes(),
            last_run: Duration::ZERO,
            specialize: start.elapsed(),
        };
        let mut cache = self.cache();
        if cache.len() >= self.max_specializations
            && let Some(oldest) = (0..cache.len()).min_by_key(|&i| cache[i].used)
        {
            cache.swap_remove(oldest);
        }
        cache.push(Cached { row, specialized: specialized.clone(), used: now });
        Ok(specialized)
    }

    /// Books the time of a run.
    pub(super) fn book(&self, bindings: &[i64], time: Duration) {
        if let Some(hit) = self.cache().iter_mut().find(|c| c.row.bindings == bindings) {
            hit.row.last_run = time;
        }
    }

    /// The live specializations.
    pub fn sizes(&self) -> Vec<SizeRow> {
        self.cache().iter().map(|c| c.row.clone()).collect()
    }

    /// Drops every specialization; running calls finish with theirs.
    pub fn forget_sizes(&self) {
        self.cache().clear();
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
            return Ok(self.loaded.specialize(&bindings)?.memory_text());
        }
        let texts = live.iter().map(|(bindings, s)| format!("sizes {bindings:?}\n{}", s.memory_text()));
        Ok(texts.collect::<Vec<_>>().join("\n"))
    }
}
