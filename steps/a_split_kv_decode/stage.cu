#include "a_split_kv_decode/stage.hpp"

#include "a_split_kv_decode/block_table.hpp"
#include "a_split_kv_decode/split_kv.cuh"
#include "a_split_kv_decode/splits.hpp"

#include <bit>

namespace stepa {
namespace {

using namespace workbook;

/// Rows that share a key/value head: Nq queries of each head of the group.
int group_rows(const Problem& p) { return p.heads / p.kv_heads * p.seq; }

/// Calls f with the shape for a problem: the fewest rows that hold a group, up to 64; larger groups take several tiles.
template <class F>
decltype(auto) with_shape(const Problem& p, F&& f) {
    const int rows = group_rows(p);
    if (p.head_dim == 64) {
        if (rows <= 16) return f.template operator()<Shape<64, 1, 1>>();
        if (rows <= 32) return f.template operator()<Shape<64, 1, 2>>();
        return f.template operator()<Shape<64, 2, 2>>();
    }
    if (rows <= 16) return f.template operator()<Shape<128, 1, 1>>();
    if (rows <= 32) return f.template operator()<Shape<128, 1, 2>>();
    return f.template operator()<Shape<128, 2, 2>>();
}

template <class S>
int row_tiles(const Problem& p) {
    return (group_rows(p) + S::Br - 1) / S::Br;
}

template <class S>
Splits splits_of(const Problem& p, const Device& device) {
    return choose_splits(p.kv_seq, S::Bc, static_cast<long long>(p.batch) * p.kv_heads * row_tiles<S>(p), std::max(device.sms, 1));
}

std::optional<std::string> refuses(const Problem& p, const Device& device) {
    if (p.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; stages 01 to 04 take f32";
    if (p.head_dim != 64 && p.head_dim != 128)
        return "head_dim = " + std::to_string(p.head_dim) + ": 64 and 128 are accepted; stages 01 and 02 take any up to 256";
    if (p.seq > 8)
        return "seq = " + std::to_string(p.seq) + ": 1 to 8 queries are accepted, as a decoding step has; the stages before take more";
    const std::size_t bytes = with_shape(p, [&]<class S>() { return sizeof(Shared<__half, S>); });
    if (bytes > device.shared_memory_per_block)
        return "a block has " + std::to_string(device.shared_memory_per_block) + " bytes of shared memory: the ring takes " +
               std::to_string(bytes) + "; stages 01 and 02 need none";
    return std::nullopt;
}

/// Both kernels, over a cache in any form. The partial results are in the workspace.
template <class T, class S, class Cache>
void run(Forward& args, const Cache& cache) {
    const Problem& p = args.problem;
    const Splits splits = splits_of<S>(p, args.device);
    const int parts = splits.count > 1 ? splits.count : 0;
    const std::size_t part_rows = static_cast<std::size_t>(parts) * static_cast<std::size_t>(p.rows());
    float* const o = parts ? args.workspace.get<float>("O_part", part_rows * S::D) : nullptr;
    float* const m = parts ? args.workspace.get<float>("m", part_rows) : nullptr;
    float* const l = parts ? args.workspace.get<float>("l", part_rows) : nullptr;
    const std::array<int, 4> extents = {parts, p.batch, p.heads, p.seq};
    const std::array<int, 5> o_extents = {parts, p.batch, p.heads, p.seq, S::D};
    launch(split_kv<T, S, Cache>,
           {.name = "split_kv",
            .grid = dim3(splits.count, p.kv_heads * row_tiles<S>(p), p.batch),
            .block = S::kThreads,
            .smem = sizeof(Shared<T, S>),
            .exec = &args.exec},
           args.Q<T>(), cache, simt::packed_view<float, 5>("O_part", o, o_extents), simt::packed_view<float, 4>("m", m, extents),
           simt::packed_view<float, 4>("l", l, extents), args.O<T>(), args.LSE(), p.scale() * 1.4426950408889634f, Mask(p), splits.keys);
    if (!parts) return;
    launch(merge_splits<T, S::D>,
           {.name = "merge_splits",
            .grid = dim3(p.seq, p.heads, p.batch),
            .block = dim3(S::D / kColumns, kMergers),
            .smem = sizeof(MergeShared<S::D>),
            .early = true,
            .exec = &args.exec},
           simt::packed_view<const float, 5>("O_part", o, o_extents), simt::packed_view<const float, 4>("m", m, extents),
           simt::packed_view<const float, 4>("l", l, extents), args.O<T>(), args.LSE());
}

template <class T>
ContiguousCache<T> contiguous(const Forward& args) {
    return {args.K<T>(), args.V<T>(), args.problem.kv_seq};
}

void forward_contiguous(Forward& args) {
    require_16_byte_rows("Aa split_kv", args, "stages 01 to 03 take any");
    with_16_bit_type(args.problem.dtype,
                     [&]<class T>() { with_shape(args.problem, [&]<class S>() { run<T, S>(args, contiguous<T>(args)); }); });
}

std::size_t pages_elements(const Problem& p) {
    const std::size_t pages = static_cast<std::size_t>(p.batch) * static_cast<std::size_t>((p.kv_seq + p.page_size - 1) / p.page_size);
    return pages * static_cast<std::size_t>(p.page_size) * static_cast<std::size_t>(p.kv_heads) * static_cast<std::size_t>(p.head_dim);
}

/// K or V of the cache in the workspace, (pages, Hkv, page_size, D).
template <class T>
simt::TensorView<T, 4> pages_of(Forward& args, const char* name) {
    const Problem& p = args.problem;
    return simt::packed_view<T, 4>(name, args.workspace.get<std::remove_const_t<T>>(name, pages_elements(p)),
                                   {p.batch * ((p.kv_seq + p.page_size - 1) / p.page_size), p.kv_heads, p.page_size, p.head_dim});
}

simt::TensorView<const int, 2> table_of(Forward& args) {
    const Problem& p = args.problem;
    const int length = (p.kv_seq + p.page_size - 1) / p.page_size;
    const std::size_t entries = static_cast<std::size_t>(p.batch) * static_cast<std::size_t>(length);
    return simt::packed_view<const int, 2>("table", args.workspace.get<int>("block_table", entries), {p.batch, length});
}

void prepare_pages(Forward& args) {
    const Problem& p = args.problem;
    require_16_byte_rows("Ab paged", args, "stages 01 to 03 take any");
    const BlockTable table = shuffled_block_table(p);
    check(table, p);
    args.workspace.put("block_table", table.pages_of);
    with_16_bit_type(p.dtype, [&]<class T>() {
        launch(
            fill_pages<T>,
            {.name = "fill_pages", .grid = dim3(table.length, p.kv_heads, p.batch), .block = dim3(p.head_dim / 8, 16), .exec = &args.exec},
            contiguous<T>(args), pages_of<T>(args, "K"), pages_of<T>(args, "V"), table_of(args));
    });
}

void forward_paged(Forward& args) {
    const Problem& p = args.problem;
    require_16_byte_rows("Ab paged", args, "stages 01 to 03 take any");
    with_16_bit_type(p.dtype, [&]<class T>() {
        const PagedCache<T> cache = {pages_of<const T>(args, "K"), pages_of<const T>(args, "V"), table_of(args), p.kv_seq,
                                     std::countr_zero(static_cast<unsigned>(p.page_size))};
        with_shape(p, [&]<class S>() { run<T, S>(args, cache); });
    });
}

template <bool kPaged>
Movement moves(const Problem& p, const Device& device) {
    return with_shape(p, [&]<class S>() { return split_kv_movement(p, {S::Br, S::Bc, splits_of<S>(p, device).count, kPaged}); });
}

/// Of the partial results.
std::size_t part_bytes(const Problem& p, const Device& device) {
    const int splits = with_shape(p, [&]<class S>() { return splits_of<S>(p, device).count; });
    const std::size_t row = (static_cast<std::size_t>(p.head_dim) + 2) * sizeof(float);  // O, m and l
    return splits > 1 ? static_cast<std::size_t>(splits) * static_cast<std::size_t>(p.rows()) * row : 0;
}

/// The cache in pages is workspace here. A server has nothing else.
std::size_t part_and_page_bytes(const Problem& p, const Device& device) {
    const std::size_t entries = static_cast<std::size_t>(p.batch) * static_cast<std::size_t>((p.kv_seq + p.page_size - 1) / p.page_size);
    return part_bytes(p, device) + 2 * pages_elements(p) * size_of(p.dtype) + entries * sizeof(int);
}

Unit tensor_16bit(DType) { return Unit::tensor_16bit; }

}  // namespace

const Stage& stage() {
    static const Stage the_stage = {
        .id = "a",
        .title = "Split-KV decoding",
        .variants = {{"Aa", "split_kv", refuses, forward_contiguous, moves<false>, part_bytes, tensor_16bit},
                     {"Ab", "paged", refuses, forward_paged, moves<true>, part_and_page_bytes, tensor_16bit, plain_low_precision_forward,
                      prepare_pages}},
        .problem = {.batch = 2, .heads = 8, .kv_heads = 2, .seq = 1, .kv_seq = 2000, .head_dim = 64},
    };
    return the_stage;
}

}  // namespace stepa
