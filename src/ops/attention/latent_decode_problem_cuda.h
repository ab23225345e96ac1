// A batch for the tests and the benchmark of latent decode attention on a GPU: random queries and
// pages in device memory, scattered pages, and a plan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "ops/attention/latent_decode_cuda.h"

namespace fathom::cuda {

// Ends the program with what failed: for tests and benchmarks.
void require(cudaError_t status, const char* what);

// Device memory that owns itself.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count) {
    require(cudaMalloc(reinterpret_cast<void**>(&data_), bytes()), "cudaMalloc");
  }
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(std::ssize(values)) {
    require(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  int64_t size() const { return count_; }
  size_t bytes() const { return static_cast<size_t>(count_) * sizeof(T); }
  std::vector<T> to_host() const {
    std::vector<T> values(static_cast<size_t>(count_));
    require(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost), "cudaMemcpy");
    return values;
  }

 private:
  T* data_ = nullptr;
  int64_t count_;
};

// Bits of a bf16 number near `value`.
uint16_t bf16_bits(float value);
float from_bf16(uint16_t bits);

// A problem's arrays on the host; pages are chosen by shuffling those that there are.
struct LatentDecodeProblem {
  LatentDecodeProblem(int heads, std::vector<int32_t> total_lens, std::vector<int32_t> queries,
                      int64_t num_pages, uint32_t seed);

  PagedBatch batch() const { return {query_start, context_lens, block_tables, max_pages}; }
  int64_t rows() const { return int64_t{query_start.back()} * heads; }

  int heads;
  std::vector<int32_t> query_start = {0}, context_lens, block_tables, sequences;
  int32_t max_pages = 0;
};

// Random values, about normal with this deviation.
std::vector<uint16_t> random_bf16(int64_t count, float deviation, std::mt19937& random);

}  // namespace fathom::cuda
