/// @file
/// Attention with Q, K, V and P in e4m3, on the host: the yardstick of kernels that do so, and what its ways of scaling cost in accuracy.
#pragma once

#include "attention/reference.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace workbook {

/// What shares a scale: a whole tensor, a head of it, or 64 rows of a head.
enum class Shares { tensor, head, block };

inline constexpr int kRowsOfBlock = 64;

/// Numbers in e4m3 and their scales: each stands for element * scale.
struct E4m3Tensor {
    std::vector<std::uint8_t> elements;  ///< bits of e4m3, in the order of the tensor
    std::vector<float> scales;           ///< (B, heads, ceil(rows / 64)), equal where they are shared by more
};

/// What an element is multiplied by before it is rounded, and what the kernels multiply by afterwards.
struct Scaling {
    float multiplier, scale;
};
/// From the largest magnitude of the elements that share a scale, and the factor that each is multiplied by before.
using ScalingRule = Scaling (*)(float largest, float factor);

/// The largest magnitude becomes 448, the largest number of e4m3. A scale is at least 2^-96: what is below 2^-106 becomes zero.
Scaling largest_is_448(float largest, float factor);

/// Scales and rounds to nearest even. Infinite elements and NaN have no part in the scale and become NaN.
/// @param x (B, heads, rows, dim) in memory with these strides, and packed
/// @param factor that each element is multiplied by before
/// @throws InvalidArgument when x has not as many elements as the shape
E4m3Tensor quantise_e4m3(std::span<const float> x, int batch, int heads, int rows, int dim, const Strides& strides, Shares shares,
                         float factor = 1.0f, ScalingRule rule = largest_is_448);

/// Multiplies each row of d elements (a power of two) by a random orthogonal matrix: random signs, then a Hadamard matrix / sqrt(d).
/// With Q and K rotated by the same seed, Q K^T stays what it was, and what was an outlier in one column is spread over all
/// (incoherent processing: FlashAttention-3, Shah et al. 2024, section 3.3; QuIP, Chee et al. 2023).
/// @throws InvalidArgument when d is no power of two or x holds no whole number of rows
void rotate_rows(std::span<float> x, int d, std::uint64_t seed);

/// Attention on Q, K and V that were quantised, with float32 sums, and with weights that are rounded to e4m3 relative to 2^5 for the
/// largest of a row; the result is rounded to problem.dtype.
/// @param rotated Q and K are rotated first, by rotate_rows() with seed 1
/// @throws InvalidArgument as reference_forward()
ReferenceRows fp8_forward(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                          std::span<const long long> rows, Shares shares, bool rotated, ScalingRule rule = largest_is_448);

/// The yardstick of judge() for kernels with a scale for every 64 rows: fp8_forward() with these, not rotated. One rounding of P is an
/// error of up to 2^-4. Hopper's tensor cores keep about 14 bits when they add products of e4m3 (DeepSeek-V3, 2024, section 3.3.2).
ReferenceRows plain_fp8_forward(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                                std::span<const long long> rows);

}  // namespace workbook
