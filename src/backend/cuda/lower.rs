//! From a plan's steps to kernels and launches, all sizes symbolic.

use std::collections::HashMap;

use oxidiff_kernels::tile::{Instr, Source, TileProgram};

use super::delegate::{self, Around, Delegate, Out};
use crate::codegen::cuda::{
    self, Arg, Attention, Chunk, Convolution, Fused, GEMV_ROWS, Grid, GroupNorm, Kernel as Text, Moments, Product,
    Provenance, Reduction, RowNorm, Shares, Vector, View,
};
use crate::codegen::tile::kernel_type;
use crate::codegen::{TileBody, TileLoad};
use crate::ir::{DType, Dim, Op, ValueId};
use crate::plan::{Access, BufferId, MemoryMode, Plan, Step};
use crate::select::Kernel;
use crate::{Error, Result};

/// Where an operand of a launch lies.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    /// A buffer of the plan, elements of that many bytes from its start.
    Buffer(BufferId, Dim, usize),
    /// Scratch memory `index` of the step.
    Scratch(usize),
    /// The form of packed weight `index` whose channels are neighbours.
    Taps(usize),
    /// The sums of taps of packed weight `index` ([`cuda::lower_tap_sums`]).
    Sums(usize),
    /// An operand that this form of the kernel does not have.
    Missing,
}

impl Place {
    pub(super) fn of(access: &Access) -> Self {
        Self::Buffer(access.buffer, access.offset.clone(), access.dtype.size_bytes())
    }
}

/// One kernel launch of a step. Steps share a kernel's text, each with arguments of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// Index into [`Lowered::kernels`]: the text.
    pub kernel: usize,
    /// Arguments in order.
    pub args: Vec<Arg>,
    /// Number of blocks and threads.
    pub grid: Grid,
    /// Neighbours that a thread of the other form handles.
    pub least: usize,
    /// What the vector form asks, if there is one.
    pub vector: Option<Vector>,
    /// The kernel's operands.
    pub places: Vec<Place>,
    /// When it stands for launches behind it.
    pub instead: Option<Instead>,
}

/// When a launch stands for others.
#[derive(Clone, Debug, PartialEq)]
pub enum Instead {
    /// For the next one, where so many rows are at most [`GEMV_ROWS`].
    OfNext(Dim),
    /// For all behind it and their scratch memory, where a block of the device has the shared memory that it asks for.
    OfAll,
}

/// Scratch memory of a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Scratch {
    /// Three f32 per image, chunk of its pixels and group.
    Moments {
        /// Images times groups.
        sets: Dim,
        /// Pixels of an image.
        pixels: Dim,
    },
}

/// The launches of one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Launches {
    /// In order.
    pub launches: Vec<Launch>,
    /// Memory for the time of the step.
    pub scratch: Vec<Scratch>,
    /// What a library may do instead.
    pub delegate: Option<Delegate>,
    /// Compute capability from which on the launches use tensor cores, if they ever do.
    pub tensor_cores: Option<u32>,
}

impl Launches {
    /// Whether they use tensor cores on a device of this compute capability.
    pub fn on_tensor_cores(&self, arch: u32) -> bool {
        self.tensor_cores.is_some_and(|first| first <= arch)
    }
}

/// A plan's kernels, each once, and the launches of its steps.
#[derive(Clone, Debug, Default)]
pub struct Lowered {
    /// Kernels; of their arguments and grids only those of the launch that came first.
    pub kernels: Vec<Text>,
    /// One per step of [`Plan::steps`].
    pub steps: Vec<Launches>,
    /// One per step of [`Plan::prepare`].
    pub prepare: Vec<Launches>,
    /// Copies from any strides to dense memory, by element size: sizes are symbols 0 to 7, strides 8 to 15. The operands'
    /// places are the caller's.
    pub densify: Vec<(usize, Launch)>,
    /// Shares of a chunk of scores, for every kind of attention that there is: heads, queries, keys, the first query and the
    /// mask's strides are symbols 0 to 6.
    pub shares: Vec<(Shares, Launch)>,
    /// Sums of the taps of a weight, by element type, where a convolution has use for them: its filters and channels are symbols
    /// 0 and 1, its strides symbols 2 to 5.
    pub tap_sums: Vec<(DType, Launch)>,
    /// With `memory="low"`: layouts of a convolution's weight with its channels as neighbours, by element size. Its sizes are
    /// symbols 0 to 4 (filters, channels, three of taps), the source's strides symbols 5 to 9.
    pub layouts: Vec<(usize, Launch)>,
}

/// Dimensions that [`Lowered::densify`] kernels take.
pub const DENSIFY_DIMS: usize = 8;

impl Lowered {
    /// Kernels and launches of `plan`.
    ///
    /// # Errors
    /// If a step has operands that its kernel family does not know.
    pub fn new(plan: &Plan) -> Result<Self> {
        let may_round_sums = may_round_sums(plan);
        let mut lowering = Lowering { plan, may_round_sums, kernels: Vec::new(), index: HashMap::new() };
        let steps = plan.steps.iter().map(|s| lowering.step(s)).collect::<Result<Vec<Launches>>>()?;
        let prepare = plan.prepare.iter().map(|s| lowering.step(s)).collect::<Result<_>>()?;
        let graph = &plan.graph;
        let types = graph.inputs.iter().map(|i| i.ty.dtype).chain(graph.parameters.iter().map(|p| p.ty.dtype));
        // What is packed may be computed of a weight, in another type.
        let types = types.chain(plan.packs.iter().map(|pack| pack.source.dtype));
        let mut sizes: Vec<usize> = types.map(DType::size_bytes).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let densify = sizes.into_iter().map(|bytes| (bytes, lowering.launch(densify(bytes), Vec::new()))).collect();
        let mut kinds: Vec<Shares> = plan.steps.iter().filter_map(|step| shares_of(plan, step)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        let shares = kinds.into_iter().map(|kind| (kind, lowering.launch(shares(kind), Vec::new()))).collect();
        let folds = |launches: &Launches| launches.delegate.as_ref().is_some_and(Delegate::folds);
        let folded = plan.steps.iter().zip(&steps).filter(|(_, launches)| folds(launches));
        let mut types: Vec<DType> = folded.filter_map(|(step, _)| step.operands.get(1)).map(|w| w.dtype).collect();
        types.sort_unstable();
        types.dedup();
        let tap_sums = types.into_iter().map(|ty| (ty, lowering.launch(tap_sums(ty), Vec::new()))).collect();
        let reads_taps = |launches: &Launches| launches.delegate.as_ref().is_some_and(Delegate::reads_taps);
        let laid_out =
            plan.steps.iter().zip(&steps).filter(|(_, l)| plan.options.memory == MemoryMode::Low && reads_taps(l));
        let mut sizes: Vec<usize> =
            laid_out.filter_map(|(step, _)| step.operands.get(1)).map(|w| w.dtype.size_bytes()).collect();
        sizes.sort_unstable();
        sizes.dedup();
        let layouts =
            sizes.into_iter().map(|bytes| (bytes, lowering.launch(channels_last(bytes), Vec::new()))).collect();
        Ok(Self { kernels: lowering.kernels, steps, prepare, densify, shares, tap_sums, layouts })
    }
}

/// A copy from any strides to dense memory.
fn densify(bytes: usize) -> Text {
    let dtype = match bytes {
        1 => DType::U8,
        2 => DType::F16,
        4 => DType::F32,
        _ => DType::F64,
    };
    let shape: Vec<Dim> = (0..DENSIFY_DIMS).map(symbol).collect();
    let strides = (DENSIFY_DIMS..2 * DENSIFY_DIMS).map(symbol).collect();
    let dense = crate::plan::access::dense_strides(&shape);
    let from = Provenance { ops: vec!["densify".to_owned()], lines: vec!["a strided argument made dense".to_owned()] };
    cuda::lower_copy(&View { dtype, shape: shape.clone(), strides }, &View { dtype, shape, strides: dense }, &from)
}

/// Number `at` of those that a launch without a step of its own is given.
pub(super) fn symbol(at: usize) -> Dim {
    Dim::symbol(crate::ir::Sym(at as u32))
}

/// A weight with its channels as neighbours, wherever it lies.
fn channels_last(bytes: usize) -> Text {
    let dtype = if bytes == 2 { DType::F16 } else { DType::F32 };
    let from =
        Provenance { ops: vec!["channels_last".to_owned()], lines: vec!["a weight that is laid out anew".to_owned()] };
    cuda::lower_channels_last(dtype, [0, 1, 2, 3, 4].map(symbol), [5, 6, 7, 8, 9].map(symbol), &from)
}

/// What a step makes of its scores, if it is an attention.
pub(super) fn shares_of(plan: &Plan, step: &Step) -> Option<Shares> {
    let Op::ScaledDotProductAttention { is_causal, .. } = plan.graph.op(step.root?) else { return None };
    let dtype = step.stores.first()?.dtype;
    let mask = step.operands.get(3).map(|mask| mask.dtype);
    dtype.is_float().then_some(Shares { dtype, mask, is_causal: *is_causal })
}

/// Shares of scores.
fn shares(kind: Shares) -> Text {
    let [heads, rows, keys, first] = [0, 1, 2, 3].map(symbol);
    let chunk = Chunk { heads, rows, keys, first, strides: [4, 5, 6].map(symbol) };
    let from =
        Provenance { ops: vec!["shares".to_owned()], lines: vec!["softmax of an attention's scores".to_owned()] };
    cuda::lower_shares(kind, chunk, &from)
}

/// One in so many of a plan's products, convolutions and attentions may be a convolution whose taps are summed and rounded to
/// 16 bits. Alone it is 1.4 times as far from f64 as eager (`sums_of_16_bit_taps_cost_what_is_said`); a fourth of as many equal
/// shares, it takes the whole to `sqrt(1 + (1.4^2 - 1) / 4)` = 1.11 times. A module may be at 1.25 times.
const ROUNDED_SHARE: usize = 4;

/// Whether sums of 16-bit taps may be rounded to 16 bits.
fn may_round_sums(plan: &Plan) -> bool {
    let is_contraction =
        |step: &&Step| matches!(step.kernel, Kernel::Linear | Kernel::Matmul | Kernel::Convolution | Kernel::Attention);
    let all = plan.steps.iter().filter(is_contraction).count();
    let upsampled = plan.steps.iter().filter(|step| !step.upsample.is_empty()).count();
    upsampled * ROUNDED_SHARE <= all
}

/// Sums of taps, wherever the weight lies.
fn tap_sums(dtype: DType) -> Text {
    let from =
        Provenance { ops: vec!["tap_sums".to_owned()], lines: vec!["a weight whose image is upsampled".to_owned()] };
    cuda::lower_tap_sums(dtype, [0, 1].map(symbol), [2, 3, 4, 5].map(symbol), &from)
}

struct Lowering<'a> {
    plan: &'a Plan,
    may_round_sums: bool,
    kernels: Vec<Text>,
    index: HashMap<String, usize>,
}

fn view(access: &Access) -> View {
    View { dtype: access.dtype, shape: access.shape.clone(), strides: access.strides.clone() }
}

fn views(accesses: &[Access]) -> Vec<View> {
    accesses.iter().map(view).collect()
}

fn places<'a>(accesses: impl IntoIterator<Item = &'a Access>) -> Vec<Place> {
    accesses.into_iter().map(Place::of).collect()
}

fn single(launch: Launch) -> Launches {
    Launches { launches: vec![launch], ..Launches::default() }
}

/// Model nodes that a header lists.
const LISTED_NODES: usize = 12;

impl Lowering<'_> {
    /// A launch of `kernel`, whose text is kept once.
    fn launch(&mut self, kernel: Text, places: Vec<Place>) -> Launch {
        let (args, grid, vector) = (kernel.args.clone(), kernel.grid.clone(), kernel.vector.clone());
        let least = kernel.least;
        let at = *self.index.entry(kernel.name.clone()).or_insert_with(|| {
            self.kernels.push(kernel);
            self.kernels.len() - 1
        });
        Launch { kernel: at, args, grid, least, vector, places, instead: None }
    }

    fn refuse<T>(&self, step: &Step, why: &str) -> Result<T> {
        Err(Error::Backend { backend: super::NAME, what: format!("{}: {why}", self.plan.step_name(step)) })
    }

    /// Where a kernel comes from: the step that asked for it first.
    fn provenance(&self, step: &Step) -> Provenance {
        let graph = &self.plan.graph;
        let mut ops: Vec<String> = vec![match step.kernel {
            Kernel::Loop => "fused".to_owned(),
            Kernel::Interpret | Kernel::Integers => "element".to_owned(),
            other => other.name().to_owned(),
        }];
        let mut lines = vec![format!("{}: {}", self.plan.step_name(step), step.kernel.name())];
        let body = step.body.as_ref();
        let stored: Vec<ValueId> = body.map_or_else(|| step.results.clone(), |b| b.stores.clone());
        let types = |accesses: &mut dyn Iterator<Item = &Access>| {
            accesses.map(|a| a.to_string()).collect::<Vec<_>>().join("  ")
        };
        lines.push(format!("reads  {}", types(&mut step.reads())));
        lines.push(format!("writes {}", types(&mut step.stores.iter())));
        for &v in stored.iter().take(LISTED_NODES) {
            lines.push(format!("%{} = {} in {}", v.0, graph.op(v).name(), graph.path(v)));
        }
        if !step.flops.is(0) {
            lines.push(format!("{} operations", step.flops));
        }
        if let Some(body) = body {
            ops.extend(body_words(body));
        } else if step.root.is_none() {
            ops.extend(step.nodes.iter().map(|&n| graph.op(n).name().to_owned()));
        } else if let (Some(root), Kernel::Interpret) = (step.root, step.kernel) {
            ops.push(graph.op(root).name().to_owned());
        }
        Provenance { ops, lines }
    }

    fn step(&mut self, step: &Step) -> Result<Launches> {
        match step.kernel {
            Kernel::Copy => self.copy(step),
            Kernel::Loop => self.pointwise(step),
            Kernel::Linear | Kernel::Matmul => self.product(step),
            Kernel::Convolution => self.convolution(step),
            Kernel::Attention => self.attention(step),
            Kernel::GroupNorm => self.group_norm(step),
            Kernel::LayerNorm | Kernel::RmsNorm => self.row_norm(step),
            Kernel::Softmax => self.softmax(step),
            Kernel::Reduce => self.reduce(step),
            Kernel::Gather
            | Kernel::Upsample
            | Kernel::Interpolate
            | Kernel::Scan
            | Kernel::Pad
            | Kernel::Interpret
            | Kernel::Integers => self.scalar(step),
        }
    }

    fn copy(&mut self, step: &Step) -> Result<Launches> {
        let ([source], [to]) = (step.operands.as_slice(), step.stores.as_slice()) else {
            return self.refuse(step, "a copy has one source and one destination");
        };
        let kernel = cuda::lower_copy(&view(source), &view(to), &self.provenance(step));
        Ok(single(self.launch(kernel, places([source, to]))))
    }

    fn body<'s>(&self, step: &'s Step) -> Result<&'s TileBody> {
        match &step.body {
            Some(body) => Ok(body),
            None => self.refuse(step, "a step without a body"),
        }
    }

    fn pointwise(&mut self, step: &Step) -> Result<Launches> {
        let (loads, stores) = (views(&step.loads), views(&step.stores));
        let program = &self.body(step)?.program;
        let fused = Fused { program, space: &step.space, loads: &loads, stores: &stores };
        let kernel = cuda::lower_loop(fused, &self.provenance(step));
        Ok(single(self.launch(kernel, places(step.loads.iter().chain(&step.stores)))))
    }

    fn product(&mut self, step: &Step) -> Result<Launches> {
        let [x, weight] = step.operands.as_slice() else { return self.refuse(step, "a product has two operands") };
        let is_linear = step.kernel == Kernel::Linear;
        let right = if is_linear { weight.permute(&[1, 0]) } else { weight.clone() };
        let (a, b) = (view(x), view(&right));
        let batch = if is_linear { 0 } else { step.space.len().saturating_sub(2) };
        let (loads, stores) = (views(&step.loads), views(&step.stores));
        let program = &self.body(step)?.program;
        let fused = Fused { program, space: &step.space, loads: &loads, stores: &stores };
        let product = Product { a: &a, b: &b, batch };
        let from = self.provenance(step);
        let all = places([x, weight].into_iter().chain(&step.loads).chain(&step.stores));
        let mut launches = Vec::new();
        if let Some(gemv) = cuda::lower_gemv(&product, fused, &from) {
            let rows = Dim::product(&step.space[..step.space.len() - 1]);
            let is_large = rows.as_constant().is_some_and(|r| r > GEMV_ROWS as i64);
            if !is_large {
                launches.push(Launch { instead: Some(Instead::OfNext(rows)), ..self.launch(gemv, all.clone()) });
            }
        }
        launches.push(self.launch(cuda::lower_product(&product, fused, &from), all));
        Ok(Launches { launches, delegate: self.delegate(step)?, ..Launches::default() })
    }

    /// What a library may do of a step, and the kernels around it.
    fn delegate(&mut self, step: &Step) -> Result<Option<Delegate>> {
        let graph = self.plan.graph.clone();
        let root = step.root.unwrap_or(step.value);
        let options = &self.plan.options;
        // Sums are rounded, and kept.
        let is_rounded = step.operands.get(1).is_some_and(|w| w.dtype.size_bytes() < DType::F32.size_bytes());
        let may_fold = options.memory != MemoryMode::Low && !options.exact && (self.may_round_sums || !is_rounded);
        Delegate::new(step, graph.op(root), graph.ty(root).dtype, may_fold, &mut AroundStep { lowering: self, step })
    }

    fn convolution(&mut self, step: &Step) -> Result<Launches> {
        let (Some(Op::Convolution { stride, padding, dilation, groups, .. }), [x, weight]) =
            (step.root.map(|r| self.plan.graph.op(r)), step.operands.as_slice())
        else {
            return self.refuse(step, "a convolution has two operands");
        };
        let (image, taps) = (view(x), view(weight));
        let convolution = Convolution {
            x: &image,
            weight: &taps,
            stride,
            padding,
            dilation,
            upsample: &step.upsample,
            groups: *groups,
        };
        let (loads, stores) = (views(&step.loads), views(&step.stores));
        let program = &self.body(step)?.program;
        let fused = Fused { program, space: &step.space, loads: &loads, stores: &stores };
        let kernel = cuda::lower_convolution(&convolution, fused, &self.provenance(step))?;
        let own = self.launch(kernel, places([x, weight].into_iter().chain(&step.loads).chain(&step.stores)));
        Ok(Launches { delegate: self.delegate(step)?, ..single(own) })
    }

    fn attention(&mut self, step: &Step) -> Result<Launches> {
        let (Some(Op::ScaledDotProductAttention { is_causal, scale }), [q, k, v, rest @ ..], [out]) =
            (step.root.map(|r| self.plan.graph.op(r)), step.operands.as_slice(), step.stores.as_slice())
        else {
            return self.refuse(step, "an attention has three operands and one result");
        };
        let mask = rest.first().map(view);
        let [qv, kv, vv, ov] = [q, k, v, out].map(view);
        let attention =
            Attention { q: &qv, k: &kv, v: &vv, mask: mask.as_ref(), out: &ov, scale: *scale, causal: *is_causal };
        let from = self.provenance(step);
        let first_arch = cuda::flash_arch(&attention);
        let kernel = match first_arch {
            Some(_) => cuda::lower_flash(&attention, &from),
            None => cuda::lower_attention(&attention, &from),
        };
        let mut all = places([q, k, v]);
        all.push(rest.first().map_or(Place::Missing, Place::of));
        all.push(Place::of(out));
        let own = self.launch(kernel, all);
        Ok(Launches { delegate: self.delegate(step)?, tensor_cores: first_arch, ..single(own) })
    }

    fn group_norm(&mut self, step: &Step) -> Result<Launches> {
        let (Some(Op::GroupNorm { num_groups, eps, .. }), [x, vectors @ ..], [scale, shift]) =
            (step.root.map(|r| self.plan.graph.op(r)), step.operands.as_slice(), step.scratch.as_slice())
        else {
            return self.refuse(step, "a group norm has an operand and two scratch buffers");
        };
        let image = view(x);
        let (gamma, beta) = (vectors.first().map(view), vectors.get(1).map(view));
        let norm = GroupNorm { x: &image, gamma: gamma.as_ref(), beta: beta.as_ref(), groups: *num_groups, eps: *eps };
        let from = self.provenance(step);
        let [moments, finish] = cuda::lower_group_norm(&norm, &from);
        let vector = |at: usize| vectors.get(at).map_or(Place::Missing, Place::of);
        let mut launches = Vec::new();
        if let Some(whole) = self.whole_groups(step, &norm, &from)? {
            let own = [Place::of(x), vector(0), vector(1)];
            let all = own.into_iter().chain(places(step.loads.iter().chain(&step.stores))).collect();
            launches.push(Launch { instead: Some(Instead::OfAll), ..self.launch(whole, all) });
        }
        let apply = self.pointwise(step)?;
        let statistics = vec![Place::Scratch(0), Place::of(scale), Place::of(shift), vector(0), vector(1)];
        launches.push(self.launch(moments, vec![Place::of(x), Place::Scratch(0)]));
        launches.push(self.launch(finish, statistics));
        launches.extend(apply.launches);
        let rank = x.shape.len();
        let scratch = Scratch::Moments {
            sets: &x.shape[0] * &Dim::constant(*num_groups),
            pixels: Dim::product(&x.shape[1..rank - 1]),
        };
        Ok(Launches { launches, scratch: vec![scratch], ..Launches::default() })
    }

    /// A group norm's one kernel for groups that a block has room for.
    fn whole_groups(&self, step: &Step, norm: &GroupNorm<'_>, from: &Provenance) -> Result<Option<Text>> {
        let body = self.body(step)?;
        let x = step.root.and_then(|r| self.plan.graph.node(r).inputs.first().copied());
        let (loads, stores) = (views(&step.loads), views(&step.stores));
        let fused = Fused { program: &body.program, space: &step.space, loads: &loads, stores: &stores };
        let at = |own: TileLoad| body.loads.iter().position(|load| *load == own);
        let own = [x.and_then(|x| at(TileLoad::Value(x))), at(TileLoad::Scale), at(TileLoad::Shift)];
        Ok(cuda::lower_whole_groups(norm, fused, own, from))
    }

    fn row_norm(&mut self, step: &Step) -> Result<Launches> {
        let (moments, eps) = match step.root.map(|r| self.plan.graph.op(r)) {
            Some(Op::LayerNorm { eps, .. }) => (Moments::Centred, *eps),
            Some(Op::RmsNorm { eps, floor: true, .. }) => (Moments::Floored, *eps),
            Some(Op::RmsNorm { eps, .. }) => (Moments::Square, *eps),
            _ => return self.refuse(step, "a norm step without a norm"),
        };
        let [x, ..] = step.operands.as_slice() else { return self.refuse(step, "a norm has an operand") };
        let body = self.body(step)?;
        let (row, loads, stores) = (view(x), views(&step.loads), views(&step.stores));
        let own = step.root.and_then(|r| self.plan.graph.node(r).inputs.first().copied());
        let x_load = own.and_then(|v| body.loads.iter().position(|l| *l == TileLoad::Value(v)));
        let norm = RowNorm { x: &row, moments, eps, x_load };
        let fused = Fused { program: &body.program, space: &step.space, loads: &loads, stores: &stores };
        let kernel = cuda::lower_row_norm(&norm, fused, &self.provenance(step));
        Ok(single(self.launch(kernel, places([x].into_iter().chain(&step.loads).chain(&step.stores)))))
    }

    fn softmax(&mut self, step: &Step) -> Result<Launches> {
        let ([x, ..], [out]) = (step.operands.as_slice(), step.stores.as_slice()) else {
            return self.refuse(step, "a softmax has an operand and a result");
        };
        let kernel = cuda::lower_softmax(&view(x), &view(out), &self.provenance(step));
        Ok(single(self.launch(kernel, places([x, out]))))
    }

    fn reduce(&mut self, step: &Step) -> Result<Launches> {
        let (Some(Op::Reduce { op, dims, keepdim }), [x], [out]) =
            (step.root.map(|r| self.plan.graph.op(r)), step.operands.as_slice(), step.stores.as_slice())
        else {
            return self.refuse(step, "a reduction has one operand and one result");
        };
        let (operand, mut result) = (view(x), view(out));
        if *keepdim {
            let kept: Vec<usize> = (0..x.shape.len()).filter(|d| !dims.contains(d)).collect();
            result.shape = kept.iter().map(|&d| out.shape[d].clone()).collect();
            result.strides = kept.iter().map(|&d| out.strides[d].clone()).collect();
        }
        let reduction = Reduction { op: *op, x: &operand, dims, out: &result };
        match cuda::lower_reduce(&reduction, &self.provenance(step)) {
            Some(kernel) => Ok(single(self.launch(kernel, places([x, out])))),
            None => self.scalar(step),
        }
    }

    /// One launch per result, each element by itself.
    fn scalar(&mut self, step: &Step) -> Result<Launches> {
        let values: Vec<(ValueId, View)> = step.values.iter().copied().zip(views(&step.operands)).collect();
        let mut launches = Vec::new();
        for (&result, store) in step.results.iter().zip(&step.stores) {
            let out = view(store);
            let from = self.provenance(step);
            let kernel = cuda::lower_scalar(&self.plan.graph, &step.nodes, &values, (result, &out), &from)?;
            launches.push(self.launch(kernel, places(step.operands.iter().chain([store]))));
        }
        Ok(Launches { launches, ..Launches::default() })
    }
}

/// Makes the kernels around what a library does of a step.
struct AroundStep<'a, 'p> {
    lowering: &'a mut Lowering<'p>,
    step: &'a Step,
}

impl Around for AroundStep<'_, '_> {
    fn after(&mut self, out: Out, dtype: DType) -> Result<Launch> {
        let step = self.step;
        let program = from_memory(&self.lowering.body(step)?.program, dtype)?;
        let dense = |shape: &[Dim]| {
            let strides = crate::plan::access::dense_strides(shape);
            View { dtype, shape: shape.to_vec(), strides }
        };
        let (mut loads, mut stores, mut space) = (views(&step.loads), views(&step.stores), step.space.clone());
        let (product, product_place) = match (out, step.stores.first()) {
            (Out::Store, Some(store)) => (view(store), Place::of(store)),
            (Out::Parts, _) => {
                let Some(x) = step.operands.first() else { return Err(Error::invalid("a convolution has an image")) };
                let halves = [&x.shape[1], &x.shape[2]];
                let split = |view: &View| in_pairs(view, &step.space, halves);
                (loads, stores) = (loads.iter().map(split).collect(), stores.iter().map(split).collect());
                // Parts, images, rows, columns, channels as they lie, in the order of the results.
                let [batch, .., channels] = space.as_slice() else { return Err(Error::invalid("an image")) };
                let two = Dim::constant(2);
                let [down, along] = halves.map(Clone::clone);
                let parts = dense(&[two.clone(), two, batch.clone(), down, along, channels.clone()]);
                let order = [2, 3, 0, 4, 1, 5];
                let ordered = |dims: &[Dim]| order.iter().map(|&d| dims[d].clone()).collect::<Vec<Dim>>();
                space = ordered(&parts.shape);
                (View { dtype, shape: space.clone(), strides: ordered(&parts.strides) }, delegate::RESULT)
            }
            _ => (dense(&space), delegate::RESULT),
        };
        loads.push(product);
        let fused = Fused { program: &program, space: &space, loads: &loads, stores: &stores };
        let kernel = cuda::lower_loop(fused, &self.lowering.provenance(step));
        let all = [places(&step.loads), vec![product_place], places(&step.stores)].concat();
        Ok(self.lowering.launch(kernel, all))
    }

    /// A copy whose source stands still for as many elements as each is repeated.
    fn upsampled(&mut self) -> Result<Launch> {
        let Some(x) = self.step.operands.first() else { return Err(Error::invalid("a convolution has an image")) };
        let (mut shape, mut strides) = (Vec::new(), Vec::new());
        for (d, (size, stride)) in x.shape.iter().zip(&x.strides).enumerate() {
            shape.push(size.clone());
            strides.push(stride.clone());
            let factor = d.checked_sub(1).and_then(|d| self.step.upsample.get(d)).copied().unwrap_or(1);
            if factor > 1 {
                shape.push(Dim::constant(factor as i64));
                strides.push(Dim::default());
            }
        }
        let dense = crate::plan::access::dense_strides(&shape);
        let source = View { dtype: x.dtype, shape: shape.clone(), strides };
        let to = View { dtype: x.dtype, shape, strides: dense };
        let from = self.lowering.provenance(self.step);
        let from = Provenance { ops: vec!["upsample".to_owned()], ..from };
        let kernel = cuda::lower_copy(&source, &to, &from);
        Ok(self.lowering.launch(kernel, vec![Place::of(x), delegate::IMAGE]))
    }
    fn added_mask(&mut self) -> Result<[Launch; 2]> {
        let [added, hides] = delegate::added_mask(self.step)?;
        let (Some(mask), Some(out)) = (self.step.operands.get(3), self.step.stores.first()) else {
            return Err(Error::invalid("an attention without a mask"));
        };
        let from = |op: &str| {
            let lines = self.lowering.provenance(self.step).lines;
            Provenance { ops: vec!["attention".to_owned(), op.to_owned()], lines }
        };
        let before = cuda::lower_added_mask(&view(mask), &added, &hides, &from("mask"));
        let after = cuda::lower_hidden(&hides, &view(out), &from("hidden"));
        let before = self.lowering.launch(before, vec![Place::of(mask), delegate::MASK, delegate::HIDES]);
        Ok([before, self.lowering.launch(after, vec![delegate::HIDES, Place::of(out)])])
    }
}

/// What covers an image of twice as many rows and columns as `halves`, with rows and columns by their halves and by whether they
/// are odd: six dimensions instead of four.
fn in_pairs(view: &View, space: &[Dim], halves: [&Dim; 2]) -> View {
    let strides = view.strides_in(space);
    let (mut shape, mut split) = (Vec::new(), Vec::new());
    for (d, (size, stride)) in space.iter().zip(strides).enumerate() {
        match d.checked_sub(1).and_then(|d| halves.get(d)) {
            Some(half) => {
                shape.extend([(*half).clone(), Dim::constant(2)]);
                split.extend([&stride * &Dim::constant(2), stride]);
            }
            None => {
                shape.push(size.clone());
                split.push(stride);
            }
        }
    }
    View { dtype: view.dtype, shape, strides: split }
}

/// The program with the sums in a memory operand of their own, behind the others, instead of in registers.
fn from_memory(program: &TileProgram, dtype: DType) -> Result<TileProgram> {
    let own = u8::try_from(program.loads.len()).ok().zip(kernel_type(dtype));
    let Some((at, sums)) = own else { return Err(Error::invalid("a body with too many operands")) };
    let mut program = program.clone();
    for instr in &mut program.instrs {
        if let Instr::Load { src, .. } = instr
            && *src == Source::Acc
        {
            *src = Source::Memory(at);
        }
    }
    program.loads.push(sums);
    Ok(program)
}

/// What a body does, in words for a kernel's name.
fn body_words(body: &TileBody) -> Vec<String> {
    let word = |instr: &Instr| match instr {
        Instr::Unary { op, .. } => Some(format!("{op:?}").to_lowercase()),
        Instr::Binary { op, .. } => Some(format!("{op:?}").to_lowercase()),
        Instr::Select { .. } => Some("where".to_owned()),
        Instr::Load { .. } | Instr::Fma { .. } | Instr::Round { .. } | Instr::Store { .. } => None,
    };
    body.program.instrs.iter().filter_map(word).collect()
}
