//! Rows of the registry for what moves elements as they are: copies between layouts, look-ups by index, and the nearest pixels of an
//! image of another size. Results are compared byte for byte.

use super::KernelError;
use super::bench::{Bench, Run};
use super::copy::{Form, Side, copy, copy_reference, form_of};
use super::gather::{Elements, IndexError, Indices, Rows, gather, gather_elements};
use super::resample::{Axis, Images, nearest};
use super::verify::{Buffer, suffix};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::registry::{Family, Row};
use crate::tile::{Bound, Space};

/// A type of each size of elements: code is the same for all types of a size.
const TYPES: [DType; 4] = [DType::F32, DType::BF16, DType::U8, DType::F64];

/// A row for each form of each kernel.
pub fn rows() -> Vec<Row> {
    let mut rows = vec![
        row(
            "copy",
            "rows",
            (DType::F32, Isa::Portable),
            |dtype, isa| verify_copies("rows", isa, dtype),
            |dtype, isa| copies("rows", isa, dtype),
        ),
        row("gather", "rows", (DType::F32, Isa::Portable), |_, _| verify_look_ups(), |dtype, _| look_ups(dtype)),
        row(
            "nearest",
            "pixels",
            (DType::F32, Isa::Portable),
            |dtype, _| verify_nearest(true, dtype),
            |dtype, _| resampled(true, dtype),
        ),
    ];
    for dtype in TYPES {
        // Blocks of four bytes have code of their own, which elements of fewer bytes that lie side by side are moved by, too.
        let levels: &[Isa] = if dtype == DType::F64 { &[Isa::Portable] } else { &[Isa::Portable, Isa::Avx2] };
        rows.extend(levels.iter().map(|&isa| {
            row(
                "copy",
                "transposed",
                (dtype, isa),
                |dtype, isa| verify_copies("transposed", isa, dtype),
                |dtype, isa| copies("transposed", isa, dtype),
            )
        }));
        let level = (dtype, Isa::Portable);
        rows.extend([
            row(
                "copy",
                "elements",
                level,
                |dtype, isa| verify_copies("elements", isa, dtype),
                |dtype, isa| copies("elements", isa, dtype),
            ),
            row("gather", "elements", level, |dtype, _| verify_picks(dtype), |dtype, _| picks(dtype)),
            row(
                "nearest",
                "planes",
                level,
                |dtype, _| verify_nearest(false, dtype),
                |dtype, _| resampled(false, dtype),
            ),
        ]);
    }
    rows
}

fn row(
    family: &str,
    form: &str,
    (dtype, isa): (DType, Isa),
    verify: fn(DType, Isa) -> Result<(), String>,
    benches: fn(DType, Isa) -> Vec<Bench>,
) -> Row {
    let name = format!("{family}_{}_{form}__{}", suffix(dtype), isa.name());
    let what = name.clone();
    Row {
        name,
        family: Family::Move,
        isa,
        dtype,
        is_available: Box::new(move || isa.is_available()),
        verify: Box::new(move || verify(dtype, isa).map_err(|error| format!("{what}: {error}"))),
        benches: benches(dtype, isa),
    }
}

/// Bytes of which few are the same as their neighbours.
fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 % 251) as u8).collect()
}

/// An op, its sizes by name, and what it moves.
type Layer = (&'static str, Vec<(&'static str, usize)>, Move);

/// A box of elements, and its strides on both sides.
#[derive(Clone)]
struct Move {
    sizes: Vec<usize>,
    from: Vec<isize>,
    to: Vec<isize>,
}

impl Move {
    fn new(sizes: &[usize], from: &[isize], to: &[isize]) -> Move {
        Move { sizes: sizes.to_vec(), from: from.to_vec(), to: to.to_vec() }
    }

    /// Between dense layouts, each given as the order of the dimensions, outermost first.
    fn between(sizes: &[usize], from: &[usize], to: &[usize]) -> Move {
        let strides = |order: &[usize]| {
            let (mut strides, mut step) = (vec![0; sizes.len()], 1);
            for &dim in order.iter().rev() {
                strides[dim] = step;
                step *= sizes[dim] as isize;
            }
            strides
        };
        Move { sizes: sizes.to_vec(), from: strides(from), to: strides(to) }
    }

    /// Elements from the first to the last, on the side of these strides.
    fn extent(&self, strides: &[isize]) -> usize {
        let last: isize = self.sizes.iter().zip(strides).map(|(&n, stride)| (n as isize - 1) * stride).sum();
        last as usize + 1
    }

    /// Both sides, of memory as large as they are.
    fn sides(&self, dtype: DType, src: *mut u8, dst: *mut u8) -> (Side<'_>, Side<'_>) {
        (Side { ptr: src, dtype, strides: &self.from }, Side { ptr: dst, dtype, strides: &self.to })
    }

    /// The name of the form in which elements of a type are moved.
    fn form(&self, dtype: DType) -> &'static str {
        let nowhere = std::ptr::null_mut();
        let (src, dst) = self.sides(dtype, nowhere, nowhere);
        match form_of(&self.sizes, &src, &dst) {
            Form::Rows => "rows",
            Form::Transposed(_) => "transposed",
            Form::Elements => "elements",
        }
    }
}

/// Boxes that meet every edge: parts of blocks and several of them, few elements side by side, distances that are no multiple of an
/// element, rows longer than a task, elements that are repeated.
fn moves() -> Vec<Move> {
    let mut moves = Vec::new();
    for sizes in [[2, 4, 9, 13], [1, 70, 8, 16], [2, 3, 65, 130], [2, 64, 16, 16], [1, 1, 1, 1]] {
        for (from, to) in [([0, 1, 2, 3], [0, 2, 3, 1]), ([0, 2, 3, 1], [0, 1, 2, 3]), ([3, 1, 0, 2], [0, 2, 1, 3])] {
            moves.push(Move::between(&sizes, &from, &to));
        }
    }
    for factor in [2, 3, 4, 8] {
        // What a pixel shuffle moves.
        let sizes = [24, 20, factor, 40, factor];
        moves.push(Move::between(&sizes, &[0, 2, 4, 1, 3], &[0, 1, 2, 3, 4]));
        moves.push(Move::between(&sizes, &[1, 3, 0, 2, 4], &[1, 2, 3, 4, 0]));
    }
    for cols in 1..=16 {
        for gap in 0..3 {
            let row = cols as isize + gap;
            moves.push(Move::new(&[3, 5, cols], &[7 * row + 1, row, 1], &[5 * row + gap, row, 1]));
            moves.push(Move::new(&[3, 5, cols], &[7 * row + 1, row + 2, 1], &[5 * row, row, 1]));
        }
    }
    moves.extend([
        Move::new(&[300_001], &[1], &[1]),
        Move::new(&[40, 77], &[80, 1], &[100, 1]),
        Move::new(&[3, 70_000], &[70_001, 1], &[70_003, 1]),
        Move::new(&[50, 70], &[0, 1], &[70, 1]),
        Move::new(&[50, 70], &[1, 0], &[70, 1]),
        Move::new(&[30_001], &[2], &[1]),
        Move::new(&[20_000], &[2], &[2]),
        Move::new(&[8193], &[3], &[2]),
        Move::new(&[9000, 5], &[14, 2], &[6, 1]),
        Move::new(&[9000, 2], &[1, 0], &[3, 1]),
        Move::new(&[9000, 4], &[4, 1], &[9, 2]),
    ]);
    moves
}

/// Compares those that are moved in that form with a copy in the order of indices; what lies between the elements stays.
fn verify_copies(form: &str, isa: Isa, dtype: DType) -> Result<(), String> {
    let mut compared = 0;
    for of in moves().into_iter().filter(|of| of.form(dtype) == form) {
        let size = dtype.size_bytes();
        let mut src = bytes(of.extent(&of.from) * size);
        let mut expected = vec![9u8; of.extent(&of.to) * size];
        let mut got = expected.clone();
        // SAFETY: the vectors hold the extents; a result has one index for each element.
        unsafe {
            let (from, to) = of.sides(dtype, src.as_mut_ptr(), expected.as_mut_ptr());
            copy_reference(&of.sizes, from, to);
            let (from, to) = of.sides(dtype, src.as_mut_ptr(), got.as_mut_ptr());
            copy(&Pool::new(2), isa, &of.sizes, from, to);
        }
        if let Some(at) = (0..got.len()).find(|&at| got[at] != expected[at]) {
            let Move { sizes, from, to } = of;
            return Err(format!("byte {at} is {}, not {}: {sizes:?}, {from:?} -> {to:?}", got[at], expected[at]));
        }
        compared += 1;
    }
    if compared == 0 { Err("compared nothing".to_owned()) } else { Ok(()) }
}

/// Copies that models make: images to channels last, keys for a product, skip connections into a concatenation, tokens to the pixels
/// of their patches, halves of a rotation.
fn copies(form: &str, isa: Isa, dtype: DType) -> Vec<Bench> {
    let layers: [Layer; 5] = [
        ("to_channels_last", vec![("channels", 320), ("pixels", 4096)], Move::new(&[320, 4096], &[4096, 1], &[1, 320])),
        ("transpose", vec![("rows", 4096), ("cols", 320)], Move::new(&[320, 4096], &[1, 320], &[4096, 1])),
        ("concat", vec![("rows", 4096), ("cols", 320), ("into", 640)], Move::new(&[4096, 320], &[320, 1], &[640, 1])),
        (
            "unpatch",
            vec![("side", 64), ("channels", 16)],
            Move::new(&[16, 64, 2, 64, 2], &[4, 4096, 2, 64, 1], &[16_384, 256, 128, 2, 1]),
        ),
        ("every_second", vec![("rows", 110_592), ("cols", 64)], Move::new(&[110_592, 64], &[128, 2], &[64, 1])),
    ];
    let chosen = layers.into_iter().filter(|(.., of)| of.form(dtype) == form);
    let bench = |(op, sizes, of): Layer| Bench {
        op,
        sizes,
        flops: 0.0,
        bytes: (2 * of.sizes.iter().product::<usize>() * dtype.size_bytes()) as f64,
        start: Box::new(move || {
            let of = of.clone();
            let [mut x, mut y] = [&of.from, &of.to].map(|strides| Buffer::random(dtype, of.extent(strides), 1));
            Ok(Box::new(move || {
                let (from, to) = of.sides(dtype, x.ptr_mut(), y.ptr_mut());
                // SAFETY: the buffers hold the extents; a result has one index for each element.
                unsafe { copy(Pool::global(), isa, &of.sizes, from, to) };
                Ok(())
            }) as Run)
        }),
    };
    chosen.map(bench).collect()
}

/// Indices below `rows`, in no order.
fn indices(dtype: DType, len: usize, rows: usize) -> Vec<u8> {
    let index = |at: usize| ((at * 7 + at / 5) % rows) as i64;
    (0..len).flat_map(|at| index(at).to_le_bytes()[..dtype.size_bytes()].to_vec()).collect()
}

/// An index of such a list.
fn index(list: &[u8], dtype: DType, at: usize) -> i64 {
    let size = dtype.size_bytes();
    let bytes = &list[at * size..(at + 1) * size];
    if dtype == DType::I32 {
        i64::from(i32::from_le_bytes(bytes.try_into().expect("four bytes")))
    } else {
        i64::from_le_bytes(bytes.try_into().expect("eight bytes"))
    }
}

/// Rows of several lengths, of one slice and of some, in both types of indices, from the end as from the start.
fn verify_look_ups() -> Result<(), String> {
    for (rows, len, row_bytes, outer) in
        [(25, 9, 24, 2), (3, 1, 1, 1), (100, 77, 3072, 1), (40, 300, 7, 3), (5, 0, 8, 1)]
    {
        for (dtype, from_end) in [(DType::I64, false), (DType::I32, false), (DType::I64, true)] {
            let table = bytes(outer * rows * row_bytes);
            let mut list = indices(dtype, len, rows);
            if from_end {
                list = (0..len).flat_map(|at| (index(&list, dtype, at) - rows as i64).to_le_bytes()).collect();
            }
            let mut got = vec![0u8; outer * len * row_bytes];
            let indices = Indices { ptr: list.as_ptr(), dtype, len, stride: 1 };
            let of = Rows {
                src: table.as_ptr(),
                rows,
                src_row: row_bytes as isize,
                dst: got.as_mut_ptr(),
                dst_row: row_bytes as isize,
                row_bytes,
                outer,
                src_outer: (rows * row_bytes) as isize,
                dst_outer: (len * row_bytes) as isize,
            };
            // SAFETY: dense memory of the sizes named.
            unsafe { gather(&Pool::new(2), indices, from_end, of) }.map_err(|error| error.to_string())?;
            for (at, row) in got.chunks(row_bytes).enumerate() {
                let picked = index(&list, dtype, at % len).rem_euclid(rows as i64) as usize;
                let from = (at / len * rows + picked) * row_bytes;
                if row != &table[from..from + row_bytes] {
                    return Err(format!("row {at} of {row_bytes} bytes, {dtype:?}, is not that of number {picked}"));
                }
            }
        }
    }
    Ok(())
}

/// The embeddings of a text's tokens, in CLIP's vocabulary.
fn look_ups(dtype: DType) -> Vec<Bench> {
    let (len, rows, cols) = (77, 49_408, 768);
    let row_bytes = cols * dtype.size_bytes();
    vec![Bench {
        op: "embedding",
        sizes: vec![("rows", len), ("of", rows), ("cols", cols)],
        flops: 0.0,
        bytes: (2 * len * row_bytes + 8 * len) as f64,
        start: Box::new(move || {
            let list: Vec<i64> = (0..len as i64).map(|at| at * 641 % rows as i64).collect();
            let (table, mut y) = (Buffer::random(dtype, rows * cols, 1), Buffer::zeroed(dtype, len * cols));
            Ok(Box::new(move || {
                let indices = Indices { ptr: list.as_ptr().cast(), dtype: DType::I64, len, stride: 1 };
                let step = row_bytes as isize;
                let of = Rows {
                    src: table.ptr(),
                    rows,
                    src_row: step,
                    dst: y.ptr_mut(),
                    dst_row: step,
                    row_bytes,
                    outer: 1,
                    src_outer: 0,
                    dst_outer: 0,
                };
                // SAFETY: dense memory of the sizes named.
                unsafe { gather(Pool::global(), indices, false, of) }.map_err(refused)
            }) as Run)
        }),
    }]
}

/// Indices of benches are in bounds.
fn refused(_: IndexError) -> KernelError {
    KernelError::Shape("an index is out of bounds")
}

/// Along each dimension, from a table that is transposed and larger than the result, in both types of indices.
fn verify_picks(dtype: DType) -> Result<(), String> {
    let (sizes, table, size) = ([40usize, 9, 33], [41usize, 11, 35], dtype.size_bytes());
    let src = bytes(table.iter().product::<usize>() * size);
    // The first dimension is the innermost one in memory.
    let steps = [1, (table[0] * table[2]) as isize, table[0] as isize];
    let (count, space) = (sizes.iter().product::<usize>(), Space::new(&sizes));
    for (dim, index_dtype) in (0..3).flat_map(|dim| [DType::I64, DType::I32].map(|index_dtype| (dim, index_dtype))) {
        let mut list = indices(index_dtype, count, table[dim]);
        let mut got = vec![0u8; count * size];
        let mut strides = [steps[0], steps[1], steps[2], 0, 0, 0, 0, 0];
        strides[dim] = 0;
        let of = Elements {
            space,
            element_bytes: size,
            src: Bound { ptr: src.as_ptr().cast_mut(), strides },
            size: table[dim],
            step: steps[dim],
            index: Bound::contiguous(list.as_mut_ptr(), &space),
            index_dtype,
            dst: Bound::contiguous(got.as_mut_ptr(), &space),
        };
        // SAFETY: dense memory of the sizes named; the table is larger in every dimension, and read only.
        unsafe { gather_elements(&Pool::new(2), &of) }.map_err(|error| error.to_string())?;
        for at in 0..count {
            let mut place = [at / (sizes[1] * sizes[2]), at / sizes[2] % sizes[1], at % sizes[2]];
            place[dim] = index(&list, index_dtype, at) as usize;
            let from = place.iter().zip(steps).map(|(&at, step)| at * step as usize).sum::<usize>() * size;
            if got[at * size..(at + 1) * size] != src[from..from + size] {
                return Err(format!("element {at} along {dim}, {index_dtype:?}, is not that of its index"));
            }
        }
    }
    Ok(())
}

/// Half of the tokens, as where tokens are merged: one index for all channels of each.
fn picks(dtype: DType) -> Vec<Bench> {
    let (len, rows, cols) = (2048, 4096, 320);
    vec![Bench {
        op: "gather",
        sizes: vec![("rows", len), ("of", rows), ("cols", cols)],
        flops: 0.0,
        bytes: (2 * len * cols * dtype.size_bytes() + 8 * len) as f64,
        start: Box::new(move || {
            let mut list: Vec<i64> = (0..len as i64).map(|at| at * 641 % rows as i64).collect();
            let (mut x, mut y) = (Buffer::random(dtype, rows * cols, 1), Buffer::zeroed(dtype, len * cols));
            Ok(Box::new(move || {
                let space = Space::new(&[len, cols]);
                let of = Elements {
                    space,
                    element_bytes: dtype.size_bytes(),
                    src: Bound { ptr: x.ptr_mut(), strides: [0, 1, 0, 0, 0, 0, 0, 0] },
                    size: rows,
                    step: cols as isize,
                    index: Bound { ptr: list.as_mut_ptr().cast(), strides: [1, 0, 0, 0, 0, 0, 0, 0] },
                    index_dtype: DType::I64,
                    dst: Bound::contiguous(y.ptr_mut(), &space),
                };
                // SAFETY: dense memory of the sizes named.
                unsafe { gather_elements(Pool::global(), &of) }.map_err(refused)
            }) as Run)
        }),
    }]
}

/// Two images of five channels, whose channels or whose pixels lie side by side; sizes are depth, height and width.
fn verify_nearest(has_pixels: bool, dtype: DType) -> Result<(), String> {
    let (batch, channels, size) = (2, 5, dtype.size_bytes());
    for (input, output) in
        [([2, 3, 4], [3, 6, 7]), ([1, 9, 20], [1, 18, 40]), ([1, 1, 31], [1, 1, 8]), ([3, 5, 2], [3, 5, 2])]
    {
        for exact in [false, true] {
            let strides = |sizes: [usize; 3]| {
                let [depth, height, width] = sizes.map(|n| n as isize);
                let (pixels, c) = (depth * height * width, channels as isize);
                // Of images and channels; depth, height and width.
                match has_pixels {
                    true => ([pixels * c, 1], [height * width * c, width * c, c]),
                    false => ([pixels * c, pixels], [height * width, width, 1]),
                }
            };
            let ((from, from_axes), (to, to_axes)) = (strides(input), strides(output));
            let (inputs, outputs) = (input.iter().product::<usize>(), output.iter().product::<usize>());
            let src = bytes(batch * channels * inputs * size);
            let mut got = vec![0u8; batch * channels * outputs * size];
            let in_bytes = |stride: isize| stride * size as isize;
            let axes = [0, 1, 2].map(|axis| Axis {
                input: input[axis],
                output: output[axis],
                scale: None,
                src: in_bytes(from_axes[axis]),
                dst: in_bytes(to_axes[axis]),
            });
            let images = Images {
                src: src.as_ptr(),
                dst: got.as_mut_ptr(),
                batch,
                src_batch: in_bytes(from[0]),
                dst_batch: in_bytes(to[0]),
                channels,
                src_channel: in_bytes(from[1]),
                dst_channel: in_bytes(to[1]),
                element_bytes: size,
                axes,
            };
            // SAFETY: the vectors hold the images.
            unsafe { nearest(&Pool::new(2), exact, &images) };
            for at in 0..batch * channels * outputs {
                let (n, channel, pixel) = (at / (channels * outputs), at / outputs % channels, at % outputs);
                let [_, height, width] = output;
                let place = [pixel / (height * width), pixel / width % height, pixel % width];
                let offset = |[image, step]: [isize; 2], axes: [isize; 3], place: [usize; 3]| {
                    let inside: isize = place.iter().zip(axes).map(|(&at, stride)| at as isize * stride).sum();
                    (n as isize * image + channel as isize * step + inside) as usize * size
                };
                // Whole numbers, in halves where the middles of pixels count.
                let near = [0, 1, 2].map(|axis| match exact {
                    true => (2 * place[axis] + 1) * input[axis] / (2 * output[axis]),
                    false => place[axis] * input[axis] / output[axis],
                });
                let (to, from) = (offset(to, to_axes, place), offset(from, from_axes, near));
                if got[to..to + size] != src[from..from + size] {
                    return Err(format!(
                        "{input:?} to {output:?}, exact {exact}: image {n}, channel {channel}, {place:?}"
                    ));
                }
            }
        }
    }
    Ok(())
}

/// What a UNet enlarges, channels last, where the convolution behind it does not; an image of few planes.
fn resampled(has_pixels: bool, dtype: DType) -> Vec<Bench> {
    let (op, layers) =
        if has_pixels { ("nearest", [(1280, 16), (640, 32)]) } else { ("nearest_planes", [(4, 64), (3, 512)]) };
    let bench = |(channels, side): (usize, usize)| Bench {
        op,
        sizes: vec![("channels", channels), ("side", side), ("factor", 2)],
        flops: 0.0,
        bytes: (5 * channels * side * side * dtype.size_bytes()) as f64,
        start: Box::new(move || {
            let (x, mut y) =
                (Buffer::random(dtype, channels * side * side, 1), Buffer::zeroed(dtype, 4 * channels * side * side));
            Ok(Box::new(move || {
                let size = dtype.size_bytes() as isize;
                let pixel = if has_pixels { channels as isize * size } else { size };
                let channel = |side: usize| if has_pixels { size } else { (side * side) as isize * size };
                let axis = |src: usize, dst: usize| {
                    let [src, dst] = [src, dst].map(|pixels| pixels as isize * pixel);
                    Axis { input: side, output: 2 * side, scale: Some(2.0), src, dst }
                };
                let images = Images {
                    src: x.ptr(),
                    dst: y.ptr_mut(),
                    batch: 1,
                    src_batch: 0,
                    dst_batch: 0,
                    channels,
                    src_channel: channel(side),
                    dst_channel: channel(2 * side),
                    element_bytes: dtype.size_bytes(),
                    axes: [Axis { input: 1, output: 1, scale: None, src: 0, dst: 0 }, axis(side, 2 * side), axis(1, 1)],
                };
                // SAFETY: the buffers hold the images.
                unsafe { nearest(Pool::global(), false, &images) };
                Ok(())
            }) as Run)
        }),
    };
    layers.into_iter().map(bench).collect()
}
