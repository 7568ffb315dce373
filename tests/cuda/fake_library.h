// What the stand-ins for NVIDIA's libraries share: numbers of 16 bits, and work that a stream does in its order.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <functional>
#include <vector>

// Element types as `cudaDataType_t` numbers them.
enum Type { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };

inline size_t size_of(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

inline double half_to_double(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    double value = exponent == 0    ? std::ldexp(fraction, -24)
                   : exponent == 31 ? (fraction ? NAN : INFINITY)
                                    : std::ldexp(fraction + 1024, exponent - 25);
    return h & 0x8000 ? -value : value;
}
inline uint16_t half_of(double value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    value = std::fabs(value);
    if (std::isnan(value)) return 0x7e00;
    if (value >= 65520.0) return sign | 0x7c00;
    int exponent;
    std::frexp(value, &exponent);
    exponent = exponent - 1 < -14 ? -14 : exponent - 1;
    // Rounded to even by the processor; a carry moves on into the exponent.
    const double steps = std::nearbyint(std::ldexp(value, 10 - exponent));
    return sign | (uint16_t)(steps < 1024 ? steps : steps - 1024 + (exponent + 15) * 1024);
}
inline uint16_t bfloat_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline double read(const void* base, int64_t at, int type) {
    if (type == F32) return ((const float*)base)[at];
    if (type == F64) return ((const double*)base)[at];
    const uint16_t bits = ((const uint16_t*)base)[at];
    if (type == F16) return half_to_double(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
inline void write(void* base, int64_t at, int type, double value) {
    if (type == F32) ((float*)base)[at] = (float)value;
    else if (type == F64) ((double*)base)[at] = value;
    else ((uint16_t*)base)[at] = type == F16 ? half_of(value) : bfloat_of((float)value);
}

// Lets the stand-in driver's clock go on.
inline void spend(double ms) {
    typedef void (*Spend)(double);
    static Spend spend = (Spend)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_spend");
    if (spend) spend(ms);
}

// Whether a capture forbids this thread what may allocate or wait: it is none any more then.
inline bool is_forbidden() {
    typedef int (*Forbidden)();
    static Forbidden forbidden = (Forbidden)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "fake_forbidden");
    return forbidden && forbidden();
}
// Whether a stream is being captured.
inline bool is_captured(void* stream) {
    typedef int (*Ask)(void*, int*);
    static Ask ask = (Ask)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "cuStreamIsCapturing");
    int status = 0;
    return ask && ask(stream, &status) == 0 && status != 0;
}

// Whether the driver does not know a stream any more.
inline bool is_gone(void* stream) {
    typedef int (*Ask)(void*, int*);
    static Ask ask = (Ask)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "cuStreamIsCapturing");
    int status = 0;
    return ask && ask(stream, &status) == 400;
}

// Gives the stream of the stand-in driver a function to call: now, or whenever the graph runs that captures it.
inline bool enqueue(void* stream, std::function<void()> work) {
    typedef int (*Launch)(void*, void (*)(void*), void*);
    static Launch launch = (Launch)dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), "cuLaunchHostFunc");
    // Kept for good: a graph may run it at any time.
    auto* kept = new std::function<void()>(std::move(work));
    return launch && launch(stream, [](void* data) { (*(std::function<void()>*)data)(); }, kept) == 0;
}
