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
    long long pairs;  ///< (row, key) pairs: B * Hq * Nq * Nkv, masked ones included

    explicit Sizes(const Problem& p)
        : es(static_cast<long long>(size_of(p.dtype))),
          d(p.head_dim),
          rows(p.rows()),
          q(p.q_elements()),
          kv(p.kv_elements()),
          pairs(p.rows() * p.kv_seq) {}
};

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
    const double flops = 4.0 * static_cast<double>(problem.rows()) * problem.kv_seq * problem.head_dim;
    return problem.causal ? flops / 2 : flops;
}

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
    long long q_rows = 0, kv_rows = 0;  // of one query head
    for (int i0 = 0; i0 < problem.seq; i0 += tiles.Br) {
        const long long keys = visited_keys(problem, tiles, skip, i0);
        kv_rows += std::min<long long>(keys, problem.kv_seq);
        if (keys > 0) q_rows += std::min(tiles.Br, problem.seq - i0);
    }
    const long long heads = static_cast<long long>(problem.batch) * problem.heads;
    return {.requested = {{
                {"Q", heads * q_rows * n.d * n.es, 0},
                {"K", heads * kv_rows * n.d * n.es, 0},
                {"V", heads * kv_rows * n.d * n.es, 0},
                {"O", 0, n.q * n.es},
                {"LSE", 0, n.rows * f32_bytes},
            }},
            .dram = compulsory_traffic(problem)};
}

long long visited_tiles(const Problem& problem, const Tiles& tiles, bool skip) {
    workbook::check(problem);
    check(tiles);
    long long visited = 0;
    for (int i0 = 0; i0 < problem.seq; i0 += tiles.Br) visited += visited_keys(problem, tiles, skip, i0) / tiles.Bc;
    return visited;
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
