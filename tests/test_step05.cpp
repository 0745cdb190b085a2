#include "05_recompute_backward/stage.hpp"

#include "run_program.hpp"
#include "stage_suite.hpp"

#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iostream>
#include <sstream>
#include <tuple>

namespace {

using namespace workbook;

const BackwardVariant& variant(const std::string& id) {
    for (const BackwardVariant& v : step05::stage().backward)
        if (v.id == id) return v;
    throw std::logic_error("stage 05 has no variant " + id);
}

const std::vector<DType> kTensorTypes = {DType::f16, DType::bf16};

/// 05c has shapes for few blocks of keys, and for as many as there are SMs.
TestedBackward tested(const std::string& id, int sms = 132) {
    TestedBackward t(step05::stage(), variant(id));
    if (id == "05c") {
        t.types = kTensorTypes;
        t.head_dim = 64;
        t.stride_multiple = 8;  // 16 bytes
        t.device.sms = sms;
    }
    return t;
}

const std::vector<std::string> kFp32Ids = {"05a", "05b", "05b-det"}, kIds = {"05a", "05b", "05b-det", "05c"};

BackwardRun expect_right(const std::string& id, BackwardTestCase& test) {
    return workbook::expect_right(step05::stage(), variant(id), test);
}

// ---- agreement with float64, and of the variants with 05a ----

class Step05a : public testing::TestWithParam<Combination> {};
class Step05b : public testing::TestWithParam<Combination> {};
class Step05bDet : public testing::TestWithParam<Combination> {};

/// Whether a combination is compared with the variant before as well: at one d, and on one schedule, since the others differ in the tested
/// variant alone. All are compared with float64.
bool compared(const Combination& combination) {
    return std::get<1>(combination) == 64 && std::get<2>(combination) == simt::Schedule::round_robin;
}

// One d of those that d / 16 lanes have, with every type and schedule; StandardTakesAnyHeadDimension has the others.
TEST_P(Step05a, AgreesOverAllLengths) { check_all_backward_lengths(tested("05a"), nullptr, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step05a, testing::ValuesIn(combinations({64})), combination_name);

TEST_P(Step05b, AgreesOverAllLengths) {
    check_all_backward_lengths(tested("05b"), compared(GetParam()) ? &variant("05a") : nullptr, GetParam());
}
INSTANTIATE_TEST_SUITE_P(Combinations, Step05b, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

TEST_P(Step05bDet, AgreesOverAllLengths) { check_all_backward_lengths(tested("05b-det"), nullptr, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step05bDet, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

// Few SMs: the large tiles of d = 128.
class Step05c : public testing::TestWithParam<Combination> {};
class Step05cLargeTiles : public testing::TestWithParam<Combination> {};

TEST_P(Step05c, AgreesOverAllLengths) {
    check_all_backward_lengths(tested("05c"), compared(GetParam()) ? &variant("05b") : nullptr, GetParam());
}
INSTANTIATE_TEST_SUITE_P(Combinations, Step05c, testing::ValuesIn(combinations({64, 128}, kTensorTypes)), combination_name);

TEST_P(Step05cLargeTiles, AgreesOverAllLengths) { check_all_backward_lengths(tested("05c", 1), nullptr, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step05cLargeTiles, testing::ValuesIn(combinations({128}, kTensorTypes)), combination_name);

TEST(Step05, SpecialCases) {
    for (const std::string& id : kIds) check_backward_special_cases(tested(id));
}
TEST(Step05, RowsThatSeeNothing) {
    for (const std::string& id : kIds) check_backward_rows_that_see_nothing(tested(id));
}
TEST(Step05, VeryNegativeLogits) {
    for (const std::string& id : kIds) check_backward_very_negative_logits(tested(id));
}
TEST(Step05, StridesWithGaps) {
    for (const std::string& id : kIds) check_backward_strides_with_gaps(tested(id));
}

// Rows whose scores all lie far below zero: exp(-LSE) of what lies past the end would overflow.
TEST(Step05, FewKeysWithALargeScale) {
    for (const std::string& id : kIds) {
        BackwardTestCase test({.seq = 200, .kv_seq = 2, .head_dim = 64, .dtype = tested(id).types[0], .softmax_scale = 16.0f});
        ASSERT_LT(*std::min_element(test.setup.want.lse.begin(), test.setup.want.lse.end()), -90);
        expect_right(id, test);
    }
}

TEST(Step05, StandardTakesAnyHeadDimension) {
    for (const int d : {1, 40, 100, 256}) {
        BackwardTestCase test({.heads = 2, .kv_heads = 1, .seq = 35, .kv_seq = 70, .head_dim = d, .causal = true});
        expect_right("05a", test);
    }
}

// 200 seeds of 05c, 60 of 05b, and 20 of 05a, which has no tiles, in parts that run side by side.
class Step05Random : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(Step05Random, AgreesOverSeeds) {
    const auto& [id, first] = GetParam();
    check_random_backward_problems(tested(id), id == "05c" ? std::vector<int>{64, 128} : std::vector<int>{32, 64, 128}, first, first + 19);
}
INSTANTIATE_TEST_SUITE_P(Standard, Step05Random, testing::Combine(testing::Values("05a"), testing::Values(1)),
                         [](const auto& info) { return "part" + std::to_string(info.index); });
INSTANTIATE_TEST_SUITE_P(Fp32, Step05Random, testing::Combine(testing::Values("05b", "05b-det"), testing::Range(1, 61, 20)),
                         [](const auto& info) { return "part" + std::to_string(info.index); });
INSTANTIATE_TEST_SUITE_P(TensorCore, Step05Random, testing::Combine(testing::Values("05c"), testing::Range(1, 201, 20)),
                         [](const auto& info) { return "part" + std::to_string(info.index); });

// ---- O and LSE from elsewhere ----

TEST(Step05, TakesTheForwardPassOfAnotherStage) {
    if (!previous_stage()) GTEST_SKIP() << "stage 04 is not built";
    for (const DType dtype : {DType::f32, DType::bf16}) {
        BackwardTestCase test(
            {.batch = 2, .heads = 4, .kv_heads = 2, .seq = 70, .kv_seq = 90, .head_dim = 64, .dtype = dtype, .causal = true});
        for (const Variant& forward : previous_stage()->variants) {
            if (forward.refuses(test.setup.inputs.problem, test.setup.device)) continue;
            const workbook::Run before = workbook::expect_right(*previous_stage(), forward, test);
            test.backward.forward = Previous{before.report.label(), before.result, std::nullopt, ""};
            for (const char* id : {"05b", "05b-det", "05c"})
                if (!variant(id).refuses(test.setup.inputs.problem, test.setup.device)) expect_right(id, test);
        }
    }
}

TEST(Step05, StandardNeedsItsOwnForwardPass) {
    BackwardTestCase test({.seq = 20, .kv_seq = 20, .head_dim = 32});
    test.backward.forward = Previous{"04a q_parallel", {}, std::nullopt, ""};
    EXPECT_THROW(run_variant(step05::stage(), variant("05a"), test.setup, test.backward), Refused);
}

// What a sample of rows takes from the forward pass must not make the reference another one.
TEST(Step05, SampledRowsGiveTheSameReference) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        const Problem p{.heads = 4, .kv_heads = 2, .seq = 70, .kv_seq = 90, .head_dim = 32, .dtype = dtype, .causal = true};
        BackwardTestCase all(p), some(p);
        const BackwardRun run = expect_right("05b", all);
        some.backward.kv_rows = sample_kv_rows(p, 20);
        some.backward.want.reset();
        some.backward.plain.reset();
        expect_right("05b", some);
        ASSERT_EQ(some.backward.want->kv_rows.size(), 20u);
        const double tolerance = run.report.gradients->dk.allowed;
        for (std::size_t r = 0; r < 20; ++r)
            for (int c = 0; c < p.head_dim; ++c) {
                const auto at = static_cast<std::size_t>(some.backward.want->kv_rows[r]) * p.head_dim + c;
                EXPECT_NEAR(some.backward.want->dk[r * p.head_dim + c], all.backward.want->dk[at], tolerance);
                EXPECT_NEAR(some.backward.want->dv[r * p.head_dim + c], all.backward.want->dv[at], tolerance);
            }
        EXPECT_EQ(some.backward.want->dq, all.backward.want->dq);
    }
}

// ---- repeated runs ----

// A second run on the same workspace: whatever the first left in the accumulator must be gone.
TEST(Step05, RunsAgain) {
    const Problem p{.heads = 2, .kv_heads = 1, .seq = 70, .kv_seq = 150, .head_dim = 64};
    BackwardTestCase test(p);
    const Inputs& in = test.setup.inputs;
    for (const std::string& id : kFp32Ids) {
        const BackwardRun want = expect_right(id, test);
        const ForwardOutputs outputs(p);
        Gradients gradients(p);
        Workspace workspace;
        Forward forward = forward_args(in, outputs, test.setup.device, {}, workspace);
        run_forward(variant(id), forward);
        Backward backward = backward_args(forward, test.backward.d_o, gradients);
        for (int n = 0; n < 10; ++n) {
            gradients.poison();
            run_backward(variant(id), backward);
            synchronize(nullptr);
            const GradientResult got = fetch_gradients(p, gradients);
            const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
                return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
            };
            EXPECT_TRUE(same(got.dk, want.result.dk) && same(got.dv, want.result.dv)) << id << ", run " << n;
            if (id != "05b") {
                EXPECT_TRUE(same(got.dq, want.result.dq)) << id << " is to give the same bits each time; run " << n;
            } else {
                EXPECT_LE(compare_runs(want.result, got).rel_rms, 1e-6) << "run " << n;  // additions in another order
            }
        }
    }
}

// ---- the program ----

class Step05Program : public testing::Test {
protected:
    void SetUp() override {
        folder_ = std::filesystem::temp_directory_path() /
                  ("workbook_step05_" + std::to_string(getpid()) + "_" + testing::UnitTest::GetInstance()->current_test_info()->name());
        std::filesystem::create_directories(folder_);
    }
    void TearDown() override { std::filesystem::remove_all(folder_); }
    std::string file(const std::string& name) const { return (folder_ / name).string(); }

    static Outcome run(const std::vector<std::string>& words, const Stage& stage = step05::stage()) {
        std::vector<std::string> all = {"--heads", "2", "--kv-heads", "1", "--seq", "40", "--kv-seq", "50", "--head-dim", "32"};
        all.insert(all.end(), words.begin(), words.end());
        return run_program(stage, all);
    }
    void expect_rejected(const std::vector<std::string>& words, const std::string& message) {
        const Outcome o = run(words);
        EXPECT_EQ(o.status, 2) << o.out;
        EXPECT_TRUE(contains(o.err, message)) << o.err;
    }
    /// A copy of a file with one thing changed.
    std::string changed(const std::string& from, const std::function<void(TensorFile&)>& change) const {
        TensorFile f = read_safetensors(from);
        change(f);
        const std::string to = file("changed.safetensors");
        write_safetensors(to, f);
        return to;
    }

    std::filesystem::path folder_;
};

TEST_F(Step05Program, RunsAllVariantsAndComparesThem) {
    const Outcome o = run({"--causal"});
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    for (const char* part : {"05a standard", "05b recompute", "05b-det deterministic", "dO: normal, seed 0", "saved MiB", "of 05a"})
        EXPECT_TRUE(contains(o.out, part)) << part << "\n" << o.out;
    EXPECT_FALSE(contains(o.out, "!=")) << o.out;
}

TEST_F(Step05Program, JsonSaysWhatIsOfTheBackwardPass) {
    const Outcome o = run({"--variant", "05b", "--json"});
    ASSERT_EQ(o.status, 0) << o.err;
    const auto j = nlohmann::json::parse(o.out);
    EXPECT_EQ(j["direction"], "bwd");
    EXPECT_EQ(j["status"], "ok");
    EXPECT_EQ(j["flops"], backward_flops({.heads = 2, .kv_heads = 1, .seq = 40, .kv_seq = 50, .head_dim = 32}));
    EXPECT_EQ(j["calculated_flops"], j["flops"]);
    EXPECT_EQ(j["saved_memory"], 2 * 40 * 4);
    for (const char* of : {"dq", "dk", "dv"}) EXPECT_GT(j[of]["allowed"], j[of]["max_abs"]) << of;
}

TEST_F(Step05Program, SampledRowsAreChecked) {
    const Outcome o = run({"--check-rows", "16", "--json", "--variant", "05b-det"});
    ASSERT_EQ(o.status, 0) << o.out << o.err;
    EXPECT_EQ(nlohmann::json::parse(o.out)["checked_rows"], 16);
}

TEST_F(Step05Program, ResultsGoToAFileAndAreComparedWith) {
    for (const char* layout : {"bhnd", "bnhd"}) {
        ASSERT_EQ(run({"--variant", "05a", "--output", file("a"), "--quiet"}).status, 0);
        const TensorFile f = read_safetensors(file("a"));
        EXPECT_EQ(f.tensors.at("dq").shape, (std::vector<long long>{1, 2, 40, 32}));
        EXPECT_EQ(f.tensors.at("dk").shape, (std::vector<long long>{1, 1, 50, 32}));
        EXPECT_EQ(f.tensors.at("dv").shape, (std::vector<long long>{1, 1, 50, 32}));
        EXPECT_EQ(f.metadata.at("backward_variant"), "05a standard");
        const Outcome o = run({"--variant", "05b", "--against", file("a"), "--layout", layout, "--json"});
        ASSERT_EQ(o.status, 0) << o.err;
        const auto j = nlohmann::json::parse(o.out);
        EXPECT_EQ(j["previous"], "05a standard");
        EXPECT_LT(j["previous_rel_rms"], 1e-5);
    }
    expect_rejected({"--causal", "--against", file("a")}, "is the result of another problem");
    expect_rejected({"--against", changed(file("a"), [](TensorFile& f) { f.metadata["d_o"] = "normal, seed 9"; })},
                    "holds gradients of another dO: it has 'normal, seed 9'");
    expect_rejected({"--against", changed(file("a"), [](TensorFile& f) { f.tensors["dk"] = f.tensors["dq"]; })},
                    "dk is f32 (1, 2, 40, 32); f32 (1, 1, 50, 32) is needed");
}

TEST_F(Step05Program, TakesOAndLseFromAFile) {
    if (!previous_stage()) GTEST_SKIP() << "stage 04 is not built";
    ASSERT_EQ(run({"--output", file("forward"), "--quiet", "--variant", "04b"}, *previous_stage()).status, 0);
    const std::string forward = file("forward");
    const Outcome o = run({"--forward", forward});
    EXPECT_EQ(o.status, 0) << o.out << o.err;  // 05a was not asked for
    EXPECT_TRUE(contains(o.err, "05a standard: takes O and LSE from 04b causal")) << o.err;
    EXPECT_TRUE(contains(o.out, "O and LSE: 04b causal (" + forward + ")")) << o.out;
    EXPECT_TRUE(contains(o.out, "05b recompute")) << o.out;
    EXPECT_EQ(run({"--forward", forward, "--variant", "05a"}).status, 3);

    expect_rejected({"--forward", forward, "--causal"}, "is the result of another problem");
    expect_rejected({"--forward", file("none")}, "none");
    expect_rejected({"--forward", changed(forward,
                                          [](TensorFile& f) {
                                              f.tensors["lse"].shape = {1, 40, 2};
                                          })},
                    "lse is f32 (1, 40, 2); f32 (1, 2, 40) is needed");
    expect_rejected(
        {"--forward", changed(forward,
                              [](TensorFile& f) {
                                  f.tensors["lse"] = HostTensor::from_float(DType::f16, {1, 2, 40}, f.tensors["lse"].to_float());
                              })},
        "lse is f16");
    const auto in_log2 = [](TensorFile& f) {
        std::vector<float> lse = f.tensors["lse"].to_float();
        for (float& x : lse) x *= 1.44269504f;
        f.tensors["lse"] = HostTensor::from_float(DType::f32, {1, 2, 40}, lse);
    };
    expect_rejected({"--forward", changed(forward, in_log2)},
                    "its o and lse are not those of these inputs: LSE: 80 of 80 elements are off");
    ASSERT_EQ(run({"--output", file("gradients"), "--quiet", "--variant", "05b"}).status, 0);
    expect_rejected({"--forward", file("gradients")}, "holds gradients and no o and lse");
}

TEST_F(Step05Program, TakesDOFromTheInputFile) {
    TensorFile f;
    const auto tensor = [](std::vector<long long> shape, float step) {
        std::vector<float> values(static_cast<std::size_t>(shape[1] * shape[2] * shape[3]));
        for (std::size_t e = 0; e < values.size(); ++e) values[e] = std::sin(step * static_cast<float>(e % 9973));
        return HostTensor::from_float(DType::f32, shape, values);
    };
    f.tensors["q"] = tensor({1, 2, 20, 32}, 0.7f);
    f.tensors["k"] = f.tensors["v"] = tensor({1, 1, 30, 32}, 1.1f);
    f.tensors["d_o"] = tensor({1, 2, 20, 32}, 0.3f);
    write_safetensors(file("in"), f);
    const Outcome o = run_program(step05::stage(), {"--input", file("in"), "--layout", "bnhd"});
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    EXPECT_TRUE(contains(o.out, "dO: d_o of ")) << o.out;
    f.tensors["d_o"] = f.tensors["k"];
    write_safetensors(file("in"), f);
    const Outcome wrong = run_program(step05::stage(), {"--input", file("in")});
    EXPECT_EQ(wrong.status, 2);
    EXPECT_TRUE(contains(wrong.err, "tensor d_o is f32 (1, 1, 30, 32); f32 (1, 2, 20, 32), as q, is accepted")) << wrong.err;
}

TEST_F(Step05Program, ListsAndRefuses) {
    const Outcome list = run_program(step05::stage(), {"--list"});
    EXPECT_EQ(list.status, 0);
    EXPECT_TRUE(contains(list.out, "05b  recompute (backward)")) << list.out;
    const Outcome o = run_program(step05::stage(), {"--seq", "20", "--head-dim", "80", "--variant", "recompute"});
    EXPECT_EQ(o.status, 3);
    EXPECT_TRUE(contains(o.err, "05b recompute: head_dim = 80: 32, 64 and 128 are accepted; variant 05a takes any up to 256")) << o.err;
    expect_rejected({"--variant", "05z"}, "05a or standard, 05b or recompute, 05b-det or deterministic, 05c or tensor_core is accepted");
}

// ---- memory, traffic, refusals ----

TEST(Step05, SavesRowsInsteadOfSquares) {
    Problem p{.heads = 1, .kv_heads = 1, .seq = 4096, .kv_seq = 4096, .head_dim = 128, .dtype = DType::bf16};
    const Device device = Device::current();
    EXPECT_EQ(variant("05a").saved_bytes(p, device), 4096u * 4096 * 2 + 4096 * 4);
    EXPECT_EQ(variant("05b").saved_bytes(p, device), 4096u * 4);
    p.seq = p.kv_seq = 8192;
    EXPECT_EQ(variant("05b").saved_bytes(p, device), 2 * 4096u * 4);
}

TEST(Step05, CausalSkipsAboutHalf) {
    Problem p{.heads = 1, .kv_heads = 1, .seq = 4096, .kv_seq = 4096, .head_dim = 64};
    const auto q_reads = [&] { return variant("05b").movement(p, Device::current()).requested.tensors.at(0).read; };
    const long long all = q_reads();
    p.causal = true;
    EXPECT_EQ(q_reads() * 64 * 2, all * 65);  // 64 blocks of 64: 64 * 65 / 2 visits instead of 64 * 64
}

TEST(Step05, RefusesOtherHeadDimensions) {
    for (const char* id : {"05b", "05b-det"}) {
        const auto why = variant(id).refuses({.seq = 16, .kv_seq = 16, .head_dim = 80}, Device::current());
        ASSERT_TRUE(why.has_value());
        EXPECT_NE(why->find("head_dim = 80: 32, 64 and 128 are accepted"), std::string::npos) << *why;
    }
}

TEST(Step05, TensorCoresRefuseWhatTheyCannotDo) {
    const auto why = [](Problem p, const Device& device = Device::current()) { return variant("05c").refuses(p, device).value_or(""); };
    EXPECT_NE(why({.seq = 16, .kv_seq = 16, .head_dim = 64}).find("dtype = f32: tensor cores multiply f16 and bf16"), std::string::npos);
    Problem p{.seq = 16, .kv_seq = 16, .head_dim = 256, .dtype = DType::f16};
    EXPECT_NE(why(p).find("head_dim = 256: 64 and 128 are accepted (the sums of dK and dV"), std::string::npos) << why(p);
    p.head_dim = 32;
    EXPECT_NE(why(p).find("head_dim = 32: 64 and 128 are accepted; variant 05a"), std::string::npos) << why(p);
    Device device = Device::current();
    device.shared_memory_per_block = 99 * 1024;
    p.head_dim = 64;
    EXPECT_EQ(why(p, device), "");
    p.head_dim = 128;
    EXPECT_NE(why(p, device).find("101376 bytes of shared memory: the tiles take"), std::string::npos) << why(p, device);
}

// At d = 128 blocks of 64 keys where blocks of 128 are too few, do not fit, or have a short walk. Results do not depend on it.
TEST(Step05, SmallGridsGetSmallerTiles) {
    Problem p{.heads = 2, .kv_heads = 1, .seq = 200, .kv_seq = 190, .head_dim = 128, .dtype = DType::f16};
    const auto reads_of_q = [&](int sms, std::size_t memory = 227 * 1024) {
        Device device = Device::current();
        device.sms = sms;
        device.shared_memory_per_block = memory;
        return variant("05c").movement(p, device).requested.tensors.at(0).read;
    };
    EXPECT_EQ(reads_of_q(132), 3 * p.q_elements() * 2);  // blocks of 64 keys
    EXPECT_EQ(reads_of_q(2), 2 * p.q_elements() * 2);    // blocks of 128
    EXPECT_EQ(reads_of_q(2, 150 * 1024), reads_of_q(132));
    BackwardTestCase few(p, 1, Distribution::normal, tested("05c", 132).device), many(p, 1, Distribution::normal, tested("05c", 1).device);
    expect_agreement(expect_right("05c", few), expect_right("05c", many));
    p.causal = true;
    EXPECT_EQ(reads_of_q(2), reads_of_q(132));
}

// The swizzle's purpose: nobody waits for a bank. dS, and P where two warps share the keys, are written once a turn, dK and dV once;
// LSE and D are read in pairs, and half a warp takes a wavefront for each.
TEST(Step05, NoBankConflicts) {
    if (!emulating) GTEST_SKIP() << "the emulator counts them";
    for (const int d : {64, 128})
        for (const int sms : {1, 132}) {
            BackwardTestCase test({.heads = 2, .kv_heads = 1, .seq = 150, .kv_seq = 170, .head_dim = d, .dtype = DType::bf16}, 1,
                                  Distribution::normal, tested("05c", sms).device);
            const BackwardRun run = expect_right("05c", test);
            const auto& shared = run.report.shared;
            ASSERT_EQ(shared.size(), 4u);
            for (const char* access : {"ldmatrix", "vector loads", "vector stores", "cp.async"})
                EXPECT_EQ(shared.at(access).wavefronts, shared.at(access).ideal) << access << ", d = " << d << ", " << sms << " SMs";
            const int Br = 64, Bc = d == 64 || sms == 1 ? 128 : 64, sharing = d / 64, blocks = (170 + Bc - 1) / Bc;
            const int turns = blocks * 2 * 3, row_bytes = 2 * d;  // 2 heads of 3 blocks of queries
            const int gradients = 2 * blocks * Bc * row_bytes / 128;
            const int pairs = turns * (Bc / 32 * sharing) * (Br / sharing / 8);  // of LSE and D, by all warps
            EXPECT_EQ(shared.at("vector stores").ideal, static_cast<unsigned>(turns * sharing * Bc * Br * 2 / 128 + gradients));
            EXPECT_EQ(shared.at("vector loads").ideal, static_cast<unsigned>(2 * 2 * pairs + gradients));
        }
}

TEST(Step05, RefusesTooLittleSharedMemory) {
    Device device = Device::current();
    device.shared_memory_per_block = 99 * 1024;  // an RTX 4090
    for (const int d : {32, 64, 128}) EXPECT_FALSE(variant("05b").refuses({.head_dim = d}, device)) << d;
    device.shared_memory_per_block = 48 * 1024;
    const auto why = variant("05b").refuses({.head_dim = 128}, device);
    ASSERT_TRUE(why.has_value());
    EXPECT_NE(why->find("49152 bytes of shared memory: the tiles take 70272"), std::string::npos) << *why;
}

}  // namespace
