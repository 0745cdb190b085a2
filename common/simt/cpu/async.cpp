// The part of Block that plays Hopper's asynchronous machinery.
#include "simt/cpu/async.hpp"

#include "simt/convert.hpp"
#include "simt/cpu/cluster.hpp"
#include "simt/cpu/grid.hpp"

#include <cuda_fp8.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

namespace simt::cpu {
namespace {

constexpr std::uint32_t kChunk = 16;  // what a swizzle moves

/// Calls f(offset in the box in bytes, address of the row's first element inside the tensor or null, first and last + 1 of
/// its bytes inside) for each row of a box at the given coordinates.
template <class F>
void for_each_row(const TensorMap& map, const std::array<int, 5>& at, F f) {
    const long long first = std::max(0ll, -static_cast<long long>(at[0]));
    const long long last = std::min(static_cast<long long>(map.box[0]), map.extent[0] - at[0]);
    std::array<int, 5> i{};
    for (std::size_t offset = 0, row = static_cast<std::size_t>(map.box[0] * map.element);; offset += row) {
        bool inside = first < last;
        long long place = (at[0] + first) * map.element;
        for (std::size_t k = 1; k < static_cast<std::size_t>(map.rank); ++k) {
            const long long index = static_cast<long long>(at[k]) + i[k];
            inside = inside && index >= 0 && index < map.extent[k];
            place += index * map.stride[k];
        }
        f(offset, inside ? map.base + place : nullptr, static_cast<std::size_t>(first * map.element),
          static_cast<std::size_t>(last * map.element));
        std::size_t k = 1;
        while (k < static_cast<std::size_t>(map.rank) && ++i[k] == map.box[k]) i[k++] = 0;
        if (k >= static_cast<std::size_t>(map.rank)) return;
    }
}

/// What of a box lies inside the tensor.
Count count_of(const TensorMap& map, const std::array<int, 5>& at) {
    Count count;
    std::uintptr_t last_sector = 0;
    for_each_row(map, at, [&](std::size_t, const char* global, std::size_t first, std::size_t last) {
        if (!global) return;
        count.requested += last - first;
        const auto address = reinterpret_cast<std::uintptr_t>(global);
        const std::uintptr_t begin = address / 32, end = (address + last - first - 1) / 32;
        count.sectors += end - begin + (begin == last_sector ? 0 : 1);
        last_sector = end;
    });
    return count;
}

float element_of(Wgmma::Element type, const std::byte* at) {
    if (type == Wgmma::Element::e4m3) {
        __nv_fp8_e4m3 x;
        std::memcpy(static_cast<void*>(&x), at, sizeof x);
        return static_cast<float>(x);
    }
    const auto as = [&]<class T>(T x) {
        std::memcpy(static_cast<void*>(&x), at, sizeof x);
        return to_float(x);
    };
    return type == Wgmma::Element::f16 ? as(__half{}) : as(__nv_bfloat16{});
}

int bytes_of(Wgmma::Element type) { return type == Wgmma::Element::e4m3 ? 1 : 2; }

/// A matrix descriptor taken apart (PTX ISA, "Matrix Descriptor Format").
struct Operand {
    std::uint32_t start, leading, stride;
    int span;  // of the swizzle, bytes
    explicit Operand(std::uint64_t bits)
        : start(static_cast<std::uint32_t>(bits & 0x3fff) << 4),
          leading(static_cast<std::uint32_t>(bits >> 16 & 0x3fff) << 4),
          stride(static_cast<std::uint32_t>(bits >> 32 & 0x3fff) << 4) {
        constexpr int kSpans[] = {0, 128, 64, 32};
        span = kSpans[bits >> 62];
    }
    /// Of the chunk with row or column mn and byte k of its 32 bytes along k.
    std::uint32_t k_major(std::uint32_t mn, std::uint32_t k) const {
        if (span == 0) return start + mn / 8 * stride + mn % 8 * kChunk + k / kChunk * leading;
        return swizzled(start + mn / 8 * stride + mn % 8 * static_cast<std::uint32_t>(span) + k, span);
    }
    /// Of the chunk with step k along k and the eight 16-bit elements from mn on.
    std::uint32_t mn_major(std::uint32_t mn, std::uint32_t k) const {
        if (span == 0) return start + mn / 8 * stride + k / 8 * leading + k % 8 * kChunk;
        const auto row = static_cast<std::uint32_t>(span);
        return swizzled(start + mn * 2 / row * leading + mn * 2 % row + k / 8 * stride + k % 8 * row, span);
    }
};

}  // namespace

// ---------------------------------------------------------------- mbarrier

void Block::init_mbarrier(MbarrierHandle* at, unsigned arrivals, const char* name, int index) {
    const std::size_t offset = shared_offset("mbarrier.init", at, sizeof *at);
    std::string full_name = name;
    if (index >= 0) full_name += "[" + std::to_string(index) + "]";
    if (arrivals < 1 || arrivals >= 1u << 20)
        throw Error("mbarrier.init: barrier " + full_name + " for " + std::to_string(arrivals) +
                    " arrivals: 1 to 1048575 are accepted, by " + whereabouts());
    if (at->magic == MbarrierHandle::kMagic && at->index < mbarriers_.size())
        throw Error("mbarrier.init: barrier " + full_name + " is initialised again, by " + whereabouts());
    for (std::size_t word = offset; word < offset + sizeof *at; word += kWord) refuse_in_flight("mbarrier.init", word, "writes");
    *at = {MbarrierHandle::kMagic, static_cast<std::uint32_t>(mbarriers_.size())};
    Mbarrier& barrier = mbarriers_.emplace_back();
    barrier.name = std::move(full_name);
    barrier.home = this;
    barrier.initialiser = self_;
    barrier.expected = barrier.pending = arrivals;
}

void Block::announce_mbarriers() {
    for (Mbarrier& barrier : mbarriers_)
        if (barrier.initialiser == self_) barrier.announced = true;
}

Mbarrier& Block::mbarrier(const char* operation, const MbarrierHandle* at) {
    Block* const home = cluster_.owner(at);
    if (!home) throw Error(std::string(operation) + ": the barrier is not in the cluster's shared memory, by " + whereabouts());
    if (at->magic != MbarrierHandle::kMagic || at->index >= home->mbarriers_.size())
        throw Error(std::string(operation) + ": there was no mbarrier_init() of the barrier, or it is overwritten, by " + whereabouts());
    Mbarrier& barrier = home->mbarriers_[at->index];
    if (home != this) {
        if (!barrier.announced)
            throw Error(std::string(operation) + ": barrier " + barrier.name +
                        " of another block was initialised without a fence_mbarrier_init() after it, by " + whereabouts());
        if (!home->live_)
            throw Error(std::string(operation) + ": the block of barrier " + barrier.name + " has ended, by " + whereabouts());
    }
    return barrier;
}

void Block::complete_if_full(Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes) return;
    if (++barrier.unseen > 1 && barrier.waiting.empty())
        throw Error("barrier " + barrier.name + " completes phase " + std::to_string(barrier.phase) +
                    " and nobody has waited for the phase before it: a wait by parity cannot tell the two apart. Are there more arrivals "
                    "than the " +
                    std::to_string(barrier.expected) + " of a phase? By " + whereabouts());
    ++barrier.phase;
    barrier.pending = barrier.expected;
    for (Thread* t : std::exchange(barrier.waiting, {})) t->block->make_ready(*t);
}

void Block::expect_mbarrier(MbarrierHandle* at, long long bytes) {
    constexpr long long kMost = (1 << 20) - 1;
    Mbarrier& barrier = mbarrier("mbarrier.expect_tx", at);
    barrier.bytes += bytes;
    if (barrier.bytes > kMost)
        throw Error("mbarrier.expect_tx: " + std::to_string(barrier.bytes) + " bytes at barrier " + barrier.name + ": at most " +
                    std::to_string(kMost) + " are accepted, by " + whereabouts());
}

void Block::arrive_mbarrier(const char* operation, MbarrierHandle* at, long long bytes) {
    Mbarrier& barrier = mbarrier(operation, at);
    if (!barrier.pending)
        throw Error(std::string(operation) + ": more than the " + std::to_string(barrier.expected) + " arrivals that barrier " +
                    barrier.name + " was initialised for, in phase " + std::to_string(barrier.phase) + ", by " + whereabouts());
    if (bytes) expect_mbarrier(at, bytes);
    --barrier.pending;
    cluster_.release(*self_, barrier.knowledge);
    complete_if_full(barrier);
}

void Block::wait_mbarrier(MbarrierHandle* at, unsigned parity) {
    shared_offset("mbarrier.try_wait", at, sizeof *at);
    Mbarrier& barrier = mbarrier("mbarrier.try_wait", at);
    while (barrier.phase % 2 == parity) {
        barrier.waiting.push_back(self_);
        self_->waits_parity = parity;
        suspend("barrier", &barrier);
    }
    barrier.unseen = 0;
    cluster_.acquire(*self_, barrier.knowledge);
}

void* Block::peer_address(const char* operation, const void* mine, unsigned rank) {
    const std::size_t offset = shared_offset(operation, mine, 1);
    if (rank >= cluster_.size())
        throw Error(std::string(operation) + ": block " + std::to_string(rank) + " of a cluster of " + std::to_string(cluster_.size()) +
                    ", by " + whereabouts());
    return cluster_.block(rank).shared_memory() + offset;
}

// ---------------------------------------------------------------- proxies

void Block::fence_proxy_async() {
    cluster_.track();
    Knowledge& knows = self_->async().knows;
    knows.seen[self_->in_cluster] = cluster_.tick();
    Knowledge::learn(knows.fenced, knows.seen);
}

void Block::check_async_read(const char* operation, std::size_t offset, std::size_t bytes) {
    cluster_.track();
    for (std::size_t word = offset; word < offset + bytes; word += kWord) {
        refuse_in_flight(operation, word, "reads");
        const Shadow& cell = *shadow(word);
        if (cell.write_time <= begin_) continue;  // by nobody in this block, or by TMA
        if (self_->async().knows.fenced[threads_[cell.writer].in_cluster] >= cell.write_time) continue;
        if (cell.write_time > synced_ && cell.writer != self_->linear &&
            !ordered_by_knowledge(cell.write_time, cell.writer, cell.write_warp_epoch))
            race("reads", "wrote", cell.writer, "memory", static_cast<int>(word), -1);
        throw Error(std::string(operation) + " in " + launch_->kernel + ": " + whereabouts() + " reads shared memory(" +
                    std::to_string(word) + "), which thread " + std::to_string(cell.writer) +
                    " wrote with ordinary stores, and no fence_proxy_async() lies between");
    }
}

// ---------------------------------------------------------------- TMA

void Block::charge_box(const TensorMap& map, const std::array<int, 5>& at, bool write) {
    if (!launch_->counting) return;
    refuse_early_access(map.tensor);
    coalescer_.add(map.tensor, write, count_of(map, at));
    if (!launch_->trace) return;
    traced_before_ = traced_.size();  // a box is noted by itself
    for_each_row(map, at, [&](std::size_t, const char* global, std::size_t, std::size_t) {
        if (global) trace(map.tensor, write, global);
    });
    traced_before_ = traced_.size();
}

std::size_t Block::bulk_offset(const char* operation, const TensorMap& map, const void* shared) const {
    const std::size_t bytes = map.box_bytes(), offset = shared_offset(operation, shared, 1);
    const std::size_t align = map.span ? static_cast<std::size_t>(map.span) * 8 : map.rank > 1 ? 128 : 16;
    if (offset % align || offset + bytes > shared_bytes())
        throw Error(std::string(operation) + ": a box of " + std::to_string(bytes) + " bytes at shared memory(" + std::to_string(offset) +
                    "): multiples of " + std::to_string(align) + " within " + std::to_string(shared_bytes()) + " bytes are accepted, by " +
                    whereabouts());
    if (map.rank == 1 && (bytes % kChunk || reinterpret_cast<std::uintptr_t>(map.base) % kChunk))
        throw Error(std::string(operation) + ": " + std::to_string(bytes) + " bytes of " + tensor_name(map.tensor) +
                    ", at address modulo " + std::to_string(kChunk) + " = " +
                    std::to_string(reinterpret_cast<std::uintptr_t>(map.base) % kChunk) + ": multiples of 16 bytes are accepted, by " +
                    whereabouts());
    return offset;
}

void Block::start_bulk_load(const TensorMap& map, const std::array<int, 5>& at, void* to, MbarrierHandle* barrier, unsigned mask) {
    const std::size_t offset = bulk_offset("TMA load", map, to);
    if (!mask || mask >> cluster_.size())
        throw Error("TMA load: multicast to blocks " + std::to_string(mask) + " (mask) of a cluster of " + std::to_string(cluster_.size()) +
                    ", by " + whereabouts());
    charge_box(map, at, false);
    for (unsigned r = 0; r < cluster_.size(); ++r) {
        if (!(mask >> r & 1u)) continue;
        Block& target = cluster_.block(r);
        auto* const handle = static_cast<MbarrierHandle*>(peer_address("TMA load", barrier, r));
        begin_landing("TMA load", {map, at, static_cast<std::uint32_t>(offset), &target, &mbarrier("TMA load", handle), self_->linear, {}});
    }
}

void Block::start_peer_copy(void* to, const void* from, int bytes, MbarrierHandle* barrier, unsigned rank) {
    constexpr const char* kName = "cp.async.bulk";
    if (bytes <= 0 || bytes % static_cast<int>(kChunk))
        throw Error(std::string(kName) + ": " + std::to_string(bytes) + " bytes: multiples of 16 are accepted, by " + whereabouts());
    if (rank == rank_)
        throw Error(std::string(kName) + ": block " + std::to_string(rank) +
                    " of the cluster copies to itself: another block is accepted, by " + whereabouts());
    TensorMap piece;
    piece.rank = piece.element = 1;
    piece.box[0] = bytes;
    const std::size_t offset = bulk_offset(kName, piece, from), count = piece.box_bytes();
    BulkCopy copy{piece, {}, static_cast<std::uint32_t>(bulk_offset(kName, piece, to)), nullptr, nullptr, self_->linear, {}};
    copy.barrier = &mbarrier(kName, static_cast<MbarrierHandle*>(peer_address(kName, barrier, rank)));
    copy.block = &cluster_.block(rank);
    copy.source = this;
    copy.from = static_cast<std::uint32_t>(offset);
    check_async_read(kName, offset, count);
    for (std::size_t word = offset; word < offset + count; word += kWord) ++shadow(word)->async_readers;
    begin_landing(kName, std::move(copy));
}

void Block::begin_landing(const char* operation, BulkCopy copy) {
    Block& target = *copy.block;
    if (!copy.barrier->announced)
        throw Error(std::string(operation) + ": barrier " + copy.barrier->name +
                    " was initialised without a fence_mbarrier_init() after it, by " + whereabouts());
    const std::size_t bytes = copy.map.box_bytes();
    for (std::size_t word = copy.shared; word < copy.shared + bytes; word += kWord) {
        Shadow& cell = *target.shadow(word);
        target.refuse_in_flight(operation, word, "overwrites");
        target.refuse_async_readers(operation, word);
        if (&target == this) check_shared_write(cell, "memory", static_cast<int>(word), -1);
        cell.in_flight = copy.source ? Shadow::InFlight::peer : Shadow::InFlight::tma;
        cell.writer = static_cast<std::uint16_t>(self_->linear);
        cell.write_time = cell.read_time = 0;
    }
    std::memset(target.shared_memory() + copy.shared, 0xff, bytes);
    cluster_.start_load(std::move(copy));
}

void Block::land(BulkCopy& load) {
    const std::size_t bytes = load.map.box_bytes();
    if (load.source) {
        load.source->hand_over(load, shared_memory() + load.shared);
    } else {
        const auto row_bytes = static_cast<std::size_t>(load.map.box[0] * load.map.element);
        std::vector<char> row(row_bytes);
        for_each_row(load.map, load.at, [&](std::size_t offset, const char* global, std::size_t first, std::size_t last) {
            std::fill(row.begin(), row.end(), 0);
            if (global) std::memcpy(row.data() + first, global, last - first);
            for (std::size_t c = 0; c < row_bytes; c += kChunk)
                std::memcpy(shared_memory() + swizzled(load.shared + static_cast<std::uint32_t>(offset + c), load.map.span), row.data() + c,
                            kChunk);
        });
    }
    for (std::size_t word = load.shared; word < load.shared + bytes; word += kWord) shadow(word)->in_flight = Shadow::InFlight::nothing;
    load.barrier->bytes -= static_cast<long long>(bytes);
    complete_if_full(*load.barrier);
}

void Block::hand_over(const BulkCopy& copy, std::byte* to) {
    const std::size_t bytes = copy.map.box_bytes();
    if (!live_)
        throw Error("cp.async.bulk in " + std::string(launch_->kernel) + ": block " + std::to_string(rank_) +
                    " of the cluster has ended before the copy to another block that its thread " + std::to_string(copy.issuer) +
                    " started had read its shared memory: is a cluster_sync() missing?");
    std::memcpy(to, shared_memory() + copy.from, bytes);
    for (std::size_t word = copy.from; word < copy.from + bytes; word += kWord) --shadow(word)->async_readers;
}

void Block::start_bulk_store(const TensorMap& map, const std::array<int, 5>& at, const void* from, bool adds) {
    const std::size_t bytes = map.box_bytes(), offset = bulk_offset("TMA store", map, from);
    if (!map.writable) throw Error("TMA store: the tensor map is of a tensor that is only read, by " + whereabouts());
    check_async_read("TMA store", offset, bytes);
    for (std::size_t word = offset; word < offset + bytes; word += kWord) ++shadow(word)->async_readers;
    self_->async().open_stores.push_back({map, at, static_cast<std::uint32_t>(offset), this, nullptr, self_->linear, {}, adds});
}

void Block::commit_bulk() { self_->async().store_groups.push_back(std::exchange(self_->async().open_stores, {})); }

/// @return false where it had been read before
bool Block::read_store(BulkCopy& store) {
    if (!store.snapshot.empty()) return false;
    store.snapshot.resize(store.map.box_bytes());
    for (std::size_t c = 0; c < store.snapshot.size(); c += kChunk)
        std::memcpy(store.snapshot.data() + c, shared_memory() + swizzled(store.shared + static_cast<std::uint32_t>(c), store.map.span),
                    kChunk);
    for (std::size_t word = store.shared; word < store.shared + store.snapshot.size(); word += kWord) --shadow(word)->async_readers;
    return true;
}

namespace {
void write_store(const BulkCopy& store) {
    for_each_row(store.map, store.at, [&](std::size_t offset, char* global, std::size_t first, std::size_t last) {
        const std::byte* const from = store.snapshot.data() + offset + first;
        if (global && !store.adds) std::memcpy(global, from, last - first);
        if (!global || !store.adds) return;
        for (std::size_t byte = 0; byte < last - first; byte += sizeof(float)) {
            float x;
            std::memcpy(&x, from + byte, sizeof x);
            std::atomic_ref<float>(*reinterpret_cast<float*>(global + byte)).fetch_add(x);
        }
    });
}
}  // namespace

void Block::wait_for_bulk(std::size_t pending, bool written) {
    auto& groups = self_->async().store_groups;
    if (groups.size() <= pending) return;
    cluster_.linger(*self_, "cp.async.bulk.wait_group", nullptr);
    const auto end = groups.end() - static_cast<std::ptrdiff_t>(pending);
    // What has only been read reaches global memory late: at the next wait or when the thread returns.
    const auto finished = std::remove_if(groups.begin(), end, [&](std::vector<BulkCopy>& group) {
        bool fresh = false;
        for (BulkCopy& store : group) fresh |= read_store(store);
        if (fresh && !written) return false;
        for (const BulkCopy& store : group) {
            write_store(store);
            charge_box(store.map, store.at, true);
            if (store.adds) charge_box(store.map, store.at, false);
        }
        return true;
    });
    groups.erase(finished, end);
}

void Block::check_end_of_thread() {
    if (!self_->async_state) return;
    if (!self_->async().wgmma.in_flight.empty())
        throw Error("wgmma in " + std::string(launch_->kernel) + ": " + whereabouts() +
                    " returns while a wgmma is under way: is a wgmma_wait() missing?");
    bool left = !self_->async().open_stores.empty();
    for (const auto& group : self_->async().store_groups)
        for (const BulkCopy& store : group) left |= store.snapshot.empty();
    if (left)
        throw Error("TMA store in " + std::string(launch_->kernel) + ": " + whereabouts() +
                    " returns while a store has yet to read shared memory: is a commit or a cp_async_bulk_wait_read() missing?");
    wait_for_bulk(0, true);
}

// ---------------------------------------------------------------- other blocks of the grid

void Block::wait_for_value(const std::uint32_t* at, std::uint32_t value, const std::string& tensor) {
    const std::atomic_ref<std::uint32_t> number(*const_cast<std::uint32_t*>(at));
    const auto there = [&] { return number.load(std::memory_order_acquire) == value; };
    while (!there()) {
        cluster_.linger(*self_, "ld.acquire", nullptr);
        if (launch_->running->failed) throw Error("the launch has failed in another block");
        const bool alone = launch_->running->is_first(cluster_.number());  // asked before the number is looked at again
        if (there()) return;
        if (alone)
            throw Deadlock("deadlock in " + std::string(launch_->kernel) + ": " + whereabouts() + " waits for " + tensor + " to become " +
                           std::to_string(value) + ", it is " + std::to_string(number.load()) +
                           ", and all blocks that began before have ended; later ones need not have begun");
        std::this_thread::yield();
    }
}

// ---------------------------------------------------------------- warpgroups

void Block::named_barrier(const char* operation, unsigned id, unsigned threads, bool waits) {
    const std::string where = std::string(operation) + " " + std::to_string(id) + ": ";
    if (id < 1 || id > 15) throw Error(where + "barriers 1 to 15 are accepted, 0 is that of __syncthreads(), by " + whereabouts());
    if (threads == 0 || threads % kLanes || threads > threads_.size())
        throw Error(where + std::to_string(threads) + " threads: multiples of 32 up to the " + std::to_string(threads_.size()) +
                    " of the block are accepted, by " + whereabouts());
    NamedBarrier& barrier = named_[id];
    if (!barrier.arrived)
        barrier.expected = threads;
    else if (barrier.expected != threads)
        throw Error(where + whereabouts() + " names " + std::to_string(threads) + " threads, others named " +
                    std::to_string(barrier.expected));
    if (barrier.who[self_->linear]) throw Error(where + whereabouts() + " arrives again before the barrier is complete");
    barrier.who[self_->linear] = true;
    cluster_.release(*self_, barrier.knowledge);
    if (++barrier.arrived < barrier.expected) {
        if (!waits) return;
        barrier.waiting.push_back(self_);
        suspend(operation, &barrier);
        cluster_.acquire(*self_, barrier.knowledge);
        return;
    }
    barrier.arrived = 0;
    barrier.who.reset();
    for (Thread* t : std::exchange(barrier.waiting, {})) make_ready(*t);
    if (waits) cluster_.acquire(*self_, barrier.knowledge);
}

Warpgroup& Block::arrive_warpgroup(const char* operation, void* deposit) {
    const unsigned group = self_->linear / kWarpgroup;
    if ((group + 1) * kWarpgroup > threads_.size())
        throw Error(std::string(operation) + ": a warpgroup is 128 threads, the last one of a block of " + std::to_string(threads_.size()) +
                    " has fewer, by " + whereabouts());
    Warpgroup& place = warpgroups_[group];
    if (!place.arrived)
        place.operation = operation;
    else if (std::strcmp(place.operation, operation) != 0)
        throw Error("warpgroup divergence: " + whereabouts() + " is at " + operation + " while other lanes of its warpgroup wait at " +
                    place.operation + "; all 128 must reach the same operation");
    place.deposits[self_->linear % kWarpgroup] = deposit;
    ++place.arrived;
    return place;
}

void Block::leave_warpgroup(Warpgroup& place) {
    place.arrived = 0;
    const unsigned base = self_->linear / kWarpgroup * kWarpgroup;
    for (unsigned i = 0; i < kWarpgroup; ++i)
        if (base + i != self_->linear) make_ready(threads_[base + i]);
}

unsigned Block::registers_in_use() const {
    unsigned sum = 0;
    for (std::size_t g = 0; g < threads_.size() / kWarpgroup; ++g) sum += kWarpgroup * warpgroups_[g].registers;
    return sum;
}

void Block::set_registers(bool more, unsigned registers) {
    const char* const operation = more ? "setmaxnreg.inc" : "setmaxnreg.dec";
    Warpgroup& mine = warpgroups_[self_->linear / kWarpgroup];
    const auto n = static_cast<unsigned>(threads_.size());
    const unsigned pool = std::min(256u, 65536 / n / 8 * 8) * n;
    meet_warpgroup(operation, registers, [&](const auto& lanes) {
        for (const unsigned* other : lanes)
            if (*other != registers)
                throw Error("warpgroup divergence: lanes ask for " + std::to_string(*other) + " and for " + std::to_string(registers) +
                            " registers at " + operation + ", in the warpgroup of " + whereabouts());
        if (more ? registers < mine.registers : registers > mine.registers)
            throw Error(std::string(operation) + " to " + std::to_string(registers) + " registers: the warpgroup has " +
                        std::to_string(mine.registers) + " a thread, by " + whereabouts());
        (more ? mine.wanted : mine.registers) = registers;
        for (Warpgroup& group : warpgroups_) {  // what one gives back others may have
            if (!group.wanted || registers_in_use() + kWarpgroup * group.wanted > pool + kWarpgroup * group.registers) continue;
            group.registers = std::exchange(group.wanted, 0u);
            for (Thread* t : std::exchange(group.waiting, {})) make_ready(*t);
        }
    });
    while (mine.wanted) {
        mine.waiting.push_back(self_);
        suspend("setmaxnreg.inc (too few registers are free)", &mine.wanted);
    }
}

// ---------------------------------------------------------------- wgmma

template <class F>
void Block::for_each_operand_chunk(const Wgmma& op, F f) const {
    const auto chunk = [&](std::uint32_t offset, bool of_a, std::uint32_t mn, std::uint32_t k) {
        if (offset + kChunk > launch_->smem)
            throw Error("wgmma: a descriptor of " + std::string(of_a ? "A" : "B") + " leads to shared memory(" + std::to_string(offset) +
                        "), the block has " + std::to_string(launch_->smem) + " bytes, by " + whereabouts());
        f(offset, of_a, mn, k);
    };
    const std::uint32_t element = static_cast<std::uint32_t>(bytes_of(op.element));
    const auto operand = [&](std::uint64_t descriptor, bool mn_major, bool of_a, std::uint32_t extent) {
        const Operand o(descriptor);
        if (mn_major)
            for (std::uint32_t k = 0; k < 16; ++k)
                for (std::uint32_t mn = 0; mn < extent; mn += 8) chunk(o.mn_major(mn, k), of_a, mn, k);
        else
            for (std::uint32_t mn = 0; mn < extent; ++mn)
                for (std::uint32_t k = 0; k < 32; k += kChunk) chunk(o.k_major(mn, k), of_a, mn, k / element);
    };
    if (!op.a_in_registers) operand(op.a_descriptor, op.a_mn_major, true, 64);
    operand(op.b_descriptor, op.b_mn_major, false, static_cast<std::uint32_t>(op.n));
}

void Block::issue_wgmma(const Wgmma& op) {
    WgmmaQueue& queue = self_->async().wgmma;
    const auto values = static_cast<std::size_t>(op.n / 2);
    const bool known = std::any_of(queue.in_flight.begin(), queue.in_flight.end(), [&](const Accumulators& a) { return a.d == op.d; });
    if (!queue.fenced && !(known && !op.a_in_registers))
        throw Error("wgmma in " + std::string(launch_->kernel) + ": " + whereabouts() +
                    " issues one without a wgmma_fence() since its registers could be touched");
    if (!known) {
        queue.in_flight.push_back({op.d, std::vector<float>(op.d, op.d + values)});
        std::memset(op.d, 0xff, values * sizeof(float));
    }
    // Operands are the same for all lanes: one of each warp looks whether it may read them.
    if (self_->lane == 0) {
        const bool first = self_->linear % kWarpgroup == 0;
        for_each_operand_chunk(op, [&](std::uint32_t offset, bool, std::uint32_t, std::uint32_t) {
            check_async_read("wgmma", offset, kChunk);
            if (first)
                for (std::uint32_t word = offset; word < offset + kChunk; word += kWord) ++shadow(word)->async_readers;
        });
    }
    queue.open.push_back(op);
}

void Block::commit_wgmma() { self_->async().wgmma.groups.push_back(std::exchange(self_->async().wgmma.open, {})); }

void Block::wait_for_wgmma(std::size_t pending) {
    struct Deposit {
        WgmmaQueue* queue;
        std::size_t pending;
    } mine{&self_->async().wgmma, pending};
    meet_warpgroup("wgmma.wait_group", mine, [&](const auto& lanes) {
        std::array<WgmmaQueue*, kWarpgroup> queues;
        for (unsigned i = 0; i < kWarpgroup; ++i) {
            queues[i] = lanes[i]->queue;
            bool agrees = lanes[i]->pending == pending && queues[i]->groups.size() == queues[0]->groups.size();
            for (std::size_t g = 0; agrees && g < queues[0]->groups.size(); ++g) {
                const auto& a = queues[0]->groups[g];
                const auto& b = queues[i]->groups[g];
                agrees = std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Wgmma& x, const Wgmma& y) { return x.agrees(y); });
            }
            if (!agrees)
                throw Error("warpgroup divergence: lanes 0 and " + std::to_string(i) + " of the warpgroup of " + whereabouts() +
                            " have issued different wgmmas, or wait for different ones");
        }
        // Operands are read as late as may be.
        if (queues[0]->groups.size() > pending) cluster_.linger(*self_, "wgmma.wait_group", nullptr);
        while (queues[0]->groups.size() > pending) run_wgmmas(queues);
        for (WgmmaQueue* queue : queues) {
            queue->fenced = false;
            const auto busy = [&](const Accumulators& a) {
                const auto writes = [&](const Wgmma& op) { return op.d == a.d; };
                for (const auto& group : queue->groups)
                    if (std::any_of(group.begin(), group.end(), writes)) return true;
                return std::any_of(queue->open.begin(), queue->open.end(), writes);
            };
            std::erase_if(queue->in_flight, [&](const Accumulators& a) {
                if (busy(a)) return false;
                for (std::size_t r = 0; r < a.values.size(); ++r)
                    if (std::bit_cast<std::uint32_t>(a.d[r]) != 0xffffffffu)
                        throw Error("wgmma in " + std::string(launch_->kernel) +
                                    ": an accumulator was written while the wgmma was under way, in the warpgroup of " + whereabouts());
                std::copy(a.values.begin(), a.values.end(), a.d);
                return true;
            });
        }
    });
}

/// Does the oldest group of the warpgroup's lanes.
void Block::run_wgmmas(const std::array<WgmmaQueue*, kWarpgroup>& lanes) {
    // Fragments as in PTX ISA, "Register Fragments" of wgmma: D(row, col), and A with 4 bytes of a row in a register.
    static constexpr int kMaxN = 256, kMaxK = 32;
    struct Matrices {
        float A[64][kMaxK], B[kMaxK][kMaxN], D[64][kMaxN];
    };
    thread_local const std::unique_ptr<Matrices> m = std::make_unique<Matrices>();
    const std::size_t count = lanes[0]->groups.front().size();
    const auto each_accumulator = [&](std::size_t i, auto f) {
        for (unsigned t = 0; t < kWarpgroup; ++t) {
            const Wgmma& op = lanes[t]->groups.front()[i];
            auto& all = lanes[t]->in_flight;
            float* const values = std::find_if(all.begin(), all.end(), [&](const Accumulators& a) { return a.d == op.d; })->values.data();
            for (int r = 0; r < op.n / 2; ++r)
                f(values[r], m->D[t / 32 * 16 + t % 32 / 4 + 8 * (r / 2 % 2)][8 * (r / 4) + t % 4 * 2 + r % 2]);
        }
    };
    for (std::size_t i = 0; i < count; ++i) {
        const Wgmma op = lanes[0]->groups.front()[i];
        const int element = bytes_of(op.element), K = 32 / element, per_chunk = static_cast<int>(kChunk) / element;
        for_each_operand_chunk(op, [&](std::uint32_t offset, bool of_a, std::uint32_t mn, std::uint32_t k) {
            const bool mn_major = of_a ? op.a_mn_major : op.b_mn_major;
            for (int e = 0; e < per_chunk; ++e) {
                const float x = element_of(op.element, shared_memory() + offset + e * element);
                const auto row = mn + (mn_major ? e : 0), step = k + (mn_major ? 0 : e);
                (of_a ? m->A[row][step] : m->B[step][row]) = x;
            }
            for (std::uint32_t word = offset; word < offset + kChunk; word += kWord) --shadow(word)->async_readers;
        });
        if (op.a_in_registers)
            for (unsigned t = 0; t < kWarpgroup; ++t)
                for (unsigned r = 0; r < 4; ++r) {
                    const std::uint32_t pair = lanes[t]->groups.front()[i].a[r];
                    for (int e = 0; e < 4 / element; ++e)
                        m->A[t / 32 * 16 + t % 32 / 4 + 8 * (r % 2)]
                            [(K / 2) * static_cast<int>(r / 2) + static_cast<int>(t % 4) * (4 / element) + e] =
                            element_of(op.element, reinterpret_cast<const std::byte*>(&pair) + e * element);
                }
        const auto same_d = [&](std::size_t a, std::size_t b) { return lanes[0]->groups.front()[a].d == lanes[0]->groups.front()[b].d; };
        if (i == 0 || !same_d(i - 1, i)) each_accumulator(i, [](float& value, float& d) { d = value; });
        for (int row = 0; row < 64; ++row) {
            float* const d = m->D[row];
            if (!op.accumulate) std::fill(d, d + op.n, 0.0f);
            for (int k = 0; k < K; ++k) {
                const float a = m->A[row][k];
                const float* const b = m->B[k];
                for (int n = 0; n < op.n; ++n) d[n] += a * b[n];
            }
        }
        if (i + 1 == count || !same_d(i, i + 1)) each_accumulator(i, [](float& value, float& d) { value = d; });
    }
    for (WgmmaQueue* lane : lanes) lane->groups.erase(lane->groups.begin());
}

}  // namespace simt::cpu
