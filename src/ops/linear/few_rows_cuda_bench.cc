// Skinny GEMMs on the GPU: time of a launch in a CUDA graph over several matrices that together
// exceed the L2; median of 11 replays.
//
// One row uses linear_one_row where one_row_pays() says so.
//
//   few_rows_cuda_bench [--json | --sweep]
//
// --sweep times every plan of linear_few_rows for some shapes, beside the plan's own estimate.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "device/cuda/co_resident.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/linear/one_row_cuda.h"
#include "ops/linear/one_row_plan.h"

namespace fathom::cuda {
namespace {

struct Matrix {
  const char* name;
  int64_t n, k, batches = 1;
  bool f32 = false;

  int64_t elements() const { return n * k * batches; }
};

constexpr Matrix kMatrices[] = {{"v2-lite q + kv_a", 3648, 2048},
                                {"v2-lite o", 2048, 2048},
                                {"v2-lite dense gate_up", 21888, 2048},
                                {"v2-lite dense down", 2048, 10944},
                                {"v2-lite absorb q", 512, 128, 16},
                                {"v2-lite absorb v", 128, 512, 16},
                                {"v2-lite head", 102400, 2048, 1, true},
                                {"v3 q_a + kv_a", 2112, 7168},
                                {"v3 q_b", 24576, 1536},
                                {"v3 absorb q", 512, 128, 128},
                                {"v3 absorb v", 128, 512, 128},
                                {"v3 o", 7168, 16384},
                                {"v3 dense gate_up", 36864, 7168},
                                {"v3 dense down", 7168, 18432},
                                {"v3 head", 129280, 7168, 1, true}};

// One allocation for all shapes; each shape's copies lie in it one after the other.
struct Memory {
  DeviceArray<uint16_t> weights, x;
  DeviceArray<float> out;
};

Memory make_memory() {
  constexpr int64_t kElements = int64_t{2} << 30;
  Memory memory{DeviceArray<uint16_t>(kElements), DeviceArray<uint16_t>(64 << 16),
                DeviceArray<float>(64 * 200000)};
  std::mt19937 random(1);
  const auto some = random_bf16(1 << 22, 0.5f, random);
  const auto fill = [&](const DeviceArray<uint16_t>& array) {
    for (int64_t at = 0; at < array.size(); at += std::ssize(some)) {
      const int64_t count = std::min(std::ssize(some), array.size() - at);
      check(cudaMemcpy(array.data() + at, some.data(), static_cast<size_t>(count) * 2,
                       cudaMemcpyHostToDevice),
            "filling memory");
    }
  };
  fill(memory.weights);
  fill(memory.x);
  return memory;
}

template <typename Product>
double measure(const Memory& memory, const Matrix& matrix, int64_t rows, const Product& product) {
  constexpr int64_t kCold = 400 << 20;  // bytes that make every copy cold
  const int64_t bytes = matrix.elements() * 2;
  const int copies = static_cast<int>(
      std::clamp<int64_t>(kCold / bytes, 2, std::min<int64_t>(60, (int64_t{4} << 30) / bytes)));
  return time_in_graph(copies, [&](int copy, cudaStream_t stream) {
    product(LinearArguments{.x = memory.x.data(),
                            .x_row_stride = matrix.batches * matrix.k,
                            .x_batch_stride = matrix.k,
                            .weight = memory.weights.data() + copy * matrix.elements(),
                            .out = memory.out.data(),
                            .out_row_stride = matrix.batches * matrix.n,
                            .out_batch_stride = matrix.n,
                            .out_type = matrix.f32 ? DType::kF32 : DType::kBF16,
                            .rows = static_cast<int32_t>(rows),
                            .n = static_cast<int32_t>(matrix.n),
                            .k = static_cast<int32_t>(matrix.k),
                            .batches = static_cast<int32_t>(matrix.batches)},
            stream);
  });
}

double measure(const Memory& memory, const Matrix& matrix, int64_t rows, const FewRowsPlan& plan) {
  return measure(memory, matrix, rows, [&](const LinearArguments& arguments, cudaStream_t stream) {
    linear_few_rows(plan, arguments, stream);
  });
}

void sweep(const Memory& memory, const ClusterCounts& counts) {
  std::printf("clusters of 1, 2, 4, 8: %d %d %d %d\n", counts.of_1, counts.of_2, counts.of_4,
              counts.of_8);
  for (const Matrix& matrix : kMatrices) {
    for (const int64_t rows : {1, 64}) {
      const FewRowsShape shape = {rows, matrix.n, matrix.k, matrix.batches};
      const FewRowsPlan chosen = plan_few_rows(shape, counts);
      std::printf("%s, %d rows, floor %.1f us\n", matrix.name, static_cast<int>(rows),
                  matrix.elements() * 2 / kReadBytesPerUs);
      for (const int warpgroups : {1, 2}) {
        std::printf("  %d:", warpgroups);
        for (const int splits : {1, 2, 4, 8}) {
          if (matrix.k < splits * 128) continue;
          for (const bool wide : {false, true}) {
            const FewRowsPlan plan = plan_with(shape, counts, warpgroups, splits, wide);
            std::printf("  %d%s%s %.2f (%.1f)", splits, wide ? "w" : " ",
                        chosen.warpgroups == warpgroups && chosen.splits == splits &&
                                chosen.wide_ring == wide
                            ? "*"
                            : " ",
                        measure(memory, matrix, rows, plan), few_rows_cost(shape, plan, counts));
          }
        }
        std::printf("\n");
      }
    }
  }
}

void table(const Memory& memory, const ClusterCounts& counts, bool json) {
  const char* separator = "";
  if (json) {
    std::printf("{\"device\": \"%s\", \"results\": [", device_line().c_str());
  } else {
    std::printf("%s\n%-22s %6s %6s %4s rows      us  floor  GB/s     %%\n", device_line().c_str(),
                "matrix", "n", "k", "b");
  }
  for (const Matrix& m : kMatrices) {
    for (const int64_t rows : {1, 4, 8, 16, 32, 64}) {
      const double us =
          rows == 1 && one_row_pays({m.n, m.k, m.batches},
                                    DeviceContext::current().num_multiprocessors())
              ? measure(memory, m, 1, linear_one_row)
              : measure(memory, m, rows, plan_few_rows({rows, m.n, m.k, m.batches}, counts));
      const double bytes = static_cast<double>(m.elements()) * 2, floor = bytes / kReadBytesPerUs;
      if (json) {
        std::printf(
            "%s\n  {\"matrix\": \"%s\", \"n\": %d, \"k\": %d, \"batches\": %d, \"rows\": %d, "
            "\"us\": %.2f, \"floor_us\": %.2f}",
            separator, m.name, static_cast<int>(m.n), static_cast<int>(m.k),
            static_cast<int>(m.batches), static_cast<int>(rows), us, floor);
        separator = ",";
      } else {
        std::printf("%-22s %6d %6d %4d %4d  %6.2f %6.2f %5.0f %5.1f\n", m.name,
                    static_cast<int>(m.n), static_cast<int>(m.k), static_cast<int>(m.batches),
                    static_cast<int>(rows), us, floor, bytes / us / 1e3, 100 * floor / us);
      }
    }
  }
  if (json) std::printf("\n]}\n");
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  const auto memory = fathom::cuda::make_memory();
  const auto counts = fathom::cuda::DeviceContext::current().budget().clusters;
  if (argc > 1 && std::strcmp(argv[1], "--sweep") == 0) {
    fathom::cuda::sweep(memory, counts);
  } else {
    fathom::cuda::table(memory, counts, argc > 1 && std::strcmp(argv[1], "--json") == 0);
  }
  return 0;
}
