// What every generated kernel builds on: element types, conversions, vector access, reductions.
//
// No header is included: NVRTC brings none, and a wheel must not need a CUDA toolkit. Only what is between OX_DEVICE and
// OX_END_DEVICE differs when the same text is compiled for the processor (tests/cuda/shim.h has its own form of it); the
// rest, and every kernel, is the same text in both.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef int i32;
typedef long long i64;
typedef unsigned long long u64;

struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct bool8 { u8 bits; };

// OX_DEVICE
#define OX_FN __device__ __forceinline__
#define OX_SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define OX_DYNAMIC_SHARED(type, name)                                                                                   \
    extern __shared__ __align__(16) unsigned char ox_dynamic_shared[];                                                  \
    type* name = (type*)ox_dynamic_shared

OX_FN float f16_to_f32(u16 bits) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
}
OX_FN u16 f32_to_f16(float x) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

// What tensor cores do, where they do it; mma() below is the same by shuffles. Before sm_80 they take 8 terms at a time.
#if __CUDA_ARCH__ >= 800
#define OX_MMA(type)                                                                                                    \
    OX_FN void mma_core(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, type) {                                       \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." #type "." #type ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "         \
            "{%8, %9}, {%0, %1, %2, %3};"                                                                               \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                            \
    }
#define OX_MMA_CORE_F16 1
#define OX_MMA_CORE_BF16 1
OX_MMA(f16)
OX_MMA(bf16)
#else
#define OX_MMA_CORE_F16 1
OX_FN void mma_core(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
}
#endif
// OX_END_DEVICE

OX_FN u16 f32_to_bf16(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40u);
    return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
#endif
}

// --- element types: widen() to what is computed in, narrow<T>() back -------------------------------------------------

OX_FN float to_float(f16 x) { return f16_to_f32(x.bits); }
OX_FN float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
OX_FN float to_float(bool8 x) { return x.bits ? 1.0f : 0.0f; }
OX_FN float to_float(u8 x) { return (float)x; }
OX_FN float to_float(i8 x) { return (float)x; }
OX_FN float to_float(i32 x) { return (float)x; }
OX_FN float to_float(i64 x) { return (float)x; }
OX_FN float to_float(float x) { return x; }
OX_FN float to_float(double x) { return (float)x; }

OX_FN double to_double(f16 x) { return to_float(x); }
OX_FN double to_double(bf16 x) { return to_float(x); }
OX_FN double to_double(bool8 x) { return x.bits ? 1.0 : 0.0; }
OX_FN double to_double(u8 x) { return (double)x; }
OX_FN double to_double(i8 x) { return (double)x; }
OX_FN double to_double(i32 x) { return (double)x; }
OX_FN double to_double(i64 x) { return (double)x; }
OX_FN double to_double(float x) { return (double)x; }
OX_FN double to_double(double x) { return x; }

// Truncates and saturates; NaN is 0.
OX_FN i64 to_int(double x) {
    if (x != x) return 0;
    if (x >= 9223372036854775807.0) return 0x7fffffffffffffffll;
    if (x <= -9223372036854775808.0) return -0x7fffffffffffffffll - 1;
    return (i64)x;
}
OX_FN i64 to_int(float x) { return to_int((double)x); }
OX_FN i64 to_int(f16 x) { return to_int((double)to_float(x)); }
OX_FN i64 to_int(bf16 x) { return to_int((double)to_float(x)); }
OX_FN i64 to_int(bool8 x) { return x.bits ? 1 : 0; }
OX_FN i64 to_int(u8 x) { return x; }
OX_FN i64 to_int(i8 x) { return x; }
OX_FN i64 to_int(i32 x) { return x; }
OX_FN i64 to_int(i64 x) { return x; }

template <class T> struct Element;
template <> struct Element<float> {
    static OX_FN float from(float x) { return x; }
    static OX_FN float from(double x) { return (float)x; }
    static OX_FN float from(i64 x) { return (float)x; }
};
template <> struct Element<double> {
    static OX_FN double from(float x) { return (double)x; }
    static OX_FN double from(double x) { return x; }
    static OX_FN double from(i64 x) { return (double)x; }
};
template <> struct Element<f16> {
    static OX_FN f16 from(float x) { return f16{f32_to_f16(x)}; }
    static OX_FN f16 from(double x) { return f16{f32_to_f16((float)x)}; }
    static OX_FN f16 from(i64 x) { return f16{f32_to_f16((float)x)}; }
};
template <> struct Element<bf16> {
    static OX_FN bf16 from(float x) { return bf16{f32_to_bf16(x)}; }
    static OX_FN bf16 from(double x) { return bf16{f32_to_bf16((float)x)}; }
    static OX_FN bf16 from(i64 x) { return bf16{f32_to_bf16((float)x)}; }
};
template <> struct Element<bool8> {
    static OX_FN bool8 from(float x) { return bool8{(u8)(x != 0.0f)}; }
    static OX_FN bool8 from(double x) { return bool8{(u8)(x != 0.0)}; }
    static OX_FN bool8 from(i64 x) { return bool8{(u8)(x != 0)}; }
};
// Floats saturate at the type's bounds, integers wrap.
#define OX_INTEGER(type, least, most)                                                                                   \
    template <> struct Element<type> {                                                                                  \
        static OX_FN type from(double x) {                                                                              \
            if (x != x) return 0;                                                                                       \
            return x >= (double)(most) ? (type)(most) : x <= (double)(least) ? (type)(least) : (type)x;                 \
        }                                                                                                               \
        static OX_FN type from(float x) { return from((double)x); }                                                     \
        static OX_FN type from(i64 x) { return (type)x; }                                                               \
    }
OX_INTEGER(u8, 0, 255);
OX_INTEGER(i8, -128, 127);
OX_INTEGER(i32, -2147483647 - 1, 2147483647);
OX_INTEGER(i64, -0x7fffffffffffffffll - 1, 0x7fffffffffffffffll);

template <class T, class C> OX_FN T narrow(C x) { return Element<T>::from(x); }

// --- vector access: V neighbours in one access of up to 16 bytes -------------------------------------------------------

template <class T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) Pack { T of[V]; };

template <int V, class T> OX_FN void load(float (&to)[V], const T* from) {
    const Pack<T, V> pack = *(const Pack<T, V>*)from;
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = to_float(pack.of[j]);
}
template <int V, class T> OX_FN void load_strided(float (&to)[V], const T* from, i64 stride) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = to_float(from[j * stride]);
}
template <int V, class T> OX_FN void load_one(float (&to)[V], const T* from) {
    const float x = to_float(*from);
#pragma unroll
    for (int j = 0; j < V; ++j) to[j] = x;
}
template <int V, class T> OX_FN void store(T* to, const float (&from)[V]) {
    Pack<T, V> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) pack.of[j] = narrow<T>(from[j]);
    *(Pack<T, V>*)to = pack;
}
template <int V, class T> OX_FN void store_strided(T* to, i64 stride, const float (&from)[V]) {
#pragma unroll
    for (int j = 0; j < V; ++j) to[j * stride] = narrow<T>(from[j]);
}
// Where a thread has two neighbours, their address need be a multiple of one element's size only.
template <int V, class T> OX_FN void load_pairs(float (&to)[V], const T* from) {
    if (V == 2) load_strided<V>(to, from, 1);
    else load<V>(to, from);
}
template <int V, class T> OX_FN void store_pairs(T* to, const float (&from)[V]) {
    if (V == 2) store_strided<V>(to, 1, from);
    else store<V>(to, from);
}

// --- arithmetic that has no name in CUDA C -----------------------------------------------------------------------------

OX_FN float m_exp(float x) { return expf(x); }
OX_FN double m_exp(double x) { return exp(x); }
OX_FN float m_log(float x) { return logf(x); }
OX_FN double m_log(double x) { return log(x); }
OX_FN float m_log2(float x) { return log2f(x); }
OX_FN double m_log2(double x) { return log2(x); }
OX_FN float m_log10(float x) { return log10f(x); }
OX_FN double m_log10(double x) { return log10(x); }
OX_FN float m_log1p(float x) { return log1pf(x); }
OX_FN double m_log1p(double x) { return log1p(x); }
OX_FN float m_sin(float x) { return sinf(x); }
OX_FN double m_sin(double x) { return sin(x); }
OX_FN float m_cos(float x) { return cosf(x); }
OX_FN double m_cos(double x) { return cos(x); }
OX_FN float m_tanh(float x) { return tanhf(x); }
OX_FN double m_tanh(double x) { return tanh(x); }
OX_FN float m_sqrt(float x) { return sqrtf(x); }
OX_FN double m_sqrt(double x) { return sqrt(x); }
OX_FN float m_erf(float x) { return erff(x); }
OX_FN double m_erf(double x) { return erf(x); }
OX_FN float m_erfc(float x) { return erfcf(x); }
OX_FN double m_erfc(double x) { return erfc(x); }
OX_FN float m_floor(float x) { return floorf(x); }
OX_FN double m_floor(double x) { return floor(x); }
OX_FN float m_ceil(float x) { return ceilf(x); }
OX_FN double m_ceil(double x) { return ceil(x); }
OX_FN float m_round(float x) { return rintf(x); }
OX_FN double m_round(double x) { return rint(x); }
OX_FN float m_trunc(float x) { return truncf(x); }
OX_FN double m_trunc(double x) { return trunc(x); }
OX_FN float m_abs(float x) { return fabsf(x); }
OX_FN double m_abs(double x) { return fabs(x); }
OX_FN float m_pow(float a, float b) { return powf(a, b); }
OX_FN double m_pow(double a, double b) { return pow(a, b); }
OX_FN float m_mod(float a, float b) { return fmodf(a, b); }
OX_FN double m_mod(double a, double b) { return fmod(a, b); }
OX_FN float m_atan2(float a, float b) { return atan2f(a, b); }
OX_FN double m_atan2(double a, double b) { return atan2(a, b); }

template <class C> OX_FN C m_rsqrt(C x) { return C(1) / m_sqrt(x); }
template <class C> OX_FN C m_sigmoid(C x) { return C(1) / (C(1) + m_exp(-x)); }
template <class C> OX_FN C m_silu(C x) { return x / (C(1) + m_exp(-x)); }
template <class C> OX_FN C m_gelu(C x) { return C(0.5) * x * m_erfc(x * C(-0.70710678118654752440)); }
template <class C> OX_FN C m_gelu_tanh(C x) {
    return C(0.5) * x * (C(1) + m_tanh(C(0.79788456080286535588) * (x + C(0.044715) * x * x * x)));
}
template <class C> OX_FN C m_relu(C x) { return x < C(0) ? C(0) : x; }
template <class C> OX_FN C m_sign(C x) { return C(int(x > C(0)) - int(x < C(0))); }
template <class C> OX_FN C m_softplus(C x) { return x > C(20) ? x : m_log1p(m_exp(x)); }
template <class C> OX_FN bool m_isnan(C x) { return x != x; }
template <class C> OX_FN bool m_isinf(C x) { return x == x && x - x != C(0); }
// NaN if either is.
template <class C> OX_FN C m_max(C a, C b) { return a != a || a > b ? a : b; }
template <class C> OX_FN C m_min(C a, C b) { return a != a || a < b ? a : b; }
// The remainder has the divisor's sign.
template <class C> OX_FN C m_remainder(C a, C b) {
    const C r = m_mod(a, b);
    return r != C(0) && (r < C(0)) != (b < C(0)) ? r + b : r;
}
template <class C> OX_FN C m_floor_divide(C a, C b) {
    if (b == C(0)) return a / b;
    const C r = m_mod(a, b);
    C q = (a - r) / b;
    if (r != C(0) && (r < C(0)) != (b < C(0))) q -= C(1);
    // A zero has the division's sign.
    return q == C(0) ? C(0) * (a / b) : m_round(q);
}

// Hardware approximations, for results of 16 bits: a few units in the last place of f32.
OX_FN float fast_sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
OX_FN float fast_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }
OX_FN float fast_tanh(float x) {
    const float e = __expf(2.0f * m_abs(x));
    const float y = 1.0f - __fdividef(2.0f, e + 1.0f);
    // e overflows where tanh is 1 anyway; __fdividef by a huge number is 0.
    return m_abs(x) < 0.03125f ? x - x * x * x * 0.33333333f : x < 0.0f ? -y : y;
}
// erfc by Abramowitz and Stegun, 7.1.26: wrong by 1.5e-7 at most, which of the tiny results below -4.5 is more than a thousandth.
OX_FN float fast_gelu(float x) {
    const float z = m_abs(x) * 0.70710678f, t = __fdividef(1.0f, 1.0f + 0.3275911f * z);
    const float series = 0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f)));
    const float half = 0.5f * t * series * __expf(-z * z);
    return x * (x < 0.0f ? half : 1.0f - half);
}
OX_FN float fast_gelu_tanh(float x) {
    return 0.5f * x * (1.0f + fast_tanh(0.79788456f * (x + 0.044715f * x * x * x)));
}

// Integers wrap; a division by zero gives 0 (the interpreter refuses it).
OX_FN i64 i_neg(i64 a) { return (i64)(0 - (u64)a); }
OX_FN i64 i_add(i64 a, i64 b) { return (i64)((u64)a + (u64)b); }
OX_FN i64 i_sub(i64 a, i64 b) { return (i64)((u64)a - (u64)b); }
OX_FN i64 i_mul(i64 a, i64 b) { return (i64)((u64)a * (u64)b); }
OX_FN i64 i_remainder(i64 a, i64 b) {
    if (b == 0 || b == -1) return 0;
    const i64 r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
OX_FN i64 i_floor_divide(i64 a, i64 b) {
    if (b == 0) return 0;
    if (b == -1) return i_neg(a);
    const i64 r = a % b;
    return a / b - (r != 0 && (r < 0) != (b < 0));
}
OX_FN i64 i_shift_left(i64 a, i64 b) { return b >= 0 && b < 64 ? (i64)((u64)a << b) : 0; }
OX_FN i64 i_shift_right(i64 a, i64 b) { return a >> (b >= 0 && b < 64 ? b : 63); }
OX_FN i64 i_pow(i64 base, i64 exponent) {
    if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 == 0 ? 1 : -1) : 0;
    i64 result = 1;
    for (; exponent > 0; exponent >>= 1, base = i_mul(base, base))
        if (exponent & 1) result = i_mul(result, base);
    return result;
}
OX_FN i64 i_clamp(i64 x, i64 least, i64 most) { return x < least ? least : x > most ? most : x; }

// --- reductions over a warp and a block --------------------------------------------------------------------------------

OX_FN float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
OX_FN float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x = m_max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
// Every thread gets the result. `shared` has one float per warp; a barrier stands before it is used and after.
OX_FN float block_sum(float x, float* shared) {
    x = warp_sum(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    float sum = 0.0f;
    for (u32 w = 0; w < blockDim.x >> 5; ++w) sum += shared[w];
    return sum;
}
OX_FN float block_max(float x, float* shared) {
    x = warp_max(x);
    __syncthreads();
    if ((threadIdx.x & 31) == 0) shared[threadIdx.x >> 5] = x;
    __syncthreads();
    float most = shared[0];
    for (u32 w = 1; w < blockDim.x >> 5; ++w) most = m_max(most, shared[w]);
    return most;
}
// The same of the threads along a block's first axis, where a block has several rows: a power of two of lanes of a warp each.
OX_FN float row_sum(float x, float* shared) {
    if (blockDim.y == 1) return block_sum(x, shared);
    for (u32 step = blockDim.x >> 1; step; step >>= 1) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}
OX_FN float row_max(float x, float* shared) {
    if (blockDim.y == 1) return block_max(x, shared);
    for (u32 step = blockDim.x >> 1; step; step >>= 1) x = m_max(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}
// Joins mean and sum of squared deviations of two sets of values (Chan).
OX_FN void join_moments(float& count, float& mean, float& m2, float count_b, float mean_b, float m2_b) {
    const float total = count + count_b;
    if (total == 0.0f) return;
    const float delta = mean_b - mean, share = count_b / total;
    mean += delta * share;
    m2 += m2_b + delta * delta * count * share;
    count = total;
}

// --- products of tiles by a warp ---------------------------------------------------------------------------------------

// Two neighbours as a word, the first one below.
template <class T> OX_FN u32 word_of(T even, T odd) { return (u32)even.bits | (u32)odd.bits << 16; }
template <class T> OX_FN u32 pair_of(float even, float odd) { return word_of(narrow<T>(even), narrow<T>(odd)); }
template <class T> OX_FN float even_of(u32 word) { return to_float(T{(u16)word}); }
template <class T> OX_FN float odd_of(u32 word) { return to_float(T{(u16)(word >> 16)}); }

// c += a b of 16 x 16 and 16 x 8 elements, spread over the lanes as by mma.m16n8k16: with g = lane / 4 and t = lane % 4, `a` has
// columns 2t and 2t + 1 of rows g and g + 8, then columns 2t + 8 and 2t + 9 of both; b0 has rows 2t and 2t + 1 of column g, b1
// rows 2t + 8 and 2t + 9; `c` has columns 2t and 2t + 1 of row g, then of row g + 8.
template <class T> OX_FN void mma_by_shuffles(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 row = threadIdx.x & 28, column = (threadIdx.x & 3) * 8;
#pragma unroll
    for (u32 l = 0; l < 4; ++l) {
        u32 x[4], y[4];
#pragma unroll
        for (int r = 0; r < 4; ++r) x[r] = __shfl_sync(0xffffffffu, a[r], row + l);
        y[0] = __shfl_sync(0xffffffffu, b0, column + l);
        y[1] = __shfl_sync(0xffffffffu, b1, column + l);
        y[2] = __shfl_sync(0xffffffffu, b0, column + 4 + l);
        y[3] = __shfl_sync(0xffffffffu, b1, column + 4 + l);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = i >> 1, to = (i & 1) * 2;
            c[i] = fmaf(even_of<T>(x[at]), even_of<T>(y[to]), c[i]);
            c[i] = fmaf(odd_of<T>(x[at]), odd_of<T>(y[to]), c[i]);
            c[i] = fmaf(even_of<T>(x[at + 2]), even_of<T>(y[to + 1]), c[i]);
            c[i] = fmaf(odd_of<T>(x[at + 2]), odd_of<T>(y[to + 1]), c[i]);
        }
    }
}
// Loops over tiles are unrolled where a tile is an instruction.
template <class T> struct Mma {
    static const int UNROLL = 1;
    static OX_FN void add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_by_shuffles<T>(c, a, b0, b1); }
};
#ifdef OX_MMA_CORE_F16
template <> struct Mma<f16> {
    static const int UNROLL = 32;
    static OX_FN void add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_core(c, a, b0, b1, f16{}); }
};
#endif
#ifdef OX_MMA_CORE_BF16
template <> struct Mma<bf16> {
    static const int UNROLL = 32;
    static OX_FN void add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_core(c, a, b0, b1, bf16{}); }
};
#endif
// All lanes of a warp, at once.
template <class T> OX_FN void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { Mma<T>::add(c, a, b0, b1); }

// Of a row of `E` elements: two or eight from `column`, an even number or a multiple of eight, zeros beyond the row's end. With
// `V` above 1 elements lie side by side, the row begins at a multiple of 16 bytes, and E is a multiple of 8.
template <int V, int E, class T> OX_FN u32 word_at(const T* row, i64 stride, u32 column) {
    Pack<T, 2> pair = {};
    if (V > 1) {
        if (column < E) pair = *(const Pack<T, 2>*)(row + column);
    } else {
        if (column < E) pair.of[0] = row[column * stride];
        if (column + 1 < E) pair.of[1] = row[(column + 1) * stride];
    }
    return word_of(pair.of[0], pair.of[1]);
}
template <int V, int E, class T> OX_FN Pack<T, 8> pack_at(const T* row, i64 stride, u32 column) {
    Pack<T, 8> pack = {};
    if (V > 1) {
        if (column < E) pack = *(const Pack<T, 8>*)(row + column);
    } else {
#pragma unroll
        for (u32 j = 0; j < 8; ++j)
            if (column + j < E) pack.of[j] = row[(column + j) * stride];
    }
    return pack;
}
// Two results at an even column of such a row.
template <int V, int E, class T> OX_FN void put_pair(T* row, i64 stride, u32 column, const float (&pair)[2]) {
    if (V > 1) {
        if (column < E) store<2>(row + column, pair);
    } else {
        if (column < E) row[column * stride] = narrow<T>(pair[0]);
        if (column + 1 < E) row[(column + 1) * stride] = narrow<T>(pair[1]);
    }
}
