#include "stage/options.hpp"

#include "stage/device.hpp"

#include <CLI/CLI.hpp>

#include <charconv>
#include <limits>

namespace workbook {
namespace {

std::string epilog() {
    return "Sizes in global memory are bytes that threads ask for; sectors are the 32-byte pieces in which they come.\n"
           "--json prints one object a variant; common/stage/table.hpp lists the keys.\n"
           "Exit status: 0 all ran and were right, 1 a result was wrong, 2 bad arguments or files, 3 nothing ran, or a variant asked for "
           "was refused or skipped.";
}

}  // namespace

Problem Options::problem(DType default_dtype) const {
    Problem p = defaults;
    p.dtype = default_dtype;
    p = over(p);
    p.softmax_scale = scale;
    p.layout = layout;
    p.page_size = page_size.value_or(p.page_size);
    return p;
}

std::size_t parse_bytes(const std::string& option, const std::string& word) {
    const char* accepted = "a number of bytes is accepted, also as 48K or 1M (K is 1024)";
    std::uint64_t value = 0;
    const char* last = word.data() + word.size();
    const auto [end, error] = std::from_chars(word.data(), last, value);
    if (error != std::errc() || value == 0) reject(option, word, accepted);
    std::string suffix(end, last);
    for (char& c : suffix) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    int shift = -1;
    if (suffix.empty() || suffix == "B") shift = 0;
    if (suffix == "K" || suffix == "KB" || suffix == "KIB") shift = 10;
    if (suffix == "M" || suffix == "MB" || suffix == "MIB") shift = 20;
    if (shift < 0 || value > (std::numeric_limits<std::uint64_t>::max() >> shift)) reject(option, word, accepted);
    return static_cast<std::size_t>(value << shift);
}

Options parse_options(const Stage& stage, int argc, const char* const* argv) {
    Options options;
    options.defaults = stage.problem;
    CLI::App app("Stage " + stage.id + ": " + stage.title, "step" + stage.id);
    app.footer(epilog());

    OptionList add(app);
    add.group = "The problem";
    add.problem(options, stage.problem, "the first of these that a variant does");
    add.value("--scale", "X", "softmax scale (1/sqrt(d))", [&](const std::string& word) {
        options.scale = static_cast<float>(parse_real("--scale", word, "a finite number is accepted"));
    });
    add.value("--layout", "bhnd|bnhd", "order of the dimensions in memory (bhnd)",
              [&](const std::string& word) { options.layout = named("--layout", [&] { return parse_layout(word); }); });
    add.whole("--page-size", options.page_size, "keys of a page, where a variant keeps K and V in pages: 16 to 256 (64)");
    add.value("--seed", "N", "seed of the random inputs (0)",
              [&](const std::string& word) { options.seed = parse_whole<std::uint64_t>("--seed", word); });
    add.value("--dist", "normal|outliers", "distribution of the random inputs (normal)",
              [&](const std::string& word) { options.dist = named("--dist", [&] { return parse_distribution(word); }); });

    add.group = "Files (safetensors)";
    add.value("--input", "FILE",
              "take q, k, v (B, H, N, d), their shape and type, and cu_seqlens_q and cu_seqlens_k where it has them, from this file",
              [&](const std::string& word) { options.input = word; });
    add.value("--output", "FILE", "write o and lse, or dq, dk and dv, and what they belong to; of several variants the last",
              [&](const std::string& word) { options.output = word; });
    add.repeatable("--against", "FILE",
                   "compare with this --output of an earlier stage; repeatable: the first is the baseline of the speedup, the "
                   "last is what the errors are compared with",
                   [&](const std::string& word) { options.against.emplace_back(word); });
    add.value("--trace", "FILE",
              "emulator: write which rows of Q, K, V and O each block touches, and in which order; for docs/figures/draw_trace.py",
              [&](const std::string& word) {
                  if (!emulating) throw InvalidArgument("--trace=" + word + ": a GPU does not tell; it is for the emulator");
                  options.trace = word;
              });
    if (!stage.backward.empty())
        add.value("--forward", "FILE", "backward: take o and lse from this --output of any stage, not from the forward pass here",
                  [&](const std::string& word) { options.forward = word; });

    add.group = "The run";
    add.repeatable("--variant", "ID|NAME", "run this variant only; repeatable",
                   [&](const std::string& word) { options.variants.push_back(word); });
    add.gpu(options.on, "GPU to predict the time for, and in emulation the one to play (this GPU where the table has it, else h200)");
    add.value("--shared-memory", "BYTES", "pretend that a block has only this much shared memory, as 48K",
              [&](const std::string& word) { options.shared_memory = parse_bytes("--shared-memory", word); });
    add.value("--check-rows", "N", "rows to compare with float64; 0: all (all of a small problem, else 256)",
              [&](const std::string& word) { options.check_rows = parse_whole<long long>("--check-rows", word, 0); });
    add.seconds("--max-seconds", "skip a variant that takes longer than this a run",
                [&](double seconds) { options.max_seconds = seconds; });
    add.value("--schedule", "round-robin|lowest-first|highest-first", "emulator: which warp runs next (round-robin)",
              [&](const std::string& word) {
                  if (!emulating)
                      throw InvalidArgument("--schedule=" + word + ": a GPU schedules its warps itself; it is for the emulator");
                  options.schedule = named("--schedule", [&] { return simt::parse_schedule(word); });
              });
    add.flag("--force", options.force, "emulator: run even what takes more than an hour");
    add.value("--repeats", "N", "GPU: timed repetitions (as many as take 0.5 s; 3 to 200)", [&](const std::string& word) {
        if (emulating) throw InvalidArgument("--repeats=" + word + ": the emulator times nothing; it is for a GPU");
        options.repeats = parse_whole<int>("--repeats", word, 1);
    });

    add.group = "What is printed";
    add.flag("--traffic", options.traffic, "also global-memory traffic tensor by tensor, and bank conflicts of shared memory");
    add.flag("--rows-only", options.rows_only, "rows without headings, to put below those of another stage");
    add.flag("--json", options.json, "one JSON object a variant and nothing else");
    add.flag("--quiet", options.quiet, "errors only; the exit status tells the rest");
    add.flag("--list", options.list, "the variants of this stage and what they support");

    try {
        std::vector<std::string> words(argv + 1, argv + argc);
        std::reverse(words.begin(), words.end());  // CLI11 takes them from the back
        app.parse(std::move(words));
    } catch (const CLI::CallForHelp&) {
        options.help = app.help();
        return options;
    } catch (const CLI::ParseError& error) {
        throw InvalidArgument(std::string(error.what()) + "; --help lists the options");
    }

    const auto given_with_input = [&](const char* option, bool given) {
        if (options.input && given) {
            throw InvalidArgument(std::string(option) + " has no meaning with --input=" + options.input->string() +
                                  ": it is for random inputs");
        }
    };
    given_with_input("--seed", options.seed.has_value());
    given_with_input("--dist", options.dist.has_value());
    if (options.json && (options.traffic || options.quiet || options.rows_only || options.list)) {
        throw InvalidArgument("--json prints all there is; it does not go with --traffic, --quiet, --rows-only or --list");
    }
    if (options.trace && options.layout != Layout::bhnd)
        throw InvalidArgument("--trace=" + options.trace->string() + ": --layout=bhnd is accepted, where the rows of a head lie together");
    return options;
}

}  // namespace workbook
