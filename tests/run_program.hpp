/// @file
/// A stage's program, called as from a shell.
#pragma once

#include "stage/runner.hpp"

#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace workbook {

struct Outcome {
    int status;
    std::string out, err;
};

/// @param words the arguments, without the program's name
inline Outcome run_program(const Stage& stage, std::vector<std::string> words) {
    words.insert(words.begin(), "step" + stage.id);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    std::ostringstream out, err;
    std::streambuf* const old_out = std::cout.rdbuf(out.rdbuf());
    std::streambuf* const old_err = std::cerr.rdbuf(err.rdbuf());
    const int status = stage_main(stage, static_cast<int>(words.size()), argv.data());
    std::cout.rdbuf(old_out);
    std::cerr.rdbuf(old_err);
    return {status, out.str(), err.str()};
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace workbook
