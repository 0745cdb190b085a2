/// @file
/// elect.sync: one lane of a warp.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

/// True in one lane, the same whenever all 32 lanes call, as they must.
SIMT_DEVICE bool elect_one() {
#if SIMT_EMULATED
    int nothing = 0;
    simt::cpu::block().meet("elect.sync", simt::kFullMask, nothing, [](const auto&, unsigned) {});
    return simt::cpu::block().self().lane == 0;
#else
    std::uint32_t elected;
    asm volatile(
        "{\n"
        ".reg .pred elected;\n"
        "elect.sync _|elected, 0xffffffff;\n"
        "selp.u32 %0, 1, 0, elected;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
#endif
}

}  // namespace ptx
