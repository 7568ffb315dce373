//! Matrix products by cuBLASLt.
//!
//! A [`Problem`] says what is multiplied in terms of row-major matrices; cuBLASLt counts columns first, so the result is
//! computed as `outᵀ = wᵀ xᵀ`: the weight is its left operand, and a vector with one element per column of `out` is the
//! bias that its epilogue adds to rows. Planning asks the library's heuristic for algorithms; the first is taken, the
//! others are for a [sweep](super::delegate::Site). A run allocates nothing and is a plain sequence of launches on the stream, which may be captured.

use std::ffi::c_void;
use std::mem::size_of;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::{result, sys};

use super::NAME;
use super::delegate::Planned;
use super::driver::StreamHandle;
use crate::ir::DType;
use crate::{Error, Result};

/// Algorithms that are asked for.
const CANDIDATES: usize = 16;

/// A matrix, in elements.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// From one row to the next; where `is_turned`, from one column to the next.
    pub stride: i64,
    /// From one matrix to the next.
    pub batch: i64,
    /// Columns lie one after the other instead of rows.
    pub is_turned: bool,
    /// The address is a multiple of this many bytes.
    pub align_bytes: u32,
}

/// What follows the sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// The form of GELU with tanh: cuBLASLt has no other. (What its ReLU makes of NaN is not documented.)
    GeluTanh,
}

/// `out [m, n] = activation(scale x [m, k] w [k, n] + bias [n] + residual [m, n])`, `batch` times. Sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Problem {
    /// Element type of what is multiplied.
    pub dtype: DType,
    /// Element type of the result, the residual and the bias: the same, or f32.
    pub out_dtype: DType,
    /// Products of f32 may take TF32 operands.
    pub tf32: bool,
    /// Rows of the result.
    pub m: u64,
    /// Columns of the result.
    pub n: u64,
    /// Terms of a sum.
    pub k: u64,
    /// Number of products.
    pub batch: i32,
    /// Left operand.
    pub x: Matrix,
    /// Right operand.
    pub w: Matrix,
    /// Added, where it is there; never turned.
    pub residual: Option<Matrix>,
    /// Result; never turned.
    pub out: Matrix,
    /// Alignment of the bias, where there is one.
    pub bias: Option<u32>,
    /// What follows the sums.
    pub activation: Activation,
    /// Bits of the f32 that sums are multiplied by before anything is added.
    pub scale_bits: u32,
    /// Most bytes of workspace.
    pub workspace_bytes: usize,
}

fn said(what: &str, e: CublasError) -> String {
    format!("cuBLASLt refuses {what}: {e}")
}

/// The library, made ready for one device.
#[derive(Debug)]
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
}

// SAFETY: the handle may be used by any number of threads at once (cuBLAS documentation, "Thread Safety").
unsafe impl Send for CublasLt {}
// SAFETY: as above.
unsafe impl Sync for CublasLt {}

struct Descriptor(sys::cublasLtMatmulDesc_t);

impl Drop for Descriptor {
    fn drop(&mut self) {
        // SAFETY: made by `create_matmul_desc`, destroyed once.
        let _ = unsafe { result::destroy_matmul_desc(self.0) };
    }
}

impl Descriptor {
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: T,
    ) -> std::result::Result<(), String> {
        let at = std::ptr::from_ref(&value).cast::<c_void>();
        // SAFETY: a live descriptor; the value is read during the call, and has the size that is said.
        let set = unsafe { result::set_matmul_desc_attribute(self.0, attribute, at, size_of::<T>()) };
        set.map_err(|e| said(&format!("{attribute:?}"), e))
    }
}

struct Layout(sys::cublasLtMatrixLayout_t);

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `create_matrix_layout`, destroyed once.
        let _ = unsafe { result::destroy_matrix_layout(self.0) };
    }
}

impl Layout {
    /// `rows` and `columns` as cuBLASLt counts: elements of a column are neighbours.
    fn new(p: &Problem, dtype: DType, m: &Matrix, rows: u64, columns: u64) -> std::result::Result<Self, String> {
        use sys::cublasLtMatrixLayoutAttribute_t as At;
        let layout = result::create_matrix_layout(data_type(dtype)?, rows, columns, m.stride);
        let layout = Self(layout.map_err(|e| said("a matrix", e))?);
        let set = |attribute: At, at: *const c_void, bytes: usize| {
            // SAFETY: a live layout; the value is read during the call.
            let set = unsafe { result::set_matrix_layout_attribute(layout.0, attribute, at, bytes) };
            set.map_err(|e| said(&format!("{attribute:?}"), e))
        };
        if p.batch != 1 {
            set(At::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const p.batch).cast(), size_of::<i32>())?;
            set(At::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const m.batch).cast(), size_of::<i64>())?;
        }
        Ok(layout)
    }
}

struct Preference(sys::cublasLtMatmulPreference_t);

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `create_matmul_pref`, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(self.0) };
    }
}

fn data_type(dtype: DType) -> std::result::Result<sys::cudaDataType, String> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType::CUDA_R_32F),
        DType::F16 => Ok(sys::cudaDataType::CUDA_R_16F),
        DType::BF16 => Ok(sys::cudaDataType::CUDA_R_16BF),
        other => Err(format!("no products of {}", other.name())),
    }
}

/// A way to compute a product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// As the library stores it: the same bytes mean the same algorithm to the same version of the library.
    pub algorithm: [u64; 8],
    /// Workspace it needs.
    pub workspace_bytes: usize,
    /// Share of the device's waves that its blocks fill, as the heuristic estimates.
    pub waves: f32,
}

/// A product that is ready to run.
pub struct Product {
    library: Arc<CublasLt>,
    problem: Problem,
    /// Holds the bias's address, so one thread at a time uses it.
    descriptor: Mutex<Descriptor>,
    /// Of w, x, residual (or the result) and the result.
    layouts: [Layout; 4],
    candidates: Vec<Candidate>,
}

// SAFETY: layouts are only read after they were made; the descriptor is behind a lock.
unsafe impl Send for Product {}
// SAFETY: as above.
unsafe impl Sync for Product {}

impl std::fmt::Debug for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cuBLASLt {:?}, {} candidates", self.problem, self.candidates.len())
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made by `create_handle`, destroyed once, after every product that holds it.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

impl CublasLt {
    /// For the device whose context is current. The library must have been found.
    pub(super) fn open() -> std::result::Result<Arc<Self>, String> {
        let handle = result::create_handle().map_err(|e| format!("cuBLASLt does not start: {e}"))?;
        Ok(Arc::new(Self { handle }))
    }

    /// Algorithms for `problem`, or why there is none.
    ///
    /// # Errors
    /// What the library says.
    pub fn plan(self: &Arc<Self>, problem: &Problem) -> std::result::Result<Product, String> {
        use sys::cublasLtMatmulDescAttributes_t as At;
        let p = problem;
        let compute = match (p.dtype, p.tf32) {
            (DType::F32, true) => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
            _ => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
        };
        let descriptor = result::create_matmul_desc(compute, sys::cudaDataType::CUDA_R_32F);
        let descriptor = Descriptor(descriptor.map_err(|e| said("a product", e))?);
        // `CUBLAS_OP_N` and `CUBLAS_OP_T`.
        let op = |is_turned: bool| i32::from(is_turned);
        // What lies in columns for us has neighbouring rows for cuBLASLt.
        descriptor.set(At::CUBLASLT_MATMUL_DESC_TRANSA, op(p.w.is_turned))?;
        descriptor.set(At::CUBLASLT_MATMUL_DESC_TRANSB, op(p.x.is_turned))?;
        descriptor.set(At::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue(p))?;
        if let Some(align) = p.bias {
            // The heuristic looks at the address's alignment alone; the address comes with each run.
            descriptor.set(At::CUBLASLT_MATMUL_DESC_BIAS_POINTER, u64::from(align))?;
        }
        let (w_rows, w_columns) = if p.w.is_turned { (p.k, p.n) } else { (p.n, p.k) };
        let (x_rows, x_columns) = if p.x.is_turned { (p.m, p.k) } else { (p.k, p.m) };
        let added = p.residual.unwrap_or(p.out);
        let layouts = [
            Layout::new(p, p.dtype, &p.w, w_rows, w_columns)?,
            Layout::new(p, p.dtype, &p.x, x_rows, x_columns)?,
            Layout::new(p, p.out_dtype, &added, p.n, p.m)?,
            Layout::new(p, p.out_dtype, &p.out, p.n, p.m)?,
        ];
        let candidates = self.candidates(p, &descriptor, &layouts)?;
        Ok(Product { library: self.clone(), problem: *p, descriptor: Mutex::new(descriptor), layouts, candidates })
    }

    fn candidates(
        &self,
        p: &Problem,
        descriptor: &Descriptor,
        layouts: &[Layout; 4],
    ) -> std::result::Result<Vec<Candidate>, String> {
        use sys::cublasLtMatmulPreferenceAttributes_t as At;
        let preference = Preference(result::create_matmul_pref().map_err(|e| said("a preference", e))?);
        let set = |attribute: At, at: *const c_void, bytes: usize| {
            // SAFETY: a live preference; the value is read during the call.
            let set = unsafe { result::set_matmul_pref_attribute(preference.0, attribute, at, bytes) };
            set.map_err(|e| said(&format!("{attribute:?}"), e))
        };
        set(At::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const p.workspace_bytes).cast(), size_of::<usize>())?;
        if p.out_dtype != DType::F32 {
            // Parts of a sum that several blocks share would else be added in 16 bits, in the result's memory or beside it.
            let scheme = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32;
            set(At::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const scheme).cast(), size_of::<u32>())?;
        }
        let added = p.residual.unwrap_or(p.out);
        for (attribute, align) in [
            (At::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &p.w.align_bytes),
            (At::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &p.x.align_bytes),
            (At::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &added.align_bytes),
            (At::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &p.out.align_bytes),
        ] {
            set(attribute, std::ptr::from_ref(align).cast(), size_of::<u32>())?;
        }
        let nothing = sys::cublasLtMatmulHeuristicResult_t {
            algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
            workspaceSize: 0,
            state: sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED,
            wavesCount: 0.0,
            reserved: [0; 4],
        };
        let (mut found, mut count) = ([nothing; CANDIDATES], 0);
        let [w, x, c, d] = layouts.each_ref().map(|l| l.0);
        // SAFETY: everything is live; the list has as many entries as are asked for.
        let code = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                descriptor.0,
                w,
                x,
                c,
                d,
                preference.0,
                CANDIDATES as i32,
                found.as_mut_ptr(),
                &raw mut count,
            )
        };
        code.result().map_err(|e| said("this product", e))?;
        let usable = found.iter().take(usize::try_from(count).unwrap_or(0));
        let usable = usable.filter(|c| c.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        let candidates: Vec<Candidate> = usable
            .map(|c| Candidate { algorithm: c.algo.data, workspace_bytes: c.workspaceSize, waves: c.wavesCount })
            .filter(|c| c.workspace_bytes <= p.workspace_bytes)
            .collect();
        if candidates.is_empty() {
            Err("cuBLASLt has no algorithm for this product".to_owned())
        } else {
            Ok(candidates)
        }
    }
}

fn epilogue(p: &Problem) -> sys::cublasLtEpilogue_t {
    use sys::cublasLtEpilogue_t as E;
    match (p.activation, p.bias.is_some()) {
        (Activation::None, false) => E::CUBLASLT_EPILOGUE_DEFAULT,
        (Activation::None, true) => E::CUBLASLT_EPILOGUE_BIAS,
        (Activation::GeluTanh, false) => E::CUBLASLT_EPILOGUE_GELU,
        (Activation::GeluTanh, true) => E::CUBLASLT_EPILOGUE_GELU_BIAS,
    }
}

impl Product {
    /// What is computed.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Ways to compute it, the one that runs first.
    pub fn candidates(&self) -> &[Candidate] {
        &self.candidates
    }
}

/// A product by another than its first candidate.
#[derive(Debug)]
pub struct Chosen {
    product: Arc<Product>,
    number: usize,
}

impl Chosen {
    /// By candidate `number`.
    ///
    /// # Errors
    /// If there are not so many.
    pub fn new(product: Arc<Product>, number: usize) -> std::result::Result<Self, String> {
        match number < product.candidates.len() {
            true => Ok(Self { product, number }),
            false => Err(format!("cuBLASLt has {} algorithms for this product", product.candidates.len())),
        }
    }
}

/// Addresses: x, w, result, residual, bias; 0 for what is not there.
impl Planned for Chosen {
    fn library(&self) -> &'static str {
        self.product.library()
    }

    fn workspace_bytes(&self) -> usize {
        self.product.candidates[self.number].workspace_bytes
    }

    fn plans(&self) -> Vec<(usize, usize)> {
        vec![(Arc::as_ptr(&self.product).addr(), self.number)]
    }

    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise; the workspace is that of this candidate.
        unsafe { self.product.run_as(&self.product.candidates[self.number], addresses, workspace, stream) }
    }
}

impl Planned for Product {
    fn library(&self) -> &'static str {
        "cuBLASLt"
    }

    fn workspace_bytes(&self) -> usize {
        self.candidates[0].workspace_bytes
    }

    fn plans(&self) -> Vec<(usize, usize)> {
        vec![(std::ptr::from_ref(self).addr(), 0)]
    }

    /// Addresses: as for [`Chosen`].
    unsafe fn run(&self, addresses: &[u64], workspace: u64, stream: StreamHandle) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.run_as(&self.candidates[0], addresses, workspace, stream) }
    }
}

impl Product {
    /// # Safety
    /// As [`Planned::run`], with the workspace of `candidate`.
    unsafe fn run_as(
        &self,
        candidate: &Candidate,
        addresses: &[u64],
        workspace: u64,
        stream: StreamHandle,
    ) -> Result<()> {
        let refused = |what: String| Error::Backend { backend: NAME, what };
        let &[x, w, out, residual, bias] = addresses else {
            return Err(refused("a product has five operands".to_owned()));
        };
        let pointer = |address: u64| std::ptr::with_exposed_provenance_mut::<c_void>(address as usize);
        let descriptor = self.descriptor.lock().unwrap_or_else(PoisonError::into_inner);
        if self.problem.bias.is_some() {
            let at = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            descriptor.set(at, bias).map_err(refused)?;
        }
        let (alpha, beta) =
            (f32::from_bits(self.problem.scale_bits), f32::from(u8::from(self.problem.residual.is_some())));
        let added = if self.problem.residual.is_some() { residual } else { out };
        let algorithm = sys::cublasLtMatmulAlgo_t { data: candidate.algorithm };
        let [w_layout, x_layout, c_layout, d_layout] = self.layouts.each_ref().map(|l| l.0);
        // SAFETY: the descriptors are live, alpha and beta are of the scale type and read during the call, the addresses
        // are valid for the layouts by the caller's promise, the workspace has the bytes that the algorithm asked for.
        let code = unsafe {
            sys::cublasLtMatmul(
                self.library.handle,
                descriptor.0,
                (&raw const alpha).cast(),
                pointer(w),
                w_layout,
                pointer(x),
                x_layout,
                (&raw const beta).cast(),
                pointer(added),
                c_layout,
                pointer(out),
                d_layout,
                &raw const algorithm,
                pointer(workspace),
                candidate.workspace_bytes,
                std::ptr::with_exposed_provenance_mut(stream),
            )
        };
        code.result().map_err(|e| refused(said("a product", e)))
    }
}
