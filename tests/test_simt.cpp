// The emulator: scheduling, barriers, collectives, shared memory, and the mistakes that it must report. CPU build only.
#include "simt/ledger.hpp"
#include "simt/simt.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

using simt::Deadlock;
using simt::Error;
using simt::Execution;
using simt::kFullMask;
using simt::Race;
using simt::Schedule;

constexpr Schedule kSchedules[] = {Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first};

/// Calls f and yields the text of the E that it must throw.
template <class E, class F>
std::string message_of(F&& f) {
    try {
        f();
    } catch (const E& error) {
        return error.what();
    } catch (const std::exception& error) {
        ADD_FAILURE() << "an exception of another type: " << error.what();
        return {};
    }
    ADD_FAILURE() << "no exception";
    return {};
}

void expect_says(const std::string& text, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

Execution with(Schedule schedule) {
    Execution exec;
    exec.schedule = schedule;
    return exec;
}

__device__ int linear_thread() { return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)); }

// ---------------------------------------------------------------- grids and blocks

struct Where {
    uint3 thread, block;
    dim3 block_dim, grid_dim;
};

__global__ void record_where(Where* out) {
    const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned n = blockDim.x * blockDim.y * blockDim.z;
    out[b * n + static_cast<unsigned>(linear_thread())] = {threadIdx, blockIdx, blockDim, gridDim};
}

TEST(Grid, ThreeDimensionalIndices) {
    const dim3 grid{3, 2, 4}, block{5, 3, 2};
    std::vector<Where> seen(24 * 30, Where{{99, 99, 99}, {99, 99, 99}, {}, {}});
    simt::launch(record_where, {.grid = grid, .block = block}, seen.data());
    std::size_t at = 0;
    for (unsigned bz = 0; bz < grid.z; ++bz)
        for (unsigned by = 0; by < grid.y; ++by)
            for (unsigned bx = 0; bx < grid.x; ++bx)
                for (unsigned z = 0; z < block.z; ++z)
                    for (unsigned y = 0; y < block.y; ++y)
                        for (unsigned x = 0; x < block.x; ++x) {
                            const Where& w = seen[at++];
                            ASSERT_EQ(std::tie(w.thread.x, w.thread.y, w.thread.z), std::tie(x, y, z));
                            ASSERT_EQ(std::tie(w.block.x, w.block.y, w.block.z), std::tie(bx, by, bz));
                            ASSERT_EQ(std::tie(w.block_dim.x, w.block_dim.y, w.block_dim.z), std::tie(block.x, block.y, block.z));
                            ASSERT_EQ(std::tie(w.grid_dim.x, w.grid_dim.y, w.grid_dim.z), std::tie(grid.x, grid.y, grid.z));
                        }
}

__global__ void count_visits(std::atomic<int>* visits) {
    __syncthreads();
    ++visits[(blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)) * blockDim.x + threadIdx.x];
}

TEST(Grid, ManyBlocksOnAllCoresEachExactlyOnce) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        std::vector<std::atomic<int>> visits(37 * 5 * 3 * 48);
        simt::launch(count_visits, {.grid = {37, 5, 3}, .block = {48}, .exec = &exec}, visits.data());
        for (const auto& v : visits) ASSERT_EQ(v, 1);
    }
}

__global__ void thread_ids(std::mutex* mutex, std::set<std::thread::id>* ids) {
    std::lock_guard lock(*mutex);
    ids->insert(std::this_thread::get_id());
}

TEST(Grid, OneWorkerIsTheCallingThread) {
    Execution exec;
    exec.workers = 1;
    std::mutex mutex;
    std::set<std::thread::id> ids;
    simt::launch(thread_ids, {.grid = {20}, .block = {3}, .exec = &exec}, &mutex, &ids);
    EXPECT_EQ(ids, std::set{std::this_thread::get_id()});
}

// Each block waits, on the host's clock, until as many blocks as there are workers run at the same time.
__global__ void wait_for_company(std::atomic<int>* running, int workers, std::atomic<int>* alone) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    for (++*running; *running < workers;)
        if (std::chrono::steady_clock::now() > deadline) {
            ++*alone;
            return;
        }
}

TEST(Grid, WorkersRunBlocksAtTheSameTime) {
    Execution exec;
    exec.workers = 3;
    std::atomic<int> running{0}, alone{0};
    simt::launch(wait_for_company, {.grid = {3}, .exec = &exec}, &running, 3, &alone);
    EXPECT_EQ(alone, 0);
}

TEST(Grid, ProgressCountsEveryBlock) {
    for (unsigned workers : {1u, 4u}) {
        std::vector<std::pair<std::size_t, std::size_t>> calls;  // unguarded: one thread at a time is promised
        Execution exec;
        exec.workers = workers;
        exec.progress = [&](std::size_t done, std::size_t total) { calls.emplace_back(done, total); };
        std::vector<std::atomic<int>> visits(30 * 4);
        simt::launch(count_visits, {.grid = {30}, .block = {4}, .exec = &exec}, visits.data());
        ASSERT_EQ(calls.size(), 30u);
        for (std::size_t i = 0; i < calls.size(); ++i) EXPECT_EQ(calls[i], std::pair(i + 1, std::size_t{30}));
    }
}

// Unwinding the callback takes long, so that other workers finish blocks and wait for their turn meanwhile.
struct SlowToUnwind {
    ~SlowToUnwind() { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
};

TEST(Grid, ExceptionOfTheProgressCallbackEndsTheLaunch) {
    for (unsigned workers : {1u, 4u})
        for (int repeat = 0; repeat < 5; ++repeat) {
            std::size_t calls = 0;
            Execution exec;
            exec.workers = workers;
            exec.progress = [&](std::size_t done, std::size_t) {
                ++calls;
                const SlowToUnwind slow;
                if (done == 2) throw std::domain_error("cancelled");
            };
            std::vector<std::atomic<int>> visits(1000);
            const std::string text =
                message_of<std::domain_error>([&] { simt::launch(count_visits, {.grid = {1000}, .exec = &exec}, visits.data()); });
            EXPECT_EQ(text, "cancelled");
            EXPECT_EQ(calls, 2u) << "called again after it threw";
            exec.progress = nullptr;
            std::vector<std::atomic<int>> again(10);
            simt::launch(count_visits, {.grid = {10}, .exec = &exec}, again.data());
            for (const auto& v : again) EXPECT_EQ(v, 1);
        }
}

__global__ void argument_of(double* out, double x, int by) { *out = x * by; }

TEST(Grid, ArgumentsConvertToTheParametersTypes) {
    double out = 0;
    simt::launch(argument_of, {}, &out, 3, 2.0f);
    EXPECT_EQ(out, 6.0);
}

// ---------------------------------------------------------------- launches that are refused

__global__ void nothing() {}

std::string refusal(simt::LaunchConfig config) {
    config.name = "my_kernel";
    return message_of<Error>([&] { simt::launch(nothing, config); });
}

TEST(LaunchErrors, Grid) {
    expect_says(refusal({.grid = {0}}), {"my_kernel", "grid = (0, 1, 1)", "1 to 2147483647", "65535"});
    expect_says(refusal({.grid = {1, 65536}}), {"grid = (1, 65536, 1)"});
    expect_says(refusal({.grid = {1, 1, 65536}}), {"grid = (1, 1, 65536)"});
    expect_says(refusal({.grid = {2147483648u}}), {"grid = (2147483648, 1, 1)"});
}

TEST(LaunchErrors, Block) {
    expect_says(refusal({.block = {0}}), {"my_kernel", "block = (0, 1, 1)", "1 to 1024 threads", "64 of them in z"});
    expect_says(refusal({.block = {1025}}), {"block = (1025, 1, 1)"});
    expect_says(refusal({.block = {32, 33}}), {"block = (32, 33, 1)"});
    expect_says(refusal({.block = {1, 1, 65}}), {"block = (1, 1, 65)"});
    EXPECT_NO_THROW(simt::launch(nothing, {.block = {4, 4, 64}}));
}

TEST(LaunchErrors, SharedMemory) {
    expect_says(refusal({.smem = 227 * 1024 + 1}), {"my_kernel", "smem = 232449 bytes", "at most 232448"});
    EXPECT_NO_THROW(simt::launch(nothing, {.smem = 227 * 1024}));
    Execution small;
    small.shared_memory_limit = 99 * 1024;
    expect_says(refusal({.smem = 100 * 1024, .exec = &small}), {"smem = 102400 bytes", "at most 101376"});
}

TEST(ResidentClusters, AreAsManyAsFitTheSms) {
    EXPECT_EQ(simt::resident_clusters(nothing, {.cluster = {4}}, 132), 33);
    EXPECT_EQ(simt::resident_clusters(nothing, {.cluster = {2, 2, 2}}, 15), 1);
    EXPECT_THROW(simt::resident_clusters(nothing, {.name = "my_kernel", .cluster = {4}}, 3), simt::Error);
}

TEST(LaunchErrors, Cluster) {
    expect_says(refusal({.grid = {5}, .cluster = {2}}), {"my_kernel", "cluster = (2, 1, 1)", "does not divide grid = (5, 1, 1)"});
    expect_says(refusal({.cluster = {0}}), {"cluster = (0, 1, 1)"});
    expect_says(refusal({.grid = {9}, .cluster = {9}}), {"my_kernel", "cluster = (9, 1, 1): 1 to 8 blocks are accepted"});
}

TEST(LaunchErrors, ScheduleWords) {
    for (Schedule s : kSchedules) EXPECT_EQ(simt::parse_schedule(simt::name(s)), s);
    expect_says(message_of<std::invalid_argument>([] { simt::parse_schedule("random"); }),
                {"schedule = 'random'", "round-robin", "lowest-first", "highest-first"});
}

TEST(LaunchErrors, DeviceFunctionsOutsideOfAKernel) {
    const char* text = "outside of a kernel";
    expect_says(message_of<Error>([] { __syncthreads(); }), {text});
    expect_says(message_of<Error>([] { __syncwarp(); }), {text});
    expect_says(message_of<Error>([] { (void)__shfl_sync(kFullMask, 1.0f, 0); }), {text});
    expect_says(message_of<Error>([] { (void)__ballot_sync(kFullMask, 1); }), {text});
    expect_says(message_of<Error>([] { (void)simt::shared<float>(); }), {text});
    expect_says(message_of<Error>([] { (void)simt::SharedArena{}.tile<float>("t", 1, 1, 1); }), {text});
    simt::launch(nothing, {});  // and no block stays behind
    expect_says(message_of<Error>([] { __syncthreads(); }), {text});
}

// ---------------------------------------------------------------- collectives

// Lanes of one warp, each with its own result.
template <class T>
struct Lanes {
    std::array<T, 32> at{};
};

struct Shuffled {
    Lanes<int> idx, rotated, bfly, down, up;
};

__global__ void shuffles(Shuffled* out, int width, int by) {
    const int lane = static_cast<int>(threadIdx.x), mine = 100 + lane;
    out->idx.at[threadIdx.x] = __shfl_sync(kFullMask, mine, by, width);
    out->rotated.at[threadIdx.x] = __shfl_sync(kFullMask, mine, lane + by, width);
    out->bfly.at[threadIdx.x] = __shfl_xor_sync(kFullMask, mine, by, width);
    out->down.at[threadIdx.x] = __shfl_down_sync(kFullMask, mine, static_cast<unsigned>(by), width);
    out->up.at[threadIdx.x] = __shfl_up_sync(kFullMask, mine, static_cast<unsigned>(by), width);
}

TEST(Collectives, ShufflesOfEveryWidth) {
    for (Schedule schedule : kSchedules)
        for (int width : {1, 2, 4, 8, 16, 32})
            for (int by : {0, 1, 3, 5, 16, 31}) {
                const Execution exec = with(schedule);
                Shuffled s;
                simt::launch(shuffles, {.block = {32}, .exec = &exec}, &s, width, by);
                for (int lane = 0; lane < 32; ++lane) {
                    const auto l = static_cast<std::size_t>(lane);
                    const int first = lane / width * width, last = first + width - 1;
                    ASSERT_EQ(s.idx.at[l], 100 + first + by % width) << width << " " << by << " " << lane;
                    ASSERT_EQ(s.rotated.at[l], 100 + first + (lane + by) % width) << width << " " << by << " " << lane;
                    ASSERT_EQ(s.bfly.at[l], 100 + ((lane ^ by) <= last ? lane ^ by : lane)) << width << " " << by << " " << lane;
                    ASSERT_EQ(s.down.at[l], 100 + (lane + by <= last ? lane + by : lane)) << width << " " << by << " " << lane;
                    ASSERT_EQ(s.up.at[l], 100 + (lane - by >= first ? lane - by : lane)) << width << " " << by << " " << lane;
                }
            }
}

// The hardware takes the low five bits of the third argument.
TEST(Collectives, ShuffleDistancesWrapAt32) {
    Shuffled s, wrapped;
    simt::launch(shuffles, {.block = {32}}, &s, 32, 3);
    simt::launch(shuffles, {.block = {32}}, &wrapped, 32, 3 + 64);
    EXPECT_EQ(s.idx.at, wrapped.idx.at);
    EXPECT_EQ(s.rotated.at, wrapped.rotated.at);
    EXPECT_EQ(s.bfly.at, wrapped.bfly.at);
    EXPECT_EQ(s.down.at, wrapped.down.at);
    EXPECT_EQ(s.up.at, wrapped.up.at);
}

TEST(Collectives, ShuffleWidthIsChecked) {
    for (int width : {0, -1, 3, 12, 64}) {
        Shuffled s;
        expect_says(message_of<Error>([&] { simt::launch(shuffles, {.block = {32}}, &s, width, 1); }),
                    {"__shfl_sync()", ("width = " + std::to_string(width)).c_str(), "1, 2, 4, 8, 16 and 32", "thread 0 of block (0,0,0)"});
    }
}

__global__ void shuffle_types(double* d, __half* h, unsigned long long* u) {
    d[threadIdx.x] = __shfl_xor_sync(kFullMask, 0.5 + threadIdx.x, 1);
    h[threadIdx.x] = __shfl_xor_sync(kFullMask, __float2half_rn(static_cast<float>(threadIdx.x)), 2);
    u[threadIdx.x] = __shfl_sync(kFullMask, (1ull << 40) + threadIdx.x, 7);
}

TEST(Collectives, ShufflesOfOtherTypes) {
    std::array<double, 32> d;
    std::array<__half, 32> h;
    std::array<unsigned long long, 32> u;
    simt::launch(shuffle_types, {.block = {32}}, d.data(), h.data(), u.data());
    for (std::size_t lane = 0; lane < 32; ++lane) {
        EXPECT_EQ(d[lane], 0.5 + static_cast<double>(lane ^ 1));
        EXPECT_EQ(__half2float(h[lane]), static_cast<float>(lane ^ 2));
        EXPECT_EQ(u[lane], (1ull << 40) + 7);
    }
}

struct Votes {
    Lanes<unsigned> ballot;
    Lanes<int> any, all;
};

__global__ void votes(Votes* out, unsigned pattern) {
    const int mine = pattern >> threadIdx.x & 1u ? 4 : 0;  // any value but zero is true
    out->ballot.at[threadIdx.x] = __ballot_sync(kFullMask, mine);
    out->any.at[threadIdx.x] = __any_sync(kFullMask, mine);
    out->all.at[threadIdx.x] = __all_sync(kFullMask, mine);
}

TEST(Collectives, Votes) {
    for (Schedule schedule : kSchedules)
        for (unsigned pattern : {0u, 1u, 0x80000000u, 0x12345678u, 0xfffffffeu, 0xffffffffu}) {
            const Execution exec = with(schedule);
            Votes v;
            simt::launch(votes, {.block = {32}, .exec = &exec}, &v, pattern);
            for (std::size_t lane = 0; lane < 32; ++lane) {
                EXPECT_EQ(v.ballot.at[lane], pattern);
                EXPECT_EQ(v.any.at[lane] != 0, pattern != 0);
                EXPECT_EQ(v.all.at[lane] != 0, pattern == 0xffffffffu);
            }
        }
}

TEST(Collectives, VotesOfAPartialWarp) {
    Votes v;
    simt::launch(votes, {.block = {5}}, &v, 0xffffffffu);
    for (std::size_t lane = 0; lane < 5; ++lane) {
        EXPECT_EQ(v.ballot.at[lane], 0x1fu);
        EXPECT_NE(v.all.at[lane], 0);
    }
    simt::launch(votes, {.block = {5}}, &v, 0x17u);
    EXPECT_EQ(v.all.at[0], 0);
    EXPECT_NE(v.any.at[3], 0);
}

template <int Width>
__global__ void reduce(float* sum, float* maximum) {
    const auto lane = static_cast<float>(threadIdx.x);
    sum[threadIdx.x] = simt::warp_sum<Width>(lane + 1);
    maximum[threadIdx.x] = simt::warp_max<Width>(threadIdx.x % 2 ? -lane : lane - 100);
}

template <int Width>
void expect_reductions() {
    std::array<float, 96> sum, maximum;  // three warps
    simt::launch(reduce<Width>, {.block = {96}}, sum.data(), maximum.data());
    for (int i = 0; i < 96; ++i) {
        float s = 0, m = -std::numeric_limits<float>::infinity();
        for (int j = i / Width * Width; j < i / Width * Width + Width; ++j) {
            s += static_cast<float>(j + 1);
            m = std::max(m, static_cast<float>(j % 2 ? -j : j - 100));
        }
        EXPECT_EQ(sum[static_cast<std::size_t>(i)], s) << Width << " " << i;
        EXPECT_EQ(maximum[static_cast<std::size_t>(i)], m) << Width << " " << i;
    }
}

TEST(Collectives, WarpReductionsOfEveryWidth) {
    expect_reductions<1>();
    expect_reductions<2>();
    expect_reductions<4>();
    expect_reductions<8>();
    expect_reductions<16>();
    expect_reductions<32>();
}

// Two masks of one warp at different operations and different numbers of times.
__global__ void two_masks(int* out, unsigned* votes) {
    const int lane = static_cast<int>(threadIdx.x);
    const unsigned even = 0x55555555u;
    int x = lane;
    if (lane % 2 == 0) {
        for (int step = 2; step < 32; step *= 2) x += __shfl_xor_sync(even, x, step);
    } else {
        votes[lane] = __ballot_sync(~even, lane > 8);
        __syncwarp(~even);
    }
    out[lane] = x;
}

TEST(Collectives, TwoDisjointMasks) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        std::array<int, 32> out{};
        std::array<unsigned, 32> seen{};
        simt::launch(two_masks, {.block = {32}, .exec = &exec}, out.data(), seen.data());
        for (int lane = 0; lane < 32; ++lane) {
            const auto l = static_cast<std::size_t>(lane);
            EXPECT_EQ(out[l], lane % 2 ? lane : 240);  // 0 + 2 + ... + 30
            EXPECT_EQ(seen[l], lane % 2 ? 0xaaaaaa00u : 0u);
        }
    }
}

__global__ void all_masks_of_one(int* out) {
    const unsigned own = 1u << threadIdx.x;
    int x = 0;
    for (unsigned k = 0; k <= threadIdx.x; ++k) x += __shfl_sync(own, static_cast<int>(k), static_cast<int>(threadIdx.x));
    __syncwarp();
    out[threadIdx.x] = x;
}

TEST(Collectives, ThirtyTwoMasksOfOneLane) {
    std::array<int, 32> out{};
    simt::launch(all_masks_of_one, {.block = {32}}, out.data());
    for (int lane = 0; lane < 32; ++lane) EXPECT_EQ(out[static_cast<std::size_t>(lane)], lane * (lane + 1) / 2);
}

// Some lanes meet among themselves while the others already wait for the whole warp: that is allowed.
__global__ void part_then_whole(int* out, unsigned mask) {
    const int lane = static_cast<int>(threadIdx.x);
    int x = lane;
    if (mask >> lane & 1u) x = __shfl_sync(mask, x, 31 - __clz(static_cast<int>(mask)));
    out[lane] = __shfl_xor_sync(kFullMask, x, 1);
}

TEST(Collectives, PartOfAWarpMeetsWhileTheRestWaitsForAll) {
    for (Schedule schedule : kSchedules)
        for (unsigned mask : {0x0000ffffu, 0xffff0000u, 0x00ffff00u, 0x80000001u}) {
            const Execution exec = with(schedule);
            std::array<int, 32> out{};
            simt::launch(part_then_whole, {.block = {32}, .exec = &exec}, out.data(), mask);
            const int top = 31 - std::countl_zero(mask);
            for (int lane = 0; lane < 32; ++lane)
                ASSERT_EQ(out[static_cast<std::size_t>(lane)], mask >> (lane ^ 1) & 1u ? top : lane ^ 1) << mask << " " << lane;
        }
}

__global__ void sum_partial(float* out) { out[threadIdx.x] = simt::warp_sum<8>(1.0f); }

TEST(Collectives, PartialLastWarp) {
    std::array<float, 40> out{};
    simt::launch(sum_partial, {.block = {40}}, out.data());  // the second warp has 8 lanes
    for (float x : out) EXPECT_EQ(x, 8.0f);
    const std::string text = message_of<Error>([&] { simt::launch(sum_partial, {.block = {36}}, out.data()); });
    expect_says(text, {"warp_sum()", "which is not in the mask", "of block (0,0,0)"});
}

template <int kWidth>
__global__ void reductions_beside_shuffles(const float* in, std::uint32_t* out) {
    const float x = in[threadIdx.x];
    float sum = x, maximum = x;
    for (int step = kWidth / 2; step > 0; step /= 2) {
        sum += __shfl_xor_sync(kFullMask, sum, step);
        maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, step));
    }
    const float values[] = {simt::warp_sum<kWidth>(x), sum, simt::warp_max<kWidth>(x), maximum};
    for (int i = 0; i < 4; ++i) out[4 * threadIdx.x + static_cast<unsigned>(i)] = std::bit_cast<std::uint32_t>(values[i]);
}

// Bit for bit, also of infinities, NaN and zeros of both signs.
TEST(Collectives, ReductionsAreThoseOfTheShuffles) {
    std::array<float, 64> in;
    for (std::size_t i = 0; i < 64; ++i) in[i] = std::sin(1.7f * static_cast<float>(i * i)) * std::exp2(static_cast<float>(i % 21));
    for (const std::size_t i : {3u, 8u, 9u}) in[i] = -INFINITY;
    in[17] = NAN;
    in[20] = 0.0f;
    in[22] = -0.0f;
    for (const auto kernel : {reductions_beside_shuffles<2>, reductions_beside_shuffles<4>, reductions_beside_shuffles<32>})
        for (Schedule schedule : kSchedules) {
            const Execution exec = with(schedule);
            std::array<std::uint32_t, 256> out{};
            simt::launch(kernel, {.block = {64}, .exec = &exec}, in.data(), out.data());
            for (std::size_t i = 0; i < 256; i += 2) EXPECT_EQ(out[i], out[i + 1]) << "lane " << i / 4;
        }
}

__global__ void sums_of_two_widths() { (void)(threadIdx.x == 31 ? simt::warp_sum<4>(1.0f) : simt::warp_sum<32>(1.0f)); }

TEST(CollectiveErrors, ReductionsOfTwoWidths) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        expect_says(message_of<Error>([&] { simt::launch(sums_of_two_widths, {.block = {32}, .exec = &exec}); }),
                    {"warp_sum(): lanes of one warp come with widths", "of block (0,0,0)"});
    }
}

__global__ void source_not_in_mask() {
    if (threadIdx.x < 8) (void)__shfl_sync(0xffu, 1, 9);
}

TEST(CollectiveErrors, SourceLaneNotInTheMask) {
    expect_says(message_of<Error>([] { simt::launch(source_not_in_mask, {.grid = {2}, .block = {32}}); }),
                {"__shfl_sync()", "lane 0 reads lane 9", "not in the mask"});
}

__global__ void not_in_own_mask() {
    if (threadIdx.x == 37) (void)__ballot_sync(0x1u, 1);
}

TEST(CollectiveErrors, LaneNotInItsOwnMask) {
    expect_says(message_of<Error>([] { simt::launch(not_in_own_mask, {.block = {64}}); }),
                {"__ballot_sync()", "lane 5 is not in the mask", "thread 37 of block (0,0,0)"});
}

__global__ void diverge() {
    if (threadIdx.x % 32 < 16)
        __syncwarp();
    else
        (void)__any_sync(kFullMask, 1);
}

TEST(CollectiveErrors, Divergence) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        expect_says(message_of<Error>([&] { simt::launch(diverge, {.block = {64}, .exec = &exec}); }),
                    {"warp divergence", "of block (0,0,0)", "is at __any_sync()", "wait at __syncwarp()", "same operation"});
    }
}

// Lanes 0-15 wait for all; lane 16 waits for lane 15 and itself: neither can go on.
__global__ void overlap() {
    if (threadIdx.x < 16)
        __syncwarp();
    else
        __syncwarp(0xffff8000u);
}

TEST(CollectiveErrors, OverlappingMasks) {
    expect_says(message_of<Error>([] { simt::launch(overlap, {.block = {32}}); }),
                {"__syncwarp()", "the mask of thread 16 of block (0,0,0)", "overlaps"});
}

// ---------------------------------------------------------------- barriers and schedules

__global__ void rotate_through_shared(int* wrong, int rounds) {
    auto& x = simt::shared<std::array<int, 1024>>();
    const int n = static_cast<int>(blockDim.x), me = static_cast<int>(threadIdx.x);
    for (int round = 0; round < rounds; ++round) {
        x[threadIdx.x] = round * n + me;
        __syncthreads();
        if (x[static_cast<std::size_t>((me + 33) % n)] != round * n + (me + 33) % n) ++*wrong;
        __syncthreads();
    }
}

TEST(Barriers, SyncthreadsOfUpTo1024Threads) {
    for (Schedule schedule : kSchedules)
        for (unsigned threads : {1u, 31u, 32u, 33u, 100u, 1024u}) {
            Execution exec = with(schedule);
            exec.workers = 1;
            int wrong = 0;
            simt::launch(rotate_through_shared, {.grid = {2}, .block = {threads}, .smem = 4096, .exec = &exec}, &wrong, 5);
            EXPECT_EQ(wrong, 0) << threads;
        }
}

__global__ void log_steps(std::vector<std::pair<int, int>>* log) {
    const int warp = static_cast<int>(threadIdx.x / 32);
    const bool writes = threadIdx.x % 32 == 0;
    for (int step = 0; step < 4; ++step) {
        if (writes) log->emplace_back(warp, step);
        if (step % 2 == 0)
            __syncwarp();
        else
            __syncthreads();
    }
}

// Round robin changes warps at every collective. The others change at __syncthreads() only: a warp runs through its own collectives.
TEST(Schedules, OrderOfWarps) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        std::vector<std::pair<int, int>> log, expected;
        simt::launch(log_steps, {.block = {96}, .exec = &exec}, &log);
        const int together = schedule == Schedule::round_robin ? 1 : 2;  // steps that a warp makes at a time
        for (int step = 0; step < 4; step += together)
            for (int k = 0; k < 3; ++k)
                for (int s = step; s < step + together; ++s) expected.emplace_back(schedule == Schedule::highest_first ? 2 - k : k, s);
        EXPECT_EQ(log, expected) << simt::name(schedule);
    }
}

// Lanes give way to each other while accesses are counted (see Coalescer). A lane that is alone in its warp then hands over to
// the next warp in round robin, and goes on at once in the two other schedules.
__global__ void log_accesses(simt::TensorView<const float, 1> a, std::vector<int>* log) {
    if (threadIdx.x % 32) return;
    for (int i = 0; i < a.extent(0); ++i) {
        (void)static_cast<float>(a(i));
        log->push_back(static_cast<int>(threadIdx.x / 32));
    }
}

TEST(Schedules, RoundRobinTakesTurnsWhereTheOthersStay) {
    const std::vector<float> a(200);
    for (Schedule schedule : kSchedules) {
        simt::Ledger ledger;
        Execution exec = with(schedule);
        exec.ledger = &ledger;
        std::vector<int> log;
        simt::launch(log_accesses, {.block = {96}, .exec = &exec}, simt::packed_view<const float, 1>("a", a.data(), {200}), &log);
        ASSERT_EQ(log.size(), 600u);
        int changes = 0;
        for (std::size_t i = 1; i < log.size(); ++i) changes += log[i] != log[i - 1];
        if (schedule == Schedule::round_robin)
            EXPECT_GT(changes, 10);
        else
            EXPECT_EQ(changes, 2);
        EXPECT_EQ(log.front(), schedule == Schedule::highest_first ? 2 : 0);
    }
}

struct Pair {
    float x[64];
};

// Each thread reads its partner's number; the __syncthreads() before the next write is there or missing.
__global__ void exchange(float* sum, int rounds, bool trailing) {
    auto& s = simt::shared<Pair>();
    float total = 0;
    for (int i = 0; i < rounds; ++i) {
        s.x[threadIdx.x] = static_cast<float>(i);
        __syncthreads();
        total += s.x[63 - threadIdx.x];
        if (trailing) __syncthreads();
    }
    sum[threadIdx.x] = total;
}

TEST(Schedules, MissingTrailingSyncthreadsGivesWrongNumbers) {
    int wrong_schedules = 0;
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        std::array<float, 64> right{}, wrong{};
        simt::launch(exchange, {.block = {64}, .smem = sizeof(Pair), .exec = &exec}, right.data(), 4, true);
        simt::launch(exchange, {.block = {64}, .smem = sizeof(Pair), .exec = &exec}, wrong.data(), 4, false);
        for (float x : right) EXPECT_EQ(x, 6.0f) << simt::name(schedule);
        for (float x : wrong)
            if (x != 6.0f) {
                ++wrong_schedules;
                break;
            }
    }
    EXPECT_GE(wrong_schedules, 1);
}

// Only one warp overwrites what another one reads: one order of the warps hides it, the opposite one shows it.
__global__ void one_way(float* seen, unsigned writer) {
    auto& s = simt::shared<Pair>();
    s.x[threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x / 32 == writer)
        s.x[threadIdx.x] = 2;
    else
        seen[threadIdx.x % 32] = s.x[threadIdx.x ^ 32];
}

TEST(Schedules, EachOrderShowsWhatTheOtherHides) {
    for (unsigned writer : {0u, 1u})
        for (Schedule schedule : {Schedule::lowest_first, Schedule::highest_first}) {
            const Execution exec = with(schedule);
            std::array<float, 32> seen{};
            simt::launch(one_way, {.block = {64}, .smem = sizeof(Pair), .exec = &exec}, seen.data(), writer);
            // The lane that arrives last at the barrier goes on at once, the others in the order of the schedule.
            const bool writer_first = (schedule == Schedule::lowest_first) == (writer == 0);
            EXPECT_EQ(seen[5], writer_first ? 2.0f : 1.0f) << writer << " " << simt::name(schedule);
        }
}

// ---------------------------------------------------------------- deadlocks

__global__ void some_miss_the_barrier() {
    if (threadIdx.x < 40) __syncthreads();
    __syncwarp();
    if (threadIdx.x >= 40) __syncthreads();
}

__global__ void some_return() {
    if (threadIdx.x % 2) return;
    __syncthreads();
}

__global__ void a_warp_in_a_shuffle() {
    if (threadIdx.x >= 32 && threadIdx.x < 60) (void)__shfl_xor_sync(kFullMask, 1.0f, 1);
    __syncthreads();
}

__global__ void returned_before_shuffle() {
    if (threadIdx.x == 3) return;
    (void)simt::warp_sum(1.0f);
}

std::string deadlock_of(void (*kernel)(), Schedule schedule, unsigned threads) {
    const Execution exec = with(schedule);
    return message_of<Deadlock>([&] { simt::launch(kernel, {.name = "stuck", .grid = {1, 2}, .block = {threads}, .exec = &exec}); });
}

TEST(Deadlocks, SomeThreadsReturned) {
    for (Schedule schedule : kSchedules)
        expect_says(deadlock_of(some_return, schedule, 64), {"deadlock in stuck, block (0,", "32 of 64 threads wait for ever",
                                                             "32 wait at __syncthreads(): threads 0,2,4", "32 have returned"});
}

// Warp 0 is at the barrier; the lower lanes of warp 1 too, while its upper lanes wait for them at __syncwarp().
TEST(Deadlocks, BarrierMissedBySomeThreads) {
    for (Schedule schedule : kSchedules) {
        const std::string text = deadlock_of(some_miss_the_barrier, schedule, 64);
        expect_says(text, {"64 of 64 threads wait for ever", "40 wait at __syncthreads(): threads 0-39",
                           "24 wait at __syncwarp(): threads 40-63 (for lanes 0-7 of warp 1)"});
        EXPECT_EQ(text.find("returned"), std::string::npos) << text;
    }
}

TEST(Deadlocks, WarpWaitsInAShuffle) {
    for (Schedule schedule : kSchedules)
        expect_says(
            deadlock_of(a_warp_in_a_shuffle, schedule, 64),
            {"28 wait at __shfl_xor_sync(): threads 32-59 (for lanes 28-31 of warp 1)", "36 wait at __syncthreads(): threads 0-31,60-63"});
    expect_says(deadlock_of(returned_before_shuffle, Schedule::round_robin, 32),
                {"31 wait at warp_sum(): threads 0-2,4-31 (for lanes 3 of warp 0)", "1 have returned"});
}

TEST(Deadlocks, EmulatorIsUsableAfterwards) {
    for (int i = 0; i < 20; ++i) deadlock_of(some_return, kSchedules[i % 3], 64);
    int wrong = 0;
    simt::launch(rotate_through_shared, {.block = {1024}, .smem = 4096}, &wrong, 3);
    EXPECT_EQ(wrong, 0);
}

// ---------------------------------------------------------------- exceptions

struct Counted {
    explicit Counted(std::atomic<int>* alive, std::atomic<int>* made) : alive(alive) { ++*alive, ++*made; }
    Counted(const Counted& other) : alive(other.alive) { ++*alive; }
    ~Counted() { --*alive; }
    std::atomic<int>* alive;
};

struct Custom {
    int value;
};

enum class At { barrier, shuffle, start };

__global__ void one_throws(std::atomic<int>* alive, std::atomic<int>* made, At others, unsigned thrower) {
    const Counted outer(alive, made);
    const std::vector<Counted> inner(3, outer);
    if (threadIdx.x == thrower) throw Custom{static_cast<int>(blockIdx.x)};
    if (others == At::barrier) __syncthreads();
    if (others == At::shuffle) (void)simt::warp_sum(1.0f);
}

TEST(Exceptions, ReachTheCallerAndUnwindTheOtherThreads) {
    for (Schedule schedule : kSchedules)
        for (At others : {At::barrier, At::shuffle, At::start})
            for (unsigned thrower : {0u, 40u, 95u}) {
                const Execution exec = with(schedule);
                std::atomic<int> alive{0}, made{0};
                bool caught = false;
                try {
                    simt::launch(one_throws, {.grid = {7}, .block = {96}, .exec = &exec}, &alive, &made, others, thrower);
                } catch (const Custom& custom) {
                    caught = true;
                    EXPECT_LT(custom.value, 7);
                }
                EXPECT_TRUE(caught);
                EXPECT_GE(made, 1);
                EXPECT_EQ(alive, 0);
            }
}

__global__ void all_throw() {
    __syncthreads();
    throw std::runtime_error("from thread " + std::to_string(threadIdx.x));
}

TEST(Exceptions, TheFirstOfABlockWins) {
    Execution exec;
    exec.workers = 1;
    for (int i = 0; i < 50; ++i) {
        // The thread that arrives last at the barrier is the one that goes on first.
        EXPECT_EQ(message_of<std::runtime_error>([&] { simt::launch(all_throw, {.grid = {4}, .block = {128}, .exec = &exec}); }),
                  "from thread 127");
    }
    int wrong = 0;
    simt::launch(rotate_through_shared, {.block = {256}, .smem = 4096, .exec = &exec}, &wrong, 3);
    EXPECT_EQ(wrong, 0);
}

__global__ void throw_in_block_3(std::atomic<int>* started) {
    if (threadIdx.x == 0) ++*started;
    if (blockIdx.x == 3) throw std::out_of_range("block 3");
}

TEST(Exceptions, LaterBlocksAreNotStarted) {
    Execution exec;
    exec.workers = 1;
    std::atomic<int> started{0};
    EXPECT_EQ(message_of<std::out_of_range>([&] { simt::launch(throw_in_block_3, {.grid = {100000}, .exec = &exec}, &started); }),
              "block 3");
    EXPECT_EQ(started, 4);
}

__global__ void catch_inside(int* caught) {
    try {
        if (threadIdx.x % 3 == 0) throw std::runtime_error("mine");
    } catch (const std::runtime_error&) {
        ++caught[threadIdx.x];
    }
    __syncthreads();
}

TEST(Exceptions, KernelsMayCatchTheirOwn) {
    std::array<int, 64> caught{};
    simt::launch(catch_inside, {.block = {64}}, caught.data());
    for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(caught[i], i % 3 == 0);
}

// ---------------------------------------------------------------- shared memory

struct Scratch {
    float x[100];
};

__global__ void expect_poison(std::atomic<int>* numbers) {
    auto& plain = simt::shared<Scratch>();
    for (unsigned i = threadIdx.x; i < 100; i += blockDim.x) {
        if (!std::isnan(plain.x[i])) ++*numbers;
        plain.x[i] = 1.0f;
    }
    __syncthreads();
    simt::SharedArena arena;
    arena.tile<float>("skip", 10, 10, 10);
    const auto rest = arena.vector<float>("rest", 28);
    if (threadIdx.x < 28) {
        if (!std::isnan(static_cast<float>(rest(static_cast<int>(threadIdx.x))))) ++*numbers;
        rest(static_cast<int>(threadIdx.x)) = 2.0f;
    }
}

TEST(SharedMemory, StartsPoisonedInEveryBlock) {
    for (int launch = 0; launch < 3; ++launch) {
        Execution exec;
        exec.workers = 2;
        std::atomic<int> numbers{0};
        simt::launch(expect_poison, {.grid = {9}, .block = {32}, .smem = 512, .exec = &exec}, &numbers);
        EXPECT_EQ(numbers, 0);
    }
}

__global__ void too_large() { (void)simt::shared<Scratch>(); }

TEST(SharedMemory, StructLargerThanTheLaunchGave) {
    expect_says(message_of<Error>([] { simt::launch(too_large, {.name = "scores", .smem = 399}); }),
                {"scores", "gave 399 bytes", "T needs 400"});
    EXPECT_NO_THROW(simt::launch(too_large, {.smem = 400}));
}

__global__ void arena_parts(int rows, int cols, int pitch, int count) {
    simt::SharedArena arena;
    arena.tile<float>("first", rows, cols, pitch);
    arena.vector<double>("second", count);
}

TEST(SharedMemory, ArenaOverrunAndBadShapes) {
    const auto text = [](int rows, int cols, int pitch, int count) {
        return message_of<Error>([&] { simt::launch(arena_parts, {.name = "flash", .smem = 256}, rows, cols, pitch, count); });
    };
    EXPECT_NO_THROW(simt::launch(arena_parts, {.smem = 256}, 4, 7, 8, 16));  // 128 + 128 bytes
    expect_says(text(4, 7, 8, 17), {"SharedArena: second", "ends at byte 264", "flash gave 256 bytes"});
    expect_says(text(9, 7, 8, 0), {"SharedArena: first", "ends at byte 288"});
    expect_says(text(4, 8, 7, 1), {"SharedArena: first", "cols = 8, pitch = 7", "pitch of at least cols"});
    expect_says(text(-1, 8, 8, 1), {"SharedArena: first", "rows = -1"});
    expect_says(text(4, 8, 8, -2), {"SharedArena: second", "count = -2"});
    expect_says(text(1, 3, 3, 1), {"SharedArena: second", "starts at byte 12", "multiples of 8"});
}

__global__ void touch_tile(int r, int c) {
    simt::SharedArena arena;
    const auto t = arena.tile<float>("Ks", 4, 6, 7);
    t(r, c) = 1.0f;
}
__global__ void touch_vector(int i) {
    simt::SharedArena arena;
    const auto v = arena.vector<float>("keep", 5);
    (void)static_cast<float>(v(i));
}

TEST(SharedMemory, BoundsOfTilesAndVectors) {
    const auto tile = [](int r, int c) { return message_of<Error>([&] { simt::launch(touch_tile, {.smem = 1024}, r, c); }); };
    EXPECT_NO_THROW(simt::launch(touch_tile, {.smem = 1024}, 3, 5));
    expect_says(tile(4, 0), {"out of bounds", "Ks(4, 0)", "(4, 6)", "thread 0 of block (0,0,0)"});
    expect_says(tile(0, 6), {"Ks(0, 6)"});  // in the padding
    expect_says(tile(-1, 2), {"Ks(-1, 2)"});
    expect_says(tile(2, -1), {"Ks(2, -1)"});
    EXPECT_NO_THROW(simt::launch(touch_vector, {.smem = 1024}, 4));
    expect_says(message_of<Error>([] { simt::launch(touch_vector, {.smem = 1024}, 5); }), {"out of bounds", "keep(5)", "(5)"});
    expect_says(message_of<Error>([] { simt::launch(touch_vector, {.smem = 1024}, -1); }), {"keep(-1)"});
}

__global__ void tile_operators(float* out) {
    simt::SharedArena arena;
    const auto t = arena.tile<float>("t", 2, 3, 3);
    const auto v = arena.vector<int>("v", 2);
    t(0, 0) = 8.0f;
    t(0, 0) += 2.0f;
    t(0, 0) *= 3.0f;
    t(0, 0) -= 5.0f;
    t(1, 2) = t(0, 0);
    v(1) = 7;
    v(0) = v(1);
    out[0] = t(0, 0);
    out[1] = t(1, 2) + t(0, 0);
    out[2] = static_cast<float>(v(0));
}

TEST(SharedMemory, ElementOperators) {
    std::array<float, 3> out{};
    simt::launch(tile_operators, {.smem = 64}, out.data());
    EXPECT_EQ(out, (std::array{25.0f, 50.0f, 7.0f}));
}

using TileElement = decltype(std::declval<const simt::SharedTile<float>&>()(0, 0));
static_assert(std::is_convertible_v<TileElement, float> && !std::is_convertible_v<TileElement&, float>,
              "auto x = tile(r, c) keeps a reference, so its later use must not compile");
static_assert(std::is_assignable_v<TileElement, float> && !std::is_assignable_v<TileElement&, float>);

// ---------------------------------------------------------------- races

enum class Sync { none, warp, block };

__device__ void meet(Sync how) {
    if (how == Sync::warp) __syncwarp();
    if (how == Sync::block) __syncthreads();
}

enum class Access { read, write };

// Thread `first` touches t(2, 3), then, after `sync`, thread `second` does.
__global__ void touch_twice(unsigned first, Access how_first, Sync sync, unsigned second, Access how_second) {
    simt::SharedArena arena;
    const auto t = arena.tile<float>("P", 4, 32, 33);
    const auto touch = [&](Access how) {
        if (how == Access::write)
            t(2, 3) = 1.0f;
        else
            (void)static_cast<float>(t(2, 3));
    };
    if (threadIdx.x == first) touch(how_first);
    meet(sync);
    if (threadIdx.x == second) touch(how_second);
}

void twice(unsigned first, Access how_first, Sync sync, unsigned second, Access how_second) {
    Execution exec;  // round robin runs threads in order up to a barrier, so `first` < `second` comes first
    simt::launch(touch_twice, {.name = "softmax", .grid = {1, 3}, .block = {96}, .smem = 4 * 33 * 4, .exec = &exec}, first, how_first, sync,
                 second, how_second);
}

TEST(Races, TwoThreadsWithoutABarrier) {
    for (auto [first, second] : {std::pair{3u, 70u}, std::pair{3u, 4u}}) {  // across warps, inside of a warp
        const std::string other = "which thread 3 ", me = "thread " + std::to_string(second) + " of block (0,";
        expect_says(message_of<Race>([&] { twice(first, Access::write, Sync::none, second, Access::write); }),
                    {"race in softmax", (me).c_str(), "writes shared P(2, 3)", (other + "wrote").c_str(), "no barrier lies between"});
        expect_says(message_of<Race>([&] { twice(first, Access::write, Sync::none, second, Access::read); }),
                    {me.c_str(), "reads shared P(2, 3)", (other + "wrote").c_str()});
        expect_says(message_of<Race>([&] { twice(first, Access::read, Sync::none, second, Access::write); }),
                    {me.c_str(), "writes shared P(2, 3)", (other + "read").c_str()});
        EXPECT_NO_THROW(twice(first, Access::read, Sync::none, second, Access::read));
    }
}

TEST(Races, SyncthreadsOrdersAll) {
    for (Access a : {Access::read, Access::write})
        for (Access b : {Access::read, Access::write})
            for (unsigned second : {3u, 4u, 70u}) EXPECT_NO_THROW(twice(3, a, Sync::block, second, b));
}

TEST(Races, SyncwarpOrdersOneWarpOnly) {
    for (Access a : {Access::read, Access::write})
        for (Access b : {Access::read, Access::write}) {
            EXPECT_NO_THROW(twice(3, a, Sync::warp, 4, b));
            if (a == Access::read && b == Access::read) continue;
            EXPECT_THROW(twice(3, a, Sync::warp, 70, b), Race);
        }
}

TEST(Races, AThreadMayDoAsItLikesWithItsOwn) {
    for (Access a : {Access::read, Access::write})
        for (Access b : {Access::read, Access::write}) EXPECT_NO_THROW(twice(3, a, Sync::none, 3, b));
}

TEST(Races, EverySchedule) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        EXPECT_THROW(
            simt::launch(touch_twice, {.block = {96}, .smem = 1024, .exec = &exec}, 3u, Access::write, Sync::none, 70u, Access::read),
            Race);
    }
}

// Threads below `readers` read v(0); after `sync`, thread `writer` adds to it.
__global__ void readers_then_writer(unsigned readers, Sync sync, unsigned writer) {
    simt::SharedArena arena;
    const auto v = arena.vector<float>("m", 1);
    if (threadIdx.x == 0) v(0) = 0.0f;
    __syncthreads();
    if (threadIdx.x < readers) (void)static_cast<float>(v(0));
    meet(sync);
    if (threadIdx.x == writer) v(0) += 1.0f;
}

void read_then_write(unsigned readers, Sync sync, unsigned writer) {
    simt::launch(readers_then_writer, {.block = {96}, .smem = 16}, readers, sync, writer);
}

TEST(Races, SeveralReadersThenAWriter) {
    expect_says(message_of<Race>([] { read_then_write(32, Sync::none, 31); }), {"thread 31", "writes shared m(0)", "lanes of warp 0 read"});
    expect_says(message_of<Race>([] { read_then_write(32, Sync::none, 40); }), {"thread 40", "writes shared m(0)", "read"});
    expect_says(message_of<Race>([] { read_then_write(64, Sync::none, 70); }),
                {"thread 70", "writes shared m(0)", "threads of several warps read"});
    expect_says(message_of<Race>([] { read_then_write(64, Sync::warp, 5); }), {"thread 5 ", "threads of several warps read"});
    // A whole-warp barrier orders the reads of that warp, also when the writer reads once more itself.
    EXPECT_NO_THROW(read_then_write(32, Sync::warp, 5));
    EXPECT_NO_THROW(read_then_write(32, Sync::warp, 31));
    for (unsigned writer : {0u, 31u, 70u}) EXPECT_NO_THROW(read_then_write(96, Sync::block, writer));
}

// A shuffle is no memory barrier.
__global__ void shuffle_between() {
    simt::SharedArena arena;
    const auto v = arena.vector<float>("v", 32);
    v(static_cast<int>(threadIdx.x)) = 1.0f;
    (void)__shfl_xor_sync(kFullMask, 1, 1);
    (void)static_cast<float>(v(static_cast<int>(threadIdx.x ^ 1)));
}

TEST(Races, ShufflesDoNotOrderMemory) { EXPECT_THROW(simt::launch(shuffle_between, {.block = {32}, .smem = 128}), Race); }

// Sums in shared memory, halving the number of active lanes: each step reads what other lanes wrote before the barrier.
__global__ void tree_sum(float* out, bool with_barrier) {
    simt::SharedArena arena;
    const auto v = arena.vector<float>("v", 32);
    const int lane = static_cast<int>(threadIdx.x);
    v(lane) = static_cast<float>(lane);
    __syncwarp();
    for (int step = 16; step > 0; step /= 2) {
        if (lane < step) v(lane) += v(lane + step);
        if (with_barrier) __syncwarp();
    }
    if (lane == 0) *out = v(0);
}

TEST(Races, TreeSumInsideAWarp) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        float out = 0;
        simt::launch(tree_sum, {.block = {32}, .smem = 128, .exec = &exec}, &out, true);
        EXPECT_EQ(out, 496.0f);
        EXPECT_THROW(simt::launch(tree_sum, {.block = {32}, .smem = 128, .exec = &exec}, &out, false), Race);
    }
}

// Two buffers: while one is read the next is filled, with one barrier a round.
__global__ void double_buffer(float* sum, int rounds, int buffers) {
    simt::SharedArena arena;
    const auto t = arena.tile<float>("stage", buffers, 128, 128);
    const int me = static_cast<int>(threadIdx.x);
    float total = 0;
    t(0, me) = 0.0f;
    for (int i = 0; i < rounds; ++i) {
        __syncthreads();
        if (i + 1 < rounds) t((i + 1) % buffers, me) = static_cast<float>(i + 1);
        total += t(i % buffers, 127 - me);
    }
    sum[me] = total;
}

TEST(Races, DoubleBufferIsNoRaceAndASingleOneIs) {
    for (Schedule schedule : kSchedules) {
        const Execution exec = with(schedule);
        std::array<float, 128> sum{};
        simt::launch(double_buffer, {.block = {128}, .smem = 1024, .exec = &exec}, sum.data(), 10, 2);
        for (float x : sum) EXPECT_EQ(x, 45.0f);
        expect_says(
            message_of<Race>([&] { simt::launch(double_buffer, {.block = {128}, .smem = 1024, .exec = &exec}, sum.data(), 10, 1); }),
            {"shared stage(0, "});
    }
}

// What one block did is no race with the next block on the same worker, nor with the next launch.
TEST(Races, BlocksAndLaunchesAreApart) {
    Execution exec;
    exec.workers = 1;
    for (unsigned thread : {3u, 70u})
        EXPECT_NO_THROW(simt::launch(touch_twice, {.grid = {3}, .block = {96}, .smem = 1024, .exec = &exec}, thread, Access::write,
                                     Sync::none, thread, Access::write));
}

// ---------------------------------------------------------------- plain intrinsics

__global__ void add_atomically(int* i, float* f, unsigned long long* u) {
    atomicAdd(i, 2);
    atomicAdd(f, 0.5f);
    atomicAdd(f, 1);  // converts, as in CUDA
    atomicAdd(u, 1ull << 33);
}

TEST(Intrinsics, AtomicAddAcrossBlocks) {
    int i = 0;
    float f = 0;
    unsigned long long u = 0;
    Execution exec;
    exec.workers = 4;
    simt::launch(add_atomically, {.grid = {64}, .block = {64}, .exec = &exec}, &i, &f, &u);
    EXPECT_EQ(i, 8192);
    EXPECT_EQ(f, 6144.0f);
    EXPECT_EQ(u, 4096ull << 33);
}

__global__ void old_values(int* counter, int* old) { old[threadIdx.x] = atomicAdd(counter, 1); }

TEST(Intrinsics, AtomicAddYieldsTheOldValue) {
    int counter = 10;
    std::vector<int> old(256), expected(256);
    simt::launch(old_values, {.block = {256}}, &counter, old.data());
    std::sort(old.begin(), old.end());
    std::iota(expected.begin(), expected.end(), 10);
    EXPECT_EQ(old, expected);
}

TEST(Intrinsics, MinAndMaxKeepTheirType) {
    EXPECT_EQ(min(0.25f, 0.75f), 0.25f);
    EXPECT_EQ(max(0.25f, 0.75f), 0.75f);
    EXPECT_EQ(max(1.5, -2.5), 1.5);
    EXPECT_EQ(min(-3, 4), -3);
    EXPECT_EQ(max(4000000000u, 1u), 4000000000u);
    EXPECT_EQ(min(1ll << 40, 1ll << 41), 1ll << 40);
}

TEST(Intrinsics, BitCounts) {
    EXPECT_EQ(__popc(0), 0);
    EXPECT_EQ(__popc(0xf0f0u), 8);
    EXPECT_EQ(__ffs(0), 0);
    EXPECT_EQ(__ffs(8), 4);
    EXPECT_EQ(__ffs(std::numeric_limits<int>::min()), 32);
    EXPECT_EQ(__clz(0), 32);
    EXPECT_EQ(__clz(1), 31);
    EXPECT_EQ(__clz(-1), 0);
}

TEST(Intrinsics, FastMath) {
    EXPECT_NEAR(__expf(1.5f), std::exp(1.5), 1e-6 * std::exp(1.5));
    EXPECT_EQ(__expf(-INFINITY), 0.0f);
    EXPECT_NEAR(__logf(5.0f), std::log(5.0), 1e-6);
    EXPECT_NEAR(__log2f(5.0f), std::log2(5.0), 1e-6);
    EXPECT_NEAR(__log10f(5.0f), std::log10(5.0), 1e-6);
    EXPECT_NEAR(__exp10f(2.0f), 100.0, 1e-4);
    EXPECT_NEAR(__sinf(0.5f), std::sin(0.5), 1e-6);
    EXPECT_NEAR(__cosf(0.5f), std::cos(0.5), 1e-6);
    EXPECT_NEAR(__powf(3.0f, 2.5f), std::pow(3.0, 2.5), 1e-4);
    EXPECT_NEAR(rsqrtf(4.0f), 0.5, 1e-7);
    EXPECT_EQ(__fdividef(1.0f, 4.0f), 0.25f);
    EXPECT_EQ(__frcp_rn(8.0f), 0.125f);
}

}  // namespace
