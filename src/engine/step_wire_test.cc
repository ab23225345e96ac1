// Steps and tokens on their way between processes: what is read equals what was written, and no
// bytes make a step that leads outside of a model.
#include "engine/step_wire.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "base/math.h"
#include "cache/latent_layout.h"
#include "engine/step_check.h"

namespace fathom {
namespace {

constexpr StepBounds kBounds = {
    .vocab_size = 300, .max_model_len = 1000, .num_pages = 40, .max_rows = 256, .max_drafts = 3};

int64_t below(std::mt19937& random, int64_t end) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
}

// A well-formed batch of up to 5 sequences; sometimes of none.
ForwardBatch random_batch(std::mt19937& random) {
  ForwardBatch batch;
  batch.query_start = {0};
  batch.max_pages = static_cast<int32_t>(1 + below(random, 4));
  const int64_t sequences = below(random, 6);
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t rows = 1 + below(random, 20);
    const int64_t context = below(random, batch.max_pages * kPageSize - rows);
    for (int64_t i = 0; i < rows; ++i) {
      if (below(random, 3) == 0) {
        if (below(random, 2) == 0) {
          batch.largest_only.push_back(static_cast<int32_t>(batch.logit_rows.size()));
        }
        batch.logit_rows.push_back(static_cast<int32_t>(batch.num_rows()));
      }
      batch.token_ids.push_back(static_cast<int32_t>(below(random, kBounds.vocab_size)));
      batch.positions.push_back(static_cast<int32_t>(context + i));
    }
    batch.query_start.push_back(static_cast<int32_t>(batch.num_rows()));
    batch.context_lens.push_back(static_cast<int32_t>(context));
    batch.prompt_lens.push_back(static_cast<int32_t>(below(random, 100)));
    batch.num_drafts.push_back(static_cast<int32_t>(below(random, std::min<int64_t>(rows, 4))));
    batch.mtp_lens.push_back(static_cast<int32_t>(context + below(random, 3)));
    const int64_t pages = ceil_div(context + rows, kPageSize);
    for (int64_t page = 0; page < batch.max_pages; ++page) {
      batch.block_tables.push_back(
          page < pages ? static_cast<int32_t>(below(random, kBounds.num_pages)) : -1);
    }
  }
  return batch;
}

// Rows with all that a row can have, and their memory.
struct RandomRows {
  RandomRows(std::mt19937& random, size_t count)
      : options(count), histories(count), masked(count), allowed(count), rows(count) {
    for (size_t i = 0; i < count; ++i) fill(random, i);
  }
  void fill(std::mt19937& random, size_t i) {
    SampleRow& row = rows[i];
    row.row = static_cast<int64_t>(i);
    row.position = (uint64_t{random()} << 32) + random();
    row.num_logprobs = static_cast<int>(below(random, 22)) - 1;
    if (below(random, 4) == 0) {
      row.given_id = static_cast<int32_t>(below(random, kBounds.vocab_size));
      return;
    }
    SampleOptions& own = options[i];
    own.temperature = 0.1 * static_cast<double>(below(random, 20));
    own.top_p = 1.0 / 3;
    own.min_p = 1e-300;
    own.top_k = below(random, 50) - 1;
    own.seed = (uint64_t{random()} << 32) + random();
    own.stream = random();
    for (int64_t n = below(random, 4); n > 0; --n) {
      own.logit_bias.emplace_back(static_cast<int32_t>(below(random, kBounds.vocab_size)),
                                  static_cast<float>(n) / 7);
    }
    row.options = &own;
    if (below(random, 2) == 0) {
      own.frequency_penalty = -0.25;
      for (int64_t n = below(random, 40); n > 0; --n) {
        const auto id = static_cast<int32_t>(below(random, kBounds.vocab_size));
        if (n % 2 == 0) histories[i].add_output(id);
        if (n % 2 != 0) histories[i].add_prompt({{id}});
      }
      row.history = &histories[i];
    }
    masked[i].resize(random() % 3, static_cast<int32_t>(below(random, kBounds.vocab_size)));
    row.masked = masked[i];
    if (below(random, 2) == 0) allowed[i].assign(10, random());
    row.allowed = allowed[i];
  }

  std::vector<SampleOptions> options;
  std::vector<TokenHistory> histories;
  std::vector<std::vector<int32_t>> masked;
  std::vector<std::vector<uint32_t>> allowed;
  std::vector<SampleRow> rows;
};

template <typename T>
std::vector<T> copy(std::span<const T> values) {
  return {values.begin(), values.end()};
}

void expect_equal(const ForwardBatch& a, const ForwardBatch& b) {
  EXPECT_EQ(a.token_ids, b.token_ids);
  EXPECT_EQ(a.positions, b.positions);
  EXPECT_EQ(a.query_start, b.query_start);
  EXPECT_EQ(a.context_lens, b.context_lens);
  EXPECT_EQ(a.prompt_lens, b.prompt_lens);
  EXPECT_EQ(a.block_tables, b.block_tables);
  EXPECT_EQ(a.num_drafts, b.num_drafts);
  EXPECT_EQ(a.mtp_lens, b.mtp_lens);
  EXPECT_EQ(a.max_pages, b.max_pages);
  EXPECT_EQ(a.logit_rows, b.logit_rows);
  EXPECT_EQ(a.largest_only, b.largest_only);
}

void expect_equal(const SampleRow& a, const SampleRow& b) {
  EXPECT_EQ(a.row, b.row);
  EXPECT_EQ(a.position, b.position);
  EXPECT_EQ(a.num_logprobs, b.num_logprobs);
  EXPECT_EQ(a.given_id, b.given_id);
  EXPECT_EQ(copy(a.masked), copy(b.masked));
  EXPECT_EQ(copy(a.allowed), copy(b.allowed));
  ASSERT_EQ(a.options == nullptr, b.options == nullptr);
  if (a.options == nullptr) return;
  EXPECT_EQ(a.options->temperature, b.options->temperature);
  EXPECT_EQ(a.options->top_p, b.options->top_p);
  EXPECT_EQ(a.options->min_p, b.options->min_p);
  EXPECT_EQ(a.options->top_k, b.options->top_k);
  EXPECT_EQ(a.options->repetition_penalty, b.options->repetition_penalty);
  EXPECT_EQ(a.options->presence_penalty, b.options->presence_penalty);
  EXPECT_EQ(a.options->frequency_penalty, b.options->frequency_penalty);
  EXPECT_EQ(a.options->logit_bias, b.options->logit_bias);
  EXPECT_EQ(a.options->seed, b.options->seed);
  EXPECT_EQ(a.options->stream, b.options->stream);
  if (!a.options->has_penalties()) return;
  ASSERT_NE(b.history, nullptr);
  const auto ours = a.history->entries(), theirs = b.history->entries();
  ASSERT_EQ(ours.size(), theirs.size());
  for (size_t i = 0; i < ours.size(); ++i) {
    EXPECT_EQ(ours[i].id, theirs[i].id);
    EXPECT_EQ(ours[i].output_count, theirs[i].output_count);
  }
}

Result<> read(ReceivedStep& step, std::span<const std::byte> record) {
  WireReader reader(record);
  const auto kind = static_cast<StepMessage>(reader.u32());
  if (kind != StepMessage::kStep && kind != StepMessage::kDraft) return invalid("not a step");
  return step.read(kind, reader);
}

int64_t num_logits(std::span<const ForwardBatch> lanes) {
  int64_t count = 0;
  for (const ForwardBatch& batch : lanes) count += std::ssize(batch.logit_rows);
  return count;
}

Result<> check(const ReceivedStep& step) {
  int lane = 0;
  for (const ForwardBatch& batch : step.lanes()) {
    FATHOM_RETURN_IF_ERROR(check_batch(batch, lane++, kBounds));
  }
  return check_rows(step.rows(), num_logits(step.lanes()), kBounds);
}

std::vector<std::byte> bytes_of(const WireWriter& writer) {
  return {writer.bytes().begin(), writer.bytes().end()};
}

TEST(StepWire, AStepArrivesAsItWasSent) {
  std::mt19937 random(1);
  ReceivedStep received(3);  // the same for all steps: nothing of an earlier one stays
  for (uint64_t number = 1; number <= 300; ++number) {
    const std::vector<ForwardBatch> lanes = {random_batch(random), random_batch(random),
                                             random_batch(random)};
    const std::vector<uint8_t> has_lane = {1, static_cast<uint8_t>(number % 2), 1};
    int64_t logits = 0;
    for (size_t lane = 0; lane < 3; ++lane) {
      if (has_lane[lane] != 0) logits += std::ssize(lanes[lane].logit_rows);
    }
    const RandomRows rows(random, static_cast<size_t>(logits));
    WireWriter writer;
    write_step({.id = {7, number}, .lanes = lanes, .has_lane = has_lane, .rows = rows.rows},
               writer);
    const auto done = read(received, writer.bytes());
    ASSERT_TRUE(done) << done.error().message;
    EXPECT_EQ(received.id(), (StepId{7, number}));
    ASSERT_EQ(received.lanes().size(), 3);
    for (size_t lane = 0; lane < 3; ++lane) {
      ForwardBatch none;
      none.query_start = {0};
      expect_equal(has_lane[lane] != 0 ? lanes[lane] : none, received.lanes()[lane]);
    }
    ASSERT_EQ(received.rows().size(), rows.rows.size());
    for (size_t i = 0; i < rows.rows.size(); ++i) expect_equal(rows.rows[i], received.rows()[i]);
    const auto checked = check(received);
    ASSERT_TRUE(checked) << checked.error().message;
  }
}

TEST(StepWire, AStepThatDraftsArrivesWithItsStates) {
  std::mt19937 random(6);
  ReceivedStep received(2);
  for (uint64_t number = 1; number <= 100; ++number) {
    const std::vector<ForwardBatch> lanes = {random_batch(random), random_batch(random)};
    const std::vector<uint8_t> has_lane = {1, static_cast<uint8_t>(number % 2)};
    std::vector<std::vector<int32_t>> states(2);
    for (auto& of_lane : states) {
      of_lane.resize(1 + random() % 4, static_cast<int32_t>(random() % 9));
    }
    StepPart part = {.id = {7, number}, .lanes = lanes, .has_lane = has_lane};
    // Every third is a step of the model between two that draft.
    if (number % 3 != 0) part.states = states;
    WireWriter writer;
    write_step(part, writer);
    const auto done = read(received, writer.bytes());
    ASSERT_TRUE(done) << done.error().message;
    ASSERT_EQ(received.states().size(), part.states.size());
    for (size_t lane = 0; lane < part.states.size(); ++lane) {
      EXPECT_EQ(received.lanes()[lane].token_ids,
                has_lane[lane] != 0 ? lanes[lane].token_ids : std::vector<int32_t>());
      EXPECT_EQ(received.states()[lane],
                has_lane[lane] != 0 ? states[lane] : std::vector<int32_t>());
    }
    const uint64_t planned = plan_hash(part);
    states[0].back() ^= 1;
    EXPECT_EQ(plan_hash(part) != planned, !part.states.empty());
  }
}

TEST(StepWire, AnotherPlanIsNamedInTheStepWhereItHappens) {
  std::mt19937 random(2);
  std::vector<ForwardBatch> lanes = {random_batch(random)};
  while (lanes[0].num_rows() == 0) lanes[0] = random_batch(random);
  const std::vector<uint8_t> has_lane = {1};
  const uint64_t planned = plan_hash({.lanes = lanes, .has_lane = has_lane});
  const auto expect_other = [&](auto change) {
    std::vector<ForwardBatch> other = lanes;
    change(other[0]);
    EXPECT_NE(plan_hash({.lanes = other, .has_lane = has_lane}), planned);
  };
  expect_other([](ForwardBatch& batch) { batch.token_ids.back() ^= 1; });
  expect_other([](ForwardBatch& batch) { ++batch.positions[0]; });
  expect_other([](ForwardBatch& batch) { ++batch.query_start.back(); });
  expect_other([](ForwardBatch& batch) { ++batch.context_lens[0]; });
  expect_other([](ForwardBatch& batch) { ++batch.prompt_lens[0]; });
  expect_other([](ForwardBatch& batch) { --batch.block_tables[0]; });
  expect_other([](ForwardBatch& batch) { ++batch.max_pages; });
  expect_other([](ForwardBatch& batch) { ++batch.num_drafts[0]; });
  expect_other([](ForwardBatch& batch) { ++batch.mtp_lens[0]; });
  expect_other([](ForwardBatch& batch) { batch.logit_rows.push_back(0); });
  expect_other([](ForwardBatch& batch) { batch.largest_only.push_back(0); });
  // The last id moves from one array to the next.
  expect_other([](ForwardBatch& batch) {
    batch.positions.insert(batch.positions.begin(), batch.token_ids.back());
    batch.token_ids.pop_back();
  });

  WireWriter writer;
  write_step({.id = {7, 41}, .lanes = lanes, .has_lane = has_lane}, writer);
  std::vector<std::byte> record = bytes_of(writer);
  // Word, epoch, number, hash, experts, moves, lanes, flag, max_pages, number of ids: then the
  // first id.
  record[4 + 6 * 8 + 4 + 4 + 8] ^= std::byte{1};
  ReceivedStep received(1);
  const auto done = read(received, record);
  ASSERT_FALSE(done);
  EXPECT_NE(done.error().message.find("the plan of step 41 has hash "), std::string::npos)
      << done.error().message;
}

TEST(StepWire, ExpertsMoveWithAStepAndItsHash) {
  const ExpertTable from = ExpertTable::contiguous(4, 6, 2);
  ExpertLists lists = from.lists();
  std::swap(lists[1][0][2], lists[1][1][0]);
  lists[3][0].push_back(5);
  const ExpertTable to = *ExpertTable::create(6, 2, lists, "");
  const std::vector<ExpertMove> moves = moves_between(from, to);
  ASSERT_EQ(moves.size(), 2);
  EXPECT_EQ(moves[0], (ExpertMove{1, {{0, 1, 3}, {2, 4, 5}}}));
  EXPECT_EQ(moves[1], (ExpertMove{3, {{0, 1, 2, 5}, {3, 4, 5}}}));
  EXPECT_TRUE(moves_between(to, to).empty());

  const std::vector<ForwardBatch> lanes(1);
  const std::vector<uint8_t> has_lane = {0};
  StepPart part = {.id = {7, 1},
                   .experts = to.fingerprint(),
                   .moves = moves,
                   .lanes = lanes,
                   .has_lane = has_lane};
  WireWriter writer;
  write_step(part, writer);
  ReceivedStep received(1);
  const auto done = read(received, writer.bytes());
  ASSERT_TRUE(done) << done.error().message;
  EXPECT_EQ(received.experts(), to.fingerprint());
  const auto applied = apply_moves(from, received.moves());
  ASSERT_TRUE(applied) << applied.error().message;
  EXPECT_EQ(*applied, to);
  EXPECT_EQ(applied->fingerprint(), to.fingerprint());
  EXPECT_NE(from.fingerprint(), to.fingerprint());

  const uint64_t planned = plan_hash(part);
  part.experts ^= 1;
  EXPECT_NE(plan_hash(part), planned);
  part.experts ^= 1;
  std::vector<ExpertMove> others = moves;
  others[1].ranks[1][0] = 4;
  part.moves = others;
  EXPECT_NE(plan_hash(part), planned);
  part.moves = std::span(moves).first(1);
  EXPECT_NE(plan_hash(part), planned);

  others[0].layer = 4;
  EXPECT_EQ(apply_moves(from, others).error().message, "experts of layer 4 move, there are 4");
  others[0].layer = 0;
  others[0].ranks[0][0] = 6;
  EXPECT_EQ(apply_moves(from, others).error().message,
            "experts move: layers[0][0][0] is 6, experts are 0 to 5");
}

TEST(StepWire, AnotherNumberOfLanesIsRefused) {
  WireWriter writer;
  const std::vector<ForwardBatch> lanes(2);
  write_step({.id = {7, 1}, .lanes = lanes, .has_lane = std::vector<uint8_t>{0, 0}}, writer);
  ReceivedStep received(3);
  const auto done = read(received, writer.bytes());
  ASSERT_FALSE(done);
  EXPECT_EQ(done.error().message, "a step of 2 lanes came, there are 3");
}

// Each cut, and many changed bytes: an error, or a step that check() then judges.
TEST(StepWire, HostileBytesGiveAnErrorOrAWellFormedStep) {
  std::mt19937 random(3);
  ReceivedStep received(2);
  const std::vector<std::vector<int32_t>> states = {{0, 1}, {}};
  for (int round = 0; round < 60; ++round) {
    const std::vector<ForwardBatch> lanes = {random_batch(random), random_batch(random)};
    const RandomRows rows(random, static_cast<size_t>(num_logits(lanes)));
    WireWriter writer;
    write_step({.id = {7, 1},
                .lanes = lanes,
                .states = round % 2 == 0 ? std::span<const std::vector<int32_t>>() : states,
                .has_lane = std::vector<uint8_t>{1, 1},
                .rows = rows.rows},
               writer);
    const std::vector<std::byte> record = bytes_of(writer);
    for (size_t size = 0; size < record.size(); size += 1 + random() % 9) {
      EXPECT_FALSE(read(received, std::span(record).first(size))) << size;
    }
    std::vector<std::byte> longer = record;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(read(received, longer));
    for (int change = 0; change < 300; ++change) {
      std::vector<std::byte> changed = record;
      for (uint64_t n = 1 + random() % 3; n > 0; --n) {
        changed[random() % changed.size()] = static_cast<std::byte>(random());
      }
      if (read(received, changed)) (void)check(received);
    }
  }
}

// Whether a model may read this batch, in other words than check_batch().
bool stays_inside(const ForwardBatch& batch) {
  const auto rows = static_cast<size_t>(batch.num_rows());
  const auto sequences = static_cast<size_t>(batch.num_sequences());
  if (rows > 256 || batch.positions.size() != rows || batch.query_start.size() != sequences + 1 ||
      batch.prompt_lens.size() != sequences ||
      batch.block_tables.size() != sequences * static_cast<size_t>(batch.max_pages)) {
    return false;
  }
  size_t row = 0;
  for (size_t s = 0; s < sequences; ++s) {
    if (batch.query_start[s] != static_cast<int32_t>(row)) return false;
    for (int32_t position = batch.context_lens[s];
         row < static_cast<size_t>(batch.query_start[s + 1]); ++row, ++position) {
      if (row >= rows || position < 0 || position >= 1000 || batch.positions[row] != position ||
          position / 64 >= batch.max_pages || batch.token_ids[row] < 0 ||
          batch.token_ids[row] >= 300) {
        return false;
      }
      for (int32_t page = 0; page <= position / 64; ++page) {
        const int32_t id =
            batch
                .block_tables[s * static_cast<size_t>(batch.max_pages) + static_cast<size_t>(page)];
        if (id < 0 || id >= 40) return false;
      }
    }
  }
  if (batch.num_drafts.size() != sequences || batch.mtp_lens.size() != sequences) return false;
  for (size_t s = 0; s < sequences; ++s) {
    const int32_t own = batch.query_start[s + 1] - batch.query_start[s];
    if (batch.num_drafts[s] < 0 || batch.num_drafts[s] > 3 || batch.num_drafts[s] >= own ||
        batch.mtp_lens[s] < batch.context_lens[s]) {
      return false;
    }
  }
  for (size_t i = 0; i < batch.logit_rows.size(); ++i) {
    if (batch.logit_rows[i] < 0 || batch.logit_rows[i] >= static_cast<int32_t>(rows)) return false;
  }
  for (size_t i = 0; i < batch.largest_only.size(); ++i) {
    const int32_t index = batch.largest_only[i];
    if (index < 0 || index >= static_cast<int32_t>(batch.logit_rows.size())) return false;
  }
  return row == rows;
}

// Single numbers of well-formed batches are replaced by others: what passes is inside, and the
// well-formed ones pass.
TEST(StepCheck, WhatPassesStaysInsideTheModel) {
  std::mt19937 random(4);
  int refused = 0;
  for (int round = 0; round < 20'000; ++round) {
    ForwardBatch batch = random_batch(random);
    ASSERT_TRUE(check_batch(batch, 0, kBounds));
    ASSERT_TRUE(stays_inside(batch));
    std::vector<int32_t>* const arrays[] = {
        &batch.token_ids,    &batch.positions,    &batch.query_start,
        &batch.context_lens, &batch.block_tables, &batch.num_drafts,
        &batch.mtp_lens,     &batch.logit_rows,   &batch.largest_only};
    std::vector<int32_t>& array = *arrays[random() % std::size(arrays)];
    const int32_t values[] = {-1,
                              0,
                              1,
                              39,
                              40,
                              299,
                              300,
                              1000,
                              std::numeric_limits<int32_t>::max(),
                              std::numeric_limits<int32_t>::min()};
    const int32_t value = values[random() % std::size(values)];
    const uint64_t kind = random() % 6;
    if (kind == 0) {
      array.push_back(value);
    } else if (kind == 1) {
      batch.max_pages = value;
    } else if (!array.empty()) {
      array[random() % array.size()] = value;
    }
    const bool passes = check_batch(batch, 0, kBounds).has_value();
    if (passes) {
      EXPECT_TRUE(stays_inside(batch));
    }
    refused += passes ? 0 : 1;
  }
  EXPECT_GT(refused, 10'000);
}

// A model without the layer reads neither array.
TEST(StepCheck, DraftsAreCheckedWhereThereAreSome) {
  ForwardBatch batch;
  batch.token_ids = {5, 6};
  batch.positions = {7, 8};
  batch.query_start = {0, 2};
  batch.context_lens = {7};
  batch.prompt_lens = {1};
  batch.block_tables = {0};
  batch.max_pages = 1;
  StepBounds without = kBounds;
  without.max_drafts = 0;
  EXPECT_TRUE(check_batch(batch, 0, without));
  EXPECT_FALSE(check_batch(batch, 0, kBounds));
  batch.num_drafts = {1};
  batch.mtp_lens = {7};
  EXPECT_TRUE(check_batch(batch, 0, kBounds));
  batch.mtp_lens = {6};
  EXPECT_EQ(check_batch(batch, 3, kBounds).error().message,
            "lane 3: mtp_lens is 6, must be at least context_lens, 7");
  batch.mtp_lens = {7};
  batch.num_drafts = {2};
  EXPECT_EQ(check_batch(batch, 3, kBounds).error().message,
            "lane 3: num_drafts is 2, must be at least 0 and below 2");
}

TEST(StepCheck, AStepThatDraftsGoesOnFromTheOneBefore) {
  ForwardBatch batch;
  batch.token_ids = {5, 6};
  batch.positions = batch.context_lens = {7, 9};
  batch.query_start = {0, 1, 2};
  batch.prompt_lens = {1, 1};
  batch.block_tables = {0, 1};
  batch.max_pages = 1;
  batch.logit_rows = {0, 1};
  EXPECT_TRUE(check_draft_batch(batch, {}, 0, 0, kBounds));
  StepBounds without = kBounds;
  without.max_drafts = 0;
  EXPECT_EQ(check_draft_batch(batch, {}, 0, 2, without).error().message,
            "lane 2: a step drafts, and no MTP layer is loaded");
  const std::vector<int32_t> states = {0, 2};
  EXPECT_TRUE(check_draft_batch(batch, states, 3, 0, kBounds));
  EXPECT_EQ(check_draft_batch(batch, states, 2, 1, kBounds).error().message,
            "lane 1: a state is 2, must be at least 0 and below 2");
  const std::span<const int32_t> one = std::span(states).first(1);
  EXPECT_EQ(check_draft_batch(batch, one, 3, 1, kBounds).error().message,
            "lane 1: states has 1 entries, must have 2");
  batch.logit_rows = {1};
  EXPECT_FALSE(check_draft_batch(batch, states, 3, 0, kBounds));
  batch.logit_rows = {0, 1};
  batch.token_ids[1] = 300;
  EXPECT_FALSE(check_draft_batch(batch, states, 3, 0, kBounds));
  batch.token_ids[1] = 6;
  batch.positions[0] = batch.context_lens[0] = 0;
  EXPECT_EQ(check_draft_batch(batch, {}, 0, 0, kBounds).error().message,
            "lane 0: a draft follows a sequence's first token");
}

TEST(StepCheck, RowsOutsideOfTheVocabularyAreRefused) {
  std::mt19937 random(5);
  const SampleOptions plain;
  SampleOptions biased, punished, cold, odd;
  biased.logit_bias = {{300, 1.0f}};
  punished.presence_penalty = 1;
  cold.temperature = -1;
  odd.top_p = std::numeric_limits<double>::quiet_NaN();
  TokenHistory history;
  history.add_prompt({{300}});
  const int32_t masked[] = {-1};
  const std::vector<uint32_t> words(11);
  const SampleRow rows[] = {{},
                            {.given_id = 300},
                            {.options = &plain, .num_logprobs = -2},
                            {.options = &plain, .num_logprobs = 301},
                            {.options = &plain, .masked = masked},
                            {.options = &plain, .allowed = words},
                            {.options = &biased},
                            {.options = &punished},
                            {.options = &punished, .history = &history},
                            {.options = &cold},
                            {.options = &odd}};
  for (const SampleRow& row : rows) EXPECT_FALSE(check_rows({&row, 1}, 1, kBounds));
  const SampleRow good = {.options = &plain, .num_logprobs = 20};
  EXPECT_TRUE(check_rows({&good, 1}, 1, kBounds));
  EXPECT_FALSE(check_rows({&good, 1}, 2, kBounds));
}

TEST(TokenWire, TokensArriveWithTheirBits) {
  std::vector<SampledToken> tokens(4);
  tokens[0] = {7, -0.1f, {{3, -0.5f}, {9, -std::numeric_limits<float>::infinity()}}};
  tokens[1] = {-1, std::numeric_limits<float>::quiet_NaN(), {}};
  tokens[2] = {299, -0.0f, {{0, 1e-45f}}};
  WireWriter writer;
  write_result({5, 6}, tokens, {}, writer);
  std::vector<SampledToken> read(4);
  read[3].top.resize(3);  // of an earlier step
  const auto done = read_result(writer.bytes(), {5, 6}, read, {});
  ASSERT_TRUE(done) << done.error().message;
  for (size_t i = 0; i < tokens.size(); ++i) {
    EXPECT_EQ(read[i].id, tokens[i].id);
    EXPECT_EQ(std::bit_cast<uint32_t>(read[i].logprob), std::bit_cast<uint32_t>(tokens[i].logprob));
    EXPECT_EQ(read[i].top, tokens[i].top);
  }
}

TEST(TokenWire, ExpertsLoadsArrive) {
  const std::vector<int32_t> counts = {0, 3, 1 << 30};
  WireWriter writer;
  write_result({5, 6}, {}, counts, writer);
  std::vector<int32_t> read(3, -1), fewer(2);
  ASSERT_TRUE(read_result(writer.bytes(), {5, 6}, {}, read));
  EXPECT_EQ(read, counts);
  EXPECT_EQ(read_result(writer.bytes(), {5, 6}, {}, fewer).error().message,
            "step 6 has 3 experts' counts, awaited are 2");
  writer.clear();
  write_result({5, 6}, {}, std::vector<int32_t>{1, -1, 1}, writer);
  EXPECT_EQ(read_result(writer.bytes(), {5, 6}, {}, read).error().message,
            "an expert has -1 tokens");
}

TEST(TokenWire, AnotherStepsTokensAreRefused) {
  std::vector<SampledToken> tokens(2);
  WireWriter writer;
  write_result({5, 6}, tokens, {}, writer);
  EXPECT_EQ(read_result(writer.bytes(), {5, 7}, tokens, {}).error().message,
            "results of step 6 of epoch 5 came, awaited are those of step 7 of 5");
  EXPECT_EQ(read_result(writer.bytes(), {4, 6}, tokens, {}).error().message,
            "results of step 6 of epoch 5 came, awaited are those of step 6 of 4");
  EXPECT_EQ(read_result(writer.bytes(), {5, 6}, std::span(tokens).first(1), {}).error().message,
            "step 6 has 2 tokens, awaited are 1");
  for (size_t size = 0; size < writer.bytes().size(); ++size) {
    EXPECT_FALSE(read_result(writer.bytes().first(size), {5, 6}, tokens, {}));
  }
}

TEST(PageCopyWire, ACopyArrivesAndAShorterOneIsRefused) {
  WireWriter writer;
  const PageCopy copy{1, 22, 3, 44};
  write_page_copy(copy, writer);
  WireReader reader(writer.bytes());
  EXPECT_EQ(reader.u32(), static_cast<uint32_t>(StepMessage::kCopyPage));
  EXPECT_EQ(*read_page_copy(reader), copy);
  WireReader cut(writer.bytes().subspan(4, 12));
  EXPECT_FALSE(read_page_copy(cut));
}

}  // namespace
}  // namespace fathom
