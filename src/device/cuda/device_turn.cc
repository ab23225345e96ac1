#include "device/cuda/device_turn.h"

#include <map>

namespace fathom::cuda {

DeviceTurn::Device& DeviceTurn::current_device() {
  static std::mutex mutex;
  static std::map<int, Device> devices;
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  const std::scoped_lock lock(mutex);
  return devices[device];
}

DeviceTurn::DeviceTurn() : device_(current_device()) {}

DeviceTurn::~DeviceTurn() {
  const std::scoped_lock lock(device_.mutex);
  if (device_.owner == this) device_.owner = nullptr;
}

}  // namespace fathom::cuda
