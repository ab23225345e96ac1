#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include <cstdlib>

#include "engine/gpu_presence.h"
#include "engine/gpu_runner.h"

namespace fathom {
namespace {

constexpr int kMajor = 9;  // the kernels need compute capability 9.0, see cmake/FathomTargets.cmake

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, name, device) == cudaSuccess ? value : 0;
}

int usable_gpus() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) return 0;
  int usable = 0;
  while (usable < count && attribute(cudaDevAttrComputeCapabilityMajor, usable) == kMajor) {
    ++usable;  // --device counts from 0, so devices after an unsupported one are out of reach
  }
  return usable;
}

}  // namespace

void expect_gpu_ranks() {
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

int num_gpus() {
  static const int count = usable_gpus();
  return count;
}

std::string why_no_gpu(const std::string& root) {
  if (num_gpus() > 0) return "";
  int count = 0;
  const cudaError_t problem = cudaGetDeviceCount(&count);
  if (problem == cudaSuccess && count > 0) {
    return fmt::format("GPU 0 has compute capability {}.{}, the kernels are for {}.0",
                       attribute(cudaDevAttrComputeCapabilityMajor, 0),
                       attribute(cudaDevAttrComputeCapabilityMinor, 0), kMajor);
  }
  if (!shows_gpu(root)) return "";
  return fmt::format("CUDA finds no device: {}", cudaGetErrorString(problem));
}

}  // namespace fathom
