#include "tensor/safetensors.hpp"

#include "attention/error.hpp"

#include <nlohmann/json.hpp>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <random>
#include <string_view>
#include <system_error>
#include <type_traits>
#include <utility>

namespace workbook {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

// The file is little-endian throughout; tensor data are copied as they are.
static_assert(std::endian::native == std::endian::little, "safetensors data would have to be byte-swapped on this machine");

constexpr std::uint64_t length_bytes = 8;
constexpr std::uint64_t max_header_bytes = 100'000'000;  // the limit of the safetensors package
constexpr std::string_view metadata_key = "__metadata__";

/// Text out of a file made fit for a message: control characters escaped, long ones cut at a character of UTF-8.
std::string printable(std::string_view text, std::size_t limit = 80) {
    bool cut = text.size() > limit;
    if (cut) {
        while (limit > 0 && (static_cast<unsigned char>(text[limit]) & 0xC0) == 0x80) --limit;
        text = text.substr(0, limit);
    }
    std::string out;
    for (char c : text) {
        auto byte = static_cast<unsigned char>(c);
        if (byte < 0x20 || byte == 0x7F) {
            constexpr char digits[] = "0123456789abcdef";
            out += {'\\', 'x', digits[byte >> 4], digits[byte & 15]};
        } else {
            out += c;
        }
    }
    return cut ? out + "..." : out;
}

std::string in_quotes(std::string_view text) { return '"' + printable(text) + '"'; }

/// What a message is about: the path, and what was being done with it.
struct Subject {
    const char* action;  // "read" or "write"
    fs::path path;

    [[noreturn]] void fail(const std::string& reason) const {
        throw FileError("cannot " + std::string(action) + " safetensors file \"" + printable(path.native(), 4096) + "\": " + reason);
    }
    [[noreturn]] void fail_errno(const std::string& what, int error) const { fail(what + ": " + std::generic_category().message(error)); }
};

std::string shape_text(const auto& shape) {
    std::string out = "[";
    for (const auto& extent : shape) {
        if (out.size() > 100) break;  // printable() cuts it
        if (out.size() > 1) out += ", ";
        out += std::to_string(extent);
    }
    return printable(out + "]");
}

/// Elements of a shape, or nothing if an extent is negative or the product of those that are not 0, in units of
/// `unit` bytes, exceeds a signed 64-bit integer. Zeros are left out of that product so that strides cannot overflow either.
template <class Extent>
std::optional<long long> count_elements(const std::vector<Extent>& shape, std::uint64_t unit) {
    constexpr std::uint64_t limit = std::numeric_limits<long long>::max();
    std::uint64_t product = 1;
    bool empty = false;
    for (Extent extent : shape) {
        if constexpr (std::is_signed_v<Extent>) {
            if (extent < 0) return std::nullopt;
        }
        auto n = static_cast<std::uint64_t>(extent);
        if (n == 0) {
            empty = true;
        } else if (n > limit / unit / product) {
            return std::nullopt;
        } else {
            product *= n;
        }
    }
    return empty ? 0 : static_cast<long long>(product);
}

constexpr std::pair<std::string_view, DType> dtype_words[] = {{"F32", DType::f32}, {"F16", DType::f16}, {"BF16", DType::bf16}};

std::string_view dtype_word(DType type) {
    for (auto [word, dtype] : dtype_words) {
        if (dtype == type) return word;
    }
    return {};
}

constexpr std::string_view integer_word = "I32";

/// One tensor as the header describes it.
struct Entry {
    DType dtype = DType::f32;
    bool integers = false;  // 32 bits each; `dtype` has no meaning
    std::vector<std::uint64_t> shape;
    std::vector<std::uint64_t> offsets;  // begin and end, in bytes from the start of the data
    bool has_dtype = false, has_shape = false, has_offsets = false;

    std::size_t element() const { return integers ? sizeof(std::int32_t) : size_of(dtype); }
    std::string_view type() const { return integers ? integer_word : dtype_word(dtype); }
};

/// Takes the header in as a stream of JSON events and keeps no document: what does not belong at its place ends the parse there
/// and then, so neither deep nesting nor a flood of values costs memory. Also the only way to see duplicate keys, which a parsed
/// document drops. Errors leave through the parser as FileError.
class HeaderReader {
public:
    explicit HeaderReader(const Subject& subject) : subject_(subject) {}

    std::map<std::string, Entry> entries;
    std::map<std::string, std::string> metadata;

    bool start_object(std::size_t) {
        if (place_ == Place::start) return go(Place::root);
        if (place_ == Place::tensor_start) return go(Place::tensor);
        if (place_ == Place::metadata_start) return go(Place::metadata);
        refuse("an object");
    }

    bool end_object() {
        if (place_ == Place::root) return go(Place::end);
        if (place_ == Place::tensor) check_complete();
        return go(Place::root);
    }

    bool start_array(std::size_t) {
        if (place_ == Place::shape_start) {
            return go(Place::shape);
        }
        if (place_ == Place::offsets_start) {
            return go(Place::offsets);
        }
        refuse("an array");
    }

    bool end_array() {
        if (place_ == Place::offsets && entry_->offsets.size() != 2) wrong_offset_count();
        return go(Place::tensor);
    }

    bool key(std::string& key) {
        if (place_ == Place::metadata) {
            metadata_name_ = key;
            if (!metadata.try_emplace(key).second) subject_.fail("duplicate key " + in_quotes(key) + " in " + in_quotes(metadata_key));
            return go(Place::metadata_value);
        }
        if (place_ == Place::root) {
            if (key == metadata_key) {
                if (std::exchange(has_metadata_, true)) subject_.fail("duplicate key " + in_quotes(key));
                return go(Place::metadata_start);
            }
            auto [at, is_new] = entries.try_emplace(key);
            if (!is_new) subject_.fail("duplicate tensor " + in_quotes(key));
            name_ = &at->first;
            entry_ = &at->second;
            return go(Place::tensor_start);
        }
        bool duplicate = false;
        if (key == "dtype") {
            duplicate = std::exchange(entry_->has_dtype, true);
            place_ = Place::dtype;
        } else if (key == "shape") {
            duplicate = std::exchange(entry_->has_shape, true);
            place_ = Place::shape_start;
        } else if (key == "data_offsets") {
            duplicate = std::exchange(entry_->has_offsets, true);
            place_ = Place::offsets_start;
        } else {
            subject_.fail(tensor() + ": unknown field " + in_quotes(key) + "; accepted are \"dtype\", \"shape\" and \"data_offsets\"");
        }
        if (duplicate) subject_.fail(tensor() + ": duplicate field " + in_quotes(key));
        return true;
    }

    bool string(std::string& text) {
        if (place_ == Place::metadata_value) {
            metadata[metadata_name_] = text;
            return go(Place::metadata);
        }
        if (place_ == Place::dtype) {
            for (auto [word, dtype] : dtype_words) {
                if (word != text) continue;
                entry_->dtype = dtype;
                return go(Place::tensor);
            }
            if (text == integer_word) {
                entry_->integers = true;
                return go(Place::tensor);
            }
            subject_.fail(tensor() + ": dtype " + in_quotes(text) +
                          " is not supported; accepted are \"F32\", \"F16\", \"BF16\" and \"I32\"");
        }
        refuse("the string " + in_quotes(text));
    }

    bool number_unsigned(std::uint64_t number) {
        if (place_ == Place::shape) {
            entry_->shape.push_back(number);
        } else if (place_ == Place::offsets) {
            if (entry_->offsets.size() == 2) wrong_offset_count();
            entry_->offsets.push_back(number);
        } else {
            refuse("the number " + std::to_string(number));
        }
        return true;
    }

    bool number_integer(std::int64_t number) { refuse("the number " + (number == 0 ? "-0" : std::to_string(number))); }
    // Fractions, exponents, and integers of more than 64 bits.
    bool number_float(double, const std::string& digits) { refuse("the number " + printable(digits)); }
    bool null() { refuse("null"); }
    bool boolean(bool value) { refuse(value ? "true" : "false"); }
    bool binary(std::vector<std::uint8_t>&) { refuse("binary data"); }

    bool parse_error(std::size_t position, const std::string&, const nlohmann::detail::exception& error) {
        // The library's text begins with its own "[json.exception...] ".
        std::string_view reason = error.what();
        if (auto bracket = reason.find("] "); bracket != reason.npos) reason.remove_prefix(bracket + 2);
        subject_.fail("the header is not JSON at its byte " + std::to_string(position) + ": " + printable(reason, 200));
    }

private:
    /// What the parser stands in or waits for.
    enum class Place {
        start,
        root,
        end,
        tensor_start,
        tensor,
        dtype,
        shape_start,
        shape,
        offsets_start,
        offsets,
        metadata_start,
        metadata,
        metadata_value,
    };

    bool go(Place place) {
        place_ = place;
        return true;
    }

    std::string tensor() const { return "tensor " + in_quotes(*name_); }

    [[noreturn]] void wrong_offset_count() const { subject_.fail(tensor() + ": \"data_offsets\" must be two numbers, begin and end"); }

    [[noreturn]] void refuse(const std::string& found) const {
        switch (place_) {
            case Place::tensor_start:
                subject_.fail(tensor() + ": expected an object with \"dtype\", \"shape\" and \"data_offsets\", found " + found);
            case Place::dtype: subject_.fail(tensor() + ": \"dtype\" must be a string, found " + found);
            case Place::shape_start:
            case Place::shape: subject_.fail(tensor() + ": \"shape\" must be an array of integers from 0 to 2^63 - 1, found " + found);
            case Place::offsets_start:
            case Place::offsets:
                subject_.fail(tensor() + ": \"data_offsets\" must be an array of two integers from 0 to 2^63 - 1, found " + found);
            case Place::metadata_start: subject_.fail(in_quotes(metadata_key) + " must be an object of strings, found " + found);
            case Place::metadata_value:
                subject_.fail(in_quotes(metadata_key) + ": the value of " + in_quotes(metadata_name_) + " must be a string, found " +
                              found);
            default: subject_.fail("the header must be a JSON object, found " + found);
        }
    }

    void check_complete() const {
        auto require = [&](bool has, const char* field) {
            if (!has) subject_.fail(tensor() + ": field " + in_quotes(field) + " is missing");
        };
        require(entry_->has_dtype, "dtype");
        require(entry_->has_shape, "shape");
        require(entry_->has_offsets, "data_offsets");
    }

    const Subject& subject_;
    Place place_ = Place::start;
    bool has_metadata_ = false;
    const std::string* name_ = nullptr;  // of the tensor being read; it and entry_ point into entries
    Entry* entry_ = nullptr;
    std::string metadata_name_;
};

/// The tensors in the order of their data.
using Layout = std::vector<std::pair<std::string, Entry>>;

/// Every byte of the data must belong to one tensor and no byte to two.
Layout checked_layout(const Subject& subject, std::map<std::string, Entry> entries, std::uint64_t data_bytes) {
    Layout layout(std::make_move_iterator(entries.begin()), std::make_move_iterator(entries.end()));
    for (const auto& [name, entry] : layout) {
        std::uint64_t begin = entry.offsets.at(0), end = entry.offsets.at(1);
        std::string what = "tensor " + in_quotes(name) + ": ";
        std::string range = "data_offsets [" + std::to_string(begin) + ", " + std::to_string(end) + "]";
        if (begin > end) subject.fail(what + range + " end before they begin");
        if (end > data_bytes) subject.fail(what + range + " end beyond the " + std::to_string(data_bytes) + " bytes of data in the file");
        auto elements = count_elements(entry.shape, entry.element());
        if (!elements) subject.fail(what + "shape " + shape_text(entry.shape) + " is too large: its bytes exceed 2^63 - 1");
        std::uint64_t expected = static_cast<std::uint64_t>(*elements) * entry.element();
        if (end - begin != expected) {
            subject.fail(what + range + " hold " + std::to_string(end - begin) + " bytes, but shape " + shape_text(entry.shape) + " of " +
                         std::string(entry.type()) + " takes " + std::to_string(expected));
        }
    }
    std::sort(layout.begin(), layout.end(), [](const auto& a, const auto& b) { return a.second.offsets < b.second.offsets; });
    std::uint64_t covered = 0;
    for (const auto& [name, entry] : layout) {
        std::uint64_t begin = entry.offsets.at(0), end = entry.offsets.at(1);
        if (begin < covered) {
            subject.fail("tensor " + in_quotes(name) + " begins at byte " + std::to_string(begin) +
                         " of the data and overlaps the one before, which ends at " + std::to_string(covered));
        }
        if (begin > covered) {
            subject.fail("bytes " + std::to_string(covered) + " to " + std::to_string(begin) + " of the data, before tensor " +
                         in_quotes(name) + ", belong to no tensor");
        }
        covered = end;
    }
    if (covered < data_bytes) subject.fail(std::to_string(data_bytes - covered) + " trailing bytes after the last tensor");
    return layout;
}

void read_exactly(const Subject& subject, std::ifstream& in, void* to, std::uint64_t bytes) {
    in.read(static_cast<char*>(to), static_cast<std::streamsize>(bytes));
    if (!in || static_cast<std::uint64_t>(in.gcount()) != bytes) subject.fail("reading stopped before the end of the file");
}

TensorFile read_checked(const Subject& subject) {
    std::error_code error;
    fs::file_status status = fs::status(subject.path, error);
    if (!fs::exists(status)) subject.fail(error ? error.message() : "no such file");
    if (fs::is_directory(status)) subject.fail("it is a directory");
    if (!fs::is_regular_file(status)) subject.fail("it is not a regular file");

    errno = 0;
    std::ifstream in(subject.path, std::ios::binary);
    if (!in) subject.fail_errno("opening failed", errno);
    std::uint64_t file_bytes = fs::file_size(subject.path, error);
    if (error) subject.fail(error.message());
    if (file_bytes < length_bytes) {
        subject.fail("it has " + std::to_string(file_bytes) + " bytes, too short for the " + std::to_string(length_bytes) +
                     " that hold the header's length");
    }

    unsigned char prefix[length_bytes];
    read_exactly(subject, in, prefix, length_bytes);
    std::uint64_t header_bytes = 0;
    std::memcpy(&header_bytes, prefix, length_bytes);
    std::string says = "the first 8 bytes give a header of " + std::to_string(header_bytes) + " bytes, ";
    if (header_bytes > max_header_bytes) subject.fail(says + "at most " + std::to_string(max_header_bytes) + " are accepted");
    if (header_bytes > file_bytes - length_bytes) {
        subject.fail(says + "but the file has only " + std::to_string(file_bytes - length_bytes) + " more");
    }

    std::string header(header_bytes, '\0');
    read_exactly(subject, in, header.data(), header_bytes);
    if (header.empty() || header[0] != '{') subject.fail("the header must be a JSON object and begin with '{'");
    // The JSON parser would take a zero byte for the end of its input and not look at what follows.
    if (auto zero = header.find('\0'); zero != header.npos) {
        subject.fail("the header is not JSON: its byte " + std::to_string(zero) + " is zero");
    }

    HeaderReader reader(subject);
    json::sax_parse(header, &reader);
    auto layout = checked_layout(subject, std::move(reader.entries), file_bytes - length_bytes - header_bytes);

    TensorFile file;
    file.metadata = std::move(reader.metadata);
    for (auto& [name, entry] : layout) {
        if (entry.integers) {
            IntTensor tensor;
            tensor.shape.assign(entry.shape.begin(), entry.shape.end());
            tensor.values.resize((entry.offsets.at(1) - entry.offsets.at(0)) / sizeof(std::int32_t));
            read_exactly(subject, in, tensor.values.data(), tensor.values.size() * sizeof(std::int32_t));
            file.integers.emplace(name, std::move(tensor));
            continue;
        }
        HostTensor tensor;
        tensor.dtype = entry.dtype;
        tensor.shape.assign(entry.shape.begin(), entry.shape.end());
        tensor.bytes.resize(entry.offsets.at(1) - entry.offsets.at(0));
        read_exactly(subject, in, tensor.bytes.data(), tensor.bytes.size());
        file.tensors.emplace(name, std::move(tensor));
    }
    return file;
}

/// A string as JSON. @throws FileError if it is not UTF-8, which JSON cannot hold
std::string json_string(const Subject& subject, const std::string& text) {
    try {
        return json(text).dump();
    } catch (const json::exception&) {
        std::string shown;
        for (char c : printable(text)) shown += static_cast<unsigned char>(c) < 0x80 ? c : '?';
        subject.fail("the name or metadata \"" + shown + "\" is not UTF-8");
    }
}

/// Order of the data: wider elements first, so that every tensor is aligned to its element, then by name; as the safetensors
/// package has it (there BF16 also comes before F16), so that both write the same bytes.
std::vector<const std::pair<const std::string, HostTensor>*> data_order(const TensorFile& file) {
    std::vector<const std::pair<const std::string, HostTensor>*> order;
    for (const auto& entry : file.tensors) order.push_back(&entry);
    auto rank = [](DType type) { return type == DType::f32 ? 0 : type == DType::bf16 ? 1 : 2; };
    std::stable_sort(order.begin(), order.end(), [&](auto* a, auto* b) { return rank(a->second.dtype) < rank(b->second.dtype); });
    return order;
}

std::string make_header(const Subject& subject, const TensorFile& file) {
    std::string header = "{";
    auto comma = [&] { return header.back() == '{' ? "" : ","; };
    if (!file.metadata.empty()) {
        header += json_string(subject, std::string(metadata_key)) + ":{";
        for (const auto& [key, value] : file.metadata) {
            header += comma() + json_string(subject, key) + ":" + json_string(subject, value);
        }
        header += "}";
    }
    if (!file.integers.empty()) subject.fail("tensor " + in_quotes(file.integers.begin()->first) + ": I32 tensors are read only");
    std::uint64_t offset = 0;
    for (const auto* item : data_order(file)) {
        const auto& [name, tensor] = *item;
        std::string what = "tensor " + in_quotes(name) + ": ";
        if (name == metadata_key) subject.fail(what + "this name is reserved for the metadata");
        auto elements = count_elements(tensor.shape, size_of(tensor.dtype));
        if (!elements) subject.fail(what + "shape " + shape_text(tensor.shape) + " has a negative extent or is too large");
        std::uint64_t expected = static_cast<std::uint64_t>(*elements) * size_of(tensor.dtype);
        if (tensor.bytes.size() != expected) {
            subject.fail(what + "it holds " + std::to_string(tensor.bytes.size()) + " bytes, but shape " + shape_text(tensor.shape) +
                         " of " + std::string(dtype_word(tensor.dtype)) + " takes " + std::to_string(expected));
        }
        header += comma() + json_string(subject, name) + ":{\"dtype\":\"" + std::string(dtype_word(tensor.dtype)) + "\",\"shape\":[";
        for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
            if (i > 0) header += ',';
            header += std::to_string(tensor.shape[i]);
        }
        header += "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(offset + expected) + "]}";
        offset += expected;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');  // the data begin at a multiple of 8
    if (header.size() > max_header_bytes) {
        subject.fail("the header would take " + std::to_string(header.size()) + " bytes, at most " + std::to_string(max_header_bytes) +
                     " are accepted");
    }
    return header;
}

/// A new file beside the target, removed again unless it was renamed to it.
class PartialFile {
public:
    PartialFile(const Subject& subject, const fs::path& target) : subject_(subject) {
        std::random_device random;
        do {
            path_ = target.parent_path() / (".safetensors-partial-" + std::to_string(random()));
            descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        } while (descriptor_ < 0 && errno == EEXIST);
        if (descriptor_ < 0) subject_.fail_errno("creating " + printable(path_.native(), 4096) + " failed", errno);
    }

    PartialFile(const PartialFile&) = delete;
    PartialFile& operator=(const PartialFile&) = delete;

    ~PartialFile() {
        if (descriptor_ >= 0) ::close(descriptor_);
        if (!path_.empty()) ::unlink(path_.c_str());
    }

    void write(const void* from, std::size_t bytes) {
        auto* next = static_cast<const char*>(from);
        while (bytes > 0) {
            ssize_t written = ::write(descriptor_, next, bytes);
            if (written < 0 && errno == EINTR) continue;
            if (written < 0) subject_.fail_errno("writing failed", errno);
            next += written;
            bytes -= static_cast<std::size_t>(written);
        }
    }

    /// The data are on the disk before the name is: a crash in between leaves the old file.
    void rename_to(const fs::path& target) {
        if (::fsync(descriptor_) != 0) subject_.fail_errno("writing failed", errno);
        if (::close(std::exchange(descriptor_, -1)) != 0) subject_.fail_errno("writing failed", errno);
        if (::rename(path_.c_str(), target.c_str()) != 0) subject_.fail_errno("renaming the finished file failed", errno);
        path_.clear();
    }

private:
    const Subject& subject_;
    fs::path path_;
    int descriptor_ = -1;
};

void write_checked(const Subject& subject, const TensorFile& file) {
    std::string header = make_header(subject, file);

    // Renaming over a link, a device or a pipe would replace it: follow the first, refuse the others.
    fs::path target = subject.path;
    std::error_code error;
    fs::file_status status = fs::status(target, error);
    if (fs::is_directory(status)) subject.fail("it is a directory");
    if (fs::exists(status) && !fs::is_regular_file(status)) subject.fail("it is not a regular file");
    if (fs::exists(status)) target = fs::canonical(target);
    if (target.filename().empty()) subject.fail("the path names no file");

    PartialFile out(subject, target);
    std::uint64_t header_bytes = header.size();
    out.write(&header_bytes, length_bytes);
    out.write(header.data(), header.size());
    for (const auto* item : data_order(file)) out.write(item->second.bytes.data(), item->second.bytes.size());
    out.rename_to(target);
}

/// Runs a read or a write; what the standard library throws on the way becomes a FileError.
template <class F>
auto with_file_errors(const Subject& subject, F&& f) {
    try {
        return f();
    } catch (const FileError&) {
        throw;
    } catch (const std::bad_alloc&) {
        subject.fail("it does not fit into memory");
    } catch (const std::exception& error) {
        subject.fail(error.what());
    }
}

float widen(float x) { return x; }
float widen(__half x) { return __half2float(x); }
float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
T round_to(float x) {
    if constexpr (std::is_same_v<T, __half>) {
        return __float2half_rn(x);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        return __float2bfloat16_rn(x);
    } else {
        return x;
    }
}

}  // namespace

long long HostTensor::elements() const {
    auto count = count_elements(shape, size_of(dtype));
    if (!count) throw InvalidArgument("HostTensor: shape " + shape_text(shape) + " has a negative extent or is too large");
    return *count;
}

std::vector<float> HostTensor::to_float() const {
    auto count = static_cast<std::size_t>(elements());
    if (bytes.size() != count * size_of(dtype)) {
        throw InvalidArgument("HostTensor: " + std::to_string(bytes.size()) + " bytes, but shape " + shape_text(shape) + " takes " +
                              std::to_string(count * size_of(dtype)));
    }
    std::vector<float> values(count);
    with_type(dtype, [&]<class T>() {
        for (std::size_t i = 0; i < count; ++i) {
            T x;
            std::memcpy(&x, bytes.data() + i * sizeof(T), sizeof(T));
            values[i] = widen(x);
        }
    });
    return values;
}

HostTensor HostTensor::from_float(DType dtype, std::vector<long long> shape, const std::vector<float>& values) {
    HostTensor tensor{dtype, std::move(shape), {}};
    auto count = static_cast<std::size_t>(tensor.elements());
    if (values.size() != count) {
        throw InvalidArgument("HostTensor::from_float: " + std::to_string(values.size()) + " values, but shape " +
                              shape_text(tensor.shape) + " has " + std::to_string(count) + " elements");
    }
    tensor.bytes.resize(count * size_of(dtype));
    with_type(dtype, [&]<class T>() {
        for (std::size_t i = 0; i < count; ++i) {
            T x = round_to<T>(values[i]);
            std::memcpy(tensor.bytes.data() + i * sizeof(T), &x, sizeof(T));
        }
    });
    return tensor;
}

TensorFile read_safetensors(const std::filesystem::path& path) {
    Subject subject{"read", path};
    return with_file_errors(subject, [&] { return read_checked(subject); });
}

void write_safetensors(const std::filesystem::path& path, const TensorFile& file) {
    Subject subject{"write", path};
    with_file_errors(subject, [&] { write_checked(subject, file); });
}

}  // namespace workbook
