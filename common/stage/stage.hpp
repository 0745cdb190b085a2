/// @file
/// What a stage of the workbook is: the runner, the tests and the benchmarks all go through this interface.
#pragma once

#include "attention/compare.hpp"
#include "attention/cost.hpp"
#include "attention/problem.hpp"
#include "simt/execution.hpp"
#include "tensor/buffer.hpp"
#include "tensor/view.hpp"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace workbook {

/// The machine that a stage runs on: a GPU, or the emulator playing one.
struct Device {
    std::string name;
    bool emulated = true;
    int compute_capability = 90;  ///< 90 for 9.0
    int sms = 132;
    std::size_t shared_memory_per_block = 227 * 1024;  ///< bytes, with opt-in

    /// The current CUDA device; in the cpu build the emulator, with `gpu`'s shared memory and SM count where it is given.
    /// @throws Refused when there is no usable GPU (gpu build)
    static Device current(const Gpu* gpu = nullptr);
};

/// Extra device memory that a stage needs. Buffers are kept by name, so that a repeated run allocates nothing.
class Workspace {
public:
    /// `count` elements of T, poisoned with NaN at first. @throws Refused when the memory is not there
    template <class T>
    T* get(const std::string& name, std::size_t count) {
        return static_cast<T*>(bytes(name, count * sizeof(T)));
    }
    std::size_t allocated() const;  ///< bytes held now

private:
    void* bytes(const std::string& name, std::size_t count);
    std::map<std::string, DeviceBuffer> buffers_;
};

/// Memory of one tensor (B, H, N, d): where it starts, and its strides in elements.
struct TensorRef {
    void* data = nullptr;
    Strides strides{};
};

/// Everything a forward launch gets. The problem has passed check() and the variant's `refuses`.
struct Forward {
    Problem problem;
    TensorRef q, k, v, o;
    float* lse = nullptr;  ///< (B, Hq, Nq)
    Device device;
    simt::Execution exec;
    Workspace& workspace;

    template <class T>
    simt::TensorView<const T, 4> Q() const {
        return view<const T>("Q", q, problem.heads, problem.seq);
    }
    template <class T>
    simt::TensorView<const T, 4> K() const {
        return view<const T>("K", k, problem.kv_heads, problem.kv_seq);
    }
    template <class T>
    simt::TensorView<const T, 4> V() const {
        return view<const T>("V", v, problem.kv_heads, problem.kv_seq);
    }
    template <class T>
    simt::TensorView<T, 4> O() const {
        return view<T>("O", o, problem.heads, problem.seq);
    }
    simt::TensorView<float, 3> LSE() const { return simt::packed_view<float, 3>("LSE", lse, {problem.batch, problem.heads, problem.seq}); }

private:
    template <class T>
    simt::TensorView<T, 4> view(const char* name, const TensorRef& t, int heads, int rows) const {
        return simt::TensorView<T, 4>(name, static_cast<T*>(t.data), {problem.batch, heads, rows, problem.head_dim}, t.strides);
    }
};

/// One kernel (or chain of kernels) of a stage.
struct Variant {
    std::string id;    ///< "03", or "04c" where a stage holds several
    std::string name;  ///< "shared_memory_tiling"
    /// Why this variant cannot do the problem on the device (what was given, what is accepted, which stage can); nothing if it can.
    std::optional<std::string> (*refuses)(const Problem&, const Device&);
    void (*forward)(Forward&);
    Movement (*movement)(const Problem&, const Device&);            ///< predicted traffic
    std::size_t (*workspace_bytes)(const Problem&, const Device&);  ///< predicted extra memory
    Unit (*unit)(DType);                                            ///< which unit multiplies
};

/// A numbered stage.
struct Stage {
    std::string id;     ///< "03"
    std::string title;  ///< "Shared-memory tiling (FlashAttention-1)"
    std::vector<Variant> variants;
};

/// Runs a variant after checking everything, so that no caller can skip a check.
/// @throws InvalidArgument, Refused
void run_forward(const Variant& variant, Forward& args);

}  // namespace workbook
