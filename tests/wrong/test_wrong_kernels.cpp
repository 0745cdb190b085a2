#include "stage_suite.hpp"

#include <regex>

// Each wrong kernel is a stage in a namespace of its own: see CMakeLists.txt beside this file for the mistakes.
#define WRONG_KERNELS(X)             \
    X(scale_forgotten)               \
    X(maximum_not_subtracted)        \
    X(one_tile_of_keys_missing)      \
    X(no_rescale)                    \
    X(rescale_of_l_only)             \
    X(maximum_starts_at_zero)        \
    X(lse_without_maximum)           \
    X(lse_in_log2)                   \
    X(mask_one_key_too_many)         \
    X(mask_one_key_too_few)          \
    X(top_left_causal)               \
    X(kv_head_modulo)                \
    X(kv_head_of_query)              \
    X(minus_infinity_minus_infinity) \
    X(division_forgotten)            \
    X(last_rows_forgotten)           \
    X(tail_not_masked)               \
    X(no_barrier_after_loading)      \
    X(no_barrier_before_softmax)     \
    X(no_barrier_before_reuse)       \
    X(past_not_rescaled)             \
    X(barrier_in_a_branch)           \
    X(wait_missing)                  \
    X(wait_too_weak)                 \
    X(no_barrier_in_the_ring)        \
    X(copies_before_the_barrier)     \
    X(ring_of_one_slot)              \
    X(fragments_swapped)             \
    X(values_not_transposed)         \
    X(swizzle_ignored)               \
    X(lanes_decide_alone)            \
    X(maximum_of_the_first_block)    \
    X(sign_of_scale_forgotten)       \
    X(last_block_skipped)            \
    X(diagonal_block_unmasked)       \
    X(tail_block_unmasked)

#define DECLARE(name)               \
    namespace name {                \
    const workbook::Stage& stage(); \
    }
WRONG_KERNELS(DECLARE)

namespace {

using namespace workbook;

/// What the learner is told about a wrong kernel; "ok" when its mistake goes unnoticed.
std::string told(const Stage& stage, const TestCase& test) {
    try {
        const Run run = run_variant(stage, stage.variants.back(), test.setup);
        return run.report.status == "ok" ? "ok" : run.report.reason;
    } catch (const std::exception& error) {
        return error.what();
    }
}

Problem small(bool causal = false) {
    return {.batch = 1, .heads = 4, .kv_heads = 2, .seq = 70, .kv_seq = 90, .head_dim = 64, .causal = causal};
}

/// Stage 03 passes over Q five times.
struct SeveralPasses : TestCase {
    SeveralPasses() : TestCase({.heads = 2, .kv_heads = 2, .seq = 70, .kv_seq = 200}, 1, Distribution::normal, small_device()) {}

private:
    static Device small_device() {
        Device device = Device::current();
        device.shared_memory_per_block = 64 * 1024;  // 48 keys at a time
        return device;
    }
};

/// Expects the mistake to be told in words that match `pattern`.
void expect_told(const Stage& stage, const TestCase& test, const std::string& pattern) {
    const std::string text = told(stage, test);
    EXPECT_TRUE(std::regex_search(text, std::regex(pattern, std::regex::icase))) << text;
}

TEST(WrongKernels, ScaleForgotten) { expect_told(scale_forgotten::stage(), TestCase(small()), "scale"); }

TEST(WrongKernels, MaximumNotSubtracted) {
    Problem p = small();
    p.softmax_scale = 8.0f;  // exp of a logit beyond 88 is infinite in float32
    expect_told(maximum_not_subtracted::stage(), TestCase(p), "nan|infinite");
}

TEST(WrongKernels, KeysBehindTheLastWholeTile) { expect_told(one_tile_of_keys_missing::stage(), TestCase(small()), "LSE is right.*P V"); }

TEST(WrongKernels, NoRescale) { expect_told(no_rescale::stage(), TestCase(small()), "rescale"); }
TEST(WrongKernels, RescaleOfLOnly) { expect_told(rescale_of_l_only::stage(), TestCase(small()), "O .*rescale|rescale.* O"); }

TEST(WrongKernels, MaximumStartsAtZero) {
    Problem p = small();
    p.softmax_scale = 16.0f;
    p.kv_seq = 2;  // few keys: in some rows all scores are below -106, where exp(s - 0) is 0 in float32
    expect_told(maximum_starts_at_zero::stage(), TestCase(p), "start");
}

TEST(WrongKernels, LseWithoutMaximum) { expect_told(lse_without_maximum::stage(), TestCase(small()), "LSE.*maximum"); }
TEST(WrongKernels, LseInLog2) { expect_told(lse_in_log2::stage(), TestCase(small()), "LSE.*log2|LSE.*base.?2"); }
TEST(WrongKernels, MaskOneKeyTooMany) {
    expect_told(mask_one_key_too_many::stage(), TestCase(small(true)), "one key too (many|far)|off by one");
}
TEST(WrongKernels, MaskOneKeyTooFew) { expect_told(mask_one_key_too_few::stage(), TestCase(small(true)), "hides the diagonal"); }
TEST(WrongKernels, TopLeftCausal) { expect_told(top_left_causal::stage(), TestCase(small(true)), "top.left"); }
TEST(WrongKernels, KvHeadModulo) { expect_told(kv_head_modulo::stage(), TestCase(small()), "head"); }
TEST(WrongKernels, KvHeadOfQuery) {
    expect_told(kv_head_of_query::stage(), TestCase(small()), "out of bounds: [KV]\\(0, [23]\\) of extent \\(1, 2, 90, 64\\)");
}

TEST(WrongKernels, RowsThatSeeNothingGiveNaN) {
    Problem p = small(true);
    p.seq = 90;
    p.kv_seq = 40;
    expect_told(minus_infinity_minus_infinity::stage(), TestCase(p), "inf.* no key|no key.*inf|see nothing|sees? no key");
}

TEST(WrongKernels, DivisionForgotten) { expect_told(division_forgotten::stage(), TestCase(small()), "divi"); }
TEST(WrongKernels, LastRowsForgotten) { expect_told(last_rows_forgotten::stage(), TestCase(small()), "never written.*O\\(0, 0, 64, 0\\)"); }
TEST(WrongKernels, TailNotMasked) { expect_told(tail_not_masked::stage(), TestCase(small()), "past the end|beyond the end|tail"); }

TEST(WrongKernels, NoBarrierAfterLoading) {
    expect_told(no_barrier_after_loading::stage(), TestCase(small()), "race in flash1: .* reads shared [QK]\\(.*__syncthreads");
}
TEST(WrongKernels, NoBarrierBeforeSoftmax) {
    expect_told(no_barrier_before_softmax::stage(), TestCase(small()), "race in flash1: .* shared S\\(.*__syncthreads");
}
TEST(WrongKernels, NoBarrierBeforeReuse) {
    expect_told(no_barrier_before_reuse::stage(), SeveralPasses(), "race in flash1: .* (reads|writes) shared V\\(.*__syncthreads");
}
TEST(WrongKernels, BarrierInABranch) { expect_told(barrier_in_a_branch::stage(), TestCase(small()), "race in flash1|deadlock in flash1"); }

TEST(WrongKernels, PastNotRescaled) { expect_told(past_not_rescaled::stage(), SeveralPasses(), "rescale|O\\(0, "); }

// ---- stage 04 on tensor cores ----

/// Two or three blocks of 64 keys, the last one ragged.
Problem half(bool causal = false) {
    return {.batch = 1, .heads = 4, .kv_heads = 2, .seq = 150, .kv_seq = 170, .head_dim = 64, .dtype = DType::f16, .causal = causal};
}

/// Expects the mistake to be told in the same words under every schedule.
void expect_told_always(const Stage& stage, const Problem& problem, const std::string& pattern) {
    TestCase test(problem);
    for (const simt::Schedule schedule : {simt::Schedule::round_robin, simt::Schedule::lowest_first, simt::Schedule::highest_first}) {
        test.options.schedule = schedule;
        SCOPED_TRACE(name(schedule));
        expect_told(stage, test, pattern);
    }
}

TEST(WrongKernels, WaitMissing) {
    expect_told_always(wait_missing::stage(), half(), "ldmatrix.x4 in tensor_core: .* still under way: is a cp_async_wait");
}
TEST(WrongKernels, WaitTooWeak) {
    expect_told_always(wait_too_weak::stage(), half(), "ldmatrix.x4 in tensor_core: .* does it leave too many groups pending");
}
TEST(WrongKernels, NoBarrierInTheRing) {
    expect_told_always(no_barrier_in_the_ring::stage(), half(), "race in tensor_core: .*__syncthreads|still under way");
}
TEST(WrongKernels, CopiesBeforeTheBarrier) {
    expect_told_always(copies_before_the_barrier::stage(), half(), "race in tensor_core: .*__syncthreads");
}
TEST(WrongKernels, RingOfOneSlot) {
    expect_told_always(ring_of_one_slot::stage(), half(), "race in tensor_core: .*__syncthreads|still under way");
}
TEST(WrongKernels, FragmentsSwapped) {
    expect_told(
        fragments_swapped::stage(), TestCase(half()),
        "O is wrong: every row of every head[^]*LSE is wrong: every row of every head.*look at S = Q K\\^T \\(addresses, fragments");
}
TEST(WrongKernels, ValuesNotTransposed) {
    expect_told(values_not_transposed::stage(), TestCase(half()), "every row of every head.*LSE is right.*look at P V");
}
TEST(WrongKernels, SwizzleIgnored) {
    expect_told(swizzle_ignored::stage(), TestCase(half()),
                "LSE is wrong: every row of every head.*look at S = Q K\\^T \\(addresses, fragments");
}

// What is written swizzled and read plainly is wrong, and slow on top.
TEST(WrongKernels, SwizzleIgnoredCostsBankConflicts) {
    const TestCase test(half());
    const workbook::Run run = run_variant(swizzle_ignored::stage(), swizzle_ignored::stage().variants.back(), test.setup);
    ASSERT_TRUE(run.report.shared.has_value());
    EXPECT_GT(run.report.shared->wavefronts, 3 * run.report.shared->ideal);
}

// Which lanes find a larger maximum depends on the numbers; that all of them must vote does not.
TEST(WrongKernels, LanesDecideAlone) {
    expect_told_always(lanes_decide_alone::stage(), half(true), "warp divergence: thread .* is at __shfl_xor_sync\\(\\) while other lanes");
}
TEST(WrongKernels, MaximumOfTheFirstBlock) {
    Problem p = half();
    p.softmax_scale = 4.0f;
    expect_told(maximum_of_the_first_block::stage(), TestCase(p), "nan|infinite");
}
TEST(WrongKernels, SignOfScaleForgotten) {
    Problem p = half();
    p.softmax_scale = -0.5f;
    expect_told(sign_of_scale_forgotten::stage(), TestCase(p), "wrong sign");
}

TEST(WrongKernels, LastBlockSkipped) {
    expect_told(last_block_skipped::stage(), TestCase(half()), "leaves out the last 42 keys.*rounded up");
}
TEST(WrongKernels, LastBlockSkippedCausal) {
    expect_told(last_block_skipped::stage(), TestCase(half(true)), "ends before the diagonal.*rounded down");
}
TEST(WrongKernels, DiagonalBlockUnmasked) {
    expect_told(diagonal_block_unmasked::stage(), TestCase(half(true)), "O is wrong: rows i with i % 64 in 0-42 of every head");
}
TEST(WrongKernels, TailBlockUnmasked) {
    expect_told(tail_block_unmasked::stage(), TestCase(half()), "counts 22 keys past the end.*set s to -infinity where j >= Nkv");
}

// The mistakes that only a race check or an unlucky schedule can show are shown under every schedule.
TEST(WrongKernels, MissingBarriersShowUnderEverySchedule) {
    SeveralPasses test;
    for (const simt::Schedule schedule : {simt::Schedule::round_robin, simt::Schedule::lowest_first, simt::Schedule::highest_first}) {
        test.options.schedule = schedule;
        SCOPED_TRACE(name(schedule));
        EXPECT_NE(told(no_barrier_after_loading::stage(), test), "ok");
        EXPECT_NE(told(no_barrier_before_softmax::stage(), test), "ok");
        EXPECT_NE(told(no_barrier_before_reuse::stage(), test), "ok");
    }
}

}  // namespace
