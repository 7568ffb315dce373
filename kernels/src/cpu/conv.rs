//! Convolutions over channels-last images as implicit matrix products.
//!
//! ```text
//! out[pixel, oc] = epilogue(sum over (kd, kh, kw, ic) of x[pixel's window at (kd, kh, kw), ic] * w[oc, ic, kd, kh, kw])
//! ```
//!
//! A *row* of the product is an output pixel `(batch, depth, height, width)`, flattened; a *term* is one input channel of
//! one tap. No image-to-column matrix exists: each task copies the rows and terms of its own block into L2 scratch, where
//! the padding is written as zeros and 16-bit elements are widened. A copy costs about a quarter of a cycle a vector and
//! serves every output channel of the block. A convolution with kernel 1, stride 1 and no padding over a dense image reads
//! its input in place.
//!
//! How to call: fill a [`Conv`], pack the weight once with [`pack_conv_weight`], call [`conv`]:
//!
//! ```
//! use oxidiff_kernels::cpu::conv::{Conv, Weight, conv, pack_conv_weight};
//! use oxidiff_kernels::cpu::gemm_store::StoreEpilogue;
//! use oxidiff_kernels::{dtype::DType, isa::Isa, pool::Pool};
//!
//! let (pool, isa) = (Pool::global(), Isa::detect());
//! let shape = Conv::new_2d(2, [8, 8], 4, 6, [3, 3]).padding([0, 1, 1]); // batch, height x width, channels in, out
//! let (x, w, mut y) = (vec![1f32; 2 * 8 * 8 * 4], vec![1f32; 6 * 4 * 9], vec![0f32; shape.rows() * 6]);
//! let weight = Weight::contiguous(w.as_ptr().cast(), DType::F32, &shape);
//! let mut memory = vec![0u8; shape.packed_bytes(DType::F32, isa)];
//! // SAFETY: the buffers have the sizes that `shape` says.
//! unsafe {
//!     let packed = pack_conv_weight(pool, isa, &shape, &weight, memory.as_mut_ptr());
//!     let out = StoreEpilogue::new(y.as_mut_ptr().cast(), DType::F32, 6);
//!     conv(pool, isa, &shape, x.as_ptr().cast(), DType::F32, &packed, &out).unwrap();
//! }
//! assert_eq!((y[0], y[6 * 9]), (16.0, 36.0));
//! ```

use super::KernelError;
use super::conv_depthwise::{self, Depthwise};
use super::conv_direct::{self, Direct};
use super::conv_few::{self, Few};
#[cfg(target_arch = "x86_64")]
use super::conv_taps::{self, Together};
use super::gemm::{MAX_SPLIT_TERMS, check_dtypes};
use super::gemm_driver::{ASource, BSource, Problem, run};
use super::gemm_kernel::{CopyRow, Form, Kernel, copy_row, panel_width, select, split_panel, spread_rows};
use super::gemm_split;
use super::pack::{Matrix, SendMut, bytes_in, elements_per_unit, pack_panel, units, units_in, width_at};
use crate::dtype::DType;
use crate::epilogue::Epilogue;
use crate::isa::Isa;
use crate::pool::Pool;

/// A convolution's sizes. Spatial arrays are (depth, height, width); a 2-D convolution has depth 1 throughout, a 1-D one
/// also height 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conv {
    /// Images.
    pub batch: usize,
    /// Input size before `upsample`.
    pub input: [usize; 3],
    /// Input channels, of all groups.
    pub in_channels: usize,
    /// Output channels, of all groups.
    pub out_channels: usize,
    /// Groups; they divide both channel counts.
    pub groups: usize,
    /// Kernel size.
    pub kernel: [usize; 3],
    /// Output step.
    pub stride: [usize; 3],
    /// Zeros before the first element; what is needed after the last follows from `output`. Negative values crop.
    pub padding: [isize; 3],
    /// Distance between taps.
    pub dilation: [usize; 3],
    /// Output size.
    pub output: [usize; 3],
    /// The input is read as if it had been upsampled to the nearest by these whole factors.
    pub upsample: [usize; 3],
    /// Elements between images, planes, rows and pixels of the input; channels are contiguous.
    pub strides: [isize; 4],
}

impl Conv {
    /// A 2-D convolution over a dense NHWC image: stride 1, no padding, one group.
    pub fn new_2d(batch: usize, size: [usize; 2], in_channels: usize, out_channels: usize, kernel: [usize; 2]) -> Conv {
        Conv::new_3d(batch, [1, size[0], size[1]], in_channels, out_channels, [1, kernel[0], kernel[1]])
    }

    /// A 3-D convolution over a dense NDHWC image: stride 1, no padding, one group.
    pub fn new_3d(
        batch: usize,
        input: [usize; 3],
        in_channels: usize,
        out_channels: usize,
        kernel: [usize; 3],
    ) -> Conv {
        let [depth, height, width] = input.map(|size| size as isize);
        let pixel = in_channels as isize;
        let conv = Conv {
            batch,
            input,
            in_channels,
            out_channels,
            groups: 1,
            kernel,
            stride: [1; 3],
            padding: [0; 3],
            dilation: [1; 3],
            output: [0; 3],
            upsample: [1; 3],
            strides: [depth * height * width * pixel, height * width * pixel, width * pixel, pixel],
        };
        conv.with_symmetric_output()
    }

    /// With this padding on both sides.
    pub fn padding(self, padding: [isize; 3]) -> Conv {
        Conv { padding, ..self }.with_symmetric_output()
    }

    /// With this stride.
    pub fn stride(self, stride: [usize; 3]) -> Conv {
        Conv { stride, ..self }.with_symmetric_output()
    }

    /// With this dilation.
    pub fn dilation(self, dilation: [usize; 3]) -> Conv {
        Conv { dilation, ..self }.with_symmetric_output()
    }

    /// With this many groups.
    pub fn groups(self, groups: usize) -> Conv {
        Conv { groups, ..self }
    }

    /// Over the input upsampled to the nearest by whole factors.
    pub fn upsample(self, upsample: [usize; 3]) -> Conv {
        Conv { upsample, ..self }.with_symmetric_output()
    }

    /// The output size PyTorch gives for the same padding on both sides.
    fn with_symmetric_output(self) -> Conv {
        let mut output = [0; 3];
        for (axis, out) in output.iter_mut().enumerate() {
            let padded = (self.input[axis] * self.upsample[axis]) as isize + 2 * self.padding[axis];
            let window = (self.dilation[axis] * (self.kernel[axis].max(1) - 1) + 1) as isize;
            *out = if padded < window { 0 } else { (padded - window) as usize / self.stride[axis] + 1 };
        }
        Conv { output, ..self }
    }

    /// Rows of the product: output pixels of all images.
    pub fn rows(&self) -> usize {
        self.batch * self.output.iter().product::<usize>()
    }

    /// Terms of the product: channels of one group times taps.
    pub fn terms(&self) -> usize {
        self.group_in() * self.kernel.iter().product::<usize>()
    }

    /// Bytes that [`pack_conv_weight`] writes.
    pub fn packed_bytes(&self, dtype: DType, isa: Isa) -> usize {
        match conv_depthwise::suits(self) {
            true => conv_depthwise::packed_bytes(self, dtype),
            false => self.groups * self.group_bytes(dtype, isa),
        }
    }

    /// Bytes that [`pack_conv_weight_for`] writes for an input of `x`'s type.
    pub fn packed_bytes_for(&self, x: DType, dtype: DType, isa: Isa) -> usize {
        match form_of_parts(isa, self, x, dtype) {
            Some(form) => bytes_in(form.parts(), self.out_channels, self.terms(), dtype, isa),
            None => self.packed_bytes(dtype, isa),
        }
    }

    fn group_bytes(&self, dtype: DType, isa: Isa) -> usize {
        super::pack::packed_bytes(self.group_out(), self.terms(), dtype, isa).next_multiple_of(64)
    }

    fn group_in(&self) -> usize {
        self.in_channels / self.groups
    }

    fn group_out(&self) -> usize {
        self.out_channels / self.groups
    }

    fn check(&self) -> Result<(), KernelError> {
        if self.groups == 0
            || !self.in_channels.is_multiple_of(self.groups)
            || !self.out_channels.is_multiple_of(self.groups)
        {
            return Err(KernelError::Shape("groups must divide the channels"));
        }
        if self.stride.contains(&0) || self.dilation.contains(&0) || self.upsample.contains(&0) {
            return Err(KernelError::Shape("stride, dilation and upsample start at 1"));
        }
        Ok(())
    }

    /// Places along an axis that the windows of so many neighbouring outputs reach.
    pub(crate) fn reach(&self, axis: usize, outputs: usize) -> usize {
        (outputs - 1) * self.stride[axis] + (self.kernel[axis] - 1) * self.dilation[axis] + 1
    }

    /// The input plane that a plane of taps reads for an output plane, in upsampled coordinates; none if that is padding.
    pub(crate) fn plane(&self, depth: usize, tap: usize) -> Option<usize> {
        let at = (depth * self.stride[0] + tap * self.dilation[0]) as isize - self.padding[0];
        usize::try_from(at).ok().filter(|&at| at < self.input[0] * self.upsample[0])
    }

    /// Kernel 1, stride 1, no padding over rows of pixels at one distance: a plain matrix product.
    fn is_plain(&self) -> bool {
        let [_, depth, height, pixel] = self.strides;
        let [d, h, w] = self.output.map(|size| size as isize);
        self.kernel == [1; 3]
            && self.stride == [1; 3]
            && self.padding == [0; 3]
            && self.upsample == [1; 3]
            && self.output == self.input
            && (h == 1 || height == w * pixel)
            && (d == 1 || depth == h * w * pixel)
            && (self.batch == 1 || self.strides[0] == d * h * w * pixel)
            && pixel >= 0
    }
}

/// A weight `[out channels, in channels / groups, depth, height, width]` in memory, with strides in elements.
#[derive(Clone, Copy, Debug)]
pub struct Weight {
    /// First element.
    pub ptr: *const u8,
    /// Element type: f32, f16 or bf16.
    pub dtype: DType,
    /// Element strides in the order of the shape.
    pub strides: [isize; 5],
}

// SAFETY: a description of memory; whoever reads through it vouches for the access.
unsafe impl Sync for Weight {}

impl Weight {
    /// A weight in PyTorch's contiguous layout.
    pub fn contiguous(ptr: *const u8, dtype: DType, conv: &Conv) -> Weight {
        let [depth, height, width] = conv.kernel.map(|size| size as isize);
        let channel = depth * height * width;
        let strides = [channel * conv.group_in() as isize, channel, height * width, width, 1];
        Weight { ptr, dtype, strides }
    }
}

/// A packed weight; borrows its memory from the caller.
#[derive(Clone, Copy, Debug)]
pub struct PackedWeight {
    pub(crate) ptr: *const u8,
    pub(crate) dtype: DType,
    pub(crate) width: usize,
    /// Parts that elements are in, 0 for whole ones.
    pub(crate) parts: usize,
    pub(crate) group_bytes: usize,
    pub(crate) terms: usize,
    pub(crate) group_out: usize,
}

// SAFETY: read-only memory that the caller keeps alive.
unsafe impl Send for PackedWeight {}
// SAFETY: as above.
unsafe impl Sync for PackedWeight {}

impl PackedWeight {
    /// Describes memory that [`pack_conv_weight`] filled earlier for a convolution of the same channels, groups and kernel.
    pub fn from_raw(ptr: *const u8, dtype: DType, conv: &Conv, isa: Isa) -> PackedWeight {
        PackedWeight {
            ptr,
            dtype,
            width: panel_width(isa),
            parts: 0,
            group_bytes: conv.group_bytes(dtype, isa),
            terms: conv.terms(),
            group_out: conv.group_out(),
        }
    }

    /// Where terms from `k0` on lie of the panel that starts at column `n0` of a group.
    pub(crate) fn panel_at(&self, group: usize, n0: usize, k0: usize) -> *const u8 {
        let row = units_in(self.parts, k0, self.dtype) * width_at(self.group_out, n0, self.width);
        let offset = (n0 * units_in(self.parts, self.terms, self.dtype) + row) * 4;
        self.ptr.wrapping_add(group * self.group_bytes + offset)
    }
}

/// Packs a weight into panels, terms in the order (depth, height, width, channel); that of a depthwise convolution as
/// `[term][channel]`.
///
/// # Safety
/// `weight` must be readable for the shape that `conv` says, `dst` writable for [`Conv::packed_bytes`] bytes.
pub unsafe fn pack_conv_weight(pool: &Pool, isa: Isa, conv: &Conv, weight: &Weight, dst: *mut u8) -> PackedWeight {
    let isa = isa.clamp();
    let packed = PackedWeight::from_raw(dst, weight.dtype, conv, isa);
    if conv_depthwise::suits(conv) {
        // SAFETY: forwarded.
        unsafe { conv_depthwise::pack(pool, conv, weight, dst) };
        return packed;
    }
    let panels = conv.group_out().div_ceil(packed.width);
    let target = SendMut(dst);
    pool.run(conv.groups * panels, |task, _| {
        let (group, panel) = (task / panels, task % panels);
        let n0 = panel * packed.width;
        let panel_bytes = units(packed.terms, weight.dtype) * packed.width * 4;
        // SAFETY: panels are disjoint and inside `dst`; their source is inside the weight.
        unsafe {
            let panel = target.get().add(group * packed.group_bytes + panel * panel_bytes);
            pack_weight_panel(isa, conv, weight, group * packed.group_out, n0, packed.width, panel);
        }
    });
    packed
}

/// The form whose parts a weight is packed in for one convolution alone, if its kernel takes numbers apart and blocks of terms are
/// whole groups.
fn form_of_parts(isa: Isa, conv: &Conv, x: DType, weight: DType) -> Option<Form> {
    let kernel = select(isa, x, weight, (conv.rows(), conv.terms()));
    let is_whole = conv.groups == 1 && !conv_depthwise::suits(conv) && conv_few::suited(kernel, conv, weight).is_none();
    let is_cut = !is_direct(kernel, conv, weight) || conv.in_channels.is_multiple_of(gemm_split::GROUP);
    (kernel.form.parts() > 0 && is_whole && is_cut).then_some(kernel.form)
}

/// Whether [`pack_conv_weight_for`] packs other panels than [`pack_conv_weight`].
pub(super) fn packs_in_parts(isa: Isa, conv: &Conv, x: DType, weight: DType) -> bool {
    form_of_parts(isa, conv, x, weight).is_some()
}

/// Packs a weight for one convolution of an input of `x`'s type: as its kernel multiplies it where that takes numbers apart.
///
/// # Errors
/// [`KernelError`] when scratch memory runs out.
///
/// # Safety
/// As [`pack_conv_weight`]; `dst` must be writable for [`Conv::packed_bytes_for`].
pub unsafe fn pack_conv_weight_for(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    x: DType,
    weight: &Weight,
    dst: *mut u8,
) -> Result<PackedWeight, KernelError> {
    let isa = isa.clamp();
    let Some(form) = form_of_parts(isa, conv, x, weight.dtype) else {
        // SAFETY: forwarded.
        return Ok(unsafe { pack_conv_weight(pool, isa, conv, weight, dst) });
    };
    let packed = PackedWeight { parts: form.parts(), ..PackedWeight::from_raw(dst, weight.dtype, conv, isa) };
    let (outs, terms, nr) = (conv.out_channels, conv.terms(), packed.width);
    let whole_bytes = units(terms, weight.dtype) * nr * 4;
    let panel_bytes = units_in(packed.parts, terms, weight.dtype) * nr * 4;
    let target = SendMut(dst);
    pool.run_scratch(outs.div_ceil(nr), whole_bytes, |panel, worker| {
        let (n0, to) = (panel * nr, target.get().wrapping_add(panel * panel_bytes));
        // SAFETY: panels are disjoint and inside `dst`; scratch holds one that is whole.
        unsafe {
            pack_weight_panel(isa, conv, weight, 0, n0, nr, worker.scratch);
            split_panel(form, worker.scratch, terms, width_at(outs, n0, nr), to.cast());
        }
    })?;
    Ok(packed)
}

/// Packs the panel at column `n0` of a group.
///
/// # Safety
/// As [`pack_conv_weight`]; `dst` must hold the panel.
pub(crate) unsafe fn pack_weight_panel(
    isa: Isa,
    conv: &Conv,
    weight: &Weight,
    group0: usize,
    n0: usize,
    width: usize,
    dst: *mut u8,
) {
    let (outs, channels, terms) = (conv.group_out(), conv.group_in(), conv.terms());
    let [_, kh, kw] = conv.kernel;
    let taps: usize = conv.kernel.iter().product();
    let size = weight.dtype.size_bytes() as isize;
    let [oc_stride, ic_stride, kd_stride, kh_stride, kw_stride] = weight.strides;
    let first = weight.ptr.wrapping_byte_offset(group0 as isize * oc_stride * size);
    let across = |stride: isize, of: usize, channel: isize| of == 1 || stride == channel;
    let tap_strides = [kd_stride, kh_stride, kw_stride];
    let dense = |unit: isize| {
        let expected = [(kh * kw) as isize * unit, kw as isize * unit, unit];
        (0..3).all(|axis| across(tap_strides[axis], conv.kernel[axis], expected[axis]))
    };
    // SAFETY: every index lies inside the weight and the panel.
    unsafe {
        if across(ic_stride, channels, 1) && dense(channels as isize) {
            let matrix = Matrix { ptr: first, dtype: weight.dtype, row_stride: oc_stride, col_stride: 1 };
            return pack_panel(isa, &matrix, n0, outs, width, 0, terms, dst);
        }
        let (nr, width) = (width, width_at(outs, n0, width));
        let valid = width.min(outs - n0);
        let first = first.byte_offset(n0 as isize * oc_stride * size);
        let offset_of = |tap: usize| {
            let [kd, kh, kw] = [tap / (kh * kw), tap / kw % kh, tap % kw].map(|at| at as isize);
            kd * kd_stride + kh * kh_stride + kw * kw_stride
        };
        if across(ic_stride, channels, 1) && channels.is_multiple_of(elements_per_unit(weight.dtype)) {
            // A part of the channels of a channels-last weight.
            for tap in 0..taps {
                let ptr = first.wrapping_byte_offset(offset_of(tap) * size);
                let matrix = Matrix { ptr, dtype: weight.dtype, row_stride: oc_stride, col_stride: 1 };
                let dst = dst.add(units(tap * channels, weight.dtype) * width * 4);
                pack_panel(isa, &matrix, 0, valid, nr, 0, channels, dst);
            }
            return;
        }
        let sizes = [channels, taps];
        let is_spread = across(ic_stride, channels, taps as isize)
            && dense(1)
            && spread_rows(isa, weight.dtype, first, oc_stride * size, valid, sizes, dst.cast(), width);
        if !is_spread {
            dst.write_bytes(0, units(terms, weight.dtype) * width * 4);
            let per_unit = elements_per_unit(weight.dtype);
            for (tap, channel) in (0..taps).flat_map(|tap| (0..channels).map(move |channel| (tap, channel))) {
                let offset = offset_of(tap) + channel as isize * ic_stride;
                let k = tap * channels + channel;
                let row = dst.add(k / per_unit * width * 4 + k % per_unit * size as usize);
                for lane in 0..valid {
                    let from = first.byte_offset((offset + lane as isize * oc_stride) * size);
                    std::ptr::copy_nonoverlapping(from, row.add(lane * 4), size as usize);
                }
            }
        }
    }
}

/// A convolution of one call, as its forms take it.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub kernel: &'static Kernel,
    pub conv: &'a Conv,
    pub x: *const u8,
    pub dtype: DType,
    pub weight: &'a PackedWeight,
}

// SAFETY: a description of memory that is read only.
unsafe impl Sync for Call<'_> {}

/// A block of output pixels of one plane.
#[derive(Clone, Copy)]
pub(crate) struct Region {
    pub image: usize,
    pub depth: usize,
    pub row0: usize,
    pub rows: usize,
    pub pixel0: usize,
    pub pixels: usize,
}

impl Region {
    /// How many blocks of at most so many rows and columns a convolution has.
    pub(crate) fn count(conv: &Conv, [rows, columns]: [usize; 2]) -> usize {
        let [depth, height, width] = conv.output;
        conv.batch * depth * height.div_ceil(rows) * width.div_ceil(columns)
    }

    /// One of them.
    pub(crate) fn at(conv: &Conv, [rows, columns]: [usize; 2], index: usize) -> Region {
        let [depth, height, width] = conv.output;
        let across = width.div_ceil(columns);
        let per_plane = height.div_ceil(rows) * across;
        let (plane, block) = (index / per_plane, index % per_plane);
        let (row0, pixel0) = (block / across * rows, block % across * columns);
        Region {
            image: plane / depth,
            depth: plane % depth,
            row0,
            rows: rows.min(height - row0),
            pixel0,
            pixels: columns.min(width - pixel0),
        }
    }

    /// The row of the product that the first pixel of a line is.
    pub(crate) fn row(&self, conv: &Conv, line: usize) -> usize {
        let [depth, height, width] = conv.output;
        ((self.image * depth + self.depth) * height + self.row0 + line) * width + self.pixel0
    }
}

/// Columns of a group over a block of output pixels: what one task of a direct convolution computes.
#[derive(Clone, Copy)]
pub(crate) struct Task {
    pub group: usize,
    pub col0: usize,
    pub cols: usize,
    pub region: Region,
}

impl Task {
    /// Hands its sums on to `epilogue`; rows of them are `ld` apart.
    ///
    /// # Safety
    /// `c` must hold them, and `epilogue` accept the results of `conv`.
    pub(crate) unsafe fn hand_over(&self, conv: &Conv, c: *mut f32, ld: usize, epilogue: &dyn Epilogue) {
        let Region { rows, pixels, .. } = self.region;
        let (row, width) = (self.region.row(conv, 0), conv.output[2]);
        let col0 = self.group * conv.group_out() + self.col0;
        // SAFETY: forwarded; lines of the block.
        unsafe {
            if pixels == width {
                epilogue.apply(c, ld, row, col0, rows * pixels, self.cols);
                return;
            }
            for line in 0..rows {
                epilogue.apply(c.add(line * pixels * ld), ld, row + line * width, col0, pixels, self.cols);
            }
        }
    }
}

/// Convolves `x` and hands `conv.rows() x conv.out_channels` results to `epilogue`.
///
/// # Errors
/// [`KernelError`] for an element type other than f32, f16 and bf16, for contradicting sizes, or when scratch memory runs
/// out.
///
/// # Safety
/// `x` must be readable at every input position that `conv` describes, `weight` must hold the packed weight of `conv`, and
/// `epilogue` must accept the results.
pub unsafe fn conv(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &PackedWeight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    // SAFETY: forwarded.
    unsafe {
        conv_with(select(isa, dtype, weight.dtype, (conv.rows(), conv.terms())), pool, conv, x, dtype, weight, epilogue)
    }
}

/// [`conv`] with a given micro-kernel, which must be available and fit the element types.
///
/// # Errors
/// As [`conv`].
///
/// # Safety
/// As [`conv`].
pub unsafe fn conv_with(
    kernel: &'static Kernel,
    pool: &Pool,
    conv: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &PackedWeight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    conv.check()?;
    check_dtypes([dtype, weight.dtype])?;
    if (weight.terms, weight.group_out, weight.width) != (conv.terms(), conv.group_out(), kernel.nr) {
        return Err(KernelError::Shape("the weight was packed for another convolution or other instructions"));
    }
    if ![0, kernel.form.parts()].contains(&weight.parts) {
        return Err(KernelError::Shape("the weight was packed for another element type of the input"));
    }
    if conv.rows() == 0 || conv.out_channels == 0 {
        return Ok(());
    }
    if conv_depthwise::suits(conv) {
        let depthwise = Depthwise { isa: kernel.isa, conv, x, dtype, weight };
        // SAFETY: forwarded.
        return unsafe { depthwise.run(pool, epilogue) };
    }
    let call = Call { kernel, conv, x, dtype, weight };
    if let Some(kernel) = conv_few::suited(kernel, conv, weight.dtype) {
        // SAFETY: forwarded; the kernel's panels are as wide as those that the weight was packed for.
        return unsafe { Few::new(Call { kernel, ..call }, pool.threads()).run(pool, epilogue) };
    }
    #[cfg(target_arch = "x86_64")]
    if conv_taps::suits(kernel, conv, dtype, weight.dtype) {
        // SAFETY: forwarded.
        return unsafe { Together::new(call, pool.threads()).run(pool, epilogue) };
    }
    if !conv.is_plain() && conv_direct::suits(conv, weight.dtype) {
        // SAFETY: forwarded.
        return unsafe { Direct::new(call, pool.threads()).run(pool, epilogue) };
    }
    let source = Windows::new(kernel, conv, x, dtype);
    let problem = Problem {
        kernel,
        count: conv.groups,
        m: conv.rows(),
        n: conv.group_out(),
        k: conv.terms(),
        row_step: 0,
        col_step: conv.group_out(),
        a: &source,
        b: BSource::Packed { ptr: weight.ptr, dtype: weight.dtype, parts: weight.parts, stride: weight.group_bytes },
    };
    // SAFETY: the caller vouches for the operands and the epilogue.
    unsafe { run(pool, &problem, epilogue) }
}

/// Whether a convolution of `x` takes no longer with a weight as it lies ([`conv_unpacked`]) than with one that is packed for it
/// alone: there are few pixels, and enough output channels for `threads` threads. Only AMX multiplies so fast that what panels
/// take on their way through memory shows (bf16 and f16, 1280 channels: 0.76 to 0.92 of the time; by vectors 0.94 to 1.07).
pub fn packs_while_used(isa: Isa, conv: &Conv, x: DType, weight: DType, threads: usize) -> bool {
    let kernel = select(isa, x, weight, (conv.rows(), conv.terms()));
    kernel.is_amx()
        && conv.check().is_ok()
        && conv.groups == 1
        && conv.rows() * conv.out_channels > 0
        && is_direct(kernel, conv, weight)
        && conv_direct::blocks_of_pixels(conv) <= MOST_BLOCKS
        && conv.kernel.iter().product::<usize>() <= MOST_TAPS
        && conv.out_channels.div_ceil(LEAST_COLUMNS) >= threads
}

/// Blocks of pixels that are multiplied with panels that a task packs for itself, at most: their results share its L2.
const MOST_BLOCKS: usize = 4;
/// Taps at most: a task packs those of a few channels at a time.
const MOST_TAPS: usize = 49;
/// Columns of a task at least.
const LEAST_COLUMNS: usize = 64;

/// Whether a convolution with packed panels is what `conv_direct` computes.
pub(crate) fn is_direct(kernel: &'static Kernel, conv: &Conv, weight: DType) -> bool {
    !conv_depthwise::suits(conv)
        && conv_few::suited(kernel, conv, weight).is_none()
        && !conv.is_plain()
        && conv_direct::suits(conv, weight)
}

/// [`conv`] with a weight as it lies, where [`packs_while_used`].
///
/// # Errors
/// As [`conv`], and [`KernelError`] for any other convolution.
///
/// # Safety
/// As [`conv`]; `weight` must be readable for the shape that `conv` says.
pub unsafe fn conv_unpacked(
    pool: &Pool,
    isa: Isa,
    conv: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &Weight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    let kernel = select(isa, dtype, weight.dtype, (conv.rows(), conv.terms()));
    // SAFETY: forwarded.
    unsafe { conv_unpacked_with(kernel, pool, conv, x, dtype, weight, epilogue) }
}

/// [`conv_unpacked`] with a given micro-kernel, for any convolution that `conv_direct` computes.
///
/// # Safety
/// As there.
pub(crate) unsafe fn conv_unpacked_with(
    kernel: &'static Kernel,
    pool: &Pool,
    conv: &Conv,
    x: *const u8,
    dtype: DType,
    weight: &Weight,
    epilogue: &dyn Epilogue,
) -> Result<(), KernelError> {
    conv.check()?;
    check_dtypes([dtype, weight.dtype])?;
    if conv.groups != 1 || !is_direct(kernel, conv, weight.dtype) {
        return Err(KernelError::Shape("this convolution takes a packed weight"));
    }
    if conv.rows() == 0 || conv.out_channels == 0 {
        return Ok(());
    }
    // What panels would look like; there are none.
    let layout = PackedWeight::from_raw(std::ptr::null(), weight.dtype, conv, kernel.isa);
    let call = Call { kernel, conv, x, dtype, weight: &layout };
    // SAFETY: forwarded.
    unsafe { Direct::unpacked(call, weight, pool.threads()).run(pool, epilogue) }
}

/// A as windows into an image.
struct Windows<'a> {
    conv: &'a Conv,
    x: *const u8,
    size: isize,
    /// What rows are written in, before they are taken apart.
    form: Form,
    copy: CopyRow,
    /// Takes a row apart.
    split: Option<CopyRow>,
    /// Rows lie at one distance and can be read where they are.
    in_place: bool,
    /// Taps along the width are neighbours in memory, so a window row is one run.
    merged: bool,
    /// Elements are copied as they are.
    is_same: bool,
}

/// Terms of a window that lie side by side: where they begin, in bytes from the window's first element, and how many they are.
#[derive(Clone, Copy, Default)]
struct Run {
    from: isize,
    elements: usize,
}

/// Bytes of a run that is copied in place; a longer one is worth a call.
const MAX_SHORT: usize = 256;

/// Runs of a window that are found once for all pixels of a block.
const MAX_RUNS: usize = 64;

// SAFETY: reads only.
unsafe impl Sync for Windows<'_> {}

impl<'a> Windows<'a> {
    fn new(kernel: &Kernel, conv: &'a Conv, x: *const u8, dtype: DType) -> Windows<'a> {
        let whole = conv.group_in().is_multiple_of(kernel.form.elements_per_unit());
        let form = kernel.form.whole();
        Windows {
            conv,
            x,
            size: dtype.size_bytes() as isize,
            form,
            copy: copy_row(kernel.isa, dtype, form),
            split: (kernel.form.parts() > 0).then(|| copy_row(kernel.isa, dtype, kernel.form)),
            in_place: conv.is_plain() && kernel.form.takes(dtype) && whole,
            merged: conv.dilation[2] == 1
                && conv.upsample[2] == 1
                && conv.groups == 1
                && conv.strides[3] == conv.in_channels as isize,
            is_same: dtype == form.dtype(),
        }
    }

    /// The runs of terms `k0..k0 + kc` of a window that lies inside the image; `None` where they are too many, or not the same
    /// for each such window.
    fn runs(&self, k0: usize, kc: usize, runs: &mut [Run; MAX_RUNS]) -> Option<usize> {
        let conv = self.conv;
        if conv.upsample != [1; 3] {
            return None;
        }
        let [_, kh, kw] = conv.kernel;
        let run_taps = if self.merged { kw } else { 1 };
        let run = run_taps * conv.group_in();
        let (mut k, mut count) = (k0, 0);
        while k < k0 + kc {
            let (index, start) = (k / run, k % run);
            let tap = index * run_taps;
            let taps = [tap / (kh * kw), tap / kw % kh, tap % kw];
            let offset: isize =
                (0..3).map(|axis| (taps[axis] * conv.dilation[axis]) as isize * conv.strides[axis + 1]).sum();
            let elements = run.min(start + k0 + kc - k) - start;
            *runs.get_mut(count)? = Run { from: (offset + start as isize) * self.size, elements };
            k += elements;
            count += 1;
        }
        Some(count)
    }

    /// Where in its image a window that begins at `at` lies, in bytes, if all of it is inside.
    fn inside(&self, at: [isize; 3]) -> Option<isize> {
        let conv = self.conv;
        let mut offset = 0;
        for (axis, &first) in at.iter().enumerate() {
            let last = first + ((conv.kernel[axis] - 1) * conv.dilation[axis]) as isize;
            if first < 0 || last >= conv.input[axis] as isize {
                return None;
            }
            offset += first * conv.strides[axis + 1];
        }
        Some(offset * self.size)
    }

    /// Writes terms `k0..k0 + kc` of the window at `at` (its first tap, in upsampled input coordinates).
    ///
    /// # Safety
    /// As [`ASource::block`], for one row.
    unsafe fn row(&self, image: *const u8, at: [isize; 3], k0: usize, kc: usize, dst: *mut u8) {
        let conv = self.conv;
        let [_, kh, kw] = conv.kernel;
        let run_taps = if self.merged { kw } else { 1 };
        let run = run_taps * conv.group_in();
        let runs_per_row = kw / run_taps;
        let element = self.form.element_bytes();
        let mut k = k0;
        while k < k0 + kc {
            let (index, start) = (k / run, k % run);
            let end = run.min(start + k0 + kc - k);
            let taps = [index / runs_per_row / kh, index / runs_per_row % kh, index % runs_per_row];
            let (inside, from) = self.locate(at, taps, run_taps);
            let (low, high) = (inside.start.clamp(start, end), inside.end.clamp(start, end));
            // SAFETY: `low..high` are elements of the image; the parts of the run fill `dst` in order.
            unsafe {
                let to = dst.add((k - k0) * element);
                to.write_bytes(0, (low - start) * element);
                if low < high {
                    let from = image.byte_offset((from + low as isize) * self.size);
                    (self.copy)(from, to.add((low - start) * element), high - low);
                }
                to.add((high.max(low) - start) * element).write_bytes(0, (end - high.max(low)) * element);
            }
            k += end - start;
        }
    }

    /// Which elements of the run of taps that starts at `taps` lie inside the image, and the element offset of the run's
    /// start from the image's.
    fn locate(&self, at: [isize; 3], taps: [usize; 3], run_taps: usize) -> (std::ops::Range<usize>, isize) {
        let conv = self.conv;
        let mut offset = 0;
        for axis in 0..3 {
            let place = at[axis] + (taps[axis] * conv.dilation[axis]) as isize;
            let size = (conv.input[axis] * conv.upsample[axis]) as isize;
            if axis == 2 && run_taps > 1 {
                let low = (-place).clamp(0, run_taps as isize) as usize;
                let high = (size - place).clamp(low as isize, run_taps as isize) as usize;
                return (low * conv.group_in()..high * conv.group_in(), offset + place * conv.strides[3]);
            }
            if place < 0 || place >= size {
                return (0..0, 0);
            }
            offset += place / conv.upsample[axis] as isize * conv.strides[axis + 1];
        }
        (0..conv.group_in(), offset)
    }
}

/// Copies a few bytes: calling for each run takes longer than copying it.
///
/// # Safety
/// Both hold `bytes`, and they do not overlap.
#[inline]
unsafe fn copy_short(from: *const u8, to: *mut u8, bytes: usize) {
    let mut done = 0;
    // SAFETY: each step stays below `bytes`.
    unsafe {
        while done + 16 <= bytes {
            let four = from.add(done).cast::<[u32; 4]>().read_unaligned();
            to.add(done).cast::<[u32; 4]>().write_unaligned(four);
            done += 16;
        }
        while done + 4 <= bytes {
            to.add(done).cast::<u32>().write_unaligned(from.add(done).cast::<u32>().read_unaligned());
            done += 4;
        }
        while done < bytes {
            *to.add(done) = *from.add(done);
            done += 1;
        }
    }
}

impl ASource for Windows<'_> {
    unsafe fn block(
        &self,
        z: usize,
        row0: usize,
        rows: usize,
        k0: usize,
        kc: usize,
        dst: *mut u8,
        ld: usize,
    ) -> (*const u8, usize) {
        let conv = self.conv;
        let group = self.x.wrapping_byte_offset((z * conv.group_in()) as isize * self.size);
        let [depth, height, width] = conv.output;
        let element = self.form.element_bytes();
        // SAFETY: rows and terms lie inside the convolution; `dst` holds `rows * ld` bytes.
        unsafe {
            if self.in_place {
                let pixel = conv.strides[3] * self.size;
                let first = group.byte_offset(row0 as isize * pixel + k0 as isize * self.size);
                return (first, pixel as usize);
            }
            let mut runs = [Run::default(); MAX_RUNS];
            let count = self.runs(k0, kc, &mut runs);
            let mut together = [0u32; MAX_SPLIT_TERMS + 1];
            let mut place = [row0 / (width * height) % depth, row0 / width % height, row0 % width];
            let mut image = row0 / (width * height * depth);
            for row in 0..rows {
                let source = group.wrapping_byte_offset(image as isize * conv.strides[0] * self.size);
                let at = std::array::from_fn(|axis| (place[axis] * conv.stride[axis]) as isize - conv.padding[axis]);
                let to = if self.split.is_some() { together.as_mut_ptr().cast() } else { dst.add(row * ld) };
                match count.zip(self.inside(at)) {
                    Some((count, window)) => {
                        let window = source.byte_offset(window);
                        let mut filled = to;
                        for run in &runs[..count] {
                            let bytes = run.elements * element;
                            if self.is_same && bytes <= MAX_SHORT {
                                copy_short(window.byte_offset(run.from), filled, bytes);
                            } else {
                                (self.copy)(window.byte_offset(run.from), filled, run.elements);
                            }
                            filled = filled.add(bytes);
                        }
                    }
                    None => self.row(source, at, k0, kc, to),
                }
                if let Some(split) = self.split {
                    split(to, dst.add(row * ld), kc);
                }
                for (axis, size) in [(2, width), (1, height), (0, depth)] {
                    place[axis] += 1;
                    if place[axis] < size {
                        break;
                    }
                    place[axis] = 0;
                    image += usize::from(axis == 0);
                }
                if !kc.is_multiple_of(self.form.elements_per_unit()) {
                    to.add(kc * element).write_bytes(0, element);
                }
            }
        }
        (dst, ld)
    }

    fn is_in_place(&self) -> bool {
        self.in_place
    }
}
