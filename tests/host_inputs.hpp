/// @file
/// Random tensors on the host for the tests of the reference and of the judge.
#pragma once

#include "attention/philox.hpp"
#include "attention/problem.hpp"

#include <vector>

namespace workbook {

/// Q, K and V of a problem, packed in its layout, rounded to its type and widened to float.
struct HostInputs {
    std::vector<float> q, k, v;

    /// @param factor scales Q: logits of N(0, factor^2) with the default scale
    HostInputs(const Problem& problem, std::uint64_t seed, float factor = 1)
        : q(tensor(problem.q_elements(), problem.dtype, seed, 0, factor)),
          k(tensor(problem.kv_elements(), problem.dtype, seed, 1, 1)),
          v(tensor(problem.kv_elements(), problem.dtype, seed, 2, 1)) {}

    /// Rounds to a type and widens again.
    static float rounded(DType type, float x) {
        return with_type(type, [&]<class T>() { return static_cast<float>(static_cast<T>(x)); });
    }

private:
    static std::vector<float> tensor(long long count, DType type, std::uint64_t seed, std::uint32_t stream, float factor) {
        std::vector<float> values(count);
        for (long long e = 0; e < count; ++e)
            values[e] = rounded(type, factor * static_cast<float>(standard_normal(random_words(seed, stream, e, 0))));
        return values;
    }
};

}  // namespace workbook
