#include "options.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>

namespace workbook::bench {
namespace {

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
    OptionList add(app);
    add.group = "Sweeps";
    add.flag("--quick", request.quick, "N = 1024 and 4096 in bf16 with d = 128 only");
    add.flag("--gqa", request.gqa, "only B=4 Hq=32 Hkv=8 N=4096 d=128 bf16 causal, which ends the full sweep");
    add.flag("--decode", request.decode,
             measuring ? "one query against long caches; a copy in the GPU's memory is timed beside it" : "one query against long caches");
    add.group = "A single case";
    add.problem(request, default_case(), "bf16");
    add.group = "The run";
    if (measuring) {
        add.seconds("--max-seconds", "skip a case of which one run takes, or is predicted to take, longer than this (10)",
                    [&](double seconds) { options.max_seconds = seconds; });
        add.seconds("--stop-after", "begin no case later than this", [&](double seconds) { options.stop_after = seconds; });
    } else {
        add.gpu(options.on, "GPU to predict for (h200)");
        add.value("--stages", "NN,NN", "only these stages (all)", [&](const std::string& word) {
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
