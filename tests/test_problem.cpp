#include "attention/problem.hpp"

#include "attention/mask.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <functional>
#include <limits>
#include <set>

namespace workbook {
namespace {

using ::testing::IsSubstring;

// The message with which check() refuses a valid problem after `change`; empty if it accepts it.
std::string refusal(const std::function<void(Problem&)>& change) {
    Problem problem{.batch = 2, .heads = 6, .kv_heads = 3, .seq = 17, .kv_seq = 33, .head_dim = 64};
    check(problem);
    change(problem);
    try {
        check(problem);
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return {};
}

TEST(Problem, RefusesEachSizeByName) {
    EXPECT_EQ(refusal([](Problem& p) { p.batch = 0; }), "batch = 0: accepted is 1 or more");
    EXPECT_EQ(refusal([](Problem& p) { p.heads = -3; }), "heads = -3: accepted is 1 or more");
    EXPECT_EQ(refusal([](Problem& p) { p.kv_heads = 0; }), "kv_heads = 0: accepted is 1 or more");
    EXPECT_EQ(refusal([](Problem& p) { p.seq = 0; }), "seq = 0: accepted is 1 or more");
    EXPECT_EQ(refusal([](Problem& p) { p.kv_seq = INT_MIN; }), "kv_seq = -2147483648: accepted is 1 or more");
    EXPECT_EQ(refusal([](Problem& p) { p.head_dim = 0; }), "head_dim = 0: accepted are 1 to 256");
    EXPECT_EQ(refusal([](Problem& p) { p.head_dim = 257; }), "head_dim = 257: accepted are 1 to 256");
}

TEST(Problem, AcceptsTheEdges) {
    EXPECT_EQ(refusal([](Problem& p) { p.head_dim = 256; }), "");
    EXPECT_EQ(refusal([](Problem& p) { p = {.batch = 1, .heads = 1, .kv_heads = 1, .seq = 1, .kv_seq = 1, .head_dim = 1}; }), "");
    EXPECT_EQ(refusal([](Problem& p) { p.softmax_scale = 0.f; }), "");
    EXPECT_EQ(refusal([](Problem& p) { p.softmax_scale = -2.f; }), "");
    // 2^10 heads * 2^20 * 2^20 * 2^6 is the largest product that is accepted.
    EXPECT_EQ(refusal([](Problem& p) { p = {.heads = 1024, .kv_heads = 1, .seq = 1 << 20, .kv_seq = 1 << 20, .head_dim = 64}; }), "");
}

// The message with which check() refuses these cu_seqlens of 17 queries and 20 keys; empty if it accepts them.
std::string refusal(const std::vector<int>& q, const std::vector<int>& k, int batch = 1) {
    return refusal([&](Problem& p) {
        p.batch = batch;
        p.seq = 17;
        p.kv_seq = 20;
        p.cu_seqlens_q = q;
        p.cu_seqlens_k = k;
    });
}

TEST(Problem, RefusesBadCuSeqlens) {
    EXPECT_EQ(refusal({0, 5, 5, 17}, {0, 0, 20, 20}), "");
    EXPECT_EQ(refusal({0, 17}, {0, 20}), "");
    EXPECT_EQ(refusal({1, 5, 17}, {0, 5, 20}), "cu_seqlens_q[0] = 1: accepted is 0, where the first sequence begins");
    EXPECT_EQ(refusal({0, 5, 17}, {-1, 5, 20}), "cu_seqlens_k[0] = -1: accepted is 0, where the first sequence begins");
    EXPECT_EQ(refusal({0, 9, 5, 17}, {0, 5, 6, 20}), "cu_seqlens_q[2] = 5: accepted is 9, where sequence 1 begins, or more");
    EXPECT_EQ(refusal({0, 17}, {0, -3}), "cu_seqlens_k[1] = -3: accepted is 0, where sequence 0 begins, or more");
    EXPECT_EQ(refusal({0, 5, 18}, {0, 5, 20}), "cu_seqlens_q[2] = 18: accepted is seq = 17, where the last sequence ends");
    EXPECT_EQ(refusal({0, 5, 17}, {0, 5, 19}), "cu_seqlens_k[2] = 19: accepted is kv_seq = 20, where the last sequence ends");
    const std::string accepted = ": accepted is one more than there are sequences, 2 or more, in both";
    EXPECT_EQ(refusal({0, 5, 17}, {0, 20}), "cu_seqlens_q has 3 entries and cu_seqlens_k has 2 entries" + accepted);
    EXPECT_EQ(refusal({0, 17}, {}), "cu_seqlens_q has 2 entries and cu_seqlens_k has 0 entries" + accepted);
    EXPECT_EQ(refusal({}, {0, 20}), "cu_seqlens_q has 0 entries and cu_seqlens_k has 2 entries" + accepted);
    EXPECT_EQ(refusal({0}, {0}), "cu_seqlens_q has 1 entry and cu_seqlens_k has 1 entry" + accepted);
    EXPECT_EQ(refusal({0, 5, 17}, {0, 5, 20}, 2), "batch = 2: accepted is 1 with cu_seqlens, which hold the sequences of the batch");
}

// Against the definition: j of the same sequence as i, and with causal j - its end <= i - its end.
TEST(Problem, PackedQueriesSeeTheirOwnSequence) {
    Problem p{.heads = 3, .seq = 12, .kv_seq = 10, .cu_seqlens_q = {0, 0, 4, 4, 9, 12}, .cu_seqlens_k = {0, 2, 3, 3, 10, 10}};
    for (const bool causal : {false, true}) {
        p.causal = causal;
        int pairs = 0;
        for (int s = 0; s < 5; ++s)
            for (int i = p.cu_seqlens_q[s]; i < p.cu_seqlens_q[s + 1]; ++i) {
                const Range keys = p.keys_of(i);
                EXPECT_EQ(p.visible_keys(i), keys.end - keys.begin);
                for (int j = 0; j < p.kv_seq; ++j) {
                    const bool own = j >= p.cu_seqlens_k[s] && j < p.cu_seqlens_k[s + 1];
                    const bool sees = own && (!causal || j - p.cu_seqlens_k[s + 1] <= i - p.cu_seqlens_q[s + 1]);
                    pairs += own;
                    EXPECT_EQ(j >= keys.begin && j < keys.end, sees) << i << ", " << j;
                    const Range queries = p.queries_of(j);
                    EXPECT_EQ(i >= queries.begin && i < queries.end, sees) << i << ", " << j;
                }
            }
        EXPECT_EQ(p.pairs(), 3 * pairs);
    }
    const std::vector<Problem> each = p.sequences();
    ASSERT_EQ(each.size(), 5u);
    EXPECT_EQ(describe(each[3]), "B=1 Hq=3 Hkv=1 Nq=5 Nkv=7 d=64 f32 causal");
    EXPECT_EQ(each[4].kv_seq, 0);
    EXPECT_EQ(Problem{}.sequences().size(), 1u);
}

TEST(Problem, DescribesPackedBatches) {
    Problem p{.seq = 12, .kv_seq = 10, .cu_seqlens_q = {0, 4, 12}, .cu_seqlens_k = {0, 3, 10}};
    EXPECT_EQ(describe(p), "B=1 Hq=1 Hkv=1 Nq=12 Nkv=10 d=64 f32 cu_seqlens_q=0,4,12 cu_seqlens_k=0,3,10");
    p = {.seq = 45, .kv_seq = 45};
    for (int s = 0, end = 0; s <= 9; end += ++s) p.cu_seqlens_q.push_back(end);
    p.cu_seqlens_k = p.cu_seqlens_q;
    EXPECT_EQ(describe(p), "B=1 Hq=1 Hkv=1 Nq=45 Nkv=45 d=64 f32 9 sequences of 1 to 9 queries and keys");
    p.cu_seqlens_k = {0, 45, 45, 45, 45, 45, 45, 45, 45, 45};
    EXPECT_EQ(describe(p), "B=1 Hq=1 Hkv=1 Nq=45 Nkv=45 d=64 f32 9 sequences of 1 to 9 queries and 0 to 45 keys");
}

TEST(Problem, RefusesHeadsThatDoNotDivide) {
    EXPECT_EQ(
        refusal([](Problem& p) { p.kv_heads = 4; }),
        "heads = 6 is not a multiple of kv_heads = 4: each key/value head serves heads / kv_heads query heads (1, 2, 3 or 6 are accepted "
        "for kv_heads)");
    EXPECT_PRED_FORMAT2(IsSubstring, "(1 is accepted for kv_heads)", refusal([](Problem& p) { p.heads = 1; }));
    EXPECT_PRED_FORMAT2(IsSubstring, "heads = 6 is not a multiple of kv_heads = 12", refusal([](Problem& p) { p.kv_heads = 12; }));
}

TEST(Problem, RefusesScalesThatAreNotFinite) {
    EXPECT_EQ(refusal([](Problem& p) { p.softmax_scale = std::numeric_limits<float>::infinity(); }),
              "scale = inf: accepted is any finite number");
    EXPECT_PRED_FORMAT2(IsSubstring, "scale = nan", refusal([](Problem& p) { p.softmax_scale = std::nanf(""); }));
}

TEST(Problem, RefusesWhatOverflowsByteCounts) {
    EXPECT_PRED_FORMAT2(IsSubstring, "1 * 1024 * 1048576 * 1048576 * 65: accepted is a product of at most 2^56",
                        refusal([](Problem& p) { p = {.heads = 1024, .kv_heads = 1, .seq = 1 << 20, .kv_seq = 1 << 20, .head_dim = 65}; }));
    // Each pair of factors overflows 64 bits at once: the check itself must not.
    EXPECT_PRED_FORMAT2(IsSubstring, "at most 2^56", refusal([](Problem& p) {
                            p = {.batch = INT_MAX, .heads = INT_MAX, .kv_heads = 1, .seq = INT_MAX, .kv_seq = INT_MAX, .head_dim = 256};
                        }));
}

TEST(Problem, ScaleDefaultsToTheInverseRootOfTheHeadDimension) {
    EXPECT_EQ((Problem{.head_dim = 64}.scale()), 0.125f);
    EXPECT_EQ((Problem{.head_dim = 80}.scale()), static_cast<float>(1 / std::sqrt(80.0)));
    EXPECT_EQ((Problem{.head_dim = 64, .softmax_scale = -0.5f}.scale()), -0.5f);
}

TEST(Problem, CountsDoNotOverflow) {
    const Problem problem{.batch = 64, .heads = 64, .kv_heads = 32, .seq = 1 << 20, .kv_seq = 1 << 19, .head_dim = 128};
    EXPECT_EQ(problem.rows(), 1ll << 32);
    EXPECT_EQ(problem.q_elements(), 1ll << 39);
    EXPECT_EQ(problem.kv_elements(), 1ll << 37);
}

TEST(Problem, CausalIsAlignedToTheBottomRight) {
    // The two examples of FlashAttention 2.1's change log: 2 x 5 and 5 x 2.
    const Problem wide{.seq = 2, .kv_seq = 5, .causal = true};
    EXPECT_EQ(wide.visible_keys(0), 4);
    EXPECT_EQ(wide.visible_keys(1), 5);
    const Problem tall{.seq = 5, .kv_seq = 2, .causal = true};
    const int seen[5] = {0, 0, 0, 1, 2};
    for (int i = 0; i < 5; ++i) EXPECT_EQ(tall.visible_keys(i), seen[i]) << i;
    EXPECT_EQ((Problem{.seq = 5, .kv_seq = 2}.visible_keys(0)), 2);
    EXPECT_EQ((Problem{.seq = INT_MAX, .kv_seq = 1, .causal = true}.visible_keys(0)), 0);
    EXPECT_EQ((Problem{.seq = 1, .kv_seq = INT_MAX, .causal = true}.visible_keys(0)), INT_MAX);
}

TEST(Problem, PackedStridesReachEachElementOnce) {
    for (Layout layout : {Layout::bhnd, Layout::bnhd}) {
        const Problem p{.batch = 2, .heads = 6, .kv_heads = 3, .seq = 5, .kv_seq = 7, .head_dim = 4, .layout = layout};
        const auto reached = [&](const Strides& s, int heads, int rows) {
            std::set<long long> places;
            for (int b = 0; b < p.batch; ++b)
                for (int h = 0; h < heads; ++h)
                    for (int i = 0; i < rows; ++i)
                        for (int c = 0; c < p.head_dim; ++c) places.insert(b * s[0] + h * s[1] + i * s[2] + c);
            return places;
        };
        const auto q = reached(p.q_strides(), p.heads, p.seq), kv = reached(p.kv_strides(), p.kv_heads, p.kv_seq);
        EXPECT_EQ(static_cast<long long>(q.size()), p.q_elements());
        EXPECT_EQ(*q.rbegin(), p.q_elements() - 1);
        EXPECT_EQ(static_cast<long long>(kv.size()), p.kv_elements());
        EXPECT_EQ(*kv.rbegin(), p.kv_elements() - 1);
        // What tells the two layouts apart: the neighbour in memory is the next row, or the next head.
        EXPECT_EQ(p.q_strides()[layout == Layout::bhnd ? 2 : 1], 4);
        EXPECT_EQ(p.kv_strides()[layout == Layout::bhnd ? 1 : 2], layout == Layout::bhnd ? 28 : 12);
    }
}

TEST(Problem, DescribesItself) {
    Problem problem{.heads = 4, .kv_heads = 1, .seq = 300, .kv_seq = 517, .head_dim = 128, .dtype = DType::bf16, .causal = true};
    EXPECT_EQ(describe(problem), "B=1 Hq=4 Hkv=1 Nq=300 Nkv=517 d=128 bf16 causal");
    problem.causal = false;
    problem.softmax_scale = 0.25f;
    problem.layout = Layout::bnhd;
    EXPECT_EQ(describe(problem), "B=1 Hq=4 Hkv=1 Nq=300 Nkv=517 d=128 bf16 scale=0.25 bnhd");
}

TEST(Problem, WordsOfTypesAndLayouts) {
    for (DType type : {DType::f32, DType::f16, DType::bf16}) EXPECT_EQ(parse_dtype(name(type)), type);
    EXPECT_EQ(size_of(DType::f32), 4u);
    EXPECT_EQ(size_of(DType::f16), 2u);
    EXPECT_EQ(size_of(DType::bf16), 2u);
    for (DType type : {DType::f32, DType::f16, DType::bf16})
        with_type(type, [&]<class T>() {
            EXPECT_EQ(dtype_of<T>, type);
            EXPECT_EQ(sizeof(T), size_of(type));
        });
    EXPECT_EQ(parse_layout("bhnd"), Layout::bhnd);
    EXPECT_EQ(parse_layout("bnhd"), Layout::bnhd);
    const auto message = [](auto parse, const char* word) {
        try {
            parse(word);
        } catch (const InvalidArgument& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    EXPECT_EQ(message(parse_dtype, "float16"), "dtype = \"float16\": accepted are f32, f16 and bf16");
    EXPECT_PRED_FORMAT2(IsSubstring, "dtype = \"\"", message(parse_dtype, ""));
    EXPECT_PRED_FORMAT2(IsSubstring, "layout = \"BHND\": accepted are bhnd", message(parse_layout, "BHND"));
}

TEST(Mask, RowsAndKeysSeeEachOther) {
    for (const auto& [seq, kv_seq] : {std::pair{5, 5}, {3, 8}, {8, 3}, {1, 4}})
        for (const bool causal : {false, true}) {
            const Problem p{.seq = seq, .kv_seq = kv_seq, .causal = causal};
            const Mask mask(p);
            for (int i = 0; i < seq; ++i) EXPECT_EQ(mask.visible(i, kv_seq), p.visible_keys(i));
            for (int i0 = 0; i0 <= seq; ++i0)
                for (const int rows : {1, 2, 100}) {
                    int keys = 0;
                    for (int i = i0; i < std::min(i0 + rows, seq); ++i) keys = std::max(keys, p.visible_keys(i));
                    EXPECT_EQ(mask.blocks(i0, rows, seq, 3, kv_seq), (keys + 2) / 3) << rows << " rows from " << i0 << " on";
                }
            for (int j = 0; j < kv_seq; ++j)
                for (int i = 0; i < seq; ++i) {
                    EXPECT_EQ(mask.hides(i, j), j >= p.visible_keys(i));
                    EXPECT_EQ(i < mask.first_row(j), mask.hides(i, j)) << "row " << i << ", key " << j;
                }
        }
}

}  // namespace
}  // namespace workbook
