// A second stream of a device, for launches beside those of a main one, and the order between two
// streams. Each owns its CUDA object, is made on the current device, and is used by one thread at a
// time.
#pragma once

#include <cuda_runtime_api.h>

#include "device/cuda/error.h"

namespace fathom::cuda {

class SideStream {
 public:
  SideStream() {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
  }
  ~SideStream() { cudaStreamDestroy(stream_); }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A place in a stream. It can be set anew any number of times: a wait is for the place that was set
// last when the wait was enqueued.
class StreamMark {
 public:
  StreamMark() {
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "creating an event");
  }
  ~StreamMark() { cudaEventDestroy(event_); }
  StreamMark(const StreamMark&) = delete;
  StreamMark& operator=(const StreamMark&) = delete;

  // Behind all that `stream` has been given so far.
  void set(cudaStream_t stream) const { check(cudaEventRecord(event_, stream), "a stream's mark"); }
  // What `stream` is given from now on begins when the marked stream has come here.
  void await(cudaStream_t stream) const {
    check(cudaStreamWaitEvent(stream, event_, 0), "waiting for a stream's mark");
  }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace fathom::cuda
