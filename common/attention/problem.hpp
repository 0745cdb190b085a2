/// @file
/// The problem that every stage solves: O = softmax(scale * Q K^T + mask) V, and LSE.
#pragma once

#include "attention/dtype.hpp"
#include "attention/error.hpp"

#include <array>
#include <optional>
#include <string>
#include <vector>

namespace workbook {

/// Order of the dimensions in memory. Shapes are always spoken of as (B, H, N, d).
enum class Layout { bhnd, bnhd };

const char* name(Layout layout);
/// @throws InvalidArgument
Layout parse_layout(std::string_view word);

/// Strides of the batch, the head and the row, in elements. The innermost stride is 1.
using Strides = std::array<long long, 3>;

/// Queries or keys begin to end - 1.
struct Range {
    int begin, end;
};

/// Where a sequence lies in a packed batch.
struct Sequence {
    int first_query, queries, first_key, keys;
};

/// One attention problem.
///
/// Q and O are (B, Hq, Nq, d), K and V are (B, Hkv, Nkv, d), LSE is (B, Hq, Nq) in float32.
/// Query head h reads key/value head h / (Hq / Hkv): grouped-query attention (Ainslie et al. 2023).
/// Causal is aligned to the bottom right: key j is visible to query i when j <= i + Nkv - Nq.
/// A row that sees no key gives O = 0 and LSE = -infinity.
///
/// A packed batch of sequences of different lengths is a problem of batch 1 with cu_seqlens_q and cu_seqlens_k: the sequences lie one after
/// the other, Nq and Nkv are the sums of their lengths, and query i sees keys of its own sequence alone; causal is aligned to the bottom
/// right of each.
struct Problem {
    int batch = 1;
    int heads = 1;
    int kv_heads = 1;
    int seq = 256;
    int kv_seq = 256;
    int head_dim = 64;
    DType dtype = DType::f32;
    bool causal = false;
    std::optional<float> softmax_scale = std::nullopt;  ///< 1/sqrt(d) where it is not given; option "scale"
    Layout layout = Layout::bhnd;                       ///< of Q, K, V and O
    int page_size = 64;                                 ///< keys of a page, where a variant keeps K and V in pages
    /// Of a packed batch of n sequences: n + 1 numbers. Sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1, and the keys
    /// likewise; it may be empty. Empty lists: no packed batch.
    std::vector<int> cu_seqlens_q = {}, cu_seqlens_k = {};

    float scale() const;  ///< softmax_scale, or its default

    long long q_elements() const;   ///< of Q, and of O
    long long kv_elements() const;  ///< of K, and of V
    long long rows() const;         ///< B * Hq * Nq: softmax rows, and elements of LSE

    long long pairs() const;  ///< (query, key) pairs of all heads in which both are of one sequence; masked ones included

    bool packed() const { return !cu_seqlens_q.empty() || !cu_seqlens_k.empty(); }
    /// The problem of each sequence by itself, with batch 1; its seq and kv_seq may be 0. Of a problem that is not packed, that problem.
    std::vector<Problem> sequences() const;

    /// The sequence of query row i; of a problem that is not packed, all queries and keys.
    Sequence sequence_of_query(int i) const;
    Range keys_of(int i) const;     ///< that query row i (0 <= i < Nq) sees
    int visible_keys(int i) const;  ///< how many those are
    Range queries_of(int j) const;  ///< that see key j (0 <= j < Nkv)

    Strides q_strides() const;   ///< of Q and O when they are packed in `layout`
    Strides kv_strides() const;  ///< of K and V when they are packed in `layout`
};

/// Checks each field and their agreement: sizes of 1 or more, head_dim at most 256, heads a multiple of kv_heads, a finite scale
/// (0 and negative are well defined), a page_size that is a power of two from 16 to 256, and B * Hq * Nq * Nkv * d at most 2^56, so that no
/// byte count overflows. Both cu_seqlens or none, of one length, from 0 to Nq and Nkv without a step down, in a batch of 1.
/// @throws InvalidArgument with the parameter's name, its value and what is accepted
void check(const Problem& problem);

/// "B=1 Hq=4 Hkv=1 Nq=300 Nkv=517 d=128 bf16 causal"; a given scale, a layout other than bhnd, a page_size other than 64 and
/// the sequences of a packed batch follow.
std::string describe(const Problem& problem);

}  // namespace workbook
