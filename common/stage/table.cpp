#include "stage/table.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace workbook {
namespace {

constexpr double MiB = 1024.0 * 1024.0;

std::string scientific(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.2e", value);
    return text;
}

std::string left(const std::string& text, std::size_t width) {
    return text + std::string(width > text.size() ? width - text.size() : 0, ' ');
}

std::string right(const std::string& text, std::size_t width) {
    return std::string(width > text.size() ? width - text.size() : 0, ' ') + text;
}

std::string mib(double bytes) { return significant(bytes / MiB); }

std::string rate(double per_second) { return significant(per_second * 1e-12, 3); }

/// One column of the table: its upper and its lower cell.
struct Column {
    std::size_t width;
    std::string upper, lower;
};

constexpr std::size_t first_width = 30;  // "06b warp_specialised_pingpong"

std::string two_lines(const std::string& upper, const std::string& lower, const std::vector<Column>& columns) {
    std::string a = left(upper, first_width), b = left(lower, first_width);
    for (const Column& column : columns) {
        a += " " + right(column.upper, column.width - 1);
        b += " " + right(column.lower, column.width - 1);
    }
    a.erase(a.find_last_not_of(' ') + 1);
    b.erase(b.find_last_not_of(' ') + 1);
    return a + "\n" + b + "\n";
}

std::size_t width_of(const std::vector<Column>& columns) {
    std::size_t width = first_width;
    for (const Column& column : columns) width += column.width;
    return width;
}

std::vector<Column> head_columns(bool emulated, bool backward) {
    const std::string baseline = backward ? "of 05a" : "of 01", saved = backward ? "saved MiB" : "";
    if (emulated) {
        return {{11, "max abs", "read MiB"},   {11, "rel RMS", "in sectors"}, {11, "vs prev", "write MiB"}, {11, "GFLOP", "in sectors"},
                {12, "pred. ms", "pred. MiB"}, {14, "bound by", baseline},    {11, saved, "extra MiB"}};
    }
    return {{11, "max abs", "read MiB"}, {11, "rel RMS", "write MiB"}, {11, "vs prev", "HBM MiB"},    {11, "GFLOP", baseline},
            {11, "pred. ms", ""},        {14, "bound by", saved},      {11, "meas. ms", "extra MiB"}, {10, "TFLOPS", "speedup"}};
}

std::vector<Column> cells(const Report& r, bool emulated) {
    const std::string none = "-";
    const std::string max_abs = scientific(r.max_abs()), rel_rms = scientific(r.rel_rms());
    const std::string previous = r.difference ? scientific(r.difference->rel_rms) : none;
    const std::string gflop = significant(1e-9 * r.calculated_flops), predicted_ms = significant(1e3 * r.prediction.seconds());
    const std::string bound(r.prediction.bound());
    const std::string of_naive = significant(static_cast<double>(r.read() + r.written()) / r.naive_requested, 3) + "x";
    std::vector<Column> columns = head_columns(emulated, r.backward);
    const std::string saved = r.backward ? mib(r.saved_memory) : "";
    const auto set = [&](std::size_t i, std::string upper, std::string lower) {
        columns[i].upper = std::move(upper);
        columns[i].lower = std::move(lower);
    };
    if (emulated) {
        double read_sectors = 0, written_sectors = 0;
        if (r.counted) {
            for (const simt::LedgerRow& row : *r.counted) {
                read_sectors += row.read.sector_bytes();
                written_sectors += row.written.sector_bytes();
            }
        }
        const auto matches = r.as_predicted();
        const std::string sign = !matches ? "" : *matches ? "= " : "!= ";
        set(0, max_abs, mib(r.read()));
        set(1, rel_rms, r.counted ? mib(read_sectors) : none);
        set(2, previous, mib(r.written()));
        set(3, gflop, r.counted ? mib(written_sectors) : none);
        set(4, predicted_ms, sign + mib(r.predicted.requested.total()));
        set(5, bound, of_naive);
        set(6, saved, mib(r.extra_memory));
    } else {
        set(0, max_abs, mib(r.read()));
        set(1, rel_rms, mib(r.written()));
        set(2, previous, mib(r.predicted.dram.total()));
        set(3, gflop, of_naive);
        set(4, predicted_ms, "");
        set(5, bound, saved);
        set(6, r.seconds ? significant(1e3 * *r.seconds) : none, mib(r.extra_memory));
        set(7, r.seconds ? rate(r.flops / *r.seconds) : none, r.speedup ? significant(*r.speedup, 3) + "x" : none);
    }
    return columns;
}

/// Below a row: indented, and broken between words to fit the table.
std::string indented(const std::string& text) {
    constexpr std::size_t width = 120;
    std::string out, line = "   ";
    const auto flush = [&] {
        out += line + "\n";
        line = "   ";
    };
    std::istringstream paragraphs(text);
    for (std::string paragraph; std::getline(paragraphs, paragraph);) {
        std::istringstream words(paragraph);
        for (std::string word; words >> word;) {
            if (line.size() > 3 && line.size() + 1 + word.size() > width) flush();
            line += " " + word;
        }
        flush();
    }
    return out;
}

/// Counted and predicted traffic of each tensor that has either.
struct TensorLine {
    std::string tensor;
    std::optional<simt::LedgerRow> counted;
    TensorTraffic predicted;
};

std::vector<TensorLine> tensor_lines(const Report& report) {
    std::vector<TensorLine> lines;
    for (const TensorTraffic& t : report.predicted.requested.tensors) lines.push_back({t.tensor, std::nullopt, t});
    if (!report.counted) return lines;
    for (TensorLine& line : lines) line.counted = simt::LedgerRow{line.tensor, {}, {}};
    for (const simt::LedgerRow& row : *report.counted) {
        auto found = std::find_if(lines.begin(), lines.end(), [&](const TensorLine& line) { return line.tensor == row.tensor; });
        if (found == lines.end()) {
            if (row.read.requested + row.written.requested == 0) continue;
            found = lines.insert(lines.end(), {row.tensor, std::nullopt, {row.tensor, 0, 0}});
        }
        found->counted = row;
    }
    return lines;
}

}  // namespace

std::string significant(double value, int digits) {
    if (!std::isfinite(value)) return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    char text[64];
    std::snprintf(text, sizeof text, "%.*e", digits - 1, value);  // rounded first: 9.9999 has its digits as 10.00
    const int exponent = std::atoi(std::strchr(text, 'e') + 1);
    const int decimals = value == 0 ? 0 : std::clamp(digits - 1 - exponent, 0, 9);
    std::snprintf(text, sizeof text, "%.*f", decimals, value);
    return text;
}

std::string grouped(long long value) {
    const std::string digits = std::to_string(value);
    std::string text;
    for (std::size_t i = 0; i < digits.size(); ++i) {
        const std::size_t left = digits.size() - i;
        if (!text.empty() && text != "-" && left % 3 == 0) text += ',';
        text += digits[i];
    }
    return text;
}

std::string heading(const Stage& stage, const Setup& setup) {
    const Problem& p = setup.inputs.problem;
    const Gpu& gpu = setup.target;
    const bool elsewhere = !setup.device.emulated && !setup.on_target;
    char scale[32] = "";  // describe() names it only where it is not the default
    if (!p.softmax_scale) std::snprintf(scale, sizeof scale, " scale=%.6g", p.scale());
    std::string text = "Stage " + stage.id + ": " + stage.title + "\n";
    text += "  problem    " + describe(p) + scale + "\n";
    text += "  inputs     " + origin_of(setup.options) + "\n";
    text += "  device     " + setup.device.name + ", " + significant(setup.device.shared_memory_per_block / 1024.0, 3) +
            " KiB of shared memory a block";
    if (setup.device.emulated) text += std::string(", schedule ") + simt::name(setup.options.schedule);
    text += "\n  predicted  for " + std::string(gpu.name) + (elsewhere ? " (which this is not; --on chooses another)" : "") + ": " +
            rate(gpu.fp32) + " TFLOPS FP32, " + rate(gpu.tensor_16bit) + " TFLOPS tensor cores, " + rate(gpu.bandwidth) + " TB/s\n";
    text += "  checked    ";
    const auto checked = static_cast<long long>(setup.want.rows.size());
    text += checked == p.rows() ? "all " + std::to_string(checked) + " rows"
                                : std::to_string(checked) + " of " + std::to_string(p.rows()) + " rows";
    return text + " against float64\n";
}

std::string forward_heading(const Setup& setup, const std::string& previous) {
    std::string text;
    if (!previous.empty()) text += "  previous   " + previous + "\n";
    text += setup.device.emulated
                ? "  columns    read, write: MiB that threads ask for, and in 32-byte sectors what has to move; \"=\": as predicted;\n"
                : "  columns    read, write: MiB that threads ask for (predicted); HBM: MiB that must cross it (predicted);\n";
    text += "             of 01: bytes asked for over those of stage 01; extra: memory beside Q, K, V, O and LSE\n";
    return text + "\n" + column_heads(setup.device.emulated);
}

std::string backward_heading(const Setup& setup, const BackwardSetup& backward, const std::string& previous) {
    std::string text = "  backward   dO: " + backward.d_o.origin + "\n";
    if (backward.forward) text += "             O and LSE: " + backward.forward->label + "\n";
    if (!previous.empty()) text += "  previous   " + previous + "\n";
    text += "  columns    max abs, rel RMS: the largest of dQ, dK and dV; GFLOP: what the kernels calculate; the rest is of the backward\n";
    text += setup.device.emulated
                ? "             pass alone; read, write: MiB that threads ask for, and in 32-byte sectors; \"=\": as predicted;\n"
                : "             pass alone; read, write: MiB that threads ask for (predicted); HBM: MiB that must cross it;\n";
    text +=
        "             of 05a: bytes asked for over those of standard backward; saved: memory held from forward to backward beside\n"
        "             Q, K, V and O; extra: workspace of both passes";
    if (!setup.device.emulated) text += "; TFLOPS: 2.5 times the forward's FLOPs, as papers count, a second";
    return text + "\n\n" + column_heads(setup.device.emulated, true);
}

std::string column_heads(bool emulated, bool backward) {
    const std::vector<Column> columns = head_columns(emulated, backward);
    std::string text = two_lines("variant", "    type  verdict", columns);
    return text + std::string(width_of(columns), '-') + "\n";
}

std::string row(const Report& report, DType dtype, bool emulated) {
    const std::string verdict = report.status == "ok" ? "ok" : "WRONG";
    std::string text = two_lines(report.label(), "    " + left(name(dtype), 6) + verdict, cells(report, emulated));
    if (!report.reason.empty()) text += indented(report.reason);
    if (report.as_predicted() == false)
        text += indented("the formula predicts other traffic than was counted: --traffic shows for which tensor");
    if (report.extra_memory != report.predicted_extra_memory) {
        text += indented("extra memory: the formula predicts " + grouped(report.predicted_extra_memory) + " bytes, " +
                         grouped(report.extra_memory) + " were allocated");
    }
    if (report.saved_memory != report.predicted_saved_memory) {
        text += indented("saved memory: the formula predicts " + grouped(report.predicted_saved_memory) + " bytes, " +
                         grouped(report.saved_memory) + " were held");
    }
    return text;
}

std::string traffic_table(const Report& report) {
    const bool counted = report.counted.has_value();
    const auto line = [](const std::vector<std::string>& words) {
        static constexpr std::size_t widths[] = {8, 6, 20, 20, 18, 12};
        std::string text = "    " + left(words[0], widths[0]) + left(words[1], widths[1]);
        for (std::size_t i = 2; i < words.size(); ++i) text += right(words[i], widths[i]);
        return text + "\n";
    };
    std::string text = counted ? line({"tensor", "", "requested B", "predicted B", "sectors", "B/sector"})
                               : "    " + left("tensor", 14) + right("predicted B", 20) + "\n";
    for (const TensorLine& t : tensor_lines(report)) {
        const auto direction = [&](const char* word, const simt::Count& count, long long predicted) {
            if (count.requested == 0 && predicted == 0) return;
            if (!counted) {
                text += "    " + left(t.tensor, 8) + left(word, 6) + right(grouped(predicted), 20) + "\n";
                return;
            }
            const bool equal = static_cast<long long>(count.requested) == predicted;
            text += line({t.tensor, word, grouped(count.requested), (equal ? "= " : "!= ") + grouped(predicted), grouped(count.sectors),
                          count.sectors ? significant(static_cast<double>(count.requested) / count.sectors, 3) : "-"});
        };
        direction("read", t.counted ? t.counted->read : simt::Count{}, t.predicted.read);
        direction("write", t.counted ? t.counted->written : simt::Count{}, t.predicted.written);
    }
    for (const auto& [access, s] : report.shared)
        text += "    shared memory, " + access + ": " + grouped(static_cast<long long>(s.wavefronts)) + " wavefronts, " +
                grouped(static_cast<long long>(s.ideal)) + " would be without bank conflicts (" +
                significant(static_cast<double>(s.wavefronts) / static_cast<double>(s.ideal), 3) + "x)\n";
    return text;
}

std::string json_line(const Report& report, const Problem& problem, const std::string& inputs, const Device& device,
                      simt::Schedule schedule, const Gpu& target) {
    using Json = nlohmann::ordered_json;
    const bool ran = report.ran();
    const auto when = [](bool known, auto value) { return known ? Json(value) : Json(nullptr); };
    const auto maybe = [](const auto& value) { return value ? Json(*value) : Json(nullptr); };
    const auto errors = [&](const Errors& e, double allowed) {
        if (!ran) return Json(nullptr);
        return Json{{"max_abs", e.max_abs},     {"max_rel", e.max_rel},       {"rel_rms", e.rel_rms}, {"nans", e.nans},
                    {"unwritten", e.unwritten}, {"infinities", e.infinities}, {"allowed", allowed}};
    };
    const bool counted = report.counted.has_value();
    std::uint64_t sectors_read = 0, sectors_written = 0;
    if (counted) {
        for (const simt::LedgerRow& row : *report.counted) {
            sectors_read += row.read.sectors;
            sectors_written += row.written.sectors;
        }
    }
    const bool compared = report.difference.has_value();

    Json j;
    j["stage"] = report.stage;
    j["variant"] = report.id;
    j["name"] = report.name;
    j["direction"] = report.backward ? "bwd" : "fwd";
    j["status"] = report.status;
    j["reason"] = when(!report.reason.empty(), report.reason);
    j["batch"] = problem.batch;
    j["heads"] = problem.heads;
    j["kv_heads"] = problem.kv_heads;
    j["seq"] = problem.seq;
    j["kv_seq"] = problem.kv_seq;
    j["head_dim"] = problem.head_dim;
    j["dtype"] = name(problem.dtype);
    j["causal"] = problem.causal;
    j["scale"] = problem.scale();
    j["layout"] = name(problem.layout);
    j["cu_seqlens_q"] = when(problem.packed(), problem.cu_seqlens_q);
    j["cu_seqlens_k"] = when(problem.packed(), problem.cu_seqlens_k);
    j["inputs"] = inputs;
    j["device"] = device.name;
    j["emulated"] = device.emulated;
    j["compute_capability"] = device.compute_capability;
    j["shared_memory_per_block"] = device.shared_memory_per_block;
    j["schedule"] = when(device.emulated, simt::name(schedule));
    j["rows"] = report.rows;
    j["checked_rows"] = when(ran, report.checked_rows);
    j["o"] = errors(report.verdict.o, report.verdict.o_allowed);
    j["lse"] = errors(report.verdict.lse, report.verdict.lse_allowed);
    const auto gradient = [&](GradientErrors GradientVerdict::*of) {
        return report.gradients ? errors((*report.gradients.*of).errors, (*report.gradients.*of).allowed) : Json(nullptr);
    };
    j["dq"] = gradient(&GradientVerdict::dq);
    j["dk"] = gradient(&GradientVerdict::dk);
    j["dv"] = gradient(&GradientVerdict::dv);
    j["previous"] = when(compared, report.previous);
    j["previous_max_abs"] = when(compared, compared ? report.difference->max_abs : 0);
    j["previous_rel_rms"] = when(compared, compared ? report.difference->rel_rms : 0);
    j["flops"] = report.flops;
    j["calculated_flops"] = report.calculated_flops;
    j["requested_read"] = when(counted, report.read());
    j["requested_written"] = when(counted, report.written());
    j["sectors_read"] = when(counted, sectors_read);
    j["sectors_written"] = when(counted, sectors_written);
    j["shared"] = Json::object();
    for (const auto& [access, s] : report.shared) j["shared"][access] = {{"wavefronts", s.wavefronts}, {"ideal", s.ideal}};
    j["predicted_read"] = report.predicted.requested.read();
    j["predicted_written"] = report.predicted.requested.written();
    j["predicted_dram"] = report.predicted.dram.total();
    j["as_predicted"] = maybe(report.as_predicted());
    j["naive_requested"] = report.naive_requested;
    j["requested_ratio"] = static_cast<double>(report.read() + report.written()) / report.naive_requested;
    j["extra_memory"] = when(ran, report.extra_memory);
    j["predicted_extra_memory"] = report.predicted_extra_memory;
    j["saved_memory"] = when(ran && report.backward, report.saved_memory);
    j["predicted_saved_memory"] = when(report.backward, report.predicted_saved_memory);
    j["predicted_on"] = target.key;
    j["predicted_seconds"] = report.prediction.seconds();
    j["predicted_compute_seconds"] = report.prediction.compute_seconds;
    j["predicted_dram_seconds"] = report.prediction.dram_seconds;
    j["predicted_l1_seconds"] = report.prediction.l1_seconds;
    j["bound_by"] = report.prediction.bound();
    j["emulation_seconds"] = maybe(report.emulation_seconds);
    j["seconds"] = maybe(report.seconds);
    j["repetitions"] = when(report.seconds.has_value(), report.repetitions);
    j["flops_per_second"] = when(report.seconds.has_value(), report.seconds ? report.flops / *report.seconds : 0);
    j["baseline"] = when(report.speedup.has_value(), report.baseline);
    j["speedup"] = maybe(report.speedup);
    j["tensors"] = Json::array();
    for (const TensorLine& t : tensor_lines(report)) {
        const bool known = t.counted.has_value();
        const simt::LedgerRow count = t.counted.value_or(simt::LedgerRow{});
        j["tensors"].push_back(Json{{"tensor", t.tensor},
                                    {"read", when(known, count.read.requested)},
                                    {"written", when(known, count.written.requested)},
                                    {"read_sectors", when(known, count.read.sectors)},
                                    {"written_sectors", when(known, count.written.sectors)},
                                    {"predicted_read", t.predicted.read},
                                    {"predicted_written", t.predicted.written}});
    }
    // File names need not be UTF-8; a replacement character is better than no line.
    return j.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string trace_line(const Report& report, const Problem& problem) {
    using Json = nlohmann::ordered_json;
    Json j{{"stage", report.stage},        {"variant", report.id},
           {"name", report.name},          {"direction", report.backward ? "bwd" : "fwd"},
           {"batch", problem.batch},       {"heads", problem.heads},
           {"kv_heads", problem.kv_heads}, {"seq", problem.seq},
           {"kv_seq", problem.kv_seq},     {"head_dim", problem.head_dim},
           {"dtype", name(problem.dtype)}, {"causal", problem.causal},
           {"blocks", Json::array()}};
    for (const simt::TracedBlock& block : report.trace) {
        Json touched = Json::array();
        for (const simt::TracedRows& t : block.rows)
            touched.push_back({simt::tensor_name(t.tensor), t.write ? "write" : "read", t.first, t.last});
        j["blocks"].push_back({{"kernel", block.kernel}, {"block", {block.index.x, block.index.y, block.index.z}}, {"touched", touched}});
    }
    return j.dump() + "\n";
}

}  // namespace workbook
