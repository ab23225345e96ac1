// The GPUs of tests and benchmarks of ranks: spread over those that there are, in turns; with one
// GPU they share it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <vector>

#include "device/cuda/error.h"

namespace fathom::cuda {

// Ranks that share a device wait for one another's launches: each stream needs a hardware queue of
// its own. Read when the device is first used.
[[maybe_unused]] inline const int kTrialQueues = setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);

inline int num_gpus() {
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting GPUs");
  return count;
}

inline std::vector<int> trial_devices(int ranks) {
  std::vector<int> devices;
  for (int r = 0; r < ranks; ++r) devices.push_back(r % num_gpus());
  return devices;
}

// Makes a device current and returns it.
inline int use_device(int device) {
  check(cudaSetDevice(device), "choosing a device");
  return device;
}

}  // namespace fathom::cuda
