/// @file
/// What the command lines of all programs share: the options that pose a problem, and how the value of an option is read.
#pragma once

#include "attention/cost.hpp"
#include "attention/error.hpp"
#include "attention/problem.hpp"

#include <charconv>
#include <filesystem>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace workbook {

/// What the command line says of a problem; an option that was not given is empty.
struct ProblemOptions {
    std::optional<int> batch, heads, kv_heads, seq, kv_seq, head_dim;
    std::optional<DType> dtype;
    bool causal = false;
    std::optional<std::vector<int>> cu_seqlens_q, cu_seqlens_k;

    bool packed() const { return cu_seqlens_q || cu_seqlens_k; }
    bool any() const { return batch || heads || kv_heads || seq || kv_seq || head_dim || dtype || causal || packed(); }
    /// `defaults` with what was given in its place. Hkv = Hq and Nkv = Nq where Hq and Nq alone were given. Of a packed batch Nq and Nkv
    /// are those of cu_seqlens; where B, Nq or Nkv alone were given, it is no packed batch. Not yet checked.
    Problem over(const Problem& defaults) const;
};

/// Declares options. Every value is taken as a word and parsed here, so that every message names the option, the value and what
/// is accepted.
class OptionList {
public:
    using Take = std::function<void(const std::string& word)>;

    explicit OptionList(CLI::App& app) : app_(app) {}
    std::string group;  ///< the help's heading over the options that follow

    void value(const std::string& option, const std::string& type, const std::string& text, Take take);
    void repeatable(const std::string& option, const std::string& type, const std::string& text, Take take);
    void flag(const std::string& option, bool& target, const std::string& text);
    void whole(const std::string& option, std::optional<int>& target, const std::string& text);          ///< 1 or more
    void seconds(const std::string& option, const std::string& text, std::function<void(double)> take);  ///< above 0
    void gpu(const Gpu*& target, const std::string& text);                                               ///< --on
    /// --batch to --lengths. @param default_dtype what the help says of it
    void problem(ProblemOptions& target, const Problem& defaults, const std::string& default_dtype);

private:
    CLI::App& app_;
};

/// @throws InvalidArgument "option=word: accepted"
[[noreturn]] void reject(const std::string& option, const std::string& word, const std::string& accepted);

/// A whole number from `least` on. Ranges that belong to the problem are left to check(Problem), which knows the reasons.
/// @throws InvalidArgument
template <class T>
T parse_whole(const std::string& option, const std::string& word, T least = std::numeric_limits<T>::lowest()) {
    T value{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error == std::errc() && end == word.data() + word.size() && value >= least) return value;
    reject(option, word,
           "a whole number from " + std::to_string(least) + " to " + std::to_string(std::numeric_limits<T>::max()) + " is accepted");
}

/// "0,5,5,17". @throws InvalidArgument
std::vector<int> parse_list(const std::string& option, const std::string& word);

/// cu_seqlens of the lengths in a file, one a line; lines that begin with # are comments.
/// @throws InvalidArgument, also where they add up to more than 2^31 - 1
std::vector<int> read_lengths(const std::string& option, const std::filesystem::path& path);

/// A finite number. @throws InvalidArgument
double parse_real(const std::string& option, const std::string& word, const char* accepted);

/// Gives the parsers of words, which know nothing of options, the option's name.
template <class F>
auto named(const std::string& option, F&& parse) {
    try {
        return parse();
    } catch (const std::invalid_argument& error) {
        throw InvalidArgument(option + ": " + error.what());
    }
}

}  // namespace workbook
