// Where the keys and values of a sequence lie: in one piece, or in pages that a block table names.
#pragma once

#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace stepa {

using simt::TensorView;

/// The cache of one key/value head in one piece.
template <class T>
struct ContiguousHead {
    TensorView<const T, 2> K, V;  // (Nkv, D)

    SIMT_DEVICE int place(int key) const { return key; }
    SIMT_DEVICE auto k(int row, int c) const { return &K(row, c); }
    SIMT_DEVICE auto v(int row, int c) const { return &V(row, c); }
};

template <class T>
struct ContiguousCache {
    TensorView<const T, 4> K, V;  // (B, Hkv, Nkv, D)
    int Nkv;

    SIMT_DEVICE ContiguousHead<T> head(int b, int hkv) const { return {K(b, hkv), V(b, hkv)}; }
};

/// The cache of one key/value head in pages: key j is row j % page_size of page block_table(j / page_size).
template <class T>
struct PagedHead {
    TensorView<const T, 4> K, V;           // (pages, Hkv, page_size, D)
    TensorView<const int, 1> block_table;  // (pages of a sequence)
    int hkv, page_bits;

    struct Place {
        int page, row;
    };
    SIMT_DEVICE Place place(int key) const { return {block_table(key >> page_bits), key & ((1 << page_bits) - 1)}; }
    SIMT_DEVICE auto k(Place at, int c) const { return &K(at.page, hkv, at.row, c); }
    SIMT_DEVICE auto v(Place at, int c) const { return &V(at.page, hkv, at.row, c); }
};

template <class T>
struct PagedCache {
    TensorView<const T, 4> K, V;           // (pages, Hkv, page_size, D)
    TensorView<const int, 2> block_table;  // (B, pages of a sequence)
    int Nkv;
    int page_bits;  // log2(page_size)

    SIMT_DEVICE PagedHead<T> head(int b, int hkv) const { return {K, V, block_table(b), hkv, page_bits}; }
};

/// Copies K and V into pages: a block the part of a page that holds keys, for one head. A server's cache is written so, token by token.
template <class T>
__global__ void fill_pages(ContiguousCache<T> from, TensorView<T, 4> K_pages, TensorView<T, 4> V_pages,
                           TensorView<const int, 2> block_table) {
    const int hkv = blockIdx.y, b = blockIdx.z, page_size = K_pages.extent(2), D = K_pages.extent(3);
    const int page = block_table(b, blockIdx.x), key0 = static_cast<int>(blockIdx.x) * page_size;
    for (int row = threadIdx.y; row < page_size && key0 + row < from.Nkv; row += blockDim.y)
        for (int c = static_cast<int>(threadIdx.x) * 8; c < D; c += static_cast<int>(blockDim.x) * 8) {
            simt::store_global_16(&K_pages(page, hkv, row, c), simt::load_global_16(&from.K(b, hkv, key0 + row, c)));
            simt::store_global_16(&V_pages(page, hkv, row, c), simt::load_global_16(&from.V(b, hkv, key0 + row, c)));
        }
}

}  // namespace stepa
