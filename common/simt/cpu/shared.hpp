/// @file
/// Shared memory in emulation: the interface of gpu.hpp with bounds and race checks.
#pragma once

#include "simt/cpu/block.hpp"

#include <string>
#include <type_traits>

namespace simt {
namespace cpu {

/// What SharedTile(r, c) and SharedVector(i) yield: reads and writes of one element, checked.
template <class T>
class SharedRef {
public:
    SharedRef(T* at, Shadow* cell, const char* name, int r, int c) : at_(at), cell_(cell), name_(name), r_(r), c_(c) {}
    SharedRef(const SharedRef&) = delete;

    operator T() && { return get(); }
    void operator=(T x) && { put(x); }
    void operator=(SharedRef&& other) && { put(other.get()); }
    void operator+=(T x) && { put(get() + x); }
    void operator-=(T x) && { put(get() - x); }
    void operator*=(T x) && { put(get() * x); }

private:
    T get() const {
        block().check_shared_read(*cell_, name_, r_, c_);
        return *at_;
    }
    void put(T x) const {
        block().check_shared_write(*cell_, name_, r_, c_);
        *at_ = x;
    }
    T* at_;
    Shadow* cell_;
    const char* name_;
    int r_, c_;
};

/// Words of an element, of which the first stands for it.
template <class T>
constexpr int words() {
    static_assert(sizeof(T) % kWord == 0, "shared memory is checked in words of 4 bytes");
    return sizeof(T) / kWord;
}

/// @throws Error that names the element and the extent; cols < 0 means a vector
[[noreturn]] void shared_out_of_bounds(const char* name, int r, int c, int rows, int cols);

}  // namespace cpu

template <class T>
T& shared() {
    cpu::Block& block = cpu::block();
    if (sizeof(T) > block.shared_bytes())
        throw Error("shared<T>(): the launch of " + std::string(block.launch().kernel) + " gave " + std::to_string(block.shared_bytes()) +
                    " bytes of shared memory, T needs " + std::to_string(sizeof(T)));
    return *reinterpret_cast<T*>(block.shared_memory());
}

template <class T>
struct SharedTile {
    static constexpr int kWords = cpu::words<T>();
    T* data;
    int pitch;
    int rows, cols;
    const char* name;
    cpu::Shadow* shadow;

    cpu::SharedRef<T> operator()(int r, int c) const {
        if (static_cast<unsigned>(r) >= static_cast<unsigned>(rows) || static_cast<unsigned>(c) >= static_cast<unsigned>(cols))
            cpu::shared_out_of_bounds(name, r, c, rows, cols);
        const int at = r * pitch + c;
        return {data + at, shadow + at * kWords, name, r, c};
    }
};

template <class T>
struct SharedVector {
    static constexpr int kWords = cpu::words<T>();
    T* data;
    int count;
    const char* name;
    cpu::Shadow* shadow;

    cpu::SharedRef<T> operator()(int i) const {
        if (static_cast<unsigned>(i) >= static_cast<unsigned>(count)) cpu::shared_out_of_bounds(name, i, -1, count, -1);
        return {data + i, shadow + i * kWords, name, i, -1};
    }
};

class SharedArena {
public:
    template <class T>
    SharedTile<T> tile(const char* name, int rows, int cols, int pitch) {
        if (rows < 0 || cols < 0 || pitch < cols)
            refuse(name, "rows = " + std::to_string(rows) + ", cols = " + std::to_string(cols) + ", pitch = " + std::to_string(pitch) +
                             ": numbers from 0 on and a pitch of at least cols are accepted");
        const std::size_t at = take<T>(name, static_cast<std::size_t>(rows) * static_cast<std::size_t>(pitch));
        cpu::Block& block = cpu::block();
        return {reinterpret_cast<T*>(block.shared_memory() + at), pitch, rows, cols, name, block.shadow(at)};
    }
    template <class T>
    SharedVector<T> vector(const char* name, int count) {
        if (count < 0) refuse(name, "count = " + std::to_string(count) + ": numbers from 0 on are accepted");
        const std::size_t at = take<T>(name, static_cast<std::size_t>(count));
        cpu::Block& block = cpu::block();
        return {reinterpret_cast<T*>(block.shared_memory() + at), count, name, block.shadow(at)};
    }

private:
    template <class T>
    std::size_t take(const char* name, std::size_t elements) {
        const std::size_t at = used_, limit = cpu::block().shared_bytes();
        if (at % alignof(T))
            refuse(name, "it starts at byte " + std::to_string(at) + ", its elements need multiples of " + std::to_string(alignof(T)));
        used_ += elements * sizeof(T);
        if (used_ > limit)
            refuse(name, "it ends at byte " + std::to_string(used_) + ", the launch of " + cpu::block().launch().kernel + " gave " +
                             std::to_string(limit) + " bytes of shared memory");
        return at;
    }
    [[noreturn]] static void refuse(const char* name, const std::string& why) {
        throw Error("SharedArena: " + std::string(name) + ": " + why);
    }
    std::size_t used_ = 0;
};

}  // namespace simt
