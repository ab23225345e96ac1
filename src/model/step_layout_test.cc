#include "model/step_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "cache/latent_layout.h"
#include "ops/mtp/kept_states.h"

namespace fathom::cuda {
namespace {

constexpr int64_t kHeads = 16;
constexpr int kProcessors = 132;

StepLimits limits(int64_t most_keys) {
  return {.heads = kHeads, .num_multiprocessors = kProcessors, .most_keys = most_keys};
}

StepLimits batch_invariant_limits() {
  return {.heads = kHeads,
          .num_multiprocessors = kProcessors,
          .most_keys = 1024,
          .batch_invariant = true};
}

// Sequences with these new tokens and contexts, on shuffled pages; every third row's logits.
ForwardBatch make_batch(const std::vector<std::pair<int32_t, int32_t>>& sequences) {
  ForwardBatch batch;
  batch.query_start = {0};
  int64_t pages = 0;
  for (const auto& [queries, context] : sequences) {
    batch.max_pages = std::max<int32_t>(batch.max_pages, (queries + context + 63) / 64);
    pages += (queries + context + 63) / 64;
  }
  std::vector<int32_t> free(static_cast<size_t>(pages));
  std::iota(free.begin(), free.end(), 50);
  std::shuffle(free.begin(), free.end(), std::mt19937(1));
  for (const auto& [queries, context] : sequences) {
    for (int32_t i = 0; i < queries; ++i) {
      const auto row = static_cast<int32_t>(batch.token_ids.size());
      if (row % 3 == 0) batch.logit_rows.push_back(row);
      batch.token_ids.push_back(row % 5 == 4 ? -1 - row : 1000 + row);
      batch.positions.push_back(context + i);
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
    batch.context_lens.push_back(context);
    batch.prompt_lens.push_back(0);
    for (int32_t p = 0; p < batch.max_pages; ++p) {
      const bool needed = p < (queries + context + 63) / 64;
      batch.block_tables.push_back(needed ? free.back() : -1);
      if (needed) free.pop_back();
    }
  }
  return batch;
}

template <typename T>
const T* array_at(const StepLayout& layout, int64_t at) {
  EXPECT_EQ(at % 16, 0);
  return reinterpret_cast<const T*>(layout.memory.data() + at);
}

// Every absorbed row of every head is in a split, and sees the keys up to its own position.
void check_absorbed(const StepLayout& layout) {
  const auto* positions = array_at<int32_t>(layout, layout.at.positions);
  std::set<int32_t> rows;  // token-major: token * kHeads + head
  for (const DecodeLaunch& decode : layout.decodes) {
    const auto* first_part = array_at<int32_t>(layout, decode.first_part);
    for (int block = 0; block < kProcessors; ++block) {
      const auto* part = array_at<LatentDecodePart>(layout, decode.parts) + first_part[block];
      for (; part->rows > 0; ++part) {
        for (int32_t i = 0; i < part->rows; ++i) {
          const auto token = (part->out_row + i) / static_cast<int32_t>(kHeads);
          const auto query = (part->first_row + i) / static_cast<int32_t>(kHeads);
          ASSERT_LT(token, layout.absorbed_rows);
          ASSERT_EQ(part->kv_len - part->num_queries + query, positions[token]) << "row " << token;
          rows.insert(part->out_row + i);
        }
        if (part->more == 0) break;
      }
    }
  }
  EXPECT_EQ(std::ssize(rows), layout.absorbed_rows * kHeads);
}

// Rows may be in another order; each occurs once, with all of its data.
void check(const ForwardBatch& batch, int64_t rows, const StepLimits& limits) {
  const int64_t most_keys = limits.most_keys;
  StepPlanner planner(limits);
  StepLayout layout;
  layout.memory.assign(1000, std::byte{0xFF});  // left by a previous step
  planner.plan(batch, rows, layout);
  ASSERT_EQ(layout.rows, rows);
  ASSERT_EQ(layout.valid_rows, batch.num_rows());
  EXPECT_EQ(*array_at<int32_t>(layout, layout.at.num_valid_rows), batch.num_rows());
  int64_t longest = 0, together = 0;  // of the sequences, the new tokens included
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    const int64_t keys = batch.context_lens[s] + batch.query_start[s + 1] - batch.query_start[s];
    longest = std::max(longest, keys);
    together += keys;
  }
  EXPECT_EQ(layout.most_keys, longest);
  EXPECT_EQ(layout.all_keys, together);
  EXPECT_LE(std::ssize(layout.memory),
            planner.most_bytes(rows, batch.num_sequences(), batch.max_pages));
  const auto* ids = array_at<int32_t>(layout, layout.at.token_ids);
  const auto* positions = array_at<int32_t>(layout, layout.at.positions);
  const auto* slots = array_at<int64_t>(layout, layout.at.slots);
  std::multiset<std::tuple<int32_t, int32_t, int64_t>> expected, actual;
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    for (int32_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
      const int32_t position = batch.positions[row];
      const int64_t page =
          batch.block_tables[s * batch.max_pages + position / kPageSize] * limits.page_stride;
      expected.emplace(batch.token_ids[row], position, page * kPageSize + position % kPageSize);
    }
  }
  for (int64_t row = 0; row < layout.valid_rows; ++row) {
    actual.emplace(ids[row], positions[row], slots[row]);
  }
  EXPECT_EQ(actual, expected);
  const auto* table_starts = array_at<int32_t>(layout, layout.at.table_starts);
  const auto* tables = array_at<int32_t>(layout, layout.at.block_tables);
  for (int64_t row = 0; row < layout.valid_rows; ++row) {
    EXPECT_EQ(tables[table_starts[row] + positions[row] / kPageSize], slots[row] / kPageSize)
        << row;
  }
  for (int64_t row = layout.valid_rows; row < rows; ++row) EXPECT_EQ(slots[row], -1);
  const auto* logit_rows = array_at<int32_t>(layout, layout.at.logit_rows);
  for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
    ASSERT_LT(logit_rows[i], layout.valid_rows);
    EXPECT_EQ(ids[logit_rows[i]], batch.token_ids[batch.logit_rows[i]]);
  }

  check_absorbed(layout);

  // What decode attention may read before the launches before it have ended: pages without a row of
  // this step.
  const auto* all_tables = array_at<int32_t>(layout, layout.at.block_tables);
  const std::set<int64_t> written = [&] {
    std::set<int64_t> pages;
    for (int64_t row = 0; row < layout.valid_rows; ++row) pages.insert(slots[row] / kPageSize);
    return pages;
  }();
  for (const DecodeLaunch& decode : layout.decodes) {
    const auto* first_part = array_at<int32_t>(layout, decode.first_part);
    const auto* parts = array_at<LatentDecodePart>(layout, decode.parts);
    const int blocks = decode.tile_rows == 128 ? kProcessors / 2 : kProcessors;
    for (int block = 0; block < blocks; ++block) {
      for (const auto* part = parts + first_part[block];; ++part) {
        for (int32_t t = 0; t < part->old_tiles; ++t) {
          EXPECT_FALSE(written.contains(all_tables[part->first_page + t]))
              << "tile " << part->first_tile + t;
        }
        if (part->more == 0) break;
      }
    }
  }

  // Each multi-head row and each key that it sees are in one pass, in the order of the keys.
  const auto* gathered = array_at<int32_t>(layout, layout.at.gathered);
  const auto* first_keys = array_at<int32_t>(layout, layout.at.first_keys);
  std::vector<int64_t> seen(static_cast<size_t>(layout.valid_rows));  // keys, for head 0
  for (size_t p = 0; p < layout.passes.size(); ++p) {
    const MhaPass& pass = layout.passes[p];
    EXPECT_LE(pass.num_keys, most_keys);
    const auto* starts = array_at<int32_t>(layout, layout.at.key_starts) + pass.first_part + p;
    EXPECT_EQ(starts[0], 0);
    EXPECT_EQ(starts[pass.num_parts], pass.num_keys);
    const auto* first_tile =
        array_at<int32_t>(layout, layout.at.mha_first_tile) + static_cast<int64_t>(p) * kProcessors;
    std::map<int32_t, int64_t> rows_of_heads;
    for (int block = 0; block < kProcessors; ++block) {
      const auto* tile = array_at<MhaPrefillTile>(layout, layout.at.mha_tiles) + pass.first_tile +
                         first_tile[block];
      for (; tile->rows > 0; ++tile) {
        rows_of_heads[tile->head] += tile->rows;
        EXPECT_GE(tile->first_row, layout.absorbed_rows);
        const auto part = std::find(starts, starts + pass.num_parts, tile->first_key) - starts;
        ASSERT_LT(part, pass.num_parts);
        EXPECT_EQ(tile->num_keys, starts[part + 1] - starts[part]);
        const int32_t first_key = first_keys[pass.first_part + part];
        EXPECT_EQ(first_key % most_keys, 0);
        EXPECT_EQ(tile->joined, first_key > 0);
        EXPECT_EQ(tile->visible, positions[tile->first_row] - first_key + 1);
        const int32_t* table = tables + int64_t{gathered[pass.first_part + part]} * batch.max_pages;
        for (int32_t row = tile->first_row; row < tile->first_row + tile->rows; ++row) {
          const int64_t position = positions[row];
          EXPECT_EQ(slots[row], table[position / kPageSize] * kPageSize + position % kPageSize);
          if (tile->head != 0) continue;
          EXPECT_EQ(seen[static_cast<size_t>(row)], first_key);
          seen[static_cast<size_t>(row)] +=
              std::min<int64_t>(tile->num_keys, position + 1 - first_key);
        }
      }
    }
    EXPECT_EQ(std::ssize(rows_of_heads), kHeads);
    for (const auto& [head, count] : rows_of_heads) EXPECT_EQ(count, rows_of_heads[0]);
  }
  for (int64_t row = layout.absorbed_rows; row < layout.valid_rows; ++row) {
    EXPECT_EQ(seen[static_cast<size_t>(row)], positions[row] + 1);
  }
}

TEST(StepLayout, MixedSteps) {
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    std::vector<std::pair<int32_t, int32_t>> sequences;
    for (size_t i = 0; i < 1 + random() % 20; ++i) {
      sequences.emplace_back(random() % 3 == 0 ? 1 + random() % 400 : 1, random() % 700);
    }
    StepLimits step = limits(round % 2 == 0 ? 1 << 20 : 256);
    step.page_stride = round % 3 == 0 ? 61 : 1;
    check(make_batch(sequences), make_batch(sequences).num_rows(), step);
  }
}

TEST(StepLayout, DecodeStepsOfAsManyRowsHaveTheirArraysInTheSamePlaces) {
  StepPlanner planner(limits(1024));
  StepLayout captured, replayed;
  const auto decode = [](int count, int32_t context) {
    ForwardBatch batch = make_batch(
        std::vector<std::pair<int32_t, int32_t>>(static_cast<size_t>(count), {1, context}));
    batch.logit_rows.resize(static_cast<size_t>(count));
    std::iota(batch.logit_rows.begin(), batch.logit_rows.end(), 0);
    return batch;
  };
  planner.plan(decode(8, 0), 8, captured);
  ASSERT_TRUE(planner.is_decode(decode(5, 3000)));
  planner.plan(decode(5, 3000), 8, replayed);
  EXPECT_EQ(captured.at.token_ids, replayed.at.token_ids);
  EXPECT_EQ(captured.at.positions, replayed.at.positions);
  EXPECT_EQ(captured.at.slots, replayed.at.slots);
  EXPECT_EQ(captured.at.logit_rows, replayed.at.logit_rows);
  EXPECT_EQ(captured.at.first_part, replayed.at.first_part);
  EXPECT_EQ(captured.at.parts, replayed.at.parts);
  EXPECT_EQ(captured.at.block_tables, replayed.at.block_tables);
  ASSERT_EQ(captured.decodes.size(), 1u);
  ASSERT_EQ(replayed.decodes.size(), 1u);
  EXPECT_EQ(captured.decodes[0].tile_rows, replayed.decodes[0].tile_rows);
  EXPECT_EQ(captured.logit_rows, replayed.logit_rows);
  check(decode(5, 3000), 8, limits(1024));
}

TEST(StepLayout, BatchInvariantRowsHaveTheFormOfPromptOrAnswer) {
  std::mt19937 random(4);
  StepPlanner planner(batch_invariant_limits());
  StepLayout layout;
  for (int round = 0; round < 40; ++round) {
    std::vector<std::pair<int32_t, int32_t>> sequences;
    for (size_t i = 0; i < 1 + random() % 9; ++i) {
      sequences.emplace_back(random() % 2 == 0 ? 1 + random() % 300 : 1, random() % 2000);
    }
    ForwardBatch batch = make_batch(sequences);
    for (size_t s = 0; s < sequences.size(); ++s) {
      batch.prompt_lens[s] = static_cast<int32_t>(
          random() % static_cast<size_t>(sequences[s].first + sequences[s].second + 50));
    }
    check(batch, batch.num_rows(), batch_invariant_limits());
    planner.plan(batch, batch.num_rows(), layout);
    const auto* ids = array_at<int32_t>(layout, layout.at.token_ids);
    for (int64_t row = 0; row < layout.rows; ++row) {
      const auto from = std::find(batch.token_ids.begin(), batch.token_ids.end(), ids[row]) -
                        batch.token_ids.begin();
      const auto s = std::upper_bound(batch.query_start.begin(), batch.query_start.end(), from) -
                     batch.query_start.begin() - 1;
      EXPECT_EQ(row >= layout.absorbed_rows, batch.positions[static_cast<size_t>(from)] <
                                                 batch.prompt_lens[static_cast<size_t>(s)]);
    }
  }
  // A prompt's last token alone: no graph has its form.
  ForwardBatch batch = make_batch({{1, 63}, {1, 100}});
  batch.logit_rows = {0, 1};
  EXPECT_TRUE(planner.is_decode(batch));
  batch.prompt_lens[0] = 64;
  EXPECT_FALSE(planner.is_decode(batch));
  EXPECT_TRUE(StepPlanner(limits(1024)).is_decode(batch));
}

// A budget that fit_one_pass() has raised holds a captured step's rows, whatever their number.
TEST(StepLayout, AGraphForLongContextsChoosesInOnePass) {
  StepLimits sparse = limits(1024);
  sparse.max_length = 160 << 10;
  sparse.shape.sparse = SparseLimits{};
  StepLayout layout;
  const auto passes = [&](int32_t rows) {
    const StepPlanner planner(sparse);
    layout.rows = rows;
    planner.plan_any_length(layout);
    return layout.index_passes;
  };
  EXPECT_EQ(passes(128).size(), 2);  // 64 MiB hold 102 rows
  for (const int32_t rows : {100, 128, 149}) {
    fit_one_pass(*sparse.shape.sparse, rows, sparse.max_length);
    EXPECT_EQ(passes(rows), (std::vector<IndexPass>{{0, rows, 160 << 10}}));
  }
  fit_one_pass(*sparse.shape.sparse, 512, sparse.max_length);
  EXPECT_EQ(passes(512).size(), 2);  // 256 MiB hold 409
}

// Lengths and tables of all rows; passes over the rows that choose, which are absorbed.
TEST(StepLayout, SparseStepsHavePassesOverTheRowsThatChoose) {
  constexpr int64_t kDense = 100;
  StepLimits sparse = limits(1024);
  sparse.shape.sparse =
      SparseLimits{.top_keys = 128, .dense_keys = kDense, .score_bytes = int64_t{4000} * 4 * 20};
  sparse.max_length = 4000;
  sparse.page_stride = 5;
  sparse.policy.min_mha_queries = 4;
  StepPlanner planner(sparse);
  StepLayout layout;
  const std::vector<std::vector<std::pair<int32_t, int32_t>>> batches = {
      {{1, 99}, {1, 0}, {50, 0}, {100, 0}},  // none chooses
      {{1, 100}},                            // the first that does
      {{1, 30}, {1, 400}, {1, 99}, {1, 3999}},
      {{120, 0}, {1, 5}, {30, 80}, {700, 600}, {2, 99}, {1500, 90}}};
  for (const auto& sequences : batches) {
    const ForwardBatch batch = make_batch(sequences);
    const int64_t rows = batch.num_rows() + 3;
    planner.plan(batch, rows, layout);
    EXPECT_LE(std::ssize(layout.memory),
              planner.most_bytes(rows, batch.num_sequences(), batch.max_pages));
    EXPECT_EQ(layout.decodes.empty(), !layout.index_passes.empty());  // lists, or pages
    EXPECT_FALSE(layout.any_length);
    const auto* positions = array_at<int32_t>(layout, layout.at.positions);
    const auto* slots = array_at<int64_t>(layout, layout.at.slots);
    const auto* lengths = array_at<int32_t>(layout, layout.at.lengths);
    const auto* starts = array_at<int32_t>(layout, layout.at.table_starts);
    const auto* tables = array_at<int32_t>(layout, layout.at.block_tables);
    std::vector<int> passes_of(static_cast<size_t>(rows));
    for (const IndexPass& pass : layout.index_passes) {
      EXPECT_LE(pass.rows, IndexPass::kMostRows);
      EXPECT_LE(pass.rows * pass.columns * 4, sparse.shape.sparse->score_bytes);
      EXPECT_EQ(pass.first_row % 16, 0);
      ASSERT_LE(pass.first_row + pass.rows, layout.absorbed_rows);
      for (int64_t row = pass.first_row; row < pass.first_row + pass.rows; ++row) {
        EXPECT_LE(lengths[row], pass.columns);
        ++passes_of[static_cast<size_t>(row)];
      }
    }
    for (int64_t row = 0; row < layout.valid_rows; ++row) {
      EXPECT_EQ(lengths[row], positions[row] + 1);
      EXPECT_EQ(tables[starts[row] + positions[row] / kPageSize], slots[row] / kPageSize);
      if (lengths[row] <= kDense) continue;
      EXPECT_LT(row, layout.absorbed_rows);
      EXPECT_GE(passes_of[static_cast<size_t>(row)], 1) << row;
    }
    for (int64_t row = layout.valid_rows; row < rows; ++row) EXPECT_EQ(lengths[row], 0);
    EXPECT_EQ(layout.index_passes.empty(), layout.most_keys <= kDense);
    // As a graph has it.
    planner.plan_any_length(layout);
    EXPECT_TRUE(layout.any_length);
    EXPECT_TRUE(layout.decodes.empty());
    int64_t next = 0;
    for (const IndexPass& pass : layout.index_passes) {
      EXPECT_EQ(pass.first_row, next);
      EXPECT_GE(pass.columns, sparse.max_length);
      EXPECT_LE(pass.rows * pass.columns * 4, sparse.shape.sparse->score_bytes);
      next += pass.rows;
    }
    EXPECT_EQ(next, rows);
    for (const bool batch_invariant : {false, true}) {
      StepLimits always = sparse;
      always.batch_invariant = batch_invariant;
      always.lists_always = !batch_invariant;
      StepPlanner always_planner(always);
      always_planner.plan(batch, rows, layout);
      EXPECT_TRUE(layout.decodes.empty());
      EXPECT_LE(std::ssize(layout.memory),
                always_planner.most_bytes(rows, batch.num_sequences(), batch.max_pages));
    }
  }
}

TEST(StepLayout, ManyTokensOfOneSequenceLeaveTheTilesOfOthersSmall) {
  StepLimits absorbed = limits(1 << 20);
  absorbed.policy.form = AttentionForm::kAbsorbed;
  StepPlanner planner(absorbed);
  StepLayout layout;
  const ForwardBatch batch = make_batch({{1, 900}, {30, 2000}, {1, 70}});
  planner.plan(batch, batch.num_rows(), layout);
  ASSERT_EQ(layout.decodes.size(), 2u);
  EXPECT_EQ(layout.decodes[0].tile_rows, 16);
  EXPECT_GT(layout.decodes[1].tile_rows, 16);
  EXPECT_EQ(array_at<int32_t>(layout, layout.at.positions)[1], 70);
  std::set<int32_t> rows;
  for (const DecodeLaunch& decode : layout.decodes) {
    const auto* part = array_at<LatentDecodePart>(layout, decode.parts);
    for (; part->rows > 0; ++part) {
      const int32_t first = part->out_row;
      for (int32_t row = 0; row < part->rows; ++row) rows.insert(first + row);
    }
  }
  EXPECT_EQ(std::ssize(rows), batch.num_rows() * kHeads);
}

// A step with an MTP layer: whose state each token's row of the layer is made from, where that row
// goes, and which states are kept where.
TEST(StepLayout, MtpRowsAndStates) {
  StepLimits with_mtp = limits(1024);
  with_mtp.with_mtp = true;
  with_mtp.page_stride = 11;
  StepPlanner planner(with_mtp);
  StepLayout layout;
  // A prompt, a chunk after a page, an answer's token, windows with and without a row to write.
  ForwardBatch batch = make_batch({{70, 0}, {9, 128}, {1, 63}, {4, 62}, {4, 200}});
  batch.mtp_lens = {0, 128, 63, 63, 200};
  batch.num_drafts = {0, 0, 0, 3, 3};
  planner.plan(batch, batch.num_rows() + 5, layout);
  EXPECT_TRUE(layout.has_mtp_rows);
  EXPECT_LE(std::ssize(layout.memory),
            planner.most_bytes(layout.rows, batch.num_sequences(), batch.max_pages));
  const auto* ids = array_at<int32_t>(layout, layout.at.token_ids);
  const auto* previous = array_at<int64_t>(layout, layout.at.previous_states);
  const auto* slots = array_at<int64_t>(layout, layout.at.mtp_slots);
  const auto* kept = array_at<int64_t>(layout, layout.at.state_slots);
  const auto row_of = [&](int32_t batch_row) {
    const int32_t id = batch.token_ids[static_cast<size_t>(batch_row)];
    return std::find(ids, ids + layout.valid_rows, id) - ids;
  };
  for (int32_t s = 0; s < batch.num_sequences(); ++s) {
    const auto at = static_cast<size_t>(s);
    const int32_t context = batch.context_lens[at], first = batch.query_start[at];
    const int32_t count = batch.query_start[at + 1] - first;
    const auto page_of = [&](int32_t position) {
      return int64_t{batch.block_tables[at * static_cast<size_t>(batch.max_pages) +
                                        static_cast<size_t>(position / 64)]};
    };
    for (int32_t i = 0; i < count; ++i) {
      SCOPED_TRACE(testing::Message() << "sequence " << s << ", row " << i);
      const int32_t position = context + i;
      const auto row = row_of(first + i);
      const bool is_kept = i >= count - 4 || position % 64 >= 60;
      EXPECT_EQ(kept[row], is_kept ? page_of(position) * 4 + position % 4 : -1);
      const bool is_written = position >= batch.mtp_lens[at] && i < count - batch.num_drafts[at];
      const int64_t slot = position < 64 ? (position + 63) % 64 : position % 64;
      EXPECT_EQ(slots[row], is_written ? page_of(position) * 11 * 64 + slot : -1);
      if (!is_written || position == 0) {
        EXPECT_EQ(previous[row], kNoState);
      } else if (i == 0) {
        EXPECT_EQ(previous[row], -1 - (page_of(position - 1) * 4 + (position - 1) % 4));
      } else {
        EXPECT_EQ(previous[row], row_of(first + i - 1));
      }
    }
  }
  for (int64_t row = layout.valid_rows; row < layout.rows; ++row) {
    EXPECT_EQ(previous[row], kNoState);
    EXPECT_EQ(slots[row], -1);
    EXPECT_EQ(kept[row], -1);
  }
}

// A step of the MTP layer: the same slots, states from pages or from the draft step before.
TEST(StepLayout, DraftSteps) {
  StepLimits with_mtp = limits(1024);
  with_mtp.page_stride = 3;
  StepPlanner planner(draft_limits(with_mtp));
  StepLayout layout;
  ForwardBatch batch = make_batch({{1, 200}, {4, 61}, {2, 1}});
  batch.logit_rows = {0, 4, 6};
  const std::vector<int32_t> own_states = {6, 0, 1, 2, 3, 5, 4};
  for (const bool is_own : {false, true}) {
    for (const int64_t rows : {0, 7, 12}) {
      planner.plan_draft(batch, is_own ? own_states : std::vector<int32_t>(), rows, layout);
      EXPECT_EQ(layout.rows, rows == 0 ? 7 : rows);
      EXPECT_EQ(layout.logit_rows, rows == 0 ? 3 : rows);
      EXPECT_EQ(*array_at<int32_t>(layout, layout.at.num_valid_rows), 3);
      EXPECT_TRUE(layout.passes.empty());
      EXPECT_LE(std::ssize(layout.memory), planner.most_bytes(layout.rows, 3, batch.max_pages));
      const auto* ids = array_at<int32_t>(layout, layout.at.token_ids);
      const auto* logit_rows = array_at<int32_t>(layout, layout.at.logit_rows);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(ids[logit_rows[i]], batch.token_ids[static_cast<size_t>(batch.logit_rows[i])]);
      }
      for (int64_t i = 3; i < layout.logit_rows; ++i) EXPECT_LT(logit_rows[i], layout.rows);
      const auto* previous = array_at<int64_t>(layout, layout.at.previous_states);
      const auto* slots = array_at<int64_t>(layout, layout.at.slots);
      for (int32_t s = 0; s < batch.num_sequences(); ++s) {
        for (int32_t row = batch.query_start[s]; row < batch.query_start[s + 1]; ++row) {
          const int32_t position = batch.positions[row];
          const auto page_of = [&](int32_t of) {
            return int64_t{batch.block_tables[s * batch.max_pages + of / 64]};
          };
          const auto at = std::find(ids, ids + 7, batch.token_ids[row]) - ids;
          EXPECT_EQ(previous[at], is_own ? own_states[static_cast<size_t>(row)]
                                         : -1 - (page_of(position - 1) * 4 + (position - 1) % 4));
          EXPECT_EQ(slots[at], page_of(position) * 3 * 64 +
                                   (position < 64 ? (position + 63) % 64 : position % 64));
        }
      }
      for (int64_t row = 7; row < layout.rows; ++row) {
        EXPECT_EQ(previous[row], kNoState);
        EXPECT_EQ(slots[row], -1);
      }
    }
  }
}

// With sparse attention pages are as they are without a hidden key, and rows see a key less than
// they have positions.
TEST(StepLayout, SparseDraftSteps) {
  constexpr int32_t kDense = 100;
  StepLimits sparse = limits(1024);
  sparse.shape.sparse = SparseLimits{.top_keys = 128, .dense_keys = kDense};
  sparse.max_length = 4000;
  sparse.page_stride = 3;
  sparse.with_mtp = true;
  StepPlanner main_planner(sparse), planner(draft_limits(sparse));
  StepLayout layout;
  // At the threshold, one beyond it, far beyond it, and at a sequence's begin.
  for (const bool is_long : {false, true}) {
    ForwardBatch batch = is_long ? make_batch({{1, 100}, {2, 100}, {3, 900}, {1, 1}})
                                 : make_batch({{1, 100}, {4, 97}, {1, 64}, {1, 1}});
    batch.logit_rows = {0};
    for (const int64_t rows : {int64_t{0}, batch.num_rows() + 4}) {
      planner.plan_draft(batch, {}, rows, layout);
      EXPECT_TRUE(layout.passes.empty() && layout.decodes.empty());
      EXPECT_EQ(layout.first_key, 1);
      EXPECT_LE(std::ssize(layout.memory), planner.most_bytes(layout.rows, 4, batch.max_pages));
      const auto* positions = array_at<int32_t>(layout, layout.at.positions);
      const auto* slots = array_at<int64_t>(layout, layout.at.slots);
      const auto* lengths = array_at<int32_t>(layout, layout.at.lengths);
      const auto* num_keys = array_at<int32_t>(layout, layout.at.num_keys);
      std::vector<bool> chooses(static_cast<size_t>(layout.rows));
      for (const IndexPass& pass : layout.index_passes) {
        for (int64_t row = pass.first_row; row < pass.first_row + pass.rows; ++row) {
          chooses[static_cast<size_t>(row)] = true;
          EXPECT_LE(lengths[row], pass.columns);
        }
      }
      for (int64_t row = 0; row < batch.num_rows(); ++row) {
        EXPECT_EQ(lengths[row], positions[row] + 1);
        EXPECT_EQ(num_keys[row], positions[row]);
        EXPECT_EQ(slots[row] % kPageSize, positions[row] % kPageSize);
        EXPECT_TRUE(positions[row] <= kDense || chooses[static_cast<size_t>(row)]) << row;
      }
      for (int64_t row = batch.num_rows(); row < layout.rows; ++row) {
        EXPECT_EQ(lengths[row], 0);
        EXPECT_EQ(num_keys[row], 0);
      }
      EXPECT_EQ(layout.index_passes.empty(), !is_long);
      if (rows == 0) continue;
      planner.plan_any_length(layout);
      EXPECT_TRUE(layout.any_length);
    }
    // The rows that a main step writes are where the layer's steps read them.
    batch.mtp_lens = batch.context_lens;
    batch.num_drafts.assign(static_cast<size_t>(batch.num_sequences()), 0);
    main_planner.plan(batch, batch.num_rows(), layout);
    EXPECT_EQ(layout.first_key, 0);
    const auto* positions = array_at<int32_t>(layout, layout.at.positions);
    const auto* slots = array_at<int64_t>(layout, layout.at.mtp_slots);
    for (int64_t row = 0; row < batch.num_rows(); ++row) {
      EXPECT_EQ(slots[row], array_at<int64_t>(layout, layout.at.slots)[row]) << positions[row];
    }
  }
}

TEST(StepLayout, LongBatchInvariantStepsHaveSeveralLaunches) {
  StepPlanner planner(batch_invariant_limits());
  StepLayout layout;
  for (const auto& batch :
       {make_batch({{1, 100}}), make_batch({{2000, 3000}, {1, 9000}, {700, 0}})}) {
    planner.plan(batch, batch.num_rows(), layout);
    EXPECT_TRUE(layout.passes.empty());
    EXPECT_EQ(layout.absorbed_rows, batch.num_rows());
    EXPECT_LE(std::ssize(layout.memory),
              planner.most_bytes(batch.num_rows(), batch.num_sequences(), batch.max_pages));
    std::set<int32_t> rows;  // out_row of every part, in all launches
    for (const DecodeLaunch& decode : layout.decodes) {
      const auto* first_part = array_at<int32_t>(layout, decode.first_part);
      for (int block = 0; block < kProcessors; ++block) {
        const auto* part = array_at<LatentDecodePart>(layout, decode.parts) + first_part[block];
        for (; part->rows > 0; ++part) {
          rows.insert(part->out_row);
          if (!part->more) break;
        }
      }
    }
    EXPECT_EQ(std::ssize(rows), batch.num_rows());
    EXPECT_EQ(layout.decodes.size() > 1, batch.num_rows() > 1);
  }
}

}  // namespace
}  // namespace fathom::cuda
