/// @file
/// wgmma.mma_async: matrix products of a warpgroup on the tensor cores, with operands in shared memory, that run while the threads go
/// on.
///
/// The order of things, for all 128 threads of the warpgroup alike: wgmma_fence(), any number of wgmma(), wgmma_commit(), and
/// wgmma_wait() before an accumulator, or the memory of an operand, is touched again.
///
/// In emulation operands are read in the wait, as late as may be, and accumulators are NaN until then.
#pragma once

#include "ptx/sm90.hpp"
#if !SIMT_EMULATED
#include "ptx/wgmma_instructions.hpp"
#endif

#include <cuda_fp8.h>

#include <type_traits>

namespace ptx {

/// Which index of an operand is contiguous in memory: k, or the other one (m of A, n of B).
enum class Major { k, mn };

/// Tells wgmma how an operand lies in shared memory (PTX ISA, "Matrix Descriptor Format").
///
/// With a swizzle, memory is made of lines as long as the swizzle's span (128, 64 or 32 bytes), eight of them in an atom.
/// - K-major: a line holds consecutive k of one row of A or column of B; an atom is eight of these rows. `stride` leads to the next
///   eight; `leading` is not used. The 32 bytes of k that one wgmma takes lie in one line: the next ones are advance(32).
/// - MN-major: a line holds consecutive m or n of one k; an atom is eight k. `stride` leads to the next eight k, `leading` to the next
///   line's worth of m or n.
///
/// Without swizzle, memory is made of 8 x 16-byte matrices, each 128 bytes in a piece. K-major: `stride` leads to the next eight rows,
/// `leading` to the next 16 bytes of k. MN-major: `stride` leads to the next eight m or n, `leading` to the next eight k.
struct MatrixDescriptor {
    std::uint32_t low;   ///< start address and leading offset, in units of 16 bytes: what changes from product to product
    std::uint32_t high;  ///< stride offset, in units of 16 bytes, and swizzle

    struct Fields {
        const void* start;  ///< aligned to the swizzle's pattern (1024 bytes for Swizzle::bytes_128), or advance()d from there
        unsigned leading = 0;
        unsigned stride = 0;
        Swizzle swizzle = Swizzle::bytes_128;
    };
    static SIMT_DEVICE MatrixDescriptor of(const Fields& f) {
        constexpr std::uint32_t kCode[] = {0, 3, 2, 1};  // of a swizzle
        return {(shared_address(f.start) & 0x3ffff) >> 4 | f.leading >> 4 << 16, f.stride >> 4 | kCode[static_cast<int>(f.swizzle)] << 30};
    }
    /// The descriptor of what begins `bytes` later; a 32-bit addition.
    SIMT_DEVICE MatrixDescriptor advance(int bytes) const { return {low + static_cast<std::uint32_t>(bytes / 16), high}; }
    SIMT_DEVICE std::uint64_t bits() const { return static_cast<std::uint64_t>(high) << 32 | low; }
};

#if SIMT_EMULATED
namespace detail {

template <class T>
constexpr simt::cpu::Wgmma::Element wgmma_element() {
    if constexpr (std::is_same_v<T, __half>) return simt::cpu::Wgmma::Element::f16;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return simt::cpu::Wgmma::Element::bf16;
    if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) return simt::cpu::Wgmma::Element::e4m3;
}

}  // namespace detail
#endif

/// Starts D = A B, or D += A B where `accumulate`, of A (64, K) and B (K, N) in T with K of 32 bytes: 16 elements of __half or
/// __nv_bfloat16, 32 of __nv_fp8_e4m3. D is in float32.
///
/// Thread t of the 128 holds of D, with row = 16 (t / 32) + t % 32 / 4 and column = 2 (t % 4):
///     d[4i], d[4i+1] = D(row, column + 8i ..+1)     d[4i+2], d[4i+3] = D(row + 8, column + 8i ..+1)
/// (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma). Products of e4m3 take both operands K-major.
template <class T, int N, Major kA = Major::k, Major kB = Major::k>
SIMT_DEVICE void wgmma(float (&d)[N / 2], MatrixDescriptor a, MatrixDescriptor b, bool accumulate) {
    static_assert(sizeof(T) == 2 || (kA == Major::k && kB == Major::k), "wgmma takes operands of one byte K-major only");
#if SIMT_EMULATED
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N of wgmma is a multiple of 8 up to 256");
    simt::cpu::block().issue_wgmma(
        {d, N, detail::wgmma_element<T>(), false, kA == Major::mn, kB == Major::mn, accumulate, a.bits(), b.bits(), {}});
#else
    detail::Wgmma<N>::template shared<T, static_cast<int>(kA), static_cast<int>(kB)>(d, a.bits(), b.bits(), accumulate);
#endif
}

/// The same with A from registers. With row as above and c = t % 4, a thread holds of A
///     16 bits:  a[0] = A(row, 2c..2c+1)   a[1] = A(row + 8, 2c..2c+1)   a[2] = A(row, 2c+8..2c+9)     a[3] = A(row + 8, 2c+8..2c+9)
///      8 bits:  a[0] = A(row, 4c..4c+3)   a[1] = A(row + 8, 4c..4c+3)   a[2] = A(row, 4c+16..4c+19)   a[3] = A(row + 8, 4c+16..4c+19)
/// They must not be written before the wait.
template <class T, int N, Major kB = Major::k>
SIMT_DEVICE void wgmma(float (&d)[N / 2], const std::uint32_t (&a)[4], MatrixDescriptor b, bool accumulate) {
    static_assert(sizeof(T) == 2 || kB == Major::k, "wgmma takes operands of one byte K-major only");
#if SIMT_EMULATED
    static_assert(N % 8 == 0 && N >= 8 && N <= 256, "N of wgmma is a multiple of 8 up to 256");
    simt::cpu::block().issue_wgmma(
        {d, N, detail::wgmma_element<T>(), true, false, kB == Major::mn, accumulate, 0, b.bits(), {a[0], a[1], a[2], a[3]}});
#else
    detail::Wgmma<N>::template registers<T, static_cast<int>(kB)>(d, a, b.bits(), accumulate);
#endif
}

/// Orders the thread's accesses to accumulators and A fragments before the wgmmas that follow.
SIMT_DEVICE void wgmma_fence() {
#if SIMT_EMULATED
    simt::cpu::block().fence_wgmma();
#else
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

/// Makes a group of the wgmmas since the last commit.
SIMT_DEVICE void wgmma_commit() {
#if SIMT_EMULATED
    simt::cpu::block().commit_wgmma();
#else
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/// Waits until at most kPending of the latest groups are still under way.
template <int kPending>
SIMT_DEVICE void wgmma_wait() {
#if SIMT_EMULATED
    simt::cpu::block().wait_for_wgmma(kPending);
#else
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

/// Keeps the compiler from moving accesses to these registers across this place: it does not know that wgmma_wait() concerns them.
template <class R, int kCount>
SIMT_DEVICE void keep_in_place(R (&registers)[kCount]) {
#if !SIMT_EMULATED
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        if constexpr (std::is_same_v<R, float>)
            asm volatile("" : "+f"(registers[i])::"memory");
        else
            asm volatile("" : "+r"(registers[i])::"memory");
    }
#else
    (void)registers;
#endif
}

/// Hides the value of a number from the compiler: a counter, say, whose comparison at the end of a loop it would else trade for another,
/// computed there.
SIMT_DEVICE void keep_in_place(int& number) {
#if !SIMT_EMULATED
    asm volatile("" : "+r"(number));
#else
    (void)number;
#endif
}

}  // namespace ptx
