// Whether a machine shows a GPU or its driver, whatever this program can do with it.
#pragma once

#include <filesystem>
#include <string>

namespace fathom {

// The files that NVIDIA's driver and containers with a GPU have, under `root`.
inline bool shows_gpu(const std::string& root) {
  std::error_code failure;
  for (const char* file : {"dev/nvidiactl", "dev/nvidia0", "proc/driver/nvidia/version"}) {
    if (std::filesystem::exists(std::filesystem::path(root) / file, failure)) return true;
  }
  return false;
}

}  // namespace fathom
