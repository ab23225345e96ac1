#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"

#include <algorithm>
#include <functional>
#include <queue>

#include "base/check.h"
#include "base/math.h"
#include "cache/latent_layout.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kLatent = 512;
constexpr int kBlockRows = 64;  // the most rows that a CTA computes

// A boundary between two CTAs moves by up to this many tiles to coincide with one between two row
// tiles: a split and its combine cost about as much as reading two tiles.
constexpr int64_t kSnap = 2;

// The same for CTAs of 64 rows, whose partial results are 128 KB: a CTA may exceed its share by
// this many tiles, or by a 32nd, where that avoids a split.
constexpr int64_t kSlack = 6;

struct RowTile {
  int32_t sequence = 0, first_row = 0, rows = 0, out_row = 0;
  int64_t key_tiles = 0;
};

// The number of tiles in [begin, end) whose keys all precede this step.
int32_t old_tiles(const PagedBatch& batch, int32_t sequence, int64_t begin, int64_t end) {
  const auto cached = batch.cached_lens.empty() ? batch.context_lens : batch.cached_lens;
  const int64_t old = cached[static_cast<size_t>(sequence)] / kPageSize;
  return static_cast<int32_t>(std::clamp(old, begin, end) - begin);
}

class Planner {
 public:
  Planner(const PagedBatch& batch, std::span<const int32_t> sequences, int num_heads)
      : batch_(batch) {
    int64_t most_rows = 0;
    for (const int32_t s : sequences) {
      most_rows = std::max<int64_t>(most_rows, int64_t{batch.num_queries(s)} * num_heads);
    }
    plan_.tile_rows = latent_decode_tile_rows(most_rows);
    for (const int32_t s : sequences) {
      const int32_t rows = batch.num_queries(s) * num_heads;
      for (int32_t first = 0; first < rows; first += plan_.tile_rows) {
        tiles_.push_back({s, first, std::min(plan_.tile_rows, rows - first),
                          batch.query_start[s] * num_heads + first,
                          ceil_div(batch.total_len(s), kPageSize)});
      }
    }
  }

  LatentDecodePlan make(int num_multiprocessors) {
    // A pair of CTAs computes a tile of 128 rows.
    const int blocks =
        std::max(1, num_multiprocessors * kBlockRows / std::max(kBlockRows, plan_.tile_rows));
    if (std::ssize(tiles_) <= blocks) {
      cut_evenly(blocks);
    } else if (plan_.tile_rows < kBlockRows) {
      cut_in_sequence(blocks);
    } else {
      fill(blocks);
    }
    lay_out(num_multiprocessors);
    return std::move(plan_);
  }

 private:
  // One split a CTA: no split has more than `most` key tiles, the smallest number for which the
  // CTAs suffice.
  void cut_evenly(int num_blocks) {
    int64_t total = 0;
    for (const RowTile& tile : tiles_) total += tile.key_tiles;
    const auto blocks_with = [&](int64_t most) {
      int64_t count = 0;
      for (const RowTile& tile : tiles_) count += ceil_div(tile.key_tiles, most);
      return count;
    };
    int64_t most = std::max<int64_t>(1, ceil_div(total, num_blocks));
    while (blocks_with(most) > num_blocks) ++most;
    for (const RowTile& tile : tiles_) {
      const int64_t splits = ceil_div(tile.key_tiles, most);
      const auto [slot, weight] = reserve(splits);
      for (int64_t i = 0; i < splits; ++i) {
        const int64_t begin = tile.key_tiles * i / splits, end = tile.key_tiles * (i + 1) / splits;
        blocks_.push_back({part(tile, begin, end, i, splits, slot, weight)});
      }
    }
  }

  // Longest row tiles first, each to the least-loaded CTA (Graham, 1969); splits only what would
  // exceed a CTA's share by too much.
  void fill(int num_blocks) {
    std::vector<const RowTile*> order;
    int64_t total = 0;
    for (const RowTile& tile : tiles_) {
      order.push_back(&tile);
      total += tile.key_tiles;
    }
    std::ranges::stable_sort(order, std::ranges::greater{}, &RowTile::key_tiles);
    const int64_t share = ceil_div(total, num_blocks), most = share + std::max(kSlack, share / 32);
    using Load = std::pair<int64_t, size_t>;  // key tiles and number of a CTA
    std::priority_queue<Load, std::vector<Load>, std::greater<>> least;
    blocks_.resize(static_cast<size_t>(num_blocks));
    for (size_t b = 0; b < blocks_.size(); ++b) least.emplace(0, b);
    for (const RowTile* tile : order) {
      std::vector<std::pair<size_t, int64_t>> runs;  // CTA and end of each run
      for (int64_t end = 0; end < tile->key_tiles;) {
        const auto [load, block] = least.top();
        least.pop();
        const int64_t count = std::min(tile->key_tiles - end, most - load);
        end += count;
        runs.emplace_back(block, end);
        least.emplace(load + count, block);
      }
      const auto splits = std::ssize(runs);
      const auto [slot, weight] = reserve(splits);
      int64_t begin = 0;
      for (int64_t i = 0; i < splits; ++i) {
        const auto [block, end] = runs[static_cast<size_t>(i)];
        blocks_[block].push_back(part(*tile, begin, end, i, splits, slot, weight));
        begin = end;
      }
    }
  }

  // Concatenates all key tiles and cuts them into equal runs.
  void cut_in_sequence(int num_blocks) {
    std::vector<int64_t> starts = {0};  // start of each row tile, and the end
    for (const RowTile& tile : tiles_) starts.push_back(starts.back() + tile.key_tiles);
    std::vector<int64_t> cuts = {0};
    for (int block = 1; block < num_blocks; ++block) {
      const int64_t wanted = starts.back() * block / num_blocks;
      const auto next = std::ranges::lower_bound(starts, wanted);
      int64_t cut = wanted;
      if (*next - wanted <= kSnap) {
        cut = *next;
      } else if (next != starts.begin() && wanted - *(next - 1) <= kSnap) {
        cut = *(next - 1);
      }
      cuts.push_back(std::max(cut, cuts.back()));
    }
    cuts.push_back(starts.back());
    blocks_.resize(static_cast<size_t>(num_blocks));
    size_t first = 0;
    for (size_t t = 0; t < tiles_.size(); ++t) {
      // The CTAs whose runs overlap this row tile.
      while (cuts[first + 1] <= starts[t]) ++first;
      std::vector<size_t> owners;
      for (size_t b = first; b + 1 < cuts.size() && cuts[b] < starts[t + 1]; ++b) {
        if (cuts[b] < cuts[b + 1]) owners.push_back(b);
      }
      const auto splits = std::ssize(owners);
      const auto [slot, weight] = reserve(splits);
      for (int64_t i = 0; i < splits; ++i) {
        const size_t b = owners[static_cast<size_t>(i)];
        blocks_[b].push_back(part(tiles_[t], std::max(cuts[b], starts[t]) - starts[t],
                                  std::min(cuts[b + 1], starts[t + 1]) - starts[t], i, splits, slot,
                                  weight));
      }
    }
  }

  std::pair<int64_t, int64_t> reserve(int64_t splits) {
    const std::pair first = {plan_.num_slots, plan_.num_weights};
    if (splits > 1) {
      plan_.num_slots += splits;
      plan_.num_weights += splits * splits;
    }
    return first;
  }

  LatentDecodePart part(const RowTile& tile, int64_t begin, int64_t end, int64_t split,
                        int64_t splits, int64_t slot, int64_t weight) const {
    LatentDecodePart part;
    part.first_page = static_cast<int32_t>(tile.sequence * int64_t{batch_.max_pages} + begin);
    part.first_row = tile.first_row;
    part.rows = tile.rows;
    part.out_row = tile.out_row;
    part.first_tile = static_cast<int32_t>(begin);
    part.num_tiles = static_cast<int32_t>(end - begin);
    part.old_tiles = old_tiles(batch_, tile.sequence, begin, end);
    part.kv_len = batch_.total_len(tile.sequence);
    part.num_queries = batch_.num_queries(tile.sequence);
    part.split = static_cast<int32_t>(split);
    part.num_splits = static_cast<int32_t>(splits);
    part.first_slot = static_cast<int32_t>(slot);
    part.first_weight = static_cast<int32_t>(weight);
    const auto pages = batch_.pages(tile.sequence);
    for (int i = 0; i < std::min(part.num_tiles, LatentDecodePart::kPagesWithin); ++i) {
      part.pages[i] = pages[static_cast<size_t>(part.first_tile + i)];
    }
    return part;
  }

  void lay_out(int num_multiprocessors) {
    blocks_.resize(static_cast<size_t>(num_multiprocessors));
    for (std::vector<LatentDecodePart>& block : blocks_) {
      plan_.first_part.push_back(static_cast<int32_t>(plan_.parts.size()));
      for (LatentDecodePart& part : block) {
        part.more = &part != &block.back() ? 1 : 0;
        plan_.parts.push_back(part);
      }
    }
    const auto nothing = static_cast<int32_t>(plan_.parts.size());
    plan_.parts.emplace_back();
    for (size_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b].empty()) plan_.first_part[b] = nothing;
    }
  }

  const PagedBatch& batch_;
  std::vector<RowTile> tiles_;
  std::vector<std::vector<LatentDecodePart>> blocks_;
  LatentDecodePlan plan_;
};

// Plans for one launch after the other. Splits are assigned to CTAs round-robin, so that those of a
// row tile, which wait for one another, are in different CTAs.
class BatchInvariantPlanner {
 public:
  BatchInvariantPlanner(const PagedBatch& batch, int num_heads, int num_multiprocessors)
      : batch_(batch),
        num_heads_(num_heads),
        num_blocks_(num_multiprocessors),
        tile_rows_(std::min(latent_decode_tile_rows(num_heads), kBlockRows)) {
    const LatentDecodeScratch scratch = latent_decode_scratch(num_multiprocessors);
    most_slots_ = scratch.sums / (tile_rows_ * kLatent);
    most_weights_ = scratch.weights / tile_rows_;
  }

  std::vector<LatentDecodePlan> make(std::span<const int32_t> sequences) {
    FATHOM_CHECK(batch_.first_key == 0 || (batch_.first_key == 1 && num_blocks_ > 1),
                 "keys begin at {}, {} CTAs", batch_.first_key, num_blocks_);
    for (const int32_t s : sequences) {
      for (int32_t token = 0; token < batch_.num_queries(s); ++token) add_token(s, token);
    }
    end_plan();
    return std::move(plans_);
  }

 private:
  void add_token(int32_t sequence, int32_t token) {
    LatentDecodePart part;
    part.kv_len = batch_.context_lens[static_cast<size_t>(sequence)] + token + 1;
    part.num_queries = 1;
    const int32_t keys = part.kv_len;
    const int64_t tiles = ceil_div(keys, kPageSize);
    // With a hidden key the first page is a split of its own, unless it is the only one.
    const int64_t hidden = batch_.first_key, alone = hidden > 0 && tiles > 1 ? 1 : 0;
    part.num_splits = static_cast<int32_t>(
        alone + std::min<int64_t>(batch_invariant_splits(tiles - alone), num_blocks_ - alone));
    const int64_t slots = part.num_splits > 1 ? part.num_splits : 0;
    const auto pages = batch_.pages(sequence);
    for (int32_t head = 0; head < num_heads_; head += tile_rows_) {
      if (slots_ + slots > most_slots_ || weights_ + slots * slots > most_weights_) end_plan();
      part.first_row = head;
      part.rows = std::min(tile_rows_, num_heads_ - head);
      part.out_row =
          (batch_.query_start[static_cast<size_t>(sequence)] + token) * num_heads_ + head;
      part.first_slot = static_cast<int32_t>(slots_);
      part.first_weight = static_cast<int32_t>(weights_);
      for (part.split = 0; part.split < part.num_splits; ++part.split) {
        const int64_t splits = part.num_splits - alone, number = part.split - alone;
        const int64_t begin = number < 0 ? 0 : alone + (tiles - alone) * number / splits,
                      end = alone + (tiles - alone) * (number + 1) / splits;
        const bool hides = hidden > 0 && begin == 0;
        part.kv_len =
            hides ? static_cast<int32_t>(std::min<int64_t>(keys, kPageSize) - hidden) : keys;
        part.first_page = static_cast<int32_t>(sequence * int64_t{batch_.max_pages} + begin);
        part.first_tile = static_cast<int32_t>(begin);
        part.num_tiles = static_cast<int32_t>(end - begin);
        part.old_tiles = old_tiles(batch_, sequence, begin, end);
        for (int i = 0; i < LatentDecodePart::kPagesWithin; ++i) {
          part.pages[i] = begin + i < end ? pages[static_cast<size_t>(begin + i)] : 0;
        }
        parts_.push_back(part);
      }
      slots_ += slots;
      weights_ += slots * slots;
    }
  }

  // Split i is the next one of CTA i % blocks.
  void end_plan() {
    LatentDecodePlan plan;
    plan.tile_rows = tile_rows_;
    plan.num_slots = slots_;
    plan.num_weights = weights_;
    const auto blocks = static_cast<size_t>(num_blocks_);
    for (size_t block = 0; block < blocks; ++block) {
      plan.first_part.push_back(
          static_cast<int32_t>(block < parts_.size() ? plan.parts.size() : parts_.size()));
      for (size_t i = block; i < parts_.size(); i += blocks) {
        plan.parts.push_back(parts_[i]);
        plan.parts.back().more = i + blocks < parts_.size() ? 1 : 0;
      }
    }
    plan.parts.emplace_back();
    plans_.push_back(std::move(plan));
    parts_.clear();
    slots_ = weights_ = 0;
  }

  const PagedBatch& batch_;
  const int num_heads_, num_blocks_, tile_rows_;
  int64_t most_slots_ = 0, most_weights_ = 0;
  std::vector<LatentDecodePart> parts_;  // of the plan under construction
  int64_t slots_ = 0, weights_ = 0;
  std::vector<LatentDecodePlan> plans_;
};

}  // namespace

// The n - 1 borders between n CTAs' runs cut row tiles: k cuts in one make k + 1 splits, which have
// a slot each and (k + 1)^2 weights. The most slots come from one cut in each of n - 1 row tiles,
// the most weights from all cuts in one. Where CTAs are filled, each cut fills one: no more cuts.
LatentDecodeScratch latent_decode_scratch(int num_multiprocessors) {
  const int64_t n = num_multiprocessors;
  return {.sums = 2 * n * kBlockRows * kLatent, .weights = n * n * kBlockRows};
}

int latent_decode_tile_rows(int64_t most_rows) {
  if (most_rows <= 16) return 16;
  if (most_rows <= 32) return 32;
  return most_rows <= 64 ? 64 : 128;
}

LatentDecodePlan plan_latent_decode(const PagedBatch& batch, std::span<const int32_t> sequences,
                                    int num_heads, int num_multiprocessors) {
  FATHOM_CHECK(num_heads >= 1 && num_multiprocessors >= 1 && batch.first_key == 0,
               "{} heads, {} multiprocessors, keys from {} on", num_heads, num_multiprocessors,
               batch.first_key);
  return Planner(batch, sequences, num_heads).make(num_multiprocessors);
}

// Few enough that long contexts leave room for other sequences, and short ones are not split in
// vain.
int64_t batch_invariant_splits(int64_t pages) {
  constexpr int64_t kPagesAPart = 8, kMostSplits = 64;
  return std::clamp<int64_t>(ceil_div(pages, kPagesAPart), 1, kMostSplits);
}

// Unsplit row tiles, as many splits as there are slots, and an empty one.
int64_t most_batch_invariant_parts(int64_t row_tiles, int num_multiprocessors) {
  return row_tiles + latent_decode_scratch(num_multiprocessors).sums / (16 * kLatent) + 1;
}

std::vector<LatentDecodePlan> plan_batch_invariant_latent_decode(const PagedBatch& batch,
                                                                 std::span<const int32_t> sequences,
                                                                 int num_heads,
                                                                 int num_multiprocessors) {
  FATHOM_CHECK(num_heads >= 1 && num_multiprocessors >= 1, "{} heads, {} multiprocessors",
               num_heads, num_multiprocessors);
  return BatchInvariantPlanner(batch, num_heads, num_multiprocessors).make(sequences);
}

}  // namespace fathom::cuda
