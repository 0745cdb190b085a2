/// @file
/// Error metrics. NaN and never-written elements always fail.
#pragma once

#include "attention/reference.hpp"
#include "attention/reference_backward.hpp"

#include <span>
#include <string>

namespace workbook {

/// How far a result is from a reference.
struct Errors {
    double max_abs = 0;        ///< max |got - want|
    double max_rel = 0;        ///< max |got - want| / |want| over want != 0
    double rel_rms = 0;        ///< sqrt(sum (got - want)^2 / sum want^2)
    long long nans = 0;        ///< elements that are NaN where the reference is not, or the reverse (poison not counted)
    long long unwritten = 0;   ///< elements that still hold the poison
    long long infinities = 0;  ///< infinite where the reference is finite, the reverse, or of the other sign
    long long worst = -1;      ///< index (into the compared elements) of the largest absolute error; -1 if none is finite
    long long compared = 0;    ///< all elements; the metrics above are over those that are finite on both sides

    bool clean() const { return nans == 0 && unwritten == 0 && infinities == 0; }
};

/// Compares element by element; equal infinities are equal, and so are two NaNs.
/// @param want the reference; @param got the result widened to float
/// @param poisoned one flag an element: it still holds the poison that outputs are filled with; may be empty
/// @throws InvalidArgument when the sizes differ
Errors compare(std::span<const double> want, std::span<const float> got, std::span<const unsigned char> poisoned = {});

/// Errors of O and of LSE of one run, and what they may be.
struct Verdict {
    Errors o, lse;
    double o_allowed = 0;      ///< on o.max_abs
    double o_rms_allowed = 0;  ///< on o.rel_rms
    double lse_allowed = 0;    ///< on lse.max_abs
    bool ok = false;
    std::string why;  ///< empty when ok; else which output, which element O(b, h, i, c), got, wanted, allowed
};

/// O and LSE as a run left them, widened to float. O is packed in problem.layout, LSE is (B, Hq, Nq).
struct Result {
    std::vector<float> o, lse;
    std::vector<unsigned char> o_poisoned, lse_poisoned;  ///< one flag an element
};

/// Judges a run as the field does it: its error against float64 may be twice that of a plain attention computed in the
/// problem's type, plus a small term. Over the rows of `want`:
///
///     |O - want|    <=  2 * max |plain O - want|    + slack * max(max |want O|, max o_scale)      for each element
///     rel_rms(O)    <=  2 * rel_rms(plain O)        + slack * max(1, rms o_scale / rms want O)
///     |LSE - want|  <=  2 * max |plain LSE - want|  + 16a * (1 + L)                               for each element
///
///     slack = u_P + u_O + 5e-6 + 4a * L,    L = max(max |want LSE|, max lse_scale)
///
/// u_P and u_O are the unit roundoffs of the types of P and O (2^-24, 2^-11 for f16, 2^-8 for bf16): both are rounded once, and on a few
/// elements the plain attention may be luckier than the run. 5e-6 is for the order of float32 additions and for hardware exponentials.
/// L stands for the size of the logits: exp(s - m) has as relative error the absolute error of s, which is about a = 2^-24 times
/// the size of s and of the terms of its dot product, and the base-2 exponentials of kernels round s once or twice more.
/// Where plain.rounding is given, u_P, u_O and a are its p, o and sum; else both types are the problem's.
/// The scales are those of ReferenceRows: where terms cancel, rounding errors follow the terms and not the sum.
/// The RMS is bounded too, because max_abs cannot see a small error that all elements share.
/// Everything on O is relative to its size: small values of V are judged as strictly as large ones.
/// Elements where the plain attention is not finite (S beyond float16's range) do not count in its error.
/// NaN where the reference has a number, infinities likewise, and elements never written always fail.
/// @param plain plain_low_precision_forward() on the same rows as `want`
/// @throws InvalidArgument when sizes or rows do not agree with the problem or with each other
Verdict judge(const Problem& problem, const ReferenceRows& want, const ReferenceRows& plain, const Result& got);

/// Errors of one gradient, and what they may be.
struct GradientErrors {
    Errors errors;
    double allowed = 0;      ///< on errors.max_abs
    double rms_allowed = 0;  ///< on errors.rel_rms
};

/// Errors of the gradients of one run.
struct GradientVerdict {
    GradientErrors dq, dk, dv;
    bool ok = false;
    std::string why;  ///< as in Verdict, with dQ(b, h, i, c), dK(b, h, j, c) and dV(b, h, j, c)

    double max_abs() const;  ///< the largest of the three
    double rel_rms() const;  ///< the largest of the three
};

/// Gradients as a run left them, widened to float and packed in problem.layout.
struct GradientResult {
    std::vector<float> dq, dk, dv;
    std::vector<unsigned char> dq_poisoned, dk_poisoned, dv_poisoned;  ///< one flag an element; may be empty
};

/// Judges gradients as judge() judges O: each of the three may have twice the error of a plain backward pass in the problem's type,
/// plus `slack` times its size, with the same slack (L is want.logits).
/// @param plain plain_low_precision_backward() on the same rows as `want`
/// @throws InvalidArgument when sizes or rows do not agree with the problem or with each other
GradientVerdict judge_gradients(const Problem& problem, const ReferenceGradients& want, const ReferenceGradients& plain,
                                const GradientResult& got);

/// Errors of dQ, dK and dV together between two runs of one problem in one layout. @throws InvalidArgument when the sizes differ
Errors compare_runs(const GradientResult& previous, const GradientResult& got);

/// Errors of O between two runs of one problem in one layout (the present stage against the one before). An element that
/// either run left unwritten counts as unwritten.
/// @throws InvalidArgument when the sizes differ
Errors compare_runs(const Result& previous, const Result& got);

}  // namespace workbook
