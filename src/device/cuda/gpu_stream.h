// A CUDA stream with its device: the last argument of every operation on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include "device/cuda/device_context.h"

namespace fathom::cuda {

// Passed by value; owns nothing. The device is the calling thread's current one wherever something
// is enqueued.
class GpuStream {
 public:
  GpuStream(DeviceContext& device, cudaStream_t stream) : device_(&device), stream_(stream) {}
  // A stream of the current device; null is its default stream. Implicit, for callers that know
  // only streams: captures, timers.
  GpuStream(cudaStream_t stream) : GpuStream(DeviceContext::current(), stream) {}

  DeviceContext& device() const { return *device_; }
  operator cudaStream_t() const { return stream_; }

 private:
  DeviceContext* device_;
  cudaStream_t stream_;
};

}  // namespace fathom::cuda
