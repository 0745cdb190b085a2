// The exercises, as scripts/exercises.py makes them: what is empty is refused, bugs show at one size and not at another, and a typical
// wrong answer is told in words that name it.
#include "stage/check.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <regex>
#include <string>
#include <vector>

#define SKELETON(name, exercise, variant) \
    namespace name {                      \
    const workbook::Stage& stage();       \
    }
#define EMPTIED SKELETON
#define BUG SKELETON
#define ANSWER(name, exercise) SKELETON(name, exercise, "")
#include "exercises.inc"
#undef SKELETON
#undef ANSWER

// The stages themselves.
#define STAGES(X) X(step01) X(step02) X(step03) X(step04) X(step05) X(step06)
#define DECLARE(name)               \
    namespace name {                \
    const workbook::Stage& stage(); \
    }
STAGES(DECLARE)

namespace {

using namespace workbook;

struct Made {
    enum Kind { skeleton, emptied, bug, answer } kind;
    std::string name;
    const Stage& stage;
    std::string exercise, variant;
};

const std::vector<Made>& made() {
    static const std::vector<Made> all = {
#define SKELETON(name, exercise, variant) {Made::skeleton, #name, name::stage(), exercise, variant},
#undef EMPTIED
#define EMPTIED(name, exercise, variant) {Made::emptied, #name, name::stage(), exercise, variant},
#undef BUG
#define BUG(name, exercise, variant) {Made::bug, #name, name::stage(), exercise, variant},
#define ANSWER(name, exercise) {Made::answer, #name, name::stage(), exercise, ""},
#include "exercises.inc"
    };
    return all;
}

/// Of an exercise: that of the stage with its region emptied.
std::string variant_of(const std::string& exercise) {
    for (const Made& m : made())
        if (m.kind == Made::emptied && m.exercise == exercise) return m.variant;
    return "none has the exercise " + exercise;
}

Checked check(const Stage& stage, const std::string& variant) {
    return check_variant(stage, variant, [](const Rung&) {});
}

/// Words by which a learner must be told of a bug.
const std::map<std::string, std::string> kBugs = {
    {"01.bug1", "LSE is right.*P V"},
    {"01.bug2", "For V alone, query head h reads key/value head h % Hkv"},
    {"02.bug1", "all far below zero.*starts at 0"},
    {"02.bug2", "Rows that see no key are not finite"},
    {"03.bug1", "counts \\d+ keys past the end"},
    {"03.bug2", "race in flash1: .* shared V\\(.*__syncthreads"},
    {"04.bug1", "race in tensor_core: .*__syncthreads"},
    {"04.bug2", "O is wrong"},
    {"05.bug1", "dK and dV"},
    {"05.bug2", "dQ, dK and dV are wrong"},
    {"06.bug1", "TMA load in tma_wgmma: .* while a wgmma, a store by TMA or a copy to another block has yet to read it"},
    {"06.bug2", "TMA load in pingpong: .* while a wgmma, a store by TMA or a copy to another block has yet to read it"},
};

/// Words by which a learner must be told of a wrong answer.
const std::map<std::string, std::string> kAnswers = {
    {"scale_forgotten", "scores are not scaled"},
    {"scaled_by_root_of_keys", "scaled by 1/sqrt\\(Nkv\\)"},
    {"maximum_not_subtracted", "beyond 88.*Compute exp\\(s - m\\)"},
    {"empty_row_in_softmax", "Rows that see no key are not finite.*exp\\(-inf - -inf\\)"},
    {"sum_of_one_lane", "divided by the sum over the keys of its own lane, where 32"},
    {"maximum_of_one_lane", "maximum over the keys of its own lane, where 32"},
    {"weights_not_divided", "divide each row by its sum l"},
    {"sum_overwritten", "instead of assigning"},
    {"one_tile_of_keys_missing", "LSE is right.*P V"},
    {"kv_head_modulo", "head h reads key/value head h % Hkv"},
    {"kv_head_of_query", "out of bounds: [KV]\\(\\d, [23]"},
    {"score_of_one_lane", "LSE is wrong"},
    {"mask_one_key_too_many", "one key too many"},
    {"mask_one_key_too_few", "hides the diagonal"},
    {"top_left_causal", "aligned to the top left"},
    {"no_rescale", "does not rescale the past"},
    {"rescale_of_l_only", "rescales l but not o"},
    {"minus_infinity_minus_infinity", "Rows that see no key are not finite.*exp\\(-inf - -inf\\)"},
    {"division_forgotten", "divide each row by its sum l"},
    {"division_by_zero", "Rows that see no key are not finite.*0 / 0"},
    {"lse_without_maximum", "LSE is log l: add the row's maximum"},
    {"lse_in_log2", "LSE is in base 2"},
    {"tail_not_masked", "counts \\d+ keys past the end"},
    {"mask_within_the_tile", "mask compares places within the tile"},
    {"past_sum_not_rescaled", "does not rescale the past"},
    {"past_not_rescaled", "LSE is right.*look at P V, at how o is rescaled"},
    {"rows_past_the_end", "out of bounds: O"},
    {"output_not_cleared", "out of bounds: O_acc"},
    {"fragments_swapped", "look at S = Q K\\^T \\(addresses, fragments"},
    {"swizzle_ignored", "look at S = Q K\\^T \\(addresses, fragments"},
    {"tail_block_unmasked", "counts \\d+ keys past the end"},
    {"lanes_decide_alone", "warp divergence"},
    {"maximum_of_the_first_block", "NaN|infinite"},
    {"sum_not_rescaled", "LSE is wrong.*m and l before P V"},
    {"keys_of_the_first_row", "ends before the diagonal"},
    {"loop_to_the_diagonal", "ends behind the diagonal.*the problem is not causal"},
    {"all_keys_loaded", "times the bytes expected of K.*as much as without a mask"},
    {"d_omitted", "D is left out"},
    {"d_of_the_gradient_alone", "dQ and dK are wrong"},
    {"p_not_transposed", "dV is wrong"},
    {"no_barrier_before_ds", "race in recompute: .*__syncthreads"},
    {"dq_overwritten", "dQ_acc.*assigned to it that should be added"},
    {"phase_forgotten", "more than the 1 arrivals that barrier k_full\\[0\\]"},
    {"slot_not_awaited", "more than the 1 arrivals that barrier k_full\\[0\\]"},
    {"keys_of_the_query_head", "O is wrong: every row of heads 1-3"},
    {"half_of_a_tile_announced", "barrier k_full\\[0\\].* more have landed than were announced"},
    {"values_not_awaited", "is an mbarrier_wait"},
    {"no_fence_before_wgmma", "without a wgmma_fence"},
    {"slot_never_released", "deadlock in tma_wgmma[^]*waits at barrier v_empty\\[0\\]"},
    {"output_not_rescaled", "rescales l but not o"},
    {"rescaled_under_the_product", "rescales l but not o"},
    {"fp8_not_scaled", "Elements beyond 448 were cut off: e4m3 has no larger number"},
    {"fp8_scaled_by_the_largest", "small in their block were lost.*the largest is 1, where it could be 448"},
    {"fp8_scale_inverted", "The scale is inverted"},
    {"fp8_factor_not_in_the_scale", "Elements of Q beyond 448 were cut off.*its scale does not have it"},
    {"fp8_scale_of_zeros", "a block is all zeros there is NaN"},
    {"fp8_infinity_saturated", "infinite element, or NaN, came out as a number"},
};

bool says(const std::string& told, const std::string& pattern) {
    return std::regex_search(told, std::regex(pattern, std::regex::ECMAScript | std::regex::icase));
}

TEST(Exercises, TheLaddersAreWhatTheVariantTakes) {
    for (const Rung& rung : ladder(step01::stage(), "01")) EXPECT_EQ(rung.problem.dtype, DType::f32) << rung.what;
    for (const Rung& rung : ladder(step04::stage(), "04c")) EXPECT_EQ(rung.problem.dtype, DType::f16) << rung.what;
    const auto small_memory = [](const Rung& rung) { return rung.shared_memory > 0; };
    const std::vector<Rung> of_02 = ladder(step02::stage(), "02"), of_03 = ladder(step03::stage(), "03");
    EXPECT_EQ(std::count_if(of_02.begin(), of_02.end(), small_memory), 0);
    EXPECT_EQ(std::count_if(of_03.begin(), of_03.end(), small_memory), 1);
    try {
        ladder(step04::stage(), "02");
        ADD_FAILURE() << "an unknown variant is taken";
    } catch (const InvalidArgument& error) {
        EXPECT_STREQ(error.what(), "variant '02' is unknown to stage 04; accepted: 04a 04b 04c");
    }
}

TEST(Exercises, SolutionsPass) {
    std::map<std::string, const Stage*> stages;
#define ENTER(name) stages[name::stage().id] = &name::stage();
    STAGES(ENTER)
    std::map<std::string, std::string> variants;  // to be checked, with their stage
    for (const Made& m : made())
        if (m.kind == Made::emptied) variants[m.variant] = m.exercise.substr(0, 2);
    EXPECT_GE(variants.size(), 6u);
    for (const auto& [variant, stage] : variants) {
        const Checked checked = check(*stages.at(stage), variant);
        EXPECT_TRUE(checked.ok()) << variant << ", " << checked.failed->what << "\n" << checked.told;
        EXPECT_GE(checked.passed, 11) << variant;
    }
}

TEST(Exercises, SkeletonsAreRefused) {
    std::map<std::string, int> exercises;
    for (const Made& m : made()) {
        if (m.kind != Made::skeleton && m.kind != Made::emptied) continue;
        SCOPED_TRACE(m.name);
        EXPECT_FALSE(check(m.stage, m.variant).ok());
        if (m.kind == Made::emptied) ++exercises[m.exercise.substr(0, 2)];
    }
    for (const auto& [stage, count] : exercises) EXPECT_GE(count, 3) << "exercises of stage " << stage;
    EXPECT_EQ(exercises.size(), 6u);
}

TEST(Exercises, BugsShowAtSomeSizes) {
    std::map<std::string, int> bugs;
    for (const Made& m : made()) {
        if (m.kind != Made::bug) continue;
        SCOPED_TRACE(m.exercise);
        const Checked checked = check(m.stage, m.variant);
        EXPECT_GE(checked.passed, 1) << checked.told;
        ASSERT_FALSE(checked.ok());
        ASSERT_EQ(kBugs.count(m.exercise), 1u) << "kBugs has no words for it";
        EXPECT_TRUE(says(checked.told, kBugs.at(m.exercise))) << checked.failed->what << "\n" << checked.told;
        ++bugs[m.exercise.substr(0, 2)];
    }
    for (const auto& [stage, count] : bugs) EXPECT_GE(count, 2) << "bugs of stage " << stage;
    EXPECT_EQ(bugs.size(), 6u);
}

TEST(Exercises, WrongAnswersAreNamed) {
    int named = 0, all = 0;
    for (const Made& m : made()) {
        if (m.kind != Made::answer) continue;
        ++all;
        const Checked checked = check(m.stage, variant_of(m.exercise));
        const auto words = kAnswers.find(m.name);
        const bool right = words != kAnswers.end() && !checked.ok() && says(checked.told, words->second);
        named += right;
        EXPECT_TRUE(right) << m.exercise << " with " << m.name << ": "
                           << (words == kAnswers.end() ? "kAnswers has no words for it"
                               : checked.ok()          ? "it passes"
                                                       : checked.failed->what + "\n" + checked.told);
    }
    std::printf("%d of %d wrong answers are refused in words that name them\n", named, all);
    EXPECT_GE(named, 30);
}

}  // namespace
