#include "attention/compare.hpp"

#include "host_inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace workbook {
namespace {

using ::testing::IsSubstring;

constexpr float infinity = std::numeric_limits<float>::infinity();
const float nan = std::nanf("");

/// A fused attention as a kernel does it: tiles of keys, base-2 exponentials, rescaling, unnormalised P in the problem's type.
/// The flags are the mistakes that people make.
struct Fused {
    int Bc = 32;
    float scale_factor = 1;           ///< 1 is right
    bool drop_last_key = false;       ///< the ragged tile's bound off by one
    bool shift_mask = false;          ///< causal: one key too many
    bool forget_rescale = false;      ///< O is not rescaled when the maximum rises
    bool padding_counts = false;      ///< keys beyond Nkv enter the sum as zeros instead of -infinity
    float exponential_error = 3e-7f;  ///< relative, of alternating sign: about what ex2.approx and the product before it cost

    Result operator()(const Problem& p, const HostInputs& in) const {
        const Strides qs = p.q_strides(), kvs = p.kv_strides();
        const int d = p.head_dim;
        Result result{std::vector<float>(p.q_elements()), std::vector<float>(p.rows()), {}, {}};
        for (long long row = 0; row < p.rows(); ++row) {
            const long long b = row / p.seq / p.heads, h = row / p.seq % p.heads, i = row % p.seq;
            const float* q = &in.q[b * qs[0] + h * qs[1] + i * qs[2]];
            const long long kv = b * kvs[0] + h / (p.heads / p.kv_heads) * kvs[1];
            const float scale_log2 = p.scale() * scale_factor * 1.44269504f;
            int visible = p.visible_keys(static_cast<int>(i));
            if (shift_mask && p.causal) visible = std::min(visible + 1, p.kv_seq);
            if (drop_last_key) visible = std::max(visible - 1, 0);
            std::vector<float> o(d, 0.f);
            float m = -infinity, l = 0;
            for (int first = 0; first < visible; first += Bc) {
                const int end = std::min(first + Bc, visible);
                std::vector<float> s(end - first);
                float m_new = m;
                for (int j = first; j < end; ++j) {
                    float dot = 0;
                    for (int c = d - 1; c >= 0; --c) dot += q[c] * in.k[kv + j * kvs[2] + c];
                    s[j - first] = dot * scale_log2;
                    m_new = std::max(m_new, s[j - first]);
                }
                const float rescale = m == -infinity ? 0.f : std::exp2(m - m_new);
                l *= rescale;
                if (!forget_rescale)
                    for (float& x : o) x *= rescale;
                for (int j = first; j < end; ++j) {
                    const float e = std::exp2(s[j - first] - m_new) * (1 + (j % 2 == 0 ? exponential_error : -exponential_error));
                    l += e;
                    for (int c = 0; c < d; ++c) o[c] += HostInputs::rounded(p.dtype, e) * in.v[kv + j * kvs[2] + c];
                }
                if (padding_counts && end == p.kv_seq)
                    for (int j = end; j % Bc != 0; ++j) l += std::exp2(0.f - m_new);
                m = m_new;
            }
            for (int c = 0; c < d; ++c)
                result.o[b * qs[0] + h * qs[1] + i * qs[2] + c] = visible == 0 ? 0.f : HostInputs::rounded(p.dtype, o[c] / l);
            result.lse[row] = visible == 0 ? -infinity : (m + std::log2(l)) * 0.693147181f;
        }
        return result;
    }
};

Verdict judged(const Problem& p, const HostInputs& in, const Result& got, std::span<const long long> rows = {}) {
    return judge(p, reference_forward(p, in.q, in.k, in.v, rows), plain_low_precision_forward(p, in.q, in.k, in.v, rows), got);
}

TEST(Compare, Metrics) {
    const std::vector<double> want{1, -2, 0, 4};
    const std::vector<float> got{1.5f, -2, 0.25f, 3};
    const Errors e = compare(want, got);
    EXPECT_DOUBLE_EQ(e.max_abs, 1);
    EXPECT_EQ(e.worst, 3);
    EXPECT_DOUBLE_EQ(e.max_rel, 0.5);
    EXPECT_DOUBLE_EQ(e.rel_rms, std::sqrt((0.25 + 0.0625 + 1) / 21));
    EXPECT_EQ(e.compared, 4);
    EXPECT_TRUE(e.clean());
}

TEST(Compare, CountsWhatIsNotANumber) {
    const double inf = infinity;
    const std::vector<double> want{1, 1, inf, inf, -inf, nan, nan, 2, 3};
    const std::vector<float> got{nan, infinity, infinity, -infinity, 0, nan, 1, nan, 3};
    const std::vector<unsigned char> poisoned{0, 0, 0, 0, 0, 0, 0, 1, 0};
    const Errors e = compare(want, got, poisoned);
    EXPECT_EQ(e.nans, 2);        // 0 and 6
    EXPECT_EQ(e.infinities, 3);  // 1, 3 and 4
    EXPECT_EQ(e.unwritten, 1);   // 7, and not a NaN as well
    EXPECT_EQ(e.max_abs, 0);
    EXPECT_EQ(e.worst, 8);
    EXPECT_EQ(e.compared, 9);
    EXPECT_FALSE(e.clean());
    for (int kind = 0; kind < 3; ++kind) {
        Errors one;
        (kind == 0 ? one.nans : kind == 1 ? one.unwritten : one.infinities) = 1;
        EXPECT_FALSE(one.clean());
    }
}

TEST(Compare, ZeroReference) {
    const std::vector<double> want{0, 0};
    EXPECT_EQ(compare(want, std::vector<float>{0, 0}).rel_rms, 0);
    EXPECT_EQ(compare(want, std::vector<float>{0, 1e-3f}).rel_rms, std::numeric_limits<double>::infinity());
    EXPECT_EQ(compare({}, {}).worst, -1);
}

TEST(Compare, RefusesDifferentSizes) {
    const std::vector<double> want(3);
    const std::vector<float> got(4);
    EXPECT_THROW(compare(want, got), InvalidArgument);
    EXPECT_THROW(compare(want, std::span(got).first(3), std::vector<unsigned char>(2)), InvalidArgument);
}

class EachType : public ::testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Judge, EachType, ::testing::Values(DType::f32, DType::f16, DType::bf16),
                         [](const auto& info) { return std::string(name(info.param)); });

TEST_P(EachType, AcceptsARightKernel) {
    int tried = 0;
    double closest = 0;  // largest share of an allowance that was used
    for (auto [seq, kv_seq] : {std::pair{1, 1}, {1, 2}, {1, 257}, {15, 63}, {65, 64}, {7, 600}, {40, 3}})
        for (int d : {1, 8, 64, 256})
            for (bool causal : {false, true})
                for (float factor : {1.f, 0.f, 30.f})  // logits of that deviation
                    for (int seed : {1, 2}) {
                        const Problem p{.heads = 2,
                                        .kv_heads = 1,
                                        .seq = seq,
                                        .kv_seq = kv_seq,
                                        .head_dim = d,
                                        .dtype = GetParam(),
                                        .causal = causal,
                                        .layout = Layout::bnhd};
                        const HostInputs in(p, seed, factor);
                        const Verdict v = judged(p, in, Fused{}(p, in));
                        EXPECT_TRUE(v.ok) << describe(p) << " factor " << factor << " seed " << seed << ": " << v.why;
                        EXPECT_TRUE(v.why.empty());
                        if (v.o_allowed > 0) closest = std::max(closest, v.o.max_abs / v.o_allowed);
                        if (v.o_rms_allowed > 0) closest = std::max(closest, v.o.rel_rms / v.o_rms_allowed);
                        closest = std::max(closest, v.lse.max_abs / v.lse_allowed);
                        ++tried;
                    }
    EXPECT_EQ(tried, 7 * 4 * 2 * 3 * 2);
    // Half of the allowance is left for what this model does not have, but not much more: else mistakes would slip through.
    EXPECT_GT(closest, 0.3);
    EXPECT_LT(closest, 0.6);
}

// Few elements of which the terms may cancel, and on which the plain attention may be lucky: the hardest case for a fair judge.
TEST_P(EachType, AcceptsARightKernelOnTinyProblems) {
    for (int kv_seq : {1, 2, 3, 5, 17})
        for (int d : {1, 2, 8})
            for (float factor : {0.f, 1.f, 10.f, 100.f})
                for (int seed = 0; seed < 50; ++seed) {
                    const Problem p{.seq = 1, .kv_seq = kv_seq, .head_dim = d, .dtype = GetParam()};
                    const HostInputs in(p, 1000 + seed, factor);
                    const Verdict v = judged(p, in, Fused{}(p, in));
                    EXPECT_TRUE(v.ok) << describe(p) << " factor " << factor << " seed " << seed << ": " << v.why;
                }
}

TEST_P(EachType, AcceptsThePlainAttentionItself) {
    const Problem p{.seq = 33, .kv_seq = 65, .head_dim = 16, .dtype = GetParam()};
    const HostInputs in(p, 3);
    const ReferenceRows plain = plain_low_precision_forward(p, in.q, in.k, in.v);
    const Verdict v = judged(p, in, {{plain.o.begin(), plain.o.end()}, {plain.lse.begin(), plain.lse.end()}, {}, {}});
    EXPECT_TRUE(v.ok) << v.why;
    EXPECT_GT(v.o.max_abs, 0);
    EXPECT_GE(v.o_allowed, 2 * v.o.max_abs);
    EXPECT_GE(v.o_rms_allowed, 2 * v.o.rel_rms);
    EXPECT_GE(v.lse_allowed, 2 * v.lse.max_abs);
}

TEST_P(EachType, RefusesTheMistakesThatPeopleMake) {
    const Problem p{.heads = 2, .kv_heads = 1, .seq = 130, .kv_seq = 150, .head_dim = 64, .dtype = GetParam(), .causal = true};
    const HostInputs in(p, 4);
    ASSERT_TRUE(judged(p, in, Fused{}(p, in)).ok);
    Fused wrong_scale, dropped, shifted, no_rescale, padding;
    wrong_scale.scale_factor = 1.02f;
    dropped.drop_last_key = true;
    shifted.shift_mask = true;
    no_rescale.forget_rescale = true;
    padding.padding_counts = true;
    for (auto [what, kernel] :
         {std::pair{"scale", wrong_scale}, {"drop", dropped}, {"shift", shifted}, {"rescale", no_rescale}, {"padding", padding}}) {
        const Verdict v = judged(p, in, kernel(p, in));
        EXPECT_FALSE(v.ok) << what;
        EXPECT_FALSE(v.why.empty()) << what;
    }
}

TEST_P(EachType, RefusesASmallErrorThatAllElementsShare) {
    const Problem p{.seq = 64, .kv_seq = 64, .head_dim = 64, .dtype = GetParam()};
    const HostInputs in(p, 5);
    Result got = Fused{}(p, in);
    const double shared = GetParam() == DType::f32 ? 1e-5 : GetParam() == DType::f16 ? 2.5e-3 : 2e-2;
    for (float& x : got.o) x = static_cast<float>(x * (1 + shared));
    const Verdict v = judged(p, in, got);
    EXPECT_FALSE(v.ok);
    EXPECT_GT(v.o.rel_rms, v.o_rms_allowed);
}

TEST_P(EachType, IsAsStrictWithSmallValues) {
    const Problem p{.seq = 16, .kv_seq = 40, .head_dim = 16, .dtype = GetParam()};
    HostInputs in(p, 6);
    for (float& x : in.v) x *= 0x1p-6f;
    Result got = Fused{}(p, in);
    EXPECT_TRUE(judged(p, in, got).ok);
    for (float& x : got.o) x *= 1.05f;
    EXPECT_FALSE(judged(p, in, got).ok);
}

// Float32 logits of hundreds: the rounding of s alone is worth 1e-5 and more, which is no mistake of the kernel.
TEST(Judge, LargeLogitsInFloat32) {
    const Problem p{.seq = 64, .kv_seq = 300, .head_dim = 128};
    const HostInputs in(p, 7, 300);
    const Verdict v = judged(p, in, Fused{}(p, in));
    EXPECT_TRUE(v.ok) << v.why;
    EXPECT_GT(v.lse.max_abs, 1e-5);
    Fused wrong;
    wrong.scale_factor = 1.0005f;
    EXPECT_FALSE(judged(p, in, wrong(p, in)).ok);
}

// Float16 S beyond 65504 makes the plain attention NaN. A fused kernel keeps S in float32 and is right: it must pass.
TEST(Judge, PlainAttentionThatOverflowsIsNoYardstick) {
    const Problem p{.seq = 4, .kv_seq = 8, .head_dim = 4, .dtype = DType::f16, .softmax_scale = 3e5f};
    const HostInputs in(p, 8);
    const ReferenceRows plain = plain_low_precision_forward(p, in.q, in.k, in.v);
    ASSERT_TRUE(std::any_of(plain.o.begin(), plain.o.end(), [](double x) { return std::isnan(x); }));
    const Verdict v = judged(p, in, Fused{}(p, in));
    EXPECT_TRUE(v.ok) << v.why;
    EXPECT_TRUE(std::isfinite(v.o_allowed));
    EXPECT_FALSE(judged(p, in, {{plain.o.begin(), plain.o.end()}, {plain.lse.begin(), plain.lse.end()}, {}, {}}).ok);
}

class JudgeWhy : public ::testing::Test {
protected:
    const Problem p{.batch = 2, .heads = 3, .kv_heads = 1, .seq = 10, .kv_seq = 12, .head_dim = 4, .layout = Layout::bnhd};
    const HostInputs in{p, 9};
    Result got = Fused{}(p, in);
    float& o(int b, int h, int i, int c) { return got.o[place(b, h, i, c)]; }
    float& lse(int b, int h, int i) { return got.lse[(b * 3 + h) * 10 + i]; }
    long long place(int b, int h, int i, int c) const { return ((b * 10 + i) * 3 + h) * 4 + c; }  // (B, N, H, d)
    void expect(const char* part) {
        const Verdict v = judged(p, in, got);
        EXPECT_FALSE(v.ok);
        EXPECT_PRED_FORMAT2(IsSubstring, part, v.why);
    }
};

TEST_F(JudgeWhy, Right) { EXPECT_EQ(judged(p, in, got).why, ""); }

TEST_F(JudgeWhy, NeverWritten) {
    got.o_poisoned.assign(got.o.size(), 0);
    for (int i = 6; i < 8; ++i)
        for (int c = 0; c < 4; ++c) {
            got.o_poisoned[place(1, 2, i, c)] = 1;
            o(1, 2, i, c) = nan;
        }
    expect("O: 8 of 240 elements were never written, first at O(1, 2, 6, 0)");
    got.lse_poisoned.assign(got.lse.size(), 0);
    got.lse_poisoned[(0 * 3 + 1) * 10 + 9] = 1;
    lse(0, 1, 9) = nan;
    expect("; LSE: 1 of 60 elements was never written, first at LSE(0, 1, 9)");
}

TEST_F(JudgeWhy, NaN) {
    o(0, 1, 4, 2) = nan;
    expect("O: 1 of 240 elements is NaN where the reference is not, or the reverse, first at O(0, 1, 4, 2): got nan, wanted ");
}

TEST_F(JudgeWhy, Infinity) {
    lse(1, 0, 3) = -infinity;
    lse(1, 0, 4) = infinity;
    expect("LSE: 2 of 60 elements are infinite where the reference is not, or the reverse, first at LSE(1, 0, 3): got -inf, wanted ");
}

TEST_F(JudgeWhy, OffByTooMuch) {
    o(1, 1, 7, 3) += 0.25f;
    o(0, 2, 0, 0) += 0.125f;
    expect("O: 2 of 240 elements are off by more than the allowed ");
    expect(", worst at O(1, 1, 7, 3): got ");
    expect(", off by 0.25");
}

TEST(Judge, AllowancesFollowTheFormula) {
    const Problem p{.seq = 1, .kv_seq = 3, .head_dim = 2, .dtype = DType::bf16};
    const ReferenceRows want{{0}, {3, -4}, {2}, {5, 0.5}, {16}}, plain{{0}, {3.125, -4.25}, {2.5}, {}, {}};
    const Result got{{3, -4}, {2}, {}, {}};
    Verdict v = judge(p, want, plain, got);
    const double slack = 2.0 / 256 + 5e-6 + 16.0 / (1 << 22);
    EXPECT_TRUE(v.ok);
    EXPECT_DOUBLE_EQ(v.o_allowed, 2 * 0.25 + slack * 5);
    EXPECT_DOUBLE_EQ(v.o_rms_allowed, 2 * std::hypot(0.125, 0.25) / 5 + slack * std::hypot(5, 0.5) / 5);
    EXPECT_DOUBLE_EQ(v.lse_allowed, 2 * 0.5 + 17.0 / (1 << 20));
    // Without cancellation the size of O itself counts; L is then the larger of the two again.
    v = judge({.seq = 1, .kv_seq = 3, .head_dim = 2, .dtype = DType::f16}, {{0}, {3, -4}, {-32}, {1, 1}, {16}},
              {{0}, {3, -4}, {-32}, {}, {}}, got);
    const double slack16 = 2.0 / 2048 + 5e-6 + 32.0 / (1 << 22);
    EXPECT_DOUBLE_EQ(v.o_allowed, slack16 * 4);
    EXPECT_DOUBLE_EQ(v.o_rms_allowed, slack16);
    EXPECT_DOUBLE_EQ(v.lse_allowed, 33.0 / (1 << 20));
}

TEST_F(JudgeWhy, AllowanceIsTheLimit) {
    const ReferenceRows want = reference_forward(p, in.q, in.k, in.v);
    const double allowed = judged(p, in, got).o_allowed;
    const double exact = want.o[((1 * 3 + 1) * 10 + 7) * 4 + 3];
    o(1, 1, 7, 3) = static_cast<float>(exact + 0.9 * allowed);
    EXPECT_TRUE(judged(p, in, got).ok);
    o(1, 1, 7, 3) = static_cast<float>(exact + 1.1 * allowed);
    expect("O(1, 1, 7, 3)");
    o(1, 1, 7, 3) = static_cast<float>(exact);
    const double lse_allowed = judged(p, in, got).lse_allowed;
    lse(0, 2, 5) = static_cast<float>(want.lse[25] - 0.8 * lse_allowed);
    EXPECT_TRUE(judged(p, in, got).ok);
    lse(0, 2, 5) = static_cast<float>(want.lse[25] - 1.2 * lse_allowed);
    expect("LSE(0, 2, 5)");
}

TEST_F(JudgeWhy, OnlyTheSelectedRowsCount) {
    o(0, 0, 1, 0) = nan;
    const std::vector<long long> others{0, 5, 47}, with_it{1, 47};
    EXPECT_TRUE(judged(p, in, got, others).ok);
    const Verdict v = judged(p, in, got, with_it);
    EXPECT_PRED_FORMAT2(IsSubstring, "O: 1 of 8 elements is NaN", v.why);
    o(0, 0, 1, 0) = 0;
    o(1, 1, 7, 3) = nan;  // row 47, second of the selected
    EXPECT_PRED_FORMAT2(IsSubstring, "O(1, 1, 7, 3)", judged(p, in, got, others).why);
}

TEST_F(JudgeWhy, RowsThatSeeNothing) {
    Problem blind = p;
    blind.causal = true;
    blind.seq = 14;
    const HostInputs inputs(blind, 10);
    Result result = Fused{}(blind, inputs);
    ASSERT_EQ(result.lse[0], -infinity);
    EXPECT_TRUE(judged(blind, inputs, result).ok) << judged(blind, inputs, result).why;
    Result not_zero = result;
    not_zero.o[0] = 0.1f;
    EXPECT_PRED_FORMAT2(IsSubstring, "O(0, 0, 0, 0): got 0.1, wanted 0", judged(blind, inputs, not_zero).why);
    result.lse[0] = std::numeric_limits<float>::lowest();
    EXPECT_PRED_FORMAT2(IsSubstring, "LSE(0, 0, 0): got -3.402823e+38, wanted -inf", judged(blind, inputs, result).why);
}

TEST_F(JudgeWhy, RefusesWhatDoesNotFit) {
    const ReferenceRows want = reference_forward(p, in.q, in.k, in.v);
    ReferenceRows other = want;
    other.rows[3] = 4;
    EXPECT_THROW(judge(p, want, other, got), InvalidArgument);
    other = want;
    other.o.pop_back();
    EXPECT_THROW(judge(p, other, want, got), InvalidArgument);
    EXPECT_THROW(judge(p, {}, {}, got), InvalidArgument);
    Result short_o = got, flags = got;
    short_o.o.pop_back();
    flags.lse_poisoned = {1};
    EXPECT_THROW(judge(p, want, want, short_o), InvalidArgument);
    EXPECT_THROW(judge(p, want, want, flags), InvalidArgument);
}

TEST(CompareRuns, ComparesOutputsOfTwoRuns) {
    Result a{{1, 2, 3}, {0}, {}, {}}, b{{1, 2.5f, 3}, {7}, {}, {}};
    EXPECT_DOUBLE_EQ(compare_runs(a, b).max_abs, 0.5);
    EXPECT_EQ(compare_runs(a, b).worst, 1);
    b.o_poisoned = {0, 1, 0};
    EXPECT_EQ(compare_runs(a, b).unwritten, 1);
    EXPECT_EQ(compare_runs(b, a).unwritten, 1);
    EXPECT_EQ(compare_runs(a, b).max_abs, 0);
    a.o_poisoned = {1, 0, 0};
    EXPECT_EQ(compare_runs(a, b).unwritten, 2);
    b.o.pop_back();
    EXPECT_THROW(compare_runs(a, b), InvalidArgument);
}

}  // namespace
}  // namespace workbook
