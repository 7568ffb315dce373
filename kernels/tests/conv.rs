//! Convolutions through the public entry points: weight layouts, sliced inputs, coverage, bad arguments; measured choices
//! between their forms.

use std::sync::Mutex;
use std::time::Duration;

use oxidiff_kernels::cpu::KernelError;
use oxidiff_kernels::cpu::conv::{Conv, PackedWeight, Weight, conv, conv_unpacked, pack_conv_weight, packs_while_used};
use oxidiff_kernels::cpu::conv_algorithm::{Algorithm, Keep, choose, work_bytes};
use oxidiff_kernels::cpu::conv_choice::{
    ALGORITHMS, Choice, Observed, Site, columns_at_once, install, measure, memory_bytes, most_bytes, observe, tolerance,
};
use oxidiff_kernels::cpu::conv_winograd::{Room, Work, conv_winograd};
use oxidiff_kernels::cpu::conv_winograd_points::{BLOCK_STEP, Cut, MAX_CHAIN, WORK_BYTES, cost_per_pair};
use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
use oxidiff_kernels::cpu::verify::{Buffer, compare, conv_cases, reference_conv};
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::epilogue::Epilogue;
use oxidiff_kernels::isa::{Isa, amx};
use oxidiff_kernels::pool::Pool;

struct Coverage {
    cols: usize,
    seen: Mutex<Vec<u32>>,
}

impl Epilogue for Coverage {
    unsafe fn apply(&self, _: *mut f32, _: usize, row0: usize, col0: usize, rows: usize, cols: usize) {
        let mut seen = self.seen.lock().unwrap();
        for row in row0..row0 + rows {
            seen[row * self.cols + col0..][..cols].iter_mut().for_each(|count| *count += 1);
        }
    }
}

#[test]
fn every_result_is_handed_over_once() {
    let pool = Pool::new(3);
    for shape in conv_cases() {
        let x = Buffer::random(DType::F32, shape.batch * shape.strides[0] as usize, 1);
        let memory = Buffer::zeroed(DType::U8, shape.packed_bytes(DType::F32, Isa::detect()));
        let packed = PackedWeight::from_raw(memory.ptr(), DType::F32, &shape, Isa::detect());
        let seen = Mutex::new(vec![0; shape.rows() * shape.out_channels]);
        let coverage = Coverage { cols: shape.out_channels, seen };
        // SAFETY: buffers of the sizes that `shape` says.
        unsafe { conv(&pool, Isa::detect(), &shape, x.ptr(), DType::F32, &packed, &coverage).unwrap() };
        assert!(coverage.seen.into_inner().unwrap().iter().all(|&count| count == 1), "{shape:?}");
    }
}

/// Contiguous, channels-last and scattered weights pack to the same bytes.
#[test]
fn weight_layout_does_not_matter() {
    for (channels, outs, kernel) in [(32, 40, [1, 3, 3]), (7, 33, [1, 3, 3]), (48, 16, [3, 3, 3]), (20, 5, [1, 1, 1])] {
        let shape = Conv::new_3d(1, [5, 5, 5], channels, outs, kernel);
        let taps: usize = kernel.iter().product();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let dense = Buffer::random(dtype, outs * channels * taps, 1);
            let contiguous = Weight::contiguous(dense.ptr(), dtype, &shape);
            let layouts = [[channels * taps, 1, taps], [1, outs, outs * channels]];
            for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
                let expected = packed_bytes_of(isa, &shape, &contiguous);
                for [oc_stride, ic_stride, tap_stride] in layouts.map(|[oc, ic, tap]| match tap == taps {
                    true => [oc, ic, channels],
                    false => [oc, ic, tap],
                }) {
                    let mut other = Buffer::zeroed(dtype, outs * channels * taps);
                    for index in 0..outs * channels * taps {
                        let (oc, ic, tap) = (index / (channels * taps), index / taps % channels, index % taps);
                        other.set(oc * oc_stride + ic * ic_stride + tap * tap_stride, dense.get(index) as f32);
                    }
                    let [_, kh, kw] = kernel;
                    let strides = [oc_stride, ic_stride, kh * kw * tap_stride, kw * tap_stride, tap_stride];
                    let weight = Weight { ptr: other.ptr(), dtype, strides: strides.map(|stride| stride as isize) };
                    assert!(packed_bytes_of(isa, &shape, &weight) == expected, "{isa:?} {dtype:?} {strides:?}");
                }
            }
        }
    }
}

fn packed_bytes_of(isa: Isa, shape: &Conv, weight: &Weight) -> Vec<u8> {
    let mut memory = vec![0xa5; shape.packed_bytes(weight.dtype, isa)];
    // SAFETY: the memory has the size asked for, the weight that of `shape`.
    unsafe { pack_conv_weight(Pool::global(), isa, shape, weight, memory.as_mut_ptr()) };
    memory
}

/// The input is a slice of channels of a wider image, and a crop of it.
#[test]
fn sliced_inputs_are_read_in_place() {
    let (size, channels, wide, outs) = (12, 64, 100, 24);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let image = Buffer::random(dtype, 2 * size * size * wide, 1);
        let shape = Conv::new_2d(2, [size - 2, size - 2], channels, outs, [3, 3]).padding([0, 1, 1]);
        let pixel = wide as isize;
        let strides = [(size * size) as isize * pixel, 0, size as isize * pixel, pixel];
        let sliced = Conv { strides, ..shape };
        let offset = (size + 1) * wide + 20;
        let mut dense = Buffer::zeroed(dtype, 2 * (size - 2) * (size - 2) * channels);
        for index in 0..2 * (size - 2) * (size - 2) * channels {
            let (pixel, channel) = (index / channels, index % channels);
            let (n, h, w) = (pixel / ((size - 2) * (size - 2)), pixel / (size - 2) % (size - 2), pixel % (size - 2));
            dense.set(index, image.get(offset + ((n * size + h) * size + w) * wide + channel) as f32);
        }
        let w = Buffer::random(dtype, outs * shape.terms(), 2);
        let references = reference_conv(&shape, &dense, &w);
        for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
            let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(dtype, isa));
            let mut y = Buffer::zeroed(DType::F32, shape.rows() * outs);
            let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, outs as isize);
            let x = image.ptr().wrapping_add(offset * dtype.size_bytes());
            // SAFETY: the slice lies inside the image.
            unsafe {
                let weight = Weight::contiguous(w.ptr(), dtype, &shape);
                let packed = pack_conv_weight(Pool::global(), isa, &shape, &weight, memory.ptr_mut());
                conv(Pool::global(), isa, &sliced, x, dtype, &packed, &store).unwrap();
            }
            compare(&format!("{isa:?} {dtype:?}"), &y, &references, shape.terms()).unwrap();
        }
    }
}

/// To few channels, the pixels of an image that no cache holds are copied first.
#[test]
fn a_copied_image_gives_the_same_as_one_read_in_place() {
    let (height, width, channels, outs, wide) = (33, 32, 24, 3, 4100);
    let shape = Conv::new_2d(1, [height, width], channels, outs, [3, 3]).padding([0, 1, 1]);
    let dense = Buffer::random(DType::F32, height * width * channels, 1);
    // More than 16 MB from its first pixel to its last.
    let mut image = Buffer::zeroed(DType::F32, height * width * wide);
    for index in 0..height * width * channels {
        image.set(index / channels * wide + index % channels, dense.get(index) as f32);
    }
    let strides = [0, 0, (width * wide) as isize, wide as isize];
    let w = Buffer::random(DType::F32, outs * shape.terms(), 2);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        let results = [(shape, &dense), (Conv { strides, ..shape }, &image)].map(|(conv_shape, x)| {
            let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(DType::F32, isa));
            let mut y = Buffer::zeroed(DType::F32, shape.rows() * outs);
            let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, outs as isize);
            // SAFETY: the image has the pixels that its strides say.
            unsafe {
                let weight = Weight::contiguous(w.ptr(), DType::F32, &shape);
                let packed = pack_conv_weight(Pool::global(), isa, &shape, &weight, memory.ptr_mut());
                conv(Pool::global(), isa, &conv_shape, x.ptr(), DType::F32, &packed, &store).unwrap();
            }
            (0..shape.rows() * outs).map(|index| y.get(index)).collect::<Vec<f64>>()
        });
        assert!(results[0] == results[1], "{isa:?}");
    }
}

/// One of Winograd's forms over an f32 image that lies dense.
///
/// # Safety
/// As [`conv_winograd`].
unsafe fn winograd(
    shape: &Conv,
    algorithm: Algorithm,
    x: &Buffer,
    weight: &Weight,
    work: Work,
    epilogue: &dyn Epilogue,
) {
    let (isa, x) = (Isa::detect(), (x.ptr(), DType::F32).into());
    // SAFETY: forwarded.
    unsafe { conv_winograd(Pool::global(), isa, shape, x, weight, algorithm.tile(), work, epilogue).unwrap() };
}

/// The same layer through the chosen form and through the direct one.
#[test]
fn every_form_gives_the_same_convolution() {
    for size in [5, 16, 33] {
        let shape = Conv::new_2d(1, [size, size], 64, 64, [3, 3]).padding([0, 1, 1]);
        let x = Buffer::random(DType::F32, size * size * 64, 1);
        let w = Buffer::random(DType::F32, 64 * shape.terms(), 2);
        let weight = Weight::contiguous(w.ptr(), DType::F32, &shape);
        let references = reference_conv(&shape, &x, &w);
        let largest = references.iter().map(|reference| reference.sum.abs()).fold(0.0, f64::max);
        for algorithm in ALGORITHMS {
            let isa = Isa::detect();
            let bytes = shape.packed_bytes(DType::F32, isa).max(work_bytes(&shape, algorithm, isa, Room::Ample));
            let mut memory = Buffer::zeroed(DType::U8, bytes);
            let mut y = Buffer::zeroed(DType::F32, shape.rows() * 64);
            let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, 64);
            // SAFETY: dense buffers of the sizes that `shape` says.
            unsafe {
                if algorithm == Algorithm::Direct {
                    let panels = pack_conv_weight(Pool::global(), isa, &shape, &weight, memory.ptr_mut());
                    conv(Pool::global(), isa, &shape, x.ptr(), DType::F32, &panels, &store).unwrap();
                } else {
                    winograd(&shape, algorithm, &x, &weight, Work { ptr: memory.ptr_mut(), room: Room::Ample }, &store);
                }
            }
            // The bar of a single f32 operation: 1e-5 of its largest result.
            for (index, reference) in references.iter().enumerate() {
                let error = (y.get(index) - reference.sum).abs();
                assert!(error <= 1e-5 * largest, "{algorithm:?} {size} {index}: {error:e} of {largest}");
            }
        }
    }
}

/// How an image is cut, into bands or into blocks of input channels, is a matter of time and memory alone.
#[test]
fn cuts_give_the_same_results() {
    let isa = Isa::detect();
    let results = |o: usize, shape: &Conv, room: Room| {
        let algorithm = if o == 4 { Algorithm::Winograd4 } else { Algorithm::Winograd2 };
        let outs = shape.out_channels;
        let x = Buffer::random(DType::F32, shape.batch * shape.input.iter().product::<usize>() * shape.in_channels, 1);
        let w = Buffer::random(DType::F32, outs * shape.terms(), 2);
        let mut memory = Buffer::zeroed(DType::U8, work_bytes(shape, algorithm, isa, room));
        let mut y = Buffer::zeroed(DType::F32, shape.rows() * outs);
        let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, outs as isize);
        let weight = Weight::contiguous(w.ptr(), DType::F32, shape);
        // SAFETY: dense buffers of the sizes that `shape` says.
        unsafe { winograd(shape, algorithm, &x, &weight, Work { ptr: memory.ptr_mut(), room }, &store) };
        let values: Vec<f64> = (0..shape.rows() * outs).map(|index| y.get(index)).collect();
        (values, memory.len_bytes())
    };
    // Slim memory cuts into bands only. Where many channels meet few tiles, ample memory holds M of all panels, the last of
    // which is half as wide, beside V.
    for (o, batch, size, channels, outs, is_blocked) in [
        (4, 1, 32, 1040, 528, true),
        (4, 3, 14, 1280, 100, true),
        (2, 1, 16, 1600, 330, true),
        (4, 1, 33, 64, 17, false),
    ] {
        let shape = Conv::new_2d(batch, [size, size], channels, outs, [3, 3]).padding([0, 1, 1]);
        let (bands, _) = results(o, &shape, Room::Slim);
        let (blocks, bytes) = results(o, &shape, Room::Ample);
        // Micro-kernels of few rows add up in another order.
        let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
        let distance = norm(&mut bands.iter().zip(&blocks).map(|(a, b)| a - b)) / norm(&mut bands.iter().copied());
        assert!(distance < 1e-6, "{shape:?}: {distance}");
        let m = shape.batch * size.div_ceil(o).pow(2) * (o + 2).pow(2) * outs * 4;
        // V does not depend on the output channels.
        let wider = Conv { out_channels: 2 * outs, ..shape };
        let algorithm = if o == 4 { Algorithm::Winograd4 } else { Algorithm::Winograd2 };
        let has_results = work_bytes(&wider, algorithm, isa, Room::Ample) > bytes;
        assert_eq!(has_results && bytes > m, is_blocked, "{shape:?}: {bytes} bytes, M {m}");
    }
}

#[test]
fn forms_are_chosen_by_size() {
    let shape = |size, channels| Conv::new_2d(1, [size, size], channels, channels, [3, 3]).padding([0, 1, 1]);
    let of = |shape: &Conv, keep| choose(shape, DType::F32, DType::F32, keep);
    assert_eq!(of(&shape(64, 320), Keep::Packed), Algorithm::Winograd4);
    assert_eq!(of(&shape(64, 320), Keep::PerCall), Algorithm::Winograd4);
    assert_eq!(of(&shape(16, 1280), Keep::PerCall), Algorithm::Winograd4);
    assert_eq!(of(&shape(8, 1280), Keep::Packed), Algorithm::Winograd4);
    assert_eq!(of(&shape(4, 1280), Keep::Packed), Algorithm::Direct);
    assert_eq!(of(&shape(64, 4), Keep::Packed), Algorithm::Direct);
    assert_eq!(of(&shape(64, 320).stride([1, 2, 2]), Keep::Packed), Algorithm::Direct);
    assert!(!Algorithm::Winograd2.applies(&shape(64, 320).groups(2)));
}

#[test]
fn bad_arguments_are_errors() {
    let shape = Conv::new_2d(1, [4, 4], 8, 8, [3, 3]);
    let x = Buffer::random(DType::F32, 4 * 4 * 8, 1);
    let memory = Buffer::zeroed(DType::U8, shape.packed_bytes(DType::F32, Isa::detect()));
    let packed = PackedWeight::from_raw(memory.ptr(), DType::F32, &shape, Isa::detect());
    let mut y = Buffer::zeroed(DType::F32, shape.rows() * 8);
    let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, 8);
    let outcome = |shape: &Conv, dtype: DType| {
        // SAFETY: nothing is read or written through arguments that are refused.
        unsafe { conv(Pool::global(), Isa::detect(), shape, x.ptr(), dtype, &packed, &store) }
    };
    assert!(matches!(outcome(&Conv { groups: 3, ..shape }, DType::F32), Err(KernelError::Shape(_))));
    assert!(matches!(outcome(&Conv { stride: [1, 0, 1], ..shape }, DType::F32), Err(KernelError::Shape(_))));
    assert!(matches!(outcome(&Conv { kernel: [1, 5, 5], ..shape }, DType::F32), Err(KernelError::Shape(_))));
    assert_eq!(outcome(&shape, DType::F64), Err(KernelError::UnsupportedDType(DType::F64)));
}

/// A weight is read as it lies where AMX multiplies few pixels by it, and many threads find something to do.
#[test]
fn few_pixels_use_a_weight_as_it_lies() {
    let isa = Isa::detect();
    let shape = |batch, size, channels| Conv::new_2d(batch, [size, size], channels, 1280, [3, 3]).padding([0, 1, 1]);
    let is_unpacked = |conv: &Conv, threads| packs_while_used(isa, conv, DType::BF16, DType::BF16, threads);
    let has_amx = isa == Isa::Avx512 && amx().bf16;
    for (conv, threads) in [
        (shape(1, 8, 1280), 2),
        (shape(4, 8, 1280), 2),
        (shape(1, 16, 1280), 20),
        (Conv::new_2d(1, [16, 16], 64, 1280, [7, 7]), 2),
    ] {
        assert_eq!(is_unpacked(&conv, threads), has_amx, "{conv:?} {threads}");
        assert!(!packs_while_used(isa.min(Isa::Avx2), &conv, DType::BF16, DType::BF16, threads));
    }
    for (conv, threads) in [
        (shape(1, 16, 1280), 21),
        (shape(1, 64, 320), 2),
        (shape(5, 8, 1280), 2),
        (shape(0, 8, 1280), 2),
        (shape(1, 8, 1280).groups(2), 2),
        (shape(1, 8, 8), 2),
        (shape(1, 4, 1280), 2),
        (Conv::new_2d(1, [8, 8], 1280, 1280, [1, 1]), 2),
        (Conv::new_2d(1, [16, 16], 64, 1280, [8, 8]), 2),
    ] {
        assert!(!is_unpacked(&conv, threads), "{conv:?} {threads}");
    }
    let conv = shape(1, 4, 64);
    let x = Buffer::zeroed(DType::F32, 16 * 64);
    let weight = Weight::contiguous(x.ptr(), DType::F32, &conv);
    let mut y = Buffer::zeroed(DType::F32, conv.rows() * 1280);
    let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, 1280);
    // SAFETY: nothing is read or written through arguments that are refused.
    let outcome = unsafe { conv_unpacked(Pool::global(), isa, &conv, x.ptr(), DType::F32, &weight, &store) };
    assert!(matches!(outcome, Err(KernelError::Shape(_))), "too narrow for it");
}

/// Where memory is short, what an image of many tiles takes is less, first without the order of products that AMX likes best.
#[test]
fn less_room_gives_the_same_results() {
    let (isa, algorithm) = (Isa::detect(), Algorithm::Winograd4);
    let shape = Conv::new_2d(1, [80, 80], 64, 48, [3, 3]).padding([0, 1, 1]);
    let x = Buffer::random(DType::F32, 80 * 80 * 64, 1);
    let w = Buffer::random(DType::F32, 48 * shape.terms(), 2);
    let weight = Weight::contiguous(w.ptr(), DType::F32, &shape);
    let references = reference_conv(&shape, &x, &w);
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let mut last = usize::MAX;
    for room in [Room::Ample, Room::Middle, Room::Slim] {
        let mut memory = Buffer::zeroed(DType::U8, work_bytes(&shape, algorithm, isa, room));
        let mut y = Buffer::zeroed(DType::F32, shape.rows() * 48);
        let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, 48);
        let bytes = memory.len_bytes();
        assert!(bytes <= last && (room == Room::Ample || bytes <= 5 << 20), "{room:?}: {bytes}");
        last = bytes;
        // SAFETY: dense buffers of the sizes that `shape` says.
        unsafe { winograd(&shape, algorithm, &x, &weight, Work { ptr: memory.ptr_mut(), room }, &store) };
        let mut errors = references.iter().enumerate().map(|(at, reference)| y.get(at) - reference.sum);
        let error = norm(&mut errors) / norm(&mut references.iter().map(|reference| reference.sum));
        assert!(error <= 1e-5, "{room:?}: {error:e}");
    }
}

fn observed(channels: usize, side: usize) -> Observed {
    let mut conv = Conv::new_2d(1, [side, side], channels, channels, [3, 3]);
    conv.padding = [0, 1, 1];
    conv.output = [1, side, side];
    Observed { conv, dtype: DType::F32, weight: DType::F32 }
}

#[test]
fn every_form_is_timed_and_right() {
    let of = observed(96, 24);
    let (pool, isa, most) = (Pool::global(), Isa::detect(), most_bytes());
    for algorithm in ALGORITHMS {
        // A weight of somebody's, its channels as neighbours, takes no memory.
        let [depth, height, width] = of.conv.kernel.map(|k| k as isize);
        let channels = of.conv.in_channels as isize;
        let own: Vec<f32> = (0..of.conv.out_channels * of.conv.terms()).map(|i| (i % 97) as f32 - 48.0).collect();
        let row = depth * height * width * channels;
        let strides = [row, 1, height * width * channels, width * channels, channels];
        let own = Weight { ptr: own.as_ptr().cast::<u8>().cast_mut(), dtype: of.weight, strides };
        for given in [None, Some(own)] {
            let bytes = memory_bytes(&of, algorithm, isa, given.is_some(), most);
            let fewer = memory_bytes(&of, algorithm, isa, false, most) - bytes;
            assert_eq!(fewer > 0, given.is_some());
            let mut memory = vec![0u64; bytes / 8 + 512];
            let memory = memory.as_mut_ptr().cast();
            // SAFETY: the vector has the bytes, and room to start at a multiple of eight.
            let trial = unsafe { measure(pool, isa, &of, algorithm, true, given, most, memory) }.expect("it runs");
            assert!(trial.error <= tolerance(of.dtype, of.weight), "{algorithm:?}: {}", trial.error);
            assert_eq!(trial.error > 0.0, algorithm != Algorithm::Direct, "{algorithm:?} was compared");
            assert!(trial.run > Duration::ZERO);
        }
    }
}

/// A form that is off in a single column is found out, whichever it is.
#[test]
fn each_column_is_compared() {
    let of = observed(160, 12);
    let (pool, isa, most) = (Pool::global(), Isa::detect(), most_bytes());
    let terms = of.conv.terms();
    let mut weight: Vec<f32> = (0..of.conv.out_channels * terms).map(|i| (i % 89) as f32 - 44.0).collect();
    let [depth, height, width] = of.conv.kernel.map(|k| k as isize);
    let strides = [terms as isize, depth * height * width, height * width, width, 1];
    let bytes = memory_bytes(&of, Algorithm::Winograd4, isa, true, most);
    for column in [0, 63, 64, 159] {
        // What is not a number in a weight is that in its column of both results, and of their distance.
        let kept = std::mem::replace(&mut weight[column * terms], f32::NAN);
        let given = Weight { ptr: weight.as_mut_ptr().cast(), dtype: of.weight, strides };
        let mut memory = vec![0u64; bytes / 8 + 512];
        let memory = memory.as_mut_ptr().cast();
        // SAFETY: the vector has the bytes, and room to start at a multiple of eight.
        let trial =
            unsafe { measure(pool, isa, &of, Algorithm::Winograd4, true, Some(given), most, memory) }.expect("it runs");
        assert!(trial.error.is_nan(), "column {column}: {}", trial.error);
        weight[column * terms] = kept;
    }
}

/// The other forms would be far from a direct one whose chunks lie elsewhere than they should.
#[test]
fn chunks_of_columns_are_all_columns() {
    let of = observed(160, 12);
    let (pool, isa) = (Pool::global(), Isa::detect());
    let most = of.conv.packed_bytes(of.weight, isa) / 3;
    assert_eq!(columns_at_once(&of, isa, most), 64);
    let bytes = memory_bytes(&of, Algorithm::Winograd4, isa, false, most);
    let mut memory = vec![f64::NAN; bytes / 8 + 512];
    let memory = memory.as_mut_ptr().cast();
    // SAFETY: the vector has the bytes, and room to start at a multiple of eight.
    let trial = unsafe { measure(pool, isa, &of, Algorithm::Winograd4, true, None, most, memory) }.expect("it runs");
    assert!(trial.error > 0.0 && trial.error <= tolerance(of.dtype, of.weight), "{}", trial.error);
}

#[test]
fn an_installed_choice_is_chosen_where_it_applies() {
    // A shape of its own: the table is the process's.
    let of = observed(111, 23);
    let site = Site::of(&of.conv, of.dtype, of.weight);
    let ((), seen) = observe(|| {
        choose(&of.conv, of.dtype, of.weight, Keep::Packed);
    });
    assert_eq!(seen.len(), 1);
    for choice in ["direct winograd2", "winograd2 winograd4"].map(|c| Choice::parse(c).expect("it is one")) {
        install(site, choice);
        assert_eq!(choose(&of.conv, of.dtype, of.weight, Keep::Packed), choice.packed);
        assert_eq!(choose(&of.conv, of.dtype, of.weight, Keep::PerCall), choice.per_call);
        assert_eq!(Choice::parse(&choice.to_string()), Some(choice));
    }
    let strided = Conv { stride: [1, 2, 2], output: [1, 12, 12], ..of.conv };
    install(Site::of(&strided, of.dtype, of.weight), Choice::parse("winograd4 winograd4").expect("it is one"));
    assert_eq!(choose(&strided, of.dtype, of.weight, Keep::Packed), Algorithm::Direct);
    assert_eq!(Choice::parse("winograd9 direct"), None);
}

#[test]
fn near_sizes_share_a_bucket() {
    let site = |side| Site::of(&observed(64, side).conv, DType::F32, DType::F32);
    assert_eq!(site(64), site(66));
    assert_ne!(site(64), site(90));
    assert_ne!(site(7).bucket(), site(8).bucket());
    assert_eq!(site(64).op(), site(90).op());
}

/// Of layers as models have them: the memory, and that blocks are whole and chains short.
#[test]
fn cuts_fit_into_the_memory() {
    for (size, ins, outs, planes) in [
        (64, 320, 320, 1),
        (64, 960, 320, 1),
        (128, 512, 512, 1),
        (512, 128, 128, 1),
        (48, 640, 640, 1),
        (64, 96, 192, 3),
    ] {
        let padding = [planes as isize / 2, 1, 1];
        let conv = Conv::new_3d(1, [planes, size, size], ins, outs, [planes, 3, 3]).padding(padding);
        let cut = Cut::new(&conv, 4);
        let blocks = cut.blocks();
        assert!(cut.bytes() <= WORK_BYTES, "{conv:?}: {cut:?}");
        assert!(blocks[0] * planes <= MAX_CHAIN, "{conv:?}: {cut:?}");
        for (block, channels) in blocks.into_iter().zip([ins, outs]) {
            assert!(block == channels || block.is_multiple_of(BLOCK_STEP), "{conv:?}: {cut:?}");
        }
        assert!(cost_per_pair(&conv, 4).is_finite());
    }
    // More than any cut makes of it.
    let large = Conv::new_2d(1, [4096, 4096], 8192, 64, [3, 3]).padding([0, 1, 1]);
    assert_eq!(cost_per_pair(&large, 4), f64::INFINITY);
}
