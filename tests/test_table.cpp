// Numbers as the table prints them, and sizes and durations as people write and read them.
#include "stage/options.hpp"
#include "stage/progress.hpp"
#include "stage/table.hpp"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <limits>

using namespace workbook;

namespace {

TEST(Table, SignificantDigitsWithoutExponent) {
    EXPECT_EQ(significant(0), "0");
    EXPECT_EQ(significant(1), "1.000");
    EXPECT_EQ(significant(12.345678), "12.35");
    EXPECT_EQ(significant(0.0123456), "0.01235");
    EXPECT_EQ(significant(9.9999), "10.00");
    EXPECT_EQ(significant(99999.7), "100000");
    EXPECT_EQ(significant(123456789), "123456789");
    EXPECT_EQ(significant(-0.5, 2), "-0.50");
    EXPECT_EQ(significant(std::numeric_limits<double>::quiet_NaN()), "nan");
    EXPECT_EQ(significant(-std::numeric_limits<double>::infinity()), "-inf");
}

TEST(Table, GroupsOfThreeDigits) {
    EXPECT_EQ(grouped(0), "0");
    EXPECT_EQ(grouped(999), "999");
    EXPECT_EQ(grouped(1000), "1,000");
    EXPECT_EQ(grouped(1234567), "1,234,567");
    EXPECT_EQ(grouped(-100), "-100");
    EXPECT_EQ(grouped(-123456), "-123,456");
}

TEST(Table, SizesWithSuffixes) {
    EXPECT_EQ(parse_bytes("--x", "1"), 1u);
    EXPECT_EQ(parse_bytes("--x", "48K"), 49152u);
    EXPECT_EQ(parse_bytes("--x", "48k"), 49152u);
    EXPECT_EQ(parse_bytes("--x", "227KiB"), 232448u);
    EXPECT_EQ(parse_bytes("--x", "2MB"), 2097152u);
    EXPECT_EQ(parse_bytes("--x", "100B"), 100u);
    for (const char* bad : {"", "K", "-1", "0", "0K", "1.5K", "48 K", "48KK", "1G", "18446744073709551616", "18446744073709551615K"})
        EXPECT_THROW(parse_bytes("--x", bad), InvalidArgument) << bad;
}

TEST(Table, RoughDurations) {
    EXPECT_EQ(rough_duration(0.00085), "850 us");
    EXPECT_EQ(rough_duration(0.0123), "12 ms");
    EXPECT_EQ(rough_duration(1), "1 s");
    EXPECT_EQ(rough_duration(12.4), "12 s");
    EXPECT_EQ(rough_duration(90), "1.5 min");
    EXPECT_EQ(rough_duration(3 * 3600), "3 h");
    EXPECT_EQ(rough_duration(100000), "28 h");
    EXPECT_EQ(rough_duration(1e6), "12 days");
}

Report example() {
    Report r;
    r.stage = "06";
    r.id = "06b";
    r.name = "warp_specialised_pingpong";
    r.flops = 4.0 * 16 * 64 * 131072.0 * 131072.0 * 128;
    r.naive_requested = 1;
    r.verdict.ok = true;
    return r;
}

TEST(Table, HeadsAndRowsAlignAndFit) {
    for (const bool emulated : {true, false}) {
        const std::string text = column_heads(emulated) + row(example(), DType::bf16, emulated);
        std::istringstream in(text);
        for (std::string line; std::getline(in, line);) EXPECT_LE(line.size(), 120u) << line;
    }
}

TEST(Table, PredictionsMustMatchForEveryTensor) {
    Report r = example();
    EXPECT_EQ(r.as_predicted(), std::nullopt);
    r.predicted.requested.tensors = {{"Q", 64, 0}, {"O", 0, 32}};
    simt::LedgerRow q{"Q", {64, 2}, {}}, o{"O", {}, {32, 1}};
    r.counted = std::vector<simt::LedgerRow>{q, o};
    EXPECT_EQ(r.as_predicted(), true);
    r.counted = std::vector<simt::LedgerRow>{q};  // O was never written
    EXPECT_EQ(r.as_predicted(), false);
    simt::LedgerRow s{"S", {4, 1}, {}};
    r.counted = std::vector<simt::LedgerRow>{q, o, s};  // S was not foreseen
    EXPECT_EQ(r.as_predicted(), false);
    std::swap(q.read, q.written);
    std::swap(o.read, o.written);
    r.counted = std::vector<simt::LedgerRow>{q, o};  // same totals, other direction
    EXPECT_EQ(r.as_predicted(), false);
}

// Where nothing was counted, nothing is said.
TEST(Table, WavefrontsOfSharedMemoryWhereAnyWereCounted) {
    using Json = nlohmann::json;
    Report r = example();
    r.counted = std::vector<simt::LedgerRow>{};
    const auto json = [&] {
        return Json::parse(
            json_line(r, Problem{}, "normal, seed 0", Device{.name = "emulator"}, simt::Schedule::round_robin, find_gpu("h200")));
    };
    EXPECT_EQ(traffic_table(r).find("wavefronts"), std::string::npos);
    EXPECT_EQ(json()["shared"], Json::object());

    r.shared = {{"ldmatrix", {12000, 12000}}, {"vector loads", {54000, 12000}}};
    EXPECT_NE(traffic_table(r).find("shared memory, ldmatrix: 12,000 wavefronts, 12,000 would be without bank conflicts (1.00x)\n"),
              std::string::npos)
        << traffic_table(r);
    EXPECT_NE(traffic_table(r).find("shared memory, vector loads: 54,000 wavefronts, 12,000 would be without bank conflicts (4.50x)\n"),
              std::string::npos)
        << traffic_table(r);
    EXPECT_EQ(json()["shared"], Json::parse(R"({"ldmatrix": {"wavefronts": 12000, "ideal": 12000},
                                               "vector loads": {"wavefronts": 54000, "ideal": 12000}})"));
}

}  // namespace
