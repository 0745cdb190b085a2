/// @file
/// The ledger: global-memory traffic of emulated launches, per tensor and direction.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
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

/// Accesses to shared memory whose bank conflicts are counted. Those to single elements, by TMA and by wgmma are not.
enum class SharedAccess { ldmatrix, stmatrix, vector_load, vector_store, cp_async };

/// Accesses to shared memory, of one kind.
struct SharedCount {
    std::uint64_t wavefronts = 0;  ///< passes over the 32 banks that were needed
    std::uint64_t ideal = 0;       ///< passes without bank conflicts

    SharedCount& operator+=(const SharedCount& other) {
        wavefronts += other.wavefronts;
        ideal += other.ideal;
        return *this;
    }
};

using SharedCounts = std::array<SharedCount, 5>;  ///< by SharedAccess

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
    /// Of "ldmatrix", "stmatrix", "vector loads", "vector stores" and "cp.async" (see vector.hpp and common/ptx) those that there were.
    std::map<std::string, SharedCount> shared() const;
    void clear();

    /// Adds one worker's counts; the index of `by_tensor` is the tensor's id (see tensor_id). Called by the emulator.
    void add(const std::vector<std::pair<Count, Count>>& by_tensor, const SharedCounts& shared);

private:
    mutable std::mutex mutex_;
    std::vector<std::pair<Count, Count>> by_tensor_;  // (read, written)
    SharedCounts shared_{};
};

/// A small number that stands for a tensor's name, the same for equal names in the whole process.
int tensor_id(const std::string& name);
/// The name behind an id.
std::string tensor_name(int id);

}  // namespace simt
