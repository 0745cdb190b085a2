/// @file
/// fence.proxy.async: from ordinary stores to the units that read shared memory on their own.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

/// Orders this thread's ordinary accesses to shared memory before those of TMA and wgmma that come after it, also those that other
/// threads start after a barrier. Each thread that stored must call it before that barrier.
SIMT_DEVICE void fence_proxy_async() {
#if SIMT_EMULATED
    simt::cpu::block().fence_proxy_async();
#else
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// The same of global memory: also after a wait for what another block did there, before TMA goes there.
SIMT_DEVICE void fence_proxy_async_global() {
#if !SIMT_EMULATED
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace ptx
