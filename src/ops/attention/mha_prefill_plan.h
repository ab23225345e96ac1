// How multi-head prefill attention on a GPU is cut into tiles, and which block computes which. Host
// code, made once a step and used by every layer.
//
// A tile is up to 128 query rows of one head of one sequence, against the keys that they see, all
// of them or a run of them. Each block has a list of tiles, made so that all blocks end at about
// the same time.
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
  int32_t first_key = 0;  // the run's first row of kv and k_rope
  int32_t num_keys = 0;   // of the run
  int32_t visible = 0;  // of the run's keys on, the first row sees [0, visible); each row one more
  int32_t joined = 0;   // 1: with the rows' results over the keys before the run
  int32_t head = 0;
  int32_t steps = 0;  // of kKeys keys; the last may be partial
};

// Queries of one sequence against a run of its keys. A sequence whose keys are not expanded at once
// has several, in launches one after the other: in the order of the keys, each with the rows that
// see some of them.
struct MhaPrefillPart {
  int32_t first_row = 0, rows = 0;      // of q and out
  int32_t first_key = 0, num_keys = 0;  // of kv and k_rope
  // Keys that the first row sees, from the run's first on: at least one; each row sees one more.
  // Where that is more than the run has, the row's result waits for a later part; num_keys is then
  // a multiple of MhaPrefillTile::kKeys. (Without any keys the rows' results are 0.)
  int32_t visible = 0;
  bool joined = false;  // not the sequence's first part
};

struct MhaPrefillPlan {
  std::vector<int32_t> first_tile;  // [multiprocessors]: where each block's tiles begin
  std::vector<MhaPrefillTile> tiles;
};

// Parts of different sequences, for one launch.
MhaPrefillPlan plan_mha_prefill(std::span<const MhaPrefillPart> parts, int num_heads,
                                int num_multiprocessors);

}  // namespace fathom::cuda
