/// @file
/// Names the mistake behind a wrong result. A mistake has a signature: for each one that is known, attention is computed with
/// exactly that mistake, in float64, and the run is compared with it as judge() compares a run with the right attention.
#pragma once

#include "attention/compare.hpp"

#include <span>
#include <string>
#include <vector>

namespace workbook {

/// One mistake that a result shows.
struct Finding {
    /// What it is, for programs: "causal-top-left". "unwritten", "nan", "infinite" and "located" say where and not why;
    /// "lse-unexplained" follows a finding that explains O alone. Two mistakes that give this same result are joined by " or ".
    std::string name;
    std::string sentence;  ///< for people: what O or LSE matches, or where it is wrong, and what to change
};

/// The mistakes that `got` shows, in the order in which to look at them; empty when judge() accepts it.
///
/// Elements that are NaN or were never written are looked for in the whole of `got`; all else is judged on the rows of `want`.
/// A known mistake is named when judge() accepts the run with the mistaken attention in the place of the right one, and the run
/// is at least twice as close to it. Where several fit, those that fit markedly worse than the best are dropped; what is left
/// cannot be told apart on this problem, and is named together. When none fits, the last finding says in which heads, rows and
/// columns the wrong elements lie.
/// @param q,k,v packed in problem.layout, rounded to problem.dtype and widened to float
/// @param want,plain reference_forward() and plain_low_precision_forward() on the same rows
/// @throws InvalidArgument when a size does not agree with the problem
std::vector<Finding> find_mistakes(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                                   const ReferenceRows& want, const ReferenceRows& plain, const Result& got);

/// The sentences of find_mistakes(), one a line; empty when the result is right.
std::string diagnose(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                     const ReferenceRows& want, const ReferenceRows& plain, const Result& got);

/// The names that find_mistakes() can give to a mistake it knows, those of LSE last.
std::vector<std::string> known_mistakes();

}  // namespace workbook
