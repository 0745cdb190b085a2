/// @file
/// The ledger: global-memory traffic of emulated launches, per tensor and direction.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace simt {

/// What was moved in one direction.
struct Count {
    std::uint64_t requested = 0;  ///< bytes that threads asked for
    std::uint64_t sectors = 0;    ///< 32-byte sectors after the requests of a warp are coalesced; a broadcast is one

    std::uint64_t sector_bytes() const { return 32 * sectors; }
    Count& operator+=(const Count& other) {
        requested += other.requested;
        sectors += other.sectors;
        return *this;
    }
};

/// One tensor's traffic.
struct LedgerRow {
    std::string tensor;
    Count read, written;
};

/// Adds up what launches move. One ledger may serve several launches; tensors of one name share a row.
class Ledger {
public:
    /// Rows in the order in which tensors were first touched or created.
    std::vector<LedgerRow> rows() const;
    /// The row of a tensor; zeros when nothing touched it.
    LedgerRow row(const std::string& tensor) const;
    Count read() const;     ///< over all tensors
    Count written() const;  ///< over all tensors
    void clear();

    /// Adds one worker's counts; the index is the tensor's id (see tensor_id). Called by the emulator.
    void add(const std::vector<std::pair<Count, Count>>& by_tensor);

private:
    mutable std::mutex mutex_;
    std::vector<std::pair<Count, Count>> by_tensor_;  // (read, written)
};

/// A small number that stands for a tensor's name, the same for equal names in the whole process.
int tensor_id(const std::string& name);
/// The name behind an id.
std::string tensor_name(int id);

}  // namespace simt
