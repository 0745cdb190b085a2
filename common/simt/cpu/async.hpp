/// @file
/// What the emulator keeps of Hopper's asynchronous machinery: barriers in shared memory, copies by TMA, products by wgmma. All of
/// it belongs to the threads, blocks and clusters of block.hpp and cluster.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace simt::cpu {

class Block;
struct Thread;

/// Up to when the accesses of each thread of a cluster are known to precede: a vector clock (Fidge 1988, Mattern 1989). Threads have
/// one, and barriers hand it on from those that arrive to those that wait. Time is counted in arrivals of
/// threads of the cluster at barriers.
struct Knowledge {
    std::vector<std::uint32_t> seen;    ///< accesses until then are ordered before
    std::vector<std::uint32_t> fenced;  ///< and for writes until then a fence.proxy.async lies in between

    void learn(const Knowledge& from) {
        learn(seen, from.seen);
        learn(fenced, from.fenced);
    }
    static void learn(std::vector<std::uint32_t>& to, const std::vector<std::uint32_t>& from) {
        if (to.size() < from.size()) to.resize(from.size());
        std::transform(from.begin(), from.end(), to.begin(), to.begin(), [](std::uint32_t a, std::uint32_t b) { return a > b ? a : b; });
    }
};

/// Eight bytes in shared memory that stand for an Mbarrier of the block. Poisoned memory is none.
struct alignas(8) MbarrierHandle {
    std::uint32_t magic;
    std::uint32_t index;
    static constexpr std::uint32_t kMagic = 0x6d626172;
};

struct Mbarrier {
    std::string name;  ///< "full[1]"
    Block* home = nullptr;
    const Thread* initialiser = nullptr;
    bool announced = false;  ///< a fence.mbarrier_init came after the initialisation
    unsigned expected = 0;   ///< arrivals of a phase
    unsigned pending = 0;    ///< of which are missing
    long long bytes = 0;     ///< announced by expect_tx and not landed; negative where more has landed
    unsigned phase = 0;      ///< the one that is not complete
    unsigned unseen = 0;     ///< phases that have been completed since somebody last waited
    std::vector<Thread*> waiting;
    Knowledge knowledge;
};

/// bar.sync and bar.arrive.
struct NamedBarrier {
    unsigned expected = 0;
    unsigned arrived = 0;
    std::bitset<1024> who;
    std::vector<Thread*> waiting;
    Knowledge knowledge;
};

/// A tensor in global memory and the box that a copy moves of it. Dimension 0 is the innermost. Of rank 1 are the stretches of memory
/// of cp.async.bulk and cp.reduce.async.bulk, which have no map.
struct TensorMap {
    char* base = nullptr;
    int rank = 0;
    int element = 0;  ///< bytes
    int span = 0;     ///< of the swizzle: 0, 32, 64 or 128 bytes
    int tensor = 0;   ///< id in the ledger
    bool writable = false;
    std::array<long long, 5> extent{};  ///< elements
    std::array<long long, 5> stride{};  ///< bytes
    std::array<int, 5> box{1, 1, 1, 1, 1};

    std::size_t box_bytes() const {
        std::size_t bytes = static_cast<std::size_t>(element);
        for (int k = 0; k < rank; ++k) bytes *= static_cast<std::size_t>(box[static_cast<std::size_t>(k)]);
        return bytes;
    }
};

/// Where the hardware puts the byte that would lie at `address` without swizzle: 16-byte chunks change places within each
/// 2, 4 or 8 of them, by the number of the 128-byte line.
inline std::uint32_t swizzled(std::uint32_t address, int span) {
    const std::uint32_t chunks = span ? static_cast<std::uint32_t>(span) / 16 - 1 : 0;
    return address ^ ((address >> 3) & (chunks << 4));
}

/// One cp.async.bulk.tensor, cp.async.bulk or cp.reduce.async.bulk.
struct BulkCopy {
    TensorMap map;
    std::array<int, 5> at{};
    std::uint32_t shared = 0;         ///< offset in the block's shared memory
    Block* block = nullptr;           ///< whose memory it is
    Mbarrier* barrier = nullptr;      ///< of loads, and of copies to another block
    unsigned issuer = 0;              ///< thread, for messages
    std::vector<std::byte> snapshot;  ///< of stores: what was read, and is yet to be written
    bool adds = false;                ///< floats to those in global memory
    Block* source = nullptr;          ///< of copies to another block: whose memory is read,
    std::uint32_t from = 0;           ///< and where
};

/// One wgmma.mma_async as one thread issued it.
struct Wgmma {
    enum class Element : std::uint8_t { f16, bf16, e4m3 };
    float* d;
    int n;
    Element element;
    bool a_in_registers;
    bool a_mn_major, b_mn_major;
    bool accumulate;
    std::uint64_t a_descriptor;  ///< where A is in shared memory
    std::uint64_t b_descriptor;
    std::array<std::uint32_t, 4> a;  ///< where it is in registers

    bool agrees(const Wgmma& other) const {
        return n == other.n && element == other.element && a_in_registers == other.a_in_registers && a_mn_major == other.a_mn_major &&
               b_mn_major == other.b_mn_major && accumulate == other.accumulate && b_descriptor == other.b_descriptor &&
               (a_in_registers || a_descriptor == other.a_descriptor);
    }
};

/// The true contents of registers that are poisoned while a wgmma is under way to them.
struct Accumulators {
    float* d;
    std::vector<float> values;
};

/// The wgmmas of a thread.
struct WgmmaQueue {
    bool fenced = false;  ///< a wgmma.fence came after the last wait
    std::vector<Wgmma> open;
    std::vector<std::vector<Wgmma>> groups;  ///< committed, oldest first
    std::vector<Accumulators> in_flight;
};

inline constexpr unsigned kWarpgroup = 128;

/// Four neighbouring warps.
struct Warpgroup {
    const char* operation = nullptr;  ///< that its lanes meet at
    unsigned arrived = 0;
    std::array<void*, kWarpgroup> deposits{};
    unsigned registers = 0;        ///< of a thread, by setmaxnreg
    unsigned wanted = 0;           ///< by a setmaxnreg.inc that waits; 0: none does
    std::vector<Thread*> waiting;  ///< for registers
};

}  // namespace simt::cpu
