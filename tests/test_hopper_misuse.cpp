// What the emulator says of wrong uses of Hopper's wrappers, and what it counts of TMA. CPU build only.
#include "ptx/acquire_release.hpp"
#include "ptx/barrier.hpp"
#include "ptx/cluster.hpp"
#include "ptx/cp_async_bulk.hpp"
#include "ptx/fence.hpp"
#include "ptx/setmaxnreg.hpp"
#include "ptx/stmatrix.hpp"
#include "ptx/wgmma.hpp"
#include "simt/ledger.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <regex>
#include <string>
#include <vector>

namespace {

using ptx::Mbarrier;
using ptx::Swizzle;
using ptx::TensorMap;
using simt::Deadlock;
using simt::Error;
using simt::Race;
using simt::Schedule;

constexpr Schedule kSchedules[] = {Schedule::round_robin, Schedule::lowest_first, Schedule::highest_first};

/// Two slots for boxes of 64 rows of 64 half numbers: 8192 bytes each.
struct Smem {
    alignas(1024) unsigned char slot[2][8192];
    Mbarrier full[2], empty[2];
};
constexpr unsigned kBox = 8192;

/// 128 rows of 64 elements, all 1, and maps to read and to write it.
struct Tensor {
    std::vector<__half> storage = std::vector<__half>(128 * 64 + 8, __half(1.0f));
    __half* data = reinterpret_cast<__half*>((reinterpret_cast<std::uintptr_t>(storage.data()) + 15) / 16 * 16);
    TensorMap map = ptx::make_tensor_map<__half, 2>("T", data, {64, 128}, {64}, {64, 64}, Swizzle::bytes_128);
};

using Kernel = void (*)(TensorMap);

void run(Kernel kernel, Schedule schedule = Schedule::round_robin, unsigned threads = 128, unsigned cluster = 1,
         simt::Ledger* ledger = nullptr) {
    Tensor tensor;
    simt::Execution exec;
    exec.schedule = schedule;
    exec.ledger = ledger;
    simt::launch(kernel,
                 {.name = "misuse", .grid = {cluster}, .block = {threads}, .smem = sizeof(Smem), .cluster = {cluster}, .exec = &exec},
                 tensor.map);
}

/// Expects an E that says what `pattern` matches, under one schedule.
template <class E>
void expect_told_under(Schedule schedule, Kernel kernel, const std::string& pattern, unsigned threads = 128, unsigned cluster = 1) {
    SCOPED_TRACE(simt::name(schedule));
    try {
        run(kernel, schedule, threads, cluster);
        ADD_FAILURE() << "nothing was noticed";
    } catch (const E& error) {
        EXPECT_TRUE(std::regex_search(error.what(), std::regex(pattern))) << error.what();
    } catch (const std::exception& error) {
        ADD_FAILURE() << "an exception of another type: " << error.what();
    }
}
/// The same under every schedule.
template <class E>
void expect_told(Kernel kernel, const std::string& pattern, unsigned threads = 128, unsigned cluster = 1) {
    for (const Schedule schedule : kSchedules) expect_told_under<E>(schedule, kernel, pattern, threads, cluster);
}
void expect_fine(Kernel kernel, unsigned threads = 128, unsigned cluster = 1) {
    for (const Schedule schedule : kSchedules) EXPECT_NO_THROW(run(kernel, schedule, threads, cluster)) << simt::name(schedule);
}

int me() { return static_cast<int>(threadIdx.x); }
Smem& smem() { return simt::shared<Smem>(); }
void set_up(unsigned arrivals = 1) {
    if (me() == 0) {
        for (int s = 0; s < 2; ++s) {
            ptx::mbarrier_init(smem().full[s], arrivals, "full", s);
            ptx::mbarrier_init(smem().empty[s], arrivals, "empty", s);
        }
        ptx::fence_mbarrier_init();
    }
    __syncthreads();
}
void load(const TensorMap& map, int slot, unsigned expect = kBox) {
    ptx::mbarrier_arrive_expect_tx(smem().full[slot], expect);
    ptx::cp_async_bulk_tensor_load(smem().slot[slot], map, {0, 0}, smem().full[slot]);
}
/// Ordinary stores of 1 to a whole slot, by the block.
void fill(int slot) {
    constexpr std::uint32_t kOnes = 0x3c003c00;  // two numbers
    for (unsigned at = 4 * threadIdx.x; at < kBox; at += 4 * blockDim.x) simt::store_shared_4(smem().slot[slot] + at, kOnes);
}
ptx::MatrixDescriptor descriptor(int slot) { return ptx::MatrixDescriptor::of({.start = smem().slot[slot], .stride = 1024}); }
/// D (64, 64) = A B^T of slots 0 and 1.
void issue(float (&d)[32], bool accumulate = false) { ptx::wgmma<__half, 64>(d, descriptor(0), descriptor(1), accumulate); }

// ---------------------------------------------------------------- mbarrier

TEST(HopperMisuse, BarrierWithoutInit) {
    expect_told<Error>([](TensorMap) { ptx::mbarrier_wait(smem().full[0], 0); }, "mbarrier.try_wait: there was no mbarrier_init\\(\\)");
    expect_told<Error>([](TensorMap) { ptx::mbarrier_arrive(smem().full[1]); }, "mbarrier.arrive: there was no mbarrier_init\\(\\)");
}

TEST(HopperMisuse, BarrierInitialisedTwice) {
    expect_told<Error>(
        [](TensorMap) {
            set_up();
            if (me() == 5) ptx::mbarrier_init(smem().full[0], 1, "again");
        },
        "mbarrier.init: barrier again is initialised again, by thread 5");
}

TEST(HopperMisuse, MoreArrivalsThanAPhaseHas) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            if (me() != 0) return;
            load(map, 1);
            ptx::mbarrier_arrive(smem().full[1]);  // while the bytes are still missing
        },
        "mbarrier.arrive: more than the 1 arrivals that barrier full\\[1\\] was initialised for, in phase 0, by thread 0");
}

TEST(HopperMisuse, DeadlockNamesTheBarrierItsPhaseAndWhatIsMissing) {
    expect_told<Deadlock>(
        [](TensorMap) {
            set_up(3);
            if (me() < 2) ptx::mbarrier_arrive(smem().empty[1]);
            if (me() >= 64) ptx::mbarrier_wait(smem().empty[1], 0);
        },
        "deadlock in misuse, block \\(0,0,0\\): 64 of 128 threads wait for ever\n  64 wait at barrier empty\\[1\\], waiting for phase 0 "
        "\\(1 of 3 arrivals missing\\): threads 64-127\n  64 have returned");
}

TEST(HopperMisuse, TheOtherParityWaitsForever) {
    expect_told<Deadlock>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) load(map, 0);
            ptx::mbarrier_wait(smem().full[0], 0);
            ptx::mbarrier_wait(smem().full[0], 1);  // the phase after it, to which nobody arrives
        },
        "128 wait at barrier full\\[0\\], waiting for phase 1 \\(1 of 1 arrivals missing\\)");
}

TEST(HopperMisuse, TooManyBytesAnnounced) {
    expect_told<Deadlock>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) load(map, 1, kBox + 4096);
            ptx::mbarrier_wait(smem().full[1], 0);
        },
        "128 wait at barrier full\\[1\\], waiting for phase 0 \\(4096 bytes have not landed\\)");
}

TEST(HopperMisuse, TooFewBytesAnnounced) {
    expect_told<Deadlock>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) load(map, 1, kBox - 4096);
            ptx::mbarrier_wait(smem().full[1], 0);
        },
        "full\\[1\\], waiting for phase 0 \\(4096 bytes more have landed than were announced\\)");
}

// ---------------------------------------------------------------- TMA loads

TEST(HopperMisuse, LoadReadWithoutAWait) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) load(map, 0);
            __syncthreads();
            simt::load_shared_4(smem().slot[0] + 4 * me());
        },
        "4-byte load in misuse: .* reads shared memory\\([0-9]+\\) while the TMA load that thread 0 started to it is still under way: is "
        "an "
        "mbarrier_wait\\(\\) missing\\?");
}

TEST(HopperMisuse, DestinationOfALoadIsPoisonedUntilTheWait) {
    expect_fine([](TensorMap map) {
        set_up();
        if (me() == 0) {
            smem().slot[0][17] = 3;
            load(map, 0);
        }
        __syncthreads();
        if (smem().slot[0][17] != 0xff) throw Error("not poisoned");
        ptx::mbarrier_wait(smem().full[0], 0);
        if (smem().slot[0][17] != 0x3c) throw Error("not landed");
    });
}

TEST(HopperMisuse, LoadAfterAnUnannouncedInit) {
    expect_told<Error>(
        [](TensorMap map) {
            if (me() != 0) return;
            ptx::mbarrier_init(smem().full[0], 1, "full");
            load(map, 0);
        },
        "TMA load: barrier full was initialised without a fence_mbarrier_init\\(\\)");
}

TEST(HopperMisuse, LoadThatNobodyWaitsFor) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) load(map, 1);
        },
        "TMA load in misuse: thread 0 started a load that announces itself to barrier full\\[1\\], and its block has ended");
}

TEST(HopperMisuse, LoadToAnUnalignedPlace) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_tensor_load(smem().slot[0] + 128, map, {0, 0}, smem().full[0]);
        },
        "TMA load: a box of 8192 bytes at shared memory\\(128\\): multiples of 1024");
}

TEST(HopperMisuse, LoadOverARunningLoad) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up(2);
            if (me() == 0) load(map, 0);
            if (me() == 0) load(map, 0);
        },
        "TMA load in misuse: thread 0 of .* overwrites shared memory\\(0\\) while the TMA load that thread 0");
}

TEST(HopperMisuse, LoadOverWhatOthersStillRead) {
    expect_told_under<Race>(
        Schedule::lowest_first,
        [](TensorMap map) {
            set_up();
            fill(0);
            __syncthreads();
            if (me() == 5) simt::load_shared_4(smem().slot[0] + 256);
            ptx::bar_sync(1 + me() / 64, 64);
            if (me() == 100) load(map, 0);  // after a barrier that thread 5 was not at
        },
        "race in misuse: thread 100 of block \\(0,0,0\\) writes shared memory\\(256\\), which thread 5 read");
}

TEST(HopperMisuse, WrongRank) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_tensor_load(smem().slot[0], map, {0, 0, 0}, smem().full[0]);
        },
        "TMA: 3 coordinates for a tensor map of rank 2");
}

TEST(HopperMisuse, NegativeCoordinateOfAStore) {
    expect_told<Error>(
        [](TensorMap map) {
            if (me() == 0) ptx::cp_async_bulk_tensor_store(map, {0, -1}, smem().slot[0]);
        },
        "TMA: coordinate 1 = -1 of a store: 0 or more is accepted");
}

TEST(HopperMisuse, UnalignedCoordinate) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_tensor_load(smem().slot[0], map, {4, 0}, smem().full[0]);
        },
        "TMA: coordinate 0 = 4 is 8 bytes into the rows: multiples of 16 are accepted");
}

// ---------------------------------------------------------------- TMA stores and the proxy fence

template <bool kFence, bool kBarrier, bool kFenceAfterwards = false>
void store(TensorMap map) {
    fill(0);
    if (kFence) ptx::fence_proxy_async();
    if (kBarrier) __syncthreads();
    if (me() == 64) {
        if (kFenceAfterwards) ptx::fence_proxy_async();
        ptx::cp_async_bulk_tensor_store(map, {0, 0}, smem().slot[0]);
        ptx::cp_async_bulk_commit();
        ptx::cp_async_bulk_wait<0>();
    }
}

TEST(HopperMisuse, StoreWithoutTheProxyFence) {
    expect_told<Error>(store<false, true>,
                       "TMA store in misuse: thread 64 .* reads shared memory\\(0\\), which thread 0 wrote with ordinary stores, and no "
                       "fence_proxy_async\\(\\) lies between");
    expect_fine(store<true, true>);
    expect_fine(store<false, true, true>);
}

TEST(HopperMisuse, StoreWithoutABarrier) {
    // Thread 64 runs after those below it.
    expect_told_under<Race>(Schedule::lowest_first, store<true, false>,
                            "race in misuse: thread 64 of block \\(0,0,0\\) reads shared memory\\([0-9]+\\), which thread [0-9]+ wrote");
}

TEST(HopperMisuse, FencesTravelThroughNamedBarriersAndMbarriers) {
    expect_fine([](TensorMap map) {
        set_up(96);
        fill(0);
        ptx::fence_proxy_async();
        if (me() < 64) {
            ptx::bar_sync(3, 64);
            if (me() < 32) ptx::mbarrier_arrive(smem().empty[0]);
        } else {
            ptx::mbarrier_arrive(smem().empty[0]);
        }
        if (me() != 127) return;
        ptx::mbarrier_wait(smem().empty[0], 0);
        ptx::cp_async_bulk_tensor_store(map, {0, 0}, smem().slot[0]);
        ptx::cp_async_bulk_commit();
        ptx::cp_async_bulk_wait_read<0>();
    });
    expect_told<Race>(
        [](TensorMap map) {
            set_up(64);
            fill(0);
            ptx::fence_proxy_async();
            if (me() >= 64) ptx::mbarrier_arrive(smem().empty[0]);  // the others do not
            if (me() != 127) return;
            ptx::mbarrier_wait(smem().empty[0], 0);
            ptx::cp_async_bulk_tensor_store(map, {0, 0}, smem().slot[0]);
        },
        "thread 127 of block \\(0,0,0\\) reads shared memory\\([0-9]+\\), which thread [0-9]+ wrote");
}

TEST(HopperMisuse, SourceOfAStoreOverwritten) {
    expect_told<Error>(
        [](TensorMap map) {
            store<true, false>(map);  // nobody is 64
            if (me() != 0) return;
            ptx::cp_async_bulk_tensor_store(map, {0, 0}, smem().slot[0]);
            ptx::cp_async_bulk_commit();
            simt::store_shared_4(smem().slot[0], 0);
        },
        "4-byte store in misuse: thread 0 .* writes shared memory\\(0\\) while a wgmma, a store by TMA or a copy to another block has yet "
        "to read it",
        1);
}

TEST(HopperMisuse, StoreThatNobodyWaitsFor) {
    const auto pattern = "TMA store in misuse: thread 0 of block \\(0,0,0\\) returns while a store has yet to read shared memory";
    expect_told<Error>(
        [](TensorMap map) {
            ptx::cp_async_bulk_tensor_store(map, {0, 0}, smem().slot[0]);
            ptx::cp_async_bulk_commit();
        },
        pattern, 1);
    expect_told<Error>(
        [](TensorMap map) {
            ptx::cp_async_bulk_tensor_store(map, {0, 0}, smem().slot[0]);
            ptx::cp_async_bulk_wait<0>();  // nothing was committed
        },
        pattern, 1);
}

// ---------------------------------------------------------------- bulk reductions

/// A kernel over floats, all of them 1.
template <class E>
void expect_told_of_floats(void (*kernel)(simt::TensorView<float, 1>), const std::string& pattern) {
    constexpr int count = 64;
    for (const Schedule schedule : kSchedules) {
        std::vector<float> storage(static_cast<std::size_t>(count) + 4, 1.0f);
        auto* const data = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(storage.data()) + 15) / 16 * 16);
        simt::Execution exec;
        exec.schedule = schedule;
        try {
            simt::launch(kernel, {.name = "misuse", .grid = {1}, .block = {128}, .smem = sizeof(Smem), .exec = &exec},
                         simt::packed_view<float, 1>("F", data, {count}));
            ADD_FAILURE() << "nothing was noticed";
        } catch (const E& error) {
            EXPECT_TRUE(std::regex_search(error.what(), std::regex(pattern))) << error.what();
        }
    }
}
float* floats(int slot) { return reinterpret_cast<float*>(smem().slot[slot]); }

TEST(HopperMisuse, BulkReductionOfUnalignedMemory) {
    expect_told_of_floats<Error>([](simt::TensorView<float, 1> F) { ptx::cp_reduce_async_bulk_add(&F(2), floats(0), 8); },
                                 "TMA store: 32 bytes of F, at address modulo 16 = 8: multiples of 16 bytes are accepted, by thread ");
    expect_told_of_floats<Error>([](simt::TensorView<float, 1> F) { ptx::cp_reduce_async_bulk_add(&F(0), floats(0) + 1, 8); },
                                 "TMA store: a box of 32 bytes at shared memory\\(4\\): multiples of 16 within");
    expect_told_of_floats<Error>([](simt::TensorView<float, 1> F) { ptx::cp_reduce_async_bulk_add(&F(0), floats(0), 6); },
                                 "TMA store: 24 bytes of F, at address modulo 16 = 0: multiples of 16 bytes are accepted");
}

TEST(HopperMisuse, BulkReductionPastTheEnd) {
    expect_told_of_floats<Error>([](simt::TensorView<float, 1> F) { ptx::cp_reduce_async_bulk_add(&F(0), floats(0), 68); },
                                 "out of bounds: 68 elements at once from F, of whose row 64 are left");
}

TEST(HopperMisuse, BulkReductionWithoutTheProxyFence) {
    expect_told_of_floats<Error>(
        [](simt::TensorView<float, 1> F) {
            fill(0);
            __syncthreads();
            if (me() != 64) return;
            ptx::cp_reduce_async_bulk_add(&F(0), floats(0), 64);
            ptx::cp_async_bulk_commit();
            ptx::cp_async_bulk_wait<0>();
        },
        "TMA store in misuse: thread 64 .* wrote with ordinary stores, and no fence_proxy_async\\(\\) lies between");
}

TEST(HopperMisuse, SourceOfABulkReductionOverwritten) {
    expect_told_of_floats<Error>(
        [](simt::TensorView<float, 1> F) {
            fill(0);
            ptx::fence_proxy_async();
            __syncthreads();
            if (me() == 0) {
                ptx::cp_reduce_async_bulk_add(&F(0), floats(0), 64);
                ptx::cp_async_bulk_commit();
                simt::store_shared_4(floats(0), 0);
            }
        },
        "4-byte store in misuse: thread 0 .* writes shared memory\\(0\\) while a wgmma, a store by TMA or a copy to another block has yet "
        "to read it");
}

TEST(HopperMisuse, BulkReductionIntoWhatIsOnlyRead) {
    std::vector<float> storage(68, 1.0f);
    const auto* const data = reinterpret_cast<float*>((reinterpret_cast<std::uintptr_t>(storage.data()) + 15) / 16 * 16);
    const auto kernel = +[](simt::TensorView<const float, 1> F) { ptx::cp_reduce_async_bulk_add(&F(0), floats(0), 64); };
    try {
        simt::launch(kernel, {.name = "misuse", .grid = {1}, .block = {1}, .smem = sizeof(Smem)},
                     simt::packed_view<const float, 1>("F", data, {64}));
        ADD_FAILURE() << "nothing was noticed";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("of a tensor that is only read"), std::string::npos) << error.what();
    }
}

// ---------------------------------------------------------------- wgmma

template <class F>
void with_operands(F f) {
    set_up();
    fill(0);
    fill(1);
    ptx::fence_proxy_async();
    __syncthreads();
    float d[32];
    for (float& x : d) x = 5.0f;
    f(d);
}

TEST(HopperMisuse, AccumulatorsAreNaNUntilTheWait) {
    expect_fine([](TensorMap) {
        with_operands([](float(&d)[32]) {
            ptx::wgmma_fence();
            issue(d, true);
            ptx::wgmma_commit();
            for (const float x : d)
                if (!std::isnan(x)) throw Error("not poisoned");
            ptx::wgmma_wait<0>();
            for (const float x : d)
                if (x != 5.0f + 16.0f) throw Error("wrong: " + std::to_string(x));
        });
    });
}

TEST(HopperMisuse, WaitThatLeavesTheGroupPending) {
    expect_fine([](TensorMap) {
        with_operands([](float(&d)[32]) {
            float e[32] = {};
            ptx::wgmma_fence();
            issue(d);
            ptx::wgmma_commit();
            issue(e);
            ptx::wgmma_commit();
            ptx::wgmma_wait<1>();
            if (d[7] != 16.0f || !std::isnan(e[7])) throw Error("the first group is complete, the second is not");
            ptx::wgmma_wait<0>();
            if (e[7] != 16.0f) throw Error("the second group is complete too");
        });
    });
}

TEST(HopperMisuse, OperandsAreReadInTheWait) {
    expect_fine([](TensorMap) {
        with_operands([](float(&d)[32]) {
            ptx::wgmma_fence();
            issue(d);
            ptx::wgmma_commit();
            __syncthreads();
            smem().slot[1][2 * (me() % 64) + 1] = 0;  // column 0 of B, behind the back of the checks
            ptx::wgmma_wait<0>();
            if (me() == 0 && (d[0] != 0.0f || d[1] != 16.0f)) throw Error("B was read too early");
        });
    });
}

TEST(HopperMisuse, OperandOverwrittenBeforeTheWait) {
    expect_told<Error>(
        [](TensorMap map) {
            with_operands([&](float(&d)[32]) {
                ptx::wgmma_fence();
                issue(d);
                ptx::wgmma_commit();
                __syncthreads();
                if (me() == 96) load(map, 1);
                ptx::wgmma_wait<0>();
            });
        },
        "TMA load in misuse: thread 96 .* writes shared memory\\(8192\\) while a wgmma, a store by TMA or a copy to another block has yet "
        "to read it");
}

TEST(HopperMisuse, OperandStillOnItsWay) {
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            float d[32] = {};
            if (me() == 0) load(map, 0);
            if (me() == 0) load(map, 1);
            __syncthreads();
            ptx::mbarrier_wait(smem().full[0], 0);
            ptx::wgmma_fence();
            issue(d);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
        },
        "wgmma in misuse: .* reads shared memory\\(8192\\) while the TMA load that thread 0 started");
}

TEST(HopperMisuse, OperandsWithoutTheProxyFence) {
    expect_told<Error>(
        [](TensorMap) {
            fill(0);
            fill(1);
            __syncthreads();
            float d[32] = {};
            ptx::wgmma_fence();
            issue(d);
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
        },
        "wgmma in misuse: .* with ordinary stores, and no fence_proxy_async\\(\\)");
}

TEST(HopperMisuse, AccumulatorWrittenInFlight) {
    expect_told<Error>(
        [](TensorMap) {
            with_operands([](float(&d)[32]) {
                ptx::wgmma_fence();
                issue(d);
                ptx::wgmma_commit();
                d[3] = 0.0f;
                ptx::wgmma_wait<0>();
            });
        },
        "wgmma in misuse: an accumulator was written while the wgmma was under way");
}

TEST(HopperMisuse, WgmmaWithoutAFence) {
    expect_told<Error>([](TensorMap) { with_operands([](float(&d)[32]) { issue(d); }); }, "issues one without a wgmma_fence\\(\\)");
    expect_told<Error>(
        [](TensorMap) {
            with_operands([](float(&d)[32]) {
                ptx::wgmma_fence();
                issue(d);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
                d[0] *= 2.0f;
                issue(d, true);
            });
        },
        "issues one without a wgmma_fence\\(\\)");
}

TEST(HopperMisuse, WgmmaWithoutAWait) {
    expect_told<Error>(
        [](TensorMap) {
            with_operands([](float(&d)[32]) {
                ptx::wgmma_fence();
                issue(d);
                ptx::wgmma_commit();
            });
        },
        "returns while a wgmma is under way: is a wgmma_wait\\(\\) missing\\?");
}

TEST(HopperMisuse, LanesOfAWarpgroupDisagree) {
    expect_told<Error>(
        [](TensorMap) {
            with_operands([](float(&d)[32]) {
                ptx::wgmma_fence();
                issue(d, me() == 77);
                ptx::wgmma_commit();
                ptx::wgmma_wait<0>();
            });
        },
        "warpgroup divergence: lanes 0 and 77 of the warpgroup of .* have issued different wgmmas");
    expect_told<Error>(
        [](TensorMap) {
            if (me() < 64)
                ptx::wgmma_wait<0>();
            else
                ptx::setmaxnreg_dec<24>();
        },
        "warpgroup divergence: thread [0-9]+ .* is at (wgmma.wait_group|setmaxnreg.dec) while other lanes");
}

TEST(HopperMisuse, AWarpOfAWarpgroupIsMissing) {
    expect_told<Deadlock>(
        [](TensorMap) {
            if (me() < 96) ptx::wgmma_wait<0>();
        },
        "96 wait at wgmma.wait_group: threads 0-95");
    expect_told<Error>([](TensorMap) { ptx::wgmma_wait<0>(); },
                       "wgmma.wait_group: a warpgroup is 128 threads, the last one of a block of 96", 96);
}

TEST(HopperMisuse, DescriptorPastTheEnd) {
    expect_told<Error>(
        [](TensorMap) {
            float d[32] = {};
            ptx::wgmma_fence();
            ptx::wgmma<__half, 64>(d, descriptor(0), descriptor(1).advance(2048), false);
        },
        "wgmma: a descriptor of B leads to shared memory\\([0-9]+\\), the block has [0-9]+ bytes");
}

// ---------------------------------------------------------------- named barriers, registers

TEST(HopperMisuse, NamedBarriers) {
    expect_told<Error>([](TensorMap) { ptx::bar_sync(0, 128); }, "bar.sync 0: barriers 1 to 15 are accepted");
    expect_told<Error>([](TensorMap) { ptx::bar_sync(16, 128); }, "bar.sync 16: barriers 1 to 15");
    expect_told<Error>([](TensorMap) { ptx::bar_sync(1, 48); }, "bar.sync 1: 48 threads: multiples of 32");
    expect_told<Error>([](TensorMap) { ptx::bar_sync(1, 256); }, "bar.sync 1: 256 threads: multiples of 32 up to the 128");
    expect_told<Error>([](TensorMap) { ptx::bar_sync(2, me() < 64 ? 128 : 96); },
                       "bar.sync 2: thread [0-9]+ .* names (96|128) threads, others named");
    expect_told<Error>(
        [](TensorMap) {
            ptx::bar_arrive(4, 128);
            if (me() == 0) ptx::bar_arrive(4, 128);
        },
        "bar.arrive 4: thread 0 .* arrives again|deadlock");
    expect_told<Deadlock>(
        [](TensorMap) {
            if (me() < 64) ptx::bar_sync(5, 96);
        },
        "64 wait at bar.sync 5 \\(64 of 96 threads are there\\): threads 0-63\n  64 have returned");
}

TEST(HopperMisuse, RacesAreSeenPastNamedBarriers) {
    const auto kernel = []<bool kBarrier>(TensorMap) {
        ptx::bar_sync(1, 128);  // from here on others than block-wide barriers count
        simt::store_shared_4(smem().slot[0] + 4 * me(), 1);
        if (kBarrier) ptx::bar_sync(2 + me() / 64, 64);
        simt::load_shared_4(smem().slot[0] + 4 * (me() ^ 32));
    };
    static constexpr auto checked = kernel;
    expect_fine([](TensorMap map) { checked.template operator()<true>(map); });
    expect_told<Race>([](TensorMap map) { checked.template operator()<false>(map); },
                      "race in misuse: thread [0-9]+ .* (reads|writes) shared memory");
}

TEST(HopperMisuse, Registers) {
    // 65536 / 256 threads: 256 each, so nothing is left to take.
    expect_told<Deadlock>(
        [](TensorMap) {
            if (me() < 128)
                ptx::setmaxnreg_dec<152>();
            else
                ptx::setmaxnreg_inc<248>();
        },
        "128 wait at setmaxnreg.inc \\(too few registers are free\\): threads 128-255", 384);
    expect_told<Error>([](TensorMap) { ptx::setmaxnreg_dec<200>(); }, "setmaxnreg.dec to 200 registers: the warpgroup has 168 a thread",
                       384);
    expect_told<Error>([](TensorMap) { ptx::setmaxnreg_inc<24>(); }, "setmaxnreg.inc to 24 registers: the warpgroup has 168 a thread", 384);
}

// ---------------------------------------------------------------- clusters

TEST(HopperMisuse, ClusterBarriers) {
    expect_told<Error>(
        [](TensorMap) {
            ptx::cluster_arrive();
            if (me() == 0) ptx::cluster_arrive();
        },
        "barrier.cluster.arrive: thread 0 .* arrives again", 32, 2);
    expect_told<Error>([](TensorMap) { ptx::cluster_wait(); }, "barrier.cluster.wait: thread [0-9]+ .* has not arrived", 32, 2);
    expect_fine(
        [](TensorMap) {
            if (ptx::cluster_rank() == 0) ptx::cluster_sync();
        },
        32, 2);  // who has returned counts as arrived
}

TEST(HopperMisuse, MemoryOfABlockThatHasEnded) {
    expect_told_under<Error>(
        Schedule::lowest_first,
        [](TensorMap) {
            if (ptx::cluster_rank() == 1) simt::load_shared_4(ptx::mapa(smem().slot[0], 0));
        },
        "4-byte load: the address is in the shared memory of a block that has ended, by thread 0 of block \\(1,0,0\\)", 32, 2);
    expect_told_under<Error>(
        Schedule::lowest_first,
        [](TensorMap) {
            set_up();
            if (ptx::cluster_rank() == 1 && me() == 0) ptx::mbarrier_arrive_remote(smem().full[0], 0);
        },
        "mbarrier.arrive: the block of barrier full\\[0\\] has ended", 32, 2);
}

TEST(HopperMisuse, DeadlockOfAClusterNamesAllBlocks) {
    expect_told<Deadlock>(
        [](TensorMap) {
            set_up();
            ptx::cluster_sync();
            ptx::mbarrier_wait(smem().full[ptx::cluster_rank()], 0);
        },
        "deadlock in misuse, block \\(0,0,0\\): 32 of 32 .*\n  32 wait at barrier full\\[0\\].*\nblock \\(1,0,0\\): 32 of 32 .*\n  32 wait "
        "at "
        "barrier full\\[1\\]",
        32, 2);
}

TEST(HopperMisuse, BlocksOutsideOfTheCluster) {
    expect_told<Error>([](TensorMap) { ptx::mapa(smem().slot[0], 2); }, "mapa: block 2 of a cluster of 2", 32, 2);
    expect_told<Error>(
        [](TensorMap map) {
            set_up();
            ptx::cluster_sync();
            if (me() == 0) ptx::cp_async_bulk_tensor_multicast(smem().slot[0], map, {0, 0}, smem().full[0], 5);
            ptx::cluster_sync();
        },
        "TMA load: multicast to blocks 5 \\(mask\\) of a cluster of 2", 32, 2);
}

// ---------------------------------------------------------------- copies to other blocks

/// Block 0 of two sends its slot 0 to slot 1 of block 1, which waits for it.
enum class Mistake { none, no_fence, no_barrier, no_wait, no_final_sync, overwritten, sent_twice };
template <Mistake kMistake>
void send(TensorMap) {
    set_up();
    ptx::cluster_sync();
    fill(0);
    if (kMistake != Mistake::no_fence) ptx::fence_proxy_async();
    if (kMistake == Mistake::no_barrier)
        ptx::bar_sync(1 + me() / 64, 64);
    else
        __syncthreads();
    if (ptx::cluster_rank() == 0) {
        if (me() == 100)
            for (int times = 0; times < (kMistake == Mistake::sent_twice ? 2 : 1); ++times)
                ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0], kBox, smem().full[0], 1);
        __syncthreads();
        if (kMistake == Mistake::overwritten) simt::store_shared_4(smem().slot[0] + 4 * me(), 7);
    } else {
        if (me() == 0) ptx::mbarrier_arrive_expect_tx(smem().full[0], kBox);
        if (kMistake == Mistake::no_wait) ptx::cluster_sync();
        if (kMistake != Mistake::no_wait) ptx::mbarrier_wait(smem().full[0], 0);
        if (simt::load_shared_4(smem().slot[1] + 4 * me()) != 0x3c003c00) throw Error("not landed");
    }
    if (kMistake == Mistake::no_final_sync || (kMistake == Mistake::no_wait && ptx::cluster_rank() == 1)) return;
    ptx::cluster_sync();
}

TEST(HopperMisuse, CopyToAnotherBlock) { expect_fine(send<Mistake::none>, 128, 2); }

TEST(HopperMisuse, CopyToAnotherBlockWithoutOrder) {
    expect_told<Error>(send<Mistake::no_fence>,
                       "cp.async.bulk in misuse: thread 100 of block \\(0,0,0\\) reads shared memory\\(0\\), which thread 0 wrote with "
                       "ordinary stores, and no fence_proxy_async\\(\\) lies between",
                       128, 2);
    expect_told_under<Race>(Schedule::lowest_first, send<Mistake::no_barrier>,
                            "race in misuse: thread 100 of block \\(0,0,0\\) reads shared memory\\(0\\), which thread 0 wrote", 128, 2);
}

TEST(HopperMisuse, CopyFromAnotherBlockReadWithoutAWait) {
    expect_told<Error>(send<Mistake::no_wait>,
                       "4-byte load in misuse: thread .* of block \\(1,0,0\\) reads shared memory\\([0-9]+\\) while the cp.async.bulk that "
                       "thread 100 of another block started to it is still under way: is an mbarrier_wait\\(\\) missing\\?",
                       128, 2);
}

TEST(HopperMisuse, SourceOfACopyToAnotherBlock) {
    expect_told<Error>(
        send<Mistake::overwritten>,
        "4-byte store in misuse: thread .* of block \\(0,0,0\\) writes shared memory\\([0-9]+\\) while a wgmma, a store by TMA or a "
        "copy to another block has yet to read it",
        128, 2);
    expect_told<Error>(send<Mistake::no_final_sync>,
                       "cp.async.bulk in misuse: block 0 of the cluster has ended before the copy to another block that its thread 100 "
                       "started had read its shared memory: is a cluster_sync\\(\\) missing\\?",
                       128, 2);
    expect_told<Error>(send<Mistake::sent_twice>,
                       "cp.async.bulk in misuse: thread 100 of block \\(0,0,0\\) overwrites shared memory\\(8192\\) while the "
                       "cp.async.bulk that thread 100 of another block started",
                       128, 2);
}

TEST(HopperMisuse, PlacesOfACopyToAnotherBlock) {
    expect_told<Error>(
        [](TensorMap) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0] + 8, 64, smem().full[0], ptx::cluster_rank() ^ 1);
        },
        "cp.async.bulk: a box of 64 bytes at shared memory\\(8\\): multiples of 16 within", 32, 2);
    expect_told<Error>(
        [](TensorMap) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0], 24, smem().full[0], ptx::cluster_rank() ^ 1);
        },
        "cp.async.bulk: 24 bytes: multiples of 16 are accepted", 32, 2);
    expect_told<Error>(
        [](TensorMap) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0], 64, smem().full[0], 2);
        },
        "cp.async.bulk: block 2 of a cluster of 2", 32, 2);
    expect_told<Error>(
        [](TensorMap) {
            set_up();
            if (me() == 0) ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0], 64, smem().full[0], ptx::cluster_rank());
        },
        "cp.async.bulk: block [01] of the cluster copies to itself: another block is accepted", 32, 2);
    expect_told_under<Error>(
        Schedule::highest_first,
        [](TensorMap) {
            if (ptx::cluster_rank() == 1 && me() == 0) ptx::mbarrier_init(smem().full[0], 1, "full");
            if (ptx::cluster_rank() == 0 && me() == 0) ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0], 64, smem().full[0], 1);
            if (ptx::cluster_rank() == 1) ptx::cluster_sync();
        },
        "cp.async.bulk: barrier full of another block was initialised without a fence_mbarrier_init\\(\\)", 32, 2);
    expect_told<Error>(
        [](TensorMap) {
            set_up();
            ptx::cluster_sync();
            if (ptx::cluster_rank() == 0 && me() == 0) {
                simt::store_shared_4(smem().slot[0], 1);
                ptx::fence_proxy_async();
                ptx::cp_async_bulk_to_peer(smem().slot[1], smem().slot[0], 64, smem().full[0], 1);
            }
            ptx::cluster_sync();
        },
        "cp.async.bulk in misuse: thread 0 started a load that announces itself to barrier full\\[0\\], and its block has ended", 32, 2);
}

TEST(HopperMisuse, ClusterOfTooManyBlocks) {
    EXPECT_THROW(run([](TensorMap) {}, Schedule::round_robin, 32, 9), Error);
}

// ---------------------------------------------------------------- other blocks of the grid

/// Block 0 waits for a turn that only block 1 gives, whether there is one worker or more.
TEST(HopperMisuse, WaitForALaterBlock) {
    const auto kernel = +[](simt::TensorView<std::uint32_t, 1> turn) {
        if (blockIdx.x == 0)
            ptx::wait_acquire(&turn(0), 1);
        else if (blockIdx.x == 1)
            ptx::wait_acquire(&turn(0), 2);  // so that it cannot come to an end before block 0
    };
    for (const unsigned workers : {1u, 2u}) {
        std::uint32_t turn = 0;
        simt::Execution exec;
        exec.workers = workers;
        try {
            simt::launch(kernel, {.name = "misuse", .grid = {2}, .block = {1}, .exec = &exec},
                         simt::packed_view<std::uint32_t, 1>("turn", &turn, {1}));
            ADD_FAILURE() << "nothing was noticed";
        } catch (const Deadlock& error) {
            const std::regex told(
                "deadlock in misuse: thread 0 of block \\(0,0,0\\) waits for turn to become 1, it is 0, and all blocks that began before "
                "have ended");
            EXPECT_TRUE(std::regex_search(error.what(), told)) << error.what();
        }
    }
}

// ---------------------------------------------------------------- the ledger

TEST(HopperLedger, CountsWhatOfABoxIsInside) {
    simt::Ledger ledger;
    run(
        [](TensorMap map) {
            set_up();
            if (me() == 0) {
                ptx::mbarrier_arrive_expect_tx(smem().full[0], kBox);
                ptx::cp_async_bulk_tensor_load(smem().slot[0], map, {40, 120}, smem().full[0]);  // 24 columns of 8 rows are inside
            }
            ptx::mbarrier_wait(smem().full[0], 0);
            if (me() == 0) {
                ptx::cp_async_bulk_tensor_store(map, {8, 100}, smem().slot[0]);  // 56 columns of 28 rows
                ptx::cp_async_bulk_commit();
                ptx::cp_async_bulk_wait_read<0>();
            }
        },
        Schedule::round_robin, 128, 1, &ledger);
    const simt::LedgerRow row = ledger.row("T");
    EXPECT_EQ(row.read.requested, 24u * 8 * 2);
    EXPECT_EQ(row.written.requested, 56u * 28 * 2);
    // Rows are 128 bytes and begin at a multiple of 16: 48 bytes are two sectors, or three; 112 bytes are four.
    EXPECT_GE(row.read.sectors, 8u * 2);
    EXPECT_LE(row.read.sectors, 8u * 3);
    EXPECT_GE(row.written.sectors, 28u * 4);
    EXPECT_LE(row.written.sectors, 28u * 5);
}

}  // namespace
