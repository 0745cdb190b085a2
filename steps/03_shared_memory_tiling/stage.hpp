/// @file
/// Stage 03: FlashAttention-1, tiles in shared memory.
#pragma once

#include "stage/stage.hpp"

namespace step03 {

const workbook::Stage& stage();

}  // namespace step03
