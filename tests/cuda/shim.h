// The device that tests run kernels on: this processor.
//
// A generated kernel is compiled by the host's C++ compiler with this file in the place of CUDA, and linked to what runs its
// threads, `shim.cpp`. Shared memory holds NaNs until it is written.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

namespace device {

constexpr int WARP = 32, MAX_WARPS = 32;

struct Thread {
    dim3 place;
    int index = 0;
};

// Of the launch, of which there is one at a time, whichever kernel's: what launches sees to that.
extern dim3 block_index, block_size, grid_size;
// The one that runs.
extern Thread* self;
// Between two barriers of a warp, of which this is how many there were, the one half is written and the other read.
extern unsigned char exchange[2][MAX_WARPS][WARP][8];
extern int warp_generation[MAX_WARPS];
extern long block_number;
// Of the block: dynamic, and what it has used of its own.
extern size_t shared_bytes;
extern unsigned char dynamic_shared[256 << 10];

void stop(const char* what);
void block_barrier();
void warp_barrier();
// Runs a grid. Kernels without barriers need no fibers.
void run(void (*kernel)(void**), bool has_barriers, dim3 grid, dim3 block, unsigned shared, void** args, unsigned seed);

template <class T> inline T exchanged(unsigned mask, T value, int from) {
    const int warp = self->index / WARP, lane = self->index % WARP;
    auto& values = exchange[warp_generation[warp] & 1][warp];
    memcpy(values[lane], &value, sizeof(T));
    warp_barrier();
    T result;
    memcpy(&result, values[from & (WARP - 1)], sizeof(T));
    // What a lane outside of the mask has is not there to be read.
    if (!(mask >> lane & mask >> (from & (WARP - 1)) & 1)) memset(&result, 0xff, sizeof(T));
    return result;
}

// Static shared memory: NaNs at the start of each block.
struct Fresh {
    long block = -1;
    void poison(void* memory, size_t bytes) {
        if (block == block_number) return;
        memset(memory, 0xff, bytes), block = block_number;
        // More than that has to be asked for.
        shared_bytes += bytes;
        if (shared_bytes > 48 << 10) stop("more than 48 KiB of shared memory");
    }
};

}  // namespace device

#define threadIdx device::self->place
#define blockIdx device::block_index
#define blockDim device::block_size
#define gridDim device::grid_size
#define __syncthreads() device::block_barrier()
#define __syncwarp(...) device::warp_barrier()
template <class T> inline T __shfl_xor_sync(unsigned lanes, T v, int mask) {
    return device::exchanged(lanes, v, device::self->index % 32 ^ mask);
}
template <class T> inline T __shfl_sync(unsigned lanes, T v, int from) { return device::exchanged(lanes, v, from); }
template <class T> inline T __shfl_down_sync(unsigned lanes, T v, int by) {
    const int lane = device::self->index % 32;
    return device::exchanged(lanes, v, lane + by > 31 ? lane : lane + by);
}
inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
inline float device_fdividef(float a, float b) { return std::fabs(b) > 8.507059e37f && std::isfinite(b) ? 0.0f : a / b; }
inline float device_expf(float x) { return expf(x); }
#define __fdividef device_fdividef
#define __expf device_expf

#define OX_FN inline
#define OX_SHARED(type, name, count)                                                                                    \
    alignas(16) static type name[count];                                                                                \
    static device::Fresh name##_fresh;                                                                                  \
    name##_fresh.poison(name, sizeof name)
#define OX_DYNAMIC_SHARED(type, name) type* name = (type*)device::dynamic_shared

inline float f16_to_f32(unsigned short bits) {
    const unsigned sign = (unsigned)(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    if (exponent) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
    const float x = (float)fraction * 5.9604644775390625e-8f;
    return sign ? -x : x;
}
inline unsigned short f32_to_f16(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return (unsigned short)(sign | 0x7fffu);
    if (magnitude >= 0x477ff000u) return (unsigned short)(sign | 0x7c00u);
    if (magnitude < 0x38800000u) {
        const float scaled = __uint_as_float(magnitude) * 16777216.0f;
        return (unsigned short)(sign | (unsigned)nearbyintf(scaled));
    }
    const unsigned rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return (unsigned short)(sign | (rounded - 0x38000000u) >> 13);
}
