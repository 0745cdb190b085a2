/// @file
/// The program bench_stepNN: times a stage's variants through Google Benchmark.
#pragma once

#include "stage/stage.hpp"

namespace workbook::bench {

/// The main() of every bench_stepNN. Each case is one entry of Google Benchmark's report: its real time is the median of the
/// device time over the repetitions, its counters are those of counters(). Before it is timed its outputs are poisoned, computed
/// once and judged on 256 rows; a wrong case has an error and no time, and so have those that are refused, do not fit into
/// memory or take too long. `--help` lists the options.
///
/// Results (--benchmark_out=FILE, JSON) carry in their context gpu, compute_capability, driver, cuda (runtime) and command, which
/// is the environment's WORKBOOK_COMMAND where that is set.
/// @return 0 when some case was timed and none was wrong; 1 when a case was wrong or failed; 2 for bad arguments or a filter that
/// matches no case; 3 when nothing could be timed
///
/// @param before a stage whose forward pass the backward variants follow, where they take that of any stage and it does the problem;
/// else, and where it is null, they follow their own. The forward pass is timed in cases of both passes only.
int bench_main(const Stage& stage, int argc, char** argv, const Stage* before = nullptr);

}  // namespace workbook::bench
