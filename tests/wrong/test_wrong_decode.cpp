// Wrong kernels of appendix A: see CMakeLists.txt beside this file for the mistakes.
#include "stage_suite.hpp"

#include <regex>

#define WRONG_KERNELS(X)           \
    X(parts_not_rescaled)          \
    X(maximum_of_part_in_scores)   \
    X(lse_of_parts_in_log2)        \
    X(last_split_not_masked)       \
    X(eight_splits_merged)         \
    X(block_table_ignored)         \
    X(heads_and_queries_exchanged) \
    X(slot_reused_without_barrier) \
    X(tile_awaited_too_weakly)     \
    X(parts_over_the_ring)         \
    X(kernel_before_not_awaited)   \
    X(parts_merged_too_early)

#define DECLARE(name)               \
    namespace name {                \
    const workbook::Stage& stage(); \
    }
WRONG_KERNELS(DECLARE)

namespace {

using namespace workbook;

/// Expects the mistake to be told in words that match `pattern`, under every schedule. The paged variant has all of them.
/// @param sms 132 for many splits, 1 for one
void expect_told(const Stage& stage, int kv_seq, const std::string& pattern, int sms = 132) {
    const Problem p{
        .batch = 2, .heads = 4, .kv_heads = 2, .seq = 3, .kv_seq = kv_seq, .head_dim = 64, .dtype = DType::f16, .page_size = 16};
    Device device = Device::current();
    device.sms = sms;
    TestCase test(p, 1, Distribution::normal, device);
    under_every_schedule(test, [&] {
        std::string text;
        try {
            const Run run = run_variant(stage, stage.variants.back(), test.setup);
            text = run.report.status == "ok" ? "ok" : run.report.reason;
        } catch (const std::exception& error) {
            text = error.what();
        }
        EXPECT_TRUE(std::regex_search(text, std::regex(pattern, std::regex::icase))) << text;
    });
}

TEST(WrongDecode, PartsNotRescaled) { expect_told(parts_not_rescaled::stage(), 600, "O: .* are off"); }
TEST(WrongDecode, MaximumOfPartInScores) { expect_told(maximum_of_part_in_scores::stage(), 600, "O: .* are off"); }
TEST(WrongDecode, LseOfPartsInLog2) { expect_told(lse_of_parts_in_log2::stage(), 600, "LSE is in base 2"); }
TEST(WrongDecode, LastSplitNotMasked) { expect_told(last_split_not_masked::stage(), 600, "past the end"); }
TEST(WrongDecode, EightSplitsMerged) { expect_told(eight_splits_merged::stage(), 2000, "O: .* are off"); }
TEST(WrongDecode, BlockTableIgnored) { expect_told(block_table_ignored::stage(), 608, "O: .* are off"); }
TEST(WrongDecode, HeadsAndQueriesExchanged) { expect_told(heads_and_queries_exchanged::stage(), 600, "O: .* are off"); }
TEST(WrongDecode, SlotReusedWithoutBarrier) { expect_told(slot_reused_without_barrier::stage(), 900, "split_kv: .*__syncthreads", 1); }
TEST(WrongDecode, TileAwaitedTooWeakly) {
    expect_told(tile_awaited_too_weakly::stage(), 900, "ldmatrix.x4 in split_kv: .* still under way", 1);
}
TEST(WrongDecode, KernelBeforeNotAwaited) {
    expect_told(kernel_before_not_awaited::stage(), 600, "merge_splits is launched early: .* accesses m before griddepcontrol_wait");
}
TEST(WrongDecode, PartsOverTheRing) { expect_told(parts_over_the_ring::stage(), 600, "split_kv: .*__syncthreads"); }
TEST(WrongDecode, PartsMergedTooEarly) { expect_told(parts_merged_too_early::stage(), 600, "split_kv: .*__syncthreads"); }

}  // namespace
