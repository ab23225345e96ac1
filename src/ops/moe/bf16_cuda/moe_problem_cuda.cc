#include "ops/moe/bf16_cuda/moe_problem_cuda.h"

#include <algorithm>
#include <random>

#include "device/cuda/random_data.h"
#include "ops/moe/expert_draw.h"

namespace fathom::cuda {
namespace {

DeviceArray<uint16_t> random_matrices(int64_t elements, float deviation, uint32_t seed) {
  std::mt19937 random(seed);
  const auto some = random_bf16(std::min<int64_t>(elements, (1 << 22) + 8 * 37), deviation, random);
  DeviceArray<uint16_t> matrices(std::max<int64_t>(elements, 8));
  check(cudaMemset(matrices.data(), 0, 16), "filling what none has");
  for (int64_t at = 0; at < elements; at += std::ssize(some)) {
    const int64_t count = std::min(std::ssize(some), elements - at);
    check(cudaMemcpy(matrices.data() + at, some.data(), static_cast<size_t>(count) * 2,
                     cudaMemcpyHostToDevice),
          "filling matrices");
  }
  return matrices;
}

}  // namespace

MoeProblem::MoeProblem(const MoeShape& s, int32_t num_rows, const std::vector<int32_t>& id_list,
                       uint32_t seed)
    : shape(s),
      rows(num_rows),
      expert_ids(id_list),
      x(random_matrices(int64_t{num_rows} * s.hidden, 1, seed)),
      ids(id_list),
      gate_up(random_matrices(int64_t{s.num_experts} * 2 * s.inter * s.hidden, 0.05f, seed + 1)),
      down(random_matrices(int64_t{s.num_experts} * s.hidden * s.inter, 0.05f, seed + 2)),
      shared_gate_up(random_matrices(int64_t{2} * s.shared_inter * s.hidden, 0.05f, seed + 3)),
      shared_down(random_matrices(int64_t{s.hidden} * s.shared_inter, 0.05f, seed + 4)),
      out(int64_t{num_rows} * s.hidden),
      workspace(moe_many_rows_workspace_bytes(s, num_rows)) {
  std::mt19937 random(seed + 5);
  std::vector<float> values(id_list.size());
  for (float& value : values) value = 0.05f + static_cast<float>(random() % 1000) / 2000;
  weights = DeviceArray<float>(values);
}

MoeArguments MoeProblem::arguments(DType out_type) const {
  return {.shape = shape,
          .rows = rows,
          .x = x.data(),
          .expert_ids = ids.data(),
          .expert_weights = weights.data(),
          .gate_up = gate_up.data(),
          .down = down.data(),
          .shared_gate_up = shared_gate_up.data(),
          .shared_down = shared_down.data(),
          .out = out.data(),
          .out_type = out_type,
          .workspace = workspace.data()};
}

double MoeProblem::flop() const {
  const auto pairs = std::ranges::count_if(expert_ids, [](int32_t id) { return id >= 0; });
  return 6.0 * shape.hidden *
         (static_cast<double>(pairs) * shape.inter + double{1} * rows * shape.shared_inter);
}

std::vector<int32_t> random_experts(const MoeShape& shape, int32_t rows, uint32_t seed) {
  return draw_experts(Routing::kUniform, shape.num_experts, shape.experts_per_token, rows, seed);
}

std::vector<int32_t> balanced_experts(const MoeShape& shape, int32_t rows) {
  return draw_experts(Routing::kEven, shape.num_experts, shape.experts_per_token, rows, 0);
}

}  // namespace fathom::cuda
