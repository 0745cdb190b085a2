/// @file
/// Stage 01: standard attention in three kernels.
#pragma once

#include "stage/stage.hpp"

namespace step01 {

const workbook::Stage& stage();

}  // namespace step01
