/// @file
/// The GPU side of simt: shared memory and launches. Everything else is CUDA's own.
#pragma once

#include "simt/launch_config.hpp"

#include <string>
#include <utility>

namespace simt {
namespace detail {

inline void check_cuda(cudaError_t status, const LaunchConfig& config, const char* call) {
    if (status == cudaSuccess) return;
    throw Error("launch of " + std::string(config.name) + ": " + call + ": " + cudaGetErrorString(status));
}

/// From compute capability 9.0 on.
inline bool has_early_launches() {
    int device = 0, major = 0;
    return cudaGetDevice(&device) == cudaSuccess &&
           cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major >= 9;
}

#if defined(__CUDACC__)
template <class Kernel>
void allow_shared_memory(Kernel kernel, const LaunchConfig& config) {
    if (config.smem > 48 * 1024)
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(config.smem)), config,
                   "cudaFuncSetAttribute");
}

inline cudaLaunchAttribute cluster_attribute(const LaunchConfig& config) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {config.cluster.x, config.cluster.y, config.cluster.z};
    return attribute;
}

template <class... Params>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Params... args) {
    allow_shared_memory(kernel, config);
    cudaLaunchAttribute attributes[2] = {};
    unsigned count = 0;
    if (config.cluster.x * config.cluster.y * config.cluster.z > 1) attributes[count++] = cluster_attribute(config);
    if (config.early && has_early_launches()) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t launch{};
    launch.gridDim = config.grid;
    launch.blockDim = config.block;
    launch.dynamicSmemBytes = config.smem;
    launch.stream = config.exec ? config.exec->stream : nullptr;
    launch.attrs = attributes;
    launch.numAttrs = count;
    check_cuda(cudaLaunchKernelEx(&launch, kernel, args...), config, "cudaLaunchKernelEx");
}

template <class... Params>
int resident_clusters(void (*kernel)(Params...), const LaunchConfig& config, int /*sms*/) {
    allow_shared_memory(kernel, config);
    cudaLaunchAttribute attribute = cluster_attribute(config);
    cudaLaunchConfig_t launch{};
    launch.gridDim = config.cluster;
    launch.blockDim = config.block;
    launch.dynamicSmemBytes = config.smem;
    launch.attrs = &attribute;
    launch.numAttrs = 1;
    int clusters = 0;
    check_cuda(cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch), config, "cudaOccupancyMaxActiveClusters");
    return clusters;
}
#endif

}  // namespace detail

#if defined(__CUDACC__)
namespace detail {
SIMT_DEVICE unsigned char* shared_memory() {
    extern __shared__ __align__(1024) unsigned char simt_shared_memory[];
    return simt_shared_memory;
}
}  // namespace detail

/// The block's dynamic shared memory as one struct.
template <class T>
SIMT_DEVICE T& shared() {
    return *reinterpret_cast<T*>(detail::shared_memory());
}

/// A matrix in shared memory: tile(r, c). Plain addressing on the GPU; in emulation bounds and races are checked.
template <class T>
struct SharedTile {
    T* data;
    int pitch;
    SIMT_DEVICE T& operator()(int r, int c) const { return data[r * pitch + c]; }
};

/// A vector in shared memory: v(i).
template <class T>
struct SharedVector {
    T* data;
    SIMT_DEVICE T& operator()(int i) const { return data[i]; }
};

/// Hands out the block's dynamic shared memory piece by piece, for kernels whose tile sizes are known at run time only.
class SharedArena {
public:
    /// rows x cols elements, `pitch` elements from one row to the next (more than cols where rows are padded against bank conflicts).
    template <class T>
    SIMT_DEVICE SharedTile<T> tile(const char* /*name*/, int rows, int /*cols*/, int pitch) {
        SharedTile<T> t{reinterpret_cast<T*>(detail::shared_memory() + used_), pitch};
        used_ += rows * pitch * static_cast<int>(sizeof(T));
        return t;
    }
    template <class T>
    SIMT_DEVICE SharedVector<T> vector(const char* /*name*/, int count) {
        SharedVector<T> v{reinterpret_cast<T*>(detail::shared_memory() + used_)};
        used_ += count * static_cast<int>(sizeof(T));
        return v;
    }

private:
    int used_ = 0;  // bytes
};
#endif

}  // namespace simt
