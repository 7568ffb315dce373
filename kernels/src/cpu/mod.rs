//! Kernels for the CPU.
