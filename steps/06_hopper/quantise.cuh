// From 16 bits to e4m3: 64 rows of a head have one scale, the number that their largest magnitude is 448 times of. K keeps its shape; V is
// transposed, because tensor cores take operands of 8 bits only with the summed index contiguous: for P V these are the keys. Q is
// quantised where it is used, since each row of it is used by one thread block only.
#pragma once

#include "ptx/griddepcontrol.hpp"
#include "ptx/mma.hpp"
#include "ptx/wgmma.hpp"
#include "simt/e4m3.hpp"
#include "simt/simt.hpp"
#include "simt/vector.hpp"

namespace step06 {

using simt::TensorView;

using E4m3 = __nv_fp8_e4m3;

inline constexpr int kScaled = 64;              // rows that share a scale
inline constexpr float kLeastScale = 0x1p-96f;  // so that its inverse, and log2, are finite: also for a block of zeros

/// A quarter of a block's 64 rows has as many elements as 16 D; a thread holds 64 of the block.
template <int D>
struct Quantisation {
    static_assert(D % 64 == 0, "warps are whole");
    static constexpr int kThreads = D, kWarps = D / 32;
    static constexpr int kBlocks = 1024 / kThreads;  // of an SM: 64 registers a thread
    static constexpr std::size_t kShared = kWarps * sizeof(float);
};

using Chunk = std::uint32_t[4];  // eight elements of 16 bits

template <class Address>
SIMT_DEVICE void load(Chunk& chunk, Address from) {
    const uint4 all = simt::load_global_16(from);
    chunk[0] = all.x, chunk[1] = all.y, chunk[2] = all.z, chunk[3] = all.w;
}

/// The elements of a chunk.
template <class T>
struct Eight {
    float x[8];
    SIMT_DEVICE explicit Eight(const Chunk& pairs) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 pair = ptx::unpack<T>(pairs[e]);
            x[2 * e] = pair.x;
            x[2 * e + 1] = pair.y;
        }
    }
};

/// The largest magnitude of the elements that some threads hold. Infinite ones and NaN do not count: they become NaN, whatever the scale.
/// @param for_each calls what it is given with each element of this thread @param over_all makes of the largest of each thread that of all
template <class ForEach, class OverAll>
SIMT_DEVICE float largest_magnitude(ForEach&& for_each, OverAll&& over_all) {
    float largest = 0.0f;
    for_each([&](float x) { largest = fmaxf(largest, fabsf(x)); });  // fmaxf() ignores NaN
    largest = over_all(largest);
    if (largest == INFINITY) {
        largest = 0.0f;
        for_each([&](float x) { largest = fmaxf(largest, fabsf(x) < INFINITY ? fabsf(x) : 0.0f); });
        largest = over_all(largest);
    }
    return largest;
}

/// The same of what the threads of the block hold.
template <class T, int D, int kChunks>
SIMT_DEVICE float largest_of_block(const Chunk (&chunks)[kChunks]) {
    constexpr int kWarps = Quantisation<D>::kWarps;
    simt::SharedArena smem;
    const auto of_warps = smem.vector<float>("of_warps", kWarps);
    const auto for_each = [&](auto&& f) {
#pragma unroll
        for (const Chunk& chunk : chunks) {
            const Eight<T> eight(chunk);
#pragma unroll
            for (const float x : eight.x) f(x);
        }
    };
    const auto over_block = [&](float largest) {
        largest = simt::warp_max(largest);
        __syncthreads();  // nobody reads maxima of before
        if (threadIdx.x % 32 == 0) of_warps(threadIdx.x / 32) = largest;
        __syncthreads();  // before the maxima of the other warps are read
#pragma unroll
        for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, of_warps(w));
        return largest;
    };
    return largest_magnitude(for_each, over_block);
}

/// What a block is divided by, and what its elements are multiplied with for that, where they are multiplied by `factor` too.
struct Scaling {
    float scale, multiplier;

    // exercise 06.5 begin
    SIMT_DEVICE Scaling(float largest, float factor)
        : scale(fmaxf(fabsf(factor) * largest / simt::kLargestE4m3, kLeastScale)), multiplier(factor / scale) {}

    /// e4m3 has no infinity, and rounding would make 448 of it: zero times infinity is NaN.
    SIMT_DEVICE float operator()(float x) const { return 0.0f * x + x * multiplier; }
    // exercise 06.5 end
};

/// Keys 64 n to 64 n + 63 of a head of K. One thread calls tell() with the scale.
template <class T, int D, class Tell>
SIMT_DEVICE void quantise_rows(const TensorView<const T, 2>& K,      // (Nkv, D)
                               const TensorView<uint2, 2>& K8_by_8,  // (Nkv, D / 8)
                               int n, Tell&& tell) {
    constexpr int kRow = D / 8;  // chunks of eight elements
    const int row0 = kScaled * n + threadIdx.x / kRow, c = threadIdx.x % kRow, rows = K.extent(0) - row0;
    Chunk chunks[8] = {};
#pragma unroll
    for (int u = 0; u < 8; ++u)
        if (8 * u < rows) load(chunks[u], &K(row0 + 8 * u, 8 * c));
    const Scaling scaling(largest_of_block<T, D>(chunks), 1.0f);
    if (threadIdx.x == 0) tell(scaling.scale);
#pragma unroll
    for (int u = 0; u < 8; ++u) {
        ptx::keep_in_place(chunks[u]);  // two registers for one if they stayed in float32 from the search for the largest
        Eight<T> eight(chunks[u]);
        float* x = eight.x;
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] = scaling(x[e]);
        if (8 * u < rows)
            K8_by_8(row0 + 8 * u, c) = uint2{simt::pack_e4m3(x[0], x[1], x[2], x[3]), simt::pack_e4m3(x[4], x[5], x[6], x[7])};
    }
}

/// Keys 64 n to 64 n + 63 of a head of V, transposed; keys past the end become zeros. Within each 16, place 4t + e holds key
/// 8 (e / 2) + 2t + e % 2: what lane t of a row holds of P is then, in order, its part of the A operand. One thread calls tell() with the
/// scale.
template <class T, int D, class Tell>
SIMT_DEVICE void quantise_transposed(const TensorView<const T, 2>& V,              // (Nkv, D)
                                     const TensorView<std::uint32_t, 2>& V8_by_4,  // (D, Nkv up to whole blocks / 4)
                                     int n, Tell&& tell) {
    const int Nkv = V.extent(0);
    // A thread has four keys and 16 columns: four bytes of each of 16 transposed rows. A warp writes 64 bytes of two of them at once.
    const int place = threadIdx.x % 16;
    const auto column = [](int half) { return static_cast<int>(threadIdx.x / 16 + half * (D / 16)) * 8; };
    Chunk chunks[8] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int key = kScaled * n + place / 4 * 16 + place % 4 * 2 + e / 2 * 8 + e % 2;
            if (key < Nkv) load(chunks[4 * half + e], &V(key, column(half)));
        }
    const Scaling scaling(largest_of_block<T, D>(chunks), 1.0f);
    if (threadIdx.x == 0) tell(scaling.scale);
#pragma unroll
    for (Chunk& chunk : chunks) ptx::keep_in_place(chunk);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Eight<T> keys[4] = {Eight<T>(chunks[4 * half]), Eight<T>(chunks[4 * half + 1]), Eight<T>(chunks[4 * half + 2]),
                                  Eight<T>(chunks[4 * half + 3])};
#pragma unroll
        for (int c = 0; c < 8; ++c)
            V8_by_4(column(half) + c, kScaled / 4 * n + place) =
                simt::pack_e4m3(scaling(keys[0].x[c]), scaling(keys[1].x[c]), scaling(keys[2].x[c]), scaling(keys[3].x[c]));
    }
}

/// One thread block for 64 rows of a head: first those of K, then of V.
template <class T, int D>
__global__ __launch_bounds__(Quantisation<D>::kThreads, Quantisation<D>::kBlocks) void quantise(
    TensorView<const T, 4> K,              // (B, Hkv, Nkv, D)
    TensorView<const T, 4> V,              // (B, Hkv, Nkv, D)
    TensorView<uint2, 4> K8_by_8,          // (B, Hkv, Nkv, D / 8)
    TensorView<std::uint32_t, 4> V8_by_4,  // (B, Hkv, D, Nkv up to whole blocks / 4)
    TensorView<float, 4> KV_scale) {       // (B, Hkv, ceil(Nkv / 64), 4): K's, V's, log2 of that and its inverse
    ptx::griddepcontrol_launch_dependents();
    const int of_head = KV_scale.extent(2), of_k = K.extent(1) * of_head;  // blocks
    const int b = blockIdx.y, x = blockIdx.x, n = x % of_k % of_head, h = x % of_k / of_head;
    if (x < of_k) {
        const auto tell = [&](float scale) { KV_scale(b, h, n, 0) = scale; };
        return quantise_rows<T, D>(K(b, h), K8_by_8(b, h), n, tell);
    }
    const auto tell = [&](float scale) {
        const auto scales = KV_scale(b, h, n);
        scales(1) = scale, scales(2) = log2f(scale), scales(3) = 1.0f / scale;
    };
    quantise_transposed<T, D>(V(b, h), V8_by_4(b, h), n, tell);
}

}  // namespace step06
