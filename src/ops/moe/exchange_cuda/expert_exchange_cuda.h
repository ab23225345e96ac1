// Dispatch and combine over peer memory: rows go to the ranks of their experts, and the experts'
// results back to the rows, where each rank of one process holds whole experts of its own.
//
// Ranks pull. A rank's x, expert ids, sorted places and results lie in its own memory, from which
// the others read them inside their launches; nothing is sent, and nothing passes through the host.
// A round is
//
//   dispatch_experts()           waits until all ranks have their x and ids; lists the pairs of a
//                                row and an expert that this rank computes; copies their rows
//   the experts' grouped GEMMs   over the sorted rows, moe_many_rows_products() and the like
//   combine_experts_of_ranks()   waits until all ranks have their results; adds a row's results up
//                                in ascending order of its experts, in fp32
//
// All ranks make the same rounds in the same order, a rank without rows, too. A round takes a part
// of each rank's rows (plan_exchange_rounds()), numbered over all ranks, rank after rank. How many
// each rank has is read on the device, where the ranks have published it: a captured round can be
// replayed.
//
// Why no wait stands at the end of a round: a rank's x and ids are written anew after its own
// combine, at whose wait all ranks have ended their copies; places and results are written anew
// after the next round's dispatch, at whose wait all ranks have ended their combine. Nothing else
// may write the workspace.
#pragma once

#include <cstdint>

#include "device/cuda/gpu_stream.h"
#include "device/cuda/peer_group.h"
#include "ops/moe/plans/expert_exchange_plan.h"
#include "tensor/dtype.h"

namespace fathom::cuda {

// What the ranks read in one rank's memory.
struct ExchangePeer {
  const int32_t* expert_ids = nullptr;  // [rows, experts_per_token], -1: none
  const void* x = nullptr;              // [rows, x_vectors] of 16 bytes, bf16 or e4m3
  const float* x_scales = nullptr;      // [scale_blocks, OfferedRows::scales_stride]
  OfferedRows* offered = nullptr;
  const int32_t* positions = nullptr;  // [room of a round, experts_per_token]: each pair's row
  const void* results = nullptr;       // [sorted_rows, hidden] bf16
  int32_t sorted_rows = 0;
};

// One rank's view of the exchange, passed to kernels by value.
struct ExpertExchange {
  ExchangePeer ranks[kMostPeers];
  PeerRank peers;                  // of a group that makes no other barriers than the exchange's
  std::byte* workspace = nullptr;  // plan.workspace_bytes, aligned to 1024; zero at first
  ExpertExchangePlan plan;         // this rank's
  int32_t capacity = 0, num_experts = 0, experts_per_token = 0;
  int32_t hidden = 0, x_vectors = 0, scale_blocks = 0;  // scale_blocks: 0 without scales
};

// A rank's part of what the others read, in a workspace of the plan.
ExchangePeer exchange_peer(const ExpertExchangePlan& plan, std::byte* workspace);

struct DispatchExpertsArguments {
  const ExpertExchange& exchange;
  MoeManyRowsPlan moe;                      // of this round, see plan_exchange_round()
  const ExpertHost* hosts = nullptr;        // [num_experts], in device memory, one layer's
  RowShare own;                             // rows of this rank's x that it offers
  const int32_t* num_valid_rows = nullptr;  // on the device: rows beyond are padding; null: none
  int64_t scales_stride = 0;                // of this rank's x
  int32_t num_slots = 0;                    // experts of this rank in the layer
  int32_t round = 0, rounds = 1;
  int32_t most_rows = 0;  // in this round, of all ranks; up to room_of_exchange(capacity)
  int sms = 1;            // that the CTAs which wait for other ranks may take
};
void dispatch_experts(const DispatchExpertsArguments& arguments, GpuStream stream);

// out[row] of this rank's `rows` rows, of which it offers `own`: the sum in the round that takes
// the row, in the first one for padding; rows of other ranks' shares are 0.
struct CombineExpertsOfRanksArguments {
  const ExpertExchange& exchange;
  const ExpertHost* hosts = nullptr;
  const float* weights = nullptr;  // [rows, experts_per_token]
  // [own.count, hidden] bf16, which is added last; null: none
  const void* shared_results = nullptr;
  RowShare own;
  int32_t rows = 0, round = 0;
  void* out = nullptr;  // [rows, hidden]
  DType out_type = DType::kBF16;
};
void combine_experts_of_ranks(const CombineExpertsOfRanksArguments& arguments, GpuStream stream);

}  // namespace fathom::cuda
