//! Attention against f64 loops, and the exponentials of its scores.

use oxidiff_kernels::cpu::attention::*;
use oxidiff_kernels::cpu::math::{exp2_nonpositive, exp2_nonpositive_rough};
use oxidiff_kernels::cpu::simd::Simd;
use oxidiff_kernels::dtype::DType;
use oxidiff_kernels::isa::Isa;
use oxidiff_kernels::pool::Pool;
use oxidiff_kernels::simd_dispatch;

fn isas() -> impl Iterator<Item = Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.is_available())
}

/// Deterministic values in -1.5..1.5, encoded.
fn values(dtype: DType, n: usize, seed: u64) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(seed) + 1;
    (0..n)
        .flat_map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let x = ((state >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 3.0;
            match dtype {
                DType::F16 => half::f16::from_f32(x).to_le_bytes().to_vec(),
                DType::BF16 => half::bf16::from_f32(x).to_le_bytes().to_vec(),
                DType::Bool => vec![(x > -0.5) as u8],
                _ => x.to_le_bytes().to_vec(),
            }
        })
        .collect()
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F16 => bytes.chunks(2).map(|c| half::f16::from_le_bytes(c.try_into().unwrap()).to_f32()).collect(),
        DType::BF16 => bytes.chunks(2).map(|c| half::bf16::from_le_bytes(c.try_into().unwrap()).to_f32()).collect(),
        _ => bytes.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect(),
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    sizes: [usize; 5],
    kv_heads: usize,
    dim_v: usize,
    dtype: DType,
    causal: bool,
    mask: Option<(DType, [bool; 4])>,
    /// Whether operands are `[batch, position, head, dim]` in memory.
    interleaved: bool,
}

impl Case {
    fn new(batch: usize, heads: usize, seq_q: usize, seq_k: usize, dim: usize) -> Case {
        Case {
            sizes: [batch, heads, seq_q, seq_k, dim],
            kv_heads: heads,
            dim_v: dim,
            dtype: DType::F32,
            causal: false,
            mask: None,
            interleaved: true,
        }
    }

    fn check(self) {
        let [batch, heads, seq_q, seq_k, dim] = self.sizes;
        let size = self.dtype.size_bytes();
        let strides = |h: usize, n: usize, d: usize| match self.interleaved {
            true => [(h * n * d) as isize, d as isize, (h * d) as isize, 1],
            // Dim outermost within a head: no stride is 1 there.
            false => [(h * n * d) as isize, (n * d) as isize, 1, n as isize],
        };
        let mut data = [
            values(self.dtype, batch * heads * seq_q * dim, 1),
            values(self.dtype, batch * self.kv_heads * seq_k * dim, 2),
            values(self.dtype, batch * self.kv_heads * seq_k * self.dim_v, 3),
        ];
        let mask_sizes = [batch, heads, seq_q, seq_k];
        let mut mask_data = vec![];
        let mask = self.mask.map(|(dtype, kept)| {
            let (mut strides, mut step) = ([0isize; 4], 1);
            for d in (0..4).rev().filter(|&d| kept[d]) {
                strides[d] = step;
                step *= mask_sizes[d] as isize;
            }
            mask_data = values(dtype, step as usize, 4);
            Mask { ptr: mask_data.as_ptr(), dtype, strides }
        });
        let n = batch * heads * seq_q * self.dim_v;
        let mut expected = vec![0u8; n * 4];
        let [q, k, v] = &mut data;
        let heads_of = |data: &mut Vec<u8>, dtype, strides| Heads { ptr: data.as_mut_ptr(), dtype, strides };
        let mut a = Attention {
            batch,
            heads,
            kv_heads: self.kv_heads,
            seq_q,
            seq_k,
            dim,
            dim_v: self.dim_v,
            scale: 1.0 / (dim as f32).sqrt(),
            causal: self.causal,
            q: heads_of(q, self.dtype, strides(heads, seq_q, dim)),
            k: heads_of(k, self.dtype, strides(self.kv_heads, seq_k, dim)),
            v: heads_of(v, self.dtype, strides(self.kv_heads, seq_k, self.dim_v)),
            mask,
            out: heads_of(&mut expected, DType::F32, strides(heads, seq_q, self.dim_v)),
        };
        // SAFETY: the buffers hold the sizes.
        unsafe { attention_reference(&a) };
        let expected = decode(DType::F32, &expected);
        // f32 dot products of `dim` terms below 2.25 shift a score by at most dim * 2.25 * scale * 2^-24 or so, which is
        // a relative error of the weights; results are averages of values below 1.5. 16-bit results are rounded.
        let rounding = match self.dtype {
            DType::BF16 => 1.5 / 256.0,
            DType::F16 => 1.5 / 2048.0,
            _ => 0.0,
        };
        let bound = 1.5 * (2.25 * (dim as f32).sqrt() * 6e-8 * 2.0 + 1e-6) + rounding;
        for isa in isas() {
            let mut out = vec![0u8; n * size];
            a.out = Heads { ptr: out.as_mut_ptr(), dtype: self.dtype, ..a.out };
            // SAFETY: the buffers hold the sizes.
            unsafe { attention(&Pool::new(2), isa, &a) }.unwrap();
            for (i, (x, e)) in decode(self.dtype, &out).iter().zip(&expected).enumerate() {
                assert!((x - e).abs() <= bound, "{self:?} {}: element {i} is {x}, not {e}", isa.name());
            }
        }
    }
}

/// The pool may get more threads between when scratch memory is measured out and when it is used.
#[test]
fn scratch_memory_of_fewer_threads_does() {
    let [heads, seq_q, seq_k, dim] = [4, 24, 4500, 64];
    let mut data =
        [(seq_q, 1), (seq_k, 2), (seq_k, 3)].map(|(rows, seed)| values(DType::F32, heads * rows * dim, seed));
    let [q, k, v] = &mut data;
    let heads_of = |data: &mut Vec<u8>, rows: usize| Heads {
        ptr: data.as_mut_ptr(),
        dtype: DType::F32,
        strides: [(heads * rows * dim) as isize, (rows * dim) as isize, dim as isize, 1],
    };
    let [mut expected, mut out] = [(); 2].map(|()| vec![0u8; heads * seq_q * dim * 4]);
    let mut a = Attention {
        batch: 1,
        heads,
        kv_heads: heads,
        seq_q,
        seq_k,
        dim,
        dim_v: dim,
        scale: 0.125,
        causal: false,
        q: heads_of(q, seq_q),
        k: heads_of(k, seq_k),
        v: heads_of(v, seq_k),
        mask: None,
        out: heads_of(&mut expected, seq_q),
    };
    for isa in isas() {
        let bytes = scratch_bytes(&Pool::new(1), isa, &a);
        assert!(bytes < scratch_bytes(&Pool::new(4), isa, &a), "a case in which it matters");
        let mut scratch = vec![0xa5u8; bytes + 4096];
        a.out = heads_of(&mut expected, seq_q);
        // SAFETY: the buffers hold the sizes.
        unsafe { attention(&Pool::new(4), isa, &a) }.unwrap();
        a.out = heads_of(&mut out, seq_q);
        // SAFETY: as above; the scratch memory has more than these bytes.
        unsafe { attention_in(&Pool::new(4), isa, &a, (scratch.as_mut_ptr(), bytes)) }.unwrap();
        assert!(scratch[bytes..].iter().all(|&byte| byte == 0xa5), "written beside it");
        assert_eq!(decode(DType::F32, &out), decode(DType::F32, &expected));
        // SAFETY: as above.
        let none = unsafe { attention_in(&Pool::new(4), isa, &a, (scratch.as_mut_ptr(), 64)) };
        assert!(none.is_err(), "room for no head");
    }
}

#[test]
fn head_sizes_and_lengths() {
    for dim in [1, 8, 20, 40, 64, 72, 80, 96, 128, 160, 200, 512] {
        Case::new(1, 2, 50, 77, dim).check();
        Case::new(1, 2, 2, 77, dim).check();
    }
    for (seq_q, seq_k) in
        [(1, 1), (1, 300), (23, 16), (24, 17), (25, 32), (100, 33), (7, 513), (300, 256), (64, 700), (2, 600)]
    {
        Case::new(2, 3, seq_q, seq_k, 40).check();
    }
    Case::new(1, 1, 30, 600, 512).check();
    Case { dim_v: 24, ..Case::new(1, 2, 30, 90, 64) }.check();
    Case { dim_v: 130, ..Case::new(1, 2, 30, 90, 16) }.check();
    Case { dim_v: 2, dtype: DType::BF16, ..Case::new(1, 1, 30, 91, 16) }.check();
}

#[test]
fn types_and_layouts() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for interleaved in [true, false] {
            Case { dtype, interleaved, ..Case::new(2, 2, 40, 100, 40) }.check();
            Case { dtype, interleaved, ..Case::new(1, 1, 26, 40, 33) }.check();
            Case { dtype, interleaved, ..Case::new(2, 2, 2, 300, 67) }.check();
        }
    }
}

#[test]
fn pairs_of_any_width() {
    for dim in [33, 37, 40, 41, 72, 104] {
        for (seq_q, seq_k) in [(50, 77), (7, 513), (25, 32), (300, 256)] {
            for causal in [false, true] {
                Case { dtype: DType::BF16, causal, ..Case::new(1, 2, seq_q, seq_k, dim) }.check();
            }
        }
    }
}

#[test]
fn grouped_queries() {
    Case { kv_heads: 2, ..Case::new(2, 6, 30, 70, 32) }.check();
    Case { kv_heads: 1, causal: true, ..Case::new(1, 4, 90, 90, 32) }.check();
    Case { kv_heads: 2, ..Case::new(2, 6, 2, 70, 32) }.check();
}

#[test]
fn causal_in_the_top_left_sense() {
    for (seq_q, seq_k) in [(77, 77), (5, 300), (600, 100), (300, 300), (1, 9), (2, 9)] {
        Case { causal: true, ..Case::new(1, 2, seq_q, seq_k, 16) }.check();
    }
}

#[test]
fn masks_of_every_type_and_shape() {
    for dtype in [DType::Bool, DType::F32, DType::BF16, DType::F16] {
        for kept in
            [[true; 4], [true, false, false, true], [false, false, true, true], [false, true, true, false], [false; 4]]
        {
            Case { mask: Some((dtype, kept)), ..Case::new(2, 2, 30, 290, 16) }.check();
            Case { mask: Some((dtype, kept)), ..Case::new(2, 2, 2, 290, 16) }.check();
        }
    }
    Case { causal: true, mask: Some((DType::F32, [true; 4])), ..Case::new(1, 2, 50, 50, 16) }.check();
}

fn tiny(q: &mut [f32], k: &mut [f32], out: &mut [f32], mask: Option<Mask>) -> Attention {
    let (n, m) = (q.len() / 4, k.len() / 4);
    let heads = |p: &mut [f32], n: usize| Heads {
        ptr: p.as_mut_ptr().cast(),
        dtype: DType::F32,
        strides: [(n * 4) as isize, (n * 4) as isize, 4, 1],
    };
    Attention {
        batch: 1,
        heads: 1,
        kv_heads: 1,
        seq_q: n,
        seq_k: m,
        dim: 4,
        dim_v: 4,
        scale: 1.0,
        causal: false,
        q: heads(q, n),
        k: heads(k, m),
        v: heads(k, m),
        mask,
        out: heads(out, n),
    }
}

#[test]
fn nothing_to_attend_to_gives_zeros() {
    // Two queries are worked on one at a time, three as a group.
    for (isa, queries) in isas().flat_map(|isa| [(isa, 2), (isa, 3)]) {
        let (mut q, mut k) = (vec![0.5f32; 4 * queries], [0.25f32; 20]);
        let mut out = vec![9f32; 4 * queries];
        let infinite = [f32::NEG_INFINITY; 5];
        let mask = Mask { ptr: infinite.as_ptr().cast(), dtype: DType::F32, strides: [0, 0, 0, 1] };
        // SAFETY: the buffers hold the sizes.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut k, &mut out, Some(mask))) }.unwrap();
        assert_eq!(out, vec![0.0; 4 * queries]);
        out.fill(9.0);
        let row = [1u8, 0, 0];
        let mask = Mask { ptr: row.as_ptr(), dtype: DType::Bool, strides: [0, 0, 1, 0] };
        // SAFETY: as above.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut k, &mut out, Some(mask))) }.unwrap();
        assert_eq!((out[0], out[4], out[4 * queries - 1]), (0.25, 0.0, 0.0));
        out.fill(9.0);
        // SAFETY: as above.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut [], &mut out, None)) }.unwrap();
        assert_eq!(out, vec![0.0; 4 * queries]);
    }
}

/// Masks of text that is padded on the left, and causal, hide whole rows by the lowest number there is.
#[test]
fn rows_hidden_by_the_lowest_number_attend_to_all_keys_alike() {
    for (isa, queries) in isas().flat_map(|isa| [(isa, 2), (isa, 3), (isa, 40)]) {
        let mut q = vec![0.5f32; 4 * queries];
        let mut k: Vec<f32> = (0..5 * 40).flat_map(|key| [key as f32 / 100.0; 4]).collect();
        let mut out = vec![9f32; 4 * queries];
        let lowest = vec![f32::MIN; 200];
        let mask = Mask { ptr: lowest.as_ptr().cast(), dtype: DType::F32, strides: [0, 0, 0, 1] };
        // SAFETY: the buffers hold the sizes.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut k, &mut out, Some(mask))) }.unwrap();
        assert!(out.iter().all(|x| (x - 0.995).abs() < 1e-5), "{isa:?} {queries}: {out:?}");
        // All but the last are hidden.
        let mask = [lowest[..199].to_vec(), vec![0.0]].concat();
        let mask = Mask { ptr: mask.as_ptr().cast(), dtype: DType::F32, strides: [0, 0, 0, 1] };
        // SAFETY: as above.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut k, &mut out, Some(mask))) }.unwrap();
        assert!(out.iter().all(|&x| x == 1.99), "{isa:?} {queries}: {out:?}");
        let highest = [[f32::MAX].repeat(199), vec![f32::INFINITY]].concat();
        let mask = Mask { ptr: highest.as_ptr().cast(), dtype: DType::F32, strides: [0, 0, 0, 1] };
        // SAFETY: as above.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut k, &mut out, Some(mask))) }.unwrap();
        assert!(out.iter().all(|x| x.is_nan()), "infinity less infinity: {out:?}");
    }
}

#[test]
fn nan_and_infinity_stay_in_their_rows() {
    for (isa, queries) in isas().flat_map(|isa| [(isa, 2), (isa, 3)]) {
        let (mut q, mut k) = (vec![0.5f32; 4 * queries], [0.25f32; 20]);
        for (query, bad) in (1..queries).zip([f32::NAN, f32::INFINITY]) {
            q[4 * query] = bad;
        }
        let mut out = vec![9f32; 4 * queries];
        // SAFETY: the buffers hold the sizes.
        unsafe { attention(&Pool::new(1), isa, &tiny(&mut q, &mut k, &mut out, None)) }.unwrap();
        assert_eq!(out[..4], [0.25; 4]);
        assert!(out[4..].iter().all(|x| x.is_nan()), "{out:?}");
    }
}

/// A key that is not a number spoils what sees it, and a value that is infinite what weighs it.
#[test]
fn nan_and_infinity_among_keys() {
    for (isa, queries) in isas().flat_map(|isa| [(isa, 2), (isa, 3), (isa, 40)]) {
        let mut q = vec![0.5f32; 4 * queries];
        for bad in [f32::NAN, f32::NEG_INFINITY] {
            let mut k = vec![0.25f32; 4 * 300];
            k[4 * 299] = bad;
            let mut out = vec![9f32; 4 * queries];
            let a = tiny(&mut q, &mut k, &mut out, None);
            // SAFETY: the buffers hold the sizes.
            unsafe { attention(&Pool::new(1), isa, &a) }.unwrap();
            assert!(out.iter().step_by(4).all(|x| x.is_nan()), "{} {bad}: {out:?}", isa.name());
            let mut out = vec![9f32; 4 * queries];
            let a = Attention { causal: true, ..tiny(&mut q, &mut k, &mut out, None) };
            // SAFETY: as above.
            unsafe { attention(&Pool::new(1), isa, &a) }.unwrap();
            assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-6), "{} {bad}: {out:?}", isa.name());
        }
    }
}

#[test]
fn impossible_descriptions_are_refused() {
    let (mut q, mut k, mut out) = ([0.5f32; 12], [0.25f32; 20], [9f32; 12]);
    let good = tiny(&mut q, &mut k, &mut out, None);
    let int = Attention { q: Heads { dtype: DType::I32, ..good.q }, ..good };
    for a in [
        Attention { kv_heads: 0, ..good },
        Attention { heads: 3, kv_heads: 2, ..good },
        Attention { dim: 513, ..good },
        int,
    ] {
        // SAFETY: refused before any access.
        assert!(unsafe { attention(&Pool::new(1), Isa::detect(), &a) }.is_err());
    }
    // SAFETY: no queries.
    unsafe { attention(&Pool::new(1), Isa::detect(), &Attention { seq_q: 0, ..good }) }.unwrap();
    assert_eq!(out, [9.0; 12]);
}

simd_dispatch! {
    /// The exponentials of sixteen numbers: the exact one, then the rough one.
    unsafe fn exponentials(x: &[f32; 16], to: &mut [[f32; 16]; 2]) = exponentials_of
}

#[inline(always)]
unsafe fn exponentials_of<S: Simd>(s: S, x: &[f32; 16], to: &mut [[f32; 16]; 2]) {
    for at in (0..16).step_by(S::LANES) {
        // SAFETY: a vector of each array.
        unsafe {
            let v = s.load(x.as_ptr().add(at));
            s.store(to[0].as_mut_ptr().add(at), exp2_nonpositive(s, v));
            s.store(to[1].as_mut_ptr().add(at), exp2_nonpositive_rough(s, v));
        }
    }
}

/// Relative error below 0, where the arithmetic of the fits rounds too.
const BOUNDS: [f64; 2] = [2.0e-7, 8.0e-5];

#[test]
fn exponentials_below_zero() {
    for isa in isas() {
        for step in 0..40_000 {
            let x: [f32; 16] = std::array::from_fn(|i| -((step * 16 + i) as f32) * (125.0 / 640_000.0));
            let mut got = [[0.0; 16]; 2];
            // SAFETY: the arrays are sixteen long.
            unsafe { exponentials(isa, &x, &mut got) };
            for (i, (row, bound)) in got.iter().zip(BOUNDS).flat_map(|(r, b)| r.iter().map(move |y| (y, b))).enumerate()
            {
                let want = f64::from(x[i % 16]).exp2();
                let error = (f64::from(*row) - want).abs() / want;
                assert!(error <= bound, "2^{} on {}: {row}, off by {error:e}", x[i % 16], isa.name());
            }
        }
        let special = [0.0, -0.0, f32::NEG_INFINITY, f32::MIN, -200.0, -1e10, f32::NAN, -127.5];
        let x: [f32; 16] = std::array::from_fn(|i| special[i % 8]);
        let mut got = [[0.0; 16]; 2];
        // SAFETY: as above.
        unsafe { exponentials(isa, &x, &mut got) };
        assert_eq!(got[0][..2], [1.0, 1.0], "{}", isa.name());
        for row in got {
            assert_eq!(row[2..6], [0.0; 4], "{}", isa.name());
            assert!(row[6].is_nan() && row[7] >= 0.0 && row[7] <= 2f32.powi(-127), "{}: {row:?}", isa.name());
        }
    }
}
