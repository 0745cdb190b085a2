#include "attention/reference.hpp"

#include "attention/rows.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>

namespace workbook {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// O = softmax(scale * q K^T) V and LSE, in float64. `p` is scratch for the weights of the visible keys.
void exact_row(const Row& row, std::vector<double>& p, const RowResult& out) {
    double m = -infinity;
    dot_products<double>(row, p.data());
    for (int j = 0; j < row.visible; ++j) {
        p[j] = score<double>(row, p[j]);
        m = std::max(m, p[j]);
    }
    double l = 0, o[256] = {}, o_scale[256] = {};  // check() admits no larger d
    for (int j = 0; j < row.visible; ++j) {
        p[j] = std::exp(p[j] - m);
        l += p[j];
    }
    for (int j = 0; j < row.visible; ++j) {
        const float *k = row.k + j * row.kv_stride, *v = row.v + j * row.kv_stride;
        const double weight = p[j] / l;
        const double s_squares = sum_of(row.d, [&](int c) {
            const double term = row.scale * row.q[c] * k[c];
            return term * term;
        });
        for (int c = 0; c < row.d; ++c) {
            const double term = weight * v[c];
            o[c] += term;
            o_scale[c] += term * term;
        }
        out.lse_scale += weight * std::sqrt(s_squares);
    }
    std::copy_n(o, row.d, out.o);
    for (int c = 0; c < row.d; ++c) out.o_scale[c] = std::sqrt(o_scale[c]);
    out.lse = m + std::log(l);
}

// The same with T between the steps, as separate kernels that keep S and P in T would do it.
template <class T>
void plain_row(const Row& row, std::vector<double>& scratch, const RowResult& out) {
    float m = -std::numeric_limits<float>::infinity();
    dot_products<T>(row, scratch.data());
    for (int j = 0; j < row.visible; ++j) {
        scratch[j] = score<T>(row, scratch[j]);
        m = std::max(m, static_cast<float>(scratch[j]));
    }
    float l = 0;
    for (int j = 0; j < row.visible; ++j) {
        const float e = std::exp(static_cast<float>(scratch[j]) - m);
        scratch[j] = e;
        l += e;
    }
    for (int j = 0; j < row.visible; ++j) scratch[j] = rounded<T>(static_cast<float>(scratch[j]) / l);
    weighted_sum<T>(row, scratch.data(), out.o);
    out.lse = m + std::log(l);
}

void check_size(const char* tensor, std::size_t given, long long wanted) {
    if (given != static_cast<std::size_t>(wanted))
        throw InvalidArgument(std::string(tensor) + " has " + std::to_string(given) + " elements; the problem says " +
                              std::to_string(wanted));
}

}  // namespace

ReferenceRows forward_by_rows(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                              std::span<const long long> rows, RowFunction compute) {
    check(problem);
    check_size("q", q.size(), problem.q_elements());
    check_size("k", k.size(), problem.kv_elements());
    check_size("v", v.size(), problem.kv_elements());

    ReferenceRows result;
    if (rows.empty()) {
        result.rows.resize(problem.rows());
        std::iota(result.rows.begin(), result.rows.end(), 0ll);
    } else {
        result.rows.assign(rows.begin(), rows.end());
        std::sort(result.rows.begin(), result.rows.end());
        for (long long row : {result.rows.front(), result.rows.back()})
            if (row < 0 || row >= problem.rows())
                throw InvalidArgument("rows: row " + std::to_string(row) + " is outside of 0 to " + std::to_string(problem.rows() - 1));
    }
    const long long count = static_cast<long long>(result.rows.size());
    const int d = problem.head_dim;
    result.o.assign(count * d, 0.0);
    result.o_scale.assign(count * d, 0.0);
    result.lse_scale.assign(count, 0.0);
    result.lse.assign(count, -infinity);

    on_all_cores(
        count, [&] { return std::vector<double>(problem.kv_seq); },
        [&](long long r, std::vector<double>& scratch) {
            const Row row = row_at(problem, q.data(), k.data(), v.data(), place_of(problem, result.rows[r]));
            if (row.visible == 0) return;  // O = 0 and LSE = -infinity stand
            compute(row, scratch, {&result.o[r * d], &result.o_scale[r * d], result.lse[r], result.lse_scale[r]});
        });
    return result;
}

ReferenceRows reference_forward(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                                std::span<const long long> rows) {
    return forward_by_rows(problem, q, k, v, rows, exact_row);
}

ReferenceRows plain_low_precision_forward(const Problem& problem, std::span<const float> q, std::span<const float> k,
                                          std::span<const float> v, std::span<const long long> rows) {
    ReferenceRows result = with_type(problem.dtype, [&]<class T>() { return forward_by_rows(problem, q, k, v, rows, plain_row<T>); });
    result.o_scale.clear();
    result.lse_scale.clear();
    return result;
}

std::vector<long long> sample_rows(const Problem& problem, long long count) {
    check(problem);
    if (count < 1) throw InvalidArgument("count = " + std::to_string(count) + ": accepted is 1 or more rows");
    const long long total = problem.rows();
    std::vector<long long> rows;
    if (count >= total) {
        rows.resize(total);
        std::iota(rows.begin(), rows.end(), 0ll);
        return rows;
    }
    rows = {0, problem.seq - 1ll, total - problem.seq, total - 1};
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    const std::vector<long long> always = rows;

    // The others: one from each of n equal strata. Its place within the stratum moves by the golden ratio, because rows at a
    // constant distance (a power of two, mostly) would test the same rows of every tile and never the others.
    const long long others = total - static_cast<long long>(always.size());
    const long long n = std::max<long long>(0, count - static_cast<long long>(always.size()));
    for (long long s = 0; s < n; ++s) {
        const auto edge = [&](long long stratum) { return static_cast<long long>(static_cast<__int128>(stratum) * others / n); };
        const double place = std::fmod(static_cast<double>(s) * 0.6180339887498949, 1.0);
        long long row = edge(s) + static_cast<long long>(place * static_cast<double>(edge(s + 1) - edge(s)));
        for (long long fixed : always)  // `row` counts the rows that are not in `always`: step over those before it
            if (fixed <= row) ++row;
        rows.push_back(row);
    }
    std::sort(rows.begin(), rows.end());
    return rows;
}

}  // namespace workbook
