#include "device/cuda/error.h"

namespace fathom::cuda {

DeviceError::DeviceError(cudaError_t code, const char* what)
    : std::runtime_error(std::string(what) + ": " + cudaGetErrorString(code) + " (" +
                         cudaGetErrorName(code) + ")"),
      code_(code) {}

// Errors after which the runtime's reference requires a new process, and those of a lost device.
bool is_sticky(cudaError_t code) {
  switch (code) {
    case cudaErrorAssert:
    case cudaErrorContained:
    case cudaErrorContextIsDestroyed:
    case cudaErrorCudartUnloading:
    case cudaErrorDeviceUninitialized:
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorExternalDevice:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorMpsClientTerminated:
    case cudaErrorNoDevice:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // the runtime keeps the error, and a later launch would be blamed for it
  throw DeviceError(status, what);
}

}  // namespace fathom::cuda
