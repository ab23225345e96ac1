// One GPU as this process sees it: its attributes, the SMs that launches may count on, and the
// limits that have been raised for kernels. The runtime keeps such limits for a process and device,
// so that a process has one context a device, for as long as it runs; engines on the device share
// it. Launches find it through their stream (GpuStream).
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "device/cuda/device_turn.h"
#include "device/sm_budget.h"

namespace fathom::cuda {

struct LaunchShape;

// All functions may be called on any thread. Those that take a kernel require that the device is
// the calling thread's current one, as launching does.
class DeviceContext {
 public:
  // The context of a device, made at the first call. Throws if there is no such device.
  static DeviceContext& of(int device);
  // The context of the calling thread's current device.
  static DeviceContext& current();

  DeviceContext(const DeviceContext&) = delete;
  DeviceContext& operator=(const DeviceContext&) = delete;

  int device() const { return device_; }
  // Makes the device the calling thread's current one.
  void make_current() const;

  int num_multiprocessors() const { return budget_.sms; }
  // The whole device.
  const SmBudget& budget() const { return budget_; }
  // Whether other processes share the device through MPS.
  bool is_shared_by_mps() const { return is_shared_by_mps_; }
  // Engines of this process take turns on the device (DeviceTurn).
  DeviceTurns& turns() { return turns_; }

  // Allows a kernel so many bytes of dynamic shared memory; up to 48 KB need no permission. Never
  // lowers the limit: another launch may rely on it.
  template <typename Kernel>
  void allow_shared_memory(Kernel* kernel, int bytes) {
    raise_shared_memory(reinterpret_cast<const void*>(kernel), bytes);
  }
  // Allows a kernel clusters of up to 16 CTAs; up to 8 need no permission.
  template <typename Kernel>
  void allow_large_clusters(Kernel* kernel) {
    raise_cluster_size(reinterpret_cast<const void*>(kernel));
  }
  // CTAs of such a launch that can be resident at once. Asked once for each kernel and shape.
  int most_resident(const void* kernel, const LaunchShape& shape);

 private:
  // Limits that are known to be raised.
  struct KernelLimits {
    int shared_bytes = 0;
    bool large_clusters = false;
  };
  using ResidentKey = std::tuple<const void*, unsigned, unsigned, unsigned>;

  friend class DeviceContexts;
  explicit DeviceContext(int device);

  void require_current() const;
  void raise_shared_memory(const void* kernel, int bytes);
  void raise_cluster_size(const void* kernel);

  const int device_;
  SmBudget budget_;
  bool is_shared_by_mps_ = false;
  DeviceTurns turns_;
  std::mutex mutex_;  // guards what follows
  std::unordered_map<const void*, KernelLimits> limits_;
  std::map<ResidentKey, int> resident_;
};

}  // namespace fathom::cuda
