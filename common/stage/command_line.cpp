#include "stage/command_line.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <utility>
#include <vector>

namespace workbook {

Problem ProblemOptions::over(const Problem& defaults) const {
    Problem p = defaults;
    p.batch = batch.value_or(p.batch);
    p.heads = heads.value_or(p.heads);
    p.kv_heads = kv_heads.value_or(heads ? p.heads : p.kv_heads);
    p.seq = seq.value_or(p.seq);
    p.kv_seq = kv_seq.value_or(seq ? p.seq : p.kv_seq);
    if (packed()) {
        const auto take = [](const std::optional<std::vector<int>>& from, std::vector<int>& into, const std::optional<int>& given,
                             int& total) {
            into = from.value_or(std::vector<int>{});
            if (!into.empty() && !given) total = into.back();
        };
        take(cu_seqlens_q, p.cu_seqlens_q, seq, p.seq);
        take(cu_seqlens_k, p.cu_seqlens_k, kv_seq, p.kv_seq);
    } else if (batch || seq || kv_seq) {
        p.cu_seqlens_q.clear();
        p.cu_seqlens_k.clear();
    }
    p.head_dim = head_dim.value_or(p.head_dim);
    p.dtype = dtype.value_or(p.dtype);
    p.causal = causal;
    return p;
}

void OptionList::value(const std::string& option, const std::string& type, const std::string& text, Take take) {
    app_.add_option_function<std::string>(option, std::move(take), text)->type_name(type)->group(group);
}

void OptionList::repeatable(const std::string& option, const std::string& type, const std::string& text, Take take) {
    app_.add_option_function<std::vector<std::string>>(
            option,
            [take](const std::vector<std::string>& words) {
                for (const std::string& word : words) take(word);
            },
            text)
        ->type_name(type)
        ->expected(1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->group(group);
}

void OptionList::flag(const std::string& option, bool& target, const std::string& text) {
    app_.add_flag(option, target, text)->group(group);
}

void OptionList::whole(const std::string& option, std::optional<int>& target, const std::string& text) {
    value(option, "N", text, [&target, option](const std::string& word) { target = parse_whole<int>(option, word, 1); });
}

void OptionList::seconds(const std::string& option, const std::string& text, std::function<void(double)> take) {
    value(option, "S", text, [option, take](const std::string& word) {
        const char* accepted = "a number of seconds above 0 is accepted";
        const double number = parse_real(option, word, accepted);
        if (number <= 0) reject(option, word, accepted);
        take(number);
    });
}

void OptionList::gpu(const Gpu*& target, const std::string& text) {
    std::string keys;
    for (const Gpu& gpu : gpus()) keys += (keys.empty() ? "" : "|") + std::string(gpu.key);
    value("--on", keys, text, [&target](const std::string& word) { target = named("--on", [&] { return &find_gpu(word); }); });
}

void OptionList::problem(ProblemOptions& target, const Problem& defaults, const std::string& default_dtype) {
    const auto by_default = [](int number) { return " (" + std::to_string(number) + ")"; };
    whole("--batch", target.batch, "batch size B" + by_default(defaults.batch));
    whole("--heads", target.heads, "query heads Hq" + by_default(defaults.heads));
    whole("--kv-heads", target.kv_heads, "key/value heads Hkv, of which Hq is a multiple (Hq)");
    whole("--seq", target.seq, "query rows Nq" + by_default(defaults.seq));
    whole("--kv-seq", target.kv_seq, "key/value rows Nkv (Nq)");
    whole("--head-dim", target.head_dim, "head dimension d" + by_default(defaults.head_dim));
    value("--dtype", "f32|f16|bf16", "type of Q, K, V and O (" + default_dtype + ")",
          [&target](const std::string& word) { target.dtype = named("--dtype", [&] { return parse_dtype(word); }); });
    flag("--causal", target.causal, "key j is visible to query i when j <= i + Nkv - Nq");
    const auto list = [&](const char* option, std::optional<std::vector<int>>& into, const char* text) {
        value(option, "0,N,...", text, [&into, option](const std::string& word) { into = parse_list(option, word); });
    };
    list("--cu-seqlens-q", target.cu_seqlens_q, "a packed batch: where the queries of each sequence begin, and where the last ends");
    list("--cu-seqlens-k", target.cu_seqlens_k, "likewise of the keys");
    value(
        "--lengths", "FILE", "a packed batch: the length of each sequence, as many queries as keys, one a line",
        [&target](const std::string& word) {
            if (target.packed())
                throw InvalidArgument("--lengths=" + word + " and --cu-seqlens-q or --cu-seqlens-k were given; one of the two is accepted");
            target.cu_seqlens_q = target.cu_seqlens_k = read_lengths("--lengths", word);
        });
}

void reject(const std::string& option, const std::string& word, const std::string& accepted) {
    throw InvalidArgument(option + "=" + word + ": " + accepted);
}

std::vector<int> parse_list(const std::string& option, const std::string& word) {
    std::vector<int> list;
    for (std::size_t at = 0; at <= word.size();) {
        const std::size_t comma = std::min(word.find(',', at), word.size());
        list.push_back(parse_whole<int>(option, word.substr(at, comma - at)));
        at = comma + 1;
    }
    return list;
}

std::vector<int> read_lengths(const std::string& option, const std::filesystem::path& path) {
    std::ifstream file(path);
    if (!file) throw InvalidArgument(option + "=" + path.string() + ": the file cannot be read");
    std::vector<int> cu_seqlens = {0};
    std::string line;
    for (int number = 1; std::getline(file, line); ++number) {
        if (line.rfind('#', 0) == 0) continue;
        const std::string where = option + "=" + path.string() + ", line " + std::to_string(number);
        const int length = parse_whole<int>(where, line, 0);
        if (length > std::numeric_limits<int>::max() - cu_seqlens.back())
            reject(where, line, "lengths of at most 2147483647 in all are accepted");
        cu_seqlens.push_back(cu_seqlens.back() + length);
    }
    if (cu_seqlens.size() == 1) throw InvalidArgument(option + "=" + path.string() + ": no lengths; one or more are accepted");
    return cu_seqlens;
}

double parse_real(const std::string& option, const std::string& word, const char* accepted) {
    double value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || !std::isfinite(value)) reject(option, word, accepted);
    return value;
}

}  // namespace workbook
