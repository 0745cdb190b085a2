// Hopper's PTX wrappers one by one: on a GPU they are what the PTX manual says, in emulation what the workbook makes of it. Both must
// pass. In the gpu build this file is for architecture 90a alone, and on another GPU its tests are skipped.
#include "ptx/barrier.hpp"
#include "ptx/cluster.hpp"
#include "ptx/cp_async_bulk.hpp"
#include "ptx/elect.hpp"
#include "ptx/fence.hpp"
#include "ptx/ldmatrix.hpp"
#include "ptx/mbarrier.hpp"
#include "ptx/movmatrix.hpp"
#include "ptx/setmaxnreg.hpp"
#include "ptx/stmatrix.hpp"
#include "ptx/wgmma.hpp"
#include "simt/ledger.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"
#include "stage/stage.hpp"
#include "device_data.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

namespace {

using ptx::Major;
using ptx::Mbarrier;
using ptx::Swizzle;
using ptx::TensorMap;
using simt::packed_view;
using simt::TensorView;
using workbook::DeviceData;

class Hopper : public testing::Test {
protected:
    void SetUp() override {
        const workbook::Device device = workbook::Device::current();
        if (device.compute_capability / 10 != 9) GTEST_SKIP() << device.name << " is no Hopper GPU";
    }
};
using HopperBarriers = Hopper;
using HopperTma = Hopper;
using HopperWgmma = Hopper;
using HopperWarps = Hopper;
using HopperClusters = Hopper;

/// One for each schedule of the emulator, with a ledger where one is given; a single one on a GPU.
std::vector<simt::Execution> executions(simt::Ledger* ledger = nullptr) {
    std::vector<simt::Execution> all;
    for (const simt::Schedule schedule : {simt::Schedule::round_robin, simt::Schedule::lowest_first, simt::Schedule::highest_first}) {
        simt::Execution& exec = all.emplace_back();
        exec.schedule = schedule;
        exec.ledger = ledger;
        if (!SIMT_EMULATED) break;
    }
    return all;
}

template <class T>
T typed(float x) {
    if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
        return T(x);
    else
        return simt::from_float<T>(x);
}
template <class T>
float plain(T x) {
    if constexpr (std::is_same_v<T, __nv_fp8_e4m3>)
        return static_cast<float>(x);
    else
        return simt::to_float(x);
}

// ---------------------------------------------------------------- mbarrier, elect, named barriers

struct Channel {
    alignas(16) std::uint32_t slot[2][32];
    Mbarrier full[2], empty[2];
};

/// Warp 0 writes `rounds` rows into a ring of two slots, warp 1 adds them up.
template <bool kElects>
__global__ void pass_rows(int rounds, TensorView<std::uint32_t, 1> out) {
    auto& smem = simt::shared<Channel>();
    const int lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; ++s) {
            ptx::mbarrier_init(smem.full[s], 32, "full", s);
            ptx::mbarrier_init(smem.empty[s], 1, "empty", s);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
    std::uint32_t sum = 0;
    for (int n = 0; n < rounds; ++n) {
        const int s = n % 2;
        const unsigned parity = n / 2 % 2;
        if (threadIdx.x < 32) {
            ptx::mbarrier_wait(smem.empty[s], parity ^ 1);
            simt::store_shared_4(&smem.slot[s][lane], static_cast<std::uint32_t>(n * 100 + lane));
            ptx::mbarrier_arrive(smem.full[s]);
        } else {
            ptx::mbarrier_wait(smem.full[s], parity);
            sum = 3 * sum + simt::load_shared_4(&smem.slot[s][31 - lane]);
            __syncwarp();  // all lanes have read
            if (!kElects)
                ptx::mbarrier_arrive_if(lane == 5, smem.empty[s]);
            else if (ptx::elect_one())
                ptx::mbarrier_arrive(smem.empty[s]);
        }
    }
    if (threadIdx.x >= 32) out(lane) = sum;
}

TEST_F(HopperBarriers, MbarriersMakeARing) {
    for (const simt::Execution& exec : executions())
        for (const int rounds : {1, 2, 3, 4, 5, 16, 17}) {
            const DeviceData<std::uint32_t> out(32);
            simt::launch(rounds % 2 ? pass_rows<true> : pass_rows<false>,
                         {.name = "pass_rows", .block = {64}, .smem = sizeof(Channel), .exec = &exec}, rounds,
                         packed_view<std::uint32_t, 1>("out", out.data(), {32}));
            const std::vector<std::uint32_t> seen = out.get();
            for (std::uint32_t lane = 0; lane < 32; ++lane) {
                std::uint32_t want = 0;
                for (int n = 0; n < rounds; ++n) want = 3 * want + static_cast<std::uint32_t>(n) * 100 + 31 - lane;
                EXPECT_EQ(seen[lane], want) << "lane " << lane << ", " << rounds << " rounds";
            }
        }
}

__global__ void elect(TensorView<std::uint32_t, 2> out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    std::uint32_t times = 0;
    for (int n = 0; n < 5; ++n)
        if (ptx::elect_one()) ++times;
    out(warp, lane) = times;
}

TEST_F(HopperWarps, ElectsOneLaneAndAlwaysTheSame) {
    const DeviceData<std::uint32_t> out(3 * 32);
    simt::launch(elect, {.name = "elect", .block = {96}}, packed_view<std::uint32_t, 2>("out", out.data(), {3, 32}));
    const std::vector<std::uint32_t> seen = out.get();
    for (std::size_t warp = 0; warp < 3; ++warp) {
        int elected = 0;
        for (std::size_t lane = 0; lane < 32; ++lane) {
            EXPECT_TRUE(seen[32 * warp + lane] == 0 || seen[32 * warp + lane] == 5);
            elected += seen[32 * warp + lane] == 5;
        }
        EXPECT_EQ(elected, 1);
    }
}

struct Turns {
    alignas(16) std::uint32_t value[128];
};

/// Two warpgroups take turns at one array: x -> 2 x + 1, x -> 3 x, by barriers 1 and 2 that one waits at and the other arrives at.
__global__ void take_turns(int rounds, TensorView<std::uint32_t, 1> out) {
    auto& smem = simt::shared<Turns>();
    const int group = threadIdx.x / 128, t = threadIdx.x % 128;
    if (group == 0) {
        simt::store_shared_4(&smem.value[t], static_cast<std::uint32_t>(t));
        ptx::bar_sync(3, 128);  // within the warpgroup: below, threads read what others wrote
    }
    if (group == 1) ptx::bar_arrive(1, 256);
    for (int n = 0; n < rounds; ++n) {
        ptx::bar_sync(1 + group, 256);  // my turn
        const int place = (t + n) % 128;
        const std::uint32_t x = simt::load_shared_4(&smem.value[place]);
        simt::store_shared_4(&smem.value[place], group == 0 ? 2 * x + 1 : 3 * x);
        if (group == 0 || n + 1 < rounds) ptx::bar_arrive(2 - group, 256);
    }
    __syncthreads();
    if (group == 0) out(t) = simt::load_shared_4(&smem.value[t]);
}

TEST_F(HopperBarriers, NamedBarriersAlternate) {
    for (const simt::Execution& exec : executions()) {
        const DeviceData<std::uint32_t> out(128);
        simt::launch(take_turns, {.name = "take_turns", .block = {256}, .smem = sizeof(Turns), .exec = &exec}, 7,
                     packed_view<std::uint32_t, 1>("out", out.data(), {128}));
        const std::vector<std::uint32_t> seen = out.get();
        for (std::uint32_t t = 0; t < 128; ++t) {
            std::uint32_t want = t;
            for (int n = 0; n < 7; ++n) want = 3 * (2 * want + 1);
            EXPECT_EQ(seen[t], want) << t;
        }
    }
}

/// Warpgroup kGiver gives registers to two others. 65536 / 384 allows 168 a thread: 24 + 2 * 240 = 3 * 168.
template <int kGiver>
__global__ __launch_bounds__(384, 1) void share_registers(TensorView<std::uint32_t, 1> out) {
    if (threadIdx.x / 128 == kGiver) {
        ptx::setmaxnreg_dec<24>();
        out(threadIdx.x) = 1;
    } else {
        ptx::setmaxnreg_inc<240>();
        out(threadIdx.x) = 2;
    }
}

template <int kGiver>
void expect_shared_registers() {
    for (const simt::Execution& exec : executions()) {
        const DeviceData<std::uint32_t> out(384);
        simt::launch(share_registers<kGiver>, {.name = "share_registers", .block = {384}, .exec = &exec},
                     packed_view<std::uint32_t, 1>("out", out.data(), {384}));
        const std::vector<std::uint32_t> seen = out.get();
        for (std::size_t t = 0; t < 384; ++t) EXPECT_EQ(seen[t], t / 128 == kGiver ? 1u : 2u);
    }
}

// The others wait where they ask before it has given.
TEST_F(HopperWarps, RegistersMoveBetweenWarpgroups) {
    expect_shared_registers<0>();
    expect_shared_registers<2>();
}

// ---------------------------------------------------------------- movmatrix

__global__ void turn_matrix(TensorView<std::uint32_t, 1> out) {
    const int i = threadIdx.x / 4, j = threadIdx.x % 4 * 2;  // elements (i, j) and (i, j + 1) are 8 i + j and the next
    out(threadIdx.x) = ptx::movmatrix(static_cast<std::uint32_t>(8 * i + j) | static_cast<std::uint32_t>(8 * i + j + 1) << 16);
}

TEST_F(HopperWarps, MovmatrixTransposes) {
    DeviceData<std::uint32_t> out(32);
    simt::launch(turn_matrix, {.block = {32}}, packed_view<std::uint32_t, 1>("out", out.data(), {32}));
    const std::vector<std::uint32_t> got = out.get();
    for (std::uint32_t i = 0; i < 8; ++i)
        for (std::uint32_t j = 0; j < 8; j += 2)
            EXPECT_EQ(got[4 * i + j / 2], (8 * j + i) | (8 * (j + 1) + i) << 16) << "row " << i << ", column " << j;
}

// ---------------------------------------------------------------- stmatrix

struct Rows {
    alignas(16) std::uint16_t row[32][8];
};

template <int kMatrices, bool kTransposed>
__global__ void store_matrices(TensorView<std::uint32_t, 2> out) {
    auto& smem = simt::shared<Rows>();
    const int lane = threadIdx.x;
    std::uint32_t r[kMatrices];
    for (int q = 0; q < kMatrices; ++q) r[q] = static_cast<std::uint32_t>((100 * q + 2 * lane + 1) << 16 | (100 * q + 2 * lane));
    for (int c = 0; c < 4; ++c) simt::store_shared_4(&smem.row[lane][2 * c], 0);
    __syncwarp();
    ptx::stmatrix<kTransposed>(r, smem.row[(5 * lane + 3) % 32]);
    __syncwarp();
    for (int c = 0; c < 4; ++c) out(lane, c) = simt::load_shared_4(&smem.row[lane][2 * c]);
}

template <int kMatrices, bool kTransposed>
void check_stmatrix() {
    const DeviceData<std::uint32_t> out(128);
    simt::launch(store_matrices<kMatrices, kTransposed>, {.name = "store_matrices", .block = {32}, .smem = sizeof(Rows)},
                 packed_view<std::uint32_t, 2>("out", out.data(), {32, 4}));
    const std::vector<std::uint32_t> seen = out.get();
    std::vector<std::uint32_t> want(32 * 8, 0);
    for (std::size_t q = 0; q < kMatrices; ++q)
        for (std::size_t i = 0; i < 8; ++i)
            for (std::size_t j = 0; j < 8; ++j)
                want[(5 * (8 * q + i) + 3) % 32 * 8 + j] = static_cast<std::uint32_t>(100 * q + (kTransposed ? 8 * j + i : 8 * i + j));
    for (std::size_t e = 0; e < 256; e += 2)
        EXPECT_EQ(seen[e / 2], want[e] | want[e + 1] << 16) << "row " << e / 8 << ", columns " << e % 8 << " and the next";
}

TEST_F(HopperWarps, StmatrixX1) { check_stmatrix<1, false>(); }
TEST_F(HopperWarps, StmatrixX1Transposed) { check_stmatrix<1, true>(); }
TEST_F(HopperWarps, StmatrixX2) { check_stmatrix<2, false>(); }
TEST_F(HopperWarps, StmatrixX2Transposed) { check_stmatrix<2, true>(); }
TEST_F(HopperWarps, StmatrixX4) { check_stmatrix<4, false>(); }
TEST_F(HopperWarps, StmatrixX4Transposed) { check_stmatrix<4, true>(); }

// ---------------------------------------------------------------- TMA

/// A tensor of 16-bit words whose rows have gaps, boxes of it, and where each word of a box is to be found.
template <std::size_t R>
struct Boxes {
    std::array<long long, R> extent;
    std::array<int, R> box;
    Swizzle swizzle;

    std::array<long long, R - 1> stride() const {
        std::array<long long, R - 1> s{};
        long long size = (extent[0] + 7) / 8 * 8 + 8;  // multiples of 16 bytes, with a gap
        for (std::size_t k = 0; k + 1 < R; ++k) {
            s[k] = size;
            size = size * extent[k + 1] + 16;
        }
        return s;
    }
    long long elements() const { return stride()[R - 2] * extent[R - 1]; }
    int box_elements() const {
        int n = 1;
        for (const int b : box) n *= b;
        return n;
    }
    TensorMap map(std::uint16_t* data) const {
        return ptx::make_tensor_map("T", reinterpret_cast<__half*>(data), extent, stride(), box, swizzle);
    }
    /// Calls f(place in the box in memory, place in the tensor or -1) for each element of the box at `at`.
    template <class F>
    void for_each(const int (&at)[R], F f) const {
        for (int e = 0; e < box_elements(); ++e) {
            int rest = e;
            long long place = 0;
            bool inside = true;
            for (std::size_t k = 0; k < R; ++k) {
                const long long index = at[k] + rest % box[k];
                rest /= box[k];
                inside = inside && index >= 0 && index < extent[k];
                place += index * (k ? stride()[k - 1] : 1);
            }
            // Swizzle by hand: 128 bytes: the chunk's number in its line XOR the line's number mod 8, and so on.
            const int byte = 2 * e, line = byte / 128, chunk = byte / 16 % 8;
            const int mask = swizzle == Swizzle::none ? 0 : swizzle == Swizzle::bytes_32 ? 1 : swizzle == Swizzle::bytes_64 ? 3 : 7;
            f((line * 128 + (chunk ^ (line & mask)) * 16 + byte % 16) / 2, inside ? place : -1);
        }
    }
};

struct Landing {
    alignas(1024) std::uint32_t words[8192];
    Mbarrier full;
};

template <int R>
struct Coordinates {
    int at[R];
};

template <int R>
__global__ void load_box(const __grid_constant__ TensorMap map, Coordinates<R> where, unsigned bytes, ptx::CachePolicy policy,
                         TensorView<std::uint32_t, 1> out) {
    auto& smem = simt::shared<Landing>();
    if (threadIdx.x == 0) {
        ptx::prefetch_tensormap(map);
        ptx::mbarrier_init(smem.full, 1, "full");
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(smem.full, bytes);
        ptx::cp_async_bulk_tensor_load(smem.words, map, where.at, smem.full, policy);
    }
    __syncthreads();
    ptx::mbarrier_wait(smem.full, 0);
    for (int w = threadIdx.x; w < out.extent(0); w += blockDim.x) out(w) = simt::load_shared_4(&smem.words[w]);
}

template <int R>
__global__ void store_box(const __grid_constant__ TensorMap map, Coordinates<R> where, int words) {
    auto& smem = simt::shared<Landing>();
    for (int w = threadIdx.x; w < words; w += blockDim.x)
        simt::store_shared_4(&smem.words[w], static_cast<std::uint32_t>((2 * w + 2) << 16 | (2 * w + 1)));
    ptx::fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        ptx::cp_async_bulk_tensor_store(map, where.at, smem.words);
        ptx::cp_async_bulk_commit();
        ptx::cp_async_bulk_wait<0>();
    }
}

template <std::size_t R>
void check_boxes(const Boxes<R>& boxes, const std::vector<std::array<int, R>>& places) {
    const auto n = static_cast<std::size_t>(boxes.elements());
    std::vector<std::uint16_t> values(n);
    for (std::size_t e = 0; e < n; ++e) values[e] = static_cast<std::uint16_t>(e * 7 + 1);
    const int words = boxes.box_elements() / 2;
    int number = 0;
    for (const std::array<int, R>& place : places) {
        Coordinates<R> where;
        for (std::size_t k = 0; k < R; ++k) where.at[k] = place[k];
        SCOPED_TRACE("rank " + std::to_string(R) + ", place " + std::to_string(number) + ", swizzle " +
                     std::to_string(ptx::span_of(boxes.swizzle)));
        constexpr ptx::CachePolicy kPolicies[] = {ptx::CachePolicy::evict_normal, ptx::CachePolicy::evict_first,
                                                  ptx::CachePolicy::evict_last};
        const DeviceData<std::uint16_t> tensor(values);
        const DeviceData<std::uint32_t> out(static_cast<std::size_t>(words));
        simt::launch(load_box<R>, {.name = "load_box", .block = {64}, .smem = sizeof(Landing)}, boxes.map(tensor.data()), where,
                     static_cast<unsigned>(words * 4), kPolicies[number++ % 3], packed_view<std::uint32_t, 1>("out", out.data(), {words}));
        const std::vector<std::uint32_t> seen = out.get();
        boxes.for_each(where.at, [&](int in_box, long long in_tensor) {
            const std::uint32_t got = seen[static_cast<std::size_t>(in_box / 2)] >> (16 * (in_box % 2)) & 0xffff;
            ASSERT_EQ(got, in_tensor < 0 ? 0u : values[static_cast<std::size_t>(in_tensor)]) << "loaded, at " << in_box << " of the box";
        });

        if (std::any_of(place.begin(), place.end(), [](int x) { return x < 0; })) continue;  // for loads only
        const DeviceData<std::uint16_t> target(std::vector<std::uint16_t>(n, 0));
        simt::launch(store_box<R>, {.name = "store_box", .block = {64}, .smem = sizeof(Landing)}, boxes.map(target.data()), where, words);
        std::vector<std::uint16_t> want(n, 0);
        boxes.for_each(where.at, [&](int in_box, long long in_tensor) {
            if (in_tensor >= 0) want[static_cast<std::size_t>(in_tensor)] = static_cast<std::uint16_t>(in_box + 1);
        });
        EXPECT_EQ(target.get(), want) << "stored";
    }
}

/// Each of four warps adds its row of X, and 1 to each element, to its row of Y, a few times over; blocks add to the same Y.
__global__ void add_up(int rounds, TensorView<const float, 2> X, TensorView<float, 2> Y) {  // (4, n) both
    auto& smem = simt::shared<Landing>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = X.extent(1);
    auto* const row = reinterpret_cast<float*>(smem.words) + warp * n;
    for (int e = 4 * lane; e < n; e += 128) {
        const float4 x = simt::load_global_16<float4>(&X(warp, e));
        simt::store_shared_16(row + e, float4{x.x + 1, x.y + 1, x.z + 1, x.w + 1});
    }
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        for (int round = 0; round < rounds; ++round) {
            ptx::cp_reduce_async_bulk_add(&Y(warp, 0), row, n);
            ptx::cp_async_bulk_commit();
        }
        ptx::cp_async_bulk_wait<0>();
    }
}

TEST_F(HopperTma, BulkReductions) {
    simt::Ledger ledger;
    long long bytes = 0;
    for (const simt::Execution& exec : executions(&ledger))
        for (const int n : {4, 64, 1000}) {
            constexpr int blocks = 3, rounds = 2;
            std::vector<float> values(static_cast<std::size_t>(4 * n));
            for (std::size_t e = 0; e < values.size(); ++e) values[e] = static_cast<float>(e % 97);
            const DeviceData<float> x(values), y(std::vector<float>(values.size(), 5.0f));
            simt::launch(add_up, {.name = "add_up", .grid = {blocks}, .block = {128}, .smem = sizeof(Landing), .exec = &exec}, rounds,
                         packed_view<const float, 2>("X", x.data(), {4, n}), packed_view<float, 2>("Y", y.data(), {4, n}));
            const std::vector<float> sums = y.get();
            for (std::size_t e = 0; e < values.size(); ++e)
                ASSERT_EQ(sums[e], 5.0f + blocks * rounds * (values[e] + 1)) << "element " << e << " of " << n;
            bytes += 4ll * n * 4 * blocks;
        }
    if (!SIMT_EMULATED) return;
    EXPECT_EQ(static_cast<long long>(ledger.row("Y").read.requested), 2 * bytes);
    EXPECT_EQ(static_cast<long long>(ledger.row("Y").written.requested), 2 * bytes);
}

TEST_F(HopperTma, TwoDimensions) {
    for (const Swizzle swizzle : {Swizzle::none, Swizzle::bytes_32, Swizzle::bytes_64, Swizzle::bytes_128}) {
        const int row = swizzle == Swizzle::none ? 24 : ptx::span_of(swizzle) / 2;
        check_boxes<2>({{104, 41}, {row, 32}, swizzle}, {{0, 0}, {8, 5}, {96, 30}, {-8, -3}, {0, 40}, {0, 41}, {200, 0}, {-row, 0}});
    }
}

TEST_F(HopperTma, ThreeDimensions) {
    check_boxes<3>({{64, 20, 3}, {64, 8, 2}, Swizzle::bytes_128}, {{0, 0, 0}, {0, 16, 2}, {0, -3, 1}, {8, 7, -1}});
}

TEST_F(HopperTma, FourDimensions) {
    check_boxes<4>({{40, 9, 3, 4}, {32, 4, 2, 3}, Swizzle::bytes_64}, {{0, 0, 0, 0}, {16, 7, 2, 2}, {-8, -1, -1, -1}});
}

TEST_F(HopperTma, FiveDimensions) {
    check_boxes<5>({{64, 17, 2, 3, 2}, {64, 16, 2, 1, 1}, Swizzle::bytes_128},
                   {{0, 0, 0, 0, 0}, {0, 9, 0, 2, 1}, {0, 16, 1, 1, 1}, {0, 0, 0, 3, 0}});
}

TEST_F(HopperTma, MapsAreRefusedInWords) {
    const DeviceData<std::uint16_t> tensor(1 << 14);
    __half* const data = reinterpret_cast<__half*>(tensor.data());
    const auto refusal = [](auto make) -> std::string {
        try {
            make();
        } catch (const simt::Error& error) {
            return error.what();
        }
        return "";
    };
    const auto expect_refused = [&](__half* at, std::array<long long, 2> extent, long long stride, std::array<int, 2> box, Swizzle swizzle,
                                    const std::string& words) {
        const std::string why = refusal([&] { ptx::make_tensor_map<__half, 2>("T", at, extent, {stride}, box, swizzle); });
        if (words.empty())
            EXPECT_EQ(why, "");
        else
            EXPECT_NE(why.find("tensor map of T: " + words), std::string::npos) << why;
    };
    expect_refused(data, {64, 10}, 64, {64, 8}, Swizzle::bytes_128, "");
    expect_refused(data + 1, {64, 10}, 64, {64, 8}, Swizzle::bytes_128, "its address is null or not a multiple of 16 bytes");
    expect_refused(data, {64, 0}, 64, {64, 8}, Swizzle::bytes_128, "extent[1] = 0: 1 to 2^32 is accepted");
    expect_refused(data, {64, 10}, 68, {64, 8}, Swizzle::bytes_128, "stride[1] = 136 bytes: multiples of 16");
    expect_refused(data, {64, 10}, 64, {64, 257}, Swizzle::bytes_128, "box[1] = 257: 1 to 256");
    expect_refused(data, {64, 10}, 64, {12, 8}, Swizzle::none, "rows of the box are 24 bytes: multiples of 16");
    expect_refused(data, {64, 10}, 64, {32, 8}, Swizzle::bytes_128, "rows of the box are 64 bytes: a swizzle over 128 bytes");
}

// ---------------------------------------------------------------- clusters

struct Shared {
    alignas(128) std::uint32_t words[2][64];
    Mbarrier full, go;
};

/// Each block writes its number into its own memory; all read that of the next block. Then each tells its neighbour by a barrier.
__global__ void visit_neighbour(TensorView<std::uint32_t, 2> out) {
    auto& smem = simt::shared<Shared>();
    const unsigned rank = ptx::cluster_rank(), size = ptx::cluster_size(), next = (rank + 1) % size;
    const int t = threadIdx.x;
    simt::store_shared_4(&smem.words[0][t], 1000 * rank + static_cast<std::uint32_t>(t));
    if (t == 0) {
        ptx::mbarrier_init(smem.go, 1, "go");
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    out(blockIdx.x, t) = simt::load_shared_4(ptx::mapa(&smem.words[0][63 - t], next));
    __syncthreads();
    if (t == 0) ptx::mbarrier_arrive_remote(smem.go, next);
    ptx::mbarrier_wait(smem.go, 0);
    ptx::cluster_sync();  // no block ends while others may reach for it
}

TEST_F(HopperClusters, ReachEachOther) {
    for (const simt::Execution& exec : executions())
        for (const int size : {1, 2, 4, 8}) {
            const DeviceData<std::uint32_t> out(16 * 64);
            simt::launch(visit_neighbour,
                         {.name = "visit_neighbour",
                          .grid = {16},
                          .block = {64},
                          .smem = sizeof(Shared),
                          .cluster = {static_cast<unsigned>(size)},
                          .exec = &exec},
                         packed_view<std::uint32_t, 2>("out", out.data(), {16, 64}));
            const std::vector<std::uint32_t> seen = out.get();
            for (int block = 0; block < 16; ++block)
                for (int t = 0; t < 64; ++t)
                    ASSERT_EQ(seen[static_cast<std::size_t>(64 * block + t)],
                              static_cast<std::uint32_t>(1000 * ((block % size + 1) % size) + 63 - t))
                        << "block " << block << " of clusters of " << size;
        }
}

/// Block r of a cluster of two loads row r of a pair for both. Rounds with the same memory need both to have read it.
__global__ void multicast_rows(const __grid_constant__ TensorMap map, int rounds, TensorView<std::uint32_t, 3> out) {
    auto& smem = simt::shared<Shared>();
    const unsigned rank = ptx::cluster_rank();
    if (threadIdx.x == 0) {
        ptx::mbarrier_init(smem.full, 1, "full");
        ptx::mbarrier_init(smem.go, 2, "go");
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    for (int n = 0; n < rounds; ++n) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_wait(smem.go, (n & 1) ^ 1);
            ptx::mbarrier_arrive_expect_tx(smem.full, sizeof smem.words);
            const int row = 2 * (n * static_cast<int>(gridDim.x / 2) + static_cast<int>(blockIdx.x / 2)) + static_cast<int>(rank);
            ptx::cp_async_bulk_tensor_multicast(smem.words[rank], map, {0, row}, smem.full, 3);
        }
        ptx::mbarrier_wait(smem.full, n & 1);
        for (int row = 0; row < 2; ++row) out(n, blockIdx.x, 64 * row + threadIdx.x) = simt::load_shared_4(&smem.words[row][threadIdx.x]);
        __syncthreads();  // all have read
        if (threadIdx.x < 2) ptx::mbarrier_arrive_remote(smem.go, threadIdx.x);
        __syncwarp();
    }
    ptx::cluster_sync();
}

TEST_F(HopperClusters, MulticastLandsInBothBlocks) {
    constexpr int kRounds = 3, kBlocks = 6;
    std::vector<float> values(static_cast<std::size_t>(kRounds) * kBlocks * 64);
    for (std::size_t e = 0; e < values.size(); ++e) values[e] = static_cast<float>(e);
    const DeviceData<float> in(values);
    const TensorMap map = ptx::make_tensor_map<const float, 2>("in", in.data(), {64, kRounds * kBlocks}, {64}, {64, 1}, Swizzle::none);
    simt::Ledger ledger;
    for (const simt::Execution& exec : executions(&ledger)) {
        ledger.clear();
        const DeviceData<std::uint32_t> out(static_cast<std::size_t>(kRounds) * kBlocks * 128);
        simt::launch(multicast_rows,
                     {.name = "multicast_rows", .grid = {kBlocks}, .block = {64}, .smem = sizeof(Shared), .cluster = {2}, .exec = &exec},
                     map, kRounds, packed_view<std::uint32_t, 3>("out", out.data(), {kRounds, kBlocks, 128}));
        const std::vector<std::uint32_t> seen = out.get();
        for (int n = 0; n < kRounds; ++n)
            for (int block = 0; block < kBlocks; ++block)
                for (int e = 0; e < 128; ++e) {
                    const int row = 2 * (n * (kBlocks / 2) + block / 2) + e / 64;
                    float got;
                    memcpy(&got, &seen[static_cast<std::size_t>((n * kBlocks + block) * 128 + e)], 4);
                    ASSERT_EQ(got, values[static_cast<std::size_t>(64 * row + e % 64)]) << "round " << n << ", block " << block;
                }
        if (SIMT_EMULATED) {
            EXPECT_EQ(ledger.row("in").read.requested, values.size() * sizeof(float)) << "what is multicast is read once";
        }
    }
}

/// Blocks of a cluster send each other a row a round. A row may be written again, and sent, when the other block has read the one before.
__global__ void send_rows(int rounds, TensorView<std::uint32_t, 3> out) {
    auto& smem = simt::shared<Shared>();
    const unsigned size = ptx::cluster_size(), rank = ptx::cluster_rank(), next = (rank + 1) % size, previous = (rank + size - 1) % size;
    const int t = threadIdx.x;
    if (t == 0) {
        ptx::mbarrier_init(smem.full, 1, "full");
        ptx::mbarrier_init(smem.go, 1, "go");
        ptx::fence_mbarrier_init();
    }
    ptx::cluster_sync();
    for (int n = 0; n < rounds; ++n) {
        ptx::mbarrier_wait(smem.go, (n & 1) ^ 1);
        simt::store_shared_4(&smem.words[0][t], static_cast<std::uint32_t>(10000 * n + 100 * blockIdx.x + t));
        ptx::fence_proxy_async();
        __syncthreads();
        if (t == 0) {  // the second half first, and both before or after they are announced
            for (const int half : {32, 0}) ptx::cp_async_bulk_to_peer(&smem.words[1][half], &smem.words[0][half], 128, smem.full, next);
            ptx::mbarrier_arrive_expect_tx(smem.full, 256);
        }
        ptx::mbarrier_wait(smem.full, n & 1);
        out(n, blockIdx.x, t) = simt::load_shared_4(&smem.words[1][t]);
        __syncthreads();  // all have read
        if (t == 0) ptx::mbarrier_arrive_remote(smem.go, previous);
    }
    ptx::cluster_sync();
}

TEST_F(HopperClusters, SendEachOtherRows) {
    constexpr int kRounds = 5, kBlocks = 8;
    for (const simt::Execution& exec : executions())
        for (const int size : {2, 4}) {
            const DeviceData<std::uint32_t> out(kRounds * kBlocks * 64);
            simt::launch(send_rows,
                         {.name = "send_rows",
                          .grid = {kBlocks},
                          .block = {64},
                          .smem = sizeof(Shared),
                          .cluster = {static_cast<unsigned>(size)},
                          .exec = &exec},
                         kRounds, packed_view<std::uint32_t, 3>("out", out.data(), {kRounds, kBlocks, 64}));
            const std::vector<std::uint32_t> seen = out.get();
            for (int n = 0; n < kRounds; ++n)
                for (int block = 0; block < kBlocks; ++block)
                    for (int t = 0; t < 64; ++t) {
                        const int from = block / size * size + (block % size + size - 1) % size;
                        ASSERT_EQ(seen[static_cast<std::size_t>((n * kBlocks + block) * 64 + t)],
                                  static_cast<std::uint32_t>(10000 * n + 100 * from + t))
                            << "round " << n << ", block " << block << " of clusters of " << size;
                    }
        }
}

// ---------------------------------------------------------------- wgmma

/// Operands of one product, each in boxes whose rows are lines of the swizzle (16 bytes without).
template <class T, int N, Major kA, Major kB, Swizzle kSwizzle>
struct Product {
    static constexpr int kBytes = static_cast<int>(sizeof(T)), kLine = kSwizzle == Swizzle::none ? 16 : ptx::span_of(kSwizzle);
    static constexpr int kInLine = kLine / kBytes, K = 128 / kBytes, kStep = 32 / kBytes;
    /// Box: lines of consecutive k, one for each m or n; or lines of consecutive m or n, one for each k.
    static SIMT_BOTH constexpr int box_rows(Major major, int mn) { return major == Major::k ? mn : K; }
    static constexpr std::array<int, 2> box(Major major, int mn) { return {kInLine, box_rows(major, mn)}; }
    static SIMT_BOTH constexpr int boxes(Major major, int mn) { return (major == Major::k ? K : mn) / kInLine; }
    static SIMT_BOTH constexpr int box_bytes(Major major, int mn) { return kLine * box_rows(major, mn); }

    struct Shared {
        alignas(1024) unsigned char a[64 * 128];
        alignas(1024) unsigned char b[N * 128];
        Mbarrier full;
    };

    static SIMT_DEVICE ptx::MatrixDescriptor descriptor(const void* start, Major major, int mn, int step) {
        ptx::MatrixDescriptor::Fields f{start, 0, 8 * kLine, kSwizzle};
        const auto whole = static_cast<unsigned>(kLine * (major == Major::k ? mn : K));
        if (major == Major::mn) f.leading = whole;
        if (kSwizzle == Swizzle::none) {
            f.leading = major == Major::k ? whole : 8 * kLine;
            f.stride = major == Major::k ? 8 * kLine : whole;
        }
        const int byte = 32 * step;
        return ptx::MatrixDescriptor::of(f).advance(major == Major::k ? byte / kLine * static_cast<int>(whole) + byte % kLine
                                                                      : kStep * step * kLine);
    }
};

/// D = A B over K in one group of wgmmas, with A from shared memory or (kRegisters) from fragments; then D += A B once more in a
/// second group, of which the first half is waited for apart.
template <class T, int N, Major kA, Major kB, Swizzle kSwizzle, bool kRegisters>
__global__ __launch_bounds__(128) void multiply(const __grid_constant__ TensorMap A_map, const __grid_constant__ TensorMap B_map,
                                                TensorView<const T, 2> A,  // (64, K), for fragments
                                                TensorView<float, 2> D) {  // (64, N)
    using P = Product<T, N, kA, kB, kSwizzle>;
    auto& smem = simt::shared<typename P::Shared>();
    const int t = threadIdx.x, row = t / 32 * 16 + t % 32 / 4, c = t % 4;
    if (t == 0) {
        ptx::mbarrier_init(smem.full, 1, "full");
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(smem.full, sizeof smem.a + sizeof smem.b);
        const auto load = [&](unsigned char* to, const TensorMap& map, Major major, int mn) {
            for (int i = 0; i < P::boxes(major, mn); ++i)
                ptx::cp_async_bulk_tensor_load(to + i * P::box_bytes(major, mn), map, {i * P::kInLine, 0}, smem.full);
        };
        load(smem.a, A_map, kA, 64);
        load(smem.b, B_map, kB, N);
    }
    __syncthreads();
    ptx::mbarrier_wait(smem.full, 0);
    float d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = 1e6f;  // overwritten by the first product
    std::uint32_t a[P::K / P::kStep][4];
    if constexpr (kRegisters) {
        for (int s = 0; s < P::K / P::kStep; ++s)
            for (int r = 0; r < 4; ++r) {
                constexpr int kElements = 4 / P::kBytes;
                T elements[kElements];
                for (int e = 0; e < kElements; ++e)
                    elements[e] = A(row + 8 * (r % 2), P::kStep * s + P::kStep / 2 * (r / 2) + kElements * c + e);
                memcpy(&a[s][r], elements, 4);
            }
    }
#pragma unroll
    for (int pass = 0; pass < 2; ++pass) {
        ptx::keep_in_place(d);
#pragma unroll
        for (int s = 0; s < P::K / P::kStep; ++s)
            if constexpr (kRegisters) ptx::keep_in_place(a[s]);
        ptx::wgmma_fence();
#pragma unroll
        for (int s = 0; s < P::K / P::kStep; ++s) {
            const ptx::MatrixDescriptor b = P::descriptor(smem.b, kB, N, s);
            if constexpr (kRegisters)
                ptx::wgmma<T, N, kB>(d, a[s], b, pass > 0 || s > 0);
            else
                ptx::wgmma<T, N, kA, kB>(d, P::descriptor(smem.a, kA, 64, s), b, pass > 0 || s > 0);
        }
        ptx::wgmma_commit();
        if (pass == 0) ptx::wgmma_wait<1>();  // waits for nothing
        if (pass == 1) ptx::wgmma_wait<0>();
    }
    ptx::keep_in_place(d);
    for (int i = 0; i < N / 2; ++i) D(row + 8 * (i / 2 % 2), 8 * (i / 4) + 2 * c + i % 2) = d[i];
}

template <class T, int N, Major kA, Major kB, Swizzle kSwizzle, bool kRegisters>
void check_product() {
    using P = Product<T, N, kA, kB, kSwizzle>;
    SCOPED_TRACE("N = " + std::to_string(N) + ", A " +
                 (kRegisters       ? "in registers"
                  : kA == Major::k ? "K-major"
                                   : "MN-major") +
                 ", B " + (kB == Major::k ? "K-major" : "MN-major") + ", swizzle " + std::to_string(ptx::span_of(kSwizzle)));
    constexpr std::size_t K = P::K;
    std::mt19937 random(N + static_cast<int>(kSwizzle));
    std::normal_distribution<float> normal;
    const auto fill = [&](std::size_t count) {
        std::vector<T> x(count);
        for (T& value : x) value = typed<T>(normal(random));
        return x;
    };
    const std::vector<T> a = fill(64 * K), b = fill(N * K);  // (64, K), (N, K)
    const auto stored = [&](const std::vector<T>& x, std::size_t mn, Major major) {
        if (major == Major::k) return x;
        std::vector<T> y(x.size());
        for (std::size_t i = 0; i < mn; ++i)
            for (std::size_t k = 0; k < K; ++k) y[k * mn + i] = x[i * K + k];
        return y;
    };
    const DeviceData<T> A(a), a_stored(stored(a, 64, kA)), b_stored(stored(b, N, kB));
    const DeviceData<float> D(64 * N);
    const auto map = [&](const DeviceData<T>& data, int mn, Major major) {
        const long long inner = major == Major::k ? P::K : mn, outer = major == Major::k ? mn : P::K;
        return ptx::make_tensor_map<const T, 2>("operand", data.data(), {inner, outer}, {inner}, P::box(major, mn), kSwizzle);
    };
    simt::launch(multiply<T, N, kA, kB, kSwizzle, kRegisters>, {.name = "multiply", .block = {128}, .smem = sizeof(typename P::Shared)},
                 map(a_stored, 64, kA), map(b_stored, N, kB), packed_view<const T, 2>("A", A.data(), {64, P::K}),
                 packed_view<float, 2>("D", D.data(), {64, N}));
    const std::vector<float> seen = D.get();
    for (std::size_t m = 0; m < 64; ++m)
        for (std::size_t n = 0; n < N; ++n) {
            double want = 0, magnitude = 0;
            for (std::size_t k = 0; k < K; ++k) {
                const double term = 2.0 * static_cast<double>(plain(a[m * K + k])) * static_cast<double>(plain(b[n * K + k]));
                want += term;
                magnitude += std::fabs(term);
            }
            // Tensor cores cut the sum's last bits off; with 8-bit inputs they keep fewer: an H200 was off by up to 2^-11.4.
            ASSERT_NEAR(seen[m * N + n], want, magnitude * (sizeof(T) == 1 ? 0x1p-10 : 0x1p-20)) << "D(" << m << ", " << n << ")";
        }
}

template <class T, int N, Swizzle kSwizzle>
void check_majors() {
    check_product<T, N, Major::k, Major::k, kSwizzle, false>();
    check_product<T, N, Major::k, Major::k, kSwizzle, true>();
    if constexpr (sizeof(T) == 2 && N % (kSwizzle == Swizzle::none ? 8 : ptx::span_of(kSwizzle) / 2) == 0) {
        check_product<T, N, Major::mn, Major::k, kSwizzle, false>();
        check_product<T, N, Major::k, Major::mn, kSwizzle, false>();
        check_product<T, N, Major::mn, Major::mn, kSwizzle, false>();
        check_product<T, N, Major::k, Major::mn, kSwizzle, true>();
    }
}

TEST_F(HopperWgmma, Swizzle128) {
    check_majors<__nv_bfloat16, 64, Swizzle::bytes_128>();
    check_majors<__half, 128, Swizzle::bytes_128>();
}
TEST_F(HopperWgmma, Swizzle64) { check_majors<__nv_bfloat16, 96, Swizzle::bytes_64>(); }
TEST_F(HopperWgmma, Swizzle32) { check_majors<__half, 80, Swizzle::bytes_32>(); }
TEST_F(HopperWgmma, NoSwizzle) { check_majors<__nv_bfloat16, 48, Swizzle::none>(); }
TEST_F(HopperWgmma, AllWidths) {
    check_product<__half, 32, Major::k, Major::k, Swizzle::bytes_128, false>();
    check_product<__nv_bfloat16, 48, Major::k, Major::k, Swizzle::bytes_128, true>();
    check_product<__half, 80, Major::k, Major::k, Swizzle::bytes_128, false>();
    check_product<__nv_bfloat16, 96, Major::k, Major::k, Swizzle::bytes_128, true>();
    check_product<__half, 112, Major::k, Major::k, Swizzle::bytes_128, false>();
    check_product<__nv_bfloat16, 160, Major::k, Major::k, Swizzle::bytes_128, false>();
    check_product<__half, 192, Major::k, Major::mn, Swizzle::bytes_128, false>();
    check_product<__nv_bfloat16, 256, Major::k, Major::mn, Swizzle::bytes_128, true>();
}
TEST_F(HopperWgmma, EightBits) {
    check_majors<__nv_fp8_e4m3, 64, Swizzle::bytes_128>();
    check_majors<__nv_fp8_e4m3, 128, Swizzle::bytes_64>();
    check_majors<__nv_fp8_e4m3, 160, Swizzle::bytes_32>();
    check_majors<__nv_fp8_e4m3, 256, Swizzle::none>();
}

}  // namespace
