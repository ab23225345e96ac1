#include <algorithm>
#include <memory>

#include "device/cuda/device_context.h"
#include "device/cuda/error.h"
#include "device/cuda/launch.h"

namespace fathom::cuda {
namespace {

// Shared memory of a CTA that fills its SM. In a kernel of its own, so that no other kernel's
// shared-memory limit is touched.
constexpr int kAloneBytes = 200 * 1024;
constexpr int kAloneThreads = 128;
__global__ void alone_kernel() {}

int attribute(cudaDeviceAttr name, int device, const char* what) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, name, device), what);
  return value;
}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  return device;
}

// Makes a device current for a scope.
class Current {
 public:
  explicit Current(int device) : before_(current_device()) {
    check(cudaSetDevice(device), "choosing the device");
  }
  ~Current() { cudaSetDevice(before_); }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const int before_;
};

int count_clusters(const void* kernel, dim3 blocks, unsigned threads, unsigned shared_bytes,
                   unsigned ctas) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {ctas, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, kernel, &config),
        "asking how many clusters the device holds");
  return count;
}

int count_lone_clusters(unsigned ctas) {
  return count_clusters(reinterpret_cast<const void*>(alone_kernel), dim3(ctas), kAloneThreads,
                        kAloneBytes, ctas);
}

}  // namespace

// The contexts of this process, by device: the one place that holds state of devices.
class DeviceContexts {
 public:
  static DeviceContext& of(int device) {
    static DeviceContexts contexts;
    const std::scoped_lock lock(contexts.mutex_);
    std::unique_ptr<DeviceContext>& context = contexts.by_device_[device];
    if (!context) context.reset(new DeviceContext(device));
    return *context;
  }

 private:
  std::mutex mutex_;
  std::map<int, std::unique_ptr<DeviceContext>> by_device_;
};

DeviceContext& DeviceContext::of(int device) { return DeviceContexts::of(device); }

DeviceContext& DeviceContext::current() { return DeviceContexts::of(current_device()); }

DeviceContext::DeviceContext(int device) : device_(device) {
  const Current current(device);
  allow_shared_memory(alone_kernel, kAloneBytes);
  budget_ = {attribute(cudaDevAttrMultiProcessorCount, device, "asking for the number of SMs"),
             {count_lone_clusters(1), count_lone_clusters(2), count_lone_clusters(4),
              count_lone_clusters(8)}};
  is_shared_by_mps_ = attribute(cudaDevAttrMpsEnabled, device, "asking for MPS") != 0;
}

void DeviceContext::make_current() const { check(cudaSetDevice(device_), "choosing the device"); }

// The runtime raises a limit of the current device.
void DeviceContext::require_current() const {
  if (current_device() != device_) {
    check(cudaErrorInvalidDevice, "preparing a kernel for a device that is not the current one");
  }
}

void DeviceContext::raise_shared_memory(const void* kernel, int bytes) {
  const std::scoped_lock lock(mutex_);
  KernelLimits& known = limits_[kernel];
  if (known.shared_bytes >= bytes) return;
  require_current();
  cudaFuncAttributes attributes = {};
  check(cudaFuncGetAttributes(&attributes, kernel), "asking for a kernel's shared memory");
  if (attributes.maxDynamicSharedSizeBytes < bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
          "raising a kernel's shared memory");
  }
  known.shared_bytes = std::max(bytes, attributes.maxDynamicSharedSizeBytes);
}

void DeviceContext::raise_cluster_size(const void* kernel) {
  const std::scoped_lock lock(mutex_);
  KernelLimits& known = limits_[kernel];
  if (known.large_clusters) return;
  require_current();
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1),
        "raising a kernel's cluster size");
  known.large_clusters = true;
}

int DeviceContext::most_resident(const void* kernel, const LaunchShape& shape) {
  const ResidentKey key = {kernel, shape.threads, shape.shared_bytes, shape.cluster};
  const std::scoped_lock lock(mutex_);
  const auto found = resident_.find(key);
  if (found != resident_.end()) return found->second;
  require_current();
  int ctas = 0;
  if (shape.cluster == 1) {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
              &ctas, kernel, static_cast<int>(shape.threads), shape.shared_bytes),
          "asking how many CTAs an SM holds");
    ctas *= num_multiprocessors();
  } else {
    ctas = count_clusters(kernel, shape.blocks, shape.threads, shape.shared_bytes, shape.cluster) *
           static_cast<int>(shape.cluster);
  }
  return resident_.emplace(key, ctas).first->second;
}

}  // namespace fathom::cuda
