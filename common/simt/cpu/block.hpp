/// @file
/// One emulated thread block: a fiber per thread, its barriers, and the rendezvous of warps and warpgroups.
#pragma once

#include "simt/config.hpp"
#include "simt/cpu/async.hpp"
#include "simt/cpu/coalescer.hpp"
#include "simt/cpu/fiber.hpp"
#include "simt/execution.hpp"
#include "simt/trace.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
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
/// Accesses to shared memory are checked word by word: the smallest that a wrapper moves.
inline constexpr std::size_t kWord = 4;

class Cluster;
class Running;

/// One cp.async.
struct Copy {
    void* to;
    const void* from;  // null: zeros
    std::size_t bytes;
};

/// What a thread has of Hopper's machinery, made when it first uses it.
struct AsyncState {
    std::vector<BulkCopy> open_stores;                // stores by TMA not yet committed
    std::vector<std::vector<BulkCopy>> store_groups;  // committed and not yet waited for, oldest first
    WgmmaQueue wgmma;
    Knowledge knows;
};

/// One CUDA thread.
struct Thread {
    boost::context::fiber fiber;  // empty once the thread has returned
    uint3 index{};
    unsigned linear = 0;
    unsigned lane = 0;
    unsigned warp = 0;
    unsigned run_ahead = 0;           // counted accesses since it last gave way
    unsigned waits_parity = 0;        // for the deadlock report: of an mbarrier the phase,
    const char* waits_at = nullptr;   // the operation,
    const void* waits_for = nullptr;  // and the barrier or rendezvous it waits for
    Block* block = nullptr;
    bool returned = false;
    unsigned in_cluster = 0;        // number among the threads of the cluster
    unsigned cluster_arrivals = 0;  // at barrier.cluster
    unsigned cluster_waits = 0;
    std::vector<Copy> open_copies;               // cp.async not yet committed
    std::vector<std::vector<Copy>> copy_groups;  // committed and not yet waited for, oldest first
    std::unique_ptr<AsyncState> async_state;

    AsyncState& async() {
        if (!async_state) async_state = std::make_unique<AsyncState>();
        return *async_state;
    }
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

/// Who touched a word of shared memory last (see SharedTile).
struct Shadow {
    enum class InFlight : std::uint8_t { nothing, cp_async, tma, peer };
    std::uint32_t write_time = 0, read_time = 0;              // of the cluster; 0: never touched
    std::uint16_t writer = 0, reader = 0;                     // thread, or kLanesOfWarp | warp, or kManyWarps
    InFlight in_flight = InFlight::nothing;                   // under way to it
    std::uint16_t async_readers = 0;                          // wgmmas, stores by TMA and copies to other blocks that may still read it
    std::uint16_t write_warp_epoch = 0, read_warp_epoch = 0;  // __syncwarp()s of that thread's warp by then

    static constexpr std::uint16_t kLanesOfWarp = 0x8000;
    static constexpr std::uint16_t kManyWarps = 0xffff;
};

/// What all blocks of a launch share.
struct LaunchInfo {
    const char* kernel = "kernel";
    dim3 grid, block, cluster;
    std::size_t smem = 0;
    Schedule schedule = Schedule::round_robin;
    bool counting = false;
    bool early = false;
    Trace* trace = nullptr;
    Running* running = nullptr;
};

/// One block of a cluster; kept for the next.
class Block {
public:
    explicit Block(Cluster& cluster, unsigned rank);
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

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
    /// After a __syncwarp() of the whole warp.
    void end_warp_epoch();
    unsigned lanes_of_this_warp() const { return warps_[self_->warp].lanes; }

    Thread& self() const { return *self_; }
    Cluster& cluster() const { return cluster_; }
    unsigned rank() const { return rank_; }
    const LaunchInfo& launch() const { return *launch_; }

    /// The kernel before has ended, for all threads of this block.
    void await_kernel_before() { awaits_kernel_before_ = false; }
    std::byte* shared_memory() const { return shared_.get(); }
    std::size_t shared_bytes() const { return launch_->smem; }
    /// Of the word at an offset in shared memory.
    Shadow* shadow(std::size_t offset) { return &shadow_[offset / kWord]; }

    /// Charges an access of the running thread to the ledger. `site` tells apart the places in the kernel.
    void charge(int tensor, bool write, const void* address, std::size_t bytes, const void* site);
    /// Counts since the last call, by tensor id: (read, written).
    std::vector<std::pair<Count, Count>> take_counts() { return coalescer_.take(); }
    SharedCounts take_shared_counts() { return coalescer_.take_shared(); }
    /// Gives what this block touched to the launch's trace, if it has one.
    void hand_over_trace();

    // ---- asynchronous copies and vector accesses of the PTX wrappers, by plain address ----
    /// Begins a copy of this thread to shared memory: the destination is poisoned now and written when its group is waited for.
    /// `from` is null where zeros are to be written. @throws Error on a misaligned or foreign address; Race
    void start_copy(void* to, const void* from, std::size_t bytes);
    void commit_copies();
    void wait_for_copies(std::size_t pending);
    /// Checks an access to `bytes` aligned bytes of this block, word by word. @throws Error also where a copy is still under way; Race
    void read_shared_vector(const char* operation, const void* at, std::size_t bytes);
    void write_shared_vector(const char* operation, const void* at, std::size_t bytes);
    /// Counts an access of the running thread to 4, 8 or 16 bytes of this block; the place in the kernel is where this function
    /// returns to. Called before the access, because the thread may give way to others.
    void charge_shared(SharedAccess access, const void* at, std::size_t bytes);
    /// Counts an instruction of a whole warp, of which lane i accesses the 16 bytes at rows[i].
    void charge_shared(SharedAccess access, const void* const* rows, unsigned lanes) {
        if (launch_->counting) coalescer_.charge_shared(access, rows, lanes);
    }

    // ---- mbarrier; handles lie in the shared memory of any block of the cluster ----
    void init_mbarrier(MbarrierHandle* at, unsigned arrivals, const char* name, int index);
    void announce_mbarriers();
    /// Announces bytes that will land, then arrives. @throws Error when more arrive than the phase expects
    void arrive_mbarrier(const char* operation, MbarrierHandle* at, long long bytes);
    void expect_mbarrier(MbarrierHandle* at, long long bytes);
    void wait_mbarrier(MbarrierHandle* at, unsigned parity);
    std::uint32_t address_of(const char* operation, const void* mine) const {
        return static_cast<std::uint32_t>(shared_offset(operation, mine, 1));
    }
    /// The same place in the shared memory of another block of the cluster.
    void* peer_address(const char* operation, const void* mine, unsigned rank);

    // ---- copies by TMA ----
    /// Begins a load of a box: poisons the destination, which lands late. @param mask blocks of the cluster that get it
    void start_bulk_load(const TensorMap& map, const std::array<int, 5>& at, void* to, MbarrierHandle* barrier, unsigned mask);
    /// Begins a store of a box, whose bytes are read late. @param adds floats are added to those in global memory
    void start_bulk_store(const TensorMap& map, const std::array<int, 5>& at, const void* from, bool adds = false);
    /// Begins a copy to the same place of the shared memory of block `rank`: poisons it; the bytes are read and land late.
    void start_peer_copy(void* to, const void* from, int bytes, MbarrierHandle* barrier, unsigned rank);
    void commit_bulk();
    /// Waits until all but the latest `pending` groups have been read, and (written) arrived in global memory.
    void wait_for_bulk(std::size_t pending, bool written);
    void land(BulkCopy& load);
    void fence_proxy_async();

    // ---- other blocks of the grid ----
    /// Waits until the number in global memory has a value, which a block that began before this one gives it: others need not have
    /// begun. @throws Error when all those have ended and it has not
    void wait_for_value(const std::uint32_t* at, std::uint32_t value, const std::string& tensor);

    // ---- warpgroups ----
    void named_barrier(const char* operation, unsigned id, unsigned threads, bool waits);
    void set_registers(bool more, unsigned registers);
    void fence_wgmma() { self_->async().wgmma.fenced = true; }
    void issue_wgmma(const Wgmma& instruction);
    void commit_wgmma();
    void wait_for_wgmma(std::size_t pending);
    /// The 128 lanes of a warpgroup meet; the last to come runs combine(deposits), then all go on.
    template <class T, class Combine>
    void meet_warpgroup(const char* operation, T& mine, Combine&& combine) {
        Warpgroup& place = arrive_warpgroup(operation, &mine);
        if (place.arrived < kWarpgroup) {
            suspend(operation, &place);
            return;
        }
        combine(reinterpret_cast<const std::array<T*, kWarpgroup>&>(place.deposits));
        leave_warpgroup(place);
    }

    /// @throws Race
    void check_shared_read(Shadow& cell, const char* name, int r, int c) {
        // Since the last block-wide barrier several warps have read it and nobody has written: one more changes nothing.
        if (cell.write_time <= synced_ && cell.read_time > synced_ && cell.reader == Shadow::kManyWarps) return;
        note_shared_read(cell, name, r, c);
    }
    void check_shared_write(Shadow& cell, const char* name, int r, int c);

    /// "thread 17 of block (3,0,0)"
    std::string whereabouts() const;

private:
    friend class Cluster;
    struct FreeDeleter {
        void operator()(std::byte* p) const;
    };
    void prepare(const LaunchInfo& launch, uint3 index);
    void note_shared_read(Shadow& cell, const char* name, int r, int c);
    void note_new_shared_read(Shadow& cell, const char* name, int r, int c);
    /// Lets one thread run until it waits. Some thread must be ready.
    void run_one();
    void make_ready(Thread& thread);
    Thread& next_ready();
    void enter(Thread& thread);
    void suspend(const char* operation, const void* object);
    /// The running thread is this one from now on.
    void become(Thread& thread);
    /// Keeps what ran until now, the scheduler or a thread, to go on with later.
    void keep(boost::context::fiber&& before, SwitchNote note);
    Rendezvous& arrive(const char* operation, unsigned mask, void* deposit);
    void leave(Rendezvous& place);
    std::string deadlock_report() const;
    std::string waiting_at(const Thread& thread) const;
    /// Of this block's memory, to the running thread of any block of the cluster.
    void refuse_in_flight(const char* operation, std::size_t offset, const char* access) const {
        if (shadow_[offset / kWord].in_flight != Shadow::InFlight::nothing) report_in_flight(operation, offset, access);
    }
    void refuse_async_readers(const char* operation, std::size_t offset) const {
        if (shadow_[offset / kWord].async_readers) report_async_readers(operation, offset);
    }
    [[noreturn]] void report_in_flight(const char* operation, std::size_t offset, const char* access) const;
    [[noreturn]] void report_async_readers(const char* operation, std::size_t offset) const;
    /// Where in shared memory a bulk copy begins. @throws Error where it may not
    std::size_t bulk_offset(const char* operation, const TensorMap& map, const void* shared) const;
    /// Whether what the asynchronous proxy reads has landed, and a proxy fence lies between it and ordinary writes.
    void check_async_read(const char* operation, std::size_t offset, std::size_t bytes);
    Mbarrier& mbarrier(const char* operation, const MbarrierHandle* at);
    void complete_if_full(Mbarrier& barrier);
    bool read_store(BulkCopy& store);
    /// Poisons the destination of a copy, which lands late.
    void begin_landing(const char* operation, BulkCopy copy);
    /// What a copy to another block reads of this one. @throws Error where this block has ended
    void hand_over(const BulkCopy& copy, std::byte* to);
    /// After each counted access: lets the other lanes catch up from time to time.
    void note_counted_access();
    /// @throws Error before await_kernel_before(), in a kernel that is launched early
    void refuse_early_access(int tensor) const {
        if (awaits_kernel_before_) tell_early_access(tensor);
    }
    [[noreturn]] void tell_early_access(int tensor) const;
    /// Charges what of a TMA's box lies inside the tensor.
    void charge_box(const TensorMap& map, const std::array<int, 5>& at, bool write);
    void trace(int tensor, bool write, const void* address);
    /// Accesses to the shared memory of the others are not watched. @throws Error where that block has ended
    bool in_another_block(const char* operation, const void* at) const;
    Warpgroup& arrive_warpgroup(const char* operation, void* deposit);
    void leave_warpgroup(Warpgroup& place);
    unsigned registers_in_use() const;
    void check_end_of_thread();
    template <class F>
    void for_each_operand_chunk(const Wgmma& op, F f) const;
    void run_wgmmas(const std::array<WgmmaQueue*, kWarpgroup>& lanes);
    std::size_t shared_offset(const char* operation, const void* at, std::size_t bytes) const;
    void note_write(Shadow& cell);
    /// Calls f with the shadow of each word that the copy writes.
    template <class F>
    void for_each_cell(const Copy& copy, F f);
    /// Nobody has touched shared memory as far as times tell.
    void forget_times();
    /// Copies that a block never waited for are not under way in the next one.
    void forget_copies();
    [[noreturn]] void race(const char* access, const char* earlier, std::uint16_t who, const char* name, int r, int c) const;
    bool ordered(std::uint32_t time, std::uint16_t who, std::uint16_t warp_epoch) const;
    /// The same where barriers other than block-wide ones are in use.
    bool ordered_by_knowledge(std::uint32_t time, std::uint16_t who, std::uint16_t warp_epoch) const;

    Cluster& cluster_;
    const unsigned rank_;
    const LaunchInfo* launch_ = nullptr;
    uint3 index_{};
    Thread* self_ = nullptr;
    Thread* left_ = nullptr;  // gave way to the running thread; null: the scheduler did
    std::vector<Thread> threads_;
    std::array<Warp, kMaxWarps> warps_;
    std::uint32_t ready_warps_ = 0;  // mask
    unsigned turn_ = 0;              // round robin: the warp to look at first
    unsigned live_ = 0;              // threads that have not returned
    std::vector<Thread*> at_barrier_;
    bool failed_ = false;       // the cluster did, before this block
    std::uint32_t synced_ = 0;  // time of the last block-wide barrier
    std::uint32_t begin_ = 0;   // and of the block's start
    std::array<NamedBarrier, 16> named_;
    std::deque<Mbarrier> mbarriers_;
    std::array<Warpgroup, kMaxWarps / 4> warpgroups_;
    StackSlab stacks_;
    std::unique_ptr<std::byte, FreeDeleter> shared_;
    std::size_t shared_capacity_ = 0;
    std::vector<Shadow> shadow_;  // one cell a word of shared memory
    Coalescer coalescer_;
    std::vector<TracedRows> traced_;
    bool awaits_kernel_before_ = false;
    std::size_t traced_before_ = 0;  // so many of them belong to the time before the last barrier
};

/// The block that this OS thread runs; null outside of a launch.
inline thread_local Block* current_block = nullptr;

[[noreturn]] void refuse_outside_of_kernel();

/// The running block. @throws Error outside of a kernel
inline Block& block() {
    if (!current_block) refuse_outside_of_kernel();
    return *current_block;
}

/// Charges an access of the running thread; the place in the kernel is where this function returns to.
void charge_here(int tensor, bool write, const void* address, std::size_t bytes);

}  // namespace simt::cpu
