#include "device/cuda/error.h"

namespace fathom::cuda {

DeviceError::DeviceError(cudaError_t code, const char* what)
    : std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code) + " (" +
                         cudaGetErrorName(code) + ")"),
      code_(code) {}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw DeviceError(status, what);
}

}  // namespace fathom::cuda
