// The gradients in float64 against differences of the forward reference, and the judge of gradients.
#include "attention/reference_backward.hpp"

#include "attention/compare.hpp"
#include "attention/diagnose_backward.hpp"

#include "host_inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace workbook {
namespace {

/// Q, K, V and dO on the host.
struct BackwardHost : HostInputs {
    std::vector<float> d_o;

    BackwardHost(const Problem& p, std::uint64_t seed, float factor = 1) : HostInputs(p, seed, factor), d_o(p.q_elements()) {
        for (std::size_t e = 0; e < d_o.size(); ++e)
            d_o[e] = rounded(p.dtype, static_cast<float>(standard_normal(random_words(seed, 3, e, 0))));
    }
    operator BackwardInputs() const { return {q, k, v, d_o}; }
};

/// A loss whose gradient with respect to O is dO: sum over all elements of dO o O.
double loss(const Problem& p, const BackwardHost& in) {
    const ReferenceRows rows = reference_forward(p, in.q, in.k, in.v);
    const Strides s = p.q_strides();
    double sum = 0;
    for (long long r = 0; r < p.rows(); ++r)
        for (int c = 0; c < p.head_dim; ++c) {
            const long long at = r / p.seq / p.heads * s[0] + r / p.seq % p.heads * s[1] + r % p.seq * s[2] + c;
            sum += in.d_o[at] * rows.o[r * p.head_dim + c];
        }
    return sum;
}

/// Central difference of the loss in one input element.
double difference(const Problem& p, BackwardHost in, std::vector<float> HostInputs::*tensor, long long at) {
    constexpr float h = 0x1p-12f;  // what is added is exact, or nearly so, in float32
    float& x = (in.*tensor)[at];
    const float middle = x, high = middle + h, low = middle - h;
    x = high;
    const double above = loss(p, in);
    x = low;
    const double below = loss(p, in);
    return (above - below) / (static_cast<double>(high) - low);
}

const std::vector<Problem> problems = {
    {.batch = 1, .heads = 1, .kv_heads = 1, .seq = 4, .kv_seq = 5, .head_dim = 3},
    {.batch = 2, .heads = 4, .kv_heads = 2, .seq = 5, .kv_seq = 7, .head_dim = 3, .causal = true},
    {.batch = 1, .heads = 3, .kv_heads = 1, .seq = 6, .kv_seq = 4, .head_dim = 2, .causal = true, .layout = Layout::bnhd},
    {.batch = 1, .heads = 2, .kv_heads = 2, .seq = 3, .kv_seq = 6, .head_dim = 4, .softmax_scale = -1.5f},
    {.batch = 1, .heads = 1, .kv_heads = 1, .seq = 3, .kv_seq = 6, .head_dim = 4, .softmax_scale = 0.0f},
};

TEST(ReferenceBackward, EqualsDifferencesOfTheForward) {
    for (const Problem& p : problems) {
        SCOPED_TRACE(describe(p));
        const BackwardHost in(p, 7);
        const ReferenceGradients got = reference_backward(p, in);
        ASSERT_EQ(static_cast<long long>(got.dq.size()), p.q_elements());
        ASSERT_EQ(static_cast<long long>(got.dk.size()), p.kv_elements());
        const auto expect_near = [&](const char* name, const std::vector<double>& gradient, std::vector<float> HostInputs::*tensor,
                                     int heads, int rows, const Strides& s) {
            for (std::size_t e = 0; e < gradient.size(); ++e) {
                const auto r = static_cast<long long>(e) / p.head_dim;
                const long long at =
                    r / rows / heads * s[0] + r / rows % heads * s[1] + r % rows * s[2] + static_cast<long long>(e) % p.head_dim;
                EXPECT_NEAR(gradient[e], difference(p, in, tensor, at), 1e-6) << name << " element " << e;
            }
        };
        expect_near("dQ", got.dq, &HostInputs::q, p.heads, p.seq, p.q_strides());
        expect_near("dK", got.dk, &HostInputs::k, p.kv_heads, p.kv_seq, p.kv_strides());
        expect_near("dV", got.dv, &HostInputs::v, p.kv_heads, p.kv_seq, p.kv_strides());
    }
}

// One query, two keys: P = (3/4, 1/4), V = (4, 0), dO = 1: dP = (4, 0), D = 3, dS = (3/4, -3/4).
TEST(ReferenceBackward, TwoKeysByHand) {
    const float ln3 = std::log(3.f);
    const std::vector<float> q{1}, k{ln3, 0}, v{4, 0}, d_o{1};
    const ReferenceGradients got = reference_backward({.seq = 1, .kv_seq = 2, .head_dim = 1, .softmax_scale = 1.f}, {q, k, v, d_o});
    EXPECT_NEAR(got.dv[0], 0.75, 1e-7);
    EXPECT_NEAR(got.dv[1], 0.25, 1e-7);
    EXPECT_NEAR(got.dk[0], 0.75, 1e-6);
    EXPECT_NEAR(got.dk[1], -0.75, 1e-6);
    EXPECT_NEAR(got.dq[0], 0.75 * std::log(3.0), 1e-6);
    EXPECT_NEAR(got.dq_scale[0], 0.75 * (4 + 3) * std::log(3.0), 1e-5);
}

TEST(ReferenceBackward, RowsThatSeeNothingHaveNoPart) {
    const Problem p{.heads = 2, .kv_heads = 1, .seq = 9, .kv_seq = 4, .head_dim = 3, .causal = true};
    BackwardHost in(p, 3);
    const ReferenceGradients before = reference_backward(p, in);
    for (int i = 0; i < 5; ++i)
        for (int c = 0; c < 3; ++c) {
            EXPECT_EQ(before.dq[i * 3 + c], 0);
            in.d_o[i * 3 + c] = 1e6f;
            in.q[i * 3 + c] = -5;
        }
    const ReferenceGradients after = reference_backward(p, in);
    EXPECT_EQ(before.dk, after.dk);
    EXPECT_EQ(before.dv, after.dv);
    EXPECT_TRUE(std::all_of(after.dk.begin(), after.dk.end(), [](double x) { return std::isfinite(x); }));
}

TEST(ReferenceBackward, SampleGivesTheSameNumbers) {
    const Problem p{.batch = 2, .heads = 4, .kv_heads = 2, .seq = 30, .kv_seq = 20, .head_dim = 8, .causal = true, .layout = Layout::bnhd};
    const BackwardHost in(p, 4);
    const ReferenceGradients all = reference_backward(p, in);
    const ReferenceRows forward = reference_forward(p, in.q, in.k, in.v);
    std::vector<float> o(p.q_elements()), lse(forward.lse.begin(), forward.lse.end());
    const Strides s = p.q_strides();
    for (long long r = 0; r < p.rows(); ++r)
        for (int c = 0; c < 8; ++c) o[r / 30 / 4 * s[0] + r / 30 % 4 * s[1] + r % 30 * s[2] + c] = static_cast<float>(forward.o[r * 8 + c]);
    const ReferenceGradients some = reference_backward(p, in, {{7, 3, 200}, {0, 41, 79}, o, lse});
    EXPECT_EQ(some.rows, (std::vector<long long>{3, 7, 200}));
    ASSERT_EQ(some.dq.size(), 3u * 8);
    for (int c = 0; c < 8; ++c) {
        EXPECT_EQ(some.dq[2 * 8 + c], all.dq[200 * 8 + c]);
        EXPECT_NEAR(some.dk[8 + c], all.dk[41 * 8 + c], 1e-5);  // O and LSE are float32 here
        EXPECT_NEAR(some.dv[2 * 8 + c], all.dv[79 * 8 + c], 1e-5);
    }
}

TEST(ReferenceBackward, RejectsWhatDoesNotFit) {
    const Problem p{.seq = 4, .kv_seq = 4, .head_dim = 2};
    BackwardHost in(p, 1);
    const std::vector<float> o(p.q_elements()), lse(p.rows());
    EXPECT_THROW(reference_backward(p, in, {{0}, {}, o, lse}), InvalidArgument);
    EXPECT_THROW(reference_backward(p, in, {{0}, {4}, o, lse}), InvalidArgument);
    EXPECT_THROW(reference_backward(p, in, {{-1}, {0}, o, lse}), InvalidArgument);
    EXPECT_THROW(reference_backward(p, in, {{0}, {0}, o, {}}), InvalidArgument);
    in.d_o.pop_back();
    EXPECT_THROW(reference_backward(p, in), InvalidArgument);
}

TEST(ReferenceBackward, PlainErrorIsOfTheSizeOfTheTypesRoundoff) {
    for (const auto& [dtype, low, high] : {std::tuple{DType::f32, 1e-9, 2e-6}, {DType::f16, 1e-4, 5e-3}, {DType::bf16, 1e-3, 4e-2}}) {
        const Problem p{.heads = 2, .kv_heads = 1, .seq = 40, .kv_seq = 50, .head_dim = 32, .dtype = dtype, .causal = true};
        const BackwardHost in(p, 9);
        const ReferenceGradients want = reference_backward(p, in), plain = plain_low_precision_backward(p, in);
        for (const auto of : {&ReferenceGradients::dq, &ReferenceGradients::dk, &ReferenceGradients::dv}) {
            const double error = compare(want.*of, std::vector<float>((plain.*of).begin(), (plain.*of).end())).rel_rms;
            EXPECT_GT(error, low) << name(dtype);
            EXPECT_LT(error, high) << name(dtype);
        }
    }
}

// ---- the judge ----

struct Judged {
    Problem p{.heads = 4, .kv_heads = 2, .seq = 20, .kv_seq = 30, .head_dim = 8, .dtype = DType::bf16};
    BackwardHost in{p, 2};
    ReferenceGradients want = reference_backward(p, in), plain = plain_low_precision_backward(p, in);
    GradientResult right{
        {plain.dq.begin(), plain.dq.end()}, {plain.dk.begin(), plain.dk.end()}, {plain.dv.begin(), plain.dv.end()}, {}, {}, {}};

    GradientVerdict judge(const GradientResult& got) const { return judge_gradients(p, want, plain, got); }
};

TEST(JudgeGradients, AcceptsWhatIsRight) {
    const Judged j;
    const GradientVerdict verdict = j.judge(j.right);
    EXPECT_TRUE(verdict.ok) << verdict.why;
    EXPECT_EQ(verdict.why, "");
    EXPECT_GT(verdict.dq.allowed, verdict.dq.errors.max_abs);
}

TEST(JudgeGradients, NamesTheTensorAndTheElement) {
    const Judged j;
    const auto told = [&](auto spoil) {
        GradientResult got = j.right;
        spoil(got);
        const GradientVerdict verdict = j.judge(got);
        EXPECT_FALSE(verdict.ok);
        return verdict.why;
    };
    const auto expect_named = [](const std::string& why, const std::string& part) { EXPECT_NE(why.find(part), std::string::npos) << why; };
    expect_named(told([](GradientResult& g) { g.dq[(3 * 20 + 5) * 8 + 2] += 1; }), "dQ: 1 of 640 elements is off");
    expect_named(told([](GradientResult& g) { g.dq[(3 * 20 + 5) * 8 + 2] += 1; }), "dQ(0, 3, 5, 2)");
    expect_named(told([](GradientResult& g) { g.dk[(30 + 7) * 8] = NAN; }), "dK(0, 1, 7, 0)");
    expect_named(told([](GradientResult& g) { g.dv[0] = INFINITY; }), "dV: 1 of 480 elements is infinite");
    expect_named(told([](GradientResult& g) {
                     g.dv_poisoned.assign(g.dv.size(), 0);
                     g.dv_poisoned[9] = 1;
                 }),
                 "dV: 1 of 480 elements was never written, first at dV(0, 0, 1, 1)");
    // A small error of all elements, which none of them shows.
    expect_named(told([](GradientResult& g) {
                     for (float& x : g.dk) x *= 1.1f;
                 }),
                 "dK");
}

TEST(JudgeGradients, RejectsWhatDoesNotGoTogether) {
    Judged j;
    GradientResult shorter = j.right;
    shorter.dk.pop_back();
    EXPECT_THROW(j.judge(shorter), InvalidArgument);
    j.plain.kv_rows.pop_back();
    EXPECT_THROW(j.judge(j.right), InvalidArgument);
}

TEST(JudgeGradients, RunsAreComparedOverAllThree) {
    const Judged j;
    GradientResult other = j.right;
    EXPECT_EQ(compare_runs(j.right, other).max_abs, 0);
    other.dv.back() += 0.5f;
    EXPECT_NEAR(compare_runs(j.right, other).max_abs, 0.5, 1e-2);
    EXPECT_EQ(compare_runs(j.right, other).compared, j.p.q_elements() + 2 * j.p.kv_elements());
}

// ---- the diagnosis: what the wrong kernels of stage 05 do not show ----

struct Diagnosed {
    Problem p{.heads = 4, .kv_heads = 2, .seq = 30, .kv_seq = 40, .head_dim = 8};
    BackwardHost in{p, 6};
    ReferenceGradients want = reference_backward(p, in), plain = plain_low_precision_backward(p, in);
    GradientResult right{{want.dq.begin(), want.dq.end()}, {want.dk.begin(), want.dk.end()}, {want.dv.begin(), want.dv.end()}, {}, {}, {}};
    std::vector<float> o, lse;

    Diagnosed() {
        const ReferenceRows forward = reference_forward(p, in.q, in.k, in.v);
        o.assign(forward.o.begin(), forward.o.end());
        lse.assign(forward.lse.begin(), forward.lse.end());
    }
    std::vector<Finding> find(const GradientResult& got) const { return find_gradient_mistakes(p, in, o, lse, want, plain, got); }
};

TEST(DiagnoseGradients, NothingWhereNothingIsWrong) {
    const Diagnosed d;
    EXPECT_TRUE(d.find(d.right).empty());
}

TEST(DiagnoseGradients, EachGradientHasItsOwnMistake) {
    const Diagnosed d;
    GradientResult got = d.right;
    for (float& x : got.dq) x *= d.p.scale();
    for (float& x : got.dk) x /= d.p.scale();
    const std::vector<Finding> findings = d.find(got);
    ASSERT_EQ(findings.size(), 2u);
    EXPECT_EQ(findings[0].name, "dq-scale-twice");
    EXPECT_EQ(findings[1].name, "dk-scale-missing");
    EXPECT_EQ(findings[1].sentence.rfind("dK is what", 0), 0u) << findings[1].sentence;
}

TEST(DiagnoseGradients, SaysWhatIsRightWhereItKnowsNoMistake) {
    const Diagnosed d;
    GradientResult got = d.right;
    for (std::size_t e = 0; e < got.dk.size(); ++e) got.dk[e] += e % 7 == 0 ? 1 : 0;
    const std::vector<Finding> findings = d.find(got);
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].name, "unexplained");
    EXPECT_EQ(findings[0].sentence,
              "dK is wrong, and no known mistake explains it; dQ and dV are right, so P is: look at dP, D, dS and the product after it.");
}

TEST(DiagnoseGradients, FirstHeadOfAGroup) {
    const Diagnosed d;
    // Only the first query head of each group has a part in what the others' dO = 0 leaves.
    BackwardHost in = d.in;
    for (int h : {1, 3}) std::fill_n(in.d_o.begin() + h * 30 * 8, 30 * 8, 0.0f);
    const ReferenceGradients first = reference_backward(d.p, in);
    GradientResult got = d.right;
    got.dk.assign(first.dk.begin(), first.dk.end());
    got.dv.assign(first.dv.begin(), first.dv.end());
    const std::vector<Finding> findings = d.find(got);
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].name, "gqa-first-head");
    EXPECT_EQ(findings[0].sentence.rfind("dK and dV are what", 0), 0u) << findings[0].sentence;
}

TEST(DiagnoseGradients, NamesAreDifferent) {
    std::vector<std::string> names = known_gradient_mistakes();
    std::sort(names.begin(), names.end());
    EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
    EXPECT_GE(names.size(), 10u);
}

}  // namespace
}  // namespace workbook
