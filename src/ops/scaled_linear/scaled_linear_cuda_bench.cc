// GEMMs of e4m3 with scales, and the quantisation before them: time of a launch in a CUDA graph of
// several launches with different operands that together exceed the L2; the median of three. Long
// GEMMs heat the GPU, which then clocks lower for a while: few rows come first.
//
//   scaled_linear_cuda_bench [--json] [--plans] [--few]
//
// --few: GEMMs of up to 64 rows alone.
//
// Beside each: the roofline (bytes of W up to 64 rows, of all operands above, at an H200's read
// rate, or operations at the rate that its tensor cores reach on random data) and DeepGEMM's time
// of the same GEMM, measured the same way on another day (2026-11-20, one H200, CUDA 13.0).
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "base/math.h"
#include "device/cuda/co_resident.h"
#include "device/cuda/device_array.h"
#include "device/cuda/graph_timer.h"
#include "device/cuda/launch.h"
#include "device/cuda/random_data.h"
#include "ops/linear/few_rows_cuda.h"
#include "ops/scaled_linear/quantize_rows_cuda.h"
#include "ops/scaled_linear/scaled_few_rows_cuda.h"
#include "ops/scaled_linear/scaled_many_rows_cuda.h"

namespace fathom::cuda {
namespace {

constexpr double kFlopPerUs = 1443e6;  // e4m3 rate that an H200 was seen to reach

struct Matrix {
  int n, k;
  // DeepGEMM's us for 1, 16, 64, 128, 512 and 4,096 rows.
  double peer[6];
};
constexpr int kPeerRows[] = {1, 16, 64, 128, 512, 4096};
constexpr Matrix kMatrices[] = {{2112, 7168, {13.3, 10.7, 9.9, 10.9, 15.3, 94.7}},
                                {576, 7168, {10.2, 10.1, 9.3, 9.3, 11.1, 32.8}},
                                {24576, 1536, {14.6, 14.6, 14.1, 15.0, 34.0, 239}},
                                {3072, 1536, {5.0, 5.0, 4.8, 5.1, 7.1, 32.8}},
                                {32768, 512, {8.3, 8.2, 8.8, 10.6, 21.3, 130}},
                                {7168, 16384, {37.8, 35.4, 35.4, 44.2, 118, 743}},
                                {7168, 2048, {7.7, 7.4, 7.2, 8.8, 18.7, 92.5}},
                                {4096, 7168, {15.0, 12.1, 12.1, 13.0, 24.1, 171}},
                                {18432, 7168, {35.8, 37.4, 36.9, 39.5, 100, 873}}};

double peer_us(const Matrix& matrix, int rows) {
  const auto* found = std::ranges::find(kPeerRows, rows);
  return found == std::end(kPeerRows) ? 0 : matrix.peer[found - std::begin(kPeerRows)];
}

// One allocation for all shapes; each shape's copies lie in it one after the other.
struct Memory {
  DeviceArray<uint8_t> weights{int64_t{1200} << 20}, x{int64_t{1200} << 20};
  DeviceArray<float> scales{int64_t{16} << 20};
  DeviceArray<uint16_t> out{int64_t{1} << 30};

  Memory() {
    std::mt19937 random(1);
    std::vector<uint8_t> values(size_t{1} << 22);
    const auto wide = random_f32(std::ssize(values), 60, random);
    for (size_t i = 0; i < values.size(); ++i) values[i] = to_e4m3(wide[i]).bits;
    std::uniform_real_distribution<float> exponent(-9, -4);
    std::vector<float> some_scales(size_t{1} << 20);
    for (float& scale : some_scales) scale = std::exp2(exponent(random));
    fill(weights, values);
    fill(x, values);
    fill(scales, some_scales);
    fill(out, random_bf16(1 << 22, 1, random));
  }

  template <typename T>
  static void fill(const DeviceArray<T>& array, const std::vector<T>& some) {
    for (int64_t at = 0; at < array.size(); at += std::ssize(some)) {
      const int64_t count = std::min(std::ssize(some), array.size() - at);
      check(cudaMemcpy(array.data() + at, some.data(), static_cast<size_t>(count) * sizeof(T),
                       cudaMemcpyHostToDevice),
            "filling memory");
    }
  }
};

using Multiply = std::function<void(const ScaledLinearArguments&, cudaStream_t)>;

double measure(const Memory& memory, const Matrix& matrix, int64_t rows, const Multiply& multiply) {
  const int64_t weight_bytes = int64_t{matrix.n} * matrix.k, x_bytes = rows * matrix.k,
                out_elements = rows * matrix.n, scales_stride = round_up(rows, 4),
                x_scales = scales_stride * matrix.k / 128,
                weight_scales = round_up(ceil_div(matrix.n, 128) * matrix.k / 128, 4);
  constexpr int64_t kCold = 400 << 20;  // bytes that make every copy cold
  const int64_t copies = std::min({std::max<int64_t>(kCold / (weight_bytes + x_bytes), 3),
                                   int64_t{60}, memory.weights.size() / weight_bytes,
                                   memory.x.size() / x_bytes, memory.out.size() / out_elements});
  const auto run = [&](int64_t copy, cudaStream_t stream) {
    const int64_t scale = copy * (x_scales + weight_scales) % (int64_t{8} << 20);
    multiply({.x = memory.x.data() + copy * x_bytes,
              .x_row_stride = matrix.k,
              .x_scales = memory.scales.data() + scale,
              .x_scales_stride = scales_stride,
              .weight = memory.weights.data() + copy * weight_bytes,
              .weight_scales = memory.scales.data() + scale + x_scales,
              .out = memory.out.data() + copy * out_elements,
              .out_row_stride = matrix.n,
              .rows = static_cast<int32_t>(rows),
              .n = matrix.n,
              .k = matrix.k},
             stream);
  };
  return time_in_graph(static_cast<int>(copies), run);
}

double floor_us(const Matrix& matrix, int64_t rows) {
  double bytes = static_cast<double>(matrix.n) * matrix.k;
  if (rows > 64) bytes += static_cast<double>(rows) * (matrix.k + 2.0 * matrix.n);
  const double flop = 2.0 * static_cast<double>(rows) * matrix.n * matrix.k;
  return std::max(bytes / kReadBytesPerUs, flop / kFlopPerUs);
}

template <typename... Values>
std::string text(const char* format, Values... values) {
  char buffer[96];
  std::snprintf(buffer, sizeof(buffer), format, values...);
  return buffer;
}

std::string name(const ManyRowsTile& tile) {
  return text("%dx%d/%d", tile.rows(), tile.columns, tile.split);
}

class Table {
 public:
  explicit Table(bool json) : json_(json) {
    std::printf(json ? "{\"device\": \"%s\", \"results\": [" : "%s\n", device_line().c_str());
  }
  ~Table() {
    if (json_) std::printf("\n]}\n");
  }

  void add(const char* operation, int64_t rows, int64_t n, int64_t k, double us, double floor,
           double peer, const std::string& more) {
    if (json_) {
      std::printf(
          "%s\n  {\"operation\": \"%s\", \"rows\": %d, \"n\": %d, \"k\": %d, \"us\": %.2f, "
          "\"floor_us\": %.2f, \"deepgemm_us\": %.1f}",
          separator_, operation, static_cast<int>(rows), static_cast<int>(n), static_cast<int>(k),
          us, floor, peer);
      separator_ = ",";
    } else {
      std::printf(
          "%-9s %5d %6d %5d %8.2f us, floor %7.2f (x%.2f), %5.0f TF", operation,
          static_cast<int>(rows), static_cast<int>(n), static_cast<int>(k), us, floor, us / floor,
          2e-6 * static_cast<double>(rows) * static_cast<double>(n) * static_cast<double>(k) / us);
      if (peer > 0) std::printf(", peer %6.1f (x%.2f)", peer, us / peer);
      std::printf("%s\n", more.c_str());
    }
    std::fflush(stdout);
  }

 private:
  bool json_;
  const char* separator_ = "";
};

double median_of_three(const std::function<double()>& time) {
  double times[] = {time(), time(), time()};
  std::ranges::sort(times);
  return times[1];
}

// Times of all tiles for many rows.
std::string times_of_tiles(const Memory& memory, const Matrix& matrix, int rows) {
  const ManyRowsProblem problem = {
      .rows = rows, .n = matrix.n, .k = matrix.k, .type = ManyRowsType::kScaledE4M3};
  std::string times = text(
      "  | %s:",
      name(plan_many_rows(problem, DeviceContext::current().num_multiprocessors()).tile).c_str());
  for (const ManyRowsTile& tile : many_rows_tiles(ManyRowsType::kScaledE4M3)) {
    if (!can_be_planned(problem, tile, DeviceContext::current().num_multiprocessors())) continue;
    const auto plan = plan_many_rows(problem, tile, DeviceContext::current().num_multiprocessors());
    const double us = measure(memory, matrix, rows, [&](const auto& a, cudaStream_t s) {
      scaled_linear_many_rows(a, plan, s);
    });
    times += text(" %s %.1f", name(tile).c_str(), us);
  }
  return times;
}

// Times of all plans for few rows, with their estimated costs.
std::string times_of_plans(const Memory& memory, const Matrix& matrix, int rows) {
  const ClusterCounts counts = DeviceContext::current().budget().clusters;
  const FewRowsShape shape = {.rows = rows, .n = matrix.n, .k = matrix.k, .scaled = true};
  const auto name_of_plan = [](const FewRowsPlan& plan) {
    return text("%d/%d%s", plan.warpgroups, plan.splits, plan.wide_ring ? "w" : "");
  };
  std::string times = text("  | %s:", name_of_plan(plan_few_rows(shape, counts)).c_str());
  for (const int warpgroups : {1, 2}) {
    for (const int splits : {1, 2, 4, 8}) {
      if (matrix.k < splits * 256) continue;
      for (const bool wide : {false, true}) {
        const FewRowsPlan plan = plan_with(shape, counts, warpgroups, splits, wide);
        const double us = measure(memory, matrix, rows, [&](const auto& a, cudaStream_t s) {
          scaled_linear_few_rows(plan, a, s);
        });
        times += text(" %s %.2f (%.1f)", name_of_plan(plan).c_str(), us,
                      few_rows_cost(shape, plan, counts));
      }
    }
  }
  return times;
}

void products(const Memory& memory, bool plans, bool few, Table& table) {
  for (const int rows : {1, 16, 32, 64, 128, 512, 1024, 4096}) {
    if (few && rows > 64) break;
    for (const Matrix& matrix : kMatrices) {
      std::string more;
      if (plans && rows <= kFewScaledRows) more += times_of_plans(memory, matrix, rows);
      if (plans && rows >= 32) more += times_of_tiles(memory, matrix, rows);
      const double us = median_of_three([&] {
        return measure(memory, matrix, rows,
                       [](const auto& a, cudaStream_t s) { scaled_linear(a, s); });
      });
      table.add("linear", rows, matrix.n, matrix.k, us, floor_us(matrix, rows),
                peer_us(matrix, rows), more);
    }
  }
}

void quantize(const Memory& memory, Table& table) {
  for (const int k : {512, 1536, 7168, 16384}) {
    for (const int rows : {1, 64, 512, 4096}) {
      const int64_t elements = int64_t{rows} * k;
      const int copies =
          static_cast<int>(std::clamp<int64_t>((int64_t{200} << 20) / elements, 3, 60));
      const double us = time_in_graph(copies, [&](int copy, cudaStream_t stream) {
        quantize_rows({.x = memory.out.data() + copy * elements,
                       .x_row_stride = k,
                       .values = memory.x.data() + copy * elements,
                       .values_row_stride = k,
                       .scales = memory.scales.data(),
                       .scales_block_stride = round_up(rows, 4),
                       .rows = rows,
                       .k = k},
                      stream);
      });
      const double bytes = static_cast<double>(elements) * (3 + 4.0 / 128);
      table.add("quantize", rows, 0, k, us, bytes / kReadBytesPerUs, 0, "");
    }
  }
}

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  const auto has = [&](const char* flag) {
    return std::any_of(argv + 1, argv + argc,
                       [&](const char* argument) { return std::strcmp(argument, flag) == 0; });
  };
  const fathom::cuda::Memory memory;
  fathom::cuda::Table table(has("--json"));
  if (!has("--few")) fathom::cuda::quantize(memory, table);
  fathom::cuda::products(memory, has("--plans"), has("--few"), table);
  return 0;
}
