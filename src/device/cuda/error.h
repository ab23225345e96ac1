// Errors of a GPU. A device failure is not the caller's mistake: it is thrown, and caught once, by
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

// Whether an error is sticky: the device is gone or the context corrupt, every later call fails,
// and only a new process can go on. Others, such as too little memory, concern one call.
bool is_sticky(cudaError_t code);

// Throws a DeviceError that names the failed action `what`.
void check(cudaError_t status, const char* what);

}  // namespace fathom::cuda
