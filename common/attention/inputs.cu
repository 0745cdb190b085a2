#include "attention/inputs.hpp"

#include "attention/philox.hpp"

#include <thrust/execution_policy.h>
#include <thrust/for_each.h>
#include <thrust/iterator/counting_iterator.h>

#include <string>

namespace workbook {
namespace {

/// What an element draws from Philox, each under a number of its own.
enum Draw : std::uint32_t { draw_normal = 0, draw_outlier_gate = 1, draw_outlier = 2 };

constexpr double outlier_probability = 0.001;
constexpr double outlier_deviation = 10;  // variance 100

/// Writes element e of a (B, H, N, d) tensor, counted in that order whatever the strides.
template <class T>
struct FillElement {
    T* data;
    long long heads, rows, dim;
    long long batch_stride, head_stride, row_stride;
    std::uint64_t seed;
    std::uint32_t stream;
    bool outliers;

    __host__ __device__ void operator()(long long e) const {
        double x = standard_normal(random_words(seed, stream, e, draw_normal));
        if (outliers) {
            const PhiloxWords gate = random_words(seed, stream, e, draw_outlier_gate);
            if (unit_interval(gate.word[0], gate.word[1]) < outlier_probability)
                x = std::fma(outlier_deviation, standard_normal(random_words(seed, stream, e, draw_outlier)), x);
        }
        const long long c = e % dim, i = e / dim % rows, h = e / dim / rows % heads, b = e / dim / rows / heads;
        data[b * batch_stride + h * head_stride + i * row_stride + c] = static_cast<T>(static_cast<float>(x));
    }
};

void check_positive(const char* parameter, int value) {
    if (value < 1) throw InvalidArgument(std::string(parameter) + " = " + std::to_string(value) + ": accepted is 1 or more");
}

}  // namespace

const char* name(Distribution dist) { return dist == Distribution::normal ? "normal" : "outliers"; }

Distribution parse_distribution(std::string_view word) {
    for (Distribution dist : {Distribution::normal, Distribution::outliers})
        if (word == name(dist)) return dist;
    throw InvalidArgument("distribution = \"" + std::string(word) + "\": accepted are normal and outliers");
}

void fill_random(DeviceBuffer& buffer, DType type, int batch, int heads, int rows, int dim, const Strides& strides, std::uint64_t seed,
                 Stream stream, Distribution dist) {
    check_positive("batch", batch);
    check_positive("heads", heads);
    check_positive("rows", rows);
    check_positive("dim", dim);
    for (long long stride : strides)
        if (stride < 0) throw InvalidArgument("strides: " + std::to_string(stride) + " is negative; accepted is 0 or more elements");
    const auto room = static_cast<__int128>(buffer.size() / size_of(type));
    const __int128 last = static_cast<__int128>(batch - 1) * strides[0] + static_cast<__int128>(heads - 1) * strides[1] +
                          static_cast<__int128>(rows - 1) * strides[2] + dim - 1;
    if (last >= room)
        throw InvalidArgument("buffer holds " + std::to_string(static_cast<long long>(room)) + " " + name(type) + " elements; the shape (" +
                              std::to_string(batch) + ", " + std::to_string(heads) + ", " + std::to_string(rows) + ", " +
                              std::to_string(dim) + ") with strides (" + std::to_string(strides[0]) + ", " + std::to_string(strides[1]) +
                              ", " + std::to_string(strides[2]) + ", 1) reaches further");
    with_type(type, [&]<class T>() {
        thrust::for_each_n(thrust::device, thrust::counting_iterator<long long>(0), static_cast<long long>(batch) * heads * rows * dim,
                           FillElement<T>{static_cast<T*>(buffer.data()), heads, rows, dim, strides[0], strides[1], strides[2], seed,
                                          static_cast<std::uint32_t>(stream), dist == Distribution::outliers});
    });
}

}  // namespace workbook
