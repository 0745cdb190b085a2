/// @file
/// Appendix A: split-KV decoding (Flash-Decoding), few queries against a long KV cache.
#pragma once

#include "stage/stage.hpp"

namespace stepa {

const workbook::Stage& stage();

}  // namespace stepa
