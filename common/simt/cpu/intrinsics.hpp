/// @file
/// CUDA's device intrinsics in emulation.
#pragma once

#include "simt/cpu/block.hpp"
#include "simt/cpu/cluster.hpp"

#include <atomic>
#include <bit>
#include <cmath>
#include <string>
#include <type_traits>

namespace simt::cpu {

/// A shuffle: source(lane) is the lane whose value a lane receives.
/// @throws Error when `width` is no power of two up to 32, or a lane reads one that is not in the mask
template <class T, class Source>
T shuffle(const char* operation, unsigned mask, T value, int width, Source source) {
    if (width < 1 || width > 32 || (width & (width - 1)))
        throw Error(std::string(operation) + ": width = " + std::to_string(width) + ": 1, 2, 4, 8, 16 and 32 are accepted, by " +
                    block().whereabouts());
    struct Deposit {
        T in, out;
        unsigned from;
    } mine{value, value, static_cast<unsigned>(source(static_cast<int>(block().self().lane)))};
    block().meet(operation, mask, mine, [&](const auto& lanes, unsigned present) {
        for (unsigned lane = 0; lane < kLanes; ++lane) {
            if (!(present >> lane & 1u)) continue;
            const unsigned from = lanes[lane]->from;
            if (!(present >> from & 1u))
                throw Error(std::string(operation) + ": lane " + std::to_string(lane) + " reads lane " + std::to_string(from) +
                            ", which is not in the mask, in the warp of " + block().whereabouts());
            lanes[lane]->out = lanes[from]->in;
        }
    });
    return mine.out;
}

inline unsigned ballot(const char* operation, unsigned mask, int predicate) {
    struct Deposit {
        bool predicate;
        unsigned out;
    } mine{predicate != 0, 0};
    block().meet(operation, mask, mine, [](const auto& lanes, unsigned present) {
        unsigned result = 0;
        for (unsigned lane = 0; lane < kLanes; ++lane)
            if ((present >> lane & 1u) && lanes[lane]->predicate) result |= 1u << lane;
        for (unsigned lane = 0; lane < kLanes; ++lane)
            if (present >> lane & 1u) lanes[lane]->out = result;
    });
    return mine.out;
}

/// simt::warp_sum() and simt::warp_max() of the running thread.
/// @throws Error when lanes meet with different widths, or one would read another that is not there
float warp_sum(float value, int width);
float warp_max(float value, int width);

}  // namespace simt::cpu

inline void __syncthreads() { simt::cpu::block().sync_threads("__syncthreads()"); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    int nothing = 0;
    simt::cpu::block().meet("__syncwarp()", mask, nothing, [](const auto&, unsigned present) {
        if (present == simt::cpu::block().lanes_of_this_warp()) simt::cpu::block().end_warp_epoch();
    });
}

// `width` splits the warp into segments of that many lanes; a source outside of the own segment leaves the value as it is.
// Of the third argument the hardware takes the low five bits.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    return simt::cpu::shuffle("__shfl_sync()", mask, value, width,
                              [=](int lane) { return (lane & ~(width - 1)) | (source & (width - 1)); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    return simt::cpu::shuffle("__shfl_xor_sync()", mask, value, width, [=](int lane) {
        const int from = lane ^ (bits & 31);
        return from / width <= lane / width ? from : lane;
    });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
    return simt::cpu::shuffle("__shfl_down_sync()", mask, value, width, [=](int lane) {
        const int step = static_cast<int>(by & 31u);
        return (lane & (width - 1)) + step < width ? lane + step : lane;
    });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
    return simt::cpu::shuffle("__shfl_up_sync()", mask, value, width, [=](int lane) {
        const int step = static_cast<int>(by & 31u);
        return (lane & (width - 1)) >= step ? lane - step : lane;
    });
}

inline unsigned __ballot_sync(unsigned mask, int predicate) { return simt::cpu::ballot("__ballot_sync()", mask, predicate); }
inline int __any_sync(unsigned mask, int predicate) { return simt::cpu::ballot("__any_sync()", mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) {
    return simt::cpu::ballot("__all_sync()", mask, predicate) == (mask & simt::cpu::block().lanes_of_this_warp());
}

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x ? std::countr_zero(static_cast<unsigned>(x)) + 1 : 0; }

template <class T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
    return std::atomic_ref<T>(*address).fetch_add(value);
}

// One for each type, as in CUDA: with min(int, int) alone, min(0.5f, x) would be 0.
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline unsigned long min(unsigned long a, unsigned long b) { return a < b ? a : b; }
inline unsigned long max(unsigned long a, unsigned long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }

// glibc's <math.h> declares these names but does not export them: they get a body with the same linkage.
extern "C" {
inline float __expf(float x) noexcept { return std::exp(x); }
inline float __exp10f(float x) noexcept { return std::pow(10.0f, x); }
inline float __logf(float x) noexcept { return std::log(x); }
inline float __log2f(float x) noexcept { return std::log2(x); }
inline float __log10f(float x) noexcept { return std::log10(x); }
inline float __sinf(float x) noexcept { return std::sin(x); }
inline float __cosf(float x) noexcept { return std::cos(x); }
inline float __powf(float x, float y) noexcept { return std::pow(x, y); }
}
