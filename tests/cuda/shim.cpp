// What runs the threads of a kernel's blocks: see `shim.h`.
//
// Blocks run one after the other; the threads of a block are fibers; barriers and warp operations are the points at which
// they take turns. Which warp is next is drawn at random, and a warp runs until all its lanes wait at a barrier or are done:
// so a missing barrier shows as a wrong result under some seed. A barrier that not every thread of a block reaches, and a
// launch that never ends, abort with a message.
#include "shim.h"

#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>

namespace device {

dim3 block_index, block_size, grid_size;
Thread* self;
unsigned char exchange[2][MAX_WARPS][WARP][8];
int warp_generation[MAX_WARPS];
long block_number = 0;
size_t shared_bytes = 0;
alignas(64) unsigned char dynamic_shared[256 << 10];

namespace {

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

struct Fiber : Thread {
    Context context;
    // Waiting: at the barrier of the block or of its warp that was the next one when it came there.
    bool is_done = false, is_waiting = false, is_in_warp = false;
    int generation = 0, warp_turn = 0;
};

Context scheduler;
std::vector<Fiber> fibers;
std::vector<char*> stacks;
int threads = 0, live = 0;
int arrived = 0, generation = 0;
int warp_arrived[MAX_WARPS], warp_live[MAX_WARPS];
void (*entry)(void**);
void** arguments;

Fiber& running() { return *static_cast<Fiber*>(self); }

// When it goes on, it is the one that runs again.
void yield() { running().context.go(scheduler); }

bool can_run(const Fiber& fiber) {
    if (fiber.is_done || (fiber.is_waiting && fiber.generation == generation)) return false;
    return !(fiber.is_in_warp && fiber.warp_turn == warp_generation[fiber.index / WARP]);
}

// The next lane of its warp that can; the scheduler, if none can. Most of the time of a kernel goes by here.
void take_turns() {
    Fiber& fiber = running();
    const int first = fiber.index / WARP * WARP, end = first + WARP < threads ? first + WARP : threads;
    for (int i = fiber.index + 1; i != fiber.index; ++i) {
        if (i >= end) i = first;
        if (i == fiber.index) break;
        if (can_run(fibers[i])) {
            self = &fibers[i];
            fiber.context.go(fibers[i].context);
            return;
        }
    }
    yield();
}

void run_fiber() {
    entry(arguments);
    Fiber& fiber = running();
    fiber.is_done = true;
    --live;
    // Lanes that have returned are not waited for by their warp, as on a device.
    const int warp = fiber.index / WARP;
    if (--warp_live[warp] > 0 && warp_arrived[warp] == warp_live[warp]) {
        warp_arrived[warp] = 0;
        ++warp_generation[warp];
    }
    fiber.context.go(scheduler);
}

}  // namespace

void stop(const char* what) {
    fprintf(stderr, "kernel: %s (block %u, thread %u)\n", what, block_index.x, self->place.x);
    abort();
}

void block_barrier() {
    Fiber& fiber = running();
    fiber.generation = generation;
    if (++arrived == threads) {
        arrived = 0;
        ++generation;
        return;
    }
    fiber.is_waiting = true;
    while (generation == fiber.generation) yield();
    fiber.is_waiting = false;
}

void warp_barrier() {
    Fiber& fiber = running();
    const int warp = fiber.index / WARP;
    fiber.warp_turn = warp_generation[warp];
    if (++warp_arrived[warp] == warp_live[warp]) {
        warp_arrived[warp] = 0;
        ++warp_generation[warp];
        return;
    }
    fiber.is_in_warp = true;
    while (warp_generation[warp] == fiber.warp_turn) take_turns();
    fiber.is_in_warp = false;
}

void run(void (*kernel)(void**), bool has_barriers, dim3 grid, dim3 block, unsigned shared, void** args, unsigned seed) {
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
                    f.index = i, f.is_done = false, f.is_waiting = false, f.is_in_warp = false;
                    f.place.x = i % block.x, f.place.y = i / block.x % block.y, f.place.z = i / (block.x * block.y);
                }
                if (!has_barriers) {
                    for (Fiber& f : fibers) {
                        self = &f;
                        kernel(args);
                    }
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
                        for (int i = warp * WARP; i < threads && i < (warp + 1) * WARP; ++i) {
                            Fiber& f = fibers[i];
                            if (!can_run(f)) continue;
                            moved = moved_any = true;
                            self = &f;
                            scheduler.go(f.context);
                        }
                    }
                    idle = moved_any ? 0 : idle + 1;
                    if (idle > 4096) {
                        self = &fibers[0];
                        stop("a barrier that not every thread reaches");
                    }
                }
            }
}

}  // namespace device
