//! From a captured graph to a program: one function that can be read aloud.

use std::fmt::Write as _;
use std::sync::Arc;

use crate::backend::{self, Backend};
use crate::config::config;
use crate::ir::{self, Changed, DType, Graph};
use crate::passes::{self, PassCtx, Precision};
use crate::plan::{self, MemoryMode, Numerics, PlanOptions};
use crate::runtime::{Program, registry};
use crate::target::{DeviceKind, Profile};
use crate::trace::{self, Dump, Timings};
use crate::{Error, Result, kernel_ir};

/// Choices of the user that shape a program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// Where values are rounded; `None`: as eager for f32 graphs, in fused kernels only for 16-bit ones.
    pub precision: Option<Precision>,
    /// Whether f16 is f32 between inputs and outputs.
    pub widen: bool,
    /// How much derived state may be kept.
    pub memory: MemoryMode,
    /// Most bytes of workspace and derived weights.
    pub memory_budget: Option<usize>,
    /// Bound of the cache of specializations.
    pub max_specializations: usize,
    /// The device to choose for; `None`: that of the backend.
    pub profile: Option<Profile>,
    /// Whether runs of a size are replayed as one graph, on devices that can.
    pub cuda_graphs: bool,
    /// What libraries may round; on the CPU f32 is f32.
    pub numerics: Numerics,
    /// Name of the backend; `None`: `OXIDIFF_BACKEND`, else `cpu`.
    pub backend: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            precision: None,
            widen: false,
            memory: MemoryMode::default(),
            memory_budget: None,
            max_specializations: 16,
            profile: None,
            cuda_graphs: true,
            numerics: Numerics::default(),
            backend: None,
        }
    }
}

/// `"auto"`, `"eager"` or `"fast"`.
///
/// # Errors
/// If `name` is none of them.
pub fn precision_from_name(name: &str) -> Result<Option<Precision>> {
    match name {
        "auto" => Ok(None),
        "eager" => Ok(Some(Precision::Eager)),
        "fast" => Ok(Some(Precision::Fast)),
        other => Err(Error::invalid(format!("precision `{other}`: expected auto, eager or fast"))),
    }
}

fn default_precision(graph: &Graph) -> Precision {
    let mut types = graph.inputs.iter().map(|i| i.ty.dtype).chain(graph.parameters.iter().map(|p| p.ty.dtype));
    if types.any(DType::is_half) { Precision::Fast } else { Precision::Eager }
}

/// The program of `graph`: the live one if there is one for the same graph, target and options (then the flag is false).
///
/// # Errors
/// [`Error::Verify`] if the graph breaks an invariant, [`Error::Unsupported`] if the backend cannot run a step.
pub fn compile(graph: Graph, options: &Options) -> Result<(Arc<Program>, bool)> {
    let name = options.backend.clone().or_else(|| config().backend.clone()).unwrap_or_else(|| "cpu".to_owned());
    let backend = backend::by_name(&name)?;
    let precision = options.precision.unwrap_or_else(|| default_precision(&graph));
    let hash = graph.hash();
    let key = format!(
        "{hash} {name} {} {:?} {:?} {} {:?} {:?} {} {} {:?}",
        backend.target(),
        options.profile,
        options.precision,
        options.widen,
        options.memory,
        options.memory_budget,
        options.max_specializations,
        options.cuda_graphs,
        options.numerics
    );
    registry::get_or_make(&key, || compile_new(graph, hash.clone(), &*backend, precision, options))
}

fn compile_new(
    graph: Graph,
    hash: String,
    backend: &dyn Backend,
    precision: Precision,
    options: &Options,
) -> Result<Program> {
    let dump = Dump::new(&hash[..8]);
    let mut timings = Timings::default();
    timings.time("verify", || ir::verify_graph(&graph, "capture"))?;
    dump.write("00-captured.ir", || ir::print_graph(&graph));
    let target = backend.target();
    let rotates_pairs = matches!(target.kind, DeviceKind::Cuda { .. });
    let ctx = PassCtx { precision, kept_bytes: options.memory.kept_bytes(), rotates_pairs };
    let wide = options.widen.then(|| ir::widened(&graph));
    let optimized = Arc::new(optimize(wide.as_ref().unwrap_or(&graph), &ctx, &dump, &mut timings)?);
    let device = options.profile.unwrap_or_else(|| backend.profile());
    let groups = timings.time("form_groups", || passes::form_groups_for(&optimized, &ctx, &device))?;
    if config().verify {
        kernel_ir::verify(&optimized, &groups)?;
    }
    dump.write("50-groups.txt", || kernel_ir::print(&optimized, &groups));
    let plan_options = PlanOptions {
        memory: options.memory,
        exact: options.precision == Some(Precision::Eager),
        memory_budget: options.memory_budget,
        plain_launches: !options.cuda_graphs,
        numerics: options.numerics,
    };
    let mut plan = timings.time("plan", || plan::build(optimized.clone(), groups.clone(), &target, plan_options))?;
    timings.time("reorder", || plan.reorder())?;
    timings.time("share_sizes", || plan.share_sizes());
    dump.write("80-plan.txt", || plan.to_string());
    if config().verify {
        plan::verify::verify(&plan)?;
    }
    backend.check(&plan)?;
    let plan = Arc::new(plan);
    let loaded = timings.time("load", || backend.load(plan.clone()))?;
    trace::debug(1, || summary(&hash, &graph, &plan, &timings));
    let program = Program::new(hash, graph, groups, plan, loaded, timings, options.max_specializations);
    if dump.is_on() {
        let memory = program.text("memory")?;
        dump.write("70-memory.txt", || memory);
    }
    Ok(program)
}

fn optimize(graph: &Graph, ctx: &PassCtx, dump: &Dump, timings: &mut Timings) -> Result<Graph> {
    let mut at = 10;
    passes::run_pipeline(graph.clone(), ctx, &mut |pass, graph, changed, time| {
        timings.stages.push((pass.to_owned(), time));
        if changed == Changed::Yes {
            dump.write(&format!("{at}-{pass}.ir"), || ir::print_graph(graph));
            trace::debug(3, || format!("after {pass}\n{}", ir::print_graph(graph)));
        }
        at += 1;
    })
}

fn summary(hash: &str, captured: &Graph, plan: &plan::Plan, timings: &Timings) -> String {
    let mut text = format!(
        "compiled {} in {:.0} ms: {} captured nodes, {} optimized, {} steps, {} packed weights",
        &hash[..8],
        timings.total().as_secs_f64() * 1e3,
        captured.nodes.len(),
        plan.graph.nodes.len(),
        plan.steps.len(),
        plan.packs.len()
    );
    for (stage, time) in &timings.stages {
        let _ = write!(text, "\n  {stage:<36} {:>8.2} ms", time.as_secs_f64() * 1e3);
    }
    text
}
