/// @file
/// What a stage of the workbook is: the runner, the tests and the benchmarks all go through this interface.
#pragma once

#include "attention/compare.hpp"
#include "attention/cost.hpp"
#include "attention/diagnose.hpp"
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
    std::size_t l2_bytes = 50 << 20;                   ///< of the L2 cache

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
    /// The same, but zero at first. Whoever writes to it leaves it zero, so that a repeated run need not clear it.
    template <class T>
    T* zeroed(const std::string& name, std::size_t count) {
        return static_cast<T*>(bytes(name, count * sizeof(T), true));
    }
    /// The same, with `values` in it.
    template <class T>
    T* put(const std::string& name, const std::vector<T>& values) {
        T* const data = get<T>(name, values.size());
        buffers_.at(name).upload(values.data(), values.size() * sizeof(T));
        return data;
    }
    std::size_t allocated() const;  ///< bytes held now

private:
    void* bytes(const std::string& name, std::size_t count, bool zero = false);
    std::map<std::string, DeviceBuffer> buffers_;
};

/// Memory of one tensor (B, H, N, d): where it starts, and its strides in elements.
struct TensorRef {
    void* data = nullptr;
    Strides strides{};
};

/// (B, heads, rows, d)
template <class T>
simt::TensorView<T, 4> view_of(const char* name, const TensorRef& t, const Problem& problem, int heads, int rows) {
    return simt::TensorView<T, 4>(name, static_cast<T*>(t.data), {problem.batch, heads, rows, problem.head_dim}, t.strides);
}

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
        return view_of<T>(name, t, problem, heads, rows);
    }
};

/// Everything a backward launch gets: the gradient dO of O comes in, those of Q, K and V go out, all in the problem's type. dK and dV
/// are sums over the query heads that share a key/value head. The problem has passed check() and the variant's `refuses`.
struct Backward {
    Problem problem;
    TensorRef q, k, v, o, d_o;   ///< read; O and LSE as a forward pass left them
    const float* lse = nullptr;  ///< (B, Hq, Nq), read
    TensorRef dq, dk, dv;        ///< written; of the shapes of Q, K and V
    Device device;
    simt::Execution exec;
    Workspace& workspace;  ///< the forward pass's: it holds what that has kept beside O and LSE

    template <class T>
    simt::TensorView<const T, 4> Q() const {
        return of_queries<const T>("Q", q);
    }
    template <class T>
    simt::TensorView<const T, 4> K() const {
        return of_keys<const T>("K", k);
    }
    template <class T>
    simt::TensorView<const T, 4> V() const {
        return of_keys<const T>("V", v);
    }
    template <class T>
    simt::TensorView<const T, 4> O() const {
        return of_queries<const T>("O", o);
    }
    template <class T>
    simt::TensorView<const T, 4> dO() const {
        return of_queries<const T>("dO", d_o);
    }
    simt::TensorView<const float, 3> LSE() const {
        return simt::packed_view<const float, 3>("LSE", lse, {problem.batch, problem.heads, problem.seq});
    }
    template <class T>
    simt::TensorView<T, 4> dQ() const {
        return of_queries<T>("dQ", dq);
    }
    template <class T>
    simt::TensorView<T, 4> dK() const {
        return of_keys<T>("dK", dk);
    }
    template <class T>
    simt::TensorView<T, 4> dV() const {
        return of_keys<T>("dV", dv);
    }

private:
    template <class T>
    simt::TensorView<T, 4> of_queries(const char* name, const TensorRef& t) const {
        return view_of<T>(name, t, problem, problem.heads, problem.seq);
    }
    template <class T>
    simt::TensorView<T, 4> of_keys(const char* name, const TensorRef& t) const {
        return view_of<T>(name, t, problem, problem.kv_heads, problem.kv_seq);
    }
};

/// One kernel (or chain of kernels) of a stage.
struct Variant {
    std::string id;    ///< "03", or "04c" where a stage holds several; "Aa" of stage a
    std::string name;  ///< "shared_memory_tiling"
    /// Why this variant cannot do the problem on the device (what was given, what is accepted, which stage can); nothing if it can.
    /// Whether that is a packed batch need not be looked at: see why_refused().
    std::optional<std::string> (*refuses)(const Problem&, const Device&);
    void (*forward)(Forward&);
    Movement (*movement)(const Problem&, const Device&);            ///< predicted traffic
    std::size_t (*workspace_bytes)(const Problem&, const Device&);  ///< predicted extra memory
    Unit (*unit)(DType);                                            ///< which unit multiplies
    /// A plain attention that rounds what this variant rounds: the yardstick of judge().
    decltype(&plain_low_precision_forward) plain = plain_low_precision_forward;
    /// Leaves in the Workspace what `forward` finds there: K and V in another form, or tables; null where there is nothing. Its time and
    /// its traffic are not the variant's.
    void (*prepare)(Forward&) = nullptr;
    /// What is said of a wrong result.
    decltype(&workbook::diagnose) explain = diagnose;
    bool packed = false;  ///< whether it takes packed batches, and nothing else
};

/// A backward pass of a stage, and the forward pass that it follows.
struct BackwardVariant {
    std::string id;    ///< "05b"
    std::string name;  ///< "recompute"
    /// Why this variant cannot do the problem on the device, forward or backward; nothing if it can.
    std::optional<std::string> (*refuses)(const Problem&, const Device&);
    /// Writes O and LSE, and leaves in the Workspace what else `backward` reads.
    void (*forward)(Forward&);
    /// O and LSE of any forward pass of the problem will do. Where it is false, `forward` must have run on the same Workspace.
    bool any_forward;
    void (*backward)(Backward&);
    int products;                                               ///< matrix products that `backward` calculates: 5 where P is computed again
    Movement (*movement)(const Problem&, const Device&);        ///< predicted traffic of `backward`
    std::size_t (*saved_bytes)(const Problem&, const Device&);  ///< predicted memory held between the passes beside Q, K, V and O
    std::size_t (*workspace_bytes)(const Problem&, const Device&);  ///< predicted Workspace after both passes
    Unit (*unit)(DType);                                            ///< which unit multiplies
    /// Leaves in the Workspace what does not depend on the tensors; null where there is nothing. Before `forward`, and likewise not
    /// counted.
    void (*prepare)(Forward&) = nullptr;
    bool packed = false;  ///< whether it takes packed batches, and nothing else
};

/// Why a variant cannot do the problem on the device: packed batches or what its `refuses` says. To be asked in the place of that, which
/// need not look at cu_seqlens.
std::optional<std::string> why_refused(const Variant& variant, const Problem& problem, const Device& device);
std::optional<std::string> why_refused(const BackwardVariant& variant, const Problem& problem, const Device& device);

/// A numbered stage, or a lettered one of the appendix. It may have forward variants, backward variants or both.
struct Stage {
    std::string id;     ///< "03", or "a"
    std::string title;  ///< "Shared-memory tiling (FlashAttention-1)"
    std::vector<Variant> variants = {};
    std::vector<BackwardVariant> backward = {};
    Problem problem = {};  ///< what its program runs where nothing else is asked for
};

/// For kernels that move 16 bytes at once: that a tensor of 16-bit elements starts at a multiple of 16 bytes, and its strides are
/// multiples of 8 elements.
/// @param variant "04c tensor_core" @param others what the message ends with: "variants 04a and 04b take any"
/// @throws Refused otherwise
void require_16_byte_rows(const std::string& variant, const char* name, const TensorRef& t, const std::string& others);
/// The same of all tensors of a pass.
void require_16_byte_rows(const std::string& variant, const Forward& args, const std::string& others);
void require_16_byte_rows(const std::string& variant, const Backward& args, const std::string& others);

/// Runs a variant after checking everything, so that no caller can skip a check.
/// @throws InvalidArgument, Refused
void run_forward(const Variant& variant, Forward& args);

/// The forward pass that a backward variant follows, checked likewise.
/// @throws InvalidArgument, Refused
void run_forward(const BackwardVariant& variant, Forward& args);

/// Runs a backward variant after checking everything. What `forward` left in the Workspace is the caller's to have there.
/// @throws InvalidArgument, Refused
void run_backward(const BackwardVariant& variant, Backward& args);

}  // namespace workbook
