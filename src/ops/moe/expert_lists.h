// The tokens of a step sorted by expert, and the place of each one's activations in the workspace.
#pragma once

#include <span>

#include "ops/moe/moe.h"

namespace fathom {

// One feed-forward network with the rows that go through it.
struct ExpertRows {
  const MlpWeights* weights = nullptr;
  const int32_t* tokens = nullptr;  // rows of x and out; null: row i is token i
  const float* factors = nullptr;   // factor of the output; null: 1
  // Rows of out that are overwritten, without a factor; null: the tokens' rows are added to.
  const int32_t* stored_at = nullptr;
  int64_t count = 0;
  TensorView activations = {};  // [count, intermediate], x's type
};

// Cuts a workspace into aligned pieces.
class Workspace {
 public:
  explicit Workspace(std::span<std::byte> memory) : memory_(memory) {}

  static int64_t bytes_of(int64_t count, int64_t size) { return (count * size + 63) / 64 * 64; }

  template <typename T>
  T* take(int64_t count) {
    return reinterpret_cast<T*>(take_bytes(bytes_of(count, sizeof(T))));
  }
  std::byte* take_bytes(int64_t bytes);

 private:
  std::span<std::byte> memory_;
};

// Sorts (token, slot) by expert, stably, into memory taken from the workspace, and fills lists[0 …
// experts.size()), in ascending order of the expert.
void list_experts(ConstTensorView expert_ids, ConstTensorView expert_weights,
                  std::span<const MlpWeights> experts, DType type, Workspace& workspace,
                  ExpertRows* lists);

// The same for pairs of a row of x and an expert: pair i is row x_rows[i] and expert
// pair_experts[i], and its output is stored in row i.
void list_pairs(std::span<const int32_t> x_rows, std::span<const int32_t> pair_experts,
                std::span<const MlpWeights> experts, DType type, Workspace& workspace,
                ExpertRows* lists);

}  // namespace fathom
