// A stand-in for libcuda.so.1: device memory is the host's, an image is a shared library made of the same kernel text by the
// host's compiler (shim.h), a launch runs it. Launches and graphs are counted, so that a test can ask what happened.
//
// There are two devices. What belongs to one (memory, kernels, streams, graphs) is refused where the other's context is current.
// FAKE_VERSION and FAKE_ARCH in the environment say which driver and which devices these are: 13000 and 80 else.
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
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

typedef int Result;
typedef void (*Emulate)(const unsigned* grid, const unsigned* block, unsigned shared, void** args, unsigned seed);

struct Function {
    void* context;
    Emulate emulate;
    std::string name;
    // Bytes of each parameter.
    std::vector<size_t> sizes;
};
struct Module {
    void *context, *library;
    std::vector<Function*> functions;
};
struct Params {
    Function* function;
    unsigned grid[3], block[3], shared;
    void** parameters;
    void **extra, *kernel, *context;
};
struct Node {
    Function* function;
    unsigned grid[3], block[3], shared;
    std::vector<uint64_t> words;
    // Instead of a kernel: a function of the host, or other nodes.
    void (*host)(void*);
    void* data;
    std::vector<Node> child;
};
struct Graph {
    std::vector<Node*> nodes;
};
struct Exec {
    std::vector<Node> nodes;
    std::vector<Node*> origin;
    size_t bytes = 0;
};
struct Stream {
    void* context;
    // What it is given goes there while it is captured.
    Graph* capture;
};

static std::mutex lock;
// Those made here; other handles are names that tests made up.
static std::set<void*> streams;
static unsigned seed = 1;
static long counts[9];
// Which stream waits for which: (before, after).
static std::vector<std::pair<void*, void*>> waits;
static int capturing = 0;
// Milliseconds that everything so far has taken: made up, so that a test knows what is fastest.
static double clock_ms = 0, kernel_ms = 2;
struct Event {
    void* stream;
    double at;
};
// As the driver has it: of each thread.
static thread_local void* current_context = nullptr;
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
static const int SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, WRONG_CONTEXT = 201, WRONG_HANDLE = 400,
                 ILLEGAL_ADDRESS = 700;

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

static Node node_of(const Params* p) {
    Node n{p->function, {p->grid[0], p->grid[1], p->grid[2]}, {p->block[0], p->block[1], p->block[2]}, p->shared};
    for (size_t i = 0; i < p->function->sizes.size(); ++i) {
        uint64_t word = 0;
        memcpy(&word, p->parameters[i], p->function->sizes[i]);
        n.words.push_back(word);
    }
    return n;
}
static Result run(Node& n) {
    if (!n.function && !n.host) {
        for (Node& part : n.child)
            if (Result code = run(part)) return code;
        return SUCCESS;
    }
    std::vector<void*> args;
    for (auto& word : n.words) args.push_back(&word);
    sigjmp_buf here;
    if (sigsetjmp(here, 0)) {
        way_out = nullptr;
        tell_touched(n.host ? "a library" : n.function->name.c_str());
        // A library's call has returned long ago: what it leaves undone shows in the result, and is not tried another way.
        return n.host ? SUCCESS : ILLEGAL_ADDRESS;
    }
    way_out = &here;
    if (n.host) n.host(n.data);
    else {
        clock_ms += kernel_ms;
        n.function->emulate(n.grid, n.block, n.shared, args.data(), seed);
    }
    way_out = nullptr;
    return SUCCESS;
}
// Why the current device cannot run a node.
static Result refused(const Node& n) {
    for (const Node& part : n.child)
        if (Result code = refused(part)) return code;
    if (!n.function) return SUCCESS;
    if (n.function->context != current_context) return WRONG_CONTEXT;
    for (size_t i = 0; i < n.words.size(); ++i)
        if (n.function->sizes[i] == 8 && !is_here(n.words[i])) return ILLEGAL_ADDRESS;
    return SUCCESS;
}

// Runs a node at once, or adds it to the graph that the stream is captured into.
static Result give(void* stream, const Node& n) {
    if (streams.count(stream) && ((Stream*)stream)->capture) {
        ((Stream*)stream)->capture->nodes.push_back(new Node(n));
        return SUCCESS;
    }
    Node now = n;
    return run(now);
}
static std::vector<Node> nodes_of(const Graph* graph) {
    std::vector<Node> nodes;
    for (const Node* n : graph->nodes) nodes.push_back(*n);
    return nodes;
}
static bool same_shape(const std::vector<Node>& a, const std::vector<Node>& b) {
    if (a.size() != b.size()) return false;
    for (size_t i = 0; i < a.size(); ++i)
        if ((a[i].host == nullptr) != (b[i].host == nullptr) || (a[i].function == nullptr) != (b[i].function == nullptr) ||
            !same_shape(a[i].child, b[i].child))
            return false;
    return true;
}

extern "C" {

// What tests ask: not a part of the driver.
long fake_count(int which) { return counts[which]; }
void fake_seed(unsigned s) { seed = s; }
void fake_placement(int where) { placement = where; }
void fake_capturing(int is) { capturing = is; }
void fake_spend(double ms) { clock_ms += ms; }
void fake_kernel_cost(double ms) { kernel_ms = ms; }
void fake_graph_bytes(size_t bytes) { graph_bytes = bytes; }
// What devices that are opened from now on say of themselves: a name, multiprocessors, clock and memory clock in kHz, bits of the
// way to the memory, bytes of L2.
void fake_device(const char* name, const int* attributes) {
    snprintf(device_name, sizeof device_name, "%s", name);
    std::copy(attributes, attributes + 5, device_attributes);
}
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
Result cuDeviceGetAttribute(int* value, int which, int) {
    const int arch = number_of("FAKE_ARCH", 80);
    const int kinds[5] = {16, 13, 36, 37, 38};
    const int at = std::find(kinds, kinds + 5, which) - kinds;
    *value = which == 75 ? arch / 10 : which == 76 ? arch % 10 : at < 5 ? device_attributes[at] : 0;
    return SUCCESS;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = CONTEXTS[device]; return SUCCESS; }
Result cuCtxGetCurrent(void** context) { *context = current_context; return SUCCESS; }
Result cuCtxSetCurrent(void* context) { current_context = context; return SUCCESS; }
Result cuCtxSynchronize() { return SUCCESS; }
Result cuStreamSynchronize(void*) { return SUCCESS; }
Result cuStreamIsCapturing(void*, int* status) { *status = capturing; return SUCCESS; }
Result cuStreamCreate(void** stream, unsigned) {
    std::lock_guard<std::mutex> guard(lock);
    if (current_device() < 0) return WRONG_CONTEXT;
    *stream = new Stream{current_context, nullptr};
    streams.insert(*stream);
    return SUCCESS;
}
Result cuStreamDestroy_v2(void* stream) {
    std::lock_guard<std::mutex> guard(lock);
    if (!streams.erase(stream)) return INVALID;
    delete (Stream*)stream;
    return SUCCESS;
}
Result cuStreamBeginCapture_v2(void* stream, int) {
    std::lock_guard<std::mutex> guard(lock);
    // The default stream cannot be captured.
    if (!streams.count(stream) || ((Stream*)stream)->capture) return INVALID;
    ((Stream*)stream)->capture = new Graph;
    return SUCCESS;
}
Result cuStreamEndCapture(void* stream, void** graph) {
    std::lock_guard<std::mutex> guard(lock);
    if (!streams.count(stream) || !((Stream*)stream)->capture) return INVALID;
    *graph = ((Stream*)stream)->capture;
    ((Stream*)stream)->capture = nullptr;
    return SUCCESS;
}
Result cuLaunchHostFunc(void* stream, void (*host)(void*), void* data) {
    std::lock_guard<std::mutex> guard(lock);
    Node n{};
    n.host = host, n.data = data;
    return give(stream, n);
}
Result cuMemAlloc_v2(uint64_t* pointer, size_t bytes) {
    if (current_device() < 0) return WRONG_CONTEXT;
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
Result cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    if (!is_here(to)) return ILLEGAL_ADDRESS;
    memcpy((void*)to, from, bytes);
    return SUCCESS;
}
Result cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
    if (!is_here(from)) return ILLEGAL_ADDRESS;
    memcpy(to, (void*)from, bytes);
    return SUCCESS;
}
Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
    if (!is_here(to) || !is_here(from)) return ILLEGAL_ADDRESS;
    memcpy((void*)to, (void*)from, bytes);
    return SUCCESS;
}

Result cuMemsetD32Async(uint64_t to, unsigned word, size_t count, void*) {
    if (!is_here(to)) return ILLEGAL_ADDRESS;
    for (size_t i = 0; i < count; ++i) memcpy((char*)to + 4 * i, &word, 4);
    ++counts[WRITES];
    return SUCCESS;
}
Result cuEventCreate(Event** event, unsigned) { *event = new Event{nullptr, 0}; return SUCCESS; }
Result cuEventRecord(Event* event, void* stream) { *event = Event{stream, clock_ms}; return SUCCESS; }
Result cuEventDestroy_v2(Event* event) { delete event; return SUCCESS; }
Result cuEventSynchronize(Event*) { return SUCCESS; }
Result cuEventElapsedTime(float* ms, Event* start, Event* end) { *ms = (float)(end->at - start->at); return SUCCESS; }
Result cuStreamWaitEvent(void* stream, Event* event, unsigned) {
    std::lock_guard<std::mutex> guard(lock);
    ++counts[WAITS];
    waits.push_back({event->stream, stream});
    return SUCCESS;
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
    *module = new Module{current_context, library, {}};
    return SUCCESS;
}
Result cuModuleUnload(void* module) {
    Module* m = (Module*)module;
    for (Function* f : m->functions) delete f;
    ++counts[UNLOADS];
    dlclose(m->library);
    delete m;
    return SUCCESS;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    Module* m = (Module*)module;
    void* emulate = dlsym(m->library, (std::string("emulate_") + name).c_str());
    const char* sizes = (const char*)dlsym(m->library, (std::string("parameters_") + name).c_str());
    if (!emulate || !sizes) return NOT_FOUND;
    Function* f = new Function{m->context, (Emulate)emulate, name, {}};
    for (const char* s = sizes; *s; ++s) f->sizes.push_back(*s - '0');
    m->functions.push_back(f);
    *function = f;
    return SUCCESS;
}
Result cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void* stream, void** parameters, void**) {
    std::lock_guard<std::mutex> guard(lock);
    if (streams.count(stream) && ((Stream*)stream)->context != current_context) return WRONG_HANDLE;
    Params p{(Function*)function, {gx, gy, gz}, {bx, by, bz}, shared, parameters, nullptr, nullptr, nullptr};
    const Node n = node_of(&p);
    if (Result code = refused(n)) return code;
    ++counts[LAUNCHES], ++launched[current_device()];
    return give(stream, n);
}
Result cuGraphCreate(void** graph, unsigned) { *graph = new Graph; return SUCCESS; }
Result cuGraphDestroy(void* graph) {
    for (Node* n : ((Graph*)graph)->nodes) delete n;
    delete (Graph*)graph;
    return SUCCESS;
}
static Result add(void** node, Graph* g, void* const* after, size_t count, const Node& n) {
    // A chain: each node follows the one before.
    if (g->nodes.empty() ? count != 0 : (count != 1 || after[0] != g->nodes.back())) return INVALID;
    g->nodes.push_back(new Node(n));
    *node = g->nodes.back();
    return SUCCESS;
}
Result cuGraphAddKernelNode_v2(void** node, void* graph, void* const* after, size_t count, const Params* params) {
    return add(node, (Graph*)graph, after, count, node_of(params));
}
Result cuGraphAddChildGraphNode(void** node, void* graph, void* const* after, size_t count, void* child) {
    Node n{};
    n.child = nodes_of((Graph*)child);
    return add(node, (Graph*)graph, after, count, n);
}
Result cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long) {
    Exec* e = new Exec;
    for (Node* n : ((Graph*)graph)->nodes) e->nodes.push_back(*n), e->origin.push_back(n);
    ++counts[GRAPHS];
    *exec = e;
    return SUCCESS;
}
static Result renew(Exec* e, void* node, const Node& n) {
    for (size_t i = 0; i < e->nodes.size(); ++i)
        if (e->origin[i] == node && same_shape({e->nodes[i]}, {n})) {
            e->nodes[i] = n;
            ++counts[UPDATES];
            return SUCCESS;
        }
    return INVALID;
}
Result cuGraphExecKernelNodeSetParams_v2(void* exec, void* node, const Params* params) {
    return renew((Exec*)exec, node, node_of(params));
}
Result cuGraphExecChildGraphNodeSetParams(void* exec, void* node, void* child) {
    Node n{};
    n.child = nodes_of((Graph*)child);
    return renew((Exec*)exec, node, n);
}
// As the real one: memory is taken when the graph first goes to the device.
Result cuGraphUpload(void* exec, void*) {
    held_bytes += graph_bytes;
    ((Exec*)exec)->bytes = graph_bytes;
    return SUCCESS;
}
Result cuGraphExecDestroy(void* exec) {
    held_bytes -= ((Exec*)exec)->bytes;
    delete (Exec*)exec;
    return SUCCESS;
}
Result cuGraphLaunch(void* exec, void*) {
    std::lock_guard<std::mutex> guard(lock);
    if (current_device() < 0) return WRONG_CONTEXT;
    for (Node& n : ((Exec*)exec)->nodes)
        if (Result code = refused(n)) return code;
    ++counts[GRAPH_LAUNCHES], ++launched[current_device()];
    for (Node& n : ((Exec*)exec)->nodes)
        if (Result code = run(n)) return code;
    return SUCCESS;
}
}
