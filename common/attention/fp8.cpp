#include "attention/fp8.hpp"

#include "attention/philox.hpp"
#include "attention/rows.hpp"

#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <string>

namespace workbook {
namespace {

float to_float(std::uint8_t bits) {
    __nv_fp8_e4m3 x;
    x.__x = bits;
    return static_cast<float>(x);
}

std::uint8_t to_e4m3(float x) { return std::isfinite(x) ? __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3) : std::uint8_t{0x7f}; }

/// A tensor in e4m3 and back.
std::vector<float> rounded_to_e4m3(std::span<const float> x, int batch, int heads, int rows, int dim, const Strides& strides, Shares shares,
                                   float factor, ScalingRule rule) {
    const E4m3Tensor tensor = quantise_e4m3(x, batch, heads, rows, dim, strides, shares, factor, rule);
    std::vector<float> values(x.size());
    const int blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
    for (int b = 0; b < batch; ++b)
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < rows; ++i)
                for (int c = 0; c < dim; ++c) {
                    const auto at = static_cast<std::size_t>(b * strides[0] + h * strides[1] + i * strides[2] + c);
                    const auto block = (static_cast<std::size_t>(b) * heads + h) * blocks + i / kRowsOfBlock;
                    values[at] = to_float(tensor.elements[at]) * tensor.scales[block];
                }
    return values;
}

}  // namespace

Scaling largest_is_448(float largest, float factor) {
    const float scale = std::max(std::abs(factor) * largest / 448.0f, 0x1p-96f);
    return {factor / scale, scale};
}

E4m3Tensor quantise_e4m3(std::span<const float> x, int batch, int heads, int rows, int dim, const Strides& strides, Shares shares,
                         float factor, ScalingRule rule) {
    if (x.size() != static_cast<std::size_t>(batch) * heads * rows * dim)
        throw InvalidArgument("x has " + std::to_string(x.size()) + " elements; the shape says " +
                              std::to_string(static_cast<long long>(batch) * heads * rows * dim));
    const int blocks = (rows + kRowsOfBlock - 1) / kRowsOfBlock;
    E4m3Tensor result{std::vector<std::uint8_t>(x.size()), std::vector<float>(static_cast<std::size_t>(batch) * heads * blocks)};
    // Calls f(place of the element in x, number of its block).
    const auto for_all = [&](auto&& f) {
        for (int b = 0; b < batch; ++b)
            for (int h = 0; h < heads; ++h)
                for (int i = 0; i < rows; ++i)
                    for (int c = 0; c < dim; ++c)
                        f(static_cast<std::size_t>(b * strides[0] + h * strides[1] + i * strides[2] + c),
                          (static_cast<std::size_t>(b) * heads + h) * blocks + i / kRowsOfBlock);
    };
    std::vector<float>& scales = result.scales;  // at first the largest magnitudes
    std::vector<float> multipliers(scales.size());
    for_all([&](std::size_t at, std::size_t block) {
        if (std::isfinite(x[at])) scales[block] = std::max(scales[block], std::abs(x[at]));
    });
    const std::size_t together = shares == Shares::tensor ? scales.size() : shares == Shares::head ? static_cast<std::size_t>(blocks) : 1;
    for (std::size_t first = 0; first < scales.size(); first += together) {
        const auto [multiplier, scale] = rule(*std::max_element(&scales[first], &scales[first] + together), factor);
        std::fill_n(&multipliers[first], together, multiplier);
        std::fill_n(&scales[first], together, scale);
    }
    for_all([&](std::size_t at, std::size_t block) { result.elements[at] = to_e4m3(x[at] * multipliers[block]); });
    return result;
}

void rotate_rows(std::span<float> x, int d, std::uint64_t seed) {
    if (d < 1 || (d & (d - 1)) != 0) throw InvalidArgument("d = " + std::to_string(d) + ": a power of two is accepted");
    if (x.size() % static_cast<std::size_t>(d) != 0)
        throw InvalidArgument("x has " + std::to_string(x.size()) + " elements; a multiple of d = " + std::to_string(d) + " is accepted");
    std::vector<double> row(static_cast<std::size_t>(d));
    for (std::size_t first = 0; first < x.size(); first += row.size()) {
        for (std::size_t c = 0; c < row.size(); ++c) row[c] = random_words(seed, 0, c, 0).word[0] & 1 ? -x[first + c] : x[first + c];
        for (std::size_t half = 1; half < row.size(); half *= 2)  // the fast Walsh-Hadamard transform
            for (std::size_t c = 0; c < row.size(); ++c) {
                if (c & half) continue;
                const double a = row[c], b = row[c + half];
                row[c] = a + b;
                row[c + half] = a - b;
            }
        for (std::size_t c = 0; c < row.size(); ++c) x[first + c] = static_cast<float>(row[c] / std::sqrt(static_cast<double>(d)));
    }
}

ReferenceRows fp8_forward(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                          std::span<const long long> rows, Shares shares, bool rotated, ScalingRule rule) {
    check(problem);
    std::vector<float> turned[2] = {{q.begin(), q.end()}, {k.begin(), k.end()}};
    if (rotated)
        for (std::vector<float>& x : turned) rotate_rows(x, problem.head_dim, 1);
    const auto of_keys = [&](std::span<const float> x) {
        return rounded_to_e4m3(x, problem.batch, problem.kv_heads, problem.kv_seq, problem.head_dim, problem.kv_strides(), shares, 1.0f,
                               rule);
    };
    const std::vector<float> k8 = of_keys(turned[1]), v8 = of_keys(v);
    // Scores come in units of log 2.
    Problem in_log2 = problem;
    in_log2.softmax_scale = 1.0f;
    const std::vector<float> q8 = rounded_to_e4m3(turned[0], problem.batch, problem.heads, problem.seq, problem.head_dim,
                                                  problem.q_strides(), shares, problem.scale() * 1.4426950408889634f, rule);
    ReferenceRows result = forward_by_rows(in_log2, q8, k8, v8, rows, [](const Row& row, std::vector<double>& s, const RowResult& out) {
        float m = -INFINITY, l = 0;
        dot_products<float>(row, s.data());
        for (int j = 0; j < row.visible; ++j) m = std::max(m, static_cast<float>(s[j]));
        for (int j = 0; j < row.visible; ++j) {
            const float p = std::exp2(static_cast<float>(s[j]) - m);
            l += p;
            s[j] = to_float(to_e4m3(32 * p)) / 32;
        }
        weighted_sum<float>(row, s.data(), out.o);
        for (int c = 0; c < row.d; ++c) out.o[c] /= l;
        out.lse = 0.69314718055994531 * (m + std::log2(l));
    });
    with_type(problem.dtype, [&]<class T>() {
        for (double& x : result.o) x = static_cast<float>(static_cast<T>(static_cast<float>(x)));
    });
    return result;
}

ReferenceRows plain_fp8_forward(const Problem& problem, std::span<const float> q, std::span<const float> k, std::span<const float> v,
                                std::span<const long long> rows) {
    ReferenceRows result = fp8_forward(problem, q, k, v, rows, Shares::block, false);
    result.rounding = Rounding{0x1p-4, problem.dtype == DType::f16 ? 0x1p-11 : 0x1p-8, 0x1p-14};
    return result;
}

}  // namespace workbook
