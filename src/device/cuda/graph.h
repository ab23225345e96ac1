// A CUDA graph: launches that are captured once and launched as one.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <utility>

#include "device/cuda/error.h"

namespace fathom::cuda {

class Graph {
 public:
  Graph() = default;
  // Captures what enqueue() enqueues on the stream, which must not be the legacy stream; nothing
  // of it runs. The upload to the device is enqueued on the stream: left to the first launch, it
  // can wait for a device on which another rank's kernels wait for this launch.
  Graph(cudaStream_t stream, const std::function<void()>& enqueue) {
    cudaGraph_t graph = nullptr;
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "beginning a capture");
    try {
      enqueue();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      cudaGraphDestroy(graph);
      throw;
    }
    check(cudaStreamEndCapture(stream, &graph), "ending a capture");
    const cudaError_t status = cudaGraphInstantiate(&graph_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, "instantiating a graph");
    check(cudaGraphUpload(graph_, stream), "uploading a graph");
  }
  ~Graph() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  Graph(Graph&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}
  Graph& operator=(Graph&& other) noexcept {
    std::swap(graph_, other.graph_);
    return *this;
  }

  void launch(cudaStream_t stream) const {
    check(cudaGraphLaunch(graph_, stream), "launching a graph");
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

}  // namespace fathom::cuda
