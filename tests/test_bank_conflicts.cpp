// The bank conflicts that the emulator counts. CPU build only.
#include "ptx/cluster.hpp"
#include "ptx/cp_async.hpp"
#include "ptx/ldmatrix.hpp"
#include "ptx/stmatrix.hpp"
#include "simt/ledger.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace {

using simt::packed_view;
using simt::Schedule;
using simt::SharedCount;
using simt::TensorView;
using Counts = std::map<std::string, SharedCount>;

struct Memory {
    alignas(128) char bytes[64 * 512];
};

int me() { return static_cast<int>(threadIdx.x); }
char* at(int byte) { return simt::shared<Memory>().bytes + byte; }
// Inlined, so that each use is a place of its own.
[[gnu::always_inline]] inline float load_4(int word) { return static_cast<float>(simt::load_shared_4(at(4 * word))); }

/// What the kernel's accesses to shared memory cost, the same under every schedule.
template <class... Params, class... Args>
Counts counts(int threads, void (*kernel)(Params...), Args... args) {
    std::vector<Counts> found;
    for (const Schedule schedule : {Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first}) {
        simt::Ledger ledger;
        simt::Execution exec;
        exec.schedule = schedule;
        exec.ledger = &ledger;
        simt::launch(kernel, {.block = {static_cast<unsigned>(threads)}, .smem = sizeof(Memory), .exec = &exec}, args...);
        found.push_back(ledger.shared());
        EXPECT_EQ(found.back().size(), 1u) << "kinds of accesses";
        for (const auto& [access, count] : found.back()) {
            EXPECT_EQ(count.wavefronts, found.front()[access].wavefronts) << access << ", " << simt::name(schedule);
            EXPECT_EQ(count.ideal, found.front()[access].ideal) << access << ", " << simt::name(schedule);
        }
    }
    return found.front();
}

void expect_count(const SharedCount& count, std::uint64_t wavefronts, std::uint64_t ideal, const std::string& what) {
    EXPECT_EQ(count.wavefronts, wavefronts) << what;
    EXPECT_EQ(count.ideal, ideal) << what;
}

// ---------------------------------------------------------------- vector loads and stores, cp.async

/// A lane's access begins `stride` bytes behind that of the lane before.
struct Pattern {
    int bytes, stride;
    std::uint64_t wavefronts;  // of a warp

    std::uint64_t ideal() const { return static_cast<std::uint64_t>(bytes / 4); }
    std::string text() const { return std::to_string(bytes) + " bytes every " + std::to_string(stride); }
};

// 32 lanes of 4 bytes, 16 of 8, 8 of 16 are served at a time. 132 and 144: rows padded by one access.
constexpr Pattern kPatterns[] = {
    {4, 4, 1},   {4, 8, 2},   {4, 32, 8},   {4, 128, 32},  {4, 132, 1},  //
    {8, 8, 2},   {8, 16, 4},  {8, 64, 16},  {8, 128, 32},  {8, 136, 2},  //
    {16, 16, 4}, {16, 32, 8}, {16, 64, 16}, {16, 128, 32}, {16, 512, 32}, {16, 144, 4},
};

void load(int bytes, int byte) {
    if (bytes == 4) simt::load_shared_4(at(byte));
    if (bytes == 8) simt::load_shared_8(reinterpret_cast<const float*>(at(byte)));
    if (bytes == 16) simt::load_shared_16(at(byte));
}

__global__ void loads(int bytes, int stride) { load(bytes, stride * me()); }

TEST(BankConflicts, VectorLoads) {
    for (const Pattern& p : kPatterns)
        expect_count(counts(32, loads, p.bytes, p.stride)["vector loads"], p.wavefronts, p.ideal(), p.text());
}

// One word for all: a pass for all that are served together.
TEST(BankConflicts, Broadcast) {
    for (const int bytes : {4, 8, 16})
        expect_count(counts(32, loads, bytes, 0)["vector loads"], static_cast<unsigned>(bytes) / 4, static_cast<unsigned>(bytes) / 4,
                     std::to_string(bytes) + " bytes");
    // Two words of one bank, each for half of the lanes: lanes take turns, and so do the words.
    const auto two_words = +[](int pitch) { load_4(me() % 2 * pitch); };
    expect_count(counts(32, two_words, 1)["vector loads"], 1, 1, "neighbours");
    expect_count(counts(32, two_words, 32)["vector loads"], 2, 1, "one bank");
}

__global__ void stores(int bytes, int stride) {
    if (bytes == 4) simt::store_shared_4(at(stride * me()), 0);
    if (bytes == 16) simt::store_shared_16(at(stride * me()), uint4{});
}

TEST(BankConflicts, VectorStores) {
    for (const Pattern& p : kPatterns)
        if (p.bytes != 8) expect_count(counts(32, stores, p.bytes, p.stride)["vector stores"], p.wavefronts, p.ideal(), p.text());
}

__global__ void copies(TensorView<const float, 1> in, int bytes, int stride) {
    if (bytes == 4) ptx::cp_async<4>(at(stride * me()), &in(me()));
    if (bytes == 8) ptx::cp_async<8>(at(stride * me()), &in(2 * me()));
    if (bytes == 16) ptx::cp_async<16>(at(stride * me()), &in(4 * me()), me() % 2 == 0);  // zeros are written, too
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
}

TEST(BankConflicts, CpAsync) {
    alignas(16) static const float source[4 * 32] = {};
    for (const Pattern& p : kPatterns)
        expect_count(counts(32, copies, packed_view<const float, 1>("in", source, {4 * 32}), p.bytes, p.stride)["cp.async"], p.wavefronts,
                     p.ideal(), p.text());
}

// Where no lane of those that are served together takes part, there is no pass.
TEST(BankConflicts, PartOfAWarp) {
    expect_count(counts(32 + 8, loads, 16, 16)["vector loads"], 4 + 1, 4 + 1, "a warp and a quarter");
    expect_count(counts(32 + 9, loads, 16, 128)["vector loads"], 32 + 8 + 1, 4 + 2, "the same, one more lane, one bank group");
    expect_count(counts(32 + 8, loads, 4, 32)["vector loads"], 8 + 2, 1 + 1, "4 bytes");
    const auto some_lanes = +[](int first, int step) {
        if (me() >= first && me() % step == 0) simt::load_shared_8(reinterpret_cast<const float*>(at(64 * me())));
    };
    expect_count(counts(32, some_lanes, 16, 1)["vector loads"], 8, 1, "upper half");
    expect_count(counts(32, some_lanes, 0, 8)["vector loads"], 4, 2, "every 8th lane");
}

// ---------------------------------------------------------------- which accesses are put together

// The results differ, so that no compiler makes one load of both.
__global__ void two_branches() {
    volatile float x = 0.0f;
    if (me() % 2)
        x = load_4(63 - me()) * 2.0f;
    else
        x = load_4(me()) + 1.0f;
}

TEST(BankConflicts, BranchesAreDifferentRequests) { expect_count(counts(32, two_branches)["vector loads"], 2, 2, "two branches"); }

__global__ void trip_counts() {
    for (int k = 0; k <= me(); ++k) load_4(me() + 32 * k);
}

TEST(BankConflicts, TripCountsThatDifferByLane) { expect_count(counts(32, trip_counts)["vector loads"], 32, 32, "32 turns"); }

// 33 words a row: lane 0 passes twice, the others once. They meet again at the end of each row.
__global__ void ragged_rows(bool whole_block) {
    for (int r = 0; r < 10; ++r) {
        for (int c = me(); c < 33; c += 32) load_4(32 * r + c);
        if (whole_block)
            __syncthreads();
        else
            __syncwarp();
    }
}

TEST(BankConflicts, LanesAreAlignedAgainWhereTheyMeet) {
    for (const bool whole_block : {false, true}) expect_count(counts(32, ragged_rows, whole_block)["vector loads"], 20, 20, "ten rows");
}

__global__ void long_loop() {
    for (int k = 0; k < 1000; ++k) load_4(32 * (k % 100) + (k % 2 ? me() : me() % 16 * 2));
}

// Without a meeting: lanes must not run so far ahead that their accesses are no longer put together.
TEST(BankConflicts, LongLoop) { expect_count(counts(64, long_loop)["vector loads"], 2 * 1000, 2 * 1000, "1000 turns of two warps"); }

// ---------------------------------------------------------------- ldmatrix and stmatrix

/// Of matrix q lanes 8q .. 8q + 7 take 8-element column q of eight rows of `bytes`.
int row_of_matrix(int bytes, bool swizzle) {
    const int r = me() % 8, c = me() / 8;
    return r * bytes + 16 * (swizzle ? c ^ r : c);
}

__global__ void load_matrices(int bytes, bool swizzle) {
    std::uint32_t r[4];
    ptx::ldmatrix_x4(r, at(row_of_matrix(bytes, swizzle)));
}

__global__ void store_matrices(int bytes, bool swizzle) {
    const std::uint32_t r[4] = {};
    ptx::stmatrix(r, at(row_of_matrix(bytes, swizzle)));
}

TEST(BankConflicts, RowsOfWholeBankRowsCollide) {
    for (const int bytes : {128, 256, 512}) {
        const std::string text = std::to_string(bytes) + " bytes a row";
        expect_count(counts(32, load_matrices, bytes, false)["ldmatrix"], 4 * 8, 4, text);
        expect_count(counts(32, load_matrices, bytes, true)["ldmatrix"], 4, 4, text + ", swizzled");
        expect_count(counts(32, store_matrices, bytes, false)["stmatrix"], 4 * 8, 4, text);
        expect_count(counts(32, store_matrices, bytes, true)["stmatrix"], 4, 4, text + ", swizzled");
    }
}

// 64 bytes: every second row begins in the same bank. 144 (padding by one chunk): all differ.
TEST(BankConflicts, OtherRowLengths) {
    expect_count(counts(32, load_matrices, 64, false)["ldmatrix"], 4 * 4, 4, "64 bytes a row");
    expect_count(counts(32, load_matrices, 32, false)["ldmatrix"], 4 * 2, 4, "32 bytes a row");
    expect_count(counts(32, load_matrices, 16, false)["ldmatrix"], 4, 4, "16 bytes a row");
    expect_count(counts(32, load_matrices, 144, false)["ldmatrix"], 4, 4, "144 bytes a row");
    expect_count(counts(32, load_matrices, 272, false)["ldmatrix"], 4, 4, "272 bytes a row");
}

TEST(BankConflicts, EachMatrixIsItsOwnPass) {
    const auto kernel = +[](int pitch) {
        std::uint32_t r[2];
        ptx::ldmatrix_x2(r, at(pitch * (me() % 16)));
        ptx::ldmatrix_x2_trans(r, at(0));  // one address: one word a bank
    };
    expect_count(counts(64, kernel, 16)["ldmatrix"], 2 * (2 + 2), 2 * (2 + 2), "two warps");
    expect_count(counts(64, kernel, 128)["ldmatrix"], 2 * (16 + 2), 2 * (2 + 2), "two warps, one bank group");
}

// What lies in another block has banks of its own, and a way there.
TEST(BankConflicts, OtherBlocksOfAClusterAreNotCounted) {
    simt::Ledger ledger;
    simt::Execution exec;
    exec.ledger = &ledger;
    const auto kernel = +[] {
        ptx::cluster_sync();
        simt::load_shared_4(ptx::mapa(at(128 * me()), 1 - ptx::cluster_rank()));
        ptx::cluster_sync();
    };
    simt::launch(kernel, {.grid = {2}, .block = {32}, .smem = sizeof(Memory), .cluster = {2}, .exec = &exec});
    EXPECT_TRUE(ledger.shared().empty());
}

TEST(BankConflicts, CountsAreForgotten) {
    simt::Ledger ledger;
    simt::Execution exec;
    exec.ledger = &ledger;
    const simt::LaunchConfig config{.block = {32}, .smem = sizeof(Memory), .exec = &exec};
    simt::launch(loads, config, 4, 4);
    simt::launch(loads, config, 4, 4);
    expect_count(ledger.shared()["vector loads"], 2, 2, "two launches");
    ledger.clear();
    EXPECT_TRUE(ledger.shared().empty());
    exec.ledger = nullptr;
    simt::launch(loads, config, 4, 4);
    EXPECT_TRUE(ledger.shared().empty());
}

}  // namespace
