//! Instruction sets: what this processor can run, and what a caller asks for.
//!
//! Kernels take an [`Isa`] from their caller and never probe the machine themselves, so that a test or a developer knob
//! can force a lower level. Invariant: an entry point given an unavailable level runs the highest available one below
//! it ([`Isa::clamp`]); it never executes an instruction the processor lacks.
//!
//! AMX is no level: kernels of [`Isa::Avx512`] use it where [`amx`] says so, which [`forbid_amx`] prevents.

use std::sync::OnceLock;

/// A level of vector instructions; a later level is a superset of the earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust: whatever the compiler makes of it on any architecture.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Isa {
    /// The highest level this processor runs.
    pub fn detect() -> Isa {
        features().isa
    }

    /// Every level, lowest first.
    pub const ALL: [Isa; 3] = [Isa::Portable, Isa::Avx2, Isa::Avx512];

    /// Whether this processor runs the level.
    pub fn is_available(self) -> bool {
        self <= Isa::detect()
    }

    /// This level, or the highest available one below it.
    pub fn clamp(self) -> Isa {
        self.min(Isa::detect())
    }

    /// The name used in kernel names and messages.
    pub const fn name(self) -> &'static str {
        match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    /// The level of that name.
    pub fn parse(name: &str) -> Option<Isa> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name)
    }
}

/// What the processor offers beyond its level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Highest level available.
    pub isa: Isa,
    /// `VDPBF16PS` exists.
    pub avx512_bf16: bool,
    /// Arithmetic in f16 exists (AVX512-FP16).
    pub avx512_fp16: bool,
    /// `VPDPBUSD` exists.
    pub avx512_vnni: bool,
    /// First-level data cache of a core; [`SMALL_L1`] where the processor does not say.
    pub l1_bytes: usize,
    /// Second-level cache of a core; [`SMALL_L2`] where the processor does not say.
    pub l2_bytes: usize,
    /// Last-level cache that this core has a part of; [`USUAL_L3`] where the processor does not say.
    pub l3_bytes: usize,
}

/// The smallest first-level cache that kernels are laid out for.
pub const SMALL_L1: usize = 32 << 10;

/// The smallest second-level cache that kernels are laid out for.
pub const SMALL_L2: usize = 512 << 10;

/// A last-level cache of today's servers, as one core sees it.
pub const USUAL_L3: usize = 32 << 20;

/// The features of this processor, probed once.
pub fn features() -> &'static Features {
    static FEATURES: OnceLock<Features> = OnceLock::new();
    FEATURES.get_or_init(probe)
}

#[cfg(target_arch = "x86_64")]
fn probe() -> Features {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let avx512 = avx2
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    let isa = match (avx512, avx2) {
        (true, _) => Isa::Avx512,
        (_, true) => Isa::Avx2,
        _ => Isa::Portable,
    };
    let avx512_bf16 = avx512 && is_x86_feature_detected!("avx512bf16");
    Features {
        isa,
        avx512_bf16,
        avx512_fp16: avx512 && is_x86_feature_detected!("avx512fp16"),
        avx512_vnni: avx512 && is_x86_feature_detected!("avx512vnni"),
        l1_bytes: cache_bytes(1).unwrap_or(SMALL_L1),
        l2_bytes: l2_bytes().max(SMALL_L2),
        l3_bytes: cache_bytes(3).unwrap_or(USUAL_L3),
    }
}

/// What AMX multiplies in this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Amx {
    /// `TDPBF16PS` exists, and so do `VDPBF16PS` and the conversions that come with that.
    pub bf16: bool,
    /// `TDPFP16PS` exists.
    pub f16: bool,
    /// `TDPBUSD` exists.
    pub int8: bool,
}

static AMX: OnceLock<Amx> = OnceLock::new();

/// What AMX multiplies, found out once. Where it multiplies anything the first call asks the system for the use of tiles, after
/// which Linux refuses threads signal stacks that are too small for them: ask where it is a candidate, no earlier.
pub fn amx() -> Amx {
    *AMX.get_or_init(probe_amx)
}

/// Does without AMX in this process, and so without asking for it. Whether it came before [`amx`].
pub fn forbid_amx() -> bool {
    AMX.set(Amx::default()).is_ok()
}

#[cfg(target_arch = "x86_64")]
fn probe_amx() -> Amx {
    use std::arch::x86_64::{__cpuid_count, _xgetbv};
    #[target_feature(enable = "xsave")]
    fn saved_states() -> u64 {
        // SAFETY: the system has said that it uses XSAVE (AVX is available).
        #[allow(unused_unsafe)]
        unsafe {
            _xgetbv(0)
        }
    }
    if features().isa < Isa::Avx512 {
        return Amx::default();
    }
    // SAFETY: every x86-64 processor has the instruction; newer compilers know that.
    #[allow(unused_unsafe)]
    let cpuid = |leaf, part| unsafe { __cpuid_count(leaf, part) };
    // SAFETY: XSAVE is there where AVX is.
    let found = amx_of(cpuid, unsafe { saved_states() });
    let found = Amx { bf16: found.bf16 && features().avx512_bf16, ..found };
    if found != Amx::default() && tiles_permitted() { found } else { Amx::default() }
}

#[cfg(not(target_arch = "x86_64"))]
fn probe_amx() -> Amx {
    Amx::default()
}

/// What a processor multiplies that answers `CPUID` so, under a system that saves these states.
#[cfg(target_arch = "x86_64")]
pub fn amx_of(cpuid: impl Fn(u32, u32) -> std::arch::x86_64::CpuidResult, saved: u64) -> Amx {
    // XCR0: bits 17 and 18, the state of tiles is saved.
    const TILE_STATE: u64 = 0b11 << 17;
    // Virtual machines may show the features of leaf 7 without palettes: `LDTILECFG` then refuses what describes registers.
    const PALETTES: u32 = 0x1d;
    if cpuid(0, 0).eax < PALETTES || saved & TILE_STATE != TILE_STATE {
        return Amx::default();
    }
    // Of palette 1, EBX: registers above, bytes of a row below; ECX: rows.
    let (palettes, first) = (cpuid(PALETTES, 0).eax, cpuid(PALETTES, 1));
    let (registers, row_bytes, rows) = (first.ebx >> 16, first.ebx & 0xffff, first.ecx & 0xffff);
    let is_whole = palettes >= 1 && registers >= 8 && row_bytes >= 64 && rows >= 16;
    // Leaf 7, EDX: bit 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8. Its second part, if there is one, EAX: bit 21 AMX-FP16.
    let has = |bit: u32| cpuid(7, 0).edx >> bit & 1 == 1;
    let usable = is_whole && has(24);
    let f16 = usable && cpuid(7, 0).eax >= 1 && cpuid(7, 1).eax >> 21 & 1 == 1;
    Amx { bf16: usable && has(22), f16, int8: usable && has(25) }
}

/// Asks for the use of tile registers, which makes room for them where the system keeps a thread's state. Linux grants it to
/// the whole process, once and for all; other systems are not asked.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn tiles_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
    const TILE_DATA: i64 = 18;
    let answer: i64;
    // SAFETY: a system call that reads no memory of ours; it clobbers what is named.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => answer,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer == 0
}

#[cfg(all(target_arch = "x86_64", not(target_os = "linux")))]
fn tiles_permitted() -> bool {
    false
}

/// What the processor says, 0 where it does not.
#[cfg(target_arch = "x86_64")]
fn l2_bytes() -> usize {
    use std::arch::x86_64::__cpuid;
    // Leaf 0x8000_0006 of AMD and Intel has KiB in the upper half of ECX.
    const LEAF: u32 = 0x8000_0006;
    // SAFETY: every x86-64 processor has the instruction; newer compilers know that.
    #[allow(unused_unsafe)]
    let leaf = |at| unsafe { __cpuid(at) };
    if leaf(0x8000_0000).eax < LEAF {
        return 0;
    }
    (leaf(LEAF).ecx >> 16) as usize * 1024
}

/// What the processor says of a level's cache for data.
#[cfg(target_arch = "x86_64")]
fn cache_bytes(level: u32) -> Option<usize> {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    // Both leaves list one cache each, in the same format: Intel's, and AMD's in its own range.
    const LEAVES: [(u32, u32); 2] = [(0, 4), (0x8000_0000, 0x8000_001d)];
    // SAFETY: every x86-64 processor has the instruction; newer compilers know that.
    #[allow(unused_unsafe)]
    let (first, nth) = (|at| unsafe { __cpuid(at) }, |at, n| unsafe { __cpuid_count(at, n) });
    let of_leaf = |(range, leaf): (u32, u32)| {
        if first(range).eax < leaf {
            return None;
        }
        // EAX: the kind in bits 0 to 4 (0: no more caches, 2: for instructions), the level in 5 to 7; EBX: line, partitions
        // and ways, each less one; ECX: sets less one.
        let caches = (0..8).map(|n| nth(leaf, n)).take_while(|c| c.eax & 31 != 0);
        let cache = caches.filter(|c| c.eax >> 5 & 7 == level && c.eax & 31 != 2).last()?;
        let ways = ((cache.ebx >> 22) + 1) as usize * ((cache.ebx >> 12 & 1023) + 1) as usize;
        Some(ways * ((cache.ebx & 4095) + 1) as usize * (cache.ecx as usize + 1))
    };
    LEAVES.into_iter().find_map(of_leaf)
}

#[cfg(not(target_arch = "x86_64"))]
fn probe() -> Features {
    Features {
        isa: Isa::Portable,
        avx512_bf16: false,
        avx512_fp16: false,
        avx512_vnni: false,
        l1_bytes: SMALL_L1,
        l2_bytes: SMALL_L2,
        l3_bytes: USUAL_L3,
    }
}
