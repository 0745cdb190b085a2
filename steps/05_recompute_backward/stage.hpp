/// @file
/// Stage 05: the backward pass, with P kept and with P computed again.
#pragma once

#include "stage/stage.hpp"

namespace step05 {

const workbook::Stage& stage();

}  // namespace step05
