// Plan of multi-head prefill attention on a GPU: its tiles and their assignment to CTAs. Host code,
// made once a step and used by every layer.
//
// A tile is up to 128 query rows of one head of one sequence, against the keys that they see, all
// of them or a run of them. Each CTA has a list of tiles, balanced so that all CTAs end at about
// the same time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace fathom::cuda {

// Read by the kernel.
struct alignas(16) MhaPrefillTile {
  static constexpr int kRows = 128;  // queries of a tile
  static constexpr int kKeys = 128;  // keys of a step

  int32_t first_row = 0;  // of q and out
  int32_t rows = 0;       // 0: the CTA has no more tiles
  int32_t first_key = 0;  // the run's first row of kv and k_rope
  int32_t num_keys = 0;   // of the run
  int32_t visible = 0;    // keys of the run that the first row sees; each row sees one more
  int32_t joined = 0;     // 1: combined with the rows' results over earlier keys
  int32_t head = 0;
  int32_t steps = 0;  // of kKeys keys; the last may be partial
};

// Queries of one sequence against a run of its keys. A sequence whose keys are expanded in several
// runs has one for each, in successive launches: in the order of the keys, each with the rows that
// see some of them.
struct MhaPrefillPart {
  int32_t first_row = 0, rows = 0;      // of q and out
  int32_t first_key = 0, num_keys = 0;  // of kv and k_rope
  // Keys of the run that the first row sees, at least one; each row sees one more. Where that
  // exceeds the run, the row's result waits for a later run; num_keys is then a multiple of
  // MhaPrefillTile::kKeys. (Without any keys the rows' results are 0.)
  int32_t visible = 0;
  bool joined = false;  // not the sequence's first run
};

struct MhaPrefillPlan {
  std::vector<int32_t> first_tile;  // [SMs]: index of each CTA's first tile
  std::vector<MhaPrefillTile> tiles;
};

// Plans one launch for runs of different sequences.
MhaPrefillPlan plan_mha_prefill(std::span<const MhaPrefillPart> parts, int num_heads,
                                int num_multiprocessors);

}  // namespace fathom::cuda
