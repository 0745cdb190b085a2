/// @file
/// stmatrix: 8 x 8 matrices of 16-bit elements from fragments to shared memory, the inverse of ldmatrix.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

#if SIMT_EMULATED
namespace detail {

template <int kMatrices>
void stmatrix(const char* name, bool transposed, const std::uint32_t (&r)[kMatrices], void* row) {
    struct Deposit {
        const std::uint32_t* r;
        std::uint16_t* row;
    } mine{r, static_cast<std::uint16_t*>(row)};
    simt::cpu::Block& block = simt::cpu::block();
    if (static_cast<int>(block.self().lane) < 8 * kMatrices) block.write_shared_vector(name, row, 16);
    block.meet(name, simt::kFullMask, mine, [&](const auto& lanes, unsigned) {
        const void* rows[8 * kMatrices];
        for (int i = 0; i < 8 * kMatrices; ++i) rows[i] = lanes[i]->row;
        block.charge_shared(simt::SharedAccess::stmatrix, rows, 8 * kMatrices);
        for (int q = 0; q < kMatrices; ++q) {
            for (int lane = 0; lane < 32; ++lane) {
                const int i = lane / 4, j = 2 * (lane % 4);
                const auto low = static_cast<std::uint16_t>(lanes[lane]->r[q]), high = static_cast<std::uint16_t>(lanes[lane]->r[q] >> 16);
                (transposed ? lanes[8 * q + j]->row[i] : lanes[8 * q + i]->row[j]) = low;
                (transposed ? lanes[8 * q + j + 1]->row[i] : lanes[8 * q + i]->row[j + 1]) = high;
            }
        }
    });
}

}  // namespace detail
#endif

/// Stores kMatrices (1, 2 or 4) matrices: lanes 8q .. 8q+7 pass the addresses of the eight rows of matrix q (16 bytes each, 16-byte
/// aligned); lane 4i + j holds in r[q] elements (i, 2j) and (i, 2j+1) of matrix q, or with kTransposed elements (2j, i) and
/// (2j+1, i). All 32 lanes must call.
template <bool kTransposed = false, int kMatrices>
SIMT_DEVICE void stmatrix(const std::uint32_t (&r)[kMatrices], void* row) {
    static_assert(kMatrices == 1 || kMatrices == 2 || kMatrices == 4, "stmatrix stores 1, 2 or 4 matrices");
#if SIMT_EMULATED
    constexpr const char* kName = kMatrices == 1 ? "stmatrix.x1" : kMatrices == 2 ? "stmatrix.x2" : "stmatrix.x4";
    detail::stmatrix(kName, kTransposed, r, row);
#else
    const std::uint32_t to = shared_address(row);
    if constexpr (kMatrices == 1 && !kTransposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(to), "r"(r[0]) : "memory");
    if constexpr (kMatrices == 1 && kTransposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(to), "r"(r[0]) : "memory");
    if constexpr (kMatrices == 2 && !kTransposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1,%2};" ::"r"(to), "r"(r[0]), "r"(r[1]) : "memory");
    if constexpr (kMatrices == 2 && kTransposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(to), "r"(r[0]), "r"(r[1]) : "memory");
    if constexpr (kMatrices == 4 && !kTransposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
                     : "memory");
    if constexpr (kMatrices == 4 && kTransposed)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]),
                     "r"(r[3])
                     : "memory");
#endif
}

}  // namespace ptx
