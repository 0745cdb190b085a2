// Small kernels that must give the same results on a GPU and in emulation: indices, collectives, reductions, shared memory,
// conversions and views.
#include "simt/simt.hpp"
#include "device_data.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace {

using simt::kFullMask;
using simt::packed_view;
using simt::TensorView;
using workbook::DeviceData;

std::vector<float> ramp(std::size_t count) {
    std::vector<float> values(count);
    for (std::size_t i = 0; i < count; ++i) values[i] = static_cast<float>(i);
    return values;
}

// ---------------------------------------------------------------- indices

// Each thread writes its rank in the grid (x fastest) where its indices say that it is.
__global__ void ranks(TensorView<int, 2> out) {
    const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out(b, t) = static_cast<int>(b * blockDim.x * blockDim.y * blockDim.z + t);
}

TEST(KernelsBasic, ThreeDimensionalGridAndBlock) {
    DeviceData<int> out(12 * 70);
    simt::launch(ranks, {.grid = {2, 3, 2}, .block = {7, 5, 2}}, packed_view<int, 2>("out", out.data(), {12, 70}));
    const std::vector<int> seen = out.get();
    for (std::size_t i = 0; i < seen.size(); ++i) ASSERT_EQ(seen[i], static_cast<int>(i));
}

// ---------------------------------------------------------------- collectives

constexpr int kShuffles = 5;

__global__ void shuffles(TensorView<int, 2> out, int width, int by) {
    const int lane = static_cast<int>(threadIdx.x), mine = 100 + lane;
    out(0, lane) = __shfl_sync(kFullMask, mine, by, width);
    out(1, lane) = __shfl_sync(kFullMask, mine, lane + by, width);
    out(2, lane) = __shfl_xor_sync(kFullMask, mine, by, width);
    out(3, lane) = __shfl_down_sync(kFullMask, mine, static_cast<unsigned>(by), width);
    out(4, lane) = __shfl_up_sync(kFullMask, mine, static_cast<unsigned>(by), width);
}

TEST(KernelsBasic, ShufflesOfEveryWidth) {
    DeviceData<int> out(kShuffles * 32);
    for (int width : {1, 2, 4, 8, 16, 32})
        for (int by : {0, 1, 3, 16, 31, 35}) {
            simt::launch(shuffles, {.block = {32}}, packed_view<int, 2>("out", out.data(), {kShuffles, 32}), width, by);
            const std::vector<int> seen = out.get();
            const int step = by % 32;  // the hardware takes five bits
            for (int lane = 0; lane < 32; ++lane) {
                const int first = lane / width * width, last = first + width - 1;
                const int expected[kShuffles] = {first + by % width, first + (lane + by) % width,
                                                 (lane ^ step) <= last ? lane ^ step : lane, lane + step <= last ? lane + step : lane,
                                                 lane - step >= first ? lane - step : lane};
                for (int k = 0; k < kShuffles; ++k)
                    ASSERT_EQ(seen[static_cast<std::size_t>(k * 32 + lane)], 100 + expected[k])
                        << "shuffle " << k << " width " << width << " by " << by << " lane " << lane;
            }
        }
}

__global__ void votes(TensorView<unsigned, 2> out, unsigned pattern) {
    const int lane = static_cast<int>(threadIdx.x), mine = pattern >> lane & 1u ? 4 : 0;
    out(0, lane) = __ballot_sync(kFullMask, mine);
    out(1, lane) = __any_sync(kFullMask, mine) != 0;
    out(2, lane) = __all_sync(kFullMask, mine) != 0;
}

TEST(KernelsBasic, Votes) {
    DeviceData<unsigned> out(3 * 32);
    for (unsigned pattern : {0u, 1u, 0x80000000u, 0x12345678u, 0xfffffffeu, 0xffffffffu}) {
        simt::launch(votes, {.block = {32}}, packed_view<unsigned, 2>("out", out.data(), {3, 32}), pattern);
        const std::vector<unsigned> seen = out.get();
        for (std::size_t lane = 0; lane < 32; ++lane) {
            EXPECT_EQ(seen[lane], pattern);
            EXPECT_EQ(seen[32 + lane], pattern != 0 ? 1u : 0u);
            EXPECT_EQ(seen[64 + lane], pattern == 0xffffffffu ? 1u : 0u);
        }
    }
}

// Even and odd lanes meet among themselves, then all of them.
__global__ void two_masks(TensorView<int, 1> out) {
    const int lane = static_cast<int>(threadIdx.x);
    const unsigned even = 0x55555555u;
    int x = lane;
    if (lane % 2 == 0) {
        for (int step = 2; step < 32; step *= 2) x += __shfl_xor_sync(even, x, step);
    } else {
        x = static_cast<int>(__ballot_sync(~even, lane > 29));
    }
    __syncwarp();
    out(lane) = __shfl_xor_sync(kFullMask, x, 1);
}

TEST(KernelsBasic, TwoMasksOfOneWarp) {
    DeviceData<int> out(32);
    simt::launch(two_masks, {.block = {32}}, packed_view<int, 1>("out", out.data(), {32}));
    const std::vector<int> seen = out.get();
    for (std::size_t lane = 0; lane < 32; ++lane) EXPECT_EQ(seen[lane], lane % 2 ? 240 : static_cast<int>(0x80000000u)) << lane;
}

template <int Width>
__global__ void reduce(TensorView<float, 2> out) {
    const int t = static_cast<int>(threadIdx.x);
    out(0, t) = simt::warp_sum<Width>(static_cast<float>(t + 1));
    out(1, t) = simt::warp_max<Width>(static_cast<float>(t % 2 ? -t : t - 100));
}

template <int Width>
void expect_reductions() {
    DeviceData<float> out(2 * 96);
    simt::launch(reduce<Width>, {.block = {96}}, packed_view<float, 2>("out", out.data(), {2, 96}));
    const std::vector<float> seen = out.get();
    for (int i = 0; i < 96; ++i) {
        float sum = 0, maximum = -INFINITY;
        for (int j = i / Width * Width; j < i / Width * Width + Width; ++j) {
            sum += static_cast<float>(j + 1);
            maximum = std::max(maximum, static_cast<float>(j % 2 ? -j : j - 100));
        }
        EXPECT_EQ(seen[static_cast<std::size_t>(i)], sum) << Width << " " << i;
        EXPECT_EQ(seen[static_cast<std::size_t>(96 + i)], maximum) << Width << " " << i;
    }
}

TEST(KernelsBasic, WarpReductionsOfEveryWidth) {
    expect_reductions<1>();
    expect_reductions<2>();
    expect_reductions<4>();
    expect_reductions<8>();
    expect_reductions<16>();
    expect_reductions<32>();
}

// ---------------------------------------------------------------- shared memory

struct Tile {
    float x[32][33];
};

// Transposes 32 x 32 tiles of a matrix with ragged edges.
__global__ void transpose_struct(TensorView<const float, 2> a, TensorView<float, 2> b) {
    auto& tile = simt::shared<Tile>();
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    const int r0 = static_cast<int>(blockIdx.y) * 32, c0 = static_cast<int>(blockIdx.x) * 32;
    for (int r = y; r < 32; r += 8)
        if (r0 + r < a.extent(0) && c0 + x < a.extent(1)) tile.x[r][x] = a(r0 + r, c0 + x);
    __syncthreads();
    for (int c = y; c < 32; c += 8)
        if (r0 + x < a.extent(0) && c0 + c < a.extent(1)) b(c0 + c, r0 + x) = tile.x[x][c];
}

// The same with a tile whose size is known at run time, and a vector behind it that keeps the first column.
__global__ void transpose_arena(TensorView<const float, 2> a, TensorView<float, 2> b, int side) {
    simt::SharedArena arena;
    const auto tile = arena.tile<float>("tile", side, side, side + 1);
    const auto first = arena.vector<float>("first", side);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    const int r0 = static_cast<int>(blockIdx.y) * side, c0 = static_cast<int>(blockIdx.x) * side;
    for (int r = y; r < side; r += 8)
        if (r0 + r < a.extent(0) && c0 + x < a.extent(1)) {
            tile(r, x) = a(r0 + r, c0 + x);
            if (x == 0) first(r) = tile(r, x);
        }
    __syncthreads();
    for (int c = y; c < side; c += 8)
        if (r0 + x < a.extent(0) && c0 + c < a.extent(1)) b(c0 + c, r0 + x) = c == 0 ? first(x) : tile(x, c);
}

TEST(KernelsBasic, TransposeThroughSharedMemory) {
    constexpr int rows = 75, cols = 50;
    const DeviceData<float> a(ramp(rows * cols));
    for (bool arena : {false, true}) {
        DeviceData<float> b(rows * cols);
        const auto from = packed_view<const float, 2>("a", a.data(), {rows, cols});
        const auto to = packed_view<float, 2>("b", b.data(), {cols, rows});
        if (arena)
            simt::launch(transpose_arena, {.grid = {2, 3}, .block = {32, 8}, .smem = (32 * 33 + 32) * 4}, from, to, 32);
        else
            simt::launch(transpose_struct, {.grid = {2, 3}, .block = {32, 8}, .smem = sizeof(Tile)}, from, to);
        const std::vector<float> seen = b.get();
        for (int r = 0; r < rows; ++r)
            for (int c = 0; c < cols; ++c)
                ASSERT_EQ(seen[static_cast<std::size_t>(c * rows + r)], static_cast<float>(r * cols + c)) << r << " " << c;
    }
}

// 1024 threads, more than 48 KiB of shared memory: every thread reads what one of another warp wrote.
struct Large {
    float x[16][1024];
};

__global__ void rotate(TensorView<float, 1> out) {
    auto& s = simt::shared<Large>();
    const int t = static_cast<int>(threadIdx.x);
    for (int k = 0; k < 16; ++k) s.x[k][t] = static_cast<float>(1000 * k + t);
    __syncthreads();
    float sum = 0;
    for (int k = 0; k < 16; ++k) sum += s.x[k][(t + 32 * k + 7) % 1024];
    out(t) = sum;
}

TEST(KernelsBasic, BarrierOf1024Threads) {
    DeviceData<float> out(1024);
    simt::launch(rotate, {.block = {1024}, .smem = sizeof(Large)}, packed_view<float, 1>("out", out.data(), {1024}));
    const std::vector<float> seen = out.get();
    for (int t = 0; t < 1024; ++t) {
        int sum = 0;
        for (int k = 0; k < 16; ++k) sum += 1000 * k + (t + 32 * k + 7) % 1024;
        ASSERT_EQ(seen[static_cast<std::size_t>(t)], static_cast<float>(sum));
    }
}

// ---------------------------------------------------------------- atomics and arithmetic

__global__ void histogram(TensorView<int, 1> counts, TensorView<float, 1> sums, TensorView<const float, 1> values) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= values.extent(0)) return;
    const int bin = i % counts.extent(0);
    atomicAdd(&counts(bin), 1);
    atomicAdd(&sums(bin), static_cast<float>(values(i)));
}

TEST(KernelsBasic, AtomicAdd) {
    const DeviceData<float> values(ramp(1000));
    DeviceData<int> counts(std::vector<int>(7, 0));
    DeviceData<float> sums(std::vector<float>(7, 0.0f));
    simt::launch(histogram, {.grid = {8}, .block = {128}}, packed_view<int, 1>("counts", counts.data(), {7}),
                 packed_view<float, 1>("sums", sums.data(), {7}), packed_view<const float, 1>("values", values.data(), {1000}));
    std::vector<int> count(7);
    std::vector<float> sum(7);
    for (int i = 0; i < 1000; ++i) {
        ++count[static_cast<std::size_t>(i % 7)];
        sum[static_cast<std::size_t>(i % 7)] += static_cast<float>(i);  // whole numbers below 2^24: exact in any order
    }
    EXPECT_EQ(counts.get(), count);
    EXPECT_EQ(sums.get(), sum);
}

constexpr int kFloats = 16;

__global__ void arithmetic(TensorView<float, 1> f, TensorView<int, 1> i, float x, int n) {
    f(0) = __expf(x);
    f(1) = __logf(x);
    f(2) = __log2f(x);
    f(3) = rsqrtf(x);
    f(4) = __fdividef(1.0f, x);
    f(5) = __frcp_rn(x);
    f(6) = min(x, 0.25f);
    f(7) = max(x, 0.25f);
    f(8) = fmaf(x, x, 1.0f);
    f(9) = __expf(-INFINITY);
    f(10) = fmaxf(-INFINITY, x);
    f(11) = __sinf(x);
    f(12) = __cosf(x);
    f(13) = __powf(x, 3.0f);
    f(14) = exp2f(x);
    f(15) = __exp10f(x);
    i(0) = __popc(static_cast<unsigned>(n));
    i(1) = __ffs(n);
    i(2) = __clz(n);
    i(3) = min(n, -5);
    i(4) = max(n, -5);
    i(5) = warpSize;
}

TEST(KernelsBasic, Arithmetic) {
    DeviceData<float> f(kFloats);
    DeviceData<int> i(6);
    const double x = 0.7;
    const int n = 0x00f0f010;
    simt::launch(arithmetic, {}, packed_view<float, 1>("f", f.data(), {kFloats}), packed_view<int, 1>("i", i.data(), {6}), 0.7f, n);
    const double expected[kFloats] = {
        std::exp(x), std::log(x), std::log2(x), 1 / std::sqrt(x), 1 / x,          1 / x,        0.25,           x, x * x + 1.0,
        0.0,         x,           std::sin(x),  std::cos(x),      std::pow(x, 3), std::exp2(x), std::pow(10, x)};
    const std::vector<float> seen = f.get();
    for (std::size_t k = 0; k < kFloats; ++k) EXPECT_NEAR(seen[k], expected[k], 1e-5 * std::fabs(expected[k])) << k;
    EXPECT_EQ(i.get(), (std::vector<int>{9, 5, 8, -5, n, 32}));
}

template <class T>
__global__ void round_trip(TensorView<const float, 1> a, TensorView<T, 1> t, TensorView<float, 1> b) {
    const int i = static_cast<int>(threadIdx.x);
    t(i) = simt::from_float<T>(a(i));
    b(i) = simt::to_float(t(i)) + 0.0f;
}

template <class T>
std::vector<float> rounded(const std::vector<float>& values) {
    const int n = static_cast<int>(values.size());
    const DeviceData<float> a(values);
    DeviceData<T> t(values.size());
    DeviceData<float> b(values.size());
    simt::launch(round_trip<T>, {.block = {static_cast<unsigned>(n)}}, packed_view<const float, 1>("a", a.data(), {n}),
                 packed_view<T, 1>("t", t.data(), {n}), packed_view<float, 1>("b", b.data(), {n}));
    const std::vector<T> stored = t.get();
    std::vector<float> out = b.get();
    for (std::size_t i = 0; i < out.size(); ++i) EXPECT_EQ(simt::to_float(stored[i]), out[i]);
    return out;
}

TEST(KernelsBasic, ConversionsRoundToNearestEven) {
    // 1 + half a unit in the last place goes down to the even 1, 1 + 3 halves up to the even 1 + 2 units.
    const float bf = 1.0f / 256, h = 1.0f / 2048;
    const std::vector<float> values{1 + bf, 1 + 3 * bf, 1 + h, 1 + 3 * h, -INFINITY, 65504.0f, 70000.0f, -0.375f};
    EXPECT_EQ(rounded<float>(values), values);
    EXPECT_EQ(rounded<__nv_bfloat16>(values), (std::vector<float>{1, 1 + 4 * bf, 1, 1, -INFINITY, 65536.0f, 70144.0f, -0.375f}));
    EXPECT_EQ(rounded<__half>(values), (std::vector<float>{1 + bf, 1 + 3 * bf, 1, 1 + 4 * h, -INFINITY, 65504.0f, INFINITY, -0.375f}));
}

// ---------------------------------------------------------------- views

// b(j, i, l, k) = a(i, j, k, l), once by elements and once through slices, by all threads of the grid.
__global__ void permute(TensorView<const float, 4> a, TensorView<float, 4> b, TensorView<float, 4> c) {
    const int i = static_cast<int>(blockIdx.x), j = static_cast<int>(blockIdx.y);
    const auto row = a(i, j);
    for (int e = static_cast<int>(threadIdx.x); e < a.extent(2) * a.extent(3); e += static_cast<int>(blockDim.x)) {
        const int k = e / a.extent(3), l = e % a.extent(3);
        b(j, i, l, k) = a(i, j, k, l);
        c(j)(i)(l, k) = 2.0f;
        c(j, i, l)(k) *= row(k)(l);
        c(j, i)(l, k) += 1.0f;
    }
}

TEST(KernelsBasic, ViewsWithOddStridesAndSlices) {
    const DeviceData<float> a(ramp(2000));
    DeviceData<float> b(3 * 2 * 5 * 4), c(3 * 2 * 5 * 4);
    // a(i, j, k, l) lies at 7 + 901 i + 41 j + 211 k + l: the strides are in no order.
    simt::launch(permute, {.grid = {2, 3}, .block = {32}}, TensorView<const float, 4>("a", a.data() + 7, {2, 3, 4, 5}, {901, 41, 211}),
                 packed_view<float, 4>("b", b.data(), {3, 2, 5, 4}), packed_view<float, 4>("c", c.data(), {3, 2, 5, 4}));
    const std::vector<float> by_element = b.get(), by_slice = c.get();
    std::size_t at = 0;
    for (int j = 0; j < 3; ++j)
        for (int i = 0; i < 2; ++i)
            for (int l = 0; l < 5; ++l)
                for (int k = 0; k < 4; ++k, ++at) {
                    const auto expected = static_cast<float>(7 + 901 * i + 41 * j + 211 * k + l);
                    ASSERT_EQ(by_element[at], expected);
                    ASSERT_EQ(by_slice[at], 2 * expected + 1);
                }
}

__global__ void extents(TensorView<const float, 5> a, TensorView<int, 1> out) {
    for (int k = 0; k < 5; ++k) out(k) = a.extent(k);
    const auto rest = a(0, 0);
    for (int k = 0; k < 3; ++k) out(5 + k) = rest.extent(k);
}

TEST(KernelsBasic, Extents) {
    const DeviceData<float> a(ramp(720));
    DeviceData<int> out(8);
    simt::launch(extents, {}, packed_view<const float, 5>("a", a.data(), {2, 3, 4, 5, 6}), packed_view<int, 1>("out", out.data(), {8}));
    EXPECT_EQ(out.get(), (std::vector<int>{2, 3, 4, 5, 6, 4, 5, 6}));
}

// ---------------------------------------------------------------- launches

__global__ void nothing() {}

TEST(KernelsBasic, BadLaunchesAreRefused) {
    EXPECT_THROW(simt::launch(nothing, {.grid = {0}}), simt::Error);
    EXPECT_THROW(simt::launch(nothing, {.block = {1025}}), simt::Error);
    EXPECT_THROW(simt::launch(nothing, {.smem = 300 * 1024}), simt::Error);
    EXPECT_THROW(simt::launch(nothing, {.grid = {3}, .cluster = {2}}), simt::Error);
    EXPECT_NO_THROW(simt::launch(nothing, {}));
}

}  // namespace
