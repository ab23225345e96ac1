#include "ops/moe/expert_lists.h"

namespace fathom {

std::byte* Workspace::take_bytes(int64_t bytes) {
  FATHOM_CHECK(bytes <= static_cast<int64_t>(memory_.size()), "{} bytes of workspace, {} are left",
               bytes, memory_.size());
  std::byte* const taken = memory_.data();
  memory_ = memory_.subspan(static_cast<size_t>(bytes));
  return taken;
}

namespace {

// Gives each list, whose rows are counted, its share of `tokens` and of the activations' memory;
// the counts begin again at 0.
void cut_lists(std::span<ExpertRows> lists, int32_t* tokens, DType type, int64_t intermediate,
               std::byte* activations) {
  int64_t begin = 0;
  for (ExpertRows& list : lists) {
    list.tokens = tokens + begin;
    list.activations = TensorView(activations, type, {list.count, intermediate});
    activations += list.count * intermediate * size_of(type);
    begin += list.count;
    list.count = 0;
  }
}

void count_row(int32_t expert, std::span<ExpertRows> lists) {
  FATHOM_CHECK(expert >= 0 && expert < std::ssize(lists), "expert {} of {}", expert, lists.size());
  ++lists[static_cast<size_t>(expert)].count;
}

std::byte* take_activations(int64_t count, int64_t intermediate, DType type, Workspace& workspace) {
  return workspace.take_bytes(Workspace::bytes_of(count * intermediate, size_of(type)));
}

int64_t intermediate_of(std::span<const MlpWeights> experts) {
  return experts.empty() ? 0 : experts[0].down.cols();
}

}  // namespace

void list_experts(ConstTensorView expert_ids, ConstTensorView expert_weights,
                  std::span<const MlpWeights> experts, DType type, Workspace& workspace,
                  ExpertRows* lists) {
  const int64_t rows = expert_ids.size(0);
  const int64_t slots = expert_ids.size(1);
  auto* const tokens = workspace.take<int32_t>(rows * slots);
  auto* const factors = workspace.take<float>(rows * slots);
  const int64_t intermediate = intermediate_of(experts);
  std::byte* const activations = take_activations(rows * slots, intermediate, type, workspace);

  const std::span all(lists, experts.size());
  for (size_t e = 0; e < all.size(); ++e) all[e] = {.weights = &experts[e]};
  for (int64_t t = 0; t < rows; ++t) {
    const int32_t* ids = expert_ids.row<int32_t>(t);
    for (int64_t s = 0; s < slots; ++s) count_row(ids[s], all);
  }
  cut_lists(all, tokens, type, intermediate, activations);
  for (ExpertRows& list : all) list.factors = factors + (list.tokens - tokens);
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

void list_pairs(std::span<const int32_t> x_rows, std::span<const int32_t> pair_experts,
                std::span<const MlpWeights> experts, DType type, Workspace& workspace,
                ExpertRows* lists) {
  const auto pairs = std::ssize(x_rows);
  auto* const tokens = workspace.take<int32_t>(pairs);
  auto* const outputs = workspace.take<int32_t>(pairs);
  const int64_t intermediate = intermediate_of(experts);
  std::byte* const activations = take_activations(pairs, intermediate, type, workspace);

  const std::span all(lists, experts.size());
  for (size_t e = 0; e < all.size(); ++e) all[e] = {.weights = &experts[e]};
  for (const int32_t expert : pair_experts) count_row(expert, all);
  cut_lists(all, tokens, type, intermediate, activations);
  for (ExpertRows& list : all) list.stored_at = outputs + (list.tokens - tokens);
  for (int64_t pair = 0; pair < pairs; ++pair) {
    ExpertRows& list = lists[pair_experts[static_cast<size_t>(pair)]];
    const int64_t at = list.tokens - tokens + list.count++;
    tokens[at] = x_rows[static_cast<size_t>(pair)];
    outputs[at] = static_cast<int32_t>(pair);
  }
}

}  // namespace fathom
