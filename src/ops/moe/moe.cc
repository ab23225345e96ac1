// Two parallel regions. In the first, threads share the pairs of panels of all experts' gate and up
// GEMMs (with SwiGLU) by cost. In the second, threads share the columns of out for the down GEMMs,
// each taking the experts in ascending order, so that the sum over a token's experts needs neither
// a buffer nor a third region.
#include "ops/moe/moe.h"

#include <algorithm>
#include <memory>

#include "base/math.h"
#include "device/cpu/isa.h"
#include "ops/linear/panel_product.h"
#include "ops/moe/expert_lists.h"

namespace fathom {
namespace {

// Cost of a pair of panels: its multiply-adds or, with few rows, reading it, as in linear.cc.
int64_t pair_cost(int64_t rows, int64_t columns) { return (rows + 6) * columns; }

// What threads share of an expert: its intermediate rows in pairs of panels or, with few rows of x,
// in groups of two, whose bytes alternate in memory.
struct ActivationUnits {
  ActivationUnits(const ExpertRows& expert, int64_t columns)
      : pairs(ceil_div(expert.weights->down.cols(), kPairRows)),
        unit_pairs(expert.count <= kFewRows ? 2 : 1),
        count(ceil_div(pairs, unit_pairs)),
        cost(pair_cost(expert.count, columns) * unit_pairs) {}
  int64_t pairs, unit_pairs, count, cost;
};

// ---- gate and up ----

// Locates intermediate rows' up sums: up's rows follow gate's in the packed matrix, so they begin
// inside a pair unless the intermediate size is a multiple of 32.
class UpSums {
 public:
  UpSums(const float* sums, int64_t rows, int64_t lane) : sums_(sums), rows_(rows), lane_(lane) {}

  // 32 values of `row` that belong to the chunk's gate pair `pair`.
  const float* of(int64_t pair, int64_t row) {
    const float* first = sums_ + (pair * rows_ + row) * kPairRows;
    if (lane_ == 0) return first;
    const float* second = first + rows_ * kPairRows;
    std::copy_n(first + lane_, kPairRows - lane_, joined_);
    std::copy_n(second, lane_, joined_ + kPairRows - lane_);
    return joined_;
  }

 private:
  const float* sums_;
  int64_t rows_, lane_;
  float joined_[kPairRows];
};

// Computes activations of pairs [begin, end) of the intermediate rows.
void activate(const LinearKernels& kernels, ConstTensorView x, const ExpertRows& expert,
              int64_t begin, int64_t end) {
  alignas(64) float gate_sums[kMaxProductPairs * kMaxProductRows * kPairRows];
  alignas(64) float up_sums[kMaxProductPairs * kMaxProductRows * kPairRows];
  const PackedMatrix& weight = expert.weights->gate_up;
  const int64_t intermediate = weight.rows() / 2;
  const int64_t lane = intermediate % kPairRows;
  const int64_t num_pairs = ceil_div(weight.rows(), kPairRows);
  const RowBlocks blocks(expert.count);
  // Up's rows touch one pair more where they begin inside one.
  const int64_t chunk = lane == 0 ? kMaxProductPairs : kMaxProductPairs - 1;
  for (int64_t pair = begin; pair < end; pair += chunk) {
    const int64_t pairs = std::min(chunk, end - pair);
    const int64_t up_pair = intermediate / kPairRows + pair;
    const int64_t up_pairs = std::min(pairs + (lane == 0 ? 0 : 1), num_pairs - up_pair);
    for (int64_t block = 0; block < blocks.count(); ++block) {
      const int64_t first = blocks.begin(block);
      const int64_t rows = blocks.begin(block + 1) - first;
      const ProductRows in = {x, expert.tokens, first};
      multiply_pairs(kernels, in, rows, weight, pair, pairs, gate_sums);
      multiply_pairs(kernels, in, rows, weight, up_pair, up_pairs, up_sums);
      UpSums up(up_sums, rows, lane);
      for (int64_t p = 0; p < pairs; ++p) {
        const int64_t column = (pair + p) * kPairRows;
        const int64_t count = std::min<int64_t>(kPairRows, intermediate - column);
        for (int64_t r = 0; r < rows; ++r) {
          const float* gate = gate_sums + (p * rows + r) * kPairRows;
          if (x.dtype() == DType::kBF16) {
            auto* const out = expert.activations.row<bf16>(first + r) + column;
            kernels.swiglu_bf16(gate, up.of(p, r), count, reinterpret_cast<uint16_t*>(out));
          } else {
            kernels.swiglu_f32(gate, up.of(p, r), count,
                               expert.activations.row<float>(first + r) + column);
          }
        }
      }
    }
  }
}

void activate_share(const LinearKernels& kernels, ConstTensorView x,
                    std::span<const ExpertRows> experts, CostSplit split) {
  for (const ExpertRows& expert : experts) {
    if (expert.count == 0) continue;
    const ActivationUnits units(expert, x.size(1));
    const auto range = split.next(units.count, units.cost);
    activate(kernels, x, expert, range.begin * units.unit_pairs,
             std::min(range.end * units.unit_pairs, units.pairs));
  }
}

// ---- down ----

// Adds, or stores, one expert's output columns of pairs [begin, end).
void add_down(const LinearKernels& kernels, const ExpertRows& expert, TensorView out, int64_t begin,
              int64_t end) {
  alignas(64) float sums[kMaxProductPairs * kMaxProductRows * kPairRows];
  const RowBlocks blocks(expert.count);
  for (int64_t pair = begin; pair < end; pair += kMaxProductPairs) {
    const int64_t pairs = std::min(kMaxProductPairs, end - pair);
    for (int64_t block = 0; block < blocks.count(); ++block) {
      const int64_t first = blocks.begin(block);
      const int64_t rows = blocks.begin(block + 1) - first;
      multiply_pairs(kernels, {expert.activations, nullptr, first}, rows, expert.weights->down,
                     pair, pairs, sums);
      const float* sum = sums;
      for (int64_t p = 0; p < pairs; ++p) {
        const int64_t column = (pair + p) * kPairRows;
        const int64_t count = std::min<int64_t>(kPairRows, out.size(1) - column);
        for (int64_t r = first; r < first + rows; ++r, sum += kPairRows) {
          if (expert.stored_at != nullptr) {
            std::copy_n(sum, count, out.row<float>(expert.stored_at[r]) + column);
            continue;
          }
          const int64_t token = expert.tokens == nullptr ? r : expert.tokens[r];
          const float factor = expert.factors == nullptr ? 1.0f : expert.factors[r];
          kernels.add_scaled(sum, factor, count, out.row<float>(token) + column);
        }
      }
    }
  }
}

// ---- both ----

void feed_forward(const Stream& stream, ConstTensorView x, std::span<const ExpertRows> experts,
                  TensorView out) {
  const LinearKernels& kernels = linear_kernels(cpu_isa());
  int64_t cost = 0, unit_cost = 0;
  for (const ExpertRows& expert : experts) {
    const MlpWeights* weights = expert.weights;
    FATHOM_CHECK(weights->gate_up.cols() == x.size(1) && weights->down.rows() == x.size(1) &&
                     weights->gate_up.rows() == 2 * weights->down.cols(),
                 "gate_up [{}, {}] and down [{}, {}] for x {}", weights->gate_up.rows(),
                 weights->gate_up.cols(), weights->down.rows(), weights->down.cols(),
                 x.shape_string());
    if (expert.count == 0) continue;
    const ActivationUnits units(expert, x.size(1));
    cost += units.count * units.cost;
    unit_cost = std::max(unit_cost, units.cost);
  }
  const int threads = stream.pool().num_threads();
  const CostPieces pieces(cost, threads, x.size(0) <= kFewRows, unit_cost);
  stream.pool().run_pieces(
      pieces.count(), [&](int piece) { activate_share(kernels, x, experts, pieces.piece(piece)); });
  const int64_t pairs = ceil_div(x.size(1), kPairRows);
  const int64_t unit_pairs = pairs >= int64_t{2} * threads ? 2 : 1;
  const int64_t units = ceil_div(pairs, unit_pairs);
  stream.pool().run([&](int thread) {
    const int64_t begin = units * thread / threads * unit_pairs;
    const int64_t end = std::min(units * (thread + 1) / threads * unit_pairs, pairs);
    for (const ExpertRows& expert : experts) {
      if (expert.count > 0) add_down(kernels, expert, out, begin, end);
    }
  });
}

void check(ConstTensorView x, TensorView out) {
  FATHOM_CHECK(x.rank() == 2 && out.rank() == 2 && x.size(0) == out.size(0) &&
                   x.size(1) == out.size(1) && out.dtype() == DType::kF32 &&
                   (x.dtype() == DType::kBF16 || x.dtype() == DType::kF32),
               "x {} {}, out {} {}", name_of(x.dtype()), x.shape_string(), name_of(out.dtype()),
               out.shape_string());
}

ExpertRows all_rows(ConstTensorView x, const MlpWeights& weights, Workspace& workspace) {
  const int64_t rows = x.size(0);
  const int64_t intermediate = weights.down.cols();
  std::byte* const activations =
      workspace.take_bytes(Workspace::bytes_of(rows * intermediate, size_of(x.dtype())));
  return {.weights = &weights,
          .count = rows,
          .activations = TensorView(activations, x.dtype(), {rows, intermediate})};
}

}  // namespace

int64_t mlp_workspace_bytes(int64_t rows, int64_t /*hidden*/, int64_t intermediate) {
  return Workspace::bytes_of(rows * intermediate, sizeof(float));
}

int64_t moe_workspace_bytes(int64_t rows, int64_t hidden, int64_t num_experts,
                            int64_t experts_per_token, int64_t expert_intermediate,
                            int64_t shared_intermediate) {
  const int64_t slots = rows * experts_per_token;
  return Workspace::bytes_of(num_experts + 1, sizeof(ExpertRows)) +
         Workspace::bytes_of(slots, sizeof(int32_t)) + Workspace::bytes_of(slots, sizeof(float)) +
         Workspace::bytes_of(slots * expert_intermediate, sizeof(float)) +
         mlp_workspace_bytes(rows, hidden, shared_intermediate);
}

void mlp(const Stream& stream, ConstTensorView x, const MlpWeights& weights, TensorView out,
         std::span<std::byte> memory) {
  check(x, out);
  if (x.size(0) == 0) return;
  Workspace workspace(memory);
  const ExpertRows rows = all_rows(x, weights, workspace);
  feed_forward(stream, x, {&rows, 1}, out);
}

void moe(const Stream& stream, ConstTensorView x, ConstTensorView expert_ids,
         ConstTensorView expert_weights, std::span<const MlpWeights> experts,
         const MlpWeights* shared, TensorView out, std::span<std::byte> memory) {
  check(x, out);
  FATHOM_CHECK(expert_ids.rank() == 2 && expert_weights.rank() == 2 &&
                   expert_ids.size(0) == x.size(0) && expert_weights.size(0) == x.size(0) &&
                   expert_ids.size(1) == expert_weights.size(1),
               "ids {}, weights {} for x {}", expert_ids.shape_string(),
               expert_weights.shape_string(), x.shape_string());
  if (x.size(0) == 0) return;
  Workspace workspace(memory);
  const auto num_experts = static_cast<int64_t>(experts.size());
  auto* const lists = workspace.take<ExpertRows>(num_experts + 1);
  std::uninitialized_default_construct_n(lists, num_experts + 1);
  list_experts(expert_ids, expert_weights, experts, x.dtype(), workspace, lists);
  if (shared != nullptr) lists[num_experts] = all_rows(x, *shared, workspace);
  feed_forward(stream, x, {lists, static_cast<size_t>(num_experts + (shared != nullptr))}, out);
}

int64_t expert_outputs_workspace_bytes(int64_t pairs, int64_t num_experts,
                                       int64_t expert_intermediate) {
  return Workspace::bytes_of(num_experts, sizeof(ExpertRows)) +
         2 * Workspace::bytes_of(pairs, sizeof(int32_t)) +
         Workspace::bytes_of(pairs * expert_intermediate, sizeof(float));
}

void expert_outputs(const Stream& stream, ConstTensorView x, std::span<const int32_t> x_rows,
                    std::span<const int32_t> pair_experts, std::span<const MlpWeights> experts,
                    TensorView out, std::span<std::byte> memory) {
  FATHOM_CHECK(x.rank() == 2 && out.rank() == 2 && x.size(1) == out.size(1) &&
                   out.size(0) == std::ssize(x_rows) && x_rows.size() == pair_experts.size() &&
                   out.dtype() == DType::kF32 &&
                   (x.dtype() == DType::kBF16 || x.dtype() == DType::kF32),
               "{} rows and {} experts of x {} {}, out {} {}", x_rows.size(), pair_experts.size(),
               name_of(x.dtype()), x.shape_string(), name_of(out.dtype()), out.shape_string());
  if (x_rows.empty()) return;
  Workspace workspace(memory);
  auto* const lists = workspace.take<ExpertRows>(std::ssize(experts));
  std::uninitialized_default_construct_n(lists, experts.size());
  list_pairs(x_rows, pair_experts, experts, x.dtype(), workspace, lists);
  feed_forward(stream, x, {lists, experts.size()}, out);
}

void add_expert_outputs(const Stream& stream, std::span<const WeightedRow> terms, int64_t per_row,
                        TensorView out) {
  FATHOM_CHECK(
      out.rank() == 2 && out.dtype() == DType::kF32 && std::ssize(terms) == out.size(0) * per_row,
      "{} terms, {} a row, for out {}", terms.size(), per_row, out.shape_string());
  const LinearKernels& kernels = linear_kernels(cpu_isa());
  // Rows that are worth a thread: they read 256 KiB.
  const int64_t grain =
      std::max<int64_t>(1, (64 << 10) / std::max<int64_t>(1, out.size(1) * per_row));
  stream.pool().parallel_for(out.size(0), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      for (const WeightedRow& term :
           terms.subspan(static_cast<size_t>(row * per_row), static_cast<size_t>(per_row))) {
        kernels.add_scaled(term.values, term.weight, out.size(1), out.row<float>(row));
      }
    }
  });
}

}  // namespace fathom
