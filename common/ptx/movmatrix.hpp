/// @file
/// movmatrix: an 8 x 8 matrix of 16-bit elements, transposed within the registers of a warp.
#pragma once

#include "simt/simt.hpp"

#include <cstdint>

namespace ptx {

/// Lane 4i + j passes elements (i, 2j) and (i, 2j + 1), the first in the low half, and gets (2j, i) and (2j + 1, i). All 32 lanes must
/// call.
SIMT_DEVICE std::uint32_t movmatrix(std::uint32_t x) {
    std::uint32_t transposed;
#if SIMT_EMULATED
    struct Deposit {
        std::uint32_t x;
        std::uint32_t* transposed;
    } mine{x, &transposed};
    simt::cpu::block().meet("movmatrix", simt::kFullMask, mine, [](const auto& lanes, unsigned) {
        const auto element = [&](int i, int j) { return lanes[4 * i + j / 2]->x >> (j % 2 * 16) & 0xffff; };
        for (int i = 0; i < 8; ++i)
            for (int j = 0; j < 4; ++j) *lanes[4 * i + j]->transposed = element(2 * j, i) | element(2 * j + 1, i) << 16;
    });
#else
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(x));
#endif
    return transposed;
}

}  // namespace ptx
