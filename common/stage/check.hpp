/// @file
/// The check of a learner's kernel: problems from plain to awkward, up to the first that shows a mistake, which is told in the terms of
/// the algorithm.
#pragma once

#include "stage/data.hpp"
#include "stage/stage.hpp"

#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace workbook {

/// One problem of the check, and what it is there for: "lengths that fill no tile: 70 queries, 90 keys".
struct Rung {
    std::string what;
    Problem problem;
    std::size_t shared_memory = 0;      ///< bytes that a block may have; 0: the device's
    bool all_schedules = false;         ///< of the emulator; else in turn alone
    void (*change)(Inputs&) = nullptr;  ///< of Q, K and V on the host, where N(0, 1) would not do
};

/// The problems that the variant takes, in the order in which they are tried. Its type is float32 where it takes that, else float16.
/// @throws InvalidArgument when the stage has no variant of that id
std::vector<Rung> ladder(const Stage& stage, const std::string& id);

/// How far a variant came.
struct Checked {
    int passed = 0;              ///< rungs
    std::optional<Rung> failed;  ///< the first that did not pass
    std::string told;            ///< what a learner is told of it; empty when all passed

    bool ok() const { return !failed; }
};

/// Runs the variant, forward or backward, on each rung. A rung is passed when the result is right and, in emulation, the bytes
/// moved are those of the closed form.
/// @param passed is called after each rung that passed
Checked check_variant(const Stage& stage, const std::string& id, const std::function<void(const Rung&)>& passed);

/// The main() of a learner's program: checks the variants whose ids are its arguments, all of the stage when there are none.
/// @return 0 when all passed; 1 when one did not; 2 for an id that the stage does not have
int check_main(const Stage& stage, int argc, char** argv);

}  // namespace workbook
