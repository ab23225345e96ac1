#include "ops/attention/latent_decode_cuda/latent_decode_plan.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <random>
#include <set>
#include <tuple>

#include "cache/latent_layout.h"
#include "ops/attention/latent_decode_cuda/hidden_key.h"

namespace fathom::cuda {
namespace {

struct Batch {
  std::vector<int32_t> query_start = {0}, context_lens, block_tables, sequences;
  int32_t max_pages = 0;

  void add(int32_t total, int32_t queries) {
    sequences.push_back(static_cast<int32_t>(context_lens.size()));
    query_start.push_back(query_start.back() + queries);
    context_lens.push_back(total - queries);
    max_pages = std::max(max_pages, (total + 63) / 64);
  }
  PagedBatch view() {
    block_tables.resize(context_lens.size() * static_cast<size_t>(max_pages));
    std::iota(block_tables.begin(), block_tables.end(), 1000);
    return {query_start, context_lens, block_tables, max_pages};
  }
};

// Tiles that the kernel may read before the PDL wait have no token of this step.
void expect_old_tiles(const LatentDecodePart& part, const PagedBatch& batch, int sequence) {
  const int context = batch.context_lens[static_cast<size_t>(sequence)];
  EXPECT_GE(part.old_tiles, 0);
  EXPECT_LE(part.old_tiles, part.num_tiles);
  for (int t = 0; t < part.num_tiles; ++t) {
    EXPECT_EQ(t < part.old_tiles, (part.first_tile + t + 1) * 64 <= context);
  }
}

// Weights of the row tiles that are cut: splits * splits of each, from its first_weight on.
class WeightRanges {
 public:
  void add(const LatentDecodePart& part) {
    if (part.num_splits == 1) return;
    const auto [range, is_new] = tiles_.try_emplace(part.first_weight, part.out_row);
    EXPECT_EQ(range->second, part.out_row) << "two row tiles have the same weights";
    ends_[part.first_weight] = part.first_weight + part.num_splits * part.num_splits;
  }
  void expect_disjoint(int64_t num_weights) const {
    int64_t end = 0;
    for (const auto& [begin, behind] : ends_) {
      EXPECT_GE(begin, end);
      end = behind;
    }
    EXPECT_LE(end, num_weights);
  }

 private:
  std::map<int32_t, int32_t> tiles_, ends_;
};

// Checks that every key of every row is covered once, CTAs are equally busy, and scratch memory is
// disjoint.
void check(Batch& batch, int heads, int processors) {
  const PagedBatch view = batch.view();
  const LatentDecodePlan plan = plan_latent_decode(view, batch.sequences, heads, processors);
  ASSERT_EQ(std::ssize(plan.first_part), processors);
  const LatentDecodeScratch scratch = latent_decode_scratch(processors);
  EXPECT_LE(plan.tile_rows * plan.num_slots * 512, scratch.sums);
  EXPECT_LE(plan.tile_rows * plan.num_weights, scratch.weights);
  std::map<std::tuple<int, int, int>, std::pair<int, int>> runs;  // of sequence, row, split
  std::vector<int> slot_users(static_cast<size_t>(plan.num_slots));
  WeightRanges weights;
  int64_t most = 0, total = 0;
  size_t seen_parts = 0;
  for (const int32_t first : plan.first_part) {
    int64_t work = 0;
    for (int32_t at = first;; ++at) {
      const LatentDecodePart& part = plan.parts.at(static_cast<size_t>(at));
      if (&part == &plan.parts.back()) {
        EXPECT_EQ(part.rows + part.num_tiles + part.more, 0);
        break;
      }
      const int sequence = part.first_page / view.max_pages;
      EXPECT_EQ(part.rows,
                std::min(plan.tile_rows, view.num_queries(sequence) * heads - part.first_row));
      EXPECT_EQ(part.first_page % view.max_pages, part.first_tile);
      const bool added =
          runs.try_emplace({sequence, part.first_row, part.split}, part.first_tile, part.num_tiles)
              .second;
      EXPECT_TRUE(added);
      EXPECT_LT(part.split, part.num_splits);
      EXPECT_EQ(part.kv_len, view.total_len(sequence));
      expect_old_tiles(part, view, sequence);
      EXPECT_EQ(part.out_row, view.query_start[sequence] * heads + part.first_row);
      for (int p = 0; p < std::min(part.num_tiles, LatentDecodePart::kPagesWithin); ++p) {
        EXPECT_EQ(part.pages[p], view.pages(sequence)[part.first_tile + p]);
      }
      if (part.num_splits > 1) ++slot_users[static_cast<size_t>(part.first_slot + part.split)];
      weights.add(part);
      work += part.num_tiles;
      ++seen_parts;
      if (!part.more) break;
    }
    most = std::max(most, work);
    total += work;
  }
  EXPECT_EQ(seen_parts + 1, plan.parts.size()) << "and one without work";
  for (const int users : slot_users) EXPECT_EQ(users, 1);
  weights.expect_disjoint(plan.num_weights);
  for (const int32_t s : batch.sequences) {
    const int rows = view.num_queries(s) * heads;
    for (int first = 0; first < rows; first += plan.tile_rows) {
      int next = 0;
      for (int split = 0; runs.contains({s, first, split}); ++split) {
        const auto [begin, count] = runs.at({s, first, split});
        EXPECT_EQ(begin, next);
        next += count;
      }
      EXPECT_EQ(next, (view.total_len(s) + 63) / 64);
    }
  }
  // No CTA has much more than its share.
  const int blocks = plan.tile_rows == 128 ? processors / 2 : processors;
  EXPECT_LE(most, 2 * ((total + blocks - 1) / blocks) + 4);
}

TEST(LatentDecodePlan, CoversEveryKeyOnce) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    Batch batch;
    const int count = 1 + static_cast<int>(random() % (round % 3 == 0 ? 300 : 8));
    for (int i = 0; i < count; ++i) {
      const auto queries = static_cast<int32_t>(1 + random() % 8);
      batch.add(queries + static_cast<int32_t>(random() % (round % 2 ? 500 : 20000)), queries);
    }
    check(batch, round % 5 == 0 ? 128 : 16, round % 7 == 0 ? 5 : 132);
  }
}

TEST(LatentDecodePlan, ASequenceForEachBlockIsNotCut) {
  Batch batch;
  for (int i = 0; i < 128; ++i) batch.add(4096, 1);
  const auto plan = plan_latent_decode(batch.view(), batch.sequences, 16, 132);
  EXPECT_EQ(plan.parts.size(), 128 + 1);
  EXPECT_EQ(plan.num_slots, 0);
}

TEST(LatentDecodePlan, ManyHeadsOfEqualSequencesAreNotCut) {
  Batch batch;
  for (int i = 0; i < 128; ++i) batch.add(4096, 1);
  const auto plan = plan_latent_decode(batch.view(), batch.sequences, 128, 132);
  EXPECT_EQ(plan.parts.size(), 128 + 1);
  EXPECT_EQ(plan.num_slots, 0);
}

TEST(LatentDecodePlan, OneLongSequenceTakesAllBlocks) {
  Batch batch;
  batch.add(132 * 64 * 3, 1);
  const auto plan = plan_latent_decode(batch.view(), batch.sequences, 16, 132);
  EXPECT_EQ(plan.parts.size(), 132 + 1);
  EXPECT_EQ(plan.num_slots, 132);
  EXPECT_EQ(plan.parts[7].num_tiles, 3);
}

// Split boundaries of a token's row tiles by head: the splits' first tiles.
std::map<std::pair<int, int>, std::vector<int>> cuts_of(Batch& batch, int heads, int processors) {
  const PagedBatch view = batch.view();
  const LatentDecodeScratch scratch = latent_decode_scratch(processors);
  std::map<std::pair<int, int>, std::vector<int>> cuts;
  for (const LatentDecodePlan& plan :
       plan_batch_invariant_latent_decode(view, batch.sequences, heads, processors)) {
    EXPECT_EQ(plan.tile_rows, std::min(latent_decode_tile_rows(heads), 64));
    EXPECT_LE(plan.tile_rows * plan.num_slots * 512, scratch.sums);
    EXPECT_LE(plan.tile_rows * plan.num_weights, scratch.weights);
    const int64_t tokens = view.query_start.back();
    EXPECT_LE(std::ssize(plan.parts),
              most_batch_invariant_parts(tokens * ((heads + 15) / 16), processors));
    std::vector<int> slot_users(static_cast<size_t>(plan.num_slots));
    std::map<std::pair<int, int>, std::vector<std::pair<int, int>>> splits;
    for (size_t block = 0; block < static_cast<size_t>(processors); ++block) {
      std::map<std::pair<int, int>, int> of_block;
      for (int32_t at = plan.first_part[block];; ++at) {
        const LatentDecodePart& part = plan.parts.at(static_cast<size_t>(at));
        if (&part == &plan.parts.back()) break;
        const int sequence = part.first_page / view.max_pages, row = part.out_row / heads;
        EXPECT_EQ(part.num_queries, 1);
        EXPECT_EQ(part.kv_len, view.context_lens[static_cast<size_t>(sequence)] + row -
                                   view.query_start[static_cast<size_t>(sequence)] + 1);
        EXPECT_EQ(part.out_row % heads, part.first_row);
        expect_old_tiles(part, view, sequence);
        EXPECT_EQ(part.first_page % view.max_pages, part.first_tile);
        for (int p = 0; p < std::min(part.num_tiles, LatentDecodePart::kPagesWithin); ++p) {
          EXPECT_EQ(part.pages[p], view.pages(sequence)[static_cast<size_t>(part.first_tile + p)]);
        }
        const std::pair tile{row, part.first_row};
        EXPECT_EQ(++of_block[tile], 1) << "parts that wait for one another are in as many blocks";
        splits[tile].emplace_back(part.split, part.first_tile);
        if (part.num_splits > 1) ++slot_users[static_cast<size_t>(part.first_slot + part.split)];
        if (!part.more) break;
      }
    }
    for (const int users : slot_users) EXPECT_EQ(users, 1);
    for (auto& [tile, parts] : splits) {
      std::sort(parts.begin(), parts.end());
      for (const auto& [split, first_tile] : parts) cuts[tile].push_back(first_tile);
    }
  }
  return cuts;
}

TEST(BatchInvariantLatentDecodePlan, CutsEachTokenByItsPositionAlone) {
  std::mt19937 random(4);
  for (const int heads : {4, 16, 24, 128}) {
    // Tokens at some positions, alone.
    std::map<int, std::vector<int>> alone;
    const auto cuts_alone = [&](int position) {
      if (!alone.contains(position)) {
        Batch batch;
        batch.add(position + 1, 1);
        alone[position] = cuts_of(batch, heads, 132).at({0, 0});
        EXPECT_EQ(std::ssize(alone[position]), batch_invariant_splits(position / 64 + 1));
      }
      return alone[position];
    };
    for (int round = 0; round < 8; ++round) {
      Batch batch;
      for (size_t i = 0; i < (round % 2 == 0 ? 150 : 4); ++i) {
        const auto queries = static_cast<int32_t>(1 + random() % (round % 2 == 0 ? 3 : 300));
        batch.add(queries + static_cast<int32_t>(random() % (round % 4 == 0 ? 9000 : 900)),
                  queries);
      }
      const auto cuts = cuts_of(batch, heads, 132);
      EXPECT_EQ(std::ssize(cuts), batch.query_start.back() * ((heads + 63) / 64));
      for (size_t s = 0; s < batch.context_lens.size(); ++s) {
        for (int row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
          const int position = batch.context_lens[s] + row - batch.query_start[s];
          ASSERT_EQ(cuts.at({row, 0}), cuts_alone(position)) << "position " << position;
        }
      }
    }
  }
}

// With key 0 hidden: each token's splits have every slot of its keys but the hidden one, which is
// the last of the first page.
TEST(BatchInvariantLatentDecodePlan, HidesTheFirstKey) {
  std::mt19937 random(5);
  for (const int heads : {4, 16, 128}) {
    Batch batch;
    for (int i = 0; i < 60; ++i) {
      const auto queries = static_cast<int32_t>(1 + random() % 4);
      batch.add(1 + queries + static_cast<int32_t>(random() % (i % 3 == 0 ? 9000 : 140)), queries);
    }
    PagedBatch view = batch.view();
    view.first_key = 1;
    std::map<int, std::set<int64_t>> seen;  // by row * heads + head: slots of keys in the sequence
    for (const LatentDecodePlan& plan :
         plan_batch_invariant_latent_decode(view, batch.sequences, heads, 132)) {
      for (const LatentDecodePart& part : plan.parts) {
        for (int tile = part.first_tile; tile < part.first_tile + part.num_tiles; ++tile) {
          for (int64_t slot = tile * 64; slot < std::min<int64_t>(part.kv_len, tile * 64 + 64);
               ++slot) {
            EXPECT_TRUE(seen[part.out_row].insert(slot).second) << "slot " << slot;
          }
        }
      }
    }
    EXPECT_EQ(std::ssize(seen), batch.query_start.back() * ((heads + 63) / 64));
    for (size_t s = 0; s < batch.context_lens.size(); ++s) {
      for (int row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
        const int position = batch.context_lens[s] + row - batch.query_start[s];
        std::set<int64_t> expected;
        for (int key = 1; key <= position; ++key) {
          expected.insert(key / 64 * 64 + slot_behind_hidden_key(key));
        }
        EXPECT_EQ(seen[row * heads], expected) << "position " << position;
      }
    }
  }
}

TEST(LatentDecodePlan, RowsChooseTheTile) {
  for (const auto& [heads, queries, rows] : {std::tuple{16, 1, 16},
                                             {4, 4, 16},
                                             {16, 2, 32},
                                             {32, 1, 32},
                                             {16, 4, 64},
                                             {16, 5, 128},
                                             {128, 1, 128}}) {
    Batch batch;
    batch.add(100, queries);
    EXPECT_EQ(plan_latent_decode(batch.view(), batch.sequences, heads, 132).tile_rows, rows);
  }
}

}  // namespace
}  // namespace fathom::cuda
