// How multi-head prefill attention on a GPU is cut into tiles, and which block computes which. Host
// code, made once a step and used by every layer.
//
// A tile is up to 128 query rows of one head of one sequence, against all keys that they see. Each
// block has a list of tiles, made so that all blocks end at about the same time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fathom::cuda {

// As the kernel reads it.
struct alignas(16) MhaPrefillTile {
  static constexpr int kRows = 128;  // queries of a tile
  static constexpr int kKeys = 128;  // that are multiplied at a time

  int32_t first_row = 0;  // of q and out
  int32_t rows = 0;       // 0: the block has no more tiles
  int32_t first_key = 0;  // the sequence's first row of kv and k_rope
  int32_t num_keys = 0;   // of the sequence
  int32_t visible = 0;    // keys that the first row sees: [0, visible)
  int32_t causal = 0;     // 1: each row sees a key more than the one before it; 0: as many
  int32_t head = 0;
  int32_t steps = 0;  // of kKeys keys; the last may be partial
};

enum class MhaMask {
  kCausal,  // query i of q sees keys [0, keys - q + i]: the sequence's last keys are the queries'
  kNone,    // every query sees every key: a part of the sequence's prefix
};

struct MhaPrefillPlan {
  std::vector<int32_t> first_tile;  // [multiprocessors]: where each block's tiles begin
  std::vector<MhaPrefillTile> tiles;
};

// Sequence s has the rows [query_starts[s], query_starts[s + 1]) of q and [key_starts[s],
// key_starts[s + 1]) of kv; [sequences + 1] each. kCausal: no fewer keys than queries.
MhaPrefillPlan plan_mha_prefill(std::span<const int32_t> query_starts,
                                std::span<const int32_t> key_starts, MhaMask mask, int num_heads,
                                int num_multiprocessors);

}  // namespace fathom::cuda
