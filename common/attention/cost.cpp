#include "attention/cost.hpp"

#include <algorithm>

namespace workbook {
namespace {

constexpr long long f32_bytes = 4;

/// The sizes that the closed forms are made of.
struct Sizes {
    long long es;  ///< bytes of an element of Q, K, V and O
    long long d;
    long long rows;   ///< B * Hq * Nq
    long long q, kv;  ///< elements of Q (and O); of K (and V)
    long long pairs;  ///< Problem::pairs()

    explicit Sizes(const Problem& p)
        : es(static_cast<long long>(size_of(p.dtype))),
          d(p.head_dim),
          rows(p.rows()),
          q(p.q_elements()),
          kv(p.kv_elements()),
          pairs(p.pairs()) {}
};

/// How many (block of keys, query row) pairs a backward pass visits, over all query heads, where a head has `end` rows.
long long visited_rows(const Problem& problem, const Tiles& tiles, long long end) {
    long long visits = 0;
    for (int j0 = 0; j0 < problem.kv_seq; j0 += tiles.Bc) {
        const long long first = problem.causal ? std::max(0LL, static_cast<long long>(j0) - problem.kv_seq + problem.seq) : 0;
        visits += std::max(0LL, end - first / tiles.Br * tiles.Br);
    }
    return visits * problem.batch * problem.heads;
}

}  // namespace

long long Traffic::read() const {
    long long sum = 0;
    for (const TensorTraffic& t : tensors) sum += t.read;
    return sum;
}

long long Traffic::written() const {
    long long sum = 0;
    for (const TensorTraffic& t : tensors) sum += t.written;
    return sum;
}

double forward_flops(const Problem& problem) {
    const double flops = 4.0 * static_cast<double>(problem.pairs()) * problem.head_dim;
    return problem.causal ? flops / 2 : flops;
}

double product_flops(const Problem& problem, int products) { return 0.5 * products * forward_flops(problem); }

double backward_flops(const Problem& problem) { return product_flops(problem, 5); }

Movement naive_movement(const Problem& problem) {
    check(problem);
    const Sizes n(problem);
    return {.requested = {{
                {"Q", n.q * n.es, 0},
                {"K", n.pairs * n.d * n.es, 0},
                {"V", n.pairs * n.d * n.es, 0},
                {"S", 3 * n.pairs * n.es, n.pairs * n.es},
                {"P", n.pairs * n.es, n.pairs * n.es},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }},
            .dram = {{
                {"Q", n.q * n.es, 0},
                {"K", n.kv * n.es, 0},
                {"V", n.kv * n.es, 0},
                {"S", n.pairs * n.es, n.pairs * n.es},
                {"P", n.pairs * n.es, n.pairs * n.es},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }}};
}

Movement online_softmax_movement(const Problem& problem) {
    check(problem);
    const Sizes n(problem);
    return {.requested = {{
                {"Q", n.q * n.es, 0},
                {"K", n.pairs * n.d * n.es, 0},
                {"V", n.pairs * n.d * n.es, 0},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }},
            .dram = compulsory_traffic(problem)};
}

Movement flash1_movement(const Problem& problem, const Tiles& tiles) {
    check(problem);
    if (tiles.Bc < 1) throw InvalidArgument("Bc = " + std::to_string(tiles.Bc) + ": accepted is 1 key or more");
    const Sizes n(problem);
    const long long passes = (static_cast<long long>(problem.kv_seq) + tiles.Bc - 1) / tiles.Bc;  // Tc
    const long long kv_per_query_head = static_cast<long long>(problem.batch) * problem.heads * problem.kv_seq * n.d * n.es;
    Traffic traffic{{
        {"Q", passes * n.q * n.es, 0},
        {"K", kv_per_query_head, 0},
        {"V", kv_per_query_head, 0},
    }};
    if (passes > 1) {
        const long long o_acc = (passes - 1) * n.q * f32_bytes, statistic = (passes - 1) * n.rows * f32_bytes;
        traffic.tensors.push_back({"O_acc", o_acc, o_acc});
        traffic.tensors.push_back({"l", statistic, statistic});
        traffic.tensors.push_back({"m", statistic, statistic});
    }
    traffic.tensors.push_back({"O", 0, n.q * n.es});
    traffic.tensors.push_back({"LSE", 0, n.rows * f32_bytes});
    return {.requested = traffic, .dram = traffic};
}

namespace {

/// Keys that a block of queries from row i0 on visits, in whole blocks of Bc.
long long visited_keys(const Problem& problem, const Tiles& tiles, bool skip, int i0) {
    const int last = std::min(i0 + tiles.Br, problem.seq) - 1;
    const int seen = skip ? problem.visible_keys(last) : problem.kv_seq;
    return (static_cast<long long>(seen) + tiles.Bc - 1) / tiles.Bc * tiles.Bc;
}

void check(const Tiles& tiles) {
    if (tiles.Br < 1) throw InvalidArgument("Br = " + std::to_string(tiles.Br) + ": accepted is 1 row or more");
    if (tiles.Bc < 1) throw InvalidArgument("Bc = " + std::to_string(tiles.Bc) + ": accepted is 1 key or more");
}

}  // namespace

Movement q_parallel_movement(const Problem& problem, const Tiles& tiles, bool skip) {
    workbook::check(problem);
    check(tiles);
    const Sizes n(problem);
    long long q_rows = 0, kv_rows = 0;
    for (const Problem& one : problem.sequences()) {
        const long long heads = static_cast<long long>(one.batch) * one.heads;
        for (int i0 = 0; i0 < one.seq; i0 += tiles.Br) {
            const long long keys = visited_keys(one, tiles, skip, i0);
            kv_rows += heads * std::min<long long>(keys, one.kv_seq);
            if (keys > 0) q_rows += heads * std::min(tiles.Br, one.seq - i0);
        }
    }
    return {.requested = {{
                {"Q", q_rows * n.d * n.es, 0},
                {"K", kv_rows * n.d * n.es, 0},
                {"V", kv_rows * n.d * n.es, 0},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }},
            .dram = compulsory_traffic(problem)};
}

namespace {

/// A table of appendix B: an entry for each tile of `size` rows of each sequence.
struct Table {
    long long entries = 0;
    static constexpr long long bytes = 32, number_bytes = 4;

    Table(const Problem& problem, int Problem::*length, int size) {
        for (const Problem& one : problem.sequences()) entries += (one.*length + size - 1LL) / size;
    }
    /// One number by each of `threads` threads of an entry; over HBM in each of `passes` kernels.
    void add_to(Movement& movement, const char* name, long long threads, long long passes) const {
        movement.requested.tensors.push_back({name, entries * threads * number_bytes, 0});
        movement.dram.tensors.push_back({name, passes * entries * bytes, 0});
    }
};

}  // namespace

Movement varlen_movement(const Problem& problem, const Tiles& tiles, int threads) {
    Movement movement = q_parallel_movement(problem, tiles, true);
    Table(problem, &Problem::seq, tiles.Br).add_to(movement, "query_tiles", static_cast<long long>(threads) * problem.heads, 1);
    return movement;
}

Movement fp8_movement(const Problem& problem, int Br) {
    workbook::check(problem);
    constexpr int rows = 64;  // of a block with one scale, and keys of a tile
    const Tiles tiles{Br, rows};
    check(tiles);
    const Sizes n(problem);
    const auto blocks = [](long long length) { return (length + rows - 1) / rows; };
    const long long heads = static_cast<long long>(problem.batch) * problem.heads,
                    kv_heads = static_cast<long long>(problem.batch) * problem.kv_heads;
    const long long visits = heads * visited_tiles(problem, tiles, true);
    const std::vector<TensorTraffic> of_16_bits = q_parallel_movement(problem, tiles, true).requested.tensors;
    const long long v8 = kv_heads * blocks(problem.kv_seq) * rows * n.d;
    const long long kv_scales = kv_heads * blocks(problem.kv_seq) * 4 * f32_bytes;
    return {.requested = {{
                of_16_bits[0],
                {"K", n.kv * n.es, 0},
                {"V", n.kv * n.es, 0},
                {"K8", of_16_bits[1].read / n.es, n.kv},
                {"V8", visits * rows * n.d, v8},
                {"KV_scale", visits * 4 * f32_bytes, kv_scales},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }},
            .dram = {{
                {"Q", n.q * n.es, 0},
                {"K", n.kv * n.es, 0},
                {"V", n.kv * n.es, 0},
                {"K8", n.kv, n.kv},
                {"V8", v8, v8},
                {"KV_scale", kv_scales, kv_scales},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }}};
}

Movement split_kv_movement(const Problem& problem, const SplitKv& division) {
    workbook::check(problem);
    check(Tiles{division.Br, division.Bc});
    if (division.splits < 1) throw InvalidArgument("splits = " + std::to_string(division.splits) + ": accepted is 1 or more");
    const Sizes n(problem);
    const long long group_rows = static_cast<long long>(problem.heads / problem.kv_heads) * problem.seq;
    const long long row_tiles = (group_rows + division.Br - 1) / division.Br;
    const long long kv_heads = static_cast<long long>(problem.batch) * problem.kv_heads;
    const long long tiles = (problem.kv_seq + division.Bc - 1LL) / division.Bc;
    const long long part = division.splits * n.rows * f32_bytes;  // bytes of a number for each row and split
    Movement moved;
    std::vector<TensorTraffic>&asked = moved.requested.tensors, &dram = moved.dram.tensors;
    asked = {{"Q", division.splits * n.q * n.es, 0}, {"K", row_tiles * n.kv * n.es, 0}, {"V", row_tiles * n.kv * n.es, 0}};
    dram = {{"Q", n.q * n.es, 0}, {"K", n.kv * n.es, 0}, {"V", n.kv * n.es, 0}};
    if (division.paged) {
        constexpr long long entry_bytes = 4;
        const long long pages = (problem.kv_seq + problem.page_size - 1LL) / problem.page_size;
        asked.push_back({"table", row_tiles * kv_heads * tiles * division.Bc * (n.d / 8) * entry_bytes, 0});
        dram.push_back({"table", problem.batch * pages * entry_bytes, 0});
    }
    if (division.splits > 1) {
        asked.push_back({"O_part", part * n.d, part * n.d});
        asked.push_back({"m", part * (n.d / 4), part});
        asked.push_back({"l", part * (n.d / 4), part});
        dram.push_back({"O_part", part * n.d, part * n.d});
        dram.push_back({"m", part, part});
        dram.push_back({"l", part, part});
    }
    for (std::vector<TensorTraffic>* tensors : {&asked, &dram}) {
        tensors->push_back({"O", 0, n.q * n.es});
        tensors->push_back({"LSE", 0, n.rows * f32_bytes});
    }
    return moved;
}

long long visited_tiles(const Problem& problem, const Tiles& tiles, bool skip) {
    workbook::check(problem);
    check(tiles);
    long long visited = 0;
    for (int i0 = 0; i0 < problem.seq; i0 += tiles.Br) visited += visited_keys(problem, tiles, skip, i0) / tiles.Bc;
    return visited;
}

Movement standard_backward_movement(const Problem& problem) {
    check(problem);
    const Sizes n(problem);
    constexpr long long lanes = 32;
    const long long q = n.q * n.es, kv = n.kv * n.es, square = n.pairs * n.es;
    const long long each_pair = n.pairs * n.d * n.es;  // a row of d elements for each (row, key)
    return {.requested = {{
                {"Q", each_pair, 0},
                {"K", each_pair, 0},
                {"V", each_pair, 0},
                {"O", q, 0},
                {"dO", 2 * q + each_pair, 0},
                {"D", lanes * n.rows * f32_bytes, n.rows * f32_bytes},
                {"P", 2 * square, 0},
                {"dP", square, square},
                {"dS", 2 * square, square},
                {"dQ", 0, q},
                {"dK", 0, kv},
                {"dV", 0, kv},
            }},
            .dram = {{
                {"Q", q, 0},
                {"K", kv, 0},
                {"V", kv, 0},
                {"O", q, 0},
                {"dO", 3 * q, 0},
                {"D", n.rows * f32_bytes, n.rows * f32_bytes},
                {"P", 2 * square, 0},
                {"dP", square, square},
                {"dS", 2 * square, square},
                {"dQ", 0, q},
                {"dK", 0, kv},
                {"dV", 0, kv},
            }}};
}

Movement recompute_backward_movement(const Problem& problem, const Tiles& tiles, int readers, DqBy dq) {
    workbook::check(problem);
    check(tiles);
    const Sizes n(problem);
    const long long q = n.q * n.es, kv = n.kv * n.es, statistic = n.rows * f32_bytes;
    const long long visits = visited_rows(problem, tiles, problem.seq);
    Movement movement;
    std::vector<TensorTraffic>& asked = movement.requested.tensors;
    asked = {{"Q", visits * n.d * n.es, 0},
             {"K", kv, 0},
             {"V", kv, 0},
             {"O", q, 0},
             {"dO", q + visits * n.d * n.es, 0},
             {"LSE", readers * visits * f32_bytes, 0},
             {"D", readers * visits * f32_bytes, statistic}};
    std::vector<TensorTraffic>& dram = movement.dram.tensors;
    dram = {{"Q", q, 0}, {"K", kv, 0}, {"V", kv, 0}, {"O", q, 0}, {"dO", 2 * q, 0}, {"LSE", statistic, 0}, {"D", statistic, statistic}};
    if (dq == DqBy::atomics) {
        const long long acc = n.q * f32_bytes, added = visits * n.d * f32_bytes;
        asked.push_back({"dQ_acc", added + acc, added + acc});
        dram.push_back({"dQ_acc", 2 * acc, 2 * acc});
    } else {
        const Traffic pass = q_parallel_movement(problem, tiles, true).requested;
        const long long q_read = pass.tensors[0].read, kv_read = pass.tensors[1].read, rows_read = q_read / (n.d * n.es);
        asked[0].read += q_read;
        asked[1].read += kv_read;
        asked[2].read += kv_read;
        asked[4].read += q_read;
        asked[5].read += readers * rows_read * f32_bytes;
        asked[6].read += readers * rows_read * f32_bytes;
        for (const int tensor : {0, 1, 2}) dram[tensor].read *= 2;
        dram[4].read += q;
        dram[5].read += statistic;
        dram[6].read += statistic;
    }
    for (std::vector<TensorTraffic>* tensors : {&asked, &dram}) {
        tensors->push_back({"dQ", 0, q});
        tensors->push_back({"dK", 0, kv});
        tensors->push_back({"dV", 0, kv});
    }
    return movement;
}

Movement tensor_core_backward_movement(const Problem& problem, const Tiles& tiles) {
    workbook::check(problem);
    check(tiles);
    const Sizes n(problem);
    const long long q = n.q * n.es, kv = n.kv * n.es;
    long long visited = 0, padded = 0, visited_padded = 0;  // bytes of Q; of a number for each row
    long long seen = 0;                                     // bytes of K: of sequences without queries none are read
    for (const Problem& one : problem.sequences()) {
        const long long padded_seq = (one.seq + tiles.Br - 1LL) / tiles.Br * tiles.Br;
        if (one.seq > 0) seen += one.kv_elements() * n.es;
        visited += visited_rows(one, tiles, one.seq) * n.d * n.es;
        padded += padded_seq * one.batch * one.heads * f32_bytes;
        visited_padded += visited_rows(one, tiles, padded_seq) * f32_bytes;
    }
    return {.requested = {{{"Q", visited, 0},
                           {"K", seen, 0},
                           {"V", seen, 0},
                           {"O", q, 0},
                           {"dO", q + visited, 0},
                           {"LSE", n.rows * f32_bytes, 0},
                           {"LSE2", visited_padded, padded},
                           {"D", visited_padded, padded},
                           {"dQ_acc", (visited_padded + n.rows * f32_bytes) * n.d, (visited_padded + padded) * n.d},
                           {"dQ", 0, q},
                           {"dK", 0, kv},
                           {"dV", 0, kv}}},
            .dram = {{{"Q", q, 0},
                      {"K", seen, 0},
                      {"V", seen, 0},
                      {"O", q, 0},
                      {"dO", 2 * q, 0},
                      {"LSE", n.rows * f32_bytes, 0},
                      {"LSE2", padded, padded},
                      {"D", padded, padded},
                      {"dQ_acc", (padded + n.rows * f32_bytes) * n.d, 2 * padded * n.d},
                      {"dQ", 0, q},
                      {"dK", 0, kv},
                      {"dV", 0, kv}}}};
}

Movement varlen_backward_movement(const Problem& problem, const Tiles& tiles, int threads) {
    Movement movement = tensor_core_backward_movement(problem, tiles);
    Table(problem, &Problem::kv_seq, tiles.Bc).add_to(movement, "key_tiles", static_cast<long long>(threads) * problem.kv_heads, 1);
    const long long elements = static_cast<long long>(tiles.Br) * problem.head_dim;
    Table(problem, &Problem::seq, tiles.Br).add_to(movement, "query_blocks", (elements / 8 + elements / 16) * problem.heads, 2);
    return movement;
}

Movement bulk_backward_movement(const Problem& problem, const Tiles& tiles, bool ordered) {
    Movement movement = tensor_core_backward_movement(problem, tiles);
    const long long padded_seq = (problem.seq + tiles.Br - 1LL) / tiles.Br * tiles.Br, heads = problem.batch * problem.heads;
    const long long past_the_end = problem.seq % 2 * problem.head_dim * f32_bytes * heads;
    const long long counters = padded_seq / tiles.Br * heads * 4 * 4, visits = visited_rows(problem, tiles, padded_seq) / tiles.Br * 4 * 4;
    for (Traffic* traffic : {&movement.requested, &movement.dram}) {
        auto& tensors = traffic->tensors;
        const auto named = [&](const char* name) {
            return std::find_if(tensors.begin(), tensors.end(), [&](const TensorTraffic& t) { return t.tensor == name; });
        };
        const auto lse = named("LSE2"), d = named("D");
        *lse = {"LSE_D", lse->read + d->read, lse->written + d->written};
        tensors.erase(d);
        const auto sums = named("dQ_acc");
        sums->read += past_the_end;
        if (!ordered) continue;
        if (traffic == &movement.requested)
            tensors.insert(sums + 1, {"dQ_turn", 2 * visits, visits + counters});
        else
            tensors.insert(sums + 1, {"dQ_turn", counters, 2 * counters});
    }
    return movement;
}

Movement exchange_movement(const Problem& problem, const Tiles& tiles) {
    if (problem.causal) throw InvalidArgument("causal = true: a movement without a mask is computed here");
    Movement movement = bulk_backward_movement(problem, {tiles.Br, 2 * tiles.Bc}, false);  // as if one block had the keys of both
    long long visited = 0;                                                                 // bytes of Q
    for (TensorTraffic& t : movement.requested.tensors) {
        if (t.tensor == "Q") visited = t.read;
        if (t.tensor == "Q" || t.tensor == "LSE_D") t.read *= 2;
        if (t.tensor == "K") t.read += t.read / 2;
        if (t.tensor == "dO") t.read += visited;
    }
    return movement;
}

Movement reduce_scatter_movement(const Problem& problem, const Tiles& tiles, int cluster) {
    if (problem.kv_seq > cluster * tiles.Bc)
        throw InvalidArgument("kv_seq = " + std::to_string(problem.kv_seq) + ": a cluster has up to " + std::to_string(cluster * tiles.Bc));
    Movement movement = exchange_movement(problem, {tiles.Br, (problem.kv_seq + 1) / 2});  // of one pair
    long long visited = 0;                                                                 // bytes of Q
    for (Traffic* traffic : {&movement.requested, &movement.dram})
        std::erase_if(traffic->tensors, [](const TensorTraffic& t) { return t.tensor == "dQ_acc"; });
    for (TensorTraffic& t : movement.requested.tensors) {
        if (t.tensor == "Q") visited = t.read;
        if (t.tensor == "Q" || t.tensor == "LSE_D") t.read *= cluster / 2;
        if (t.tensor == "dO") t.read += visited * (cluster / 2 - 1);
    }
    return movement;
}

Traffic compulsory_traffic(const Problem& problem) {
    check(problem);
    const Sizes n(problem);
    return {{
        {"Q", n.q * n.es, 0},
        {"K", n.kv * n.es, 0},
        {"V", n.kv * n.es, 0},
        {"O", 0, n.q * n.es},
        {"LSE", 0, n.rows * f32_bytes},
    }};
}

double Gpu::rate(Unit unit) const {
    switch (unit) {
        case Unit::tensor_16bit: return tensor_16bit;
        case Unit::tensor_fp8: return tensor_fp8;
        case Unit::fp32: break;
    }
    return fp32;
}

const std::vector<Gpu>& gpus() {
    // Shared memory: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (maximum per thread block).
    // GeForce tensor cores run at half rate when they accumulate in float32; those are the rates given here.
    static const std::vector<Gpu> table = {
        {.key = "a100",
         .name = "NVIDIA A100 SXM 80 GB",
         .compute_capability = 80,
         .sms = 108,
         .clock = 1.410e9,
         .bandwidth = 2.039e12,
         .fp32 = 19.5e12,
         .tensor_16bit = 312e12,
         .tensor_fp8 = 0,
         .shared_memory_per_block = 163 * 1024,
         .l2_bytes = 40 << 20,
         .source = "NVIDIA A100 Tensor Core GPU Datasheet (80 GB SXM); clock: NVIDIA A100 Tensor Core GPU Architecture, table 4"},
        {.key = "h100",
         .name = "NVIDIA H100 SXM",
         .compute_capability = 90,
         .sms = 132,
         .clock = 1.980e9,
         .bandwidth = 3.35e12,
         .fp32 = 67e12,
         .tensor_16bit = 989.4e12,
         .tensor_fp8 = 1978.9e12,
         .shared_memory_per_block = 227 * 1024,
         .l2_bytes = 50 << 20,
         .source = "NVIDIA H100 Tensor Core GPU Datasheet (SXM) and Architecture white paper; clock: 67 TFLOPS / (132 SMs * 256 FLOPs)"},
        {.key = "h200",
         .name = "NVIDIA H200 SXM",
         .compute_capability = 90,
         .sms = 132,
         .clock = 1.980e9,
         .bandwidth = 4.8e12,
         .fp32 = 67e12,
         .tensor_16bit = 989.4e12,
         .tensor_fp8 = 1978.9e12,
         .shared_memory_per_block = 227 * 1024,
         .l2_bytes = 50 << 20,
         .source = "NVIDIA H200 Tensor Core GPU Datasheet (SXM; its tensor rates are with sparsity, halved here); clock: as H100"},
        {.key = "rtx4090",
         .name = "NVIDIA GeForce RTX 4090",
         .compute_capability = 89,
         .sms = 128,
         .clock = 2.520e9,
         .bandwidth = 1.008e12,
         .fp32 = 82.6e12,
         .tensor_16bit = 165.2e12,
         .tensor_fp8 = 330.3e12,
         .shared_memory_per_block = 99 * 1024,
         .l2_bytes = 72 << 20,
         .source = "NVIDIA Ada GPU Architecture white paper, appendix A (dense, FP32 accumulate)"},
        {.key = "rtx5090",
         .name = "NVIDIA GeForce RTX 5090",
         .compute_capability = 120,
         .sms = 170,
         .clock = 2.407e9,
         .bandwidth = 1.792e12,
         .fp32 = 104.8e12,
         .tensor_16bit = 209.5e12,
         .tensor_fp8 = 419e12,
         .shared_memory_per_block = 99 * 1024,
         .l2_bytes = 96 << 20,
         .source = "NVIDIA RTX Blackwell GPU Architecture white paper, appendix A (dense, FP32 accumulate)"},
    };
    return table;
}

const Gpu& find_gpu(std::string_view key) {
    std::string keys;
    for (const Gpu& gpu : gpus()) {
        if (gpu.key == key) return gpu;
        keys += (keys.empty() ? "" : ", ") + std::string(gpu.key);
    }
    throw InvalidArgument("gpu = \"" + std::string(key) + "\": accepted are " + keys);
}

double Prediction::seconds() const { return std::max({compute_seconds, dram_seconds, l1_seconds}); }

std::string_view Prediction::bound() const {
    if (compute_seconds >= dram_seconds && compute_seconds >= l1_seconds) return unit == Unit::fp32 ? "FP32 units" : "tensor cores";
    return dram_seconds >= l1_seconds ? "HBM" : "L1";
}

Prediction predict(const Gpu& gpu, Unit unit, double flops, const Movement& movement) {
    if (gpu.rate(unit) <= 0)
        throw InvalidArgument("unit = tensor_fp8: " + std::string(gpu.name) +
                              " has no FP8 tensor cores; accepted are fp32 and tensor_16bit");
    Prediction prediction;
    prediction.compute_seconds = flops / gpu.rate(unit);
    prediction.dram_seconds = static_cast<double>(movement.dram.total()) / gpu.bandwidth;
    prediction.l1_seconds = static_cast<double>(movement.requested.total()) / gpu.l1_bandwidth();
    prediction.unit = unit;
    return prediction;
}

}  // namespace workbook
