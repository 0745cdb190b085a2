/// @file
/// Views of tensors in global memory. On the GPU a view is a pointer and its strides; in emulation each access is checked
/// against the extents and charged to the ledger of the launch.
#pragma once

#include "simt/config.hpp"
#include "simt/convert.hpp"

#include <array>
#include <cstddef>
#include <string>
#include <type_traits>

#if SIMT_EMULATED
#include "simt/cpu/block.hpp"
#include "simt/ledger.hpp"

#include <atomic>
#include <sstream>
#include <utility>
#endif

namespace simt {

#if SIMT_EMULATED
namespace cpu {

template <class T, int R>
class ElementRef;

/// What &view(i, j) yields in emulation: an address that knows its tensor. On the GPU it is a plain pointer.
template <class T>
class GlobalAddress {
public:
    GlobalAddress(T* at, long long left_in_row, int tensor) : at_(at), left_(left_in_row), tensor_(tensor) {}

    /// Elements in `bytes` bytes.
    static constexpr int per_bytes(int bytes) { return bytes / static_cast<int>(sizeof(T)); }
    /// Checks and charges an access to `count` elements from here on in the row, and yields the plain pointer.
    [[gnu::always_inline]] T* read(int count) const { return access(count, false); }
    [[gnu::always_inline]] T* write(int count) const { return access(count, true); }
    /// Checks `count` elements from here on in the row, and yields them as what a bulk copy moves: it charges them when they move.
    TensorMap stretch(int count) const {
        check(count);
        TensorMap map;
        map.base = const_cast<char*>(reinterpret_cast<const char*>(at_));
        map.rank = 1;
        map.element = sizeof(T);
        map.tensor = tensor_;
        map.writable = !std::is_const_v<T>;
        map.extent[0] = map.box[0] = count;
        return map;
    }

    std::string tensor() const { return tensor_name(tensor_); }

private:
    void check(int count) const {
        if (count < 1 || count > left_)
            throw Error("out of bounds: " + std::to_string(count) + " elements at once from " + tensor_name(tensor_) + ", of whose row " +
                        std::to_string(left_) + " are left, by " + block().whereabouts());
    }
    // Inlined into the kernel, so that the return address of charge_here() is the place in the kernel.
    [[gnu::always_inline]] T* access(int count, bool write) const {
        check(count);
        if (block().launch().counting) charge_here(tensor_, write, at_, static_cast<std::size_t>(count) * sizeof(T));
        return at_;
    }
    T* at_;
    long long left_;
    int tensor_;
};

}  // namespace cpu
#endif

/// A strided view of rank R. The innermost stride is 1; the others are in elements.
///
/// view(i, j, ...) with R indices is an element: a reference on the GPU, a checked proxy in emulation (so write
/// `float x = ...`, not `auto x = ...`). With fewer indices it is the view of what remains: Q(b, h) is a matrix.
template <class T, int R>
class TensorView {
    static_assert(R >= 1 && R <= 5);

public:
    /// @param name for the ledger and error messages
    /// @throws Error when an extent is negative
    TensorView(const char* name, T* data, std::array<int, R> extents, std::array<long long, R - 1> strides) : data_(data) {
        for (int k = 0; k < R; ++k) {
            extent_[k] = extents[static_cast<std::size_t>(k)];
            if (extent_[k] < 0)
                throw Error("view of " + std::string(name) + ": extent " + std::to_string(k) + " = " + std::to_string(extent_[k]) +
                            ": numbers from 0 on are accepted");
        }
        for (int k = 0; k + 1 < R; ++k) stride_[k] = strides[static_cast<std::size_t>(k)];
        stride_[R - 1] = 1;
#if SIMT_EMULATED
        tensor_ = tensor_id(name);
#else
        (void)name;
#endif
    }

    SIMT_BOTH int extent(int k) const { return extent_[k]; }

    template <class... I>
    SIMT_BOTH decltype(auto) operator()(I... indices) const {
        constexpr int K = sizeof...(I);
        static_assert(K >= 1 && K <= R, "a view takes at most as many indices as it has dimensions");
        const int index[] = {static_cast<int>(indices)...};
        if constexpr (K < R) {
            TensorView<T, R - K> rest;
            rest.data_ = data_ + offset<K>(index);
#pragma unroll
            for (int k = 0; k < R - K; ++k) {
                rest.extent_[k] = extent_[K + k];
                rest.stride_[k] = stride_[K + k];
            }
#if SIMT_EMULATED
            rest.tensor_ = tensor_;
            for (int k = 0; k < K; ++k)
                if (static_cast<unsigned>(index[k]) >= static_cast<unsigned>(extent_[k])) out_of_bounds(index, K);
#endif
            return rest;
        } else {
#if SIMT_EMULATED
            return cpu::ElementRef<T, R>(*this, {static_cast<int>(indices)...});
#else
            return static_cast<T&>(data_[offset<K>(index)]);
#endif
        }
    }

    /// The part of dimension K from index `begin` on, `count` long: rows of one sequence in a packed batch, say.
    template <int K>
    SIMT_BOTH TensorView slice(int begin, int count) const {
        static_assert(K >= 0 && K < R);
        TensorView part = *this;
        part.data_ += begin * static_cast<std::ptrdiff_t>(K == R - 1 ? 1 : stride_[K]);
        part.extent_[K] = count;
#if SIMT_EMULATED
        if (begin < 0 || count < 0 || begin > extent_[K] - count)
            throw Error("out of bounds: slice " + std::to_string(begin) + " to " + std::to_string(begin + count) + " of " +
                        tensor_name(tensor_) + ", whose extent " + std::to_string(K) + " is " + std::to_string(extent_[K]));
#endif
        return part;
    }

private:
    template <class, int>
    friend class TensorView;
#if SIMT_EMULATED
    friend class cpu::ElementRef<T, R>;

    [[noreturn, gnu::cold, gnu::noinline]] void out_of_bounds(const int* index, int count) const {
        std::ostringstream out;
        out << "out of bounds: " << tensor_name(tensor_) << "(";
        for (int k = 0; k < count; ++k) out << (k ? ", " : "") << index[k];
        out << ") of extent (";
        for (int k = 0; k < R; ++k) out << (k ? ", " : "") << extent_[k];
        out << ")";
        if (cpu::current_block) out << " by " << cpu::current_block->whereabouts();
        throw Error(out.str());
    }
    int tensor_ = 0;
#endif

    SIMT_BOTH TensorView() {}

    template <int K>
    SIMT_BOTH std::ptrdiff_t offset(const int* index) const {
        std::ptrdiff_t sum = 0;
#pragma unroll
        for (int k = 0; k < K; ++k) sum += k == R - 1 ? index[k] : index[k] * static_cast<std::ptrdiff_t>(stride_[k]);
        return sum;
    }

    T* data_;
    int extent_[R];
    long long stride_[R];
};

/// A view of a tensor whose elements lie packed in row-major order.
template <class T, int R>
TensorView<T, R> packed_view(const char* name, T* data, std::array<int, R> extents) {
    std::array<long long, R - 1> strides{};
    long long stride = 1;
    for (int k = R - 1; k > 0; --k) {
        stride *= extents[static_cast<std::size_t>(k)];
        strides[static_cast<std::size_t>(k) - 1] = stride;
    }
    return TensorView<T, R>(name, data, extents, strides);
}

#if SIMT_EMULATED
namespace cpu {

/// One element of a view. Its operators work on temporaries only: `auto x = Q(i, j);` would keep the reference, not the
/// value, and using such an x does not compile.
template <class T, int R>
class ElementRef {
    using Value = std::remove_const_t<T>;

public:
    ElementRef(const TensorView<T, R>& view, std::array<int, R> index) : view_(view), index_(index) {}
    ElementRef(const ElementRef&) = delete;

    [[gnu::always_inline]] operator Value() && { return *at(false); }
    [[gnu::always_inline]] void operator=(Value x) && { *at(true) = x; }
    [[gnu::always_inline]] void operator=(ElementRef&& other) && {
        const Value x = *other.at(false);
        *at(true) = x;
    }
    [[gnu::always_inline]] void operator+=(Value x) && {
        x = *at(false) + x;
        *at(true) = x;
    }
    [[gnu::always_inline]] void operator*=(Value x) && {
        x = *at(false) * x;
        *at(true) = x;
    }
    GlobalAddress<T> operator&() && { return {place(), view_.extent_[R - 1] - index_[R - 1], view_.tensor_}; }

private:
    T* place() const {
        for (int k = 0; k < R; ++k)
            if (static_cast<unsigned>(index_[static_cast<std::size_t>(k)]) >= static_cast<unsigned>(view_.extent_[k]))
                view_.out_of_bounds(index_.data(), R);
        return view_.data_ + view_.template offset<R>(index_.data());
    }
    [[gnu::always_inline]] T* at(bool write) const {  // inlined for the same reason as GlobalAddress::access
        T* p = place();
        if (current_block && current_block->launch().counting) charge_here(view_.tensor_, write, p, sizeof(T));
        return p;
    }

    const TensorView<T, R>& view_;
    std::array<int, R> index_;
};

}  // namespace cpu

/// Atomic addition to a view's element: one read and one write of it.
template <class T>
T atomicAdd(cpu::GlobalAddress<T> address, std::type_identity_t<T> value) {
    address.read(1);
    return std::atomic_ref<T>(*address.write(1)).fetch_add(value);
}
#endif

}  // namespace simt

#if SIMT_EMULATED
using simt::atomicAdd;
#endif
