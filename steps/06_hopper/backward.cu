// The host side of 06e.
#include "06_hopper/backward_launch.hpp"

namespace step06 {
namespace {

std::optional<std::string> refuses(const Problem& problem, const Device& device) {
    if (problem.dtype == DType::f32) return "dtype = f32: tensor cores multiply f16 and bf16; variants 05a and 05b take f32";
    const int d = problem.head_dim;
    if (d != 64 && d != 128 && d != 256)
        return "head_dim = " + std::to_string(d) + ": 64, 128 and 256 are accepted; variant 05a takes any up to 256";
    return refuses_device(device, with_backward_shape(d, [&]<class S>() { return sizeof(BackwardShared<__half, S>); }),
                          "variants of stage 05", "variant 05a needs little");
}

template <bool kOrdered>
void run_backward(Backward& args) {
    const std::string variant = kOrdered ? "06e-det deterministic" : "06e backward";
    require_16_byte_rows(variant, args, "variants 05a and 05b take any");
    with_backward_shape(args.problem.head_dim, [&]<class S>() {
        with_16_bit_type(args.problem.dtype, [&]<class T>() { launch_backward<T, S, kOrdered>(variant, args, simt::Unwatched{}); });
    });
}

template <bool kOrdered>
Movement moves(const Problem& p, const Device&) {
    return bulk_backward_movement(p, with_backward_shape(p.head_dim, [&]<class S>() { return Tiles{S::Br, S::Bc}; }), kOrdered);
}

template <bool kOrdered>
std::size_t workspace(const Problem& p, const Device&) {
    return with_backward_shape(p.head_dim, [&]<class S>() { return backward_workspace<S>(p, kOrdered); });
}

}  // namespace

std::vector<BackwardVariant> backward_variants(void (*forward)(Forward&)) {
    return {{.id = "06e",
             .name = "backward",
             .refuses = refuses,
             .forward = forward,
             .any_forward = true,
             .backward = run_backward<false>,
             .products = 5,
             .movement = moves<false>,
             .saved_bytes = saved_for_backward,
             .workspace_bytes = workspace<false>,
             .unit = tensor_16bit},
            {.id = "06e-det",
             .name = "deterministic",
             .refuses = refuses,
             .forward = forward,
             .any_forward = true,
             .backward = run_backward<true>,
             .products = 5,
             .movement = moves<true>,
             .saved_bytes = saved_for_backward,
             .workspace_bytes = workspace<true>,
             .unit = tensor_16bit}};
}

}  // namespace step06
