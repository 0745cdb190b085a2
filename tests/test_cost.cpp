#include "attention/cost.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

namespace workbook {
namespace {

// Bytes counted access by access, in the order of first touch: what the closed forms must equal.
class Counter {
public:
    void read(const char* tensor, long long bytes) { row(tensor).read += bytes; }
    void write(const char* tensor, long long bytes) { row(tensor).written += bytes; }
    const TensorTraffic& of(const std::string& tensor) const {
        static const TensorTraffic none;
        const auto found = rows_.find(tensor);
        return found == rows_.end() ? none : found->second;
    }
    std::size_t size() const { return rows_.size(); }

private:
    TensorTraffic& row(const char* tensor) { return rows_[tensor]; }
    std::map<std::string, TensorTraffic> rows_;
};

void expect_equal(const Counter& counted, const Traffic& formula) {
    EXPECT_EQ(counted.size(), formula.tensors.size());
    long long read = 0, written = 0;
    for (const TensorTraffic& t : formula.tensors) {
        EXPECT_EQ(t.read, counted.of(t.tensor).read) << t.tensor;
        EXPECT_EQ(t.written, counted.of(t.tensor).written) << t.tensor;
        read += t.read;
        written += t.written;
    }
    EXPECT_EQ(formula.read(), read);
    EXPECT_EQ(formula.written(), written);
    EXPECT_EQ(formula.total(), read + written);
}

std::vector<std::string> names(const Traffic& traffic) {
    std::vector<std::string> list;
    for (const TensorTraffic& t : traffic.tensors) list.push_back(t.tensor);
    return list;
}

const std::vector<Problem> problems = {
    {.batch = 2, .heads = 6, .kv_heads = 2, .seq = 5, .kv_seq = 9, .head_dim = 8, .dtype = DType::f16},
    {.batch = 1, .heads = 1, .kv_heads = 1, .seq = 1, .kv_seq = 1, .head_dim = 1, .dtype = DType::f32},
    {.batch = 3, .heads = 2, .kv_heads = 1, .seq = 11, .kv_seq = 4, .head_dim = 3, .dtype = DType::f32, .causal = true},
    {.batch = 1, .heads = 4, .kv_heads = 4, .seq = 7, .kv_seq = 8, .head_dim = 16, .dtype = DType::bf16, .causal = true},
};

TEST(Cost, NaiveRequestsWhatItsThreeKernelsAskFor) {
    for (const Problem& p : problems) {
        SCOPED_TRACE(describe(p));
        const long long es = size_of(p.dtype);
        Counter count;
        for (long long row = 0; row < p.rows(); ++row) {
            for (int c = 0; c < p.head_dim; ++c) count.read("Q", es);
            for (int j = 0; j < p.kv_seq; ++j) {
                for (int c = 0; c < p.head_dim; ++c) count.read("K", es);
                count.write("S", es);
            }
            for (int j = 0; j < p.kv_seq; ++j) count.read("S", es);  // maximum
            for (int j = 0; j < p.kv_seq; ++j) count.read("S", es);  // sum
            for (int j = 0; j < p.kv_seq; ++j) {                     // normalisation
                count.read("S", es);
                count.write("P", es);
            }
            count.write("LSE", 4);
            for (int j = 0; j < p.kv_seq; ++j) {
                count.read("P", es);
                for (int c = 0; c < p.head_dim; ++c) count.read("V", es);
            }
            for (int c = 0; c < p.head_dim; ++c) count.write("O", es);
        }
        const Movement movement = naive_movement(p);
        expect_equal(count, movement.requested);
        EXPECT_EQ(names(movement.requested), (std::vector<std::string>{"Q", "K", "V", "S", "P", "O", "LSE"}));
        EXPECT_EQ(movement.dram.total(), compulsory_traffic(p).total() + 4 * p.rows() * p.kv_seq * es);  // S and P out and in
        EXPECT_EQ(names(movement.dram), names(movement.requested));
    }
}

TEST(Cost, OnlineSoftmaxIsNaiveWithoutScoresAndWeights) {
    for (const Problem& p : problems) {
        const Movement naive = naive_movement(p), online = online_softmax_movement(p);
        EXPECT_EQ(names(online.requested), (std::vector<std::string>{"Q", "K", "V", "O", "LSE"}));
        for (const TensorTraffic& t : online.requested.tensors) {
            const auto same = std::find_if(naive.requested.tensors.begin(), naive.requested.tensors.end(),
                                           [&](const TensorTraffic& other) { return other.tensor == t.tensor; });
            EXPECT_EQ(t.read, same->read);
            EXPECT_EQ(t.written, same->written);
        }
        EXPECT_EQ(online.dram.total(), compulsory_traffic(p).total());
    }
}

TEST(Cost, BackwardFlopsAreFiveProducts) {
    const Problem p{.batch = 2, .heads = 3, .kv_heads = 3, .seq = 10, .kv_seq = 20, .head_dim = 8};
    EXPECT_EQ(product_flops(p, 1), 2.0 * 2 * 3 * 10 * 20 * 8);
    EXPECT_EQ(product_flops(p, 2), forward_flops(p));
    EXPECT_EQ(backward_flops(p), 2.5 * forward_flops(p));
    Problem causal = p;
    causal.causal = true;
    EXPECT_EQ(backward_flops(causal), backward_flops(p) / 2);
}

TEST(Cost, StandardBackwardCountsEveryAccess) {
    for (const Problem& p : problems) {
        const long long es = size_of(p.dtype), row_bytes = p.head_dim * es;
        Counter count;
        for (long long row = 0; row < p.rows(); ++row) {
            count.read("O", row_bytes);  // D
            count.read("dO", row_bytes);
            count.write("D", 4);
            count.read("dO", row_bytes);  // dP, of which a row stays in registers
            count.read("D", 32 * 4);      // dS
            count.write("dQ", row_bytes);
            for (int j = 0; j < p.kv_seq; ++j) {
                count.read("V", row_bytes);  // dP
                count.write("dP", es);
                count.read("P", es);  // dS
                count.read("dP", es);
                count.write("dS", es);
                count.read("dS", es);  // dQ
                count.read("K", row_bytes);
                count.read("P", es);  // dV
                count.read("dO", row_bytes);
                count.read("dS", es);  // dK
                count.read("Q", row_bytes);
            }
        }
        count.write("dK", p.kv_elements() * es);
        count.write("dV", p.kv_elements() * es);
        const Movement movement = standard_backward_movement(p);
        expect_equal(count, movement.requested);
        EXPECT_EQ(names(movement.dram), names(movement.requested));
        EXPECT_EQ(movement.dram.tensors[6].read, 2 * p.rows() * p.kv_seq * es);  // P: for dS and for dV
    }
}

TEST(Cost, RecomputeBackwardCountsEveryVisit) {
    for (Problem p : problems)
        for (const bool causal : {false, true})
            for (const Tiles& tiles : {Tiles{1, 1}, Tiles{2, 4}, Tiles{4, 3}, Tiles{16, 64}})
                for (const DqBy dq : {DqBy::atomics, DqBy::own_pass}) {
                    p.causal = causal;
                    SCOPED_TRACE(describe(p) + " Br=" + std::to_string(tiles.Br) + " Bc=" + std::to_string(tiles.Bc));
                    const long long es = size_of(p.dtype), row_bytes = p.head_dim * es;
                    const auto sees = [&](int i, int j) { return j < p.visible_keys(i); };
                    Counter count;
                    count.read("O", p.q_elements() * es);
                    count.read("dO", p.q_elements() * es);
                    count.write("D", p.rows() * 4);
                    if (dq == DqBy::atomics) count.write("dQ_acc", p.q_elements() * 4);
                    count.read("K", p.kv_elements() * es);
                    count.read("V", p.kv_elements() * es);
                    for (long long head = 0; head < static_cast<long long>(p.batch) * p.heads; ++head)
                        for (int j0 = 0; j0 < p.kv_seq; j0 += tiles.Bc)
                            for (int i0 = 0; i0 < p.seq; i0 += tiles.Br) {
                                const int end = std::min(i0 + tiles.Br, p.seq);
                                if (!sees(end - 1, j0)) continue;
                                for (int i = i0; i < end; ++i) {
                                    count.read("Q", row_bytes);
                                    count.read("dO", row_bytes);
                                    count.read("LSE", 16 * 4);
                                    count.read("D", 16 * 4);
                                    if (dq == DqBy::own_pass) continue;
                                    count.read("dQ_acc", p.head_dim * 4);
                                    count.write("dQ_acc", p.head_dim * 4);
                                }
                            }
                    if (dq == DqBy::atomics) count.read("dQ_acc", p.q_elements() * 4);
                    if (dq == DqBy::own_pass)
                        for (long long head = 0; head < static_cast<long long>(p.batch) * p.heads; ++head)
                            for (int i0 = 0; i0 < p.seq; i0 += tiles.Br) {
                                const int end = std::min(i0 + tiles.Br, p.seq);
                                if (!sees(end - 1, 0)) continue;
                                count.read("Q", (end - i0) * row_bytes);
                                count.read("dO", (end - i0) * row_bytes);
                                count.read("LSE", (end - i0) * 16 * 4);
                                count.read("D", (end - i0) * 16 * 4);
                                for (int j0 = 0; j0 < p.kv_seq && sees(end - 1, j0); j0 += tiles.Bc) {
                                    count.read("K", (std::min(j0 + tiles.Bc, p.kv_seq) - j0) * row_bytes);
                                    count.read("V", (std::min(j0 + tiles.Bc, p.kv_seq) - j0) * row_bytes);
                                }
                            }
                    count.write("dQ", p.q_elements() * es);
                    count.write("dK", p.kv_elements() * es);
                    count.write("dV", p.kv_elements() * es);
                    const Movement movement = recompute_backward_movement(p, tiles, 16, dq);
                    expect_equal(count, movement.requested);
                    EXPECT_EQ(names(movement.dram), names(movement.requested));
                }
    EXPECT_THROW(recompute_backward_movement(problems[0], {0, 4}, 16, DqBy::atomics), InvalidArgument);
    EXPECT_THROW(recompute_backward_movement(problems[0], {4, 0}, 16, DqBy::own_pass), InvalidArgument);
}

TEST(Cost, BulkBackwardCountsEveryVisit) {
    for (Problem p : problems)
        for (const bool causal : {false, true})
            for (const Tiles& tiles : {Tiles{2, 4}, Tiles{4, 3}, Tiles{16, 64}})
                for (const bool ordered : {false, true}) {
                    p.causal = causal;
                    SCOPED_TRACE(describe(p) + " Br=" + std::to_string(tiles.Br) + " Bc=" + std::to_string(tiles.Bc));
                    const long long es = size_of(p.dtype), d = p.head_dim, sums = tiles.Br * d * 4;
                    Counter count;
                    count.read("K", p.kv_elements() * es);
                    count.read("V", p.kv_elements() * es);
                    count.read("O", p.q_elements() * es);
                    count.read("dO", p.q_elements() * es);
                    count.read("LSE", p.rows() * 4);
                    for (long long head = 0; head < static_cast<long long>(p.batch) * p.heads; ++head) {
                        for (int i0 = 0; i0 < p.seq; i0 += tiles.Br) {
                            const int rows = std::min(tiles.Br, p.seq - i0);
                            count.write("LSE_D", 2 * tiles.Br * 4);
                            count.write("dQ_acc", sums);
                            if (ordered) count.write("dQ_turn", 16);
                            for (int j0 = 0; j0 < p.kv_seq; j0 += tiles.Bc) {
                                if (j0 >= p.visible_keys(i0 + rows - 1)) continue;
                                count.read("Q", rows * d * es);
                                count.read("dO", rows * d * es);
                                count.read("LSE_D", 2 * tiles.Br * 4);
                                count.read("dQ_acc", sums);
                                count.write("dQ_acc", sums);
                                if (!ordered) continue;
                                count.read("dQ_turn", 16);  // to wait
                                count.read("dQ_turn", 16);  // and to add
                                count.write("dQ_turn", 16);
                            }
                        }
                        count.read("dQ_acc", (p.seq + 1) / 2 * 2 * d * 4);
                    }
                    count.write("dQ", p.q_elements() * es);
                    count.write("dK", p.kv_elements() * es);
                    count.write("dV", p.kv_elements() * es);
                    const Movement movement = bulk_backward_movement(p, tiles, ordered);
                    expect_equal(count, movement.requested);
                    EXPECT_EQ(names(movement.dram), names(movement.requested));
                }
    EXPECT_THROW(bulk_backward_movement(problems[0], {0, 4}, false), InvalidArgument);
}

TEST(Cost, ExchangeCountsEveryVisit) {
    for (Problem p : problems)
        for (const Tiles& tiles : {Tiles{2, 4}, Tiles{4, 3}, Tiles{16, 64}}) {
            p.causal = false;
            SCOPED_TRACE(describe(p) + " Br=" + std::to_string(tiles.Br) + " Bc=" + std::to_string(tiles.Bc));
            const long long es = size_of(p.dtype), d = p.head_dim, sums = tiles.Br * d * 4;
            Counter count;
            for (long long head = 0; head < static_cast<long long>(p.batch) * p.kv_heads; ++head)
                for (int j = 0; j < p.kv_seq; ++j) {  // by its own block, half of it by the other one
                    count.read("K", d * es * 3 / 2);
                    count.read("V", d * es);
                }
            count.read("O", p.q_elements() * es);
            count.read("dO", p.q_elements() * es);
            count.read("LSE", p.rows() * 4);
            for (long long head = 0; head < static_cast<long long>(p.batch) * p.heads; ++head) {
                for (int i0 = 0; i0 < p.seq; i0 += tiles.Br) {
                    const int rows = std::min(tiles.Br, p.seq - i0);
                    count.write("LSE_D", 2 * tiles.Br * 4);
                    count.write("dQ_acc", sums);
                    for (int j0 = 0; j0 < p.kv_seq; j0 += 2 * tiles.Bc)
                        for (int block = 0; block < 2; ++block) {
                            count.read("Q", rows * d * es);
                            count.read("dO", rows * d * es);
                            count.read("LSE_D", 2 * tiles.Br * 4);
                            count.read("dQ_acc", sums / 2);
                            count.write("dQ_acc", sums / 2);
                        }
                }
                count.read("dQ_acc", (p.seq + 1) / 2 * 2 * d * 4);
            }
            count.write("dQ", p.q_elements() * es);
            count.write("dK", p.kv_elements() * es);
            count.write("dV", p.kv_elements() * es);
            const Movement movement = exchange_movement(p, tiles);
            expect_equal(count, movement.requested);
            EXPECT_EQ(names(movement.dram), names(movement.requested));
        }
    Problem causal = problems[0];
    causal.causal = true;
    EXPECT_THROW(exchange_movement(causal, {2, 4}), InvalidArgument);
}

TEST(Cost, ReduceScatterCountsEveryVisit) {
    for (Problem p : problems)
        for (const int cluster : {2, 4}) {
            p.causal = false;
            const Tiles tiles{4, (p.kv_seq + cluster - 1) / cluster};
            SCOPED_TRACE(describe(p) + " cluster=" + std::to_string(cluster));
            const long long es = size_of(p.dtype), d = p.head_dim;
            Counter count;
            count.read("K", p.kv_elements() * es * 3 / 2);  // by its own block, half of it by the other one of the pair
            count.read("V", p.kv_elements() * es);
            count.read("O", p.q_elements() * es);
            count.read("dO", p.q_elements() * es);
            count.read("LSE", p.rows() * 4);
            for (long long head = 0; head < static_cast<long long>(p.batch) * p.heads; ++head)
                for (int i0 = 0; i0 < p.seq; i0 += tiles.Br) {
                    const int rows = std::min(tiles.Br, p.seq - i0);
                    count.write("LSE_D", 2 * tiles.Br * 4);
                    for (int block = 0; block < cluster; ++block) {
                        count.read("Q", rows * d * es);
                        count.read("dO", rows * d * es);
                        count.read("LSE_D", 2 * tiles.Br * 4);
                    }
                }
            count.write("dQ", p.q_elements() * es);
            count.write("dK", p.kv_elements() * es);
            count.write("dV", p.kv_elements() * es);
            const Movement movement = reduce_scatter_movement(p, tiles, cluster);
            expect_equal(count, movement.requested);
            EXPECT_EQ(names(movement.dram), names(movement.requested));
            EXPECT_THROW(reduce_scatter_movement(p, {4, p.kv_seq / cluster - 1}, cluster), InvalidArgument);
        }
    Problem causal = problems[0];
    causal.causal = true;
    EXPECT_THROW(reduce_scatter_movement(causal, {2, causal.kv_seq}, 2), InvalidArgument);
}

TEST(Cost, Flash1MovesWhatAlgorithm1Moves) {
    for (const Problem& p : problems) {
        const long long es = size_of(p.dtype);
        for (const Tiles& tiles : {Tiles{1, 1}, Tiles{2, 4}, Tiles{4, 3}, Tiles{8, 9}, Tiles{16, 64}}) {
            SCOPED_TRACE(describe(p) + " Bc=" + std::to_string(tiles.Bc));
            Counter count;
            for (long long head = 0; head < static_cast<long long>(p.batch) * p.heads; ++head)
                for (int first = 0; first < p.kv_seq; first += tiles.Bc) {
                    const bool is_first = first == 0, is_last = first + tiles.Bc >= p.kv_seq;
                    for (int j = first; j < std::min(first + tiles.Bc, p.kv_seq); ++j) {
                        count.read("K", p.head_dim * es);
                        count.read("V", p.head_dim * es);
                    }
                    for (int i = 0; i < p.seq; ++i) {
                        count.read("Q", p.head_dim * es);
                        if (!is_first) {
                            count.read("O_acc", p.head_dim * 4);
                            count.read("l", 4);
                            count.read("m", 4);
                        }
                        if (is_last) {
                            count.write("O", p.head_dim * es);
                            count.write("LSE", 4);
                        } else {
                            count.write("O_acc", p.head_dim * 4);
                            count.write("l", 4);
                            count.write("m", 4);
                        }
                    }
                }
            const Movement movement = flash1_movement(p, tiles);
            expect_equal(count, movement.requested);
            expect_equal(count, movement.dram);
        }
    }
    EXPECT_EQ(names(flash1_movement(problems[0], {4, 9}).requested), (std::vector<std::string>{"Q", "K", "V", "O", "LSE"}));
    EXPECT_EQ(names(flash1_movement(problems[0], {4, 8}).requested),
              (std::vector<std::string>{"Q", "K", "V", "O_acc", "l", "m", "O", "LSE"}));
    EXPECT_THROW(flash1_movement(problems[0], {4, 0}), InvalidArgument);
}

TEST(Cost, Fp8CountsEveryVisit) {
    const std::vector<Problem> cases = {
        {.batch = 2, .heads = 6, .kv_heads = 2, .seq = 300, .kv_seq = 200, .head_dim = 64, .dtype = DType::f16},
        {.batch = 1, .heads = 1, .kv_heads = 1, .seq = 1, .kv_seq = 1, .head_dim = 64, .dtype = DType::bf16},
        {.batch = 1, .heads = 2, .kv_heads = 1, .seq = 500, .kv_seq = 130, .head_dim = 128, .dtype = DType::bf16, .causal = true},
    };
    for (const Problem& p : cases)
        for (const int Br : {64, 192}) {
            SCOPED_TRACE(describe(p) + " Br=" + std::to_string(Br));
            const long long es = size_of(p.dtype), d = p.head_dim;
            Counter count;
            const auto quantise = [&](const std::string& tensor, int written_rows) {
                for (int head = 0; head < p.batch * p.kv_heads; ++head) {
                    count.read(tensor.c_str(), p.kv_seq * d * es);
                    count.write((tensor + "8").c_str(), written_rows * d);
                    for (int i = 0; i < p.kv_seq; i += 64) count.write("KV_scale", tensor == "V" ? 12 : 4);
                }
            };
            quantise("K", p.kv_seq);
            quantise("V", (p.kv_seq + 63) / 64 * 64);
            for (int head = 0; head < p.batch * p.heads; ++head)
                for (int i0 = 0; i0 < p.seq; i0 += Br) {
                    const int visible = p.visible_keys(std::min(i0 + Br, p.seq) - 1);
                    for (int j0 = 0; j0 < visible; j0 += 64) {
                        count.read("K8", std::min(64, p.kv_seq - j0) * d);
                        count.read("V8", 64 * d);
                        count.read("KV_scale", 16);
                    }
                    if (visible > 0) count.read("Q", (std::min(i0 + Br, p.seq) - i0) * d * es);
                }
            for (long long row = 0; row < p.rows(); ++row) {
                count.write("O", d * es);
                count.write("LSE", 4);
            }
            expect_equal(count, fp8_movement(p, Br).requested);
        }
    const Traffic dram = fp8_movement(cases[0], 192).dram;
    EXPECT_EQ(names(dram), (std::vector<std::string>{"Q", "K", "V", "K8", "V8", "KV_scale", "O", "LSE"}));
    for (int made = 3; made < 6; ++made) {  // each is read once
        const TensorTraffic& t = dram.tensors[static_cast<std::size_t>(made)];
        EXPECT_EQ(t.read, t.written) << t.tensor;
    }
    EXPECT_EQ(dram.tensors[4].read, 2 * 2 * 256 * 64);
}

// Walks over the blocks of both kernels.
TEST(Cost, SplitKvCountsEveryBlock) {
    for (const int heads : {4, 12, 40})
        for (const int seq : {1, 3, 8})
            for (const int kv_seq : {1, 64, 100, 1000})
                for (const int Br : {16, 64})
                    for (const int splits : {1, 3}) {
                        const Problem p{.batch = 3,
                                        .heads = heads,
                                        .kv_heads = 4,
                                        .seq = seq,
                                        .kv_seq = kv_seq,
                                        .head_dim = 64,
                                        .dtype = DType::bf16,
                                        .page_size = 32};
                        constexpr int Bc = 64, element = 2, chunk = 16;
                        if (splits > (kv_seq + Bc - 1) / Bc) continue;
                        const int split_keys = ((kv_seq + Bc - 1) / Bc + splits - 1) / splits * Bc;
                        SCOPED_TRACE(describe(p) + " Br=" + std::to_string(Br) + " splits=" + std::to_string(splits));
                        long long q = 0, k = 0, table = 0, part = 0;  // bytes; parts: rows
                        for (int head = 0; head < p.batch * p.kv_heads; ++head)
                            for (int row0 = 0; row0 < heads / 4 * seq; row0 += Br)
                                for (int begin = 0; begin < splits * split_keys; begin += split_keys) {
                                    const int rows = std::min(Br, heads / 4 * seq - row0);
                                    q += rows * p.head_dim * element;
                                    part += rows;
                                    for (int key = begin; key < std::min(begin + split_keys, (kv_seq + Bc - 1) / Bc * Bc); ++key) {
                                        const int chunks = p.head_dim * element / chunk;
                                        table += chunks * 4;
                                        if (key < kv_seq) k += chunks * chunk;
                                    }
                                }
                        const Movement moved = split_kv_movement(p, {Br, Bc, splits, true});
                        std::map<std::string, std::pair<long long, long long>> expected = {{"Q", {q, 0}},
                                                                                           {"K", {k, 0}},
                                                                                           {"V", {k, 0}},
                                                                                           {"table", {table, 0}},
                                                                                           {"O", {0, p.q_elements() * element}},
                                                                                           {"LSE", {0, p.rows() * 4}}};
                        if (splits > 1) {
                            EXPECT_EQ(part, splits * p.rows());
                            expected["O_part"] = {part * p.head_dim * 4, part * p.head_dim * 4};
                            expected["m"] = expected["l"] = {part * (p.head_dim / 4) * 4, part * 4};
                        }
                        EXPECT_EQ(moved.requested.tensors.size(), expected.size());
                        for (const TensorTraffic& t : moved.requested.tensors)
                            EXPECT_EQ(std::pair(t.read, t.written), expected.at(t.tensor)) << t.tensor;
                    }
    const Problem p{.seq = 1, .kv_seq = 1, .head_dim = 64};
    EXPECT_THROW(split_kv_movement(p, {16, 64, 0, false}), InvalidArgument);
    EXPECT_THROW(split_kv_movement(p, {0, 64, 1, false}), InvalidArgument);
}

// A packed batch of sequences of one length moves what the batch moves, and its tables.
TEST(Cost, PackedMovesWhatItsSequencesMove) {
    for (const bool causal : {false, true}) {
        Problem batch{.batch = 3, .heads = 4, .kv_heads = 2, .seq = 9, .kv_seq = 14, .head_dim = 16, .dtype = DType::f16, .causal = causal};
        Problem packed = batch;
        packed.batch = 1;
        packed.seq = 27;
        packed.kv_seq = 42;
        packed.cu_seqlens_q = {0, 9, 9, 18, 27};  // and an empty one
        packed.cu_seqlens_k = {0, 14, 14, 28, 42};
        const Tiles tiles{4, 5};
        EXPECT_EQ(forward_flops(packed), forward_flops(batch));
        EXPECT_EQ(naive_movement(packed).requested.total(), naive_movement(batch).requested.total());
        const auto expect_same = [](const Movement& of_packed, Movement of_batch, const std::vector<TensorTraffic>& asked,
                                    const std::vector<TensorTraffic>& dram) {
            of_batch.requested.tensors.insert(of_batch.requested.tensors.end(), asked.begin(), asked.end());
            of_batch.dram.tensors.insert(of_batch.dram.tensors.end(), dram.begin(), dram.end());
            for (Traffic Movement::*traffic : {&Movement::requested, &Movement::dram}) {
                const auto &a = (of_packed.*traffic).tensors, &b = (of_batch.*traffic).tensors;
                ASSERT_EQ(a.size(), b.size());
                for (std::size_t t = 0; t < a.size(); ++t) {
                    EXPECT_EQ(a[t].tensor, b[t].tensor);
                    EXPECT_EQ(a[t].read, b[t].read) << a[t].tensor;
                    EXPECT_EQ(a[t].written, b[t].written) << a[t].tensor;
                }
            }
        };
        // 3 tiles of queries and 3 of keys a sequence, 32 bytes each; 4 bytes for each of 128 threads, 4 and 2 heads.
        expect_same(varlen_movement(packed, tiles, 128), q_parallel_movement(batch, tiles, true), {{"query_tiles", 9 * 4 * 512, 0}},
                    {{"query_tiles", 9 * 32, 0}});
        // Blocks of 4 queries with d = 16: 8 threads before and 4 after.
        expect_same(varlen_backward_movement(packed, tiles, 128), tensor_core_backward_movement(batch, tiles),
                    {{"key_tiles", 9 * 2 * 512, 0}, {"query_blocks", 9 * 4 * (8 + 4) * 4, 0}},
                    {{"key_tiles", 9 * 32, 0}, {"query_blocks", 2 * 9 * 32, 0}});
    }
}

TEST(Cost, CompulsoryReadsKeysAndValuesByTheirOwnHeads) {
    const Traffic t =
        compulsory_traffic({.batch = 2, .heads = 8, .kv_heads = 2, .seq = 3, .kv_seq = 5, .head_dim = 4, .dtype = DType::f16});
    const std::vector<std::pair<long long, long long>> bytes = {
        {2 * 8 * 3 * 4 * 2, 0}, {2 * 2 * 5 * 4 * 2, 0}, {2 * 2 * 5 * 4 * 2, 0}, {0, 2 * 8 * 3 * 4 * 2}, {0, 2 * 8 * 3 * 4}};
    ASSERT_EQ(t.tensors.size(), 5u);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(std::pair(t.tensors[i].read, t.tensors[i].written), bytes[i]) << t.tensors[i].tensor;
}

TEST(Cost, LargestProblemDoesNotOverflow) {
    const Problem p{.heads = 1024, .kv_heads = 1, .seq = 1 << 20, .kv_seq = 1 << 20, .head_dim = 64};
    for (const Movement& m : {naive_movement(p), online_softmax_movement(p), flash1_movement(p, {1, 1})}) {
        EXPECT_GT(m.requested.read(), 1ll << 57);
        for (const TensorTraffic& t : m.requested.tensors) {
            EXPECT_GE(t.read, 0);
            EXPECT_GE(t.written, 0);
        }
        EXPECT_GT(m.requested.total(), m.requested.read());
    }
}

TEST(Cost, ForwardFlops) {
    Problem p{.batch = 2, .heads = 16, .kv_heads = 4, .seq = 1024, .kv_seq = 2048, .head_dim = 128};
    EXPECT_EQ(forward_flops(p), 4.0 * 2 * 16 * 1024 * 2048 * 128);
    p.causal = true;
    EXPECT_EQ(forward_flops(p), 2.0 * 2 * 16 * 1024 * 2048 * 128);
}

TEST(Cost, GpusAgreeWithTheirClocks) {
    for (const Gpu& gpu : gpus()) {
        SCOPED_TRACE(gpu.key);
        // 128 FP32 lanes an SM (64 on the A100), an FMA is two operations: the datasheet's rate must follow from clock and SMs.
        const double lanes = gpu.compute_capability == 80 ? 64 : 128;
        EXPECT_NEAR(gpu.fp32 / (gpu.sms * lanes * 2 * gpu.clock), 1, 0.01);
        // Per SM and clock, dense with float32 accumulation: 2048 on the A100, 4096 on Hopper, 512 on GeForce. Hopper's tensor
        // rates are given at a clock some 8% below its highest.
        const double tensor = gpu.compute_capability == 80 ? 2048 : gpu.compute_capability == 90 ? 4096 : 512;
        EXPECT_NEAR(gpu.tensor_16bit / (gpu.sms * tensor * gpu.clock), gpu.compute_capability == 90 ? 0.924 : 1, 0.01);
        EXPECT_NEAR(gpu.tensor_fp8 / gpu.tensor_16bit, gpu.compute_capability == 80 ? 0 : 2, 0.001);
        EXPECT_EQ(gpu.shared_memory_per_block, (gpu.compute_capability == 80 ? 163u : gpu.compute_capability == 90 ? 227u : 99u) * 1024u);
        EXPECT_FALSE(gpu.source.empty());
        EXPECT_EQ(&find_gpu(gpu.key), &gpu);
    }
    EXPECT_EQ(find_gpu("h200").bandwidth, 4.8e12);
    try {
        find_gpu("b200");
        FAIL() << "accepted an unknown GPU";
    } catch (const InvalidArgument& error) {
        EXPECT_STREQ(error.what(), "gpu = \"b200\": accepted are a100, h100, h200, rtx4090, rtx5090");
    }
}

TEST(Cost, PredictionNamesTheLargestTerm) {
    const Gpu gpu{.key = "x",
                  .name = "X",
                  .compute_capability = 90,
                  .sms = 10,
                  .clock = 1e9,
                  .bandwidth = 1e12,
                  .fp32 = 1e13,
                  .tensor_16bit = 1e14,
                  .tensor_fp8 = 0,
                  .shared_memory_per_block = 0,
                  .l2_bytes = 0,
                  .source = ""};  // L1: 1.28e12 bytes a second
    const auto movement = [](long long requested, long long dram) {
        return Movement{.requested = {{{"K", requested, 0}}}, .dram = {{{"K", dram - 1000, 1000}}}};
    };
    const Prediction l1 = predict(gpu, Unit::fp32, 1e9, movement(1'280'000'000, 1'000'000));
    EXPECT_DOUBLE_EQ(l1.compute_seconds, 1e-4);
    EXPECT_DOUBLE_EQ(l1.dram_seconds, 1e-6);
    EXPECT_DOUBLE_EQ(l1.l1_seconds, 1e-3);
    EXPECT_DOUBLE_EQ(l1.seconds(), 1e-3);
    EXPECT_EQ(l1.bound(), "L1");
    EXPECT_EQ(predict(gpu, Unit::fp32, 1e9, movement(1000, 2'000'000'000)).bound(), "HBM");
    EXPECT_EQ(predict(gpu, Unit::fp32, 1e12, movement(1000, 1000)).bound(), "FP32 units");
    const Prediction tensor = predict(gpu, Unit::tensor_16bit, 1e12, movement(1000, 1000));
    EXPECT_EQ(tensor.bound(), "tensor cores");
    EXPECT_DOUBLE_EQ(tensor.seconds(), 1e-2);
    try {
        predict(gpu, Unit::tensor_fp8, 1, movement(1000, 1000));
        FAIL() << "predicted FP8 without FP8 units";
    } catch (const InvalidArgument& error) {
        EXPECT_PRED_FORMAT2(::testing::IsSubstring, "X has no FP8 tensor cores", error.what());
    }
}

}  // namespace
}  // namespace workbook
