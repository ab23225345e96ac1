// Expert parallelism: takes rows to the ranks that host their experts, and the experts' outputs
// back.
//
// Each rank routes rows of its own and hosts whole experts, as an expert table says. Dispatch gives
// a row once to each rank that computes one of its experts, with the slots that are to compute it.
// Combine gives every output back in fp32, without its weight, and the row's own rank adds the
// outputs in ascending order of their experts, as moe() does: a row's sum has moe()'s bits,
// whatever the table, the batch and the copies that computed it. No row is dropped, however many go
// to one rank.
//
// Owns its buffers, which grow with the largest step. Belongs to the rank's thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "comm/group.h"
#include "comm/growing_buffer.h"
#include "device/stream.h"
#include "ops/moe/moe.h"
#include "placement/expert_table.h"

namespace fathom {

class ExpertExchange {
 public:
  // `world` has the ranks of the tables, in the tables' order, and outlives the exchange.
  ExpertExchange(Group& world, const Stream& stream);

  // Bytes that a rank's exchange holds after a step of `max_rows` tokens a lane, if experts' tokens
  // are spread evenly over the ranks. Uneven ones take more.
  static int64_t planned_bytes(const ModelConfig& config, const Placement& placement, DType operand,
                               int64_t max_rows);

  // out += the weighted outputs of the rows' routed experts. x [rows, hidden] bf16 or f32,
  // expert_ids [rows, k] i32 and expert_weights [rows, k] f32, out [rows, hidden] f32; hidden, k
  // and x's type are the same on all ranks, rows may be 0. `slots`: the weights of this rank's
  // slots in `layer`, which counts the table's layers. All ranks of the group call it, for the same
  // layers in the same order, with equal tables. Throws CommError.
  void add_experts(const ExpertTable& table, int64_t layer, std::span<const MlpWeights> slots,
                   ConstTensorView x, ConstTensorView expert_ids, ConstTensorView expert_weights,
                   TensorView out);

 private:
  // What this rank asks of another one. Pairs are of a row and an expert, in the rows' order and,
  // within a row, in ascending order of experts.
  struct Request {
    std::vector<int32_t> rows;       // of x
    std::vector<int32_t> pair_ends;  // [rows]: pairs up to and with the row's
    std::vector<int32_t> slots;      // [pairs] of the other rank
  };
  // Where the output of one of this rank's pairs comes from.
  struct Origin {
    int rank = 0;
    int64_t pair = 0;  // of the request to that rank
    float weight = 0;
  };

  void choose_copies(const ExpertTable& table, int64_t layer, ConstTensorView expert_ids,
                     ConstTensorView expert_weights);
  std::span<const ConstBytes> dispatch(ConstTensorView x);
  void compute(std::span<const ConstBytes> received, std::span<const MlpWeights> slots,
               int64_t hidden, DType type);
  void combine(int64_t per_row, TensorView out);

  Group& world_;
  const Stream stream_;
  std::vector<Request> requests_;        // [ranks]
  std::vector<Origin> origins_;          // [rows * k]
  std::vector<int32_t> order_;           // [k], of one row
  std::vector<ConstBytes> to_each_;      // [ranks]
  std::vector<int32_t> x_rows_, slots_;  // [pairs] that this rank computes
  std::vector<WeightedRow> terms_;       // [rows * k]
  GrowingBuffer x_, workspace_;          // rows that came, scratch of the experts
};

}  // namespace fathom
