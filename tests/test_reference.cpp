#include "attention/reference.hpp"

#include "host_inputs.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

namespace workbook {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

ReferenceRows exact(const Problem& p, const HostInputs& in, std::span<const long long> rows = {}) {
    return reference_forward(p, in.q, in.k, in.v, rows);
}

// One query, two keys, worked by hand: S = (ln 3, 0), so P = (3/4, 1/4).
TEST(Reference, TwoKeysByHand) {
    const float ln3 = std::log(3.f);
    const std::vector<float> q{1, 0}, k{ln3, 5, 0, -7}, v{4, 8, 0, 16};
    const ReferenceRows got = reference_forward({.seq = 1, .kv_seq = 2, .head_dim = 2, .softmax_scale = 1.f}, q, k, v);
    ASSERT_EQ(got.rows, std::vector<long long>{0});
    EXPECT_NEAR(got.o[0], 3, 1e-6);
    EXPECT_NEAR(got.o[1], 10, 1e-6);
    EXPECT_NEAR(got.lse[0], std::log(4.0), 1e-7);
    EXPECT_NEAR(got.lse_scale[0], 0.75 * std::log(3.0), 1e-6);
    EXPECT_NEAR(got.o_scale[0], 3, 1e-6);                 // (3/4 * 4, 1/4 * 0)
    EXPECT_NEAR(got.o_scale[1], std::hypot(6, 4), 1e-6);  // (3/4 * 8, 1/4 * 16)
    // With the default scale 1/sqrt(2) the first weight is 3^(1/sqrt 2) times the second.
    const ReferenceRows scaled = reference_forward({.seq = 1, .kv_seq = 2, .head_dim = 2}, q, k, v);
    const double w = std::pow(3.0, 1 / std::sqrt(2.0));
    EXPECT_NEAR(scaled.o[0], 4 * w / (w + 1), 1e-6);
    EXPECT_NEAR(scaled.lse[0], std::log(w + 1), 1e-6);
}

// Equal logits make O the mean of the visible values, and LSE the logarithm of their number.
TEST(Reference, CausalMaskShowsTheRightKeys) {
    for (auto [seq, kv_seq] : {std::pair{6, 6}, {3, 8}, {8, 3}, {1, 5}, {5, 1}}) {
        const Problem p{.heads = 2, .seq = seq, .kv_seq = kv_seq, .head_dim = 3, .causal = true};
        Problem shared = p;
        shared.kv_heads = 1;
        HostInputs in(shared, 5);
        std::fill(in.q.begin(), in.q.end(), 0.f);
        const ReferenceRows got = exact(shared, in);
        ASSERT_EQ(got.rows.size(), static_cast<std::size_t>(2 * seq));
        for (int r = 0; r < 2 * seq; ++r) {
            int visible = 0;
            std::vector<double> sum(3, 0.0);
            for (int j = 0; j < kv_seq; ++j) {
                if (j > r % seq + kv_seq - seq) continue;
                ++visible;
                for (int c = 0; c < 3; ++c) sum[c] += in.v[j * 3 + c];
            }
            if (visible == 0) {
                EXPECT_EQ(got.lse[r], -infinity) << r;
                for (int c = 0; c < 3; ++c) EXPECT_EQ(got.o[r * 3 + c], 0) << r;
            } else {
                EXPECT_NEAR(got.lse[r], std::log(visible), 1e-12) << r;
                for (int c = 0; c < 3; ++c) EXPECT_NEAR(got.o[r * 3 + c], sum[c] / visible, 1e-12) << r;
            }
        }
    }
}

TEST(Reference, QueryHeadReadsItsKeyValueHead) {
    // Every value of key/value head g of batch b is 10 b + g: O must name the head that was read.
    for (Layout layout : {Layout::bhnd, Layout::bnhd}) {
        const Problem p{.batch = 2, .heads = 6, .kv_heads = 3, .seq = 4, .kv_seq = 5, .head_dim = 2, .layout = layout};
        HostInputs in(p, 6);
        const Strides s = p.kv_strides();
        for (int b = 0; b < 2; ++b)
            for (int g = 0; g < 3; ++g)
                for (int j = 0; j < 5; ++j)
                    for (int c = 0; c < 2; ++c) in.v[b * s[0] + g * s[1] + j * s[2] + c] = 10 * b + g;
        const ReferenceRows got = exact(p, in);
        for (std::size_t r = 0; r < got.rows.size(); ++r) {
            const long long b = got.rows[r] / 24, h = got.rows[r] / 4 % 6;
            EXPECT_NEAR(got.o[r * 2], 10 * b + h / 2, 1e-12) << "b " << b << " h " << h;
        }
    }
}

TEST(Reference, LayoutDoesNotChangeTheResult) {
    const Problem p{.batch = 2, .heads = 4, .kv_heads = 2, .seq = 7, .kv_seq = 9, .head_dim = 5, .causal = true};
    const HostInputs in(p, 7);
    Problem moved = p;
    moved.layout = Layout::bnhd;
    HostInputs copy = in;
    const auto move = [&](const std::vector<float>& from, std::vector<float>& to, const Strides& a, const Strides& b, int heads, int rows) {
        for (int n = 0; n < p.batch; ++n)
            for (int h = 0; h < heads; ++h)
                for (int i = 0; i < rows; ++i)
                    for (int c = 0; c < p.head_dim; ++c) to[n * b[0] + h * b[1] + i * b[2] + c] = from[n * a[0] + h * a[1] + i * a[2] + c];
    };
    move(in.q, copy.q, p.q_strides(), moved.q_strides(), 4, 7);
    move(in.k, copy.k, p.kv_strides(), moved.kv_strides(), 2, 9);
    move(in.v, copy.v, p.kv_strides(), moved.kv_strides(), 2, 9);
    ASSERT_NE(in.q, copy.q);
    const ReferenceRows a = exact(p, in), b = exact(moved, copy);
    EXPECT_EQ(a.o, b.o);
    EXPECT_EQ(a.lse, b.lse);
}

// Adding the same vector to all keys adds the same number to a row's logits: O stays, LSE moves by it.
TEST(Reference, ShiftOfAllKeysMovesOnlyLse) {
    const Problem p{.seq = 3, .kv_seq = 50, .head_dim = 8};
    HostInputs in(p, 8);
    for (float& x : in.k) x = x + 1024.f - 1024.f;  // so that the shift is exact
    HostInputs shifted = in;
    for (float& x : shifted.k) x += 1024.f;  // large logits: exp() alone would overflow
    const ReferenceRows a = exact(p, in), b = exact(p, shifted);
    for (int i = 0; i < 3; ++i) {
        double q_sum = 0;
        for (int c = 0; c < 8; ++c) q_sum += in.q[i * 8 + c];
        EXPECT_NEAR(b.lse[i] - a.lse[i], p.scale() * 1024 * q_sum, 1e-9);
        for (int c = 0; c < 8; ++c) EXPECT_NEAR(a.o[i * 8 + c], b.o[i * 8 + c], 1e-10);
    }
}

TEST(Reference, ZeroAndNegativeScale) {
    Problem p{.seq = 2, .kv_seq = 6, .head_dim = 4, .softmax_scale = 0.f};
    HostInputs in(p, 9);
    EXPECT_NEAR(exact(p, in).lse[0], std::log(6.0), 1e-12);
    p.softmax_scale = -0.5f;
    const ReferenceRows negative = exact(p, in);
    p.softmax_scale = 0.5f;
    for (float& x : in.q) x = -x;
    EXPECT_EQ(negative.o, exact(p, in).o);
}

TEST(Reference, SelectedRowsAreThoseOfTheWhole) {
    const Problem p{.batch = 2, .heads = 2, .kv_heads = 1, .seq = 9, .kv_seq = 11, .head_dim = 4, .dtype = DType::bf16, .causal = true};
    const HostInputs in(p, 10);
    const std::vector<long long> rows{35, 0, 17, 8};
    for (auto forward : {reference_forward, plain_low_precision_forward}) {
        const ReferenceRows all = forward(p, in.q, in.k, in.v, {}), some = forward(p, in.q, in.k, in.v, rows);
        EXPECT_EQ(some.rows, (std::vector<long long>{0, 8, 17, 35}));
        ASSERT_EQ(all.rows.size(), 36u);
        for (std::size_t r = 0; r < some.rows.size(); ++r) {
            EXPECT_EQ(some.lse[r], all.lse[some.rows[r]]);
            for (int c = 0; c < 4; ++c) EXPECT_EQ(some.o[r * 4 + c], all.o[some.rows[r] * 4 + c]);
        }
    }
}

TEST(Reference, RefusesWrongSizesAndRows) {
    const Problem p{.seq = 4, .kv_seq = 6, .head_dim = 2};
    const HostInputs in(p, 11);
    const std::vector<float> one(1);
    EXPECT_THROW(reference_forward(p, one, in.k, in.v), InvalidArgument);
    EXPECT_THROW(reference_forward(p, in.q, one, in.v), InvalidArgument);
    EXPECT_THROW(plain_low_precision_forward(p, in.q, in.k, one), InvalidArgument);
    EXPECT_THROW(exact(p, in, std::vector<long long>{0, 4}), InvalidArgument);
    EXPECT_THROW(exact(p, in, std::vector<long long>{-1}), InvalidArgument);
    try {
        reference_forward(p, in.q, in.q, in.v);
        FAIL() << "accepted K of the wrong size";
    } catch (const InvalidArgument& error) {
        EXPECT_STREQ(error.what(), "k has 8 elements; the problem says 12");
    }
}

TEST(PlainAttention, RoundsScoresToTheType) {
    // 257 lies half-way between bfloat16's 256 and 258, and float16 holds it. One key: LSE is S itself.
    Problem p{.seq = 1, .kv_seq = 1, .head_dim = 1, .dtype = DType::bf16, .softmax_scale = 257.f};
    const std::vector<float> one{1.f};
    EXPECT_EQ(plain_low_precision_forward(p, one, one, one).lse[0], 256);
    EXPECT_EQ(reference_forward(p, one, one, one).lse[0], 257);
    p.dtype = DType::f16;
    EXPECT_EQ(plain_low_precision_forward(p, one, one, one).lse[0], 257);
}

TEST(PlainAttention, RoundsWeightsAndOutputToTheType) {
    // 255 equal keys: P = 1/255 becomes 129/128 / 256 in bfloat16, and O = 1.5 * 255 * P = 1.5059 becomes 1.5078.
    Problem p{.seq = 1, .kv_seq = 255, .head_dim = 1, .dtype = DType::bf16};
    const std::vector<float> q(1, 0.f), k(255, 0.f), v(255, 1.5f);
    EXPECT_EQ(plain_low_precision_forward(p, q, k, v).o[0], 1.5078125);
    EXPECT_NEAR(reference_forward(p, q, k, v).o[0], 1.5, 1e-12);
    p.dtype = DType::f32;
    EXPECT_NEAR(plain_low_precision_forward(p, q, k, v).o[0], 1.5, 1e-5);  // 255 additions of the same rounding error
}

TEST(PlainAttention, ErrorFollowsTheType) {
    const auto error = [](DType type) {
        const Problem p{.heads = 2, .kv_heads = 2, .seq = 40, .kv_seq = 130, .head_dim = 32, .dtype = type, .causal = true};
        const HostInputs in(p, 12);
        const ReferenceRows want = exact(p, in), got = plain_low_precision_forward(p, in.q, in.k, in.v);
        double errors = 0, squares = 0;
        for (std::size_t e = 0; e < want.o.size(); ++e) {
            errors += (got.o[e] - want.o[e]) * (got.o[e] - want.o[e]);
            squares += want.o[e] * want.o[e];
            EXPECT_EQ(got.o[e], HostInputs::rounded(type, static_cast<float>(got.o[e])));
        }
        return std::sqrt(errors / squares);
    };
    const double f32 = error(DType::f32), f16 = error(DType::f16), bf16 = error(DType::bf16);
    // Relative RMS: around the unit roundoffs 2^-24, 2^-11 and 2^-8.
    EXPECT_NEAR(std::log2(f32), -22.5, 1.5);
    EXPECT_NEAR(std::log2(f16), -11, 1.5);
    EXPECT_NEAR(std::log2(bf16 / f16), 3, 0.7);
}

TEST(PlainAttention, RowThatSeesNothing) {
    const Problem p{.seq = 3, .kv_seq = 1, .head_dim = 2, .dtype = DType::f16, .causal = true};
    const HostInputs in(p, 13);
    const ReferenceRows got = plain_low_precision_forward(p, in.q, in.k, in.v);
    EXPECT_EQ(got.lse[0], -infinity);
    EXPECT_EQ(got.lse[1], -infinity);
    EXPECT_TRUE(std::isfinite(got.lse[2]));
    EXPECT_EQ(std::vector<double>(got.o.begin(), got.o.begin() + 4), std::vector<double>(4, 0.0));
    EXPECT_EQ(got.o[4], in.v[0]);
}

TEST(SampleRows, AsManyAsAskedWithTheCorners) {
    for (const Problem& p : {Problem{.batch = 2, .heads = 3, .seq = 1000}, Problem{.batch = 1, .heads = 1, .seq = 4096},
                             Problem{.batch = 5, .heads = 7, .seq = 1}, Problem{.batch = 1, .heads = 2, .seq = 2}}) {
        for (long long count : {1, 2, 4, 5, 64, 333, 1 << 20}) {
            const std::vector<long long> rows = sample_rows(p, count);
            const std::set<long long> distinct(rows.begin(), rows.end());
            EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
            EXPECT_EQ(distinct.size(), rows.size());
            const std::set<long long> corners{0, p.seq - 1, p.rows() - p.seq, p.rows() - 1};
            for (long long corner : corners) EXPECT_TRUE(count >= p.rows() || distinct.count(corner)) << corner;
            EXPECT_EQ(static_cast<long long>(rows.size()), std::min(p.rows(), std::max(count, static_cast<long long>(corners.size()))));
            EXPECT_GE(rows.front(), 0);
            EXPECT_LT(rows.back(), p.rows());
        }
    }
    EXPECT_THROW(sample_rows(Problem{}, 0), InvalidArgument);
}

TEST(SampleRows, CoversEveryRowOfATileAndLeavesNoGap) {
    const std::vector<long long> rows = sample_rows({.heads = 8, .kv_heads = 8, .seq = 4096}, 512);
    std::set<long long> in_tile;
    for (long long row : rows) in_tile.insert(row % 64);
    EXPECT_EQ(in_tile.size(), 64u);
    for (std::size_t r = 1; r < rows.size(); ++r) EXPECT_LE(rows[r] - rows[r - 1], 2 * 8 * 4096 / 500) << r;
    // 89 strata of exactly 46 rows: at a constant distance all would be even, or all odd.
    const std::vector<long long> few = sample_rows({.seq = 4096}, 91);
    const auto odd = std::count_if(few.begin(), few.end(), [](long long row) { return row % 2 == 1; });
    EXPECT_GT(odd, 30);
    EXPECT_LT(odd, 60);
}

}  // namespace
}  // namespace workbook
