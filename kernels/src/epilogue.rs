//! The border between a contraction and what is done with its results.

/// Consumes finished f32 results of a contraction while they are hot in cache.
///
/// The results form a matrix of `rows x cols`: output rows by output channels for a GEMM, output pixels
/// (batch, height, width flattened) by output channels for a convolution. A block is handed over exactly once, after
/// its whole reduction; blocks are disjoint and together cover the matrix; several threads call at once.
pub trait Epilogue: Sync {
    /// Processes the block whose first element is result `(row0, col0)`.
    ///
    /// `acc` points to `rows x cols` f32 results, row `r` at `acc + r * ld`. The implementation may use `acc` as
    /// scratch and is responsible for storing the results wherever they belong.
    ///
    /// # Safety
    /// `acc` must be valid for reads and writes of the block, and whatever memory the implementation was built over
    /// must be valid for the rows and columns named here.
    unsafe fn apply(&self, acc: *mut f32, ld: usize, row0: usize, col0: usize, rows: usize, cols: usize);
}
