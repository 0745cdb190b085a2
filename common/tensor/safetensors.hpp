/// @file
/// Reading and writing safetensors files: how tensors dumped from PyTorch come in and results go out.
#pragma once

#include "attention/dtype.hpp"

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace workbook {

/// A file that cannot be read or written as safetensors: the message names the file, what is wrong and what is accepted.
struct FileError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// A tensor on the host, packed in row-major order.
struct HostTensor {
    DType dtype = DType::f32;
    std::vector<long long> shape;
    std::vector<std::byte> bytes;

    /// Product of the shape: 1 for a scalar (empty shape). @throws InvalidArgument if an extent is negative or the bytes exceed 2^63 - 1
    long long elements() const;
    /// All elements widened to float, which is exact. @throws InvalidArgument if `bytes` is not as long as the shape says
    std::vector<float> to_float() const;
    /// Rounds to `dtype`, to nearest even; what is too large becomes infinity. @throws InvalidArgument if values and shape differ in size
    static HostTensor from_float(DType dtype, std::vector<long long> shape, const std::vector<float>& values);
};

/// A tensor of whole numbers of 32 bits.
struct IntTensor {
    std::vector<long long> shape;
    std::vector<std::int32_t> values;
};

/// What a safetensors file holds: tensors by name, and the free-form string table `__metadata__`.
struct TensorFile {
    std::map<std::string, HostTensor> tensors;
    std::map<std::string, std::string> metadata;
    std::map<std::string, IntTensor> integers = {};
};

/// Reads a whole file. F32, F16, BF16 and I32 tensors; other types are refused by name.
///
/// The file must be what the format's description allows (https://github.com/huggingface/safetensors#format): a header of at most
/// 100 MB that is one JSON object without duplicate keys, and data of which every byte belongs to exactly one tensor.
/// @throws FileError and nothing else, whatever the bytes of the file are
TensorFile read_safetensors(const std::filesystem::path& path);

/// Writes a file that the `safetensors` package reads. Writes beside the target first and renames, so that a failed write leaves
/// what was there before. A target that is a symbolic link is followed; a directory, device or pipe is refused.
/// @throws FileError, also for integers, which are read only, for a tensor whose bytes do not fit its shape and for names that are not
/// UTF-8
void write_safetensors(const std::filesystem::path& path, const TensorFile& file);

}  // namespace workbook
