// Benchmark of the mixture of experts for few tokens on the GPU: moe_few_rows_bench_cuda.h.
#include <algorithm>
#include <random>
#include <vector>

#include "device/cuda/device_array.h"
#include "device/cuda/random_data.h"
#include "ops/moe/bf16_cuda/moe_few_rows_bench_cuda.h"
#include "ops/moe/bf16_cuda/moe_few_rows_cuda.h"
#include "ops/moe/bf16_cuda/moe_one_row_cuda.h"

namespace fathom::cuda {
namespace {

class Bench {
 public:
  static constexpr bool kScaled = false;

  static const std::vector<MoeFewRowsCase>& cases() {
    static const std::vector<MoeFewRowsCase> all = {
        {"v2-lite", {2048, 64, 6, 1408, 2816}, {1, 2, 4, 8, 16, 32, 64, 128, 256, 448}},
        {"v3", {7168, 256, 8, 2048, 2048}, {1, 2, 8}},
        {"v3, 256 experts x 1", {7168, 256, 8, 2048, 0}, {32}, true},
        {"v3, 32 experts x 20", {7168, 32, 8, 2048, 0}, {80}, true},
        {"v3, 32 experts x 64", {7168, 32, 8, 2048, 0}, {256}, true},
        {"v3 / 8, 256 experts x 1", {7168, 256, 8, 256, 256}, {32}, true}};
    return all;
  }
  static int64_t behind_ring(int rows, int64_t pairs, int warpgroups) {
    return rows * moe_sum_bytes(warpgroups) + moe_table_bytes(pairs);
  }

  Bench() {
    std::mt19937 random(1);
    const auto some = random_bf16(1 << 23, 0.02f, random);
    for (int64_t at = 0; at < weights_.size(); at += std::ssize(some)) {
      const int64_t count = std::min(std::ssize(some), weights_.size() - at);
      check(cudaMemcpy(weights_.data() + at, at == 0 ? some.data() : weights_.data(),
                       static_cast<size_t>(count) * 2, cudaMemcpyDefault),
            "filling memory");
    }
    x_.copy_from(random_bf16(x_.size(), 1.0f, random));
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
          workspace_(std::max(moe_few_rows_workspace_bytes(shape, rows),
                              moe_one_row_workspace_bytes(shape))),
          progress_(std::vector<uint64_t>(kMoeProgressWords)) {
      for (const auto& ids : layers_.ids) ids_.emplace_back(ids);
    }

    double bytes() const { return 2 * layers_.weights_read; }

    double measure(const MoeFewRowsPlan& plan) const {
      return time_in_graph(static_cast<int>(ids_.size()), [&](int layer, cudaStream_t stream) {
        moe_few_rows(plan, arguments(layer), stream);
      });
    }
    double measure_one_row() const {
      return time_in_graph(static_cast<int>(ids_.size()), [&](int layer, cudaStream_t stream) {
        moe_one_row(arguments(layer), stream);
      });
    }

   private:
    MoeArguments arguments(int layer) const {
      const uint16_t* weights = bench_.weights_.data() + layer * layer_elements(shape_);
      const int64_t expert = int64_t{shape_.inter} * shape_.hidden * shape_.num_experts;
      const int64_t shared = int64_t{shape_.shared_inter} * shape_.hidden;
      return {.shape = shape_,
              .rows = rows_,
              .x = bench_.x_.data(),
              .expert_ids = ids_[static_cast<size_t>(layer)].data(),
              .expert_weights = factors_.data(),
              .gate_up = weights,
              .down = weights + 2 * expert,
              .shared_gate_up = weights + 3 * expert,
              .shared_down = weights + 3 * expert + 2 * shared,
              .out = out_.data(),
              .out_type = DType::kF32,
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
  DeviceArray<uint16_t> weights_ = DeviceArray<uint16_t>(int64_t{12} << 30),
                        x_ = DeviceArray<uint16_t>(512 * 7168);
};

}  // namespace
}  // namespace fathom::cuda

int main(int argc, char** argv) {
  fathom::cuda::MoeFewRowsBench<fathom::cuda::Bench>().run(argc, argv);
  return 0;
}
