/// @file
/// Attention in float64 on the host: what every kernel is compared with.
#pragma once

#include "attention/problem.hpp"

#include <optional>
#include <span>
#include <vector>

namespace workbook {

/// Relative errors of a way to calculate attention: of one rounding of P and of O, and of sums of products.
struct Rounding {
    double p, o, sum;
};

/// Rows of a result in float64. Row r stands for the flat row index rows[r] = (b * Hq + h) * Nq + i.
struct ReferenceRows {
    std::vector<long long> rows;  ///< flat row indices, ascending
    std::vector<double> o;        ///< (rows, d)
    std::vector<double> lse;      ///< (rows), natural logarithm
    // Scales of rounding error, which follow the terms of a sum also where these cancel. From reference_forward() only.
    std::vector<double> o_scale;    ///< (rows, d), sqrt(sum_j (P_j V_jc)^2): relative errors e of the P_j move O by about e * o_scale
    std::vector<double> lse_scale;  ///< (rows), |scale| * sum_j P_j sqrt(sum_c (q_c K_jc)^2): those of the dot products move LSE likewise
    /// Of results that are a yardstick of judge() and whose P or sums are not those of problem.dtype.
    std::optional<Rounding> rounding = std::nullopt;
};

/// Computes the given rows of O and LSE in float64, straight from the formula.
/// @param q,k,v packed in problem.layout, already rounded to problem.dtype and widened to float
/// @param rows  flat row indices in any order (the result's are ascending); empty means all rows
/// @throws InvalidArgument when a span has not the size that the problem says, or a row is out of range
ReferenceRows reference_forward(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                                std::span<const long long> rows = {});

/// The same rows as a plain attention computed in problem.dtype would give them: products and sums in float32,
/// S and P rounded to problem.dtype, O rounded to problem.dtype. Its error against float64 is the yardstick of judge().
/// The order of operations is that of separate kernels: S = round(scale * q k), softmax of S in float32, P = round(softmax),
/// O = round(P v); LSE is float32. Float16 S may overflow, and the row is then NaN, as it is on a GPU.
/// @throws InvalidArgument as reference_forward()
ReferenceRows plain_low_precision_forward(const Problem& problem, std::span<const float> q, std::span<const float> k,
                                          std::span<const float> v, std::span<const long long> rows = {});

/// `count` different flat row indices, ascending, spread evenly over the problem, always with the first and last row of the
/// first and last head (so that up to 4 come where fewer were asked for). All rows when the problem has no more than `count`.
/// Their distances vary, so that they fall on different rows of a kernel's tiles.
/// @throws InvalidArgument when count < 1
std::vector<long long> sample_rows(const Problem& problem, long long count);

}  // namespace workbook
