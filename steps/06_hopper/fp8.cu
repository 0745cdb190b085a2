#include "06_hopper/fp8.cuh"

#include "06_hopper/divided_tiles.hpp"
#include "attention/diagnose_fp8.hpp"
#include "attention/fp8.hpp"

#include <array>

namespace step06 {
namespace {

constexpr const char* kVariant = "06d fp8";

/// Calls f with the shape for a head dimension. As many warpgroups as O (64 D), S, Q and P leave registers for.
template <class F>
decltype(auto) with_fp8_shape(int d, F&& f) {
    switch (d) {
        case 64: return f.template operator()<Fp8Shape<64, 4, 8, 24, 112>>();
        case 128: return f.template operator()<Fp8Shape<128, 3, 8, 32, 160>>();
        default: return f.template operator()<Fp8Shape<256, 2, 3, 24, 240>>();
    }
}

std::optional<std::string> fp8_refuses(const Problem& problem, const Device& device) {
    return refuses_16_bit(problem, device, with_fp8_shape(problem.head_dim, [&]<class S>() { return sizeof(Fp8Shared<__half, S>); }));
}

/// Blocks of rows that share a scale.
int blocks_of(int rows) { return (rows + kScaled - 1) / kScaled; }

template <class S>
TileOrder order_of(const Problem& p, const Device& device) {
    return tile_order(p, device, S::Br, sizeof(E4m3), true);
}

/// A map of a packed tensor (B, heads, rows, D) whose boxes are tiles.
template <class Tile, int D>
ptx::TensorMap map_of_rows(const char* name, const E4m3* data, int batch, int heads, int rows) {
    constexpr int kLine = Tile::kLine;
    const long long head = static_cast<long long>(rows) * D;
    return ptx::make_tensor_map<const E4m3, 5>(name, data, {kLine, rows, D / kLine, heads, batch}, {D, kLine, head, heads * head},
                                               {kLine, Tile::kBytes / D, D / kLine, 1, 1}, Tile::kSwizzle);
}

template <class T, class S>
void launch_both(Forward& args) {
    constexpr int D = S::D;
    using Smem = Fp8Shared<T, S>;
    const Problem& p = args.problem;
    const int kv_padded = blocks_of(p.kv_seq) * kScaled;
    const long long v_head = static_cast<long long>(D) * kv_padded;
    auto* const K8 = args.workspace.get<E4m3>("K8", static_cast<std::size_t>(p.kv_elements()));
    auto* const V8 = args.workspace.get<E4m3>("V8", static_cast<std::size_t>(p.batch * p.kv_heads * v_head));
    const int kv_blocks = blocks_of(p.kv_seq), all_kv_blocks = p.batch * p.kv_heads * kv_blocks;
    auto* const KV_scale = args.workspace.get<float>("KV_scale", static_cast<std::size_t>(all_kv_blocks) * 4);

    launch(quantise<T, D>,
           {.name = "quantise",
            .grid = dim3(static_cast<unsigned>(2 * p.kv_heads * kv_blocks), static_cast<unsigned>(p.batch)),
            .block = Quantisation<D>::kThreads,
            .smem = Quantisation<D>::kShared,
            .exec = &args.exec},
           args.K<T>(), args.V<T>(),  //
           simt::packed_view<uint2, 4>("K8", reinterpret_cast<uint2*>(K8), {p.batch, p.kv_heads, p.kv_seq, D / 8}),
           simt::packed_view<std::uint32_t, 4>("V8", reinterpret_cast<std::uint32_t*>(V8), {p.batch, p.kv_heads, D, kv_padded / 4}),
           simt::packed_view<float, 4>("KV_scale", KV_scale, {p.batch, p.kv_heads, kv_blocks, 4}));

    const TileOrder order = order_of<S>(p, args.device);
    const Parts parts = step06::parts(args, order, S::Br);
    launch(
        fp8<T, S>,
        {.name = "fp8", .grid = grid_of(order, args.device), .block = S::kThreads, .smem = sizeof(Smem), .early = true, .exec = &args.exec},
        map_of<const T>(kVariant, "Q", args.q, p, p.heads, p.seq, 64),
        map_of_rows<typename Smem::KTile, D>("K8", K8, p.batch, p.kv_heads, p.kv_seq),
        ptx::make_tensor_map<const E4m3, 4>("V8", V8, {kv_padded, D, p.kv_heads, p.batch}, {kv_padded, v_head, p.kv_heads * v_head},
                                            {S::Bc, D, 1, 1}, Smem::VTile::kSwizzle),
        ptx::make_tensor_map<const float, 2>("KV_scale", KV_scale, {4, all_kv_blocks}, {4}, {4, 1}, ptx::Swizzle::none),
        map_of<T>(kVariant, "O", args.o, p, p.heads, p.seq, 64), args.LSE(), claims(args), parts.O, parts.LSE, order, p.kv_seq,
        p.heads / p.kv_heads, p.scale() * 1.4426950408889634f, Mask(p));
    merge<T, D>(args, order, S::Br);
}

void forward_fp8(Forward& args) {
    with_tensors(kVariant, args, [&]<class T>() { with_fp8_shape(args.problem.head_dim, [&]<class S>() { launch_both<T, S>(args); }); });
}

Movement moves(const Problem& p, const Device& device) {
    return with_fp8_shape(p.head_dim, [&]<class S>() {
        const TileOrder order = order_of<S>(p, device);
        Movement movement = fp8_movement(p, S::Br);
        movement.requested.tensors.push_back(claims_moved(order, device));
        add_parts(movement, order, p, S::Br);
        return movement;
    });
}

std::size_t workspace_bytes(const Problem& p, const Device& device) {
    const auto kv_blocks =
        static_cast<std::size_t>(p.batch) * static_cast<std::size_t>(p.kv_heads) * static_cast<std::size_t>(blocks_of(p.kv_seq));
    return static_cast<std::size_t>(p.kv_elements()) + kv_blocks * kScaled * static_cast<std::size_t>(p.head_dim) +
           4 * kv_blocks * sizeof(float) + kClaimBytes +
           with_fp8_shape(p.head_dim, [&]<class S>() { return parts_bytes(order_of<S>(p, device), S::Br, S::D); });
}

}  // namespace

Variant fp8_variant() {
    return {.id = "06d",
            .name = "fp8",
            .refuses = fp8_refuses,
            .forward = forward_fp8,
            .movement = moves,
            .workspace_bytes = workspace_bytes,
            .unit = [](DType) { return Unit::tensor_fp8; },
            .plain = plain_fp8_forward,
            .explain = diagnose_fp8};
}

}  // namespace step06
