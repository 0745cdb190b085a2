#include "options.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>

namespace workbook::bench {
namespace {

[[noreturn]] void reject(const std::string& option, const std::string& word, const std::string& accepted) {
    throw InvalidArgument(option + "=" + word + ": " + accepted);
}

template <class T>
T parse_number(const std::string& option, const std::string& word, const char* accepted) {
    T value{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || !std::isfinite(static_cast<double>(value)) || value <= 0) {
        reject(option, word, accepted);
    }
    return value;
}

/// Gives the parsers of words, which know nothing of options, the option's name.
template <class F>
auto named(const char* option, F&& parse) {
    try {
        return parse();
    } catch (const InvalidArgument& error) {
        throw InvalidArgument(std::string(option) + ": " + error.what());
    }
}

bool is_google(const std::string& word) { return word.rfind("--benchmark_", 0) == 0 || word.rfind("--v=", 0) == 0; }

}  // namespace

Options parse_options(Program program, const std::string& name, const std::vector<std::string>& arguments) {
    const bool measuring = program == Program::measure;
    Options options;
    Request& request = options.request;
    CLI::App app(measuring ? "Times a stage on the GPU. Without options: the full sweep, B*N = 16384 tokens and 2048/d heads."
                           : "Predicts the stages' times from the roofline model. Without options: the full sweep.",
                 name);
    if (measuring) {
        app.footer(
            "Google Benchmark's own options are accepted too, written with '=': --benchmark_filter=REGEX, --benchmark_list_tests,\n"
            "--benchmark_out=FILE, --benchmark_format=json ... (The filter is applied to names that go on with "
            "/iterations:1/manual_time.)\n"
            "Each case is checked against float64 before it is timed; a wrong one has an error and no time.\n"
            "Exit status: 0 none was wrong, 1 a case was wrong or failed, 2 bad arguments, 3 no usable GPU.");
    }
    std::string group;
    const auto value = [&](const std::string& option, const char* type, const std::string& text,
                           std::function<void(const std::string&)> take) {
        app.add_option_function<std::string>(option, std::move(take), text)->type_name(type)->group(group);
    };
    const auto whole = [&](const std::string& option, std::optional<int>& target, const std::string& text) {
        value(option, "N", text, [&target, option](const std::string& word) {
            target = parse_number<int>(option, word, "a whole number from 1 to 2147483647 is accepted");
        });
    };
    const auto seconds = [](const char* option, const std::string& word) {
        return parse_number<double>(option, word, "a number of seconds above 0 is accepted");
    };

    group = "Sweeps";
    app.add_flag("--quick", request.quick, "N = 1024 and 4096 in bf16 with d = 128 only")->group(group);
    app.add_flag("--gqa", request.gqa, "only B=4 Hq=32 Hkv=8 N=4096 d=128 bf16 causal, which ends the full sweep")->group(group);
    group = "A single case";
    whole("--batch", request.batch, "batch size B (1)");
    whole("--heads", request.heads, "query heads Hq (16)");
    whole("--kv-heads", request.kv_heads, "key/value heads Hkv (Hq)");
    whole("--seq", request.seq, "query rows Nq (4096)");
    whole("--kv-seq", request.kv_seq, "key/value rows Nkv (Nq)");
    whole("--head-dim", request.head_dim, "head dimension d (128)");
    value("--dtype", "f32|f16|bf16", "type of Q, K, V and O (bf16)",
          [&](const std::string& word) { request.dtype = named("--dtype", [&] { return parse_dtype(word); }); });
    app.add_flag("--causal", request.causal, "key j is visible to query i when j <= i + Nkv - Nq")->group(group);
    group = "The run";
    if (measuring) {
        value("--max-seconds", "S", "skip a case of which one run takes, or is predicted to take, longer than this (10)",
              [&](const std::string& word) { options.max_seconds = seconds("--max-seconds", word); });
        value("--stop-after", "S", "begin no case later than this",
              [&](const std::string& word) { options.stop_after = seconds("--stop-after", word); });
    } else {
        std::string keys;
        for (const Gpu& gpu : gpus()) keys += (keys.empty() ? "" : "|") + std::string(gpu.key);
        value("--on", keys.c_str(), "GPU to predict for (h200)",
              [&](const std::string& word) { options.on = named("--on", [&] { return &find_gpu(word); }); });
        value("--stages", "NN,NN", "only these stages (all)", [&](const std::string& word) {
            for (std::size_t at = 0; at <= word.size();) {
                const std::size_t comma = std::min(word.find(',', at), word.size());
                options.stages.push_back(word.substr(at, comma - at));
                at = comma + 1;
            }
        });
    }

    std::vector<std::string> words;
    for (const std::string& word : arguments) (measuring && is_google(word) ? options.google : words).push_back(word);
    std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
    try {
        app.parse(std::move(words));
    } catch (const CLI::CallForHelp&) {
        options.help = app.help();
    } catch (const CLI::ParseError& error) {
        throw InvalidArgument(std::string(error.what()) + "; --help lists the options");
    }
    return options;
}

}  // namespace workbook::bench
