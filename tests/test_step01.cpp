#include "01_naive/stage.hpp"

#include "stage_suite.hpp"

namespace {

using namespace workbook;

class Step01 : public testing::TestWithParam<Combination> {};

TEST_P(Step01, AgreesOverAllLengths) { check_all_lengths(step01::stage(), previous_stage(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step01, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

TEST(Step01, SpecialCases) { check_special_cases(step01::stage()); }
TEST(Step01, RowsThatSeeNothing) { check_rows_that_see_nothing(step01::stage()); }
TEST(Step01, VeryNegativeLogits) { check_very_negative_logits(step01::stage()); }
TEST(Step01, GrowingMaxima) { check_growing_maxima(step01::stage()); }
TEST(Step01, StridesWithGaps) { check_strides_with_gaps(step01::stage()); }

TEST(Step01, AnyHeadDimensionUpTo256) {
    for (const int d : {1, 7, 33, 80, 96, 129, 200, 256})
        for (const DType dtype : {DType::f32, DType::f16})
            expect_right(step01::stage(), step01::stage().variants[0],
                         TestCase({.heads = 1, .kv_heads = 1, .seq = 19, .kv_seq = 37, .head_dim = d, .dtype = dtype}));
}

}  // namespace
