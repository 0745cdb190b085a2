#include "03_shared_memory_tiling/stage.hpp"

#include "03_shared_memory_tiling/flash1.cuh"
#include "03_shared_memory_tiling/tiles.hpp"

#include <algorithm>

namespace step03 {

using namespace workbook;

std::size_t shared_bytes(const Problem& problem, const Tiles& tiles) {
    return sizeof(float) * static_cast<std::size_t>(shared_floats(tiles.Br, tiles.Bc, problem.head_dim));
}

std::optional<Tiles> tiles(const Problem& problem, std::size_t shared_memory_bytes) {
    const auto whole = [](long long n) { return static_cast<int>(n / kSide * kSide); };
    const auto round_up = [](int n) { return (n + kSide - 1) / kSide * kSide; };
    const long long M = static_cast<long long>(shared_memory_bytes / sizeof(float));
    const int d = problem.head_dim;
    for (int Bc = whole(M / (4LL * d)); Bc >= kSide; Bc -= kSide) {
        Tiles t{.Br = std::min({Bc, d, round_up(problem.seq)}), .Bc = std::min(Bc, round_up(problem.kv_seq))};
        // The padding of the rows can push the sum just past M: one step down then.
        if (shared_bytes(problem, t) <= shared_memory_bytes) return t;
    }
    return std::nullopt;
}

namespace {

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    const int d = problem.head_dim;
    if (d != 32 && d != 64 && d != 128)
        return "head_dim = " + std::to_string(d) + ": 32, 64 and 128 are accepted; stages 01 and 02 take any up to 256";
    if (!tiles(problem, device.shared_memory_per_block)) {
        const Tiles smallest{.Br = kSide, .Bc = kSide};
        return "a block has " + std::to_string(device.shared_memory_per_block) +
               " bytes of shared memory: the smallest tiles for head_dim = " + std::to_string(d) + " take " +
               std::to_string(shared_bytes(problem, smallest)) + "; stages 01 and 02 need none";
    }
    return std::nullopt;
}

template <class T, int D>
void forward(Forward& args) {
    const Problem& p = args.problem;
    const Tiles t = tiles(p, args.device.shared_memory_per_block).value();
    const bool passes = p.kv_seq > t.Bc;  // with a single pass O_acc, l and m are never touched, and have no rows
    const std::array<int, 3> rows = {p.batch, p.heads, passes ? p.seq : 0};
    const auto elements = static_cast<std::size_t>(passes ? p.rows() : 0);
    float* const o_acc = args.workspace.get<float>("O_acc", elements * D);
    float* const l = args.workspace.get<float>("l", elements);
    float* const m = args.workspace.get<float>("m", elements);
    launch(flash1<T, D>,
           {.name = "flash1", .grid = dim3(p.heads, p.batch), .block = kThreads, .smem = shared_bytes(p, t), .exec = &args.exec},
           args.Q<T>(), args.K<T>(), args.V<T>(), simt::packed_view<float, 4>("O_acc", o_acc, {rows[0], rows[1], rows[2], D}),
           simt::packed_view<float, 3>("l", l, rows), simt::packed_view<float, 3>("m", m, rows), args.O<T>(), args.LSE(), t.Br, t.Bc,
           p.scale(), Mask(p));
}

void forward(Forward& args) {
    with_type(args.problem.dtype, [&]<class T>() {
        switch (args.problem.head_dim) {
            case 32: return forward<T, 32>(args);
            case 64: return forward<T, 64>(args);
            default: return forward<T, 128>(args);
        }
    });
}

Movement movement(const Problem& problem, const Device& device) {
    return flash1_movement(problem, tiles(problem, device.shared_memory_per_block).value());
}

std::size_t workspace_bytes(const Problem& problem, const Device& device) {
    const Tiles t = tiles(problem, device.shared_memory_per_block).value();
    return problem.kv_seq > t.Bc ? static_cast<std::size_t>(problem.rows()) * (problem.head_dim + 2) * sizeof(float) : 0;
}

Unit unit(DType) { return Unit::fp32; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "03",
        .title = "Shared-memory tiling (FlashAttention-1)",
        .variants = {{"03", "shared_memory_tiling", refuses, forward, movement, workspace_bytes, unit}},
    };
    return the_stage;
}

}  // namespace step03
