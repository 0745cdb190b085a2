// What the emulator traces of a launch. CPU build only.
#include "ptx/cp_async_bulk.hpp"
#include "ptx/mbarrier.hpp"
#include "ptx/tensor_map.hpp"
#include "simt/ledger.hpp"
#include "simt/simt.hpp"
#include "simt/trace.hpp"

#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <vector>

namespace {

using simt::Schedule;
using simt::TensorView;

/// "Q 0-3, =O 4-4": what was read, and with a = what was written, in order.
std::string text(const simt::TracedBlock& block) {
    std::string all;
    for (const simt::TracedRows& t : block.rows)
        all += (all.empty() ? "" : ", ") + std::string(t.write ? "=" : "") + simt::tensor_name(t.tensor) + " " + std::to_string(t.first) +
               "-" + std::to_string(t.last);
    return all;
}

constexpr int kRows = 16, kColumns = 8;

struct Traced : testing::TestWithParam<Schedule> {
    Traced() : q(kRows * kColumns), k(q), o(q) {
        exec.ledger = &ledger;
        exec.trace = &trace;
        exec.schedule = GetParam();
    }
    TensorView<float, 2> view(const char* name, std::vector<float>& data) {
        return simt::packed_view<float, 2>(name, data.data(), {kRows, kColumns});
    }
    void watch(const char* name, const std::vector<float>& data) { trace.watch(name, data.data(), kRows, kColumns * sizeof(float)); }

    std::vector<float> q, k, o;
    simt::Ledger ledger;
    simt::Trace trace;
    simt::Execution exec;
};

// Each block: four rows of Q, then K four rows at a time, then four rows of O.
__global__ void tiles(TensorView<float, 2> Q, TensorView<float, 2> K, TensorView<float, 2> O) {
    const int r = static_cast<int>(threadIdx.x) / kColumns, c = static_cast<int>(threadIdx.x) % kColumns;
    const int i0 = 4 * static_cast<int>(blockIdx.x);
    float sum = Q(i0 + r, c);
    for (int j0 = 0; j0 < kRows; j0 += 4) {
        sum += K(j0 + r, c);
        __syncthreads();
    }
    O(i0 + r, c) = sum;
}

TEST_P(Traced, WhatBlocksTouchBetweenBarriers) {
    watch("Q", q);
    watch("K", k);
    watch("O", o);
    simt::launch(tiles, {.name = "tiles", .grid = {4}, .block = {32}, .exec = &exec}, view("Q", q), view("K", k), view("O", o));
    const std::vector<simt::TracedBlock> blocks = trace.blocks();
    ASSERT_EQ(blocks.size(), 4u);
    for (unsigned b = 0; b < 4; ++b) {
        const std::string own = std::to_string(4 * b) + "-" + std::to_string(4 * b + 3);
        EXPECT_EQ(blocks[b].kernel, "tiles");
        EXPECT_EQ(blocks[b].index.x, b);
        EXPECT_EQ(text(blocks[b]), "Q " + own + ", K 0-3, K 4-7, K 8-11, K 12-15, =O " + own);
    }
}

TEST_P(Traced, OnlyWhatIsWatched) {
    watch("K", k);
    trace.watch("Q", q.data() + 4 * kColumns, 4, kColumns * sizeof(float));  // the second four rows
    simt::launch(tiles, {.grid = {2}, .block = {32}, .exec = &exec}, view("Q", q), view("K", k), view("O", o));
    EXPECT_EQ(text(trace.blocks().at(0)), "K 0-3, K 4-7, K 8-11, K 12-15");
    EXPECT_EQ(text(trace.blocks().at(1)), "Q 0-3, K 0-3, K 4-7, K 8-11, K 12-15");
}

// A kernel that fails leaves nothing of the blocks that did not come to their end, and the next launch begins anew.
TEST_P(Traced, AfterAFailedLaunch) {
    watch("Q", q);
    const auto kernel = +[](TensorView<float, 2> Q, int row) {
        const float x = Q(static_cast<int>(threadIdx.x), 0);
        Q(row, 0) = x;
    };
    EXPECT_THROW(simt::launch(kernel, {.block = {2}, .exec = &exec}, view("Q", q), kRows), simt::Error);
    EXPECT_TRUE(trace.blocks().empty());
    simt::launch(kernel, {.block = {1}, .exec = &exec}, view("Q", q), 7);
    ASSERT_EQ(trace.blocks().size(), 1u);
    EXPECT_EQ(text(trace.blocks()[0]), "Q 0-0, =Q 7-7");
}

// Each copy by TMA stands for itself, without a barrier between them, and what lies outside of the tensor is not touched.
TEST_P(Traced, CopiesByTma) {
    struct Smem {
        alignas(1024) float box[2][8 * kColumns];
        ptx::Mbarrier full;
    };
    watch("T", q);
    const auto map = ptx::make_tensor_map<float, 2>("T", q.data(), {kColumns, kRows}, {kColumns}, {kColumns, 8}, ptx::Swizzle::none);
    const auto kernel = +[](ptx::TensorMap map) {
        Smem& smem = simt::shared<Smem>();
        if (threadIdx.x != 0) return;
        ptx::mbarrier_init(smem.full, 1, "full", 0);
        ptx::fence_mbarrier_init();
        ptx::mbarrier_arrive_expect_tx(smem.full, sizeof(smem.box));
        ptx::cp_async_bulk_tensor_load(smem.box[0], map, {0, 0}, smem.full);
        ptx::cp_async_bulk_tensor_load(smem.box[1], map, {0, 12}, smem.full);
        ptx::mbarrier_wait(smem.full, 0);
    };
    simt::launch(kernel, {.block = {32}, .smem = sizeof(Smem), .exec = &exec}, map);
    ASSERT_EQ(trace.blocks().size(), 1u);
    EXPECT_EQ(text(trace.blocks()[0]), "T 0-7, T 12-15");
}

INSTANTIATE_TEST_SUITE_P(Schedules, Traced, testing::Values(Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first));

}  // namespace
