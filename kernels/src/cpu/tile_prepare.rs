//! Tile programs, checked and in single-assignment form: the first stage of [`tile_exec`](super::tile_exec).

use super::tile_affine::Affine;
use super::tile_exec_ops::{Op1, Op3};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::tile::{Binary, Instr, MAX_INSTRS, MAX_OPERANDS, MAX_REGS, Reg, Source, TileError, TileProgram, Unary};

/// Most row scalars of a program.
pub const MAX_ROW_SCALARS: usize = 8;

/// A value of a prepared program: index into its nodes.
pub(super) type Value = u16;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Node {
    Const(f32),
    Acc,
    Memory(u8),
    RowScalar(u8),
    Unary(Op1, Value),
    Binary(Binary, Value, Value),
    Ternary(Op3, Value, Value, Value),
    Store { src: Value, out: u8 },
}

impl Node {
    pub(super) fn operands(self) -> impl Iterator<Item = Value> {
        let (list, n) = match self {
            Node::Const(_) | Node::Acc | Node::Memory(_) | Node::RowScalar(_) => ([0, 0, 0], 0),
            Node::Unary(_, a) | Node::Store { src: a, .. } => ([a, 0, 0], 1),
            Node::Binary(_, a, b) => ([a, b, 0], 2),
            Node::Ternary(_, a, b, c) => ([a, b, c], 3),
        };
        list.into_iter().take(n)
    }

    pub(super) fn is_computed(self) -> bool {
        matches!(self, Node::Unary(..) | Node::Binary(..) | Node::Ternary(..))
    }
}

/// A checked program in single-assignment form, ready to be bound to operands.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub(super) isa: Isa,
    pub(super) nodes: Vec<Node>,
    /// For each node the 16-bit type that its value is rounded to as it is computed.
    pub(super) rounds: Vec<Option<DType>>,
    pub(super) loads: Vec<DType>,
    pub(super) stores: Vec<DType>,
    pub(super) row_scalars: usize,
    /// What the program is, where it needs no tiles.
    pub(super) affine: Option<Affine>,
}

impl Prepared {
    /// Checks and prepares a program for a level of instructions (lowered to what the processor has).
    ///
    /// # Errors
    /// [`TileError`] if the program is malformed.
    pub fn new(program: &TileProgram, isa: Isa) -> Result<Prepared, TileError> {
        if program.instrs.len() > MAX_INSTRS {
            return Err(TileError::TooLong { instrs: program.instrs.len() });
        }
        if program.loads.len() + program.stores.len() > MAX_OPERANDS {
            return Err(TileError::TooManyOperands { operands: program.loads.len() + program.stores.len() });
        }
        let mut nodes = single_assignment(program)?;
        let mut rounds = vec![None; nodes.len()];
        remove_dead(&mut nodes, &mut rounds);
        let affine = Affine::of(&nodes);
        join_rounds(&mut nodes, &mut rounds, &program.stores);
        let row_scalars = nodes.iter().fold(0, |n, node| match node {
            Node::RowScalar(i) => n.max(*i as usize + 1),
            _ => n,
        });
        Ok(Prepared {
            isa: isa.clamp(),
            affine,
            nodes,
            rounds,
            loads: program.loads.clone(),
            stores: program.stores.clone(),
            row_scalars,
        })
    }

    /// Element types of the memory operands read.
    pub fn load_types(&self) -> &[DType] {
        &self.loads
    }

    /// Element types of the memory operands written.
    pub fn store_types(&self) -> &[DType] {
        &self.stores
    }

    /// The level of instructions it was prepared for.
    pub fn isa(&self) -> Isa {
        self.isa
    }
}

fn single_assignment(program: &TileProgram) -> Result<Vec<Node>, TileError> {
    let mut nodes: Vec<Node> = Vec::with_capacity(program.instrs.len());
    let mut current: [Option<Value>; MAX_REGS] = [None; MAX_REGS];
    for (at, instr) in program.instrs.iter().enumerate() {
        let read = |reg: Reg| match current.get(reg as usize) {
            None => Err(TileError::OutOfRange { at }),
            Some(None) => Err(TileError::UnwrittenRegister { at, reg }),
            Some(Some(value)) => Ok(*value),
        };
        let within =
            |index: u8, len: usize| if (index as usize) < len { Ok(()) } else { Err(TileError::OutOfRange { at }) };
        let (dst, node) = match *instr {
            Instr::Load { dst, src } => {
                match src {
                    Source::Memory(i) => within(i, program.loads.len())?,
                    Source::RowScalar(i) => within(i, MAX_ROW_SCALARS)?,
                    Source::Acc | Source::Const(_) => {}
                }
                let node = match src {
                    Source::Acc => Node::Acc,
                    Source::Memory(i) => Node::Memory(i),
                    Source::RowScalar(i) => Node::RowScalar(i),
                    Source::Const(x) => Node::Const(x),
                };
                (Some(dst), node)
            }
            Instr::Unary { op: Unary::RotatePairs, .. } => return Err(TileError::OutOfRange { at }),
            Instr::Unary { dst, op, a } => (Some(dst), Node::Unary(Op1::Plain(op), read(a)?)),
            Instr::Binary { dst, op, a, b } => {
                let (a, b) = (read(a)?, read(b)?);
                (Some(dst), simplify_binary(&nodes, op, a, b))
            }
            Instr::Fma { dst, a, b, c } => (Some(dst), Node::Ternary(Op3::Fma, read(a)?, read(b)?, read(c)?)),
            Instr::Select { dst, cond, a, b } => {
                (Some(dst), Node::Ternary(Op3::Select, read(cond)?, read(a)?, read(b)?))
            }
            Instr::Round { dst, a, dtype } => {
                let op = match dtype {
                    DType::F16 => Op1::RoundF16,
                    DType::BF16 => Op1::RoundBf16,
                    _ => return Err(TileError::OutOfRange { at }),
                };
                (Some(dst), Node::Unary(op, read(a)?))
            }
            Instr::Store { src, out } => {
                within(out, program.stores.len())?;
                (None, Node::Store { src: read(src)?, out })
            }
        };
        // Repeated constants, accumulators and row scalars are one value; repeated loads may differ by a store between.
        let is_fixed = matches!(node, Node::Const(_) | Node::Acc | Node::RowScalar(_));
        let is_same = |n: &Node| match (n, &node) {
            // 0.0 equals -0.0.
            (Node::Const(a), Node::Const(b)) => a.to_bits() == b.to_bits(),
            (a, b) => a == b,
        };
        let value = match nodes.iter().position(is_same) {
            Some(i) if is_fixed => i as Value,
            _ => {
                nodes.push(node);
                (nodes.len() - 1) as Value
            }
        };
        if let Some(dst) = dst {
            *current.get_mut(dst as usize).ok_or(TileError::OutOfRange { at })? = Some(value);
        }
    }
    Ok(nodes)
}

/// Powers with the exponents PyTorch computes without `pow`.
fn simplify_binary(nodes: &[Node], op: Binary, a: Value, b: Value) -> Node {
    let (Binary::Pow, Node::Const(e)) = (op, nodes[b as usize]) else {
        return Node::Binary(op, a, b);
    };
    let unary = match e {
        0.5 => Op1::Plain(Unary::Sqrt),
        -0.5 => Op1::Plain(Unary::Rsqrt),
        -1.0 => Op1::Plain(Unary::Reciprocal),
        2.0 => Op1::Square,
        3.0 => Op1::Cube,
        -2.0 => Op1::InverseSquare,
        _ => return Node::Binary(op, a, b),
    };
    Node::Unary(unary, a)
}

/// Nodes that nothing is stored of are left out, and what belongs to them.
fn remove_dead(nodes: &mut Vec<Node>, rounds: &mut Vec<Option<DType>>) {
    let mut live = vec![false; nodes.len()];
    for (i, node) in nodes.iter().enumerate().rev() {
        if matches!(node, Node::Store { .. }) || live[i] {
            live[i] = true;
            node.operands().for_each(|v| live[v as usize] = true);
        }
    }
    let mut renamed = vec![0 as Value; nodes.len()];
    let mut kept = Vec::with_capacity(nodes.len());
    let mut kept_rounds = Vec::with_capacity(nodes.len());
    for (i, node) in nodes.iter().enumerate() {
        if live[i] {
            renamed[i] = kept.len() as Value;
            let at = |v: Value| renamed[v as usize];
            kept.push(match *node {
                Node::Unary(op, a) => Node::Unary(op, at(a)),
                Node::Binary(op, a, b) => Node::Binary(op, at(a), at(b)),
                Node::Ternary(op, a, b, c) => Node::Ternary(op, at(a), at(b), at(c)),
                Node::Store { src, out } => Node::Store { src: at(src), out },
                leaf => leaf,
            });
            kept_rounds.push(rounds[i]);
        }
    }
    (*nodes, *rounds) = (kept, kept_rounds);
}

/// Makes the rounding of a value that nothing else reads part of the step that computes it, and leaves out one that the store
/// behind it does anyway.
fn join_rounds(nodes: &mut Vec<Node>, rounds: &mut Vec<Option<DType>>, stores: &[DType]) {
    let mut readers = vec![0; nodes.len()];
    nodes.iter().flat_map(|node| node.operands()).for_each(|v| readers[v as usize] += 1);
    let mut only_stored = vec![None; nodes.len()];
    for node in nodes.iter() {
        if let Node::Store { src, out } = *node
            && readers[src as usize] == 1
        {
            only_stored[src as usize] = Some(stores[out as usize]);
        }
    }
    for at in 0..nodes.len() {
        let (rounded, v) = match nodes[at] {
            Node::Unary(Op1::RoundF16, v) => (DType::F16, v as usize),
            Node::Unary(Op1::RoundBf16, v) => (DType::BF16, v as usize),
            _ => continue,
        };
        if readers[v] == 1 && nodes[v].is_computed() && rounds[v].is_none() {
            nodes[at] = nodes[v];
            rounds[at] = (only_stored[at] != Some(rounded)).then_some(rounded);
        }
    }
    remove_dead(nodes, rounds);
}
