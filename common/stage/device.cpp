#include "stage/device.hpp"
#include "simt/config.hpp"
#include "stage/stage.hpp"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace workbook {

#if !SIMT_EMULATED

namespace {

constexpr int lowest_compute_capability = 80;  // bfloat16, cp.async and mma.m16n8k16

void cuda_check(cudaError_t status, const char* doing) {
    if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + doing + ": " + cudaGetErrorString(status));
}

std::string cuda_version(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

/// An event that destroys itself.
class Event {
public:
    Event() { cuda_check(cudaEventCreate(&event_), "creating an event"); }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;

    void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream), "recording an event"); }
    void wait() const { cuda_check(cudaEventSynchronize(event_), "waiting for the kernels"); }
    double seconds_since(const Event& start) const {
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, start.event_, event_), "reading an event");
        return 1e-3 * ms;
    }

private:
    cudaEvent_t event_ = nullptr;
};

}  // namespace

Device Device::current(const Gpu*) {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver) {
        int driver = 0;
        cudaDriverGetVersion(&driver);
        const std::string has = driver == 0 ? "no NVIDIA driver is loaded" : "the driver supports CUDA " + cuda_version(driver);
        throw Refused(has + "; this program was built with CUDA " + cuda_version(CUDART_VERSION) +
                      ". Install a newer driver, or use the emulator (preset cpu)");
    }
    if (status != cudaSuccess || count == 0) {
        const std::string why = status == cudaSuccess ? "CUDA sees none" : cudaGetErrorString(status);
        throw Refused("no usable GPU: " + why + ". The emulator (preset cpu) runs every stage without one");
    }
    int id = 0;
    cuda_check(cudaGetDevice(&id), "asking for the current device");
    cudaDeviceProp properties{};
    cuda_check(cudaGetDeviceProperties(&properties, id), "asking for the device's properties");
    int opt_in = 0;
    cuda_check(cudaDeviceGetAttribute(&opt_in, cudaDevAttrMaxSharedMemoryPerBlockOptin, id), "asking for the shared memory of a block");

    Device device;
    device.name = properties.name;
    device.emulated = false;
    device.compute_capability = 10 * properties.major + properties.minor;
    device.sms = properties.multiProcessorCount;
    device.shared_memory_per_block = static_cast<std::size_t>(opt_in);
    device.l2_bytes = static_cast<std::size_t>(properties.l2CacheSize);
    if (device.compute_capability < lowest_compute_capability) {
        std::ostringstream message;
        message << device.name << " has compute capability " << properties.major << "." << properties.minor
                << "; 8.0 (Ampere) or later is accepted. The emulator (preset cpu) runs every stage";
        throw Refused(message.str());
    }
    return device;
}

void synchronize(cudaStream_t stream) { cuda_check(cudaStreamSynchronize(stream), "running a kernel"); }

Timing measure(const std::function<void()>& launch, cudaStream_t stream, std::optional<int> repeats) {
    Event start, stop;
    start.record(stream);
    launch();
    stop.record(stream);
    stop.wait();
    const double first = std::max(stop.seconds_since(start), 1e-6);

    const int n = repeats.value_or(std::clamp(static_cast<int>(std::ceil(std::min(0.5 / first, 1e6))), 3, 200));
    std::vector<Event> marks(static_cast<std::size_t>(n) + 1);
    marks[0].record(stream);
    for (int i = 1; i <= n; ++i) {
        launch();
        marks[i].record(stream);
    }
    marks[n].wait();
    std::vector<double> times(n);
    for (int i = 0; i < n; ++i) times[i] = marks[i + 1].seconds_since(marks[i]);
    std::sort(times.begin(), times.end());
    return {n % 2 ? times[n / 2] : 0.5 * (times[n / 2 - 1] + times[n / 2]), n, std::move(times)};
}

#else

Device Device::current(const Gpu* gpu) {
    Device device;
    device.name = "emulator";
    if (gpu != nullptr) {
        device.name += " (as " + std::string(gpu->name) + ")";
        device.compute_capability = gpu->compute_capability;
        device.sms = gpu->sms;
        device.shared_memory_per_block = gpu->shared_memory_per_block;
        device.l2_bytes = gpu->l2_bytes;
    }
    return device;
}

void synchronize(cudaStream_t) {}

Timing measure(const std::function<void()>&, cudaStream_t, std::optional<int>) {
    throw std::logic_error("measure: the emulator's clock says nothing about a GPU; there is nothing to time");
}

#endif

}  // namespace workbook
