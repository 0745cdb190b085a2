/// @file
/// setmaxnreg: registers move from one warpgroup of a block to another.
#pragma once

#include "ptx/sm90.hpp"

namespace ptx {

/// Gives registers back, so that each thread of the warpgroup has kRegisters. All 128 threads must call. A block begins with what the
/// compiler gave it: for a kernel with __launch_bounds__(n, 1) that calls this, 65536 / n rounded down to a multiple of 8.
template <int kRegisters>
SIMT_DEVICE void setmaxnreg_dec() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
#if SIMT_EMULATED
    simt::cpu::block().set_registers(false, kRegisters);
#else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// Waits until the block has enough registers for kRegisters in each thread of the warpgroup. All 128 threads must call.
template <int kRegisters>
SIMT_DEVICE void setmaxnreg_inc() {
    static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256, "setmaxnreg takes multiples of 8 from 24 to 256");
#if SIMT_EMULATED
    simt::cpu::block().set_registers(true, kRegisters);
#else
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

}  // namespace ptx
