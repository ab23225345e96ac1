#include "ops/attention/prefill_cuda/mha_prefill_plan.h"

#include <algorithm>
#include <queue>

#include "base/check.h"
#include "base/math.h"

namespace fathom::cuda {
namespace {

// Heads run in groups of this many bytes of keys and values, so that their tiles find them in the
// L2 (60 MB, which queries and results pass through too). Measured: 8 and 16 MB are equal, 32 MB
// costs up to 13 %, 64 MB up to 21 %. A key and head has 256 bf16 values.
constexpr int64_t kBytesTogether = int64_t{8} << 20;
constexpr int64_t kBytesAKey = 512;

// Besides its steps, a tile costs about one step for loading queries and writing results.
constexpr int64_t kTileCost = 1;

// Tiles in launch order: heads whose keys fit the L2 together, among these the longest first, so
// that short ones fill the CTAs' ends.
std::vector<MhaPrefillTile> tiles_in_order(std::span<const MhaPrefillPart> parts, int num_heads) {
  std::vector<MhaPrefillTile> tiles;
  int64_t bytes = 0;
  size_t together = 0;  // first tile of the group of heads that run together
  const auto longest_first = [&] {
    std::stable_sort(tiles.begin() + static_cast<std::ptrdiff_t>(together), tiles.end(),
                     [](const auto& a, const auto& b) { return a.steps > b.steps; });
  };
  for (const MhaPrefillPart& part : parts) {
    if (part.rows == 0) continue;
    const int32_t keys = part.num_keys;
    FATHOM_CHECK(part.visible >= 1, "a part's first row sees {} keys", part.visible);
    FATHOM_CHECK(part.visible + part.rows - 1 <= keys || keys % MhaPrefillTile::kKeys == 0,
                 "{} keys, of {} that are seen", keys, part.visible + part.rows - 1);
    for (int32_t head = 0; head < num_heads; ++head) {
      if (bytes > 0 && bytes + keys * kBytesAKey > kBytesTogether) {
        longest_first();
        together = tiles.size();
        bytes = 0;
      }
      bytes += keys * kBytesAKey;
      for (int32_t row = 0; row < part.rows; row += MhaPrefillTile::kRows) {
        const int32_t rows = std::min(MhaPrefillTile::kRows, part.rows - row);
        const int32_t seen = std::min(part.visible + row + rows - 1, keys);  // by the last row
        tiles.push_back({.first_row = part.first_row + row,
                         .rows = rows,
                         .first_key = part.first_key,
                         .num_keys = keys,
                         .visible = part.visible + row,
                         .joined = part.joined,
                         .head = head,
                         .steps = static_cast<int32_t>(ceil_div(seen, MhaPrefillTile::kKeys))});
      }
    }
  }
  longest_first();
  return tiles;
}

}  // namespace

MhaPrefillPlan plan_mha_prefill(std::span<const MhaPrefillPart> parts, int num_heads,
                                int num_multiprocessors) {
  FATHOM_CHECK(num_heads >= 1 && num_multiprocessors >= 1, "{} heads, {} multiprocessors",
               num_heads, num_multiprocessors);
  const auto tiles = tiles_in_order(parts, num_heads);
  MhaPrefillPlan plan;
  std::vector<std::vector<MhaPrefillTile>> blocks(static_cast<size_t>(num_multiprocessors));
  // Each tile goes to the least-loaded CTA, to the first among equals.
  using Load = std::pair<int64_t, size_t>;
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (size_t block = 0; block < blocks.size(); ++block) loads.push({0, block});
  for (const MhaPrefillTile& tile : tiles) {
    auto [load, block] = loads.top();
    loads.pop();
    blocks[block].push_back(tile);
    loads.push({load + tile.steps + kTileCost, block});
  }
  for (const auto& block : blocks) {
    plan.first_tile.push_back(static_cast<int32_t>(plan.tiles.size()));
    plan.tiles.insert(plan.tiles.end(), block.begin(), block.end());
    plan.tiles.emplace_back();
  }
  return plan;
}

}  // namespace fathom::cuda
