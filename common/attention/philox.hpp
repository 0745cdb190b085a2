/// @file
/// Philox4x32-10 and normal numbers made from it, the same bits in host and device code.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace workbook {

/// Four 32-bit words: Philox's counter, and what it makes of it.
struct PhiloxWords {
    std::uint32_t word[4];
};

/// Philox4x32 with 10 rounds (Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.3).
/// @param key the key's low word is key[0] of the paper, its high word key[1]
__host__ __device__ inline PhiloxWords philox4x32_10(PhiloxWords counter, std::uint64_t key) {
    std::uint32_t key0 = static_cast<std::uint32_t>(key), key1 = static_cast<std::uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * counter.word[0];
        const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * counter.word[2];
        counter = {{static_cast<std::uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<std::uint32_t>(product1),
                    static_cast<std::uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<std::uint32_t>(product0)}};
        key0 += 0x9E3779B9u;  // the golden ratio
        key1 += 0xBB67AE85u;  // sqrt(3) - 1
    }
    return counter;
}

/// The words that belong to one draw of one element: the counter is (element low, element high, stream, draw), the key the seed.
__host__ __device__ inline PhiloxWords random_words(std::uint64_t seed, std::uint32_t stream, std::uint64_t element, std::uint32_t draw) {
    return philox4x32_10({{static_cast<std::uint32_t>(element), static_cast<std::uint32_t>(element >> 32), stream, draw}}, seed);
}

/// A number in [0, 1): 53 random bits times 2^-53.
__host__ __device__ inline double unit_interval(std::uint32_t low, std::uint32_t high) {
    return static_cast<double>((std::uint64_t{high} << 32 | low) >> 11) * 0x1p-53;
}

// The two functions that Box-Muller needs are written out, because the libraries of host and device differ in the last bit.
// They use only operations that IEEE 754 rounds correctly. Each sum of a product is an explicit fma: no compiler may then
// choose to fuse in one place and not in the other. (Products by powers of two are exact, fused or not.)

/// Natural logarithm of u, 0 < u <= 1, normal. Relative error below 1e-14.
__host__ __device__ inline double portable_log(double u) {
    int exponent = 0;
    double m = std::frexp(u, &exponent);  // u = m * 2^exponent, 1/2 <= m < 1
    if (m < 0.70710678118654752) {
        m *= 2;
        --exponent;
    }
    // log m = 2 atanh(s) = 2 (s + s^3/3 + s^5/5 + ...), |s| <= 0.172
    const double s = (m - 1) / (m + 1), z = s * s;
    double series = 1.0 / 21;
    for (int n = 19; n >= 3; n -= 2) series = std::fma(series, z, 1.0 / n);
    const double twice = 2 * s;
    return std::fma(static_cast<double>(exponent), 0.69314718055994531, std::fma(twice * z, series, twice));
}

/// cos(2 pi t), 0 <= t < 1. Absolute error below 1e-15.
__host__ __device__ inline double portable_cos_turns(double t) {
    const double quarter = std::floor(std::fma(4.0, t, 0.5));                      // the nearest quarter of a turn, 0 to 4
    const double x = 6.2831853071795865 * std::fma(-0.25, quarter, t), z = x * x;  // |x| <= pi/4
    const int q = static_cast<int>(quarter) & 3;
    double series = 1;  // Horner's scheme of the Taylor series: 1 - z/(1*2) (1 - z/(3*4) (...)), from sin's or cos's factors
    const int odd = q & 1;
    for (int n = 16; n >= 2; n -= 2) series = std::fma(z * series, -1.0 / ((n - 1 + odd) * (n + odd)), 1.0);
    const double value = odd ? x * series : series;  // sin(x) or cos(x)
    return q == 1 || q == 2 ? -value : value;
}

/// A number from N(0, 1) by Box and Muller (1958), in float64.
__host__ __device__ inline double standard_normal(const PhiloxWords& words) {
    const double u = 1 - unit_interval(words.word[0], words.word[1]);  // in (0, 1], exact
    const double t = unit_interval(words.word[2], words.word[3]);
    return std::sqrt(-2 * portable_log(u)) * portable_cos_turns(t);
}

}  // namespace workbook
