/// @file
/// Stacks for the emulator's fibers, and what AddressSanitizer wants to hear of them.
#pragma once

#include <boost/context/fiber.hpp>
#include <boost/context/stack_context.hpp>

#include <atomic>
#include <cstddef>
#include <new>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace simt::cpu {

/// The stacks of one block's threads in one mapping, each with a guard page at its low end, kept from block to block.
class StackSlab {
public:
    /// An odd number of pages, for stacks a power of two apart would share a few sets of the caches and of the TLB.
    static constexpr std::size_t kStackBytes = 17 * 4096;
    static constexpr std::size_t kGuardBytes = 4096;
    /// Guard pages of the whole process. Each splits a mapping in two, and Linux allows 65530 mappings: on a host of many cores
    /// guards for all stacks would leave none for malloc. Stacks past this number go without.
    static constexpr std::size_t kMaxGuards = 16384;

    StackSlab() = default;
    StackSlab(const StackSlab&) = delete;
    StackSlab& operator=(const StackSlab&) = delete;
    ~StackSlab() { release(); }

    void reserve(std::size_t stacks) {
        if (stacks <= count_) return;
        release();
        void* memory = mmap(nullptr, stacks * kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
#if defined(__SANITIZE_ADDRESS__)
        ASAN_UNPOISON_MEMORY_REGION(memory, stacks * kStackBytes);  // frames of stacks that were here before
#endif
        base_ = static_cast<char*>(memory);
        count_ = stacks;
        guards_ = 0;
        while (guards_ < stacks && guards_in_process() < kMaxGuards && mprotect(low(guards_), kGuardBytes, PROT_NONE) == 0) {
            ++guards_;
            ++guards_in_process();
        }
    }

    char* low(std::size_t i) const { return base_ + i * kStackBytes; }

    /// Boost.Context's allocator interface for stack i. The stacks of a warp begin at different places of a page, for the same reason.
    struct Allocator {
        char* low;
        std::size_t bytes;
        boost::context::stack_context allocate() const {
            boost::context::stack_context context;
            context.size = bytes;
            context.sp = low + bytes;
            return context;
        }
        void deallocate(boost::context::stack_context&) const {}
    };
    Allocator allocator(std::size_t i) const { return {low(i), kStackBytes - i % 32 * 128}; }

private:
    void release() {
        if (base_) munmap(base_, count_ * kStackBytes);
        guards_in_process() -= guards_;
        base_ = nullptr;
        count_ = guards_ = 0;
    }
    static std::atomic<std::size_t>& guards_in_process() {
        static std::atomic<std::size_t> count{0};
        return count;
    }
    char* base_ = nullptr;
    std::size_t count_ = 0;
    std::size_t guards_ = 0;
};

/// Told to AddressSanitizer on both sides of a stack switch; empty without it.
class SwitchNote {
public:
#if defined(__SANITIZE_ADDRESS__)
    void leave(const void* to_low, std::size_t to_size, bool for_ever = false) {
        __sanitizer_start_switch_fiber(for_ever ? nullptr : &fake_stack_, to_low, to_size);
    }
    void arrive(const void** from_low = nullptr, std::size_t* from_size = nullptr) {
        __sanitizer_finish_switch_fiber(fake_stack_, from_low, from_size);
    }

private:
    void* fake_stack_ = nullptr;
#else
    void leave(const void*, std::size_t, bool = false) {}
    void arrive(const void** = nullptr, std::size_t* = nullptr) {}
#endif
};

}  // namespace simt::cpu
