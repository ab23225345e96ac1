// Workspace layout of many-token MoE, and how the shared expert's GEMMs are tiled. Host code, a
// pure function of the sizes: it does not know the tokens' experts.
#pragma once

#include <cstdint>

namespace fathom::cuda {

// Alignment of an expert's first row, and divisor of tile sizes.
inline constexpr int kExpertRowUnit = 16;
// Rows of one expert that a CTA computes at a time, as the kernels read it. An expert's tiles are
// contiguous in the list; each entry can place any of them.
struct alignas(16) ExpertRowTile {
  int32_t expert = 0;
  int32_t first_row = 0;                  // expert's first row among the sorted rows
  int32_t units = 0;                      // units of kExpertRowUnit rows that the expert has
  int32_t first_tile = 0, num_tiles = 0;  // the expert's tiles in the list
  int32_t padding[3] = {};
};

struct MoeManyRowsSizes {
  int64_t rows = 0, hidden = 0, num_experts = 0, experts_per_token = 0, inter = 0, shared_inter = 0;
  bool scaled = false;  // x and activations are e4m3 with scales of 128 columns, not bf16
};

// Byte offsets into the workspace, each a multiple of 1024.
struct MoeManyRowsPlan {
  int tile_tokens = 256;                // in a row tile, at most
  bool one_row_tile_an_expert = false;  // for most experts: their weights are read once
  int64_t sorted_rows = 0;              // at most: all experts, each rounded up to kExpertRowUnit
  int64_t max_row_tiles = 0;            // all experts
  int64_t num_row_tiles_at = 0, tiles_taken_at = 0, row_tiles_at = 0, positions_at = 0;
  int64_t sorted_x_at = 0;     // [sorted_rows, hidden]; reused for down's bf16 results
  int64_t activations_at = 0;  // [sorted_rows, inter]
  int64_t shared_activations_at = 0, shared_result_at = 0;  // [rows, shared_inter], [rows, hidden]
  // Scales, for e4m3: [columns / 128, sorted_rows], [shared_inter / 128, shared_scales_stride].
  int64_t x_scales_at = 0, activation_scales_at = 0, shared_activation_scales_at = 0;
  int64_t shared_scales_stride = 0;
  int64_t workspace_bytes = 0;
  int spare_sms = 0;  // that the GEMMs leave to launches beside them
};

MoeManyRowsPlan plan_moe_many_rows(const MoeManyRowsSizes& sizes);

}  // namespace fathom::cuda
