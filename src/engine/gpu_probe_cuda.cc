#include <algorithm>
#include <vector>

#include "device/cuda/device_array.h"
#include "engine/gpu_runner.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/linear_cuda.h"

namespace fathom {
namespace {

using cuda::check;

constexpr int64_t kCopyBytes = int64_t{1} << 30;
constexpr int32_t kMatrix = 8192;
constexpr int kTries = 5;

// Returns the shortest time of several runs, in seconds.
template <typename Body>
double fastest(const Body& body) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "creating an event");
  check(cudaEventCreate(&end), "creating an event");
  float best = 0;
  for (int i = 0; i < kTries; ++i) {
    check(cudaEventRecord(begin, nullptr), "recording an event");
    body();
    check(cudaEventRecord(end, nullptr), "recording an event");
    check(cudaEventSynchronize(end), "measuring the device");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, begin, end), "reading events");
    best = i == 0 ? ms : std::min(best, ms);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  return best * 1e-3;
}

// Non-zero values: multiplying zeros takes less power, so it runs at higher clocks.
std::vector<bf16> some_values(int64_t count) {
  std::vector<bf16> values(static_cast<size_t>(count));
  uint32_t state = 1;
  for (bf16& value : values) {
    state = state * 1664525 + 1013904223;
    value = to_bf16(static_cast<float>(state >> 8) * 0x1p-23f - 1.0f);
  }
  return values;
}

}  // namespace

Result<GpuRates> measure_gpu(int device) {
  try {
    check(cudaSetDevice(device), "choosing the device");
    GpuRates rates;
    {
      const cuda::DeviceArray<std::byte> from(kCopyBytes), to(kCopyBytes);
      rates.copy_bandwidth = 2.0 * kCopyBytes / fastest([&] {
                               check(cudaMemcpyAsync(to.data(), from.data(), kCopyBytes,
                                                     cudaMemcpyDeviceToDevice, nullptr),
                                     "copying on the device");
                             });
    }
    const cuda::DeviceArray<bf16> x(some_values(int64_t{kMatrix} * kMatrix)),
        weight(some_values(int64_t{kMatrix} * kMatrix)), out(int64_t{kMatrix} * kMatrix);
    rates.matrix_flops = 2.0 * kMatrix * kMatrix * kMatrix / fastest([&] {
                           cuda::linear({.x = x.data(),
                                         .x_row_stride = kMatrix,
                                         .weight = weight.data(),
                                         .out = out.data(),
                                         .out_row_stride = kMatrix,
                                         .rows = kMatrix,
                                         .n = kMatrix,
                                         .k = kMatrix},
                                        nullptr);
                         });
    return rates;
  } catch (const cuda::DeviceError& failure) {
    return error(Code::kInternal, "{}", failure.what());
  }
}

std::string gpu_name(int device) {
  cudaDeviceProp properties;
  int driver = 0;
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess ||
      cudaDriverGetVersion(&driver) != cudaSuccess) {
    return "";
  }
  return fmt::format("{}, driver for CUDA {}.{}", properties.name, driver / 1000,
                     driver % 1000 / 10);
}

std::string cublas_lt_version() { return cuda::cublas_lt_version(); }

}  // namespace fathom
