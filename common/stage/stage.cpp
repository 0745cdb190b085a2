#include "stage/stage.hpp"

#include <algorithm>
#include <cstdint>
#include <new>
#include <sstream>
#include <utility>
#include <vector>

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

/// A tensor (B, heads, rows, d) of the problem, with a name.
struct Named {
    const char* name;
    const TensorRef& tensor;
    int heads, rows;
};

/// Checks each tensor by itself, and that nothing that is written lies on something else. LSE is read by a backward pass, written by a
/// forward.
void check_memory(const Problem& p, const std::vector<Named>& read, const std::vector<Named>& written, const float* lse, bool lse_is_read) {
    const std::size_t element = size_of(p.dtype);
    std::vector<Extent> inputs, outputs;
    const auto check_tensor = [&](const Named& t, std::vector<Extent>& extents) {
        check_pointer(t.name, t.tensor.data, element);
        check_strides(t.name, t.tensor, p.head_dim);
        extents.push_back(extent_of(t.name, t.tensor, p.batch, t.heads, t.rows, p.head_dim, element));
    };
    for (const Named& t : read) check_tensor(t, inputs);
    for (const Named& t : written) {
        check_tensor(t, outputs);
        check_no_overlap(t.name, t.tensor, p.batch, t.heads, t.rows, p.head_dim);
    }
    check_pointer("LSE", lse, sizeof(float));
    const auto begin = reinterpret_cast<std::uintptr_t>(lse);
    (lse_is_read ? inputs : outputs).push_back({"LSE", begin, begin + static_cast<std::uintptr_t>(p.rows()) * sizeof(float)});
    for (std::size_t i = 0; i < outputs.size(); ++i) {
        for (const Extent& input : inputs) check_apart(outputs[i], input);
        for (std::size_t other = 0; other < i; ++other) check_apart(outputs[i], outputs[other]);
    }
}

void check_memory(const Forward& args) {
    const Problem& p = args.problem;
    check_memory(p, {{"Q", args.q, p.heads, p.seq}, {"K", args.k, p.kv_heads, p.kv_seq}, {"V", args.v, p.kv_heads, p.kv_seq}},
                 {{"O", args.o, p.heads, p.seq}}, args.lse, false);
}

void check_memory(const Backward& args) {
    const Problem& p = args.problem;
    check_memory(p,
                 {{"Q", args.q, p.heads, p.seq},
                  {"K", args.k, p.kv_heads, p.kv_seq},
                  {"V", args.v, p.kv_heads, p.kv_seq},
                  {"O", args.o, p.heads, p.seq},
                  {"dO", args.d_o, p.heads, p.seq}},
                 {{"dQ", args.dq, p.heads, p.seq}, {"dK", args.dk, p.kv_heads, p.kv_seq}, {"dV", args.dv, p.kv_heads, p.kv_seq}}, args.lse,
                 true);
}

template <class AnyVariant>
std::optional<std::string> why_any_refused(const AnyVariant& variant, const Problem& problem, const Device& device) {
    if (problem.packed() && !variant.packed)
        return "cu_seqlens of " + std::to_string(problem.cu_seqlens_q.size() - 1) +
               " sequences: one length for all of a batch is accepted; stage b takes packed batches";
    if (!problem.packed() && variant.packed)
        return "no cu_seqlens: a packed batch is accepted (--lengths, or --cu-seqlens-q and --cu-seqlens-k); stages 01 to 06 take batches "
               "of one length";
    return variant.refuses(problem, device);
}

/// Checks, then launches; every refusal names the variant.
template <class AnyVariant, class Args>
void run_checked(const AnyVariant& variant, void (*launch)(Args&), Args& args) {
    check(args.problem);
    const std::string label = variant.id + " " + variant.name + ": ";
    if (const auto reason = why_refused(variant, args.problem, args.device)) throw Refused(label + *reason);
    check_memory(args);
    args.exec.shared_memory_limit = args.device.shared_memory_per_block;
    try {
        launch(args);
    } catch (const Refused& error) {
        throw Refused(label + error.what());
    }
}

template <class AnyVariant>
void run_prepared(const AnyVariant& variant, Forward& args) {
    if (variant.prepare) {
        Forward uncounted = args;
        uncounted.exec.ledger = nullptr;
        uncounted.exec.trace = nullptr;
        run_checked(variant, variant.prepare, uncounted);
    }
    run_checked(variant, variant.forward, args);
}

}  // namespace

std::optional<std::string> why_refused(const Variant& variant, const Problem& problem, const Device& device) {
    return why_any_refused(variant, problem, device);
}
std::optional<std::string> why_refused(const BackwardVariant& variant, const Problem& problem, const Device& device) {
    return why_any_refused(variant, problem, device);
}

std::size_t Workspace::allocated() const {
    std::size_t sum = 0;
    for (const auto& [name, buffer] : buffers_) sum += buffer.size();
    return sum;
}

void* Workspace::bytes(const std::string& name, std::size_t count, bool zero) {
    DeviceBuffer& buffer = buffers_[name];
    if (buffer.size() != count) {
        buffer = DeviceBuffer();  // free first: old and new need not fit together
        try {
            buffer = DeviceBuffer(count);
            if (zero) buffer.upload(std::vector<char>(count).data(), count);
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

void require_16_byte_rows(const std::string& variant, const char* name, const TensorRef& t, const std::string& others) {
    bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0;
    for (const long long stride : t.strides) aligned = aligned && stride % 8 == 0;
    if (aligned) return;
    throw Refused(variant + ": " + name + " starts at an address that is not a multiple of 16 bytes, or has a stride of (" +
                  std::to_string(t.strides[0]) + ", " + std::to_string(t.strides[1]) + ", " + std::to_string(t.strides[2]) +
                  ") elements: multiples of 8 are accepted; " + others);
}

void require_16_byte_rows(const std::string& variant, const Forward& args, const std::string& others) {
    const std::pair<const char*, const TensorRef&> tensors[] = {{"Q", args.q}, {"K", args.k}, {"V", args.v}, {"O", args.o}};
    for (const auto& [name, t] : tensors) require_16_byte_rows(variant, name, t, others);
}

void require_16_byte_rows(const std::string& variant, const Backward& args, const std::string& others) {
    const std::pair<const char*, const TensorRef&> tensors[] = {{"Q", args.q},    {"K", args.k},   {"V", args.v},   {"O", args.o},
                                                                {"dO", args.d_o}, {"dQ", args.dq}, {"dK", args.dk}, {"dV", args.dv}};
    for (const auto& [name, t] : tensors) require_16_byte_rows(variant, name, t, others);
}

void run_forward(const Variant& variant, Forward& args) { run_prepared(variant, args); }
void run_forward(const BackwardVariant& variant, Forward& args) { run_prepared(variant, args); }
void run_backward(const BackwardVariant& variant, Backward& args) { run_checked(variant, variant.backward, args); }

}  // namespace workbook
