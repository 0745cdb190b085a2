/// @file
/// One row of attention in steps that can be exchanged: what the reference and the diagnosis of mistakes share.
#pragma once

#include "attention/reference.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <type_traits>
#include <vector>

namespace workbook {

/// Where a softmax row lies.
struct RowPlace {
    int b, h, i;
};

inline RowPlace place_of(const Problem& problem, long long flat_row) {
    return {static_cast<int>(flat_row / problem.seq / problem.heads), static_cast<int>(flat_row / problem.seq % problem.heads),
            static_cast<int>(flat_row % problem.seq)};
}

/// What one row of attention reads: its query, and the keys and values of its head that it sees.
struct Row {
    const float* q;  ///< (d)
    const float* k;  ///< (visible, d), row j at k + j * kv_stride
    const float* v;  ///< (visible, d), row j at v + j * kv_stride
    long long kv_stride;
    int visible;
    int d;
    int depth;  ///< columns of q and k that a dot product adds up: d
    double scale;
};

/// Where a row's results go.
struct RowResult {
    double* o;        ///< (d), zeros
    double* o_scale;  ///< (d), zeros
    double& lse;
    double& lse_scale;
};

/// Computes a row. @param scratch has room for a number a key
using RowFunction = void (*)(const Row& row, std::vector<double>& scratch, const RowResult& out);

/// Computes the given rows with `compute`, on all cores: the body of reference_forward() and its kin. Rows that see nothing have O = 0
/// and LSE = -infinity. @throws InvalidArgument as reference_forward()
ReferenceRows forward_by_rows(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                              std::span<const long long> rows, RowFunction compute);

/// The row at a place of a problem, as if it saw all Nkv keys. @param q,k,v packed in problem.layout
inline Row row_of_all_keys(const Problem& problem, const float* q, const float* k, const float* v, RowPlace at) {
    const Strides qs = problem.q_strides(), kvs = problem.kv_strides();
    const int group = problem.heads / problem.kv_heads;  // query heads that share a key/value head
    const long long kv_head = at.b * kvs[0] + at.h / group * kvs[1];
    return {q + at.b * qs[0] + at.h * qs[1] + at.i * qs[2],
            k + kv_head,
            v + kv_head,
            kvs[2],
            problem.kv_seq,
            problem.head_dim,
            problem.head_dim,
            problem.scale()};
}

/// Only these keys of the row are left.
inline void narrow(Row& row, Range keys) {
    row.k += keys.begin * row.kv_stride;
    row.v += keys.begin * row.kv_stride;
    row.visible = keys.end - keys.begin;
}

/// The row at a place of a problem. @param q,k,v packed in problem.layout
inline Row row_at(const Problem& problem, const float* q, const float* k, const float* v, RowPlace at) {
    Row row = row_of_all_keys(problem, q, k, v, at);
    narrow(row, problem.keys_of(at.i));
    return row;
}

/// Type of products and sums: float64 for the reference (T is double), float32 for an attention in T.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// Rounds to T and widens again.
template <class T>
Accumulator<T> rounded(Accumulator<T> x) {
    return static_cast<Accumulator<T>>(static_cast<T>(x));
}

/// f(0) + ... + f(n - 1) in eight partial sums, which do not wait for each other.
template <class F>
double sum_of(int n, F f) {
    double part[8] = {};
    int c = 0;
    for (; c + 8 <= n; c += 8)
        for (int u = 0; u < 8; ++u) part[u] += f(c + u);
    for (int u = 0; c < n; ++c, ++u) part[u] += f(c);
    return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

/// s[j] = q . k_j for the visible keys, unscaled. @param s doubles that hold numbers of Accumulator<T>
template <class T>
void dot_products(const Row& row, double* s) {
    for (int j = 0; j < row.visible; ++j) {
        const float* k = row.k + j * row.kv_stride;
        if constexpr (std::is_same_v<T, double>) {
            s[j] = sum_of(row.depth, [&](int c) { return static_cast<double>(row.q[c]) * k[c]; });
        } else {
            float sum = 0;
            for (int c = 0; c < row.depth; ++c) sum += row.q[c] * k[c];
            s[j] = sum;
        }
    }
}

/// The score of a dot product, rounded to T.
template <class T>
Accumulator<T> score(const Row& row, double dot) {
    return rounded<T>(static_cast<Accumulator<T>>(row.scale) * static_cast<Accumulator<T>>(dot));
}

/// o = sum over the visible keys of p_j v_j, rounded to T. @param o (d)
template <class T>
void weighted_sum(const Row& row, const double* p, double* o) {
    Accumulator<T> sum[256] = {};  // check() admits no larger d
    for (int j = 0; j < row.visible; ++j) {
        const Accumulator<T> weight = static_cast<Accumulator<T>>(p[j]);
        const float* v = row.v + j * row.kv_stride;
        for (int c = 0; c < row.d; ++c) sum[c] += weight * v[c];
    }
    for (int c = 0; c < row.d; ++c) o[c] = rounded<T>(sum[c]);
}

/// Calls work(r, scratch) for r = 0 to count - 1 in any order, on all cores. Each thread has a scratch made by make_scratch().
template <class MakeScratch, class Work>
void on_all_cores(long long count, MakeScratch make_scratch, Work work) {
    std::atomic<long long> next{0};
    const auto loop = [&](auto& scratch) {
        for (long long r = next++; r < count; r = next++) work(r, scratch);
    };
    const long long threads = std::clamp<long long>(std::thread::hardware_concurrency(), 1, std::max(1ll, count));
    std::vector<decltype(make_scratch())> scratch;
    for (long long t = 0; t < threads; ++t) scratch.push_back(make_scratch());
    std::vector<std::jthread> helpers;
    for (long long t = 1; t < threads; ++t) helpers.emplace_back([&loop, &mine = scratch[t]] { loop(mine); });
    loop(scratch[0]);
}

}  // namespace workbook
