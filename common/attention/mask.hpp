/// @file
/// The causal mask as kernels see it.
#pragma once

#include "attention/problem.hpp"
#include "simt/config.hpp"

namespace workbook {

/// Which keys a query does not see. Passed to kernels by value.
struct Mask {
    bool causal;
    int offset;  ///< Nkv - Nq: causal is aligned to the bottom right

    explicit Mask(const Problem& problem) : causal(problem.causal), offset(problem.kv_seq - problem.seq) {}

    /// True when query row i must not see key j.
    SIMT_BOTH bool hides(int i, int j) const { return causal && j > i + offset; }
};

}  // namespace workbook
