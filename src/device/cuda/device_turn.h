// Turns of several engines of one process on a device: a step's launches run when those of the
// previous step, another engine's, have ended. Kernels whose CTAs wait for one another could
// otherwise each hold a part of the SMs for ever (co_resident.h). An engine alone pays one
// uncontended mutex a step.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "device/cuda/error.h"

namespace fathom::cuda {

// One engine's turn, on the device that is current at construction. Used by one thread at a time;
// engines may be on different threads.
class DeviceTurn {
 public:
  DeviceTurn();
  // Requires that the engine's launches have ended.
  ~DeviceTurn();
  DeviceTurn(const DeviceTurn&) = delete;
  DeviceTurn& operator=(const DeviceTurn&) = delete;

  // Calls enqueue(), which enqueues a step on the stream and returns the event that it has recorded
  // after it. The event must outlive this object.
  template <typename Enqueue>
  void take(cudaStream_t stream, const Enqueue& enqueue) {
    const std::scoped_lock lock(device_.mutex);
    if (device_.owner != nullptr && device_.owner != this) {
      check(cudaStreamWaitEvent(stream, device_.ended, 0), "waiting for another engine's step");
    }
    device_.ended = enqueue();
    device_.owner = this;
  }

 private:
  // State shared by the engines of one device.
  struct Device {
    std::mutex mutex;
    cudaEvent_t ended = nullptr;  // end of the latest step, and its owner; null: none
    const DeviceTurn* owner = nullptr;
  };
  static Device& current_device();

  Device& device_;
};

}  // namespace fathom::cuda
