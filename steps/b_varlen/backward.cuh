// 05c over a packed batch. LSE, D and the sums of dQ have whole blocks of Br queries for each sequence, so that no block belongs to two.
#pragma once

#include "05_recompute_backward/before_and_after.cuh"
#include "05_recompute_backward/tensor_core.cuh"
#include "b_varlen/lookup.cuh"

namespace stepb {

/// Of tensors with whole blocks, (1, Hq, rows) and (1, Hq, blocks, Br D), the part of the tile's sequence.
template <int Br, class View>
SIMT_DEVICE View padded_rows_of(const Tile& tile, const View& tensor) {
    return tensor.template slice<2>(tile.first_block * Br, (tile.queries + Br - 1) / Br * Br);
}
template <int Br, class View>
SIMT_DEVICE View blocks_of(const Tile& tile, const View& tensor) {
    return tensor.template slice<2>(tile.first_block, (tile.queries + Br - 1) / Br);
}

/// Grid: the rows of all blocks of Br queries, and the heads.
template <class T, class Shape>
__global__ __launch_bounds__(step05::kRowThreads) void varlen_prepare(TensorView<const int, 2> query_blocks,  // (blocks, kTileNumbers)
                                                                      TensorView<const T, 4> O,               // (1, Hq, Nq of all, D)
                                                                      TensorView<const T, 4> dO,              // (1, Hq, Nq of all, D)
                                                                      TensorView<const float, 3> LSE,         // (1, Hq, Nq of all)
                                                                      TensorView<float, 3> LSE2,              // (1, Hq, blocks Br)
                                                                      TensorView<float, 3> D3,                // (1, Hq, blocks Br)
                                                                      TensorView<float, 4> dQ_acc) {          // (1, Hq, blocks, Br D)
    constexpr int Br = Shape::Br, kLanes = Shape::D / 8, kRows = step05::kRowsOfBlock<Shape::D>, kParts = Br / kRows;
    const Tile tile = look_up(query_blocks, blockIdx.x / kParts);
    const int i = tile.row + blockIdx.x % kParts * kRows + threadIdx.x / kLanes, c = threadIdx.x % kLanes * 8, h = blockIdx.y;
    step05::prepare_row<T, Shape>(queries_of(tile, O), queries_of(tile, dO), queries_of(tile, LSE), padded_rows_of<Br>(tile, LSE2),
                                  padded_rows_of<Br>(tile, D3), blocks_of<Br>(tile, dQ_acc), i, c, h, 0);
}

/// Grid: all key/value heads of the first tile, then those of the second, ...
template <class T, class Shape>
__global__ __launch_bounds__(Shape::kThreads) void varlen_backward(TensorView<const int, 2> tiles,   // (tiles, kTileNumbers)
                                                                   TensorView<const T, 4> Q,         // (1, Hq, Nq of all, D)
                                                                   TensorView<const T, 4> K,         // (1, Hkv, Nkv of all, D)
                                                                   TensorView<const T, 4> V,         // (1, Hkv, Nkv of all, D)
                                                                   TensorView<const T, 4> dO,        // (1, Hq, Nq of all, D)
                                                                   TensorView<const float, 3> LSE2,  // (1, Hq, blocks Br)
                                                                   TensorView<const float, 3> D3,    // (1, Hq, blocks Br)
                                                                   TensorView<float, 4> dQ_acc,      // (1, Hq, blocks, Br D)
                                                                   TensorView<T, 4> dK,              // (1, Hkv, Nkv of all, D)
                                                                   TensorView<T, 4> dV,              // (1, Hkv, Nkv of all, D)
                                                                   float scale, bool causal) {
    constexpr int Br = Shape::Br;
    const int kv_heads = K.extent(1), hkv = blockIdx.x % kv_heads;
    const Tile tile = look_up(tiles, blockIdx.x / kv_heads);
    step05::key_tile<T, Shape>(queries_of(tile, Q), keys_of(tile, K), keys_of(tile, V), queries_of(tile, dO),
                               padded_rows_of<Br>(tile, LSE2), padded_rows_of<Br>(tile, D3), blocks_of<Br>(tile, dQ_acc), keys_of(tile, dK),
                               keys_of(tile, dV), tile.row, hkv, 0, scale, mask_of(tile, causal));
}

/// Grid as that of varlen_prepare, with half as many thread blocks.
template <class T, class Shape>
__global__ __launch_bounds__(step05::kRowThreads) void varlen_finish(TensorView<const int, 2> query_blocks,  // (blocks, kTileNumbers)
                                                                     TensorView<const float, 4> dQ_acc,      // (1, Hq, blocks, Br D)
                                                                     TensorView<T, 4> dQ,                    // (1, Hq, Nq of all, D)
                                                                     float scale) {
    constexpr int Br = Shape::Br, kLanes = Shape::D / 16, kRows = 2 * step05::kRowsOfBlock<Shape::D>, kParts = Br / kRows;
    const Tile tile = look_up(query_blocks, blockIdx.x / kParts);
    const int i = tile.row + blockIdx.x % kParts * kRows + threadIdx.x / kLanes, c = threadIdx.x % kLanes * 16, h = blockIdx.y;
    step05::finish_row<T, Shape>(blocks_of<Br>(tile, dQ_acc), queries_of(tile, dQ), i, c, h, 0, scale);
}

}  // namespace stepb
