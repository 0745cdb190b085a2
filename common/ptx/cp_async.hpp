/// @file
/// cp.async: copies from global to shared memory that run while the thread goes on.
#pragma once

#include "simt/simt.hpp"

#include <cstdint>

namespace ptx {

/// Starts a copy of kBytes (4, 8 or 16) from global to shared memory; with valid = false nothing is read and zeros are written.
/// Both addresses are aligned to kBytes; 16 bytes go past the L1 cache (.cg). What was written may be read after
/// cp_async_commit() and cp_async_wait() by this thread, and after a barrier on top of that by others.
///
/// In emulation the destination is poisoned at once and the bytes land as late as they may: in the wait.
template <int kBytes, class T, class Source>
SIMT_DEVICE void cp_async(T* destination, Source source, bool valid = true) {
    static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
#if SIMT_EMULATED
    const void* from = valid ? static_cast<const void*>(source.read(Source::per_bytes(kBytes))) : nullptr;
    simt::cpu::block().charge_shared(simt::SharedAccess::cp_async, destination, kBytes);
    simt::cpu::block().start_copy(destination, from, kBytes);
#else
    const auto to = static_cast<std::uint32_t>(__cvta_generic_to_shared(destination));
    const int bytes = valid ? kBytes : 0;
    if constexpr (kBytes == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(bytes) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(source), "n"(kBytes), "r"(bytes) : "memory");
#endif
}

/// Makes a group of the copies that this thread started since the last commit.
SIMT_DEVICE void cp_async_commit() {
#if SIMT_EMULATED
    simt::cpu::block().commit_copies();
#else
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/// Waits until at most kPending of this thread's latest groups are still under way.
template <int kPending>
SIMT_DEVICE void cp_async_wait() {
#if SIMT_EMULATED
    simt::cpu::block().wait_for_copies(kPending);
#else
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

}  // namespace ptx
