#include "simt/trace.hpp"

#include "simt/ledger.hpp"

#include <algorithm>
#include <tuple>

namespace simt {

void Trace::watch(const std::string& tensor, const void* data, long long rows, std::size_t row_bytes) {
    watched_.push_back({tensor_id(tensor), static_cast<const char*>(data), rows, row_bytes});
}

std::vector<TracedBlock> Trace::blocks() const {
    std::lock_guard lock(mutex_);
    std::vector<TracedBlock> sorted = blocks_;
    const auto key = [](const TracedBlock& b) { return std::tie(b.kernel, b.index.z, b.index.y, b.index.x); };
    std::stable_sort(sorted.begin(), sorted.end(), [&](const TracedBlock& a, const TracedBlock& b) { return key(a) < key(b); });
    return sorted;
}

std::optional<long long> Trace::row(int tensor, const void* address) const {
    for (const Watched& w : watched_) {
        if (w.tensor != tensor) continue;
        const auto offset = static_cast<const char*>(address) - w.data;
        const auto row = offset / static_cast<std::ptrdiff_t>(w.row_bytes);
        if (offset >= 0 && row < w.rows) return row;
    }
    return std::nullopt;
}

void Trace::add(TracedBlock block) {
    std::lock_guard lock(mutex_);
    blocks_.push_back(std::move(block));
}

}  // namespace simt
