/// @file
/// Emulated blocks that run together: a cluster, or a single block as a cluster of one.
#pragma once

#include "simt/cpu/block.hpp"

#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <utility>
#include <vector>

namespace simt::cpu {

/// Runs clusters one after the other on one OS thread. Its blocks' fibers take turns; each block has its own shared memory.
class Cluster {
public:
    Cluster() = default;
    Cluster(const Cluster&) = delete;
    Cluster& operator=(const Cluster&) = delete;

    /// Runs every thread of a cluster's blocks to its end.
    /// @param number of the cluster in the launch
    /// @param first index of the block of rank 0
    /// @throws what the first failing thread threw, after all others were unwound; Deadlock; Error where a TMA load is left behind
    void run(const LaunchInfo& launch, std::size_t number, uint3 first, const std::function<void()>& body);

    std::vector<std::pair<Count, Count>> take_counts();
    SharedCounts take_shared_counts();

    unsigned size() const { return size_; }
    std::size_t number() const { return number_; }
    Block& block(unsigned rank) { return *blocks_[rank]; }
    /// The block whose shared memory holds the address; null: none.
    Block* owner(const void* shared);

    // ---- barrier.cluster ----
    void arrive(Thread& thread);
    void wait(Thread& thread);

    // ---- TMA ----
    /// A load that lands when no thread can run and somebody waits for its barrier.
    void start_load(BulkCopy copy) { loads_.push_back(std::move(copy)); }

    /// Lets all others run as far as they can: what the thread does next happens as late as it may.
    void linger(Thread& thread, const char* operation, const void* object);

    // ---- who knows of whose accesses ----
    std::uint32_t now() const { return now_; }
    /// Another moment begins; the result is the one that ends.
    std::uint32_t tick() { return now_++; }
    /// Clocks are kept from the first barrier on that is not block-wide: kernels without them pay nothing.
    bool tracking() const { return tracking_; }
    void track();
    /// What the thread has done goes to all that will learn from `to`.
    void release(Thread& thread, Knowledge& to);
    void acquire(Thread& thread, const Knowledge& from);

private:
    friend class Block;
    void prepare(const LaunchInfo& launch, uint3 first, const std::function<void()>& body);
    void run_threads();
    Block* next_block();
    /// Something that was put off as long as threads could run. @return false when there is nothing
    bool do_what_is_late();
    void unwind_all();
    std::string deadlock_report() const;
    void complete_barrier();

    const LaunchInfo* launch_ = nullptr;
    std::size_t number_ = 0;
    const std::function<void()>* body_ = nullptr;
    std::vector<std::unique_ptr<Block>> blocks_;  // kept from cluster to cluster
    unsigned size_ = 1;
    unsigned turn_ = 0;
    std::list<BulkCopy> loads_;
    std::deque<Thread*> lingering_;
    unsigned arrived_ = 0;   // at barrier.cluster
    unsigned barriers_ = 0;  // completed so far
    std::vector<Thread*> at_barrier_;
    Knowledge barrier_knowledge_;
    std::uint32_t now_ = 1;
    bool tracking_ = false;
    boost::context::fiber scheduler_;
    std::exception_ptr error_;
    bool abandoned_ = false;
    const void* scheduler_stack_ = nullptr;  // told by AddressSanitizer
    std::size_t scheduler_stack_bytes_ = 0;
};

}  // namespace simt::cpu
