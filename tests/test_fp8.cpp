// e4m3 on the host: rounding, scales, rotation, and what the ways of scaling are worth.
#include "attention/compare.hpp"
#include "attention/diagnose.hpp"
#include "attention/diagnose_fp8.hpp"
#include "attention/fp8.hpp"
#include "host_inputs.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

namespace workbook {
namespace {

/// The number that e4m3's bits stand for: S EEEE MMM with bias 7; all exponents but that of NaN are of numbers.
double value_of(std::uint8_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return (bits & 0x7f) == 0x7f ? std::numeric_limits<double>::quiet_NaN() : bits & 0x80 ? -size : size;
}

TEST(Fp8, RoundsToTheNearestMultipleOfTheScale) {
    const Problem p{.batch = 2, .heads = 3, .kv_heads = 3, .seq = 130, .kv_seq = 130, .head_dim = 16, .dtype = DType::bf16};
    HostInputs in(p, 1);
    for (std::size_t e = 0; e < in.q.size(); e += 97) in.q[e] *= 1e-3f;
    for (const Layout layout : {Layout::bhnd, Layout::bnhd}) {
        Problem q = p;
        q.layout = layout;
        const Strides s = q.q_strides();
        const E4m3Tensor got = quantise_e4m3(in.q, 2, 3, 130, 16, s, Shares::block, 0.5f);
        ASSERT_EQ(got.scales.size(), 2u * 3 * 3);
        for (int b = 0; b < 2; ++b)
            for (int h = 0; h < 3; ++h)
                for (int block = 0; block < 3; ++block) {
                    const double scale = got.scales[static_cast<std::size_t>((b * 3 + h) * 3 + block)];
                    double largest = 0, largest_value = 0;
                    for (int i = 64 * block; i < std::min(130, 64 * block + 64); ++i)
                        for (int c = 0; c < 16; ++c) {
                            const auto at = static_cast<std::size_t>(b * s[0] + h * s[1] + i * s[2] + c);
                            const double x = 0.5 * in.q[at], value = value_of(got.elements[at]);
                            largest = std::max(largest, std::abs(x));
                            largest_value = std::max(largest_value, std::abs(value));
                            // Half the distance of two numbers: 2^-4 of the larger power of two, or of the subnormal ones 2^-10.
                            EXPECT_LE(std::abs(value * scale - x), scale * std::max(0x1p-4 * std::abs(x / scale), 0x1p-10) * (1 + 1e-5));
                        }
                    EXPECT_NEAR(scale * 448, largest, 1e-6 * largest);
                    EXPECT_EQ(largest_value, 448);
                }
    }
}

TEST(Fp8, WhoSharesAScale) {
    const std::vector<float> x = [] {  // (2, 2, 65, 1): head n is all 2^n, and the last row twice that
        std::vector<float> values;
        for (int head = 0; head < 4; ++head)
            for (int i = 0; i < 65; ++i) values.push_back(std::ldexp(448.0f, head + i / 64));
        return values;
    }();
    const auto scales = [&](Shares shares) { return quantise_e4m3(x, 2, 2, 65, 1, {130, 65, 1}, shares).scales; };
    EXPECT_EQ(scales(Shares::block), (std::vector<float>{1, 2, 2, 4, 4, 8, 8, 16}));
    EXPECT_EQ(scales(Shares::head), (std::vector<float>{2, 2, 4, 4, 8, 8, 16, 16}));
    EXPECT_EQ(scales(Shares::tensor), std::vector<float>(8, 16));
    EXPECT_THROW(quantise_e4m3(x, 2, 2, 64, 1, {130, 65, 1}, Shares::block), InvalidArgument);
}

TEST(Fp8, ZerosAndWhatIsNotFinite) {
    const auto one_row = [](std::vector<float> x) {
        const int d = static_cast<int>(x.size());
        return quantise_e4m3(x, 1, 1, 1, d, {d, d, d}, Shares::block);
    };
    EXPECT_EQ(one_row({0, 0}).elements, (std::vector<std::uint8_t>{0, 0}));
    EXPECT_EQ(one_row({0, 0}).scales[0], 0x1p-96f);
    EXPECT_EQ(one_row({1e-38f, 0}).elements, (std::vector<std::uint8_t>{0, 0}));
    const E4m3Tensor mixed = one_row({448, INFINITY, -INFINITY, NAN, -448});
    EXPECT_EQ(mixed.scales[0], 1);
    EXPECT_EQ(mixed.elements, (std::vector<std::uint8_t>{0x7e, 0x7f, 0x7f, 0x7f, 0xfe}));
}

TEST(Fp8, RotationKeepsDotProducts) {
    for (const int d : {1, 2, 64, 256}) {
        const Problem p{.seq = 6, .kv_seq = 6, .head_dim = d};
        HostInputs in(p, 5);
        in.q[0] = 100;
        const auto dot = [&](int i, int j) {
            double sum = 0;
            for (int c = 0; c < d; ++c)
                sum += static_cast<double>(in.q[static_cast<std::size_t>(i * d + c)]) * in.k[static_cast<std::size_t>(j * d + c)];
            return sum;
        };
        std::vector<double> before;
        for (int i = 0; i < 6; ++i)
            for (int j = 0; j < 6; ++j) before.push_back(dot(i, j));
        rotate_rows(in.q, d, 9);
        rotate_rows(in.k, d, 9);
        for (int i = 0; i < 6; ++i)
            for (int j = 0; j < 6; ++j) EXPECT_NEAR(dot(i, j), before[static_cast<std::size_t>(i * 6 + j)], 1e-4 * std::sqrt(d));
        if (d > 1) {  // an outlier is spread
            float most = 0;
            for (int c = 0; c < d; ++c) most = std::max(most, std::abs(in.q[static_cast<std::size_t>(c)]));
            EXPECT_LT(most, 100 / std::sqrt(static_cast<float>(d)) + 5);
        }
    }
    std::vector<float> x(12);
    EXPECT_THROW(rotate_rows(x, 6, 1), InvalidArgument);
    EXPECT_THROW(rotate_rows(x, 8, 1), InvalidArgument);
}

double rms_error(const Problem& p, const HostInputs& in, Shares shares, bool rotated) {
    const ReferenceRows want = reference_forward(p, in.q, in.k, in.v), got = fp8_forward(p, in.q, in.k, in.v, {}, shares, rotated);
    return compare(want.o, std::vector<float>(got.o.begin(), got.o.end())).rel_rms;
}

TEST(Fp8, SmallerBlocksAndRotationHelpAgainstOutliers) {
    const Problem p{.batch = 1, .heads = 2, .kv_heads = 2, .seq = 128, .kv_seq = 256, .head_dim = 64, .dtype = DType::bf16};
    HostInputs in(p, 3);
    const double plain = rms_error(p, in, Shares::block, false);
    EXPECT_GT(plain, 0.01);
    EXPECT_LT(plain, 0.1);
    // One head is so small that with one scale for both it is below what e4m3 can hold.
    HostInputs small = in;
    for (std::size_t e = 0; e < in.v.size() / 2; ++e) small.v[e] *= 1e-7f;
    const ReferenceRows want = reference_forward(p, small.q, small.k, small.v);
    const auto error_of_small_head = [&](Shares shares) {
        const ReferenceRows got = fp8_forward(p, small.q, small.k, small.v, {}, shares, false);
        const std::size_t half = want.o.size() / 2;
        return compare(std::span(want.o).first(half), std::vector<float>(got.o.begin(), got.o.begin() + static_cast<std::ptrdiff_t>(half)))
            .rel_rms;
    };
    EXPECT_EQ(error_of_small_head(Shares::tensor), 1);  // all of it is gone
    EXPECT_LT(error_of_small_head(Shares::head), 0.1);
    HostInputs outliers = in;
    for (std::vector<float>* x : {&outliers.q, &outliers.k})
        for (std::size_t e = 0; e < x->size(); e += 501) (*x)[e] = 30;
    EXPECT_LT(rms_error(p, outliers, Shares::block, true), 0.8 * rms_error(p, outliers, Shares::block, false));
}

TEST(Fp8, DiagnosesOnlyWhatIsWrongWithTheScales) {
    const Problem p{.batch = 1, .heads = 2, .kv_heads = 1, .seq = 40, .kv_seq = 100, .head_dim = 64, .dtype = DType::f16};
    HostInputs in(p, 4);
    for (float& x : in.v) x *= 1000;
    const ReferenceRows want = reference_forward(p, in.q, in.k, in.v), plain = plain_fp8_forward(p, in.q, in.k, in.v, {});
    const auto told = [&](const ReferenceRows& rows, auto&& change) {
        Result got{{rows.o.begin(), rows.o.end()}, {rows.lse.begin(), rows.lse.end()}, {}, {}};
        change(got);
        return std::pair(diagnose_fp8(p, in.q, in.k, in.v, want, plain, got), diagnose(p, in.q, in.k, in.v, want, plain, got));
    };
    const auto as_it_is = [](Result&) {};
    EXPECT_EQ(told(plain, as_it_is).first, "");
    const ScalingRule unscaled = [](float, float factor) { return Scaling{factor, 1.0f}; };
    const auto cut_off = told(fp8_forward(p, in.q, in.k, in.v, {}, Shares::block, false, unscaled), as_it_is);
    EXPECT_NE(cut_off.first.find("beyond 448 were cut off"), std::string::npos) << cut_off.first;
    const auto another = told(plain, [](Result& got) {
        for (float& x : got.lse) x *= 1.44269504f;
    });
    EXPECT_NE(another.first.find("LSE is wrong"), std::string::npos) << another.first;
    EXPECT_EQ(another.first, another.second);
}

}  // namespace
}  // namespace workbook
