#include "device/cuda/graph_timer.h"

#include <algorithm>
#include <vector>

#include "device/cuda/graph.h"

namespace fathom::cuda {

double time_in_graph(int copies, const std::function<void(int, cudaStream_t)>& enqueue) {
  constexpr int kReplays = 11, kWarmUp = 3;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "creating a stream");
  const Graph graph(stream, [&] {
    for (int copy = 0; copy < copies; ++copy) enqueue(copy, stream);
  });
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  std::vector<double> times;
  for (int i = 0; i < kReplays + kWarmUp; ++i) {
    check(cudaEventRecord(begin, stream), "recording an event");
    graph.launch(stream);
    check(cudaEventRecord(end, stream), "recording an event");
    check(cudaStreamSynchronize(stream), "running a graph");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "reading events");
    if (i >= kWarmUp) times.push_back(ms * 1e3 / copies);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  cudaStreamDestroy(stream);
  std::nth_element(times.begin(), times.begin() + kReplays / 2, times.end());
  return times[kReplays / 2];
}

std::string device_line() {
  cudaDeviceProp device;
  check(cudaGetDeviceProperties(&device, 0), "asking for the device");
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the driver");
  return std::string(device.name) + ", " + std::to_string(device.multiProcessorCount) +
         " multiprocessors, driver for CUDA " + std::to_string(driver / 1000) + "." +
         std::to_string(driver % 1000 / 10);
}

}  // namespace fathom::cuda
