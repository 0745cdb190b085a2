#include "simt/cpu/block.hpp"

#include "simt/cpu/cluster.hpp"
#include "simt/cpu/intrinsics.hpp"
#include "simt/cpu/shared.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <sstream>
#include <utility>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace simt::cpu {
namespace {

/// Thrown at the suspension point of the threads of a cluster that failed, to unwind their stacks.
struct Abandoned {};

/// "0-31,64"
std::string ranges(const std::vector<unsigned>& sorted) {
    std::ostringstream out;
    for (std::size_t i = 0; i < sorted.size();) {
        std::size_t j = i;
        while (j + 1 < sorted.size() && sorted[j + 1] == sorted[j] + 1) ++j;
        out << (i ? "," : "") << sorted[i];
        if (j > i) out << "-" << sorted[j];
        i = j + 1;
    }
    return out.str();
}

std::string text(uint3 i) {
    std::ostringstream out;
    out << "(" << i.x << "," << i.y << "," << i.z << ")";
    return out.str();
}

constexpr std::size_t kSharedAlignment = 1024;

/// Values of all lanes go through a butterfly with steps of width / 2, width / 4, ... 1, in the order of the shuffles.
template <class Combine>
float butterfly(const char* operation, float value, int width, Combine combine) {
    struct Deposit {
        float value;
        int width;
    } mine{value, width};
    block().meet(operation, 0xffffffffu, mine, [&](const auto& lanes, unsigned present) {
        float x[kLanes] = {}, before[kLanes];
        for (unsigned lane = 0; lane < kLanes; ++lane) {
            if (!(present >> lane & 1u)) continue;
            if (lanes[lane]->width != width)
                throw Error(std::string(operation) + ": lanes of one warp come with widths " + std::to_string(width) + " and " +
                            std::to_string(lanes[lane]->width) + ", in the warp of " + block().whereabouts());
            if (const unsigned last = lane | static_cast<unsigned>(width - 1); !(present >> last & 1u))
                throw Error(std::string(operation) + ": lane " + std::to_string(lane) + " reads lane " + std::to_string(last) +
                            ", which is not in the mask, in the warp of " + block().whereabouts());
            x[lane] = lanes[lane]->value;
        }
        for (unsigned step = static_cast<unsigned>(width) / 2; step > 0; step /= 2) {
            std::memcpy(before, x, sizeof before);
            for (unsigned lane = 0; lane < kLanes; ++lane) x[lane] = combine(before[lane], before[lane ^ step]);
        }
        for (unsigned lane = 0; lane < kLanes; ++lane)
            if (present >> lane & 1u) lanes[lane]->value = x[lane];
    });
    return mine.value;
}

}  // namespace

void refuse_outside_of_kernel() { throw Error("a device function was called outside of a kernel"); }

[[gnu::noinline]] void charge_here(int tensor, bool write, const void* address, std::size_t bytes) {
    current_block->charge(tensor, write, address, bytes, __builtin_return_address(0));
}

void shared_out_of_bounds(const char* name, int r, int c, int rows, int cols) {
    std::ostringstream out;
    const bool vector = cols < 0;
    out << "out of bounds: shared " << name << "(" << r;
    if (!vector) out << ", " << c;
    out << ") of extent (" << rows;
    if (!vector) out << ", " << cols;
    out << ") by " << block().whereabouts();
    throw Error(out.str());
}

void Block::FreeDeleter::operator()(std::byte* p) const { std::free(p); }

Block::Block(Cluster& cluster, unsigned rank) : cluster_(cluster), rank_(rank) {
    // Waiting lanes are reported by the address of their meeting, so meetings must not move: 32 masks can be apart at most.
    for (Warp& warp : warps_) warp.meetings.reserve(kLanes);
}

void Block::prepare(const LaunchInfo& launch, uint3 index) {
    const dim3 shape = launch.block;
    const unsigned n = shape.x * shape.y * shape.z;
    forget_copies();
    launch_ = &launch;
    index_ = index;
    awaits_kernel_before_ = launch.early;
    threads_.clear();  // before their stacks may move
    stacks_.reserve(n);
    if (launch_->smem > shared_capacity_) {
        shared_capacity_ = (launch_->smem + kSharedAlignment - 1) / kSharedAlignment * kSharedAlignment;
        shared_.reset(static_cast<std::byte*>(std::aligned_alloc(kSharedAlignment, shared_capacity_)));
        if (!shared_) throw std::bad_alloc();
        shadow_.resize(shared_capacity_ / kWord);
    }
#if defined(__SANITIZE_ADDRESS__)
    if (shared_capacity_) {
        ASAN_UNPOISON_MEMORY_REGION(shared_.get(), launch_->smem);
        ASAN_POISON_MEMORY_REGION(shared_.get() + launch_->smem, shared_capacity_ - launch_->smem);
    }
#endif
    if (launch_->smem) std::memset(shared_.get(), 0xff, launch_->smem);  // every float, half and bfloat16 starts as NaN

    for (Warp& warp : warps_) {
        warp.head = warp.count = warp.lanes = warp.epoch = 0;
        warp.meetings.resize(1);
        warp.meetings[0].arrived = 0;
    }
    ready_warps_ = 0;
    turn_ = 0;
    at_barrier_.clear();
    begin_ = synced_ = cluster_.tick();
    named_.fill({});
    mbarriers_.clear();
    const unsigned granted = std::min(256u, 65536 / n / 8 * 8);  // as __launch_bounds__(n, 1) lets the compiler take
    for (Warpgroup& group : warpgroups_) {
        group.arrived = group.wanted = 0;
        group.registers = granted;
        group.waiting.clear();
    }
    coalescer_.begin_block((n + kLanes - 1) / kLanes);
    traced_.clear();
    traced_before_ = 0;

    threads_.resize(n);
    live_ = n;
    for (unsigned i = 0; i < n; ++i) {
        Thread& t = threads_[i];
        t.linear = i;
        t.lane = i % kLanes;
        t.warp = i / kLanes;
        t.in_cluster = rank_ * n + i;
        t.block = this;
        t.index = {i % shape.x, i / shape.x % shape.y, i / shape.x / shape.y};
        warps_[t.warp].lanes |= 1u << t.lane;
        t.fiber = boost::context::fiber(std::allocator_arg, stacks_.allocator(i), [this](boost::context::fiber&& back) {
            keep(std::move(back), {});
            try {
                if (!cluster_.abandoned_) {
                    (*cluster_.body_)();
                    check_end_of_thread();
                }
            } catch (const Abandoned&) {
            } catch (...) {
                if (!cluster_.error_) cluster_.error_ = std::current_exception();
            }
            SwitchNote{}.leave(cluster_.scheduler_stack_, cluster_.scheduler_stack_bytes_, true);
            return std::move(cluster_.scheduler_);
        });
        make_ready(t);
    }
}

void Block::run_one() {
    enter(next_ready());
    if (self_->fiber) return;
    self_->returned = true;
    --live_;
}

void Block::make_ready(Thread& thread) {
    thread.waits_at = nullptr;
    Warp& warp = warps_[thread.warp];
    warp.ready[(warp.head + warp.count++) % kLanes] = &thread;
    ready_warps_ |= 1u << thread.warp;
}

Thread& Block::next_ready() {
    unsigned w = 0;
    switch (launch_->schedule) {
        case Schedule::lowest_first: w = static_cast<unsigned>(std::countr_zero(ready_warps_)); break;
        case Schedule::highest_first: w = 31u - static_cast<unsigned>(std::countl_zero(ready_warps_)); break;
        case Schedule::round_robin:
            w = (turn_ + static_cast<unsigned>(std::countr_zero(std::rotr(ready_warps_, static_cast<int>(turn_))))) % kMaxWarps;
            break;
    }
    Warp& warp = warps_[w];
    Thread& thread = *warp.ready[warp.head];
    warp.head = (warp.head + 1) % kLanes;
    if (--warp.count == 0) {
        ready_warps_ &= ~(1u << w);
        turn_ = (w + 1) % kMaxWarps;
    }
    return thread;
}

void Block::become(Thread& thread) {
    self_ = &thread;
    threadIdx = thread.index;
    thread.run_ahead = 0;
}

void Block::enter(Thread& thread) {
    become(thread);
    left_ = nullptr;
    if (current_block != this) {
        current_block = this;
        blockIdx = index_;
    }
    SwitchNote note;
    note.leave(stacks_.low(thread.linear), StackSlab::kStackBytes);
    boost::context::fiber last = std::move(thread.fiber).resume();
    note.arrive();
    self_->fiber = std::move(last);  // which of the threads that ran meanwhile came back; empty where it has returned
}

void Block::suspend(const char* operation, const void* object) {
    Thread& mine = *self_;
    mine.waits_at = operation;
    mine.waits_for = object;
    SwitchNote note;
    boost::context::fiber before;
    if (ready_warps_ && cluster_.size() == 1) {  // whom the scheduler would let run next, without going there
        Thread& next = next_ready();
        become(next);
        if (&next == &mine) return;
        left_ = &mine;
        note.leave(stacks_.low(next.linear), StackSlab::kStackBytes);
        before = std::move(next.fiber).resume();
    } else {
        note.leave(cluster_.scheduler_stack_, cluster_.scheduler_stack_bytes_);
        before = std::move(cluster_.scheduler_).resume();
    }
    keep(std::move(before), note);
    if (cluster_.abandoned_) throw Abandoned{};
}

void Block::keep(boost::context::fiber&& before, SwitchNote note) {
    if (left_) {
        note.arrive();
        left_->fiber = std::move(before);
    } else {
        note.arrive(&cluster_.scheduler_stack_, &cluster_.scheduler_stack_bytes_);
        cluster_.scheduler_ = std::move(before);
    }
}

void Block::sync_threads(const char* operation) {
    if (at_barrier_.size() + 1 < threads_.size()) {
        at_barrier_.push_back(self_);
        suspend(operation, &at_barrier_);
        return;
    }
    for (Thread* t : at_barrier_) make_ready(*t);
    at_barrier_.clear();
    synced_ = cluster_.tick();
    if (cluster_.tracking()) {
        Knowledge all;
        for (Thread& t : threads_) cluster_.release(t, all);
        for (Thread& t : threads_) cluster_.acquire(t, all);
    }
    coalescer_.align_all();
    traced_before_ = traced_.size();
}

Rendezvous& Block::arrive(const char* operation, unsigned mask, void* deposit) {
    Warp& warp = warps_[self_->warp];
    const unsigned bit = 1u << self_->lane;
    if (!(mask & bit))
        throw Error(std::string(operation) + ": lane " + std::to_string(self_->lane) + " is not in the mask that it passes, by " +
                    whereabouts());
    mask &= warp.lanes;
    Rendezvous* place = nullptr;
    for (Rendezvous& m : warp.meetings) {
        if (m.arrived && m.mask == mask) {
            place = &m;
            break;
        }
        // Lanes that wait elsewhere for this one would be waited for here: neither can go on. Other overlaps resolve themselves.
        if ((m.arrived & mask) && (m.mask & bit))
            throw Error(std::string(operation) + ": the mask of " + whereabouts() +
                        " overlaps with another one that lanes of its warp wait with at " + m.operation);
        if (!m.arrived && !place) place = &m;
    }
    if (!place) place = &warp.meetings.emplace_back();
    if (!place->arrived) {
        place->operation = operation;
        place->mask = mask;
    } else if (place->operation != operation && std::strcmp(place->operation, operation) != 0) {
        throw Error("warp divergence: " + whereabouts() + " is at " + operation + " while other lanes of its warp wait at " +
                    place->operation + "; all lanes in the mask must reach the same operation");
    }
    place->arrived |= bit;
    place->deposits[self_->lane] = deposit;
    return *place;
}

void Block::leave(Rendezvous& place) {
    place.arrived = 0;
    if (place.mask == warps_[self_->warp].lanes) coalescer_.align(self_->warp);
    const unsigned base = self_->warp * kLanes;
    for (unsigned lane = 0; lane < kLanes; ++lane)
        if ((place.mask >> lane & 1u) && lane != self_->lane) make_ready(threads_[base + lane]);
}

void Block::charge(int tensor, bool write, const void* address, std::size_t bytes, const void* site) {
    refuse_early_access(tensor);
    coalescer_.charge(self_->warp, self_->lane, tensor, write, reinterpret_cast<std::uintptr_t>(address), bytes, site);
    if (launch_->trace) trace(tensor, write, address);
    note_counted_access();
}

void Block::tell_early_access(int tensor) const {
    throw Error(std::string(launch_->kernel) + " is launched early: " + whereabouts() + " accesses " + tensor_name(tensor) +
                " before griddepcontrol_wait(), when the kernel before may not have ended");
}

void Block::trace(int tensor, bool write, const void* address) {
    const std::optional<long long> row = launch_->trace->row(tensor, address);
    if (!row) return;
    const auto since = traced_.begin() + static_cast<std::ptrdiff_t>(traced_before_);
    const auto same = std::find_if(since, traced_.end(), [&](const TracedRows& t) { return t.tensor == tensor && t.write == write; });
    if (same == traced_.end()) {
        traced_.push_back({tensor, write, *row, *row});
    } else {
        same->first = std::min(same->first, *row);
        same->last = std::max(same->last, *row);
    }
}

void Block::hand_over_trace() {
    if (launch_->trace) launch_->trace->add({launch_->kernel, index_, std::exchange(traced_, {})});
}

[[gnu::noinline]] void Block::charge_shared(SharedAccess access, const void* at, std::size_t bytes) {
    if (!launch_->counting || cluster_.owner(at) != this) return;
    const auto offset = static_cast<std::size_t>(static_cast<const std::byte*>(at) - shared_.get());
    coalescer_.charge_shared(self_->warp, self_->lane, access, offset, bytes, __builtin_return_address(0));
    note_counted_access();
}

void Block::note_counted_access() {
    if (++self_->run_ahead < kRunAhead) return;
    make_ready(*self_);
    suspend("giving way", nullptr);
}

inline bool Block::ordered(std::uint32_t time, std::uint16_t who, std::uint16_t warp_epoch) const {
    if (time <= synced_) return true;  // a block-wide barrier lies between, or nobody touched it in this block
    if (who == self_->linear) return true;
    if (cluster_.tracking()) return ordered_by_knowledge(time, who, warp_epoch);
    if (who == Shadow::kManyWarps) return false;
    const unsigned warp = who & Shadow::kLanesOfWarp ? who & ~Shadow::kLanesOfWarp : who / kLanes;
    return warp == self_->warp && warp_epoch != static_cast<std::uint16_t>(warps_[warp].epoch);  // a __syncwarp lies between
}

[[gnu::noinline]] bool Block::ordered_by_knowledge(std::uint32_t time, std::uint16_t who, std::uint16_t warp_epoch) const {
    if (who & Shadow::kLanesOfWarp) return true;  // several readers are not told apart: they get the benefit of the doubt
    const unsigned warp = who / kLanes;
    if (warp == self_->warp && warp_epoch != static_cast<std::uint16_t>(warps_[warp].epoch)) return true;
    return self_->async_state->knows.seen[threads_[who].in_cluster] >= time;
}

void Block::note_shared_read(Shadow& cell, const char* name, int r, int c) {
    // Since the last barrier this thread or lanes of its warp have read it and nobody has written: one more changes nothing.
    const unsigned warp = self_->warp;
    if (cell.read_time == cluster_.now() && cell.write_time <= synced_ &&
        (cell.reader == self_->linear || (cell.reader == (Shadow::kLanesOfWarp | warp) && !cluster_.tracking())) &&
        cell.read_warp_epoch == static_cast<std::uint16_t>(warps_[warp].epoch))
        return;
    note_new_shared_read(cell, name, r, c);
}

[[gnu::noinline]] void Block::note_new_shared_read(Shadow& cell, const char* name, int r, int c) {
    if (!ordered(cell.write_time, cell.writer, cell.write_warp_epoch)) race("reads", "wrote", cell.writer, name, r, c);
    // Who is ordered after this read is ordered after the reads before it that a barrier orders, so those can be forgotten.
    if (!ordered(cell.read_time, cell.reader, cell.read_warp_epoch)) {
        const auto lanes = static_cast<std::uint16_t>(Shadow::kLanesOfWarp | self_->warp);
        const bool same_warp = cell.reader != Shadow::kManyWarps &&
                               (cell.reader == lanes || (!(cell.reader & Shadow::kLanesOfWarp) && cell.reader / kLanes == self_->warp));
        cell.reader = same_warp ? lanes : Shadow::kManyWarps;
    } else {
        cell.reader = static_cast<std::uint16_t>(self_->linear);
    }
    cell.read_time = cluster_.now();
    cell.read_warp_epoch = static_cast<std::uint16_t>(warps_[self_->warp].epoch);
}

void Block::check_shared_write(Shadow& cell, const char* name, int r, int c) {
    if (!ordered(cell.write_time, cell.writer, cell.write_warp_epoch)) race("writes", "wrote", cell.writer, name, r, c);
    if (!ordered(cell.read_time, cell.reader, cell.read_warp_epoch)) race("writes", "read", cell.reader, name, r, c);
    note_write(cell);
}

void Block::note_write(Shadow& cell) {
    cell.write_time = cluster_.now();
    cell.writer = static_cast<std::uint16_t>(self_->linear);
    cell.write_warp_epoch = static_cast<std::uint16_t>(warps_[self_->warp].epoch);
}

std::size_t Block::shared_offset(const char* operation, const void* at, std::size_t bytes) const {
    const auto address = reinterpret_cast<std::uintptr_t>(at), begin = reinterpret_cast<std::uintptr_t>(shared_.get());
    if (address < begin || address + bytes > begin + launch_->smem)
        throw Error(std::string(operation) + ": the address is not in the " + std::to_string(launch_->smem) +
                    " bytes of the block's shared memory, by " + whereabouts());
    if (address % bytes)
        throw Error(std::string(operation) + ": shared memory address " + std::to_string(address - begin) + " is not a multiple of " +
                    std::to_string(bytes) + ", by " + whereabouts());
    return address - begin;
}

void Block::report_in_flight(const char* operation, std::size_t offset, const char* access) const {
    const Shadow& cell = shadow_[offset / kWord];
    const bool tma = cell.in_flight != Shadow::InFlight::cp_async, peer = cell.in_flight == Shadow::InFlight::peer;
    throw Error(std::string(operation) + " in " + launch_->kernel + ": " + block().whereabouts() + " " + access + " shared memory(" +
                std::to_string(offset) + ") while the " +
                (peer  ? "cp.async.bulk"
                 : tma ? "TMA load"
                       : "cp.async") +
                " that thread " + std::to_string(cell.writer) + (peer ? " of another block" : "") +
                " started to it is still under way: is " +
                (tma ? "an mbarrier_wait() missing?" : "a cp_async_wait() missing, or does it leave too many groups pending?"));
}

void Block::report_async_readers(const char* operation, std::size_t offset) const {
    throw Error(std::string(operation) + " in " + launch_->kernel + ": " + block().whereabouts() + " writes shared memory(" +
                std::to_string(offset) +
                ") while a wgmma, a store by TMA or a copy to another block has yet to read it: is a wait missing?");
}

template <class F>
void Block::for_each_cell(const Copy& copy, F f) {
    Shadow* const cells = shadow(static_cast<std::size_t>(static_cast<std::byte*>(copy.to) - shared_.get()));
    for (std::size_t word = 0; word < copy.bytes / kWord; ++word) f(cells[word]);
}

void Block::forget_times() {
    for (Shadow& cell : shadow_) cell.write_time = cell.read_time = 0;
}

void Block::forget_copies() {
    const auto forget = [](Shadow& cell) { cell.in_flight = Shadow::InFlight::nothing; };
    for (const Thread& thread : threads_) {
        for (const Copy& copy : thread.open_copies) for_each_cell(copy, forget);
        for (const std::vector<Copy>& group : thread.copy_groups)
            for (const Copy& copy : group) for_each_cell(copy, forget);
    }
    if (!std::exchange(failed_, false)) return;
    for (Shadow& cell : shadow_) {  // TMA loads and readers that were left behind
        cell.in_flight = Shadow::InFlight::nothing;
        cell.async_readers = 0;
    }
}

void Block::start_copy(void* to, const void* from, std::size_t bytes) {
    write_shared_vector("cp.async", to, bytes);
    if (reinterpret_cast<std::uintptr_t>(from) % bytes)
        throw Error("cp.async: the global address is not a multiple of " + std::to_string(bytes) + ", by " + whereabouts());
    for_each_cell({to, from, bytes}, [](Shadow& cell) { cell.in_flight = Shadow::InFlight::cp_async; });
    std::memset(to, 0xff, bytes);
    self_->open_copies.push_back({to, from, bytes});
}

void Block::commit_copies() { self_->copy_groups.push_back(std::exchange(self_->open_copies, {})); }

void Block::wait_for_copies(std::size_t pending) {
    auto& groups = self_->copy_groups;
    while (groups.size() > pending) {
        for (const Copy& copy : groups.front()) {
            if (copy.from)
                std::memcpy(copy.to, copy.from, copy.bytes);
            else
                std::memset(copy.to, 0, copy.bytes);
            for_each_cell(copy, [&](Shadow& cell) {
                cell.in_flight = Shadow::InFlight::nothing;
                note_write(cell);  // others may read what has landed after the next barrier
            });
        }
        groups.erase(groups.begin());
    }
}

bool Block::in_another_block(const char* operation, const void* at) const {
    const Block* const owner = cluster_.owner(at);
    if (!owner || owner == this) return false;
    if (!owner->live_)
        throw Error(std::string(operation) + ": the address is in the shared memory of a block that has ended, by " + whereabouts());
    return true;
}

void Block::read_shared_vector(const char* operation, const void* at, std::size_t bytes) {
    if (in_another_block(operation, at)) return;
    const std::size_t offset = shared_offset(operation, at, bytes);
    for (std::size_t word = offset; word < offset + bytes; word += kWord) {
        refuse_in_flight(operation, word, "reads");
        check_shared_read(*shadow(word), "memory", static_cast<int>(word), -1);
    }
}

void Block::write_shared_vector(const char* operation, const void* at, std::size_t bytes) {
    if (in_another_block(operation, at)) return;
    const std::size_t offset = shared_offset(operation, at, bytes);
    for (std::size_t word = offset; word < offset + bytes; word += kWord) {
        refuse_in_flight(operation, word, "writes");
        refuse_async_readers(operation, word);
        check_shared_write(*shadow(word), "memory", static_cast<int>(word), -1);
    }
}

void Block::race(const char* access, const char* earlier, std::uint16_t who, const char* name, int r, int c) const {
    std::ostringstream out;
    out << "race in " << launch_->kernel << ": " << whereabouts() << " " << access << " shared " << name << "(" << r;
    if (c >= 0) out << ", " << c;
    out << "), which ";
    if (who == Shadow::kManyWarps)
        out << "threads of several warps";
    else if (who & Shadow::kLanesOfWarp)
        out << "lanes of warp " << (who & ~Shadow::kLanesOfWarp);
    else
        out << "thread " << who;
    out << " " << earlier << ", and no barrier lies between: is a __syncthreads() missing?";
    throw Race(out.str());
}

void Block::end_warp_epoch() {
    ++warps_[self_->warp].epoch;
    if (!cluster_.tracking()) return;
    Knowledge all;
    const auto lanes = [&](auto f) {
        for (unsigned lane = 0; lane < kLanes; ++lane)
            if (warps_[self_->warp].lanes >> lane & 1u) f(threads_[self_->warp * kLanes + lane]);
    };
    lanes([&](Thread& t) { cluster_.release(t, all); });
    lanes([&](Thread& t) { cluster_.acquire(t, all); });
}

float warp_sum(float value, int width) {
    return butterfly("warp_sum()", value, width, [](float a, float b) { return a + b; });
}

float warp_max(float value, int width) {
    return butterfly("warp_max()", value, width, [](float a, float b) { return a >= b || b != b ? a : b; });  // fmaxf()
}

std::string Block::whereabouts() const { return "thread " + std::to_string(self_->linear) + " of block " + text(index_); }

std::string Block::waiting_at(const Thread& thread) const {
    std::ostringstream out;
    out << thread.waits_at;
    if (thread.waits_for)
        for (unsigned r = 0; r < cluster_.size(); ++r)
            for (const Mbarrier& b : cluster_.block(r).mbarriers_)
                if (&b == thread.waits_for) {
                    out << " " << b.name;
                    if (r != rank_) out << " of block " << text(b.home->index_);
                    out << ", waiting for phase " << thread.waits_parity << " (";
                    if (b.pending) out << b.pending << " of " << b.expected << " arrivals missing";
                    if (b.pending && b.bytes) out << ", ";
                    if (b.bytes > 0) out << b.bytes << " bytes have not landed";
                    if (b.bytes < 0) out << -b.bytes << " bytes more have landed than were announced";
                    out << ")";
                }
    for (std::size_t id = 0; id < named_.size(); ++id)
        if (&named_[id] == thread.waits_for)
            out << " " << id << " (" << named_[id].arrived << " of " << named_[id].expected << " threads are there)";
    return out.str();
}

std::string Block::deadlock_report() const {
    std::map<std::pair<std::string, const void*>, std::vector<unsigned>> waiting;
    for (const Thread& t : threads_)
        if (t.fiber) waiting[{waiting_at(t), t.waits_for}].push_back(t.linear);
    std::ostringstream out;
    out << "block " << text(index_) << ": " << live_ << " of " << threads_.size() << " threads wait for ever";
    for (const auto& [where, who] : waiting) {
        out << "\n  " << who.size() << (who.size() == 1 ? " waits at " : " wait at ") << where.first << ": thread"
            << (who.size() == 1 ? " " : "s ") << ranges(who);
        for (const Rendezvous& m : warps_[who.front() / kLanes].meetings)
            if (&m == where.second) {
                std::vector<unsigned> missing;
                for (unsigned lane = 0; lane < kLanes; ++lane)
                    if ((m.mask & ~m.arrived) >> lane & 1u) missing.push_back(lane);
                out << " (for lanes " << ranges(missing) << " of warp " << who.front() / kLanes << ")";
            }
    }
    if (const std::size_t returned = threads_.size() - live_) out << "\n  " << returned << " have returned from the kernel";
    return out.str();
}

}  // namespace simt::cpu
