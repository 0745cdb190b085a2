#include "b_varlen/stage.hpp"

#include "b_varlen/backward.cuh"
#include "b_varlen/forward.cuh"
#include "b_varlen/tiles.hpp"

namespace stepb {
namespace {

using namespace workbook;

/// Whether tiles of 128 rows would be too large: they would leave SMs without work, or be empty by a quarter more than tiles of 64.
bool small_tiles(const std::vector<int>& cu_seqlens, int heads, const Device& device) {
    const long long of_128 = count_tiles(cu_seqlens, 128), of_64 = count_tiles(cu_seqlens, 64);
    return of_128 * heads < device.sms || 2 * of_128 > of_64 + of_64 / 4;
}

/// Calls f with the shape of 04c for a problem.
template <class F>
decltype(auto) with_forward_shape(const Problem& p, const Device& device, F&& f) {
    using step04::Shape;
    const bool small = small_tiles(p.cu_seqlens_q, p.heads, device);
    switch (p.head_dim) {
        case 64: return small ? f.template operator()<Shape<64, 64, 4, 1>>() : f.template operator()<Shape<64, 64, 4, 2>>();
        case 128: return small ? f.template operator()<Shape<128, 64, 4, 1>>() : f.template operator()<Shape<128, 64, 4, 2>>();
        default: {
            using Large = Shape<256, 64, 8, 1>;
            const bool fits = sizeof(step04::Shared<__half, Large>) <= device.shared_memory_per_block;
            return small || !fits ? f.template operator()<Shape<256, 32, 4, 1>>() : f.template operator()<Large>();
        }
    }
}

/// Calls f with the shape of 05c for a problem.
template <class F>
decltype(auto) with_backward_shape(const Problem& p, const Device& device, F&& f) {
    using step05::Shape;
    if (p.head_dim == 64) return f.template operator()<Shape<64, 64, 32, 4, 2, 1>>();
    using Large = Shape<128, 64, 32, 8, 2, 2>;
    const bool fits = sizeof(step05::Shared<__half, Large>) <= device.shared_memory_per_block;
    return !fits || small_tiles(p.cu_seqlens_k, p.kv_heads, device) ? f.template operator()<Shape<128, 64, 32, 4, 2, 2>>()
                                                                    : f.template operator()<Large>();
}

std::optional<std::string> refuses_memory(const Device& device, std::size_t bytes) {
    if (bytes <= device.shared_memory_per_block) return std::nullopt;
    return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the tiles take " +
           std::to_string(bytes);
}

std::optional<std::string> refuses_forward(const Problem& p, const Device& device) {
    if (p.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; no variant takes packed batches in f32";
    if (p.head_dim != 64 && p.head_dim != 128 && p.head_dim != 256)
        return "head_dim = " + std::to_string(p.head_dim) + ": 64, 128 and 256 are accepted; no variant takes packed batches of others";
    return refuses_memory(device, with_forward_shape(p, device, [&]<class S>() { return sizeof(step04::Shared<__half, S>); }));
}

std::optional<std::string> refuses_backward(const Problem& p, const Device& device) {
    if (const auto why = refuses_forward(p, device)) return why;
    if (p.head_dim == 256) return "head_dim = 256: 64 and 128 are accepted, as of 05c; variant Ba takes it";
    return refuses_memory(device, with_backward_shape(p, device, [&]<class S>() { return sizeof(step05::Shared<__half, S>); }));
}

// ---- tables, which are made once for a batch and serve all its layers ----

void put_table(Workspace& workspace, const std::string& name, const std::vector<Tile>& tiles) {
    std::vector<int> numbers;
    numbers.reserve(tiles.size() * kTileNumbers);
    for (const Tile& t : tiles)
        numbers.insert(numbers.end(), {t.sequence, t.row, t.first_query, t.queries, t.first_key, t.keys, t.first_block, t.work});
    workspace.put(name, numbers);
}

TensorView<const int, 2> table(Workspace& workspace, const char* name, int tiles) {
    const std::size_t numbers = static_cast<std::size_t>(tiles) * kTileNumbers;
    return simt::packed_view<const int, 2>(name, workspace.get<int>(name, numbers), {tiles, kTileNumbers});
}

// ---- Ba ----

template <bool kSorted>
void prepare_forward(Forward& args) {
    const Problem& p = args.problem;
    const std::vector<Tile> tiles = with_forward_shape(p, args.device, [&]<class S>() { return query_tiles(p, {S::Br, S::Bc}); });
    put_table(args.workspace, "query_tiles", kSorted ? longest_first(tiles) : tiles);
}

void forward(Forward& args) {
    const Problem& p = args.problem;
    require_16_byte_rows("Ba varlen", args, "no variant takes others");
    with_16_bit_type(p.dtype, [&]<class T>() {
        with_forward_shape(p, args.device, [&]<class S>() {
            const int tiles = count_tiles(p.cu_seqlens_q, S::Br);
            launch(varlen_forward<T, S>,
                   {.name = "varlen_forward",
                    .grid = dim3(tiles * p.heads),
                    .block = S::kThreads,
                    .smem = sizeof(step04::Shared<T, S>),
                    .exec = &args.exec},
                   table(args.workspace, "query_tiles", tiles), args.Q<T>(), args.K<T>(), args.V<T>(), args.O<T>(), args.LSE(),
                   p.scale() * 1.4426950408889634f, p.causal);
        });
    });
}

Movement forward_moves(const Problem& p, const Device& device) {
    return with_forward_shape(p, device, [&]<class S>() { return varlen_movement(p, {S::Br, S::Bc}, S::kThreads); });
}

std::size_t forward_table_bytes(const Problem& p, const Device& device) {
    return with_forward_shape(p, device, [&]<class S>() { return count_tiles(p.cu_seqlens_q, S::Br) * sizeof(Tile); });
}

// ---- Bb ----

void prepare_backward(Forward& args) {
    const Problem& p = args.problem;
    prepare_forward<true>(args);
    with_backward_shape(p, args.device, [&]<class S>() {
        const Tiles size{S::Br, S::Bc};
        put_table(args.workspace, "key_tiles", longest_first(key_tiles(p, size)));
        put_table(args.workspace, "query_blocks", query_tiles(p, size));
    });
}

void backward(Backward& args) {
    const Problem& p = args.problem;
    require_16_byte_rows("Bb varlen_backward", args, "no variant takes others");
    with_16_bit_type(p.dtype, [&]<class T>() {
        with_backward_shape(p, args.device, [&]<class S>() {
            const int tiles = count_tiles(p.cu_seqlens_k, S::Bc), blocks = count_tiles(p.cu_seqlens_q, S::Br), rows = blocks * S::Br;
            const std::array<int, 3> statistics = {1, p.heads, rows};
            const std::array<int, 4> sums = {1, p.heads, blocks, S::Br * S::D};
            const std::size_t all_rows = static_cast<std::size_t>(p.heads) * static_cast<std::size_t>(rows);
            float* const lse2 = args.workspace.get<float>("LSE2", all_rows);
            float* const d = args.workspace.get<float>("D", all_rows);
            float* const dq = args.workspace.get<float>("dQ_acc", all_rows * S::D);
            const auto query_blocks = table(args.workspace, "query_blocks", blocks);
            const auto by_rows = [&](const char* name, int rows_of_block) -> simt::LaunchConfig {
                return {.name = name,
                        .grid = dim3(blocks * (S::Br / rows_of_block), p.heads),
                        .block = step05::kRowThreads,
                        .exec = &args.exec};
            };
            launch(varlen_prepare<T, S>, by_rows("varlen_prepare", step05::kRowsOfBlock<S::D>), query_blocks, args.O<T>(), args.dO<T>(),
                   args.LSE(), simt::packed_view<float, 3>("LSE2", lse2, statistics), simt::packed_view<float, 3>("D", d, statistics),
                   simt::packed_view<float, 4>("dQ_acc", dq, sums));
            launch(varlen_backward<T, S>,
                   {.name = "varlen_backward",
                    .grid = dim3(tiles * p.kv_heads),
                    .block = S::kThreads,
                    .smem = sizeof(step05::Shared<T, S>),
                    .exec = &args.exec},
                   table(args.workspace, "key_tiles", tiles), args.Q<T>(), args.K<T>(), args.V<T>(), args.dO<T>(),
                   simt::packed_view<const float, 3>("LSE2", lse2, statistics), simt::packed_view<const float, 3>("D", d, statistics),
                   simt::packed_view<float, 4>("dQ_acc", dq, sums), args.dK<T>(), args.dV<T>(), p.scale(), p.causal);
            launch(varlen_finish<T, S>, by_rows("varlen_finish", 2 * step05::kRowsOfBlock<S::D>), query_blocks,
                   simt::packed_view<const float, 4>("dQ_acc", dq, sums), args.dQ<T>(), p.scale());
        });
    });
}

Movement backward_moves(const Problem& p, const Device& device) {
    return with_backward_shape(p, device, [&]<class S>() { return varlen_backward_movement(p, {S::Br, S::Bc}, S::kThreads); });
}

std::size_t backward_table_bytes(const Problem& p, const Device& device) {
    return forward_table_bytes(p, device) + with_backward_shape(p, device, [&]<class S>() {
               return (count_tiles(p.cu_seqlens_k, S::Bc) + count_tiles(p.cu_seqlens_q, S::Br)) * sizeof(Tile);
           });
}

std::size_t saved_bytes(const Problem& p, const Device& device) {
    return static_cast<std::size_t>(p.rows()) * sizeof(float) + backward_table_bytes(p, device);
}

std::size_t backward_workspace(const Problem& p, const Device& device) {
    const std::size_t rows = with_backward_shape(p, device, [&]<class S>() -> std::size_t {
        return static_cast<std::size_t>(count_tiles(p.cu_seqlens_q, S::Br)) * S::Br * static_cast<std::size_t>(p.heads);
    });
    return backward_table_bytes(p, device) + rows * sizeof(float) * static_cast<std::size_t>(p.head_dim + 2);  // dQ_acc; LSE2, D
}

Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "b",
        .title = "Variable lengths",
        .variants = {{.id = "Ba",
                      .name = "varlen",
                      .refuses = refuses_forward,
                      .forward = forward,
                      .movement = forward_moves,
                      .workspace_bytes = forward_table_bytes,
                      .unit = tensor_16bit,
                      .prepare = prepare_forward<true>,
                      .packed = true},
                     {.id = "Ba-unsorted",
                      .name = "unsorted",
                      .refuses = refuses_forward,
                      .forward = forward,
                      .movement = forward_moves,
                      .workspace_bytes = forward_table_bytes,
                      .unit = tensor_16bit,
                      .prepare = prepare_forward<false>,
                      .packed = true}},
        .backward = {{.id = "Bb",
                      .name = "varlen_backward",
                      .refuses = refuses_backward,
                      .forward = forward,
                      .any_forward = false,
                      .backward = backward,
                      .products = 5,
                      .movement = backward_moves,
                      .saved_bytes = saved_bytes,
                      .workspace_bytes = backward_workspace,
                      .unit = tensor_16bit,
                      .prepare = prepare_backward,
                      .packed = true}},
        .problem = {.batch = 1,
                    .heads = 4,
                    .kv_heads = 2,
                    .seq = 450,
                    .kv_seq = 450,
                    .head_dim = 64,
                    .cu_seqlens_q = {0, 12, 35, 35, 299, 317, 401, 402, 450},
                    .cu_seqlens_k = {0, 12, 35, 35, 299, 317, 401, 402, 450}},
    };
    return the_stage;
}

}  // namespace stepb
