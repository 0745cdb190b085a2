/// @file
/// griddepcontrol: a kernel that begins before the one before it in the stream has ended (programmatic dependent launch).
///
/// Between two kernels of a stream lie a microsecond or two in which nothing runs. A kernel that is launched with LaunchConfig::early
/// begins as soon as all blocks of the kernel before have said so, or have ended, and there is room: it prepares itself, and waits. Before
/// compute capability 9.0 there is no such thing: the kernel begins when the one before has ended, and nothing waits.
#pragma once

#include "simt/simt.hpp"

namespace ptx {

/// Lets the next kernel of the stream begin, if it is launched early, once all blocks of this one have called this or ended. It does not
/// say that anything is written.
SIMT_DEVICE void griddepcontrol_launch_dependents() {
#if !SIMT_EMULATED && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Waits until the kernel before has ended and what it wrote is there. In emulation kernels run one after the other, and one that is
/// launched early is refused counted accesses to global memory until a thread of the block has called this.
SIMT_DEVICE void griddepcontrol_wait() {
#if SIMT_EMULATED
    simt::cpu::block().await_kernel_before();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ptx
