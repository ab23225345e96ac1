// Time of a launch inside a CUDA graph, where the host's part is hidden: as the engine runs its
// decode steps, and as kernels are compared.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace fathom::cuda {

// Captures enqueue(0, stream) … enqueue(copies - 1, stream) into one graph and replays it: returns
// the median of 11 replays, after 3, in us for each copy. The copies should use different memory,
// together more than the L2 (60 MB), as a model's layers do.
double time_in_graph(int copies, const std::function<void(int, cudaStream_t)>& enqueue);

// "NVIDIA H200, 132 SMs, driver 13.0", for the head of a table.
std::string device_line();

// Measured read rate of an H200 from memory larger than its L2; bytes / us.
inline constexpr double kReadBytesPerUs = 4.3e6;

}  // namespace fathom::cuda
