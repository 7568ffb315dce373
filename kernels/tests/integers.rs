//! Programs over integers: what is refused, and what arithmetic of other types has no equal of.

use oxidiff_kernels::cpu::integers::*;
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::tile::{Bound, Space};

fn program(instrs: &[(Op, DType)], loads: &[DType], stores: &[Value]) -> IntegerProgram {
    let instrs = instrs.iter().map(|&(op, dtype)| Instr { op, dtype }).collect();
    IntegerProgram { instrs, loads: loads.to_vec(), stores: stores.to_vec() }
}

fn run(program: &IntegerProgram, x: &mut [i64], y: &mut [i64]) -> Result<(), DivisionByZero> {
    let prepared = Prepared::new(program, Isa::detect()).expect("a program");
    let space = Space::new(&[x.len()]);
    let loads = [Bound::contiguous(x.as_mut_ptr().cast(), &space)];
    let stores = [Bound::contiguous(y.as_mut_ptr().cast(), &space)];
    // SAFETY: slices of the space's size.
    unsafe { run_integers(&Pool::new(2), &prepared, &space, &loads, &stores) }
}

#[test]
fn malformed_programs_are_refused() {
    let (load, i64s) = ((Op::Load(0), DType::I64), [DType::I64]);
    let refused =
        |instrs: &[_], stores: &[Value]| Prepared::new(&program(instrs, &i64s, stores), Isa::Portable).is_none();
    assert!(!refused(&[load], &[0]));
    assert!(refused(&[(Op::Load(1), DType::I64)], &[0]), "no such operand");
    assert!(refused(&[(Op::Load(0), DType::I32)], &[0]), "another type than the operand's");
    assert!(refused(&[(Op::Load(0), DType::F32)], &[0]), "a float");
    assert!(refused(&[load, (Op::Unary(IntegerUnary::Neg, 1), DType::I64)], &[1]), "reads itself");
    assert!(refused(&[load], &[1]), "stores what is not there");
    // The sum of the first two, and then of the others one by one: all others are alive until their turn.
    let many = |count: u8| {
        let add = |i: u8| (Op::Binary(IntegerBinary::Add, i, if i == 1 { 0 } else { count + i - 2 }), DType::I64);
        (0..count).map(|_| load).chain((1..count).map(add)).collect::<Vec<_>>()
    };
    let most = REGISTERS as u8 - 1;
    assert!(!refused(&many(most), &[2 * most - 2]));
    assert!(refused(&many(most + 1), &[2 * most]), "more values than registers");
}

/// Where a tile is not full, what its registers hold behind it divides nothing.
#[test]
fn divisors_of_zero_are_reported() {
    let divide = (Op::Binary(IntegerBinary::FloorDivide, 1, 0), DType::I64);
    let divide = program(&[(Op::Load(0), DType::I64), (Op::Const(7), DType::I64), divide], &[DType::I64], &[2]);
    let (mut x, mut y) = (vec![2; 300], vec![0; 300]);
    assert_eq!(run(&divide, &mut x, &mut y), Ok(()));
    assert_eq!(y, vec![3; 300]);
    x[299] = 0;
    assert_eq!(run(&divide, &mut x, &mut y), Err(DivisionByZero));
}

/// Constants decide the lanes as types do: 300 is no byte, and no byte equals it.
#[test]
fn constants_keep_their_value() {
    for (constant, expected) in [(300, 0), (1 << 40, 0), (44, 1)] {
        let equal = (Op::Binary(IntegerBinary::Eq, 1, 2), DType::Bool);
        let to_byte = (Op::Unary(IntegerUnary::Convert, 0), DType::U8);
        let widened = (Op::Unary(IntegerUnary::Convert, 3), DType::I64);
        let instrs = [(Op::Load(0), DType::I64), to_byte, (Op::Const(constant), DType::I64), equal, widened];
        let (mut x, mut y) = (vec![300; 5], vec![9; 5]);
        run(&program(&instrs, &[DType::I64], &[4]), &mut x, &mut y).expect("no division");
        assert_eq!(y, vec![expected; 5], "{constant}");
    }
}

#[test]
fn floats_are_truncated_as_on_x86() {
    let cases = [
        (DType::I64, 3.9, 3),
        (DType::I64, f64::NAN, i64::MIN),
        (DType::I64, 1e19, i64::MIN),
        (DType::I32, -3.9, -3),
        (DType::I32, 3e9, i64::from(i32::MIN)),
        (DType::U8, 300.5, 44),
        (DType::I8, -129.0, 127),
        (DType::Bool, 0.5, 1),
    ];
    for (dtype, float, expected) in cases {
        assert_eq!(truncated(dtype, float), expected, "{float} to {dtype:?}");
    }
}
