// Turns of several engines of one process on a device: a step's launches run when those of the
// previous step, another engine's, have ended. Kernels whose CTAs wait for one another could
// otherwise each hold a part of the SMs for ever (co_resident.h). An engine alone pays one
// uncontended mutex a step.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>

#include "device/cuda/error.h"

namespace fathom::cuda {

// State shared by the engines of one device; owned by its DeviceContext.
struct DeviceTurns {
  std::mutex mutex;
  cudaEvent_t ended = nullptr;  // end of the latest step, and its owner; null: none
  const void* owner = nullptr;
};

// One engine's turn on a device. Used by one thread at a time; engines may be on different threads.
class DeviceTurn {
 public:
  explicit DeviceTurn(DeviceTurns& turns) : turns_(turns) {}
  // Requires that the engine's launches have ended.
  ~DeviceTurn() {
    const std::scoped_lock lock(turns_.mutex);
    if (turns_.owner == this) turns_.owner = nullptr;
  }
  DeviceTurn(const DeviceTurn&) = delete;
  DeviceTurn& operator=(const DeviceTurn&) = delete;

  // Calls enqueue(), which enqueues a step on the stream and returns the event that it has recorded
  // after it. The event must outlive this object.
  template <typename Enqueue>
  void take(cudaStream_t stream, const Enqueue& enqueue) {
    const std::scoped_lock lock(turns_.mutex);
    if (turns_.owner != nullptr && turns_.owner != this) {
      check(cudaStreamWaitEvent(stream, turns_.ended, 0), "waiting for another engine's step");
    }
    turns_.ended = enqueue();
    turns_.owner = this;
  }

 private:
  DeviceTurns& turns_;
};

}  // namespace fathom::cuda
