//! Rows of the registry for products of few rows with a weight that is not packed: those that are one pass over the weight, and
//! those whose operands change places. Each runs its kernel itself, whatever [`gemm`](super::gemm::gemm) would choose.

use super::KernelError;
use super::bench::{Bench, Run};
use super::gemm_kernel::{Form, Kernel, kernels};
use super::gemm_store::StoreEpilogue;
use super::gemm_swapped::{gemm_swapped_with, swapped_bytes};
#[cfg(target_arch = "x86_64")]
use super::gemv::gemv;
use super::pack::Matrix;
use super::verify::{Buffer, FLOATS, chain, compare, reference_gemm, suffix};
use crate::dtype::DType;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::registry::{Family, Row};

/// A way to multiply a few rows with a weight as it lies.
#[derive(Clone, Copy)]
enum Way {
    /// A row of the weight at a time: [`gemv`].
    #[cfg(target_arch = "x86_64")]
    Dots,
    /// Rows of the weight in the place of columns, by that micro-kernel: [`gemm_swapped_with`].
    Swapped(&'static Kernel),
}

impl Way {
    /// Sizes that meet every edge: one of each, parts of tiles, blocks and vectors, and several of them.
    fn sizes(self) -> &'static [(usize, usize, usize)] {
        match self {
            #[cfg(target_arch = "x86_64")]
            Way::Dots => &[(1, 1, 1), (1, 130, 64), (2, 67, 33), (3, 5, 300), (4, 64, 17), (4, 129, 1040), (2, 3, 15)],
            Way::Swapped(_) => &[
                (1, 1, 1),
                (5, 40, 17),
                (16, 300, 64),
                (33, 35, 40),
                (77, 530, 100),
                (400, 19, 30),
                (64, 64, 1024),
                (17, 290, 0),
            ],
        }
    }

    /// What it is measured on: embeddings of time steps and Flux's modulations, one image and two; projections of a text's tokens.
    fn layers(self) -> &'static [(usize, usize, usize)] {
        match self {
            #[cfg(target_arch = "x86_64")]
            Way::Dots => &[(1, 1280, 320), (2, 1280, 320), (1, 1280, 1280), (2, 1280, 1280), (1, 9216, 3072)],
            Way::Swapped(_) => &[(77, 320, 768), (77, 768, 768), (77, 3072, 768), (77, 768, 3072), (64, 1280, 1280)],
        }
    }

    /// Roundings of a sum of `k` products: sixteen lanes are sums of their own, which four additions bring together; the
    /// micro-kernels are those of [`gemm`](super::gemm).
    fn roundings(self, k: usize) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Way::Dots => k.div_ceil(16) + 4,
            Way::Swapped(kernel) => chain(k) + kernel.form.left_out(),
        }
    }

    /// Memory that it works in.
    fn work(self, m: usize, k: usize, dtype: DType) -> Buffer {
        let bytes = match self {
            #[cfg(target_arch = "x86_64")]
            Way::Dots => 0,
            Way::Swapped(kernel) => swapped_bytes(m, k, dtype, kernel.isa),
        };
        Buffer::zeroed(DType::U8, bytes)
    }

    /// Multiplies dense operands.
    ///
    /// # Safety
    /// `a` must hold `m x k` elements, `weight` `n x k`, and `store` have room for `m x n` results; `work` must be what
    /// [`Self::work`] makes for the type of `a`, and the processor have the instructions.
    unsafe fn run(
        self,
        pool: &Pool,
        (m, n, k): (usize, usize, usize),
        [a, weight]: [&Buffer; 2],
        work: &mut Buffer,
        store: &StoreEpilogue,
    ) -> Result<(), KernelError> {
        let [a, weight] = [a, weight].map(|buffer| Matrix::row_major(buffer.ptr(), buffer.dtype, k));
        // SAFETY: forwarded.
        unsafe {
            match self {
                #[cfg(target_arch = "x86_64")]
                Way::Dots => gemv(pool, (m, n, k), &a, &weight, store),
                Way::Swapped(kernel) => gemm_swapped_with(kernel, pool, (m, n, k), &a, &weight, work.ptr_mut(), store),
            }
        }
    }

    /// Compares it with the reference, operands of `a` and `b` both of a type; a weight of that type with rows of f32, too, where
    /// it widens.
    fn verify(self, dtype: DType) -> Result<(), String> {
        let lefts = match self {
            Way::Swapped(kernel) if kernel.form != Form::F32 => vec![dtype],
            _ if dtype == DType::F32 => vec![dtype],
            _ => vec![dtype, DType::F32],
        };
        for (&(m, n, k), left) in self.sizes().iter().flat_map(|sizes| lefts.iter().map(move |&left| (sizes, left))) {
            let (a, b) = (Buffer::random(left, m * k, 1), Buffer::random(dtype, n * k, 2));
            let references = reference_gemm(&a, &b, &[], (m, n, k));
            for threads in [1, 3] {
                let (mut c, mut work) = (Buffer::random(DType::F32, m * n, 3), self.work(m, k, left));
                let store = StoreEpilogue::new(c.ptr_mut(), DType::F32, n as isize);
                // SAFETY: dense buffers of the sizes named; rows are verified where they are available.
                let outcome = unsafe { self.run(&Pool::new(threads), (m, n, k), [&a, &b], &mut work, &store) };
                outcome.map_err(|error| error.to_string())?;
                let what = format!("{left:?} x {dtype:?}, {m}x{n}x{k}");
                compare(&what, &c, &references, self.roundings(k))?;
            }
        }
        Ok(())
    }

    fn benches(self, dtype: DType) -> Vec<Bench> {
        let bench = |&(m, n, k): &(usize, usize, usize)| Bench {
            op: "linear",
            sizes: vec![("m", m), ("n", n), ("k", k)],
            flops: 2.0 * (m * n * k) as f64,
            bytes: ((m * n + m * k + n * k) * dtype.size_bytes()) as f64,
            start: Box::new(move || {
                let [a, weight, bias] =
                    [(m * k, 1), (n * k, 2), (n, 3)].map(|(len, seed)| Buffer::random(dtype, len, seed));
                let (mut c, mut work) = (Buffer::zeroed(dtype, m * n), self.work(m, k, dtype));
                Ok(Box::new(move || {
                    let store = StoreEpilogue::new(c.ptr_mut(), dtype, n as isize).with_bias(bias.ptr(), dtype);
                    // SAFETY: dense buffers of the sizes named; what is measured is available.
                    unsafe { self.run(Pool::global(), (m, n, k), [&a, &weight], &mut work, &store) }
                }) as Run)
            }),
        };
        self.layers().iter().map(bench).collect()
    }
}

/// Both ways, for every type and micro-kernel.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    #[cfg(target_arch = "x86_64")]
    for dtype in FLOATS {
        let name = format!("gemv_{}_4x4__avx512", suffix(dtype));
        rows.push(row(Way::Dots, name, Isa::Avx512, dtype, Box::new(|| Isa::Avx512.is_available())));
    }
    for kernel in kernels().into_iter().filter(|kernel| kernel.form != Form::Int8Quads) {
        for dtype in FLOATS.into_iter().filter(|&dtype| kernel.reads(dtype)) {
            let name = kernel.row_name(Family::Gemm, dtype).replacen("gemm_", "gemm_swapped_", 1);
            rows.push(row(Way::Swapped(kernel), name, kernel.isa, dtype, Box::new(|| kernel.is_available())));
        }
    }
    rows
}

fn row(way: Way, name: String, isa: Isa, dtype: DType, is_available: Box<dyn Fn() -> bool>) -> Row {
    let what = name.clone();
    let verify = move || way.verify(dtype).map_err(|error| format!("{what}: {error}"));
    let family = Family::Gemm;
    Row { name, family, isa, dtype, is_available, verify: Box::new(verify), benches: way.benches(dtype) }
}
