/// @file
/// The program of a stage: parses options, runs its variants, checks them and prints the table.
#pragma once

#include "stage/stage.hpp"

namespace workbook {

/// The main() of every stepNN program. `--help` lists the options.
/// @return 0 when every variant ran and was right; 1 when a result was wrong; 2 for bad arguments or files; 3 when refused
int stage_main(const Stage& stage, int argc, char** argv);

}  // namespace workbook
