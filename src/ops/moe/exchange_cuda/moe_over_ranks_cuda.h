// moe() and scaled_moe() of experts that are spread over the ranks of one process:
//
//   out[t] = mlp_shared(x[t]) + sum over t's experts e of weight * mlp_e(x[t])
//
// Every rank calls it for the same layers in the same order, with rows of its own, which may be
// none, and the weights of its own experts; the shared expert is whole on every rank. Experts'
// results are rounded to bf16 and added in fp32, in ascending order of the experts, the shared one
// last: a row's bits are those that moe_many_rows() or scaled_moe_many_rows() gives one rank with
// all experts, whatever the ranks, the table and the other rows.
//
// Five launches more than the two GEMMs, of which two wait for other ranks
// (expert_exchange_cuda.h). The rounds of a step can be made in turn: dispatch of the next one and
// combine of the last one then run beside the GEMMs of one. The same on all ranks, and no bit
// depends on it.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/side_stream.h"
#include "ops/moe/bf16_cuda/moe_cuda.h"
#include "ops/moe/e4m3_cuda/scaled_moe_cuda.h"
#include "ops/moe/exchange_cuda/expert_exchange_cuda.h"

namespace fathom::cuda {

// What rounds in turn take: dispatch and combine have a stream of their own, and every second round
// a workspace.
struct RoundsInTurn {
  SideStream stream;
  StreamMark dispatched, multiplied;
};

// A step's part of the exchange, the same in all its layers with as many rows.
struct ExchangeStep {
  // Rows that all ranks offer together, without padding: of captured steps an upper bound, up to
  // the capacity. The same on all ranks but for captured steps.
  int64_t all_rows = 0;
  int64_t likely_rows = 0;  // for the choice of tiles, which no bit depends on; 0: all_rows
  // Ranks that have the same rows, which they divide, and this rank's place among them.
  int ranks_alike = 1, rank_alike = 0;
  const int32_t* num_valid_rows = nullptr;  // on the device, see DispatchExpertsArguments
  int sms = 1;                              // see there
  // Null: a round begins when the one before it has ended.
  const RoundsInTurn* in_turn = nullptr;
  // Exchange of rounds 1, 3, …: as `exchange`, but planned without a shared expert.
  const ExpertExchange* odd_rounds = nullptr;
  int spare_sms = 0;  // that GEMMs leave to the launches beside them
};

// The plan of a rank's workspace. shape: with the rank's number of experts. capacity: rows of a
// round but for what rounding adds, the same on all ranks, at least as many as the rank has in a
// step.
ExpertExchangePlan plan_moe_exchange(const MoeShape& shape, int64_t capacity, bool scaled);

// Arguments as of moe(), but: shape.num_experts are the rank's own; expert_ids count the experts of
// all ranks, and lie with x and the scales where the exchange says; workspace, progress,
// batch_invariant and budget are not read. hosts: [exchange.num_experts] of this layer.
void moe_over_ranks(const MoeArguments& arguments, const ExpertExchange& exchange,
                    const ExpertHost* hosts, const ExchangeStep& step, GpuStream stream);
void scaled_moe_over_ranks(const ScaledMoeArguments& arguments, const ExpertExchange& exchange,
                           const ExpertHost* hosts, const ExchangeStep& step, GpuStream stream);

}  // namespace fathom::cuda
