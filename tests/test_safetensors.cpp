// Safetensors files: what is written comes back, the safetensors package's own bytes are read and written, and damage is refused.
#include "attention/error.hpp"
#include "tensor/safetensors.hpp"

#include <gtest/gtest.h>

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace workbook {

bool operator==(const HostTensor& a, const HostTensor& b) { return a.dtype == b.dtype && a.shape == b.shape && a.bytes == b.bytes; }
bool operator==(const TensorFile& a, const TensorFile& b) { return a.tensors == b.tensors && a.metadata == b.metadata; }

namespace {

namespace fs = std::filesystem;
using std::string_literals::operator""s;

/// A folder of its own for each test, removed at the end.
class Safetensors : public testing::Test {
protected:
    Safetensors() {
        std::string name = (fs::temp_directory_path() / "workbook-safetensors-XXXXXX").string();
        if (!::mkdtemp(name.data())) throw std::runtime_error("mkdtemp failed: " + name);
        folder = name;
    }
    ~Safetensors() override { fs::remove_all(folder); }

    fs::path save(const std::string& bytes, const std::string& name = "file.safetensors") const {
        fs::path path = folder / name;
        fs::remove(path);  // quicker than to overwrite it: some file systems then wait for the disk
        std::ofstream(path, std::ios::binary) << bytes;
        return path;
    }

    std::size_t files() const { return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator())); }

    fs::path folder;
};

std::string load(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::string length_prefix(std::uint64_t n) {
    std::string bytes(8, '\0');
    for (char& c : bytes) {
        c = static_cast<char>(n & 255);
        n >>= 8;
    }
    return bytes;
}

/// A file with this header and `data` bytes behind it.
std::string with_header(const std::string& header, std::size_t data = 0) {
    return length_prefix(header.size()) + header + std::string(data, '\x01');
}

/// The FileError's text; a test failure if the call succeeds or throws anything else.
template <class F>
std::string file_error(F&& f) {
    try {
        f();
    } catch (const FileError& error) {
        return error.what();
    } catch (const std::exception& error) {
        ADD_FAILURE() << "not a FileError: " << error.what();
        return {};
    }
    ADD_FAILURE() << "no error";
    return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != text.npos; }

std::vector<float> ramp(long long count) {
    std::vector<float> values(static_cast<std::size_t>(count));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.5f * static_cast<float>(i) - 3.0f;
    return values;
}

TEST_F(Safetensors, RoundTripOfEveryTypeAndShape) {
    const std::vector<std::vector<long long>> shapes = {{}, {0}, {1}, {7}, {3, 0, 5}, {2, 3, 5}, {1, 2, 3, 4}, {1, 1, 1, 1, 1, 1, 2}};
    TensorFile file;
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        for (const auto& shape : shapes) {
            long long count = 1;
            for (long long extent : shape) count *= extent;
            auto tensor = HostTensor::from_float(dtype, shape, ramp(count));
            EXPECT_EQ(tensor.elements(), count);
            EXPECT_EQ(tensor.bytes.size(), static_cast<std::size_t>(count) * (dtype == DType::f32 ? 4 : 2));
            EXPECT_EQ(tensor.to_float(), ramp(count));
            file.tensors[std::to_string(static_cast<int>(dtype)) + "/" + std::to_string(file.tensors.size())] = tensor;
        }
    }
    file.tensors[""] = HostTensor::from_float(DType::f16, {1}, {1.0f});
    file.tensors["\"quoted\", \\ \n\t\x01 and \u00e4\U0001F600"] = HostTensor::from_float(DType::bf16, {1}, {2.0f});
    file.metadata = {{"", ""}, {"text", "line\nline"}, {"\u00fc", "\"\\\x7f"}};
    fs::path path = folder / "file.safetensors";
    write_safetensors(path, file);
    EXPECT_EQ(read_safetensors(path), file);
    EXPECT_EQ(files(), 1u) << "the partial file is still there";
}

TEST_F(Safetensors, NoTensors) {
    write_safetensors(folder / "file", {});
    EXPECT_EQ(load(folder / "file"), length_prefix(8) + "{}      ");
    EXPECT_EQ(read_safetensors(folder / "file"), TensorFile{});
}

// Written by the Python package safetensors 0.8.0: save() of these tensors with metadata.
const std::string golden =
    "X\x01\0\0\0\0\0\0"
    "{\"__metadata__\":{\"key\":\"v\xc3\xa4lue \\\\\"},"
    "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,2],\"data_offsets\":[0,0]},"
    "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
    "\"wide\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
    "\"brain \\\"x\\\"\\n\":{\"dtype\":\"BF16\",\"shape\":[1],\"data_offsets\":[28,30]},"
    "\"half\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[30,36]}}       "
    "\0\0\xe0@\0\0\x80?\0\0\0\xc0\0\0\0?\0\0P@\0\0\0\x80\0\xe0\x7fG"
    "\xc0?"
    "\0<\0\xc0\0\x04"s;

TensorFile golden_content() {
    TensorFile file;
    file.metadata["key"] = "v\u00e4lue \\";
    file.tensors["wide"] = HostTensor::from_float(DType::f32, {2, 3}, {1.0f, -2.0f, 0.5f, 3.25f, -0.0f, 65504.0f});
    file.tensors["scalar"] = HostTensor::from_float(DType::f32, {}, {7.0f});
    file.tensors["empty"] = HostTensor::from_float(DType::f32, {0, 2}, {});
    file.tensors["half"] = HostTensor::from_float(DType::f16, {3}, {1.0f, -2.0f, 0x1p-14f});
    file.tensors["brain \"x\"\n"] = HostTensor::from_float(DType::bf16, {1}, {1.5f});
    return file;
}

TEST_F(Safetensors, ReadsThePackagesBytes) { EXPECT_EQ(read_safetensors(save(golden)), golden_content()); }

TEST_F(Safetensors, WritesThePackagesBytes) {
    write_safetensors(folder / "file", golden_content());
    EXPECT_EQ(load(folder / "file"), golden);
}

TEST_F(Safetensors, AcceptsWhatTheFormatAllows) {
    // Data in another order than the names, fields in any order, white space, escapes in keys, two empty tensors at one offset.
    std::string header =
        "{ \"b\":{\"data_offsets\":[0,4],\n\"dtype\":\"F32\",\"shape\":[]},\"\\u0061\":{\"shape\":[2],"
        "\"data_offsets\":[4,8],\"dtype\":\"F16\"}, \"e1\":{\"dtype\":\"BF16\",\"shape\":[0],\"data_offsets\":[4,4]},"
        "\"e2\":{\"dtype\":\"F32\",\"shape\":[5,0],\"data_offsets\":[4,4]} , \"__metadata__\":{} }\n\t ";
    TensorFile file = read_safetensors(save(with_header(header, 8)));
    ASSERT_EQ(file.tensors.size(), 4u);
    EXPECT_EQ(file.tensors.at("a").shape, std::vector<long long>{2});
    EXPECT_EQ(file.tensors.at("b").bytes, std::vector<std::byte>(4, std::byte{1}));
    EXPECT_EQ(file.tensors.at("e1").elements(), 0);
    EXPECT_EQ(file.tensors.at("e2").shape, (std::vector<long long>{5, 0}));
    EXPECT_TRUE(file.metadata.empty());
}

/// The bytes of a file, or a function that makes them: those of large files are made when their test runs, not in each process.
struct Content {
    Content(const char* text) : bytes(text) {}
    Content(std::string text) : bytes(std::move(text)) {}
    Content(std::string (*function)()) : make(function) {}
    std::string get() const { return make ? make() : bytes; }

    std::string bytes;
    std::string (*make)() = nullptr;
};

struct Damage {
    const char* name;
    Content content;
    std::string reason;  // must be part of the message

    friend void PrintTo(const Damage& damage, std::ostream* out) { *out << damage.name; }
};

class SafetensorsDamage : public Safetensors, public testing::WithParamInterface<Damage> {};

TEST_P(SafetensorsDamage, IsRefusedWithFileAndReason) {
    fs::path path = save(GetParam().content.get());
    std::string message = file_error([&] { read_safetensors(path); });
    EXPECT_TRUE(contains(message, "cannot read safetensors file \"" + path.string() + "\"")) << message;
    EXPECT_TRUE(contains(message, GetParam().reason)) << message;
    EXPECT_LT(message.size(), 1000u) << "a message must not carry the file along";
    for (char c : message) EXPECT_GE(static_cast<unsigned char>(c), 0x20) << message;
}

/// One F32 tensor "a" with the given shape and offsets, and `data` bytes.
std::string one(const std::string& shape, const std::string& offsets, std::size_t data, const std::string& dtype = "\"F32\"") {
    return with_header("{\"a\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":" + offsets + "}}", data);
}

/// Two F32 tensors "a" and "b" of two elements each.
std::string two(const std::string& a_offsets, const std::string& b_offsets, std::size_t data) {
    return with_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" + a_offsets +
                           "},\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":" + b_offsets + "}}",
                       data);
}

std::string metadata(const std::string& value) { return with_header("{\"__metadata__\":" + value + "}"); }

std::string repeat(const std::string& text, std::size_t times) {
    std::string out;
    for (std::size_t i = 0; i < times; ++i) out += text;
    return out;
}

// What the damaged files below are made from is sound.
TEST_F(Safetensors, TheUndamagedFilesAreAccepted) {
    EXPECT_EQ(read_safetensors(save(one("[2]", "[0,8]", 8))).tensors.size(), 1u);
    EXPECT_EQ(read_safetensors(save(two("[0,8]", "[8,16]", 16))).tensors.size(), 2u);
    EXPECT_EQ(read_safetensors(save(metadata("{\"k\":\"v\"}"))).metadata.size(), 1u);
}

const char* const must_be_shape = "tensor \"a\": \"shape\" must be an array of integers from 0 to 2^63 - 1, found ";
const char* const must_be_offsets = "tensor \"a\": \"data_offsets\" must be an array of two integers from 0 to 2^63 - 1, found ";

INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsDamage,
    testing::Values(
        Damage{"Empty", "", "it has 0 bytes, too short for the 8"}, Damage{"SevenBytes", "1234567", "it has 7 bytes, too short for the 8"},
        Damage{"HeaderOfZeroBytes", length_prefix(0), "begin with '{'"},
        Damage{"HeaderBeyondFile", length_prefix(100) + "{}", "give a header of 100 bytes, but the file has only 2 more"},
        Damage{"HeaderAboveLimit", length_prefix(100'000'001) + "{}", "a header of 100000001 bytes, at most 100000000 are accepted"},
        Damage{"HeaderLengthAllOnes", std::string(64, '\xff'), "a header of 18446744073709551615 bytes, at most 100000000"},
        Damage{"NotJson", with_header("{hello}"), "the header is not JSON at its byte 2"},
        Damage{"CutJson", with_header("{\"a\":{\"dtype\":\"F3"), "the header is not JSON at its byte"},
        Damage{"TrailingJson", with_header("{}{}"), "the header is not JSON at its byte 3"},
        Damage{"TrailingComma", with_header("{\"__metadata__\":{},}"), "the header is not JSON"},
        Damage{"Comment", with_header("{/**/}"), "the header is not JSON"},
        Damage{"HugeExponent", one("[1e999]", "[0,8]", 8), "the header is not JSON"},
        Damage{"ZeroByteBehindJson", with_header("{}\0junk"s), "the header is not JSON: its byte 2 is zero"},
        Damage{"NotUtf8", with_header("{\"\xff\xfe\":{}}"), "the header is not JSON"},
        Damage{"LoneSurrogate", with_header("{\"\\ud800\":{}}"), "the header is not JSON"},
        Damage{"ControlCharacterInName", with_header("{\"\n\":{}}"), "the header is not JSON"},
        Damage{"HeaderIsArray", with_header("[]"), "must be a JSON object and begin with '{'"},
        Damage{"HeaderIsString", with_header("\"x\""), "must be a JSON object and begin with '{'"},
        Damage{"SpaceBeforeHeader", with_header(" {}"), "must be a JSON object and begin with '{'"},
        Damage{"ByteOrderMark", with_header("\xef\xbb\xbf{}"), "must be a JSON object and begin with '{'"},
        Damage{"DeepArrays", +[] { return with_header("{\"a\":" + std::string(10'000'000, '[')); }, "expected an object"},
        Damage{"DeepObjects", +[] { return with_header(repeat("{\"a\":", 1'000'000)); }, "unknown field \"a\""},
        Damage{"DeepShape", +[] { return one(std::string(1'000'000, '['), "[0,8]", 8); }, must_be_shape + "an array"s},
        Damage{"DeepMetadata", +[] { return metadata(repeat("{\"a\":", 1'000'000)); },
               "the value of \"a\" must be a string, found an object"},
        Damage{"TensorIsNumber", with_header("{\"a\":3}"), "tensor \"a\": expected an object with"},
        Damage{"TensorIsNull", with_header("{\"a\":null}"), "found null"},
        Damage{"TensorIsArray", with_header("{\"a\":[]}"), "found an array"},
        Damage{"DtypeMissing", with_header("{\"a\":{\"shape\":[2],\"data_offsets\":[0,8]}}", 8),
               "tensor \"a\": field \"dtype\" is missing"},
        Damage{"ShapeMissing", with_header("{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,8]}}", 8), "field \"shape\" is missing"},
        Damage{"OffsetsMissing", with_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[2]}}", 8), "field \"data_offsets\" is missing"},
        Damage{"AllMissing", with_header("{\"a\":{}}"), "is missing"},
        Damage{"UnknownField", with_header("{\"a\":{\"scale\":2}}"), "tensor \"a\": unknown field \"scale\"; accepted are"},
        Damage{"DtypeUnknown", one("[2]", "[0,8]", 8, "\"F33\""),
               "dtype \"F33\" is not supported; accepted are \"F32\", \"F16\", \"BF16\" and \"I32\""},
        Damage{"DtypeNotSupported", one("[1]", "[0,8]", 8, "\"I64\""), "dtype \"I64\" is not supported"},
        Damage{"DtypeLowerCase", one("[2]", "[0,8]", 8, "\"f32\""), "dtype \"f32\" is not supported"},
        Damage{"DtypeNotString", one("[2]", "[0,8]", 8, "32"), "\"dtype\" must be a string, found the number 32"},
        Damage{"DtypeNull", one("[2]", "[0,8]", 8, "null"), "\"dtype\" must be a string, found null"},
        Damage{"DtypeLong", +[] { return one("[2]", "[0,8]", 8, '"' + std::string(1'000'000, 'F') + '"'); }, "FFF...\" is not supported"},
        Damage{"ShapeNotArray", one("2", "[0,8]", 8), must_be_shape + "the number 2"s},
        Damage{"ShapeObject", one("{}", "[0,8]", 8), must_be_shape + "an object"s},
        Damage{"ShapeNegative", one("[-2]", "[0,8]", 8), must_be_shape + "the number -2"s},
        Damage{"ShapeMinusZero", one("[-0]", "[0,0]", 0), must_be_shape + "the number -0"s},
        Damage{"ShapeFraction", one("[2.5]", "[0,8]", 8), must_be_shape + "the number 2.5"s},
        Damage{"ShapeFloat", one("[2.0]", "[0,8]", 8), must_be_shape + "the number 2.0"s},
        Damage{"ShapeString", one("[\"2\"]", "[0,8]", 8), must_be_shape + "the string \"2\""s},
        Damage{"ShapeBool", one("[true]", "[0,8]", 8), must_be_shape + "true"s},
        Damage{"ShapeNull", one("[null]", "[0,8]", 8), must_be_shape + "null"s},
        Damage{"ShapeMoreThan64Bits", one("[18446744073709551616]", "[0,8]", 8), must_be_shape + "the number 18446744073709551616"s},
        Damage{"ShapeMoreThan63Bits", one("[9223372036854775808]", "[0,8]", 8), "shape [9223372036854775808] is too large"},
        Damage{"ShapeBytesOverflow", one("[4611686018427387906]", "[0,8]", 8), "shape [4611686018427387906] is too large"},
        Damage{"ShapeProductOverflow", one("[4294967296,4294967296,2]", "[0,0]", 0), "shape [4294967296, 4294967296, 2] is too large"},
        Damage{"ShapeProductOverflowTimesZero", one("[4294967296,4294967296,0]", "[0,0]", 0), "is too large"},
        Damage{"OffsetsNotArray", one("[2]", "8", 8), must_be_offsets + "the number 8"s},
        Damage{"OffsetsNegative", one("[2]", "[-8,0]", 8), must_be_offsets + "the number -8"s},
        Damage{"OffsetsFraction", one("[2]", "[0,8.5]", 8), must_be_offsets + "the number 8.5"s},
        Damage{"OffsetsExponent", one("[2]", "[0,8e0]", 8), must_be_offsets + "the number 8e0"s},
        Damage{"OffsetsMoreThan64Bits", one("[2]", "[0,18446744073709551624]", 8), must_be_offsets + "the number 18446744073709551624"s},
        Damage{"OffsetsEmpty", one("[2]", "[]", 8), "\"data_offsets\" must be two numbers"},
        Damage{"OffsetsOne", one("[2]", "[8]", 8), "\"data_offsets\" must be two numbers"},
        Damage{"OffsetsThree", one("[2]", "[0,4,8]", 8), "\"data_offsets\" must be two numbers"},
        Damage{"OffsetsBackwards", one("[2]", "[8,0]", 8), "data_offsets [8, 0] end before they begin"},
        Damage{"OffsetsBeyondData", one("[3]", "[0,12]", 8), "data_offsets [0, 12] end beyond the 8 bytes of data"},
        Damage{"OffsetsWrapAround", one("[2]", "[18446744073709551612,4]", 8), "end before they begin"},
        Damage{"SizeTooSmall", one("[3]", "[0,8]", 8), "hold 8 bytes, but shape [3] of F32 takes 12"},
        Damage{"SizeTooLarge", one("[1]", "[0,8]", 8), "hold 8 bytes, but shape [1] of F32 takes 4"},
        Damage{"SizeOfScalar", one("[]", "[0,8]", 8), "hold 8 bytes, but shape [] of F32 takes 4"},
        Damage{"SizeOfEmpty", one("[0]", "[0,8]", 8), "hold 8 bytes, but shape [0] of F32 takes 0"},
        Damage{"SizeOfOtherDtype", one("[2]", "[0,8]", 8, "\"BF16\""), "shape [2] of BF16 takes 4"},
        Damage{"LongShape", +[] { return one("[" + repeat("1,", 100'000) + "1]", "[0,8]", 8); }, "1, 1... of F32 takes 4"},
        Damage{"DataCut", one("[2]", "[0,8]", 7), "end beyond the 7 bytes of data"},
        Damage{"TrailingBytes", one("[2]", "[0,8]", 9), "1 trailing bytes after the last tensor"},
        Damage{"DataWithoutTensor", with_header("{}", 5), "5 trailing bytes"},
        Damage{"HoleAtTheStart", one("[2]", "[4,12]", 12), "bytes 0 to 4 of the data, before tensor \"a\", belong to no tensor"},
        Damage{"HoleBetween", two("[0,8]", "[12,20]", 20), "bytes 8 to 12 of the data, before tensor \"b\""},
        Damage{"HoleBeforeEmpty", one("[0]", "[4,4]", 4), "bytes 0 to 4 of the data"},
        Damage{"Overlap", two("[0,8]", "[4,12]", 12),
               "tensor \"b\" begins at byte 4 of the data and overlaps the one before, which ends at 8"},
        Damage{"SameBytesTwice", two("[0,8]", "[0,8]", 8), "overlaps the one before"},
        Damage{"DuplicateTensor", with_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"a\":{}}"),
               "duplicate tensor \"a\""},
        Damage{"DuplicateTensorByEscape", with_header("{\"a\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},\"\\u0061\":{}}"),
               "duplicate tensor \"a\""},
        Damage{"DuplicateField", with_header("{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]}}"),
               "tensor \"a\": duplicate field \"dtype\""},
        Damage{"DuplicateShape", with_header("{\"a\":{\"shape\":[],\"shape\":[]}}"), "duplicate field \"shape\""},
        Damage{"DuplicateOffsets", with_header("{\"a\":{\"data_offsets\":[0,0],\"data_offsets\":[0,0]}}"),
               "duplicate field \"data_offsets\""},
        Damage{"DuplicateMetadata", with_header("{\"__metadata__\":{},\"__metadata__\":{}}"), "duplicate key \"__metadata__\""},
        Damage{"DuplicateMetadataKey", metadata("{\"k\":\"1\",\"k\":\"2\"}"), "duplicate key \"k\" in \"__metadata__\""},
        Damage{"MetadataArray", metadata("[]"), "\"__metadata__\" must be an object of strings, found an array"},
        Damage{"MetadataString", metadata("\"x\""), "must be an object of strings, found the string \"x\""},
        Damage{"MetadataNull", metadata("null"), "must be an object of strings, found null"},
        Damage{"MetadataNumber", metadata("{\"k\":1}"), "the value of \"k\" must be a string, found the number 1"},
        Damage{"MetadataNested", metadata("{\"k\":{}}"), "the value of \"k\" must be a string, found an object"},
        Damage{"MetadataList", metadata("{\"k\":[]}"), "the value of \"k\" must be a string, found an array"},
        Damage{"LongNameWithControlCharacters", +[] { return with_header("{\"" + repeat("\\n\\u0000\\u00e4", 100'000) + "\":1}"); },
               "\\x0a\\x00\u00e4"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(Safetensors, PathsThatCannotBeRead) {
    auto refused = [&](const fs::path& path, const std::string& reason) {
        std::string message = file_error([&] { read_safetensors(path); });
        EXPECT_TRUE(contains(message, path.string()) && contains(message, reason)) << message;
    };
    refused(folder / "absent", "No such file");
    refused(folder, "it is a directory");
    refused(save("x") / "below", "Not a directory");
    fs::create_symlink("loop", folder / "loop");
    refused(folder / "loop", "symbolic link");
    refused(folder / std::string(300, 'n'), "name too long");
    ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
    refused(folder / "fifo", "it is not a regular file");
    refused("", "No such file");
}

TEST_F(Safetensors, FileWithoutPermission) {
    fs::path path = save(golden);
    fs::permissions(path, fs::perms::none);
    if (::access(path.c_str(), R_OK) == 0) GTEST_SKIP() << "this user may read every file";
    EXPECT_TRUE(contains(file_error([&] { read_safetensors(path); }), "Permission denied"));
}

TEST_F(Safetensors, ContentThatCannotBeWritten) {
    fs::path path = save("before");
    auto refused = [&](const TensorFile& file, const std::string& reason) {
        std::string message = file_error([&] { write_safetensors(path, file); });
        EXPECT_TRUE(contains(message, "cannot write safetensors file \"" + path.string() + "\"") && contains(message, reason)) << message;
        EXPECT_EQ(load(path), "before");
        EXPECT_EQ(files(), 1u);
    };
    auto tensor = [](const char* name, std::vector<long long> shape, std::size_t bytes) {
        return TensorFile{{{name, HostTensor{DType::f32, shape, std::vector<std::byte>(bytes)}}}, {}};
    };
    refused(tensor("a", {2}, 7), "tensor \"a\": it holds 7 bytes, but shape [2] of F32 takes 8");
    refused(tensor("a", {}, 0), "it holds 0 bytes, but shape [] of F32 takes 4");
    refused(tensor("a", {-1}, 4), "shape [-1] has a negative extent or is too large");
    refused(tensor("a", {1LL << 62}, 4), "shape [4611686018427387904] has a negative extent or is too large");
    refused(tensor("__metadata__", {1}, 4), "this name is reserved for the metadata");
    refused(tensor("a\xff", {1}, 4), "\"a?\" is not UTF-8");
    refused(TensorFile{{}, {{"k", "\xc3"}}}, "is not UTF-8");
    refused(TensorFile{{}, {{"k", std::string(100'000'000, 'x')}}}, "at most 100000000 are accepted");
}

TEST_F(Safetensors, PathsThatCannotBeWritten) {
    auto refused = [&](const fs::path& path, const std::string& reason) {
        std::string message = file_error([&] { write_safetensors(path, golden_content()); });
        EXPECT_TRUE(contains(message, path.string()) && contains(message, reason)) << message;
    };
    refused(folder / "absent" / "file", "No such file");
    refused(folder, "it is a directory");
    refused(folder / "", "it is a directory");
    refused(save("x") / "below", "Not a directory");
    ASSERT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
    refused(folder / "fifo", "it is not a regular file");
    EXPECT_TRUE(fs::is_fifo(folder / "fifo"));
    refused("", "names no file");
}

TEST_F(Safetensors, ReplacesAFileAndFollowsALink) {
    fs::path path = save("before");
    fs::create_symlink(path, folder / "link");
    write_safetensors(folder / "link", golden_content());
    EXPECT_TRUE(fs::is_symlink(folder / "link"));
    EXPECT_EQ(load(path), golden);
    EXPECT_EQ(files(), 2u);
    fs::path longest = folder / std::string(255, 'n');
    write_safetensors(longest, golden_content());
    EXPECT_EQ(load(longest), golden) << "the partial file must not need a longer name";
}

TEST_F(Safetensors, AFailedWriteLeavesTheOldFile) {
    fs::path path = save("before");
    auto* old_handler = std::signal(SIGXFSZ, SIG_IGN);
    rlimit old_limit{};
    ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
    rlimit limit = old_limit;
    limit.rlim_cur = 1000;
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    TensorFile file;
    file.tensors["a"] = HostTensor::from_float(DType::f32, {1000}, ramp(1000));
    std::string message = file_error([&] { write_safetensors(path, file); });
    ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
    std::signal(SIGXFSZ, old_handler);
    EXPECT_TRUE(contains(message, "writing failed: File too large")) << message;
    EXPECT_EQ(load(path), "before");
    EXPECT_EQ(files(), 1u) << "the partial file is still there";
}

/// x rounded to `precision` significant bits, to nearest even, with gradual underflow below 2^lowest.
double rounded(double x, int precision, int lowest, double largest) {
    if (x == 0.0 || !std::isfinite(x)) return x;
    double quantum = std::ldexp(1.0, std::max(std::ilogb(x), lowest) - precision + 1);
    double r = std::nearbyint(x / quantum) * quantum;
    return std::abs(r) > largest ? std::copysign(std::numeric_limits<double>::infinity(), x) : r;
}

TEST(HostTensor, RoundsToNearestEven) {
    // Ties go to the even neighbour; the largest finite values and the first that overflow; the smallest subnormals.
    auto f16 = [](float x) { return HostTensor::from_float(DType::f16, {1}, {x}).to_float()[0]; };
    auto bf16 = [](float x) { return HostTensor::from_float(DType::bf16, {1}, {x}).to_float()[0]; };
    EXPECT_EQ(f16(1 + 0x1p-11f), 1.0f);
    EXPECT_EQ(f16(1 + 0x3p-11f), 1 + 0x1p-9f);
    EXPECT_EQ(f16(65519.99f), 65504.0f);
    EXPECT_EQ(f16(65520.0f), std::numeric_limits<float>::infinity());
    EXPECT_EQ(f16(0x1p-25f), 0.0f);
    EXPECT_EQ(f16(0x1.002p-25f), 0x1p-24f);
    EXPECT_EQ(bf16(1 + 0x1p-8f), 1.0f);
    EXPECT_EQ(bf16(1 + 0x3p-8f), 1 + 0x1p-6f);
    EXPECT_EQ(bf16(std::numeric_limits<float>::max()), std::numeric_limits<float>::infinity());

    std::mt19937 random(1);
    std::vector<float> values;
    while (values.size() < 200'000) {
        auto bits = static_cast<std::uint32_t>(random());
        // Half of them in the range of float16, where most random bit patterns are not, and half of those exact ties.
        if (values.size() % 2) bits = (bits & 0x80000000u) | (0x32000000u + (bits & 0x7FFFFFFFu) % 0x16000000u);
        if (values.size() % 4 == 1) bits = (bits & 0xFFFFE000u) | 0x1000u;
        auto x = std::bit_cast<float>(bits);
        if (!std::isnan(x)) values.push_back(x);
    }
    auto shape = std::vector<long long>{static_cast<long long>(values.size())};
    auto half = HostTensor::from_float(DType::f16, shape, values).to_float();
    auto brain = HostTensor::from_float(DType::bf16, shape, values).to_float();
    for (std::size_t i = 0; i < values.size(); ++i) {
        ASSERT_EQ(half[i], rounded(values[i], 11, -14, 65504.0)) << std::hexfloat << values[i];
        ASSERT_EQ(brain[i], rounded(values[i], 8, -126, 0x1.FEp127)) << std::hexfloat << values[i];
    }
    EXPECT_EQ(HostTensor::from_float(DType::f32, shape, values).to_float(), values);
}

TEST(HostTensor, EveryBitPatternWidensAndComesBack) {
    for (DType dtype : {DType::f16, DType::bf16}) {
        HostTensor tensor{dtype, {65536}, std::vector<std::byte>(2 * 65536)};
        for (unsigned i = 0; i < 65536; ++i) {
            auto bits = static_cast<std::uint16_t>(i);
            std::memcpy(tensor.bytes.data() + 2 * i, &bits, 2);
        }
        auto values = tensor.to_float();
        auto back = HostTensor::from_float(dtype, {65536}, values);
        int exponent = dtype == DType::f16 ? 0x7C00 : 0x7F80, mantissa = dtype == DType::f16 ? 0x03FF : 0x007F;
        for (int i = 0; i < 65536; ++i) {
            bool is_nan = (i & exponent) == exponent && (i & mantissa) != 0;
            ASSERT_EQ(std::isnan(values[static_cast<std::size_t>(i)]), is_nan) << i;
            std::uint16_t bits;
            std::memcpy(&bits, back.bytes.data() + 2 * i, 2);
            if (is_nan) {
                ASSERT_TRUE((bits & exponent) == exponent && (bits & mantissa) != 0) << i;
            } else {
                ASSERT_EQ(bits, i);
            }
        }
    }
}

TEST(HostTensor, RefusesWhatDoesNotFit) {
    EXPECT_THROW((void)HostTensor::from_float(DType::f32, {2, 2}, {1.0f}), InvalidArgument);
    EXPECT_THROW((void)HostTensor::from_float(DType::f32, {}, {}), InvalidArgument);
    EXPECT_THROW((void)HostTensor::from_float(DType::f32, {-1}, {}), InvalidArgument);
    EXPECT_THROW((void)(HostTensor{DType::f32, {2}, std::vector<std::byte>(4)}.to_float()), InvalidArgument);
    EXPECT_THROW((void)(HostTensor{DType::f16, {1LL << 62, 4}, {}}.elements()), InvalidArgument);
    EXPECT_EQ((HostTensor{DType::f16, {1LL << 61, 0}, {}}.elements()), 0);
}

/// Deterministic damage to a valid file: of raw bytes, of its length, and of its header's text with the length made right again,
/// so that the parse gets past the prefix.
std::string mutated(std::string file, std::mt19937_64& random) {
    static const std::vector<std::string> tokens = {"{",
                                                    "}",
                                                    "[",
                                                    "]",
                                                    ",",
                                                    ":",
                                                    "\"",
                                                    "\\",
                                                    "\\u0000",
                                                    "\xff",
                                                    "\n",
                                                    " ",
                                                    "\0"s,
                                                    "0",
                                                    "1",
                                                    "2",
                                                    "8",
                                                    "-1",
                                                    "1e9",
                                                    "0.5",
                                                    "4294967296",
                                                    "9223372036854775807",
                                                    "18446744073709551615",
                                                    "null",
                                                    "true",
                                                    "[0,0]",
                                                    "[]",
                                                    "{}",
                                                    "\"dtype\"",
                                                    "\"shape\"",
                                                    "\"data_offsets\"",
                                                    "\"F32\"",
                                                    "\"F16\"",
                                                    "\"BF16\"",
                                                    "\"I8\"",
                                                    "\"__metadata__\":{},",
                                                    "\"x\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"};
    auto below = [&](std::size_t n) { return n == 0 ? 0 : static_cast<std::size_t>(random() % n); };
    std::uint64_t length = 0;
    std::memcpy(&length, file.data(), 8);
    std::string header = file.substr(8, length), data = file.substr(8 + length);
    std::size_t kind = below(8);
    std::size_t times = 1 + below(3);
    if (kind == 0) return file.substr(0, below(file.size()));
    if (kind == 1) return length_prefix(below(2) ? random() >> below(64) : length + below(9) - 4) + header + data;
    for (std::size_t i = 0; i < times; ++i) {
        if (kind == 2) {
            file[below(file.size())] ^= static_cast<char>(1 << below(8));
        } else if (kind == 3) {
            header[below(header.size())] = static_cast<char>(random());
        } else if (kind == 4) {
            header.insert(below(header.size()), tokens[below(tokens.size())]);
        } else if (kind == 5) {
            header.erase(below(header.size()), 1 + below(12));
        } else if (kind == 6) {
            // A digit for a digit: sizes and offsets that are well-formed and wrong.
            std::size_t at = below(header.size());
            while (at < header.size() && !std::isdigit(static_cast<unsigned char>(header[at]))) ++at;
            if (at < header.size()) header[at] = static_cast<char>('0' + below(10));
        } else {
            std::size_t from = below(header.size());
            header.insert(below(header.size()), header.substr(from, 1 + below(60)));
        }
        if (header.empty()) header = " ";
    }
    if (kind == 2) return file;
    if (below(8) == 0) data.resize(below(2 * data.size() + 2), '\x7f');
    return length_prefix(header.size()) + header + data;
}

TEST_F(Safetensors, RandomDamageIsReadSoundlyOrRefused) {
    std::mt19937_64 random(20260101);
    int accepted = 0, refused = 0;
    for (int round = 0; round < 20'000; ++round) {
        std::string bytes = mutated(golden, random);
        fs::path path = save(bytes);
        try {
            TensorFile file = read_safetensors(path);
            ++accepted;
            // Whatever is accepted is consistent, covers the file's data, and can be written and read again.
            std::uint64_t length = 0, total = 0;
            std::memcpy(&length, bytes.data(), 8);
            for (const auto& [name, tensor] : file.tensors) {
                ASSERT_EQ(static_cast<std::size_t>(tensor.elements()), tensor.to_float().size()) << round;
                total += tensor.bytes.size();
            }
            ASSERT_EQ(total, bytes.size() - 8 - length) << round;
            write_safetensors(path, file);
            ASSERT_EQ(read_safetensors(path), file) << round;
        } catch (const FileError& error) {
            ++refused;
            ASSERT_TRUE(contains(error.what(), path.string())) << error.what();
        } catch (const std::exception& error) {
            FAIL() << "round " << round << ": not a FileError: " << error.what();
        }
    }
    EXPECT_GT(accepted, 500);
    EXPECT_GT(refused, 10'000);
    RecordProperty("accepted", accepted);
    RecordProperty("refused", refused);
}

TEST_F(Safetensors, EveryTruncationIsRefused) {
    for (std::size_t size = 0; size < golden.size(); ++size) {
        fs::path path = save(golden.substr(0, size));
        EXPECT_FALSE(file_error([&] { read_safetensors(path); }).empty()) << size;
    }
}

// Q, K and V of a real model (tests/data/README.md).
TEST(Fixture, IsARealLayersAttention) {
    TensorFile file = read_safetensors(WORKBOOK_TEST_DATA "/minilm_qkv.safetensors");
    ASSERT_EQ(file.tensors.size(), 3u);
    for (const char* key : {"source", "layer", "text"}) EXPECT_FALSE(file.metadata[key].empty()) << key;

    constexpr int H = 12, N = 256, d = 32;
    auto values = [&](const char* name, double std_low, double std_high) {
        const HostTensor& tensor = file.tensors.at(name);
        EXPECT_EQ(tensor.dtype, DType::bf16);
        EXPECT_EQ(tensor.shape, (std::vector<long long>{1, H, N, d}));
        auto x = tensor.to_float();
        double sum = 0, square = 0;
        for (float value : x) {
            EXPECT_TRUE(std::isfinite(value));
            sum += value;
            square += double(value) * value;
        }
        double mean = sum / static_cast<double>(x.size());
        double deviation = std::sqrt(square / static_cast<double>(x.size()) - mean * mean);
        EXPECT_TRUE(deviation > std_low && deviation < std_high) << name << ": " << deviation;
        return x;
    };
    auto q = values("q", 1.5, 1.6), k = values("k", 1.6, 1.7), v = values("v", 0.6, 0.75);
    ASSERT_TRUE(q.size() == H * N * d && k.size() == q.size() && v.size() == q.size());

    // Real attention is peaked: in 23.4% of the rows one key has more than half of the weight. Another order of heads, rows and
    // dimensions, or Q and K exchanged, does not give that number.
    int peaked = 0;
    for (int row = 0; row < H * N; ++row) {
        std::vector<double> s(N);
        for (int j = 0; j < N; ++j) {
            for (int i = 0; i < d; ++i) {
                s[static_cast<std::size_t>(j)] +=
                    double(q[static_cast<std::size_t>(row * d + i)]) * k[static_cast<std::size_t>((row / N * N + j) * d + i)];
            }
        }
        double m = *std::max_element(s.begin(), s.end()), l = 0;
        for (double x : s) l += std::exp((x - m) / std::sqrt(double(d)));
        peaked += l < 2;
    }
    EXPECT_NEAR(peaked / double(H * N), 0.234, 0.003);
}

}  // namespace
}  // namespace workbook
