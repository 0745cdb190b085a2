/// @file
/// Stage 06: Hopper. Copies by TMA, products by wgmma, warps with different tasks.
#pragma once

#include "stage/stage.hpp"

namespace step06 {

const workbook::Stage& stage();

}  // namespace step06
