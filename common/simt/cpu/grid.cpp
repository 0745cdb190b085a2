#include "simt/cpu/grid.hpp"

#include "simt/cpu/cluster.hpp"
#include "simt/ledger.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace simt::cpu {
namespace {

/// Clusters that no worker uses now. Their stacks and shared memory are kept from launch to launch: mapping them anew would cost
/// more than a small launch.
class Pool {
public:
    std::unique_ptr<Cluster> take() {
        std::lock_guard lock(mutex_);
        if (idle_.empty()) return std::make_unique<Cluster>();
        std::unique_ptr<Cluster> cluster = std::move(idle_.back());
        idle_.pop_back();
        return cluster;
    }
    void give_back(std::unique_ptr<Cluster> cluster) {
        std::lock_guard lock(mutex_);
        idle_.push_back(std::move(cluster));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Cluster>> idle_;
};

Pool& pool() {
    static Pool all;
    return all;
}

/// A cluster of the pool, for as long as this object lives.
class Loan {
public:
    Loan() : cluster_(pool().take()) {}
    ~Loan() { pool().give_back(std::move(cluster_)); }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;
    Cluster& cluster() { return *cluster_; }

private:
    std::unique_ptr<Cluster> cluster_;
};

}  // namespace

void run_grid(const LaunchConfig& config, const std::function<void()>& body) {
    const Execution exec = config.exec ? *config.exec : Execution{};
    LaunchInfo info;
    info.kernel = config.name;
    info.grid = config.grid;
    info.block = config.block;
    info.cluster = config.cluster;
    info.smem = config.smem;
    info.schedule = exec.schedule;
    info.counting = exec.ledger != nullptr;
    info.early = config.early;
    info.trace = exec.trace;
    Running running;
    info.running = &running;

    const dim3 clusters{config.grid.x / config.cluster.x, config.grid.y / config.cluster.y, config.grid.z / config.cluster.z};
    const std::size_t total = std::size_t{clusters.x} * clusters.y * clusters.z,
                      blocks = config.cluster.x * config.cluster.y * config.cluster.z;
    std::atomic<bool>& failed = running.failed;
    std::exception_ptr error;
    std::mutex mutex;  // guards error, done and the progress callback
    std::size_t done = 0;

    auto run_clusters = [&](Cluster& mine) {
        try {
            for (std::size_t i; !failed && (i = running.begin()) < total; running.end(i)) {
                const uint3 first{static_cast<unsigned>(i % clusters.x) * config.cluster.x,
                                  static_cast<unsigned>(i / clusters.x % clusters.y) * config.cluster.y,
                                  static_cast<unsigned>(i / clusters.x / clusters.y) * config.cluster.z};
                mine.run(info, i, first, body);
                if (exec.progress) {
                    std::lock_guard lock(mutex);
                    if (failed) break;
                    try {
                        exec.progress(done += blocks, total * blocks);
                    } catch (...) {  // noted before the lock is released: no other worker calls it again
                        error = std::current_exception();
                        failed = true;
                    }
                }
            }
        } catch (...) {
            std::lock_guard lock(mutex);
            if (!failed.exchange(true)) error = std::current_exception();
        }
        const auto counts = mine.take_counts();
        const SharedCounts shared = mine.take_shared_counts();
        if (exec.ledger) exec.ledger->add(counts, shared);
    };
    auto work = [&] {
        try {
            Loan loan;
            run_clusters(loan.cluster());
        } catch (...) {  // no memory for a block or its counts
            std::lock_guard lock(mutex);
            if (!failed.exchange(true)) error = std::current_exception();
        }
    };

    const unsigned cores = std::max(1u, std::thread::hardware_concurrency());
    const std::size_t workers = std::min<std::size_t>(exec.workers ? exec.workers : cores, total);
    {
        std::vector<std::jthread> others;
        for (std::size_t w = 1; w < workers; ++w) others.emplace_back(work);
        work();
    }
    if (error) std::rethrow_exception(error);
}

}  // namespace simt::cpu
