#pragma once

#include "ptx/wgmma.hpp"

namespace step06 {

/// Calls f so many times. ptxas would ask at the end of each time whether there is another: a comparison and what brings its result to a
/// branch, where the next time is waited for. Of a number that it knows nothing of it must be asked at the beginning.
template <class F>
SIMT_DEVICE void repeat(int times, F&& f) {
    while (times > 0) {
        --times;
        ptx::keep_in_place(times);
        f();
    }
}

}  // namespace step06
