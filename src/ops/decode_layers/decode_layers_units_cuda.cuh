// The experts of a launch's tokens, each listed once, so that one that two tokens choose is read
// once (SharedOfRows in decode_layers_memory_cuda.cuh).
#pragma once

#include "ops/decode_layers/decode_layers_memory_cuda.cuh"

namespace fathom::cuda::decode_layers_kernel {

// Routed experts that are read.
template <typename L>
__device__ inline int num_units(const Shared<L>& shared) {
  if constexpr (L::kRows == 1) {
    return L::kChosen;
  } else {
    return shared.of_rows.num_units;
  }
}

// Where a token has a unit among its experts, the shared one first; -1: it has not chosen it.
template <typename L>
__device__ inline int place_of_unit(const Shared<L>& shared, int row, int unit) {
  if constexpr (L::kRows == 1) {
    return unit;
  } else {
    return shared.of_rows.place_of[row][unit];
  }
}

// Lists the units of two tokens: the first token's experts, then those of the second that the first
// has not. Reads chosen_ids and arrives at the barrier `chosen`. By one warp, a lane for each
// choice.
template <typename L>
__device__ inline void make_units(Shared<L>& shared, const DecodeLayersArguments& a, int lane) {
  constexpr int kRows = L::kRows, kUnits = most_units(kRows, L::kChosen);
  static_assert(kRows == 2 && kRows * L::kChosen <= kWarp);
  auto& lists = shared.of_rows;
  const int r = lane / L::kChosen, j = lane % L::kChosen;
  const bool is_choice = r < kRows;
  const int id = is_choice ? lists.chosen_ids[r][j] : -1;
  int same = -1;
#pragma unroll
  for (int i = 0; i < L::kChosen; ++i) {
    if (__shfl_sync(~0u, id, i) == id) same = i;
  }
  const uint32_t added = __ballot_sync(~0u, r == 1 && same < 0);
  const int unit = 1 + (same >= 0 ? same : L::kChosen + __popc(added & ((1u << lane) - 1)));
  int32_t* const places = lists.place_of[0];
  for (int i = lane; i < kRows * kUnits; i += kWarp) places[i] = i % kUnits == 0 ? 0 : -1;
  __syncwarp();
  if (is_choice) {
    shared.ids[unit - 1] = id;
    lists.unit_of[r][1 + j] = unit;
    places[r * kUnits + unit] =
        FATHOM_PLANTED(a, kSharedExpertOnce) && r == 1 && same >= 0 ? -1 : 1 + j;
    if (j == 0) lists.unit_of[r][0] = 0;
  }
  if (lane == 0) lists.num_units = L::kChosen + __popc(added);
  __syncwarp();
  if (lane == 0) barrier_arrive(&shared.chosen);
}

}  // namespace fathom::cuda::decode_layers_kernel
