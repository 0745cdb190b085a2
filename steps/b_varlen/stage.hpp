/// @file
/// Appendix B: packed batches of sequences of different lengths, forward and backward, without padding.
#pragma once

#include "stage/stage.hpp"

namespace stepb {

const workbook::Stage& stage();

}  // namespace stepb
