// The PTX wrappers, element by element: on a GPU they are what the PTX manual says that the fragments hold, in emulation what the
// workbook makes of it. Both must pass.
#include "ptx/acquire_release.hpp"
#include "ptx/cp_async.hpp"
#include "ptx/ex2.hpp"
#include "ptx/griddepcontrol.hpp"
#include "ptx/ldmatrix.hpp"
#include "ptx/mma.hpp"
#include "ptx/red.hpp"
#include "simt/e4m3.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"
#include "device_data.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace {

using simt::packed_view;
using simt::TensorView;
using workbook::DeviceData;

// ---------------------------------------------------------------- ldmatrix

struct Rows {
    alignas(16) std::uint16_t row[32][8];
};

/// Row r of the shared memory holds 8 r .. 8 r + 7. Lane l passes the address of row `row_of(l)`.
template <int kMatrices, bool kTransposed>
__global__ void load_matrices(TensorView<const int, 1> row_of, TensorView<std::uint32_t, 2> out) {
    auto& smem = simt::shared<Rows>();
    const int lane = threadIdx.x;
    for (int c = 0; c < 8; ++c) smem.row[lane][c] = static_cast<std::uint16_t>(8 * lane + c);
    __syncthreads();
    const int row = row_of(lane);
    std::uint32_t r[kMatrices];
    if constexpr (kMatrices == 4 && !kTransposed) ptx::ldmatrix_x4(r, smem.row[row]);
    if constexpr (kMatrices == 4 && kTransposed) ptx::ldmatrix_x4_trans(r, smem.row[row]);
    if constexpr (kMatrices == 2 && !kTransposed) ptx::ldmatrix_x2(r, smem.row[row]);
    if constexpr (kMatrices == 2 && kTransposed) ptx::ldmatrix_x2_trans(r, smem.row[row]);
    for (int q = 0; q < kMatrices; ++q) out(lane, q) = r[q];
}

template <int kMatrices, bool kTransposed>
void check_ldmatrix() {
    for (const int factor : {1, 5, 31}) {  // odd, so that 32 lanes name 32 rows, in order and not
        std::vector<int> row_of(32);
        for (int lane = 0; lane < 32; ++lane) row_of[static_cast<std::size_t>(lane)] = (factor * lane + factor / 2) % 32;
        const DeviceData<int> rows(row_of);
        DeviceData<std::uint32_t> out(32 * kMatrices);
        simt::launch(load_matrices<kMatrices, kTransposed>, {.block = {32}, .smem = sizeof(Rows)},
                     packed_view<const int, 1>("rows", rows.data(), {32}),
                     packed_view<std::uint32_t, 2>("out", out.data(), {32, kMatrices}));
        const std::vector<std::uint32_t> seen = out.get();
        // Element (i, j) of matrix q lies in the row whose address lane 8 q + i passed.
        const auto element = [&](int q, int i, int j) {
            return static_cast<std::uint32_t>(8 * row_of[static_cast<std::size_t>(8 * q + i)] + j);
        };
        for (int lane = 0; lane < 32; ++lane)
            for (int q = 0; q < kMatrices; ++q) {
                const int i = lane / 4, j = lane % 4 * 2;
                const std::uint32_t low = kTransposed ? element(q, j, i) : element(q, i, j);
                const std::uint32_t high = kTransposed ? element(q, j + 1, i) : element(q, i, j + 1);
                ASSERT_EQ(seen[static_cast<std::size_t>(lane * kMatrices + q)], low | high << 16)
                    << "lane " << lane << ", register " << q << ", row order " << factor;
            }
    }
}

TEST(Ldmatrix, X2) { check_ldmatrix<2, false>(); }
TEST(Ldmatrix, X2Transposed) { check_ldmatrix<2, true>(); }
TEST(Ldmatrix, X4) { check_ldmatrix<4, false>(); }
TEST(Ldmatrix, X4Transposed) { check_ldmatrix<4, true>(); }

// ---------------------------------------------------------------- mma

template <class T>
__device__ std::uint32_t pair_of(T low, T high) {
    std::uint16_t a, b;
    memcpy(&a, &low, 2);
    memcpy(&b, &high, 2);
    return a | static_cast<std::uint32_t>(b) << 16;
}

/// D(n) += A(n) B(n), fragments filled one element after the other as PTX describes them. One block a product.
template <class T>
__global__ void multiply(TensorView<const T, 3> A3,  // (n, 16, 16)
                         TensorView<const T, 3> B3,  // (n, 16, 8)
                         TensorView<float, 3> D3) {  // (n, 16, 8)
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const auto A = A3(static_cast<int>(blockIdx.x)), B = B3(static_cast<int>(blockIdx.x));
    const auto D = D3(static_cast<int>(blockIdx.x));
    std::uint32_t a[4], b[2];
    for (int e = 0; e < 4; ++e) {
        const int row = g + 8 * (e % 2), col = 2 * t + 8 * (e / 2);
        a[e] = pair_of<T>(A(row, col), A(row, col + 1));
    }
    for (int e = 0; e < 2; ++e) b[e] = pair_of<T>(B(2 * t + 8 * e, g), B(2 * t + 8 * e + 1, g));
    float d[4];
    for (int e = 0; e < 4; ++e) d[e] = D(g + 8 * (e / 2), 2 * t + e % 2);
    ptx::mma_m16n8k16<T>(d, a, b[0], b[1]);
    for (int e = 0; e < 4; ++e) D(g + 8 * (e / 2), 2 * t + e % 2) = d[e];
}

template <class T>
struct Tile {
    alignas(16) T a[16][16], b[16][8], b_transposed[8][16];
};

/// The same with the fragments that ldmatrix makes, B once from its rows (transposed on the way) and once from its columns.
template <class T>
__global__ void multiply_from_shared(TensorView<const T, 3> A3,  // (n, 16, 16)
                                     TensorView<const T, 3> B3,  // (n, 16, 8)
                                     TensorView<float, 3> D3,    // (n, 16, 8)
                                     bool by_columns) {
    const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
    const auto A = A3(static_cast<int>(blockIdx.x)), B = B3(static_cast<int>(blockIdx.x));
    const auto D = D3(static_cast<int>(blockIdx.x));
    auto& smem = simt::shared<Tile<T>>();
    for (int e = lane; e < 256; e += 32) smem.a[e / 16][e % 16] = A(e / 16, e % 16);
    for (int e = lane; e < 128; e += 32) {
        const T x = B(e / 8, e % 8);
        smem.b[e / 8][e % 8] = x;
        smem.b_transposed[e % 8][e / 8] = x;
    }
    __syncthreads();
    std::uint32_t a[4], b[2];
    ptx::ldmatrix_x4(a, &smem.a[lane % 16][lane / 16 * 8]);
    if (by_columns)
        ptx::ldmatrix_x2(b, &smem.b_transposed[lane % 8][lane / 8 % 2 * 8]);
    else
        ptx::ldmatrix_x2_trans(b, smem.b[lane % 16]);
    float d[4];
    for (int e = 0; e < 4; ++e) d[e] = D(g + 8 * (e / 2), 2 * t + e % 2);
    ptx::mma_m16n8k16<T>(d, a, b[0], b[1]);
    for (int e = 0; e < 4; ++e) D(g + 8 * (e / 2), 2 * t + e % 2) = d[e];
}

enum class Way { by_element, rows_of_b, columns_of_b };

template <class T>
std::vector<float> products(const std::vector<float>& a, const std::vector<float>& b, const std::vector<float>& d, Way way) {
    const int n = static_cast<int>(d.size()) / 128;
    const auto typed = [](const std::vector<float>& x) {
        std::vector<T> y(x.size());
        for (std::size_t e = 0; e < x.size(); ++e) y[e] = simt::from_float<T>(x[e]);
        return y;
    };
    const DeviceData<T> A(typed(a)), B(typed(b));
    const DeviceData<float> D(d);
    const auto av = packed_view<const T, 3>("A", A.data(), {n, 16, 16}), bv = packed_view<const T, 3>("B", B.data(), {n, 16, 8});
    const auto dv = packed_view<float, 3>("D", D.data(), {n, 16, 8});
    const dim3 grid(static_cast<unsigned>(n));
    if (way == Way::by_element)
        simt::launch(multiply<T>, {.grid = grid, .block = {32}}, av, bv, dv);
    else
        simt::launch(multiply_from_shared<T>, {.grid = grid, .block = {32}, .smem = sizeof(Tile<T>)}, av, bv, dv, way == Way::columns_of_b);
    return D.get();
}

template <class T>
class Mma : public testing::Test {};
using Types = testing::Types<__half, __nv_bfloat16>;
TYPED_TEST_SUITE(Mma, Types);

// A is 1 at (m, k) alone, the elements of B and of D all differ: row m of D gains row k of B, and nothing else changes.
TYPED_TEST(Mma, OneHotMatrices) {
    std::vector<float> a(256 * 256, 0.0f), b(256 * 128), d(256 * 128);
    for (std::size_t n = 0; n < 256; ++n) {
        a[256 * n + n] = 1.0f;
        for (std::size_t e = 0; e < 128; ++e) {
            b[128 * n + e] = static_cast<float>(e + 1);  // up to 128: exact in bf16
            d[128 * n + e] = static_cast<float>(1000 * (e + 1));
        }
    }
    for (const Way way : {Way::by_element, Way::rows_of_b, Way::columns_of_b}) {
        const std::vector<float> seen = products<TypeParam>(a, b, d, way);
        for (std::size_t n = 0; n < 256; ++n)
            for (std::size_t e = 0; e < 128; ++e) {
                const std::size_t m = n / 16, k = n % 16;
                const float gain = e / 8 == m ? b[8 * k + e % 8] : 0.0f;
                ASSERT_EQ(seen[128 * n + e], d[e] + gain)
                    << "A(" << m << ", " << k << ") = 1, D(" << e / 8 << ", " << e % 8 << "), way " << static_cast<int>(way);
            }
    }
}

TYPED_TEST(Mma, RandomMatricesAgainstFloat64) {
    constexpr std::size_t kCount = 200;
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    const auto fill = [&](std::size_t count) {
        std::vector<float> x(count);
        for (float& value : x) value = simt::to_float(simt::from_float<TypeParam>(normal(random)));
        return x;
    };
    const std::vector<float> a = fill(kCount * 256), b = fill(kCount * 128), d = fill(kCount * 128);
    for (const Way way : {Way::by_element, Way::rows_of_b, Way::columns_of_b}) {
        const std::vector<float> seen = products<TypeParam>(a, b, d, way);
        for (std::size_t n = 0; n < kCount; ++n)
            for (std::size_t e = 0; e < 128; ++e) {
                double want = d[128 * n + e], magnitude = std::fabs(want);
                for (std::size_t k = 0; k < 16; ++k) {
                    const double term = static_cast<double>(a[256 * n + e / 8 * 16 + k]) * b[128 * n + 8 * k + e % 8];
                    want += term;
                    magnitude += std::fabs(term);
                }
                // Products are exact; sums lose a few bits of the largest term, which tensor cores cut off rather than round.
                ASSERT_NEAR(seen[128 * n + e], want, magnitude * 0x1p-21) << "product " << n << ", element " << e;
            }
    }
}

// ---------------------------------------------------------------- pack

template <class T>
__global__ void pack_pairs(TensorView<const float, 1> in, TensorView<std::uint32_t, 1> out) {
    const int i = threadIdx.x, n = in.extent(0);
    out(i) = ptx::pack<T>(in(i), in((i + 1) % n));
}

template <class T>
void check_pack(const std::vector<std::pair<float, std::uint16_t>>& cases) {
    const int n = static_cast<int>(cases.size());
    std::vector<float> values;
    for (const auto& c : cases) values.push_back(c.first);
    const DeviceData<float> in(values);
    const DeviceData<std::uint32_t> out(values.size());
    simt::launch(pack_pairs<T>, {.block = {static_cast<unsigned>(n)}}, packed_view<const float, 1>("in", in.data(), {n}),
                 packed_view<std::uint32_t, 1>("out", out.data(), {n}));
    const std::vector<std::uint32_t> seen = out.get();
    for (std::size_t i = 0; i < cases.size(); ++i)
        EXPECT_EQ(seen[i], cases[i].second | static_cast<std::uint32_t>(cases[(i + 1) % cases.size()].second) << 16)
            << cases[i].first << " and its successor";
}

// First in the lower half; to nearest, ties to even; beyond the largest number infinity; subnormal numbers kept.
TEST(Pack, Half) {
    check_pack<__half>({{1.0f, 0x3c00},
                        {-2.0f, 0xc000},
                        {0.0f, 0x0000},
                        {-0.0f, 0x8000},
                        {1.0f + 0x1p-11f, 0x3c00},             // half way: to the even one, down
                        {1.0f + 0x3p-11f, 0x3c02},             // half way: up
                        {1.0f + 0x1p-11f + 0x1p-20f, 0x3c01},  // just above
                        {65504.0f, 0x7bff},
                        {65520.0f, 0x7c00},
                        {0x1p-24f, 0x0001},
                        {INFINITY, 0x7c00},
                        {-INFINITY, 0xfc00}});
}
TEST(Pack, Bfloat16) {
    check_pack<__nv_bfloat16>({{1.0f, 0x3f80},
                               {-2.0f, 0xc000},
                               {0.0f, 0x0000},
                               {-0.0f, 0x8000},
                               {1.0f + 0x1p-8f, 0x3f80},
                               {1.0f + 0x3p-8f, 0x3f82},
                               {1.0f + 0x1p-8f + 0x1p-20f, 0x3f81},
                               {65504.0f, 0x4780},
                               {3.4e38f, 0x7f80},
                               {INFINITY, 0x7f80},
                               {-INFINITY, 0xff80}});
}

/// What pack() packed, unpacked: both numbers of a pair, times 2.
template <class T>
__global__ void unpack_pairs(TensorView<const float, 1> in, TensorView<float, 1> out) {
    const int i = 2 * threadIdx.x;
    const float2 pair = ptx::unpack<T>(ptx::pack<T>(in(i), in(i + 1)));
    out(i) = 2 * pair.x;
    out(i + 1) = 2 * pair.y;
}

__global__ void pack_all_e4m3(TensorView<const float, 2> in, TensorView<std::uint32_t, 1> out) {
    const int i = threadIdx.x;
    if (i < out.extent(0)) out(i) = simt::pack_e4m3(in(i, 0), in(i, 1), in(i, 2), in(i, 3));
}

// To nearest, ties to even; beyond the largest number that; subnormal numbers kept; NaN.
TEST(Pack, E4m3) {
    const std::vector<std::pair<float, std::uint32_t>> cases = {
        {1.0f, 0x38},       {-2.0f, 0xc0},  {0.0f, 0x00},  {-0.0f, 0x80},    {1.0625f, 0x38},  // half way: to the even one, down
        {1.1875f, 0x3a},                                                                       // half way: up
        {1.0626f, 0x39},                                                                       // just above
        {448.0f, 0x7e},     {463.0f, 0x7e}, {-1e9f, 0xfe}, {INFINITY, 0x7e}, {0x1p-9f, 0x01}, {0x1p-10f, 0x00},  // half way to the smallest
        {0x1.8p-10f, 0x01}, {NAN, 0x7f},    {362.0f, 0x7b}};
    const std::size_t n = cases.size() / 4;
    std::vector<float> in;
    for (const auto& [x, bits] : cases) in.push_back(x);
    const DeviceData<float> device_in(in);
    DeviceData<std::uint32_t> out(n);
    simt::launch(pack_all_e4m3, {.block = {32}}, packed_view<const float, 2>("in", device_in.data(), {static_cast<int>(n), 4}),
                 packed_view<std::uint32_t, 1>("out", out.data(), {static_cast<int>(n)}));
    const std::vector<std::uint32_t> seen = out.get();
    for (std::size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(seen[i / 4] >> i % 4 * 8 & 0xff, cases[i].second) << cases[i].first;
}

template <class T>
void check_unpack() {
    const std::vector<float> values = {1.0f, -2.0f, 0.0f, 96.0f, -0.375f, 0x1p-14f, 240.0f, -1.5f};  // every type has them
    const DeviceData<float> in(values), out(values.size());
    simt::launch(unpack_pairs<T>, {.block = {4}}, packed_view<const float, 1>("in", in.data(), {8}),
                 packed_view<float, 1>("out", out.data(), {8}));
    const std::vector<float> seen = out.get();
    for (std::size_t i = 0; i < values.size(); ++i) EXPECT_EQ(seen[i], 2 * values[i]);
}

TEST(Pack, UnpackHalf) { check_unpack<__half>(); }
TEST(Pack, UnpackBfloat16) { check_unpack<__nv_bfloat16>(); }

// ---------------------------------------------------------------- red

/// Every thread of every block adds to one of eight groups of four numbers. Small whole numbers: the order makes no difference.
__global__ void add_fours(TensorView<float, 2> sums) {
    const int t = threadIdx.x;
    const float x[4] = {1.0f, static_cast<float>(t), 2.0f * static_cast<float>(blockIdx.x), -3.0f};
    ptx::red_add_f32x4(&sums(t % 2, t / 2 % 4 * 4), x);
}

TEST(Red, AddsFourAtATime) {
    const DeviceData<float> sums(std::vector<float>(32, 0.5f));
    simt::launch(add_fours, {.grid = {10}, .block = {64}}, packed_view<float, 2>("sums", sums.data(), {2, 16}));
    const std::vector<float> seen = sums.get();
    for (int row = 0; row < 2; ++row)
        for (int group = 0; group < 4; ++group) {
            float threads = 0, numbers = 0;
            for (int t = 0; t < 64; ++t)
                if (t % 2 == row && t / 2 % 4 == group) ++threads, numbers += static_cast<float>(t);
            const float want[4] = {10 * threads, 10 * numbers, 2 * 45 * threads, -30 * threads};
            for (int e = 0; e < 4; ++e) EXPECT_EQ(seen[16 * row + 4 * group + e], 0.5f + want[e]) << row << ", " << group << ", " << e;
        }
}

// ---------------------------------------------------------------- ld.acquire, red.release

/// Each block changes X after those before it have.
__global__ void in_order(TensorView<std::uint32_t, 1> turn, TensorView<std::uint32_t, 1> X) {  // (1), (32)
    const std::uint32_t mine = blockIdx.x + gridDim.x * blockIdx.y, lane = threadIdx.x;
    if (lane == 0) ptx::wait_acquire(&turn(0), mine);
    __syncwarp();  // for all lanes
    X(lane) = 3 * X(lane) + mine;
    __syncwarp();  // of all lanes
    if (lane == 0) ptx::red_release_add(&turn(0), 1);
}

TEST(AcquireRelease, BlocksInOrder) {
    constexpr int kColumns = 40, kRows = 5;
    const DeviceData<std::uint32_t> turn(std::vector<std::uint32_t>(1, 0)), x(std::vector<std::uint32_t>(32, 1));
    simt::launch(in_order, {.name = "in_order", .grid = {kColumns, kRows}, .block = {32}},
                 packed_view<std::uint32_t, 1>("turn", turn.data(), {1}), packed_view<std::uint32_t, 1>("X", x.data(), {32}));
    std::uint32_t want = 1;
    for (std::uint32_t block = 0; block < kColumns * kRows; ++block) want = 3 * want + block;
    EXPECT_EQ(turn.get()[0], std::uint32_t{kColumns * kRows});
    for (const std::uint32_t seen : x.get()) EXPECT_EQ(seen, want);
}

// ---------------------------------------------------------------- ex2

__global__ void powers(TensorView<const float, 1> in, TensorView<float, 1> out) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < in.extent(0)) out(i) = ptx::ex2_approx_ftz(in(i));
}

std::vector<float> powers_of_two(const std::vector<float>& x) {
    const int n = static_cast<int>(x.size());
    const DeviceData<float> in(x), out(x.size());
    simt::launch(powers, {.grid = {static_cast<unsigned>(n + 127) / 128}, .block = {128}},
                 packed_view<const float, 1>("in", in.data(), {n}), packed_view<float, 1>("out", out.data(), {n}));
    return out.get();
}

TEST(Ex2, RelativeError) {
    std::vector<float> x;
    for (int i = -126 * 64; i < 128 * 64; ++i) x.push_back(static_cast<float>(i) / 64 + (i % 7) * 1e-4f);
    x.front() = -126.0f;
    const std::vector<float> seen = powers_of_two(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double want = std::exp2(static_cast<double>(x[i]));
        if (want < 0x1p-126) continue;  // flushed to zero: see below
        ASSERT_NEAR(seen[i] / want, 1.0, 0x1p-22) << "2^" << x[i];
    }
}

TEST(Ex2, ZerosAndInfinities) {
    const std::vector<float> x = {-INFINITY, -200.0f, -127.0f, -126.5f, -126.0f, 0.0f, -0.0f, 1e-40f, 1.0f, 127.0f, 128.0f, INFINITY, NAN};
    const std::vector<float> want = {0, 0, 0, 0, 0x1p-126f, 1, 1, 1, 2, 0x1p127f, INFINITY, INFINITY, NAN};
    const std::vector<float> seen = powers_of_two(x);
    for (std::size_t i = 0; i < x.size(); ++i) {
        if (std::isnan(want[i]))
            EXPECT_TRUE(std::isnan(seen[i])) << "2^" << x[i];
        else
            EXPECT_EQ(seen[i], want[i]) << "2^" << x[i];
    }
}

// ---------------------------------------------------------------- cp.async

struct Landing {
    alignas(16) std::uint32_t words[64 * 4];
};

/// Thread i copies piece 63 - i of kBytes; every third piece is not valid. Others read what it wrote.
template <int kBytes>
__global__ void copy_pieces(TensorView<const std::uint32_t, 2> in, TensorView<std::uint32_t, 2> out) {
    constexpr int kWords = kBytes / 4;
    auto& smem = simt::shared<Landing>();
    const int i = threadIdx.x;
    for (int w = 0; w < kWords; ++w) smem.words[i * kWords + w] = 0xdeadbeefu;
    __syncthreads();
    ptx::cp_async<kBytes>(&smem.words[i * kWords], &in(63 - i, 0), i % 3 != 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int other = (i + 33) % 64;
    for (int w = 0; w < kWords; ++w) out(i, w) = smem.words[other * kWords + w];
}

template <int kBytes>
void check_copies() {
    constexpr int kWords = kBytes / 4;
    std::vector<std::uint32_t> words(64 * kWords);
    for (std::size_t e = 0; e < words.size(); ++e) words[e] = 0x01010101u * static_cast<std::uint32_t>(e % 251 + 1);
    const DeviceData<std::uint32_t> in(words), out(words.size());
    simt::launch(copy_pieces<kBytes>, {.block = {64}, .smem = sizeof(Landing)},
                 packed_view<const std::uint32_t, 2>("in", in.data(), {64, kWords}),
                 packed_view<std::uint32_t, 2>("out", out.data(), {64, kWords}));
    const std::vector<std::uint32_t> seen = out.get();
    for (int i = 0; i < 64; ++i)
        for (int w = 0; w < kWords; ++w) {
            const int piece = (i + 33) % 64;
            const std::uint32_t want = piece % 3 ? words[static_cast<std::size_t>((63 - piece) * kWords + w)] : 0u;
            ASSERT_EQ(seen[static_cast<std::size_t>(i * kWords + w)], want) << "piece " << piece << ", word " << w;
        }
}

TEST(CpAsync, FourBytes) { check_copies<4>(); }
TEST(CpAsync, EightBytes) { check_copies<8>(); }
TEST(CpAsync, SixteenBytes) { check_copies<16>(); }

struct Ring {
    alignas(16) std::uint32_t slot[2][32 * 4];
};

/// A ring of two slots over the rows of `in`: row n + 1 is fetched while row n is added up.
__global__ void sum_rows(TensorView<const std::uint32_t, 2> in, TensorView<std::uint32_t, 1> out) {
    auto& smem = simt::shared<Ring>();
    const int i = threadIdx.x, rows = in.extent(0);
    const auto fetch = [&](int n) {
        if (n < rows) ptx::cp_async<16>(&smem.slot[n % 2][4 * i], &in(n, 4 * i));
        ptx::cp_async_commit();  // also without a copy, so that the wait below counts alike in every turn
    };
    std::uint32_t sum = 0;
    fetch(0);
    for (int n = 0; n < rows; ++n) {
        fetch(n + 1);
        ptx::cp_async_wait<1>();
        __syncthreads();  // row n has landed for all
        const uint4 x = simt::load_shared_16(&smem.slot[n % 2][4 * (31 - i)]);
        sum += x.x + 2 * x.y + 3 * x.z + 4 * x.w;
        __syncthreads();  // before the slot is filled again
    }
    out(i) = sum;
}

TEST(CpAsync, GroupsOfARing) {
    constexpr int kRows = 9;
    std::vector<std::uint32_t> words(kRows * 128);
    for (std::size_t e = 0; e < words.size(); ++e) words[e] = static_cast<std::uint32_t>(e * e);
    const DeviceData<std::uint32_t> in(words), out(32);
    simt::launch(sum_rows, {.block = {32}, .smem = sizeof(Ring)}, packed_view<const std::uint32_t, 2>("in", in.data(), {kRows, 128}),
                 packed_view<std::uint32_t, 1>("out", out.data(), {32}));
    const std::vector<std::uint32_t> seen = out.get();
    for (std::uint32_t i = 0; i < 32; ++i) {
        std::uint32_t want = 0;
        for (std::uint32_t n = 0; n < kRows; ++n)
            for (std::uint32_t w = 0; w < 4; ++w) want += (w + 1) * words[128 * n + 4 * (31 - i) + w];
        EXPECT_EQ(seen[i], want) << "lane " << i;
    }
}

// ---------------------------------------------------------------- accesses of several bytes

/// Four lanes write a chunk of 16 bytes each 4, another lane takes it whole to global memory.
__global__ void regroup(TensorView<std::uint32_t, 2> out) {
    auto& smem = simt::shared<Landing>();
    const int lane = threadIdx.x;
    for (int e = 0; e < 4; ++e) simt::store_shared_4(&smem.words[32 * e + lane], static_cast<std::uint32_t>(100 * e + lane));
    __syncwarp();
    simt::store_global_16(&out(lane / 8, lane % 8 * 4), simt::load_shared_16(&smem.words[4 * lane]));
}

TEST(Vector, RegroupsChunks) {
    const DeviceData<std::uint32_t> out(128);
    simt::launch(regroup, {.block = {32}, .smem = sizeof(Landing)}, packed_view<std::uint32_t, 2>("out", out.data(), {4, 32}));
    const std::vector<std::uint32_t> seen = out.get();
    for (std::uint32_t e = 0; e < 128; ++e) EXPECT_EQ(seen[e], 100 * (e / 32) + e % 32);
}

// ---------------------------------------------------------------- kernels that begin early

/// The last elements are written long after the next kernel may begin.
__global__ void count_up(TensorView<int, 1> numbers, int rounds) {
    ptx::griddepcontrol_launch_dependents();
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    for (int n = 0; n < rounds; ++n) numbers(i) += 1;
}

template <bool kWaits>
__global__ void double_them(TensorView<const int, 1> numbers, TensorView<int, 1> doubled) {
    if constexpr (kWaits) ptx::griddepcontrol_wait();
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    doubled(i) = 2 * numbers(i);
}

TEST(Griddepcontrol, AnEarlyKernelSeesWhatTheOneBeforeWrote) {
    constexpr int kBlocks = 50, kNumbers = 32 * kBlocks, kRounds = SIMT_EMULATED ? 3 : 10000;
    for (int round = 0; round < 5; ++round) {
        const DeviceData<int> numbers(std::vector<int>(kNumbers, 7)), doubled(kNumbers);
        simt::launch(count_up, {.grid = {kBlocks}, .block = {32}}, packed_view<int, 1>("numbers", numbers.data(), {kNumbers}), kRounds);
        simt::launch(double_them<true>, {.grid = {kBlocks}, .block = {32}, .early = true},
                     packed_view<const int, 1>("numbers", numbers.data(), {kNumbers}),
                     packed_view<int, 1>("doubled", doubled.data(), {kNumbers}));
        for (const int x : doubled.get()) ASSERT_EQ(x, 2 * (7 + kRounds));
    }
}

#if SIMT_EMULATED
TEST(Griddepcontrol, TheEmulatorRefusesAnEarlyKernelThatDoesNotWait) {
    const DeviceData<int> numbers(std::vector<int>(32, 7)), doubled(32);
    simt::Ledger ledger;
    simt::Execution exec;
    exec.ledger = &ledger;
    const auto run = [&](bool early) {
        simt::launch(double_them<false>, {.name = "double_them", .block = {32}, .early = early, .exec = &exec},
                     packed_view<const int, 1>("numbers", numbers.data(), {32}), packed_view<int, 1>("doubled", doubled.data(), {32}));
    };
    run(false);
    try {
        run(true);
        FAIL() << "nothing was said";
    } catch (const simt::Error& error) {
        EXPECT_NE(std::string(error.what()).find("double_them is launched early"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("accesses numbers before griddepcontrol_wait()"), std::string::npos) << error.what();
    }
}
#endif

}  // namespace
