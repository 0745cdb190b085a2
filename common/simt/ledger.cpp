#include "simt/ledger.hpp"

namespace simt {
namespace {

struct Names {
    std::mutex mutex;
    std::vector<std::string> by_id;
};

Names& names() {
    static Names all;
    return all;
}

// By SharedAccess.
constexpr std::array kSharedAccesses = {"ldmatrix", "stmatrix", "vector loads", "vector stores", "cp.async"};
static_assert(kSharedAccesses.size() == SharedCounts{}.size());

}  // namespace

int tensor_id(const std::string& name) {
    Names& all = names();
    std::lock_guard lock(all.mutex);
    for (std::size_t id = 0; id < all.by_id.size(); ++id)
        if (all.by_id[id] == name) return static_cast<int>(id);
    all.by_id.push_back(name);
    return static_cast<int>(all.by_id.size() - 1);
}

std::string tensor_name(int id) {
    Names& all = names();
    std::lock_guard lock(all.mutex);
    return all.by_id.at(static_cast<std::size_t>(id));
}

void Ledger::add(const std::vector<std::pair<Count, Count>>& by_tensor, const SharedCounts& shared) {
    std::lock_guard lock(mutex_);
    for (std::size_t access = 0; access < shared.size(); ++access) shared_[access] += shared[access];
    if (by_tensor_.size() < by_tensor.size()) by_tensor_.resize(by_tensor.size());
    for (std::size_t id = 0; id < by_tensor.size(); ++id) {
        by_tensor_[id].first += by_tensor[id].first;
        by_tensor_[id].second += by_tensor[id].second;
    }
}

std::vector<LedgerRow> Ledger::rows() const {
    std::lock_guard lock(mutex_);
    std::vector<LedgerRow> rows;
    for (std::size_t id = 0; id < by_tensor_.size(); ++id) {
        const auto& [read, written] = by_tensor_[id];
        if (read.requested || written.requested) rows.push_back({tensor_name(static_cast<int>(id)), read, written});
    }
    return rows;
}

LedgerRow Ledger::row(const std::string& tensor) const {
    for (LedgerRow& row : rows())
        if (row.tensor == tensor) return row;
    return {tensor, {}, {}};
}

Count Ledger::read() const {
    Count sum;
    for (const LedgerRow& row : rows()) sum += row.read;
    return sum;
}

Count Ledger::written() const {
    Count sum;
    for (const LedgerRow& row : rows()) sum += row.written;
    return sum;
}

void Ledger::clear() {
    std::lock_guard lock(mutex_);
    by_tensor_.clear();
    shared_ = {};
}

std::map<std::string, SharedCount> Ledger::shared() const {
    std::lock_guard lock(mutex_);
    std::map<std::string, SharedCount> counts;
    for (std::size_t access = 0; access < shared_.size(); ++access)
        if (shared_[access].ideal > 0) counts[kSharedAccesses[access]] = shared_[access];
    return counts;
}

}  // namespace simt
