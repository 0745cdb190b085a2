#include "cases.hpp"
#include "options.hpp"

#include <gtest/gtest.h>

#include <map>
#include <set>

namespace workbook::bench {
namespace {

/// What `f` complains of; empty when it does not.
template <class F>
std::string complaint(F&& f) {
    try {
        f();
    } catch (const InvalidArgument& error) {
        return error.what();
    }
    return "";
}

template <class F>
void expect_complaint(F&& f, std::initializer_list<const char*> parts) {
    const std::string message = complaint(f);
    ASSERT_FALSE(message.empty()) << "nothing was thrown";
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
}

Options parse(std::vector<std::string> words, Program program = Program::measure) { return parse_options(program, "bench", words); }

TEST(BenchSweep, FullHasEveryCombinationOnceAndTheGroupedCase) {
    const std::vector<Problem> sweep = full_sweep();
    ASSERT_EQ(sweep.size(), 6u * 2 * 2 * 2 + 1);
    std::set<std::string> seen;
    for (const Problem& p : sweep) {
        check(p);
        EXPECT_TRUE(seen.insert(describe(p)).second) << describe(p);
    }
    for (std::size_t i = 0; i + 1 < sweep.size(); ++i) {
        const Problem& p = sweep[i];
        EXPECT_EQ(p.batch * p.seq, 16384) << describe(p);
        EXPECT_EQ(p.heads * p.head_dim, 2048) << describe(p);
        EXPECT_EQ(p.kv_heads, p.heads);
        EXPECT_EQ(p.kv_seq, p.seq);
        EXPECT_EQ(p.causal, i % 2 == 1) << "the masks of one problem are neighbours, so that they share its inputs";
    }
    EXPECT_EQ(describe(sweep.front()), "B=32 Hq=32 Hkv=32 Nq=512 Nkv=512 d=64 bf16");
    EXPECT_EQ(describe(sweep.back()), "B=4 Hq=32 Hkv=8 Nq=4096 Nkv=4096 d=128 bf16 causal");
}

TEST(BenchSweep, QuickIsPartOfTheFullOne) {
    std::set<std::string> full;
    for (const Problem& p : full_sweep()) full.insert(describe(p));
    const std::vector<Problem> quick = quick_sweep();
    EXPECT_EQ(quick.size(), 4u);
    for (const Problem& p : quick) {
        EXPECT_TRUE(full.count(describe(p))) << describe(p);
        EXPECT_EQ(p.dtype, DType::bf16);
        EXPECT_EQ(p.head_dim, 128);
        EXPECT_TRUE(p.seq == 1024 || p.seq == 4096);
    }
}

TEST(BenchSweep, ASingleCaseTakesTheRestFromTheDefaults) {
    const auto only = [](std::vector<std::string> words) {
        const std::vector<Problem> cases = cases_of(parse(std::move(words)).request);
        EXPECT_EQ(cases.size(), 1u);
        return describe(cases.at(0));
    };
    EXPECT_EQ(only({"--causal"}), "B=1 Hq=16 Hkv=16 Nq=4096 Nkv=4096 d=128 bf16 causal");
    EXPECT_EQ(only({"--seq", "512", "--head-dim", "64", "--dtype", "f32"}), "B=1 Hq=16 Hkv=16 Nq=512 Nkv=512 d=64 f32");
    EXPECT_EQ(only({"--batch", "2", "--heads", "8", "--kv-heads", "2", "--seq", "300", "--kv-seq", "517", "--dtype", "f16"}),
              "B=2 Hq=8 Hkv=2 Nq=300 Nkv=517 d=128 f16");
    EXPECT_EQ(only({"--gqa"}), describe(gqa_case()));
    EXPECT_EQ(cases_of(parse({"--decode"}).request).size(), 15u);
    EXPECT_EQ(cases_of(parse({}).request).size(), full_sweep().size());
    EXPECT_EQ(cases_of(parse({"--quick"}).request).size(), quick_sweep().size());
}

TEST(BenchSweep, RefusesWhatContradicts) {
    expect_complaint([] { cases_of(parse({"--quick", "--seq", "512"}).request); }, {"--quick", "one of the four is accepted"});
    expect_complaint([] { cases_of(parse({"--quick", "--gqa"}).request); }, {"--gqa", "one of the four is accepted"});
    expect_complaint([] { cases_of(parse({"--heads", "6", "--kv-heads", "4"}).request); }, {"heads", "6", "4"});
    expect_complaint([] { cases_of(parse({"--head-dim", "300"}).request); }, {"head_dim", "300", "256"});
}

TEST(BenchOptions, SplitsOffGoogleBenchmarksOwn) {
    const Options options =
        parse({"--benchmark_filter=bf16", "--seq", "64", "--v=1", "--max-seconds", "2.5", "--stop-after=60", "--benchmark_list_tests"});
    EXPECT_EQ(options.google, (std::vector<std::string>{"--benchmark_filter=bf16", "--v=1", "--benchmark_list_tests"}));
    EXPECT_EQ(options.request.seq, 64);
    EXPECT_DOUBLE_EQ(options.max_seconds, 2.5);
    EXPECT_EQ(options.stop_after, 60.0);
    EXPECT_DOUBLE_EQ(parse({}).max_seconds, 10);
    EXPECT_EQ(parse({"--on", "a100"}, Program::predict).on, &find_gpu("a100"));
    EXPECT_EQ(parse({"--stages", "01,03"}, Program::predict).stages, (std::vector<std::string>{"01", "03"}));
    EXPECT_TRUE(parse({"--help"}).help.has_value());
}

TEST(BenchOptions, NamesTheOptionTheValueAndWhatIsAccepted) {
    expect_complaint([] { parse({"--seq", "0"}); }, {"--seq=0", "1 to 2147483647"});
    expect_complaint([] { parse({"--seq", "12x"}); }, {"--seq=12x", "a whole number"});
    expect_complaint([] { parse({"--batch", "3000000000"}); }, {"--batch=3000000000"});
    expect_complaint([] { parse({"--dtype", "fp8"}); }, {"--dtype", "fp8", "bf16"});
    expect_complaint([] { parse({"--max-seconds", "-1"}); }, {"--max-seconds=-1", "above 0"});
    expect_complaint([] { parse({"--max-seconds", "nan"}); }, {"--max-seconds=nan", "above 0"});
    expect_complaint([] { parse({"--stop-after", "0"}); }, {"--stop-after=0", "above 0"});
    expect_complaint([] { parse({"--sequence", "1"}); }, {"--sequence"});
    expect_complaint([] { parse({"--on", "h200"}); }, {"--on"});
    expect_complaint([] { parse({"--stages", "01"}); }, {"--stages"});
    expect_complaint([] { parse({"--max-seconds", "1"}, Program::predict); }, {"--max-seconds"});
    expect_complaint([] { parse({"--benchmark_filter=x"}, Program::predict); }, {"--benchmark_filter"});
    expect_complaint([] { parse({"--on", "v100"}, Program::predict); }, {"--on", "v100", "h200"});
}

TEST(BenchNames, ReadAsAgreed) {
    EXPECT_EQ(case_name({"step03", "shared_memory_tiling", gqa_case()}),
              "step03/shared_memory_tiling/fwd/bf16/d128/causal/B4_H32_KV8_N4096");
    Problem p = quick_sweep().front();
    p.dtype = DType::f16;
    p.kv_seq = 77;
    EXPECT_EQ(case_name({"peer", "torch_flash", p}), "peer/torch_flash/fwd/f16/d128/full/B16_H16_N1024_M77");
}

TEST(BenchNames, ComeBackAsTheyWere) {
    std::vector<Problem> problems = full_sweep();
    for (const int kv_heads : {1, 4}) {
        for (const int kv_seq : {1, 300, 517}) {
            Problem p = gqa_case();
            p.heads = 4;
            p.kv_heads = kv_heads;
            p.seq = 300;
            p.kv_seq = kv_seq;
            problems.push_back(p);
        }
    }
    for (const Problem& p : problems) {
        const std::string text = case_name({"step01", "naive", p});
        const CaseName back = parse_case_name(text);
        EXPECT_EQ(back.source, "step01");
        EXPECT_EQ(back.variant, "naive");
        EXPECT_EQ(describe(back.problem), describe(p)) << text;
        EXPECT_EQ(case_name(back), text);
    }
}

TEST(BenchNames, SayTheDirection) {
    const Problem p = gqa_case();
    const std::string text = case_name({"step05", "recompute", p, Direction::backward});
    EXPECT_EQ(text, "step05/recompute/bwd/bf16/d128/causal/B4_H32_KV8_N4096");
    EXPECT_EQ(parse_case_name(text).direction, Direction::backward);
    const std::string both = case_name({"step05", "recompute", p, Direction::both});
    EXPECT_EQ(both, "step05/recompute/fwdbwd/bf16/d128/causal/B4_H32_KV8_N4096");
    EXPECT_EQ(case_name(parse_case_name(both)), both);
    EXPECT_EQ(flops(p, Direction::forward), forward_flops(p));
    EXPECT_EQ(flops(p, Direction::backward), 2.5 * forward_flops(p));
    EXPECT_EQ(flops(p, Direction::both), 3.5 * forward_flops(p));
    expect_complaint([] { parse_case_name("step01/naive/back/f32/d64/full/B1_H1_N1"); }, {"fwd, bwd or fwdbwd"});
}

TEST(BenchNames, RefusesOthers) {
    for (const char* text :
         {"", "step01", "step01/naive", "/naive/fwd/f32/d64/full/B1_H1_N1", "step01//fwd/f32/d64/full/B1_H1_N1",
          "step01/naive/back/f32/d64/full/B1_H1_N1", "step01/naive/fwd/fp8/d64/full/B1_H1_N1", "step01/naive/fwd/f32/64/full/B1_H1_N1",
          "step01/naive/fwd/f32/d0/full/B1_H1_N1", "step01/naive/fwd/f32/d64/masked/B1_H1_N1", "step01/naive/fwd/f32/d64/full/B_H1_N1",
          "step01/naive/fwd/f32/d64/full/B1_H-1_N1", "step01/naive/fwd/f32/d64/full/B1_H1", "step01/naive/fwd/f32/d64/full/B1_H1_N1_M",
          "step01/naive/fwd/f32/d64/full/B1_H1_N99999999999", "step01/naive/fwd/f32/d64/full/B1_H1_N1/manual_time"}) {
        EXPECT_FALSE(complaint([&] { parse_case_name(text); }).empty()) << text;
    }
    expect_complaint([] { parse_case_name("step01/naive/fwd/f32/d64/masked/B1_H1_N1"); }, {"full/ or causal/", "at \"masked/B1_H1_N1\""});
}

TEST(BenchTimes, Quantiles) {
    const std::vector<double> five = {1, 2, 3, 4, 10}, four = {1, 2, 3, 4}, one = {7};
    EXPECT_DOUBLE_EQ(quantile(five, 0.5), 3);
    EXPECT_DOUBLE_EQ(quantile(four, 0.5), 2.5);
    EXPECT_DOUBLE_EQ(quantile(five, 0), 1);
    EXPECT_DOUBLE_EQ(quantile(five, 1), 10);
    EXPECT_DOUBLE_EQ(quantile(five, 0.9), 4 + 0.6 * 6);
    EXPECT_DOUBLE_EQ(quantile(one, 0.1), 7);
    EXPECT_FALSE(complaint([] { quantile({}, 0.5); }).empty());
    EXPECT_FALSE(complaint([&] { quantile(five, 1.1); }).empty());
    const std::vector<double> unsorted = {2, 1};
    EXPECT_FALSE(complaint([&] { quantile(unsorted, 0.5); }).empty());
}

TEST(BenchTimes, Repetitions) {
    EXPECT_EQ(repetitions(0), 200);
    EXPECT_EQ(repetitions(1e-5), 200);
    EXPECT_EQ(repetitions(0.003), 100);
    EXPECT_EQ(repetitions(0.05), 10);
    EXPECT_EQ(repetitions(0.1), 10);
    EXPECT_EQ(repetitions(0.25), 4);
    EXPECT_EQ(repetitions(0.9), 2);
    EXPECT_EQ(repetitions(8), 2);
}

TEST(BenchCounters, AreWhatTheyAreCalled) {
    Measured m;
    for (int i = 0; i <= 10; ++i) m.times.push_back(1e-3 * (1.5 + 0.1 * i));  // median 2 ms, p10 1.6 ms, p90 2.4 ms
    m.flops = 6e12;
    m.movement.requested = {{{"Q", 3'000'000'000, 0}, {"O", 0, 1'000'000'000}}};
    m.movement.dram = {{{"Q", 500'000'000, 0}, {"O", 0, 500'000'000}}};
    m.extra_memory = 3 << 20;
    m.rel_rms_error = 0.004;
    const auto numbers = [&] {
        const auto list = counters(m);
        return std::map<std::string, double>(list.begin(), list.end());
    };
    std::map<std::string, double> got = numbers();
    EXPECT_EQ(got.size(), 7u);
    EXPECT_DOUBLE_EQ(got.at("rel_rms_error"), 0.004);
    EXPECT_NEAR(got.at("TFLOPS"), 3000, 1e-6);
    EXPECT_NEAR(got.at("GB_per_s"), 2000, 1e-6);
    EXPECT_NEAR(got.at("hbm_GB_per_s"), 500, 1e-6);
    EXPECT_DOUBLE_EQ(got.at("extra_MiB"), 3);
    EXPECT_NEAR(got.at("spread_percent"), 40, 1e-9);
    EXPECT_DOUBLE_EQ(got.at("repetitions"), 11);
    EXPECT_FALSE(got.count("roofline_percent")) << "a GPU that is not in the table has no roofline";

    m.prediction = Prediction{.compute_seconds = 2e-4, .dram_seconds = 5e-4, .l1_seconds = 1e-4};
    got = numbers();
    EXPECT_NEAR(got.at("predicted_ms"), 0.5, 1e-9);
    EXPECT_NEAR(got.at("roofline_percent"), 25, 1e-9);

    m.saved = 1 << 19;
    m.movement = {};
    got = numbers();
    EXPECT_DOUBLE_EQ(got.at("saved_MiB"), 0.5);
    EXPECT_FALSE(got.count("GB_per_s")) << "nothing is predicted to move";

    m.times = {0, 0};
    EXPECT_FALSE(complaint([&] { counters(m); }).empty());
    m.times.clear();
    EXPECT_FALSE(complaint([&] { counters(m); }).empty());
}

// Stage 02 at N = 1024 on an H200, by hand: 4 * 16 * 16 * 1024 * 1024 * 128 FLOPs at 67 TFLOPS are 2.051 ms.
TEST(BenchCounters, ARooflineFromTheCostModel) {
    const Problem p = quick_sweep().front();
    Measured m;
    m.times = {4.1025e-3};
    m.flops = forward_flops(p);
    m.movement = online_softmax_movement(p);
    m.prediction = predict(find_gpu("h200"), Unit::fp32, m.flops, m.movement);
    const auto list = counters(m);
    const std::map<std::string, double> got(list.begin(), list.end());
    EXPECT_DOUBLE_EQ(m.flops, 137438953472.0);
    EXPECT_NEAR(got.at("TFLOPS"), 33.50, 0.01);
    // K and V are read once a row: 2 * B * Hq * N * N * d * 2 bytes, which cross 132 L1 caches of 128 bytes a clock at 1.98 GHz.
    const double l1_ms =
        1e3 * (2.0 * 16 * 16 * 1024 * 1024 * 128 * 2 + 2.0 * 16 * 16 * 1024 * 128 * 2 + 4.0 * 16 * 16 * 1024) / (132 * 128 * 1.98e9);
    EXPECT_NEAR(got.at("predicted_ms"), std::max(l1_ms, 2.0513), 1e-3);
    EXPECT_NEAR(got.at("roofline_percent"), 100 * got.at("predicted_ms") / 4.1025, 1e-6);
}

}  // namespace
}  // namespace workbook::bench
