#include "b_varlen/stage.hpp"

#include "b_varlen/tiles.hpp"

#include "stage_suite.hpp"

#include <filesystem>
#include <fstream>

namespace {

using namespace workbook;
using Lengths = std::vector<std::pair<int, int>>;  // queries, keys

const std::vector<DType> kTypes = {DType::f16, DType::bf16};

const Variant& varlen() { return stepb::stage().variants[0]; }
const Variant& unsorted() { return stepb::stage().variants[1]; }
const BackwardVariant& varlen_backward() { return stepb::stage().backward[0]; }

/// The other fields as in `like`.
Problem packed(const Lengths& lengths, Problem like) {
    like.batch = 1;
    like.cu_seqlens_q = like.cu_seqlens_k = {0};
    for (const auto& [queries, keys] : lengths) {
        like.cu_seqlens_q.push_back(like.cu_seqlens_q.back() + queries);
        like.cu_seqlens_k.push_back(like.cu_seqlens_k.back() + keys);
    }
    like.seq = like.cu_seqlens_q.back();
    like.kv_seq = like.cu_seqlens_k.back();
    return like;
}

Device with_sms(int sms) {
    Device device = Device::current();
    device.sms = sms;
    return device;
}

// With few SMs tiles are large, where the lengths are.
constexpr int kLargeTiles = 1;

/// Forward and backward; with and without the schedule the same bits come out.
void expect_all_right(const Problem& p, simt::Schedule schedule = simt::Schedule::round_robin, int sms = 132, std::uint64_t seed = 1) {
    const std::vector<long long> all;
    const bool sampled = !emulating && p.seq > 2000;
    BackwardTestCase test(p, seed, Distribution::normal, with_sms(sms), sampled ? sample_rows(p, 128) : all,
                          sampled ? sample_kv_rows(p, 64) : all);
    test.options.schedule = schedule;
    const Run run = expect_right(stepb::stage(), varlen(), test);
    const Run other = expect_right(stepb::stage(), unsorted(), test);
    EXPECT_EQ(run.result.o, other.result.o);
    EXPECT_EQ(run.result.lse, other.result.lse);
    if (p.head_dim <= 128) expect_right(stepb::stage(), varlen_backward(), test);
}

// ---- agreement with float64 ----

const std::vector<Lengths> kBatches = {
    {{1, 1}},
    {{5, 5}, {0, 0}, {12, 12}, {1, 1}},
    {{0, 0}, {70, 70}, {0, 9}, {9, 0}, {0, 0}},              // empty at both ends; no queries; no keys
    {{0, 40}, {30, 30}, {20, 0}},                            // no queries first, no keys last
    {{65, 129}, {129, 65}, {1, 64}, {64, 1}, {63, 66}},      // more queries than keys, and fewer
    {{3, 3}, {7, 7}, {300, 300}, {2, 2}, {1, 1}, {19, 19}},  // one long among many short
};

class StepB : public testing::TestWithParam<Combination> {};

TEST_P(StepB, AgreesOverAllBatches) {
    const auto [dtype, head_dim, schedule] = GetParam();
    bool turn = schedule == simt::Schedule::lowest_first;
    for (const Lengths& lengths : kBatches) {
        turn = !turn;
        for (const bool causal : {false, true}) {
            if (emulating && causal != turn && head_dim != 64) continue;
            if (causal != turn && in_turn(GetParam(), kTypes)) continue;
            expect_all_right(packed(lengths, {.heads = 2, .kv_heads = 1, .head_dim = head_dim, .dtype = dtype, .causal = causal}),
                             schedule);
        }
    }
}

INSTANTIATE_TEST_SUITE_P(All, StepB, testing::ValuesIn(combinations({64, 128}, kTypes)), combination_name);

TEST(StepB, SpecialCases) {
    const Lengths lengths = {{40, 70}, {0, 5}, {66, 31}, {8, 8}};
    Problem p{.heads = 4, .kv_heads = 2, .head_dim = 64, .dtype = DType::bf16, .layout = Layout::bnhd};
    expect_all_right(packed(lengths, p));
    p.causal = true;
    p.kv_heads = 1;
    expect_all_right(packed(lengths, p));
    p.heads = p.kv_heads = 3;
    for (const float scale : {4.0f, -1.0f, 0.0f}) {
        p.softmax_scale = scale;
        expect_all_right(packed(lengths, p));
    }
    p.softmax_scale.reset();
    p.layout = Layout::bhnd;
    p.head_dim = 256;
    expect_all_right(packed(lengths, p));
}

TEST(StepB, LargeTiles) {
    const Lengths lengths = {{250, 250}, {10, 120}, {120, 10}, {256, 129}};
    for (const int d : {64, 128, 256})
        for (const bool causal : {false, true}) {
            if (emulating && causal != (d == 64)) continue;
            expect_all_right(packed(lengths, {.head_dim = d, .dtype = DType::f16, .causal = causal}), simt::Schedule::round_robin,
                             kLargeTiles);
        }
}

TEST(StepB, RandomBatches) {
    const int batches = emulating ? 6 : 60, longest = emulating ? 90 : 2000;
    for (int seed = 1; seed <= batches && !HasFailure(); ++seed) {
        std::mt19937_64 random(static_cast<std::uint64_t>(seed));
        const auto pick = [&](int low, int high) { return low + static_cast<int>(random() % static_cast<std::uint64_t>(high - low + 1)); };
        const auto length = [&] { return pick(0, 5) == 0 ? 0 : pick(0, 3) == 0 ? pick(1, longest) : pick(1, 30); };
        Lengths lengths = {{pick(1, 9), pick(1, 9)}};
        for (int more = pick(0, emulating ? 5 : 200); more > 0; --more) {
            const int queries = length();
            lengths.emplace_back(queries, pick(0, 1) ? queries : length());
        }
        const int kv_heads = pick(1, 2);
        Problem p{.heads = kv_heads * pick(1, 3),
                  .kv_heads = kv_heads,
                  .head_dim = emulating || pick(0, 1) ? 64 : 128,
                  .dtype = kTypes[static_cast<std::size_t>(pick(0, 1))],
                  .causal = pick(0, 1) == 1,
                  .layout = pick(0, 1) ? Layout::bnhd : Layout::bhnd};
        if (pick(0, 3) == 0) p.softmax_scale = static_cast<float>(pick(-8, 8)) / 16;
        SCOPED_TRACE("seed " + std::to_string(seed));
        expect_all_right(packed(lengths, p), emulating ? static_cast<simt::Schedule>(pick(0, 2)) : simt::Schedule::round_robin,
                         pick(0, 1) ? 132 : 1, static_cast<std::uint64_t>(seed));
    }
}

// ---- agreement with each sequence by itself ----

/// Some rows of a tensor (1, heads, rows, d) in layout bhnd.
std::vector<float> rows_of(const std::vector<float>& values, int heads, int rows, int d, int first, int count) {
    std::vector<float> part;
    for (int h = 0; h < heads; ++h) {
        const auto begin = values.begin() + (static_cast<long long>(h) * rows + first) * d;
        part.insert(part.end(), begin, begin + static_cast<long long>(count) * d);
    }
    return part;
}

/// Calls f(the problem of a sequence, what gives the part of a tensor of queries, and of one of keys) for those that are not empty.
template <class F>
void for_each_sequence(const Problem& p, F&& f) {
    const std::vector<Problem> each = p.sequences();
    for (std::size_t s = 0; s < each.size(); ++s) {
        const Problem& one = each[s];
        if (one.seq == 0 || one.kv_seq == 0) continue;
        SCOPED_TRACE("sequence " + std::to_string(s));
        const int first_query = p.cu_seqlens_q[s], first_key = p.cu_seqlens_k[s];
        f(
            one, [&](const std::vector<float>& x) { return rows_of(x, p.heads, p.seq, p.head_dim, first_query, one.seq); },
            [&](const std::vector<float>& x) { return rows_of(x, p.kv_heads, p.kv_seq, p.head_dim, first_key, one.kv_seq); });
    }
}

void expect_close(const char* name, const std::vector<float>& want, const std::vector<float>& got, double allowed) {
    const Errors errors = compare(std::vector<double>(want.begin(), want.end()), got);
    EXPECT_TRUE(errors.clean()) << name;
    EXPECT_LE(errors.max_abs, allowed) << name;
}

Problem of_four_lengths() {
    return packed({{70, 70}, {0, 3}, {5, 40}, {130, 97}}, {.heads = 2, .kv_heads = 1, .head_dim = 64, .dtype = DType::f16, .causal = true});
}

TEST(StepB, AgreesWithStage04OnEachSequence) {
    if (!previous_stage()) GTEST_SKIP() << "stage 04 is not built";
    const Problem p = of_four_lengths();
    const TestCase all(p);
    const workbook::Run run = expect_right(stepb::stage(), varlen(), all);
    for_each_sequence(p, [&](const Problem& one, auto of_queries, auto of_keys) {
        TestCase test(one);
        test.setup.inputs.q_host = of_queries(all.setup.inputs.q_host);
        test.setup.inputs.k_host = of_keys(all.setup.inputs.k_host);
        test.setup.inputs.v_host = of_keys(all.setup.inputs.v_host);
        test.inputs_changed();
        const workbook::Run alone = expect_right(*previous_stage(), previous_stage()->variants.back(), test);
        expect_close("O", alone.result.o, of_queries(run.result.o), alone.report.verdict.o_allowed);
    });
}

#ifdef WORKBOOK_BACKWARD_BEFORE
TEST(StepB, AgreesWithStage05OnEachSequence) {
    const Problem p = of_four_lengths();
    BackwardTestCase all(p);
    const BackwardRun run = expect_right(stepb::stage(), varlen_backward(), all);
    for_each_sequence(p, [&](const Problem& one, auto of_queries, auto of_keys) {
        BackwardTestCase test(one);
        test.setup.inputs.q_host = of_queries(all.setup.inputs.q_host);
        test.setup.inputs.k_host = of_keys(all.setup.inputs.k_host);
        test.setup.inputs.v_host = of_keys(all.setup.inputs.v_host);
        upload_rounded(test.setup.inputs);
        test.backward.d_o.d_o_host = of_queries(all.backward.d_o.d_o_host);
        upload_rounded(test.backward.d_o.d_o, one.dtype, test.backward.d_o.d_o_host);
        test.make_references();
        const Stage& stage05 = WORKBOOK_BACKWARD_BEFORE::stage();
        const BackwardRun alone = expect_right(stage05, stage05.backward.back(), test);
        ASSERT_TRUE(alone.report.gradients);
        const GradientVerdict& allowed = *alone.report.gradients;
        expect_close("dQ", alone.result.dq, of_queries(run.result.dq), 2 * allowed.dq.allowed);
        expect_close("dK", alone.result.dk, of_keys(run.result.dk), 2 * allowed.dk.allowed);
        expect_close("dV", alone.result.dv, of_keys(run.result.dv), 2 * allowed.dv.allowed);
    });
}
#endif

// A sequence of NaN leaves its neighbours as they are: nothing of it is read, not even to be multiplied by 0.
TEST(StepB, NeighboursAreNotTouched) {
    const Problem p = packed({{20, 20}, {50, 30}, {9, 70}}, {.heads = 2, .kv_heads = 1, .head_dim = 64, .dtype = DType::bf16});
    BackwardTestCase test(p);
    const BackwardRun want = expect_right(stepb::stage(), varlen_backward(), test);
    const auto spoil = [&](std::vector<float>& values, int heads, int rows, int first, int last) {
        for (int h = 0; h < heads; ++h)
            std::fill(values.begin() + (h * rows + first) * p.head_dim, values.begin() + (h * rows + last) * p.head_dim, NAN);
    };
    Inputs& in = test.setup.inputs;
    spoil(in.q_host, p.heads, p.seq, 20, 70);
    spoil(in.k_host, p.kv_heads, p.kv_seq, 20, 50);
    spoil(in.v_host, p.kv_heads, p.kv_seq, 20, 50);
    spoil(test.backward.d_o.d_o_host, p.heads, p.seq, 20, 70);
    upload_rounded(in);
    upload_rounded(test.backward.d_o.d_o, p.dtype, test.backward.d_o.d_o_host);
    const ForwardOutputs outputs(p);
    const Gradients written(p);
    Workspace workspace;
    Forward forward = forward_args(in, outputs, test.setup.device, {}, workspace);
    run_forward(varlen_backward(), forward);
    Backward backward = backward_args(forward, test.backward.d_o, written);
    run_backward(varlen_backward(), backward);
    synchronize(nullptr);
    const Result result = fetch_result(p, outputs);
    const GradientResult gradients = fetch_gradients(p, written);
    EXPECT_TRUE(std::isnan(result.o[20 * 64]));
    for (const auto& [first, last, first_key, last_key] : {std::array{0, 20, 0, 20}, std::array{70, 79, 50, 120}}) {
        const auto expect_same = [&](const char* name, const std::vector<float>& a, const std::vector<float>& b, int heads, int rows,
                                     int begin, int end) {
            const std::vector<float> before = rows_of(a, heads, rows, p.head_dim, begin, end - begin);
            expect_close(name, before, rows_of(b, heads, rows, p.head_dim, begin, end - begin), 4e-2);
        };
        expect_same("O", want.forward.o, result.o, p.heads, p.seq, first, last);
        expect_same("dQ", want.result.dq, gradients.dq, p.heads, p.seq, first, last);
        expect_same("dK", want.result.dk, gradients.dk, p.kv_heads, p.kv_seq, first_key, last_key);
        expect_same("dV", want.result.dv, gradients.dv, p.kv_heads, p.kv_seq, first_key, last_key);
    }
}

// ---- the tables ----

TEST(StepB, TilesCoverEachSequenceOnce) {
    for (const bool causal : {false, true}) {
        const Problem p = packed({{70, 70}, {0, 3}, {200, 40}, {5, 0}}, {.dtype = DType::f16, .causal = causal});
        const std::vector<stepb::Tile> queries = stepb::query_tiles(p, {64, 32}), keys = stepb::key_tiles(p, {64, 32});
        ASSERT_EQ(queries.size(), 7u);
        EXPECT_EQ(stepb::count_tiles(p.cu_seqlens_q, 64), 7);
        ASSERT_EQ(keys.size(), 6u);
        EXPECT_EQ(stepb::count_tiles(p.cu_seqlens_k, 32), 6);
        for (std::size_t n = 0; n < queries.size(); ++n) {  // the table is the order of the blocks in padded tensors
            EXPECT_EQ(queries[n].first_block + queries[n].row / 64, static_cast<int>(n));
            const Problem one = p.sequences()[static_cast<std::size_t>(queries[n].sequence)];
            EXPECT_EQ(queries[n].queries, one.seq);
            EXPECT_EQ(queries[n].keys, one.kv_seq);
            EXPECT_EQ(queries[n].first_query, p.cu_seqlens_q[static_cast<std::size_t>(queries[n].sequence)]);
            EXPECT_EQ(queries[n].first_key, p.cu_seqlens_k[static_cast<std::size_t>(queries[n].sequence)]);
        }
        const auto work = [](const std::vector<stepb::Tile>& tiles) {
            std::vector<int> list;
            for (const stepb::Tile& tile : tiles) list.push_back(tile.work);
            return list;
        };
        using Work = std::vector<int>;
        // Of 200 queries and 40 keys rows 160 and on see something; the last key of 70 is seen by the last query.
        EXPECT_EQ(work(queries), causal ? (Work{2, 3, 0, 0, 1, 2, 0}) : (Work{3, 3, 2, 2, 2, 2, 0}));
        EXPECT_EQ(work(keys), causal ? (Work{2, 2, 1, 0, 2, 1}) : (Work{2, 2, 2, 0, 4, 4}));
    }
}

TEST(StepB, LongestTilesFirst) {
    std::vector<stepb::Tile> tiles;
    for (int n = 0; n < 50; ++n) tiles.push_back({n, 0, 0, 0, 0, 0, 0, n * 7 % 11});
    const std::vector<stepb::Tile> sorted = stepb::longest_first(tiles);
    std::stable_sort(tiles.begin(), tiles.end(), [](const stepb::Tile& a, const stepb::Tile& b) { return a.work > b.work; });
    ASSERT_EQ(sorted.size(), tiles.size());
    for (std::size_t n = 0; n < tiles.size(); ++n) EXPECT_EQ(sorted[n].sequence, tiles[n].sequence) << n;
    EXPECT_TRUE(stepb::longest_first({}).empty());
}

// ---- refusals ----

template <class AnyVariant>
std::string reason(const AnyVariant& variant, const Problem& p, const Device& device = Device::current()) {
    check(p);
    return why_refused(variant, p, device).value_or("");
}

void expect_told(const std::string& why, const std::string& words) { EXPECT_NE(why.find(words), std::string::npos) << why; }

TEST(StepB, RefusesWhatItCannotDo) {
    const auto both = [](const Problem& p, const std::string& words) {
        expect_told(reason(varlen(), p), words);
        expect_told(reason(varlen_backward(), p), words);
    };
    both({.seq = 16, .kv_seq = 16, .head_dim = 64, .dtype = DType::f16}, "no cu_seqlens: a packed batch is accepted (--lengths");
    const Lengths lengths = {{5, 5}, {9, 9}};
    both(packed(lengths, {.head_dim = 64}), "dtype = f32: tensor cores multiply f16 and bf16");
    for (const int d : {32, 80})
        both(packed(lengths, {.head_dim = d, .dtype = DType::f16}), "head_dim = " + std::to_string(d) + ": 64, 128");
    const Problem wide = packed(lengths, {.head_dim = 256, .dtype = DType::f16});
    EXPECT_EQ(reason(varlen(), wide), "");
    expect_told(reason(varlen_backward(), wide), "head_dim = 256: 64 and 128 are accepted, as of 05c; variant Ba takes it");
    Device device = Device::current();
    device.shared_memory_per_block = 32 * 1024;
    const Problem p = packed(lengths, {.head_dim = 64, .dtype = DType::f16});
    expect_told(reason(varlen(), p, device), "a block has 32768 bytes of shared memory: the tiles take");
    expect_told(reason(varlen_backward(), p, device), "a block has 32768 bytes of shared memory: the tiles take");
    EXPECT_EQ(reason(varlen(), p), "");
    EXPECT_EQ(reason(varlen_backward(), p), "");
}

TEST(StepB, OthersRefusePackedBatches) {
    if (!previous_stage()) GTEST_SKIP() << "stage 04 is not built";
    const TestCase test(packed({{5, 5}, {9, 9}}, {.head_dim = 64, .dtype = DType::f16}));
    for (const Variant& variant : previous_stage()->variants) {
        try {
            run_variant(*previous_stage(), variant, test.setup);
            FAIL() << variant.id;
        } catch (const Refused& error) {
            expect_told(error.what(), variant.id + " " + variant.name + ": cu_seqlens of 2 sequences");
            expect_told(error.what(), "stage b takes packed batches");
        }
    }
}

TEST(StepB, RefusesBadCuSeqlensBeforeTheLaunch) {
    const TestCase test(packed({{5, 5}, {9, 9}}, {.head_dim = 64, .dtype = DType::f16}));
    const ForwardOutputs outputs(test.setup.inputs.problem);
    Workspace workspace;
    Forward args = forward_args(test.setup.inputs, outputs, test.setup.device, {}, workspace);
    args.problem.cu_seqlens_k = {0, 5, 15};
    try {
        run_forward(varlen(), args);
        FAIL();
    } catch (const InvalidArgument& error) {
        EXPECT_EQ(std::string(error.what()), "cu_seqlens_k[2] = 15: accepted is kv_seq = 14, where the last sequence ends");
    }
    EXPECT_EQ(workspace.allocated(), 0u);
}

/// A file of zeros for Q, K and V, (1, 1, 14, 64) in f16, and of cu_seqlens_q and cu_seqlens_k: 0, 5, 14 in the given type.
std::filesystem::path file_with_cu_seqlens(const std::string& type, std::size_t element) {
    const std::size_t tensor = 14 * 64 * 2, list = 3 * element;
    std::string header;
    std::size_t at = 0;
    const auto add = [&](const std::string& name, const std::string& dtype, const std::string& shape, std::size_t bytes) {
        header += (header.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape + ",\"data_offsets\":[" +
                  std::to_string(at) + "," + std::to_string(at + bytes) + "]}";
        at += bytes;
    };
    for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) add(name, type, "[3]", list);
    for (const char* name : {"q", "k", "v"}) add(name, "F16", "[1,1,14,64]", tensor);
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');
    std::string data(at, '\0');
    for (std::size_t l = 0; l < 2; ++l)
        for (const std::size_t n : {1, 2}) data[l * list + n * element] = n == 1 ? 5 : 14;  // little-endian
    const std::filesystem::path path = testing::TempDir() + "stepb_" + type + ".safetensors";
    std::ofstream file(path, std::ios::binary);
    const std::uint64_t length = header.size();
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << header << data;
    return path;
}

TEST(StepB, TakesCuSeqlensFromAFile) {
    Options options;
    options.input = file_with_cu_seqlens("I32", 4);
    const Problem p = problem_of(options, read_safetensors(*options.input));
    EXPECT_EQ(p.cu_seqlens_q, (std::vector<int>{0, 5, 14}));
    EXPECT_EQ(p.cu_seqlens_k, (std::vector<int>{0, 5, 14}));
    EXPECT_EQ(reason(varlen(), p), "");
    options.cu_seqlens_q = {0, 14};
    EXPECT_THROW(problem_of(options, read_safetensors(*options.input)), InvalidArgument);
}

TEST(StepB, RefusesCuSeqlensOfAnotherType) {
    for (const auto& [type, element, words] :
         {std::tuple{"F32", 4, "tensor cu_seqlens_q is f32; I32 is accepted"},
          {"I64", 8, "dtype \"I64\" is not supported; accepted are \"F32\", \"F16\", \"BF16\" and \"I32\""}}) {
        Options options;
        options.input = file_with_cu_seqlens(type, static_cast<std::size_t>(element));
        try {
            problem_of(options, read_safetensors(*options.input));
            FAIL() << type;
        } catch (const FileError& error) {
            expect_told(error.what(), words);
        }
    }
}

/// What the program says to these options; empty where it takes them.
std::string refused_options(const std::vector<const char*>& words) {
    std::vector<const char*> all = {"stepb"};
    all.insert(all.end(), words.begin(), words.end());
    try {
        check(parse_options(stepb::stage(), static_cast<int>(all.size()), all.data()).problem(DType::f16));
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "";
}

TEST(StepB, ReadsItsOptions) {
    EXPECT_EQ(refused_options({}), "");
    EXPECT_EQ(refused_options({"--cu-seqlens-q", "0,5,5,17", "--cu-seqlens-k", "0,5,9,20"}), "");
    expect_told(refused_options({"--cu-seqlens-q", "0,5,x", "--cu-seqlens-k", "0,5,9"}), "--cu-seqlens-q=x: a whole number");
    expect_told(refused_options({"--cu-seqlens-q", "0,5,9"}), "cu_seqlens_q has 3 entries and cu_seqlens_k has 0 entries");
    expect_told(refused_options({"--cu-seqlens-q", "0,5,9", "--cu-seqlens-k", "0,5,9", "--seq", "8"}),
                "cu_seqlens_q[2] = 9: accepted is seq = 8");
    const std::string path = testing::TempDir() + "stepb_lengths.txt";
    const auto lengths = [&](const std::string& text) {
        std::ofstream(path) << text;
        return refused_options({"--lengths", path.c_str()});
    };
    EXPECT_EQ(lengths("# of a text\n5\n0\n12\n"), "");
    expect_told(lengths("5\n-1\n"), "stepb_lengths.txt, line 2=-1: a whole number from 0 to 2147483647 is accepted");
    expect_told(lengths("# nothing\n"), "no lengths; one or more are accepted");
    expect_told(lengths("2000000000\n2000000000\n"), "lengths of at most 2147483647 in all are accepted");
    expect_told(lengths("0\n0\n"), "seq = 0: accepted is 1 or more");
    expect_told(refused_options({"--lengths", "/nowhere/lengths.txt"}), "the file cannot be read");
    expect_told(refused_options({"--cu-seqlens-q", "0,5", "--lengths", path.c_str()}), "one of the two is accepted");
}

TEST(StepB, RefusesUnalignedMemory) {
    const TestCase test(packed({{5, 5}, {9, 9}}, {.head_dim = 64, .dtype = DType::f16}));
    ForwardOutputs outputs(test.setup.inputs.problem);
    outputs.o = DeviceBuffer(outputs.o.size() + 2);
    Workspace workspace;
    Forward args = forward_args(test.setup.inputs, outputs, test.setup.device, {}, workspace);
    args.o.data = static_cast<char*>(outputs.o.data()) + 2;
    try {
        run_forward(varlen(), args);
        FAIL();
    } catch (const Refused& error) {
        expect_told(error.what(), "Ba varlen: O starts at an address that is not a multiple of 16 bytes");
    }
}

}  // namespace
