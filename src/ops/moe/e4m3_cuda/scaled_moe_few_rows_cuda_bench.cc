// Benchmark of the mixture of experts in e4m3 for few tokens on the GPU: moe_few_rows_bench_cuda.h.
#include <algorithm>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "ops/moe/bf16_cuda/moe_few_rows_bench_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_few_rows_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

class Bench {
 public:
  static constexpr bool kScaled = true;

  static const std::vector<MoeFewRowsCase>& cases() {
    static const std::vector<MoeFewRowsCase> all = {
        {"v3", {7168, 256, 8, 2048, 2048}, {1, 2, 4, 8, 16, 32, 64, 128}},
        {"8 experts x 1", {7168, 8, 8, 2048, 0}, {1}, true},
        {"32 experts x 4", {7168, 32, 8, 2048, 0}, {16}, true},
        {"32 experts x 20", {7168, 32, 8, 2048, 0}, {80}, true},
        {"32 experts x 40", {7168, 32, 8, 2048, 0}, {160}, true},
        {"256 experts x 1", {7168, 256, 8, 2048, 0}, {32}, true},
        {"256 experts x 4", {7168, 256, 8, 2048, 0}, {128}, true},
        {"eighth v3", {7168, 256, 8, 256, 256}, {1, 2, 4, 8, 16, 32, 64, 128}},
        {"eighth 8 experts x 1", {7168, 8, 8, 256, 0}, {1}, true},
        {"eighth 32 experts x 4", {7168, 32, 8, 256, 0}, {16}, true},
        {"eighth 32 experts x 20", {7168, 32, 8, 256, 0}, {80}, true},
        {"eighth 32 experts x 40", {7168, 32, 8, 256, 0}, {160}, true},
        {"eighth 256 experts x 1", {7168, 256, 8, 256, 0}, {32}, true},
        {"dense", {7168, 1, 1, 18432, 0}, {1, 16, 64}},
        {"dense eighth", {7168, 1, 1, 2304, 0}, {1, 16, 64}}};
    return all;
  }
  static int64_t behind_ring(int rows, int64_t pairs, int warpgroups) {
    return scaled_moe_sum_bytes(rows, warpgroups) + scaled_moe_table_bytes(pairs);
  }

  Bench() {
    std::mt19937 random(1);
    const auto numbers = [&](int64_t count) {  // e4m3 of magnitudes up to 16
      std::vector<uint8_t> bytes(static_cast<size_t>(count));
      for (uint8_t& byte : bytes) {
        const auto bits = static_cast<uint32_t>(random());
        byte = static_cast<uint8_t>((bits & 128) | (bits & 127) % 88);
      }
      return bytes;
    };
    const auto some = numbers(1 << 23);
    for (int64_t at = 0; at < weights_.size(); at += std::ssize(some)) {
      const int64_t count = std::min(std::ssize(some), weights_.size() - at);
      check(cudaMemcpy(weights_.data() + at, at == 0 ? some.data() : weights_.data(),
                       static_cast<size_t>(count), cudaMemcpyDefault),
            "filling memory");
    }
    x_.copy_from(numbers(x_.size()));
    const auto positive = [&](int64_t count, float most) {
      std::vector<float> values(static_cast<size_t>(count));
      for (float& value : values) {
        value = most * (0.5f + static_cast<float>(random() % 1000) / 2000);
      }
      return values;
    };
    scales_.copy_from(positive(scales_.size(), 0.003f));
    x_scales_.copy_from(positive(x_scales_.size(), 0.1f));
  }

  class Problem {
   public:
    Problem(const Bench& bench, const MoeShape& shape, int32_t rows, Routing routing)
        : bench_(bench),
          shape_(shape),
          rows_(rows),
          layers_(bench.weights_.size(), shape, rows, routing),
          factors_(std::vector<float>(static_cast<size_t>(rows * shape.experts_per_token), 0.2f)),
          out_(int64_t{rows} * shape.hidden),
          workspace_(std::max(scaled_moe_few_rows_workspace_bytes(shape, rows),
                              scaled_moe_one_row_workspace_bytes(shape))),
          progress_(std::vector<uint64_t>(kScaledMoeProgressWords)) {
      for (const auto& ids : layers_.ids) ids_.emplace_back(ids);
    }

    double bytes() const { return layers_.weights_read; }

    double measure(const MoeFewRowsPlan& plan) const {
      return time_in_graph(static_cast<int>(ids_.size()), [&](int layer, cudaStream_t stream) {
        scaled_moe_few_rows(plan, arguments(layer), stream);
      });
    }
    double measure_one_row() const {
      return time_in_graph(static_cast<int>(ids_.size()), [&](int layer, cudaStream_t stream) {
        scaled_moe_one_row(arguments(layer), stream);
      });
    }

   private:
    ScaledMoeArguments arguments(int layer) const {
      const int64_t elements = layer_elements(shape_), block = 128 * 128;
      const uint8_t* weights = bench_.weights_.data() + layer * elements;
      const int64_t expert = int64_t{shape_.inter} * shape_.hidden * shape_.num_experts;
      const int64_t shared = int64_t{shape_.shared_inter} * shape_.hidden;
      const float* scales = bench_.scales_.data() + layer * (elements / block / 12 / 4 * 4);
      return {.shape = shape_,
              .rows = rows_,
              .x = bench_.x_.data(),
              .x_scales = bench_.x_scales_.data(),
              .x_scales_stride = 512,
              .expert_ids = ids_[static_cast<size_t>(layer)].data(),
              .expert_weights = factors_.data(),
              .gate_up = weights,
              .gate_up_scales = scales,
              .down = weights + 2 * expert,
              .down_scales = scales + 2 * expert / block,
              .shared_gate_up = weights + 3 * expert,
              .shared_gate_up_scales = scales + 3 * expert / block,
              .shared_down = weights + 3 * expert + 2 * shared,
              .shared_down_scales = scales + (3 * expert + 2 * shared) / block,
              .out = out_.data(),
              .out_type = DType::kBF16,
              .workspace = workspace_.data(),
              .progress = progress_.data()};
    }

    const Bench& bench_;
    const MoeShape shape_;
    const int32_t rows_;
    const LayersOfTokens layers_;
    std::vector<DeviceArray<int32_t>> ids_;
    const DeviceArray<float> factors_, out_;
    const DeviceArray<std::byte> workspace_;
    const DeviceArray<uint64_t> progress_;
  };

 private:
  DeviceArray<uint8_t> weights_ = DeviceArray<uint8_t>(int64_t{12} << 30),
                       x_ = DeviceArray<uint8_t>(512 * 7168);
  // One layer's scales, reused for any number of layers.
  DeviceArray<float> scales_ = DeviceArray<float>(int64_t{1} << 22),
                     x_scales_ = DeviceArray<float>(512 * 56);
};

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::MoeFewRowsBench<fathom::cuda::Bench>().run(argc, argv);
  return 0;
}
