/// @file
/// cp.async.bulk.tensor: one thread has the TMA unit move a box of a tensor between global and shared memory.
/// cp.async.bulk and cp.reduce.async.bulk: it copies a contiguous stretch to another block, or adds it; this needs no map.
#pragma once

#include "ptx/mbarrier.hpp"
#include "ptx/tensor_map.hpp"

#include <array>

namespace ptx {

/// How long the L2 cache shall keep what a load brings: createpolicy's encodings for all of an access.
enum class CachePolicy : std::uint64_t {
    evict_normal = 0x1000000000000000,
    evict_first = 0x12f0000000000000,
    evict_last = 0x14f0000000000000,
};

namespace detail {
#if SIMT_EMULATED
template <int R>
std::array<int, 5> padded(const int (&at)[R]) {
    std::array<int, 5> all{};
    for (int k = 0; k < R; ++k) all[static_cast<std::size_t>(k)] = at[k];
    return all;
}
template <int R>
void check_place(const TensorMap& map, const int (&at)[R], bool store = false) {
    const auto fail = [](const std::string& what) { throw simt::Error("TMA: " + what + ", by " + simt::cpu::block().whereabouts()); };
    if (map.rank != R) fail(std::to_string(R) + " coordinates for a tensor map of rank " + std::to_string(map.rank));
    if (at[0] * map.element % 16 != 0)
        fail("coordinate 0 = " + std::to_string(at[0]) + " is " + std::to_string(at[0] * map.element) +
             " bytes into the rows: multiples of 16 are accepted");
    if (!store) return;
    for (int k = 0; k < R; ++k)
        if (at[k] < 0) fail("coordinate " + std::to_string(k) + " = " + std::to_string(at[k]) + " of a store: 0 or more is accepted");
    const long long row_bytes = map.extent[0] * map.element;
    if (at[0] + map.box[0] > map.extent[0] && row_bytes % 16 != 0)
        fail("a store across the end of rows of " + std::to_string(row_bytes) + " bytes: multiples of 16 are accepted there");
}
#else
SIMT_DEVICE std::uint64_t generic(const TensorMap& map) { return reinterpret_cast<std::uint64_t>(&map); }
#endif
}  // namespace detail

#if !SIMT_EMULATED
// Coordinates of a box as operands, and as the text that stands for them; i is the number of the first.
#define PTX_AT_2(at) "r"(at[0]), "r"(at[1])
#define PTX_AT_3(at) PTX_AT_2(at), "r"(at[2])
#define PTX_AT_4(at) PTX_AT_3(at), "r"(at[3])
#define PTX_AT_5(at) PTX_AT_4(at), "r"(at[4])
#define PTX_LOAD(R, COORDINATES)                                                                                 \
    asm volatile("cp.async.bulk.tensor." #R                                                                      \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {" COORDINATES \
                 "}], [%2], %3;" ::"r"(shared_address(to)),                                                      \
                 "l"(detail::generic(map)), "r"(shared_address(&barrier)), "l"(policy), PTX_AT_##R(at)           \
                 : "memory")
#define PTX_MULTICAST(R, COORDINATES)                                                                                               \
    asm volatile("cp.async.bulk.tensor." #R                                                                                         \
                 "d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {" COORDINATES \
                 "}], [%2], %4, %3;" ::"r"(shared_address(to)),                                                                     \
                 "l"(detail::generic(map)), "r"(shared_address(&barrier)), "l"(policy), "h"(blocks), PTX_AT_##R(at)                 \
                 : "memory")
#define PTX_STORE(R, COORDINATES)                                                                                                         \
    asm volatile("cp.async.bulk.tensor." #R "d.global.shared::cta.bulk_group [%0, {" COORDINATES "}], [%1];" ::"l"(detail::generic(map)), \
                 "r"(shared_address(from)), PTX_AT_##R(at)                                                                                \
                 : "memory")
#endif

/// Starts a load of the box at the given coordinates (dimension 0 first, a multiple of 16 bytes: other ones end in an illegal
/// instruction; negative ones and those past the end are outside). Its bytes
/// complete the phase of `barrier` that announced them: all of the box, also what lies outside of the tensor and becomes zero. One
/// thread calls; `to` begins at a multiple of 128 bytes, or of what the swizzle asks.
///
/// In emulation the destination is poisoned at once and written when nothing else can go on.
template <int R>
SIMT_DEVICE void cp_async_bulk_tensor_load(void* to, const TensorMap& map, const int (&at)[R], Mbarrier& barrier,
                                           CachePolicy cache = CachePolicy::evict_normal) {
    static_assert(R >= 2 && R <= 5, "boxes have 2 to 5 dimensions");
#if SIMT_EMULATED
    detail::check_place(map, at);
    (void)cache;
    simt::cpu::Block& block = simt::cpu::block();
    block.start_bulk_load(map, detail::padded(at), to, &barrier, 1u << block.rank());
#else
    const auto policy = static_cast<std::uint64_t>(cache);
    if constexpr (R == 2) PTX_LOAD(2, "%4,%5");
    if constexpr (R == 3) PTX_LOAD(3, "%4,%5,%6");
    if constexpr (R == 4) PTX_LOAD(4, "%4,%5,%6,%7");
    if constexpr (R == 5) PTX_LOAD(5, "%4,%5,%6,%7,%8");
#endif
}

/// The same to several blocks of the cluster, one bit of `blocks` each: the box lands at the same place of each one's shared memory
/// and counts at the same barrier of each. Global memory is read once.
template <int R>
SIMT_DEVICE void cp_async_bulk_tensor_multicast(void* to, const TensorMap& map, const int (&at)[R], Mbarrier& barrier, std::uint16_t blocks,
                                                CachePolicy cache = CachePolicy::evict_normal) {
    static_assert(R >= 2 && R <= 5, "boxes have 2 to 5 dimensions");
#if SIMT_EMULATED
    detail::check_place(map, at);
    (void)cache;
    simt::cpu::block().start_bulk_load(map, detail::padded(at), to, &barrier, blocks);
#else
    const auto policy = static_cast<std::uint64_t>(cache);
    if constexpr (R == 2) PTX_MULTICAST(2, "%5,%6");
    if constexpr (R == 3) PTX_MULTICAST(3, "%5,%6,%7");
    if constexpr (R == 4) PTX_MULTICAST(4, "%5,%6,%7,%8");
    if constexpr (R == 5) PTX_MULTICAST(5, "%5,%6,%7,%8,%9");
#endif
}

/// Starts a store of a box; what lies past the end of the tensor is left out. No coordinate may be negative, and rows across whose end
/// a box reaches are a multiple of 16 bytes: an H200 ends stores with the one by an illegal instruction, and stores the other wrongly.
/// Before it come fence_proxy_async() in each thread that wrote the box, and a barrier. One thread calls, and commits and waits too.
template <int R>
SIMT_DEVICE void cp_async_bulk_tensor_store(const TensorMap& map, const int (&at)[R], const void* from) {
    static_assert(R >= 2 && R <= 5, "boxes have 2 to 5 dimensions");
#if SIMT_EMULATED
    detail::check_place(map, at, true);
    simt::cpu::block().start_bulk_store(map, detail::padded(at), from);
#else
    if constexpr (R == 2) PTX_STORE(2, "%2,%3");
    if constexpr (R == 3) PTX_STORE(3, "%2,%3,%4");
    if constexpr (R == 4) PTX_STORE(4, "%2,%3,%4,%5");
    if constexpr (R == 5) PTX_STORE(5, "%2,%3,%4,%5,%6");
#endif
}

#if !SIMT_EMULATED
#undef PTX_LOAD
#undef PTX_MULTICAST
#undef PTX_STORE
#undef PTX_AT_2
#undef PTX_AT_3
#undef PTX_AT_4
#undef PTX_AT_5
#endif

/// Starts the addition of `count` floats in shared memory to as many neighbours in global memory, each addition atomic by itself, in no
/// defined order among others. `to` is &view(...) of the first; it and the row's remainder hold all. Both places, and the bytes, are
/// multiples of 16. The rest is as for stores of boxes.
///
/// In emulation it counts as a read and a write.
template <class Address>
SIMT_DEVICE void cp_reduce_async_bulk_add(Address to, const float* from, int count) {
#if SIMT_EMULATED
    simt::cpu::block().start_bulk_store(to.stretch(count), {}, from, true);
#else
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)),
                 "r"(count * static_cast<int>(sizeof(float)))
                 : "memory");
#endif
}

/// cp.async.bulk.shared::cluster.shared::cta: starts a copy of `bytes` in this block's shared memory to block `rank` of the cluster, where
/// they land at the place of `to` and count at the place of `barrier`: both are named by where they lie in this block. Places and bytes
/// are multiples of 16. `rank` must be another block: a copy to the own one is refused in emulation, and an H200 ends it by an illegal
/// instruction. Before it come fence_proxy_async() in each thread that wrote, and a barrier; that block must have initialised its
/// barrier, by a barrier of the cluster. It tells the reader that the copy is there; no wait tells this block that its own memory has
/// been read, so the reader must tell it before this block writes there, or ends. One thread calls.
///
/// In emulation the destination is poisoned at once; the source is read and the destination written when nothing else can go on.
SIMT_DEVICE void cp_async_bulk_to_peer(void* to, const void* from, int bytes, Mbarrier& barrier, unsigned rank) {
#if SIMT_EMULATED
    simt::cpu::block().start_peer_copy(to, from, bytes, &barrier, rank);
#else
    asm volatile(
        "{\n"
        ".reg .b32 to, full;\n"
        "mapa.shared::cluster.u32 to, %0, %4;\n"
        "mapa.shared::cluster.u32 full, %3, %4;\n"
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [to], [%1], %2, [full];\n"
        "}" ::"r"(shared_address(to)),
        "r"(shared_address(from)), "r"(bytes), "r"(shared_address(&barrier)), "r"(rank)
        : "memory");
#endif
}

/// Makes a group of the stores that this thread started since the last commit.
SIMT_DEVICE void cp_async_bulk_commit() {
#if SIMT_EMULATED
    simt::cpu::block().commit_bulk();
#else
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}

/// Waits until all but the latest kPending of this thread's groups have been read from shared memory, which may then be written or
/// end with the block.
template <int kPending>
SIMT_DEVICE void cp_async_bulk_wait_read() {
#if SIMT_EMULATED
    simt::cpu::block().wait_for_bulk(kPending, false);
#else
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
#endif
}

/// Waits until all but the latest kPending of this thread's groups are in global memory, for this thread to see.
template <int kPending>
SIMT_DEVICE void cp_async_bulk_wait() {
#if SIMT_EMULATED
    simt::cpu::block().wait_for_bulk(kPending, true);
#else
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
#endif
}

/// Fetches the map itself ahead of its first use.
SIMT_DEVICE void prefetch_tensormap(const TensorMap& map) {
#if SIMT_EMULATED
    (void)map;
#else
    asm volatile("prefetch.tensormap [%0];" ::"l"(detail::generic(map)) : "memory");
#endif
}

}  // namespace ptx
