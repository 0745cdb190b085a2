// 04c over a packed batch: a thread block looks up which tile of which sequence is its own, and does with it what 04c does.
#pragma once

#include "04_flash_attention_2/tensor_core.cuh"
#include "b_varlen/lookup.cuh"

namespace stepb {

/// Grid: all heads of the first tile, then those of the second, ...
template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads) void varlen_forward(TensorView<const int, 2> tiles,  // (tiles, kTileNumbers)
                                                                  TensorView<const T, 4> Q,        // (1, Hq, Nq of all, D)
                                                                  TensorView<const T, 4> K,        // (1, Hkv, Nkv of all, D)
                                                                  TensorView<const T, 4> V,        // (1, Hkv, Nkv of all, D)
                                                                  TensorView<T, 4> O,              // (1, Hq, Nq of all, D)
                                                                  TensorView<float, 3> LSE,        // (1, Hq, Nq of all)
                                                                  float scale_log2,                // softmax_scale * log2(e)
                                                                  bool causal) {
    const int heads = Q.extent(1), h = blockIdx.x % heads, hkv = h / (heads / K.extent(1));
    const Tile tile = look_up(tiles, blockIdx.x / heads);
    step04::query_tile<T, Shape>(queries_of(tile, Q)(0, h), keys_of(tile, K)(0, hkv), keys_of(tile, V)(0, hkv), queries_of(tile, O)(0, h),
                                 queries_of(tile, LSE)(0, h), tile.row, scale_log2, mask_of(tile, causal));
}

}  // namespace stepb
