#include "06_hopper/stage.hpp"

#include "stage_suite.hpp"

namespace {

using namespace workbook;

const std::vector<DType> kTypes = {DType::f16, DType::bf16};

/// On a GPU that the stage refuses there is nothing to test but the refusal.
bool can_run() { return Device::current().compute_capability / 10 == 9; }
#define SKIP_WITHOUT_HOPPER() \
    if (!can_run()) GTEST_SKIP() << Device::current().name << " is no Hopper GPU"

Tested tested(const Variant& variant) {
    Tested all(step06::stage(), variant);
    all.types = kTypes;
    all.head_dim = 64;
    all.stride_multiple = 8;  // 16 bytes
    return all;
}

std::vector<Tested> all_variants() {
    std::vector<Tested> all;
    for (const Variant& v : step06::stage().variants) all.push_back(tested(v));
    return all;
}

// ---- agreement with float64 and with the stage before ----

class Step06a : public testing::TestWithParam<Combination> {};
class Step06b : public testing::TestWithParam<Combination> {};
class Step06cLengths : public testing::TestWithParam<Combination> {};
class Step06d : public testing::TestWithParam<Combination> {};

TEST_P(Step06a, AgreesOverAllLengths) {
    SKIP_WITHOUT_HOPPER();
    check_all_lengths(tested(step06::stage().variants[0]), previous_stage(), GetParam());
}
TEST_P(Step06b, AgreesOverAllLengths) {
    SKIP_WITHOUT_HOPPER();
    check_all_lengths(tested(step06::stage().variants[1]), previous_stage(), GetParam());
}
TEST_P(Step06cLengths, AgreesOverAllLengths) {
    SKIP_WITHOUT_HOPPER();
    check_all_lengths(tested(step06::stage().variants[2]), previous_stage(), GetParam());
}
TEST_P(Step06d, AgreesOverAllLengths) {
    SKIP_WITHOUT_HOPPER();
    check_all_lengths(tested(step06::stage().variants.back()), previous_stage(), GetParam());
}
INSTANTIATE_TEST_SUITE_P(Combinations, Step06a, testing::ValuesIn(combinations({64, 128, 256}, kTypes)), combination_name);
INSTANTIATE_TEST_SUITE_P(Combinations, Step06b, testing::ValuesIn(combinations({64, 128, 256}, kTypes)), combination_name);
INSTANTIATE_TEST_SUITE_P(Combinations, Step06cLengths, testing::ValuesIn(combinations({64, 128, 256}, kTypes)), combination_name);
INSTANTIATE_TEST_SUITE_P(Combinations, Step06d, testing::ValuesIn(combinations({64, 128, 256}, kTypes)), combination_name);

TEST(Step06, SpecialCases) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) check_special_cases(t);
}
TEST(Step06, RowsThatSeeNothing) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) check_rows_that_see_nothing(t);
}
TEST(Step06, VeryNegativeLogits) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) check_very_negative_logits(t);
}
TEST(Step06, GrowingMaxima) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) check_growing_maxima(t);
}
TEST(Step06, StridesWithGaps) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) check_strides_with_gaps(t);
}

// The rings go round several times, with whole and ragged last tiles; in emulation each causal or not, in turn.
TEST(Step06, ManyTiles) {
    SKIP_WITHOUT_HOPPER();
    int schedule = 0, turn = 0;
    for (const Tested& t : all_variants())
        for (const int d : {64, 128, 256}) {
            ++turn;
            for (const int kv_seq : {640, 1000})
                for (const bool causal : {false, true}) {
                    if (emulating && causal == ((kv_seq == 640) == (turn % 2 == 0))) continue;
                    const Problem p{
                        .heads = 2, .kv_heads = 2, .seq = 170, .kv_seq = kv_seq, .head_dim = d, .dtype = DType::bf16, .causal = causal};
                    TestCase test(p);
                    test.options.schedule = static_cast<simt::Schedule>(schedule++ % 3);
                    expect_right(t.stage, t.variant, test);
                }
        }
}

TEST(Step06, RandomProblems) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) check_random_problems(t, {64, 128, 256}, 1, emulating ? 20 : 200, 600);
}

// A persistent grid: blocks that go from tile to tile, fewer tiles than blocks, tiles whose warpgroups see nothing or have no rows.
TEST(Step06c, TilesOfAPersistentGrid) {
    SKIP_WITHOUT_HOPPER();
    Tested t = tested(step06::stage().variants[2]);
    int schedule = 0;
    for (const int sms : {1, 3})
        for (const int d : {64, 128, 256})
            for (const bool causal : {false, true}) {
                const Problem p{.batch = 2,
                                .heads = 3,
                                .kv_heads = 3,
                                .seq = 330,
                                .kv_seq = 170,
                                .head_dim = d,
                                .dtype = DType::bf16,
                                .causal = causal};
                t.device.sms = sms;
                TestCase test(p, 1, Distribution::normal, t.device);
                test.options.schedule = static_cast<simt::Schedule>(schedule++ % 3);
                expect_right(t.stage, t.variant, test);
            }
}

// d = 64 has shapes of its own for them. At d = 256 no tile is divided, for O has no memory of its own.
TEST(Step06c, ManyKeys) {
    SKIP_WITHOUT_HOPPER();
    Tested t = tested(step06::stage().variants[2]);
    t.device.sms = 3;
    int schedule = 0;
    for (const auto& [d, seq, kv_seq, causal] : {std::tuple{64, 70, 8200, false}, {64, 70, 8200, true}, {256, 70, 5000, false}})
        for (const DType dtype : kTypes) {
            if (emulating && d == 256 && dtype != DType::bf16) continue;
            const Problem p{
                .batch = 1, .heads = 1, .kv_heads = 1, .seq = seq, .kv_seq = kv_seq, .head_dim = d, .dtype = dtype, .causal = causal};
            TestCase test(p, 1, Distribution::normal, t.device);
            test.options.schedule = static_cast<simt::Schedule>(schedule++ % 3);
            expect_right(t.stage, t.variant, test);
        }
}

// At d = 256 with a mask blocks form clusters, here one that goes round several times, first where its second block has no rows, and last
// over rows that see nothing.
TEST(Step06c, Clusters) {
    SKIP_WITHOUT_HOPPER();
    Tested t = tested(step06::stage().variants[2]);
    t.device.sms = 3;
    for (const DType dtype : kTypes) {
        if (emulating && dtype != DType::bf16) continue;
        const Problem p{
            .batch = 1, .heads = 1, .kv_heads = 1, .seq = 2370, .kv_seq = 2060, .head_dim = 256, .dtype = dtype, .causal = true};
        TestCase test(p, 1, Distribution::normal, t.device);
        under_every_schedule(test, [&] { expect_right(t.stage, t.variant, test); });
    }
}

// Four tiles on three SMs, or one: that of the last round is divided by its keys.
TEST(Step06, TilesOfTheLastRoundAreDivided) {
    SKIP_WITHOUT_HOPPER();
    for (const std::size_t variant : {2u, 3u}) {
        Tested t = tested(step06::stage().variants[variant]);
        t.device.sms = 3;
        for (const auto& [d, heads, seq] : {std::array{64, 4, 70}, {64, 1, 180}, {128, 1, 130}}) {
            const Problem p{.batch = 1,
                            .heads = heads,
                            .kv_heads = 1,
                            .seq = seq,
                            .kv_seq = 75 * (d == 64 ? 64 : 80) + 10,
                            .head_dim = d,
                            .dtype = heads == 1 ? DType::bf16 : DType::f16};
            const TestCase test(p, 1, Distribution::normal, t.device);
            expect_right(t.stage, t.variant, test);
            const auto moved = t.variant.movement(p, t.device).requested.tensors;
            EXPECT_TRUE(std::any_of(moved.begin(), moved.end(), [](const auto& tensor) { return tensor.tensor == "O_part"; }));
        }
    }
}

// The order of tiles does not reach the results, so that these are the same bits whatever block claims what.
TEST(Step06, ManyLaunchesGiveTheSameBits) {
    SKIP_WITHOUT_HOPPER();
    for (const Tested& t : all_variants()) {
        Problem small{
            .heads = 4, .kv_heads = 2, .seq = emulating ? 280 : 500, .kv_seq = emulating ? 200 : 700, .head_dim = 64, .dtype = DType::bf16};
        std::vector<Problem> problems{small};
        small.causal = true;
        problems.push_back(small);
        if (t.variant.id == "06c")  // two clusters
            problems.push_back(
                {.heads = 2, .kv_heads = 1, .seq = 2060, .kv_seq = 2060, .head_dim = 256, .dtype = DType::bf16, .causal = true});
        for (const Problem& p : problems) {
            Device device = t.device;
            device.sms = emulating && p.head_dim == 64 ? 2 : 5;
            const TestCase test(p, 1, Distribution::normal, device, {0});
            ForwardOutputs outputs(p);
            Workspace workspace;
            Forward args = forward_args(test.setup.inputs, outputs, device, {}, workspace);
            const auto bits = [&](int launches) {
                outputs.o.poison();
                for (int n = 0; n < launches; ++n) t.variant.forward(args);
                synchronize(nullptr);
                return fetch_result(p, outputs);
            };
            const Result first = bits(1);
            for (int round = 0; round < (emulating ? 1 : 50); ++round) {
                const Result now = bits(emulating ? 1 : 100);
                ASSERT_EQ(now.o, first.o) << t.variant.id << ", round " << round;
                ASSERT_EQ(now.lse, first.lse) << t.variant.id << ", round " << round;
            }
        }
    }
}

// ---- traffic ----

TEST(Step06, CausalSkipsAboutHalf) {
    for (const Variant& v : step06::stage().variants) {
        Problem p{.heads = 1, .kv_heads = 1, .seq = 8192, .kv_seq = 8192, .head_dim = 128, .dtype = DType::f16};
        const auto reads_of_k = [&] {  // 06d reads K once to quantise it, and then K8
            const std::vector<TensorTraffic> tensors = v.movement(p, Device::current()).requested.tensors;
            const auto is_k8 = [](const TensorTraffic& t) { return t.tensor == "K8"; };
            const auto k8 = std::find_if(tensors.begin(), tensors.end(), is_k8);
            return k8 == tensors.end() ? tensors.at(1).read : k8->read;
        };
        const long long full = reads_of_k();
        p.causal = true;
        EXPECT_NEAR(static_cast<double>(reads_of_k()) / static_cast<double>(full), 0.5, 0.03) << v.id;
    }
}

// ---- refusals ----

void expect_refused(const std::string& why, const std::string& words) { EXPECT_NE(why.find(words), std::string::npos) << why; }

TEST(Step06, Refusals) {
    Device hopper = Device::current();
    hopper.compute_capability = 90;
    for (const Tested& t : all_variants()) {
        for (const int d : {32, 80, 192})
            expect_refused(refusal(t, {.seq = 16, .kv_seq = 16, .head_dim = d, .dtype = DType::f16}, hopper),
                           "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted");
        expect_refused(refusal(t, {.seq = 16, .kv_seq = 16, .head_dim = 64}, hopper), "dtype = f32: tensor cores multiply f16 and bf16");
        const Problem p{.seq = 16, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16};
        Device device = hopper;
        device.shared_memory_per_block = 20 * 1024;
        expect_refused(refusal(t, p, device), "20480 bytes of shared memory: the tiles take ");
        for (const int capability : {80, 89, 100}) {
            device = hopper;
            device.name = "some GPU";
            device.compute_capability = capability;
            expect_refused(refusal(t, p, device), "some GPU has compute capability " + std::to_string(capability / 10) + "." +
                                                      std::to_string(capability % 10) + ": wgmma is an instruction of 9.0 alone");
        }
    }
}

TEST(Step06, RefusesMemoryThatTmaCannotTake) {
    SKIP_WITHOUT_HOPPER();
    const char* const names[] = {"Q", "K", "V", "O"};
    const Strides packed = {1024, 1024, 64};
    for (const Variant& v : step06::stage().variants)
        for (int which = 0; which < 4; ++which) {
            const auto expect_told = [&](std::size_t offset, const Strides& strides, const std::string& words) {
                const std::string why = refused_memory(v, which, offset, strides);
                expect_refused(why, v.id + " " + v.name + ": " + names[which]);
                expect_refused(why, words);
            };
            expect_told(2, packed, "starts at an address that is not a multiple of 16 bytes");
            expect_told(8, packed, "multiples of 8 are accepted");
            expect_told(0, {1024, 1024, 65}, "(1024, 1024, 65)");
            expect_told(0, {1024, 1028, 64}, "(1024, 1028, 64)");
            expect_told(0, {1030, 1024, 64}, "(1030, 1024, 64)");
            EXPECT_EQ(refused_memory(v, which, 16, {2048, 2048, 72}), "");
        }
}

}  // namespace
