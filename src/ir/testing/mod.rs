//! Random graphs and inputs for property tests: a pass, a backend or a printer is right if it is on all of these.
//!
//! A graph comes with an error bound for each output ([`RandomGraph::tolerance`]), propagated op by op from the unit
//! roundoffs, so tests need no guessed tolerance: what any correct implementation gives lies within it of the exact result
//! ([`crate::ir::interp::run_f64`]). To keep the bounds small, ops with jumps (comparisons, `floor`, `argmax`, ...) are
//! applied to exactly known values only, and functions with poles to arguments kept away from them.
//!
//! Everything follows from the seed.

mod rules;

use crate::error::Result;
use crate::ir::dim::Dim;
use crate::ir::dtype::DType;
use crate::ir::graph::{Graph, Node, ValueId};
use crate::ir::infer::broadcast_shapes;
use crate::ir::interp::Tensor;
use crate::ir::op::{Op, ValueType};

/// Largest magnitude of a float input; inputs are multiples of 1/8, which every float type holds exactly.
const INPUT_BOUND: f64 = 2.0;
/// Largest magnitude of a parameter or float constant, a multiple of 1/16.
const PARAMETER_BOUND: f64 = 0.5;
/// Integer inputs lie in `0..=4`.
const INTEGER_BOUND: f64 = 4.0;
/// No value gets larger than this, or less sure.
const LARGEST: f64 = 1000.0;
const LEAST_SURE: f64 = 0.25;

/// A small, fast, seeded generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// With that seed.
    pub fn new(seed: u64) -> Self {
        // Neighbouring states give shifted copies of one sequence; their outputs are unrelated.
        let unrelated = Self(seed).next_u64();
        Self(unrelated)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next_u64() % n as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of them; `items` is not empty.
    pub fn choose<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// A multiple of `step` between `-bound` and `bound`.
    pub fn multiple(&mut self, step: f64, bound: f64) -> f64 {
        let steps = (bound / step) as usize;
        (self.below(2 * steps + 1) as f64 - steps as f64) * step
    }
}

/// A graph that verifies, with what is known about its results.
#[derive(Clone, Debug)]
pub struct RandomGraph {
    /// The graph; has symbols, inputs, parameters and constants.
    pub graph: Graph,
    /// For each output, how far a correct result may lie from the exact one, element by element. 0 for integers.
    pub tolerance: Vec<f64>,
}

/// Random inputs of a graph and values for its parameters at these symbol values.
///
/// # Errors
/// If a shape cannot be evaluated.
pub fn random_inputs(graph: &Graph, bindings: &[i64], seed: u64) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
    let mut rng = Rng::new(seed);
    let inputs = graph.inputs.iter().map(|i| random_tensor(&mut rng, &i.ty, bindings, 0.125, INPUT_BOUND));
    let inputs = inputs.collect::<Result<_>>()?;
    let parameters = graph.parameters.iter().map(|p| random_tensor(&mut rng, &p.ty, bindings, 0.0625, PARAMETER_BOUND));
    Ok((inputs, parameters.collect::<Result<_>>()?))
}

fn random_tensor(rng: &mut Rng, ty: &ValueType, bindings: &[i64], step: f64, bound: f64) -> Result<Tensor> {
    let shape = ty.concrete(bindings)?;
    let mut value = || match ty.dtype {
        d if d.is_float() => rng.multiple(step, bound),
        DType::Bool => rng.below(2) as f64,
        _ => rng.below(INTEGER_BOUND as usize + 1) as f64,
    };
    let values: Vec<f64> = (0..shape.iter().product::<i64>()).map(|_| value()).collect();
    Tensor::from_f64(ty.dtype, &shape, &values)
}

/// A graph of at least `size` nodes.
pub fn random_graph(seed: u64, size: usize) -> RandomGraph {
    let mut g = Generator::new(seed);
    let mut tries = 0;
    while g.graph.nodes.len() < size && tries < 50 * size {
        tries += 1;
        rules::apply_one(&mut g);
    }
    g.finish()
}

/// What is known about a value: it is at most `bound` in magnitude, and a correct result within `error` of it.
#[derive(Clone, Copy, Debug)]
struct Known {
    bound: f64,
    error: f64,
}

impl Known {
    const fn exact(bound: f64) -> Self {
        Self { bound, error: 0.0 }
    }

    fn max(self, o: Self) -> Self {
        Self { bound: self.bound.max(o.bound), error: self.error.max(o.error) }
    }

    fn plus(self, o: Self) -> Self {
        Self { bound: self.bound + o.bound, error: self.error + o.error }
    }

    fn times(self, o: Self) -> Self {
        let error = self.error * o.bound + o.error * self.bound + self.error * o.error;
        Self { bound: self.bound * o.bound, error }
    }

    /// A sum of `n` such values, in f32 in any order.
    fn summed(self, n: f64) -> Self {
        Self { bound: self.bound * n, error: (self.error + n * f64::exp2(-24.0) * self.bound) * n }
    }

    /// A function that is at most `slope` steep and gives at most `bound`.
    fn through(self, slope: f64, bound: f64) -> Self {
        Self { bound, error: self.error * slope }
    }

    /// With the rounding of a result of this type.
    fn rounded(self, dtype: DType) -> Self {
        let (unit, tiny) = match dtype {
            DType::F16 => (f64::exp2(-11.0), f64::exp2(-25.0)),
            DType::BF16 => (f64::exp2(-8.0), 0.0),
            DType::F32 => (f64::exp2(-24.0), 0.0),
            DType::F64 => (f64::exp2(-53.0), 0.0),
            DType::Bool | DType::U8 | DType::I8 | DType::I32 | DType::I64 => return self,
        };
        // Library functions may be off by a few units of f32; then the result is rounded.
        let relative = unit + 4.0 * f64::exp2(-24.0);
        Self { error: self.error + relative * (self.bound + self.error) + tiny, ..self }
    }
}

struct Generator {
    rng: Rng,
    graph: Graph,
    known: Vec<Known>,
    samples: Vec<Vec<i64>>,
    /// The float type of most values.
    dtype: DType,
}

impl Generator {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let dtype = *rng.choose(&[DType::F32, DType::F32, DType::F16, DType::BF16]);
        let mut graph = Graph::new();
        let s0 = graph.add_symbol("batch", vec![1, 2, 3]);
        let s1 = graph.add_symbol("length", vec![4, 8, 6]);
        let samples = graph.sample_bindings();
        let mut g = Self { rng, graph, known: Vec::new(), samples, dtype };
        let half = s1.exact_div(2).expect("not 0");
        let c = Dim::constant;
        g.input("sample", dtype, vec![s0.clone(), c(4), s1.clone(), half.clone()]);
        g.input("tokens", dtype, vec![s0.clone(), s1.clone(), c(8)]);
        g.input("channels_last", dtype, vec![s0.clone(), half, c(3), c(4)]);
        g.input("ids", DType::I64, vec![s0.clone(), s1]);
        g.input("timestep", *g.rng.clone().choose(&[DType::F64, DType::I64]), vec![]);
        g.input("mask", DType::Bool, vec![s0, c(1), c(1)]);
        g
    }

    fn input(&mut self, name: &str, dtype: DType, shape: Vec<Dim>) -> ValueId {
        self.known.push(Known::exact(if dtype.is_float() { INPUT_BOUND } else { INTEGER_BOUND }));
        self.graph.add_input(name, ValueType::new(dtype, shape))
    }

    fn parameter(&mut self, dtype: DType, shape: &[i64]) -> ValueId {
        self.known.push(Known::exact(PARAMETER_BOUND));
        let name = format!("p{}.weight", self.graph.parameters.len());
        self.graph.add_parameter(&name, dtype, shape)
    }

    fn constant(&mut self, dtype: DType, shape: &[i64], values: &[f64]) -> ValueId {
        self.known.push(Known::exact(values.iter().fold(0.0, |m, v| m.max(v.abs()))));
        let tensor = Tensor::from_f64(dtype, shape, values).expect("as many values as the shape says");
        self.graph.add_constant(dtype, shape, tensor.into_bytes())
    }

    /// A 0-d number, as captured from Python.
    fn number(&mut self, dtype: DType, value: f64) -> ValueId {
        self.push(Op::Full { value }, &[], dtype, vec![], Known::exact(value.abs()))
    }

    /// Appends a node, `known` being before rounding; the caller has seen that it [`fits`](Self::fits).
    fn push(&mut self, op: Op, inputs: &[ValueId], dtype: DType, shape: Vec<Dim>, known: Known) -> ValueId {
        self.known.push(known);
        let module = format!("block.{}", self.graph.nodes.len() / 8);
        let path = self.graph.intern_path(&module);
        self.graph.push(Node { op, inputs: inputs.to_vec(), ty: ValueType::new(dtype, shape), path })
    }

    /// Appends a node with rounding, unless values get too large or too uncertain.
    fn emit(&mut self, op: Op, inputs: &[ValueId], dtype: DType, shape: Vec<Dim>, known: Known) -> Option<ValueId> {
        let known = known.rounded(dtype);
        let fits = known.bound <= LARGEST && known.error <= LEAST_SURE && self.largest_numel(&shape) <= 4096;
        fits.then(|| self.push(op, inputs, dtype, shape, known))
    }

    fn known(&self, v: ValueId) -> Known {
        self.known[v.index()]
    }

    fn ty(&self, v: ValueId) -> ValueType {
        self.graph.ty(v).clone()
    }

    /// The shape they broadcast to: sizes are equal, or the constant 1.
    fn broadcast(&self, shapes: &[&[Dim]]) -> Option<Vec<Dim>> {
        let result = broadcast_shapes(shapes).ok()?;
        let fits = |d: &Dim, r: &Dim| d.is(1) || self.samples.iter().all(|b| d.eval(b).ok() == r.eval(b).ok());
        let all_fit = shapes.iter().all(|s| s.iter().rev().zip(result.iter().rev()).all(|(d, r)| fits(d, r)));
        all_fit.then_some(result)
    }

    fn is_exact(&self, v: ValueId) -> bool {
        self.known(v).error == 0.0
    }

    fn extremes(&self, dim: &Dim) -> (i64, i64) {
        let values = self.samples.iter().map(|b| dim.eval(b).expect("sizes are whole at the samples"));
        values.fold((i64::MAX, i64::MIN), |(low, high), v| (low.min(v), high.max(v)))
    }

    fn smallest(&self, dim: &Dim) -> i64 {
        self.extremes(dim).0
    }

    fn largest(&self, dim: &Dim) -> i64 {
        self.extremes(dim).1
    }

    fn largest_numel(&self, shape: &[Dim]) -> i64 {
        self.largest(&Dim::product(shape))
    }

    /// A value of which this holds; recent ones are preferred.
    fn pick(&mut self, holds: impl Fn(&ValueType) -> bool) -> Option<ValueId> {
        let fitting: Vec<ValueId> = self.graph.values().filter(|&v| holds(self.graph.ty(v))).collect();
        let first = if self.rng.one_in(2) { fitting.len().saturating_sub(6) } else { 0 };
        let recent = &fitting[first..];
        if recent.is_empty() { None } else { Some(*self.rng.choose(recent)) }
    }

    /// A float tensor, not a Python number.
    fn pick_float(&mut self) -> Option<ValueId> {
        self.pick(|ty| ty.dtype.is_float() && ty.dtype != DType::F64)
    }

    /// Outputs: what nobody uses, and a value in between.
    fn finish(mut self) -> RandomGraph {
        let users = self.graph.users();
        let last: Vec<ValueId> = self.graph.values().filter(|v| users[v.index()].is_empty()).collect();
        let inner = ValueId(self.rng.below(self.graph.nodes.len()) as u32);
        self.graph.outputs = last.into_iter().rev().take(4).chain([inner]).collect();
        let tolerance = self.graph.outputs.iter().map(|&o| self.known(o).error).collect();
        RandomGraph { graph: self.graph, tolerance }
    }
}

/// Checks `got` against the exact results, element by element, `factor` times the tolerance being allowed.
///
/// # Errors
/// The first element that lies outside.
pub fn check_close(got: &[Tensor], exact: &[Tensor], tolerance: &[f64], factor: f64) -> Result<(), String> {
    if got.len() != exact.len() || got.len() != tolerance.len() {
        return Err(format!("{} results instead of {}", got.len(), exact.len()));
    }
    for (i, ((got, exact), tolerance)) in got.iter().zip(exact).zip(tolerance).enumerate() {
        if got.shape() != exact.shape() {
            return Err(format!("output {i} has shape {:?} instead of {:?}", got.shape(), exact.shape()));
        }
        for (at, (g, e)) in got.to_f64().into_iter().zip(exact.to_f64()).enumerate() {
            // NaN on either side fails.
            let close = (g - e).abs() <= tolerance * factor;
            if !close {
                return Err(format!("output {i}, element {at}: {g} instead of {e} (tolerance {tolerance} x {factor})"));
            }
        }
    }
    Ok(())
}
