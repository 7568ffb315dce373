//! Rows of the registry for reductions and cumulative sums: each form of each, compared with loops over f64.
//!
//! The operands' numbers are few bits each, so that sums of them are exact in f64. Those of squares and products are rounded there,
//! by the kernels and by the loops; a comparison allows for both.

use super::bench::{Bench, Run};
use super::reduce::{Form, Reduce, Reduction, form, reduce};
use super::scan::{Scan, cumulative_sum};
use super::verify::{Buffer, FLOATS, Numbers, Reference, compare_rounded, is_floating, suffix};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::registry::{Family, Row};

const OPS: [Reduction; 10] = [
    Reduction::Sum,
    Reduction::Mean,
    Reduction::Prod,
    Reduction::Max,
    Reduction::Min,
    Reduction::Any,
    Reduction::All,
    Reduction::ArgMax,
    Reduction::ArgMin,
    Reduction::SumSquares,
];

/// A row for each form of a reduction, type and level, and for cumulative sums of each type.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (form, name) in [(Form::Lines, "lines"), (Form::Strips, "strips"), (Form::Places, "places")] {
        for (dtype, isa) in FLOATS.into_iter().flat_map(|dtype| Isa::ALL.map(|isa| (dtype, isa))) {
            rows.push(reduction((form, name), isa, dtype));
        }
    }
    // Code for no vectors.
    for dtype in [DType::F32, DType::F64, DType::I64] {
        rows.push(reduction((Form::Elements, "elements"), Isa::Portable, dtype));
    }
    for dtype in FLOATS.into_iter().chain([DType::F64, DType::I64]) {
        rows.push(Row {
            name: format!("scan_{}_l8__portable", suffix(dtype)),
            family: Family::Reduce,
            isa: Isa::Portable,
            dtype,
            is_available: Box::new(|| true),
            verify: Box::new(move || verify_scans(dtype)),
            benches: scan_benches(dtype),
        });
    }
    rows
}

fn reduction((form, name): (Form, &str), isa: Isa, dtype: DType) -> Row {
    let name = format!("reduce_{}_{name}__{}", suffix(dtype), isa.name());
    let verify = {
        let name = name.clone();
        move || verify_reductions(form, isa, dtype).map_err(|error| format!("{name} {error}"))
    };
    Row {
        name,
        family: Family::Reduce,
        isa,
        dtype,
        is_available: Box::new(move || isa.is_available()),
        verify: Box::new(verify),
        benches: reduction_benches(form, isa, dtype),
    }
}

/// What a reduction of a line of numbers means.
fn meaning(op: Reduction, line: &[f64]) -> Reference {
    let of = |term: fn(f64) -> f64| {
        let (sum, magnitude) = line.iter().fold((0.0, 0.0), |(sum, all), &x| (sum + term(x), all + term(x).abs()));
        Reference { sum, magnitude }
    };
    // The first of those that no other is better than; what is not a number is better than any.
    let best = |is_better: fn(f64, f64) -> bool| {
        let first = (1..line.len()).fold(0, |best, at| if is_better(line[at], line[best]) { at } else { best });
        line.iter().position(|x| x.is_nan()).unwrap_or(first)
    };
    let (largest, smallest) = (|| best(|a, b| a > b), || best(|a, b| a < b));
    match op {
        Reduction::Sum => of(|x| x),
        Reduction::SumSquares => of(|x| x * x),
        Reduction::Mean => {
            let Reference { sum, magnitude } = of(|x| x);
            Reference { sum: sum / line.len() as f64, magnitude: magnitude / line.len() as f64 }
        }
        Reduction::Prod => {
            let product = line.iter().product::<f64>();
            Reference { sum: product, magnitude: product.abs() }
        }
        Reduction::Max => Reference::exact(line[largest()]),
        Reduction::Min => Reference::exact(line[smallest()]),
        Reduction::ArgMax => Reference::exact(largest() as f64),
        Reduction::ArgMin => Reference::exact(smallest() as f64),
        Reduction::Any => Reference::exact(f64::from(line.iter().any(|&x| x != 0.0))),
        Reduction::All => Reference::exact(f64::from(line.iter().all(|&x| x != 0.0))),
    }
}

/// Roundings to f32 that a term of a result goes through at most, a fraction of one for those to f64.
fn roundings(form: Form, op: Reduction, n: usize) -> f64 {
    let in_f32 = match (form, op) {
        (Form::Elements, _) => 0,
        // Each multiplication rounds all of the product.
        (_, Reduction::Prod) => n,
        // A square; the additions to a lane of an accumulator, of 64 vectors sixteen each, and of fewer fifteen and three more; two
        // between accumulators, four between sixteen lanes.
        (Form::Lines, _) => 1 + 18 + 2 + 4,
        // A square, and the rows that are added up before they go to f64.
        _ => 1 + 64,
    };
    f64::from(in_f32 as u32) + 2.0 * n as f64 * 2f64.powi(-29)
}

/// Numbers that tell whether an op is right: products stay near 1, a few elements are not 0, or are.
fn operand(op: Reduction, dtype: DType, len: usize) -> Buffer {
    let (mut numbers, mut x) = (Numbers::new(5), Buffer::random(dtype, len, 4));
    for at in 0..len {
        let drawn = numbers.draw();
        let value = match op {
            Reduction::Prod if is_floating(dtype) => 1.0 + drawn / 16.0,
            Reduction::Prod if at % 97 == 0 => 2.0,
            Reduction::Prod => drawn.signum(),
            Reduction::Any => f32::from(drawn > 0.98),
            Reduction::All => f32::from(drawn < 0.98),
            _ => continue,
        };
        x.set(at, value);
    }
    x
}

/// The sizes of an operand and its strides: dense, reduced along what lies side by side, and neither.
fn layouts() -> impl Iterator<Item = ([usize; 3], [isize; 3])> {
    let sizes = [
        [3, 7, 1],
        [2, 300, 1],
        [40, 130, 1],
        [2, 5, 70],
        [2, 90, 65],
        [1, 4000, 3],
        [2, 2100, 5],
        [4, 1, 1],
        [2, 0, 3],
    ];
    sizes.into_iter().flat_map(|sizes| {
        let [n, inner] = [sizes[1] as isize, sizes[2] as isize];
        [[n * inner, inner, 1], [n * inner, 1, n], [2 * n * inner, 2 * inner, 2]].map(|strides| (sizes, strides))
    })
}

fn verify_reductions(wanted: Form, isa: Isa, dtype: DType) -> Result<(), String> {
    let mut compared = 0;
    for (op, (sizes, strides)) in OPS.into_iter().flat_map(|op| layouts().map(move |layout| (op, layout))) {
        let [outer, n, inner] = sizes;
        let is_extreme = matches!(op, Reduction::Max | Reduction::Min | Reduction::ArgMax | Reduction::ArgMin);
        let mut x = operand(op, dtype, 2 * outer * n * inner);
        let to = match op {
            Reduction::ArgMax | Reduction::ArgMin => DType::I64,
            Reduction::Mean if dtype == DType::I64 => DType::F64,
            _ => dtype,
        };
        let place = |o: usize, t: usize, i: usize| {
            [o, t, i].iter().zip(strides).map(|(&at, stride)| at as isize * stride).sum::<isize>() as usize
        };
        for is_number in [true, false] {
            if !is_number && (n < 3 || !is_floating(dtype)) {
                continue;
            }
            if !is_number {
                x.set(place(outer / 2, n / 2, inner / 2), f32::NAN);
            }
            let mut y = Buffer::random(to, outer * inner, 6);
            let (src, dst, dst_strides) = (x.ptr(), y.ptr_mut(), [inner as isize, 1]);
            let r = Reduce { src, src_dtype: dtype, sizes, src_strides: strides, dst, dst_dtype: to, dst_strides };
            if form(op, &r) != wanted || n == 0 && is_extreme {
                continue;
            }
            // SAFETY: the buffers hold the description.
            unsafe { reduce(&Pool::new(2), isa, op, &r) }.map_err(|error| error.to_string())?;
            let line = |at: usize| (0..n).map(|t| x.get(place(at / inner, t, at % inner))).collect::<Vec<_>>();
            let references: Vec<Reference> = (0..outer * inner).map(|at| meaning(op, &line(at))).collect();
            compare_rounded(&y, &references, roundings(wanted, op, n))
                .map_err(|error| format!("{op:?} {sizes:?} {strides:?}: {error}"))?;
            // Extremes, places and truths are not rounded.
            let is_off = |&at: &usize| {
                let Reference { sum, magnitude } = references[at];
                magnitude == 0.0 && !sum.is_nan() && y.get(at) != sum
            };
            if let Some(at) = (0..references.len()).find(is_off) {
                return Err(format!("{op:?} {sizes:?}: result {at} is {}, not {}", y.get(at), references[at].sum));
            }
            compared += references.len();
        }
    }
    if compared == 0 { Err("compared nothing".to_owned()) } else { Ok(()) }
}

/// Sums over the channels of tokens, means over the pixels of an image; the token at which a text ends.
fn reduction_benches(form: Form, isa: Isa, dtype: DType) -> Vec<Bench> {
    let layers: &[(&'static str, Reduction, usize, usize)] = match (form, dtype) {
        (Form::Lines, _) => &[("sum_last", Reduction::Sum, 4096, 320), ("sum_last", Reduction::Sum, 1024, 1280)],
        (Form::Strips, _) => &[("mean_first", Reduction::Mean, 4096, 320), ("mean_first", Reduction::Mean, 64, 1280)],
        (Form::Places, _) => &[("argmax_last", Reduction::ArgMax, 4096, 320)],
        (Form::Elements, DType::F32) => &[("argmax_first", Reduction::ArgMax, 4096, 320)],
        (Form::Elements, DType::F64) => &[("sum_last", Reduction::Sum, 4096, 320)],
        (Form::Elements, _) => &[("argmax_last", Reduction::ArgMax, 2, 77)],
    };
    let bench = |&(name, op, rows, cols): &(&'static str, Reduction, usize, usize)| {
        let is_first = name.ends_with("first");
        let results = if is_first { cols } else { rows };
        let to = if op == Reduction::ArgMax { DType::I64 } else { dtype };
        Bench {
            op: name,
            sizes: vec![("rows", rows), ("cols", cols)],
            flops: 0.0,
            bytes: (rows * cols * dtype.size_bytes() + results * to.size_bytes()) as f64,
            start: Box::new(move || {
                let (x, mut y) = (Buffer::random(dtype, rows * cols, 4), Buffer::zeroed(to, results));
                let stride = cols as isize;
                let (sizes, src_strides, dst_strides) = match is_first {
                    true => ([1, rows, cols], [0, stride, 1], [0, 1]),
                    false => ([rows, cols, 1], [stride, 1, 1], [1, 1]),
                };
                Ok(Box::new(move || {
                    let (src, dst) = (x.ptr(), y.ptr_mut());
                    let r = Reduce { src, src_dtype: dtype, sizes, src_strides, dst, dst_dtype: to, dst_strides };
                    // SAFETY: the buffers hold the description.
                    unsafe { reduce(Pool::global(), isa, op, &r) }
                }) as Run)
            }),
        }
    };
    layers.iter().map(bench).collect()
}

fn verify_scans(dtype: DType) -> Result<(), String> {
    let pairs: &[(DType, DType)] = match dtype {
        DType::I64 => &[
            (DType::I64, DType::I64),
            (DType::I32, DType::I64),
            (DType::I32, DType::I32),
            (DType::U8, DType::I64),
            (DType::I8, DType::I64),
            (DType::Bool, DType::I64),
        ],
        DType::F16 => &[(DType::F16, DType::F16), (DType::F16, DType::F32)],
        DType::BF16 => &[(DType::BF16, DType::BF16), (DType::BF16, DType::F32)],
        DType::F64 => &[(DType::F64, DType::F64)],
        _ => &[(DType::F32, DType::F32)],
    };
    pairs.iter().try_for_each(|&(from, to)| verify_scan(from, to))
}

/// Compares cumulative sums with adding up one after the other: of `[outer, scan, inner]` with a gap behind each row, which stays.
fn verify_scan(from: DType, to: DType) -> Result<(), String> {
    let sizes = [[3, 7, 1], [2, 300, 1], [2, 5, 70], [1, 400, 3], [40, 500, 1], [0, 3, 2], [2, 0, 3], [4, 1, 1]];
    for ([outer, n, inner], gap) in sizes.into_iter().flat_map(|sizes| [(sizes, 0), (sizes, 2)]) {
        let wide = inner + gap;
        let x = Buffer::random(from, outer * n * wide, 1);
        let mut y = Buffer::zeroed(to, outer * n * wide);
        (0..outer * n * wide).for_each(|at| y.set(at, 7.0));
        let strides = [(n * wide) as isize, wide as isize, 1];
        let scan = Scan {
            src: x.ptr(),
            src_dtype: from,
            sizes: [outer, n, inner],
            src_strides: strides,
            dst: y.ptr_mut(),
            dst_dtype: to,
            dst_strides: strides,
        };
        // SAFETY: the buffers hold the description.
        unsafe { cumulative_sum(&Pool::new(2), &scan) }.map_err(|error| error.to_string())?;
        let mut references = vec![Reference::exact(7.0); outer * n * wide];
        for line in (0..outer * wide).filter(|line| line % wide < inner) {
            let mut sum = 0.0;
            for row in 0..n {
                let at = (line / wide * n + row) * wide + line % wide;
                sum += x.get(at);
                references[at] = Reference::exact(sum);
            }
        }
        compare_rounded(&y, &references, 0.0)
            .map_err(|error| format!("scan {from:?} {to:?} [{outer}, {n}, {inner}] with gaps of {gap}: {error}"))?;
    }
    Ok(())
}

/// Along tokens of an image and of a text, and the places of a text's tokens.
fn scan_benches(dtype: DType) -> Vec<Bench> {
    let sizes: &[[usize; 3]] =
        if dtype == DType::I64 { &[[2, 77, 1]] } else { &[[1, 4096, 320], [320, 77, 1], [768, 77, 1]] };
    let bench = |&sizes: &[usize; 3]| {
        let [outer, n, inner] = sizes;
        let len = outer * n * inner;
        Bench {
            op: "cumsum",
            sizes: vec![("outer", outer), ("scan", n), ("inner", inner)],
            flops: 0.0,
            bytes: (2 * len * dtype.size_bytes()) as f64,
            start: Box::new(move || {
                let (x, mut y) = (Buffer::random(dtype, len, 1), Buffer::zeroed(dtype, len));
                let strides = [(n * inner) as isize, inner as isize, 1];
                Ok(Box::new(move || {
                    let (src, dst) = (x.ptr(), y.ptr_mut());
                    let (src_strides, dst_strides) = (strides, strides);
                    let scan = Scan { src, src_dtype: dtype, sizes, src_strides, dst, dst_dtype: dtype, dst_strides };
                    // SAFETY: the buffers hold the description.
                    unsafe { cumulative_sum(Pool::global(), &scan) }
                }) as Run)
            }),
        }
    };
    sizes.iter().map(bench).collect()
}
