// The backward variants of stage 06.
#include "06_hopper/stage.hpp"

#include "stage_suite.hpp"

#include <cstring>

namespace {

using namespace workbook;

const std::vector<std::string> kIds = {"06e", "06e-det"};
const std::vector<DType> kTypes = {DType::f16, DType::bf16};

const BackwardVariant& variant(const Stage& stage, const std::string& id) {
    for (const BackwardVariant& v : stage.backward)
        if (v.id == id) return v;
    throw std::logic_error("stage " + stage.id + " has no variant " + id);
}
const BackwardVariant& variant(const std::string& id) { return variant(step06::stage(), id); }

/// On a GPU that the stage refuses there is nothing to test but the refusal.
bool can_run() { return Device::current().compute_capability / 10 == 9; }
#define SKIP_WITHOUT_HOPPER() \
    if (!can_run()) GTEST_SKIP() << Device::current().name << " is no Hopper GPU"

TestedBackward tested(const std::string& id) {
    TestedBackward t(step06::stage(), variant(id));
    t.types = kTypes;
    t.head_dim = 64;
    t.stride_multiple = 8;  // 16 bytes
    return t;
}

BackwardRun expect_right(const std::string& id, BackwardTestCase& test) {
    return workbook::expect_right(step06::stage(), variant(id), test);
}

// ---- agreement with float64 and with the stage before ----

class Step06e : public testing::TestWithParam<Combination> {};
class Step06eDet : public testing::TestWithParam<Combination> {};

TEST_P(Step06e, AgreesOverAllLengths) {
    SKIP_WITHOUT_HOPPER();
    check_all_backward_lengths(tested("06e"), nullptr, GetParam());
}
TEST_P(Step06eDet, AgreesOverAllLengths) {
    SKIP_WITHOUT_HOPPER();
    check_all_backward_lengths(tested("06e-det"), nullptr, GetParam());
}
/// In emulation, where a wgmma takes long, not every type with every head dimension.
std::vector<Combination> all_combinations() {
    if (!emulating) return combinations({64, 128, 256}, kTypes);
    std::vector<Combination> all = combinations({64}, kTypes);
    all.emplace_back(DType::bf16, 128, simt::Schedule::round_robin);
    all.emplace_back(DType::f16, 128, simt::Schedule::highest_first);
    all.emplace_back(DType::bf16, 256, simt::Schedule::lowest_first);
    return all;
}
std::vector<Combination> ordered_combinations() {
    if (!emulating) return combinations({64, 128, 256}, kTypes);
    return {{DType::bf16, 64, simt::Schedule::lowest_first}, {DType::f16, 128, simt::Schedule::highest_first}};
}
INSTANTIATE_TEST_SUITE_P(Combinations, Step06e, testing::ValuesIn(all_combinations()), combination_name);
INSTANTIATE_TEST_SUITE_P(Combinations, Step06eDet, testing::ValuesIn(ordered_combinations()), combination_name);

TEST(Step06Backward, SpecialCases) {
    SKIP_WITHOUT_HOPPER();
    check_backward_special_cases(tested("06e"));
    if (!emulating) check_backward_special_cases(tested("06e-det"));
}
TEST(Step06Backward, RowsThatSeeNothing) {
    SKIP_WITHOUT_HOPPER();
    for (const std::string& id : kIds) check_backward_rows_that_see_nothing(tested(id));
}
TEST(Step06Backward, VeryNegativeLogits) {
    SKIP_WITHOUT_HOPPER();
    for (const std::string& id : kIds) check_backward_very_negative_logits(tested(id));
}
TEST(Step06Backward, StridesWithGaps) {
    SKIP_WITHOUT_HOPPER();
    for (const std::string& id : kIds) check_backward_strides_with_gaps(tested(id));
}
TEST(Step06Backward, RandomProblems) {
    SKIP_WITHOUT_HOPPER();
    check_random_backward_problems(tested("06e"), {64, 128, 256}, 1, emulating ? 24 : 100);
    check_random_backward_problems(tested("06e-det"), {64, 128, 256}, 101, emulating ? 108 : 150);
}

// Every ring goes round several times, and blocks of keys begin, and end, anywhere in a block of queries.
TEST(Step06Backward, ManyTurns) {
    SKIP_WITHOUT_HOPPER();
    int schedule = 0;
    for (const int d : {64, 128, 256})
        for (const bool causal : {false, true}) {
            BackwardTestCase test(
                {.heads = 2, .kv_heads = 1, .seq = 230, .kv_seq = 250, .head_dim = d, .dtype = DType::bf16, .causal = causal});
            test.options.schedule = static_cast<simt::Schedule>(schedule++ % 3);
            for (const std::string& id : kIds) expect_right(id, test);
        }
}

TEST(Step06Backward, AgreesWithStage05) {
    SKIP_WITHOUT_HOPPER();
#ifdef WORKBOOK_BACKWARD_BEFORE
    const Stage& before = WORKBOOK_BACKWARD_BEFORE::stage();
    for (const auto& [d, causal] : {std::pair{64, true}, {128, false}}) {
        BackwardTestCase test(
            {.heads = 2, .kv_heads = 1, .seq = 150, .kv_seq = 170, .head_dim = d, .dtype = DType::bf16, .causal = causal});
        const BackwardRun previous = workbook::expect_right(before, variant(before, "05c"), test);
        for (const std::string& id : kIds) expect_agreement(previous, expect_right(id, test));
    }
#else
    GTEST_SKIP() << "stage 05 is not built";
#endif
}

TEST(Step06Backward, TakesTheForwardPassOfAnotherStage) {
    SKIP_WITHOUT_HOPPER();
    if (!previous_stage()) GTEST_SKIP() << "stage 04 is not built";
    BackwardTestCase test(
        {.batch = 2, .heads = 4, .kv_heads = 2, .seq = 70, .kv_seq = 90, .head_dim = 64, .dtype = DType::bf16, .causal = true});
    const workbook::Run before = workbook::expect_right(*previous_stage(), previous_stage()->variants.back(), test);
    test.backward.forward = Previous{before.report.label(), before.result, std::nullopt, ""};
    for (const std::string& id : kIds) expect_right(id, test);
}

// ---- inputs that a wrong bound of the softmax would not survive ----

/// Changes Q and K of a problem, rounds them to its type, and expects the gradients to be right.
template <class F>
void check_changed_inputs(const Problem& problem, F&& change) {
    BackwardTestCase test(problem);
    Inputs& in = test.setup.inputs;
    change(in.q_host, in.k_host);
    upload_rounded(in);
    test.make_references();
    for (const std::string& id : kIds) expect_right(id, test);
}
Problem ragged(int d) { return {.heads = 2, .kv_heads = 1, .seq = 100, .kv_seq = 150, .head_dim = d, .dtype = DType::f16}; }

// Rows whose scores all lie far below zero: 2^-LSE of what lies past the end would overflow.
TEST(Step06Backward, FewKeysWithALargeScale) {
    SKIP_WITHOUT_HOPPER();
    for (const int kv_seq : {2, 66, 130})
        for (const std::string& id : kIds) {
            BackwardTestCase test({.seq = 200, .kv_seq = kv_seq, .head_dim = 64, .dtype = DType::f16, .softmax_scale = 16.0f});
            const double lowest = *std::min_element(test.setup.want.lse.begin(), test.setup.want.lse.end());
            EXPECT_TRUE(kv_seq > 2 || lowest < -90) << lowest;
            expect_right(id, test);
        }
}

TEST(Step06Backward, OneHugeScore) {
    SKIP_WITHOUT_HOPPER();
    for (const int d : {64, 128, 256})
        check_changed_inputs(ragged(d), [&](std::vector<float>& q, std::vector<float>& k) {
            for (int c = 0; c < d; ++c) q[static_cast<std::size_t>(70 * d + c)] = 12.0f, k[static_cast<std::size_t>(131 * d + c)] = 12.0f;
        });
}

TEST(Step06Backward, AllScoresEqual) {
    SKIP_WITHOUT_HOPPER();
    for (const int d : {64, 128, 256})
        check_changed_inputs(ragged(d), [&](std::vector<float>& q, std::vector<float>& k) {
            for (std::size_t e = 0; e < k.size(); ++e) k[e] = k[e % static_cast<std::size_t>(d)];
            for (std::size_t e = 0; e < q.size(); ++e) q[e] = q[e % static_cast<std::size_t>(d)];
        });
}

// ---- equal bits ----

TEST(Step06Backward, OrderedSumsHaveTheSameBits) {
    SKIP_WITHOUT_HOPPER();
    for (const bool causal : {false, true}) {
        BackwardTestCase test(
            {.heads = 2, .kv_heads = 1, .seq = 130, .kv_seq = 400, .head_dim = 128, .dtype = DType::bf16, .causal = causal});
        const BackwardRun first = expect_right("06e-det", test);
        for (const simt::Schedule schedule : {simt::Schedule::round_robin, simt::Schedule::highest_first}) {
            test.options.schedule = schedule;
            const BackwardRun second = expect_right("06e-det", test);
            const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
                return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
            };
            EXPECT_TRUE(same(first.result.dq, second.result.dq));
            EXPECT_TRUE(same(first.result.dk, second.result.dk));
            EXPECT_TRUE(same(first.result.dv, second.result.dv));
        }
    }
}

// dK and dV are sums in a fixed order, and in 06e-det and 06g dQ is, too: the same bits whatever the other blocks do.
TEST(Step06Backward, ManyLaunchesGiveTheSameBits) {
    SKIP_WITHOUT_HOPPER();
    for (const std::string id : {"06e", "06e-det", "06f", "06g"})
        for (const bool causal : {false, true}) {
            const bool cluster = id == "06f" || id == "06g";
            if (causal && cluster) continue;
            const Problem p{.heads = 4,
                            .kv_heads = 2,
                            .seq = emulating ? 150 : 500,
                            .kv_seq = emulating     ? 260
                                      : id == "06g" ? 512
                                                    : 700,
                            .head_dim = cluster ? 128 : 64,
                            .dtype = DType::bf16,
                            .causal = causal};
            const Inputs inputs = random_inputs(p, Options{});
            const OutputGradient d_o = output_gradient(p, Options{}, nullptr);
            const ForwardOutputs outputs(p);
            Gradients gradients(p);
            Workspace workspace;
            Forward forward = forward_args(inputs, outputs, Device::current(), {}, workspace);
            variant(id).forward(forward);
            Backward args = backward_args(forward, d_o, gradients);
            const auto bits = [&](int launches) {
                gradients.poison();
                for (int n = 0; n < launches; ++n) variant(id).backward(args);
                synchronize(nullptr);
                return fetch_gradients(p, gradients);
            };
            const GradientResult first = bits(1);
            for (int round = 0; round < (emulating ? 1 : cluster ? 100 : 50); ++round) {
                const GradientResult now = bits(emulating ? 1 : 100);
                ASSERT_EQ(now.dk, first.dk) << id << ", round " << round;
                ASSERT_EQ(now.dv, first.dv) << id << ", round " << round;
                if (id == "06e-det" || id == "06g") {
                    ASSERT_EQ(now.dq, first.dq) << id << ", round " << round;
                }
            }
        }
}

// ---- 06f and 06g: 128 columns, no mask ----

class Step06f : public testing::TestWithParam<Combination> {};
class Step06g : public testing::TestWithParam<Combination> {};

void check_lengths(const std::string& id, const Combination& combination, const std::vector<std::pair<int, int>>& lengths) {
    const auto [dtype, d, schedule] = combination;
    for (const auto& [seq, kv_seq] : lengths) {
        BackwardTestCase test({.heads = 2, .kv_heads = seq % 2 ? 1 : 2, .seq = seq, .kv_seq = kv_seq, .head_dim = d, .dtype = dtype});
        test.options.schedule = schedule;
        expect_right(id, test);
    }
}

/// Keys of one block, of both and of a third; queries of less and more than a block; heads that share keys; any number of turns.
TEST_P(Step06f, AgreesOverLengths) {
    SKIP_WITHOUT_HOPPER();
    if (emulating) return check_lengths("06f", GetParam(), {{1, 300}, {250, 65}, {81, 256}});
    check_lengths("06f", GetParam(), {{1, 1}, {80, 128}, {81, 129}, {64, 2}, {159, 257}, {400, 385}, {1000, 64}, {33, 1000}, {640, 512}});
}
/// Keys of one pair of blocks and of two, with and without empty ones; the queries of a turn, less and more.
TEST_P(Step06g, AgreesOverLengths) {
    SKIP_WITHOUT_HOPPER();
    if (emulating) return check_lengths("06g", GetParam(), {{1, 300}, {150, 65}, {65, 256}});
    check_lengths("06g", GetParam(), {{1, 1}, {64, 128}, {65, 129}, {33, 256}, {159, 257}, {400, 385}, {1000, 64}, {31, 511}, {640, 512}});
}
std::vector<Combination> exchange_combinations() {
    if (!emulating) return combinations({128}, kTypes);
    return {{DType::bf16, 128, simt::Schedule::round_robin},
            {DType::f16, 128, simt::Schedule::lowest_first},
            {DType::bf16, 128, simt::Schedule::highest_first}};
}
INSTANTIATE_TEST_SUITE_P(Combinations, Step06f, testing::ValuesIn(exchange_combinations()), combination_name);
INSTANTIATE_TEST_SUITE_P(Combinations, Step06g, testing::ValuesIn(exchange_combinations()), combination_name);

TEST(Step06Backward, ExchangeTakesManyTurns) {
    SKIP_WITHOUT_HOPPER();
    BackwardTestCase test({.batch = 2,
                           .heads = 4,
                           .kv_heads = 2,
                           .seq = emulating ? 170 : 3000,
                           .kv_seq = emulating ? 140 : 2500,
                           .head_dim = 128,
                           .dtype = DType::bf16});
    for (int n = 0; n < (emulating ? 1 : 5); ++n) expect_right("06f", test);
}

// A cluster goes from head to head: every ring goes round, and keys are loaded while the head before is still summed up.
TEST(Step06Backward, ReduceScatterGoesFromHeadToHead) {
    SKIP_WITHOUT_HOPPER();
    for (const int kv_seq : {140, 270, 512}) {
        if (emulating && kv_seq == 512) continue;
        BackwardTestCase test({.batch = emulating ? 1 : 40,
                               .heads = emulating ? 70 : 16,
                               .kv_heads = emulating ? 70 : 8,
                               .seq = emulating ? 70 : 300,
                               .kv_seq = kv_seq,
                               .head_dim = 128,
                               .dtype = DType::bf16});
        for (int n = 0; n < (emulating ? 1 : 5); ++n) expect_right("06g", test);
    }
}

TEST(Step06Backward, ClustersAgreeWith06e) {
    SKIP_WITHOUT_HOPPER();
    BackwardTestCase test({.heads = 2, .kv_heads = 1, .seq = 150, .kv_seq = 170, .head_dim = 128, .dtype = DType::f16});
    const BackwardRun previous = expect_right("06e", test);
    for (const std::string id : {"06f", "06g"}) expect_agreement(previous, expect_right(id, test));
}

// K of what lies past the end is zero: 2^-LSE of such a key would overflow.
TEST(Step06Backward, ClustersTakeFewKeysWithALargeScale) {
    SKIP_WITHOUT_HOPPER();
    for (const int kv_seq : {2, 130}) {
        BackwardTestCase test({.seq = 100, .kv_seq = kv_seq, .head_dim = 128, .dtype = DType::f16, .softmax_scale = 16.0f});
        for (const std::string id : {"06f", "06g"}) expect_right(id, test);
    }
}

void expect_words(const std::string& text, const std::string& words) { EXPECT_NE(text.find(words), std::string::npos) << text; }

TEST(Step06Backward, ClustersRefuse) {
    Device hopper = Device::current();
    hopper.compute_capability = 90;
    for (const std::string id : {"06f", "06g"}) {
        const auto why = [&](const Problem& p, const Device& device) { return variant(id).refuses(p, device).value_or(""); };
        Problem p{.seq = 16, .kv_seq = 512, .head_dim = 128, .dtype = DType::f16};
        EXPECT_EQ(why(p, hopper), "");
        Device device = hopper;
        device.shared_memory_per_block = 200 * 1024;
        expect_words(why(p, device), "204800 bytes of shared memory: the tiles take ");
        device = hopper;
        device.compute_capability = 100;
        expect_words(why(p, device), "wgmma is an instruction of 9.0 alone");
        p.causal = true;
        expect_words(why(p, hopper), "causal = true: ");
        p = {.seq = 16, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16};
        expect_words(why(p, hopper), "head_dim = 64: 128 is accepted; variant 06e takes 64 and 256");
        p = {.seq = 16, .kv_seq = 16, .head_dim = 128};
        expect_words(why(p, hopper), "dtype = f32: tensor cores multiply f16 and bf16");
    }
    const Problem p{.seq = 16, .kv_seq = 513, .head_dim = 128, .dtype = DType::f16};
    expect_words(variant("06g").refuses(p, hopper).value_or(""), "kv_seq = 513: 1 to 512 are accepted");
}

// ---- traffic ----

TEST(Step06Backward, ExchangeAddsHalfAsMuch) {
    const Problem p{.heads = 1, .kv_heads = 1, .seq = 8000, .kv_seq = 8192, .head_dim = 128, .dtype = DType::bf16};
    const auto added = [&](const std::string& id) {
        for (const TensorTraffic& t : variant(id).movement(p, Device::current()).requested.tensors)
            if (t.tensor == "dQ_acc") return t.read - 8000LL * 128 * 4;  // finish() reads it once more
        return 0LL;
    };
    EXPECT_EQ(2 * added("06f"), added("06e"));
}

TEST(Step06Backward, CausalSkipsAboutHalf) {
    for (const std::string& id : kIds) {
        Problem p{.heads = 1, .kv_heads = 1, .seq = 8192, .kv_seq = 8192, .head_dim = 128, .dtype = DType::bf16};
        const auto q_reads = [&] { return variant(id).movement(p, Device::current()).requested.tensors.at(0).read; };
        const long long all = q_reads();
        p.causal = true;
        EXPECT_EQ(q_reads() * 64 * 2, all * 65);  // 64 blocks of 128 keys: 64 * 65 / 2 visits of 128 queries instead of 64 * 64
    }
}

// ---- refusals ----

TEST(Step06Backward, Refusals) {
    Device hopper = Device::current();
    hopper.compute_capability = 90;
    for (const std::string& id : kIds) {
        const auto why = [&](const Problem& p, const Device& device) { return variant(id).refuses(p, device).value_or(""); };
        Problem p{.seq = 16, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16};
        EXPECT_EQ(why(p, hopper), "");
        Device device = hopper;
        device.shared_memory_per_block = 99 * 1024;
        expect_words(why(p, device), "101376 bytes of shared memory: the tiles take ");
        device = hopper;
        device.name = "some GPU";
        device.compute_capability = 100;
        expect_words(why(p, device), "some GPU has compute capability 10.0: wgmma is an instruction of 9.0 alone");
        for (const int d : {32, 80, 192}) {
            p.head_dim = d;
            expect_words(why(p, hopper), "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted; variant 05a");
        }
        p = {.seq = 16, .kv_seq = 16, .head_dim = 64};
        expect_words(why(p, hopper), "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32");
    }
}

TEST(Step06Backward, RefusesMemoryThatTmaCannotTake) {
    SKIP_WITHOUT_HOPPER();
    const Problem p{.seq = 16, .kv_seq = 16, .head_dim = 128, .dtype = DType::f16};
    const char* const names[] = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV"};
    for (const std::string id : {"06e", "06e-det", "06f", "06g"})
        for (int which = 0; which < 8; ++which)
            for (const bool misplaced : {false, true}) {
                std::vector<DeviceBuffer> buffers;
                TensorRef refs[8];
                for (TensorRef& ref : refs) ref = {buffers.emplace_back(1 << 14).data(), p.q_strides()};
                buffers.emplace_back(16 * sizeof(float));
                if (misplaced)
                    refs[which].data = static_cast<char*>(refs[which].data) + 2;
                else
                    refs[which].strides[2] = p.head_dim + 1;
                Workspace workspace;
                Backward args{
                    p,       refs[0], refs[1], refs[2],           refs[3], refs[4],  static_cast<const float*>(buffers.back().data()),
                    refs[5], refs[6], refs[7], Device::current(), {},      workspace};
                try {
                    run_backward(variant(id), args);
                    ADD_FAILURE() << "nothing was noticed of " << names[which];
                } catch (const Refused& error) {
                    const std::string text = error.what();
                    EXPECT_NE(text.find(id + " " + variant(id).name + ": " + names[which]), std::string::npos) << text;
                    EXPECT_NE(text.find(misplaced ? "multiple of 16 bytes" : "multiples of 8 are accepted"), std::string::npos) << text;
                }
            }
}

}  // namespace
