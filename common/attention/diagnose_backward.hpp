/// @file
/// Names the mistake behind wrong gradients, as diagnose() does for O and LSE: each known mistake is made in float64, and the run is
/// compared with what comes out.
#pragma once

#include "attention/compare.hpp"
#include "attention/diagnose.hpp"
#include "attention/reference_backward.hpp"

#include <span>
#include <string>
#include <vector>

namespace workbook {

/// The mistakes that gradients show, in the order in which to look at them; empty when judge_gradients() accepts them.
///
/// A mistake is named when it explains at least one wrong gradient: the run is at least four times as close to the mistaken gradient as
/// to the right one, and as close as a plain backward pass may be to the right one, twice over. Each wrong gradient gets the mistake
/// that explains it best; mistakes that explain it equally well are joined by " or ". A gradient that none explains is named in the last
/// finding, "unexplained".
/// @param o,lse what the gradients were made from: O, packed in problem.layout, and LSE (B, Hq, Nq); known to be right
/// @param want,plain reference_backward() and plain_low_precision_backward() on the same rows
/// @throws InvalidArgument when a size does not agree with the problem
std::vector<Finding> find_gradient_mistakes(const Problem& problem, const BackwardInputs& in, std::span<const float> o,
                                            std::span<const float> lse, const ReferenceGradients& want, const ReferenceGradients& plain,
                                            const GradientResult& got);

/// The sentences of find_gradient_mistakes(), one a line; empty when the gradients are right.
std::string diagnose_gradients(const Problem& problem, const BackwardInputs& in, std::span<const float> o, std::span<const float> lse,
                               const ReferenceGradients& want, const ReferenceGradients& plain, const GradientResult& got);

/// The names that find_gradient_mistakes() can give to a mistake it knows.
std::vector<std::string> known_gradient_mistakes();

}  // namespace workbook
