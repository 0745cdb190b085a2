/// @file
/// The program of a stage: parses options, runs its variants, checks them and prints the table.
#pragma once

#include "stage/stage.hpp"

namespace workbook {

/// The GPU of the table in attention/cost.hpp that the device is, by its name, number of SMs and compute capability; null if none.
const Gpu* in_table(const Device& device);

/// The main() of every stepNN program. `--help` lists the options.
/// @return 0 when what ran was right; 1 when a result was wrong; 2 for bad arguments or files; 3 when nothing ran, or a variant named by
///         --variant did not, because it was refused or skipped
int stage_main(const Stage& stage, int argc, char** argv);

}  // namespace workbook
