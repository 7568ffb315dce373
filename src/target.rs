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
    /// Operations a second of matrix units whose f32 operands are rounded to TF32; 0 where they take none.
    pub tf32_flops: u64,
    /// Bytes a second from its memory.
    pub bandwidth: u64,
    /// What fits into that; 0 where it is the host's.
    pub memory_bytes: u64,
    /// Nanoseconds from the end of a kernel to the start of the next.
    pub launch_ns: u64,
    /// Its multiprocessors; 0 where it has none.
    pub multiprocessors: u32,
    /// Bytes of its last cache.
    pub l2_bytes: u64,
}

/// A GPU of [`DEVICES`].
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    /// Its figures.
    pub profile: Profile,
    /// What else it is called, by its driver and by people, as [`plain_name`] has it.
    pub names: &'static [&'static str],
}

/// About what a kernel node of a CUDA graph takes from its predecessor's end to its start.
const LAUNCH_NS: u64 = 1500;

/// Multiprocessors; GFLOP/s in f32 and in 16 bits; GB/s; KiB of L2; GB of memory.
const fn gpu(name: &'static str, figures: [u64; 6], names: &'static [&'static str]) -> Gpu {
    let [multiprocessors, f32_gflops, half_gflops, gb_per_s, l2_kib, memory_gb] = figures;
    let profile = Profile {
        name,
        f32_flops: f32_gflops * 1_000_000_000,
        half_flops: half_gflops * 1_000_000_000,
        // From Ampere on half the rate of 16 bits, in all of the tables.
        tf32_flops: half_gflops * 500_000_000,
        bandwidth: gb_per_s * 1_000_000_000,
        memory_bytes: memory_gb * 1_000_000_000,
        launch_ns: LAUNCH_NS,
        multiprocessors: multiprocessors as u32,
        l2_bytes: l2_kib << 10,
    };
    Gpu { profile, names }
}

/// The same of Turing, whose matrix units take 16 bits only.
const fn turing(name: &'static str, figures: [u64; 6]) -> Gpu {
    let Gpu { profile, names } = gpu(name, figures, &[]);
    Gpu { profile: Profile { tf32_flops: 0, ..profile }, names }
}

/// NVIDIA's published figures: dense tensor cores for 16 bits, with sums in f32 (of which GeForce cards have half the rate of
/// sums in f16), plain cores for f32, at the boost clock.
///
/// From the tables at the end of the architectures' whitepapers: Turing (T4, RTX 2080 Ti as the reference card), A100 (appendix
/// A), GA102 (RTX 3080, 3090), Ada (RTX 4080, 4090), H100 (SXM5 and PCIe), Blackwell for RTX (RTX 5080, 5090); from the data sheets
/// of A10, L4, L40S, A100 80GB, H200 and of DGX B200 (an eighth of it); for the others from the product pages' numbers of cores,
/// boost clock and memory speed: cores x 2 x clock, and twice that in 16 bits. Clocks of laptops depend on the power that their
/// makers allow: the highest is taken.
pub const DEVICES: &[Gpu] = &[
    turing("T4", [40, 8_100, 65_000, 320, 4 << 10, 16]),
    turing("RTX2080Ti", [68, 13_450, 53_800, 616, 5632, 11]),
    gpu("A10", [72, 31_200, 125_000, 600, 6 << 10, 24], &[]),
    gpu("RTX3060", [28, 12_700, 25_500, 360, 3 << 10, 12], &[]),
    gpu("RTX3080", [68, 29_800, 59_500, 760, 5 << 10, 10], &[]),
    gpu("RTX3090", [82, 35_600, 71_000, 936, 6 << 10, 24], &[]),
    gpu("A100", [108, 19_500, 312_000, 2039, 40 << 10, 80], &["a10080gb", "a100sxm480gb"]),
    gpu("A100-80GB-PCIe", [108, 19_500, 312_000, 1935, 40 << 10, 80], &["a100pcie80gb"]),
    gpu("A100-40GB", [108, 19_500, 312_000, 1555, 40 << 10, 40], &["a100sxm440gb", "a100pcie40gb"]),
    gpu("L4", [58, 30_300, 121_000, 300, 48 << 10, 24], &[]),
    gpu("L40S", [142, 91_600, 362_000, 864, 96 << 10, 48], &[]),
    gpu("RTX4060", [24, 15_100, 30_200, 272, 24 << 10, 8], &[]),
    gpu("RTX4060-Laptop", [24, 14_600, 29_100, 256, 32 << 10, 8], &[]),
    gpu("RTX4070", [46, 29_100, 58_300, 504, 36 << 10, 12], &[]),
    gpu("RTX4070-Laptop", [36, 20_000, 40_100, 256, 32 << 10, 8], &[]),
    gpu("RTX4080", [76, 48_700, 97_500, 717, 64 << 10, 16], &[]),
    gpu("RTX4080-Laptop", [58, 33_900, 67_700, 432, 48 << 10, 12], &[]),
    gpu("RTX4090", [128, 82_600, 165_200, 1008, 72 << 10, 24], &[]),
    gpu("RTX4090-Laptop", [76, 39_700, 79_400, 576, 64 << 10, 16], &[]),
    gpu("H100", [132, 66_900, 989_000, 3350, 50 << 10, 80], &["h100sxm", "h10080gbhbm3"]),
    gpu("H100-PCIe", [114, 51_200, 756_000, 2000, 50 << 10, 80], &[]),
    gpu("H200", [132, 66_900, 989_000, 4800, 50 << 10, 141], &["h200sxm"]),
    gpu("RTX5080", [84, 56_300, 112_600, 960, 64 << 10, 16], &[]),
    gpu("RTX5090", [170, 104_800, 209_500, 1792, 96 << 10, 32], &[]),
    gpu("B200", [148, 75_000, 2_250_000, 8000, 126 << 10, 180], &[]),
];

/// A name without what makes no difference: `NVIDIA GeForce RTX 4090 Laptop GPU` becomes `rtx4090laptop`.
fn plain_name(name: &str) -> String {
    let lower = name.to_lowercase();
    let words = lower.split(|c: char| !c.is_ascii_alphanumeric());
    words.filter(|word| !["nvidia", "geforce", "tesla", "gpu"].contains(word)).collect()
}

/// What a driver says of a GPU that it drives; 0 where it does not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attributes {
    /// The driver's name for it.
    pub name: String,
    /// Compute capability: 90 for 9.0.
    pub arch: u32,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Their highest clock.
    pub clock_khz: u32,
    /// That of the memory; there are two transfers a cycle.
    pub memory_clock_khz: u32,
    /// Width of the way to the memory.
    pub bus_bits: u32,
    /// Bytes of the L2.
    pub l2_bytes: u64,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

impl Attributes {
    /// What it does at most: the published figures if it is one of [`DEVICES`] and whole (a part of one, or another card of
    /// that name, has another number of multiprocessors), else what follows from its clocks; those of a common card of the
    /// architecture where the driver does not tell them.
    pub fn profile(&self) -> Profile {
        let published = Profile::named(&self.name).filter(|p| p.multiprocessors == self.multiprocessors);
        published.copied().or_else(|| self.estimate()).unwrap_or_else(|| *common(self.arch))
    }

    fn estimate(&self) -> Option<Profile> {
        let clock = u64::from(self.multiprocessors) * u64::from(self.clock_khz) * 1000;
        let bandwidth = 2 * u64::from(self.memory_clock_khz) * 1000 * u64::from(self.bus_bits) / 8;
        if clock == 0 || bandwidth == 0 {
            return None;
        }
        // Cores of a multiprocessor, and operations of its matrix units each cycle.
        let (cores, matrix): (u64, u64) = match self.arch {
            ..=79 => (64, 1024),
            80 => (64, 2048),
            81..=89 => (128, 1024),
            90..=99 => (128, 4096),
            100..=119 => (128, 8192),
            _ => (128, 1024),
        };
        let is_halved = self.name.to_lowercase().contains("geforce");
        let half_flops = clock * if is_halved { matrix / 2 } else { matrix };
        Some(Profile {
            name: "this GPU",
            f32_flops: clock * cores * 2,
            half_flops,
            tf32_flops: if self.arch < 80 { 0 } else { half_flops / 2 },
            bandwidth,
            memory_bytes: self.memory_bytes,
            launch_ns: LAUNCH_NS,
            multiprocessors: self.multiprocessors,
            l2_bytes: self.l2_bytes,
        })
    }
}

/// A common card of an architecture.
fn common(arch: u32) -> &'static Profile {
    let name = match arch {
        ..=79 => "T4",
        80 => "A100",
        81..=88 => "A10",
        89 => "L4",
        _ => "H100",
    };
    Profile::named(name).unwrap_or(&Profile::CPU)
}

impl Profile {
    /// A processor, roughly: a few cores, caches that hold what one step hands to the next, and steps that start by a
    /// function call.
    pub const CPU: Self = Self {
        name: "CPU",
        f32_flops: 100_000_000_000,
        half_flops: 100_000_000_000,
        tf32_flops: 0,
        bandwidth: 80_000_000_000,
        memory_bytes: 0,
        launch_ns: 0,
        multiprocessors: 0,
        l2_bytes: 0,
    };

    /// The one of [`DEVICES`] with that name, however it is written; never one of a similar name.
    pub fn named(name: &str) -> Option<&'static Self> {
        let name = plain_name(name);
        let is_it = |gpu: &&Gpu| plain_name(gpu.profile.name) == name || gpu.names.contains(&name.as_str());
        DEVICES.iter().find(is_it).map(|gpu| &gpu.profile)
    }
}

impl Target {
    /// What this kind of device does, where nothing else is known of it.
    pub fn profile(&self) -> &'static Profile {
        match self.kind {
            DeviceKind::Cpu => &Profile::CPU,
            DeviceKind::Cuda { arch } => common(arch),
        }
    }

    /// The processor this runs on, at its best instruction set or the one that `OXIDIFF_ISA` names.
    pub fn host() -> Self {
        let isa = crate::config::config().isa.unwrap_or_else(oxidiff_kernels::isa::Isa::detect).clamp();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_found_by_what_drivers_call_them() {
        let names = [
            ("Tesla T4", "T4"),
            ("NVIDIA GeForce RTX 2080 Ti", "RTX2080Ti"),
            ("NVIDIA GeForce RTX 4090", "RTX4090"),
            ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX4090-Laptop"),
            ("NVIDIA A10", "A10"),
            ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
            ("NVIDIA A100-SXM4-80GB", "A100"),
            ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
            ("NVIDIA L40S", "L40S"),
            ("NVIDIA H100 80GB HBM3", "H100"),
            ("NVIDIA H100 PCIe", "H100-PCIe"),
            ("NVIDIA B200", "B200"),
            ("rtx 4070 laptop", "RTX4070-Laptop"),
        ];
        for (called, name) in names {
            assert_eq!(Profile::named(called).map(|p| p.name), Some(name), "{called}");
        }
        for other in [
            "NVIDIA GeForce RTX 4070 Ti",
            "NVIDIA GeForce RTX 3060 Laptop GPU",
            "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
            "",
        ] {
            assert_eq!(Profile::named(other), None, "{other}");
        }
        for gpu in DEVICES {
            assert_eq!(Profile::named(gpu.profile.name), Some(&gpu.profile), "no two have one name");
        }
    }

    /// As `deviceQuery` of the CUDA samples prints them, in MHz and bits. Clocks of drivers are up to a tenth above those that
    /// the figures are published for.
    #[test]
    fn attributes_lead_to_the_published_figures() {
        let told = [
            ("Tesla T4", 75, 40, 1590, 5001, 256),
            ("NVIDIA GeForce RTX 2080 Ti", 75, 68, 1545, 7000, 352),
            ("NVIDIA A100-SXM4-40GB", 80, 108, 1410, 1215, 5120),
            ("NVIDIA A10", 86, 72, 1695, 6251, 384),
            ("NVIDIA GeForce RTX 3090", 86, 82, 1695, 9751, 384),
            ("NVIDIA L4", 89, 58, 2040, 6251, 192),
            ("NVIDIA GeForce RTX 4090", 89, 128, 2520, 10501, 384),
            ("NVIDIA H100 80GB HBM3", 90, 132, 1980, 2619, 5120),
        ];
        for (name, arch, multiprocessors, clock, memory_clock, bus_bits) in told {
            let (clock_khz, memory_clock_khz) = (clock * 1000, memory_clock * 1000);
            let told = Attributes {
                name: name.to_owned(),
                arch,
                multiprocessors,
                clock_khz,
                memory_clock_khz,
                bus_bits,
                ..Attributes::default()
            };
            let (published, estimate) = (told.profile(), told.estimate().unwrap());
            assert_eq!(Some(&published), Profile::named(name));
            let rates = |p: &Profile| [p.f32_flops, p.half_flops, p.bandwidth].map(|rate| rate as f64);
            for (found, want) in rates(&estimate).into_iter().zip(rates(&published)) {
                assert!((found / want - 1.0).abs() < 0.1, "{name}: {estimate:?}, {published:?}");
            }
            // A part of it, and one that the driver says nothing of.
            let half = Attributes { multiprocessors: multiprocessors / 2, ..told.clone() }.profile();
            assert_eq!(half.half_flops, estimate.half_flops / 2);
            let silent = Attributes { arch, name: "a card".to_owned(), ..Attributes::default() };
            assert_eq!(silent.profile(), *common(arch));
        }
    }
}
