#include "ops/moe/expert_lists.h"

namespace fathom {

std::byte* Workspace::take_bytes(int64_t bytes) {
  FATHOM_CHECK(bytes <= static_cast<int64_t>(memory_.size()), "{} bytes of workspace, {} are left",
               bytes, memory_.size());
  std::byte* const taken = memory_.data();
  memory_ = memory_.subspan(static_cast<size_t>(bytes));
  return taken;
}

void list_experts(ConstTensorView expert_ids, ConstTensorView expert_weights,
                  std::span<const MlpWeights> experts, DType type, Workspace& workspace,
                  ExpertRows* lists) {
  const int64_t rows = expert_ids.size(0);
  const int64_t slots = expert_ids.size(1);
  auto* const tokens = workspace.take<int32_t>(rows * slots);
  auto* const factors = workspace.take<float>(rows * slots);
  const int64_t intermediate = experts.empty() ? 0 : experts[0].down.cols();
  std::byte* activations =
      workspace.take_bytes(Workspace::bytes_of(rows * slots * intermediate, size_of(type)));

  const auto num_experts = static_cast<int32_t>(experts.size());
  for (int32_t e = 0; e < num_experts; ++e) lists[e] = {.weights = &experts[size_t(e)]};
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* ids = expert_ids.row<int32_t>(t);
    for (int64_t s = 0; s < slots; ++s) {
      FATHOM_CHECK(ids[s] >= 0 && ids[s] < num_experts, "expert {} of {}", ids[s], num_experts);
      ++lists[ids[s]].count;
    }
  }
  int64_t begin = 0;
  for (ExpertRows& list : std::span(lists, experts.size())) {
    list.tokens = tokens + begin;
    list.factors = factors + begin;
    list.activations = TensorView(activations, type, {list.count, intermediate});
    activations += list.count * intermediate * size_of(type);
    begin += list.count;
    list.count = 0;
  }
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* ids = expert_ids.row<int32_t>(t);
    const float* weights = expert_weights.row<float>(t);
    for (int64_t s = 0; s < slots; ++s) {
      ExpertRows& list = lists[ids[s]];
      const int64_t at = list.tokens - tokens + list.count++;
      tokens[at] = static_cast<int32_t>(t);
      factors[at] = weights[s];
    }
  }
}

}  // namespace fathom
