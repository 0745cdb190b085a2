/// @file
/// Watching a kernel from inside: when its blocks began and ended, and when the threads of one block did what.
#pragma once

#include "simt/config.hpp"

namespace simt {

/// The last parameter of a kernel that nobody watches: its calls compile to nothing.
struct Unwatched {
    SIMT_DEVICE void begin() const {}
    SIMT_DEVICE void end() const {}
    SIMT_DEVICE void mark(int /*actor*/, int /*event*/, int /*n*/) const {}
};

#if !SIMT_EMULATED
/// Times in clocks of the block's SM. On the emulator there are none. Marks cost registers and time: a kernel whose blocks are to be
/// timed goes without.
template <bool kMarks>
struct Watch {
    long long* cycles;  ///< (blocks of the grid, x first): from begin() to end()
    long long* marks;   ///< (actors, events, capacity), of one block; 0 where nothing was marked
    int events, capacity;
    unsigned block;  ///< number of the one whose marks are kept

    /// One thread of a block calls, and the same one calls end().
    SIMT_DEVICE void begin() const { cycles[number()] = -clock64(); }
    SIMT_DEVICE void end() const { cycles[number()] += clock64(); }
    /// The n-th time that an actor comes to an event.
    SIMT_DEVICE void mark(int actor, int event, int n) const {
        if (kMarks && number() == block && n < capacity) marks[(actor * events + event) * capacity + n] = clock64();
    }

private:
    SIMT_DEVICE unsigned number() const { return (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x; }
};
#endif

}  // namespace simt
