#include "attention/inputs.hpp"
#include "attention/philox.hpp"
#include "tensor/buffer.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

namespace workbook {
namespace {

using ::testing::IsSubstring;

template <class T = float>
std::vector<T> download(const DeviceBuffer& buffer) {
    std::vector<T> values(buffer.size() / sizeof(T));
    buffer.download(values.data(), values.size() * sizeof(T));
    return values;
}

std::vector<float> random(long long count, std::uint64_t seed, Stream stream = Stream::q, Distribution dist = Distribution::normal) {
    DeviceBuffer buffer(count * sizeof(float));
    fill_random(buffer, DType::f32, 1, 1, static_cast<int>(count), 1, {count, count, 1}, seed, stream, dist);
    return download(buffer);
}

// The three lines "philox4x32 10" of Random123's tests/kat_vectors.
TEST(Philox, KnownAnswers) {
    struct Vector {
        PhiloxWords counter;
        std::uint64_t key;
        PhiloxWords answer;
    };
    const Vector vectors[] = {
        {{{0, 0, 0, 0}}, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
        {{{~0u, ~0u, ~0u, ~0u}}, ~0ull, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
        {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0x299f31d0a4093822, {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
    };
    for (const Vector& v : vectors) {
        const PhiloxWords got = philox4x32_10(v.counter, v.key);
        for (int w = 0; w < 4; ++w) EXPECT_EQ(got.word[w], v.answer.word[w]) << w;
    }
}

TEST(Philox, CounterHoldsElementStreamAndDraw) {
    const PhiloxWords got = random_words(9, 2, 0x500000007, 3), want = philox4x32_10({{7, 5, 2, 3}}, 9);
    for (int w = 0; w < 4; ++w) EXPECT_EQ(got.word[w], want.word[w]);
}

TEST(Philox, UnitIntervalIsHalfOpen) {
    EXPECT_EQ(unit_interval(0, 0), 0);
    EXPECT_EQ(unit_interval(~0u, ~0u), 1 - 0x1p-53);
    EXPECT_EQ(unit_interval(0, 1u << 31), 0.5);
    EXPECT_EQ(unit_interval(1u << 11, 0), 0x1p-53);
}

TEST(Philox, LogarithmAndCosineMatchTheLibrary) {
    for (double u : {1.0, 1 - 0x1p-53, 0x1p-53, 0.5, 0.70710678118654746, 0.70710678118654757, 0.75, 0.1})
        EXPECT_NEAR(portable_log(u), std::log(u), 1e-14 * std::abs(std::log(u))) << u;
    for (int e = 0; e < 100000; ++e) {
        const PhiloxWords w = random_words(1, 0, e, 0);
        const double u = 1 - unit_interval(w.word[0], w.word[1]), t = unit_interval(w.word[2], w.word[3]);
        ASSERT_NEAR(portable_log(u), std::log(u), 1e-14 * std::abs(std::log(u))) << u;
        ASSERT_NEAR(portable_cos_turns(t), std::cos(2 * std::acos(-1.0) * t), 1e-15) << t;
    }
    for (int eighth = 0; eighth < 8; ++eighth)
        EXPECT_NEAR(portable_cos_turns(eighth / 8.0), std::cos(std::acos(-1.0) * eighth / 4), 1e-15) << eighth;
    EXPECT_NEAR(portable_cos_turns(1 - 0x1p-53), 1, 1e-15);
    // The extremes of Box-Muller are finite.
    EXPECT_TRUE(std::isfinite(standard_normal({{~0u, ~0u, 0, 0}})));
    EXPECT_EQ(standard_normal({{0, 0, 0, 0}}), 0);
}

// Computed by an independent program from the definition, with its library's log and cos: a change of generator cannot pass.
TEST(Inputs, FirstValuesNeverChange) {
    const auto expect = [](std::uint64_t seed, Stream stream, std::vector<float> want) {
        const std::vector<float> got = random(4, seed, stream);
        for (int e = 0; e < 4; ++e) EXPECT_EQ(got[e], want[e]) << "seed " << seed << " element " << e;
    };
    expect(0, Stream::q, {-0x1.9ffd9ap+0f, 0x1.d85c96p-1f, -0x1.e97e1ap-4f, -0x1.db2282p-1f});
    expect(42, Stream::v, {-0x1.bb5662p-2f, -0x1.0f57b6p+0f, 0x1.bd996cp-1f, 0x1.d75c9cp+0f});
    expect(0xDEADBEEFCAFEF00D, Stream::d_o, {-0x1.0c5018p-1f, 0x1.1383cap+0f, 0x1.bbca68p-4f, 0x1.321a02p-1f});
    // The first outliers of seed 42, stream K.
    const std::vector<float> normal = random(10000, 42, Stream::k), with = random(10000, 42, Stream::k, Distribution::outliers);
    std::vector<int> outliers;
    for (int e = 0; e < 10000; ++e)
        if (normal[e] != with[e]) outliers.push_back(e);
    EXPECT_EQ(outliers, (std::vector<int>{228, 3703, 7439, 7954, 8578}));
    EXPECT_EQ(with[228], 0x1.6ac76ep+3f);
}

TEST(Inputs, AreNormal) {
    constexpr int n = 1 << 19;
    for (auto [seed, stream] : {std::pair{1, Stream::q}, {2, Stream::k}, {3, Stream::v}}) {
        std::vector<float> x = random(n, seed, stream);
        double moment[5] = {}, neighbours = 0;
        for (int e = 0; e < n; ++e) {
            for (int k = 1; k <= 4; ++k) moment[k] += std::pow(x[e], k) / n;
            if (e > 0) neighbours += static_cast<double>(x[e]) * x[e - 1] / n;
        }
        // Five standard deviations of each estimate: variances 1, 2, 15, 96 and 1, over n.
        const double sigma = 5 / std::sqrt(n);
        EXPECT_NEAR(moment[1], 0, sigma);
        EXPECT_NEAR(moment[2], 1, sigma * std::sqrt(2));
        EXPECT_NEAR(moment[3], 0, sigma * std::sqrt(15));
        EXPECT_NEAR(moment[4], 3, sigma * std::sqrt(96));
        EXPECT_NEAR(neighbours, 0, sigma);
        // Kolmogorov and Smirnov: the largest distance from the distribution function, exceeded with probability 2 exp(-2 * 2.5^2).
        std::sort(x.begin(), x.end());
        double distance = 0;
        for (int e = 0; e < n; ++e) distance = std::max(distance, std::abs((e + 0.5) / n - std::erfc(-x[e] / std::sqrt(2.0)) / 2));
        EXPECT_LT(distance, 2.5 / std::sqrt(n));
        EXPECT_TRUE(std::isfinite(x.front()) && std::isfinite(x.back()));
    }
}

TEST(Inputs, OutliersAreRareAndLarge) {
    constexpr int n = 1 << 20;
    const std::vector<float> normal = random(n, 7), with = random(n, 7, Stream::q, Distribution::outliers);
    double count = 0, squares = 0, sum = 0;
    for (int e = 0; e < n; ++e) {
        if (normal[e] == with[e]) continue;
        const double added = static_cast<double>(with[e]) - normal[e];
        ++count;
        sum += added;
        squares += added * added;
    }
    EXPECT_NEAR(count, 0.001 * n, 5 * std::sqrt(0.001 * n));
    EXPECT_NEAR(sum / count, 0, 5 * 10 / std::sqrt(count));
    EXPECT_NEAR(squares / count, 100, 5 * 100 * std::sqrt(2 / count));
}

TEST(Inputs, SeedsAndStreamsAreIndependent) {
    constexpr int n = 1 << 17;
    const std::vector<std::vector<float>> all = {random(n, 1, Stream::q),
                                                 random(n, 1, Stream::k),
                                                 random(n, 1, Stream::v),
                                                 random(n, 1, Stream::d_o),
                                                 random(n, 2, Stream::q),
                                                 random(n, 1ull << 32, Stream::q),
                                                 random(n, 1 + (1ull << 32), Stream::q)};
    for (std::size_t a = 0; a < all.size(); ++a)
        for (std::size_t b = 0; b < a; ++b) {
            double correlation = 0;
            for (int e = 0; e < n; ++e) correlation += static_cast<double>(all[a][e]) * all[b][e] / n;
            EXPECT_NEAR(correlation, 0, 5 / std::sqrt(n)) << a << " and " << b;
        }
    EXPECT_EQ(all[0], random(n, 1, Stream::q));
}

TEST(Inputs, LayoutAndPaddingDoNotChangeTheNumbers) {
    constexpr int B = 2, H = 3, N = 5, d = 4;
    const auto filled = [&](const Strides& strides, std::size_t elements) {
        DeviceBuffer buffer(elements * sizeof(float));
        fill_random(buffer, DType::f32, B, H, N, d, strides, 11, Stream::k, Distribution::outliers);
        return download(buffer);
    };
    const std::vector<float> flat = random(B * H * N * d, 11, Stream::k, Distribution::outliers);
    for (const Strides& s : {Strides{H * N * d, N * d, d}, Strides{N * H * d, d, H * d}, Strides{200, 50, 10}}) {
        const std::vector<float> got = filled(s, 400);
        std::vector<bool> touched(400, false);
        for (int e = 0; e < B * H * N * d; ++e) {
            const long long place = e / (H * N * d) * s[0] + e / (N * d) % H * s[1] + e / d % N * s[2] + e % d;
            EXPECT_EQ(got[place], flat[e]) << e;
            touched[place] = true;
        }
        for (int place = 0; place < 400; ++place) EXPECT_EQ(std::isnan(got[place]), !touched[place]) << place;
    }
}

TEST(Inputs, LowPrecisionIsTheRoundedFloat) {
    constexpr int n = 10000;
    const std::vector<float> f32 = random(n, 5);
    const auto check = [&]<class T>(T, DType type) {
        DeviceBuffer buffer(n * sizeof(T));
        fill_random(buffer, type, 1, 1, n, 1, {n, n, 1}, 5, Stream::q, Distribution::normal);
        const std::vector<T> got = download<T>(buffer);
        for (int e = 0; e < n; ++e) ASSERT_EQ(static_cast<float>(got[e]), static_cast<float>(static_cast<T>(f32[e]))) << e;
    };
    check(__half(), DType::f16);
    check(__nv_bfloat16(), DType::bf16);
}

TEST(Inputs, RefusesWhatDoesNotFit) {
    DeviceBuffer buffer(24 * sizeof(float));
    const auto message = [&](int batch, int heads, int rows, int dim, const Strides& strides, DType type = DType::f32) {
        try {
            fill_random(buffer, type, batch, heads, rows, dim, strides, 1, Stream::q, Distribution::normal);
        } catch (const InvalidArgument& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    EXPECT_EQ(message(1, 2, 3, 4, {24, 12, 4}), "");
    EXPECT_EQ(message(1, 4, 3, 4, {48, 12, 4}, DType::f16), "");
    EXPECT_EQ(message(1, 2, 3, 4, {24, 13, 4}),
              "buffer holds 24 f32 elements; the shape (1, 2, 3, 4) with strides (24, 13, 4, 1) reaches further");
    const long long far = std::numeric_limits<long long>::max();
    EXPECT_PRED_FORMAT2(IsSubstring, "reaches further", message(4, 1, 1, 1, {far, far, far}));
    EXPECT_EQ(message(0, 2, 3, 4, {24, 12, 4}), "batch = 0: accepted is 1 or more");
    EXPECT_EQ(message(1, 2, 3, -1, {24, 12, 4}), "dim = -1: accepted is 1 or more");
    EXPECT_PRED_FORMAT2(IsSubstring, "-12 is negative", message(1, 2, 3, 4, {24, -12, 4}));
}

TEST(Inputs, WordsOfDistributions) {
    for (Distribution dist : {Distribution::normal, Distribution::outliers}) EXPECT_EQ(parse_distribution(name(dist)), dist);
    try {
        parse_distribution("uniform");
        FAIL() << "accepted an unknown distribution";
    } catch (const InvalidArgument& error) {
        EXPECT_STREQ(error.what(), "distribution = \"uniform\": accepted are normal and outliers");
    }
}

TEST(DeviceBuffer, IsAlignedAndPoisoned) {
    for (std::size_t bytes : {1, 3, 255, 4096, 100003}) {
        DeviceBuffer buffer(bytes);
        EXPECT_EQ(buffer.size(), bytes);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer.data()) % 256, 0u);
        EXPECT_EQ(download<unsigned char>(buffer), std::vector<unsigned char>(bytes, 0xFF));
    }
    const DeviceBuffer buffer(64);
    for (float x : download<float>(buffer)) EXPECT_TRUE(std::isnan(x));
    for (__half x : download<__half>(buffer)) EXPECT_TRUE(std::isnan(static_cast<float>(x)));
    for (__nv_bfloat16 x : download<__nv_bfloat16>(buffer)) EXPECT_TRUE(std::isnan(static_cast<float>(x)));
}

TEST(DeviceBuffer, UploadDownloadAndPoisonAgain) {
    DeviceBuffer buffer(1000);
    std::vector<unsigned char> bytes(600);
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<unsigned char>(i * 7);
    buffer.upload(bytes.data(), bytes.size());
    std::vector<unsigned char> got = download<unsigned char>(buffer);
    EXPECT_TRUE(std::equal(bytes.begin(), bytes.end(), got.begin()));
    EXPECT_TRUE(std::all_of(got.begin() + 600, got.end(), [](unsigned char b) { return b == 0xFF; }));
    std::vector<unsigned char> part(11, 0);
    buffer.download(part.data(), 10);
    EXPECT_TRUE(std::equal(part.begin(), part.begin() + 10, bytes.begin()));
    EXPECT_EQ(part[10], 0);
    buffer.poison();
    EXPECT_EQ(download<unsigned char>(buffer), std::vector<unsigned char>(1000, 0xFF));
}

TEST(DeviceBuffer, MovesAndMayBeEmpty) {
    DeviceBuffer empty;
    EXPECT_EQ(empty.size(), 0u);
    EXPECT_EQ(empty.data(), nullptr);
    EXPECT_EQ(DeviceBuffer(0).data(), nullptr);
    empty.poison();
    empty.upload(nullptr, 0);
    empty.download(nullptr, 0);

    DeviceBuffer first(100);
    void* const place = first.data();
    DeviceBuffer second(std::move(first));
    EXPECT_EQ(second.data(), place);
    EXPECT_EQ(first.size(), 0u);
    EXPECT_EQ(first.data(), nullptr);
    empty = std::move(second);
    EXPECT_EQ(empty.data(), place);
    EXPECT_EQ(empty.size(), 100u);
}

TEST(DeviceBuffer, RefusesWhatDoesNotFit) {
    DeviceBuffer buffer(8);
    unsigned char host[9] = {};
    const auto message = [](auto&& call) {
        try {
            call();
        } catch (const InvalidArgument& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    EXPECT_EQ(message([&] { buffer.upload(host, 9); }), "upload: bytes = 9; accepted is at most the buffer's size, 8");
    EXPECT_EQ(message([&] { buffer.download(host, 9); }), "download: bytes = 9; accepted is at most the buffer's size, 8");
    EXPECT_EQ(message([&] { buffer.upload(nullptr, 8); }), "upload: the host pointer is null");
    EXPECT_EQ(message([&] { DeviceBuffer().download(host, 1); }), "download: bytes = 1; accepted is at most the buffer's size, 0");
}

TEST(DeviceBuffer, SaysHowMuchMemoryIsMissing) {
#ifdef __SANITIZE_ADDRESS__
    GTEST_SKIP() << "AddressSanitizer ends the program where operator new would throw";
#endif
    try {
        DeviceBuffer buffer(std::size_t{1} << 60);
        FAIL() << "allocated 2^60 bytes";
    } catch (const std::bad_alloc& error) {
        EXPECT_PRED_FORMAT2(IsSubstring, "no 1152921504606846976 bytes of device memory", error.what());
    }
}

}  // namespace
}  // namespace workbook
