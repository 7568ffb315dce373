// The device that tests run kernels on: this processor.
//
// A generated kernel is compiled by the host's C++ compiler with this file in the place of CUDA. Blocks run one after the
// other; the threads of a block are fibers; barriers and warp operations are the points at which they take turns. Which warp
// is next is drawn at random, and a warp runs until all its lanes wait at a barrier or are done: so a missing barrier shows
// as a wrong result under some seed. Shared memory holds NaNs until it is written. A barrier that not every thread of a
// block reaches, and a launch that never ends, abort with a message.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

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
constexpr size_t STACK = 128 << 10;

// A place to go on from. swapcontext saves the signal mask by a system call, which would be most of the time.
#if defined(__x86_64__)
extern "C" __attribute__((visibility("hidden"))) void shim_switch(void** from, void* to);
asm(R"(
    .text
    .hidden shim_switch
    .globl shim_switch
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
struct Context {
    void* stack = nullptr;
    void start(char* memory, size_t bytes, void (*function)()) {
        // Registers of no importance, and the address to return to: the stack is where a call would have left it.
        void** top = (void**)(((uintptr_t)memory + bytes) & ~(uintptr_t)15);
        top[-2] = (void*)function;
        stack = top - 8;
    }
    void go(Context& to) { shim_switch(&stack, to.stack); }
};
#else
struct Context {
    ucontext_t context;
    void start(char* memory, size_t bytes, void (*function)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = memory, context.uc_stack.ss_size = bytes, context.uc_link = nullptr;
        makecontext(&context, function, 0);
    }
    void go(Context& to) { swapcontext(&context, &to.context); }
};
#endif

struct Fiber {
    Context context;
    dim3 thread;
    int index = 0;
    bool is_done = false, is_waiting = false;
    int generation = 0;
};

inline dim3 block_index, block_size, grid_size;
inline Context scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<char*> stacks;
inline int current = 0, threads = 0, live = 0;
inline int arrived = 0, generation = 0;
inline int warp_arrived[MAX_WARPS], warp_generation[MAX_WARPS], warp_live[MAX_WARPS];
inline unsigned char exchange[MAX_WARPS][WARP][8];
inline void (*entry)(void**);
inline void** arguments;
inline long block_number = 0;
// Of the block: dynamic, and what it has used of its own.
inline size_t shared_bytes = 0;
alignas(64) inline unsigned char dynamic_shared[256 << 10];

inline void stop(const char* what) {
    fprintf(stderr, "kernel: %s (block %u, thread %u)\n", what, block_index.x, fibers[current].thread.x);
    abort();
}
inline void yield() { fibers[current].context.go(scheduler); }
inline void run_fiber() {
    entry(arguments);
    Fiber& self = fibers[current];
    self.is_done = true;
    --live;
    // Lanes that have returned are not waited for by their warp, as on a device.
    const int warp = self.index / WARP;
    if (--warp_live[warp] > 0 && warp_arrived[warp] == warp_live[warp]) {
        warp_arrived[warp] = 0;
        ++warp_generation[warp];
    }
    self.context.go(scheduler);
}
inline void block_barrier() {
    Fiber& self = fibers[current];
    self.generation = generation;
    if (++arrived == threads) {
        arrived = 0;
        ++generation;
        return;
    }
    self.is_waiting = true;
    while (generation == self.generation) yield();
    self.is_waiting = false;
}
inline void warp_barrier() {
    const int warp = fibers[current].index / WARP, own = warp_generation[warp];
    if (++warp_arrived[warp] == warp_live[warp]) {
        warp_arrived[warp] = 0;
        ++warp_generation[warp];
        return;
    }
    while (warp_generation[warp] == own) yield();
}
template <class T> inline T exchanged(unsigned mask, T value, int from) {
    const int warp = fibers[current].index / WARP, lane = fibers[current].index % WARP;
    memcpy(exchange[warp][lane], &value, sizeof(T));
    warp_barrier();
    T result;
    memcpy(&result, exchange[warp][from & (WARP - 1)], sizeof(T));
    warp_barrier();
    // What a lane outside of the mask has is not there to be read.
    if (!(mask >> lane & mask >> (from & (WARP - 1)) & 1)) memset(&result, 0xff, sizeof(T));
    return result;
}

// Runs a grid. Kernels without barriers need no fibers.
inline void run(void (*kernel)(void**), bool has_barriers, dim3 grid, dim3 block, unsigned shared, void** args, unsigned seed) {
    grid_size = grid, block_size = block, entry = kernel, arguments = args;
    threads = (int)(block.x * block.y * block.z);
    while ((int)stacks.size() < threads) stacks.push_back((char*)malloc(STACK));
    fibers.resize(threads);
    unsigned random = seed * 2654435761u + 1;
    for (unsigned z = 0; z < grid.z; ++z)
        for (unsigned y = 0; y < grid.y; ++y)
            for (unsigned x = 0; x < grid.x; ++x) {
                block_index.x = x, block_index.y = y, block_index.z = z;
                ++block_number;
                memset(dynamic_shared, 0xff, shared);
                shared_bytes = shared;
                for (int i = 0; i < threads; ++i) {
                    Fiber& f = fibers[i];
                    f.index = i, f.is_done = false, f.is_waiting = false;
                    f.thread.x = i % block.x, f.thread.y = i / block.x % block.y, f.thread.z = i / (block.x * block.y);
                }
                if (!has_barriers) {
                    for (current = 0; current < threads; ++current) kernel(args);
                    continue;
                }
                arrived = 0, live = threads;
                const int warps = (threads + WARP - 1) / WARP;
                for (int w = 0; w < warps; ++w) {
                    warp_arrived[w] = 0;
                    warp_live[w] = threads - w * WARP < WARP ? threads - w * WARP : WARP;
                }
                for (int i = 0; i < threads; ++i) fibers[i].context.start(stacks[i], STACK, run_fiber);
                int idle = 0;
                while (live) {
                    random = random * 1664525u + 1013904223u;
                    const int warp = (int)((random >> 16) % warps), before = generation;
                    bool moved_any = false;
                    for (bool moved = true; moved && generation == before;) {
                        moved = false;
                        for (current = warp * WARP; current < threads && current < (warp + 1) * WARP; ++current) {
                            Fiber& f = fibers[current];
                            if (f.is_done || (f.is_waiting && f.generation == generation)) continue;
                            moved = moved_any = true;
                            scheduler.go(f.context);
                        }
                    }
                    idle = moved_any ? 0 : idle + 1;
                    if (idle > 4096) {
                        current = 0;
                        stop("a barrier that not every thread reaches");
                    }
                }
            }
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

#define threadIdx (device::fibers[device::current].thread)
#define blockIdx device::block_index
#define blockDim device::block_size
#define gridDim device::grid_size
#define __syncthreads() device::block_barrier()
#define __syncwarp(...) device::warp_barrier()
template <class T> inline T __shfl_xor_sync(unsigned lanes, T v, int mask) {
    return device::exchanged(lanes, v, (device::fibers[device::current].index % 32) ^ mask);
}
template <class T> inline T __shfl_sync(unsigned lanes, T v, int from) { return device::exchanged(lanes, v, from); }
template <class T> inline T __shfl_down_sync(unsigned lanes, T v, int by) {
    const int lane = device::fibers[device::current].index % 32;
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
