// A stand-in for libcuda.so.1: device memory is the host's, an image is a shared library made of the same kernel text by the
// host's compiler (shim.h), a launch runs it. Launches and graphs are counted, so that a test can ask what happened.
//
// There are two devices. What belongs to one (memory, kernels, streams, graphs) is refused where the other's context is current.
// FAKE_VERSION and FAKE_ARCH in the environment say which driver and which devices these are: 13000 and 80 else.
//
// Work is done when it is given, or after `fake_async(seed)` as late as the driver allows: it lies in its stream's queue until
// somebody waits for it, and the seed says which other streams run meanwhile. Streams that tests name by a number do not wait for
// the default one, nor it for them, as torch's; those made with flag 0 do. A synchronous copy to the device returns when the
// bytes are staged: they arrive in the order of the default stream.
//
// Refused as by the driver: launches that no device can do; in a capture, what a capture does not allow, which also ends it; a
// captured stream is given nothing to do. Seen as faults of the caller (`fake_faults`): a module that is unloaded while its
// kernels are queued, and a launch of what was unloaded.
//
// An allocation lies between pages that nobody may touch; a launch that does is an illegal address, as on a device. Which end
// of the allocation meets its page is up to the test: an address that is out of bounds by less than a page shows where it does.
#undef _FORTIFY_SOURCE  // Launches that fail are left by a jump from a fiber's stack.
#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

typedef int Result;
typedef void (*Emulate)(const unsigned* grid, const unsigned* block, unsigned shared, void** args, unsigned seed);

struct Module {
    void *context, *library;
    bool is_gone = false;
};
struct Function {
    Module* module;
    Emulate emulate;
    std::string name;
    // Bytes of each parameter.
    std::vector<size_t> sizes;
    // Of a library: its kernels are functions of the host.
    void (*host)(void*) = nullptr;
    // Shared memory that a launch may ask for.
    unsigned room = 48 << 10;
};
struct Params {
    Function* function;
    unsigned grid[3], block[3], shared;
    void** parameters;
    void **extra, *kernel, *context;
};
enum Kind { KERNEL, HOST, CHILD, FILL, COPY };
struct Graph;
struct Node {
    Kind kind;
    Function* function;
    unsigned grid[3], block[3], shared;
    std::vector<uint64_t> words;
    // Of a library's kernel: whether it is launched as the library asked for, beside its parameters.
    bool is_as_asked = false;
    Graph* owner = nullptr;
    // Where its parameters are, for those who ask.
    std::vector<void*> parameters;
    std::vector<Node> child;
    // Bytes that are copied, or words that are written.
    uint64_t to, from;
    size_t count;
    unsigned word;
};
struct Graph {
    std::vector<Node*> nodes;
};
struct Queue;
// Up to where a queue has to be done.
typedef std::pair<std::shared_ptr<Queue>, uint64_t> Moment;
struct Exec {
    std::vector<Node> nodes;
    std::vector<Node*> origin;
    size_t bytes = 0;
    // A graph does not run beside itself.
    Moment last;
};
// What a stream is given goes there, from the begin of a capture to its end.
struct Capture {
    Graph* graph;
    int mode;
    const void* thread;
    bool is_invalid = false;
};
typedef std::shared_ptr<Capture> Captured;
struct Work {
    std::function<int()> run;
    std::vector<Moment> after;
    // Whose kernels these are.
    std::vector<Module*> modules;
};
// A stream's work, in order: how much was given, how much is done.
struct Queue {
    void *context, *handle;
    bool is_blocking;
    std::deque<Work> work;
    uint64_t given = 0, done = 0;
    Captured capture;
};

static std::mutex lock;
// Streams: those made here by their handle, the default one and those that tests made up by context and name.
static std::map<void*, std::shared_ptr<Queue>> streams;
static std::map<std::pair<void*, void*>, std::shared_ptr<Queue>> named;
static uint64_t next_stream = 0x5000000000;
// All that may have something to do.
static std::vector<std::shared_ptr<Queue>> queues;
static std::vector<Captured> captures;
// 0: work is done at once.
static unsigned late_seed = 0, late_state = 0;
// Of 256: how often something runs that nobody waits for.
static unsigned haste = 0;
// What queued work ended in: told by whatever waits, from then on.
static int sticky = 0;
// Which step to a graph fails.
enum Step { NO_STEP, THE_CAPTURE, A_CHILD, MADE_READY, PUT_THERE, LAUNCHED };
static int refused_step = NO_STEP;
// What libraries leave in a graph: a kernel; other work; a kernel of which nobody can say how it is launched; two kernels; two of
// which the second begins before the first has ended; two beside each other.
enum Shape { ONE_KERNEL, NO_KERNEL, UNCOPIED, TWO_KERNELS, OVERLAPPING, BRANCHED };
static int library_shape = ONE_KERNEL;
// Graphs that were put into others.
static long children = 0;
static long faults = 0;
static unsigned seed = 1;
static long counts[9];
// Which stream waits for which: (before, after).
static std::vector<std::pair<void*, void*>> waits;
// Milliseconds that everything so far has taken: made up, so that a test knows what is fastest.
static double clock_ms = 0, kernel_ms = 2;
struct Record {
    void* stream;
    Moment moment;
    double at = 0;
    Captured capture;
};
struct Event {
    bool has_time;
    std::shared_ptr<Record> record;
};
// As the driver has it: of each thread.
static thread_local void* current_context = nullptr;
enum { GLOBAL, THREAD_LOCAL, RELAXED };
static thread_local int capture_mode = GLOBAL;
static const int DEVICES = 2;
static void* const CONTEXTS[DEVICES] = {(void*)0x100, (void*)0x101};
static long launched[DEVICES];
// Memory that lies on a device: from an address on, bytes and context. Tensors of tests may lie there too.
static std::map<uint64_t, std::pair<size_t, void*>> owned;
static std::mutex owned_lock;
enum { LAUNCHES, GRAPHS, GRAPH_LAUNCHES, UPDATES, ALLOCATIONS, FREES, WAITS, WRITES, UNLOADS };
// Memory of the device that a graph takes, and what all of them hold.
static size_t graph_bytes = 0, held_bytes = 0;
static char device_name[64] = "this processor";
static int device_attributes[5] = {108, 0, 0, 0, 0};
// What a block may ask for, of devices that are opened from now on; 0: as much as blocks of that architecture may.
static int block_bytes = 0;
static const int SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, WRONG_CONTEXT = 201, WRONG_HANDLE = 400, ILLEGAL_STATE = 401,
                 NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
                 CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908;

static int current_device() {
    for (int i = 0; i < DEVICES; ++i)
        if (current_context == CONTEXTS[i]) return i;
    return -1;
}
static void own(uint64_t at, size_t bytes, void* context) {
    std::lock_guard<std::mutex> guard(owned_lock);
    owned[at] = {bytes, context};
}
static void disown(uint64_t at) {
    std::lock_guard<std::mutex> guard(owned_lock);
    owned.erase(at);
}
// Whether the current context's device may use what is at an address.
static bool is_here(uint64_t at) {
    std::lock_guard<std::mutex> guard(owned_lock);
    auto next = owned.upper_bound(at);
    if (next == owned.begin()) return true;
    auto& [first, lies] = *--next;
    return at >= first + lies.first || lies.second == current_context;
}
static int number_of(const char* name, int otherwise) { return getenv(name) ? atoi(getenv(name)) : otherwise; }

// Where allocations lie in their pages: as the driver places them, with the end as near to the page behind it as that allows;
// with the end at that page; with the beginning at the page before it.
enum Placement { AS_THE_DRIVER, END, BEGINNING };
static const size_t PAGE = 4096, ALIGN = 256;
static int placement = AS_THE_DRIVER;
struct Allocation {
    char* pages;
    size_t mapped, bytes;
};
static std::mutex memory_lock;
static std::map<uint64_t, Allocation> allocations;

// Where a launch is left when it touches what it must not, and what it touched.
static thread_local sigjmp_buf* way_out = nullptr;
static thread_local void* touched = nullptr;
static struct sigaction others_handler;

static void on_fault(int, siginfo_t* info, void*) {
    if (way_out) {
        touched = info->si_addr;
        siglongjmp(*way_out, 1);
    }
    // Not a launch: whoever handled it before sees it again.
    sigaction(SIGSEGV, &others_handler, nullptr);
}
static void watch_launches() {
    struct sigaction own {};
    own.sa_sigaction = on_fault;
    own.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &own, &others_handler);
}
static void tell_touched(const char* who) {
    const uint64_t at = (uint64_t)touched;
    std::lock_guard<std::mutex> guard(memory_lock);
    auto next = allocations.upper_bound(at);
    fprintf(stderr, "%s touches %p", who, touched);
    if (next != allocations.end() && next->first - at <= PAGE)
        fprintf(stderr, ", %ld bytes before %zu that were allocated\n", (long)(next->first - at), next->second.bytes);
    else if (next != allocations.begin() && (--next, at - next->first < next->second.bytes + 2 * PAGE))
        fprintf(stderr, ", %ld bytes behind %zu that were allocated\n", (long)(at - next->first - next->second.bytes),
                next->second.bytes);
    else fprintf(stderr, "\n");
}

static void fault(const char* what, const Function* function) {
    ++faults;
    fprintf(stderr, "stand-in driver: %s%s%s\n", what, function ? ": " : "", function ? function->name.c_str() : "");
}
static Node node_of(const Params* p) {
    Node n{KERNEL, p->function, {p->grid[0], p->grid[1], p->grid[2]}, {p->block[0], p->block[1], p->block[2]}, p->shared};
    for (size_t i = 0; i < p->function->sizes.size(); ++i) {
        uint64_t word = 0;
        memcpy(&word, p->parameters[i], p->function->sizes[i]);
        n.words.push_back(word);
    }
    if (p->function->host) n.kind = HOST;
    return n;
}
static Result run(Node& n) {
    if (n.kind == CHILD) {
        for (Node& part : n.child)
            if (Result code = run(part)) return code;
        return SUCCESS;
    }
    std::vector<void*> args;
    for (auto& word : n.words) args.push_back(&word);
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        way_out = nullptr;
        tell_touched(n.kind == HOST ? "a library" : n.kind == KERNEL ? n.function->name.c_str() : "a copy");
        // A library's call has returned long ago: what it leaves undone shows in the result, and is not tried another way.
        return n.kind == HOST ? SUCCESS : ILLEGAL_ADDRESS;
    }
    way_out = &here;
    if (n.kind == HOST && !n.is_as_asked) fault("a library's kernel is not launched as the library asked for", nullptr);
    if (n.kind == HOST && n.words[0]) n.function->host((void*)n.words[0]);
    if (n.kind == FILL)
        for (size_t i = 0; i < n.count; ++i) memcpy((char*)n.to + 4 * i, &n.word, 4);
    if (n.kind == COPY) memcpy((void*)n.to, (void*)n.from, n.count);
    if (n.kind == KERNEL) {
        clock_ms += kernel_ms;
        n.function->emulate(n.grid, n.block, n.shared, args.data(), seed);
    }
    way_out = nullptr;
    return SUCCESS;
}
static Result run_all(std::vector<Node> nodes) {
    for (Node& n : nodes)
        if (Result code = run(n)) return code;
    return SUCCESS;
}
// Whether the device has room for such a launch. Shared memory beyond 48 KiB has to be asked for before; shim.h counts what a
// kernel has besides.
static bool is_possible(const Node& n) {
    const auto& [gx, gy, gz] = n.grid;
    const auto& [bx, by, bz] = n.block;
    return gx && gy && gz && bx && by && bz && gx <= 0x7fffffffu && gy <= 65535 && gz <= 65535 && bz <= 64 && bx <= 1024 && by <= 1024 &&
           bx * by * bz <= 1024 && n.shared <= n.function->room;
}
// Why the current device cannot run a node.
static Result refused(const Node& n) {
    for (const Node& part : n.child)
        if (Result code = refused(part)) return code;
    if (n.kind == FILL || n.kind == COPY) return is_here(n.to) && (n.kind == FILL || is_here(n.from)) ? SUCCESS : ILLEGAL_ADDRESS;
    if (n.kind != KERNEL) return SUCCESS;
    if (n.function->module->is_gone) return fault("a kernel is launched whose module was unloaded", n.function), WRONG_HANDLE;
    if (n.function->module->context != current_context) return WRONG_CONTEXT;
    if (!is_possible(n)) return INVALID;
    for (size_t i = 0; i < n.words.size(); ++i)
        if (n.function->sizes[i] == 8 && !is_here(n.words[i])) return ILLEGAL_ADDRESS;
    return SUCCESS;
}

static unsigned drawn() {
    late_state = late_state * 1664525u + 1013904223u;
    return late_state >> 16;
}
static bool is_past(const Moment& moment) { return !moment.first || moment.first->done >= moment.second; }
static bool can_run(const Queue& q) {
    return !q.work.empty() && std::all_of(q.work.front().after.begin(), q.work.front().after.end(), is_past);
}
static void step(Queue& q) {
    Work work = std::move(q.work.front());
    q.work.pop_front();
    if (const int code = sticky ? sticky : work.run ? work.run() : SUCCESS) sticky = code;
    ++q.done;
}
// Something that can run, whoever waits for it; false if there is nothing.
static bool any_step() {
    std::vector<std::shared_ptr<Queue>> ready;
    for (auto& q : queues)
        if (can_run(*q)) ready.push_back(q);
    if (ready.empty()) return false;
    step(*ready[drawn() % ready.size()]);
    return true;
}
static void hurry() {
    while (drawn() % 256 < haste && any_step()) {
    }
}
// Does what has to be done until a moment is past, and what else is drawn.
static void reach(const Moment& moment) {
    while (!is_past(moment)) {
        hurry();
        if (is_past(moment)) return;
        Queue* q = moment.first.get();
        while (!can_run(*q)) {
            // What it waits for was given before: there is an end to that.
            for (const Moment& before : q->work.front().after)
                if (!is_past(before)) q = before.first.get();
        }
        step(*q);
    }
}
static Result told() { return late_seed ? sticky : SUCCESS; }
static Result finish(void* context) {
    for (size_t i = 0; i < queues.size(); ++i)
        if (!context || queues[i]->context == context) reach({queues[i], queues[i]->given});
    queues.erase(std::remove_if(queues.begin(), queues.end(), [](auto& q) { return q->work.empty(); }), queues.end());
    return told();
}
static std::shared_ptr<Queue> default_queue(void* context) {
    auto& q = named[{context, nullptr}];
    if (!q) q = std::make_shared<Queue>(Queue{context, nullptr, false});
    return q;
}
// The stream of a handle; none if it is of another context, or gone.
static std::shared_ptr<Queue> queue_of(void* handle) {
    auto made = streams.find(handle);
    if (made != streams.end()) return made->second->context == current_context || current_device() < 0 ? made->second : nullptr;
    if (current_device() < 0 || ((uint64_t)handle >= 0x5000000000 && (uint64_t)handle < next_stream)) return nullptr;
    auto& q = named[{current_context, handle}];
    if (!q) q = std::make_shared<Queue>(Queue{current_context, handle, false});
    return q;
}
static Result no_queue() { return current_device() < 0 ? WRONG_CONTEXT : WRONG_HANDLE; }
static Result put(const std::shared_ptr<Queue>& q, Work work) {
    ++q->given;
    if (!late_seed) {
        const Result code = work.run ? work.run() : SUCCESS;
        ++q->done;
        return code;
    }
    // The default stream and those that block come one after the other.
    for (auto& other : queues)
        if (other->context == q->context && (q->handle ? q->is_blocking && !other->handle : other->is_blocking))
            work.after.push_back({other, other->given});
    q->work.push_back(std::move(work));
    if (std::find(queues.begin(), queues.end(), q) == queues.end()) queues.push_back(q);
    hurry();
    return SUCCESS;
}

static const void* this_thread() {
    static thread_local char here;
    return &here;
}
// Whether a capture forbids this thread what may depend on all of a device; such a capture is no longer one.
static bool is_forbidden() {
    bool is = false;
    if (capture_mode == RELAXED) return false;
    for (auto& capture : captures) {
        const bool own = capture->thread == this_thread() && capture->mode != RELAXED;
        if (own || (capture_mode == GLOBAL && capture->mode == GLOBAL)) capture->is_invalid = is = true;
    }
    return is;
}
static void modules_of(const std::vector<Node>& nodes, std::vector<Module*>& to) {
    for (const Node& n : nodes) {
        if (n.kind == KERNEL) to.push_back(n.function->module);
        modules_of(n.child, to);
    }
}
// Puts nodes into the stream's queue, or into the graph that the stream is captured into.
static Result give(void* stream, const std::vector<Node>& nodes, std::vector<Moment> after = {}) {
    auto q = queue_of(stream);
    if (!q) return no_queue();
    for (const Node& n : nodes)
        if (Result code = refused(n)) return code;
    if (q->capture) {
        if (q->capture->is_invalid) return CAPTURE_INVALIDATED;
        for (const Node& n : nodes) q->capture->graph->nodes.push_back(new Node(n));
        return SUCCESS;
    }
    Work work{[nodes] { return run_all(nodes); }, std::move(after)};
    modules_of(nodes, work.modules);
    return put(q, std::move(work));
}
static std::vector<Node> nodes_of(const Graph* graph) {
    std::vector<Node> nodes;
    for (const Node* n : graph->nodes) nodes.push_back(*n);
    return nodes;
}
static void destroy(Graph* graph) {
    for (Node* n : graph->nodes) {
        // Who kept a pointer to a parameter finds something else there.
        std::fill(n->words.begin(), n->words.end(), 0xa5a5a5a5a5a5a5a5);
        delete n;
    }
    delete graph;
}
static bool same_shape(const std::vector<Node>& a, const std::vector<Node>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i)
        if (a[i].kind != b[i].kind || !same_shape(a[i].child, b[i].child) ||
            (a[i].kind == KERNEL && a[i].function->module->context != b[i].function->module->context))
            return false;
    return true;
}

extern "C" {

// What tests ask: not a part of the driver.
long fake_count(int which) { return counts[which]; }
void fake_seed(unsigned s) { seed = s; }
void fake_placement(int where) { placement = where; }
// From now on work is done late, in an order of this seed; 0: at once. What is queued is done first.
void fake_async(unsigned s) {
    std::lock_guard<std::mutex> guard(lock);
    finish(nullptr);
    late_seed = late_state = s;
    // The first is as late as can be.
    const unsigned hastes[3] = {128, 0, 48};
    haste = s ? hastes[s % 3] : 0;
    sticky = 0;
}
// Whether a capture forbids this thread what libraries do when they are opened: as if it had done it.
int fake_forbidden() {
    std::lock_guard<std::mutex> guard(lock);
    return is_forbidden();
}
// From now on one of the steps to a graph that is launched fails; 0: none.
void fake_refuse(int which) { refused_step = which; }
// What callers did that a device does not forgive.
long fake_faults() { return faults; }
// How much was given and is not done.
long fake_pending() {
    std::lock_guard<std::mutex> guard(lock);
    long pending = 0;
    for (auto& q : queues) pending += q->work.size();
    return pending;
}
void fake_spend(double ms) { clock_ms += ms; }
void fake_kernel_cost(double ms) { kernel_ms = ms; }
void fake_graph_bytes(size_t bytes) { graph_bytes = bytes; }
// What devices that are opened from now on say of themselves: a name, multiprocessors, clock and memory clock in kHz, bits of the
// way to the memory, bytes of L2.
void fake_device(const char* name, const int* attributes) {
    snprintf(device_name, sizeof device_name, "%s", name);
    std::copy(attributes, attributes + 5, device_attributes);
}
// Shared memory that a block may ask for; 0 for as much as the architecture has.
void fake_block_bytes(int bytes) { block_bytes = bytes; }
void fake_enter(int device) { current_context = CONTEXTS[device]; }
int fake_current() { return current_device(); }
long fake_launched(int device) { return launched[device]; }
void fake_own(uint64_t at, size_t bytes, int device) { own(at, bytes, CONTEXTS[device]); }
void fake_disown(uint64_t at) { disown(at); }
int fake_waited(void* before, void* after) {
    for (auto& wait : waits)
        if (wait.first == before && wait.second == after) return 1;
    return 0;
}

Result cuInit(unsigned) {
    static std::once_flag once;
    std::call_once(once, watch_launches);
    return SUCCESS;
}
Result cuDriverGetVersion(int* version) { *version = number_of("FAKE_VERSION", 13000); return SUCCESS; }
// NVML's, which says what the driver is called.
int nvmlInit_v2() { return 0; }
int nvmlShutdown() { return 0; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { snprintf(text, size, "999.88.77"); return 0; }
Result cuGetErrorName(int, const char** text) { *text = "FAKE"; return SUCCESS; }
Result cuGetErrorString(int, const char** text) { *text = "fake driver"; return SUCCESS; }
Result cuDeviceGetCount(int* count) { *count = DEVICES; return SUCCESS; }
Result cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < DEVICES ? SUCCESS : INVALID; }
Result cuDeviceGetName(char* name, int size, int) { snprintf(name, size, "%s", device_name); return SUCCESS; }
Result cuDeviceTotalMem_v2(size_t* bytes, int) { *bytes = (size_t)8 << 30; return SUCCESS; }
static int room_of_a_block(int arch) {
    if (block_bytes) return block_bytes;
    return (arch == 75 ? 64 : arch == 80 ? 163 : arch / 10 == 8 || arch / 10 == 12 ? 99 : 227) << 10;
}
Result cuDeviceGetAttribute(int* value, int which, int) {
    const int arch = number_of("FAKE_ARCH", 80);
    if (which == 97) return *value = room_of_a_block(arch), SUCCESS;
    const int kinds[5] = {16, 13, 36, 37, 38};
    const int at = std::find(kinds, kinds + 5, which) - kinds;
    *value = which == 75 ? arch / 10 : which == 76 ? arch % 10 : at < 5 ? device_attributes[at] : 0;
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = CONTEXTS[device]; return SUCCESS; }
Result cuCtxGetCurrent(void** context) { *context = current_context; return SUCCESS; }
Result cuCtxSetCurrent(void* context) { current_context = context; return SUCCESS; }
Result cuCtxSynchronize() {
    std::lock_guard<std::mutex> guard(lock);
    if (current_device() < 0) return WRONG_CONTEXT;
    // Whoever captures: it is all of the context.
    bool is_captured = is_forbidden();
    auto look = [&](const Queue& q) {
        if (q.capture && q.context == current_context) q.capture->is_invalid = is_captured = true;
    };
    for (auto& q : named) look(*q.second);
    for (auto& q : streams) look(*q.second);
    return is_captured ? CAPTURE_UNSUPPORTED : finish(current_context);
}
Result cuStreamSynchronize(void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    if (!q) return no_queue();
    if (q->capture) return q->capture->is_invalid = true, CAPTURE_UNSUPPORTED;
    if (!stream) put(q, {});
    reach({q, q->given});
    return told();
}
Result cuStreamIsCapturing(void* stream, int* status) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    if (!q) return no_queue();
    // What the default stream is given has to wait for streams that block, and cannot for one that is captured.
    for (auto& other : streams)
        if (!stream && other.second->is_blocking && other.second->capture && other.second->context == q->context) return CAPTURE_IMPLICIT;
    *status = !q->capture ? 0 : q->capture->is_invalid ? 2 : 1;
    return SUCCESS;
}
Result cuStreamCreate(void** stream, unsigned flags) {
    std::lock_guard<std::mutex> guard(lock);
    if (current_device() < 0) return WRONG_CONTEXT;
    *stream = (void*)next_stream;
    next_stream += 16;
    streams[*stream] = std::make_shared<Queue>(Queue{current_context, *stream, flags == 0});
    return SUCCESS;
}
// What it still has to do is done.
Result cuStreamDestroy_v2(void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    return streams.erase(stream) ? SUCCESS : WRONG_HANDLE;
}
Result cuThreadExchangeStreamCaptureMode(int* mode) { return std::swap(*mode, capture_mode), SUCCESS; }
Result cuStreamBeginCapture_v2(void* stream, int mode) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    // The default stream cannot be captured.
    if (!q || !stream) return CAPTURE_UNSUPPORTED;
    if (q->capture) return ILLEGAL_STATE;
    q->capture = std::make_shared<Capture>(Capture{new Graph, mode, this_thread()});
    captures.push_back(q->capture);
    return SUCCESS;
}
Result cuStreamEndCapture(void* stream, void** graph) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    *graph = nullptr;
    if (!q || !q->capture) return ILLEGAL_STATE;
    const Captured capture = q->capture;
    if (capture->mode != RELAXED && capture->thread != this_thread()) return CAPTURE_WRONG_THREAD;
    q->capture = nullptr;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    if (capture->is_invalid || (refused_step == THE_CAPTURE && capture->mode == THREAD_LOCAL)) return destroy(capture->graph), CAPTURE_INVALIDATED;
    *graph = capture->graph;
    return SUCCESS;
}
Result cuLaunchHostFunc(void* stream, void (*host)(void*), void* data) {
    std::lock_guard<std::mutex> guard(lock);
    static std::map<void (*)(void*), Function*> known;
    Function*& function = known[host];
    if (!function) function = new Function{nullptr, nullptr, "a library's", {8}, host};
    Node n{HOST, function, {1, 1, 1}, {1, 1, 1}};
    n.words = {(uint64_t)data};
    n.is_as_asked = true;
    if (library_shape < TWO_KERNELS) return give(stream, {n});
    Node nothing = n;
    nothing.words = {0};
    return give(stream, {nothing, n});
}
void fake_library_shape(int shape) { library_shape = shape; }
long fake_children() { return children; }
Result cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
    if (current_device() < 0) return WRONG_CONTEXT;
    {
        std::lock_guard<std::mutex> guard(lock);
        if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    }
    const size_t room = (bytes + PAGE - 1) / PAGE * PAGE, mapped = room + 2 * PAGE;
    if (bytes == 0 || bytes > ((size_t)8 << 30)) return bytes ? OUT_OF_MEMORY : INVALID;
    char* pages = (char*)mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) return OUT_OF_MEMORY;
    mprotect(pages + PAGE, room, PROT_READ | PROT_WRITE);
    const size_t free_bytes = room - bytes;
    const size_t before = placement == BEGINNING ? 0 : placement == END ? free_bytes : free_bytes / ALIGN * ALIGN;
    // What is beside it in its pages is no number.
    memset(pages + PAGE, 0xff, room);
    char* memory = pages + PAGE + before;
    memset(memory, 0xa5, bytes);
    *pointer = (uint64_t)memory;
    own(*pointer, bytes, current_context);
    std::lock_guard<std::mutex> guard(memory_lock);
    allocations[*pointer] = Allocation{pages, mapped, bytes};
    ++counts[ALLOCATIONS];
    return SUCCESS;
}
Result cuMemFree_v2(uint64_t pointer) {
    if (!is_here(pointer)) return ILLEGAL_ADDRESS;
    {
        // It waits for all that the device has to do.
        std::lock_guard<std::mutex> guard(lock);
        if (is_forbidden()) return CAPTURE_UNSUPPORTED;
        finish(current_context);
    }
    std::lock_guard<std::mutex> guard(memory_lock);
    auto at = allocations.find(pointer);
    if (at == allocations.end()) return INVALID;
    disown(pointer);
    munmap(at->second.pages, at->second.mapped);
    allocations.erase(at);
    ++counts[FREES];
    return SUCCESS;
}
Result cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    *total = (size_t)8 << 30;
    *free_bytes = *total - held_bytes;
    return SUCCESS;
}
// The bytes are taken at once; they arrive when the stream has come so far.
static Result stage(const std::shared_ptr<Queue>& q, uint64_t to, const void* from, size_t bytes) {
    const std::vector<char> staged((const char*)from, (const char*)from + bytes);
    return put(q, {[=] { return memcpy((void*)to, staged.data(), bytes), SUCCESS; }});
}
Result cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    if (current_device() < 0) return WRONG_CONTEXT;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    if (!is_here(to)) return ILLEGAL_ADDRESS;
    auto q = default_queue(current_context);
    put(q, {});
    reach({q, q->given});
    return stage(q, to, from, bytes);
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    if (!q) return no_queue();
    // A graph would read the host's memory whenever it runs.
    if (q->capture) return q->capture->is_invalid = true, CAPTURE_UNSUPPORTED;
    return is_here(to) ? stage(q, to, from, bytes) : ILLEGAL_ADDRESS;
}
static Result fetch(const std::shared_ptr<Queue>& q, void* to, uint64_t from, size_t bytes) {
    if (!is_here(from)) return ILLEGAL_ADDRESS;
    const Result code = put(q, {[=] { return memcpy(to, (void*)from, bytes), SUCCESS; }});
    reach({q, q->given});
    return code ? code : told();
}
Result cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    if (current_device() < 0) return WRONG_CONTEXT;
    return is_forbidden() ? CAPTURE_UNSUPPORTED : fetch(default_queue(current_context), to, from, bytes);
}
// To memory that the system may move, it returns when it is done.
Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    if (!q) return no_queue();
    if (q->capture) return q->capture->is_invalid = true, CAPTURE_UNSUPPORTED;
    return fetch(q, to, from, bytes);
}
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    Node n{COPY};
    n.to = to, n.from = from, n.count = bytes;
    return give(stream, {n});
}
Result cuMemsetD32Async(uint64_t to, unsigned word, size_t count, void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    Node n{FILL};
    n.to = to, n.word = word, n.count = count;
    ++counts[WRITES];
    return to % 4 ? INVALID : give(stream, {n});
}
Result cuEventCreate(Event** event, unsigned flags) {
    if (current_device() < 0) return WRONG_CONTEXT;
    *event = new Event{(flags & 2) == 0};
    return SUCCESS;
}
Result cuEventRecord(Event* event, void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    if (!q) return no_queue();
    // Who waits for the record before does not wait for this one.
    auto record = event->record = std::make_shared<Record>(Record{stream});
    record->capture = q->capture;
    if (q->capture) return q->capture->is_invalid ? CAPTURE_INVALIDATED : SUCCESS;
    record->moment = {q, q->given + 1};
    return put(q, {[record] { return record->at = clock_ms, SUCCESS; }});
}
Result cuEventDestroy_v2(Event* event) { delete event; return SUCCESS; }
static Result look_at(Event* event) {
    if (event->record && event->record->capture) return event->record->capture->is_invalid = true, CAPTURED_EVENT;
    return is_forbidden() ? CAPTURE_UNSUPPORTED : SUCCESS;
}
Result cuEventSynchronize(Event* event) {
    std::lock_guard<std::mutex> guard(lock);
    if (Result code = look_at(event)) return code;
    if (event->record) reach(event->record->moment);
    return told();
}
// Who asks again and again gets there.
Result cuEventQuery(Event* event) {
    std::lock_guard<std::mutex> guard(lock);
    if (Result code = look_at(event)) return code;
    if (!event->record || is_past(event->record->moment)) return told();
    any_step();
    return NOT_READY;
}
Result cuEventElapsedTime(float* ms, Event* start, Event* end) {
    std::lock_guard<std::mutex> guard(lock);
    if (!start->record || !end->record || !start->has_time || !end->has_time) return WRONG_HANDLE;
    if (!is_past(start->record->moment) || !is_past(end->record->moment)) return NOT_READY;
    *ms = (float)(end->record->at - start->record->at);
    return told();
}
Result cuStreamWaitEvent(void* stream, Event* event, unsigned) {
    std::lock_guard<std::mutex> guard(lock);
    auto q = queue_of(stream);
    if (!q) return no_queue();
    if (!event->record) return SUCCESS;
    ++counts[WAITS];
    waits.push_back({event->record->stream, stream});
    // A stream that is not captured would join the capture: nobody here means that.
    if (q->capture != event->record->capture) {
        if (q->capture) q->capture->is_invalid = true;
        return CAPTURE_ISOLATION;
    }
    return q->capture ? SUCCESS : put(q, {nullptr, {event->record->moment}});
}

// An image is a shared library; its length stands in its ELF header.
Result cuModuleLoadData(void** module, const void* image) {
    const unsigned char* p = (const unsigned char*)image;
    if (current_device() < 0) return WRONG_CONTEXT;
    if (memcmp(p, "\177ELF", 4)) return INVALID;
    uint64_t sections; uint16_t size, count;
    memcpy(&sections, p + 40, 8); memcpy(&size, p + 58, 2); memcpy(&count, p + 60, 2);
    char path[] = "/tmp/oxidiff-fake-XXXXXX";
    const int file = mkstemp(path);
    const size_t bytes = sections + (size_t)size * count;
    const bool is_written = write(file, image, bytes) == (ssize_t)bytes;
    close(file);
    void* library = is_written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    unlink(path);
    if (!library) return INVALID;
    *module = new Module{current_context, library};
    return SUCCESS;
}
Result cuModuleUnload(void* module) {
    std::lock_guard<std::mutex> guard(lock);
    Module* m = (Module*)module;
    if (is_forbidden()) return CAPTURE_UNSUPPORTED;
    if (m->context != current_context) return WRONG_CONTEXT;
    for (auto& q : queues)
        for (const Work& work : q->work)
            if (std::count(work.modules.begin(), work.modules.end(), m)) {
                fault("a module is unloaded whose kernels are queued", nullptr);
                return ILLEGAL_STATE;
            }
    ++counts[UNLOADS];
    // What was made of it stays, to say so when it is launched.
    m->is_gone = true;
    dlclose(m->library);
    return SUCCESS;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    Module* m = (Module*)module;
    void* emulate = dlsym(m->library, (std::string("emulate_") + name).c_str());
    const char* sizes = (const char*)dlsym(m->library, (std::string("parameters_") + name).c_str());
    if (!emulate || !sizes) return NOT_FOUND;
    Function* f = new Function{m, (Emulate)emulate, name, {}};
    for (const char* s = sizes; *s; ++s) f->sizes.push_back(*s - '0');
    *function = f;
    return SUCCESS;
}
// The most shared memory that a launch asks for: what there is, and no more.
Result cuFuncSetAttribute(void* function, int which, int value) {
    if (which != 8 || value < 0 || value > room_of_a_block(number_of("FAKE_ARCH", 80))) return INVALID;
    ((Function*)function)->room = (unsigned)value;
    return SUCCESS;
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void* stream, void** parameters, void**) {
    std::lock_guard<std::mutex> guard(lock);
    Params p{(Function*)function, {gx, gy, gz}, {bx, by, bz}, shared, parameters, nullptr, nullptr, nullptr};
    const Node n = node_of(&p);
    if (Result code = refused(n)) return code;
    ++counts[LAUNCHES], ++launched[current_device()];
    return give(stream, {n});
}
Result cuGraphCreate(void** graph, unsigned) { *graph = new Graph; return SUCCESS; }
Result cuGraphDestroy(void* graph) { return destroy((Graph*)graph), SUCCESS; }
static Result add(void** node, Graph* g, void* const* after, size_t count, const Node& n) {
    // A chain: each node follows the one before.
    if (g->nodes.empty() ? count != 0 : (count != 1 || after[0] != g->nodes.back())) return INVALID;
    g->nodes.push_back(new Node(n));
    g->nodes.back()->owner = g;
    *node = g->nodes.back();
    return SUCCESS;
}
Result cuGraphAddKernelNode_v2(void** node, void* graph, void* const* after, size_t count, const Params* params) {
    const Node n = node_of(params);
    if (n.kind == HOST && refused_step == A_CHILD) return INVALID;
    return is_possible(n) ? add(node, (Graph*)graph, after, count, n) : INVALID;
}
Result cuGraphAddChildGraphNode(void** node, void* graph, void* const* after, size_t count, void* child) {
    if (refused_step == A_CHILD) return INVALID;
    ++children;
    Node n{CHILD};
    n.child = nodes_of((Graph*)child);
    return add(node, (Graph*)graph, after, count, n);
}
// Nodes and edges in no order that means anything.
Result cuGraphGetNodes(void* graph, void** nodes, size_t* count) {
    const auto& all = ((Graph*)graph)->nodes;
    if (nodes) std::copy(all.rbegin(), all.rend(), nodes);
    *count = all.size();
    return SUCCESS;
}
struct Edge {
    unsigned char from_port, to_port, type, reserved[5];
};
Result cuGraphGetEdges_v2(void* graph, void** from, void** to, Edge* told, size_t* count) {
    const auto& all = ((Graph*)graph)->nodes;
    *count = library_shape == BRANCHED ? 0 : all.size() - 1;
    for (size_t i = 0; from && i < *count; ++i) {
        const size_t at = *count - 1 - i;
        from[at] = all[i], to[at] = all[i + 1];
        // Of programmatic launches.
        told[at] = library_shape == OVERLAPPING ? Edge{1, 0, 1} : Edge{0, 0, 0};
    }
    return SUCCESS;
}
Result cuGraphNodeGetType(void* node, int* type) {
    const Kind kind = ((Node*)node)->kind;
    *type = kind == COPY ? 1 : kind == FILL ? 2 : kind == CHILD ? 4 : kind == HOST && library_shape == NO_KERNEL ? 3 : 0;
    return SUCCESS;
}
Result cuGraphKernelNodeGetParams_v2(void* node, Params* params) {
    Node* n = (Node*)node;
    if (n->kind != HOST && n->kind != KERNEL) return INVALID;
    n->parameters.clear();
    for (auto& word : n->words) n->parameters.push_back(&word);
    const auto& [gx, gy, gz] = n->grid;
    const auto& [bx, by, bz] = n->block;
    *params = {n->function, {gx, gy, gz}, {bx, by, bz}, n->shared, n->parameters.data(), nullptr, nullptr, nullptr};
    return SUCCESS;
}
Result cuGraphKernelNodeCopyAttributes(void* to, void* from) {
    if (library_shape == UNCOPIED) return INVALID;
    ((Node*)to)->is_as_asked = ((Node*)from)->is_as_asked;
    return SUCCESS;
}
Result cuGraphDestroyNode(void* node) {
    Node* n = (Node*)node;
    auto& all = n->owner->nodes;
    // What follows it would follow nothing.
    if (all.back() != n) return INVALID;
    all.pop_back();
    delete n;
    return SUCCESS;
}
Result cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
    if (refused_step == MADE_READY) return OUT_OF_MEMORY;
    Exec* e = new Exec;
    for (Node* n : ((Graph*)graph)->nodes) e->nodes.push_back(*n), e->origin.push_back(n);
    ++counts[GRAPHS];
    *exec = e;
    return SUCCESS;
}
static Result renew(Exec* e, void* node, const Node& n) {
    for (size_t i = 0; i < e->nodes.size(); ++i)
        if (e->origin[i] == node && same_shape({e->nodes[i]}, {n})) {
            const bool is_as_asked = e->nodes[i].is_as_asked;
            e->nodes[i] = n;
            e->nodes[i].is_as_asked = is_as_asked;
            ++counts[UPDATES];
            return SUCCESS;
        }
    return INVALID;
}
Result cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const Params* params) {
    const Node n = node_of(params);
    return is_possible(n) ? renew((Exec*)exec, node, n) : INVALID;
}
Result cuGraphExecChildGraphNodeSetParams(void* exec, void* node, void* child) {
    Node n{CHILD};
    n.child = nodes_of((Graph*)child);
    return renew((Exec*)exec, node, n);
}
// As the real one: memory is taken when the graph first goes to the device.
Result cuGraphUpload(void* exec, void*) {
    if (refused_step == PUT_THERE) return OUT_OF_MEMORY;
    held_bytes += graph_bytes;
    ((Exec*)exec)->bytes = graph_bytes;
    return SUCCESS;
}
Result cuGraphExecDestroy(void* exec) {
    held_bytes -= ((Exec*)exec)->bytes;
    delete (Exec*)exec;
    return SUCCESS;
}
Result cuGraphLaunch(void* exec, void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    if (refused_step == LAUNCHED) return INVALID;
    Exec* e = (Exec*)exec;
    auto q = queue_of(stream);
    if (!q) return no_queue();
    for (const Node& n : e->nodes)
        if (Result code = refused(n)) return code;
    ++counts[GRAPH_LAUNCHES], ++launched[current_device()];
    if (q->capture) return give(stream, e->nodes);
    const Moment before = e->last;
    e->last = {q, q->given + 1};
    return give(stream, e->nodes, {before});
}
}
