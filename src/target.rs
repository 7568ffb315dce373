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

/// What a device does at most, in whole numbers so that equal profiles are equal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Profile {
    /// As people call it.
    pub name: &'static str,
    /// Operations a second in f32, outside of matrix units.
    pub f32_flops: u64,
    /// Operations a second in the faster of f16 and bf16, dense, summed in f32.
    pub half_flops: u64,
    /// Bytes a second from its memory.
    pub bandwidth: u64,
    /// What fits into that; 0 where it is the host's.
    pub memory_bytes: u64,
    /// Nanoseconds from the end of a kernel to the start of the next.
    pub launch_ns: u64,
}

const fn gpu(name: &'static str, f32_gflops: u64, half_gflops: u64, gb_per_s: u64, memory_gb: u64) -> Profile {
    Profile {
        name,
        f32_flops: f32_gflops * 1_000_000_000,
        half_flops: half_gflops * 1_000_000_000,
        bandwidth: gb_per_s * 1_000_000_000,
        memory_bytes: memory_gb * 1_000_000_000,
        // About what a kernel node of a CUDA graph takes from its predecessor's end to its start.
        launch_ns: 1500,
    }
}

/// Published figures of the makers: dense tensor cores for 16 bits, plain cores for f32.
pub const DEVICES: &[Profile] = &[
    gpu("T4", 8_100, 65_000, 320, 16),
    gpu("L4", 30_300, 121_000, 300, 24),
    gpu("A10", 31_200, 125_000, 600, 24),
    gpu("L40S", 91_600, 362_000, 864, 48),
    gpu("RTX3060", 12_700, 51_000, 360, 12),
    gpu("RTX3090", 35_600, 71_000, 936, 24),
    gpu("RTX4090", 82_600, 165_000, 1008, 24),
    gpu("A100", 19_500, 312_000, 2039, 80),
    gpu("H100", 66_900, 989_000, 3350, 80),
    gpu("H200", 66_900, 989_000, 4800, 141),
];

impl Profile {
    /// A processor, roughly: a few cores, caches that hold what one step hands to the next, and steps that start by a
    /// function call.
    pub const CPU: Self = Self {
        name: "CPU",
        f32_flops: 100_000_000_000,
        half_flops: 100_000_000_000,
        bandwidth: 80_000_000_000,
        memory_bytes: 0,
        launch_ns: 0,
    };

    /// The one of [`DEVICES`] with that name, in any case.
    pub fn named(name: &str) -> Option<&'static Self> {
        DEVICES.iter().find(|d| d.name.eq_ignore_ascii_case(name))
    }
}

impl Target {
    /// What this kind of device does, for choices that must be the same in every process.
    pub fn profile(&self) -> &'static Profile {
        match self.kind {
            DeviceKind::Cpu => &Profile::CPU,
            // A common card of that architecture.
            DeviceKind::Cuda { arch: ..=79 } => Profile::named("T4").unwrap_or(&Profile::CPU),
            DeviceKind::Cuda { arch: 80 } => Profile::named("A100").unwrap_or(&Profile::CPU),
            DeviceKind::Cuda { arch: 81..=88 } => Profile::named("A10").unwrap_or(&Profile::CPU),
            DeviceKind::Cuda { arch: 89 } => Profile::named("L4").unwrap_or(&Profile::CPU),
            DeviceKind::Cuda { .. } => Profile::named("H100").unwrap_or(&Profile::CPU),
        }
    }

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
