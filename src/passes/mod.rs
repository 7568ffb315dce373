//! Passes over the graph, in the order in which they run, and the forming of groups.
//!
//! A pass is a function from a graph to a graph: it walks the old one in execution order and builds the new one through
//! [`Editor`](crate::ir::Editor), so order and dominance hold by construction. `docs/passes.md` has a row for each.
//!
//! Invariant: a pass keeps the meaning that `ir/interp` gives the graph, up to the rounding that [`Precision`] allows, and
//! its inputs, parameters and outputs.

pub mod canonicalize;
pub mod eliminate_common_subexpressions;
pub mod eliminate_dead_code;
pub mod fold_constants;
pub mod form_groups;
pub mod merge_conversions;
pub mod propagate_layout;
pub mod recognise_activations;
pub mod recognise_attention;
pub mod recognise_norms;
pub mod recognise_rotations;
pub mod sink_views;
pub mod split_projections;

use std::time::{Duration, Instant};

use crate::config::{config, listed, text};
use crate::error::Result;
use crate::ir::{Changed, Graph, verify_graph};

pub use form_groups::{form_groups, form_groups_for};

/// Where values are rounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Where eager PyTorch rounds: after every op.
    #[default]
    Eager,
    /// Only where values reach memory: 16-bit models keep f32 inside a fused kernel.
    Fast,
}

/// What passes may ask about the compile that they are part of.
#[derive(Clone, Copy, Debug)]
pub struct PassCtx {
    /// Rounding rules.
    pub precision: Precision,
    /// Most bytes of values that depend on weights alone and are kept between runs.
    pub kept_bytes: usize,
    /// Loops and norms of the backend rotate pairs of neighbours.
    pub rotates_pairs: bool,
}

impl Default for PassCtx {
    fn default() -> Self {
        Self { precision: Precision::default(), kept_bytes: usize::MAX, rotates_pairs: false }
    }
}

/// One pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// verb_noun, as the file and the golden folder.
    pub name: &'static str,
    /// The new graph, and whether it differs.
    pub run: fn(&Graph, &PassCtx) -> Result<(Graph, Changed)>,
}

/// Every pass in order, with the reason for its place.
pub const PIPELINE: &[(Pass, &str)] = &[
    (eliminate_dead_code::PASS, "capture leaves unused shape arithmetic behind; no later pass should look at it"),
    (canonicalize::PASS, "the recognisers below match one form of each pattern"),
    (fold_constants::PASS, "canonical form leaves constants next to each other"),
    (eliminate_common_subexpressions::PASS, "recognisers compare values by identity"),
    (eliminate_dead_code::PASS, "single-user tests must not count dead users"),
    (recognise_norms::PASS, "before conversions and views move"),
    (recognise_activations::PASS, "before conversions and views move"),
    (recognise_attention::PASS, "after norms: query and key norms are part of no attention"),
    (recognise_rotations::PASS, "before views of heads move"),
    (eliminate_dead_code::PASS, "what was recognised leaves its formula behind"),
    (merge_conversions::PASS, "recognisers are done with conversions; fewer values to move"),
    (split_projections::PASS, "after activations: the gate is what the pieces are split for"),
    (propagate_layout::PASS, "patterns are recognised in the order of dimensions in which models are written"),
    (sink_views::PASS, "permutes have settled; reshapes between a contraction and its residual are left"),
    (recognise_norms::PASS, "channels that a model has in front are last now"),
    (canonicalize::PASS, "what stood on both sides of a permute meets"),
    (eliminate_common_subexpressions::PASS, "a value permuted for several users is permuted once"),
    (eliminate_dead_code::PASS, "groups look at users"),
];

/// The pass of that name.
pub fn find(name: &str) -> Option<Pass> {
    PIPELINE.iter().map(|(pass, _)| *pass).find(|p| p.name == name)
}

/// What the value of that variable names that is no pass, in a sentence. It reads the value as it is now: asking must not
/// settle the configuration.
pub fn complaint(variable: &str) -> Option<String> {
    if !matches!(variable, "OXIDIFF_DISABLE_PASS" | "OXIDIFF_STOP_AFTER") {
        return None;
    }
    let value = text(variable)?;
    let unknown = listed(&value).find(|name| find(name).is_none())?;
    Some(format!("{variable}: there is no pass `{unknown}`, so that it has no effect; docs/passes.md lists them"))
}

/// Runs [`PIPELINE`] as the configuration says; `on_pass` sees every result with the time it took.
///
/// # Errors
/// Those of the passes, and of the verifier where `OXIDIFF_VERIFY` is on.
pub fn run_pipeline(
    graph: Graph,
    ctx: &PassCtx,
    on_pass: &mut dyn FnMut(&'static str, &Graph, Changed, Duration),
) -> Result<Graph> {
    let mut graph = graph;
    for (pass, _) in PIPELINE {
        if !config().disable_pass.iter().any(|p| p == pass.name) {
            graph = run_pass(pass, graph, ctx, on_pass)?;
        }
        if config().stop_after.as_deref() == Some(pass.name) {
            break;
        }
    }
    Ok(graph)
}

fn run_pass(
    pass: &Pass,
    graph: Graph,
    ctx: &PassCtx,
    on_pass: &mut dyn FnMut(&'static str, &Graph, Changed, Duration),
) -> Result<Graph> {
    let start = Instant::now();
    let (new, changed) = (pass.run)(&graph, ctx)?;
    on_pass(pass.name, &new, changed, start.elapsed());
    if config().verify {
        verify_graph(&new, pass.name)?;
    }
    Ok(new)
}
