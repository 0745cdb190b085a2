#include "simt/cpu/grid.hpp"

#include "simt/cpu/block.hpp"
#include "simt/ledger.hpp"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace simt::cpu {
namespace {

/// Blocks that no worker uses now. Their stacks and shared memory are kept from launch to launch: mapping them anew would cost
/// more than a small launch.
class Pool {
public:
    std::unique_ptr<Block> take() {
        std::lock_guard lock(mutex_);
        if (idle_.empty()) return std::make_unique<Block>();
        std::unique_ptr<Block> block = std::move(idle_.back());
        idle_.pop_back();
        return block;
    }
    void give_back(std::unique_ptr<Block> block) {
        std::lock_guard lock(mutex_);
        idle_.push_back(std::move(block));
    }

private:
    std::mutex mutex_;
    std::vector<std::unique_ptr<Block>> idle_;
};

Pool& pool() {
    static Pool all;
    return all;
}

/// A block that this OS thread runs, for as long as this object lives.
class Residency {
public:
    Residency() : before_(current_block), block_(pool().take()) { current_block = block_.get(); }
    ~Residency() {
        current_block = before_;
        pool().give_back(std::move(block_));
    }
    Residency(const Residency&) = delete;
    Residency& operator=(const Residency&) = delete;
    Block& block() { return *block_; }

private:
    Block* before_;
    std::unique_ptr<Block> block_;
};

}  // namespace

void run_grid(const LaunchConfig& config, const std::function<void()>& body) {
    const Execution exec = config.exec ? *config.exec : Execution{};
    if (config.cluster.x * config.cluster.y * config.cluster.z != 1)
        throw Error("launch of " + std::string(config.name) + ": thread block clusters are not emulated");
    LaunchInfo info;
    info.kernel = config.name;
    info.grid = config.grid;
    info.block = config.block;
    info.smem = config.smem;
    info.schedule = exec.schedule;
    info.counting = exec.ledger != nullptr;

    const std::size_t total = std::size_t{config.grid.x} * config.grid.y * config.grid.z;
    std::atomic<std::size_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    std::mutex mutex;  // guards error, done and the progress callback
    std::size_t done = 0;

    auto run_blocks = [&](Block& mine) {
        try {
            for (std::size_t i; !failed && (i = next++) < total;) {
                const uint3 index{static_cast<unsigned>(i % config.grid.x), static_cast<unsigned>(i / config.grid.x % config.grid.y),
                                  static_cast<unsigned>(i / config.grid.x / config.grid.y)};
                mine.run(info, index, body);
                if (exec.progress) {
                    std::lock_guard lock(mutex);
                    if (failed) break;
                    try {
                        exec.progress(++done, total);
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
        const SharedCount shared = mine.take_shared_count();
        if (exec.ledger) exec.ledger->add(counts, shared);
    };
    auto work = [&] {
        try {
            Residency residency;
            run_blocks(residency.block());
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
