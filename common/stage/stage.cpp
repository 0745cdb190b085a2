#include "stage/stage.hpp"

#include <algorithm>
#include <cstdint>
#include <new>
#include <sstream>
#include <utility>

namespace workbook {
namespace {

/// The bytes that a tensor touches, from its first to behind its last element.
struct Extent {
    const char* name;
    std::uintptr_t begin, end;
};

Extent extent_of(const char* name, const TensorRef& t, int batch, int heads, int rows, int dim, std::size_t element) {
    const auto begin = reinterpret_cast<std::uintptr_t>(t.data);
    const long long last = (batch - 1) * t.strides[0] + (heads - 1) * t.strides[1] + (rows - 1) * t.strides[2] + dim;
    return {name, begin, begin + static_cast<std::uintptr_t>(last) * element};
}

void check_pointer(const char* name, const void* data, std::size_t element) {
    if (data == nullptr) throw InvalidArgument(std::string(name) + " is a null pointer; memory on the device is needed");
    if (reinterpret_cast<std::uintptr_t>(data) % element != 0) {
        std::ostringstream message;
        message << name << " starts at " << data << "; a multiple of its element size, " << element << " bytes, is needed";
        throw InvalidArgument(message.str());
    }
}

/// Strides may be anything but negative, and rows must not run into each other: a tile is loaded row by row.
void check_strides(const char* name, const TensorRef& t, int dim) {
    static constexpr const char* which[] = {"batch", "head", "row"};
    for (int i = 0; i < 3; ++i) {
        if (t.strides[i] >= 0) continue;
        std::ostringstream message;
        message << name << " has a " << which[i] << " stride of " << t.strides[i] << " elements; 0 or more is accepted";
        throw InvalidArgument(message.str());
    }
    if (t.strides[2] < dim) {
        std::ostringstream message;
        message << name << " has a row stride of " << t.strides[2] << " elements; at least head_dim=" << dim << " is accepted";
        throw InvalidArgument(message.str());
    }
}

/// Two elements of a tensor that is written must never be the same memory. Sorted by stride, each dimension has to step over
/// everything that the smaller ones span.
void check_no_overlap(const char* name, const TensorRef& t, int batch, int heads, int rows, int dim) {
    std::array<std::pair<long long, int>, 3> dims = {{{t.strides[0], batch}, {t.strides[1], heads}, {t.strides[2], rows}}};
    std::sort(dims.begin(), dims.end());
    long long span = dim;
    for (const auto& [stride, extent] : dims) {
        if (extent == 1) continue;
        if (stride < span) {
            std::ostringstream message;
            message << name << " overlaps itself: strides (" << t.strides[0] << ", " << t.strides[1] << ", " << t.strides[2]
                    << ") elements of shape (" << batch << ", " << heads << ", " << rows << ", " << dim
                    << "); every element needs memory of its own";
            throw InvalidArgument(message.str());
        }
        span += stride * (extent - 1);
    }
}

void check_apart(const Extent& written, const Extent& other) {
    if (written.begin < other.end && other.begin < written.end) {
        throw InvalidArgument(std::string(written.name) + " shares memory with " + other.name +
                              "; a kernel reads its inputs after it has begun to write, so outputs need memory of their own");
    }
}

void check_memory(const Forward& args) {
    const Problem& p = args.problem;
    const std::size_t element = size_of(p.dtype);
    check_pointer("Q", args.q.data, element);
    check_pointer("K", args.k.data, element);
    check_pointer("V", args.v.data, element);
    check_pointer("O", args.o.data, element);
    check_pointer("LSE", args.lse, sizeof(float));
    check_strides("Q", args.q, p.head_dim);
    check_strides("K", args.k, p.head_dim);
    check_strides("V", args.v, p.head_dim);
    check_strides("O", args.o, p.head_dim);
    check_no_overlap("O", args.o, p.batch, p.heads, p.seq, p.head_dim);

    const auto lse = reinterpret_cast<std::uintptr_t>(args.lse);
    const Extent inputs[] = {extent_of("Q", args.q, p.batch, p.heads, p.seq, p.head_dim, element),
                             extent_of("K", args.k, p.batch, p.kv_heads, p.kv_seq, p.head_dim, element),
                             extent_of("V", args.v, p.batch, p.kv_heads, p.kv_seq, p.head_dim, element)};
    const Extent o = extent_of("O", args.o, p.batch, p.heads, p.seq, p.head_dim, element);
    const Extent l = {"LSE", lse, lse + static_cast<std::uintptr_t>(p.rows()) * sizeof(float)};
    for (const Extent& input : inputs) {
        check_apart(o, input);
        check_apart(l, input);
    }
    check_apart(l, o);
}

}  // namespace

std::size_t Workspace::allocated() const {
    std::size_t sum = 0;
    for (const auto& [name, buffer] : buffers_) sum += buffer.size();
    return sum;
}

void* Workspace::bytes(const std::string& name, std::size_t count) {
    DeviceBuffer& buffer = buffers_[name];
    if (buffer.size() != count) {
        buffer = DeviceBuffer();  // free first: old and new need not fit together
        try {
            buffer = DeviceBuffer(count);
        } catch (const std::bad_alloc&) {
            const std::size_t held = allocated();
            buffers_.erase(name);
            std::ostringstream message;
            message << "workspace " << name << " needs " << count << " bytes and the device has not that much free memory";
            if (held > 0) message << " (" << held << " bytes of workspace are held)";
            message << "; use a shorter sequence, fewer heads or a smaller batch";
            throw Refused(message.str());
        }
    }
    return buffer.data();
}

void run_forward(const Variant& variant, Forward& args) {
    check(args.problem);
    if (const auto reason = variant.refuses(args.problem, args.device)) {
        throw Refused(variant.id + " " + variant.name + ": " + *reason);
    }
    check_memory(args);
    args.exec.shared_memory_limit = args.device.shared_memory_per_block;
    try {
        variant.forward(args);
    } catch (const Refused& error) {
        throw Refused(variant.id + " " + variant.name + ": " + error.what());
    }
}

}  // namespace workbook
