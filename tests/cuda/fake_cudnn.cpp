// A stand-in for libcudnn.so.9: the backend API's functions, with the real library's signatures and numbers. Descriptors keep
// what they are given; executing a plan computes its graph on the host, in f64, from the addresses of the run. It refuses
// some things, as the real one does, so that falling back is tried too.
#include "fake_library.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>

enum Status { SUCCESS = 0, BAD_PARAM = 2000, NOT_SUPPORTED = 3000, EXECUTION_FAILED = 5000 };
// Descriptors and attributes, as the library numbers them.
enum Kind { POINTWISE = 0, CONVOLUTION = 1, ENGINE = 2, ENGINECFG = 3, ENGINEHEUR = 4, PLAN = 5, OP_CONVOLUTION = 10, OP_POINTWISE = 13,
            GRAPH = 15, VARIANTS = 16, TENSOR = 17, MATMUL = 18, OP_MATMUL = 19, REDUCTION = 21, OP_REDUCTION = 22 };
enum Mode { ADD = 0, MUL = 1, SUB = 9, DIV = 6, EXP = 13, LOG = 15, IDENTITY = 21, TANH = 101, SIGMOID = 102, GELU = 104, SWISH = 106, GELU_TANH = 107,
            CMP_GE = 303, CMP_LE = 305, GEN_INDEX = 501, SELECT = 601 };
enum Attribute { PW_MODE = 0, PW_AXIS = 9, DILATIONS = 102, STRIDES = 103, POST = 104, PRE = 105, SPATIAL = 106, HEUR_MODE = 200,
                 HEUR_GRAPH = 201, RESULTS = 202, CFG_ENGINE = 300, PLAN_CFG = 401, PLAN_WORKSPACE = 402, PLAN_JSON = 405, CONV = 702, CONV_W = 703, CONV_X = 704,
                 CONV_Y = 705, PW = 750, PW_X = 751, PW_B = 752, PW_Y = 753, PW_T = 758, OPS = 801, ALIGNMENT = 900, DATA_TYPE = 901, DIMS = 902,
                 TENSOR_STRIDES = 903, UID = 906, VIRTUAL = 907, BY_VALUE = 908, VARIANT_UIDS = 1000, VARIANT_POINTERS = 1001,
                 VARIANT_WORKSPACE = 1003, ENGINE_INDEX = 1301, ENGINE_NOTES = 1303, MM_A = 1520, MM_B = 1521, MM_C = 1522, RED_OPERATOR = 1600,
                 RED_X = 1610, RED_Y = 1611, RED = 1612 };

struct Descriptor {
    int kind;
    bool is_final = false;
    std::map<int, std::vector<char>> values;
    std::map<int, std::vector<std::shared_ptr<Descriptor>>> parts;

    template <class T> std::vector<T> list(int attribute) const {
        auto found = values.find(attribute);
        if (found == values.end()) return {};
        std::vector<T> out(found->second.size() / sizeof(T));
        memcpy(out.data(), found->second.data(), out.size() * sizeof(T));
        return out;
    }
    template <class T> T one(int attribute, T otherwise = T()) const {
        auto all = list<T>(attribute);
        return all.empty() ? otherwise : all[0];
    }
    std::shared_ptr<Descriptor> part(int attribute) const {
        auto found = parts.find(attribute);
        return found == parts.end() || found->second.empty() ? nullptr : found->second[0];
    }
};
typedef std::shared_ptr<Descriptor> Shared;
struct Handle {
    void* stream;
};

// Runs: all, with a convolution, with an attention (two products), with an addend, with an activation, with a result that
// has gaps, with groups, with two or more engines tried, with f32 on the engine that has tensor cores.
static long counts[9];
// What is misread on purpose, so that a test can see that it shows.
enum Misread { NOTHING, PADDING, STRIDE, ADDEND_ADDRESS, OUT_STRIDES, TAPS, WORKSPACE, ACTIVATION, SWAPPED_IMAGE, SCALE, MASK, UNEVEN_PADDING };
static int misread = NOTHING;
static const int64_t WORKSPACE_BYTES = 2048;
static const char* last_error = "";
// What plans are written as: where their configuration is found again, which only this process can.
static std::mutex plans_lock;
static std::vector<Shared> plans;
static const std::string PLAN_TEXT = "plan of a stand-in: ";

static int fail(int status, const char* why) {
    last_error = why;
    return status;
}

static size_t bytes_of(int type) {
    switch (type) {
        case 3: case 0: case 6: case 15: case 5: return 8;
        case 2: case 24: return 1;
        default: return 4;
    }
}

// A tensor's numbers: those in memory are read through its strides, those of a virtual one are kept dense.
struct Tensor {
    std::vector<int64_t> dims, strides;
    int type;
    int64_t uid;
    bool is_virtual, is_value;
    int64_t count() const {
        int64_t n = 1;
        for (auto d : dims) n *= d;
        return n;
    }
};
static int type_of(int cudnn) { return cudnn == 0 ? F32 : cudnn == 2 ? F16 : cudnn == 9 ? BF16 : -1; }
static Tensor tensor_of(const Shared& d) {
    return Tensor{d->list<int64_t>(DIMS), d->list<int64_t>(TENSOR_STRIDES), type_of(d->one<int>(DATA_TYPE)), d->one<int64_t>(UID),
                  d->one<char>(VIRTUAL) != 0, d->one<char>(BY_VALUE) != 0};
}
static std::vector<int64_t> index_of(int64_t at, const std::vector<int64_t>& dims) {
    std::vector<int64_t> index(dims.size());
    for (size_t d = dims.size(); d--;) index[d] = at % dims[d], at /= dims[d];
    return index;
}
struct Run {
    std::map<int64_t, void*> addresses;
    std::map<int64_t, double> values;
    std::map<int64_t, std::vector<double>> numbers;
    void* workspace;

    // Broadcast: a dimension of one element has it everywhere.
    double get(const Tensor& t, const std::vector<int64_t>& index) {
        if (t.is_value) return values[t.uid];
        int64_t at = 0, dense = 0;
        for (size_t d = 0; d < t.dims.size(); ++d) {
            const int64_t i = t.dims[d] == 1 ? 0 : index[d];
            at += i * t.strides[d], dense = dense * t.dims[d] + i;
        }
        if (t.is_virtual) return numbers[t.uid][dense];
        return read(addresses[t.uid], at, t.type);
    }
    void put(const Tensor& t, std::vector<double> results) {
        if (t.is_virtual) {
            numbers[t.uid] = std::move(results);
            return;
        }
        for (int64_t i = 0; i < t.count(); ++i) {
            const auto index = index_of(i, t.dims);
            int64_t at = 0, dense = 1;
            for (size_t d = t.dims.size(); d--;) {
                at += index[d] * (misread == OUT_STRIDES ? dense : t.strides[d]);
                dense *= t.dims[d];
            }
            write(addresses[t.uid], at, t.type, results[i]);
        }
    }
};

static void convolve(Run& run, const Descriptor& op) {
    const auto how = op.part(CONV);
    Tensor x = tensor_of(op.part(CONV_X)), w = tensor_of(op.part(CONV_W)), y = tensor_of(op.part(CONV_Y));
    auto padding = how->list<int64_t>(PRE), step = how->list<int64_t>(STRIDES), spread = how->list<int64_t>(DILATIONS);
    if (misread == PADDING) padding.assign(padding.size(), 0);
    if (misread == STRIDE) step.assign(step.size(), 1);
    if (misread == SWAPPED_IMAGE) std::swap(x.strides[2], x.strides[3]);
    if (misread == TAPS) {
        int64_t dense = 1;
        for (size_t d = w.dims.size(); d--;) w.strides[d] = dense, dense *= w.dims[d];
    }
    const int64_t channels = w.dims[1], per_group = y.dims[1] / (x.dims[1] / channels);
    const std::vector<int64_t> taps(w.dims.begin() + 2, w.dims.end());
    int64_t count = 1;
    for (auto t : taps) count *= t;
    const void *image = run.addresses[x.uid], *filters = run.addresses[w.uid];
    std::vector<double> results;
    for (int64_t i = 0; i < y.count(); ++i) {
        const auto at = index_of(i, y.dims);
        double sum = 0;
        for (int64_t t = 0; t < count; ++t) {
            const auto tap = index_of(t, taps);
            std::vector<int64_t> from(x.dims.size()), filter(w.dims.size());
            bool is_inside = true;
            for (size_t d = 0; d < taps.size(); ++d) {
                from[d + 2] = at[d + 2] * step[d] - padding[d] + tap[d] * spread[d];
                is_inside = is_inside && from[d + 2] >= 0 && from[d + 2] < x.dims[d + 2];
                filter[d + 2] = tap[d];
            }
            if (!is_inside) continue;
            from[0] = at[0], filter[0] = at[1];
            from[1] = at[1] / per_group * channels;
            int64_t pixel = 0, weight = 0;
            for (size_t d = 0; d < from.size(); ++d) pixel += from[d] * x.strides[d], weight += filter[d] * w.strides[d];
            for (int64_t c = 0; c < channels; ++c)
                sum += read(image, pixel + c * x.strides[1], x.type) * read(filters, weight + c * w.strides[1], w.type);
        }
        results.push_back(sum);
    }
    run.put(y, results);
}

static double apply(int mode, double a, double b, double t) {
    switch (mode) {
        case ADD: return a + b;
        case SUB: return a - b;
        case MUL: return a * b;
        case DIV: return a / b;
        case EXP: return std::exp(a);
        case LOG: return std::log(a);
        case IDENTITY: return a;
        case TANH: return std::tanh(a);
        case SIGMOID: return 1 / (1 + std::exp(-a));
        case SWISH: return misread == ACTIVATION ? a : a / (1 + std::exp(-a));
        case GELU: return 0.5 * a * (1 + std::erf(a * 0.7071067811865476));
        case GELU_TANH: return 0.5 * a * (1 + std::tanh(0.7978845608028654 * (a + 0.044715 * a * a * a)));
        case CMP_GE: return misread == MASK ? a > b : a >= b;
        case CMP_LE: return a <= b;
        case SELECT: return t != 0 ? a : b;
        default: return NAN;
    }
}

static void pointwise(Run& run, const Descriptor& op) {
    const int mode = op.part(PW)->one<int>(PW_MODE);
    const int64_t axis = op.part(PW)->one<int64_t>(PW_AXIS, 0);
    const Tensor y = tensor_of(op.part(PW_Y)), x = tensor_of(op.part(PW_X));
    const Shared b = op.part(PW_B), t = op.part(PW_T);
    std::vector<double> results;
    for (int64_t i = 0; i < y.count(); ++i) {
        const auto index = index_of(i, y.dims);
        if (mode == GEN_INDEX) {
            results.push_back((double)index[axis]);
            continue;
        }
        const double other = b ? run.get(tensor_of(b), index) : 0, choice = t ? run.get(tensor_of(t), index) : 0;
        results.push_back(apply(mode, run.get(x, index), other, choice));
    }
    run.put(y, results);
}

static void multiply(Run& run, const Descriptor& op) {
    const Tensor a = tensor_of(op.part(MM_A)), b = tensor_of(op.part(MM_B)), c = tensor_of(op.part(MM_C));
    const size_t last = a.dims.size() - 1;
    std::vector<double> results;
    for (int64_t i = 0; i < c.count(); ++i) {
        auto left = index_of(i, c.dims), right = left;
        double sum = 0;
        for (int64_t k = 0; k < a.dims[last]; ++k) {
            left[last] = k, right[last - 1] = k;
            sum += run.get(a, left) * run.get(b, right);
        }
        results.push_back(sum);
    }
    run.put(c, results);
}

static void reduce(Run& run, const Descriptor& op) {
    const bool is_max = op.part(RED)->one<int>(RED_OPERATOR) == 3;
    const Tensor x = tensor_of(op.part(RED_X)), y = tensor_of(op.part(RED_Y));
    std::vector<double> results(y.count(), is_max ? -INFINITY : 0);
    for (int64_t i = 0; i < x.count(); ++i) {
        const auto index = index_of(i, x.dims);
        int64_t to = 0;
        for (size_t d = 0; d < y.dims.size(); ++d) to = to * y.dims[d] + (y.dims[d] == 1 ? 0 : index[d]);
        const double value = run.get(x, index);
        results[to] = is_max ? std::max(results[to], value) : results[to] + value;
    }
    run.put(y, results);
}

// Every tensor of a graph.
static std::vector<Shared> tensors_of(const Descriptor& graph) {
    std::vector<Shared> all;
    for (const auto& op : graph.parts.at(OPS))
        for (const auto& entry : op->parts)
            for (const auto& part : entry.second)
                if (part->kind == TENSOR) all.push_back(part);
    return all;
}

static bool has_fused_tanh(const Descriptor& graph) {
    for (const auto& op : graph.parts.at(OPS))
        if (op->kind == OP_POINTWISE && op->part(PW)->one<int>(PW_MODE) == TANH) return true;
    return false;
}

static bool is_whole(const Descriptor& d) {
    const auto has = [&](std::vector<int> parts) {
        return std::all_of(parts.begin(), parts.end(), [&](int p) { return d.part(p) && d.part(p)->is_final; });
    };
    switch (d.kind) {
        case TENSOR: {
            const Tensor t = tensor_of(std::make_shared<Descriptor>(d));
            const bool is_positive = std::all_of(t.dims.begin(), t.dims.end(), [](int64_t n) { return n > 0; });
            return t.dims.size() >= 3 && t.dims.size() == t.strides.size() && is_positive && t.uid != 0;
        }
        case OP_CONVOLUTION: {
            if (!has({CONV, CONV_X, CONV_W, CONV_Y})) return false;
            const Tensor x = tensor_of(d.part(CONV_X)), w = tensor_of(d.part(CONV_W)), y = tensor_of(d.part(CONV_Y));
            const auto how = d.part(CONV);
            const auto pre = how->list<int64_t>(PRE), post = how->list<int64_t>(POST), step = how->list<int64_t>(STRIDES);
            const auto spread = how->list<int64_t>(DILATIONS);
            if (x.dims[1] % w.dims[1] || y.dims[1] != w.dims[0] || y.dims[0] != x.dims[0]) return false;
            if (how->one<int64_t>(SPATIAL) != (int64_t)x.dims.size() - 2) return false;
            for (size_t i = 0; i + 2 < x.dims.size(); ++i)
                if ((x.dims[i + 2] + pre[i] + post[i] - spread[i] * (w.dims[i + 2] - 1) - 1) / step[i] + 1 != y.dims[i + 2]) return false;
            return true;
        }
        case OP_POINTWISE: {
            if (!has({PW, PW_X, PW_Y})) return false;
            const Tensor y = tensor_of(d.part(PW_Y));
            for (int part : {PW_X, PW_B, PW_T}) {
                if (!d.part(part)) continue;
                const Tensor t = tensor_of(d.part(part));
                if (t.dims.size() != y.dims.size()) return false;
                for (size_t i = 0; i < t.dims.size(); ++i)
                    if (t.dims[i] != 1 && t.dims[i] != y.dims[i]) return false;
            }
            return true;
        }
        default: return true;
    }
}

extern "C" {

// What tests ask: not a part of the library.
long fake_count(int which) { return counts[which]; }
void fake_misread(int what) { misread = what; }

size_t cudnnGetVersion() { return 91900; }
int cudnnCreate(Handle** handle) {
    if (is_forbidden()) return fail(EXECUTION_FAILED, "a stream is being captured");
    *handle = new Handle{nullptr};
    return SUCCESS;
}
int cudnnDestroy(Handle* handle) { delete handle; return SUCCESS; }
int cudnnSetStream(Handle* handle, void* stream) {
    // As the real one may, it looks at the stream that it was told before.
    if (handle->stream && is_gone(handle->stream)) return fail(BAD_PARAM, "the stream of before is no more");
    handle->stream = stream;
    return SUCCESS;
}
void cudnnGetLastErrorString(char* text, size_t size) { snprintf(text, size, "%s", last_error); }
int cudnnBackendCreateDescriptor(int kind, Shared** made) {
    *made = new Shared(new Descriptor{kind});
    return SUCCESS;
}
int cudnnBackendDestroyDescriptor(Shared* d) { delete d; return SUCCESS; }
int cudnnBackendSetAttribute(Shared* d, int attribute, int type, int64_t count, const void* from) {
    if ((*d)->is_final) return fail(BAD_PARAM, "set after it was finalized");
    if (type == 15) {
        for (int64_t i = 0; i < count; ++i) (*d)->parts[attribute].push_back(*((Shared* const*)from)[i]);
        return SUCCESS;
    }
    const char* bytes = (const char*)from;
    (*d)->values[attribute] = std::vector<char>(bytes, bytes + count * bytes_of(type));
    return SUCCESS;
}
int cudnnBackendFinalize(Shared* shared) {
    Descriptor& d = **shared;
    if (d.kind == PLAN && is_forbidden()) return fail(EXECUTION_FAILED, "a stream is being captured");
    if (!is_whole(d)) return fail(BAD_PARAM, "sizes do not fit together");
    if (d.kind == ENGINEHEUR) {
        // There has to be something that no engine does: 13 filters, and in fused form, tanh.
        for (const auto& op : d.part(HEUR_GRAPH)->parts.at(OPS))
            if (op->kind == OP_CONVOLUTION && tensor_of(op->part(CONV_W)).dims[0] == 13) return fail(NOT_SUPPORTED, "no engine");
        // And where a test asks for it, padding that is not the same before and behind.
        for (const auto& op : d.part(HEUR_GRAPH)->parts.at(OPS))
            if (misread == UNEVEN_PADDING && op->kind == OP_CONVOLUTION && op->part(CONV)->list<int64_t>(PRE) != op->part(CONV)->list<int64_t>(POST))
                return fail(NOT_SUPPORTED, "no engine for uneven padding");
        if (has_fused_tanh(*d.part(HEUR_GRAPH))) return fail(NOT_SUPPORTED, "no fused engine");
    }
    if (d.kind == PLAN && d.values.count(PLAN_JSON)) {
        const auto text = d.list<char>(PLAN_JSON);
        const std::string read(text.begin(), text.end());
        std::lock_guard<std::mutex> guard(plans_lock);
        const size_t at = read.compare(0, PLAN_TEXT.size(), PLAN_TEXT) ? plans.size() : std::stoul(read.substr(PLAN_TEXT.size()));
        if (at >= plans.size()) return fail(BAD_PARAM, "no such plan");
        d.parts[PLAN_CFG] = {plans[at]};
    }
    // The heuristic's first engine does not work.
    if (d.kind == PLAN && d.part(PLAN_CFG)->part(CFG_ENGINE)->one<int64_t>(ENGINE_INDEX) == 7) return fail(NOT_SUPPORTED, "runtime compilation failed");
    d.is_final = true;
    return SUCCESS;
}
int cudnnBackendGetAttribute(Shared* shared, int attribute, int type, int64_t wanted, int64_t* count, void* to) {
    Descriptor& d = **shared;
    *count = 1;
    if (attribute == RESULTS) {
        // One that fails, one with tensor cores, one without.
        const int64_t engines[3] = {7, 0, 1};
        *count = d.one<int>(HEUR_MODE) == 3 ? 3 : 0;
        if (!to) return SUCCESS;
        *count = std::min(*count, wanted);
        for (int64_t i = 0; i < *count; ++i) {
            Shared engine(new Descriptor{ENGINE, true});
            engine->values[ENGINE_INDEX] = std::vector<char>((const char*)&engines[i], (const char*)(&engines[i] + 1));
            engine->parts[HEUR_GRAPH] = {d.part(HEUR_GRAPH)};
            Descriptor& config = **((Shared**)to)[i];
            config.parts[CFG_ENGINE] = {engine};
            config.is_final = true;
        }
        return SUCCESS;
    }
    if (attribute == CFG_ENGINE) {
        **((Shared**)to)[0] = *d.part(CFG_ENGINE);
        return SUCCESS;
    }
    if (attribute == ENGINE_INDEX) {
        *(int64_t*)to = d.one<int64_t>(ENGINE_INDEX);
        return SUCCESS;
    }
    if (attribute == ENGINE_NOTES) {
        *count = d.one<int64_t>(ENGINE_INDEX) == 0;
        if (*count) *(uint32_t*)to = 0;
        return SUCCESS;
    }
    if (attribute == PLAN_JSON) {
        std::lock_guard<std::mutex> guard(plans_lock);
        const Shared config = d.part(PLAN_CFG);
        const size_t at = std::find(plans.begin(), plans.end(), config) - plans.begin();
        const std::string text = PLAN_TEXT + std::to_string(at);
        if (wanted && at == plans.size()) plans.push_back(config);
        *count = text.size();
        if (wanted) memcpy(to, text.data(), std::min((size_t)wanted, text.size()));
        return SUCCESS;
    }
    if (attribute == PLAN_WORKSPACE) {
        *(int64_t*)to = WORKSPACE_BYTES;
        return SUCCESS;
    }
    return fail(BAD_PARAM, "unknown attribute");
}
int cudnnBackendExecute(Handle* handle, Shared* plan, Shared* variants) {
    if (!(*plan)->is_final || !(*variants)->is_final) return fail(BAD_PARAM, "not finalized");
    const Shared engine = (*plan)->part(PLAN_CFG)->part(CFG_ENGINE), graph = engine->part(HEUR_GRAPH);
    const auto uids = (*variants)->list<int64_t>(VARIANT_UIDS);
    const auto pointers = (*variants)->list<void*>(VARIANT_POINTERS);
    Run run{};
    run.workspace = (*variants)->one<void*>(VARIANT_WORKSPACE);
    if (uids.size() != pointers.size() || !run.workspace || (uint64_t)run.workspace % 256) return fail(BAD_PARAM, "addresses are missing");
    bool has_f32 = false, has_gaps = false;
    void* result = nullptr;
    for (const auto& d : tensors_of(*graph)) {
        const Tensor t = tensor_of(d);
        if (t.is_virtual) continue;
        const auto at = std::find(uids.begin(), uids.end(), t.uid);
        if (at == uids.end()) return fail(BAD_PARAM, "an address is missing");
        void* address = pointers[at - uids.begin()];
        if (t.is_value) {
            run.values[t.uid] = misread == SCALE ? 1.0 : *(const float*)address;
            continue;
        }
        if (!address || (uint64_t)address % d->one<int64_t>(ALIGNMENT)) return fail(BAD_PARAM, "an address is not aligned");
        run.addresses[t.uid] = address;
            }
    bool has[3] = {false, false, false};
    int products = 0;
    bool has_groups = false;
    for (const auto& op : graph->parts.at(OPS)) {
        has[0] = has[0] || op->kind == OP_CONVOLUTION;
        products += op->kind == OP_MATMUL;
        if (op->kind == OP_CONVOLUTION) has_f32 = has_f32 || tensor_of(op->part(CONV_X)).type == F32;
        if (op->kind == OP_CONVOLUTION) has_groups = tensor_of(op->part(CONV_X)).dims[1] != tensor_of(op->part(CONV_W)).dims[1];
        if (op->kind != OP_POINTWISE) continue;
        const int mode = op->part(PW)->one<int>(PW_MODE);
        // The sum that attention is known by adds nothing from memory.
        has[1] = has[1] || (mode == ADD && run.addresses.count(tensor_of(op->part(PW_B)).uid));
        has[2] = has[2] || mode == SWISH || mode == GELU || mode == GELU_TANH;
        has_gaps = has_gaps || mode == IDENTITY;
        const Shared b = op->part(PW_B);
        if (b && mode == ADD && misread == ADDEND_ADDRESS && run.addresses.count(tensor_of(b).uid))
            run.addresses[tensor_of(b).uid] = (char*)run.addresses[tensor_of(b).uid] + size_of(tensor_of(b).type);
    }
    const bool of[9] = {true, has[0], products == 2, has[1], has[2], has_gaps, has_groups, true, has_f32 && engine->one<int64_t>(ENGINE_INDEX) == 0};
    for (int i = 0; i < 9; ++i) counts[i] += of[i];
    const Shared last = graph->parts.at(OPS).back();
    const int out = last->kind == OP_POINTWISE ? PW_Y : last->kind == OP_MATMUL ? MM_C : CONV_Y;
    result = run.addresses[tensor_of(last->part(out)).uid];
    const bool has_tensor_cores = engine->one<int64_t>(ENGINE_INDEX) == 0;
    const bool ok = enqueue(handle->stream, [=]() mutable {
        spend(has_tensor_cores ? 4 : 1);
        Run now = run;
        if (misread != WORKSPACE) memset(now.workspace, 0xff, WORKSPACE_BYTES);
        for (const auto& op : graph->parts.at(OPS)) {
            if (op->kind == OP_CONVOLUTION) convolve(now, *op);
            if (op->kind == OP_POINTWISE) pointwise(now, *op);
            if (op->kind == OP_MATMUL) multiply(now, *op);
            if (op->kind == OP_REDUCTION) reduce(now, *op);
        }
        if (misread == WORKSPACE) memset(result, 0xff, 8);
    });
    return ok ? SUCCESS : fail(BAD_PARAM, "no driver");
}
}
