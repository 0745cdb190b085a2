// A bench_stepNN for machines without a GPU: the harness as it is, over variants that are right, wrong, refused or broken. In the
// place of common/stage/device.cpp there is a GPU whose runs take what the environment's STUB_SECONDS says.
#include "harness.hpp"

#include "attention/reference.hpp"
#include "attention/reference_backward.hpp"
#include "stage/device.hpp"
#include "tensor/safetensors.hpp"

#include <cuda_runtime.h>

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <stdexcept>

namespace workbook {

Device Device::current(const Gpu*) {
    if (std::getenv("STUB_NO_GPU")) throw Refused("no usable GPU: the stub has none");
    Device device;
    device.name = "NVIDIA H200";
    device.emulated = false;
    return device;
}

void synchronize(cudaStream_t) {}

Timing measure(const std::function<void()>& launch, cudaStream_t, std::optional<int> repeats) {
    launch();
    const char* word = std::getenv("STUB_SECONDS");
    const double seconds = word ? std::atof(word) : 0.001;
    const int n = repeats.value_or(3);
    return {seconds, n, std::vector<double>(n, seconds)};
}

namespace {

std::vector<float> widened(const TensorRef& t, const Problem& p, long long elements) {
    HostTensor tensor{p.dtype, {elements}, std::vector<std::byte>(elements * size_of(p.dtype))};
    std::memcpy(tensor.bytes.data(), t.data, tensor.bytes.size());
    return tensor.to_float();
}

/// The reference itself, times `factor`.
void attend(Forward& args, float factor) {
    const Problem& p = args.problem;
    const ReferenceRows rows =
        reference_forward(p, widened(args.q, p, p.q_elements()), widened(args.k, p, p.kv_elements()), widened(args.v, p, p.kv_elements()));
    std::vector<float> o(rows.o.begin(), rows.o.end());
    for (float& x : o) x *= factor;
    const HostTensor tensor = HostTensor::from_float(p.dtype, {p.q_elements()}, o);
    std::memcpy(args.o.data, tensor.bytes.data(), tensor.bytes.size());
    for (long long r = 0; r < p.rows(); ++r) args.lse[r] = static_cast<float>(rows.lse[r]);
    args.workspace.get<float>("scratch", 1 << 18);
    std::cerr << "attend " << describe(p) << "\n";
}

/// The plain gradients, those of dK times `factor`.
void differentiate(Backward& args, float factor) {
    const Problem& p = args.problem;
    const std::vector<float> q = widened(args.q, p, p.q_elements()), k = widened(args.k, p, p.kv_elements()),
                             v = widened(args.v, p, p.kv_elements()), d_o = widened(args.d_o, p, p.q_elements());
    const ReferenceGradients rows = plain_low_precision_backward(p, {q, k, v, d_o});
    const auto write = [&](const TensorRef& to, const std::vector<double>& values, float times) {
        std::vector<float> rounded(values.begin(), values.end());
        for (float& x : rounded) x *= times;
        const HostTensor tensor = HostTensor::from_float(p.dtype, {static_cast<long long>(values.size())}, rounded);
        std::memcpy(to.data, tensor.bytes.data(), tensor.bytes.size());
    };
    write(args.dq, rows.dq, 1);
    write(args.dk, rows.dk, factor);
    write(args.dv, rows.dv, 1);
    std::cerr << "differentiate " << describe(p) << "\n";
}

using Refusal = std::optional<std::string>;
Refusal nothing(const Problem&, const Device&) { return std::nullopt; }
Refusal no_causal(const Problem& p, const Device&) { return p.causal ? Refusal("causal: not causal is accepted") : std::nullopt; }
void right(Forward& args) { attend(args, 1); }
void wrong(Forward& args) { attend(args, 1.5f); }
void unwritten(Forward&) {}
void exhausted(Forward&) { throw std::bad_alloc(); }
void too_large(Forward&) { throw Refused("workspace S needs 1 TiB and the device has not that much free memory"); }
void broken(Forward&) { throw std::runtime_error("CUDA: running a kernel: an illegal memory access was encountered"); }
Movement moved(const Problem& p, const Device&) { return naive_movement(p); }
std::size_t workspace(const Problem&, const Device&) { return 0; }
Movement moved_back(const Problem& p, const Device&) { return standard_backward_movement(p); }
Unit fp32(DType) { return Unit::fp32; }

}  // namespace
}  // namespace workbook

extern "C" {
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = 13000, cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return std::memcpy(to, from, bytes), cudaSuccess;
}
}

int main(int argc, char** argv) {
    using namespace workbook;
    Stage stage{"09", "Stub", {{"09", "right", nothing, right, moved, workspace, fp32}}};
    if (std::getenv("STUB_BAD")) {
        stage.variants.push_back({"09b", "wrong", nothing, wrong, moved, workspace, fp32});
        stage.variants.push_back({"09c", "unwritten", nothing, unwritten, moved, workspace, fp32});
        stage.variants.push_back({"09d", "exhausted", nothing, exhausted, moved, workspace, fp32});
        stage.variants.push_back({"09e", "too_large", nothing, too_large, moved, workspace, fp32});
        stage.variants.push_back({"09f", "broken", nothing, broken, moved, workspace, fp32});
    }
    if (const char* factor = std::getenv("STUB_BACKWARD")) {
        static const float times = static_cast<float>(std::atof(factor));
        stage.backward.push_back({"09x", "back", nothing, right, true, [](Backward& args) { differentiate(args, times); }, 5, moved_back,
                                  workspace, workspace, fp32});
    }
    if (std::getenv("STUB_REFUSES")) stage.variants[0].refuses = no_causal;
    return bench::bench_main(stage, argc, argv);
}
