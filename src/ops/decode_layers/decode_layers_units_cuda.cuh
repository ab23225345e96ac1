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

// Lists the units of all tokens: the first token's experts, then those of each next one that none
// before it has. Reads chosen_ids and arrives at the barrier `chosen`. By one warp, a lane for each
// choice.
template <typename L>
__device__ inline void make_units(Shared<L>& shared, const DecodeLayersArguments& a, int lane) {
  constexpr int kRows = L::kRows, kUnits = most_units(kRows, L::kChosen);
  static_assert(kRows * L::kChosen <= kWarp);
  auto& lists = shared.of_rows;
  const int r = lane / L::kChosen, j = lane % L::kChosen;
  const bool is_choice = r < a.rows;
  const uint32_t same =
      __match_any_sync(~0u, is_choice ? lists.chosen_ids[r][j] : -1 - lane);  // lanes
  const int first = __ffs(static_cast<int>(same)) - 1;
  const uint32_t added = __ballot_sync(~0u, is_choice && first == lane);
  const int unit = 1 + __popc(added & ((1u << first) - 1));
  int32_t* const places = lists.place_of[0];
  for (int i = lane; i < kRows * kUnits; i += kWarp) places[i] = i % kUnits == 0 ? 0 : -1;
  __syncwarp();
  if (is_choice) {
    const bool is_once = FATHOM_PLANTED(a, kSharedExpertOnce) && first != lane;
    lists.unit_of[r][1 + j] = unit;
    places[r * kUnits + unit] = is_once ? -1 : 1 + j;
    if (first == lane) {
      uint32_t tokens = 0;
#pragma unroll
      for (int other = 0; other < kRows; ++other) {
        const bool has = (same >> (other * L::kChosen) & ((1u << L::kChosen) - 1)) != 0;
        tokens |= static_cast<uint32_t>(has) << other;
      }
      shared.ids[unit - 1] = lists.chosen_ids[r][j];
      lists.tokens_of[unit] = tokens;
    }
  } else if (r < kRows) {
    lists.unit_of[r][1 + j] = 0;
  }
  if (lane < kRows) lists.unit_of[lane][0] = 0;
  if (lane == 0) lists.num_units = __popc(added);
  __syncwarp();
  if (lane == 0) barrier_arrive(&shared.chosen);
}

}  // namespace fathom::cuda::decode_layers_kernel
