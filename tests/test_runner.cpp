// The program of a stage, from its command line to its exit status.
#include "fake_stage.hpp"
#include "run_program.hpp"

#include "stage/device.hpp"
#include "tensor/safetensors.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

using namespace workbook;
using Json = nlohmann::json;

namespace {

Outcome run(const std::vector<std::string>& ids, const std::vector<std::string>& words) { return run_program(fake_stage(ids), words); }

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

std::vector<std::string> lines(const std::string& text) {
    std::vector<std::string> all;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) all.push_back(line);
    return all;
}

/// Words with one blank between them, however they were broken into lines.
std::string unwrapped(const std::string& text) {
    std::istringstream in(text);
    std::string all;
    for (std::string word; in >> word;) all += (all.empty() ? "" : " ") + word;
    return all;
}

const std::vector<std::string> small = {"--seq", "40", "--kv-seq", "50", "--head-dim", "16"};

class Runner : public testing::Test {
protected:
    void SetUp() override {
        try {
            Device::current();
        } catch (const Refused& reason) {
            GTEST_SKIP() << reason.what();
        }
        folder_ = std::filesystem::temp_directory_path() /
                  ("workbook_runner_" + std::to_string(getpid()) + "_" + testing::UnitTest::GetInstance()->current_test_info()->name());
        std::filesystem::create_directories(folder_);
    }
    void TearDown() override {
        if (!folder_.empty()) std::filesystem::remove_all(folder_);
    }
    std::string file(const std::string& name) const { return (folder_ / name).string(); }

    /// A file of q, k, v whose elements are a fixed pattern.
    std::string write_inputs(const std::string& name, DType type, std::vector<long long> q, std::vector<long long> k,
                             std::vector<long long> v) const {
        TensorFile f;
        const auto tensor = [&](const std::vector<long long>& shape, float step) {
            long long count = 1;
            for (const long long extent : shape) count *= extent;
            std::vector<float> values(count);
            for (long long i = 0; i < count; ++i) values[i] = std::sin(step * static_cast<float>(i % 9973));
            return HostTensor::from_float(type, shape, values);
        };
        f.tensors["q"] = tensor(q, 0.7f);
        f.tensors["k"] = tensor(k, 1.1f);
        f.tensors["v"] = tensor(v, 1.3f);
        f.tensors["mask"] = tensor({3}, 1.0f);  // ignored
        write_safetensors(file(name), f);
        return file(name);
    }

    /// Exit status 2, this on stderr as one line after the program's name, nothing on stdout.
    void expect_rejected(const std::vector<std::string>& words, const std::string& message) {
        const Outcome o = run({"90a"}, words);
        EXPECT_EQ(o.status, 2) << o.out << o.err;
        EXPECT_TRUE(contains(o.err, message)) << o.err;
        EXPECT_EQ(o.err.rfind("step90: ", 0), 0u) << o.err;
        EXPECT_EQ(lines(o.err).size(), 1u) << o.err;
        EXPECT_EQ(o.out, "");
    }

    std::filesystem::path folder_;
};

TEST_F(Runner, RightVariantPassesAndSaysWhatWasChecked) {
    const Outcome o = run({"90a"}, small);
    EXPECT_EQ(o.status, 0) << o.out << o.err;
    EXPECT_EQ(o.err, "");
    EXPECT_TRUE(contains(o.out, "Stage 90: A stage for tests\n")) << o.out;
    EXPECT_TRUE(contains(o.out, "B=1 Hq=1 Hkv=1 Nq=40 Nkv=50 d=16 f32 scale=0.25")) << o.out;
    EXPECT_TRUE(contains(o.out, "normal, seed 0")) << o.out;
    EXPECT_TRUE(contains(o.out, "all 40 rows against float64")) << o.out;
    EXPECT_TRUE(contains(o.out, "90a right")) << o.out;
    EXPECT_TRUE(contains(o.out, "f32   ok")) << o.out;
    EXPECT_FALSE(contains(o.out, "WRONG")) << o.out;
}

TEST_F(Runner, EveryProblemOptionReachesTheKernel) {
    for (const char* dtype : {"f32", "f16", "bf16"})
        for (const char* layout : {"bhnd", "bnhd"})
            for (const bool causal : {false, true}) {
                std::vector<std::string> words = {
                    "--batch",  "2",        "--heads",      "4",          "--kv-heads", "2",       "--seq",
                    "33",       "--kv-seq", "17",           "--head-dim", "24",         "--dtype", dtype,
                    "--layout", layout,     "--scale=-0.3", "--dist",     "outliers",   "--seed",  "18446744073709551615",
                    "--json"};
                if (causal) words.push_back("--causal");
                const Outcome o = run({"90a"}, words);
                ASSERT_EQ(o.status, 0) << dtype << layout << causal << o.out << o.err;
                const Json j = Json::parse(o.out);
                EXPECT_EQ(j["batch"], 2);
                EXPECT_EQ(j["heads"], 4);
                EXPECT_EQ(j["kv_heads"], 2);
                EXPECT_EQ(j["seq"], 33);
                EXPECT_EQ(j["kv_seq"], 17);
                EXPECT_EQ(j["head_dim"], 24);
                EXPECT_EQ(j["dtype"], dtype);
                EXPECT_EQ(j["layout"], layout);
                EXPECT_EQ(j["causal"], causal);
                EXPECT_FLOAT_EQ(j["scale"], -0.3f);
                EXPECT_EQ(j["inputs"], "outliers, seed 18446744073709551615");
                EXPECT_EQ(j["rows"], 2 * 4 * 33);
            }
}

TEST_F(Runner, KvHeadsAndKvSeqDefaultToQs) {
    const Json j = Json::parse(run({"90a"}, {"--heads", "3", "--seq", "20", "--head-dim", "8", "--json"}).out);
    EXPECT_EQ(j["kv_heads"], 3);
    EXPECT_EQ(j["kv_seq"], 20);
}

TEST_F(Runner, WrongResultIsSaidAndIsTheExitStatus) {
    const Outcome o = run({"90c"}, small);
    EXPECT_EQ(o.status, 1);
    EXPECT_TRUE(contains(o.out, "f32   WRONG")) << o.out;
    const Json j = Json::parse(run({"90c"}, small + std::vector<std::string>{"--json"}).out);
    EXPECT_EQ(j["status"], "wrong");
    EXPECT_TRUE(contains(unwrapped(o.out), unwrapped(j["reason"].get<std::string>()))) << o.out;
    const Outcome quiet = run({"90c"}, small + std::vector<std::string>{"--quiet"});
    EXPECT_EQ(quiet.status, 1);
    EXPECT_EQ(quiet.out, "");
    EXPECT_TRUE(contains(quiet.err, "step90: 90c forgetful is wrong: ")) << quiet.err;
}

TEST_F(Runner, UnwrittenRowOutsideTheSampleFails) {
    const Outcome o = run({"90d"}, small + std::vector<std::string>{"--check-rows", "2"});
    EXPECT_EQ(o.status, 1);
    EXPECT_TRUE(contains(o.out, "2 of 40 rows against float64")) << o.out;
    EXPECT_TRUE(contains(unwrapped(o.out), "O: 16 of 640 elements")) << o.out;
    EXPECT_TRUE(contains(unwrapped(o.out), "the first at offset 112")) << o.out;
}

TEST_F(Runner, SamplesRowsOfALargeProblemAndAllOnRequest) {
    EXPECT_EQ(Json::parse(run({"90a"}, small + std::vector<std::string>{"--json", "--check-rows", "5"}).out)["checked_rows"], 5);
    EXPECT_EQ(Json::parse(run({"90a"}, small + std::vector<std::string>{"--json", "--check-rows", "0"}).out)["checked_rows"], 40);
    EXPECT_EQ(Json::parse(run({"90a"}, small + std::vector<std::string>{"--json", "--check-rows", "4000"}).out)["checked_rows"], 40);
}

TEST_F(Runner, KernelThatThrowsFailsWithItsMessageAndTheOthersRun) {
    if (!emulating) GTEST_SKIP() << "a GPU does not check bounds";
    const Outcome o = run({"90e", "90a"}, small);
    EXPECT_EQ(o.status, 1);
    EXPECT_EQ(o.err.rfind("step90: 90e overrunning: ", 0), 0u) << o.err;
    EXPECT_TRUE(contains(o.err, "out of bounds: K(0, 0, 50, 0)")) << o.err;
    EXPECT_TRUE(contains(o.out, "90a right")) << o.out;
    EXPECT_FALSE(contains(o.out, "90e")) << o.out;
    const Json j = Json::parse(run({"90e"}, small + std::vector<std::string>{"--json"}).out);
    EXPECT_EQ(j["status"], "failed");
    EXPECT_TRUE(j["o"].is_null());
}

TEST_F(Runner, RefusedVariantIsReportedAndTheOthersRun) {
    const Outcome o = run({"90f", "90a"}, small + std::vector<std::string>{"--dtype", "bf16"});
    EXPECT_EQ(o.status, 0);  // what can do the problem ran
    EXPECT_EQ(o.err, "step90: 90f narrow: dtype=bf16: f16 is accepted; 90a does all types\n");
    EXPECT_TRUE(contains(o.out, "90a right")) << o.out;

    const Outcome alone = run({"90f"}, small + std::vector<std::string>{"--dtype", "bf16"});
    EXPECT_EQ(alone.status, 3);
    EXPECT_EQ(alone.out, "");  // no table without rows

    const Outcome asked_for =
        run({"90f", "90a"}, small + std::vector<std::string>{"--dtype", "bf16", "--variant", "90f", "--variant", "90a"});
    EXPECT_EQ(asked_for.status, 3);
    EXPECT_TRUE(contains(asked_for.out, "90a right")) << asked_for.out;

    const Outcome json = run({"90f", "90a"}, small + std::vector<std::string>{"--dtype", "bf16", "--json"});
    ASSERT_EQ(lines(json.out).size(), 2u);
    EXPECT_EQ(Json::parse(lines(json.out)[0])["status"], "refused");
    EXPECT_EQ(Json::parse(lines(json.out)[1])["status"], "ok");
}

TEST_F(Runner, WrongOutranksRefused) {
    EXPECT_EQ(run({"90f", "90c"}, small + std::vector<std::string>{"--dtype", "f32"}).status, 1);
    EXPECT_EQ(run({"90c", "90g"}, small + std::vector<std::string>{"--shared-memory", "1K"}).status, 1);
}

TEST_F(Runner, TypeDefaultsToTheFirstThatAVariantDoes) {
    EXPECT_EQ(Json::parse(run({"90f"}, small + std::vector<std::string>{"--json"}).out)["dtype"], "f16");
    EXPECT_EQ(Json::parse(run({"90a"}, small + std::vector<std::string>{"--json"}).out)["dtype"], "f32");
}

TEST_F(Runner, VariantsAreChosenByIdOrName) {
    const Outcome o = run_program(fake_stage(), small + std::vector<std::string>{"--variant", "right", "--variant", "90g"});
    EXPECT_EQ(o.status, 0) << o.err;
    EXPECT_TRUE(contains(o.out, "90a right") && contains(o.out, "90g roomy") && !contains(o.out, "90c")) << o.out;
    expect_rejected({"--variant", "90z"}, "--variant=90z: 90a or right is accepted");
}

TEST_F(Runner, BadOptionsAreNamed) {
    expect_rejected({"--seq", "abc"}, "--seq=abc: a whole number from 1 to 2147483647 is accepted");
    expect_rejected({"--seq", "0"}, "--seq=0: ");
    expect_rejected({"--seq=-4"}, "--seq=-4: ");
    expect_rejected({"--seq", "12x"}, "--seq=12x: ");
    expect_rejected({"--batch", "99999999999"}, "--batch=99999999999: ");
    expect_rejected({"--dtype", "f8"}, "--dtype: ");
    expect_rejected({"--layout", "nhbd"}, "--layout: ");
    expect_rejected({"--dist", "cauchy"}, "--dist: ");
    expect_rejected({"--on", "v100"}, "--on: ");
    expect_rejected({"--scale", "nan"}, "--scale=nan: a finite number is accepted");
    expect_rejected({"--seed", "-1"}, "--seed=-1: ");
    expect_rejected({"--check-rows", "-1"}, "--check-rows=-1: ");
    expect_rejected({"--max-seconds", "0"}, "--max-seconds=0: ");
    expect_rejected({"--shared-memory", "48Q"}, "--shared-memory=48Q: ");
    expect_rejected({"--shared-memory", "0"}, "--shared-memory=0: ");
    expect_rejected({"--shared-memory", "99999999999999999M"}, "--shared-memory=99999999999999999M: ");
    expect_rejected({"--heads", "4", "--kv-heads", "3"}, "kv_heads = 3");
    expect_rejected({"--head-dim", "257"}, "head_dim = 257");
    expect_rejected({"--sequence", "4"}, "--sequence");
    expect_rejected({"stray"}, "stray");
    expect_rejected({"--seq"}, "--seq");
    expect_rejected({"--json", "--traffic"}, "--json");
    if (emulating) {
        expect_rejected({"--schedule", "random"}, "--schedule: ");
        expect_rejected({"--repeats", "3"}, "--repeats=3: ");
    } else {
        expect_rejected({"--schedule", "round-robin"}, "--schedule=round-robin: ");
        expect_rejected({"--repeats", "0"}, "--repeats=0: ");
    }
}

// A line for each variant that ran; 64 of the 80 rows of Q and O belong to the first block, and both read all of K and V.
TEST_F(Runner, WritesTraces) {
    const std::string path = file("trace.jsonl");
    if (!emulating) {
        expect_rejected({"--trace", path}, "--trace=" + path + ": a GPU does not tell; it is for the emulator");
        return;
    }
    const Outcome o = run({"90a", "90b"}, small + std::vector<std::string>{"--heads", "2", "--kv-heads", "1", "--trace", path});
    EXPECT_EQ(o.err, "");
    std::ifstream in(path);
    std::vector<Json> traces;
    for (std::string line; std::getline(in, line);) traces.push_back(Json::parse(line));
    ASSERT_EQ(traces.size(), 2u);
    EXPECT_EQ(traces[0]["variant"], "90a");
    EXPECT_EQ(traces[1]["variant"], "90b");
    const Json& t = traces[0];
    EXPECT_EQ(t["stage"], "90");
    EXPECT_EQ(t["direction"], "fwd");
    EXPECT_EQ(t["heads"], 2);
    EXPECT_EQ(t["kv_heads"], 1);
    EXPECT_EQ(t["seq"], 40);
    EXPECT_EQ(t["kv_seq"], 50);
    EXPECT_EQ(t["head_dim"], 16);
    EXPECT_EQ(t["causal"], false);
    EXPECT_EQ(t["blocks"], Json::parse(R"([
        {"kernel": "row_kernel", "block": [0, 0, 0],
         "touched": [["Q", "read", 0, 63], ["K", "read", 0, 49], ["V", "read", 0, 49], ["O", "write", 0, 63]]},
        {"kernel": "row_kernel", "block": [1, 0, 0],
         "touched": [["Q", "read", 64, 79], ["K", "read", 0, 49], ["V", "read", 0, 49], ["O", "write", 64, 79]]}])"));

    expect_rejected({"--trace", path, "--layout", "bnhd"}, "--trace=" + path + ": --layout=bhnd is accepted");
    expect_rejected({"--trace", file("nowhere/trace.jsonl")}, "--trace=" + file("nowhere/trace.jsonl") + ": cannot be written");
}

TEST_F(Runner, NegativeScaleMayFollowAsItsOwnWord) {
    EXPECT_FLOAT_EQ(Json::parse(run({"90a"}, small + std::vector<std::string>{"--json", "--scale", "-0.5"}).out)["scale"], -0.5f);
}

TEST_F(Runner, LessSharedMemoryIsPretendedAndMoreRefused) {
    const Json j = Json::parse(run({"90a"}, small + std::vector<std::string>{"--json", "--shared-memory", "48K"}).out);
    EXPECT_EQ(j["shared_memory_per_block"], 48 * 1024);
    const Outcome less = run({"90g"}, small + std::vector<std::string>{"--shared-memory", "31KiB"});
    EXPECT_EQ(less.status, 3);
    EXPECT_TRUE(contains(less.err, "needs 32768 bytes of shared memory")) << less.err;
    const Outcome more = run({"90a"}, small + std::vector<std::string>{"--shared-memory", "1M"});
    EXPECT_EQ(more.status, 3);
    EXPECT_TRUE(contains(more.err, "--shared-memory=1048576: a block of ")) << more.err;
}

TEST_F(Runner, EmulatorPlaysTheChosenGpu) {
    if (!emulating) GTEST_SKIP() << "on a GPU --on chooses the prediction only";
    const Json j = Json::parse(run({"90a"}, small + std::vector<std::string>{"--json", "--on", "a100"}).out);
    EXPECT_EQ(j["predicted_on"], "a100");
    EXPECT_EQ(j["compute_capability"], 80);
    EXPECT_EQ(j["shared_memory_per_block"], find_gpu("a100").shared_memory_per_block);
    EXPECT_TRUE(contains(j["device"], "emulator (as NVIDIA A100")) << j["device"];
    EXPECT_EQ(Json::parse(run({"90a"}, small + std::vector<std::string>{"--json"}).out)["predicted_on"], "h200");
}

TEST_F(Runner, JsonHoldsWhatWasCountedAndPredicted) {
    const Outcome o = run({"90a", "90b", "90g"}, small + std::vector<std::string>{"--json"});
    ASSERT_EQ(o.status, 0) << o.err;
    ASSERT_EQ(lines(o.out).size(), 3u);
    const Json a = Json::parse(lines(o.out)[0]), b = Json::parse(lines(o.out)[1]), g = Json::parse(lines(o.out)[2]);
    const long long read = (40 * 16 + 2 * 40 * 50 * 16) * 4, written = (40 * 16 + 40) * 4;
    Problem p;
    p.seq = 40;
    p.kv_seq = 50;
    p.head_dim = 16;
    EXPECT_EQ(a["predicted_read"], read);
    EXPECT_EQ(a["predicted_written"], written);
    EXPECT_EQ(a["naive_requested"], naive_movement(p).requested.total());
    EXPECT_DOUBLE_EQ(a["requested_ratio"], static_cast<double>(read + written) / naive_movement(p).requested.total());
    EXPECT_DOUBLE_EQ(a["flops"], forward_flops(p));
    EXPECT_GT(a["predicted_seconds"], 0.0);
    EXPECT_LE(a["o"]["max_abs"], a["o"]["allowed"]);
    EXPECT_EQ(a["o"]["unwritten"], 0);
    EXPECT_TRUE(a["previous"].is_null());
    EXPECT_EQ(b["previous"], "90a right");
    EXPECT_EQ(b["previous_max_abs"], 0.0);  // the same kernel
    EXPECT_EQ(a["extra_memory"], 0);
    EXPECT_EQ(g["extra_memory"], 4000);
    if (emulating) {
        EXPECT_EQ(a["requested_read"], read);
        EXPECT_EQ(a["requested_written"], written);
        EXPECT_EQ(a["as_predicted"], true);
        EXPECT_EQ(b["as_predicted"], false);
        EXPECT_GE(a["sectors_written"].get<long long>() * 32, written);
        EXPECT_TRUE(a["seconds"].is_null());
        ASSERT_EQ(a["tensors"].size(), 5u);
        EXPECT_EQ(a["tensors"][1]["tensor"], "K");
        EXPECT_EQ(a["tensors"][1]["read"], 40 * 50 * 16 * 4);
        EXPECT_EQ(b["tensors"][1]["predicted_read"], 40 * 50 * 16 * 4 + 4);
    } else {
        EXPECT_TRUE(a["requested_read"].is_null());
        EXPECT_GT(a["seconds"], 0.0);
        EXPECT_GE(a["repetitions"], 3);
    }
}

TEST_F(Runner, MispredictedTrafficIsShown) {
    if (!emulating) GTEST_SKIP() << "a GPU keeps no ledger";
    const Outcome right = run({"90a"}, small + std::vector<std::string>{"--traffic"});
    EXPECT_TRUE(contains(right.out, "= 128,000")) << right.out;
    EXPECT_FALSE(contains(right.out, "!=")) << right.out;
    const Outcome off = run({"90b"}, small + std::vector<std::string>{"--traffic"});
    EXPECT_EQ(off.status, 0);
    EXPECT_TRUE(contains(off.out, "!= 128,004")) << off.out;
    EXPECT_TRUE(contains(unwrapped(off.out), "the formula predicts other traffic than was counted")) << off.out;
}

TEST_F(Runner, RowsOnlyHasNoHeadingAndQuietSaysNothing) {
    const Outcome full = run({"90a", "90g"}, small), rows = run({"90a", "90g"}, small + std::vector<std::string>{"--rows-only"});
    EXPECT_EQ(lines(rows.out).size(), 4u) << rows.out;
    if (emulating) {
        EXPECT_EQ(full.out.substr(full.out.size() - rows.out.size()), rows.out);
    }  // measured times differ from run to run
    const Outcome quiet = run({"90a"}, small + std::vector<std::string>{"--quiet"});
    EXPECT_EQ(quiet.status, 0);
    EXPECT_EQ(quiet.out + quiet.err, "");
}

TEST_F(Runner, TableFitsTheTerminal) {
    const Outcome o = run_program(fake_stage(), {"--heads", "2", "--seq", "100", "--traffic"});
    for (const std::string& line : lines(o.out)) EXPECT_LE(line.size(), 120u) << line;
}

TEST_F(Runner, OutputIsComparedByTheNextStage) {
    for (const char* dtype : {"f32", "bf16"}) {
        const std::vector<std::string> words = small + std::vector<std::string>{"--heads", "2", "--dtype", dtype};
        const std::string before = file("before.safetensors"), after = file("after.safetensors");
        ASSERT_EQ(run({"90a"}, words + std::vector<std::string>{"--output", before}).status, 0);
        const TensorFile written = read_safetensors(before);
        EXPECT_EQ(written.tensors.at("o").shape, (std::vector<long long>{1, 2, 40, 16}));
        EXPECT_EQ(written.tensors.at("o").dtype, parse_dtype(dtype));
        EXPECT_EQ(written.tensors.at("lse").shape, (std::vector<long long>{1, 2, 40}));
        EXPECT_EQ(written.metadata.at("stage"), "90");
        EXPECT_EQ(written.metadata.at("variant"), "90a right");
        EXPECT_EQ(written.metadata.count("time_ms"), emulating ? 0u : 1u);

        // The layout is no part of the problem: the numbers must come out in the same places.
        const Outcome o =
            run({"90g"}, words + std::vector<std::string>{"--layout", "bnhd", "--against", before, "--output", after, "--json"});
        ASSERT_EQ(o.status, 0) << o.err;
        const Json j = Json::parse(o.out);
        EXPECT_EQ(j["previous"], "90a right");
        EXPECT_EQ(j["previous_rel_rms"], 0.0);
        EXPECT_EQ(read_safetensors(after).tensors.at("o").bytes, written.tensors.at("o").bytes);
        EXPECT_EQ(read_safetensors(after).tensors.at("lse").bytes, written.tensors.at("lse").bytes);

        // A wrong run differs from the one before.
        EXPECT_GT(Json::parse(run({"90c"}, words + std::vector<std::string>{"--against", before, "--json"}).out)["previous_rel_rms"], 1e-3);
    }
}

TEST_F(Runner, LastOfSeveralAgainstIsThePreviousStage) {
    const std::string first = file("first.safetensors"), last = file("last.safetensors");
    run({"90c"}, small + std::vector<std::string>{"--output", first, "--quiet"});
    run({"90a"}, small + std::vector<std::string>{"--output", last, "--quiet"});
    const Outcome o = run({"90g"}, small + std::vector<std::string>{"--against", first, "--against", last, "--json"});
    ASSERT_EQ(o.status, 0) << o.err;
    EXPECT_EQ(Json::parse(o.out)["previous"], "90a right");
    EXPECT_EQ(Json::parse(o.out)["previous_rel_rms"], 0.0);
    if (!emulating) {
        EXPECT_EQ(Json::parse(o.out)["baseline"], "90c forgetful");
    }
    const Outcome table = run({"90g"}, small + std::vector<std::string>{"--against", first, "--against", last});
    EXPECT_TRUE(contains(table.out, "previous   90a right (" + last + ")")) << table.out;
}

TEST_F(Runner, ResultsOfAnotherProblemAreNotCompared) {
    const std::string before = file("before.safetensors");
    ASSERT_EQ(run({"90a"}, small + std::vector<std::string>{"--output", before}).status, 0);
    const auto rejected = [&](const std::vector<std::string>& extra, const std::string& ours) {
        expect_rejected(small + extra + std::vector<std::string>{"--against", before}, ours);
        expect_rejected(small + extra + std::vector<std::string>{"--against", before}, "scale=0.25 inputs: normal seed=0'");
    };
    rejected({"--seed", "1"}, "normal seed=1'");
    rejected({"--dist", "outliers"}, "outliers seed=0'");
    rejected({"--causal"}, "causal");
    rejected({"--scale", "0.250001"}, "scale=0.250001");
    rejected({"--dtype", "f16"}, "f16");
    expect_rejected(small + std::vector<std::string>{"--against", file("none.safetensors")}, "none.safetensors");
    const std::string other = write_inputs("inputs.safetensors", DType::f32, {1, 1, 40, 16}, {1, 1, 50, 16}, {1, 1, 50, 16});
    expect_rejected(small + std::vector<std::string>{"--against", other}, "metadata 'problem' is missing");
}

TEST_F(Runner, TamperedResultIsRejected) {
    const std::string before = file("before.safetensors");
    ASSERT_EQ(run({"90a"}, small + std::vector<std::string>{"--output", before}).status, 0);
    TensorFile f = read_safetensors(before);
    const HostTensor lse = f.tensors.at("lse");
    f.tensors.erase("lse");
    write_safetensors(before, f);
    expect_rejected(small + std::vector<std::string>{"--against", before}, "tensor lse is missing; the file holds o");
    f.tensors["lse"] = HostTensor::from_float(DType::f32, {1, 40, 1}, lse.to_float());
    write_safetensors(before, f);
    expect_rejected(small + std::vector<std::string>{"--against", before}, "lse is f32 (1, 40, 1)");
    f.tensors["lse"] = lse;
    f.metadata["time_ms"] = "soon";
    write_safetensors(before, f);
    expect_rejected(small + std::vector<std::string>{"--against", before}, "time_ms is 'soon'");
}

TEST_F(Runner, InputFileGivesShapeTypeAndNumbers) {
    const std::string in = write_inputs("in.safetensors", DType::bf16, {2, 4, 20, 8}, {2, 2, 30, 8}, {2, 2, 30, 8});
    const std::string a = file("a.safetensors"), b = file("b.safetensors");
    const Outcome o = run({"90a"}, {"--input", in, "--json", "--output", a});
    ASSERT_EQ(o.status, 0) << o.err;
    const Json j = Json::parse(o.out);
    EXPECT_EQ(j["batch"], 2);
    EXPECT_EQ(j["heads"], 4);
    EXPECT_EQ(j["kv_heads"], 2);
    EXPECT_EQ(j["seq"], 20);
    EXPECT_EQ(j["kv_seq"], 30);
    EXPECT_EQ(j["head_dim"], 8);
    EXPECT_EQ(j["dtype"], "bf16");

    // Laid out anew in memory, the numbers stay the same; options that agree with the file are welcome.
    ASSERT_EQ(run({"90a"}, {"--input", in, "--layout", "bnhd", "--heads", "4", "--dtype", "bf16", "--against", a, "--output", b}).status,
              0);
    EXPECT_EQ(read_safetensors(a).tensors.at("o").bytes, read_safetensors(b).tensors.at("o").bytes);

    // A single changed bit is another problem.
    TensorFile f = read_safetensors(in);
    f.tensors["v"].bytes.back() ^= std::byte{1};
    write_safetensors(file("changed.safetensors"), f);
    expect_rejected({"--input", file("changed.safetensors"), "--against", a}, "is the result of another problem");
}

TEST_F(Runner, OptionsThatContradictTheInputFileAreNamed) {
    const std::string in = write_inputs("in.safetensors", DType::f32, {2, 4, 20, 8}, {2, 2, 30, 8}, {2, 2, 30, 8});
    expect_rejected({"--input", in, "--batch", "1"}, "--batch=1 contradicts " + in + ", where it is 2");
    expect_rejected({"--input", in, "--heads", "2"}, "--heads=2 contradicts");
    expect_rejected({"--input", in, "--kv-heads", "4"}, "--kv-heads=4 contradicts");
    expect_rejected({"--input", in, "--seq", "21"}, "--seq=21 contradicts");
    expect_rejected({"--input", in, "--kv-seq", "20"}, "--kv-seq=20 contradicts");
    expect_rejected({"--input", in, "--head-dim", "16"}, "--head-dim=16 contradicts");
    expect_rejected({"--input", in, "--dtype", "f16"}, "--dtype=f16: the tensors of " + in + " are f32");
    expect_rejected({"--input", in, "--seed", "0"}, "--seed has no meaning with --input");
    expect_rejected({"--input", in, "--dist", "normal"}, "--dist has no meaning with --input");
}

TEST_F(Runner, UnfitInputFilesAreNamed) {
    const auto rejected = [&](const std::string& path, const std::string& message) {
        expect_rejected({"--input", path}, path + ": " + message);
    };
    rejected(write_inputs("1", DType::f32, {2, 4, 20, 8}, {2, 2, 30, 8}, {2, 2, 31, 8}),
             "tensor k has shape (2, 2, 30, 8) and v (2, 2, 31, 8)");
    rejected(write_inputs("2", DType::f32, {1, 4, 20, 8}, {2, 2, 30, 8}, {2, 2, 30, 8}), "tensor q has B=1 and k B=2");
    rejected(write_inputs("3", DType::f32, {2, 4, 20, 16}, {2, 2, 30, 8}, {2, 2, 30, 8}), "tensor q has d=16 and k d=8");
    rejected(write_inputs("4", DType::f32, {20, 8}, {2, 2, 30, 8}, {2, 2, 30, 8}), "tensor q has shape (20, 8); (B, H, N, d) is accepted");
    rejected(write_inputs("5", DType::f32, {1, 1, 0, 8}, {1, 1, 30, 8}, {1, 1, 30, 8}), "tensor q has shape (1, 1, 0, 8)");
    TensorFile f = read_safetensors(write_inputs("6", DType::f32, {1, 1, 4, 8}, {1, 1, 4, 8}, {1, 1, 4, 8}));
    f.tensors["k"] = HostTensor::from_float(DType::f16, {1, 1, 4, 8}, std::vector<float>(32, 1.0f));
    write_safetensors(file("7"), f);
    rejected(file("7"), "tensor q is f32, k f16 and v f32");
    f.tensors.erase("k");
    write_safetensors(file("8"), f);
    rejected(file("8"), "tensor k is missing; the file holds mask, q, v");
    expect_rejected({"--input", file("absent")}, file("absent"));
}

TEST_F(Runner, OutputIntoAMissingFolderIsABadFile) {
    const Outcome o = run({"90a"}, small + std::vector<std::string>{"--output", file("no/such/folder.safetensors")});
    EXPECT_EQ(o.status, 2);
    EXPECT_TRUE(contains(o.err, "no/such/folder.safetensors")) << o.err;
}

TEST_F(Runner, TooLongForTheEmulatorIsRefusedAtOnce) {
    if (!emulating) GTEST_SKIP();
    const Outcome o = run({"90a"}, {"--heads", "64", "--seq", "1000000"});
    EXPECT_EQ(o.status, 3);
    EXPECT_TRUE(contains(o.err, "step90: 90a right: would take about ")) << o.err;
    EXPECT_TRUE(contains(o.err, "use a smaller problem, or --force")) << o.err;
    EXPECT_EQ(o.out, "");
}

TEST_F(Runner, MaxSecondsSkips) {
    const Outcome o = run({"90a"}, {"--heads", "64", "--seq", "100000", "--max-seconds", "0.001"});
    EXPECT_EQ(o.status, 3);
    EXPECT_TRUE(contains(o.err, "skipped: would take about ")) << o.err;
    EXPECT_TRUE(contains(o.err, "more than --max-seconds allows (1 ms)")) << o.err;
}

TEST_F(Runner, SchedulesAllGiveTheSameResult) {
    if (!emulating) GTEST_SKIP();
    const std::string a = file("a.safetensors");
    ASSERT_EQ(run({"90a"}, small + std::vector<std::string>{"--output", a}).status, 0);
    for (const char* schedule : {"round-robin", "lowest-first", "highest-first"}) {
        const Outcome o = run({"90a"}, small + std::vector<std::string>{"--schedule", schedule, "--against", a, "--json"});
        EXPECT_EQ(o.status, 0) << o.err;
        EXPECT_EQ(Json::parse(o.out)["schedule"], schedule);
        EXPECT_EQ(Json::parse(o.out)["previous_rel_rms"], 0.0);
    }
}

TEST_F(Runner, ListSaysWhatEachVariantDoes) {
    const Outcome o = run({"90a", "90f"}, {"--list"});
    EXPECT_EQ(o.status, 0);
    EXPECT_TRUE(contains(o.out, "90a  right\n      f32   every head dimension up to 256; causal; Hq > Hkv; Nq != Nkv; any length; bnhd\n"))
        << o.out;
    EXPECT_TRUE(contains(o.out, "90f  narrow\n      f32   no: dtype=f32: f16 is accepted; 90a does all types\n")) << o.out;
}

TEST_F(Runner, HelpListsEveryOption) {
    const Outcome o = run({"90a"}, {"--help"});
    EXPECT_EQ(o.status, 0);
    EXPECT_EQ(o.err, "");
    for (const char* option :
         {"--batch",       "--heads",   "--kv-heads",   "--seq",       "--kv-seq",   "--head-dim", "--dtype",         "--causal",
          "--scale",       "--seed",    "--dist",       "--layout",    "--schedule", "--on",       "--shared-memory", "--variant",
          "--input",       "--output",  "--against",    "--rows-only", "--quiet",    "--traffic",  "--json",          "--force",
          "--max-seconds", "--repeats", "--check-rows", "--list",      "--trace"}) {
        EXPECT_TRUE(contains(o.out, option)) << option;
    }
    EXPECT_TRUE(contains(o.out, "Exit status: 0"));
}

}  // namespace
