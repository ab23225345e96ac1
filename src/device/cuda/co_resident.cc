#include "device/cuda/co_resident.h"

#include <algorithm>
#include <cstring>

namespace fathom::cuda {
namespace {

thread_local CoResidentLog* current_log = nullptr;

}  // namespace

void require_co_resident(const char* name, const void* kernel, const LaunchShape& shape, int sms,
                         DeviceContext& device) {
  const int most = std::min(device.most_resident(kernel, shape), sms);
  const auto ctas = static_cast<int>(shape.blocks.x * shape.blocks.y * shape.blocks.z);
  if (ctas <= most) return;
  const std::string what = std::string("launching ") + name + ": its " + std::to_string(ctas) +
                           " CTAs wait for one another, and " + std::to_string(most) +
                           " can run at once";
  throw DeviceError(cudaErrorCooperativeLaunchTooLarge, what.c_str());
}

CoResidentLog::CoResidentLog() : outer_(current_log) { current_log = this; }

CoResidentLog::~CoResidentLog() { current_log = outer_; }

void CoResidentLog::add(const char* name) {
  const auto is_it = [&](const char* other) { return std::strcmp(name, other) == 0; };
  for (CoResidentLog* log = current_log; log != nullptr; log = log->outer_) {
    auto& names = log->names_;
    if (std::none_of(names.begin(), names.end(), is_it)) names.push_back(name);
  }
}

std::string CoResidentLog::text() const {
  std::string all;
  for (const char* name : names_) all += (all.empty() ? "" : ", ") + std::string(name);
  return all.empty() ? "none" : all;
}

}  // namespace fathom::cuda
