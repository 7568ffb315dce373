//! The meaning of tile programs: one element at a time, plain loops, elementary functions in f64 rounded once.

use super::tile_exec_ops::{load_scalar, store_scalar};
use crate::dtype::DType;
use crate::tile::{Binary, Bound, Instr, MAX_REGS, Source, Space, TileProgram, Unary};

/// Complementary error function in f64, relative error below 1e-13 (series below 2, continued fraction above).
pub fn erfc_f64(x: f64) -> f64 {
    if x.is_nan() {
        return x;
    }
    if x < 2.0 {
        return 1.0 - erf_f64(x);
    }
    // Lentz-free backward evaluation of erfc(x) = exp(-x^2) / sqrt(pi) / (x + 1/2 / (x + 1 / (x + 3/2 / (x + ...)))).
    let tail = (1..=120).rev().fold(x, |t, k| x + k as f64 / 2.0 / t);
    (-x * x).exp() / std::f64::consts::PI.sqrt() / tail
}

/// Error function in f64.
pub fn erf_f64(x: f64) -> f64 {
    if x.is_nan() || x == 0.0 {
        return x;
    }
    if x.abs() >= 2.0 {
        return x.signum() * (1.0 - erfc_f64(x.abs()));
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..80 {
        term *= -x * x / n as f64;
        sum += term / (2 * n + 1) as f64;
    }
    sum * 2.0 / std::f64::consts::PI.sqrt()
}

/// One-operand arithmetic, in f64 and rounded once.
pub fn unary(op: Unary, a: f32) -> f32 {
    let x = a as f64;
    let y = match op {
        Unary::Neg => -x,
        Unary::Abs => x.abs(),
        Unary::Exp => x.exp(),
        Unary::Log => x.ln(),
        Unary::Log2 => x.log2(),
        Unary::Log10 => x.log10(),
        Unary::Sin => x.sin(),
        Unary::Cos => x.cos(),
        Unary::Tanh => x.tanh(),
        Unary::Sqrt => x.sqrt(),
        Unary::Rsqrt => 1.0 / x.sqrt(),
        Unary::Reciprocal => 1.0 / x,
        Unary::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        Unary::Silu => x / (1.0 + (-x).exp()),
        Unary::Gelu => x * 0.5 * erfc_f64(-x / std::f64::consts::SQRT_2),
        Unary::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x / (1.0 + (-2.0 * u).exp())
        }
        Unary::Relu => {
            // By its bits: compilers take a comparison and a choice for a maximum, which may lose the sign of a zero.
            if x.is_sign_positive() || x == 0.0 || x.is_nan() { x } else { 0.0 }
        }
        Unary::Erf => erf_f64(x),
        Unary::Floor => x.floor(),
        Unary::Ceil => x.ceil(),
        Unary::Trunc => x.trunc(),
        Unary::RoundEven => x.round_ties_even(),
        Unary::Not => (x == 0.0) as u8 as f64,
        Unary::IsNan => x.is_nan() as u8 as f64,
        Unary::RotatePairs => unreachable!("it is no matter of one element"),
    };
    y as f32
}

/// Two-operand arithmetic.
pub fn binary(op: Binary, a: f32, b: f32) -> f32 {
    let truth = |c: bool| c as u8 as f32;
    match op {
        Binary::Add => a + b,
        Binary::Sub => a - b,
        Binary::Mul => a * b,
        Binary::Div => a / b,
        Binary::Pow if b == 0.5 => a.sqrt(),
        Binary::Pow if b == -0.5 => 1.0 / a.sqrt(),
        Binary::Pow if b == 3.0 => a * a * a,
        Binary::Pow => (a as f64).powf(b as f64) as f32,
        Binary::Atan2 => (a as f64).atan2(b as f64) as f32,
        Binary::Remainder => {
            let (a, b) = (a as f64, b as f64);
            let left = a % b;
            (if left != 0.0 && left.is_sign_negative() != b.is_sign_negative() { left + b } else { left }) as f32
        }
        Binary::FloorDivide if b == 0.0 => a / b,
        Binary::FloorDivide => {
            let (a, b) = (a as f64, b as f64);
            let left = a % b;
            let toward_zero = ((a - left) / b).round();
            let is_above = left != 0.0 && left.is_sign_negative() != b.is_sign_negative();
            let below = if is_above { toward_zero - 1.0 } else { toward_zero };
            (if below == 0.0 { below.abs().copysign(a / b) } else { below }) as f32
        }
        Binary::Max if a.is_nan() || b.is_nan() => f32::NAN,
        Binary::Max => {
            if a > b {
                a
            } else {
                b
            }
        }
        Binary::Min if a.is_nan() || b.is_nan() => f32::NAN,
        Binary::Min => {
            if a < b {
                a
            } else {
                b
            }
        }
        Binary::Eq => truth(a == b),
        Binary::Ne => truth(a != b),
        Binary::Lt => truth(a < b),
        Binary::Le => truth(a <= b),
        Binary::Gt => truth(a > b),
        Binary::Ge => truth(a >= b),
        Binary::And => truth(a != 0.0 && b != 0.0),
        Binary::Or => truth(a != 0.0 || b != 0.0),
    }
}

/// Rounds through a 16-bit type.
pub fn round(dtype: DType, a: f32) -> f32 {
    match dtype {
        DType::F16 => half::f16::from_f32(a).to_f32(),
        DType::BF16 => half::bf16::from_f32(a).to_f32(),
        _ => a,
    }
}

/// Runs a program over a space; `acc` holds one f32 per element, row-major, `row_scalars` one value per row each.
///
/// # Safety
/// The operands must be valid for the space.
///
/// # Panics
/// If the program is malformed or an operand is missing.
pub unsafe fn run(
    program: &TileProgram,
    space: &Space,
    loads: &[Bound],
    stores: &[Bound],
    acc: &[f32],
    row_scalars: &[&[f32]],
) {
    let cols = space.cols();
    for at in 0..space.len() {
        let offset = |b: &Bound| {
            let (mut rest, mut sum) = (at, 0);
            for d in (0..space.rank).rev() {
                sum += (rest % space.dims[d]) as isize * b.strides[d];
                rest /= space.dims[d];
            }
            sum
        };
        let mut regs = [0f32; MAX_REGS];
        for instr in &program.instrs {
            let r = |i: u8| regs[i as usize];
            let (dst, value) = match *instr {
                Instr::Load { dst, src } => {
                    let value = match src {
                        Source::Acc => acc[at],
                        Source::Memory(i) => {
                            let (b, t) = (&loads[i as usize], program.loads[i as usize]);
                            // SAFETY: the operand is valid for the space.
                            unsafe { load_scalar(t, b.ptr.offset(offset(b) * t.size_bytes() as isize)) }
                        }
                        Source::RowScalar(i) => row_scalars[i as usize][at / cols],
                        Source::Const(x) => x,
                    };
                    (dst, value)
                }
                Instr::Unary { dst, op, a } => (dst, unary(op, r(a))),
                Instr::Binary { dst, op, a, b } => (dst, binary(op, r(a), r(b))),
                Instr::Fma { dst, a, b, c } => (dst, r(a).mul_add(r(b), r(c))),
                Instr::Select { dst, cond, a, b } => (dst, if r(cond) != 0.0 { r(a) } else { r(b) }),
                Instr::Round { dst, a, dtype } => (dst, round(dtype, r(a))),
                Instr::Store { src, out } => {
                    let (b, t) = (&stores[out as usize], program.stores[out as usize]);
                    // SAFETY: the operand is valid for the space.
                    unsafe { store_scalar(t, b.ptr.offset(offset(b) * t.size_bytes() as isize), r(src)) };
                    continue;
                }
            };
            regs[dst as usize] = value;
        }
    }
}
