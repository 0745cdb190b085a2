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

    explicit Mask(const Problem& problem) : Mask(problem.causal, problem.seq, problem.kv_seq) {}
    SIMT_BOTH Mask(bool is_causal, int Nq, int Nkv) : causal(is_causal), offset(Nkv - Nq) {}

    /// True when query row i must not see key j.
    SIMT_BOTH bool hides(int i, int j) const { return causal && j > i + offset; }

    /// How many of Nkv keys query row i sees: keys 0 to visible - 1.
    SIMT_BOTH int visible(int i, int Nkv) const {
        if (!causal) return Nkv;
        const int keys = i + offset + 1;
        return keys < 0 ? 0 : keys < Nkv ? keys : Nkv;
    }

    /// Blocks of Bc keys that some of the query rows i0 to i0 + rows - 1 see; rows from Nq on see nothing.
    SIMT_BOTH int blocks(int i0, int rows, int Nq, int Bc, int Nkv) const {
        if (i0 >= Nq) return 0;
        const int last = i0 + rows < Nq ? i0 + rows - 1 : Nq - 1;
        return (visible(last, Nkv) + Bc - 1) / Bc;
    }

    /// The first query row that sees key j; it may lie past the end.
    SIMT_BOTH int first_row(int j) const { return causal && j > offset ? j - offset : 0; }
};

}  // namespace workbook
