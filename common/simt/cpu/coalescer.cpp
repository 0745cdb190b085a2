#include "simt/cpu/coalescer.hpp"

#include <algorithm>

namespace simt::cpu {

void Coalescer::begin_block(std::size_t warps) {
    ++block_;
    if (warps_.size() < warps) warps_.resize(warps);
}

void Coalescer::align_all() {
    for (Warp& warp : warps_) ++warp.meetings;
}

Coalescer::Site& Coalescer::find(Warp& warp, const void* place) {
    const auto number = reinterpret_cast<std::uintptr_t>(place);
    Site*& recent = warp.recent[(number ^ number >> 6) % warp.recent.size()];
    if (!recent || recent->place != place) {
        // All kernels that this thread ever ran have their sites here.
        const auto known = std::find_if(warp.sites.begin(), warp.sites.end(), [&](const auto& site) { return site->place == place; });
        if (known != warp.sites.end()) {
            recent = known->get();
        } else {
            warp.sites.push_back(std::make_unique<Site>());
            recent = warp.sites.back().get();
            recent->place = place;
        }
    }
    Site& site = *recent;
    if (site.block != block_) {
        site.block = block_;
        site.meetings = warp.meetings;
        site.passed.fill(0);
    } else if (site.meetings != warp.meetings) {
        site.meetings = warp.meetings;
        site.passed.fill(*std::max_element(site.passed.begin(), site.passed.end()));
    }
    return site;
}

void Coalescer::charge(unsigned warp, unsigned lane, int tensor, bool write, std::uintptr_t address, std::size_t bytes, const void* site) {
    if (counts_.size() <= static_cast<std::size_t>(tensor)) counts_.resize(static_cast<std::size_t>(tensor) + 1);
    auto& [read, written] = counts_[static_cast<std::size_t>(tensor)];
    Count& count = write ? written : read;
    count.requested += bytes;

    Site& here = find(warps_[warp], site);
    const std::uint32_t occurrence = here.passed[lane]++;
    Request& request = here.window[occurrence % kWindow];
    const std::uint64_t serial = block_ << 32 | occurrence;
    if (request.serial != serial) {
        request.serial = serial;
        request.sectors = 0;
    }
    for (std::uintptr_t s = address / 32; s <= (address + bytes - 1) / 32; ++s) {
        const auto sector = static_cast<std::uint32_t>(s);
        const auto begin = request.sector.begin(), end = begin + request.sectors;
        // Neighbouring lanes tend to share a sector, so the last one is looked at first.
        if (request.sectors && *(end - 1) == sector) continue;
        if (std::find(begin, end, sector) != end) continue;
        if (request.sectors < request.sector.size()) request.sector[request.sectors++] = sector;
        ++count.sectors;
    }
}

void Coalescer::add(int tensor, bool write, const Count& count) {
    if (counts_.size() <= static_cast<std::size_t>(tensor)) counts_.resize(static_cast<std::size_t>(tensor) + 1);
    auto& [read, written] = counts_[static_cast<std::size_t>(tensor)];
    (write ? written : read) += count;
}

std::vector<std::pair<Count, Count>> Coalescer::take() { return std::exchange(counts_, {}); }

}  // namespace simt::cpu
