// What the emulator says of wrong uses of cp.async and ldmatrix. CPU build only.
#include "ptx/cp_async.hpp"
#include "ptx/ldmatrix.hpp"
#include "simt/ledger.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <regex>
#include <string>
#include <utility>
#include <vector>

namespace {

using simt::packed_view;
using simt::Schedule;
using simt::TensorView;
using Words = TensorView<const std::uint32_t, 1>;

constexpr Schedule kSchedules[] = {Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first};
constexpr int kThreads = 64;

/// Two slots of 16 bytes a thread.
struct Smem {
    alignas(16) std::uint32_t slot[2][4 * kThreads];
};

/// 2 * 64 pieces of 16 bytes.
alignas(16) const std::array<std::uint32_t, 8 * kThreads> kSource = [] {
    std::array<std::uint32_t, 8 * kThreads> words{};
    for (std::size_t e = 0; e < words.size(); ++e) words[e] = static_cast<std::uint32_t>(e + 1);
    return words;
}();

void run(void (*kernel)(Words), Schedule schedule = Schedule::round_robin, simt::Ledger* ledger = nullptr) {
    simt::Execution exec;
    exec.schedule = schedule;
    exec.ledger = ledger;
    simt::launch(kernel, {.name = "copies", .block = {kThreads}, .smem = sizeof(Smem), .exec = &exec},
                 packed_view<const std::uint32_t, 1>("in", kSource.data(), {8 * kThreads}));
}

/// Expects an E that says what `pattern` matches, under every schedule.
template <class E>
void expect_told(void (*kernel)(Words), const std::string& pattern) {
    for (const Schedule schedule : kSchedules) {
        SCOPED_TRACE(simt::name(schedule));
        try {
            run(kernel, schedule);
            ADD_FAILURE() << "nothing was noticed";
        } catch (const E& error) {
            EXPECT_TRUE(std::regex_search(error.what(), std::regex(pattern))) << error.what();
        } catch (const std::exception& error) {
            ADD_FAILURE() << "an exception of another type: " << error.what();
        }
    }
}

void copy(const Words& in, int slot, int piece) {
    ptx::cp_async<16>(&simt::shared<Smem>().slot[slot][4 * threadIdx.x], &in(4 * piece + 4 * static_cast<int>(threadIdx.x)));
}
uint4 read(int slot, int thread) { return simt::load_shared_16(&simt::shared<Smem>().slot[slot][4 * thread]); }
int me() { return static_cast<int>(threadIdx.x); }

// ---------------------------------------------------------------- waits

TEST(AsyncCopies, ReadWithoutAWait) {
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            read(0, me());
        },
        "16-byte load in copies: thread (0|32) of block \\(0,0,0\\) reads shared memory\\((0|512)\\) while the cp.async that thread (0|32) "
        "started to it is still under way: is a cp_async_wait\\(\\) missing");
}

TEST(AsyncCopies, TheFirstOfTwoGroupsHasLanded) {
    run([](Words in) {
        copy(in, 0, 0);
        ptx::cp_async_commit();
        copy(in, 1, kThreads);
        ptx::cp_async_commit();
        ptx::cp_async_wait<1>();
        if (read(0, me()).x != static_cast<std::uint32_t>(4 * me() + 1)) throw simt::Error("the first group has not landed");
        ptx::cp_async_wait<0>();
        if (read(1, me()).w != static_cast<std::uint32_t>(4 * kThreads + 4 * me() + 4)) throw simt::Error("the second has not landed");
    });
}

TEST(AsyncCopies, WaitThatLeavesTheGroupPending) {
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            copy(in, 1, kThreads);
            ptx::cp_async_commit();
            ptx::cp_async_wait<1>();
            read(1, me());
        },
        "reads shared memory\\(.*still under way: .* or does it leave too many groups pending\\?");
}

// cp.async.wait_group waits for groups that were committed, and for those alone.
TEST(AsyncCopies, CommitForgotten) {
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_wait<0>();
            read(0, me());
        },
        "still under way");
}

// Who peeks at memory under way in a manner that the emulator cannot check sees NaN, whatever was there before.
TEST(AsyncCopies, DestinationIsPoisonedUntilTheWait) {
    run([](Words in) {
        Smem& smem = simt::shared<Smem>();
        smem.slot[0][4 * threadIdx.x] = 7;
        copy(in, 0, 0);
        ptx::cp_async_commit();
        if (smem.slot[0][4 * threadIdx.x] != 0xffffffffu) throw simt::Error("not poisoned");
        ptx::cp_async_wait<0>();
        if (smem.slot[0][4 * threadIdx.x] != static_cast<std::uint32_t>(4 * me() + 1)) throw simt::Error("not landed");
    });
}

TEST(AsyncCopies, NothingLandsAfterTheBlockHasEnded) {
    // A copy that nobody waits for must not mark the memory of the next block, nor be written to it.
    simt::Execution exec;
    exec.workers = 1;
    const auto kernel = +[](Words in) {
        if (blockIdx.x == 0) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
        } else {
            read(0, me());
        }
    };
    simt::launch(kernel, {.grid = {3}, .block = {kThreads}, .smem = sizeof(Smem), .exec = &exec},
                 packed_view<const std::uint32_t, 1>("in", kSource.data(), {8 * kThreads}));
}

// Each word of an access counts, not only its first.
TEST(AsyncCopies, PartOfAChunkUnderWay) {
    expect_told<simt::Error>(
        [](Words in) {
            ptx::cp_async<4>(&simt::shared<Smem>().slot[0][4 * threadIdx.x + 2], &in(me()));
            ptx::cp_async_commit();
            read(0, me());
        },
        "reads shared memory\\((8|520)\\) while the cp.async that thread (0|32) started to it is still under way");
}

TEST(AsyncCopies, WriteToAnAddressUnderWay) {
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            simt::store_shared_4(&simt::shared<Smem>().slot[0][4 * threadIdx.x + 1], 1);
        },
        "4-byte store in copies: thread [0-9]+ of block \\(0,0,0\\) writes shared memory\\([0-9]+\\) while the cp.async");
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            copy(in, 0, kThreads);  // which of the two lands last is not defined
        },
        "cp.async in copies: thread [0-9]+ of block \\(0,0,0\\) writes shared memory\\([0-9]+\\) while the cp.async");
}

TEST(AsyncCopies, RaceForTheLastWordOfAChunk) {
    expect_told<simt::Race>(
        [](Words) {
            simt::store_shared_4(&simt::shared<Smem>().slot[0][4 * (kThreads - 1 - me()) + 3], 1);
            read(0, me());
        },
        "race in copies: .* shared memory\\([0-9]+\\), which .*__syncthreads");
}

// ---------------------------------------------------------------- barriers

// A wait is a thread's own: what others copied needs a barrier on top.
TEST(AsyncCopies, NoBarrierAfterTheWait) {
    expect_told<simt::Race>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            read(0, kThreads - 1 - me());
        },
        "race in copies: thread [0-9]+ of block \\(0,0,0\\) (reads|writes) shared memory\\([0-9]+\\), which (thread [0-9]+|lanes of warp "
        "[01]) (wrote|read), and no barrier lies between: is a __syncthreads\\(\\) missing");
}

TEST(AsyncCopies, BarrierBeforeTheWaitIsNoHelp) {
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            __syncthreads();
            read(0, kThreads - 1 - me());
        },
        "reads shared memory\\(.*still under way");
    expect_told<simt::Error>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            __syncthreads();
            ptx::cp_async_wait<0>();
            read(0, kThreads - 1 - me());
        },
        "race in copies|still under way");
}

TEST(AsyncCopies, SlotReusedBeforeABarrier) {
    expect_told<simt::Race>(
        [](Words in) {
            copy(in, 0, 0);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            read(0, kThreads - 1 - me());
            copy(in, 0, kThreads);  // the thread at the other end may not have read it yet
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
        },
        "race in copies: thread [0-9]+ of block \\(0,0,0\\) (writes|reads) shared memory\\([0-9]+\\), which thread [0-9]+ (read|wrote), "
        "and "
        "no barrier lies between");
}

TEST(AsyncCopies, SlotReusedAfterABarrier) {
    for (const Schedule schedule : kSchedules)
        run(
            [](Words in) {
                for (int n = 0; n < 2; ++n) {
                    copy(in, 0, n * kThreads);
                    ptx::cp_async_commit();
                    ptx::cp_async_wait<0>();
                    __syncthreads();
                    const std::uint32_t want = static_cast<std::uint32_t>(4 * (n * kThreads + kThreads - 1 - me()) + 1);
                    if (read(0, kThreads - 1 - me()).x != want) throw simt::Error("wrong data");
                    __syncthreads();
                }
            },
            schedule);
}

// ---------------------------------------------------------------- addresses

TEST(AsyncCopies, MisalignedSharedAddress) {
    expect_told<simt::Error>([](Words in) { ptx::cp_async<16>(&simt::shared<Smem>().slot[0][1], &in(0)); },
                             "cp.async: shared memory address 4 is not a multiple of 16, by thread [0-9]+ of block \\(0,0,0\\)");
    expect_told<simt::Error>([](Words in) { ptx::cp_async<8>(&simt::shared<Smem>().slot[0][3], &in(0)); },
                             "cp.async: shared memory address 12 is not a multiple of 8");
}

TEST(AsyncCopies, MisalignedGlobalAddress) {
    expect_told<simt::Error>([](Words in) { ptx::cp_async<16>(&simt::shared<Smem>().slot[0][0], &in(2)); },
                             "cp.async: the global address is not a multiple of 16, by thread [0-9]+ of block \\(0,0,0\\)");
}

TEST(AsyncCopies, DestinationOutsideOfSharedMemory) {
    expect_told<simt::Error>(
        [](Words in) {
            alignas(16) std::uint32_t mine[4];
            ptx::cp_async<16>(mine, &in(0));
        },
        "cp.async: the address is not in the 2048 bytes of the block's shared memory");
    expect_told<simt::Error>([](Words in) { ptx::cp_async<16>(&simt::shared<Smem>().slot[1][4 * kThreads], &in(0)); },
                             "cp.async: the address is not in the 2048 bytes");
}

TEST(AsyncCopies, SourcePastTheEndOfItsRow) {
    expect_told<simt::Error>([](Words in) { ptx::cp_async<16>(&simt::shared<Smem>().slot[0][0], &in(8 * kThreads - 2)); },
                             "out of bounds: 4 elements at once from in, of whose row 2 are left, by thread [0-9]+");
}

TEST(AsyncCopies, LdmatrixAddresses) {
    expect_told<simt::Error>(
        [](Words) {
            std::uint32_t r[4];
            ptx::ldmatrix_x4(r, &simt::shared<Smem>().slot[0][2]);
        },
        "ldmatrix.x4: shared memory address 8 is not a multiple of 16, by thread");
    expect_told<simt::Error>(
        [](Words) {
            std::uint32_t r[2];
            ptx::ldmatrix_x2_trans(r, &simt::shared<Smem>().slot[1][4 * kThreads]);
        },
        "ldmatrix.x2.trans: the address is not in the 2048 bytes of the block's shared memory, by thread");
    expect_told<simt::Error>(
        [](Words) {
            std::uint32_t r[2];
            if (me() % 32 < 16)
                ptx::ldmatrix_x2(r, &simt::shared<Smem>().slot[0][0]);
            else
                ptx::ldmatrix_x2_trans(r, &simt::shared<Smem>().slot[0][0]);
        },
        "divergence");
}

// The addresses of lanes that name no row are not looked at.
TEST(AsyncCopies, LdmatrixX2TakesTheAddressesOfSixteenLanes) {
    run([](Words) {
        std::uint32_t r[2];
        ptx::ldmatrix_x2(r, me() % 32 < 16 ? &simt::shared<Smem>().slot[0][4 * (me() % 16)] : nullptr);
    });
}

TEST(AsyncCopies, LdmatrixSeesWhatIsUnderWay) {
    expect_told<simt::Error>(
        [](Words in) {
            std::uint32_t r[4];
            copy(in, 0, 0);
            ptx::cp_async_commit();
            ptx::ldmatrix_x4(r, &simt::shared<Smem>().slot[0][4 * me()]);
        },
        "ldmatrix.x4 in copies: thread [0-9]+ of block \\(0,0,0\\) reads shared memory\\([0-9]+\\) while the cp.async");
}

// ---------------------------------------------------------------- the ledger

TEST(AsyncCopies, OnlyValidCopiesAreCharged) {
    simt::Ledger ledger;
    run(
        [](Words in) {
            ptx::cp_async<16>(&simt::shared<Smem>().slot[0][4 * threadIdx.x], &in(4 * me()), me() % 4 != 0);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
        },
        Schedule::round_robin, &ledger);
    EXPECT_EQ(ledger.row("in").read.requested, 16u * kThreads * 3 / 4);
}

}  // namespace
