// Wrong kernels of appendix B: see CMakeLists.txt beside this file for the mistakes.
#include "stage_suite.hpp"

#include <regex>

#define WRONG_KERNELS(X)                      \
    X(rows_of_the_next_sequence_written)      \
    X(keys_of_the_next_sequence_read)         \
    X(keys_of_all_sequences_read)             \
    X(causal_offset_of_the_batch)             \
    X(row_counted_from_the_batch)             \
    X(lse_of_the_first_rows)                  \
    X(last_tile_forgotten)                    \
    X(gradients_of_the_first_keys)            \
    X(causal_offset_of_the_batch_in_backward) \
    X(block_of_two_sequences)

#define DECLARE(name)               \
    namespace name {                \
    const workbook::Stage& stage(); \
    }
WRONG_KERNELS(DECLARE)

namespace {

using namespace workbook;

Problem batch(bool causal) {
    return {.heads = 2,
            .kv_heads = 1,
            .seq = 160,
            .kv_seq = 190,
            .head_dim = 64,
            .dtype = DType::f16,
            .causal = causal,
            .cu_seqlens_q = {0, 20, 20, 120, 160},
            .cu_seqlens_k = {0, 40, 43, 103, 190}};
}

/// Expects the mistake to be told in words that match `pattern`. Thread blocks that write the same rows may hide it from the results, where
/// the right one comes last, but not from the count of bytes.
template <class Launch>
void expect_told(Launch launch, const std::string& pattern) {
    std::string text;
    try {
        const Report report = launch();
        text = report.status != "ok" ? report.reason : *report.as_predicted() ? "ok" : "other bytes than predicted";
    } catch (const std::exception& error) {
        text = error.what();
    }
    EXPECT_TRUE(std::regex_search(text, std::regex(pattern, std::regex::icase))) << text;
}

void expect_forward_told(const Stage& stage, bool causal, const std::string& pattern) {
    const TestCase test(batch(causal));
    expect_told([&] { return run_variant(stage, stage.variants[0], test.setup).report; }, pattern);
}

void expect_backward_told(const Stage& stage, bool causal, const std::string& pattern) {
    BackwardTestCase test(batch(causal));
    expect_told([&] { return run_variant(stage, stage.backward[0], test.setup, test.backward).report; }, pattern);
}

TEST(WrongVarlen, RowsOfTheNextSequenceWritten) {
    expect_forward_told(rows_of_the_next_sequence_written::stage(), false, "O: .* are off|other bytes");
}
TEST(WrongVarlen, KeysOfTheNextSequenceRead) {
    expect_forward_told(keys_of_the_next_sequence_read::stage(), false, "keys past the end of a sequence .*64 keys a tile");
}
TEST(WrongVarlen, KeysOfAllSequencesRead) {
    expect_forward_told(keys_of_all_sequences_read::stage(), false, "sees the keys of all sequences");
}
TEST(WrongVarlen, CausalOffsetOfTheBatch) {
    expect_forward_told(causal_offset_of_the_batch::stage(), true, "aligned with the offset Nkv - Nq of the whole batch");
}
TEST(WrongVarlen, RowCountedFromTheBatch) { expect_forward_told(row_counted_from_the_batch::stage(), false, "O was never written"); }
TEST(WrongVarlen, LseOfTheFirstRows) { expect_forward_told(lse_of_the_first_rows::stage(), false, "LSE was never written"); }
TEST(WrongVarlen, LastTileForgotten) { expect_forward_told(last_tile_forgotten::stage(), false, "O was never written: rows"); }
TEST(WrongVarlen, GradientsOfTheFirstKeys) {
    expect_backward_told(gradients_of_the_first_keys::stage(), false, "dK: .* (off|never written)");
}
TEST(WrongVarlen, CausalOffsetOfTheBatchInBackward) {
    expect_backward_told(causal_offset_of_the_batch_in_backward::stage(), true, "d[QKV]: .* are off");
}
TEST(WrongVarlen, BlockOfTwoSequences) { expect_backward_told(block_of_two_sequences::stage(), false, "dQ: .* are off"); }

}  // namespace
