// Turns of several engines of one process on a device: a step's launches run when those of the
// previous step, another engine's, have ended. The ranks that an engine has on a device share a
// turn. Kernels whose CTAs wait for one another could
// otherwise each hold a part of the SMs for ever (co_resident.h). An engine alone pays one
// uncontended mutex a step.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <span>
#include <vector>

#include "device/cuda/error.h"

namespace fathom::cuda {

// State shared by the engines of one device; owned by its DeviceContext.
struct DeviceTurns {
  std::mutex mutex;
  std::vector<cudaEvent_t> ended;  // ends of the latest step's ranks
  const void* owner = nullptr;     // of the latest step; null: none
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

  // Calls enqueue(), which enqueues a step on the streams and returns the events that it has
  // recorded after it, one a stream. The events must outlive this object.
  template <typename Enqueue>
  void take(std::span<const cudaStream_t> streams, const Enqueue& enqueue) {
    const std::scoped_lock lock(turns_.mutex);
    if (turns_.owner != nullptr && turns_.owner != this) {
      for (const cudaStream_t stream : streams) {
        for (const cudaEvent_t ended : turns_.ended) {
          check(cudaStreamWaitEvent(stream, ended, 0), "waiting for another engine's step");
        }
      }
    }
    const std::span<const cudaEvent_t> ended = enqueue();
    turns_.ended.assign(ended.begin(), ended.end());
    turns_.owner = this;
  }

 private:
  DeviceTurns& turns_;
};

}  // namespace fathom::cuda
