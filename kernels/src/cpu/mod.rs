//! Kernels for the CPU.
//!
//! [`gemm`] and [`conv`] are the two contractions on top of one blocked engine ([`gemm_driver`]): an operand source
//! copies rows of A into L2 scratch in the form a micro-kernel reads, B comes as packed panels ([`pack`]), and finished
//! blocks go to an [`Epilogue`](crate::epilogue::Epilogue).
//!
//! [`tile_exec`] runs tile programs, as epilogues or as loops of their own, on top of [`simd`] and [`math`]; [`norm`] hands
//! them statistics. [`integers`] runs loops over integers. [`softmax`], [`reduce`], [`copy`], [`gather`],
//! [`interpolate`] and [`resample`] are what a program cannot say.

// Operands of a kernel are pointers, strides and sizes; bundling them would only rename them.
#![allow(clippy::too_many_arguments)]

use std::fmt;

use crate::dtype::DType;
use crate::pool::OutOfMemory;

pub mod attention;
mod attention_few;
mod attention_kernel;
pub mod bench;
pub mod conv;
pub mod conv_algorithm;
pub mod conv_choice;
pub(crate) mod conv_depthwise;
pub(crate) mod conv_direct;
pub(crate) mod conv_few;
pub mod conv_forms_verify;
#[cfg(target_arch = "x86_64")]
pub(crate) mod conv_taps;
pub mod conv_winograd;
pub mod conv_winograd_points;
pub mod copy;
pub mod few_rows_verify;
pub mod gather;
pub mod gemm;
#[cfg(target_arch = "x86_64")]
pub mod gemm_amx;
#[cfg(target_arch = "x86_64")]
pub mod gemm_avx2;
#[cfg(target_arch = "x86_64")]
pub mod gemm_avx512;
pub mod gemm_driver;
pub mod gemm_int8;
pub mod gemm_kernel;
pub mod gemm_portable;
pub mod gemm_split;
pub mod gemm_store;
pub mod gemm_swapped;
pub(crate) mod gemv;
pub mod integers;
pub mod integers_verify;
pub mod interpolate;
pub mod interpolate_verify;
pub mod math;
pub mod move_verify;
pub mod norm;
pub mod pack;
pub mod reduce;
pub mod reduce_verify;
pub mod resample;
pub mod scan;
pub mod simd;
#[cfg(target_arch = "x86_64")]
mod simd_avx2;
#[cfg(target_arch = "x86_64")]
mod simd_avx512;
mod simd_portable;
pub mod softmax;
mod tile_affine;
mod tile_bind;
pub mod tile_exec;
mod tile_exec_ops;
pub mod tile_exec_ref;
mod tile_exec_typed;
pub mod tile_exec_verify;
mod tile_layout;
mod tile_prepare;
pub mod verify;
mod winograd_grid;
mod winograd_tiles;
mod winograd_transform;

/// Why an entry point did not run. Nothing has been written then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelError {
    /// Scratch memory could not be allocated.
    OutOfMemory(OutOfMemory),
    /// The kernel family has no code for this element type.
    UnsupportedDType(DType),
    /// Sizes or strides contradict each other; the text names them.
    Shape(&'static str),
}

impl From<OutOfMemory> for KernelError {
    fn from(error: OutOfMemory) -> Self {
        KernelError::OutOfMemory(error)
    }
}

impl fmt::Display for KernelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelError::OutOfMemory(error) => error.fmt(f),
            KernelError::UnsupportedDType(dtype) => write!(f, "no kernel for element type {dtype:?}"),
            KernelError::Shape(what) => write!(f, "inconsistent sizes: {what}"),
        }
    }
}

impl std::error::Error for KernelError {}
