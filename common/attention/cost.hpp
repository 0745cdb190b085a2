/// @file
/// What a problem costs: floating-point operations, global-memory traffic in closed form, and the time they take.
#pragma once

#include "attention/problem.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace workbook {

/// Bytes that threads ask of one tensor, each element as often as it is asked for.
struct TensorTraffic {
    std::string tensor;
    long long read = 0;
    long long written = 0;
};

/// Bytes per tensor, in the order Q, K, V, intermediate tensors, O, LSE; of a backward pass Q, K, V, O, dO, LSE, intermediate tensors,
/// dQ, dK, dV. Tensors that are not touched are left out.
struct Traffic {
    std::vector<TensorTraffic> tensors;

    long long read() const;     ///< over all tensors
    long long written() const;  ///< over all tensors
    long long total() const { return read() + written(); }
};

/// Forward FLOPs as the FlashAttention papers count them: 4 * B * Hq * Nq * Nkv * d, halved when causal; of a packed batch the sum over its
/// sequences.
double forward_flops(const Problem& problem);

/// FLOPs of `products` matrix products of Nq x Nkv x d, each 2 * B * Hq * Nq * Nkv * d, halved when causal: what a kernel calculates.
double product_flops(const Problem& problem, int products);

/// Backward FLOPs as the FlashAttention papers count them: five products, 2.5 times the forward, whatever a kernel calculates.
double backward_flops(const Problem& problem);

/// What one run of a stage moves, in closed form.
struct Movement {
    Traffic requested;  ///< what the threads ask for: the emulator's ledger must count exactly this
    /// What must cross HBM when each pass of a kernel over a tensor costs it once and re-reads within the pass hit a cache.
    Traffic dram;
};

/// Stage 01. Requested: scores reads Q once a row and K once a (row, key); S is written once and read three times (maximum,
/// sum, normalisation); P is written and read once; V is read once a (row, key). DRAM: Q, K, V once; S written and read; P
/// written and read. Causal masks but skips nothing, so it moves the same bytes; the same holds for stages 02 and 03.
/// @throws InvalidArgument where check() does; so do the functions below
Movement naive_movement(const Problem& problem);

/// Stage 02: as stage 01 without S and P.
Movement online_softmax_movement(const Problem& problem);

/// Tile sizes of FlashAttention-1, Algorithm 1, line 1: Bc = M / 4d, Br = min(Bc, d), M in float32 elements of shared memory.
struct Tiles {
    int Br = 0;
    int Bc = 0;
};

/// Stage 03 with Tc = ceil(Nkv / Bc) passes over Q. K and V are read once by each query head (also where query heads share
/// them), Q by every pass. Between passes O is kept unfinished in the float32 tensor O_acc, beside l and m (float32, one a row):
/// passes 1 to Tc-1 write the three, passes 2 to Tc read them; the first pass starts them in registers. The last pass writes O
/// in the problem's type, and LSE. With Tc = 1 there is no O_acc, l or m. DRAM: the same, since a pass over a long Q
/// leaves nothing in the cache for the next. (FlashAttention, Dao et al. 2022, Algorithm 1 and theorem 2.)
/// @throws InvalidArgument also when Bc < 1
Movement flash1_movement(const Problem& problem, const Tiles& tiles);

/// Stage 04: each block of Br queries reads its Q once, and every key and value block that it visits. With `skip`, a block visits
/// only what its last row sees, rounded up to whole blocks of Bc keys, and rows of Q that see nothing are not read either.
/// DRAM: compulsory, since the query blocks of a head share its K and V through the L2 cache.
/// @throws InvalidArgument also when Br < 1 or Bc < 1
Movement q_parallel_movement(const Problem& problem, const Tiles& tiles, bool skip);

/// Stage 06 in FP8, with tiles of Br queries and 64 keys. A kernel before reads K and V once and writes them in bytes (K8, V8), with four
/// numbers for every 64 rows, the scales; V8 has whole blocks of 64 keys. Then as q_parallel_movement() with skipping, of bytes but for Q.
/// With each block of K come the scales. DRAM: each kernel reads and writes its tensors once.
/// @throws InvalidArgument where check() does
Movement fp8_movement(const Problem& problem, int Br);

/// How appendix A divides a problem among thread blocks.
struct SplitKv {
    int Br = 0;      ///< rows of a tile: the queries of all heads that share a key/value head
    int Bc = 0;      ///< keys of a tile
    int splits = 1;  ///< blocks that share the keys of a tile of rows
    bool paged = false;
};

/// Appendix A. Each tile of Br rows reads K and V once, whatever the number of splits, and Q once a split. Where there are several splits,
/// each writes its part of O (O_part), m and l in float32; a second kernel reads O_part once, and m and l once by each of the d / 4 threads
/// of a row. Paged: the d / 8 threads that copy a row of K and V read its entry of the block table (table), also for the rows past the end
/// of the last tile. A mask skips nothing, for the last query sees all keys. DRAM: K, V, Q and the table once; the parts written and read.
/// @throws InvalidArgument also when Br, Bc or splits is below 1
Movement split_kv_movement(const Problem& problem, const SplitKv& division);

/// Appendix B, forward: as q_parallel_movement() with skipping, of each sequence of a packed batch by itself. Each thread of a block reads
/// one number of the 32 bytes of its tile in the table (query_tiles).
/// @param threads of a block
/// @throws InvalidArgument as q_parallel_movement()
Movement varlen_movement(const Problem& problem, const Tiles& tiles, int threads);

/// (query block, key block) pairs that stage 04 visits for one head, with and without skipping.
long long visited_tiles(const Problem& problem, const Tiles& tiles, bool skip);

/// Stage 05's standard backward, which reads P (in the problem's type) and makes dP and dS of the same size. Requested: each of the four
/// products reads one operand once a (row, key): V for dP = dO V^T, K for dQ = dS K, dO for dV = P^T dO, Q for dK = dS^T Q. P is read
/// twice (dS, dV), dP written and read once, dS written once and read twice; D is read by each of the 32 lanes of a row. Causal masks
/// but skips nothing. DRAM: each kernel reads and writes its tensors once.
/// @throws InvalidArgument where check() does; so do the functions below
Movement standard_backward_movement(const Problem& problem);

/// How stage 05's kernels that compute P again come to dQ.
enum class DqBy {
    atomics,   ///< blocks of keys add their share to the float32 tensor dQ_acc
    own_pass,  ///< a second kernel, parallel over blocks of queries
};

/// Stage 05's backward with P computed again. A block of Bc keys of one key/value head reads its K and V once, and Q, dO, LSE and D
/// of every block of Br queries that sees any of its keys, for each query head of the group. LSE and D are read by each of the
/// `readers` threads that share a row. A kernel before reads O and dO once and writes D.
/// - atomics: that kernel also writes zeros to dQ_acc; each visit of a block of queries adds to its rows of dQ_acc, an atomic counting
///   as one read and one write; a kernel after reads dQ_acc and writes dQ.
/// - own_pass: as q_parallel_movement() with dO beside Q, and LSE and D once more.
///
/// DRAM: each kernel reads and writes its tensors once, since the blocks of a head share them through the L2 cache.
/// @throws InvalidArgument also when Br < 1 or Bc < 1
Movement recompute_backward_movement(const Problem& problem, const Tiles& tiles, int readers, DqBy dq);

/// Stage 05's backward on tensor cores: as recompute_backward_movement() with atomics, but LSE and D are read once by a block of keys
/// for each of its visits, from padded copies. Those (LSE2, D) and dQ_acc have whole blocks of Br rows, all of which are written, read
/// and added to.
/// @throws InvalidArgument also when Br < 1 or Bc < 1
Movement tensor_core_backward_movement(const Problem& problem, const Tiles& tiles);

/// Appendix B, backward: as tensor_core_backward_movement() of each sequence of a packed batch by itself. Tables as in varlen_movement():
/// of tiles of Bc keys (key_tiles), and for the kernels before and after, which have 8 and 16 columns of a row a thread, of blocks of Br
/// queries (query_blocks).
/// @param threads of a block of the kernel in between
/// @throws InvalidArgument as tensor_core_backward_movement()
Movement varlen_backward_movement(const Problem& problem, const Tiles& tiles, int threads);

/// Stage 06's backward: as tensor_core_backward_movement(), with LSE2 and D in one tensor, LSE_D, and rows of dQ_acc read in pairs at the
/// end; Br is even. `ordered`: for each block of queries four counters of 4 bytes, dQ_turn, are set to zero, and at each visit read once to
/// wait for a value (a GPU asks more often), and added to.
/// @throws InvalidArgument also when Br < 1 or Bc < 1
Movement bulk_backward_movement(const Problem& problem, const Tiles& tiles, bool ordered);

/// 06f: as bulk_backward_movement() without a mask, but two neighbouring blocks of Bc keys, of which the second may be empty, add to dQ_acc
/// together. Each reads Q, dO and LSE_D for itself, its own K, and half of the columns of the other's.
/// @throws InvalidArgument also when Br < 1 or Bc < 1, and for a causal problem
Movement exchange_movement(const Problem& problem, const Tiles& tiles);

/// 06g: as exchange_movement(), but for `cluster` blocks of Bc keys that have all keys between them, some of which may be empty. dQ is
/// complete when it leaves them: there is no dQ_acc.
/// @throws InvalidArgument also when Br < 1, Bc < 1 or the keys are more, and for a causal problem
Movement reduce_scatter_movement(const Problem& problem, const Tiles& tiles, int cluster);

/// The fewest bytes any exact attention moves: Q, K, V read once, O and LSE written once.
Traffic compulsory_traffic(const Problem& problem);

/// Which unit does the multiplications of a kernel.
enum class Unit { fp32, tensor_16bit, tensor_fp8 };

/// A GPU as its datasheet describes it. Rates are dense (no sparsity), in operations per second; bandwidths in bytes per second.
struct Gpu {
    std::string_view key;    ///< "h200"
    std::string_view name;   ///< "NVIDIA H200 SXM"
    int compute_capability;  ///< 90 for 9.0
    int sms;
    double clock;                         ///< boost clock of the SMs, Hz
    double bandwidth;                     ///< of HBM or GDDR
    double fp32;                          ///< FP32 FMA units
    double tensor_16bit;                  ///< tensor cores, f16/bf16 inputs, float32 accumulation
    double tensor_fp8;                    ///< 0 where there is none
    std::size_t shared_memory_per_block;  ///< bytes, with opt-in
    std::size_t l2_bytes;                 ///< of the L2 cache
    std::string_view source;              ///< the datasheet or white paper the numbers come from

    double rate(Unit unit) const;
    double l1_bandwidth() const { return 128.0 * sms * clock; }  ///< 128 bytes a clock and SM
};

/// a100, h100, h200, rtx4090, rtx5090
const std::vector<Gpu>& gpus();

/// @throws InvalidArgument that lists the keys
const Gpu& find_gpu(std::string_view key);

/// T = max(FLOPs / rate, bytes / bandwidth), the roofline model (Williams et al. 2009), with a second bytes term for the on-chip
/// side: what the threads ask for must at least cross the L1 cache. A lower bound: launch overhead and latency come on top.
struct Prediction {
    double compute_seconds = 0;
    double dram_seconds = 0;
    double l1_seconds = 0;

    double seconds() const;
    std::string_view bound() const;  ///< "FP32 units", "tensor cores", "HBM" (also for GDDR) or "L1": the largest term
    Unit unit = Unit::fp32;
};
/// @throws InvalidArgument when the GPU does not have the unit
Prediction predict(const Gpu& gpu, Unit unit, double flops, const Movement& movement);

}  // namespace workbook
