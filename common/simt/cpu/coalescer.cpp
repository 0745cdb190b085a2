#include "simt/cpu/coalescer.hpp"

#include <algorithm>

namespace simt::cpu {

void Coalescer::begin_block(std::size_t warps) {
    global_.begin_block(warps);
    shared_.begin_block(warps);
}

void Coalescer::align(unsigned warp) {
    global_.align(warp);
    shared_.align(warp);
}

void Coalescer::align_all() {
    global_.align_all();
    shared_.align_all();
}

void Coalescer::charge(unsigned warp, unsigned lane, int tensor, bool write, std::uintptr_t address, std::size_t bytes, const void* site) {
    if (counts_.size() <= static_cast<std::size_t>(tensor)) counts_.resize(static_cast<std::size_t>(tensor) + 1);
    auto& [read, written] = counts_[static_cast<std::size_t>(tensor)];
    Count& count = write ? written : read;
    count.requested += bytes;

    auto [request, sectors] = global_.find(warp, lane, site);
    for (std::uintptr_t s = address / 32; s <= (address + bytes - 1) / 32; ++s) {
        const auto sector = static_cast<std::uint32_t>(s);
        // Neighbouring lanes tend to share a sector, so the last one is looked at first.
        if (request.count && request.last == sector) continue;
        request.last = sector;
        const auto begin = sectors.begin(), end = begin + request.count;
        if (std::find(begin, end, sector) != end) continue;
        if (request.count < sectors.size()) sectors[request.count++] = sector;
        ++count.sectors;
    }
}

void Coalescer::Banks::add(unsigned lane, std::uintptr_t at, std::size_t bytes, SharedCount& count) {
    const auto mine = static_cast<std::uint32_t>(at / bytes);
    const auto neighbours = static_cast<unsigned>(128 / bytes);  // as many lanes as chunks side by side in the banks
    const unsigned first = lane & ~(neighbours - 1);
    unsigned before = 0;  // other chunks in the same banks
    for (unsigned other = first; other < first + neighbours; ++other) {
        if (!(lanes >> other & 1u)) continue;
        if (chunk[other] == mine) return;
        before += (chunk[other] ^ mine) % neighbours == 0;
    }
    lanes |= 1u << lane;
    chunk[lane] = mine;
    std::uint8_t& needed = passes[lane / neighbours];
    if (before < needed) return;
    ++count.wavefronts;
    if (needed++ == 0) ++count.ideal;
}

void Coalescer::charge_shared(unsigned warp, unsigned lane, SharedAccess access, std::size_t offset, std::size_t bytes, const void* site) {
    shared_.find(warp, lane, site).request.add(lane, offset, bytes, shared_counts_[static_cast<std::size_t>(access)]);
}

void Coalescer::charge_shared(SharedAccess access, const void* const* rows, unsigned lanes) {
    Banks request;
    for (unsigned lane = 0; lane < lanes; ++lane)
        request.add(lane, reinterpret_cast<std::uintptr_t>(rows[lane]), 16, shared_counts_[static_cast<std::size_t>(access)]);
}

void Coalescer::add(int tensor, bool write, const Count& count) {
    if (counts_.size() <= static_cast<std::size_t>(tensor)) counts_.resize(static_cast<std::size_t>(tensor) + 1);
    auto& [read, written] = counts_[static_cast<std::size_t>(tensor)];
    (write ? written : read) += count;
}

std::vector<std::pair<Count, Count>> Coalescer::take() { return std::exchange(counts_, {}); }

SharedCounts Coalescer::take_shared() { return std::exchange(shared_counts_, {}); }

}  // namespace simt::cpu
