#include "06_hopper/vote_first_launch.hpp"

namespace step06 {
namespace {

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    return refuses_16_bit(problem, device, with_vote_first_shape(problem, [&]<class S>() { return sizeof(VoteFirstShared<__half, S>); }));
}

void forward(Forward& args) { launch_vote_first(args, simt::Unwatched{}); }

/// K and V are read once for all blocks of a cluster.
Movement moves(const Problem& p, const Device& device) {
    return with_vote_first_shape(p, [&]<class S>() {
        const TileOrder order = vote_first_order<S>(p, device);
        Movement movement = q_parallel_movement(p, {S::Br * S::kCluster, S::Bc}, true);
        movement.requested.tensors.push_back(claims_moved(order, device, S::kCluster));
        add_parts(movement, order, p, S::Br);
        return movement;
    });
}

std::size_t workspace_bytes(const Problem& p, const Device& device) {
    return with_vote_first_shape(p, [&]<class S>() { return kClaimBytes + parts_bytes(vote_first_order<S>(p, device), S::Br, S::D); });
}

}  // namespace

Variant vote_first_variant() { return {"06c", "vote_first", refuses, forward, moves, workspace_bytes, tensor_16bit}; }

}  // namespace step06
