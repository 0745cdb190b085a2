/// @file
/// Elements on the device for tests of small kernels.
#pragma once

#include "tensor/buffer.hpp"

#include <cstddef>
#include <vector>

namespace workbook {

/// `count` elements on the device, and their way there and back.
template <class T>
class DeviceData {
public:
    explicit DeviceData(std::size_t count) : buffer_(count * sizeof(T)), count_(count) {}
    explicit DeviceData(const std::vector<T>& from) : DeviceData(from.size()) { buffer_.upload(from.data(), from.size() * sizeof(T)); }
    T* data() const { return static_cast<T*>(buffer_.data()); }
    std::vector<T> get() const {
        std::vector<T> out(count_);
        buffer_.download(out.data(), count_ * sizeof(T));
        return out;
    }

private:
    DeviceBuffer buffer_;
    std::size_t count_;
};

}  // namespace workbook
