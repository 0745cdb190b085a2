/// @file
/// Random inputs that are the same bits on every machine: Philox4x32-10 (Salmon et al. 2011) and Box-Muller.
#pragma once

#include "attention/problem.hpp"
#include "tensor/buffer.hpp"

#include <cstdint>
#include <string_view>

namespace workbook {

/// `normal` is N(0, 1). `outliers` is N(0, 1) plus, with probability 0.001, N(0, 100) on top (FlashAttention-3, section 4.3; 100 is
/// the variance).
enum class Distribution { normal, outliers };

const char* name(Distribution dist);
/// @throws InvalidArgument
Distribution parse_distribution(std::string_view word);

/// Which tensor of a problem a stream of random numbers fills.
enum class Stream : std::uint32_t { q = 0, k = 1, v = 2, d_o = 3 };

/// Fills `count` elements in logical order (B, H, N, d): element e depends on (seed, stream, e) alone, so a layout or a
/// machine does not change the numbers. Each is computed in float64, rounded to float32 and then to `type`. Runs on the
/// device through Thrust. Elements that the strides step over are left as they are.
/// @param heads,rows,dim  shape of the tensor beside its batch; @param strides its strides in elements
/// @throws InvalidArgument when a size is below 1, a stride negative or the buffer too small for the shape and strides
void fill_random(DeviceBuffer& buffer, DType type, int batch, int heads, int rows, int dim, const Strides& strides, std::uint64_t seed,
                 Stream stream, Distribution dist);

}  // namespace workbook
