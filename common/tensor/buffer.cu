#include "tensor/buffer.hpp"

#include "attention/error.hpp"

#include <thrust/copy.h>
#include <thrust/device_allocator.h>
#include <thrust/device_ptr.h>
#include <thrust/fill.h>

#include <new>
#include <string>

namespace workbook {
namespace {

// What cudaMalloc gives. On the host it must be asked for: counts of sectors and vector loads depend on it.
constexpr std::size_t alignment = 256;

using Resource = thrust::device_ptr_memory_resource<thrust::device_memory_resource>;

/// A std::bad_alloc that says how much was asked for.
class OutOfMemory : public std::bad_alloc {
public:
    OutOfMemory(std::size_t bytes, const char* cause)
        : message_("no " + std::to_string(bytes) + " bytes of device memory for a buffer (" + cause + ")") {}
    const char* what() const noexcept override { return message_.c_str(); }

private:
    std::string message_;
};

void check_fits(const char* what, std::size_t bytes, std::size_t size, const void* host) {
    if (bytes > size)
        throw InvalidArgument(std::string(what) + ": bytes = " + std::to_string(bytes) + "; accepted is at most the buffer's size, " +
                              std::to_string(size));
    if (bytes > 0 && host == nullptr) throw InvalidArgument(std::string(what) + ": the host pointer is null");
}

}  // namespace

struct DeviceBuffer::Storage {
    explicit Storage(std::size_t bytes) : size(bytes) {
        try {
            first = thrust::device_ptr<unsigned char>(static_cast<unsigned char*>(resource()->do_allocate(bytes, alignment).get()));
        } catch (const std::bad_alloc& error) {
            throw OutOfMemory(bytes, error.what());
        }
    }
    ~Storage() {
        try {
            resource()->do_deallocate(thrust::device_ptr<void>(first.get()), size, alignment);
        } catch (...) {  // the context is lost after a failed kernel, which that launch has reported
        }
    }
    Storage(const Storage&) = delete;
    Storage& operator=(const Storage&) = delete;

    static Resource* resource() { return thrust::mr::get_global_resource<Resource>(); }

    thrust::device_ptr<unsigned char> first;
    std::size_t size;
};

DeviceBuffer::DeviceBuffer() = default;
DeviceBuffer::DeviceBuffer(std::size_t bytes) : storage_(bytes > 0 ? std::make_unique<Storage>(bytes) : nullptr) { poison(); }
DeviceBuffer::DeviceBuffer(DeviceBuffer&&) noexcept = default;
DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&&) noexcept = default;
DeviceBuffer::~DeviceBuffer() = default;

void* DeviceBuffer::data() const { return storage_ ? storage_->first.get() : nullptr; }
std::size_t DeviceBuffer::size() const { return storage_ ? storage_->size : 0; }

void DeviceBuffer::poison() {
    if (storage_) thrust::fill(storage_->first, storage_->first + storage_->size, static_cast<unsigned char>(0xFF));
}

void DeviceBuffer::upload(const void* from, std::size_t bytes) {
    check_fits("upload", bytes, size(), from);
    if (bytes == 0) return;
    const auto* first = static_cast<const unsigned char*>(from);
    thrust::copy(first, first + bytes, storage_->first);
}

void DeviceBuffer::download(void* to, std::size_t bytes) const {
    check_fits("download", bytes, size(), to);
    if (bytes > 0) thrust::copy(storage_->first, storage_->first + bytes, static_cast<unsigned char*>(to));
}

}  // namespace workbook
