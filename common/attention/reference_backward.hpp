/// @file
/// The gradients of attention in float64 on the host: what every backward kernel is compared with.
///
/// With S = scale * Q K^T, P = softmax(S), O = P V and the gradient dO of a loss with respect to O, its gradients are (Dao et al. 2022,
/// appendix B.2)
///
///     dV = P^T dO,    dP = dO V^T,    dS = P o (dP - D),    dQ = scale * dS K,    dK = scale * dS^T Q,
///
/// where o multiplies element by element and D_i = sum_j P_ij dP_ij = sum_c dO_ic O_ic is one number a row. dK and dV are summed over
/// the query heads that share a key/value head. A row that sees no key has dQ = 0 and adds nothing to dK and dV.
#pragma once

#include "attention/problem.hpp"

#include <span>
#include <vector>

namespace workbook {

/// What gradients are made of, packed in problem.layout, rounded to problem.dtype and widened to float.
struct BackwardInputs {
    std::span<const float> q, k, v, d_o;
};

/// Some rows of the gradients, for problems where all of them take too long. A row of dQ depends on its own softmax alone. A row of
/// dK or dV needs LSE and D of every query row that sees its key: these come from what a forward pass left, which must have been
/// compared with float64 before.
struct GradientSample {
    std::vector<long long> rows;     ///< of dQ: flat indices (b * Hq + h) * Nq + i; one or more
    std::vector<long long> kv_rows;  ///< of dK and dV: flat indices (b * Hkv + h) * Nkv + j; one or more
    std::span<const float> o, lse;   ///< O, packed in problem.layout, and LSE (B, Hq, Nq)
};

/// Rows of the gradients in float64.
struct ReferenceGradients {
    std::vector<long long> rows, kv_rows;  ///< flat indices as in GradientSample, ascending
    std::vector<double> dq;                ///< (rows, d)
    std::vector<double> dk, dv;            ///< (kv_rows, d)
    // Scales of rounding error, as those of ReferenceRows; from reference_backward() only. The terms of dQ and dK are taken as
    // P_ij (|dP_ij| + |D_i|) K_jc, because dP and D are rounded before their difference.
    std::vector<double> dq_scale, dk_scale, dv_scale;
    double logits = 0;  ///< the largest |LSE|, or noise of LSE, of the rows of dQ
};

/// Computes gradients in float64, straight from the formulas above.
/// @param sample the rows to compute; empty: all, with LSE and D computed in float64 too
/// @throws InvalidArgument when a span has not the size that the problem says, or a row is out of range
ReferenceGradients reference_backward(const Problem& problem, const BackwardInputs& in, const GradientSample& sample = {});

/// The same as a plain attention computed in problem.dtype would give them: products and sums in float32; S, P, O, dP, dS and the
/// gradients rounded to problem.dtype; LSE and D float32. Its error against float64 is the yardstick of judge_gradients().
/// @throws InvalidArgument as reference_backward()
ReferenceGradients plain_low_precision_backward(const Problem& problem, const BackwardInputs& in, const GradientSample& sample = {});

/// `count` different flat row indices of dK and dV, chosen as sample_rows() chooses those of dQ. @throws InvalidArgument when count < 1
std::vector<long long> sample_kv_rows(const Problem& problem, long long count);

}  // namespace workbook
