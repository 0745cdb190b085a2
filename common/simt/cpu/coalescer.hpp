/// @file
/// Counts what a warp's requests cost: of global memory the 32-byte sectors, as a GPU's L1 cache does; of shared memory the passes
/// over its banks.
#pragma once

#include "simt/cpu/warp_requests.hpp"
#include "simt/ledger.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace simt::cpu {

/// Counts are as exact as WarpRequests puts accesses together.
class Coalescer {
public:
    /// Forgets the requests of the block before; the counts stay.
    void begin_block(std::size_t warps);
    /// The lanes of a warp have met: what they access from now on is no part of the requests before.
    void align(unsigned warp);
    void align_all();

    void charge(unsigned warp, unsigned lane, int tensor, bool write, std::uintptr_t address, std::size_t bytes, const void* site);

    /// A copy by TMA, which is no warp's request: its bytes and sectors are known.
    void add(int tensor, bool write, const Count& count);

    /// An access to 4, 8 or 16 aligned bytes of shared memory. Its 32 banks are 4 bytes wide, so that a pass moves 128 bytes at most
    /// and the lanes are served 32, 16 or 8 neighbours at a time. Of those, lanes that want the same bytes share a pass; different
    /// ones in the same banks take a pass each.
    void charge_shared(unsigned warp, unsigned lane, SharedAccess access, std::size_t offset, std::size_t bytes, const void* site);

    /// The same of an instruction of a whole warp, of which lane i accesses the 16 bytes at rows[i].
    void charge_shared(SharedAccess access, const void* const* rows, unsigned lanes);

    /// The counts since the last call, by tensor id: (read, written).
    std::vector<std::pair<Count, Count>> take();
    SharedCounts take_shared();

private:
    struct Sectors {
        using More = std::array<std::uint32_t, 64>;  // all sectors
        std::uint32_t count = 0;
        std::uint32_t last = 0;  // that was asked for

        void clear() { count = 0; }
    };
    struct Banks {
        struct More {};
        std::uint32_t lanes = 0;               // mask: for each chunk wanted the first that came for it
        std::array<std::uint32_t, 32> chunk;   // by lane: which 4, 8 or 16 bytes
        std::array<std::uint8_t, 4> passes{};  // by group of neighbours

        void clear() {
            lanes = 0;
            passes = {};
        }
        /// What the access adds goes to `count`.
        void add(unsigned lane, std::uintptr_t at, std::size_t bytes, SharedCount& count);
    };

    WarpRequests<Sectors> global_;
    WarpRequests<Banks> shared_;
    std::vector<std::pair<Count, Count>> counts_;
    SharedCounts shared_counts_{};
};

}  // namespace simt::cpu
