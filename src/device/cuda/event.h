// A point in a stream that the host can wait for.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "device/cuda/error.h"

namespace fathom::cuda {

// Belongs to the device that is current when it is first recorded.
class Event {
 public:
  Event() = default;
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&& other) noexcept {
    std::swap(event_, other.event_);
    return *this;
  }

  void record(cudaStream_t stream) {
    if (event_ == nullptr) {
      check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
    }
    check(cudaEventRecord(event_, stream), "recording an event");
  }
  cudaEvent_t get() const { return event_; }  // null before it is recorded

  // Returns at once if it was never recorded.
  void wait() const {
    if (event_ != nullptr) check(cudaEventSynchronize(event_), "waiting for the device");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace fathom::cuda
