#pragma once

#include "simt/simt.hpp"

namespace step06 {

/// Where a thread is in a ring of slots: the next one to be used, and the parity of the phase that it waits for there, at the full barrier;
/// at the empty barrier, it is the other one. Counted, not divided: so a slot is known before it is asked for, and there may be any number.
template <int kSlots>
struct Ring {
    int slot = 0;
    unsigned parity = 0;
    SIMT_DEVICE void advance() {
        slot = slot + 1 < kSlots ? slot + 1 : 0;
        parity ^= slot == 0;
    }
};

}  // namespace step06
