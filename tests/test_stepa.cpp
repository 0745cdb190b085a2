#include "a_split_kv_decode/stage.hpp"

#include "a_split_kv_decode/block_table.hpp"
#include "a_split_kv_decode/splits.hpp"

#include "stage_suite.hpp"

namespace {

using namespace workbook;

const std::vector<DType> kTypes = {DType::f16, DType::bf16};

const Variant& variant(char letter) {
    for (const Variant& v : stepa::stage().variants)
        if (v.id.back() == letter) return v;
    throw std::logic_error("stage a has no such variant");
}

/// Fewer SMs make fewer splits; with one there is a single split, and nothing to merge.
Device with_sms(int sms) {
    Device device = Device::current();
    device.sms = sms;
    return device;
}

Tested tested(char letter, int sms = 132) {
    Tested all(stepa::stage(), variant(letter));
    all.types = kTypes;
    all.head_dim = 64;
    all.stride_multiple = 8;  // 16 bytes
    all.most_queries = 8;
    all.device = with_sms(sms);
    return all;
}

std::vector<Tested> all_variants() { return {tested('a'), tested('a', 1), tested('b')}; }

// ---- agreement with float64 and with stage 04 ----

/// Ragged lengths, shorter and longer than a tile (64 or 128 keys), fewer keys than queries.
const std::vector<std::pair<int, int>> kDecodeLengths = {{1, 1}, {1, 15}, {1, 64}, {1, 257}, {2, 65}, {3, 127}, {4, 513}, {8, 200}, {8, 3}};

/// Query heads, key/value heads: rows of a group from one to more than fit a tile.
const std::vector<std::pair<int, int>> kGroups = {{1, 1}, {4, 2}, {8, 1}, {17, 1}};

class StepA : public testing::TestWithParam<Combination> {};

TEST_P(StepA, AgreesOverAllLengths) {
    const auto [dtype, head_dim, schedule] = GetParam();
    int turn = 0;
    for (const auto& [seq, kv_seq] : kDecodeLengths)
        for (const bool second : {false, true})
            for (const bool causal : {false, true}) {
                const auto& [heads, kv_heads] = kGroups[static_cast<std::size_t>(turn++ / 2 + 2 * second) % kGroups.size()];
                if (causal && seq == 1) continue;  // the same as without
                const Problem p{.batch = 2,
                                .heads = heads,
                                .kv_heads = kv_heads,
                                .seq = seq,
                                .kv_seq = kv_seq,
                                .head_dim = head_dim,
                                .dtype = dtype,
                                .causal = causal,
                                .page_size = 16 << turn % 5};
                TestCase test(p, 1, Distribution::normal, with_sms(turn % 3 ? 132 : 3));
                test.options.schedule = schedule;
                const workbook::Run contiguous = expect_right(stepa::stage(), variant('a'), test),
                                    paged = expect_right(stepa::stage(), variant('b'), test);
                EXPECT_EQ(contiguous.result.o, paged.result.o);
                EXPECT_EQ(contiguous.result.lse, paged.result.lse);
                const Stage* const previous = previous_stage();
                if (previous && !in_turn(GetParam(), kTypes))
                    expect_agreement(expect_right(*previous, previous->variants.back(), test), contiguous);
            }
}
INSTANTIATE_TEST_SUITE_P(Combinations, StepA, testing::ValuesIn(combinations({64, 128}, kTypes)), combination_name);

TEST(StepA, SpecialCases) {
    for (const Tested& each : all_variants()) check_special_cases(each);
}
TEST(StepA, VeryNegativeLogits) {
    for (const Tested& each : all_variants()) check_very_negative_logits(each);
}
TEST(StepA, GrowingMaxima) {
    for (const Tested& each : all_variants()) check_growing_maxima(each);
}
TEST(StepA, StridesWithGaps) {
    for (const Tested& each : all_variants()) check_strides_with_gaps(each);
}

TEST(StepA, RowsThatSeeNothing) {
    for (const Tested& each : all_variants())
        for (const int d : {64, 128}) {
            const Problem p{.heads = 2, .kv_heads = 1, .seq = 8, .kv_seq = 3, .head_dim = d, .dtype = DType::bf16, .causal = true};
            const TestCase test(p, 1, Distribution::normal, each.device);
            const workbook::Run run = expect_right(each.stage, each.variant, test);
            for (int row = 0; row < 16; ++row) {
                const bool sees = row % 8 >= 5;
                EXPECT_EQ(std::isfinite(run.result.lse[row]), sees) << "row " << row;
                for (int c = 0; !sees && c < d; ++c) EXPECT_EQ(run.result.o[row * d + c], 0.0f) << "row " << row << ", column " << c;
            }
        }
}

/// A decoding problem that a seed stands for.
Problem random_problem(int seed) {
    std::mt19937_64 random(static_cast<std::uint64_t>(seed));
    const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1)); };
    Problem p;
    p.batch = pick(1, 3);
    p.kv_heads = pick(1, 3);
    p.heads = p.kv_heads * pick(1, pick(0, 3) ? 6 : 20);
    p.seq = pick(1, 8);
    p.kv_seq = pick(1, pick(0, 3) ? emulating ? 700 : 20000 : 20);
    p.head_dim = pick(0, 1) ? 128 : 64;
    p.dtype = pick(0, 1) ? DType::bf16 : DType::f16;
    p.causal = pick(0, 1) == 1;
    p.layout = pick(0, 1) ? Layout::bnhd : Layout::bhnd;
    p.page_size = 16 << pick(0, 4);
    if (pick(0, 3) == 0) p.softmax_scale = static_cast<float>(pick(-8, 8)) / 16;
    return p;
}

class StepARandom : public testing::TestWithParam<std::tuple<char, int>> {};

TEST_P(StepARandom, AgreesOverSeeds) {
    const auto [letter, first] = GetParam();
    for (int seed = first; seed < first + 50 && !HasFailure(); ++seed) {
        const Problem p = random_problem(seed);
        SCOPED_TRACE("seed " + std::to_string(seed));
        TestCase test(p, static_cast<std::uint64_t>(seed), Distribution::normal, with_sms(seed % 4 ? 132 : seed % 8 + 1),
                      emulating ? std::vector<long long>{} : sample_rows(p, 128));
        if (emulating) test.options.schedule = static_cast<simt::Schedule>(seed % 3);
        expect_right(stepa::stage(), variant(letter), test);
    }
}
INSTANTIATE_TEST_SUITE_P(Seeds, StepARandom, testing::Combine(testing::Values('a', 'b'), testing::Values(1, 51)), [](const auto& info) {
    return std::string(1, std::get<0>(info.param)) + "_from_" + std::to_string(std::get<1>(info.param));
});

// ---- splits ----

TEST(StepA, ChoosesSplits) {
    const auto count = [](int Nkv, long long blocks, int sms) { return stepa::choose_splits(Nkv, 64, blocks, sms).count; };
    EXPECT_EQ(count(1, 1, 132), 1);
    EXPECT_EQ(count(64, 1, 132), 1);
    EXPECT_EQ(count(65, 1, 132), 2);
    EXPECT_EQ(count(512, 8, 132), 8) << "a tile each";
    EXPECT_EQ(count(131072, 8, 132), 16) << "33, two for each SM, would save one tile of 129";
    EXPECT_EQ(count(32768, 128, 132), 1) << "128 SMs read as fast as 132";
    EXPECT_EQ(count(32768, 264, 132), 1);
    EXPECT_EQ(count(32768, 1024, 132), 1) << "almost eight for each SM";
    EXPECT_GT(count(32768, 140, 132), 1) << "one for each SM and a bit would take as long as two";
    EXPECT_EQ(count(131072, 1, 1), 1);
    EXPECT_LE(count(1 << 30, 1, 100000), stepa::kMostSplits);
}

TEST(StepA, SplitsCoverAllKeysOnce) {
    for (const int Nkv : {1, 63, 64, 65, 500, 777, 4096, 100000})
        for (const int Bc : {64, 128})
            for (const long long blocks : {1, 3, 100, 1000}) {
                const stepa::Splits splits = stepa::choose_splits(Nkv, Bc, blocks, 132);
                ASSERT_GE(splits.count, 1);
                EXPECT_EQ(splits.keys % Bc, 0);
                EXPECT_GE(static_cast<long long>(splits.count) * splits.keys, Nkv);
                EXPECT_LT(static_cast<long long>(splits.count - 1) * splits.keys, Nkv) << "the last has none";
            }
}

// However the keys are divided, O is the same; a single split needs no memory.
TEST(StepA, DivisionsAgree) {
    const Problem p{.batch = 1, .heads = 8, .kv_heads = 2, .seq = 2, .kv_seq = 1000, .head_dim = 128, .dtype = DType::bf16, .causal = true};
    const TestCase one(p, 1, Distribution::normal, with_sms(1)), some(p, 1, Distribution::normal, with_sms(4)),
        many(p, 1, Distribution::normal, with_sms(132));
    const workbook::Run single = expect_right(stepa::stage(), variant('a'), one);
    EXPECT_EQ(single.report.extra_memory, 0u);
    for (const TestCase* test : {&some, &many}) {
        const workbook::Run run = expect_right(stepa::stage(), variant('a'), *test);
        EXPECT_GT(run.report.extra_memory, 0u);
        expect_agreement(single, run);
    }
}

// ---- traffic ----

long long read_of(const Movement& moved, const std::string& tensor) {
    for (const TensorTraffic& t : moved.requested.tensors)
        if (t.tensor == tensor) return t.read;
    return 0;
}

TEST(StepA, ReadsKeysOnceForAGroup) {
    Problem p{.batch = 2, .heads = 8, .kv_heads = 1, .seq = 8, .kv_seq = 1000, .head_dim = 128, .dtype = DType::bf16};
    const long long once = p.kv_elements() * 2;
    EXPECT_EQ(read_of(variant('a').movement(p, with_sms(132)), "K"), once) << "64 rows";
    EXPECT_EQ(read_of(variant('b').movement(p, with_sms(132)), "V"), once);
    p.heads = 9;
    EXPECT_EQ(read_of(variant('a').movement(p, with_sms(132)), "K"), 2 * once) << "72 rows are two tiles";
}

TEST(StepA, NoBankConflicts) {
    if (!emulating) GTEST_SKIP() << "the emulator counts them";
    for (const int d : {64, 128})
        for (const int heads : {4, 8, 16}) {
            const TestCase test({.heads = heads, .kv_heads = 1, .seq = 4, .kv_seq = 600, .head_dim = d, .dtype = DType::bf16}, 1,
                                Distribution::normal, with_sms(2));
            const workbook::Run run = expect_right(stepa::stage(), variant('a'), test);
            ASSERT_EQ(run.report.shared.size(), 4u);
            for (const auto& [access, count] : run.report.shared)
                EXPECT_EQ(count.wavefronts, count.ideal) << access << ", d = " << d << ", " << heads << " heads";
        }
}

// ---- block tables ----

std::string refused_table(const stepa::BlockTable& table, const Problem& p) {
    try {
        stepa::check(table, p);
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "";
}

TEST(StepA, RefusesBadBlockTables) {
    const Problem p{.batch = 2, .seq = 1, .kv_seq = 100, .head_dim = 64, .dtype = DType::f16, .page_size = 16};
    const stepa::BlockTable good = stepa::shuffled_block_table(p);
    EXPECT_EQ(good.length, 7);
    EXPECT_EQ(good.pages, 14);
    EXPECT_EQ(refused_table(good, p), "");
    EXPECT_FALSE(std::is_sorted(good.pages_of.begin(), good.pages_of.end()));

    stepa::BlockTable bad = good;
    bad.pages_of[10] = 14;
    EXPECT_EQ(refused_table(bad, p), "block_table(1, 3) = 14: accepted are the pages 0 to 13");
    bad.pages_of[10] = -1;
    EXPECT_EQ(refused_table(bad, p), "block_table(1, 3) = -1: accepted are the pages 0 to 13");
    bad = good;
    bad.page_size = 32;
    EXPECT_EQ(refused_table(bad, p), "block_table: page_size = 32: accepted is that of the problem, 16");
    bad = good;
    bad.length = 6;
    EXPECT_EQ(refused_table(bad, p), "block_table has 6 pages a sequence: kv_seq = 100 takes 7 of 16 keys");
    bad = good;
    bad.pages_of.pop_back();
    EXPECT_EQ(refused_table(bad, p), "block_table has 13 entries: accepted are batch * length = 14");
}

TEST(StepA, RefusesBadPageSizes) {
    for (const int size : {0, 8, 48, 512}) {
        Problem p{.seq = 1, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16, .page_size = size};
        try {
            check(p);
            FAIL() << size;
        } catch (const InvalidArgument& error) {
            EXPECT_EQ(std::string(error.what()), "page_size = " + std::to_string(size) + ": accepted are 16, 32, 64, 128 and 256");
        }
    }
}

// ---- refusals ----

void expect_refused(const std::string& why, const std::string& words) { EXPECT_NE(why.find(words), std::string::npos) << why; }

TEST(StepA, RefusesWhatItCannotDo) {
    for (const char letter : {'a', 'b'}) {
        const Tested each = tested(letter);
        expect_refused(refusal(each, {.seq = 1, .kv_seq = 16, .head_dim = 64}), "dtype = f32: tensor cores multiply f16 and bf16");
        for (const int d : {32, 80, 256})
            expect_refused(refusal(each, {.seq = 1, .kv_seq = 16, .head_dim = d, .dtype = DType::f16}),
                           "head_dim = " + std::to_string(d) + ": 64 and 128 are accepted");
        expect_refused(refusal(each, {.seq = 9, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16}),
                       "seq = 9: 1 to 8 queries are accepted");
        Device device = Device::current();
        device.shared_memory_per_block = 48 * 1024;
        expect_refused(refusal(each, {.seq = 1, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16}, device),
                       "a block has 49152 bytes of shared memory: the ring takes 98816");
        device.shared_memory_per_block = 99 * 1024;
        for (const int heads : {1, 4, 8})
            EXPECT_EQ(refusal(each, {.heads = heads, .seq = 8, .kv_seq = 16, .head_dim = 128, .dtype = DType::f16}, device), "");
    }
}

TEST(StepA, RefusesUnalignedMemory) {
    const char* const names[] = {"Q", "K", "V", "O"};
    const Strides packed = {512, 512, 64};
    for (const auto& [letter, label] : {std::pair{'a', "Aa split_kv: "}, {'b', "Ab paged: "}})
        for (int which = 0; which < 4; ++which) {
            const auto expect_told = [&, letter = letter, label = label](std::size_t offset, const Strides& strides,
                                                                         const std::string& words) {
                const std::string why = refused_memory(variant(letter), which, offset, strides, 8);
                expect_refused(why, std::string(label) + names[which] + " starts at an address that is not a multiple of 16 bytes");
                expect_refused(why, words);
            };
            expect_told(8, packed, "multiples of 8 are accepted");
            expect_told(0, {512, 512, 65}, "(512, 512, 65)");
            expect_told(0, {516, 512, 64}, "(516, 512, 64)");
            EXPECT_EQ(refused_memory(variant(letter), which, 16, {1024, 1024, 72}, 8), "");
        }
}

}  // namespace
