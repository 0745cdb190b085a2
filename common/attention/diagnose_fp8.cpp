#include "attention/diagnose_fp8.hpp"

#include "attention/diagnose.hpp"
#include "attention/fp8.hpp"

#include <algorithm>
#include <cmath>

namespace workbook {
namespace {

/// A rule that is wrong, and what to say where it explains a result.
struct WrongRule {
    ScalingRule rule;
    const char* sentence;
};

const WrongRule wrong_rules[] = {
    {[](float, float factor) {
         return Scaling{factor, 1.0f};
     },
     "Elements beyond 448 were cut off: e4m3 has no larger number. Divide each block by its scale, the largest magnitude / 448."},
    {[](float largest, float factor) {
         return Scaling{factor * 448.0f / largest, largest / 448.0f};
     },
     "Elements of Q beyond 448 were cut off: e4m3 has no larger number. Q is multiplied by a factor on the way, here beyond 1, and its "
     "scale does not have it: the largest magnitude that is rounded is |factor| * largest."},
    {[](float largest, float factor) {
         const float scale = std::abs(factor) * largest;
         return Scaling{factor / scale, scale};
     },
     "Elements that are small in their block were lost: e4m3's smallest number is 2^-9, and here the largest is 1, where it could be 448. "
     "The scale is the largest magnitude / 448, and not the largest magnitude."},
    {[](float largest, float factor) {
         const float scale = std::abs(factor) * largest / 448.0f;
         return Scaling{factor / scale, 1.0f / scale};
     },
     "The scale is inverted: it is the largest magnitude / 448. Elements are divided by it, and the kernel multiplies by it afterwards."},
};

/// Whether 64 rows of Q, K or V that share a scale are all zeros.
bool has_block_of_zeros(const Problem& p, std::span<const float> q, std::span<const float> k, std::span<const float> v) {
    const auto has = [&](std::span<const float> x, int heads, int rows, const Strides& strides) {
        const ScalingRule largest = [](float magnitude, float) { return Scaling{1.0f, magnitude}; };
        const auto of_blocks = quantise_e4m3(x, p.batch, heads, rows, p.head_dim, strides, Shares::block, 1.0f, largest).scales;
        return std::find(of_blocks.begin(), of_blocks.end(), 0.0f) != of_blocks.end();
    };
    return has(q, p.heads, p.seq, p.q_strides()) || has(k, p.kv_heads, p.kv_seq, p.kv_strides()) ||
           has(v, p.kv_heads, p.kv_seq, p.kv_strides());
}

}  // namespace

std::string diagnose_fp8(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                         const ReferenceRows& want, const ReferenceRows& plain, const Result& got) {
    const Verdict verdict = judge(problem, want, plain, got);
    if (verdict.ok) return "";
    for (std::size_t r = 0; r < want.rows.size(); ++r)
        if (std::isnan(want.lse[r]) && std::isfinite(got.lse[static_cast<std::size_t>(want.rows[r])]))
            return "An infinite element, or NaN, came out as a number: e4m3 has no infinity, and rounding makes 448 of it. Make NaN of it.";
    if (verdict.o.nans > 0 && has_block_of_zeros(problem, q, k, v))
        return "Where a block is all zeros there is NaN: its largest magnitude is 0, and so is its scale, by which it is divided. Give the "
               "scale a least value.";
    const char* best = nullptr;
    double least = verdict.o.rel_rms / 2;
    for (const WrongRule& wrong : wrong_rules) {
        ReferenceRows mistaken = fp8_forward(problem, q, k, v, want.rows, Shares::block, false, wrong.rule);
        mistaken.rounding = plain.rounding;
        const Verdict with = judge(problem, mistaken, mistaken, got);
        if (!with.ok || with.o.rel_rms >= least) continue;
        best = wrong.sentence;
        least = with.o.rel_rms;
    }
    return best ? best : diagnose(problem, q, k, v, want, plain, got);
}

}  // namespace workbook
