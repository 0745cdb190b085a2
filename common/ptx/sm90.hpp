/// @file
/// What the wrappers of Hopper's instructions share. They compile for architecture 90a alone, so only what is built for that may
/// include them. (Not for 90: wgmma and setmaxnreg belong to the "a" set, which no later GPU has; ptxas refuses them by name.)
#pragma once

#include "ptx/swizzle.hpp"
#include "simt/simt.hpp"

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
static_assert(false, "This file uses instructions of Hopper: compile it for architecture 90a alone.");
#endif

namespace ptx {

/// Address in the block's shared memory, as PTX's .shared::cta has it.
SIMT_DEVICE std::uint32_t shared_address(const void* p) {
#if SIMT_EMULATED
    return simt::cpu::block().address_of("shared address", p);
#else
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
#endif
}

}  // namespace ptx
