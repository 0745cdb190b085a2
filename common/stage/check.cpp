#include "stage/check.hpp"

#include "attention/error.hpp"
#include "stage/device.hpp"
#include "stage/run.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

namespace workbook {
namespace {

const Variant* forward_variant(const Stage& stage, const std::string& id) {
    const auto found = std::find_if(stage.variants.begin(), stage.variants.end(), [&](const Variant& v) { return v.id == id; });
    return found == stage.variants.end() ? nullptr : &*found;
}

const BackwardVariant* backward_variant(const Stage& stage, const std::string& id) {
    const auto found = std::find_if(stage.backward.begin(), stage.backward.end(), [&](const BackwardVariant& v) { return v.id == id; });
    return found == stage.backward.end() ? nullptr : &*found;
}

std::vector<std::string> ids(const Stage& stage) {
    std::vector<std::string> all;
    for (const Variant& v : stage.variants) all.push_back(v.id);
    for (const BackwardVariant& v : stage.backward) all.push_back(v.id);
    return all;
}

/// Calls f with the forward or the backward variant of that id.
template <class F>
auto with_variant(const Stage& stage, const std::string& id, F&& f) {
    if (const Variant* v = forward_variant(stage, id)) return f(*v);
    if (const BackwardVariant* v = backward_variant(stage, id)) return f(*v);
    std::string known;
    for (const std::string& name : ids(stage)) known += (known.empty() ? "" : " ") + name;
    throw InvalidArgument("variant '" + id + "' is unknown to stage " + stage.id + "; accepted: " + known);
}

Device device_of(const Rung& rung) {
    Device device = Device::current();
    if (rung.shared_memory > 0) device.shared_memory_per_block = rung.shared_memory;
    return device;
}

// ---- bytes -----------------------------------------------------------------------------------------------------------------

std::string times(double ratio) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3g", ratio);
    return text;
}

/// Why a tensor may be read as often as it is, as far as the number shows it.
template <class AnyVariant>
std::string cause_of(const AnyVariant& variant, const Rung& rung, const simt::LedgerRow& row, const TensorTraffic& expected) {
    const auto read = static_cast<long long>(row.read.requested);
    const Problem& p = rung.problem;
    if (p.causal) {
        Problem whole = p;
        whole.causal = false;
        for (const TensorTraffic& t : variant.movement(whole, device_of(rung)).requested.tensors)
            if (t.tensor == row.tensor && t.read == read)
                return ": as much as without a mask, so what no query of a block sees is read all the same";
    }
    if (read < expected.read && static_cast<long long>(row.written.requested) == expected.written)
        return ": it is written as often as it should be. Is something assigned to it that should be added, as by atomicAdd?";
    const bool of_keys = row.tensor == "K" || row.tensor == "V";
    if (of_keys && read == p.rows() * p.kv_seq * p.head_dim * static_cast<long long>(size_of(p.dtype)))
        return ": " + row.tensor + " is loaded once for each query row";
    if (expected.read > 0 && read % expected.read == 0)
        return ": each element is loaded " + std::to_string(read / expected.read) +
               " times as often as it need be. Does a load stand inside a loop that it could stand before?";
    return "";
}

/// What is not as the closed form has it; empty when all is.
template <class AnyVariant>
std::string told_of_bytes(const AnyVariant& variant, const Rung& rung, const Report& report) {
    if (report.as_predicted().value_or(true)) return "";
    std::string text = "The result is right, but it does not move the bytes that this stage should.";
    const auto compare = [&](const std::string& tensor, const char* verb, long long got, long long expected, const std::string& cause) {
        if (got == expected) return;
        text += "\n" + std::string(verb) + " ";
        text += expected > 0 ? times(static_cast<double>(got) / static_cast<double>(expected)) + " times the bytes expected of " + tensor
                             : tensor + ", of which nothing is expected";
        text += " (" + std::to_string(got) + " instead of " + std::to_string(expected) + " bytes)" + cause + ".";
    };
    for (const simt::LedgerRow& row : *report.counted) {
        TensorTraffic expected{row.tensor};
        for (const TensorTraffic& t : report.predicted.requested.tensors)
            if (t.tensor == row.tensor) expected = t;
        compare(row.tensor, "Reads", static_cast<long long>(row.read.requested), expected.read, cause_of(variant, rung, row, expected));
        compare(row.tensor, "Writes", static_cast<long long>(row.written.requested), expected.written, "");
    }
    for (const TensorTraffic& t : report.predicted.requested.tensors) {
        const bool touched =
            std::any_of(report.counted->begin(), report.counted->end(), [&](const auto& row) { return row.tensor == t.tensor; });
        if (!touched) text += "\nNothing touches " + t.tensor + ".";
    }
    return text;
}

// ---- one rung --------------------------------------------------------------------------------------------------------------

/// The mistakes first, then what the comparison saw.
std::string in_order(const std::string& reason) {
    const std::size_t end = reason.find('\n');
    return end == std::string::npos ? reason : reason.substr(end + 1) + "\n" + reason.substr(0, end);
}

/// What is wrong on a rung under one schedule; empty when nothing is.
std::string told_of(const Stage& stage, const Variant& variant, const Rung& rung, const Setup& setup, std::optional<BackwardSetup>&) {
    const Report report = run_variant(stage, variant, setup).report;
    return report.status == "ok" ? told_of_bytes(variant, rung, report) : in_order(report.reason);
}

std::string told_of(const Stage& stage, const BackwardVariant& variant, const Rung& rung, const Setup& setup,
                    std::optional<BackwardSetup>& backward) {
    if (!backward) backward = BackwardSetup{output_gradient(setup.inputs.problem, setup.options, nullptr), {}, {}, {}, {}};
    const Report report = run_variant(stage, variant, setup, *backward).report;
    return report.status == "ok" ? told_of_bytes(variant, rung, report) : in_order(report.reason);
}

template <class AnyVariant>
std::string climb(const Stage& stage, const AnyVariant& variant, const Rung& rung) {
    Options options;
    options.quiet = true;
    options.repeats = 1;
    options.seed = 1;
    Setup setup{options, device_of(rung), find_gpu("h200"), false, random_inputs(rung.problem, options), {}, {}};
    Inputs& in = setup.inputs;
    if (rung.change) {
        rung.change(in);
        upload_rounded(in);
    }
    setup.want = reference_forward(rung.problem, in.q_host, in.k_host, in.v_host);
    setup.plain = plain_low_precision_forward(rung.problem, in.q_host, in.k_host, in.v_host);
    std::optional<BackwardSetup> backward;
    for (const simt::Schedule schedule : {simt::Schedule::round_robin, simt::Schedule::lowest_first, simt::Schedule::highest_first}) {
        options.schedule = schedule;
        std::string told;
        try {
            told = told_of(stage, variant, rung, setup, backward);
        } catch (const std::exception& error) {
            told = error.what();
        }
        if (!told.empty()) {
            if (schedule != simt::Schedule::round_robin)
                told += std::string("\nIt shows when warps run ") + name(schedule) + ": the result depends on who comes first.";
            return told;
        }
        if (!emulating || !rung.all_schedules) break;
    }
    return "";
}

}  // namespace

std::vector<Rung> ladder(const Stage& stage, const std::string& id) {
    const auto takes = [&](const Rung& rung) {
        return with_variant(stage, id, [&](const auto& v) { return !why_refused(v, rung.problem, device_of(rung)); });
    };
    Problem base{.batch = 1, .heads = 1, .kv_heads = 1, .seq = 64, .kv_seq = 64, .head_dim = 64, .dtype = DType::f32};
    if (!takes({"", base})) base.dtype = DType::f16;

    std::vector<Rung> rungs;
    const auto add = [&](std::string what, int seq, int kv_seq, auto change) {
        Problem p = base;
        p.seq = seq;
        p.kv_seq = kv_seq;
        Rung rung{std::move(what) + ": " + std::to_string(seq) + (seq == 1 ? " query, " : " queries, ") + std::to_string(kv_seq) + " keys",
                  p};
        change(rung);
        if (takes(rung)) rungs.push_back(std::move(rung));
    };
    const auto nothing = [](Rung&) {};
    const auto every_schedule = [](Rung& r) { r.all_schedules = true; };
    const auto causal = [](Rung& r) { r.problem.causal = true; };
    const auto scale = [](float x) { return [x](Rung& r) { r.problem.softmax_scale = x; }; };
    add("one tile", 64, 64, nothing);
    add("several tiles of keys", 64, 400, every_schedule);
    add("causal", 128, 128, causal);
    add("lengths that fill no tile", 70, 90, nothing);
    add("several tiles of queries and keys", 150, 300, every_schedule);
    add("fewer queries than keys, causal", 100, 170, causal);
    add("4 query heads on 2 key/value heads, 2 batches", 70, 90, [](Rung& r) {
        r.problem.batch = 2;
        r.problem.heads = 4;
        r.problem.kv_heads = 2;
    });
    add("4 query heads on 2 key/value heads, causal", 150, 170, [](Rung& r) {
        r.problem.heads = 4;
        r.problem.kv_heads = 2;
        r.problem.causal = true;
    });
    add("more queries than keys, causal, so that the first 60 rows see nothing", 100, 40, causal);
    add("a head dimension of 50", 33, 40, [](Rung& r) { r.problem.head_dim = 50; });
    add("scores beyond 88, of which exp is infinite (scale 8)", 70, 90, scale(8));
    add("all scores of a row far below zero (scale 16, few keys)", 200, 2, scale(16));
    add("a negative scale", 70, 90, scale(-0.5f));
    const bool e4m3 = with_variant(stage, id, [&](const auto& v) { return v.unit(base.dtype) == Unit::tensor_fp8; });
    if (e4m3) {  // blocks of 64 rows with a scale each
        const auto changed = [](void (*change)(Inputs&)) { return [=](Rung& r) { r.change = change; }; };
        add("values up to 4000, where e4m3 ends at 448", 70, 90, changed([](Inputs& in) {
                for (float& x : in.v_host) x *= 1000.0f;
            }));
        add("a column of K that is 3000 times as large as the others, and of which Q has zeros", 70, 90, changed([](Inputs& in) {
                const auto d = static_cast<std::size_t>(in.problem.head_dim);
                for (std::size_t e = 5; e < in.k_host.size(); e += d) in.k_host[e] *= 3000.0f;
                for (std::size_t e = 5; e < in.q_host.size(); e += d) in.q_host[e] = 0.0f;
            }));
        add("keys of which 64 are all zeros", 70, 90,
            changed([](Inputs& in) { std::fill_n(in.k_host.begin(), 64 * in.problem.head_dim, 0.0f); }));
        add("a query with an infinite element", 70, 90, changed([](Inputs& in) { in.q_host[0] = INFINITY; }));
    }
    add("64 KiB of shared memory, so that tiles are small", 70, 200, [](Rung& r) {
        r.shared_memory = 64 * 1024;
        r.all_schedules = true;
    });
    const Rung& last = rungs.back();
    const bool same = last.shared_memory > 0 && with_variant(stage, id, [&](const auto& v) {
                          return v.movement(last.problem, device_of(last)).requested.total() ==
                                 v.movement(last.problem, Device::current()).requested.total();
                      });
    if (same) rungs.pop_back();  // its tiles do not depend on the memory that there is
    return rungs;
}

Checked check_variant(const Stage& stage, const std::string& id, const std::function<void(const Rung&)>& passed) {
    Checked checked;
    for (const Rung& rung : ladder(stage, id)) {
        checked.told = with_variant(stage, id, [&](const auto& variant) { return climb(stage, variant, rung); });
        if (!checked.told.empty()) {
            checked.failed = rung;
            return checked;
        }
        ++checked.passed;
        passed(rung);
    }
    return checked;
}

int check_main(const Stage& stage, int argc, char** argv) {
    try {
        std::vector<std::string> chosen(argv + 1, argv + argc);
        if (chosen.empty()) chosen = ids(stage);
        for (const std::string& id : chosen) {
            std::cout << with_variant(stage, id, [](const auto& v) { return v.id + " " + v.name; }) << "\n";
            const Checked checked = check_variant(stage, id, [](const Rung& rung) { std::cout << "  ok     " << rung.what << std::endl; });
            if (checked.ok()) continue;
            std::cout << "  wrong  " << checked.failed->what << "\n\n" << checked.told << std::endl;
            return 1;
        }
        return 0;
    } catch (const InvalidArgument& error) {
        std::cerr << error.what() << "\n";
        return 2;
    }
}

}  // namespace workbook
