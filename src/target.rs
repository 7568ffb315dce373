//! What a program is compiled for.

use std::fmt;

/// Kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// The processor that runs this process.
    Cpu,
    /// An NVIDIA GPU.
    Cuda {
        /// Compute capability: 90 for 9.0.
        arch: u32,
    },
}

/// A device as far as the compiler cares: two equal targets get the same program.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Level of vector instructions of the processor, for what runs there.
    pub isa: oxidiff_kernels::isa::Isa,
}

impl Target {
    /// The processor this runs on, at its best instruction set or the one that `OXIDIFF_ISA` names.
    pub fn host() -> Self {
        let forced = crate::config::config().isa.as_deref().and_then(oxidiff_kernels::isa::Isa::parse);
        let isa = forced.unwrap_or_else(oxidiff_kernels::isa::Isa::detect).clamp();
        Self { kind: DeviceKind::Cpu, isa }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            DeviceKind::Cpu => write!(f, "cpu/{}", self.isa.name()),
            DeviceKind::Cuda { arch } => write!(f, "cuda/sm_{arch}"),
        }
    }
}
