// Detects whether a machine has a GPU or its driver, usable by this program or not.
#pragma once

#include <filesystem>
#include <string>

namespace fathom {

// Whether a device or driver file of NVIDIA's exists under `root`.
inline bool shows_gpu(const std::string& root) {
  std::error_code failure;
  for (const char* file : {"dev/nvidiactl", "dev/nvidia0", "proc/driver/nvidia/version"}) {
    if (std::filesystem::exists(std::filesystem::path(root) / file, failure)) return true;
  }
  return false;
}

}  // namespace fathom
