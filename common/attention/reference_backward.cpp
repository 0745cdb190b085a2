#include "attention/reference_backward.hpp"

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

/// What the gradients need of a softmax row; of a row that sees nothing as it stands here.
struct Statistics {
    double lse = -std::numeric_limits<double>::infinity();
    double D = 0;
};

/// Room for the numbers of one row, one for each key.
struct Scratch {
    std::vector<double> p, dp;
};

// The row with the gradient of O in the place of Q and V in that of K: its dot products are dP.
Row of_output_gradient(Row row, const float* d_o) {
    row.q = d_o;
    row.k = row.v;
    return row;
}

// Leaves P, rounded to T, in `p`.
template <class T>
Statistics softmax(const Row& row, const float* d_o, double* p) {
    using A = Accumulator<T>;
    if (row.visible == 0) return {};
    dot_products<T>(row, p);
    A m = -std::numeric_limits<A>::infinity(), l = 0, D = 0;
    for (int j = 0; j < row.visible; ++j) {
        p[j] = score<T>(row, p[j]);
        m = std::max(m, static_cast<A>(p[j]));
    }
    for (int j = 0; j < row.visible; ++j) {
        p[j] = std::exp(static_cast<A>(p[j]) - m);
        l += static_cast<A>(p[j]);
    }
    for (int j = 0; j < row.visible; ++j) p[j] = rounded<T>(static_cast<A>(p[j]) / l);
    double o[256];  // check() admits no larger d
    weighted_sum<T>(row, p, o);
    for (int c = 0; c < row.d; ++c) D += static_cast<A>(o[c]) * d_o[c];
    return {m + std::log(l), D};
}

/// Adds terms that are summed in Accumulator<T>, and the squares of their sizes.
template <class T>
struct Sum {
    Accumulator<T> value[256] = {};
    double squares[256] = {};

    void add(Accumulator<T> weight, double size, const float* row, int d) {
        for (int c = 0; c < d; ++c) {
            value[c] += weight * row[c];
            if constexpr (std::is_same_v<T, double>) squares[c] += size * row[c] * size * row[c];
        }
    }
    void store(double factor, int d, double* sum, double* scale) const {
        for (int c = 0; c < d; ++c) {
            sum[c] = rounded<T>(static_cast<Accumulator<T>>(factor) * value[c]);
            scale[c] = std::abs(factor) * std::sqrt(squares[c]);
        }
    }
};

template <class T>
Statistics gradient_of_query(const Row& row, const float* d_o, Scratch& scratch, double* dq, double* dq_scale) {
    using A = Accumulator<T>;
    const Statistics statistics = softmax<T>(row, d_o, scratch.p.data());
    dot_products<T>(of_output_gradient(row, d_o), scratch.dp.data());
    const A D = static_cast<A>(statistics.D);
    Sum<T> sum;
    for (int j = 0; j < row.visible; ++j) {
        const A p = static_cast<A>(scratch.p[j]), dp = rounded<T>(static_cast<A>(scratch.dp[j]));
        sum.add(rounded<T>(p * (dp - D)), p * (std::abs(dp) + std::abs(D)), row.k + j * row.kv_stride, row.d);
    }
    sum.store(row.scale, row.d, dq, dq_scale);
    return statistics;
}

// The noise of LSE as reference_forward() has it in lse_scale. `p` holds P.
double noise_of_logits(const Row& row, const double* p) {
    double noise = 0;
    for (int j = 0; j < row.visible; ++j) {
        const float* k = row.k + j * row.kv_stride;
        const double squares = sum_of(row.d, [&](int c) { return std::pow(row.scale * row.q[c] * k[c], 2); });
        noise += p[j] * std::sqrt(squares);
    }
    return noise;
}

template <class T>
class GradientPass {
public:
    GradientPass(const Problem& problem, const BackwardInputs& in) : problem_(problem), in_(in), q_strides_(problem.q_strides()) {}

    void queries(ReferenceGradients& out, std::vector<Statistics>* keep) const {
        const long long count = static_cast<long long>(out.rows.size());
        std::vector<double> logits(count, 0.0);
        on_all_cores(
            count,
            [&] {
                return Scratch{std::vector<double>(problem_.kv_seq), std::vector<double>(problem_.kv_seq)};
            },
            [&](long long r, Scratch& scratch) {
                const RowPlace at = place_of(problem_, out.rows[r]);
                const Row row = row_at(problem_, in_.q.data(), in_.k.data(), in_.v.data(), at);
                const int d = row.d;
                const Statistics statistics = gradient_of_query<T>(row, d_o(at), scratch, &out.dq[r * d], &out.dq_scale[r * d]);
                if (row.visible > 0) logits[r] = std::max(std::abs(statistics.lse), noise_of_logits(row, scratch.p.data()));
                if (keep) (*keep)[out.rows[r]] = statistics;
            });
        out.logits = *std::max_element(logits.begin(), logits.end());
    }

    void keys(ReferenceGradients& out, const std::vector<Statistics>& statistics) const {
        using A = Accumulator<T>;
        const int group = problem_.heads / problem_.kv_heads, d = problem_.head_dim;
        on_all_cores(
            static_cast<long long>(out.kv_rows.size()), [] { return 0; },
            [&](long long r, int) {
                const long long flat = out.kv_rows[r];
                const int j = static_cast<int>(flat % problem_.kv_seq),
                          kv_head = static_cast<int>(flat / problem_.kv_seq % problem_.kv_heads),
                          b = static_cast<int>(flat / problem_.kv_seq / problem_.kv_heads);
                const Range seeing = problem_.queries_of(j);
                Sum<T> dk, dv;
                for (int h = kv_head * group; h < (kv_head + 1) * group; ++h)
                    for (int i = seeing.begin; i < seeing.end; ++i) {
                        Row row = row_of_all_keys(problem_, in_.q.data(), in_.k.data(), in_.v.data(), {b, h, i});
                        narrow(row, {j, j + 1});  // as if the row saw this key alone
                        const float* const gradient = d_o({b, h, i});
                        const Statistics& of = statistics[(static_cast<long long>(b) * problem_.heads + h) * problem_.seq + i];
                        double s, dot;
                        dot_products<T>(row, &s);
                        dot_products<T>(of_output_gradient(row, gradient), &dot);
                        const A p = rounded<T>(std::exp(score<T>(row, s) - static_cast<A>(of.lse)));
                        const A dp = rounded<T>(static_cast<A>(dot)), D = static_cast<A>(of.D);
                        dv.add(p, p, gradient, d);
                        dk.add(rounded<T>(p * (dp - D)), p * (std::abs(dp) + std::abs(D)), row.q, d);
                    }
                dv.store(1, d, &out.dv[r * d], &out.dv_scale[r * d]);
                dk.store(problem_.scale(), d, &out.dk[r * d], &out.dk_scale[r * d]);
            });
    }

    /// From what a forward pass left.
    std::vector<Statistics> statistics(std::span<const float> o, std::span<const float> lse) const {
        std::vector<Statistics> all(problem_.rows());
        for (long long r = 0; r < problem_.rows(); ++r) {
            const RowPlace at = place_of(problem_, r);
            const float *o_row = o.data() + offset(at), *gradient = d_o(at);
            Accumulator<T> D = 0;
            for (int c = 0; c < problem_.head_dim; ++c) D += static_cast<Accumulator<T>>(o_row[c]) * gradient[c];
            all[r] = {lse[r], D};
        }
        return all;
    }

private:
    long long offset(RowPlace at) const { return at.b * q_strides_[0] + at.h * q_strides_[1] + at.i * q_strides_[2]; }
    const float* d_o(RowPlace at) const { return in_.d_o.data() + offset(at); }

    const Problem& problem_;
    const BackwardInputs& in_;
    const Strides q_strides_;
};

void check_size(const char* tensor, std::size_t given, long long wanted) {
    if (given != static_cast<std::size_t>(wanted))
        throw InvalidArgument(std::string(tensor) + " has " + std::to_string(given) + " elements; the problem says " +
                              std::to_string(wanted));
}

std::vector<long long> checked_rows(const char* name, std::vector<long long> rows, long long total) {
    std::sort(rows.begin(), rows.end());
    for (const long long row : {rows.front(), rows.back()})
        if (row < 0 || row >= total)
            throw InvalidArgument(std::string(name) + ": row " + std::to_string(row) + " is outside of 0 to " + std::to_string(total - 1));
    return rows;
}

template <class T>
ReferenceGradients backward(const Problem& problem, const BackwardInputs& in, const GradientSample& sample) {
    check(problem);
    check_size("q", in.q.size(), problem.q_elements());
    check_size("k", in.k.size(), problem.kv_elements());
    check_size("v", in.v.size(), problem.kv_elements());
    check_size("d_o", in.d_o.size(), problem.q_elements());
    const long long kv_rows = problem.kv_elements() / problem.head_dim;
    const bool all = sample.rows.empty() && sample.kv_rows.empty();
    ReferenceGradients out;
    if (all) {
        out.rows.resize(problem.rows());
        out.kv_rows.resize(kv_rows);
        std::iota(out.rows.begin(), out.rows.end(), 0ll);
        std::iota(out.kv_rows.begin(), out.kv_rows.end(), 0ll);
    } else {
        if (sample.rows.empty() || sample.kv_rows.empty())
            throw InvalidArgument("sample has rows of dQ alone or of dK and dV alone; one or more of each, or none, are accepted");
        check_size("sample.o", sample.o.size(), problem.q_elements());
        check_size("sample.lse", sample.lse.size(), problem.rows());
        out.rows = checked_rows("sample.rows", sample.rows, problem.rows());
        out.kv_rows = checked_rows("sample.kv_rows", sample.kv_rows, kv_rows);
    }
    const std::size_t d = problem.head_dim;
    for (std::vector<double>* values : {&out.dq, &out.dq_scale}) values->assign(out.rows.size() * d, 0.0);
    for (std::vector<double>* values : {&out.dk, &out.dk_scale, &out.dv, &out.dv_scale}) values->assign(out.kv_rows.size() * d, 0.0);

    const GradientPass<T> pass(problem, in);
    if (all) {
        std::vector<Statistics> statistics(problem.rows());
        pass.queries(out, &statistics);
        pass.keys(out, statistics);
    } else {
        pass.queries(out, nullptr);
        pass.keys(out, pass.statistics(sample.o, sample.lse));
    }
    return out;
}

}  // namespace

ReferenceGradients reference_backward(const Problem& problem, const BackwardInputs& in, const GradientSample& sample) {
    return backward<double>(problem, in, sample);
}

ReferenceGradients plain_low_precision_backward(const Problem& problem, const BackwardInputs& in, const GradientSample& sample) {
    ReferenceGradients result = with_type(problem.dtype, [&]<class T>() { return backward<T>(problem, in, sample); });
    for (std::vector<double>* scale : {&result.dq_scale, &result.dk_scale, &result.dv_scale}) scale->clear();
    return result;
}

std::vector<long long> sample_kv_rows(const Problem& problem, long long count) {
    Problem of_keys = problem;
    of_keys.heads = problem.kv_heads;
    of_keys.seq = problem.kv_seq;
    of_keys.cu_seqlens_q.clear();
    of_keys.cu_seqlens_k.clear();
    return sample_rows(of_keys, count);
}

}  // namespace workbook
