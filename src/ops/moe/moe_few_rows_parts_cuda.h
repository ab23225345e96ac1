// The two launches of moe_few_rows and what the first leaves for the second.
#pragma once

#include <cuda_bf16.h>

#include "ops/moe/moe_cuda.h"
#include "ops/moe/moe_few_rows_plan.h"

namespace fathom::cuda {

inline constexpr int kTileTokens = 64;      // N of the tensor core's instruction, at most
inline constexpr int kMaxTokenTiles = 320;  // of up to 256 experts and 4,096 pairs

// Up to kTileTokens tokens of one expert: places first … first + count of the pairs (token, expert)
// sorted by expert.
struct TokenTile {
  int32_t first;
  int16_t expert, count;
};

struct MoeFewRowsWorkspace {
  int32_t* num_tiles;     // [1]
  TokenTile* tiles;       // [num_tiles], ascending experts
  int32_t* tokens;        // [pairs]: the token of each place
  __nv_bfloat16* routed;  // [pairs, inter]: activations, times the expert's weight
  __nv_bfloat16* shared;  // [rows, shared_inter]
  int64_t bytes;
};

// The parts of a workspace that begins at `memory`, one after the other; and its size.
MoeFewRowsWorkspace moe_few_rows_workspace(const MoeShape& shape, int32_t rows, void* memory);

// rows x (gate, up) -> activations, and the lists.
void moe_gate_up(const MoeFewRowsPlan& plan, const MoeArguments& arguments,
                 const MoeFewRowsWorkspace& workspace, cudaStream_t stream);

// activations x down -> out.
void moe_down(const MoeFewRowsPlan& plan, const MoeArguments& arguments,
              const MoeFewRowsWorkspace& workspace, cudaStream_t stream);

}  // namespace fathom::cuda
