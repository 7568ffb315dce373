//! The micro-kernels, their table, and the small copies around them.
//!
//! A micro-kernel multiplies `rows` rows of A with one panel of B and keeps the `rows x width` results in registers:
//!
//! ```text
//! tile(terms, a, lda, panel, c, ldc, accumulate):   c[i][j] (+)= sum over t of a[i][t] * panel[t][j]
//! ```
//!
//! Per term it loads one panel row and broadcasts one A element per row. On AVX-512 14 rows x 2 vectors use 28 of the 32
//! registers as accumulators and issue 16 loads for 28 multiply-adds, below the two loads a cycle that the cores have;
//! on AVX2 it is 6 x 2 of 16 registers. AMX multiplies whole tiles: see `gemm_amx`.

use crate::calibrate::bf16_pairs_win;
use crate::cpu::pack::{Matrix, units_in};
use crate::dtype::DType;
use crate::isa::{Amx, Features, Isa, amx, features};
use crate::registry::Family;

#[cfg(target_arch = "x86_64")]
use super::{gemm_amx, gemm_avx2, gemm_avx512};
use super::{gemm_portable, gemm_split};

/// Units of a block at most with AMX: panel, the rows of a tile and its results share an L1 of 48 KiB.
const AMX_BLOCK_UNITS: usize = 160;

/// How a micro-kernel reads its operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// f32 terms.
    F32,
    /// Pairs of bf16 terms.
    Bf16Pairs,
    /// Pairs of f16 terms, which AMX alone multiplies as they are.
    F16Pairs,
    /// f32 terms as sums of three bf16, for AMX; see `gemm_split`.
    Bf16x3,
    /// f16 terms as sums of two.
    Bf16x2,
    /// Fours of bytes: A unsigned, B signed, results 32-bit integers in the place of f32.
    Int8Quads,
}

impl Form {
    /// The element type of both operands, which lie in memory as this form reads them unless it has [parts](Form::parts).
    pub(crate) const fn dtype(self) -> DType {
        match self {
            Form::F32 | Form::Bf16x3 => DType::F32,
            Form::Bf16Pairs => DType::BF16,
            Form::F16Pairs | Form::Bf16x2 => DType::F16,
            Form::Int8Quads => DType::U8,
        }
    }

    /// Bf16 that an element is the sum of; 0 where it stays one number.
    pub const fn parts(self) -> usize {
        match self {
            Form::Bf16x3 => 3,
            Form::Bf16x2 => 2,
            _ => 0,
        }
    }

    /// The form in which operands are brought together before they are taken apart.
    pub(crate) const fn whole(self) -> Form {
        match self {
            Form::Bf16x3 => Form::F32,
            Form::Bf16x2 => Form::F16Pairs,
            _ => self,
        }
    }

    /// What is left out of a product at most, in units of 2^-24 of it.
    pub(crate) const fn left_out(self) -> usize {
        match self {
            Form::Bf16x3 => 8,
            Form::Bf16x2 => 1024,
            _ => 0,
        }
    }

    /// Whether elements of that type are read as they lie.
    pub(crate) fn takes(self, dtype: DType) -> bool {
        self.parts() == 0 && dtype == self.dtype()
    }

    /// Four-byte units of `k` elements.
    pub(crate) fn units(self, k: usize) -> usize {
        units_in(self.parts(), k, self.dtype())
    }

    /// Elements of k per four-byte unit, of what lies together.
    pub(crate) const fn elements_per_unit(self) -> usize {
        4 / self.element_bytes()
    }

    /// Bytes of one element, as it lies.
    pub(crate) const fn element_bytes(self) -> usize {
        self.dtype().size_bytes()
    }
}

/// Units of a row of a tile register, and rows of one.
pub(crate) const TILE_UNITS: usize = 16;

/// `(units, a, lda in bytes, panel, c, ldc in elements, accumulate, prefetch)`.
///
/// `a` holds the tile's rows of `units` units, `panel` `units` rows of the panel's width, `c` the tile's rows of the
/// panel's width. `prefetch` is any address: a kernel may fetch `units / 4` lines from there into L2, or `units / 16` if it
/// [fetches rows](Kernel::fetches_rows); that of the panel stands for nothing.
pub(crate) type Tile = unsafe fn(usize, *const u8, usize, *const u8, *mut f32, usize, bool, *const u8);

/// Micro-kernels by where they keep their results: `[half panel, full panel][rows - 1]`.
pub(crate) enum Tiles {
    /// In vector registers.
    Vectors([&'static [Tile]; 2]),
    /// In tile registers (AMX), which are set up for tiles of a height; and those that add up several pieces, if there are any:
    /// `[half panel, full panel][at most sixteen rows, more]`.
    #[cfg(target_arch = "x86_64")]
    Registers([&'static [gemm_amx::Tile]; 2], Option<[[gemm_amx::TapsTile; 2]; 2]>),
}

/// A family of micro-kernels for one instruction set and operand form.
pub struct Kernel {
    pub(crate) isa: Isa,
    /// How it reads its operands.
    pub form: Form,
    /// Most rows of a tile.
    pub(crate) mr: usize,
    /// Columns of a full panel.
    pub nr: usize,
    pub(crate) tiles: Tiles,
}

impl Kernel {
    /// Whether its results are in tile registers.
    pub(crate) fn is_amx(&self) -> bool {
        !matches!(self.tiles, Tiles::Vectors(_))
    }

    /// Whether it has tiles that add up several pieces.
    pub(crate) fn adds_taps(&self) -> bool {
        #[cfg(target_arch = "x86_64")]
        if let Tiles::Registers(_, taps) = &self.tiles {
            return taps.is_some();
        }
        false
    }

    /// Whether it multiplies operands of that type.
    pub(crate) fn reads(&self, dtype: DType) -> bool {
        match self.form {
            Form::F32 => matches!(dtype, DType::F32 | DType::F16 | DType::BF16),
            _ => dtype == self.form.dtype(),
        }
    }

    /// Its name in the registry: `<family>_<operands>[_dot | _amx[_x<parts>]]_<rows>x<columns>__<isa>`.
    pub(crate) fn row_name(&self, family: Family, dtype: DType) -> String {
        let family = if family == Family::Conv { "conv" } else { "gemm" };
        let dtype = if self.form == Form::Int8Quads { "int8".to_owned() } else { format!("{dtype:?}").to_lowercase() };
        format!("{family}_{dtype}{}_{}x{}__{}", self.instruction(), self.mr, self.nr, self.isa.name())
    }

    /// The part of its name that says what multiplies, where that is not what multiplies f32.
    pub(crate) fn instruction(&self) -> &'static str {
        match (self.is_amx(), self.form) {
            (_, Form::Bf16x3) => "_amx_x3",
            (_, Form::Bf16x2) => "_amx_x2",
            (true, _) => "_amx",
            (_, Form::Bf16Pairs) => "_dot",
            _ => "",
        }
    }

    /// Whether this processor runs it.
    pub(crate) fn is_available(&self) -> bool {
        self.is_available_with(features(), amx)
    }

    /// Whether a processor with these features does. AMX is asked for only where the kernel is one of AMX.
    pub fn is_available_with(&self, features: &Features, amx: fn() -> Amx) -> bool {
        self.isa <= features.isa
            && match (self.is_amx(), self.form, self.isa) {
                (true, Form::Int8Quads, _) => amx().int8,
                (true, Form::F16Pairs, _) => amx().f16,
                (true, ..) => amx().bf16,
                (_, Form::F32, _) | (.., Isa::Portable | Isa::Avx2) => true,
                (_, Form::Bf16Pairs, Isa::Avx512) => features.avx512_bf16,
                (_, Form::F16Pairs | Form::Bf16x3 | Form::Bf16x2, Isa::Avx512) => false,
                (_, Form::Int8Quads, Isa::Avx512) => features.avx512_vnni,
            }
    }

    /// Multiply-adds in the time of an f32 one: what makers say of their instructions.
    pub fn rate(&self) -> f64 {
        let terms = self.form.elements_per_unit() as f64;
        match self.form {
            // As pairs of bf16, six and three times.
            Form::Bf16x3 => 16.0 / 6.0,
            Form::Bf16x2 => 16.0 / 3.0,
            // 16 x 16 units in 16 cycles, against two vectors of 16 a cycle.
            _ if self.is_amx() => 8.0 * terms,
            _ => terms,
        }
    }

    /// Whether its tiles fetch a row of A each, not a part of the next panel.
    pub(crate) fn fetches_rows(&self) -> bool {
        self.isa == Isa::Avx2
    }

    /// Elements of k that blocks should be multiples of.
    pub(crate) fn k_step(&self) -> usize {
        let units = if self.is_amx() { TILE_UNITS } else { 1 };
        if self.form.parts() > 0 { gemm_split::GROUP } else { units * self.form.elements_per_unit() }
    }

    /// Elements of k of a block at most, where one of f32 has `units`: what a panel takes in L1 is alike.
    pub fn most_terms(&self, units: usize) -> usize {
        match self.form {
            Form::Bf16x3 => 128,
            Form::Bf16x2 => 192,
            form if self.is_amx() => units.min(AMX_BLOCK_UNITS) * form.elements_per_unit(),
            form => units * form.elements_per_unit(),
        }
    }

    /// Rows that a block should have a multiple of: fewer cost as much.
    pub(crate) fn row_step(&self) -> usize {
        if self.is_amx() { TILE_UNITS } else { 1 }
    }

    /// Rows of the next tile, of `rows` that are left for so many tiles: tiles of vectors are of nearly equal height, those of
    /// AMX full but for the last.
    pub(crate) fn next_height(&self, rows: usize, tiles: usize) -> usize {
        if self.is_amx() { rows.min(self.mr) } else { rows.div_ceil(tiles) }
    }
}

/// Runs tiles of a kernel, panel after panel in one thread. Tile registers stay set up from one to the next; what it changes in
/// them is undone when it is dropped. Meanwhile no other one may run in the thread: it would take them away.
pub struct Runner<'a> {
    kernel: &'a Kernel,
    /// The panel at hand.
    panel: *const u8,
    width: usize,
    units: usize,
    /// The height that tile registers are set up for, 0 if they are not.
    height: usize,
    #[cfg(target_arch = "x86_64")]
    rest: std::mem::MaybeUninit<gemm_amx::Rest>,
}

impl<'a> Runner<'a> {
    /// For tiles of that kernel.
    #[inline(always)]
    pub fn new(kernel: &'a Kernel) -> Runner<'a> {
        Runner {
            kernel,
            panel: std::ptr::null(),
            width: 0,
            units: 0,
            height: 0,
            #[cfg(target_arch = "x86_64")]
            rest: std::mem::MaybeUninit::uninit(),
        }
    }

    pub(crate) fn kernel(&self) -> &'a Kernel {
        self.kernel
    }

    /// Multiplies with that panel from here on.
    ///
    /// # Safety
    /// As [`Tile`] says, for all tiles that follow; the processor must have the kernel's instructions.
    #[inline(always)]
    pub unsafe fn take_panel(&mut self, panel: *const u8, width: usize, units: usize) {
        (self.panel, self.width, self.units) = (panel, width, units);
        #[cfg(target_arch = "x86_64")]
        if self.kernel.is_amx() && !units.is_multiple_of(TILE_UNITS) {
            // SAFETY: forwarded.
            unsafe { gemm_amx::copy_panel(panel, width, units, self.rest.as_mut_ptr()) };
        }
    }

    /// Whether tiles of that height need no other set-up than the one in force. Registers of sixteen rows are those of the upper
    /// half of any higher tile.
    pub(crate) fn is_set_up(&self, rows: usize) -> bool {
        self.height == rows || rows == TILE_UNITS && self.height > rows
    }

    /// As [`Kernel::next_height`]; of AMX the short tile comes first where registers are set up for it.
    #[inline(always)]
    pub(crate) fn next_height(&self, rows: usize, tiles: usize) -> usize {
        if !self.kernel.is_amx() {
            return self.kernel.next_height(rows, tiles);
        }
        let short = rows - (tiles - 1) * self.kernel.mr;
        if self.is_set_up(short) { short } else { self.kernel.next_height(rows, tiles) }
    }

    /// Runs the tile of that many rows over the panel.
    ///
    /// # Safety
    /// As [`Tile`] says; [`Self::take_panel`] must have been called.
    #[inline(always)]
    pub unsafe fn tile(
        &mut self,
        rows: usize,
        (a, lda): (*const u8, usize),
        (c, ldc): (*mut f32, usize),
        accumulate: bool,
        prefetch: *const u8,
    ) {
        let Runner { kernel, panel, width, units, .. } = *self;
        let wide = usize::from(width == kernel.nr);
        // SAFETY: forwarded; tile registers are set up for the height before, and the rest of the panel was copied.
        unsafe {
            match &kernel.tiles {
                Tiles::Vectors(tiles) => tiles[wide][rows - 1](units, a, lda, panel, c, ldc, accumulate, prefetch),
                #[cfg(target_arch = "x86_64")]
                Tiles::Registers(tiles, _) => {
                    self.set_up(rows);
                    let rest = self.rest.as_mut_ptr();
                    tiles[wide][rows - 1](units, a, lda, panel, c, ldc, accumulate, prefetch, rest);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Runner<'_> {
    /// Sets tile registers up for tiles of that height.
    ///
    /// # Safety
    /// AMX must be available.
    #[inline(always)]
    unsafe fn set_up(&mut self, rows: usize) {
        if !self.is_set_up(rows) {
            self.height = if rows == TILE_UNITS { 2 * TILE_UNITS } else { rows };
            // SAFETY: forwarded.
            unsafe { gemm_amx::set_up(self.height) };
        }
    }

    /// Runs the tile of that many rows over pieces of a panel of that width; the kernel must [add up pieces](Kernel::adds_taps).
    ///
    /// # Safety
    /// As [`gemm_amx::TapsTile`] says; the processor must have the kernel's instructions.
    #[inline(always)]
    pub(crate) unsafe fn taps(
        &mut self,
        rows: usize,
        width: usize,
        job: &gemm_amx::TapsJob,
        (c, ldc): (*mut f32, usize),
    ) {
        let Tiles::Registers(_, Some(tiles)) = &self.kernel.tiles else { return };
        let tile = tiles[usize::from(width == self.kernel.nr)][usize::from(rows > TILE_UNITS)];
        // SAFETY: forwarded; tile registers are set up for the height before.
        unsafe {
            self.set_up(rows);
            tile(job, c, ldc);
        }
    }
}

impl Drop for Runner<'_> {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.height > 0 {
            // SAFETY: a tile ran, so AMX is available.
            unsafe { gemm_amx::release() };
        }
    }
}

/// Every micro-kernel family of this architecture.
pub(crate) fn kernels() -> Vec<&'static Kernel> {
    vec![
        &gemm_portable::F32,
        #[cfg(target_arch = "x86_64")]
        &gemm_avx2::F32,
        #[cfg(target_arch = "x86_64")]
        &gemm_avx512::F32,
        #[cfg(target_arch = "x86_64")]
        &gemm_avx512::BF16,
        #[cfg(target_arch = "x86_64")]
        &gemm_avx512::INT8,
        #[cfg(target_arch = "x86_64")]
        &gemm_amx::BF16,
        #[cfg(target_arch = "x86_64")]
        &gemm_amx::F16,
        #[cfg(target_arch = "x86_64")]
        &gemm_amx::F32,
        #[cfg(target_arch = "x86_64")]
        &gemm_amx::F16_SPLIT,
        #[cfg(target_arch = "x86_64")]
        &gemm_amx::INT8,
        &gemm_portable::INT8,
    ]
}

/// The fastest family for operands of these types, `rows` rows of A of `k` elements.
pub(crate) fn select(isa: Isa, a: DType, b: DType, (rows, k): (usize, usize)) -> &'static Kernel {
    of_form(isa, form_of(amx, isa.clamp(), a, b, (rows, k)))
}

/// Rows, of f32 and of f16, and elements of each, from which on it pays to take operands apart for AMX (2 MiB of L2, 4096 x 4096
/// weights that are packed by the call: f32 of 77 rows 1.2 of the time, of 128 0.95, of 256 0.75; f16 of 32 rows 0.9, of 77 0.67).
const SPLIT_ROWS_F32: usize = 128;
const SPLIT_ROWS_F16: usize = 32;
const SPLIT_TERMS: usize = 32;

/// The form that operands of these types are multiplied in. AMX is asked for only where it is a candidate.
pub fn form_of(amx: fn() -> Amx, isa: Isa, a: DType, b: DType, (rows, k): (usize, usize)) -> Form {
    let splits = |least: usize| rows >= least && k >= SPLIT_TERMS && amx().bf16;
    match (a, b) {
        _ if isa < Isa::Avx512 => Form::F32,
        (DType::BF16, DType::BF16) if bf16_pairs_win() => Form::Bf16Pairs,
        (DType::F16, DType::F16) if amx().f16 => Form::F16Pairs,
        (DType::F16, DType::F16) if splits(SPLIT_ROWS_F16) => Form::Bf16x2,
        (DType::F32, DType::F32) if splits(SPLIT_ROWS_F32) => Form::Bf16x3,
        _ => Form::F32,
    }
}

/// The family of a form; the processor must have its instructions.
pub(crate) fn of_form(isa: Isa, form: Form) -> &'static Kernel {
    of_form_with(features(), amx, isa, form)
}

/// The family of a form for a processor with these features. AMX is asked for only where it is a candidate.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub fn of_form_with(features: &Features, amx: fn() -> Amx, isa: Isa, form: Form) -> &'static Kernel {
    match (isa.min(features.isa), form) {
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::Bf16Pairs) if amx().bf16 => &gemm_amx::BF16,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::Bf16Pairs) => &gemm_avx512::BF16,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::F16Pairs) if amx().f16 => &gemm_amx::F16,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::Bf16x3) if amx().bf16 => &gemm_amx::F32,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::Bf16x2) if amx().bf16 => &gemm_amx::F16_SPLIT,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::Int8Quads) if amx().int8 => &gemm_amx::INT8,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, Form::Int8Quads) if features.avx512_vnni => &gemm_avx512::INT8,
        (_, Form::Int8Quads) => &gemm_portable::INT8,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx512, _) => &gemm_avx512::F32,
        #[cfg(target_arch = "x86_64")]
        (Isa::Avx2, _) => &gemm_avx2::F32,
        _ => &gemm_portable::F32,
    }
}

/// Columns of a full panel, the same for every operand form of an instruction set.
pub(crate) fn panel_width(isa: Isa) -> usize {
    match isa.clamp() {
        Isa::Avx512 => 32,
        Isa::Avx2 | Isa::Portable => 16,
    }
}

/// Copies `n` elements, converting to the form's element type.
pub(crate) type CopyRow = unsafe fn(*const u8, *mut u8, usize);

/// The copy from `dtype` to what `form` reads: of [parts](Form::parts) whole groups, 0 beyond the last element.
pub(crate) fn copy_row(isa: Isa, dtype: DType, form: Form) -> CopyRow {
    match (form, dtype) {
        #[cfg(target_arch = "x86_64")]
        (Form::Bf16x3, _) => gemm_split::split_row_f32,
        #[cfg(target_arch = "x86_64")]
        (Form::Bf16x2, _) => gemm_split::split_row_f16,
        #[cfg(not(target_arch = "x86_64"))]
        (Form::Bf16x3 | Form::Bf16x2, _) => unreachable!("kernels of parts are those of AMX"),
        (Form::Bf16Pairs | Form::F16Pairs, _) => gemm_portable::copy_16,
        (Form::Int8Quads, _) => gemm_portable::copy_8,
        (Form::F32, DType::F16) => match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => gemm_avx512::widen_f16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => gemm_avx2::widen_f16,
            _ => gemm_portable::widen_f16,
        },
        (Form::F32, DType::BF16) => match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => gemm_avx512::widen_bf16,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => gemm_avx2::widen_bf16,
            _ => gemm_portable::widen_bf16,
        },
        (Form::F32, _) => gemm_portable::copy_32,
    }
}

/// Takes a panel of `k` rows apart, as [`copy_row`] does rows.
///
/// # Safety
/// `src` must hold `k` rows of `width` elements of the form's type, packed, and `dst` [`Form::units`] rows of as many units; the
/// form must have parts, and the processor AVX-512.
pub unsafe fn split_panel(form: Form, src: *const u8, k: usize, width: usize, dst: *mut u32) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: forwarded; kernels of parts are those of AMX, which comes with AVX-512.
    unsafe {
        match form {
            Form::Bf16x3 => gemm_split::split_panel_into(3, src.cast(), k, width, dst),
            _ => gemm_split::split_panel_f16(src, k, width, dst),
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    unreachable!("kernels of parts are those of AMX: {form:?} {src:?} {k} {width} {dst:?}")
}

/// Widens `units` pair rows of a 16-bit panel into `2 * units` f32 rows.
///
/// # Safety
/// `src` must hold `units * width` units and `dst` twice as many f32.
pub(crate) unsafe fn expand_panel(isa: Isa, dtype: DType, src: *const u32, units: usize, width: usize, dst: *mut f32) {
    // SAFETY: forwarded; the level is available because the kernel that asks for it is.
    unsafe {
        match (isa, dtype) {
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, DType::F16) => gemm_avx512::expand_f16(src, units, width, dst),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx512, _) => gemm_avx512::expand_bf16(src, units, width, dst),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, DType::F16) => gemm_avx2::expand_f16(src, units, width, dst),
            #[cfg(target_arch = "x86_64")]
            (Isa::Avx2, _) => gemm_avx2::expand_bf16(src, units, width, dst),
            (_, DType::F16) => {
                gemm_portable::expand(src, units, width, dst, |bits| half::f16::from_bits(bits).to_f32())
            }
            _ => gemm_portable::expand(src, units, width, dst, |bits| f32::from_bits(u32::from(bits) << 16)),
        }
    }
}

/// Writes the first `units` units of `valid` rows as columns, `stride` units from one unit to the next, as far as a vector
/// transpose can; returns how many units it did. Lanes up to `width` are 0 where there is no row.
///
/// # Safety
/// `b` must be readable for `valid` rows of `units` units, `dst` writable for `width` units at each of `units` strides.
pub(crate) unsafe fn transpose_units(
    isa: Isa,
    b: &Matrix,
    valid: usize,
    units: usize,
    width: usize,
    dst: *mut u32,
    stride: usize,
) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: forwarded.
        Isa::Avx512 => unsafe { gemm_avx512::transpose_units(b, valid, units, width, dst, stride) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: forwarded.
        Isa::Avx2 => unsafe { gemm_avx2::transpose_units(b, valid, units, width, dst, stride) },
        _ => 0,
    }
}

/// Spreads `valid` contiguous rows of `channels x taps` elements over the columns of a panel: element (channel, tap) of row
/// `lane` becomes term `tap * channels + channel` of column `lane`, other columns zero. Returns false, with nothing written,
/// if there is no vector code for it.
///
/// # Safety
/// `src` must hold the rows, `row_bytes` apart; `dst` must be a panel of `width` columns.
pub(crate) unsafe fn spread_rows(
    isa: Isa,
    dtype: DType,
    src: *const u8,
    row_bytes: isize,
    valid: usize,
    sizes: [usize; 2],
    dst: *mut u32,
    width: usize,
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        for lane in (0..width).step_by(16) {
            // SAFETY: sixteen lanes at a time of the rows and the panel.
            unsafe {
                let (src, count) =
                    (src.wrapping_byte_offset(lane as isize * row_bytes), valid.saturating_sub(lane).min(16));
                match dtype.size_bytes() {
                    4 => gemm_avx512::spread_32(src, row_bytes, count, sizes, dst.add(lane), width),
                    _ => gemm_avx512::spread_16(src, row_bytes, count, sizes, dst.add(lane), width),
                }
            }
        }
        return true;
    }
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx2 && dtype.size_bytes() == 4 {
        for lane in (0..width).step_by(8) {
            // SAFETY: eight lanes at a time of the rows and the panel.
            unsafe {
                let (src, count) =
                    (src.wrapping_byte_offset(lane as isize * row_bytes), valid.saturating_sub(lane).min(8));
                gemm_avx2::spread_32(src, row_bytes, count, sizes, dst.add(lane), width);
            }
        }
        return true;
    }
    false
}
