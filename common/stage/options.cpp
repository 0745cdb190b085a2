#include "stage/options.hpp"

#include "stage/device.hpp"

#include <CLI/CLI.hpp>

#include <charconv>
#include <cmath>
#include <functional>
#include <limits>

namespace workbook {
namespace {

[[noreturn]] void reject(const std::string& option, const std::string& value, const std::string& accepted) {
    throw InvalidArgument(option + "=" + value + ": " + accepted);
}

/// A whole number from `least` on. Ranges that belong to the problem are left to check(Problem), which knows the reasons.
template <class T>
T parse_whole(const std::string& option, const std::string& word, T least = std::numeric_limits<T>::lowest()) {
    T value{};
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error == std::errc() && end == word.data() + word.size() && value >= least) return value;
    reject(option, word,
           "a whole number from " + std::to_string(least) + " to " + std::to_string(std::numeric_limits<T>::max()) + " is accepted");
}

double parse_real(const std::string& option, const std::string& word, const char* accepted) {
    double value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || !std::isfinite(value)) reject(option, word, accepted);
    return value;
}

/// Gives the parsers of words, which know nothing of options, the option's name.
template <class F>
auto named(const std::string& option, F&& parse) {
    try {
        return parse();
    } catch (const std::invalid_argument& error) {
        throw InvalidArgument(option + ": " + error.what());
    }
}

std::string epilog() {
    return "Sizes in global memory are bytes that threads ask for; sectors are the 32-byte pieces in which they come.\n"
           "--json prints one object a variant; common/stage/table.hpp lists the keys.\n"
           "Exit status: 0 all ran and were right, 1 a result was wrong, 2 bad arguments or files, 3 nothing ran, or a variant asked for "
           "was refused or skipped.";
}

}  // namespace

Problem Options::problem(DType default_dtype) const {
    Problem p;
    p.batch = batch.value_or(p.batch);
    p.heads = heads.value_or(p.heads);
    p.kv_heads = kv_heads.value_or(p.heads);
    p.seq = seq.value_or(p.seq);
    p.kv_seq = kv_seq.value_or(p.seq);
    p.head_dim = head_dim.value_or(p.head_dim);
    p.dtype = dtype.value_or(default_dtype);
    p.causal = causal;
    p.softmax_scale = scale;
    p.layout = layout;
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
    CLI::App app("Stage " + stage.id + ": " + stage.title, "step" + stage.id);
    app.footer(epilog());

    // Every value is taken as a word and parsed here, so that every message names the option, the value and what is accepted.
    std::string group;
    const auto value = [&](const std::string& option, const char* type, const std::string& description,
                           std::function<void(const std::string&)> take) {
        return app.add_option_function<std::string>(option, std::move(take), description)->type_name(type)->group(group);
    };
    const auto whole = [&](const std::string& option, std::optional<int>& target, const std::string& description) {
        value(option, "N", description, [&target, option](const std::string& word) { target = parse_whole<int>(option, word, 1); });
    };
    const auto flag = [&](const std::string& option, bool& target, const std::string& description) {
        app.add_flag(option, target, description)->group(group);
    };
    const auto list = [&](const std::string& option, const char* type, const std::string& description,
                          std::function<void(const std::string&)> take) {
        app.add_option_function<std::vector<std::string>>(
               option,
               [take](const std::vector<std::string>& words) {
                   for (const std::string& word : words) take(word);
               },
               description)
            ->type_name(type)
            ->expected(1)
            ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
            ->group(group);
    };

    group = "The problem";
    whole("--batch", options.batch, "batch size B (1)");
    whole("--heads", options.heads, "query heads Hq (1)");
    whole("--kv-heads", options.kv_heads, "key/value heads Hkv, of which Hq is a multiple (Hq)");
    whole("--seq", options.seq, "query rows Nq (256)");
    whole("--kv-seq", options.kv_seq, "key/value rows Nkv (Nq)");
    whole("--head-dim", options.head_dim, "head dimension d (64)");
    value("--dtype", "f32|f16|bf16", "type of Q, K, V and O (the first of these that a variant does)",
          [&](const std::string& word) { options.dtype = named("--dtype", [&] { return parse_dtype(word); }); });
    flag("--causal", options.causal, "key j is visible to query i when j <= i + Nkv - Nq");
    value("--scale", "X", "softmax scale (1/sqrt(d))",
          [&](const std::string& word) { options.scale = static_cast<float>(parse_real("--scale", word, "a finite number is accepted")); });
    value("--layout", "bhnd|bnhd", "order of the dimensions in memory (bhnd)",
          [&](const std::string& word) { options.layout = named("--layout", [&] { return parse_layout(word); }); });
    value("--seed", "N", "seed of the random inputs (0)",
          [&](const std::string& word) { options.seed = parse_whole<std::uint64_t>("--seed", word); });
    value("--dist", "normal|outliers", "distribution of the random inputs (normal)",
          [&](const std::string& word) { options.dist = named("--dist", [&] { return parse_distribution(word); }); });

    group = "Files (safetensors)";
    value("--input", "FILE", "take q, k, v (B, H, N, d), their shape and their type from this file",
          [&](const std::string& word) { options.input = word; });
    value("--output", "FILE", "write o, lse and what they belong to; of several variants the last",
          [&](const std::string& word) { options.output = word; });
    list("--against", "FILE",
         "compare with this --output of an earlier stage; repeatable: the first is the baseline of the speedup, the "
         "last is what the errors are compared with",
         [&](const std::string& word) { options.against.emplace_back(word); });

    group = "The run";
    list("--variant", "ID|NAME", "run this variant only; repeatable", [&](const std::string& word) { options.variants.push_back(word); });
    std::string keys;
    for (const Gpu& gpu : gpus()) keys += (keys.empty() ? "" : "|") + std::string(gpu.key);
    value("--on", keys.c_str(),
          "GPU to predict the time for, and in emulation the one to play (this GPU where the table has it, else h200)",
          [&](const std::string& word) { options.on = named("--on", [&] { return &find_gpu(word); }); });
    value("--shared-memory", "BYTES", "pretend that a block has only this much shared memory, as 48K",
          [&](const std::string& word) { options.shared_memory = parse_bytes("--shared-memory", word); });
    value("--check-rows", "N", "rows to compare with float64; 0: all (all of a small problem, else 256)",
          [&](const std::string& word) { options.check_rows = parse_whole<long long>("--check-rows", word, 0); });
    value("--max-seconds", "S", "skip a variant that takes longer than this a run", [&](const std::string& word) {
        const char* accepted = "a number of seconds above 0 is accepted";
        options.max_seconds = parse_real("--max-seconds", word, accepted);
        if (*options.max_seconds <= 0) reject("--max-seconds", word, accepted);
    });
    value("--schedule", "round-robin|lowest-first|highest-first", "emulator: which warp runs next (round-robin)",
          [&](const std::string& word) {
              if (!emulating) throw InvalidArgument("--schedule=" + word + ": a GPU schedules its warps itself; it is for the emulator");
              options.schedule = named("--schedule", [&] { return simt::parse_schedule(word); });
          });
    flag("--force", options.force, "emulator: run even what takes more than an hour");
    value("--repeats", "N", "GPU: timed repetitions (as many as take 0.5 s; 3 to 200)", [&](const std::string& word) {
        if (emulating) throw InvalidArgument("--repeats=" + word + ": the emulator times nothing; it is for a GPU");
        options.repeats = parse_whole<int>("--repeats", word, 1);
    });

    group = "What is printed";
    flag("--traffic", options.traffic, "also global-memory traffic tensor by tensor, and the bank conflicts of ldmatrix");
    flag("--rows-only", options.rows_only, "rows without headings, to put below those of another stage");
    flag("--json", options.json, "one JSON object a variant and nothing else");
    flag("--quiet", options.quiet, "errors only; the exit status tells the rest");
    flag("--list", options.list, "the variants of this stage and what they support");

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
    return options;
}

}  // namespace workbook
