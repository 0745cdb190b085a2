/// @file
/// Puts together what the lanes of a warp ask for at the same place in a kernel.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace simt::cpu {

/// Counted accesses after which a lane lets the others catch up.
inline constexpr unsigned kRunAhead = 32;

/// On a GPU the lanes of a warp issue an access together. Fibers run one lane after the other, so requests are put together
/// afterwards: the k-th time that a lane passes a place in the kernel (`site`) since the warp last met belongs to the k-th time of
/// the other lanes. Lanes that pass a place more or less often than others are aligned again whenever the whole warp meets: at a
/// collective of all its lanes or a __syncthreads(). Lanes give way to each other after kRunAhead accesses, so that a window of
/// twice as many requests for each site is enough.
///
/// So requests are exact unless lanes skip the *same* place a different number of times between two meetings and go on to use it.
/// @tparam Request what is kept of a request; clear() makes it new. Request::More is what is seldom looked at: it is kept apart, so that
/// the rest stays in the cache, and is not cleared
template <class Request>
class WarpRequests {
public:
    /// Forgets the requests of the block before.
    void begin_block(std::size_t warps) {
        ++block_;
        if (warps_.size() < warps) warps_.resize(warps);
    }
    /// The lanes of a warp have met: what they access from now on is no part of the requests before.
    void align(unsigned warp) { ++warps_[warp].meetings; }
    void align_all() {
        for (Warp& warp : warps_) ++warp.meetings;
    }

    struct Found {
        Request& request;
        typename Request::More& more;
    };
    /// The request that an access of a lane at `site` belongs to.
    Found find(unsigned warp, unsigned lane, const void* site) {
        Site& here = find(warps_[warp], site);
        const std::uint32_t occurrence = here.passed[lane]++;
        Numbered& found = here.window[occurrence % kWindow];
        const std::uint64_t serial = block_ << 32 | occurrence;
        if (found.serial != serial) {
            found.serial = serial;
            found.request.clear();
        }
        return {found.request, here.more[occurrence % kWindow]};
    }

private:
    static constexpr unsigned kWindow = 2 * kRunAhead;
    struct Numbered {
        std::uint64_t serial = 0;  // block and occurrence
        Request request;
    };
    struct Site {
        const void* place = nullptr;
        std::uint64_t block = 0;
        std::uint64_t meetings = 0;              // of the warp when `passed` was aligned
        std::array<std::uint32_t, 32> passed{};  // by lane: how often
        std::array<Numbered, kWindow> window;
        std::array<typename Request::More, kWindow> more;
    };
    struct Warp {
        std::uint64_t meetings = 0;
        std::array<Site*, 64> recent{};  // by a hash of the place: the site found there last
        std::vector<std::unique_ptr<Site>> sites;
    };

    Site& find(Warp& warp, const void* place) {
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

    std::vector<Warp> warps_;
    std::uint64_t block_ = 0;
};

}  // namespace simt::cpu
