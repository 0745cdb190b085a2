/// @file
/// One emulated thread block: a fiber per thread, a scheduler, barriers and warp rendezvous.
#pragma once

#include "simt/config.hpp"
#include "simt/cpu/coalescer.hpp"
#include "simt/cpu/fiber.hpp"
#include "simt/execution.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// CUDA's built-in variables. The scheduler sets them whenever it lets a thread run.
inline thread_local uint3 threadIdx{};
inline thread_local uint3 blockIdx{};
inline thread_local dim3 blockDim{};
inline thread_local dim3 gridDim{};
inline constexpr int warpSize = 32;

namespace simt::cpu {

inline constexpr unsigned kLanes = 32;
inline constexpr unsigned kMaxWarps = 32;

/// One cp.async.
struct Copy {
    void* to;
    const void* from;  // null: zeros
    std::size_t bytes;
};

/// One CUDA thread.
struct Thread {
    boost::context::fiber fiber;  // empty once the thread has returned
    uint3 index{};
    unsigned linear = 0;
    unsigned lane = 0;
    unsigned warp = 0;
    std::vector<Copy> open_copies;               // cp.async not yet committed
    std::vector<std::vector<Copy>> copy_groups;  // committed and not yet waited for, oldest first
    unsigned run_ahead = 0;                      // counted accesses since it last gave way
    const char* waits_at = nullptr;              // for the deadlock report: the operation
    const void* waits_for = nullptr;             // and the barrier or rendezvous it waits for
};

/// Where the lanes named in a mask meet: each deposits a pointer to a variable on its own stack.
struct Rendezvous {
    const char* operation = nullptr;
    unsigned mask = 0;
    unsigned arrived = 0;
    std::array<void*, kLanes> deposits{};
};

/// State of one warp.
struct Warp {
    std::array<Thread*, kLanes> ready{};  // ring of threads that can run
    unsigned head = 0;
    unsigned count = 0;
    unsigned lanes = 0;  // mask of the lanes that exist
    unsigned epoch = 0;  // __syncwarp()s of the whole warp so far
    std::vector<Rendezvous> meetings;
};

/// Who touched an element of shared memory last (see SharedTile).
struct Shadow {
    std::uint32_t write_epoch = 0, read_epoch = 0;            // block-wide barriers passed by then; 0: never touched
    std::uint16_t writer = 0, reader = 0;                     // thread, or kLanesOfWarp | warp, or kManyWarps
    bool in_flight = false;                                   // a cp.async to it has not been waited for
    std::uint16_t write_warp_epoch = 0, read_warp_epoch = 0;  // __syncwarp()s of that thread's warp by then

    static constexpr std::uint16_t kLanesOfWarp = 0x8000;
    static constexpr std::uint16_t kManyWarps = 0xffff;
};

/// What all blocks of a launch share.
struct LaunchInfo {
    const char* kernel = "kernel";
    dim3 grid, block;
    std::size_t smem = 0;
    Schedule schedule = Schedule::round_robin;
    bool counting = false;
};

/// Runs blocks one after the other on one OS thread.
class Block {
public:
    Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    /// Runs every thread of the block to its end.
    /// @throws what the first failing thread threw, after all others were unwound; Deadlock
    void run(const LaunchInfo& launch, uint3 index, const std::function<void()>& body);

    // ---- called by the emulated threads ----
    /// Waits until all threads of the block are here.
    void sync_threads(const char* operation);
    /// Lanes in `mask` meet; the last to come runs combine(deposits), then all go on.
    template <class T, class Combine>
    void meet(const char* operation, unsigned mask, T& mine, Combine&& combine) {
        Rendezvous& place = arrive(operation, mask, &mine);
        if (place.arrived != place.mask) {
            suspend(operation, &place);
            return;
        }
        combine(reinterpret_cast<const std::array<T*, kLanes>&>(place.deposits), place.mask);
        leave(place);
    }
    void end_warp_epoch() { ++warps_[self().warp].epoch; }
    unsigned lanes_of_this_warp() const { return warps_[self_->warp].lanes; }

    Thread& self() const { return *self_; }
    const LaunchInfo& launch() const { return *launch_; }
    std::byte* shared_memory() const { return shared_.get(); }
    std::size_t shared_bytes() const { return launch_->smem; }
    Shadow* shadow() { return shadow_.data(); }

    /// Charges an access of the running thread to the ledger. `site` tells apart the places in the kernel.
    void charge(int tensor, bool write, const void* address, std::size_t bytes, const void* site);
    /// Counts since the last call, by tensor id: (read, written).
    std::vector<std::pair<Count, Count>> take_counts() { return coalescer_.take(); }

    // ---- asynchronous copies and vector accesses of the PTX wrappers, by plain address ----
    /// Begins a copy of this thread to shared memory: the destination is poisoned now and written when its group is waited for.
    /// `from` is null where zeros are to be written. @throws Error on a misaligned or foreign address; Race
    void start_copy(void* to, const void* from, std::size_t bytes);
    void commit_copies();
    void wait_for_copies(std::size_t pending);
    /// Checks an access to `bytes` aligned bytes, word by word. @throws Error also where a copy is still under way; Race
    void read_shared_vector(const char* operation, const void* at, std::size_t bytes);
    void write_shared_vector(const char* operation, const void* at, std::size_t bytes);
    /// Counts how often shared memory has to be accessed for `count` addresses of `bytes` each that go together: as often as
    /// different words of one bank are among them.
    void count_bank_conflicts(const void* const* addresses, int count, std::size_t bytes);
    SharedCount take_shared_count() { return std::exchange(shared_count_, {}); }

    /// @throws Race
    void check_shared_read(Shadow& cell, const char* name, int r, int c);
    void check_shared_write(Shadow& cell, const char* name, int r, int c);

    /// "thread 17 of block (3,0,0)"
    std::string whereabouts() const;

private:
    struct FreeDeleter {
        void operator()(std::byte* p) const;
    };
    void prepare(uint3 index);
    void make_ready(Thread& thread);
    Thread& next_ready();
    void enter(Thread& thread);
    void suspend(const char* operation, const void* object);
    Rendezvous& arrive(const char* operation, unsigned mask, void* deposit);
    void leave(Rendezvous& place);
    void unwind_all();
    std::string deadlock_report() const;
    void refuse_in_flight(const char* operation, std::size_t offset, const char* access) const;
    std::size_t shared_offset(const char* operation, const void* at, std::size_t bytes) const;
    void note_write(Shadow& cell);
    /// Calls f with the shadow of each word that the copy writes.
    template <class F>
    void for_each_cell(const Copy& copy, F f);
    /// Copies that a block never waited for are not under way in the next one.
    void forget_copies();
    [[noreturn]] void race(const char* access, const char* earlier, std::uint16_t who, const char* name, int r, int c) const;
    bool ordered(std::uint32_t epoch, std::uint16_t who, std::uint16_t warp_epoch) const;

    const LaunchInfo* launch_ = nullptr;
    const std::function<void()>* body_ = nullptr;
    Thread* self_ = nullptr;
    std::vector<Thread> threads_;
    std::array<Warp, kMaxWarps> warps_;
    std::uint32_t ready_warps_ = 0;  // mask
    unsigned turn_ = 0;              // round robin: the warp to look at first
    unsigned live_ = 0;              // threads that have not returned
    std::vector<Thread*> at_barrier_;
    std::uint32_t epoch_ = 0;  // block-wide barriers so far; goes on from block to block, so shadows need no clearing
    boost::context::fiber scheduler_;
    std::exception_ptr error_;
    bool abandoned_ = false;
    StackSlab stacks_;
    const void* scheduler_stack_ = nullptr;  // told by AddressSanitizer
    std::size_t scheduler_stack_bytes_ = 0;
    std::unique_ptr<std::byte, FreeDeleter> shared_;
    std::size_t shared_capacity_ = 0;
    std::vector<Shadow> shadow_;  // one cell a byte of shared memory
    Coalescer coalescer_;
    SharedCount shared_count_;
};

/// The block that this OS thread runs; null outside of a launch.
inline thread_local Block* current_block = nullptr;

/// The running block. @throws Error outside of a kernel
Block& block();

/// Charges an access of the running thread; the place in the kernel is where this function returns to.
void charge_here(int tensor, bool write, const void* address, std::size_t bytes);

}  // namespace simt::cpu
