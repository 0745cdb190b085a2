/// @file
/// Counts the 32-byte sectors that a warp's requests touch, as a GPU's L1 cache does.
#pragma once

#include "simt/ledger.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace simt::cpu {

/// On a GPU the lanes of a warp issue a load together, and each distinct sector among their addresses counts once. Fibers
/// run one lane after the other, so requests are put together afterwards: the k-th time that a lane passes a place in the
/// kernel (`site`) since the warp last met belongs to the k-th time of the other lanes. Lanes that pass a place more or less
/// often than others are aligned again whenever the whole warp meets: at a collective of all its lanes or a __syncthreads().
/// Lanes give way to each other after kRunAhead accesses, so that a window of kWindow requests for each site is enough.
///
/// So counts are exact unless lanes skip the *same* place a different number of times between two meetings and go on to use it.
class Coalescer {
public:
    static constexpr unsigned kRunAhead = 32;
    static constexpr unsigned kWindow = 64;

    /// Forgets the requests of the block before; the counts stay.
    void begin_block(std::size_t warps);
    /// The lanes of a warp have met: what they access from now on is no part of the requests before.
    void align(unsigned warp) { ++warps_[warp].meetings; }
    void align_all();

    void charge(unsigned warp, unsigned lane, int tensor, bool write, std::uintptr_t address, std::size_t bytes, const void* site);

    /// A copy by TMA, which is no warp's request: its bytes and sectors are known.
    void add(int tensor, bool write, const Count& count);

    /// The counts since the last call, by tensor id: (read, written).
    std::vector<std::pair<Count, Count>> take();

private:
    struct Request {
        std::uint64_t serial = 0;  // block and occurrence
        std::uint32_t sectors = 0;
        std::array<std::uint32_t, 64> sector;
    };
    struct Site {
        const void* place = nullptr;
        std::uint64_t block = 0;
        std::uint64_t meetings = 0;              // of the warp when `passed` was aligned
        std::array<std::uint32_t, 32> passed{};  // by lane: how often
        std::array<Request, kWindow> window;
    };
    struct Warp {
        std::uint64_t meetings = 0;
        std::array<Site*, 64> recent{};  // by a hash of the place: the site found there last
        std::vector<std::unique_ptr<Site>> sites;
    };
    Site& find(Warp& warp, const void* place);

    std::vector<Warp> warps_;
    std::uint64_t block_ = 0;
    std::vector<std::pair<Count, Count>> counts_;
};

}  // namespace simt::cpu
