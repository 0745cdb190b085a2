/// @file
/// Memory that kernels read and write: on the GPU device memory, in emulation host memory. Thrust holds it.
#pragma once

#include <cstddef>
#include <memory>

namespace workbook {

/// Owns `size()` bytes of device memory that starts at a multiple of 256 bytes. Movable, not copyable; empty once moved from.
/// Errors of the CUDA runtime other than those below come as thrust::system_error, a std::runtime_error.
///
/// Thrust is kept inside buffer.cu: its headers cost nvcc seconds in every file that sees them.
class DeviceBuffer {
public:
    DeviceBuffer();
    /// Every byte is 0xFF: each float32, float16 or bfloat16 element is a NaN until it is written.
    /// @throws std::bad_alloc with the size when the device has not that much memory
    explicit DeviceBuffer(std::size_t bytes);
    DeviceBuffer(DeviceBuffer&&) noexcept;
    DeviceBuffer& operator=(DeviceBuffer&&) noexcept;
    ~DeviceBuffer();

    void* data() const;        ///< null when size() is 0; host memory in the cpu build
    std::size_t size() const;  ///< bytes

    void poison();                                     ///< fills with 0xFF again
    void upload(const void* from, std::size_t bytes);  ///< host to device, blocking. @throws InvalidArgument if bytes > size()
    void download(void* to, std::size_t bytes) const;  ///< device to host, blocking. @throws InvalidArgument if bytes > size()

private:
    struct Storage;
    std::unique_ptr<Storage> storage_;
};

}  // namespace workbook
