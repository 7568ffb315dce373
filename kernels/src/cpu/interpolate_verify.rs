//! Rows of the registry for interpolation: elements side by side and places one after the other, compared with sums in f64.

use super::KernelError;
use super::bench::{Bench, Run};
use super::interpolate::{Interpolation, interpolate, is_wide};
use super::verify::{Buffer, FLOATS, Reference, compare_rounded, suffix};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::registry::{Family, Row};

/// A row for each form, type and level.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for (wide, form) in [(true, "along"), (false, "across")] {
        for (dtype, isa) in FLOATS.into_iter().flat_map(|dtype| Isa::ALL.map(|isa| (dtype, isa))) {
            let name = format!("interpolate_{}_{form}__{}", suffix(dtype), isa.name());
            let what = name.clone();
            rows.push(Row {
                name,
                family: Family::Move,
                isa,
                dtype,
                is_available: Box::new(move || isa.is_available()),
                verify: Box::new(move || verify(wide, isa, dtype).map_err(|error| format!("{what}: {error}"))),
                benches: benches(wide, isa, dtype),
            });
        }
    }
    rows
}

/// In every order of outer, places and inner in memory; taps of two, three and four places, weights with taps first.
fn verify(wide: bool, isa: Isa, dtype: DType) -> Result<(), String> {
    let cases =
        [([2, 9, 5], 2), ([3, 40, 1], 4), ([1, 7, 37], 3), ([2, 9, 40], 4), ([2, 3, 20_000], 2), ([1, 70_000, 1], 2)];
    let (rows, mut compared) = (6, 0);
    for ((sizes, taps), order) in cases.into_iter().flat_map(|case| (0..3).map(move |order| (case, order))) {
        let [outer, places, inner]: [usize; 3] = sizes;
        let strides = |places: usize| match order {
            0 => [(places * inner) as isize, inner as isize, 1],
            1 => [(places * inner) as isize, 1, places as isize],
            _ => [1, (outer * inner) as isize, outer as isize],
        };
        let (src_strides, dst_strides) = (strides(rows), strides(places));
        let src = Buffer::random(dtype, outer * rows * inner, 1);
        let mut dst = Buffer::random(dtype, outer * places * inner, 2);
        let indices: Vec<i32> = (0..places * taps).map(|i| (i * 5 % rows) as i32).collect();
        let weights = Buffer::random(DType::F32, places * taps, 3);
        let of = Interpolation {
            dtype,
            src: src.ptr(),
            dst: dst.ptr_mut(),
            sizes,
            rows,
            src_strides,
            dst_strides,
            indices: (indices.as_ptr().cast(), DType::I32),
            weights: weights.ptr(),
            taps,
            index_strides: [taps as isize, 1],
            weight_strides: [1, places as isize],
        };
        if is_wide(&of) != wide {
            continue;
        }
        // SAFETY: dense buffers of the sizes named.
        unsafe { interpolate(&Pool::new(3), isa, &of) }.map_err(|error| error.to_string())?;
        let mut references = vec![Reference::default(); outer * places * inner];
        for at in 0..references.len() {
            let (o, place, i) = (at / (places * inner), at / inner % places, at % inner);
            let offset = |s: [isize; 3], row: usize| o * s[0] as usize + row * s[1] as usize + i * s[2] as usize;
            let reference = &mut references[offset(dst_strides, place)];
            for tap in 0..taps {
                let from = offset(src_strides, indices[place * taps + tap] as usize);
                reference.add(weights.get(tap * places + place), src.get(from));
            }
        }
        // A product, and the sum it is added to and all that follow.
        compare_rounded(&dst, &references, (taps + 1) as f64).map_err(|error| format!("{sizes:?} {order}: {error}"))?;
        compared += 1;
    }
    if compared == 0 { Err("compared nothing".to_owned()) } else { Ok(()) }
}

/// One dimension of an image that is enlarged twice, as linear interpolation does it: rows of 32 pixels of 64 channels and of 64 of
/// 320, which are lines of elements; rows of pixels of planes.
fn benches(wide: bool, isa: Isa, dtype: DType) -> Vec<Bench> {
    let layers = if wide { [[1, 64, 32 * 64], [1, 64, 64 * 320]] } else { [[64 * 64, 32, 1], [4 * 64, 64, 1]] };
    let bench = |[outer, rows, inner]: [usize; 3]| Bench {
        op: "upsample_linear",
        sizes: vec![("outer", outer), ("rows", rows), ("inner", inner)],
        flops: 0.0,
        bytes: (3 * outer * rows * inner * dtype.size_bytes()) as f64,
        start: Box::new(move || start(isa, dtype, [outer, rows, inner])),
    };
    layers.into_iter().map(bench).collect()
}

fn start(isa: Isa, dtype: DType, [outer, rows, inner]: [usize; 3]) -> Result<Run, KernelError> {
    let places = 2 * rows;
    // Middles of pixels, at half the distance; none beyond the first and the last.
    let at = |place: usize| ((place as f32 + 0.5) / 2.0 - 0.5).clamp(0.0, (rows - 1) as f32);
    let indices: Vec<i64> = (0..places)
        .flat_map(|place| {
            let first = at(place).floor() as usize;
            [first as i64, (first + 1).min(rows - 1) as i64]
        })
        .collect();
    let weights: Vec<f32> = (0..places).flat_map(|place| [1.0 - at(place).fract(), at(place).fract()]).collect();
    let src = Buffer::random(dtype, outer * rows * inner, 1);
    let mut dst = Buffer::zeroed(dtype, outer * places * inner);
    Ok(Box::new(move || {
        let strides = |places: usize| [(places * inner) as isize, inner as isize, 1];
        let of = Interpolation {
            dtype,
            src: src.ptr(),
            dst: dst.ptr_mut(),
            sizes: [outer, places, inner],
            rows,
            src_strides: strides(rows),
            dst_strides: strides(places),
            indices: (indices.as_ptr().cast(), DType::I64),
            weights: weights.as_ptr().cast(),
            taps: 2,
            index_strides: [2, 1],
            weight_strides: [2, 1],
        };
        // SAFETY: dense buffers of the sizes named.
        unsafe { interpolate(Pool::global(), isa, &of) }.map_err(|_| KernelError::Shape("an index is out of bounds"))
    }))
}
