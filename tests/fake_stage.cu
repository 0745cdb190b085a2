#include "fake_stage.hpp"

#include "simt/simt.hpp"

using namespace workbook;

namespace {

constexpr int max_dim = 256;

/// One thread a row, with the online softmax.
template <class T>
__global__ void row_kernel(simt::TensorView<const T, 4> Q, simt::TensorView<const T, 4> K, simt::TensorView<const T, 4> V,
                           simt::TensorView<T, 4> O, simt::TensorView<float, 3> LSE, float scale, bool causal, int omit_keys, int skip_row,
                           int overrun) {
    const int rows = Q.extent(2), keys = K.extent(2), d = Q.extent(3);
    const int flat = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (flat >= Q.extent(0) * Q.extent(1) * rows || flat == skip_row) return;
    const int i = flat % rows, h = flat / rows % Q.extent(1), b = flat / rows / Q.extent(1);
    const int hk = h / (Q.extent(1) / K.extent(1));
    int visible = causal ? min(keys, max(0, i + 1 + keys - rows)) : keys;
    if (visible > omit_keys) visible -= omit_keys;

    float q[max_dim], acc[max_dim];  // (d)
    for (int c = 0; c < d; ++c) {
        q[c] = simt::to_float(static_cast<T>(Q(b, h, i, c)));
        acc[c] = 0;
    }
    float m = -INFINITY, l = 0;
    for (int j = 0; j < visible + overrun; ++j) {
        float s = 0;
        for (int c = 0; c < d; ++c) s += q[c] * simt::to_float(static_cast<T>(K(b, hk, j, c)));
        s *= scale;
        const float m_new = fmaxf(m, s);
        const float keep = expf(m - m_new), p = expf(s - m_new);
        for (int c = 0; c < d; ++c) acc[c] = acc[c] * keep + p * simt::to_float(static_cast<T>(V(b, hk, j, c)));
        l = l * keep + p;
        m = m_new;
    }
    for (int c = 0; c < d; ++c) O(b, h, i, c) = simt::from_float<T>(l == 0 ? 0.0f : acc[c] / l);
    LSE(b, h, i) = l == 0 ? -INFINITY : m + logf(l);
}

struct Fault {
    int omit_keys = 0, skip_row = -1, overrun = 0;
};

void launch_rows(Forward& args, const Fault& fault, std::size_t smem = 0) {
    with_type(args.problem.dtype, [&]<class T>() {
        const Problem& p = args.problem;
        const auto blocks = static_cast<unsigned>((p.rows() + 63) / 64);
        simt::launch(row_kernel<T>, {.name = "row_kernel", .grid = dim3(blocks), .block = dim3(64), .smem = smem, .exec = &args.exec},
                     args.Q<T>(), args.K<T>(), args.V<T>(), args.O<T>(), args.LSE(), p.scale(), p.causal, fault.omit_keys, fault.skip_row,
                     fault.overrun);
    });
}

Movement movement(const Problem& p, const Device&) {
    long long pairs = 0;  // (row, key)
    for (int i = 0; i < p.seq; ++i) pairs += p.visible_keys(i);
    pairs *= static_cast<long long>(p.batch) * p.heads;
    const auto element = static_cast<long long>(size_of(p.dtype));
    Movement m;
    m.requested.tensors = {{"Q", p.q_elements() * element, 0},
                           {"K", pairs * p.head_dim * element, 0},
                           {"V", pairs * p.head_dim * element, 0},
                           {"O", 0, p.q_elements() * element},
                           {"LSE", 0, p.rows() * 4}};
    m.dram = compulsory_traffic(p);
    return m;
}

std::optional<std::string> accept(const Problem&, const Device&) { return std::nullopt; }
std::size_t no_workspace(const Problem&, const Device&) { return 0; }
Unit fp32(DType) { return Unit::fp32; }

Variant variant(const char* id, const char* name, void (*forward)(Forward&)) {
    return {id, name, accept, forward, movement, no_workspace, fp32};
}

Stage make() {
    Stage stage{"90", "A stage for tests", {}};
    stage.variants.push_back(variant("90a", "right", [](Forward& args) { launch_rows(args, {}); }));
    stage.variants.push_back(variant("90b", "mispredicted", [](Forward& args) { launch_rows(args, {}); }));
    stage.variants.back().movement = [](const Problem& p, const Device& device) {
        Movement m = movement(p, device);
        m.requested.tensors[1].read += 4;
        m.requested.tensors[2].read -= 4;  // the total is right, K and V are not
        return m;
    };
    stage.variants.push_back(variant("90c", "forgetful", [](Forward& args) { launch_rows(args, {.omit_keys = 1}); }));
    stage.variants.push_back(variant("90d", "lazy", [](Forward& args) { launch_rows(args, {.skip_row = 7}); }));
    stage.variants.push_back(variant("90e", "overrunning", [](Forward& args) { launch_rows(args, {.overrun = 1}); }));
    stage.variants.push_back(variant("90f", "narrow", [](Forward& args) { launch_rows(args, {}); }));
    stage.variants.back().refuses = [](const Problem& p, const Device&) -> std::optional<std::string> {
        if (p.dtype == DType::f16) return std::nullopt;
        return std::string("dtype=") + name(p.dtype) + ": f16 is accepted; 90a does all types";
    };
    stage.variants.push_back(variant("90g", "roomy", [](Forward& args) {
        args.workspace.get<float>("scratch", 1000);
        launch_rows(args, {}, 32 * 1024);
    }));
    stage.variants.back().workspace_bytes = [](const Problem&, const Device&) -> std::size_t { return 4000; };
    stage.variants.back().refuses = [](const Problem&, const Device& device) -> std::optional<std::string> {
        if (device.shared_memory_per_block >= 32 * 1024) return std::nullopt;
        return "needs 32768 bytes of shared memory, " + device.name + " has " + std::to_string(device.shared_memory_per_block);
    };
    return stage;
}

}  // namespace

const Stage& fake_stage() {
    static const Stage stage = make();
    return stage;
}

Stage fake_stage(const std::vector<std::string>& ids) {
    Stage stage{"90", "A stage for tests", {}};
    for (const std::string& id : ids)
        for (const Variant& v : fake_stage().variants)
            if (v.id == id) stage.variants.push_back(v);
    return stage;
}
