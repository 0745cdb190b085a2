#include "simt/cpu/cluster.hpp"

#include <algorithm>
#include <string>

namespace simt::cpu {

void Cluster::run(const LaunchInfo& launch, std::size_t number, uint3 first, const std::function<void()>& body) {
    struct CurrentBlock {
        Block* before = current_block;
        ~CurrentBlock() { current_block = before; }
    } restore;
    current_block = nullptr;
    number_ = number;
    prepare(launch, first, body);
    std::exception_ptr failure;
    try {
        run_threads();
    } catch (...) {
        failure = std::current_exception();
    }
    if (!failure) {
        for (unsigned r = 0; r < size_; ++r) blocks_[r]->hand_over_trace();
        return;
    }
    unwind_all();  // outside of the handler: fibers have handlers of their own
    std::rethrow_exception(failure);
}

void Cluster::prepare(const LaunchInfo& launch, uint3 first, const std::function<void()>& body) {
    launch_ = &launch;
    body_ = &body;
    error_ = nullptr;
    abandoned_ = tracking_ = false;
    loads_.clear();
    lingering_.clear();
    at_barrier_.clear();
    arrived_ = barriers_ = turn_ = 0;
    barrier_knowledge_ = {};
    blockDim = launch.block;
    gridDim = launch.grid;
    const dim3 shape = launch.cluster;
    size_ = shape.x * shape.y * shape.z;
    while (blocks_.size() < size_) blocks_.push_back(std::make_unique<Block>(*this, static_cast<unsigned>(blocks_.size())));
    if (now_ >= 1u << 31) {  // before times of old accesses could be taken for later ones
        now_ = 1;
        for (const auto& block : blocks_) block->forget_times();
    }
    for (unsigned r = 0; r < size_; ++r)
        blocks_[r]->prepare(launch, {first.x + r % shape.x, first.y + r / shape.x % shape.y, first.z + r / shape.x / shape.y});
}

void Cluster::run_threads() {
    unsigned live = 0;
    for (unsigned r = 0; r < size_; ++r) live += blocks_[r]->live_;
    while (live > 0) {
        Block* const block = next_block();
        if (!block) {
            if (!do_what_is_late()) throw Deadlock("deadlock in " + std::string(launch_->kernel) + deadlock_report());
            continue;
        }
        const unsigned before = block->live_;
        block->run_one();
        if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
        if (block->live_ == before) continue;
        --live;
        if (arrived_) complete_barrier();  // who has returned is not waited for
    }
    if (!loads_.empty())
        throw Error((loads_.front().source ? "cp.async.bulk in " : "TMA load in ") + std::string(launch_->kernel) + ": thread " +
                    std::to_string(loads_.front().issuer) + " started a load that announces itself to barrier " +
                    loads_.front().barrier->name + ", and its block has ended without waiting for it");
}

Block* Cluster::next_block() {
    if (size_ == 1) return blocks_[0]->ready_warps_ ? blocks_[0].get() : nullptr;
    const auto ready = [&](unsigned r) { return blocks_[r]->ready_warps_ != 0; };
    const Schedule schedule = launch_->schedule;
    for (unsigned n = 0; n < size_; ++n) {
        unsigned r = n;
        if (schedule == Schedule::highest_first) r = size_ - 1 - n;
        if (schedule == Schedule::round_robin) r = (turn_ + n) % size_;
        if (!ready(r)) continue;
        turn_ = (r + 1) % size_;
        return blocks_[r].get();
    }
    return nullptr;
}

bool Cluster::do_what_is_late() {
    const auto load = std::find_if(loads_.begin(), loads_.end(), [](const BulkCopy& l) { return !l.barrier->waiting.empty(); });
    if (load != loads_.end()) {
        load->block->land(*load);
        loads_.erase(load);
        return true;
    }
    if (lingering_.empty()) return false;
    Thread& thread = *lingering_.front();
    lingering_.pop_front();
    thread.block->make_ready(thread);
    return true;
}

void Cluster::linger(Thread& thread, const char* operation, const void* object) {
    lingering_.push_back(&thread);
    thread.block->suspend(operation, object);
}

void Cluster::unwind_all() {
    abandoned_ = true;
    for (unsigned r = 0; r < size_; ++r) {
        blocks_[r]->failed_ = true;
        for (Thread& t : blocks_[r]->threads_)
            while (t.fiber) blocks_[r]->enter(t);
    }
}

std::string Cluster::deadlock_report() const {
    std::string report;
    for (unsigned r = 0; r < size_; ++r)
        if (blocks_[r]->live_) report += (report.empty() ? ", " : "\n") + blocks_[r]->deadlock_report();
    return report;
}

std::vector<std::pair<Count, Count>> Cluster::take_counts() {
    std::vector<std::pair<Count, Count>> sum;
    for (const auto& block : blocks_) {
        const auto counts = block->take_counts();
        if (sum.size() < counts.size()) sum.resize(counts.size());
        for (std::size_t id = 0; id < counts.size(); ++id) {
            sum[id].first += counts[id].first;
            sum[id].second += counts[id].second;
        }
    }
    return sum;
}

SharedCounts Cluster::take_shared_counts() {
    SharedCounts sum{};
    for (const auto& block : blocks_) {
        const SharedCounts counts = block->take_shared_counts();
        for (std::size_t access = 0; access < sum.size(); ++access) sum[access] += counts[access];
    }
    return sum;
}

Block* Cluster::owner(const void* shared) {
    const auto* at = static_cast<const std::byte*>(shared);
    for (unsigned r = 0; r < size_; ++r) {
        const std::byte* begin = blocks_[r]->shared_memory();
        if (at >= begin && at < begin + blocks_[r]->shared_bytes()) return blocks_[r].get();
    }
    return nullptr;
}

void Cluster::arrive(Thread& thread) {
    if (thread.cluster_arrivals != thread.cluster_waits)
        throw Error("barrier.cluster.arrive: " + thread.block->whereabouts() + " arrives again before its barrier.cluster.wait");
    ++thread.cluster_arrivals;
    ++arrived_;
    release(thread, barrier_knowledge_);
    complete_barrier();
}

void Cluster::wait(Thread& thread) {
    if (thread.cluster_arrivals == thread.cluster_waits)
        throw Error("barrier.cluster.wait: " + thread.block->whereabouts() + " has not arrived");
    ++thread.cluster_waits;
    while (barriers_ < thread.cluster_waits) {
        at_barrier_.push_back(&thread);
        thread.block->suspend("barrier.cluster.wait", &at_barrier_);
    }
    acquire(thread, barrier_knowledge_);
}

void Cluster::complete_barrier() {
    for (unsigned r = 0; r < size_; ++r)
        for (const Thread& t : blocks_[r]->threads_)
            if (t.cluster_arrivals == barriers_ && !t.returned) return;
    ++barriers_;
    arrived_ = 0;
    for (Thread* t : std::exchange(at_barrier_, {})) t->block->make_ready(*t);
}

void Cluster::track() {
    if (tracking_) return;
    tracking_ = true;
    std::size_t threads = 0;
    for (unsigned r = 0; r < size_; ++r) threads += blocks_[r]->threads_.size();
    for (unsigned r = 0; r < size_; ++r) {
        Block& block = *blocks_[r];
        for (Thread& t : block.threads_) {
            t.async().knows.seen.assign(threads, 0);
            t.async().knows.fenced.assign(threads, 0);
            for (const Thread& other : block.threads_) t.async().knows.seen[other.in_cluster] = block.synced_;
        }
    }
}

void Cluster::release(Thread& thread, Knowledge& to) {
    track();
    thread.async().knows.seen[thread.in_cluster] = tick();
    to.learn(thread.async().knows);
}

void Cluster::acquire(Thread& thread, const Knowledge& from) {
    track();
    thread.async().knows.learn(from);
}

}  // namespace simt::cpu
