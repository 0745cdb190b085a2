#include "03_shared_memory_tiling/stage.hpp"
#include "03_shared_memory_tiling/tiles.hpp"

#include "stage_suite.hpp"

namespace {

using namespace workbook;

class Step03 : public testing::TestWithParam<Combination> {};

TEST_P(Step03, AgreesOverAllLengths) { check_all_lengths(step03::stage(), previous_stage(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step03, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

TEST(Step03, SpecialCases) { check_special_cases(step03::stage()); }
TEST(Step03, RowsThatSeeNothing) { check_rows_that_see_nothing(step03::stage()); }
TEST(Step03, VeryNegativeLogits) { check_very_negative_logits(step03::stage()); }
TEST(Step03, GrowingMaxima) { check_growing_maxima(step03::stage()); }
TEST(Step03, StridesWithGaps) { check_strides_with_gaps(step03::stage()); }

TEST(Step03, RefusesOtherHeadDimensions) {
    const std::string why = refusal(step03::stage(), {.seq = 16, .kv_seq = 16, .head_dim = 80});
    EXPECT_NE(why.find("head_dim = 80: 32, 64 and 128 are accepted"), std::string::npos) << why;
}

TEST(Step03, RefusesTooLittleSharedMemory) {
    Device device = Device::current();
    device.shared_memory_per_block = 20 * 1024;
    const std::string why = refusal(step03::stage(), {.seq = 16, .kv_seq = 16, .head_dim = 128}, device);
    EXPECT_NE(why.find("20480 bytes of shared memory"), std::string::npos) << why;
}

// Algorithm 1, line 1: K, V, Q and S take a quarter of the memory each, so less memory means smaller tiles and more passes.
TEST(Step03, TilesFollowTheSharedMemory) {
    const Problem p{.heads = 1, .kv_heads = 1, .seq = 4096, .kv_seq = 4096, .head_dim = 64};
    for (const std::size_t bytes : {48u * 1024, 99u * 1024, 163u * 1024, 227u * 1024}) {
        const std::optional<Tiles> t = step03::tiles(p, bytes);
        ASSERT_TRUE(t.has_value());
        const int exact = static_cast<int>(bytes / 4 / (4 * 64));
        EXPECT_EQ(t->Bc % 16, 0);
        EXPECT_LE(t->Bc, exact);
        EXPECT_GT(t->Bc, exact - 32);
        EXPECT_EQ(t->Br, std::min(t->Bc, 64));
        EXPECT_LE(step03::shared_bytes(p, *t), bytes);
    }
}

TEST(Step03, RightWithEveryTileSize) {
    Device device = Device::current();
    for (const std::size_t kib : {16u, 24u, 48u, 99u, 163u}) {
        device.shared_memory_per_block = kib * 1024;
        for (const bool causal : {false, true})
            expect_right(step03::stage(), step03::stage().variants[0],
                         TestCase({.heads = 2, .kv_heads = 1, .seq = 150, .kv_seq = 170, .head_dim = 32, .causal = causal}, 3,
                                  Distribution::normal, device));
    }
}

// The theorem of the paper: traffic is proportional to N^2 d^2 / M, since the number of passes is, and M / 4d = Bc.
TEST(Step03, TrafficFallsWithSharedMemory) {
    const Problem p{.heads = 1, .kv_heads = 1, .seq = 8192, .kv_seq = 8192, .head_dim = 64};
    double before = 0;
    for (const std::size_t kib : {48u, 96u, 192u}) {
        const Tiles t = *step03::tiles(p, kib * 1024);
        const double product = static_cast<double>(flash1_movement(p, t).requested.total()) * t.Bc;
        if (before > 0) {
            EXPECT_NEAR(product / before, 1, 0.02) << kib << " KiB";
        }
        before = product;
    }
}

}  // namespace
