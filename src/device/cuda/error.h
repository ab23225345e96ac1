// What a GPU refuses. A device's failure is no caller's mistake: it is thrown, and caught once, by
// the thread that owns the device.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fathom::cuda {

class DeviceError : public std::runtime_error {
 public:
  DeviceError(cudaError_t code, const char* what);

  cudaError_t code() const { return code_; }

 private:
  cudaError_t code_;
};

// Throws a DeviceError that says `what` was being done.
void check(cudaError_t status, const char* what);

}  // namespace fathom::cuda
