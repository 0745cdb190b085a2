/// @file
/// ldmatrix: 8 x 8 matrices of 16-bit elements from shared memory into the fragments of mma.sync.
#pragma once

#include "simt/simt.hpp"

#include <cstdint>

namespace ptx {

#if SIMT_EMULATED
namespace detail {

template <int kMatrices>
void ldmatrix(const char* name, bool transposed, std::uint32_t (&r)[kMatrices], const void* row) {
    struct Deposit {
        std::uint32_t* r;
        const std::uint16_t* row;
    } mine{r, static_cast<const std::uint16_t*>(row)};
    simt::cpu::Block& block = simt::cpu::block();
    if (static_cast<int>(block.self().lane) < 8 * kMatrices) block.read_shared_vector(name, row, 16);
    block.meet(name, simt::kFullMask, mine, [&](const auto& lanes, unsigned) {
        const void* rows[8 * kMatrices];
        for (int i = 0; i < 8 * kMatrices; ++i) rows[i] = lanes[i]->row;
        block.charge_shared(simt::SharedAccess::ldmatrix, rows, 8 * kMatrices);
        for (int q = 0; q < kMatrices; ++q) {
            for (int lane = 0; lane < 32; ++lane) {
                const int i = lane / 4, j = 2 * (lane % 4);
                const std::uint16_t low = transposed ? lanes[8 * q + j]->row[i] : lanes[8 * q + i]->row[j];
                const std::uint16_t high = transposed ? lanes[8 * q + j + 1]->row[i] : lanes[8 * q + i]->row[j + 1];
                lanes[lane]->r[q] = low | static_cast<std::uint32_t>(high) << 16;
            }
        }
    });
}

}  // namespace detail
#endif

/// Four matrices: lanes 8q .. 8q+7 pass the addresses of the eight rows of matrix q (16 bytes each, 16-byte aligned, in shared
/// memory); afterwards lane 4i + j holds in r[q] elements (i, 2j) and (i, 2j+1) of matrix q. All 32 lanes must call.
SIMT_DEVICE void ldmatrix_x4(std::uint32_t (&r)[4], const void* row) {
#if SIMT_EMULATED
    detail::ldmatrix("ldmatrix.x4", false, r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
                 : "memory");
#endif
}

/// As ldmatrix_x4, but lane 4i + j holds elements (2j, i) and (2j+1, i): each matrix transposed.
SIMT_DEVICE void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* row) {
#if SIMT_EMULATED
    detail::ldmatrix("ldmatrix.x4.trans", true, r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
                 : "memory");
#endif
}

/// Two matrices, addresses from lanes 0 .. 15.
SIMT_DEVICE void ldmatrix_x2(std::uint32_t (&r)[2], const void* row) {
#if SIMT_EMULATED
    detail::ldmatrix("ldmatrix.x2", false, r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
                 : "memory");
#endif
}

/// Two matrices, each transposed.
SIMT_DEVICE void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* row) {
#if SIMT_EMULATED
    detail::ldmatrix("ldmatrix.x2.trans", true, r, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(row)))
                 : "memory");
#endif
}

}  // namespace ptx
