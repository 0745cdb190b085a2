#include "04_flash_attention_2/stage.hpp"

#include "stage_suite.hpp"

#include <algorithm>

namespace {

using namespace workbook;

const Variant& variant(char letter) {
    for (const Variant& v : step04::stage().variants)
        if (v.id.back() == letter) return v;
    throw std::logic_error("stage 04 has no such variant");
}

/// Few SMs, as if there were blocks enough for all of them, or many: 04c has tiles for either.
Device with_sms(int sms) {
    Device device = Device::current();
    device.sms = sms;
    return device;
}

const std::vector<DType> kTensorTypes = {DType::f16, DType::bf16};

Tested fp32_variant(char letter) { return {step04::stage(), variant(letter)}; }

Tested tensor_core(int sms = 132) {
    Tested tested(step04::stage(), variant('c'));
    tested.types = kTensorTypes;
    tested.head_dim = 64;
    tested.stride_multiple = 8;  // 16 bytes
    tested.device = with_sms(sms);
    return tested;
}

std::vector<Tested> all_variants() { return {fp32_variant('a'), fp32_variant('b'), tensor_core(), tensor_core(1)}; }

// ---- agreement with float64 and with stage 03 ----

class Step04a : public testing::TestWithParam<Combination> {};
class Step04b : public testing::TestWithParam<Combination> {};
class Step04c : public testing::TestWithParam<Combination> {};
class Step04cLargeTiles : public testing::TestWithParam<Combination> {};

TEST_P(Step04a, AgreesOverAllLengths) { check_all_lengths(fp32_variant('a'), nullptr, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step04a, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

TEST_P(Step04b, AgreesOverAllLengths) { check_all_lengths(fp32_variant('b'), previous_stage(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step04b, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

TEST_P(Step04c, AgreesOverAllLengths) {
    const int d = std::get<1>(GetParam());
    check_all_lengths(tensor_core(), d <= 128 ? previous_stage() : nullptr, GetParam());  // stage 03 ends at 128
}
INSTANTIATE_TEST_SUITE_P(Combinations, Step04c, testing::ValuesIn(combinations({64, 128, 256}, kTensorTypes)), combination_name);

// Enough blocks for every SM: the large tiles.
TEST_P(Step04cLargeTiles, AgreesOverAllLengths) { check_all_lengths(tensor_core(1), nullptr, GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step04cLargeTiles, testing::ValuesIn(combinations({64, 128, 256}, kTensorTypes)), combination_name);

TEST(Step04, SpecialCases) {
    for (const Tested& tested : all_variants()) check_special_cases(tested);
}
TEST(Step04, RowsThatSeeNothing) {
    for (const Tested& tested : all_variants()) check_rows_that_see_nothing(tested);
}
TEST(Step04, VeryNegativeLogits) {
    for (const Tested& tested : all_variants()) check_very_negative_logits(tested);
}
TEST(Step04, GrowingMaxima) {
    for (const Tested& tested : all_variants()) check_growing_maxima(tested);
}
TEST(Step04, StridesWithGaps) {
    for (const Tested& tested : all_variants()) check_strides_with_gaps(tested);
}

// 200 seeds a variant, in parts that run side by side.
class Step04Random : public testing::TestWithParam<std::tuple<char, int>> {};

TEST_P(Step04Random, AgreesOverSeeds) {
    const auto [letter, first] = GetParam();
    if (letter == 'c')
        check_random_problems(tensor_core(), {64, 128, 256}, first, first + 49);
    else
        check_random_problems(fp32_variant(letter), {32, 64, 128}, first, first + 49);
}
INSTANTIATE_TEST_SUITE_P(Seeds, Step04Random, testing::Combine(testing::Values('a', 'b', 'c'), testing::Values(1, 51, 101, 151)),
                         [](const auto& info) {
                             const int first = std::get<1>(info.param);
                             return std::string("04") + std::get<0>(info.param) + "_" + std::to_string(first) + "_to_" +
                                    std::to_string(first + 49);
                         });

// ---- tiles and traffic ----

// A problem of few blocks gets smaller tiles, so that it makes more of them; the results do not depend on it.
TEST(Step04, SmallGridsGetSmallerTiles) {
    for (const int d : {64, 128, 256})
        for (const bool causal : {false, true}) {
            const Problem p{.heads = 2, .kv_heads = 1, .seq = 200, .kv_seq = 190, .head_dim = d, .dtype = DType::f16, .causal = causal};
            const TestCase few(p, 1, Distribution::normal, with_sms(132)), many(p, 1, Distribution::normal, with_sms(4));
            const workbook::Run small = expect_right(step04::stage(), variant('c'), few),
                                large = expect_right(step04::stage(), variant('c'), many);
            expect_agreement(small, large);
            // Blocks of 64 queries read K and V about twice as often as blocks of 128.
            EXPECT_GT(small.report.predicted.requested.read(), large.report.predicted.requested.read()) << "d = " << d;
        }
    // B Hq ceil(Nq / 128) = 4 blocks: fewer than 5 SMs, as many as 4.
    const Problem p{.heads = 2, .kv_heads = 1, .seq = 200, .kv_seq = 190, .head_dim = 64, .dtype = DType::f16};
    const auto reads = [&](int sms) { return variant('c').movement(p, with_sms(sms)).requested.read(); };
    EXPECT_EQ(reads(5), reads(132));
    EXPECT_EQ(reads(4), reads(1));
    EXPECT_GT(reads(5), reads(4));
}

TEST(Step04, CausalSkipsAboutHalf) {
    Problem p{.heads = 1, .kv_heads = 1, .seq = 4096, .kv_seq = 4096, .head_dim = 64, .dtype = DType::f16};
    const auto reads_of_k = [&](char letter) { return variant(letter).movement(p, with_sms(1)).requested.tensors.at(1).read; };
    const long long a = reads_of_k('a'), b = reads_of_k('b'), c = reads_of_k('c');
    EXPECT_EQ(a, b);
    p.causal = true;
    EXPECT_EQ(reads_of_k('a'), a);
    EXPECT_NEAR(static_cast<double>(reads_of_k('b')) / static_cast<double>(b), 0.5, 0.02);
    EXPECT_NEAR(static_cast<double>(reads_of_k('c')) / static_cast<double>(c), 0.5, 0.02);
}

/// Asks of each pair of blocks whether any row sees any key.
TEST(Step04, ClosedFormsEqualBruteForce) {
    for (const int seq : {1, 63, 64, 65, 130, 300})
        for (const int kv_seq : {1, 31, 32, 33, 129, 310})
            for (const bool causal : {false, true})
                for (const auto& [Br, Bc] : {std::pair{64, 64}, {128, 64}, {64, 32}, {128, 32}, {16, 8}}) {
                    const Problem p{.batch = 3,
                                    .heads = 4,
                                    .kv_heads = 2,
                                    .seq = seq,
                                    .kv_seq = kv_seq,
                                    .head_dim = 64,
                                    .dtype = DType::bf16,
                                    .causal = causal};
                    const Tiles tiles{Br, Bc};
                    SCOPED_TRACE(describe(p) + " Br=" + std::to_string(Br) + " Bc=" + std::to_string(Bc));
                    for (const bool skip : {false, true}) {
                        long long visited = 0, q_rows = 0, kv_rows = 0;
                        for (int i0 = 0; i0 < seq; i0 += Br) {
                            bool any_key = false;
                            for (int j0 = 0; j0 < kv_seq; j0 += Bc) {
                                bool seen = !skip;
                                for (int i = i0; i < std::min(i0 + Br, seq); ++i)
                                    for (int j = j0; j < std::min(j0 + Bc, kv_seq); ++j) seen |= !causal || j <= i + kv_seq - seq;
                                if (!seen) continue;
                                any_key = true;
                                ++visited;
                                kv_rows += std::min(Bc, kv_seq - j0);
                            }
                            if (any_key) q_rows += std::min(Br, seq - i0);
                        }
                        ASSERT_EQ(visited_tiles(p, tiles, skip), visited);
                        const long long row = 3LL * 4 * 64 * 2;  // bytes of a row in all batches and heads
                        const Movement moved = q_parallel_movement(p, tiles, skip);
                        long long read = 0, written = 0;
                        for (const TensorTraffic& t : moved.requested.tensors) {
                            if (t.tensor == "Q") {
                                ASSERT_EQ(t.read, q_rows * row);
                            } else if (t.tensor == "K" || t.tensor == "V") {
                                ASSERT_EQ(t.read, kv_rows * row);
                            } else if (t.tensor == "O") {
                                ASSERT_EQ(t.written, seq * row);
                            } else {
                                ASSERT_EQ(t.tensor, "LSE");
                            }
                            read += t.read;
                            written += t.written;
                        }
                        ASSERT_EQ(read, (q_rows + 2 * kv_rows) * row);
                        ASSERT_EQ(written, seq * (row + 3 * 4 * 4));
                    }
                }
}

// The swizzle's purpose: nobody waits for a bank. O goes through shared memory once, 128 bytes a wavefront.
TEST(Step04, NoBankConflicts) {
    if (!emulating) GTEST_SKIP() << "the emulator counts them";
    for (const int d : {64, 128, 256})
        for (const int sms : {1, 132}) {
            const TestCase test({.heads = 2, .kv_heads = 1, .seq = 150, .kv_seq = 170, .head_dim = d, .dtype = DType::bf16, .causal = true},
                                1, Distribution::normal, with_sms(sms));
            const workbook::Run run = expect_right(step04::stage(), variant('c'), test);
            const auto& shared = run.report.shared;
            ASSERT_EQ(shared.size(), 4u);
            for (const char* access : {"ldmatrix", "vector loads", "vector stores", "cp.async"})
                EXPECT_EQ(shared.at(access).wavefronts, shared.at(access).ideal) << access << ", d = " << d << ", " << sms << " SMs";
            const unsigned rows = sms == 1 ? 2 * 128 : 3 * 64, row_bytes = static_cast<unsigned>(2 * d);
            EXPECT_EQ(shared.at("vector stores").ideal, 2 * rows * row_bytes / 128);
            EXPECT_EQ(shared.at("vector loads").ideal, 2 * rows * row_bytes / 128);
        }
    EXPECT_TRUE(expect_right(step04::stage(), variant('b'), TestCase({.seq = 20, .kv_seq = 20, .head_dim = 32})).report.shared.empty())
        << "04b has no vector accesses";
}

// A block of 04b takes 64 rows of Q and visits the keys up to its diagonal, and none after it.
TEST(Step04, CausalBlocksStopAtTheDiagonal) {
    if (!emulating) GTEST_SKIP() << "the emulator traces";
    TestCase test({.seq = 200, .kv_seq = 200, .head_dim = 32, .causal = true});
    test.options.trace = "not written here";
    const std::vector<simt::TracedBlock> blocks = expect_right(step04::stage(), variant('b'), test).report.trace;
    ASSERT_EQ(blocks.size(), 4u);
    for (int n = 0; n < 4; ++n) {  // the last rows first
        long long next = 0;
        for (const simt::TracedRows& rows : blocks[n].rows) {
            if (simt::tensor_name(rows.tensor) == "Q") {
                EXPECT_EQ(rows.first, 64 * (3 - n));
            }
            if (simt::tensor_name(rows.tensor) != "K") continue;
            EXPECT_EQ(rows.first, next);
            next = rows.last + 1;
        }
        EXPECT_EQ(next, std::min(64 * (4 - n), 200));
    }
}

// ---- refusals ----

void expect_refused(const std::string& why, const std::string& words) { EXPECT_NE(why.find(words), std::string::npos) << why; }

TEST(Step04, RefusesOtherHeadDimensions) {
    for (const char letter : {'a', 'b'})
        expect_refused(refusal(fp32_variant(letter), {.seq = 16, .kv_seq = 16, .head_dim = 80}),
                       "head_dim = 80: 32, 64 and 128 are accepted");
    for (const int d : {32, 80, 192})
        expect_refused(refusal(tensor_core(), {.seq = 16, .kv_seq = 16, .head_dim = d, .dtype = DType::f16}),
                       "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted");
}

TEST(Step04, TensorCoresRefuseFloat32) {
    expect_refused(refusal(tensor_core(), {.seq = 16, .kv_seq = 16, .head_dim = 64}), "dtype = f32: tensor cores multiply f16 and bf16");
}

TEST(Step04, RefusesTooLittleSharedMemory) {
    Device device = Device::current();
    device.shared_memory_per_block = 20 * 1024;
    for (const char letter : {'a', 'b'})
        expect_refused(refusal(fp32_variant(letter), {.seq = 16, .kv_seq = 16, .head_dim = 128}, device), "20480 bytes of shared memory");
    expect_refused(refusal(tensor_core(), {.seq = 16, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16}, device),
                   "20480 bytes of shared memory: the tiles take 40960");
    // A GPU with 99 KiB takes every head dimension, 256 always with the small tiles.
    device.shared_memory_per_block = 99 * 1024;
    device.sms = 1;
    for (const int d : {64, 128, 256})
        EXPECT_EQ(refusal(tensor_core(), {.seq = 16, .kv_seq = 16, .head_dim = d, .dtype = DType::f16}, device), "");
    const Problem p{.heads = 2, .kv_heads = 2, .seq = 200, .kv_seq = 190, .head_dim = 256, .dtype = DType::f16};
    EXPECT_GT(variant('c').movement(p, device).requested.read(), variant('c').movement(p, with_sms(1)).requested.read());
}

TEST(Step04, TensorCoresRefuseUnalignedMemory) {
    const char* const names[] = {"Q", "K", "V", "O"};
    const Strides packed = {1024, 1024, 64};
    for (int which = 0; which < 4; ++which) {
        const auto expect_told = [&](std::size_t offset, const Strides& strides, const std::string& words) {
            const std::string why = refused_memory(variant('c'), which, offset, strides);
            EXPECT_NE(
                why.find(std::string("04c tensor_core: ") + names[which] + " starts at an address that is not a multiple of 16 bytes"),
                std::string::npos)
                << why;
            EXPECT_NE(why.find(words), std::string::npos) << why;
            EXPECT_EQ(refused_memory(variant('b'), which, offset, strides), "");
        };
        expect_told(2, packed, "(1024, 1024, 64)");
        expect_told(8, packed, "multiples of 8 are accepted");
        expect_told(0, {1024, 1024, 65}, "(1024, 1024, 65)");
        expect_told(0, {1024, 1028, 64}, "(1024, 1028, 64)");
        expect_told(0, {1030, 1024, 64}, "(1030, 1024, 64)");
        EXPECT_EQ(refused_memory(variant('c'), which, 16, {2048, 2048, 72}), "");
    }
}

}  // namespace
