// Time of a launch inside a CUDA graph, where the host's part is hidden: how the engine runs its
// decode steps, and how this project's kernels are compared with others'.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <string>

namespace fathom::cuda {

// Captures enqueue(0, stream) … enqueue(copies - 1, stream) into one graph and replays it: the
// median of 11 replays, after 3, in us for each copy. The copies are to use different memory, more
// than the L2 (60 MB) holds together, as the layers of a model do.
double time_in_graph(int copies, const std::function<void(int, cudaStream_t)>& enqueue);

// "NVIDIA H200, 132 multiprocessors, driver 13.0", for the head of a table.
std::string device_line();

// What an H200 reads a second from memory larger than its L2, measured; bytes / us.
inline constexpr double kReadBytesPerUs = 4.3e6;

}  // namespace fathom::cuda
