/// @file
/// The trace: which rows of which tensors the blocks of emulated launches touch, and in which order.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace simt {

/// Rows of a tensor that a block touched between two of its __syncthreads(), or that one copy by TMA moved.
struct TracedRows {
    int tensor;  ///< see tensor_id()
    bool write;
    long long first, last;  ///< of all rows of the tensor, whatever batch and head they belong to
};

/// What one block touched, in order.
struct TracedBlock {
    std::string kernel;
    uint3 index;
    std::vector<TracedRows> rows;
};

/// Collects what launches touch of the tensors that it watches. Only what a ledger counts is traced.
class Trace {
public:
    /// Watches `rows` rows of row_bytes bytes, one behind the other from `data` on.
    /// @param tensor name of the views that kernels access it by
    void watch(const std::string& tensor, const void* data, long long rows, std::size_t row_bytes);

    /// All blocks so far, those of a kernel by their index: z, y, x.
    std::vector<TracedBlock> blocks() const;

    /// The row that an address lies in; nothing where the tensor is not watched. Called by the emulator, and so is add().
    std::optional<long long> row(int tensor, const void* address) const;
    void add(TracedBlock block);

private:
    struct Watched {
        int tensor;
        const char* data;
        long long rows;
        std::size_t row_bytes;
    };
    std::vector<Watched> watched_;
    mutable std::mutex mutex_;
    std::vector<TracedBlock> blocks_;
};

}  // namespace simt
