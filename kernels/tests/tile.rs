//! Tile programs against their reference: every operation, random programs over random strides, every level; and the ways they
//! are run in against each other.

use oxidiff_kernels::cpu::tile_exec::{Block, BoundProgram, Prepared, TileEpilogue, run_loop};
use oxidiff_kernels::cpu::tile_exec_ref as reference;
use oxidiff_kernels::cpu::verify::Buffer;
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::epilogue::Epilogue;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::tile::*;

const UNARY: [Unary; 24] = [
    Unary::Neg,
    Unary::Abs,
    Unary::Exp,
    Unary::Log,
    Unary::Log2,
    Unary::Log10,
    Unary::Sin,
    Unary::Cos,
    Unary::Tanh,
    Unary::Sqrt,
    Unary::Rsqrt,
    Unary::Reciprocal,
    Unary::Sigmoid,
    Unary::Silu,
    Unary::Gelu,
    Unary::GeluTanh,
    Unary::Relu,
    Unary::Erf,
    Unary::Floor,
    Unary::Ceil,
    Unary::Trunc,
    Unary::RoundEven,
    Unary::Not,
    Unary::IsNan,
];
const BINARY: [Binary; 18] = [
    Binary::Add,
    Binary::Sub,
    Binary::Mul,
    Binary::Div,
    Binary::FloorDivide,
    Binary::Remainder,
    Binary::Pow,
    Binary::Atan2,
    Binary::Max,
    Binary::Min,
    Binary::Eq,
    Binary::Ne,
    Binary::Lt,
    Binary::Le,
    Binary::Gt,
    Binary::Ge,
    Binary::And,
    Binary::Or,
];
const DTYPES: [DType; 9] =
    [DType::F32, DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::U8, DType::I8, DType::Bool];

/// xorshift64*: seeded, printed nowhere because it never varies.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() >> 33) as usize % n
    }
    fn pick<T: Copy>(&mut self, list: &[T]) -> T {
        list[self.below(list.len())]
    }
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// Units in the last place of an f32 of this size.
fn ulp(x: f64) -> f64 {
    let e = (x.abs() as f32).max(f32::MIN_POSITIVE);
    (f32::from_bits(e.to_bits() + 1) - e) as f64
}

fn same(a: f32, b: f32) -> bool {
    a == b || (a.is_nan() && b.is_nan())
}

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

fn unary_program(op: Unary) -> TileProgram {
    TileProgram {
        instrs: vec![
            Instr::Load { dst: 0, src: Source::Memory(0) },
            Instr::Unary { dst: 1, op, a: 0 },
            Instr::Store { src: 1, out: 0 },
        ],
        loads: vec![DType::F32],
        stores: vec![DType::F32],
    }
}

fn run_unary(isa: Isa, op: Unary, x: &mut [f32]) -> Vec<f32> {
    let pool = Pool::new(2);
    let prepared = Prepared::new(&unary_program(op), isa).unwrap();
    let space = Space::new(&[x.len()]);
    let mut y = vec![f32::NAN; x.len()];
    let (a, b) = (Bound::contiguous(x.as_mut_ptr().cast(), &space), Bound::contiguous(y.as_mut_ptr().cast(), &space));
    // SAFETY: both buffers hold the whole space.
    unsafe { run_loop(&pool, &prepared, &space, &[a], &[b]) };
    y
}

/// Relative error allowed, in units in the last place of the exact result, with the range it is promised on.
fn promise(op: Unary) -> (f64, f32, f32) {
    match op {
        Unary::Exp => (2.0, -87.0, 88.5),
        Unary::Log | Unary::Log2 | Unary::Log10 => (2.0, 1e-38, 1e38),
        Unary::Sin | Unary::Cos => (2.0, -1e6, 1e6),
        Unary::Tanh => (3.0, -30.0, 30.0),
        Unary::Sigmoid | Unary::Silu => (3.0, -80.0, 80.0),
        Unary::Gelu => (6.0, -12.0, 20.0),
        // e^(-2u) turns the rounding of u, up to 40 here, into a relative error of the negative tail.
        Unary::GeluTanh => (60.0, -5.0, 20.0),
        Unary::Erf => (2.5, -10.0, 10.0),
        Unary::Rsqrt => (1.5, 1e-30, 1e30),
        _ => (0.5, -1e30, 1e30),
    }
}

#[test]
fn elementary_functions_are_accurate() {
    for op in UNARY {
        let (limit, low, high) = promise(op);
        let mut rng = Rng(1);
        let mut x: Vec<f32> = (0..40_000)
            .map(|i| {
                let u = rng.uniform();
                if i % 2 == 0 {
                    low + (high - low) * u
                } else {
                    10f32.powf(-6.0 + 8.0 * u) * if i % 4 == 1 { 1.0 } else { -1.0 }
                }
            })
            .map(|v: f32| v.clamp(low, high))
            .collect();
        for isa in isas() {
            let y = run_unary(isa, op, &mut x);
            let mut worst = (0.0, 0.0);
            for (&x, &y) in x.iter().zip(&y) {
                let exact = reference::unary(op, x);
                // Sines near multiples of pi are judged against an absolute unit of 2^-24 times the argument's ulp-free
                // size; everything else relative to the result.
                let scale = ulp(exact as f64).max(if matches!(op, Unary::Sin | Unary::Cos) { 6e-8 } else { 0.0 });
                let error = if same(exact, y) { 0.0 } else { ((y as f64 - exact as f64) / scale).abs() };
                if error > worst.0 || error.is_nan() {
                    worst = (error, x);
                }
            }
            assert!(
                worst.0 <= limit + 0.5 && !worst.0.is_nan(),
                "{op:?} on {}: {} ulp at {}",
                isa.name(),
                worst.0,
                worst.1
            );
        }
    }
}

#[test]
fn special_values_are_pytorchs() {
    let mut x = [f32::NEG_INFINITY, f32::INFINITY, f32::NAN, -0.0, 0.0, -1e30, 1e30, 1e-41, -1e-41, f32::MAX, f32::MIN];
    for op in UNARY {
        for isa in isas() {
            let y = run_unary(isa, op, &mut x);
            for (&x, &y) in x.iter().zip(&y) {
                let exact = reference::unary(op, x);
                let near = (y - exact).abs() <= 4e-7 * exact.abs() + 1e-37;
                assert!(same(y, exact) || near, "{op:?}({x}) on {}: {y}, not {exact}", isa.name());
                if exact == 0.0 && x == 0.0 {
                    assert_eq!(y.is_sign_negative(), exact.is_sign_negative(), "{op:?}({x:?})");
                }
            }
        }
    }
}

fn run_binary(isa: Isa, op: Binary, a: &mut [f32], b: &mut [f32]) -> Vec<f32> {
    let program = TileProgram {
        instrs: vec![
            Instr::Load { dst: 0, src: Source::Memory(0) },
            Instr::Load { dst: 1, src: Source::Memory(1) },
            Instr::Binary { dst: 0, op, a: 0, b: 1 },
            Instr::Store { src: 0, out: 0 },
        ],
        loads: vec![DType::F32; 2],
        stores: vec![DType::F32],
    };
    let space = Space::new(&[a.len()]);
    let mut y = vec![f32::NAN; a.len()];
    let [a, b, to] = [a.as_mut_ptr(), b.as_mut_ptr(), y.as_mut_ptr()].map(|p| Bound::contiguous(p.cast(), &space));
    // SAFETY: the buffers hold the whole space.
    unsafe { run_loop(&Pool::new(2), &Prepared::new(&program, isa).unwrap(), &space, &[a, b], &[to]) };
    y
}

/// The function itself, by f64; powers without those exponents that programs treat apart.
fn exact(op: Binary, a: f32, b: f32) -> f32 {
    if op == Binary::Pow { (a as f64).powf(b as f64) as f32 } else { reference::binary(op, a, b) }
}

/// Functions of two numbers, and how far their results are off at most, relative.
const FUNCTIONS: [(Binary, f32); 4] =
    [(Binary::Pow, 3e-7), (Binary::Atan2, 3e-7), (Binary::Remainder, 0.0), (Binary::FloorDivide, 0.0)];

#[test]
fn functions_of_two_numbers_are_accurate() {
    for (op, limit) in FUNCTIONS {
        let mut rng = Rng(7);
        // Of every size, near 1, and moderate; powers with exponents that bring results to every size.
        let (mut a, mut b): (Vec<f32>, Vec<f32>) = (0..200_000)
            .map(|i| {
                let mut sized = |low: f32, high: f32| 10f32.powf(low + (high - low) * rng.uniform());
                let a = match i % 4 {
                    0 => sized(-37.0, 38.0),
                    1 => sized(-0.04, 0.04),
                    2 => sized(-0.1, 0.1),
                    _ => sized(-2.0, 2.0),
                };
                let b = match op {
                    Binary::Pow if i % 4 == 1 => 87.0 / a.ln().abs().max(1e-6) * sized(-0.1, 0.0),
                    Binary::Pow => 86.0 / a.ln().abs().max(1e-6) * sized(-3.0, 0.0),
                    _ => sized(-3.0, 3.0),
                };
                (a, if i / 4 % 2 == 0 { b } else { -b })
            })
            .unzip();
        if op != Binary::Pow {
            a.iter_mut().step_by(5).for_each(|a| *a = -*a);
        } else {
            // Whole powers of negative numbers.
            let negative = a.iter_mut().zip(&mut b).step_by(5);
            negative.filter(|(_, b)| b.abs() < 1e6).for_each(|(a, b)| (*a, *b) = (-*a, b.round()));
        }
        for isa in isas() {
            let y = run_binary(isa, op, &mut a, &mut b);
            for ((&a, &b), &y) in a.iter().zip(&b).zip(&y) {
                let exact = exact(op, a, b);
                let unit = exact.abs().max(f32::MIN_POSITIVE);
                let error = if same(exact, y) { 0.0 } else { (y - exact).abs() / unit };
                assert!(error <= limit, "{op:?}({a:e}, {b:e}) on {}: {y:e}, not {exact:e}", isa.name());
            }
        }
    }
}

#[test]
fn functions_of_two_special_values_are_pytorchs() {
    let specials = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        2.0,
        -2.0,
        3.0,
        -3.0,
        0.5,
        -0.5,
        2.5,
        7.5,
        -7.5,
        1e-41,
        -1e-41,
        1e30,
        -1e30,
        16_777_216.0,
        16_777_217.0,
        -33_554_435.0,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    let pairs = specials.iter().flat_map(|&a| specials.iter().map(move |&b| (a, b)));
    let (mut a, mut b): (Vec<f32>, Vec<f32>) = pairs.unzip();
    for (op, _) in FUNCTIONS {
        for isa in isas() {
            let y = run_binary(isa, op, &mut a, &mut b);
            for ((&a, &b), &y) in a.iter().zip(&b).zip(&y) {
                let exact = exact(op, a, b);
                let near = (y - exact).abs() <= 4e-7 * exact.abs() + 1e-44;
                let is_sign_same = exact != 0.0 || y.is_sign_negative() == exact.is_sign_negative();
                let what = format!("{op:?}({a:e}, {b:e}) on {}: {y:e}, not {exact:e}", isa.name());
                assert!((same(y, exact) || near) && is_sign_same, "{what}");
            }
        }
    }
}

#[test]
fn logarithms_of_powers_are_whole() {
    let mut twos: Vec<f32> = (-149..128).map(|e| 2f64.powi(e) as f32).collect();
    let mut tens: Vec<f32> = (0..11).map(|e| 10f64.powi(e) as f32).collect();
    for isa in isas() {
        let logs = run_unary(isa, Unary::Log2, &mut twos);
        assert!(logs.iter().zip(-149..128).all(|(log, e)| *log == e as f32), "{}: {logs:?}", isa.name());
        let logs = run_unary(isa, Unary::Log10, &mut tens);
        assert!(logs.iter().zip(0..11).all(|(log, e)| *log == e as f32), "{}: {logs:?}", isa.name());
    }
}

/// A memory operand with its own buffer and random strides.
struct Operand {
    dtype: DType,
    data: Vec<u8>,
    strides: [isize; MAX_DIMS],
    origin: isize,
}

impl Operand {
    /// `broadcast` allows stride 0 (loads only). Values are small integers and halves, so that every type holds them.
    fn random(rng: &mut Rng, dtype: DType, space: &Space, broadcast: bool) -> Operand {
        let mut order: Vec<usize> = (0..space.rank).collect();
        if rng.below(3) == 0 {
            for i in (1..order.len()).rev() {
                order.swap(i, rng.below(i + 1));
            }
        }
        let (mut strides, mut step, mut low) = ([0isize; MAX_DIMS], 1isize, 0isize);
        if rng.below(6) == 0 {
            step = 2;
        }
        for &d in order.iter().rev() {
            if broadcast && rng.below(3) == 0 {
                continue;
            }
            strides[d] = step;
            step *= space.dims[d] as isize;
            if rng.below(5) == 0 {
                step += 3;
            }
            if broadcast && rng.below(8) == 0 {
                low += strides[d] * (space.dims[d] as isize - 1);
                strides[d] = -strides[d];
            }
        }
        let size = dtype.size_bytes();
        let mut data = vec![0u8; (step as usize + 8) * size];
        for chunk in data.chunks_exact_mut(size) {
            let (i, h) = (rng.below(7) as i64 - 3, rng.below(33) as f32 / 8.0 - 2.0);
            match dtype {
                DType::F32 => chunk.copy_from_slice(&h.to_le_bytes()),
                DType::F64 => chunk.copy_from_slice(&(h as f64).to_le_bytes()),
                DType::F16 => chunk.copy_from_slice(&half::f16::from_f32(h).to_le_bytes()),
                DType::BF16 => chunk.copy_from_slice(&half::bf16::from_f32(h).to_le_bytes()),
                DType::I64 => chunk.copy_from_slice(&i.to_le_bytes()),
                DType::I32 => chunk.copy_from_slice(&(i as i32).to_le_bytes()),
                DType::U8 | DType::I8 => chunk[0] = rng.below(200) as u8,
                DType::Bool => chunk[0] = rng.below(2) as u8,
            }
        }
        Operand { dtype, data, strides, origin: low }
    }

    fn bound(&mut self) -> Bound {
        let ptr = self.data.as_mut_ptr().wrapping_offset(self.origin * self.dtype.size_bytes() as isize);
        Bound { ptr, strides: self.strides }
    }
}

/// Operations whose results are exact or correctly rounded, so that results compare bit for bit.
fn random_program(rng: &mut Rng, acc: bool, row_scalars: u8) -> TileProgram {
    let loads: Vec<DType> =
        (0..1 + rng.below(4)).map(|_| if rng.below(2) == 0 { DType::F32 } else { rng.pick(&DTYPES) }).collect();
    let stores: Vec<DType> =
        (0..1 + rng.below(2)).map(|_| if rng.below(2) == 0 { DType::F32 } else { rng.pick(&DTYPES) }).collect();
    let mut instrs = vec![];
    let mut regs = 0u8;
    for i in 0..loads.len() {
        instrs.push(Instr::Load { dst: regs, src: Source::Memory(i as u8) });
        regs += 1;
    }
    instrs.push(Instr::Load { dst: regs, src: Source::Const(0.75) });
    regs += 1;
    if acc {
        instrs.push(Instr::Load { dst: regs, src: Source::Acc });
        regs += 1;
    }
    for i in 0..row_scalars {
        instrs.push(Instr::Load { dst: regs, src: Source::RowScalar(i) });
        regs += 1;
    }
    let unary =
        [Unary::Neg, Unary::Abs, Unary::Floor, Unary::Relu, Unary::RoundEven, Unary::Not, Unary::IsNan, Unary::Ceil];
    let inexact = [Binary::Pow, Binary::Div, Binary::Atan2];
    let binary: Vec<Binary> = BINARY.into_iter().filter(|op| !inexact.contains(op)).collect();
    for _ in 0..1 + rng.below(12) {
        let [a, b, c] = [0; 3].map(|_| rng.below(regs as usize) as u8);
        let dst = if regs < MAX_REGS as u8 && rng.below(2) == 0 { regs } else { rng.below(regs as usize) as u8 };
        regs = regs.max(dst + 1);
        instrs.push(match rng.below(8) {
            0 | 1 => Instr::Unary { dst, op: rng.pick(&unary), a },
            2..=4 => Instr::Binary { dst, op: rng.pick(&binary), a, b },
            5 => Instr::Fma { dst, a, b, c },
            6 => Instr::Select { dst, cond: c, a, b },
            _ => Instr::Round { dst, a, dtype: rng.pick(&[DType::F16, DType::BF16]) },
        });
    }
    for out in 0..stores.len() {
        instrs.push(Instr::Store { src: rng.below(regs as usize) as u8, out: out as u8 });
    }
    TileProgram { instrs, loads, stores }
}

fn random_space(rng: &mut Rng) -> Space {
    let sizes: Vec<usize> = (0..rng.below(5)).map(|_| rng.pick(&[1, 2, 3, 5, 8, 17, 40])).collect();
    let mut sizes = sizes;
    if rng.below(8) == 0 {
        sizes = vec![rng.pick(&[3000, 70_001])];
    }
    if rng.below(6) == 0 {
        // Many places of a few numbers each.
        sizes = vec![rng.pick(&[1, 3, 17]), rng.pick(&[64, 130, 1100]), rng.pick(&[2, 3, 4])];
    }
    if rng.below(30) == 0 && !sizes.is_empty() {
        sizes[0] = 0;
    }
    Space::new(&sizes)
}

#[test]
fn random_loops_equal_the_reference() {
    let pool = Pool::new(2);
    for seed in 1..1200u64 {
        let mut rng = Rng(seed * 7919);
        let (space, program) = (random_space(&mut rng), random_program(&mut rng, false, 0));
        let mut loads: Vec<Operand> =
            program.loads.iter().map(|&t| Operand::random(&mut rng, t, &space, true)).collect();
        let stores: Vec<Operand> =
            program.stores.iter().map(|&t| Operand::random(&mut rng, t, &space, false)).collect();
        let mut results = vec![];
        for isa in isas().map(Some).chain([None]) {
            let mut out: Vec<Operand> = stores.iter().map(|s| Operand { data: s.data.clone(), ..*s }).collect();
            let ins: Vec<Bound> = loads.iter_mut().map(Operand::bound).collect();
            let outs: Vec<Bound> = out.iter_mut().map(Operand::bound).collect();
            // SAFETY: the buffers span the space at their strides.
            unsafe {
                match isa {
                    Some(isa) => run_loop(&pool, &Prepared::new(&program, isa).unwrap(), &space, &ins, &outs),
                    None => reference::run(&program, &space, &ins, &outs, &[], &[]),
                }
            }
            results.push(out.into_iter().map(|o| o.data).collect::<Vec<_>>());
        }
        let expected = results.pop().unwrap();
        for (result, isa) in results.iter().zip(isas()) {
            for (i, (r, e)) in result.iter().zip(&expected).enumerate() {
                assert!(equal(program.stores[i], r, e), "seed {seed}, {}, {space:?}\n{program:?}", isa.name());
            }
        }
    }
}

/// Bytes equal, NaNs of any payload and zeros of any sign alike.
fn equal(dtype: DType, a: &[u8], b: &[u8]) -> bool {
    let value = |c: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(c.try_into().unwrap()),
        DType::F16 => half::f16::from_le_bytes(c.try_into().unwrap()).to_f32(),
        DType::BF16 => half::bf16::from_le_bytes(c.try_into().unwrap()).to_f32(),
        _ => 0.0,
    };
    let float = matches!(dtype, DType::F32 | DType::F16 | DType::BF16);
    a.chunks_exact(dtype.size_bytes())
        .zip(b.chunks_exact(dtype.size_bytes()))
        .all(|(x, y)| x == y || (float && same(value(x), value(y))))
}

#[test]
fn random_blocks_equal_the_reference() {
    for seed in 1..600u64 {
        let mut rng = Rng(seed * 104_729);
        let with_scalars = rng.below(2) == 0;
        let (space, program) =
            (random_space(&mut rng), random_program(&mut rng, true, if with_scalars { 2 } else { 0 }));
        let (rows, cols) = (space.rows(), space.cols());
        let mut loads: Vec<Operand> =
            program.loads.iter().map(|&t| Operand::random(&mut rng, t, &space, true)).collect();
        let stores: Vec<Operand> =
            program.stores.iter().map(|&t| Operand::random(&mut rng, t, &space, false)).collect();
        let acc: Vec<f32> = (0..rows * cols).map(|_| rng.below(33) as f32 / 8.0 - 2.0).collect();
        let scalars: Vec<Vec<f32>> = (0..2).map(|_| (0..rows).map(|_| rng.below(9) as f32 / 4.0).collect()).collect();
        let (block_rows, block_cols) = (1 + rng.below(20), 1 + rng.below(70));
        let ins: Vec<Bound> = loads.iter_mut().map(Operand::bound).collect();
        let mut expected: Vec<Operand> = stores.iter().map(|s| Operand { data: s.data.clone(), ..*s }).collect();
        let outs: Vec<Bound> = expected.iter_mut().map(Operand::bound).collect();
        let lists: Vec<&[f32]> = scalars.iter().map(Vec::as_slice).collect();
        // SAFETY: the buffers span the space at their strides.
        unsafe { reference::run(&program, &space, &ins, &outs, &acc, &lists) };
        for isa in isas() {
            let prepared = Prepared::new(&program, isa).unwrap();
            let mut out: Vec<Operand> = stores.iter().map(|s| Operand { data: s.data.clone(), ..*s }).collect();
            let outs: Vec<Bound> = out.iter_mut().map(Operand::bound).collect();
            let epilogue = (!with_scalars).then(|| TileEpilogue::new(&prepared, &space, &ins, &outs));
            let bound = BoundProgram::new(&prepared, &space, &ins, &outs);
            for row0 in (0..rows).step_by(block_rows) {
                for col0 in (0..cols).step_by(block_cols) {
                    let (m, n) = (block_rows.min(rows - row0), block_cols.min(cols - col0));
                    let mut part: Vec<f32> = (0..m * block_cols).map(|_| f32::NAN).collect();
                    for r in 0..m {
                        part[r * block_cols..][..n].copy_from_slice(&acc[(row0 + r) * cols + col0..][..n]);
                    }
                    let scalars = [scalars[0][row0..].as_ptr(), scalars[1][row0..].as_ptr()];
                    // SAFETY: the buffers span the space, `part` the block.
                    unsafe {
                        match &epilogue {
                            Some(e) => e.apply(part.as_mut_ptr(), block_cols, row0, col0, m, n),
                            None => bound.run_block(&Block {
                                acc: part.as_mut_ptr(),
                                acc_ld: block_cols,
                                row_scalars: &scalars,
                                row0,
                                col0,
                                rows: m,
                                cols: n,
                            }),
                        }
                    }
                }
            }
            for (i, (r, e)) in out.iter().zip(&expected).enumerate() {
                assert!(
                    equal(program.stores[i], &r.data, &e.data),
                    "seed {seed}, {}, {space:?}\n{program:?}",
                    isa.name()
                );
            }
        }
    }
}

#[test]
fn stores_over_operands_see_the_old_values() {
    // y = x * x + x over x itself, and a second result that reads x after the first store.
    let program = TileProgram {
        instrs: vec![
            Instr::Load { dst: 0, src: Source::Memory(0) },
            Instr::Fma { dst: 1, a: 0, b: 0, c: 0 },
            Instr::Store { src: 1, out: 0 },
            Instr::Unary { dst: 2, op: Unary::Neg, a: 0 },
            Instr::Store { src: 2, out: 1 },
        ],
        loads: vec![DType::F32],
        stores: vec![DType::F32, DType::F32],
    };
    for isa in isas() {
        let space = Space::new(&[5000]);
        let mut x: Vec<f32> = (0..5000).map(|i| i as f32).collect();
        let mut y = vec![0f32; 5000];
        let (a, b) =
            (Bound::contiguous(x.as_mut_ptr().cast(), &space), Bound::contiguous(y.as_mut_ptr().cast(), &space));
        // SAFETY: the buffers hold the space; `a` is stored over itself element for element.
        unsafe { run_loop(&Pool::new(2), &Prepared::new(&program, isa).unwrap(), &space, &[a], &[a, b]) };
        for i in 0..5000 {
            let v = i as f32;
            assert_eq!((x[i], y[i]), (v.mul_add(v, v), -v));
        }
    }
}

#[test]
fn powers_follow_pytorch() {
    for e in [0.5, -0.5, -1.0, 2.0, 3.0, -2.0, 1.7, 0.0] {
        let program = TileProgram {
            instrs: vec![
                Instr::Load { dst: 0, src: Source::Memory(0) },
                Instr::Load { dst: 1, src: Source::Const(e) },
                Instr::Binary { dst: 0, op: Binary::Pow, a: 0, b: 1 },
                Instr::Store { src: 0, out: 0 },
            ],
            loads: vec![DType::F32],
            stores: vec![DType::F32],
        };
        for isa in isas() {
            let mut x = [-2.0, 0.0, 0.3, 5.0, f32::INFINITY, f32::NAN];
            let mut y = [0f32; 6];
            let space = Space::new(&[6]);
            let (a, b) =
                (Bound::contiguous(x.as_mut_ptr().cast(), &space), Bound::contiguous(y.as_mut_ptr().cast(), &space));
            // SAFETY: the buffers hold the space.
            unsafe { run_loop(&Pool::new(1), &Prepared::new(&program, isa).unwrap(), &space, &[a], &[b]) };
            for (x, y) in x.iter().zip(&y) {
                let exact = reference::binary(Binary::Pow, *x, e);
                assert!(same(*y, exact) || (y - exact).abs() <= 2.5e-7 * exact.abs(), "{x}^{e} = {y}, not {exact}");
            }
        }
    }
}

#[test]
fn malformed_programs_are_refused() {
    let program = |instrs| TileProgram { instrs, loads: vec![DType::F32], stores: vec![DType::F32] };
    let refused = |instrs| Prepared::new(&program(instrs), Isa::Portable).unwrap_err();
    assert_eq!(refused(vec![Instr::Store { src: 3, out: 0 }]), TileError::UnwrittenRegister { at: 0, reg: 3 });
    assert_eq!(refused(vec![Instr::Load { dst: 0, src: Source::Memory(1) }]), TileError::OutOfRange { at: 0 });
    assert_eq!(refused(vec![Instr::Load { dst: 24, src: Source::Acc }]), TileError::OutOfRange { at: 0 });
    let round = Instr::Round { dst: 0, a: 0, dtype: DType::F32 };
    assert_eq!(refused(vec![Instr::Load { dst: 0, src: Source::Acc }, round]), TileError::OutOfRange { at: 1 });
    let long = vec![Instr::Load { dst: 0, src: Source::Acc }; MAX_INSTRS + 1];
    assert_eq!(refused(long), TileError::TooLong { instrs: MAX_INSTRS + 1 });
}

/// Programs whose last operation has a form that goes past the caches.
fn programs() -> Vec<Vec<Instr>> {
    let load = |i| Instr::Load { dst: i, src: Source::Memory(i) };
    let store = Instr::Store { src: 0, out: 0 };
    let loads = [load(0), load(1), load(2)];
    let of = |last| loads.into_iter().chain([last, store]).collect();
    let unary = |op| of(Instr::Unary { dst: 0, op, a: 0 });
    let binary = |op, a, b| of(Instr::Binary { dst: 0, op, a, b });
    vec![
        unary(Unary::Silu),
        unary(Unary::GeluTanh),
        binary(Binary::Add, 0, 0),
        binary(Binary::Sub, 0, 1),
        binary(Binary::Mul, 2, 0),
        of(Instr::Fma { dst: 0, a: 0, b: 1, c: 2 }),
        of(Instr::Fma { dst: 0, a: 2, b: 0, c: 0 }),
    ]
}

/// Each with operands of every kind (full, per row, per column), over rows that begin at cache lines and rows that
/// do not, in place and not: bit for bit what goes through the caches.
#[test]
fn results_past_the_caches_are_the_same() {
    let pool = Pool::new(2);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for (instrs, dtype, (rows, cols), in_place) in programs().into_iter().flat_map(|p| {
            let sizes = [(9, 128), (9, 70), (1, 5000), (40, 2000), (3, 16)];
            let cases = sizes.into_iter().flat_map(|n| [(n, false), (n, true)]);
            cases.flat_map(move |(n, at)| [DType::F32, DType::F16, DType::BF16].map(|t| (p.clone(), t, n, at)))
        }) {
            let exponential = matches!(instrs[3], Instr::Unary { .. });
            let program = TileProgram { instrs, loads: vec![dtype; 3], stores: vec![dtype] };
            let prepared = Prepared::new(&program, isa).unwrap();
            let space = Space::new(&[rows, cols]);
            let results = [0, usize::MAX].map(|cache| {
                let [mut x, mut row, mut column] =
                    [(rows * cols, 1), (rows, 2), (cols, 3)].map(|(n, seed)| Buffer::random(dtype, n, seed));
                let mut y = Buffer::zeroed(dtype, rows * cols);
                let all = Bound::contiguous(x.ptr_mut(), &space);
                let loads = [
                    all,
                    Bound { ptr: row.ptr_mut(), strides: [1, 0, 0, 0, 0, 0, 0, 0] },
                    Bound { ptr: column.ptr_mut(), strides: [0, 1, 0, 0, 0, 0, 0, 0] },
                ];
                let out = if in_place { all } else { Bound::contiguous(y.ptr_mut(), &space) };
                let bound = BoundProgram::bind(&prepared, &space, &loads, &[out], Some(cache));
                let is_dense = bound.rows() == 1;
                let lines = (cols * dtype.size_bytes()).is_multiple_of(64) || is_dense;
                let expected = cache == 0 && lines && !(exponential && dtype != DType::F32);
                assert_eq!(bound.values_past_caches(), usize::from(expected), "{program:?} over {rows}x{cols}");
                // SAFETY: the buffers hold the space at these strides.
                unsafe { bound.run_all(&pool) };
                let result = if in_place { x } else { y };
                (0..rows * cols).map(|i| result.get(i).to_bits()).collect::<Vec<_>>()
            });
            assert_eq!(results[0], results[1], "{program:?} over {rows}x{cols} on {}", isa.name());
        }
    }
}

/// What is stored to 16 bits, and what is rounded to them on the way, for every upper half of an f32 and lower halves on both
/// sides of each decision; and every 16-bit value read.
#[test]
fn every_16_bit_value_is_read_and_rounded_as_the_reference_does() {
    let lower = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff];
    let mut wide: Vec<f32> = (0..=0xffffu32).flat_map(|u| lower.map(|l| f32::from_bits(u << 16 | l))).collect();
    let mut narrow: Vec<u16> = (0..=0xffff).collect();
    let pool = Pool::new(2);
    let negate = |from: DType, rounded: Option<DType>, to: DType| {
        let mut instrs =
            vec![Instr::Load { dst: 0, src: Source::Memory(0) }, Instr::Unary { dst: 0, op: Unary::Neg, a: 0 }];
        instrs.extend(rounded.map(|dtype| Instr::Round { dst: 0, a: 0, dtype }));
        instrs.push(Instr::Store { src: 0, out: 0 });
        TileProgram { instrs, loads: vec![from], stores: vec![to] }
    };
    for half in [DType::F16, DType::BF16] {
        let other = if half == DType::F16 { DType::BF16 } else { DType::F16 };
        let cases = [
            (DType::F32, None, half),
            (DType::F32, Some(half), half),
            (DType::F32, Some(other), half),
            (DType::F32, Some(half), DType::F32),
            (half, None, DType::F32),
            (half, None, half),
            (half, None, other),
        ];
        for (from, rounded, to) in cases {
            let program = negate(from, rounded, to);
            let (n, at) = match from {
                DType::F32 => (wide.len(), wide.as_mut_ptr().cast::<u8>()),
                _ => (narrow.len(), narrow.as_mut_ptr().cast()),
            };
            // Not a whole number of vectors.
            let space = Space::new(&[n - 5]);
            let load = Bound::contiguous(at, &space);
            let bytes = n * to.size_bytes();
            let mut expected = vec![0u8; bytes];
            let store = Bound::contiguous(expected.as_mut_ptr(), &space);
            // SAFETY: both buffers hold the space.
            unsafe { reference::run(&program, &space, &[load], &[store], &[], &[]) };
            for isa in isas() {
                let mut result = vec![0u8; bytes + 64];
                let align = result.as_ptr().align_offset(64);
                let store = Bound::contiguous(result[align..].as_mut_ptr(), &space);
                // SAFETY: as above.
                unsafe { run_loop(&pool, &Prepared::new(&program, isa).unwrap(), &space, &[load], &[store]) };
                let got = &result[align..][..bytes];
                assert!(equal(to, got, &expected), "{from:?} to {rounded:?} to {to:?} on {}", isa.name());
            }
        }
    }
}

/// Programs that scale and shift.
fn affine_programs(dtype: DType) -> Vec<TileProgram> {
    let load = |dst, src| Instr::Load { dst, src };
    let memory = |i| load(i, Source::Memory(i));
    let binary = |op, a, b| Instr::Binary { dst: 0, op, a, b };
    let silu = Instr::Unary { dst: 0, op: Unary::Silu, a: 0 };
    let fma = Instr::Fma { dst: 0, a: 0, b: 1, c: 2 };
    let (mean, rstd) = (load(3, Source::RowScalar(0)), load(4, Source::RowScalar(1)));
    let centred = [mean, rstd, binary(Binary::Sub, 0, 3), binary(Binary::Mul, 0, 4)];
    let plus = [load(5, Source::Const(1.0)), Instr::Binary { dst: 1, op: Binary::Add, a: 1, b: 5 }];
    let bodies = [
        vec![fma],
        vec![fma, silu],
        centred.to_vec(),
        [&centred[..], &[binary(Binary::Mul, 0, 1)]].concat(),
        [&centred[..], &[binary(Binary::Add, 2, 0)]].concat(),
        [&centred[..], &[binary(Binary::Mul, 1, 0), binary(Binary::Add, 0, 2)]].concat(),
        [&centred[..], &plus[..], &[binary(Binary::Mul, 0, 1), binary(Binary::Add, 0, 2)]].concat(),
        vec![rstd, binary(Binary::Mul, 0, 4), binary(Binary::Mul, 0, 1)],
    ];
    let of = |body: Vec<Instr>| TileProgram {
        instrs: [memory(0), memory(1), memory(2)]
            .into_iter()
            .chain(body)
            .chain([Instr::Store { src: 0, out: 0 }])
            .collect(),
        loads: vec![dtype, DType::F32, dtype],
        stores: vec![dtype],
    };
    bodies.into_iter().map(of).collect()
}

/// Over images whose columns each has of its own, in blocks that begin anywhere, in place and not, past the caches and
/// not: bit for bit what the steps give.
#[test]
fn what_needs_no_tiles_is_the_same() {
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let programs = affine_programs(dtype);
            let sizes = [(1, 9, 32), (2, 17, 70), (3, 8, 8), (1, 64, 1200)];
            for (program, (images, pixels, cols)) in programs.iter().flat_map(|p| sizes.map(|n| (p, n))) {
                let prepared = Prepared::new(program, isa).unwrap();
                let rows = images * pixels;
                let space = Space::new(&[images, pixels, cols]);
                let mut weight = Buffer::random(DType::F32, images * cols, 2);
                let mut bias = Buffer::random(dtype, cols, 3);
                let [mean, rstd] = [4, 5].map(|seed| Buffer::random(DType::F32, rows, seed));
                for (in_place, past) in [(false, false), (true, false), (false, true)] {
                    let results = [true, false].map(|without_tiles| {
                        let mut x = Buffer::random(dtype, rows * cols, 1);
                        let mut y = Buffer::zeroed(dtype, rows * cols);
                        let all = Bound::contiguous(x.ptr_mut(), &space);
                        let loads = [
                            all,
                            Bound { ptr: weight.ptr_mut(), strides: [cols as isize, 0, 1, 0, 0, 0, 0, 0] },
                            Bound { ptr: bias.ptr_mut(), strides: [0, 0, 1, 0, 0, 0, 0, 0] },
                        ];
                        let out = if in_place { all } else { Bound::contiguous(y.ptr_mut(), &space) };
                        let cache = if past { 0 } else { usize::MAX };
                        let mut bound = BoundProgram::over_all(&prepared, &space, &loads, &[out], cache);
                        assert!(bound.is_affine() && bound.passes_caches() == past, "{program:?}");
                        if !without_tiles {
                            bound = bound.by_steps();
                        }
                        for (row0, n) in [(0, 5), (5, rows - 5)] {
                            for (col0, width) in [(0, cols / 3), (cols / 3, cols - cols / 3)] {
                                let scalars = [&mean, &rstd].map(|b| b.ptr().cast::<f32>().wrapping_add(row0));
                                let block = Block {
                                    row_scalars: &scalars,
                                    row0,
                                    col0,
                                    rows: n,
                                    cols: width,
                                    ..Block::default()
                                };
                                // SAFETY: a block of the space that the buffers hold, a scalar for each row.
                                unsafe { bound.run_block(&block) };
                            }
                        }
                        let result = if in_place { x } else { y };
                        (0..rows * cols).map(|i| result.get(i).to_bits()).collect::<Vec<_>>()
                    });
                    assert_eq!(results[0], results[1], "{program:?} over {images}x{pixels}x{cols} on {}", isa.name());
                }
            }
        }
    }
}

/// Columns that differ from row to row, another type of the result, a second result: tiles as ever.
#[test]
fn what_is_not_quite_affine_goes_by_steps() {
    let affine = |f: &dyn Fn(&mut TileProgram)| {
        let mut program = affine_programs(DType::F32).remove(1);
        f(&mut program);
        program
    };
    let space = Space::new(&[64, 32]);
    let mut memory = Buffer::random(DType::F32, 64 * 32, 1);
    let column = Bound { ptr: memory.ptr_mut(), strides: [0, 1, 0, 0, 0, 0, 0, 0] };
    let full = Bound::contiguous(memory.ptr_mut(), &space);
    let has_columns = |program: &TileProgram, loads: &[Bound], stores: &[Bound]| {
        let prepared = Prepared::new(program, Isa::Portable).unwrap();
        BoundProgram::new(&prepared, &space, loads, stores).is_affine()
    };
    let plain = affine(&|_| ());
    assert!(has_columns(&plain, &[full, column, column], &[full]));
    assert!(!has_columns(&plain, &[full, full, column], &[full]));
    let strided = Bound { strides: [1, 64, 0, 0, 0, 0, 0, 0], ..full };
    assert!(!has_columns(&plain, &[strided, column, column], &[full]));
    let narrow = affine(&|p| p.stores[0] = DType::F16);
    assert!(!has_columns(&narrow, &[full, column, column], &[full]));
    let twice = affine(&|p| {
        p.stores.push(DType::F32);
        p.instrs.insert(4, Instr::Store { src: 0, out: 1 });
    });
    assert!(!has_columns(&twice, &[full, column, column], &[full, full]));
}
