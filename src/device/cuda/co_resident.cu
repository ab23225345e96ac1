#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "device/cuda/co_resident.h"

namespace fathom::cuda {
namespace {

// Shared memory of a CTA that fills its SM. In a kernel of its own, so that no other kernel's
// shared-memory limit is touched.
constexpr int kAloneBytes = 200 * 1024;
constexpr int kAloneThreads = 128;
__global__ void alone_kernel() {}

int current_device() {
  int device = 0;
  check(cudaGetDevice(&device), "asking for the device");
  return device;
}

int count_clusters(int ctas) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(ctas), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(kAloneThreads);
  config.dynamicSmemBytes = kAloneBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int count = 0;
  check(cudaOccupancyMaxActiveClusters(&count, alone_kernel, &config), "counting clusters");
  return count;
}

SmBudget measure() {
  allow_shared_memory(alone_kernel, kAloneBytes);
  return {num_multiprocessors(),
          {count_clusters(1), count_clusters(2), count_clusters(4), count_clusters(8)}};
}

int most_resident(const void* kernel, const LaunchShape& shape) {
  if (shape.cluster == 1) {
    int each = 0;
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
              &each, kernel, static_cast<int>(shape.threads), shape.shared_bytes),
          "asking how many CTAs an SM holds");
    return each * num_multiprocessors();
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {shape.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.blocks;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config),
        "asking how many clusters the device holds");
  return clusters * static_cast<int>(shape.cluster);
}

thread_local CoResidentLog* current_log = nullptr;

}  // namespace

SmBudget device_budget() {
  static std::mutex mutex;
  static std::map<int, SmBudget> budgets;  // by device
  const int device = current_device();
  const std::scoped_lock lock(mutex);
  const auto found = budgets.find(device);
  if (found != budgets.end()) return found->second;
  return budgets.emplace(device, measure()).first->second;
}

bool shares_device_by_mps() {
  static std::mutex mutex;
  static std::map<int, bool> shares;  // by device
  const int device = current_device();
  const std::scoped_lock lock(mutex);
  const auto found = shares.find(device);
  if (found != shares.end()) return found->second;
  int value = 0;
  check(cudaDeviceGetAttribute(&value, cudaDevAttrMpsEnabled, device), "asking for MPS");
  return shares.emplace(device, value != 0).first->second;
}

void require_co_resident(const char* name, const void* kernel, const LaunchShape& shape, int sms) {
  using Key = std::tuple<int, const void*, unsigned, unsigned, unsigned>;
  static std::mutex mutex;
  static std::map<Key, int> kept;
  const Key key = {current_device(), kernel, shape.threads, shape.shared_bytes, shape.cluster};
  int resident;
  {
    const std::scoped_lock lock(mutex);
    auto found = kept.find(key);
    if (found == kept.end()) found = kept.emplace(key, most_resident(kernel, shape)).first;
    resident = found->second;
  }
  const auto ctas = static_cast<int>(shape.blocks.x * shape.blocks.y * shape.blocks.z);
  if (ctas <= std::min(resident, sms)) return;
  const std::string what = std::string("launching ") + name + ": its " + std::to_string(ctas) +
                           " CTAs wait for one another, and " +
                           std::to_string(std::min(resident, sms)) + " can run at once";
  throw DeviceError(cudaErrorCooperativeLaunchTooLarge, what.c_str());
}

CoResidentLog::CoResidentLog() : outer_(current_log) { current_log = this; }

CoResidentLog::~CoResidentLog() { current_log = outer_; }

void CoResidentLog::add(const char* name) {
  if (current_log == nullptr) return;
  auto& names = current_log->names_;
  const auto is_it = [&](const char* other) { return std::strcmp(name, other) == 0; };
  if (std::none_of(names.begin(), names.end(), is_it)) names.push_back(name);
}

std::string CoResidentLog::text() const {
  std::string all;
  for (const char* name : names_) all += (all.empty() ? "" : ", ") + std::string(name);
  return all.empty() ? "none" : all;
}

}  // namespace fathom::cuda
