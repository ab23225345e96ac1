// GEMMs of many rows on the GPU: time of a launch in a CUDA graph of several launches with
// different operands that together exceed the L2. cuBLASLt is timed beside it where it is
// installed. Long GEMMs heat the GPU, which then clocks lower: all candidates take turns, three
// times, and the median of three medians counts.
//
//   many_rows_cuda_bench [--json] [--tiles] [--most ROWS]      --tiles: each tile's time, too
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/linear/cublas_lt_product_cuda.h"
#include "ops/linear/many_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr double kFlopPerUs = 790e6;  // bf16 rate that an H200 reaches on random data

struct Matrix {
  int n, k, batches = 1;
  DType out_type = DType::kBF16;
};

struct Shape : Matrix {
  int m;
};

DeviceArray<uint16_t> random_matrix(int64_t elements) {
  static const DeviceArray<uint16_t> some([] {
    std::mt19937 random(1);
    return random_bf16(1 << 22, 0.5f, random);
  }());
  DeviceArray<uint16_t> matrix(elements);
  for (int64_t at = 0; at < elements; at += some.size()) {
    const int64_t count = std::min(some.size(), elements - at);
    check(cudaMemcpyAsync(matrix.data() + at, some.data(), static_cast<size_t>(count) * 2,
                          cudaMemcpyDeviceToDevice, nullptr),
          "filling a matrix");
  }
  check(cudaDeviceSynchronize(), "filling a matrix");
  return matrix;
}

class Bench {
 public:
  explicit Bench(const Shape& shape) : shape_(shape) {
    const int64_t m = shape.m, n = shape.n, k = shape.k, batches = shape.batches;
    const int64_t out_bytes = m * n * batches * size_of(shape.out_type);
    const int64_t bytes = 2 * batches * (m * k + n * k) + out_bytes;
    copies_ = static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / bytes + 1, 3, 24));
    for (int copy = 0; copy < copies_; ++copy) {
      x_.push_back(random_matrix(batches * m * k));
      weight_.push_back(random_matrix(batches * n * k));
      out_.emplace_back(out_bytes);
    }
  }

  using Multiply = std::function<void(const LinearArguments&, cudaStream_t)>;

  // Time of each candidate.
  std::vector<double> us(const std::vector<Multiply>& candidates) const {
    constexpr size_t kRounds = 3;
    std::vector<std::vector<double>> times(candidates.size());
    for (size_t round = 0; round < kRounds; ++round) {
      for (size_t i = 0; i < candidates.size(); ++i) times[i].push_back(us(candidates[i]));
    }
    std::vector<double> medians;
    for (auto& all : times) {
      std::ranges::sort(all);
      medians.push_back(all[kRounds / 2]);
    }
    return medians;
  }

  double tflops(double us) const {
    return 2e-6 * shape_.m * shape_.n * shape_.k * shape_.batches / us;
  }

 private:
  double us(const Multiply& multiply) const {
    return time_in_graph(copies_, [&](int copy, cudaStream_t stream) {
      const auto c = static_cast<size_t>(copy);
      multiply({.x = x_[c].data(),
                .x_row_stride = int64_t{shape_.k} * shape_.batches,
                .x_batch_stride = shape_.k,
                .weight = weight_[c].data(),
                .out = out_[c].data(),
                .out_row_stride = int64_t{shape_.n} * shape_.batches,
                .out_batch_stride = shape_.n,
                .out_type = shape_.out_type,
                .rows = shape_.m,
                .n = shape_.n,
                .k = shape_.k,
                .batches = shape_.batches},
               stream);
    });
  }

  Shape shape_;
  int copies_;
  std::vector<DeviceArray<uint16_t>> x_, weight_;
  std::vector<DeviceArray<uint8_t>> out_;
};

std::string name(const ManyRowsTile& tile) {
  char text[64];
  std::snprintf(text, sizeof(text), "%dx%d k/%d", tile.rows(), tile.columns, tile.split);
  return text;
}

constexpr int kRows[] = {64, 128, 256, 512, 1024, 2048, 4096, 8192};
constexpr Matrix kMatrices[] = {{3648, 2048},
                                {2048, 2048},
                                {21888, 2048},
                                {2048, 10944},
                                {4096, 512},
                                {512, 128, 16},
                                {128, 512, 16},
                                {102400, 2048, 1, DType::kF32},
                                {2112, 7168},
                                {24576, 1536},
                                {32768, 512},
                                {512, 128, 128},
                                {128, 512, 128},
                                {7168, 16384},
                                {256, 7168, 1, DType::kF32},
                                {4096, 7168},
                                {7168, 2048}};

int run(bool json, bool tiles, int most_rows) {
  const DeviceArray<uint8_t> workspace(CublasLt::kWorkspaceBytes);
  const auto library = CublasLt::load(workspace.data());
  std::vector<Shape> shapes;
  for (const Matrix& matrix : kMatrices) {
    for (const int m : kRows) {
      if (m > most_rows) continue;
      if (matrix.n == 102400 && m > 512) continue;
      if (matrix.k > 4096 && matrix.n > 4096 && m > 4096) continue;
      shapes.push_back({matrix, m});
    }
  }
  std::printf(json ? "{\"device\": \"%s\", \"results\": [" : "%s\n", device_line().c_str());
  if (!json)
    std::printf("    m      n     k  batches        us TFLOP/s  %%   cuBLASLt us  ratio  tile\n");
  const char* separator = "";
  for (const Shape& shape : shapes) {
    const Bench bench(shape);
    const ManyRowsProblem problem = {
        .rows = shape.m, .n = shape.n, .k = shape.k, .batches = shape.batches};
    const ManyRowsTile tile =
        plan_many_rows(problem, DeviceContext::current().num_multiprocessors()).tile;
    std::vector<Bench::Multiply> candidates = {
        [](const LinearArguments& a, cudaStream_t s) { linear(a, s); },
        [&](const LinearArguments& a, cudaStream_t s) {
          if (library != nullptr) library->multiply(a, s);
        }};
    std::vector<ManyRowsTile> others;
    if (tiles) {
      std::ranges::copy_if(many_rows_tiles(), std::back_inserter(others), [&](ManyRowsTile other) {
        return can_be_planned(problem, other, DeviceContext::current().num_multiprocessors());
      });
    }
    for (const ManyRowsTile& other : others) {
      candidates.push_back(
          [&,
           plan = plan_many_rows(problem, other, DeviceContext::current().num_multiprocessors())](
              const LinearArguments& a, cudaStream_t s) { linear_many_rows(a, plan, s); });
    }
    const auto times = bench.us(candidates);
    const double us = times[0], peer_us = library != nullptr ? times[1] : 0;
    if (json) {
      std::printf(
          "%s\n  {\"m\": %d, \"n\": %d, \"k\": %d, \"batches\": %d, \"us\": %.2f, "
          "\"cublaslt_us\": %.2f}",
          separator, shape.m, shape.n, shape.k, shape.batches, us, peer_us);
      separator = ",";
      continue;
    }
    std::printf("%5d %6d %5d %8d %9.2f %7.0f %3.0f %9.2f %9.2f  %s", shape.m, shape.n, shape.k,
                shape.batches, us, bench.tflops(us), bench.tflops(us) * 1e8 / kFlopPerUs, peer_us,
                peer_us / us, name(tile).c_str());
    for (size_t i = 0; i < others.size(); ++i) {
      std::printf("  %s %.1f", name(others[i]).c_str(), times[i + 2]);
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  if (json) std::printf("\n]}\n");
  return 0;
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  bool json = false, tiles = false;
  int most_rows = 8192;
  for (int i = 1; i < argc; ++i) {
    json |= std::strcmp(argv[i], "--json") == 0;
    tiles |= std::strcmp(argv[i], "--tiles") == 0;
    if (std::strcmp(argv[i], "--most") == 0 && i + 1 < argc) most_rows = std::atoi(argv[i + 1]);
  }
  return fathom::cuda::run(json, tiles, most_rows);
}
