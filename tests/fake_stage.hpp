/// @file
/// A stage made for the tests of the runner: one small kernel, right or wrong in ways that its variants choose.
#pragma once

#include "stage/stage.hpp"

/// Variants: 90a right; 90b right, but predicts other traffic; 90c leaves out a key; 90d leaves a row unwritten; 90e reads out of
/// bounds; 90f does f16 only; 90g needs workspace that it fills, and 32 KiB of shared memory.
const workbook::Stage& fake_stage();

/// The fake stage with these variants only.
workbook::Stage fake_stage(const std::vector<std::string>& ids);
