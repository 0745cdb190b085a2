#include "cases.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>

namespace workbook::bench {
namespace {

constexpr int sweep_tokens = 16384;   // B * N
constexpr int sweep_channels = 2048;  // Hq * d

Problem sweep_problem(int seq, int head_dim, DType dtype, bool causal) {
    Problem p;
    p.batch = sweep_tokens / seq;
    p.heads = p.kv_heads = sweep_channels / head_dim;
    p.seq = p.kv_seq = seq;
    p.head_dim = head_dim;
    p.dtype = dtype;
    p.causal = causal;
    return p;
}

/// Reads a name from the left, and says where it stopped.
class Reader {
public:
    explicit Reader(std::string_view text) : text_(text), rest_(text) {}

    std::string_view until(char stop, const char* what) {
        const std::size_t at = rest_.find(stop);
        if (at == std::string_view::npos || at == 0) fail(what);
        const std::string_view word = rest_.substr(0, at);
        rest_.remove_prefix(at + 1);
        return word;
    }
    bool accept(std::string_view word) {
        if (rest_.substr(0, word.size()) != word) return false;
        rest_.remove_prefix(word.size());
        return true;
    }
    void expect(std::string_view word) {
        if (!accept(word)) fail(("\"" + std::string(word) + "\"").c_str());
    }
    int number(const char* what) {
        int value = 0;
        const auto [end, error] = std::from_chars(rest_.data(), rest_.data() + rest_.size(), value);
        if (error != std::errc() || value < 1) fail(what);
        rest_.remove_prefix(static_cast<std::size_t>(end - rest_.data()));
        return value;
    }
    void end() const {
        if (!rest_.empty()) fail("the end");
    }
    [[noreturn]] void fail(const char* what) const {
        throw InvalidArgument("case name \"" + std::string(text_) + "\": " + what + " is accepted at \"" + std::string(rest_) +
                              "\"; a name is as step03/shared_memory_tiling/fwd/bf16/d128/causal/B4_H32_KV8_N4096_M8192");
    }

private:
    std::string_view text_, rest_;
};

}  // namespace

Problem gqa_case() {
    Problem p = sweep_problem(4096, 128, DType::bf16, true);
    p.heads = 32;
    p.kv_heads = 8;
    return p;
}

std::vector<Problem> decode_sweep() {
    std::vector<Problem> sweep;
    const auto add = [&](int batch, int queries, int keys) {
        sweep.push_back(
            {.batch = batch, .heads = 32, .kv_heads = 8, .seq = queries, .kv_seq = keys, .head_dim = 128, .dtype = DType::bf16});
    };
    for (const int batch : {1, 16, 64, 128})
        for (const int keys : {512, 2048, 8192, 32768, 131072})
            if (batch * keys <= 16 * 32768) add(batch, 1, keys);
    add(16, 8, 32768);
    return sweep;
}

std::vector<Problem> full_sweep() {
    std::vector<Problem> sweep;
    for (const int seq : {512, 1024, 2048, 4096, 8192, 16384})
        for (const int head_dim : {64, 128})
            for (const DType dtype : {DType::bf16, DType::f32})
                for (const bool causal : {false, true}) sweep.push_back(sweep_problem(seq, head_dim, dtype, causal));
    sweep.push_back(gqa_case());
    return sweep;
}

std::vector<Problem> quick_sweep() {
    std::vector<Problem> sweep;
    for (const int seq : {1024, 4096})
        for (const bool causal : {false, true}) sweep.push_back(sweep_problem(seq, 128, DType::bf16, causal));
    return sweep;
}

Problem default_case() { return {.heads = 16, .kv_heads = 16, .seq = 4096, .kv_seq = 4096, .head_dim = 128, .dtype = DType::bf16}; }

std::vector<Problem> cases_of(const Request& request) {
    if (request.quick + request.gqa + request.decode + request.any() > 1) {
        throw InvalidArgument(
            "--quick, --gqa, --decode and the options of a single case (--batch, --heads, --kv-heads, --seq, --kv-seq, --head-dim, "
            "--dtype, --causal, --lengths, --cu-seqlens-q, --cu-seqlens-k) ask for different cases; one of the four is accepted");
    }
    if (request.quick) return quick_sweep();
    if (request.gqa) return {gqa_case()};
    if (request.decode) return decode_sweep();
    if (!request.any()) return full_sweep();
    const Problem p = request.over(default_case());
    check(p);
    return {p};
}

const char* name(Direction direction) {
    switch (direction) {
        case Direction::backward: return "bwd";
        case Direction::both: return "fwdbwd";
        case Direction::forward: break;
    }
    return "fwd";
}

double flops(const Problem& problem, Direction direction) {
    return (direction == Direction::backward ? 0 : forward_flops(problem)) +
           (direction == Direction::forward ? 0 : backward_flops(problem));
}

std::string case_name(const CaseName& n) {
    const Problem& p = n.problem;
    std::string text = n.source + "/" + n.variant + "/" + name(n.direction) + "/" + name(p.dtype) + "/d" + std::to_string(p.head_dim) +
                       (p.causal ? "/causal/B" : "/full/B") + std::to_string(p.batch) + "_H" + std::to_string(p.heads);
    if (p.kv_heads != p.heads) text += "_KV" + std::to_string(p.kv_heads);
    text += "_N" + std::to_string(p.seq);
    if (p.kv_seq != p.seq) text += "_M" + std::to_string(p.kv_seq);
    if (p.packed()) text += "_S" + std::to_string(p.cu_seqlens_q.size() - 1);
    return text;
}

CaseName parse_case_name(std::string_view text) {
    Reader read(text);
    CaseName n;
    n.source = read.until('/', "a source (stepNN or peer)");
    n.variant = read.until('/', "the name of a variant");
    const std::string_view word = read.until('/', "fwd, bwd or fwdbwd");
    bool known = false;
    for (const Direction direction : {Direction::forward, Direction::backward, Direction::both}) {
        if (word != name(direction)) continue;
        n.direction = direction;
        known = true;
    }
    if (!known) read.fail("fwd, bwd or fwdbwd before what is left");
    Problem& p = n.problem;
    p.dtype = parse_dtype(read.until('/', "f32, f16 or bf16"));
    read.expect("d");
    p.head_dim = read.number("a head dimension from 1 on");
    read.expect("/");
    p.causal = read.accept("causal/");
    if (!p.causal && !read.accept("full/")) read.fail("full/ or causal/");
    read.expect("B");
    p.batch = read.number("a batch size from 1 on");
    read.expect("_H");
    p.heads = p.kv_heads = read.number("a number of query heads from 1 on");
    if (read.accept("_KV")) p.kv_heads = read.number("a number of key/value heads from 1 on");
    read.expect("_N");
    p.seq = p.kv_seq = read.number("a number of query rows from 1 on");
    if (read.accept("_M")) p.kv_seq = read.number("a number of key/value rows from 1 on");
    read.end();
    return n;
}

double quantile(std::span<const double> ascending, double q) {
    if (ascending.empty()) throw InvalidArgument("quantile: no values; one or more are accepted");
    if (!(q >= 0 && q <= 1)) throw InvalidArgument("quantile: q = " + std::to_string(q) + "; 0 to 1 is accepted");
    if (!std::is_sorted(ascending.begin(), ascending.end())) throw InvalidArgument("quantile: the values are not in ascending order");
    const double place = q * static_cast<double>(ascending.size() - 1);
    const auto below = static_cast<std::size_t>(place);
    const std::size_t above = std::min(below + 1, ascending.size() - 1);
    return ascending[below] + (place - static_cast<double>(below)) * (ascending[above] - ascending[below]);
}

int repetitions(double seconds) {
    const double run = std::max(seconds, 1e-6);
    const double wanted = std::max(std::ceil(0.3 / run), std::min(10.0, std::ceil(1.0 / run)));
    return static_cast<int>(std::clamp(wanted, 2.0, 200.0));
}

std::vector<std::pair<std::string, double>> counters(const Measured& m) {
    const double median = quantile(m.times, 0.5);
    if (!(median > 0)) throw InvalidArgument("counters: a median time of " + std::to_string(median) + " s; more than 0 is accepted");
    std::vector<std::pair<std::string, double>> all = {
        {"TFLOPS", 1e-12 * m.flops / median},
        {"extra_MiB", static_cast<double>(m.extra_memory) / (1024.0 * 1024.0)},
        {"spread_percent", 100 * (quantile(m.times, 0.9) - quantile(m.times, 0.1)) / median},
        {"repetitions", static_cast<double>(m.times.size())},
        {"rel_rms_error", m.rel_rms_error},
    };
    if (!m.movement.requested.tensors.empty()) {
        all.emplace_back("GB_per_s", 1e-9 * static_cast<double>(m.movement.requested.total()) / median);
        all.emplace_back("hbm_GB_per_s", 1e-9 * static_cast<double>(m.movement.dram.total()) / median);
        if (m.copy_bandwidth) {
            all.emplace_back("copy_GB_per_s", 1e-9 * *m.copy_bandwidth);
            all.emplace_back("copy_percent", 100 * static_cast<double>(m.movement.dram.total()) / median / *m.copy_bandwidth);
        }
    }
    if (m.saved) all.emplace_back("saved_MiB", static_cast<double>(*m.saved) / (1024.0 * 1024.0));
    if (m.prediction) {
        all.emplace_back("predicted_ms", 1e3 * m.prediction->seconds());
        all.emplace_back("roofline_percent", 100 * m.prediction->seconds() / median);
    }
    return all;
}

}  // namespace workbook::bench
