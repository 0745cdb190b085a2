/// @file
/// Stage 04: FlashAttention-2, parallel over queries, causal scheduling, tensor cores.
#pragma once

#include "stage/stage.hpp"

namespace step04 {

const workbook::Stage& stage();

}  // namespace step04
