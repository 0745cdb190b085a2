/// @file
/// The mistakes that diagnose() knows, as tables. To teach it another one, add a line.
#pragma once

#include "attention/rows.hpp"

#include <span>
#include <string>
#include <vector>

namespace workbook {

/// A variable of a mistake: a tile width, a wrong scale, which operand it struck. `text` stands for it in the sentence.
struct Parameter {
    long long a = 0, b = 0;
    double x = 0;
    std::string text;
};

/// All that a wrong attention may read.
struct Tensors {
    const Problem& problem;
    const float *q, *k, *v;  ///< packed in problem.layout
};

/// Maximum and sum as the row has them at the end, which LSE = m + log l is made of.
struct Statistics {
    double m, l;
};

/// A mistake in O, or in O and LSE: how the wrong attention differs from the right one.
struct Mistake {
    const char* name;
    /// "O is what an attention gives in which ...: do this." Every "{}" stands for the parameter's text, or for the list of those that fit.
    const char* sentence;
    /// The values to try, only those that can matter for the problem; none when the mistake cannot be made there.
    std::vector<Parameter> (*parameters)(const Problem&);
    /// What the row reads instead. row.visible is Nkv on entry: what the mask hides is up to weights().
    void (*reads)(const Tensors&, RowPlace, const Parameter&, Row&);
    /// The weights p_j of O = sum_j p_j v_j in the place of the scores s_j of all Nkv keys, and the statistics.
    Statistics (*weights)(const Tensors&, RowPlace, const Parameter&, std::span<double> s);
    bool o_in_other_layout;  ///< O lies in memory as the other layout has it
    bool packed = false;     ///< made in packed batches alone; the others, but for the first, where there is none
};

/// A mistake in LSE alone: what it was computed as.
struct LseMistake {
    const char* name;  ///< empty: none
    const char* sentence;
    double (*lse)(const Problem&, const Statistics&);
    bool in_other_layout;  ///< LSE lies in memory as (B, Nq, Hq)
};

/// The first has an empty name and is the right attention.
std::span<const Mistake> mistakes();
/// The values of a mistake's parameter to try for the problem; none where it cannot be made.
std::vector<Parameter> parameters_of(const Mistake& mistake, const Problem& problem);
/// The first has an empty name and is the right LSE.
std::span<const LseMistake> lse_mistakes();

/// Widths of key tiles, and heights of query tiles, that are tried.
inline constexpr int kTileSizes[] = {8,   16,  24,  32,  40,  48,  56,  64,  72,  80,  88,  96,  104, 112,
                                     120, 128, 144, 160, 176, 192, 208, 224, 256, 320, 384, 448, 512};

}  // namespace workbook
