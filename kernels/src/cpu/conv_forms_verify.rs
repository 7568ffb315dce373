//! Rows of the registry for the forms of convolution that [`conv`](super::conv::conv) takes where they suit: depthwise and in small
//! groups, to few channels, and with all taps at once. Each is run by itself.
//!
//! Winograd's form by points needs no row of its own here: it is what the rows `conv_winograd_*_amx_x3` run, always.

use super::KernelError;
use super::bench::{Bench, Run, conv_bench, conv_operands, convolutions, start_packed_conv};
use super::conv::{Call, Conv, PackedWeight, Weight, pack_conv_weight};
use super::conv_depthwise::{self, Depthwise};
use super::conv_few::{self, Few};
#[cfg(target_arch = "x86_64")]
use super::conv_taps::{self, Together};
use super::gemm_kernel::{Form, Kernel, kernels};
use super::gemm_store::StoreEpilogue;
use super::verify::{Buffer, FLOATS, compare, conv_cases, reference_conv, suffix};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::pool::Pool;
use crate::registry::{Family, Row};

/// A form of convolution.
#[derive(Clone, Copy)]
enum Way {
    /// Vectors of channels: [`conv_depthwise`].
    Depthwise,
    /// One product for all taps, and a sum over windows: [`conv_few`].
    Few,
    /// Tiles that add up all taps before they store sums: [`conv_taps`].
    #[cfg(target_arch = "x86_64")]
    Taps,
}

impl Way {
    /// Whether it computes a convolution, and [`conv`](super::conv::conv) takes it with that micro-kernel.
    fn suits(self, kernel: &'static Kernel, conv: &Conv, dtype: DType) -> bool {
        if conv.rows() * conv.out_channels == 0 {
            return false;
        }
        let is_grouped = conv_depthwise::suits(conv);
        match self {
            Way::Depthwise => is_grouped,
            Way::Few => !is_grouped && conv_few::suited(kernel, conv, dtype).is_some(),
            #[cfg(target_arch = "x86_64")]
            Way::Taps => !is_grouped && conv_taps::suits(kernel, conv, dtype, dtype),
        }
    }

    /// Convolutions that it was made for, and that meet every edge that [`conv_cases`] do not.
    fn own_cases(self) -> Vec<Conv> {
        match self {
            Way::Depthwise | Way::Few => Vec::new(),
            // Blocks of lines and of pixels, tiles of a few pixels, sets of columns, half a panel, chunks of channels, planes of taps,
            // groups, padding, dilation, images that are enlarged.
            #[cfg(target_arch = "x86_64")]
            Way::Taps => vec![
                Conv::new_2d(2, [9, 37], 96, 40, [3, 3]).padding([0, 1, 1]),
                Conv::new_2d(1, [40, 20], 64, 32, [3, 3]).padding([0, 1, 1]),
                Conv::new_2d(1, [3, 100], 32, 230, [3, 3]).padding([0, 1, 1]),
                Conv::new_2d(1, [7, 30], 192, 70, [2, 5]).groups(2).padding([0, 2, 4]).dilation([1, 2, 2]),
                Conv::new_2d(1, [1, 50], 160, 33, [1, 3]),
                Conv::new_2d(1, [6, 9], 32, 48, [3, 3]).upsample([1, 2, 2]).padding([0, 1, 1]),
                Conv::new_3d(1, [3, 6, 20], 32, 33, [3, 3, 3]).padding([1, 1, 1]),
            ],
        }
    }

    /// Convolves.
    ///
    /// # Safety
    /// As [`conv_with`](super::conv::conv_with); the form must suit the convolution.
    unsafe fn run(
        self,
        kernel: &'static Kernel,
        pool: &Pool,
        (conv, x, dtype): (&Conv, *const u8, DType),
        weight: &PackedWeight,
        epilogue: &dyn Epilogue,
    ) -> Result<(), KernelError> {
        let call = Call { kernel, conv, x, dtype, weight };
        // SAFETY: forwarded.
        unsafe {
            match self {
                Way::Depthwise => Depthwise { isa: kernel.isa, conv, x, dtype, weight }.run(pool, epilogue),
                Way::Few => Few::new(call, pool.threads()).run(pool, epilogue),
                #[cfg(target_arch = "x86_64")]
                Way::Taps => Together::new(call, pool.threads()).run(pool, epilogue),
            }
        }
    }

    /// Compares it with the reference: a sum has as many additions as terms at most, in any order.
    fn verify(self, kernel: &'static Kernel, dtype: DType) -> Result<(), String> {
        let (own, mut cases) = (self.own_cases(), conv_cases());
        if let Some(shape) = own.iter().find(|shape| !self.suits(kernel, shape, dtype)) {
            return Err(format!("{shape:?} does not suit it"));
        }
        cases.retain(|shape| self.suits(kernel, shape, dtype));
        cases.extend(own);
        if cases.is_empty() {
            return Err("no convolution suits it".to_owned());
        }
        for shape in &cases {
            let [x, w, _, _] = conv_operands(shape, dtype);
            let references = reference_conv(shape, &x, &w);
            for threads in [1, 3] {
                let pool = Pool::new(threads);
                let mut y = Buffer::random(DType::F32, shape.rows() * shape.out_channels, 3);
                let mut memory = Buffer::zeroed(DType::U8, shape.packed_bytes(dtype, kernel.isa));
                let store = StoreEpilogue::new(y.ptr_mut(), DType::F32, shape.out_channels as isize);
                // SAFETY: dense buffers of the sizes that `shape` says; the form suits it.
                let outcome = unsafe {
                    let weight = Weight::contiguous(w.ptr(), dtype, shape);
                    let packed = pack_conv_weight(&pool, kernel.isa, shape, &weight, memory.ptr_mut());
                    self.run(kernel, &pool, (shape, x.ptr(), dtype), &packed, &store)
                };
                outcome.map_err(|error| error.to_string())?;
                compare(&format!("{shape:?}"), &y, &references, shape.terms())?;
            }
        }
        Ok(())
    }

    /// The layers of models that it suits.
    fn benches(self, kernel: &'static Kernel, dtype: DType) -> Vec<Bench> {
        let layers = convolutions().into_iter().filter(|shape| self.suits(kernel, shape, dtype));
        layers.map(|shape| conv_bench(shape, dtype, move || self.start(kernel, dtype, shape))).collect()
    }

    fn start(self, kernel: &'static Kernel, dtype: DType, shape: Conv) -> Result<Run, KernelError> {
        start_packed_conv(kernel, dtype, shape, move |pool, x, weight, store| {
            // SAFETY: operands of the sizes that `shape` says; the weight was packed for it, and the form suits it.
            unsafe { self.run(kernel, pool, (&shape, x, dtype), weight, store) }
        })
    }

    fn row(self, name: String, kernel: &'static Kernel, dtype: DType) -> Row {
        let what = name.clone();
        Row {
            name,
            family: Family::Conv,
            isa: kernel.isa,
            dtype,
            is_available: Box::new(|| kernel.is_available()),
            verify: Box::new(move || self.verify(kernel, dtype).map_err(|error| format!("{what}: {error}"))),
            benches: self.benches(kernel, dtype),
        }
    }
}

/// Whether a convolution with that micro-kernel is one of these forms, and measured as such.
pub(super) fn has_form(kernel: &'static Kernel, conv: &Conv, dtype: DType) -> bool {
    ways().any(|way| way.suits(kernel, conv, dtype))
}

fn ways() -> impl Iterator<Item = Way> {
    [
        Way::Depthwise,
        Way::Few,
        #[cfg(target_arch = "x86_64")]
        Way::Taps,
    ]
    .into_iter()
}

/// A row for each form, type and level; of all taps at once for each micro-kernel that has such tiles.
pub fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for kernel in kernels().into_iter().filter(|kernel| kernel.form == Form::F32) {
        for dtype in FLOATS {
            // What multiplies is no micro-kernel: that of f32 stands for its level.
            let depthwise = format!("conv_depthwise_{}_c256__{}", suffix(dtype), kernel.isa.name());
            rows.push(Way::Depthwise.row(depthwise, kernel, dtype));
            let few = kernel.row_name(Family::Conv, dtype).replacen("conv_", "conv_few_", 1);
            rows.push(Way::Few.row(few, kernel, dtype));
        }
    }
    #[cfg(target_arch = "x86_64")]
    for kernel in kernels().into_iter().filter(|kernel| kernel.adds_taps()) {
        let dtype = kernel.form.dtype();
        let name = kernel.row_name(Family::Conv, dtype).replacen("conv_", "conv_taps_", 1);
        rows.push(Way::Taps.row(name, kernel, dtype));
    }
    rows
}
