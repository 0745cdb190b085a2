/// @file
/// What every stage is tested for, forward and backward: agreement with float64 and with the stage before, exact traffic, refusals, free
/// strides.
#pragma once

#include "attention/error.hpp"
#include "stage/device.hpp"
#include "stage/run.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <tuple>
#include <vector>

// The stage before, where it is built too: CMake names its namespace.
#ifdef WORKBOOK_PREVIOUS
namespace WORKBOOK_PREVIOUS {
const workbook::Stage& stage();
}
#endif
#ifdef WORKBOOK_BACKWARD_BEFORE
namespace WORKBOOK_BACKWARD_BEFORE {
const workbook::Stage& stage();
}
#endif

// How GoogleTest names the parameters of a test.
namespace simt {
inline void PrintTo(Schedule schedule, std::ostream* out) { *out << name(schedule); }
}  // namespace simt

namespace workbook {

inline void PrintTo(DType type, std::ostream* out) { *out << name(type); }

/// Null for the first stage.
inline const Stage* previous_stage() {
#ifdef WORKBOOK_PREVIOUS
    return &WORKBOOK_PREVIOUS::stage();
#else
    return nullptr;
#endif
}

/// Ragged and odd, shorter and longer than a tile, Nq != Nkv both ways. With causal, Nq > Nkv has rows that see nothing.
inline const std::vector<std::pair<int, int>> kLengths = {{1, 1},     {15, 15},   {63, 64},   {64, 63}, {65, 65}, {113, 200},
                                                          {127, 127}, {200, 113}, {257, 257}, {1, 257}, {257, 1}};

/// A variant of a stage, and what of the problems below it takes. A stage stands for its last variant with every type.
struct Tested {
    const Stage& stage;
    const Variant& variant;
    std::vector<DType> types = {DType::f32, DType::bf16};
    int head_dim = 32;        ///< the smallest
    int stride_multiple = 1;  ///< of the strides that it takes, in elements
    int most_queries = 1000;  ///< problems with more are cut down to as many
    Device device = Device::current();

    Tested(const Stage& the_stage) : Tested(the_stage, the_stage.variants.back()) {}
    Tested(const Stage& the_stage, const Variant& the_variant) : stage(the_stage), variant(the_variant) {}
};

/// Everything a run needs, with its reference, so that several variants and schedules can share it.
struct TestCase {
    Options options;
    Setup setup;

    /// @param rows flat indices of the rows to compare; empty: all
    explicit TestCase(const Problem& problem, std::uint64_t seed = 1, Distribution dist = Distribution::normal,
                      const Device& device = Device::current(), const std::vector<long long>& rows = {})
        : setup{options, device, find_gpu("h200"), false, {}, {}, {}} {
        options.seed = seed;
        options.dist = dist;
        options.repeats = 1;
        setup.inputs = random_inputs(problem, options);
        make_references(rows);
    }
    TestCase(const TestCase&) = delete;
    /// To be called after the inputs were changed on the host.
    void inputs_changed() {
        upload_rounded(setup.inputs);
        make_references({});
    }

protected:
    void make_references(const std::vector<long long>& rows) {
        const Inputs& in = setup.inputs;
        setup.want = reference_forward(in.problem, in.q_host, in.k_host, in.v_host, rows);
        setup.plain = plain_low_precision_forward(in.problem, in.q_host, in.k_host, in.v_host, rows);
    }
};

/// Calls f with each schedule in the options of the test in turn; on a GPU, which has none, once.
template <class Test, class F>
void under_every_schedule(Test& test, F&& f) {
    for (const simt::Schedule schedule : {simt::Schedule::round_robin, simt::Schedule::lowest_first, simt::Schedule::highest_first}) {
        test.options.schedule = schedule;
        SCOPED_TRACE(simt::name(schedule));
        f();
        if (!emulating) return;
    }
}

/// Expects memory and, in emulation, traffic to be what the closed forms say.
inline void expect_predicted(const Report& report) {
    EXPECT_EQ(report.extra_memory, report.predicted_extra_memory);
    EXPECT_EQ(report.saved_memory, report.predicted_saved_memory);
    if (!report.counted) return;
    const std::vector<TensorTraffic>& predicted = report.predicted.requested.tensors;
    EXPECT_EQ(report.counted->size(), predicted.size());
    for (const simt::LedgerRow& row : *report.counted) {
        bool found = false;
        for (const TensorTraffic& t : predicted) {
            if (t.tensor != row.tensor) continue;
            found = true;
            EXPECT_EQ(static_cast<long long>(row.read.requested), t.read) << "bytes read from " << row.tensor;
            EXPECT_EQ(static_cast<long long>(row.written.requested), t.written) << "bytes written to " << row.tensor;
        }
        EXPECT_TRUE(found) << row.tensor << " was touched and the closed form does not have it";
    }
}

/// Runs a variant and expects it to be right; in emulation also that it moves exactly what the closed form says.
inline Run expect_right(const Stage& stage, const Variant& variant, const TestCase& test) {
    SCOPED_TRACE(variant.id + ": " + describe(test.setup.inputs.problem) + ", schedule " + name(test.options.schedule));
    Run run;
    try {
        run = run_variant(stage, variant, test.setup);
    } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
        return run;
    }
    EXPECT_EQ(run.report.status, "ok") << run.report.reason;
    expect_predicted(run.report);
    return run;
}

/// Two right results differ by no more than their two allowances.
inline void expect_agreement(const Run& previous, const Run& now) {
    const Errors difference = compare_runs(previous.result, now.result);
    EXPECT_TRUE(difference.clean()) << previous.report.label() << " against " << now.report.label();
    EXPECT_LE(difference.rel_rms, previous.report.verdict.o_rms_allowed + now.report.verdict.o_rms_allowed);
    EXPECT_LE(difference.max_abs, previous.report.verdict.o_allowed + now.report.verdict.o_allowed);
}

/// One element type, head dimension and schedule.
using Combination = std::tuple<DType, int, simt::Schedule>;

inline std::string combination_name(const testing::TestParamInfo<Combination>& info) {
    std::string text =
        std::string(name(std::get<0>(info.param))) + "_d" + std::to_string(std::get<1>(info.param)) + "_" + name(std::get<2>(info.param));
    for (char& c : text)
        if (c == '-') c = '_';
    return text;
}

/// Every type and head dimension with one schedule; one type with the others, which only the emulator has: with both at the first head
/// dimension, and with one of them in turn at the rest, whose tiles have other sizes.
inline std::vector<Combination> combinations(const std::vector<int>& head_dims,
                                             const std::vector<DType>& types = {DType::f32, DType::f16, DType::bf16}) {
    std::vector<Combination> all;
    bool lowest = false;
    for (const int d : head_dims) {
        for (const DType type : types) all.emplace_back(type, d, simt::Schedule::round_robin);
        if (!emulating) continue;
        const bool first = d == head_dims.front();
        if (first || lowest) all.emplace_back(types.front(), d, simt::Schedule::lowest_first);
        if (first || !lowest) all.emplace_back(types.front(), d, simt::Schedule::highest_first);
        lowest = !lowest;
    }
    return all;
}

/// Calls f with the problem of every pair of lengths, two query heads on one key/value head, causal and not; or one of the two, in turn.
/// In turn, and in emulation where it is not causal, the longest pair, which takes half of the time, is cut on one side.
template <class F>
void for_all_lengths(const Combination& combination, bool in_turn, F&& f) {
    const auto [dtype, head_dim, schedule] = combination;
    bool turn = schedule == simt::Schedule::lowest_first;
    for (const auto& [queries, keys] : kLengths) {
        turn = !turn;
        for (const bool causal : {false, true}) {
            int seq = queries, kv_seq = keys;
            if (emulating && (in_turn || !causal) && std::min(seq, kv_seq) == 257) (turn ? seq : kv_seq) = 129;
            if (!in_turn || causal == turn)
                f(Problem{.batch = 1,
                          .heads = 2,
                          .kv_heads = 1,
                          .seq = seq,
                          .kv_seq = kv_seq,
                          .head_dim = head_dim,
                          .dtype = dtype,
                          .causal = causal});
        }
    }
}

/// In emulation types differ in their conversions alone, and schedules in the order of warps: but for a stage's first type under the first
/// schedule, a pair of lengths is causal or not, and not both.
inline bool in_turn(const Combination& combination, const std::vector<DType>& types) {
    const auto& [dtype, head_dim, schedule] = combination;
    return emulating && (dtype != types.front() || schedule != simt::Schedule::round_robin);
}

/// For one of combinations(). In emulation the stage before is compared with in the first type under the first schedule alone: with the
/// others it is tested by itself, and two results that are right agree.
inline void check_all_lengths(const Tested& tested, const Stage* previous, const Combination& combination) {
    const bool some = in_turn(combination, tested.types);
    for_all_lengths(combination, some, [&](const Problem& problem) {
        TestCase test(problem, 1, Distribution::normal, tested.device);
        test.options.schedule = std::get<2>(combination);
        const Run run = expect_right(tested.stage, tested.variant, test);
        if (previous && !some) expect_agreement(expect_right(*previous, previous->variants.back(), test), run);
    });
}

/// Cases that stand apart: batches, both layouts, GQA and MQA, large logits, a given scale, outliers. In emulation, where types differ in
/// their conversions alone, those of addresses and of the scale's sign are for the first type only. Calls f(problem, seed, distribution).
template <class F>
void for_special_cases(const std::vector<DType>& types, F&& f) {
    const Problem base{.batch = 2, .heads = 4, .kv_heads = 2, .seq = 70, .kv_seq = 90, .head_dim = 64};
    for (const DType dtype : types) {
        const auto check = [&](const Problem& p) { f(p, 1, Distribution::normal); };
        const auto check_once = [&](const Problem& p) {
            if (!emulating || dtype == types.front()) check(p);
        };
        Problem p = base;
        p.dtype = dtype;
        check(p);
        p.layout = Layout::bnhd;
        p.causal = true;
        check_once(p);
        p.kv_heads = 1;
        check_once(p);
        p.kv_heads = 4;
        p.softmax_scale = 4.0f;  // logits of N(0, 32^2): almost all weight on one key, and rows far below zero
        check(p);
        p.softmax_scale = -1.0f;
        check_once(p);
        p.softmax_scale = 0.0f;  // the mean of V; dQ and dK are zero
        check_once(p);
        p.softmax_scale.reset();
        f(p, 2, Distribution::outliers);
    }
}

inline void check_special_cases(const Tested& tested) {
    for_special_cases(tested.types, [&](Problem p, std::uint64_t seed, Distribution dist) {
        p.seq = std::min(p.seq, tested.most_queries);
        expect_right(tested.stage, tested.variant, TestCase(p, seed, dist, tested.device));
    });
}

/// A problem that a seed stands for: how full the last blocks are, the first visible key, the heads that share, the scale, the layout,
/// all at random. On a GPU it is larger.
struct RandomProblem {
    Problem problem;
    int sms;  ///< tiles may depend on it
    simt::Schedule schedule;

    /// @param head_dims of which the first is taken most often
    /// @param emulated_keys the most of them in emulation
    RandomProblem(const std::vector<DType>& types, const std::vector<int>& head_dims, int seed, int emulated_keys = 140) {
        constexpr int longest = emulating ? 140 : 3000;
        std::mt19937_64 random(static_cast<std::uint64_t>(seed));  // its numbers are the same everywhere
        const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1)); };
        Problem& p = problem;
        p.batch = pick(1, 2);
        p.kv_heads = pick(1, 2);
        p.heads = p.kv_heads * pick(1, 3);
        p.seq = pick(1, pick(0, 3) ? longest : 16);  // few queries, or few keys, now and then
        p.kv_seq = pick(1, pick(0, 3) ? emulating ? emulated_keys : longest : 16);
        p.head_dim = head_dims[static_cast<std::size_t>(std::max(0, pick(-2, static_cast<int>(head_dims.size()) - 1)))];
        p.dtype = types[static_cast<std::size_t>(pick(0, static_cast<int>(types.size()) - 1))];
        p.causal = pick(0, 2) > 0;
        p.layout = pick(0, 1) ? Layout::bnhd : Layout::bhnd;
        if (pick(0, 3) == 0) p.softmax_scale = static_cast<float>(pick(-8, 8)) / 16;
        sms = pick(0, 2) ? 132 : 1;
        schedule = emulating ? static_cast<simt::Schedule>(pick(0, 2)) : simt::Schedule::round_robin;
    }
    std::string describe(int seed) const {
        return "seed " + std::to_string(seed) + ": " + workbook::describe(problem) + ", " + std::to_string(sms) + " SMs";
    }
};

/// The problems of the seeds from `first` to `last`; on a GPU a sample of the rows is compared. Stops at the first failure.
/// @param emulated_keys enough of them to go round the kernel's ring
inline void check_random_problems(const Tested& tested, const std::vector<int>& head_dims, int first, int last, int emulated_keys = 140) {
    for (int seed = first; seed <= last && !testing::Test::HasFailure(); ++seed) {
        const RandomProblem random(tested.types, head_dims, seed, emulated_keys);
        SCOPED_TRACE(random.describe(seed));
        Device device = tested.device;
        device.sms = random.sms;
        TestCase test(random.problem, static_cast<std::uint64_t>(seed), Distribution::normal, device,
                      emulating ? std::vector<long long>{} : sample_rows(random.problem, 128));
        test.options.schedule = random.schedule;
        expect_right(tested.stage, tested.variant, test);
    }
}

/// Rows that see nothing: O = 0 and LSE = -infinity, not NaN.
inline void check_rows_that_see_nothing(const Tested& tested) {
    const int d = tested.head_dim;
    const Problem p{
        .batch = 1, .heads = 2, .kv_heads = 2, .seq = 100, .kv_seq = 30, .head_dim = d, .dtype = tested.types[0], .causal = true};
    const TestCase test(p, 1, Distribution::normal, tested.device);
    const Run run = expect_right(tested.stage, tested.variant, test);
    ASSERT_EQ(run.result.lse.size(), 200u);
    for (int i = 0; i < 70; ++i) {
        EXPECT_EQ(run.result.lse[i], -INFINITY) << "row " << i;
        for (int c = 0; c < d; ++c) EXPECT_EQ(run.result.o[i * d + c], 0.0f) << "row " << i << ", column " << c;
    }
    EXPECT_TRUE(std::isfinite(run.result.lse[70]));
}

/// All logits of every row far below zero: a maximum that starts at 0 instead of -infinity would lose them.
inline void check_very_negative_logits(const Tested& tested) {
    const Problem p{.batch = 1,
                    .heads = 1,
                    .kv_heads = 1,
                    .seq = std::min(40, tested.most_queries),
                    .kv_seq = 50,
                    .head_dim = tested.head_dim,
                    .dtype = tested.types[0]};
    TestCase test(p, 1, Distribution::normal, tested.device);
    Inputs& in = test.setup.inputs;
    for (float& x : in.q_host) x = 30.0f + x;
    for (float& x : in.k_host) x = -30.0f + x;
    test.inputs_changed();
    EXPECT_LT(test.setup.want.lse[0], -1000);
    expect_right(tested.stage, tested.variant, test);
}

/// The maximum of each row grows, or falls, along the keys by a given power of two in P for every 64 of them: an online softmax that
/// rescales at each new maximum, at some of them only, or never has work of each kind to do. Also where all logits are far below zero.
inline void check_growing_maxima(const Tested& tested) {
    for (const auto& [bits, below_zero] :
         {std::pair{0.5f, false}, {3.0f, false}, {20.0f, false}, {20.0f, true}, {-3.0f, false}, {-20.0f, false}}) {
        SCOPED_TRACE("maxima growing by a factor of 2^" + std::to_string(bits) + " in 64 keys" + (below_zero ? ", below zero" : ""));
        const Problem p{.batch = 1,
                        .heads = 2,
                        .kv_heads = 1,
                        .seq = std::min(70, tested.most_queries),
                        .kv_seq = 330,
                        .head_dim = tested.head_dim,
                        .dtype = tested.types[0]};
        TestCase test(p, 1, Distribution::normal, tested.device);
        Inputs& in = test.setup.inputs;
        const float slope = bits * 0.693147f / 64 / std::sqrt(static_cast<float>(p.head_dim));  // of K, where Q is about 1
        for (float& x : in.q_host) x = 1.0f + 0.1f * x;
        for (std::size_t e = 0; e < in.k_host.size(); ++e)
            in.k_host[e] = 0.1f * in.k_host[e] + slope * static_cast<float>(e / static_cast<std::size_t>(p.head_dim));
        if (below_zero) {  // by one element of each row of Q and of K: the others are what they were
            const auto row = static_cast<std::size_t>(p.head_dim);
            for (std::size_t e = 0; e < in.q_host.size(); e += row) in.q_host[e] = 64.0f;
            for (std::size_t e = 0; e < in.k_host.size(); e += row) in.k_host[e] = -64.0f;
        }
        test.inputs_changed();
        expect_right(tested.stage, tested.variant, test);
    }
}

/// Rows and heads with gaps between them, as slices of a larger tensor have: only what belongs to O is written.
inline void check_strides_with_gaps(const Tested& tested) {
    const Problem p{.batch = 2,
                    .heads = 2,
                    .kv_heads = 1,
                    .seq = std::min(33, tested.most_queries),
                    .kv_seq = 47,
                    .head_dim = tested.head_dim,
                    .dtype = tested.types[0]};
    const TestCase packed(p, 1, Distribution::normal, tested.device);
    const Run want = expect_right(tested.stage, tested.variant, packed);

    const long long gap = tested.stride_multiple, q_row = p.head_dim + 3 * gap, kv_row = p.head_dim + 5 * gap;
    const Strides q_strides = {2 * (33 * q_row + gap) + 7 * gap, 33 * q_row + gap, q_row},
                  kv_strides = {47 * kv_row + 9 * gap, 47 * kv_row, kv_row};
    const auto spread = [&](const std::vector<float>& from, int heads, int rows, const Strides& s) {
        std::vector<float> to(static_cast<std::size_t>(s[0]) * p.batch, NAN);
        std::size_t e = 0;
        for (int b = 0; b < p.batch; ++b)
            for (int h = 0; h < heads; ++h)
                for (int i = 0; i < rows; ++i)
                    for (int c = 0; c < p.head_dim; ++c) to[static_cast<std::size_t>(b * s[0] + h * s[1] + i * s[2] + c)] = from[e++];
        return to;
    };
    const auto upload = [&](std::vector<float> values) {
        DeviceBuffer buffer(values.size() * size_of(p.dtype));
        upload_rounded(buffer, p.dtype, values);
        return buffer;
    };
    const Inputs& in = packed.setup.inputs;
    const DeviceBuffer q = upload(spread(in.q_host, p.heads, p.seq, q_strides)),
                       k = upload(spread(in.k_host, p.kv_heads, p.kv_seq, kv_strides)),
                       v = upload(spread(in.v_host, p.kv_heads, p.kv_seq, kv_strides));
    constexpr float kBlank = 776.0f;  // a number that every type has
    const std::vector<float> blank(static_cast<std::size_t>(q_strides[0]) * p.batch, kBlank);
    DeviceBuffer o = upload(blank), lse(static_cast<std::size_t>(p.rows()) * sizeof(float));
    Workspace workspace;
    Forward args{p,
                 {q.data(), q_strides},
                 {k.data(), kv_strides},
                 {v.data(), kv_strides},
                 {o.data(), q_strides},
                 static_cast<float*>(lse.data()),
                 tested.device,
                 {},
                 workspace};
    run_forward(tested.variant, args);
    synchronize(nullptr);

    HostTensor got_tensor{p.dtype, {static_cast<long long>(blank.size())}, std::vector<std::byte>(o.size())};
    o.download(got_tensor.bytes.data(), o.size());
    const std::vector<float> got = got_tensor.to_float();
    const std::vector<float> expected = spread(want.result.o, p.heads, p.seq, q_strides);
    for (std::size_t e = 0; e < got.size(); ++e) ASSERT_EQ(got[e], std::isnan(expected[e]) ? kBlank : expected[e]) << "at offset " << e;
}

/// The message of the exception that a run ends with; empty when it ends well.
inline std::string refusal(const Tested& tested, const Problem& problem, const Device& device = Device::current()) {
    DeviceBuffer memory(1 << 20);
    auto* const base = static_cast<float*>(memory.data());
    Workspace workspace;
    Forward args{problem,
                 {base, problem.q_strides()},
                 {base + (1 << 16), problem.kv_strides()},
                 {base + (1 << 17), problem.kv_strides()},
                 {base + 3 * (1 << 16), problem.q_strides()},
                 base + 4 * (1 << 16) - 4096,
                 device,
                 {},
                 workspace};
    try {
        run_forward(tested.variant, args);
        synchronize(nullptr);
    } catch (const Refused& error) {
        return error.what();
    }
    return "";
}

/// The message that a run is refused with where tensor `which` of Q, K, V and O (0 to 3; (1, 1, `rows`, 64) in f16) lies `byte_offset`
/// bytes into its memory and has these strides; empty where it is accepted.
inline std::string refused_memory(const Variant& variant, int which, std::size_t byte_offset, const Strides& strides, int rows = 16) {
    const Problem p{.seq = rows, .kv_seq = rows, .head_dim = 64, .dtype = DType::f16};
    DeviceBuffer buffers[5];
    TensorRef refs[4];
    for (int t = 0; t < 4; ++t) {
        buffers[t] = DeviceBuffer(1 << 16);
        refs[t] = {buffers[t].data(), p.q_strides()};
    }
    refs[which] = {static_cast<char*>(refs[which].data) + byte_offset, strides};
    buffers[4] = DeviceBuffer(16 * sizeof(float));
    Workspace workspace;
    Forward args{p, refs[0], refs[1], refs[2], refs[3], static_cast<float*>(buffers[4].data()), Device::current(), {}, workspace};
    try {
        run_forward(variant, args);
        synchronize(nullptr);
    } catch (const Refused& error) {
        return error.what();
    }
    return "";
}

// ---- backward passes ----

/// A backward variant of a stage, and what of the problems below it takes.
struct TestedBackward {
    const Stage& stage;
    const BackwardVariant& variant;
    std::vector<DType> types = {DType::f32, DType::bf16};
    int head_dim = 32;        ///< the smallest
    int stride_multiple = 1;  ///< of the strides that it takes, in elements
    Device device = Device::current();

    TestedBackward(const Stage& the_stage, const BackwardVariant& the_variant) : stage(the_stage), variant(the_variant) {}
};

/// A TestCase with dO and the gradients in float64.
struct BackwardTestCase : TestCase {
    BackwardSetup backward;

    /// @param rows,kv_rows of O and dQ, and of dK and dV, to compare; empty: all
    explicit BackwardTestCase(const Problem& problem, std::uint64_t seed = 1, Distribution dist = Distribution::normal,
                              const Device& device = Device::current(), const std::vector<long long>& rows = {},
                              const std::vector<long long>& kv_rows = {})
        : TestCase(problem, seed, dist, device, rows) {
        backward.d_o = output_gradient(problem, options, nullptr);
        backward.kv_rows = kv_rows;
        if (kv_rows.empty()) make_references();  // else made by the run, from its O and LSE
    }
    /// To be called again after the inputs were changed.
    void make_references() {
        const Inputs& in = setup.inputs;
        TestCase::make_references({});
        const BackwardInputs inputs{in.q_host, in.k_host, in.v_host, backward.d_o.d_o_host};
        backward.want = reference_backward(in.problem, inputs);
        backward.plain = plain_low_precision_backward(in.problem, inputs);
    }
};

/// Runs forward and backward and expects both to be right, and memory and traffic to be as predicted.
inline BackwardRun expect_right(const Stage& stage, const BackwardVariant& variant, BackwardTestCase& test) {
    SCOPED_TRACE(variant.id + ": " + describe(test.setup.inputs.problem) + ", schedule " + name(test.options.schedule));
    BackwardRun run;
    try {
        run = run_variant(stage, variant, test.setup, test.backward);
    } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
        return run;
    }
    EXPECT_EQ(run.report.status, "ok") << run.report.reason;
    expect_predicted(run.report);
    return run;
}

/// Two right gradients differ by no more than their two allowances.
inline void expect_agreement(const BackwardRun& previous, const BackwardRun& now) {
    if (!previous.report.gradients || !now.report.gradients) return;  // has failed already
    const auto agree = [&](const char* name, const std::vector<float>& a, const std::vector<float>& b, const GradientErrors& of_a,
                           const GradientErrors& of_b) {
        const Errors difference = compare(std::vector<double>(a.begin(), a.end()), b);
        EXPECT_TRUE(difference.clean()) << name << ": " << previous.report.label() << " against " << now.report.label();
        EXPECT_LE(difference.max_abs, of_a.allowed + of_b.allowed) << name;
    };
    const GradientVerdict &a = *previous.report.gradients, &b = *now.report.gradients;
    agree("dQ", previous.result.dq, now.result.dq, a.dq, b.dq);
    agree("dK", previous.result.dk, now.result.dk, a.dk, b.dk);
    agree("dV", previous.result.dv, now.result.dv, a.dv, b.dv);
}

/// @param previous another variant of the stage, to be compared with; may be null
inline void check_all_backward_lengths(const TestedBackward& tested, const BackwardVariant* previous, const Combination& combination) {
    const simt::Schedule schedule = std::get<2>(combination);
    for_all_lengths(combination, in_turn(combination, tested.types), [&](const Problem& problem) {
        BackwardTestCase test(problem, 1, Distribution::normal, tested.device);
        test.options.schedule = schedule;
        const BackwardRun run = expect_right(tested.stage, tested.variant, test);
        if (previous) expect_agreement(expect_right(tested.stage, *previous, test), run);
    });
}

/// As check_random_problems().
inline void check_random_backward_problems(const TestedBackward& tested, const std::vector<int>& head_dims, int first, int last) {
    for (int seed = first; seed <= last && !testing::Test::HasFailure(); ++seed) {
        const RandomProblem random(tested.types, head_dims, seed);
        const Problem& p = random.problem;
        SCOPED_TRACE(random.describe(seed));
        Device device = tested.device;
        device.sms = random.sms;
        const std::vector<long long> all;
        BackwardTestCase test(p, static_cast<std::uint64_t>(seed), Distribution::normal, device, emulating ? all : sample_rows(p, 64),
                              emulating ? all : sample_kv_rows(p, 32));
        test.options.schedule = random.schedule;
        expect_right(tested.stage, tested.variant, test);
    }
}

inline void check_backward_special_cases(const TestedBackward& tested) {
    for_special_cases(tested.types, [&](const Problem& p, std::uint64_t seed, Distribution dist) {
        BackwardTestCase test(p, seed, dist, tested.device);
        expect_right(tested.stage, tested.variant, test);
    });
}

/// Rows that see nothing: dQ = 0, and nothing of them in dK and dV, which are numbers.
inline void check_backward_rows_that_see_nothing(const TestedBackward& tested) {
    const int d = tested.head_dim;
    const Problem p{
        .batch = 1, .heads = 2, .kv_heads = 2, .seq = 100, .kv_seq = 30, .head_dim = d, .dtype = tested.types[0], .causal = true};
    BackwardTestCase test(p, 1, Distribution::normal, tested.device);
    const BackwardRun run = expect_right(tested.stage, tested.variant, test);
    ASSERT_EQ(run.result.dq.size(), 200u * d);
    for (int i = 0; i < 70; ++i)
        for (int c = 0; c < d; ++c) EXPECT_EQ(run.result.dq[i * d + c], 0.0f) << "row " << i << ", column " << c;
    float* const gradients = test.backward.d_o.d_o_host.data();
    for (int i = 0; i < 70 * d; ++i) gradients[i] *= 100;  // of rows 0 to 69 of head 0
    upload_rounded(test.backward.d_o.d_o, p.dtype, test.backward.d_o.d_o_host);
    const BackwardRun other = expect_right(tested.stage, tested.variant, test);
    const Errors difference = compare_runs(run.result, other.result);
    EXPECT_TRUE(difference.clean());
    EXPECT_LE(difference.max_abs, 1e-4);
}

/// All logits far below zero, and LSE with them.
inline void check_backward_very_negative_logits(const TestedBackward& tested) {
    const Problem p{.batch = 1, .heads = 1, .kv_heads = 1, .seq = 40, .kv_seq = 50, .head_dim = tested.head_dim, .dtype = tested.types[0]};
    BackwardTestCase test(p, 1, Distribution::normal, tested.device);
    Inputs& in = test.setup.inputs;
    for (float& x : in.q_host) x = 30.0f + x;
    for (float& x : in.k_host) x = -30.0f + x;
    upload_rounded(in);
    test.make_references();
    EXPECT_LT(test.setup.want.lse[0], -1000);
    expect_right(tested.stage, tested.variant, test);
}

/// Tensors whose rows and heads have gaps between them: only what belongs to the gradients is written.
inline void check_backward_strides_with_gaps(const TestedBackward& tested) {
    const Problem p{.batch = 2, .heads = 2, .kv_heads = 1, .seq = 33, .kv_seq = 47, .head_dim = tested.head_dim, .dtype = tested.types[0]};
    BackwardTestCase packed(p, 1, Distribution::normal, tested.device);
    const BackwardRun want = expect_right(tested.stage, tested.variant, packed);

    const long long gap = tested.stride_multiple, q_row = p.head_dim + 3 * gap, kv_row = p.head_dim + 5 * gap;
    const Strides q_strides = {2 * (33 * q_row + gap) + 7 * gap, 33 * q_row + gap, q_row},
                  kv_strides = {47 * kv_row + 9 * gap, 47 * kv_row, kv_row};
    constexpr float kBlank = 776.0f;  // a number that every type has
    const auto place = [&](const Strides& s, std::size_t element, int heads, int rows) {
        const auto e = static_cast<long long>(element) / p.head_dim;
        return static_cast<std::size_t>(e / rows / heads * s[0] + e / rows % heads * s[1] + e % rows * s[2]) + element % p.head_dim;
    };
    const auto spread = [&](const std::vector<float>& from, int heads, int rows, const Strides& s) {
        std::vector<float> to(static_cast<std::size_t>(s[0]) * p.batch, NAN);
        for (std::size_t e = 0; e < from.size(); ++e) to[place(s, e, heads, rows)] = from[e];
        return to;
    };
    const auto upload = [&](std::vector<float> values) {
        DeviceBuffer buffer(values.size() * size_of(p.dtype));
        upload_rounded(buffer, p.dtype, values);
        return buffer;
    };
    const Inputs& in = packed.setup.inputs;
    const DeviceBuffer q = upload(spread(in.q_host, p.heads, p.seq, q_strides)),
                       k = upload(spread(in.k_host, p.kv_heads, p.kv_seq, kv_strides)),
                       v = upload(spread(in.v_host, p.kv_heads, p.kv_seq, kv_strides)),
                       d_o = upload(spread(packed.backward.d_o.d_o_host, p.heads, p.seq, q_strides));
    const std::vector<float> blank_q(static_cast<std::size_t>(q_strides[0]) * p.batch, kBlank),
        blank_kv(static_cast<std::size_t>(kv_strides[0]) * p.batch, kBlank);
    const DeviceBuffer o = upload(blank_q), dq = upload(blank_q), dk = upload(blank_kv), dv = upload(blank_kv);
    DeviceBuffer lse(static_cast<std::size_t>(p.rows()) * sizeof(float));
    Workspace workspace;
    Forward forward{p,
                    {q.data(), q_strides},
                    {k.data(), kv_strides},
                    {v.data(), kv_strides},
                    {o.data(), q_strides},
                    static_cast<float*>(lse.data()),
                    tested.device,
                    {},
                    workspace};
    run_forward(tested.variant, forward);
    Backward backward{p,
                      {q.data(), q_strides},
                      {k.data(), kv_strides},
                      {v.data(), kv_strides},
                      {o.data(), q_strides},
                      {d_o.data(), q_strides},
                      static_cast<const float*>(lse.data()),
                      {dq.data(), q_strides},
                      {dk.data(), kv_strides},
                      {dv.data(), kv_strides},
                      tested.device,
                      {},
                      workspace};
    run_backward(tested.variant, backward);
    synchronize(nullptr);

    const auto expect_same = [&](const char* name, const DeviceBuffer& buffer, const std::vector<float>& wanted, int heads, int rows,
                                 const Strides& s) {
        const std::size_t count = static_cast<std::size_t>(s[0]) * p.batch;
        HostTensor tensor{p.dtype, {static_cast<long long>(count)}, std::vector<std::byte>(count * size_of(p.dtype))};
        buffer.download(tensor.bytes.data(), tensor.bytes.size());
        std::vector<float> got = tensor.to_float();
        double worst = 0, size = 0;
        for (std::size_t e = 0; e < wanted.size(); ++e) {
            float& x = got[place(s, e, heads, rows)];
            worst = std::max(worst, static_cast<double>(std::abs(x - wanted[e])));
            size = std::max(size, static_cast<double>(std::abs(wanted[e])));
            x = kBlank;
        }
        EXPECT_LE(worst, 1e-2 * size) << name;  // atomics add in any order, and the last bit of a 16-bit type may differ
        EXPECT_EQ(std::count(got.begin(), got.end(), kBlank), static_cast<long long>(got.size())) << name << " was written in a gap";
    };
    expect_same("dQ", dq, want.result.dq, p.heads, p.seq, q_strides);
    expect_same("dK", dk, want.result.dk, p.kv_heads, p.kv_seq, kv_strides);
    expect_same("dV", dv, want.result.dv, p.kv_heads, p.kv_seq, kv_strides);
}

}  // namespace workbook
