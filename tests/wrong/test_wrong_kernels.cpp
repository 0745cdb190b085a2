#include "stage_suite.hpp"

#include <regex>

// Each wrong kernel is a stage in a namespace of its own: see CMakeLists.txt beside this file for the mistakes.
#define WRONG_KERNELS(X)                  \
    X(scale_forgotten)                    \
    X(maximum_not_subtracted)             \
    X(one_tile_of_keys_missing)           \
    X(no_rescale)                         \
    X(rescale_of_l_only)                  \
    X(maximum_starts_at_zero)             \
    X(lse_without_maximum)                \
    X(lse_in_log2)                        \
    X(mask_one_key_too_many)              \
    X(mask_one_key_too_few)               \
    X(top_left_causal)                    \
    X(kv_head_modulo)                     \
    X(kv_head_of_query)                   \
    X(minus_infinity_minus_infinity)      \
    X(division_forgotten)                 \
    X(last_rows_forgotten)                \
    X(tail_not_masked)                    \
    X(no_barrier_after_loading)           \
    X(no_barrier_before_softmax)          \
    X(no_barrier_before_reuse)            \
    X(past_not_rescaled)                  \
    X(barrier_in_a_branch)                \
    X(wait_missing)                       \
    X(wait_too_weak)                      \
    X(no_barrier_in_the_ring)             \
    X(copies_before_the_barrier)          \
    X(ring_of_one_slot)                   \
    X(fragments_swapped)                  \
    X(values_not_transposed)              \
    X(swizzle_ignored)                    \
    X(lanes_decide_alone)                 \
    X(maximum_of_the_first_block)         \
    X(sign_of_scale_forgotten)            \
    X(last_block_skipped)                 \
    X(diagonal_block_unmasked)            \
    X(tail_block_unmasked)                \
    X(d_omitted)                          \
    X(d_omitted_in_standard)              \
    X(dq_not_scaled)                      \
    X(dq_scaled_twice)                    \
    X(dk_not_scaled)                      \
    X(dk_scaled_twice)                    \
    X(mask_forgotten_in_backward)         \
    X(tail_not_masked_in_backward)        \
    X(lse_read_in_log2)                   \
    X(lse_not_in_log2)                    \
    X(accumulator_not_zeroed)             \
    X(heads_overwritten)                  \
    X(first_block_of_queries_skipped)     \
    X(no_barrier_before_ds)               \
    X(no_barrier_before_next_queries)     \
    X(tc_wait_missing)                    \
    X(tc_no_barrier_in_the_ring)          \
    X(tc_no_barrier_before_dq)            \
    X(tc_sums_not_zeroed)                 \
    X(tc_d_omitted)                       \
    X(tc_dk_not_scaled)                   \
    X(tc_rows_that_see_nothing)           \
    X(tc_tail_not_masked)                 \
    X(tc_mask_too_short)                  \
    X(tc_columns_in_order)                \
    X(tc_own_queries_only)                \
    X(barriers_not_announced)             \
    X(keys_not_awaited)                   \
    X(values_not_awaited)                 \
    X(slot_not_awaited)                   \
    X(slot_never_released)                \
    X(slot_released_too_early)            \
    X(slot_released_by_all_warps)         \
    X(phase_forgotten)                    \
    X(half_of_a_tile_announced)           \
    X(scores_not_awaited)                 \
    X(no_fence_before_wgmma)              \
    X(no_proxy_fence)                     \
    X(no_barrier_before_the_store)        \
    X(store_not_awaited)                  \
    X(rows_of_values_half_as_far_apart)   \
    X(output_not_swizzled)                \
    X(nobody_begins)                      \
    X(turns_of_three)                     \
    X(turn_of_one_alone)                  \
    X(registers_not_given)                \
    X(slot_released_by_one)               \
    X(slot_released_before_the_wait)      \
    X(scores_awaited_too_weakly)          \
    X(output_not_rescaled)                \
    X(rescaled_under_the_product)         \
    X(sums_of_dq_not_zeroed)              \
    X(keys_past_the_end)                  \
    X(rows_that_see_nothing)              \
    X(no_proxy_fence_before_the_addition) \
    X(no_proxy_fence_before_dq)           \
    X(addition_not_awaited)               \
    X(ds_not_awaited)                     \
    X(ds_overwritten)                     \
    X(queries_released_too_early)         \
    X(statistics_not_announced)           \
    X(ds_product_of_one_warpgroup)        \
    X(scores_not_shared_in_time)          \
    X(turn_not_passed_on)                 \
    X(peer_ds_not_awaited)                \
    X(peer_ds_overwritten)                \
    X(peer_not_told)                      \
    X(ds_sent_too_early)                  \
    X(sums_not_awaited)                   \
    X(sums_overwritten)                   \
    X(sums_sent_too_early)                \
    X(sums_not_turned_round)              \
    X(next_keys_loaded_too_early)

#define DECLARE(name)               \
    namespace name {                \
    const workbook::Stage& stage(); \
    }
WRONG_KERNELS(DECLARE)

// Of variant 06d.
#define WRONG_FP8_KERNELS(X)                 \
    X(fp8_not_scaled)                        \
    X(fp8_scale_of_another_block)            \
    X(fp8_scale_of_values_in_the_sum)        \
    X(fp8_keys_in_order)                     \
    X(fp8_not_rescaled)                      \
    X(fp8_sum_not_rescaled)                  \
    X(fp8_vote_of_the_first_row_only)        \
    X(fp8_maximum_too_old)                   \
    X(fp8_tail_not_zeroed)                   \
    X(fp8_infinity_saturated)                \
    X(fp8_zero_times_infinity)               \
    X(fp8_warps_scale_alone)                 \
    X(fp8_passed_over_unseen)                \
    X(fp8_largest_of_queries_read_too_early) \
    X(fp8_quantisation_not_awaited)          \
    X(fp8_queries_released_too_early)        \
    X(fp8_output_still_leaving)

#define WRONG_VOTE_FIRST_KERNELS(X) \
    X(vote_without_rescaling)       \
    X(vote_too_generous)            \
    X(vote_of_the_first_row_only)   \
    X(vote_of_scores_too_generous)  \
    X(vote_below_zero_as_above)     \
    X(parts_not_weighted)           \
    X(sign_of_the_scale_lost)       \
    X(negated_queries_not_fenced)   \
    X(queries_not_awaited)          \
    X(claim_told_too_early)         \
    X(claim_not_awaited)            \
    X(query_slot_of_the_round)      \
    X(claims_of_each_block)

#define DECLARE_VOTE_FIRST(name)            \
    namespace name {                        \
    workbook::Variant vote_first_variant(); \
    }
WRONG_VOTE_FIRST_KERNELS(DECLARE_VOTE_FIRST)

#define DECLARE_FP8(name)            \
    namespace name {                 \
    workbook::Variant fp8_variant(); \
    }
WRONG_FP8_KERNELS(DECLARE_FP8)

namespace {

using namespace workbook;

/// What the learner is told about a wrong kernel; "ok" when its mistake goes unnoticed.
std::string told(const Variant& variant, const Stage& stage, const TestCase& test) {
    try {
        const Run run = run_variant(stage, variant, test.setup);
        return run.report.status == "ok" ? "ok" : run.report.reason;
    } catch (const std::exception& error) {
        return error.what();
    }
}
std::string told(const Stage& stage, const TestCase& test) { return told(stage.variants.back(), stage, test); }

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
    under_every_schedule(test, [&] { expect_told(stage, test, pattern); });
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
    const simt::SharedCount count = run.report.shared.at("ldmatrix");
    EXPECT_GT(count.wavefronts, 3 * count.ideal);
}

// Which lanes find a larger maximum depends on the numbers; that all of them must vote does not.
TEST(WrongKernels, LanesDecideAlone) {
    expect_told_always(lanes_decide_alone::stage(), half(true), "warp divergence: thread .* is at warp_max\\(\\) while other lanes");
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

// ---- stage 05 ----

/// What the learner is told about a backward variant; "ok" when its mistake goes unnoticed.
std::string told(const Stage& stage, const std::string& id, BackwardTestCase& test) {
    for (const BackwardVariant& variant : stage.backward) {
        if (variant.id != id) continue;
        try {
            const BackwardRun run = run_variant(stage, variant, test.setup, test.backward);
            return run.report.status == "ok" ? "ok" : run.report.reason;
        } catch (const std::exception& error) {
            return error.what();
        }
    }
    return "there is no variant " + id;
}

void expect_told(const Stage& stage, const std::string& id, const Problem& problem, const std::string& pattern) {
    BackwardTestCase test(problem);
    const std::string text = told(stage, id, test);
    EXPECT_NE(text, "ok") << "the mistake went unnoticed";
    EXPECT_TRUE(std::regex_search(text, std::regex(pattern, std::regex::icase))) << text;
}

TEST(WrongKernels, DOmitted) {
    for (const char* id : {"05b", "05b-det"})
        expect_told(d_omitted::stage(), id, small(), "dQ and dK are what a backward pass gives in which D is left out");
    expect_told(d_omitted_in_standard::stage(), "05a", small(), "dQ and dK are what .* D is left out");
}
TEST(WrongKernels, ScaleOfDQ) {
    expect_told(dq_not_scaled::stage(), "05b", small(), "dQ is what .* dQ is not multiplied by the softmax scale");
    expect_told(dq_scaled_twice::stage(), "05b", small(), "dQ is what .* dQ is multiplied by the softmax scale twice");
}
TEST(WrongKernels, ScaleOfDK) {
    expect_told(dk_not_scaled::stage(), "05b", small(), "dK is what .* dK is not multiplied by the softmax scale");
    expect_told(dk_scaled_twice::stage(), "05b", small(), "dK is what .* dK is multiplied by the softmax scale twice");
}
TEST(WrongKernels, MaskForgottenInBackward) {
    for (const char* id : {"05b", "05b-det"})
        expect_told(mask_forgotten_in_backward::stage(), id, small(true), "dQ, dK and dV are what .* without the causal mask");
}
TEST(WrongKernels, TailNotMaskedInBackward) {
    expect_told(tail_not_masked_in_backward::stage(), "05b", {.seq = 200, .kv_seq = 2, .head_dim = 64, .softmax_scale = 16.0f},
                "dQ: [^]*NaN[^]*dQ is wrong");
}
TEST(WrongKernels, LseReadInLog2) { expect_told(lse_read_in_log2::stage(), "05b", small(), "LSE is taken in units of log2"); }
TEST(WrongKernels, LseNotInLog2) { expect_told(lse_not_in_log2::stage(), "05b", small(), "LSE stands beside a score in units of log2"); }
TEST(WrongKernels, AccumulatorNotZeroed) {
    expect_told(accumulator_not_zeroed::stage(), "05b", small(), "dQ is added to memory that was not set to zero");
}
TEST(WrongKernels, HeadsOverwritten) {
    expect_told(heads_overwritten::stage(), "05b", small(), "dK and dV are what .* the last query head of each group");
}
TEST(WrongKernels, FirstBlockOfQueriesSkipped) {
    Problem p = small(true);
    p.seq = 150;
    p.kv_seq = 170;  // the diagonal cuts blocks of queries anywhere
    expect_told(first_block_of_queries_skipped::stage(), "05b", p, "dQ, dK and dV are wrong, and no known mistake explains it");
}
TEST(WrongKernels, BarriersOfTheBackwardPass) {
    BackwardTestCase test(small());
    under_every_schedule(test, [&] {
        for (const std::string& text :
             {told(no_barrier_before_ds::stage(), "05b", test), told(no_barrier_before_next_queries::stage(), "05b", test)})
            EXPECT_TRUE(std::regex_search(text, std::regex("race in recompute: .*__syncthreads"))) << text;
    });
}

// ---- 05c: the stages below were made with their tensor-core kernel in float16 only, so O and LSE come from the reference ----

/// Under every schedule.
void expect_told_with_given_forward(const Stage& stage, const std::string& id, const Problem& problem, const std::string& pattern) {
    BackwardTestCase test(problem);
    const ReferenceRows& want = test.setup.want;
    test.backward.forward =
        Previous{"float64", {{want.o.begin(), want.o.end()}, {want.lse.begin(), want.lse.end()}, {}, {}}, std::nullopt, ""};
    under_every_schedule(test, [&] {
        const std::string text = told(stage, id, test);
        EXPECT_TRUE(std::regex_search(text, std::regex(pattern, std::regex::icase))) << text;
    });
}
void expect_told_of_05c(const Stage& stage, const Problem& problem, const std::string& pattern) {
    expect_told_with_given_forward(stage, "05c", problem, pattern);
}

TEST(WrongKernels, Wait05c) { expect_told_of_05c(tc_wait_missing::stage(), half(), "ldmatrix.x4 in tensor_core: .* still under way"); }
TEST(WrongKernels, Barriers05c) {
    expect_told_of_05c(tc_no_barrier_in_the_ring::stage(), half(), "race in tensor_core: .*__syncthreads|still under way");
    expect_told_of_05c(tc_no_barrier_before_dq::stage(), half(), "race in tensor_core: .*__syncthreads");
}
TEST(WrongKernels, SumsNotZeroed05c) {
    expect_told_of_05c(tc_sums_not_zeroed::stage(), half(), "dQ is added to memory that was not set to zero");
}
TEST(WrongKernels, DOmitted05c) { expect_told_of_05c(tc_d_omitted::stage(), half(), "D is left out|dQ and dK are wrong"); }
TEST(WrongKernels, ScaleOfDK05c) {
    expect_told_of_05c(tc_dk_not_scaled::stage(), half(), "dK is what .* dK is not multiplied by the softmax scale");
}
TEST(WrongKernels, RowsThatSeeNothing05c) {
    Problem p = half(true);
    p.kv_seq = 30;
    expect_told_of_05c(tc_rows_that_see_nothing::stage(), p, "NaN|infinite");
}
TEST(WrongKernels, Tail05c) {
    Problem p = half();
    p.kv_seq = 2;
    p.softmax_scale = 16.0f;  // LSE far below zero: 2^-LSE of a key that is not there is infinite
    expect_told_of_05c(tc_tail_not_masked::stage(), p, "NaN|infinite");
}
TEST(WrongKernels, MaskTooShort05c) { expect_told_of_05c(tc_mask_too_short::stage(), half(true), "d[QKV].* wrong"); }
TEST(WrongKernels, OrderOfColumns05c) { expect_told_of_05c(tc_columns_in_order::stage(), half(), "dQ is wrong"); }
TEST(WrongKernels, OwnQueriesOnly05c) {
    Problem p = half();
    p.head_dim = 128;
    expect_told_of_05c(tc_own_queries_only::stage(), p, "dK and dV are wrong|dV");
}

// ---- stage 06 ----

/// Four tiles of 128 keys, the last one ragged: each slot is used twice.
Problem four_tiles() { return {.batch = 1, .heads = 2, .kv_heads = 1, .seq = 100, .kv_seq = 400, .head_dim = 64, .dtype = DType::f16}; }

/// Under every schedule.
void expect_told_of(const std::string& id, const Stage& stage, const std::string& pattern) {
    TestCase test(four_tiles());
    for (const Variant& variant : stage.variants) {
        if (variant.id != id) continue;
        under_every_schedule(test, [&] {
            const std::string text = told(variant, stage, test);
            EXPECT_TRUE(std::regex_search(text, std::regex(pattern, std::regex::icase))) << text;
        });
        return;
    }
    ADD_FAILURE() << "there is no variant " << id;
}

TEST(WrongKernels, BarriersNotAnnounced) {
    expect_told_of("06a", barriers_not_announced::stage(), "TMA load: barrier q_full was initialised without a fence_mbarrier_init");
}
TEST(WrongKernels, KeysNotAwaited) {
    expect_told_of("06a", keys_not_awaited::stage(),
                   "wgmma in tma_wgmma: .* while the TMA load that thread 128 started to it is still under way: is an mbarrier_wait");
}
TEST(WrongKernels, ValuesNotAwaited) {
    expect_told_of("06a", values_not_awaited::stage(),
                   "wgmma in tma_wgmma: .* while the TMA load that thread 128 started to it is still under way: is an mbarrier_wait");
}
TEST(WrongKernels, SlotNotAwaited) {
    expect_told_of("06a", slot_not_awaited::stage(),
                   "more than the 1 arrivals that barrier k_full\\[0\\] was initialised for, in phase 0, by thread 128");
}
TEST(WrongKernels, SlotNeverReleased) {
    expect_told_of(
        "06a", slot_never_released::stage(),
        "deadlock in tma_wgmma[^]*waits at barrier v_empty\\[0\\], waiting for phase 0 \\(1 of 1 arrivals missing\\): thread 128");
}
TEST(WrongKernels, SlotReleasedTooEarly) {
    expect_told_of("06a", slot_released_too_early::stage(),
                   "TMA load in tma_wgmma: .* writes shared memory\\(8192\\) while a wgmma, a store by TMA or a copy to another block has "
                   "yet to read it");
}
TEST(WrongKernels, SlotReleasedByAllWarps) {
    expect_told_of("06a", slot_released_by_all_warps::stage(),
                   "barrier k_empty\\[0\\] completes phase [12] and nobody has waited for the phase before it");
}
TEST(WrongKernels, PhaseForgotten) {
    expect_told_of("06a", phase_forgotten::stage(),
                   "more than the 1 arrivals that barrier k_full\\[0\\] was initialised for, in phase 0, by thread 128");
}
TEST(WrongKernels, HalfOfATileAnnounced) {
    expect_told_of("06a", half_of_a_tile_announced::stage(),
                   "128 wait at barrier k_full\\[0\\], waiting for phase 0 \\(8192 bytes more have landed than were announced\\)");
}
TEST(WrongKernels, ScoresNotAwaited) {
    expect_told_of("06a", scores_not_awaited::stage(),
                   "while a wgmma, a store by TMA or a copy to another block has yet to read it: is a wait missing");
}
TEST(WrongKernels, NoFenceBeforeWgmma) {
    expect_told_of("06a", no_fence_before_wgmma::stage(), "wgmma in tma_wgmma: .* issues one without a wgmma_fence");
}
TEST(WrongKernels, NoProxyFence) {
    expect_told_of("06a", no_proxy_fence::stage(), "TMA store in tma_wgmma: thread 0 .* no fence_proxy_async\\(\\) lies between");
}
TEST(WrongKernels, NoBarrierBeforeTheStore) {
    expect_told_of("06a", no_barrier_before_the_store::stage(), "race in tma_wgmma: thread 0 .* reads shared memory");
}
TEST(WrongKernels, StoreNotAwaited) {
    expect_told_of("06a", store_not_awaited::stage(),
                   "TMA store in tma_wgmma: thread 0 .* returns while a store has yet to read shared memory");
}
TEST(WrongKernels, RowsOfValuesHalfAsFarApart) {
    expect_told_of("06a", rows_of_values_half_as_far_apart::stage(), "every row of every head.*LSE is right.*look at P V");
}
TEST(WrongKernels, OutputNotSwizzled) {
    expect_told_of("06a", output_not_swizzled::stage(), "rows i with i % 8 in 1-7 of every head.*LSE is right.*at the store");
}

TEST(WrongKernels, NobodyBegins) {
    expect_told_of("06b", nobody_begins::stage(),
                   "deadlock in pingpong[^]*128 wait at bar.sync 1 \\(128 of 256 threads are there\\): threads 0-127");
}
TEST(WrongKernels, TurnsOfThree) {
    expect_told_of("06b", turns_of_three::stage(),
                   "deadlock in pingpong[^]*128 wait at bar.sync 1 \\(256 of 384 threads are there\\): threads 0-127");
}
TEST(WrongKernels, TurnOfOneAlone) {
    expect_told_of(
        "06b", turn_of_one_alone::stage(),
        "bar.(sync|arrive) [12]: thread .* names (128|256) threads, others named (256|128)|bar.arrive [12]: thread .* arrives again");
}
TEST(WrongKernels, RegistersNotGiven) {
    expect_told_of("06b", registers_not_given::stage(), "deadlock in pingpong[^]*wait at setmaxnreg.inc \\(too few registers are free\\)");
}
TEST(WrongKernels, SlotReleasedByOne) {
    expect_told_of("06b", slot_released_by_one::stage(), "writes shared memory\\([0-9]+\\) while a wgmma");
}
TEST(WrongKernels, SlotReleasedBeforeTheWait) {
    expect_told_of(
        "06b", slot_released_before_the_wait::stage(),
        "TMA load in pingpong: .* shared memory\\([0-9]+\\) while a wgmma, a store by TMA or a copy to another block has yet to read it");
}
TEST(WrongKernels, ScoresAwaitedTooWeakly) {
    expect_told_of("06b", scores_awaited_too_weakly::stage(),
                   "TMA load in pingpong: .* while a wgmma, a store by TMA or a copy to another block has yet to read it");
}
TEST(WrongKernels, OutputNotRescaled) { expect_told_of("06b", output_not_rescaled::stage(), "rescales l but not o"); }
TEST(WrongKernels, RescaledUnderTheProduct) { expect_told_of("06b", rescaled_under_the_product::stage(), "rescales l but not o"); }

/// Few, so that a thread block, or a cluster, has tile after tile.
Device with_sms(int sms) {
    Device device = Device::current();
    device.sms = sms;
    return device;
}

/// Blocks of 64 keys of which each has scores 2^4 times those of the next, and values of another size; one SM.
struct UnlikeBlocks : TestCase {
    UnlikeBlocks() : TestCase(problem(), 1, Distribution::normal, with_sms(1)) {
        Inputs& in = setup.inputs;
        for (float& x : in.q_host) x = 1.0f + 0.1f * x;
        for (std::size_t e = 0; e < in.k_host.size(); ++e) {
            const auto block = static_cast<int>(e / 64 / 64);
            in.k_host[e] = 0.1f * in.k_host[e] - 4 * 0.693147f / 8 * static_cast<float>(block);
            in.v_host[e] *= std::exp2(static_cast<float>(block % 3 * 5));
        }
        inputs_changed();
    }

private:
    static Problem problem() {
        return {.batch = 1, .heads = 2, .kv_heads = 1, .seq = 70, .kv_seq = 330, .head_dim = 64, .dtype = DType::f16};
    }
};

/// Moves all scores far above or below zero, by one element of each row of Q and of K. @param bits by which those of a block of keys lie
/// further below those of the block before
void move_scores(UnlikeBlocks& test, float element, float bits = 0.0f) {
    std::vector<float>& k = test.setup.inputs.k_host;
    for (std::size_t e = 0; e < k.size(); ++e) k[e] -= 0.693147f / 8 * bits * static_cast<float>(e / 64 / 64);
    for (std::size_t e = 0; e < test.setup.inputs.q_host.size(); e += 64) test.setup.inputs.q_host[e] = 64.0f;
    for (std::size_t e = 0; e < k.size(); e += 64) k[e] = element;
    test.inputs_changed();
}

/// Makes all scores equal in the first of the two rows of 16 that a lane has, and all values of one size, which counts as part of P in 06d.
void level_first_rows(UnlikeBlocks& test) {
    std::vector<float>& q = test.setup.inputs.q_host;
    const auto rows = static_cast<std::size_t>(test.setup.inputs.problem.seq);
    for (std::size_t e = 0; e < q.size(); ++e)
        if (e / 64 % rows % 16 < 8) q[e] = 0.0f;
    for (float& x : test.setup.inputs.v_host) x = std::copysign(1.0f, x);
    test.inputs_changed();
}

void expect_told_of(const Variant& variant, const TestCase& test, const std::string& pattern) {
    static const Stage stage = {.id = "06", .title = "wrong"};
    const std::string text = told(variant, stage, test);
    EXPECT_TRUE(std::regex_search(text, std::regex(pattern))) << text;
}
/// Under every schedule.
template <class Test = UnlikeBlocks>
void expect_race_told_of(const Variant& variant, const std::string& pattern) {
    Test test;
    under_every_schedule(test, [&] { expect_told_of(variant, test, pattern); });
}

constexpr const char* kTooFarOff = "^O: .*(is|are) off by more than the allowed";
constexpr const char* kNan = "^O: .* NaN where the reference is not, or the reverse";

TEST(WrongKernels, VoteWithoutRescaling) {
    expect_told_of(vote_without_rescaling::vote_first_variant(), UnlikeBlocks(), "LSE is right.*how o is rescaled");
}
TEST(WrongKernels, VoteTooGenerous) { expect_told_of(vote_too_generous::vote_first_variant(), UnlikeBlocks(), kNan); }
TEST(WrongKernels, VoteOfTheFirstRowOnly) {
    UnlikeBlocks test;
    level_first_rows(test);
    expect_told_of(vote_of_the_first_row_only::vote_first_variant(), test, kNan);
}
TEST(WrongKernels, VoteOfScoresTooGenerous) { expect_told_of(vote_of_scores_too_generous::vote_first_variant(), UnlikeBlocks(), kNan); }
TEST(WrongKernels, VoteBelowZeroAsAbove) {
    UnlikeBlocks test;
    move_scores(test, -64.0f, 20.0f);
    expect_told_of(vote_below_zero_as_above::vote_first_variant(), test, kNan);
}
// A tile alone on the GPU is divided by its keys.
TEST(WrongKernels, PartsNotWeighted) {
    const Problem problem{.batch = 1, .heads = 1, .kv_heads = 1, .seq = 70, .kv_seq = 4700, .head_dim = 64, .dtype = DType::f16};
    expect_told_of(parts_not_weighted::vote_first_variant(), TestCase(problem), kTooFarOff);
}
TEST(WrongKernels, SignOfTheScaleLost) {
    UnlikeBlocks test;
    test.setup.inputs.problem.softmax_scale = -0.125f;
    test.inputs_changed();
    expect_told_of(sign_of_the_scale_lost::vote_first_variant(), test, "^O: ");
}
TEST(WrongKernels, NegatedQueriesNotFenced) {
    UnlikeBlocks test;
    test.setup.inputs.problem.softmax_scale = -0.125f;
    test.inputs_changed();
    expect_told_of(negated_queries_not_fenced::vote_first_variant(), test,
                   "wgmma in vote_first: .* no fence_proxy_async\\(\\) lies between");
}
TEST(WrongKernels, QueriesNotAwaited) {
    expect_race_told_of(
        queries_not_awaited::vote_first_variant(),
        "TMA load in vote_first: .* writes shared memory\\([0-9]+\\) while a wgmma|more than the 1 arrivals that barrier q_full");
}
// A cluster that goes from tile to tile.
struct Clusters : TestCase {
    Clusters()
        : TestCase({.batch = 1, .heads = 1, .kv_heads = 1, .seq = 1100, .kv_seq = 70, .head_dim = 256, .dtype = DType::f16}, 1,
                   Distribution::normal, with_sms(2)) {}
};
TEST(WrongKernels, ClaimToldTooEarly) {
    expect_race_told_of<Clusters>(claim_told_too_early::vote_first_variant(),
                                  "barrier claimed_empty completes phase 1 and nobody has waited for the phase before it");
}
TEST(WrongKernels, ClaimNotAwaited) {
    expect_race_told_of<Clusters>(claim_not_awaited::vote_first_variant(),
                                  "16-byte load in vote_first: .* still under way: is an mbarrier_wait\\(\\) missing");
}
TEST(WrongKernels, QuerySlotOfTheRound) {
    expect_race_told_of<Clusters>(query_slot_of_the_round::vote_first_variant(), "out of bounds: LSE|TMA: coordinate 1 = -");
}
TEST(WrongKernels, ClaimsOfEachBlock) {
    expect_race_told_of<Clusters>(claims_of_each_block::vote_first_variant(), "O was never written: rows");
}
TEST(WrongKernels, Fp8NotScaled) {
    UnlikeBlocks test;
    for (float& x : test.setup.inputs.v_host) x *= 8.0f;
    test.inputs_changed();
    expect_told_of(fp8_not_scaled::fp8_variant(), test, kTooFarOff);
}
TEST(WrongKernels, Fp8ScaleOfAnotherBlock) { expect_told_of(fp8_scale_of_another_block::fp8_variant(), UnlikeBlocks(), kTooFarOff); }
TEST(WrongKernels, Fp8ScaleOfValuesInTheSum) { expect_told_of(fp8_scale_of_values_in_the_sum::fp8_variant(), UnlikeBlocks(), kTooFarOff); }
TEST(WrongKernels, Fp8KeysInOrder) { expect_told_of(fp8_keys_in_order::fp8_variant(), TestCase(four_tiles()), kTooFarOff); }
TEST(WrongKernels, Fp8NotRescaled) { expect_told_of(fp8_not_rescaled::fp8_variant(), UnlikeBlocks(), kTooFarOff); }
TEST(WrongKernels, Fp8SumNotRescaled) { expect_told_of(fp8_sum_not_rescaled::fp8_variant(), UnlikeBlocks(), kTooFarOff); }
TEST(WrongKernels, Fp8MaximumTooOld) {
    UnlikeBlocks test;
    move_scores(test, 64.0f);
    expect_told_of(fp8_maximum_too_old::fp8_variant(), test, kTooFarOff);
}
TEST(WrongKernels, Fp8VoteOfTheFirstRowOnly) {
    UnlikeBlocks test;
    level_first_rows(test);
    expect_told_of(fp8_vote_of_the_first_row_only::fp8_variant(), test, kTooFarOff);
}
TEST(WrongKernels, Fp8TailNotZeroed) { expect_told_of(fp8_tail_not_zeroed::fp8_variant(), UnlikeBlocks(), kNan); }
TEST(WrongKernels, Fp8InfinitySaturated) {
    UnlikeBlocks test;
    test.setup.inputs.k_host[0] = INFINITY;
    test.inputs_changed();
    expect_told_of(fp8_infinity_saturated::fp8_variant(), test, kNan);
}
TEST(WrongKernels, Fp8ZeroTimesInfinity) {
    UnlikeBlocks test;
    for (std::vector<float>* x : {&test.setup.inputs.q_host, &test.setup.inputs.k_host}) std::fill(x->begin(), x->end(), 0.0f);
    test.inputs_changed();
    expect_told_of(fp8_zero_times_infinity::fp8_variant(), test, kNan);
}
TEST(WrongKernels, Fp8WarpsScaleAlone) { expect_race_told_of(fp8_warps_scale_alone::fp8_variant(), "race in quantise: .*of_warps"); }
TEST(WrongKernels, Fp8LargestOfQueriesReadTooEarly) {
    expect_race_told_of(fp8_largest_of_queries_read_too_early::fp8_variant(), "race in fp8");
}
TEST(WrongKernels, Fp8QuantisationNotAwaited) {
    expect_race_told_of(fp8_quantisation_not_awaited::fp8_variant(),
                        "fp8 is launched early: .* accesses claims before griddepcontrol_wait");
}
TEST(WrongKernels, Fp8PassedOverUnseen) {
    expect_race_told_of(fp8_passed_over_unseen::fp8_variant(), "TMA load in fp8: .* writes shared memory\\([0-9]+\\) while a wgmma");
}
TEST(WrongKernels, Fp8QueriesReleasedTooEarly) {
    expect_race_told_of(fp8_queries_released_too_early::fp8_variant(),
                        "barrier q_empty\\[0\\] completes phase 1 and nobody has waited for the phase before it|"
                        "reads shared memory\\([0-9]+\\) while the TMA load that thread 512 started to it is still under way");
}
TEST(WrongKernels, Fp8OutputStillLeaving) {
    expect_race_told_of(fp8_output_still_leaving::fp8_variant(),
                        "while a wgmma, a store by TMA or a copy to another block has yet to read it");
}

// The mistakes that only a race check or an unlucky schedule can show are shown under every schedule.
TEST(WrongKernels, MissingBarriersShowUnderEverySchedule) {
    SeveralPasses test;
    under_every_schedule(test, [&] {
        EXPECT_NE(told(no_barrier_after_loading::stage(), test), "ok");
        EXPECT_NE(told(no_barrier_before_softmax::stage(), test), "ok");
        EXPECT_NE(told(no_barrier_before_reuse::stage(), test), "ok");
    });
}

// ---- 06e ----

/// Five blocks of queries, the last one ragged, for two heads that share keys: each slot is used several times.
Problem ten_turns(bool causal = false) {
    return {.batch = 1, .heads = 2, .kv_heads = 1, .seq = 300, .kv_seq = 200, .head_dim = 64, .dtype = DType::f16, .causal = causal};
}
void expect_told_of_06e(const Stage& stage, const std::string& pattern, const Problem& problem = ten_turns()) {
    expect_told_with_given_forward(stage, "06e", problem, pattern);
}

TEST(WrongKernels, SumsOfDqNotZeroed) {
    expect_told_of_06e(sums_of_dq_not_zeroed::stage(), "dQ is added to memory that was not set to zero");
}
TEST(WrongKernels, KeysPastTheEnd) {
    Problem p = ten_turns();
    p.kv_seq = 2;
    p.softmax_scale = 16.0f;  // LSE far below zero: 2^-LSE of a key that is not there is infinite
    expect_told_of_06e(keys_past_the_end::stage(), "NaN|infinite", p);
}
TEST(WrongKernels, RowsThatSeeNothing06e) { expect_told_of_06e(rows_that_see_nothing::stage(), "NaN|infinite", ten_turns(true)); }
TEST(WrongKernels, NoProxyFenceBeforeTheAddition) {
    expect_told_of_06e(no_proxy_fence_before_the_addition::stage(), "TMA store in backward: .* no fence_proxy_async\\(\\) lies between");
}
TEST(WrongKernels, NoProxyFenceBeforeDq) {
    expect_told_of_06e(no_proxy_fence_before_dq::stage(), "wgmma in backward: .* no fence_proxy_async\\(\\)");
}
TEST(WrongKernels, AdditionNotAwaited) {
    expect_told_of_06e(
        addition_not_awaited::stage(),
        "16-byte store in backward: .* while a wgmma, a store by TMA or a copy to another block has yet to read it: is a wait missing");
}
TEST(WrongKernels, DsNotAwaited) {
    expect_told_of_06e(ds_not_awaited::stage(),
                       "race in backward: .* reads shared memory.*, which .* wrote, and no barrier lies between|"
                       "wgmma in backward: .* while the TMA load that thread 384 started to it is still under way");
}
TEST(WrongKernels, DsOverwritten) {
    expect_told_of_06e(ds_overwritten::stage(), "barrier ds_empty\\[0\\] completes phase 1 and nobody has waited for the phase before it");
}
TEST(WrongKernels, QueriesReleasedTooEarly) {
    Problem p = ten_turns();
    p.kv_seq = 130;
    p.head_dim = 128;  // at 64 the loader looks at dS as well
    expect_told_of_06e(queries_released_too_early::stage(),
                       "TMA load in backward: .* while a wgmma, a store by TMA or a copy to another block has yet to read it", p);
}
TEST(WrongKernels, StatisticsNotAnnounced) {
    expect_told_of_06e(statistics_not_announced::stage(),
                       "16-byte load in backward: .* while the TMA load that thread 384 started to it is still under way");
}
TEST(WrongKernels, DsProductOfOneWarpgroup) { expect_told_of_06e(ds_product_of_one_warpgroup::stage(), "dQ is wrong"); }
TEST(WrongKernels, ScoresNotSharedInTime) {
    Problem p = ten_turns();
    p.seq = 130;
    p.kv_seq = 70;
    p.head_dim = 256;
    expect_told_of_06e(scores_not_shared_in_time::stage(), "race in backward: .* reads shared memory", p);
}
TEST(WrongKernels, TurnNotPassedOn) {
    expect_told_with_given_forward(
        turn_not_passed_on::stage(), "06e-det", ten_turns(),
        "deadlock in backward: .* waits for dQ_turn to become 1, it is 0, and all blocks that began before have");
}

// ---- 06f ----

/// Three blocks of queries, and a cluster of two blocks of keys.
void expect_told_of_06f(const Stage& stage, const std::string& pattern) {
    const Problem p{.batch = 1, .heads = 1, .kv_heads = 1, .seq = 200, .kv_seq = 140, .head_dim = 128, .dtype = DType::f16};
    expect_told_with_given_forward(stage, "06f", p, pattern);
}

TEST(WrongKernels, PeerDsNotAwaited) {
    expect_told_of_06f(peer_ds_not_awaited::stage(),
                       "cp.async.bulk in exchange: .* while a wgmma, a store by TMA or a copy to another block has yet to read it");
}
TEST(WrongKernels, PeerDsOverwritten) {
    expect_told_of_06f(peer_ds_overwritten::stage(),
                       "barrier ds_empty\\[0\\] completes phase 1 and nobody has waited for the phase before it");
}
TEST(WrongKernels, PeerNotTold) {
    expect_told_of_06f(peer_not_told::stage(), "256 wait at barrier ds_empty\\[0\\], waiting for phase 0 \\(1 of 2 arrivals missing\\)");
}
TEST(WrongKernels, DsSentTooEarly) {
    expect_told_of_06f(ds_sent_too_early::stage(),
                       "race in exchange: .* reads shared memory.*, which .* wrote, and no barrier lies between");
}

// ---- 06g ----

/// Three blocks of queries, and more heads than a device of 132 SMs has clusters of four for.
void expect_told_of_06g(const Stage& stage, const std::string& pattern) {
    const Problem p{.batch = 1, .heads = 34, .kv_heads = 34, .seq = 150, .kv_seq = 300, .head_dim = 128, .dtype = DType::f16};
    expect_told_with_given_forward(stage, "06g", p, pattern);
}

TEST(WrongKernels, SumsNotAwaited) {
    expect_told_of_06g(sums_not_awaited::stage(),
                       "16-byte load in reduce_scatter: .* while the cp.async.bulk that thread .* of another block started");
}
TEST(WrongKernels, SumsOverwritten) {
    expect_told_of_06g(sums_overwritten::stage(), "barrier sums_empty completes phase 1 and nobody has waited for the phase before it");
}
TEST(WrongKernels, SumsSentTooEarly) {
    expect_told_of_06g(sums_sent_too_early::stage(), "cp.async.bulk in reduce_scatter: .* no fence_proxy_async\\(\\) lies between");
}
TEST(WrongKernels, SumsNotTurnedRound) { expect_told_of_06g(sums_not_turned_round::stage(), "dQ"); }
TEST(WrongKernels, NextKeysLoadedTooEarly) { expect_told_of_06g(next_keys_loaded_too_early::stage(), "k_empty|has yet to read it"); }

}  // namespace
