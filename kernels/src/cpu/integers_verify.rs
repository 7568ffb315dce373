//! Rows of the registry for loops over integers: each level and width of lanes, compared with plain loops over i128.

use super::bench::Bench;
use super::integers::{Instr, IntegerBinary, IntegerProgram, IntegerUnary, Op, Prepared, is_predicate, run_integers};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::registry::{Family, Row};
use crate::tile::{Bound, MAX_DIMS, Space};

/// A type of each width of lanes.
const TYPES: [(DType, &str); 3] = [(DType::U8, "u8"), (DType::I32, "i32"), (DType::I64, "i64")];

/// A kernel for each type at every level.
pub fn rows() -> Vec<Row> {
    let of = |(dtype, suffix): (DType, &'static str)| {
        Isa::ALL.map(move |isa| Row {
            name: format!("integers_{suffix}_r24__{}", isa.name()),
            family: Family::Tile,
            isa,
            dtype,
            is_available: Box::new(move || isa.is_available()),
            verify: Box::new(move || verify(isa, dtype)),
            benches: benches(isa, dtype),
        })
    };
    TYPES.into_iter().flat_map(of).collect()
}

const UNARY: [IntegerUnary; 7] = [
    IntegerUnary::Neg,
    IntegerUnary::Abs,
    IntegerUnary::Sign,
    IntegerUnary::BitwiseNot,
    IntegerUnary::LogicalNot,
    IntegerUnary::Relu,
    IntegerUnary::Convert,
];

const BINARY: [IntegerBinary; 22] = [
    IntegerBinary::Add,
    IntegerBinary::Sub,
    IntegerBinary::Mul,
    IntegerBinary::FloorDivide,
    IntegerBinary::Remainder,
    IntegerBinary::Pow,
    IntegerBinary::Max,
    IntegerBinary::Min,
    IntegerBinary::BitwiseAnd,
    IntegerBinary::BitwiseOr,
    IntegerBinary::BitwiseXor,
    IntegerBinary::ShiftLeft,
    IntegerBinary::ShiftRight,
    IntegerBinary::Eq,
    IntegerBinary::Ne,
    IntegerBinary::Lt,
    IntegerBinary::Le,
    IntegerBinary::Gt,
    IntegerBinary::Ge,
    IntegerBinary::LogicalAnd,
    IntegerBinary::LogicalOr,
    IntegerBinary::LogicalXor,
];

/// The value that a type holds of an integer: its low bits, or whether it is not 0.
fn wrap(dtype: DType, v: i128) -> i128 {
    match dtype {
        DType::Bool => i128::from(v != 0),
        DType::U8 => i128::from(v as u8),
        DType::I8 => i128::from(v as i8),
        DType::I32 => i128::from(v as i32),
        _ => i128::from(v as i64),
    }
}

fn unary(op: IntegerUnary, a: i128) -> i128 {
    match op {
        IntegerUnary::Neg => -a,
        IntegerUnary::Abs => a.abs(),
        IntegerUnary::Sign => a.signum(),
        IntegerUnary::BitwiseNot => !a,
        IntegerUnary::LogicalNot => i128::from(a == 0),
        IntegerUnary::Relu => a.max(0),
        IntegerUnary::Convert => a,
    }
}

/// What a binary op means; divisors are not 0.
fn binary(op: IntegerBinary, a: i128, b: i128) -> i128 {
    let truth = i128::from;
    match op {
        IntegerBinary::Add => a + b,
        IntegerBinary::Sub => a - b,
        IntegerBinary::Mul => a * b,
        IntegerBinary::FloorDivide => (a - (a % b + b) % b) / b,
        IntegerBinary::Remainder => (a % b + b) % b,
        IntegerBinary::Pow if b < 0 => match a {
            1 => 1,
            -1 => 1 - 2 * (b & 1),
            _ => 0,
        },
        IntegerBinary::Pow => (0..64).rev().fold(1, |power: i128, bit| {
            let square = i128::from((power * power) as i64);
            if b >> bit & 1 == 1 { i128::from((square * a) as i64) } else { square }
        }),
        IntegerBinary::Max => a.max(b),
        IntegerBinary::Min => a.min(b),
        IntegerBinary::BitwiseAnd => a & b,
        IntegerBinary::BitwiseOr => a | b,
        IntegerBinary::BitwiseXor => a ^ b,
        IntegerBinary::ShiftLeft => {
            if (0..64).contains(&b) {
                i128::from((a as i64) << b)
            } else {
                0
            }
        }
        IntegerBinary::ShiftRight => a >> if (0..64).contains(&b) { b } else { 63 },
        IntegerBinary::Eq => truth(a == b),
        IntegerBinary::Ne => truth(a != b),
        IntegerBinary::Lt => truth(a < b),
        IntegerBinary::Le => truth(a <= b),
        IntegerBinary::Gt => truth(a > b),
        IntegerBinary::Ge => truth(a >= b),
        IntegerBinary::LogicalAnd => truth(a != 0 && b != 0),
        IntegerBinary::LogicalOr => truth(a != 0 || b != 0),
        IntegerBinary::LogicalXor => truth((a != 0) != (b != 0)),
    }
}

/// Integers in memory.
struct Integers {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Integers {
    /// Small and large ones of both signs, the bounds of the type among them.
    fn new(dtype: DType, len: usize, seed: u64) -> Integers {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut integers = Integers { dtype, bytes: vec![0; len * dtype.size_bytes()] };
        for at in 0..len {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let drawn = (state >> 8) as i64;
            integers.set(
                at,
                match state >> 61 {
                    0..4 => drawn % 12,
                    4 => drawn % 70,
                    5 => i64::MIN >> (64 - 8 * dtype.size_bytes()),
                    6 => i64::MAX >> (64 - 8 * dtype.size_bytes()),
                    _ => drawn << 8 | drawn >> 40,
                },
            );
        }
        integers
    }

    fn set(&mut self, at: usize, value: i64) {
        let size = self.dtype.size_bytes();
        let value = if self.dtype == DType::Bool { value & 1 } else { value };
        self.bytes[at * size..(at + 1) * size].copy_from_slice(&value.to_le_bytes()[..size]);
    }

    fn get(&self, at: usize) -> i128 {
        let size = self.dtype.size_bytes();
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&self.bytes[at * size..(at + 1) * size]);
        wrap(self.dtype, i128::from(i64::from_le_bytes(bytes)))
    }
}

/// Every op alone: on the type, on it and on bytes, with a constant, in place, over spaces of short and long rows.
fn verify(isa: Isa, dtype: DType) -> Result<(), String> {
    for other in [dtype, DType::I8, DType::Bool] {
        for op in BINARY {
            let result = if is_predicate(op) { DType::Bool } else { dtype };
            let expected = |a, b| binary(op, a, b);
            let divides = matches!(op, IntegerBinary::FloorDivide | IntegerBinary::Remainder);
            let compute = Op::Binary(op, 0, 1);
            check(isa, [dtype, other], compute, result, divides, &expected).map_err(|e| format!("{op:?} {e}"))?;
        }
    }
    for op in UNARY {
        for result in [dtype, DType::I8, DType::Bool] {
            let expected = |a, _| unary(op, a);
            check(isa, [dtype; 2], Op::Unary(op, 0), result, false, &expected).map_err(|e| format!("{op:?} {e}"))?;
        }
    }
    check(isa, [dtype; 2], Op::Select(1, 0, 2), dtype, false, &|a, b| if b != 0 { a } else { 5 })
        .map_err(|e| format!("Select {e}"))
}

/// Runs `compute` on operands of two types (values 0 and 1; value 2 is the constant 5) and compares with `expected`.
fn check(
    isa: Isa,
    types: [DType; 2],
    compute: Op,
    result: DType,
    divides: bool,
    expected: &dyn Fn(i128, i128) -> i128,
) -> Result<(), String> {
    let instrs = [(Op::Load(0), types[0]), (Op::Load(1), types[1]), (Op::Const(5), DType::I64), (compute, result)];
    let program = IntegerProgram {
        instrs: instrs.map(|(op, dtype)| Instr { op, dtype }).to_vec(),
        loads: types.to_vec(),
        stores: vec![3],
    };
    let prepared = Prepared::new(&program, isa).ok_or("is refused")?;
    for (outer, rows, cols) in [(3, 40, 7), (2, 1, 1500), (1, 1, 1)] {
        let count = outer * rows * cols;
        // The second operand is broadcast along the rows of a slice, and lies backwards.
        let (mut a, mut b) = (Integers::new(types[0], count, 1), Integers::new(types[1], outer * cols, 2));
        if divides {
            (0..outer * cols).filter(|&at| b.get(at) == 0).collect::<Vec<_>>().into_iter().for_each(|at| b.set(at, 1));
        }
        let mut out = Integers { dtype: result, bytes: vec![0; count * result.size_bytes()] };
        let space = Space::new(&[outer, rows, cols]);
        let last = (outer * cols - 1) * types[1].size_bytes();
        let mut strides = [0; MAX_DIMS];
        (strides[0], strides[2]) = (-(cols as isize), -1);
        let backwards = Bound { ptr: b.bytes.as_mut_ptr().wrapping_add(last), strides };
        let loads = [Bound::contiguous(a.bytes.as_mut_ptr(), &space), backwards];
        let stores = [Bound::contiguous(out.bytes.as_mut_ptr(), &space)];
        // SAFETY: the vectors hold the space at these strides.
        unsafe { run_integers(Pool::global(), &prepared, &space, &loads, &stores) }.map_err(|e| e.to_string())?;
        let operand = |at: usize| (a.get(at), b.get(outer * cols - 1 - (at / (rows * cols) * cols + at % cols)));
        let wanted: Vec<i128> = (0..count).map(operand).map(|(x, y)| wrap(result, expected(x, y))).collect();
        if let Some(at) = (0..count).find(|&at| out.get(at) != wanted[at]) {
            let (x, y) = operand(at);
            return Err(format!("of {x} and {y} ({types:?}) is {}, expected {}", out.get(at), wanted[at]));
        }
        if result.size_bytes() == types[0].size_bytes() {
            // SAFETY: as above; the result takes the place of the first operand, element for element.
            unsafe { run_integers(Pool::global(), &prepared, &space, &loads, &loads[..1]) }
                .map_err(|e| e.to_string())?;
            a.dtype = result;
            if let Some(at) = (0..count).find(|&at| a.get(at) != wanted[at]) {
                return Err(format!("in place ({types:?}): result {at} is {}, expected {}", a.get(at), wanted[at]));
            }
        }
    }
    Ok(())
}

/// Nibbles taken out of bytes, as of weights in 4 bits.
fn benches(isa: Isa, dtype: DType) -> Vec<Bench> {
    let bench = |(rows, cols): (usize, usize)| Bench {
        op: "unpack",
        sizes: vec![("rows", rows), ("cols", cols)],
        flops: 0.0,
        bytes: (3 * rows * cols * dtype.size_bytes()) as f64,
        start: Box::new(move || {
            let instrs = [
                (Op::Load(0), dtype),
                (Op::Load(1), dtype),
                (Op::Binary(IntegerBinary::ShiftRight, 0, 1), dtype),
                (Op::Const(15), DType::I64),
                (Op::Binary(IntegerBinary::BitwiseAnd, 2, 3), dtype),
            ];
            let program = IntegerProgram {
                instrs: instrs.map(|(op, dtype)| Instr { op, dtype }).to_vec(),
                loads: vec![dtype; 2],
                stores: vec![4],
            };
            let prepared = Prepared::new(&program, isa).ok_or(super::KernelError::UnsupportedDType(dtype))?;
            let mut x = Integers::new(dtype, rows * cols, 1);
            let mut by = Integers::new(dtype, 2, 2);
            by.set(0, 0);
            by.set(1, 4);
            let mut y = Integers { dtype, bytes: vec![0; 2 * rows * cols * dtype.size_bytes()] };
            Ok(Box::new(move || {
                let space = Space::new(&[rows, 2, cols]);
                let loads = [
                    Bound { ptr: x.bytes.as_mut_ptr(), strides: [cols as isize, 0, 1, 0, 0, 0, 0, 0] },
                    Bound { ptr: by.bytes.as_mut_ptr(), strides: [0, 1, 0, 0, 0, 0, 0, 0] },
                ];
                let stores = [Bound::contiguous(y.bytes.as_mut_ptr(), &space)];
                // SAFETY: the vectors hold the space at these strides.
                let outcome = unsafe { run_integers(Pool::global(), &prepared, &space, &loads, &stores) };
                outcome.map_err(|_| super::KernelError::Shape("a divisor is 0"))
            }))
        }),
    };
    [(4096, 16), (131_072, 16), (16_384, 128)].map(bench).into()
}
