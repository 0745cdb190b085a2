/// @file
/// Stage 02: one kernel, no S and no P.
#pragma once

#include "stage/stage.hpp"

namespace step02 {

const workbook::Stage& stage();

}  // namespace step02
