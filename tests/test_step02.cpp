#include "02_online_softmax/stage.hpp"

#include "stage_suite.hpp"

namespace {

using namespace workbook;

class Step02 : public testing::TestWithParam<Combination> {};

TEST_P(Step02, AgreesOverAllLengths) { check_all_lengths(step02::stage(), previous_stage(), GetParam()); }
INSTANTIATE_TEST_SUITE_P(Combinations, Step02, testing::ValuesIn(combinations({32, 64, 128})), combination_name);

TEST(Step02, SpecialCases) { check_special_cases(step02::stage()); }
TEST(Step02, RowsThatSeeNothing) { check_rows_that_see_nothing(step02::stage()); }
TEST(Step02, VeryNegativeLogits) { check_very_negative_logits(step02::stage()); }
TEST(Step02, GrowingMaxima) { check_growing_maxima(step02::stage()); }
TEST(Step02, StridesWithGaps) { check_strides_with_gaps(step02::stage()); }

TEST(Step02, AnyHeadDimensionUpTo256) {
    for (const int d : {1, 7, 33, 80, 96, 129, 200, 256})
        for (const DType dtype : {DType::f32, DType::f16})
            expect_right(step02::stage(), step02::stage().variants[0],
                         TestCase({.heads = 1, .kv_heads = 1, .seq = 19, .kv_seq = 37, .head_dim = d, .dtype = dtype}));
}

}  // namespace
