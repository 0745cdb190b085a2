/// @file
/// mma.sync: matrix products of a warp on the tensor cores.
#pragma once

#include "simt/simt.hpp"

#include <cstdint>
#include <cstring>
#include <type_traits>

#if SIMT_EMULATED
#include "simt/cpu/mma.hpp"
#endif

namespace ptx {

/// Two floats rounded to T in one register, `low` in the lower half.
template <class T>
SIMT_DEVICE std::uint32_t pack(float low, float high) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "registers of mma.sync hold pairs of 16-bit elements");
    std::uint32_t bits;
    if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(low, high);
        memcpy(&bits, &pair, sizeof bits);
    } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&bits, &pair, sizeof bits);
    }
    return bits;
}

/// The two numbers in such a register.
template <class T>
SIMT_DEVICE float2 unpack(std::uint32_t bits) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "registers of mma.sync hold pairs of 16-bit elements");
    if constexpr (std::is_same_v<T, __half>) {
        __half2 pair;
        memcpy(static_cast<void*>(&pair), &bits, sizeof bits);
        return __half22float2(pair);
    } else {
        // A bfloat16 is the upper half of a float. CUDA's own conversion keeps the halves in registers of 16 bits first.
        const std::uint32_t low = bits << 16, high = bits & 0xffff0000u;
        float2 pair;
        memcpy(&pair.x, &low, sizeof low);
        memcpy(&pair.y, &high, sizeof high);
        return pair;
    }
}

/// D += A B with A (16, 16) row-major, B (16, 8) column-major, D (16, 8) in float32; T is the type of A and B.
///
/// With g = lane / 4 and t = lane % 4, a lane holds (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
///     a[0] = A(g, 2t..2t+1)   a[1] = A(g+8, 2t..2t+1)   a[2] = A(g, 2t+8..2t+9)   a[3] = A(g+8, 2t+8..2t+9)
///     b0   = B(2t..2t+1, g)   b1   = B(2t+8..2t+9, g)
///     d[0], d[1] = D(g, 2t..2t+1)   d[2], d[3] = D(g+8, 2t..2t+1)
/// All 32 lanes must call.
template <class T>
SIMT_DEVICE void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>, "mma.m16n8k16 multiplies f16 or bf16");
#if SIMT_EMULATED
    simt::cpu::MmaFragments mine{d, a, {b0, b1}};
    simt::cpu::block().meet("mma.sync.m16n8k16", simt::kFullMask, mine,
                            [](const auto& lanes, unsigned) { simt::cpu::mma_m16n8k16<T>(lanes); });
#else
    if constexpr (std::is_same_v<T, __half>)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

}  // namespace ptx
