// A stand-in for libcublasLt.so.13: the functions that the backend calls, with the real library's signatures and numbers.
// It computes what its descriptors and pointers say, on the host, and refuses what the real one refuses: so what the backend
// hands over can be checked without a device.
#include "fake_library.h"

#include <algorithm>
#include <cstdio>

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
// Schemes to add up parts of sums that several blocks share.
enum Reduction { IN_OUTPUT_TYPE = 1 | 4, ALL_SCHEMES = 7 };
enum Epilogue { DEFAULT = 1, BIAS = 4, GELU = 32, GELU_BIAS = 36 };
enum Compute { COMPUTE_32F = 68, COMPUTE_32F_FAST_TF32 = 77 };

struct Product {
    int compute, scale, op[2] = {0, 0}, epilogue = DEFAULT;
    void* bias = nullptr;
};
struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t stride;
    int32_t batch = 1;
    int64_t batch_stride = 0;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t align[4] = {256, 256, 256, 256};
    uint32_t reduction = ALL_SCHEMES;
};
struct Algorithm {
    uint64_t words[8];
};
struct Found {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

static const uint64_t MAGIC = 0x6f78696469666600;
// How many calls there were with: any form, a bias, GELU, an addend, several matrices, a turned right operand, a turned
// left one, TF32, a workspace, the second algorithm, parts of sums rounded to 16 bits.
static long counts[11];
// What is misread on purpose, so that a test can see that it shows.
enum Misread { NOTHING, STRIDE, TURNED, ADDEND, BIAS_ADDRESS, BATCH, WORKSPACE, EPILOGUE, LEFT_RIGHT, FAILURE, SECOND_ALGORITHM,
               // What is refused: epilogues, products of 40 columns, whatever is captured.
               NO_EPILOGUE, FAILURE_OF_40, FAILURE_IN_A_CAPTURE };
static int misread = NOTHING;
static std::vector<uint64_t> results;

static double tf32(double value) {
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    bits = (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu;
    memcpy(&narrow, &bits, 4);
    return narrow;
}
static double gelu(double x) { return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); }

extern "C" {

// What tests ask: not a part of the library.
long fake_count(int which) { return counts[which]; }
// Where results went since this was last asked.
size_t fake_results(uint64_t* to, size_t most) {
    const size_t count = std::min(results.size(), most);
    std::copy(results.begin(), results.begin() + count, to);
    results.clear();
    return count;
}
void fake_misread(int what) { misread = what; }

size_t cublasLtGetVersion() { return 130100; }
int cublasLtCreate(void** handle) {
    if (is_forbidden()) return NOT_INITIALIZED;
    *handle = (void*)0x200;
    return SUCCESS;
}
int cublasLtDestroy(void*) { return SUCCESS; }
int cublasLtMatmulDescCreate(Product** product, int compute, int scale) {
    *product = new Product{compute, scale};
    return SUCCESS;
}
int cublasLtMatmulDescDestroy(Product* product) { delete product; return SUCCESS; }
int cublasLtMatmulDescSetAttribute(Product* p, int which, const void* value, size_t bytes) {
    void* to = which == 3 ? (void*)&p->op[0] : which == 4 ? (void*)&p->op[1] : which == 7 ? (void*)&p->epilogue : which == 8 ? (void*)&p->bias : nullptr;
    if (!to || bytes != (which == 8 ? 8 : 4)) return INVALID_VALUE;
    memcpy(to, value, bytes);
    return SUCCESS;
}
int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t cols, int64_t stride) {
    if (stride < (int64_t)rows) return INVALID_VALUE;
    *layout = new Layout{type, rows, cols, stride};
    return SUCCESS;
}
int cublasLtMatrixLayoutDestroy(Layout* layout) { delete layout; return SUCCESS; }
int cublasLtMatrixLayoutSetAttribute(Layout* l, int which, const void* value, size_t bytes) {
    void* to = which == 5 ? (void*)&l->batch : which == 6 ? (void*)&l->batch_stride : nullptr;
    if (!to || bytes != (which == 5 ? 4 : 8)) return INVALID_VALUE;
    memcpy(to, value, bytes);
    return SUCCESS;
}
int cublasLtMatmulPreferenceCreate(Preference** preference) { *preference = new Preference; return SUCCESS; }
int cublasLtMatmulPreferenceDestroy(Preference* preference) { delete preference; return SUCCESS; }
int cublasLtMatmulPreferenceSetAttribute(Preference* p, int which, const void* value, size_t bytes) {
    void* to = which == 1 ? (void*)&p->workspace : which == 3 ? (void*)&p->reduction : which >= 5 && which <= 8 ? (void*)&p->align[which - 5] : nullptr;
    if (!to || bytes != (which == 1 ? 8 : 4)) return INVALID_VALUE;
    memcpy(to, value, bytes);
    return SUCCESS;
}

static bool fits(const Product* p, const Layout* a, const Layout* b, const Layout* c, const Layout* d) {
    const uint64_t m = d->rows, n = d->cols;
    const uint64_t k = p->op[0] ? a->rows : a->cols;
    if ((p->op[0] ? a->cols : a->rows) != m || (p->op[1] ? b->cols : b->rows) != k || (p->op[1] ? b->rows : b->cols) != n) return false;
    if (c->rows != m || c->cols != n || a->type != b->type || c->type != d->type) return false;
    if (a->batch != d->batch || b->batch != d->batch || c->batch != d->batch) return false;
    const bool is_known = p->epilogue == DEFAULT || p->epilogue == BIAS || p->epilogue == GELU || p->epilogue == GELU_BIAS;
    return is_known && p->scale == F32 && (p->compute == COMPUTE_32F || (p->compute == COMPUTE_32F_FAST_TF32 && a->type == F32));
}
int cublasLtMatmulAlgoGetHeuristic(void* handle, Product* p, Layout* a, Layout* b, Layout* c, Layout* d, Preference* preference,
                                   int wanted, Found* found, int* count) {
    *count = 0;
    if (handle != (void*)0x200 || !fits(p, a, b, c, d)) return INVALID_VALUE;
    // As the real one on products of 13 columns: there has to be something that it does not do.
    if (d->rows == 13 || (misread == NO_EPILOGUE && p->epilogue != DEFAULT)) return NOT_SUPPORTED;
    for (int i = 0; i < wanted && i < 2; ++i) {
        const size_t workspace = i == 0 ? 4096 : 0;
        if (workspace > preference->workspace) continue;
        Found f{{{MAGIC + i}}, workspace, SUCCESS, 1.0f};
        for (int operand = 0; operand < 4; ++operand) f.algorithm.words[1 + operand] = preference->align[operand];
        // Where it may, it adds up parts of sums in the result's type.
        f.algorithm.words[5] = (preference->reduction & IN_OUTPUT_TYPE) != 0 && d->type != F32;
        found[(*count)++] = f;
    }
    return SUCCESS;
}
int cublasLtMatmul(void* handle, Product* product, const float* alpha, const void* a, Layout* la, const void* b, Layout* lb,
                   const float* beta, const void* c, Layout* lc, void* d, Layout* ld, const Algorithm* algorithm, void* workspace,
                   size_t workspace_bytes, void* stream) {
    if (misread == FAILURE || (misread == FAILURE_OF_40 && ld->rows == 40) || (misread == FAILURE_IN_A_CAPTURE && is_captured(stream)))
        return EXECUTION_FAILED;
    Product p = *product;
    Layout A = *la, B = *lb, C = *lc, D = *ld;
    if (handle != (void*)0x200 || !fits(&p, la, lb, lc, ld) || algorithm->words[0] - MAGIC > 1) return INVALID_VALUE;
    const size_t needed = algorithm->words[0] == MAGIC ? 4096 : 0;
    const void* operands[4] = {a, b, c, d};
    for (int i = 0; i < 4; ++i)
        if (!operands[i] || (uint64_t)operands[i] % algorithm->words[1 + i]) return INVALID_VALUE;
    if (workspace_bytes < needed || (needed && (!workspace || (uint64_t)workspace % 256))) return INVALID_VALUE;
    const bool has_bias = p.epilogue & BIAS;
    if (has_bias && !p.bias) return INVALID_VALUE;
    const bool is_rounded = p.compute == COMPUTE_32F_FAST_TF32;
    const bool is_second = algorithm->words[0] != MAGIC;
    const bool has_rounded_parts = algorithm->words[5];
    const bool of[11] = {true, has_bias, (p.epilogue & GELU) != 0, *beta != 0, D.batch > 1, p.op[0] != 0, p.op[1] != 0, is_rounded, needed != 0, is_second, has_rounded_parts};
    for (int i = 0; i < 11; ++i) counts[i] += of[i];
    results.push_back((uint64_t)d);
    const float one = *alpha;
    float add = *beta;
    const char* bias = (const char*)p.bias;
    if (misread == STRIDE) A.stride += A.cols > 1, B.stride += B.cols > 1;
    if (misread == TURNED) p.op[0] = A.rows == A.cols ? !p.op[0] : p.op[0];
    if (misread == ADDEND) add = 1 - add;
    if (misread == BIAS_ADDRESS && bias) bias += size_of(D.type);
    if (misread == BATCH) B.batch_stride = 0;
    if (misread == EPILOGUE) p.epilogue = has_bias ? BIAS : DEFAULT;
    if (misread == WORKSPACE && needed) workspace = d;
    if (misread == LEFT_RIGHT) std::swap(a, b);
    if (misread == SECOND_ALGORITHM && is_second) std::swap(a, b);
    const bool ok = enqueue(stream, [=] {
        // The heuristic's first algorithm is not the fastest.
        spend(is_second ? 1 : 3);
        const int64_t m = D.rows, n = D.cols, k = p.op[0] ? A.rows : A.cols;
        std::vector<double> results;
        for (int32_t z = 0; z < D.batch; ++z)
            for (int64_t j = 0; j < n; ++j)
                for (int64_t i = 0; i < m; ++i) {
                    double sum = 0;
                    for (int64_t t = 0; t < k; ++t) {
                        double x = read(a, z * A.batch_stride + (p.op[0] ? t + i * A.stride : i + t * A.stride), A.type);
                        double y = read(b, z * B.batch_stride + (p.op[1] ? j + t * B.stride : t + j * B.stride), B.type);
                        if (is_rounded) x = tf32(x), y = tf32(y);
                        sum += x * y;
                        if (has_rounded_parts && t % 8 == 7) {
                            uint16_t part;
                            write(&part, 0, D.type, sum);
                            sum = read(&part, 0, D.type);
                        }
                    }
                    double value = one * sum;
                    if (add != 0) value += add * read(c, z * C.batch_stride + i + j * C.stride, C.type);
                    if (has_bias) value += read(bias, i, D.type);
                    results.push_back(p.epilogue & GELU ? gelu(value) : value);
                }
        size_t at = 0;
        if (misread != WORKSPACE && needed) memset(workspace, 0xff, needed);
        for (int32_t z = 0; z < D.batch; ++z)
            for (int64_t j = 0; j < n; ++j)
                for (int64_t i = 0; i < m; ++i) write(d, z * D.batch_stride + i + j * D.stride, D.type, results[at++]);
        if (misread == WORKSPACE && needed) memset(workspace, 0xff, 8);
    });
    return ok ? SUCCESS : INVALID_VALUE;
}
}
