//! [`Body`] to [`TileProgram`].
//!
//! The compute type of a tile program is f32. That is the compute type of every op whose result is f32, f16 or bf16, and of
//! every comparison of such operands; [`is_f32`] admits these. Loads of other types are admitted where the op would have
//! converted them to f32 itself.

use std::collections::HashMap;

use oxidiff_kernels::dtype::DType as KernelType;
use oxidiff_kernels::tile::{Binary, Instr as Tile, Reg as TileReg, Source, TileProgram, Unary};

use super::registers::Emitter;
use crate::analysis::{ComputeClass, node_class};
use crate::ir::{BinaryOp, DType, Graph, UnaryOp, ValueId};
use crate::kernel_ir::{Group, Instr, Reg};

/// How a program gets its root's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootForm {
    /// There is no root.
    None,
    /// From the accumulators of a contraction, with a bias to add.
    Accumulator {
        /// One element per column.
        bias: Option<ValueId>,
    },
    /// From memory: another kernel has written it.
    Memory,
    /// `x * scale + shift`, with what the statistics of a group norm made.
    GroupNorm {
        /// The normalised operand.
        x: ValueId,
    },
    /// `(x - mean) * rstd * weight + bias`, with the mean and the reciprocal standard deviation of the row.
    RowNorm {
        /// The normalised operand.
        x: ValueId,
        /// Whether there is a mean to subtract.
        centred: bool,
        /// One element per column.
        weight: Option<ValueId>,
        /// One element per column.
        bias: Option<ValueId>,
    },
}

/// What a program loads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileLoad {
    /// A value broadcast to the space (trailing dimensions aligned).
    Value(ValueId),
    /// One element per column, whatever dimension of the graph's value the columns are.
    Column(ValueId),
    /// The root's result, f32.
    Root,
    /// One f32 per image and channel.
    Scale,
    /// One f32 per image and channel.
    Shift,
}

/// A lowered body.
#[derive(Clone, Debug, PartialEq)]
pub struct TileBody {
    /// The program.
    pub program: TileProgram,
    /// What the program's loads are, in order.
    pub loads: Vec<TileLoad>,
    /// Values behind its stores, in order.
    pub stores: Vec<ValueId>,
    /// The program does nothing but add these and store once: what a plain epilogue does faster.
    pub plain: Option<Plain>,
}

/// `store(acc + bias + residual)`: indices into [`TileBody::loads`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Plain {
    /// Load added to every row.
    pub bias: Option<usize>,
    /// Load of the result's shape.
    pub residual: Option<usize>,
}

/// The kernels' name for an element type; `None` for one that no kernel reads.
pub fn kernel_type(dtype: DType) -> Option<KernelType> {
    Some(match dtype {
        DType::Bool => KernelType::Bool,
        DType::U8 => KernelType::U8,
        DType::I8 => KernelType::I8,
        DType::I32 => KernelType::I32,
        DType::I64 => KernelType::I64,
        DType::F16 => KernelType::F16,
        DType::BF16 => KernelType::BF16,
        DType::F32 => KernelType::F32,
        DType::F64 => KernelType::F64,
    })
}

const fn is_f32_like(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// Whether f32 arithmetic gives what the node means.
fn is_f32(graph: &Graph, value: ValueId) -> bool {
    let node = graph.node(value);
    let class = if node.op.is_pointwise() { node_class(graph, value) } else { ComputeClass::of(node.ty.dtype) };
    class == ComputeClass::F32 && (is_f32_like(node.ty.dtype) || node.ty.dtype == DType::Bool)
}

/// The tile program of a group: its body over the root's result, which it gets as `form` says. A group without
/// instructions stores its root. `None` if f32 arithmetic would not give what the nodes mean, or the program would be
/// too long.
pub fn lower_body(graph: &Graph, group: &Group, form: RootForm) -> Option<TileBody> {
    if !group.nodes.iter().all(|&v| Some(v) == group.root && is_f32_like(graph.ty(v).dtype) || is_f32(graph, v)) {
        return None;
    }
    let root_only = [Instr::Root];
    let (instrs, stores): (&[Instr], Vec<(Reg, ValueId)>) = if group.body.stores.is_empty() {
        (&root_only, vec![(Reg(0), group.root?)])
    } else {
        (&group.body.instrs, group.body.stores.clone())
    };
    let (instrs, stores) = drop_identities(instrs, stores);
    let mut lowering = Lowering::new(graph, &instrs, &stores);
    for (index, instr) in instrs.iter().enumerate() {
        if !matches!(instr, Instr::Root | Instr::Load(_) | Instr::Const(_)) {
            lowering.define(index, form)?;
        }
    }
    // Every load stands before every store: a store may share memory with a load.
    let sources = stores.iter().map(|(reg, _)| lowering.read(reg.0 as usize, form)).collect::<Option<Vec<_>>>()?;
    for (out, src) in sources.into_iter().enumerate() {
        lowering.emit.instrs.push(Tile::Store { src, out: out as u8 });
    }
    let program = TileProgram {
        instrs: lowering.emit.instrs,
        loads: lowering.loads.iter().map(|load| load_type(graph, *load)).collect::<Option<_>>()?,
        stores: stores.iter().map(|(_, v)| kernel_type(graph.ty(*v).dtype)).collect::<Option<_>>()?,
    };
    let plain = plain_epilogue(&program);
    Some(TileBody { program, loads: lowering.loads, stores: stores.into_iter().map(|s| s.1).collect(), plain })
}

/// Reads of a rounding to f32, which is the compute type, become reads of its operand.
fn drop_identities(instrs: &[Instr], mut stores: Vec<(Reg, ValueId)>) -> (Vec<Instr>, Vec<(Reg, ValueId)>) {
    let mut stands_for: Vec<Reg> = Vec::with_capacity(instrs.len());
    let mut renamed = Vec::with_capacity(instrs.len());
    for (index, instr) in instrs.iter().enumerate() {
        let at = |r: Reg| stands_for[r.0 as usize];
        let new = match *instr {
            Instr::Unary(op, a) => Instr::Unary(op, at(a)),
            Instr::Binary(op, a, b) => Instr::Binary(op, at(a), at(b)),
            Instr::Where(c, a, b) => Instr::Where(at(c), at(a), at(b)),
            Instr::Round(dtype, a) => Instr::Round(dtype, at(a)),
            Instr::Root | Instr::Load(_) | Instr::Const(_) => instr.clone(),
        };
        stands_for.push(match new {
            Instr::Round(DType::F32, a) => a,
            _ => Reg(index as u32),
        });
        renamed.push(new);
    }
    stores.iter_mut().for_each(|(reg, _)| *reg = stands_for[reg.0 as usize]);
    (renamed, stores)
}

struct Lowering<'a> {
    graph: &'a Graph,
    instrs: &'a [Instr],
    emit: Emitter,
    loads: Vec<TileLoad>,
    /// Uses of each body register that are still to come.
    uses: Vec<u32>,
    regs: HashMap<usize, TileReg>,
}

fn operands(instr: &Instr) -> Vec<usize> {
    match *instr {
        Instr::Root | Instr::Load(_) | Instr::Const(_) => Vec::new(),
        Instr::Unary(_, a) | Instr::Round(_, a) => vec![a.0 as usize],
        Instr::Binary(_, a, b) => vec![a.0 as usize, b.0 as usize],
        Instr::Where(c, a, b) => vec![c.0 as usize, a.0 as usize, b.0 as usize],
    }
}

impl<'a> Lowering<'a> {
    fn new(graph: &'a Graph, instrs: &'a [Instr], stores: &[(Reg, ValueId)]) -> Self {
        let mut uses = vec![0; instrs.len()];
        instrs.iter().flat_map(operands).for_each(|r| uses[r] += 1);
        stores.iter().for_each(|(r, _)| uses[r.0 as usize] += 1);
        Self { graph, instrs, emit: Emitter::new(), loads: Vec::new(), uses, regs: HashMap::new() }
    }

    /// The register that holds body register `index`; leaves are loaded when they are first read.
    fn read(&mut self, index: usize, form: RootForm) -> Option<TileReg> {
        if let Some(&reg) = self.regs.get(&index) {
            return Some(reg);
        }
        let dst = match self.instrs[index] {
            Instr::Root => self.load_root(form)?,
            Instr::Load(value) => self.load(value)?,
            Instr::Const(c) => {
                let dst = self.emit.take()?;
                self.emit.instrs.push(Tile::Load { dst, src: Source::Const(c as f32) });
                dst
            }
            _ => return None,
        };
        self.regs.insert(index, dst);
        Some(dst)
    }

    fn load(&mut self, value: ValueId) -> Option<TileReg> {
        match self.graph.as_scalar(value) {
            Some(c) => self.constant(constant_of(c, self.graph.ty(value).dtype)),
            None => self.load_memory(TileLoad::Value(value)),
        }
    }

    fn load_memory(&mut self, load: TileLoad) -> Option<TileReg> {
        let at = self.loads.iter().position(|&l| l == load).unwrap_or_else(|| {
            self.loads.push(load);
            self.loads.len() - 1
        });
        let dst = self.emit.take()?;
        self.emit.instrs.push(Tile::Load { dst, src: Source::Memory(u8::try_from(at).ok()?) });
        Some(dst)
    }

    fn load_row_scalar(&mut self, index: u8) -> Option<TileReg> {
        let dst = self.emit.take()?;
        self.emit.instrs.push(Tile::Load { dst, src: Source::RowScalar(index) });
        Some(dst)
    }

    fn load_root(&mut self, form: RootForm) -> Option<TileReg> {
        match form {
            RootForm::None => None,
            RootForm::Memory => self.load_memory(TileLoad::Root),
            RootForm::Accumulator { bias } => {
                let dst = self.emit.take()?;
                self.emit.instrs.push(Tile::Load { dst, src: Source::Acc });
                match bias {
                    Some(bias) => self.in_place(Binary::Add, dst, TileLoad::Column(bias)),
                    None => Some(dst),
                }
            }
            RootForm::GroupNorm { x } => {
                let dst = self.load_memory(TileLoad::Value(x))?;
                let (scale, shift) = (self.load_memory(TileLoad::Scale)?, self.load_memory(TileLoad::Shift)?);
                self.emit.instrs.push(Tile::Fma { dst, a: dst, b: scale, c: shift });
                self.emit.give(scale);
                self.emit.give(shift);
                Some(dst)
            }
            RootForm::RowNorm { x, centred, weight, bias } => self.row_norm(x, centred, weight, bias),
        }
    }

    fn row_norm(
        &mut self,
        x: ValueId,
        centred: bool,
        weight: Option<ValueId>,
        bias: Option<ValueId>,
    ) -> Option<TileReg> {
        let dst = self.load_memory(TileLoad::Value(x))?;
        if centred {
            let mean = self.load_row_scalar(0)?;
            self.emit.instrs.push(Tile::Binary { dst, op: Binary::Sub, a: dst, b: mean });
            self.emit.give(mean);
        }
        let rstd = self.load_row_scalar(1)?;
        self.emit.instrs.push(Tile::Binary { dst, op: Binary::Mul, a: dst, b: rstd });
        self.emit.give(rstd);
        for (op, operand) in [(Binary::Mul, weight), (Binary::Add, bias)] {
            if let Some(operand) = operand {
                self.in_place(op, dst, TileLoad::Column(operand))?;
            }
        }
        Some(dst)
    }

    /// `dst = dst op load`.
    fn in_place(&mut self, op: Binary, dst: TileReg, load: TileLoad) -> Option<TileReg> {
        let b = self.load_memory(load)?;
        self.emit.instrs.push(Tile::Binary { dst, op, a: dst, b });
        self.emit.give(b);
        Some(dst)
    }

    /// One use of body register `index` is over.
    fn done(&mut self, index: usize) {
        self.uses[index] -= 1;
        if self.uses[index] == 0
            && let Some(reg) = self.regs.remove(&index)
        {
            self.emit.give(reg);
        }
    }

    fn define(&mut self, index: usize, form: RootForm) -> Option<()> {
        if self.uses[index] == 0 {
            operands(&self.instrs[index]).into_iter().for_each(|r| self.done(r));
            return Some(());
        }
        let instr = self.instrs[index].clone();
        let reads = operands(&instr);
        let regs: Vec<TileReg> = reads.iter().map(|&r| self.read(r, form)).collect::<Option<_>>()?;
        let dst = match instr {
            Instr::Root | Instr::Load(_) | Instr::Const(_) => return None,
            Instr::Unary(op, _) => self.unary(op, regs[0])?,
            Instr::Binary(op, ..) => self.binary(op, regs[0], regs[1])?,
            Instr::Where(..) => {
                let dst = self.emit.take()?;
                self.emit.instrs.push(Tile::Select { dst, cond: regs[0], a: regs[1], b: regs[2] });
                dst
            }
            Instr::Round(dtype, _) => self.round(dtype, regs[0])?,
        };
        self.regs.insert(index, dst);
        reads.into_iter().for_each(|r| self.done(r));
        Some(())
    }

    fn push1(&mut self, op: Unary, a: TileReg) -> Option<TileReg> {
        let dst = self.emit.take()?;
        self.emit.instrs.push(Tile::Unary { dst, op, a });
        Some(dst)
    }

    fn push2(&mut self, op: Binary, a: TileReg, b: TileReg) -> Option<TileReg> {
        let dst = self.emit.take()?;
        self.emit.instrs.push(Tile::Binary { dst, op, a, b });
        Some(dst)
    }

    fn constant(&mut self, c: f32) -> Option<TileReg> {
        let dst = self.emit.take()?;
        self.emit.instrs.push(Tile::Load { dst, src: Source::Const(c) });
        Some(dst)
    }

    fn round(&mut self, dtype: DType, a: TileReg) -> Option<TileReg> {
        let dst = match dtype {
            DType::F16 | DType::BF16 => {
                let dst = self.emit.take()?;
                self.emit.instrs.push(Tile::Round { dst, a, dtype: kernel_type(dtype)? });
                dst
            }
            DType::Bool => {
                let zero = self.constant(0.0)?;
                let dst = self.push2(Binary::Ne, a, zero)?;
                self.emit.give(zero);
                dst
            }
            DType::F32 | DType::U8 | DType::I8 | DType::I32 | DType::I64 | DType::F64 => return None,
        };
        Some(dst)
    }

    fn unary(&mut self, op: UnaryOp, a: TileReg) -> Option<TileReg> {
        let simple = match op {
            UnaryOp::Neg => Unary::Neg,
            UnaryOp::Abs => Unary::Abs,
            UnaryOp::Exp => Unary::Exp,
            UnaryOp::Log => Unary::Log,
            UnaryOp::Log2 => Unary::Log2,
            UnaryOp::Log10 => Unary::Log10,
            UnaryOp::Sin => Unary::Sin,
            UnaryOp::Cos => Unary::Cos,
            UnaryOp::Tanh => Unary::Tanh,
            UnaryOp::Sqrt => Unary::Sqrt,
            UnaryOp::Rsqrt => Unary::Rsqrt,
            UnaryOp::Reciprocal => Unary::Reciprocal,
            UnaryOp::Sigmoid => Unary::Sigmoid,
            UnaryOp::Silu => Unary::Silu,
            UnaryOp::Gelu => Unary::Gelu,
            UnaryOp::GeluTanh => Unary::GeluTanh,
            UnaryOp::Relu => Unary::Relu,
            UnaryOp::Erf => Unary::Erf,
            UnaryOp::Floor => Unary::Floor,
            UnaryOp::Ceil => Unary::Ceil,
            UnaryOp::Round => Unary::RoundEven,
            UnaryOp::Trunc => Unary::Trunc,
            UnaryOp::LogicalNot | UnaryOp::BitwiseNot => Unary::Not,
            UnaryOp::Isnan => Unary::IsNan,
            UnaryOp::RotatePairs => Unary::RotatePairs,
            UnaryOp::Isinf => return self.is_infinite(a),
            UnaryOp::Sign => return self.sign(a),
            UnaryOp::Softplus => return self.softplus(a),
        };
        self.push1(simple, a)
    }

    fn is_infinite(&mut self, a: TileReg) -> Option<TileReg> {
        let infinity = self.constant(f32::INFINITY)?;
        let size = self.push1(Unary::Abs, a)?;
        let dst = self.push2(Binary::Eq, size, infinity)?;
        self.emit.give(infinity);
        self.emit.give(size);
        Some(dst)
    }

    /// `(x > 0) - (x < 0)`.
    fn sign(&mut self, a: TileReg) -> Option<TileReg> {
        let zero = self.constant(0.0)?;
        let above = self.push2(Binary::Gt, a, zero)?;
        let below = self.push2(Binary::Lt, a, zero)?;
        let dst = self.push2(Binary::Sub, above, below)?;
        [zero, above, below].into_iter().for_each(|r| self.emit.give(r));
        Some(dst)
    }

    /// `x > 20 ? x : log1p(e)`, `e = exp(x)`; `log1p(e) = log(u) * e / (u - 1)` with `u = 1 + e`, and `e` where `u` is 1.
    fn softplus(&mut self, a: TileReg) -> Option<TileReg> {
        let one = self.constant(1.0)?;
        let e = self.push1(Unary::Exp, a)?;
        let u = self.push2(Binary::Add, e, one)?;
        let log = self.push1(Unary::Log, u)?;
        let scaled = self.push2(Binary::Mul, log, e)?;
        let above_one = self.push2(Binary::Sub, u, one)?;
        let quotient = self.push2(Binary::Div, scaled, above_one)?;
        let tiny = self.push2(Binary::Eq, u, one)?;
        let log1p = self.emit.take()?;
        self.emit.instrs.push(Tile::Select { dst: log1p, cond: tiny, a: e, b: quotient });
        let threshold = self.constant(20.0)?;
        let linear = self.push2(Binary::Gt, a, threshold)?;
        let dst = self.emit.take()?;
        self.emit.instrs.push(Tile::Select { dst, cond: linear, a, b: log1p });
        [one, e, u, log, scaled, above_one, quotient, tiny, log1p, threshold, linear]
            .into_iter()
            .for_each(|r| self.emit.give(r));
        Some(dst)
    }

    fn binary(&mut self, op: BinaryOp, a: TileReg, b: TileReg) -> Option<TileReg> {
        let simple = match op {
            BinaryOp::Add => Binary::Add,
            BinaryOp::Sub => Binary::Sub,
            BinaryOp::Mul => Binary::Mul,
            BinaryOp::Div => Binary::Div,
            BinaryOp::FloorDivide => Binary::FloorDivide,
            BinaryOp::Remainder => Binary::Remainder,
            BinaryOp::Pow => Binary::Pow,
            BinaryOp::Atan2 => Binary::Atan2,
            BinaryOp::Maximum => Binary::Max,
            BinaryOp::Minimum => Binary::Min,
            BinaryOp::Eq => Binary::Eq,
            BinaryOp::Ne => Binary::Ne,
            BinaryOp::Lt => Binary::Lt,
            BinaryOp::Le => Binary::Le,
            BinaryOp::Gt => Binary::Gt,
            BinaryOp::Ge => Binary::Ge,
            BinaryOp::LogicalAnd | BinaryOp::BitwiseAnd => Binary::And,
            BinaryOp::LogicalOr | BinaryOp::BitwiseOr => Binary::Or,
            BinaryOp::LogicalXor | BinaryOp::BitwiseXor => return self.exclusive_or(a, b),
            // Of integers alone.
            BinaryOp::BitwiseLeftShift | BinaryOp::BitwiseRightShift => return None,
        };
        self.push2(simple, a, b)
    }

    fn exclusive_or(&mut self, a: TileReg, b: TileReg) -> Option<TileReg> {
        let not_a = self.push1(Unary::Not, a)?;
        let not_b = self.push1(Unary::Not, b)?;
        let dst = self.push2(Binary::Ne, not_a, not_b)?;
        self.emit.give(not_a);
        self.emit.give(not_b);
        Some(dst)
    }
}

fn load_type(graph: &Graph, load: TileLoad) -> Option<KernelType> {
    match load {
        TileLoad::Value(v) | TileLoad::Column(v) => kernel_type(graph.ty(v).dtype),
        TileLoad::Root | TileLoad::Scale | TileLoad::Shift => Some(KernelType::F32),
    }
}

/// The f32 a constant of that type is read as.
fn constant_of(c: f64, dtype: DType) -> f32 {
    match dtype {
        DType::F16 => half::f16::from_f64(c).to_f32(),
        DType::BF16 => half::bf16::from_f64(c).to_f32(),
        DType::Bool => f32::from(c != 0.0),
        DType::U8 | DType::I8 | DType::I32 | DType::I64 => c.trunc() as f32,
        DType::F32 | DType::F64 => c as f32,
    }
}

/// Recognises `acc`, `acc + bias`, `acc + residual` and `acc + bias + residual`, stored once. Which load is a bias is
/// decided by the plan, which knows the shapes; the first added is called bias here.
fn plain_epilogue(program: &TileProgram) -> Option<Plain> {
    let mut sum = None;
    let mut memory: HashMap<TileReg, usize> = HashMap::new();
    let mut added = Vec::new();
    for instr in &program.instrs {
        match *instr {
            Tile::Load { dst, src: Source::Acc } => sum = Some(dst),
            Tile::Load { dst, src: Source::Memory(at) } => {
                memory.insert(dst, at as usize);
            }
            Tile::Binary { dst, op: Binary::Add, a, b } => {
                let other = match sum {
                    Some(s) if s == a => b,
                    Some(s) if s == b => a,
                    _ => return None,
                };
                added.push(memory.remove(&other)?);
                memory.remove(&dst);
                sum = Some(dst);
            }
            Tile::Store { src, .. } if Some(src) == sum => {}
            _ => return None,
        }
    }
    if program.stores.len() != 1 || added.len() > 2 {
        return None;
    }
    Some(Plain { bias: added.first().copied(), residual: added.get(1).copied() })
}
